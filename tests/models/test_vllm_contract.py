# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Our plug-in against what vLLM's wheels say of the classes and functions that it touches.

No vLLM is installed: tests/vllm/stubs.py made tests/vllm/stubs/ of the wheels' sources.  After a
release, `python -m tests.vllm.stubs WHEEL` adds its stubs, and these tests say what has moved.
"""

from __future__ import annotations

import ast
import importlib
import sys
from configparser import ConfigParser
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from custom.dispatch.errors import BackendUnavailable, NotSupported
from torch.fx.experimental.proxy_tensor import make_fx

from custom.integrations import vllm
from custom.integrations.engines import check_version, refuse_unread
from custom.integrations.vllm import modes

from ..support.typed import ROOT, STUBS, checker, moved
from ..vllm.stubs import HOOKS

VERSIONS = sorted(each.name.removeprefix("vllm-") for each in STUBS.glob("vllm-*"))
(ASCEND,) = STUBS.glob("vllm_ascend-*")
PLUGIN = ROOT / "custom" / "integrations" / "vllm"


MOVED = {
    "vllm/v1/attention/backend.py": ("    slot_mapping: torch.Tensor", ""),  # a field
    "vllm/v1/kv_cache_interface.py": ("    max_tp_shards: int | None = ...", ""),  # an argument
    "vllm/model_executor/layers/attention_layer_base.py": (
        "bind_kv_cache",
        "bind_cache",
    ),  # a method
    "vllm/model_executor/layers/mla.py": (", llama", ", more: int, llama"),  # another argument
    "vllm/forward_context.py": ("get_forward_context", "get_context"),
}


def test_what_we_touch_is_there_and_what_moves_is_seen(tmp_path):
    """By mypy, strict, over the plug-in: every name, field, argument and override."""
    pytest.importorskip("mypy", reason="a tool of `make lint`")
    said = checker(tmp_path, vllm.__name__)
    for version in VERSIONS:
        assert said(STUBS / f"vllm-{version}", ASCEND).startswith("Success"), version
    changed = said(moved(STUBS / f"vllm-{VERSIONS[-1]}", tmp_path, MOVED), ASCEND)
    for name in ("slot_mapping", "max_tp_shards", "bind_kv_cache", "forward", "get_forward"):
        assert f'"{name}' in changed, changed


@pytest.mark.parametrize("folder", sorted(STUBS.glob("*-*")), ids=lambda folder: folder.name)
def test_stubs_have_every_member(folder):
    """Also of `nn.Module`s, which to mypy have any attribute."""
    for module, names in HOOKS[folder.name.rpartition("-")[0]].items():
        path = folder.joinpath(*module.split("."))
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                named = [getattr(each, "target", each) for each in node.body]
                found = {getattr(each, "name", getattr(each, "id", None)) for each in named}
                assert found >= {*names[node.name]}, (module, node.name)


def arguments(path: Path, name: str) -> ast.arguments:
    """Of the constructor of the class `name`."""
    classes = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]
    (found,) = [node for node in classes if node.name == name]
    (init,) = [node for node in found.body if getattr(node, "name", None) == "__init__"]
    return init.args


@pytest.mark.parametrize("version", VERSIONS)
def test_our_layer_takes_their_arguments(version):
    """vLLM's models pass them by position up to the prefix."""
    stub = STUBS / f"vllm-{version}" / "vllm" / "model_executor" / "layers" / "mla.py"
    theirs = arguments(stub, "MultiHeadLatentAttentionWrapper")
    ours = arguments(PLUGIN / "mla.py", "SparseMLA")
    names = [each.arg for each in ours.args]
    assert names == [each.arg for each in theirs.args[: len(names)]]
    assert "prefix" in names and "skip_topk" in names and ours.kwarg
    required = [len(each.args) - len(each.defaults) for each in (ours, theirs)]
    assert required[0] == required[1]


def test_an_option_that_is_not_read_is_refused():
    """All of vLLM's options behind those are hints, but one."""
    stub = STUBS / f"vllm-{VERSIONS[-1]}" / "vllm" / "model_executor" / "layers" / "mla.py"
    theirs = [each.arg for each in arguments(stub, "MultiHeadLatentAttentionWrapper").args]
    source = ast.parse((PLUGIN / "mla.py").read_text())
    (hints,) = [
        ast.literal_eval(node.value)
        for node in source.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "HINTS"
    ]
    more = theirs[theirs.index("skip_topk") + 1 :]
    assert {*more} - {*hints} == {"non_causal_multi_token_decode"}
    refuse_unread(modes.SWITCH, "attention", dict.fromkeys(more, False), hints)
    refuse_unread(modes.SWITCH, "attention", dict.fromkeys(hints, True), hints)
    with pytest.raises(NotSupported, match="attention without `non_causal_multi_token_decode`"):
        refuse_unread(modes.SWITCH, "attention", dict.fromkeys(more, True), hints)


def ops_of_vllm() -> list[ast.Call]:
    """Our calls of torch.ops.vllm, whose names and arguments mypy does not see."""
    nodes = [x for path in PLUGIN.glob("*.py") for x in ast.walk(ast.parse(path.read_text()))]
    calls = [x for x in nodes if isinstance(x, ast.Call)]
    return [x for x in calls if ast.unparse(x.func).startswith("torch.ops.vllm.")]


@pytest.mark.parametrize("version", VERSIONS)
def test_their_op_takes_our_arguments(version):
    (call,) = ops_of_vllm()
    name = ast.unparse(call.func).rpartition(".")[2]
    (module,) = [each for each, names in HOOKS["vllm"].items() if name in names]
    stub = STUBS / f"vllm-{version}" / Path(*module.split(".")).with_suffix(".py")
    defined = [x for x in ast.parse(stub.read_text()).body if isinstance(x, ast.FunctionDef)]
    (theirs,) = [[each.arg for each in x.args.args] for x in defined if x.name == name]
    keywords = [each.arg for each in call.keywords]
    assert theirs[len(call.args) :] == keywords, theirs


def test_the_range_is_what_there_are_stubs_for():
    minors = [tuple(map(int, each.split(".")[:2])) for each in VERSIONS]
    first, below = modes.VLLM
    assert minors[0] == first and (minors[-1][0], minors[-1][1] + 1) == below
    for version in VERSIONS:
        check_version(modes.SWITCH, "vLLM", version, modes.VLLM)


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0rc1", "1.0"])
def test_another_version_is_refused(version):
    with pytest.raises(BackendUnavailable, match=f"0.32,<0.34, and {version} is installed; "):
        check_version(modes.SWITCH, "vLLM", version, modes.VLLM)


def test_the_entry_point_is_ours():
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    name, _, where = setup["options.entry_points"]["vllm.general_plugins"].strip().partition(" = ")
    assert (name, where) == ("npu_custom_ops", f"{vllm.__name__}:{vllm.register.__name__}")


def configuration(**changed: object) -> SimpleNamespace:
    parallel = dict(
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        data_parallel_size=1,
        decode_context_parallel_size=1,
        prefill_context_parallel_size=1,
        use_ubatching=False,
    )
    given = dict(speculative_config=None, lora_config=None, kv_transfer_config=None)
    parallel |= {name: value for name, value in changed.items() if name in parallel}
    given |= {name: value for name, value in changed.items() if name in given}
    return SimpleNamespace(parallel_config=SimpleNamespace(**parallel), **given)


def test_a_plain_engine_is_served():
    modes.check_modes("sparse attention", configuration(), quantised_weights=False)


@pytest.mark.parametrize(
    ("asked", "mode"),
    [
        (dict(tensor_parallel_size=2), "tensor parallelism"),
        (dict(pipeline_parallel_size=2), "pipeline parallelism"),
        (dict(data_parallel_size=2), "data parallelism"),
        (dict(decode_context_parallel_size=2), "context parallelism"),
        (dict(prefill_context_parallel_size=2), "context parallelism"),
        (dict(use_ubatching=True), "microbatches (DBO)"),
        (dict(speculative_config=object()), "speculative decoding"),
        (dict(lora_config=object()), "LoRA"),
        (dict(kv_transfer_config=object()), "a KV connector"),
    ],
)
def test_a_mode_that_was_not_tried_is_refused(asked, mode):
    with pytest.raises(NotSupported) as error:
        modes.check_modes("sparse attention", configuration(**asked))
    assert str(error.value) == (
        f"CUSTOM_VLLM=1 serves sparse attention without {mode}, and this engine asks for it; turn "
        "it off, or unset CUSTOM_VLLM."
    )


def test_a_layer_names_more_modes():
    with pytest.raises(NotSupported, match="without quantised weights, and"):
        modes.check_modes("sparse attention", configuration(), quantised_weights=True)


@pytest.fixture
def device_op(monkeypatch):
    """vllm-ascend's module of that name, by its stub."""
    monkeypatch.syspath_prepend(str(ASCEND))
    module = importlib.import_module("vllm_ascend.device.device_op")
    module.DeviceOperator = operator = module.BaseDeviceAdaptor
    operator._format_sparse_flash_attention_output = staticmethod(lambda out, *_: out)
    yield module
    for name in [each for each in sys.modules if each.split(".")[0] == "vllm_ascend"]:
        del sys.modules[name]
    sys.modules.pop("custom.integrations.vllm.ascend", None)


def test_the_calls_of_vllm_ascend_are_our_ops(device_op):
    """Its arguments, on a cache of pages; 2048 of fewer keys are all of them."""
    ascend = importlib.import_module("custom.integrations.vllm.ascend")
    ascend.register()
    operator = device_op.DeviceOperator
    torch.manual_seed(0)
    lengths, tokens, heads = torch.tensor([37, 20]), 5, 4
    table = torch.tensor([[2, 0, 3], [1, 4, -1]])
    caches = tuple(torch.randn(5, 16, 1, n) for n in (32, 16, 24))
    q, q_rope = torch.randn(tokens, heads, 32), torch.randn(tokens, heads, 16)
    ends = torch.tensor([3, 5])
    impl = SimpleNamespace(scale=0.2)
    batch = SimpleNamespace(block_table=table)
    query, weights = torch.randn(tokens, 6, 24), torch.rand(tokens, 6)
    selected = operator.indexer_select_post_process(
        impl, query, None, None, weights, caches, batch, ends, lengths, False, False
    )
    out = operator.execute_sparse_flash_attention_process(
        impl, q, q_rope, caches, selected, batch, ends, lengths
    )
    for token, (request, seen) in enumerate([(0, 35), (0, 36), (0, 37), (1, 19), (1, 20)]):
        pages = [each[table[request].clamp(min=0)].flatten(0, 2)[:seen] for each in caches]
        logits = 0.2 * (q[token] @ pages[0].T + q_rope[token] @ pages[1].T)
        torch.testing.assert_close(out[token], logits.softmax(-1) @ pages[0])


def test_vllm_ascend_is_refused_where_it_was_not_tried(device_op):
    ascend = importlib.import_module("custom.integrations.vllm.ascend")
    caches = (torch.zeros(1, 16, 1, 656, dtype=torch.int8),)
    with pytest.raises(NotSupported, match="without latents of 8 bits"):
        ascend.SparseOperator.execute_sparse_flash_attention_process(
            None, None, None, caches, None, None, None, None
        )
    ascend.DeviceOperator = type("A5DeviceAdaptor", (ascend.BaseDeviceAdaptor,), {})
    with pytest.raises(NotSupported, match="has a A5DeviceAdaptor; unset"):
        ascend.register()


@pytest.fixture
def gdn(monkeypatch):
    """Ours, on vLLM's stubs."""
    monkeypatch.syspath_prepend(str(STUBS / f"vllm-{VERSIONS[-1]}"))
    yield importlib.import_module("custom.integrations.vllm.gdn")
    for name in [each for each in sys.modules if each.split(".")[0] == "vllm"]:
        del sys.modules[name]
    sys.modules.pop("custom.integrations.vllm.gdn", None)


def test_a_fresh_slot_of_states_may_hold_anything(gdn):
    """Memory that another request, or a layer of another kind, has used; others go on."""
    torch.manual_seed(0)
    heads, value_heads, size, width = 2, 4, 16, 4
    keys, values = heads * size, value_heads * size
    taps = torch.randn(width, 2 * keys + values)
    layer = SimpleNamespace(
        key_dim=keys,
        value_dim=values,
        tp_size=1,
        head_k_dim=size,
        head_v_dim=size,
        A_log=torch.randn(value_heads),
        dt_bias=torch.randn(value_heads),
        activation="silu",
        taps=lambda: taps,
    )
    tokens = torch.randn(20, taps.shape[1]), *torch.randn(2, 20, value_heads)
    batch = SimpleNamespace(
        num_prefills=2,
        prefill_state_indices=torch.tensor([2, 1]),
        prefill_query_start_loc=torch.tensor([0, 13, 20]),
        prefill_has_initial_state=torch.tensor([True, False]),
    )
    found = []
    for what in (0.0, float("nan")):
        torch.manual_seed(1)
        pools = torch.randn(4, width - 1, taps.shape[1]), torch.randn(4, value_heads, size, size)
        for pool in pools:
            pool[1] = what
        found.append([gdn.GatedDelta.prefill(layer, batch, *pools, *tokens), *pools])
    for zero, nan in zip(*found, strict=True):
        assert torch.equal(zero, nan)


def test_a_recorded_decode_step_takes_what_its_buffers_hold_then(gdn, monkeypatch):
    """As in a graph: recorded on vLLM's null block alone, done again on requests and padding."""
    torch.manual_seed(0)
    heads, value_heads, size, width, rows, requests = 2, 4, 16, 4, 4, 3
    keys, values = heads * size, value_heads * size
    taps = torch.randn(width, 2 * keys + values)
    batch = SimpleNamespace(num_decode_tokens=rows, num_prefills=0)
    layer = SimpleNamespace(
        prefix="layer",
        value_dim=values,
        tp_size=1,
        head_v_dim=size,
        taps=lambda: taps,
        split_ba=lambda ba: ba.chunk(2, -1),
        A_log=torch.randn(value_heads),
        dt_bias=torch.randn(value_heads),
        norm=SimpleNamespace(weight=torch.randn(size), eps=1e-6, activation="silu"),
    )
    context = SimpleNamespace(attn_metadata={"layer": batch})
    monkeypatch.setattr(gdn, "get_forward_context", lambda: context)
    monkeypatch.setattr(gdn, "is_conv_state_dim_first", lambda: False)
    monkeypatch.setattr(gdn, "NULL_BLOCK_ID", 0)

    def step(qkvz, ba, slots, columns, states):
        batch.non_spec_state_indices_tensor = slots
        layer.kv_cache = columns, states
        out = qkvz.new_zeros(len(qkvz), value_heads, size)
        gdn.GatedDelta._forward_core_fused_norm_packed(layer, qkvz, ba, out)
        return out

    channels = taps.shape[1] + values
    buffers = torch.randn(rows, channels), torch.randn(rows, 2 * value_heads)
    slots = torch.zeros(rows, dtype=torch.int32)
    pools = torch.randn(6, width - 1, taps.shape[1]), torch.randn(6, value_heads, size, size)
    again = make_fx(step)(*buffers, slots, *pools)

    slots[:requests] = torch.tensor([4, 2, 5])
    for buffer in buffers:
        buffer.normal_()
        buffer[requests:] = float("nan")  # of rows that attend to nothing
    wanted = tuple(pool.clone() for pool in pools)
    batch.num_decode_tokens = requests
    real = step(*(buffer[:requests] for buffer in buffers), slots[:requests], *wanted)
    assert torch.equal(again(*buffers, slots, *pools)[:requests], real)
    for pool, want in zip(pools, wanted, strict=True):
        assert torch.equal(pool, want) and not pool.isnan().any()
