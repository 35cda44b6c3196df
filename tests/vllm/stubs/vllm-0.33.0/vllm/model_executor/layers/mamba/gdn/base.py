# SPDX-License-Identifier: Apache-2.0
"""Made by tests/vllm/stubs.py; not to be edited."""
from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import nn
from vllm.model_executor.custom_op import PluggableLayer
from vllm.model_executor.layers.mamba.abstract import MambaBase

if TYPE_CHECKING:
    from vllm.config.vllm import VllmConfig

class GatedDeltaNetAttention(PluggableLayer, MambaBase):
    def __init__(self, config: Any, vllm_config: VllmConfig, prefix: str=...) -> None: return
    prefix: Any
    tp_size: Any
    activation: Any
