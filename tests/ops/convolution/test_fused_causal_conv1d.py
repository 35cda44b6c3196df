# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""torch_npu's causal convolution on a pool of states, against its formulas in lists of rows."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import custom

from ...support.accuracy import assert_close_to_float64, every_dtype
from ...support.calls import assert_refuses, runs_once
from ...support.convolution import POOL, TABLE, Pooled, skip_unless_taken

OP = "npu_fused_causal_conv1d"
in_blocks = partial(Pooled, slots=TABLE, options=(("block_size", 4),))
CASES = [
    Pooled(),
    Pooled(slots=None, L=2, bias=True, options=(("activation", "silu"),)),
    Pooled(W=4, L=3, slots=(3, -1, POOL), computed=(0, 0, 9)),
    Pooled(W=2, L=1, D=130, turned=True, options=(("activation", "swish"),)),
    Pooled(lengths=(3, 3), slots=(5, 2), packed=False, accepted=(2, 3)),
    Pooled(
        lengths=(3, 3, 3),
        slots=(5, 0, 2),
        packed=False,
        L=7,
        accepted=(2, 99, -4),
        options=(("pad_slot_id", 0),),
    ),
    # as many columns as two tokens beyond W - 2, of which calls have fewer
    Pooled(lengths=(2, 1, 5), L=6, accepted=(1, 3, 2)),
    Pooled(lengths=(2, 1, 5), L=5, accepted=(1, 3, 2), computed=(0, 8, 0), W=4),
    Pooled(lengths=(4, 2), slots=(3, 1), sums=(1, 3, 4), computed=(4, 4)),
    Pooled(lengths=(4, 0, 2), sums=(-1, 3, 3, 2**31 - 1), accepted=(1, 1, 1)),
    Pooled(lengths=(4, 2, 3), sums=(1, 6, 4, 8)),
    Pooled(
        lengths=(1, 4, 3),
        computed=(0, 1, 2),
        W=4,
        L=4,
        options=(("conv_mode", "pangu"), ("residual_connection", 1)),
    ),
    Pooled(options=(("residual_connection", 1), ("activation", "silu"), ("run_mode", 1))),
    in_blocks((9, 3, 6), computed=(3, 0, 5), L=3, blocks=((0, 0, 1), (2, 0, 2), (0, 0, 1))),
    in_blocks(
        (12, 3, 1),
        computed=(4, 5, 11),
        L=5,
        accepted=(1, 2, 3),
        blocks=((1, 1, 2), (3, 1, 2), (0, 1, 2)),
    ),
    # the first block has the state to start from
    in_blocks((2, 3, 1), computed=(7, 7, 3), L=5, blocks=((1, 1, 0), (2, 2, 0), (1, 1, 0))),
    # a block of the table that is not there, and blocks beyond it
    in_blocks(
        (9, 4),
        slots=((4, -1, 2), (1, 6, 11)),
        computed=(3, 10),
        turned=True,
        blocks=((0, 2), (2, 3), (0, -1)),
    ),
    # rows of no blocks
    Pooled(lengths=(3, 2), slots=((), ()), computed=(0, 1), blocks=((0, 0), (0, 0), (0, 0))),
    Pooled(lengths=(300, 70), slots=(5, 2), D=600, L=2),
    Pooled(lengths=(1,), slots=(3,), D=1, W=2, L=1),  # one number
]


def by_formulas(x: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """(out, pool): torch_npu's documentation, line by line."""
    K, (slots, C) = x["weight"].shape[0], x["conv_states"].shape[:2]
    flat, pool = x["x"].reshape(-1, x["x"].shape[-1]), x["conv_states"].clone()
    out, zero = torch.zeros_like(flat), torch.zeros_like(flat[0])
    if x["x"].ndim == 3:
        size = x["x"].shape[1]
        spans = [(n * size, n * size + size) for n in range(x["x"].shape[0])]
    else:
        spans = list(pairwise(x["query_start_loc"].clamp(0, len(flat)).cummax(0).values.tolist()))
    B, lines = x.get("block_size", 128), x["cache_indices"]
    for n, (begin, end) in enumerate(spans):

        def line(block: str | int, n: int = n) -> int:
            """The slot of a block; -1 where there is none."""
            if lines is None or lines.ndim == 1:
                found = n if lines is None else int(lines[n])
            else:
                at = int(x[block][n]) if isinstance(block, str) else block
                found = int(lines[n, at]) if 0 <= at < lines.shape[1] else -1
            there = 0 <= found < slots and found != x.get("pad_slot_id", -1)
            return found if there else -1

        length, read = end - begin, line("initial_state_idx")
        computed = None if x["num_computed_tokens"] is None else int(x["num_computed_tokens"][n])
        row = list(x["conv_states"][read]) if read >= 0 else [zero] * C
        if computed == 0:
            cached, offset = [zero] * (K - 1), 0
        elif x["num_accepted_tokens"] is not None:
            offset = min(max(int(x["num_accepted_tokens"][n]), 1), C - K + 2) - 1
            cached = row[: offset + K - 1]
        else:
            cached, offset = row, C - (K - 1)
        padded = [*cached, *flat[begin:end]]
        trimmed = padded[offset:]
        write = line("block_idx_last_scheduled_token")
        if write >= 0 and length:
            M = min(C, len(padded))
            pool[write, C - M :] = torch.stack(padded[-M:])
        if lines is not None and lines.ndim == 2 and length:
            first = int(x["block_idx_first_scheduled_token"][n])
            fill = int(x["block_idx_last_scheduled_token"][n]) - first
            over = (length - (B - computed % B)) % B
            full = length - over - B if over == 0 else length - over
            for chunk in range(fill):
                boundary = full - (fill - chunk - 1) * B
                if line(first + chunk) >= 0:
                    pool[line(first + chunk), C - K + 1 :] = torch.stack(
                        trimmed[boundary : boundary + K - 1]
                    )
        for i in range(length):
            terms = [a * b for a, b in zip(x["weight"], trimmed[i : i + K], strict=True)]
            total = sum(terms) if x["bias"] is None else sum(terms) + x["bias"]
            if x.get("activation", "None") != "None":
                total = total * torch.sigmoid(total)
            if x.get("conv_mode") == "pangu" and i < min(max(K - 1 - computed, 0), length):
                total = zero
            out[begin + i] = total + flat[begin + i] if x.get("residual_connection") else total
    return out.reshape(x["x"].shape), pool


@every_dtype
@pytest.mark.parametrize("in_place", [False, True], ids=["", "v2"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_torch_npu_s_formulas(case, in_place, dtype, device, backend):
    skip_unless_taken(case, dtype, backend)
    plain = case.moved(case.arguments(), dtype, "cpu")
    given = case.moved(plain, dtype, device)
    name = f"{OP}_v2" if in_place else OP
    with runs_once(name, backend):
        out = getattr(custom, name)(**given)
    if in_place:
        assert out is None
        out = given["x"]
    want, _ = by_formulas(case.moved(plain, torch.float64, "cpu"))
    rounded, pool = by_formulas(plain)
    assert_close_to_float64("out", out, rounded, want)
    # copies
    assert torch.equal(given["conv_states"].cpu(), pool)


def test_is_the_update_where_a_call_fills_the_row(device, backend):
    """As many tokens as the row has columns for: npu_causal_conv1d_update's rule of drafts."""
    x, weight = torch.randn(3, 4, 32).half().to(device), torch.randn(4, 32).half().to(device)
    pool = torch.randn(5, 6, 32).half().to(device)
    same, slots = pool.clone(), torch.tensor([4, 0, 2], device=device)
    accepted = torch.tensor([1, 4, 2], device=device)
    out = custom.npu_fused_causal_conv1d(
        x, weight, pool, cache_indices=slots, num_accepted_tokens=accepted, activation="silu"
    )
    want = custom.npu_causal_conv1d_update(
        x, same, weight, None, "silu", conv_state_indices=slots, num_accepted_tokens=accepted
    )
    torch.testing.assert_close(out, want, rtol=2e-3, atol=2e-3)
    assert torch.equal(pool, same)


GOOD = Pooled().arguments() | dict(num_computed_tokens=torch.tensor([1, 2, 3]))
BLOCKS = Pooled(
    slots=TABLE, computed=(3, 0, 5), blocks=((0, 0, 1), (1, 0, 2), (0, 0, 1))
).arguments()


@pytest.mark.parametrize(
    ("base", "change", "sentence"),
    [
        (GOOD, dict(query_start_loc=None), "`query_start_loc` is None and `x` has shape"),
        (GOOD, dict(initial_state_mode=torch.ones(3).int()), "torch_npu does not read it"),
        (GOOD, dict(activation="gelu"), "`activation` is 'gelu'"),
        (GOOD, dict(run_mode=2), "`run_mode` is 2"),
        (GOOD, dict(residual_connection=2), "`residual_connection` is 2"),
        (GOOD, dict(conv_mode="pangu", num_computed_tokens=None), '`conv_mode` is "pangu"'),
        (GOOD, dict(conv_states=torch.zeros(4, 1, 40)), "1 columns, expected at least 2"),
        (GOOD, dict(conv_states=torch.zeros(2, 4, 40), cache_indices=None), "2 slots, expected"),
        (GOOD, dict(initial_state_idx=torch.zeros(3).int()), r"not \[N, blocks\]"),
        (GOOD, dict(num_computed_tokens=torch.zeros(2).int()), "`num_computed_tokens` has shape"),
        (BLOCKS, dict(initial_state_idx=None), "`initial_state_idx` is None"),
        (BLOCKS, dict(num_computed_tokens=None), "`num_computed_tokens` is None"),
        (BLOCKS, dict(block_size=1), "`?block_size`? is 1, expected at least 2"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) and len(x) < 4 else None,
)
def test_errors(base, change, sentence):
    arguments = base | change
    kept = arguments["conv_states"].clone()
    assert_refuses(OP, arguments, ValueError, sentence)
    assert torch.equal(arguments["conv_states"], kept)


def test_in_place_needs_rows_of_its_own():
    arguments = GOOD | dict(x=torch.zeros(1, 40, dtype=torch.float64).expand(9, 40))
    with pytest.raises(ValueError, match=f"{OP}_v2: `x` has strides"):
        custom.npu_fused_causal_conv1d_v2(**arguments)


def test_debug_finds_a_token_that_a_row_cannot_hold(monkeypatch):
    monkeypatch.setattr(custom.config, "debug", True)
    most = GOOD["conv_states"].shape[1] - GOOD["weight"].shape[0] + 2
    computed = torch.tensor([7, 0, 7])  # the second one reads no row
    for wrong in (0, -1, most + 1):
        for accepted, raises in (([1, wrong, most], False), ([wrong, 1, 1], True)):
            arguments = GOOD | dict(
                num_accepted_tokens=torch.tensor(accepted), num_computed_tokens=computed
            )
            if not raises:
                custom.npu_fused_causal_conv1d(**arguments)
                continue
            with pytest.raises(ValueError, match=f"{OP}: `num_accepted_tokens` is"):
                custom.npu_fused_causal_conv1d(**arguments)


def test_debug_finds_states_written_twice(monkeypatch):
    monkeypatch.setattr(custom.config, "debug", True)
    with pytest.raises(ValueError, match="`cache_indices` names a slot twice"):
        custom.npu_fused_causal_conv1d(**(GOOD | dict(cache_indices=torch.tensor([1, 1, 0]))))
    empty = GOOD["query_start_loc"].clone()
    empty[1] = empty[0]
    twice = dict(cache_indices=torch.tensor([1, 1, 0]), query_start_loc=empty)
    custom.npu_fused_causal_conv1d(**(GOOD | twice))
