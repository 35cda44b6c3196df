# SPDX-License-Identifier: Apache-2.0
"""Made by tests/vllm/stubs.py; not to be edited."""
from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import nn

@dataclass
class ForwardContext:
    no_compile_layers: dict[str, Any]
    attn_metadata: Any

def get_forward_context() -> ForwardContext: ...
