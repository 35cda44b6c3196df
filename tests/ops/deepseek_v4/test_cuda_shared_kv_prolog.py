# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""DeepSeek-V4's layer, its prolog and output projection, and hyper-connections on CUDA: their own
tests under Triton's interpreter, and kernels compiled for GPUs that are not there.  An NPU has none
yet."""

from __future__ import annotations

import pytest
import torch
from custom.dispatch import backends
from custom.dispatch.register import overload
from custom.dispatch.registry import BY_NAME

import custom

from ...support import interpreted
from ...support.kernels import INTERPRETED
from ...support.layer_v4 import quantized
from ...support.samples import Maker, sample

FILES = {
    "test_hyper_connections.py": "",
    "test_sharedkv_prolog_pto.py": "",
    "test_grouped_o_proj_pto.py": "",
    # its stages have run with all that they take
    "test_sparse_attention_v4_pto.py": " and (its_stages or near_the_exact or before)",
}
KERNELS = {
    "npu_hc_pre": ["_mix", "_gates"],
    "npu_hc_pre_grad": ["_mix", "_inner", "_streams", "_weights"],
    "npu_hc_post": ["_blend"],
    "npu_hc_post_grad": ["_backward"],
    "npu_hc_post_pre": ["_blend", "_mix", "_gates"],
    "npu_sharedkv_prolog_pto": ["_product", "_tokens", "_product", "_heads"],
    "npu_grouped_o_proj_pto": ["_turned", "_product", "_product"],
    "npu_sparse_attention_v4_pto": [
        "_product",
        "_tokens",
        "_product",
        "_heads",
        *["_product", "_pool", "_finish", "_keep"] * 2,
        "_scores",
        "_topk",
        "_note",
        "_attend",
        "_turned",
        "_product",
        "_product",
    ],
}
gpus = pytest.mark.parametrize("capability", [80, 90], ids="sm_{}".format)


@pytest.mark.skipif(INTERPRETED, reason="runs the interpreter itself")
@pytest.mark.parametrize("file", FILES)
def test_under_the_interpreter(file):
    """float16 only: the kernels' float32 paths differ in nothing but the conversion."""
    chosen = "cpu and not bfloat16 and not float32 and not float64" + FILES[file]
    interpreted.passes(chosen, f"tests/ops/deepseek_v4/{file}", CUDA_VISIBLE_DEVICES="")


def compiled(op: str, capability: int, monkeypatch, **changes) -> list:
    """What a call of the sample launches on such a GPU."""
    pytest.importorskip("triton")
    from custom.dispatch import backends
    from custom.dispatch.register import bind, overload
    from custom.dispatch.registry import BY_NAME

    from ...support.compile_for_hopper import stand_in

    found = stand_in(monkeypatch, capability)
    gpu = "custom.cuda_ops.common.gpu"
    monkeypatch.setattr(f"{gpu}.capability", lambda device: divmod(capability, 10))
    monkeypatch.setattr(f"{gpu}.num_sms", lambda device: 132)
    given = sample(op, torch.device("cpu"), torch.bfloat16) | changes
    spec = BY_NAME[op]
    launcher = backends.launcher(backends.CUDA, spec)
    launcher.function(**bind(overload(spec)._schema, (), given))
    return found


@pytest.mark.skipif(INTERPRETED, reason="kernels are not compiled")
@gpus
@pytest.mark.parametrize("op", KERNELS)
def test_kernels_compile(op, capability, monkeypatch):
    """The interpreter does not know that a variable of a kernel keeps its type."""
    kernels = compiled(op, capability, monkeypatch)
    assert [kernel.name for kernel in kernels] == KERNELS[op]
    assert all(kernel.metadata.shared <= 99 * 1024 for kernel in kernels) or capability == 90


@pytest.mark.skipif(INTERPRETED, reason="kernels are not compiled")
@gpus
def test_a_step_of_a_layer_compresses_in_three_launches(capability, monkeypatch):
    op = "npu_sparse_attention_v4_pto"
    step = sample(op, torch.device("cpu"), torch.bfloat16, S=1)
    kernels = [kernel.name for kernel in compiled(op, capability, monkeypatch, **step)]
    assert kernels[4:8] == ["_product", "_step", "_step", "_scores"]


QUANTIZED = {
    "npu_sharedkv_prolog_pto": "_activations _product _product _tokens"
    " _activations _product _heads",
    "npu_grouped_o_proj_pto": "_turned _activations _product _activations _product",
}


@pytest.mark.skipif(INTERPRETED, reason="kernels are not compiled")
@gpus
@pytest.mark.parametrize("mode", [2, 4])
@pytest.mark.parametrize("op", QUANTIZED)
def test_kernels_of_quantized_weights_compile(op, mode, capability, monkeypatch):
    given = sample(op, torch.device("cpu"), torch.bfloat16)
    matrices = {n: custom.from_nz(x).mT.contiguous() for n, x in given.items() if n[:2] == "w_"}
    kept = {n: x.mT for n, x in matrices.items()}
    made = quantized(kept, mode)
    made |= {n: x.mT.contiguous() for n, x in made.items() if n in matrices}
    changes = matrices | made | dict(weight_format="linear")
    kernels = compiled(op, capability, monkeypatch, **changes)
    assert [kernel.name for kernel in kernels] == QUANTIZED[op].split()
    assert all(kernel.metadata.shared <= 99 * 1024 for kernel in kernels) or capability == 90


@pytest.mark.skipif(INTERPRETED, reason="kernels are not compiled")
@gpus
@pytest.mark.parametrize("tokens", [1, 40, 128, 300])
def test_kernels_of_heads_whose_last_dims_are_turned_compile(tokens, capability, monkeypatch):
    op = "npu_grouped_o_proj_pto"
    given = sample(op, torch.device("cpu"), torch.bfloat16, B=1, S=tokens, d=128, dr=64)
    kernels = compiled(op, capability, monkeypatch, **given)
    names = [kernel.name for kernel in kernels if kernel.name != "_added"]
    assert names == ["_last", "_product", "_product"]
    assert all(kernel.metadata.shared <= 99 * 1024 for kernel in kernels) or capability == 90


@pytest.mark.skipif(INTERPRETED, reason="kernels are not compiled")
@gpus
def test_kernels_of_quantized_rows_and_transformed_queries_compile(capability, monkeypatch):
    m = Maker(torch.device("cpu"), torch.bfloat16)
    changes = dict(
        w_uq=m.nz(32, 2 * 512),
        w_kv=m.nz(64, 512),
        gamma_kv=m.normal(512),
        kv_kind="fp8",
        ori_kv=torch.zeros(8, 16, 1, 584, dtype=torch.uint8),
        w_idx_qb=m.nz(32, 16 * 128),
        index_hadamard=True,
    )
    kernels = compiled("npu_sharedkv_prolog_pto", capability, monkeypatch, **changes)
    assert [kernel.name for kernel in kernels] == [
        "_product",
        "_tokens",
        "_write_v4",
        "_product",
        "_heads",
    ]


@pytest.mark.parametrize(
    "op", [op for op in KERNELS if not backends.has_kernel(backends.NPU, BY_NAME[op])]
)
def test_an_npu_says_that_it_has_no_kernel_yet(op, monkeypatch):
    cannot = backends.cannot_run
    monkeypatch.setattr(
        backends, "cannot_run", lambda b, at: None if b is backends.NPU else cannot(b, at)
    )
    monkeypatch.setattr(backends, "choose", lambda key: backends.NPU)
    with pytest.raises(custom.NotSupported, match=r"npu +has no kernel for this op yet"):
        overload(BY_NAME[op])(**sample(op, torch.device("cpu"), torch.float16))


@pytest.mark.skipif(INTERPRETED, reason="kernels are not compiled")
@gpus
def test_a_layer_without_an_output_projection_compiles(capability, monkeypatch):
    whole = dict(w_o_a=None, w_o_b=None)
    kernels = compiled("npu_sparse_attention_v4_pto", capability, monkeypatch, **whole)
    assert [kernel.name for kernel in kernels][-2:] == ["_attend", "_turned"]


@pytest.mark.skipif(INTERPRETED, reason="kernels are not compiled")
def test_kernels_of_a_head_compile(monkeypatch):
    m = Maker(torch.device("cpu"), torch.bfloat16)
    shapes = dict(hc_fn=(4, 256), hc_scale=(1,), hc_base=(4,))
    head = {name: m.normal(*shape, dtype=torch.float32) for name, shape in shapes.items()}
    none = torch.zeros(0)
    for op, changes in (
        ("npu_hc_pre", dict(norm_weight=None)),
        ("npu_hc_pre_grad", dict(norm_weight=None, d_post=none, d_comb=none)),
    ):
        with monkeypatch.context() as patched:
            kernels = compiled(op, 80, patched, **head, **changes)
        assert [kernel.name for kernel in kernels] == KERNELS[op]
