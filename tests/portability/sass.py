# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""A fault of ptxas 12.8, that of Triton 3.5 to 3.7, in kernels with wgmma.

The descriptor of an operand in shared memory is an address below 2**14, the lower word, and strides
and swizzle in the upper one.  That of the product's next step is the address + a constant of 64
bits, whose upper word adds to 0:

    UIADD3 UR8, UP0, UR20, 0x2, URZ         UIADD3.X UR9, URZ, 0x40000040, URZ, UP0, !UPT

where this ptxas sometimes takes a register that holds something else, for both words.  What is read
then are other rows, or what no shared memory is: an illegal memory access.
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


def disassembled(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.nvdisasm.path, "-c", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
