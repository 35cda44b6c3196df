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
from .chunk_gated_delta_rule import _heads, _inverse, _rows
from .common import gpu, launches
from .common.lengths import within
from .fused_sigmoid_gating_delta_rule_update import _softplus

CHUNK: tl.constexpr = tl.constexpr(64)
LARGEST_K, LARGEST_V = 128, 256
# exp() of it is 0 in float32, and 64 of them add up without losing what is small
_LEAST: tl.constexpr = tl.constexpr(-100.0)
_LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
# what `g` is
GIVEN, SOFTPLUS, BOUNDED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _later(a, b):
    return tl.maximum(a, b)


@triton.jit
def _pieces(bounds, T, sequences, PIECES: tl.constexpr):
    """By piece [PIECES]: its number, first token and end.  Piece n + 1 is sequence n; the first and
    the last are the tokens of none, before and behind.  A sequence begins where all before it
    have ended."""
    s = tl.arange(0, PIECES)
    begin = within(bounds + s - 1, (s > 0) & (s <= sequences + 1), T)
    end = within(bounds + s, s <= sequences, T)
    begin = tl.associative_scan(begin, 0, _later)
    end = tl.associative_scan(end, 0, _later)
    return s, tl.where(s > sequences + 1, T, begin), tl.where(s > sequences, T, end)


@triton.jit
def _place(bounds, chunk, T, sequences, PIECES: tl.constexpr, VARLEN: tl.constexpr):
    """(batch, first token of the piece, first token of the chunk in it, the piece's length,
    whether it is a sequence) of a chunk."""
    if VARLEN:
        s, begin, end = _pieces(bounds, T, sequences, PIECES)
        ends = tl.cumsum((end - begin + CHUNK - 1) // CHUNK, 0)
        before = ends <= chunk
        first = (chunk - tl.max(tl.where(before, ends, 0), 0)) * CHUNK
        piece = tl.sum(before.to(tl.int32), 0)
        start = tl.sum(tl.where(s == piece, begin, 0), 0)
        length = tl.sum(tl.where(s == piece, end - begin, 0), 0)
        live = (piece > 0) & (piece <= sequences)
        batch = chunk * 0
    else:
        each = (T + CHUNK - 1) // CHUNK
        batch = chunk // each
        first = chunk % each * CHUNK
        start = chunk * 0
        length = T
        live = T > 0
    return batch.to(tl.int64), start.to(tl.int64), first, length, live


@triton.jit
def _walked(bounds, n, T, sequences, PIECES: tl.constexpr, VARLEN: tl.constexpr):
    """(batch, first token, length, first chunk) of a sequence."""
    if VARLEN:
        s, begin, end = _pieces(bounds, T, sequences, PIECES)
        mine = s == n + 1
        start = tl.sum(tl.where(mine, begin, 0), 0)
        length = tl.sum(tl.where(mine, end - begin, 0), 0)
        chunks = (end - begin + CHUNK - 1) // CHUNK
        chunk = tl.sum(tl.where(s <= n, chunks, 0), 0)
        batch = n * 0
    else:
        start = n * 0
        length = T
        chunk = n * ((T + CHUNK - 1) // CHUNK)
        batch = n
    return batch.to(tl.int64), start.to(tl.int64), length, chunk


@triton.jit
def _gate(x, rate, lower_bound, GATE: tl.constexpr):
    """The decay's logarithm."""
    if GATE == SOFTPLUS:
        return -rate * _softplus(x, 1.0, 20.0)
    elif GATE == BOUNDED:
        return lower_bound / (1.0 + tl.exp(-rate * x))
    else:
        return x


@triton.jit
def _gate_input(
    g, A_log, dt_bias, hv, first, length, g_row, columns, K: tl.constexpr, PAD: tl.constexpr,
    A: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """(what the gate takes [64, PAD], its rate)."""
    x = _rows(g, first, length, g_row, columns, K, PAD).to(tl.float32)
    if BIAS:
        bias = tl.load(dt_bias + hv * K + columns, mask=columns < K, other=0.0)
        x += bias.to(tl.float32)[None, :]
    rate = tl.exp(tl.load(A_log + hv).to(tl.float32)) if A else 1.0
    return x, rate


@triton.jit
def _binary(x, there):
    """The logarithm to base 2, not below that of what is 0 in float32; 0 where there is no token.
    A NaN remains one."""
    return tl.where(there[:, None], tl.where(x < _LEAST, _LEAST, x) * _LOG2E, 0.0)


@triton.jit
def _from_between(total, b):
    """exp(-|G - R|) [64, K] for pairs of tokens whose places differ in bit b at the highest."""
    i = tl.arange(0, CHUNK)
    between = i // (2 * b) * (2 * b) + b - 1
    at = tl.broadcast_to(between[:, None], total.shape)
    return tl.exp2(-tl.abs(total - tl.gather(total, at, 0)))


@triton.jit
def _pairs(b):
    """[64, 64]: which those pairs are."""
    i = tl.arange(0, CHUNK)
    differ = i[:, None] ^ i[None, :]
    return (i[:, None] > i[None, :]) & (differ >= b) & (differ < 2 * b)


@triton.jit
def _unit(x, NORM: tl.constexpr):
    """What every row of x is multiplied with."""
    if NORM:
        wide = x.to(tl.float32)
        return 1.0 / tl.sqrt(tl.sum(wide * wide, 1) + 1e-6)
    else:
        return tl.full([CHUNK], 1.0, tl.float32)


@triton.jit(do_not_specialize=["T", "sequences", "lower_bound"])
def _chunks_kernel(
    q, k, v, g, beta, A_log, dt_bias, bounds, qs, ks, p, fades, u, w, units, out, T, sequences,
    scale, lower_bound, q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head,
    g_batch, g_row, g_head, b_batch, b_row,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, K_PAD: tl.constexpr,
    V_PAD: tl.constexpr, PIECES: tl.constexpr, VARLEN: tl.constexpr, NORM: tl.constexpr,
    GATE: tl.constexpr, A: tl.constexpr, BIAS: tl.constexpr, BACKWARD: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Of a chunk and a head: scale exp(G) q, exp(G_last - G) k, P and exp(G_last); U and W, or for
    the gradient -A T and exp(G) k, and what the rows of q and k were multiplied with."""
    program = tl.program_id(0)
    chunk = program // HV
    h, hv = _heads(program % HV, HV // H)
    batch, start, first, length, live = _place(bounds, chunk, T, sequences, PIECES, VARLEN)
    i = tl.arange(0, CHUNK)
    there = first + i < length
    ck = tl.arange(0, K_PAD)
    cv = tl.arange(0, V_PAD)
    element = qs.dtype.element_ty
    if live & (first < length):
        k_tile = _rows(
            k + batch * k_batch + start * k_row + h * k_head, first, length, k_row, ck, K, K_PAD
        )
        q_tile = _rows(
            q + batch * q_batch + start * q_row + h * q_head, first, length, q_row, ck, K, K_PAD
        )
        of_g = g + batch * g_batch + start * g_row + hv * g_head
        x, speed = _gate_input(
            of_g, A_log, dt_bias, hv, first, length, g_row, ck, K, K_PAD, A, BIAS
        )
        total = tl.cumsum(_binary(_gate(x, speed, lower_bound, GATE), there), 0)
        last = tl.sum(tl.where((i == CHUNK - 1)[:, None], total, 0.0), 0)
        of_beta = beta + batch * b_batch + (start + first + i) * b_row + hv
        rate = tl.load(of_beta, mask=there, other=0.0).to(tl.float32)
        q_unit = _unit(q_tile, NORM)
        k_unit = _unit(k_tile, NORM)
        q_wide = q_tile.to(tl.float32)
        k_wide = k_tile.to(tl.float32)
        same = i[:, None] == i[None, :]
        seen = tl.where(same, tl.sum(q_wide * k_wide, 1)[:, None], 0.0)
        alike = tl.zeros([CHUNK, CHUNK], tl.float32)
        for bit in range(0, 6):
            b = 32 >> bit
            fading = _from_between(total, b)
            x_tile = (q_wide * fading).to(element)
            y_tile = (k_wide * fading).to(element)
            on = _pairs(b)
            seen += tl.where(on, tl.dot(x_tile, y_tile.T), 0.0)
            alike += tl.where(on, tl.dot(y_tile, y_tile.T), 0.0)
        tile = program.to(tl.int64) * CHUNK
        square = (tile + i)[:, None] * CHUNK + i[None, :]
        rows = (tile + i)[:, None] * K_PAD + ck[None, :]
        seen *= (q_unit * scale)[:, None] * k_unit[None, :]
        alike *= k_unit[:, None] * k_unit[None, :]
        tl.store(p + square, seen.to(element))
        inverse = _inverse(alike * rate[:, None], PRECISION)
        growth = tl.exp2(total)
        q_wide *= growth * (q_unit * scale)[:, None]
        tl.store(qs + rows, q_wide.to(element))
        k_wide *= k_unit[:, None]
        tl.store(ks + rows, (k_wide * tl.exp2(last[None, :] - total)).to(element))
        tl.store(fades + program.to(tl.int64) * K_PAD + ck, tl.exp2(last))
        grown = (k_wide * growth).to(element)
        if BACKWARD:
            below = -tl.dot(alike, inverse, input_precision=PRECISION)
            tl.store(u + square, below.to(element))
            tl.store(w + rows, grown)
            if NORM:
                tl.store(units + tile * 2 + i, q_unit)
                tl.store(units + tile * 2 + CHUNK + i, k_unit)
        else:
            solved = (inverse * rate[None, :]).to(element)
            tl.store(w + rows, tl.dot(solved, grown).to(element))
            v_tile = _rows(
                v + batch * v_batch + start * v_row + hv * v_head, first, length, v_row, cv, V,
                V_PAD,
            )  # fmt: skip
            to = u + (tile + i)[:, None] * V_PAD + cv[None, :]
            tl.store(to, tl.dot(solved, v_tile).to(element))
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
    batch, start, length, chunk = _walked(bounds, n, T, sequences, PIECES, VARLEN)
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
        at = c * CHUNK + i
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
    units: Tensor  # [.., 2, 64]
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
        units=empty(2 if backward and norm else 0, side, dtype=torch.float32),
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
            made.u, made.w, made.units, made.qs if out is None else out, T, sequences, scale,
            0.0 if lower_bound is None else lower_bound,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *g.stride()[:3], *beta.stride()[:2],
            H=H, V_PAD=V_PAD, NORM=norm, GATE=gate(gated, lower_bound), A=A_log is not None,
            BIAS=dt_bias is not None, BACKWARD=backward,
            PRECISION="tf32" if half is torch.bfloat16 else "tf32x3", num_warps=8, num_stages=1,
            **made.sizes,
        )  # fmt: skip
    return made


def gate(gated: bool, lower_bound: float | None) -> int:
    if not gated:
        return GIVEN.value
    return SOFTPLUS.value if lower_bound is None else BOUNDED.value


def steps(layout: str, K: int, V: int) -> tuple[int, int]:
    """How far the next key and the next value channel of a state are."""
    return (V, 1) if layout == "kv" else (1, K)


def walk_tiling(size: int, shared: int) -> tuple[int, int]:
    """(columns of the values, stages) of a walk; `size` is V, padded, `shared` the memory of a
    program.  As measured for the walk of chunk_gated_delta_rule, which has the same tiles."""
    return min(32, size), 3 if shared >= 185 * 1024 else 2


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
