# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""DeepSeek-V3.2's and GLM-5's attention in vLLM.

A model class of ours, registered under the architecture's name, builds vLLM's own model with
`SparseMLA` in the place of its pluggable MLA layer.  vLLM keeps the weights and allocates and pages
the caches.  A batch of decodes alone, also of drafts to be checked, is one call of the layer's op,
which reads the weights where vLLM has them; any other runs the stages one by one, behind vLLM's
projections.

A layer has a cache of latents, one of rotary keys and, if it selects by itself, one of index keys,
in the model's dtype; or, as vLLM stores them in 8 bits, rows of 656 bytes (`fp8_ds_mla`) of both,
and packed index pages.  Rotated dimensions lie in halves, as the layer's op leaves them.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override  # of torch
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.mla import MLAModules, MultiHeadLatentAttentionWrapper
from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer
from vllm.model_executor.models import deepseek_mtp, deepseek_v2
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import KVCacheSpec, MLAAttentionSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from ...dispatch.common import quantized
from ...dispatch.errors import NotSupported
from ...quantized import (
    npu_index_cache_write,
    npu_kv_quant_sparse_flash_attention,
    npu_latent_cache_write,
    npu_quant_lightning_indexer,
    quantize_index_query,
)
from ...sparse_attention import (
    npu_lightning_indexer,
    npu_sparse_attention_indices_pto,
    npu_sparse_attention_pto,
    npu_sparse_attention_shared_pto,
    npu_sparse_flash_attention,
)
from ..engines import refuse, refuse_unread
from .modes import SWITCH, check_modes
from .standing_in import standing_in

# ------------------------------------------------------------------------ what vLLM asks of a cache


@dataclass
class SparseMetadata:
    """What the ops need to know of a batch of n requests and T tokens, in any mixture."""

    ends: Tensor  # [n] prefix sums of the query lengths, without the 0
    lengths: Tensor  # [n] keys of every request, new ones included
    block_table: Tensor  # [n, pages]
    slots: Tensor  # [T], negative for padding
    # tokens of each request, if all have as many and no more than a decode with its drafts, else 0;
    # the host knows without waiting
    uniform: int

    def __post_init__(self) -> None:
        self.by_keys: dict[str, Any] = dict(
            actual_seq_lengths_query=self.ends,
            block_table=self.block_table,
            layout_query="TND",
        )


class SparseBuilder(AttentionMetadataBuilder[SparseMetadata]):
    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH

    def __init__(
        self,
        kv_cache_spec: KVCacheSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        drafts = vllm_config.speculative_config
        self.longest_decode = 1 + (drafts.num_speculative_tokens if drafts else 0)

    @override
    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> SparseMetadata:
        m = common_attn_metadata
        longest = m.max_query_len
        uniform = m.num_reqs * longest == m.num_actual_tokens and longest <= self.longest_decode
        return SparseMetadata(
            ends=m.query_start_loc[1 : m.num_reqs + 1],
            lengths=m.seq_lens[: m.num_reqs],
            block_table=m.block_table_tensor[: m.num_reqs],
            slots=m.slot_mapping[: m.num_actual_tokens],
            uniform=longest if uniform else 0,
        )


class SparseBackend(AttentionBackend):
    """What vLLM asks of a cache; others say what differs."""

    name = "CUSTOM_SPARSE_MLA"
    builder: type[SparseBuilder] = SparseBuilder
    page = 64  # the kernel of the index scores for Hopper takes whole tiles of a page
    latent, sparse = True, True

    @classmethod
    @override
    def get_name(cls) -> str:
        return cls.name

    @staticmethod
    @override
    def get_impl_cls() -> Any:
        raise NotImplementedError("SparseMLA computes by itself")

    @classmethod
    @override
    def get_builder_cls(cls) -> type[SparseBuilder]:
        return cls.builder

    @staticmethod
    @override
    def get_supported_kernel_block_sizes(kv_cache_spec: KVCacheSpec | None = None) -> list[Any]:
        return [MultipleOf(16)]

    @classmethod
    @override
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        return cls.page

    @classmethod
    @override
    def is_mla(cls) -> bool:
        return cls.latent

    @classmethod
    @override
    def is_sparse(cls) -> bool:
        return cls.sparse


class SideBySide(SparseBackend):
    """Pages of any sizes lie side by side in a block; else one size would be all layers'."""

    @classmethod
    @override
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.BLHNC,)


class PagedCache(AttentionLayerBase):
    """A cache of `width` values for each of `tokens`, [pages, P, 1, width] once vLLM has allocated
    it."""

    backend: type[AttentionBackend] = SparseBackend

    def __init__(self, width: int, dtype: torch.dtype, tokens: int = 1) -> None:
        self.width, self.dtype, self.tokens = width, dtype, tokens

    @override
    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        self.kv_cache = kv_cache.transpose(1, 2)  # vLLM's is [pages, 1, P, width]

    @override
    def get_attn_backend(self) -> type[AttentionBackend]:
        return self.backend

    @override
    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        return MLAAttentionSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=1,
            max_tp_shards=1,
            head_size=self.width,
            dtype=self.dtype,
            tokens_per_state=self.tokens,
        )


class IndexCache(nn.Module, PagedCache):
    """The index keys of a layer in the model's dtype, in the place of vLLM's cache of 8 bits."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)
        PagedCache.__init__(self, width, dtype)

    def of_op(self) -> dict[str, Any]:
        """What the layer's op is told of it."""
        return dict(index_k_cache=self.kv_cache)

    def select(
        self, batch: SparseMetadata, q: Tensor, k: Tensor, weights: Tensor, count: int
    ) -> Tensor:
        """Write the keys k [T, Di]; int32 [T, 1, count] of the queries q [T, Ni, Di]."""
        write(self.kv_cache, k, batch.slots)
        given = dict(batch.by_keys, actual_seq_lengths_key=batch.lengths, sparse_count=count)
        return npu_lightning_indexer(q, self.kv_cache, weights, layout_key="PA_BSND", **given)[0]


class PackedIndexCache(IndexCache):
    """vLLM's own layout: e4m3 and, behind those of a page, their scales."""

    def __init__(self) -> None:
        super().__init__(quantized.PACKED, torch.uint8)

    @override
    def of_op(self) -> dict[str, Any]:
        return dict(index_k_cache=self.kv_cache.squeeze(2), index_kind="fp8")

    @override
    def select(
        self, batch: SparseMetadata, q: Tensor, k: Tensor, weights: Tensor, count: int
    ) -> Tensor:
        keys, scales = quantized.index_cache_views(self.kv_cache.squeeze(2), "fp8")
        npu_index_cache_write(k, keys, scales, batch.slots, kind="fp8")
        q, weights, _ = quantize_index_query(q, weights, kind="fp8")
        given = dict(batch.by_keys, actual_seq_lengths_key=batch.lengths, sparse_count=count)
        return npu_quant_lightning_indexer(
            q, keys, weights, None, scales, 0, 0, layout_key="PA_BSND", **given
        )


# -------------------------------------------------------------------------------------- the layer

# what vLLM calls the caches of 8 bits of its kernels for sparse attention, and the sizes they have
QUANTIZED = ("fp8", "fp8_e4m3", "fp8_ds_mla")
# of a layer's options how vLLM's own gets there faster
HINTS = ("allow_short_prefill_indexer_scoring_skip", "fuse_qkv_rmsnorm")
PACKED_SIZES = (quantized.LATENT, quantized.ROTARY, quantized.INDEX)


class NoIndexerOp(SparseAttnIndexer):
    """Nothing, where vLLM would build its own selection, which not every device has."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        nn.Module.__init__(self)


Pair = tuple[Tensor, Tensor]  # what is not rotated, and what is


class SparseMLA(MultiHeadLatentAttentionWrapper, PagedCache):
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
        skip_topk: bool = False,
        **others: Any,
    ) -> None:
        nn.Module.__init__(self)  # vLLM's own would build its attention
        refuse_unread(SWITCH, "sparse attention", others, HINTS)
        m, config = mla_modules, get_current_vllm_config()
        stored = config.cache_config.cache_dtype
        self.packed = stored in QUANTIZED
        keys = m.indexer.head_dim if m.indexer else quantized.INDEX
        if not (m.indexer is None or type(m.indexer) is deepseek_v2.Indexer):
            raise NotSupported(
                f"CUSTOM_VLLM=1 serves DeepSeek-V3.2's indexer, and this is a "
                f"{type(m.indexer).__name__}; unset CUSTOM_VLLM."
            )
        drafts = config.speculative_config
        check_modes(
            "sparse attention",
            config,
            drafts_that_share_a_selection=drafts is not None
            and bool(
                getattr(drafts.draft_model_config.hf_config, "index_share_for_mtp_iteration", False)
            ),
            quantized_weights=quant_config is not None,
            caches_other_than_bfloat16_and_fp8=not (self.packed or stored in ("auto", "bfloat16")),
            fp8_caches_of_other_sizes_than_those_of_DeepSeek=self.packed
            and (kv_lora_rank, qk_rope_head_dim, keys) != PACKED_SIZES,
            a_query_without_a_latent=q_lora_rank is None,
            a_gate=m.g_proj is not None,
        )
        self.heads, self.scale = num_heads, scale
        self.query_sizes = [qk_nope_head_dim, qk_rope_head_dim]
        self.latent_sizes = [q_lora_rank, kv_lora_rank, qk_rope_head_dim]
        self.value_size, self.rank = v_head_dim, kv_lora_rank
        self.fused_qkv_a_proj: Any = m.fused_qkv_a_proj
        self.q_a_layernorm: Any = m.q_a_layernorm
        self.q_b_proj: Any = m.q_b_proj
        self.kv_a_layernorm: Any = m.kv_a_layernorm
        self.kv_b_proj: Any = m.kv_b_proj
        self.o_proj: Any = m.o_proj
        self.rotary_emb: Any = m.rotary_emb
        self.indexer_rope_emb: Any = m.indexer_rotary_emb
        self.indexer: Any = None if skip_topk else m.indexer
        # [tokens, K] of all layers: one without an indexer takes the selection of the last that has
        self.selection: Any = m.topk_indices_buffer

        self.copies: dict[str, Tensor] = {}
        self.layer_name = f"{prefix}.attn"
        dtype = config.model_config.dtype
        self.layers = config.compilation_config.static_forward_context
        self.layers[self.layer_name] = self
        if self.packed:
            PagedCache.__init__(self, quantized.ROW, torch.uint8)
        else:
            PagedCache.__init__(self, kv_lora_rank, dtype)
            self.rotary = PagedCache(qk_rope_head_dim, dtype)
            self.layers[f"{self.layer_name}.rotary"] = self.rotary
        read: list[Any] = [self.fused_qkv_a_proj, self.q_b_proj, self.kv_b_proj]
        if self.indexer is not None:
            i = self.indexer
            cache = PackedIndexCache() if self.packed else IndexCache(i.head_dim, dtype)
            self.layers[i.k_cache.prefix] = i.k_cache = cache
            read += [i.wq_b, i.wk_weights_proj]
        for linear in read:
            # on a CPU vLLM would put a packed copy in the place of the weight, which the op reads
            linear._cpu_skip_gemm_dispatch = True

    def process_weights_after_loading(self, dtype: torch.dtype) -> None:
        """The arguments of the layer's op: views of vLLM's weights; `uk` [N, Dn, R] is copied.

        vLLM calls it again when it has reloaded weights, to where they were.
        """
        heads = self.kv_b_proj.weight.detach().unflatten(0, (self.heads, -1))
        uk, self.uv = heads.split([self.query_sizes[0], self.value_size], 1)
        self.uk = kept(self.copies, "uk", uk.contiguous())
        w_dq, w_dkv_kr = self.fused_qkv_a_proj.weight.detach().tensor_split(self.latent_sizes[:1])
        norm = self.q_a_layernorm
        self.weights: dict[str, Any] = dict(
            w_dq=w_dq,
            w_uq_qr=self.q_b_proj.weight.detach(),
            w_uk=self.uk,
            w_dkv_kr=w_dkv_kr,
            gamma_cq=norm.weight.detach(),
            gamma_ckv=self.kv_a_layernorm.weight.detach(),
            softmax_scale=self.scale,
            rms_norm_eps=norm.variance_epsilon,
            rope_interleaved=not self.rotary_emb.is_neox_style,
            weight_format="linear",
        )
        if self.packed:
            self.weights |= dict(kv_kind="fp8", row_layout=quantized.NOPE_SCALE_ROPE)
        if self.indexer is None:
            return
        i = self.indexer
        w_idx_k, w_idx_proj = i.wk_weights_proj.weight.detach().tensor_split([i.head_dim])
        self.weights |= dict(
            w_idx_qb=i.wq_b.weight.detach(),
            w_idx_k=w_idx_k,
            w_idx_proj=w_idx_proj,
            in_gamma_k=kept(self.copies, "gamma", i.k_norm.weight.detach().to(dtype)),
            in_beta_k=kept(self.copies, "beta", i.k_norm.bias.detach().to(dtype)),
            layer_norm_eps=i.k_norm.eps,
            sparse_count=self.selection.shape[1],
            index_rope_interleaved=not self.indexer_rope_emb.is_neox_style,
        )
        others = (each for each in self.layers.values() if isinstance(each, SparseMLA))
        self.selects_for_others = any(each.indexer is None for each in others)

    @override
    def forward(
        self, positions: Tensor, hidden_states: Tensor, llama_4_scaling: Tensor | None = None
    ) -> Tensor:
        refuse(SWITCH, "sparse attention", {"Llama 4's scaling": llama_4_scaling is not None})
        return attended(self, positions, hidden_states)

    def attend(
        self, batch: SparseMetadata | None, positions: Tensor, x: Tensor, out: Tensor
    ) -> None:
        """The heads' values [T, N * Dv] of the batch's tokens; what is past them stays."""
        if batch is not None and batch.uniform:
            latent = self.decode(batch, positions, x)
        else:
            queries, row, index = self.projected(positions, x)
            if batch is None:  # vLLM measures memory
                return
            latent = self.stages(batch, queries, row, index)
        out[: len(latent)] = torch.einsum("tnr,nvr->tnv", latent, self.uv).flatten(1)

    def decode(self, batch: SparseMetadata, positions: Tensor, x: Tensor) -> Tensor:
        """Latents [T, N, R] of n requests with T / n tokens each: one call."""
        t = len(batch.slots)
        tokens = (t // batch.uniform, batch.uniform)
        # cosines, then sines, of half the dimensions: the other half has the same
        angles = self.rotary_emb.cos_sin_cache[positions[:t]].to(x.dtype).view(*tokens, 2, 1, -1)
        cos, sin = angles.expand(-1, -1, -1, 2, -1).movedim(2, 0).flatten(-2)
        given = dict(
            self.weights,
            x=x[:t].unflatten(0, tokens),
            sin=sin,
            cos=cos,
            cache_index=batch.slots.unflatten(0, tokens),
            kv_cache=self.kv_cache,
            kr_cache=x.new_empty(0) if self.packed else self.rotary.kv_cache,
            block_table=batch.block_table,
            act_seqs=batch.lengths,
        )
        if self.indexer is None:
            selected = self.selection[:t, None].unflatten(0, tokens)
            latent = npu_sparse_attention_shared_pto(**given, sparse_indices=selected)
            return latent.flatten(0, 1)
        given |= self.indexer.k_cache.of_op()
        if not self.selects_for_others:
            return npu_sparse_attention_pto(**given).flatten(0, 1)
        latent, selected = npu_sparse_attention_indices_pto(**given)
        self.selection[:t] = selected.view(t, -1)
        return latent.flatten(0, 1)

    def projected(
        self, positions: Tensor, x: Tensor
    ) -> tuple[Pair, Pair, tuple[Tensor, Tensor, Tensor] | None]:
        """Queries [T, N, R] and [T, N, Dr], keys [T, R] and [T, Dr], and what selects them."""
        q_latent, latent, k_rope = self.fused_qkv_a_proj(x)[0].split(self.latent_sizes, -1)
        q_latent = self.q_a_layernorm(q_latent.contiguous())
        latent = self.kv_a_layernorm(latent.contiguous())
        q = self.q_b_proj(q_latent)[0].unflatten(-1, (self.heads, -1))
        q, q_rope = q.split(self.query_sizes, -1)
        q_rope, k_rope = rotated(self.rotary_emb, positions, q_rope, k_rope)
        index = None if self.indexer is None else self.indexed(positions, x, q_latent)
        return (torch.einsum("tnd,ndr->tnr", q, self.uk), q_rope), (latent, k_rope), index

    def indexed(
        self, positions: Tensor, x: Tensor, q_latent: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Index queries [T, Ni, Di] and keys [T, Di], and the weights of the heads [T, Ni]."""
        i: deepseek_v2.Indexer = self.indexer
        sizes = [i.rope_dim, i.head_dim - i.rope_dim]
        q_rope, q = i.wq_b(q_latent)[0].unflatten(-1, (i.n_head, -1)).split(sizes, -1)
        k, weights = i.wk_weights_proj(x)[0].split([i.head_dim, i.n_head], -1)
        k_rope, k = i.k_norm(k).to(x.dtype).split(sizes, -1)
        q_rope, k_rope = rotated(self.indexer_rope_emb, positions, q_rope, k_rope)
        weights = weights * (i.softmax_scale * i.n_head**-0.5)
        return torch.cat([q_rope, q], -1), torch.cat([k_rope, k], -1), weights

    def stages(
        self,
        batch: SparseMetadata,
        queries: Pair,
        row: Pair,
        index: tuple[Tensor, Tensor, Tensor] | None,
    ) -> Tensor:
        """Latents [T, N, R]: write the batch's rows to the caches, select, attend."""
        t = len(batch.slots)
        if index is not None:
            cache: IndexCache = self.indexer.k_cache
            q, k, weights = (each[:t] for each in index)
            selected = cache.select(batch, q, k, weights, self.selection.shape[1])
            self.selection[:t] = selected[:, 0]
        latents = self.packed_latents if self.packed else self.latents
        return latents(
            batch,
            (queries[0][:t], queries[1][:t]),
            (row[0][:t], row[1][:t]),
            self.selection[:t, None],
        )

    def latents(self, batch: SparseMetadata, queries: Pair, row: Pair, selected: Tensor) -> Tensor:
        """Write the latents [T, R] and rotary keys [T, Dr]; attend to those selected."""
        (q, q_rope), (latent, k_rope) = queries, row
        write(self.kv_cache, latent, batch.slots)
        write(self.rotary.kv_cache, k_rope, batch.slots)
        return npu_sparse_flash_attention(
            q,
            self.kv_cache,
            None,
            selected,
            self.scale,
            query_rope=q_rope,
            key_rope=self.rotary.kv_cache,
            actual_seq_lengths_kv=batch.lengths,
            layout_kv="PA_BSND",
            **batch.by_keys,
        )[0]

    def packed_latents(
        self, batch: SparseMetadata, queries: Pair, row: Pair, selected: Tensor
    ) -> Tensor:
        """The same on rows of 656 bytes: e4m3, scales, and rotary keys of 16 bits."""
        (q, q_rope), (latent, k_rope) = queries, row
        rows = self.kv_cache.view(torch.float8_e4m3fn)
        layout: dict[str, Any] = dict(row_layout=quantized.NOPE_SCALE_ROPE)
        k_rope = k_rope.to(quantized.rotary_dtype(q))
        npu_latent_cache_write(latent, k_rope, rows, batch.slots, kind="fp8", **layout)
        return npu_kv_quant_sparse_flash_attention(
            torch.cat([q, q_rope], -1),
            rows,
            rows,
            selected,
            self.scale,
            2,
            2,
            actual_seq_lengths_kv=batch.lengths,
            layout_kv="PA_BSND",
            attention_mode=2,
            **layout,
            **batch.by_keys,
        )


def rotated(rotary: Any, positions: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """q [T, N, D] and k [T, D], in halves; vLLM's kernel for CPUs turns one head of many."""
    turn = rotary.forward_native if current_platform.is_cpu() else rotary
    both = turn(positions, q.contiguous(), k.unsqueeze(1).contiguous())
    q_turned, k_turned = (each.to(q.dtype) for each in both)
    if not rotary.is_neox_style:  # pairs of neighbours, where they stood
        halves = (each.unflatten(-1, (-1, 2)).mT.flatten(-2) for each in (q_turned, k_turned))
        q_turned, k_turned = halves
    return q_turned, k_turned[:, 0]


def write(cache: Tensor, rows: Tensor, slots: Tensor) -> None:
    """Rows [T, C] to a cache [pages, P, 1, C]; without a slot to vLLM's page of nobody, 0."""
    slots = slots.clamp(min=0)
    cache[slots // cache.shape[1], slots % cache.shape[1], 0] = rows


def kept(copies: dict[str, Tensor], name: str, weight: Tensor) -> Tensor:
    """At the address that it had before, if any: a graph has that."""
    if name in copies:
        return copies[name].copy_(weight)
    copies[name] = weight
    return weight


def attended(layer: Any, positions: Tensor, x: Tensor) -> Tensor:
    """What a layer of latent attention, with `attend`, makes of its input [T, H]: [T, H]."""
    out = x.new_zeros(len(x), layer.heads * layer.value_size)
    torch.ops.custom_vllm.latent_attention(positions, x, out, layer.layer_name)
    projected: Tensor = layer.o_proj(out)[0]
    return projected


@eager_break_during_capture
def _latent_attention(positions: Tensor, x: Tensor, out: Tensor, layer_name: str) -> None:
    context = get_forward_context()
    layer: Any = context.no_compile_layers[layer_name]
    batches = context.attn_metadata
    layer.attend(None if batches is None else batches[layer_name], positions, x, out)


# one node of a graph, which vLLM runs between the graphs that it captures: what a batch is made of
# is seen at each replay
_library = torch.library.Library("custom_vllm", "FRAGMENT")
_library.define("latent_attention(Tensor positions, Tensor x, Tensor(a!) out, str layer) -> ()")
_library.impl("latent_attention", _latent_attention, "CompositeExplicitAutograd")
torch.library.register_fake("custom_vllm::latent_attention", lambda *_: None, lib=_library)

# -------------------------------------------------------------------------------------- the models


def _our_layers() -> AbstractContextManager[None]:
    return standing_in(
        dict(MultiHeadLatentAttentionWrapper=SparseMLA, SparseAttnIndexer=NoIndexerOp)
    )


class DeepseekV32ForCausalLM(deepseek_v2.DeepseekV3ForCausalLM):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        with _our_layers():
            super().__init__(vllm_config=vllm_config, prefix=prefix)


class GlmMoeDsaForCausalLM(deepseek_v2.GlmMoeDsaForCausalLM):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        with _our_layers():
            super().__init__(vllm_config=vllm_config, prefix=prefix)


class DeepseekV32MTP(deepseek_mtp.DeepSeekMTP):
    """The layer of either that drafts tokens."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        with _our_layers():
            super().__init__(vllm_config=vllm_config, prefix=prefix)
