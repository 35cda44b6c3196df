# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Entries of requests that begin at position 0, see _compressed.py."""

from __future__ import annotations

from torch import Tensor

from ..common import compressed
from . import _compressed


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
    closed, windows = _compressed.closing(tokens, shape, cmp_ratio)
    own = _compressed.own(tokens, windows, _compressed.members(windows, cmp_ratio, coff))
    kv, z = _compressed.projected(x, wkv, wgate, ape, tokens)
    values, logits = (_compressed.taken(each, own, coff) for each in (kv, z))
    pooled = (_compressed.shares(logits, own >= 0) * values).sum(1)
    entries = _compressed.finished(
        pooled, closed, norm_weight, rope_sin, rope_cos, rope_head_dim, norm_eps, rotary_mode
    )
    return _compressed.placed(entries, closed, shape, hadamard, x.dtype)
