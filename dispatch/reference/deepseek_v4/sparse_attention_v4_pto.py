# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The stages of dispatch/common/layer_v4.py, one after the other."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...common import layer_v4
from ..caches import quantize_index_query
from ..indexer import lightning_indexer, quant_lightning_indexer
from . import (
    compressor,
    grouped_o_proj_pto,
    kv_quant_sparse_attn_sharedkv,
    sharedkv_prolog_pto,
    sparse_attn_sharedkv,
)

_MODULES = (
    sharedkv_prolog_pto,
    compressor,
    quantize_index_query,
    lightning_indexer,
    quant_lightning_indexer,
    sparse_attn_sharedkv,
    kv_quant_sparse_attn_sharedkv,
    grouped_o_proj_pto,
)
STAGES = layer_v4.Stages(
    *[*(module.forward for module in _MODULES), grouped_o_proj_pto.turned_back]
)


def forward(**arguments: Any) -> Tensor:
    return layer_v4.Layer(**arguments).run(STAGES)
