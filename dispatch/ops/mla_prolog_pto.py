# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Arguments and outputs of npu_mla_prolog_pto; its shapes are in the tables below."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..check import Checker
from . import _prolog

SCHEMA = (
    "npu_mla_prolog_pto(Tensor token_x, Tensor weight_dq, Tensor weight_uq_qr,"
    " Tensor weight_uk, Tensor weight_dkv_kr, Tensor rmsnorm_gamma_cq,"
    " Tensor rmsnorm_gamma_ckv, Tensor rope_sin, Tensor rope_cos, Tensor(a!) kv_cache,"
    " Tensor(b!) kr_cache, Tensor cache_index, *, float rmsnorm_epsilon_cq=1e-6,"
    " float rmsnorm_epsilon_ckv=1e-6, bool rope_interleaved=True,"
    ' str weight_format="nz") -> (Tensor, Tensor, Tensor)'
)
GE = "MlaPrologV3"
ONNX = "MlaPrologPto"


def check(
    token_x: Tensor,
    weight_dq: Tensor,
    weight_uq_qr: Tensor,
    weight_uk: Tensor,
    weight_dkv_kr: Tensor,
    rmsnorm_gamma_cq: Tensor,
    rmsnorm_gamma_ckv: Tensor,
    rope_sin: Tensor,
    rope_cos: Tensor,
    kv_cache: Tensor,
    kr_cache: Tensor,
    cache_index: Tensor,
    rmsnorm_epsilon_cq: float,
    rmsnorm_epsilon_ckv: float,
    weight_format: str,
    **_: Any,
) -> None:
    c = Checker("npu_mla_prolog_pto")
    weights = dict(
        weight_dq=(weight_dq, "H Rq"),
        weight_uq_qr=(weight_uq_qr, "Rq N*(Dn+Dr)"),
        weight_dkv_kr=(weight_dkv_kr, "H R+Dr"),
    )
    floats = dict(
        token_x=(token_x, "B S H"),
        rmsnorm_gamma_cq=(rmsnorm_gamma_cq, "Rq"),
        rmsnorm_gamma_ckv=(rmsnorm_gamma_ckv, "R"),
        rope_sin=(rope_sin, "B S Dr"),
        rope_cos=(rope_cos, "B S Dr"),
        weight_uk=(weight_uk, "N Dn R"),
        kv_cache=(kv_cache, "pages P 1 R"),
        kr_cache=(kr_cache, "pages P 1 Dr"),
    )
    _prolog.tensors(c, floats, weights, dict(cache_index=(cache_index, "B S")))
    query_sizes(c)
    _prolog.weights(c, weights, weight_format)
    c.at_least("rmsnorm_epsilon_cq", rmsnorm_epsilon_cq, 0)
    c.at_least("rmsnorm_epsilon_ckv", rmsnorm_epsilon_ckv, 0)
    _prolog.distinct_slots(c, cache_index)


def query_sizes(c: Checker) -> None:
    """The columns of the joint projections, from the sizes of their parts."""
    c.sizes["N*(Dn+Dr)"] = c.sizes["N"] * (c.sizes["Dn"] + c.sizes["Dr"])
    c.sizes["R+Dr"] = c.sizes["R"] + c.sizes["Dr"]


def fake(
    token_x: Tensor,
    weight_uk: Tensor,
    rmsnorm_gamma_cq: Tensor,
    rope_sin: Tensor,
    **_: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    batch, rows, _hidden = token_x.shape
    heads, _plain, rank = weight_uk.shape
    return (
        token_x.new_empty([batch, rows, heads, rank]),
        token_x.new_empty([batch, rows, heads, rope_sin.shape[-1]]),
        token_x.new_empty([batch, rows, rmsnorm_gamma_cq.shape[0]]),
    )
