# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The gated delta rule's Gluon kernels over whole sequences, on CPU tensors (see
test_gluon_on_cpu.py).  test_cuda_delta_rule.py runs the same kernels on a GPU."""

from __future__ import annotations

import pytest
import torch

from ...support.kernels import INTERPRETED

pytest.importorskip("triton")
if INTERPRETED:
    pytest.skip("the kernels are not those of Gluon", allow_module_level=True)

from custom.cuda_ops.common.hopper import barriers, tma
from custom.cuda_ops.delta_rule import chunk_gated_delta_rule as chunk
from custom.cuda_ops.delta_rule import chunk_gated_delta_rule_grad as chunk_grad
from custom.cuda_ops.delta_rule.hopper import chunks

import custom

from ...support.delta_rule import Sequences
from ...support.gluon_on_cpu import stand_in

ERROR = {torch.bfloat16: 8e-3, torch.float16: 1e-3}
CASES = {
    "one": (Sequences((130,), N=1, Nv=2, Dk=64, Dv=64), False),
    "three": (Sequences((64, 0, 70), N=1, Nv=1, Dk=128, Dv=128, behind=5), True),
    "two of one": (Sequences((1, 65), N=2, Nv=2, Dk=128, Dv=64, state=None, behind=70), True),
    "no gates": (Sequences((70,), N=1, Nv=1, Dk=64, Dv=128, state=None, gates=False), False),
    "to 1": (Sequences((65, 3), N=1, Nv=2, Dk=64, Dv=64, behind=2, rates=1), True),
    "to 2": (Sequences((70,), N=1, Nv=1, Dk=64, Dv=64, fading=0.1, rates=2), False),
    "alike": (Sequences((129,), N=1, Nv=3, Dk=64, Dv=64, fading=0.1, alike=True), False),
}


@pytest.fixture
def here(monkeypatch):
    monkeypatch.setattr("custom.cuda_ops.common.gpu.capability", lambda device: (9, 0))
    stand_in(monkeypatch, chunk.hopper, chunk_grad.hopper, chunks, barriers, tma)


@pytest.mark.parametrize("case", CASES)
def test_forward_and_gradients(case, here):
    drawn, varlen = CASES[case]
    dtype = list(ERROR)[list(CASES).index(case) % 2]
    x = drawn.moved(drawn.arguments(), dtype, "cpu")
    if not varlen:
        x["actual_seq_lengths"] = None
    exact = drawn.moved(x, torch.float64, "cpu")
    assert chunk.hopper.supports(*(x[n] for n in ("query", "key", "value")), len(drawn.lengths))
    got = chunk.forward(**x)
    want = custom.npu_chunk_gated_delta_rule(**exact)
    for name, a, b in zip(("out", "state"), got, want, strict=True):
        near(name, a, b, dtype)
    given = dict(d_out=torch.randn(want[0].shape).to(dtype), d_final_state=None)
    if drawn.state is not None:
        given["d_final_state"] = torch.randn(want[1].shape)
    wide = {n: None if y is None else y.double() for n, y in given.items()}
    got = chunk_grad.backward(**x, **given)
    want = torch.ops.custom.npu_chunk_gated_delta_rule_grad(**exact, **wide)
    names = ("query", "key", "value", "beta", "initial_state", "g")
    for name, a, b in zip(names, got, want, strict=True):
        assert x[name] is not None or not len(a)
        near(f"d_{name}", a, b, dtype)


def near(name, got, want, dtype):
    error = (got.double() - want).norm() / want.norm().clamp_min(1e-9)
    assert error < ERROR[dtype], (name, error)
