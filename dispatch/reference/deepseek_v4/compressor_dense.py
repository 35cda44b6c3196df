# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Entries of requests that begin at position 0, see compressed.py."""

from __future__ import annotations

from torch import Tensor

from ...common import compressed
from . import compression


def forward(
    x: Tensor,
    wkv: Tensor,
    wgate: Tensor,
    ape: Tensor,
    norm_weight: Tensor,
    rope_sin: Tensor,
    rope_cos: Tensor,
    rope_head_dim: int,
    cmp_ratio: int,
    cu_seqlens: Tensor | None,
    seqused: Tensor | None,
    coff: int,
    norm_eps: float,
    rotary_mode: int,
    hadamard: bool,
) -> Tensor:
    tokens = compressed.tokens_of(x, cu_seqlens, seqused, None)
    shape = compressed.rows(x, cu_seqlens, cmp_ratio)
    closed, windows = compression.closing(tokens, shape, cmp_ratio)
    own = compression.own(tokens, windows, compression.members(windows, cmp_ratio, coff))
    kv, z = compression.projected(x, wkv, wgate, ape, tokens)
    values, logits = (compression.taken(each, own, coff) for each in (kv, z))
    pooled = (compression.shares(logits, own >= 0) * values).sum(1)
    entries = compression.finished(
        pooled, closed, norm_weight, rope_sin, rope_cos, rope_head_dim, norm_eps, rotary_mode
    )
    return compression.placed(entries, closed, shape, hadamard, x.dtype)
