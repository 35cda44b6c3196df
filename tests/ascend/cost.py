# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""A cost model: walks the final HIVM of a launch as one of its programs would, and counts.

The scalar part (addresses, loop bounds, lengths read from global memory) is evaluated with the
launch's own arguments; what the cube and the vector units do is only counted.  A branch on a value
that the vector unit computed is taken; a loop that it bounds runs once; a copy that it bounds is of
the whole tile.  Of a long loop some turns are walked.

The time is an ESTIMATE, from public rates and the assumptions below.  Within the cube's half or the
vectors' half of a program its units work at the same time, and the slowest decides; a copy takes
its bytes, and never less than `copy`; what is read again comes out of the cache; a vector operation
takes its turns of 256 bytes, and the start of one that waits for the last.  Where the workspace
between the two halves has one slot they take turns, and every hand-off is waited for.  Where it has
n they overlap, and a tile takes no less than an n-th of both halves' work and of a hand-off; a half
that stops all of its units for a hand-off waits for it whatever the slots.  A launch has a head:
its cores begin and are seen to have ended.

Heads, turns, what a core alone draws and what of its peak the cube keeps up come from times that
others measured (forms.py has the programs, and holds the model to them).
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from . import lint

BYTES = {"i1": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8, "f16": 2, "bf16": 2, "f32": 4}


@dataclass(frozen=True)
class Card:
    """One die: cube cores (each with two vector cores), Hz, bytes a second of its memory."""

    name: str
    cores: int
    clock: float
    memory: float

    @property
    def cube(self) -> float:
        """Peak, 16-bit operations a second of all cores."""
        return self.cores * 2 * 16**3 * self.clock


A3 = Card("Atlas A3", 24, 1.85e9, 1.6e12)
# its memory: what reads the weights of small batches and adds large tensors
B4 = Card("910B4", 20, 1.65e9, 1.03e12)
B2 = Card("910B2", 24, 1.8e9, 1.6e12)
CARDS = (A3, B4, B2)
card = A3

MEMORY, CUBE = A3.memory, A3.cube  # the floor's rates
_SUSTAINED = 0.84  # of the cube's peak, by large products: 208 to 242 TFLOPS of 270
_REPEAT = 256  # bytes of an operand that a turn of a vector unit takes
# cycles of a turn, by the beginning of the operation's name; of all others 1
_CYCLES = {
    r"vdiv|sort": 4,
    r"v(add|sub|mul|max|min|cmp|sel|and|or|xor)_|vexp|vln|vsqrt|vrsqrt|.*reduce": 2,
}
_START = 18  # cycles from an operation to the next, which waits for it
# bytes a second that a core alone can draw
_CUBE_CORE, _VECTOR_CORE = 135e9, 101e9
_CACHE = 96 * 2**20  # bytes of a tensor that is still there when it is read again
# of a launch, seconds: vector cores alone, the cube alone; both are assumed to add up
HEADS = {"vectors": 3e-6, "cube": 4e-6, "mixed": 7e-6}
# assumed; none was measured here
_SCALAR = 1e-7  # seconds of one load from global memory by the scalar unit
_STEPS = 5_000_000
_WALKED = 16  # turns of a long loop, which stand for the others
_GOLDEN = (5**0.5 - 1) / 2  # apart by it, modulo 1: no period of the loop's is met


@dataclass(frozen=True)
class Rates:
    """Assumed as well, until calibrate.py has measured them on a card; in seconds but the first."""

    cached: float = 3  # the cache, where workspaces stay, is so many times as fast as the memory
    copy: float = 8e-8  # that a copy takes at least, one after the other
    hand_off: float = 1.75e-6  # from the cube to the vectors, or back
    gap: float = 3.5e-6  # from a launch of a captured graph to the next, if the kernel does nothing
    host: float = 2.4e-5  # of the host for a launch that is not captured
    source: str = "assumed"


rates = Rates()


def use(name: str) -> Card:
    """From now on the launches are of this card."""
    global card
    card = next(x for x in CARDS if x.name == name)
    return card


def take(path: Path) -> None:
    """From now on the rates of this file, which calibrate.py wrote."""
    global rates
    rates = Rates(**json.loads(path.read_text()))


@dataclass
class Memory:
    """What is known of a memref value; `tensor` and `offset` of an argument's memory."""

    extents: list[int | None]
    element: int
    space: str
    tensor: torch.Tensor | None = None
    offset: int | None = None
    workspace: bool = False
    home: tuple[int, int] | None = None  # address and bytes of the memory that an argument is in

    @property
    def count(self) -> int:
        return math.prod(0 if extent is None else max(extent, 0) for extent in self.extents)


_Home = tuple[int, int] | None
_Copy = tuple[str, bool, int, _Home]


@dataclass
class Cost:
    """Of one half of one program: copies by (direction, workspace or not, bytes, whose memory),
    multiply-adds, vector bytes by element width and the cycles they take, loads by the scalar unit,
    waits for the other half, tiles that are waited for, and stops of all units."""

    share: int = 1  # the vector units of a mixed kernel draw two at a time
    of_cube: bool = False
    copies: Counter[_Copy] = field(default_factory=Counter)
    multiplied: int = 0
    vector: Counter[int] = field(default_factory=Counter)
    cycles: int = 0
    scalar_loads: int = 0
    waits: int = 0
    rounds: int = 0
    stops: int = 0

    def copied(self, direction: str) -> int:
        return sum(n * size for (way, _, size, _), n in self.copies.items() if way == direction)

    def copy(self, direction: str, there: Memory, tile: Memory) -> None:
        key = direction, there.workspace, tile.count * tile.element, there.home
        self.copies[key] += 1

    def to_memory(self, again: Mapping[_Home, float], stored: bool) -> float:
        """Bytes that go through the memory, those `stored` or not."""
        total = 0.0
        for (direction, workspace, size, home), count in self.copies.items():
            share = 1 - again.get(home, 0.0) if direction == "loads" else float(stored)
            total += 0.0 if workspace else count * size * share
        return total * self.share

    def vector_operation(self, name: str, sizes: list[int]) -> None:
        """`sizes`: bytes of its operands; a cast is as long as the wider one."""
        widest = max(sizes[:2]) if name.startswith("vcast") else sizes[0]
        self.cycles += _START + -(-widest // _REPEAT) * _turn(name)

    def add(self, other: Cost, times: float) -> None:
        for mine, theirs in ((self.copies, other.copies), (self.vector, other.vector)):
            for key, count in theirs.items():
                mine[key] += round(count * times)
        self.multiplied += round(other.multiplied * times)
        self.cycles += round(other.cycles * times)
        self.scalar_loads += round(other.scalar_loads * times)
        self.waits += round(other.waits * times)
        self.rounds += round(other.rounds * times)
        self.stops += round(other.stops * times)

    def units(self, programs: int, again: Mapping[_Home, float]) -> dict[str, float]:
        """Seconds by unit, while so many programs share the memory's rate."""
        alone = _CUBE_CORE if self.of_cube else _VECTOR_CORE
        rate = min(card.memory / programs / self.share, alone)
        found = {
            "cube": 2 * self.multiplied * card.cores / (card.cube * _SUSTAINED),
            "vector": self.cycles / card.clock,
            "scalar loads": self.scalar_loads * _SCALAR,
        }
        for (direction, workspace, size, home), count in self.copies.items():
            cached = 1.0 if workspace else again.get(home, 0.0) if direction == "loads" else 0.0
            seconds = size / rate * (1 - cached + cached / rates.cached)
            found[direction] = found.get(direction, 0.0) + count * max(seconds, rates.copy)
        return found


def read_again(walked: list[list[Cost]], programs: int) -> dict[_Home, float]:
    """The share of a tensor's loads that come out of the cache: those after the first of each
    byte, of a tensor that fits there.  `walked` are programs that stand for all."""
    loaded: Counter[_Home] = Counter()
    for half in (half for halves in walked for half in halves):
        for (direction, _, size, home), count in half.copies.items():
            if direction == "loads" and home is not None:
                loaded[home] += count * size * half.share
    return {
        home: max(0.0, 1 - home[1] * len(walked) / (total * programs))
        for home, total in loaded.items()
        if home is not None and total and home[1] <= _CACHE
    }


def head(halves: list[Cost]) -> float:
    """Seconds of a launch without its work."""
    kinds = {half.of_cube for half in halves}
    return HEADS["mixed" if len(kinds) == 2 else "cube" if kinds == {True} else "vectors"]


def in_graph(launches: list[float]) -> float:
    """Of launches of a captured graph; the gap is a vector kernel's, with its head."""
    return sum(launches) + len(launches) * (rates.gap - HEADS["vectors"])


def slots(hivm: str) -> int:
    """Tiles that cube and vector of a core have under way between them: the fewest slots of those
    buffers of the workspace that have several, which are taken in slices; 1 if none has, and each
    waits for the other, tile by tile; 0 where nothing is handed over."""
    several = []
    argument = r"(%arg\d+): memref<[^{]*\{[^{}]*hacc\.arg_type<workspace>"
    for function in lint.functions(hivm):
        if re.match(r"@\w+_mix_aic\(", function) is None:
            continue
        for workspace in re.findall(argument, function):
            for view in re.findall(rf"(%\S+) = memref\.view {workspace}\[", function):
                slice_ = rf"memref\.subview {view}\[%\S+, .*?\] \[1, .*?: memref<(\d+)x"
                several += [int(sliced[1]) for sliced in re.finditer(slice_, function)]
    return min(several, default=int(lint.takes_turns(hivm)))


def seconds(
    halves: list[Cost], slots: int, programs: int, again: Mapping[_Home, float]
) -> tuple[float, str]:
    """Of a program's work, and what binds it.  The halves of a mixed one: cube's, vectors', with
    so many tiles under way between them, or none that is handed over.
    What all of them load goes through one memory, and what they store where the cache does not
    hold it all."""
    homes = {home for half in halves for *_, home in half.copies if home is not None}
    stored = sum(size for _, size in homes) >= _CACHE
    bytes_ = sum(half.to_memory(again, stored) for half in halves)
    memory = programs * bytes_ / card.memory
    return max(_apart(halves, slots, programs, again), (memory, "memory"))


def _apart(
    halves: list[Cost], slots: int, programs: int, again: Mapping[_Home, float]
) -> tuple[float, str]:
    """Of a program, by what its own units and hand-offs take."""
    slowest = []
    for half in halves:
        units = half.units(programs, again)
        unit = max(units, key=lambda name: units[name])
        slowest.append((units[unit], unit))
    if len(halves) == 1:
        return slowest[0]
    waits = max(half.waits for half in halves)
    # by itself, while the other is ahead, and until the first tile has come and gone
    alone = max(
        (seconds + half.stops * rates.hand_off, unit)
        for half, (seconds, unit) in zip(halves, slowest, strict=True)
    )
    alone = alone[0] + min(waits, 2) * rates.hand_off, alone[1]
    if not slots:
        return alone
    both = sum(each for each, _ in slowest)
    of_slot = waits if slots == 1 else max(half.rounds for half in halves)
    waited = of_slot * rates.hand_off
    binds = "waiting" if waited > both else f"turns, {max(slowest)[1]}"
    return max(alone, ((both + waited) / slots, binds))


@dataclass
class _Line:
    kind: str
    results: list[str]
    text: str
    operands: list[str]
    body: list[_Line] = field(default_factory=list)
    other: list[_Line] = field(default_factory=list)


def _parse(lines: list[str]) -> list[_Line]:
    """Nested statements of a function's body."""
    root: list[_Line] = []
    stack: list[tuple[str, list[_Line]]] = [("", root)]
    for line in lines:
        code = line.strip()
        match = re.match(r"(?:(%[\w, %-]+?)(?::\d+)? = )?([\w.]+)", code)
        if code.startswith("} else {"):
            holder = stack[-2][1][-1]
            stack[-1] = ("", holder.other)
        elif code.startswith("}"):
            if len(stack) > 1:
                stack.pop()
        elif match:
            results = [x.strip() for x in match[1].split(",")] if match[1] else []
            count = re.match(r"%\w+:(\d+) = ", code)
            if count:
                results = [f"{results[0]}#{i}" for i in range(int(count[1]))]
            text = code[match.end() :]
            operands = re.findall(r"%[\w#-]+", text)
            statement = _Line(match[2], results, text, operands)
            stack[-1][1].append(statement)
            if code.endswith("{"):
                stack.append(("", statement.body))
    return root


_WAIT = "hivm.hir.sync_block_wait"
by_vectors: int | None = None  # what a number that the vectors made is taken for, if for any


class _Walker:
    def __init__(self, hivm: str, cost: Cost, block: int) -> None:
        self.cost, self.block, self.steps = cost, block, 0
        self.tiles = 0  # of loops side by side, which wait for the same ones
        self.maps: dict[str, tuple[list[str], list[Any]]] = {}
        for name, dims, symbols, results in re.findall(
            r"^(#map\d*) = affine_map<\(([^)]*)\)(?:\[([^\]]*)\])? -> \((.*)\)>$", hivm, re.M
        ):
            names = [x.strip() for x in f"{dims},{symbols}".split(",") if x.strip()]
            python = results.replace("floordiv", "//").replace(" mod ", " % ")
            python = re.sub(r"(\([^()]*\)|\w+) ceildiv (\w+)", r"(-(-\1 // \2))", python)
            self.maps[name] = (names, compile(f"({python},)", name, "eval"))

    def run(self, statements: list[_Line], env: dict[str, Any]) -> list[Any]:
        """The values that the region yields."""
        outside, self.tiles = self.tiles, 0
        values = self.through(statements, env)
        self.cost.rounds += self.tiles
        self.tiles = outside
        return values

    def through(self, statements: list[_Line], env: dict[str, Any]) -> list[Any]:
        for s in statements:
            self.steps += 1
            if self.steps > _STEPS:
                raise TimeoutError("the program is too long to walk")
            if s.kind == "scf.yield":
                return [env.get(x) for x in s.operands]
            values = self.step(s, env)
            if s.results:
                env.update(zip(s.results, values, strict=False))
        return []

    def number(self, word: str, env: dict[str, Any]) -> int | None:
        word = word.strip()
        return env.get(word) if word.startswith("%") else int(word)

    def step(self, s: _Line, env: dict[str, Any]) -> list[Any]:
        given = [env.get(x) for x in s.operands]
        kind = s.kind
        if kind == "arith.constant":
            return [_constant(s.text)]
        if kind == "scf.for":
            return self.loop(s, env)
        if kind == "scf.if":
            taken = s.body if given[0] is None or given[0] else s.other
            return self.run(taken, env)
        if kind in ("func.call", "call"):
            self.call(s, env)
            return []
        if kind.startswith("affine."):
            return [self.affine(s, env)]
        if kind.startswith("memref."):
            return [self.memref(s, env)]
        if kind == "hivm.hir.pointer_cast":
            return [_type(s.text)]
        if kind == _WAIT:
            self.cost.waits += 1
            return []
        if kind == "hivm.hir.get_block_idx":
            return [self.block]
        if kind == "hivm.hir.get_sub_block_idx":
            return [0]
        if kind.startswith("arith."):
            return [_arithmetic(kind, s.text, given)]
        return [None] * len(s.results)

    def loop(self, s: _Line, env: dict[str, Any]) -> list[Any]:
        header = re.match(r" (%[\w-]+) = (%[\w#-]+) to (%[\w#-]+) step (%[\w#-]+)", s.text)
        if header is None:
            return []
        low, high, step = (env.get(header[i]) for i in (2, 3, 4))
        waits = any(x.kind == _WAIT for x in s.body)
        stops = sum(x.kind == "hivm.hir.pipe_barrier" and "<PIPE_ALL>" in x.text for x in s.body)
        carried = re.findall(r"(%[\w-]+) = (%[\w#-]+)", s.text[header.end() :].partition("->")[0])
        state = [env.get(initial) for _, initial in carried]
        if None in (low, high, step):
            low, high, step = 0, 1, 1

        def once(at: int) -> None:
            nonlocal state
            env[header[1]] = at
            env.update(zip((name for name, _ in carried), state, strict=True))
            state = self.run(s.body, env) or state
            self.cost.stops += stops

        turns = range(low, high, max(step, 1))
        self.repeat(turns, once)
        self.tiles = max(self.tiles, waits * len(turns))
        return state

    def repeat(self, turns: range, once: Callable[[int], None]) -> None:
        """Some turns of a loop stand for all."""
        walked: Sequence[int] = turns
        if len(turns) > 2 * _WALKED:
            places = sorted((i + 0.5) * _GOLDEN % 1 for i in range(_WALKED))
            walked = [turns[int(len(turns) * place)] for place in places]
        whole, self.cost = self.cost, Cost(self.cost.share, self.cost.of_cube)
        for at in walked:
            once(at)
        if walked:
            whole.add(self.cost, len(turns) / len(walked))
        self.cost = whole

    def affine(self, s: _Line, env: dict[str, Any]) -> int | None:
        match = re.match(r" (#map\d*)(\([^)]*\))?(\[[^\]]*\])?", s.text)
        if match is None:
            return None
        names, code = self.maps[match[1]]
        values = [env.get(x) for x in re.findall(r"%[\w#-]+", f"{match[2]} {match[3]}")]
        if None in values:
            return None
        results = eval(code, {}, dict(zip(names, values, strict=True)))
        if s.kind == "affine.min":
            return min(results)
        return max(results) if s.kind == "affine.max" else results[0]

    def memref(self, s: _Line, env: dict[str, Any]) -> Any:
        source = env.get(s.operands[0]) if s.operands else None
        if s.kind == "memref.store" or not isinstance(source, Memory):
            return None
        if s.kind == "memref.load":
            if source.space != "gm":
                return by_vectors
            self.cost.scalar_loads += 1
            index = [env.get(x) for x in s.operands[1:]]
            if source.tensor is None:
                return by_vectors if source.workspace else None
            if source.offset is None or index not in ([0], []):
                return None
            flat = source.tensor.untyped_storage()
            whole = torch.empty(0, dtype=source.tensor.dtype).set_(flat)
            at = source.offset + source.tensor.storage_offset()
            return int(whole[at]) if 0 <= at < len(whole) else None
        if s.kind == "memref.extract_aligned_pointer_as_index":
            return None if source.tensor is None else source.tensor.data_ptr()
        if s.kind == "memref.reinterpret_cast":
            match = re.search(r"offset: \[([^\]]*)\], sizes: \[([^\]]*)\]", s.text)
            if match is None:
                return None
            sizes = [self.number(x, env) for x in match[2].split(",")] if match[2] else []
            offset = self.number(match[1], env)
            home = _home(source, offset, env)
            return replace(source, extents=sizes, offset=offset, home=home)
        if s.kind == "memref.subview":
            groups = re.findall(r"\[([^\]]*)\]", s.text)
            sizes = [self.number(x, env) for x in groups[1].split(",")] if groups[1] else []
            if len(sizes) == len(source.extents):
                sizes = [n if x is None else x for x, n in zip(sizes, source.extents, strict=True)]
            return replace(source, extents=sizes, tensor=None, offset=None)
        if s.kind == "memref.view":
            made = _type(s.text.rpartition(" to ")[2])
            return None if made is None else replace(made, workspace=source.workspace)
        # cast, collapse_shape, expand_shape: the same elements
        return (
            replace(source, extents=[source.count], tensor=None, offset=None)
            if (s.kind != "memref.cast")
            else source
        )

    def call(self, s: _Line, env: dict[str, Any]) -> None:
        name, passed = re.match(r" @(\w+)\(([^)]*)\)", s.text).groups()  # type: ignore[union-attr]
        arguments = [env.get(x.strip()) for x in passed.split(",")]
        tiles = [x for x in arguments if isinstance(x, Memory)]
        if not tiles:
            return
        if name.startswith("mma_tile"):
            m, k, n = arguments[3:6]
            self.cost.multiplied += _tens(m) * _tens(k) * _tens(n)
        elif name.startswith(("load_gm", "nd2nz")):
            self.cost.copy("loads", tiles[0], tiles[0])
        elif name.startswith(("store_ubuf", "fixpipe")):
            self.cost.copy("stores", tiles[-1], tiles[0 if name.startswith("store") else -1])
        elif not name.startswith("set_l1"):
            self.cost.vector_operation(name, [tile.count * tile.element for tile in tiles])
            self.cost.vector[tiles[0].element] += tiles[0].count * tiles[0].element


def _home(source: Memory, offset: int | None, env: dict[str, Any]) -> _Home:
    """The memory that an argument's address and a distance lead to: another's, where kernels go
    from one tensor to the next by the distance of both."""
    if source.tensor is None or source.home is None or offset is None:
        return source.home
    at = source.tensor.data_ptr() + offset * source.element
    homes = {source.home: None} | {x.home: None for x in env.values() if isinstance(x, Memory)}
    return next((h for h in homes if h is not None and h[0] <= at < h[0] + h[1]), source.home)


def _turn(name: str) -> int:
    return next((n for names, n in _CYCLES.items() if re.match(names, name)), 1)


def _tens(size: int | None) -> int:
    """The cube multiplies whole fractals."""
    return -(-(size or 16) // 16) * 16


def _constant(text: str) -> int | None:
    word = text.split(":")[0].split()[0]
    if word in ("true", "false"):
        return int(word == "true")
    return int(word) if re.fullmatch(r"-?\d+", word) else None


def _type(text: str) -> Memory | None:
    match = re.search(r"memref<((?:[\d?]+x)*)(\w+).*address_space<(\w+)>", text)
    if match is None:
        return None
    extents = [None if x == "?" else int(x) for x in match[1].split("x")[:-1]]
    return Memory(extents, BYTES[match[2]], match[3])


_COMPARE = {"eq": "__eq__", "ne": "__ne__", "lt": "__lt__", "le": "__le__", "gt": "__gt__",
            "ge": "__ge__"}  # fmt: skip


def _arithmetic(kind: str, text: str, given: list[Any]) -> Any:
    kind = kind.removeprefix("arith.")
    if kind == "select":
        return given[1] if given[0] is None or given[0] else given[2]
    if kind in ("index_cast", "extsi", "extui", "trunci", "fptosi"):
        value = given[0]
        return value & 1 if value is not None and re.search(r"to i1\b", text) else value
    if not all(isinstance(x, int) for x in given):
        return None
    if kind == "cmpi":
        how = text.split(",")[0].strip().lstrip("us")
        return int(getattr(given[0], _COMPARE[how])(given[1]))
    a, b = [*given, 0][:2]
    if kind in ("divsi", "remsi"):
        quotient = int(a / b) if abs(a) < 2**53 else a // b
        return quotient if kind == "divsi" else a - quotient * b
    simple = {
        "addi": a + b,
        "subi": a - b,
        "muli": a * b,
        "minsi": min(a, b),
        "maxsi": max(a, b),
        "andi": a & b,
        "ori": a | b,
        "xori": a ^ b,
    }
    if kind == "shrsi":
        return a >> b
    return simple.get(kind)


def environment(head: str, arguments: list[Any], grid: tuple[int, ...]) -> dict[str, Any]:
    """What is known of a function's arguments in a launch, by their names in its `head`."""
    names = re.findall(r"(%arg\d+): ", head)
    types = re.findall(r"%arg\d+: (memref<[^>]*>|\w+)", head)
    first = names.index("%arg0") + (3 if types[0] == "i64" else 2)
    env: dict[str, Any] = {}
    for name, kind, value in zip(names[first:], types[first:], arguments, strict=False):
        if isinstance(value, torch.Tensor):
            element = value.element_size()
            storage = value.untyped_storage()
            home = (storage.data_ptr(), storage.nbytes())
            env[name] = Memory([value.numel()], element, "gm", value, 0, home=home)
        elif kind.startswith("i"):
            env[name] = int(value)
    after = first + len(arguments)
    env.update(zip(names[after : after + 3], (*grid, 1, 1)[:3], strict=False))
    for name, kind in zip(names[:first], types[:first], strict=True):
        if kind.startswith("memref"):
            env[name] = Memory([0], 1, "gm", workspace=True)
    return env


def of(hivm: str, arguments: list[Any], grid: tuple[int, ...], block: int = 0) -> list[Cost]:
    """The cost of each function that a program of the launch runs: of the cube, of the vectors."""
    costs = []
    for function in re.split(r"\n  func\.func ", hivm)[1:]:
        head, _, rest = function.partition("\n")
        if head.startswith("private") or "HOST" in head:
            continue
        env = environment(head, arguments, grid)
        cost = Cost(2 if "_mix_aiv(" in head else 1, "func_core_type<AIC>" in head)
        _Walker(hivm, cost, block).run(_parse(rest.splitlines()), env)
        costs.append(cost)
    return costs
