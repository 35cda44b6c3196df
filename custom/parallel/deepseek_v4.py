# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""DeepSeek-V4's layer by its heads and output groups, and by its entries."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..dispatch import values
from ..dispatch.common import layer_v4, nz
from ..dispatch.reference.deepseek_v4.grouped_o_proj_pto import turned_back
from ..dispatch.registry import BY_NAME
from ..merging import npu_merge_states, npu_merge_topk
from ..sparse_attention_v4 import npu_sparse_attention_v4_pto
from . import collectives
from .attention import all_reduce, same_selection, shard, shard_weight
from .collectives import Group, ranks, refuse_gradients


def shard_layer_v4(
    layer: Mapping[str, Any], *, group: Group, weight_format: str | None = None
) -> dict[str, Any]:
    """The arguments of `npu_sparse_attention_v4_pto` with this rank's heads and output groups.

    `w_uq` (columns), `sinks`, `w_o_a` (groups) and `w_o_b` (rows) are cut, with their scales where
    they are of 8 bits; all else, compressors, indexer and caches, is the same on every rank. What
    an int8 `w_o_b` multiplies has a scale for a token: of a rank's own groups here.

    Args:
        layer: the op's arguments by name, with all heads.
        group: ProcessGroup or 1-D DeviceMesh.
        weight_format: how 2-D weights are read, "nz", "nd" or "linear"; None: as `layer` says under
            that name, else "nz".
    """
    form = weight_format or layer.get("weight_format", "nz")
    size = ranks(group)[2]
    heads = nz.columns_of(layer["w_uq"], form) // layer["gamma_kv"].shape[0]
    if heads % size:
        raise ValueError(
            f"custom.parallel: `w_uq` has {heads} heads, which cannot be dealt out to {size} "
            f"ranks. Take a number of ranks that divides {heads}."
        )
    cut = {"w_uq": shard_weight(layer["w_uq"], form, True, group)}
    for name in ("sinks", "w_o_a"):
        if (whole := layer.get(name)) is not None:
            cut[name] = shard(whole, 0, group)
    if (whole := layer.get("w_o_b")) is not None:
        cut["w_o_b"] = shard_weight(whole, form, False, group)
    # scales of each column, or of blocks of 128 x 128
    blocks = layer.get("weight_quant_mode") == 4
    columns = nz.columns_of(cut["w_uq"], form)
    cut |= _sharded_scale(layer, "w_uq", 1, columns if blocks else 0, group)
    cut |= _sharded_scale(layer, "w_o_a", 0, 0, group)
    if blocks and "w_o_b" in cut:
        rows = nz.columns_of(cut["w_o_a"], form) * cut["w_o_a"].shape[0]
        cut |= _sharded_scale(layer, "w_o_b", 0, rows, group)
    return {**layer, **cut}


def _sharded_scale(
    layer: Mapping[str, Any], weight: str, dim: int, mine: int, group: Group
) -> dict[str, Tensor]:
    """Of a weight of 8 bits, whose `mine` a rank has in whole blocks."""
    name = f"dequant_scale_{weight}"
    if (scale := layer.get(name)) is None:
        return {}
    if mine % 128:
        raise ValueError(
            f"custom.parallel: `{weight}` has {mine} {('rows', 'columns')[dim]} a rank, expected "
            "whole blocks: its scales are of 128 each. Take fewer ranks."
        )
    return {name: shard(scale, dim, group)}


def tensor_parallel_attention_v4(
    layer: Mapping[str, Any],
    *,
    group: Group,
    check_equal: bool = False,
    broadcast: bool = False,
    **options: Any,
) -> Tensor:
    """`npu_sparse_attention_v4_pto` on this rank's heads and output groups (`shard_layer_v4`).

    With `w_o_a` and `w_o_b` the sum over the ranks, [B, S, H], by one all_reduce; without them this
    rank's heads, [B, S, N / size, D]. An engine that sums otherwise calls the op itself.

    Args:
        layer: the op's arguments by name, with this rank's heads.
        group: ProcessGroup or 1-D DeviceMesh.
        check_equal: compare the ranks' selections before they are used (`same_selection`).
        broadcast: take rank 0's selection on all.
        options: the op's.
    """
    given = {**layer, **options}
    if check_equal or broadcast:
        out = _v4_in_stages(given, group, broadcast)
    else:
        out = npu_sparse_attention_v4_pto(**given)
    return _reduced(out, given.get("w_o_a"), group)


_V4 = inspect.signature(npu_sparse_attention_v4_pto).parameters
_OPS = torch.ops.custom
_STAGES = layer_v4.Stages(
    _OPS.npu_sharedkv_prolog_pto,
    _OPS.npu_compressor,
    _OPS.npu_quantize_index_query,
    _OPS.npu_lightning_indexer,
    _OPS.npu_quant_lightning_indexer,
    _OPS.npu_sparse_attn_sharedkv,
    _OPS.npu_kv_quant_sparse_attn_sharedkv,
    _OPS.npu_grouped_o_proj_pto,
    turned_back,
)


def _arguments(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """All of the op's, checked as the op does; in a graph the stages check their own."""
    refuse_gradients(name, **given)
    defaults = {n: p.default for n, p in _V4.items() if p.default is not p.empty}
    for each in [*given, *_V4]:
        if each not in _V4:
            raise TypeError(f"{name}: npu_sparse_attention_v4_pto has no argument `{each}`.")
        if each not in given and each not in defaults:
            raise TypeError(f"{name}: `{each}` is missing, in `layer` or beside it.")
    arguments = {**defaults, **given}
    if not torch.compiler.is_compiling():
        BY_NAME["npu_sparse_attention_v4_pto"].check(**arguments)
    return arguments


def _v4_in_stages(given: Mapping[str, Any], group: Group, broadcast: bool) -> Tensor:
    """The layer whose selection is compared, or taken from rank 0."""
    arguments = _arguments("tensor_parallel_attention_v4", given)

    def agreed(indices: Tensor) -> Tensor:
        return same_selection(indices, group=group, broadcast=broadcast)

    stages = _STAGES._replace(
        lightning_indexer=lambda **x: (agreed(_OPS.npu_lightning_indexer(**x)[0]),),
        quant_lightning_indexer=lambda **x: agreed(_OPS.npu_quant_lightning_indexer(**x)),
    )
    return layer_v4.Layer(**arguments).run(stages)


def shard_entry_pages(cmp_block_table: Tensor, *, group: Group) -> Tensor:
    """This rank's pages of `cmp_block_table`: column c lies on rank c % size, -1 elsewhere.

    Args:
        cmp_block_table: [B, max_pages] pages of entries, of all ranks or of this one.
        group: ProcessGroup or 1-D DeviceMesh.

    Returns:
        [B, max_pages]: the columns of this rank, -1 in the others.
    """
    _, rank, size = ranks(group)
    column = torch.arange(cmp_block_table.shape[1], device=cmp_block_table.device)
    return cmp_block_table.where(column % size == rank, -1)


def context_parallel_attention_v4(
    layer: Mapping[str, Any],
    *,
    group: Group,
    check_equal: bool = False,
    broadcast: bool = False,
    **options: Any,
) -> Tensor:
    """`npu_sparse_attention_v4_pto` whose entries are dealt out to the ranks, a page at a time.

    Queries of all heads go to all ranks (one all_gather), each attends to its entries, and to the
    window rows of every size-th request; outputs come back to their heads' ranks with their
    log-sum-exps (one all_to_all), are merged, and meet the sinks once. Of CSA each rank's best
    entries are merged first (one more all_gather, 8 bytes a candidate). Window rows and states are
    the same on every rank. A layer without entries runs as `tensor_parallel_attention_v4` does.

    Args:
        layer: the op's arguments by name, with this rank's heads and output groups
            (`shard_layer_v4`), and with its own pages of entries: `cmp_kv` and `idx_k` hold those
            of the columns c of `cmp_block_table` with c % size its rank, and the table has -1 in
            the others (`shard_entry_pages`).
        group: ProcessGroup or 1-D DeviceMesh.
        check_equal: compare the ranks' index queries' selections (`same_selection`).
        broadcast: take rank 0's selection on all.
        options: the op's.

    Returns:
        As `tensor_parallel_attention_v4`. No backward.
    """
    name = "context_parallel_attention_v4"
    arguments = _arguments(name, {**layer, **options})
    whole = layer_v4.Layer(**arguments)
    if whole.cmp_block_table is None:
        return tensor_parallel_attention_v4(arguments, group=group)
    at, rank, size = ranks(group)
    table = whole.cmp_block_table
    if not torch.compiler.is_compiling() and values.known(table):
        alien = (table >= 0) & (shard_entry_pages(table, group=at) < 0)
        if alien.any():
            i, c = alien.nonzero()[0].tolist()
            raise ValueError(
                f"{name}: `cmp_block_table` has page {int(table[i, c])} in column {c}, expected -1 "
                f"on rank {rank}: the column lies on rank {c % size} of {size}. Pass "
                "shard_entry_pages(cmp_block_table, group=group)."
            )

    def selected(indices: Tensor, scores: Tensor) -> Tensor:
        sent = torch.stack([scores.float().view(torch.int32), indices])
        came = collectives.all_gather(sent, at)
        tops = came[:, 0].view(torch.float32)
        merged: Tensor = npu_merge_topk(tops, came[:, 1], indices.shape[-1])[0]
        if check_equal or broadcast:
            merged = same_selection(merged, group=at, broadcast=broadcast)
        return merged

    def scored(return_value: bool, **x: Any) -> tuple[Tensor]:
        return (selected(*_OPS.npu_lightning_indexer_scores(**x)),)

    def quant_scored(**x: Any) -> Tensor:
        return selected(*_OPS.npu_quant_lightning_indexer_scores(**x))

    def partial(attention: Any) -> Any:
        def attend(q: Tensor, sinks: Tensor | None, **x: Any) -> tuple[Tensor]:
            return (_merged(attention, q, sinks, x, at),)

        return attend

    return _reduced(
        whole.run(
            _STAGES._replace(
                lightning_indexer=scored,
                quant_lightning_indexer=quant_scored,
                sparse_attn_sharedkv=partial(_OPS.npu_sparse_attn_sharedkv),
                kv_quant_sparse_attn_sharedkv=partial(_OPS.npu_kv_quant_sparse_attn_sharedkv),
            )
        ),
        whole.w_o_a,
        at,
    )


def _merged(
    attention: Any, q: Tensor, sinks: Tensor | None, x: dict[str, Any], group: Group
) -> Tensor:
    """This rank's heads of the attention over the rows and entries of all ranks."""
    at, rank, size = ranks(group)
    B, S, n, _ = q.shape
    every = collectives.all_gather(q, at).permute(1, 2, 0, 3, 4).flatten(2, 3)
    # window rows lie on every rank: one of them reads a request's
    mine = torch.arange(B, device=q.device) % size == rank
    x["ori_block_table"] = x["ori_block_table"].where(mine[:, None], -1)
    x["return_softmax_lse"] = True
    out, lse = attention(q=every, sinks=None, **x)
    parts = (out, lse.view(B, S, size * n, 1))
    words = [part.view(torch.int32) for part in parts]
    W = words[0].shape[-1]
    # not unflatten: torch.compile of torch 2.11 stops at it where a default device is set
    sent = torch.cat(words, -1)
    sent = sent.view(B, S, size, n, sent.shape[-1]).movedim(2, 0)
    came = collectives.all_to_all(sent, at)
    outs, lses = came[..., :W].view(out.dtype), came[..., W:].view(lse.dtype)[..., 0]
    merged, total = npu_merge_states(outs, lses)
    if sinks is not None:
        share = torch.sigmoid(total - sinks).masked_fill(total.isneginf(), 0)
        merged = merged * share[..., None]
    done: Tensor = merged.view(q.shape).to(q.dtype)  # the sinks are wider
    return done


def _reduced(out: Tensor, w_o_a: Tensor | None, group: Group) -> Tensor:
    return out if w_o_a is None else all_reduce(out, group)
