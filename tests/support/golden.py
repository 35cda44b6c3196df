# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The sparse-attention layer formula by formula, one token at a time, in any precision.

In float64 nothing is rounded; in another dtype every intermediate is rounded where the op's
definition says so, and products accumulate in float32.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor


def rms_norm(x: Tensor, gamma: Tensor, epsilon: float) -> Tensor:
    return gamma * x / torch.sqrt((x * x).mean() + epsilon)


def layer_norm(x: Tensor, gamma: Tensor, beta: Tensor, epsilon: float) -> Tensor:
    centred = x - x.mean()
    return gamma * centred / torch.sqrt((centred * centred).mean() + epsilon) + beta


def rope(u: Tensor, sin: Tensor, cos: Tensor, interleaved: bool) -> Tensor:
    """One vector, element by element."""
    if not len(u):
        return u
    half = len(u) // 2
    v = [*u[0::2], *u[1::2]] if interleaved else list(u)
    turned = [-x for x in v[half:]] + v[:half]
    return torch.stack([v[i] * cos[i] + turned[i] * sin[i] for i in range(len(v))])


@dataclass
class Layer:
    """Row-major weights, float64."""

    w_dq: Tensor  # [H, Rq]
    w_uq_qr: Tensor  # [Rq, N * (Dn + Dr)]
    w_uk: Tensor  # [N, Dn, R]
    w_dkv_kr: Tensor  # [H, R + Dr]
    gamma_cq: Tensor
    gamma_ckv: Tensor
    w_idx_qb: Tensor  # [Rq, Ni * Di]
    w_idx_k: Tensor  # [H, Di]
    w_idx_proj: Tensor  # [H, Ni]
    in_gamma_k: Tensor
    in_beta_k: Tensor

    @staticmethod
    def draw(H=80, Rq=48, N=3, Dn=16, R=48, Dr=16, Ni=16, Di=32) -> Layer:
        def matrix(*shape: int) -> Tensor:
            return torch.randn(shape).double() * shape[-2] ** -0.5

        return Layer(
            matrix(H, Rq),
            matrix(Rq, N * (Dn + Dr)),
            matrix(N, Dn, R),
            matrix(H, R + Dr),
            torch.randn(Rq).double(),
            torch.randn(R).double(),
            matrix(Rq, Ni * Di),
            matrix(H, Di),
            matrix(H, Ni),
            torch.randn(Di).double(),
            torch.randn(Di).double(),
        )

    def to(self, dtype: torch.dtype) -> Layer:
        """The same weights in `dtype`."""
        return Layer(*(getattr(self, field.name).to(dtype) for field in fields(self)))


class Golden:
    """`dtype` is what intermediates are rounded to."""

    def __init__(self, layer: Layer, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.wide = torch.float64 if dtype is torch.float64 else torch.float32
        self.w = layer.to(self.wide)

    def rnd(self, x: Tensor) -> Tensor:
        return x.to(self.dtype).to(self.wide)

    def mla_prolog(self, x, sin, cos, eps_cq, eps_ckv, interleaved, latent=True):
        """One token [H]: query [N, R], query_rope [N, Dr], query_norm [Rq], key [R], key_rope.
        Not `latent`: queries are x W_uq_qr, and x stands for query_norm."""
        w, rnd = self.w, self.rnd
        x, sin, cos = (each.to(self.wide) for each in (x, sin, cos))
        heads, plain, rank = w.w_uk.shape
        c = rnd(rms_norm(rnd(x @ w.w_dq), w.gamma_cq, eps_cq)) if latent else x
        q = rnd(c @ w.w_uq_qr).view(heads, -1)
        query = torch.stack([rnd(q[h, :plain] @ w.w_uk[h]) for h in range(heads)])
        query_rope = torch.stack([rnd(rope(each, sin, cos, interleaved)) for each in q[:, plain:]])
        kv = rnd(x @ w.w_dkv_kr)
        key = rnd(rms_norm(kv[:rank], w.gamma_ckv, eps_ckv))
        return query, query_rope, c, key, rnd(rope(kv[rank:], sin, cos, interleaved))

    def indexer_prolog(self, x, c, sin, cos, eps, interleaved):
        """One token [H] and its query_norm [Rq]: query_index [Ni, Di], weights [Ni], key [Di]."""
        w, rnd = self.w, self.rnd
        x, c, sin, cos = (each.to(self.wide) for each in (x, c, sin, cos))
        size, rotary = len(w.in_gamma_k), len(sin)

        def turn(u: Tensor) -> Tensor:
            return torch.cat([rnd(rope(u[:rotary], sin, cos, interleaved)), u[rotary:]])

        query = rnd(c @ w.w_idx_qb).view(-1, size)
        key = rnd(layer_norm(x @ w.w_idx_k, w.in_gamma_k, w.in_beta_k, eps))
        return torch.stack([turn(q) for q in query]), rnd(x @ w.w_idx_proj), turn(key)
