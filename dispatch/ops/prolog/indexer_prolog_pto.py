# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Arguments and outputs of npu_indexer_prolog_pto; its shapes are in the tables below."""

from __future__ import annotations

from typing import TypedDict

import torch
from torch import Tensor
from typing_extensions import Unpack

from ...check import Checker
from ...common import nz, quantized
from ..common import prologs, quantization, weight_args

SCHEMA = (
    "npu_indexer_prolog_pto(Tensor token_x, Tensor query_norm, Tensor weight_qb,"
    " Tensor weight_k, Tensor weight_proj, Tensor ln_gamma_k, Tensor ln_beta_k,"
    " Tensor rope_sin, Tensor rope_cos, Tensor(a!) index_k_cache, Tensor cache_index, *,"
    ' float ln_epsilon=1e-6, bool rope_interleaved=False, str weight_format="nz",'
    " Tensor(b!)? index_k_scale_cache=None, Tensor? dequant_scale_q_norm=None,"
    " Tensor? dequant_scale_w_qb=None, Tensor? dequant_scale_w_k=None,"
    " Tensor? smooth_scales_cq=None, SymInt weight_quant_mode=0, SymInt kv_cache_quant_mode=0,"
    ' bool index_hadamard=False, str hadamard_round="bf16", str scale_format="ue8m0")'
    " -> (Tensor, Tensor)"
)
ONNX = "IndexerPrologPto"


class Arguments(TypedDict):
    token_x: Tensor
    query_norm: Tensor
    weight_qb: Tensor
    weight_k: Tensor
    weight_proj: Tensor
    ln_gamma_k: Tensor
    ln_beta_k: Tensor
    rope_sin: Tensor
    rope_cos: Tensor
    index_k_cache: Tensor
    cache_index: Tensor
    ln_epsilon: float
    rope_interleaved: bool
    weight_format: str
    index_k_scale_cache: Tensor | None
    dequant_scale_q_norm: Tensor | None
    dequant_scale_w_qb: Tensor | None
    dequant_scale_w_k: Tensor | None
    smooth_scales_cq: Tensor | None
    weight_quant_mode: int
    kv_cache_quant_mode: int
    index_hadamard: bool
    hadamard_round: str
    scale_format: str


def check(c: Checker, x: Arguments) -> None:
    query_norm, cache_index = x["query_norm"], x["cache_index"]
    dtypes = weight_args.quantized_weights(c, x["weight_quant_mode"], ("weight_k",), ("weight_qb",))
    index_quantized = quantization.index_mode(c, x["kv_cache_quant_mode"])
    c.one_of("scale_format", x["scale_format"], *quantization.SCALE_FORMATS)
    c.one_of("hadamard_round", x["hadamard_round"], "bf16", "fp32")
    weights = prologs.table(x, weight_qb="Rq Ni*Di", weight_k="H Di", weight_proj="H Ni")
    floats = prologs.table(
        x,
        token_x="B S H",
        query_norm="B S Rq",
        ln_gamma_k="Di",
        ln_beta_k="Di",
        rope_sin="B S Dr",
        rope_cos="B S Dr",
        index_k_cache="pages P 1 Di",
    )
    scales = weight_args.named(("weight_qb", "weight_k"), x)
    of_norm = weight_args.Scale("dequant_scale_q_norm", x["dequant_scale_q_norm"])
    own = {*dtypes, *(["query_norm"] if query_norm.dtype in quantized.VALUES.values() else [])}
    prologs.tensors(
        c,
        floats,
        weights,
        prologs.table(x, cache_index="B S"),
        {each.name: each.tensor for each in (*scales.values(), of_norm)}
        | dict(
            smooth_scales_cq=x["smooth_scales_cq"], index_k_scale_cache=x["index_k_scale_cache"]
        ),
        {*own, *(["index_k_cache"] if index_quantized else [])},
    )
    index_sizes(c, "weight_proj", x["weight_proj"], x["weight_qb"], x["weight_format"])
    weight_args.weights(c, x["weight_quant_mode"], weights, dtypes, scales, x["weight_format"])
    c.contiguous(query_norm=query_norm)
    of_query = dtypes.get("weight_qb")
    tokens = cache_index.numel()
    weight_args.of_activations(c, ("query_norm", query_norm), of_norm, of_query, tokens)
    weight_args.smooth(c, x["smooth_scales_cq"], of_query)
    quantization.index_keys(
        c, index_quantized, x["index_k_cache"], x["index_k_scale_cache"], x["index_hadamard"]
    )
    c.at_least("ln_epsilon", x["ln_epsilon"], 0)
    prologs.distinct_slots(c, cache_index)


def index_sizes(
    c: Checker, name: str, weight_proj: Tensor, weight_qb: Tensor, weight_format: str
) -> None:
    """The index heads, which the columns of `weight_proj` count, and all their dims, which are
    those of `weight_qb`."""
    if weight_proj.ndim not in (2, 4):
        c.shape(name, weight_proj, "Ni H" if weight_format == "linear" else "H Ni")
    c.sizes["Ni"] = nz.columns_of(weight_proj, weight_format)
    if weight_proj.ndim == 4 and weight_qb.ndim in (2, 4) and c.sizes["Di"] > 0:
        dims = nz.columns_of(weight_qb, weight_format)
        heads = dims // c.sizes["Di"]
        whole = heads * c.sizes["Di"] == dims
        if whole and 0 <= c.sizes["Ni"] - heads < weight_proj.shape[3]:
            c.sizes["Ni"] = heads  # NZ pads a few to a tile
    c.sizes["Ni*Di"] = c.sizes["Ni"] * c.sizes["Di"]
    c.require(
        c.sizes["Dr"] <= c.sizes["Di"],
        f"the rotary size Dr is {c.sizes['Dr']}, expected at most the index dim "
        f"Di={c.sizes['Di']}.",
    )


def fake(**x: Unpack[Arguments]) -> tuple[Tensor, Tensor]:
    token_x = x["token_x"]
    batch, rows, _hidden = token_x.shape
    heads = nz.columns_of(x["weight_proj"], x["weight_format"])
    index_quantized = x["kv_cache_quant_mode"] == 3
    return (
        token_x.new_empty(
            [batch, rows, heads, x["ln_gamma_k"].shape[0]],
            dtype=x["index_k_cache"].dtype if index_quantized else token_x.dtype,
        ),
        token_x.new_empty(
            [batch, rows, heads], dtype=torch.float32 if index_quantized else token_x.dtype
        ),
    )
