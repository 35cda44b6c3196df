# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Gradients of compressor_dense.py, see compressed.py.  With p the shares of a window:

    d z = p (kv - C) d C     d kv = p d C
    x: d kv wkv + d z wgate   wkv: d kv^T x   wgate: d z^T x   ape: sums of d z over t mod m

The products and the shares are made again.
"""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import Unpack

from ...common import compressed
from ...common.compressed import PAIRS
from ...ops.deepseek_v4.compressor_dense_grad import Arguments
from ..common import quantizers
from ..common.precision import accumulator
from . import compression


def backward(**a: Unpack[Arguments]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    x, wkv, wgate, norm_weight = a["x"], a["wkv"], a["wgate"], a["norm_weight"]
    cmp_ratio, coff = a["cmp_ratio"], a["coff"]
    wide, size, pairs = accumulator(x), norm_weight.shape[0], a["rotary_mode"] == PAIRS
    tokens = compressed.tokens_of(x, a["cu_seqlens"], a["seqused"], None)
    closed, windows = compression.closing(tokens, [*a["d_out"].shape[:-1]], cmp_ratio)
    own = compression.own(tokens, windows, compression.members(windows, cmp_ratio, coff))
    kv, z = compression.projected(x, wkv, wgate, a["ape"], tokens)
    values, logits = (compression.taken(each, own, coff) for each in (kv, z))
    p = compression.shares(logits, own >= 0)
    pooled = (p * values).sum(1)
    scale = compression.scale_of(pooled, a["norm_eps"])

    d = a["d_out"].flatten(0, -2)[closed].to(wide)
    if a["hadamard"]:
        d = quantizers.hadamard(d, size**-0.5)
    sin, cos = (
        compression.angles(rope, a["rope_head_dim"], pairs, wide)[closed]
        for rope in (a["rope_sin"], a["rope_cos"])
    )
    d = compression.turned(d, -sin, cos, pairs)
    d_norm = (d * pooled * scale).sum(0)
    d = d * norm_weight
    d = scale * d - pooled * scale**3 * (d * pooled).mean(-1, keepdim=True)
    d_values = p * d[:, None]
    d_logits = d_values * (values - pooled[:, None])

    d_kv, d_z = (_placed(each, own, kv, coff) for each in (d_values, d_logits))
    absent = (tokens.position < 0)[:, None]
    flat = x.flatten(0, -2).to(wide).masked_fill(absent, 0)
    d_x = d_kv @ wkv.to(wide) + d_z @ wgate.to(wide)
    d_ape = torch.zeros_like(a["ape"]).index_add_(0, tokens.position % cmp_ratio, d_z)
    return (
        d_x.to(x.dtype).view(x.shape),
        (d_kv.mT @ flat).to(wkv.dtype),
        (d_z.mT @ flat).to(wgate.dtype),
        d_ape,
        d_norm.to(norm_weight.dtype),
    )


def _placed(d: Tensor, own: Tensor, rows: Tensor, coff: int) -> Tensor:
    """The inverse of `taken`: a token's channels are taken once, or not at all."""
    out = rows.new_zeros([len(rows) + 1, coff, rows.shape[-1] // coff])
    for i, (part, at) in enumerate(zip(d.chunk(coff, 1), own.chunk(coff, 1), strict=True)):
        # the last row takes what is absent
        out[at.where(at >= 0, len(rows)), i] = part
    return out[:-1].flatten(1)
