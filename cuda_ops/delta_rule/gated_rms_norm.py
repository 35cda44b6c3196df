# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""RMSNorm and a gate, in groups of channels: rows [A, H, D], H of which lie in one stride.

    out = x r w act(g),  r = (mean x^2 + epsilon)^(-1/2);  or the norm of x act(g), times w

A program takes BLOCK_R rows of a group.  The floor is x, the gate and out, once each.

    condition    kernels
    any          _normalise
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from typing_extensions import Unpack

from ...dispatch.common import memory
from ...dispatch.common.gated_norm import rows_of
from ...dispatch.ops.delta_rule.gated_rms_norm import Arguments
from ..common.convolution import sigmoid
from ..runtime import launches

LARGEST = 16384


class Constants(NamedTuple):
    """Of both directions; a tile has BLOCK_R rows of BLOCK_G channels."""

    D: int
    GROUP: int
    BEFORE: bool
    SILU: bool
    BLOCK_R: int
    BLOCK_G: int


@triton.jit
def opening(gate, SILU: tl.constexpr):
    share = sigmoid(gate)
    return gate * share if SILU else share


@triton.jit
def rows_at(row, heads, outer_stride, head_stride):
    return (row // heads).to(tl.int64) * outer_stride + (row % heads).to(tl.int64) * head_stride


@triton.jit(do_not_specialize=["rows", "heads", "epsilon"])
def _normalise(
    x,
    gate,
    weight,
    out,
    rows,
    heads,
    epsilon,
    x_outer,
    x_head,
    g_outer,
    g_head,
    C: tl.constexpr,
):
    GROUPS: tl.constexpr = C.D // C.GROUP
    first = tl.program_id(0) % GROUPS * C.GROUP
    row = tl.program_id(0) // GROUPS * C.BLOCK_R + tl.arange(0, C.BLOCK_R)
    d = tl.arange(0, C.BLOCK_G)
    mask = (row < rows)[:, None] & (d < C.GROUP)[None]
    d = first + d
    x_at = rows_at(row, heads, x_outer, x_head)[:, None] + d[None]
    g_at = rows_at(row, heads, g_outer, g_head)[:, None] + d[None]
    x_tile = tl.load(x + x_at, mask=mask, other=0.0).to(tl.float32)
    opened = opening(tl.load(gate + g_at, mask=mask, other=0.0).to(tl.float32), C.SILU)
    w = tl.load(weight + d, mask=d < first + C.GROUP, other=0.0).to(tl.float32)
    u = x_tile if C.BEFORE else x_tile * opened
    scale = 1.0 / tl.sqrt(tl.sum(u * u, 1) / C.GROUP + epsilon)
    normed = u * scale[:, None] * w[None]
    if C.BEFORE:
        normed = normed * opened
    to = out + row.to(tl.int64)[:, None] * C.D + d[None]
    tl.store(to, normed.to(out.dtype.element_ty), mask=mask)


def tile(group: int, most: int) -> tuple[int, int]:
    """(rows, channels) of a tile of at most `most` numbers."""
    BLOCK_G = triton.next_power_of_2(group)
    return max(1, most // BLOCK_G), BLOCK_G


def constants(size: int, group: int, norm_before_gate: bool, activation: str) -> Constants:
    return Constants(size, group, norm_before_gate, activation != "sigmoid", *tile(group, 2048))


def unsupported(x: Tensor, group_size: int | None, **_: Any) -> str | None:
    if x.dtype is torch.float64:
        return "x is float64, supported are float32, float16 and bfloat16"
    size = x.shape[-1] if group_size is None else group_size
    if size > LARGEST:
        return f"a group has {size} channels, supported are up to {LARGEST}"
    if x.shape[:-1].numel() >= 2**31 - 2**14:
        return f"{x.shape[:-1].numel()} rows, supported are below 2**31 - 2**14"
    return None


def forward(**a: Unpack[Arguments]) -> Tensor:
    x, gate = a["x"], a["gate"]
    out = memory.empty(x.shape, x.dtype, x.device)
    if out.numel() == 0:
        return out
    x, gate = rows_of(x), rows_of(gate)
    rows, heads, size = x.shape[0] * x.shape[1], x.shape[1], x.shape[2]
    group = a["group_size"] or size
    C = constants(size, group, a["norm_before_gate"], a["activation"])
    launches.kernel(_normalise, triton.cdiv(rows, C.BLOCK_R) * (size // group))(
        x,
        gate,
        a["weight"],
        out,
        rows,
        heads,
        a["epsilon"],
        *x.stride()[:2],
        *gate.stride()[:2],
        C=C,
        num_warps=4 if C.BLOCK_G <= 4096 else 16,
    )
    return out
