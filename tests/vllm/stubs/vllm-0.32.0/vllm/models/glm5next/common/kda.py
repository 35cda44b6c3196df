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

class Glm5NextLinearAttention(GatedDeltaNetAttention):
    head_dim: int
    def __init__(self, config: Any, vllm_config: VllmConfig, prefix: str=...) -> None: return
    def forward(self, hidden_states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor: ...
    local_num_heads: Any
    in_proj_qkvbfg_a: Any
    f_b_proj: Any
    dt_bias: Any
    q_conv1d: Any
    k_conv1d: Any
    v_conv1d: Any
    A_log: Any
    g_b_proj: Any
    o_norm: Any
    o_proj: Any
    kda_lower_bound: Any

def _resolve_kda_prefill_backend(backend: str, head_dim: int, dtype: torch.dtype, lower_bound: float | None) -> str: ...
