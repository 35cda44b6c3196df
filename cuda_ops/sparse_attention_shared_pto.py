# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""MLA prolog and attention, of a layer whose selection another layer has made."""

from __future__ import annotations

from torch import Tensor

from . import mla_prolog_pto, prolog, sparse_flash_attention


def unsupported(
    x: Tensor,
    w_uk: Tensor,
    sin: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    sparse_indices: Tensor,
    **_: object,
) -> str | None:
    heads, _dn, rank = w_uk.shape
    return prolog.unsupported(x) or sparse_flash_attention.unsupported(
        prolog.like_queries(x, heads, rank),
        kv_cache,
        block_table,
        sparse_indices,
        query_rope=prolog.like_queries(x, heads, sin.shape[-1]),
    )


def forward(
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
    softmax_scale: float | None,
    rms_norm_eps: float,
    rope_interleaved: bool,
    weight_format: str,
) -> Tensor:
    if softmax_scale is None:
        softmax_scale = (w_uk.shape[1] + sin.shape[-1]) ** -0.5
    query, query_rope, _ = mla_prolog_pto.forward(
        x, w_dq, w_uq_qr, w_uk, w_dkv_kr, gamma_cq, gamma_ckv, sin, cos, kv_cache, kr_cache,
        cache_index, rms_norm_eps, rms_norm_eps, rope_interleaved, weight_format,
    )  # fmt: skip
    out, _, _ = sparse_flash_attention.forward(
        query,
        kv_cache,
        None,
        sparse_indices,
        softmax_scale,
        block_table,
        None,
        act_seqs,
        query_rope,
        kr_cache,
        sparse_block_size=1,
        layout_query="BSND",
        layout_kv="PA_BSND",
        sparse_mode=3,
        return_softmax_lse=False,
        sinks=None,
    )
    return out
