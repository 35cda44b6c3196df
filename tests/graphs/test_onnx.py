# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The exported file: one node an op, and in plain onnxruntime the numbers of eager PyTorch."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from custom.dispatch.register import overload
from custom.dispatch.registry import BY_NAME, SPECS
from torch import Tensor
from torch.export import Dim

import custom

from ..support.calls import everything, mutated, tensors
from ..support.decode_step import DecodeStep, steps
from ..support.ragged import Packed
from ..support.samples import SAMPLES, Maker, sample
from ..support.selected import Problem

onnx = pytest.importorskip("onnx")
runtime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

from custom.graph_mode import onnx as ours  # noqa: E402
from custom.graph_mode.decompositions import DECOMPOSITIONS, REASONS  # noqa: E402

CPU = torch.device("cpu")
OPS = [spec.name for spec in SPECS if spec.onnx]


@pytest.fixture
def check():
    """onnx.checker: all of it first, then with our schemas known, for inputs and attributes."""

    def both(model) -> None:
        onnx.checker.check_model(model, full_check=True)
        for schema in ours.schemas():
            onnx.defs.register_schema(schema)
        try:
            onnx.checker.check_model(model, check_custom_domain=True)
        finally:
            for schema in ours.schemas():
                onnx.defs.deregister_schema(schema.name, schema.since_version, schema.domain)

    return both


class Calls(torch.nn.Module):
    """The same op with one set of tensors and several sets of constants."""

    def __init__(self, op: str, names: list[str], *constants: dict[str, Any]) -> None:
        super().__init__()
        self.op, self.names, self.constants = overload(BY_NAME[op]), names, constants

    def forward(self, *given: Tensor):
        arguments = dict(zip(self.names, given, strict=True))
        return [self.op(**arguments, **constants) for constants in self.constants]


class File:
    """A module exported with every size that differs between `first` and `second` free."""

    def __init__(self, module: torch.nn.Module, first: dict, second: dict, path: str) -> None:
        free = tuple(
            {
                i: Dim.DYNAMIC
                for i, (a, b) in enumerate(zip(x.shape, y.shape, strict=True))
                if a != b
            }
            for x, y in zip(tensors(first).values(), tensors(second).values(), strict=True)
        )
        ours.export(module, copy.deepcopy(tuple(tensors(first).values())), path, (free,))
        self.model = onnx.load(path)
        options = runtime.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = runtime.InferenceSession(path, options)

    def feed(self, arguments: dict) -> dict:
        names = [i.name for i in self.session.get_inputs()]
        values = (value.numpy() for value in tensors(arguments).values())
        return dict(zip(names, values, strict=True))

    def run(self, arguments: dict) -> list[Tensor]:
        return [torch.from_numpy(x) for x in self.session.run(None, self.feed(arguments))]


@functools.cache
def arguments_of(op: str) -> tuple[dict, dict]:
    """Two calls that differ in batch and length."""
    first, second = (sample(op, CPU, torch.float32, B=B, S=S) for B, S in ((2, 2), (1, 70)))
    if op.startswith("npu_sparse_attention_"):
        second = sample(op, CPU, torch.float32, B=1, S=5)
    if "cache_index" in first:
        first["cache_index"][0, 1] = -1  # written nowhere
    return first, second


@pytest.fixture(scope="module")
def file_of(tmp_path_factory):
    @functools.cache
    def exported(op: str) -> File:
        first, second = arguments_of(op)
        constants = {n: value for n, value in first.items() if n not in tensors(first)}
        module = Calls(op, list(tensors(first)), constants)
        return File(module, first, second, str(tmp_path_factory.mktemp(op) / "model.onnx"))

    return exported


def close(got: list[Tensor], wanted: list[Tensor]) -> None:
    assert len(got) == len(wanted)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("op", OPS)
def test_onnxruntime_equals_eager_with_another_batch_and_length(op, file_of):
    """The outputs, and behind them the caches that the op writes."""
    for arguments in arguments_of(op):
        wanted = everything(BY_NAME[op], overload(BY_NAME[op]), arguments)
        close(file_of(op).run(arguments), wanted)


@pytest.mark.parametrize("op", OPS)
def test_is_one_node_with_the_schema_s_inputs_and_attributes(op, file_of, check):
    model, (first, _) = file_of(op).model, arguments_of(op)
    check(model)
    (node,) = model.graph.node
    assert (node.domain, node.op_type, node.overload) == ("ai.custom.npu", BY_NAME[op].onnx, "")
    schema = overload(BY_NAME[op])._schema
    (declared,) = [d for d in ours.schemas() if d.name == node.op_type]
    names = [i.name for i in declared.inputs]
    given = [name for name, value in zip(names, node.input, strict=False) if value]
    assert set(given) == set(tensors(first))
    values = {a.name: a.default_value for a in schema.arguments} | first
    scalars = {n: v for n, v in values.items() if n not in names and v is not None}
    wanted = {n: int(v) if isinstance(v, bool) else v for n, v in scalars.items()}
    got = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    got = {
        name: value.decode() if isinstance(value, bytes) else value for name, value in got.items()
    }
    assert got == pytest.approx(wanted)
    written = [name for name in mutated(BY_NAME[op]) if name in first]
    assert len(node.output) == len(schema.returns) + len(written)
    assert [o.name.endswith("_out") for o in model.graph.output] == (
        [False] * len(schema.returns) + [True] * len(written)
    )


@pytest.mark.parametrize("op", [op for op in OPS if op.startswith("npu_sparse_attention_")])
def test_the_layer_calls_its_stages(op, file_of):
    functions, name = {f.name: f for f in file_of(op).model.functions}, BY_NAME[op].onnx
    stages = ["MlaPrologPto", "IndexerPrologPto", "LightningIndexer", "SparseFlashAttention"]
    if op == "npu_sparse_attention_shared_pto":
        stages = [stages[0], stages[3]]
    nodes = functions[name].node
    assert [node.op_type for node in nodes if node.domain] == stages
    assert set(functions) == {name, *stages}


@pytest.mark.parametrize("op", OPS)
def test_the_reference_evaluator_agrees(op, file_of):
    from onnx.reference import ReferenceEvaluator

    for arguments in arguments_of(op):
        feed = file_of(op).feed(arguments)
        out = ReferenceEvaluator(file_of(op).model).run(None, feed)
        wanted = everything(BY_NAME[op], overload(BY_NAME[op]), arguments)
        close([torch.from_numpy(x) for x in out], wanted)


def test_calls_with_other_constants_are_overloads(tmp_path):
    """Ties too: scores of small integers, of which the lower positions must win."""
    constants = [
        dict(sparse_count=k, sparse_mode=m, return_value=True) for k, m in ((8, 3), (40, 0))
    ]
    drawn = torch.Generator().manual_seed(3)

    def small(*shape: int) -> Tensor:
        return torch.randint(-1, 2, shape, generator=drawn).float()

    first, second = (
        dict(query=small(B, S, 2, 4), key=small(B, K, 1, 4), weights=small(B, S, 2))
        for B, S, K in ((2, 3, 21), (3, 5, 60))
    )

    class Twice(Calls):
        def forward(self, *given):
            return super().forward(*given) + super().forward(given[0] * 2, *given[1:])

    module = Twice("npu_lightning_indexer", list(first), *constants)
    file = File(module, first, second, str(tmp_path / "model.onnx"))
    nodes = [node for node in file.model.graph.node if node.domain]
    assert sorted(node.overload for node in nodes) == ["", "", "1", "1"]
    assert len(file.model.functions) == 2
    for arguments in (first, second):
        wanted = [out for pair in module(*arguments.values()) for out in pair]
        for a, b in zip(file.run(arguments), wanted, strict=True):
            assert torch.equal(a, b)


def test_positions_beyond_what_float32_holds(tmp_path):
    """PyTorch's exporter divides whole numbers as floats where a rounding mode is named."""
    first = dict(indices=torch.randint(2**31 - 1, (2, 3, 1, 40), dtype=torch.int32))
    module = Calls("npu_localize_indices", ["indices"], dict(rank=1, size=3, interleave=2))
    second = dict(
        indices=torch.tensor([2**31 - 1, 2**31 - 3, 2**24 + 3, -1]).int().view(1, 1, 1, 4)
    )
    file = File(module, first, second, str(tmp_path / "model.onnx"))
    for given in (first, second):
        wanted = overload(BY_NAME["npu_localize_indices"])(**given, rank=1, size=3, interleave=2)
        assert all(torch.equal(a, b) for a, b in zip(file.run(given), wanted, strict=True))


def test_paged_keys_of_ragged_requests_with_sinks_and_blocks(tmp_path):
    problems = [
        Problem(rows, keys, count=6, block_size=2, sinks=True)
        for rows, keys in (((3, 1), (40, 5)), ((1, 4, 2), (17, 9, 33)))
    ]
    first, second = (
        problem.arguments(
            Packed(("BSND", "PA_BSND"), problem.rows, problem.keys, CPU), torch.float32
        )
        for problem in problems
    )
    constants = {n: value for n, value in first.items() if n not in tensors(first)}
    module = Calls("npu_sparse_flash_attention", list(tensors(first)), constants)
    file = File(module, first, second, str(tmp_path / "model.onnx"))
    for arguments in (first, second):
        close(file.run(arguments), list(overload(BY_NAME[module.op._opname])(**arguments)))


class Recurrent(torch.nn.Module):
    """Keeps its pool of states in a buffer."""

    def __init__(self, arguments: dict) -> None:
        super().__init__()
        self.rest = {n: value for n, value in arguments.items() if not isinstance(value, Tensor)}
        self.register_buffer("pool", arguments["initial_state_source"])

    def forward(self, tensors: dict[str, Tensor]):
        return overload(BY_NAME["npu_fused_sigmoid_gating_delta_rule_update"])(
            initial_state_source=self.pool, **tensors, **self.rest
        )


def test_a_buffer_that_is_written_is_input_and_output(tmp_path):
    """With the other state layout, a decay for every channel, and packed sequences."""
    op = "npu_fused_sigmoid_gating_delta_rule_update"
    maker = Maker(CPU, torch.float32)
    arguments = SAMPLES[op](maker, B=1, S=9) | dict(
        a=maker.normal(1, 9, 4, 16),
        dt_bias=maker.normal(4, 16),
        initial_state_source=maker.normal(5, 4, 8, 16),
        initial_state_indices=maker.ints(3, -1, 0),
        cu_seqlens=maker.ints(0, 4, 4, 7),
        state_layout="vk",
        is_kda=True,
    )
    wanted = everything(BY_NAME[op], overload(BY_NAME[op]), arguments)
    module = Recurrent(arguments)
    given = {n: t for n, t in tensors(arguments).items() if n != "initial_state_source"}
    path = str(tmp_path / "model.onnx")
    ours.export(module, (given,), path)
    session = runtime.InferenceSession(path)
    names = [i.name for i in session.get_inputs()]
    assert names[-1] == "pool" and session.get_outputs()[-1].name == "pool_out"
    values = [*given.values(), arguments["initial_state_source"]]
    feed = dict(zip(names, (value.numpy() for value in values), strict=True))
    close([torch.from_numpy(x) for x in session.run(None, feed)], wanted)


def refused(op: str, path, **changes: Any) -> str:
    arguments = sample(op, CPU, torch.float32) | changes
    constants = {n: value for n, value in arguments.items() if not isinstance(value, Tensor)}
    module = Calls(op, list(tensors(arguments)), constants)
    with pytest.raises(custom.NotSupported) as caught:
        ours.export(module, tuple(tensors(arguments).values()), str(path / "model.onnx"))
    assert not list(path.iterdir()) and not ours._CALLS
    return str(caught.value)


@pytest.mark.parametrize("op", [spec.name for spec in SPECS if not spec.onnx])
def test_an_op_without_a_form_says_why(op, tmp_path):
    why = REASONS.get(op, "it is for training")
    assert refused(op, tmp_path) == f"{op} has no ONNX form: {why}."


def test_decode_step_runs_in_onnxruntime(tmp_path):
    """Two layers and the head; the caches and states go from each call into the next."""
    model = DecodeStep(CPU, torch.float32)
    eager = copy.deepcopy(model)
    calls = steps(CPU)
    path = str(tmp_path / "model.onnx")
    ours.export(copy.deepcopy(model), calls[0], path)
    session = runtime.InferenceSession(path)
    names = [i.name for i in session.get_inputs()]
    assert [n for n in names if n in DecodeStep.written] == names[4:]
    state = {name: getattr(model, name).numpy() for name in names[4:]}
    for call in calls:
        feed = dict(zip(names[:4], (x.numpy() for x in call), strict=True)) | state
        got = session.run(None, feed)
        with torch.no_grad():
            wanted = eager(*call)
        close([torch.from_numpy(x) for x in got[:2]], list(wanted))
        for output, value in zip(session.get_outputs()[2:], got[2:], strict=True):
            name = output.name.removesuffix("_out")
            state[name] = value
            close([torch.from_numpy(value)], [getattr(eager, name)])


def _packed(maker: Maker) -> dict:
    return dict(
        query=maker.normal(6, 4, 16),
        key=maker.normal(20, 1, 16),
        weights=maker.normal(6, 4),
        actual_seq_lengths_query=maker.ints(2, 6),
        actual_seq_lengths_key=maker.ints(9, 20),
        layout_query="TND",
        layout_key="TND",
    )


MAKER = Maker(CPU, torch.float32)
REFUSED = {
    "layout_query": ("npu_lightning_indexer", _packed(MAKER)),
    "cu_seqlens_q": (
        "npu_fused_attention",
        dict(
            q=MAKER.normal(6, 4, 16),
            k=MAKER.normal(6, 2, 16),
            v=MAKER.normal(6, 2, 16),
            cu_seqlens_q=MAKER.ints(0, 2, 6),
            cu_seqlens_k=MAKER.ints(0, 2, 6),
        ),
    ),
    "v": ("npu_fused_attention", dict(v=MAKER.normal(2, 2, 9, 16).to(torch.float8_e5m2))),
    "retrieve_parent_token": (
        "npu_fused_sigmoid_gating_delta_rule_update",
        dict(retrieve_parent_token=MAKER.ints((-1, 0), (-1, 0))),
    ),
    "intermediate_states": (
        "npu_fused_sigmoid_gating_delta_rule_update",
        dict(
            intermediate_states=MAKER.normal(2, 2, 4, 16, 8),
            intermediate_state_indices=MAKER.ints(0, 1),
        ),
    ),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_an_argument_without_onnx_form_is_refused_by_name(name, tmp_path):
    op, changes = REFUSED[name]
    message = refused(op, tmp_path, **changes)
    assert message.startswith(f"{op}: `{name}` is ") and "no ONNX form" in message


@pytest.mark.parametrize(
    ("mode", "wanted"),
    [(dict(kv_kind="int8"), "'none'"), (dict(weight_quant_mode=2), "0"), ({}, None)],
    ids=str,
)
def test_8_bits_are_refused_with_what_is_wanted(mode, wanted):
    reason = DECOMPOSITIONS["npu_sparse_attention_pto"].unsupported(index_kind="none", **mode)
    for name, came in mode.items():
        assert reason == f"`{name}` is {came!r}, expected {wanted}: 8 bits have no ONNX form here."
    assert (reason is None) == (not mode)


def test_an_attribute_that_depends_on_a_size_is_refused(tmp_path):
    class Picks(torch.nn.Module):
        def forward(self, query, key, weights):
            return custom.npu_lightning_indexer(query, key, weights, sparse_count=key.shape[1])[0]

    arguments = sample("npu_lightning_indexer", CPU, torch.float32)
    given = tuple(arguments[name] for name in ("query", "key", "weights"))
    free = ({}, {1: Dim.DYNAMIC}, {})
    with pytest.raises(custom.NotSupported, match="`sparse_count` depends on a dynamic size"):
        ours.export(Picks(), given, str(tmp_path / "model.onnx"), free)
