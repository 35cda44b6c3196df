# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Index keys [T, 128] as int8 to their slots in values [pages, P, 1, 128] and scales [pages, P, 1].

A slot that is negative or past the cache makes an empty copy: the mask is a bound on its length.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..common import cores, quantize, ragged, tiling, tune, tuples


class Slots(NamedTuple):
    page: int  # of one
    total: int  # of the cache


class Strides(NamedTuple):
    k: int
    values: int  # from page to page
    scales: int


@triton.jit
def placed(slots, row, page, total):
    """(whether a row has a slot, its page, its place in it)."""
    slot = tl.load(slots + row)
    there = (slot >= 0) & (slot < total)
    slot = tl.where(there, slot, 0)
    return there, (slot // page).to(tl.int64), slot % page


@tuples.jit(["rows"])
def write(
    k,
    values,
    scales,
    slots,
    rows,
    of: Slots,
    stride: Strides,
    SIZE: tl.constexpr,
):
    d = tl.arange(0, SIZE)
    one = tl.arange(0, 1)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        there, outer, inner = placed(slots, row, *of)
        x = tl.load(k + row.to(tl.int64) * stride.k + d).to(tl.float32)
        x, scale = quantize.of_floats(x[None], 1.0)
        to = values + outer * stride.values + inner * SIZE + d[None]
        tl.store(to, x, mask=(d < tl.where(there, SIZE, 0))[None])
        scale = tl.minimum(scale, 65504.0) if scales.dtype.element_ty == tl.float16 else scale
        to = scales + outer * stride.scales + inner + one
        tl.store(to, scale.to(scales.dtype.element_ty), mask=one < tl.where(there, 1, 0))


def unsupported(k: Tensor, kind: str, index_hadamard: bool, **_: Any) -> str | None:
    return (
        quantize.only_int8(kind)
        or quantize.without_transform(index_hadamard)
        or tiling.not_multiplied(k=k)
    )


def forward(
    k: Tensor,
    values: Tensor,
    scales: Tensor,
    slots: Tensor,
    kind: str,
    scale_format: str,
    index_hadamard: bool,
    hadamard_round: str,
) -> None:
    if k.shape[0] * values.numel() == 0:
        return
    pages, page = values.shape[:2]
    write[(min(k.shape[0], cores.vector()),)](
        k,
        values,
        scales,
        ragged.int32(slots),
        k.shape[0],
        page,
        pages * page,
        k.stride(0),
        values.stride(0),
        scales.stride(0),
        SIZE=k.shape[1],
        **tune.only("index_cache_write.write").keywords,
    )
