# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""A reading of the TTIR for what neither the CPU run nor the compile shows.

The front end turns a masked load through a tensor of indices into an UNMASKED copy and a select:
the values are right, and an index out of range is read all the same.  Such an index must have been
bounded before it became an address: by a select, a minimum or a maximum, or a remainder.
"""

from __future__ import annotations

import re

_BOUNDED = (
    "arith.select",
    "arith.minsi",
    "arith.maxsi",
    "arith.minui",
    "arith.remsi",
    "arith.andi",
)
_STEP = (
    "tt.addptr", "tt.splat", "tt.broadcast", "tt.expand_dims", "tt.reshape", "tt.trans",
    "arith.addi", "arith.subi", "arith.muli", "arith.divsi", "arith.extsi", "arith.trunci",
    "arith.shli", "arith.shrsi",
)  # fmt: skip


def unbounded_indirect_loads(ttir: str) -> list[str]:
    """One sentence for every masked load whose address holds loaded, unbounded indices."""
    defined: dict[str, tuple[str, list[str], str]] = {}
    for line in ttir.splitlines():
        match = re.match(r"\s*(%\w+)(?::\d+)? = \"?([\w.]+)\"? ?(.*)", line)
        if match:
            operands = re.findall(r"%\w+", match[3].partition(" : ")[0])
            defined[match[1]] = (match[2], operands, line.strip())

    def tainted(name: str, seen: set[str]) -> bool:
        if name in seen or name not in defined:
            return False
        seen.add(name)
        operation, operands, line = defined[name]
        if operation == "tt.load":
            return re.search(r": tensor<(?:\d+x)+!tt\.ptr<i\d+>>", line) is not None
        if operation in _BOUNDED or operation not in _STEP:
            return False
        return any(tainted(operand, seen) for operand in operands)

    found = []
    for name, (operation, operands, line) in defined.items():
        if operation == "tt.load" and len(operands) > 1 and tainted(operands[0], set()):
            found.append(f"{name}: masked load through an index that is not clamped: {line[:120]}")
    return found
