# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What delta rules ask of their tensors, whatever they call them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

from torch import Tensor

from ...check import Checker
from . import layouts


class OfOutputs(TypedDict):
    """What a gradient takes of the outputs; None: nobody used the final states."""

    d_out: Tensor
    d_final_state: Tensor | None


def heads(c: Checker, of_key: str, of_value: str, **tensors: Tensor) -> None:
    """Queries, keys and values, in this order: their sizes, and heads that those of the values are
    a multiple of."""
    (query, q), (key, k), (value, v) = tensors.items()
    c.floating(query, q)
    c.same_dtype(**tensors)
    c.shape(query, q, of_key)
    c.shape(key, k, of_key)
    c.shape(value, v, of_value)
    count, value_count = (c.sizes[sizes.split()[-2]] for sizes in (of_key, of_value))
    c.require(
        count > 0 and value_count % count == 0,
        f"`{value}` has {value_count} heads and `{query}` {count}, expected a multiple of the "
        f"heads of `{query}`. Pass values whose number of heads those of `{query}` divide.",
    )


def gates(
    c: Checker, a: Tensor, dt_bias: Tensor, is_kda: bool, tokens: str, heads: str, key: str
) -> None:
    """What decays are made of: a number for each head, or for each of its channels, which may lie
    in one dimension."""
    each = f"{heads}*{key}"
    c.sizes[each] = c.sizes[heads] * c.sizes[key]
    if not is_kda:
        of_a, of_bias = heads, heads
    else:
        of_a = f"{heads} {key}" if a.ndim == len(tokens.split()) + 2 else each
        of_bias = f"{heads} {key}" if dt_bias.ndim == 2 else each
    c.shape("a", a, f"{tokens} {of_a}")
    c.shape("dt_bias", dt_bias, of_bias)


def rate(c: Checker, sigmoid: bool, twice: bool) -> None:
    c.require(
        sigmoid or not twice,
        "`allow_neg_eigval` is True and `use_beta_sigmoid_in_kernel` False, expected both: it "
        "doubles the sigmoid of `beta`. Pass the rate itself, up to 2, without it.",
    )


def lower_bound(c: Checker, given: float | None) -> None:
    c.require(
        given is None or given < 0,
        f"`lower_bound` is {given}, expected a negative number: the least logarithm of a decay.",
    )


def cut(c: Checker, cu_seqlens: Tensor) -> None:
    """One row of tokens, cut into N sequences."""
    c.integer("cu_seqlens", cu_seqlens)
    c.require(
        c.sizes["B"] == 1,
        f"`q` has batch {c.sizes['B']}, expected 1: `cu_seqlens` cuts one row of tokens.",
    )
    c.shape("cu_seqlens", cu_seqlens, "N+1")
    c.at_least("cu_seqlens.numel()", c.sizes["N+1"], 1)
    c.sizes["N"] = c.sizes["N+1"] - 1
    layouts.prefix_sums(c, "cu_seqlens", cu_seqlens, c.sizes["T"])


def gradients(c: Checker, query: str, of_value: str, of_state: str, x: Mapping[str, Any]) -> None:
    """Of the outputs: tokens, and final states where they have one."""
    d_out, d_final_state = x["d_out"], x["d_final_state"]
    c.same_device(**{query: x[query]}, d_out=d_out, d_final_state=d_final_state)
    c.same_dtype(**{query: x[query]}, d_out=d_out)
    c.shape("d_out", d_out, of_value)
    c.dense_rows(d_out=d_out)
    if d_final_state is not None:
        c.floats("d_final_state", d_final_state, of_state)
        c.contiguous(d_final_state=d_final_state)
