# SPDX-License-Identifier: Apache-2.0
"""Made by tests/vllm/stubs.py; not to be edited."""
from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import nn

@dataclass
class GDNAttentionMetadata:
    num_prefills: int
    num_prefill_tokens: int
    num_decode_tokens: int
    non_spec_state_indices_tensor: torch.Tensor | None = ...
    prefill_query_start_loc: torch.Tensor | None = ...
    prefill_state_indices: torch.Tensor | None = ...
    prefill_has_initial_state: torch.Tensor | None = ...
