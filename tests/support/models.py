# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Hugging Face's models with few random weights, and greedy tokens of them."""

from __future__ import annotations

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.17")


from custom.bench.models import SMALL_DSA, SMALL_LINEAR  # noqa: E402

from . import v4_layers  # noqa: E402

NEW = 12
NO_TOKENS = dict(bos_token_id=None, eos_token_id=None, pad_token_id=None)
YARN = dict(
    rope_type="yarn",
    rope_theta=10000.0,
    factor=40.0,
    original_max_position_embeddings=4096,
    mscale=1.0,
    mscale_all_dim=1.0,
)
ROUTED = dict(n_routed_experts=4, num_experts_per_tok=4, n_group=1, topk_group=1, **NO_TOKENS)
DSA = SMALL_DSA | dict(
    moe_intermediate_size=32,
    num_hidden_layers=3,
    first_k_dense_replace=1,
    index_topk=12,
    **ROUTED,
)
SHARING = dict(num_hidden_layers=5, indexer_types=["full", "shared", "shared", "full", "shared"])
LINEAR = SMALL_LINEAR | dict(num_hidden_layers=4, **NO_TOKENS)
EXPERTS = dict(
    moe_intermediate_size=32,
    shared_expert_intermediate_size=32,
    num_experts=4,
    num_experts_per_tok=4,
)


def made(name, config, **settings):
    """A model of few random weights; its norms are random too, as they are after training."""
    torch.manual_seed(0)
    model = getattr(transformers, name)(getattr(transformers, config)(**settings)).eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, 1.0, 0.2)
    return model


def in_parts(model, ids, parts):
    """Logits of texts that come in parts, behind a cache, and of all of them at once."""
    cache = transformers.DynamicCache(config=model.config.get_text_config())
    got = [model(part, past_key_values=cache).logits for part in ids.split(parts, 1)]
    return torch.cat(got, 1), model(ids, use_cache=False).logits


def padded_on_the_right(model):
    """Two texts, their mask, which ends the first one early, and the logits of its tokens."""
    ids = torch.randint(1, 128, (2, 20))
    mask = torch.ones_like(ids)
    mask[0, 13:] = 0
    return ids, mask, model(ids[:1, :13], use_cache=False).logits


def assert_no_worse_in_half_precision(model, exact, used):
    """A prompt and what follows it inside `used`: at most twice as far from the model `exact` as
    `model` by itself."""
    ids = torch.randint(1, 128, (2, 20))
    wanted = exact(ids, use_cache=False).logits[:, 15:]
    with used:
        cache = model(ids[:, :15], use_cache=True).past_key_values
        got = model(ids[:, 15:], past_key_values=cache).logits
    theirs = model(ids, use_cache=False).logits[:, 15:]
    assert (got - wanted).abs().max() < 2 * (theirs - wanted).abs().max()


def deepseek(**changes):
    return made("DeepseekV32ForCausalLM", "DeepseekV32Config", **DSA | changes)


def glm(**changes):
    return made("GlmMoeDsaForCausalLM", "GlmMoeDsaConfig", **DSA | changes)


V4 = dict(
    v4_layers.LAYERS,
    vocab_size=128,
    hidden_size=64,
    head_dim=32,
    q_lora_rank=48,
    sliding_window=8,
    index_n_heads=16,
    index_topk=3,
    n_routed_experts=4,
    num_experts_per_tok=4,
    max_position_embeddings=512,
    rope_parameters=dict(rope_type="yarn", factor=16.0, original_max_position_embeddings=32),
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
)


def deepseek_v4(**changes):
    """Its streams mix, its gates and sinks count, and its experts are those of each token."""
    model = made("DeepseekV4ForCausalLM", "DeepseekV4Config", **V4 | changes)
    for name, parameter in model.named_parameters():
        if "hc" in name or "position_bias" in name or "sinks" in name:
            torch.nn.init.normal_(parameter, 0.0, 0.1 if name.endswith("fn") else 0.5)
        elif parameter.ndim > 1:
            torch.nn.init.normal_(parameter, 0.0, parameter.shape[-1] ** -0.5)
    for name, buffer in model.named_buffers():
        if name.endswith("tid2eid"):
            buffer.random_(0, model.config.n_routed_experts)
    return model


def qwen3_next(**changes):
    return made("Qwen3NextForCausalLM", "Qwen3NextConfig", **LINEAR, **EXPERTS, **changes)


def qwen3_5():
    return made("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", **LINEAR)


def qwen3_5_moe():
    return made("Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig", **LINEAR, **EXPERTS)


def olmo_hybrid():
    """Its rates reach 2, and its values are wider than its keys."""
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    return made("OlmoHybridForCausalLM", "OlmoHybridConfig", **LINEAR, layer_types=kinds)


# a few layers of Kimi delta attention and of latent attention
KDA = dict(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=96,
    moe_intermediate_size=32,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=4,
    kv_lora_rank=32,
    v_head_dim=24,
    linear_num_heads=4,
    linear_head_dim=16,
)


def kimi_linear(**changes):
    """Three layers of KDA, which forget slowly, and one of latent attention."""
    kinds = changes.pop("layer_types", ["linear_attention"] * 3 + ["full_attention"])
    model = made(
        "KimiLinearForCausalLM",
        "KimiLinearConfig",
        **KDA,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        layer_types=kinds,
        num_local_experts=4,
        num_experts_per_tok=4,
        n_group=1,
        topk_group=1,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        **changes,
    )
    for layer in linear_layers(model):
        torch.nn.init.normal_(layer.forget_gate.A_log, -3.0, 0.5)
    return model


def glm5_next(**changes):
    """Three layers of KDA whose decay is bounded, and one of pools of keys."""
    text = dict(
        **KDA,
        q_lora_rank=48,
        qk_nope_head_dim=24,
        index_n_heads=8,
        index_head_dim=32,
        index_topk=16,
        index_kpool=4,
        layer_types=["linear_attention"] * 3 + ["deepseek_sparse_attention"],
        mlp_layer_types=["dense"] * 4,
        **ROUTED,
    )
    text |= changes
    vision = dict(depth=1, hidden_size=32, intermediate_size=32, num_heads=2, out_hidden_size=64)
    return made(
        "Glm5NextForConditionalGeneration",
        "Glm5NextConfig",
        text_config=text,
        vision_config=vision,
        **dict.fromkeys(("image_token_id", "video_token_id"), 0),
    )


def _wide(model):
    """Its attention is far from even: what is chosen counts."""
    for name, parameter in model.named_parameters():
        if "self_attn" in name and parameter.ndim > 1:
            torch.nn.init.normal_(parameter, 0.0, parameter.shape[-1] ** -0.5)
    return model


def minimax_m3(**changes):
    """A layer that sees everything, and two that choose blocks, each head of keys its own."""
    settings = dict(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=32,
        dense_intermediate_size=96,
        shared_intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=24,
        rotary_dim=8,
        rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=1 / 3),
        layer_types=["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
        mlp_layer_types=["dense", "sparse", "dense"],
        num_local_experts=4,
        num_experts_per_tok=2,
        index_n_heads=2,
        index_head_dim=16,
        index_block_size=4,
        index_topk_blocks=3,
        **NO_TOKENS,
    )
    return _wide(made("MiniMaxM3VLForCausalLM", "MiniMaxM3VLTextConfig", **settings | changes))


def qwen4_exp(**changes):
    """Three linear layers, and one that chooses pools of tokens."""
    settings = (
        LINEAR
        | EXPERTS
        | dict(
            head_dim=24,
            rope_parameters=dict(
                rope_type="default",
                rope_theta=1e4,
                partial_rotary_factor=1 / 3,
                mrope_section=[2, 1, 1],
            ),
            layer_types=["linear_attention"] * 3 + ["full_attention"],
            hc_count=2,
            hc_lowrank=16,
            indexer_n_heads=8,
            indexer_kv_heads=1,
            indexer_head_dim=32,
            indexer_budget=12,
            indexer_compress_ratio=4,
        )
    )
    return _wide(made("Qwen4ExpForCausalLM", "Qwen4ExpTextConfig", **settings | changes))


def bailing_hybrid(**changes):
    """Ling-3.0: three layers of KDA whose decay is bounded, and one of latent attention."""
    return made(
        "BailingHybridForCausalLM",
        "BailingHybridConfig",
        **KDA,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        layer_group_size=4,
        mlp_layer_types=["dense"] * 4,
        **ROUTED,
        **changes,
    )


def linear_layers(model):
    """Its linear attention, layer by layer."""
    return [module for module in model.modules() if hasattr(module, "conv1d")]


def ragged(lengths=(30, 21, 5)):
    """Prompts padded on the left."""
    ids = torch.randint(1, 128, (len(lengths), max(lengths)))
    mask = torch.arange(max(lengths)) >= max(lengths) - torch.tensor(lengths)[:, None]
    return dict(input_ids=ids, attention_mask=mask.long())


@torch.inference_mode()
def greedy(model, inputs, **options):
    return model.generate(**inputs, max_new_tokens=NEW, do_sample=False, **options)


@torch.no_grad()
def compiled_greedy(model, inputs):
    """New tokens [B, NEW] over a static cache, and the graphs of the compiled decode step."""
    length, graphs = inputs["input_ids"].shape[1], []
    cache = transformers.StaticCache(model.config, max_cache_len=length + NEW)

    def backend(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    step = torch.compile(model.forward, fullgraph=True, backend=backend)
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, NEW), value=1)
    position = (mask.cumsum(-1) - 1).clamp(min=0)
    out = model(
        inputs["input_ids"],
        attention_mask=mask[:, :length],
        position_ids=position[:, :length],
        past_key_values=cache,
    )
    tokens = [out.logits[:, -1:].argmax(-1)]
    for at in range(length, length + NEW - 1):
        out = step(
            input_ids=tokens[-1],
            attention_mask=mask * (torch.arange(length + NEW) <= at),
            position_ids=position[:, at : at + 1],
            past_key_values=cache,
        )
        tokens.append(out.logits.argmax(-1))
    return torch.cat(tokens, 1), graphs
