# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Products with weights of 8 bits, which are read as they are: nothing is dequantized in memory.

    int8   out[t, n] = float32(x[t] . w[:, n]) sx[t] sw[n]                    sums in int32
    fp8    out[t, n] = sum_b (x[t, b] . w[b, n]) (sx[t, b] sw[b, n / 128])    b: blocks of 128 k

Element (k, n) of a weight lies at (n // 32) * panel + n % 32 * column + k * row:

    NZ            [N / 32, K, 32]   panel 32 K   column 1   row 32
    row-major     [K, N]            panel 32     column 1   row N
    linear        [N, K], a checkpoint's own     panel 32 K   column K   row 1

Products of fp8 with linear weights are of e4m3 where the GPU converts it, a block's sum in
float32; else of float16, which has every e4m3.  Those of int8 are of int8.  `product`:

    condition                            kernels
    fp8, linear, Hopper, k in 16s,       hopper/quantized_prompt_matmul.py
      one weight, many tokens
    fp8, linear, Hopper, k in 16s        hopper/quantized_matmul.py
    else                                 _product

`quantized_product`, whose sums are quantized in turn:

    condition                            kernels
    any                                  hopper/quantized_prompt_matmul.py

`activations`, which quantizes x:

    condition    kernels
    any          _activations

As in nz_matmul.py K is cut into runs, which the next kernel adds up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from ...dispatch.common import memory, quantized
from ..common import gpu, handover, quantize, tiling
from ..common.tiling import cdiv, power_of_two
from ..common.weight_forms import LINEAR, NZ, form_of
from ..runtime import launches
from .blocks import chosen, placed, tile_at
from .hopper import quantized_matmul as hopper
from .hopper import quantized_prompt_matmul as prompt

BLOCK = tl.constexpr(quantized.TILE)
C0 = tl.constexpr(32)
MOST = 3  # weights of one launch


@dataclass(frozen=True)
class Weight:
    """Of `size` columns; `scale` None: not of 8 bits."""

    values: Tensor
    size: int
    scale: Tensor | None

    def form(self, weight_format: str) -> int:
        return form_of(self.values, weight_format)


@dataclass(frozen=True)
class Rows:
    """Activations [T, K]: floats, or values of 8 bits and their scales [T, 1] or [T, blocks]."""

    values: Tensor
    scale: Tensor | None = None


def none(dtype: torch.dtype, x: Tensor) -> Rows:
    """What `x`, of no tokens, is for weights of `dtype`."""
    x = x.flatten(0, -2)
    kind = quantized.kind_of(dtype)
    if kind is None:
        return Rows(x)
    tiles = 1 if kind == "int8" else cdiv(x.shape[1], BLOCK.value)
    values = memory.empty(tuple(x.shape), dtype, x.device)
    return Rows(values, memory.empty((0, tiles), torch.float32, x.device))


@triton.jit
def _quantize(
    x,
    smooth,
    values,
    scales,
    token,
    part,
    K: tl.constexpr,
    SIZE: tl.constexpr,
    TILES: tl.constexpr,
    KIND: tl.constexpr,
    UE8M0: tl.constexpr,
    SMOOTH: tl.constexpr,
):
    """TILES tiles of a token."""
    OF_TOKEN: tl.constexpr = (K + SIZE - 1) // SIZE
    tile = part * TILES + tl.arange(0, TILES)
    k = tile[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    mask = k < K
    u = tl.load(x + token * K + k, mask=mask, other=0.0).to(tl.float32)
    if SMOOTH:
        u *= tl.load(smooth + k, mask=mask, other=0.0)
    u, scale = quantize.of_floats(u, 1.0, KIND, UE8M0)
    tl.store(values + token * K + k, u, mask=mask)
    tl.store(scales + token * OF_TOKEN + tile, scale, mask=tile < OF_TOKEN)


@triton.jit
def _activations(
    x,
    x_smooth,
    x_values,
    x_scales,
    y,
    y_smooth,
    y_values,
    y_scales,
    X: tl.constexpr,
    X_SIZE: tl.constexpr,
    X_TILES: tl.constexpr,
    X_PARTS: tl.constexpr,
    X_SMOOTH: tl.constexpr,
    Y: tl.constexpr,
    Y_SIZE: tl.constexpr,
    Y_TILES: tl.constexpr,
    Y_SMOOTH: tl.constexpr,
    KIND: tl.constexpr,
    UE8M0: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """One program: a token and a part of its x [T, X] or of its y [T, Y]."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    if CHAINED:
        handover.begin(True)
    if part < X_PARTS:
        _quantize(
            x, x_smooth, x_values, x_scales, token, part, X, X_SIZE, X_TILES, KIND, UE8M0, X_SMOOTH
        )
    elif Y > 0:
        _quantize(
            y,
            y_smooth,
            y_values,
            y_scales,
            token,
            part - X_PARTS,
            Y,
            Y_SIZE,
            Y_TILES,
            KIND,
            UE8M0,
            Y_SMOOTH,
        )


def activations(
    given: Sequence[tuple[Tensor, Tensor | None]], kind: str, scale_format: str
) -> list[Rows]:
    """Up to two (floats [T, K], their smooth scales or None), quantized in one launch.  Where an op
    starts here, the next kernel is its `second`."""
    if not given:
        return []
    tokens, device = given[0][0].shape[0], given[0][0].device
    out, cuts = [], []
    arguments: list[tuple[Tensor | None, ...]] = []
    for floats, smooth in given:
        depth = floats.shape[1]
        size = power_of_two(depth) if kind == "int8" else BLOCK.value
        of_token = cdiv(depth, size)
        values = memory.empty((tokens, depth), quantized.VALUES[kind], device)
        rows = Rows(values, memory.empty((tokens, of_token), torch.float32, device))
        arguments.append((floats, smooth, quantize.as_bytes(values), rows.scale))
        tiles = min(8, power_of_two(of_token))
        cuts.append((depth, size, tiles, cdiv(of_token, tiles), smooth is not None))
        out.append(rows)
    if len(given) == 1:
        arguments.append((None,) * 4)
        cuts.append((0, 1, 1, 0, False))
    x, y = cuts
    chained = gpu.has_chained_launch(device)
    launches.kernel(_activations, tokens, x[3] + y[3])(
        *arguments[0],
        *arguments[1],
        X=x[0],
        X_SIZE=x[1],
        X_TILES=x[2],
        X_PARTS=x[3],
        X_SMOOTH=x[4],
        Y=y[0],
        Y_SIZE=y[1],
        Y_TILES=y[2],
        Y_SMOOTH=y[4],
        KIND=quantize.kind_of(kind),
        UE8M0=scale_format == "ue8m0",
        CHAINED=chained,
        num_warps=8 if kind == "int8" else 4,
        launch_pdl=chained,
    )
    return out


@triton.jit
def _tile(at, mask, KIND: tl.constexpr, HALF: tl.constexpr):
    """Values as their product takes them."""
    if KIND == quantize.FP8:
        tile = tl.load(at, mask=mask, other=0)
    else:
        tile = tl.load(at, mask=mask, other=0.0 if KIND == quantize.NATIVE_FP8 else 0)
    if HALF:
        tile = quantize.to_float16(tile, KIND)
    return tile


@triton.jit(do_not_specialize=["tokens"])
def _product(
    x,
    x_scale,
    w0,
    w1,
    w2,
    s0,
    s1,
    s2,
    out,
    tokens,
    K: tl.constexpr,
    RUN: tl.constexpr,
    N0: tl.constexpr,
    N1: tl.constexpr,
    N2: tl.constexpr,
    FORM: tl.constexpr,
    KIND: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    SWAP: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    CHAINED: tl.constexpr,
    FIRST: tl.constexpr,
    LATE: tl.constexpr,
    SECOND: tl.constexpr,
):
    B0: tl.constexpr = (N0 + BLOCK_N - 1) // BLOCK_N
    B1: tl.constexpr = B0 + (N1 + BLOCK_N - 1) // BLOCK_N
    BLOCKS: tl.constexpr = B1 + (N2 + BLOCK_N - 1) // BLOCK_N
    TOTAL: tl.constexpr = (N0 + N1 + N2) * GROUPS
    KB: tl.constexpr = (K + BLOCK - 1) // BLOCK
    token_block, block, run = placed(tokens, BLOCK_T, BLOCKS, GROUP)

    # which weight: its size, first block and place in the sum
    of = (w0, s0, N0, 0, 0)
    if N1 > 0:
        of = chosen(block >= B0, (w1, s1, N1, B0, N0), of)
    if N2 > 0:
        of = chosen(block >= B1, (w2, s2, N2, B1, N0 + N1), of)
    w, s, size, begin, base = of

    if GROUPS > 1:  # one weight each
        group = tl.program_id(2).to(tl.int64)
        row = group * tokens
        x += row * K
        x_scale += row * (1 if KIND == quantize.INT8 else KB)
        w += group * (K * N0)
        s += group * (N0 if KIND == quantize.INT8 else KB * ((N0 + BLOCK - 1) // BLOCK))
        out += group * N0
    column = (block - begin) * BLOCK_N
    lo = run * RUN
    j = tl.arange(0, BLOCK_N)
    kk = tl.arange(0, BLOCK)
    t = token_block * BLOCK_T + tl.arange(0, BLOCK_T)
    t_mask = t < tokens
    n_mask = j < size - column
    if FORM == LINEAR:
        w += column.to(tl.int64) * K + lo
        n_at = j * K
        step = BLOCK
        k_at = kk
    elif FORM == NZ:
        w += (column // C0).to(tl.int64) * (K * C0) + lo.to(tl.int64) * C0
        n_at = (j // C0) * (K * C0) + j % C0
        step = BLOCK * C0
        k_at = kk * C0
    else:
        w += lo.to(tl.int64) * size + column
        n_at = j
        step = BLOCK * size
        k_at = kk * size
    x_at = t.to(tl.int64) * K
    x += lo

    if CHAINED:
        handover.begin(FIRST)
        handover.follow(FIRST, LATE, SECOND)
    RAGGED_K: tl.constexpr = K % RUN != 0
    if KIND == quantize.INT8:
        acc = tl.zeros([BLOCK_N, BLOCK_T] if SWAP else [BLOCK_T, BLOCK_N], tl.int32)
    else:
        acc = tl.zeros([BLOCK_N, BLOCK_T] if SWAP else [BLOCK_T, BLOCK_N], tl.float32)
    for b in tl.range(0, RUN // BLOCK, num_stages=STAGES):
        k_ok = kk < (K - lo - b * BLOCK if RAGGED_K else BLOCK)
        x_now = x + b * BLOCK
        w_now = w + tl.cast(b, tl.int64) * step
        if SWAP:
            x_tile = _tile(
                x_now + x_at[None, :] + kk[:, None], t_mask[None, :] & k_ok[:, None], KIND, HALF
            )
            w_tile = _tile(
                w_now + n_at[:, None] + k_at[None, :], n_mask[:, None] & k_ok[None, :], KIND, HALF
            )
        else:
            x_tile = _tile(
                x_now + x_at[:, None] + kk[None, :], t_mask[:, None] & k_ok[None, :], KIND, HALF
            )
            w_tile = _tile(
                w_now + n_at[None, :] + k_at[:, None], n_mask[None, :] & k_ok[:, None], KIND, HALF
            )
        if KIND == quantize.INT8:
            if SWAP:
                acc = tl.dot(w_tile, x_tile, acc, out_dtype=tl.int32)
            else:
                acc = tl.dot(x_tile, w_tile, acc, out_dtype=tl.int32)
        else:
            k_block = lo // BLOCK + b
            # past the last block there is nothing to add
            by = tl.load(
                x_scale + t.to(tl.int64) * KB + k_block, mask=t_mask & (k_block < KB), other=0.0
            )
            of_block = s + k_block * tl.cdiv(size, BLOCK) + column // BLOCK
            by *= tl.load(of_block, mask=k_block < KB, other=0.0)
            if SWAP:
                acc += tl.dot(w_tile, x_tile) * by[None, :]
            else:
                acc += tl.dot(x_tile, w_tile) * by[:, None]

    if KIND == quantize.INT8:
        by_t = tl.load(x_scale + t, mask=t_mask, other=0.0)
        by_n = tl.load(s + column + j, mask=n_mask, other=0.0)
        if SWAP:
            acc = acc.to(tl.float32) * by_t[None, :] * by_n[:, None]
        else:
            acc = acc.to(tl.float32) * by_t[:, None] * by_n[None, :]
    n = base + column + j
    t_row = (run.to(tl.int64) * tokens + t) * TOTAL
    at, mask = tile_at(out, t_row, n, t_mask, n_mask, SWAP)
    tl.store(at, acc.to(out.dtype.element_ty), mask=mask)
    if CHAINED and LATE:
        gdc_wait()


def is_direct(weight: Tensor, form: int) -> bool:
    """Whether tensor cores take the bytes of `weight` as they are: e4m3 as a checkpoint has it, and
    a GPU that converts it."""
    fp8 = quantized.kind_of(weight.dtype) == "fp8"
    return fp8 and form == LINEAR.value and gpu.converts_fp8(weight.device)


def is_prompt(x: Rows, weight: Weight, form: int, dtype: torch.dtype, groups: int) -> bool:
    """Whether the product, of this dtype, is one of many tokens on Hopper."""
    many = prompt.supports(x.values, weight.size, groups, dtype)
    if not many or not is_direct(weight.values, form):
        return False
    values, read = (quantize.to_read(of.values)[0] for of in (x, weight))
    return hopper.supports(values, [read])


def _by_prompt(
    x: Rows,
    weight: Weight,
    out: Tensor,
    out_scale: Tensor | None,
    dtype: torch.dtype,
    groups: int,
    *,
    first: bool = False,
    second: bool = False,
    forked: bool = False,
) -> None:
    assert x.scale is not None and weight.scale is not None  # of 8 bits
    prompt.launch(
        quantize.to_read(x.values)[0],
        x.scale,
        quantize.to_read(weight.values)[0],
        weight.scale,
        weight.size,
        out,
        out_scale,
        dtype,
        first=first,
        second=second,
        forked=forked,
        groups=groups,
    )


def product(
    x: Rows,
    weights: Sequence[Weight],
    form: int,
    dtype: torch.dtype,
    *,
    keep_float: bool = False,
    first: bool = False,
    late: bool = False,
    second: bool = False,
    forked: bool = False,
    groups: int = 1,
) -> Tensor:
    """x times the weights joined, all of one kind and form: [runs, T, sum of N], float32 if runs >
    1 or `keep_float`, else `dtype`; `first`, `late` and `forked` as in nz_matmul.py.  `second`:
    behind the op's first kernel, whose outputs the late ones behind this one read as well.
    `groups`: x is [groups T, K], the one weight [groups, ..], and out [runs, T, groups N]."""
    tokens, depth = x.values.shape
    tokens //= groups
    if len(weights) == 1 and not keep_float and is_prompt(x, weights[0], form, dtype, groups):
        out = memory.empty((1, tokens, groups * weights[0].size), dtype, x.values.device)
        _by_prompt(
            x, weights[0], out[0], None, dtype, groups, first=first, second=second, forked=forked
        )
        return out
    given = [weight.size for weight in weights] * groups
    sizes = [weight.size for weight in weights] + [0] * (MOST - len(weights))
    kept = [*weights, *[weights[0]] * (MOST - len(weights))]
    device = x.values.device
    chained = gpu.has_chained_launch(device)
    values, kind = quantize.to_read(x.values)
    read = [quantize.to_read(weight.values)[0] for weight in kept]
    direct = is_direct(weights[0].values, form)
    by_tma = direct and hopper.supports(values, read)
    chosen = tiling.hopper_quantized if by_tma else tiling.quantized
    config = chosen(tokens, given, depth, gpu.num_sms(device))
    run = cdiv(cdiv(depth, config.runs), config.k) * config.k
    runs = cdiv(depth, run)
    out_dtype = torch.float32 if keep_float or runs > 1 else dtype
    out = memory.empty((runs, tokens, sum(given)), out_dtype, device)
    blocks = sum(cdiv(size, config.columns) for size in sizes) * cdiv(tokens, config.tokens)
    scales = [weight.scale for weight in kept]
    if by_tma:
        assert x.scale is not None  # of 8 bits
        hopper.launch(
            values,
            x.scale,
            read,
            scales,
            sizes,
            out,
            run // config.k,
            blocks,
            config,
            first=first,
            late=late,
            second=second,
            forked=forked,
            groups=groups,
        )
        return out
    launches.kernel(_product, blocks, runs, groups)(
        values,
        x.scale,
        *read,
        *scales,
        out,
        tokens,
        K=depth,
        RUN=run,
        N0=sizes[0],
        N1=sizes[1],
        N2=sizes[2],
        FORM=form,
        KIND=kind,
        HALF=kind != quantize.INT8.value and not direct,
        BLOCK_T=config.tokens,
        BLOCK_N=config.columns,
        STAGES=config.stages,
        SWAP=config.swap,
        GROUP=config.group,
        GROUPS=groups,
        CHAINED=chained,
        FIRST=first,
        LATE=late,
        SECOND=second,
        num_warps=config.warps,
        launch_pdl=chained and not forked,
    )
    return out


def quantized_product(x: Rows, weight: Weight, dtype: torch.dtype, *, groups: int = 1) -> Rows:
    """As product, of what is_prompt says yes to, the columns in blocks of 128: rounded to `dtype`
    and quantized."""
    tokens, columns = x.values.shape[0] // groups, groups * weight.size
    device = x.values.device
    values = memory.empty((tokens, columns), torch.float8_e4m3fn, device)
    scale = memory.empty((tokens, columns // BLOCK.value), torch.float32, device)
    _by_prompt(x, weight, values, scale, dtype, groups)
    return Rows(values, scale)
