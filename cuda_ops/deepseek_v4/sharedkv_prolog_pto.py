# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Queries of attention over one shared key-value row, the rows themselves, and what the indexer
asks with; see dispatch/reference/deepseek_v4/sharedkv_prolog_pto.py.

Four launches, each beginning while the one before it ends: all products of x; norms, rotation and
the rows' places, a program a token and output; both products of c; norms and rotation of heads.

    condition        kernels
    kv_kind "fp8"    prolog/nz_matmul.py then _tokens, caches/latent_cache_write.py,
                     prolog/nz_matmul.py then _heads
    else             prolog/nz_matmul.py then _tokens, prolog/nz_matmul.py then _heads
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...dispatch.common import memory, nz, quantised
from ..caches import latent_cache_write
from ..common import gpu, quantise
from ..common.tiling import cdiv, power_of_two
from ..prolog import stages as prolog
from ..prolog.nz_matmul import product
from ..prolog.stages import rms_normed, run_sum, weights_of
from ..runtime import launches
from .last_rotation import angles, other_of, standing

TRANSFORMED = 128  # dims of an index head that is


@triton.jit(do_not_specialize=["tokens", "steps", "columns", "pages", "eps"])
def _tokens(
    partial, gamma_cq, gamma_kv, sin, cos, table, act_seqs, seqused, ori_kv, slots, query_norm,
    weights, tokens, steps, columns, pages, page_step, eps,
    Q: tl.constexpr, D: tl.constexpr, DR: tl.constexpr, NI: tl.constexpr, PAGE: tl.constexpr,
    RUNS: tl.constexpr, USED: tl.constexpr, LATER: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """One program: a token and a role (query norm, row, weights).  The sums lie as [Q | D | NI].
    LATER: `ori_kv` is [T, D] in bfloat16, and where a row belongs goes to `slots`."""
    dtype: tl.constexpr = query_norm.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    role = tl.program_id(1)
    if CHAINED:
        gdc_launch_dependents()
    request, position, present = standing(act_seqs, seqused, token, steps, USED)
    stride = tl.cast(tokens, tl.int64) * (Q + D + NI)
    partial += token * (Q + D + NI)
    if role == 0:
        g = weights_of(gamma_cq, Q)
        if CHAINED:
            gdc_wait()
        j, mask, normed = rms_normed(partial, stride, g, eps, Q, RUNS, dtype)
        tl.store(query_norm + token * Q + j, tl.where(present, normed, 0.0).to(dtype), mask=mask)
    if role == 1:
        j = tl.arange(0, triton.next_power_of_2(D))
        mask = j < D
        other = other_of(j, D, DR)
        column = position // PAGE
        written = present & (column < columns)
        page = tl.load(table + request * columns + column, mask=written, other=-1).to(tl.int64)
        written = written & (page >= 0) & (page < pages)
        g = tl.load(gamma_kv + j, mask=mask, other=0.0).to(tl.float32)
        h = tl.load(gamma_kv + other, mask=mask, other=0.0).to(tl.float32)
        c, s = angles(sin + token * DR, cos + token * DR, j, mask, D, DR)
        if CHAINED:
            gdc_wait()
        u = run_sum(partial + Q + j, stride, mask, RUNS).to(dtype).to(tl.float32)
        v = run_sum(partial + Q + other, stride, mask, RUNS).to(dtype).to(tl.float32)
        scale = tl.rsqrt(tl.sum(u * u, 0) / D + eps)
        row = u * scale * g * c + v * scale * h * s
        inner = position % PAGE
        if LATER:
            tl.store(slots + token, tl.where(written, page * PAGE + inner, -1))
            row = quantise.bf16_rounded(row).to(tl.bfloat16)
            tl.store(ori_kv + token * D + j, row, mask=mask)
        else:
            to = ori_kv + tl.where(written, page, 0) * page_step + inner * D + j
            tl.store(to, row.to(dtype), mask=mask & written)
    if role == 2:
        j = tl.arange(0, triton.next_power_of_2(max(NI, 1)))
        mask = j < NI
        if CHAINED:
            gdc_wait()
        u = run_sum(partial + Q + D + j, stride, mask, RUNS)
        tl.store(weights + token * NI + j, tl.where(present, u, 0.0).to(dtype), mask=mask)


@triton.jit
def _store_heads(
    q, sin, cos, out, run_stride, first, present, eps, D: tl.constexpr, DR: tl.constexpr,
    RUNS: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr,
    HADAMARD: tl.constexpr, BF16: tl.constexpr,
):  # fmt: skip
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
        turned = quantise.rotated(turned.to(dtype).to(tl.float32), True, BF16)
    tl.store(out + at + j[None, :], tl.where(present, turned, 0.0).to(dtype), mask=mask)


@triton.jit(do_not_specialize=["tokens", "steps", "eps"])
def _heads(
    q, sin, cos, act_seqs, seqused, query, query_index, tokens, steps, eps,
    N: tl.constexpr, D: tl.constexpr, NI: tl.constexpr, DI: tl.constexpr, DR: tl.constexpr,
    RUNS: tl.constexpr, USED: tl.constexpr, HADAMARD: tl.constexpr, BF16: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_I: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """One program: a token and a block of heads, those of queries first.  q is [RUNS, T, N D + NI
    DI]."""
    BLOCKS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    TOTAL: tl.constexpr = N * D + NI * DI
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    if CHAINED:
        gdc_launch_dependents()
    _, _, present = standing(act_seqs, seqused, token, steps, USED)
    stride = tl.cast(tokens, tl.int64) * TOTAL
    q += token * TOTAL
    sin += token * DR
    cos += token * DR
    if CHAINED:
        gdc_wait()
    if block < BLOCKS:
        _store_heads(
            q, sin, cos, query + token * (N * D), stride, block * BLOCK_N, present, eps, D, DR,
            RUNS, N, BLOCK_N, True, False, False,
        )  # fmt: skip
    elif NI > 0:
        _store_heads(
            q + N * D, sin, cos, query_index + token * (NI * DI), stride,
            (block - BLOCKS) * BLOCK_I, present, eps, DI, DR, RUNS, NI, BLOCK_I, False, HADAMARD,
            BF16,
        )  # fmt: skip


def unsupported(
    token_x: Tensor, w_idx_qb: Tensor | None, w_idx_proj: Tensor | None, weight_format: str,
    index_hadamard: bool, **_: Any,
) -> str | None:  # fmt: skip
    against = prolog.unsupported(token_x)
    if against is None and index_hadamard:
        assert w_idx_qb is not None and w_idx_proj is not None  # the check said so
        size = nz.columns_of(w_idx_qb, weight_format)
        size //= nz.columns_of(w_idx_proj, weight_format)
        if size != TRANSFORMED:
            return f"index_hadamard with an index dim of {size}, supported {TRANSFORMED}"
    return against


def forward(
    token_x: Tensor,
    w_dq: Tensor,
    w_uq: Tensor,
    w_kv: Tensor,
    gamma_cq: Tensor,
    gamma_kv: Tensor,
    rope_sin: Tensor,
    rope_cos: Tensor,
    ori_kv: Tensor,
    ori_block_table: Tensor,
    act_seqs: Tensor,
    seqused: Tensor | None,
    w_idx_qb: Tensor | None,
    w_idx_proj: Tensor | None,
    rms_norm_eps: float,
    weight_format: str,
    kv_kind: str,
    index_hadamard: bool,
    hadamard_round: str,
    **_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    requests, steps, hidden = token_x.shape
    tokens, dtype, device = requests * steps, token_x.dtype, token_x.device
    ranks, size, rotary = gamma_cq.shape[0], gamma_kv.shape[0], rope_sin.shape[-1]
    heads = nz.columns_of(w_uq, weight_format) // size
    index_heads = index_size = 0
    first, second = [(w_dq, ranks), (w_kv, size)], [(w_uq, heads * size)]
    if w_idx_qb is not None and w_idx_proj is not None:
        index_heads = nz.columns_of(w_idx_proj, weight_format)
        index_size = nz.columns_of(w_idx_qb, weight_format) // index_heads
        first.append((w_idx_proj, index_heads))
        second.append((w_idx_qb, index_heads * index_size))
    front = (requests, steps)
    of_index = (*front, index_heads) if index_heads else (0,)
    query = memory.empty((*front, heads, size), dtype, device)
    query_norm = memory.empty((*front, ranks), dtype, device)
    query_index = memory.empty((*of_index, index_size) if index_heads else (0,), dtype, device)
    weights = memory.empty(of_index, dtype, device)
    if tokens == 0:
        return query, query_norm, query_index, weights
    chained = gpu.has_chained_launch(device)
    used = act_seqs if seqused is None else seqused
    partial = product(
        token_x.view(tokens, hidden), first, weight_format, keep_float=True, first=True
    )
    later, rows, slots = kv_kind == "fp8", ori_kv, act_seqs
    if later:
        rows = memory.empty((tokens, size), torch.bfloat16, device)
        slots = memory.empty((tokens,), torch.int64, device)
    launches.kernel(_tokens, tokens, 3 if index_heads else 2)(
        partial, gamma_cq, gamma_kv, rope_sin, rope_cos,
        ori_block_table, act_seqs, used, rows, slots, query_norm, weights,
        tokens, steps, ori_block_table.shape[1], ori_kv.shape[0], ori_kv.stride(0), rms_norm_eps,
        Q=ranks, D=size, DR=rotary, NI=index_heads, PAGE=ori_kv.shape[1], RUNS=partial.shape[0],
        USED=seqused is not None, LATER=later, CHAINED=chained, num_warps=4, launch_pdl=chained,
    )  # fmt: skip
    if later:
        values = quantised.V4_VALUES
        latent_cache_write.forward(
            rows[:, :values], rows[:, values:], ori_kv, slots, "fp8", quantised.V4, "ue8m0", None
        )
    q = product(query_norm.view(tokens, ranks), second, weight_format)
    BLOCK_N = max(1, 2048 // power_of_two(size))
    BLOCK_I = max(1, 2048 // power_of_two(max(index_size, 1)))
    blocks = cdiv(heads, BLOCK_N) + cdiv(index_heads, BLOCK_I)
    launches.kernel(_heads, tokens, blocks)(
        q, rope_sin, rope_cos, act_seqs, used, query, query_index, tokens, steps, rms_norm_eps,
        N=heads, D=size, NI=index_heads, DI=index_size, DR=rotary, RUNS=q.shape[0],
        USED=seqused is not None, HADAMARD=index_hadamard, BF16=hadamard_round == "bf16",
        BLOCK_N=BLOCK_N, BLOCK_I=BLOCK_I, CHAINED=chained, num_warps=4, launch_pdl=chained,
    )  # fmt: skip
    return query, query_norm, query_index, weights
