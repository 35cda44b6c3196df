# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Attention of DeepSeek-V4 over window rows and compressed entries, keys and values in one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._op import described_by, op


@op
def npu_sparse_attn_sharedkv(
    q: Tensor,
    *,
    ori_kv: Tensor | None = None,
    cmp_kv: Tensor | None = None,
    ori_sparse_indices: Tensor | None = None,
    cmp_sparse_indices: Tensor | None = None,
    ori_block_table: Tensor | None = None,
    cmp_block_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_ori_kv: Tensor | None = None,
    cu_seqlens_cmp_kv: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_kv: Tensor | None = None,
    sinks: Tensor | None = None,
    metadata: Tensor | None = None,
    softmax_scale: float | None = 0,
    cmp_ratio: int = 0,
    ori_mask_mode: int = 4,
    cmp_mask_mode: int = 3,
    ori_win_left: int = 127,
    ori_win_right: int = 0,
    layout_q: str = "BSND",
    layout_kv: str = "PA_ND",
    return_softmax_lse: bool = False,
    indices_are_slots: bool = False,
    ori_topk_length: Tensor | None = None,
    cmp_topk_length: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over the last rows of a request and over entries that each stand for some rows.

    z = softmax_scale q . k;  lse = log sum exp(z);  out = sum exp(z) k / (exp(lse) + exp(sink))

    Token j of the Lq tokens of a request with Lk source tokens stands at p = Lk - Lq + j. Its keys
    are the window rows p - ori_win_left .. p, and the entries w < (p + 1) // cmp_ratio: none
    without `cmp_kv` (sliding), all (HCA), or those that `cmp_sparse_indices` name (CSA). A key on a
    page that is not there is absent and never read. Rows and entries are keys and values at once.

    Differentiable in `q`, `ori_kv`, `cmp_kv` and `sinks` where the keys are BSND or TND.

    Formula: DeepSeek-V4 (DeepSeek-AI, 2026), and CANN's operator of this name.

    Args:
        q: [B, S, N, D] (BSND) or [T, N, D] (TND).
        ori_kv: window rows, dtype of `q`: pages [pages, P, 1, D] (PA_ND), [B, S2, 1, D], or
            [T2, 1, D]; P a multiple of 16; pages may lie apart.
        cmp_kv: entries, likewise [pages, P, 1, D], [B, E, 1, D], or [T3, 1, D]; P also 1, 2, 4, 8.
        ori_sparse_indices: [B, S, 1, K] or [T, 1, K] int32 or int64 slots of `ori_kv`, with
            `indices_are_slots` alone.
        cmp_sparse_indices: [B, S, 1, K] or [T, 1, K] entries; one that is negative, or that its
            token does not see, is absent; equal ones count apart.
        ori_block_table: [B, max_pages] int32 or int64, page of every P rows; -1 where there is
            none.
        cmp_block_table: [B, max_pages] likewise, of every P entries.
        cu_seqlens_q: [B + 1] prefix sums from 0, of a TND `q`.
        cu_seqlens_ori_kv: [B + 1] prefix sums of a TND `ori_kv`; not read otherwise.
        cu_seqlens_cmp_kv: [B + 1] prefix sums of a TND `cmp_kv`; not read otherwise.
        seqused_q: [B], how many tokens of each request are there; None: all.
        seqused_kv: [B], source tokens of each request, this call's included; None: all rows of BSND
            and TND keys.
        sinks: [N] float32 (float64 beside float64), a logit a head that only adds to the
            denominator.
        metadata: not read.
        softmax_scale: of the logits; 0 and None: D ** -0.5.
        cmp_ratio: source tokens of an entry, 1 or more; not read without entries.
        ori_mask_mode: 4, a window that ends at the token.
        cmp_mask_mode: 3, the entries that are closed at the token.
        ori_win_left: rows before the token that it sees, 0 or more.
        ori_win_right: 0.
        layout_q: "BSND" or "TND".
        layout_kv: as `layout_q`, or "PA_ND" for pages.
        return_softmax_lse: whether the second result is wanted.
        indices_are_slots: both indices name slots, page * P + offset; tables, lengths of keys,
            window, ratio and masks are not read. One that is negative or past the cache is absent.
        ori_topk_length: [T] (of BSND T = B * S), so many of a token's window slots count.
        cmp_topk_length: [T] likewise, of its slots of entries.

    Returns:
        out: shape and dtype of `q`; 0 for a token that is none of a request or has no keys.
        softmax_lse: float32 [B, 1, S, N] or [1, T, N], natural logarithm, without the sinks; -inf
            where there are no keys; [0] unless asked for.

    Raises:
        ValueError: a shape, stride, device or option does not fit.
        TypeError: a type or dtype does not fit.
        NotSupported: an argument requires grad, and the keys are paged.

    >>> import torch, custom
    >>> q, rows = torch.randn(1, 2, 8, 64), torch.randn(3, 16, 1, 64)
    >>> entries = torch.randn(4, 2, 1, 64)
    >>> out, lse = custom.npu_sparse_attn_sharedkv(
    ...     q, ori_kv=rows, cmp_kv=entries, ori_block_table=torch.tensor([[2, 0]]),
    ...     cmp_block_table=torch.tensor([[3, 1]]), seqused_kv=torch.tensor([17]), cmp_ratio=4,
    ...     sinks=torch.zeros(8), return_softmax_lse=True,
    ... )
    >>> out.shape, lse.shape
    (torch.Size([1, 2, 8, 64]), torch.Size([1, 1, 2, 8]))
    """


@op
@described_by(npu_sparse_attn_sharedkv)
def npu_kv_quant_sparse_attn_sharedkv(
    q: Tensor,
    kv_quant_mode: int,
    *,
    ori_kv: Tensor | None = None,
    cmp_kv: Tensor | None = None,
    ori_sparse_indices: Tensor | None = None,
    cmp_sparse_indices: Tensor | None = None,
    ori_block_table: Tensor | None = None,
    cmp_block_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_ori_kv: Tensor | None = None,
    cu_seqlens_cmp_kv: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_kv: Tensor | None = None,
    sinks: Tensor | None = None,
    metadata: Tensor | None = None,
    softmax_scale: float | None = 0,
    cmp_ratio: int = 0,
    ori_mask_mode: int = 4,
    cmp_mask_mode: int = 3,
    ori_win_left: int = 127,
    ori_win_right: int = 0,
    layout_q: str = "BSND",
    layout_kv: str = "PA_ND",
    return_softmax_lse: bool = False,
    indices_are_slots: bool = False,
    ori_topk_length: Tensor | None = None,
    cmp_topk_length: Tensor | None = None,
    tile_size: int = 64,
    rope_head_dim: int = 64,
) -> tuple[Tensor, Tensor]:
    """`npu_sparse_attn_sharedkv` over rows and entries of 8 bits.

    The result is, bit for bit, that of the 16-bit op on what the rows stand for: a value times the
    scale of its tile, rounded once to the query's dtype (exact in bfloat16).

    Formula: FlashMLA's pages of DeepSeek-V4 (DeepSeek-AI, 2026), and CANN's operator of this name.

    Args:
        q: [B, S, N, 512] (BSND) or [T, N, 512] (TND).
        kv_quant_mode: 1, rows of 584 bytes.
        ori_kv: window rows [pages, P, 1, 584] uint8, P a multiple of 16, as
            `npu_latent_cache_write` writes them with row_layout "v4"; pages may lie apart.
        cmp_kv: entries, likewise; P also 1, 2, 4, 8.
        layout_kv: "PA_ND".
        tile_size: 64.
        rope_head_dim: 64.

    Returns:
        out: shape and dtype of `q`; 0 for a token that is none of a request or has no keys.
        softmax_lse: float32 [B, 1, S, N] or [1, T, N], natural logarithm, without the sinks; -inf
            where there are no keys; [0] unless asked for.

    Raises:
        ValueError: a shape, stride, device or option does not fit.
        TypeError: a type or dtype does not fit.
        RuntimeError: an argument requires grad, while grad mode is on.

    >>> import torch, custom
    >>> rows = torch.zeros(4, 9792, dtype=torch.uint8)[:, :16 * 584].view(4, 16, 1, 584)
    >>> custom.npu_latent_cache_write(
    ...     torch.randn(40, 448), torch.randn(40, 64).bfloat16(), rows, torch.arange(40),
    ...     kind="fp8", row_layout="v4",
    ... )
    >>> out, _ = custom.npu_kv_quant_sparse_attn_sharedkv(
    ...     torch.randn(1, 1, 8, 512), 1, ori_kv=rows, ori_block_table=torch.tensor([[0, 1, 2]]),
    ...     seqused_kv=torch.tensor([40]),
    ... )
    >>> out.shape
    torch.Size([1, 1, 8, 512])
    """


def npu_sparse_attn_sharedkv_metadata(*, device: Any = None, **arguments: Any) -> Tensor:
    """What CANN's callers hand to `npu_sparse_attn_sharedkv` as `metadata`, which is not read here.

    Args:
        device: of the result; None: that of the first tensor, else the default one.
        arguments: any of CANN's; not read.

    Returns:
        int32 [1024] of zeros.

    Raises:
        TypeError: an argument has no name.

    >>> import custom
    >>> custom.npu_sparse_attn_sharedkv_metadata(num_heads_q=64, cmp_ratio=4).shape
    torch.Size([1024])
    """
    if device is None:
        given = (x.device for x in arguments.values() if isinstance(x, Tensor))
        device = next(given, None)
    return torch.zeros(1024, dtype=torch.int32, device=device)


def flash_mla_v4(
    q: Tensor,
    rows: Tensor,
    slots: Tensor,
    sm_scale: float | None = None,
    *,
    extra_rows: Tensor | None = None,
    extra_slots: Tensor | None = None,
    topk_length: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
    attn_sink: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over rows that physical slots name, as FlashMLA's decoding of DeepSeek-V4 does.

    A slot is page * P + offset, so that no block table is needed.

    Args:
        q: [B, S, N, 512].
        rows: [pages, P, 1, 584] uint8, or [pages, P, 1, 512] of the dtype of `q`; pages may lie
            apart.
        slots: [B, S, K] int32 slots of `rows`; one that is negative or past the cache is absent.
        sm_scale: of the logits; None: D ** -0.5.
        extra_rows: more rows of the same kind, in pages of any size.
        extra_slots: [B, S, K2] int32 slots of `extra_rows`.
        topk_length: [B] int32, only so many of a request's slots count.
        extra_topk_length: [B] likewise, of its extra slots.
        attn_sink: [N] float32, a logit a head that only adds to the denominator.

    Returns:
        out: [B, S, N, 512], dtype of `q`; zeros for a query without keys.
        lse: float32 [B, N, S], natural logarithm, without the sink; -inf for a query without keys
            (FlashMLA gives +inf there).

    Raises:
        ValueError: a shape, stride or device does not fit.
        TypeError: a type or dtype does not fit.
        RuntimeError: an argument requires grad, while grad mode is on.

    >>> import torch, custom
    >>> rows = torch.zeros(4, 37440, dtype=torch.uint8)[:, :64 * 584].view(4, 64, 1, 584)
    >>> custom.npu_latent_cache_write(
    ...     torch.randn(40, 448), torch.randn(40, 64).bfloat16(), rows, torch.arange(40) + 64,
    ...     kind="fp8", row_layout="v4",
    ... )
    >>> slots = torch.tensor([64, 70, 103, -1], dtype=torch.int32)
    >>> out, lse = custom.flash_mla_v4(torch.randn(1, 1, 8, 512), rows, slots[None, None], 0.1)
    >>> out.shape, lse.shape
    (torch.Size([1, 1, 8, 512]), torch.Size([1, 8, 1]))
    """
    for name, given in (("slots", slots), ("extra_slots", extra_slots)):
        if given is not None and given.ndim != 3:
            raise ValueError(
                f"flash_mla_v4: `{name}` has shape {list(given.shape)}, expected [B, S, K]."
            )

    def by_token(length: Tensor | None) -> Tensor | None:
        return None if length is None else length.repeat_interleave(q.shape[1])

    arguments: dict[str, Any] = dict(
        ori_kv=rows,
        cmp_kv=extra_rows,
        ori_sparse_indices=slots[:, :, None],
        cmp_sparse_indices=None if extra_slots is None else extra_slots[:, :, None],
        sinks=attn_sink,
        softmax_scale=sm_scale,
        return_softmax_lse=True,
        indices_are_slots=True,
        ori_topk_length=by_token(topk_length),
        cmp_topk_length=by_token(extra_topk_length),
    )
    if rows.dtype is torch.uint8:
        out, lse = npu_kv_quant_sparse_attn_sharedkv(q, 1, **arguments)
    else:
        out, lse = npu_sparse_attn_sharedkv(q, **arguments)
    return out, lse[:, 0].mT
