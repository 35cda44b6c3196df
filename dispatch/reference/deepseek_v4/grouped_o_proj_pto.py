# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Attention's output through two products, the first a group of heads at a time; rnd rounds to the
dtype of attn_out.

    o = rnd(RoPE^-1(attn_out))   out = rnd(concat_g(rnd(o[heads of group g] W_o_a[g])) W_o_b)

RoPE^-1 turns the last Dr dims of a head back where they stand: keys are values there, and carry
their rotation along.

Models: DeepSeek-V4.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...common import nz, rope
from ..common.precision import accumulator, matmul


def forward(
    attn_out: Tensor,
    w_o_a: Tensor,
    w_o_b: Tensor,
    rope_sin: Tensor,
    rope_cos: Tensor,
    weight_format: str,
    **_: Any,
) -> Tensor:
    dtype = attn_out.dtype
    groups = turned_back(attn_out, rope_sin, rope_cos).flatten(2).chunk(w_o_a.shape[0], -1)
    weights = (nz.to_nd(weight, weight_format) for weight in w_o_a)
    ranks = [matmul(x, weight).to(dtype) for x, weight in zip(groups, weights, strict=True)]
    return matmul(torch.cat(ranks, -1), nz.to_nd(w_o_b, weight_format)).to(dtype)


def turned_back(attn_out: Tensor, rope_sin: Tensor, rope_cos: Tensor) -> Tensor:
    """o."""
    dtype, wide = attn_out.dtype, accumulator(attn_out)
    sin, cos = (each.to(wide)[:, :, None] for each in (rope_sin, rope_cos))
    return rope.rotate_last(attn_out.to(wide), sin, cos, inverse=True).to(dtype)
