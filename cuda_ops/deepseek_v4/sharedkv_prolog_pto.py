# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Queries of attention over one shared key-value row, the rows themselves, and what the indexer
asks with; see dispatch/reference/deepseek_v4/sharedkv_prolog_pto.py.

Four launches, each beginning while the one before it ends: all products of x; norms, rotation and
the rows' places, a program a token and output; both products of c; norms and rotation of heads.
Weights of 8 bits add one ahead of each pair of products, which quantizes, and one for what is left.

    condition        kernels
    kv_kind "fp8"    prolog/quantized_stages.py then _tokens, caches/latent_cache_write.py,
                     prolog/quantized_stages.py then _heads
    else             prolog/quantized_stages.py then _tokens, prolog/quantized_stages.py then _heads
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from typing_extensions import Unpack

from ...dispatch.common import memory, nz, quantized
from ...dispatch.ops.deepseek_v4.sharedkv_prolog_pto import Arguments
from ..caches import latent_cache_write
from ..common import gpu, quantize
from ..common.tiling import cdiv, power_of_two
from ..prolog import quantized_stages
from ..prolog import stages as prolog
from ..prolog.quantized_matmul import Weight
from ..prolog.stages import rms_normed, run_sum, weights_of
from ..runtime import launches
from .last_rotation import angles, other_of, standing

TRANSFORMED = 128  # dims of an index head that is


class TokenConstants(NamedTuple):
    """DOWN, ROW and PROJ are the columns that lie between the sums of two tokens."""

    Q: int
    D: int
    DR: int
    NI: int
    PAGE: int
    DOWN: int
    ROW: int
    PROJ: int
    DOWN_RUNS: int
    ROW_RUNS: int
    PROJ_RUNS: int
    USED: bool
    LATER: bool
    CHAINED: bool


@triton.jit(do_not_specialize=["tokens", "steps", "columns", "pages", "eps"])
def _tokens(
    down,
    row_sums,
    proj,
    gamma_cq,
    gamma_kv,
    sin,
    cos,
    table,
    act_seqs,
    seqused,
    ori_kv,
    slots,
    query_norm,
    weights,
    tokens,
    steps,
    columns,
    pages,
    page_step,
    eps,
    C: tl.constexpr,
):
    """One program: a token and a role (query norm, row, weights).  LATER: `ori_kv` is [T, D] in
    bfloat16, and where a row belongs goes to `slots`."""
    dtype: tl.constexpr = query_norm.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    role = tl.program_id(1)
    if C.CHAINED:
        gdc_launch_dependents()
    request, position, present = standing(act_seqs, seqused, token, steps, C.USED)
    wide = tl.cast(tokens, tl.int64)
    if role == 0:
        g = weights_of(gamma_cq, C.Q)
        if C.CHAINED:
            gdc_wait()
        j, mask, normed = rms_normed(
            down + token * C.DOWN, wide * C.DOWN, g, eps, C.Q, C.DOWN_RUNS, dtype
        )
        tl.store(query_norm + token * C.Q + j, tl.where(present, normed, 0.0).to(dtype), mask=mask)
    if role == 1:
        j = tl.arange(0, triton.next_power_of_2(C.D))
        mask = j < C.D
        other = other_of(j, C.D, C.DR)
        column = position // C.PAGE
        written = present & (column < columns)
        page = tl.load(table + request * columns + column, mask=written, other=-1).to(tl.int64)
        written = written & (page >= 0) & (page < pages)
        g = tl.load(gamma_kv + j, mask=mask, other=0.0).to(tl.float32)
        h = tl.load(gamma_kv + other, mask=mask, other=0.0).to(tl.float32)
        c, s = angles(sin + token * C.DR, cos + token * C.DR, j, mask, C.D, C.DR)
        if C.CHAINED:
            gdc_wait()
        row_sums += token * C.ROW
        u = run_sum(row_sums + j, wide * C.ROW, mask, C.ROW_RUNS).to(dtype).to(tl.float32)
        v = run_sum(row_sums + other, wide * C.ROW, mask, C.ROW_RUNS).to(dtype).to(tl.float32)
        scale = tl.rsqrt(tl.sum(u * u, 0) / C.D + eps)
        row = u * scale * g * c + v * scale * h * s
        inner = position % C.PAGE
        if C.LATER:
            tl.store(slots + token, tl.where(written, page * C.PAGE + inner, -1))
            row = quantize.bf16_rounded(row).to(tl.bfloat16)
            tl.store(ori_kv + token * C.D + j, row, mask=mask)
        else:
            to = ori_kv + tl.where(written, page, 0) * page_step + inner * C.D + j
            tl.store(to, row.to(dtype), mask=mask & written)
    if role == 2:
        j = tl.arange(0, triton.next_power_of_2(max(C.NI, 1)))
        mask = j < C.NI
        if C.CHAINED:
            gdc_wait()
        u = run_sum(proj + token * C.PROJ + j, wide * C.PROJ, mask, C.PROJ_RUNS)
        tl.store(weights + token * C.NI + j, tl.where(present, u, 0.0).to(dtype), mask=mask)


@triton.jit
def _store_heads(
    q,
    sin,
    cos,
    out,
    run_stride,
    first,
    present,
    eps,
    D: tl.constexpr,
    DR: tl.constexpr,
    RUNS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    HADAMARD: tl.constexpr,
    BF16: tl.constexpr,
):
    """Heads of a token from `first` on: RMSNorm without a gain and the Hadamard transform where
    they are asked for, and rotation."""
    dtype: tl.constexpr = out.dtype.element_ty
    head = first + tl.arange(0, BLOCK)
    j = tl.arange(0, triton.next_power_of_2(D))
    mask = (head < HEADS)[:, None] & (j < D)[None, :]
    at = (head * D)[:, None]
    u = run_sum(q + at + j[None, :], run_stride, mask, RUNS).to(dtype).to(tl.float32)
    v = run_sum(q + at + other_of(j, D, DR)[None, :], run_stride, mask, RUNS)
    v = v.to(dtype).to(tl.float32)
    c, s = angles(sin, cos, j, j < D, D, DR)
    if NORM:
        scale = tl.rsqrt(tl.sum(u * u, 1) / D + eps)[:, None]
        u *= scale
        v *= scale
    turned = u * c[None, :] + v * s[None, :]
    if HADAMARD:
        turned = quantize.rotated(turned.to(dtype).to(tl.float32), True, BF16)
    tl.store(out + at + j[None, :], tl.where(present, turned, 0.0).to(dtype), mask=mask)


class HeadConstants(NamedTuple):
    """QUERY and INDEX are the columns that lie between the sums of two tokens; BLOCK_N and BLOCK_I
    heads are taken at once."""

    N: int
    D: int
    NI: int
    DI: int
    DR: int
    QUERY: int
    INDEX: int
    RUNS: int
    INDEX_RUNS: int
    BLOCK_N: int
    BLOCK_I: int
    USED: bool
    HADAMARD: bool
    BF16: bool
    CHAINED: bool


@triton.jit(do_not_specialize=["tokens", "steps", "eps"])
def _heads(
    q, index, sin, cos, act_seqs, seqused, query, query_index, tokens, steps, eps, C: tl.constexpr
):
    """One program: a token and a block of heads, those of queries first."""
    BLOCKS: tl.constexpr = (C.N + C.BLOCK_N - 1) // C.BLOCK_N
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    if C.CHAINED:
        gdc_launch_dependents()
    _, _, present = standing(act_seqs, seqused, token, steps, C.USED)
    wide = tl.cast(tokens, tl.int64)
    sin += token * C.DR
    cos += token * C.DR
    if C.CHAINED:
        gdc_wait()
    if block < BLOCKS:
        _store_heads(
            q + token * C.QUERY,
            sin,
            cos,
            query + token * (C.N * C.D),
            wide * C.QUERY,
            block * C.BLOCK_N,
            present,
            eps,
            C.D,
            C.DR,
            C.RUNS,
            C.N,
            C.BLOCK_N,
            True,
            False,
            False,
        )
    elif C.NI > 0:
        _store_heads(
            index + token * C.INDEX,
            sin,
            cos,
            query_index + token * (C.NI * C.DI),
            wide * C.INDEX,
            (block - BLOCKS) * C.BLOCK_I,
            present,
            eps,
            C.DI,
            C.DR,
            C.INDEX_RUNS,
            C.NI,
            C.BLOCK_I,
            False,
            C.HADAMARD,
            C.BF16,
        )


def unsupported(
    token_x: Tensor,
    w_idx_qb: Tensor | None,
    w_idx_proj: Tensor | None,
    weight_format: str,
    index_hadamard: bool,
    **_: Any,
) -> str | None:
    against = prolog.unsupported(token_x)
    if against is None and index_hadamard:
        assert w_idx_qb is not None and w_idx_proj is not None  # the check said so
        size = nz.columns_of(w_idx_qb, weight_format)
        size //= nz.columns_of(w_idx_proj, weight_format)
        if size != TRANSFORMED:
            return f"index_hadamard with an index dim of {size}, supported {TRANSFORMED}"
    return against


def forward(**x: Unpack[Arguments]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    token_x, rope_sin, ori_kv, act_seqs = x["token_x"], x["rope_sin"], x["ori_kv"], x["act_seqs"]
    seqused, w_idx_qb, w_idx_proj = x["seqused"], x["w_idx_qb"], x["w_idx_proj"]
    weight_format = x["weight_format"]
    requests, steps, hidden = token_x.shape
    tokens, dtype, device = requests * steps, token_x.dtype, token_x.device
    ranks, size, rotary = x["gamma_cq"].shape[0], x["gamma_kv"].shape[0], rope_sin.shape[-1]
    heads = nz.columns_of(x["w_uq"], weight_format) // size
    index_heads = index_size = 0
    first = [
        Weight(x["w_dq"], ranks, x["dequant_scale_w_dq"]),
        Weight(x["w_kv"], size, x["dequant_scale_w_kv"]),
    ]
    second = [Weight(x["w_uq"], heads * size, x["dequant_scale_w_uq"])]
    if w_idx_qb is not None and w_idx_proj is not None:
        index_heads = nz.columns_of(w_idx_proj, weight_format)
        index_size = nz.columns_of(w_idx_qb, weight_format) // index_heads
        first.append(Weight(w_idx_proj, index_heads, None))
        second.append(Weight(w_idx_qb, index_heads * index_size, x["dequant_scale_w_idx_qb"]))
    front = (requests, steps)
    index_front = (*front, index_heads) if index_heads else (0,)
    query = memory.empty((*front, heads, size), dtype, device)
    query_norm = memory.empty((*front, ranks), dtype, device)
    query_index = memory.empty((*index_front, index_size) if index_heads else (0,), dtype, device)
    weights = memory.empty(index_front, dtype, device)
    if tokens == 0:
        return query, query_norm, query_index, weights
    chained = gpu.has_chained_launch(device)
    used = act_seqs if seqused is None else seqused
    down, row_sums, *proj = quantized_stages.products(
        token_x.view(tokens, hidden), {}, first, weight_format, "ue8m0", dtype, first=True
    )
    of_heads = proj[0] if proj else down
    later, rows, slots = x["kv_kind"] == "fp8", ori_kv, act_seqs
    if later:
        rows = memory.empty((tokens, size), torch.bfloat16, device)
        slots = memory.empty((tokens,), torch.int64, device)
    launches.kernel(_tokens, tokens, 3 if index_heads else 2)(
        down,
        row_sums,
        of_heads,
        x["gamma_cq"],
        x["gamma_kv"],
        rope_sin,
        x["rope_cos"],
        x["ori_block_table"],
        act_seqs,
        used,
        rows,
        slots,
        query_norm,
        weights,
        tokens,
        steps,
        x["ori_block_table"].shape[1],
        ori_kv.shape[0],
        ori_kv.stride(0),
        x["rms_norm_eps"],
        C=TokenConstants(
            Q=ranks,
            D=size,
            DR=rotary,
            NI=index_heads,
            PAGE=ori_kv.shape[1],
            DOWN=down.stride(1),
            ROW=row_sums.stride(1),
            PROJ=of_heads.stride(1),
            DOWN_RUNS=down.shape[0],
            ROW_RUNS=row_sums.shape[0],
            PROJ_RUNS=of_heads.shape[0],
            USED=seqused is not None,
            LATER=later,
            CHAINED=chained,
        ),
        num_warps=4,
        launch_pdl=chained,
    )
    if later:
        values = quantized.V4_VALUES
        latent_cache_write.forward(
            ckv=rows[:, :values],
            k_rope=rows[:, values:],
            rows=ori_kv,
            slots=slots,
            kind="fp8",
            row_layout=quantized.V4,
            scale_format="ue8m0",
            k_nope_clip_alpha=None,
            rope_head_dim=quantized.ROTARY,
        )
    q, *index = quantized_stages.products(
        query_norm.view(tokens, ranks), {}, second, weight_format, "ue8m0", dtype
    )
    of_index = index[0] if index else q
    BLOCK_N = max(1, 2048 // power_of_two(size))
    BLOCK_I = max(1, 2048 // power_of_two(max(index_size, 1)))
    blocks = cdiv(heads, BLOCK_N) + cdiv(index_heads, BLOCK_I)
    launches.kernel(_heads, tokens, blocks)(
        q,
        of_index,
        rope_sin,
        x["rope_cos"],
        act_seqs,
        used,
        query,
        query_index,
        tokens,
        steps,
        x["rms_norm_eps"],
        C=HeadConstants(
            N=heads,
            D=size,
            NI=index_heads,
            DI=index_size,
            DR=rotary,
            QUERY=q.stride(1),
            INDEX=of_index.stride(1),
            RUNS=q.shape[0],
            INDEX_RUNS=of_index.shape[0],
            BLOCK_N=BLOCK_N,
            BLOCK_I=BLOCK_I,
            USED=seqused is not None,
            HADAMARD=x["index_hadamard"],
            BF16=x["hadamard_round"] == "bf16",
            CHAINED=chained,
        ),
        num_warps=4,
        launch_pdl=chained,
    )
    return query, query_norm, query_index, weights
