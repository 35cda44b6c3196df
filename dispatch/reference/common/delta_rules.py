# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""One token of the gated delta rule, for many sequences and heads at once."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

# state elements that are in flight at a time: 64 MiB in float32
_STATES = 1 << 24


def step(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """(state after the token, its output [n, HV, V]).

    state [n, HV, K, V]   q, k [n, HV, K]   v [n, HV, V]   decay [n, HV, K or 1]   beta [n, HV]

        S = decay S;   S = S + k (beta (v - S^T k))^T;   o = S^T q
    """
    state = state * decay[..., None]
    update = (v - (k[..., None, :] @ state)[..., 0, :]) * beta[..., None]
    state = state + k[..., None] * update[..., None, :]
    return state, (q[..., None, :] @ state)[..., 0, :]


def rate(beta: Tensor, sigmoid: bool, twice: bool) -> Tensor:
    """How much of its key's value a token changes: `beta`, or its sigmoid, or `twice` that, of
    which a state may change its sign along a key."""
    if not sigmoid:
        return beta
    return torch.sigmoid(beta) * (2 if twice else 1)


def of_rate(beta: Tensor, twice: bool) -> Tensor:
    """The derivative of `rate` with the sigmoid."""
    share = torch.sigmoid(beta)
    return share * (1 - share) * (2 if twice else 1)


def by_channel(g: Tensor) -> Tensor:
    """The decay's logarithm [T, HV, K or 1]."""
    return g if g.ndim == 3 else g[..., None]


def sequences(lengths: Tensor | None, tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(first token, length) of each sequence; None is one of all tokens.  What lies behind the last
    token is not there."""
    if lengths is None:
        lengths = torch.tensor([tokens], device=device)
    lengths = lengths.long().clamp(0, tokens)
    ends = lengths.cumsum(0)
    starts = (ends - lengths).clamp(max=tokens)
    return starts, ends.clamp(max=tokens) - starts


def some_sequences(count: int, state_size: int) -> Iterator[Tensor]:
    """The numbers 0 to count - 1 in groups whose states fit."""
    if count:
        yield from torch.arange(count).split(max(1, _STATES // max(1, state_size)))


def turns(starts: Tensor, lengths: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Of each step, which sequences have a token more, and those tokens."""
    for t in range(int(lengths.max())):
        on = t < lengths
        yield on, (starts + t)[on]
