# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Arguments and outputs of npu_sparse_attention_pto; its shapes are in the tables below."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..check import Checker
from . import _layout, _prolog
from .indexer_prolog_pto import index_sizes
from .mla_prolog_pto import query_sizes

SCHEMA = (
    "npu_sparse_attention_pto(Tensor x, Tensor w_dq, Tensor w_uq_qr, Tensor w_uk,"
    " Tensor w_dkv_kr, Tensor gamma_cq, Tensor gamma_ckv, Tensor sin, Tensor cos,"
    " Tensor cache_index, Tensor(a!) kv_cache, Tensor(b!) kr_cache, Tensor block_table,"
    " Tensor act_seqs, Tensor w_idx_qb, Tensor w_idx_k, Tensor w_idx_proj, Tensor in_gamma_k,"
    " Tensor in_beta_k, Tensor(c!) index_k_cache, *, float? softmax_scale=None,"
    " float rms_norm_eps=1e-6, float layer_norm_eps=1e-6, SymInt sparse_count=2048,"
    ' bool rope_interleaved=True, bool index_rope_interleaved=False, str weight_format="nz")'
    " -> Tensor"
)
GE = "SparseAttentionPto"
ONNX = "SparseAttentionPto"


def check(
    x: Tensor,
    w_dq: Tensor,
    w_uq_qr: Tensor,
    w_uk: Tensor,
    w_dkv_kr: Tensor,
    gamma_cq: Tensor,
    gamma_ckv: Tensor,
    sin: Tensor,
    cos: Tensor,
    cache_index: Tensor,
    kv_cache: Tensor,
    kr_cache: Tensor,
    block_table: Tensor,
    act_seqs: Tensor,
    w_idx_qb: Tensor,
    w_idx_k: Tensor,
    w_idx_proj: Tensor,
    in_gamma_k: Tensor,
    in_beta_k: Tensor,
    index_k_cache: Tensor,
    rms_norm_eps: float,
    layer_norm_eps: float,
    sparse_count: int,
    weight_format: str,
    op: str = "npu_sparse_attention_pto",
    **_: Any,
) -> None:
    c = Checker(op)
    weights = dict(
        w_dq=(w_dq, "H Rq"),
        w_uq_qr=(w_uq_qr, "Rq N*(Dn+Dr)"),
        w_dkv_kr=(w_dkv_kr, "H R+Dr"),
        w_idx_qb=(w_idx_qb, "Rq Ni*Di"),
        w_idx_k=(w_idx_k, "H Di"),
        w_idx_proj=(w_idx_proj, "H Ni"),
    )
    floats = dict(
        x=(x, "B S H"),
        gamma_cq=(gamma_cq, "Rq"),
        gamma_ckv=(gamma_ckv, "R"),
        sin=(sin, "B S Dr"),
        cos=(cos, "B S Dr"),
        in_gamma_k=(in_gamma_k, "Di"),
        in_beta_k=(in_beta_k, "Di"),
        w_uk=(w_uk, "N Dn R"),
        kv_cache=(kv_cache, "pages P 1 R"),
        kr_cache=(kr_cache, "pages P 1 Dr"),
        index_k_cache=(index_k_cache, "pages P 1 Di"),
    )
    integers = dict(
        cache_index=(cache_index, "B S"),
        block_table=(block_table, "B max_pages"),
        act_seqs=(act_seqs, "B"),
    )
    _prolog.tensors(c, floats, weights, integers)
    query_sizes(c)
    index_sizes(c, "w_idx_proj", w_idx_proj)
    _prolog.weights(c, weights, weight_format)
    c.at_least("rms_norm_eps", rms_norm_eps, 0)
    c.at_least("layer_norm_eps", layer_norm_eps, 0)
    c.count("sparse_count", sparse_count)
    _prolog.distinct_slots(c, cache_index)
    _layout.values(c, "act_seqs", act_seqs, "BSND", c.sizes["max_pages"] * c.sizes["P"])
    _layout.pages(c, block_table, "act_seqs", act_seqs)


def fake(x: Tensor, w_uk: Tensor, **_: Any) -> Tensor:
    batch, rows, _hidden = x.shape
    heads, _plain, rank = w_uk.shape
    return x.new_empty([batch, rows, heads, rank])
