# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Gradients of Kimi delta attention: the gated delta rule's, then its norms' and its gate's."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import Unpack

from ...ops.delta_rule.chunk_kda_grad import Arguments
from ..common.delta_rules import of_rate
from ..common.precision import accumulator
from . import chunk_gated_delta_rule_grad as rule
from .chunk_kda import gate, normal, tokens


def backward(
    **a: Unpack[Arguments],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    q, k, v, g, beta, A_log = a["q"], a["k"], a["v"], a["g"], a["beta"], a["A_log"]
    dt_bias = a["dt_bias"]
    kind = accumulator(q)
    x = tokens(a)
    # tokens of no sequence may hold anything
    owned = torch.zeros(q.shape[:2], dtype=torch.bool, device=q.device)
    owned.view(-1)[x.first : x.first + int(x.lengths.sum())] = True
    q, k, g = (y.masked_fill(~owned[..., None, None], 0) for y in (q, k, g))
    turn = a["state_layout"] == "kv"
    state, d_final = (
        s.mT if s is not None and turn else s for s in (a["initial_state"], a["d_final_state"])
    )
    some = rule.backward(
        **x.arguments,
        d_out=a["d_out"].flatten(0, 1)[x.first :],
        d_final_state=d_final,
        initial_state=state,
        scale=a["scale"],
    )

    def whole(like: Tensor, part: Tensor) -> Tensor:
        every = part.new_zeros(like.shape)
        every.flatten(0, 1)[x.first :] = part
        return every

    d_q, d_k, d_v, d_beta, d_g = (
        whole(y, d) for y, d in zip((q, k, v, beta, g), (*some[:4], some[5]), strict=True)
    )
    if a["use_beta_sigmoid_in_kernel"]:
        # tokens of no sequence may hold anything
        d_beta = torch.where(
            owned[..., None], d_beta * of_rate(beta.to(kind), a["allow_neg_eigval"]), 0
        )
    if a["use_qk_l2norm_in_kernel"]:
        d_q, d_k = (_of_normal(y.to(kind), d) for y, d in ((q, d_q), (k, d_k)))
    d_A, d_bias = q.new_zeros(0), q.new_zeros(0)
    if a["use_gate_in_kernel"]:
        _, by_g, by_A = gate(g.to(kind), A_log, dt_bias, a["lower_bound"])
        if A_log is not None:
            d_A = (d_g * by_A).sum((0, 1, 3), dtype=torch.float64).to(A_log.dtype)
        d_g = d_g * by_g
        if dt_bias is not None:
            d_bias = d_g.sum((0, 1), dtype=torch.float64)
            d_bias = d_bias.reshape(dt_bias.shape).to(dt_bias.dtype)
    d_state = q.new_zeros(0)
    if a["initial_state"] is not None:
        d_state = some[4].mT.contiguous() if turn else some[4]
    return (
        d_q.to(q.dtype),
        d_k.to(k.dtype),
        d_v.to(v.dtype),
        d_g.to(g.dtype),
        d_beta.to(beta.dtype),
        d_state,
        d_A,
        d_bias,
    )


def _of_normal(x: Tensor, grad: Tensor) -> Tensor:
    """The gradient of x from that of `normal(x)`."""
    unit, factor = normal(x)
    return factor * (grad - unit * (unit * grad).sum(-1, keepdim=True))
