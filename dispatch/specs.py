# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Every op, in the order of the documents; each is defined in its module of `ops/`.

Registration, the three backends, autograd guards, the GE converters, the ONNX nodes, the docs'
parameter tables and the contract tests are all derived from `SPECS`.  Shapes use one alphabet:

    B requests        S query tokens a request   T tokens of all requests   N heads   D head dim
    H hidden size     R latent rank (512)        P page (cache block) size  K selected keys
"""

from __future__ import annotations

from importlib import import_module

from .spec import Spec

OPS = (
    "sparse_attention_pto",
    "sparse_attention_indices_pto",
    "sparse_attention_shared_pto",
    "mla_prolog_pto",
    "mla_prolog_v3",
    "indexer_prolog_pto",
    "lightning_indexer_prolog_pto",
    "lightning_indexer",
    "lightning_indexer_scores",
    "lightning_indexer_grad",
    "sparse_flash_attention",
    "sparse_flash_attention_grad",
    "kv_quant_sparse_flash_attention",
    "kv_quant_sparse_flash_attention_lse",
    "sparse_attn_sharedkv",
    "sparse_attn_sharedkv_grad",
    "kv_quant_sparse_attn_sharedkv",
    "quant_lightning_indexer",
    "quant_lightning_indexer_scores",
    "hadamard",
    "index_cache_write",
    "latent_cache_write",
    "quantize_index_query",
    "indexer_loss",
    "indexer_loss_backward",
    "sparse_lightning_indexer_grad_kl_loss",
    "fused_attention",
    "fused_attention_backward",
    "fused_sigmoid_gating_delta_rule_update",
    "chunk_gated_delta_rule",
    "chunk_gated_delta_rule_grad",
    "merge_states",
    "merge_topk",
    "localize_indices",
    "chunk_kda",
    "chunk_kda_grad",
    "causal_conv1d",
    "causal_conv1d_grad",
    "causal_conv1d_update",
    "gated_rms_norm",
    "gated_rms_norm_grad",
    "gated_delta_layer_decode",
    "recurrent_gated_delta_rule",
    "fused_causal_conv1d",
    "fused_causal_conv1d_v2",
    "compressor",
    "compressor_dense",
    "compressor_dense_grad",
    "sharedkv_prolog_pto",
    "grouped_o_proj_pto",
    "sparse_attention_v4_pto",
    "hc_pre",
    "hc_pre_grad",
    "hc_post",
    "hc_post_grad",
    "hc_post_pre",
)

SPECS: tuple[Spec, ...] = tuple(Spec.of(import_module(f"{__package__}.ops.{op}")) for op in OPS)

BY_NAME: dict[str, Spec] = {spec.name: spec for spec in SPECS}
