# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Arguments, outputs and autograd of npu_sparse_flash_attention; layouts as in common/layout.py.

    query [.., N, D]   query_rope [.., N, Dr]   key, value [.., 1, D]   key_rope [.., 1, Dr]
    sparse_indices [.., 1, K]   out [.., N, D]   softmax_max, softmax_sum [B, 1, S, N] or [1, T, N]

Index i stands for the positions i * sparse_block_size ... of its request; equal indices are
separate slots.  A query that sees nothing gets out 0, max -inf, sum 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..check import Checker
from . import _layout


def check(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    sparse_indices: Tensor,
    scale_value: float,
    block_table: Tensor | None,
    actual_seq_lengths_query: Tensor | None,
    actual_seq_lengths_kv: Tensor | None,
    query_rope: Tensor | None,
    key_rope: Tensor | None,
    sparse_block_size: int,
    layout_query: str,
    layout_kv: str,
    sparse_mode: int,
    pre_tokens: int,
    next_tokens: int,
    attention_mode: int,
    return_softmax_lse: bool,
    sinks: Tensor | None,
) -> None:
    c = Checker("npu_sparse_flash_attention")
    rows, keys = _layout.letters(c, ("layout_query", layout_query), ("layout_kv", layout_kv))
    inputs(c, rows, keys, query, key, value, sparse_indices, query_rope, key_rope)
    c.same_device(
        query=query,
        actual_seq_lengths_query=actual_seq_lengths_query,
        actual_seq_lengths_kv=actual_seq_lengths_kv,
        block_table=block_table,
        sinks=sinks,
    )
    _layout.lengths(
        c,
        layout_query,
        layout_kv,
        ("actual_seq_lengths_query", actual_seq_lengths_query),
        ("actual_seq_lengths_kv", actual_seq_lengths_kv),
        block_table,
    )
    _layout.options(c, sparse_mode, pre_tokens, next_tokens)
    mode(c, attention_mode)
    c.at_least("sparse_block_size", sparse_block_size, 1)
    if sinks is not None:
        c.dtype("sinks", sinks, statistics(query))
        c.shape("sinks", sinks, "N")
        c.contiguous(sinks=sinks)


def inputs(
    c: Checker,
    rows: str,
    keys: str,
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    sparse_indices: Tensor,
    query_rope: Tensor | None,
    key_rope: Tensor | None,
) -> None:
    """What the op and its gradient ask of the tensors that they share."""
    floats = dict(query=query, key=key, value=value, query_rope=query_rope, key_rope=key_rope)
    c.same_device(**floats, sparse_indices=sparse_indices)
    c.floating("query", query)
    c.same_dtype(**floats)
    c.integer("sparse_indices", sparse_indices)
    c.shape("query", query, f"{rows} N D")
    c.shape("key", key, f"{keys} 1 D")
    if value is not None:
        c.shape("value", value, f"{keys} 1 D")
    c.require(
        (query_rope is None) == (key_rope is None),
        "only one of `query_rope` and `key_rope` is given, expected both or none.",
    )
    if query_rope is not None and key_rope is not None:
        c.shape("query_rope", query_rope, f"{rows} N Dr")
        c.shape("key_rope", key_rope, f"{keys} 1 Dr")
    c.shape("sparse_indices", sparse_indices, f"{rows} 1 K")
    c.dense_rows(**floats, sparse_indices=sparse_indices)


def mode(c: Checker, attention_mode: int | None) -> None:
    c.require(
        attention_mode is None or attention_mode == 2,
        f"`attention_mode` is {attention_mode}, expected 2 (absorbed latent attention), the only "
        "one there is; torch_npu's default 0 is not valid there either.",
    )


def statistics(query: Tensor) -> torch.dtype:
    """Of softmax_max, softmax_sum and the sinks."""
    return torch.float64 if query.dtype is torch.float64 else torch.float32


def statistics_shape(query: Tensor) -> list[int]:
    *batch, rows, heads, _ = query.shape
    return [*batch, 1, rows, heads]


def fake(query: Tensor, return_softmax_lse: bool, **_: Any) -> tuple[Tensor, Tensor, Tensor]:
    shape = statistics_shape(query) if return_softmax_lse else [0]
    return (
        query.new_empty(query.shape),
        query.new_empty(shape, dtype=statistics(query)),
        query.new_empty(shape, dtype=statistics(query)),
    )


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    query, key, value, indices, scale = inputs[:5]
    lengths_query, lengths_kv, query_rope, key_rope, block_size = inputs[6:11]
    layout_query, layout_kv, sparse_mode = inputs[11:14]
    return_softmax_lse, sinks = inputs[17:19]
    _layout.refuse_paged_gradient("npu_sparse_flash_attention", layout_kv)
    out, softmax_max, softmax_sum = output
    ctx.mark_non_differentiable(softmax_max, softmax_sum)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(
        query, key, value, indices, lengths_query, lengths_kv, query_rope, key_rope, sinks,
        out, *((softmax_max, softmax_sum) if return_softmax_lse else (None, None)),
    )  # fmt: skip
    ctx.options = scale, block_size, layout_query, sparse_mode


def backward(ctx: Any, d_out: Tensor | None, *_: None) -> tuple[Any, ...]:
    if d_out is None:
        return (None,) * 19
    query, key, value, indices, lengths_query, lengths_kv, query_rope, key_rope, sinks = (
        ctx.saved_tensors[:9]
    )
    out, softmax_max, softmax_sum = ctx.saved_tensors[9:]
    scale, block_size, layout, sparse_mode = ctx.options
    if softmax_max is None:
        _, softmax_max, softmax_sum = torch.ops.custom.npu_sparse_flash_attention(
            query,
            key,
            value,
            indices,
            scale,
            actual_seq_lengths_query=lengths_query,
            actual_seq_lengths_kv=lengths_kv,
            query_rope=query_rope,
            key_rope=key_rope,
            sparse_block_size=block_size,
            layout_query=layout,
            layout_kv=layout,
            sparse_mode=sparse_mode,
            return_softmax_lse=True,
        )
    d_sinks = None
    if sinks is not None:
        # the gradient op knows no sinks: they enter through the denominator
        softmax_max, softmax_sum, share = _with_sinks(softmax_max, softmax_sum, sinks)
        delta = (d_out.to(sinks.dtype) * out.to(sinks.dtype)).sum(-1)
        d_sinks = -(share.view(delta.shape) * delta).flatten(0, -2).sum(0)
    grads = torch.ops.custom.npu_sparse_flash_attention_grad(
        query,
        key,
        value,
        indices,
        # an expanded gradient (of a sum, say) has no dense rows
        d_out.contiguous(),
        out,
        softmax_max,
        softmax_sum,
        scale,
        block_size,
        query_rope,
        key_rope,
        lengths_query,
        lengths_kv,
        layout,
        sparse_mode,
    )
    d_query, d_key, d_value, d_query_rope, d_key_rope = grads
    return (
        d_query,
        d_key,
        None if value is None else d_value,
        *(None,) * 5,
        *((None, None) if query_rope is None else (d_query_rope, d_key_rope)),
        *(None,) * 8,
        d_sinks,
    )


def _with_sinks(
    softmax_max: Tensor, softmax_sum: Tensor, sinks: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The statistics with the sinks in the denominator, and the share of it that is theirs."""
    limits = torch.finfo(sinks.dtype)
    # a row without keys, and no sink either: max -inf, where the differences would be NaN
    top = torch.maximum(softmax_max, sinks).clamp(min=limits.min)
    theirs = torch.exp(sinks - top)
    total = (softmax_sum * torch.exp(softmax_max - top) + theirs).clamp(min=limits.tiny)
    return top, total, theirs / total
