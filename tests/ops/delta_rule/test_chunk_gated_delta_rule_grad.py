# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Gradients of the gated delta rule against autograd of the recurrence, token by token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ...support.accuracy import assert_close_to_float64, every_dtype
from ...support.calls import by_change
from ...support.delta_rule import KEYS_ALIKE, ODD_LENGTHS, Sequences, made, qwen3_next_chunks
from ...support.trained import Rule

OP = "npu_chunk_gated_delta_rule_grad"


def lengths_of(x: dict[str, Any]) -> list[int]:
    lengths = x["actual_seq_lengths"]
    return [len(x["value"])] if lengths is None else lengths.tolist()


def recurrence(x: dict[str, Any], stored: torch.dtype) -> tuple[Tensor, Tensor]:
    """One token after the other; the state has dtype `stored` between them."""
    query, value = x["query"], x["value"]
    wide = torch.float64 if value.dtype is torch.float64 else torch.float32
    _, N, Dk = query.shape
    _, Nv, Dv = value.shape
    scale = Dk**-0.5 if x["scale"] is None else x["scale"]
    q, k = (x[name].to(wide).repeat_interleave(Nv // N, 1) for name in ("query", "key"))
    outs, states, start = [], [], 0
    for n, length in enumerate(lengths_of(x)):
        state = torch.zeros(Nv, Dv, Dk, dtype=stored)
        if x["initial_state"] is not None:
            state = x["initial_state"][n].to(stored)
        for t in range(start, start + length):
            S = state.to(wide)
            if x["g"] is not None:
                S = S * x["g"][t, :, None, None].to(wide).exp()
            error = value[t].to(wide) - (S * k[t, :, None]).sum(-1)
            if x["beta"] is not None:
                error = error * made(x, x["beta"][t, :, None].to(wide))
            S = S + error[:, :, None] * k[t, :, None]
            outs.append(((S * q[t, :, None]).sum(-1) * scale).to(value.dtype))
            state = S.to(stored)
        start += length
        states.append(state)
    outs += [value.new_zeros(Nv, Dv)] * (len(value) - start)
    out = torch.stack(outs) if outs else value
    return out, torch.stack(states) if states else value.new_zeros(0, Nv, Dv, Dk)


def upstream(x: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Gradients of the outputs, in float64."""
    shape = (len(lengths_of(x)), *x["value"].shape[1:], x["key"].shape[2])
    return torch.randn(x["value"].shape).double(), torch.randn(shape).double() / 4


RULE = Rule(
    "npu_chunk_gated_delta_rule",
    ("query", "key", "value", "beta", "initial_state", "g"),
    recurrence,
    upstream,
)


CASES = [
    Sequences((130,)),
    Sequences((64, 1, 0, 63, 100), N=1, Nv=2, Dk=16, Dv=16, fading=0.1),
    Sequences((5, 70), N=1, Nv=3, Dk=64, Dv=16, state=None, behind=4),
    Sequences((65,), N=1, Nv=1, Dk=128, Dv=128, state=torch.bfloat16),
    Sequences((33, 64), gates=False, scale=0.5),
    Sequences((100,), N=1, Nv=2, Dk=24, Dv=40, fading=30.0),
    Sequences((66,), N=1, Nv=1, Dk=256, Dv=32),
    Sequences((70,), N=1, Nv=1, Dk=32, Dv=256, state=None),
    Sequences((64, 0, 3, 130), N=1, Nv=2, Dk=32, Dv=64, behind=70, fading=0.1, strided=True),
    Sequences((129,), N=1, Nv=1, Dk=64, Dv=192, state=None, alike=True, fading=0.1),
    Sequences((1,), N=2, Nv=4),
    Sequences((2, 67), N=1, Nv=2, Dk=5, Dv=3),
    Sequences((0, 0), N=1, Nv=2, Dk=16, Dv=16),
    Sequences((), N=1, Nv=1, Dk=64, Dv=64, behind=3),
    Sequences((), state=None),
    Sequences((70,), N=1, Nv=2, Dk=16, Dv=16, without=("actual_seq_lengths",)),
    Sequences((70, 3), N=1, Nv=2, Dk=16, Dv=16, behind=2, rates=1),
    Sequences((66,), N=1, Nv=1, Dk=64, Dv=64, fading=0.1, rates=2),
]


@every_dtype
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_autograd_of_the_recurrence(case, dtype, device, backend):
    x = RULE.compared(case, dtype, device, backend)
    for name, grad in x.got.items():
        assert_close_to_float64(f"d_{name}", grad, x.rounded[name], x.want[name])


@pytest.mark.parametrize("case", KEYS_ALIKE, ids=str)
def test_keys_alike(case, device, backend):
    """No decay, full rate, keys that are nearly one: in powers of the chunk's triangle what
    cancels is 1e17 times as large as its inverse."""
    RULE.assert_near(case, case.arguments(), device, 2**-6)


def test_strong_decay_neither_overflows_nor_divides(device, backend):
    """exp(g) is 0 in float32 for some tokens, and beta is 0 for others."""
    case = Sequences((70,), N=1, Nv=2, Dk=16, Dv=16)
    drawn = case.arguments()
    drawn["g"][1::3] = -2000.0
    drawn["beta"][::5] = 0.0
    RULE.assert_near(case, drawn, device, 2**-8)


def test_equal_runs_give_equal_gradients(device, backend):
    RULE.assert_equal_runs(Sequences((130, 70), N=2, Nv=4), device)


@pytest.mark.parametrize("odd,meant", ODD_LENGTHS)
def test_lengths_beyond_the_tokens_end_with_them(odd, meant, device, backend):
    case = Sequences(meant, N=1, Nv=1, Dk=16, Dv=16, behind=70 - sum(meant), fading=0.1)
    RULE.assert_lengths_end_with_the_tokens(case, "actual_seq_lengths", odd, device, backend)


@pytest.mark.parametrize("size", [16, 64])
@pytest.mark.parametrize("rates", range(3))
def test_tokens_of_no_sequence_may_hold_anything(rates, size, device, backend):
    """And get gradients of zero."""
    lengths = (5, 3)
    case = Sequences(lengths, N=1, Nv=2, Dk=size, Dv=size, behind=3, rates=rates)
    x = RULE.for_grad(case, device)
    want = RULE.grad(**x)
    for name in ("query", "key", "value", "g", "beta", "d_out"):
        x[name][sum(lengths) :] = float("nan")
    got = RULE.grad(**x)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
        if a.shape[0] == sum(lengths) + 3:
            assert not a[sum(lengths) :].any()


def test_one_output_is_enough(device, backend):
    case = Sequences((40, 3), N=1, Nv=2, Dk=16, Dv=16)
    RULE.assert_one_output_is_enough(case, device)


@pytest.mark.parametrize(
    "case",
    [
        Sequences((3, 0, 1, 66), N=1, Nv=2, Dk=3, Dv=2, behind=2),
        Sequences((4,), N=1, Nv=2, Dk=3, Dv=2, gates=False, state=None, scale=0.7),
    ],
    ids=str,
)
def test_gradcheck(case):
    RULE.gradcheck(case)


def test_qwen3_next_training(device, backend):
    """Gradients of Hugging Face's chunked form."""
    case = Sequences((150,), N=2, Nv=4, Dk=32, Dv=16)
    x = RULE.with_leaves(case.moved(case.arguments(), torch.float16, device))
    wide = RULE.with_leaves({n: y.float() if isinstance(y, Tensor) else y for n, y in x.items()})
    theirs = qwen3_next_chunks(wide)
    RULE.assert_trains_as(theirs, wide, x, 3e-3)


@pytest.mark.parametrize(
    "change,error,sentence",
    [
        (dict(d_out=torch.zeros(9, 4, 31)), ValueError, "`d_out` has shape .* Dv=32"),
        (dict(d_out=torch.zeros(9, 4, 32).half()), TypeError, "`d_out` has dtype"),
        (dict(d_final_state=torch.zeros(2, 4, 32, 32)), ValueError, "`d_final_state` .* B=1"),
        (dict(key=torch.zeros(9, 2, 31)), ValueError, "`key` has shape .* Dk=32"),
        (dict(value=torch.zeros(9, 3, 32)), ValueError, "3 heads and `query` 2"),
    ],
    ids=by_change,
)
def test_errors(change, error, sentence):
    case = replace(Sequences((9,)), state=torch.float32)
    good = case.moved(case.arguments(), torch.float32, "cpu") | dict(d_out=torch.zeros(9, 4, 32))
    with pytest.raises(error, match=f"{OP}: .*{sentence}"):
        torch.ops.custom.npu_chunk_gated_delta_rule_grad(**(good | change))
