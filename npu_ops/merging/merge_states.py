# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Partial attentions merged by their log-sum-exps, a row at a time: its weights as one vector, its
parts one after the other through UB."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from ...dispatch.common import memory
from ..common import cores, entry, tune

MOST_PARTS = 64
PARTS = tl.constexpr(MOST_PARTS)


@entry.jit(
    do_not_specialize=[
        "parts", "rows", "size", "o_part", "o_row", "l_part", "l_row", "s_part", "s_row"
    ]
)  # fmt: skip
def merge(
    outs,
    lses,
    sums,
    out,
    out_lse,
    parts,
    rows,
    size,
    o_part,
    o_row,
    l_part,
    l_row,
    s_part,
    s_row,
    SUMS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    p = tl.arange(0, PARTS)
    d = tl.arange(0, WIDTH)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        wide = row.to(tl.int64)
        of_lses = lses + wide * l_row + p.to(tl.int64) * l_part
        lse = tl.load(of_lses, mask=p < parts, other=float("-inf"))
        if SUMS:
            of_sums = sums + wide * s_row + p.to(tl.int64) * s_part
            lse += tl.log(tl.load(of_sums, mask=p < parts, other=0.0))
        # neither infinite nor NaN: both compares are false for a NaN
        counts = tl.where(lse < float("inf"), 1.0, 0.0) * tl.where(lse > float("-inf"), 1.0, 0.0)
        lse = tl.where(counts > 0, lse, float("-inf"))
        top = tl.max(lse, 0)
        # no part counts: exp(-inf - 0) is 0, not NaN
        weight = tl.exp(lse - tl.where(top > float("-inf"), top, 0.0))
        total = tl.sum(weight, 0)
        share = weight / tl.where(total > 0, total, 1.0)
        acc = tl.zeros((WIDTH,), tl.float32)
        for part in range(0, parts):
            here = tl.sum(tl.where(p == part, counts, 0.0), 0)
            # an empty part is not read: it may be NaN
            length = tl.where(here > 0, size, 0)
            at = outs + part.to(tl.int64) * o_part + wide * o_row
            x = tl.load(at + d, mask=d < length, other=0.0).to(tl.float32)
            acc += x * tl.sum(tl.where(p == part, share, 0.0), 0)
        tl.store(out + wide * size + d, acc.to(out.dtype.element_ty), mask=d < size)
        tl.store(out_lse + row, top + tl.log(total))


def widest() -> int:
    return max(config.tiles["WIDTH"] for config in tune.TABLE["merge_states.merge"])


def unsupported(outs: Tensor, lses: Tensor, **_: Any) -> str | None:
    if torch.float64 in (outs.dtype, lses.dtype):
        return "inputs are float64, the vector unit computes in float32"
    if outs.shape[0] > MOST_PARTS:
        return f"{outs.shape[0]} parts, the kernel merges up to {MOST_PARTS}: merge in two steps"
    if outs.shape[-1] > widest():
        return f"D={outs.shape[-1]}, the kernel holds up to {widest()}"
    return None


def forward(outs: Tensor, lses: Tensor, sums: Tensor | None) -> tuple[Tensor, Tensor]:
    parts, *batch, size = outs.shape
    out = memory.empty((*batch, size), outs.dtype, outs.device)
    lse = memory.empty(batch, torch.float32, outs.device)
    rows = lse.numel()
    if rows == 0 or parts == 0:
        return out.zero_(), lse.fill_(-torch.inf)
    flat = outs.reshape(parts, rows, size)
    flat_lses = lses.reshape(parts, rows)
    flat_sums = flat_lses if sums is None else sums.reshape(parts, rows)
    merge[(min(rows, cores.vector()),)](
        flat,
        flat_lses,
        flat_sums,
        out,
        lse,
        parts,
        rows,
        size,
        *flat.stride()[:2],
        *flat_lses.stride(),
        *flat_sums.stride(),
        SUMS=sums is not None,
        **tune.at_least("merge_states.merge", "WIDTH", size).keywords,
    )
    return out, lse
