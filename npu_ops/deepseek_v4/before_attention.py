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

from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from ...dispatch.common import memory, nz
from ..common import cores, tune, tuples
from ..prolog import product
from ..prolog.product import _cut, _tile_count, panel_tiles
from . import compressor, sharedkv_prolog_pto, sparse_attn_sharedkv
from .compressor import finish, keep, pool, project
from .sharedkv_prolog_pto import of_heads, of_tokens
from .sparse_attn_sharedkv import note


class Product(NamedTuple):
    w: Tensor | None  # NZ; None: there is no such product
    out: Tensor | None  # [rows, columns] of its first part
    columns: int  # of w


class EntryProducts(NamedTuple):
    """Of the compressors, as `project` has them."""

    wkv: Tensor  # of entries
    wgate: Tensor
    next_kv: Tensor | None  # of index keys
    next_gate: Tensor | None
    out: Tensor  # [parts, rows, kv and z of both]
    width: int  # columns of kv, and of z
    next_width: int  # those of index keys
    parts: int  # of the depth
    kv_row: int  # from row to row of each weight
    gate_row: int
    next_kv_row: int
    next_gate_row: int
    out_part: int  # from part to part of `out`


class Whole(NamedTuple):
    WHOLE_M: tl.constexpr  # tiles divide the rows of x
    WHOLE_N: tl.constexpr  # the columns of each NZ weight
    WHOLE_K: tl.constexpr  # a part of the depth


@tuples.jit(["out_row", "rows", "depth", "parts", "out_part"])
def sums(
    x,
    latent: Product,
    window: Product,
    weights: Product,
    out_row,
    rows,
    depth,
    parts,
    out_part,
    entry: EntryProducts,
    whole: Whole,
    ROWS: tl.constexpr,
    PANELS: tl.constexpr,
    DEPTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    ENTRY_WHOLE_N: tl.constexpr,
    ENTRY_WHOLE_K: tl.constexpr,
):
    """All products of x: of NZ weights, and of the rows of the compressors."""
    first = panel_tiles(
        x,
        *latent,
        out_row,
        0,
        rows,
        depth,
        parts,
        out_part,
        *whole,
        ROWS,
        PANELS,
        DEPTH,
    )
    first = panel_tiles(
        x,
        *window,
        out_row,
        first,
        rows,
        depth,
        parts,
        out_part,
        *whole,
        ROWS,
        PANELS,
        DEPTH,
    )
    if weights.w is not None:
        first = panel_tiles(
            x,
            *weights,
            out_row,
            first,
            rows,
            depth,
            parts,
            out_part,
            *whole,
            ROWS,
            PANELS,
            DEPTH,
        )
    project(
        x,
        entry.wkv,
        entry.wgate,
        entry.next_kv,
        entry.next_gate,
        entry.out,
        entry.width,
        entry.next_width,
        first,
        rows,
        depth,
        entry.parts,
        depth,
        entry.kv_row,
        entry.gate_row,
        entry.next_kv_row,
        entry.next_gate_row,
        entry.out_part,
        whole.WHOLE_M,
        ENTRY_WHOLE_N,
        ENTRY_WHOLE_K,
        ROWS,
        COLUMNS,
        STEP,
    )


class Row(NamedTuple):
    """Of the prolog, as `of_tokens` has it."""

    x: Tensor  # [parts, rows, columns of all its products]
    sin: Tensor  # [rows, angles]
    cos: Tensor
    table: Tensor  # pages of each request
    act_seqs: Tensor  # tokens of each request, with those before
    seqused: Tensor  # new ones among them
    rows: int  # tokens of all requests
    steps: int  # of a request
    x_row: int  # from row to row of x
    parts: int  # of the sums
    rank: int  # of the query latents
    columns: int  # of the table
    pages: int  # of the cache
    page: int  # rows of a page
    page_step: int  # from page to page
    epsilon: float  # of each norm
    gamma_cq: Tensor  # of the query latents
    query_norm: Tensor  # [rows, rank], made here
    gamma_kv: Tensor  # of the window rows
    cache: Tensor  # of the window rows
    weights: Tensor  # of index heads, made here


class Window(NamedTuple):
    """Of the compressors, as `pool` has it; None each where there are none."""

    product: Tensor | None  # [parts, rows, kv and z of both]
    ape: Tensor | None  # of entries
    next_ape: Tensor | None  # of index keys
    state: Tensor | None  # of entries; None: there is no history
    next_state: Tensor | None  # of index keys
    table: Tensor | None  # pages of each request's states
    bounds: Tensor | None  # sums of lengths, of packed tokens
    used: Tensor | None  # tokens of each request
    starts: Tensor | None  # tokens before them
    out: Tensor | None  # [rows, size + next_size]
    tokens: int  # of a request, or of all that are packed
    requests: int
    each: int  # windows of a request
    rows: int  # windows of all
    size: int  # of an entry
    next_size: int  # of an index key
    ratio: int  # tokens of a window
    parts: int  # of the product
    out_part: int  # from part to part
    state_page: int  # from page to page of states
    next_state_page: int
    table_row: int  # from row to row of the table
    columns: int  # of the table
    pages: int  # of states
    page: int  # states of a page


class Seen(NamedTuple):
    """Of attention, as `note` has it: `ori` are window rows, `cmp` entries."""

    plan: Tensor  # [rows, width], made here
    sums: Tensor  # of query lengths
    used_q: Tensor  # tokens of each request
    used_kv: Tensor  # keys of each request
    ori_sums: Tensor  # of key lengths
    cmp_sums: Tensor
    ori_table: Tensor  # pages of each request
    cmp_table: Tensor
    tokens: int  # of a request, or of all that are packed
    requests: int
    width: int  # of the plan
    window: int  # rows that a token sees
    ratio: int  # tokens of an entry
    ori_reach: int  # keys that a request may have
    cmp_reach: int
    ori_stride: int  # from row to row of a table
    cmp_stride: int
    ori_pages: int
    cmp_pages: int
    ori_page: int  # keys of a page
    cmp_page: int
    ori_page_rows: int  # from page to page, in rows
    cmp_page_rows: int


class TokenConstants(NamedTuple):
    ROW_SIZE: tl.constexpr  # of a window row
    ROW_ROTARY: tl.constexpr  # dims of it that turn
    ROW_HEADS: tl.constexpr  # of the index; 0: there is none
    ROW_USED: tl.constexpr  # requests have lengths
    WINDOW_PACKED: tl.constexpr  # tokens are packed
    WINDOW_COFF: tl.constexpr  # windows that an entry spans
    WINDOW_RING: tl.constexpr  # states are those of the last positions
    SEEN_Q_TND: tl.constexpr  # query tokens are packed
    SEEN_Q_LENGTHS: tl.constexpr  # requests have query lengths
    SEEN_KEYS: tl.constexpr  # how keys are laid out
    SEEN_K_LENGTHS: tl.constexpr  # requests have key lengths
    SEEN_NEAR: tl.constexpr  # where window rows come from
    SEEN_FAR: tl.constexpr  # where entries come from


@tuples.jit()
def tokens(
    row: Row,
    window: Window,
    seen: Seen,
    C: TokenConstants,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    PIECE: tl.constexpr,
):
    """Norms, window rows and head weights; the windows that close; what each token sees."""
    note(
        *seen,
        C.SEEN_Q_TND,
        C.SEEN_Q_LENGTHS,
        C.SEEN_KEYS,
        C.SEEN_K_LENGTHS,
        C.SEEN_NEAR,
        C.SEEN_FAR,
        PIECE,
    )
    of_tokens(*row, C.ROW_SIZE, C.ROW_ROTARY, C.ROW_HEADS, C.ROW_USED, WIDTH)
    if window.product is not None:
        pool(*window, C.WINDOW_PACKED, C.WINDOW_COFF, C.WINDOW_RING, ROWS, CHANNELS)


class Heads(NamedTuple):
    """Of the prolog, as `of_heads` has it."""

    query: Tensor  # [rows, heads, size]
    to_query: Tensor  # the same
    index: Tensor  # type: ignore[assignment]  # [rows, index heads, size of theirs]
    to_index: Tensor  # the same
    sin: Tensor  # [rows, angles]
    cos: Tensor
    act_seqs: Tensor  # tokens of each request, with those before
    seqused: Tensor  # new ones among them
    rows: int  # tokens of all requests
    steps: int  # of a request
    heads: int
    index_heads: int
    epsilon: float  # of the norm


class Entries(NamedTuple):
    """Of a compressor, as `finish` has it; None each where there is none."""

    pooled: Tensor | None  # [rows, size]
    gamma: Tensor | None  # of the norm
    sin: Tensor | None  # of each window
    cos: Tensor | None
    bounds: Tensor | None  # sums of lengths, of packed tokens
    used: Tensor | None  # tokens of each request
    starts: Tensor | None  # tokens before them
    out: Tensor | None  # the entries, if they are returned
    values: Tensor | None  # pages of entries
    scales: Tensor | None  # of entries of int8
    table: Tensor | None  # pages of each request
    tokens: int  # of a request, or of all that are packed
    requests: int
    each: int  # windows of a request
    rows: int  # windows of all
    ratio: int  # tokens of a window
    pooled_row: int  # from row to row
    angle_row: int
    epsilon: float  # of the norm
    values_page: int  # from page to page
    scales_page: int
    table_row: int  # from row to row
    columns: int  # of the table
    pages: int
    page: int  # entries of a page


class States(NamedTuple):
    """Of the compressors, as `keep` has it; None each where there are none."""

    product: Tensor | None  # [parts, rows, kv and z of both]
    ape: Tensor | None  # of entries
    next_ape: Tensor | None  # of index keys
    state: Tensor | None  # of entries
    next_state: Tensor | None  # of index keys
    table: Tensor | None  # pages of each request
    bounds: Tensor | None  # sums of lengths, of packed tokens
    used: Tensor | None  # tokens of each request
    starts: Tensor | None  # tokens before them
    tokens: int  # of a request, or of all that are packed
    requests: int
    rows: int  # tokens of all
    size: int  # of an entry
    next_size: int  # of an index key
    ratio: int  # tokens of a window
    parts: int  # of the product
    out_part: int  # from part to part
    state_page: int  # from page to page
    next_state_page: int
    table_row: int  # from row to row of the table
    columns: int  # of the table
    pages: int
    page: int  # states of a page


class HeadConstants(NamedTuple):
    HEAD_SIZE: tl.constexpr
    HEAD_INDEX: tl.constexpr  # size of an index head; 0: there are none
    HEAD_ROTARY: tl.constexpr  # dims of each that turn
    HEAD_USED: tl.constexpr  # requests have lengths
    ENTRY_PACKED: tl.constexpr  # tokens are packed
    ENTRY_SIZE: tl.constexpr
    ENTRY_ROTARY: tl.constexpr  # dims that turn
    ENTRY_TURN: tl.constexpr  # how, as `finish` has it
    KEY_PACKED: tl.constexpr  # the same of index keys
    KEY_SIZE: tl.constexpr
    KEY_ROTARY: tl.constexpr
    KEY_TURN: tl.constexpr
    STATE_PACKED: tl.constexpr  # tokens are packed
    STATE_COFF: tl.constexpr  # windows that an entry spans
    STATE_RING: tl.constexpr  # states are those of the last positions


@tuples.jit()
def heads(
    head: Heads,
    entry: Entries,
    key: Entries,
    state: States,
    C: HeadConstants,
    HEAD_TILE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Norms and rotations of heads; entries and index keys to their pages; then states, which only
    the launch before reads."""
    of_heads(*head, C.HEAD_SIZE, C.HEAD_INDEX, C.HEAD_ROTARY, C.HEAD_USED, HEAD_TILE)
    if entry.values is not None:
        finish(*entry, C.ENTRY_PACKED, C.ENTRY_SIZE, C.ENTRY_ROTARY, C.ENTRY_TURN, False)
    if key.values is not None:
        finish(*key, C.KEY_PACKED, C.KEY_SIZE, C.KEY_ROTARY, C.KEY_TURN, False)
    if state.product is not None:
        keep(*state, C.STATE_PACKED, C.STATE_COFF, C.STATE_RING, WIDTH)


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
    given = _given(tokens, row=prolog.of_tokens(of_x), window=pooling, seen=sees.noting)
    tokens[(min(max(works), cores.vector()),)](**given, **config.keywords)
    prolog.multiply()
    closing: dict[str, dict[str, Any]] = {}
    config = tune.only("before_attention.heads", prolog.size, prolog.index_size)
    works = [prolog.head_tiles(config)]
    if compressing is not None and of_entries is not None:
        closing = dict(zip(("entry", "key"), compressing.finishing(), strict=False))
        closing["state"] = compressing.keeping(of_entries)
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


_PREFIXES = {"row", "window", "seen", "head", "entry", "key", "state"}


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
    given: dict[str, Any] = dict(weights_w=None, weights_out=None, weights_columns=0)
    for name, ((w, size), of_w) in zip(("latent", "window", "weights"), pairs, strict=False):
        given |= {f"{name}_w": w, f"{name}_out": of_w, f"{name}_columns": size}
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
