# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The gradient of hc_pre by formula; see hc_pre.py.  Nothing of the forward is kept: products and
sweeps are done again.

    a division c' = c / (S + eps):   dc = (dc' - sum over its axis of dc' c') / (S + eps)
    mix = r vec(X) fn^T:             dX = r dmix fn - (r^2 / (hc h)) <dmix, mix> X
                                     dfn = sum over tokens of (r dmix)^T vec(X)
"""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import Unpack

from ...ops.deepseek_v4.hc_pre_grad import Arguments
from ..common.precision import accumulator
from . import hc_pre


def backward(**a: Unpack[Arguments]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    x, hc_fn, d_y, hc_eps = a["x"], a["hc_fn"], a["d_y"], a["hc_eps"]
    n, wide = a["hc_mult"], accumulator(x)
    streams = x.flatten(0, -3).to(wide)
    of = hc_pre.gates(streams, hc_fn, a["hc_scale"], a["hc_base"], a["norm_eps"], hc_eps)
    d_y = d_y.flatten(0, -2).to(wide)
    d_norm = a["hc_base"].new_zeros([0])
    if a["norm_weight"] is not None:
        d_y, d_norm = _of_norm(
            hc_pre.collapsed(of.pre, streams), a["norm_weight"], a["norm_eps"], d_y
        )

    # what goes through sigmoids and the softmax, one part behind the other
    d_pre = (d_y[:, None] * streams).sum(-1)
    opened = of.pre - hc_eps
    inner = [d_pre * opened * (1 - opened)]
    if hc_fn.shape[0] > n:
        inner.append(a["d_post"].view(-1, n) * of.post * (1 - of.post / 2))
        d_first = _of_sweeps(of.first, a["hc_sinkhorn_iters"], hc_eps, a["d_comb"].view(-1, n, n))
        share = of.first - hc_eps
        d_logits = share * (d_first - (d_first * share).sum(-1, keepdim=True))
        inner.append(d_logits.flatten(1))
    parts = [part.shape[1] for part in inner]
    by = torch.cat([s.expand(size) for s, size in zip(a["hc_scale"], parts, strict=True)])
    d_inner = torch.cat(inner, -1)
    d_scale = [part.sum() for part in (d_inner * of.mix).split(parts, -1)]
    d_mix = d_inner * by

    d_products, flat = of.root * d_mix, streams.flatten(1)
    own = (d_mix * of.mix).sum(-1, keepdim=True) * of.root.square() / flat.shape[1]
    d_x = (d_products @ hc_fn - own * flat).unflatten(-1, (n, -1)) + of.pre[..., None] * d_y[
        :, None
    ]
    return (
        d_x.to(x.dtype).view(x.shape),
        d_products.t() @ flat,
        torch.stack(d_scale),
        d_inner.sum(0),
        d_norm,
    )


def _of_norm(y: Tensor, weight: Tensor, eps: float, d_out: Tensor) -> tuple[Tensor, Tensor]:
    """(the gradient of y, that of the weight) of y / sqrt(mean y^2 + eps) weight."""
    root = hc_pre.inverse_root(y, eps)
    d_unit = d_out * weight
    mean = (d_unit * y).mean(-1, keepdim=True)
    return root * d_unit - root**3 * mean * y, (d_out * y * root).sum(0)


def _of_sweeps(first: Tensor, iters: int, eps: float, d_comb: Tensor) -> Tensor:
    for axis, sums, comb in reversed([*hc_pre.sweeps(first, iters, eps)]):
        d_comb = (d_comb - (d_comb * comb).sum(axis, keepdim=True)) / sums
    return d_comb
