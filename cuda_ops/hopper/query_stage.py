# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Absorption and rotation of prolog.py on Hopper (Gluon): what a product made of many tokens.

One program a head and a block of tokens.  The head's whole w_uk is asked for before that product
has ended; then one wgmma a block of columns, whose result leaves by TMA while the next one runs.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..common import gpu, launches
from ..common.gluon_names import barrier, tma_load, tma_store
from .tma import DTYPES, aligned, describe_matrix

COLUMNS = 128


@gluon.jit
def _rotate(
    q, out, sin, cos, head, token, tokens, HEADS: gl.constexpr, DN: gl.constexpr, D: gl.constexpr,
    TOTAL: gl.constexpr, TOKENS: gl.constexpr, INTERLEAVED: gl.constexpr,
):  # fmt: skip
    """out[t, head] = the head's last D columns, rotated."""
    HALF: gl.constexpr = D // 2
    flat: gl.constexpr = gl.BlockedLayout([1, 1], [32 // HALF, HALF], [gl.num_warps(), 1], [1, 0])
    t = (token + gl.arange(0, TOKENS, gl.SliceLayout(1, flat)))[:, None]
    i = gl.arange(0, HALF, gl.SliceLayout(0, flat))[None, :]
    ok = (t < tokens) & (i >= 0)
    t = t.to(gl.int64)
    at = q + t * TOTAL + head * (DN + D) + DN
    if INTERLEAVED:
        left = gl.load(at + 2 * i, mask=ok, other=0.0).to(gl.float32)
        right = gl.load(at + 2 * i + 1, mask=ok, other=0.0).to(gl.float32)
    else:
        left = gl.load(at + i, mask=ok, other=0.0).to(gl.float32)
        right = gl.load(at + i + HALF, mask=ok, other=0.0).to(gl.float32)
    angle = t * D + i
    low = left * gl.load(cos + angle, mask=ok, other=0.0).to(gl.float32)
    low -= right * gl.load(sin + angle, mask=ok, other=0.0).to(gl.float32)
    high = right * gl.load(cos + angle + HALF, mask=ok, other=0.0).to(gl.float32)
    high += left * gl.load(sin + angle + HALF, mask=ok, other=0.0).to(gl.float32)
    at = out + (t * HEADS + head) * D + i
    gl.store(at, low.to(out.dtype.element_ty), mask=ok)
    gl.store(at + HALF, high.to(out.dtype.element_ty), mask=ok)


@gluon.jit(do_not_specialize=["tokens"])
def _absorb(
    q_blocks, w_blocks, out_blocks, q, query_rope, sin, cos, tokens,
    HEADS: gl.constexpr, DN: gl.constexpr, D: gl.constexpr, R: gl.constexpr, TOTAL: gl.constexpr,
    INTERLEAVED: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_blocks.dtype
    TOKENS: gl.constexpr = q_blocks.block_shape[0]
    WIDE: gl.constexpr = w_blocks.block_shape[1]
    PARTS: gl.constexpr = R // WIDE
    head = gl.program_id(0)
    token = gl.program_id(1) * TOKENS
    w_tiles = gl.allocate_shared_memory(dtype, [PARTS, DN, WIDE], w_blocks.layout)
    q_tile = gl.allocate_shared_memory(dtype, [TOKENS, DN], q_blocks.layout)
    out_tile = gl.allocate_shared_memory(dtype, [TOKENS, WIDE], out_blocks.layout)
    bars = gl.allocate_shared_memory(gl.int64, [PARTS + 1, 1], mbarrier.MBarrierLayout())
    for part in gl.static_range(PARTS + 1):
        mbarrier.init(bars.index(part), count=1)
    fence_async_shared()
    barrier()
    for part in gl.static_range(PARTS):
        bar = bars.index(part)
        mbarrier.expect(bar, DN * WIDE * 2)
        tma_load(w_blocks, [head * DN, part * WIDE], bar, w_tiles.index(part))
    gdc_launch_dependents()
    gdc_wait()
    there = bars.index(PARTS)
    mbarrier.expect(there, TOKENS * DN * 2)
    tma_load(q_blocks, [token, head * (DN + D)], there, q_tile)
    _rotate(q, query_rope, sin, cos, head, token, tokens, HEADS, DN, D, TOTAL, TOKENS, INTERLEAVED)

    summed: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, WIDE, 16]
    )
    mbarrier.wait(there, 0)
    for part in gl.static_range(PARTS):
        mbarrier.wait(bars.index(part), 0)
        acc = gl.zeros([TOKENS, WIDE], gl.float32, summed)
        acc = warpgroup_mma(q_tile, w_tiles.index(part), acc)
        tma.store_wait(0)
        out_tile.store(acc.to(dtype))
        fence_async_shared()
        tma_store(out_blocks, [token, head * R + part * WIDE], out_tile)
    tma.store_wait(0)


def supports(q: Tensor, w_uk: Tensor, rotary: int) -> bool:
    """One run of products, blocks that divide everything, and alignment for TMA."""
    runs, tokens, total = q.shape
    _, plain, rank = w_uk.shape
    whole = plain in (64, 128) and rank % COLUMNS == 0 and rank <= 512 and rotary in (32, 64)
    return (
        gpu.is_hopper(q.device)
        and runs == 1
        and tokens > 32
        and q.dtype in DTYPES
        and whole
        and total % 8 == 0
        and aligned(q, w_uk)
    )


def launch(
    q: Tensor, sin: Tensor, cos: Tensor, w_uk: Tensor, query: Tensor, query_rope: Tensor,
    interleaved: bool,
) -> None:  # fmt: skip
    """q [1, T, N (DN + D) ..] -> query [.., N, R], query_rope [.., N, D]."""
    _, tokens, total = q.shape
    heads, plain, rank = w_uk.shape
    tile = 64 if tokens <= 64 else 128
    launches.kernel(_absorb, heads, -(-tokens // tile))(
        describe_matrix(q, tokens, total, [tile, plain]),
        describe_matrix(w_uk, heads * plain, rank, [plain, COLUMNS]),
        describe_matrix(query, tokens, heads * rank, [tile, COLUMNS]),
        q, query_rope, sin, cos, tokens,
        HEADS=heads, DN=plain, D=sin.shape[-1], R=rank, TOTAL=total, INTERLEAVED=interleaved,
        num_warps=tile // 16, launch_pdl=True,
    )  # fmt: skip
