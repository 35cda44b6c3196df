# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The causal convolution over whole sequences and its gradient, against torch's conv1d, a loop over
single numbers, and Qwen3-Next's own fallback."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from custom.dispatch.reference.convolution import causal_conv1d as reference
from torch import Tensor
from torch.nn.functional import conv1d, silu

import custom

from ...support.accuracy import assert_close_to_float64, every_dtype, skip_float64
from ...support.calls import assert_refuses, by_change, by_formula, runs_once
from ...support.convolution import Whole

OP, GRAD = "npu_causal_conv1d", "npu_causal_conv1d_grad"


CASES = [
    Whole((9,)),
    Whole((5, 1, 0, 40, 2, 3), before=2, behind=3),
    Whole((1, 1, 1), D=1, W=2, history=False),
    Whole((33, 70), D=130, W=3, bias=False, activation=None, strided=True),
    Whole((17, 17), W=4, packed=False, strided=True),
    Whole((2, 2, 2), W=4, packed=False, activation="swish"),
    Whole((130,), D=257, W=2, packed=False, history=False, bias=False),
    Whole((0, 0), before=1, behind=2),
    Whole((), behind=3),
    Whole((3,), D=520, W=3, history=False, behind=1),
]


def by_conv1d(x, weight, bias, initial_states, query_start_loc, activation):
    """torch's convolution, sequence by sequence."""
    taps, size = weight.shape[0], x.shape[-1]
    if query_start_loc is None:
        parts = list(x)
    else:
        ends = query_start_loc.tolist()
        parts = [x[a:b] for a, b in pairwise(ends)]
    outs, finals = [], []
    for n, part in enumerate(parts):
        before = x.new_zeros(taps - 1, size) if initial_states is None else initial_states[n]
        whole = torch.cat([before, part])
        out = whole[:0]
        if len(part):
            out = conv1d(whole.t()[None], weight.t()[:, None], bias, groups=size)[0].t()
        outs.append(out if activation is None else silu(out))
        finals.append(whole[len(whole) - taps + 1 :])
    final = torch.stack(finals) if finals else x.new_zeros(0, taps - 1, size)
    if query_start_loc is None:
        return torch.stack(outs), final
    stray = x.new_zeros(ends[0], size), x.new_zeros(len(x) - ends[-1], size)
    return torch.cat([stray[0], *outs, stray[1]]), final


@every_dtype
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_conv1d(case, dtype, device, backend):
    got, rounded, exact = by_formula(OP, by_conv1d, case, dtype, device, backend)
    for name, *values in zip(("out", "states"), got, rounded, exact, strict=True):
        assert_close_to_float64(name, *values)
    assert torch.equal(got[1].cpu(), rounded[1])  # copies


def test_reference_equals_a_loop_over_numbers():
    case = Whole((4, 0, 2), D=3, W=3, before=1, behind=1)
    x = case.arguments()
    out, states = reference.forward(**x)
    sums = x["query_start_loc"].tolist()
    want = torch.zeros_like(out)
    for n in range(3):
        for d in range(3):
            seen = x["initial_states"][n, :, d].tolist()
            for t in range(sums[n], sums[n + 1]):
                seen.append(float(x["x"][t, d]))
                total = float(x["bias"][d])
                for j in range(3):
                    total += float(x["weight"][j, d]) * seen[len(seen) - 3 + j]
                want[t, d] = total / (1 + torch.tensor(-total, dtype=torch.float64).exp())
            assert states[n, :, d].tolist() == seen[-2:]
    torch.testing.assert_close(out, want)


def test_small_numbers_by_hand():
    x = torch.tensor([[1.0], [2.0], [3.0]])
    weight = torch.tensor([[10.0], [1.0]])  # the last row is the token's own
    out, states = custom.npu_causal_conv1d(
        x, weight, initial_states=torch.tensor([[[5.0]]]), query_start_loc=torch.tensor([0, 3])
    )
    assert out[:, 0].tolist() == [51.0, 12.0, 23.0]
    assert states.tolist() == [[[3.0]]]


@every_dtype
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradient_equals_autograd(case, dtype, device, backend):
    skip_float64(dtype, backend)
    plain = case.moved(case.arguments(), dtype, "cpu")
    shapes = [y.shape for y in reference.forward(**plain)]
    grads = [torch.randn(*shape, dtype=torch.float64).to(dtype) for shape in shapes]

    def backward(function: Any, x: dict[str, Any], to: torch.dtype) -> dict[str, Tensor]:
        leaves = {
            name: y.detach().requires_grad_()
            for name, y in x.items()
            if isinstance(y, Tensor) and y.dtype.is_floating_point
        }
        outs = function(**(x | leaves))
        given = [g.to(to).to(outs[0].device) for g in grads]
        pairs = [(out, g) for out, g in zip(outs, given, strict=True) if out.requires_grad]
        if pairs:
            torch.autograd.backward(*zip(*pairs, strict=True))
        return {name: leaf.grad for name, leaf in leaves.items()}

    with runs_once(GRAD, backend):
        got = backward(custom.npu_causal_conv1d, case.moved(plain, dtype, device), dtype)
    exact = case.moved(plain, torch.float64, "cpu")
    want = backward(by_conv1d, exact, torch.float64)
    rounded = backward(by_conv1d, plain, dtype)
    for name, grad in got.items():
        zero = torch.zeros(grad.shape, dtype=torch.float64)
        # where torch has nothing to differentiate there is no gradient
        wanted = zero if want[name] is None else want[name]
        assert_close_to_float64(
            name, grad, zero if rounded[name] is None else rounded[name], wanted
        )


def test_gradcheck_in_float64():
    case = Whole((3, 1), D=2, W=4, before=1)
    x = case.arguments()
    names = ("x", "weight", "bias", "initial_states")
    leaves = [x[name].requires_grad_() for name in names]

    def call(*values: Tensor) -> tuple[Tensor, Tensor]:
        return custom.npu_causal_conv1d(**(x | dict(zip(names, values, strict=True))))

    assert torch.autograd.gradcheck(call, leaves)


def test_equal_runs_give_equal_gradients(device, backend):
    case = Whole((90, 200), D=20)
    x = case.moved(case.arguments(), torch.float16, device)
    d_out = torch.randn(*x["x"].shape).half().to(device)
    first, second = (torch.ops.custom.npu_causal_conv1d_grad(d_out=d_out, **x) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(
    ("odd", "meant"),
    [
        ((-9, 4, 2**31 - 1), (0, 4, 12)),
        ((0, 2**32 + 5, 2**62), (0, 12, 12)),
        ((-(2**40), 3, 2**32 + 7), (0, 3, 12)),
        # and begin where all before them have ended
        ((0, 10, 7), (0, 10, 10)),
        ((0, 7, -3), (0, 7, 7)),
        ((9, 3, 11), (9, 9, 11)),
    ],
)
def test_sums_beyond_the_tokens_end_with_them(odd, meant, device, backend):
    case = Whole((12, 0))
    x = case.moved(case.arguments(), torch.float16, device)
    d_out = torch.randn(12, case.D).half().to(device)
    results = []
    for sums in (meant, odd):
        x["query_start_loc"] = torch.tensor(sums, device=device)
        grads = torch.ops.custom.npu_causal_conv1d_grad(
            d_out=d_out, d_final_states=torch.ones_like(x["initial_states"]), **x
        )
        results.append([*custom.npu_causal_conv1d(**x), *grads])
        # the gradient of a token of no sequence
        of_none = (results[-1][0] == 0).all(-1)
        assert (grads[0][of_none] == 0).all()
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_equals_qwen3_next(device, backend):
    qwen = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    mixed = torch.randn(2, 9, 24).half().to(device).transpose(1, 2)
    weight = torch.randn(24, 4).half().to(device)
    got = custom.causal_conv1d_fn(mixed, weight, activation="silu")
    want = qwen.causal_conv1d_fn(mixed.float(), weight.float(), activation="silu")
    torch.testing.assert_close(got.float(), want, rtol=2e-3, atol=2e-3)
    assert got.stride() == mixed.stride()


def test_under_the_package_s_name(device, backend):
    """A prompt in two parts, channels first in memory too."""
    x, weight = torch.randn(2, 8, 11).half().to(device), torch.randn(8, 3).half().to(device)
    bias = torch.randn(8).half().to(device)
    whole = custom.causal_conv1d_fn(x, weight, bias)
    state = torch.zeros(2, 8, 2, dtype=torch.float16, device=device)
    first, states = custom.causal_conv1d_fn(
        x[..., :4], weight, bias, return_final_states=True, final_states_out=state
    )
    assert states is state and torch.equal(state, x[..., 2:4])
    second = custom.causal_conv1d_fn(x[..., 4:], weight, bias, initial_states=state)
    assert torch.equal(torch.cat([first, second], -1), whole)


@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        (dict(weight=torch.zeros(5, 40)), ValueError, "`weight` has 5 taps, expected 2 to 4"),
        (dict(weight=torch.zeros(4, 39)), ValueError, "`weight` has shape"),
        (dict(activation="gelu"), ValueError, "`activation` is 'gelu'"),
        (dict(bias=torch.zeros(4, 40)[:, 0]), ValueError, "`bias` has shape"),
        (dict(initial_states=torch.zeros(2, 3, 40)), ValueError, "`initial_states` has shape"),
        (dict(query_start_loc=torch.zeros(0).int()), ValueError, "query_start_loc.numel"),
        (dict(query_start_loc=torch.zeros(2)), TypeError, "`query_start_loc` is float32"),
        (dict(x=torch.zeros(40, 9).t()), ValueError, "`x` has stride 9"),
    ],
    ids=by_change,
)
def test_errors(change, error, sentence):
    case = Whole((9,))
    good = case.moved(case.arguments(), torch.float32, "cpu")
    assert_refuses(OP, good | change, error, sentence)


def test_debug_looks_at_the_prefix_sums(monkeypatch):
    monkeypatch.setattr(custom.config, "debug", True)
    case = Whole((9,))
    good = case.moved(case.arguments(), torch.float32, "cpu")
    with pytest.raises(ValueError, match=r"`query_start_loc` is .* to at most 9"):
        custom.npu_causal_conv1d(**(good | dict(query_start_loc=torch.tensor([0, 10]))))
