# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Transformers' DeepSeek-V4, small and in float64: its modelling code casts to float32 in places,
so that source is compiled once more with those casts widened, and nothing else changed."""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

SLIDING, CSA, HCA = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
)


@cache
def modelling() -> ModuleType:
    import transformers.models.deepseek_v4.modeling_deepseek_v4 as narrow

    source = Path(narrow.__file__).read_text()
    wide = source.replace(".float()", ".double()").replace("torch.float32", "torch.float64")
    name = f"{narrow.__name__}_in_float64"
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader=None))
    module.__package__ = narrow.__name__.rpartition(".")[0]
    module.__file__ = narrow.__file__
    sys.modules[name] = module  # its dataclasses look themselves up there
    exec(compile(wide, narrow.__file__, "exec"), module.__dict__)
    return module


def configuration(**changes: Any) -> Any:
    from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config

    sizes: dict[str, Any] = dict(
        vocab_size=32,
        hidden_size=40,
        num_hidden_layers=3,
        num_attention_heads=4,
        head_dim=32,
        q_lora_rank=24,
        partial_rotary_factor=0.25,
        layer_types=[SLIDING, CSA, HCA],
        sliding_window=8,
        o_groups=2,
        o_lora_rank=12,
        compress_rates={CSA: 4, HCA: 8},
        index_n_heads=16,
        index_head_dim=16,
        index_topk=5,
        moe_intermediate_size=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=512,
        rope_parameters=dict(
            rope_type="yarn",
            factor=16.0,
            original_max_position_embeddings=32,
            beta_fast=32,
            beta_slow=1,
        ),
    )
    config = DeepseekV4Config(**sizes | changes)
    config._attn_implementation = "eager"
    return config


def drawn(module: torch.nn.Module) -> torch.nn.Module:
    """In float64, with parameters at random, none of which is small."""
    module = module.double().eval()
    for name, parameter in module.named_parameters():
        spread = 0.35 if parameter.ndim > 1 and "bias" not in name else 0.5
        value = torch.randn_like(parameter) * spread + ("norm" in name)
        parameter.requires_grad_(False).copy_(value)
    return module
