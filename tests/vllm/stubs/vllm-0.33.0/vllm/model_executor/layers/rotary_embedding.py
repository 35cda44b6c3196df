# SPDX-License-Identifier: Apache-2.0
"""Made by tests/vllm/stubs.py; not to be edited."""
from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import nn

def get_rope(head_size: int, max_position: int, is_neox_style: bool=..., rope_parameters: dict[str, Any] | None=..., dtype: torch.dtype | None=..., dual_chunk_attention_config: dict[str, Any] | None=..., mrope_positions_factor: int=...) -> Any: ...
