# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""A first cost model: walks the final HIVM of a launch as core 0 would, and counts.

The scalar part (addresses, loop bounds, lengths read from global memory) is evaluated with the
launch's own arguments; what the cube and the vector units do is only counted.  A branch on a value
that the vector unit computed is taken; a loop that it bounds runs once.

The time is an ESTIMATE, from public rates: the slowest of the units, as if each never waited.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

BYTES = {"i1": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8, "f16": 2, "bf16": 2, "f32": 4}
# of a die of Atlas A3
_MEMORY = 1.6e12  # bytes a second, shared by the cores
_CUBE = 350e12 / 2  # 16-bit multiply-adds a second, all cores
_VECTOR = 256 * 1.85e9  # bytes a second of one operand, one vector core
_ONE_CORE = _MEMORY / 12  # what a core alone can draw, assumed
_SCALAR = 1e-7  # seconds of one load from global memory by the scalar unit, assumed
_STEPS = 5_000_000


@dataclass
class Memory:
    """What is known of a memref value; `tensor` and `offset` of an argument's memory."""

    extents: list[int | None]
    element: int
    space: str
    tensor: torch.Tensor | None = None
    offset: int | None = None

    @property
    def count(self) -> int:
        return math.prod(0 if extent is None else max(extent, 0) for extent in self.extents)


@dataclass
class Cost:
    """Of one program: bytes by direction, multiply-adds, vector bytes by element width."""

    loaded: int = 0
    stored: int = 0
    multiplied: int = 0
    vector: Counter[int] = field(default_factory=Counter)
    scalar_loads: int = 0

    def seconds(self, sharers: int, machine_cores: int) -> dict[str, float]:
        """By unit; `sharers` programs share the memory's rate."""
        return {
            "memory": (self.loaded + self.stored) / min(_MEMORY / sharers, _ONE_CORE),
            "cube": self.multiplied * machine_cores / _CUBE,
            "vector": sum(self.vector.values()) / _VECTOR,
            "scalar loads": self.scalar_loads * _SCALAR,
        }


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
        match = re.match(r"(?:(%[\w, %]+?)(?::\d+)? = )?([\w.]+)", code)
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


class _Walker:
    def __init__(self, hivm: str, cost: Cost, block: int) -> None:
        self.cost, self.block, self.steps = cost, block, 0
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
        carried = re.findall(r"(%[\w-]+) = (%[\w#-]+)", s.text[header.end() :].partition("->")[0])
        state = [env.get(initial) for _, initial in carried]
        if None in (low, high, step):
            low, high, step = 0, 1, 1
        for at in range(low, high, max(step, 1)):
            env[header[1]] = at
            env.update(zip((name for name, _ in carried), state, strict=True))
            state = self.run(s.body, env) or state
        return state

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
                return None
            self.cost.scalar_loads += 1
            index = [env.get(x) for x in s.operands[1:]]
            if source.tensor is None or source.offset is None or index not in ([0], []):
                return None
            flat = source.tensor.untyped_storage()
            whole = torch.empty(0, dtype=source.tensor.dtype).set_(flat)
            at = source.offset + source.tensor.storage_offset()
            return int(whole[at]) if 0 <= at < len(whole) else None
        if s.kind == "memref.reinterpret_cast":
            match = re.search(r"offset: \[([^\]]*)\], sizes: \[([^\]]*)\]", s.text)
            if match is None:
                return None
            sizes = [self.number(x, env) for x in match[2].split(",")] if match[2] else []
            offset = self.number(match[1], env)
            return Memory(sizes, source.element, source.space, source.tensor, offset)
        if s.kind == "memref.subview":
            groups = re.findall(r"\[([^\]]*)\]", s.text)
            sizes = [self.number(x, env) for x in groups[1].split(",")] if groups[1] else []
            return Memory(sizes, source.element, source.space)
        if s.kind == "memref.view":
            return _type(s.text.rpartition(" to ")[2])
        # cast, collapse_shape, expand_shape: the same elements
        return (
            Memory([source.count], source.element, source.space)
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
            self.cost.loaded += tiles[0].count * tiles[0].element
        elif name.startswith(("store_ubuf", "fixpipe")):
            to = tiles[0] if name.startswith("store") else tiles[-1]
            self.cost.stored += to.count * to.element
        elif not name.startswith("set_l1"):
            self.cost.vector[tiles[0].element] += tiles[0].count * tiles[0].element


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
    if kind in ("index_cast", "extsi", "extui", "trunci"):
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
        "addi": a + b, "subi": a - b, "muli": a * b, "minsi": min(a, b), "maxsi": max(a, b),
        "andi": a & b, "ori": a | b, "xori": a ^ b,
    }  # fmt: skip
    if kind == "shrsi":
        return a >> b
    return simple.get(kind)


def of(hivm: str, arguments: list[Any], grid: tuple[int, ...], block: int = 0) -> list[Cost]:
    """The cost of each function that a program of the launch runs: of the cube, of the vectors."""
    costs = []
    for function in re.split(r"\n  func\.func ", hivm)[1:]:
        head, _, rest = function.partition("\n")
        if head.startswith("private") or "HOST" in head:
            continue
        names = re.findall(r"(%arg\d+): ", head)
        types = re.findall(r"%arg\d+: (memref<[^>]*>|\w+)", head)
        first = names.index("%arg0") + (3 if types[0] == "i64" else 2)
        env: dict[str, Any] = {}
        for name, kind, value in zip(names[first:], types[first:], arguments, strict=False):
            if isinstance(value, torch.Tensor):
                element = value.element_size()
                env[name] = Memory([value.numel()], element, "gm", value, 0)
            elif kind.startswith("i"):
                env[name] = int(value)
        after = first + len(arguments)
        env.update(zip(names[after : after + 3], (*grid, 1, 1)[:3], strict=False))
        for name, kind in zip(names[:first], types[:first], strict=True):
            if kind.startswith("memref"):
                env[name] = Memory([0], 1, "gm")
        cost = Cost()
        _Walker(hivm, cost, block).run(_parse(rest.splitlines()), env)
        costs.append(cost)
    return costs
