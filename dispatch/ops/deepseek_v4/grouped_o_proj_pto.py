# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Arguments and output of npu_grouped_o_proj_pto.

attn_out [B, S, N, D]   w_o_a [G, N/G*D, Ro]   w_o_b [G*Ro, H]   rope_sin, rope_cos [B, S, Dr]
out [B, S, H]   G divides N; the weights in NZ: w_o_a a group by itself, [G, Ro/16, K/16, 16, 16]
"linear": w_o_a [G, Ro, N/G*D], w_o_b [H, G*Ro]
Weights of 8 bits: see weight_args.py; scales of w_o_a [G, 1, Ro] or [G, K/128, Ro/128].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

import torch
from torch import Tensor

from ...check import Checker
from ...common import nz
from ..common import prologs, weight_args

SCHEMA = (
    "npu_grouped_o_proj_pto(Tensor attn_out, Tensor w_o_a, Tensor w_o_b, Tensor rope_sin,"
    ' Tensor rope_cos, *, str weight_format="nz", SymInt weight_quant_mode=0,'
    " Tensor? dequant_scale_w_o_a=None, Tensor? dequant_scale_w_o_b=None) -> Tensor"
)


class Arguments(TypedDict):
    attn_out: Tensor
    w_o_a: Tensor
    w_o_b: Tensor
    rope_sin: Tensor
    rope_cos: Tensor
    weight_format: str
    weight_quant_mode: int
    dequant_scale_w_o_a: Tensor | None
    dequant_scale_w_o_b: Tensor | None


WEIGHTS = ("w_o_a", "w_o_b")


def check(c: Checker, a: Arguments) -> None:
    attn_out, w_o_a, w_o_b = a["attn_out"], a["w_o_a"], a["w_o_b"]
    weight_quant_mode = a["weight_quant_mode"]
    scales = dict(
        dequant_scale_w_o_a=a["dequant_scale_w_o_a"], dequant_scale_w_o_b=a["dequant_scale_w_o_b"]
    )
    dtypes = weight_args.quantized_weights(c, weight_quant_mode, WEIGHTS, ())
    floats = dict(
        attn_out=(attn_out, "B S N D"),
        rope_sin=(a["rope_sin"], "B S Dr"),
        rope_cos=(a["rope_cos"], "B S Dr"),
    )
    given = {name: x for name, (x, _) in floats.items()} | dict(w_o_a=w_o_a, w_o_b=w_o_b)
    c.same_device(**given, **scales)
    c.floating("attn_out", attn_out)
    c.same_dtype(**{name: x for name, x in given.items() if name not in dtypes})
    for name, (tensor, shape) in floats.items():
        c.shape(name, tensor, shape)
    c.contiguous(**given)
    prologs.rotary(c, "D")
    output_weights(
        c, w_o_a, w_o_b, "attn_out", a["weight_format"], weight_quant_mode, dtypes, scales
    )


def output_weights(
    c: Checker,
    w_o_a: Tensor,
    w_o_b: Tensor,
    heads: str,
    weight_format: str,
    mode: int,
    dtypes: Mapping[str, torch.dtype],
    scales: Mapping[str, Tensor | None],
) -> None:
    """Both weights, where N and D are known; N is that of the argument `heads`."""
    sizes = c.sizes
    if w_o_a.ndim not in (3, 5):
        linear = weight_format == "linear"
        wanted = "[G, Ro, N/G*D]" if linear else "[G, N/G*D, Ro], or its NZ in 5-D"
        c.fail(f"`w_o_a` has shape {list(w_o_a.shape)}, expected {wanted}.")
    groups = w_o_a.shape[0]
    c.require(
        groups > 0 and sizes["N"] % groups == 0,
        f"`w_o_a` has {groups} groups, expected a divisor of N={sizes['N']} (from `{heads}`).",
    )
    sizes["N/G*D"] = sizes["N"] // groups * sizes["D"]
    sizes["Ro"] = nz.columns_of(w_o_a, weight_format)
    sizes["G*Ro"] = groups * sizes["Ro"]
    if w_o_b.ndim not in (2, 4):
        c.shape("w_o_b", w_o_b, "H G*Ro" if weight_format == "linear" else "G*Ro H")
    sizes.setdefault("H", nz.columns_of(w_o_b, weight_format))
    sizes["G"] = groups
    weights = dict(w_o_a=(w_o_a, "G N/G*D Ro"), w_o_b=(w_o_b, "G*Ro H"))
    weight_args.weights(c, mode, weights, dtypes, weight_args.named(WEIGHTS, scales), weight_format)


def fake(attn_out: Tensor, w_o_b: Tensor, weight_format: str, **_: Any) -> Tensor:
    return attn_out.new_empty([*attn_out.shape[:2], nz.columns_of(w_o_b, weight_format)])
