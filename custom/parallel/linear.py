# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Gated delta rule and KDA on several ranks, head parallel or context parallel."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .. import delta_rule
from . import collectives
from .collectives import Group, ranks, refuse_gradients


def delta_rule_heads(key_heads: int, value_heads: int, *, group: Group) -> tuple[slice, slice]:
    """(key heads, value heads) of this rank: value heads in equal parts, and the key heads that
    they use. Convolution channels, gates and states follow the heads they belong to.

    Args:
        key_heads: of the whole layer; the ranks divide them, or are a multiple of them.
        value_heads: of the whole layer; the ranks divide them.
        group: ProcessGroup or 1-D DeviceMesh.

    Returns:
        Two slices of heads.

    Raises:
        ValueError: the heads cannot be dealt out to so many ranks.
    """
    _, rank, size = ranks(group)
    if value_heads % size or (key_heads % size and size % key_heads):
        raise ValueError(
            f"custom.parallel: {value_heads} value and {key_heads} key heads cannot be dealt out "
            f"to {size} ranks. Take ranks that divide both, or a multiple of the latter."
        )
    mine, keys = value_heads // size, max(1, key_heads // size)
    first = rank * key_heads // size
    return slice(first, first + keys), slice(rank * mine, (rank + 1) * mine)


def context_parallel_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group: Group,
    beta: Tensor | None = None,
    initial_state: Tensor | None = None,
    actual_seq_lengths: Tensor | None = None,
    scale: float | None = None,
    g: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`npu_chunk_gated_delta_rule` of sequences of which each rank has a consecutive part.

    A part maps the state it begins with, S, to S M + L. Both come out of one call of the op on
    values [v, 0] from states [0, I], which needs Dv + Dk within its 256; one all_gather brings all
    ranks' (L, M), and the op runs again from the state that the ranks before leave.
    No backward.

    Args:
        query: [T, N, Dk], this rank's tokens.
        key: [T, N, Dk].
        value: [T, Nv, Dv].
        group: ProcessGroup or 1-D DeviceMesh.
        beta: [T, Nv].
        initial_state: [B, Nv, Dv, Dk] before the first rank's tokens, the same on all ranks.
        actual_seq_lengths: [B], lengths of this rank's parts.
        scale: as in the op.
        g: [T, Nv] as in the op.

    Returns:
        out [T, Nv, Dv] of this rank's tokens and, on all ranks, the final state [B, Nv, Dv, Dk].

    Raises:
        RuntimeError: an argument requires grad, while grad mode is on.
    """
    refuse_gradients(
        "context_parallel_delta_rule",
        query=query,
        key=key,
        value=value,
        beta=beta,
        initial_state=initial_state,
        g=g,
    )
    batch = 1 if actual_seq_lengths is None else actual_seq_lengths.shape[0]
    call = partial(
        delta_rule.npu_chunk_gated_delta_rule,
        query,
        key,
        beta=beta,
        scale=scale,
        g=g,
        actual_seq_lengths=actual_seq_lengths,
    )
    return _handed_along(call, value, initial_state, batch, key.shape[-1], group)


def context_parallel_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    group: Group,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """`npu_chunk_kda` likewise, with states [B or sequences, Nv, Dv, Dk] (state_layout "vk").

    Args:
        q: [B, S, N, Dk], this rank's tokens.
        k: [B, S, N, Dk].
        v: [B, S, Nv, Dv].
        g: [B, S, Nv, Dk] as in the op.
        beta: [B, S, Nv].
        group: ProcessGroup or 1-D DeviceMesh.
        initial_state: before the first rank's tokens, the same on all ranks.
        cu_seqlens: prefix sums of this rank's parts, with B = 1.
        options: the op's others, but `state_layout`.

    Returns:
        out [B, S, Nv, Dv] of this rank's tokens and, on all ranks, the final states.

    Raises:
        RuntimeError: an argument requires grad, while grad mode is on.
    """
    refuse_gradients(
        "context_parallel_kda",
        q=q,
        k=k,
        v=v,
        g=g,
        beta=beta,
        initial_state=initial_state,
        **options,
    )
    batch = v.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1

    def call(value: Tensor, initial_state: Tensor) -> tuple[Tensor, Tensor]:
        return delta_rule.npu_chunk_kda(
            q,
            k,
            value,
            g,
            beta,
            initial_state=initial_state,
            cu_seqlens=cu_seqlens,
            **options,
            state_layout="vk",
        )

    return _handed_along(call, v, initial_state, batch, k.shape[-1], group)


def _handed_along(
    call: Callable[..., tuple[Tensor, Tensor]],
    value: Tensor,
    initial_state: Tensor | None,
    batch: int,
    Dk: int,
    group: Group,
) -> tuple[Tensor, Tensor]:
    at, rank, size = ranks(group)
    *_, heads, Dv = value.shape
    kind = torch.float32 if initial_state is None else initial_state.dtype
    start = torch.eye(Dv + Dk, dtype=kind, device=value.device)[:, Dv:]
    start = start.expand(batch, heads, Dv + Dk, Dk).contiguous()
    _, maps = call(pad(value, (0, Dk)), initial_state=start)
    states = [torch.zeros_like(maps[:, :, :Dv]) if initial_state is None else initial_state]
    for part in collectives.all_gather(maps, at).unbind(0):
        states.append(states[-1] @ part[:, :, Dv:] + part[:, :, :Dv])
    out, _ = call(value, initial_state=states[rank].contiguous())
    return out, states[size]
