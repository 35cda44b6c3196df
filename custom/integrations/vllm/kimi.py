# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Kimi Linear in vLLM: Kimi delta attention, and dense latent attention without positions.

A model class of ours, registered under the architecture's name, builds vLLM's own model with
`KimiDelta` in the place of its pluggable layer and `DenseLatent` in that of its latent attention.
vLLM keeps the weights, the pools of states and the batches' metadata, and pages the caches.  A row
of a cache is what vLLM's is, the latent and behind it the part of the key that all heads share.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override  # of torch
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.distributed.parallel_state import get_tensor_model_parallel_world_size
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import KimiGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.models.kimi_k3.nvidia import model as theirs
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata
from vllm.v1.attention.backends.utils import NULL_BLOCK_ID

from ...attention import npu_fused_infer_attention_score_v2
from ...delta_rule import npu_chunk_kda, npu_gated_delta_layer_decode
from ...gated_norm import npu_gated_rms_norm
from ..engines import refuse, refuse_unread
from .gdn import convolved
from .mla import PagedCache, SparseBackend, SparseMetadata, attended, write
from .modes import SWITCH, check_modes
from .standing_in import standing_in

KDA = "Kimi delta attention"
LATENT = "dense latent attention"
HINTS = ("run_gemm_rs_ar",)  # how vLLM's own layer gets through its last product faster


class DeltaSteps:
    """Kimi delta attention between the projections, of whichever of vLLM's layers has them."""

    prefix: str
    head_dim: int
    kv_cache: Any  # columns of the convolution, and states
    A_log: Any
    dt_bias: Any
    o_norm: Any
    gate_lower_bound: float | None

    @eager_break_during_capture
    def _forward(
        self, mixed_qkv: Tensor, g1: Tensor, g2: Tensor, beta: Tensor, core_attn_out: Tensor
    ) -> None:
        """Decodes stand in front of prefills; tokens past the batch's give 0."""
        metadata: Any = get_forward_context().attn_metadata
        out, g1, beta = core_attn_out[0], g1[0], beta[0]
        # vLLM measures memory, or warms a kernel up, without a batch
        batch: GDNAttentionMetadata | None = metadata and metadata.get(self.prefix)
        if batch is None:
            return
        out[batch.num_actual_tokens :] = 0
        columns, states = self.kv_cache  # [slots, W - 1, C], or C first, and [slots, N, Dv, Dk]
        if is_conv_state_dim_first():
            columns = columns.mT
        t = batch.num_decode_tokens
        if t:
            slots = batch.non_spec_state_indices_tensor
            assert slots is not None
            out[:t] = npu_gated_delta_layer_decode(
                mixed_qkv[:t, None],
                g2[:t, None],
                g1[:t, None],
                beta[:t, None],
                columns,
                states,
                self.taps(),
                self.A_log.flatten(),
                self.dt_bias,
                self.o_norm.weight,
                slots[:t].where(slots[:t] != NULL_BLOCK_ID, -1),  # padding has no state
                epsilon=self.o_norm.eps,
                state_layout="vk",
                gate_activation="sigmoid",
                is_kda=True,
                lower_bound=self.gate_lower_bound,
            )[:, 0]
        if batch.num_prefills:
            tokens = slice(t, t + batch.num_prefill_tokens)
            mixed = self.prefill(
                batch, columns, states, mixed_qkv[tokens], g1[tokens], beta[tokens]
            )
            norm = self.o_norm
            out[tokens] = npu_gated_rms_norm(
                mixed, g2[tokens], norm.weight, norm.eps, activation="sigmoid"
            )

    def prefill(
        self,
        batch: GDNAttentionMetadata,
        columns: Tensor,
        states: Tensor,
        qkv: Tensor,
        decay: Tensor,
        beta: Tensor,
    ) -> Tensor:
        """[T, N, Dv] of the batch's T tokens of prefills, from their slots and back to them."""
        mixed, initial, slots, starts = convolved(batch, columns, states, qkv, self.taps(), "silu")
        q, k, v = (each[None] for each in mixed.unflatten(-1, (3, -1, self.head_dim)).unbind(1))
        out, final = npu_chunk_kda(
            q,
            k,
            v,
            decay[None],
            beta[None],
            initial_state=initial,
            cu_seqlens=starts,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            A_log=self.A_log.flatten(),
            dt_bias=self.dt_bias,
            lower_bound=self.gate_lower_bound,
            state_layout="vk",
            use_beta_sigmoid_in_kernel=True,
        )
        states[slots] = final
        return out[0]

    def taps(self) -> Tensor:
        """[W, C]"""
        raise NotImplementedError


def check_delta_modes(vllm_config: VllmConfig) -> None:
    check_modes(
        KDA,
        vllm_config,
        data_parallelism=vllm_config.parallel_config.data_parallel_size > 1,
        states_of_all_blocks=vllm_config.cache_config.mamba_cache_mode == "all",
        drafts=vllm_config.speculative_config is not None,
    )


class KimiDelta(DeltaSteps, KimiGatedDeltaNetAttention):
    def __init__(self, config: Any, vllm_config: VllmConfig, prefix: str = "") -> None:
        check_delta_modes(vllm_config)
        super().__init__(config, vllm_config, prefix)

    @override
    def taps(self) -> Tensor:
        """[W, C]"""
        weight: Tensor = self.conv1d.weight
        return weight[:, 0].t()


class LatentBackend(SparseBackend):
    name = "CUSTOM_DENSE_MLA"
    sparse = False


class DenseLatent(nn.Module, PagedCache):
    """Takes the arguments of vLLM's layer and computes the same, on our op."""

    backend = LatentBackend

    def __init__(
        self,
        config: Any,
        hidden_size: int,
        num_heads: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        q_lora_rank: int | None,
        kv_lora_rank: int,
        use_output_gate: bool = False,
        cache_config: Any = None,
        quant_config: Any = None,
        prefix: str = "",
        aux_stream: Any = None,
        **others: Any,
    ) -> None:
        nn.Module.__init__(self)
        vllm_config = get_current_vllm_config()
        refuse_unread(SWITCH, LATENT, others, HINTS)
        check_modes(
            LATENT,
            vllm_config,
            drafts=vllm_config.speculative_config is not None,
            quantized_weights=quant_config is not None,
            caches_of_another_dtype_than_the_model=cache_config.cache_dtype != "auto",
            a_query_with_a_latent=q_lora_rank is not None,
            a_gate=use_output_gate,
        )
        self.heads = num_heads // get_tensor_model_parallel_world_size()
        self.query_sizes = [qk_nope_head_dim, qk_rope_head_dim]
        self.rank, self.value_size = kv_lora_rank, v_head_dim
        self.scale = sum(self.query_sizes) ** -0.5
        row, keys = kv_lora_rank + qk_rope_head_dim, num_heads * sum(self.query_sizes)
        values = num_heads * v_head_dim
        plain: dict[str, Any] = dict(bias=False)
        self.q_proj: Any = ColumnParallelLinear(
            hidden_size, keys, prefix=f"{prefix}.q_proj", **plain
        )
        self.kv_a_proj_with_mqa: Any = ReplicatedLinear(
            hidden_size, row, prefix=f"{prefix}.kv_a_proj_with_mqa", **plain
        )
        self.kv_a_layernorm: Any = RMSNorm(kv_lora_rank, eps=config.rms_norm_eps)
        self.kv_b_proj: Any = ColumnParallelLinear(
            kv_lora_rank,
            num_heads * (qk_nope_head_dim + v_head_dim),
            prefix=f"{prefix}.kv_b_proj",
            **plain,
        )
        self.o_proj: Any = RowParallelLinear(
            values, hidden_size, prefix=f"{prefix}.o_proj", **plain
        )
        # on a CPU vLLM would put a packed copy in the place of the weight, which is read here
        vars(self.kv_b_proj)["_cpu_skip_gemm_dispatch"] = True
        self.layer_name = prefix
        vllm_config.compilation_config.static_forward_context[prefix] = self
        PagedCache.__init__(self, row, vllm_config.model_config.dtype)

    def process_weights_after_loading(self, dtype: torch.dtype) -> None:
        """The halves of the up-projection, [N, Dn, R] and [N, Dv, R]: views of it."""
        heads = self.kv_b_proj.weight.detach().unflatten(0, (self.heads, -1))
        self.uk, self.uv = heads.split([self.query_sizes[0], self.value_size], 1)

    @override
    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        return attended(self, positions, hidden_states)

    def attend(
        self, batch: SparseMetadata | None, positions: Tensor, x: Tensor, out: Tensor
    ) -> None:
        """The heads' values [T, N * Dv] of the batch's tokens; what is past them stays."""
        q, q_rope = self.q_proj(x)[0].unflatten(-1, (self.heads, -1)).split(self.query_sizes, -1)
        row = self.kv_a_proj_with_mqa(x)[0]
        latent = self.kv_a_layernorm(row[:, : self.rank].contiguous())
        if batch is None:  # vLLM measures memory
            return
        t = len(batch.slots)
        write(self.kv_cache, torch.cat([latent, row[:, self.rank :]], -1)[:t], batch.slots)
        keys = self.kv_cache[..., : self.rank]
        latents, _ = npu_fused_infer_attention_score_v2(
            torch.einsum("tnd,ndr->tnr", q[:t], self.uk),
            keys,
            keys,
            query_rope=q_rope[:t],
            key_rope=self.kv_cache[..., self.rank :],
            actual_seq_qlen=batch.ends,
            actual_seq_kvlen=batch.lengths,
            block_table=batch.block_table,
            num_query_heads=self.heads,
            num_key_value_heads=1,
            softmax_scale=self.scale,
            input_layout="TND",
            sparse_mode=3,
        )
        out[:t] = torch.einsum("tnr,nvr->tnv", latents, self.uv).flatten(1)


def _our_layers() -> AbstractContextManager[None]:
    return standing_in(
        {KimiGatedDeltaNetAttention.__name__: KimiDelta},
        (theirs, dict(MultiHeadLatentAttention=DenseLatent)),
    )


class KimiLinearForCausalLM(theirs.KimiLinearForCausalLM):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        linear = vllm_config.model_config.hf_config.linear_attn_config
        refuse(SWITCH, KDA, {"a gate of full rank": bool(linear.get("use_full_rank_gate", False))})
        with _our_layers():
            super().__init__(vllm_config=vllm_config, prefix=prefix)
