# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Hyper-connections in front of a sublayer: streams X [hc, h] of a token become its input, and the
gates of the way back.

    mix = vec(X) fn^T / sqrt(mean X^2 + norm_eps)            in (pre hc | post hc | comb hc x hc)
    pre = sigmoid(s0 mix + base) + hc_eps      post = 2 sigmoid(s1 mix + base)
    comb = softmax over rows of (s2 mix + base), + hc_eps; its columns, then iters - 1 times its
    rows and its columns, divided by their sum + hc_eps
    y = sum_j pre_j X_j, and with norm_weight its RMSNorm: one rounding

Models: DeepSeek-V4 (mHC, Xie et al., 2026).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import Unpack

from ...ops.deepseek_v4.hc_pre import Arguments
from ..common.precision import accumulator


class Gates(NamedTuple):
    """Of tokens [T]: what the products give, and what is made of it."""

    root: Tensor
    """[T, 1], 1 / sqrt(mean X^2 + norm_eps)."""
    mix: Tensor
    pre: Tensor
    post: Tensor
    first: Tensor
    """comb before its sums are divided."""


def forward(**a: Unpack[Arguments]) -> tuple[Tensor, Tensor, Tensor]:
    x, hc_fn = a["x"], a["hc_fn"]
    streams = x.flatten(0, -3).to(accumulator(x))
    of = gates(streams, hc_fn, a["hc_scale"], a["hc_base"], a["norm_eps"], a["hc_eps"])
    y = collapsed(of.pre, streams)
    if a["norm_weight"] is not None:
        y = y * inverse_root(y, a["norm_eps"]) * a["norm_weight"]
    y = y.to(x.dtype).view(*x.shape[:-2], x.shape[-1])
    if hc_fn.shape[0] == a["hc_mult"]:
        return y, hc_fn.new_empty([0]), hc_fn.new_empty([0])
    *_, (_, _, comb) = sweeps(of.first, a["hc_sinkhorn_iters"], a["hc_eps"])
    return y, of.post.reshape(x.shape[:-1]), comb.reshape(*x.shape[:-1], a["hc_mult"])


def gates(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, norm_eps: float, hc_eps: float
) -> Gates:
    """Of streams [T, hc, h]; of the head of a model post and comb have no numbers."""
    n, flat = streams.shape[1], streams.flatten(1)
    root = inverse_root(flat, norm_eps)
    mix = flat @ fn.t() * root
    pre = torch.sigmoid(mix[:, :n] * scale[0] + base[:n]) + hc_eps
    if fn.shape[0] == n:
        return Gates(root, mix, pre, mix[:, n:], mix[:, n:])
    post = 2 * torch.sigmoid(mix[:, n : 2 * n] * scale[1] + base[n : 2 * n])
    logits = (mix[:, 2 * n :] * scale[2] + base[2 * n :]).unflatten(-1, (n, n))
    return Gates(root, mix, pre, post, logits.softmax(-1) + hc_eps)


def inverse_root(x: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def collapsed(pre: Tensor, streams: Tensor) -> Tensor:
    return (pre[..., None] * streams).sum(1)


def sweeps(comb: Tensor, iters: int, eps: float) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(which axis, sums + eps, comb divided by them) of every division, in order."""
    for axis in [-2] + [-1, -2] * (iters - 1):
        sums = comb.sum(axis, keepdim=True) + eps
        comb = comb / sums
        yield axis, sums, comb
