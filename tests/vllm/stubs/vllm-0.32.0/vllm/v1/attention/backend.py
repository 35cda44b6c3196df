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
    from vllm.v1.kv_cache_interface import KVCacheSpec
    from vllm.v1.kv_cache_layout import KVCacheLayout

class AttentionBackend(ABC):
    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: KVCacheSpec | None=...) -> list[int | MultipleOf]: ...
    @staticmethod
    @abstractmethod
    def get_name() -> str: ...
    @staticmethod
    @abstractmethod
    def get_impl_cls() -> Any: ...
    @staticmethod
    @abstractmethod
    def get_builder_cls() -> Any: ...
    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int: ...
    @classmethod
    def is_mla(cls) -> bool: ...
    @classmethod
    def is_sparse(cls) -> bool: ...
    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...] | None: ...

class AttentionCGSupport:
    UNIFORM_BATCH: Any = ...

M = TypeVar("M")
class AttentionMetadataBuilder(ABC, Generic[M]):
    _cudagraph_support: Any = ...
    reorder_batch_threshold: int | None = ...
    @abstractmethod
    def __init__(self, kv_cache_spec: KVCacheSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device) -> None: return
    @abstractmethod
    def build(self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool=...) -> Any: ...

@dataclass
class CommonAttentionMetadata:
    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor

@dataclass(frozen=True)
class MultipleOf:
    base: int
