# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The gated delta rule over whole sequences, against Qwen3-Next's own chunked form."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from custom.dispatch.reference.delta_rule import chunk_gated_delta_rule as reference
from torch import Tensor

import custom

from ...support.accuracy import assert_close_to_float64, skip_unless_taken
from ...support.calls import by_change
from ...support.chunked import Chunked, each
from ...support.delta_rule import KEYS_ALIKE, ODD_LENGTHS, Sequences, qwen3_next_chunks

OP = "npu_chunk_gated_delta_rule"
pytestmark = pytest.mark.usefixtures("one_thread")


CASES = [
    Sequences((130,)),
    Sequences((64, 1, 0, 63, 200), fading=0.1),
    Sequences((5, 70), N=1, Nv=3, Dk=64, Dv=16, state=None, behind=4),
    Sequences((65,), N=1, Nv=1, Dk=128, Dv=128, state=torch.bfloat16),
    Sequences((33, 64), gates=False, scale=0.5),
    Sequences((100,), N=1, Nv=2, Dk=24, Dv=40, fading=30.0),
    Sequences((66,), N=1, Nv=1, Dk=256, Dv=32),
    Sequences((64, 0, 3, 130), N=1, Nv=2, Dk=128, Dv=128, behind=70, fading=0.1, strided=True),
    Sequences((129,), N=1, Nv=1, Dk=64, Dv=192, state=None, alike=True, fading=0.1),
    Sequences((10, 70), N=2, Nv=2, Dk=64, Dv=64, state=torch.bfloat16, fading=30.0),
    Sequences((), N=1, Nv=1, Dk=128, Dv=64, behind=3),
    Sequences((), state=None),
    Sequences((100,), N=1, Nv=2, Dk=128, Dv=64, without=("g", "actual_seq_lengths")),
    Sequences((70,), Dk=64, Dv=64, state=None, fading=0.1, without=("beta", "actual_seq_lengths")),
    Sequences((3, 65), N=1, Nv=2, Dk=64, Dv=128, behind=2, gates=False),
    Sequences((40,), without=("beta", "actual_seq_lengths")),
    Sequences((70, 3), N=1, Nv=2, Dk=16, Dv=16, behind=2, rates=1),
    Sequences((66,), N=1, Nv=1, Dk=64, Dv=64, fading=0.1, rates=2),
]


@each(CASES)
def test_equals_the_recurrence(case, dtype, device, backend):
    RULE.assert_equals_the_recurrence(case, case.arguments(), dtype, device, backend)


def in_dtype(x: dict[str, Any], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The recurrence run in `dtype`: the state is rounded to it after every token."""
    if dtype is torch.float32:
        return reference.forward(**x)
    outs, states, start = [x["value"][:0]], [], 0
    lengths = x["actual_seq_lengths"]
    for n, length in enumerate([len(x["value"])] if lengths is None else lengths.tolist()):
        shape = (1, x["value"].shape[1], x["value"].shape[2], x["key"].shape[2])
        state = torch.zeros(shape, dtype=dtype)
        if x["initial_state"] is not None:
            state = x["initial_state"][n : n + 1].to(dtype)
        for t in range(start, start + length):
            names = ("query", "key", "value", "beta", "g")
            token = {m: None if x[m] is None else x[m][t : t + 1] for m in names}
            out, state = reference.forward(
                **x | token | dict(initial_state=state, actual_seq_lengths=None)
            )
            outs.append(out)
        start += length
        states.append(state)
    outs.append(torch.zeros_like(x["value"][start:]))
    return torch.cat(outs), torch.cat(states) if states else torch.zeros(
        0, *x["value"].shape[1:], x["key"].shape[2]
    )


RULE = Chunked(OP, reference.forward, in_dtype)


@pytest.mark.parametrize("case", KEYS_ALIKE, ids=str)
def test_keys_alike(case, device, backend):
    """No decay, full rate, keys that are nearly one: the chunk's triangle is nearly all ones, and
    in powers of it what cancels is 1e17 times as large as its inverse."""
    # roundings to float16, 2**-11 each, of what is larger than the rest
    RULE.assert_near(case, case.arguments(), device, 2**-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("keys,values", [(128, 128), (64, 64), (64, 40), (128, 24)])
def test_rows_at_odd_addresses(keys, values, dtype, device, backend):
    """What TMA cannot read, of every size: on Hopper a walk of 32 columns left its memory."""
    skip_unless_taken(dtype, device, backend)
    case = Sequences((130, 64), N=3, Nv=6, Dk=keys, Dv=values, behind=3, state=None)
    plain = case.moved(case.arguments(), dtype, "cpu")
    want, want_state = reference.forward(**case.moved(plain, torch.float64, "cpu"))
    given = case.moved(plain, dtype, device)
    for name in ("query", "value", "beta"):
        given[name] = torch.cat([given[name].new_zeros(1), given[name].flatten()])[1:].view_as(
            given[name]
        )
    out, state = custom.npu_chunk_gated_delta_rule(**given)
    rounded, rounded_state = in_dtype(plain, dtype)
    assert_close_to_float64("out", out, rounded, want)
    assert_close_to_float64("state", state, rounded_state, want_state)


@pytest.mark.parametrize("size", [32, 64])
@pytest.mark.parametrize("odd,meant", ODD_LENGTHS)
def test_lengths_beyond_the_tokens_end_with_them(odd, meant, size, device, backend):
    case = Sequences(meant, N=1, Nv=1, Dk=size, Dv=size, behind=70 - sum(meant), fading=0.1)
    RULE.assert_lengths_end_with_the_tokens(case, "actual_seq_lengths", odd, device, backend)


def test_qwen3_next_chunks(device, backend):
    case = Sequences((150,), N=2, Nv=4, Dk=32, Dv=16)
    x = case.moved(case.arguments(), torch.float16, device)
    out, state = custom.npu_chunk_gated_delta_rule(**x)
    wide = {n: y.float() if isinstance(y, Tensor) else y for n, y in x.items()}
    want, last = qwen3_next_chunks(wide)
    torch.testing.assert_close(out.float(), want, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(state, last, rtol=2e-3, atol=2e-3)


def test_prompt_then_decode(device, backend):
    """The final state of a prompt is the decode's initial one ("vk"), and they agree."""
    T, N, Nv, D = 40, 2, 4, 32
    gates = {name: torch.randn(1, T, Nv) for name in "ab"}
    q, k = (torch.nn.functional.normalize(torch.randn(T, N, D), dim=-1).half() for _ in range(2))
    v = torch.randn(T, Nv, D).half()
    q, k, v, a, b = (x.to(device) for x in (q, k, v, gates["a"], gates["b"]))
    zero, slot = torch.zeros(Nv, device=device), torch.tensor([0], device=device)
    g, beta = -torch.nn.functional.softplus(a[0]), b[0].sigmoid()
    out, state = custom.npu_chunk_gated_delta_rule(q, k, v, beta=beta, g=g)
    half, first = T // 2, slice(0, T // 2)
    _, pool = custom.npu_chunk_gated_delta_rule(
        q[first], k[first], v[first], beta=beta[first], g=g[first]
    )
    late = [x[half:][None] for x in (q, k, v)]
    o = custom.npu_fused_sigmoid_gating_delta_rule_update(
        zero, a[:, half:], zero, 1.0, 20.0, *late, b[:, half:], pool, slot, state_layout="vk"
    )
    torch.testing.assert_close(o[0], out[half:], rtol=4e-3, atol=4e-3)
    torch.testing.assert_close(pool, state, rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize(
    "change,error,sentence",
    [
        (dict(key=torch.zeros(9, 2, 31)), ValueError, "`key` has shape .* Dk=32"),
        (dict(value=torch.zeros(9, 3, 32)), ValueError, "3 heads and `query` 2"),
        (dict(beta=torch.zeros(9, 3)), ValueError, "`beta` has shape"),
        (dict(g=torch.zeros(9, 4, dtype=torch.int32)), TypeError, "`g` is int32"),
        (dict(initial_state=torch.zeros(2, 4, 32, 32)), ValueError, "`initial_state` .* B=1"),
        (dict(actual_seq_lengths=torch.zeros(1)), TypeError, "`actual_seq_lengths` is float32"),
    ],
    ids=by_change,
)
def test_errors(change, error, sentence):
    RULE.assert_refuses(Sequences((9,)), change, error, sentence)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", ["query", "key", "value", "beta", "g"])
def test_what_is_no_number_stays_in_its_sequence(name, bad, device, backend):
    """Also where it is the last token of one, and the next begins in the same rows of memory."""
    case = Sequences((37, 0, 30, 3), N=1, Nv=2, Dk=32, Dv=32)
    x = case.moved(case.arguments(), torch.float16, device)
    want, states = custom.npu_chunk_gated_delta_rule(**x)
    x[name] = x[name].clone()
    x[name][36] = x[name][67] = bad
    got, left = custom.npu_chunk_gated_delta_rule(**x)
    assert torch.equal(got[37:67], want[37:67]) and torch.equal(left[1:3], states[1:3])
    assert not got[36].isfinite().all() and not got[67].isfinite().all()
