# SPDX-License-Identifier: Apache-2.0
"""Made by tests/vllm/stubs.py; not to be edited."""
from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import nn
from vllm.models.deepseek_v4.nvidia.model import DeepseekV4DecoderLayer as DeepseekV4DecoderLayer

if TYPE_CHECKING:
    from vllm.config.vllm import VllmConfig

class DeepSeekV4MTP(nn.Module):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str=...) -> None: return
