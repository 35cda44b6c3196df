# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Our plug-in against what SGLang's wheel says of what it touches, and run on its stubs.

No SGLang is installed: tests/vllm/stubs.py made the stubs of the wheel's sources.
"""

from __future__ import annotations

import importlib
import sys
from configparser import ConfigParser
from types import SimpleNamespace

import pytest
import torch
from custom.dispatch.env import config
from custom.dispatch.errors import NotSupported

import custom
from custom.integrations import sglang

from ..support.calls import CPU
from ..support.quantized_caches import LENGTHS, TABLE, Caches, K, layer_arguments
from ..support.quantized_layer import INDEXER, MLA, Call, P
from ..support.typed import ROOT, STUBS, checker, moved

(STUB,) = STUBS.glob("sglang-*")
LAYERS = "sglang/srt/layers"
MOVED = {
    f"{LAYERS}/attention/dsa_backend.py": ("real_page_table:", "page_table:"),  # a field
    f"{LAYERS}/attention/dsa/dsa_indexer.py": (
        "_get_topk_ragged(self, ",
        "_get_topk_ragged(self, more: int, ",
    ),
    "sglang/srt/mem_cache/memory_pool.py": ("set_mla_kv_buffer", "set_mla_buffer"),
    "sglang/srt/arg_groups/fields/parallel.py": ("tp_size", "tensor_size"),
    "sglang/srt/runtime_context.py": ("get_spec", "get_speculation"),
    "sglang/srt/configs/hybrid_arch.py": ("hybrid_gdn_config", "hybrid_config"),
    f"{LAYERS}/attention/attention_registry.py": ("attn_backend_wrapper", "wrapped_backend"),
    f"{LAYERS}/attention/hybrid_linear_attn_backend.py": ("mamba_chunk_size", "chunk_size"),
    f"{LAYERS}/attention/linear/gdn_backend.py": ("extend_kernel:", "prefill_kernel:"),
    f"{LAYERS}/attention/linear/kernels/gdn_triton.py": ("ssm_states: ", "states: "),
    "sglang/srt/plugins/hook_registry.py": ("BEFORE", "FIRST"),
}


def test_what_we_touch_is_there_and_what_moves_is_seen(tmp_path):
    """By mypy, strict, over the plug-in: every name, field, argument and override."""
    said = checker(tmp_path, sglang.__name__)
    assert said(STUB).startswith("Success")
    changed = said(moved(STUB, tmp_path, MOVED))
    for name in (
        "real_page_table",
        "_get_topk_ragged",
        "set_mla_kv_buffer",
        "tp_size",
        "get_spec",
        "hybrid_gdn_config",
        "attn_backend_wrapper",
        "mamba_chunk_size",
        "extend_kernel",
        "packed_decode",
        "BEFORE",
    ):
        assert f'"{name}' in changed, changed


def test_the_range_is_what_there_are_stubs_for():
    version = STUB.name.removeprefix("sglang-")
    first, below = sglang.SGLANG
    assert first == tuple(map(int, version.split(".")))
    assert below == (*first[:-1], first[-1] + 1)


def test_the_entry_point_is_ours():
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    name, _, where = setup["options.entry_points"]["sglang.srt.plugins"].strip().partition(" = ")
    assert (name, where) == ("npu_custom_ops", f"{sglang.__name__}:{sglang.register.__name__}")


@pytest.fixture
def stubs(monkeypatch):
    monkeypatch.syspath_prepend(str(STUB))
    yield monkeypatch
    for name in [each for each in sys.modules if each.split(".")[0] == "sglang"]:
        del sys.modules[name]
    for name in ("dsa", "gdn", "modes"):
        sys.modules.pop(f"{sglang.__name__}.{name}", None)


@pytest.fixture
def dsa(stubs):
    return importlib.import_module(f"{sglang.__name__}.dsa")


@pytest.fixture
def gdn(stubs):
    return importlib.import_module(f"{sglang.__name__}.gdn")


def test_it_is_registered_if_it_is_turned_on(stubs):
    registry = importlib.import_module("sglang.srt.layers.attention.attention_registry")
    backends: dict = {}
    stubs.setattr(
        registry, "register_attention_backend", lambda name: lambda f: backends.update({name: f})
    )
    hooks = importlib.import_module("sglang.srt.plugins.hook_registry")
    hooked: list = []
    stubs.setattr(hooks.HookRegistry, "register", lambda *given: hooked.append(given))
    stubs.setattr(sglang, "version", lambda name: "0.5.23.post1")
    sglang.register()
    assert not backends and not hooked
    stubs.setattr(config, "sglang", True)
    sglang.register()
    assert backends == dict.fromkeys(("dsa", "nsa"), sglang.sparse_backend)
    wrapper = "sglang.srt.layers.attention.attention_registry.attn_backend_wrapper"
    assert hooked == [(wrapper, sglang.delta_backend, hooks.HookType.BEFORE)]


def test_another_version_ends_the_process(stubs, capsys):
    """SGLang would log an Exception and serve the model without us."""
    stubs.setattr(config, "sglang", True)
    stubs.setattr(sglang, "version", lambda name: "0.5.24")
    message = "CUSTOM_SGLANG=1 was tried with SGLang >=0.5.23,<0.5.24, and 0.5.24 is installed; "
    with pytest.raises(SystemExit, match=message):
        sglang.register()
    assert not capsys.readouterr().err


def test_what_else_ends_the_process_says_where(stubs, capsys):
    stubs.setattr(config, "sglang", True)

    def moved(name):
        raise AttributeError("it has moved")

    stubs.setattr(sglang, "version", moved)
    with pytest.raises(SystemExit, match="AttributeError: it has moved"):
        sglang.register()
    assert "in moved" in capsys.readouterr().err


MODES = {
    "tp_size": (2, "tensor parallelism"),
    "pp_size": (2, "pipeline parallelism"),
    "dcp_size": (2, "context parallelism"),
    "attn_cp_size": (2, "context parallelism"),
    "enable_dsa_cache_layer_split": (True, "caches split by layers"),
    "speculative_algorithm": ("EAGLE", "speculative decoding"),
    "enable_two_batch_overlap": (True, "microbatches"),
    "enable_hisparse": (True, "hierarchical sparse attention"),
    "disaggregation_mode": ("decode", "prefill and decode apart"),
    "dsa_prefill_backend": ("trtllm", "kernels other than flashmla_sparse, flashmla_kv, "),
    "dsa_decode_backend": ("flashmla_sparse_q8", "kernels other than flashmla_sparse, "),
    "device": ("npu", "devices other than NVIDIA's"),
    "page_size": (1, "pages of other than 64 tokens"),
    "dtype": (torch.float16, "caches other than bfloat16, or fp8 with scales"),
    "index_kpool": (4, "pools of index keys"),
    "index_init_tokens": (1, "keys that are always selected"),
    "index_local_tokens": (1, "keys that are always selected"),
}


def an_engine(monkeypatch, **changed):
    """A runner of SGLang and what it publishes: all that we ask of them."""
    usual = dict(
        tp_size=1,
        pp_size=1,
        dcp_size=1,
        attn_cp_size=1,
        enable_dsa_cache_layer_split=False,
        speculative_algorithm=None,
        enable_two_batch_overlap=False,
        enable_hisparse=False,
        disaggregation_mode="null",
        dsa_prefill_backend="flashmla_auto",
        dsa_decode_backend="flashmla_kv",
        device="cuda",
        page_size=64,
        dtype=torch.bfloat16,
        dsa_kv_cache_store_fp8=False,
    )
    bag = SimpleNamespace(**usual | changed)
    bag.kernel = bag.overlap = bag.token_to_kv_pool = bag
    bag.model_config = SimpleNamespace(hf_config=bag)
    for name in ("disagg", "exec", "memory", "parallel", "spec"):
        monkeypatch.setattr(f"sglang.srt.runtime_context.get_{name}", lambda: bag)
    return bag


def assert_refuses(served, asked, build):
    value, mode = (MODES | DELTA_MODES)[asked]
    with pytest.raises(NotSupported, match=f"serves {served} without {mode}.*; turn it"):
        build({asked: value})


@pytest.mark.parametrize("asked", MODES)
def test_a_mode_that_has_no_test_is_refused(dsa, stubs, asked):
    assert_refuses("sparse attention", asked, lambda on: dsa.SparseBackend(an_engine(stubs, **on)))


def test_the_factory_replaces_the_selection(dsa, stubs):
    fp8 = dict(dtype=torch.float8_e4m3fn, dsa_kv_cache_store_fp8=True)
    backend = sglang.sparse_backend(an_engine(stubs, **fp8))
    assert isinstance(backend, dsa.DeepseekSparseAttnBackend) and backend.use_fused_topk is False
    for name in ("_get_topk_paged", "_get_topk_ragged"):
        assert vars(dsa.Indexer)[name] is vars(dsa.SelectingIndexer)[name]


class Pool:
    """SGLang's pool of one layer; the rows of new tokens come with the call."""

    def __init__(self, caches: Caches, new: torch.Tensor) -> None:
        latents, rotary = caches.latents
        pages = latents.view(torch.float8_e4m3fn) if caches.kv == "fp8" else latents
        if caches.kv == "none":
            pages = torch.cat([latents, rotary], -1)
        self.rows = pages.view(-1, 1, pages.shape[-1])
        self.keys, self.new = caches.keys.flatten(1), new
        self.bytes = self.rows.view(torch.uint8)
        self.kept = self.bytes[new].clone()
        self.bytes[new] = 0

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self.rows

    def get_index_k_with_scale_buffer(self, layer_id: int) -> torch.Tensor:
        return self.keys

    def set_mla_kv_buffer(self, layer, loc, k, k_rope) -> None:
        assert torch.equal(loc, self.new) and k == "k" and k_rope == "k_rope"
        self.bytes[loc] = self.kept


@pytest.mark.parametrize("kv", ["none", "fp8"])
@pytest.mark.parametrize("tokens", [(1, 1), (3, 1)], ids=["decode", "prefill beside a decode"])
@pytest.mark.parametrize("fused_query", [False, True])
def test_a_batch_is_our_decode_loop(dsa, stubs, kv, tokens, fused_query):
    """Bit by bit what npu_sparse_attention_pto gives on the same pages, and zeros behind it."""
    call = Call(CPU, 0)
    call.slots = torch.tensor([[82, 83, 92], [33, 34, 35]], dtype=torch.int32)
    wanted, selected = custom.npu_sparse_attention_indices_pto(
        **layer_arguments(call, Caches(call, kv, "fp8", True), 0, 0)
    )

    # as SGLang has them: the queries of its projections, keys in its caches
    caches = Caches(call, kv, "fp8", True)
    rows: dict = dict(kv_cache_quant_mode=3, ckvkr_repo_mode=1, quant_scale_repo_mode=1)
    rows = {} if kv == "none" else rows | dict(kv_cache_dtype=torch.float8_e4m3fn)
    latent, rope = caches.latents
    q, q_rope, norm = getattr(custom, MLA)(
        **call.mla(kv_cache=latent, kr_cache=rope, row_layout="nope_scale_rope", **rows)
    )
    keys, scales = caches.values()
    index_q, weights = getattr(custom, INDEXER)(
        **call.indexer(
            query_norm=norm, index_k_cache=keys, index_k_scale_cache=scales, kv_cache_quant_mode=3
        )
    )
    rows_of = [slice(3 - n, 3) for n in tokens]

    def packed(x: torch.Tensor) -> torch.Tensor:
        """[T, ...] of the last tokens of the requests, and one row of padding."""
        there = torch.cat([x[b, part] for b, part in enumerate(rows_of)])
        return torch.cat([there, there[:1]])

    loc = torch.cat([call.slots[b, part] for b, part in enumerate(rows_of)]).long()
    pool = Pool(caches, loc)
    stubs.setattr(dsa, "PAGE", P)
    stubs.setattr(dsa, "get_token_to_kv_pool", lambda: pool)
    batch = SimpleNamespace(
        cache_seqlens_int32=torch.tensor(LENGTHS, dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, tokens[0], sum(tokens)], dtype=torch.int32),
        dsa_extend_seq_lens_list=list(tokens),
        real_page_table=torch.tensor(TABLE, dtype=torch.int32),
    )
    indexer = dsa.Indexer()
    indexer.index_topk = K
    asked = packed(index_q), packed(weights)[..., None], SimpleNamespace(attn_metadata=batch)
    chosen = dsa.SelectingIndexer._get_topk_paged(indexer, None, 0, *asked)
    assert torch.equal(chosen[:-1], packed(selected)[:-1, 0])
    assert (chosen[-1] == -1).all()
    padded = torch.full((sum(tokens) + 4, K), -1, dtype=torch.int32)
    ragged = dsa.SelectingIndexer._get_topk_ragged(indexer, False, None, 0, *asked, padded)
    assert ragged is padded and torch.equal(padded[: len(chosen)], chosen)

    backend = dsa.SparseBackend(an_engine(stubs, page_size=P))
    backend.dsa_kv_cache_store_fp8, backend.use_mha = kv == "fp8", False
    backend.token_to_kv_pool, backend.forward_metadata = pool, batch
    scale = (call.layer.w_uk.shape[1] + 64) ** -0.5
    layer = SimpleNamespace(
        tp_q_head_num=2, v_head_dim=512, head_dim=576, scaling=scale, layer_id=0
    )
    forward_batch = SimpleNamespace(out_cache_loc=loc)
    query = (packed(q), packed(q_rope))
    given: dict = dict(q_rope=query[1], k_rope="k_rope", topk_indices=chosen)
    first = query[0]
    if fused_query:
        first, given["q_rope"] = torch.cat(query, -1), None
    forward = backend.forward_decode if tokens == (1, 1) else backend.forward_extend
    out = forward(first, "k", "v", layer, forward_batch, **given)
    assert torch.equal(out[:-1], packed(wanted)[:-1])
    assert not out[-1].any()


def test_what_a_layer_asks_for_beyond_is_refused(dsa, stubs):
    backend = dsa.SparseBackend(an_engine(stubs))
    with pytest.raises(NotSupported, match="layers that come with a selection of keys"):
        backend.forward_decode(None, None, None, None, None)
    for name, mode in (
        ("cos_sin_cache", "a rotation in the attention"),
        ("llama_4_scaling", "Llama 4's scaling"),
        ("attn_sink", "attention sinks"),
    ):
        with pytest.raises(NotSupported, match=f"without {mode}, and"):
            given = {"topk_indices": torch.zeros(1, 1), name: torch.ones(1)}
            backend.forward_decode(None, None, None, None, None, **given)


def test_short_prompts_stay_with_sglang(dsa, stubs):
    """It attends to them densely."""
    backend = dsa.SparseBackend(an_engine(stubs))
    backend.use_mha = True
    stubs.setattr(dsa.DeepseekSparseAttnBackend, "forward_extend", lambda self, *args: args)
    assert backend.forward_extend("q", "k") == ("q", "k")


DELTA_MODES = {
    **{name: MODES[name] for name in MODES if name.endswith("_size") and name != "page_size"},
    **{name: MODES[name] for name in ("speculative_algorithm", "enable_two_batch_overlap")},
    **{name: MODES[name] for name in ("disaggregation_mode", "device")},
    "enable_linear_replayssm": (True, "states that are replayed"),
    "enable_linear_replayssm_spec": (True, "states that are replayed"),
    "enable_page_major_kv_layout": (True, "pages that have states and keys"),
    "enable_unified_memory": (True, "pages that have states and keys"),
}


def a_delta_engine(monkeypatch, **changed):
    off = [name for name, (value, _) in DELTA_MODES.items() if value is True]
    bag = an_engine(monkeypatch, **dict.fromkeys(off, False) | changed)
    bag.mamba = bag
    return bag


@pytest.mark.parametrize("asked", DELTA_MODES)
def test_a_mode_of_the_delta_rule_that_has_no_test_is_refused(gdn, stubs, asked):
    rule = lambda on: gdn.DeltaBackend(a_delta_engine(stubs, **on))  # noqa: E731
    assert_refuses("the gated delta rule", asked, rule)


def test_the_backend_of_a_delta_rule_is_replaced_where_there_is_one(gdn, stubs):
    arch = importlib.import_module("sglang.srt.configs.hybrid_arch")
    stubs.setattr(arch, "hybrid_gdn_config", lambda config: config)
    theirs = gdn.GDNAttnBackend
    assert sglang.delta_backend(SimpleNamespace(model_config=None), None) is None
    assert gdn.gdn_backend.GDNAttnBackend is theirs
    assert sglang.delta_backend(SimpleNamespace(model_config="Qwen3-Next"), None) is None
    assert gdn.gdn_backend.GDNAttnBackend is gdn.DeltaBackend

    stubs.setattr(theirs, "kernel_dispatcher", SimpleNamespace(), raising=False)
    stubs.setattr(theirs, "mamba_chunk_size", 32)
    kernels = gdn.DeltaBackend(a_delta_engine(stubs)).kernel_dispatcher
    assert kernels.supports_packed_decode and kernels.extend_kernel is kernels.decode_kernel
    assert isinstance(kernels.extend_kernel, gdn.DeltaRule) and kernels.extend_kernel.chunk == 32


HEADS, VALUE_HEADS, KEY, VALUE, SLOTS = 2, 4, 16, 8, 6


def token_by_token(q, k, v, g, beta, state):
    """[T, Nv, Dv] of one request's q and k [T, Nk, Dk], and the state [Nv, Dv, Dk] behind each."""
    outs, states = [], [state]
    q, k = (x / (x * x).sum(-1, keepdim=True).add(1e-6).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(VALUE_HEADS // HEADS, 1) for x in (q, k))
    for t in range(len(q)):
        state = state * g[t].exp()[:, None, None]
        missing = v[t] - (state * k[t, :, None]).sum(-1)
        state = state + (beta[t, :, None] * missing)[..., None] * k[t, :, None]
        outs.append((state * q[t, :, None]).sum(-1) * KEY**-0.5)
        states.append(state)
    return torch.stack(outs), torch.stack(states)


@pytest.fixture
def rule(gdn):
    return gdn.DeltaRule(8)


def gates(a, b, a_log, bias):
    return -a_log.exp() * torch.nn.functional.softplus(a + bias), b.sigmoid()


def test_a_decode_step_is_the_rule_on_the_pool(rule):
    """Behind the convolution, q, k and v of a token in one row; padding has slot 0."""
    random = torch.Generator().manual_seed(0)
    widths = [HEADS * KEY, HEADS * KEY, VALUE_HEADS * VALUE]
    mixed = torch.randn(3, sum(widths), generator=random)
    a, b = torch.randn(2, 3, VALUE_HEADS, generator=random)
    a_log, bias = torch.randn(2, VALUE_HEADS, generator=random)
    pool = torch.randn(SLOTS, VALUE_HEADS, VALUE, KEY, generator=random)
    slots, before = torch.tensor([4, 1, 0], dtype=torch.int32), pool.clone()
    out = rule.packed_decode(
        mixed,
        a,
        b,
        A_log=a_log,
        dt_bias=bias,
        scale=KEY**-0.5,
        ssm_states=pool,
        cache_indices=slots,
        num_v_heads=VALUE_HEADS,
        head_v_dim=VALUE,
        replayssm_d=None,
    )
    assert out.shape == (1, 3, VALUE_HEADS, VALUE)
    g, beta = gates(a, b, a_log, bias)
    for i, slot in enumerate(slots.tolist()):
        q, k, v = mixed[i : i + 1].split(widths, -1)
        parts = (x.unflatten(-1, (-1, n)) for x, n in ((q, KEY), (k, KEY), (v, VALUE)))
        wanted, states = token_by_token(*parts, g[i : i + 1], beta[i : i + 1], before[slot])
        torch.testing.assert_close(out[0, i : i + 1], wanted)
        torch.testing.assert_close(pool[slot], states[-1])
    untouched = [2, 3, 5]
    assert torch.equal(pool[untouched], before[untouched])


def test_an_argument_that_is_not_read_is_refused(rule):
    rest = dict(A_log=None, dt_bias=None, scale=1.0, num_v_heads=1, head_v_dim=1)
    pool = dict(ssm_states=None, cache_indices=None)
    with pytest.raises(NotSupported, match="rule without `lower_bound`, and this engine"):
        rule.packed_decode(None, None, None, **pool, **rest, lower_bound=-5.0, replayssm_d=None)
    with pytest.raises(NotSupported, match="rule without `boundary_state`, and this engine"):
        rule.extend(
            *[None] * 5, **pool, query_start_loc=None, boundary_state=torch.zeros(1), layer_id=0
        )


@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize("padding", [0, 3])
def test_a_prefill_leaves_its_states_and_those_that_are_kept(rule, inplace, padding):
    """A state at a chunk's end in the middle of a request, for SGLang's prefix cache."""
    random = torch.Generator().manual_seed(1)
    lengths, kept = (20, 1, 16, 9), (2, -1, -1, 1)  # in chunks of 8
    total = sum(lengths) + padding
    q, k = torch.randn(2, 1, total, HEADS, KEY, generator=random)
    v = torch.randn(1, total, VALUE_HEADS, VALUE, generator=random)
    a, b = torch.randn(2, 1, total, VALUE_HEADS, generator=random)
    g, beta = gates(a, b, *torch.randn(2, VALUE_HEADS, generator=random))
    pool = torch.randn(SLOTS, VALUE_HEADS, VALUE, KEY, generator=random)
    slots, before = torch.tensor([5, 2, 1, 3], dtype=torch.int32), pool.clone()
    starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    snapshot = torch.full((4, VALUE_HEADS, VALUE, KEY), float("nan"))
    out, final, chunks = rule.extend(
        q,
        k,
        v,
        g,
        beta,
        ssm_states=pool,
        cache_indices=slots,
        query_start_loc=starts,
        inplace_update=inplace,
        track_state=snapshot,
        track_chunk_idx=torch.tensor(kept, dtype=torch.int32),
        layer_id=0,
    )
    assert out.shape == v.shape and chunks is None
    for i, slot in enumerate(slots.tolist()):
        mine = slice(int(starts[i]), int(starts[i + 1]))
        wanted, states = token_by_token(*(x[0, mine] for x in (q, k, v, g, beta)), before[slot])
        torch.testing.assert_close(out[0, mine], wanted)
        torch.testing.assert_close(final[i], states[-1])
        torch.testing.assert_close(pool[slot], states[-1] if inplace else before[slot])
        if kept[i] >= 0:
            torch.testing.assert_close(snapshot[i], states[8 * kept[i]])
    assert torch.equal(pool[[0, 4]], before[[0, 4]])
