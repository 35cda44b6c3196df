# SPDX-License-Identifier: Apache-2.0
"""Made by tests/vllm/stubs.py; not to be edited."""
from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import nn
from vllm.model_executor.custom_op import CustomOp

class GemmaRMSNorm(CustomOp):
    def __init__(self, hidden_size: int, eps: float=...) -> None: return

class RMSNorm(CustomOp):
    def __init__(self, hidden_size: int, eps: float=..., var_hidden_size: int | None=..., has_weight: bool=..., dtype: torch.dtype | None=...) -> None: return

class RMSNormGated(CustomOp):
    eps: Any
    activation: Any
    weight: Any
