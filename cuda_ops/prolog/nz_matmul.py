# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""A product that ops are made of, none itself: token rows by several weights, in one launch.

    out[t, :] = x[t, :] [W0 | W1 | W2 | W3]        x [T, K], W [K, N], out [T, sum of N]

A weight is NZ, the bytes of [N / C0, K, C0] with C0 = 32 bytes of elements, or plain row-major
[K, N].  Both are addressed as (n // C0) * panel + k * row + n % C0; neither is ever copied.  A
"linear" one, [N, K] as nn.Linear has it, is NZ of one column a panel.
Few tokens: K is cut into runs, each program adds up one, and out is [RUNS, T, N] in float32 for
the next kernel to add in order (deterministic, and no launch of its own).
Groups: out[t, g] = x[t, g] W[g], one weight a group.

    condition                                      kernels
    Hopper, weights of one form, rows in 16 bytes  hopper/nz_matmul.py
    of them one weight of a prompt                 hopper/prompt_matmul.py
    else                                           _product
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from ...dispatch.common import memory, nz
from ..common import gpu, handover, tiling
from ..common.tiling import TURNED, cdiv
from ..common.weight_forms import NZ, ends, form_of
from ..runtime import launches
from .blocks import chosen, placed
from .hopper import nz_matmul as hopper
from .hopper import prompt_matmul as prompt


@triton.jit(do_not_specialize=["tokens", "numbers"])
def _product(
    x,
    turned,
    w0,
    w1,
    w2,
    w3,
    out,
    zeroed,
    numbers,
    tokens,
    K: tl.constexpr,
    RUN: tl.constexpr,
    N: tl.constexpr,
    IS_NZ: tl.constexpr,
    C0: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    SWAP: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    CHAINED: tl.constexpr,
    FIRST: tl.constexpr,
    LATE: tl.constexpr,
):
    B: tl.constexpr = ends(N, BLOCK_N)
    BLOCKS: tl.constexpr = B[3]
    TOTAL: tl.constexpr = (N[0] + N[1] + N[2] + N[3]) * GROUPS
    ROW: tl.constexpr = K * GROUPS
    token_block, block, run = placed(tokens, BLOCK_T, BLOCKS, GROUP)

    # which weight: its size, first block, place in the sum, and strides
    of = (w0, N[0], 0, 0, K * C0 if IS_NZ[0] else C0, C0 if IS_NZ[0] else N[0])
    if N[1] > 0:
        of1 = (w1, N[1], B[0], N[0], K * C0 if IS_NZ[1] else C0, C0 if IS_NZ[1] else N[1])
        of = chosen(block >= B[0], of1, of)
    if N[2] > 0:
        of2 = (w2, N[2], B[1], N[0] + N[1], K * C0 if IS_NZ[2] else C0, C0 if IS_NZ[2] else N[2])
        of = chosen(block >= B[1], of2, of)
    if N[3] > 0:
        of3 = (
            w3,
            N[3],
            B[2],
            N[0] + N[1] + N[2],
            K * C0 if IS_NZ[3] else C0,
            C0 if IS_NZ[3] else N[3],
        )
        of = chosen(block >= B[2], of3, of)
    w, size, begin, base, panel, row = of

    column = (block - begin) * BLOCK_N
    lo = run * RUN
    j = tl.arange(0, BLOCK_N)
    kk = tl.arange(0, BLOCK_K)
    t = token_block * BLOCK_T + tl.arange(0, BLOCK_T)
    w += (column // C0).to(tl.int64) * panel + lo.to(tl.int64) * row
    if GROUPS > 1:  # one weight each
        group = tl.program_id(2)
        x += group * K
        w += group.to(tl.int64) * (K * N[0])
        out += group * N[0]
        if SIZE > 0:
            turned += group * (K // SIZE * BLOCK_K)

    if CHAINED:
        handover.begin(FIRST)
        handover.follow(FIRST, LATE)
    if zeroed is not None:
        for at in tl.range(tl.program_id(0) * 128, numbers, tl.num_programs(0) * 128):
            number = at + tl.arange(0, 128)
            tl.store(zeroed + number, 0, mask=number < numbers)

    RAGGED_K: tl.constexpr = K % RUN != 0
    RAGGED_N: tl.constexpr = (
        N[0] % BLOCK_N != 0 or N[1] % BLOCK_N != 0 or N[2] % BLOCK_N != 0 or N[3] % BLOCK_N != 0
    )
    x_base = x + lo
    if SWAP:
        acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
        w_at = ((j // C0) * panel + j % C0)[:, None] + kk[None, :] * row
        x_row = t[None, :].to(tl.int64)
        n_ok = (j < size - column)[:, None]
        t_ok = (t < tokens)[None, :]
        k_w = kk[None, :]
        k_x = kk[:, None]
    else:
        acc = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
        w_at = ((j // C0) * panel + j % C0)[None, :] + kk[:, None] * row
        x_row = t[:, None].to(tl.int64)
        n_ok = (j < size - column)[None, :]
        t_ok = (t < tokens)[:, None]
        k_w = kk[:, None]
        k_x = kk[None, :]
    for k in tl.range(0, RUN, BLOCK_K, num_stages=STAGES):
        w_ptr = w + tl.cast(k, tl.int64) * row + w_at
        if SIZE > 0:  # of a head, whose last dims `turned` has
            head = (lo + k) // SIZE
            last = (lo + k) % SIZE == SIZE - BLOCK_K
            x_now = tl.where(last, turned + head * BLOCK_K, x_base + k)
            x_ptr = x_now + x_row * tl.where(last, ROW // SIZE * BLOCK_K, ROW) + k_x
        else:
            x_ptr = x_base + k + (x_row * ROW + k_x)
        if RAGGED_K:
            x_tile = tl.load(x_ptr, mask=t_ok & (k_x < K - lo - k), other=0.0)
            w_tile = tl.load(w_ptr, mask=n_ok & (k_w < K - lo - k), other=0.0)
        else:
            x_tile = tl.load(x_ptr, mask=t_ok, other=0.0)
            w_tile = tl.load(w_ptr, mask=n_ok, other=0.0) if RAGGED_N else tl.load(w_ptr)
        if SWAP:
            acc = tl.dot(w_tile, x_tile, acc, input_precision="ieee")
        else:
            acc = tl.dot(x_tile, w_tile, acc, input_precision="ieee")

    n = base + column + j
    t_row = (run.to(tl.int64) * tokens + t) * TOTAL
    at = out + (t_row[None, :] + n[:, None] if SWAP else t_row[:, None] + n[None, :])
    tl.store(at, acc.to(out.dtype.element_ty), mask=n_ok & t_ok)
    if CHAINED and LATE:
        gdc_wait()


def product(
    x: Tensor,
    weights: Sequence[tuple[Tensor, int]],
    weight_format: str,
    *,
    keep_float: bool = False,
    first: bool = False,
    late: bool = False,
    forked: bool = False,
    zeroed: Tensor | None = None,
    groups: int = 1,
    turned: Tensor | None = None,
    size: int = 0,
) -> Tensor:
    """x [T, K] times the (weight, N) joined: [runs, T, sum of N], float32 if runs > 1 or
    `keep_float`, else of x's dtype.  `first`: the op starts here, so that all its later kernels may
    count on every earlier op having finished.  `late`: x was there when the kernel before began,
    which is waited for at the end.  `forked`: it starts a stream, and so waits for an event instead
    of for the kernel before it.  `groups`: x is [T, groups K], the one weight [groups, ..], and out
    [runs, T, groups N].  `turned` [T, heads TURNED]: what the last dims of each head, `size` of x,
    are instead.  `zeroed`: int32 numbers that become 0, for the kernel behind."""
    tokens, depth = x.shape[0], x.shape[1] // groups
    given = [columns for _, columns in weights]
    sizes = given + [0] * (4 - len(weights))
    kept = [weight for weight, _ in weights] + [weights[0][0]] * (4 - len(weights))
    forms = [form_of(weight[0] if groups > 1 else weight, weight_format) for weight in kept]
    device = x.device
    chained = gpu.has_chained_launch(device)
    by_tma = hopper.supports(x, kept, given, forms, groups)
    alone = len(given) == 1 and not keep_float and zeroed is None
    if by_tma and alone and prompt.supports(x, given[0], groups, forms[0]):
        out = memory.empty((1, tokens, groups * given[0]), x.dtype, device)
        prompt.launch(
            x,
            kept[0],
            forms[0],
            given[0],
            out[0],
            first=first,
            forked=forked,
            groups=groups,
            turned=turned,
            size=size,
        )
        return out
    chosen = (tiling.hopper if groups == 1 else tiling.grouped) if by_tma else tiling.plain
    config = chosen(tokens, given * groups, depth, gpu.num_sms(device))
    if turned is not None and not by_tma and config.k > TURNED:
        config = replace(config, k=TURNED, stages=config.stages + 2)
    run = cdiv(cdiv(depth, config.runs), config.k) * config.k
    runs = cdiv(depth, run)
    dtype = torch.float32 if keep_float or runs > 1 else x.dtype
    out = memory.empty((runs, tokens, groups * sum(sizes)), dtype, device)
    blocks = sum(cdiv(columns, config.columns) for columns in sizes) * cdiv(tokens, config.tokens)
    if by_tma:
        hopper.launch(
            x,
            kept,
            forms[0],
            sizes,
            out,
            run,
            blocks,
            config,
            zeroed=zeroed,
            first=first,
            late=late,
            forked=forked,
            groups=groups,
            turned=turned,
            size=size,
        )
        return out
    linear = weight_format == "linear"
    formats = [linear or form == NZ.value for form in forms]
    launches.kernel(_product, blocks, runs, groups)(
        x,
        turned,
        *kept,
        out,
        zeroed,
        0 if zeroed is None else zeroed.numel(),
        tokens,
        K=depth,
        RUN=run,
        N=tuple(sizes),
        IS_NZ=tuple(formats),
        C0=1 if linear else nz.columns(x.dtype),
        BLOCK_T=config.tokens,
        BLOCK_N=config.columns,
        BLOCK_K=config.k,
        STAGES=config.stages,
        SWAP=config.swap,
        GROUP=config.group,
        GROUPS=groups,
        SIZE=size,
        CHAINED=chained,
        FIRST=first,
        LATE=late,
        num_warps=config.warps,
        launch_pdl=chained and not forked,
    )
    return out
