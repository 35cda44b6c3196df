# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The gradient of RMSNorm with a gate; rows [A, H, D] in groups of channels.

    n = u r,  r = (mean u^2 + epsilon)^(-1/2)      du = r (dn - n mean(dn n))

A program takes some blocks of BLOCK_R rows of a group and keeps its own sums for the weight; torch
adds up those of all programs, in the same order every time.

    condition    kernels
    any          _backward
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from typing_extensions import Unpack

from ...dispatch.common import memory
from ...dispatch.common.gated_norm import rows_of
from ...dispatch.ops.delta_rule.gated_rms_norm_grad import Arguments
from ..common import gpu
from ..runtime import launches
from .gated_rms_norm import constants, rows_at
from .gated_rms_norm import unsupported as unsupported


@triton.jit(do_not_specialize=["rows", "heads", "epsilon", "blocks"])
def _backward(
    x,
    gate,
    weight,
    d_out,
    dx,
    d_gate,
    sums,
    rows,
    heads,
    epsilon,
    blocks,
    x_outer,
    x_head,
    g_outer,
    g_head,
    o_outer,
    o_head,
    C: tl.constexpr,
):
    GROUPS: tl.constexpr = C.D // C.GROUP
    first = tl.program_id(0) % GROUPS * C.GROUP
    chunk = tl.program_id(0) // GROUPS
    d = first + tl.arange(0, C.BLOCK_G)
    on_d = d < first + C.GROUP
    w = tl.load(weight + d, mask=on_d, other=0.0).to(tl.float32)[None]
    total = tl.full([C.BLOCK_R, C.BLOCK_G], 0.0, tl.float32)
    for block in range(blocks):
        row = (chunk * blocks + block) * C.BLOCK_R + tl.arange(0, C.BLOCK_R)
        mask = (row < rows)[:, None] & on_d[None]
        x_at = rows_at(row, heads, x_outer, x_head)[:, None] + d[None]
        g_at = rows_at(row, heads, g_outer, g_head)[:, None] + d[None]
        o_at = rows_at(row, heads, o_outer, o_head)[:, None] + d[None]
        x_tile = tl.load(x + x_at, mask=mask, other=0.0).to(tl.float32)
        z = tl.load(gate + g_at, mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(d_out + o_at, mask=mask, other=0.0).to(tl.float32)
        share = 1.0 / (1.0 + tl.exp(-z))
        if C.SILU:
            opened = z * share
            slope = share * (1.0 + z * (1.0 - share))
        else:
            opened = share
            slope = share * (1.0 - share)
        u = x_tile if C.BEFORE else x_tile * opened
        scale = (1.0 / tl.sqrt(tl.sum(u * u, 1) / C.GROUP + epsilon))[:, None]
        n = u * scale
        dn = grad * w * opened if C.BEFORE else grad * w
        du = scale * (dn - n * (tl.sum(dn * n, 1) / C.GROUP)[:, None])
        if C.BEFORE:
            x_grad = du
            z_grad = grad * w * n * slope
            total += grad * n * opened
        else:
            x_grad = du * opened
            z_grad = du * x_tile * slope
            total += grad * n
        to = row.to(tl.int64)[:, None] * C.D + d[None]
        tl.store(dx + to, x_grad.to(dx.dtype.element_ty), mask=mask)
        tl.store(d_gate + to, z_grad.to(d_gate.dtype.element_ty), mask=mask)
    tl.store(sums + chunk.to(tl.int64) * C.D + d, tl.sum(total, 0), mask=on_d)


def backward(**a: Unpack[Arguments]) -> tuple[Tensor, Tensor, Tensor]:
    x, gate, d_out = a["x"], a["gate"], a["d_out"]
    dx = memory.empty(x.shape, x.dtype, x.device)
    d_gate = memory.empty(x.shape, gate.dtype, x.device)
    x, gate, d_out = rows_of(x), rows_of(gate), rows_of(d_out)
    rows, heads, size = x.shape[0] * x.shape[1], x.shape[1], x.shape[2]
    group = a["group_size"] or max(1, size)
    C = constants(size, group, a["norm_before_gate"], a["activation"])
    groups = size // group
    # four programs a multiprocessor, if there is as much to do
    most = triton.cdiv(rows, C.BLOCK_R) * groups // (4 * gpu.num_sms(x.device))
    blocks = 1 << min(6, max(0, most.bit_length() - 1))
    chunks = triton.cdiv(rows, C.BLOCK_R * blocks)
    sums = memory.empty([chunks, size], torch.float32, x.device)
    found = (dx, d_gate, sums)
    if dx.numel() > 0:
        launches.kernel(_backward, chunks * groups)(
            x,
            gate,
            a["weight"],
            d_out,
            *found,
            rows,
            heads,
            a["epsilon"],
            blocks,
            *x.stride()[:2],
            *gate.stride()[:2],
            *d_out.stride()[:2],
            C=C,
            num_warps=4 if C.BLOCK_G <= 2048 else 16,
        )
    return dx, d_gate, sums.sum(0).to(a["weight"].dtype)
