# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Every op, once: its schema, its check, its fake, where its code lies, its GE and ONNX names.

Registration, the three backends, autograd guards, the GE converters, the ONNX nodes, the docs'
parameter tables and the contract tests are all derived from `SPECS`.  Shapes use one alphabet:

    B requests        S query tokens a request   T tokens of all requests   N heads   D head dim
    H hidden size     R latent rank (512)        P page (cache block) size  K selected keys
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class Spec:
    """One op.  `file` names its module in reference/, npu_ops/, cuda_ops/ and checks/."""

    schema: str
    file: str
    function: str = "forward"
    ge: str | None = None
    onnx: str | None = None
    differentiable: bool = False

    @property
    def name(self) -> str:
        return self.schema.partition("(")[0]

    @property
    def check(self) -> Callable[..., None]:
        """Raises one clear sentence on bad arguments; runs for real and for fake tensors."""
        return self._of_checks("check")

    @property
    def fake(self) -> Callable[..., Any]:
        """Outputs with the right shapes and dtypes, and nothing in them."""
        return self._of_checks("fake")

    @property
    def setup_context(self) -> Callable[..., None]:
        """Saves what backward needs; for an op that is `differentiable`."""
        return self._of_checks("setup_context")

    @property
    def backward(self) -> Callable[..., Any]:
        """One gradient for every argument of the schema; for an op that is `differentiable`."""
        return self._of_checks("backward")

    def _of_checks(self, attribute: str) -> Callable[..., Any]:
        module = import_module(f"{__package__}.checks.{self.file}")
        found: Callable[..., Any] = getattr(module, attribute)
        return found


_ALL = 2**63 - 1  # torch_npu's "no limit" for pre_tokens and next_tokens

SPECS: tuple[Spec, ...] = (
    # ------------------------------------------------ DeepSeek-V3.2 sparse attention, inference
    Spec(
        "npu_sparse_attention_pto(Tensor x, Tensor w_dq, Tensor w_uq_qr, Tensor w_uk,"
        " Tensor w_dkv_kr, Tensor gamma_cq, Tensor gamma_ckv, Tensor sin, Tensor cos,"
        " Tensor cache_index, Tensor(a!) kv_cache, Tensor(b!) kr_cache, Tensor block_table,"
        " Tensor act_seqs, Tensor w_idx_qb, Tensor w_idx_k, Tensor w_idx_proj, Tensor in_gamma_k,"
        " Tensor in_beta_k, Tensor(c!) index_k_cache, *, float? softmax_scale=None,"
        " float rms_norm_eps=1e-6, float layer_norm_eps=1e-6, SymInt sparse_count=2048,"
        ' bool rope_interleaved=True, bool index_rope_interleaved=False, str weight_format="nz")'
        " -> Tensor",
        file="sparse_attention_pto",
        ge="SparseAttentionPto",
        onnx="SparseAttentionPto",
    ),
    Spec(
        "npu_sparse_attention_indices_pto(Tensor x, Tensor w_dq, Tensor w_uq_qr, Tensor w_uk,"
        " Tensor w_dkv_kr, Tensor gamma_cq, Tensor gamma_ckv, Tensor sin, Tensor cos,"
        " Tensor cache_index, Tensor(a!) kv_cache, Tensor(b!) kr_cache, Tensor block_table,"
        " Tensor act_seqs, Tensor w_idx_qb, Tensor w_idx_k, Tensor w_idx_proj, Tensor in_gamma_k,"
        " Tensor in_beta_k, Tensor(c!) index_k_cache, *, float? softmax_scale=None,"
        " float rms_norm_eps=1e-6, float layer_norm_eps=1e-6, SymInt sparse_count=2048,"
        ' bool rope_interleaved=True, bool index_rope_interleaved=False, str weight_format="nz")'
        " -> (Tensor, Tensor)",
        file="sparse_attention_indices_pto",
        onnx="SparseAttentionIndicesPto",
    ),
    Spec(
        "npu_sparse_attention_shared_pto(Tensor x, Tensor w_dq, Tensor w_uq_qr, Tensor w_uk,"
        " Tensor w_dkv_kr, Tensor gamma_cq, Tensor gamma_ckv, Tensor sin, Tensor cos,"
        " Tensor cache_index, Tensor(a!) kv_cache, Tensor(b!) kr_cache, Tensor block_table,"
        " Tensor act_seqs, Tensor sparse_indices, *, float? softmax_scale=None,"
        ' float rms_norm_eps=1e-6, bool rope_interleaved=True, str weight_format="nz") -> Tensor',
        file="sparse_attention_shared_pto",
        onnx="SparseAttentionSharedPto",
    ),
    Spec(
        "npu_mla_prolog_pto(Tensor token_x, Tensor weight_dq, Tensor weight_uq_qr,"
        " Tensor weight_uk, Tensor weight_dkv_kr, Tensor rmsnorm_gamma_cq,"
        " Tensor rmsnorm_gamma_ckv, Tensor rope_sin, Tensor rope_cos, Tensor(a!) kv_cache,"
        " Tensor(b!) kr_cache, Tensor cache_index, *, float rmsnorm_epsilon_cq=1e-6,"
        " float rmsnorm_epsilon_ckv=1e-6, bool rope_interleaved=True,"
        ' str weight_format="nz") -> (Tensor, Tensor, Tensor)',
        file="mla_prolog_pto",
        ge="MlaPrologV3",
        onnx="MlaPrologPto",
    ),
    Spec(
        "npu_indexer_prolog_pto(Tensor token_x, Tensor query_norm, Tensor weight_qb,"
        " Tensor weight_k, Tensor weight_proj, Tensor ln_gamma_k, Tensor ln_beta_k,"
        " Tensor rope_sin, Tensor rope_cos, Tensor(a!) index_k_cache, Tensor cache_index, *,"
        ' float ln_epsilon=1e-6, bool rope_interleaved=False, str weight_format="nz")'
        " -> (Tensor, Tensor)",
        file="indexer_prolog_pto",
        onnx="IndexerPrologPto",
    ),
    # ------------------------------------------------------------- its two sparse stages, training
    Spec(
        "npu_lightning_indexer(Tensor query, Tensor key, Tensor weights, *,"
        " Tensor? actual_seq_lengths_query=None, Tensor? actual_seq_lengths_key=None,"
        ' Tensor? block_table=None, str layout_query="BSND", str layout_key="BSND",'
        f" SymInt sparse_count=2048, SymInt sparse_mode=3, SymInt pre_tokens={_ALL},"
        f" SymInt next_tokens={_ALL}, bool return_value=False) -> (Tensor, Tensor)",
        file="lightning_indexer",
        ge="LightningIndexer",
        onnx="LightningIndexer",
        differentiable=True,
    ),
    Spec(
        "npu_lightning_indexer_grad(Tensor query, Tensor key, Tensor dy, Tensor sparse_indices,"
        " Tensor weights, Tensor? actual_seq_lengths_query=None,"
        ' Tensor? actual_seq_lengths_key=None, str? layout="BSND", SymInt? sparse_mode=3,'
        f" SymInt? pre_tokens={_ALL}, SymInt? next_tokens={_ALL}) -> (Tensor, Tensor, Tensor)",
        file="lightning_indexer_grad",
        function="backward",
        ge="LightningIndexerGrad",
    ),
    Spec(
        "npu_sparse_flash_attention(Tensor query, Tensor key, Tensor? value,"
        " Tensor sparse_indices, float scale_value, *, Tensor? block_table=None,"
        " Tensor? actual_seq_lengths_query=None, Tensor? actual_seq_lengths_kv=None,"
        " Tensor? query_rope=None, Tensor? key_rope=None, SymInt sparse_block_size=1,"
        ' str layout_query="BSND", str layout_kv="BSND", SymInt sparse_mode=3,'
        f" SymInt pre_tokens={_ALL}, SymInt next_tokens={_ALL}, SymInt attention_mode=2,"
        " bool return_softmax_lse=False, Tensor? sinks=None) -> (Tensor, Tensor, Tensor)",
        file="sparse_flash_attention",
        ge="SparseFlashAttention",
        onnx="SparseFlashAttention",
        differentiable=True,
    ),
    Spec(
        "npu_sparse_flash_attention_grad(Tensor query, Tensor key, Tensor? value,"
        " Tensor sparse_indices, Tensor d_out, Tensor out, Tensor softmax_max,"
        " Tensor softmax_sum, float scale_value, SymInt sparse_block_size,"
        " Tensor? query_rope=None, Tensor? key_rope=None, Tensor? actual_seq_qlen=None,"
        ' Tensor? actual_seq_kvlen=None, str? layout="BSND", SymInt? sparse_mode=3,'
        f" SymInt? pre_tokens={_ALL}, SymInt? next_tokens={_ALL}, SymInt? attention_mode=2)"
        " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
        file="sparse_flash_attention_grad",
        function="backward",
        ge="SparseFlashAttentionGrad",
    ),
    # ------------------------------------------------------------------ the indexer's training loss
    Spec(
        "npu_indexer_loss(Tensor query, Tensor key, Tensor index_score, Tensor indices,"
        " float scaling, SymInt chunk_offset=0, *, float eps=1e-10, Tensor? query_rope=None,"
        " Tensor? key_rope=None, Tensor? softmax_lse=None) -> (Tensor, Tensor)",
        file="indexer_loss",
        onnx="IndexerLoss",
        differentiable=True,
    ),
    Spec(
        "npu_indexer_loss_backward(Tensor grad_loss, Tensor index_score, Tensor indices,"
        " Tensor target, SymInt key_length, SymInt chunk_offset=0) -> Tensor",
        file="indexer_loss_backward",
        function="backward",
    ),
    Spec(
        "npu_sparse_lightning_indexer_grad_kl_loss(Tensor query, Tensor key, Tensor query_index,"
        " Tensor key_index, Tensor weights, Tensor sparse_indices, Tensor softmax_max,"
        " Tensor softmax_sum, float scale_value, *, Tensor? query_rope=None,"
        " Tensor? key_rope=None, SymInt[]? actual_seq_qlen=None, SymInt[]? actual_seq_klen=None,"
        f' str? layout="BSND", SymInt? sparse_mode=3, SymInt? pre_tokens={_ALL},'
        f" SymInt? next_tokens={_ALL}, Tensor? sinks=None) -> (Tensor, Tensor, Tensor, Tensor)",
        file="sparse_lightning_indexer_grad_kl_loss",
        ge="SparseLightningIndexerGradKLLoss",
    ),
    # ---------------------------------------------------------------------------- FlashAttention-2
    Spec(
        "npu_fused_attention(Tensor q, Tensor k, Tensor v, bool causal=False,"
        " float? sm_scale=None, *, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None,"
        " SymInt? window=None, bool deterministic=False) -> (Tensor, Tensor)",
        file="fused_attention",
        ge="FlashAttentionScore",
        onnx="FusedAttention",
        differentiable=True,
    ),
    Spec(
        "npu_fused_attention_backward(Tensor grad_o, Tensor q, Tensor k, Tensor v, Tensor o,"
        " Tensor lse, bool causal=False, float? sm_scale=None, *, Tensor? cu_seqlens_q=None,"
        " Tensor? cu_seqlens_k=None, SymInt? window=None, bool deterministic=False,"
        " Tensor? grad_lse=None) -> (Tensor, Tensor, Tensor)",
        file="fused_attention_backward",
        function="backward",
        ge="FlashAttentionScoreGrad",
    ),
    # ---------------------------------------------------------------------------- gated delta rule
    Spec(
        "npu_fused_sigmoid_gating_delta_rule_update(Tensor A_log, Tensor a, Tensor dt_bias,"
        " float softplus_beta, float softplus_threshold, Tensor q, Tensor k, Tensor v, Tensor b,"
        " Tensor(a!) initial_state_source, Tensor initial_state_indices, float? scale=None,"
        " bool use_qk_l2norm_in_kernel=False, Tensor? cu_seqlens=None, *,"
        ' str state_layout="kv", bool is_kda=False, bool disable_state_update=False,'
        " Tensor(b!)? intermediate_states=None, Tensor? intermediate_state_indices=None,"
        " Tensor? retrieve_parent_token=None) -> Tensor",
        file="fused_sigmoid_gating_delta_rule_update",
        onnx="FusedSigmoidGatingDeltaRuleUpdate",
    ),
    Spec(
        "npu_chunk_gated_delta_rule(Tensor query, Tensor key, Tensor value, *,"
        " Tensor? beta=None, Tensor? initial_state=None, Tensor? actual_seq_lengths=None,"
        " float? scale=None, Tensor? g=None) -> (Tensor, Tensor)",
        file="chunk_gated_delta_rule",
        ge="ChunkGatedDeltaRule",
        onnx="ChunkGatedDeltaRule",
        differentiable=True,
    ),
    Spec(
        "npu_chunk_gated_delta_rule_grad(Tensor query, Tensor key, Tensor value, Tensor d_out, *,"
        " Tensor? d_final_state=None, Tensor? beta=None, Tensor? initial_state=None,"
        " Tensor? actual_seq_lengths=None, float? scale=None, Tensor? g=None)"
        " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
        file="chunk_gated_delta_rule_grad",
        function="backward",
    ),
)

BY_NAME: dict[str, Spec] = {spec.name: spec for spec in SPECS}
