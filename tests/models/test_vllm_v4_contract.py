# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""DeepSeek-V4's attention in vLLM, on what vLLM's wheels say of the classes that it touches
(tests/models/test_vllm_contract.py), against Transformers' layer."""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from custom.dispatch import log
from custom.dispatch.errors import NotSupported
from torch import Tensor, nn

from ..support.deepseek_v4 import Attention
from ..support.typed import STUBS
from .test_vllm_contract import PLUGIN, VERSIONS, Norm, arguments, configuration

BLOCK, ROWS, WINDOW, REQUESTS = 32, 16, 8, 3
RATIOS = (0, 4, 8)  # of the layers of tests/support/deepseek_v4.py


class Weight(nn.Module):
    """A rank's part of a linear layer of vLLM."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full([rows, columns], torch.nan), requires_grad=False)
        self.reduce_results = True


@pytest.fixture(scope="module")
def v4():
    """Ours, on vLLM's stubs, with layers of `v4.ranks` ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(STUBS / f"vllm-{VERSIONS[-1]}"))
        graphs = importlib.import_module("vllm.compilation.breakable_cudagraph")
        graphs.eager_break_during_capture = lambda function: function
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
    for name in [each for each in sys.modules if each.split(".")[0] == "vllm"]:
        del sys.modules[name]
    del sys.modules["custom.integrations.vllm.deepseek_v4"]
    sys.modules.pop("custom.integrations.vllm.mla", None)


def engine(hf: Any, **changed: Any) -> Any:
    """vLLM's configuration of the model."""
    config = configuration(**changed)
    config.cache_config = SimpleNamespace(
        cache_dtype=changed.pop("stored", "auto"), block_size=BLOCK
    )
    config.quant_config = changed.pop("quant_config", None)
    config.model_config = SimpleNamespace(dtype=torch.float32, hf_config=hf)
    config.compilation_config = SimpleNamespace(static_forward_context={})
    return config


def built(v4: Any, theirs: Attention, rank: int = 0, ranks: int = 1) -> Any:
    """The layer with a rank's part of Transformers' weights, and caches of one pool: a page is of
    any of them, and holds anything at first."""
    a, c, v4.ranks = theirs.module, theirs.config, ranks
    place = torch.arange(64, dtype=torch.float64)[None]
    kind = "compress" if a.compressor is not None else "main"
    cos, sin = theirs.angles(place)[kind]
    table = torch.cat([cos[0], sin[0]], -1).float()
    v4.build_deepseek_v4_rope = lambda *_, **__: SimpleNamespace(cos_sin_cache=table)
    config = engine(c)
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
    builder = v4.Builder(None, [], SimpleNamespace(speculative_config=None), None)
    return {
        name: builder.build(0, SimpleNamespace(**given, block_table_tensor=table[there]))
        for name, table in pages.tables.items()
    }


# tokens of the three requests in each step: prompts in parts, decodes beside them, decodes alone
STEPS = [(17, 9, 0), (1, 9, 13), (1, 1, 13), (1, 1, 1), (1, 1, 1), (1, 1, 1), (11, 1, 1)]
CALLS = [2, 3, 2, 1, 1, 1, 2]


@pytest.mark.parametrize("layer", range(3))
@pytest.mark.parametrize("ranks", [1, 2])
def test_requests_that_join_get_what_transformers_makes_of_each(layer, ranks, v4):
    """Of all ranks together; neighbours with as many tokens are one call."""
    torch.manual_seed(layer)
    theirs = Attention(layer)
    made = [built(v4, theirs, rank, ranks) for rank in range(ranks)]
    totals = [sum(each) for each in zip(*STEPS, strict=True)]
    texts = [torch.randn(n, theirs.config.hidden_size, dtype=torch.float64) for n in totals]
    wanted = [theirs.whole(text) for text in texts]
    pages, lengths = Pages(made[0][1]), [0] * REQUESTS
    for counts, calls in zip(STEPS, CALLS, strict=True):
        spans = [slice(n, n + count) for n, count in zip(lengths, counts, strict=True)]
        for request, span in enumerate(spans):
            pages.of(request, span.start, span.stop)
        lengths = [span.stop for span in spans]
        metadata = batches(v4, pages, list(counts), lengths)
        v4.get_forward_context = lambda metadata=metadata: SimpleNamespace(attn_metadata=metadata)
        x = torch.cat([text[span] for text, span in zip(texts, spans, strict=True)]).float()
        positions = torch.cat([torch.arange(span.start, span.stop) for span in spans])
        found = torch.zeros_like(x)
        for each, _ in made:
            # two tokens behind the batch's, of no request
            out = x.new_full((len(x) + 2, x.shape[1]), 7.0)
            padded = torch.cat([x, x.new_full((2, x.shape[1]), torch.nan)])
            log.calls.clear()
            each.attend(metadata[each.layer_name], positions, padded, out)
            assert [*log.calls.values()] == [calls]
            assert (out[len(x) :] == 7).all()
            found += out[: len(x)]
        right = torch.cat([want[span] for want, span in zip(wanted, spans, strict=True)])
        torch.testing.assert_close(found.double(), right, rtol=1e-3, atol=1e-3)


def test_a_graph_is_one_call_with_its_padding(v4):
    """Requests of no tokens stand behind those that have one, and are rows of the call."""
    counts = dict(num_reqs=4, num_actual_tokens=4, max_query_len=1)
    starts = torch.tensor([0, 1, 2, 3, 3])
    names = ("query_start_loc", "seq_lens", "block_table_tensor", "slot_mapping")
    given = {name: torch.empty(5, device="meta") for name in names}
    builder = v4.Builder(None, [], SimpleNamespace(speculative_config=None), None)
    batch = builder.build(0, SimpleNamespace(query_start_loc_cpu=starts, **given, **counts))
    assert batch.calls == [(slice(0, 4), slice(0, 4))]


def test_weights_are_read_where_vllm_keeps_them(v4):
    """And those that are copied, norms of a half precision model, stay where they are."""
    layer, _ = built(v4, Attention(1))
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


@pytest.mark.parametrize("itself", [False, True])
def test_ranks_are_summed_once(itself, v4):
    """By the layer, unless vLLM's model does so of tokens that ranks share."""
    layer, _ = built(v4, Attention(0))
    layer.wo_b.reduce_results = not itself
    v4.get_forward_context = lambda: None
    runs = torch.ops.custom_vllm.latent_attention
    calls = importlib.import_module("custom.integrations.vllm.mla")
    context = SimpleNamespace(attn_metadata=None, no_compile_layers={layer.layer_name: layer})
    calls.get_forward_context = lambda: context
    layer.attend = lambda batch, positions, x, out: out.add_(x)
    x = torch.randn(3, 40)
    assert runs is not None
    assert torch.equal(layer(torch.arange(3), x), x if itself else 2 * x)


@pytest.mark.parametrize(
    ("changed", "mode"),
    [
        (dict(data_parallel_size=2), "data parallelism"),
        (dict(speculative_config=SimpleNamespace(method="mtp")), "drafts"),
        (dict(quant_config=object()), "quantised weights"),
        (dict(stored="fp8"), "caches of another dtype than the model"),
    ],
)
def test_it_is_refused_where_it_was_not_tried(changed, mode, v4):
    with pytest.raises(NotSupported, match=f"serves attention to compressed keys without {mode}"):
        v4.CompressedAttention(engine(None, **changed), "layers.0.attn")


@pytest.mark.parametrize("version", VERSIONS)
def test_our_layer_takes_their_arguments(version):
    stub = STUBS / f"vllm-{version}" / "vllm" / "models" / "deepseek_v4" / "attention.py"
    theirs = arguments(stub, "DeepseekV4Attention")
    ours = arguments(PLUGIN / "deepseek_v4.py", "CompressedAttention")
    assert [each.arg for each in ours.args] == [each.arg for each in theirs.args]


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
    """DeepSeek's own, as vLLM 0.32 reads it, and Transformers'."""
    assert v4.ratio_of(Attention(layer).config, layer) == RATIOS[layer]
    assert v4.ratio_of(SimpleNamespace(compress_ratios=list(RATIOS)), layer) == RATIOS[layer]
