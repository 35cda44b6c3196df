# SPDX-License-Identifier: Apache-2.0
"""Made by tests/vllm/stubs.py; not to be edited."""
from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import nn
from vllm.models.glm5next.common.kda import Glm5NextLinearAttention as Glm5NextLinearAttention

if TYPE_CHECKING:
    from vllm.config.vllm import VllmConfig

class Glm5NextForCausalLM(nn.Module):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str=...) -> None: return
