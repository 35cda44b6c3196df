# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Gated delta rule, token by token, with its gates, on a pool of states updated in place.

    decay = exp(-exp(A_log) softplus(x)), or exp(lower_bound sigmoid(exp(A_log) x)), x = a + dt_bias
    beta = sigmoid(b), twice that with NEG
    kv_mem = (decay k)^T S   u = beta (v - kv_mem)   S' = decay S + k u^T     o = q^T S'

    q, k [B, T, H, K]   v [B, T, HV, V]   a, b [B, T, HV] (KDA: a [B, T, HV, K])
    state [slots, HV, K, V] ("kv") or [slots, HV, V, K] ("vk")

A program owns all K rows of some columns of one head's state, keeps them in registers over the
tokens of its sequence, and reads and writes the pool once.  Both sums over K, k^T S and q^T S, are
taken before the update: q^T S' = (decay q)^T S + (q k) u, so that one round of shuffles is waited
for and not two.

    condition    kernels
    any          _delta_rule_kernel
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait
from typing_extensions import Unpack

from ...dispatch.common import memory
from ...dispatch.ops.delta_rule.fused_sigmoid_gating_delta_rule_update import Rule
from ..common import gpu
from ..common.chunks import from_head, softplus
from ..common.gpu import INTERPRETED
from ..common.lengths import span_of, within
from ..runtime import launches
from .gated_rms_norm import opening

LARGEST_K = 256
LENGTHS = tl.constexpr(128)  # that are added up at a time
SIMULATED = tl.constexpr(INTERPRETED)


@triton.jit
def _wide(x, zero):
    """x in float32: one instruction for a bfloat16, where the compiler takes two.  `zero` is 0; one
    that the compiler does not know makes the same numbers anew, in registers of their own."""
    if (x.dtype == tl.bfloat16) & (not SIMULATED):
        wide = tl.inline_asm_elementwise(
            "prmt.b32 $0, $2, $3, 0x1044; prmt.b32 $1, $2, $3, 0x3244;",
            "=f,=f,r,r,r",
            [x, zero],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
    else:
        wide = x.to(tl.float32)
    return wide


@triton.jit
def _add_two(a, b, x, y):
    return a + x, b + y


@triton.jit
def _add_three(a, b, c, x, y, z):
    return a + x, b + y, c + z


@triton.jit
def _total(x, VK: tl.constexpr):
    """The sum of a vector over K, [BLOCK_K / KI, KI] for [V, K] and [BLOCK_K] for [K, V]."""
    if VK:
        total = tl.sum(tl.sum(x, 1), 0)
    else:
        total = tl.sum(x, 0)
    return total


@triton.jit
def _products(q, k, VK: tl.constexpr):
    """q q, k k and q k; for [K, V] across warps, which wait once for one sum of all three."""
    if VK:
        qq = _total(q * q, VK)
        kk = _total(k * k, VK)
        qk = _total(q * k, VK)
    else:
        qq, kk, qk = tl.reduce((q * q, k * k, q * k), 0, _add_three)
    return qq, kk, qk


@triton.jit
def _over_k(tile, other, VK: tl.constexpr, TOGETHER: tl.constexpr):
    """The sums over K [BLOCK_V] of two tiles, [BLOCK_V, BLOCK_K / KI, KI] or [BLOCK_K, BLOCK_V],
    likewise."""
    if VK:
        a = tl.sum(tl.sum(tile, 1), 1)
        b = tl.sum(tl.sum(other, 1), 1)
    elif TOGETHER:
        a, b = tl.reduce((tile, other), 0, _add_two)
    else:
        a = tl.sum(tile, 0)
        b = tl.sum(other, 0)
    return a, b


@triton.jit
def _beside(k_side, VK: tl.constexpr):
    """A vector over K, to be multiplied with a tile."""
    if VK:
        wide = k_side[None, :, :]
    else:
        wide = k_side[:, None]
    return wide


@triton.jit
def _along(v_side, VK: tl.constexpr):
    """A vector [BLOCK_V], to be multiplied with a tile."""
    if VK:
        wide = v_side[:, None, None]
    else:
        wide = v_side[None, :]
    return wide


@triton.jit
def _load_token(q, k, a, b, valid, k_at, K: tl.constexpr, KDA: tl.constexpr):
    """A token's q, k [BLOCK_K], a, b as they are stored; zeros where `valid` is false."""
    k_mask = valid & (k_at < K)
    q_tile = tl.load(q + k_at, mask=k_mask, other=0.0)
    k_tile = tl.load(k + k_at, mask=k_mask, other=0.0)
    if KDA:
        a_tile = tl.load(a + k_at, mask=k_mask, other=0.0)
    else:
        a_tile = tl.load(a, mask=valid, other=0.0)
    return q_tile, k_tile, a_tile, tl.load(b, mask=valid, other=0.0)


@triton.jit
def gates(
    token,
    rate,
    bias,
    numbers,
    NORM: tl.constexpr,
    BOUNDED: tl.constexpr,
    GIVEN: tl.constexpr,
    NEG: tl.constexpr,
    VK: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """Of a token's q, k, a and b: q, k, the factors they want, their product, the decay (over K or
    a scalar), and beta."""
    q_tile, k_tile, a_tile, b_tile = token
    scale, softplus_beta, softplus_threshold, lower_bound, _ = numbers
    q_wide = _wide(q_tile, 0)
    k_wide = _wide(k_tile, 0)
    unit = 1.0
    qk = 0.0  # of one token not made here: see _step
    if TOGETHER:
        qq, kk, qk = _products(q_wide, k_wide, VK)
        if NORM:
            scale = scale / tl.sqrt(qq + 1e-6)
            unit = 1.0 / tl.sqrt(kk + 1e-6)
    elif NORM:
        scale = scale / tl.sqrt(_total(q_wide * q_wide, VK) + 1e-6)
        unit = 1.0 / tl.sqrt(_total(k_wide * k_wide, VK) + 1e-6)
    x = a_tile.to(tl.float32)
    beta = b_tile.to(tl.float32)
    if GIVEN:
        decay = tl.exp(x)
    elif BOUNDED:
        decay = tl.exp(lower_bound / (1.0 + tl.exp(-rate * (x + bias))))
    else:
        decay = tl.exp(-rate * softplus(x + bias, softplus_beta, softplus_threshold))
    if not GIVEN:
        beta = (2.0 if NEG else 1.0) / (1.0 + tl.exp(-beta))
    return q_wide, k_wide, scale, unit, qk, decay, beta


@triton.jit
def step(
    stored,
    gated,
    v_tile,
    zero,
    VK: tl.constexpr,
    KDA: tl.constexpr,
    TOGETHER: tl.constexpr,
    TWICE: tl.constexpr,
):
    """(state after the token, its output [BLOCK_V]); `gated`: what `gates` makes of it."""
    q_wide, k_wide, scale, unit, qk, decay, beta = gated
    # the norms are taken out of the sums, and so is one decay for all channels: two vectors less
    # in registers, and numbers to multiply with instead
    state = _wide(stored, 0) if TWICE else stored
    if KDA:
        k_faded = k_wide * decay
        q_faded = q_wide * decay
        faded = 1.0
    else:
        k_faded = k_wide
        q_faded = q_wide
        faded = decay
    kv_mem, read = _over_k(state * _beside(k_faded, VK), state * _beside(q_faded, VK), VK, TOGETHER)
    if TWICE:
        state = _wide(stored, zero)
    state = state * (_beside(decay, VK) if KDA else decay)
    update = (v_tile.to(tl.float32) - kv_mem * (unit * faded)) * (beta * unit)
    state += _beside(k_wide, VK) * _along(update, VK)
    if not TOGETHER:
        qk = _total(q_wide * k_wide, VK)
    return state, read * (scale * faded) + (scale * qk) * update


@triton.jit
def _from_lengths(lengths, n, T, VARLEN: tl.constexpr):
    """(first token, length) of a sequence, of lengths that may add up to far more than T."""
    first = tl.cast(n * 0, tl.int64)
    length = T
    if VARLEN:
        for start in range(0, n, LENGTHS):
            i = start + tl.arange(0, LENGTHS)
            first += tl.sum(within(lengths + i, i < n, T).to(tl.int64), 0)
        first = tl.minimum(first, T)
        length = tl.minimum(within(lengths + n, True, T), T - first.to(tl.int32))
    return first, length


@triton.jit
def _accepted(accepted, n):
    """How many tokens of the call before are kept, from 1 on."""
    count = tl.cast(n * 0 + 1, tl.int64)
    if accepted is not None:
        count = tl.maximum(tl.load(accepted + n).to(tl.int64), 1)
    return count


@triton.jit
def _parent(parents, t, columns):
    """The step that step t starts from; -1: the initial state."""
    parent = tl.load(parents + t, mask=t < columns, other=-1)
    # cast last: what does not fit 32 bits wraps
    return tl.where((parent >= 0) & (parent < t), parent, -1).to(tl.int32)


@triton.jit
def state_tile(
    column,
    k_at,
    valid,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    VK: tl.constexpr,
):
    """(columns [BLOCK_V], offsets of the tile in a head's state, its mask)."""
    v_at = column * BLOCK_V + tl.arange(0, BLOCK_V)
    if VK:
        tile_at = _along(v_at, VK) * K + _beside(k_at, VK)
    else:
        tile_at = _beside(k_at, VK) * V + _along(v_at, VK)
    if (BLOCK_K == K) & (V % BLOCK_V == 0):
        # one predicate for all: masks and addresses would cost registers
        tile_mask = valid
    else:
        tile_mask = (_beside(k_at, VK) < K) & (_along(v_at, VK) < V) & valid
    return v_at, tile_at, tile_mask


@triton.jit
def load_state(at, mask, TWICE: tl.constexpr):
    state = tl.load(at, mask=mask, other=0.0)
    return state if TWICE else _wide(state, 0)


class Constants(NamedTuple):
    """KI channels of a key's BLOCK_K lie side by side in a program of TILES tiles of BLOCK_V
    columns; ONE: a token a sequence; TWICE: the state is widened where it is used; ALL is V's next
    power of two."""

    H: int
    HV: int
    K: int
    V: int
    BLOCK_K: int
    KI: int
    BLOCK_V: int
    TILES: int
    VK: bool
    KDA: bool
    NORM: bool
    BOUNDED: bool
    ONE: bool
    VARLEN: bool
    UPDATE: bool
    CACHE: bool
    TREE: bool
    TWICE: bool
    ALL: int
    SILU: bool
    CHAINED: bool
    GIVEN: bool
    NEG: bool


@triton.jit(do_not_specialize=["T", "sequences", "slots", "rows", "steps", "columns"])
def _delta_rule_kernel(
    A_log,
    a,
    dt_bias,
    q,
    k,
    v,
    b,
    pool,
    indices,
    cu_seqlens,
    accepted,
    cache,
    cache_rows,
    parents,
    out,
    z,
    norm_weight,
    arrived,
    normed,
    T,
    sequences,
    slots,
    rows,
    steps,
    columns,
    numbers,
    strides,
    C: tl.constexpr,
):
    epsilon = numbers[4]
    q_by, k_by, v_by, a_by = strides[0:3], strides[3:6], strides[6:9], strides[9:12]
    b_batch, b_row, z_batch, z_row, z_head, slot_stride, cache_stride, step_stride = strides[12:20]
    q_row, k_row, v_row, a_row = q_by[1], k_by[1], v_by[1], a_by[1]
    TILES: tl.constexpr = C.TILES
    NV: tl.constexpr = (C.V + C.BLOCK_V * TILES - 1) // (C.BLOCK_V * TILES)
    program = tl.program_id(0)
    column = (program % NV) * TILES
    head = (program // NV) % C.HV
    n = program // (NV * C.HV)
    # heads and tokens may lie any distance apart: their products with a stride need 64 bits
    h = (head // (C.HV // C.H)).to(tl.int64)
    hv = head.to(tl.int64)
    if C.VK:
        # as [.., 128 bytes], unless a row is as well whole: 8 threads hold it, and not 32, and its
        # sums take 3 rounds of shuffles instead of 5
        k_at = tl.arange(0, C.BLOCK_K // C.KI)[:, None] * C.KI + tl.arange(0, C.KI)[None, :]
    else:
        k_at = tl.arange(0, C.BLOCK_K)
    n_wide = n.to(tl.int64)

    if C.GIVEN:
        first, length = _from_lengths(cu_seqlens, n, T, C.VARLEN)
        last = tl.minimum(_accepted(accepted, n), length) - 1
        slot = tl.load(indices + first + last, mask=length > 0, other=-1).to(tl.int64)
        indices += first
        n_batch = n_wide * 0
    elif C.VARLEN:
        slot = tl.load(indices + n).to(tl.int64)
        first, length = span_of(cu_seqlens, n, T)
        first = first.to(tl.int64)
        n_batch = n_wide * 0
    else:
        slot = tl.load(indices + n).to(tl.int64)
        first = n_wide * 0
        length = T
        n_batch = n_wide
    q = from_head(q, q_by, n_batch, first, h)
    k = from_head(k, k_by, n_batch, first, h)
    v = from_head(v, v_by, n_batch, first, hv)
    a = from_head(a, a_by, n_batch, first, hv)
    b += n_batch * b_batch + first * b_row + hv
    out += ((n_batch * T + first) * C.HV + hv) * C.V
    out_row = C.HV * C.V
    live = (slot >= 0) & (slot < slots)
    any_token = length > 0
    states = pool + hv * (C.K * C.V)
    pool = states + slot * slot_stride
    v_at, tile_at, tile_mask = state_tile(column, k_at, live, C.K, C.V, C.BLOCK_K, C.BLOCK_V, C.VK)
    state = load_state(pool + tile_at, tile_mask, C.TWICE)
    if C.CHAINED:
        # q, k and v are what the kernel before makes
        gdc_wait()

    # apart, ptxas places a lone token's sums better among the loads of the state
    TOGETHER: tl.constexpr = C.TWICE or not C.ONE
    zero = T >> 31
    rate = 0.0
    bias = 0.0
    if not C.GIVEN:
        rate = tl.exp(tl.load(A_log + hv).to(tl.float32))
    if C.GIVEN:
        pass
    elif C.KDA:
        bias = tl.load(dt_bias + hv * C.K + k_at, mask=k_at < C.K, other=0.0).to(tl.float32)
    else:
        bias = tl.load(dt_bias + hv).to(tl.float32)
    if C.CACHE:
        row = tl.load(cache_rows + n).to(tl.int64)
        kept = (row >= 0) & (row < rows)
        cache += row * cache_stride + hv * (C.K * C.V)
    if C.TREE:
        parents += n_wide * columns

    # the first token's values, which every tile needs, are in flight together with the state
    first_token = _load_token(q, k, a, b, any_token, k_at, C.K, C.KDA)
    if C.ONE:
        gated = gates(
            first_token, rate, bias, numbers, C.NORM, C.BOUNDED, C.GIVEN, C.NEG, C.VK, TOGETHER
        )
    for tile in tl.static_range(TILES):
        v_tile = tl.load(v + v_at, mask=any_token & (v_at < C.V), other=0.0)
        if tile + 1 < TILES:
            v_at_2, tile_at_2, tile_on_2 = state_tile(
                column + tile + 1, k_at, live, C.K, C.V, C.BLOCK_K, C.BLOCK_V, C.VK
            )
            state_2 = load_state(pool + tile_at_2, tile_on_2, C.TWICE)
        if C.CACHE:
            _, _, cache_mask = state_tile(
                column + tile, k_at, kept, C.K, C.V, C.BLOCK_K, C.BLOCK_V, C.VK
            )
        if C.ONE:
            state, o = step(state, gated, v_tile, zero, C.VK, C.KDA, TOGETHER, C.TWICE)
            tl.store(out + v_at, o.to(out.dtype.element_ty), mask=v_at < C.V)
            if C.CACHE:
                mask = cache_mask & (steps > 0)
                tl.store(cache + tile_at, state.to(cache.dtype.element_ty), mask=mask)
        else:
            q_tile, k_tile, a_tile, b_tile = first_token
            # walked, not multiplied with the token, which would take 64 bits
            q_to, k_to, v_to, a_to, b_to, out_to, cache_to = q, k, v, a, b, out, cache
            for t in range(length):
                coming = t + 1 < length
                q_to += q_row
                k_to += k_row
                v_to += v_row
                a_to += a_row
                b_to += b_row
                q_next, k_next, a_next, b_next = _load_token(
                    q_to, k_to, a_to, b_to, coming, k_at, C.K, C.KDA
                )
                v_next = tl.load(v_to + v_at, mask=coming & (v_at < C.V), other=0.0)
                if C.TREE:  # noqa: SIM102 (a constexpr, decided before the rest is compiled)
                    # the chain goes on in registers; a branch is walked again from its root,
                    # which needs no stored states and rounds zero
                    if (t > 0) & (_parent(parents, t, columns) != t - 1):
                        state = load_state(pool + tile_at, tile_mask, False)
                        for earlier in range(t):
                            at = t
                            while at > earlier:
                                at = _parent(parents, at, columns)
                            if at == earlier:
                                past = tl.cast(earlier, tl.int64)
                                past_token = _load_token(
                                    q + past * q_row,
                                    k + past * k_row,
                                    a + past * a_row,
                                    b + past * b_row,
                                    any_token,
                                    k_at,
                                    C.K,
                                    C.KDA,
                                )
                                v_past = tl.load(v + past * v_row + v_at, v_at < C.V, 0.0)
                                gated = gates(
                                    past_token,
                                    rate,
                                    bias,
                                    numbers,
                                    C.NORM,
                                    C.BOUNDED,
                                    C.GIVEN,
                                    C.NEG,
                                    C.VK,
                                    True,
                                )
                                state, _o = step(
                                    state, gated, v_past, zero, C.VK, C.KDA, True, False
                                )
                token = (q_tile, k_tile, a_tile, b_tile)
                gated = gates(
                    token, rate, bias, numbers, C.NORM, C.BOUNDED, C.GIVEN, C.NEG, C.VK, True
                )
                state, o = step(state, gated, v_tile, zero, C.VK, C.KDA, True, False)
                tl.store(out_to + v_at, o.to(out.dtype.element_ty), mask=v_at < C.V)
                out_to += out_row
                if C.CACHE:
                    mask = cache_mask & (t < steps)
                    tl.store(cache_to + tile_at, state.to(cache.dtype.element_ty), mask=mask)
                    cache_to += step_stride
                if C.GIVEN:
                    slot = tl.load(indices + t).to(tl.int64)
                    valid = (slot >= 0) & (slot < slots)
                    _, _, mask = state_tile(
                        column + tile, k_at, valid, C.K, C.V, C.BLOCK_K, C.BLOCK_V, C.VK
                    )
                    to = states + slot * slot_stride + tile_at
                    tl.store(to, state.to(states.dtype.element_ty), mask=mask)
                q_tile, k_tile, v_tile, a_tile, b_tile = q_next, k_next, v_next, a_next, b_next
        if z is not None and tile == TILES - 1:
            # in front of the state's stores, which the count would wait for
            tl.debug_barrier()
            others = tl.atomic_add(arrived + n_wide * C.HV + hv, 1)
        if C.UPDATE:
            tl.store(pool + tile_at, state.to(pool.dtype.element_ty), mask=tile_mask & any_token)
        if C.VARLEN:
            # tokens before the first sequence, and behind the last one
            nothing = tl.full([C.BLOCK_V], 0.0, out.dtype.element_ty)
            before = tl.where(n == 0, -first, 0).to(tl.int32)
            for t in range(before, 0):
                tl.store(out + tl.cast(t, tl.int64) * out_row + v_at, nothing, mask=v_at < C.V)
            behind = tl.where(n == sequences - 1, T - first, length).to(tl.int32)
            for t in range(length, behind):
                tl.store(out + tl.cast(t, tl.int64) * out_row + v_at, nothing, mask=v_at < C.V)
        if tile + 1 < TILES:
            v_at, tile_at, tile_mask, state = v_at_2, tile_at_2, tile_on_2, state_2
    if z is not None:
        z += n_batch * z_batch + hv * z_head
        normed += (n_wide * T * C.HV + hv) * C.V
        if others == NV - 1:
            _norm_the_rows(
                out, z, norm_weight, normed, length, out_row, z_row, epsilon, C.V, C.ALL, C.SILU
            )


@triton.jit
def _norm_the_rows(
    rows,
    z,
    norm_weight,
    normed,
    length,
    row,
    z_row,
    epsilon,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SILU: tl.constexpr,
):
    """By the last of a head's programs, which sees the columns of all: their stores come before
    the count that it reads."""
    d = tl.arange(0, BLOCK_V)
    w = tl.load(norm_weight + d, mask=d < V, other=0.0).to(tl.float32)
    for _ in range(length):
        x = tl.load(rows + d, mask=d < V, other=0.0, cache_modifier=".cg").to(tl.float32)
        gate = tl.load(z + d, mask=d < V, other=0.0).to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / V + epsilon)
        out = x * scale * w * opening(gate, SILU)
        tl.store(normed + d, out.to(normed.dtype.element_ty), mask=d < V)
        rows += row
        z += z_row
        normed += row


@dataclass(frozen=True)
class Given:
    """torch_npu's op: `a` is the logarithm of the decay and `b` is beta, sequences come by their
    lengths [N], and every token has a slot for the state after it, `initial_state_indices` [T]."""

    lengths: Tensor | None
    accepted: Tensor | None


@dataclass(frozen=True)
class Epilogue:
    """What the layer's decode has the rule do with its rows: norm and gate them, into `normed`.
    `arrived` [N, HV] counts the programs of a head, from the zeros of the kernel before."""

    z: Tensor
    norm_weight: Tensor
    arrived: Tensor
    normed: Tensor
    epsilon: float
    silu: bool


def tiles(
    state_layout: str, half: bool, V: int, BLOCK_K: int, heads: int, tokens: int
) -> tuple[int, int, int, int | None]:
    """(columns of a tile, tiles, warps, registers) of a program, for `heads` states of BLOCK_K rows
    and `tokens` a sequence.  What counts is the bytes in flight: 128 KB a multiprocessor in the
    best tiles, and whole lines of 256 bytes for [K, V].

    H200, 2026-11, H 16, HV 32, K = V = 128, slots in order, microseconds at 1 / 32 / 128 / 512
    sequences: float32 [V, K] 2.8 / 35.9 / 133.7 / 520, [K, V] 2.9 / 37.5 / 136.6 / 529.6 (an
    in-place multiply of the state: 1.8 / 33.9 / 129.4 / 512.7); bfloat16 at 32 / 128 / 512 [V, K]
    20.1 / 69.5 / 268.5, [K, V] 21.9 / 73.2 / 281.2; 4 tokens at 32 / 128 [V, K] 48.6 / 172,
    [K, V] 47.5 / 165.
    """
    few = heads <= 128
    registers = None
    if state_layout == "vk":
        if few:
            BLOCK_V, count, warps = 4, 1, 1
        elif tokens > 1:
            BLOCK_V, count, warps, registers = 16, 1, 1, 128 if BLOCK_K <= 128 else None
        else:
            BLOCK_V, count, warps = 16, 2 if half else 1, 1
    elif few or tokens > 1:
        BLOCK_V, count, warps, registers = 16, 1, 1, 128
    else:
        BLOCK_V, count, warps = 64, 1, 2 if half else 4
    BLOCK_V = min(max(1, BLOCK_V * 128 // BLOCK_K), triton.next_power_of_2(V))
    # a tile beyond V would be the next head's
    return BLOCK_V, count if V % (BLOCK_V * count) == 0 else 1, warps, registers


def unsupported(k: Tensor, v: Tensor, **_: Any) -> str | None:
    if k.dtype is torch.float64:
        return "q, k, v are float64, supported are float32, float16 and bfloat16"
    if k.shape[-1] > LARGEST_K:
        return f"K={k.shape[-1]}, supported up to {LARGEST_K}"
    if k.shape[1] >= 2**31:
        return f"{k.shape[1]} tokens, supported are below 2**31"
    if k.shape[-1] * v.shape[-1] >= 2**31:
        # offsets in a head's state are 32 bits wide
        return f"K={k.shape[-1]} and V={v.shape[-1]}, supported are states below 2**31 numbers"
    return None


def launch(
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    epilogue: Epilogue | None,
    given: Given | None,
    **x: Unpack[Rule],
) -> Tensor:
    q, k, v, a, b, cu_seqlens = x["q"], x["k"], x["v"], x["a"], x["b"], x["cu_seqlens"]
    pool, indices = x["initial_state_source"], x["initial_state_indices"]
    B, T, H, K = k.shape
    HV, V = v.shape[2:]
    N = indices.shape[0]
    accepted = None
    if given is not None:
        cu_seqlens, accepted = given.lengths, given.accepted
        N = 1 if cu_seqlens is None else cu_seqlens.shape[0]
    out = memory.empty(v.shape, v.dtype, v.device)
    if N == 0 or out.numel() == 0:
        return out.zero_()
    a = a.view(B, T, HV, K) if x["is_kda"] else a.view(B, T, HV)
    b = b.view(B, T, HV)
    cache, parents = x["intermediate_states"], x["retrieve_parent_token"]
    BLOCK_K = max(16, triton.next_power_of_2(K))
    tokens = T if cu_seqlens is None else triton.cdiv(T, N)
    one = T == 1 and cu_seqlens is None and given is None
    half = pool.element_size() == 2
    BLOCK_V, count, warps, registers = tiles(x["state_layout"], half, V, BLOCK_K, N * HV, tokens)
    # bytes of a row that lie side by side in a group of lanes: the whole row of a lone token
    KI = BLOCK_K if tokens == 1 and not half else min(BLOCK_K, 128 // pool.element_size())
    behind: tuple[Tensor | None, ...] = (None,) * 4
    z_strides: tuple[int, ...] = (0, 0, 0)
    epsilon = 0.0
    chained = epilogue is not None and gpu.has_chained_launch(q.device)
    if epilogue is not None:
        e = epilogue
        behind = (e.z, e.norm_weight, e.arrived, e.normed)
        z_strides, epsilon = e.z.stride()[:3], e.epsilon
    launches.kernel(_delta_rule_kernel, N * HV * triton.cdiv(V, BLOCK_V * count))(
        A_log,
        a,
        dt_bias,
        q,
        k,
        v,
        b,
        pool,
        indices,
        cu_seqlens,
        accepted,
        cache,
        x["intermediate_state_indices"],
        parents,
        out,
        *behind,
        T,
        N,
        pool.shape[0],
        0 if cache is None else cache.shape[0],
        0 if cache is None else cache.shape[1],
        0 if parents is None else parents.shape[1],
        (
            K**-0.5 if x["scale"] is None else x["scale"],
            x["softplus_beta"],
            x["softplus_threshold"],
            0.0 if x["lower_bound"] is None else x["lower_bound"],
            epsilon,
        ),
        (
            *(s for each in (q, k, v, a) for s in each.stride()[:3]),
            *b.stride()[:2],
            *z_strides,
            pool.stride(0),
            *((0, 0) if cache is None else cache.stride()[:2]),
        ),
        C=Constants(
            H=H,
            HV=HV,
            K=K,
            V=V,
            BLOCK_K=BLOCK_K,
            KI=KI,
            BLOCK_V=BLOCK_V,
            TILES=count,
            VK=x["state_layout"] == "vk",
            KDA=x["is_kda"],
            NORM=x["use_qk_l2norm_in_kernel"],
            BOUNDED=x["lower_bound"] is not None,
            ONE=one,
            VARLEN=cu_seqlens is not None,
            UPDATE=not x["disable_state_update"] and given is None,
            CACHE=cache is not None,
            TREE=parents is not None,
            TWICE=one and x["state_layout"] == "kv" and half and not INTERPRETED,
            ALL=triton.next_power_of_2(V),
            SILU=epilogue is None or epilogue.silu,
            CHAINED=chained,
            GIVEN=given is not None,
            NEG=x["allow_neg_eigval"],
        ),
        num_warps=warps,
        maxnreg=registers,
        **({"launch_pdl": True} if chained else {}),
    )
    return out


def forward(**x: Any) -> Tensor:
    """The op by itself."""
    return launch(**x, epilogue=None, given=None)
