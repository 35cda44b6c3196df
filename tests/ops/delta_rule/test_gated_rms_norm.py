# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""RMSNorm with a gate and its gradient, against a loop over numbers, autograd, and Qwen3-Next's."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from custom.dispatch.reference.delta_rule import gated_rms_norm as reference
from torch import Tensor
from torch.nn.functional import silu

import custom

from ...support.accuracy import assert_close_to_float64, every_dtype, skip_float64
from ...support.calls import assert_refuses, by_change, by_formula, runs_once
from ...support.convolution import Norm

OP, GRAD = "npu_gated_rms_norm", "npu_gated_rms_norm_grad"


CASES = [
    Norm((2, 3, 4, 128), strided=True),
    Norm((70, 64), scale=1e-3),
    Norm((5, 3, 96), group=32, before=False),
    Norm((2, 2, 3, 64), group=16, before=False, activation="sigmoid", strided=True),
    Norm((3, 5, 48), activation="sigmoid", epsilon=0.5),
    Norm((4, 1040), group=208, activation="swish"),
    Norm((0, 16)),
]


def plainly(x: Tensor, gate: Tensor, weight: Tensor, **o: Any) -> Tensor:
    """In the tensors' own dtype."""
    opened = torch.sigmoid(gate) if o["activation"] == "sigmoid" else silu(gate)
    u = x if o["norm_before_gate"] else x * opened
    groups = u.unflatten(-1, (-1, o["group_size"] or x.shape[-1]))
    root = (groups.pow(2).mean(-1, keepdim=True) + o["epsilon"]).sqrt()
    out = (groups / root).flatten(-2) * weight
    return out * opened if o["norm_before_gate"] else out


@every_dtype
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_formula(case, dtype, device, backend):
    assert_close_to_float64("out", *by_formula(OP, plainly, case, dtype, device, backend))


def test_reference_equals_a_loop_over_numbers():
    for before in (True, False):
        case = Norm((2, 4), group=2, before=before, epsilon=0.1)
        x = case.arguments()
        out = reference.forward(**x)
        for row in range(2):
            for first in (0, 2):
                opened = [
                    g / (1 + math.exp(-g)) for g in x["gate"][row, first : first + 2].tolist()
                ]
                u = x["x"][row, first : first + 2].tolist()
                if not before:
                    u = [a * b for a, b in zip(u, opened, strict=True)]
                root = math.sqrt((u[0] ** 2 + u[1] ** 2) / 2 + 0.1)
                for i in range(2):
                    want = (
                        u[i] / root * float(x["weight"][first + i]) * (opened[i] if before else 1)
                    )
                    assert math.isclose(float(out[row, first + i]), want, rel_tol=1e-12)


@every_dtype
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradient_equals_autograd(case, dtype, device, backend):
    skip_float64(dtype, backend)
    plain = case.moved(case.arguments(), dtype, "cpu")
    grad = torch.randn(*case.shape, dtype=torch.float64).to(dtype)

    def backward(function: Any, x: dict[str, Any]) -> list[Tensor]:
        names = ("x", "gate", "weight")
        leaves = {name: x[name].detach().requires_grad_() for name in names}
        out = function(**(x | leaves))
        out.backward(grad.to(out.dtype).to(out.device))
        return [leaves[name].grad for name in names]

    with runs_once(GRAD, backend):
        got = backward(custom.npu_gated_rms_norm, case.moved(plain, dtype, device))
    exact = backward(plainly, case.moved(plain, torch.float64, "cpu"))
    rounded = backward(plainly, plain)
    for name, *values in zip(("x", "gate", "weight"), got, rounded, exact, strict=True):
        assert_close_to_float64(name, *values)


@pytest.mark.parametrize("before", [True, False])
def test_gradcheck_in_float64(before):
    x = Norm((3, 4), group=2, before=before).arguments()
    names = ("x", "gate", "weight")

    def call(*values: Tensor) -> Tensor:
        return custom.npu_gated_rms_norm(**(x | dict(zip(names, values, strict=True))))

    assert torch.autograd.gradcheck(call, [x[name].requires_grad_() for name in names])


def test_equals_qwen3_next(device, backend):
    qwen = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    norm = qwen.Qwen3NextRMSNormGated(64, eps=1e-6)
    torch.nn.init.normal_(norm.weight)
    x, gate = torch.randn(9, 64).half(), torch.randn(9, 64).half()
    want = norm(x.float(), gate.float())
    weight = norm.weight.detach().to(device)
    got = custom.npu_gated_rms_norm(x.to(device), gate.to(device), weight)
    torch.testing.assert_close(got.float().cpu(), want, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        (dict(gate=torch.zeros(5, 3, 95)), ValueError, r"`gate` has shape \[5, 3, 95\]"),
        (dict(weight=torch.zeros(95)), ValueError, "`weight` has shape"),
        (dict(activation="relu"), ValueError, "`activation` is 'relu'"),
        (dict(epsilon=-1.0), ValueError, "`epsilon` is -1.0"),
        (dict(gate=torch.zeros(5, 3, 96).half()), TypeError, "`gate` has dtype"),
    ],
    ids=by_change,
)
def test_errors(change, error, sentence):
    case = Norm((5, 3, 96), group=32)
    good = case.moved(case.arguments(), torch.float32, "cpu")
    assert_refuses(OP, good | change, error, sentence)
