# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""DeepSeek-V4's attention layer out of its stages, for every backend: what each stage takes of the
layer's arguments, and their order.  Rows and entries are written before attention reads one.

Index queries for keys of 8 bits are transformed where they are quantized: rounded once less.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from . import compressed, nz, quantized
from .layer import Given, Stage, of_indexer, stand_in


class Stages(NamedTuple):
    """A backend's function of each stage; it takes the arguments of the op of that name."""

    sharedkv_prolog: Stage
    compressor: Stage
    quantize_index_query: Stage
    lightning_indexer: Stage
    quant_lightning_indexer: Stage
    sparse_attn_sharedkv: Stage
    kv_quant_sparse_attn_sharedkv: Stage
    grouped_o_proj: Stage
    turned_back: Stage
    """Of attn_out, rope_sin, rope_cos: what the output projection multiplies."""


@dataclass
class Layer:
    """By the names of the schema."""

    x: Tensor
    w_dq: Tensor
    w_uq: Tensor
    w_kv: Tensor
    gamma_cq: Tensor
    gamma_kv: Tensor
    sinks: Tensor | None
    sin: Tensor
    cos: Tensor
    ori_kv: Tensor
    ori_block_table: Tensor
    act_seqs: Tensor
    seqused: Tensor | None
    cmp_ratio: int
    w_cmp_kv: Tensor | None
    w_cmp_gate: Tensor | None
    cmp_ape: Tensor | None
    gamma_cmp: Tensor | None
    cmp_sin: Tensor | None
    cmp_cos: Tensor | None
    cmp_state: Tensor | None
    state_block_table: Tensor | None
    cmp_kv: Tensor | None
    cmp_block_table: Tensor | None
    w_idx_qb: Tensor | None
    w_idx_proj: Tensor | None
    w_idx_kv: Tensor | None
    w_idx_gate: Tensor | None
    idx_ape: Tensor | None
    gamma_idx: Tensor | None
    idx_state: Tensor | None
    idx_k: Tensor | None
    idx_k_scale: Tensor | None
    sparse_count: int
    w_o_a: Tensor | None
    w_o_b: Tensor | None
    softmax_scale: float | None
    rms_norm_eps: float
    ori_win_left: int
    state_mode: int
    weight_format: str
    kv_kind: str
    index_kind: str
    index_hadamard: bool
    hadamard_round: str
    weight_quant_mode: int
    dequant_scale_w_dq: Tensor | None
    dequant_scale_w_uq: Tensor | None
    dequant_scale_w_kv: Tensor | None
    dequant_scale_w_idx_qb: Tensor | None
    dequant_scale_w_o_a: Tensor | None
    dequant_scale_w_o_b: Tensor | None

    @property
    def kv_quantized(self) -> bool:
        """Window rows and entries are of 584 bytes."""
        return self.kv_kind != "none"

    @property
    def index_quantized(self) -> bool:
        """The index keys are of 8 bits."""
        return self.index_kind != "none"

    def of_prolog(self) -> Given:
        return dict(
            token_x=self.x,
            w_dq=self.w_dq,
            w_uq=self.w_uq,
            w_kv=self.w_kv,
            gamma_cq=self.gamma_cq,
            gamma_kv=self.gamma_kv,
            rope_sin=self.sin,
            rope_cos=self.cos,
            ori_kv=self.ori_kv,
            ori_block_table=self.ori_block_table,
            act_seqs=self.act_seqs,
            seqused=self.seqused,
            w_idx_qb=self.w_idx_qb,
            w_idx_proj=self.w_idx_proj,
            rms_norm_eps=self.rms_norm_eps,
            weight_format=self.weight_format,
            kv_kind=self.kv_kind,
            index_hadamard=self.index_hadamard and not self.index_quantized,
            hadamard_round=self.hadamard_round,
            weight_quant_mode=self.weight_quant_mode,
            dequant_scale_w_dq=self.dequant_scale_w_dq,
            dequant_scale_w_uq=self.dequant_scale_w_uq,
            dequant_scale_w_kv=self.dequant_scale_w_kv,
            dequant_scale_w_idx_qb=self.dequant_scale_w_idx_qb,
        )

    def _of_compressor(self, start: Tensor, **own: Any) -> Given:
        return own | dict(
            x=self.x,
            rope_sin=self.cmp_sin,
            rope_cos=self.cmp_cos,
            rope_head_dim=self.sin.shape[-1],
            cmp_ratio=self.cmp_ratio,
            state_block_table=self.state_block_table,
            cu_seqlens=None,
            seqused=self.seqused,
            start_pos=start,
            norm_eps=self.rms_norm_eps,
            rotary_mode=compressed.PAIRS,
            cache_mode=self.state_mode,
            cmp_block_table=self.cmp_block_table,
            hadamard_round=self.hadamard_round,
            return_cmp_kv=False,
            ln_weight=None,
            ln_bias=None,
            ln_eps=0.0,
            rope_slice=compressed.LAST,
            coff=own["wkv"].shape[0] // own["norm_weight"].shape[0],
        )

    def of_entries(self, start: Tensor) -> Given:
        return self._of_compressor(
            start,
            wkv=self.w_cmp_kv,
            wgate=self.w_cmp_gate,
            state_cache=self.cmp_state,
            ape=self.cmp_ape,
            norm_weight=self.gamma_cmp,
            cmp_cache=self.cmp_kv,
            cmp_scale_cache=None,
            kind=self.kv_kind,
            hadamard=False,
        )

    def of_index_keys(self, start: Tensor) -> Given:
        return self._of_compressor(
            start,
            wkv=self.w_idx_kv,
            wgate=self.w_idx_gate,
            state_cache=self.idx_state,
            ape=self.idx_ape,
            norm_weight=self.gamma_idx,
            cmp_cache=self.idx_k,
            cmp_scale_cache=self.idx_k_scale,
            kind=self.index_kind,
            hadamard=self.index_hadamard,
        )

    def of_quantization(self, query_index: Tensor, weights: Tensor) -> Given:
        return dict(
            q=query_index,
            weights=weights,
            kind=self.index_kind,
            fold=True,
            scale_format="ue8m0",
            index_hadamard=self.index_hadamard,
            hadamard_round=self.hadamard_round,
        )

    def of_indexer(self, query_index: Tensor, weights: Tensor) -> Given:
        """Of either indexer."""
        assert self.idx_k is not None
        return of_indexer(
            query_index,
            weights,
            quantized.index_cache(self.idx_k, self.idx_k_scale, self.index_kind),
            actual_seq_lengths_query=self.seqused,
            actual_seq_lengths_key=self.act_seqs,
            block_table=self.cmp_block_table,
            sparse_count=self.sparse_count,
            cmp_ratio=self.cmp_ratio,
        )

    def of_attention(self, query: Tensor, indices: Tensor | None) -> Given:
        """Over either kind of rows."""
        own = dict(kv_quant_mode=1, tile_size=quantized.V4_TILE, rope_head_dim=quantized.ROTARY)
        return (own if self.kv_quantized else {}) | dict(
            q=query,
            ori_kv=self.ori_kv,
            cmp_kv=self.cmp_kv,
            ori_sparse_indices=None,
            cmp_sparse_indices=indices,
            ori_block_table=self.ori_block_table,
            cmp_block_table=self.cmp_block_table,
            cu_seqlens_q=None,
            cu_seqlens_ori_kv=None,
            cu_seqlens_cmp_kv=None,
            seqused_q=self.seqused,
            seqused_kv=self.act_seqs,
            sinks=self.sinks,
            metadata=None,
            softmax_scale=self.softmax_scale,
            cmp_ratio=self.cmp_ratio,
            ori_mask_mode=4,
            cmp_mask_mode=3,
            ori_win_left=self.ori_win_left,
            ori_win_right=0,
            layout_q="BSND",
            layout_kv="PA_ND",
            return_softmax_lse=False,
            indices_are_slots=False,
            ori_topk_length=None,
            cmp_topk_length=None,
        )

    def of_output(self, out: Tensor) -> Given:
        return dict(
            attn_out=out,
            w_o_a=self.w_o_a,
            w_o_b=self.w_o_b,
            rope_sin=self.sin,
            rope_cos=self.cos,
            weight_format=self.weight_format,
            weight_quant_mode=self.weight_quant_mode,
            dequant_scale_w_o_a=self.dequant_scale_w_o_a,
            dequant_scale_w_o_b=self.dequant_scale_w_o_b,
        )

    def starts(self) -> Tensor:
        """The position of each request's first token."""
        return self.act_seqs - (self.x.shape[1] if self.seqused is None else self.seqused)

    def unsupported(self, reasons: Stages) -> str | None:
        """The first reason of a stage; of what is between them only shape and dtype matter."""
        heads = nz.columns_of(self.w_uq, self.weight_format) // self.gamma_kv.shape[0]
        query = stand_in(self.x, heads, self.gamma_kv.shape[0])
        asked: list[tuple[Stage, Given]] = [(reasons.sharedkv_prolog, self.of_prolog())]
        indices = None
        if self.cmp_kv is not None:
            asked.append((reasons.compressor, self.of_entries(self.act_seqs)))
        if self.w_idx_proj is not None and self.gamma_idx is not None:
            count = nz.columns_of(self.w_idx_proj, self.weight_format)
            index = stand_in(self.x, count, self.gamma_idx.shape[0])
            weights = stand_in(self.x, count)
            asked.append((reasons.compressor, self.of_index_keys(self.act_seqs)))
            if self.index_quantized:
                asked.append((reasons.quantize_index_query, self.of_quantization(index, weights)))
                one = self.x.new_empty(1, dtype=quantized.VALUES[self.index_kind])
                index = one.expand(index.shape)
            indexer = (
                reasons.quant_lightning_indexer
                if self.index_quantized
                else reasons.lightning_indexer
            )
            asked.append((indexer, self.of_indexer(index, weights)))
            indices = stand_in(self.x, 1, self.sparse_count)
        asked.append((self.attention(reasons), self.of_attention(query, indices)))
        asked.append((reasons.grouped_o_proj, self.of_output(query)))
        for reason_of, arguments in asked:
            reason: str | None = reason_of(**arguments)
            if reason is not None:
                return reason
        return None

    def attention(self, stages: Stages) -> Stage:
        if self.kv_quantized:
            return stages.kv_quant_sparse_attn_sharedkv
        return stages.sparse_attn_sharedkv

    def run(self, stages: Stages) -> Tensor:
        query, _, query_index, weights = stages.sharedkv_prolog(**self.of_prolog())
        indices = None
        if self.cmp_kv is not None:
            self.compress(stages)
            if self.idx_k is not None:
                indices = self.selected(stages, query_index, weights)
        out = self.attention(stages)(**self.of_attention(query, indices))[0]
        last, given = self.output(stages, out)
        done: Tensor = last(**given)
        return done

    def compress(self, stages: Stages) -> None:
        """The entries, and the index keys where there are any."""
        start = self.starts()
        stages.compressor(**self.of_entries(start))
        if self.idx_k is not None:
            stages.compressor(**self.of_index_keys(start))

    def selected(self, stages: Stages, query_index: Tensor, weights: Tensor) -> Tensor:
        indices: Tensor
        if self.index_quantized:
            given = self.of_quantization(query_index, weights)
            query_index, weights = stages.quantize_index_query(**given)
            indices = stages.quant_lightning_indexer(**self.of_indexer(query_index, weights))
        else:
            indices = stages.lightning_indexer(**self.of_indexer(query_index, weights))[0]
        return indices

    def output(self, stages: Stages, out: Tensor) -> tuple[Stage, Given]:
        """The last stage, and what it takes."""
        if self.w_o_a is None:
            return stages.turned_back, dict(attn_out=out, rope_sin=self.sin, rope_cos=self.cos)
        return stages.grouped_o_proj, self.of_output(out)
