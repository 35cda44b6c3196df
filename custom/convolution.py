# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The short causal convolution of linear attention: whole sequences, and a decode step."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ._op import described_by, op, variant_of


@op
def npu_causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    initial_states: Tensor | None = None,
    query_start_loc: Tensor | None = None,
    activation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Convolve every channel of `x` with its own taps over the tokens up to each one.

    out[t] = act(bias + sum_j weight[W - 1 - j] x[t - j]), j from 0 to W - 1, in float32; what lies
    before a sequence is `initial_states`, or zeros. Differentiable in every tensor of floating
    point; equal runs give equal gradients.

    Formula: that of causal-conv1d (Dao), with torch_npu's shapes: tokens before channels.

    Args:
        x: [B, S, D], or [T, D] with `query_start_loc`.
        weight: [W, D], W from 2 to 4; any strides and any dtype of floating point.
        bias: [D]; None: zeros.
        initial_states: [N, W - 1, D], any strides; N is B, or the number of sequences.
        query_start_loc: [N + 1] int32 or int64 prefix sums; tokens outside of them give 0.
        activation: None, or "silu" (also called "swish").

    Returns:
        out like `x`, and the final states [N, W - 1, D]: the last tokens of each sequence, in the
        dtype of `initial_states` (of `x` if there are none).

    Raises:
        ValueError: a shape, device or option does not fit.
        TypeError: a type or dtype does not fit.

    >>> import torch, custom
    >>> x, weight = torch.randn(9, 16), torch.randn(4, 16)
    >>> start = torch.tensor([0, 5, 9])
    >>> out, states = custom.npu_causal_conv1d(x, weight, query_start_loc=start, activation="silu")
    >>> out.shape, states.shape
    (torch.Size([9, 16]), torch.Size([2, 3, 16]))
    """


@op
def npu_causal_conv1d_update(
    x: Tensor,
    conv_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    conv_state_indices: Tensor | None = None,
    query_start_loc: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    pad_slot_id: int = -1,
    disable_state_update: bool = False,
    intermediate_conv_window: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    retrieve_parent_token: Tensor | None = None,
) -> Tensor:
    """Decode step (or a few) of `npu_causal_conv1d`, on a pool of states updated in place.

    A row of the pool holds in its last W - 1 columns what came before, and the tokens push it on.
    With `num_accepted_tokens` (speculative decoding, as in vLLM) it holds, from its first column
    on, the W - 2 tokens before the last call and then all of that call: the history ends with
    token `num_accepted_tokens` of these, and afterwards the row holds the same of this call.

    Formula: that of causal-conv1d (Dao), with torch_npu's shapes: tokens before channels.

    Args:
        x: [B, S, D], or [T, D] with `query_start_loc`.
        conv_states: [slots, L, D], any strides, L from W - 1 on; updated in place.
        weight: [W, D], W from 2 to 4; any strides.
        bias: [D]; None: zeros.
        activation: None, or "silu" (also called "swish").
        conv_state_indices: [N] int32 or int64, the slot of each sequence; negative, out of range
            or `pad_slot_id`: starts from zeros, stores nothing. None: slot n for sequence n. No
            slot twice: what its sequences read and leave is open.
        query_start_loc: [N + 1] int32 or int64 prefix sums; tokens outside of them give 0.
        num_accepted_tokens: [N] int32 or int64, from 1 to L - W + 2, what is beyond counts as the
            nearest of these; needs L of at least W - 2 + S.
        pad_slot_id: a slot that stands for none.
        disable_state_update: leave `conv_states` as it is.
        intermediate_conv_window: [rows, steps, W - 1, D], any strides: the last W - 1 tokens after
            each step.
        intermediate_state_indices: [N] row of each sequence in it; negative: none.
        retrieve_parent_token: [N, steps]: token t follows token parent[t]; -1: what came before.
            For tree verification; needs disable_state_update=True.

    Returns:
        out like `x`.

    Raises:
        ValueError: a shape, stride, device or option does not fit; no state has been written.
        TypeError: a type or dtype does not fit.
        RuntimeError: an argument requires grad, while grad mode is on.

    >>> import torch, custom
    >>> states, slots = torch.zeros(5, 3, 16), torch.tensor([4, 1])
    >>> x, weight = torch.randn(2, 1, 16), torch.randn(4, 16)
    >>> custom.npu_causal_conv1d_update(x, states, weight, conv_state_indices=slots).shape
    torch.Size([2, 1, 16])
    """


@op
@described_by(npu_causal_conv1d_update)
def npu_fused_causal_conv1d(
    x: Tensor,
    weight: Tensor,
    conv_states: Tensor,
    *,
    query_start_loc: Tensor | None = None,
    cache_indices: Tensor | None = None,
    initial_state_mode: Tensor | None = None,
    bias: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    activation: str | None = "None",
    pad_slot_id: int | None = -1,
    run_mode: int | None = 0,
    residual_connection: int | None = 0,
    max_query_len: int | None = -1,
    num_computed_tokens: Tensor | None = None,
    block_idx_first_scheduled_token: Tensor | None = None,
    block_idx_last_scheduled_token: Tensor | None = None,
    initial_state_idx: Tensor | None = None,
    block_size: int | None = 128,
    conv_mode: str | None = "default",
) -> Tensor:
    """Causal convolution, of prompts and decode steps alike, on a pool of states updated in place.

    Same signature as torch_npu's op, with 2 to 4 taps.  The columns of a row of the pool that count
    are all, or with `num_accepted_tokens` the first W - 2 and one for each; they come before the
    tokens, and the last of both, at the row's end, are the new row.  Where a row has as many
    columns as W - 2 and the tokens of a call, this is what npu_causal_conv1d_update does.

    Formula: torch_npu's documentation of the op, which ignores `bias` and `activation`; here they
    act.

    Args:
        x: [T, D] with `query_start_loc`, or [N, S, D].
        weight: [W, D], W from 2 to 4; any strides.
        conv_states: [slots, L, D], any strides, L from W - 1 on; updated in place.
        query_start_loc: [N + 1] int32 or int64 prefix sums; tokens outside of them give 0. Not
            read where x has three dimensions.
        cache_indices: [N] int32 or int64, the slot of each sequence; negative, out of range or
            `pad_slot_id`: starts from zeros, stores nothing. None: slot n for sequence n. With
            blocks (prefix caching): [N, blocks], a slot for each block of a sequence. No slot
            twice: what its sequences read and leave is open.
        initial_state_mode: None; torch_npu does not read it.
        bias: [D]; None: zeros.
        num_accepted_tokens: [N], from 1 to L - W + 2, what is beyond counts as the nearest of
            these.
        activation: None, "None", "silu" or "swish".
        pad_slot_id: a slot that stands for none.
        run_mode: 0 or 1; one rule is right for both.
        residual_connection: 1: x is added to the output.
        max_query_len: not read; a hint of torch_npu's.
        num_computed_tokens: [N], tokens of a sequence before this call; 0: starts from zeros.
        block_idx_first_scheduled_token: [N] with blocks, that of the first token of this call.
        block_idx_last_scheduled_token: [N] with blocks, that of the last one: its slot gets the
            state. Blocks from the first on that end before it get theirs.
        initial_state_idx: [N] with blocks, the one whose slot has the state to start from.
        block_size: tokens of a block, from 2 on.
        conv_mode: "default", or "pangu": outputs with fewer than W - 1 tokens before them are 0.

    Returns:
        out like `x`.

    >>> import torch, custom
    >>> x, weight, states = torch.randn(9, 16), torch.randn(3, 16), torch.zeros(5, 2, 16)
    >>> start, slots = torch.tensor([0, 5, 9]), torch.tensor([4, 1])
    >>> custom.npu_fused_causal_conv1d(
    ...     x, weight, states, query_start_loc=start, cache_indices=slots
    ... ).shape
    torch.Size([9, 16])
    """


@op
@variant_of(npu_fused_causal_conv1d)
def npu_fused_causal_conv1d_v2(*_: Any, **__: Any) -> None:
    """`npu_fused_causal_conv1d`, whose output takes the place of `x`.

    Formula: as `npu_fused_causal_conv1d`.

    Args:
        x: [T, D] with `query_start_loc`, or [N, S, D]; updated in place.

    Returns:
        None.

    Raises:
        ValueError: a shape, stride, device or option does not fit; nothing has been written.
        TypeError: a type or dtype does not fit.
        RuntimeError: an argument requires grad, while grad mode is on.

    >>> import torch, custom
    >>> x, weight, states = torch.randn(2, 3, 16), torch.randn(3, 16), torch.zeros(2, 4, 16)
    >>> custom.npu_fused_causal_conv1d_v2(x, weight, states)
    """
