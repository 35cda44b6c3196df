# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""MiniMax-M3's attention to blocks in vLLM.

A model class of ours, registered under the architecture's name, builds vLLM's own model with
`BlockAttention` in the place of its sparse attention, also where the model has a part for images.
vLLM keeps the weights, pages the caches and computes the layers that see everything.

A layer has a cache of keys, one of values and one of index keys, in the model's dtype.  Any mixture
of requests is one call an op.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override  # of torch
from vllm.config import get_current_vllm_config
from vllm.distributed.parallel_state import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.layernorm import GemmaRMSNorm
from vllm.model_executor.layers.linear import (
    MinimaxM3QKVParallelLinearWithIndexer,
    RowParallelLinear,
)
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.models.minimax_m3.nvidia import model as theirs
from vllm.platforms import current_platform

from ...block_sparse import npu_block_indexer, npu_sparse_attention_score
from .mla import PagedCache, SparseBackend, SparseMetadata, attended, write
from .modes import check_modes, usual_modes
from .standing_in import standing_in

BLOCKS = "attention to blocks of keys"


class Backend(SparseBackend):
    name = "CUSTOM_BLOCK_SPARSE"
    page = 128  # that of a block
    latent = False


class Cache(PagedCache):
    backend = Backend


class BlockAttention(nn.Module, Cache):
    """Takes the arguments of vLLM's layer and computes the same, on our ops; its weights are under
    vLLM's names.

    The layer itself is the cache of its keys.
    """

    def __init__(
        self,
        config: Any,
        layer_id: int,
        quant_config: Any = None,
        prefix: str = "",
        cache_config: Any = None,
        topk_indices_buffer: Tensor | None = None,
    ) -> None:
        nn.Module.__init__(self)
        engine, chosen = get_current_vllm_config(), config.sparse_attention_config
        dtype, size = engine.model_config.dtype, config.head_dim
        check_modes(
            BLOCKS,
            engine,
            **usual_modes(engine, cache_config.cache_dtype, quant_config),
            scores_other_than_the_largest=chosen.get("sparse_score_type", "max") != "max",
            an_indexer_with_heads_of_another_size=chosen["sparse_index_dim"] != size,
        )
        ranks = get_tensor_model_parallel_world_size()
        heads, of_keys = config.num_attention_heads, config.num_key_value_heads
        # heads of keys, and of the indexer, are on several ranks where there are fewer of them
        self.heads, self.key_heads, self.value_size = heads // ranks, max(1, of_keys // ranks), size
        self.scale = size**-0.5
        self.choice: dict[str, Any] = dict(
            block_size=chosen["sparse_block_size"],
            top_k=chosen["sparse_topk_blocks"],
            init_blocks=chosen.get("sparse_init_block", 0),
            local_blocks=chosen.get("sparse_local_block", 0),
        )
        self.qkv_proj: Any = MinimaxM3QKVParallelLinearWithIndexer(
            config.hidden_size,
            size,
            heads,
            of_keys,
            chosen["sparse_num_index_heads"],
            chosen["sparse_index_dim"],
            prefix=f"{prefix}.qkv_proj",
        )
        # summed over ranks by the norm behind it
        self.o_proj: Any = RowParallelLinear(
            heads * size,
            config.hidden_size,
            bias=False,
            reduce_results=False,
            prefix=f"{prefix}.o_proj",
        )
        self.q_norm, self.k_norm, self.index_q_norm, self.index_k_norm = (
            GemmaRMSNorm(size, eps=config.rms_norm_eps) for _ in range(4)
        )
        self.rotary_emb: Any = get_rope(
            size,
            max_position=config.max_position_embeddings,
            rope_parameters=dict(
                rope_theta=config.rope_theta, partial_rotary_factor=config.partial_rotary_factor
            ),
        )
        self.layer_name = f"{prefix}.attn"
        Cache.__init__(self, self.key_heads * size, dtype)
        self.values, self.index = Cache(self.width, dtype), Cache(size, dtype)
        layers = engine.compilation_config.static_forward_context
        layers[self.layer_name] = self
        layers[f"{self.layer_name}.values"] = self.values
        layers[f"{self.layer_name}.index"] = self.index

    @override
    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        return attended(self, positions, hidden_states)

    def attend(
        self, batch: SparseMetadata | None, positions: Tensor, x: Tensor, out: Tensor
    ) -> None:
        """The heads' values [T, N * D] of the batch's tokens; what is past them stays."""
        counts = [self.heads, *[self.key_heads] * 3, 1]  # the indexer's queries, and its one key
        heads = self.qkv_proj(x)[0].unflatten(-1, (-1, self.value_size)).split(counts, 1)
        query, key, value, index_query, index_key = (each.contiguous() for each in heads)
        turn = self.rotary_emb.forward_native if current_platform.is_cpu() else self.rotary_emb
        queries, keys = turn(
            positions,
            torch.cat([self.q_norm(query), self.index_q_norm(index_query)], 1),
            torch.cat([self.k_norm(key), self.index_k_norm(index_key)], 1),
        )
        if batch is None:  # vLLM measures memory
            return
        t = len(batch.slots)
        query, index_query = queries[:t].split([self.heads, self.key_heads], 1)
        rows = {self: keys[:t, :-1], self.values: value[:t], self.index: keys[:t, -1:]}
        for cache, each in rows.items():
            write(cache.kv_cache, each.flatten(1), batch.slots)
        lengths = F.pad(batch.ends, (1, 0)).diff()
        blocks, _ = npu_block_indexer(
            index_query.contiguous(),
            self.index.kv_cache,
            batch.block_table,
            actual_seq_lengths=lengths,
            actual_seq_lengths_key=batch.lengths,
            **self.choice,
        )
        stored = [
            each.kv_cache[:, :, 0].unflatten(-1, (self.key_heads, -1))
            for each in (self, self.values)
        ]
        out[:t] = npu_sparse_attention_score(
            query.contiguous(),
            stored[0],
            stored[1],
            blocks,
            batch.block_table,
            actual_seq_lengths=lengths,
            actual_seq_lengths_kv=batch.lengths,
            num_key_value_heads=self.key_heads,
            scale_value=self.scale,
            block_size=self.choice["block_size"],
            top_k=self.choice["top_k"],
        ).flatten(1)


def _our_layers() -> AbstractContextManager[None]:
    return standing_in({}, (theirs, dict(MiniMaxM3SparseAttention=BlockAttention)))


class MiniMaxM3SparseForCausalLM(theirs.MiniMaxM3SparseForCausalLM):
    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        with _our_layers():
            super().__init__(vllm_config=vllm_config, prefix=prefix)
