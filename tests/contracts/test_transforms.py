# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What PyTorch wraps around a call: autocast, torch.func, forward mode, negated views, versions,
inference mode."""

from __future__ import annotations

import copy

import pytest
import torch
from custom.dispatch.register import overload
from custom.dispatch.registry import SPECS
from torch.autograd import forward_ad

import custom

from ..support.calls import assert_same, everything, mutated, outputs, tensors
from ..support.samples import sample

CPU = torch.device("cpu")
# of whole numbers alone: no tangent, nothing to negate
FLOATING = [s for s in SPECS if s.name != "npu_localize_indices"]
WRITING = [s for s in SPECS if mutated(s)]


def ops(specs):
    return pytest.mark.parametrize("spec", specs, ids=lambda spec: spec.name)


def floats(spec, arguments):
    """The inputs that could have a gradient; what is written is none of them."""
    given = tensors(arguments).items()
    return [n for n, t in given if t.is_floating_point() and n not in mutated(spec)]


def written(spec, arguments):
    return {n: arguments[n] for n in mutated(spec) if arguments.get(n) is not None}


@ops(SPECS)
def test_autocast_changes_nothing(spec, device):
    arguments = sample(spec.name, device, torch.float16)
    wanted = everything(spec, overload(spec), arguments)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        got = everything(spec, overload(spec), arguments)
    assert_same(got, wanted)


@ops([s for s in SPECS if s.differentiable])
def test_autocast_changes_no_gradient(spec):
    def gradients():
        arguments = copy.deepcopy(sample(spec.name, CPU, torch.float32))
        given = [arguments[n].requires_grad_() for n in floats(spec, arguments)]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
            out = outputs(overload(spec)(**arguments))
            total = sum(x.double().sum() for x in out if x.requires_grad)
            found = torch.autograd.grad(total, given, allow_unused=True)
        return [x for x in found if x is not None]

    inside = False
    wanted = gradients()
    assert wanted
    inside = True
    assert_same(gradients(), wanted)


@ops(FLOATING)
@pytest.mark.parametrize("how", ["dual", "jvp"])
def test_tangents_are_refused_before_anything_is_written(spec, how):
    good = sample(spec.name, CPU, torch.float32)
    name = floats(spec, good)[0]
    arguments = copy.deepcopy(good)

    def call(x):
        return overload(spec)(**(arguments | {name: x}))

    tangent = torch.ones_like(good[name])
    with pytest.raises(custom.NotSupported, match=f"^{spec.name}: `{name}` has a tangent"):
        if how == "jvp":
            torch.func.jvp(call, (good[name],), (tangent,))
        with forward_ad.dual_level():
            call(forward_ad.make_dual(good[name], tangent))
    for cache, value in written(spec, arguments).items():
        assert torch.equal(value, good[cache])
    with forward_ad.dual_level():
        call(good[name])


@ops([s for s in SPECS if s.differentiable])
def test_gradients_of_torch_func_are_refused_by_name(spec):
    arguments = sample(spec.name, CPU, torch.float32)

    def total(x):
        return outputs(overload(spec)(**(arguments | {name: x})))[0].sum()

    name = floats(spec, arguments)[0]
    with pytest.raises(custom.NotSupported, match=f"^{spec.name}: .* torch.func .*autograd.grad"):
        torch.func.grad(total)(arguments[name])


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@ops([s for s in FLOATING if not mutated(s)])
def test_vmap_is_a_loop(spec):
    arguments = sample(spec.name, CPU, torch.float32)
    name = floats(spec, arguments)[0]
    two = torch.stack([arguments[name], arguments[name].flip(0)])

    def call(x):
        return outputs(overload(spec)(**(arguments | {name: x})))

    wanted = [torch.stack(pair) for pair in zip(*map(call, two), strict=True)]
    assert_same(list(torch.vmap(call)(two)), wanted)


# a negated view is read from memory of its own, and these have to be one tensor
ONE_TENSOR = {("npu_fused_infer_attention_score_v2", name) for name in ("key", "value")}


@ops(SPECS)
def test_negated_views(spec):
    """Inputs are read as what they stand for; a cache is refused before anything is written."""
    good = sample(spec.name, CPU, torch.float32)
    for name, value in tensors(good).items():
        if value.dtype != torch.float32 or (spec.name, name) in ONE_TENSOR:
            continue
        negated = torch._neg_view(-value)
        if name not in mutated(spec):
            wanted = everything(spec, overload(spec), good)
            assert_same(everything(spec, overload(spec), good | {name: negated}), wanted)
            continue
        arguments = copy.deepcopy(good) | {name: negated}
        with pytest.raises(ValueError, match=rf"^{spec.name}: `{name}` is a negated view"):
            overload(spec)(**arguments)
        for cache, kept in written(spec, good).items():
            assert torch.equal(arguments[cache], kept)


@ops(WRITING)
def test_tensors_of_zeros_without_memory(spec):
    """As autograd makes them: read as zeros, and refused where a cache is wanted."""
    good = sample(spec.name, CPU, torch.float32)
    for name, value in tensors(good).items():
        zeros = torch._efficientzerotensor(value.shape, dtype=value.dtype)
        arguments = copy.deepcopy(good) | {name: zeros}
        if name not in mutated(spec):
            wanted = everything(spec, overload(spec), good | {name: torch.zeros_like(value)})
            out = overload(spec)(**arguments)
            caches = [arguments[n] for n in mutated(spec) if n in arguments]
            assert_same([*outputs(out), *caches], wanted)
            continue
        with pytest.raises(ValueError, match=rf"^{spec.name}: `{name}` is PyTorch's ZeroTensor"):
            overload(spec)(**arguments)
        for cache in {*written(spec, good)} - {name}:
            assert torch.equal(arguments[cache], good[cache])


@ops(WRITING)
def test_a_backward_knows_that_its_cache_was_written(spec, device):
    """Autograd refuses what it saved and was written since, by whichever backend."""
    arguments = sample(spec.name, device, torch.float16)
    caches = written(spec, arguments)
    saved = {}
    for name, cache in caches.items():
        if cache.is_floating_point():
            factor = torch.ones((), dtype=cache.dtype, device=device, requires_grad=True)
            saved[name] = (cache * factor).sum()
    versions = {name: cache._version for name, cache in caches.items()}
    with torch.no_grad():
        overload(spec)(**arguments)
    assert all(cache._version > versions[name] for name, cache in caches.items())
    for total in saved.values():
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            total.backward()


@ops(WRITING)
def test_caches_of_inference_mode(spec, device):
    """An engine that makes its caches under inference_mode may call under no_grad."""
    good = sample(spec.name, device, torch.float16)
    wanted = everything(spec, overload(spec), good)
    with torch.inference_mode():
        caches = {name: cache.clone() for name, cache in written(spec, good).items()}
    with torch.no_grad():
        out = overload(spec)(**(copy.deepcopy(good) | caches))
    assert_same([*outputs(out), *caches.values()], wanted)
