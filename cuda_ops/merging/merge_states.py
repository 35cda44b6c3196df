# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Partial attentions of the same queries, merged by their log-sum-exps; bound by memory.

    out = sum_i exp(lse_i - lse) outs_i     lse = log sum_i exp(lse_i)     over the parts that count

outs [P, M, D], lses [P, M] of any stride: what a collective brought is read where it lies.

    condition    kernels
    any          _merge
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...dispatch.common import memory
from ..runtime import launches

BLOCK = 2048  # numbers of each part that a program holds


@triton.jit
def _log_sum(lses, sums, at, sums_at, mask, SUMS: tl.constexpr):
    """(lse, whether the part counts) of the rows of a part."""
    lse = tl.load(lses + at, mask=mask, other=float("-inf"))
    if SUMS:
        lse += tl.log(tl.load(sums + sums_at, mask=mask, other=0.0))
    # neither infinite nor NaN
    return lse, tl.abs(lse) < float("inf")


@triton.jit
def _merge(
    outs,
    lses,
    sums,
    out,
    out_lse,
    parts,
    rows,
    o_part,
    o_row,
    l_part,
    l_row,
    s_part,
    s_row,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    SUMS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, D_PAD)
    mask = row < rows
    inside = mask[:, None] & (d < D)[None, :]
    top = tl.full([ROWS], float("-inf"), tl.float32)
    for number in range(parts):
        part = tl.cast(number, tl.int64)
        lse, counts = _log_sum(
            lses, sums, part * l_part + row * l_row, part * s_part + row * s_row, mask, SUMS
        )
        top = tl.maximum(top, tl.where(counts, lse, float("-inf")))
    # no part counts: exp(-inf - 0) is 0, not NaN
    shift = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D_PAD], tl.float32)
    for number in range(parts):
        part = tl.cast(number, tl.int64)
        lse, counts = _log_sum(
            lses, sums, part * l_part + row * l_row, part * s_part + row * s_row, mask, SUMS
        )
        weight = tl.where(counts, tl.exp(lse - shift), 0.0)
        total += weight
        at = outs + part * o_part + row[:, None] * o_row + d[None, :]
        # what an empty part holds may be NaN
        x = tl.load(at, mask=inside & counts[:, None], other=0.0).to(tl.float32)
        acc += weight[:, None] * x
    acc /= tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out + row[:, None] * D + d[None, :], acc.to(out.dtype.element_ty), mask=inside)
    tl.store(out_lse + row, top + tl.log(total), mask=mask)


def unsupported(outs: Tensor, lses: Tensor, **_: Any) -> str | None:
    if torch.float64 in (outs.dtype, lses.dtype):
        return "inputs are float64, supported are float16, bfloat16 and float32, lses float32"
    if outs.shape[-1] > 8192:
        return f"D={outs.shape[-1]}, supported up to 8192"
    return None


def forward(outs: Tensor, lses: Tensor, sums: Tensor | None) -> tuple[Tensor, Tensor]:
    parts, *batch, D = outs.shape
    out = memory.empty((*batch, D), outs.dtype, outs.device)
    lse = memory.empty(batch, torch.float32, outs.device)
    rows = lse.numel()
    if rows == 0:
        return out, lse
    flat = outs.reshape(parts, rows, D)
    flat_lses = lses.reshape(parts, rows)
    flat_sums = flat_lses if sums is None else sums.reshape(parts, rows)
    D_PAD = max(16, triton.next_power_of_2(D))
    ROWS = max(1, BLOCK // D_PAD)
    launches.kernel(_merge, triton.cdiv(rows, ROWS))(
        flat,
        flat_lses,
        flat_sums,
        out,
        lse,
        parts,
        rows,
        *flat.stride()[:2],
        *flat_lses.stride(),
        *flat_sums.stride(),
        D=D,
        D_PAD=D_PAD,
        ROWS=ROWS,
        SUMS=sums is not None,
        num_warps=4,
    )
    return out, lse
