# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The four stages one after the other; both prologs write their caches before a stage reads one."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from . import indexer_prolog_pto, lightning_indexer, mla_prolog_pto, sparse_flash_attention

_ALL = 2**63 - 1


def unsupported(
    x: Tensor,
    w_uk: Tensor,
    gamma_cq: Tensor,
    sin: Tensor,
    kv_cache: Tensor,
    kr_cache: Tensor,
    block_table: Tensor,
    in_gamma_k: Tensor,
    index_k_cache: Tensor,
    sparse_count: int,
    **_: Any,
) -> str | None:
    """The first reason of a stage; of the queries between them only shape and dtype matter."""
    batch, length, _hidden = x.shape
    heads, _plain, latent = w_uk.shape
    query = x.new_empty((), device="meta").expand(batch, length, heads, latent)
    query_rope = query[..., :1].expand(batch, length, heads, sin.shape[-1])
    query_index = query[..., :1].expand(batch, length, heads, in_gamma_k.shape[0])
    indices = query[:, :, :1, :1].expand(batch, length, 1, sparse_count)
    return (
        mla_prolog_pto.unsupported(
            token_x=x, rmsnorm_gamma_cq=gamma_cq, kv_cache=kv_cache, rope_sin=sin
        )
        or indexer_prolog_pto.unsupported(token_x=x, ln_gamma_k=in_gamma_k, rope_sin=sin)
        or lightning_indexer.unsupported(
            query=query_index, key=index_k_cache, block_table=block_table
        )
        or sparse_flash_attention.unsupported(
            query=query, key=kv_cache, value=None, query_rope=query_rope, key_rope=kr_cache,
            block_table=block_table, sparse_indices=indices, sparse_block_size=1,
        )
    )  # fmt: skip


def with_indices(
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
    softmax_scale: float | None,
    rms_norm_eps: float,
    layer_norm_eps: float,
    sparse_count: int,
    rope_interleaved: bool,
    index_rope_interleaved: bool,
    weight_format: str,
) -> tuple[Tensor, Tensor]:
    if softmax_scale is None:
        softmax_scale = (w_uk.shape[1] + sin.shape[-1]) ** -0.5
    query, query_rope, query_norm = mla_prolog_pto.forward(
        x, w_dq, w_uq_qr, w_uk, w_dkv_kr, gamma_cq, gamma_ckv, sin, cos, kv_cache, kr_cache,
        cache_index, rms_norm_eps, rms_norm_eps, rope_interleaved, weight_format,
    )  # fmt: skip
    query_index, weights = indexer_prolog_pto.forward(
        x, query_norm, w_idx_qb, w_idx_k, w_idx_proj, in_gamma_k, in_beta_k, sin, cos,
        index_k_cache, cache_index, layer_norm_eps, index_rope_interleaved, weight_format,
    )  # fmt: skip
    paged = dict(block_table=block_table, actual_seq_lengths_query=None)
    options = dict(layout_query="BSND", sparse_mode=3, pre_tokens=_ALL, next_tokens=_ALL)
    indices, _ = lightning_indexer.forward(
        query_index, index_k_cache, weights, actual_seq_lengths_key=act_seqs,
        layout_key="PA_BSND", sparse_count=sparse_count, return_value=False, **paged, **options,
    )  # fmt: skip
    out, _, _ = sparse_flash_attention.forward(
        query, kv_cache, None, indices, softmax_scale, actual_seq_lengths_kv=act_seqs,
        query_rope=query_rope, key_rope=kr_cache, sparse_block_size=1, layout_kv="PA_BSND",
        attention_mode=2, return_softmax_lse=False, sinks=None, **paged, **options,
    )  # fmt: skip
    return out, indices


def forward(*args: Any, **arguments: Any) -> Tensor:
    return with_indices(*args, **arguments)[0]
