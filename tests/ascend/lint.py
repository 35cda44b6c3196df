# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What running on the CPU and a compile that passes do not show, read from the IR.

One function a finding; `of` reads the final HIVM with all of them.  The builds of the compiler
write HIVM differently: the newer ones call library templates, the oldest has operations.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Finding(NamedTuple):
    kind: str
    text: str


def of(hivm: str, said: str = "") -> list[Finding]:
    """Of the final HIVM, and of what the compiler said beside it."""
    found = [Finding("multiply", text) for text in wrong_multiplies(hivm)]
    found += [Finding("retry", text) for text in re.findall(r"\[NOTE\] ?([^\n]*)", said)]
    if repeats(hivm):
        found.append(Finding("repeat", "both vector sub-cores repeat the same vector work"))
    if takes_turns(hivm):
        found.append(Finding("turns", "cube and vector take turns: a workspace of one slot"))
    loops = scalar_loops(hivm)
    if loops:
        found.append(Finding("scalar", f"{loops} innermost loops load or store single elements"))
    return found


def functions(hivm: str) -> list[str]:
    return re.split(r"\n  func\.func ", hivm)[1:]


_MULTIPLY = r"call @(mma_tile\w+)\(([^)]*)\)|hivm\.hir\.(mmadL1)\b(?: \{[^}]*\})? ins\(([^:]*) :"


def wrong_multiplies(hivm: str) -> list[str]:
    """Cube multiplies whose second operand in L1 is not N x K: a silent miscompile, which running
    the lowered form does not show."""
    found = []
    for function in functions(hivm):
        value: dict[str, int] = {}
        shape: dict[str, list[int]] = {}
        # line by line: sibling regions use a name again
        for line in function.splitlines():
            constant = re.search(r"(%\S+) = arith\.constant (-?\d+) : index", line)
            if constant:
                value[constant[1]] = int(constant[2])
            cast = re.search(r"(%\S+) = memref\.cast %\S+ : memref<((?:\d+x)+\d+)x\w+.*#hivm", line)
            if cast:
                shape[cast[1]] = [int(extent) for extent in cast[2].split("x")]
            call = re.search(_MULTIPLY, line)
            if not call:
                continue
            arguments = [x.strip() for x in (call[2] or call[4]).split(",")]
            k, n = (value.get(arguments[i]) for i in (4, 5))
            tile = shape.get(arguments[1])
            if k is None or n is None or tile is None:
                continue
            # a tile of L1 is 16 rows of 32 bytes
            short = tile[-1] if len(tile) == 4 else 16
            wanted = [[-(-n // 16), -(-k // short)], [-(-n // short), -(-k // 16)]]
            if tile[:2] not in (*wanted, *(each[::-1] for each in wanted)):
                name = call[1] or call[3]
                found.append(f"{name}: B in L1 is {tile}, the multiply wants N={n} K={k}")
    return found


def takes_turns(hivm: str) -> bool:
    """Cube and vector of a core hand tiles over through a workspace whose buffers all have one
    slot: each waits for the other, tile by tile.  A buffer with several is taken in slices."""
    slots = False
    for function in functions(hivm):
        name = re.match(r"@(\w+)\(", function)
        if name is None or not name[1].endswith("_mix_aic"):
            continue
        workspace = re.search(r"(%arg\d+): memref<[^{]*\{[^{}]*hacc\.arg_type<workspace>", function)
        if workspace is None:
            continue
        views = re.findall(rf"(%\S+) = memref\.view {workspace[1]}\[", function)
        slots = slots or bool(views)
        if any(
            re.search(rf"memref\.subview {view}\[%\S+, .*?\] \[1, ", function) for view in views
        ):
            return False
    return slots


def repeats(hivm: str) -> bool:
    """Both vector units of a core do the work of a whole tile, and the first alone stores it.
    Where the cube reads it, the older builds lose the mark, and only the branch is left."""
    if "limit_sub_block_id0" in hivm:
        return True
    for function in functions(hivm):
        unit: set[str] = set()  # names of the number of the vector unit
        first: set[str] = set()  # of whether it is the first
        for line in function.splitlines():
            branch = re.search(r"\bscf\.if (%\w+)", line)
            if branch and branch[1] in first:
                return True
            value = re.match(r"\s*(%\w+) = ([\w.]+)(.*)", line)
            if not value:
                continue
            name, operation, operands = value.groups()
            unit.discard(name)  # sibling regions use a name again
            first.discard(name)
            of_unit = not unit.isdisjoint(re.findall(r"%\w+", operands))
            if operation == "hivm.hir.get_sub_block_idx" or (
                of_unit and operation in ("arith.index_cast", "arith.trunci")
            ):
                unit.add(name)
            elif of_unit and operation == "arith.cmpi" and operands.startswith(" eq,"):
                first.add(name)
    return False


def scalar_loops(hivm: str) -> int:
    """Innermost loops that load or store single elements of UB or global memory."""
    element = re.compile(r"\bmemref\.(load|store) .*#hivm\.address_space<(ub|gm)>")
    return sum(bool(element.search(body)) for body in innermost_loops(hivm))


def innermost_loops(hivm: str) -> list[str]:
    """The bodies of the loops that contain no other."""
    found: list[str] = []
    stack: list[tuple[str, list[str], bool]] = []  # indent, body, whether it contains a loop
    for line in hivm.splitlines():
        for _, body, _ in stack:
            body.append(line)
        code = re.sub(r'"[^"]*"|\{[^{}]*\}', "", line)
        indent = re.match(r" *", line)[0]  # type: ignore[index]
        if re.search(r"\bscf\.(for|while)\b", code) and code.rstrip().endswith("{"):
            stack = [(i, b, True) for i, b, _ in stack]
            stack.append((indent, [], False))
        elif stack and line.startswith(f"{stack[-1][0]}}}"):
            _, body, contains = stack.pop()
            if not contains:
                found.append("\n".join(body))
    return found


# The front end turns a masked load through a tensor of indices into an UNMASKED copy and a select:
# the values are right, and an index out of range is read all the same.  Such an index must have
# been bounded before it became an address: by a select, a minimum or a maximum, or a remainder.
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


def unbounded_indirect_loads(ttir: str) -> list[Finding]:
    """One finding for every masked load whose address holds loaded, unbounded indices."""
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
            text = f"{name}: masked load through an index that is not clamped: {line[:120]}"
            found.append(Finding("index", text))
    return found
