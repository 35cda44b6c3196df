# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Our ops through the real torchair: the Ascend IR graph, node by node."""

from __future__ import annotations

import copy
import runpy
import sys
import types
from pathlib import Path

import pytest
import torch
from custom.dispatch.errors import NotSupported
from custom.dispatch.register import bind, overload
from custom.dispatch.registry import BY_NAME, SPECS

import custom
from tests.support.calls import mutated, tensors
from tests.support.samples import sample

from . import standalone

# these have an operator of CANN's, and no GE form of it is public
NO_FORM = [
    "npu_sparse_flash_attention_grad",
    "npu_chunk_gated_delta_rule",
]
standalone.install({spec.ge for spec in SPECS if spec.ge} | {"SparseAttnSharedkvMetadata"})
import torchair  # noqa: E402
from custom.graph_mode import torchair as ours  # noqa: E402
from torchair._ge_concrete_graph.fx2ge_converter import GeConcreteGraph  # noqa: E402
from torchair._ge_concrete_graph.ge_ir_pb2 import ModelDef  # noqa: E402
from torchair.ge._ge_graph import torch_type_to_ge_proto_type  # noqa: E402

ours.register()
CPU = torch.device("cpu")
EXAMPLES = Path(__file__).parents[2] / "examples"
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


def convert(name: str, arguments: dict, dynamic: bool | None = False, free: dict | None = None):
    """`free`: argument -> its dynamic dimensions, with dynamic=None."""
    torch._dynamo.reset()
    config = torchair.CompilerConfig()
    config.debug.run_eagerly = True
    backend = torchair.get_npu_backend(compiler_config=config)
    constants = {k: v for k, v in arguments.items() if not isinstance(v, torch.Tensor)}
    copies = {id(v): v.clone() for k, v in arguments.items() if k not in constants}
    # one tensor under two names stays one
    tensors = {k: copies[id(v)] for k, v in arguments.items() if k not in constants}
    for argument, dimensions in (free or {}).items():
        torch._dynamo.mark_dynamic(tensors[argument], dimensions)

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


def value_of(attribute):
    value = getattr(attribute, attribute.WhichOneof("value"))
    return value.decode() if isinstance(value, bytes) else value


COPIED = {
    "npu_sparse_attention_pto": 3,
    "npu_fused_causal_conv1d": 1,
    "npu_fused_causal_conv1d_v2": 2,
}


def for_cann(name: str) -> dict:
    """The op's sample, as CANN's operator takes it."""
    arguments = sample(name, CPU, torch.bfloat16)
    if name == "npu_sparse_attention_pto":
        arguments |= PUBLIC_KERNEL
    elif name == "npu_hc_pre":
        del arguments["norm_weight"]
    elif name == "npu_fused_infer_attention_score_v2":
        del arguments["return_softmax_lse"]
    return arguments


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", list(ours.TWINS))
def test_becomes_cann_s_operator(name, dynamic, graphs):
    arguments = for_cann(name)
    twin, free = ours.TWINS[name], None
    if twin.sizes and dynamic:  # a size that is an attribute must stay fixed
        dynamic, free = None, {n: [0, 1] for n in tensors(arguments)}
    wanted = overload(BY_NAME[name])(**copy.deepcopy(arguments))
    got = convert(name, arguments, dynamic, free)
    torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)
    op = node(graphs, BY_NAME[name].ge)
    assert [d.name for d in op.output_desc] == list(twin.outputs)
    given = [theirs for theirs, mine in twin.inputs.items() if arguments.get(mine) is not None]
    if name == "npu_sparse_flash_attention":
        given.insert(2, "value")  # None means the keys
    assert inputs_of(op) == given
    attributes = {k: v for k, v in op.attr.items() if not k.startswith("_")}
    assert set(attributes) == {*twin.attrs, *twin.constants, *twin.sizes}
    schema = overload(BY_NAME[name])._schema
    values, defaults = bind(schema, (), arguments), bind(schema, (), {})
    for theirs, mine in twin.attrs.items():
        value = defaults[mine] if values[mine] is None else values[mine]
        value = twin.words[theirs].index(value) if theirs in twin.words else value
        assert value_of(attributes[theirs]) == pytest.approx(value), theirs
    for theirs, only in twin.constants.items():
        assert value_of(attributes[theirs]) == only
    outputs = (wanted,) if isinstance(wanted, torch.Tensor) else wanted or (arguments["x"],)
    for theirs, output in zip(twin.returns, outputs, strict=True):
        description = op.output_desc[list(twin.outputs).index(theirs)]
        assert description.dtype == torch_type_to_ge_proto_type(output.dtype)
    # a cache is updated in place where torchair's table of such operators lists CANN's; what others
    # write it copies
    copies = [each.type for each in graphs[-1].graph.op].count("TensorMove")
    assert copies == COPIED.get(name, 0)


def test_attributes_hold_the_values(graphs):
    arguments = sample("npu_lightning_indexer", CPU, torch.bfloat16)
    convert("npu_lightning_indexer", arguments)
    attr = node(graphs, "LightningIndexer").attr
    assert (attr["sparse_count"].i, attr["sparse_mode"].i) == (8, 3)
    assert (attr["layout_query"].s, attr["return_values"].b) == (b"BSND", True)


@pytest.mark.parametrize("activation, mode", [("None", 0), ("silu", 1), ("swish", 2), (None, 0)])
def test_words_of_the_convolution_are_cann_s_numbers(graphs, activation, mode):
    """As torch_npu's own converter has them."""
    arguments = sample("npu_fused_causal_conv1d", CPU, torch.bfloat16)
    convert("npu_fused_causal_conv1d", arguments | dict(activation=activation))
    assert node(graphs, "FusedCausalConv1d").attr["activation_mode"].i == mode


@pytest.mark.parametrize("name,value", [*PUBLIC_KERNEL.items(), ("weight_format", "nd")])
def test_what_cann_lacks_is_refused_by_name(name, value):
    arguments = sample("npu_sparse_attention_pto", CPU, torch.bfloat16) | PUBLIC_KERNEL
    arguments |= {name: value} if name == "weight_format" else {}
    if name in PUBLIC_KERNEL:
        del arguments[name]
        if name == "sparse_count":
            arguments[name] = 1024
    with pytest.raises(Exception, match=rf"computes with `{name}` = .* only.*npugraph_ex"):
        convert("npu_sparse_attention_pto", arguments)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(norm_weight=torch.ones(8)), "`norm_weight` is given, which CANN's HcPre does not"),
        (dict(hc_fn=torch.ones(4, 32)), "`hc_fn` has 4 rows, and CANN's HcPre takes 24"),
    ],
    ids=["norm", "head"],
)
def test_what_cann_s_hyper_connections_lack_is_refused_by_name(change, message):
    arguments = (
        dict(
            x=torch.ones(3, 4, 8, dtype=torch.bfloat16),
            hc_fn=torch.ones(24, 32),
            hc_scale=torch.ones(3),
            hc_base=torch.ones(24),
        )
        | change
    )
    if "hc_fn" in change:
        arguments |= dict(hc_scale=torch.ones(1), hc_base=torch.ones(4))
    with pytest.raises(Exception, match=rf"{message}.*npugraph_ex"):
        convert("npu_hc_pre", arguments)


def test_a_compressor_that_takes_page_0_for_none_is_refused_by_name():
    name = "npu_compressor"
    with pytest.raises(Exception, match=rf"{name}: CANN's Compressor takes page 0.*npugraph_ex"):
        convert(name, sample(name, CPU, torch.bfloat16))


@pytest.fixture
def cores(monkeypatch):
    """Of an NPU that is not here."""
    npu = types.SimpleNamespace(
        current_stream=lambda: None,
        get_stream_limit=lambda stream: dict(cube_core_num=24, vector_core_num=48),
        get_device_properties=lambda: types.SimpleNamespace(name="Ascend910_9392"),
    )
    monkeypatch.setattr(torch, "npu", npu, raising=False)


@pytest.mark.parametrize("kind", ["sliding", "HCA", "CSA"])
@pytest.mark.parametrize("name", ["npu_sparse_attn_sharedkv"])
def test_attention_over_rows_and_entries_becomes_cann_s(name, kind, graphs, cores):
    """Its work is dealt out by an operator in front, whatever `metadata` the caller has."""
    arguments = sharedkv(kind) | dict(metadata=torch.zeros(1024, dtype=torch.int32))
    wanted = overload(BY_NAME[name])(**arguments)
    got = convert(name, arguments)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    op, dealt = (node(graphs, f"SparseAttnSharedkv{end}") for end in ("", "Metadata"))
    tensors = [n for n, x in arguments.items() if isinstance(x, torch.Tensor)]
    assert sorted(inputs_of(op)) == sorted(tensors)
    given = {d.name: s.partition(":")[0] for d, s in zip(op.input_desc, op.input, strict=True)}
    assert given["metadata"] == dealt.name
    assert inputs_of(dealt) == ["seqused_q", "seqused_kv"]
    assert op.attr["softmax_scale"].f == pytest.approx(64**-0.5)
    assert (op.attr["cmp_ratio"].i, op.attr["layout_kv"].s) == (
        0 if kind == "sliding" else 4,
        b"PA_ND",
    )
    attr = dealt.attr
    names = ("num_heads_q", "head_dim", "batch_size", "max_seqlen_q", "max_seqlen_kv", "cmp_topk")
    assert [attr[n].i for n in names] == [4, 64, 2, 3, 48, 5 if kind == "CSA" else 0]
    assert attr["has_cmp_kv"].b == (kind != "sliding")
    assert attr["cmp_ratio"].i == (-1 if kind == "sliding" else 4)
    assert (attr["soc_version"].s, attr["aic_core_num"].i) == (b"Ascend910_9392", 24)


def sharedkv(kind: str) -> dict:
    new = lambda *shape: torch.randn(*shape, dtype=torch.bfloat16)  # noqa: E731
    ints = lambda *values: torch.tensor(values, dtype=torch.int32)  # noqa: E731
    given = dict(
        q=new(2, 3, 4, 64),
        ori_kv=new(6, 16, 1, 64),
        ori_block_table=ints(*range(6)).view(2, 3),
        seqused_q=ints(3, 2),
        seqused_kv=ints(20, 33),
        sinks=torch.zeros(4),
        ori_win_left=7,
    )
    if kind != "sliding":
        given |= dict(
            cmp_kv=new(4, 16, 1, 64), cmp_block_table=ints(0, 1, 2, 3).view(2, 2), cmp_ratio=4
        )
    if kind == "CSA":
        given["cmp_sparse_indices"] = ints(*range(5)).expand(2, 3, 1, 5).contiguous()
    return given


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(return_softmax_lse=True), "computes with `return_softmax_lse` = False only"),
        (dict(ori_topk_length=torch.ones(6, dtype=torch.int32)), "`ori_topk_length` is given"),
    ],
    ids=["lse", "slots"],
)
def test_what_cann_s_attention_over_entries_lacks_is_refused_by_name(change, message, cores):
    name, given = "npu_sparse_attn_sharedkv", sharedkv("sliding") | change
    if "ori_topk_length" in change:
        given = dict(
            q=given["q"],
            ori_kv=given["ori_kv"],
            indices_are_slots=True,
            **change,
            ori_sparse_indices=torch.zeros(2, 3, 1, 4, dtype=torch.int32),
        )
        message = "`ori_sparse_indices` is given"
    with pytest.raises(Exception, match=rf"{name}: .*{message}.*npugraph_ex"):
        convert(name, given)


def test_where_there_is_no_npu_its_cores_are_not_known():
    with pytest.raises(Exception, match=r"npu_sparse_attn_sharedkv: there is no torch\.npu"):
        convert("npu_sparse_attn_sharedkv", sharedkv("sliding"))


FLASH = {
    "npu_fused_attention": ("attention_out", ["query", "key", "value"]),
    "npu_fused_attention_backward": (
        "dq",
        ["query", "key", "value", "dy", "softmax_max", "softmax_sum", "attention_in"],
    ),
}


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", list(FLASH))
def test_attention_becomes_cann_s(name, dynamic, causal, graphs):
    """CANN's operator between the few that make its softmax statistics of our log-sum-exp."""
    arguments = sample(name, CPU, torch.bfloat16) | dict(causal=causal)
    free = {n: [0, 2] for n in ("q", "k", "v", "grad_o", "o", "lse") if n in arguments}
    wanted = overload(BY_NAME[name])(**arguments)
    got = convert(name, arguments, None if dynamic else False, free if dynamic else None)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    op = node(graphs, BY_NAME[name].ge)
    _, inputs = FLASH[name]
    mask = ["atten_mask"] if causal else []
    assert sorted(inputs_of(op)) == sorted(inputs + mask)
    attr = op.attr
    assert (attr["head_num"].i, attr["input_layout"].s) == (4, b"BNSD")
    assert attr["scale_value"].f == pytest.approx(32**-0.5)
    assert (attr["sparse_mode"].i, attr["keep_prob"].f) == (3 if causal else 0, 1.0)
    kinds = {each.name: each.type for each in graphs[-1].graph.op}
    if name == "npu_fused_attention":
        log, add, most = (node(graphs, kind) for kind in ("Log", "Add", "ReduceMax"))
        assert log.input[0] == f"{op.name}:1"  # the softmax sum
        assert list(add.input) == [f"{op.name}:0", f"{log.name}:0"]
        assert most.input[0] == f"{add.name}:0"
        returned = node(graphs, "NetOutput").input
        assert list(returned[:2]) == [f"{op.name}:3", f"{most.name}:0"]
    else:
        given = {
            d.name: source.partition(":")[0]
            for d, source in zip(op.input_desc, op.input, strict=True)
        }
        assert kinds[given["softmax_max"]] == "Tile" and kinds[given["softmax_sum"]] == "OnesLike"


INFER = "npu_fused_infer_attention_score_v2"


@pytest.mark.parametrize("mode, pre, seen", [(0, None, 2**31 - 1), (3, None, 2**31 - 1), (4, 9, 9)])
@pytest.mark.parametrize("pages", ["[pages, P, 1, R]", "[pages, 1, P, R]", "[pages, P, R]"])
@pytest.mark.parametrize("name", [INFER])
def test_attention_to_latents_becomes_cann_s(name, pages, mode, pre, seen, graphs):
    arguments = for_cann(name) | dict(sparse_mode=mode)
    if pre is not None:
        arguments |= dict(pre_tokens=pre, next_tokens=0)
    for cache in ("key", "value", "key_rope"):
        x = arguments[cache]
        if pages == "[pages, 1, P, R]":
            arguments[cache] = x.transpose(1, 2).contiguous()
        elif pages == "[pages, P, R]":
            arguments[cache] = x.squeeze(2)
    arguments["value"] = arguments["key"]
    wanted, _ = overload(BY_NAME[name])(**arguments)
    got, _ = convert(name, arguments)
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)
    op = node(graphs, BY_NAME[name].ge)
    mask = ["atten_mask"] if mode else []
    lengths = ["actual_seq_lengths", "actual_seq_lengths_kv"]
    given = ["query", "key0", "value0", *mask, *lengths, "block_table", "query_rope", "key_rope"]
    assert inputs_of(op) == given
    sources = dict(zip([d.name for d in op.input_desc], op.input, strict=True))
    assert sources["key0"] == sources["value0"]
    kinds = {f"{each.name}:0": each.type for each in graphs[-1].graph.op}
    squeezed = pages != "[pages, P, R]"
    assert [kinds[sources[n]] == "Squeeze" for n in ("key0", "key_rope")] == [squeezed] * 2
    assert {kinds[sources[n]] for n in lengths} == {"Cast"}
    attr = op.attr
    names = ("num_heads", "num_key_value_heads", "sparse_mode", "block_size", "pre_tokens")
    assert [attr[n].i for n in names] == [4, 1, mode, 16, seen]
    assert attr["input_layout"].s == b"BSND" and attr["scale"].f == pytest.approx(0.2)
    assert not attr["softmax_lse_flag"].b


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(return_softmax_lse=True), "`return_softmax_lse` is True: what CANN's"),
        (dict(learnable_sink=torch.zeros(4)), "`learnable_sink` is not bfloat16"),
    ],
    ids=["lse", "sink"],
)
def test_what_cann_s_attention_to_latents_lacks_is_refused_by_name(change, message):
    with pytest.raises(Exception, match=rf"{INFER}: {message}.*npugraph_ex"):
        convert(INFER, for_cann(INFER) | change)


REFUSED = {
    "window": (dict(window=3), "`window` is given"),
    "cu_seqlens_q": (
        dict(
            q=torch.randn(6, 4, 16, dtype=torch.bfloat16),
            k=torch.randn(6, 2, 16, dtype=torch.bfloat16),
            v=torch.randn(6, 2, 16, dtype=torch.bfloat16),
            cu_seqlens_q=torch.tensor([0, 2, 6], dtype=torch.int32),
            cu_seqlens_k=torch.tensor([0, 2, 6], dtype=torch.int32),
        ),
        "`cu_seqlens_q` is given",
    ),
    "causal": (
        dict(
            k=torch.randn(2, 2, 5, 32, dtype=torch.bfloat16),
            v=torch.randn(2, 2, 5, 16, dtype=torch.bfloat16),
        ),
        "`causal` with `q` longer than `k`",
    ),
}


@pytest.mark.parametrize("what", list(REFUSED))
def test_what_cann_s_attention_lacks_is_refused_by_name(what):
    changes, sentence = REFUSED[what]
    arguments = sample("npu_fused_attention", CPU, torch.bfloat16) | changes
    with pytest.raises(Exception, match=rf"npu_fused_attention: {sentence}.*npugraph_ex"):
        convert("npu_fused_attention", arguments)


def test_dynamic_sizes_that_do_not_fit_are_found_again():
    """The converter asks for sizes by a guard: other sizes convert anew, and are refused."""
    arguments = sample("npu_fused_attention", CPU, torch.bfloat16)
    config = torchair.CompilerConfig()
    config.debug.run_eagerly = True
    compiled = torch.compile(
        overload(BY_NAME["npu_fused_attention"]),
        backend=torchair.get_npu_backend(compiler_config=config),
        fullgraph=True,
    )
    torch._dynamo.reset()
    for name in "qkv":
        torch._dynamo.mark_dynamic(arguments[name], 2)
    with torch.no_grad():
        compiled(**arguments)
        longer = torch.randn(2, 4, 8, 32, dtype=torch.bfloat16)
        compiled(**arguments | dict(q=longer))
        longest = torch.randn(2, 4, 10, 32, dtype=torch.bfloat16)
        with pytest.raises(Exception, match="`causal` with `q` longer than `k`"):
            compiled(**arguments | dict(q=longest))


def test_sinks_of_the_loss_are_refused_by_name():
    arguments = sample("npu_sparse_lightning_indexer_grad_kl_loss", CPU, torch.bfloat16)
    arguments["sinks"] = torch.zeros(4)
    with pytest.raises(Exception, match=r"`sinks` is given, which CANN's .*npugraph_ex"):
        convert("npu_sparse_lightning_indexer_grad_kl_loss", arguments)


def test_an_attribute_that_depends_on_a_size_is_refused_by_name():
    arguments = sample("npu_lightning_indexer_grad", CPU, torch.bfloat16)
    with pytest.raises(Exception, match=r"`headNum` is symbolic.*npugraph_ex"):
        convert("npu_lightning_indexer_grad", arguments, dynamic=True)


@pytest.mark.parametrize(
    "name", [s.name for s in SPECS if s.name not in {*ours.TWINS, *ours.COMPOSED}]
)
def test_an_op_without_a_form_names_npugraph_ex(name):
    arguments = sample(name, CPU, torch.bfloat16)
    sentence = r"no GE form of CANN's \w+" if name in NO_FORM else "it has no conversion to an op"
    sentence = "CANN's Compressor takes page 0" if name == "npu_compressor" else sentence
    with pytest.raises(Exception, match=rf"{name}: {sentence}.*npugraph_ex"):
        convert(name, arguments)


class Step(torch.nn.Module):
    """The op with its constants; weights are buffers.  Caches are arguments: dynamo_export makes a
    constant of every buffer."""

    def __init__(self, name: str, arguments: dict) -> None:
        super().__init__()
        self.op = overload(BY_NAME[name])
        self.constants = {n: v for n, v in arguments.items() if not isinstance(v, torch.Tensor)}
        self.kept = [
            n for n in arguments if n.startswith(("w_", "weight_")) and n != "weight_format"
        ]
        for each in self.kept:
            self.register_buffer(each, arguments[each])

    def forward(self, **given: torch.Tensor):
        kept = {each: getattr(self, each) for each in self.kept}
        return self.op(**given, **kept, **self.constants)


@pytest.mark.parametrize("name", [*ours.TWINS, *ours.COMPOSED])
def test_dynamo_export_writes_the_serialised_graph(name, tmp_path, cores):
    arguments = sharedkv("CSA") if name == "npu_sparse_attn_sharedkv" else for_cann(name)
    model = Step(name, arguments)
    given = {
        n: v for n, v in arguments.items() if isinstance(v, torch.Tensor) and n not in model.kept
    }
    with torch._dynamo.config.patch(specialize_int=True):
        torchair.dynamo_export(
            model=model,
            export_path=str(tmp_path),
            export_name="step",
            config=torchair.CompilerConfig(),
            **given,
        )
    (graph,) = ModelDef.FromString((tmp_path / "step.air").read_bytes()).graph
    kinds = [op.type for op in graph.op]
    assert kinds.count(BY_NAME[name].ge) == 1
    # a written cache is a variable of the graph
    written = [each for each in mutated(BY_NAME[name]) if each in arguments]
    assert kinds.count("RefData") == len(written)
    # keys that are values, too, come in once
    assert kinds.count("Data") == len({*map(id, given.values())}) - len(written)
    assert (tmp_path / "options.json").exists()


def test_dynamo_export_refuses_as_the_compiler_does(tmp_path):
    name = "npu_indexer_prolog_pto"
    arguments = sample(name, CPU, torch.bfloat16)
    model = Step(name, arguments)
    given = {n: v for n, v in arguments.items() if n not in model.kept}
    with pytest.raises(
        Exception, match=r"it has no conversion to an operator of CANN's.*npugraph_ex"
    ):
        torchair.dynamo_export(
            model=model, export_path=str(tmp_path), config=torchair.CompilerConfig(), **given
        )


def test_where_ge_calls_python_back_ops_without_a_twin_are_still_refused(monkeypatch):
    """CANN has the package `ge`: torch_npu would write a converter that calls back."""
    converters = {}

    def register(target):
        return lambda convert: converters.setdefault(target, convert)

    monkeypatch.setitem(sys.modules, "ge", types.ModuleType("ge"))
    monkeypatch.setattr(torchair, "register_fx_node_ge_converter", register)
    ours.register()
    assert set(converters) == {overload(spec) for spec in SPECS}
    lacking = [spec for spec in SPECS if spec.name not in {*ours.TWINS, *ours.COMPOSED}]
    assert {"npu_indexer_prolog_pto", "npu_chunk_gated_delta_rule"} <= {x.name for x in lacking}
    for spec in lacking:
        with pytest.raises(NotSupported, match=f"^{spec.name}: .*npugraph_ex"):
            converters[overload(spec)]()


def test_example_converts(monkeypatch, capsys, graphs):
    monkeypatch.setattr(sys, "argv", ["graph_torchair.py", "--device", "cpu"])
    monkeypatch.syspath_prepend(EXAMPLES)
    torch._dynamo.reset()
    runpy.run_path(str(EXAMPLES / "graph_torchair.py"), run_name="__main__")
    assert node(graphs, "FlashAttentionScore").attr["sparse_mode"].i == 3
    assert "converted to CANN's FlashAttentionScore" in capsys.readouterr().out


def test_the_package_is_the_installed_one():
    assert custom.__version__
