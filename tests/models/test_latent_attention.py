# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Dense attention over latents inside `use()`, Kimi-Linear's and Ling-3.0's, and without a query
latent op by op, DeepSeek-V2-Lite's: tokens and numbers of Transformers' own code."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from custom.dispatch import log

import custom
from custom.integrations.drafts import verification

transformers = pytest.importorskip("transformers", minversion="5.17")

from custom.integrations import dsa, latent  # noqa: E402
from custom.integrations.transformers import use  # noqa: E402

from ..support.models import (  # noqa: E402
    NEW,
    bailing_hybrid,
    greedy,
    in_parts,
    kimi_linear,
    made,
    ragged,
)

CLOSE = dict(rtol=1e-5, atol=1e-5)
OPS = ("npu_mla_prolog_pto", "npu_fused_infer_attention_score_v2")
MODELS = {
    "kimi_linear": kimi_linear,
    "kimi_linear, a query latent": lambda: kimi_linear(q_lora_rank=48),
    "kimi_linear, two layers of it": lambda: kimi_linear(
        layer_types=["linear_attention", "full_attention"] * 2
    ),
}
if hasattr(transformers, "BailingHybridConfig"):  # since 5.24
    MODELS |= {
        "bailing_hybrid": lambda: bailing_hybrid(q_lora_rank=None),
        "bailing_hybrid, a query latent": lambda: bailing_hybrid(q_lora_rank=48),
    }
every_model = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)


def calls():
    return [log.calls[op, "reference"] for op in OPS]


def ran(before):
    return [now - then for now, then in zip(calls(), before, strict=True)]


def dense(model):
    """How many layers see every token."""
    return sum(kind == "full_attention" for kind in model.config.layer_types)


@pytest.mark.parametrize("lengths", [(30, 21, 5), (30,)], ids=str)
@every_model
def test_generates_the_same_tokens(make, lengths):
    model, inputs = make(), ragged(lengths)
    expected, before = greedy(model, inputs), calls()
    with use(page_size=16):
        assert torch.equal(greedy(model, inputs), expected)
    assert ran(before) == [dense(model) * NEW] * 2
    assert torch.equal(greedy(model, inputs), expected)


@pytest.mark.parametrize("weight_format", ["linear", "nz"])
@pytest.mark.parametrize("parts", [(17, 13, 1, 1, 8), (40,), (1, 39)], ids=str)
@every_model
def test_a_prompt_in_parts(make, parts, weight_format):
    model, ids = make(), torch.randint(1, 128, (2, 40))
    with torch.inference_mode():
        expected = model(ids, use_cache=False).logits
        with use(weight_format=weight_format):
            got, alone = in_parts(model, ids, parts)
    torch.testing.assert_close(got, expected, **CLOSE)
    torch.testing.assert_close(alone, expected, **CLOSE)


@torch.inference_mode()
@every_model
def test_drafts_that_were_refused_leave_nothing(make):
    model, ids = make(), torch.randint(1, 128, (2, 32))
    expected = model(ids, use_cache=False).logits
    with use():
        cache = model(ids[:, :18], use_cache=True).past_key_values
        with verification(cache) as step:
            model(torch.cat([ids[:, 18:20], ids[:, :3]], 1), past_key_values=cache)
            step.keep(2)
        rest = model(ids[:, 20:], past_key_values=cache).logits
    torch.testing.assert_close(rest, expected[:, 20:], **CLOSE)


@torch.inference_mode()
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@every_model
def test_padding_on_the_right(make, attention):
    model, ids = make(), torch.randint(1, 128, (2, 20))
    model.set_attn_implementation(attention)
    mask = torch.ones_like(ids)
    mask[0, 13:] = 0
    expected = model(ids[:1, :13], use_cache=False).logits
    with use():
        got = model(ids, attention_mask=mask, use_cache=False).logits
    torch.testing.assert_close(got[:1, :13], expected, **CLOSE)


def test_documents_in_a_row():
    model, ids = kimi_linear(), torch.randint(1, 128, (1, 20))
    position_ids = torch.cat([torch.arange(13), torch.arange(7)])[None]
    with torch.inference_mode(), use():
        before = calls()
        got = model(ids, position_ids=position_ids, use_cache=False).logits
        assert ran(before) == [1, 1]
        expected = [model(part, use_cache=False).logits for part in ids.split([13, 7], 1)]
    torch.testing.assert_close(got, torch.cat(expected, 1), **CLOSE)


def test_other_passes_run_the_model_s_own_code():
    """With gradients, with a cache that has tokens or is static."""
    model, ids = kimi_linear(), torch.randint(1, 128, (2, 20))
    before = calls()
    expected = model(ids, use_cache=False).logits
    with use():
        torch.testing.assert_close(model(ids, use_cache=False).logits, expected, **CLOSE)
    with torch.inference_mode():
        cache = model(ids[:, :12], use_cache=True).past_key_values
        static = transformers.StaticCache(model.config, max_cache_len=32)
        with use():
            rest = model(ids[:, 12:], past_key_values=cache).logits
            whole = model(ids, past_key_values=static).logits
    torch.testing.assert_close(rest, expected[:, 12:], **CLOSE)
    torch.testing.assert_close(whole, expected, **CLOSE)
    assert ran(before) == [0, 0]


def test_what_is_refused():
    model, inputs = kimi_linear(), ragged()
    ids = inputs["input_ids"]
    with use():
        with torch.no_grad():
            cache = model(ids, use_cache=True).past_key_values
        with pytest.raises(RuntimeError, match=r"npu_mla_prolog_pto: .* requires grad"):
            model(ids[:, :2], past_key_values=cache)
    with pytest.raises(custom.NotSupported, match=r"is read inside use\(\) alone"):
        model(ids[:, :1], past_key_values=cache)
    with use(), pytest.raises(custom.NotSupported, match="beam search"):
        greedy(model, inputs, num_beams=2)
    layer = model.model.layers[3].self_attn
    layer.q_proj.weight = torch.nn.Parameter(
        torch.ones(128, 64, dtype=torch.int8), requires_grad=False
    )
    layer.q_proj.weight_scale = torch.ones(128, 1)
    with use(), pytest.raises(custom.NotSupported, match="16 or 32 bits; these are of 8"):
        greedy(model, inputs)


@pytest.mark.parametrize("kind, size, ours", [
    ("cpu", 8, True), ("cuda", 2, True), ("cuda", 4, False), ("npu", 2, True), ("npu", 4, False),
    ("xpu", 2, False),
])  # fmt: skip
def test_where_the_ops_have_kernels(kind, size, ours):
    x = SimpleNamespace(device=SimpleNamespace(type=kind), element_size=lambda: size)
    module = SimpleNamespace(kv_a_proj_with_mqa=SimpleNamespace(bias=None))
    with torch.no_grad():
        assert latent._is_ours(module, x, None) == ours


@torch.inference_mode()
@every_model
def test_half_precision(make):
    """As near to float32 as the model's own code is."""
    model, ids = make().bfloat16(), torch.randint(1, 128, (2, 20))
    theirs = model(ids, use_cache=False).logits
    exact = model.float()(ids, use_cache=False).logits
    model.bfloat16()
    with use():
        cache = model(ids[:, :15], use_cache=True).past_key_values
        got = model(ids[:, 15:], past_key_values=cache).logits
    error = (got - exact[:, 15:]).abs().max()
    assert error < 2 * (theirs[:, 15:] - exact[:, 15:]).abs().max()


@torch.inference_mode()
@pytest.mark.parametrize("ranks", [None, 48])
@pytest.mark.parametrize("weight_format", ["linear", "nz"])
def test_deepseek_v2_op_by_op(ranks, weight_format):
    """Of DeepSeek-V2-Lite, and of its larger sister, which has a query latent."""
    model = made(
        "DeepseekV2ForCausalLM",
        "DeepseekV2Config",
        vocab_size=128,
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=ranks,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=24,
        first_k_dense_replace=1,
    )
    module, x = model.model.layers[0].self_attn, torch.randn(2, 20, 64)
    angles = model.model.rotary_emb(x, torch.arange(20)[None])
    hidden = torch.full((20, 20), -torch.inf).triu(1)[None, None]
    expected = module(x, attention_mask=hidden, position_embeddings=angles)[0]
    w = dsa.shared_of(module, dict(rope_interleaved=True), weight_format)
    cos, sin = (
        torch.cat([each, each], -1).expand(2, -1, -1).contiguous()
        for each in (angles.real.float(), angles.imag.float())
    )
    kv, kr = torch.zeros(4, 16, 1, 32), torch.zeros(4, 16, 1, 16)
    slots = torch.arange(20) + torch.tensor([[0], [32]])
    query, query_rope, _ = custom.npu_mla_prolog_pto(
        *(x, w.dq, w.uq_qr, w.uk, w.dkv_kr, w.gamma_cq, w.gamma_ckv, sin, cos, kv, kr, slots),
        rmsnorm_epsilon_cq=w.options["rms_norm_eps"],
        rmsnorm_epsilon_ckv=w.options["rms_norm_eps"],
        weight_format=w.options["weight_format"],
    )
    latent, _ = custom.npu_fused_infer_attention_score_v2(
        query,
        kv,
        kv,
        query_rope=query_rope,
        key_rope=kr,
        actual_seq_kvlen=[20, 20],
        block_table=torch.tensor([[0, 1], [2, 3]]),
        num_query_heads=4,
        num_key_value_heads=1,
        softmax_scale=w.options["softmax_scale"],
        input_layout="BSND",
        sparse_mode=3,
    )
    torch.testing.assert_close(module.o_proj(w.values(latent)), expected, **CLOSE)
