# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Every model of the installed Transformers that has an indexer: its attention gives the same
through our op as by its own code, or is refused by name."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest
import torch
from custom.dispatch import versions
from torch import Tensor, nn

import custom
from custom.integrations.paged import PagedCaches, token_positions

from ..support import quantization

transformers = pytest.importorskip("transformers", minversion="5.17")

from custom.integrations import dsa  # noqa: E402

from ..support.models import ROUTED, YARN  # noqa: E402

MODELS = Path(transformers.__file__).parent / "models"
H, RQ, N, DN, DV, R, DR, NI, DI, TOPK = 64, 48, 4, 16, 24, 32, 16, 16, 32, 12
SMALL = dict(
    vocab_size=128,
    hidden_size=H,
    intermediate_size=96,
    moe_intermediate_size=32,
    num_hidden_layers=3,
    num_attention_heads=N,
    num_key_value_heads=N,
    q_lora_rank=RQ,
    kv_lora_rank=R,
    qk_nope_head_dim=DN,
    qk_rope_head_dim=DR,
    v_head_dim=DV,
    index_n_heads=NI,
    index_head_dim=DI,
    index_topk=TOPK,
    attn_implementation="eager",
    **ROUTED,
)
SUPPORTED = {
    "DeepseekV32Attention": "DeepseekV32Config",
    "GlmMoeDsaAttention": "GlmMoeDsaConfig",
}
# the configuration, and a layer of it that has an indexer
REFUSED = {
    "AXK2Attention": ("AXK2Config", {}, 0),
    "DeepseekV4CSACompressor": ("DeepseekV4Config", {}, None),
    "Dots3NoteTextAttention": ("Dots3NoteTextConfig", {}, 0),
    "Glm5NextTextAttention": ("Glm5NextTextConfig", {}, 3),
    "HYV4Attention": ("HYV4Config", {}, 0),
    "HYV4VLAttention": ("HYV4VLTextConfig", {}, 0),
    "MiniMaxM3VLAttention": (
        "MiniMaxM3VLTextConfig",
        dict(num_hidden_layers=1, layer_types=["minimax_m3_sparse"]),
        0,
    ),
    "MistralLarge4TextAttention": ("MistralLarge4TextConfig", {}, 1),
    "Qwen4ExpTextAttention": (
        "Qwen4ExpTextConfig",
        dict(
            indexer_n_heads=4,
            indexer_kv_heads=1,
            indexer_head_dim=256,
            indexer_budget=64,
            indexer_compress_ratio=4,
        ),
        3,
    ),
}

# Transformers 5.17 has none of them
LATER = {"Dots3NoteTextAttention", "HYV4VLAttention", "MistralLarge4TextAttention"}
NEWEST = (5, 24)  # that was tried


def with_an_indexer() -> dict[str, str]:
    """Class to module, of all classes that make themselves an `...Indexer`; nothing is imported."""
    found = {}
    for path in sorted(MODELS.glob("*/modeling_*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and any(
                isinstance(call, ast.Call)
                and isinstance(call.func, ast.Name)
                and call.func.id.endswith("Indexer")
                for call in ast.walk(node)
            ):
                found[node.name] = f"transformers.models.{path.parent.name}.{path.stem}"
    return found


FOUND = with_an_indexer()


def test_every_model_with_an_indexer_is_supported_or_refused():
    missing = {*SUPPORTED, *REFUSED} - set(FOUND)
    assert set(FOUND) <= {*SUPPORTED, *REFUSED}
    assert missing <= (LATER if versions.release(transformers.__version__) < NEWEST else set())
    assert {each.__name__ for each in dsa.CONVENTIONS} == set(SUPPORTED)
    assert set(dsa.REFUSED) == set(REFUSED)


def test_the_page_of_models_names_them_all():
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    assert [name for name in FOUND if f"`{name}`" not in page] == []


@pytest.mark.parametrize("name", [name for name in REFUSED if name in FOUND])
def test_refusals_give_the_reason(name):
    config, settings, layer = REFUSED[name]
    module = importlib.import_module(FOUND[name])
    with torch.device("meta"):
        arguments = () if layer is None else (layer,)
        attention = getattr(module, name)(getattr(module, config)(**settings), *arguments)
    assert any("Indexer" in type(each).__name__ for each in attention.modules())
    with pytest.raises(custom.NotSupported, match=f"{name}: .*{dsa.REFUSED[name]}") as info:
        dsa.sparse_attention_weights(attention)
    assert "\n" not in str(info.value) and str(info.value).endswith(".")


def attention_of(name: str, layer: int = 0, **changes) -> tuple[nn.Module, nn.Module]:
    """The attention with random weights, norms and biases included, and its rotary embedding."""
    module = importlib.import_module(FOUND[name])
    config = getattr(module, SUPPORTED[name])(**{**SMALL, **changes})
    torch.manual_seed(0)
    attention = getattr(module, name)(config, layer).eval()
    for parameter in attention.parameters():
        nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    rotary = getattr(module, name.replace("Attention", "RotaryEmbedding"))(config)
    return attention, rotary


@torch.inference_mode()
def by_its_own_code(attention, rotary, x):
    length = x.shape[1]
    mask = torch.full((length, length), torch.finfo(x.dtype).min).triu(1)
    position_embeddings = rotary(x, torch.arange(length)[None])
    return attention(x, position_embeddings, mask.expand(len(x), 1, -1, -1))[0]


@torch.inference_mode()
def by_our_op(attention, rotary, x, steps, weight_format="nz"):
    """The same texts, `steps` tokens at a time."""
    w = dsa.sparse_attention_weights(attention, weight_format)
    requests, length, _ = x.shape
    caches = PagedCaches(1, (R, DR, DI), requests=requests, capacity=length, page_size=16)
    pools, out, end = caches.layers[0], [], 0
    for tokens in steps:
        begin, end = end, end + tokens
        lengths = torch.full((requests,), end, dtype=torch.int32)
        positions = token_positions(lengths, tokens)
        cos, sin = rotary(x, positions)
        latent = custom.npu_sparse_attention_pto(
            x=x[:, begin:end].contiguous(),
            sin=sin,
            cos=cos,
            cache_index=caches.slots(positions),
            kv_cache=pools.kv,
            kr_cache=pools.kr,
            index_k_cache=pools.index_k,
            block_table=caches.block_table,
            act_seqs=lengths,
            **w.arguments,
        )
        out.append(attention.o_proj(w.values(latent)))
    return torch.cat(out, 1)


@pytest.mark.parametrize("rope", [None, YARN], ids=["plain rope", "yarn"])
@pytest.mark.parametrize("name", SUPPORTED)
def test_prefill_and_decode_equal_the_unmodified_attention(name, rope):
    """Twelve of up to forty keys are selected: one wrong index and the outputs differ."""
    attention, rotary = attention_of(name, rope_parameters=rope)
    x = torch.randn(2, 40, H)
    expected = by_its_own_code(attention, rotary, x)
    for steps in ([40], [30] + [1] * 10, [17, 3, 1, 19]):
        got = by_our_op(attention, rotary, x, steps)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", SUPPORTED)
def test_the_pairing_of_the_indexer_is_told_apart(name, monkeypatch):
    """What the test above would miss if the selection did not depend on it."""
    attention, rotary = attention_of(name)
    x = torch.randn(2, 40, H)
    right = dsa.CONVENTIONS[type(attention)]
    wrong = right | dict(index_rope_interleaved=not right["index_rope_interleaved"])
    monkeypatch.setitem(dsa.CONVENTIONS, type(attention), wrong)
    expected = by_its_own_code(attention, rotary, x)
    assert (by_our_op(attention, rotary, x, [40]) - expected).abs().max() > 0.01


@pytest.mark.parametrize("name", SUPPORTED)
def test_every_epsilon_is_the_module_s(name):
    attention, rotary = attention_of(name)
    for norm in (attention.q_a_layernorm, attention.kv_a_layernorm):
        assert norm.variance_epsilon == 1e-6  # whatever config.rms_norm_eps says
        norm.variance_epsilon = 0.5
    attention.indexer.k_norm.eps = 0.25
    options = dsa.sparse_attention_weights(attention).options
    assert (options["rms_norm_eps"], options["layer_norm_eps"]) == (0.5, 0.25)
    x = torch.randn(2, 40, H)
    expected = by_its_own_code(attention, rotary, x)
    got = by_our_op(attention, rotary, x, [40])
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    attention.q_a_layernorm.variance_epsilon = 0.75
    with pytest.raises(custom.NotSupported, match=r"q_a_layernorm has 0\.75, kv_a_layernorm 0\.5"):
        dsa.sparse_attention_weights(attention)


PROJECTIONS = {
    "q_a_proj": "dq",
    "kv_a_proj_with_mqa": "dkv_kr",
    "q_b_proj": "uq_qr",
    "indexer.wk": "idx_k",
    "indexer.wq_b": "idx_qb",
}


def checkpoint_of(attention, kind: str, names=tuple(PROJECTIONS)) -> dict[str, Tensor]:
    """The tensors of a checkpoint whose projections are of 8 bits."""
    out = {}
    for name in names:
        values, scale = quantization.weight(attention.get_submodule(name).weight.double().t(), kind)
        out[f"{name}.weight"] = values.t().contiguous()
        leaf = "weight_scale_inv" if kind == "fp8" else "weight_scale"
        out[f"{name}.{leaf}"] = scale.t().contiguous()
    return out


@torch.no_grad()
@pytest.mark.parametrize("weight_format", ["nz", "linear"])
@pytest.mark.parametrize("kind, mode", [("fp8", 4), ("int8", 2)])
def test_quantized_projections_are_read_as_they_are(kind, mode, weight_format):
    attention, _ = attention_of("DeepseekV32Attention")
    tensors = checkpoint_of(attention, kind, (*PROJECTIONS, "kv_b_proj"))
    if kind == "int8":  # msmodelslim has offsets beside, compressed-tensors flat scales
        tensors["q_a_proj.weight_offset"] = torch.zeros_like(tensors["q_a_proj.weight_scale"])
        tensors["q_b_proj.weight_scale"] = tensors["q_b_proj.weight_scale"].flatten()
    up = quantization.weight(attention.kv_b_proj.weight.double().t(), kind)
    dsa.load_as_it_is(attention, tensors)
    w = dsa.sparse_attention_weights(attention, weight_format)
    assert w.options["weight_quant_mode"] == w.options["index_weight_quant_mode"] == mode
    for name, field in PROJECTIONS.items():
        given, got = tensors[f"{name}.weight"], getattr(w, field)
        if weight_format == "linear":
            assert got.data_ptr() == given.data_ptr() and got.shape == given.shape
        else:
            rows = custom.from_nz(got, given.t().shape) if got.ndim == 4 else got
            assert torch.equal(rows.view(torch.uint8), given.t().contiguous().view(torch.uint8))
        scale = w.options[f"dequant_scale_w_{field}"]
        leaf = "weight_scale_inv" if kind == "fp8" else "weight_scale"
        whole = tensors[f"{name}.{leaf}"]
        assert torch.equal(scale, whole.view(-1, 1).t() if kind == "int8" else whole.t())
    assert w.uk.dtype is w.idx_proj.dtype is torch.float32
    heads = quantization.dequantized(*up).t().view(attention.num_heads, -1, w.uk.shape[-1])
    torch.testing.assert_close(w.uk.double(), heads[:, : w.uk.shape[1]], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", ["DeepseekV32Attention", "GlmMoeDsaAttention"])
def test_no_weight_is_copied(name):
    """But the half of the key-value up-projection that is absorbed."""
    attention, _ = attention_of(name)
    w = dsa.sparse_attention_weights(attention)
    assert w.options["weight_format"] == "linear"
    up = attention.kv_b_proj.weight
    for linear, field in (PROJECTIONS | {"indexer.weights_proj": "idx_proj"}).items():
        own = attention.get_submodule(linear).weight
        assert getattr(w, field).data_ptr() == own.data_ptr(), field
        assert getattr(w, field).shape == own.shape
    assert w.uv.untyped_storage().data_ptr() == up.untyped_storage().data_ptr()
    assert w.uk.data_ptr() != up.data_ptr() and w.uk.is_contiguous()
    shared = dsa.shared_attention_weights(attention)
    assert shared.dq.data_ptr() == attention.q_a_proj.weight.data_ptr()


@torch.no_grad()
def test_quantized_projections_that_are_refused():
    tensors = checkpoint_of(attention_of("DeepseekV32Attention")[0], "int8")
    scale = tensors["q_a_proj.weight_scale"]
    for change, message in (
        ({"q_a_proj.input_scale": torch.ones(1)}, "q_a_proj.input_scale` is given, expected none"),
        ({"q_a_proj.weight_offset": torch.ones_like(scale)}, "q_a_proj.weight_offset` .* symmetr"),
        (
            {"q_a_proj.weight_scale": scale[:-1]},
            rf"q_a_proj.weight_scale` has shape \[{len(scale) - 1}, 1\], expected "
            rf"\[{len(scale)}, 1\] .* of int8. Take .* each row",
        ),
    ):
        attention, _ = attention_of("DeepseekV32Attention")
        dsa.load_as_it_is(attention, tensors | change)
        with pytest.raises(
            custom.NotSupported, match=f"^custom.integrations: `DeepseekV32Attention.{message}"
        ):
            dsa.sparse_attention_weights(attention)
    attention, _ = attention_of("DeepseekV32Attention")
    dsa.load_as_it_is(attention, checkpoint_of(attention, "int8", ["kv_a_proj_with_mqa"]))
    with pytest.raises(
        custom.NotSupported, match=r"kv_a_proj_with_mqa torch\.int8, .* expected one kind, or int8"
    ):
        dsa.sparse_attention_weights(attention)
    attention, _ = attention_of("DeepseekV32Attention")
    dsa.load_as_it_is(attention, checkpoint_of(attention, "int8", ["q_b_proj"]))
    assert dsa.sparse_attention_weights(attention).options["weight_quant_mode"] == 1


def test_a_layer_without_an_indexer_says_what_to_use():
    attention, _ = attention_of("GlmMoeDsaAttention", 2, indexer_types=["full", "full", "shared"])
    with pytest.raises(
        custom.NotSupported, match=r"layer 2 .* layer 1\..*shared_attention_weights"
    ):
        dsa.sparse_attention_weights(attention)
    w = dsa.shared_attention_weights(attention)
    assert not hasattr(w, "idx_qb") and "sparse_count" not in w.options


def test_only_layers_with_an_indexer_keep_index_keys():
    config = transformers.GlmMoeDsaConfig(**SMALL, indexer_types=["full", "shared", "full"])
    widths = dsa.layer_widths(config)
    assert [index for _, _, index in widths] == [DI, 0, DI]
    caches = PagedCaches(3, widths, requests=1, capacity=16, page_size=16)
    assert [each.index_k.numel() > 0 for each in caches.layers] == [True, False, True]
    deepseek = transformers.DeepseekV32Config(**SMALL)
    assert dsa.layer_widths(deepseek) == [dsa.cache_widths(deepseek)] * 3
    with pytest.raises(ValueError, match="`widths` has 3 entries, expected 2"):
        PagedCaches(2, widths, requests=1, capacity=16)
