# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""A small GLM-5 with random weights, of whose four layers two share the selection of another."""

import torch
from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM


def make_model(vocabulary):
    config = GlmMoeDsaConfig(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        first_k_dense_replace=4,  # experts, which Transformers loops over, could not be captured
        indexer_types=["full", "shared", "full", "shared"],
        num_attention_heads=8,
        num_key_value_heads=8,
        q_lora_rank=64,
        kv_lora_rank=64,
        qk_nope_head_dim=48,
        qk_rope_head_dim=16,
        v_head_dim=64,
        index_n_heads=16,
        index_head_dim=32,
        index_topk=32,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    return GlmMoeDsaForCausalLM(config).eval()
