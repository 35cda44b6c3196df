# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What trainers do with an op that has a gradient: parts of it, checkpoints, saved tensors moved
away, steps in place, gradients with odd strides."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
import torch
from custom.dispatch.register import overload
from custom.dispatch.registry import SPECS, Spec
from torch import Tensor
from torch.autograd import graph
from torch.utils.checkpoint import checkpoint

import custom

from ..support.calls import CPU, outputs
from ..support.samples import sample

every_gradient = pytest.mark.parametrize(
    "spec", [s for s in SPECS if s.differentiable], ids=lambda spec: spec.name
)
# of ops with sinks, the argument [.., N, D]
HEADS = {"npu_sparse_attn_sharedkv": "q", "npu_sparse_flash_attention": "query"}


class Call:
    """One call of an op whose inputs `leaves` want gradients."""

    def __init__(self, spec: Spec, leaves: set[str] | None = None) -> None:
        self.op: Callable[..., Any] = overload(spec)
        self.arguments = sample(spec.name, CPU, torch.float64)
        self.leaves: dict[str, Tensor] = {}
        for name, value in self.arguments.items():
            if not isinstance(value, Tensor):
                continue
            self.arguments[name] = value.clone()
            if value.is_floating_point() and (leaves is None or name in leaves):
                self.leaves[name] = self.arguments[name].requires_grad_()

    def run(self, *values: Any) -> tuple[Tensor, ...]:
        given = dict(zip(self.arguments, values, strict=True)) if values else self.arguments
        return outputs(self.op(**given))

    def gradients(self, out: tuple[Tensor, ...], grads: list[Tensor] | None = None, **more: Any):
        out = tuple(x for x in out if x.requires_grad)
        grads = weights(out) if grads is None else grads
        inputs = [*self.leaves.values()]
        found = torch.autograd.grad(out, inputs, grads, allow_unused=True, **more)
        return {n: x for n, x in zip(self.leaves, found, strict=True) if x is not None}


def weights(out: tuple[Tensor, ...]) -> list[Tensor]:
    torch.manual_seed(3)
    return [torch.randn_like(x) for x in out]


def whole(spec: Spec) -> dict[str, Tensor]:
    call = Call(spec)
    found = call.gradients(call.run())
    assert found
    return found


def assert_equal(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for name, x in wanted.items():  # those of gates are float32, whatever the inputs are
        least = 1e4 * torch.finfo(x.dtype).eps
        close = partial(torch.testing.assert_close, rtol=least, atol=least, equal_nan=True)
        close(got[name], x, msg=lambda text, name=name: f"{name}: {text}")


@every_gradient
def test_one_input_at_a_time(spec):
    for name, wanted in whole(spec).items():
        call = Call(spec, {name})
        assert_equal(call.gradients(call.run()), {name: wanted})


@every_gradient
def test_one_output_at_a_time(spec):
    wanted = whole(spec)
    total = {name: torch.zeros_like(value) for name, value in wanted.items()}
    for number in range(sum(x.requires_grad for x in Call(spec).run())):
        call = Call(spec)
        out = tuple(x for x in call.run() if x.requires_grad)
        for name, x in call.gradients((out[number],), [weights(out)[number]]).items():
            total[name] += x
    assert_equal(total, wanted)


@every_gradient
def test_a_graph_that_is_kept(spec):
    call = Call(spec)
    out = call.run()
    first = call.gradients(out, retain_graph=True)
    assert_equal(call.gradients(out), first)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@every_gradient
def test_several_gradients_at_once(spec):
    """As a Jacobian takes them with vectorize=True; with sinks where an op can have some."""
    call = Call(spec)
    if any(a.name == "sinks" for a in call.op._schema.arguments):
        call.leaves["sinks"] = torch.randn(call.arguments[HEADS[spec.name]].shape[-2]).double()
        call.arguments["sinks"] = call.leaves["sinks"].requires_grad_()
    out = tuple(x for x in call.run() if x.requires_grad)
    each = [weights(out), [torch.ones_like(x) for x in out]]
    one, two = (call.gradients(out, grads, retain_graph=True) for grads in each)
    both = [torch.stack(pair) for pair in zip(*each, strict=True)]
    got = call.gradients(out, both, is_grads_batched=True)
    assert_equal(got, {name: torch.stack([x, two[name]]) for name, x in one.items()})


@every_gradient
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(spec, reentrant):
    call = Call(spec)
    out = checkpoint(call.run, *call.arguments.values(), use_reentrant=reentrant)
    # a reentrant one has every output require grad
    plain = Call(spec).run()
    out = tuple(x for x, same in zip(out, plain, strict=True) if same.requires_grad)
    torch.autograd.backward(out, weights(out))
    got = {name: x.grad for name, x in call.leaves.items() if x.grad is not None}
    assert_equal(got, whole(spec))


@every_gradient
@pytest.mark.parametrize(
    "where",
    [
        graph.save_on_cpu,
        partial(graph.saved_tensors_hooks, lambda x: x.numpy(), torch.from_numpy),
        partial(torch.autograd.detect_anomaly, check_nan=False),
    ],
    ids=["save_on_cpu", "hooks", "anomaly"],
)
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_saved_tensors_that_were_away(spec, where: Callable[[], AbstractContextManager[Any]]):
    call = Call(spec)
    with where():
        out = call.run()
        assert_equal(call.gradients(out), whole(spec))


@every_gradient
@pytest.mark.parametrize("kind", ["expanded", "every other"])
def test_gradients_with_odd_strides(spec, kind):
    def odd(x: Tensor) -> Tensor:
        if kind == "expanded":  # of a sum
            return x.new_ones(()).expand(x.shape)
        return torch.stack([x.detach(), x.detach().cos()], -1)[..., 0]

    call = Call(spec)
    out = tuple(x for x in call.run() if x.requires_grad)
    grads = [odd(x) for x in out]
    dense = call.gradients(out, [x.contiguous() for x in grads], retain_graph=True)
    assert_equal(call.gradients(out, grads), dense)


@every_gradient
def test_outputs_are_no_views(spec):
    """`out += residual` is what a model does to an output: refused only where it was saved."""
    for grad in (torch.enable_grad, torch.no_grad):
        with grad():
            for out in Call(spec).run():
                assert not out._is_view()
    call = Call(spec)
    out = tuple(x for x in call.run() if x.requires_grad)
    grads = weights(out)
    for x in out:
        x *= 4  # exact
    try:
        got = call.gradients(out, grads)
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
    else:
        assert_equal(got, {name: 4 * x for name, x in whole(spec).items()})


@every_gradient
def test_inputs_that_changed_are_noticed(spec):
    wanted = whole(spec)
    for name in wanted:
        call = Call(spec)
        leaves, call.arguments = call.arguments, dict(call.arguments)
        call.arguments[name] = leaves[name] * 1
        out = call.run()
        with torch.no_grad():
            call.arguments[name].mul_(2)
        try:
            got = call.gradients(out)
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)
        else:  # it was not needed
            assert_equal(got, wanted)


@every_gradient
def test_second_derivatives_are_right_or_refused(spec):
    call = Call(spec)
    out = tuple(x for x in call.run() if x.requires_grad)
    grads = [torch.ones_like(x).requires_grad_() for x in out]
    if spec.name == "npu_merge_states":  # whose gradient is made of PyTorch's own operations
        total = sum((x**2).sum() for x in call.gradients(out, grads, create_graph=True).values())
        assert isinstance(total, Tensor)
        found = torch.autograd.grad(total, grads)
        assert all(x.isfinite().all() for x in found)
        return
    with pytest.raises(RuntimeError, match=r"^npu_\w+: `\w+` requires grad, .* create_graph=True"):
        call.gradients(out, grads, create_graph=True)


@every_gradient
@pytest.mark.parametrize("backward", [True, False])
def test_nothing_is_kept_behind(spec, backward):
    gc.collect()
    gc.disable()  # a reference cycle would keep tensors until it comes by
    try:
        call = Call(spec)
        out = call.run()
        alive = [weakref.ref(x) for x in (*out, *call.leaves.values())]
        if backward:
            call.gradients(out)
        del call, out
        assert not [ref for ref in alive if ref() is not None]
    finally:
        gc.enable()


@every_gradient
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_by_aot_eager(spec, dynamic):
    torch._dynamo.reset()
    call = Call(spec)
    call.op = torch.compile(call.op, backend="aot_eager", dynamic=dynamic)
    assert_equal(call.gradients(call.run()), whole(spec))


def test_a_buffer_for_final_states_may_be_used_again():
    weight, buffer = torch.randn(16, 4, requires_grad=True), torch.empty(2, 16, 3)
    for _ in range(2):
        x = torch.randn(2, 16, 9, requires_grad=True)
        out, states = custom.causal_conv1d_fn(
            x, weight, return_final_states=True, final_states_out=buffer
        )
        (out.sum() + states.sum()).backward()
        assert torch.equal(buffer, states) and not buffer.requires_grad
        assert torch.equal(buffer, x[..., -3:]) and x.grad is not None
