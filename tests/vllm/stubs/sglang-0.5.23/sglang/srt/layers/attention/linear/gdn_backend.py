# SPDX-License-Identifier: Apache-2.0
"""Made by tests/vllm/stubs.py; not to be edited."""
from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import nn
from sglang.srt.layers.attention.hybrid_linear_attn_backend import MambaAttnBackendBase

class GDNAttnBackend(MambaAttnBackendBase):
    def __init__(self, model_runner: Any) -> None: return
    kernel_dispatcher: Any

class GDNKernelDispatcher:
    supports_packed_decode: Any
    decode_kernel: Any
    extend_kernel: Any
