# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Read a racecheck log: `python -m tests.tools.racecheck LOG` fails if it reports a race.

Not counted is one pair of accesses, which is Triton's own and not in any line of a kernel here: the
byte in shared memory by which gl.warp_specialize tells its warps what to run.  docs/sanitizer.md
says why that pair is ordered.
"""

from __future__ import annotations

import ast
import re
import sys
from functools import cache
from pathlib import Path

KERNELS = Path(__file__).parents[2] / "cuda_ops"
_ACCESS = re.compile(r"(Read|Write) access at (\w+)\+0x[0-9a-f]+ in (\S+):(\d+)")


@cache
def _lines(file: str, kernel: str) -> tuple[int, frozenset[int]]:
    """Where the kernel is defined, and where it calls warp_specialize; 0 if it does not.  The
    machine code of a call that is a branch of an `if` carries the line of that `if`."""
    sources = sorted(KERNELS.rglob(Path(file).name))
    for node in (node for source in sources for node in ast.walk(ast.parse(source.read_text()))):
        if isinstance(node, ast.FunctionDef) and node.name == kernel:
            calls = [
                parent.lineno if isinstance(parent, ast.If) else statement.lineno
                for parent in ast.walk(node)
                for statement in ast.iter_child_nodes(parent)
                if isinstance(statement, ast.Expr)
                and isinstance(statement.value, ast.Call)
                and isinstance(statement.value.func, ast.Attribute)
                and statement.value.func.attr == "warp_specialize"
            ]
            if calls:
                return node.lineno, frozenset(calls)
    return 0, frozenset()


def _is_handshake(kind: str, kernel: str, file: str, line: str) -> bool:
    """Read where a kernel begins, written there or where it specializes its warps."""
    begin, calls = _lines(file, kernel)
    return int(line) in ({begin} if kind == "Read" else {begin, *calls}) - {0}


def left(log: str) -> tuple[list[str], int]:
    """(reports that are something else, reports that are the handshake)."""
    reports: list[list[str]] = []
    for line in log.splitlines():
        if "Race reported between" in line:
            reports.append([])
        if reports and _ACCESS.search(line):
            reports[-1].append(line.removeprefix("=========").strip())
    other = [
        "\n    ".join(report)
        for report in reports
        if not all(_is_handshake(*_ACCESS.search(line).groups()) for line in report)
    ]
    return other, len(reports) - len(other)


def main(path: str) -> int:
    log = Path(path).read_text()
    summary = re.search(r"RACECHECK SUMMARY: (\d+) hazards? displayed \((\d+) errors?", log)
    if summary is None:
        print(f"{path} has no summary: the run did not end")
        return 1
    other, handshakes = left(log)
    hidden = int(summary[2]) - len(other) - handshakes
    print("\n".join(other))
    print(
        f"{len(other)} races, {handshakes} reports of warp_specialize's own byte, {hidden} hidden"
    )
    return 1 if other or hidden > 0 else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
