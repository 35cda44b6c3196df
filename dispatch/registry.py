# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Every op, in the order of the documents; each is defined in its module of `ops/<family>/`.

Registration, the three backends, autograd guards, the GE converters, the ONNX nodes, the docs'
parameter tables and the contract tests are all derived from `SPECS`.  Shapes use one alphabet:

    B requests        S query tokens a request   T tokens of all requests   N heads   D head dim
    H hidden size     R latent rank (512)        P page (cache block) size  K selected keys
"""

from __future__ import annotations

from importlib import import_module

from .op_spec import Spec

OPS = (
    "sparse_attention.sparse_attention_pto",
    "sparse_attention.sparse_attention_shared_pto",
    "prolog.mla_prolog_pto",
    "prolog.mla_prolog_v3",
    "prolog.indexer_prolog_pto",
    "prolog.lightning_indexer_prolog_pto",
    "indexer.lightning_indexer",
    "indexer.lightning_indexer_grad",
    "sparse_attention.sparse_flash_attention",
    "sparse_attention.sparse_flash_attention_grad",
    "sparse_attention.kv_quant_sparse_flash_attention",
    "deepseek_v4.sparse_attn_sharedkv",
    "deepseek_v4.sparse_attn_sharedkv_grad",
    "deepseek_v4.kv_quant_sparse_attn_sharedkv",
    "indexer.quant_lightning_indexer",
    "caches.hadamard",
    "caches.index_cache_write",
    "caches.latent_cache_write",
    "caches.quantize_index_query",
    "indexer.indexer_loss",
    "indexer.indexer_loss_backward",
    "indexer.sparse_lightning_indexer_grad_kl_loss",
    "attention.fused_attention",
    "attention.fused_attention_backward",
    "delta_rule.fused_sigmoid_gating_delta_rule_update",
    "delta_rule.chunk_gated_delta_rule",
    "delta_rule.chunk_gated_delta_rule_grad",
    "merging.merge_states",
    "merging.merge_topk",
    "merging.localize_indices",
    "delta_rule.chunk_kda",
    "delta_rule.chunk_kda_grad",
    "convolution.causal_conv1d",
    "convolution.causal_conv1d_grad",
    "convolution.causal_conv1d_update",
    "delta_rule.gated_rms_norm",
    "delta_rule.gated_rms_norm_grad",
    "delta_rule.gated_delta_layer_decode",
    "delta_rule.recurrent_gated_delta_rule",
    "convolution.fused_causal_conv1d",
    "deepseek_v4.compressor",
    "deepseek_v4.compressor_dense",
    "deepseek_v4.compressor_dense_grad",
    "deepseek_v4.sharedkv_prolog_pto",
    "deepseek_v4.grouped_o_proj_pto",
    "deepseek_v4.sparse_attention_v4_pto",
    "deepseek_v4.hc_pre",
    "deepseek_v4.hc_pre_grad",
    "deepseek_v4.hc_post",
    "deepseek_v4.hc_post_grad",
    "deepseek_v4.hc_post_pre",
)

SPECS: tuple[Spec, ...] = tuple(
    spec for op in OPS for spec in Spec.of(import_module(f"{__package__}.ops.{op}"))
)

BY_NAME: dict[str, Spec] = {spec.name: spec for spec in SPECS}
