# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Attention's output turned back and projected, the first product a group of heads at a time; see
dispatch/reference/deepseek_v4/grouped_o_proj_pto.py.

A kernel ahead turns the dims that carry a rotation, an eighth of a head, and the product takes
those from there and the others from the heads.  Few tokens: products are cut along their depth, and
`_added` adds up the runs in order.  The floor is the weights, once.

    condition                           kernels
    weights of 8 bits                   _turned, prolog/quantized_matmul.py then _added,
                                        prolog/quantized_stages.py then _added
    D in 64s, of which 64 are turned    _last, prolog/nz_matmul.py then _added,
                                        prolog/quantized_stages.py then _added
    no rotation                         prolog/nz_matmul.py then _added,
                                        prolog/quantized_stages.py then _added
    else                                _turned, prolog/nz_matmul.py then _added,
                                        prolog/quantized_stages.py then _added

Fp8 whose blocks of 128 are parts of heads: `_turned` and the first `_added` quantize as well; of
many tokens on Hopper the first product does so itself, and no `_added` runs.

`turned_back`, of the whole layer without its projection:

    condition    kernels
    any          _turned
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from typing_extensions import Unpack

from ...dispatch.common import memory, nz, quantized
from ...dispatch.ops.deepseek_v4.grouped_o_proj_pto import Arguments
from ..common import gpu, handover, quantize
from ..common.tiling import TURNED, cdiv, power_of_two
from ..prolog import nz_matmul, quantized_matmul
from ..prolog import stages as prolog
from ..prolog.quantized_matmul import Rows, Weight
from ..prolog.quantized_stages import products
from ..prolog.stages import run_sum
from ..runtime import launches

BLOCK = 1024  # numbers that a program of _added takes
ROWS = 32  # heads of tokens that a program of _last takes
WORKING = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


@triton.jit(do_not_specialize=["size"])
def _added(
    partial,
    out,
    scales,
    size,
    RUNS: tl.constexpr,
    KIND: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """KIND: of out, which is quantized in blocks of 128 numbers once they are rounded."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if CHAINED:
        gdc_launch_dependents()
        gdc_wait()
    acc = run_sum(partial + at, tl.cast(size, tl.int64), at < size, RUNS)
    if KIND == quantize.PLAIN:
        tl.store(out + at, acc.to(out.dtype.element_ty), mask=at < size)
    else:
        TILES: tl.constexpr = BLOCK // quantized_matmul.BLOCK
        tiles = tl.reshape(acc.to(DTYPE).to(tl.float32), [TILES, BLOCK // TILES])
        values, scale = quantize.of_floats(tiles, 1.0, KIND, True)
        tl.store(out + at, tl.reshape(values, [BLOCK]), mask=at < size)
        tile = tl.program_id(0).to(tl.int64) * TILES + tl.arange(0, TILES)
        tl.store(scales + tile, scale, mask=tile < size // quantized_matmul.BLOCK)


@triton.jit(do_not_specialize=["rows"])
def _last(
    x,
    sin,
    cos,
    out,
    rows,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    DR: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """The dims of heads that are turned, back, into out [T, HEADS, DR]."""
    row = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    j = tl.arange(0, DR)
    angle = (row // HEADS * DR)[:, None] + 2 * tl.arange(0, DR // 2)[None, :]
    there = (row < rows)[:, None]
    if CHAINED:
        handover.begin(True)
    u = tl.load(x + (row * D)[:, None] + (D - DR + j)[None, :], mask=there, other=0.0)
    c = tl.load(cos + angle, mask=there, other=0.0).to(tl.float32)
    s = tl.load(sin + angle, mask=there, other=0.0).to(tl.float32)
    a, b = tl.split(tl.reshape(u.to(tl.float32), [BLOCK, DR // 2, 2]))
    turned = tl.reshape(tl.join(a * c + b * s, b * c - a * s), [BLOCK, DR])
    to = out + (row * DR)[:, None] + j[None, :]
    tl.store(to, turned.to(out.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["tokens"])
def _turned(
    x,
    sin,
    cos,
    out,
    scales,
    tokens,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    DR: tl.constexpr,
    GROUPS: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
    FIRST: tl.constexpr,
):
    """One program: heads of a token, turned back, into out [GROUPS, T, HEADS / GROUPS, D].  KIND:
    of out, which is quantized in blocks of 128 dims of a power of two once they are rounded."""
    OF_GROUP: tl.constexpr = HEADS // GROUPS
    BLOCKS: tl.constexpr = (HEADS + BLOCK - 1) // BLOCK
    ODD: tl.constexpr = (D - DR) % 2  # pairs are of an odd dim and the next
    PAD: tl.constexpr = triton.next_power_of_2(D + ODD)
    token = (tl.program_id(0) // BLOCKS).to(tl.int64)
    head = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    j = tl.arange(0, PAD) - ODD
    angle = 2 * tl.arange(0, PAD // 2) - ODD - (D - DR)
    there = head < HEADS
    mask = there[:, None] & ((j >= 0) & (j < D))[None, :]
    at = token * (HEADS * D) + (head * D)[:, None]
    to = (head // OF_GROUP * tl.cast(tokens, tl.int64) + token) * OF_GROUP + head % OF_GROUP
    # x takes longest to come; a kernel of the op ahead may still be making it
    if CHAINED and not FIRST:
        gdc_launch_dependents()
    else:
        handover.begin(CHAINED)
        u = tl.load(x + at + j[None, :], mask=mask, other=0.0)
    turns = (angle >= 0) & (angle < DR)
    c = tl.load(cos + token * DR + angle, mask=turns, other=1.0).to(tl.float32)[None, :]
    s = tl.load(sin + token * DR + angle, mask=turns, other=0.0).to(tl.float32)[None, :]
    if CHAINED and not FIRST:
        gdc_wait()
        u = tl.load(x + at + j[None, :], mask=mask, other=0.0)
    u = u.to(tl.float32)
    first, second = tl.split(tl.reshape(u, [BLOCK, PAD // 2, 2]))
    turned = tl.join(first * c + second * s, second * c - first * s)
    turned = tl.reshape(turned, [BLOCK, PAD])
    out_at = out + (to * D)[:, None] + j[None, :]
    if KIND == quantize.PLAIN:
        tl.store(out_at, turned.to(out.dtype.element_ty), mask=mask)
    else:
        TILES: tl.constexpr = D // quantized_matmul.BLOCK
        rounded = turned.to(x.dtype.element_ty).to(tl.float32)
        tiles = tl.reshape(rounded, [BLOCK * TILES, D // TILES])
        values, scale = quantize.of_floats(tiles, 1.0, KIND, True)
        tl.store(out_at, tl.reshape(values, [BLOCK, D]), mask=mask)
        scale_at = scales + (to * TILES)[:, None] + tl.arange(0, TILES)[None, :]
        tl.store(scale_at, tl.reshape(scale, [BLOCK, TILES]), mask=there[:, None])


def _whole(partial: Tensor, dtype: torch.dtype) -> Tensor:
    """[runs, T, N] of a product, added up and rounded: [T, N]."""
    if partial.shape[0] == 1:
        return partial[0]
    out = memory.empty(partial.shape[1:], dtype, partial.device)
    _add(partial, out, None, dtype)
    return out


def _add(partial: Tensor, out: Tensor, scales: Tensor | None, dtype: torch.dtype) -> None:
    chained = gpu.has_chained_launch(partial.device)
    size = partial[0].numel()
    launches.kernel(_added, cdiv(size, BLOCK))(
        partial,
        out,
        scales,
        size,
        RUNS=partial.shape[0],
        KIND=quantize.PLAIN.value if scales is None else quantize.FP8.value,
        DTYPE=WORKING[dtype],
        BLOCK=BLOCK,
        CHAINED=chained,
        num_warps=4,
        launch_pdl=chained,
    )


def _quantized_sum(partial: Tensor, dtype: torch.dtype) -> Rows:
    """[runs, T, N] of a product, added up, rounded and quantized in blocks that divide N."""
    _, tokens, columns = partial.shape
    rows = _room(tokens, columns, partial.device)
    _add(partial, quantize.as_bytes(rows.values), rows.scale, dtype)
    return rows


def _room(tokens: int, depth: int, device: torch.device) -> Rows:
    """For values and scales of blocks that divide `depth`."""
    values = memory.empty((tokens, depth), torch.float8_e4m3fn, device)
    tiles = depth // quantized.TILE
    return Rows(values, memory.empty((tokens, tiles), torch.float32, device))


def unsupported(attn_out: Tensor, **_: Any) -> str | None:
    return prolog.unsupported(attn_out)


def forward(**a: Unpack[Arguments]) -> Tensor:
    attn_out, w_o_a, weight_format = a["attn_out"], a["w_o_a"], a["weight_format"]
    front, dtype = attn_out.shape[:2], attn_out.dtype
    hidden, ranks = (nz.columns_of(w, weight_format) for w in (a["w_o_b"], w_o_a))
    if front.numel() == 0 or hidden == 0:
        return memory.empty((*front, hidden), dtype, attn_out.device)
    sin, cos, scale = a["rope_sin"], a["rope_cos"], a["dequant_scale_w_o_a"]
    of_hidden = Weight(a["w_o_b"], hidden, a["dequant_scale_w_o_b"])
    kind = quantized.kind_of(of_hidden.values.dtype)
    quantizes = kind == "fp8" and len(w_o_a) * ranks % quantized.TILE == 0
    y: Tensor | Rows
    if scale is None:
        y = _groups(attn_out, w_o_a, weight_format, sin, cos, ranks)
    else:
        weight = Weight(w_o_a, ranks, scale)
        y = _quantized_groups(attn_out, weight, weight_format, sin, cos, quantizes)
    rows = {}
    if quantizes and not isinstance(y, Rows):
        y = _quantized_sum(y, dtype)
    if isinstance(y, Rows):
        rows[of_hidden.values.dtype] = y
        x = y.values
    else:
        x = _whole(y, dtype)
    [out] = products(x, rows, [of_hidden], weight_format, "ue8m0", dtype)
    return _whole(out, dtype).view(*front, hidden)


def _groups(
    attn_out: Tensor, w: Tensor, weight_format: str, sin: Tensor, cos: Tensor, ranks: int
) -> Tensor:
    """Turned back and multiplied, a group of heads by its weight: [runs, T, G Ro]."""
    heads, size = attn_out.shape[2:]
    rotary, groups = sin.shape[-1], w.shape[0]
    x, turned = attn_out, None
    if rotary == TURNED and size % rotary == 0:
        turned = _last_turned(attn_out, sin, cos)
    elif rotary > 0:
        x = _turned_back(attn_out, sin, cos, 1, first=True)
    return nz_matmul.product(
        x.view(-1, heads * size),
        [(w if groups > 1 else w[0], ranks)],
        weight_format,
        first=rotary == 0,
        groups=groups,
        turned=turned,
        size=size if turned is not None else 0,
    )


def _quantized_groups(
    attn_out: Tensor, w: Weight, weight_format: str, sin: Tensor, cos: Tensor, quantizes: bool
) -> Tensor | Rows:
    """The same, quantized, by a weight of 8 bits for each group.  `quantizes`: the sums are to be
    quantized, and already are where the product itself does it."""
    kind = quantized.kind_of(w.values.dtype)
    assert kind is not None  # the check said so
    groups, size = w.values.shape[0], attn_out.shape[-1]
    if kind == "fp8" and size % quantized.TILE == 0 and size == power_of_two(size):
        tokens = attn_out.shape[0] * attn_out.shape[1]
        depth = attn_out.shape[2] // groups * size
        rows = _room(groups * tokens, depth, attn_out.device)
        _turn(attn_out, sin, cos, quantize.as_bytes(rows.values), rows.scale, groups, first=True)
    else:
        x = _turned_back(attn_out, sin, cos, groups, first=True)
        [rows] = quantized_matmul.activations([(x.flatten(0, 1), None)], kind, "ue8m0")
    form, dtype = Weight(w.values[0], w.size, w.scale).form(weight_format), attn_out.dtype
    whole = quantizes and w.size % quantized.TILE == 0
    if whole and quantized_matmul.is_prompt(rows, w, form, dtype, groups):
        return quantized_matmul.quantized_product(rows, w, dtype, groups=groups)
    return quantized_matmul.product(rows, [w], form, dtype, groups=groups)


def turned_back(attn_out: Tensor, rope_sin: Tensor, rope_cos: Tensor) -> Tensor:
    """What `forward` multiplies, by itself."""
    return _turned_back(attn_out, rope_sin, rope_cos, 1).view(attn_out.shape)


def _turned_back(
    attn_out: Tensor, sin: Tensor, cos: Tensor, groups: int, *, first: bool = False
) -> Tensor:
    """[G, T, N/G D]; `first`: an op starts here."""
    batch, steps, heads, size = attn_out.shape
    shape = (groups, batch * steps, heads // groups * size)
    out = memory.empty(shape, attn_out.dtype, attn_out.device)
    if out.numel():
        _turn(attn_out, sin, cos, out, None, groups, first=first)
    return out


def _turn(
    attn_out: Tensor,
    sin: Tensor,
    cos: Tensor,
    out: Tensor,
    scales: Tensor | None,
    groups: int,
    *,
    first: bool,
) -> None:
    batch, steps, heads, size = attn_out.shape
    block = max(1, min(power_of_two(heads), BLOCK * 2 // power_of_two(size)))
    chained = gpu.has_chained_launch(attn_out.device)
    tokens = batch * steps
    launches.kernel(_turned, tokens * cdiv(heads, block))(
        attn_out,
        sin,
        cos,
        out,
        scales,
        tokens,
        HEADS=heads,
        D=size,
        DR=sin.shape[-1],
        GROUPS=groups,
        KIND=quantize.PLAIN.value if scales is None else quantize.to_write(attn_out.device),
        BLOCK=block,
        CHAINED=chained,
        FIRST=first,
        num_warps=4,
        launch_pdl=chained,
    )


def _last_turned(attn_out: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
    """The last dims of each head, turned back: [T, N, Dr]; the op starts here."""
    batch, steps, heads, size = attn_out.shape
    rows, rotary = batch * steps * heads, sin.shape[-1]
    out = memory.empty((batch * steps, heads * rotary), attn_out.dtype, attn_out.device)
    chained = gpu.has_chained_launch(attn_out.device)
    launches.kernel(_last, cdiv(rows, ROWS))(
        attn_out,
        sin,
        cos,
        out,
        rows,
        HEADS=heads,
        D=size,
        DR=rotary,
        BLOCK=ROWS,
        CHAINED=chained,
        num_warps=4,
        launch_pdl=chained,
    )
    return out
