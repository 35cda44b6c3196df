# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Arguments, outputs and autograd of npu_sparse_flash_attention; layouts as in common/layout.py.

    query [.., N, D]   query_rope [.., N, Dr]   key, value [.., 1, D]   key_rope [.., 1, Dr]
    sparse_indices [.., 1, K]   out [.., N, D]   softmax_max, softmax_sum [B, 1, S, N] or [1, T, N]

Index i stands for the positions i * sparse_block_size ... of its request; equal indices are
separate slots.  A query that sees nothing gets out 0, max -inf, sum 0.  The maximum is a shift of
the sum and carries no gradient: whatever depends on max + log(sum) differentiates right.
"""

from __future__ import annotations

from typing import Any, TypedDict

import torch
from torch import Tensor

from ...check import Checker
from ...op_spec import UNLIMITED
from ..common import layouts

SCHEMA = (
    "npu_sparse_flash_attention(Tensor query, Tensor key, Tensor? value,"
    " Tensor sparse_indices, float scale_value, *, Tensor? block_table=None,"
    " Tensor? actual_seq_lengths_query=None, Tensor? actual_seq_lengths_kv=None,"
    " Tensor? query_rope=None, Tensor? key_rope=None, SymInt sparse_block_size=1,"
    ' str layout_query="BSND", str layout_kv="BSND", SymInt sparse_mode=3,'
    f" SymInt pre_tokens={UNLIMITED}, SymInt next_tokens={UNLIMITED}, SymInt attention_mode=2,"
    " bool return_softmax_lse=False, Tensor? sinks=None) -> (Tensor, Tensor, Tensor)"
)
GE = "SparseFlashAttention"
ONNX = "SparseFlashAttention"


class Inputs(TypedDict):
    """What the op and its gradient share."""

    query: Tensor
    key: Tensor
    value: Tensor | None
    sparse_indices: Tensor
    query_rope: Tensor | None
    key_rope: Tensor | None


class Selected(TypedDict):
    """What this attention and that on rows of 8 bits share."""

    scale_value: float
    block_table: Tensor | None
    actual_seq_lengths_query: Tensor | None
    actual_seq_lengths_kv: Tensor | None
    sparse_block_size: int
    layout_query: str
    layout_kv: str
    sparse_mode: int
    pre_tokens: int
    next_tokens: int
    attention_mode: int
    sinks: Tensor | None


class Arguments(Inputs, Selected):
    return_softmax_lse: bool


def check(c: Checker, x: Arguments) -> None:
    query = x["query"]
    inputs(c, *letters(c, x), x)
    c.same_device(
        query=query,
        actual_seq_lengths_query=x["actual_seq_lengths_query"],
        actual_seq_lengths_kv=x["actual_seq_lengths_kv"],
        block_table=x["block_table"],
        sinks=x["sinks"],
    )
    options(c, query, x)


def letters(c: Checker, x: Selected) -> tuple[str, str]:
    layout = ("layout_query", x["layout_query"]), ("layout_kv", x["layout_kv"])
    return layouts.letters(c, *layout)


def options(c: Checker, query: Tensor, x: Selected) -> None:
    """Lengths, options and sinks."""
    sinks = x["sinks"]
    layouts.lengths(
        c,
        x["layout_query"],
        x["layout_kv"],
        ("actual_seq_lengths_query", x["actual_seq_lengths_query"]),
        ("actual_seq_lengths_kv", x["actual_seq_lengths_kv"]),
        x["block_table"],
    )
    layouts.options(c, x["sparse_mode"], x["pre_tokens"], x["next_tokens"])
    mode(c, x["attention_mode"])
    c.at_least("sparse_block_size", x["sparse_block_size"], 1)
    if sinks is not None:
        c.dtype("sinks", sinks, statistics(query))
        c.shape("sinks", sinks, "N")
        c.contiguous(sinks=sinks)


def inputs(c: Checker, rows: str, keys: str, x: Inputs) -> None:
    """What the op and its gradient ask of the tensors that they share."""
    query, key, value, sparse_indices = x["query"], x["key"], x["value"], x["sparse_indices"]
    query_rope, key_rope = x["query_rope"], x["key_rope"]
    floats = dict(query=query, key=key, value=value, query_rope=query_rope, key_rope=key_rope)
    c.same_device(**floats, sparse_indices=sparse_indices)
    c.floating("query", query)
    c.same_dtype(**floats)
    c.integer("sparse_indices", sparse_indices)
    c.shape("query", query, f"{rows} N D")
    c.shape("key", key, f"{keys} 1 D")
    c.require(c.sizes["D"] > 0, "`query` has latents of 0 channels, expected at least 1.")
    if value is not None:
        c.shape("value", value, f"{keys} 1 D")
    c.require(
        (query_rope is None) == (key_rope is None),
        "only one of `query_rope` and `key_rope` is given, expected both or none. Pass the other "
        "as well, or join each with its latent.",
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
        "one there is; torch_npu's default 0 is not valid there either. Leave it out.",
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


_SAVED = (
    "query", "key", "value", "sparse_indices", "actual_seq_lengths_query",
    "actual_seq_lengths_kv", "query_rope", "key_rope", "sinks",
)  # fmt: skip
_LEARNED = ("query", "key", "value", "query_rope", "key_rope")


def setup_context(ctx: Any, x: dict[str, Any], output: tuple[Tensor, Tensor, Tensor]) -> None:
    layouts.refuse_paged_gradient("npu_sparse_flash_attention", x["layout_kv"])
    out, softmax_max, softmax_sum = output
    returned = x["return_softmax_lse"]
    ctx.mark_non_differentiable(softmax_max, *([] if returned else [softmax_sum]))
    ctx.set_materialize_grads(False)
    kept = (softmax_max, softmax_sum) if returned else (None, None)
    ctx.save_for_backward(*(x[name] for name in _SAVED), out, *kept)
    ctx.options = {name: x[name] for name in ("scale_value", "sparse_block_size", "sparse_mode")}
    ctx.layout = x["layout_query"]


def backward(ctx: Any, d_out: Tensor | None, _: None, d_sum: Tensor | None) -> dict[str, Any]:
    if d_out is None and d_sum is None:
        return {}
    *saved, out, softmax_max, softmax_sum = ctx.saved_tensors
    x = dict(zip(_SAVED, saved, strict=True))
    sinks = x.pop("sinks")
    if softmax_max is None:
        _, softmax_max, softmax_sum = torch.ops.custom.npu_sparse_flash_attention(
            **x,
            **ctx.options,
            layout_query=ctx.layout,
            layout_kv=ctx.layout,
            return_softmax_lse=True,
        )
    lengths = x.pop("actual_seq_lengths_query"), x.pop("actual_seq_lengths_kv")

    def gradients(d_out: Tensor, top: Tensor, total: Tensor, d_sum: Tensor | None) -> list[Tensor]:
        found = torch.ops.custom.npu_sparse_flash_attention_grad(
            **x,
            # an expanded gradient (of a sum, say) has no dense rows
            d_out=d_out.contiguous(),
            out=out,
            softmax_max=top,
            softmax_sum=total,
            **ctx.options,
            actual_seq_qlen=lengths[0],
            actual_seq_kvlen=lengths[1],
            layout=ctx.layout,
            d_softmax_sum=None if d_sum is None else d_sum.contiguous(),
        )
        return [g for g, name in zip(found, _LEARNED, strict=True) if x[name] is not None]

    d = {}
    if sinks is None or d_out is None:
        d_out = torch.zeros_like(out) if d_out is None else d_out
        grads = gradients(d_out, softmax_max, softmax_sum, d_sum)
    else:
        # the gradient op knows no sinks: they enter through the denominator, of `out` alone
        top, total, share = _with_sinks(softmax_max, softmax_sum, sinks)
        delta = (d_out.to(sinks.dtype) * out.to(sinks.dtype)).sum(-1)
        d["sinks"] = -(share.view(delta.shape) * delta).sum([*range(delta.ndim - 1)])
        grads = gradients(d_out, top, total, None)
        if d_sum is not None:
            more = gradients(torch.zeros_like(out), softmax_max, softmax_sum, d_sum)
            grads = [a + b for a, b in zip(grads, more, strict=True)]
    learned = [name for name in _LEARNED if x[name] is not None]
    return d | dict(zip(learned, grads, strict=True))


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
