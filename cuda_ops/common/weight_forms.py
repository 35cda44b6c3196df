# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""How a weight [K, N] lies in memory.

NZ           [N / C0, K, C0]    C0 = 32 bytes of elements
ROW_MAJOR    [K, N]
LINEAR       [N, K]             nn.Linear.weight
"""

from __future__ import annotations

from collections.abc import Sequence

import triton.language as tl
from torch import Tensor
from triton.runtime.jit import constexpr_function

from ...dispatch.common import nz

NZ, ROW_MAJOR, LINEAR = (tl.constexpr(form) for form in range(3))


def form_of(weight: Tensor, weight_format: str) -> int:
    if nz.is_nz(weight, weight_format):
        return int(NZ.value)
    return int((LINEAR if weight_format == "linear" else ROW_MAJOR).value)


def steps_over(form: int, depth: int, sizes: Sequence[int]) -> bool:
    """Whether TMA can step over the rows of weights in half precision, and over those of what they
    multiply: in units of 16 bytes."""
    rows = [depth, *sizes] if form == ROW_MAJOR.value else [depth]
    return all(row % 8 == 0 for row in rows)


@constexpr_function
def ends(sizes, width):
    """By joined weight, each of `sizes` columns: where its blocks of `width` columns end."""
    blocks = [-(-size // width) for size in sizes]
    return tuple(sum(blocks[: i + 1]) for i in range(len(blocks)))
