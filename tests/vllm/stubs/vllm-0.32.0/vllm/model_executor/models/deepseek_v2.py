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

class DeepseekV2ForCausalLM(nn.Module):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str=...) -> None: return

class DeepseekV3ForCausalLM(DeepseekV2ForCausalLM):
    ...

class GlmMoeDsaForCausalLM(DeepseekV2ForCausalLM):
    ...

class Indexer(nn.Module):
    n_head: Any
    head_dim: Any
    rope_dim: Any
    wq_b: Any
    wk_weights_proj: Any
    k_norm: Any
    softmax_scale: Any
    k_cache: Any
