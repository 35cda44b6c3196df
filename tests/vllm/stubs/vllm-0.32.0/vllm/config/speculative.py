# SPDX-License-Identifier: Apache-2.0
"""Made by tests/vllm/stubs.py; not to be edited."""
from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import nn

if TYPE_CHECKING:
    from vllm.config.load import LoadConfig

class SpeculativeConfig:
    num_speculative_tokens: int = ...
    method: Any = ...
    draft_model_config: Any = ...
