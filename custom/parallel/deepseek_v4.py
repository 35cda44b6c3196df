# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""DeepSeek-V4's layer by its heads and output groups."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..dispatch.common import layer_v4, nz
from ..dispatch.reference.deepseek_v4.grouped_o_proj_pto import turned_back
from ..dispatch.registry import BY_NAME
from ..sparse_attention_v4 import npu_sparse_attention_v4_pto
from .attention import all_reduce, same_selection, shard, shard_weight
from .collectives import Group, ranks, refuse_gradients


def shard_layer_v4(
    layer: Mapping[str, Any], *, group: Group, weight_format: str | None = None
) -> dict[str, Any]:
    """The arguments of `npu_sparse_attention_v4_pto` with this rank's heads and output groups.

    `w_uq` (columns), `sinks`, `w_o_a` (groups) and `w_o_b` (rows) are cut, with their scales where
    they are of 8 bits; all else, compressors, indexer and caches, is the same on every rank.

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
    return out if given.get("w_o_a") is None else all_reduce(out, group)


_V4 = inspect.signature(npu_sparse_attention_v4_pto).parameters


def _v4_in_stages(given: Mapping[str, Any], group: Group, broadcast: bool) -> Tensor:
    """The layer whose selection is compared, or taken from rank 0."""
    name = "tensor_parallel_attention_v4"
    refuse_gradients(name, **given)
    defaults = {n: p.default for n, p in _V4.items() if p.default is not p.empty}
    for each in [*given, *_V4]:
        if each not in _V4:
            raise TypeError(f"{name}: npu_sparse_attention_v4_pto has no argument `{each}`.")
        if each not in given and each not in defaults:
            raise TypeError(f"{name}: `{each}` is missing, in `layer` or beside it.")
    arguments = {**defaults, **given}
    BY_NAME["npu_sparse_attention_v4_pto"].check(**arguments)
    ops = torch.ops.custom

    def agreed(indices: Tensor) -> Tensor:
        return same_selection(indices, group=group, broadcast=broadcast)

    stages = layer_v4.Stages(
        ops.npu_sharedkv_prolog_pto,
        ops.npu_compressor,
        ops.npu_quantize_index_query,
        lambda **x: (agreed(ops.npu_lightning_indexer(**x)[0]),),
        lambda **x: agreed(ops.npu_quant_lightning_indexer(**x)),
        ops.npu_sparse_attn_sharedkv,
        ops.npu_kv_quant_sparse_attn_sharedkv,
        ops.npu_grouped_o_proj_pto,
        turned_back,
    )
    return layer_v4.Layer(**arguments).run(stages)
