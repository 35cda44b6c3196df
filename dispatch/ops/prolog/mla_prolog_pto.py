# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Arguments and outputs of npu_mla_prolog_pto; its shapes are in the tables below.

Rq is the size of the query latent; without one (`weight_dq` None) queries are a product of x.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

import torch
from torch import Tensor

from ...check import Checker
from ...common import mla_v3, quantized
from ...op_spec import Variant
from ..common import prologs, quantization, weight_args

SCHEMA = (
    "npu_mla_prolog_pto(Tensor token_x, Tensor? weight_dq, Tensor weight_uq_qr,"
    " Tensor weight_uk, Tensor weight_dkv_kr, Tensor? rmsnorm_gamma_cq,"
    " Tensor rmsnorm_gamma_ckv, Tensor rope_sin, Tensor rope_cos, Tensor(a!) kv_cache,"
    " Tensor(b!) kr_cache, Tensor cache_index, *, float rmsnorm_epsilon_cq=1e-6,"
    " float rmsnorm_epsilon_ckv=1e-6, bool rope_interleaved=True,"
    ' str weight_format="nz", Tensor? dequant_scale_x=None, Tensor? dequant_scale_w_dq=None,'
    " Tensor? dequant_scale_w_uq_qr=None, Tensor? dequant_scale_w_dkv_kr=None,"
    " Tensor? smooth_scales_cq=None, Tensor? k_nope_clip_alpha=None, SymInt weight_quant_mode=0,"
    " SymInt kv_cache_quant_mode=0, SymInt query_quant_mode=0, SymInt ckvkr_repo_mode=0,"
    " SymInt quant_scale_repo_mode=0, SymInt tile_size=128, int? kv_cache_dtype=None,"
    f' str row_layout="{quantized.NOPE_ROPE_SCALE}", str scale_format="ue8m0")'
    " -> (Tensor, Tensor, Tensor)"
)
GE = "MlaPrologV3"
ONNX = "MlaPrologPto"


class Arguments(TypedDict):
    token_x: Tensor
    weight_dq: Tensor | None
    weight_uq_qr: Tensor
    weight_uk: Tensor
    weight_dkv_kr: Tensor
    rmsnorm_gamma_cq: Tensor | None
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


def check(c: Checker, x: Arguments, rows: str = "B S") -> None:
    """`rows` are the letters in front of a token's own sizes."""
    token_x, kv_cache, kr_cache = x["token_x"], x["kv_cache"], x["kr_cache"]
    cache_index, smooth_scales_cq = x["cache_index"], x["smooth_scales_cq"]
    k_nope_clip_alpha = x["k_nope_clip_alpha"]
    weight_quant_mode = x["weight_quant_mode"]
    weight_dq, rmsnorm_gamma_cq = x["weight_dq"], x["rmsnorm_gamma_cq"]
    if (weight_dq is None) != (rmsnorm_gamma_cq is None):
        c.fail(
            "one of `weight_dq` and `rmsnorm_gamma_cq` is None, expected both (no query latent: "
            "`weight_uq_qr` is a projection of `token_x`) or neither."
        )
    modes = dict(weight_quant_mode=weight_quant_mode, kv_cache_quant_mode=x["kv_cache_quant_mode"])
    for name, mode in modes.items():
        c.require(
            weight_dq is not None or mode == 0,
            f"`{name}` is {mode}, expected 0 without a query latent (`weight_dq` None). Pass "
            "weights and caches of the working dtype.",
        )
    dtypes = weight_args.quantized_weights(
        c, weight_quant_mode, ("weight_dq", "weight_dkv_kr"), ("weight_uq_qr",)
    )
    kv_quantized = quantization.latent_mode(
        c,
        x["kv_cache_quant_mode"],
        x["query_quant_mode"],
        x["tile_size"],
        ckvkr_repo_mode=x["ckvkr_repo_mode"],
        quant_scale_repo_mode=x["quant_scale_repo_mode"],
    )
    c.one_of("scale_format", x["scale_format"], *quantization.SCALE_FORMATS)
    queries = "H" if weight_dq is None else "Rq"
    weights = prologs.table(
        x, weight_dq="H Rq", weight_uq_qr=f"{queries} N*(Dn+Dr)", weight_dkv_kr="H R+Dr"
    )
    floats = prologs.table(
        x,
        rmsnorm_gamma_cq="Rq",
        token_x=f"{rows} H",
        rmsnorm_gamma_ckv="R",
        rope_sin=f"{rows} Dr",
        rope_cos=f"{rows} Dr",
        weight_uk="N Dn R",
    )
    floats |= quantization.latent_caches(kv_cache, kr_cache, x["rope_sin"], kv_quantized)
    scales = weight_args.named(("weight_dq", "weight_uq_qr", "weight_dkv_kr"), x)
    of_x = weight_args.Scale("dequant_scale_x", x["dequant_scale_x"])
    own = {*dtypes, *(["token_x"] if token_x.dtype in quantized.VALUES.values() else [])}
    prologs.tensors(
        c,
        floats,
        weights,
        prologs.table(x, cache_index=rows),
        {each.name: each.tensor for each in (*scales.values(), of_x)}
        | dict(smooth_scales_cq=smooth_scales_cq, k_nope_clip_alpha=k_nope_clip_alpha)
        | (dict(kr_cache=kr_cache) if kv_quantized else {}),
        {*own, *(["kv_cache"] if kv_quantized else [])},
    )
    query_sizes(c)
    weight_args.weights(c, weight_quant_mode, weights, dtypes, scales, x["weight_format"])
    c.contiguous(token_x=token_x)
    tokens = cache_index.numel()
    weight_args.of_activations(c, ("token_x", token_x), of_x, dtypes.get("weight_dq"), tokens)
    weight_args.smooth(c, smooth_scales_cq, dtypes.get("weight_uq_qr"))
    quantization.latents(
        c, kv_quantized, kv_cache, kr_cache, x["kv_cache_dtype"], x["row_layout"], k_nope_clip_alpha
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
    rmsnorm_gamma_cq: Tensor | None,
    rope_sin: Tensor,
    **_: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    rows = token_x.shape[:-1]
    heads, _plain, rank = weight_uk.shape
    new = weight_uk.new_empty
    return (
        new([*rows, heads, rank]),
        new([*rows, heads, rope_sin.shape[-1]]),
        new([0] if rmsnorm_gamma_cq is None else [*rows, rmsnorm_gamma_cq.shape[0]]),
    )


_V3 = "npu_mla_prolog_v3"
_V3_SCHEMA = (
    f"{_V3}(Tensor token_x, Tensor weight_dq, Tensor weight_uq_qr, Tensor weight_uk,"
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
_ABSENT = {
    "quant_scale_ckv": "a scale for the whole cache",
    "quant_scale_ckr": "a scale for the whole cache",
    "actual_seq_len": "every token has a slot, or a negative one",
    "token_x_dtype": "the tensor has its dtype",
    "weight_dq_dtype": "the tensor has its dtype",
    "weight_uq_qr_dtype": "the tensor has its dtype",
    "weight_dkv_kr_dtype": "the tensor has its dtype",
}


def check_v3(c: Checker, arguments: Mapping[str, Any]) -> None:
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
    own = dict(weight_format="nd", row_layout=quantized.NOPE_ROPE_SCALE, scale_format="ue8m0")
    given: Any = {name: x for name, x in arguments.items() if name not in mla_v3.ONLY} | own
    check(c, given, rows)


def fake_v3(
    token_x: Tensor, weight_uq_qr: Tensor, query_norm_flag: bool, **arguments: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    query, query_rope, norm = fake(token_x, **arguments)
    none = query.new_empty([0], dtype=torch.float32)
    values, scale = query.new_empty([0], dtype=weight_uq_qr.dtype), torch.empty_like(none)
    if query_norm_flag:
        values = norm.new_empty(norm.shape, dtype=weight_uq_qr.dtype)
        tiles = 1 if values.dtype is torch.int8 else -(-norm.shape[-1] // quantized.TILE)
        if quantized.kind_of(values.dtype) is not None:
            scale = query.new_empty([norm[..., 0].numel(), tiles], dtype=torch.float32)
    return query, query_rope, none, values, scale


VARIANTS = (
    # torch_npu's words: tokens [B, S, H] or [T, H]; a 4-D weight is NZ, a 2-D one row-major, or in
    # an NPU's own format
    Variant(_V3_SCHEMA, check_v3, fake_v3, "v3", ge="MlaPrologV3"),
)
