# SPDX-License-Identifier: Apache-2.0
"""Made by tests/vllm/stubs.py; not to be edited."""
from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import nn
from vllm.model_executor.custom_op import PluggableLayer

if TYPE_CHECKING:
    from vllm.config.cache import CacheConfig

@dataclass
class MLAModules:
    kv_a_layernorm: torch.nn.Module
    kv_b_proj: torch.nn.Module
    rotary_emb: torch.nn.Module | None
    o_proj: torch.nn.Module
    fused_qkv_a_proj: torch.nn.Module | None
    kv_a_proj_with_mqa: torch.nn.Module | None
    q_a_layernorm: torch.nn.Module | None
    q_b_proj: torch.nn.Module | None
    q_proj: torch.nn.Module | None
    indexer: torch.nn.Module | None
    is_sparse: bool
    topk_indices_buffer: torch.Tensor | None
    indexer_rotary_emb: torch.nn.Module | None = ...
    g_proj: torch.nn.Module | None = ...
    index_group_builder: Any = ...

class MultiHeadLatentAttentionWrapper(PluggableLayer):
    def __init__(self, hidden_size: int, num_heads: int, scale: float, qk_nope_head_dim: int, qk_rope_head_dim: int, v_head_dim: int, q_lora_rank: int | None, kv_lora_rank: int, mla_modules: MLAModules, cache_config: CacheConfig | None=..., quant_config: Any=..., prefix: str=..., skip_topk: bool=..., non_causal_multi_token_decode: bool=..., allow_short_prefill_indexer_scoring_skip: bool=..., fuse_qkv_rmsnorm: bool=...) -> None: return
    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor, llama_4_scaling: torch.Tensor | None=...) -> torch.Tensor: ...
