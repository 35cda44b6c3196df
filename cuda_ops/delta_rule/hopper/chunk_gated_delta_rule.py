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
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ....dispatch.common import memory
from ....dispatch.ops.delta_rule.chunk_gated_delta_rule import Arguments
from ...common import gpu
from ...common.chunks import constants
from ...common.gluon_names import tma_load
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
from ...common.tiling import cdiv
from ...runtime import launches
from .chunks import (
    CHUNK,
    COLUMNS,
    LEFT,
    NUMBERS,
    SQUARE,
    Walked,
    columns_at,
    held,
    place_of_state,
    put_turned,
    sequence_of,
    square_of,
    tiles_of,
    triangles,
)

# H200, 2026-11, N 16, Nv 32, Dk = Dv = 128, bfloat16, 4096 tokens: of 134 us the walk takes 77, and
# with two stages 84
_STAGES = gl.constexpr(3)


class Walk(NamedTuple):
    """Places of chunks in shared memory, that of an output, and barriers."""

    tiles: Any
    grown: Any
    left: Any
    o: Any
    full: Any
    empty: Any


@gluon.jit
def _put(o, place, o_desc, where):
    """Rows `where` of the output, from o^T."""
    put_turned(o, place)
    store_box(o_desc, where, place)


@gluon.jit
def _consumer(shared, o_desc, grown_from, initial, final, out, of, tokens, scale, C: gl.constexpr):
    q, k, v, t, p = shared.tiles
    sequence, start, length, first_chunk, hv, block = of
    dtype: gl.constexpr = k.dtype
    zero = gl.zeros([64, 64], gl.float32, layout=SQUARE)
    head = sequence.to(gl.int64) * C.NV + hv
    state_at = place_of_state(head, block, k_step=1, v_step=C.DK, DK=C.DK, DV=C.DV)
    state = held(initial, state_at)
    AS: gl.constexpr = gl.DotOperandLayout(0, state.type.layout, 2)
    chunks = (length + 63) // 64
    grown_from += (first_chunk.to(gl.int64) * C.NV + hv) * 64 + 63
    fade = gl.load(grown_from, mask=chunks > 0, other=1.0)
    half = gl.convert_layout(state.to(dtype), LEFT)
    o_done = zero
    for c in range(chunks):
        stage = c % _STAGES
        mbarrier.wait(shared.full.index(stage), (c // _STAGES) & 1)
        r_flight = warpgroup_mma(
            half, k.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True
        )
        q_flight = warpgroup_mma(
            half, q.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True
        )
        grown_from += C.NV * 64
        fade_next = gl.load(grown_from, mask=c + 1 < chunks, other=1.0)
        growth = shared.grown.index(stage).load(COLUMNS)
        rest = shared.left.index(stage).load(COLUMNS)
        value = v.index(stage).permute((1, 0)).load(SQUARE).to(gl.float32)
        # the output of the chunk before; rows behind the sequence are not written
        before = gl.where(c > 0, c * 64 - 64, chunks * 64)
        _put(o_done, shared.o, o_desc, columns_at(hv, start, length, before, block))
        # with the state: else it is scaled while products are pending, and ptxas waits for them
        r, state = warpgroup_mma_wait(1, deps=[r_flight, state])
        r_half = gl.convert_layout((value - r * growth[None, :]).to(dtype), LEFT)
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
        n_half = gl.convert_layout(n.to(dtype), LEFT)
        o_flight = warpgroup_mma(n_half, p.index(stage).permute((1, 0)), acc, is_async=True)
        state = warpgroup_mma_wait(1, deps=[s_flight])
        half = gl.convert_layout(state.to(dtype), LEFT)
        o_done = warpgroup_mma_wait(0, deps=[o_flight])
        mbarrier.arrive(shared.empty.index(stage))
    if chunks > 0:
        _put(o_done, shared.o, o_desc, columns_at(hv, start, length, chunks * 64 - 64, block))
    gl.store(final + state_at, state.to(final.dtype.element_ty))
    # tokens behind the last sequence; `tokens` is `length` for the others
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    i = gl.arange(0, 64, layout=gl.SliceLayout(1, ROWS))
    j = block * 64 + gl.arange(0, 64, layout=gl.SliceLayout(0, ROWS))
    for first in range(length, tokens, 64):
        row = (start + first + i).to(gl.int64) * C.NV + hv
        nothing = gl.zeros([64, 64], dtype, layout=ROWS)
        gl.store(out + row[:, None] * C.DV + j[None, :], nothing, (first + i < tokens)[:, None])
    tma.store_wait(0)


@gluon.jit
def _producer(shared, described, of, C: gl.constexpr):
    q, k, v, t, p = shared.tiles
    q_desc, k_desc, v_desc, t_desc, p_desc, grown_desc, left_desc = described
    _sequence, start, length, first_chunk, hv, block = of
    for c in range((length + 63) // 64):
        stage = c % _STAGES
        ready = shared.full.index(stage)
        mbarrier.wait(shared.empty.index(stage), ((c // _STAGES) & 1) ^ 1)
        mbarrier.expect(ready, 64 * C.DK * 4 + 3 * 64 * 64 * 2 + 2 * 64 * 4)
        where = at(0, hv // (C.NV // C.N), start, length, c * 64, True)
        load_box(k_desc, where, ready, k.index(stage))
        of_value = columns_at(hv, start, length, c * 64, block)
        load_box(v_desc, of_value, ready, v.index(stage))
        tile = ((first_chunk + c) * C.NV + hv) * 64
        tma_load(grown_desc, [tile], ready, shared.grown.index(stage))
        tma_load(left_desc, [tile], ready, shared.left.index(stage))
        tma_load(t_desc, [tile, 0], ready, t.index(stage))
        load_box(q_desc, where, ready, q.index(stage))
        tma_load(p_desc, [tile, 0], ready, p.index(stage))


@gluon.jit(do_not_specialize=NUMBERS)
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
    C: gl.constexpr,
):
    """Outputs and the final state of a sequence, for 64 columns of one head."""
    BLOCKS: gl.constexpr = C.DV // 64
    dtype: gl.constexpr = k_desc.dtype
    program = gl.program_id(0)
    block = program % BLOCKS
    hv = program // BLOCKS % C.NV
    sequence = program // (BLOCKS * C.NV)
    start, length, first_chunk = sequence_of(lengths, sequence, T, sequences, C.SEQUENCES, C.VARLEN)
    tokens = T
    if C.VARLEN:
        tokens = gl.where(sequence == sequences - 1, T - start, length)
    tiles = tiles_of(dtype, C.DK, _STAGES)
    o = square_of(dtype)
    grown_tile = gl.allocate_shared_memory(gl.float32, [_STAGES, 64], grown_desc.layout)
    left_tile = gl.allocate_shared_memory(gl.float32, [_STAGES, 64], left_desc.layout)
    full, empty = in_turn(_STAGES, 1)
    shared = Walk(tiles, grown_tile, left_tile, o, full, empty)
    described = (q_desc, k_desc, v_desc, t_desc, p_desc, grown_desc, left_desc)
    of = Walked(sequence, start, length, first_chunk, hv, block)
    gl.warp_specialize(
        [
            (_consumer, (shared, o_desc, grown, initial, final, out, of, tokens, scale, C)),
            (_producer, (shared, described, of, C)),
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


def launch(x: Arguments, rate: int, scale: float, out: Tensor, final: Tensor) -> None:
    """Writes `out` and `final`."""
    query, key, value, lengths = x["query"], x["key"], x["value"], x["actual_seq_lengths"]
    T = key.shape[0]
    sequences = final.shape[0]
    C = constants(key, value, lengths, rate, x["g"], 32)
    # every sequence may end in a part of a chunk
    rows = (cdiv(T, CHUNK) + (sequences if C.VARLEN else 0)) * C.NV * CHUNK
    t, p = (memory.empty((rows, CHUNK), value.dtype, value.device) for _ in range(2))
    grown, left = (memory.empty((rows,), torch.float32, value.device) for _ in range(2))
    made = (t, p, grown, left)
    triangles(query, key, x["beta"], lengths, scale, x["g"], made, None, sequences, C)
    launches.kernel(_walk, sequences * C.NV * (C.DV // CHUNK))(
        *(describe(y, CHUNK, C.DK, True) for y in (query, key)),
        describe(value, CHUNK, CHUNK, True),
        *(describe_matrix(y, rows, CHUNK, [CHUNK, CHUNK]) for y in (t, p)),
        describe_row(grown, CHUNK),
        describe_row(left, CHUNK),
        describe(out, CHUNK, CHUNK, True),
        grown,
        lengths,
        x["initial_state"],
        final,
        out,
        T,
        sequences,
        scale,
        C=C,
        num_warps=4,
    )
