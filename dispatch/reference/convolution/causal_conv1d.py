# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""A depthwise causal convolution over whole sequences: every output in one gather a tap."""

from __future__ import annotations

from torch import Tensor

from ..common.convolution import Table, Tokens, activated, convolved, last, taps
from ..common.precision import accumulator


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_states: Tensor | None,
    query_start_loc: Tensor | None,
    activation: str | None,
) -> tuple[Tensor, Tensor]:
    width = weight.shape[0]
    tokens = Tokens.of(x, query_start_loc)
    states = initial_states
    if states is None:
        states = x.new_zeros(tokens.start.shape[0], width - 1, x.shape[-1])
    table = Table.of(x, states, accumulator(x))
    total = convolved(table, taps(tokens, table, width), weight, bias)
    out = activated(total, activation).masked_fill(~tokens.there[:, None], 0)
    final = table.rows[last(tokens, table, width)].to(states.dtype)
    return out.to(x.dtype).reshape(x.shape), final
