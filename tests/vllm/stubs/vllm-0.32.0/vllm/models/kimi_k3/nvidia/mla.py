# SPDX-License-Identifier: Apache-2.0
"""Made by tests/vllm/stubs.py; not to be edited."""
from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import nn
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

if TYPE_CHECKING:
    from vllm.config.cache import CacheConfig

class MultiHeadLatentAttention(nn.Module, AttentionLayerBase):
    def __init__(self, config: Any, hidden_size: int, num_heads: int, qk_nope_head_dim: int, qk_rope_head_dim: int, v_head_dim: int, q_lora_rank: int | None, kv_lora_rank: int, use_output_gate: bool=..., cache_config: CacheConfig | None=..., quant_config: Any=..., prefix: str=..., aux_stream: torch.cuda.Stream | None=..., use_rope: bool=..., non_causal_multi_token_decode: bool=..., run_gemm_rs_ar: bool=...) -> None: return
    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor: ...
