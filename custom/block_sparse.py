# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Blocks of positions that heads choose, and attention to them: MiniMax-M3, Qwen4-Exp."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from ._keywords import worded
from ._op import op


@overload
def npu_sparse_attention_score(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    select_idx: Tensor,
    block_table: Tensor,
    select_num_idx: Tensor | None = ...,
    q_dequant_scale: Tensor | None = ...,
    k_dequant_scale: Tensor | None = ...,
    v_dequant_scale: Tensor | None = ...,
    actual_seq_lengths: Tensor | None = ...,
    actual_seq_lengths_kv: Tensor | None = ...,
    num_key_value_heads: int = ...,
    scale_value: float = ...,
    block_size: int = ...,
    top_k: int = ...,
    inner_precise: int = ...,
    *,
    sinks: Tensor | None = ...,
    return_softmax_lse: Literal[False] = ...,
) -> Tensor: ...


@overload
def npu_sparse_attention_score(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    select_idx: Tensor,
    block_table: Tensor,
    select_num_idx: Tensor | None = ...,
    q_dequant_scale: Tensor | None = ...,
    k_dequant_scale: Tensor | None = ...,
    v_dequant_scale: Tensor | None = ...,
    actual_seq_lengths: Tensor | None = ...,
    actual_seq_lengths_kv: Tensor | None = ...,
    num_key_value_heads: int = ...,
    scale_value: float = ...,
    block_size: int = ...,
    top_k: int = ...,
    inner_precise: int = ...,
    *,
    sinks: Tensor | None = ...,
    return_softmax_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]: ...


@worded
def npu_sparse_attention_score(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    select_idx: Tensor,
    block_table: Tensor,
    select_num_idx: Tensor | None = None,
    q_dequant_scale: Tensor | None = None,
    k_dequant_scale: Tensor | None = None,
    v_dequant_scale: Tensor | None = None,
    actual_seq_lengths: Tensor | None = None,
    actual_seq_lengths_kv: Tensor | None = None,
    num_key_value_heads: int = 1,
    scale_value: float = 1.0,
    block_size: int = 128,
    top_k: int = 16,
    inner_precise: int = 0,
    *,
    sinks: Tensor | None = None,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of packed queries to the blocks of positions that each of them chose.

    z = scale_value q . k;  lse = log sum exp(z);  out = sum exp(z) v / (exp(lse) + exp(sink))

    Token j of the n tokens of a request with L keys stands at p = L - n + j. Its keys are the
    positions w * block_size .. w * block_size + block_size - 1 of each chosen block w, those behind
    p left out. Query heads h * N / Nk .. are those of key head h. A key on a page that is not there
    is absent and never read.

    Formula: MiniMax-M3 and Qwen4-Exp (2026), and sgl-kernel-npu's operator of this name.

    Args:
        query: [T, N, D], the tokens of all requests behind one another; D to 256.
        key: [pages, P, Nk, D], dtype of `query`; P a multiple of 16; pages may lie apart.
        value: [pages, P, Nk, D] likewise.
        select_idx: [Nk, T, K] int32 or int64 blocks that each token chose by head of `key`, or
            [1, T, K] for all heads; one that is negative or behind the token is absent, equal ones
            count apart.
        block_table: [B, max_pages] int32 or int64, page of every P positions; -1 where there is
            none.
        select_num_idx: [Nk, T] or [1, T], so many of a token's blocks count; None: all.
        q_dequant_scale: None.
        k_dequant_scale: None.
        v_dequant_scale: None.
        actual_seq_lengths: [B] int32 or int64, tokens of each request; those behind are of none.
        actual_seq_lengths_kv: [B] likewise, its keys, this call's included.
        num_key_value_heads: Nk, which divides N.
        scale_value: of the logits.
        block_size: positions of a block, 1 or more, whatever P is.
        top_k: K.
        inner_precise: 0 or 4, of which both compute in float32.
        sinks: [N] float32 (float64 beside float64), a logit a head that only adds to the
            denominator.
        return_softmax_lse: also return the log-sum-exp of the logits.

    Returns:
        out [T, N, D], dtype of `query`; 0 for a token that is none of a request or has no keys.
        With `return_softmax_lse` the pair (out, lse), lse float32 [T, N], natural logarithm,
        without the sinks; -inf where there are no keys.

    Raises:
        ValueError: a shape, stride, device or option does not fit.
        TypeError: a type or dtype does not fit.
        RuntimeError: an argument requires grad, while grad mode is on.

    >>> import torch, custom
    >>> query, cache = torch.randn(3, 8, 64), torch.randn(2, 5, 16, 2, 64)
    >>> out = custom.npu_sparse_attention_score(
    ...     query, cache[0], cache[1], torch.tensor([[[0, 1], [1, -1], [0, 2]]]),
    ...     torch.tensor([[3, 1], [4, 0]]), actual_seq_lengths=torch.tensor([1, 2]),
    ...     actual_seq_lengths_kv=torch.tensor([20, 32]), num_key_value_heads=2, block_size=12,
    ...     top_k=2,
    ... )
    >>> out.shape
    torch.Size([3, 8, 64])
    """
    out, lse = torch.ops.custom.npu_sparse_attention_score(
        query,
        key,
        value,
        select_idx,
        block_table,
        select_num_idx,
        q_dequant_scale,
        k_dequant_scale,
        v_dequant_scale,
        actual_seq_lengths,
        actual_seq_lengths_kv,
        num_key_value_heads,
        scale_value,
        block_size,
        top_k,
        inner_precise,
        sinks=sinks,
        return_softmax_lse=return_softmax_lse,
    )
    return (out, lse) if return_softmax_lse else out


@op
def npu_block_indexer(
    query: Tensor,
    key: Tensor,
    block_table: Tensor,
    *,
    actual_seq_lengths: Tensor,
    actual_seq_lengths_key: Tensor,
    block_size: int = 128,
    top_k: int = 16,
    init_blocks: int = 0,
    local_blocks: int = 1,
    return_value: bool = False,
) -> tuple[Tensor, Tensor]:
    """The blocks of positions that each head of a packed query scores highest.

    score[n, w] = max over the positions p of block w of query[n] . key[p]

    Token j of the n tokens of a request with L keys stands at L - n + j, and sees the positions up
    to its own: an open block is scored by what it has so far. The first `init_blocks` and the last
    `local_blocks` blocks in sight are always among the chosen. Equal scores go to the lower block.
    A key on a page that is not there is absent, and so is a block of which every key is.

    Formula: MiniMax-M3 (2026): no ReLU, no scale, no weights of heads.

    Args:
        query: [T, N, D], the tokens of all requests behind one another.
        key: [pages, P, 1, D], dtype of `query`; P a multiple of 16; pages may lie apart.
        block_table: [B, max_pages] int32 or int64, page of every P positions; -1 where there is
            none.
        actual_seq_lengths: [B] int32 or int64, tokens of each request; those behind are of none.
        actual_seq_lengths_key: [B] likewise, its keys, this call's included.
        block_size: positions of a block, 1 or more, whatever P is.
        top_k: blocks of a token and head, the forced ones included.
        init_blocks: how many of the first are always chosen.
        local_blocks: how many of the last, the token's own the last of them.
        return_value: whether the second result is wanted.

    Returns:
        select_idx: int32 [N, T, top_k], ascending blocks, -1 where fewer exist, as
            `npu_sparse_attention_score` takes them.
        values: their scores of the same shape, float32 (float64 of float64), forced ones' too; 0
            where there is no block; [0] unless asked for.

    Raises:
        ValueError: a shape, stride, device or option does not fit.
        TypeError: a type or dtype does not fit.
        RuntimeError: an argument requires grad, while grad mode is on.

    >>> import torch, custom
    >>> query, key = torch.randn(3, 4, 64), torch.randn(5, 16, 1, 64)
    >>> index, _ = custom.npu_block_indexer(
    ...     query, key, torch.tensor([[3, 1], [4, 0]]), actual_seq_lengths=torch.tensor([1, 2]),
    ...     actual_seq_lengths_key=torch.tensor([20, 32]), block_size=8, top_k=2,
    ... )
    >>> index.shape
    torch.Size([4, 3, 2])
    """
