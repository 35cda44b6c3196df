# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Programmatic dependent launch (cuda_ops/common/handover.py): no kernel reads too early."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from ..support import samples
from ..support.kernels import INTERPRETED

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)
if INTERPRETED:
    pytest.skip("the kernels are not those of Gluon", allow_module_level=True)

import triton
import triton.language as tl
from custom.cuda_ops.common import gpu
from custom.dispatch import backends, dispatch_keys, register
from custom.dispatch.registry import BY_NAME, SPECS
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, globaltimer
from triton.runtime.jit import KernelInterface

from custom.bench import (
    case,
    quantized_weights,
    shared_kv_prolog,
    sparse_attention,
    sparse_attention_v4,
)

from ..support.handovers import Launch, faults

OPS = [spec.name for spec in SPECS if backends.has_kernel(backends.CUDA, spec)]
# of DeepSeek-V4's layer
SMALL = shared_kv_prolog.Model("small", 256, 8, 64, 4)
CASES = [
    sparse_attention.layer_case(2, 1, 128, 4096),
    sparse_attention.layer_case(200, 1, 128, 1024),
    sparse_attention.layer_case(1, 1, 16, 1024, 512),
    sparse_attention.mla_prolog_case(1, 128),
    sparse_attention.mla_prolog_case(300, 16),
    *(sparse_attention.mla_prolog_case(b, 8, sparse_attention.KIMI_LINEAR) for b in (1, 300)),
    sparse_attention.indexer_prolog_case(32),
    sparse_attention.indexer_case(2, 4, 12288),
    sparse_attention.attention_case(1, 1, 128, 8192),
    quantized_weights.mla_prolog_case(4, 128, "fp8"),
    quantized_weights.mla_prolog_case(4, 16, "int8"),
    quantized_weights.indexer_prolog_case(4, "fp8"),
    quantized_weights.indexer_prolog_case(4, "int8"),
    quantized_weights.layer_case(2, 128, 4096),
    shared_kv_prolog.output_case(2, SMALL),
    sparse_attention_v4.layer_case(2, 1, SMALL, "CSA", 4096, 512),
    sparse_attention_v4.layer_case(2, 1, SMALL, "HCA", 4096, 0),
    sparse_attention_v4.layer_case(1, 9, SMALL, "CSA", 4096, 512),
]


@pytest.fixture(params=[(9, 0), (10, 0)], ids=["sm90", "sm100"])
def noted(request, monkeypatch) -> list[Launch]:
    """What is launched; nothing runs."""
    found: list[Launch] = []

    def get(kernel: Any, grid: tuple[int, ...]) -> Any:
        def launched(*args: Any, **named: Any) -> None:
            given = dict(zip(kernel.arg_names, args, strict=False)) | named
            found.append(Launch(kernel, given, bool(named.get("launch_pdl"))))

        return launched

    monkeypatch.setattr(gpu, "capability", lambda device: request.param)
    monkeypatch.setattr(gpu, "num_sms", lambda device: 132)
    monkeypatch.setattr(KernelInterface, "__getitem__", get)
    monkeypatch.setattr(
        case.Draw,
        "normal",
        lambda self, *shape, dtype=None, std=1.0: torch.empty(shape, dtype=dtype or self.dtype),
    )
    return found


def launch(name: str, arguments: dict[str, Any]) -> None:
    found = backends.launcher(backends.CUDA, BY_NAME[name])
    assert found is not None
    found.function(**register.bind(register.overload(BY_NAME[name])._schema, (), arguments))


@pytest.mark.parametrize("name", OPS)
def test_no_kernel_of_an_op_reads_too_early(name, noted):
    launch(name, samples.sample(name, torch.device("cpu"), torch.float16))
    assert faults(noted) == []


@pytest.mark.parametrize("which", CASES, ids=lambda c: f"{c.op}, {c.label}")
def test_no_kernel_of_a_model_reads_too_early(which, noted):
    launch(which.op, which.make(torch.device("cpu"), 0))
    assert noted and faults(noted) == []


@triton.jit(do_not_specialize=["tokens"])
def _first(x, w, out, tokens, WAITS: tl.constexpr):
    if WAITS:
        gdc_wait()
    gdc_launch_dependents()
    weight = tl.load(w)
    gdc_wait()
    tl.store(out, tl.load(x) * weight)


@triton.jit
def _later(w, made, out, EARLY: tl.constexpr):
    gdc_launch_dependents()
    if EARLY:
        ahead = tl.load(made)
    else:
        ahead = tl.load(w)
    gdc_wait()
    tl.store(out, tl.load(made) + ahead)


@triton.jit
def _hasty(w, out):
    tl.store(out, tl.load(w))


@pytest.mark.parametrize(
    ("launched", "said"),
    [
        ([(_first, dict(WAITS=True)), (_later, dict(EARLY=False))], []),
        ([(_first, dict(WAITS=False))], ["_first (launch 0) reads w before it waits"]),
        (
            [(_first, dict(WAITS=False)), (_later, dict(EARLY=False))],
            [
                "_first (launch 0) reads w before it waits",
                "_later (launch 1) reads w before it waits",
            ],
        ),
        (
            [(_first, dict(WAITS=True)), (_later, dict(EARLY=True))],
            ["_later (launch 1) reads made of _first before it waits"],
        ),
        (
            [(_first, dict(WAITS=True)), (_hasty, {})],
            ["_hasty (launch 1) never waits"],
        ),
    ],
)
def test_what_is_read_too_early_is_found(launched, said):
    x, w, made, out = (torch.ones(1) for _ in range(4))
    given = [dict(x=x, w=w, out=made, tokens=1), dict(w=w, made=made, out=out)]
    found = [
        Launch(kernel, tensors | constants, True)
        for (kernel, constants), tensors in zip(launched, given, strict=False)
    ]
    assert faults(found) == said


@triton.jit
def _write_late(to, source, n, wait, BLOCK: tl.constexpr):
    """Lets the next kernel begin, as programmatic dependent launch allows, and writes late."""
    gdc_launch_dependents()
    start = globaltimer()
    while globaltimer() - start < wait:
        pass
    for at in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        i = at + tl.arange(0, BLOCK)
        tl.store(to + i, tl.load(source + i, mask=i < n), mask=i < n)


def memory_of(tensor: Tensor) -> Tensor:
    """All its bytes."""
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return whole.set_(tensor.untyped_storage())


def copied(arguments: dict[str, Any]) -> dict[str, Any]:
    """With strides and offsets, in memory of their own."""

    def one(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        there = torch.empty(0, dtype=x.dtype, device=x.device)
        return there.set_(x.untyped_storage().clone(), x.storage_offset(), x.shape, x.stride())

    return {name: one(x) for name, x in arguments.items()}


def results(name: str, arguments: dict[str, Any]) -> list[Tensor]:
    """What the op gives and what it writes, as bits."""
    op = register.overload(BY_NAME[name])
    out = op(**arguments)
    given = [arguments.get(each) for _, each in dispatch_keys.written(op)]
    made = [out] if isinstance(out, Tensor) else [*(out or ())]
    return [x.contiguous().view(torch.uint8) for x in (*made, *given) if x is not None]


CHAINED = [
    "npu_gated_delta_layer_decode", "npu_indexer_prolog_pto", "npu_kv_quant_sparse_flash_attention",
    "npu_lightning_indexer", "npu_lightning_indexer_prolog_pto", "npu_mla_prolog_pto",
    "npu_mla_prolog_v3", "npu_quant_lightning_indexer", "npu_sparse_attention_indices_pto",
    "npu_sparse_attention_pto", "npu_sparse_attention_shared_pto", "npu_sparse_flash_attention",
]  # fmt: skip


def made_late(name: str, old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """The arguments that the op reads before the kernel ahead of it has written them."""
    wrong = []
    for each in [n for n, x in old.items() if isinstance(x, Tensor) and x.numel()]:
        if memory_of(old[each]).equal(memory_of(new[each])):
            continue
        want = results(name, copied(old | {each: new[each]}))
        for _ in range(4):  # a first call, a recorded one, and plans
            given = copied(old)
            source = memory_of(new[each])
            torch.cuda.synchronize()
            to = memory_of(given[each])
            with torch.cuda.device(to.device):
                _write_late[(8,)](to, source, source.numel(), 300_000, BLOCK=1024)
            got = results(name, given)
            if not all(map(torch.equal, got, want)):
                wrong.append(each)
                break
    return wrong


@pytest.mark.parametrize("name", CHAINED)
def test_what_the_kernel_ahead_writes_late_is_read(name, device):
    if device.type != "cuda":
        pytest.skip("launches overlap on a GPU")
    old, new = (samples.sample(name, device, torch.bfloat16, seed) for seed in (1, 7))
    assert made_late(name, old, new) == []


@pytest.mark.parametrize("which", CASES, ids=lambda c: f"{c.op}, {c.label}")
def test_what_the_kernel_ahead_of_a_model_writes_late_is_read(which, device):
    if device.type != "cuda":
        pytest.skip("launches overlap on a GPU")
    old, new = (which.make(device, seed) for seed in (1, 7))
    assert made_late(which.op, old, new) == []
