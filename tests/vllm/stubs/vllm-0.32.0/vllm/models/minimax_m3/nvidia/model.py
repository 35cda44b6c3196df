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
    from vllm.config.vllm import VllmConfig

class MiniMaxM3SparseAttention(nn.Module, AttentionLayerBase):
    def __init__(self, config: Any, layer_id: int, quant_config: Any=..., prefix: str=..., cache_config: CacheConfig | None=..., topk_indices_buffer: torch.Tensor | None=...) -> None: return
    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor: ...

class MiniMaxM3SparseForCausalLM(nn.Module):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str=...) -> None: return
