# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Faults of ptxas 12.8, that of Triton 3.5 to 3.7, in kernels with wgmma.

The descriptor of an operand in shared memory is an address below 2**14, the lower word, and strides
and swizzle in the upper one.  That of the product's next step is the address + a constant of 64
bits, whose upper word adds to 0:

    UIADD3 UR8, UP0, UR20, 0x2, URZ         UIADD3.X UR9, URZ, 0x40000040, URZ, UP0, !UPT

where this ptxas sometimes takes a register that holds something else, for both words.  What is read
then are other rows, or what no shared memory is: an illegal memory access.

An operand in registers has four of them.  Where two products in a row take the same, and one of the
four holds a constant, ptxas sometimes moves that there behind the first product, which has read
what was in the register before:

    HGMMA.64x32x16.F32 R40, R128, ...    MOV R129, 0x3c003c00    HGMMA.64x32x16.F32 R40, R128, ...
"""

from __future__ import annotations

import re
import subprocess
import tempfile

import triton

_INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\d+ )?(\S+) (.*?) ;")
_UPPER_SUM = re.compile(r"UR\d+, (UR\d+|URZ), (-?0x[0-9a-f]+), ")
_WRITTEN = re.compile(r"(?:UP\d, )?UR(\d+)")
_ZERO = re.compile(r"UMOV UR\d+, URZ")
_LEFT_OPERAND = re.compile(r"R\d+, R(\d+)")
_CONSTANT = re.compile(r"(?:MOV|IMAD\.MOV\.U32) R(\d+), (?:RZ, RZ, )?(?:RZ|-?0x[0-9a-f]+)$")


def wrong_descriptors(sass: str) -> list[str]:
    """The sums of upper words whose other part is not 0, as nvdisasm writes them."""
    wrong: list[str] = []
    written: dict[str, str] = {}
    for line in sass.splitlines():
        found = _INSTRUCTION.match(line)
        if not found:
            continue
        op, operands = found.groups()
        total = _UPPER_SUM.match(operands)
        if op == "UIADD3.X" and total:
            base, word = total[1], int(total[2], 16) & 0xFFFFFFFF
            # a swizzle in the upper two bits, a stride in the lower fourteen
            descriptor = word >> 30 and not word & 0x3FFFC000
            if descriptor and base != "URZ" and not _ZERO.match(written.get(base, "")):
                wrong.append(f"{op} {operands}")
        to = _WRITTEN.match(operands)
        if op.startswith(("U", "S2UR", "R2UR")) and to:
            for half in range(2 if ".64" in op or ".WIDE" in op else 1):
                written[f"UR{int(to[1]) + half}"] = f"{op} {operands}"
    return wrong


def late_constants(sass: str) -> list[str]:
    """Constants for an operand in registers that a product, not over yet, has read before."""
    late: list[str] = []
    read: set[int] = set()  # the first registers of operands of products that may not be over
    moved: list[tuple[int, str]] = []
    for line in sass.splitlines():
        found = _INSTRUCTION.match(line)
        if not found:
            continue
        op, operands = found.groups()
        if op.startswith("WARPGROUP.DEPBAR"):
            read, moved = set(), []
        elif constant := _CONSTANT.match(f"{op} {operands}"):
            moved.append((int(constant[1]), f"{op} {operands}"))
        elif op.startswith("HGMMA") and (left := _LEFT_OPERAND.match(operands)):
            first = int(left[1])
            if first in read:
                late += [text for to, text in moved if 0 <= to - first < 4]
            else:
                moved = [each for each in moved if not 0 <= each[0] - first < 4]
            read.add(first)
    return late


def disassembled(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.nvdisasm.path, "-c", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
