# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What the compressor and its gradient share.

    kv_t = x_t wkv^T   z_t = x_t wgate^T + ape[t mod m]            [coff * D]
    C_w  = sum_t softmax_t(z) kv_t, channel by channel, over the m tokens of window w; with coff 2
           over those of window w - 1 by their first D channels and those of w by the others
    entry = hadamard(RoPE(RMSNorm(C_w)))

RoPE turns the last channels, or the first ones, and leaves them where they are.  Without a gate
every z is 0; a LayerNorm is of every kv_t.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...common.compressed import FIRST, LAST, PAIRS, Tokens, Windows, windows_of
from ..common import quantizers
from ..common.precision import matmul


def closing(tokens: Tokens, shape: list[int], ratio: int) -> tuple[Tensor, Windows]:
    """(which rows of an output of that `shape` are of windows that close, those windows)"""
    every = windows_of(tokens, shape, ratio)
    closed = torch.nonzero(every.number >= 0).flatten()
    return closed, Windows(every.request[closed], every.number[closed])


def projected(
    x: Tensor, wkv: Tensor, wgate: Tensor | None, ape: Tensor | None, tokens: Tokens
) -> tuple[Tensor, Tensor]:
    """(kv, z) [T, coff * D], not rounded."""
    x = x.flatten(0, -2)
    kv = matmul(x, wkv.mT)
    if wgate is None or ape is None:
        return kv, torch.zeros_like(kv)
    return kv, matmul(x, wgate.mT) + ape[tokens.position % ape.shape[0]]


def members(windows: Windows, ratio: int, coff: int) -> Tensor:
    """The positions [E, coff * m] of the tokens that each window is made of, negative ones too."""
    first = (windows.number - coff + 1) * ratio
    return first[:, None] + torch.arange(coff * ratio, device=first.device)


def own(tokens: Tokens, windows: Windows, position: Tensor) -> Tensor:
    """Where in x each of those is, or -1."""
    request = windows.request[:, None]
    start = tokens.start[request]
    inside = (position >= start.clamp(min=0)) & (position < start + tokens.count[request])
    return torch.where(inside, tokens.first[request] + position - start, -1)


def halves(rows: Tensor, coff: int) -> Tensor:
    """[E, coff * m, D] of rows [E, coff * m, coff * D]: the channels that count."""
    each = rows.unflatten(-1, (coff, rows.shape[-1] // coff)).chunk(coff, 1)
    return torch.cat([part[:, :, i] for i, part in enumerate(each)], 1)


def taken(rows: Tensor, index: Tensor, coff: int) -> Tensor:
    """[E, coff * m, D] of what stands at `index` [E, coff * m] in rows [T, coff * D]; 0: absent."""
    if not len(rows):
        return rows.new_zeros([*index.shape, rows.shape[-1] // coff])
    return halves(rows[index.clamp(min=0)].masked_fill((index < 0)[..., None], 0), coff)


def shares(z: Tensor, there: Tensor) -> Tensor:
    """softmax over the tokens that are there."""
    return z.masked_fill(~there[..., None], -torch.inf).softmax(1)


def angles(rope: Tensor, rotary: int, pairs: bool, dtype: torch.dtype) -> Tensor:
    """One for each pair of channels, [E, dr / 2]."""
    rope = rope.flatten(0, -2).to(dtype)
    if rope.shape[-1] * 2 == rotary:
        return rope
    return rope[..., ::2] if pairs else rope[..., : rotary // 2]


def turned(x: Tensor, sin: Tensor, cos: Tensor, pairs: bool, of: str = LAST) -> Tensor:
    """x [E, D], its first or last channels rotated where they stand."""
    size, rotary = x.shape[-1], 2 * sin.shape[-1]
    first = 0 if of == FIRST else size - rotary
    before, some, behind = x.split([first, rotary, size - rotary - first], -1)
    a, b = (some[..., ::2], some[..., 1::2]) if pairs else some.chunk(2, -1)
    a, b = a * cos - b * sin, b * cos + a * sin
    some = torch.stack([a, b], -1).flatten(-2) if pairs else torch.cat([a, b], -1)
    return torch.cat([before, some, behind], -1)


def scale_of(c: Tensor, eps: float) -> Tensor:
    """1 / rms of rows."""
    return torch.rsqrt(c.square().mean(-1, keepdim=True) + eps)


def finished(pooled: Tensor, rows: Tensor, a: Mapping[str, Any], of: str = LAST) -> Tensor:
    """Entries of what windows, those of `rows` of the output, come to; `of`: rope_slice."""
    pairs, rotary = a["rotary_mode"] == PAIRS, a["rope_head_dim"]
    if a["norm_weight"] is not None:
        pooled = pooled * scale_of(pooled, a["norm_eps"]) * a["norm_weight"]
    if a["rope_sin"] is None:
        return pooled
    both = a["rope_sin"], a["rope_cos"]
    sin, cos = (angles(rope, rotary, pairs, pooled.dtype)[rows] for rope in both)
    return turned(pooled, sin, cos, pairs, of)


def placed(
    entries: Tensor, rows: Tensor, shape: list[int], hadamard: bool, dtype: torch.dtype
) -> Tensor:
    """The output: entries at their rows, zeros at the others."""
    size = entries.shape[-1]
    if hadamard:
        entries = quantizers.hadamard(entries, size**-0.5)
    out = entries.new_zeros([torch.Size(shape).numel(), size], dtype=dtype)
    out[rows] = entries.to(dtype)
    return out.view([*shape, size])
