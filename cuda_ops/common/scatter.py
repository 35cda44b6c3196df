# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Sums over the queries that selected a key, for the gradients of keys.

Plain: fp32 atomics, whose order differs from run to run.  Deterministic (as
torch.use_deterministic_algorithms asks): a first launch finds the largest addend (a maximum has no
order), a second adds in 64-bit fixed point, 40 bits below that addend's leading bit.  Integer sums
have no order either, and 2**21 addends of that size fit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...dispatch.common import memory
from ..runtime import launches

PLAIN, PEAK, FIXED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _unit(peak):
    """The power of two that lifts the peak's leading bit to bit 40; 0 for a peak that is no
    finite number, so that the sums become NaN."""
    exponent = ((tl.load(peak) >> 23) & 0xFF) - 127
    unit = tl.exp2((40 - tl.maximum(exponent, -80)).to(tl.float32))
    return tl.where(exponent == 128, 0.0, unit)


@triton.jit
def add(sums, peak, at, addend, mask, MODE: tl.constexpr):
    """sums[at] += addend, or the largest |addend| into `peak`."""
    if MODE == PLAIN:
        tl.atomic_add(sums + at, addend, mask=mask, sem="relaxed")
    elif MODE == PEAK:
        size = tl.abs(tl.where(mask, addend, 0.0)).to(tl.int32, bitcast=True)
        tl.atomic_max(peak, tl.max(tl.max(size, 1), 0), sem="relaxed")
    else:
        tl.atomic_add(sums + at, (addend * _unit(peak)).to(tl.int64), mask=mask, sem="relaxed")


@triton.jit
def _round(sums, peak, out, size, MODE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(sums + at, mask=at < size, other=0).to(tl.float32)
    if MODE == FIXED:
        unit = _unit(peak)
        x = tl.where(unit > 0, x / tl.where(unit > 0, unit, 1.0), float("nan"))
    tl.store(out + at, x.to(out.dtype.element_ty), mask=at < size)


def run(
    launch: Callable[[int, Sequence[Tensor], Tensor], None],
    outs: Sequence[Tensor],
    plain: Callable[[Sequence[Tensor]], None] | None = None,
) -> None:
    """`launch(mode, sums, peaks)` adds up every out, which gets its dtype's rounding of the sum;
    where there is a `plain(sums)`, it is what adds in fp32."""
    device = outs[0].device
    fixed = torch.are_deterministic_algorithms_enabled()
    dtype = torch.int64 if fixed else torch.float32
    sums = [memory.empty(out.shape, dtype, device).zero_() for out in outs]
    peaks = memory.empty((len(outs),), torch.int32, device).zero_()
    modes = (PEAK.value, FIXED.value) if fixed else (PLAIN.value,)
    if plain is not None and not fixed:
        plain(sums)
    else:
        for mode in modes:
            launch(mode, sums, peaks)
    for i, out in enumerate(outs):
        if out.numel():
            launches.kernel(_round, triton.cdiv(out.numel(), 1024))(
                sums[i], peaks[i:], out, out.numel(), MODE=modes[-1], BLOCK=1024
            )
