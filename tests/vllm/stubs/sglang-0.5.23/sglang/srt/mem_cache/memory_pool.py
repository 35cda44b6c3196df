# SPDX-License-Identifier: Apache-2.0
"""Made by tests/vllm/stubs.py; not to be edited."""
from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import nn

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention

class KVCache:
    dtype: Any

class MLATokenToKVPool(KVCache):
    def get_key_buffer(self, layer_id: int) -> Any: ...
    def set_mla_kv_buffer(self, layer: RadixAttention, loc_info: Any, cache_k_nope: torch.Tensor, cache_k_rope: torch.Tensor, layer_id_override: Any=...) -> Any: ...
    dsa_kv_cache_store_fp8: Any

class DSATokenToKVPool(MLATokenToKVPool):
    def get_index_k_with_scale_buffer(self, layer_id: int) -> torch.Tensor: ...
