# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Arguments and outputs of npu_mla_prolog_pto; its shapes are in the tables below."""

from __future__ import annotations

from typing import Any, TypedDict

from torch import Tensor
from typing_extensions import Unpack

from ...check import Checker
from ...common import quantised
from ..common import prologs, quantization, weight_args

SCHEMA = (
    "npu_mla_prolog_pto(Tensor token_x, Tensor weight_dq, Tensor weight_uq_qr,"
    " Tensor weight_uk, Tensor weight_dkv_kr, Tensor rmsnorm_gamma_cq,"
    " Tensor rmsnorm_gamma_ckv, Tensor rope_sin, Tensor rope_cos, Tensor(a!) kv_cache,"
    " Tensor(b!) kr_cache, Tensor cache_index, *, float rmsnorm_epsilon_cq=1e-6,"
    " float rmsnorm_epsilon_ckv=1e-6, bool rope_interleaved=True,"
    ' str weight_format="nz", Tensor? dequant_scale_x=None, Tensor? dequant_scale_w_dq=None,'
    " Tensor? dequant_scale_w_uq_qr=None, Tensor? dequant_scale_w_dkv_kr=None,"
    " Tensor? smooth_scales_cq=None, Tensor? k_nope_clip_alpha=None, SymInt weight_quant_mode=0,"
    " SymInt kv_cache_quant_mode=0, SymInt query_quant_mode=0, SymInt ckvkr_repo_mode=0,"
    " SymInt quant_scale_repo_mode=0, SymInt tile_size=128, int? kv_cache_dtype=None,"
    f' str row_layout="{quantised.NOPE_ROPE_SCALE}", str scale_format="ue8m0")'
    " -> (Tensor, Tensor, Tensor)"
)
GE = "MlaPrologV3"
ONNX = "MlaPrologPto"


class Arguments(TypedDict):
    token_x: Tensor
    weight_dq: Tensor
    weight_uq_qr: Tensor
    weight_uk: Tensor
    weight_dkv_kr: Tensor
    rmsnorm_gamma_cq: Tensor
    rmsnorm_gamma_ckv: Tensor
    rope_sin: Tensor
    rope_cos: Tensor
    kv_cache: Tensor
    kr_cache: Tensor
    cache_index: Tensor
    rmsnorm_epsilon_cq: float
    rmsnorm_epsilon_ckv: float
    rope_interleaved: bool
    weight_format: str
    dequant_scale_x: Tensor | None
    dequant_scale_w_dq: Tensor | None
    dequant_scale_w_uq_qr: Tensor | None
    dequant_scale_w_dkv_kr: Tensor | None
    smooth_scales_cq: Tensor | None
    k_nope_clip_alpha: Tensor | None
    weight_quant_mode: int
    kv_cache_quant_mode: int
    query_quant_mode: int
    ckvkr_repo_mode: int
    quant_scale_repo_mode: int
    tile_size: int
    kv_cache_dtype: int | None
    row_layout: str
    scale_format: str


def check(**arguments: Any) -> None:
    check_as("npu_mla_prolog_pto", **arguments)


def check_as(op: str, rows: str = "B S", **x: Unpack[Arguments]) -> None:
    """`rows` are the letters in front of a token's own sizes."""
    token_x, kv_cache, kr_cache = x["token_x"], x["kv_cache"], x["kr_cache"]
    cache_index, smooth_scales_cq = x["cache_index"], x["smooth_scales_cq"]
    k_nope_clip_alpha = x["k_nope_clip_alpha"]
    weight_quant_mode = x["weight_quant_mode"]
    c = Checker(op)
    narrow = weight_args.dtypes(
        c, weight_quant_mode, ("weight_dq", "weight_dkv_kr"), ("weight_uq_qr",)
    )
    in_rows = quantization.latent_mode(
        c,
        x["kv_cache_quant_mode"],
        x["query_quant_mode"],
        x["tile_size"],
        ckvkr_repo_mode=x["ckvkr_repo_mode"],
        quant_scale_repo_mode=x["quant_scale_repo_mode"],
    )
    c.one_of("scale_format", x["scale_format"], *quantization.SCALE_FORMATS)
    weights = dict(
        weight_dq=(x["weight_dq"], "H Rq"),
        weight_uq_qr=(x["weight_uq_qr"], "Rq N*(Dn+Dr)"),
        weight_dkv_kr=(x["weight_dkv_kr"], "H R+Dr"),
    )
    floats = dict(
        rmsnorm_gamma_cq=(x["rmsnorm_gamma_cq"], "Rq"),
        token_x=(token_x, f"{rows} H"),
        rmsnorm_gamma_ckv=(x["rmsnorm_gamma_ckv"], "R"),
        rope_sin=(x["rope_sin"], f"{rows} Dr"),
        rope_cos=(x["rope_cos"], f"{rows} Dr"),
        weight_uk=(x["weight_uk"], "N Dn R"),
        **quantization.latent_caches(kv_cache, kr_cache, in_rows),
    )
    scales = dict(
        weight_dq=weight_args.Scale("dequant_scale_w_dq", x["dequant_scale_w_dq"]),
        weight_uq_qr=weight_args.Scale("dequant_scale_w_uq_qr", x["dequant_scale_w_uq_qr"]),
        weight_dkv_kr=weight_args.Scale("dequant_scale_w_dkv_kr", x["dequant_scale_w_dkv_kr"]),
    )
    of_x = weight_args.Scale("dequant_scale_x", x["dequant_scale_x"])
    own = {*narrow, *(["token_x"] if token_x.dtype in quantised.VALUES.values() else [])}
    prologs.tensors(
        c,
        floats,
        weights,
        dict(cache_index=(cache_index, rows)),
        {each.name: each.tensor for each in (*scales.values(), of_x)}
        | dict(smooth_scales_cq=smooth_scales_cq, k_nope_clip_alpha=k_nope_clip_alpha)
        | (dict(kr_cache=kr_cache) if in_rows else {}),
        {*own, *(["kv_cache"] if in_rows else [])},
    )
    query_sizes(c)
    weight_args.weights(c, weight_quant_mode, weights, narrow, scales, x["weight_format"])
    c.contiguous(token_x=token_x)
    tokens = cache_index.numel()
    weight_args.of_activations(c, ("token_x", token_x), of_x, narrow.get("weight_dq"), tokens)
    weight_args.smooth(c, smooth_scales_cq, narrow.get("weight_uq_qr"))
    quantization.latents(
        c, in_rows, kv_cache, kr_cache, x["kv_cache_dtype"], x["row_layout"], k_nope_clip_alpha
    )
    c.at_least("rmsnorm_epsilon_cq", x["rmsnorm_epsilon_cq"], 0)
    c.at_least("rmsnorm_epsilon_ckv", x["rmsnorm_epsilon_ckv"], 0)
    prologs.distinct_slots(c, cache_index)


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
    rows = token_x.shape[:-1]
    heads, _plain, rank = weight_uk.shape
    new = rmsnorm_gamma_cq.new_empty
    return (
        new([*rows, heads, rank]),
        new([*rows, heads, rope_sin.shape[-1]]),
        new([*rows, rmsnorm_gamma_cq.shape[0]]),
    )
