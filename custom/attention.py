# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""FlashAttention-2, forward and backward; dense attention over paged latents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

import torch
from torch import Tensor

from ._keywords import worded
from ._op import op, takes_lists
from .dispatch.ops.attention.fused_infer_attention_score_v2 import NO_LIMIT


@overload
def npu_fused_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = ...,
    sm_scale: float | None = ...,
    *,
    cu_seqlens_q: Tensor | None = ...,
    cu_seqlens_k: Tensor | None = ...,
    window: int | None = ...,
    deterministic: bool = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...


@overload
def npu_fused_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = ...,
    sm_scale: float | None = ...,
    *,
    cu_seqlens_q: Tensor | None = ...,
    cu_seqlens_k: Tensor | None = ...,
    window: int | None = ...,
    deterministic: bool = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


@overload
def npu_fused_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = ...,
    sm_scale: float | None = ...,
    *,
    cu_seqlens_q: Tensor | None = ...,
    cu_seqlens_k: Tensor | None = ...,
    window: int | None = ...,
    deterministic: bool = ...,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]: ...


@worded
def npu_fused_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    sm_scale: float | None = None,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    window: int | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention that never stores the score matrix.

    o = softmax(sm_scale q k^T) v.  Differentiable in q, k and v.

    Formula: FlashAttention-2 (Dao, 2023), algorithms 1 and 2.

    Args:
        q: [B, N, S, D]; [T, N, D] with `cu_seqlens_q`. D to 256 on CUDA, in float16 or bfloat16; on
            an NPU 16, 32, ..
        k: [B, Nk, S2, D] or [T2, Nk, D]; Nk divides N (grouped queries).
        v: [B, Nk, S2, Dv] or [T2, Nk, Dv]; Dv may differ from D. float8_e5m2 or float8_e4m3fn:
            forward on CUDA only.
        causal: query i sees key j iff j <= i + S2 - S (aligned at the last key).
        sm_scale: factor of the logits; None is D ** -0.5.
        cu_seqlens_q: [B + 1] int32 or int64 prefix sums of the query lengths, on the device; tokens
            outside of them see nothing, and are not seen.
        cu_seqlens_k: [B + 1] likewise; given together.
        window: query i sees key j only if |i + S2 - S - j| < window; None: no window.
        deterministic: the backward gives the same bits every time;
            torch.use_deterministic_algorithms asks for the same.
        return_lse: also return the log-sum-exp of the logits.

    Returns:
        o [B, N, S, Dv] or [T, N, Dv]; with `return_lse` the pair (o, lse), lse float32 [B, N, S]
        or [T, N], natural logarithm. A query that sees nothing gets o 0, lse -inf.

    Raises:
        ValueError: a shape, stride, device or option does not fit.
        TypeError: a type or dtype does not fit.

    >>> import torch, custom
    >>> q, k, v = (torch.randn(1, 2, 5, 16, requires_grad=True) for _ in range(3))
    >>> custom.npu_fused_attention(q, k, v, causal=True).sum().backward()
    >>> q.grad.shape
    torch.Size([1, 2, 5, 16])
    """
    o, lse = torch.ops.custom.npu_fused_attention(
        q,
        k,
        v,
        causal,
        sm_scale,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        window=window,
        deterministic=deterministic,
    )
    return (o, lse) if return_lse else o


@worded
def attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, sm_scale: float, BM: int, BN: int
) -> Tensor:
    """`npu_fused_attention` under the name and order of the Triton tutorial.

    Args:
        q: [B, N, S, D].
        k: [B, Nk, S2, D].
        v: [B, Nk, S2, Dv].
        causal: as in `npu_fused_attention`.
        sm_scale: factor of the logits.
        BM: rows of a tile. A hint: the kernels choose their own tiles, and the result is the same
            for every value.
        BN: columns of a tile, likewise a hint.

    Returns:
        o [B, N, S, Dv].

    Raises:
        ValueError: a shape or value does not fit.
        TypeError: a type or dtype does not fit.

    >>> import torch, custom
    >>> q = k = v = torch.randn(1, 2, 5, 16)
    >>> custom.attention(q, k, v, True, 0.5, 32, 64).shape
    torch.Size([1, 2, 5, 16])
    """
    for name, value in (("BM", BM), ("BN", BN)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"attention: `{name}` is {value!r}, expected an integer from 1 on.")
    o: Tensor = torch.ops.custom.npu_fused_attention(q, k, v, causal, sm_scale)[0]
    return o


@takes_lists("actual_seq_qlen", "actual_seq_kvlen")
@op
def npu_fused_infer_attention_score_v2(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    pse_shift: Tensor | None = None,
    atten_mask: Tensor | None = None,
    actual_seq_qlen: Tensor | Sequence[int] | None = None,
    actual_seq_kvlen: Tensor | Sequence[int] | None = None,
    block_table: Tensor | None = None,
    dequant_scale_query: Tensor | None = None,
    dequant_scale_key: Tensor | None = None,
    dequant_offset_key: Tensor | None = None,
    dequant_scale_value: Tensor | None = None,
    dequant_offset_value: Tensor | None = None,
    dequant_scale_key_rope: Tensor | None = None,
    quant_scale_out: Tensor | None = None,
    quant_offset_out: Tensor | None = None,
    quant_scale_p: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    num_query_heads: int = 1,
    num_key_value_heads: int = 0,
    softmax_scale: float = 1.0,
    pre_tokens: int = NO_LIMIT,
    next_tokens: int = NO_LIMIT,
    input_layout: str = "BSH",
    sparse_mode: int = 0,
    block_size: int = 0,
    query_quant_mode: int = 0,
    key_quant_mode: int = 0,
    value_quant_mode: int = 0,
    inner_precise: int = 0,
    return_softmax_lse: bool = False,
    query_dtype: int | None = None,
    key_dtype: int | None = None,
    value_dtype: int | None = None,
    query_rope_dtype: int | None = None,
    key_rope_dtype: int | None = None,
    key_shared_prefix_dtype: int | None = None,
    value_shared_prefix_dtype: int | None = None,
    dequant_scale_query_dtype: int | None = None,
    dequant_scale_key_dtype: int | None = None,
    dequant_scale_value_dtype: int | None = None,
    dequant_scale_key_rope_dtype: int | None = None,
    out_dtype: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of all heads over the latents of a paged cache, decode and prefill (dense MLA).

    out = softmax(softmax_scale [query, query_rope] . [key, key_rope]) key: absorbed queries meet
    latents that are keys and values at once.

    Names, defaults and results of torch_npu's op, in its latent form: one key head, `value` is
    `key`.  Lengths may be tensors, which a captured graph reads anew, or lists, which are copied to
    the device in each call.

    Formula: DeepSeek-V2 (DeepSeek-AI, 2024), multi-head latent attention, absorbed.

    Args:
        query: [B, S, N*R] with "BSH"; [B, S, N, R] with "BSND" and "BSND_NBSD"; [T, N, R] with
            "TND" and "TND_NTD".
        key: [pages, P, 1, R], [pages, 1, P, R] or [pages, P, R], R to 512, P a multiple of 16.
        value: the same tensor as `key`.
        query_rope: like `query` with Dr; None: no rotary part, or already joined.
        key_rope: like `key` with Dr.
        pse_shift: None; scores have no bias.
        atten_mask: not read, and with sparse_mode 0 refused.
        actual_seq_qlen: [B] lengths, None: all S; with "TND" and "TND_NTD" prefix sums without the
            leading 0, required.
        actual_seq_kvlen: [B] lengths, in every layout; required.
        block_table: [B, max_pages] int32 or int64, required; a page that is not there is absent.
        dequant_scale_query: None; nothing is quantized here.
        dequant_scale_key: None; nothing is quantized here.
        dequant_offset_key: None; nothing is quantized here.
        dequant_scale_value: None; nothing is quantized here.
        dequant_offset_value: None; nothing is quantized here.
        dequant_scale_key_rope: None; nothing is quantized here.
        quant_scale_out: None; nothing is quantized here.
        quant_offset_out: None; nothing is quantized here.
        quant_scale_p: None; nothing is quantized here.
        learnable_sink: [N] float32, or of the query's dtype: logits that enter the denominator
            alone.
        num_query_heads: N.
        num_key_value_heads: 1 (0 stands for N).
        softmax_scale: factor of the logits.
        pre_tokens: with sparse_mode 4 how many keys before its own a query sees.
        next_tokens: 0 with sparse_mode 4, else the default.
        input_layout: "BSH", "BSND", "BSND_NBSD", "TND" or "TND_NTD"; behind the underscore that of
            `out`.
        sparse_mode: 0, all keys; 3, causal, aligned at the last key; 4, causal with a window.
        block_size: P, or 0.
        query_quant_mode: 0.
        key_quant_mode: 0.
        value_quant_mode: 0.
        inner_precise: 0 to 3; always in float32.
        return_softmax_lse: also return the log-sum-exp of the logits.
        query_dtype: None.
        key_dtype: None.
        value_dtype: None.
        query_rope_dtype: None.
        key_rope_dtype: None.
        key_shared_prefix_dtype: None.
        value_shared_prefix_dtype: None.
        dequant_scale_query_dtype: None.
        dequant_scale_key_dtype: None.
        dequant_scale_value_dtype: None.
        dequant_scale_key_rope_dtype: None.
        out_dtype: None.

    Returns:
        out, as `query` or [N, B, S, R], [N, T, R]; lse float32 [B, N, S, 1] or [T, N, 1], natural,
        without the sink; shape [0] unless `return_softmax_lse`.  A query that sees nothing gets
        out 0, lse -inf.

    Raises:
        ValueError: a shape, layout, device or option does not fit.
        TypeError: a type or dtype does not fit.

    >>> import torch, custom
    >>> cache, table = torch.randn(4, 16, 1, 32), torch.tensor([[3, 1]])
    >>> q = torch.randn(1, 1, 8, 32)
    >>> out, _ = custom.npu_fused_infer_attention_score_v2(
    ...     q, cache, cache, actual_seq_kvlen=[20], block_table=table, num_query_heads=8,
    ...     num_key_value_heads=1, input_layout="BSND", softmax_scale=32**-0.5,
    ... )
    >>> out.shape
    torch.Size([1, 1, 8, 32])
    """
