# SPDX-License-Identifier: Apache-2.0
"""Made by tests/vllm/stubs.py; not to be edited."""
from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import nn
from vllm.model_executor.custom_op import CustomOp

class SparseAttnIndexerKpool(CustomOp):
    def __init__(self, k_cache: Any, quant_block_size: int, scale_fmt: str, topk_tokens: int, head_dim: int, max_pool_len: int, max_total_seq_len: int, topk_indices_buffer: torch.Tensor, skip_k_cache_insert: bool=..., use_fp4_cache: bool=..., tail_cache: Any=...) -> None: return
