# SPDX-License-Identifier: Apache-2.0
"""Made by tests/vllm/stubs.py; not to be edited."""
from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import nn

if TYPE_CHECKING:
    from vllm.config.cache import CacheConfig
    from vllm.config.compilation import CompilationConfig
    from vllm.config.model import ModelConfig
    from vllm.config.parallel import ParallelConfig
    from vllm.config.speculative import SpeculativeConfig

def get_current_vllm_config() -> VllmConfig: ...

class VllmConfig:
    model_config: ModelConfig = ...
    cache_config: CacheConfig = ...
    parallel_config: ParallelConfig = ...
    lora_config: Any = ...
    speculative_config: SpeculativeConfig | None = ...
    compilation_config: CompilationConfig = ...
    kv_transfer_config: Any = ...
