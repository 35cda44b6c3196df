# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Our ops in ONNX: one node of domain `ai.custom.npu` each, and what it computes beside it.

A call of an op becomes the node `Spec.onnx`, which CANN can match by name.  Its tensors are the
node's inputs, its scalars the attributes; a cache that the op writes is an input, and once more an
output behind the op's own.  What the op computes, in ONNX's operators, goes into the file as a
model-local function, so that onnxruntime runs the file with nothing of ours installed.  Calls that
differ in constants, dtypes or fixed sizes have overloads of their own (ONNX IR version 10).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram, graph_signature

from ..dispatch.dispatch_keys import written
from ..dispatch.errors import NotSupported, need
from ..dispatch.op_spec import Spec
from ..dispatch.register import NAMESPACE, bind, overload
from ..dispatch.registry import SPECS
from .decompositions import REASONS, Decomposition, decomposition

if TYPE_CHECKING:
    import onnx
    import onnx_ir as ir

DOMAIN = "ai.custom.npu"
_MUTATIONS = (
    graph_signature.OutputKind.USER_INPUT_MUTATION,
    graph_signature.OutputKind.BUFFER_MUTATION,
)


def export(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    path: str | PathLike[str],
    dynamic_shapes: Any = None,
) -> torch.onnx.ONNXProgram:
    """Write `model` to an ONNX file that plain onnxruntime runs.

    Args:
        model: calls our ops, and anything else that torch.onnx.export knows.
        args: example arguments, of the dtypes and the fixed sizes that the file is for.
        path: of the file.  Beyond 2 GB the weights lie beside it.
        dynamic_shapes: as torch.export.export takes them.

    Every argument and buffer that the model writes (a cache, a pool of states) is an input of the
    file and comes back as the output `NAME_out`, behind the model's own outputs.

    Returns:
        The program that was written, as torch.onnx.export gives it.

    Raises:
        NotSupported: an op has no ONNX form, or not for one of its arguments.
        BackendUnavailable: onnx or onnxscript is not installed.
    """
    for package in ("onnx", "onnxscript"):
        need(package, "custom.graph_mode.onnx", "onnx onnxscript")
    with torch.no_grad():
        program = torch.export.export(model, args, dynamic_shapes=dynamic_shapes)
        variants = _Variants()
        made = variants.translate(program)
    _caches_as_inputs_and_outputs(made)
    made.optimize()
    for function in variants.functions:
        made.model.functions[function.identifier()] = function
    made.model.opset_imports[DOMAIN] = 1
    made.model.ir_version = max(10, made.model.ir_version)
    made.save(path)
    return made


def schemas() -> list[onnx.defs.OpSchema]:
    """The OpSchema of every op that has an ONNX form, for onnx.defs.register_schema."""
    return [_schema(spec) for spec in SPECS if spec.onnx]


@dataclass(frozen=True)
class _Call:
    """One call of an op in the graph; its tensors are fake."""

    spec: Spec
    arguments: dict[str, Any]

    @property
    def tensors(self) -> dict[str, Tensor | None]:
        """The node's inputs; None for one that was left out."""
        return {name: self.arguments[name] for name in _inputs(self.spec)}

    @property
    def given(self) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in self.tensors.items() if tensor is not None}

    @property
    def constants(self) -> dict[str, Any]:
        return {n: value for n, value in self.arguments.items() if n not in _inputs(self.spec)}

    @property
    def written(self) -> list[str]:
        return [name for name in _written(self.spec) if name in self.given]

    def with_tensors(self, tensors: Sequence[Tensor | None]) -> dict[str, Any]:
        return self.constants | dict(zip(self.tensors, tensors, strict=True))

    def sizes(self) -> Iterator[tuple[str, int, Any]]:
        for name, tensor in self.given.items():
            for dimension, size in enumerate(tensor.shape):
                yield name, dimension, size

    def key(self) -> str:
        """Equal for calls that one function serves: free sizes may differ where they are equal to
        each other in the same places."""
        free: dict[str, str] = {}
        sizes = [
            (*at, free.setdefault(str(size), f"size{len(free)}"))
            if isinstance(size, torch.SymInt)
            else (*at, size)
            for *at, size in self.sizes()
        ]
        dtypes = [(name, tensor.dtype) for name, tensor in self.given.items()]
        return str((self.spec.name, self.constants, sizes, dtypes))


class _Decomposed(torch.nn.Module):
    """The op's outputs and then its written caches, from tensors that are left as they were."""

    def __init__(self, call: _Call, function: Decomposition) -> None:
        super().__init__()
        self.call, self.function = call, function

    def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        tensors = dict(zip(self.call.given, given, strict=True))
        for name in self.call.written:
            tensors[name] = tensors[name].clone()
        absent = dict.fromkeys(self.call.tensors)
        out = self.function(**self.call.constants | absent | tensors)
        outputs = (out,) if isinstance(out, Tensor) else tuple(out or ())
        return *outputs, *(tensors[name] for name in self.call.written)


class _Variants:
    """The model-local functions of one file."""

    def __init__(self) -> None:
        self._functions: dict[str, ir.Function] = {}

    @property
    def functions(self) -> list[ir.Function]:
        return list(self._functions.values())

    def translate(self, program: ExportedProgram) -> torch.onnx.ONNXProgram:
        """ONNX of `program`, in which every call of an op of ours is one node."""
        calls = _to_pure_calls(program)
        overloads: dict[str, str] = {}

        def node(inputs: Sequence[Any], key: str) -> Any:
            call = calls[key]
            outputs = _symbol(call.spec)(*inputs, **_attributes(call))
            made = (outputs[0] if isinstance(outputs, Sequence) else outputs).producer()
            made.overload = overloads[key]
            # a cache that was left out is written nowhere
            made.resize_outputs(len(overload(call.spec)._schema.returns) + len(call.written))
            return made.outputs

        try:
            overloads.update((key, self._overload(call)) for key, call in calls.items())
            made = torch.onnx.export(
                program,
                dynamo=True,
                optimize=False,
                verbose=False,
                custom_translation_table={_pure_call: node},
            )
        finally:
            for key in calls:
                del _CALLS[key]
        assert made is not None
        return made

    def _overload(self, call: _Call) -> str:
        key = call.key()
        if key not in self._functions:
            function = self._function(call)
            others = [f for f in self.functions if f.name == function.name]
            # the first has none: most models need no more
            function.overload = str(len(others)) if others else ""
            self._functions[key] = function
        return self._functions[key].overload

    def _function(self, call: _Call) -> ir.Function:
        import onnx_ir as ir

        decomposition = _decomposition(call)
        shapes: dict[str, dict[int, Any]] = {name: {} for name in call.given}
        for name, dimension, size in call.sizes():
            if isinstance(size, torch.SymInt):
                shapes[name][dimension] = Dim.DYNAMIC
        program = torch.export.export(
            _Decomposed(call, decomposition),
            tuple(_example(tensor) for tensor in call.given.values()),
            dynamic_shapes=(tuple(shapes.values()),),
        )
        made = self.translate(program)
        made.optimize()
        graph = made.model.graph
        _constants_as_nodes(graph)
        traced = dict(zip(call.given, graph.inputs, strict=True))
        # as in the node: what was left out at the end is not there, elsewhere it has a place
        last = max(map(list(call.tensors).index, call.given))
        names = list(call.tensors)[: last + 1]
        graph.inputs[:] = [traced.get(name) or ir.Value(name=name) for name in names]
        attributes = [
            ir.Attr(name, getattr(ir.AttributeType, kind), None)
            for name, kind in _scalars(call.spec).items()
            if name in _attributes(call)
        ]
        function = ir.Function(DOMAIN, call.spec.onnx or "", graph=graph, attributes=attributes)
        function.opset_imports.update(made.model.opset_imports)
        return function


# ------------------------------------------------- the op that stands for ours in the FX graph

# torch.export and torch.onnx.export take no op that writes its arguments: this one returns the
# written caches, and what it stands for is kept here under `key` during an export
_CALLS: dict[str, _Call] = {}
_numbers = count()
_library = torch.library.Library(f"{NAMESPACE}_onnx", "FRAGMENT")
_library.define("call(Tensor?[] inputs, str key) -> Tensor[]")
_pure_call = torch.ops.custom_onnx.call.default


def _fake(inputs: Sequence[Tensor | None], key: str) -> list[Tensor]:
    call = _CALLS[key]
    arguments = call.with_tensors(inputs)
    out = call.spec.fake(**arguments)
    outputs = [out] if isinstance(out, Tensor) else list(out or ())
    return outputs + [torch.empty_like(arguments[name]) for name in call.written]


torch.library.register_fake(_pure_call, _fake, lib=_library)


def _to_pure_calls(program: ExportedProgram) -> dict[str, _Call]:
    """Replace our ops in the graph, in place; the calls by key."""
    ours = {overload(spec): spec for spec in SPECS}
    found: dict[str, _Call] = {}
    for module in program.graph_module.modules():
        if not isinstance(module, torch.fx.GraphModule):
            continue
        for node in list(module.graph.nodes):
            if node.op == "call_function" and node.target in ours:
                key = f"{NAMESPACE}{next(_numbers)}"
                found[key] = _replace(module.graph, node, ours[node.target], key)
    _CALLS.update(found)
    return found


def _replace(graph: torch.fx.Graph, node: torch.fx.Node, spec: Spec, key: str) -> _Call:
    def fake(value: Any) -> Any:
        return value.meta["val"] if isinstance(value, torch.fx.Node) else value

    arguments = bind(overload(spec)._schema, node.args, dict(node.kwargs))
    call = _Call(spec, {name: fake(value) for name, value in arguments.items()})
    _decomposition(call)  # refuses what has none
    with graph.inserting_before(node):
        inputs = [arguments[name] for name in call.tensors]
        made = graph.call_function(_pure_call, (inputs, key))
        returns = len(overload(spec)._schema.returns)
        outputs = [
            graph.call_function(operator.getitem, (made, i))
            for i in range(returns + len(call.written))
        ]
        for name, after in zip(call.written, outputs[returns:], strict=True):
            graph.call_function(torch.ops.aten.copy_.default, (arguments[name], after))
    # an op of several outputs has only getitem nodes behind it
    for old in [node] if returns == 1 else list(node.users):
        new = outputs[0 if returns == 1 else int(old.args[1])]  # type: ignore[arg-type]
        new.meta.update(old.meta)
        old.replace_all_uses_with(new)
        graph.erase_node(old)
    if returns > 1:
        graph.erase_node(node)
    return call


def _decomposition(call: _Call) -> Decomposition:
    found = decomposition(call.spec)
    if found is None:
        why = REASONS.get(call.spec.name, "it is for training")
        raise NotSupported(f"{call.spec.name} has no ONNX form: {why}.")
    for name, value in call.constants.items():
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            raise NotSupported(
                f"{call.spec.name}: `{name}` depends on a dynamic size, expected a constant: it is "
                "an attribute of the ONNX node."
            )
    reason = found.unsupported(**call.arguments)
    if reason:
        raise NotSupported(f"{call.spec.name}: {reason}")
    return found


def _example(tensor: Tensor) -> Tensor:
    """A tensor of the hinted sizes; tracing reads no value."""
    hints = [size if isinstance(size, int) else size.node.hint for size in tensor.shape]
    return torch.empty(hints, dtype=tensor.dtype)


# ------------------------------------------------------------------------------- schema and node


def _inputs(spec: Spec) -> list[str]:
    """The tensor arguments, optional ones too."""
    return [a.name for a in overload(spec)._schema.arguments if "Tensor" in str(a.type)]


def _written(spec: Spec) -> list[str]:
    return [name for _, name in written(overload(spec))]


_KINDS = {"int": "INT", "SymInt": "INT", "bool": "INT", "float": "FLOAT", "str": "STRING"}


def _scalars(spec: Spec) -> dict[str, str]:
    """The other arguments, with the kind of their attribute."""
    return {
        a.name: _KINDS[str(a.real_type).removeprefix("Optional[").removesuffix("]")]
        for a in overload(spec)._schema.arguments
        if a.name not in _inputs(spec)
    }


def _attributes(call: _Call) -> dict[str, Any]:
    """None is left out; ONNX has no booleans."""
    return {
        name: int(value) if isinstance(value, bool) else value
        for name, value in call.constants.items()
        if value is not None
    }


def _schema(spec: Spec) -> onnx.defs.OpSchema:
    from onnx.defs import OpSchema

    schema = overload(spec)._schema
    formal, kind = OpSchema.FormalParameter, OpSchema.AttrType
    optional = {a.name for a in schema.arguments if str(a.type).startswith("Optional")}
    outputs = [r.name or f"output{i}" for i, r in enumerate(schema.returns)]
    ends = [
        *((name, name in optional) for name in _inputs(spec)),
        *((name, False) for name in outputs),
        *((f"{name}_out", name in optional) for name in _written(spec)),
    ]
    # each tensor has a type of its own: a gate may be float32 beside bfloat16 queries
    parameters = [
        formal(
            name,
            f"T_{name}",
            param_option=OpSchema.FormalParameterOption.Optional
            if may_be_absent
            else OpSchema.FormalParameterOption.Single,
        )
        for name, may_be_absent in ends
    ]
    floats = ("float16", "bfloat16", "float", "double")
    types = [f"tensor({t})" for t in (*floats, "int8", "int32", "int64")]
    scalars = _scalars(spec)
    return OpSchema(
        spec.onnx or "",
        DOMAIN,
        1,
        inputs=parameters[: len(_inputs(spec))],
        outputs=parameters[len(_inputs(spec)) :],
        type_constraints=[(f"T_{name}", types, "") for name, _ in ends],
        attributes=[
            OpSchema.Attribute(name, getattr(kind, scalars[name]), required=name not in optional)
            for name in scalars
        ],
    )


def _symbol(spec: Spec) -> Callable[..., Any]:
    import onnxscript

    domain = onnxscript.values.Opset(DOMAIN, 1)
    return onnxscript.values.Op(domain, spec.onnx or "", op_schema=_schema(spec))


# ------------------------------------------------------------------------------- the whole graph


def _constants_as_nodes(graph: ir.Graph) -> None:
    """A function holds no initializers."""
    import onnx_ir as ir

    constants = []
    for value in graph.initializers.values():
        node = ir.node("Constant", [], {"value": value.const_value})
        value.replace_all_uses_with(node.outputs[0], replace_graph_outputs=True)
        constants.append(node)
    graph.initializers.clear()
    graph.insert_before(graph[0], constants)


def _caches_as_inputs_and_outputs(made: torch.onnx.ONNXProgram) -> None:
    graph, program = made.model.graph, made.exported_program
    assert program is not None
    values = {value.name: value for node in graph for value in node.outputs}
    nodes = {node.name: node for node in program.graph.nodes}
    for spec in program.graph_signature.output_specs:
        if spec.kind not in _MUTATIONS:
            continue
        node, name = nodes[spec.arg.name], spec.target or ""
        # a node that does nothing in ONNX has no value of its own: copy(old, new) is `new`
        while node.name not in values:
            node = node.args[1 if node.target is torch.ops.aten.copy.default else 0]
        if name in graph.initializers:
            graph.inputs.append(graph.initializers.pop(name))
        values[node.name].name = f"{name}_out"
        graph.outputs.append(values[node.name])
