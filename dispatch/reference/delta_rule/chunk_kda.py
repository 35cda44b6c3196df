# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Kimi delta attention over whole sequences, token by token: the gated delta rule with a decay by
channel, its gate and its norms.

    g = -exp(A_log) softplus(x), or lower_bound sigmoid(exp(A_log) x), with x = g + dt_bias
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from ...ops.delta_rule.chunk_kda import Arguments
from ..common.delta_rules import rate
from ..common.precision import accumulator
from . import chunk_gated_delta_rule as rule
from .fused_sigmoid_gating_delta_rule_update import softplus


@dataclass(frozen=True)
class Tokens:
    """All tokens in one row, from the first of a sequence on, as the rule takes them."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    lengths: Tensor
    first: int

    @property
    def arguments(self) -> dict[str, Any]:
        """What the gated delta rule and its gradient take of them: gates and norms are done."""
        return dict(
            query=self.q,
            key=self.k,
            value=self.v,
            g=self.g,
            beta=self.beta,
            actual_seq_lengths=self.lengths,
            use_beta_sigmoid_in_kernel=False,
            allow_neg_eigval=False,
        )


def tokens(a: Arguments) -> Tokens:
    q, k, v = a["q"], a["k"], a["v"]
    g, beta, cu_seqlens = a["g"], a["beta"], a["cu_seqlens"]
    kind, (batch, length) = accumulator(q), q.shape[:2]
    q, k = (x.to(kind) for x in (q, k))
    if a["use_qk_l2norm_in_kernel"]:
        q, k = (normal(x)[0] for x in (q, k))
    beta = rate(beta.to(kind), a["use_beta_sigmoid_in_kernel"], a["allow_neg_eigval"])
    g = g.to(kind)
    if a["use_gate_in_kernel"]:
        g = gate(g, a["A_log"], a["dt_bias"], a["lower_bound"])[0]
    if cu_seqlens is None:
        first, lengths = 0, torch.full([batch], length, device=q.device)
    else:
        # a sequence begins where all before it have ended
        bounds = cu_seqlens.long().clamp(0, length).cummax(0).values
        first, lengths = int(bounds[0]), bounds.diff()
    q, k, v, g, beta = (x.flatten(0, 1)[first:] for x in (q, k, v, g, beta))
    return Tokens(q, k, v, g, beta, lengths, first)


def normal(x: Tensor) -> tuple[Tensor, Tensor]:
    """(x of length 1, what it was multiplied with)."""
    factor = torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
    return x * factor, factor


def gate(
    g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(the decay's logarithm, its derivatives by g and by A_log) of g [B, T, HV, K]."""
    x = g if dt_bias is None else g + dt_bias.reshape(g.shape[2:]).to(g.dtype)
    speed = x.new_ones(()) if A_log is None else A_log.to(g.dtype).exp()[:, None]
    if lower_bound is None:
        decay = -speed * softplus(x, 1.0, 20.0)
        return decay, -speed * torch.sigmoid(x), decay
    share = torch.sigmoid(speed * x)
    slope = lower_bound * share * (1 - share) * speed
    return lower_bound * share, slope, slope * x


def forward(**a: Unpack[Arguments]) -> tuple[Tensor, Tensor]:
    initial_state = a["initial_state"]
    x = tokens(a)
    turn = a["state_layout"] == "kv"
    state = initial_state.mT if initial_state is not None and turn else initial_state
    some, final = rule.forward(**x.arguments, initial_state=state, scale=a["scale"])
    out = torch.zeros_like(a["v"], memory_format=torch.contiguous_format)
    out.flatten(0, 1)[x.first :] = some
    return out, (final.mT if turn else final).contiguous()
