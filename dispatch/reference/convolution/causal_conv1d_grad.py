# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The gradient of the causal convolution: what each tap gathered gets its share back."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import Unpack

from ...ops.convolution.causal_conv1d_grad import Arguments
from ..common.convolution import Table, Tokens, convolved, last, taps
from ..common.precision import accumulator


def backward(**a: Unpack[Arguments]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, weight, bias = a["x"], a["weight"], a["bias"]
    width, kind = weight.shape[0], accumulator(x)
    tokens = Tokens.of(x, a["query_start_loc"])
    states = a["initial_states"]
    if states is None:
        states = x.new_zeros(tokens.start.shape[0], width - 1, x.shape[-1])
    table = Table.of(x, states, kind)
    rows = taps(tokens, table, width)
    grad = a["d_out"].reshape(-1, x.shape[-1]).to(kind).masked_fill(~tokens.there[:, None], 0)
    if a["activation"] is not None:
        total = convolved(table, rows, weight, bias)
        share = torch.sigmoid(total)
        grad = grad * share * (1 + total * (1 - share))
    d_rows = torch.zeros_like(table.rows)
    d_weight = torch.zeros(weight.shape, dtype=kind, device=weight.device)
    for back, row in enumerate(rows):
        d_rows.index_add_(0, row, grad * weight[-1 - back].to(kind))
        d_weight[-1 - back] = (grad * table.rows[row]).sum(0)
    if a["d_final_states"] is not None:
        kept = last(tokens, table, width).flatten()
        d_rows.index_add_(0, kept, a["d_final_states"].to(kind).reshape(-1, x.shape[-1]))
    d_states = d_rows[1 : table.first_token].to(states.dtype, copy=True)
    return (
        d_rows[table.first_token :].to(x.dtype, copy=True).reshape(x.shape),
        d_weight.to(weight.dtype),
        x.new_empty([0]) if bias is None else grad.sum(0).to(bias.dtype),
        x.new_empty([0]) if a["initial_states"] is None else d_states.reshape(states.shape),
    )
