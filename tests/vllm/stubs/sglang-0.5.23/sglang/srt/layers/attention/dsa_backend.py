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
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

@dataclass(frozen=True)
class DSAMetadata:
    cache_seqlens_int32: torch.Tensor
    cu_seqlens_q: torch.Tensor
    real_page_table: torch.Tensor
    dsa_extend_seq_lens_list: Any

class DeepseekSparseAttnBackend:
    def __init__(self, model_runner: Any, skip_prefill: bool=..., speculative_step_id: Any=..., topk: Any=..., speculative_num_steps: Any=..., seed_dsa_topk_from_draft_extend: bool=...) -> None: return
    def forward_extend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: RadixAttention, forward_batch: ForwardBatch, save_kv_cache: Any=..., q_rope: Any=..., k_rope: Any=..., topk_indices: Any=..., cos_sin_cache: Any=..., is_neox: Any=..., llama_4_scaling: Any=..., attn_sink: Any=...) -> torch.Tensor: ...
    def forward_decode(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: RadixAttention, forward_batch: ForwardBatch, save_kv_cache: Any=..., q_rope: Any=..., k_rope: Any=..., topk_indices: Any=..., cos_sin_cache: Any=..., is_neox: Any=..., llama_4_scaling: Any=..., attn_sink: Any=...) -> torch.Tensor: ...
    forward_metadata: Any
    dsa_kv_cache_store_fp8: Any
    token_to_kv_pool: Any
    use_mha: Any
    use_fused_topk: Any
