# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What both prologs are made of, no op itself: norms and scatters, then absorption and rotation.

    token_stage   sums of the x products -> RMSNorm, LayerNorm, rotated keys, cache rows, weights
    query_stage   c_q products -> absorbed latent query, rotated query heads
    index_stage   c_q products -> rotated index heads

`query_heads`:

    condition                                              kernels
    Hopper, 96 heads to one a processor, up to 256         hopper/query_heads.py
      tokens
    Hopper, over 32 tokens, the product in one run         nz_matmul.py then hopper/query_stage.py
                                                           then _rotation
    else                                                   nz_matmul.py then _query_stage

`index_heads`, where the first kernel rotates as well:

    condition                                              kernels
    Hopper, programs for half of the SMs                   hopper/nz_matmul.py
    else                                                   nz_matmul.py then _rotation

`token_stage`:

    condition    kernels
    any          _token_stage

Without a query latent the queries are a product of x too: they stand in the sums in its place, and
query_stage reads them there.

Rounding to the working dtype happens where the reference rounds: after each product, after each
norm, after each rotation; the index key is rounded after its LayerNorm only.  rotate(u) with
u = even and odd columns (interleaved) or halves: out = v cos + (-v[D/2:], v[:D/2]) sin.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...dispatch.common import memory
from ..common import gpu, tiling
from ..common.tiling import Tiling, cdiv, power_of_two
from ..common.weight_forms import form_of
from ..runtime import launches
from .blocks import tile_at
from .hopper import nz_matmul as hopper_product
from .hopper import query_heads as hopper_heads
from .hopper import query_stage as hopper_stage
from .nz_matmul import product

BLOCK_H = 32  # heads that one program rotates


@triton.jit
def rotation_source(d, D: tl.constexpr, INTERLEAVED: tl.constexpr):
    """(own, partner): the columns that make rotated column d of D."""
    HALF: tl.constexpr = D // 2
    low = d < HALF
    if INTERLEAVED:
        own = tl.where(low, 2 * d, 2 * (d - HALF) + 1)
        partner = tl.where(low, own + 1, own - 1)
    else:
        own = d
        partner = tl.where(low, d + HALF, d - HALF)
    return own, partner


@triton.jit
def angle(cos, sin, d, mask):
    """(cosines, sines) of columns d of a token."""
    c = tl.load(cos + d, mask=mask, other=0.0).to(tl.float32)
    return c, tl.load(sin + d, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def turned(own, partner, d, c, s, D: tl.constexpr):
    """Rotated column d, in float32."""
    return own * c + tl.where(d < D // 2, -partner, partner) * s


@triton.jit
def rotated(own, partner, d, cos, sin, at, mask, D: tl.constexpr):
    """The same; `at` is where the token's cos and sin begin."""
    c, s = angle(cos + at, sin + at, d, mask)
    return turned(own, partner, d, c, s, D)


@triton.jit
def run_sum(partial, stride, mask, RUNS: tl.constexpr):
    """The runs of one product, added in order."""
    acc = tl.load(partial, mask=mask, other=0.0).to(tl.float32)
    for run in tl.static_range(1, RUNS):
        acc += tl.load(partial + run * stride, mask=mask, other=0.0)
    return acc


@triton.jit
def weights_of(gamma, N: tl.constexpr):
    """Of a norm.  What no kernel of the op writes is loaded before the one that is waited for ends,
    and before the weights of the next one fill the memory's queues."""
    j = tl.arange(0, triton.next_power_of_2(N))
    return tl.load(gamma + j, mask=j < N, other=0.0).to(tl.float32)


@triton.jit
def rms_normed(partial, stride, g, eps, N: tl.constexpr, RUNS: tl.constexpr, dtype: tl.constexpr):
    """(columns, in range, RMSNorm of the rounded sums in the working dtype)."""
    j = tl.arange(0, triton.next_power_of_2(N))
    mask = j < N
    u = run_sum(partial + j, stride, mask, RUNS).to(dtype).to(tl.float32)
    scale = tl.rsqrt(tl.sum(u * u, 0) / N + eps)
    return j, mask, (u * scale * g).to(dtype)


@triton.jit
def _store_query_norm(
    partial, stride, gamma, out, eps, N: tl.constexpr, RUNS: tl.constexpr, CHAINED: tl.constexpr
):
    g = weights_of(gamma, N)
    if CHAINED:
        gdc_wait()
    j, mask, normed = rms_normed(partial, stride, g, eps, N, RUNS, out.dtype.element_ty)
    tl.store(out + j, normed, mask=mask)


@triton.jit
def rotary_key(
    partial,
    stride,
    c,
    s,
    D: tl.constexpr,
    RUNS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    dtype: tl.constexpr,
):
    """(columns, in range, the rotated key of a token); without any one column, out of range"""
    WIDTH: tl.constexpr = triton.next_power_of_2(D) if D > 0 else 1
    d = tl.arange(0, WIDTH)
    mask = d < D
    own, partner = rotation_source(d, D, INTERLEAVED)
    u = run_sum(partial + own, stride, mask, RUNS).to(dtype).to(tl.float32)
    v = run_sum(partial + partner, stride, mask, RUNS).to(dtype).to(tl.float32)
    return d, mask, turned(u, v, d, c, s, D).to(dtype)


@triton.jit
def latent_and_key(
    partial,
    stride,
    gamma,
    cos,
    sin,
    eps,
    R: tl.constexpr,
    D: tl.constexpr,
    RUNS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    dtype: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """(columns, in range, latent; columns, in range, rotated key) of a token"""
    WIDTH: tl.constexpr = triton.next_power_of_2(D) if D > 0 else 1
    g = weights_of(gamma, R)
    d = tl.arange(0, WIDTH)
    c, s = angle(cos, sin, d, d < D)
    if CHAINED:
        gdc_wait()
    d, d_mask, key = rotary_key(partial + R, stride, c, s, D, RUNS, INTERLEAVED, dtype)
    j, mask, normed = rms_normed(partial, stride, g, eps, R, RUNS, dtype)
    return j, mask, normed, d, d_mask, key


@triton.jit
def store_latent(
    partial,
    stride,
    gamma,
    cos,
    sin,
    kv_row,
    kr_row,
    eps,
    present,
    R: tl.constexpr,
    D: tl.constexpr,
    RUNS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """The latent and the rotated key of a token, into their cache rows."""
    j, mask, normed, d, d_mask, key = latent_and_key(
        partial,
        stride,
        gamma,
        cos,
        sin,
        eps,
        R,
        D,
        RUNS,
        INTERLEAVED,
        kv_row.dtype.element_ty,
        CHAINED,
    )
    tl.store(kv_row + j, normed, mask=mask & present)
    tl.store(kr_row + d, key, mask=d_mask & present)


@triton.jit
def index_key(
    partial,
    stride,
    gamma,
    beta,
    cos,
    sin,
    eps,
    DI: tl.constexpr,
    D: tl.constexpr,
    RUNS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    dtype: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """(columns, in range, key): LayerNorm of the float32 sums, rounded; the first D columns
    rotated."""
    j = tl.arange(0, triton.next_power_of_2(DI))
    mask = j < DI
    own, partner = rotation_source(j, D, INTERLEAVED)
    own = tl.where(j < D, own, j)
    partner = tl.where(j < D, partner, j)
    g = tl.load(gamma + own, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(beta + own, mask=mask, other=0.0).to(tl.float32)
    g_v = tl.load(gamma + partner, mask=mask, other=0.0).to(tl.float32)
    b_v = tl.load(beta + partner, mask=mask, other=0.0).to(tl.float32)
    c, s = angle(cos, sin, j, j < D)
    if CHAINED:
        gdc_wait()
    u = run_sum(partial + own, stride, mask, RUNS)
    v = run_sum(partial + partner, stride, mask, RUNS)
    mean = tl.sum(u, 0) / DI
    off = tl.where(mask, u - mean, 0.0)
    scale = tl.rsqrt(tl.sum(off * off, 0) / DI + eps)
    u = (off * scale * g + b).to(dtype)
    v = ((v - mean) * scale * g_v + b_v).to(dtype)
    key = turned(u.to(tl.float32), v.to(tl.float32), j, c, s, D).to(dtype)
    return j, mask, tl.where(j < D, key, u)


@triton.jit
def _store_index_key(
    partial,
    stride,
    gamma,
    beta,
    cos,
    sin,
    k_row,
    eps,
    present,
    DI: tl.constexpr,
    D: tl.constexpr,
    RUNS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Into the cache row."""
    j, mask, key = index_key(
        partial,
        stride,
        gamma,
        beta,
        cos,
        sin,
        eps,
        DI,
        D,
        RUNS,
        INTERLEAVED,
        k_row.dtype.element_ty,
        CHAINED,
    )
    tl.store(k_row + j, key, mask=mask & present)


@triton.jit
def store_weights(partial, stride, out, N: tl.constexpr, RUNS: tl.constexpr):
    j = tl.arange(0, triton.next_power_of_2(N))
    mask = j < N
    tl.store(out + j, run_sum(partial + j, stride, mask, RUNS).to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tokens", "slots", "eps_cq", "eps_ckv", "eps_k"])
def _token_stage(
    partial,
    gamma_cq,
    gamma_ckv,
    gamma_k,
    beta_k,
    sin,
    cos,
    cache_index,
    kv_cache,
    kr_cache,
    index_k_cache,
    query_norm,
    weights,
    tokens,
    slots,
    eps_cq,
    eps_ckv,
    eps_k,
    Q: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    DI: tl.constexpr,
    NI: tl.constexpr,
    RUNS: tl.constexpr,
    MLA: tl.constexpr,
    INDEX: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    INDEX_INTERLEAVED: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """One program: a token and a role (query norm, latent and rotated key, index key).  The sums
    lie as [Q | R | D | DI | NI], the parts of an op that was not asked for left out.  Without
    `gamma_cq` the Q are queries, which another kernel reads."""
    LATENT: tl.constexpr = Q + R + D if MLA else 0
    TOTAL: tl.constexpr = LATENT + (DI + NI if INDEX else 0)
    FIRST: tl.constexpr = (1 if gamma_cq is None else 0) if MLA else 2
    token = tl.program_id(0).to(tl.int64)
    role = tl.program_id(1) + FIRST
    if CHAINED:
        gdc_launch_dependents()
    stride = tl.cast(tokens, tl.int64) * TOTAL
    partial += token * TOTAL
    slot = tl.load(cache_index + token).to(tl.int64)
    present = (slot >= 0) & (slot < slots)
    slot = tl.where(present, slot, 0)
    sin += token * D
    cos += token * D
    if MLA:
        if gamma_cq is not None and role == 0:
            _store_query_norm(
                partial, stride, gamma_cq, query_norm + token * Q, eps_cq, Q, RUNS, CHAINED
            )
        if role == 1:
            store_latent(
                partial + Q,
                stride,
                gamma_ckv,
                cos,
                sin,
                kv_cache + slot * R,
                kr_cache + slot * D,
                eps_ckv,
                present,
                R,
                D,
                RUNS,
                INTERLEAVED,
                CHAINED,
            )
    if INDEX and role == 2:
        _store_index_key(
            partial + LATENT,
            stride,
            gamma_k,
            beta_k,
            cos,
            sin,
            index_k_cache + slot * DI,
            eps_k,
            present,
            DI,
            D,
            RUNS,
            INDEX_INTERLEAVED,
            CHAINED,
        )
        store_weights(partial + LATENT + DI, stride, weights + token * NI, NI, RUNS)


@triton.jit
def _absorb(
    q,
    w_uk,
    out,
    program,
    tokens,
    q_stride,
    run_stride,
    HEADS: tl.constexpr,
    DN: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    RUNS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWAP: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """out[t, h, :] = q_nope[t, h, :] w_uk[h]: one program a head, block of columns, of tokens."""
    dtype: tl.constexpr = out.dtype.element_ty
    PARTS: tl.constexpr = (R + BLOCK_N - 1) // BLOCK_N
    head = program // PARTS % HEADS
    n = program % PARTS * BLOCK_N + tl.arange(0, BLOCK_N)
    t = program // (PARTS * HEADS) * BLOCK_T + tl.arange(0, BLOCK_T)
    t_mask = t < tokens
    n_mask = n < R
    kk = tl.arange(0, BLOCK_K)
    w = w_uk + head.to(tl.int64) * (DN * R)
    q_row = q + t.to(tl.int64) * q_stride + head * (DN + D)
    acc = tl.zeros([BLOCK_N, BLOCK_T] if SWAP else [BLOCK_T, BLOCK_N], tl.float32)
    for k in tl.static_range(0, DN, BLOCK_K):
        mask = kk < DN - k
        if SWAP:
            w_tile = tl.load(
                w + (k + kk)[None, :] * R + n[:, None],
                mask=mask[None, :] & n_mask[:, None],
                other=0.0,
            )
        else:
            w_tile = tl.load(
                w + (k + kk)[:, None] * R + n[None, :],
                mask=mask[:, None] & n_mask[None, :],
                other=0.0,
            )
        if CHAINED and k == 0:
            # the weight is no earlier kernel's output: its load runs while they finish
            gdc_wait()
        if SWAP:
            q_tile = run_sum(
                q_row[None, :] + (k + kk)[:, None],
                run_stride,
                mask[:, None] & t_mask[None, :],
                RUNS,
            ).to(dtype)
            acc = tl.dot(w_tile, q_tile, acc, input_precision="ieee")
        else:
            q_tile = run_sum(
                q_row[:, None] + (k + kk)[None, :],
                run_stride,
                t_mask[:, None] & mask[None, :],
                RUNS,
            ).to(dtype)
            acc = tl.dot(q_tile, w_tile, acc, input_precision="ieee")
    out_row = (t.to(tl.int64) * HEADS + head) * R
    at, mask = tile_at(out, out_row, n, t_mask, n_mask, SWAP)
    tl.store(at, acc.to(dtype), mask=mask)


@triton.jit
def _rotate_heads(
    q,
    out,
    sin,
    cos,
    program,
    q_stride,
    run_stride,
    HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    SKIP: tl.constexpr,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
    RUNS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """out[t, h, :WIDTH] = columns SKIP.. of head h (HEAD columns a head), the first D rotated; one
    program a token and a block of heads."""
    dtype: tl.constexpr = out.dtype.element_ty
    HALF: tl.constexpr = D // 2
    BLOCKS: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    t = (program // BLOCKS).to(tl.int64)
    head = program % BLOCKS * BLOCK_H + tl.arange(0, BLOCK_H)
    present = head < HEADS
    q_row = q + t * q_stride + head * HEAD + SKIP
    out_row = out + t * (HEADS * WIDTH) + head * WIDTH
    if D > 0:
        i = tl.arange(0, triton.next_power_of_2(HALF))
        mask = present[:, None] & (i < HALF)[None, :]
        if INTERLEAVED:
            side = tl.arange(0, 2)
            at = q_row[:, None, None] + (2 * i[:, None] + side[None, :])[None, :, :]
            u = run_sum(at, run_stride, mask[:, :, None] & (side >= 0)[None, None, :], RUNS)
            left, right = tl.split(u.to(dtype).to(tl.float32))
        else:
            at = q_row[:, None] + i[None, :]
            left = run_sum(at, run_stride, mask, RUNS).to(dtype).to(tl.float32)
            right = run_sum(at + HALF, run_stride, mask, RUNS).to(dtype).to(tl.float32)
        low = rotated(left, right, i[None, :], cos, sin, t * D, mask, D)
        high = rotated(right, left, i[None, :] + HALF, cos, sin, t * D, mask, D)
        tl.store(out_row[:, None] + i[None, :], low.to(dtype), mask=mask)
        tl.store(out_row[:, None] + i[None, :] + HALF, high.to(dtype), mask=mask)
    if WIDTH > D:
        j = D + tl.arange(0, triton.next_power_of_2(WIDTH - D))
        mask = present[:, None] & (j < WIDTH)[None, :]
        u = run_sum(q_row[:, None] + j[None, :], run_stride, mask, RUNS)
        tl.store(out_row[:, None] + j[None, :], u.to(dtype), mask=mask)


@triton.jit(do_not_specialize=["tokens", "absorbers"])
def _query_stage(
    q,
    w_uk,
    sin,
    cos,
    query,
    query_rope,
    tokens,
    absorbers,
    HEADS: tl.constexpr,
    DN: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    ROW: tl.constexpr,
    RUNS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWAP: tl.constexpr,
    BLOCK_H: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Programs [0, absorbers) absorb, the rest rotate.  q [RUNS, T, ROW], whose first columns are
    HEADS (DN + D)."""
    program = tl.program_id(0)
    run_stride = tl.cast(tokens, tl.int64) * ROW
    if CHAINED:
        gdc_launch_dependents()
    if program < absorbers:
        _absorb(
            q,
            w_uk,
            query,
            program,
            tokens,
            ROW,
            run_stride,
            HEADS,
            DN,
            D,
            R,
            RUNS,
            BLOCK_T,
            BLOCK_N,
            BLOCK_K,
            SWAP,
            CHAINED,
        )
    elif D > 0:
        if CHAINED:
            gdc_wait()
        _rotate_heads(
            q,
            query_rope,
            sin,
            cos,
            program - absorbers,
            ROW,
            run_stride,
            HEADS,
            DN + D,
            DN,
            D,
            D,
            RUNS,
            INTERLEAVED,
            BLOCK_H,
        )


@triton.jit(do_not_specialize=["tokens"])
def _rotation(
    q,
    sin,
    cos,
    out,
    tokens,
    HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    SKIP: tl.constexpr,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
    ROW: tl.constexpr,
    RUNS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_H: tl.constexpr,
    CHAINED: tl.constexpr,
    LATE: tl.constexpr,
):
    """Heads of q [RUNS, T, ROW], HEAD columns each, without their first SKIP."""
    if CHAINED:
        gdc_launch_dependents()
        if not LATE:
            gdc_wait()
    _rotate_heads(
        q,
        out,
        sin,
        cos,
        tl.program_id(0),
        ROW,
        tl.cast(tokens, tl.int64) * ROW,
        HEADS,
        HEAD,
        SKIP,
        WIDTH,
        D,
        RUNS,
        INTERLEAVED,
        BLOCK_H,
    )
    if CHAINED and LATE:
        gdc_wait()


def absorb_tiling(tokens: int) -> Tiling:
    """Of the absorption: 128 deep, 512 columns, for each head."""
    if tokens <= 32:
        return Tiling(max(8, power_of_two(tokens)), 128, 128, 1, 1, 4, True)
    if tokens <= 64:
        return Tiling(64, 128, 128, 1, 1, 4, False)
    return Tiling(128, 128, 128, 1, 1, 8, False)


def unsupported(x: Tensor) -> str | None:
    """float32 is for the interpreter: on a GPU its tiles would not fit."""
    if x.dtype == torch.float64 or (x.dtype == torch.float32 and x.is_cuda):
        return f"dtype {str(x.dtype).removeprefix('torch.')}, supported float16 and bfloat16"
    return None


@dataclass(frozen=True)
class Latent:
    """The attention side's share of a token stage; caches and query norm are written."""

    gamma_cq: Tensor | None
    gamma_ckv: Tensor
    kv_cache: Tensor
    kr_cache: Tensor
    query_norm: Tensor | None
    eps_cq: float
    eps_ckv: float
    interleaved: bool


@dataclass(frozen=True)
class Index:
    """The indexer's share of a token stage; the cache and the head weights are written."""

    gamma: Tensor
    beta: Tensor
    k_cache: Tensor
    weights: Tensor
    eps: float
    interleaved: bool


def token_stage(
    partial: Tensor,
    sin: Tensor,
    cos: Tensor,
    cache_index: Tensor,
    latent: Latent | None,
    index: Index | None,
) -> None:
    """part [RUNS, T, Q + R + D + DI + NI]: norms, rotations, scatters; head weights."""
    runs, tokens, width = partial.shape
    rank, rotary = latent.gamma_ckv.shape[0] if latent else 0, sin.shape[-1]
    size, heads = (index.gamma.shape[0], index.weights.shape[-1]) if index else (0, 0)
    roles = (0 if latent is None else 1 if latent.gamma_cq is None else 2) + (index is not None)
    cache = latent.kv_cache if latent else index.k_cache  # type: ignore[union-attr]
    chained = gpu.has_chained_launch(partial.device)
    launches.kernel(_token_stage, tokens, roles)(
        partial,
        latent and latent.gamma_cq,
        latent and latent.gamma_ckv,
        index and index.gamma,
        index and index.beta,
        sin,
        cos,
        cache_index,
        latent and latent.kv_cache,
        latent and latent.kr_cache,
        index and index.k_cache,
        latent and latent.query_norm,
        index and index.weights,
        tokens,
        cache.shape[0] * cache.shape[1],
        latent.eps_cq if latent else 0.0,
        latent.eps_ckv if latent else 0.0,
        index.eps if index else 0.0,
        Q=width - rank - rotary - size - heads if latent else 0,
        R=rank,
        D=rotary,
        DI=size,
        NI=heads,
        RUNS=runs,
        MLA=latent is not None,
        INDEX=index is not None,
        INTERLEAVED=latent is not None and latent.interleaved,
        INDEX_INTERLEAVED=index is not None and index.interleaved,
        CHAINED=chained,
        num_warps=8 if tokens <= 32 else 4,
        launch_pdl=chained,
    )


def is_one_launch(c: Tensor, weight: Tensor, weight_format: str, w_uk: Tensor, sin: Tensor) -> bool:
    """Whether query_heads is."""
    return hopper_heads.supports(c, weight, w_uk, sin.shape[-1])


def query_room(w_uk: Tensor, sin: Tensor, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Memory for what query_heads gives."""
    heads, _plain, rank = w_uk.shape
    widths = rank, sin.shape[-1]
    query, rope = (memory.empty((*shape, heads, n), w_uk.dtype, w_uk.device) for n in widths)
    return query, rope


def query_heads(
    c: Tensor,
    weight: Tensor,
    weight_format: str,
    w_uk: Tensor,
    sin: Tensor,
    cos: Tensor,
    shape: tuple[int, int],
    interleaved: bool,
    *,
    into: tuple[Tensor, Tensor] | None = None,
    forked: bool = False,
) -> tuple[Tensor, Tensor]:
    """c [T, K] -> query [*shape, N, R], query_rope [*shape, N, D]; `forked` as for product."""
    query, query_rope = into or query_room(w_uk, sin, shape)
    if is_one_launch(c, weight, weight_format, w_uk, sin):
        hopper_heads.launch(
            c,
            weight,
            form_of(weight, weight_format),
            w_uk,
            sin,
            cos,
            query,
            query_rope,
            interleaved,
            forked=forked,
        )
    else:
        heads, plain, _rank = w_uk.shape
        size = heads * (plain + sin.shape[-1])
        q = product(c, [(weight, size)], weight_format, forked=forked)
        query_stage(q, sin, cos, w_uk, query, query_rope, interleaved)
    return query, query_rope


def index_heads(
    c: Tensor,
    weight: Tensor,
    weight_format: str,
    size: int,
    sin: Tensor,
    cos: Tensor,
    shape: tuple[int, int],
    interleaved: bool,
    *,
    late: bool = False,
) -> Tensor:
    """c [T, K] -> query_index [*shape, NI, DI].  `late`: c does not come from the kernel before."""
    tokens, depth = c.shape
    heads = weight.numel() // (depth * size)
    query_index = memory.empty((*shape, heads, size), c.dtype, c.device)
    config = tiling.whole_depth(tokens, [heads * size], depth, gpu.num_sms(c.device))
    form = form_of(weight, weight_format)
    rotates = size % 64 == 0 and sin.shape[-1] == 64
    if config and rotates and hopper_product.supports(c, [weight], [heads * size], [form]):
        hopper_product.launch(
            c,
            [weight] * 4,
            form,
            [heads * size, 0, 0, 0],
            query_index.view(1, tokens, heads * size),
            config.k * cdiv(depth, config.k),
            heads * size // config.columns * cdiv(tokens, config.tokens),
            config,
            late=late,
            head=size,
            sin=sin,
            cos=cos,
            interleaved=interleaved,
        )
    else:
        q = product(c, [(weight, heads * size)], weight_format)
        index_stage(q, sin, cos, query_index, interleaved)
    return query_index


def query_stage(
    q: Tensor,
    sin: Tensor,
    cos: Tensor,
    w_uk: Tensor,
    query: Tensor,
    query_rope: Tensor,
    interleaved: bool,
) -> None:
    """q [RUNS, T, N (DN + D) ..] -> query [.., N, R], query_rope [.., N, D]."""
    runs, tokens, row = q.shape
    heads, plain, rank = w_uk.shape
    chained = gpu.has_chained_launch(q.device)
    if hopper_stage.supports(q, w_uk):
        hopper_stage.launch(q, w_uk, query, sin.shape[-1])
        if query_rope.numel():
            _rotate(q, sin, cos, query_rope, interleaved, plain, late=True)
        return
    tiling = absorb_tiling(tokens)
    columns = min(tiling.columns, power_of_two(max(rank, 16)))
    absorbers = heads * cdiv(rank, columns) * cdiv(tokens, tiling.tokens)
    rotators = tokens * cdiv(heads, BLOCK_H) if query_rope.numel() else 0
    launches.kernel(_query_stage, absorbers + rotators)(
        q,
        w_uk,
        sin,
        cos,
        query,
        query_rope,
        tokens,
        absorbers,
        HEADS=heads,
        DN=plain,
        R=rank,
        D=sin.shape[-1],
        ROW=row,
        RUNS=runs,
        INTERLEAVED=interleaved,
        BLOCK_T=tiling.tokens,
        BLOCK_N=columns,
        BLOCK_K=min(tiling.k, power_of_two(max(plain, 16))),
        SWAP=tiling.swap,
        BLOCK_H=BLOCK_H,
        CHAINED=chained,
        num_warps=tiling.warps,
        launch_pdl=chained,
    )


def index_stage(
    q: Tensor, sin: Tensor, cos: Tensor, query_index: Tensor, interleaved: bool
) -> None:
    """q [RUNS, T, NI DI] -> query_index [.., NI, DI]."""
    _rotate(q, sin, cos, query_index, interleaved, 0)


def _rotate(
    q: Tensor,
    sin: Tensor,
    cos: Tensor,
    out: Tensor,
    interleaved: bool,
    skip: int,
    *,
    late: bool = False,
) -> None:
    """out [.., N, WIDTH] = the heads of q [RUNS, T, N (skip + WIDTH) ..], the first columns behind
    `skip` rotated; `late` as for product."""
    runs, tokens, row = q.shape
    heads, width = out.shape[-2:]
    chained = gpu.has_chained_launch(q.device)
    launches.kernel(_rotation, tokens * cdiv(heads, BLOCK_H))(
        q,
        sin,
        cos,
        out,
        tokens,
        HEADS=heads,
        HEAD=skip + width,
        SKIP=skip,
        WIDTH=width,
        D=sin.shape[-1],
        ROW=row,
        RUNS=runs,
        INTERLEAVED=interleaved,
        BLOCK_H=BLOCK_H,
        CHAINED=chained,
        LATE=late,
        launch_pdl=chained,
    )
