# SPDX-License-Identifier: Apache-2.0
"""Made by tests/vllm/stubs.py; not to be edited."""
from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import nn

if TYPE_CHECKING:
    from vllm.config.vllm import VllmConfig
    from vllm.v1.attention.backend import AttentionBackend
    from vllm.v1.kv_cache_interface import KVCacheSpec

class AttentionLayerBase(ABC):
    impl: Any
    supports_dcp: bool = ...
    is_draft_layer: bool = ...
    def bind_kv_cache(self, kv_cache: torch.Tensor) -> None: return
    @abstractmethod
    def get_attn_backend(self) -> type[AttentionBackend]: ...
    @abstractmethod
    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec | None: ...
