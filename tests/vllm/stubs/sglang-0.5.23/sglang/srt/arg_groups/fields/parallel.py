# SPDX-License-Identifier: Apache-2.0
"""Made by tests/vllm/stubs.py; not to be edited."""
from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import nn

class Parallel:
    tp_size: Any = ...
    dcp_size: Any = ...
    pp_size: Any = ...
    attn_cp_size: Any = ...
    enable_dsa_cache_layer_split: Any = ...
