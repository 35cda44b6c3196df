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

class OlmoHybridGatedDeltaNetAttention(GatedDeltaNetAttention):
    def __init__(self, config: Any, vllm_config: VllmConfig, prefix: str=...) -> None: return
    def _full_forward(self, hidden_states: torch.Tensor, output: torch.Tensor) -> Any: ...
    num_v_heads: Any
    head_k_dim: Any
    head_v_dim: Any
    conv_kernel_size: Any
    key_dim: Any
    value_dim: Any
    allow_neg_eigval: Any
    in_proj_qkvg: Any
    b_proj: Any
    a_proj: Any
    conv1d: Any
    dt_bias: Any
    A_log: Any
    o_norm: Any
    o_proj: Any
