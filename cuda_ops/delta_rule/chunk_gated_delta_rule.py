# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Gated delta rule over whole sequences, 64 tokens at a time on tensor cores.

    G_i = sum of g up to i, within a chunk     D_ij = exp(G_i - G_j) for j <= i
    L_ij = beta_i D_ij (k_i . k_j) for j < i     T = (I + L)^-1
    U = T (beta v)     W = T (beta exp(G) k)     P_ij = scale D_ij (q_i . k_j) for j <= i
    by chunk:  N = U - W S;  out = scale exp(G) (q S) + P N;  S = exp(G_last) S + (D_last k)^T N

    query, key [T, N, Dk]   value [T, Nv, Dv]   beta, g [T, Nv]   S [Dk, Dv] by head

The first kernel makes U, W, P of all chunks at once; the second walks over the chunks of a
sequence with some columns of one head's state in registers.  Gated DeltaNet (Yang et al., 2024),
section 3.3.

    condition                                             kernels
    Hopper, Dk 64 or 128, Dv in whole 64, aligned rows    hopper/chunk_gated_delta_rule.py
    else                                                  _chunks_kernel then _states_kernel
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from typing_extensions import Unpack

from ...dispatch.common import gated_delta, memory
from ...dispatch.ops.delta_rule.chunk_gated_delta_rule import Arguments
from ..common import gpu, supported
from ..common.chunks import (
    CHUNK,
    chunk_rows,
    constants,
    heads_of,
    rate_of,
    sequence_lengths,
    unit_inverse,
)
from ..common.tiling import cdiv, power_of_two
from ..runtime import launches
from .hopper import chunk_gated_delta_rule as hopper

LARGEST_DK = LARGEST_DV = 256


@triton.jit(do_not_specialize=["T", "sequences"])
def _chunks_kernel(
    query,
    key,
    value,
    beta,
    g,
    lengths,
    u,
    w,
    p,
    sums,
    T,
    sequences,
    scale,
    strides,
    DK_PAD: tl.constexpr,
    DV_PAD: tl.constexpr,
    PRECISION: tl.constexpr,
    C: tl.constexpr,
):
    q_row, q_head, k_row, k_head, v_row, v_head, b_row, g_row = strides
    chunk = tl.program_id(0)
    h, hv = heads_of(tl.program_id(1), C.NV // C.N)
    if C.VARLEN:
        s, each = sequence_lengths(lengths, T, sequences, C.SEQUENCES)
        ends = tl.cumsum((each + CHUNK - 1) // CHUNK, 0)
        before = ends <= chunk
        chunks_before = tl.max(tl.where(before, ends, 0), 0).to(tl.int32)
        start = tl.minimum(tl.sum(tl.where(before, each, 0), 0), T)
        sequence = tl.sum(before.to(tl.int32), 0)
        length = tl.sum(tl.where(s == sequence, each, 0), 0)
        first = (chunk - chunks_before) * CHUNK
        length = tl.minimum(length, T - start).to(tl.int32)
    else:
        start, first, length = chunk.to(tl.int64) * 0, chunk * CHUNK, T
    if first < length:
        i = tl.arange(0, CHUNK)
        valid = first + i < length
        token = start + first + i
        ck = tl.arange(0, DK_PAD)
        cv = tl.arange(0, DV_PAD)
        key += start * k_row + h * k_head
        query += start * q_row + h * q_head
        value += start * v_row + hv * v_head
        if C.GATE:
            gate = tl.load(g + token * g_row + hv, mask=valid, other=0.0).to(tl.float32)
            total = tl.cumsum(gate, 0)
        else:
            total = tl.zeros([CHUNK], tl.float32)
        if C.BETA:
            rate = tl.load(beta + token * b_row + hv, mask=valid, other=0.0)
            rate = rate_of(rate, valid, C.BETA)
        else:
            rate = tl.where(valid, 1.0, 0.0)
        causal = i[:, None] >= i[None, :]
        fading = tl.exp(tl.where(causal, total[:, None] - total[None, :], 0.0))
        row = token * C.NV + hv
        mask = valid[:, None]
        element = u.dtype.element_ty
        tl.store(sums + row, total, mask=valid)
        # each operand is loaded where it is used, the keys twice: held, they would spill
        k = chunk_rows(key, first, length, k_row, ck, C.DK, DK_PAD)
        q = chunk_rows(query, first, length, q_row, ck, C.DK, DK_PAD)
        attention = tl.where(causal, tl.dot(q, k.T) * fading * scale, 0.0)
        tl.store(p + row[:, None] * CHUNK + i[None, :], attention.to(element), mask)
        lower = tl.dot(k, k.T) * fading * rate[:, None]
        lower = tl.where(i[:, None] > i[None, :], lower, 0.0)
        inverse = unit_inverse(lower, PRECISION)
        v = chunk_rows(value, first, length, v_row, cv, C.DV, DV_PAD)
        u_tile = tl.dot((inverse * rate[None, :]).to(element), v)
        tl.store(
            u + row[:, None] * C.DV + cv[None, :], u_tile.to(element), mask & (cv < C.DV)[None, :]
        )
        tl.debug_barrier()
        k = chunk_rows(key, first, length, k_row, ck, C.DK, DK_PAD)
        w_tile = tl.dot((inverse * (rate * tl.exp(total))[None, :]).to(element), k)
        tl.store(
            w + row[:, None] * C.DK + ck[None, :], w_tile.to(element), mask & (ck < C.DK)[None, :]
        )


@triton.jit(do_not_specialize=["T", "sequences"])
def _states_kernel(
    query,
    key,
    u,
    w,
    p,
    sums,
    lengths,
    initial,
    final,
    out,
    T,
    sequences,
    scale,
    q_row,
    q_head,
    k_row,
    k_head,
    DK_PAD: tl.constexpr,
    BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr,
    INITIAL: tl.constexpr,
    C: tl.constexpr,
):
    BLOCKS: tl.constexpr = (C.DV + BLOCK_V - 1) // BLOCK_V
    program = tl.program_id(0)
    block = program % BLOCKS
    h, hv = heads_of((program // BLOCKS) % C.NV, C.NV // C.N)
    sequence = program // (BLOCKS * C.NV)
    if C.VARLEN:
        s, each = sequence_lengths(lengths, T, sequences, C.SEQUENCES)
        start = tl.minimum(tl.sum(tl.where(s < sequence, each, 0), 0), T)
        length = tl.sum(tl.where(s == sequence, each, 0), 0)
        length = tl.minimum(length, T - start).to(tl.int32)
    else:
        start = program.to(tl.int64) * 0
        length = T
    ck = tl.arange(0, DK_PAD)
    cv = block * BLOCK_V + tl.arange(0, BLOCK_V)
    i = tl.arange(0, CHUNK)
    # state [Dk, BLOCK_V]; in memory [Dv, Dk]
    state_at = (sequence.to(tl.int64) * C.NV + hv) * C.DV * C.DK + cv[None, :] * C.DK + ck[:, None]
    state_mask = (cv < C.DV)[None, :] & (ck < C.DK)[:, None]
    if INITIAL:
        state = tl.load(initial + state_at, mask=state_mask, other=0.0).to(tl.float32)
    else:
        state = tl.full([DK_PAD, BLOCK_V], 0.0, tl.float32)
    query += start * q_row + h * q_head
    key += start * k_row + h * k_head
    row0 = start * C.NV + hv
    u += row0 * C.DV
    w += row0 * C.DK
    p += row0 * CHUNK
    sums += row0
    out += row0 * C.DV
    element = u.dtype.element_ty
    for first in tl.range(0, length, CHUNK, num_stages=STAGES):
        valid = first + i < length
        w_tile = chunk_rows(w, first, length, C.NV * C.DK, ck, C.DK, DK_PAD)
        q_tile = chunk_rows(query, first, length, q_row, ck, C.DK, DK_PAD)
        k_tile = chunk_rows(key, first, length, k_row, ck, C.DK, DK_PAD)
        p_tile = chunk_rows(p, first, length, C.NV * CHUNK, i, CHUNK, CHUNK)
        u_tile = chunk_rows(
            u,
            first,
            length,
            C.NV * C.DV,
            cv,
            C.DV if BLOCKS * BLOCK_V != C.DV else BLOCK_V,
            BLOCK_V,
        )
        total = tl.load(sums + (first + i).to(tl.int64) * C.NV, mask=valid, other=0.0)
        last = tl.load(sums + tl.minimum(first + CHUNK, length).to(tl.int64) * C.NV - C.NV)
        half = state.to(element)
        new = u_tile.to(tl.float32) - tl.dot(w_tile, half)
        o = tl.dot(q_tile, half) * (tl.exp(total) * scale)[:, None]
        o = tl.dot(p_tile, new.to(element), o)
        mask = valid[:, None] & (cv < C.DV)[None, :]
        out_at = out + (first + i).to(tl.int64)[:, None] * (C.NV * C.DV) + cv[None, :]
        tl.store(out_at, o.to(out.dtype.element_ty), mask=mask)
        fading = tl.where(valid, tl.exp(last - total), 0.0)
        state = state * tl.exp(last)
        state = tl.dot(k_tile.T, (new * fading[:, None]).to(element), state)
    tl.store(final + state_at, state.to(final.dtype.element_ty), mask=state_mask)
    if C.VARLEN:  # noqa: SIM102 (a constexpr, decided before the rest is compiled)
        # tokens behind the last sequence
        if sequence == sequences - 1:
            for first in range(length, (T - start).to(tl.int32), CHUNK):
                mask = (first + i < T - start)[:, None] & (cv < C.DV)[None, :]
                out_at = out + (first + i).to(tl.int64)[:, None] * (C.NV * C.DV) + cv[None, :]
                tl.store(out_at, tl.zeros([CHUNK, BLOCK_V], tl.float32), mask=mask)


_WIDE = 107 * 1024  # bytes of shared memory that a Dk above 128 takes


def walk_tiling(size: int, device: torch.device) -> tuple[int, int]:
    """(columns of the values, stages) of a walk; `size` is Dk, padded.

    Where three stages do not fit, two leave room for a second program.  Hopper comes here with what
    TMA cannot read; 32 columns there leave the program's memory: ptxas 12.8 (Triton 3.5 to 3.7)
    makes descriptors of wgmma from registers that nothing has set."""
    if size > 128:
        return 16, 2
    if gpu.capability(device) == (9, 0):
        return 64, 2
    return 32, 3 if gpu.shared_memory(device) >= 185 * 1024 else 2


def unsupported(query: Tensor, value: Tensor, **_: Any) -> str | None:
    size = query.shape[-1]
    reason = (
        supported.half_precision("query", query)
        or supported.up_to(LARGEST_DK, Dk=size)
        or supported.up_to(LARGEST_DV, Dv=value.shape[-1])
    )
    # with the tiles that would fit, results on an H200 were wrong
    if reason is None and size > 128 and gpu.shared_memory(query.device) < _WIDE:
        return gpu.too_small(query.device, Dk=size) + " (128 fits)"
    return reason


def forward(**x: Unpack[Arguments]) -> tuple[Tensor, Tensor]:
    query, key, value, initial_state = x["query"], x["key"], x["value"], x["initial_state"]
    actual_seq_lengths, scale = x["actual_seq_lengths"], x["scale"]
    NV, DV = value.shape[1:]
    DK = key.shape[-1]
    sequences = 1 if actual_seq_lengths is None else actual_seq_lengths.shape[0]
    out = memory.empty(value.shape, value.dtype, value.device)
    kind = torch.float32 if initial_state is None else initial_state.dtype
    final = memory.empty((sequences, NV, DV, DK), kind, value.device)
    if final.numel() == 0:
        return out.zero_(), final
    scale = DK**-0.5 if scale is None else scale
    rate = gated_delta.kind_of_rate(
        x["beta"], x["use_beta_sigmoid_in_kernel"], x["allow_neg_eigval"]
    )
    launch = hopper.launch if hopper.supports(query, key, value, sequences) else _plain
    launch(x, rate, scale, out, final)
    return out, final


def _plain(x: Arguments, rate: int, scale: float, out: Tensor, final: Tensor) -> None:
    """Writes `out` and `final`."""
    query, key, value, beta, g = x["query"], x["key"], x["value"], x["beta"], x["g"]
    lengths, initial_state = x["actual_seq_lengths"], x["initial_state"]
    T, _, DK = key.shape
    NV, DV = value.shape[1:]
    sequences, half, device = final.shape[0], value.dtype, value.device
    given = (query, key, value)
    # scratch of the chunks: N = U - W S needs them in the order of the tokens
    made = (
        memory.empty((T, NV, DV), half, device),
        memory.empty((T, NV, DK), half, device),
        memory.empty((T, NV, CHUNK.value), half, device),
        memory.empty((T, NV), torch.float32, device),
    )
    DK_PAD = max(16, power_of_two(DK))
    C = constants(key, value, lengths, rate, g)
    BLOCK_V, stages = walk_tiling(DK_PAD, device)
    # every sequence may end in a part of a chunk
    chunks = cdiv(T, CHUNK.value) + (0 if lengths is None else sequences)
    if T > 0:
        launches.kernel(_chunks_kernel, chunks, NV)(
            *given,
            beta,
            g,
            lengths,
            *made,
            T,
            sequences,
            scale,
            (
                *(step for y in given for step in y.stride()[:2]),
                0 if beta is None else beta.stride(0),
                0 if g is None else g.stride(0),
            ),
            DK_PAD=DK_PAD,
            DV_PAD=max(16, power_of_two(DV)),
            PRECISION="tf32" if half is torch.bfloat16 else "tf32x3",
            C=C,
            num_warps=2,
        )
    launches.kernel(_states_kernel, sequences * NV * cdiv(DV, BLOCK_V))(
        query,
        key,
        *made,
        lengths,
        initial_state,
        final,
        out,
        T,
        sequences,
        scale,
        *query.stride()[:2],
        *key.stride()[:2],
        DK_PAD=DK_PAD,
        BLOCK_V=BLOCK_V,
        STAGES=stages,
        INITIAL=initial_state is not None,
        C=C,
        num_warps=4,
    )
