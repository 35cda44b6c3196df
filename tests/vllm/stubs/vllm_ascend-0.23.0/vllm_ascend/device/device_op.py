# SPDX-License-Identifier: Apache-2.0
"""Made by tests/vllm/stubs.py; not to be edited."""
from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import nn

class BaseDeviceAdaptor:
    @staticmethod
    def indexer_select_post_process(sfa_impl: Any, q_li: torch.Tensor, q_li_scale: torch.Tensor | None, q_li_shape_ori: tuple[Any, ...] | None, weights: torch.Tensor, kv_cache: tuple, attn_metadata: Any, actual_seq_lengths_query: torch.Tensor, actual_seq_lengths_key: torch.Tensor, enable_sparse_li_c8: bool, use_torch_npu_lightning_indexer: bool) -> torch.Tensor: ...
    @classmethod
    def execute_sparse_flash_attention_process(cls, sfa_impl: Any, ql_nope: torch.Tensor, q_pe: torch.Tensor, kv_cache: tuple, topk_indices: torch.Tensor, attn_metadata: Any, actual_seq_lengths_query: torch.Tensor, actual_seq_lengths_key: torch.Tensor, *, block_table: torch.Tensor | None=..., sparse_mode: int=..., return_lse: bool=...) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
    @staticmethod
    def _format_sparse_flash_attention_output(attn_output: torch.Tensor, softmax_max: torch.Tensor, softmax_sum: torch.Tensor, return_lse: bool) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...

DeviceOperator: Any = ...
