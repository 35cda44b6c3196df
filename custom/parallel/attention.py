# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Tensor-parallel and context-parallel attention; what ranks of them hold and exchange."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from .. import merging
from .. import sparse_attention as sparse
from ..dispatch import values
from ..dispatch.common import nz
from ..dispatch.errors import NotSupported
from . import collectives
from .cache_dispatch import attend, select, select_with_scores
from .collectives import Group, ranks, refuse_gradients


def all_reduce(x: Tensor, group: Group) -> Tensor:
    """The sum over the ranks, as a new tensor.

    Args:
        x: of the same shape and dtype on all ranks.
        group: ProcessGroup or 1-D DeviceMesh.
    """
    return collectives.all_reduce(x, ranks(group)[0])


def same_selection(indices: Tensor, *, group: Group, broadcast: bool = False) -> Tensor:
    """`indices`, known to be the same on all ranks.

    A replicated indexer selects the same everywhere if its inputs are equal in every bit. Compares
    a hash of 64 bits a row, by one small collective and a wait for the device (an error names the
    ranks that differ); or, with `broadcast`, gives rank 0's to all.

    Args:
        indices: [.., K] int32 or int64.
        group: ProcessGroup or 1-D DeviceMesh.
        broadcast: take rank 0's.
    """
    at, _, _ = ranks(group)
    if broadcast:
        return collectives.broadcast(indices, at)
    slot = torch.arange(1, indices.shape[-1] + 1, device=indices.device)
    mixed = (indices.long() + 2) * (slot * -0x61C8864680B583EB)
    every = collectives.all_gather((mixed ^ (mixed >> 29)).sum(-1).flatten(), at)
    differs = (every != every[0]).any(-1).nonzero().flatten().tolist()
    if differs:
        raise RuntimeError(
            f"custom.parallel: ranks {differs} selected other positions than rank 0: the inputs of "
            "the indexer differ in some bit. Pass broadcast=True, or make the inputs equal."
        )
    return indices


def shard(x: Tensor, dim: int, group: Group) -> Tensor:
    """This rank's equal part of `dim`, contiguous: heads of a weight, channels of a convolution.

    Args:
        x: the whole, the same on all ranks.
        dim: a dimension whose size the number of ranks divides.
        group: ProcessGroup or 1-D DeviceMesh.
    """
    _, rank, size = ranks(group)
    if x.shape[dim] % size:
        raise ValueError(
            f"custom.parallel: dimension {dim} of shape {list(x.shape)} cannot be dealt out to "
            f"{size} ranks. Take a number of ranks that divides {x.shape[dim]}."
        )
    return x.chunk(size, dim)[rank].contiguous()


def shard_layer(
    layer: Mapping[str, Any], *, group: Group, weight_format: str | None = None
) -> dict[str, Any]:
    """The arguments of `npu_sparse_attention_pto` with this rank's heads.

    `w_uq_qr` (columns) and `w_uk` are cut; all else, the indexer and the caches among it, is the
    same on every rank. The value up-projection and the columns of the output projection are cut
    likewise by the caller (`shard`), whose `all_reduce` behind them is the layer's only one.

    Args:
        layer: the op's arguments by name, with all heads.
        group: ProcessGroup or 1-D DeviceMesh.
        weight_format: how a 2-D `w_uq_qr` is read, "nz", "nd" or "linear"; None: as `layer` says
            under that name, else "nz".
    """
    form = weight_format or layer.get("weight_format", "nz")
    cut = {"w_uq_qr": shard_weight(layer["w_uq_qr"], form, True, group)}
    scale = layer.get("dequant_scale_w_uq_qr")
    if scale is not None:  # of each column, or of blocks of 128
        mine = nz.columns_of(cut["w_uq_qr"], form)
        if scale.shape[-1] != mine * ranks(group)[2] and mine % 128:
            raise ValueError(
                f"custom.parallel: `w_uq_qr` has {mine} columns a rank, expected whole blocks: "
                "its scales are of 128 each. Take fewer ranks."
            )
        cut["dequant_scale_w_uq_qr"] = shard(scale, scale.ndim - 1, group)
    return {**layer, **cut, "w_uk": shard(layer["w_uk"], 0, group)}


def shard_weight(w: Tensor, weight_format: str, columns: bool, group: Group) -> Tensor:
    """This rank's part of the N columns or the K rows of a weight argument."""
    if w.ndim == 2 and weight_format == "nz":  # under its own shape
        c0 = nz.columns(w.dtype)
        w = w.view(w.shape[1] // c0, w.shape[0] // nz.ROWS, nz.ROWS, c0)
    # what NZ and nn.Linear have in front are the columns
    in_front = columns == (w.ndim == 4 or weight_format == "linear")
    return shard(w, 0 if in_front else 1, group)


def tensor_parallel_attention(
    layer: Mapping[str, Any],
    *,
    group: Group,
    check_equal: bool = False,
    broadcast: bool = False,
    **options: Any,
) -> Tensor:
    """`npu_sparse_attention_pto` on this rank's heads (`shard_layer`): [B, S, N / size, R].

    No collective without `check_equal` or `broadcast`.

    Args:
        layer: the op's arguments by name, with this rank's heads.
        group: ProcessGroup or 1-D DeviceMesh.
        check_equal: compare the ranks' selections before they are used (`same_selection`).
        broadcast: take rank 0's selection on all.
        options: the op's; with one of the two above, those for 8 bits are refused.
    """
    if not (check_equal or broadcast):
        return sparse.npu_sparse_attention_pto(**layer, **options)
    x = _in_stages("tensor_parallel_attention", {**layer, **options})
    query, query_rope, query_norm = _latent_prolog(x)
    query_index, weights = _index_prolog(x, query_norm, x.cache_index)
    indices, _ = sparse.npu_lightning_indexer(
        query_index,
        x.index_k_cache,
        weights,
        actual_seq_lengths_key=x.act_seqs,
        block_table=x.block_table,
        layout_key="PA_BSND",
        sparse_count=x.sparse_count,
    )
    indices = same_selection(indices, group=group, broadcast=broadcast)
    return sparse.npu_sparse_flash_attention(
        query,
        x.kv_cache,
        None,
        indices,
        _scale(x),
        block_table=x.block_table,
        actual_seq_lengths_kv=x.act_seqs,
        query_rope=query_rope,
        key_rope=x.kr_cache,
        layout_kv="PA_BSND",
    )[0]


_PARAMETERS = inspect.signature(sparse.npu_sparse_attention_pto).parameters
_DEFAULTS = {n: p.default for n, p in _PARAMETERS.items() if p.default is not p.empty}
_NAMES = [*_PARAMETERS]
_QUANTIZATION = _NAMES[_NAMES.index("weight_format") + 1 :]


def _in_stages(name: str, given: Mapping[str, Any]) -> SimpleNamespace:
    """The op's arguments by name; refuses what the layer in stages does not pass on."""
    for each, value in given.items():
        if each not in _PARAMETERS:
            raise TypeError(f"{name}: npu_sparse_attention_pto has no argument `{each}`.")
        if each in _QUANTIZATION and (isinstance(value, Tensor) or value != _DEFAULTS[each]):
            raise NotSupported(
                f"{name}: `{each}` is given, and the layer in stages has weights and caches of 16 "
                "bits. Leave it out, or call the stages yourself."
            )
    for each in _NAMES:
        if each not in given and each not in _DEFAULTS:
            raise TypeError(f"{name}: `{each}` is missing, in `layer` or beside it.")
    refuse_gradients(name, **given)
    return SimpleNamespace(**{**_DEFAULTS, **given})


def _latent_prolog(x: SimpleNamespace) -> tuple[Tensor, Tensor, Tensor]:
    """(query, query_rope, query_norm), and the new rows of the latents' caches."""
    return sparse.npu_mla_prolog_pto(
        x.x,
        x.w_dq,
        x.w_uq_qr,
        x.w_uk,
        x.w_dkv_kr,
        x.gamma_cq,
        x.gamma_ckv,
        x.sin,
        x.cos,
        x.kv_cache,
        x.kr_cache,
        x.cache_index,
        rmsnorm_epsilon_cq=x.rms_norm_eps,
        rmsnorm_epsilon_ckv=x.rms_norm_eps,
        rope_interleaved=x.rope_interleaved,
        weight_format=x.weight_format,
    )


def _index_prolog(x: SimpleNamespace, query_norm: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """(query_index, weights), and the new index keys."""
    return sparse.npu_indexer_prolog_pto(
        x.x,
        query_norm,
        x.w_idx_qb,
        x.w_idx_k,
        x.w_idx_proj,
        x.in_gamma_k,
        x.in_beta_k,
        x.sin,
        x.cos,
        x.index_k_cache,
        slots,
        ln_epsilon=x.layer_norm_eps,
        rope_interleaved=x.index_rope_interleaved,
        weight_format=x.weight_format,
    )


def _scale(x: SimpleNamespace) -> float:
    plain, rotary = x.w_uk.shape[1], x.sin.shape[-1]
    return float((plain + rotary) ** -0.5 if x.softmax_scale is None else x.softmax_scale)


def context_parallel_attention(
    layer: Mapping[str, Any],
    *,
    group: Group,
    index_block_table: Tensor,
    index_cache_index: Tensor,
    interleave: int = 1,
    replicate_index: bool = True,
    check_equal: bool = False,
    broadcast: bool = False,
    **options: Any,
) -> Tensor:
    """`npu_sparse_attention_pto` of a decode step, by `context_parallel_decode`: its output.

    Args:
        layer: the op's arguments by name, with this rank's heads (`shard_layer`), its shard of the
            latents' caches, their `block_table` and their `cache_index` (`shard_slots`).
        group: ProcessGroup or 1-D DeviceMesh.
        index_block_table: [B, max_pages] of the index keys.
        index_cache_index: [B, S] flat slots of the new index keys.
        interleave: as in `context_parallel_decode`, as the next three.
        replicate_index: every rank has all index keys.
        check_equal: compare the ranks' selections before they are used.
        broadcast: take rank 0's selection on all.
        options: the op's; those for 8 bits are refused.
    """
    if "ori_kv" in layer:
        raise NotSupported(
            "context_parallel_attention: `ori_kv` is given, of DeepSeek-V4's layer. Use "
            "context_parallel_attention_v4."
        )
    x = _in_stages("context_parallel_attention", {**layer, **options})
    query, query_rope, query_norm = _latent_prolog(x)
    return context_parallel_decode(
        query,
        query_rope,
        lambda: _index_prolog(x, query_norm, index_cache_index),
        None,
        x.kv_cache,
        x.kr_cache,
        x.index_k_cache,
        x.block_table,
        x.act_seqs,
        group=group,
        softmax_scale=_scale(x),
        index_block_table=index_block_table,
        sparse_count=x.sparse_count,
        interleave=interleave,
        replicate_index=replicate_index,
        check_equal=check_equal,
        broadcast=broadcast,
    )


def context_parallel_decode(
    query: Tensor,
    query_rope: Tensor,
    query_index: Tensor | Callable[[], tuple[Tensor, Tensor]],
    weights: Tensor | None,
    kv_cache: Tensor,
    kr_cache: Tensor | None,
    index_k_cache: Tensor,
    block_table: Tensor,
    act_seqs: Tensor,
    *,
    group: Group,
    softmax_scale: float,
    index_block_table: Tensor,
    index_scale: Tensor | None = None,
    sparse_count: int = 2048,
    interleave: int = 1,
    replicate_index: bool = True,
    sinks: Tensor | None = None,
    row_layout: str = "nope_rope_scale",
    check_equal: bool = False,
    broadcast: bool = False,
) -> Tensor:
    """The attention of a decode step whose requests' latents are dealt out to the ranks.

    Position p of a request lies on rank (p // interleave) % size. Queries of all heads go to all
    ranks (one all_gather), each attends to the selected positions that it keeps, and outputs come
    back to their heads' ranks with their log-sum-exps (one all_to_all), where they are merged.

    Args:
        query: [B, S, N / size, R] this rank's heads, from `npu_mla_prolog_pto`.
        query_rope: [B, S, N / size, Dr].
        query_index: [B, S, Ni, Di], the same on all ranks; or what gives it and the weights, called
            once the queries travel: behind a long indexer's programs they would wait.
        weights: [B, S, Ni], the same on all ranks, or None with such a function; where queries are
            of 8 bits with their scales in them (`quantize_index_query`).
        kv_cache: [pages, P, 1, R], this rank's shard, with the new tokens (`shard_slots`).
        kr_cache: [pages, P, 1, Dr], likewise; None where `kv_cache` has the rows of
            `npu_kv_quant_sparse_flash_attention`.
        index_k_cache: all index keys; this rank's shard with `replicate_index=False`.
        block_table: [B, max_pages], pages of the shards.
        act_seqs: [B] lengths of the whole requests, with their S new tokens.
        group: ProcessGroup or 1-D DeviceMesh.
        softmax_scale: factor of the logits.
        index_block_table: [B, max_pages] of `index_k_cache`.
        index_scale: [pages, P, 1] of an `index_k_cache` of 8 bits.
        sparse_count: positions attended to by a query, at most.
        interleave: positions that lie together: 1, or a page.
        replicate_index: every rank has all index keys and selects on its own, with no collective;
            otherwise ranks score their shard, and their best candidates are merged (one more
            all_gather of 8 bytes a candidate).
        sinks: [N / size] logits that enter the denominator alone, once.
        row_layout: of rows of 8 bits.
        check_equal: compare the ranks' selections before they are used (`same_selection`).
        broadcast: take rank 0's selection on all.

    Returns:
        [B, S, N / size, R], the attention over whole requests. No backward.
    """
    refuse_gradients(
        "context_parallel_decode",
        query=query,
        query_rope=query_rope,
        query_index=query_index,
        weights=weights,
        kv_cache=kv_cache,
        kr_cache=kr_cache,
        index_k_cache=index_k_cache,
        index_scale=index_scale,
        sinks=sinks,
    )
    if isinstance(query_index, Tensor) and weights is None:
        raise TypeError("context_parallel_decode: `weights` is None, expected [B, S, Ni].")
    at, rank, size = ranks(group)
    B, S, n, R = query.shape
    # under way while positions are selected
    queries = collectives.start_all_gather(torch.cat([query, query_rope], -1), at)
    if not isinstance(query_index, Tensor):
        query_index, weights = query_index()
    if weights is None:
        raise TypeError("context_parallel_decode: `query_index` gives no weights, expected two.")
    refuse_gradients("context_parallel_decode", query_index=query_index, weights=weights)
    if replicate_index:
        indices = select(
            query_index,
            weights,
            index_k_cache,
            index_scale,
            actual_seq_lengths_key=act_seqs,
            block_table=index_block_table,
            sparse_count=sparse_count,
        )
    else:
        indices = _merged_selection(
            query_index,
            weights,
            index_k_cache,
            index_scale,
            index_block_table,
            act_seqs,
            sparse_count,
            interleave,
            at,
        )
    if check_equal or broadcast:
        indices = same_selection(indices, group=at, broadcast=broadcast)
    local, _ = merging.npu_localize_indices(indices, rank, size, interleave)
    every = queries().view(torch.int64).permute(1, 2, 0, 3, 4).flatten(2, 3).view(query.dtype)
    # causality was applied by the selection: a row of a shard is no position, and none that was
    # selected lies behind the shard's end, which is at most the request's
    lengths = act_seqs
    if values.looked_at(act_seqs.device):
        lengths = merging.shard_positions(act_seqs, rank, size, interleave)
    out, top, total = attend(
        every[..., :R],
        every[..., R:],
        kv_cache,
        kr_cache,
        local,
        softmax_scale,
        row_layout,
        block_table=block_table,
        actual_seq_lengths_kv=lengths,
        sparse_mode=0,
    )
    words = out.view(torch.int64)  # of 8 bytes: copied and sent as such
    W = words.shape[-1]
    statistics = torch.stack([top, total], -1).view(torch.int64)
    packed = (x.view(B * S, size, n, x.shape[-1]).movedim(1, 0) for x in (words, statistics))
    sent = torch.cat([*packed], -1)
    came = collectives.all_to_all(sent, at)
    tops, sums = came[..., W:].view(top.dtype).unbind(-1)
    merged, whole = merging.npu_merge_states(came[..., :W].view(out.dtype), tops, sums)
    if sinks is not None:
        merged = merged * torch.sigmoid(whole - sinks)[..., None]
    return merged.view(query.shape).to(query.dtype)  # the sinks are wider


def _merged_selection(
    query_index: Tensor,
    weights: Tensor,
    keys: Tensor,
    scale: Tensor | None,
    block_table: Tensor,
    act_seqs: Tensor,
    count: int,
    interleave: int,
    group: Group,
) -> Tensor:
    """The selection over all positions, from the ranks' own. Every row is a request of its own,
    whose keys end where it ceases to see: the limit is applied to positions, then dealt out."""
    at, rank, size = ranks(group)
    B, S = query_index.shape[:2]
    behind = torch.arange(1 - S, 1, device=act_seqs.device, dtype=act_seqs.dtype)
    limit = (act_seqs[:, None] + behind).clamp(min=0).flatten()
    rows, scores = select_with_scores(
        query_index.flatten(0, 1)[:, None],
        weights.flatten(0, 1)[:, None],
        keys,
        scale,
        actual_seq_lengths_key=merging.shard_positions(limit, rank, size, interleave),
        block_table=block_table[:, None].expand(-1, S, -1).flatten(0, 1),
        sparse_count=count,
        sparse_mode=0,
    )
    # what is absent, -1, stays negative
    stripe = torch.div(rows, interleave, rounding_mode="floor")
    positions = torch.add(rows + rank * interleave, stripe, alpha=(size - 1) * interleave)
    sent = torch.stack([scores.float().view(torch.int32), positions])
    came = collectives.all_gather(sent, at)
    merged, _ = merging.npu_merge_topk(came[:, 0].view(torch.float32), came[:, 1], count)
    return merged.view(B, S, 1, count)
