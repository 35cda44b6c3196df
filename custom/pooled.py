# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""CANN's operators of pooled index keys, as fronts of the compressor and of the indexer."""

from __future__ import annotations

import torch
from torch import Tensor

from ._keywords import worded
from .compression import npu_compressor
from .dispatch.check import Checker
from .dispatch.common import layout
from .sparse_attention import npu_lightning_indexer

_LAYOUTS = {"BSND": "BSND", "PA_BBND": "PA_BSND"}


@worded
def key_pool(
    hidden_states: Tensor,
    wk: Tensor,
    gate_weight: Tensor,
    ape: Tensor,
    state_cache: Tensor,
    cache_block_table: Tensor,
    start_pos: Tensor | None,
    *,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    seqused: Tensor | None = None,
    cmp_ratio: int = 4,
    norm_eps: float = 1e-6,
    rotary_mode: int = 1,
    cache_mode: int = 1,
    pool_cache: Tensor | None = None,
    pool_scale_cache: Tensor | None = None,
    pool_block_table: Tensor | None = None,
    kind: str = "none",
    hadamard: bool = False,
    hadamard_round: str = "bf16",
    return_pooled: bool = True,
) -> Tensor:
    """One index key for every `cmp_ratio` tokens, of GLM-5.3-Flash's indexer.

    With m = cmp_ratio, token t has k_t = LayerNorm(x_t wk^T) and z_t = x_t gate_weight^T +
    ape[t mod m], both in float32: its state. Pool w, tokens w m to (w + 1) m - 1, closes in the
    call that brings its last token, and its key is sum_t softmax_t(z) k_t, channel by channel.

    CANN's schema, and ours behind `rotary_mode`; a call of `npu_compressor`, by whose names its
    errors speak. m, D, lengths and the number of rejected tokens are as free as there.

    Formula: Transformers' glm5_next, the indexer's pools.

    Args:
        hidden_states: [B, S, H], or [T, H] with `cu_seqlens`.
        wk: [D, H], as nn.Linear has it.
        gate_weight: [D, H].
        ape: [m, D] float32 (float64 beside float64 hidden states).
        state_cache: [pages, P, 2*D] float32 (float64), k and then z, updated in place.
        cache_block_table: [B, max_pages] int32 or int64, pages of the state.
        start_pos: [B] int32 or int64, position of a request's first token; 0 if None.
        norm_weight: [D] float32 (float64), with `norm_bias`, of the LayerNorm; None: no norm.
        norm_bias: [D] float32 (float64).
        cos: None: no model rotates these keys.
        sin: None.
        cu_seqlens: [B + 1] int32 or int64, where requests begin and end in `hidden_states`.
        seqused: [B] int32 or int64, tokens of each request that count, the first ones; all if None.
        cmp_ratio: m, tokens of a pool.
        norm_eps: of the LayerNorm.
        rotary_mode: not read.
        cache_mode: 1, position p is in column p // P of the table; 2, in that column modulo their
            number, a ring of at least m - 1 rows, and one more for each token that a call may take
            back.
        pool_cache: keys too go to their pages, in place: `cmp_cache` of `npu_compressor`.
        pool_scale_cache: `cmp_scale_cache` there.
        pool_block_table: [B, max_pages] int32 or int64, pages of `pool_cache`.
        kind: "none", "fp8" or "int8", as `npu_index_cache_write`.
        hadamard: transform the keys.
        hadamard_round: what they are rounded to between that and 8 bits, "bf16" or "fp32".
        return_pooled: also return the keys.

    Returns:
        Keys [B, ceil(S / m), D], row c of a request being pool start_pos // m + c, or
        [min(T, T // m + B), D], the closed pools of one request after the other; zeros where no
        pool closes. [0] without `return_pooled`.

    Raises:
        ValueError: a shape, stride, device or option does not fit; nothing has been written.
        TypeError: a type or dtype does not fit.
        RuntimeError: an argument requires grad, while grad mode is on.

    >>> import torch, custom
    >>> x, wk, gate, ape = (torch.randn(*s) for s in ((1, 9, 32), (16, 32), (16, 32), (4, 16)))
    >>> state, table = torch.zeros(2, 8, 32), torch.tensor([[1, 0]])
    >>> keys = custom.key_pool(
    ...     x, wk, gate, ape, state, table, None,
    ...     norm_weight=torch.ones(16), norm_bias=torch.zeros(16),
    ... )
    >>> keys.shape, keys[0, 2].any().item()
    (torch.Size([1, 3, 16]), False)
    """
    c = Checker("key_pool")
    for name, given in (("cos", cos), ("sin", sin)):
        c.require(
            given is None,
            f"`{name}` is given, expected None: pooled keys are not rotated here. Call "
            "npu_compressor with `rope_sin` and `rope_cos`.",
        )
    return npu_compressor(
        hidden_states,
        wk,
        gate_weight,
        state_cache,
        ape,
        None,
        None,
        None,
        0,
        cmp_ratio,
        state_block_table=cache_block_table,
        cu_seqlens=cu_seqlens,
        seqused=seqused,
        start_pos=start_pos,
        cache_mode=cache_mode,
        cmp_cache=pool_cache,
        cmp_scale_cache=pool_scale_cache,
        cmp_block_table=pool_block_table,
        kind=kind,
        hadamard=hadamard,
        hadamard_round=hadamard_round,
        return_cmp_kv=return_pooled,
        ln_weight=norm_weight,
        ln_bias=norm_bias,
        ln_eps=norm_eps,
    )


npu_key_pool = key_pool


@worded
def pool_key_indexer(
    query: Tensor,
    pool_key: Tensor,
    weights: Tensor,
    pool_tail_k: Tensor,
    *,
    actual_seq_q: Tensor | None = None,
    actual_seq_k: Tensor | None = None,
    block_table: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    layout_q: str = "BSND",
    layout_k: str = "BSND",
    topk: int = 2048,
    pool_size: int = 16,
    mask_mode: int = 3,
    quant_mode: int = -1,
    return_value: bool = False,
) -> tuple[Tensor, Tensor]:
    """The tokens that a query attends to by pooled index keys: of the pools that score highest, and
    of the one that is open where it stands.

    CANN's schema, for scripts that have it: a request of n pools and t tokens behind them has
    n * pool_size + t tokens, and the last query stands at the last one. Every query has the open
    pool of its own position behind the chosen ones, up to itself, where CANN's operator gives all
    of them the request's. An engine leaves the pools as they are: `npu_lightning_indexer` with
    `cmp_ratio` and `select_tail`, then `npu_sparse_flash_attention` with `sparse_block_size`.

    Formula: as `npu_lightning_indexer`, over pools; Transformers' glm5_next, the selection.

    Args:
        query: [B, S, N, D], or [T, N, D] with layout_q="TND".
        pool_key: [B, S2, 1, D] keys of pools, or pages [pages, P, 1, D] with "PA_BBND".
        weights: [B, S, N] or [T, N].
        pool_tail_k: [B] int32 or int64, tokens of each request that are behind its last closed
            pool, fewer than `pool_size`.
        actual_seq_q: [B] int32 or int64, lengths, or prefix sums with "TND".
        actual_seq_k: [B] int32 or int64, closed pools of each request; all S2 if None.
        block_table: [B, max_pages] int32 or int64, pages of `pool_key`.
        q_descale: None: 8 bits are `npu_quant_lightning_indexer`'s.
        k_descale: None.
        layout_q: "BSND" or "TND".
        layout_k: "BSND" or "PA_BBND"; the latter with layout_q="TND".
        topk: tokens of the chosen pools, a multiple of `pool_size`.
        pool_size: m, tokens of a pool.
        mask_mode: 3, causal, aligned at the last token; 0, all pools.
        quant_mode: -1, none.
        return_value: also return the scores of the pools.

    Returns:
        Token indices int32 [B, S, 1, topk + m - 1] or [T, 1, topk + m - 1], ascending, -1 behind
        them; scores of the chosen pools [.., 1, topk / m] in the query's dtype, 0 past them, or
        [0] without `return_value`.

    Raises:
        ValueError: a shape, layout, device or option does not fit.
        TypeError: a type or dtype does not fit.

    >>> import torch, custom
    >>> q, keys, w = torch.randn(1, 1, 4, 16), torch.randn(1, 3, 1, 16), torch.rand(1, 1, 4)
    >>> tokens, _ = custom.pool_key_indexer(
    ...     q, keys, w, torch.tensor([2]), topk=12, pool_size=4
    ... )
    >>> tokens[0, 0, 0].tolist()
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, -1]
    """
    c = Checker("pool_key_indexer")
    for name, given in (("q_descale", q_descale), ("k_descale", k_descale)):
        c.require(
            given is None,
            f"`{name}` is given, expected None: call npu_quant_lightning_indexer with `cmp_ratio` "
            "for keys of 8 bits.",
        )
    c.require(
        quant_mode == -1,
        f"`quant_mode` is {quant_mode}, expected -1: call npu_quant_lightning_indexer with "
        "`cmp_ratio` for keys of 8 bits.",
    )
    c.one_of("layout_q", layout_q, "BSND", "TND")
    c.one_of("layout_k", layout_k, *_LAYOUTS)
    c.one_of("mask_mode", mask_mode, 0, 3)
    c.count("pool_size", pool_size)
    c.require(
        topk > 0 and topk % pool_size == 0,
        f"`topk` is {topk}, expected a multiple of `pool_size`, {pool_size}.",
    )
    c.integer("pool_tail_k", pool_tail_k)
    c.shape("pool_tail_k", pool_tail_k, "B")
    c.same_device(query=query, pool_tail_k=pool_tail_k, actual_seq_k=actual_seq_k)
    if actual_seq_k is None:
        c.require(
            layout_k == "BSND",
            "`actual_seq_k` is missing, and 'PA_BBND' needs it: how many pools a request has.",
        )
        c.shape("pool_key", pool_key, "B S2 1 D")
        pools = torch.full_like(pool_tail_k, pool_key.shape[1])
    else:
        c.integer("actual_seq_k", actual_seq_k)
        c.shape("actual_seq_k", actual_seq_k, "B")
        pools = actual_seq_k
    lengths = pools.long() * pool_size + pool_tail_k
    indices, values = npu_lightning_indexer(
        query,
        pool_key,
        weights,
        actual_seq_lengths_query=actual_seq_q,
        actual_seq_lengths_key=lengths,
        block_table=block_table,
        layout_query=layout_q,
        layout_key=_LAYOUTS[layout_k],
        sparse_count=topk // pool_size,
        sparse_mode=mask_mode,
        return_value=return_value,
        cmp_ratio=pool_size,
        select_tail=pool_size > 1,
    )
    keys = layout.keys_of(pool_key, _LAYOUTS[layout_k], lengths, block_table, pool_size)
    seen = layout.rows_of(query, layout_q, actual_seq_q, keys, mask_mode).limit
    inside = torch.arange(pool_size, device=query.device, dtype=torch.int32)
    tokens = (indices[..., None] * pool_size + inside).flatten(-2)
    absent = (tokens < 0) | (tokens >= seen.view([*tokens.shape[:-1], 1]))
    tokens = tokens.masked_fill(absent, -1)[..., : topk + pool_size - 1]
    return tokens.contiguous(), values[..., : topk // pool_size] if return_value else values
