# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What every op promises, generated from the specs."""

from __future__ import annotations

import copy
import inspect
from contextlib import contextmanager
from importlib import import_module
from types import SimpleNamespace
from typing import Optional, get_type_hints

import pytest
import torch
from custom.dispatch.backends import made_current
from custom.dispatch.capturing import is_capturing
from custom.dispatch.register import overload
from custom.dispatch.registry import SPECS
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch._subclasses.schema_check_mode import SchemaCheckMode
from torch.utils._pytree import tree_map_only

import custom

from ..support.calls import (
    CPU,
    assert_same,
    every_spec,
    everything,
    mutated,
    outputs,
    tensors,
)
from ..support.samples import sample


@every_spec
def test_every_op_has_a_reference_and_a_sample(spec):
    arguments = sample(spec.name, CPU, torch.float32)
    for out in everything(spec, overload(spec), arguments):
        assert out.isfinite().all()


# an op of which another public function makes its arguments
REACHED = {
    "npu_indexer_loss": "compute_index_loss_sparse",
    "npu_compressor_dense": "npu_compressor",
}


@every_spec
def test_public_function_equals_schema(spec):
    if not hasattr(custom, spec.name):
        forward = spec.name.removesuffix("_backward").removesuffix("_grad")
        names = (forward, forward.removeprefix("npu_"), REACHED.get(forward, forward))
        assert any(hasattr(custom, name) for name in names), f"custom.{spec.name} is missing"
        pytest.skip("reached through another function")
    parameters = inspect.signature(getattr(custom, spec.name)).parameters
    schema = overload(spec)._schema
    ours = [p for p in parameters.values() if p.name != "return_lse"]
    assert [p.name for p in ours] == [a.name for a in schema.arguments]
    for parameter, argument in zip(ours, schema.arguments, strict=True):
        assert (parameter.kind is parameter.KEYWORD_ONLY) == argument.kwarg_only, parameter
        if argument.has_default_value():
            assert parameter.default == argument.default_value, parameter
        else:
            assert parameter.default is parameter.empty, parameter


# ops of six arguments or more without `Arguments`: they hand on what they do not read themselves
UNSPELLED = {
    "npu_kv_quant_sparse_attn_sharedkv",
    "npu_mla_prolog_v3",
    "npu_sparse_attention_indices_pto",
    "npu_sparse_attention_pto",
    "npu_sparse_attention_shared_pto",
    "npu_sparse_attention_v4_pto",
    "npu_sparse_attn_sharedkv",
    "npu_sparse_attn_sharedkv_grad",
}


@every_spec
def test_arguments_of_launchers_equal_the_schema(spec):
    module = import_module(f"custom.dispatch.ops.{spec.module}")
    arguments = overload(spec)._schema.arguments
    if not hasattr(module, "Arguments") or spec.name in UNSPELLED:
        assert len(arguments) < 6 or spec.name in UNSPELLED
        pytest.skip("it has no Arguments: fewer than six, or its check and launchers spell them")
    spelled = {"Tensor": torch.Tensor, "Optional": Optional, "List": list}
    wanted = {a.name: eval(str(a.type), spelled) for a in arguments}
    found = get_type_hints(module.Arguments)
    # a variant takes some of its op's
    assert found == wanted if spec.schema == module.SCHEMA else wanted.items() <= found.items()


# opcheck copies every tensor by itself, also two that have to be one
ONE_TENSOR = {"npu_fused_infer_attention_score_v2"}


@every_spec
def test_opcheck(spec):
    arguments = sample(spec.name, CPU, torch.float32)
    if spec.name in ONE_TENSOR:  # test_compiles_fullgraph_with_dynamic_shapes has the rest
        torch.library.opcheck(
            overload(spec), (), arguments, test_utils="test_autograd_registration"
        )
        with SchemaCheckMode():
            overload(spec)(**arguments)
        return
    torch.library.opcheck(overload(spec), (), arguments)


@every_spec
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_fake_agrees_in_every_dtype(spec, dtype):
    arguments = sample(spec.name, CPU, dtype)
    if spec.name in ONE_TENSOR:
        with FakeTensorMode() as mode:
            fakes = outputs(overload(spec)(**tree_map_only(Tensor, mode.from_tensor, arguments)))
        real = outputs(overload(spec)(**arguments))
        told = [[(x.shape, x.stride(), x.dtype) for x in each] for each in (fakes, real)]
        assert told[0] == told[1]
        return
    torch.library.opcheck(overload(spec), (), arguments, test_utils="test_faketensor")


@every_spec
def test_fake_agrees_whatever_the_flags(spec):
    """Where the call is legal: on the shapes and dtypes of what it gives back."""
    op, good = overload(spec), sample(spec.name, CPU, torch.float32)
    for flag in op._schema.arguments:
        if not isinstance(flag.default_value, bool):
            continue
        changed = good | {flag.name: not good.get(flag.name, flag.default_value)}
        on_meta = tree_map_only(Tensor, lambda t: t.to("meta"), changed)
        try:
            real = outputs(op(**copy.deepcopy(changed)))
        except (TypeError, ValueError):
            continue
        told = [[(x.shape, x.dtype) for x in given] for given in (real, outputs(op(**on_meta)))]
        assert told[0] == told[1], flag.name


@every_spec
def test_compiles_fullgraph_with_dynamic_shapes(spec):
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda **kw: overload(spec)(**kw), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for sizes in ({"B": 2, "S": 3}, {"B": 1, "S": 5}):
        arguments = sample(spec.name, CPU, torch.float32, **sizes)
        with torch.no_grad():
            assert_same(
                everything(spec, compiled, arguments), everything(spec, overload(spec), arguments)
            )


class _Call(torch.nn.Module):
    def __init__(self, op) -> None:
        super().__init__()
        self.op = op

    def forward(self, **arguments):
        return self.op(**arguments)


@every_spec
def test_exports(spec):
    arguments = sample(spec.name, CPU, torch.float32)
    with torch.no_grad():
        program = torch.export.export(_Call(overload(spec)), (), copy.deepcopy(arguments))
        module = program.module()
        assert_same(
            everything(spec, module, arguments), everything(spec, overload(spec), arguments)
        )


@every_spec
def test_meta_device_gives_the_same_shapes(spec):
    arguments = sample(spec.name, CPU, torch.float32)
    on_meta = tree_map_only(Tensor, lambda t: t.to("meta"), arguments)
    for real, meta in zip(
        everything(spec, overload(spec), arguments),
        everything(spec, overload(spec), on_meta),
        strict=True,
    ):
        assert (real.shape, real.dtype, meta.device.type) == (meta.shape, meta.dtype, "meta")


def _turned(x: Tensor) -> Tensor:
    return x.transpose(0, 1).contiguous().transpose(0, 1) if x.ndim > 2 else x


def _wider(x: Tensor) -> Tensor:
    return torch.cat([x, x], -1)[..., : x.shape[-1]] if x.ndim > 1 else x


def _expanded(x: Tensor) -> Tensor:
    return x[:1].expand(x.shape) if x.ndim > 1 else x


@every_spec
def test_outputs_lie_as_the_fake_says_whatever_the_strides(spec, device, backend):
    """Inductor asserts it.  Each tensor by itself, and all; what is refused is refused by both."""
    good = sample(spec.name, device, torch.float16)
    disguises = [{}]
    for disguise in (_turned, _wider, _expanded):
        floats = {n: x for n, x in tensors(good).items() if x.is_floating_point()}
        once = {id(x): disguise(x) for x in floats.values()}  # one given twice stays one
        every = {n: once[id(x)] for n, x in floats.items()}
        disguises += [{n: x} for n, x in every.items() if x.stride() != good[n].stride()] + [every]
    before = custom.dispatch.log.calls[spec.name, backend]
    for disguise in disguises:
        given = copy.deepcopy(good) | disguise
        with FakeTensorMode() as mode:
            wanted = _lie(spec, tree_map_only(Tensor, mode.from_tensor, given))
        assert _lie(spec, given) == wanted, [*disguise]
    assert custom.dispatch.log.calls[spec.name, backend] > before


def _lie(spec, arguments) -> list:
    """How the outputs of a call lie in memory, all in one piece; or the sentence against it."""
    try:
        out = outputs(overload(spec)(**arguments))
    except (ValueError, custom.NotSupported) as error:
        return [str(error)]
    assert all(x.is_contiguous() for x in out)
    return [(x.shape, x.dtype, x.stride(), x.storage_offset()) for x in out]


@every_spec
def test_empty_batch(spec, device, backend):
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    arguments = sample(spec.name, device, dtype, B=0)
    before = custom.dispatch.log.calls[spec.name, backend]
    for out in everything(spec, overload(spec), arguments):
        assert out.isfinite().all()
    assert custom.dispatch.log.calls[spec.name, backend] == before + 1


@every_spec
def test_bad_arguments_get_one_sentence_and_no_cache_is_written(spec):
    """A wrong rank, a wrong dtype and a wrong device, for every tensor argument."""
    good = sample(spec.name, CPU, torch.float32)
    for name, value in tensors(good).items():
        wrong = [
            (ValueError, value.unsqueeze(0).unsqueeze(0).unsqueeze(0)),
            (TypeError, value.to(torch.complex64)),
        ]
        if len(tensors(good)) > 1:  # one alone is on no other device than the rest
            wrong.append(((ValueError, RuntimeError), value.to("meta")))
        for error, bad in wrong:
            arguments = copy.deepcopy(good) | {name: bad}
            with pytest.raises(error) as caught:
                overload(spec)(**arguments)
            message = str(caught.value)
            assert message.startswith(f"{spec.name}: "), message
            assert "`" in message and ("expected" in message or "not" in message), message
            for cache in mutated(spec):
                if cache in good and cache != name:
                    torch.testing.assert_close(arguments[cache], good[cache], rtol=0, atol=0)


@every_spec
def test_lengths_with_gaps_are_refused(spec):
    """Kernels read them one after the other."""
    good = sample(spec.name, CPU, torch.float32)
    for name, value in tensors(good).items():
        if value.ndim == 1 and not value.dtype.is_floating_point and value.numel() > 1:
            strided = torch.stack([value, value], dim=-1)[..., 0]
            with pytest.raises(ValueError, match=rf"^{spec.name}: `{name}` is not contiguous"):
                overload(spec)(**(copy.deepcopy(good) | {name: strided}))


@pytest.mark.parametrize(
    "spec", [s for s in SPECS if s.name.endswith("_pto")], ids=lambda spec: spec.name
)
def test_pto_ops_refuse_non_contiguous_tensors_by_name(spec):
    good = sample(spec.name, CPU, torch.float32)
    for name, value in tensors(good).items():
        strided = torch.stack([value, value], dim=-1)[..., 0]
        if strided.is_contiguous():
            continue
        with pytest.raises(ValueError, match=rf"^{spec.name}: `{name}` is not contiguous"):
            overload(spec)(**(copy.deepcopy(good) | {name: strided}))


@every_spec
def test_inference_ops_refuse_gradients_only_while_grad_mode_is_on(spec):
    if spec.differentiable:
        pytest.skip("this op has a backward")
    arguments = sample(spec.name, CPU, torch.float32)
    floats = [n for n, t in tensors(arguments).items() if t.is_floating_point()]
    if not floats:
        pytest.skip("whole numbers have no gradient")
    name = floats[0]
    arguments[name].requires_grad_()
    with pytest.raises(RuntimeError, match=rf"^{spec.name}: `{name}` requires grad"):
        overload(spec)(**arguments)
    with torch.no_grad():
        overload(spec)(**arguments)


@every_spec
def test_a_backend_that_cannot_run_says_why_and_never_falls_back(spec, monkeypatch):
    arguments = sample(spec.name, CPU, torch.float32)
    monkeypatch.setattr(
        custom.dispatch.backends, "choose", lambda key: custom.dispatch.backends.NPU
    )
    with pytest.raises((custom.BackendUnavailable, custom.NotSupported)) as caught:
        overload(spec)(**arguments)
    lines = str(caught.value).splitlines()
    assert lines[0] == f"{spec.name} cannot run on cpu."
    assert [line.split()[0] for line in lines[1:4]] == ["reference", "cuda", "npu"]
    assert all(f" {name}[" in lines[4] for name in tensors(arguments)), lines[4]


def test_a_launch_makes_the_tensors_device_current(monkeypatch):
    """On a stand-in for a host with two NPUs; on a real host `device` is the last one."""
    made = []

    @contextmanager
    def on(device):
        made.append(device.index)
        yield
        made.append("back")

    monkeypatch.setattr(
        torch, "npu", SimpleNamespace(current_device=lambda: 0, device=on), raising=False
    )
    for index, wanted in ((0, []), (1, [1, "back"])):
        made.clear()
        with made_current(SimpleNamespace(type="npu", index=index)):
            assert made == wanted[:1]
        assert made == wanted
    with made_current(CPU):
        assert made == [1, "back"]


@pytest.mark.parametrize("captures", [None, 0, 1])
def test_a_capture_is_one_of_the_current_or_the_tensors_device(captures, monkeypatch):
    """On a stand-in for a host with two NPUs, the first of them current."""
    current = [0]

    @contextmanager
    def on(device):
        current.append(device.index)
        yield
        current.pop()

    npu = SimpleNamespace(
        current_device=lambda: current[-1],
        device=on,
        is_current_stream_capturing=lambda: current[-1] == captures,
    )
    monkeypatch.setattr(torch, "npu", npu, raising=False)
    places = [SimpleNamespace(type="npu", index=index) for index in range(2)]
    assert [*map(is_capturing, places)] == [captures == 0, captures is not None]
    assert current == [0] and not is_capturing(CPU)


@every_spec
def test_kernels_run_in_the_current_stream_of_the_tensors_device(spec, device):
    """Behind a long wait in that stream, while device 0 is the current one."""
    if device.type == "cpu":
        pytest.skip("a CPU has no streams")
    on = getattr(torch, device.type)
    arguments = sample(spec.name, device, torch.bfloat16)
    wanted = everything(spec, overload(spec), arguments)
    stale = copy.deepcopy(arguments)
    floats = [n for n, t in tensors(arguments).items() if t.is_floating_point()]
    for name in floats:
        stale[name].zero_()
    stream = on.Stream(device)
    stream.wait_stream(on.current_stream(device))
    with on.stream(stream), on.device(0), torch.no_grad():
        wait = torch.zeros(8192, 8192, device=device)
        for _ in range(20):
            wait = wait @ wait
        for name in floats:
            stale[name].copy_(arguments[name])
        out = overload(spec)(**stale)
    stream.synchronize()
    got = [
        *outputs(out),
        *(stale[n] for n in mutated(spec) if n in stale),
    ]
    for x, y in zip(got, wanted, strict=True):
        # some gradients are added up in any order
        assert (x.double() - y.double()).norm() <= 1e-2 * y.double().norm(), spec.name


def test_a_second_definition_names_its_owner():
    from custom.dispatch import register

    with pytest.raises(RuntimeError, match="already defined by another package"):
        register._refuse_duplicate(SPECS[0])


def test_nothing_unmarked_is_written():
    for spec in SPECS:
        arguments = sample(spec.name, CPU, torch.float32)
        before = copy.deepcopy(arguments)
        overload(spec)(**arguments)
        for name in set(tensors(arguments)) - set(mutated(spec)):
            torch.testing.assert_close(arguments[name], before[name], rtol=0, atol=0)
