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

STAGES = layer_v4.Stages(
    sharedkv_prolog_pto.forward,
    compressor.forward,
    quantize_index_query.forward,
    lightning_indexer.forward,
    quant_lightning_indexer.forward,
    sparse_attn_sharedkv.forward,
    kv_quant_sparse_attn_sharedkv.forward,
    grouped_o_proj_pto.forward,
    grouped_o_proj_pto.turned_back,
)


def forward(**arguments: Any) -> Tensor:
    return layer_v4.Layer(**arguments).run(STAGES)
