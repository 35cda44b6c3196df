# SPDX-License-Identifier: Apache-2.0
"""Made by tests/vllm/stubs.py; not to be edited."""
from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import nn

def build_deepseek_v4_rope(config: Any, *, head_dim: int, rope_head_dim: int, max_position_embeddings: int, compress_ratio: int) -> Any: ...
