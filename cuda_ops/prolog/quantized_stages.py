# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What both prologs are made of where weights or caches have 8 bits, no op itself.

    products         x by several weights, quantized once
    latent_tokens    sums -> query norm, also as its product takes it; cache rows of either kind
    query_heads      c -> absorbed latent query, rotated query heads
    index_product    c -> sums of the index heads
    index_side       sums, c -> index keys of either kind, head weights; rotated index heads,
                     quantized with their scales in the weights

`query_heads`:

    condition                                         kernels
    Hopper, 96 heads to one a processor, up to 256    hopper/quantized_heads.py
      tokens, e4m3 as a checkpoint has it
    weights of 8 bits                                 quantized_matmul.py then stages.py
    else                                              stages.py

`latent_tokens`, and `index_side`, whose queries of floats are those of stages.py:

    condition    kernels
    any          _latent_tokens

    condition    kernels
    any          _index

Sums are float32 [RUNS, T, N], views of what a product gave.  Rounding is where stages.py rounds,
and quantization is behind it: caches have the bytes of their writers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...dispatch.common import memory, quantized
from ..common import gpu, quantize
from ..common.tiling import cdiv, power_of_two
from ..runtime import launches
from . import quantized_matmul, stages
from .hopper import quantized_heads as hopper_heads
from .nz_matmul import product
from .quantized_matmul import Rows, Weight
from .stages import (
    angle,
    index_key,
    latent_and_key,
    rms_normed,
    rotation_source,
    run_sum,
    store_weights,
    turned,
    weights_of,
)

HEADS = 16  # index heads that one program takes


def products(
    x: Tensor,
    rows: dict[torch.dtype, Rows],
    weights: Sequence[Weight],
    weight_format: str,
    scale_format: str,
    dtype: torch.dtype,
    *,
    first: bool = False,
    late: bool = False,
) -> list[Tensor]:
    """x [T, K] by each weight: sums [RUNS, T, N].  Weights that lie alike share a launch.  `rows`:
    x as weights of a dtype take it, as far as it is there.  `first` and `late` (then all of `rows`
    is there) as for product: x is the op's, and the sums are float32.  Without them a kernel of the
    op has made x, and sums of one run are of `dtype`."""
    keep_float = first or late
    plain = [weight for weight in weights if weight.scale is None]
    groups: dict[tuple[torch.dtype, int], list[Weight]] = {}
    for weight in weights:
        if weight.scale is not None:
            key = weight.values.dtype, weight.form(weight_format)
            groups.setdefault(key, []).append(weight)
    made: dict[int, Tensor] = {}

    def cut(part: Tensor, parts: Sequence[Weight]) -> None:
        for weight, columns in zip(parts, part.split([w.size for w in parts], -1), strict=True):
            made[id(weight)] = columns

    rows, second = dict(rows), False
    for kind, _ in groups:
        if kind not in rows:
            name = quantized.kind_of(kind)
            assert name is not None  # the check said so
            [rows[kind]] = quantized_matmul.activations([(x, None)], name, scale_format)
            first, second = False, not late
    for (kind, form), group in groups.items():
        part = quantized_matmul.product(
            rows[kind],
            group,
            form,
            dtype,
            keep_float=keep_float,
            first=first,
            late=late,
            second=second,
        )
        cut(part, group)
        first, second, late = False, False, True
    if plain:
        given = [(weight.values, weight.size) for weight in plain]
        part = product(x, given, weight_format, keep_float=keep_float, first=first, late=late)
        cut(part, plain)
    return [made[id(weight)] for weight in weights]


@triton.jit
def _store_tiles(
    normed,
    to,
    scales,
    J: tl.constexpr,
    SIZE: tl.constexpr,
    mask,
    alpha,
    KIND: tl.constexpr,
    UE8M0: tl.constexpr,
):
    """Numbers [J] of a token as tiles of SIZE, and the tiles' scales."""
    J_PAD: tl.constexpr = triton.next_power_of_2(J)
    WIDE: tl.constexpr = SIZE if SIZE < J_PAD else J_PAD
    TILES: tl.constexpr = J_PAD // WIDE
    values, scale = quantize.of_floats(tl.reshape(normed, [TILES, WIDE]), alpha, KIND, UE8M0)
    j = tl.arange(0, J_PAD)
    tl.store(to + j, tl.reshape(values, [J_PAD]), mask=(j < J) & mask)
    tile = tl.arange(0, TILES)
    tl.store(scales + tile, scale, mask=(tile < (J + SIZE - 1) // SIZE) & mask)


@triton.jit
def _store_norm(
    down,
    stride,
    gamma,
    smooth,
    query_norm,
    c,
    c_scales,
    eps,
    Q: tl.constexpr,
    RUNS: tl.constexpr,
    KIND: tl.constexpr,
    TILE: tl.constexpr,
    SMOOTH: tl.constexpr,
    UE8M0: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """The query norm of a token, and what its product takes."""
    dtype: tl.constexpr = query_norm.dtype.element_ty
    g = weights_of(gamma, Q)
    by = 1.0
    if SMOOTH:
        by = weights_of(smooth, Q)
    if CHAINED:
        gdc_wait()
    j, mask, normed = rms_normed(down, stride, g, eps, Q, RUNS, dtype)
    tl.store(query_norm + j, normed, mask=mask)
    if KIND != quantize.PLAIN:
        # of numbers that are none a tile keeps zeros
        u = tl.where(mask, normed.to(tl.float32), 0.0) * by
        _store_tiles(u, c, c_scales, Q, TILE, True, 1.0, KIND, UE8M0)


@triton.jit
def _store_row(
    latent,
    stride,
    gamma,
    alpha,
    sin,
    cos,
    kv_row,
    rope_row,
    scales,
    present,
    eps,
    R: tl.constexpr,
    D: tl.constexpr,
    RUNS: tl.constexpr,
    KIND: tl.constexpr,
    ALPHA: tl.constexpr,
    UE8M0: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    dtype: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """The latent and the rotated key of a token, into a row of 8 bits or two of the working
    dtype."""
    fits = 1.0
    if ALPHA:
        fits = tl.load(alpha)
    j, mask, normed, d, d_mask, key = latent_and_key(
        latent, stride, gamma, cos, sin, eps, R, D, RUNS, INTERLEAVED, dtype, CHAINED
    )
    if KIND == quantize.PLAIN:
        tl.store(kv_row + j, normed, mask=mask & present)
    else:
        _store_tiles(normed.to(tl.float32), kv_row, scales, R, 128, present, fits, KIND, UE8M0)
    tl.store(rope_row + d, key.to(rope_row.dtype.element_ty), mask=d_mask & present)


class LatentConstants(NamedTuple):
    """DOWN and LATENT are the columns that lie between the sums of two tokens; kinds, tiles and
    slots are those of what is stored."""

    Q: int
    R: int
    D: int
    DOWN: int
    LATENT: int
    DOWN_RUNS: int
    RUNS: int
    C_KIND: int
    KV_KIND: int
    C_TILE: int
    KV_SLOT: int
    ROPE_SLOT: int
    SCALE_SLOT: int
    SMOOTH: bool
    ALPHA: bool
    UE8M0: bool
    INTERLEAVED: bool
    CHAINED: bool


@triton.jit(do_not_specialize=["tokens", "page", "total", "eps_cq", "eps_ckv"])
def _latent_tokens(
    down,
    latent,
    gamma_cq,
    gamma_ckv,
    smooth,
    alpha,
    sin,
    cos,
    cache_index,
    query_norm,
    c,
    c_scales,
    kv,
    rope,
    scales,
    tokens,
    page,
    total,
    kv_page,
    rope_page,
    scales_page,
    eps_cq,
    eps_ckv,
    C: tl.constexpr,
):
    """One program: a token, and its query norm or its cache row."""
    OF_C: tl.constexpr = (C.Q + C.C_TILE - 1) // C.C_TILE
    token = tl.program_id(0).to(tl.int64)
    role = tl.program_id(1)
    wide = tl.cast(tokens, tl.int64)
    if C.CHAINED:
        gdc_launch_dependents()
    slot = tl.load(cache_index + token).to(tl.int64)
    present = (slot >= 0) & (slot < total)
    slot = tl.where(present, slot, 0)
    outer = slot // page
    inner = slot % page
    if C.C_KIND != quantize.PLAIN:
        c += token * C.Q
        c_scales += token * OF_C
    if role == 0:
        _store_norm(
            down + token * C.DOWN,
            wide * C.DOWN,
            gamma_cq,
            smooth,
            query_norm + token * C.Q,
            c,
            c_scales,
            eps_cq,
            C.Q,
            C.DOWN_RUNS,
            C.C_KIND,
            C.C_TILE,
            C.SMOOTH,
            C.UE8M0,
            C.CHAINED,
        )
    if role == 1:
        _store_row(
            latent + token * C.LATENT,
            wide * C.LATENT,
            gamma_ckv,
            alpha,
            sin + token * C.D,
            cos + token * C.D,
            kv + outer * kv_page + inner * C.KV_SLOT,
            rope + outer * rope_page + inner * C.ROPE_SLOT,
            scales + outer * scales_page + inner * C.SCALE_SLOT,
            present,
            eps_ckv,
            C.R,
            C.D,
            C.RUNS,
            C.KV_KIND,
            C.ALPHA,
            C.UE8M0,
            C.INTERLEAVED,
            query_norm.dtype.element_ty,
            C.CHAINED,
        )


@dataclass(frozen=True)
class Latent:
    """The attention side of a token stage; the caches are written, of two kinds: `rows` names the
    one of 8 bits."""

    gamma_cq: Tensor
    gamma_ckv: Tensor
    eps_cq: float
    eps_ckv: float
    kv_cache: Tensor
    kr_cache: Tensor
    cache_index: Tensor
    sin: Tensor
    cos: Tensor
    interleaved: bool
    kv_quantized: bool
    row_layout: str
    scale_format: str
    alpha: Tensor | None


def latent_tokens(
    down: Tensor, latent: Tensor, of: Latent, kind: str | None, smooth: Tensor | None
) -> tuple[Tensor, Rows]:
    """(query norm [T, Q], the same of `kind`, as its product takes it)"""
    tokens, ranks = down.shape[1:]
    dtype, device = of.gamma_cq.dtype, down.device
    query_norm = memory.empty((tokens, ranks), dtype, device)
    c = Rows(query_norm)
    tile = power_of_two(ranks) if kind == "int8" else quantized.TILE
    if kind is not None:
        c = Rows(
            memory.empty((tokens, ranks), quantized.VALUES[kind], device),
            memory.empty((tokens, cdiv(ranks, tile)), torch.float32, device),
        )
    kv, rope, scales = of.kv_cache, of.kr_cache, of.kv_cache
    kv_kind = quantize.PLAIN.value
    if of.kv_quantized:
        values = of.kv_cache.dtype
        kv, rope, scales = quantized.row_parts(
            of.kv_cache, of.row_layout, values, quantized.rotary_dtype(query_norm)
        )
        kv, kv_kind = quantize.as_bytes(kv), quantize.kind_of(_kind(values))
    pages, page = of.kv_cache.shape[:2]
    chained = gpu.has_chained_launch(device)
    launches.kernel(_latent_tokens, tokens, 2)(
        down,
        latent,
        of.gamma_cq,
        of.gamma_ckv,
        smooth,
        of.alpha,
        of.sin,
        of.cos,
        of.cache_index,
        query_norm,
        quantize.as_bytes(c.values) if kind else None,
        c.scale,
        kv,
        rope,
        scales,
        tokens,
        page,
        pages * page,
        kv.stride(0),
        rope.stride(0),
        scales.stride(0),
        of.eps_cq,
        of.eps_ckv,
        C=LatentConstants(
            Q=ranks,
            R=of.gamma_ckv.shape[0],
            D=of.sin.shape[-1],
            DOWN=down.stride(1),
            LATENT=latent.stride(1),
            DOWN_RUNS=down.shape[0],
            RUNS=latent.shape[0],
            C_KIND=quantize.PLAIN.value if kind is None else quantize.kind_of(kind),
            KV_KIND=kv_kind,
            C_TILE=tile,
            KV_SLOT=kv.stride(1),
            ROPE_SLOT=rope.stride(1),
            SCALE_SLOT=scales.stride(1),
            SMOOTH=kind is not None and smooth is not None,
            ALPHA=of.alpha is not None,
            UE8M0=of.scale_format == "ue8m0",
            INTERLEAVED=of.interleaved,
            CHAINED=chained,
        ),
        num_warps=8 if tokens <= 32 else 4,
        launch_pdl=chained,
    )
    return query_norm, c


def _kind(dtype: torch.dtype) -> str:
    kind = quantized.kind_of(dtype)
    assert kind is not None  # the check said so
    return kind


@triton.jit
def _store_key(
    key,
    stride,
    gamma,
    beta,
    sin,
    cos,
    to,
    scales,
    present,
    eps,
    DI: tl.constexpr,
    D: tl.constexpr,
    RUNS: tl.constexpr,
    KIND: tl.constexpr,
    UE8M0: tl.constexpr,
    HADAMARD: tl.constexpr,
    BF16: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    dtype: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """The index key of a token, into its cache row."""
    j, mask, u = index_key(
        key, stride, gamma, beta, cos, sin, eps, DI, D, RUNS, INTERLEAVED, dtype, CHAINED
    )
    if KIND == quantize.PLAIN:
        tl.store(to + j, u, mask=mask & present)
    else:
        row = quantize.rotated(tl.reshape(u.to(tl.float32), [1, DI]), HADAMARD, BF16)
        values, scale = quantize.of_floats(row, 1.0, KIND, UE8M0)
        tl.store(to + j, tl.reshape(values, [DI]), mask=present)
        scale = quantize.stored(scale, scales.dtype.element_ty)
        one = tl.arange(0, 1)
        tl.store(scales + one, scale, mask=present & (one == 0))


@triton.jit
def _store_queries(
    q,
    stride,
    proj,
    proj_stride,
    cos,
    sin,
    values,
    folded,
    first,
    NI: tl.constexpr,
    DI: tl.constexpr,
    D: tl.constexpr,
    RUNS: tl.constexpr,
    PROJ_RUNS: tl.constexpr,
    KIND: tl.constexpr,
    UE8M0: tl.constexpr,
    HADAMARD: tl.constexpr,
    BF16: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    dtype: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """HEADS index heads of a token: rotated, rounded, quantized; the scales go into the weights."""
    head = first + tl.arange(0, HEADS)
    valid = head < NI
    mask = valid[:, None]
    j = tl.arange(0, DI)
    own, partner = rotation_source(j, D, INTERLEAVED)
    own = tl.where(j < D, own, j)
    partner = tl.where(j < D, partner, j)
    c, s = angle(cos, sin, j, j < D)
    if CHAINED:
        gdc_wait()
    row = q + head[:, None] * DI
    u = run_sum(row + own[None, :], stride, mask & (own >= 0)[None, :], RUNS).to(dtype)
    v = run_sum(row + partner[None, :], stride, mask & (own >= 0)[None, :], RUNS).to(dtype)
    weight = run_sum(proj + head, proj_stride, valid, PROJ_RUNS).to(dtype).to(tl.float32)
    u = u.to(tl.float32)
    x = turned(u, v.to(tl.float32), j[None, :], c[None, :], s[None, :], D)
    x = tl.where((j < D)[None, :], x.to(dtype).to(tl.float32), u)
    x = quantize.rotated(x, HADAMARD, BF16)
    x, scale = quantize.of_floats(x, 1.0, KIND, UE8M0)
    tl.store(values + head[:, None] * DI + j[None, :], x, mask=mask & (j >= 0)[None, :])
    tl.store(folded + head, weight * scale, mask=valid)


class IndexConstants(NamedTuple):
    """KEY and PROJ are the columns that lie between the sums of two tokens; HEADS 0: the queries
    are made elsewhere."""

    DI: int
    D: int
    NI: int
    KEY: int
    PROJ: int
    KEY_RUNS: int
    PROJ_RUNS: int
    RUNS: int
    KIND: int
    HEADS: int
    UE8M0: bool
    HADAMARD: bool
    BF16: bool
    INTERLEAVED: bool
    CHAINED: bool


@triton.jit(do_not_specialize=["tokens", "page", "total", "eps"])
def _index(
    key,
    proj,
    q,
    gamma,
    beta,
    sin,
    cos,
    cache_index,
    keys,
    scales,
    weights,
    values,
    tokens,
    page,
    total,
    keys_page,
    scales_page,
    eps,
    C: tl.constexpr,
):
    """One program: a token, and its index key or a block of its heads; their weights [T, NI] with
    the heads, if those are here."""
    dtype: tl.constexpr = gamma.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    role = tl.program_id(1)
    if C.CHAINED:
        gdc_launch_dependents()
    wide = tl.cast(tokens, tl.int64)
    sin += token * C.D
    cos += token * C.D
    proj += token * C.PROJ
    weights += token * C.NI
    if role == 0:
        slot = tl.load(cache_index + token).to(tl.int64)
        present = (slot >= 0) & (slot < total)
        slot = tl.where(present, slot, 0)
        _store_key(
            key + token * C.KEY,
            wide * C.KEY,
            gamma,
            beta,
            sin,
            cos,
            keys + slot // page * keys_page + slot % page * C.DI,
            scales + slot // page * scales_page + slot % page,
            present,
            eps,
            C.DI,
            C.D,
            C.KEY_RUNS,
            C.KIND,
            C.UE8M0,
            C.HADAMARD,
            C.BF16,
            C.INTERLEAVED,
            dtype,
            C.CHAINED,
        )
        if C.HEADS == 0:
            store_weights(proj, wide * C.PROJ, weights, C.NI, C.PROJ_RUNS)
    elif C.HEADS > 0:
        _store_queries(
            q + token * (C.NI * C.DI),
            wide * (C.NI * C.DI),
            proj,
            wide * C.PROJ,
            cos,
            sin,
            values + token * (C.NI * C.DI),
            weights,
            (role - 1) * C.HEADS,
            C.NI,
            C.DI,
            C.D,
            C.RUNS,
            C.PROJ_RUNS,
            C.KIND,
            C.UE8M0,
            C.HADAMARD,
            C.BF16,
            C.INTERLEAVED,
            C.HEADS,
            dtype,
            C.CHAINED,
        )


@dataclass(frozen=True)
class Index:
    """The indexer's side; `keys` is written, and `scales`, which are None where keys are floats."""

    gamma: Tensor
    beta: Tensor
    eps: float
    keys: Tensor
    scales: Tensor | None
    cache_index: Tensor
    sin: Tensor
    cos: Tensor
    interleaved: bool
    hadamard: bool
    hadamard_round: str
    scale_format: str

    @property
    def kind(self) -> int:
        """Of the cache."""
        if self.scales is None:
            return quantize.PLAIN.value
        return quantize.kind_of(_kind(self.keys.dtype))


def _index_stage(
    key: Tensor, proj: Tensor, q: Tensor | None, values: Tensor | None, weights: Tensor, of: Index
) -> None:
    """Keys into the cache, head weights; with `q` [RUNS, T, NI DI] its quantized heads."""
    tokens, heads = weights.shape
    pages, page = of.keys.shape[:2]
    keys, scales = of.keys, of.keys
    if of.scales is not None:
        keys, scales = quantize.as_bytes(of.keys), of.scales
    chained = gpu.has_chained_launch(key.device)
    launches.kernel(_index, tokens, 1 if q is None else 1 + cdiv(heads, HEADS))(
        key,
        proj,
        q,
        of.gamma,
        of.beta,
        of.sin,
        of.cos,
        of.cache_index,
        keys,
        scales,
        weights,
        None if values is None else quantize.as_bytes(values),
        tokens,
        page,
        pages * page,
        keys.stride(0),
        scales.stride(0),
        of.eps,
        C=IndexConstants(
            DI=of.gamma.shape[0],
            D=of.sin.shape[-1],
            NI=heads,
            KEY=key.stride(1),
            PROJ=proj.stride(1),
            KEY_RUNS=key.shape[0],
            PROJ_RUNS=proj.shape[0],
            RUNS=0 if q is None else q.shape[0],
            KIND=of.kind,
            HEADS=0 if q is None else HEADS,
            UE8M0=of.scale_format == "ue8m0",
            HADAMARD=of.hadamard,
            BF16=of.hadamard_round == "bf16",
            INTERLEAVED=of.interleaved,
            CHAINED=chained,
        ),
        launch_pdl=chained,
    )


def index_product(
    c: Rows,
    weight: Weight,
    weight_format: str,
    of: Index,
    *,
    first: bool = False,
    second: bool = False,
) -> Tensor | None:
    """c W_qb [RUNS, T, NI DI]; None where both are floats, and index_side makes the queries."""
    if weight.scale is not None:
        form = weight.form(weight_format)
        return quantized_matmul.product(
            c, [weight], form, of.gamma.dtype, first=first, second=second
        )
    if of.scales is not None:
        return product(c.values, [(weight.values, weight.size)], weight_format, first=first)
    return None


def index_side(
    key: Tensor,
    proj: Tensor,
    q: Tensor | None,
    c: Rows,
    weight: Weight,
    weight_format: str,
    shape: tuple[int, int],
    of: Index,
) -> tuple[Tensor, Tensor]:
    """Sums of x and of c -> (queries [*shape, NI, DI], weights [*shape, NI]), of 8 bits and folded
    where the cache is, which gets the keys."""
    tokens, heads = proj.shape[1:]
    size, dtype, device = of.gamma.shape[0], of.gamma.dtype, key.device
    query_shape = (*shape, heads, size)
    if of.scales is not None:
        values = memory.empty(query_shape, of.keys.dtype, device)
        weights = memory.empty((tokens, heads), torch.float32, device)
        _index_stage(key, proj, q, values, weights, of)
        return values, weights.view(*shape, heads)
    weights = memory.empty((tokens, heads), dtype, device)
    _index_stage(key, proj, None, None, weights, of)
    if q is None:
        query = stages.index_heads(
            c.values, weight.values, weight_format, size, of.sin, of.cos, shape, of.interleaved
        )
    else:
        query = memory.empty(query_shape, dtype, device)
        stages.index_stage(q, of.sin, of.cos, query, of.interleaved)
    return query, weights.view(*shape, heads)


def is_one_launch(c: Rows, weight: Weight, weight_format: str, w_uk: Tensor, sin: Tensor) -> bool:
    """Whether query_heads is."""
    if weight.scale is None:
        return stages.is_one_launch(c.values, weight.values, weight_format, w_uk, sin)
    direct = quantized_matmul.is_direct(weight.values, weight.form(weight_format))
    return direct and hopper_heads.supports(c.values, weight.values, w_uk, sin.shape[-1])


def query_heads(
    c: Rows,
    weight: Weight,
    weight_format: str,
    w_uk: Tensor,
    sin: Tensor,
    cos: Tensor,
    shape: tuple[int, int],
    interleaved: bool,
    *,
    into: tuple[Tensor, Tensor] | None = None,
    forked: bool = False,
) -> tuple[Tensor, Tensor]:
    """As stages.query_heads, from c as the weight wants it."""
    if weight.scale is None:
        return stages.query_heads(
            c.values,
            weight.values,
            weight_format,
            w_uk,
            sin,
            cos,
            shape,
            interleaved,
            into=into,
            forked=forked,
        )
    query, query_rope = into or stages.query_room(w_uk, sin, shape)
    if is_one_launch(c, weight, weight_format, w_uk, sin):
        assert c.scale is not None  # as the weight has one
        hopper_heads.launch(
            quantize.to_read(c.values)[0],
            c.scale,
            quantize.to_read(weight.values)[0],
            weight.scale,
            w_uk,
            sin,
            cos,
            query,
            query_rope,
            interleaved,
            forked=forked,
        )
        return query, query_rope
    form = weight.form(weight_format)
    q = quantized_matmul.product(c, [weight], form, w_uk.dtype, forked=forked)
    stages.query_stage(q, sin, cos, w_uk, query, query_rope, interleaved)
    return query, query_rope
