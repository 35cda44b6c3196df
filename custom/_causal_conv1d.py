# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The convolution of linear attention under the names and with the arguments of causal-conv1d, and
with those that vLLM and sglang add: channels before tokens."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from ._keywords import worded
from .convolution import npu_causal_conv1d, npu_causal_conv1d_update, npu_fused_causal_conv1d
from .dispatch.check import Checker


@overload
def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = ...,
    seq_idx: Tensor | None = ...,
    initial_states: Tensor | None = ...,
    return_final_states: Literal[False] = ...,
    final_states_out: Tensor | None = ...,
    activation: str | None = ...,
    *,
    conv_states: Tensor | None = ...,
    query_start_loc: Tensor | None = ...,
    cache_indices: Tensor | None = ...,
    has_initial_state: Tensor | None = ...,
    pad_slot_id: int = ...,
) -> Tensor: ...


@overload
def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = ...,
    seq_idx: Tensor | None = ...,
    initial_states: Tensor | None = ...,
    *,
    return_final_states: Literal[True],
    final_states_out: Tensor | None = ...,
    activation: str | None = ...,
    conv_states: Tensor | None = ...,
    query_start_loc: Tensor | None = ...,
    cache_indices: Tensor | None = ...,
    has_initial_state: Tensor | None = ...,
    pad_slot_id: int = ...,
) -> tuple[Tensor, Tensor]: ...


@overload
def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = ...,
    seq_idx: Tensor | None = ...,
    initial_states: Tensor | None = ...,
    return_final_states: bool = ...,
    final_states_out: Tensor | None = ...,
    activation: str | None = ...,
    *,
    conv_states: Tensor | None = ...,
    query_start_loc: Tensor | None = ...,
    cache_indices: Tensor | None = ...,
    has_initial_state: Tensor | None = ...,
    pad_slot_id: int = ...,
) -> Tensor | tuple[Tensor, Tensor]: ...


@worded
def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
    *,
    conv_states: Tensor | None = None,
    query_start_loc: Tensor | None = None,
    cache_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    pad_slot_id: int = -1,
) -> Tensor | tuple[Tensor, Tensor]:
    """`npu_causal_conv1d` for callers of causal-conv1d, vLLM and sglang.

    In causal-conv1d's order; what vLLM and sglang add goes by name. With `conv_states` it is
    `npu_fused_causal_conv1d` on a pool of states, updated in place.

    Args:
        x: [B, D, S], or [D, T] with `query_start_loc`; channels side by side are taken as they are,
            others are copied.
        weight: [D, W].
        bias: [D].
        seq_idx: [B, S] int32 or int64, the sequence of each token. Those of a sequence lie side by
            side; a number that comes back begins another one, a negative one gives 0. Waits for
            the device: `query_start_loc` says the same without.
        initial_states: [N, D, W - 1], N is B, or the sequences of `query_start_loc`.
        return_final_states: return the pair (out, final states).
        final_states_out: [N, D, W - 1] to write the final states to; it takes no part in a
            gradient.
        activation: None, "silu" or "swish"; vLLM's and sglang's default is "silu".
        conv_states: [slots, D, L], any strides; its first W - 1 columns are read and written.
        query_start_loc: [N + 1] int32 or int64 prefix sums; tokens outside of them give 0.
        cache_indices: [N] with `conv_states`, the slot of each sequence; negative, out of range or
            `pad_slot_id`: starts from zeros, stores nothing. None: slot n for sequence n.
        has_initial_state: [N] with `conv_states`, whether a sequence goes on from its slot's state;
            None: none does.
        pad_slot_id: a slot that stands for none.

    Returns:
        out like `x`, channels side by side; with `return_final_states` also the states.

    Raises:
        ValueError: a shape, stride or option does not fit, or two arguments exclude each other; no
            state has been written.
        TypeError: a type or dtype does not fit.
        RuntimeError: with `conv_states` an argument requires grad, while grad mode is on.

    >>> import torch, custom
    >>> custom.causal_conv1d_fn(torch.randn(2, 16, 9), torch.randn(16, 4), activation="silu").shape
    torch.Size([2, 16, 9])
    """
    c = Checker("causal_conv1d_fn")
    states = dict(
        initial_states=initial_states, return_final_states=True if return_final_states else None
    )
    if query_start_loc is not None:
        c.shape("x", x, "D T")
    if conv_states is not None:
        _alone(c, conv_states=conv_states, seq_idx=seq_idx, **states)
        return _on_pool(
            x,
            weight,
            bias,
            activation,
            conv_states,
            query_start_loc,
            cache_indices,
            has_initial_state,
            pad_slot_id,
        )
    for name, value in dict(
        cache_indices=cache_indices, has_initial_state=has_initial_state
    ).items():
        c.require(
            value is None,
            f"`{name}` is given and `conv_states` is None, expected the pool [slots, D, L].",
        )
    if seq_idx is not None:
        _alone(c, seq_idx=seq_idx, query_start_loc=query_start_loc, **states)
        c.shape("x", x, "B D S")
        c.integers("seq_idx", seq_idx, "B S")
        return _by_sequence(x, weight, bias, activation, seq_idx)
    out, final = npu_causal_conv1d(
        _tokens_first(x),
        weight.t(),
        bias,
        initial_states=None if initial_states is None else initial_states.mT,
        query_start_loc=query_start_loc,
        activation=activation,
    )
    if not return_final_states:
        return out.mT
    if final_states_out is None:
        return out.mT, final.mT
    with torch.no_grad():  # a buffer has no history, and may be used again
        final_states_out.copy_(final.mT)
    return out.mT, final.mT if final.requires_grad else final_states_out


@worded
def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    *,
    query_start_loc: Tensor | None = None,
    max_query_len: int = -1,
    pad_slot_id: int = -1,
    intermediate_conv_window: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    retrieve_next_token: Tensor | None = None,
    retrieve_next_sibling: Tensor | None = None,
    retrieve_parent_token: Tensor | None = None,
) -> Tensor:
    """`npu_causal_conv1d_update` for callers of causal-conv1d, vLLM and sglang.

    In causal-conv1d's order, then sglang's `num_accepted_tokens`; all else goes by name (vLLM's
    sixth is `conv_state_indices`). A state of more than W - 1 columns: causal-conv1d reads the last
    ones, and so does this. vLLM and sglang read the first ones, as this does with
    `num_accepted_tokens` of ones. States of blocks (prefix caching): `npu_fused_causal_conv1d`.

    Args:
        x: [B, D] or [B, D, S], or [T, D] with `query_start_loc`.
        conv_state: [slots, D, L], any strides; updated in place.
        weight: [D, W].
        bias: [D].
        activation: None, "silu" or "swish".
        cache_seqlens: [B], tokens that a sequence had before: a state is a ring, whose column t % L
            has token t. With `conv_state_indices` it waits for the device.
        conv_state_indices: [N], the slot of each sequence; negative, out of range or `pad_slot_id`:
            starts from zeros, stores nothing. None: slot n for sequence n.
        num_accepted_tokens: [N], see npu_causal_conv1d_update.
        query_start_loc: [N + 1] int32 or int64 prefix sums; tokens outside of them give 0.
        max_query_len: not read; a hint of vLLM's.
        pad_slot_id: a slot that stands for none.
        intermediate_conv_window: [rows, steps, D, W - 1]: the last W - 1 tokens after each step.
        intermediate_state_indices: [N] row of each sequence in it; negative: none.
        retrieve_next_token: [B, columns from S on], the first child of each token in its tree,
            negative: none; with `retrieve_next_sibling`.
        retrieve_next_sibling: like it, the next child of the same parent.
        retrieve_parent_token: the parent of each token, or with the two above a buffer for it.
            `conv_state` stays as it is after a tree, which has no last token: keep what
            `intermediate_conv_window` has of the accepted one.

    Returns:
        out like `x`.

    Raises:
        ValueError: a shape, stride or option does not fit, or two arguments exclude each other; no
            state has been written.
        TypeError: a type or dtype does not fit.
        RuntimeError: an argument requires grad, while grad mode is on.

    >>> import torch, custom
    >>> state = torch.zeros(2, 16, 3)
    >>> custom.causal_conv1d_update(torch.randn(2, 16), state, torch.randn(16, 4)).shape
    torch.Size([2, 16])
    """
    c = Checker("causal_conv1d_update")
    one = x.ndim == 2 and query_start_loc is None
    tokens = x if query_start_loc is not None else x[:, None] if one else _tokens_first(x)
    if cache_seqlens is not None:
        _alone(
            c,
            cache_seqlens=cache_seqlens,
            num_accepted_tokens=num_accepted_tokens,
            query_start_loc=query_start_loc,
            intermediate_conv_window=intermediate_conv_window,
            intermediate_state_indices=intermediate_state_indices,
            retrieve_next_token=retrieve_next_token,
            retrieve_next_sibling=retrieve_next_sibling,
            retrieve_parent_token=retrieve_parent_token,
        )
        out = _on_rings(
            c,
            tokens,
            conv_state,
            weight,
            bias,
            activation,
            cache_seqlens,
            conv_state_indices,
            pad_slot_id,
        )
    else:
        window, tree = intermediate_conv_window, None
        c.require(
            (retrieve_next_token is None) == (retrieve_next_sibling is None),
            "only one of `retrieve_next_token` and `retrieve_next_sibling` is given, expected both "
            "or none.",
        )
        if retrieve_next_token is not None and retrieve_next_sibling is not None:
            tree = _parents(
                c, tokens, retrieve_next_token, retrieve_next_sibling, retrieve_parent_token
            )
        parents = retrieve_parent_token if tree is None else tree
        out = npu_causal_conv1d_update(
            tokens,
            conv_state.mT,
            weight.t(),
            bias,
            activation,
            conv_state_indices=conv_state_indices,
            query_start_loc=query_start_loc,
            num_accepted_tokens=num_accepted_tokens,
            pad_slot_id=pad_slot_id,
            disable_state_update=parents is not None,
            intermediate_conv_window=None if window is None else window.mT,
            intermediate_state_indices=intermediate_state_indices,
            retrieve_parent_token=parents,
        )
        if tree is not None and retrieve_parent_token is not None:
            retrieve_parent_token[:, : tree.shape[1]] = tree
    return out[:, 0] if one else out.mT if query_start_loc is None else out


def _tokens_first(x: Tensor) -> Tensor:
    """[.., S, D] of [.., D, S], its channels side by side."""
    turned = x.mT
    return turned if turned.stride(-1) == 1 else turned.contiguous()


def _alone(c: Checker, **arguments: Any) -> None:
    """The first of them does not go with the others."""
    (first, _), *others = arguments.items()
    for name, value in others:
        c.require(
            value is None, f"`{first}` and `{name}` are given, expected one of them. Leave one out."
        )


def _on_pool(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    conv_states: Tensor,
    query_start_loc: Tensor | None,
    cache_indices: Tensor | None,
    has_initial_state: Tensor | None,
    pad_slot_id: int,
) -> Tensor:
    sequences = x.shape[0] if query_start_loc is None else query_start_loc.shape[0] - 1
    if has_initial_state is None:
        has_initial_state = x.new_zeros(sequences, dtype=torch.int32)
    out = npu_fused_causal_conv1d(
        _tokens_first(x),
        weight.t(),
        conv_states[..., : weight.shape[1] - 1].mT,
        query_start_loc=query_start_loc,
        cache_indices=cache_indices,
        bias=bias,
        activation=activation,
        pad_slot_id=pad_slot_id,
        num_computed_tokens=has_initial_state.int(),  # 0: starts from zeros
    )
    return out.mT


def _by_sequence(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, seq_idx: Tensor
) -> Tensor:
    begins = torch.ones_like(seq_idx, dtype=torch.bool)
    begins[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
    starts = begins.flatten().nonzero().flatten()
    out, _ = npu_causal_conv1d(
        _tokens_first(x).flatten(0, 1),
        weight.t(),
        bias,
        query_start_loc=torch.nn.functional.pad(starts, (0, 1), value=seq_idx.numel()),
        activation=activation,
    )
    absent = seq_idx < 0
    if absent.any():
        out = out.masked_fill(absent.flatten()[:, None], 0)
    parts: Tensor = out.unflatten(0, seq_idx.shape)
    return parts.mT


def _on_rings(
    c: Checker,
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    cache_seqlens: Tensor,
    conv_state_indices: Tensor | None,
    pad_slot_id: int,
) -> Tensor:
    """Its last columns are cut out of every ring, and x [B, S, D] is laid into it."""
    c.shape("x", x, "B S D")
    c.shape("weight", weight, "D W")
    c.shape("conv_state", conv_state, "slots D L")
    c.integers("cache_seqlens", cache_seqlens, "B")
    (batch, tokens), (slots, columns), taps = x.shape[:2], conv_state.shape[::2], weight.shape[1]
    c.at_least("conv_state.shape[2]", columns, taps - 1)
    c.at_least("conv_state.shape[0]", slots, batch if conv_state_indices is None else 1)
    rings, past = conv_state.mT, cache_seqlens.long()[:, None]
    slot = torch.arange(batch, device=x.device)
    there = None
    if conv_state_indices is not None:
        c.integers("conv_state_indices", conv_state_indices, "B")
        slot = conv_state_indices.long()
        there = (slot >= 0) & (slot < slots) & (slot != pad_slot_id)
    before = (past + torch.arange(1 - taps, 0, device=x.device)) % columns
    history = rings[slot.clamp(0, slots - 1)[:, None], before]
    if there is not None:
        history = history.masked_fill(~there[:, None, None], 0)
    out = npu_causal_conv1d_update(x, history, weight.t(), bias, activation)
    first = max(0, tokens - columns)
    now = (past + torch.arange(first, tokens, device=x.device)) % columns
    kept = x[:, first:].to(rings.dtype)
    if there is not None:
        slot, now, kept = slot[there], now[there], kept[there]
    rings[slot[:, None], now] = kept
    return out


def _parents(
    c: Checker, x: Tensor, next_token: Tensor, next_sibling: Tensor, buffer: Tensor | None
) -> Tensor:
    """[B, S]: of a first child the token itself, of its sibling the same one; 0 of the rest, as
    sglang's kernel has it."""
    c.shape("x", x, "B S D")
    batch, tokens = x.shape[:2]
    given = dict(retrieve_next_token=next_token, retrieve_next_sibling=next_sibling)
    for name, each in (
        given if buffer is None else given | dict(retrieve_parent_token=buffer)
    ).items():
        c.integers(name, each, "B columns")
    c.at_least("retrieve_next_token.shape[1]", next_token.shape[1], tokens)
    parents = next_token.new_zeros(batch, tokens + 1)  # a column more, for a child that is none
    for t in range(tokens):
        for children, parent in (
            (next_token, torch.full_like(parents[:, 0], t)),
            (next_sibling, parents[:, t].clone()),
        ):
            child = children[:, t].long()
            child = child.where((child >= 0) & (child < tokens), tokens)
            parents.scatter_(1, child[:, None], parent[:, None])
    return parents[:, :tokens].contiguous()
