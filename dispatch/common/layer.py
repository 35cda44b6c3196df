# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The sparse-attention layer out of its stages, for every backend: what each stage takes of the
layer's arguments, and their order.  Both prologs write their caches before a stage reads one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..op_spec import UNLIMITED
from . import quantized

Stage = Callable[..., Any]
Given = dict[str, Any]  # a stage's arguments, by name


class Stages(NamedTuple):
    """A backend's function of each stage; it takes the arguments of the op of that name."""

    mla_prolog: Stage
    indexer_prolog: Stage
    lightning_indexer: Stage
    sparse_flash_attention: Stage
    quant_lightning_indexer: Stage
    kv_quant_sparse_flash_attention: Stage


def stand_in(x: Tensor, *size: int) -> Tensor:
    """What stands for [B, S, *size] made of `x`: its shape, dtype and device, no memory."""
    batch, rows, _hidden = x.shape
    return x[..., :1].view(batch, rows, *(1 for _ in size)).expand(batch, rows, *size)


def of_indexer(
    query: Tensor, weights: Tensor, cache: tuple[Tensor, Tensor | None], **own: Any
) -> Given:
    """The arguments of either indexer: of that for 8 bits where the keys have scales.  Those of its
    queries are in `weights`."""
    key, scales = cache
    kind: Given = dict(return_value=False)
    if scales is not None:
        kind = dict(
            query_dequant_scale=None,
            key_dequant_scale=scales,
            query_quant_mode=0,
            key_quant_mode=0,
            query_dtype=None,
            key_dtype=None,
        )
    return dict(
        query=query,
        key=key,
        weights=weights,
        layout_query="BSND",
        layout_key="PA_BSND",
        sparse_mode=3,
        select_tail=False,
        pre_tokens=UNLIMITED,
        next_tokens=UNLIMITED,
        **kind,
        **own,
    )


@dataclass
class Layer:
    """What both layers take, by the names of their schemas."""

    x: Tensor
    w_dq: Tensor
    w_uq_qr: Tensor
    w_uk: Tensor
    w_dkv_kr: Tensor
    gamma_cq: Tensor
    gamma_ckv: Tensor
    sin: Tensor
    cos: Tensor
    cache_index: Tensor
    kv_cache: Tensor
    kr_cache: Tensor
    block_table: Tensor
    act_seqs: Tensor
    softmax_scale: float | None
    rms_norm_eps: float
    rope_interleaved: bool
    weight_format: str
    dequant_scale_w_dq: Tensor | None
    dequant_scale_w_uq_qr: Tensor | None
    dequant_scale_w_dkv_kr: Tensor | None
    smooth_scales_cq: Tensor | None
    k_nope_clip_alpha: Tensor | None
    weight_quant_mode: int
    kv_kind: str
    row_layout: str
    scale_format: str

    @property
    def kv_quantized(self) -> bool:
        """Latents and rotary keys are one cache of rows of 656 bytes."""
        return self.kv_kind != "none"

    def rows(self) -> Tensor:
        """That cache, as its values."""
        return self.kv_cache.view(quantized.VALUES[self.kv_kind])

    def of_mla_prolog(self) -> Given:
        return dict(
            token_x=self.x,
            weight_dq=self.w_dq,
            weight_uq_qr=self.w_uq_qr,
            weight_uk=self.w_uk,
            weight_dkv_kr=self.w_dkv_kr,
            rmsnorm_gamma_cq=self.gamma_cq,
            rmsnorm_gamma_ckv=self.gamma_ckv,
            rope_sin=self.sin,
            rope_cos=self.cos,
            kv_cache=self.rows() if self.kv_quantized else self.kv_cache,
            kr_cache=self.kr_cache,
            cache_index=self.cache_index,
            rmsnorm_epsilon_cq=self.rms_norm_eps,
            rmsnorm_epsilon_ckv=self.rms_norm_eps,
            rope_interleaved=self.rope_interleaved,
            weight_format=self.weight_format,
            dequant_scale_x=None,
            dequant_scale_w_dq=self.dequant_scale_w_dq,
            dequant_scale_w_uq_qr=self.dequant_scale_w_uq_qr,
            dequant_scale_w_dkv_kr=self.dequant_scale_w_dkv_kr,
            smooth_scales_cq=self.smooth_scales_cq,
            k_nope_clip_alpha=self.k_nope_clip_alpha,
            weight_quant_mode=self.weight_quant_mode,
            kv_cache_quant_mode=3 if self.kv_quantized else 0,
            query_quant_mode=0,
            ckvkr_repo_mode=int(self.kv_quantized),
            quant_scale_repo_mode=int(self.kv_quantized),
            tile_size=quantized.TILE,
            kv_cache_dtype=None,
            row_layout=self.row_layout,
            scale_format=self.scale_format,
        )

    def of_selected(self, indices: Tensor) -> Given:
        """What the attention takes, on either kind of cache."""
        scale = self.softmax_scale
        if scale is None:
            scale = (self.w_uk.shape[1] + self.sin.shape[-1]) ** -0.5
        return dict(
            sparse_indices=indices,
            scale_value=scale,
            block_table=self.block_table,
            actual_seq_lengths_query=None,
            actual_seq_lengths_kv=self.act_seqs,
            sparse_block_size=1,
            layout_query="BSND",
            layout_kv="PA_BSND",
            sparse_mode=3,
            pre_tokens=UNLIMITED,
            next_tokens=UNLIMITED,
            attention_mode=2,
            sinks=None,
        )

    def of_attention(self, query: Tensor, query_rope: Tensor, indices: Tensor) -> Given:
        return dict(
            query=query,
            key=self.kv_cache,
            value=None,
            query_rope=query_rope,
            key_rope=self.kr_cache,
            return_softmax_lse=False,
            **self.of_selected(indices),
        )

    def of_rows(self, query: Tensor, indices: Tensor) -> Given:
        """`query` is [.., N, R + Dr]."""
        rows = self.rows()
        return dict(
            query=query,
            key=rows,
            value=rows,
            key_quant_mode=2,
            value_quant_mode=2,
            key_dequant_scale=None,
            value_dequant_scale=None,
            quant_scale_repo_mode=1,
            tile_size=quantized.TILE,
            rope_head_dim=self.sin.shape[-1],
            key_dtype=None,
            value_dtype=None,
            row_layout=self.row_layout,
            **self.of_selected(indices),
        )

    def attended(
        self, stages: Stages, query: Tensor, query_rope: Tensor, indices: Tensor
    ) -> Tensor:
        out: Tensor
        if self.kv_quantized:
            both = torch.cat([query, query_rope], dim=-1)
            out = stages.kv_quant_sparse_flash_attention(**self.of_rows(both, indices))
        else:
            chosen = self.of_attention(query, query_rope, indices)
            out = stages.sparse_flash_attention(**chosen)[0]
        return out

    def unattended(self, stages: Stages, indices: Tensor) -> str | None:
        """Why the attention cannot run, or None."""
        heads, _plain, rank = self.w_uk.shape
        rotary = self.sin.shape[-1]
        reason: str | None
        if self.kv_quantized:
            query = stand_in(self.x, heads, rank + rotary)
            reason = stages.kv_quant_sparse_flash_attention(**self.of_rows(query, indices))
        else:
            queries = stand_in(self.x, heads, rank), stand_in(self.x, heads, rotary)
            reason = stages.sparse_flash_attention(**self.of_attention(*queries, indices))
        return reason


@dataclass
class Shared(Layer):
    """Two of the four stages: another layer made the selection."""

    sparse_indices: Tensor

    def unsupported(self, stages: Stages) -> str | None:
        """The first reason of a stage; of the queries between them only shape and dtype matter."""
        reason: str | None = stages.mla_prolog(**self.of_mla_prolog())
        return reason or self.unattended(stages, self.sparse_indices)

    def run(self, stages: Stages) -> Tensor:
        query, query_rope, _ = stages.mla_prolog(**self.of_mla_prolog())
        return self.attended(stages, query, query_rope, self.sparse_indices)


@dataclass
class Whole(Layer):
    """All four stages."""

    w_idx_qb: Tensor
    w_idx_k: Tensor
    w_idx_proj: Tensor
    in_gamma_k: Tensor
    in_beta_k: Tensor
    index_k_cache: Tensor
    layer_norm_eps: float
    sparse_count: int
    index_rope_interleaved: bool
    index_k_scale_cache: Tensor | None
    dequant_scale_w_idx_qb: Tensor | None
    dequant_scale_w_idx_k: Tensor | None
    index_weight_quant_mode: int
    index_kind: str
    index_hadamard: bool
    hadamard_round: str

    @property
    def index_heads(self) -> int:
        """Read off a weight that NZ does not pad."""
        return self.w_idx_qb.numel() // (self.gamma_cq.shape[0] * self.in_gamma_k.shape[0])

    @property
    def index_quantized(self) -> bool:
        """The index keys are of 8 bits."""
        return self.index_kind != "none"

    def index_cache(self) -> tuple[Tensor, Tensor | None]:
        return quantized.index_cache(self.index_k_cache, self.index_k_scale_cache, self.index_kind)

    def of_indexer_prolog(self, query_norm: Tensor) -> Given:
        keys, scales = self.index_cache()
        smooth = self.smooth_scales_cq if self.index_weight_quant_mode in (1, 2) else None
        return dict(
            token_x=self.x,
            query_norm=query_norm,
            weight_qb=self.w_idx_qb,
            weight_k=self.w_idx_k,
            weight_proj=self.w_idx_proj,
            ln_gamma_k=self.in_gamma_k,
            ln_beta_k=self.in_beta_k,
            rope_sin=self.sin,
            rope_cos=self.cos,
            index_k_cache=keys,
            cache_index=self.cache_index,
            ln_epsilon=self.layer_norm_eps,
            rope_interleaved=self.index_rope_interleaved,
            weight_format=self.weight_format,
            index_k_scale_cache=scales,
            dequant_scale_q_norm=None,
            dequant_scale_w_qb=self.dequant_scale_w_idx_qb,
            dequant_scale_w_k=self.dequant_scale_w_idx_k,
            smooth_scales_cq=smooth,
            weight_quant_mode=self.index_weight_quant_mode,
            kv_cache_quant_mode=3 if self.index_quantized else 0,
            index_hadamard=self.index_hadamard,
            hadamard_round=self.hadamard_round,
            scale_format=self.scale_format,
        )

    def of_indexer(self, query_index: Tensor, weights: Tensor) -> Given:
        """Of either indexer."""
        return of_indexer(
            query_index,
            weights,
            self.index_cache(),
            actual_seq_lengths_query=None,
            actual_seq_lengths_key=self.act_seqs,
            block_table=self.block_table,
            sparse_count=self.sparse_count,
            cmp_ratio=1,
        )

    def unsupported(self, stages: Stages) -> str | None:
        """The first reason of a stage; of what is between them only shape and dtype matter."""
        query_norm = stand_in(self.x, self.gamma_cq.shape[0])
        heads, size = self.index_heads, self.in_gamma_k.shape[0]
        query_index = stand_in(self.x, heads, size)
        if self.index_quantized:
            one = self.x.new_empty(1, dtype=quantized.VALUES[self.index_kind])
            query_index = one.expand(query_index.shape)
        scored = self.of_indexer(query_index, stand_in(self.x, heads))
        indexer = (
            stages.quant_lightning_indexer if self.index_quantized else stages.lightning_indexer
        )
        reason: str | None = stages.mla_prolog(**self.of_mla_prolog())
        reason = reason or stages.indexer_prolog(**self.of_indexer_prolog(query_norm))
        reason = reason or indexer(**scored)
        return reason or self.unattended(stages, stand_in(self.x, 1, self.sparse_count))

    def selected(self, stages: Stages, query_index: Tensor, weights: Tensor) -> Tensor:
        scored = self.of_indexer(query_index, weights)
        indices: Tensor
        if self.index_quantized:
            indices = stages.quant_lightning_indexer(**scored)
        else:
            indices = stages.lightning_indexer(**scored)[0]
        return indices

    def run(self, stages: Stages) -> tuple[Tensor, Tensor]:
        """(the layer's output, the positions that it attends to)"""
        query, query_rope, query_norm = stages.mla_prolog(**self.of_mla_prolog())
        query_index, weights = stages.indexer_prolog(**self.of_indexer_prolog(query_norm))
        indices = self.selected(stages, query_index, weights)
        return self.attended(stages, query, query_rope, indices), indices


def of(arguments: Mapping[str, Any]) -> Shared | Whole:
    return (Shared if "sparse_indices" in arguments else Whole)(**arguments)
