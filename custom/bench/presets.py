# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The rows that each op is measured on: the shapes of DeepSeek-V3.2, Qwen3-Next and the
FlashAttention papers on a GPU or NPU, and small ones that a laptop runs in seconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from . import (
    attention,
    block_sparse,
    compression,
    convolution,
    delta_rule,
    hyper_connections,
    indexer_loss,
    latents,
    merging,
    quantized_caches,
    quantized_weights,
    shared_kv,
    shared_kv_prolog,
    sparse_attention,
    sparse_attention_v4,
    sparse_gradients,
)
from .case import Case

_PRESETS: Mapping[str, Callable[[bool], list[Case]]] = {
    **sparse_attention.PRESETS,
    **attention.PRESETS,
    **block_sparse.PRESETS,
    **latents.PRESETS,
    **indexer_loss.PRESETS,
    **delta_rule.PRESETS,
    **quantized_caches.PRESETS,
    **merging.PRESETS,
    **convolution.PRESETS,
    **sparse_gradients.PRESETS,
    **compression.PRESETS,
    **shared_kv.PRESETS,
    **shared_kv_prolog.PRESETS,
    **sparse_attention_v4.PRESETS,
    **hyper_connections.PRESETS,
}

_SWEEPS: dict[str, Callable[[str, bool], list[Case]]] = dict.fromkeys(
    attention.PRESETS, attention.sweep
)


def sweep(op: str, device: str) -> list[Case]:
    """Rows of `op` over the length of its sequences; none for most ops."""
    return _SWEEPS[op](op, device == "cpu") if op in _SWEEPS else []


def presets(op: str, device: str) -> list[Case]:
    """The rows of `op`: the full ones, or the small ones on a CPU."""
    small = device == "cpu"
    on_npu = device == "npu"
    first = {**_PRESETS, **(shared_kv.ON_NPU if on_npu else {})}
    behind = quantized_weights.ON_NPU if on_npu else quantized_weights.PRESETS
    return [case for rows in (first, behind) if op in rows for case in rows[op](small)]
