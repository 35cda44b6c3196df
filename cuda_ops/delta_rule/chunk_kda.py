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
and P are six products, one for every bit, of which each gives the pairs that are its: the lower
four of blocks of 16 tokens, the upper two of [64, K].

_chunks_kernel makes all that does not know S; _states_kernel walks over the chunks of a sequence
with some columns of one head's state in registers.  Kimi Linear (2025), section 3.

    condition                                      kernels
    Hopper, bfloat16, K = V = 128, aligned rows    hopper/chunk_kda.py then _states_kernel
    else                                           _chunks_kernel then _states_kernel
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from typing_extensions import Unpack

from ...dispatch.common import gated_delta, memory
from ...dispatch.ops.delta_rule.chunk_kda import Arguments
from ..common import gpu, supported
from ..common.approximate import power
from ..common.chunks import CHUNK, SUB, chunk_rows, from_head, heads_of, rate_of
from ..common.kda import (
    BLOCKS,
    from_diagonal,
    gate,
    gate_input,
    limited,
    log_decay,
    norms,
    on_diagonal,
    pairs_of_bit,
    place,
    power_of_blocks,
    rows_at,
    split,
    steps,
    sums,
    until_between,
    walked,
)
from ..runtime import launches
from .hopper import chunk_kda as hopper

LARGEST_K, LARGEST_V = 128, 256
_BLOCK_K = 16  # channels of the keys that a chunk's kernel holds at a time
# Channels, padded.  In a product of [64, 64] and [64, 16] ptxas 12.8, that of Triton 3.5 to 3.7,
# adds the step of a wgmma descriptor to another register than its base: the result is wrong or the
# kernel leaves its memory.  ptxas 12.9 is right; tests/portability/sass.py finds it.
_LEAST_K, _LEAST_V = 32, 64


class Constants(NamedTuple):
    """Of all kernels of a call and of its gradient."""

    H: int
    HV: int
    K: int
    V: int
    K_PAD: int
    V_PAD: int
    PIECES: int
    VARLEN: bool
    NORM: bool
    GATE: int
    A: bool
    BIAS: bool
    BETA: int


@triton.jit
def _product(a, b, TWO: tl.constexpr):
    """a b of squares in float32 from products of float16: 11 bits of both, or with TWO 22."""
    a_high, a_low = split(a)
    b_high, b_low = split(b)
    product = tl.dot(a_high, b_high)
    if TWO:
        product = tl.dot(a_high, b_low, tl.dot(a_low, b_high, product))
    return product


@triton.jit
def _solved(lower, TWO: tl.constexpr):
    """(I + lower)^-1 of a strictly lower [64, 64] matrix, in float32.

    Of two diagonal blocks whose inverses are known, the inverse of both has -T2 L T1 between them:
    six steps, each of which gives what the pairs of its bit add; four of them are of blocks of 16.
    No sum is larger than what it stands for, so keys may be alike.  One product of float16 is eight
    times as fine as the bfloat16 that the result is rounded to."""
    r = tl.arange(0, SUB)
    inner = from_diagonal(lower)
    block = tl.where((r[:, None] == r[None, :])[None, :, :], 1.0, 0.0)
    block -= tl.where(pairs_of_bit(1, SUB)[None, :, :], inner, 0.0)
    for bit in tl.static_range(1, 4):
        between = tl.where(pairs_of_bit(1 << bit, SUB)[None, :, :], inner, 0.0)
        block -= _product(_product(block, between, TWO), block, TWO)
    solved = on_diagonal(block)
    for bit in tl.static_range(4, 6):
        between = tl.where(pairs_of_bit(1 << bit, CHUNK), lower, 0.0)
        solved -= _product(_product(solved, between, TWO), solved, TWO)
    return solved


@triton.jit(do_not_specialize=["T", "sequences"])
def _chunks_kernel(
    q,
    k,
    v,
    g,
    beta,
    A_log,
    dt_bias,
    bounds,
    qs,
    ks,
    p,
    fades,
    u,
    w,
    rates,
    out,
    T,
    sequences,
    numbers,
    strides,
    BLOCK_K: tl.constexpr,
    BACKWARD: tl.constexpr,
    TWO: tl.constexpr,
    C: tl.constexpr,
):
    """Of a chunk and a head: scale exp(G) q, exp(G_last - G) k, P and exp(G_last); U and W, or for
    the gradient -A T and exp(G) k.

    Every exponent is the sum of some tokens' logarithms: within a block of 16 their product with
    zeros and ones, which like all products of four blocks is one of a warp, in its registers."""
    q_by, k_by, v_by, g_by = strides[0:3], strides[3:6], strides[6:9], strides[9:12]
    b_batch, b_row = strides[12:14]
    q_row, k_row, v_row, g_row = q_by[1], k_by[1], v_by[1], g_by[1]
    program = tl.program_id(0)
    chunk = program // C.HV
    h, hv = heads_of(program % C.HV, C.HV // C.H)
    batch, start, first, length, live = place(bounds, chunk, T, sequences, C.PIECES, C.VARLEN)
    i = tl.arange(0, CHUNK)
    valid = first + i < length
    cv = tl.arange(0, C.V_PAD)
    element = qs.dtype.element_ty
    if live & (first < length):
        q = from_head(q, q_by, batch, start, h)
        k = from_head(k, k_by, batch, start, h)
        g = from_head(g, g_by, batch, start, hv)
        v = from_head(v, v_by, batch, start, hv)
        beta += batch * b_batch + start * b_row + hv
        EDGE: tl.constexpr = BLOCK_K if C.K == C.K_PAD else C.K
        tile = program.to(tl.int64) * CHUNK
        scale, lower_bound = numbers
        speed = tl.exp(tl.load(A_log + hv).to(tl.float32)) if C.A else 1.0
        # rows behind the last token are those of the last one, of which nothing is used: their
        # rate is 0
        row = tl.minimum(first + i, length - 1).to(tl.int64)
        q_at, k_at = row * q_row, row * k_row
        q_unit, k_unit, own = norms(q, k, q_at, k_at, C.K, C.K_PAD, C.NORM)
        # of tokens of different blocks, and of the same one
        attention = tl.zeros([CHUNK, CHUNK], tl.float32)
        alike = tl.zeros([CHUNK, CHUNK], tl.float32)
        seen_near = tl.zeros([BLOCKS, SUB, SUB], tl.float32)
        alike_near = tl.zeros([BLOCKS, SUB, SUB], tl.float32)
        r = tl.arange(0, SUB)
        block = tl.arange(0, BLOCKS)
        to, by = block[:, None], block[None, :]
        odd = (block % 2 == 1)[:, None, None]
        late = (block >= 2)[:, None, None]
        for k0 in range(0, C.K_PAD, BLOCK_K):
            ck = k0 + tl.arange(0, BLOCK_K)
            x = gate_input(g, dt_bias, hv, first, length, g_row, ck, C.K, EDGE, BLOCK_K, C.BIAS)
            step = limited(log_decay(x, speed, lower_bound, C.GATE), valid)
            high, low = split(step)
            high = tl.reshape(high, [BLOCKS, SUB, BLOCK_K])
            low = tl.reshape(low, [BLOCKS, SUB, BLOCK_K])
            q_tile = tl.reshape(rows_at(q, q_at, ck, EDGE, BLOCK_K), [BLOCKS, SUB, BLOCK_K])
            k_tile = tl.reshape(rows_at(k, k_at, ck, EDGE, BLOCK_K), [BLOCKS, SUB, BLOCK_K])
            for bit in tl.static_range(0, 4):
                fading = power(sums(until_between(1 << bit, SUB), high, low)).to(element)
                x_tile = q_tile * fading
                y_tile = k_tile * fading
                mask = pairs_of_bit(1 << bit, SUB)[None, :, :]
                turned = tl.permute(y_tile, (0, 2, 1))
                seen_near += tl.where(mask, tl.dot(x_tile, turned), 0.0)
                alike_near += tl.where(mask, tl.dot(y_tile, turned), 0.0)
            # from a block's begin to a token, and from there to its end
            up = sums(r[None, :] <= r[:, None], high, low)
            down = sums(r[None, :] > r[:, None], high, low)
            total = tl.sum(tl.where((r == SUB - 1)[None, :, None], up, 0.0), 1)  # [4, BLOCK_K]
            tl.store(fades + program.to(tl.int64) * C.K_PAD + ck, power(tl.sum(total, 0)))
            before = power_of_blocks(total, by < to)
            behind = power_of_blocks(total, by > to)
            # what lies between the outer blocks and the middle
            outside = power_of_blocks(total, ((to == 3) & (by == 2)) | ((to == 0) & (by == 1)))
            up = power(up)
            down = power(down)
            rows = (tile + i)[:, None] * C.K_PAD + ck[None, :]
            q_wide = q_tile.to(tl.float32)
            q_wide *= tl.reshape(q_unit * scale, [BLOCKS, SUB])[:, :, None]
            k_wide = k_tile.to(tl.float32) * tl.reshape(k_unit, [BLOCKS, SUB])[:, :, None]
            grown = up * before[:, None, :]
            left = k_wide * down * behind[:, None, :]
            tl.store(qs + rows, tl.reshape((q_wide * grown).to(element), [CHUNK, BLOCK_K]))
            tl.store(w + rows, tl.reshape((k_wide * grown).to(element), [CHUNK, BLOCK_K]))
            tl.store(ks + rows, tl.reshape(left.to(element), [CHUNK, BLOCK_K]))
            up = up.to(element)
            down = down.to(element)
            fading = tl.where(odd, up, down)
            x_tile = tl.reshape(q_tile * fading, [CHUNK, BLOCK_K])
            y_tile = tl.reshape(k_tile * fading, [CHUNK, BLOCK_K])
            mask = pairs_of_bit(16, CHUNK)
            attention += tl.where(mask, tl.dot(x_tile, y_tile.T), 0.0)
            alike += tl.where(mask, tl.dot(y_tile, y_tile.T), 0.0)
            fading = tl.where(late, up, down) * outside.to(element)[:, None, :]
            x_tile = tl.reshape(q_tile * fading, [CHUNK, BLOCK_K])
            y_tile = tl.reshape(k_tile * fading, [CHUNK, BLOCK_K])
            mask = pairs_of_bit(32, CHUNK)
            attention += tl.where(mask, tl.dot(x_tile, y_tile.T), 0.0)
            alike += tl.where(mask, tl.dot(y_tile, y_tile.T), 0.0)
        attention += on_diagonal(seen_near)
        # a token and itself
        attention += tl.where(i[:, None] == i[None, :], own[:, None], 0.0)
        attention *= (q_unit * scale)[:, None] * k_unit[None, :]
        square = (tile + i)[:, None] * CHUNK + i[None, :]
        tl.store(p + square, attention.to(element))
        alike += on_diagonal(alike_near)
        alike *= k_unit[:, None] * k_unit[None, :]
        rate = tl.load(beta + (first + i).to(tl.int64) * b_row, mask=valid, other=0.0)
        rate = rate_of(rate, valid, C.BETA)
        inverse = _solved(alike * rate[:, None], TWO)
        if BACKWARD:
            tl.store(rates + tile + i, rate)
            tl.store(u + square, (-_product(alike, inverse, TWO)).to(element))
        else:
            solved = (inverse * rate[None, :]).to(element)
            v_tile = chunk_rows(v, first, length, v_row, cv, C.V, C.V_PAD)
            to = u + (tile + i)[:, None] * C.V_PAD + cv[None, :]
            tl.store(to, tl.dot(solved, v_tile).to(element))
            # W in the place of exp(G) k, which other threads have written
            tl.debug_barrier()
            rows = (tile + i)[:, None] * C.K_PAD + tl.arange(0, C.K_PAD)[None, :]
            grown = tl.load(w + rows)
            tl.debug_barrier()
            tl.store(w + rows, tl.dot(solved, grown).to(element))
    elif C.VARLEN and not BACKWARD:
        token = start + first + i
        to = out + (token * C.HV + hv)[:, None] * C.V + cv[None, :]
        nothing = tl.full([CHUNK, C.V_PAD], 0.0, out.dtype.element_ty)
        tl.store(to, nothing, mask=valid[:, None] & (cv < C.V)[None, :])


@triton.jit(do_not_specialize=["T", "sequences"])
def _states_kernel(
    qs,
    ks,
    p,
    fades,
    u,
    w,
    bounds,
    initial,
    final,
    out,
    T,
    sequences,
    k_step,
    v_step,
    BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr,
    INITIAL: tl.constexpr,
    C: tl.constexpr,
):
    """Outputs and the final state of a sequence, for some columns of one head."""
    BLOCKS: tl.constexpr = (C.V + BLOCK_V - 1) // BLOCK_V
    program = tl.program_id(0)
    block = program % BLOCKS
    head = program // BLOCKS % C.HV
    n = program // (BLOCKS * C.HV)
    batch, start, length, chunk = walked(bounds, n, T, sequences, C.PIECES, C.VARLEN)
    ck = tl.arange(0, C.K_PAD)
    cv = block * BLOCK_V + tl.arange(0, BLOCK_V)
    i = tl.arange(0, CHUNK)
    state_at = (
        (n.to(tl.int64) * C.HV + head) * (C.K * C.V) + ck[:, None] * k_step + cv[None, :] * v_step
    )
    state_mask = (ck < C.K)[:, None] & (cv < C.V)[None, :]
    if INITIAL:
        state = tl.load(initial + state_at, mask=state_mask, other=0.0).to(tl.float32)
    else:
        state = tl.full([C.K_PAD, BLOCK_V], 0.0, tl.float32)
    element = qs.dtype.element_ty
    out += ((batch * T + start) * C.HV + head) * C.V
    wide = i[:, None] * C.K_PAD + ck[None, :]
    for c in tl.range(0, (length + CHUNK - 1) // CHUNK, num_stages=STAGES):
        number = (chunk + c).to(tl.int64) * C.HV + head
        tile = number * (CHUNK * C.K_PAD) + wide
        w_tile = tl.load(w + tile)
        q_tile = tl.load(qs + tile)
        k_tile = tl.load(ks + tile)
        p_tile = tl.load(p + number * (CHUNK * CHUNK) + i[:, None] * CHUNK + i[None, :])
        u_tile = tl.load(u + (number * CHUNK + i)[:, None] * C.V_PAD + cv[None, :])
        fade = tl.load(fades + number * C.K_PAD + ck)
        half = state.to(element)
        new = (u_tile.to(tl.float32) - tl.dot(w_tile, half)).to(element)
        o = tl.dot(p_tile, new, tl.dot(q_tile, half))
        at = i + c * CHUNK
        mask = (at < length)[:, None] & (cv < C.V)[None, :]
        tl.store(
            out + at.to(tl.int64)[:, None] * (C.HV * C.V) + cv[None, :], o.to(element), mask=mask
        )
        state = tl.dot(k_tile.T, new, state * fade[:, None])
    tl.store(final + state_at, state.to(final.dtype.element_ty), mask=state_mask)


@dataclass(frozen=True)
class Chunks:
    """What the first kernel leaves, by chunk and head, and how the others find it."""

    qs: Tensor  # [.., 64, K]
    ks: Tensor
    p: Tensor  # [.., 64, 64]
    fades: Tensor  # [.., K]
    u: Tensor  # U [.., 64, V], for the gradient -A T [.., 64, 64]
    w: Tensor  # W, for the gradient exp(G) k [.., 64, K]
    rates: Tensor  # for the gradient, [.., 64]
    constants: Constants
    sequences: int
    count: int

    @property
    def walked(self) -> tuple[Tensor, ...]:
        """What a walk reads."""
        return self.qs, self.ks, self.p, self.fades, self.u, self.w


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
    rate: int,
    out: Tensor | None,
) -> Chunks:
    """`out` None: for the gradient."""
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    half, device, backward = q.dtype, q.device, out is None
    varlen = cu_seqlens is not None
    sequences = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    K_PAD = max(_LEAST_K, triton.next_power_of_2(K))
    V_PAD = max(16 if backward else _LEAST_V, triton.next_power_of_2(V))
    # every sequence may end in a part of a chunk, and so may the tokens before and behind them
    each = triton.cdiv(T, CHUNK.value)
    count = each + sequences + 2 if varlen else B * each
    side = CHUNK.value
    programs = count * HV
    given = (q, k, v, g)

    def empty(*shape: int, dtype: torch.dtype = half) -> Tensor:
        return memory.empty((programs, *shape), dtype, device)

    made = Chunks(
        qs=empty(side, K_PAD),
        ks=empty(side, K_PAD),
        p=empty(side, side),
        fades=empty(K_PAD, dtype=torch.float32),
        u=empty(side, side if backward else V_PAD),
        w=empty(side, K_PAD),
        rates=empty(side if backward else 0, dtype=torch.float32),
        constants=Constants(
            H=H,
            HV=HV,
            K=K,
            V=V,
            K_PAD=K_PAD,
            V_PAD=V_PAD,
            PIECES=max(16, triton.next_power_of_2(sequences + 2)) if varlen else 16,
            VARLEN=varlen,
            NORM=norm,
            GATE=gate(gated, lower_bound),
            A=A_log is not None,
            BIAS=dt_bias is not None,
            BETA=rate,
        ),
        sequences=sequences,
        count=count,
    )
    if hopper.supports(q, k, v, g, beta):
        hopper.launch(made, q, k, v, g, beta, A_log, dt_bias, cu_seqlens, out, scale, lower_bound)
    elif programs > 0:
        launches.kernel(_chunks_kernel, programs)(
            *given,
            beta,
            A_log,
            dt_bias,
            cu_seqlens,
            *made.walked,
            made.rates,
            made.qs if out is None else out,
            T,
            sequences,
            (scale, 0.0 if lower_bound is None else lower_bound),
            (*(s for x in given for s in x.stride()[:3]), *beta.stride()[:2]),
            # what is as wide as a tile is not masked
            BLOCK_K=_BLOCK_K if K > _BLOCK_K else K_PAD,
            BACKWARD=backward,
            TWO=half is torch.float16,
            # of two warps no product is wgmma: with 32 channels ptxas 12.8 breaks their descriptors
            C=made.constants,
            num_warps=4 if K_PAD >= 64 else 2,
            num_stages=1,
        )
    return made


def walk_tiling(size: int, shared: int) -> tuple[int, int]:
    """(columns of the values, stages) of a walk; `size` is V, padded, `shared` the memory of a
    program.  As measured for the walk of chunk_gated_delta_rule, which has the same tiles."""
    return min(32, size), 3 if shared >= 190 * 1024 else 2


def unsupported(q: Tensor, v: Tensor, **_: Any) -> str | None:
    return (
        supported.half_precision("q", q)
        or supported.up_to(LARGEST_K, K=q.shape[-1])
        or supported.up_to(LARGEST_V, V=v.shape[-1])
    )


def forward(**a: Unpack[Arguments]) -> tuple[Tensor, Tensor]:
    v, initial_state, cu_seqlens = a["v"], a["initial_state"], a["cu_seqlens"]
    B, T, _, K = a["q"].shape
    HV, V = v.shape[2:]
    sequences = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    out = memory.empty(v.shape, v.dtype, v.device)
    kind = torch.float32 if initial_state is None else initial_state.dtype
    sizes = (K, V) if a["state_layout"] == "kv" else (V, K)
    final = memory.empty((sequences, HV, *sizes), kind, v.device)
    if final.numel() == 0:
        return out.zero_(), final
    x = chunks(
        a["q"],
        a["k"],
        v,
        a["g"],
        a["beta"],
        K**-0.5 if a["scale"] is None else a["scale"],
        cu_seqlens,
        a["use_qk_l2norm_in_kernel"],
        a["A_log"],
        a["dt_bias"],
        a["lower_bound"],
        a["use_gate_in_kernel"],
        gated_delta.kind_of_rate(a["beta"], a["use_beta_sigmoid_in_kernel"], a["allow_neg_eigval"]),
        out,
    )
    BLOCK_V, stages = walk_tiling(x.constants.V_PAD, gpu.shared_memory(v.device))
    launches.kernel(_states_kernel, sequences * HV * triton.cdiv(V, BLOCK_V))(
        *x.walked,
        cu_seqlens,
        initial_state,
        final,
        out,
        T,
        sequences,
        *steps(a["state_layout"], K, V),
        BLOCK_V=BLOCK_V,
        STAGES=stages,
        INITIAL=initial_state is not None,
        C=x.constants,
        num_warps=4,
    )
    return out, final
