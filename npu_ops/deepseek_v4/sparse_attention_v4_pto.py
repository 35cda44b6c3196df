# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""DeepSeek-V4's layer in few launches, where all weights of the attention are NZ.

    of_x            cube            x by [W_dq | W_kv | W_idx_proj] and the compressors' weights
    of_tokens       vector cores    norms, window rows, head weights; which rows and entries each
                                    token sees
    entries         vector cores    a compressor's entries that close, to their pages
    prolog/product  cube            c by [W_uq | W_idx_qb]
    of_heads        vector cores    norms and rotations of the heads; the compressors' states
    indexer         scores, top-k   CSA: the chosen entries
    attention       sparse_attn_sharedkv.py
    output          grouped_o_proj_pto.py

`entries` alone reads states and `of_heads` alone writes them: all up to it is one stage of the
launcher, which is begun anew as a whole, it is one by itself, and all behind it is another.  With
row-major weights, rows without room or nothing to do: the ops' own launchers, a stage each.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from ...dispatch.common import compressed, layer_v4, memory, nz
from ...dispatch.common.sharedkv import scale_of
from ..caches import quantize_index_query
from ..common import cores, entry, tiling, tune
from ..common.ragged import PAGED
from ..indexer import lightning_indexer, quant_lightning_indexer
from ..prolog import product
from ..prolog.product import _tiles
from . import (
    compressor,
    grouped_o_proj_pto,
    kv_quant_sparse_attn_sharedkv,
    sharedkv_prolog_pto,
    sparse_attn_sharedkv,
)
from .compressor import _products, _states, entries_of
from .sharedkv_prolog_pto import _head_weights, _query_norms, _turn_heads, _window_rows
from .sparse_attn_sharedkv import LAID_OUT, PICKED, Plan, attend, notes, reach_of, source_of

_MODULES = (
    sharedkv_prolog_pto,
    compressor,
    quantize_index_query,
    lightning_indexer,
    quant_lightning_indexer,
    sparse_attn_sharedkv,
    kv_quant_sparse_attn_sharedkv,
    grouped_o_proj_pto,
)
_PARTS = 8  # of the depth, at most
_PART = 16_000  # numbers that are loaded while a part's few copies of the next launch begin
_CACHED = 3  # how many times as fast the cache is as the memory

REASONS = layer_v4.Stages(
    *[*(module.unsupported for module in _MODULES), grouped_o_proj_pto.unsupported]
)
STAGES = layer_v4.Stages(
    *[*(module.forward for module in _MODULES), grouped_o_proj_pto.turned_back]
)
_BY_ITSELF = layer_v4.Stages(*(partial(tune.stage, each) for each in STAGES))


@entry.jit(
    do_not_specialize=[
        "rows", "depth", "parts", "out_row", "columns0", "columns1", "columns2", "width", "kv_row",
        "gate_row", "index_width", "index_kv_row", "index_gate_row",
    ]
)  # fmt: skip
def of_x(
    x, rows, depth, parts, out_row, w0, out0, columns0, w1, out1, columns1, w2, out2, columns2,
    kv, gate, product, width, kv_row, gate_row,
    index_kv, index_gate, index_product, index_width, index_kv_row, index_gate_row,
    WHOLE_M: tl.constexpr, WHOLE_N: tl.constexpr, WHOLE_K: tl.constexpr, WHOLE_C: tl.constexpr,
    WHOLE_S: tl.constexpr, ROWS: tl.constexpr, PANELS: tl.constexpr, DEPTH: tl.constexpr,
    COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Parts of the depth: out0, out1, out2 [parts, rows, out_row], beside one another; a
    compressor's product [parts, rows, 2 * width]."""
    part = rows.to(tl.int64) * out_row
    first = rows * 0
    if kv is not None:
        of_part = rows.to(tl.int64) * (2 * width)
        first = _products(
            x, kv, product, width, first, rows, depth, parts, depth, kv_row, of_part,
            WHOLE_M, WHOLE_C, WHOLE_S, ROWS, COLUMNS, STEP,
        )  # fmt: skip
        first = _products(
            x, gate, product + width, width, first, rows, depth, parts, depth, gate_row, of_part,
            WHOLE_M, WHOLE_C, WHOLE_S, ROWS, COLUMNS, STEP,
        )  # fmt: skip
    if index_kv is not None:
        of_part = rows.to(tl.int64) * (2 * index_width)
        first = _products(
            x, index_kv, index_product, index_width, first, rows, depth, parts, depth,
            index_kv_row, of_part, WHOLE_M, WHOLE_C, WHOLE_S, ROWS, COLUMNS, STEP,
        )  # fmt: skip
        first = _products(
            x, index_gate, index_product + index_width, index_width, first, rows, depth, parts,
            depth, index_gate_row, of_part, WHOLE_M, WHOLE_C, WHOLE_S, ROWS, COLUMNS, STEP,
        )  # fmt: skip
    first = _tiles(
        x, w0, out0, columns0, out_row, first, rows, depth, parts, part,
        WHOLE_M, WHOLE_N, WHOLE_K, ROWS, PANELS, DEPTH,
    )  # fmt: skip
    first = _tiles(
        x, w1, out1, columns1, out_row, first, rows, depth, parts, part,
        WHOLE_M, WHOLE_N, WHOLE_K, ROWS, PANELS, DEPTH,
    )  # fmt: skip
    if w2 is not None:
        _tiles(
            x, w2, out2, columns2, out_row, first, rows, depth, parts, part,
            WHOLE_M, WHOLE_N, WHOLE_K, ROWS, PANELS, DEPTH,
        )  # fmt: skip


@entry.jit(
    do_not_specialize=[
        "rows", "steps", "requests", "x_row", "parts", "rank", "columns", "pages", "page",
        "page_step", "epsilon", "ratio", "width", "window", "ori_reach", "cmp_reach", "ori_stride",
        "cmp_stride", "ori_pages", "cmp_pages", "ori_page", "cmp_page", "ori_page_rows",
        "cmp_page_rows",
    ]
)  # fmt: skip
def of_tokens(
    x, sin, cos, table, act_seqs, seqused, gamma_cq, query_norm, gamma_kv, cache, weights,
    rows, steps, requests, x_row, parts, rank, columns, pages, page, page_step, epsilon,
    plan, ori_table, cmp_table, ratio, width, window, ori_reach, cmp_reach, ori_stride, cmp_stride,
    ori_pages, cmp_pages, ori_page, cmp_page, ori_page_rows, cmp_page_rows,
    SIZE: tl.constexpr, ROTARY: tl.constexpr, HEADS: tl.constexpr, USED: tl.constexpr,
    NEAR: tl.constexpr, FAR: tl.constexpr, WIDTH: tl.constexpr, PIECE: tl.constexpr,
    multibuffer: tl.constexpr,
):  # fmt: skip
    """x [parts, rows, rank + SIZE + HEADS].  Each pass begins at the core where the one before it
    ended."""
    part = rows.to(tl.int64) * x_row
    _query_norms(
        x, gamma_cq, query_norm, act_seqs, seqused, rows, steps, x_row, parts, part, rank, epsilon,
        USED, WIDTH,
    )  # fmt: skip
    core = rows % tl.num_programs(0)
    _window_rows(
        x + rank, gamma_kv, sin, cos, table, act_seqs, seqused, cache, core, rows, steps, x_row,
        parts, part, columns, pages, page, page_step, epsilon, SIZE, ROTARY, USED,
    )  # fmt: skip
    core = (core + rows) % tl.num_programs(0)
    if HEADS > 0:
        _head_weights(
            x + rank + SIZE, weights, act_seqs, seqused, core, rows, steps, x_row, parts, part,
            HEADS, USED,
        )  # fmt: skip
        core = (core + rows) % tl.num_programs(0)
    notes(
        plan, act_seqs, seqused, act_seqs, act_seqs, act_seqs, ori_table, cmp_table, core,
        steps, requests, width, window, ratio, ori_reach, cmp_reach, ori_stride, cmp_stride,
        ori_pages, cmp_pages, ori_page, cmp_page, ori_page_rows, cmp_page_rows,
        False, USED, PAGED, True, NEAR, FAR, PIECE,
    )  # fmt: skip


@entry.jit(
    do_not_specialize=[
        "steps", "requests", "each", "ratio", "parts", "out_part", "state_page", "state_row",
        "state_columns", "state_pages", "state_rows", "angle_row", "epsilon", "entry_page",
        "scales_page", "entry_row", "entry_columns", "entry_pages", "entry_rows",
    ]
)  # fmt: skip
def entries(
    product, ape, gamma, state, state_table, sin, cos, used, act_seqs, cache, scales, table,
    steps, requests, each, ratio, parts, out_part, state_page, state_row, state_columns,
    state_pages, state_rows, angle_row, epsilon, entry_page, scales_page, entry_row,
    entry_columns, entry_pages, entry_rows,
    SIZE: tl.constexpr, ROTARY: tl.constexpr, COFF: tl.constexpr, RING: tl.constexpr,
    CHANNELS: tl.constexpr, ROWS: tl.constexpr, multibuffer: tl.constexpr,
):  # fmt: skip
    """Those of one compressor that close."""
    entries_of(
        product, ape, gamma, state, state_table, sin, cos, used, act_seqs, cache, scales, table, 0,
        steps, requests, each, ratio, parts, out_part, state_page, state_row, state_columns,
        state_pages, state_rows, angle_row, epsilon, entry_page, scales_page, entry_row,
        entry_columns, entry_pages, entry_rows, SIZE, ROTARY, COFF, RING, ROWS, CHANNELS,
    )  # fmt: skip


@entry.jit(
    do_not_specialize=[
        "rows", "steps", "requests", "heads", "index_heads", "epsilon", "ratio", "parts",
        "out_part", "index_part", "state_page", "index_state_page", "state_row", "state_columns",
        "state_pages", "state_rows",
    ]
)  # fmt: skip
def of_heads(
    query, to_query, index, to_index, sin, cos, act_seqs, seqused, rows, steps, requests, heads,
    index_heads, epsilon, product, ape, state, index_product, index_ape, index_state, state_table,
    used, ratio, parts, out_part, index_part, state_page, index_state_page, state_row,
    state_columns, state_pages, state_rows,
    SIZE: tl.constexpr, INDEX: tl.constexpr, ROTARY: tl.constexpr, USED: tl.constexpr,
    COFF: tl.constexpr, RING: tl.constexpr, HEAD_TILE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    core = _turn_heads(
        query, to_query, sin, cos, act_seqs, seqused, 0, rows, steps, heads, epsilon,
        SIZE, ROTARY, USED, True, HEAD_TILE,
    )  # fmt: skip
    if index is not None:
        core = _turn_heads(
            index, to_index, sin, cos, act_seqs, seqused, core, rows, steps, index_heads, epsilon,
            INDEX, ROTARY, USED, False, HEAD_TILE,
        )  # fmt: skip
    if product is not None:
        core = _states(
            product, ape, state, state_table, used, used, act_seqs, core, steps, requests, rows,
            SIZE, ratio, parts, out_part, state_page, state_row, state_columns, state_pages,
            state_rows, False, COFF, RING, WIDTH, True,
        )  # fmt: skip
    if index_product is not None:
        _states(
            index_product, index_ape, index_state, state_table, used, used, act_seqs, core, steps,
            requests, rows, INDEX, ratio, parts, index_part, index_state_page, state_row,
            state_columns, state_pages, state_rows, False, COFF, RING, WIDTH, True,
        )  # fmt: skip


def unsupported(**arguments: Any) -> str | None:
    return layer_v4.Layer(**arguments).unsupported(REASONS)


def forward(**arguments: Any) -> Tensor:
    a = layer_v4.Layer(**arguments)
    if not _in_few(a):
        return a.run(_BY_ITSELF)
    of_call = _Few(a)
    query, query_index, weights = tune.stage(of_call.projected)
    tune.stage(of_call.turned, query, query_index)
    out: Tensor = tune.stage(of_call.attended, query, query_index, weights)
    return out


def _in_few(a: layer_v4.Layer) -> bool:
    """Whether all weights of the attention are NZ, and there is something to do with every
    tensor."""
    tiled = [a.w_dq, a.w_uq, a.w_kv]
    tiled += [w for w in (a.w_idx_qb, a.w_idx_proj) if w is not None]
    there = [
        a.x, a.ori_kv, a.ori_block_table, a.cmp_kv, a.cmp_block_table, a.cmp_state,
        a.state_block_table, a.idx_state, a.idx_k,
    ]  # fmt: skip
    return all(nz.is_nz(w, a.weight_format) for w in tiled) and all(
        x is None or x.numel() > 0 for x in there
    )


class _Few:
    """A call, whose stages share what is made here."""

    def __init__(self, a: layer_v4.Layer) -> None:
        self.a = a
        self.requests, self.steps, self.hidden = a.x.shape
        self.rows, self.rank = self.requests * self.steps, a.gamma_cq.shape[0]
        self.size, self.rotary = a.gamma_kv.shape[0], a.sin.shape[-1]
        self.heads = nz.columns_of(a.w_uq, a.weight_format) // self.size
        self.index_heads = self.index = 0
        if a.gamma_idx is not None:
            self.index_heads = nz.columns_of(a.w_idx_proj, a.weight_format)
            self.index = a.gamma_idx.shape[0]
        self.coff = 1 if a.w_cmp_kv is None else a.w_cmp_kv.shape[0] // self.size
        self._cut()
        # [parts, rows, kv and z] of either compressor
        self.product = self._product(a.w_cmp_kv)
        self.index_product = self._product(a.w_idx_kv)
        query = self._new(self.rows, self.heads, self.size)
        near = source_of(
            a.ori_kv, a.ori_block_table, None, None, a.ori_win_left + 1, False, query
        )  # fmt: skip
        far = source_of(a.cmp_kv, a.cmp_block_table, None, None, None, False, query)
        if self.index:
            far = replace(far, how=LAID_OUT.value, kind=PICKED.value, count=a.sparse_count)
        self.query, self.plan = query, Plan(near, far, self.rows, query.device)

    def _new(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return memory.empty(shape, dtype or self.a.x.dtype, self.a.x.device)

    def _cut(self) -> None:
        """Tiles, and the parts of the depth with which a core of 24 waits for the least numbers."""
        self.config = product.by_height("sparse_attention_v4_pto.of_x", self.rows)
        height, step = self.config.tiles["ROWS"], self.config.tiles["DEPTH"]
        wide, across = 16 * self.config.tiles["PANELS"], self.config.tiles["COLUMNS"]
        columns = [self.rank, self.size, self.index_heads]
        compressed_ = [2 * self.coff * self.size, 2 * self.coff * self.index]
        if self.a.w_cmp_kv is None:
            compressed_ = []
        high = -(-self.rows // height)
        self.tiles = high * (
            sum(-(-n // wide) for n in columns) + sum(-(-n // across) for n in compressed_)
        )
        # a compressor's tile counts as those of NZ weights that are as wide
        units = high * (sum(-(-n // wide) for n in columns) + sum(compressed_) // wide)

        def cost(n: int) -> float:
            turns = -(-n * units // tiling.A3.cube_cores)
            sums = 4 * n * self.rows * sum(columns + compressed_) / tiling.A3.cube_cores
            x = min(self.rows, height) / _CACHED
            return turns * tiling.up(self.hidden // n, step) * (wide + x) + sums + n * _PART

        found = (n for n in range(2, _PARTS + 1) if self.hidden % (n * step) == 0)
        self.parts = min([1, *found], key=cost)

    def _product(self, w: Tensor | None) -> Tensor | None:
        if w is None:
            return None
        return self._new(self.parts, self.rows, 2 * w.shape[0], dtype=torch.float32)

    @property
    def _lengths(self) -> dict[str, Any]:
        a = self.a
        return dict(
            act_seqs=a.act_seqs, seqused=a.act_seqs if a.seqused is None else a.seqused,
            USED=a.seqused is not None, rows=self.rows, steps=self.steps, requests=self.requests,
            sin=a.sin, cos=a.cos, epsilon=a.rms_norm_eps, SIZE=self.size, ROTARY=self.rotary,
        )  # fmt: skip

    @property
    def _states(self) -> dict[str, Any]:
        """Of both compressors, as far as they are there."""
        a, table = self.a, self.a.state_block_table
        given: dict[str, Any] = dict.fromkeys(
            ("out_part", "index_part", "state_page", "index_state_page", "state_row",
             "state_columns", "state_pages", "state_rows"), 0,
        )  # fmt: skip
        if self.product is not None and a.cmp_state is not None and table is not None:
            given |= dict(
                out_part=self.product.stride(0), state_page=a.cmp_state.stride(0),
                state_row=table.stride(0), state_columns=table.shape[1],
                state_pages=a.cmp_state.shape[0], state_rows=a.cmp_state.shape[1],
            )  # fmt: skip
        if self.index_product is not None and a.idx_state is not None:
            given |= dict(
                index_part=self.index_product.stride(0), index_state_page=a.idx_state.stride(0)
            )
        return given | dict(
            product=self.product, ape=a.cmp_ape, state=a.cmp_state,
            index_product=self.index_product, index_ape=a.idx_ape, index_state=a.idx_state,
            state_table=table, ratio=max(a.cmp_ratio, 1), parts=self.parts, COFF=self.coff,
            RING=a.state_mode == compressed.RING,
        )  # fmt: skip

    def projected(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """(queries, index queries, head weights) before their norms and rotations; rows, entries
        and index keys are written."""
        a, config = self.a, self.config
        wide = self.rank + self.size + self.index_heads
        sums = self._new(self.parts, self.rows, wide, dtype=torch.float32)
        outs = sums[0].split([self.rank, self.size, self.index_heads], dim=1)
        given: dict[str, Any] = {}
        for name, w in (
            ("kv", a.w_cmp_kv), ("gate", a.w_cmp_gate), ("index_kv", a.w_idx_kv),
            ("index_gate", a.w_idx_gate),
        ):  # fmt: skip
            given |= {name: w, f"{name}_row": 0 if w is None else w.stride(0)}
        widths = [self.coff * self.size, self.coff * self.index]
        columns = [self.rank, self.size, self.index_heads]
        of_x[(min(self.parts * self.tiles, cores.cube()),)](
            a.x.view(self.rows, self.hidden), self.rows, self.hidden, self.parts, wide,
            a.w_dq, outs[0], columns[0], a.w_kv, outs[1], columns[1], a.w_idx_proj,
            None if a.w_idx_proj is None else outs[2], columns[2], product=self.product,
            index_product=self.index_product, width=widths[0], index_width=widths[1], **given,
            **product.whole_tiles(config, self.rows, self.hidden),
            WHOLE_N=all(n % (16 * config.tiles["PANELS"]) == 0 for n in columns),
            WHOLE_C=all(n % config.tiles["COLUMNS"] == 0 for n in widths),
            WHOLE_S=self.hidden % config.tiles["STEP"] == 0, **config.keywords,
        )  # fmt: skip
        query_norm = self._new(self.rows, self.rank)
        weights = self._new(self.requests, self.steps, self.index_heads) if self.index else None
        self._of_tokens(sums, query_norm, weights)
        self._close(self.product, a.cmp_ape, a.gamma_cmp, a.cmp_state, a.cmp_kv, None)
        self._close(
            self.index_product, a.idx_ape, a.gamma_idx, a.idx_state, a.idx_k, a.idx_k_scale
        )  # fmt: skip
        of_c = [(a.w_uq, self.query.view(self.rows, -1))]
        query_index = None
        if a.w_idx_qb is not None:
            query_index = self._new(self.requests, self.steps, self.index_heads, self.index)
            of_c.append((a.w_idx_qb, query_index.view(self.rows, -1)))
        product.weights(query_norm, of_c, a.weight_format)
        return self.query, query_index, weights

    def _of_tokens(self, sums: Tensor, query_norm: Tensor, weights: Tensor | None) -> None:
        a, near, far = self.a, self.plan.near, self.plan.far
        passes = 4 if self.index else 3
        of_tokens[(min(passes * self.rows, cores.vector()),)](
            sums, table=a.ori_block_table, gamma_cq=a.gamma_cq, query_norm=query_norm,
            gamma_kv=a.gamma_kv, cache=a.ori_kv, weights=weights, x_row=sums.shape[2],
            parts=self.parts, rank=self.rank, columns=a.ori_block_table.shape[1],
            pages=near.pages, page=near.page, page_step=a.ori_kv.stride(0),
            plan=self.plan.tensor, ori_table=near.table, cmp_table=far.table,
            ratio=max(a.cmp_ratio, 1), ori_reach=reach_of(a.ori_kv, a.ori_block_table),
            cmp_reach=0 if a.cmp_kv is None else reach_of(a.cmp_kv, a.cmp_block_table),
            HEADS=self.index_heads, **self.plan.sources, **self._lengths,
            **tune.only("sparse_attention_v4_pto.of_tokens", self.size).keywords,
        )  # fmt: skip

    def _close(
        self, product: Tensor | None, ape: Tensor | None, gamma: Tensor | None,
        state: Tensor | None, cache: Tensor | None, scales: Tensor | None,
    ) -> None:  # fmt: skip
        """The entries of one compressor, into their pages."""
        a, states, table = self.a, self.a.state_block_table, self.a.cmp_block_table
        if product is None or gamma is None or state is None or cache is None:
            return
        assert a.cmp_sin is not None and a.cmp_cos is not None and table is not None
        assert states is not None
        sin, cos = (x.flatten(0, 1).contiguous() for x in (a.cmp_sin, a.cmp_cos))
        each, size = a.cmp_sin.shape[1], gamma.shape[0]
        config = tune.at_least(
            "sparse_attention_v4_pto.entries", "ROWS", min(a.cmp_ratio, 16), size
        )  # fmt: skip
        entries[(min(self.requests * each, cores.vector()),)](
            product, ape, gamma, state, states, sin, cos, a.seqused, a.act_seqs, cache, scales,
            table, self.steps, self.requests, each, a.cmp_ratio, self.parts, product.stride(0),
            state.stride(0), states.stride(0), states.shape[1], *state.shape[:2], sin.stride(0),
            a.rms_norm_eps, cache.stride(0), 0 if scales is None else scales.stride(0),
            table.stride(0), table.shape[1], *cache.shape[:2], SIZE=size, ROTARY=self.rotary,
            COFF=self.coff, RING=a.state_mode == compressed.RING, CHANNELS=math.gcd(size, 128),
            **config.keywords,
        )  # fmt: skip

    def turned(self, query: Tensor, index: Tensor | None) -> None:
        """The heads, where they lie; the states are written."""
        a = self.a
        config = tune.only("sparse_attention_v4_pto.of_heads", self.size, self.index)
        tile, wide = config.tiles["HEAD_TILE"], config.tiles["WIDTH"]
        works = -(-self.heads // tile) + -(-self.index_heads // tile)
        if self.product is not None:
            works += -(-self.coff * self.size // wide) + -(-self.coff * self.index // wide)
        of_heads[(min(self.rows * works, cores.vector()),)](
            query, query, index, index, heads=self.heads, index_heads=self.index_heads,
            used=a.seqused, INDEX=self.index,
            **self._lengths, **self._states, **config.keywords,
        )  # fmt: skip

    def attended(self, query: Tensor, index: Tensor | None, weights: Tensor | None) -> Tensor:
        a = self.a
        if index is not None and weights is not None:
            found = a.selected(STAGES, index, weights).flatten(0, -3).squeeze(-2)
            self.plan.far = replace(self.plan.far, index=found)
        out = self._new(*query.shape)
        lse = self._new(self.rows, self.heads, dtype=torch.float32)
        scale = scale_of(a.softmax_scale, self.size)
        attend(query, self.plan, a.sinks, scale, PAGED.value, out, lse)
        return a.output(STAGES, out.view(self.requests, self.steps, self.heads, self.size))
