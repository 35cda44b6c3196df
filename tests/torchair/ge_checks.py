# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Our ops through the real torchair: the Ascend IR graph, node by node."""

from __future__ import annotations

import copy

import pytest
import torch
from custom.dispatch.register import overload
from custom.dispatch.specs import BY_NAME, SPECS

import custom
from tests.samples import sample

from . import standalone

standalone.install({spec.ge for spec in SPECS if spec.ge})
import torchair  # noqa: E402
from custom.graph_mode import torchair as ours  # noqa: E402
from torchair._ge_concrete_graph.fx2ge_converter import GeConcreteGraph  # noqa: E402

ours.register()
CPU = torch.device("cpu")
# what the public kernel computes with
PUBLIC_KERNEL = dict(
    softmax_scale=576**-0.5, rms_norm_eps=1e-5, index_rope_interleaved=True, sparse_count=2048
)


@pytest.fixture
def graphs(monkeypatch):
    """The GE graphs that were built."""
    built: list = []
    optimise = GeConcreteGraph.optimize_graph_without_runtime

    def keep(self, *args, **kwargs):
        result = optimise(self, *args, **kwargs)
        built.append(self)
        return result

    monkeypatch.setattr(GeConcreteGraph, "optimize_graph_without_runtime", keep)
    return built


def convert(name: str, arguments: dict, dynamic: bool = False):
    torch._dynamo.reset()
    config = torchair.CompilerConfig()
    config.debug.run_eagerly = True
    backend = torchair.get_npu_backend(compiler_config=config)
    constants = {k: v for k, v in arguments.items() if not isinstance(v, torch.Tensor)}
    tensors = {k: v.clone() for k, v in arguments.items() if k not in constants}
    compiled = torch.compile(
        lambda **kw: overload(BY_NAME[name])(**kw, **constants),
        backend=backend,
        fullgraph=True,
        dynamic=dynamic,
    )
    # as literals in a model's code would be
    with torch.no_grad(), torch._dynamo.config.patch(specialize_int=True):
        return compiled(**tensors)


def node(graphs, kind: str):
    (found,) = [op for op in graphs[-1].graph.op if op.type == kind]
    return found


def inputs_of(op) -> list[str]:
    """Names of the inputs that are connected, in order."""
    return [d.name for d, source in zip(op.input_desc, op.input, strict=True) if source]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", list(ours.TWINS))
def test_becomes_cann_s_operator(name, dynamic, graphs):
    arguments = sample(name, CPU, torch.bfloat16)
    if name == "npu_sparse_attention_pto":
        arguments |= PUBLIC_KERNEL
    wanted = overload(BY_NAME[name])(**copy.deepcopy(arguments))
    got = convert(name, arguments, dynamic)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    op, twin = node(graphs, BY_NAME[name].ge), ours.TWINS[name]
    assert [d.name for d in op.output_desc] == list(twin.outputs)
    given = [theirs for theirs, mine in twin.inputs.items() if arguments.get(mine) is not None]
    if name == "npu_sparse_flash_attention":
        given.insert(2, "value")  # None means the keys
    assert inputs_of(op) == given
    attributes = {k: v for k, v in op.attr.items() if not k.startswith("_")}
    assert set(attributes) == {*twin.attrs, *twin.constants}
    # a cache is updated in place where torchair's table of such operators lists CANN's; it does not
    # list SparseAttentionPto, whose three caches it copies
    copies = [each.type for each in graphs[-1].graph.op].count("TensorMove")
    assert copies == (3 if name == "npu_sparse_attention_pto" else 0)


def test_attributes_hold_the_values(graphs):
    arguments = sample("npu_lightning_indexer", CPU, torch.bfloat16)
    convert("npu_lightning_indexer", arguments)
    attr = node(graphs, "LightningIndexer").attr
    assert (attr["sparse_count"].i, attr["sparse_mode"].i) == (8, 3)
    assert (attr["layout_query"].s, attr["return_values"].b) == (b"BSND", True)


@pytest.mark.parametrize("name,value", [*PUBLIC_KERNEL.items(), ("weight_format", "nd")])
def test_what_cann_lacks_is_refused_by_name(name, value):
    arguments = sample("npu_sparse_attention_pto", CPU, torch.bfloat16) | PUBLIC_KERNEL
    arguments |= {name: value} if name == "weight_format" else {}
    if name in PUBLIC_KERNEL:
        del arguments[name]
        if name == "sparse_count":
            arguments[name] = 1024
    with pytest.raises(Exception, match=rf"computes with `{name}` = .* only.*reduce-overhead"):
        convert("npu_sparse_attention_pto", arguments)


@pytest.mark.parametrize("name", [s.name for s in SPECS if s.name not in ours.TWINS])
def test_an_op_that_cann_lacks_names_npugraph_ex(name):
    arguments = sample(name, CPU, torch.bfloat16)
    with pytest.raises(Exception, match=r"CANN has no operator of this meaning.*npugraph_ex"):
        convert(name, arguments)


def test_the_package_is_the_installed_one():
    assert custom.__version__
