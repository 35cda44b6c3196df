# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""DeepSeek-V4's layer: the stages of dispatch/common/layer_v4.py, one after the other.

States are written for good, by the compressors: every launch belongs to a stage, and one that is
done is never begun anew.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from ...dispatch.common import layer_v4
from ..caches import quantize_index_query
from ..common import tune
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


def _staged(function: Callable[..., Any]) -> Callable[..., Any]:
    return partial(tune.stage, function)


REASONS = layer_v4.Stages(
    *[*(module.unsupported for module in _MODULES), grouped_o_proj_pto.unsupported]
)
STAGES = layer_v4.Stages(
    *[_staged(x) for x in (*(m.forward for m in _MODULES), grouped_o_proj_pto.turned_back)]
)


class _Layer(layer_v4.Layer):
    def compress(self, stages: layer_v4.Stages) -> None:
        """Entries and index keys in the same launches."""
        if self.idx_k is None:
            return super().compress(stages)
        start = self.starts()
        entries, keys = self.of_entries(start), self.of_index_keys(start)
        both = [
            compressor.Own(*(x[name] for name in compressor.Own._fields)) for x in (entries, keys)
        ]
        if not compressor.joined(*both):
            return super().compress(stages)
        stages.compressor(**entries, second=both[1])


def unsupported(**arguments: Any) -> str | None:
    return _Layer(**arguments).unsupported(REASONS)


def forward(**arguments: Any) -> Tensor:
    return _Layer(**arguments).run(STAGES)
