# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""A second opinion on time:  tests/ascend/second.sh SET | named | all | OP [--shape b=4]

msopmodeling (MindStudio's tilesim) simulates the pipes of a core, with their flags.  It reads HIVM
before operations become library calls: what our compiler prints behind GraphSyncSolver.  It takes
one loop of a function, no branch, and no size that a launch decides, so it is given the operations
as one program of the launch runs them, one by one, with every size and event in numbers.

Of a loop some turns in its middle are given to it, which stand for the others: the rest takes its
time at the pace of the busiest pipe.  What it knows no name for is counted under another (`_SAME`)
or named as uncounted.  It charges no head of a launch: ours is added.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from custom.dispatch.errors import NotSupported
from custom.dispatch.registry import SPECS

from custom.bench.case import Case
from custom.bench.presets import presets

from . import cost, estimate, forms, published, toolchain
from .compiler import compile_with
from .cost import Memory, _Line, _parse, _type, _Walker
from .driver import Launch, recorder
from .toolchain import NEWEST, ROOT

PYTHON = ROOT / ".msop/venv/bin/python"
_TURNS = 8  # of a loop
_KNOWN = {"vmul", "vadd", "vsub", "vdiv", "vmax", "vmin", "vexp", "vln", "vsqrt", "vcast", "vabs"}
_KNOWN |= {"vrelu", "vcmp", "vsel"}
# counted as another operation of as many bytes
_SAME = {"vrsqrt": "vsqrt", "vnot": "vabs", "vand": "vmax", "vor": "vmax", "vxor": "vmax"}
_TYPES = {1: "i8", 2: "bf16", 4: "f32", 8: "i64"}
# the wheel's description of each card: a 910B2 is near a 910B1, the profiles are of a 910B4-1
_SPEC = {"Atlas A3": "910B1", "910B2": "910B1", "910B4": "910B4-1"}
_SOLVER = "// -----// IR Dump After GraphSyncSolver"


class Stuck(Exception):
    """The hand-offs of both halves do not pair."""


@dataclass
class Place(Memory):
    label: str = ""  # what its bytes are known by: one label, one place


@dataclass
class Program:
    """The operations of one half: lines, how many of them each stands for (0: takes no time)."""

    core: str
    lines: list[str] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    uncounted: Counter[str] = field(default_factory=Counter)


def dumped(linalg: str, options: dict[str, Any]) -> str:
    """The IR behind each pass of a compile, which it prints where errors go."""
    with tempfile.TemporaryDirectory() as folder:
        told, telling = Path(folder) / "told", Path(folder) / "bishengir-compile"
        asked = f'{toolchain.bishengir(NEWEST)} --mlir-print-ir-after-all "$@"'
        telling.write_text(f"#!/bin/sh\nexec {asked} 2> {told}\n")
        telling.chmod(0o755)
        answer = compile_with(telling, None, toolchain.ARCH, linalg, options)
        if not answer.ok:
            raise RuntimeError(answer.error)
        return told.read_text()


def functions(passes: str) -> list[str]:
    """What GraphSyncSolver left, of the functions that a core runs."""
    found: dict[str, str] = {}
    for part in passes.split(_SOLVER)[1:]:
        text = part.partition("// -----//")[0].partition("\n")[2]
        name = re.match(r"func\.func @(\w+)\(", text)
        if name and "hivm.hir.pipe_barrier" in text:
            found[name[1]] = text
    return list(found.values())


def _with_maps(text: str) -> str:
    """Affine maps get names, as in the final HIVM."""
    names: dict[str, str] = {}

    def name(match: re.Match[str]) -> str:
        return names.setdefault(match[1], f"#map{len(names)}")

    inline = r"(affine_map<\([^<>()]*\)(?:\[[^\]]*\])? -> \([^<>]*?\)>)(?=[(\[])"
    text = re.sub(inline, name, text)
    return "".join(f"{label} = {map_}\n" for map_, label in names.items()) + text


class _Unroller(_Walker):
    """Writes down what the walked program does."""

    def __init__(self, text: str, core: str, block: int) -> None:
        super().__init__(text, cost.Cost(), block)
        self.program, self.weight = Program(core), 1.0

    def emit(self, line: str, counts: bool = True) -> None:
        self.program.lines.append(f"hivm.hir.{line}")
        self.program.weights.append(self.weight if counts else 0.0)

    def repeat(self, turns: range, once: Callable[[int], None]) -> None:
        # an even number before them: buffers and events take turns
        before = max(len(turns) - _TURNS, 0) // 4 * 2
        walked, outside = turns[before : before + _TURNS], self.weight
        self.weight *= len(turns) / max(len(walked), 1)
        for at in walked:
            once(at)
        self.weight = outside

    def memref(self, s: _Line, env: dict[str, Any]) -> Any:
        if s.kind == "memref.store" or (s.kind == "memref.load" and "<ub>" in s.text):
            self.program.uncounted[s.kind] += round(self.weight)
        made = super().memref(s, env)
        if not isinstance(made, Place):
            return made
        if s.kind == "memref.reinterpret_cast":
            return replace(made, label=f"{made.label}_{made.offset}")
        if s.kind == "memref.subview":
            first = re.findall(r"\[([^\]]*)\]", s.text)[0]
            at = "_".join(str(self.number(x, env)) for x in first.split(","))
            return replace(made, label=f"{made.label}_{at}")
        return made

    def step(self, s: _Line, env: dict[str, Any]) -> list[Any]:
        if s.kind == "memref_ext.alloc_workspace":
            made = _type(s.text.rpartition(" to ")[2])
            assert made is not None
            at = env.get(s.operands[1]) if len(s.operands) > 1 else 0
            return [Place(made.extents, made.element, "gm", workspace=True, label=f"work{at}")]
        if not s.kind.startswith("hivm.hir."):
            return super().step(s, env)
        name = s.kind.removeprefix("hivm.hir.")
        if name == "pointer_cast":
            made = _type(s.text)
            assert made is not None
            at = env.get(s.operands[0])
            return [Place(made.extents, made.element, made.space, label=f"{made.space}{at}")]
        if name in ("get_block_idx", "get_sub_block_idx"):
            return super().step(s, env)
        if name in ("set_flag", "wait_flag", "sync_block_set", "sync_block_wait", "pipe_barrier"):
            self.synchronise(name, s, env)
        elif not name.startswith(("set_mask", "set_ffts")):
            self.operate(name, s, env)
        return [None] * len(s.results)

    def synchronise(self, name: str, s: _Line, env: dict[str, Any]) -> None:
        words = [x.strip(" <>") for x in re.findall(r"\[([^\]]*)\]", s.text)[0].split(",")]
        if name.endswith("_flag"):
            event = words[2]
            if event.startswith("%"):
                event = f"EVENT_ID{env.get(event)}"
            self.emit(f"{name}[<{words[0]}>, <{words[1]}>, <{event}>]", False)
        elif name == "pipe_barrier":
            self.emit(f"{name}[<{words[0]}>]")
        else:
            word = s.text.rpartition("flag = ")[2].split()[0]
            flag = self.number(word, env)
            self.emit(f"{name}[<{words[0]}>, <{words[1]}>, <{words[2]}>] flag = {flag}", False)

    def operate(self, name: str, s: _Line, env: dict[str, Any]) -> None:
        sides = []
        for side in ("ins", "outs"):
            match = re.search(rf"\b{side}\((.*?) : ", s.text)
            names = re.findall(r"%[\w#-]+", match[1]) if match else []
            sides.append([env.get(x) for x in names])
        given, made = sides
        tiles = [x for x in given if isinstance(x, Place)]
        out = next((x for x in made if isinstance(x, Place)), None)
        if out is None or (name not in ("vbrc", "varange") and not tiles):
            self.program.uncounted[name] += round(self.weight)
            return
        if name == "mmadL1":
            self.multiply(given, out)
        elif name in ("load", "store", "copy", "nd2nz", "fixpipe"):
            of = out if name in ("store", "fixpipe") else tiles[0]
            if of.count:
                kind = _TYPES[of.element]
                self.emit(_operation(name, [(tiles[0], of.count, kind)], (out, of.count, kind)))
        elif name == "vbrc" and out.space == "ub":
            whole = (out, out.count, _TYPES[out.element])
            self.emit(_operation(name, [whole], whole))
        elif name == "vreduce" or name in _KNOWN or name in _SAME:
            wide = next((x for x in tiles if x.element > 1), out)
            count = wide.count if wide.element > 1 else -(-wide.count // 16)
            if not count:
                return
            kind = _TYPES[max(wide.element, 2)]
            how = re.search(r"<(\w+)>", s.text)
            spelt = _SAME.get(name, name)
            if name == "vreduce":
                spelt = f"vreduce <{how[1] if how and how[1] in ('max', 'min') else 'sum'}>"
            back = (out, count, kind if name != "vcast" else _TYPES[out.element])
            self.emit(_operation(spelt, [(wide, count, kind)], back))
        else:
            self.program.uncounted[f"{name} into {out.space}"] += round(self.weight)

    def multiply(self, given: list[Any], out: Place) -> None:
        left, right = given[:2]
        m, k, n = (x or 16 for x in given[3:6])
        kind = _TYPES[left.element]
        operands = [(left, m * k, kind), (right, k * n, kind)]
        names = ", ".join(f"%{x.label}" for x, _, _ in operands)
        types = ", ".join(_spelt(*x) for x in operands)
        self.emit(
            f"mmadL1 ins({names}, %true, %c{m}, %c{k}, %c{n} : {types}, i1, index, index, index) "
            f"outs(%{out.label} : {_spelt(out, m * n, 'f32')})"
        )


def _spelt(place: Place, count: int, kind: str) -> str:
    return f"memref<{count}x{kind}, #hivm.address_space<{place.space}>>"


def _operation(name: str, given: list[tuple[Place, int, str]], out: tuple[Place, int, str]) -> str:
    names = ", ".join(f"%{x.label}" for x, _, _ in given)
    types = ", ".join(_spelt(*x) for x in given)
    return f"{name} ins({names} : {types}) outs(%{out[0].label} : {_spelt(*out)})"


def unrolled(text: str, arguments: list[Any], grid: tuple[int, ...], block: int) -> Program:
    text = _with_maps(text)
    head, _, rest = text[text.index("func.func ") :].partition("\n")
    core = "AIC" if "func_core_type<AIC>" in head else "AIV"
    walker = _Unroller(text, core, block)
    env = cost.environment(head, arguments, grid)
    for name, value in env.items():
        if isinstance(value, Memory):
            fields = {x: getattr(value, x) for x in value.__dataclass_fields__}
            env[name] = Place(**fields, label=name.strip("%"))
    walker.run(_parse(rest.splitlines()), env)
    return walker.program


def _flag(line: str) -> tuple[str, str] | None:
    match = re.search(r"sync_block_(set|wait)\[.* flag = (\d+)", line)
    return (match[1], match[2]) if match else None


def in_turn(programs: list[Program]) -> tuple[list[tuple[str, list[str]]], list[float]]:
    """Pieces of both halves, each behind those that it waits for; every hand-off has a number of
    its own, as tilesim keeps but the last of a flag.  The weights of all, in that order."""
    places, told, heard = [0] * len(programs), Counter[Any](), Counter[Any]()
    pieces: list[tuple[str, list[str]]] = []
    weights: list[float] = []
    numbers: dict[Any, int] = defaultdict(lambda: len(numbers))
    while any(at < len(x.lines) for at, x in zip(places, programs, strict=True)):
        began = list(places)
        for i, program in enumerate(programs):
            piece = []
            while places[i] < len(program.lines):
                line = program.lines[places[i]]
                flag = _flag(line)
                if flag is not None:
                    how, number = flag
                    ours = how == "set"
                    sender = program.core if ours else {"AIC": "AIV", "AIV": "AIC"}[program.core]
                    key, count = (sender, number), told if ours else heard
                    if not ours and heard[key] >= told[key]:
                        break
                    count[key] += 1
                    line = re.sub(r"\d+$", str(numbers[key, count[key]]), line)
                piece.append(line)
                weights.append(program.weights[places[i]])
                places[i] += 1
            if piece:
                pieces.append((program.core, piece))
        if began == places:
            raise Stuck(", ".join(x.lines[at] for at, x in zip(places, programs, strict=True)))
    return pieces, weights


def written(pieces: list[tuple[str, list[str]]]) -> str:
    lines = []
    for number, (core, piece) in enumerate(pieces):
        kind = f"hivm.func_core_type = #hivm.func_core_type<{core}>"
        lines += [f"func.func @piece{number}() attributes {{{kind}}} {{", *piece, "return", "}"]
    return "\n".join(lines) + "\n"


@dataclass
class Job:
    """A launch, for tilesim; `ours` is the estimate of it."""

    kernel: str
    text: str
    weights: list[float]
    programs: int
    mixed: bool
    spec: str
    head: float
    ours: float
    uncounted: dict[str, int]


def job(launch: Launch, given: list[Any]) -> Job:
    """Of the block that the estimate found the slowest."""
    kernels = functions(dumped(launch.linalg, launch.options))
    row = estimate.row(launch, given)
    programs = [unrolled(text, given, launch.grid, row.block) for text in kernels]
    pieces, weights = in_turn(programs)
    uncounted = sum((x.uncounted for x in programs), Counter[str]())
    return Job(
        launch.kernel,
        written(pieces),
        weights,
        launch.grid[0],
        len(programs) == 2,
        _SPEC[cost.card.name],
        row.head,
        row.seconds,
        dict(uncounted),
    )


def jobs(call: Callable[[], Any]) -> list[Job]:
    found: list[Job] = []

    def observe(launch: Launch, given: list[Any]) -> None:
        found.append(job(launch, given))
        estimate.leave(launch, given)

    recorder.observe = observe
    call()
    return found


def simulated(of: list[Job]) -> list[dict[str, float]]:
    """Seconds of each job, and of its busiest pipe, by the second model; without the head."""
    with tempfile.TemporaryDirectory() as folder:
        given, answers = Path(folder) / "given.json", Path(folder) / "answers.json"
        given.write_text(json.dumps([x.__dict__ for x in of]))
        worker = Path(__file__).with_name("second_worker.py")
        subprocess.run([PYTHON, worker, given, answers], check=True, cwd=folder)
        return json.loads(answers.read_text())


def told(of: list[Job], answers: list[dict[str, float]]) -> list[float]:
    """Seconds of each launch by the second model; a line for each is printed."""
    seconds = []
    for x, answer in zip(of, answers, strict=True):
        seconds.append(answer["seconds"] + x.head)
        uncounted = ", ".join(f"{n} {name}" for name, n in sorted(x.uncounted.items()))
        print(
            f"  {x.kernel:<46}{x.ours * 1e6:>9.1f}{seconds[-1] * 1e6:>9.1f}  {answer['binds']}"
            + (f"; uncounted: {uncounted}" if uncounted else ""),
            flush=True,
        )
    return seconds


def compare(name: str, record: bool, only: str) -> None:
    """Of a set of published.py, behind what `estimate` recorded of it."""
    rows = published.read(name)
    print(f"{'us, both ESTIMATED':<48}{'ours':>9}{'second':>9}")
    for figure, row in zip(published.SETS[name][0], rows, strict=True):
        if only not in figure.what:
            continue
        found = jobs(estimate.called(figure))
        found = [x for x in found if not figure.kernels or x.kernel in figure.kernels]
        print(figure.what, flush=True)
        seconds = told(found, simulated(found))
        row["second"] = round(estimate.apart(seconds) * figure.times * 1e6, 1)
        print(f"{'':<48}{row['ours']:>9.1f}{row['second']:>9.1f}", flush=True)
        if record:
            published.write(name, rows)
    there = [row for row in rows if "second" in row]
    for model in ("ours", "second"):
        print(f"{model}: geometric mean {published.mean(published.ratios(there, model)):.2f}")


def compare_named(record: bool) -> None:
    """What both models say of CANN's own operators, beside what they took."""
    with tempfile.TemporaryDirectory() as folder:
        answers = Path(folder) / "answers.json"
        worker = Path(__file__).with_name("second_worker.py")
        subprocess.run([PYTHON, worker, "named", answers], check=True, cwd=folder)
        rows = json.loads(answers.read_text())
    if record:
        lines = ",\n".join(json.dumps(row) for row in rows)
        forms.RECORD.write_text(f"[\n{lines}\n]\n")
    for row in rows:
        over = row["second"] / row["us"]
        print(f"{row['op']:<24}{row['us']:>9.1f}{row['second']:>9.1f}{over:>7.2f}  {row['shapes']}")
    products = [x["second"] / x["us"] for x in rows if x["op"].startswith("MatMul")]
    for name, found in (("ours", forms.ratios(forms.cann())), ("second", products)):
        print(
            f"{name}: {forms.within(found)} of {len(found)} products within 30%, geometric mean "
            f"{published.mean(found):.2f}, off by {forms.spread(found):.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests.ascend.second")
    parser.add_argument(
        "op",
        help=f"or `all`; a set of times ({', '.join(published.SETS)}); `named`: CANN's operators",
    )
    parser.add_argument("--shape", default="", help="only rows with these sizes: b=4,s1=1")
    parser.add_argument("--only", default="", help="rows whose name has this")
    parser.add_argument("--record", action="store_true", help="keep what a set says")
    chosen = parser.parse_args()
    estimate.install()
    if chosen.op == "named":
        return compare_named(chosen.record)
    if chosen.op in published.SETS:
        return compare(chosen.op, chosen.record, chosen.only)
    wanted = dict(pair.split("=") for pair in chosen.shape.split(",") if pair)
    ops = [spec.name for spec in SPECS] if chosen.op == "all" else [chosen.op]
    cases = [(op, x) for op in ops for x in estimate.matching(presets(op, "npu"), wanted)]
    cases = [(op, x) for op, x in cases if chosen.only in f"{op}: {x.label}"]
    if not cases:
        sys.exit(f"no row of {chosen.op} has {chosen.shape or chosen.only}")
    print(f"{'us, both ESTIMATED':<48}{'ours':>9}{'second':>9}")
    unanswered = 0
    for op, case in cases:
        print(f"{op}: {case.label}", flush=True)
        try:
            row(case)
        except NotSupported as error:
            print(f"  no kernel: {str(error).splitlines()[0]}", flush=True)
        except (Stuck, subprocess.CalledProcessError) as error:
            unanswered += 1
            print(f"  NO ANSWER: {type(error).__name__}: {error}", flush=True)
    if unanswered:
        sys.exit(f"{unanswered} of {len(cases)} rows have no answer")


def row(case: Case) -> None:
    arguments = estimate.made(case)
    found = jobs(lambda: case.call(arguments))
    seconds = told(found, simulated(found))
    both = cost.in_graph([x.ours for x in found]), cost.in_graph(seconds)
    print(f"  {'in a graph':<46}{both[0] * 1e6:>9.1f}{both[1] * 1e6:>9.1f}", flush=True)


if __name__ == "__main__":
    main()
