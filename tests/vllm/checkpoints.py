# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Tiny checkpoints with random weights and a tokenizer of bytes, and the prompts of all runs."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn

from ..support import quantization, v4_layers

BASE: dict[str, Any] = dict(
    vocab_size=320,
    hidden_size=256,
    num_hidden_layers=3,
    num_attention_heads=8,
    intermediate_size=512,
    max_position_embeddings=2048,
    bos_token_id=256,
    eos_token_id=257,
)
MLA: dict[str, Any] = dict(
    BASE,
    q_lora_rank=96,
    kv_lora_rank=64,
    qk_rope_head_dim=16,
    qk_nope_head_dim=32,
    v_head_dim=32,
    first_k_dense_replace=3,
    n_routed_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=64,
    n_group=1,
    topk_group=1,
)
# 32 index heads: of 4 some score exactly 0 for many keys, and ties are anybody's
INDEX: dict[str, Any] = dict(index_n_heads=32, index_head_dim=32, index_topk=16)
WIDE: dict[str, Any] = dict(
    MLA, kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=64, v_head_dim=64
)
WIDE_INDEX: dict[str, Any] = dict(index_n_heads=32, index_head_dim=128, index_topk=64)
# one layer, for caches of 8 bits: the last bit of a float may decide how a number is rounded, that
# which key is selected, and a second layer would make another text of it
ONE: dict[str, Any] = dict(WIDE, num_hidden_layers=1, first_k_dense_replace=1)
YARN: dict[str, Any] = dict(
    rope_type="yarn",
    rope_theta=10000.0,
    factor=4.0,
    original_max_position_embeddings=64,
    beta_fast=32.0,
    beta_slow=1.0,
    mscale=1.0,
    mscale_all_dim=1.0,
)

# one layer, and another for drafts
DRAFTS: dict[str, Any] = dict(
    MLA, **INDEX, num_hidden_layers=1, first_k_dense_replace=2, num_nextn_predict_layers=1
)
# Transformers' class knows no other way, vLLM asks
GLM: dict[str, Any] = dict(MLA, **INDEX, indexer_rope_interleave=True)
SHARED: dict[str, Any] = dict(
    num_hidden_layers=5, first_k_dense_replace=5, index_topk_pattern="FSSFS"
)
DELTA: dict[str, Any] = dict(
    BASE,
    num_hidden_layers=4,
    head_dim=64,
    num_key_value_heads=2,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=64,
    linear_value_head_dim=64,
)
OLMO: dict[str, Any] = dict(DELTA, num_key_value_heads=8, head_dim=32, pad_token_id=None)
EXPERTS: dict[str, Any] = dict(
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=64,
    shared_expert_intermediate_size=64,
)
KIMI: dict[str, Any] = dict(
    BASE,
    num_hidden_layers=4,
    num_key_value_heads=8,
    pad_token_id=None,
    kv_lora_rank=64,
    qk_rope_head_dim=16,
    qk_nope_head_dim=32,
    v_head_dim=32,
    mla_use_nope=True,
    num_local_experts=1,
    first_k_dense_replace=4,
    linear_attn_config=dict(
        head_dim=32,
        num_heads=4,
        short_conv_kernel_size=4,
        full_attn_layers=[3],
        kda_layers=[1, 2, 4],
    ),
)
V4: dict[str, Any] = dict(
    v4_layers.LAYERS,
    vocab_size=320,
    hidden_size=128,
    head_dim=64,
    q_lora_rank=64,
    sliding_window=32,
    index_n_heads=32,
    index_topk=16,
    n_routed_experts=256,  # vLLM's router for CPUs has these numbers alone
    num_experts_per_tok=6,
    max_position_embeddings=2048,
    rope_parameters=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=512),
    bos_token_id=256,
    eos_token_id=257,
)
# no number is near where the last bit of a float decides: entries are few enough that all are seen,
# and a token's experts are known from it
V4_QUANTIZED: dict[str, Any] = dict(
    V4,
    hidden_size=256,
    q_lora_rank=128,
    o_lora_rank=128,
    index_topk=64,
    mlp_layer_types=["hash_moe"] * 3,
)
KIMI_EXPERTS: dict[str, Any] = dict(
    KIMI,
    num_local_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=64,
    first_k_dense_replace=1,
)
GLM_53: dict[str, Any] = dict(
    vocab_size=320,
    hidden_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=4,
    intermediate_size=256,
    max_position_embeddings=2048,
    pad_token_id=None,
    q_lora_rank=96,
    kv_lora_rank=64,
    qk_nope_head_dim=32,
    v_head_dim=32,
    layer_types=["linear_attention", "indexed_attention"] * 2,
    linear_num_heads=4,
    linear_head_dim=32,
    index_n_heads=32,
    index_head_dim=32,
    index_topk=32,
    index_kpool=4,
    mlp_layer_types=["dense"] * 3 + ["sparse"],
    moe_intermediate_size=64,
    n_routed_experts=8,
    num_experts_per_tok=2,
    # what vLLM asks, and Transformers knows
    mla_use_nope=True,
    mhc=True,
    scoring_func="sigmoid",
    topk_method="noaux_tc",
    indexer_rope_interleave=True,
)
# tokens of pictures, which the prompts have none of
GLM_53_SEEING: dict[str, Any] = dict(
    text_config=GLM_53,
    vision_config=dict(
        depth=1, hidden_size=32, intermediate_size=32, num_heads=2, out_hidden_size=128
    ),
    image_token_id=318,
    video_token_id=319,
)
# each head of keys chooses; vLLM's layers of it that see everything ask for CUDA
M3: dict[str, Any] = dict(
    BASE,
    num_key_value_heads=2,
    dense_intermediate_size=512,
    head_dim=64,
    rotary_dim=32,
    rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5),
    layer_types=["minimax_m3_sparse"] * 3,
    mlp_layer_types=["dense"] * 3,
    index_n_heads=2,
    index_head_dim=64,
    index_block_size=8,
    index_topk_blocks=4,
)
EMBEDDED = 4.0
# checkpoint -> Transformers' model and configuration, its sizes
CHECKPOINTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "deepseek_v32": ("DeepseekV32ForCausalLM", "DeepseekV32Config", {**MLA, **INDEX}),
    "deepseek_v32_wide": ("DeepseekV32ForCausalLM", "DeepseekV32Config", {**WIDE, **WIDE_INDEX}),
    "deepseek_v32_yarn": (
        "DeepseekV32ForCausalLM",
        "DeepseekV32Config",
        {**MLA, **INDEX, "rope_parameters": YARN},
    ),
    "deepseek_v32_drafts": ("DeepseekV32ForCausalLM", "DeepseekV32Config", DRAFTS),
    "glm_5": ("GlmMoeDsaForCausalLM", "GlmMoeDsaConfig", GLM),
    "glm_52": ("GlmMoeDsaForCausalLM", "GlmMoeDsaConfig", {**GLM, **SHARED}),
    "deepseek_v32_one": ("DeepseekV32ForCausalLM", "DeepseekV32Config", {**ONE, **WIDE_INDEX}),
    "glm_5_one": ("GlmMoeDsaForCausalLM", "GlmMoeDsaConfig", {**GLM, **ONE, **WIDE_INDEX}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", WIDE),
    "qwen3_next": (
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        {**DELTA, **EXPERTS, "mlp_only_layers": [0, 1, 2]},
    ),
    "qwen3_next_drafts": (
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        {**DELTA, **EXPERTS, "mlp_only_layers": [1, 2], "num_nextn_predict_layers": 1},
    ),
    "qwen3_5": ("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", DELTA),
    "olmo_hybrid": ("OlmoHybridForCausalLM", "OlmoHybridConfig", OLMO),
    "deepseek_v4": ("DeepseekV4ForCausalLM", "DeepseekV4Config", V4),
    "deepseek_v4_drafts": (
        "DeepseekV4ForCausalLM",
        "DeepseekV4Config",
        {**V4, "num_nextn_predict_layers": 1},
    ),
    "deepseek_v4_fp8": ("DeepseekV4ForCausalLM", "DeepseekV4Config", V4_QUANTIZED),
    "glm_53": ("Glm5NextForConditionalGeneration", "Glm5NextConfig", GLM_53_SEEING),
    "minimax_m3": ("MiniMaxM3VLForCausalLM", "MiniMaxM3VLTextConfig", M3),
    "kimi_linear": ("KimiLinearForCausalLM", "KimiLinearConfig", KIMI),
    "kimi_linear_experts": ("KimiLinearForCausalLM", "KimiLinearConfig", KIMI_EXPERTS),
}


def prompts() -> list[list[int]]:
    """Of 4 to 171 tokens, most longer than what is selected."""
    chosen = random.Random(0)
    return [[256] + [chosen.randrange(256) for _ in range(n)] for n in (3, 40, 100, 17, 170)]


def save_tokenizer(folder: Path) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate(letters)} | {"<s>": 256, "</s>": 257}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)


def _moved(weights: dict[str, Tensor], of: str, to: str) -> dict[str, Tensor]:
    """The weights whose names begin with `of`, which `to` replaces."""
    return {to + name[len(of) :]: each for name, each in weights.items() if name.startswith(of)}


def drafts_of_deepseek(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The one layer once more, of the next token alone: it says what the model will, but for the
    first two tokens, which it does not see."""
    layer = {name: each for name, each in weights.items() if name.startswith("model.layers.0.")}
    size = weights["model.norm.weight"].shape[0]
    layer |= {
        "model.layers.0.enorm.weight": torch.ones(size),
        "model.layers.0.hnorm.weight": torch.ones(size),
        "model.layers.0.eh_proj.weight": torch.eye(size, 2 * size),
        "model.layers.0.shared_head.norm.weight": weights["model.norm.weight"],
        "model.layers.0.shared_head.head.weight": weights["lm_head.weight"],
        "model.layers.0.embed_tokens.weight": weights["model.embed_tokens.weight"],
    }
    return {name.replace("layers.0", "layers.1"): each for name, each in layer.items()}


def drafts_of_qwen(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The last layer once more, of the next token alone, as far as that decides."""
    layer = _moved(weights, "model.layers.3.", "mtp.layers.0.")
    size = weights["model.norm.weight"].shape[0]
    return layer | {
        "mtp.fc.weight": EMBEDDED * torch.eye(size, 2 * size),
        "mtp.norm.weight": weights["model.norm.weight"],
        "mtp.pre_fc_norm_embedding.weight": torch.zeros(size),  # of which 1 is the factor
        "mtp.pre_fc_norm_hidden.weight": torch.zeros(size),
    }


def drafts_of_v4(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The first layer once more, of the next token alone, as far as that decides."""
    layer = _moved(weights, "layers.0.", "mtp.0.")
    size = weights["norm.weight"].shape[0]
    shared = {
        "emb.tok_emb.weight": "embed.weight",
        "head.weight": "head.weight",
        "norm.weight": "norm.weight",
        **{f"hc_head_{each}": f"hc_head_{each}" for each in ("fn", "base", "scale")},
    }
    layer |= {f"mtp.0.{name}": weights[theirs] for name, theirs in shared.items()}
    # its experts are those that it scores best, since it is none of the first layers
    del layer["mtp.0.ffn.gate.tid2eid"]
    return layer | {
        "mtp.0.ffn.gate.bias": torch.zeros_like(weights["layers.1.ffn.gate.bias"]),
        "mtp.0.enorm.weight": torch.ones(size),
        "mtp.0.hnorm.weight": torch.ones(size),
        "mtp.0.e_proj.weight": EMBEDDED * torch.eye(size),
        "mtp.0.h_proj.weight": torch.zeros(size, size),
    }


Weights = dict[str, Tensor]
DRAFTS_OF: dict[str, Callable[[Weights], Weights]] = {
    "deepseek_v32": drafts_of_deepseek,
    "deepseek_v4": drafts_of_v4,
    "qwen": drafts_of_qwen,
}


def foretell(model: Any, name: str) -> None:
    """Embeddings by which a layer for drafts says nearly what the model will."""
    embedded = model.model.embed_tokens.weight.data
    # as the drafts' norm leaves it; of Qwen more, so that the other layers decide less
    embedded /= embedded.square().mean(-1, keepdim=True).sqrt()
    embedded *= 1 if name.startswith("deepseek_v32") else EMBEDDED


def add_drafts(file: Path, name: str) -> None:
    weights = load_file(file)
    (of,) = (of for start, of in DRAFTS_OF.items() if name.startswith(start))
    more = of(weights)
    save_file(weights | {name: each.clone() for name, each in more.items()}, file, {"format": "pt"})


RELEASED = {
    # Transformers calls a layer without experts what it calls one that has them
    "kimi": {
        f"block_sparse_moe.{each}_proj": f"mlp.{each}_proj" for each in ("gate", "up", "down")
    },
    # and gives back some of the names
    "deepseek_v4": {
        "model.embed_tokens": "embed",
        "model.hc_head.hc_": "hc_head_",
        "model.": "",
        "attn.norm": "attn.kv_norm",
    },
    # of layers with the delta rule
    "olmo": {
        "attention_layer_norm": "input_layernorm",
        "feedforward_layer_norm": "post_attention_layernorm",
    },
    # of which vLLM builds the model of texts
    "glm_53": {"model.language_model.": "model."},
    "minimax_m3": {"self_attn.indexer.": "self_attn.index_"},
}


# the projections of 8 bits in DeepSeek-V4's checkpoints, as Transformers calls them and as they do
QUANTIZED = {
    "q_a_proj": "wq_a",
    "q_b_proj": "wq_b",
    "kv_proj": "wkv",
    "o_a_proj": "wo_a",
    "o_b_proj": "wo_b",
    "compressor.indexer.q_b_proj": "indexer.wq_b",
}


def quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(e4m3, scales that are powers of two) of [N, K], both for blocks of 128 x 128."""
    exponents = quantization.weight(weight, "fp8")[1].log2().ceil()
    scales = exponents.exp2()
    whole = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    values = weight / whole[: len(weight), : weight.shape[1]]
    return values.to(torch.float8_e4m3fn), scales.to(torch.float8_e8m0fnu)


def projections(model: Any) -> list[nn.Linear]:
    """Of a DeepSeek-V4 model, those that have 8 bits in its checkpoints."""
    modules = [each for layer in model.model.layers for each in layer.self_attn.named_modules()]
    return [linear for name, linear in modules if name in QUANTIZED]


def quantize(model: Any) -> None:
    """Projections that 8 bits hold exactly, in blocks of different sizes."""
    for linear in projections(model):
        weight = linear.weight.data
        sizes = torch.randint(-3, 1, quantized(weight)[1].shape).float().exp2()
        values, scales = quantized(quantization.dequantized(weight, sizes).float())
        weight.copy_(quantization.dequantized(values, scales.float()))


def quantize_as_released(folder: Path) -> None:
    """The projections in 8 bits, and nothing else."""
    file = folder / "model.safetensors"
    weights = load_file(file)
    for name in [name for name in weights if name.startswith("layers")]:
        layer, _, leaf = name.removesuffix(".weight").partition(".attn.")
        if leaf in QUANTIZED.values():
            values, scales = quantized(weights[name])
            weights |= {name: values, f"{layer}.attn.{leaf}.scale": scales}
    save_file(weights, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["expert_dtype"] = "fp4"  # with which scales are powers of two
    config["quantization_config"] = dict(
        quant_method="fp8",
        activation_scheme="dynamic",
        weight_block_size=[128, 128],
        modules_to_not_convert=[
            name.removesuffix(".weight") for name in weights if "experts" in name
        ],
    )
    (folder / "config.json").write_text(json.dumps(config))


def configure_as_released(file: Path) -> None:
    """DeepSeek-V4's configuration as vLLM 0.32 reads it, without the names of Transformers."""
    config = json.loads(file.read_text())
    kinds, rates = config.pop("layer_types"), config.pop("compress_rates")
    config |= dict(
        compress_ratios=[rates.get(kind, 0) for kind in kinds],
        num_hash_layers=config.pop("mlp_layer_types").count("hash_moe"),
        topk_method="noaux_tc",
        expert_dtype="none",  # of 4 bits, if nothing is said
    )
    file.write_text(json.dumps(config))


def configure_for_texts(file: Path) -> None:
    """Without the part that sees, which Transformers has no model without."""
    config = json.loads(file.read_text())["text_config"]
    file.write_text(json.dumps(config | dict(architectures=["Glm5NextForCausalLM"])))


def configure_m3(file: Path) -> None:
    """As MiniMax writes it, and vLLM reads it: of the model that sees, which is not built."""
    c = json.loads(file.read_text())
    layers = c["num_hidden_layers"]
    chosen = dict(
        sparse_attention_freq=[1] * layers,
        sparse_num_index_heads=c["index_n_heads"],
        sparse_index_dim=c["index_head_dim"],
        sparse_block_size=c["index_block_size"],
        sparse_topk_blocks=c["index_topk_blocks"],
        sparse_local_block=c["index_local_blocks"],
    )
    text = c | dict(
        sparse_attention_config=chosen,
        moe_layer_freq=[0] * layers,
        hidden_act="swigluoai",
        rope_theta=c["rope_parameters"]["rope_theta"],
        partial_rotary_factor=c["rope_parameters"]["partial_rotary_factor"],
    )
    model = dict(model_type="minimax_m3_vl", architectures=["MiniMaxM3SparseForCausalLM"])
    file.write_text(json.dumps(model | dict(text_config=text)))


def name_as_released(file: Path, names: dict[str, str]) -> None:
    weights = {name: each for name, each in load_file(file).items() if ".visual." not in name}
    for old, new in names.items():
        weights = {name.replace(old, new): each for name, each in weights.items()}
    save_file(weights, file, {"format": "pt"})


def split_convolutions(file: Path) -> None:
    """Of OLMo-Hybrid, by the sizes of their projections: Transformers writes equal parts."""
    weights = load_file(file)
    for name in [name for name in weights if ".q_conv1d." in name]:
        names = [name.replace(".q_", f".{each}_") for each in "qkv"]
        rows = [len(weights[each.replace("conv1d", "proj")]) for each in names]
        parts = torch.cat([weights[each] for each in names]).split(rows)
        weights |= {each: part.clone() for each, part in zip(names, parts, strict=True)}
    save_file(weights, file, {"format": "pt"})


def make(folder: Path, name: str) -> Any:
    """The model, saved, with weights large enough that no layer is a bystander."""
    model_name, configuration, sizes = CHECKPOINTS[name]
    torch.manual_seed(1)
    config = getattr(transformers, configuration)(**sizes)
    model = getattr(transformers, model_name)(config).float()
    for weight in model.parameters():
        if weight.ndim == 2:
            torch.nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
    streams = name.startswith(("deepseek_v4", "glm_53"))
    for part, weight in model.named_parameters() if streams else ():
        if "hc" in part or "position_bias" in part or "sinks" in part:
            torch.nn.init.normal_(weight, std=0.1 if part.endswith("fn") else 0.5)
    for part, table in model.named_buffers():
        if part.endswith("tid2eid"):
            table.random_(0, config.n_routed_experts)
    for layer in model.model.layers if name.startswith("kimi") else ():
        if hasattr(layer.self_attn, "conv1d"):
            torch.nn.init.normal_(layer.self_attn.conv1d.weight, std=0.5)
        else:  # what the configuration says, as vLLM reads it
            layer.self_attn.kv_a_layernorm.variance_epsilon = config.rms_norm_eps
    for part, weight in model.named_parameters() if name == "minimax_m3" else ():
        if "norm" in part:
            torch.nn.init.normal_(weight, std=0.2)
    drafts = sizes.get("num_nextn_predict_layers", 0) > 0
    if drafts:
        foretell(model, name)
    if name.endswith("_fp8"):
        quantize(model)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder / name)
    for start, names in RELEASED.items():
        if name.startswith(start):
            name_as_released(folder / name / "model.safetensors", names)
    if drafts:
        add_drafts(folder / name / "model.safetensors", name)
    if name.startswith("deepseek_v4"):
        configure_as_released(folder / name / "config.json")
    if name.endswith("_fp8"):
        quantize_as_released(folder / name)
    if name == "olmo_hybrid":
        split_convolutions(folder / name / "model.safetensors")
    if name == "minimax_m3":
        configure_m3(folder / name / "config.json")
    if name == "glm_53":
        configure_for_texts(folder / name / "config.json")
    save_tokenizer(folder / name)
    return model.eval()
