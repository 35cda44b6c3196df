# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The layer on more than one card: tensor parallel, context parallel, rows of the indexer.

The engine is torch.distributed. Every function takes a ProcessGroup or a 1-D DeviceMesh, is called
by all ranks of it with the same shapes, and makes at most one collective each way, functional ones,
so that torch.compile(fullgraph=True) and CUDA graphs hold them. Nothing is global.

A collective that fails or times out (the group's own timeout) raises a RuntimeError that names it
and the rank. A step may be replayed after that: what a rank writes is the same every time.
"""

from __future__ import annotations

from .attention import (
    all_reduce,
    context_parallel_attention,
    context_parallel_decode,
    same_selection,
    shard,
    shard_layer,
    tensor_parallel_attention,
)
from .deepseek_v4 import (
    context_parallel_attention_v4,
    shard_entry_pages,
    shard_layer_v4,
    tensor_parallel_attention_v4,
)
from .linear import context_parallel_delta_rule, context_parallel_kda, delta_rule_heads
from .prefill import context_parallel_prefill, row_parallel_indexer, zigzag

__all__ = [
    "all_reduce",
    "context_parallel_attention",
    "context_parallel_attention_v4",
    "context_parallel_decode",
    "context_parallel_delta_rule",
    "context_parallel_kda",
    "context_parallel_prefill",
    "delta_rule_heads",
    "row_parallel_indexer",
    "same_selection",
    "shard",
    "shard_entry_pages",
    "shard_layer",
    "shard_layer_v4",
    "tensor_parallel_attention",
    "tensor_parallel_attention_v4",
    "zigzag",
]
