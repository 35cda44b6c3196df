# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Arguments and outputs of npu_sparse_flash_attention_grad; shapes as in sparse_flash_attention.py.

Where `value` is None its gradient is in d_key, and d_value has shape [0]; likewise d_query_rope and
d_key_rope where there is no rotary part.  torch_npu's op has no d_softmax_sum, like softmax_sum.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...check import Checker, tensors
from ...op_spec import UNLIMITED
from ..common import gradients, layouts
from .sparse_flash_attention import Inputs, inputs, mode, statistics

SCHEMA = (
    "npu_sparse_flash_attention_grad(Tensor query, Tensor key, Tensor? value,"
    " Tensor sparse_indices, Tensor d_out, Tensor out, Tensor softmax_max,"
    " Tensor softmax_sum, float scale_value, SymInt sparse_block_size,"
    " Tensor? query_rope=None, Tensor? key_rope=None, Tensor? actual_seq_qlen=None,"
    ' Tensor? actual_seq_kvlen=None, str? layout="BSND", SymInt? sparse_mode=3,'
    f" SymInt? pre_tokens={UNLIMITED}, SymInt? next_tokens={UNLIMITED}, SymInt? attention_mode=2,"
    " Tensor? d_softmax_sum=None)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
GE = "SparseFlashAttentionGrad"
FUNCTION = "backward"


class Arguments(Inputs, layouts.OneLayout):
    d_out: Tensor
    out: Tensor
    softmax_max: Tensor
    softmax_sum: Tensor
    scale_value: float
    sparse_block_size: int
    actual_seq_qlen: Tensor | None
    actual_seq_kvlen: Tensor | None
    attention_mode: int | None
    d_softmax_sum: Tensor | None


def check(c: Checker, x: Arguments) -> None:
    query, d_out, out = x["query"], x["d_out"], x["out"]
    layout, rows, keys = layouts.layout(c, x["layout"])
    inputs(c, rows, keys, x)
    c.same_device(**tensors(x))
    c.same_dtype(query=query, d_out=d_out, out=out)
    c.shape("d_out", d_out, f"{rows} N D")
    c.shape("out", out, f"{rows} N D")
    c.dense_rows(d_out=d_out, out=out)
    outer = " ".join(rows.split()[:-1])
    every = tensors(x, "softmax_max", "softmax_sum", "d_softmax_sum")
    for name, tensor in every.items():
        c.dtype(name, tensor, statistics(query))
        c.shape(name, tensor, f"{outer} 1 {rows.split()[-1]} N")
    c.contiguous(**every)
    lengths = layouts.named(x, "actual_seq_qlen", "actual_seq_kvlen")
    layouts.lengths(c, layout, layout, *lengths)
    layouts.options(c, x["sparse_mode"], x["pre_tokens"], x["next_tokens"])
    mode(c, x["attention_mode"])
    c.at_least("sparse_block_size", x["sparse_block_size"], 1)


def fake(**a: Any) -> tuple[Tensor, ...]:
    return gradients.empty(a, "query", "key", "value", "query_rope", "key_rope")
