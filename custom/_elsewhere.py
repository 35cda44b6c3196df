# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Functions of other projects by their names there: what they are here, and what differs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches

from .dispatch.registry import BY_NAME


@dataclass(frozen=True)
class Elsewhere:
    """`ours` is a path below `custom`, None where nothing here does it; `differs` is one clause."""

    of: str
    ours: str | None
    differs: str


def _same(of: str, ours: str | None, differs: str, *names: str) -> dict[str, Elsewhere]:
    return dict.fromkeys(names, Elsewhere(of, ours, differs))


_KERNELS = "integrations.kernels."
_FLA = "it takes fla's arguments and layouts ([B, S, N, D], states [B, Nv, Dk, Dv])"
_DENSE = "`softmax_scale` is `sm_scale`, `window_size=(w, 0)` is `window=w + 1`"
_FUSED = "it is a part of that op, and has none of its own"
_ONE = "theirs returns one tensor, ours a tuple whose [0] it is"

NAMES: dict[str, Elsewhere] = {
    # FlashAttention, PyTorch
    **_same(
        "FlashAttention",
        "npu_fused_attention",
        f"tensors are [B, N, S, D] (theirs by .transpose(1, 2)), {_DENSE}",
        *("flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func"),
    ),
    **_same(
        "FlashAttention",
        "npu_fused_attention",
        f"`max_seqlen_q` and `max_seqlen_k` are left out, {_DENSE}",
        "flash_attn_varlen_func",
        "flash_attn_varlen_kvpacked_func",
        "flash_attn_varlen_qkvpacked_func",
    ),
    **_same(
        "FlashAttention",
        None,
        "dense attention over pages is here for latents alone, npu_fused_infer_attention_score_v2",
        "flash_attn_with_kvcache",
    ),
    **_same(
        "PyTorch",
        "npu_fused_attention",
        "`is_causal` is `causal`, aligned at the last key, `scale` is `sm_scale`, and there is no "
        "`attn_mask`",
        *("scaled_dot_product_attention", "flex_attention"),
    ),
    # fla
    **{
        name: Elsewhere("fla", _KERNELS + name, f"{_FLA}; custom.{ours} is the op below")
        for name, ours in {
            "chunk_gated_delta_rule": "npu_chunk_gated_delta_rule",
            "fused_recurrent_gated_delta_rule": "npu_recurrent_gated_delta_rule",
            "chunk_kda": "npu_chunk_kda",
            "fused_recurrent_kda": "npu_recurrent_gated_delta_rule",
        }.items()
    },
    **_same(
        "fla",
        "npu_chunk_kda",
        "the gate is made inside, with use_gate_in_kernel=True",
        *("fused_kda_gate", "kda_gate_fwd"),
    ),
    **_same(
        "fla",
        "npu_gated_rms_norm",
        "`eps` is `epsilon`, and it is a function of (x, gate, weight)",
        *("FusedRMSNormGated", "FusedRMSNormSwishGate", "rms_norm_gated", "RMSNormGated"),
    ),
    **_same(
        "fla",
        "npu_causal_conv1d",
        "the weight is [W, D] (theirs by .t()), states are [N, W - 1, D]",
        "ShortConvolution",
    ),
    **_same(
        "fla",
        None,
        "the rules here are the gated delta rule and KDA: npu_chunk_gated_delta_rule, "
        "npu_chunk_kda",
        "chunk_delta_rule",
        "chunk_gla",
        "chunk_simple_gla",
        "chunk_rwkv7",
        "fused_recurrent_gla",
    ),
    **_same("fla", None, "F.normalize(x.float(), dim=-1) is PyTorch's", "l2norm", "l2norm_fwd"),
    # causal-conv1d has its names here, but for
    **_same(
        "causal-conv1d",
        "causal_conv1d_fn",
        "with `query_start_loc` and return_final_states=True it gives these states",
        "causal_conv1d_varlen_states",
    ),
    # FlashMLA
    **_same(
        "FlashMLA",
        "flash_mla_sparse_fp8",
        "it takes (q, rows, indices, sm_scale) with is_fp8_kvcache's rows of 656 bytes; without "
        "`indices` it is dense, npu_fused_infer_attention_score_v2",
        "flash_mla_with_kvcache",
    ),
    **_same(
        "FlashMLA",
        "npu_sparse_flash_attention",
        "the rotary part goes apart (query_rope=q[..., 512:]), and lse is max + log(sum)",
        "flash_mla_sparse_fwd",
    ),
    **_same("FlashMLA", None, "no metadata is needed: leave it out", "get_mla_metadata"),
    # DeepGEMM
    **_same(
        "DeepGEMM",
        "npu_quant_lightning_indexer",
        "it gives the selected positions, not the logits; custom.index_cache_views cuts their "
        "cache, and query_dequant_scale is None",
        *("fp8_paged_mqa_logits", "fp8_mqa_logits"),
    ),
    **_same(
        "DeepGEMM", None, "no metadata is needed: leave it out", "get_paged_mqa_logits_metadata"
    ),
    # FlashInfer, vLLM, SGLang
    **_same(
        "FlashInfer",
        "merge_states",
        "the parts are stacked, [P, .., D] and [P, ..], and lse is the natural logarithm",
        *("merge_state", "merge_state_in_place"),
    ),
    **_same(
        "vLLM",
        "merge_states",
        "the parts are stacked, [P, T, N, D] and [P, T, N], and the result is returned",
        *("merge_attn_states", "merge_state_v2"),
    ),
    **_same(
        "vLLM",
        "npu_index_cache_write",
        "values and scales are two views of the cache, custom.index_cache_views cuts them",
        "indexer_k_quant_and_cache",
    ),
    **_same(
        "vLLM",
        "npu_latent_cache_write",
        "it writes rows of 8 bits; those of 16 bits are written by the prologs",
        *("concat_and_cache_mla", "concat_and_cache_ds_mla"),
    ),
    **_same(
        "vLLM",
        "npu_fused_sigmoid_gating_delta_rule_update",
        "the gate is made inside of the step",
        "fused_gdn_gating",
    ),
    # torch_npu, vllm-ascend, cann-recipes
    **_same(
        "torch_npu",
        "npu_fused_attention",
        "BNSD, or packed with cu_seqlens_q; no `head_num`, `scale` is `sm_scale`, sparse_mode=3 is "
        "causal=True; it returns o alone, without `keep_prob`, `atten_mask` and `pse`",
        *("npu_fusion_attention", "npu_fusion_attention_v2", "npu_prompt_flash_attention"),
    ),
    **_same(
        "torch_npu",
        "npu_fused_infer_attention_score_v2",
        "over paged latents (MLA): `num_heads` is num_query_heads, `scale` softmax_scale, "
        "`actual_seq_lengths` actual_seq_qlen and `softmax_lse_flag` return_softmax_lse",
        "npu_fused_infer_attention_score",
    ),
    **_same(
        "torch_npu",
        None,
        "dense attention over pages of keys and values stays torch_npu's; over latents it is "
        "npu_fused_infer_attention_score_v2",
        "npu_incre_flash_attention",
        "npu_paged_attention",
        "_npu_paged_attention",
        "npu_multi_head_latent_attention",
    ),
    **_same(
        "cann-recipes",
        "npu_quant_lightning_indexer",
        "the same with query_quant_mode=0 and key_quant_mode=0 by position",
        "npu_lightning_indexer_quant",
    ),
    **_same("cann-recipes", "npu_lightning_indexer", _ONE, "npu_lightning_indexer_pto"),
    **_same(
        "cann-recipes",
        "npu_kv_quant_sparse_flash_attention",
        'quant modes are 2, key_dequant_scale=None, row_layout="nope_rope_scale"',
        "npu_sparse_flash_attention_antiquant",
    ),
    **_same(
        "torch_npu",
        "npu_mla_prolog_v3",
        "the same arguments; cache_index by keyword",
        *("npu_mla_prolog", "npu_mla_prolog_v2"),
    ),
    **_same(
        "torch_npu",
        "npu_mla_prolog_v3",
        _FUSED,
        "npu_interleave_rope",
        "npu_rotary_mul",
        "npu_apply_rotary_pos_emb",
        "npu_kv_rmsnorm_rope_cache",
        "npu_rms_norm",
        "npu_mla_process",
    ),
    **_same(
        "torch_npu",
        "npu_index_cache_write",
        'of index keys, with kind="int8"; of index queries it is custom.quantize_index_query',
        *("npu_dynamic_quant", "npu_dynamic_quant_asymmetric"),
    ),
    **_same(
        "torch_npu",
        "npu_mla_prolog_v3",
        "the prologs write the caches themselves; of 8 bits npu_index_cache_write does",
        "npu_scatter_nd_update_",
        "npu_scatter_nd_update",
        "scatter_update_",
        "npu_scatter_pa_kv_cache",
        "_npu_reshape_and_cache",
    ),
    **_same(
        "torch_npu", "to_nz", "of a format alone: 29 (FRACTAL_NZ) of [K, N]", "npu_format_cast"
    ),
    **_same(
        "torch_npu",
        None,
        "it is neither attention nor linear attention, and stays torch_npu's",
        "npu_add_rms_norm",
        "npu_quant_matmul",
        "npu_weight_quant_batchmatmul",
        "npu_grouped_matmul",
        "npu_swiglu",
        "npu_moe_gating_top_k",
        "npu_moe_init_routing_v2",
        "npu_moe_distribute_dispatch_v2",
        "npu_moe_distribute_combine_v2",
        "npu_moe_finalize_routing",
        "npu_gather_selection_kv_cache",
    ),
}

# functions that are not named as the op that they call
_WRAPPERS = {
    "npu_indexer_loss": "compute_index_loss_sparse",
    "npu_compressor_dense": "npu_compressor",
}


def where(name: str, public: Iterable[str]) -> str:
    """Where what is called `name` is, in one sentence; `public` are the names of `custom`."""
    names = [*public]
    if found := NAMES.get(name):
        if found.ours is None:
            return f"custom has no `{name}` ({found.of}): {found.differs}."
        return f"custom has no `{name}` ({found.of}). Use custom.{found.ours}: {found.differs}."
    if f"npu_{name}" in names:
        return f"custom has no `{name}`. Its name is custom.npu_{name}."
    if (op := name if name in BY_NAME else f"npu_{name}") in BY_NAME:
        wrapper = _WRAPPERS.get(op, op.removeprefix("npu_"))
        instead = f"Use custom.{wrapper}, or" if wrapper in names else "Autograd calls it; it is"
        return f"custom has no function `{name}`. {instead} torch.ops.custom.{op}."
    near = get_close_matches(name, NAMES, 1, 0.9) or get_close_matches(name, names)
    if not near:
        return f"custom has no `{name}`. custom.__all__ lists what there is."
    return f"custom has no `{name}`. Did you mean {' or '.join(f'`{each}`' for each in near)}?"
