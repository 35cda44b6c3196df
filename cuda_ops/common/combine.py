# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What programs made of parts of a row's keys, put together in a fixed order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from ...dispatch.common import memory
from ..runtime import launches
from . import gpu, softmax
from .log2 import LN2


class Constants(NamedTuple):
    HEADS: int
    R: int
    SPLITS: int
    WIDTH: int
    HAS_SINK: bool
    STATS: bool
    LSE: bool
    CHAINED: bool


class Results(NamedTuple):
    """Where programs store a row and a head: the output of one part, or parts that are not divided
    by their sum, with their maxima and sums."""

    out: Any
    partial: Any
    partial_max: Any
    partial_sum: Any


@triton.jit
def statistics(softmax_max, softmax_sum, at, row_max, row_sum, valid, mask, LSE: tl.constexpr):
    """Store a row's maximum, given to base 2, and sum; of LSE their log-sum-exp for the maximum."""
    row_max = tl.where(valid, row_max * LN2, float("-inf"))
    if LSE:
        tl.store(softmax_max + at, row_max + tl.log(row_sum), mask=mask)
    else:
        tl.store(softmax_max + at, row_max, mask=mask)
        tl.store(softmax_sum + at, row_sum, mask=mask)


@triton.jit
def _combine(
    partial, partial_max, partial_sum, sinks, out, softmax_max, softmax_sum, C: tl.constexpr
):
    """out of one row and head, WIDTH columns, from its SPLITS parts, always in the same order."""
    program = tl.program_id(0).to(tl.int64)
    row = program // C.HEADS
    head = program % C.HEADS
    split = tl.arange(0, C.SPLITS)
    d = tl.program_id(1) * C.WIDTH + tl.arange(0, C.WIDTH)
    piece = (row * C.SPLITS + split) * C.HEADS + head
    if C.CHAINED:
        gdc_wait()
    top = tl.load(partial_max + piece)
    weight = tl.load(partial_sum + piece)
    o = tl.load(partial + piece[:, None] * C.R + d[None, :], mask=(d < C.R)[None, :], other=0.0)
    weight, row_sum, total, row_max = softmax.merged(top, weight, sinks, head, C.HAS_SINK)
    o = tl.sum(o.to(tl.float32) * weight[:, None], 0)
    valid = row_sum != 0  # a NaN is there, and stays one
    o = tl.where(valid, o / tl.where(valid, total, 1.0), 0.0)
    tl.store(out + program * C.R + d, o.to(out.dtype.element_ty), mask=d < C.R)
    if C.STATS:
        first = tl.program_id(1) == 0
        statistics(softmax_max, softmax_sum, program, row_max, row_sum, valid, first, C.LSE)


@dataclass(frozen=True)
class Parts:
    """What `splits` programs make of a row and a head: outputs that are not divided by their sum
    [count * splits, rank], and their maxima and sums, in the order of the kernel that made them."""

    out: Tensor
    max: Tensor
    sum: Tensor
    splits: int

    @classmethod
    def of(cls, splits: int, count: int, rank: int, unused: Tensor) -> Parts:
        """For `count` rows times heads; one part needs no memory, and `unused` stands for it."""
        if splits == 1:
            return cls(unused, unused, unused, 1)
        sizes = ((count * splits, rank), (count * splits,), (count * splits,))
        out, top, total = (memory.empty(size, torch.float32, unused.device) for size in sizes)
        return cls(out, top, total, splits)

    def results(self, out: Tensor) -> Results:
        return Results(out, self.out, self.max, self.sum)

    @property
    def arguments(self) -> dict[str, Tensor]:
        """As the kernels that make them take them."""
        return dict(partial=self.out, partial_max=self.max, partial_sum=self.sum)


def is_chained(device: torch.device, splits: int) -> bool:
    """Programmatic dependent launch: `combine` is set up while the last parts are being stored."""
    return splits > 1 and gpu.has_chained_launch(device)


def combine(
    parts: Parts,
    sinks: Tensor | None,
    out: Tensor,
    softmax_max: Tensor,
    softmax_sum: Tensor | None,
) -> None:
    """out [.., heads, rank] of parts [rows, splits, heads]; the statistics where not empty, or
    without `softmax_sum` their log-sum-exp for the maxima."""
    heads, rank = out.shape[-2:]
    chained = is_chained(out.device, parts.splits)
    width = min(128 if parts.splits > 8 else 512, triton.next_power_of_2(rank))
    C = Constants(
        HEADS=heads,
        R=rank,
        SPLITS=parts.splits,
        WIDTH=width,
        HAS_SINK=sinks is not None,
        STATS=softmax_max.numel() > 0,
        LSE=softmax_sum is None,
        CHAINED=chained,
    )
    launches.kernel(_combine, out.numel() // rank, triton.cdiv(rank, width))(
        parts.out,
        parts.max,
        parts.sum,
        softmax_max if sinks is None else sinks,
        out,
        softmax_max,
        softmax_max if softmax_sum is None else softmax_sum,
        C=C,
        num_warps=4,
        **({"launch_pdl": True} if chained else {}),
    )
