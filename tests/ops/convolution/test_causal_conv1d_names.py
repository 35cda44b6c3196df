# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The convolution under causal-conv1d's names, with its arguments, vLLM's and sglang's: against
what these packages say that an argument means."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

import custom

from ...support.calls import runs_once

D = 24
PAD = 3  # a slot that stands for none


def drawn(*shape: int, to: Any) -> Tensor:
    return torch.randn(*shape).to(to)


def pool(slots: int, columns: int, to: Any) -> Tensor:
    """[slots, D, columns], its channels side by side, as every backend takes them."""
    return drawn(slots, columns, D, to=to).mT


def convolved(seen: Tensor, weight: Tensor, bias: Tensor | None, tokens: int) -> Tensor:
    """Of the last `tokens` of seen [D, any], by sums; zeros come before them."""
    taps = weight.shape[1]
    seen = torch.cat([seen.new_zeros(len(seen), taps), seen], 1)
    ends = range(seen.shape[1] - tokens + 1, seen.shape[1] + 1)
    sums = [(seen[:, end - taps : end] * weight).sum(1) for end in ends]
    out = torch.stack(sums, 1) if sums else seen[:, :0]
    return out if bias is None else out + bias[:, None]


# ------------------------------------------------------------------------------- whole sequences


def by_seq_idx(x: Tensor, weight: Tensor, bias: Tensor, seq_idx: Tensor) -> Tensor:
    """As causal-conv1d's kernel: a tap counts where its token has the number of the output's."""
    taps, out = weight.shape[1], torch.zeros_like(x)
    for b, t in seq_idx.ge(0).nonzero().tolist():
        total = bias
        for back in range(min(taps, t + 1)):
            if seq_idx[b, t - back] == seq_idx[b, t]:
                total = total + weight[:, taps - 1 - back] * x[b, :, t - back]
        out[b, :, t] = silu(total)
    return out


SEQ_IDX = [
    [[0, 0, 0, 1, 2, 2, 2, 2], [4, 4, -1, -1, 7, 7, 9, 9]],
    [[3, 3, 3, 3, 3, 3, 3, 3], [3, 3, 3, 3, 3, 3, 3, 5]],
    [[-1, -1, -1, -1, -1, -1, -1, -1], [0, 1, 2, 3, 4, 5, 6, 7]],
]


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("numbers", SEQ_IDX)
def test_seq_idx(numbers, turned, device, backend):
    """With gradients; what padding holds, NaN too, goes nowhere."""
    seq_idx = torch.tensor(numbers, dtype=torch.int32)
    x = torch.randn(2, 8, D).mT if turned else torch.randn(2, D, 8)
    weight, bias, grad = torch.randn(D, 4), torch.randn(D), torch.randn(2, D, 8)
    exact = [y.double().requires_grad_() for y in (x, weight, bias)]
    wanted = by_seq_idx(*exact, seq_idx)
    ours = [y.to(device).requires_grad_() for y in (x, weight, bias)]
    got = custom.causal_conv1d_fn(*ours, seq_idx=seq_idx.to(device), activation="silu")
    torch.testing.assert_close(got.cpu().double(), wanted, rtol=1e-5, atol=1e-5)
    got.backward(grad.to(device))
    wanted.backward(grad.double())
    for mine, theirs in zip(ours, exact, strict=True):
        torch.testing.assert_close(mine.grad.cpu().double(), theirs.grad, rtol=1e-5, atol=1e-5)
    odd = x.masked_fill((seq_idx < 0)[:, None], torch.nan).to(device)
    again = custom.causal_conv1d_fn(odd, *ours[1:], seq_idx.to(device), activation="silu")
    assert torch.equal(again, got)


def test_prefix_sums_without_a_pool(device, backend):
    x, weight, bias = (drawn(*s, to=device) for s in ((D, 11), (D, 3), (D,)))
    sums = torch.tensor([0, 5, 5, 10], device=device)
    states = drawn(3, D, 2, to=device)
    out, final = custom.causal_conv1d_fn(
        x, weight, bias, initial_states=states, query_start_loc=sums, return_final_states=True
    )
    want, last = custom.npu_causal_conv1d(
        x.t().contiguous(), weight.t(), bias, initial_states=states.mT, query_start_loc=sums
    )
    assert torch.equal(out, want.t()) and torch.equal(final, last.mT)


def by_slots(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    sums: list[int],
    slots: list[int],
    begun: list[bool],
) -> tuple[Tensor, Tensor]:
    """(out [D, T], pool): vLLM's and sglang's rule, on the first W - 1 columns of a state."""
    out, states, taps = torch.zeros_like(x), states.clone(), weight.shape[1]
    for (first, last), slot, goes_on in zip(pairwise(sums), slots, begun, strict=True):
        there = 0 <= slot < len(states) and slot != PAD
        before = x.new_zeros(D, taps - 1)
        if there and goes_on:
            before = states[slot, :, : taps - 1]
        seen = torch.cat([before, x[:, first:last]], 1)
        out[:, first:last] = silu(convolved(seen, weight, bias, last - first))
        if there and last > first:
            states[slot, :, : taps - 1] = seen[:, seen.shape[1] - taps + 1 :]
    return out, states


@pytest.mark.parametrize("columns", [3, 6])
@pytest.mark.parametrize("begun", [None, [True, False, True, True, False]], ids=["new", "mixed"])
def test_a_pool_of_states(begun, columns, device, backend):
    """Prompts and tokens in one row; a slot that stands for none, a sequence without tokens."""
    x, weight, bias = (torch.randn(*shape) for shape in ((D, 14), (D, 4), (D,)))
    states, sums, slots = pool(6, columns, "cpu"), [0, 5, 7, 8, 8, 12], [4, 1, PAD, 0, -1]
    wanted, kept = by_slots(x, weight, bias, states, sums, slots, begun or [False] * 5)
    ours = states.mT.contiguous().to(device).mT
    with runs_once("npu_fused_causal_conv1d", backend):
        got = custom.causal_conv1d_fn(
            x.to(device),
            weight.to(device),
            bias.to(device),
            activation="silu",
            conv_states=ours,
            query_start_loc=torch.tensor(sums, dtype=torch.int32, device=device),
            cache_indices=torch.tensor(slots, dtype=torch.int32, device=device),
            has_initial_state=None if begun is None else torch.tensor(begun, device=device),
            pad_slot_id=PAD,
        )
    torch.testing.assert_close(got.cpu(), wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(ours.cpu(), kept)


def test_a_pool_of_states_and_a_batch(device, backend):
    """sglang's x [B, D, S], its slots those of the sequences."""
    x, weight, states = torch.randn(3, D, 5), torch.randn(D, 4), pool(4, 3, "cpu")
    flat = torch.cat(list(x), 1)
    wanted, kept = by_slots(flat, weight, None, states, [0, 5, 10, 15], [0, 1, 2], [True] * 3)
    ours = states.mT.contiguous().to(device).mT
    got = custom.causal_conv1d_fn(
        x.to(device),
        weight.to(device),
        activation="silu",
        conv_states=ours,
        has_initial_state=torch.ones(3, dtype=torch.bool, device=device),
    )
    torch.testing.assert_close(torch.cat(list(got.cpu()), 1), wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(ours.cpu(), kept)


# ------------------------------------------------------------------------------------ a few tokens


def test_a_row_of_drafts_with_counts(device, backend):
    """vLLM's x [T, D]; the op itself is held against lists in test_causal_conv1d_update.py."""
    x, weight, states = drawn(7, D, to=device), drawn(D, 4, to=device), pool(5, 5, device)
    windows = drawn(4, 3, 3, D, to=device).mT
    more: dict[str, Any] = dict(
        query_start_loc=[0, 3, 4, 6], num_accepted_tokens=[2, 1, 1], conv_state_indices=[4, PAD, 0]
    )
    more = {name: torch.tensor(y, device=device) for name, y in more.items()}
    more |= dict(intermediate_state_indices=torch.tensor([2, 0, -1], device=device))
    more |= dict(pad_slot_id=PAD)
    copies = states.mT.clone(), windows.mT.clone()
    want = custom.npu_causal_conv1d_update(
        x, copies[0], weight.t(), None, "silu", intermediate_conv_window=copies[1], **more
    )
    before = states.clone()
    got = custom.causal_conv1d_update(
        x,
        states,
        weight,
        None,
        "silu",
        max_query_len=3,
        intermediate_conv_window=windows,
        **more,
    )
    assert torch.equal(got, want) and not torch.equal(states, before)
    assert torch.equal(states.mT, copies[0]) and torch.equal(windows.mT, copies[1])


# the first child and the next sibling of each token, and the parents that follow
TREES = (
    [[1, 3, -1, -1], [1, 2, 3, -1], [-1, -1, -1, -1]],
    [[-1, 2, -1, -1], [-1, -1, -1, -1], [-1, -1, -1, -1]],
    [[0, 0, 0, 1], [0, 0, 1, 2], [0, 0, 0, 0]],
)


@pytest.mark.parametrize("found", [True, False], ids=["sglang's", "vLLM's"])
def test_trees(found, device, backend):
    """sglang has the parents found, into a buffer; vLLM passes them."""
    x, weight, states = drawn(3, 4, D, to=device).mT, drawn(D, 4, to=device), pool(5, 3, device)
    rows, slots = (torch.tensor(y, device=device) for y in ([1, 3, 0], [4, 0, 2]))
    windows = drawn(4, 4, 3, D, to=device).mT
    child, sibling, parents = (torch.tensor(tree, device=device) for tree in TREES)
    copies = states.clone(), windows.clone()
    buffer = torch.full_like(parents, 9) if found else parents
    got = custom.causal_conv1d_update(
        x,
        states,
        weight,
        activation="silu",
        conv_state_indices=slots,
        intermediate_conv_window=windows,
        intermediate_state_indices=rows,
        retrieve_next_token=child if found else None,
        retrieve_next_sibling=sibling if found else None,
        retrieve_parent_token=buffer,
    )
    assert torch.equal(buffer, parents) and torch.equal(states, copies[0])
    for n, (row, slot) in enumerate(zip(rows.tolist(), slots.tolist(), strict=True)):
        for t in range(4):
            path = [t]
            while path[0] > 0:
                path.insert(0, int(parents[n, path[0]]))
            seen = torch.cat([copies[0][slot], x[n][:, path]], 1).cpu()
            want = silu(convolved(seen, weight.cpu(), None, 1))[:, 0]
            torch.testing.assert_close(got[n, :, t].cpu(), want, rtol=1e-5, atol=1e-5)
            assert torch.equal(windows[row, t].cpu(), seen[:, -3:])
    assert torch.equal(windows[2], copies[1][2])


@pytest.mark.parametrize("columns", [3, 5, 8])
@pytest.mark.parametrize("slots", [None, [4, PAD, 1]], ids=["in order", "by slots"])
def test_states_in_a_ring(slots, columns, device, backend):
    """Steps of 1, 2, 7 and 1 tokens: the outputs of one call, and token t in column t % L."""
    past, steps = torch.tensor([0, 4, 11]), (1, 2, 7, 1)
    weight, bias = drawn(D, 4, to=device), drawn(D, to=device)
    texts = [torch.randn(D, int(n) + sum(steps)) for n in past]
    rings = torch.randn(5, D, columns)
    places = [0, 1, 2] if slots is None else slots
    for text, n, slot in zip(texts, past.tolist(), places, strict=True):
        for t in range(max(0, n - columns), n):
            rings[slot, :, t % columns] = text[:, t]
        if n == 0:  # what came before a first token is up to the caller
            rings[slot] = 0
    untouched, ours, at = rings.clone(), rings.to(device), past.clone()
    outs = []
    for size in steps:
        x = torch.stack([text[:, n : n + size] for text, n in zip(texts, at, strict=True)])
        out = custom.causal_conv1d_update(
            x.to(device),
            ours,
            weight,
            bias,
            "silu",
            at.int().to(device),
            None if slots is None else torch.tensor(slots, device=device),
            pad_slot_id=-1 if slots is None else PAD,
        )
        outs.append(out.cpu())
        if slots is not None:  # a slot that stands for none starts every step from zeros
            alone = silu(convolved(x[1], weight.cpu(), bias.cpu(), size))
            torch.testing.assert_close(outs[-1][1], alone, rtol=1e-5, atol=1e-5)
        at += size
    got = torch.cat(outs, 2)
    for n, (text, slot) in enumerate(zip(texts, places, strict=True)):
        if slots is not None and slot == PAD:
            assert torch.equal(ours[slot].cpu(), untouched[slot])
            continue
        want = silu(convolved(text, weight.cpu(), bias.cpu(), sum(steps)))
        torch.testing.assert_close(got[n], want, rtol=1e-5, atol=1e-5)
        for t in range(int(at[n]) - columns, int(at[n])):
            assert torch.equal(ours[slot, :, t % columns].cpu(), text[:, t])
    for slot in {0, 1, 2, 3, 4} - set(places):
        assert torch.equal(ours[slot].cpu(), untouched[slot])


def test_a_ring_and_one_token(device, backend):
    """x [B, D], as a decode step has it."""
    x, weight, ring = drawn(2, D, to=device), drawn(D, 4, to=device), drawn(2, D, 4, to=device)
    ends, copy = torch.tensor([6, 7], device=device), ring.clone()
    got = custom.causal_conv1d_update(x, ring, weight, cache_seqlens=ends)
    for n, end in enumerate((6, 7)):
        before = copy[n][:, [t % 4 for t in range(end - 3, end)]]
        want = convolved(torch.cat([before, x[n][:, None]], 1).cpu(), weight.cpu(), None, 1)
        torch.testing.assert_close(got[n].cpu(), want[:, 0], rtol=1e-5, atol=1e-5)
        copy[n][:, end % 4] = x[n]
    assert torch.equal(ring, copy)


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("fn", dict(query_start_loc=[0, 4, 9], conv_states=(3, D, 3), cache_indices=[2, 0])),
        ("update", dict(conv_state=(2, D, 5), cache_seqlens=[3, 7])),
        (
            "update",
            dict(
                conv_state=(2, D, 3),
                retrieve_next_token=[[1, 3, -1, -1]] * 2,
                retrieve_next_sibling=[[-1, 2, -1, -1]] * 2,
            ),
        ),
    ],
    ids=["pool", "ring", "tree"],
)
def test_is_compiled_as_one_graph(name, more):
    function = getattr(custom, f"causal_conv1d_{name}")
    given = dict(x=torch.randn(D, 9) if name == "fn" else torch.randn(2, D, 4))
    given |= dict(weight=torch.randn(D, 4))
    for key, value in more.items():
        given[key] = torch.randn(value) if isinstance(value, tuple) else torch.tensor(value)
    copies = {key: value.clone() for key, value in given.items()}
    want = function(**copies)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(function, fullgraph=True, backend="aot_eager")(**given), want)
    assert all(torch.equal(given[key], copies[key]) for key in given)


# --------------------------------------------------------------------------------------- refusals

SUMS = torch.tensor([0, 4])


@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        (dict(seq_idx=torch.zeros(1, 5).int()), ValueError, r"`seq_idx` has shape .* S=4"),
        (dict(seq_idx=torch.zeros(1, 4)), TypeError, "`seq_idx` is float32"),
        # vLLM's and sglang's fourth arguments
        (dict(seq_idx=torch.zeros(3, D, 3)), TypeError, "`seq_idx` is float32"),
        (dict(seq_idx=SUMS), ValueError, "`seq_idx` has shape"),
        (
            dict(seq_idx=torch.zeros(1, 4).int(), initial_states=torch.zeros(1, D, 3)),
            ValueError,
            "`seq_idx` and `initial_states` are given",
        ),
        (
            dict(seq_idx=torch.zeros(1, 4).int(), return_final_states=True),
            ValueError,
            "`seq_idx` and `return_final_states` are given",
        ),
        (
            dict(conv_states=torch.zeros(1, D, 3), initial_states=torch.zeros(1, D, 3)),
            ValueError,
            "`conv_states` and `initial_states` are given",
        ),
        (dict(cache_indices=torch.zeros(1).int()), ValueError, "`cache_indices` is given and"),
        (dict(has_initial_state=torch.ones(1).bool()), ValueError, "`has_initial_state` is given"),
        (dict(query_start_loc=SUMS), ValueError, r"`x` has shape \[1, 24, 4\], expected \[D, T\]"),
    ],
    ids=str,
)
def test_errors_of_whole_sequences(change, error, sentence):
    x, weight = torch.zeros(1, D, 4), torch.zeros(D, 4)
    with pytest.raises(error, match=f"causal_conv1d_fn: {sentence}"):
        custom.causal_conv1d_fn(x, weight, **change)


RING = dict(cache_seqlens=torch.zeros(2).int())


@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        (dict(cache_seqlens=torch.zeros(2)), TypeError, "`cache_seqlens` is float32"),
        (dict(cache_seqlens=torch.zeros(3).int()), ValueError, "`cache_seqlens` has shape .* B=2"),
        (
            RING | dict(num_accepted_tokens=torch.ones(2).int()),
            ValueError,
            "`cache_seqlens` and `num_accepted_tokens` are given",
        ),
        (RING | dict(conv_state=torch.zeros(2, D, 2)), ValueError, "conv_state.shape.2.` is 2"),
        (RING | dict(conv_state=torch.zeros(1, D, 3)), ValueError, "conv_state.shape.0.` is 1"),
        (
            dict(retrieve_next_token=torch.zeros(2, 4).int()),
            ValueError,
            "only one of `retrieve_next_token`",
        ),
        (
            dict.fromkeys(
                ("retrieve_next_token", "retrieve_next_sibling"), torch.zeros(2, 1).int()
            ),
            ValueError,
            "`retrieve_next_token.shape.1.` is 1, expected at least 2",
        ),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, dict) else None,
)
def test_errors_of_a_few_tokens(change, error, sentence):
    given = dict(x=torch.ones(2, D, 2), conv_state=torch.zeros(2, D, 3), weight=torch.ones(D, 4))
    given |= change
    with pytest.raises(error, match=f"causal_conv1d_update: .*{sentence}"):
        custom.causal_conv1d_update(**given)
    assert not given["conv_state"].any()


def test_a_ring_refuses_gradients_before_it_is_written():
    x, ring = torch.ones(2, D), torch.zeros(2, D, 3)
    weight = torch.ones(D, 4, requires_grad=True)
    with pytest.raises(RuntimeError, match="requires grad"):
        custom.causal_conv1d_update(x, ring, weight, **RING)
    assert not ring.any()
