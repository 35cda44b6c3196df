# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Arguments and outputs of npu_fused_causal_conv1d (torch_npu's schema), and of its form in place.

x, out [T, D] cut by `query_start_loc` [N + 1], or [N, S, D]   weight [W, D]   bias [D]
conv_states [slots, L, D], L from W - 1 on   cache_indices [N], or [N, blocks]
"""

from __future__ import annotations

from typing import Any, TypedDict

from torch import Tensor

from ...check import Checker
from ...op_spec import Variant
from ..common import convolutions

_ARGUMENTS = (
    " *, Tensor? query_start_loc=None, Tensor? cache_indices=None,"
    " Tensor? initial_state_mode=None, Tensor? bias=None, Tensor? num_accepted_tokens=None,"
    ' str? activation="None", int? pad_slot_id=-1, int? run_mode=0, int? residual_connection=0,'
    " int? max_query_len=-1, Tensor? num_computed_tokens=None,"
    " Tensor? block_idx_first_scheduled_token=None, Tensor? block_idx_last_scheduled_token=None,"
    ' Tensor? initial_state_idx=None, int? block_size=128, str? conv_mode="default")'
)
SCHEMA = (
    "npu_fused_causal_conv1d(Tensor x, Tensor weight, Tensor(a!) conv_states,"
    f"{_ARGUMENTS} -> Tensor"
)


class Arguments(TypedDict):
    x: Tensor
    weight: Tensor
    conv_states: Tensor
    query_start_loc: Tensor | None
    cache_indices: Tensor | None
    initial_state_mode: Tensor | None
    bias: Tensor | None
    num_accepted_tokens: Tensor | None
    activation: str | None
    pad_slot_id: int | None
    run_mode: int | None
    residual_connection: int | None
    max_query_len: int | None
    num_computed_tokens: Tensor | None
    block_idx_first_scheduled_token: Tensor | None
    block_idx_last_scheduled_token: Tensor | None
    initial_state_idx: Tensor | None
    block_size: int | None
    conv_mode: str | None


GE = "FusedCausalConv1d"
ONNX = "FusedCausalConv1d"


def check(c: Checker, a: Arguments) -> None:
    x, query_start_loc, num_computed_tokens = a["x"], a["query_start_loc"], a["num_computed_tokens"]
    blocks = dict(
        block_idx_first_scheduled_token=a["block_idx_first_scheduled_token"],
        block_idx_last_scheduled_token=a["block_idx_last_scheduled_token"],
        initial_state_idx=a["initial_state_idx"],
    )
    c.same_device(
        x=x,
        weight=a["weight"],
        conv_states=a["conv_states"],
        query_start_loc=query_start_loc,
        cache_indices=a["cache_indices"],
        bias=a["bias"],
        num_accepted_tokens=a["num_accepted_tokens"],
        num_computed_tokens=num_computed_tokens,
        **blocks,
    )
    c.one_of("activation", a["activation"], None, "None", "silu", "swish")
    c.one_of("run_mode", a["run_mode"], None, 0, 1)
    c.one_of("residual_connection", a["residual_connection"], None, 0, 1)
    c.one_of("conv_mode", a["conv_mode"], None, "default", "pangu")
    c.require(
        a["initial_state_mode"] is None,
        "`initial_state_mode` is given, expected None: torch_npu does not read it. Pass "
        "`num_computed_tokens`, which is 0 where a sequence starts from zeros.",
    )
    c.require(
        x.ndim == 3 or query_start_loc is not None,
        f"`query_start_loc` is None and `x` has shape {list(x.shape)}, expected prefix sums "
        "[N + 1] of its sequences. Pass them, or x as [N, S, D].",
    )
    packed = None if x.ndim == 3 else query_start_loc
    convolutions.inputs(c, x, a["weight"], a["bias"], packed, None)
    convolutions.pool(c, "conv_states", a["conv_states"], "slots L D")
    convolutions.enough(c, "conv_states", "columns", c.sizes["L"], c.sizes["W"] - 1)
    convolutions.indices(c, "num_computed_tokens", num_computed_tokens)
    convolutions.accepted(c, a["num_accepted_tokens"], num_computed_tokens, 0)
    c.require(
        a["conv_mode"] != "pangu" or num_computed_tokens is not None,
        '`conv_mode` is "pangu" and `num_computed_tokens` is None, expected [N]. Pass them.',
    )
    _check_lines(c, a["cache_indices"], packed, num_computed_tokens, a["block_size"], blocks)


def _check_lines(
    c: Checker,
    cache_indices: Tensor | None,
    starts: Tensor | None,
    computed: Tensor | None,
    block_size: int | None,
    blocks: dict[str, Tensor | None],
) -> None:
    """Which rows of the pool are of which sequence."""
    by_block = cache_indices is not None and cache_indices.ndim == 2
    for name, index in {"num_computed_tokens": computed, **blocks}.items():
        c.require(
            not by_block or index is not None,
            f"`cache_indices` has a row for each sequence and `{name}` is None, expected [N]: "
            "which of the row's blocks count. Pass it, or `cache_indices` as [N].",
        )
    for name, index in blocks.items():
        c.require(
            by_block or index is None,
            f"`{name}` is given, and `cache_indices` is not [N, blocks]. Pass a row of blocks for "
            "each sequence, or leave it out.",
        )
        convolutions.indices(c, name, index)
    if cache_indices is None:
        convolutions.enough(c, "conv_states", "slots", c.sizes["slots"], c.sizes["N"])
        return
    if by_block:
        c.at_least("block_size", 128 if block_size is None else block_size, 2)
        c.integers("cache_indices", cache_indices, "N blocks")
        c.contiguous(cache_indices=cache_indices)
    else:
        convolutions.indices(c, "cache_indices", cache_indices)
    convolutions.distinct(c, "cache_indices", cache_indices, c.sizes["slots"], starts)


def fake(x: Tensor, **_: Any) -> Tensor:
    return x.new_empty(x.shape)


def check_in_place(c: Checker, a: Arguments) -> None:
    x = a["x"]
    check(c, a)
    convolutions.pool(c, "x", x, "T D" if x.ndim == 2 else "B S D")


def nothing(**_: Any) -> None:
    return None


VARIANTS = (
    # whose output takes the place of x
    Variant(
        "npu_fused_causal_conv1d_v2(Tensor(a!) x, Tensor weight, Tensor(b!) conv_states,"
        f"{_ARGUMENTS} -> ()",
        check_in_place,
        nothing,
        "in_place",
        ge="InplaceFusedCausalConv1d",
    ),
)
