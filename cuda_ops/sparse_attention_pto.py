# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The whole layer: both prologs over shared products, indexer, sparse attention.

    x [W_dq | W_dkv_kr | W_idx_k | W_idx_proj]  ->  norms, rotations, all three cache rows
    c W_idx_qb, rotation, scores
    top-k  beside  c W_uq_qr, absorption, rotation        (two streams)
    attention over the selected keys

The queries of the attention are made while the top-k runs, which leaves the memory idle; a captured
graph keeps the two branches.  The longer one stays in the stream of the scores, where its launch
overlaps their end.  Every cache row is written before any cache is read.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..dispatch.common import memory
from . import lightning_indexer, prolog, sparse_flash_attention
from .common import launches
from .nz_matmul import product

_CAUSAL = 3  # sparse_mode: the last query token sees all keys, the one before it one less


def unsupported(
    x: Tensor,
    w_uk: Tensor,
    w_idx_qb: Tensor,
    gamma_cq: Tensor,
    sin: Tensor,
    in_gamma_k: Tensor,
    kv_cache: Tensor,
    index_k_cache: Tensor,
    block_table: Tensor,
    sparse_count: int,
    **_: object,
) -> str | None:
    """What any of the stages cannot do; the stages see stand-ins for what comes between them."""
    size = in_gamma_k.shape[0]
    index_heads = w_idx_qb.numel() // (gamma_cq.shape[0] * size)
    heads, _dn, rank = w_uk.shape
    return (
        prolog.unsupported(x)
        or lightning_indexer.unsupported(
            query=prolog.like_queries(x, index_heads, size),
            key=index_k_cache,
            block_table=block_table,
            sparse_count=sparse_count,
        )
        or sparse_flash_attention.unsupported(
            prolog.like_queries(x, heads, rank),
            kv_cache,
            block_table,
            query_rope=prolog.like_queries(x, heads, sin.shape[-1]),
        )
    )


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
    requests, steps, hidden = x.shape
    heads, plain, rank = w_uk.shape
    ranks, rotary, size = gamma_cq.shape[0], sin.shape[-1], in_gamma_k.shape[0]
    index_heads = w_idx_qb.numel() // (ranks * size)
    dtype, device = x.dtype, x.device
    tokens = requests * steps
    if softmax_scale is None:
        softmax_scale = (plain + rotary) ** -0.5
    indices = memory.empty((requests, steps, 1, sparse_count), torch.int32, device)
    if tokens == 0:
        return memory.empty((requests, steps, heads, rank), dtype, device), indices

    query_norm = memory.empty((tokens, ranks), dtype, device)
    weights = memory.empty((requests, steps, index_heads), dtype, device)
    part = product(
        x.view(tokens, hidden),
        [
            (w_dq, ranks),
            (w_dkv_kr, rank + rotary),
            (w_idx_k, size),
            (w_idx_proj, index_heads),
        ],
        weight_format,
        keep_float=True,
        first=True,
    )
    prolog.token_stage(
        part, sin, cos, cache_index,
        prolog.Latent(
            gamma_cq, gamma_ckv, kv_cache, kr_cache, query_norm, rms_norm_eps, rms_norm_eps,
            rope_interleaved,
        ),
        prolog.Index(
            in_gamma_k, in_beta_k, index_k_cache, weights, layer_norm_eps, index_rope_interleaved
        ),
    )  # fmt: skip

    query_index = prolog.index_heads(
        query_norm, w_idx_qb, weight_format, size, sin, cos, (requests, steps),
        index_rope_interleaved,
    )  # fmt: skip
    scored = lightning_indexer.scores(
        query_index, index_k_cache, weights, None, act_seqs, block_table, "BSND", "PA_BSND",
        _CAUSAL, indices, memory.empty((0,), dtype, device),
    )  # fmt: skip
    absorbed = partial(
        prolog.query_heads,
        query_norm, w_uq_qr, weight_format, w_uk, sin, cos, (requests, steps), rope_interleaved,
    )  # fmt: skip
    # of more than 128 tokens the queries' programs would leave those of the top-k no registers
    longer = tokens <= 128 and prolog.is_one_launch(query_norm, w_uq_qr, weight_format, w_uk, sin)
    if not x.is_cuda:
        lightning_indexer.select(scored)
        query, query_rope = absorbed()
    else:
        side = launches.Side(device)
        side.fork()
        if longer:
            query, query_rope = absorbed()
            with side.stream():
                lightning_indexer.select(scored)
        else:
            lightning_indexer.select(scored)
            with side.stream():
                query, query_rope = absorbed(forked=True)
        side.join()
    out, _, _ = sparse_flash_attention.forward(
        query=query,
        key=kv_cache,
        value=None,
        sparse_indices=indices,
        scale_value=softmax_scale,
        block_table=block_table,
        actual_seq_lengths_query=None,
        actual_seq_lengths_kv=act_seqs,
        query_rope=query_rope,
        key_rope=kr_cache,
        sparse_block_size=1,
        layout_query="BSND",
        layout_kv="PA_BSND",
        sparse_mode=_CAUSAL,
        return_softmax_lse=False,
        sinks=None,
    )
    return out, indices


def forward(*args: Any, **arguments: Any) -> Tensor:
    return with_indices(*args, **arguments)[0]
