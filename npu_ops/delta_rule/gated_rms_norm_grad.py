# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The gradient of RMSNorm with a gate, on the vector cores; rows [A, H, D] in groups of channels.

    n = u r,  r = (mean u^2 + epsilon)^(-1/2)      du = r (dn - n mean(dn n))

A core keeps its own sums for the weight, one group after the other; torch adds them up.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...dispatch.common import memory
from ...dispatch.common.gated_norm import rows_of
from ..common import cores, tuples
from ..common.cores import tiled
from . import gated_rms_norm as norm

_KERNEL = "gated_rms_norm_grad.through"
unsupported = partial(norm.unsupported, kernel=_KERNEL)


class Gradients(NamedTuple):
    """Where they go; those of the weight, summed by program."""

    x: Tensor
    gate: Tensor
    weight: Tensor


@tuples.jit()
def through(
    x,
    gate,
    weight,
    d_out,
    into: Gradients,
    of: norm.Rows,
    x_stride: norm.Strides,
    g_stride: norm.Strides,
    o_stride: norm.Strides,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    BEFORE: tl.constexpr,
    SILU: tl.constexpr,
    ROWS: tl.constexpr,
):
    d = tl.arange(0, GROUP)
    r, tiles = tiled(of.heads, ROWS)
    for first in range(0, D, GROUP):
        w = tl.load(weight + first + d).to(tl.float32)
        total = tl.zeros((GROUP,), tl.float32)
        for work in range(tl.program_id(0), of.outer * tiles, tl.num_programs(0)):
            a = (work // tiles).to(tl.int64)
            head = work % tiles * ROWS
            on = (r < of.heads - head)[:, None]
            h = head.to(tl.int64)
            of_x = x + a * x_stride.outer + h * x_stride.head + first
            of_g = gate + a * g_stride.outer + h * g_stride.head + first
            of_o = d_out + a * o_stride.outer + h * o_stride.head + first
            u = tl.load(of_x + r[:, None] * x_stride.head + d[None], mask=on, other=0.0).to(
                tl.float32
            )
            z = tl.load(of_g + r[:, None] * g_stride.head + d[None], mask=on, other=0.0).to(
                tl.float32
            )
            grad = tl.load(of_o + r[:, None] * o_stride.head + d[None], mask=on, other=0.0).to(
                tl.float32
            )
            share = 1.0 / (1.0 + tl.exp(-z))
            slope = share * (1.0 - share)
            opened = share
            if SILU:
                slope = share + z * slope
                opened = z * share
            if BEFORE:
                scale = 1.0 / tl.sqrt(tl.sum(u * u, 1) / GROUP + of.epsilon)
                n = u * scale[:, None]
                z_grad = grad * w[None] * n * slope
                grad = grad * opened
                total += tl.sum(grad * n, 0)
                dn = grad * w[None]
                share_n = tl.sum(dn * n, 1) / GROUP
                x_grad = (dn - n * share_n[:, None]) * scale[:, None]
            else:
                v = u * opened
                scale = 1.0 / tl.sqrt(tl.sum(v * v, 1) / GROUP + of.epsilon)
                n = v * scale[:, None]
                total += tl.sum(grad * n, 0)
                dn = grad * w[None]
                share_n = tl.sum(dn * n, 1) / GROUP
                dv = (dn - n * share_n[:, None]) * scale[:, None]
                x_grad = dv * opened
                z_grad = dv * u * slope
            to = (a * of.heads + h) * D + first + r[:, None] * D + d[None]
            tl.store(into.x + to, x_grad.to(into.x.dtype.element_ty), mask=on)
            tl.store(into.gate + to, z_grad.to(into.gate.dtype.element_ty), mask=on)
        tl.store(into.weight + tl.program_id(0) * D + first + d, total)


def backward(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    d_out: Tensor,
    epsilon: float,
    group_size: int | None,
    norm_before_gate: bool,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor]:
    dx = memory.empty(x.shape, x.dtype, x.device)
    d_gate = memory.empty(x.shape, gate.dtype, x.device)
    if dx.numel() == 0:
        return dx, d_gate, torch.zeros_like(weight)
    x, gate, d_out = rows_of(x), rows_of(gate), rows_of(d_out)
    outer, heads, size = x.shape
    group = group_size or size
    config = norm.fitting(_KERNEL, group)
    assert config is not None
    programs = min(outer * triton.cdiv(heads, config.tiles["ROWS"]), cores.vector())
    sums = memory.empty([programs, size], torch.float32, x.device)
    through[(programs,)](
        x,
        gate,
        weight,
        d_out,
        dx,
        d_gate,
        sums,
        outer,
        heads,
        epsilon,
        *x.stride()[:2],
        *gate.stride()[:2],
        *d_out.stride()[:2],
        **norm.constants(size, group, norm_before_gate, activation),
        **config.keywords,
    )
    return dx, d_gate, sums.sum(0).to(weight.dtype)
