# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The CUDA kernels of the convolution and the gated norm, compiled where there is no GPU: the
interpreter runs them in test_cuda_delta_rule.py, and does not know all that the compiler asks."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from custom.cuda_ops.convolution import causal_conv1d as whole
from custom.cuda_ops.convolution import causal_conv1d_grad as grad
from custom.cuda_ops.convolution import causal_conv1d_update as update
from custom.cuda_ops.convolution import fused_causal_conv1d as fused
from custom.cuda_ops.delta_rule import gated_delta_layer_decode as layer
from custom.cuda_ops.delta_rule import gated_rms_norm as norm
from custom.cuda_ops.delta_rule import gated_rms_norm_grad as norm_grad

from ...support.compile_for_hopper import stand_in
from ...support.convolution import TABLE, Layer, Norm, Pooled, Step, Whole
from ...support.kernels import INTERPRETED


@pytest.mark.skipif(INTERPRETED, reason="kernels are not compiled")
@pytest.mark.parametrize(
    "case",
    [
        Whole((5, 9), D=64),
        Whole((9, 9), D=64, W=3, packed=False, history=False, bias=False, activation=None),
        Whole((9,), D=60, W=2, strided=True),
    ],
    ids=["most", "least", "two taps"],
)
def test_kernels_compile(case, monkeypatch):
    compiled = stand_in(monkeypatch)
    x = case.moved(case.arguments(), torch.bfloat16, "cpu")
    out, states = whole.forward(**x)
    assert len(compiled) == 1
    grad.backward(**x, d_out=out, d_final_states=states if case.history else None)
    assert len(compiled) == 3 if case.history else 2


@pytest.mark.skipif(INTERPRETED, reason="kernels are not compiled")
def test_rows_are_loaded_before_the_first_product(monkeypatch):
    """16 rows at once is what keeps enough bytes in flight: nothing may be spilled for it."""
    monkeypatch.setattr(whole.gpu, "num_sms", lambda device: 132)
    compiled = stand_in(monkeypatch)
    case = Whole((16384,), D=512)
    whole.forward(**case.moved(case.arguments(), torch.bfloat16, "cpu"))
    (kernel,) = compiled
    assert kernel.metadata.num_warps == 4
    ptx = kernel.asm["ptx"]
    assert ptx.count("ld.global.v2.b32") >= 16 and ".local" not in ptx
    compiled.clear()
    x = case.moved(case.arguments(), torch.bfloat16, "cpu")
    grad.backward(**x, d_out=torch.empty_like(x["x"]), d_final_states=None)
    ptx = compiled[0].asm["ptx"]  # 8 rows of x and of d_out, and the three behind
    assert ptx.count("ld.global.v2.b32") >= 22 and ".local" not in ptx


@pytest.mark.skipif(INTERPRETED, reason="kernels are not compiled")
@pytest.mark.parametrize(
    "call",
    [
        Pooled(slots=None),
        Pooled(slots=TABLE, accepted=(1, 2, 3), computed=(3, 0, 5),
                         blocks=((0, 0, 1), (2, 0, 2), (0, 0, 1)),
                         options=(("conv_mode", "pangu"), ("residual_connection", 1))),
    ],
    ids=["least", "most"],
)  # fmt: skip
def test_kernels_on_a_pool_compile(call, monkeypatch):
    compiled = stand_in(monkeypatch)
    given = call.moved(call.arguments(), torch.bfloat16, "cpu")
    names = ("activation", "pad_slot_id", "residual_connection", "block_size", "conv_mode")
    fused.forward(**(dict.fromkeys(names) | given))
    assert len(compiled) == 2


@pytest.mark.skipif(INTERPRETED, reason="kernels are not compiled")
@pytest.mark.parametrize(
    "case",
    [
        Step(slots=None, bias=False, activation=None, W=2, L=1),
        Step(S=7, L=5, starts=(0, 3, 4, 6), accepted=(2, 1, 1), rows=(3, -1, 0)),
        Step(S=2, rows=(3, -1, 0), parents=((-1, 0),) * 3, turned=True),
    ],
    ids=["least", "packed drafts", "tree"],
)
def test_kernels_of_a_decode_compile(case, monkeypatch):
    compiled = stand_in(monkeypatch)
    update.forward(**case.moved(case.arguments(), torch.bfloat16, "cpu"))
    assert len(compiled) == 1


@pytest.mark.skipif(INTERPRETED, reason="kernels are not compiled")
@pytest.mark.parametrize("before", [True, False])
def test_kernels_of_the_norm_compile(before, monkeypatch):
    compiled = stand_in(monkeypatch)
    case = Norm((3, 4, 96), group=32 if before else None, before=before, strided=True)
    x = case.moved(case.arguments(), torch.bfloat16, "cpu")
    norm_grad.backward(**x, d_out=norm.forward(**x))
    assert len(compiled) == 2


@pytest.mark.skipif(INTERPRETED, reason="kernels are not compiled")
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
@pytest.mark.parametrize("case", [Layer(), Layer(S=2, layout="vk", rows=(4, -1, 0))], ids=str)
def test_kernels_of_the_layer_compile(case, capability, monkeypatch):
    """On a GPU with chained launches, and on one without."""
    compiled = stand_in(monkeypatch, 10 * capability[0])
    monkeypatch.setattr("custom.cuda_ops.common.gpu.capability", lambda device: capability)
    layer.forward(
        **case.arguments(torch.bfloat16, "cpu")
        | dict(scale=None, epsilon=1e-6, softplus_beta=1.0, softplus_threshold=20.0)
    )
    assert len(compiled) == 2
    waits = ["griddepcontrol.wait" in kernel.asm["ptx"] for kernel in compiled]
    assert waits == [False, capability >= (9, 0)]


@pytest.mark.skipif(INTERPRETED, reason="kernels are not compiled")
@pytest.mark.parametrize(
    "case, launches",
    [
        (Layer(N=4, Dk=16, kda=True, bound=-5.0, L=5), 1),
        (Layer(N=4, Dk=16, kda=True, layout="vk", flat=True, bias=False), 1),
        (Layer(N=4, Dk=16, kda=True, L=9), 2),
        (Layer(N=4, Dk=32, kda=True), 2),
        (Layer(N=2, Dk=16, kda=True), 2),
        (Layer(N=4, Dk=16), 2),
        (Layer(S=2, N=4, Dk=16, kda=True), 2),
        (Layer(N=4, Dk=16, kda=True, rows=(4, -1, 0)), 2),
    ],
    ids=["kv", "vk", "columns", "Dv", "N", "no KDA", "tokens", "kept"],
)
def test_a_token_of_kda_takes_one_launch(case, launches, monkeypatch):
    compiled = stand_in(monkeypatch)
    layer.forward(
        **case.arguments(torch.bfloat16, "cpu")
        | dict(scale=None, epsilon=1e-6, softplus_beta=1.0, softplus_threshold=20.0)
    )
    assert len(compiled) == launches
