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

import torch
from torch import Tensor

from ...dispatch.common import layer_v4
from ..caches import quantize_index_query
from ..common import tune
from ..indexer import lightning_indexer, quant_lightning_indexer
from . import (
    before_attention,
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
    def run(self, stages: layer_v4.Stages) -> Tensor:
        """What comes before the attention in launches of several stages, where there is a token,
        and all that is made of entries has its place."""
        prolog = sharedkv_prolog_pto.Call(**self.of_prolog())
        compressing = self._compressing()
        together = prolog.rows * prolog.heads > 0 and self.ori_kv.numel() > 0
        if compressing is not None:
            together &= compressing.stateful and all(compressing.storing)
        if not together:
            return super().run(stages)
        indices = None
        if self.idx_k is not None:
            indices = self.x.new_empty((*self.x.shape[:2], 1, self.sparse_count), dtype=torch.int32)
        sees = sparse_attn_sharedkv.Seen(**self.of_attention(prolog.query, indices))
        tune.stage(before_attention.launch, prolog, compressing, sees)
        if self.idx_k is not None:
            indices = self.selected(stages, prolog.query_index, prolog.weights)
        of_attention = self.of_attention(prolog.query, indices)
        out: Tensor = stages.sparse_attn_sharedkv(**of_attention, plan=sees.plan)[0]
        # a stage of its own: what is begun anew behind it must not turn again
        out = stages.turned_back(out, self.sin, self.cos, in_place=True)
        if self.w_o_a is None:
            return out
        turned = dict(rope_sin=None, rope_cos=None)
        done: Tensor = stages.grouped_o_proj(**self.of_output(out) | turned)
        return done

    def compress(self, stages: layer_v4.Stages) -> None:
        """Entries and index keys in the same launches."""
        start = self.starts()
        stages.compressor(**self.of_entries(start), second=self._second(start))

    def _compressing(self) -> compressor.Call | None:
        if self.cmp_kv is None:
            return None
        start = self.starts()
        return compressor.Call(**self.of_entries(start), second=self._second(start))

    def _second(self, start: Tensor) -> compressor.Own | None:
        """The index keys' compressor, whose states lie in the same pages as the entries'."""
        if self.idx_k is None:
            return None
        keys = self.of_index_keys(start)
        return compressor.Own(*(keys[name] for name in compressor.Own._fields))


def unsupported(**arguments: Any) -> str | None:
    return _Layer(**arguments).unsupported(REASONS)


def forward(**arguments: Any) -> Tensor:
    return _Layer(**arguments).run(STAGES)
