# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""A step as one NPU graph, over stand-ins for an NPU's graphs: captured once, replayed with other
values, and nothing but copies into its buffers beside it."""

from __future__ import annotations

import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
from custom.graph_mode import Replayed
from torch.utils._python_dispatch import TorchDispatchMode

import custom

from ..support.npu_graph import Graph, stand_in

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def graphs(monkeypatch):
    with torch.no_grad():
        yield stand_in(monkeypatch)


class Called(TorchDispatchMode):
    """The ops that the host calls; what a graph replays is not among them."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.names = []
        replay = Graph.replay

        def aside(graph):
            names, self.names = self.names, []
            replay(graph)
            self.names = names

        monkeypatch.setattr(Graph, "replay", aside)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def added(state, x):
    (total,) = state
    total.add_(x)
    return total * 2


def written(state, x):
    (cache,) = state
    cache[:2] = x
    return cache.sum() + x


def test_captured_at_the_second_call_and_replayed(graphs, monkeypatch):
    cache = torch.arange(4.0)
    step = Replayed(written)
    values = [torch.full((2,), float(i)) for i in range(5)]
    called = Called(monkeypatch)
    for number, x in enumerate(values):
        plain = cache.clone()
        with called:
            called.names = []
            out = step((cache,), x)
        assert torch.equal(out, written((plain,), x)) and torch.equal(cache, plain)
        assert len(graphs.captured) == (number > 0)
        if number > 1:  # no allocation, no host read: the input goes into its buffer
            assert called.names == ["aten::copy_"]
    assert graphs.captured[0].replays == 4
    assert values[1].tolist() == [1, 1]  # the caller's tensor is none of the graph's buffers


def test_another_shape_and_other_state_are_captured_anew(graphs):
    step, one, other = Replayed(lambda state, x: x * state[0]), torch.ones(1), torch.full((1,), 3.0)
    for state in (one, other):
        for size in (2, 2, 5, 5, 2):
            assert torch.equal(step((state,), torch.ones(size)), state.expand(size))
    assert [graph.replays for graph in graphs.captured] == [2, 1, 2, 1]


def test_state_that_is_given_other_memory_is_captured_anew(graphs):
    step, state, x = Replayed(lambda state, x: x * state[0]), torch.ones(1), torch.ones(2)
    for value in (1.0, 1.0, 3.0, 3.0, 3.0):
        if value != state.item():
            state.data = torch.full((1,), value)
        assert step((state,), x).tolist() == [value] * 2
    assert [graph.replays for graph in graphs.captured] == [1, 2]


def _autocast():
    return torch.autocast("cpu", torch.bfloat16)


@contextmanager
def _deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def _set(name, value):
    before = getattr(custom.config, name)
    setattr(custom.config, name, value)
    try:
        yield
    finally:
        setattr(custom.config, name, before)


@contextmanager
def _tf32():
    matmul = torch.backends.cuda.matmul
    before = getattr(matmul, "fp32_precision", None)
    if before is None:
        pytest.skip("torch up to 2.8 has no such name")
    matmul.fp32_precision = "tf32"
    try:
        yield
    finally:
        matmul.fp32_precision = before


@pytest.mark.parametrize(
    "other",
    [
        _tf32,
        _autocast,
        _deterministic,
        torch.inference_mode,
        lambda: _set("backend", "reference"),
        lambda: _set("debug", True),
    ],
    ids=["tf32", "autocast", "deterministic", "inference", "backend", "debug"],
)
def test_other_settings_are_captured_anew(graphs, other):
    step, x = Replayed(lambda state, x: x @ x.t()), torch.rand(3, 3)
    for setting in (nullcontext, other, nullcontext, other, nullcontext, other):
        with setting():
            plain, got = x @ x.t(), step((), x)
        assert got.dtype == plain.dtype and torch.equal(got, plain)
    assert [graph.replays for graph in graphs.captured] == [2, 2]


def test_other_inputs_are_captured_anew(graphs):
    """Of other strides, one tensor for two, numbers of another type: each pair thrice."""

    def called(first, second):
        step, before = Replayed(lambda state, *inputs: function(*inputs)), len(graphs.captured)
        for inputs in (first, second) * 3:
            plain, got = function(*inputs), step((), *inputs)
            assert got.dtype == plain.dtype and torch.equal(got, plain)
            assert got.stride() == plain.stride()
        return [graph.replays for graph in graphs.captured[before:]]

    a, b = torch.rand(2, 3), torch.rand(2, 3)
    function = torch.relu
    assert called((a,), (torch.rand(3, 2).t(),)) == [2, 2]
    function = lambda x, y: x - 2 * y  # noqa: E731
    assert called((a, a), (a, b)) == [2, 2]
    assert called((a.int(), 1), (a.int(), 1.0)) == [2, 2]
    # rows of a wider tensor have buffers of their own: one graph serves them
    assert called((torch.rand(2, 5)[:, :3], a), (torch.rand(2, 7)[:, :3], a)) == [5]


def test_two_names_of_one_tensor_stay_one(graphs):
    """Kernels look whether a value is the key."""
    step, x = Replayed(lambda state, k, v: k + v if k is v else k * 0), torch.ones(2)
    for _ in range(3):
        assert step((), x, x).tolist() == [2, 2]


def test_inputs_on_two_devices_are_handed_to_the_function(graphs):
    """A graph would not see the second's next values."""
    step = Replayed(lambda state, x, other: x + (other.device != x.device))
    for _ in range(3):
        assert step((), torch.ones(2), torch.empty(2, device="meta")).tolist() == [2, 2]
    assert not graphs.captured


def test_a_host_read_is_refused(graphs):
    step = Replayed(lambda state, x: x * x.sum().item())
    x = torch.ones(2)
    step((), x)
    with pytest.raises(RuntimeError, match="capture: the function waits for the device"):
        step((), x)


def test_gradients_are_recorded_step_by_step(graphs):
    step = Replayed(lambda state, x: x * state[0])
    weight = torch.ones(1, requires_grad=True)
    with torch.enable_grad():
        for _ in range(3):
            step((weight,), torch.ones(2)).sum().backward()
    assert weight.grad.item() == 6 and not graphs.captured


def test_devices_without_a_graph_call_the_function():
    step = Replayed(added)
    total = torch.zeros(2)
    for count in (1, 2, 3):
        assert step((total,), torch.ones(2)).tolist() == [2 * count] * 2


def test_the_demo_decodes_by_graphs(graphs, monkeypatch):
    pytest.importorskip("transformers", minversion="5.17")
    monkeypatch.syspath_prepend(EXAMPLES)
    sys.modules.pop("deepseek_v32_decode", None)
    import deepseek_v32_decode as demo

    model = demo.make_model(64, topk=8)
    tokens, lengths = torch.randint(1, 64, (2, 7)), torch.tensor([9, 4], dtype=torch.int32)

    def decoded(server):
        steps = [(tokens[:, :3], lengths - 1)]
        steps += [(tokens[:, i : i + 1], lengths + i - 3) for i in range(3, 7)]
        return [server.forward(*step) for step in steps]

    called = Called(monkeypatch)
    server = demo.Server(model, 2, 32)
    with torch.inference_mode():
        by_graphs = decoded(server)
        assert len(graphs.captured) == model.config.num_hidden_layers
        assert all(graph.replays == 3 for graph in graphs.captured)
        with called:
            server.forward(tokens[:, :1], lengths + 4)
        assert not [name for name in called.names if name.startswith("custom::")]
        for _ in range(2):  # as long as a prompt
            server.forward(torch.ones(2, 9, dtype=torch.long), lengths + 5)
        assert len(graphs.captured) == model.config.num_hidden_layers
        monkeypatch.setattr(Replayed, "__call__", lambda self, *given: self._fn(*given))
        plain = decoded(demo.Server(model, 2, 32))
    for got, wanted in zip(by_graphs, plain, strict=True):
        torch.testing.assert_close(got, wanted)


def assert_generates_by_graphs(model, inputs, graphs):
    from custom.integrations.transformers import use

    from ..support.models import NEW, greedy

    expected = greedy(model, inputs)
    with use():
        assert torch.equal(greedy(model, inputs), expected)
    replays = [graph.replays for graph in graphs.captured]
    layers = model.config.num_hidden_layers
    # the prompt, the first step, then graphs; more where the pages ran out on the way
    assert len(replays) >= layers and sum(replays) >= layers * (NEW - 4)


def test_a_transformers_model_generates_by_graphs(graphs):
    pytest.importorskip("transformers", minversion="5.17")
    from ..support.models import deepseek, ragged

    assert_generates_by_graphs(deepseek(), ragged(), graphs)


def test_a_deepseek_v4_generates_by_graphs(graphs):
    """Steps that close entries of both kinds, and others, by the same graph."""
    pytest.importorskip("transformers", minversion="5.17")
    from ..support.models import deepseek_v4

    inputs = dict(input_ids=torch.randint(1, 128, (2, 30)))
    assert_generates_by_graphs(deepseek_v4(), inputs, graphs)
