# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""GLM-5.3-Flash in vLLM: Kimi delta attention, and latent attention without positions to the tokens
of pools that an indexer chooses.

A model class of ours, registered under the architecture's name, builds vLLM's own model with
`BoundedDelta` in the place of its delta attention and `PooledLatent` in that of its latent
attention, also where the model has a part for images.  vLLM keeps the weights, the pools of states
and the batches' metadata, and pages the caches.

A layer of latent attention has a cache of latents, one of pools of index keys, both in the model's
dtype, and of each request a ring of its open pool.  Any mixture of requests is one call an op.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override  # of torch
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mla import MLAModules, MultiHeadLatentAttentionWrapper
from vllm.models.glm5next.common import attention, kda
from vllm.models.glm5next.common import model as theirs
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.kv_cache_interface import CircularBufferSpec, KVCacheSpec

from ...pooled import key_pool
from ...sparse_attention import npu_lightning_indexer, npu_sparse_flash_attention
from ..engines import refuse, refuse_unread
from .kimi import DeltaSteps, check_delta_modes
from .mla import (
    HINTS,
    NoIndexerOp,
    PagedCache,
    SideBySide,
    SparseMetadata,
    attended,
    kept,
    write,
)
from .modes import SWITCH, check_modes, usual_modes
from .standing_in import standing_in

POOLED = "attention to pools of keys"

# ------------------------------------------------------------------------------- delta attention


class BoundedDelta(DeltaSteps, kda.Glm5NextLinearAttention):
    def __init__(self, config: Any, vllm_config: VllmConfig, prefix: str = "") -> None:
        check_delta_modes(vllm_config)
        super().__init__(config, vllm_config, prefix)
        self.gate_lower_bound = self.kda_lower_bound
        self.copies: dict[str, Tensor] = {}

    def process_weights_after_loading(self, dtype: torch.dtype) -> None:
        """One convolution of the three; vLLM calls it again when it has reloaded weights."""
        three = (self.q_conv1d, self.k_conv1d, self.v_conv1d)
        taps = torch.cat([each.weight.detach()[:, 0] for each in three]).t().contiguous()
        kept(self.copies, "taps", taps.to(dtype))

    @override
    def taps(self) -> Tensor:
        return self.copies["taps"]

    @override
    def forward(self, hidden_states: Tensor, positions: Tensor) -> Tensor:
        heads, size = self.local_num_heads, self.head_dim
        qkv, beta, decay, gate = self.in_proj_qkvbfg_a(hidden_states)[0].split(
            [3 * heads * size, heads, size, size], -1
        )
        decay, gate = (
            project(each.contiguous())[0].unflatten(-1, (heads, size))
            for project, each in ((self.f_b_proj, decay), (self.g_b_proj, gate))
        )
        out = hidden_states.new_zeros(1, len(hidden_states), heads, size)
        self._forward(qkv, decay[None], gate, beta[None], out)
        projected: Tensor = self.o_proj(out[0].flatten(1))[0]
        return projected


# ------------------------------------------------------------------------ what vLLM asks of a cache


class Backend(SideBySide):
    name = "CUSTOM_POOLED_MLA"
    page = 256  # 64 pools of 4 tokens: a tile of the kernel of the index scores for Hopper

    @staticmethod
    @override
    def get_supported_kernel_block_sizes(kv_cache_spec: KVCacheSpec | None = None) -> list[Any]:
        # a ring has few rows; of pools up to 64 tokens each a page has whole ones
        return [MultipleOf(1 if isinstance(kv_cache_spec, CircularBufferSpec) else 64)]


class Cache(PagedCache):
    backend = Backend


class OpenPool(Cache):
    """A ring of a request's last `tokens`: their keys, and how much each of them counts.

    Kept prefixes end with a page, and a pool there: what goes on from them needs none of it.
    """

    @override
    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        return CircularBufferSpec(
            block_size=self.tokens,
            num_kv_heads=1,
            head_size=self.width,
            head_size_v=0,
            dtype=self.dtype,
        )


# ------------------------------------------------------------------------------ latent attention


class PooledLatent(MultiHeadLatentAttentionWrapper, Cache):
    """Takes the arguments of vLLM's layer and computes the same, on our ops."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        scale: float,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        q_lora_rank: int | None,
        kv_lora_rank: int,
        mla_modules: MLAModules,
        cache_config: Any = None,
        quant_config: Any = None,
        prefix: str = "",
        **others: Any,
    ) -> None:
        nn.Module.__init__(self)  # vLLM's own would build its attention
        refuse_unread(SWITCH, POOLED, others, HINTS)
        m, config = mla_modules, get_current_vllm_config()
        dtype = config.model_config.dtype
        check_modes(
            POOLED,
            config,
            **usual_modes(config, cache_config.cache_dtype, quant_config),
            a_rotary_part=qk_rope_head_dim > 0,
            keys_that_are_all_attended_to=m.indexer is None,
            a_gate=m.g_proj is not None,
        )
        self.heads, self.scale = num_heads, scale
        self.key_size, self.value_size = qk_nope_head_dim, v_head_dim
        self.latent_sizes = [q_lora_rank, kv_lora_rank]
        self.fused_qkv_a_proj: Any = m.fused_qkv_a_proj
        self.q_a_layernorm: Any = m.q_a_layernorm
        self.q_b_proj: Any = m.q_b_proj
        self.kv_a_layernorm: Any = m.kv_a_layernorm
        self.kv_b_proj: Any = m.kv_b_proj
        self.o_proj: Any = m.o_proj
        i: Any = m.indexer
        self.indexer = i
        i.index_kpool_compress_gate.data = i.index_kpool_compress_gate.data.to(dtype)
        for linear in (self.kv_b_proj, i.wk_weights_proj):
            # on a CPU vLLM would put a packed copy in the place of the weight, which is read here
            linear._cpu_skip_gemm_dispatch = True

        self.layer_name = f"{prefix}.attn"
        layers = config.compilation_config.static_forward_context
        layers[self.layer_name] = self
        Cache.__init__(self, kv_lora_rank, dtype)
        # in the places of vLLM's
        self.pools_name, self.open_name = i.k_cache.prefix, i.tail_cache.prefix
        i.k_cache = i.tail_cache = None
        self.pools = Cache(i.head_dim, dtype, i.index_kpool)
        self.open = OpenPool(2 * i.head_dim, torch.float32, i.index_kpool)
        layers[self.pools_name], layers[self.open_name] = self.pools, self.open

    def process_weights_after_loading(self, dtype: torch.dtype) -> None:
        """The halves of the up-projection, [N, Dn, R] and [N, Dv, R], and the weights of the pools
        and of the index heads: views of vLLM's."""
        i = self.indexer
        heads = self.kv_b_proj.weight.detach().unflatten(0, (self.heads, -1))
        self.uk, self.uv = heads.split([self.key_size, self.value_size], 1)
        wk, self.w_heads = i.wk_weights_proj.weight.detach().tensor_split([i.head_dim])
        self.pooling: dict[str, Any] = dict(
            wk=wk,
            gate_weight=i.index_kpool_compress_gate.detach(),
            ape=i.index_kpool_compress_ape.detach(),
            norm_weight=i.k_norm.weight.detach(),
            norm_bias=i.k_norm.bias.detach(),
            norm_eps=i.k_norm.eps,
            cmp_ratio=i.index_kpool,
        )

    @override
    def forward(
        self, positions: Tensor, hidden_states: Tensor, llama_4_scaling: Tensor | None = None
    ) -> Tensor:
        refuse(SWITCH, POOLED, {"Llama 4's scaling": llama_4_scaling is not None})
        return attended(self, positions, hidden_states)

    def attend(
        self, batch: SparseMetadata | None, positions: Tensor, x: Tensor, out: Tensor
    ) -> None:
        """The heads' values [T, N * Dv] of the batch's tokens; what is past them stays."""
        q_latent, latent = self.fused_qkv_a_proj(x)[0].split(self.latent_sizes, -1)
        q_latent = self.q_a_layernorm(q_latent.contiguous())
        latent = self.kv_a_layernorm(latent.contiguous())
        q = self.q_b_proj(q_latent)[0].unflatten(-1, (self.heads, -1))
        index_query = self.indexer.wq_b(q_latent)[0].unflatten(-1, (self.indexer.n_head, -1))
        if batch is None:  # vLLM measures memory
            return
        t = len(batch.slots)
        write(self.kv_cache, latent[:t], batch.slots)
        latents, _, _ = npu_sparse_flash_attention(
            torch.einsum("tnd,ndr->tnr", q[:t], self.uk),
            self.kv_cache,
            None,
            self.chosen(batch, x[:t], index_query[:t]),
            self.scale,
            actual_seq_lengths_kv=batch.lengths,
            sparse_block_size=self.indexer.index_kpool,
            layout_kv="PA_BSND",
            **batch.by_keys,
        )
        out[:t] = torch.einsum("tnr,nvr->tnv", latents, self.uv).flatten(1)

    def chosen(self, batch: SparseMetadata, x: Tensor, query: Tensor) -> Tensor:
        """Pools [T, 1, k + 1] of every token; those that these tokens close are stored first."""
        batches: Any = get_forward_context().attn_metadata
        i, starts = self.indexer, F.pad(batch.ends, (1, 0))
        # the padding of a graph has tokens and no length
        first = (batch.lengths - starts.diff()).clamp(min=0)
        keys = key_pool(
            x,
            state_cache=self.open.kv_cache[:, :, 0],
            cache_block_table=batches[self.open_name].block_table[:, :1],  # a ring is one page
            start_pos=first,
            cu_seqlens=starts,
            cache_mode=2,
            **self.pooling,
        )
        table, pools = batches[self.pools_name].block_table, self.pools.kv_cache
        first, end = first // i.index_kpool, batch.lengths // i.index_kpool
        write(pools, keys, slots_of(first, end, table, pools.shape[1], len(keys)))
        given = batch.by_keys | dict(block_table=table, actual_seq_lengths_key=batch.lengths)
        return npu_lightning_indexer(
            query,
            pools,
            F.linear(x, self.w_heads),
            layout_key="PA_BSND",
            sparse_count=i.topk_tokens // i.index_kpool,
            cmp_ratio=i.index_kpool,
            select_tail=True,
            **given,
        )[0]


def slots_of(first: Tensor, end: Tensor, table: Tensor, page: int, rows: int) -> Tensor:
    """[rows], of entries first to end - 1 of the first request, of the second...; -1 behind all."""
    ends = (end - first).cumsum(0)
    row = torch.arange(rows, device=ends.device)
    request = torch.bucketize(row, ends, right=True).clamp(max=len(ends) - 1)
    entry = end[request] - ends[request] + row
    column = (entry // page).clamp(max=table.shape[1] - 1)
    return (table[request, column] * page + entry % page).where(row < ends[-1], -1)


# -------------------------------------------------------------------------------------- the model


def _our_layers() -> AbstractContextManager[None]:
    return standing_in(
        dict(MultiHeadLatentAttentionWrapper=PooledLatent),
        (theirs, dict(Glm5NextLinearAttention=BoundedDelta)),
        (attention, dict(SparseAttnIndexerKpool=NoIndexerOp)),
        # that of its kernels which leaves the last state alone, as ours
        (kda, dict(_resolve_kda_prefill_backend=lambda *_: "triton")),
    )


class Glm5NextForCausalLM(theirs.Glm5NextForCausalLM):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        # of which vLLM gives each an indexer, without weights
        kinds = vllm_config.model_config.hf_text_config.indexer_types
        refuse(SWITCH, POOLED, {"layers that share a selection": "shared" in kinds})
        with _our_layers():
            super().__init__(vllm_config=vllm_config, prefix=prefix)
