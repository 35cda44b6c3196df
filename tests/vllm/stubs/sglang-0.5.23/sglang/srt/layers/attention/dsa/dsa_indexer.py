# SPDX-License-Identifier: Apache-2.0
"""Made by tests/vllm/stubs.py; not to be edited."""
from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import nn

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

class Indexer:
    def _get_topk_paged(self, forward_batch: ForwardBatch, layer_id: int, q_fp8: torch.Tensor, weights: torch.Tensor, metadata: Any) -> torch.Tensor: ...
    def _get_topk_ragged(self, enable_dual_stream: bool, forward_batch: ForwardBatch, layer_id: int, q_fp8: torch.Tensor, weights: torch.Tensor, metadata: Any, topk_result: Any=...) -> torch.Tensor: ...
    index_topk: Any
