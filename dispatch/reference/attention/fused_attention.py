# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Scaled dot-product attention, a block of query rows at a time: no [Nq, Nk] matrix is kept.

S = sm_scale q k^T,  hidden keys -inf     lse = logsumexp_j S     o = exp(S - lse) v
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from typing_extensions import Unpack

from ...ops.attention.fused_attention import Arguments
from ..common.precision import accumulator

# scores held at a time: 64 MiB in float32, and on a CPU 4, which its cache keeps
_BLOCK, _CACHED = 1 << 24, 1 << 20


def forward(**x: Unpack[Arguments]) -> tuple[Tensor, Tensor]:
    q, k, v = x["q"], x["k"], x["v"]
    o = q.new_zeros([*q.shape[:-1], v.shape[-1]])
    lse = q.new_full(q.shape[:-1], -torch.inf, dtype=accumulator(q))
    options = Options.of(q, x["causal"], x["sm_scale"], x["window"])
    if x["cu_seqlens_q"] is None or x["cu_seqlens_k"] is None:
        _sequence(q, k, v, o, lse, options)
        return o, lse
    for rows, keys in sequences(x["cu_seqlens_q"], x["cu_seqlens_k"], q, k):
        of_q, of_k, of_v, of_o = map(heads_first, (q[rows], k[keys], v[keys], o[rows]))
        _sequence(of_q, of_k, of_v, of_o, lse[rows].transpose(0, 1)[None], options)
    return o, lse


def _sequence(q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, options: Options) -> None:
    """Dense attention of [B, H, N, D] tensors, into the views `o` and `lse`."""
    v = v.to(accumulator(q))
    for rows, keys, scores in score_blocks(q, k, options):
        lse_block = torch.logsumexp(scores, -1)
        p = torch.exp(scores - finite(lse_block)[..., None])
        o[:, :, rows] = ungroup(group(p, k.shape[1]) @ v[:, :, keys], q.shape[1]).to(o.dtype)
        lse[:, :, rows] = lse_block


@dataclass(frozen=True)
class Options:
    causal: bool
    sm_scale: float
    window: int | None

    @staticmethod
    def of(q: Tensor, causal: bool, sm_scale: float | None, window: int | None) -> Options:
        return Options(causal, q.shape[-1] ** -0.5 if sm_scale is None else sm_scale, window)


def sequences(
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, q: Tensor, k: Tensor
) -> Iterator[tuple[slice, slice]]:
    """The tokens of each sequence: (those of q, those of k).  It begins where all before it have
    ended, and ends with the tokens."""
    bounds = (
        sums.long().clamp(0, len(x)).cummax(0).values.tolist()
        for sums, x in ((cu_seqlens_q, q), (cu_seqlens_k, k))
    )
    for rows, keys in zip(*map(pairwise, bounds), strict=True):
        yield slice(*rows), slice(*keys)


def heads_first(x: Tensor) -> Tensor:
    """[T, H, D] -> [1, H, T, D], a view."""
    return x.transpose(0, 1)[None]


def group(x: Tensor, key_heads: int) -> Tensor:
    """[B, H, n, D] -> [B, Hk, H / Hk * n, D]: the query heads that share a key head, as rows."""
    batch, heads, rows, size = x.shape
    return x.reshape(batch, key_heads, heads // key_heads * rows, size)


def ungroup(x: Tensor, heads: int) -> Tensor:
    """The inverse of `group`."""
    batch, key_heads, rows, size = x.shape
    return x.reshape(batch, heads, rows * key_heads // heads, size)


def finite(lse: Tensor) -> Tensor:
    """-inf (a row that sees nothing) becomes 0, so that exp(-inf - lse) is 0 and not NaN."""
    return lse.masked_fill(lse == -torch.inf, 0.0)


def score_blocks(q: Tensor, k: Tensor, options: Options) -> Iterator[tuple[slice, slice, Tensor]]:
    """(rows, keys, scores [B, H, rows, keys]); keys that no row of the block sees are left out."""
    batch, heads, length_q, _ = q.shape
    length_k, shift = k.shape[2], k.shape[2] - length_q
    row = max(1, batch * heads * length_k)
    step = max(1, _BLOCK // row)
    if q.device.type == "cpu":
        step = min(step, max(16, _CACHED // row))
    k = k.to(accumulator(q))
    for start in range(0, length_q if batch * heads else 0, step):
        rows = slice(start, min(start + step, length_q))
        first, last = rows.start + shift, rows.stop - 1 + shift
        low, high = 0, length_k
        if options.causal:
            high = min(high, last + 1)
        if options.window is not None:
            low = max(low, first - options.window + 1)
            high = min(high, last + options.window)
        if low >= high:
            continue
        keys = slice(low, high)
        block = group(q[:, :, rows].to(k.dtype) * options.sm_scale, k.shape[1])
        scores = ungroup(block @ k[:, :, keys].mT, heads)
        position = torch.arange(first, last + 1, device=q.device)[:, None]
        key = torch.arange(low, high, device=q.device)[None, :]
        if options.causal:
            scores.masked_fill_(key > position, -torch.inf)
        if options.window is not None:
            scores.masked_fill_((position - key).abs() >= options.window, -torch.inf)
        yield rows, keys, scores
