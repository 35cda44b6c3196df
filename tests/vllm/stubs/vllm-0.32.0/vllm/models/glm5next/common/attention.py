# SPDX-License-Identifier: Apache-2.0
"""Made by tests/vllm/stubs.py; not to be edited."""
from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import nn
from vllm.models.glm5next.sparse_indexer import SparseAttnIndexerKpool as SparseAttnIndexerKpool

class Indexer(nn.Module):
    topk_tokens: Any
    n_head: Any
    head_dim: Any
    index_kpool: Any
    index_kpool_compress_ape: Any
    index_kpool_compress_gate: Any
    wq_b: Any
    wk_weights_proj: Any
    k_norm: Any
    k_cache: Any
    tail_cache: Any
