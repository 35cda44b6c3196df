# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The gated delta rule with its gates, one kernel on the vector cores.

    S = decay S;   S += k (beta (v - S^T k))^T;   o = S^T q

A core takes VALUE_TILE value channels of a head of a sequence: that part of the state, fp32, stays
in UB over the sequence's tokens.  A slot outside the pool makes an empty copy, in and out: the mask
is a bound on its rows.  In a tree of drafts a step that does not follow from the one before walks
again from the root; the steps that are not on its way are made without decay and with beta 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from typing_extensions import Unpack

from ...dispatch.common import memory
from ...dispatch.ops.delta_rule.fused_sigmoid_gating_delta_rule_update import Arguments
from ..common import cores, tune, tuples
from ..common.lengths import latest, left

_STATE = 8192  # elements of a part of the state; UB holds it and four of what is made of it
_STEPS = 63  # of a tree: a way through it is a mask of bits
_KERNEL = "fused_sigmoid_gating_delta_rule_update.update"


@triton.jit
def _softplus(x, beta, threshold):
    """log(1 + e^(beta x)) / beta; log1p(e) = log(u) e / (u - 1) with u = 1 + e, rounding and all"""
    y = beta * x
    e = tl.exp(-tl.abs(y))
    u = 1.0 + e
    d = u - 1.0
    log1p = tl.where(d == 0, e, tl.log(u) * (e / tl.where(d == 0, 1.0, d)))
    return tl.where(y > threshold, x, (tl.maximum(y, 0.0) + log1p) / beta)


@triton.jit
def gates(
    of_a,
    of_b,
    rate,
    bias,
    softplus_beta,
    softplus_threshold,
    lower_bound,
    one,
    d,
    KDA: tl.constexpr,
    BOUNDED: tl.constexpr,
    GIVEN: tl.constexpr,
    NEG: tl.constexpr,
):
    """(decay [1 or K], beta [1])."""
    if KDA:
        x = tl.load(of_a + d).to(tl.float32)
    else:
        x = tl.load(of_a + one).to(tl.float32)
    beta = tl.load(of_b + one).to(tl.float32)
    if GIVEN:
        decay = tl.exp(x)
    elif BOUNDED:
        decay = tl.exp(lower_bound / (1.0 + tl.exp(rate * (x + bias))))
    else:
        decay = tl.exp(rate * _softplus(x + bias, softplus_beta, softplus_threshold))
    if not GIVEN:
        beta = (2.0 if NEG else 1.0) / (1.0 + tl.exp(-beta))
    return decay, beta


@triton.jit
def unit(x):
    return x / tl.sqrt(tl.sum(x * x, 0) + 1e-6)


@triton.jit
def _row(of_row, d, NORM: tl.constexpr):
    x = tl.load(of_row + d).to(tl.float32)
    if NORM:
        x = unit(x)
    return x


@triton.jit
def after(state, k_t, v_t, decay, beta, VALUE_FIRST: tl.constexpr):
    """The state after a token."""
    if VALUE_FIRST:
        state = state * decay[None]
        change = (v_t - tl.sum(state * k_t[None], 1)) * beta
        state += change[:, None] * k_t[None]
    else:
        state = state * decay[:, None]
        change = (v_t - tl.sum(state * k_t[:, None], 0)) * beta
        state += k_t[:, None] * change[None]
    return state


@triton.jit
def _parent(parents, t, columns):
    """The step that step t starts from; -1: the initial state."""
    parent = tl.load(parents + tl.minimum(t, columns - 1))
    # cast last: what does not fit 32 bits wraps
    return tl.where((t < columns) & (parent >= 0) & (parent < t), parent, -1).to(tl.int32)


class Gate(NamedTuple):
    softplus_beta: float
    softplus_threshold: float
    lower_bound: float


class Sizes(NamedTuple):
    sequences: int
    length: int  # of each sequence, if they are as long
    tokens: int  # of a packed row
    slots: int  # of the pool
    rows: int  # of the cache
    steps: int  # that a row of the cache keeps
    columns: int  # of the parents


class Tokens(NamedTuple):
    """Strides."""

    batch: int
    token: int


class Heads(NamedTuple):
    """Strides."""

    batch: int
    token: int
    head: int


class States(NamedTuple):
    """Strides."""

    slot: int
    row: int
    step: int


class Constants(NamedTuple):
    HEADS: tl.constexpr
    VALUE_HEADS: tl.constexpr
    KEY: tl.constexpr
    VALUE: tl.constexpr
    VALUE_FIRST: tl.constexpr  # a state is [V, K], not [K, V]
    KDA: tl.constexpr  # a decay a key channel
    NORM: tl.constexpr  # of queries and keys
    BOUNDED: tl.constexpr  # the decay has a lower bound
    VARLEN: tl.constexpr  # sequences are packed in a row
    NEG: tl.constexpr  # beta is twice the sigmoid
    GIVEN: tl.constexpr  # decays and betas are given, and a token has a slot
    ACCEPTED: tl.constexpr  # and says from which token a sequence goes on
    STORE: tl.constexpr  # the last state goes to the sequence's slot
    KEEP: tl.constexpr  # the state behind each step is kept
    TREE: tl.constexpr  # a step names the one that it follows from


@tuples.jit(do_not_specialize=["scale"])
def update(
    A_log,
    a,
    dt_bias,
    q,
    k,
    v,
    b,
    pool,
    slot_of,
    starts,
    accepted,
    cache,
    row_of,
    parents,
    out,
    gate: Gate,
    scale,
    sizes: Sizes,
    q_stride: Heads,
    k_stride: Heads,
    v_stride: Heads,
    a_stride: Heads,
    b_stride: Tokens,
    stride: States,
    C: Constants,
    VALUE_TILE: tl.constexpr,
):
    """q, k [.., H, K]  v, out [.., HV, V]  a [.., HV, 1 or K]  b [.., HV]; see the launcher."""
    TILES: tl.constexpr = C.VALUE // VALUE_TILE
    d = tl.arange(0, C.KEY)
    c = tl.arange(0, VALUE_TILE)
    one = tl.zeros((1,), tl.int32)  # a scalar of the vector unit
    start = 0
    seen = 0
    for work in range(
        tl.program_id(0), sizes.sequences * (C.VALUE_HEADS * TILES), tl.num_programs(0)
    ):
        n = work // (C.VALUE_HEADS * TILES)
        head = work // TILES % C.VALUE_HEADS
        first = work % TILES * VALUE_TILE
        key_head = head // (C.VALUE_HEADS // C.HEADS)
        if C.VARLEN:
            batch = n * 0
            start = latest(starts, n, seen, start, sizes.tokens)
            seen = n + 1
            end = start + left(starts, n, start, sizes.tokens)
        else:
            batch = n
            end = sizes.length
        batch = batch.to(tl.int64)
        if C.GIVEN:
            last = start
            if C.ACCEPTED:
                # before it is cast: what does not fit 32 bits wraps
                kept_tokens = tl.minimum(tl.maximum(tl.load(accepted + n), 1), end - start)
                last = start + tl.maximum(kept_tokens, 1).to(tl.int32) - 1
            slot = tl.load(slot_of + tl.minimum(last, sizes.tokens - 1)).to(tl.int64)
        else:
            slot = tl.load(slot_of + n).to(tl.int64)
        there = (slot >= 0) & (slot < sizes.slots)
        in_pool = pool + tl.where(there, slot, 0) * stride.slot
        if C.VALUE_FIRST:
            part = head * (C.KEY * C.VALUE) + (first + c)[:, None] * C.KEY + d[None]
            at = c
            count = VALUE_TILE
        else:
            part = head * (C.KEY * C.VALUE) + d[:, None] * C.VALUE + first + c[None]
            at = d
            count = C.KEY
        loaded = (at < tl.where(there, count, 0))[:, None]
        state = tl.load(in_pool + part, mask=loaded, other=0.0).to(tl.float32)
        if C.GIVEN:
            rate = one.to(tl.float32)
            bias = one.to(tl.float32)
        else:
            rate = -tl.exp(tl.load(A_log + head + one).to(tl.float32))
        if C.GIVEN:
            pass
        elif C.KDA:
            bias = tl.load(dt_bias + head * C.KEY + d).to(tl.float32)
        else:
            bias = tl.load(dt_bias + head + one).to(tl.float32)
        if C.KEEP:
            row = tl.load(row_of + n).to(tl.int64)
            kept = (row >= 0) & (row < sizes.rows)
            in_cache = cache + tl.where(kept, row, 0) * stride.row
        of_a = a + batch * a_stride.batch + head.to(tl.int64) * a_stride.head
        of_b = b + batch * b_stride.batch + head
        of_q = q + batch * q_stride.batch + key_head.to(tl.int64) * q_stride.head
        of_k = k + batch * k_stride.batch + key_head.to(tl.int64) * k_stride.head
        of_v = v + batch * v_stride.batch + head.to(tl.int64) * v_stride.head + first
        for t in range(start, end):
            step = t - start
            if C.TREE:
                target = _parent(parents + n * sizes.columns, step, sizes.columns)
                again = target != step - 1
                way = (step * 0).to(tl.int64)
                one_bit = way + 1
                for back in range(0, tl.where(again, step, 0)):
                    earlier = step - 1 - back
                    on = earlier == target
                    way = tl.where(on, way | (one_bit << earlier.to(tl.int64)), way)
                    above = _parent(parents + n * sizes.columns, earlier, sizes.columns)
                    target = tl.where(on, above, target)
                for _ in range(0, tl.where(again, 1, 0)):
                    state = tl.load(in_pool + part, mask=loaded, other=0.0).to(tl.float32)
                for earlier in range(0, tl.where(again, step, 0)):
                    past = (start + earlier).to(tl.int64)
                    # a factor: not every build of the compiler selects one element by a scalar
                    on = ((way >> earlier.to(tl.int64)) & 1).to(tl.float32)
                    decay, beta = gates(
                        of_a + past * a_stride.token,
                        of_b + past * b_stride.token,
                        rate,
                        bias,
                        *gate,
                        one,
                        d,
                        C.KDA,
                        C.BOUNDED,
                        C.GIVEN,
                        C.NEG,
                    )
                    state = after(
                        state,
                        _row(of_k + past * k_stride.token, d, C.NORM),
                        tl.load(of_v + past * v_stride.token + c).to(tl.float32),
                        decay * on + (1.0 - on),
                        beta * on,
                        C.VALUE_FIRST,
                    )
            now = t.to(tl.int64)
            decay, beta = gates(
                of_a + now * a_stride.token,
                of_b + now * b_stride.token,
                rate,
                bias,
                *gate,
                one,
                d,
                C.KDA,
                C.BOUNDED,
                C.GIVEN,
                C.NEG,
            )
            q_t = _row(of_q + now * q_stride.token, d, C.NORM) * scale
            k_t = _row(of_k + now * k_stride.token, d, C.NORM)
            v_t = tl.load(of_v + now * v_stride.token + c).to(tl.float32)
            state = after(state, k_t, v_t, decay, beta, C.VALUE_FIRST)
            o = tl.sum(state * q_t[None], 1) if C.VALUE_FIRST else tl.sum(state * q_t[:, None], 0)
            token = (batch * sizes.length + t) * C.VALUE_HEADS + head
            tl.store(out + token * C.VALUE + first + c, o.to(out.dtype.element_ty))
            if C.KEEP:
                stored = (at < tl.where(kept & (step < sizes.steps), count, 0))[:, None]
                to = in_cache + step.to(tl.int64) * stride.step
                tl.store(to + part, state.to(cache.dtype.element_ty), mask=stored)
            if C.GIVEN:
                own = tl.load(slot_of + t).to(tl.int64)
                inside = (own >= 0) & (own < sizes.slots)
                stored = (at < tl.where(inside, count, 0))[:, None]
                to = pool + tl.where(inside, own, 0) * stride.slot
                tl.store(to + part, state.to(pool.dtype.element_ty), mask=stored)
        if C.STORE:
            stored = (at < tl.where(there & (end > start), count, 0))[:, None]
            tl.store(in_pool + part, state.to(pool.dtype.element_ty), mask=stored)
        if C.VARLEN:
            # tokens of no sequence: behind all of them, and before the first one
            zero = tl.zeros((VALUE_TILE,), out.dtype.element_ty)
            for t in range(tl.where(n == sizes.sequences - 1, end, sizes.tokens), sizes.tokens):
                token = t.to(tl.int64) * C.VALUE_HEADS + head
                tl.store(out + token * C.VALUE + first + c, zero)
            for t in range(0, tl.where(n == 0, start, 0)):
                token = t.to(tl.int64) * C.VALUE_HEADS + head
                tl.store(out + token * C.VALUE + first + c, zero)


def _tile(key_size: int, value_size: int) -> tune.Config | None:
    """The widest part of the state that divides it and fits."""
    fitting = [
        config
        for config in tune.TABLE[_KERNEL]
        if value_size % config.tiles["VALUE_TILE"] == 0
        and key_size * config.tiles["VALUE_TILE"] <= _STATE
    ]
    return tune.choose(_KERNEL, fitting, key_size) if fitting else None


def unsupported(q: Tensor, v: Tensor, retrieve_parent_token: Tensor | None, **_: Any) -> str | None:
    key_size, value_size = q.shape[-1], v.shape[-1]
    if key_size % 16 or value_size % 16:
        return f"head sizes {key_size} and {value_size}, the kernel takes multiples of 16"
    if _tile(key_size, value_size) is None:
        return f"key size {key_size}, UB holds a state of {_STATE // 16} x 16 at most"
    if retrieve_parent_token is not None and retrieve_parent_token.shape[1] > _STEPS:
        steps = retrieve_parent_token.shape[1]
        return f"`retrieve_parent_token` has {steps} steps, the kernel follows up to {_STEPS}"
    return None


@dataclass(frozen=True)
class Given:
    """torch_npu's op: `a` is the logarithm of the decay and `b` is beta, and every token has a slot
    for the state after it, `initial_state_indices` [T]; a sequence goes on from that of the token
    that was `accepted` last."""

    accepted: Tensor | None


def forward(**x: Unpack[Arguments]) -> Tensor:
    """The op by itself."""
    return launch(None, **x)


def launch(given: Given | None, **x: Unpack[Arguments]) -> Tensor:
    A_log, a, b, q, k, v = (x[name] for name in ("A_log", "a", "b", "q", "k", "v"))
    pool, slot_of, is_kda = x["initial_state_source"], x["initial_state_indices"], x["is_kda"]
    scale, lower_bound, cu_seqlens = x["scale"], x["lower_bound"], x["cu_seqlens"]
    states, state_of = x["intermediate_states"], x["intermediate_state_indices"]
    batch, length, heads, key_size = q.shape
    value_heads, value_size = v.shape[2:]
    out = memory.empty(v.shape, v.dtype, v.device)
    accepted = None if given is None else given.accepted
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if out.numel() == 0 or sequences == 0:
        return out.zero_()
    channels = key_size if is_kda else 1
    a = (a if a.ndim == 4 else a.unflatten(-1, (value_heads, channels))).reshape(
        batch, length, value_heads, channels
    )
    b = b.reshape(batch, length, value_heads)
    config = _tile(key_size, value_size)
    assert config is not None
    parts = sequences * value_heads * (value_size // config.tiles["VALUE_TILE"])
    cache = pool if states is None else states
    parents = x["retrieve_parent_token"]
    if parents is not None and parents.shape[1] == 0:
        parents = parents.new_full((sequences, 1), -1)  # no kernel reads an empty tensor
    update[(min(parts, cores.vector()),)](
        A_log,
        a,
        x["dt_bias"],
        q,
        k,
        v,
        b,
        pool,
        slot_of,
        slot_of if cu_seqlens is None else cu_seqlens,
        slot_of if accepted is None else accepted,
        cache,
        slot_of if state_of is None else state_of,
        slot_of if parents is None else parents,
        out,
        x["softplus_beta"],
        x["softplus_threshold"],
        0.0 if lower_bound is None else lower_bound,
        key_size**-0.5 if scale is None else scale,
        sequences,
        length,
        length,
        pool.shape[0],
        cache.shape[0],
        cache.shape[1],
        parents.shape[1] if parents is not None else 0,
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        *a.stride()[:3],
        *b.stride()[:2],
        pool.stride(0),
        cache.stride(0),
        cache.stride(1),
        HEADS=heads,
        VALUE_HEADS=value_heads,
        KEY=key_size,
        VALUE=value_size,
        VALUE_FIRST=x["state_layout"] == "vk",
        KDA=is_kda,
        NORM=x["use_qk_l2norm_in_kernel"],
        BOUNDED=lower_bound is not None,
        VARLEN=cu_seqlens is not None,
        NEG=x["allow_neg_eigval"],
        GIVEN=given is not None,
        ACCEPTED=accepted is not None,
        STORE=not x["disable_state_update"] and given is None,
        KEEP=states is not None,
        TREE=parents is not None,
        **config.keywords,
    )
    return out
