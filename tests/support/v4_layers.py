# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""A layer of each kind of DeepSeek-V4: a window alone, selected entries of 4 tokens, all of 8."""

from __future__ import annotations

from typing import Any

LAYERS: dict[str, Any] = dict(
    num_hidden_layers=3,
    layer_types=[
        "sliding_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
    ],
    mlp_layer_types=["hash_moe", "moe", "moe"],
    compress_rates=dict(compressed_sparse_attention=4, heavily_compressed_attention=8),
    num_attention_heads=4,
    partial_rotary_factor=0.25,
    o_groups=2,
    o_lora_rank=32,
    index_head_dim=32,
    moe_intermediate_size=32,
)
