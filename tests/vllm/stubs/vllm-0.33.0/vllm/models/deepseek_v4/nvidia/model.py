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
    from vllm.models.deepseek_v4.attention import DeepseekV4Attention

class DeepseekV4DecoderLayer(nn.Module):
    def __init__(self, vllm_config: Any, prefix: Any, topk_indices_buffer: torch.Tensor | None=..., aux_stream_list: list[torch.cuda.Stream] | None=...) -> None: return

class DeepseekV4ForCausalLM(nn.Module):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str=...) -> None: return

def _select_dsv4_attn_cls(vllm_config: VllmConfig) -> type[DeepseekV4Attention]: ...
