# SPDX-License-Identifier: Apache-2.0
"""Made by tests/vllm/stubs.py; not to be edited."""
from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import nn
from vllm.models.deepseek_v4.cpu.cpu_sparse import DeepseekV4CPUAttention as DeepseekV4CPUAttention

if TYPE_CHECKING:
    from vllm.config.vllm import VllmConfig

class DeepseekV4ForCausalLM(nn.Module):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str=...) -> None: return
