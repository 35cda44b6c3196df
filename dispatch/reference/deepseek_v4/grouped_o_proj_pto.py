# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Attention's output through two products, the first a group of heads at a time; rnd rounds to the
dtype of attn_out.

    o = rnd(RoPE^-1(attn_out))   out = rnd(concat_g(rnd(o[heads of group g] W_o_a[g])) W_o_b)

RoPE^-1 turns the last Dr dims of a head back where they stand: keys are values there, and carry
their rotation along.

Weights of 8 bits: a group's o, and what W_o_b multiplies, are quantized before their products
(weight_args.py).

Models: DeepSeek-V4.
"""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import Unpack

from ...common import rope
from ...ops.deepseek_v4.grouped_o_proj_pto import Arguments
from ..common import weight_args
from ..common.precision import accumulator


def forward(**a: Unpack[Arguments]) -> Tensor:
    attn_out = a["attn_out"]
    dtype, front = attn_out.dtype, attn_out.shape[:2]

    def product(x: Tensor, weight: Tensor, scale: Tensor | None) -> Tensor:
        rows = weight_args.rows(x, None, weight, "ue8m0")
        return weight_args.product(rows, weight, scale, a["weight_format"]).to(dtype)

    groups = (
        turned_back(attn_out, a["rope_sin"], a["rope_cos"])
        .flatten(2)
        .chunk(a["w_o_a"].shape[0], -1)
    )
    scales = [None] * len(groups) if a["dequant_scale_w_o_a"] is None else a["dequant_scale_w_o_a"]
    ranks = [product(*each) for each in zip(groups, a["w_o_a"], scales, strict=True)]
    out = product(torch.cat(ranks, -1), a["w_o_b"], a["dequant_scale_w_o_b"])
    return out.view(*front, out.shape[-1])


def turned_back(attn_out: Tensor, rope_sin: Tensor, rope_cos: Tensor) -> Tensor:
    """o."""
    dtype, wide = attn_out.dtype, accumulator(attn_out)
    sin, cos = (each.to(wide)[:, :, None] for each in (rope_sin, rope_cos))
    return rope.rotate_last(attn_out.to(wide), sin, cos, inverse=True).to(dtype)
