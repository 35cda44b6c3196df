# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""FlashAttention-2, forward and backward."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from ._keywords import worded


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
