# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Transformers' DeepseekV4 in float64, and other models: the source, compiled once more with its
casts widened."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

SLIDING, CSA, HCA = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
)


@cache
def float64(model: str = "deepseek_v4") -> ModuleType:
    """modeling_<model>, which casts to float32 whatever it is given, and here to float64."""
    name = f"transformers.models.{model}.modeling_{model}"
    ours = pytest.importorskip(name)
    from transformers import cache_utils

    source = Path(ours.__file__).read_text()
    wide = source.replace(".float()", ".double()").replace("torch.float32", "torch.float64")
    spec = importlib.util.spec_from_loader(f"{name}_in_float64", loader=None)
    module = importlib.util.module_from_spec(spec)
    module.__package__, module.__file__ = ours.__package__, ours.__file__
    sys.modules[module.__name__] = module
    # a cache class takes the place of another of its name, for every model of the process
    kept = [
        (table, dict(table))
        for table in (cache_utils.DYNAMIC_LAYER_TYPE_MAPPING, cache_utils.STATIC_LAYER_TYPE_MAPPING)
    ]
    exec(compile(wide, ours.__file__, "exec"), module.__dict__)
    for table, before in kept:
        table.update(before)
    return module


def config(**changes: Any) -> Any:
    """A small layer of each kind; no size is a multiple of another by chance."""
    from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config

    rope = dict(rope_type="yarn", factor=16.0, beta_fast=32, beta_slow=1)
    rope |= dict(original_max_position_embeddings=32)
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
        hc_mult=4,
        moe_intermediate_size=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=512,
        rope_parameters=rope,
    )
    made = DeepseekV4Config(**sizes | changes)
    made._attn_implementation = "eager"
    return made


def drawn(module: nn.Module) -> Any:
    """The module in float64, its parameters random, none of them small."""
    module = module.double().eval()
    for name, parameter in module.named_parameters():
        spread = 0.35 if parameter.ndim > 1 and "bias" not in name else 0.5
        value = torch.randn(parameter.shape, dtype=torch.float64) * spread + ("norm" in name)
        parameter.requires_grad_(False).copy_(value)
    return module


class Attention:
    """One attention layer, and what goes into its attention and comes out of it."""

    def __init__(self, layer: int, **changes: Any) -> None:
        self.hf, self.config = float64(), config(**changes)
        self.module = drawn(self.hf.DeepseekV4Attention(self.config, layer))
        self.rotary = self.hf.DeepseekV4RotaryEmbedding(self.config).double()

    def angles(self, positions: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """(cos, sin) of each kind, an entry for each pair."""
        like = torch.zeros(1, dtype=torch.float64)
        return {
            kind: self.rotary(like, positions, layer_type=kind) for kind in ("main", "compress")
        }

    def run(
        self, x: Tensor, positions: Tensor, attend: Callable[[Tensor], Tensor]
    ) -> SimpleNamespace:
        """Of x [B, S, H]: queries [B, S, N, D], rows [B, S, D] and index queries [B, S, Ni, Di] as
        attention gets them, and what the layer makes of `attend(queries)` in its place."""
        seen = SimpleNamespace(index=None)

        def attention(module: Any, q: Tensor, k: Tensor, *_: Any, **__: Any) -> Any:
            seen.query, seen.rows = q.transpose(1, 2), k[:, 0, : x.shape[1]]
            return attend(seen.query), None

        def scored(_: Any, given: tuple[Tensor, ...]) -> None:
            seen.index = given[0]

        hooks = [
            scorer.register_forward_pre_hook(scored)
            for name, scorer in self.module.named_modules()
            if name.endswith("scorer")
        ]
        before, self.hf.eager_attention_forward = self.hf.eager_attention_forward, attention
        try:
            with torch.no_grad():
                seen.out, _ = self.module(x, self.angles(positions), positions, None)
        finally:
            self.hf.eager_attention_forward = before
            for hook in hooks:
                hook.remove()
        return seen

    def whole(self, x: Tensor) -> Tensor:
        """What the layer makes of one request [T, H], through a cache."""
        from transformers.cache_utils import DynamicCache

        hf, cache, x = self.hf, DynamicCache(config=self.config), x[None]
        positions = torch.arange(x.shape[1])[None]
        mask = hf.create_sliding_window_causal_mask(
            config=self.config,
            inputs_embeds=x,
            attention_mask=None,
            past_key_values=_OfLayer(cache, self.module.layer_idx),
            position_ids=positions,
        )
        with torch.no_grad():
            return self.module(x, self.angles(positions), positions, mask, cache)[0][0]

    def weights(self) -> dict[str, Any]:
        """As npu_sparse_attention_v4_pto takes them, row-major."""
        a, c = self.module, self.module.compressor
        groups, ranks = self.config.o_groups, self.config.o_lora_rank
        found = dict(
            w_dq=a.q_a_proj.weight.T,
            w_uq=a.q_b_proj.weight.T,
            w_kv=a.kv_proj.weight.T,
            gamma_cq=a.q_a_norm.weight,
            gamma_kv=a.kv_norm.weight,
            sinks=a.sinks,
            w_o_a=a.o_a_proj.weight.view(groups, ranks, -1).mT,
            w_o_b=a.o_b_proj.weight.T,
        )
        if c is not None:
            found |= dict(
                w_cmp_kv=c.kv_proj.weight,
                w_cmp_gate=c.gate_proj.weight,
                cmp_ape=c.position_bias,
                gamma_cmp=c.kv_norm.weight,
            )
        if (i := getattr(c, "indexer", None)) is not None:
            found |= dict(
                w_idx_kv=i.kv_proj.weight,
                w_idx_gate=i.gate_proj.weight,
                idx_ape=i.position_bias,
                gamma_idx=i.kv_norm.weight,
                w_idx_qb=i.q_b_proj.weight.T,
                w_idx_proj=i.scorer.weights_proj.weight.T,
            )
        return {name: w.detach().contiguous() for name, w in found.items()}


class _OfLayer:
    """A cache whose every question is answered for one layer: a model asks for its first."""

    def __init__(self, cache: Any, layer: int) -> None:
        self.cache, self.layer = cache, layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cache, name)

    def get_mask_sizes(self, length: Any, layer_idx: int = 0) -> Any:
        return self.cache.get_mask_sizes(length, self.layer)

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        return self.cache.get_seq_length(self.layer)

    def get_query_offset(self, layer_idx: int = 0) -> Any:
        return self.cache.get_query_offset(self.layer)


def pairs(angle: Tensor) -> Tensor:
    """Entries of pairs as ours are given, [.., Dr]; NaN where none is read."""
    return torch.stack([angle, torch.full_like(angle, torch.nan)], -1).flatten(-2)
