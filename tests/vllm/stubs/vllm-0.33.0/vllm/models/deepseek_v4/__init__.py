# SPDX-License-Identifier: Apache-2.0
"""Made by tests/vllm/stubs.py; not to be edited."""
from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import nn
from vllm.models.deepseek_v4.cpu.model import DeepseekV4ForCausalLM as DeepseekV4ForCausalLM
from vllm.models.deepseek_v4.nvidia.mtp import DeepSeekV4MTP as DeepSeekV4MTP
