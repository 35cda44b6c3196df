# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""A few tokens of the causal convolution on a pool of states, against lists of numbers, and the
prefill op."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import custom

from ...support.accuracy import assert_close_to_float64, every_dtype
from ...support.calls import assert_refuses, by_change, runs_once
from ...support.convolution import SLOTS, Step, skip_unless_taken

OP = "npu_causal_conv1d_update"
CASES = [
    Step(),
    Step(slots=None, bias=False, activation=None, W=2, L=1),
    Step(slots=(4, SLOTS, 2**32 + 1, 0), D=130, L=4, turned=True),
    Step(slots=(4, 1), S=5, L=2, W=3),
    Step(slots=(4, 0), S=2, pad=0, L=5),
    Step(S=3, L=5, accepted=(1, 3, 2)),
    Step(slots=(5, 0), S=3, L=7, W=2, accepted=(-4, 99), turned=True),
    Step(slots=(3, -1, 0, 1), S=9, starts=(1, 3, 4, 4, 7)),
    Step(S=7, L=5, starts=(0, 3, 4, 6), accepted=(2, 1, 1), rows=(3, -1, 0), turned=True),
    Step(S=5, starts=(-2, 1, 4, 2**31 - 1), rows=(0, 7, 1), steps=2),
    Step(S=9, starts=(2, 7, 4, 8), slots=(3, 1, 0)),
    Step(
        slots=(3, 2),
        S=6,
        rows=(1, 7),
        steps=6,
        parents=((-1, 0, 0, 1, 2, 1), (-1, -1, 1, 2**32, 3, 9)),
    ),
    Step(
        slots=(3, -1),
        S=7,
        W=3,
        L=4,
        starts=(0, 4, 7),
        accepted=(2, 1),
        rows=(2, 0),
        parents=((-1, 0, 0), (0, 0, 1)),
    ),
    Step(slots=(3, 2), S=3, D=600, W=2, parents=((-1, 0, 0), (0, 0, 1)), rows=(0, 1)),
]
# a kernel's float64 is refused


def by_lists(x: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor | None]:
    """(out, pool, windows): every sequence as a list of rows."""
    W, (slots, L) = x["weight"].shape[0], x["conv_states"].shape[:2]
    flat = x["x"].reshape(-1, x["x"].shape[-1])
    pool = x["conv_states"].clone()
    out = torch.zeros_like(flat)
    window = x["intermediate_conv_window"]
    window = None if window is None else window.clone()
    if x["query_start_loc"] is None:
        size = x["x"].shape[1]
        spans = [(n * size, n * size + size) for n in range(x["x"].shape[0])]
    else:
        sums = x["query_start_loc"].clamp(0, len(flat)).cummax(0).values.tolist()
        spans = list(pairwise(sums))
    for n, (first, last) in enumerate(spans):
        slot = n if x["conv_state_indices"] is None else int(x["conv_state_indices"][n])
        live = 0 <= slot < slots and slot != x["pad_slot_id"]
        row = list(pool[slot]) if live else [torch.zeros_like(flat[0])] * L
        if x["num_accepted_tokens"] is not None:
            accepted = min(max(int(x["num_accepted_tokens"][n]), 1), L - W + 2)
            history = row[: accepted + W - 2]
        else:
            history = row
        seen = history[len(history) - W + 1 :]
        chains: list[list[Tensor]] = []
        for step, t in enumerate(range(first, last)):
            chain = chains[-1] if chains else seen
            if x["retrieve_parent_token"] is not None:
                parents = x["retrieve_parent_token"][n].tolist()
                parent = parents[step] if step < len(parents) else -1
                chain = chains[parent] if 0 <= parent < step else seen
            chains.append([*chain, flat[t]])
            terms = [a * b for a, b in zip(x["weight"], chains[-1][-W:], strict=True)]
            total = sum(terms) if x["bias"] is None else sum(terms) + x["bias"]
            out[t] = total if x["activation"] is None else total * torch.sigmoid(total)
            if window is not None:
                at = int(x["intermediate_state_indices"][n])
                if 0 <= at < window.shape[0] and step < window.shape[1]:
                    window[at, step] = torch.stack(chains[-1][-W + 1 :])
        if live and last > first and not x["disable_state_update"]:
            if x["num_accepted_tokens"] is None:
                pool[slot] = torch.stack([*row, *flat[first:last]][-L:])
            else:
                new = [*history[len(history) - W + 2 :], *flat[first:last]][:L]
                pool[slot, : len(new)] = torch.stack(new)
    return out.reshape(x["x"].shape), pool, window


@every_dtype
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_lists_of_rows(case, dtype, device, backend):
    skip_unless_taken(case, dtype, backend)
    plain = case.moved(case.arguments(), dtype, "cpu")
    given = case.moved(plain, dtype, device)
    with runs_once(OP, backend):
        out = custom.npu_causal_conv1d_update(**given)
    want, _, _ = by_lists(case.moved(plain, torch.float64, "cpu"))
    rounded, pool, window = by_lists(plain)
    assert_close_to_float64("out", out, rounded, want)
    # copies
    assert torch.equal(given["conv_states"].cpu(), pool)
    if window is not None:
        assert torch.equal(given["intermediate_conv_window"].cpu(), window)


def test_steps_equal_the_whole_sequence(device, backend):
    """A prompt, then one token, then three: the outputs of one call."""
    x, weight = torch.randn(2, 12, 16).half().to(device), torch.randn(4, 16).half().to(device)
    whole, final = custom.npu_causal_conv1d(x, weight, activation="silu")
    out, pool = custom.npu_causal_conv1d(x[:, :8], weight, activation="silu")
    outs = [out]
    for part in (x[:, 8:9], x[:, 9:]):
        outs.append(custom.npu_causal_conv1d_update(part, pool, weight, None, "silu"))
    assert torch.equal(torch.cat(outs, 1), whole) and torch.equal(pool, final)


def test_drafts_that_were_refused_leave_nothing(device, backend):
    """Three tokens a call, of which 2, 1 and 3 are kept: the outputs of the kept ones are those of
    a sequence that never saw the others."""
    D, W, S, kept = 8, 4, 3, (2, 1, 3)
    weight = torch.randn(W, D).half().to(device)
    prompt = torch.randn(1, 5, D).half().to(device)
    _, state = custom.npu_causal_conv1d(prompt, weight)
    pool = torch.full([1, W - 2 + S, D], float("nan"), dtype=torch.float16, device=device)
    pool[:, : W - 1] = state  # as after a call of which one token was accepted
    accepted, tokens, outs = 1, [prompt], []
    for count in kept:
        drafts = torch.randn(1, S, D).half().to(device)
        out = custom.npu_causal_conv1d_update(
            drafts, pool, weight, num_accepted_tokens=torch.tensor([accepted], device=device)
        )
        tokens.append(drafts[:, :count])
        outs.append(out[:, :count])
        accepted = count
    want, _ = custom.npu_causal_conv1d(torch.cat(tokens, 1), weight)
    assert torch.equal(torch.cat(outs, 1), want[:, 5:])


def test_equals_qwen3_next(device, backend):
    qwen = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    if backend == "npu":
        pytest.skip("Transformers keeps columns side by side")
    state, weight = torch.randn(2, 24, 4).half(), torch.randn(24, 4).half()
    x = torch.randn(2, 24, 1).half()
    theirs, ours = state.float(), state.to(device)
    want = qwen.causal_conv1d_update(x.float(), theirs, weight.float(), None, "silu")
    got = custom.causal_conv1d_update(x.to(device), ours, weight.to(device), None, "silu")
    torch.testing.assert_close(got.cpu().float(), want, rtol=2e-3, atol=2e-3)
    assert torch.equal(ours.cpu().float(), theirs)
    flat = custom.causal_conv1d_update(x[..., 0].to(device), state.to(device), weight.to(device))
    assert flat.shape == (2, 24)


@pytest.mark.parametrize("counts", [False, True])
def test_the_columns_of_a_wider_state(counts, device, backend):
    """causal-conv1d reads and writes the last W - 1; vLLM and sglang the first ones."""
    if backend == "npu":
        pytest.skip("causal-conv1d keeps columns side by side")
    state, weight, x = torch.randn(2, 24, 6), torch.randn(24, 4), torch.randn(2, 24)
    begin = 0 if counts else 3
    window = torch.cat([state[..., begin : begin + 3], x[..., None]], -1)
    wanted = (window * weight).sum(-1)
    kept = torch.cat([window[..., 1:], state[..., 3:]], -1)
    if not counts:
        kept = torch.cat([state[..., 1:], x[..., None]], -1)
    ones = torch.ones(2, dtype=torch.int32, device=device) if counts else None
    ours = state.to(device)
    got = custom.causal_conv1d_update(
        x.to(device), ours, weight.to(device), None, None, None, None, ones
    )
    torch.testing.assert_close(got.cpu(), wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(ours.cpu(), kept)


@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        (dict(conv_states=torch.zeros(6, 2, 40)), ValueError, "2 columns, expected at least 3"),
        (dict(conv_states=torch.zeros(1, 3, 40).expand(6, 3, 40)), ValueError, "states overlap"),
        (dict(conv_state_indices=None, x=torch.zeros(7, 1, 40)), ValueError, "6 slots, expected"),
        (dict(conv_state_indices=torch.zeros(2).int()), ValueError, "`conv_state_indices` has sh"),
        (
            dict(num_accepted_tokens=torch.ones(3).int(), x=torch.zeros(3, 2, 40)),
            ValueError,
            "3 columns, expected at least 4",
        ),
        (dict(intermediate_state_indices=torch.zeros(3).int()), ValueError, "only one of"),
        (dict(retrieve_parent_token=torch.zeros(3, 1).int()), ValueError, "a tree has no last"),
        (dict(retrieve_parent_token=torch.zeros(3, 0).int()), ValueError, "0 columns, expected"),
    ],
    ids=by_change,
)
def test_errors(change, error, sentence):
    case = Step()
    good = case.moved(case.arguments(), torch.float32, "cpu")
    kept = copy.deepcopy(good["conv_states"])
    assert_refuses(OP, good | change, error, sentence)
    assert torch.equal(good["conv_states"], kept)


def test_debug_finds_a_token_that_a_row_cannot_hold(monkeypatch):
    monkeypatch.setattr(custom.config, "debug", True)
    case = Step(slots=(3, 5, -1), S=3, L=5, W=4, accepted=(1, 3, 0))
    good = case.moved(case.arguments(), torch.float32, "cpu")
    custom.npu_causal_conv1d_update(**good)
    for accepted in ([1, 4, 1], [0, 1, 1], [-1, 1, 1]):
        wrong = good | dict(num_accepted_tokens=torch.tensor(accepted))
        with pytest.raises(ValueError, match=f"{OP}: `num_accepted_tokens` is .* from 1 to 3"):
            custom.npu_causal_conv1d_update(**wrong)


def test_debug_finds_states_written_twice(monkeypatch):
    monkeypatch.setattr(custom.config, "debug", True)
    case = Step(slots=(3, 3, 0))
    good = case.moved(case.arguments(), torch.float32, "cpu")
    with pytest.raises(ValueError, match="`conv_state_indices` names a slot twice"):
        custom.npu_causal_conv1d_update(**good)
    custom.npu_causal_conv1d_update(**(good | dict(disable_state_update=True)))


def test_a_request_without_tokens_may_keep_another_s_slot(monkeypatch, device):
    """As engines pad a captured batch."""
    monkeypatch.setattr(custom.config, "debug", True)
    drawn = Step(slots=(3, 1, 3), S=2, starts=(0, 1, 2, 2)).arguments()
    both = []
    for slots in (3, 1, 3), (3, 1, -1):
        case = Step(slots=slots, S=2, starts=(0, 1, 2, 2))
        x = case.moved(drawn | dict(conv_state_indices=torch.tensor(slots)), torch.float16, device)
        both.append((custom.npu_causal_conv1d_update(**x), x["conv_states"]))
    for got, wanted in zip(*both, strict=True):
        assert torch.equal(got, wanted)
