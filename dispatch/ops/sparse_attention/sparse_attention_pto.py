# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Arguments and outputs of npu_sparse_attention_pto; its shapes are in the tables below."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from ...check import Checker
from ...common import layer, quantized
from ...op_spec import Variant
from ..common import layouts, prologs, quantization, weight_args
from ..prolog.indexer_prolog_pto import index_sizes
from ..prolog.mla_prolog_pto import query_sizes

_ROWS = f'str kv_kind="none", str row_layout="{quantized.NOPE_ROPE_SCALE}"'
_QUANTIZED = (
    " Tensor? dequant_scale_w_dq=None, Tensor? dequant_scale_w_uq_qr=None,"
    " Tensor? dequant_scale_w_dkv_kr=None, Tensor? smooth_scales_cq=None,"
    f" Tensor? k_nope_clip_alpha=None, SymInt weight_quant_mode=0, {_ROWS},"
    ' str scale_format="ue8m0"'
)
_INDEX_QUANTIZED = (
    " Tensor(d!)? index_k_scale_cache=None, Tensor? dequant_scale_w_idx_qb=None,"
    " Tensor? dequant_scale_w_idx_k=None, SymInt index_weight_quant_mode=0,"
    ' str index_kind="none", bool index_hadamard=False, str hadamard_round="bf16"'
)
SCHEMA = (
    "npu_sparse_attention_pto(Tensor x, Tensor w_dq, Tensor w_uq_qr, Tensor w_uk,"
    " Tensor w_dkv_kr, Tensor gamma_cq, Tensor gamma_ckv, Tensor sin, Tensor cos,"
    " Tensor cache_index, Tensor(a!) kv_cache, Tensor(b!) kr_cache, Tensor block_table,"
    " Tensor act_seqs, Tensor w_idx_qb, Tensor w_idx_k, Tensor w_idx_proj, Tensor in_gamma_k,"
    " Tensor in_beta_k, Tensor(c!) index_k_cache, *, float? softmax_scale=None,"
    " float rms_norm_eps=1e-6, float layer_norm_eps=1e-6, SymInt sparse_count=2048,"
    ' bool rope_interleaved=True, bool index_rope_interleaved=False, str weight_format="nz",'
    f"{_QUANTIZED},{_INDEX_QUANTIZED}) -> Tensor"
)
_SHARED = "npu_sparse_attention_shared_pto"
_SHARED_SCHEMA = (
    f"{_SHARED}(Tensor x, Tensor w_dq, Tensor w_uq_qr, Tensor w_uk,"
    " Tensor w_dkv_kr, Tensor gamma_cq, Tensor gamma_ckv, Tensor sin, Tensor cos,"
    " Tensor cache_index, Tensor(a!) kv_cache, Tensor(b!) kr_cache, Tensor block_table,"
    " Tensor act_seqs, Tensor sparse_indices, *, float? softmax_scale=None,"
    ' float rms_norm_eps=1e-6, bool rope_interleaved=True, str weight_format="nz",'
    f"{_QUANTIZED}) -> Tensor"
)
GE = "SparseAttentionPto"
ONNX = "SparseAttentionPto"


def check(c: Checker, arguments: Mapping[str, Any]) -> None:
    a = layer.Whole(**arguments)
    w_idx_qb, w_idx_proj, index_k_cache = a.w_idx_qb, a.w_idx_proj, a.index_k_cache
    index_k_scale_cache, index_kind = a.index_k_scale_cache, a.index_kind
    index_weight_quant_mode, weight_format = a.index_weight_quant_mode, a.weight_format
    c.one_of("index_kind", index_kind, "none", *quantized.VALUES)
    c.one_of("hadamard_round", a.hadamard_round, "bf16", "fp32")
    index_quantized = index_kind != "none"
    dtypes = weight_args.quantized_weights(
        c, index_weight_quant_mode, ("w_idx_k",), ("w_idx_qb",), "index_weight_quant_mode"
    )
    table = dict(
        w_idx_qb=(w_idx_qb, "Rq Ni*Di"),
        w_idx_k=(a.w_idx_k, "H Di"),
        w_idx_proj=(w_idx_proj, "H Ni"),
    )
    scales = weight_args.named(("w_idx_qb", "w_idx_k"), vars(a))
    floats = dict(in_gamma_k=(a.in_gamma_k, "Di"), in_beta_k=(a.in_beta_k, "Di"))
    others = {each.name: each.tensor for each in scales.values()}
    others["index_k_scale_cache"] = index_k_scale_cache
    if index_quantized:
        others["index_k_cache"] = index_k_cache
    else:
        floats["index_k_cache"] = (index_k_cache, "pages P 1 Di")
    check_attention(c, a, floats, {}, table, dtypes, others)
    index_sizes(c, "w_idx_proj", w_idx_proj, w_idx_qb, weight_format)
    weight_args.weights(c, index_weight_quant_mode, table, dtypes, scales, weight_format)
    if index_quantized:
        index_k_cache, index_k_scale_cache = quantization.unpacked(
            c, index_kind, index_k_cache, index_k_scale_cache
        )
    quantization.index_keys(
        c, index_quantized, index_k_cache, index_k_scale_cache, a.index_hadamard
    )
    c.at_least("layer_norm_eps", a.layer_norm_eps, 0)
    c.count("sparse_count", a.sparse_count)


def check_shared(c: Checker, arguments: Mapping[str, Any]) -> None:
    a = layer.Shared(**arguments)
    given = dict(sparse_indices=(a.sparse_indices, "B S 1 K"))
    check_attention(c, a, {}, given, {}, (), {})


def check_attention(
    c: Checker,
    a: layer.Layer,
    more_floats: prologs.Table,
    more_integers: prologs.Table,
    more_weights: prologs.Table,
    more_quantized: Collection[str],
    others: dict[str, Tensor | None],
) -> None:
    """What both layers take, and the tensors that only one of them does."""
    cache_index, kv_cache, kr_cache = a.cache_index, a.kv_cache, a.kr_cache
    block_table, act_seqs, smooth_scales_cq = a.block_table, a.act_seqs, a.smooth_scales_cq
    k_nope_clip_alpha, weight_quant_mode, kv_kind = (
        a.k_nope_clip_alpha,
        a.weight_quant_mode,
        a.kv_kind,
    )
    c.one_of("kv_kind", kv_kind, "none", *quantized.VALUES)
    c.one_of("scale_format", a.scale_format, *quantization.SCALE_FORMATS)
    kv_quantized = kv_kind != "none"
    dtypes = weight_args.quantized_weights(c, weight_quant_mode, ("w_dq", "w_dkv_kr"), ("w_uq_qr",))
    weights = dict(
        w_dq=(a.w_dq, "H Rq"),
        w_uq_qr=(a.w_uq_qr, "Rq N*(Dn+Dr)"),
        w_dkv_kr=(a.w_dkv_kr, "H R+Dr"),
    )
    floats = dict(
        x=(a.x, "B S H"),
        gamma_cq=(a.gamma_cq, "Rq"),
        gamma_ckv=(a.gamma_ckv, "R"),
        sin=(a.sin, "B S Dr"),
        cos=(a.cos, "B S Dr"),
        w_uk=(a.w_uk, "N Dn R"),
        **quantization.latent_caches(kv_cache, kr_cache, a.sin, kv_quantized),
        **more_floats,
    )
    integers = dict(
        cache_index=(cache_index, "B S"),
        block_table=(block_table, "B max_pages"),
        act_seqs=(act_seqs, "B"),
        **more_integers,
    )
    scales = weight_args.named(("w_dq", "w_uq_qr", "w_dkv_kr"), vars(a))
    prologs.tensors(
        c,
        floats,
        {**weights, **more_weights},
        integers,
        {each.name: each.tensor for each in scales.values()}
        | dict(smooth_scales_cq=smooth_scales_cq, k_nope_clip_alpha=k_nope_clip_alpha)
        | (dict(kr_cache=kr_cache) if kv_quantized else {})
        | others,
        {*dtypes, *more_quantized, *(["kv_cache"] if kv_quantized else [])},
    )
    query_sizes(c)
    weight_args.weights(c, weight_quant_mode, weights, dtypes, scales, a.weight_format)
    weight_args.smooth(c, smooth_scales_cq, dtypes.get("w_uq_qr"))
    if kv_quantized:
        quantization.of_kind(c, "kv_cache", kv_cache, "kv_kind", kv_kind)
        kv_cache = kv_cache.view(quantized.VALUES[kv_kind])
    quantization.latents(c, kv_quantized, kv_cache, kr_cache, None, a.row_layout, k_nope_clip_alpha)
    c.at_least("rms_norm_eps", a.rms_norm_eps, 0)
    prologs.distinct_slots(c, cache_index)
    layouts.values(c, "act_seqs", act_seqs, "BSND", c.sizes["max_pages"] * c.sizes["P"])
    layouts.pages(c, block_table, "act_seqs", act_seqs)


def fake(x: Tensor, w_uk: Tensor, **_: Any) -> Tensor:
    batch, rows, _hidden = x.shape
    heads, _plain, rank = w_uk.shape
    return x.new_empty([batch, rows, heads, rank])


def with_indices(x: Tensor, sparse_count: int, **arguments: Any) -> tuple[Tensor, Tensor]:
    batch, rows, _hidden = x.shape
    indices = x.new_empty([batch, rows, 1, sparse_count], dtype=torch.int32)
    return fake(x, **arguments), indices


_INDICES = "npu_sparse_attention_indices_pto"
VARIANTS = (
    # and its selection [B, S, 1, K]
    Variant(
        SCHEMA.replace("npu_sparse_attention_pto", _INDICES).removesuffix("Tensor")
        + "(Tensor, Tensor)",
        check,
        with_indices,
        "with_indices",
        onnx="SparseAttentionIndicesPto",
    ),
    # without an indexer: another layer made the selection [B, S, 1, K]
    Variant(_SHARED_SCHEMA, check_shared, fake, "shared", onnx="SparseAttentionSharedPto"),
)
