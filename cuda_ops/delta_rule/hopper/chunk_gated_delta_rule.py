# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Gated delta rule over whole sequences on Hopper (Gluon), 64 tokens at a time.

With the letters of chunk_gated_delta_rule, but U and W are never made: what the walk needs of them
is T' = T beta, since U - W S = T' (v - exp(G) (k S)), and the keys are there anyway.  So the first
kernel leaves T' and P of every chunk, [64, 64] each, and the second walks over the chunks:

    R = v - exp(G) (k S);  N = T' R;  out = scale exp(G) (q S) + P N;
    S = exp(G_last) S + k^T (exp(G_last - G) N)

A program of the walk owns 64 columns of one head's state, transposed, in the registers of a
warpgroup: S^T, R^T and N^T are then the left operands of their products, which wgmma takes from
registers, and nothing on the chain from chunk to chunk goes through shared memory.  A producer
warp loads ahead.  Descriptors end at the sequence (see fused_attention.py): rows behind it are
zeros, and are not written.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ....dispatch.common import memory
from ...common import gpu
from ...common.gluon_names import barrier, tma_load
from ...common.hopper.barriers import in_turn
from ...common.hopper.tma import (
    aligned,
    at,
    describe,
    describe_matrix,
    describe_row,
    load_box,
    store_box,
)
from ...common.tiling import cdiv, power_of_two
from ...runtime import launches
from .chunks import CHUNK, columns_at, lengths_of, tokens_of, triangles

# H200, 2026-11, N 16, Nv 32, Dk = Dv = 128, bfloat16, 4096 tokens: of 134 us the walk takes 77, and
# with two stages 84
_STAGES = 3


class Walk(NamedTuple):
    """Places of chunks in shared memory, and their barriers."""

    q: Any
    k: Any
    v: Any
    t: Any
    p: Any
    grown: Any
    left: Any
    full: Any
    empty: Any


@gluon.jit
def _put(o, place, o_desc, where):
    """Rows `where` of the output, from o^T."""
    tma.store_wait(0)
    barrier()
    place.permute((1, 0)).store(o.to(place.dtype))
    fence_async_shared()
    barrier()
    store_box(o_desc, where, place)


@gluon.jit
def _consumer(
    shared,
    o,
    o_desc,
    grown_from,
    initial,
    final,
    out,
    start,
    length,
    tokens,
    first_chunk,
    sequence,
    hv,
    block,
    scale,
    NV: gl.constexpr,
    DK: gl.constexpr,
    DV: gl.constexpr,
    STAGES: gl.constexpr,
    INITIAL: gl.constexpr,
):
    q, k, v, t, p, grown, left, full, empty = shared
    MS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DK, 16])
    M: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, M, 2)
    AS: gl.constexpr = gl.DotOperandLayout(0, MS, 2)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, M)
    dtype: gl.constexpr = k.dtype
    zero = gl.zeros([64, 64], gl.float32, layout=M)
    cv = block * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, MS))
    ck = gl.arange(0, DK, layout=gl.SliceLayout(0, MS))
    state_at = (sequence.to(gl.int64) * NV + hv) * (DV * DK) + cv[:, None] * DK + ck[None, :]
    if INITIAL:
        state = gl.load(initial + state_at).to(gl.float32)
    else:
        state = gl.zeros([64, DK], gl.float32, layout=MS)
    chunks = (length + 63) // 64
    grown_from += (first_chunk.to(gl.int64) * NV + hv) * 64 + 63
    fade = gl.load(grown_from, mask=chunks > 0, other=1.0)
    half = gl.convert_layout(state.to(dtype), A)
    o_done = zero
    for c in range(chunks):
        stage = c % STAGES
        mbarrier.wait(full.index(stage), (c // STAGES) & 1)
        r_flight = warpgroup_mma(
            half, k.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True
        )
        q_flight = warpgroup_mma(
            half, q.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True
        )
        grown_from += NV * 64
        fade_next = gl.load(grown_from, mask=c + 1 < chunks, other=1.0)
        growth = grown.index(stage).load(COLUMNS)
        rest = left.index(stage).load(COLUMNS)
        value = v.index(stage).permute((1, 0)).load(M).to(gl.float32)
        # the output of the chunk before; rows behind the sequence are not written
        before = gl.where(c > 0, c * 64 - 64, chunks * 64)
        _put(o_done, o, o_desc, columns_at(hv, start, length, before, block))
        # with the state: else it is scaled while products are pending, and ptxas waits for them
        r, state = warpgroup_mma_wait(1, deps=[r_flight, state])
        r_half = gl.convert_layout((value - r * growth[None, :]).to(dtype), A)
        n_flight = warpgroup_mma(
            r_half, t.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True
        )
        state = state * fade
        fade = fade_next
        acc = warpgroup_mma_wait(1, deps=[q_flight])
        acc = acc * (growth * scale)[None, :]
        n = warpgroup_mma_wait(0, deps=[n_flight])
        n_left = gl.convert_layout((n * rest[None, :]).to(dtype), AS)
        s_flight = warpgroup_mma(n_left, k.index(stage), state, is_async=True)
        n_half = gl.convert_layout(n.to(dtype), A)
        o_flight = warpgroup_mma(n_half, p.index(stage).permute((1, 0)), acc, is_async=True)
        state = warpgroup_mma_wait(1, deps=[s_flight])
        half = gl.convert_layout(state.to(dtype), A)
        o_done = warpgroup_mma_wait(0, deps=[o_flight])
        mbarrier.arrive(empty.index(stage))
    if chunks > 0:
        _put(o_done, o, o_desc, columns_at(hv, start, length, chunks * 64 - 64, block))
    gl.store(final + state_at, state.to(final.dtype.element_ty))
    # tokens behind the last sequence; `tokens` is `length` for the others
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    i = gl.arange(0, 64, layout=gl.SliceLayout(1, ROWS))
    j = block * 64 + gl.arange(0, 64, layout=gl.SliceLayout(0, ROWS))
    for first in range(length, tokens, 64):
        row = (start + first + i).to(gl.int64) * NV + hv
        nothing = gl.zeros([64, 64], dtype, layout=ROWS)
        gl.store(out + row[:, None] * DV + j[None, :], nothing, (first + i < tokens)[:, None])
    tma.store_wait(0)


@gluon.jit
def _producer(
    shared,
    described,
    start,
    length,
    first_chunk,
    hv,
    block,
    NV: gl.constexpr,
    DK: gl.constexpr,
    DV: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
):
    q, k, v, t, p, grown, left, full, empty = shared
    q_desc, k_desc, v_desc, t_desc, p_desc, grown_desc, left_desc = described
    for c in range((length + 63) // 64):
        stage = c % STAGES
        ready = full.index(stage)
        mbarrier.wait(empty.index(stage), ((c // STAGES) & 1) ^ 1)
        mbarrier.expect(ready, 64 * DK * 4 + 3 * 64 * 64 * 2 + 2 * 64 * 4)
        where = at(0, hv // GROUP, start, length, c * 64, True)
        load_box(k_desc, where, ready, k.index(stage))
        of_value = columns_at(hv, start, length, c * 64, block)
        load_box(v_desc, of_value, ready, v.index(stage))
        tile = ((first_chunk + c) * NV + hv) * 64
        tma_load(grown_desc, [tile], ready, grown.index(stage))
        tma_load(left_desc, [tile], ready, left.index(stage))
        tma_load(t_desc, [tile, 0], ready, t.index(stage))
        load_box(q_desc, where, ready, q.index(stage))
        tma_load(p_desc, [tile, 0], ready, p.index(stage))


@gluon.jit(do_not_specialize=["T", "sequences", "scale"])
def _walk(
    q_desc,
    k_desc,
    v_desc,
    t_desc,
    p_desc,
    grown_desc,
    left_desc,
    o_desc,
    grown,
    lengths,
    initial,
    final,
    out,
    T,
    sequences,
    scale,
    NV: gl.constexpr,
    DK: gl.constexpr,
    DV: gl.constexpr,
    GROUP: gl.constexpr,
    SEQUENCES: gl.constexpr,
    STAGES: gl.constexpr,
    VARLEN: gl.constexpr,
    INITIAL: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Outputs and the final state of a sequence, for 64 columns of one head."""
    BLOCKS: gl.constexpr = DV // 64
    dtype: gl.constexpr = k_desc.dtype
    WIDE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, DK], dtype)
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], dtype)
    program = gl.program_id(0)
    block = program % BLOCKS
    hv = program // BLOCKS % NV
    sequence = program // (BLOCKS * NV)
    start = 0
    length = T
    tokens = T
    first_chunk = program * 0
    if VARLEN:
        s, each = lengths_of(lengths, T, sequences, SEQUENCES)
        start, length = tokens_of(s, each, s < sequence, sequence, T)
        # before a sequence with tokens; before another it may wrap, and is not used
        first_chunk = gl.sum(gl.where(s < sequence, (each + 63) // 64, 0), 0)
        tokens = gl.where(sequence == sequences - 1, T - start, length)
    q = gl.allocate_shared_memory(dtype, [STAGES, 64, DK], WIDE)
    k = gl.allocate_shared_memory(dtype, [STAGES, 64, DK], WIDE)
    v = gl.allocate_shared_memory(dtype, [STAGES, 64, 64], TILE)
    t = gl.allocate_shared_memory(dtype, [STAGES, 64, 64], TILE)
    p = gl.allocate_shared_memory(dtype, [STAGES, 64, 64], TILE)
    o = gl.allocate_shared_memory(dtype, [64, 64], TILE)
    grown_tile = gl.allocate_shared_memory(gl.float32, [STAGES, 64], grown_desc.layout)
    left_tile = gl.allocate_shared_memory(gl.float32, [STAGES, 64], left_desc.layout)
    full, empty = in_turn(STAGES, 1)
    shared = Walk(q, k, v, t, p, grown_tile, left_tile, full, empty)
    described = (q_desc, k_desc, v_desc, t_desc, p_desc, grown_desc, left_desc)
    gl.warp_specialize(
        [
            (
                _consumer,
                (
                    shared,
                    o,
                    o_desc,
                    grown,
                    initial,
                    final,
                    out,
                    start,
                    length,
                    tokens,
                    first_chunk,
                    sequence,
                    hv,
                    block,
                    scale,
                    NV,
                    DK,
                    DV,
                    STAGES,
                    INITIAL,
                ),
            ),
            (
                _producer,
                (
                    shared,
                    described,
                    start,
                    length,
                    first_chunk,
                    hv,
                    block,
                    NV,
                    DK,
                    DV,
                    GROUP,
                    STAGES,
                ),
            ),
        ],
        [1],
        [24],
    )


def supports(query: Tensor, key: Tensor, value: Tensor, sequences: int) -> bool:
    """Dk 64 or 128, Dv in whole columns of 64, and rows of whole 16-byte units."""
    given = (query, key, value)
    tokens, heads, size = value.shape
    return (
        gpu.is_hopper(value.device)
        and key.shape[-1] in (64, 128)
        and size % 64 == 0
        # its scratch, in rows: a coordinate of TMA has 32 bits
        and tokens > 0
        and (tokens + CHUNK * (sequences + 1)) * heads < 2**31
        and aligned(*given)
        and all(0 < step < 2**34 and step % 8 == 0 for x in given for step in x.stride()[:-1])
    )


def launch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor | None,
    rate: int,
    initial_state: Tensor | None,
    actual_seq_lengths: Tensor | None,
    scale: float,
    g: Tensor | None,
    out: Tensor,
    final: Tensor,
) -> None:
    """Writes `out` and `final`."""
    T, N, DK = key.shape
    NV, DV = value.shape[1:]
    varlen = actual_seq_lengths is not None
    sequences = final.shape[0]
    # every sequence may end in a part of a chunk
    chunks = cdiv(T, CHUNK) + (sequences if varlen else 0)
    padded = max(32, power_of_two(sequences))
    rows = chunks * NV * CHUNK
    t, p = (memory.empty((rows, CHUNK), value.dtype, value.device) for _ in range(2))
    grown, left = (memory.empty((rows,), torch.float32, value.device) for _ in range(2))
    triangles(
        query, key, NV, beta, rate, actual_seq_lengths, scale, g, t, p, grown, left, None, sequences
    )
    q_desc, k_desc = (describe(x, CHUNK, DK, True) for x in (query, key))
    t_desc, p_desc = (describe_matrix(x, rows, CHUNK, [CHUNK, CHUNK]) for x in (t, p))
    launches.kernel(_walk, sequences * NV * (DV // 64))(
        q_desc,
        k_desc,
        describe(value, CHUNK, CHUNK, True),
        t_desc,
        p_desc,
        describe_row(grown, CHUNK),
        describe_row(left, CHUNK),
        describe(out, CHUNK, CHUNK, True),
        grown,
        actual_seq_lengths,
        initial_state,
        final,
        out,
        T,
        sequences,
        scale,
        NV=NV,
        DK=DK,
        DV=DV,
        GROUP=NV // N,
        SEQUENCES=padded,
        STAGES=_STAGES,
        VARLEN=varlen,
        INITIAL=initial_state is not None,
        num_warps=4,
    )
