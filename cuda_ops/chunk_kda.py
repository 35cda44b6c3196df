# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Kimi delta attention over whole sequences, 64 tokens at a time on tensor cores.

    G_i [K] = sum of the decay's logarithm up to i, within a chunk
    A_ij = sum over channels of k_i k_j exp(G_i - G_j) for j < i     T = (I + beta A)^-1
    U = T (beta v)     W = T (beta exp(G) k)     P_ij = scale q_i k_j exp(G_i - G_j) for j <= i
    by chunk:  N = U - W S;  out = (scale exp(G) q) S + P N;
    S = exp(G_last) S + (exp(G_last - G) k)^T N

    q, k [B, T, H, K]   v [B, T, HV, V]   g [B, T, HV, K]   beta [B, T, HV]   S [K, V] by head

exp(G_i - G_j) is no product of a number of i and one of j that stay in range.  Two tokens i > j of
a chunk differ in some highest bit b of their places; R, the G of the last token before i's block of
b, lies between them, and exp(G_i - G_j) = exp(G_i - R) exp(R - G_j): no exponent is above 0.  So A
and P are six products of [64, K], one for every bit, of which each gives the pairs that are its.

The first kernel makes all that does not know S of every chunk; the second walks over the chunks of
a sequence with some columns of one head's state in registers.  Kimi Linear (2025), section 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..dispatch.common import memory
from .common import gpu, launches
from .common.chunks import CHUNK, chunk_rows, heads_of
from .common.kda import (
    binary,
    from_between,
    gate,
    gate_input,
    log_decay,
    pairs_of_bit,
    place,
    steps,
    unit_norm,
    walked,
)

LARGEST_K, LARGEST_V = 128, 256
_KEY_TILE = 64  # channels of the keys that a chunk's kernel holds at a time


@triton.jit
def _solved(lower, PRECISION: tl.constexpr):
    """(I + lower)^-1 of a strictly lower [64, 64] matrix, in float32.

    Of two diagonal blocks whose inverses are known, the inverse of both has -T2 L T1 between them:
    six steps, each of which gives what the pairs of its bit add.  No sum is larger than what it
    stands for, so keys may be alike.  PRECISION is that of its products: one tf32 pass is four
    times as fine as the bfloat16 that the result is rounded to."""
    i = tl.arange(0, CHUNK)
    solved = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    solved -= tl.where(pairs_of_bit(1), lower, 0.0)
    for bit in range(1, 6):
        between = tl.where(pairs_of_bit(1 << bit), lower, 0.0)
        half = tl.dot(solved, between, input_precision=PRECISION)
        solved -= tl.dot(half, solved, input_precision=PRECISION)
    return solved


@triton.jit(do_not_specialize=["T", "sequences", "lower_bound"])
def _chunks_kernel(
    q, k, v, g, beta, A_log, dt_bias, bounds, qs, ks, p, fades, u, w, out, T, sequences,
    scale, lower_bound, q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head,
    g_batch, g_row, g_head, b_batch, b_row,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, K_PAD: tl.constexpr,
    V_PAD: tl.constexpr, BK: tl.constexpr, PIECES: tl.constexpr, VARLEN: tl.constexpr,
    NORM: tl.constexpr, GATE: tl.constexpr, A: tl.constexpr, BIAS: tl.constexpr,
    BACKWARD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Of a chunk and a head: scale exp(G) q, exp(G_last - G) k, P and exp(G_last); U and W, or for
    the gradient -A T and exp(G) k."""
    program = tl.program_id(0)
    chunk = program // HV
    h, hv = heads_of(program % HV, HV // H)
    batch, start, first, length, live = place(bounds, chunk, T, sequences, PIECES, VARLEN)
    i = tl.arange(0, CHUNK)
    there = first + i < length
    cv = tl.arange(0, V_PAD)
    element = qs.dtype.element_ty
    if live & (first < length):
        q += batch * q_batch + start * q_row + h * q_head
        k += batch * k_batch + start * k_row + h * k_head
        g += batch * g_batch + start * g_row + hv * g_head
        v += batch * v_batch + start * v_row + hv * v_head
        beta += batch * b_batch + start * b_row + hv
        EDGE: tl.constexpr = BK if K == K_PAD else K
        tile = program.to(tl.int64) * CHUNK
        square = (tile + i)[:, None] * CHUNK + i[None, :]
        q_unit = unit_norm(q, first, length, q_row, K, K_PAD, NORM)
        k_unit = unit_norm(k, first, length, k_row, K, K_PAD, NORM)
        speed = tl.exp(tl.load(A_log + hv).to(tl.float32)) if A else 1.0
        seen = tl.zeros([CHUNK, CHUNK], tl.float32)
        alike = tl.zeros([CHUNK, CHUNK], tl.float32)
        for k0 in range(0, K_PAD, BK):
            ck = k0 + tl.arange(0, BK)
            x = gate_input(g, dt_bias, hv, first, length, g_row, ck, K, EDGE, BK, BIAS)
            total = tl.cumsum(binary(log_decay(x, speed, lower_bound, GATE), there), 0)
            last = tl.sum(tl.where((i == CHUNK - 1)[:, None], total, 0.0), 0)
            q_tile = chunk_rows(q, first, length, q_row, ck, EDGE, BK)
            k_tile = chunk_rows(k, first, length, k_row, ck, EDGE, BK)
            rows = (tile + i)[:, None] * K_PAD + ck[None, :]
            grown = tl.exp2(total)
            q_wide = q_tile.to(tl.float32) * (q_unit * scale)[:, None]
            k_wide = k_tile.to(tl.float32) * k_unit[:, None]
            tl.store(qs + rows, (q_wide * grown).to(element))
            tl.store(w + rows, (k_wide * grown).to(element))
            tl.store(ks + rows, (k_wide * tl.exp2(last[None, :] - total)).to(element))
            tl.store(fades + program.to(tl.int64) * K_PAD + ck, tl.exp2(last))
            # a token and itself
            own = tl.sum(q_tile.to(tl.float32) * k_tile.to(tl.float32), 1)[:, None]
            seen += tl.where(i[:, None] == i[None, :], own, 0.0)
            for bit in range(0, 6):
                b = 1 << bit
                fading = from_between(total, b)
                x_tile = (q_tile.to(tl.float32) * fading).to(element)
                y_tile = (k_tile.to(tl.float32) * fading).to(element)
                on = pairs_of_bit(b)
                seen += tl.where(on, tl.dot(x_tile, y_tile.T), 0.0)
                alike += tl.where(on, tl.dot(y_tile, y_tile.T), 0.0)
        seen *= (q_unit * scale)[:, None] * k_unit[None, :]
        tl.store(p + square, seen.to(element))
        alike *= k_unit[:, None] * k_unit[None, :]
        rate = tl.load(beta + (first + i).to(tl.int64) * b_row, mask=there, other=0.0)
        rate = rate.to(tl.float32)
        inverse = _solved(alike * rate[:, None], PRECISION)
        if BACKWARD:
            below = -tl.dot(alike, inverse, input_precision=PRECISION)
            tl.store(u + square, below.to(element))
        else:
            solved = (inverse * rate[None, :]).to(element)
            v_tile = chunk_rows(v, first, length, v_row, cv, V, V_PAD)
            to = u + (tile + i)[:, None] * V_PAD + cv[None, :]
            tl.store(to, tl.dot(solved, v_tile).to(element))
            # W in the place of exp(G) k, which other threads have written
            tl.debug_barrier()
            rows = (tile + i)[:, None] * K_PAD + tl.arange(0, K_PAD)[None, :]
            grown = tl.load(w + rows)
            tl.debug_barrier()
            tl.store(w + rows, tl.dot(solved, grown).to(element))
    elif VARLEN and not BACKWARD:
        token = start + first + i
        to = out + (token * HV + hv)[:, None] * V + cv[None, :]
        nothing = tl.zeros([CHUNK, V_PAD], out.dtype.element_ty)
        tl.store(to, nothing, mask=there[:, None] & (cv < V)[None, :])


@triton.jit(do_not_specialize=["T", "sequences"])
def _states_kernel(
    qs, ks, p, fades, u, w, bounds, initial, final, out, T, sequences, k_step, v_step,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, K_PAD: tl.constexpr, V_PAD: tl.constexpr,
    BV: tl.constexpr, PIECES: tl.constexpr, STAGES: tl.constexpr, VARLEN: tl.constexpr,
    INITIAL: tl.constexpr,
):  # fmt: skip
    """Outputs and the final state of a sequence, for some columns of one head."""
    BLOCKS: tl.constexpr = (V + BV - 1) // BV
    program = tl.program_id(0)
    block = program % BLOCKS
    head = program // BLOCKS % HV
    n = program // (BLOCKS * HV)
    batch, start, length, chunk = walked(bounds, n, T, sequences, PIECES, VARLEN)
    ck = tl.arange(0, K_PAD)
    cv = block * BV + tl.arange(0, BV)
    i = tl.arange(0, CHUNK)
    state_at = (n.to(tl.int64) * HV + head) * (K * V) + ck[:, None] * k_step + cv[None, :] * v_step
    state_on = (ck < K)[:, None] & (cv < V)[None, :]
    if INITIAL:
        state = tl.load(initial + state_at, mask=state_on, other=0.0).to(tl.float32)
    else:
        state = tl.zeros([K_PAD, BV], tl.float32)
    element = qs.dtype.element_ty
    out += ((batch * T + start) * HV + head) * V
    wide = i[:, None] * K_PAD + ck[None, :]
    for c in tl.range(0, (length + CHUNK - 1) // CHUNK, num_stages=STAGES):
        number = (chunk + c).to(tl.int64) * HV + head
        tile = number * (CHUNK * K_PAD) + wide
        w_tile = tl.load(w + tile)
        q_tile = tl.load(qs + tile)
        k_tile = tl.load(ks + tile)
        p_tile = tl.load(p + number * (CHUNK * CHUNK) + i[:, None] * CHUNK + i[None, :])
        u_tile = tl.load(u + (number * CHUNK + i)[:, None] * V_PAD + cv[None, :])
        fade = tl.load(fades + number * K_PAD + ck)
        half = state.to(element)
        new = (u_tile.to(tl.float32) - tl.dot(w_tile, half)).to(element)
        o = tl.dot(p_tile, new, tl.dot(q_tile, half))
        at = i + c * CHUNK
        on = (at < length)[:, None] & (cv < V)[None, :]
        tl.store(out + at.to(tl.int64)[:, None] * (HV * V) + cv[None, :], o.to(element), mask=on)
        state = tl.dot(k_tile.T, new, state * fade[:, None])
    tl.store(final + state_at, state.to(final.dtype.element_ty), mask=state_on)


@dataclass(frozen=True)
class Chunks:
    """What the first kernel leaves, by chunk and head, and how the others find it."""

    qs: Tensor  # [.., 64, K]
    ks: Tensor
    p: Tensor  # [.., 64, 64]
    fades: Tensor  # [.., K]
    u: Tensor  # U [.., 64, V], for the gradient -A T [.., 64, 64]
    w: Tensor  # W, for the gradient exp(G) k [.., 64, K]
    sizes: dict[str, Any]  # of every kernel
    sequences: int
    count: int


def chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    cu_seqlens: Tensor | None,
    norm: bool,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float | None,
    gated: bool,
    out: Tensor | None,
) -> Chunks:
    """`out` None: for the gradient."""
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    half, device, backward = q.dtype, q.device, out is None
    varlen = cu_seqlens is not None
    sequences = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    K_PAD, V_PAD = (max(16, triton.next_power_of_2(size)) for size in (K, V))
    # every sequence may end in a part of a chunk, and so may the tokens before and behind them
    each = triton.cdiv(T, CHUNK.value)
    count = each + sequences + 2 if varlen else B * each
    side = CHUNK.value
    programs = count * HV

    def empty(*shape: int, dtype: torch.dtype = half) -> Tensor:
        return memory.empty((programs, *shape), dtype, device)

    made = Chunks(
        qs=empty(side, K_PAD),
        ks=empty(side, K_PAD),
        p=empty(side, side),
        fades=empty(K_PAD, dtype=torch.float32),
        u=empty(side, side if backward else V_PAD),
        w=empty(side, K_PAD),
        sizes=dict(
            HV=HV,
            K=K,
            V=V,
            K_PAD=K_PAD,
            PIECES=max(16, triton.next_power_of_2(sequences + 2)) if varlen else 16,
            VARLEN=varlen,
        ),
        sequences=sequences,
        count=count,
    )
    if programs > 0:
        launches.kernel(_chunks_kernel, programs)(
            q, k, v, g, beta, A_log, dt_bias, cu_seqlens, made.qs, made.ks, made.p, made.fades,
            made.u, made.w, made.qs if out is None else out, T, sequences, scale,
            0.0 if lower_bound is None else lower_bound,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *g.stride()[:3], *beta.stride()[:2],
            H=H, V_PAD=V_PAD, BK=min(_KEY_TILE, K_PAD), NORM=norm,
            GATE=gate(gated, lower_bound), A=A_log is not None, BIAS=dt_bias is not None,
            BACKWARD=backward,
            PRECISION="tf32" if half is torch.bfloat16 else "tf32x3", num_warps=8, num_stages=1,
            **made.sizes,
        )  # fmt: skip
    return made


def walk_tiling(size: int, shared: int) -> tuple[int, int]:
    """(columns of the values, stages) of a walk; `size` is V, padded, `shared` the memory of a
    program.  As measured for the walk of chunk_gated_delta_rule, which has the same tiles."""
    return min(32, size), 3 if shared >= 190 * 1024 else 2


def unsupported(q: Tensor, v: Tensor, **_: Any) -> str | None:
    if q.dtype not in (torch.float16, torch.bfloat16):
        kind = str(q.dtype).removeprefix("torch.")
        return f"q is {kind}, supported are float16 and bfloat16"
    if q.shape[-1] > LARGEST_K:
        return f"K={q.shape[-1]}, supported up to {LARGEST_K}"
    if v.shape[-1] > LARGEST_V:
        return f"V={v.shape[-1]}, supported up to {LARGEST_V}"
    return None


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    use_qk_l2norm_in_kernel: bool,
    use_gate_in_kernel: bool,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float | None,
    state_layout: str,
) -> tuple[Tensor, Tensor]:
    B, T, _, K = q.shape
    HV, V = v.shape[2:]
    sequences = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    out = memory.empty(v.shape, v.dtype, v.device)
    kind = torch.float32 if initial_state is None else initial_state.dtype
    sizes = (K, V) if state_layout == "kv" else (V, K)
    final = memory.empty((sequences, HV, *sizes), kind, v.device)
    if final.numel() == 0:
        return out.zero_(), final
    x = chunks(
        q, k, v, g, beta, K**-0.5 if scale is None else scale, cu_seqlens, use_qk_l2norm_in_kernel,
        A_log, dt_bias, lower_bound, use_gate_in_kernel, out,
    )  # fmt: skip
    V_PAD = max(16, triton.next_power_of_2(V))
    BV, stages = walk_tiling(V_PAD, gpu.shared_memory(v.device))
    launches.kernel(_states_kernel, sequences * HV * triton.cdiv(V, BV))(
        x.qs, x.ks, x.p, x.fades, x.u, x.w, cu_seqlens, initial_state, final, out, T, sequences,
        *steps(state_layout, K, V), V_PAD=V_PAD, BV=BV,
        STAGES=stages, INITIAL=initial_state is not None, num_warps=4, **x.sizes,
    )  # fmt: skip
    return out, final
