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

class KimiGatedDeltaNetAttention(GatedDeltaNetAttention):
    def __init__(self, config: Any, vllm_config: VllmConfig, prefix: str=...) -> None: return
    def _forward(self, mixed_qkv: torch.Tensor, g1: torch.Tensor, g2: torch.Tensor, beta: torch.Tensor, core_attn_out: torch.Tensor) -> None: return
    head_dim: Any
    dt_bias: Any
    conv1d: Any
    A_log: Any
    gate_lower_bound: Any
    o_norm: Any
