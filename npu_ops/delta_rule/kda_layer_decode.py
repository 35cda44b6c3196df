# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""A token of a KDA layer in one launch on the vector cores: convolution, delta rule, gated norm.

Queries, keys and values have the same heads, K = V, so a core takes a head of a sequence whole: the
channels that are convolved for it, and its state, VALUE_TILE value channels at a time.  What the
convolution and the rule give is rounded to the dtype of the model, as it is between the ops.  A
slot outside the pools makes empty copies, in and out.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from typing_extensions import Unpack

from ...dispatch.common import memory
from ...dispatch.ops.delta_rule.gated_delta_layer_decode import Arguments
from ..common import cores, tune, tuples
from ..common.front_end import extract_slice, insert_slice
from ..convolution.causal_conv1d import sigmoid
from .fused_sigmoid_gating_delta_rule_update import Gate, after, gates, unit

_STATE = 4096  # elements of a part of the state: twice as many plan up to 179 KiB of UB
_KERNEL = "kda_layer_decode.advance"


@triton.jit
def _convolved(
    x,
    of_row,
    weight,
    bias,
    first,
    there,
    s_column,
    CHANNELS: tl.constexpr,
    K: tl.constexpr,
    W: tl.constexpr,
    L: tl.constexpr,
    STORE: tl.constexpr,
):
    """K channels of a token from `first` on, float32; their row of the pool is pushed on."""
    d = first + tl.arange(0, K)
    column = tl.arange(0, L)
    before = tl.arange(0, W - 1)
    at = column.to(tl.int64)[:, None] * s_column + d[None]
    on = (column < tl.where(there, L, 0))[:, None]
    row = tl.load(of_row + at, mask=on, other=0.0)
    token = tl.load(x + d)
    taps = tl.load(weight + before[:, None] * CHANNELS + d[None]).to(tl.float32)
    now = token.to(tl.float32)
    total = now * tl.load(weight + (W - 1) * CHANNELS + d).to(tl.float32)
    past = extract_slice(row, (L - W + 1, 0), (W - 1, K), (1, 1)).to(tl.float32)
    total += tl.sum(past * taps, 0)
    if bias is not None:
        total += tl.load(bias + d).to(tl.float32)
    if STORE:
        # one copy, which waits for the row: the token's place is read before it is written
        pushed = tl.zeros((L, K), row.dtype)
        if L > 1:
            moved = extract_slice(row, (1, 0), (L - 1, K), (1, 1))
            pushed = insert_slice(pushed, moved, (0, 0), (L - 1, K), (1, 1))
        pushed = insert_slice(pushed, now.to(row.dtype)[None], (L - 1, 0), (1, K), (1, 1))
        tl.store(of_row + at, pushed, mask=on)
    return (total * sigmoid(total)).to(token.dtype).to(tl.float32)


class Sizes(NamedTuple):
    sequences: int
    slots: int  # of both pools


class Strides(NamedTuple):
    x_batch: int
    s_slot: int  # of the convolution's pool
    s_column: int
    slot: int  # of the states
    a_batch: int
    a_head: int
    b_batch: int
    z_batch: int
    z_head: int


class Constants(NamedTuple):
    HEADS: tl.constexpr
    KEY: tl.constexpr  # channels of a head
    W: tl.constexpr  # taps
    L: tl.constexpr  # columns of the convolution's pool
    VALUE_FIRST: tl.constexpr  # a state is [V, K], not [K, V]
    BOUNDED: tl.constexpr  # the decay has a lower bound
    NEG: tl.constexpr  # beta is twice the sigmoid
    SILU: tl.constexpr  # of the norm's gate; its sigmoid else
    STORE: tl.constexpr  # the states are pushed on


@tuples.jit(do_not_specialize=["scale", "epsilon"])
def advance(
    x,
    history,
    weight,
    conv_bias,
    slot_of,
    pool,
    a,
    b,
    A_log,
    dt_bias,
    z,
    norm_weight,
    out,
    gate: Gate,
    scale,
    epsilon,
    sizes: Sizes,
    stride: Strides,
    C: Constants,
    VALUE_TILE: tl.constexpr,
):
    """x [B, 3 H K]  a, z, out [B, H, K]  b [B, H]"""
    TILES: tl.constexpr = C.KEY // VALUE_TILE
    CHANNELS: tl.constexpr = C.HEADS * C.KEY  # of the queries, of the keys, of the values
    d = tl.arange(0, C.KEY)
    c = tl.arange(0, VALUE_TILE)
    # a head's value channels, a row a tile: UB overflows where a loop carries them as one row
    place = tl.arange(0, TILES)[:, None] * VALUE_TILE + c[None]
    one = tl.zeros((1,), tl.int32)  # a scalar of the vector unit
    w = tl.load(norm_weight + place).to(tl.float32)
    for work in range(tl.program_id(0), sizes.sequences * C.HEADS, tl.num_programs(0)):
        n = (work // C.HEADS).to(tl.int64)
        head = work % C.HEADS
        h = head.to(tl.int64)
        slot = tl.load(slot_of + n).to(tl.int64)
        there = (slot >= 0) & (slot < sizes.slots)
        slot = tl.where(there, slot, 0)
        mixed = tl.zeros((3, C.KEY), tl.float32)
        for part in range(0, 3):
            conv = _convolved(
                x + n * stride.x_batch,
                history + slot * stride.s_slot,
                weight,
                conv_bias,
                part * CHANNELS + head * C.KEY,
                there,
                stride.s_column,
                3 * CHANNELS,
                C.KEY,
                C.W,
                C.L,
                C.STORE,
            )
            mixed = insert_slice(mixed, conv[None], (part, 0), (1, C.KEY), (1, 1))
        q = extract_slice(mixed, (0, 0), (1, C.KEY), (1, 1)).reshape(C.KEY)
        k = extract_slice(mixed, (1, 0), (1, C.KEY), (1, 1)).reshape(C.KEY)
        v = extract_slice(mixed, (2, 0), (1, C.KEY), (1, 1)).reshape(C.KEY)
        decay, beta = gates(
            a + n * stride.a_batch + h * stride.a_head,
            b + n * stride.b_batch + head,
            -tl.exp(tl.load(A_log + head + one).to(tl.float32)),
            tl.load(dt_bias + head * C.KEY + d).to(tl.float32),
            *gate,
            one,
            d,
            True,
            C.BOUNDED,
            False,
            C.NEG,
        )
        opened = tl.load(z + n * stride.z_batch + h * stride.z_head + place).to(tl.float32)
        opened = opened * sigmoid(opened) if C.SILU else sigmoid(opened)
        q = unit(q) * scale
        k = unit(k)
        o = tl.zeros((TILES, VALUE_TILE), tl.float32)
        of_state = pool + slot * stride.slot + h * (C.KEY * C.KEY)
        for tile in range(0, TILES):
            first = tile * VALUE_TILE
            if C.VALUE_FIRST:
                at = (first + c)[:, None] * C.KEY + d[None]
                on = (c < tl.where(there, VALUE_TILE, 0))[:, None]
            else:
                at = d[:, None] * C.KEY + first + c[None]
                on = (d < tl.where(there, C.KEY, 0))[:, None]
            state = tl.load(of_state + at, mask=on, other=0.0).to(tl.float32)
            v_tile = extract_slice(v, (first,), (VALUE_TILE,), (1,))
            state = after(state, k, v_tile, decay, beta, C.VALUE_FIRST)
            if C.STORE:
                tl.store(of_state + at, state.to(pool.dtype.element_ty), mask=on)
            o_tile = tl.sum(state * q[None], 1) if C.VALUE_FIRST else tl.sum(state * q[:, None], 0)
            o = insert_slice(o, o_tile[None], (tile, 0), (1, VALUE_TILE), (1, 1))
        o = o.to(out.dtype.element_ty).to(tl.float32)
        root = 1.0 / tl.sqrt(tl.sum(tl.sum(o * o, 1), 0) / C.KEY + epsilon)
        normed = o * root * w * opened
        tl.store(out + (n * C.HEADS + h) * C.KEY + place, normed.to(out.dtype.element_ty))


def forward(**x: Unpack[Arguments]) -> Tensor:
    z, b, scale, lower_bound = x["z"], x["b"], x["scale"], x["lower_bound"]
    conv_states, conv_weight, states = x["conv_states"], x["conv_weight"], x["states"]
    B, T, H, K = z.shape
    out = memory.empty(z.shape, z.dtype, z.device)
    if out.numel() == 0:
        return out
    a = x["a"].view(B, T, H, K)
    fitting = [
        config
        for config in tune.TABLE[_KERNEL]
        if K % config.tiles["VALUE_TILE"] == 0 and K * config.tiles["VALUE_TILE"] <= _STATE
    ]
    config = tune.choose(_KERNEL, fitting, K)
    advance[(min(B * H, cores.vector()),)](
        x["mixed_qkv"],
        conv_states,
        conv_weight.contiguous(),
        x["conv_bias"],
        x["state_indices"],
        states,
        a,
        b,
        x["A_log"],
        x["dt_bias"],
        z,
        x["norm_weight"],
        out,
        x["softplus_beta"],
        x["softplus_threshold"],
        0.0 if lower_bound is None else lower_bound,
        K**-0.5 if scale is None else scale,
        x["epsilon"],
        B,
        states.shape[0],
        x["mixed_qkv"].stride(0),
        *conv_states.stride()[:2],
        states.stride(0),
        a.stride(0),
        a.stride(2),
        b.stride(0),
        z.stride(0),
        z.stride(2),
        HEADS=H,
        KEY=K,
        W=conv_weight.shape[0],
        L=conv_states.shape[1],
        VALUE_FIRST=x["state_layout"] == "vk",
        BOUNDED=lower_bound is not None,
        NEG=x["allow_neg_eigval"],
        SILU=x["gate_activation"] != "sigmoid",
        STORE=not x["disable_state_update"],
        **config.keywords,
    )
    return out
