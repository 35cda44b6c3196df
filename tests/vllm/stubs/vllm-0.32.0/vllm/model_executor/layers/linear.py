# SPDX-License-Identifier: Apache-2.0
"""Made by tests/vllm/stubs.py; not to be edited."""
from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import nn

class ColumnParallelLinear:
    def __init__(self, input_size: int, output_size: int, bias: bool=..., gather_output: bool=..., skip_bias_add: bool=..., params_dtype: torch.dtype | None=..., quant_config: Any=..., prefix: str=..., *, return_bias: bool=..., disable_tp: bool=..., tp_rank: int | None=..., tp_size: int | None=...) -> None: return

class MergedColumnParallelLinear(ColumnParallelLinear):
    def __init__(self, input_size: int, output_sizes: list[int], bias: bool=..., gather_output: bool=..., skip_bias_add: bool=..., params_dtype: torch.dtype | None=..., quant_config: Any=..., prefix: str=..., *, return_bias: bool=..., disable_tp: bool=...) -> None: return

class MinimaxM3QKVParallelLinearWithIndexer:
    def __init__(self, hidden_size: int, head_size: int, total_num_heads: int, total_num_kv_heads: int, total_num_index_heads: int, index_head_size: int, bias: bool=..., quant_config: Any=..., prefix: str=...) -> None: return

class ReplicatedLinear:
    def __init__(self, input_size: int, output_size: int, bias: bool=..., skip_bias_add: bool=..., params_dtype: torch.dtype | None=..., quant_config: Any=..., prefix: str=..., *, return_bias: bool=..., disable_tp: bool=...) -> None: return

class RowParallelLinear:
    def __init__(self, input_size: int, output_size: int, bias: bool=..., input_is_parallel: bool=..., skip_bias_add: bool=..., params_dtype: torch.dtype | None=..., reduce_results: bool=..., quant_config: Any=..., prefix: str=..., *, return_bias: bool=..., disable_tp: bool=...) -> None: return
    reduce_results: Any

class UnquantizedLinearMethod:
    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None=...) -> torch.Tensor: ...
