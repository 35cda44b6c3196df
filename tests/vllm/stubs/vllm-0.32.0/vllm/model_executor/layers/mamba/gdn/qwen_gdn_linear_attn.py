# SPDX-License-Identifier: Apache-2.0
"""Made by tests/vllm/stubs.py; not to be edited."""
from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import nn
from vllm.model_executor.layers.mamba.gdn.base import GatedDeltaNetAttention

if TYPE_CHECKING:
    from vllm.config.vllm import VllmConfig

class QwenGatedDeltaNetAttention(GatedDeltaNetAttention):
    def __init__(self, config: Any, vllm_config: VllmConfig, prefix: str=..., gqa_interleaved_layout: Any=..., reduce_results: bool=...) -> None: return
    def split_ba(self, ba: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: ...
    def fix_query_key_value_ordering(self, mixed_qkvz: torch.Tensor, mixed_ba: torch.Tensor) -> Any: ...
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor: ...
    def _forward_core_fused_norm_packed(self, mixed_qkvz: torch.Tensor, ba: torch.Tensor, core_attn_out: torch.Tensor) -> None: return
    num_v_heads: Any
    head_k_dim: Any
    head_v_dim: Any
    conv_kernel_size: Any
    key_dim: Any
    value_dim: Any
    gqa_interleaved_layout: Any
    conv1d: Any
    in_proj_qkvz: Any
    in_proj_ba: Any
    dt_bias: Any
    A_log: Any
    norm: Any
    out_proj: Any

def qwen_gdn_attention_core_fused_norm_packed(mixed_qkvz: torch.Tensor, ba: torch.Tensor, core_attn_out: torch.Tensor, layer_name: Any) -> None: return
