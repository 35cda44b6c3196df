# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Which kernels a GPU and a Triton get, and the one sentence where they get none."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from custom.dispatch import backends, log, register
from custom.dispatch.registry import BY_NAME, SPECS

import custom
from custom import info

pytest.importorskip("triton")

import triton
from custom.cuda_ops.common import gluon_names, gpu
from custom.cuda_ops.delta_rule import chunk_gated_delta_rule_grad
from custom.cuda_ops.sparse_attention import sparse_flash_attention
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from triton.backends.nvidia.driver import CudaDriver

from ..portability.gpus import GPUS
from ..support.compile_for_hopper import stand_in
from ..support.samples import sample
from ..support.stages import launched

CPU = torch.device("cpu")
GRADIENT = "npu_chunk_gated_delta_rule_grad"


@pytest.fixture
def hopper(monkeypatch):
    """An H100 in place of the CPU; afterwards Gluon is asked anew."""
    monkeypatch.setattr(gpu, "capability", lambda device: (9, 0))
    monkeypatch.setattr(log, "_said", set())
    yield
    monkeypatch.undo()
    gpu.without_gluon.cache_clear()


@pytest.mark.parametrize("lacking", [[], ["barrier", "mma_v2"]], ids=str)
def test_hopper_without_a_whole_gluon_runs_plain_kernels_and_says_so_once(
    lacking, hopper, monkeypatch, capsys
):
    monkeypatch.setattr(gluon_names, "LACKING", lacking)
    gpu.without_gluon.cache_clear()
    assert [gpu.is_hopper(CPU) for _ in range(2)] == [not lacking] * 2
    said = capsys.readouterr().err
    assert said.count("custom: ") == bool(lacking)
    assert not lacking or "no barrier, mma_v2 in Gluon" in said
    described = gpu.described(CPU)
    assert described.startswith("sm_90, ")
    assert ("plain kernels run" if lacking else "kernels in Gluon") in described


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)], ids=str)
def test_gluon_is_for_hopper_alone(capability, monkeypatch):
    monkeypatch.setattr(gpu, "capability", lambda device: capability)
    assert not gpu.is_hopper(CPU)
    assert gpu.described(CPU).startswith(f"sm_{capability[0]}{capability[1]}, ")


@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)], ids=str)
def test_info_says_what_is_refused_on_a_gpu(capability, breaks, monkeypatch):
    """For every op the cell of the report is what a small call would get."""
    cuda = SimpleNamespace(
        is_available=lambda: True, device_count=lambda: 1, get_device_name=lambda index: "X"
    )
    monkeypatch.setattr(info.torch, "cuda", cuda)
    monkeypatch.setattr(gpu, "capability", lambda device: capability)
    monkeypatch.setattr(gpu, "num_sms", lambda device: 132)
    small = GPUS[10 * capability[0] + capability[1]].shared_memory
    monkeypatch.setattr(gpu, "shared_memory", lambda device: small)
    monkeypatch.setattr(chunk_gated_delta_rule_grad, "_BREAKS_ON_SM_100", breaks)
    lines = list(info.report())
    rows = (line.split() for line in lines if line.startswith("  npu_"))
    said = {op: cuda for op, _, cuda, _ in rows}
    refused = {}
    for spec in SPECS:
        arguments = sample(spec.name, CPU, torch.bfloat16)
        arguments = register.bind(register.overload(spec)._schema, (), arguments)
        device = torch.device("cuda", 0)
        refused[spec.name] = backends.reason_against(backends.CUDA, spec, device, arguments)
    assert said == {op: "no" if reason else "yes" for op, reason in refused.items()}
    wanted = {GRADIENT} if breaks and capability == (10, 0) else set()
    assert {op for op, reason in refused.items() if reason} == wanted
    named = [line for line in lines if line.startswith(f"  cuda, {GRADIENT}: triton ")]
    assert len(named) == len(wanted) and all("pip install 'triton>=3.8'" in x for x in named)


@pytest.mark.skipif(gpu.INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.parametrize("capability, kib", [((8, 9), 99), ((9, 0), 227)], ids=str)
@pytest.mark.parametrize(
    "count, heads, rank, rope",
    [(128, 128, 512, 64), (1, 16, 512, 64), (1, 128, 512, 64), (2, 64, 640, 0)],
)
def test_sparse_attention_takes_no_more_shared_memory_than_its_tiles_are_chosen_by(
    count, heads, rank, rope, capability, kib, monkeypatch
):
    compiled = stand_in(monkeypatch, 10 * capability[0] + capability[1])
    monkeypatch.setattr(FakeTensor, "data_ptr", lambda self: 0)
    monkeypatch.setattr(gpu, "capability", lambda device: capability)
    monkeypatch.setattr(gpu, "is_hopper", lambda device: False)
    monkeypatch.setattr(gpu, "num_sms", lambda device: 132)
    monkeypatch.setattr(gpu, "shared_memory", lambda device: kib * 1024)
    with FakeTensorMode():
        half = partial(torch.empty, dtype=torch.bfloat16)
        launched(
            "sparse_flash_attention",
            query=half(count, 1, heads, rank),
            key=half(count, 4096, 1, rank),
            value=None,
            sparse_indices=torch.empty(count, 1, 1, 2048, dtype=torch.int32),
            scale_value=0.1,
            query_rope=half(count, 1, heads, rope) if rope else None,
            key_rope=half(count, 4096, 1, rope) if rope else None,
        )
    tile = sparse_flash_attention.tiles(count, heads, 2048, rank, rope, False, 2, CPU)
    predicted = sparse_flash_attention.shared_bytes(tile, rope, gpu.reads_shared(CPU))
    assert 0 < compiled[0].metadata.shared <= predicted <= kib * 1024


@pytest.mark.parametrize(
    "op", ["npu_lightning_indexer", "npu_quant_lightning_indexer", "npu_sparse_flash_attention"]
)
def test_sizes_that_do_not_fit_are_named(op, monkeypatch):
    given = sample(op, CPU, torch.bfloat16)
    arguments = register.bind(register.overload(BY_NAME[op])._schema, (), given)
    unsupported = backends.launcher(backends.CUDA, BY_NAME[op]).unsupported
    assert unsupported(**arguments) is None
    monkeypatch.setattr(gpu, "shared_memory", lambda device: 1024)
    heads, dim = arguments["query"].shape[-2:]
    assert f"no tile of N={heads}, D={dim}" in unsupported(**arguments)


@pytest.mark.parametrize(
    "backend, wrong, right",
    [(backends.NPU, "triton", "triton-ascend"), (backends.CUDA, "triton-ascend", "triton")],
    ids=["npu", "cuda"],
)
def test_the_other_triton_is_one_sentence_with_its_remedy(backend, wrong, right, monkeypatch):
    monkeypatch.setattr(backends, "installed", lambda name: "3.6.0" if name == wrong else None)
    assert backends.cannot_run(backend, SimpleNamespace(type=backend.device)) == (
        f"{wrong} is installed, this backend needs {right} alone: pip uninstall -y {wrong}, then "
        f"pip install {right}"
    )


@pytest.mark.skipif(gpu.INTERPRETED, reason="the interpreter runs on the CPU")
@pytest.mark.parametrize("backend, of", [(backends.NPU, "npu"), (backends.CUDA, "cuda")], ids=str)
def test_tensors_of_another_device_are_one_sentence(backend, of, monkeypatch):
    monkeypatch.setattr(backends, "interpreting", lambda: False)
    said = backends.cannot_run(backend, torch.device("meta"))
    assert said == f"inputs are on meta, this backend needs {of}"


@pytest.mark.parametrize("version", ["3.4.0", "3.5.0", "3.5.1+git0", "3.10.0", "2.3.1", "4.0"])
def test_a_triton_that_is_too_old_or_too_new_is_one_sentence(version, monkeypatch):
    said = []
    monkeypatch.setattr(backends.log, "once", lambda key, message: said.append(message))
    monkeypatch.setattr(backends, "installed", lambda name: version if name == "triton" else None)
    monkeypatch.setattr(gpu, "capability", lambda device: (8, 0))
    reason = backends.cannot_run(backends.CUDA, torch.device("cuda", 0))
    if version in ("3.4.0", "2.3.1"):
        assert reason is not None and f"triton {version} is installed" in reason
    else:
        assert reason is None
    too_new = version in ("3.10.0", "4.0")
    assert ["newer than 3.9" in message for message in said] == [True] * too_new


@pytest.mark.skipif(gpu.INTERPRETED, reason="the interpreter needs no GPU")
@pytest.mark.parametrize(
    "capability, hip, said",
    [
        ((7, 5), None, "cuda:0 is an sm_75, this backend needs sm_80 (Ampere) or later"),
        # of an MI210, and of an H100
        ((9, 0), "7.1.0", "this torch is for AMD GPUs (ROCm 7.1.0)"),
        ((8, 0), None, None),
        ((9, 0), None, None),
        ((12, 1), None, None),
    ],
    ids=str,
)
def test_a_gpu_that_the_kernels_are_not_for_is_one_sentence(capability, hip, said, monkeypatch):
    monkeypatch.setattr(gpu, "capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    device = torch.device("cuda", 0)
    for spec in SPECS:
        reason = backends.reason_against_all(backends.CUDA, spec, device)
        assert reason is None if said is None else reason.startswith(said)
    assert said is None or "set CUSTOM_BACKEND=reference" in info._chosen_by(0)


@pytest.mark.skipif(gpu.INTERPRETED, reason="the interpreter runs on the CPU")
@pytest.mark.parametrize("driver", [None, object.__new__(CudaDriver)], ids=["no GPU", "a GPU"])
def test_cpu_tensors_for_the_gpu_are_one_sentence(driver, monkeypatch):
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    monkeypatch.setattr(custom.config, "backend", "cuda")
    q = torch.ones(1, 4, 2, 64, dtype=torch.float16)
    with pytest.raises(
        custom.NotSupported, match=r"cuda +inputs are on cpu, where .* move them to"
    ):
        custom.npu_fused_attention(q, q, q)


def test_a_launcher_on_a_gpu_runs_through_launches(monkeypatch):
    """Which compiles its kernels side by side; on a CPU it is called as it is."""
    calls = []
    monkeypatch.setattr(backends, "made_current", lambda device: nullcontext())
    monkeypatch.setattr(
        backends, "_of_launches", lambda *_: lambda *given: nullcontext(calls.append(given))
    )
    spec, function = BY_NAME["npu_merge_topk"], lambda x: x
    for device in (torch.device("cuda", 1), CPU):
        with backends.Runner(spec, backends.CUDA, device, function).ready({"x": 5}):
            pass
    assert calls == [(function, {"x": 5})]
