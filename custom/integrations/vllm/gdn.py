# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The gated delta rule of Qwen3-Next, Qwen3.5 and OLMo-Hybrid in vLLM.

`GatedDelta` and `OlmoDelta` take the places of vLLM's pluggable layers.  vLLM keeps the weights,
the projections, the pools of states and the batch's metadata, and finds a layer again through an op
of its own, at which it splits its graphs; what that op calls is ours.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override  # of torch
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.mamba.gdn.olmo_gdn_linear_attn import (
    OlmoHybridGatedDeltaNetAttention,
)
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.utils.torch_utils import _encode_layer_name
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata
from vllm.v1.attention.backends.utils import NULL_BLOCK_ID

from ...convolution import npu_causal_conv1d, npu_causal_conv1d_update
from ...delta_rule import (
    npu_chunk_gated_delta_rule,
    npu_gated_delta_layer_decode,
    npu_recurrent_gated_delta_rule,
)
from ...gated_norm import npu_gated_rms_norm
from ..kernels import decay, normalised
from .modes import check_modes

# formats of weights as an engine keeps them, which come by no loader of theirs
AS_KEPT = ("ipc_cache", "runai_streamer_sharded", "sharded_state", "tensorizer")


class DeltaRule:
    """Between the projections, of whichever of vLLM's layers has them."""

    prefix: str
    activation: str
    tp_size: int
    key_dim: int
    value_dim: int
    head_k_dim: int
    head_v_dim: int
    conv_kernel_size: int
    kv_cache: Any  # columns of the convolution, and states
    conv1d: Any
    A_log: Any
    dt_bias: Any
    norm: Any
    split_ba: Any
    allow_neg_eigval = False

    def get_prefill_checkpoint_alignment(self) -> int | None:
        """None: a prefill leaves its last state alone, so vLLM ends it where it wants one."""
        return None

    def _forward_core_fused_norm_packed(
        self, mixed_qkvz: Tensor, ba: Tensor, core_attn_out: Tensor
    ) -> None:
        """Decodes stand in front of prefills; tokens past the batch's stay."""
        metadata = get_forward_context().attn_metadata
        if metadata is None:  # vLLM measures memory
            return
        batch: GDNAttentionMetadata = metadata[self.prefix]
        values = self.value_dim // self.tp_size
        qkv, z = mixed_qkvz.split([mixed_qkvz.shape[-1] - values, values], -1)
        z = z.unflatten(-1, (-1, self.head_v_dim))
        b, a = self.split_ba(ba)
        columns, states = self.kv_cache  # [slots, L, C], or C first, and [slots, Nv, Dv, Dk]
        if is_conv_state_dim_first():
            columns = columns.mT
        if batch.spec_sequence_masks is not None:
            self.verify(batch, columns, states, qkv, z, a, b, core_attn_out)
        # what came before stands in the first ones; where drafts are checked, they follow
        columns = columns[:, : self.conv_kernel_size - 1]
        t = batch.num_decode_tokens
        if t:
            slots = batch.non_spec_state_indices_tensor
            assert slots is not None
            core_attn_out[:t] = npu_gated_delta_layer_decode(
                qkv[:t, None],
                z[:t, None],
                a[:t, None],
                b[:t, None],
                columns,
                states,
                self.taps(),
                self.A_log,
                self.dt_bias,
                self.norm.weight,
                slots[:t].where(slots[:t] != NULL_BLOCK_ID, -1),  # padding has no state
                epsilon=self.norm.eps,
                state_layout="vk",
                gate_activation=self.norm.activation,
                allow_neg_eigval=self.allow_neg_eigval,
            )[:, 0]
        if batch.num_prefills:
            tokens: Any = slice(t, t + batch.num_prefill_tokens)
            if batch.spec_sequence_masks is not None:
                tokens = batch.non_spec_token_indx
            out = self.prefill(batch, columns, states, qkv[tokens], a[tokens], b[tokens])
            core_attn_out[tokens] = self.gated(out, z[tokens])

    def gated(self, out: Tensor, z: Tensor) -> Tensor:
        norm = self.norm
        return npu_gated_rms_norm(out, z, norm.weight, norm.eps, activation=norm.activation)

    def verify(
        self,
        batch: GDNAttentionMetadata,
        columns: Tensor,
        states: Tensor,
        qkv: Tensor,
        z: Tensor,
        a: Tensor,
        b: Tensor,
        core_attn_out: Tensor,
    ) -> None:
        """Requests whose last tokens are drafts: the state after each token has a slot of its own,
        and the next step goes on from that of the last one taken.

        Three calls: npu_gated_delta_layer_decode keeps the states after its tokens in rows of their
        own, and begins where it ends.
        """
        n = batch.num_spec_decodes
        every: Any = batch.spec_token_indx
        starts: Any = batch.spec_query_start_loc
        slots: Any = batch.spec_state_indices_tensor  # [n, drafts + 1]
        taken: Any = batch.num_accepted_tokens
        starts, taken = starts[: n + 1], taken[:n]
        slots = slots[:n].where(slots[:n] != NULL_BLOCK_ID, -1)  # padding has no state
        qkv, a, b, z = (each[every] for each in (qkv, a, b, z))
        mixed = npu_causal_conv1d_update(
            qkv,
            columns,
            self.taps(),
            activation=self.activation,
            conv_state_indices=slots[:, 0].contiguous(),
            query_start_loc=starts,
            num_accepted_tokens=taken,
        )
        if batch.uniform_spec_sequence_length != slots.shape[1]:
            # fewer tokens than slots: the last one taken may have none among them
            kept = slots.long().clamp(min=0)  # vLLM's slot of nobody is 0
            states[kept[:, 0]] = states[kept.gather(1, taken.long()[:, None] - 1)[:, 0]]
            taken = None
        token = torch.arange(len(qkv), device=qkv.device)
        request = torch.bucketize(token, starts[1:], right=True).clamp(max=n - 1)
        place = (token - starts[request]).clamp(max=slots.shape[1] - 1)  # padding runs on
        q, k, v, g = self.gates(mixed, a)
        out = npu_recurrent_gated_delta_rule(
            q,
            k,
            v,
            states,
            beta=b.sigmoid() * (1 + self.allow_neg_eigval),
            g=g,
            actual_seq_lengths=starts.diff(),
            ssm_state_indices=slots[request, place],
            num_accepted_tokens=taken,
        )
        core_attn_out[every] = self.gated(out, z)

    def gates(self, mixed: Tensor, a: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries and keys [T, N, Dk] of length 1, values [T, Nv, Dv], decay [T, Nv]."""
        keys, values = self.key_dim // self.tp_size, self.value_dim // self.tp_size
        qk, v = mixed.split([2 * keys, values], -1)
        q, k = normalised(qk.unflatten(-1, (-1, self.head_k_dim))).chunk(2, 1)
        return q, k, v.unflatten(-1, (-1, self.head_v_dim)), decay(a, self.A_log, self.dt_bias)

    def prefill(
        self,
        batch: GDNAttentionMetadata,
        columns: Tensor,
        states: Tensor,
        qkv: Tensor,
        a: Tensor,
        b: Tensor,
    ) -> Tensor:
        """[T, Nv, Dv] of the batch's T tokens of prefills, from their slots and back to them."""
        mixed, initial, slots, starts = convolved(
            batch, columns, states, qkv, self.taps(), self.activation
        )
        q, k, v, g = self.gates(mixed, a)
        out, final = npu_chunk_gated_delta_rule(
            q,
            k,
            v,
            beta=b,
            g=g,
            initial_state=initial,
            actual_seq_lengths=starts.diff(),
            use_beta_sigmoid_in_kernel=True,
            allow_neg_eigval=self.allow_neg_eigval,
        )
        states[slots] = final
        return out

    def taps(self) -> Tensor:
        """[W, C]; where vLLM has packed them for its CPU kernel, it keeps them beside."""
        weight: Tensor = getattr(self.conv1d, "_cpu_unpacked_conv_weight", self.conv1d.weight)
        return weight.view(weight.shape[0], self.conv_kernel_size).t()


def check_rule_modes(vllm_config: VllmConfig) -> None:
    check_modes(
        "the gated delta rule",
        vllm_config,
        data_parallelism=vllm_config.parallel_config.data_parallel_size > 1,
        states_of_all_blocks=vllm_config.cache_config.mamba_cache_mode == "all",
        drafts_beside_kept_prefixes=vllm_config.speculative_config is not None
        and vllm_config.cache_config.mamba_cache_mode != "none",
    )


class GatedDelta(DeltaRule, QwenGatedDeltaNetAttention):
    def __init__(self, config: Any, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        check_rule_modes(vllm_config)
        super().__init__(config, vllm_config, *args, **kwargs)
        self.by_key_heads = self.gqa_interleaved_layout  # Qwen3-Next
        if self.by_key_heads and self.loaded_as_they_are(vllm_config):
            values = self.num_v_heads // self.num_k_heads
            k, v = self.head_k_dim, self.head_v_dim * values
            self.load_by_kind(self.in_proj_qkvz.weight, [k, k, v, v])
            self.load_by_kind(self.in_proj_ba.weight, [values, values])
            self.by_key_heads = False

    def loaded_as_they_are(self, vllm_config: VllmConfig) -> bool:
        method = self.in_proj_qkvz.quant_method
        unquantized = type(method) is UnquantizedLinearMethod
        return unquantized and vllm_config.load_config.load_format not in AS_KEPT

    def load_by_kind(self, weight: Any, sizes: list[int]) -> None:
        """Once here instead of every step's outputs: a rank's rows of all queries, then of all keys
        and so on, where a checkpoint has `sizes` of a key head side by side."""
        theirs = weight.weight_loader

        def load(param: Tensor, loaded_weight: Any, *shard: Any) -> None:
            rows = loaded_weight[:].unflatten(0, (self.tp_size, -1, sum(sizes)))
            kinds = [each.flatten(1, 2) for each in rows.split(sizes, 2)]
            theirs(param, torch.cat(kinds, 1).flatten(0, 1), *shard)

        weight.weight_loader = load

    @override
    def forward(self, hidden_states: Tensor) -> Tensor:
        qkvz, ba = self.in_proj_qkvz(hidden_states)[0], self.in_proj_ba(hidden_states)[0]
        if self.by_key_heads:
            q, k, v, z, b, a = self.fix_query_key_value_ordering(qkvz, ba)
            qkvz = torch.cat([each.flatten(1) for each in (q, k, v, z)], -1)
            ba = torch.cat([b, a], -1)
        heads = self.num_v_heads // self.tp_size
        out = hidden_states.new_zeros(len(hidden_states), heads, self.head_v_dim)
        torch.ops.vllm.qwen_gdn_attention_core_fused_norm_packed(
            qkvz, ba, out, layer_name=_encode_layer_name(self.prefix)
        )
        projected: Tensor = self.out_proj(out.flatten(1))[0]
        return projected


class OlmoDelta(DeltaRule, OlmoHybridGatedDeltaNetAttention):
    def __init__(self, config: Any, vllm_config: VllmConfig, prefix: str = "") -> None:
        check_rule_modes(vllm_config)
        super().__init__(config, vllm_config, prefix)
        theirs = self.conv1d.weight.weight_loader

        def load(param: Tensor, loaded_weight: Any) -> None:
            # which of the three convolutions it is, vLLM 0.32 and 0.33 do not tell
            theirs(param, loaded_weight, loaded_weight.shard_id)

        self.conv1d.weight.weight_loader = load

    @override
    def _full_forward(self, hidden_states: Tensor, output: Tensor) -> None:
        rows = self.in_proj_qkvg(hidden_states)[0]
        ba = torch.cat([project(hidden_states)[0] for project in (self.b_proj, self.a_proj)], -1)
        heads = self.num_v_heads // self.tp_size
        out = hidden_states.new_zeros(len(hidden_states), heads, self.head_v_dim)
        self._forward_core_fused_norm_packed(rows, ba, out)
        output[: len(hidden_states)] = self.o_proj(out.flatten(1))[0]

    @property
    def norm(self) -> Any:
        return self.o_norm

    def split_ba(self, ba: Tensor) -> tuple[Tensor, ...]:
        return ba.chunk(2, -1)


def convolved(
    batch: GDNAttentionMetadata,
    columns: Tensor,
    states: Tensor,
    qkv: Tensor,
    taps: Tensor,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of a batch's prefills: tokens behind the convolution, whose columns are written back; states
    that the rule begins with, slots of those, and where sequences begin."""
    n = batch.num_prefills
    slots: Any = batch.prefill_state_indices
    starts: Any = batch.prefill_query_start_loc
    continues: Any = batch.prefill_has_initial_state
    slots, starts = slots[:n].long(), starts[: n + 1]
    # another request's, or another layer's, where nothing goes on: perhaps NaN
    fresh = ~continues[:n, None, None]
    mixed, columns[slots] = npu_causal_conv1d(
        qkv,
        taps,
        initial_states=columns[slots].masked_fill(fresh, 0),
        query_start_loc=starts,
        activation=activation,
    )
    return mixed, states[slots].masked_fill(fresh[..., None], 0), slots, starts


def register() -> None:
    for ours, theirs in (
        (GatedDelta, QwenGatedDeltaNetAttention),
        (OlmoDelta, OlmoHybridGatedDeltaNetAttention),
    ):
        if theirs.__name__ not in op_registry_oot:  # vLLM refuses a second one
            PluggableLayer.register_oot(ours, name=theirs.__name__)
