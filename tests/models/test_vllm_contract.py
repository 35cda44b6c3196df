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
from copy import deepcopy
from functools import partial
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from custom.dispatch import log
from custom.dispatch.errors import BackendUnavailable, NotSupported
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import custom
from custom.integrations import vllm
from custom.integrations.engines import check_version, refuse_unread
from custom.integrations.vllm import modes

from ..support import quantization
from ..support.deepseek_v4 import Attention
from ..support.deepseek_v4 import config as config_of_v4
from ..support.models import glm5_next, minimax_m3, olmo_hybrid
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
@pytest.mark.parametrize(
    ("file", "layer", "last"),
    [("mla.py", "SparseMLA", "skip_topk"), ("glm5_next.py", "PooledLatent", "prefix")],
)
def test_our_layer_takes_their_arguments(file, layer, last, version):
    """vLLM's models pass them by position up to the prefix."""
    stub = STUBS / f"vllm-{version}" / "vllm" / "model_executor" / "layers" / "mla.py"
    theirs = arguments(stub, "MultiHeadLatentAttentionWrapper")
    ours = arguments(PLUGIN / file, layer)
    names = [each.arg for each in ours.args]
    assert names == [each.arg for each in theirs.args[: len(names)]]
    assert "prefix" in names and names[-1] == last and ours.kwarg
    required = [len(each.args) - len(each.defaults) for each in (ours, theirs)]
    assert required[0] == required[1]


@pytest.mark.parametrize("version", VERSIONS)
def test_our_latent_attention_takes_their_arguments(version):
    """And what it does not take by name is refused, but for a hint."""
    stub = STUBS / f"vllm-{version}" / "vllm" / "models" / "kimi_k3" / "nvidia" / "mla.py"
    theirs = [each.arg for each in arguments(stub, "MultiHeadLatentAttention").args]
    found = arguments(PLUGIN / "kimi.py", "DenseLatent")
    ours = [each.arg for each in found.args]
    assert theirs[: len(ours)] == ours and found.kwarg
    assert theirs[len(ours) :] == ["use_rope", "non_causal_multi_token_decode", "run_gemm_rs_ar"]


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


@pytest.mark.parametrize("method", [None, "mtp"])
def test_a_plain_engine_is_served(method):
    drafts = SimpleNamespace(method=method) if method else None
    asked = configuration(speculative_config=drafts)
    modes.check_modes("sparse attention", asked, quantized_weights=False)


@pytest.mark.parametrize(
    ("asked", "mode"),
    [
        (dict(pipeline_parallel_size=2), "pipeline parallelism"),
        (dict(decode_context_parallel_size=2), "context parallelism"),
        (dict(prefill_context_parallel_size=2), "context parallelism"),
        (dict(use_ubatching=True), "microbatches (DBO)"),
        (
            dict(speculative_config=SimpleNamespace(method="ngram")),
            "drafts of another kind than MTP",
        ),
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
    with pytest.raises(NotSupported, match="without quantized weights, and"):
        modes.check_modes("sparse attention", configuration(), quantized_weights=True)


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


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("quantized", [False, True], ids=["keys of 16 bits", "keys of 8 bits"])
def test_vllm_ascend_s_quantized_latents(quantized, merged, device_op):
    """Rows of 656 bytes in the place of latents and rotary keys; index keys stand behind them."""
    ascend = importlib.import_module("custom.integrations.vllm.ascend")
    ascend.register()
    operator = device_op.DeviceOperator
    operator._format_sparse_flash_attention_output = staticmethod(
        lambda out, largest, total, lse: (out, largest, total) if lse else out
    )
    torch.manual_seed(0)
    lengths, ends, tokens, heads = torch.tensor([37, 20]), torch.tensor([3, 5]), 5, 4
    table = torch.tensor([[2, 0, 3], [1, 4, -1]])
    slots = torch.arange(5 * 16)
    rows = torch.zeros(5, 16, 1, 656, dtype=torch.int8)
    latents, rotary = torch.randn(len(slots), 512), torch.randn(len(slots), 64).bfloat16()
    layout: dict[str, Any] = dict(kind="int8", row_layout="nope_rope_scale")
    custom.npu_latent_cache_write(latents, rotary, rows, slots, **layout)
    keys = torch.randn(5, 16, 1, 128)
    caches: tuple[Tensor, ...] = (rows, keys)
    query, scale = torch.randn(tokens, 6, 128), None
    if quantized:
        query, scale = torch.randint(-9, 9, query.shape).to(torch.int8), torch.ones(tokens, 6)
        scale = scale.half()
        caches = (rows, keys.mul(9).to(torch.int8), torch.ones(5, 16, 1, 1).half())
    batch, impl = SimpleNamespace(block_table=table), SimpleNamespace(scale=0.04)
    selected = operator.indexer_select_post_process(
        impl,
        query,
        scale,
        query.shape,
        torch.rand(tokens, 6),
        caches,
        batch,
        ends,
        lengths,
        quantized,
        False,
    )
    q, q_rope = torch.randn(tokens, heads, 512), torch.randn(tokens, heads, 64)
    found = operator.execute_sparse_flash_attention_process(
        impl,
        q.bfloat16(),
        q_rope.bfloat16(),
        caches,
        selected,
        batch,
        ends,
        lengths,
        return_lse=merged,
    )
    out, *statistics = found if merged else (found,)
    q, q_rope = q.bfloat16().float(), q_rope.bfloat16().float()
    for token, (request, seen) in enumerate([(0, 35), (0, 36), (0, 37), (1, 19), (1, 20)]):
        places = table[request].clamp(min=0)[:, None] * 16 + torch.arange(16)
        places = places.flatten()[:seen]
        logits = 0.04 * (q[token] @ latents[places].T + q_rope[token] @ rotary[places].float().T)
        # int8 with a scale for 128 values, and bfloat16
        torch.testing.assert_close(
            out[token].float(), logits.softmax(-1) @ latents[places], rtol=0.02, atol=0.02
        )
        if merged:
            largest, total = (each[0, token] for each in statistics)
            torch.testing.assert_close(
                largest + total.log(), logits.logsumexp(-1), rtol=0.02, atol=0.02
            )


def test_vllm_ascend_is_refused_where_it_was_not_tried(device_op):
    ascend = importlib.import_module("custom.integrations.vllm.ascend")
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


def delta_layer(heads, value_heads, size, width, taps, **own):
    """What ours reads of vLLM's layer of the delta rule, on one rank; `own` is more, or other."""
    layer = dict(
        prefix="layer",
        key_dim=heads * size,
        value_dim=value_heads * size,
        tp_size=1,
        head_k_dim=size,
        head_v_dim=size,
        conv_kernel_size=width,
        activation="silu",
        taps=lambda: taps,
        split_ba=lambda ba: ba.chunk(2, -1),
        allow_neg_eigval=False,
    )
    return SimpleNamespace(**(layer | own))


def delta_batch(slots, decodes, new, going_on):
    """What vLLM says of a step: so many requests of one token, then those of `new` tokens each;
    `going_on` says which of the latter have a state."""
    return SimpleNamespace(
        spec_sequence_masks=None,
        num_actual_tokens=decodes + sum(new),
        num_decode_tokens=decodes,
        num_prefills=len(new),
        num_prefill_tokens=sum(new),
        non_spec_state_indices_tensor=torch.tensor(slots),
        prefill_state_indices=torch.tensor(slots[decodes:]),
        prefill_query_start_loc=torch.tensor([0, *accumulate(new)]),
        prefill_has_initial_state=torch.tensor(going_on),
    )


def rms_norm(weight):
    return SimpleNamespace(weight=weight, eps=1e-6, activation="silu")


def test_a_fresh_slot_of_states_may_hold_anything(gdn):
    """Memory that another request, or a layer of another kind, has used; others go on."""
    torch.manual_seed(0)
    heads, value_heads, size, width = 2, 4, 16, 4
    keys, values = heads * size, value_heads * size
    taps = torch.randn(width, 2 * keys + values)
    a_log, bias = torch.randn(2, value_heads)
    layer = delta_layer(heads, value_heads, size, width, taps, A_log=a_log, dt_bias=bias)
    layer.gates = partial(gdn.GatedDelta.gates, layer)
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
    batch = SimpleNamespace(
        spec_sequence_masks=None,
        num_decode_tokens=rows,
        num_prefills=0,
    )
    a_log, bias = torch.randn(2, value_heads)
    norm = rms_norm(torch.randn(size))
    layer = delta_layer(heads, value_heads, size, width, taps, A_log=a_log, dt_bias=bias, norm=norm)
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


@pytest.mark.parametrize("tokens", [(3, 0), (0, 17), (2, 9)])
def test_a_rank_has_its_heads_channels_and_states(tokens, gdn, monkeypatch):
    """Two ranks beside one, on decodes, prefills and both: value heads and their key heads."""
    torch.manual_seed(0)
    heads, value_heads, size, width = 2, 4, 16, 4
    parts = dict(q=heads, k=heads, v=value_heads, z=value_heads)
    decodes, new = tokens
    requests = decodes + 2 * (new > 0)
    lengths = [new // 2, new - new // 2] if new else []
    batch = delta_batch([3, 1, 5, 2][:requests], decodes, lengths, [True, False])
    context = SimpleNamespace(attn_metadata={"layer": batch})
    monkeypatch.setattr(gdn, "get_forward_context", lambda: context)
    monkeypatch.setattr(gdn, "is_conv_state_dim_first", lambda: False)
    monkeypatch.setattr(gdn, "NULL_BLOCK_ID", 0)
    rows = decodes + new
    mixed = {name: torch.randn(rows, n, size) for name, n in parts.items()}
    b, a = torch.randn(2, rows, value_heads)
    taps = {name: torch.randn(width, parts[name], size) for name in "qkv"}
    columns = {name: torch.randn(6, width - 1, parts[name], size) for name in "qkv"}
    states = torch.randn(6, value_heads, size, size)
    scales, biases, weight = *torch.randn(2, value_heads), torch.randn(size)

    def run(rank: int, ranks: int) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        def cut(x: Tensor, dim: int) -> Tensor:
            return x.chunk(ranks, dim)[rank].clone()

        def side_by_side(xs: dict[str, Tensor]) -> Tensor:
            return torch.cat([cut(each, -2).flatten(-2) for each in xs.values()], -1)

        layer = delta_layer(
            heads,
            value_heads,
            size,
            width,
            side_by_side(taps),
            tp_size=ranks,
            A_log=cut(scales, 0),
            dt_bias=cut(biases, 0),
            norm=rms_norm(weight),
            kv_cache=(side_by_side(columns), cut(states, 1)),
        )
        for name in ("prefill", "gates", "gated"):
            setattr(layer, name, partial(getattr(gdn.GatedDelta, name), layer))
        out = torch.zeros(rows, value_heads // ranks, size)
        gdn.GatedDelta._forward_core_fused_norm_packed(
            layer, side_by_side(mixed), torch.cat([cut(b, 1), cut(a, 1)], -1), out
        )
        kept = layer.kv_cache[0].split([parts[n] * size // ranks for n in "qkv"], -1)
        return out, dict(zip("qkv", kept, strict=True)), layer.kv_cache[1]

    out, channels, kept = run(0, 1)
    halves = [run(rank, 2) for rank in range(2)]
    torch.testing.assert_close(torch.cat([each[0] for each in halves], 1), out)
    torch.testing.assert_close(torch.cat([each[2] for each in halves], 1), kept)
    for name, whole in channels.items():
        assert torch.equal(torch.cat([each[1][name] for each in halves], -1), whole)
    assert not torch.equal(kept, states)


# what is kept, whether there are drafts, ranks, and what was not tried
ALL_BLOCKS = ("all", False, 1, "states of all blocks")
RANKS = ("none", False, 2, "data parallelism")


def build_delta(gdn: Any, kept: str, drafts: bool, ranks: int = 1, **has: Any) -> Any:
    """With what vLLM's layer has that its stub leaves open."""
    method = SimpleNamespace(method="mtp") if drafts else None
    config = configuration(speculative_config=method, data_parallel_size=ranks)
    config.cache_config = SimpleNamespace(mamba_cache_mode=kept)
    config.load_config = SimpleNamespace(load_format=has.pop("load_format", "auto"))
    names = dict.fromkeys(("get_attn_backend", "get_kv_cache_spec"))
    has = dict(gqa_interleaved_layout=False) | has
    return type("Layer", (gdn.GatedDelta,), names | has)(None, config)


@pytest.mark.parametrize(
    ("kept", "drafts", "ranks", "mode"),
    [ALL_BLOCKS, ("align", True, 1, "drafts beside kept prefixes"), RANKS],
)
def test_the_delta_rule_is_refused_where_it_was_not_tried(kept, drafts, ranks, mode, gdn):
    with pytest.raises(NotSupported, match=f"the gated delta rule without {mode}, and"):
        build_delta(gdn, kept, drafts, ranks)


@pytest.mark.parametrize(("kept", "drafts"), [("align", False), ("none", True)])
def test_the_delta_rule_is_served(kept, drafts, gdn):
    build_delta(gdn, kept, drafts)


@pytest.mark.parametrize(
    ("load_format", "quantized", "in_order"),
    [("auto", False, True), ("sharded_state", False, False), ("auto", True, False)],
)
def test_fused_projections_are_put_in_order_as_they_are_read(load_format, quantized, in_order, gdn):
    """Of two ranks, each of two key heads of 3 with two value heads of 5."""
    read = []
    qkvz, ba = (
        SimpleNamespace(
            weight=SimpleNamespace(weight_loader=lambda param, rows: read.append(rows[:, 0])),
            quant_method=object() if quantized else object.__new__(gdn.UnquantizedLinearMethod),
        )
        for _ in range(2)
    )
    layer = build_delta(
        gdn,
        "none",
        False,
        load_format=load_format,
        gqa_interleaved_layout=True,
        in_proj_qkvz=qkvz,
        in_proj_ba=ba,
        num_k_heads=4,
        num_v_heads=8,
        head_k_dim=3,
        head_v_dim=5,
        tp_size=2,
    )
    assert layer.by_key_heads is not in_order
    kinds = [("q", 3), ("k", 3), ("v", 10), ("z", 10)]
    rows = [(h, kind, i) for h in range(4) for kind, n in kinds for i in range(n)]
    qkvz.weight.weight_loader(None, torch.arange(len(rows))[:, None])
    ba.weight.weight_loader(None, torch.arange(16)[:, None])
    if in_order:
        ordered = [
            (h, kind, i)
            for heads in ((0, 1), (2, 3))
            for kind, n in kinds
            for h in heads
            for i in range(n)
        ]
        assert [rows[i] for i in read[0]] == ordered
        assert read[1].tolist() == [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15]
    else:
        assert [x.tolist() for x in read] == [list(range(len(rows))), list(range(16))]


@pytest.mark.parametrize("uniform", [True, False, "padded"])
def test_the_next_step_goes_on_from_the_last_draft_taken(uniform, gdn, monkeypatch):
    """Two steps of drafts, some refused, beside a prefill: as the tokens that remain, one by one.

    `uniform`: all bring as many tokens as they have slots; else one brings fewer than were taken.
    "padded": a captured graph is of more requests, whose tokens are nobody's.
    """
    torch.manual_seed(0)
    heads, value_heads, size, width, drafts = 2, 4, 16, 4, 2
    channels = (2 * heads + value_heads) * size
    taps = torch.randn(width, channels)
    layer = delta_layer(
        heads,
        value_heads,
        size,
        width,
        taps,
        A_log=torch.randn(value_heads),
        dt_bias=torch.randn(value_heads),
        norm=rms_norm(torch.randn(size)),
        kv_cache=(
            torch.randn(9, width - 1 + drafts, channels),
            torch.randn(9, value_heads, size, size),
        ),
    )
    for name in ("prefill", "gates", "gated", "verify"):
        setattr(layer, name, partial(getattr(gdn.GatedDelta, name), layer))
    batch = SimpleNamespace()
    context = SimpleNamespace(attn_metadata={"layer": batch})
    monkeypatch.setattr(gdn, "get_forward_context", lambda: context)
    monkeypatch.setattr(gdn, "is_conv_state_dim_first", lambda: False)
    monkeypatch.setattr(gdn, "NULL_BLOCK_ID", 0)
    first = tuple(each.clone() for each in layer.kv_cache)
    slots = torch.tensor([[4, 2, 5], [7, 1, 3]], dtype=torch.int32)
    taken = []  # the tokens of each request that remain, with what came out for them
    kept = [1, 1]

    def step(lengths: list[int], prefill: int, accepted: list[int]) -> None:
        """`accepted`: how many of these tokens, drafts behind the first, will remain."""
        tokens = sum(lengths) + prefill
        more = 3 if uniform == "padded" and not prefill else 0  # requests of nobody
        padded = tokens + more * len(slots[0])
        qkvz = torch.randn(padded, channels + value_heads * size)
        ba = torch.randn(padded, 2 * value_heads)
        starts = torch.tensor([0, *lengths, *[0] * more]).cumsum(0).int()
        same = len({*lengths}) == 1
        vars(batch).update(
            spec_sequence_masks=torch.ones(2, dtype=torch.bool),
            num_spec_decodes=2 + more,
            spec_token_indx=torch.arange(prefill, padded),
            non_spec_token_indx=torch.arange(prefill),
            spec_query_start_loc=starts,
            spec_state_indices_tensor=torch.cat([slots, slots.new_zeros(more, 3)]),
            num_accepted_tokens=torch.tensor([*kept, *[1] * more], dtype=torch.int32),
            uniform_spec_sequence_length=lengths[0] if same else None,
            num_decode_tokens=0,
            num_prefills=int(prefill > 0),
            num_prefill_tokens=prefill,
            prefill_state_indices=torch.tensor([8]),
            prefill_query_start_loc=torch.tensor([0, prefill]),
            prefill_has_initial_state=torch.tensor([False]),
        )
        out = torch.full((padded, value_heads, size), torch.nan)
        gdn.GatedDelta._forward_core_fused_norm_packed(layer, qkvz, ba, out)
        assert not out[:tokens].isnan().any()
        for request, start in enumerate(starts[: len(lengths)].tolist()):
            here = slice(prefill + start, prefill + start + accepted[request])
            taken.append((request, qkvz[here], ba[here], out[here]))
        kept[:] = accepted

    step([3, 3], 0, [3, 1])
    step([3, 3] if uniform else [2, 3], 5, [2, 3])
    step([3, 3], 0, [3, 3])
    columns, states = first
    # one by one, by the step without drafts, whose past are the first columns
    layer.kv_cache = (columns[:, : width - 1].clone(), states.clone())
    for request, qkvz, ba, wanted in taken:
        for token in range(len(qkvz)):
            vars(batch).update(
                spec_sequence_masks=None,
                num_decode_tokens=1,
                num_prefills=0,
                non_spec_state_indices_tensor=slots[request, :1],
            )
            out = torch.zeros(1, value_heads, size)
            row = slice(token, token + 1)
            gdn.GatedDelta._forward_core_fused_norm_packed(layer, qkvz[row], ba[row], out)
            torch.testing.assert_close(out[0], wanted[token], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("ranks", [1, 2])
def test_olmo_s_delta_rule_is_transformers_(ranks, gdn, monkeypatch):
    """A prefill, and decodes that go on from it, of all ranks together; a rate may be above 1."""
    torch.manual_seed(0)
    model = olmo_hybrid().double().model
    theirs = model.layers[0].linear_attn
    for weight in theirs.parameters():
        torch.nn.init.normal_(weight, 0.0, weight.shape[-1] ** -0.5)
    monkeypatch.setattr(gdn, "is_conv_state_dim_first", lambda: False)
    monkeypatch.setattr(gdn, "NULL_BLOCK_ID", 0)
    x = torch.randn(14, theirs.hidden_size)
    wanted, found = theirs(x[None].double())[0], torch.zeros_like(x)
    keys, values = theirs.key_dim, theirs.value_dim
    for rank in range(ranks):

        def part(weight: Tensor, axis: int = 0, rank: int = rank) -> Tensor:
            return weight.detach().float().chunk(ranks, axis)[rank]

        taps = torch.cat([part(each) for each in theirs.conv1d.weight.split([keys, keys, values])])
        heads = theirs.num_v_heads // ranks
        projections = (theirs.q_proj, theirs.k_proj, theirs.v_proj, theirs.g_proj)
        layer = SimpleNamespace(
            prefix="layer",
            tp_size=ranks,
            key_dim=keys,
            value_dim=values,
            num_v_heads=theirs.num_v_heads,
            head_k_dim=theirs.head_k_dim,
            head_v_dim=theirs.head_v_dim,
            conv_kernel_size=theirs.conv_kernel_size,
            activation="silu",
            allow_neg_eigval=theirs.allow_neg_eigval,
            in_proj_qkvg=linear(*(part(each.weight) for each in projections)),
            b_proj=linear(part(theirs.b_proj.weight)),
            a_proj=linear(part(theirs.a_proj.weight)),
            o_proj=linear(part(theirs.o_proj.weight, 1)),
            conv1d=SimpleNamespace(weight=taps),
            A_log=part(theirs.A_log),
            dt_bias=part(theirs.dt_bias),
            norm=SimpleNamespace(
                weight=theirs.o_norm.weight.detach().float(), eps=1e-5, activation="swish"
            ),
            kv_cache=(
                torch.full([3, theirs.conv_kernel_size - 1, len(taps)], torch.nan),
                torch.full([3, heads, theirs.head_v_dim, theirs.head_k_dim], torch.nan),
            ),
        )
        names = ("_forward_core_fused_norm_packed", "prefill", "gates", "gated", "taps", "split_ba")
        for name in names:
            setattr(layer, name, partial(getattr(gdn.OlmoDelta, name), layer))
        for tokens in (slice(0, 11), slice(11, 12), slice(12, 13), slice(13, 14)):
            n = tokens.stop - tokens.start
            batch = delta_batch([2], int(n == 1), [n] if n > 1 else [], [False])
            context = SimpleNamespace(attn_metadata={"layer": batch})
            monkeypatch.setattr(gdn, "get_forward_context", lambda context=context: context)
            out = torch.zeros(n, theirs.hidden_size)
            gdn.OlmoDelta._full_forward(layer, x[tokens], out)
            found[tokens] += out
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-4)


class Linear(torch.nn.Module):
    """As vLLM's: the product, and a bias of nobody."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        weight = torch.randn(rows, columns) * columns**-0.5
        self.weight = torch.nn.Parameter(weight, requires_grad=False)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return x @ self.weight.T, None


class Norm(torch.nn.Module):
    variance_epsilon = 1e-6

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(size) + 0.5, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], self.weight, self.variance_epsilon)


class Rotary:
    """Pairs as complex numbers, times those of the position; a pair stays where it stands."""

    def __init__(self, size: int, neox: bool) -> None:
        angles = torch.arange(64)[:, None] * 10000 ** -(torch.arange(0, size, 2) / size)
        self.turns = torch.polar(torch.ones_like(angles), angles)
        self.cos_sin_cache = torch.cat([angles.cos(), angles.sin()], -1)
        self.is_neox_style = neox

    def forward_native(self, positions: Tensor, *tensors: Tensor) -> list[Tensor]:
        turned = []
        for x in tensors:
            pairs = x.unflatten(-1, (2, -1)).mT if self.is_neox_style else x.unflatten(-1, (-1, 2))
            product = torch.view_as_complex(pairs.contiguous()) * self.turns[positions][:, None]
            pairs = torch.view_as_real(product)
            turned.append((pairs.mT if self.is_neox_style else pairs).flatten(-2))
        return turned


H, RQ, N, DN, DR, R, DV, NI, DI, K = 48, 24, 4, 16, 8, 32, 12, 6, 16, 5


@pytest.fixture(scope="module")
def mla():
    """Ours, on vLLM's stubs, where a batch is run as on a CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(STUBS / f"vllm-{VERSIONS[-1]}"))
        graphs = importlib.import_module("vllm.compilation.breakable_cudagraph")
        graphs.eager_break_during_capture = lambda function: function
        importlib.import_module("vllm.model_executor.custom_op").op_registry_oot = {}
        module = importlib.import_module("custom.integrations.vllm.mla")
        module.current_platform = SimpleNamespace(is_cpu=lambda: True)
        yield module
    for name in [each for each in sys.modules if each.split(".")[0] == "vllm"]:
        del sys.modules[name]
    for name in ("mla", "standing_in"):
        del sys.modules[f"custom.integrations.vllm.{name}"]


@pytest.fixture(scope="module")
def kimi(mla):
    """Ours, on vLLM's stubs, where a batch is run as on a CPU."""
    graphs = importlib.import_module("vllm.compilation.breakable_cudagraph")
    graphs.eager_break_during_capture = lambda function: function
    yield importlib.import_module("custom.integrations.vllm.kimi")
    del sys.modules["custom.integrations.vllm.kimi"]


@pytest.mark.parametrize("lower_bound", [None, -4.0])
@pytest.mark.parametrize("tokens", [(3, 0), (0, 17), (2, 9)])
def test_kimi_delta_attention_is_the_rule_token_by_token(tokens, lower_bound, kimi, monkeypatch):
    """Decodes, prefills and both, of requests that go on and of one that begins in used slots; two
    ranks beside one; tokens past the batch's give 0."""
    torch.manual_seed(0)
    heads, size, width = 4, 16, 4
    decodes, new = tokens
    requests = decodes + 2 * (new > 0)
    lengths = [1] * decodes + ([new // 2, new - new // 2] if new else [])
    slots = [3, 1, 5, 2][:requests]
    batch = delta_batch(slots, decodes, lengths[decodes:], [True, False])
    context = SimpleNamespace(attn_metadata={"layer": batch})
    monkeypatch.setattr(kimi, "get_forward_context", lambda: context)
    monkeypatch.setattr(kimi, "is_conv_state_dim_first", lambda: False)
    monkeypatch.setattr(kimi, "NULL_BLOCK_ID", 0)
    rows = decodes + new + 2  # two of no request
    mixed, taps = torch.randn(rows, 3, heads, size), torch.randn(3, heads, size, width)
    columns, states = torch.randn(6, 3, 3, heads, size), torch.randn(6, heads, size, size)
    decay, gate = torch.randn(2, rows, heads, size)
    beta, weight = torch.randn(rows, heads), torch.rand(size) + 0.5
    speeds, biases = torch.randn(heads), torch.randn(heads, size)

    def run(mine: slice) -> tuple[Tensor, Tensor, Tensor]:
        layer = SimpleNamespace(
            prefix="layer",
            head_dim=size,
            conv1d=SimpleNamespace(weight=taps[:, mine].reshape(-1, 1, width)),
            A_log=speeds[mine],
            dt_bias=biases[mine].flatten(),
            o_norm=SimpleNamespace(weight=weight, eps=1e-5),
            gate_lower_bound=lower_bound,
            kv_cache=(columns[:, :, :, mine].flatten(2).clone(), states[:, mine].clone()),
        )
        layer.taps = partial(kimi.KimiDelta.taps, layer)
        layer.prefill = partial(kimi.KimiDelta.prefill, layer)
        out = torch.full([1, rows, len(speeds[mine]), size], torch.nan)
        kimi.KimiDelta._forward(
            layer,
            mixed[:, :, mine].flatten(1),
            decay[None, :, mine],
            gate[:, mine],
            beta[None, :, mine],
            out,
        )
        kept = layer.kv_cache[0].unflatten(-1, (3, -1, size))
        return out[0], kept, layer.kv_cache[1]

    out, kept, after = run(slice(heads))
    assert (out[-2:] == 0).all()
    halves = [run(slice(0, 2)), run(slice(2, 4))]
    for axis, (whole, *parts) in zip(
        (1, 3, 1), zip((out, kept, after), *halves, strict=True), strict=True
    ):
        torch.testing.assert_close(torch.cat(parts, axis), whole, rtol=1e-5, atol=1e-5)

    begin = 0
    for request, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
        fresh = new and request == requests - 1
        past = columns[slot] * (not fresh)
        state = (states[slot] * (not fresh)).mT.double()
        every = torch.cat([past, mixed[begin : begin + length]]).double()
        for at in range(length):
            token = begin + at
            seen = torch.nn.functional.silu((every[at : at + 4] * taps.movedim(-1, 0)).sum(0))
            q, k, v = seen
            q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
            speed, raw = speeds.double().exp()[:, None], decay[token].double() + biases
            if lower_bound is None:
                g = -speed * torch.nn.functional.softplus(raw)
            else:
                g = lower_bound * (speed * raw).sigmoid()
            state = g.exp()[..., None] * state
            error = v - torch.einsum("nkv,nk->nv", state, k)
            state = state + torch.einsum("n,nk,nv->nkv", beta[token].double().sigmoid(), k, error)
            o = torch.einsum("nkv,nk->nv", state, q) * size**-0.5
            o = o * (o.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight
            wanted = o * gate[token].double().sigmoid()
            torch.testing.assert_close(out[token].double(), wanted, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(after[slot].double(), state.mT, rtol=1e-4, atol=1e-4)
        assert torch.equal(kept[slot].double(), every[-3:])
        begin += length


@pytest.mark.parametrize(
    ("kept", "drafts", "ranks", "mode"),
    [ALL_BLOCKS, ("none", True, 1, "drafts"), RANKS],
)
def test_kimi_delta_attention_is_refused_where_it_was_not_tried(kept, drafts, ranks, mode, kimi):
    method = SimpleNamespace(method="mtp") if drafts else None
    config = configuration(speculative_config=method, data_parallel_size=ranks)
    config.cache_config = SimpleNamespace(mamba_cache_mode=kept)
    with pytest.raises(NotSupported, match=f"serves Kimi delta attention without {mode}, and"):
        kimi.KimiDelta.__init__(SimpleNamespace(), None, config)


@pytest.mark.parametrize(
    ("changed", "mode"),
    [
        (dict(quant_config=object()), "quantized weights"),
        (dict(stored="fp8"), "caches of another dtype than the model"),
        (dict(q_lora_rank=32), "a query with a latent"),
        (dict(use_output_gate=True), "a gate"),
        (dict(use_rope=True), "`use_rope`"),
        (dict(drafts=SimpleNamespace(method="mtp")), "drafts"),
    ],
)
def test_dense_latent_attention_is_refused_where_it_was_not_tried(changed, mode, kimi):
    config = configuration(speculative_config=changed.pop("drafts", None))
    kimi.get_current_vllm_config = lambda: config
    given = dict(
        q_lora_rank=None,
        kv_lora_rank=R,
        cache_config=SimpleNamespace(cache_dtype=changed.pop("stored", "auto")),
        run_gemm_rs_ar=True,
    )
    with pytest.raises(NotSupported, match=f"serves dense latent attention without {mode}, and"):
        kimi.DenseLatent(SimpleNamespace(), H, N, DN, DR, DV, **(given | changed))


def test_a_gate_of_full_rank_is_refused(kimi):
    """Kimi K3's, whose layer vLLM builds by another class."""
    text = SimpleNamespace(linear_attn_config=dict(use_full_rank_gate=True))
    config = SimpleNamespace(model_config=SimpleNamespace(hf_config=text))
    with pytest.raises(NotSupported, match="Kimi delta attention without a gate of full rank"):
        kimi.KimiLinearForCausalLM(vllm_config=config)


def built(
    mla: Any,
    count: int,
    neox: bool,
    shared: bool = False,
    heads: slice = slice(N),
    drafts: Any = None,
) -> list[Any]:
    """Layers with caches of 6 pages; `shared`: all but the first take its selection; `heads`: those
    of one rank, whose weights vLLM has cut."""
    torch.manual_seed(0)
    config = configuration(speculative_config=drafts)
    config.cache_config = SimpleNamespace(cache_dtype="auto")
    config.model_config = SimpleNamespace(dtype=torch.float32)
    config.compilation_config = SimpleNamespace(static_forward_context={})
    mla.get_current_vllm_config = lambda: config
    selection = torch.zeros(40, K, dtype=torch.int32)
    layers = []
    for i in range(count):
        indexer = mla.deepseek_v2.Indexer()
        indexer.n_head, indexer.head_dim, indexer.rope_dim = NI, DI, DR
        indexer.wq_b, indexer.wk_weights_proj = Linear(NI * DI, RQ), Linear(DI + NI, H)
        indexer.k_norm, indexer.softmax_scale = torch.nn.LayerNorm(DI), DI**-0.5
        indexer.requires_grad_(False)
        indexer.k_cache = SimpleNamespace(prefix=f"layers.{i}.indexer")
        modules = SimpleNamespace(
            fused_qkv_a_proj=Linear(RQ + R + DR, H),
            q_a_layernorm=Norm(RQ),
            q_b_proj=Linear(N * (DN + DR), RQ),
            kv_a_layernorm=Norm(R),
            kv_b_proj=Linear(N * (DN + DV), R),
            o_proj=Linear(H, N * DV),
            rotary_emb=Rotary(DR, neox=False),
            indexer_rotary_emb=Rotary(DR, neox),
            indexer=indexer,
            topk_indices_buffer=selection,
            g_proj=None,
        )
        for linear in (modules.q_b_proj, modules.kv_b_proj):
            rows = linear.weight.unflatten(0, (N, -1))[heads].flatten(0, 1)
            linear.weight = torch.nn.Parameter(rows, requires_grad=False)
        sizes = (H, len(range(N)[heads]), 0.2, DN, DR, DV, RQ, R)
        layer = mla.SparseMLA(*sizes, modules, prefix=f"layers.{i}", skip_topk=shared and i > 0)
        layers.append(layer)
    for cache in config.compilation_config.static_forward_context.values():
        cache.bind_kv_cache(torch.zeros(6, 1, 16, cache.width))
    for layer in layers:
        layer.process_weights_after_loading(torch.float32)
    return layers


def step(mla: Any, layers: list[Any], x: Tensor, lengths: list[int], uniform: int) -> list[Tensor]:
    """Of requests with as many new tokens each, or padding (0); attended to by every layer."""
    table = torch.tensor([[2, 5], [1, 3], [0, 0]])
    new = len(x) // len(lengths)
    places = [range(n - new, n) if n else [-1] * new for n in lengths]
    slots = [
        int(table[i, p // 16]) * 16 + p % 16 if p >= 0 else -1
        for i, row in enumerate(places)
        for p in row
    ]
    ends = torch.arange(new, len(x) + 1, new, dtype=torch.int32)
    integers = torch.tensor(lengths, dtype=torch.int32), table[: len(lengths)], torch.tensor(slots)
    batch = mla.SparseMetadata(ends, *integers, uniform)
    positions = torch.tensor([p for row in places for p in row]).clamp(min=0)
    # two tokens of no request
    outs = [x.new_full((len(x) + 2, layer.heads * DV), 7.0) for layer in layers]
    for layer, out in zip(layers, outs, strict=True):
        padded = torch.cat([x, x.new_full((2, H), torch.nan)])
        layer.attend(batch, torch.nn.functional.pad(positions, (0, 2)), padded, out)
        assert (out[len(x) :] == 7).all()
    return outs


@pytest.mark.parametrize("neox", [True, False], ids=["DeepSeek-V3.2", "GLM-5"])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("new", [1, 3], ids=["a token each", "two drafts each"])
def test_a_step_of_decodes_is_one_call_of_a_layer(new, neox, shared, mla):
    """And equals the stages: outputs, caches and selection, beside a request that pads."""
    layers = built(mla, 2, neox, shared)
    step(mla, layers, torch.randn(36, H), [18, 18], uniform=0)
    caches = [each for layer in layers for each in layer.layers.values()]
    before = [each.kv_cache.clone() for each in caches]
    x, found = torch.randn(3 * new, H), []
    for uniform in (0, new):
        for cache, old in zip(caches, before, strict=True):
            cache.kv_cache.copy_(old)
        log.calls.clear()
        outs = step(mla, layers, x, [18 + new, 18 + new, 0], uniform)
        ran = {op: count for (op, _), count in log.calls.items()}
        selected = layers[0].selection[: 2 * new].sort(-1).values
        found.append([*outs, selected, *(each.kv_cache[1:].clone() for each in caches)])
    # the first writes padding to page 0, the second nowhere
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)
    assert all((out[2 * new : 3 * new] == 0).all() for out in found[1][:2])
    whole = ["npu_sparse_attention_indices_pto", "npu_sparse_attention_shared_pto"]
    assert ran == (dict.fromkeys(whole, 1) if shared else {"npu_sparse_attention_pto": 2})


@pytest.mark.parametrize("shared", [False, True])
def test_a_rank_has_its_heads_and_every_row_and_selection(shared, mla):
    """Two ranks beside one: heads side by side; caches and selections in every bit."""
    whole = built(mla, 2, True, shared)
    ranks = [built(mla, 2, True, shared, heads) for heads in (slice(0, 2), slice(2, 4))]
    for tokens, lengths, uniform in ((36, [18, 18], 0), (2, [19, 19], 1), (6, [22, 22], 3)):
        x = torch.randn(tokens, H)
        together, *apart = (step(mla, each, x, lengths, uniform) for each in (whole, *ranks))
        for out, *halves in zip(together, *apart, strict=True):
            torch.testing.assert_close(torch.cat(halves, -1), out, rtol=1e-5, atol=1e-5)
        for rank in ranks:
            assert torch.equal(rank[0].selection, whole[0].selection)
            for name, cache in whole[0].layers.items():
                assert torch.equal(rank[0].layers[name].kv_cache, cache.kv_cache)


def test_weights_are_read_where_vllm_keeps_them(mla):
    """But for the absorbed half of the keys' up-projection."""
    (layer,) = built(mla, 1, neox=True)
    theirs = {each.untyped_storage().data_ptr() for each in layer.parameters()}
    ours = {**layer.weights, "uv": layer.uv}
    tensors = {name: each for name, each in ours.items() if isinstance(each, Tensor)}
    copies = {n for n, each in tensors.items() if each.untyped_storage().data_ptr() not in theirs}
    assert len(tensors) == 12 and copies == {"w_uk"}


def test_reloaded_weights_lie_where_they_were(mla):
    """What is copied, too: a graph that was captured reads it there."""
    (layer,) = built(mla, 1, neox=True)
    before = {n: each.data_ptr() for n, each in layer.weights.items() if isinstance(each, Tensor)}
    half = layer.uk.clone()
    for weight in layer.parameters():
        weight.mul_(2)
    layer.process_weights_after_loading(torch.float32)
    after = {n: each.data_ptr() for n, each in layer.weights.items() if isinstance(each, Tensor)}
    assert after == before and torch.equal(layer.uk, 2 * half)


@pytest.mark.parametrize(
    ("changed", "mode"),
    [
        (dict(quant_config=object()), "quantized weights"),
        (dict(stored="fp8_e5m2"), "caches other than bfloat16 and fp8"),
        (dict(stored="fp8"), "fp8 caches of other sizes than those of DeepSeek"),
        (dict(q_lora_rank=None), "a query without a latent"),
        (dict(g_proj=object()), "a gate"),
        (dict(non_causal_multi_token_decode=True), "`non_causal_multi_token_decode`"),
    ],
)
def test_sparse_attention_is_refused_where_it_was_not_tried(changed, mode, mla):
    config = configuration()
    config.cache_config = SimpleNamespace(cache_dtype=changed.pop("stored", "auto"))
    mla.get_current_vllm_config = lambda: config
    indexer = mla.deepseek_v2.Indexer()
    indexer.head_dim = DI
    modules = SimpleNamespace(indexer=indexer, g_proj=changed.pop("g_proj", None))
    sizes = (H, N, 0.2, DN, DR, DV, changed.pop("q_lora_rank", RQ), R)
    with pytest.raises(NotSupported, match=f"serves sparse attention without {mode}, and"):
        mla.SparseMLA(*sizes, modules, **changed)


def test_another_indexer_is_refused(mla):
    config = configuration()
    config.cache_config = SimpleNamespace(cache_dtype="auto")
    mla.get_current_vllm_config = lambda: config
    another = type("HierarchicalIndexer", (mla.deepseek_v2.Indexer,), {})()
    another.head_dim = DI
    modules = SimpleNamespace(indexer=another, g_proj=None)
    with pytest.raises(NotSupported, match="and this is a HierarchicalIndexer; unset CUSTOM_VLLM"):
        mla.SparseMLA(H, N, 0.2, DN, DR, DV, RQ, R, modules)


@pytest.mark.parametrize("shares", [False, True])
def test_drafts_select_for_themselves(shares, mla):
    settings = SimpleNamespace(index_share_for_mtp_iteration=shares)
    drafts = SimpleNamespace(method="mtp", draft_model_config=SimpleNamespace(hf_config=settings))
    if not shares:
        built(mla, 1, neox=True, drafts=drafts)
        return
    with pytest.raises(NotSupported, match="without drafts that share a selection, and"):
        built(mla, 1, neox=True, drafts=drafts)


@pytest.mark.parametrize(
    ("tokens", "longest", "drafts", "uniform"),
    [
        (3, 1, 0, 1),
        (4, 2, 0, 0),
        (6, 2, 0, 0),  # prompts of two tokens each
        (2, 1, 0, 0),
        (9, 3, 2, 3),
        (3, 1, 2, 1),
        (8, 3, 2, 0),
        (12, 4, 2, 0),
    ],
)
def test_the_host_knows_a_step_of_decodes(tokens, longest, drafts, uniform, mla):
    """By numbers: each of 3 requests brings as many tokens, its drafts among them; no tensor is
    asked."""
    names = ("query_start_loc", "seq_lens", "block_table_tensor", "slot_mapping")
    given = {name: torch.empty(12, device="meta") for name in names}
    counts = dict(num_reqs=3, num_actual_tokens=tokens, max_query_len=longest)
    asked = SimpleNamespace(num_speculative_tokens=drafts) if drafts else None
    builder = mla.SparseBuilder(None, [], SimpleNamespace(speculative_config=asked), None)
    batch = builder.build(0, SimpleNamespace(**given, **counts))
    assert batch.uniform == uniform and len(batch.lengths) == 3 and len(batch.slots) == tokens


# DeepSeek-V4, on the small layers of tests/support/deepseek_v4.py, against Transformers'
BLOCK, ROWS, REQUESTS = 32, 16, 3
RATIOS = (0, 4, 8)  # of its layers


class Weight(torch.nn.Module):
    """A rank's part of a linear layer of vLLM."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(
            torch.full([rows, columns], torch.nan), requires_grad=False
        )
        self.reduce_results = True


@pytest.fixture(scope="module")
def v4(mla):
    """Ours, on vLLM's stubs, with layers of `v4.ranks` ranks."""
    module: Any = importlib.import_module("custom.integrations.vllm.deepseek_v4")
    module.ranks = 1
    module.get_tensor_model_parallel_world_size = lambda: module.ranks
    module.ROWS = ROWS
    module.RMSNorm = lambda size, eps: Norm(size)
    module.MergedColumnParallelLinear = lambda n, sizes, **_: Weight(sum(sizes), n)
    module.ReplicatedLinear = lambda n, m, **_: Weight(m, n)
    module.ColumnParallelLinear = lambda n, m, **_: Weight(m // module.ranks, n)
    module.RowParallelLinear = lambda n, m, **_: Weight(m, n // module.ranks)
    module.sharded_weight_loader = lambda axis: None
    module.extract_layer_index = lambda prefix: int(prefix.split(".")[1])
    module.tensor_model_parallel_all_reduce = lambda x: 2 * x
    yield module
    del sys.modules["custom.integrations.vllm.deepseek_v4"]


def engine_of_v4(hf: Any, **changed: Any) -> Any:
    """vLLM's configuration of the model."""
    config = configuration(**changed)
    config.cache_config = SimpleNamespace(
        cache_dtype=changed.pop("stored", "auto"), block_size=BLOCK
    )
    config.quant_config = changed.pop("quant_config", None)
    config.model_config = SimpleNamespace(dtype=torch.float32, hf_config=hf)
    config.compilation_config = SimpleNamespace(static_forward_context={})
    return config


def built_v4(v4: Any, theirs: Attention, rank: int = 0, ranks: int = 1) -> Any:
    """The layer with a rank's part of Transformers' weights, and caches of one pool: a page is of
    any of them, and holds anything at first."""
    a, c, v4.ranks = theirs.module, theirs.config, ranks
    place = torch.arange(64, dtype=torch.float64)[None]
    kind = "compress" if a.compressor is not None else "main"
    cos, sin = theirs.angles(place)[kind]
    table = torch.cat([cos[0], sin[0]], -1).float()
    v4.build_deepseek_v4_rope = lambda *_, **__: SimpleNamespace(cos_sin_cache=table)
    config = engine_of_v4(c)
    layer = v4.CompressedAttention(config, f"layers.{a.layer_idx}.attn", None, aux_stream_list=[])

    def part(weight: Tensor, axis: int) -> Tensor:
        return weight.chunk(ranks, axis)[rank]

    def compressor(to: Any, by: Any) -> None:
        to.fused_wkv_wgate.weight.data = torch.cat([by.kv_proj.weight, by.gate_proj.weight])
        to.ape.data, to.norm.weight.data = by.position_bias, by.kv_norm.weight

    layer.fused_wqa_wkv.weight.data = torch.cat([a.q_a_proj.weight, a.kv_proj.weight])
    layer.q_norm.weight.data, layer.kv_norm.weight.data = a.q_a_norm.weight, a.kv_norm.weight
    layer.wq_b.weight.data = part(a.q_b_proj.weight, 0)
    layer.wo_a.weight.data = part(a.o_a_proj.weight, 0)
    layer.wo_b.weight.data = part(a.o_b_proj.weight, 1)
    layer.attn_sink.data = part(a.sinks, 0)
    if layer.compressor is not None:
        compressor(layer.compressor, a.compressor)
    if layer.indexer is not None:
        i = a.compressor.indexer
        compressor(layer.indexer.compressor, i)
        layer.indexer.wq_b.weight.data = i.q_b_proj.weight
        layer.indexer.weights_proj.weight.data = i.scorer.weights_proj.weight
    for parameter in layer.parameters():
        parameter.data = parameter.data.float().contiguous()
    layer.process_weights_after_loading(torch.float32)

    caches = config.compilation_config.static_forward_context
    specs = {name: each.get_kv_cache_spec(config) for name, each in caches.items()}
    rows = {name: specs[name].block_size // (each.ratio or 1) for name, each in caches.items()}
    wide = max(rows[name] * s.head_size for name, s in specs.items())
    pool = torch.full([64, wide], torch.nan)
    for name, cache in caches.items():
        width = specs[name].head_size
        cache.bind_kv_cache(pool.as_strided([64, 1, rows[name], width], [wide, 0, width, 1]))
    return layer, {name: (spec.block_size, caches[name].window) for name, spec in specs.items()}


class Pages:
    """Tables of each cache: pages as a request grows, those behind its window given back."""

    def __init__(self, sizes: dict[str, tuple[int, int]]) -> None:
        self.sizes, self.free = sizes, iter(torch.randperm(63).add(1).tolist())
        self.tables = {name: torch.zeros(REQUESTS, 8, dtype=torch.int32) for name in sizes}

    def of(self, request: int, before: int, after: int) -> None:
        """Of a request that had `before` tokens and gets `after`."""
        for name, (size, window) in self.sizes.items():
            row = self.tables[name][request]
            for column in range(-(-before // size), -(-after // size)):
                if not row[column]:  # else it is of tokens that were taken back
                    row[column] = next(self.free)
            if window:
                row[: max(0, before - window + 1) // size] = 0


def batches(v4: Any, pages: Pages, counts: list[int], lengths: list[int]) -> dict[str, Any]:
    """What vLLM's builder is told of requests with so many new tokens, one after the other."""
    there = [i for i, count in enumerate(counts) if count]
    new = torch.tensor([counts[i] for i in there])
    starts = torch.cat([new.new_zeros(1), new.cumsum(0)])
    given: dict[str, Any] = dict(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor([lengths[i] for i in there]),
        slot_mapping=torch.zeros(int(new.sum())),
        num_reqs=len(there),
        num_actual_tokens=int(new.sum()),
        max_query_len=int(new.max()),
    )
    drafts = SimpleNamespace(speculative_config=SimpleNamespace(num_speculative_tokens=2))
    builder = v4.Builder(None, [], drafts, None)
    return {
        name: builder.build(0, SimpleNamespace(**given, block_table_tensor=table[there]))
        for name, table in pages.tables.items()
    }


# tokens of the three requests in each step: prompts in parts, decodes beside them, decodes alone
STEPS = [(17, 9, 0), (1, 9, 13), (1, 1, 13), (1, 1, 1), (1, 1, 1), (1, 1, 1), (11, 1, 1)]
CALLS = [2, 3, 2, 1, 1, 1, 2]
# two drafts each, and how many of the three tokens stay: entries close by drafts that are refused,
# and once more by other tokens
DRAFTED = [
    (17, 9, 12),
    (3, 3, 3),
    (3, 3, 3),
    (3, 3, 3),
    (3, 1, 3),
    (3, 3, 3),
    (3, 3, 13),
    (3, 3, 3),
]
STAY = [(17, 9, 12), (1, 2, 3), (1, 1, 1), (3, 1, 2), (2, 1, 1), (1, 3, 3), (1, 2, 13), (3, 1, 1)]


def rounding(c: Any, out: Tensor) -> float:
    """How far float32 may be off: six sigmas.

    One sum behind the other makes the output.  Of n terms of either sign, the rounding of partial
    sums comes to sqrt(n / 6) units of the sum (rms) at most; what sums before did is independent of
    it and passes on as it is, but for logits, which multiply it by their own size: of vectors of D
    numbers that are normed, sqrt(D) at most.
    """
    keys = c.sliding_window + c.index_topk
    sums = c.hidden_size, c.q_lora_rank, c.head_dim, keys
    sums += c.num_attention_heads // c.o_groups * c.head_dim, c.o_groups * c.o_lora_rank
    unit = torch.finfo(torch.float32).eps / 2 * float(out.square().mean().sqrt())
    return 6 * (c.head_dim * sum(sums) / 6) ** 0.5 * unit


@pytest.mark.parametrize("layer", range(3))
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("steps", "stay", "calls"),
    [(STEPS, STEPS, CALLS), (DRAFTED, STAY, [3, 1, 1, 1, 3, 1, 2, 1])],
    ids=["decodes", "drafts"],
)
def test_requests_that_join_get_what_transformers_makes_of_each(
    steps, stay, calls, layer, ranks, v4
):
    """Of all ranks together; neighbours with as many tokens are one call."""
    torch.manual_seed(layer)
    theirs = Attention(layer)
    made = [built_v4(v4, theirs, rank, ranks) for rank in range(ranks)]
    totals = [sum(each) for each in zip(*stay, strict=True)]
    texts = [torch.randn(n, theirs.config.hidden_size, dtype=torch.float64) for n in totals]
    wanted = [theirs.whole(text) for text in texts]
    pages, lengths = Pages(made[0][1]), [0] * REQUESTS
    for counts, kept, n_calls in zip(steps, stay, calls, strict=True):
        spans = [slice(n, n + count) for n, count in zip(lengths, counts, strict=True)]
        for request, span in enumerate(spans):
            pages.of(request, span.start, span.stop)
        metadata = batches(v4, pages, list(counts), [span.stop for span in spans])
        v4.get_forward_context = lambda metadata=metadata: SimpleNamespace(attn_metadata=metadata)
        given, right = [], []
        for text, want, n, count, count_kept in zip(
            texts, wanted, lengths, counts, kept, strict=True
        ):
            refused = count - count_kept
            given += [text[n : n + count_kept], torch.randn(refused, text.shape[1])]
            right += [want[n : n + count_kept], text.new_full((refused, want.shape[1]), torch.nan)]
        lengths = [n + count for n, count in zip(lengths, kept, strict=True)]
        x = torch.cat(given).float()
        positions = torch.cat([torch.arange(span.start, span.stop) for span in spans])
        found = torch.zeros_like(x)
        for each, _ in made:
            # two tokens behind the batch's, of no request
            out = x.new_full((len(x) + 2, x.shape[1]), 7.0)
            padded = torch.cat([x, x.new_full((2, x.shape[1]), torch.nan)])
            log.calls.clear()
            each.attend(metadata[each.layer_name], positions, padded, out)
            assert [*log.calls.values()] == [n_calls]
            assert (out[len(x) :] == 7).all()
            found += out[: len(x)]
        want = torch.cat(right)
        there = ~want[:, 0].isnan()
        torch.testing.assert_close(
            found.double()[there], want[there], rtol=0, atol=rounding(theirs.config, want[there])
        )


@pytest.mark.parametrize("drafts", [0, 2])
def test_a_graph_is_one_call_with_its_padding(drafts, v4):
    """Requests of no tokens stand behind those that have some, and are rows of the call."""
    n = 1 + drafts
    counts = dict(num_reqs=4, num_actual_tokens=4 * n, max_query_len=n)
    starts = torch.tensor([0, 1, 2, 3, 3]) * n
    names = ("query_start_loc", "seq_lens", "block_table_tensor", "slot_mapping")
    given = {name: torch.empty(5 * n, device="meta") for name in names}
    asked = SimpleNamespace(num_speculative_tokens=drafts) if drafts else None
    builder = v4.Builder(None, [], SimpleNamespace(speculative_config=asked), None)
    batch = builder.build(0, SimpleNamespace(query_start_loc_cpu=starts, **given, **counts))
    assert batch.calls == [(slice(0, 4), slice(0, 4 * n))]


def test_v4_s_weights_are_read_where_vllm_keeps_them(v4):
    """And those that are copied, norms of a half precision model, stay where they are."""
    layer, _ = built_v4(v4, Attention(1))
    theirs = {each.untyped_storage().data_ptr() for each in layer.parameters()}
    tensors = {name: x for name, x in layer.weights.items() if isinstance(x, Tensor)}
    assert len(tensors) == 18
    assert all(x.untyped_storage().data_ptr() in theirs for x in tensors.values())
    layer.compressor.norm.weight.data = layer.compressor.norm.weight.data.bfloat16()
    layer.copies.clear()
    layer.process_weights_after_loading(torch.bfloat16)
    before, norm = layer.weights["gamma_cmp"].data_ptr(), layer.compressor.norm.weight
    norm.mul_(2)
    layer.process_weights_after_loading(torch.bfloat16)
    assert torch.equal(layer.weights["gamma_cmp"], norm.float())
    assert layer.weights["gamma_cmp"].data_ptr() == before


@pytest.fixture
def quantized_v4(v4, monkeypatch):
    """Makes a layer of these sizes, whose linear layers but those named have 8 bits if asked to."""

    def linear(
        rows: int, columns: int, quant_config: Any = None, prefix: str = "", **_: Any
    ) -> Any:
        made = Weight(rows, columns)
        if quant_config is not None and not prefix.endswith(quant_config.but):
            made.weight = torch.nn.Parameter(
                torch.randn(rows, columns).to(torch.float8_e4m3fn), requires_grad=False
            )
            scales = torch.randint(-9, 9, (-(-rows // 128), -(-columns // 128))).float().exp2()
            made.weight_scale_inv = torch.nn.Parameter(
                scales.to(torch.float8_e8m0fnu), requires_grad=False
            )
        return made

    given = dict(
        MergedColumnParallelLinear=lambda n, sizes, **more: linear(sum(sizes), n, **more),
        ReplicatedLinear=lambda n, m, **more: linear(m, n, **more),
        ColumnParallelLinear=lambda n, m, **more: linear(m, n, **more),
        RowParallelLinear=lambda n, m, **more: linear(m, n, **more),
        build_deepseek_v4_rope=lambda *_, **__: None,
    )
    for name, factory in given.items():
        monkeypatch.setattr(v4, name, factory)

    def made(but: tuple[str, ...] = (), **sizes: int) -> Any:
        sizes = dict(dict(hidden_size=200, q_lora_rank=128, o_lora_rank=128), **sizes)
        blocks = SimpleNamespace(weight_block_size=[128, 128], but=but)
        engine = engine_of_v4(config_of_v4(**sizes), quant_config=blocks)
        return v4.CompressedAttention(engine, "layers.1.attn")

    return made


def test_v4_s_quantized_weights_are_read_where_vllm_keeps_them(quantized_v4):
    """Beside copies of their scales, which stay where they are."""
    layer = quantized_v4()
    layer.process_weights_after_loading(torch.bfloat16)
    rows = layer.fused_wqa_wkv.weight.shape[0]
    whole = {
        name: (linear.weight, linear.weight_scale_inv)
        for name, linear in layer.projections().items()
    }
    assert len(whole) == 5
    given = layer.weights
    assert given["weight_quant_mode"] == 4 and rows == 128 + 32

    def stands(name: str) -> Tensor:
        """[.., N, K]"""
        values, scales = given[name], given[f"dequant_scale_{name}"]
        if values.ndim == 2:
            return quantization.dequantized(values.mT, scales).mT
        each = zip(values, scales, strict=True)
        return torch.cat([quantization.dequantized(x.mT, scale).mT for x, scale in each])

    found = {name: stands(name) for name in ("w_uq", "w_o_a", "w_o_b", "w_idx_qb")}
    found["w_dq_kv"] = torch.cat([stands("w_dq"), stands("w_kv")])
    theirs = {each.untyped_storage().data_ptr() for each in layer.parameters()}
    for name, (values, scales) in whole.items():
        assert torch.equal(found[name], quantization.dequantized(values, scales)), name
    for name in ("w_dq", "w_kv", "w_uq", "w_o_a", "w_o_b", "w_idx_qb"):
        assert given[name].untyped_storage().data_ptr() in theirs
    before = {name: x.data_ptr() for name, x in layer.copies.items()}
    layer.wo_b.weight_scale_inv.data = (2 * layer.wo_b.weight_scale_inv.float()).to(
        torch.float8_e8m0fnu
    )
    layer.process_weights_after_loading(torch.bfloat16)
    assert {name: x.data_ptr() for name, x in layer.copies.items()} == before
    assert torch.equal(stands("w_o_b"), 2 * found["w_o_b"])


@pytest.mark.parametrize(
    ("changed", "mode"),
    [
        (dict(but=("wo_a", "indexer.wq_b")), "projections of which some have 8 bits"),
        (dict(q_lora_rank=64), "scales of two weights or groups"),
        (dict(o_lora_rank=192), "scales of two weights or groups"),
    ],
)
def test_v4_s_quantized_weights_that_the_op_does_not_read_are_refused(changed, mode, quantized_v4):
    with pytest.raises(NotSupported, match=f"serves attention to compressed keys without {mode}"):
        quantized_v4(**changed)


def test_v4_s_weights_of_16_bits_in_a_checkpoint_of_8(quantized_v4):
    layer = quantized_v4(but=("",), q_lora_rank=64)
    layer.process_weights_after_loading(torch.float32)
    assert "weight_quant_mode" not in layer.weights


@pytest.mark.parametrize("itself", [False, True])
def test_v4_s_ranks_are_summed_once(itself, v4, mla):
    """By the layer, unless vLLM's model does so of tokens that ranks share."""
    layer, _ = built_v4(v4, Attention(0))
    layer.wo_b.reduce_results = not itself
    context = SimpleNamespace(attn_metadata=None, no_compile_layers={layer.layer_name: layer})
    mla.get_forward_context = lambda: context
    layer.attend = lambda batch, positions, x, out: out.add_(x)
    x = torch.randn(3, 40)
    assert torch.equal(layer(torch.arange(3), x), x if itself else 2 * x)


@pytest.mark.parametrize(
    ("changed", "mode"),
    [
        (dict(data_parallel_size=2), "data parallelism"),
        (
            dict(speculative_config=SimpleNamespace(method="dspark")),
            "drafts of another kind than MTP",
        ),
        (dict(quant_config=object()), "weights of 8 bits but in blocks of 128 x 128"),
        (
            dict(quant_config=SimpleNamespace(weight_block_size=[64, 128])),
            "weights of 8 bits but in blocks of 128 x 128",
        ),
        (dict(stored="fp8"), "caches of another dtype than the model"),
    ],
)
def test_v4_is_refused_where_it_was_not_tried(changed, mode, v4):
    with pytest.raises(NotSupported, match=f"serves attention to compressed keys without {mode}"):
        v4.CompressedAttention(engine_of_v4(None, **changed), "layers.0.attn")


@pytest.mark.parametrize("version", VERSIONS)
def test_our_layer_of_v4_takes_their_arguments(version):
    stub = STUBS / f"vllm-{version}" / "vllm" / "models" / "deepseek_v4" / "attention.py"
    theirs = arguments(stub, "DeepseekV4Attention")
    ours = arguments(PLUGIN / "deepseek_v4.py", "CompressedAttention")
    assert [each.arg for each in ours.args] == [each.arg for each in theirs.args]


def test_drafts_are_of_our_layer_too(v4):
    """That of the model's module, in which ours is put."""
    model, mtp = (
        importlib.import_module(f"vllm.models.deepseek_v4.nvidia.{name}")
        for name in ("model", "mtp")
    )
    assert mtp.DeepseekV4DecoderLayer is model.DeepseekV4DecoderLayer
    assert issubclass(v4.DeepseekV4MTP, mtp.DeepSeekV4MTP)


def test_decodes_stand_side_by_side_with_their_drafts(v4):
    for drafts, longest in ((None, 1), (SimpleNamespace(num_speculative_tokens=2), 3)):
        builder = v4.Builder(None, [], SimpleNamespace(speculative_config=drafts), None)
        assert builder.reorder_batch_threshold == longest


@pytest.mark.parametrize("model", ["cpu", "nvidia"])
def test_a_platform_s_model_is_built_with_our_layer(model, v4):
    """And is as it was behind that."""
    module: Any = importlib.import_module(f"vllm.models.deepseek_v4.{model}.model")
    v4.theirs = SimpleNamespace(DeepseekV4ForCausalLM=module.DeepseekV4ForCausalLM)
    before = dict(vars(module))
    with v4._our_layers():
        if model == "cpu":
            assert module.DeepseekV4CPUAttention is v4.CompressedAttention
        else:
            assert module._select_dsv4_attn_cls(None) is v4.CompressedAttention
    assert vars(module) == before


@pytest.mark.parametrize("layer", range(3))
def test_a_layer_knows_its_entries_from_either_configuration(layer, v4):
    """DeepSeek's own, as vLLM 0.32 reads it, and Transformers'; a layer that drafts has none."""
    theirs = SimpleNamespace(compress_ratios=list(RATIOS), num_hidden_layers=3)
    for c in (Attention(layer).config, theirs):
        assert v4.ratio_of(c, layer) == RATIOS[layer]
        assert v4.ratio_of(c, 3 + layer) == 0


@pytest.fixture(scope="module")
def glm(kimi):
    """Ours, on vLLM's stubs."""
    yield importlib.import_module("custom.integrations.vllm.glm5_next")
    del sys.modules["custom.integrations.vllm.glm5_next"]


@pytest.fixture(scope="module")
def theirs_of_glm():
    """Layers of Transformers' model: of delta attention, and of attention to pools of 4 tokens."""
    torch.manual_seed(0)
    layers = glm5_next(index_n_heads=32).double().model.language_model.layers
    for layer in layers:
        for weight in layer.self_attn.parameters():
            torch.nn.init.normal_(weight, 0.0, weight.shape[-1] ** -0.5)
    return layers[0].self_attn, layers[3].self_attn


def linear(*weights: Tensor) -> Linear:
    layer = Linear(1, 1)
    layer.weight.data = torch.cat(weights).detach().float()
    return layer


def built_glm(glm: Any, theirs: Any, rank: int = 0, ranks: int = 1, **changed: Any) -> Any:
    """The layer with a rank's heads of Transformers' weights, and caches of one pool: a page is of
    any of them, and holds anything at first."""
    config = configuration(**changed)
    stored = changed.pop("stored", "auto")
    config.cache_config = SimpleNamespace(cache_dtype=stored, block_size=16)
    config.model_config = SimpleNamespace(dtype=torch.float32)
    config.compilation_config = SimpleNamespace(static_forward_context={})
    glm.get_current_vllm_config = lambda: config
    c, i = theirs.config, theirs.indexer

    def part(weight: Tensor, axis: int = 0) -> Tensor:
        return weight.chunk(ranks, axis)[rank]

    def norm(by: Any) -> Norm:
        made = Norm(len(by.weight))
        made.weight.data, made.variance_epsilon = by.weight.detach().float(), by.variance_epsilon
        return made

    ours = glm.attention.Indexer()
    ours.n_head, ours.head_dim = c.index_n_heads, c.index_head_dim
    ours.index_kpool, ours.topk_tokens = c.index_kpool, c.index_topk
    ours.index_kpool_compress_gate = linear(i.index_kpool_compress_gate).weight
    ours.index_kpool_compress_ape = linear(i.index_kpool_compress_ape).weight
    ours.wq_b, ours.wk_weights_proj = (
        linear(i.wq_b.weight),
        linear(i.wk.weight, i.weights_proj.weight),
    )
    ours.k_norm = deepcopy(i.k_norm).float().requires_grad_(False)
    ours.k_cache, ours.tail_cache = SimpleNamespace(prefix="pools"), SimpleNamespace(prefix="open")
    modules = SimpleNamespace(
        fused_qkv_a_proj=linear(theirs.q_a_proj.weight, theirs.kv_a_proj_with_mqa.weight),
        q_a_layernorm=norm(theirs.q_a_layernorm),
        q_b_proj=linear(part(theirs.q_b_proj.weight)),
        kv_a_layernorm=norm(theirs.kv_a_layernorm),
        kv_b_proj=linear(part(theirs.kv_b_proj.weight)),
        o_proj=linear(part(theirs.o_proj.weight, 1)),
        indexer=changed.get("indexer", ours),
        g_proj=changed.get("g_proj"),
    )
    sizes = [c.num_attention_heads // ranks, theirs.scaling, c.qk_nope_head_dim]
    sizes += [changed.get("rotary", 0), c.v_head_dim, c.q_lora_rank, c.kv_lora_rank]
    more = {each: changed[each] for each in ("quant_config", "use_rope") if each in changed}
    layer = glm.PooledLatent(
        c.hidden_size, *sizes, modules, config.cache_config, fuse_qkv_rmsnorm=True, **more
    )
    layer.process_weights_after_loading(torch.float32)
    caches = config.compilation_config.static_forward_context
    specs = {name: each.get_kv_cache_spec(config) for name, each in caches.items()}
    rows = dict.fromkeys(caches, 16)
    rows |= dict(pools=16 // specs["pools"].tokens_per_state, open=specs["open"].block_size)
    wide = max(rows[name] * each.head_size for name, each in specs.items())
    pool = torch.full([64, wide], torch.nan)
    for name, cache in caches.items():
        width = specs[name].head_size
        cache.bind_kv_cache(pool.as_strided([64, 1, rows[name], width], [wide, 0, width, 1]))
    # a ring has one page, and a table as wide as the others
    return layer, dict.fromkeys(caches, (16, 0)) | {"open": (1000, 0)}


@pytest.mark.parametrize("ranks", [1, 2])
def test_requests_that_join_attend_to_the_pools_of_transformers(ranks, glm, mla, theirs_of_glm):
    """Of all ranks together; an op is one call, whatever the requests bring."""
    torch.manual_seed(1)
    _, theirs = theirs_of_glm
    made = [built_glm(glm, theirs, rank, ranks) for rank in range(ranks)]
    totals = [sum(each) for each in zip(*STEPS, strict=True)]
    texts = [torch.randn(n, theirs.hidden_size, dtype=torch.float64) for n in totals]
    wanted = [theirs(x[None], torch.ones(1, len(x), dtype=torch.bool))[0][0] for x in texts]
    pages, lengths = Pages(made[0][1]), [0] * REQUESTS
    for counts in STEPS:
        spans = [slice(n, n + count) for n, count in zip(lengths, counts, strict=True)]
        for request, span in enumerate(spans):
            pages.of(request, span.start, span.stop)
        lengths = [span.stop for span in spans]
        builds = SimpleNamespace(Builder=mla.SparseBuilder)
        metadata = batches(builds, pages, list(counts), lengths)
        for name, batch in metadata.items():
            batch.slots = slots(batch, pages.sizes[name][0])
        glm.get_forward_context = lambda metadata=metadata: SimpleNamespace(attn_metadata=metadata)
        x = torch.cat([text[span] for text, span in zip(texts, spans, strict=True)]).float()
        found = torch.zeros_like(x)
        for each, _ in made:
            # two tokens behind the batch's, of no request
            out = x.new_full((len(x) + 2, each.heads * each.value_size), 7.0)
            padded = torch.cat([x, x.new_full((2, x.shape[1]), torch.nan)])
            log.calls.clear()
            each.attend(metadata[each.layer_name], torch.empty(0), padded, out)
            ops = ("npu_compressor", "npu_lightning_indexer", "npu_sparse_flash_attention")
            assert {op: n for (op, _), n in log.calls.items()} == dict.fromkeys(ops, 1)
            assert (out[len(x) :] == 7).all()
            found += each.o_proj(out[: len(x)])[0]
        right = torch.cat([want[span] for want, span in zip(wanted, spans, strict=True)])
        torch.testing.assert_close(found.double(), right, rtol=1e-3, atol=1e-3)


def slots(batch: Any, page: int) -> Tensor:
    """Where vLLM has the tokens of a batch in a cache of a row each."""
    starts = torch.cat([batch.ends.new_zeros(1), batch.ends])
    found = [
        int(row[p // page]) * page + p % page
        for row, n, length in zip(
            batch.block_table, starts.diff().tolist(), batch.lengths.tolist(), strict=True
        )
        for p in range(length - n, length)
    ]
    return torch.tensor(found)


@pytest.mark.parametrize("ranks", [1, 2])
def test_bounded_delta_attention_is_transformers_(ranks, glm, kimi, theirs_of_glm, monkeypatch):
    """A prefill, and decodes that go on from it, of all ranks together."""
    torch.manual_seed(2)
    theirs, _ = theirs_of_glm
    heads, size = theirs.num_heads // ranks, theirs.head_dim
    monkeypatch.setattr(kimi, "is_conv_state_dim_first", lambda: False)
    monkeypatch.setattr(kimi, "NULL_BLOCK_ID", 0)
    x = torch.randn(14, theirs.hidden_size)
    wanted = theirs(x[None].double())[0]
    found = torch.zeros_like(x)
    for rank in range(ranks):

        def part(weight: Tensor, axis: int = 0, rank: int = rank) -> Tensor:
            return weight.detach().float().chunk(ranks, axis)[rank]

        gate = theirs.forget_gate
        columns = [part(each) for each in theirs.conv1d.weight.chunk(3)]
        layer = SimpleNamespace(
            prefix="layer",
            local_num_heads=heads,
            head_dim=size,
            in_proj_qkvbfg_a=linear(
                *(part(each.weight) for each in (theirs.q_proj, theirs.k_proj, theirs.v_proj)),
                part(theirs.b_proj.weight),
                gate.f_a_proj.weight.float(),
                theirs.g_a_proj.weight.float(),
            ),
            f_b_proj=linear(part(gate.f_b_proj.weight)),
            g_b_proj=linear(part(theirs.g_b_proj.weight)),
            o_proj=linear(part(theirs.o_proj.weight, 1)),
            A_log=part(gate.A_log)[None, None, :, None],
            dt_bias=part(gate.dt_bias),
            o_norm=SimpleNamespace(
                weight=theirs.o_norm.weight.detach().float(), eps=theirs.o_norm.variance_epsilon
            ),
            gate_lower_bound=gate.safe_gate_lower_bound,
            copies={},
            kv_cache=(
                torch.full([3, theirs.conv_kernel_size - 1, 3 * heads * size], torch.nan),
                torch.full([3, heads, size, size], torch.nan),
            ),
        )
        for name, each in zip("qkv", columns, strict=True):
            vars(layer)[f"{name}_conv1d"] = SimpleNamespace(weight=each)
        for name in ("_forward", "prefill", "taps", "process_weights_after_loading"):
            vars(layer)[name] = partial(getattr(glm.BoundedDelta, name), layer)
        layer.process_weights_after_loading(torch.float32)
        for tokens in (slice(0, 11), slice(11, 12), slice(12, 13), slice(13, 14)):
            n = tokens.stop - tokens.start
            batch = delta_batch([2], int(n == 1), [n] if n > 1 else [], [False])
            context = SimpleNamespace(attn_metadata={"layer": batch})
            monkeypatch.setattr(kimi, "get_forward_context", lambda context=context: context)
            found[tokens] += glm.BoundedDelta.forward(layer, x[tokens], None)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-4)


def test_the_padding_of_a_graph_changes_nothing(glm, mla, theirs_of_glm):
    """A token and no length, behind the last request: but on page 0, of nobody."""
    layer, sizes = built_glm(glm, theirs_of_glm[1])
    x = torch.randn(2, theirs_of_glm[1].hidden_size)

    def run(requests: int) -> list[Tensor]:
        batch = {
            name: mla.SparseMetadata(
                torch.tensor([1, 2])[:requests],
                torch.tensor([4, 0])[:requests],
                torch.tensor([[page, 0], [0, 0]])[:requests],
                torch.tensor([16 * page + 3, -1])[:requests],
                1,
            )
            for page, name in enumerate(sizes, 1)
        }
        glm.get_forward_context = lambda: SimpleNamespace(attn_metadata=batch)
        caches = [layer.kv_cache, layer.pools.kv_cache, layer.open.kv_cache]
        for each in caches:
            each.zero_()
        out = torch.zeros(requests, layer.heads * layer.value_size)
        layer.attend(batch[layer.layer_name], torch.empty(0), x[:requests], out)
        assert not out[1:].any()
        return [out[:1], *(each[1:].clone() for each in caches)]

    alone, padded = run(1), run(2)
    assert all(each.any() for each in alone)
    torch.testing.assert_close(padded, alone)


def test_glm_s_weights_are_read_where_vllm_keeps_them(glm, theirs_of_glm):
    layer, _ = built_glm(glm, theirs_of_glm[1])
    theirs = {each.untyped_storage().data_ptr() for each in layer.parameters()}
    ours = {**layer.pooling, "uk": layer.uk, "uv": layer.uv, "heads": layer.w_heads}
    tensors = {name: each for name, each in ours.items() if isinstance(each, Tensor)}
    assert len(tensors) == 8
    assert all(each.untyped_storage().data_ptr() in theirs for each in tensors.values())


# by attention to some of the keys
NOT_TRIED = (
    (dict(data_parallel_size=2), "data parallelism"),
    (dict(speculative_config=SimpleNamespace(method="mtp")), "drafts"),
    (dict(quant_config=object()), "quantized weights"),
    (dict(stored="fp8"), "caches of another dtype than the model"),
)


@pytest.mark.parametrize(
    ("changed", "mode"),
    [
        *NOT_TRIED,
        (dict(rotary=8), "a rotary part"),
        (dict(indexer=None), "keys that are all attended to"),
        (dict(g_proj=object()), "a gate"),
        (dict(use_rope=True), "`use_rope`"),
    ],
)
def test_attention_to_pools_is_refused_where_it_was_not_tried(changed, mode, glm, theirs_of_glm):
    with pytest.raises(
        NotSupported, match=f"serves attention to pools of keys without {mode}, and"
    ):
        built_glm(glm, theirs_of_glm[1], **changed)


def test_shared_selections_of_pools_are_refused(glm):
    text = SimpleNamespace(indexer_types=["full", "shared"])
    config = SimpleNamespace(model_config=SimpleNamespace(hf_text_config=text))
    with pytest.raises(NotSupported, match="without layers that share a selection, and"):
        glm.Glm5NextForCausalLM(vllm_config=config)


def test_glm_is_built_with_our_layers(glm):
    """And vLLM's modules are as they were behind that."""
    registry = importlib.import_module("vllm.model_executor.custom_op").op_registry_oot
    modules = (glm.theirs, glm.attention, glm.kda)
    before = [dict(vars(each)) for each in modules]
    with glm._our_layers():
        assert registry == dict(MultiHeadLatentAttentionWrapper=glm.PooledLatent)
        assert glm.theirs.Glm5NextLinearAttention is glm.BoundedDelta
        assert glm.kda._resolve_kda_prefill_backend("auto", 128, torch.bfloat16, -5.0) == "triton"
    assert [vars(each) for each in modules] == before and not registry


@pytest.fixture(scope="module")
def m3(mla):
    """Ours, on vLLM's stubs, with layers of `m3.ranks` ranks."""
    module: Any = importlib.import_module("custom.integrations.vllm.minimax_m3")
    module.current_platform = SimpleNamespace(is_cpu=lambda: True)
    module.get_tensor_model_parallel_world_size = lambda: module.ranks
    module.MinimaxM3QKVParallelLinearWithIndexer = lambda *_, **__: Linear(1, 1)
    module.RowParallelLinear = lambda *_, **__: Linear(1, 1)
    module.GemmaRMSNorm = lambda size, eps: Norm(size)
    module.get_rope = lambda *_, **__: None
    yield module
    del sys.modules["custom.integrations.vllm.minimax_m3"]


def engine_of_m3(**changed: Any) -> Any:
    config = configuration(**changed)
    config.model_config = SimpleNamespace(dtype=torch.float32)
    config.compilation_config = SimpleNamespace(static_forward_context={})
    return config


def built_m3(m3: Any, theirs: Any, rotary: Any, rank: int, ranks: int) -> Any:
    """The layer with a rank's part of Transformers' weights, and caches side by side in a block,
    which hold anything at first."""
    a, c, index, m3.ranks = theirs, theirs.config, theirs.indexer, ranks
    m3.get_current_vllm_config = engine_of_m3
    chosen = dict(
        sparse_num_index_heads=c.index_n_heads,
        sparse_index_dim=c.index_head_dim,
        sparse_block_size=c.index_block_size,
        sparse_topk_blocks=c.index_topk_blocks,
        sparse_local_block=c.index_local_blocks,
    )
    names = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    sizes = {name: getattr(c, name) for name in (*names, "rms_norm_eps", "max_position_embeddings")}
    asked = SimpleNamespace(
        **sizes, sparse_attention_config=chosen, rope_theta=0, partial_rotary_factor=0
    )
    layer = m3.BlockAttention(asked, 1, cache_config=SimpleNamespace(cache_dtype="auto"))

    def part(layer: Any, axis: int = 0) -> Tensor:
        weight: Tensor = layer.weight.chunk(ranks, axis)[rank]
        return weight

    layer.qkv_proj = linear(
        *(part(each) for each in (a.q_proj, a.k_proj, a.v_proj, index.q_proj)), index.k_proj.weight
    )
    layer.o_proj = linear(part(a.o_proj, 1))
    for name in ("q_norm", "k_norm"):
        setattr(layer, name, deepcopy(getattr(a, name)).float().requires_grad_(False))
        mine = deepcopy(getattr(index, name)).float().requires_grad_(False)
        setattr(layer, f"index_{name}", mine)
    layer.rotary_emb = SimpleNamespace(forward_native=rotary)
    caches = [layer, layer.values, layer.index]
    block = torch.full([64, 16 * sum(each.width for each in caches)], torch.nan)
    for cache, rows in zip(
        caches, block.split([16 * each.width for each in caches], 1), strict=True
    ):
        cache.bind_kv_cache(rows.unflatten(1, (1, 16, -1)))
    return layer


@pytest.mark.parametrize("ranks", [1, 2])
def test_requests_that_join_attend_to_the_blocks_of_transformers(ranks, m3, mla):
    """Of all ranks together; an op is one call, whatever the requests bring."""
    torch.manual_seed(3)
    model = minimax_m3(index_head_dim=24).double().model
    theirs = model.layers[1].self_attn
    for norm in (theirs.q_norm, theirs.k_norm, theirs.indexer.q_norm, theirs.indexer.k_norm):
        torch.nn.init.normal_(norm.weight, std=0.2)
    turn = importlib.import_module(type(theirs).__module__).apply_rotary_pos_emb

    def rotary(positions: Tensor, q: Tensor, k: Tensor) -> list[Tensor]:
        angles = model.rotary_emb(q, positions[None])
        return [each[0] for each in turn(q[None], k[None], *angles, unsqueeze_dim=2)]

    def whole(text: Tensor) -> Tensor:
        angles = model.rotary_emb(text, torch.arange(len(text))[None])
        mask = torch.full([len(text)] * 2, -torch.inf, dtype=torch.float64).triu(1)
        out: Tensor = theirs(text[None], angles, mask[None, None])[0][0]
        return out

    made = [built_m3(m3, theirs, rotary, rank, ranks) for rank in range(ranks)]
    totals = [sum(each) for each in zip(*STEPS, strict=True)]
    texts = [torch.randn(n, model.config.hidden_size, dtype=torch.float64) for n in totals]
    wanted = [whole(text) for text in texts]
    pages, lengths = Pages({"layer": (16, 0)}), [0] * REQUESTS
    builds = SimpleNamespace(Builder=mla.SparseBuilder)
    for counts in STEPS:
        spans = [slice(n, n + count) for n, count in zip(lengths, counts, strict=True)]
        for request, span in enumerate(spans):
            pages.of(request, span.start, span.stop)
        lengths = [span.stop for span in spans]
        batch = batches(builds, pages, list(counts), lengths)["layer"]
        batch.slots = slots(batch, 16)
        positions = torch.cat([torch.arange(span.start, span.stop) for span in spans])
        x = torch.cat([text[span] for text, span in zip(texts, spans, strict=True)]).float()
        found = torch.zeros_like(x)
        for each in made:
            # two tokens behind the batch's, of no request
            out = x.new_full((len(x) + 2, each.heads * each.value_size), 7.0)
            padded = torch.cat([x, x.new_full((2, x.shape[1]), torch.nan)])
            log.calls.clear()
            each.attend(batch, torch.nn.functional.pad(positions, (0, 2)), padded, out)
            ops = ("npu_block_indexer", "npu_sparse_attention_score")
            assert {op: n for (op, _), n in log.calls.items()} == dict.fromkeys(ops, 1)
            assert (out[len(x) :] == 7).all()
            found += each.o_proj(out[: len(x)])[0]
        right = torch.cat([want[span] for want, span in zip(wanted, spans, strict=True)])
        torch.testing.assert_close(found.double(), right, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("changed", "mode"),
    [
        *NOT_TRIED,
        (dict(sparse_score_type="mean"), "scores other than the largest"),
        (dict(sparse_index_dim=16), "an indexer with heads of another size"),
    ],
)
def test_attention_to_blocks_is_refused_where_it_was_not_tried(changed, mode, m3):
    m3.get_current_vllm_config = lambda: engine_of_m3(**changed)
    chosen = dict(sparse_index_dim=24) | {
        n: x for n, x in changed.items() if n.startswith("sparse")
    }
    config = SimpleNamespace(head_dim=24, sparse_attention_config=chosen)
    stored = SimpleNamespace(cache_dtype=changed.get("stored", "auto"))
    with pytest.raises(NotSupported, match=f"serves {m3.BLOCKS} without {mode}, and"):
        m3.BlockAttention(config, 1, changed.get("quant_config"), cache_config=stored)


@pytest.mark.parametrize("version", VERSIONS)
def test_our_layer_of_m3_takes_their_arguments(version):
    stub = STUBS / f"vllm-{version}" / "vllm" / "models" / "minimax_m3" / "nvidia" / "model.py"
    theirs = arguments(stub, "MiniMaxM3SparseAttention")
    ours = arguments(PLUGIN / "minimax_m3.py", "BlockAttention")
    assert [each.arg for each in ours.args] == [each.arg for each in theirs.args]


def test_m3_is_built_with_our_layer(m3):
    before = m3.theirs.MiniMaxM3SparseAttention
    with m3._our_layers():
        assert m3.theirs.MiniMaxM3SparseAttention is m3.BlockAttention
    assert m3.theirs.MiniMaxM3SparseAttention is before
