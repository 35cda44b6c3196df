# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What the causal convolutions ask of the arguments that they share.

x [B, S, D], or [T, D] cut by `query_start_loc` [N + 1]   weight [W, D], W from 2 to 4   bias [D]
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...check import Checker
from ...values import known
from . import layouts

ACTIVATIONS = (None, "silu", "swish")


def inputs(
    c: Checker,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    query_start_loc: Tensor | None,
    activation: str | None,
) -> None:
    """Sets N, the number of sequences, and W."""
    c.floating("x", x)
    c.floating("weight", weight)
    c.one_of("activation", activation, *ACTIVATIONS)
    if query_start_loc is None:
        c.shape("x", x, "B S D")
        c.sizes["N"] = c.sizes["B"]
    else:
        c.shape("x", x, "T D")
        prefix_sums(c, query_start_loc)
    c.shape("weight", weight, "W D")
    width = c.sizes["W"]
    c.require(2 <= width <= 4, f"`weight` has {width} taps, expected 2 to 4 (shape [W, D]).")
    if bias is not None:
        c.floats("bias", bias, "D")
        c.contiguous(bias=bias)
    c.dense_rows(x=x)


def prefix_sums(c: Checker, query_start_loc: Tensor) -> None:
    c.integers("query_start_loc", query_start_loc, "N+1")
    c.contiguous(query_start_loc=query_start_loc)
    c.at_least("query_start_loc.numel()", c.sizes["N+1"], 1)
    c.sizes["N"] = c.sizes["N+1"] - 1
    layouts.prefix_sums(c, "query_start_loc", query_start_loc, c.sizes["T"])


def states(c: Checker, name: str, tensor: Tensor, *, columns: str = "W-1") -> None:
    """[N, W - 1, D], any strides."""
    c.sizes["W-1"] = c.sizes["W"] - 1
    c.floats(name, tensor, f"N {columns} D")


def pool(c: Checker, name: str, tensor: Tensor, wanted: str) -> None:
    """Any strides in which no two numbers share memory."""
    c.floats(name, tensor, wanted)
    c.apart(name, tensor, "states")


def indices(c: Checker, name: str, tensor: Tensor | None) -> None:
    """One number a sequence."""
    if tensor is not None:
        c.integers(name, tensor, "N")
        c.contiguous(**{name: tensor})


def distinct(
    c: Checker, name: str, tensor: Tensor, rows: int, starts: Tensor | None = None
) -> None:
    """Where values are known: no two sequences write the same row.  One without tokens, as `starts`
    says, writes none: engines leave there what they had."""
    if known(tensor) and (starts is None or known(starts)):
        live = (tensor >= 0) & (tensor < rows)
        if starts is not None:
            live &= (starts.diff() > 0).view(-1, *[1] * (tensor.ndim - 1)).to(live.device)
        live = tensor[live]
        c.require(
            live.unique().numel() == live.numel(),
            f"`{name}` names a slot twice: which state remains is undefined.",
        )


def accepted(c: Checker, tensor: Tensor | None, by: Tensor | None, *none: int) -> None:
    """One number a sequence; where values are known, tokens that a row of the pool can hold.  A
    sequence whose number in `by` is one of `none` reads no row, and none does without tokens."""
    indices(c, "num_accepted_tokens", tensor)
    if tensor is None or not known(tensor) or 0 in (c.sizes.get("S"), c.sizes.get("T")):
        return
    most = c.sizes["L"] - c.sizes["W"] + 2
    came, reads = tensor.tolist(), by.tolist() if by is not None else None
    c.require(
        all(1 <= x <= most for n, x in enumerate(came) if reads is None or reads[n] not in none),
        f"`num_accepted_tokens` is {came}, expected numbers from 1 to {most}: a row of "
        f"`conv_states` has {c.sizes['L']} columns.",
    )


def enough(c: Checker, name: str, of: str, came: Any, least: Any) -> None:
    c.require(came >= least, f"`{name}` has {came} {of}, expected at least {least}.")
