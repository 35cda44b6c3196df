# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""npugraph_ex, or torchair's older reduce-overhead: one direct call, no clone, one capture.

GRAPH_BACKEND names the one to check: a process holds only one of them, as both patch the same op.
Where there is an NPU, all of this runs on it; elsewhere on a CPU, over stand-ins (npu_graph.py).

    GRAPH_BACKEND=npugraph_ex python -m pytest tests/torchair/graph_checks.py
"""

from __future__ import annotations

import copy
import os

import pytest
import torch
import torch_npu
from custom.dispatch.register import overload
from custom.dispatch.registry import BY_NAME, SPECS
from torch import Tensor
from torch._dynamo.utils import counters

from tests.support.calls import mutated, other, tensors
from tests.support.decode_step import DecodeStep, steps
from tests.support.samples import sample

from . import npu_graph

DEVICE = torch.device("npu" if torch_npu.npu.is_available() else "cpu")
if DEVICE.type == "cpu":
    npu_graph.install()
NAME = os.environ["GRAPH_BACKEND"]
if NAME == "npugraph_ex":
    torch._dynamo.lookup_backend(NAME)
    from npugraph_ex._acl_concrete_graph.fx2acl_converter import AclConcreteGraph

    BACKEND = NAME
else:
    import torchair
    from torchair._acl_concrete_graph.fx2acl_converter import AclConcreteGraph

    config = torchair.CompilerConfig()
    config.mode = NAME
    BACKEND = torchair.get_npu_backend(compiler_config=config)

COPY = torch.ops.aten.copy_.default
OURS = [overload(spec) for spec in SPECS]
every_spec = pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)


@pytest.fixture
def graphs(monkeypatch) -> list[torch.fx.Graph]:
    """The final FX graphs."""
    torch._dynamo.reset()
    npu_graph.Graph.captured.clear()
    counters.clear()
    found: list[torch.fx.Graph] = []
    optimise = AclConcreteGraph.optimize_graph_without_runtime

    def keep(self, *args, **options):
        optimise(self, *args, **options)
        found.append(self.fx_graph.graph)

    monkeypatch.setattr(AclConcreteGraph, "optimize_graph_without_runtime", keep)
    return found


def captures() -> int:
    """How often the backend captured a graph, as it counts itself."""
    counted = counters["npugraph_ex"]
    assert not [name for name in counted if name.startswith("recapture")], counted
    return sum(counted.values())


def compiled(function, dynamic: bool):
    return torch.compile(function, backend=BACKEND, fullgraph=True, dynamic=dynamic)


def assert_direct(graph: torch.fx.Graph, expected: list) -> None:
    """`expected` of our ops are called, and no cache is copied, cloned or functionalised."""
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    assert [node.target for node in nodes if node.target in OURS] == expected
    targets = {str(node.target) for node in nodes}
    assert not [t for t in targets if "clone" in t or "auto_functionalized" in t], targets
    copies = [node for node in nodes if node.target is COPY]
    # torchair leaves copy_(cache, cache), which torch_npu's copy_ returns from at once
    assert all(copied.args[0] is copied.args[1] for copied in copies)
    assert NAME == "reduce-overhead" or not copies


def assert_one_graph(calls: int) -> None:
    assert captures() == 1
    if DEVICE.type == "cpu":
        (captured,) = npu_graph.Graph.captured
        assert captured.replays == calls


def same(got: object, wanted: object) -> None:
    torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)


@every_spec
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_op_is_called_directly_and_captured_once(spec, dynamic, graphs):
    first, second = sample(spec.name, DEVICE, torch.bfloat16), other(spec, DEVICE, torch.bfloat16)
    constants = {name: value for name, value in first.items() if name not in tensors(first)}
    step = compiled(lambda **given: overload(spec)(**given, **constants), dynamic)
    caches = {name: first[name] for name in mutated(spec) if name in first}
    eager_caches = copy.deepcopy(caches)
    with torch.no_grad():
        for arguments in (first, second, first, second):
            given = tensors(arguments) | caches
            wanted = overload(spec)(**given | eager_caches, **constants)
            # the first call's memory becomes the graph's: each call brings its own
            same(step(**copy.deepcopy(tensors(arguments)) | caches), wanted)
            same(caches, eager_caches)
    (graph,) = graphs
    assert_direct(graph, [overload(spec)])
    assert_one_graph(4)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_whole_decode_step_is_captured_once(dynamic, graphs):
    model = DecodeStep(DEVICE, torch.bfloat16)
    eager = copy.deepcopy(model)
    step = compiled(model, dynamic)
    calls = steps(DEVICE)
    with torch.no_grad():
        for call in calls:
            same(step(*copy.deepcopy(call)), eager(*call))
            for name in DecodeStep.written:
                same(getattr(model, name), getattr(eager, name))
    (graph,) = graphs
    ours = ["npu_sparse_attention_pto", "npu_fused_sigmoid_gating_delta_rule_update"]
    assert_direct(graph, [overload(BY_NAME[name]) for name in ours])
    assert_one_graph(len(calls))


def test_another_cache_or_batch_is_captured_anew(graphs):
    """What the checks above count is real: these must capture again, and stay right."""
    spec = BY_NAME["npu_fused_sigmoid_gating_delta_rule_update"]
    step = compiled(lambda **given: overload(spec)(**given), True)
    kept: list[dict[str, object]] = []
    with torch.no_grad():
        for sizes in ({"B": 2, "S": 2}, {"B": 2, "S": 2}, {"B": 1, "S": 3}):
            arguments = sample(spec.name, DEVICE, torch.bfloat16, **sizes)
            kept.append(arguments)
            wanted = overload(spec)(**copy.deepcopy(arguments))
            out = step(**arguments)
            assert isinstance(out, Tensor)
            same(out, wanted)
    counted = counters["npugraph_ex"]
    assert [n for n in counted if n.startswith("recapture_due_to_mutated_input_change")], counted
    assert DEVICE.type != "cpu" or len(npu_graph.Graph.captured) == 3
