# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""torch.compile, torch.export and AOTInductor: final graphs, backward, files, CUDA graphs."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from custom.dispatch import log
from custom.dispatch.register import bind, overload
from custom.dispatch.registry import BY_NAME, SPECS
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor import compile_fx, cudagraph_trees

from ..support.calls import assert_same, every_spec, everything, mutated, other, tensors
from ..support.decode_step import DecodeStep, steps
from ..support.samples import sample

ROOT = Path(__file__).parents[2]
OURS = {overload(spec): spec for spec in SPECS}
STEP = ["npu_sparse_attention_pto", "npu_fused_sigmoid_gating_delta_rule_update"]


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    counters.clear()


@pytest.fixture
def dtype(device) -> torch.dtype:
    return torch.float32 if device.type == "cpu" else torch.bfloat16


WITHOUT_ROPE = (
    *("npu_mla_prolog_pto", "npu_mla_prolog_v3", "npu_indexer_prolog_pto"),
    *("npu_sparse_attention_pto", "npu_sparse_attention_shared_pto"),
    *("npu_sparse_flash_attention", "npu_sparse_flash_attention_grad"),
)


@pytest.mark.parametrize("op", WITHOUT_ROPE)
def test_a_rotary_size_of_zero_is_traced(op, monkeypatch):
    monkeypatch.setitem(sample.__globals__, "DR", 0)
    given = sample(op, torch.device("cpu"), torch.float32)
    call = overload(BY_NAME[op])
    torch.library.opcheck(call, (), given, test_utils=("test_schema", "test_faketensor"))
    compiled = torch.compile(lambda **x: call(**x), backend="aot_eager", fullgraph=True)
    spec = BY_NAME[op]
    assert_same(everything(spec, compiled, given), everything(spec, call, given))


@pytest.fixture
def graphs(monkeypatch) -> Iterator[list[torch.fx.Graph]]:
    """The FX graphs that Inductor writes code for, behind its last pass."""
    found: list[torch.fx.Graph] = []

    class Keeping(compile_fx.GraphLowering):
        def __init__(self, gm, *args, **kwargs) -> None:
            found.append(gm.graph)
            super().__init__(gm, *args, **kwargs)

    monkeypatch.setattr(compile_fx, "GraphLowering", Keeping)
    # a graph out of the cache is not lowered again
    with torch._inductor.config.patch(force_disable_caches=True):
        yield found


def calls_of(graph: torch.fx.Graph) -> list[str]:
    return [OURS[node.target].name for node in graph.nodes if node.target in OURS]


def assert_no_clone(graph: torch.fx.Graph) -> None:
    """Our ops write the graph's own inputs; nothing copies one or stands in for it."""
    for node in graph.nodes:
        kind = str(node.target)
        assert "clone" not in kind and "auto_functionalized" not in kind, kind
        if node.target is torch.ops.aten.copy_.default:
            assert node.args[0] is node.args[1], node
        if node.target in OURS:
            given = bind(node.target._schema, node.args, node.kwargs)
            for name in mutated(OURS[node.target]):
                assert given[name] is None or given[name].op == "placeholder", given[name]


@every_spec
def test_compiled_graph_is_the_op_alone_for_every_size(spec, device, dtype, graphs):
    """One graph for two sizes, with no clone of a cache."""
    compiled = torch.compile(lambda **kw: overload(spec)(**kw), fullgraph=True, dynamic=True)
    # sizes that equal no other size, nor do their halves: the compiler would take them for the same
    for S in (13, 15):
        arguments = sample(spec.name, device, dtype, S=S)
        with torch.no_grad():
            wanted = everything(spec, overload(spec), arguments)
            assert_same(everything(spec, compiled, arguments), wanted)
    (graph,) = graphs
    assert calls_of(graph) == [spec.name]
    assert_no_clone(graph)


def run_steps(step, eager: DecodeStep, model: DecodeStep, device: torch.device) -> None:
    with torch.no_grad():
        for call in steps(device):
            logits = step(*call)[1].clone()
            torch.testing.assert_close(logits, eager(*call)[1], rtol=2e-2, atol=2e-2)
            for name in DecodeStep.written:
                a, b = getattr(model, name), getattr(eager, name)
                torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


def test_decode_step_compiles_once_for_every_length(device, dtype, graphs):
    model = DecodeStep(device, dtype)
    eager = copy.deepcopy(model)
    run_steps(torch.compile(model, fullgraph=True), eager, model, device)
    (graph,) = graphs
    assert calls_of(graph) == STEP
    assert_no_clone(graph)


# -------------------------------------------------------------------------------------- backward

# op -> the arguments that get a gradient
TRAINED = {
    "npu_fused_attention": ("q", "k", "v"),
    "npu_indexer_loss": ("index_score",),
    "npu_lightning_indexer": ("query", "key", "weights"),
    "npu_sparse_flash_attention": ("query", "key", "query_rope", "key_rope"),
    "npu_chunk_gated_delta_rule": ("query", "key", "value", "beta", "initial_state", "g"),
    "npu_merge_states": ("outs", "lses", "sums"),
    "npu_causal_conv1d": ("x", "weight", "bias", "initial_states"),
    "npu_gated_rms_norm": ("x", "gate", "weight"),
    "npu_chunk_kda": ("q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias"),
    "npu_compressor_dense": ("x", "wkv", "wgate", "ape", "norm_weight"),
    "npu_hc_pre": ("x", "hc_fn", "hc_scale", "hc_base", "norm_weight"),
    "npu_hc_post": ("x", "residual", "post", "comb"),
    "npu_sparse_attn_sharedkv": ("q", "ori_kv", "cmp_kv", "sinks"),
}


IN_TORCH = {"npu_merge_states"}  # their gradient is no op


def test_every_differentiable_op_is_trained_here():
    assert set(TRAINED) == {spec.name for spec in SPECS if spec.differentiable}


@pytest.mark.parametrize("name", list(TRAINED))
def test_backward_under_compile(name, device, dtype, graphs):
    """Forward and backward are one graph each; the gradients are eager's."""
    op = overload(BY_NAME[name])

    def loss(**given):
        out = op(**given)
        return sum(x.float().sum() for x in out if x.requires_grad)

    compiled = torch.compile(loss, fullgraph=True, dynamic=True)
    for S in (7, 9):
        arguments = sample(name, device, dtype, S=S)
        grads = []
        for function in (loss, compiled):
            given = copy.deepcopy(arguments)
            for trained in TRAINED[name]:
                given[trained].requires_grad_()
            function(**given).backward()
            grads.append([given[trained].grad for trained in TRAINED[name]])
        torch.testing.assert_close(grads[1], grads[0])
    forward, backward = graphs
    assert calls_of(forward) == [name]
    called = calls_of(backward)
    assert len(called) == (name not in IN_TORCH)
    assert all(each.startswith(name) and each != name for each in called)


# ------------------------------------------------------------------------- export and AOTInductor


class Calls(torch.nn.Module):
    """Calls ops by name, each with tensors of its own: one package then holds them all."""

    def __init__(self, arguments: dict[str, dict]) -> None:
        super().__init__()
        self.constants = {
            name: {n: v for n, v in given.items() if not isinstance(v, Tensor)}
            for name, given in arguments.items()
        }

    def forward(self, given: dict[str, dict[str, Tensor]]):
        results = {}  # dynamo follows no comprehension under Python 3.10
        for name, its in given.items():
            results[name] = overload(BY_NAME[name])(**its, **self.constants[name])
        return results


def samples(names: list[str], device, dtype, S: int) -> dict[str, dict]:
    return {name: sample(name, device, dtype, S=S) for name in names}


def only_tensors(arguments: dict[str, dict]) -> dict[str, dict[str, Tensor]]:
    return {name: tensors(given) for name, given in arguments.items()}


def export(names: list[str], device, dtype) -> torch.export.ExportedProgram:
    """Every size that changes with S is free."""
    first, second = (samples(names, device, dtype, S) for S in (3, 5))
    free = {
        name: {
            n: {
                i: torch.export.Dim.AUTO
                for i, (a, b) in enumerate(zip(x.shape, second[name][n].shape, strict=True))
                if a != b
            }
            for n, x in given.items()
        }
        for name, given in only_tensors(first).items()
    }
    with torch.no_grad():
        given = copy.deepcopy(only_tensors(first))
        return torch.export.export(Calls(first), (given,), dynamic_shapes=(free,))


def same(got, wanted) -> None:
    torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)


def assert_equals_eager(run, name: str, device, dtype) -> None:
    """At two sizes: the outputs, and the caches that the op writes."""
    for S in (3, 5):
        arguments = samples([name], device, dtype, S)
        ours, eager = (copy.deepcopy(only_tensors(arguments)) for _ in range(2))
        with torch.no_grad():
            got, wanted = run(ours)[name], Calls(arguments)(eager)[name]
        same((got, ours), (wanted, eager))


@every_spec
def test_export_is_saved_and_loaded(spec, device, dtype, tmp_path):
    program = export([spec.name], device, dtype)
    torch.export.save(program, tmp_path / "program.pt2")
    loaded = torch.export.load(tmp_path / "program.pt2")
    assert calls_of(loaded.graph) == [spec.name]
    assert_equals_eager(loaded.module(), spec.name, device, dtype)


# compiles the C++ that calls the ops; there is nothing in it to be optimised
OPTIONS = {"aot_inductor.compile_wrapper_opt_level": "O0"}


FRESH_PROCESS = """
import sys, torch
package, inputs, outputs = sys.argv[1:]
try:
    torch._inductor.aoti_load_package(package)(torch.load(inputs))
except RuntimeError as error:
    print("without our package:", "custom" in str(error))
import custom
from torch._dynamo.utils import counters
counters.clear()
given = torch.load(inputs)
with torch.no_grad():
    out = torch._inductor.aoti_load_package(package)(given)
torch.save((out, given), outputs)
print("traced:", dict(counters))
"""


def test_package_of_aotinductor_equals_eager_for_every_op(device, backend, dtype, cxx, tmp_path):
    """One package with every op, compiled once: it runs at two sizes, here and in a fresh process
    that has imported our package, and traces nothing."""
    names, path = [spec.name for spec in SPECS], str(tmp_path / "ops.pt2")
    program = export(names, device, dtype)
    options = OPTIONS | {"cpp.cxx": cxx}
    torch._inductor.aoti_compile_and_package(program, package_path=path, inductor_configs=options)
    run = torch._inductor.aoti_load_package(path)
    counters.clear()
    for S in (3, 5):
        arguments = samples(names, device, dtype, S)
        ours, eager = (copy.deepcopy(only_tensors(arguments)) for _ in range(2))
        before = log.calls.copy()
        with torch.no_grad():
            out = run(ours)
            assert log.calls - before == Counter({(name, backend): 1 for name in names})
            wanted = Calls(arguments)(eager)
        same((out, ours), (wanted, eager))
    assert not counters

    inputs, outputs = tmp_path / "inputs.pt", tmp_path / "outputs.pt"
    torch.save(only_tensors(arguments), inputs)
    done = subprocess.run(
        [sys.executable, "-c", FRESH_PROCESS, path, inputs, outputs],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines() == ["without our package: True", "traced: {}"]
    same(torch.load(outputs), (wanted, eager))


# ------------------------------------------------------------------ mode="reduce-overhead" on CUDA


@pytest.fixture
def replayed(device, monkeypatch) -> list[int]:
    """Counts the replays of CUDA graphs; the list holds one entry a replay."""
    if device.type != "cuda":
        pytest.skip("needs a GPU: there are no CUDA graphs elsewhere")
    replays: list[int] = []
    run = cudagraph_trees.CUDAGraphNode.run_graph

    def count(self):
        replays.append(1)
        return run(self)

    monkeypatch.setattr(cudagraph_trees.CUDAGraphNode, "run_graph", count)
    return replays


@every_spec
def test_reduce_overhead_replays_with_other_lengths(spec, device, dtype, replayed):
    """Caches whose address is promised are written in place by the graph."""
    first, second = sample(spec.name, device, dtype), other(spec, device, dtype)
    constants = {n: v for n, v in first.items() if n not in tensors(first)}
    caches = {n: first[n] for n in mutated(spec) if n in first}
    eager_caches = copy.deepcopy(caches)
    for cache in caches.values():
        torch._dynamo.mark_static_address(cache)
    step = torch.compile(
        lambda **kw: overload(spec)(**kw, **constants), mode="reduce-overhead", fullgraph=True
    )
    with torch.no_grad():
        for arguments in (first, second, first, second, first):
            given = tensors(arguments)
            out = step(**given | caches)
            got = [x.clone() for x in ((out,) if isinstance(out, Tensor) else out or ())]
            wanted = overload(spec)(**given | eager_caches, **constants)
            assert_same(got, list((wanted,) if isinstance(wanted, Tensor) else wanted or ()))
            assert_same(list(caches.values()), list(eager_caches.values()))
    assert not counters["inductor"]["cudagraph_skips"]
    assert len(replayed) >= 3  # the first calls warm up and record


def test_reduce_overhead_of_the_decode_step(device, dtype, replayed):
    """Caches that are buffers need no promise."""
    model = DecodeStep(device, dtype)
    eager = copy.deepcopy(model)
    step = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    run_steps(step, eager, model, device)
    assert not counters["inductor"]["cudagraph_skips"]
    assert len(replayed) >= 3


def test_reduce_overhead_gives_up_on_a_cache_without_a_promise(device, dtype, replayed):
    """What the page warns of: the call is right, and runs without a graph."""
    spec = BY_NAME["npu_fused_sigmoid_gating_delta_rule_update"]
    arguments = sample(spec.name, device, dtype)
    step = torch.compile(lambda **kw: overload(spec)(**kw), mode="reduce-overhead", fullgraph=True)
    with torch.no_grad():
        for _ in range(3):
            assert_same(
                everything(spec, step, arguments), everything(spec, overload(spec), arguments)
            )
    assert counters["inductor"]["cudagraph_skips"] and not replayed
