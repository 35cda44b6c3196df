# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""RMSNorm and a gate, in groups of channels, on the vector cores: rows [A, H, D].

    out = x r w act(g),  r = (mean x^2 + epsilon)^(-1/2);  or the norm of x act(g), times w

A core takes ROWS of the H rows of one of A, and a group of channels.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...dispatch.common import memory
from ...dispatch.common.gated_norm import rows_of
from ..common import cores, tune, tuples
from ..common.cores import tiled

_KERNEL = "gated_rms_norm.normalise"
_LARGEST = {_KERNEL: 2048, "gated_rms_norm_grad.through": 1024}  # numbers of a tile in UB


class Rows(NamedTuple):
    """Rows of heads, and what is added to a mean square."""

    outer: int
    heads: int
    epsilon: float


class Strides(NamedTuple):
    outer: int
    head: int


@tuples.jit()
def normalise(
    x,
    gate,
    weight,
    out,
    of: Rows,
    x_stride: Strides,
    g_stride: Strides,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    BEFORE: tl.constexpr,
    SILU: tl.constexpr,
    ROWS: tl.constexpr,
):
    GROUPS: tl.constexpr = D // GROUP
    d = tl.arange(0, GROUP)
    r, tiles = tiled(of.heads, ROWS)
    for work in range(tl.program_id(0), of.outer * tiles * GROUPS, tl.num_programs(0)):
        a = (work // (tiles * GROUPS)).to(tl.int64)
        head = work // GROUPS % tiles * ROWS
        first = work % GROUPS * GROUP
        on = (r < of.heads - head)[:, None]
        of_x = x + a * x_stride.outer + head.to(tl.int64) * x_stride.head + first
        of_g = gate + a * g_stride.outer + head.to(tl.int64) * g_stride.head + first
        x_tile = tl.load(of_x + r[:, None] * x_stride.head + d[None], mask=on, other=0.0).to(
            tl.float32
        )
        z = tl.load(of_g + r[:, None] * g_stride.head + d[None], mask=on, other=0.0).to(tl.float32)
        w = tl.load(weight + first + d).to(tl.float32)
        opened = 1.0 / (1.0 + tl.exp(-z))
        if SILU:
            opened = opened * z
        if not BEFORE:
            x_tile = x_tile * opened
        scale = 1.0 / tl.sqrt(tl.sum(x_tile * x_tile, 1) / GROUP + of.epsilon)
        normed = x_tile * scale[:, None] * w[None]
        if BEFORE:
            normed = normed * opened
        to = out + (a * of.heads + head) * D + first
        tl.store(to + r[:, None] * D + d[None], normed.to(out.dtype.element_ty), mask=on)


def fitting(kernel: str, group: int) -> tune.Config | None:
    """The most rows of a group that UB holds."""
    table = [c for c in tune.TABLE[kernel] if c.tiles["ROWS"] * group <= _LARGEST[kernel]]
    return tune.choose(kernel, table, group) if table else None


def constants(size: int, group: int, norm_before_gate: bool, activation: str) -> dict[str, Any]:
    silu = activation != "sigmoid"
    return dict(D=size, GROUP=group, BEFORE=norm_before_gate, SILU=silu)


def unsupported(x: Tensor, group_size: int | None, kernel: str = _KERNEL, **_: Any) -> str | None:
    if x.dtype is torch.float64:
        return "`x` is float64, the vector units take float32, float16 and bfloat16"
    size = x.shape[-1] if group_size is None else group_size
    if size % 16:
        return f"a group has {size} channels, the kernel takes multiples of 16"
    if fitting(kernel, size) is None:
        return f"a group has {size} channels, UB holds up to {_LARGEST[kernel]}"
    return None


def forward(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    epsilon: float,
    group_size: int | None,
    norm_before_gate: bool,
    activation: str,
) -> Tensor:
    out = memory.empty(x.shape, x.dtype, x.device)
    if out.numel() == 0:
        return out
    x, gate = rows_of(x), rows_of(gate)
    outer, heads, size = x.shape
    group = group_size or size
    config = fitting(_KERNEL, group)
    assert config is not None
    work = outer * triton.cdiv(heads, config.tiles["ROWS"]) * (size // group)
    normalise[(min(work, cores.vector()),)](
        x,
        gate,
        weight,
        out,
        outer,
        heads,
        epsilon,
        *x.stride()[:2],
        *gate.stride()[:2],
        **constants(size, group, norm_before_gate, activation),
        **config.keywords,
    )
    return out
