# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Gated delta rule, token by token, with its gates, on a pool of states updated in place.

    decay = exp(-exp(A_log) softplus(a + dt_bias))     beta = sigmoid(b)
    seen = (decay k)^T S     u = beta (v - seen)     S' = decay S + k u^T     o = q^T S'

    q, k [B, T, H, K]   v [B, T, HV, V]   a, b [B, T, HV] (KDA: a [B, T, HV, K])
    state [slots, HV, K, V] ("kv") or [slots, HV, V, K] ("vk")

A program owns all K rows of some columns of one head's state, keeps them in registers over the
tokens of its sequence, and reads and writes the pool once.  Both sums over K, k^T S and q^T S, are
taken before the update: q^T S' = (decay q)^T S + (q k) u, so that one round of shuffles is waited
for and not two.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..dispatch.common import memory

LARGEST_K = 256


@triton.jit
def _softplus(x, beta, threshold):
    bx = x * beta
    y = tl.exp(tl.minimum(bx, threshold))
    # log1p(y), right to the last bits where 1 + y rounds: log(w) y / (w - 1)
    w = 1.0 + y
    log1p = tl.where(w == 1.0, y, tl.log(w) * (y / tl.where(w == 1.0, 1.0, w - 1.0)))
    return tl.where(bx <= threshold, log1p / beta, x)


@triton.jit
def _load_token(
    q, k, v, a, b, t, there, k_at, v_at, q_row, k_row, v_row, a_row, b_row,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, KDA: tl.constexpr,
):  # fmt: skip
    """The token's q, k [BK], v [BV], a, b as they are stored; zeros where `there` is false."""
    k_on = there & (k_at < K)
    q_tile = tl.load(q + t * q_row + k_at, mask=k_on, other=0.0)
    k_tile = tl.load(k + t * k_row + k_at, mask=k_on, other=0.0)
    v_tile = tl.load(v + t * v_row + v_at, mask=there & (v_at < V), other=0.0)
    if KDA:
        a_tile = tl.load(a + t * a_row + k_at, mask=k_on, other=0.0)
    else:
        a_tile = tl.load(a + t * a_row, mask=there, other=0.0)
    b_tile = tl.load(b + t * b_row, mask=there, other=0.0)
    return q_tile, k_tile, v_tile, a_tile, b_tile


@triton.jit
def _step(
    state, q_tile, k_tile, v_tile, a_tile, b_tile, rate, bias, scale,
    softplus_beta, softplus_threshold,
    VK: tl.constexpr, KDA: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """(state after the token, its output [BV])."""
    q_wide = q_tile.to(tl.float32)
    k_wide = k_tile.to(tl.float32)
    if NORM:
        q_wide = q_wide * (1.0 / tl.sqrt(tl.sum(q_wide * q_wide, 0) + 1e-6))
        k_wide = k_wide * (1.0 / tl.sqrt(tl.sum(k_wide * k_wide, 0) + 1e-6))
    q_wide = q_wide * scale
    qk = tl.sum(q_wide * k_wide, 0)
    gate = _softplus(a_tile.to(tl.float32) + bias, softplus_beta, softplus_threshold)
    decay = tl.exp(-rate * gate)
    beta = 1.0 / (1.0 + tl.exp(-b_tile.to(tl.float32)))
    k_faded = k_wide * decay
    q_faded = q_wide * decay
    if VK:
        seen = tl.sum(state * k_faded[None, :], 1)
        read = tl.sum(state * q_faded[None, :], 1)
    else:
        seen = tl.sum(state * k_faded[:, None], 0)
        read = tl.sum(state * q_faded[:, None], 0)
    update = (v_tile.to(tl.float32) - seen) * beta
    if KDA:
        state = state * (decay[None, :] if VK else decay[:, None])
    else:
        state = state * decay
    if VK:
        state += update[:, None] * k_wide[None, :]
    else:
        state += k_wide[:, None] * update[None, :]
    return state, read + qk * update


@triton.jit
def _parent(parents, t, columns):
    """The step that step t starts from; -1: the initial state."""
    parent = tl.load(parents + t, mask=t < columns, other=-1).to(tl.int32)
    return tl.where((parent >= 0) & (parent < t), parent, -1)


@triton.jit(do_not_specialize=["T", "sequences", "slots", "rows", "steps", "columns", "batch"])
def _delta_rule_kernel(
    A_log, a, dt_bias, q, k, v, b, pool, indices, cu_seqlens, cache, cache_rows, parents, out,
    T, batch, sequences, slots, rows, steps, columns,
    scale, softplus_beta, softplus_threshold,
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head,
    a_batch, a_row, a_head, b_batch, b_row, slot_stride, cache_stride, step_stride,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, VK: tl.constexpr, KDA: tl.constexpr, NORM: tl.constexpr,
    ONE: tl.constexpr, VARLEN: tl.constexpr, UPDATE: tl.constexpr, CACHE: tl.constexpr,
    TREE: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    NV: tl.constexpr = (V + BV - 1) // BV
    program = tl.program_id(0)
    column = program % NV
    hv = (program // NV) % HV
    n = program // (NV * HV)
    h = hv // (HV // H)
    k_at = tl.arange(0, BK)
    v_at = column * BV + tl.arange(0, BV)
    n_wide = n.to(tl.int64)

    slot = tl.load(indices + n).to(tl.int64)
    if VARLEN:
        first = tl.load(cu_seqlens + n).to(tl.int64)
        end = tl.minimum(tl.load(cu_seqlens + n + 1).to(tl.int64), T)
        length = (end - first).to(tl.int32)
        n_batch = n_wide * 0
    else:
        first = n_wide * 0
        length = T
        n_batch = n_wide
    q += n_batch * q_batch + first * q_row + h * q_head
    k += n_batch * k_batch + first * k_row + h * k_head
    v += n_batch * v_batch + first * v_row + hv * v_head
    a += n_batch * a_batch + first * a_row + hv * a_head
    b += n_batch * b_batch + first * b_row + hv
    out += ((n_batch * T + first) * HV + hv) * V
    out_row = HV * V

    if VK:
        tile_at = v_at[:, None] * K + k_at[None, :]
        tile_on = (v_at[:, None] < V) & (k_at[None, :] < K)
    else:
        tile_at = k_at[:, None] * V + v_at[None, :]
        tile_on = (k_at[:, None] < K) & (v_at[None, :] < V)
    tile_at += hv * (K * V)
    live = (slot >= 0) & (slot < slots)
    slot_at = pool + slot * slot_stride + tile_at
    state = tl.load(slot_at, mask=tile_on & live, other=0.0, eviction_policy=EVICT)
    state = state.to(tl.float32)

    # in flight together with the state
    here = length > 0
    q_tile, k_tile, v_tile, a_tile, b_tile = _load_token(
        q, k, v, a, b, 0, here, k_at, v_at, q_row, k_row, v_row, a_row, b_row, K, V, BK, BV, KDA
    )
    rate = tl.exp(tl.load(A_log + hv).to(tl.float32))
    if KDA:
        bias = tl.load(dt_bias + hv * K + k_at, mask=k_at < K, other=0.0).to(tl.float32)
    else:
        bias = tl.load(dt_bias + hv).to(tl.float32)
    if CACHE:
        row = tl.load(cache_rows + n).to(tl.int64)
        kept = (row >= 0) & (row < rows)
        cache += row * cache_stride + tile_at
    if TREE:
        parents += n_wide * columns

    if ONE:
        state, o = _step(
            state, q_tile, k_tile, v_tile, a_tile, b_tile, rate, bias, scale,
            softplus_beta, softplus_threshold, VK, KDA, NORM,
        )  # fmt: skip
        tl.store(out + v_at, o.to(out.dtype.element_ty), mask=v_at < V)
        if CACHE:
            tl.store(cache, state.to(cache.dtype.element_ty), mask=tile_on & kept & (steps > 0))
    else:
        for t in range(length):
            q_next, k_next, v_next, a_next, b_next = _load_token(
                q, k, v, a, b, t + 1, t + 1 < length, k_at, v_at,
                q_row, k_row, v_row, a_row, b_row, K, V, BK, BV, KDA,
            )  # fmt: skip
            if TREE:
                # the chain goes on in registers; a branch is walked again from its root, which
                # needs no stored states and rounds nothing
                if (t > 0) & (_parent(parents, t, columns) != t - 1):
                    state = tl.load(slot_at, mask=tile_on & live, other=0.0).to(tl.float32)
                    for earlier in range(t):
                        at = t
                        while at > earlier:
                            at = _parent(parents, at, columns)
                        if at == earlier:
                            q_past, k_past, v_past, a_past, b_past = _load_token(
                                q, k, v, a, b, earlier, here, k_at, v_at,
                                q_row, k_row, v_row, a_row, b_row, K, V, BK, BV, KDA,
                            )  # fmt: skip
                            state, _o = _step(
                                state, q_past, k_past, v_past, a_past, b_past, rate, bias, scale,
                                softplus_beta, softplus_threshold, VK, KDA, NORM,
                            )  # fmt: skip
            state, o = _step(
                state, q_tile, k_tile, v_tile, a_tile, b_tile, rate, bias, scale,
                softplus_beta, softplus_threshold, VK, KDA, NORM,
            )  # fmt: skip
            tl.store(out + t * out_row + v_at, o.to(out.dtype.element_ty), mask=v_at < V)
            if CACHE:
                tl.store(
                    cache + t * step_stride,
                    state.to(cache.dtype.element_ty),
                    mask=tile_on & kept & (t < steps),
                )
            q_tile, k_tile, v_tile, a_tile, b_tile = q_next, k_next, v_next, a_next, b_next
    if UPDATE:
        on = tile_on & live & here
        tl.store(slot_at, state.to(pool.dtype.element_ty), mask=on, eviction_policy=EVICT)
    if VARLEN:
        # tokens behind the last sequence
        if n == sequences - 1:
            for t in range(length, (T - first).to(tl.int32)):
                tl.store(out + t * out_row + v_at, tl.zeros([BV], tl.float32), mask=v_at < V)


def tile(state_layout: str, V: int, BK: int, heads: int) -> tuple[int, int]:
    """(columns, warps) of a program, for `heads` states of BK rows."""
    if state_layout == "vk":
        BV, warps = (4, 1) if heads <= 128 else (8, 1)
    else:
        BV, warps = (16, 1) if heads <= 128 else (64, 4)
    return min(BV * max(1, 128 // BK), triton.next_power_of_2(V)), warps


def unsupported(k: Tensor, **_: Any) -> str | None:
    if k.dtype is torch.float64:
        return "q, k, v are float64, supported are float32, float16 and bfloat16"
    if k.shape[-1] > LARGEST_K:
        return f"K={k.shape[-1]}, supported up to {LARGEST_K}"
    return None


def forward(
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    softplus_beta: float,
    softplus_threshold: float,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    scale: float | None,
    use_qk_l2norm_in_kernel: bool,
    cu_seqlens: Tensor | None,
    state_layout: str,
    is_kda: bool,
    disable_state_update: bool,
    intermediate_states: Tensor | None,
    intermediate_state_indices: Tensor | None,
    retrieve_parent_token: Tensor | None,
    chosen: tuple[int, int, str] | None = None,
) -> Tensor:
    B, T, H, K = k.shape
    HV, V = v.shape[2:]
    N = initial_state_indices.shape[0]
    out = memory.empty(v.shape, v.dtype, v.device)
    if N == 0 or out.numel() == 0:
        return out.zero_()
    a = a.view(B, T, HV, K) if is_kda else a.view(B, T, HV)
    b = b.view(B, T, HV)
    pool, cache, parents = initial_state_source, intermediate_states, retrieve_parent_token
    BK = max(16, triton.next_power_of_2(K))
    BV, warps, evict = chosen or (*tile(state_layout, V, BK, N * HV), "")
    BV = min(BV, triton.next_power_of_2(V))
    _delta_rule_kernel[(N * HV * triton.cdiv(V, BV),)](
        A_log, a, dt_bias, q, k, v, b, pool, initial_state_indices, cu_seqlens,
        cache, intermediate_state_indices, parents, out,
        T, B, N, pool.shape[0],
        0 if cache is None else cache.shape[0],
        0 if cache is None else cache.shape[1],
        0 if parents is None else parents.shape[1],
        K**-0.5 if scale is None else scale, softplus_beta, softplus_threshold,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *a.stride()[:3], *b.stride()[:2],
        pool.stride(0),
        0 if cache is None else cache.stride(0),
        0 if cache is None else cache.stride(1),
        H=H, HV=HV, K=K, V=V, BK=BK, BV=BV,
        VK=state_layout == "vk", KDA=is_kda, NORM=use_qk_l2norm_in_kernel,
        ONE=T == 1 and cu_seqlens is None, VARLEN=cu_seqlens is not None,
        UPDATE=not disable_state_update, CACHE=cache is not None, TREE=parents is not None, EVICT=evict,
        num_warps=warps,
    )  # fmt: skip
    return out
