# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The weights of `npu_sparse_attention_pto` from a Hugging Face attention module.

Of the models with an indexer in Transformers those in `CONVENTIONS` are what the op computes; those
in `REFUSED` are not, each for the reason given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..dispatch.common.nz import to_nz
from ..dispatch.errors import NotSupported, need

need("transformers.models.glm_moe_dsa", __name__, '"transformers>=5.17,<6"')

from transformers.models.deepseek_v32.modeling_deepseek_v32 import (  # noqa: E402
    DeepseekV32Attention,
)
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaAttention  # noqa: E402

# how the MLA and the indexer pair the dimensions that they rotate: the modules do not say
CONVENTIONS: dict[type[nn.Module], dict[str, bool]] = {
    DeepseekV32Attention: dict(rope_interleaved=True, index_rope_interleaved=False),
    GlmMoeDsaAttention: dict(rope_interleaved=True, index_rope_interleaved=True),
}
REFUSED: dict[str, str] = {
    "AXK2Attention": "its queries come from two latents, and a gate scales its output",
    "DeepseekV4CSACompressor": "its keys are compressed, and its selection is one of them",
    "Glm5NextTextAttention": "its indexer selects pools of keys, and nothing is rotated",
    "HYV4Attention": "its heads have sinks and a gate, and its indexer rotates the last dimensions",
    "MiniMaxM3VLAttention": "its indexer selects blocks of keys, and its keys are not latent",
    "Qwen4ExpTextAttention": "its indexer selects blocks of keys, and its keys are not latent",
}


@dataclass(frozen=True)
class SharedAttentionWeights:
    """What `npu_sparse_attention_shared_pto` takes of a layer, and what comes after it.

    `dq`, `uq_qr` and `dkv_kr` are [K, N], NZ or row-major; `uk` [N, Dn, R] and `uv` [N, Dv, R] are
    the two halves of the key-value up-projection; `options` are the op's keyword arguments.
    """

    dq: Tensor
    uq_qr: Tensor
    uk: Tensor
    dkv_kr: Tensor
    gamma_cq: Tensor
    gamma_ckv: Tensor
    uv: Tensor
    options: dict[str, Any]

    @property
    def arguments(self) -> dict[str, Any]:
        """The weights and options under the op's own names."""
        return dict(
            w_dq=self.dq,
            w_uq_qr=self.uq_qr,
            w_uk=self.uk,
            w_dkv_kr=self.dkv_kr,
            gamma_cq=self.gamma_cq,
            gamma_ckv=self.gamma_ckv,
            **self.options,
        )

    def values(self, latent: Tensor) -> Tensor:
        """The heads' outputs [B, S, N * Dv] from the op's latent output [B, S, N, R]."""
        return torch.einsum("bsnr,nvr->bsnv", latent, self.uv).flatten(2)


@dataclass(frozen=True)
class SparseAttentionWeights(SharedAttentionWeights):
    """What `npu_sparse_attention_pto` takes: the indexer's as well, [K, N] as the others."""

    idx_qb: Tensor
    idx_k: Tensor
    idx_proj: Tensor
    idx_gamma_k: Tensor
    idx_beta_k: Tensor

    @property
    def arguments(self) -> dict[str, Any]:
        return dict(
            super().arguments,
            w_idx_qb=self.idx_qb,
            w_idx_k=self.idx_k,
            w_idx_proj=self.idx_proj,
            in_gamma_k=self.idx_gamma_k,
            in_beta_k=self.idx_beta_k,
        )


def _conventions(module: nn.Module) -> dict[str, bool]:
    """Of a module that the op can stand for; one sentence against any other."""
    name = type(module).__name__
    if type(module) in CONVENTIONS:  # a subclass may compute anything
        return CONVENTIONS[type(module)]
    if name in REFUSED:
        raise NotSupported(f"npu_sparse_attention_pto does not compute {name}: {REFUSED[name]}.")
    known = " or ".join(each.__name__ for each in CONVENTIONS)
    raise TypeError(
        f"sparse_attention_weights: `module` is of type {name}, expected {known}. Pass "
        "layer.self_attn of such a model."
    )


@torch.no_grad()
def sparse_attention_weights(
    module: nn.Module, weight_format: str = "nz"
) -> SparseAttentionWeights:
    """The op's weights from the attention of a DeepSeek-V3.2 or GLM-5 layer.

    Args:
        module: a `DeepseekV32Attention` or `GlmMoeDsaAttention` that has an indexer; its
            projections must have no bias.
        weight_format: "nz" makes 4-D FRACTAL_NZ weights, "nd" row-major [K, N] ones.

    All have the dtype of `q_a_proj`, also the index head weights, which Transformers may keep in
    float32: a positive factor and a rounding are all that this changes in the scores.
    """
    m, conventions = _supported(module)
    if m.indexer is None:
        kinds = m.config.indexer_types[: m.layer_idx]
        owner = max(i for i, kind in enumerate(kinds) if kind == "full")
        raise NotSupported(
            f"npu_sparse_attention_pto needs an indexer, and layer {m.layer_idx} of this "
            f"{type(module).__name__} has none: it shares the selection of layer {owner}. Use "
            "shared_attention_weights and npu_sparse_attention_shared_pto."
        )
    shared = _shared(m, conventions, weight_format)
    projection = _projection(m, weight_format)
    return SparseAttentionWeights(
        **{
            **vars(shared),
            "options": dict(
                **shared.options,
                layer_norm_eps=m.indexer.k_norm.eps,
                sparse_count=m.indexer.index_topk,
                index_rope_interleaved=conventions["index_rope_interleaved"],
            ),
        },
        idx_qb=projection(m.indexer.wq_b),
        idx_k=projection(m.indexer.wk),
        idx_proj=projection(m.indexer.weights_proj),
        idx_gamma_k=m.indexer.k_norm.weight.detach(),
        idx_beta_k=m.indexer.k_norm.bias.detach(),
    )


@torch.no_grad()
def shared_attention_weights(
    module: nn.Module, weight_format: str = "nz"
) -> SharedAttentionWeights:
    """The weights of `npu_sparse_attention_shared_pto`, from a layer with or without an indexer.

    Arguments as for `sparse_attention_weights`.
    """
    return _shared(*_supported(module), weight_format)


def _supported(module: nn.Module) -> tuple[Any, dict[str, bool]]:
    """The module, not typed, and its conventions."""
    conventions = _conventions(module)
    m: Any = module
    name = type(module).__name__
    if m.q_lora_rank is None or m.config.attention_bias:
        raise NotSupported(
            "npu_sparse_attention_pto needs a query latent (q_lora_rank) and projections without "
            f"bias; {name} has q_lora_rank={m.q_lora_rank}, "
            f"attention_bias={m.config.attention_bias}."
        )
    eps_cq, eps_ckv = m.q_a_layernorm.variance_epsilon, m.kv_a_layernorm.variance_epsilon
    if eps_cq != eps_ckv:
        raise NotSupported(
            "npu_sparse_attention_pto has one epsilon for both RMSNorms; of this "
            f"{name} q_a_layernorm has {eps_cq}, kv_a_layernorm {eps_ckv}."
        )
    return m, conventions


def _projection(m: Any, weight_format: str) -> Callable[[nn.Linear], Tensor]:
    dtype = m.q_a_proj.weight.dtype

    def projection(linear: nn.Linear) -> Tensor:
        weight = linear.weight.to(dtype).t()  # [out, in] to [K, N]
        return to_nz(weight) if weight_format == "nz" else weight.contiguous()

    return projection


def up_projections(m: Any) -> tuple[Tensor, Tensor]:
    """uk [N, Dn, R] and uv [N, Dv, R], views of the module's weight."""
    heads = m.kv_b_proj.weight.view(-1, m.qk_nope_head_dim + m.v_head_dim, m.kv_lora_rank)
    uk, uv = heads.split([m.qk_nope_head_dim, m.v_head_dim], dim=1)
    return uk, uv


def _shared(m: Any, conventions: dict[str, bool], weight_format: str) -> SharedAttentionWeights:
    projection = _projection(m, weight_format)
    uk, uv = up_projections(m)
    return SharedAttentionWeights(
        dq=projection(m.q_a_proj),
        uq_qr=projection(m.q_b_proj),
        uk=uk.contiguous(),
        dkv_kr=projection(m.kv_a_proj_with_mqa),
        gamma_cq=m.q_a_layernorm.weight.detach(),
        gamma_ckv=m.kv_a_layernorm.weight.detach(),
        uv=uv.contiguous(),
        options=dict(
            softmax_scale=m.scaling,  # with YaRN's factor, where the checkpoint has one
            rms_norm_eps=m.q_a_layernorm.variance_epsilon,
            rope_interleaved=conventions["rope_interleaved"],
            weight_format=weight_format,
        ),
    )


def cache_widths(config: Any) -> tuple[int, int, int]:
    """(R, Dr, Di) of a model's configuration, for `PagedCaches`."""
    return config.kv_lora_rank, config.qk_rope_head_dim, config.index_head_dim


def layer_widths(config: Any) -> list[tuple[int, int, int]]:
    """The same by layer: a layer that shares its selection keeps no index keys."""
    latent, rope, index = cache_widths(config)
    kinds = getattr(config, "indexer_types", None) or ["full"] * config.num_hidden_layers
    return [(latent, rope, index if kind == "full" else 0) for kind in kinds]
