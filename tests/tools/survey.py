# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""How much of a house the package is: a table of figures that are to stay small, each counted.

python -m tests.tools.survey [--at REV] [--pairs N]

--at REV    also counts the tree of a git revision, for the ops that it has
--pairs N   lists the N pairs of files that share most lines

Frames are the package's own between a user's call and Triton's launch, on a pretended GPU of
compute capability 9.0: the deepest launch of each op's sample.  Statements are the statements of
the syntax trees, without signatures and docstrings.  A pair is two files, or a file with itself,
that share a run of six lines or more: the same, or of one shape (other names, strings, numbers).
Blank lines, comments, imports and lines without a word are passed over; a run that stands in more
than eight places is too common to count, and one of one shape counts from forty words and signs on.
Signatures count in pairs: `--pairs` says which pairs share nothing else.
"""

from __future__ import annotations

import argparse
import ast
import io
import keyword
import re
import subprocess
import tokenize
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

from docs import functions

ROOT = Path(__file__).parents[2]
PACKAGE = functions.FOLDERS
RUN = 6  # lines that make a pair
COMMON = 8  # places of a run up to which it counts
MADE = "tests/vllm/stubs/"  # by a program, of two versions
SHAPED = 40  # words and signs from which a run of one shape counts
WIDEST = 30  # parameters of a kernel
_NAMED = re.compile(r'"(npu_\w+)')

Tree = Mapping[str, str]  # text by path


def tree(at: str | None = None) -> Tree:
    """The Python files that git knows and a person wrote, as they are here or at a revision."""
    command = ["git", "ls-tree", "-r", "--name-only", at] if at else ["git", "ls-files"]
    names = [x for x in _run(command).splitlines() if x.endswith(".py") and MADE not in x]
    if at is None:
        return {name: (ROOT / name).read_text() for name in names if (ROOT / name).exists()}
    return {name: _run(["git", "show", f"{at}:{name}"]) for name in names}


def _run(command: list[str]) -> str:
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def shipped(files: Tree) -> dict[str, str]:
    return {name: text for name, text in files.items() if name.startswith(PACKAGE)}


def without(files: Tree, ops: Iterable[str]) -> dict[str, str]:
    """The files but those named by one of `ops` (`npu_` left out)."""
    left_out = {op.removeprefix("npu_") for op in ops}
    return {name: text for name, text in files.items() if Path(name).stem not in left_out}


def ops(files: Tree) -> set[str]:
    """The ops of a tree: the modules of dispatch/ops that have a schema, and their variants."""
    found = [x for x in files if x.startswith("dispatch/ops/") and "SCHEMA" in files[x]]
    variants = (
        x for name in found if "VARIANTS" in files[name] for x in _NAMED.findall(files[name])
    )
    return {f"npu_{Path(name).stem}" for name in found} | set(variants)


def statements(files: Tree) -> int:
    """A decorator, an argument and a docstring are none."""
    found = 0
    for text in files.values():
        for node in ast.walk(ast.parse(text)):
            quoted = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            found += isinstance(node, ast.stmt) and not quoted
    return found


def nodes(files: Tree) -> int:
    """Nodes of the syntax trees outside signatures and docstrings."""

    def counted(node: ast.AST) -> int:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return 0
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return 1 + sum(map(counted, node.body))
        return 1 + sum(map(counted, ast.iter_child_nodes(node)))

    return sum(counted(ast.parse(text)) for text in files.values())


def wide_kernels() -> int:
    """Kernels and parts of kernels with more than 30 parameters."""
    found = functions.functions(("cuda_ops", "npu_ops"))
    return sum(each.jitted and each.parameters > WIDEST for each in found)


def files_by_hand() -> int:
    """Files that a new op writes or adds to by the steps of CONTRIBUTING.md that a test takes."""
    tree = ast.parse((ROOT / "tests" / "tools" / "test_contributing.py").read_text())
    [steps] = [
        x.value
        for x in tree.body
        if isinstance(x, ast.AnnAssign) and ast.unparse(x.target) == "TOY"
    ]
    return len({ast.unparse(path) for step in steps.values for path in step.keys})


_PASSED_OVER = {tokenize.COMMENT, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.NEWLINE}


class Line(NamedTuple):
    same: str
    shape: str
    signature: bool  # of a function


def _lines(text: str) -> list[Line]:
    """Each line that counts."""
    same: dict[int, list[str]] = defaultdict(list)
    shape: dict[int, list[str]] = defaultdict(list)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in _PASSED_OVER:
            continue
        named = token.type == tokenize.NAME and not keyword.iskeyword(token.string)
        value = token.type in (tokenize.STRING, tokenize.NUMBER)
        for number, line in enumerate(token.string.splitlines(), token.start[0]):
            same[number].append(" ".join(line.split()))
            shape[number].append("_" if named or value else line)
    nodes = [*ast.walk(ast.parse(text))]
    signatures = {
        number
        for node in nodes
        if isinstance(node, ast.FunctionDef)
        for number in range(node.lineno, node.body[0].lineno)
    }
    imports = {
        number
        for node in nodes
        if isinstance(node, ast.Import | ast.ImportFrom)
        for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    return [
        Line(" ".join(same[number]), " ".join(shape[number]), number in signatures)
        for number in sorted(same)
        if number not in imports
        and any(character.isalnum() for word in same[number] for character in word)
    ]


@dataclass
class Shared:
    """What two files share: runs of six lines, and how many of them are a signature's."""

    runs: int = 0
    signatures: int = 0


def pairs(files: Tree) -> dict[tuple[str, str], Shared]:
    found: dict[tuple[str, str], Shared] = defaultdict(Shared)
    lines = {name: _lines(text) for name, text in files.items()}
    for shaped in (False, True):
        places: dict[tuple[str, ...], list[tuple[str, int]]] = defaultdict(list)
        for name, given in lines.items():
            words = [line.shape if shaped else line.same for line in given]
            for first in range(len(words) - RUN + 1):
                places[tuple(words[first : first + RUN])].append((name, first))
        for run, where in places.items():
            enough = not shaped or sum(len(line.split()) for line in run) >= SHAPED
            if not enough or not 1 < len(where) <= COMMON:
                continue
            for (a, i), (b, j) in combinations(where, 2):
                if a != b or j - i >= RUN:
                    pair = found[min(a, b), max(a, b)]
                    pair.runs += 1
                    # its head and its result may be told apart
                    pair.signatures += sum(x.signature for x in lines[a][i : i + RUN]) >= RUN - 1
    return found


def of_signatures(alike: Mapping[tuple[str, str], Shared]) -> int:
    """The pairs that share signatures and nothing else."""
    return sum(each.runs == each.signatures for each in alike.values())


def frames(names: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Of each op, the frames of a first call and of a repeated one."""
    import pytest
    import torch
    from custom.dispatch import register
    from custom.dispatch.registry import BY_NAME

    import custom
    from tests.support import pretended_gpu, samples

    found = {}
    with pytest.MonkeyPatch.context() as patch:
        device = pretended_gpu.pretend(patch, (9, 0))
        seen: list[int] = []
        again = device.again

        def noted(*args: object) -> None:
            seen.append(len(pretended_gpu.our_frames()))
            again(*args)

        patch.setattr(device, "again", noted)
        for name in names:
            arguments = samples.sample(name, torch.device("cpu"), torch.bfloat16)
            public: Callable[..., object] = getattr(custom, name, register.overload(BY_NAME[name]))
            register.forget()
            calls = []
            for _ in range(3):
                seen.clear()
                public(**arguments)
                calls.append(max(seen, default=0))
            register.forget()
            found[name] = calls[0], calls[2]
    return found


def counts(files: Tree) -> dict[str, int]:
    alike = pairs(files)
    ours = shipped(files)
    return {
        "pairs of files that share six lines": len(alike),
        "of which share signatures alone": of_signatures(alike),
        "ops": len(ops(files)),
        "statements": statements(ours),
        "nodes outside signatures and docstrings": nodes(ours),
    }


def table(at: str | None, deep: Mapping[str, tuple[int, int]]) -> list[tuple[object, ...]]:
    """Rows of figure, goal, now, and then."""
    now = tree()
    rows: list[tuple[object, ...]] = [("", "goal", "now")]
    for i, (call, goal) in enumerate((("first", 7), ("repeated", 4))):
        found = [each[i] for each in deep.values()]
        over = sum(frames > goal for frames in found)
        rows.append((f"frames of a {call} call", goal, f"{max(found)}, over in {over} ops"))
    rows += [
        ("kernels of more than 30 parameters", 0, wide_kernels()),
        ("files for a new op, by hand", 12, files_by_hand()),
    ]
    here = counts(now)
    goals = {"pairs of files that share six lines": 300}
    if at is None:
        return rows + [(name, goals.get(name, ""), count) for name, count in here.items()]
    then = tree(at)
    there = counts(then)
    rows[0] += (at,)
    rows += [(name, goals.get(name, ""), here[name], there[name]) for name in here]
    left = counts(without(now, ops(now) - ops(then)))
    for name in ("statements", "nodes outside signatures and docstrings"):
        change = f"{left[name]} ({left[name] / there[name] - 1:+.1%})"
        rows.append((f"{name}, the same ops", "-8%", change, there[name]))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Formatter)
    parser.add_argument("--at", metavar="REV")
    parser.add_argument("--pairs", type=int, default=0, metavar="N")
    given = parser.parse_args()
    if given.pairs:
        found = sorted(pairs(tree()).items(), key=lambda each: -each[1].runs)
        for (a, b), shared in found[: given.pairs]:
            alone = "  signatures" if shared.runs == shared.signatures else ""
            print(f"{shared.runs:5}  {a} ~ {b}{alone}")
        return
    from custom.dispatch.registry import SPECS

    for row in table(given.at, frames(spec.name for spec in SPECS)):
        print("  ".join(f"{cell!s:<{w}}" for cell, w in zip(row, _WIDTHS, strict=False)).rstrip())


_Formatter = argparse.RawDescriptionHelpFormatter
_WIDTHS = (50, 5, 22, 12)


if __name__ == "__main__":
    main()
