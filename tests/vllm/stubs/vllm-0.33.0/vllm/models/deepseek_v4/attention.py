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
    from vllm.config.vllm import VllmConfig

class DeepseekV4Attention(nn.Module, AttentionLayerBase, ABC):
    def __init__(self, vllm_config: VllmConfig, prefix: str, topk_indices_buffer: torch.Tensor | None=..., aux_stream_list: list[torch.cuda.Stream] | None=...) -> None: return
    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor, llama_4_scaling: torch.Tensor | None=...) -> torch.Tensor: ...
