# SPDX-License-Identifier: Apache-2.0
"""Made by tests/vllm/stubs.py; not to be edited."""
from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import nn

class ExecKernel:
    dsa_prefill_backend: Any = ...
    dsa_decode_backend: Any = ...

class ExecMamba:
    enable_linear_replayssm: Any = ...
    enable_linear_replayssm_spec: Any = ...

class ExecOverlap:
    enable_two_batch_overlap: Any = ...
