# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Gradients of the gated delta rule, token by token.

By token and head, from the state S [Dk, Dv] before it, decay a = exp(g), and E, the gradient of the
state after it:

    S' = a S    x = v - S'^T k    u = beta x    after = S' + k u^T    o = scale after^T q
    E += scale q do^T     dq = scale after do     du = E^T k     dbeta = du . x     dv = beta du
    E' = E - k dv^T       dk = E u - S' dv        dg = <E', S'>  E of the token before = a E'

With a decay by channel, g [T, HV, K], dg is a sum over Dv alone.

The states are kept at every 64th token and made again between.
"""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import Unpack

from ...ops.delta_rule.chunk_gated_delta_rule_grad import Arguments
from ..common.delta_rules import by_channel, of_rate, rate, sequences, some_sequences, step
from ..common.precision import accumulator

SEGMENT = 64


def _with(states: Tensor, some: Tensor | slice, new: Tensor) -> Tensor:
    """`states`, with new ones for some sequences."""
    return new if isinstance(some, slice) else states.index_copy(0, some, new)


def backward(**a: Unpack[Arguments]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    query, key, value, beta = a["query"], a["key"], a["value"], a["beta"]
    initial_state, scale, g = a["initial_state"], a["scale"], a["g"]
    sigmoid, twice = a["use_beta_sigmoid_in_kernel"], a["allow_neg_eigval"]
    tokens, heads, key_size = key.shape
    value_heads, value_size = value.shape[1:]
    kind, device = accumulator(query), key.device
    starts, lengths = sequences(a["actual_seq_lengths"], tokens, device)
    scale = key_size**-0.5 if scale is None else scale

    def zeros(like: Tensor | None) -> Tensor:
        return query.new_zeros(0) if like is None else like.new_zeros(like.shape)

    d_query, d_key, d_value, d_beta, d_state, d_g = (
        zeros(x) for x in (query, key, value, beta, initial_state, g)
    )

    def first(given: Tensor | None, some: Tensor) -> Tensor:
        shape = (len(some), value_heads, key_size, value_size)
        if given is None:
            return torch.zeros(shape, dtype=kind, device=device)
        return given[some].to(kind).mT

    def by_value_head(x: Tensor) -> Tensor:
        return x.to(kind).repeat_interleave(value_heads // heads, 1)

    def token_of(
        token: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """q, k, v, decay, rate of change."""
        q, k = by_value_head(query[token]), by_value_head(key[token])
        decay = torch.ones_like(q[..., :1]) if g is None else by_channel(g)[token].to(kind).exp()
        change = (
            torch.ones_like(q[..., 0])
            if beta is None
            else rate(beta[token].to(kind), sigmoid, twice)
        )
        return q * scale, k, value[token].to(kind), decay, change

    size = value_heads * key_size * value_size
    longest = int(lengths.max()) if len(lengths) else 0
    for some in some_sequences(len(lengths), size * (SEGMENT + longest // SEGMENT)):
        some = some.to(device)
        state, grad = first(initial_state, some), first(a["d_final_state"], some)
        last = int(lengths[some].max())

        def alive(t: int, some: Tensor = some) -> Tensor | slice:
            """Which of these sequences have a token t; no copies where all do."""
            on = t < lengths[some]
            return slice(None) if bool(on.all()) else on.nonzero()[:, 0]

        def after(state: Tensor, t: int, some: Tensor = some) -> Tensor:
            on = alive(t)
            new, _ = step(state[on], *token_of((starts[some] + t)[on]))
            return _with(state, on, new)

        kept = []
        for t in range(last):
            if t % SEGMENT == 0:
                kept.append(state)
            state = after(state, t)

        for begin in reversed(range(0, last, SEGMENT)):
            states = [kept.pop()]
            for t in range(begin, min(begin + SEGMENT, last)):
                states.append(after(states[-1], t))
            while len(states) > 1:
                new, old = states.pop(), states[-1]
                t = begin + len(states) - 1
                on = alive(t)
                token = (starts[some] + t)[on]
                q, k, v, decay, change = token_of(token)
                do = a["d_out"][token].to(kind)
                old = old[on] * decay[..., None]
                # sums of products, not products of matrices: torch adds by halves, a BLAS in turn
                x = v - (k[..., None] * old).sum(-2)
                e = torch.addcmul(grad[on], q[..., None], do[..., None, :])
                du = (k[..., None] * e).sum(-2)
                dv = du * change[..., None]
                dq = scale * (new[on] * do[..., None, :]).sum(-1)
                u = x * change[..., None]
                dk = (e * u[..., None, :] - old * dv[..., None, :]).sum(-1)
                e.addcmul_(k[..., None], dv[..., None, :], value=-1)
                for out, each in ((d_query, dq), (d_key, dk)):
                    out[token] = each.unflatten(1, (heads, -1)).sum(2).to(out.dtype)
                d_value[token] = dv.to(value.dtype)
                if beta is not None:
                    of_change = (du * x).sum(-1)
                    if sigmoid:
                        of_change = of_change * of_rate(beta[token].to(kind), twice)
                    d_beta[token] = of_change.to(beta.dtype)
                if g is not None:
                    by_key = old.mul_(e).sum(-1)
                    d_g[token] = (by_key if g.ndim == 3 else by_key.sum(-1)).to(g.dtype)
                grad = _with(grad, on, e.mul_(decay[..., None]))
        if initial_state is not None:
            d_state[some] = grad.mT.to(d_state.dtype)
    return d_query, d_key, d_value, d_beta, d_state, d_g
