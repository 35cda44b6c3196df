# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""A token of a KDA layer in one launch: convolution, delta rule, gated norm.

Queries, keys and values have the same heads, K = V, so a program owns a head of a sequence whole:
its state, and the channels that are convolved for it.  The loads of the state come first, and all
else is done while they are on the way.  What the convolution and the rule give is rounded to the
dtype of the model, as it is between the ops.  The floor is the state, read and written.

    condition    kernels
    any          _kda_layer_kernel
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from typing_extensions import Unpack

from ...dispatch.common import memory
from ...dispatch.ops.delta_rule.gated_delta_layer_decode import Arguments
from ..common.convolution import sigmoid, taps_of, value_at
from ..common.gpu import INTERPRETED
from ..runtime import launches
from .fused_sigmoid_gating_delta_rule_update import gates, load_state, state_tile, step
from .gated_rms_norm import opening


class Constants(NamedTuple):
    """W taps, L columns of the convolution's pool; TWICE: the state is widened where it is used."""

    H: int
    K: int
    BLOCK: int
    W: int
    L: int
    VK: bool
    BOUNDED: bool
    NEG: bool
    UPDATE: bool
    TWICE: bool
    SILU: bool


@triton.jit(do_not_specialize=["slots"])
def _kda_layer_kernel(
    x,
    history,
    weight,
    conv_bias,
    indices,
    pool,
    a,
    b,
    A_log,
    dt_bias,
    z,
    norm_weight,
    out,
    slots,
    numbers,
    strides,
    C: tl.constexpr,
):
    epsilon = numbers[4]
    (
        x_batch,
        w_tap,
        w_channel,
        h_slot,
        h_column,
        h_channel,
        slot_stride,
        a_batch,
        a_head,
        b_batch,
        z_batch,
        z_head,
    ) = strides
    W: tl.constexpr = C.W
    L: tl.constexpr = C.L
    head = tl.program_id(0) % C.H
    h = head.to(tl.int64)
    n = (tl.program_id(0) // C.H).to(tl.int64)
    slot = tl.load(indices + n).to(tl.int64)
    live = (slot >= 0) & (slot < slots)
    slot = tl.where(live, slot, 0)
    i = tl.arange(0, C.BLOCK)
    on = i < C.K
    k_at = i[None, :] if C.VK else i  # as the rule has them
    pool += slot * slot_stride + h * (C.K * C.K)
    _, tile_at, tile_mask = state_tile(0, k_at, live, C.K, C.K, C.BLOCK, C.BLOCK, C.VK)
    stored = load_state(pool + tile_at, tile_mask, C.TWICE)

    # q, k, v and nothing, [BLOCK, 2, 2]: in one tile a thread has a few channels of its own
    part = tl.arange(0, 2)[None, :, None] * 2 + tl.arange(0, 2)[None, None, :]
    d = part * (C.H * C.K) + head * C.K + i[:, None, None]
    there = on[:, None, None] & (part < 3)
    x += n * x_batch
    history += slot * h_slot
    taps = taps_of(weight, d, there, w_tap, w_channel, W)
    mixed = tl.zeros(d.shape, tl.float32)
    if conv_bias is not None:
        mixed += tl.load(conv_bias + d, mask=there, other=0.0).to(tl.float32)
    values = ()
    for back in tl.static_range(max(L, W)):
        # 64 bits, as a position of it may be multiplied with a stride
        position = tl.cast(-back, tl.int64)
        value = value_at(x, history, position, L, d, there, live, 0, h_column, h_channel)
        values += (value,)
        if back < W:
            mixed += value * taps[back]
    if C.UPDATE:
        # a thread may store what another one loads
        tl.debug_barrier()
        for back in tl.static_range(L):
            to = history + tl.cast(L - 1 - back, tl.int64) * h_column
            to += d.to(tl.int64) * h_channel
            tl.store(to, values[back].to(history.dtype.element_ty), mask=there & live)
    q_v, k_none = tl.split((mixed * sigmoid(mixed)).to(x.dtype.element_ty))
    q_tile, v_tile = tl.split(q_v)
    k_tile, _none = tl.split(k_none)
    if C.VK:
        q_tile = q_tile[None, :]
        k_tile = k_tile[None, :]

    a_tile = tl.load(a + n * a_batch + h * a_head + k_at, mask=k_at < C.K, other=0.0)
    b_tile = tl.load(b + n * b_batch + h)
    rate = tl.exp(tl.load(A_log + h).to(tl.float32))
    dt = tl.load(dt_bias + h * C.K + k_at, mask=k_at < C.K, other=0.0).to(tl.float32)
    token = (q_tile, k_tile, a_tile, b_tile)
    gated = gates(token, rate, dt, numbers, True, C.BOUNDED, False, C.NEG, C.VK, C.TWICE)
    state, o = step(stored, gated, v_tile, slots >> 31, C.VK, True, C.TWICE, C.TWICE)
    # in front of the stores, which they would wait for
    gate = tl.load(z + n * z_batch + h * z_head + i, mask=on, other=0.0).to(tl.float32)
    w = tl.load(norm_weight + i, mask=on, other=0.0).to(tl.float32)
    if C.UPDATE:
        tl.store(pool + tile_at, state.to(pool.dtype.element_ty), mask=tile_mask)

    o = o.to(out.dtype.element_ty).to(tl.float32)
    normed = o * (1.0 / tl.sqrt(tl.sum(o * o, 0) / C.K + epsilon)) * w * opening(gate, C.SILU)
    tl.store(out + (n * C.H + h) * C.K + i, normed.to(out.dtype.element_ty), mask=on)


def tiles(state_layout: str, BLOCK: int) -> tuple[int, int]:
    """(warps, registers a thread), for 64 numbers of the state a thread, or 128: sums over K go
    across warps for [K, V], and cost less across four.

    H200, 2026-11, 32 heads, float32 states, microseconds at 1 / 32 / 128 sequences, and in
    parentheses of two launches: [V, K] 5.2 / 43.7 / 148.8 (6.7 / 46.6 / 153.9), [K, V] 5.3 / 42.5 /
    146.0 (5.3 / 48.6 / 154.8).
    """
    numbers, registers = (64, 128) if state_layout == "vk" else (128, 255)
    return max(1, BLOCK * BLOCK // (numbers * 32)), registers


def forward(**x: Unpack[Arguments]) -> Tensor:
    z, a, b, states = x["z"], x["a"], x["b"], x["states"]
    B, T, H, K = z.shape
    out = memory.empty(z.shape, z.dtype, z.device)
    if out.numel() == 0:
        return out
    a = a.view(B, T, H, K)
    BLOCK = max(16, triton.next_power_of_2(K))
    warps, registers = tiles(x["state_layout"], BLOCK)
    launches.kernel(_kda_layer_kernel, B * H)(
        x["mixed_qkv"],
        x["conv_states"],
        x["conv_weight"],
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
        states.shape[0],
        (
            K**-0.5 if x["scale"] is None else x["scale"],
            x["softplus_beta"],
            x["softplus_threshold"],
            0.0 if x["lower_bound"] is None else x["lower_bound"],
            x["epsilon"],
        ),
        (
            x["mixed_qkv"].stride(0),
            *x["conv_weight"].stride(),
            *x["conv_states"].stride(),
            states.stride(0),
            a.stride(0),
            a.stride(2),
            b.stride(0),
            z.stride(0),
            z.stride(2),
        ),
        C=Constants(
            H=H,
            K=K,
            BLOCK=BLOCK,
            W=x["conv_weight"].shape[0],
            L=x["conv_states"].shape[1],
            VK=x["state_layout"] == "vk",
            BOUNDED=x["lower_bound"] is not None,
            NEG=x["allow_neg_eigval"],
            UPDATE=not x["disable_state_update"],
            TWICE=x["state_layout"] == "kv" and states.element_size() == 2 and not INTERPRETED,
            SILU=x["gate_activation"] != "sigmoid",
        ),
        num_warps=warps,
        maxnreg=registers,
    )
    return out
