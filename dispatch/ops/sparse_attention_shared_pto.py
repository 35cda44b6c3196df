# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Arguments and outputs of npu_sparse_attention_shared_pto; its shapes are in the tables below."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..check import Checker
from . import _layout, _prolog
from .mla_prolog_pto import query_sizes
from .sparse_attention_pto import fake

__all__ = ["check", "fake"]
SCHEMA = (
    "npu_sparse_attention_shared_pto(Tensor x, Tensor w_dq, Tensor w_uq_qr, Tensor w_uk,"
    " Tensor w_dkv_kr, Tensor gamma_cq, Tensor gamma_ckv, Tensor sin, Tensor cos,"
    " Tensor cache_index, Tensor(a!) kv_cache, Tensor(b!) kr_cache, Tensor block_table,"
    " Tensor act_seqs, Tensor sparse_indices, *, float? softmax_scale=None,"
    ' float rms_norm_eps=1e-6, bool rope_interleaved=True, str weight_format="nz") -> Tensor'
)
ONNX = "SparseAttentionSharedPto"


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
    sparse_indices: Tensor,
    rms_norm_eps: float,
    weight_format: str,
    **_: Any,
) -> None:
    c = Checker("npu_sparse_attention_shared_pto")
    weights = dict(
        w_dq=(w_dq, "H Rq"),
        w_uq_qr=(w_uq_qr, "Rq N*(Dn+Dr)"),
        w_dkv_kr=(w_dkv_kr, "H R+Dr"),
    )
    floats = dict(
        x=(x, "B S H"),
        gamma_cq=(gamma_cq, "Rq"),
        gamma_ckv=(gamma_ckv, "R"),
        sin=(sin, "B S Dr"),
        cos=(cos, "B S Dr"),
        w_uk=(w_uk, "N Dn R"),
        kv_cache=(kv_cache, "pages P 1 R"),
        kr_cache=(kr_cache, "pages P 1 Dr"),
    )
    integers = dict(
        cache_index=(cache_index, "B S"),
        block_table=(block_table, "B max_pages"),
        act_seqs=(act_seqs, "B"),
        sparse_indices=(sparse_indices, "B S 1 K"),
    )
    _prolog.tensors(c, floats, weights, integers)
    query_sizes(c)
    _prolog.weights(c, weights, weight_format)
    c.at_least("rms_norm_eps", rms_norm_eps, 0)
    _prolog.distinct_slots(c, cache_index)
    _layout.values(c, "act_seqs", act_seqs, "BSND", c.sizes["max_pages"] * c.sizes["P"])
    _layout.pages(c, block_table, "act_seqs", act_seqs)
