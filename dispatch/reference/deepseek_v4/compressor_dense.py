# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Entries of requests that begin at position 0, see compressed.py."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import Unpack

from ...common import compressed
from ...ops.deepseek_v4.compressor_dense import Arguments
from . import compression


def forward(**a: Unpack[Arguments]) -> Tensor:
    x, cmp_ratio = a["x"], a["cmp_ratio"]
    tokens = compressed.tokens_of(x, a["cu_seqlens"], a["seqused"], None)
    shape = compressed.rows(x, a["cu_seqlens"], cmp_ratio)
    closed, windows = compression.closing(tokens, shape, cmp_ratio)
    own = compression.own(tokens, windows, compression.members(windows, cmp_ratio, a["coff"]))
    kv, z = compression.projected(x, a["wkv"], a["wgate"], a["ape"], tokens)
    values, logits = (compression.taken(each, own, a["coff"]) for each in (kv, z))
    pooled = (compression.shares(logits, own >= 0) * values).sum(1)
    entries = compression.finished(pooled, closed, a)
    return compression.placed(entries, closed, shape, a["hadamard"], x.dtype)
