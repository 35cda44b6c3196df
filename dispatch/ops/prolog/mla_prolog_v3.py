# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Arguments and outputs of npu_mla_prolog_v3, torch_npu's words for npu_mla_prolog_pto: tokens
[B, S, H] or [T, H].

A 4-D weight is NZ, a 2-D one row-major, or in an NPU's own format.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...check import Checker
from ...common import mla_v3, quantised
from . import mla_prolog_pto

SCHEMA = (
    "npu_mla_prolog_v3(Tensor token_x, Tensor weight_dq, Tensor weight_uq_qr, Tensor weight_uk,"
    " Tensor weight_dkv_kr, Tensor rmsnorm_gamma_cq, Tensor rmsnorm_gamma_ckv, Tensor rope_sin,"
    " Tensor rope_cos, Tensor(a!) kv_cache, Tensor(b!) kr_cache, *, Tensor? cache_index=None,"
    " Tensor? dequant_scale_x=None, Tensor? dequant_scale_w_dq=None,"
    " Tensor? dequant_scale_w_uq_qr=None, Tensor? dequant_scale_w_dkv_kr=None,"
    " Tensor? quant_scale_ckv=None, Tensor? quant_scale_ckr=None, Tensor? smooth_scales_cq=None,"
    " Tensor? actual_seq_len=None, Tensor? k_nope_clip_alpha=None,"
    " float rmsnorm_epsilon_cq=1e-5, float rmsnorm_epsilon_ckv=1e-5,"
    ' str cache_mode="PA_BSND", bool query_norm_flag=False, SymInt weight_quant_mode=0,'
    " SymInt kv_cache_quant_mode=0, SymInt query_quant_mode=0, SymInt ckvkr_repo_mode=0,"
    " SymInt quant_scale_repo_mode=0, SymInt tile_size=128, float qc_qr_scale=1.,"
    " float kc_scale=1., int? token_x_dtype=None, int? weight_dq_dtype=None,"
    " int? weight_uq_qr_dtype=None, int? weight_dkv_kr_dtype=None, int? kv_cache_dtype=None)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
GE = "MlaPrologV3"

_ABSENT = {
    "quant_scale_ckv": "a scale for the whole cache",
    "quant_scale_ckr": "a scale for the whole cache",
    "actual_seq_len": "every token has a slot, or a negative one",
    "token_x_dtype": "the tensor has its dtype",
    "weight_dq_dtype": "the tensor has its dtype",
    "weight_uq_qr_dtype": "the tensor has its dtype",
    "weight_dkv_kr_dtype": "the tensor has its dtype",
}


def check(**arguments: Any) -> None:
    c = Checker("npu_mla_prolog_v3")
    for name, why in _ABSENT.items():
        c.require(arguments[name] is None, f"`{name}` is given, expected None: {why}.")
    c.one_of("cache_mode", arguments["cache_mode"], "PA_BSND")
    for name in ("qc_qr_scale", "kc_scale"):
        c.require(arguments[name] == 1, f"`{name}` is {arguments[name]}, expected 1.")
    token_x, cache_index = arguments["token_x"], arguments["cache_index"]
    c.require(
        token_x.ndim in (2, 3),
        f"`token_x` has shape {list(token_x.shape)}, expected [B, S, H] or [T, H].",
    )
    if cache_index is None:
        c.fail("`cache_index` is missing, expected the slots of the tokens.")
    rows = "T" if token_x.ndim == 2 else "B S"
    given = {name: x for name, x in arguments.items() if name not in mla_v3.ONLY}
    mla_prolog_pto.check_as(
        "npu_mla_prolog_v3",
        **given,
        weight_format="nd",
        row_layout=quantised.NOPE_ROPE_SCALE,
        scale_format="ue8m0",
        rows=rows,
    )


def fake(
    token_x: Tensor, weight_uq_qr: Tensor, query_norm_flag: bool, **arguments: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    query, query_rope, norm = mla_prolog_pto.fake(token_x, **arguments)
    none = query.new_empty([0], dtype=torch.float32)
    values, scale = query.new_empty([0], dtype=weight_uq_qr.dtype), torch.empty_like(none)
    if query_norm_flag:
        values = norm.new_empty(norm.shape, dtype=weight_uq_qr.dtype)
        tiles = 1 if values.dtype is torch.int8 else -(-norm.shape[-1] // quantised.TILE)
        if quantised.kind_of(values.dtype) is not None:
            scale = query.new_empty([norm[..., 0].numel(), tiles], dtype=torch.float32)
    return query, query_rope, none, values, scale
