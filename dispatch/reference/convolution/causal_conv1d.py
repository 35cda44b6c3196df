# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""A depthwise causal convolution over whole sequences: every output in one gather a tap."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import Unpack

from ...ops.convolution.causal_conv1d import Arguments
from ..common.convolution import Table, Tokens, activated, convolved, last, taps
from ..common.precision import accumulator


def forward(**a: Unpack[Arguments]) -> tuple[Tensor, Tensor]:
    x = a["x"]
    width = a["weight"].shape[0]
    tokens = Tokens.of(x, a["query_start_loc"])
    states = a["initial_states"]
    if states is None:
        states = x.new_zeros(tokens.start.shape[0], width - 1, x.shape[-1])
    table = Table.of(x, states, accumulator(x))
    total = convolved(table, taps(tokens, table, width), a["weight"], a["bias"])
    out = activated(total, a["activation"]).masked_fill(~tokens.there[:, None], 0)
    final = table.rows[last(tokens, table, width)].to(states.dtype)
    return out.to(x.dtype).reshape(x.shape), final
