# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Caches of 8 bits: what writes them, and what reads them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._keywords import worded
from ._op import op, variant_of
from .dispatch.op_spec import UNLIMITED

_ops = torch.ops.custom


@worded
def hadamard(x: Tensor, scale: float = 128**-0.5) -> Tensor:
    """The Hadamard transform of the last dimension, in float32, rounded to the dtype of `x`.

    The indexers of DeepSeek-V3.2 as DeepSeek and SGLang run it transform queries and keys before
    they are quantized: products stay as they are, outliers spread out.

    Args:
        x: [.., 128].
        scale: of the result; 128**-0.5 makes the transform its own inverse.

    Returns:
        The shape and dtype of `x`.

    Raises:
        ValueError: the last dimension is not 128, or not dense.
        TypeError: the dtype is no float.
        RuntimeError: `x` requires grad, while grad mode is on.

    >>> import torch, custom
    >>> x = torch.randn(2, 128)
    >>> torch.allclose(custom.hadamard(custom.hadamard(x)), x, atol=1e-6)
    True
    """
    out: Tensor = _ops.npu_hadamard(x, scale)
    return out


@op
def npu_index_cache_write(
    k: Tensor,
    values: Tensor,
    scales: Tensor,
    slots: Tensor,
    *,
    kind: str,
    scale_format: str = "ue8m0",
    index_hadamard: bool = False,
    hadamard_round: str = "bf16",
) -> None:
    """Quantize index keys, and write each to its slot of a cache of 8 bits.

    fp8: s = 2^ceil(log2(max(amax, 1e-4) / 448)), value = e4m3(k / s);
    int8: s = amax / 127, value = round(k / s), ties to even; zeros give s = 0.

    Formula: DeepSeek-V3.2-Exp's act_quant (fp8, DeepSeek-AI, 2025) and torch_npu's dynamic
    quantization per token (int8). The bytes are the same on every backend.

    Args:
        k: [T, 128] index keys, after LayerNorm and rotation.
        values: [pages, P, 1, 128] float8_e4m3fn or int8, updated in place; pages may lie apart, as
            in the packed pages of `index_cache_views`.
        scales: [pages, P, 1] float32 (fp8), float16 or float32 (int8), updated in place.
        slots: [T] int32 or int64, page * P + offset; negative or out of range: not written;
            none twice.
        kind: "fp8" or "int8".
        scale_format: of fp8: "ue8m0", powers of two (DeepSeek, FlashMLA), or "fp32",
            s = max(amax, 1e-4) / 448 (vLLM and SGLang as they are configured for V3.2).
        index_hadamard: transform `k` first (`hadamard`); queries then need it too.
        hadamard_round: what its result is rounded to, "bf16" (DeepSeek) or "fp32" (SGLang's fused
            kernel).

    Returns:
        Nothing.

    Raises:
        ValueError: a shape, stride, device or option does not fit; nothing has been written.
        TypeError: a type or dtype does not fit.
        RuntimeError: an argument requires grad, while grad mode is on.

    >>> import torch, custom
    >>> pages = torch.zeros(4, 64, 132, dtype=torch.uint8)
    >>> values, scales = custom.index_cache_views(pages, "fp8")
    >>> slots = torch.tensor([5, -1])
    >>> custom.npu_index_cache_write(torch.ones(2, 128), values, scales, slots, kind="fp8")
    >>> (values[0, 5, 0, 0].float() * scales[0, 5, 0]).item()
    1.0
    """


@op
def npu_latent_cache_write(
    ckv: Tensor,
    k_rope: Tensor,
    rows: Tensor,
    slots: Tensor,
    *,
    kind: str,
    row_layout: str,
    scale_format: str = "ue8m0",
    k_nope_clip_alpha: Tensor | None = None,
    rope_head_dim: int = 64,
) -> None:
    """Quantize latents by tiles, and write each with its rotary key to its row of 8 bits.

    A row is 512 values, 4 float32 scales and 64 rotary keys of 16 bits, which are not quantized, in
    the order that `row_layout` says. The formula of a tile is that of `npu_index_cache_write`. With
    `rope_head_dim` 0 a row is values and scales alone, 528 bytes, in either order the same.

    Rows of DeepSeek-V4 (row_layout "v4") are 448 values, rounded to bfloat16 first, and 64 rotary
    channels; behind the P rows of 576 bytes of a page come their P x 8 scales, exponents of powers
    of two (ue8m0), one for every 64 values and a zero.

    Formula: DeepSeek-V3.2-Exp (DeepSeek-AI, 2025); the rows of FlashMLA and of torch_npu's
    npu_kv_quant_sparse_flash_attention; "v4": FlashMLA's pages of DeepSeek-V4. The bytes are the
    same on every backend.

    Args:
        ckv: [T, 512] latents, after their norm; "v4": [T, 448], the channels before the rotary
            ones.
        k_rope: [T, rope_head_dim] bfloat16 or float16, after its rotation; "v4": bfloat16.
        rows: [pages, P, 1, 656] uint8, or the dtype of the values, updated in place; pages may lie
            apart. [pages, P, 1, 528] with `rope_head_dim` 0. "v4": [pages, P, 1, 584] uint8, any P;
            engines round the stride of a page up to a multiple of 576.
        slots: [T] int32 or int64, page * P + offset; negative or out of range: not written;
            none twice.
        kind: "fp8" (e4m3) or "int8"; "v4": "fp8".
        row_layout: "nope_scale_rope" (FlashMLA, vLLM, SGLang), "nope_rope_scale" (torch_npu) or
            "v4" (FlashMLA, vLLM and SGLang for DeepSeek-V4).
        scale_format: of fp8: "ue8m0", powers of two (DeepSeek, FlashMLA), or "fp32",
            s = max(amax, 1e-4) / 448 (vLLM, SGLang; not "v4").
        k_nope_clip_alpha: [1] float32, times amax it is what the scale is for, and the rest is
            clipped; None is 1.
        rope_head_dim: rotary keys of a row, 64 or 0; "v4": 64.

    Returns:
        Nothing.

    Raises:
        ValueError: a shape, stride, device or option does not fit; nothing has been written.
        TypeError: a type or dtype does not fit.
        RuntimeError: an argument requires grad, while grad mode is on.

    >>> import torch, custom
    >>> rows = torch.zeros(4, 16, 1, 656, dtype=torch.uint8)
    >>> custom.npu_latent_cache_write(
    ...     torch.ones(1, 512), torch.ones(1, 64).bfloat16(), rows, torch.tensor([17]),
    ...     kind="fp8", row_layout="nope_scale_rope",
    ... )
    >>> nope, rope, scale = custom.row_views(rows, "nope_scale_rope")
    >>> (nope.view(torch.float8_e4m3fn)[1, 1, 0, 0].float() * scale[1, 1, 0, 0]).item()
    1.0
    """


@worded
def quantize_index_query(
    q: Tensor,
    weights: Tensor,
    *,
    kind: str,
    fold: bool = True,
    scale_format: str = "ue8m0",
    index_hadamard: bool = False,
    hadamard_round: str = "bf16",
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Index queries of 8 bits for `npu_quant_lightning_indexer`, with a scale for each head.

    Formula: that of `npu_index_cache_write`.

    Args:
        q: [B, S, N, 128] or [T, N, 128] index queries, after their rotation.
        weights: [B, S, N] or [T, N] of the heads.
        kind: "fp8" or "int8".
        fold: give the weights times the scales, and no scales.
        scale_format: of fp8: "ue8m0" or "fp32".
        index_hadamard: transform `q` first: as the cache's keys were.
        hadamard_round: what its result is rounded to, "bf16" or "fp32".

    Returns:
        values: float8_e4m3fn or int8, shape of `q`.
        weights: float32 with the scales in them (`fold`), or as they came.
        query_dequant_scale: None (`fold`), or float32 in the shape of `weights`.

    Raises:
        ValueError: a shape, stride, device or option does not fit.
        TypeError: a type or dtype does not fit.
        RuntimeError: an argument requires grad, while grad mode is on.

    >>> import torch, custom
    >>> values, weights, scale = custom.quantize_index_query(
    ...     torch.randn(1, 2, 4, 128), torch.ones(1, 2, 4), kind="int8"
    ... )
    >>> values.dtype, weights.shape, scale
    (torch.int8, torch.Size([1, 2, 4]), None)
    """
    values, scales = _ops.npu_quantize_index_query(
        q,
        weights,
        kind=kind,
        fold=fold,
        scale_format=scale_format,
        index_hadamard=index_hadamard,
        hadamard_round=hadamard_round,
    )
    return (values, scales, None) if fold else (values, weights, scales)


@op
def npu_quant_lightning_indexer(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    query_dequant_scale: Tensor | None,
    key_dequant_scale: Tensor,
    query_quant_mode: int,
    key_quant_mode: int,
    *,
    actual_seq_lengths_query: Tensor | None = None,
    actual_seq_lengths_key: Tensor | None = None,
    block_table: Tensor | None = None,
    layout_query: str = "BSND",
    layout_key: str = "BSND",
    sparse_count: int = 2048,
    sparse_mode: int = 3,
    pre_tokens: int = UNLIMITED,
    next_tokens: int = UNLIMITED,
    query_dtype: int | None = None,
    key_dtype: int | None = None,
    cmp_ratio: int = 1,
    select_tail: bool = False,
) -> Tensor:
    """The positions of the keys that score highest, on queries and keys of 8 bits.

    score[t, p] = key_scale[p] sum_n weights[t, n] query_scale[t, n] relu(query[t, n] . key[p])

    in float32, the key's scale last; selection, order and ties as `npu_lightning_indexer`.

    Formula: DeepSeek-V3.2-Exp's fp8 indexer (DeepSeek-AI, 2025) and torch_npu's op of this name.

    Args:
        query: [B, S, N, D] (BSND) or [T, N, D] (TND), float8_e4m3fn, int8, or uint8 with
            `query_dtype`.
        key: [B, S2, 1, D], [T2, 1, D], or pages [pages, P, 1, D] with `block_table`, of the same
            kind; pages may lie apart, as in the packed ones of `index_cache_views`.
        weights: [B, S, N] or [T, N] of the heads: any of float16, bfloat16 and float32 for int8;
            for fp8 float16 with float16 scales, bfloat16 or float32 with float32 ones.
        query_dequant_scale: as `weights`; None: they are in the weights (`quantize_index_query`).
        key_dequant_scale: the shape of `key` without D.
        query_quant_mode: 0, a scale for each token and head.
        key_quant_mode: 0, a scale for each token.
        actual_seq_lengths_query: [B] int32 or int64, lengths (BSND) or prefix sums (TND).
        actual_seq_lengths_key: [B] likewise; lengths where the keys are paged.
        block_table: [B, max_pages] int32 or int64, page of every P positions; -1 where unused.
        layout_query: "BSND" or "TND".
        layout_key: as `layout_query`, or "PA_BSND" for paged keys.
        sparse_count: K, positions a query, at most.
        sparse_mode: 3, causal and aligned at the last key, or 0, all keys.
        pre_tokens: its default alone.
        next_tokens: its default alone.
        query_dtype: of a uint8 `query`: torch.float8_e4m3fn or torch.int8.
        key_dtype: of a uint8 `key`, likewise.
        cmp_ratio: tokens that a key stands for, as in `npu_lightning_indexer`.
        select_tail: the key of the tokens that none stands for yet ends a row, as there.

    Returns:
        int32 [B, S, 1, K] or [T, 1, K], ascending positions; -1 where fewer are visible.

    Raises:
        ValueError: a shape, stride, device or option does not fit.
        TypeError: a type or dtype does not fit.
        RuntimeError: an argument requires grad, while grad mode is on.

    >>> import torch, custom
    >>> q, weights, _ = custom.quantize_index_query(
    ...     torch.randn(1, 1, 4, 128), torch.rand(1, 1, 4), kind="fp8"
    ... )
    >>> pages = torch.zeros(2, 16, 132, dtype=torch.uint8)
    >>> values, scales = custom.index_cache_views(pages, "fp8")
    >>> slots = torch.arange(20)
    >>> custom.npu_index_cache_write(torch.randn(20, 128), values, scales, slots, kind="fp8")
    >>> indices = custom.npu_quant_lightning_indexer(
    ...     q, values, weights, None, scales, 0, 0, layout_key="PA_BSND", sparse_count=8,
    ...     block_table=torch.tensor([[0, 1]]), actual_seq_lengths_key=torch.tensor([20]),
    ... )
    >>> indices.shape, indices.dtype
    (torch.Size([1, 1, 1, 8]), torch.int32)
    """


@op
@variant_of(npu_quant_lightning_indexer)
def npu_quant_lightning_indexer_scores(*_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    """`npu_quant_lightning_indexer`, and the scores: what an exact merge over ranks needs.

    Formula: as `npu_quant_lightning_indexer`.

    Returns:
        indices: int32 [B, S, 1, K] or [T, 1, K], ascending positions; -1 where fewer are visible.
        values: float32 of the same shape, their scores; 0 where the index is -1.

    >>> import torch, custom
    >>> q, weights, scale = custom.quantize_index_query(
    ...     torch.randn(1, 2, 4, 128), torch.rand(1, 2, 4), kind="int8", fold=False
    ... )
    >>> key = torch.randint(-127, 128, (1, 9, 1, 128), dtype=torch.int8)
    >>> indices, values = custom.npu_quant_lightning_indexer_scores(
    ...     q, key, weights, scale, torch.rand(1, 9, 1), 0, 0, sparse_count=4
    ... )
    >>> indices.dtype, values.dtype, values.shape
    (torch.int32, torch.float32, torch.Size([1, 2, 1, 4]))
    """


@op
def npu_kv_quant_sparse_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sparse_indices: Tensor,
    scale_value: float,
    key_quant_mode: int,
    value_quant_mode: int,
    *,
    key_dequant_scale: Tensor | None = None,
    value_dequant_scale: Tensor | None = None,
    block_table: Tensor | None = None,
    actual_seq_lengths_query: Tensor | None = None,
    actual_seq_lengths_kv: Tensor | None = None,
    sparse_block_size: int = 1,
    layout_query: str = "BSND",
    layout_kv: str = "BSND",
    sparse_mode: int = 3,
    pre_tokens: int = UNLIMITED,
    next_tokens: int = UNLIMITED,
    attention_mode: int = 0,
    quant_scale_repo_mode: int = 1,
    tile_size: int = 128,
    rope_head_dim: int = 64,
    key_dtype: int | None = None,
    value_dtype: int | None = None,
    sinks: Tensor | None = None,
    row_layout: str = "nope_rope_scale",
) -> Tensor:
    """Latent attention over selected rows of 8 bits.

    `npu_sparse_flash_attention` on the cache that the rows stand for: a value times the scale of
    its tile, in float32, rounded once to the query's dtype. With scales that are powers of two the
    result is, bit for bit, that of the bf16 op on that cache.

    Formula: FlashMLA (DeepSeek-AI, 2025) and torch_npu's op of this name.

    Args:
        query: [B, S, N, 576] (BSND) or [T, N, 576] (TND), 512 latent and 64 rotary dims; [.., 512]
            with `rope_head_dim` 0.
        key: rows of 656 bytes, [B, S2, 1, 656], [T2, 1, 656] or pages [pages, P, 1, 656] with
            `block_table`; float8_e4m3fn, int8, or uint8 with `key_dtype`. Pages may lie apart. The
            rotary keys are of the query's dtype. Rows of 528 bytes with `rope_head_dim` 0.
        value: as `key`, usually the same tensor.
        sparse_indices: [B, S, 1, K] or [T, 1, K] int32 or int64, positions of blocks; one that is
            negative, or that its token does not see, is absent.
        scale_value: of the logits.
        key_quant_mode: 2, a scale for each token and tile.
        value_quant_mode: 2.
        key_dequant_scale: None; the scales are in the rows.
        value_dequant_scale: None.
        block_table: [B, max_pages] int32 or int64, page of every P positions; -1 where unused.
        actual_seq_lengths_query: [B] int32 or int64, lengths (BSND) or prefix sums (TND).
        actual_seq_lengths_kv: [B] likewise; lengths where the keys are paged.
        sparse_block_size: consecutive positions that an index stands for.
        layout_query: "BSND" or "TND".
        layout_kv: as `layout_query`, or "PA_BSND" for paged rows.
        sparse_mode: 3, causal and aligned at the last key, or 0, all keys.
        pre_tokens: its default alone.
        next_tokens: its default alone.
        attention_mode: 2, absorbed latent attention; torch_npu's default 0 is refused, there too.
        quant_scale_repo_mode: 1, scales in the rows.
        tile_size: 128.
        rope_head_dim: rotary keys of a row, 64 or 0 (rows of 528 bytes).
        key_dtype: of a uint8 `key`: torch.float8_e4m3fn or torch.int8.
        value_dtype: of a uint8 `value`, likewise.
        sinks: [N] float32, a logit a head that only adds to the denominator.
        row_layout: "nope_rope_scale" (torch_npu) or "nope_scale_rope" (FlashMLA, vLLM, SGLang).

    Returns:
        [B, S, N, 512] or [T, N, 512], dtype of `query`; a query that sees nothing gets zeros.

    Raises:
        ValueError: a shape, stride, device or option does not fit.
        TypeError: a type or dtype does not fit.
        RuntimeError: an argument requires grad, while grad mode is on.

    >>> import torch, custom
    >>> rows = torch.zeros(4, 16, 1, 656, dtype=torch.int8)
    >>> custom.npu_latent_cache_write(
    ...     torch.randn(40, 512), torch.randn(40, 64).bfloat16(), rows, torch.arange(40),
    ...     kind="int8", row_layout="nope_rope_scale",
    ... )
    >>> out = custom.npu_kv_quant_sparse_flash_attention(
    ...     torch.randn(1, 1, 8, 576), rows, rows, torch.arange(16).view(1, 1, 1, 16), 0.1, 2, 2,
    ...     layout_kv="PA_BSND", block_table=torch.tensor([[0, 1, 2]]),
    ...     actual_seq_lengths_kv=torch.tensor([40]), attention_mode=2,
    ... )
    >>> out.shape
    torch.Size([1, 1, 8, 512])
    """


@op
@variant_of(npu_kv_quant_sparse_flash_attention)
def npu_kv_quant_sparse_flash_attention_lse(*_: Any, **__: Any) -> tuple[Tensor, Tensor, Tensor]:
    """`npu_kv_quant_sparse_flash_attention`, and the statistics that merge parts of it.

    Formula: as `npu_kv_quant_sparse_flash_attention`.

    Returns:
        out: [B, S, N, 512] or [T, N, 512], dtype of `query`.
        softmax_max: float32 [B, 1, S, N] or [1, T, N], the largest logit; -inf where none.
        softmax_sum: float32, the sum of exp(logit - softmax_max), without the sinks.

    >>> import torch, custom
    >>> rows = torch.zeros(1, 9, 1, 656, dtype=torch.int8)
    >>> out, softmax_max, softmax_sum = custom.npu_kv_quant_sparse_flash_attention_lse(
    ...     torch.randn(1, 1, 8, 576), rows, rows, torch.arange(4).view(1, 1, 1, 4), 0.1, 2, 2,
    ...     attention_mode=2,
    ... )
    >>> lse = softmax_max + softmax_sum.log()
    >>> out.shape, lse.exp().mean().round()  # of zeros: as many as there are keys
    (torch.Size([1, 1, 8, 512]), tensor(4.))
    """


@worded
def flash_mla_sparse_fp8(
    q: Tensor,
    rows: Tensor,
    indices: Tensor,
    sm_scale: float,
    *,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Latent attention over fp8 rows that physical slots name, as FlashMLA's sparse decoding does.

    A slot is page * P + offset, so that no block table is needed.

    Args:
        q: [B, S, N, 576].
        rows: [pages, P, 1, 656] uint8 or float8_e4m3fn, in the order "nope_scale_rope"; pages may
            lie apart.
        indices: [B, S, K] int32 slots; one that is negative or past the cache is absent.
        sm_scale: of the logits.
        attn_sink: [N] float32, a logit a head that only adds to the denominator.
        topk_length: [B] int32, only so many of a request's indices count.

    Returns:
        out: [B, S, N, 512], dtype of `q`; zeros for a query without keys.
        lse: float32 [B, N, S], natural logarithm, without the sink; -inf for a query without keys
            (FlashMLA gives +inf there).

    Raises:
        ValueError: a shape, stride or device does not fit.
        TypeError: a type or dtype does not fit.
        RuntimeError: an argument requires grad, while grad mode is on.

    >>> import torch, custom
    >>> rows = torch.zeros(4, 64, 1, 656, dtype=torch.uint8)
    >>> custom.npu_latent_cache_write(
    ...     torch.randn(40, 512), torch.randn(40, 64).bfloat16(), rows, torch.arange(40) + 64,
    ...     kind="fp8", row_layout="nope_scale_rope",
    ... )
    >>> slots = torch.tensor([64, 70, 103, -1], dtype=torch.int32)
    >>> q = torch.randn(1, 1, 8, 576)
    >>> out, lse = custom.flash_mla_sparse_fp8(q, rows, slots[None, None], 0.1)
    >>> out.shape, lse.shape
    (torch.Size([1, 1, 8, 512]), torch.Size([1, 8, 1]))
    """
    if indices.ndim != 3 or rows.ndim != 4:
        raise ValueError(
            f"flash_mla_sparse_fp8: `indices` has shape {list(indices.shape)} and `rows` "
            f"{list(rows.shape)}, expected [B, S, K] and [pages, P, 1, 656]."
        )
    pages, page = rows.shape[:2]
    batch = indices.shape[0]
    if topk_length is not None:
        counted = torch.arange(indices.shape[-1], device=indices.device) < topk_length[:, None]
        indices = indices.where(counted[:, None], -1)
    # every request has all pages, in their own order: a position is a slot
    table = torch.arange(pages, dtype=torch.int32, device=rows.device).expand(batch, pages)
    lengths = torch.full((batch,), pages * page, dtype=torch.int32, device=rows.device)
    dtype: Any = torch.float8_e4m3fn if rows.dtype is torch.uint8 else None
    out, top, total = npu_kv_quant_sparse_flash_attention_lse(
        q,
        rows,
        rows,
        indices[:, :, None],
        sm_scale,
        2,
        2,
        block_table=table,
        actual_seq_lengths_kv=lengths,
        layout_kv="PA_BSND",
        sparse_mode=0,
        attention_mode=2,
        key_dtype=dtype,
        value_dtype=dtype,
        sinks=attn_sink,
        row_layout="nope_scale_rope",
    )
    return out, (top + total.log())[:, 0].mT
