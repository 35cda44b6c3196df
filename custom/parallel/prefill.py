# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Prefill with its rows on several ranks, each of which has the whole caches."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

from .. import sparse_attention as sparse
from ..dispatch.check import Checker
from ..dispatch.common import paged
from ..dispatch.common.layout import lengths_of_rows
from . import collectives
from .cache_dispatch import attend, select
from .collectives import Group, ranks, refuse_gradients

_CACHES = ("kv", "kr", "index", "index_scale")


def zigzag(x: Tensor, dim: int, group: Group) -> Tensor:
    """This rank's rows of `dim`: of 2 * size equal chunks one from the front, one from the back.

    Args:
        x: the whole, the same on all ranks.
        dim: a dimension whose size 2 * size divides.
        group: ProcessGroup or 1-D DeviceMesh.

    Returns:
        A new tensor, `dim` of which is cut by the number of ranks.

    Raises:
        ValueError: `dim` cannot be cut so.
    """
    _, rank, size = ranks(group)
    if x.shape[dim] % (2 * size):
        raise ValueError(
            f"custom.parallel: dimension {dim} of shape {list(x.shape)} cannot be cut into "
            f"{2 * size} chunks, two for each of {size} ranks. Pad it in front."
        )
    chunks = x.chunk(2 * size, dim)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]], dim)


def row_parallel_indexer(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    *,
    group: Group,
    actual_seq_lengths_query: Tensor | None = None,
    actual_seq_lengths_key: Tensor | None = None,
    block_table: Tensor | None = None,
    layout_query: str = "BSND",
    layout_key: str = "BSND",
    sparse_count: int = 2048,
    sparse_mode: int = 3,
) -> Tensor:
    """`npu_lightning_indexer`'s indices, each rank scoring a part of the rows.

    All ranks have all arguments; indices alone travel. The rows are cut into 2 * size chunks of
    which a rank takes one from the front and one from the back: causal rows cost as many keys as
    they see. Indices have no gradient: what requires one may come as it is.

    Args:
        query: [B, S, N, D] or [T, N, D]; as all arguments, the same on all ranks.
        key: [B, S2, 1, D], [T2, 1, D] or [pages, P, 1, D].
        weights: [B, S, N] or [T, N].
        group: ProcessGroup or 1-D DeviceMesh.
        actual_seq_lengths_query: as in the op.
        actual_seq_lengths_key: as in the op.
        block_table: as in the op.
        layout_query: "BSND" or "TND".
        layout_key: "BSND", "TND" or "PA_BSND".
        sparse_count: K, positions selected for a query.
        sparse_mode: 3 or 0.

    Returns:
        sparse_indices of all rows on all ranks, the same bits as the op's.

    Raises:
        ValueError: as the op.
        TypeError: as the op.
    """
    query, key, weights = query.detach(), key.detach(), weights.detach()
    at, rank, size = ranks(group)
    packed = layout_query == "TND"
    total = query.shape[0 if packed else 1]
    n = -(-total // (2 * size))

    def chunk(number: int) -> Tensor:
        lo = min(number * n, total)
        hi = min(lo + n, total)
        q, w = (x[lo:hi] if packed else x[:, lo:hi] for x in (query, weights))
        if lo == hi:
            return q.new_full([*q.shape[:-2], 1, sparse_count], -1, dtype=torch.int32)
        of_queries, of_keys = lengths_of_rows(
            lo,
            hi,
            query,
            key,
            actual_seq_lengths_query,
            actual_seq_lengths_key,
            layout_query,
            layout_key,
            sparse_mode,
        )
        return sparse.npu_lightning_indexer(
            q,
            key,
            w,
            actual_seq_lengths_query=of_queries,
            actual_seq_lengths_key=of_keys,
            block_table=block_table,
            layout_query=layout_query,
            layout_key=layout_key,
            sparse_count=sparse_count,
            sparse_mode=sparse_mode,
        )[0]

    mine = (chunk(rank), chunk(2 * size - 1 - rank))
    both = torch.stack([pad(x, (0, 0, 0, 0, 0, n - x.shape[-3]), value=-1) for x in mine])
    rows = collectives.in_order(collectives.all_gather(both, at))
    return rows.flatten(0, 1)[:total] if packed else rows.movedim(0, 1).flatten(1, 2)[:, :total]


def context_parallel_prefill(
    query: Tensor,
    query_rope: Tensor,
    query_index: Tensor,
    weights: Tensor,
    rows: Mapping[str, Tensor],
    caches: Mapping[str, Tensor],
    cache_index: Tensor,
    block_table: Tensor,
    act_seqs: Tensor,
    *,
    group: Group,
    softmax_scale: float,
    sparse_count: int = 2048,
    row_layout: str = "nope_rope_scale",
) -> Tensor:
    """The attention of S new tokens a request, whose rows are dealt out to the ranks (`zigzag`).

    The ranks' new cache rows are gathered as bytes in one tensor, whatever their dtypes, and
    written into every rank's caches; each rank then selects and attends for its rows. Latents and
    index keys may each be of 8 bits.

    Args:
        query: [B, S / size, N, R] this rank's rows, all heads.
        query_rope: [B, S / size, N, Dr].
        query_index: [B, S / size, Ni, Di].
        weights: [B, S / size, Ni]; with the queries' scales in them where those are of 8 bits
            (`quantize_index_query`).
        rows: this rank's new rows [B, S / size, D] by the cache's name, or their bytes.
        caches: whole caches [pages, P, 1, D] under the same names, updated in place: "kv", "kr" and
            "index". Rows of 8 bits ("kv" of `npu_kv_quant_sparse_flash_attention`) have no "kr";
            index keys of 8 bits have their scales [pages, P, 1] in "index_scale".
        cache_index: [B, S] slots of all new tokens in order; negative: not written.
        block_table: [B, max_pages].
        act_seqs: [B] lengths with the new tokens.
        group: ProcessGroup or 1-D DeviceMesh.
        softmax_scale: factor of the logits.
        sparse_count: positions attended to by a query, at most.
        row_layout: of rows of 8 bits.

    Returns:
        [B, S / size, N, R], of this rank's rows. No backward.
    """
    at, rank, size = ranks(group)
    B, mine = query.shape[:2]
    n = mine // 2
    _check_rows(rows, caches, cache_index, (B, mine), size)
    refuse_gradients(
        "context_parallel_prefill",
        query=query,
        query_rope=query_rope,
        query_index=query_index,
        weights=weights,
        **{f"rows[{name!r}]": x for name, x in rows.items()},
        **{f"caches[{name!r}]": x for name, x in caches.items()},
    )
    wire = torch.cat([rows[name].contiguous().view(torch.uint8) for name in caches], -1)
    came = collectives.in_order(collectives.all_gather(wire.unflatten(1, (2, n)).movedim(1, 0), at))
    came = came.movedim(0, 1).reshape(B * 2 * size * n, -1)
    pages = [cache.view(*cache.shape[:2], 1, -1).view(torch.uint8) for cache in caches.values()]
    parts = came.split([cache.shape[-1] for cache in pages], -1)
    for cache, part in zip(pages, parts, strict=True):
        paged.overwrite(cache, cache_index.flatten(), part)
    # each chunk is a request of its own, which ends with its last row
    first = torch.tensor([rank, 2 * size - 1 - rank], device=act_seqs.device)
    ends = act_seqs[:, None] - (2 * size - 1 - first) * n
    ends = ends.clamp(min=0).flatten().to(act_seqs.dtype)
    tables = block_table.repeat_interleave(2, 0)
    q, q_rope, q_index, w = (
        x.reshape(2 * B, n, *x.shape[2:]) for x in (query, query_rope, query_index, weights)
    )
    indices = select(
        q_index,
        w,
        caches["index"],
        caches.get("index_scale"),
        block_table=tables,
        actual_seq_lengths_key=ends,
        sparse_count=sparse_count,
    )
    out, _, _ = attend(
        q,
        q_rope,
        caches["kv"],
        caches.get("kr"),
        indices,
        softmax_scale,
        row_layout,
        block_table=tables,
        actual_seq_lengths_kv=ends,
    )
    return out.view(query.shape)


def _check_rows(
    rows: Mapping[str, Tensor],
    caches: Mapping[str, Tensor],
    cache_index: Tensor,
    mine: tuple[int, int],
    size: int,
) -> None:
    """Bytes travel side by side: rows of another size would be written into another cache."""
    c = Checker("context_parallel_prefill")
    for name in dict.fromkeys(("kv", "index", *caches, *rows)):
        c.require(name in _CACHES, f"`rows` or `caches` has {name!r}, expected only {_CACHES}.")
        c.require(
            name in caches and name in rows,
            f'`rows` or `caches` lacks {name!r}, expected both with the same names, "kv" and '
            '"index" among them.',
        )
        row, cache = rows[name], caches[name]
        came = row.shape[-1] * row.element_size()
        wanted = math.prod(cache.shape[2:]) * cache.element_size()
        c.require(
            row.ndim == 3 and row.shape[:2] == mine and came == wanted,
            f"`rows[{name!r}]` has shape {list(row.shape)} and rows of {came} bytes, expected "
            f"{[*mine]} rows, as `query`, of {wanted} bytes, those of `caches[{name!r}]`.",
        )
    c.require(mine[1] % 2 == 0, f"`query` has {mine[1]} rows, expected two chunks (`zigzag`).")
    c.integer("cache_index", cache_index)
    c.require(
        list(cache_index.shape) == [mine[0], mine[1] * size],
        f"`cache_index` has shape {list(cache_index.shape)}, expected "
        f"{[mine[0], mine[1] * size]}, the slots of all new tokens.",
    )
