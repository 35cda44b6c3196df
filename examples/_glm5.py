# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""A small GLM-5 with random weights, of whose four layers two share the selection of another, and
its head for drafts."""

from copy import deepcopy

import torch
from torch import nn
from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import (
    GlmMoeDsaDecoderLayer,
    GlmMoeDsaRMSNorm,
)


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


class DraftHead(nn.Module):
    """Multi-token prediction as DeepSeek-V3.2 and GLM-5 have it, with random weights: one layer,
    which takes over the selection of the model's last one, between the model's own embedding and
    head."""

    def __init__(self, model):
        super().__init__()
        self.config = config = deepcopy(model.config)
        config.indexer_types = [*config.indexer_types, "shared"]
        config.mlp_layer_types = [*config.mlp_layer_types, "dense"]
        size = config.hidden_size
        self.enorm, self.hnorm, self.norm = (
            GlmMoeDsaRMSNorm(size, config.rms_norm_eps) for _ in range(3)
        )
        torch.manual_seed(1)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.layer = GlmMoeDsaDecoderLayer(config, len(model.model.layers))
        for weight in (each for each in self.parameters() if each.ndim > 1):
            nn.init.normal_(weight, std=config.initializer_range)
        # a random model repeats itself: drafts that do, too, are now and then right
        self.eh_proj.weight.data[:, size:] += torch.eye(size)

    def forward(self, following, hidden):
        """The layer's input, of the embedded tokens that follow and what the model's head reads."""
        return self.eh_proj(torch.cat([self.enorm(following), self.hnorm(hidden)], -1))
