# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Attention's output turned back and projected, the first product a group of heads at a time; see
dispatch/reference/deepseek_v4/grouped_o_proj_pto.py.

`_groups` turns the dims that carry a rotation while it loads them.  Few tokens: both products are
cut along their depth, and `_added` adds up the runs in order.  The floor is the weights, once.

    condition                        kernels
    weights of 8 bits                _turned, prolog/quantised_matmul.py then _added, then
                                     prolog/quantised_stages.py then _added
    a product cut along its depth    _groups then _added, prolog/quantised_stages.py then _added
    else                             _groups then prolog/quantised_stages.py

`turned_back`, of the whole layer without its projection:

    condition    kernels
    any          _turned
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from typing_extensions import Unpack

from ...dispatch.common import memory, nz, quantised
from ...dispatch.ops.deepseek_v4.grouped_o_proj_pto import Arguments
from ..common import gpu, handover, tiling
from ..common.tiling import cdiv, power_of_two
from ..prolog import quantised_matmul
from ..prolog import stages as prolog
from ..prolog.quantised_matmul import Weight
from ..prolog.quantised_stages import products
from ..prolog.stages import run_sum
from ..runtime import launches
from .last_rotation import angles, other_of

BLOCK = 1024  # numbers that a program of _added takes


@triton.jit(do_not_specialize=["tokens"])
def _groups(
    x,
    w,
    sin,
    cos,
    out,
    tokens,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    DR: tl.constexpr,
    GROUPS: tl.constexpr,
    N: tl.constexpr,
    RUN: tl.constexpr,
    NZ: tl.constexpr,
    C0: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """out [RUNS, T, GROUPS N]: one program a block of tokens, a group's block of columns, a run."""
    K: tl.constexpr = HEADS // GROUPS * D
    BLOCKS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    PLAIN: tl.constexpr = D - DR
    dtype: tl.constexpr = x.dtype.element_ty
    blocks = tl.cdiv(tokens, BLOCK_T)
    program = tl.program_id(0)
    group = program // blocks // BLOCKS
    n = program // blocks % BLOCKS * BLOCK_N + tl.arange(0, BLOCK_N)
    t = (program % blocks * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    first = tl.program_id(1) * RUN
    there, columns = t < tokens, n < N
    panel = K * C0 if NZ else C0
    row = C0 if NZ else N
    w += group.to(tl.int64) * (K * N)
    w_at = (n // C0).to(tl.int64) * panel + n % C0
    x_row = x + t * (HEADS * D) + group * K
    if CHAINED:
        handover.begin(True)
    acc = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
    for at in tl.range(first, tl.minimum(first + RUN, K), BLOCK_K, num_stages=STAGES):
        k = at + tl.arange(0, BLOCK_K)
        mask = there[:, None] & (k < K)[None, :]
        tile = tl.load(x_row[:, None] + k[None, :], mask=mask, other=0.0)
        w_tile = tl.load(
            w + k.to(tl.int64)[:, None] * row + w_at[None, :],
            mask=(k < K)[:, None] & columns[None, :],
            other=0.0,
        )
        # the heads' dims that are turned; where a tile lies in one head, few have any
        if DR > 0 and (D % BLOCK_K != 0 or at % D + BLOCK_K > PLAIN):
            j = k % D
            other = k - j + other_of(j, D, DR)
            v = tl.load(x_row[:, None] + other[None, :], mask=mask, other=0.0).to(tl.float32)
            c, s = angles((sin + t * DR)[:, None], (cos + t * DR)[:, None], j[None, :], mask, D, DR)
            tile = (tile.to(tl.float32) * c - v * s).to(dtype)
        acc = tl.dot(tile, w_tile, acc, input_precision="ieee")
    to = (tl.program_id(1).to(tl.int64) * tokens + t) * (GROUPS * N) + group * N
    out_at = out + to[:, None] + n[None, :]
    tl.store(out_at, acc.to(out.dtype.element_ty), mask=there[:, None] & columns[None, :])


@triton.jit(do_not_specialize=["size"])
def _added(partial, out, size, RUNS: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if CHAINED:
        gdc_launch_dependents()
        gdc_wait()
    acc = run_sum(partial + at, tl.cast(size, tl.int64), at < size, RUNS)
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=at < size)


@triton.jit(do_not_specialize=["tokens"])
def _turned(
    x,
    sin,
    cos,
    out,
    tokens,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    DR: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
    FIRST: tl.constexpr,
):
    """One program: heads of a token, turned back, into out [GROUPS, T, HEADS / GROUPS, D]."""
    OF_GROUP: tl.constexpr = HEADS // GROUPS
    BLOCKS: tl.constexpr = (HEADS + BLOCK - 1) // BLOCK
    token = (tl.program_id(0) // BLOCKS).to(tl.int64)
    head = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    j = tl.arange(0, triton.next_power_of_2(D))
    mask = (head < HEADS)[:, None] & (j < D)[None, :]
    at = token * (HEADS * D) + (head * D)[:, None]
    to = ((head // OF_GROUP * tl.cast(tokens, tl.int64) + token) * OF_GROUP + head % OF_GROUP) * D
    if CHAINED and FIRST:
        handover.begin(True)
    elif CHAINED:
        gdc_launch_dependents()
    c, s = angles(sin + token * DR, cos + token * DR, j, j < D, D, DR)
    if CHAINED and not FIRST:
        gdc_wait()
    u = tl.load(x + at + j[None, :], mask=mask, other=0.0).to(tl.float32)
    v = tl.load(x + at + other_of(j, D, DR)[None, :], mask=mask, other=0.0).to(tl.float32)
    turned = u * c[None, :] - v * s[None, :]
    tl.store(out + to[:, None] + j[None, :], turned.to(out.dtype.element_ty), mask=mask)


def _whole(partial: Tensor, dtype: torch.dtype) -> Tensor:
    """[runs, T, N] of a product, added up and rounded: [T, N]."""
    if partial.shape[0] == 1:
        return partial[0]
    out = memory.empty(partial.shape[1:], dtype, partial.device)
    chained = gpu.has_chained_launch(partial.device)
    launches.kernel(_added, cdiv(out.numel(), BLOCK))(
        partial,
        out,
        out.numel(),
        RUNS=partial.shape[0],
        BLOCK=BLOCK,
        CHAINED=chained,
        num_warps=4,
        launch_pdl=chained,
    )
    return out


def _by_groups(
    x: Tensor, w: Tensor, weight_format: str, sin: Tensor, cos: Tensor, ranks: int
) -> Tensor:
    """x [T, N, D] turned back and multiplied, a group of heads by its weight: [runs, T, G Ro]."""
    tokens, heads, size = x.shape
    groups = w.shape[0]
    depth = heads // groups * size
    config = tiling.plain(tokens, [ranks] * groups, depth, gpu.num_sms(x.device))
    run = cdiv(cdiv(depth, config.runs), config.k) * config.k
    runs = cdiv(depth, run)
    dtype = torch.float32 if runs > 1 else x.dtype
    out = memory.empty((runs, tokens, groups * ranks), dtype, x.device)
    BLOCK_T = max(16, config.tokens)
    chained = gpu.has_chained_launch(x.device)
    programs = cdiv(tokens, BLOCK_T) * groups * cdiv(ranks, config.columns)
    linear = weight_format == "linear"  # NZ of one column a panel
    launches.kernel(_groups, programs, runs)(
        x,
        w,
        sin,
        cos,
        out,
        tokens,
        HEADS=heads,
        D=size,
        DR=sin.shape[-1],
        GROUPS=groups,
        N=ranks,
        RUN=run,
        NZ=linear or w.ndim == 5 or nz.is_nz(w[0], weight_format),
        C0=1 if linear else nz.columns(x.dtype),
        BLOCK_T=BLOCK_T,
        BLOCK_N=config.columns,
        BLOCK_K=config.k,
        STAGES=min(config.stages, 3),
        CHAINED=chained,
        num_warps=config.warps,
        launch_pdl=chained,
    )
    return out


def unsupported(attn_out: Tensor, **_: Any) -> str | None:
    return prolog.unsupported(attn_out)


def forward(**a: Unpack[Arguments]) -> Tensor:
    attn_out, w_o_a, weight_format = a["attn_out"], a["w_o_a"], a["weight_format"]
    front, dtype = attn_out.shape[:2], attn_out.dtype
    hidden, ranks = (nz.columns_of(w, weight_format) for w in (a["w_o_b"], w_o_a))
    if front.numel() == 0:
        return memory.empty((*front, hidden), dtype, attn_out.device)
    if a["dequant_scale_w_o_a"] is None:
        x = attn_out.flatten(0, 1)
        y = _by_groups(x, w_o_a, weight_format, a["rope_sin"], a["rope_cos"], ranks)
    else:
        x = _turned_back(attn_out, a["rope_sin"], a["rope_cos"], w_o_a.shape[0], first=True)
        y = _narrow_groups(x, Weight(w_o_a, ranks, a["dequant_scale_w_o_a"]), weight_format)
    of_hidden = Weight(a["w_o_b"], hidden, a["dequant_scale_w_o_b"])
    [out] = products(_whole(y, dtype), {}, [of_hidden], weight_format, "ue8m0", dtype)
    return _whole(out, dtype).view(*front, hidden)


def _narrow_groups(x: Tensor, w: Weight, weight_format: str) -> Tensor:
    """x [G, T, K], quantised, by a weight of 8 bits for each group: [runs, T, G Ro]."""
    kind = quantised.kind_of(w.values.dtype)
    assert kind is not None  # the check said so
    [rows] = quantised_matmul.activations([(x.flatten(0, 1), None)], kind, "ue8m0")
    form = Weight(w.values[0], w.size, w.scale).form(weight_format)
    return quantised_matmul.product(rows, [w], form, x.dtype, groups=x.shape[0])


def turned_back(attn_out: Tensor, rope_sin: Tensor, rope_cos: Tensor) -> Tensor:
    """What `forward` multiplies, by itself."""
    return _turned_back(attn_out, rope_sin, rope_cos, 1).view(attn_out.shape)


def _turned_back(
    attn_out: Tensor, rope_sin: Tensor, rope_cos: Tensor, groups: int, *, first: bool = False
) -> Tensor:
    """[G, T, N/G D]; `first`: an op starts here."""
    batch, steps, heads, size = attn_out.shape
    shape = (groups, batch * steps, heads // groups * size)
    out = memory.empty(shape, attn_out.dtype, attn_out.device)
    if out.numel() == 0:
        return out
    block = max(1, min(power_of_two(heads), BLOCK * 4 // power_of_two(size)))
    chained = gpu.has_chained_launch(attn_out.device)
    tokens = batch * steps
    launches.kernel(_turned, tokens * cdiv(heads, block))(
        attn_out,
        rope_sin,
        rope_cos,
        out,
        tokens,
        HEADS=heads,
        D=size,
        DR=rope_sin.shape[-1],
        GROUPS=groups,
        BLOCK=block,
        CHAINED=chained,
        FIRST=first,
        num_warps=4,
        launch_pdl=chained,
    )
    return out
