# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Rotary position embedding of the last dimension, with the sines and cosines already gathered."""

from __future__ import annotations

import torch
from torch import Tensor


def given(
    query_rope: Tensor | None, key_rope: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """The rotary parts of an attention's queries and keys; of no channel they are as good as
    absent."""
    if query_rope is None or not query_rope.shape[-1]:
        return None, None
    return query_rope, key_rope


def rotate(x: Tensor, sin: Tensor, cos: Tensor, interleaved: bool) -> Tensor:
    """x [..., Dr] in float32 (or float64); `sin` and `cos` [..., Dr] broadcast over it.

    v = x, or [x_0 x_2 ..., x_1 x_3 ...] if interleaved;  out = v cos + [-v_right, v_left] sin.
    The result lies in halves either way, so that queries and keys agree.
    """
    half = x.shape[-1] // 2
    if interleaved:
        left, right = x[..., 0::2], x[..., 1::2]
    else:
        left, right = x[..., :half], x[..., half:]
    return torch.cat(
        [
            left * cos[..., :half] - right * sin[..., :half],
            right * cos[..., half:] + left * sin[..., half:],
        ],
        dim=-1,
    )


def rotate_last(x: Tensor, sin: Tensor, cos: Tensor, *, inverse: bool = False) -> Tensor:
    """The last Dr dims of x [..., D] in float32 (or float64), neighbours as pairs, rotated where
    they stand; `sin` and `cos` [..., Dr] broadcast over x, and pair i reads their entry 2i.

    (a, b) -> (a cos - b sin, b cos + a sin); `inverse` turns the other way.
    """
    plain = x.shape[-1] - sin.shape[-1]
    left, right = x[..., plain::2], x[..., plain + 1 :: 2]
    c, s = cos[..., ::2], -sin[..., ::2] if inverse else sin[..., ::2]
    turned = torch.stack([left * c - right * s, right * c + left * s], -1).flatten(-2)
    return torch.cat([x[..., :plain], turned], -1)
