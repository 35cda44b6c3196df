# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The K best of all parts' candidates, exactly: ties go to the lower position.

A program of _choose holds all candidates of a row: it searches the K-th score, and among those
equal to it the last position, by counting, as topk.py does.  _sort sorts the K by position.

    condition    kernels
    any          _choose then _sort
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...dispatch.common import memory
from ..common.ordered import MINUS_INF, ordered
from ..indexer.topk import ranks, survey, threshold
from ..runtime import launches

LEAST_SCORE = tl.constexpr(-3.4028234663852886e38)
LAST = tl.constexpr(2**31 - 1)  # the greatest position
NOTHING = tl.constexpr(2**63 - 1)
MOST = 32768  # candidates of a row


@triton.jit
def _choose(
    values,
    positions,
    chosen,
    k,
    candidates,
    v_part,
    v_row,
    p_part,
    p_row,
    C: tl.constexpr,
    PAD: tl.constexpr,
    K_PAD: tl.constexpr,
):
    """chosen [M, K_PAD]: position << 32 + the score's bits of the K best, in any order."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, PAD)
    valid = c < candidates
    part = (c // C).to(tl.int64)
    value = tl.load(values + part * v_part + row * v_row + c % C, mask=valid, other=0.0)
    value = value.to(tl.float32)
    position = tl.load(positions + part * p_part + row * p_row + c % C, mask=valid, other=-1)
    position = position.to(tl.int64)
    present = valid & (position >= 0) & (position <= LAST)
    # a NaN comes last
    key = tl.where(present, ordered(tl.where(value > LEAST_SCORE, value, LEAST_SCORE)), MINUS_INF)
    lowest, highest, found = survey(key)
    wanted = tl.minimum(found, k)
    least, reach = threshold(key, wanted, wanted * 0, lowest, highest, found, False)
    best = present & (key >= least)
    if reach > wanted:
        # nearest first, so that the lowest positions score highest
        near = (-position + (LAST - 1)).to(tl.int32)
        near = tl.where(best & (key == least), near, MINUS_INF)
        lowest, highest, ties = survey(near)
        need = wanted - reach + ties
        nearest, _ = threshold(near, need, need * 0, lowest, highest, ties, False)
        best = best & ((key > least) | (near >= nearest))
    end = ranks(best.to(tl.int32))
    bits = value.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    at = chosen + row * K_PAD
    tl.store(at + end - 1, (position << 32) | bits, mask=best & (end <= wanted))
    j = tl.arange(0, K_PAD)
    tl.store(at + j, tl.full([K_PAD], NOTHING, tl.int64), mask=j >= wanted)


@triton.jit
def _sort(chosen, positions, values, k, K_PAD: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, K_PAD)
    x = tl.sort(tl.load(chosen + row * K_PAD + j))
    valid = x != NOTHING
    value = x.to(tl.int32).to(tl.float32, bitcast=True)
    tl.store(positions + row * k + j, tl.where(valid, (x >> 32).to(tl.int32), -1), mask=j < k)
    value = tl.where(valid, value, 0.0).to(values.dtype.element_ty)
    tl.store(values + row * k + j, value, mask=j < k)


def unsupported(values: Tensor, k: int, **_: Any) -> str | None:
    if values.dtype is torch.float64:
        return "values are float64, supported are float16, bfloat16 and float32"
    candidates = values.shape[0] * values.shape[-1]
    if max(candidates, k) > MOST:
        return f"{candidates} candidates a row and k={k}, supported up to {MOST}"
    return None


def forward(values: Tensor, positions: Tensor, k: int) -> tuple[Tensor, Tensor]:
    parts, *batch, C = values.shape
    shape = (*batch, k)
    out_positions = memory.empty(shape, torch.int32, values.device)
    out_values = memory.empty(shape, values.dtype, values.device)
    rows = out_positions.numel() // k
    if rows == 0 or parts * C == 0:
        return out_positions.fill_(-1), out_values.zero_()
    flat_values, flat_positions = (x.reshape(parts, rows, C) for x in (values, positions))
    PAD, K_PAD = (max(16, triton.next_power_of_2(n)) for n in (parts * C, k))
    chosen = memory.empty((rows, K_PAD), torch.int64, values.device)
    launches.kernel(_choose, rows)(
        flat_values,
        flat_positions,
        chosen,
        k,
        parts * C,
        *flat_values.stride()[:2],
        *flat_positions.stride()[:2],
        C=C,
        PAD=PAD,
        K_PAD=K_PAD,
        num_warps=min(16, max(1, PAD // 512)),
    )
    launches.kernel(_sort, rows)(
        chosen,
        out_positions,
        out_values,
        k,
        K_PAD=K_PAD,
        num_warps=min(16, max(1, K_PAD // 128)),
    )
    return out_positions, out_values
