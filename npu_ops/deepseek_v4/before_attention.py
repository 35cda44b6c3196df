# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""DeepSeek-V4's layer before its scores and attention: what is independent of one another shares a
launch.

    sums             cube           products of x: prolog and compressors
    tokens           vector cores   norms and window rows; closing windows pooled; what tokens see
    prolog/product   cube           products of the query latents
    heads            vector cores   norms and rotations of heads; entries, index keys and states

`tokens` alone reads states and `heads` alone writes them: it is the last launch of a stage.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from ...dispatch.common import memory, nz
from ..common import cores, entry, tune
from ..prolog import product
from ..prolog.product import _cut, _tile_count, _tiles
from . import compressor, sharedkv_prolog_pto, sparse_attn_sharedkv
from .compressor import finish, keep, pool, project
from .sharedkv_prolog_pto import of_heads, of_tokens
from .sparse_attn_sharedkv import note


@entry.jit(
    do_not_specialize=[
        "columns0", "columns1", "columns2", "out_row", "rows", "depth",
        "parts", "out_part", "entry_width", "entry_next_width", "entry_parts",
        "entry_kv_row", "entry_gate_row", "entry_next_kv_row", "entry_next_gate_row",
        "entry_out_part",
    ]
)  # fmt: skip
def sums(
    x,
    w0,
    out0,
    columns0,
    w1,
    out1,
    columns1,
    w2,
    out2,
    columns2,
    out_row,
    rows,
    depth,
    parts,
    out_part,
    entry_wkv,
    entry_wgate,
    entry_next_kv,
    entry_next_gate,
    entry_out,
    entry_width,
    entry_next_width,
    entry_parts,
    entry_kv_row,
    entry_gate_row,
    entry_next_kv_row,
    entry_next_gate_row,
    entry_out_part,
    WHOLE_M: tl.constexpr,
    WHOLE_N: tl.constexpr,
    WHOLE_K: tl.constexpr,
    ROWS: tl.constexpr,
    PANELS: tl.constexpr,
    DEPTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    ENTRY_WHOLE_N: tl.constexpr,
    ENTRY_WHOLE_K: tl.constexpr,
):
    """All products of x: of NZ weights, and of the rows of the compressors."""
    first = _tiles(
        x,
        w0,
        out0,
        columns0,
        out_row,
        0,
        rows,
        depth,
        parts,
        out_part,
        WHOLE_M,
        WHOLE_N,
        WHOLE_K,
        ROWS,
        PANELS,
        DEPTH,
    )
    first = _tiles(
        x,
        w1,
        out1,
        columns1,
        out_row,
        first,
        rows,
        depth,
        parts,
        out_part,
        WHOLE_M,
        WHOLE_N,
        WHOLE_K,
        ROWS,
        PANELS,
        DEPTH,
    )
    if w2 is not None:
        first = _tiles(
            x,
            w2,
            out2,
            columns2,
            out_row,
            first,
            rows,
            depth,
            parts,
            out_part,
            WHOLE_M,
            WHOLE_N,
            WHOLE_K,
            ROWS,
            PANELS,
            DEPTH,
        )
    project(
        x,
        entry_wkv,
        entry_wgate,
        entry_next_kv,
        entry_next_gate,
        entry_out,
        entry_width,
        entry_next_width,
        first,
        rows,
        depth,
        entry_parts,
        depth,
        entry_kv_row,
        entry_gate_row,
        entry_next_kv_row,
        entry_next_gate_row,
        entry_out_part,
        WHOLE_M,
        ENTRY_WHOLE_N,
        ENTRY_WHOLE_K,
        ROWS,
        COLUMNS,
        STEP,
    )


@entry.jit(
    do_not_specialize=[
        "row_rows", "row_steps", "row_x_row", "row_parts", "row_rank", "row_columns", "row_pages",
        "row_page", "row_page_step", "row_epsilon", "pool_tokens", "pool_requests", "pool_each",
        "pool_rows", "pool_size", "pool_next_size", "pool_ratio", "pool_parts", "pool_out_part",
        "pool_state_page", "pool_next_state_page", "pool_table_row", "pool_columns", "pool_pages",
        "pool_page", "note_tokens", "note_requests", "note_width", "note_window", "note_ratio",
        "note_ori_reach", "note_cmp_reach", "note_ori_stride", "note_cmp_stride", "note_ori_pages",
        "note_cmp_pages", "note_ori_page", "note_cmp_page", "note_ori_page_rows",
        "note_cmp_page_rows",
    ]
)  # fmt: skip
def tokens(
    row_x,
    row_sin,
    row_cos,
    row_table,
    row_act_seqs,
    row_seqused,
    row_rows,
    row_steps,
    row_x_row,
    row_parts,
    row_rank,
    row_columns,
    row_pages,
    row_page,
    row_page_step,
    row_epsilon,
    row_gamma_cq,
    row_query_norm,
    row_gamma_kv,
    row_cache,
    row_weights,
    pool_product,
    pool_ape,
    pool_next_ape,
    pool_state,
    pool_next_state,
    pool_table,
    pool_bounds,
    pool_used,
    pool_starts,
    pool_out,
    pool_tokens,
    pool_requests,
    pool_each,
    pool_rows,
    pool_size,
    pool_next_size,
    pool_ratio,
    pool_parts,
    pool_out_part,
    pool_state_page,
    pool_next_state_page,
    pool_table_row,
    pool_columns,
    pool_pages,
    pool_page,
    note_plan,
    note_sums,
    note_used_q,
    note_used_kv,
    note_ori_sums,
    note_cmp_sums,
    note_ori_table,
    note_cmp_table,
    note_tokens,
    note_requests,
    note_width,
    note_window,
    note_ratio,
    note_ori_reach,
    note_cmp_reach,
    note_ori_stride,
    note_cmp_stride,
    note_ori_pages,
    note_cmp_pages,
    note_ori_page,
    note_cmp_page,
    note_ori_page_rows,
    note_cmp_page_rows,
    ROW_SIZE: tl.constexpr,
    ROW_ROTARY: tl.constexpr,
    ROW_HEADS: tl.constexpr,
    ROW_USED: tl.constexpr,
    POOL_PACKED: tl.constexpr,
    POOL_COFF: tl.constexpr,
    POOL_RING: tl.constexpr,
    NOTE_Q_TND: tl.constexpr,
    NOTE_Q_LENGTHS: tl.constexpr,
    NOTE_KEYS: tl.constexpr,
    NOTE_K_LENGTHS: tl.constexpr,
    NOTE_NEAR: tl.constexpr,
    NOTE_FAR: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    PIECE: tl.constexpr,
):
    """Norms, window rows and head weights; the windows that close; what each token sees."""
    note(
        note_plan,
        note_sums,
        note_used_q,
        note_used_kv,
        note_ori_sums,
        note_cmp_sums,
        note_ori_table,
        note_cmp_table,
        note_tokens,
        note_requests,
        note_width,
        note_window,
        note_ratio,
        note_ori_reach,
        note_cmp_reach,
        note_ori_stride,
        note_cmp_stride,
        note_ori_pages,
        note_cmp_pages,
        note_ori_page,
        note_cmp_page,
        note_ori_page_rows,
        note_cmp_page_rows,
        NOTE_Q_TND,
        NOTE_Q_LENGTHS,
        NOTE_KEYS,
        NOTE_K_LENGTHS,
        NOTE_NEAR,
        NOTE_FAR,
        PIECE,
    )
    of_tokens(
        row_x,
        row_sin,
        row_cos,
        row_table,
        row_act_seqs,
        row_seqused,
        row_rows,
        row_steps,
        row_x_row,
        row_parts,
        row_rank,
        row_columns,
        row_pages,
        row_page,
        row_page_step,
        row_epsilon,
        row_gamma_cq,
        row_query_norm,
        row_gamma_kv,
        row_cache,
        row_weights,
        ROW_SIZE,
        ROW_ROTARY,
        ROW_HEADS,
        ROW_USED,
        WIDTH,
    )
    if pool_product is not None:
        pool(
            pool_product,
            pool_ape,
            pool_next_ape,
            pool_state,
            pool_next_state,
            pool_table,
            pool_bounds,
            pool_used,
            pool_starts,
            pool_out,
            pool_tokens,
            pool_requests,
            pool_each,
            pool_rows,
            pool_size,
            pool_next_size,
            pool_ratio,
            pool_parts,
            pool_out_part,
            pool_state_page,
            pool_next_state_page,
            pool_table_row,
            pool_columns,
            pool_pages,
            pool_page,
            POOL_PACKED,
            POOL_COFF,
            POOL_RING,
            ROWS,
            CHANNELS,
        )


@entry.jit(
    do_not_specialize=[
        "head_rows", "head_steps", "head_heads", "head_index_heads", "head_epsilon",
        "entry_tokens", "entry_requests", "entry_each", "entry_rows", "entry_ratio",
        "entry_pooled_row", "entry_angle_row", "entry_epsilon", "entry_values_page",
        "entry_scales_page", "entry_table_row", "entry_columns", "entry_pages", "entry_page",
        "key_tokens", "key_requests", "key_each", "key_rows", "key_ratio", "key_pooled_row",
        "key_angle_row", "key_epsilon", "key_values_page", "key_scales_page", "key_table_row",
        "key_columns", "key_pages", "key_page", "keep_tokens", "keep_requests", "keep_rows",
        "keep_size", "keep_next_size", "keep_ratio", "keep_parts", "keep_out_part",
        "keep_state_page", "keep_next_state_page", "keep_table_row", "keep_columns", "keep_pages",
        "keep_page",
    ]
)  # fmt: skip
def heads(
    head_query,
    head_to_query,
    head_index,
    head_to_index,
    head_sin,
    head_cos,
    head_act_seqs,
    head_seqused,
    head_rows,
    head_steps,
    head_heads,
    head_index_heads,
    head_epsilon,
    entry_pooled,
    entry_gamma,
    entry_sin,
    entry_cos,
    entry_bounds,
    entry_used,
    entry_starts,
    entry_out,
    entry_values,
    entry_scales,
    entry_table,
    entry_tokens,
    entry_requests,
    entry_each,
    entry_rows,
    entry_ratio,
    entry_pooled_row,
    entry_angle_row,
    entry_epsilon,
    entry_values_page,
    entry_scales_page,
    entry_table_row,
    entry_columns,
    entry_pages,
    entry_page,
    key_pooled,
    key_gamma,
    key_sin,
    key_cos,
    key_bounds,
    key_used,
    key_starts,
    key_out,
    key_values,
    key_scales,
    key_table,
    key_tokens,
    key_requests,
    key_each,
    key_rows,
    key_ratio,
    key_pooled_row,
    key_angle_row,
    key_epsilon,
    key_values_page,
    key_scales_page,
    key_table_row,
    key_columns,
    key_pages,
    key_page,
    keep_product,
    keep_ape,
    keep_next_ape,
    keep_state,
    keep_next_state,
    keep_table,
    keep_bounds,
    keep_used,
    keep_starts,
    keep_tokens,
    keep_requests,
    keep_rows,
    keep_size,
    keep_next_size,
    keep_ratio,
    keep_parts,
    keep_out_part,
    keep_state_page,
    keep_next_state_page,
    keep_table_row,
    keep_columns,
    keep_pages,
    keep_page,
    HEAD_SIZE: tl.constexpr,
    HEAD_INDEX: tl.constexpr,
    HEAD_ROTARY: tl.constexpr,
    HEAD_USED: tl.constexpr,
    ENTRY_PACKED: tl.constexpr,
    ENTRY_SIZE: tl.constexpr,
    ENTRY_ROTARY: tl.constexpr,
    ENTRY_PAIRS: tl.constexpr,
    ENTRY_FULL: tl.constexpr,
    KEY_PACKED: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    KEY_ROTARY: tl.constexpr,
    KEY_PAIRS: tl.constexpr,
    KEY_FULL: tl.constexpr,
    KEEP_PACKED: tl.constexpr,
    KEEP_COFF: tl.constexpr,
    KEEP_RING: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Norms and rotations of heads; entries and index keys to their pages; then states, which only
    the launch before reads."""
    of_heads(
        head_query,
        head_to_query,
        head_index,
        head_to_index,
        head_sin,
        head_cos,
        head_act_seqs,
        head_seqused,
        head_rows,
        head_steps,
        head_heads,
        head_index_heads,
        head_epsilon,
        HEAD_SIZE,
        HEAD_INDEX,
        HEAD_ROTARY,
        HEAD_USED,
        HEAD_TILE,
    )
    if entry_values is not None:
        finish(
            entry_pooled,
            entry_gamma,
            entry_sin,
            entry_cos,
            entry_bounds,
            entry_used,
            entry_starts,
            entry_out,
            entry_values,
            entry_scales,
            entry_table,
            entry_tokens,
            entry_requests,
            entry_each,
            entry_rows,
            entry_ratio,
            entry_pooled_row,
            entry_angle_row,
            entry_epsilon,
            entry_values_page,
            entry_scales_page,
            entry_table_row,
            entry_columns,
            entry_pages,
            entry_page,
            ENTRY_PACKED,
            ENTRY_SIZE,
            ENTRY_ROTARY,
            ENTRY_PAIRS,
            ENTRY_FULL,
        )
    if key_values is not None:
        finish(
            key_pooled,
            key_gamma,
            key_sin,
            key_cos,
            key_bounds,
            key_used,
            key_starts,
            key_out,
            key_values,
            key_scales,
            key_table,
            key_tokens,
            key_requests,
            key_each,
            key_rows,
            key_ratio,
            key_pooled_row,
            key_angle_row,
            key_epsilon,
            key_values_page,
            key_scales_page,
            key_table_row,
            key_columns,
            key_pages,
            key_page,
            KEY_PACKED,
            KEY_SIZE,
            KEY_ROTARY,
            KEY_PAIRS,
            KEY_FULL,
        )
    if keep_product is not None:
        keep(
            keep_product,
            keep_ape,
            keep_next_ape,
            keep_state,
            keep_next_state,
            keep_table,
            keep_bounds,
            keep_used,
            keep_starts,
            keep_tokens,
            keep_requests,
            keep_rows,
            keep_size,
            keep_next_size,
            keep_ratio,
            keep_parts,
            keep_out_part,
            keep_state_page,
            keep_next_state_page,
            keep_table_row,
            keep_columns,
            keep_pages,
            keep_page,
            KEEP_PACKED,
            KEEP_COFF,
            KEEP_RING,
            WIDTH,
        )


def launch(
    prolog: sharedkv_prolog_pto.Call,
    compressing: compressor.Call | None,
    sees: sparse_attn_sharedkv.Seen,
) -> None:
    """Of a compressor that keeps states and stores all that it makes."""
    of_x, of_entries = _sums(prolog, compressing)
    pooling: dict[str, Any] = {}
    ratio, works = 1, [prolog.passes * prolog.rows]
    if compressing is not None and of_entries is not None:
        pooling, ratio = compressing.pooling(of_entries), compressing.ratio
    config = tune.at_least("before_attention.tokens", "ROWS", ratio, prolog.size)
    if compressing is not None:
        works.append(compressing.pooled_tiles(config))
    given = _given(tokens, row=prolog.of_tokens(of_x), pool=pooling, note=sees.noting)
    tokens[(min(max(works), cores.vector()),)](**given, **config.keywords)
    prolog.multiply()
    closing: dict[str, dict[str, Any]] = {}
    config = tune.only("before_attention.heads", prolog.size, prolog.index_size)
    works = [prolog.head_tiles(config)]
    if compressing is not None and of_entries is not None:
        closing = dict(zip(("entry", "key"), compressing.finishing(), strict=False))
        closing["keep"] = compressing.keeping(of_entries)
        works.append(compressing.kept_tiles(config))
    given = _given(heads, head=prolog.of_heads(), **closing)
    heads[(min(max(works), cores.vector()),)](**given, **config.keywords)


def _given(kernel: Any, **parts: dict[str, Any]) -> dict[str, Any]:
    """What a kernel of several takes, None for those that are not called."""
    parts = {part: values for part, values in parts.items() if values}
    given = {
        f"{part.upper() if name.isupper() else part}_{name}": value
        for part, values in parts.items()
        for name, value in values.items()
    }
    left = [x for x in kernel.arg_names if x.lower().split("_")[0] in _PREFIXES - parts.keys()]
    return dict.fromkeys(left) | given


_PREFIXES = {"row", "pool", "note", "head", "entry", "key", "keep"}


def _sums(
    prolog: sharedkv_prolog_pto.Call, compressing: compressor.Call | None
) -> tuple[Tensor, Tensor | None]:
    """[parts, rows, columns] of the prolog's products and the compressors', in one launch if the
    prolog's weights are NZ; each in the parts that it has by itself, and so with the same sums."""
    if compressing is None:
        return product.in_parts(prolog.x, prolog.of_x, prolog.weight_format), None
    tiles, entry_parts = compressing.cut()
    of_entries = compressing.sums(entry_parts)
    if not all(nz.is_nz(w, prolog.weight_format) for w, _ in prolog.of_x):
        works = entry_parts * compressor.tile_count(prolog.rows, compressing.widths, tiles)
        out = product.in_parts(prolog.x, prolog.of_x, prolog.weight_format)
        project[(min(works, cores.cube()),)](
            **compressing.projecting(of_entries),
            **compressor.projected(compressing, tiles),
            **tiles.keywords,
        )
        return out, of_entries
    sizes = [size for _, size in prolog.of_x]
    rows, depth = prolog.x.shape
    config, parts = _as_apart(prolog.x, sizes)
    out = memory.empty((parts, rows, sum(sizes)), torch.float32, prolog.x.device)
    pairs = zip(prolog.of_x, out[0].split(sizes, dim=1), strict=True)
    given: dict[str, Any] = dict(w2=None, out2=None, columns2=0)
    for i, ((w, size), of_w) in enumerate(pairs):
        given |= {f"w{i}": w, f"out{i}": of_w, f"columns{i}": size}
    entry = {
        name: value
        for name, value in compressing.projecting(of_entries).items()
        if f"entry_{name}" in sums.arg_names
    }
    height = dict(ROWS=config.tiles["ROWS"], COLUMNS=config.tiles["COLUMNS"])
    as_tiles = tune.Config(height | dict(DEPTH=config.tiles["STEP"]))
    whole = compressor.projected(compressing, as_tiles)
    works = parts * _tile_count(rows, sizes, config)
    works += entry_parts * compressor.tile_count(rows, compressing.widths, as_tiles)
    sums[(min(works, cores.cube()),)](
        prolog.x,
        **given,
        out_row=out.stride(1),
        rows=rows,
        depth=depth,
        parts=parts,
        out_part=out.stride(0),
        WHOLE_N=all(size % (16 * config.tiles["PANELS"]) == 0 for size in sizes),
        ENTRY_WHOLE_N=whole["WHOLE_N"],
        ENTRY_WHOLE_K=whole["WHOLE_K"],
        **product.whole_tiles(config, rows, depth),
        **{f"entry_{name}": value for name, value in entry.items()},
        **config.keywords,
    )
    return out, of_entries


def _as_apart(x: Tensor, sizes: list[int]) -> tuple[tune.Config, int]:
    """As the prolog's products are cut; of the tiles that divide a part those as wide first."""
    wanted, parts = _cut(x, sizes, product._PARTS)
    rows, depth = x.shape

    def other(config: tune.Config) -> bool:
        return any(config.tiles[name] != size for name, size in wanted.tiles.items())

    found = [
        config
        for config in product.covering("before_attention.sums", rows)
        if parts == 1 or depth % (parts * config.tiles["DEPTH"]) == 0
    ]
    return tune.choose("before_attention.sums", sorted(found, key=other)), parts
