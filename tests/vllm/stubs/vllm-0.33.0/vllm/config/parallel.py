# SPDX-License-Identifier: Apache-2.0
"""Made by tests/vllm/stubs.py; not to be edited."""
from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import nn

class ParallelConfig:
    pipeline_parallel_size: int = ...
    prefill_context_parallel_size: int = ...
    data_parallel_size: int = ...
    decode_context_parallel_size: int = ...
    @property
    def use_ubatching(self) -> bool: ...
