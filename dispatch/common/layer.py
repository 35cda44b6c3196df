# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The sparse-attention layer out of its stages, for every backend: what each stage takes of the
layer's arguments, and their order.  Both prologs write their caches before a stage reads one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from ..spec import UNLIMITED


class Stages(NamedTuple):
    """A backend's function of each stage; it takes the arguments of the op of that name."""

    mla_prolog: Callable[..., Any]
    indexer_prolog: Callable[..., Any]
    lightning_indexer: Callable[..., Any]
    sparse_flash_attention: Callable[..., Any]


@dataclass
class _Layer:
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

    def of_mla_prolog(self) -> dict[str, Any]:
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
            kv_cache=self.kv_cache,
            kr_cache=self.kr_cache,
            cache_index=self.cache_index,
            rmsnorm_epsilon_cq=self.rms_norm_eps,
            rmsnorm_epsilon_ckv=self.rms_norm_eps,
            rope_interleaved=self.rope_interleaved,
            weight_format=self.weight_format,
        )

    def of_attention(self, query: Tensor, query_rope: Tensor, indices: Tensor) -> dict[str, Any]:
        scale = self.softmax_scale
        if scale is None:
            scale = (self.w_uk.shape[1] + self.sin.shape[-1]) ** -0.5
        return dict(
            query=query,
            key=self.kv_cache,
            value=None,
            sparse_indices=indices,
            scale_value=scale,
            block_table=self.block_table,
            actual_seq_lengths_query=None,
            actual_seq_lengths_kv=self.act_seqs,
            query_rope=query_rope,
            key_rope=self.kr_cache,
            sparse_block_size=1,
            layout_query="BSND",
            layout_kv="PA_BSND",
            sparse_mode=3,
            pre_tokens=UNLIMITED,
            next_tokens=UNLIMITED,
            attention_mode=2,
            return_softmax_lse=False,
            sinks=None,
        )

    def _like(self, *size: int) -> Tensor:
        """What stands for [B, S, *size] made of `x`: its shape, dtype and device, no memory."""
        batch, rows, _hidden = self.x.shape
        one = self.x[..., :1].view(batch, rows, *(1 for _ in size))
        return one.expand(batch, rows, *size)

    def _queries(self) -> tuple[Tensor, Tensor]:
        heads, _plain, rank = self.w_uk.shape
        return self._like(heads, rank), self._like(heads, self.sin.shape[-1])


@dataclass
class Shared(_Layer):
    """Two of the four stages: another layer made the selection."""

    sparse_indices: Tensor

    def unsupported(self, stages: Stages) -> str | None:
        """The first reason of a stage; of the queries between them only shape and dtype matter."""
        chosen = self.of_attention(*self._queries(), self.sparse_indices)
        reason: str | None = stages.mla_prolog(**self.of_mla_prolog())
        return reason or stages.sparse_flash_attention(**chosen)

    def run(self, stages: Stages) -> Tensor:
        query, query_rope, _ = stages.mla_prolog(**self.of_mla_prolog())
        chosen = self.of_attention(query, query_rope, self.sparse_indices)
        out: Tensor = stages.sparse_flash_attention(**chosen)[0]
        return out


@dataclass
class Whole(_Layer):
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

    @property
    def index_heads(self) -> int:
        """Read off a weight that NZ does not pad."""
        return self.w_idx_qb.numel() // (self.gamma_cq.shape[0] * self.in_gamma_k.shape[0])

    def of_indexer_prolog(self, query_norm: Tensor) -> dict[str, Any]:
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
            index_k_cache=self.index_k_cache,
            cache_index=self.cache_index,
            ln_epsilon=self.layer_norm_eps,
            rope_interleaved=self.index_rope_interleaved,
            weight_format=self.weight_format,
        )

    def of_indexer(self, query_index: Tensor, weights: Tensor) -> dict[str, Any]:
        return dict(
            query=query_index,
            key=self.index_k_cache,
            weights=weights,
            actual_seq_lengths_query=None,
            actual_seq_lengths_key=self.act_seqs,
            block_table=self.block_table,
            layout_query="BSND",
            layout_key="PA_BSND",
            sparse_count=self.sparse_count,
            sparse_mode=3,
            pre_tokens=UNLIMITED,
            next_tokens=UNLIMITED,
            return_value=False,
        )

    def unsupported(self, stages: Stages) -> str | None:
        """The first reason of a stage; of what is between them only shape and dtype matter."""
        query_norm = self._like(self.gamma_cq.shape[0])
        heads, size = self.index_heads, self.in_gamma_k.shape[0]
        scored = self.of_indexer(self._like(heads, size), self._like(heads))
        chosen = self.of_attention(*self._queries(), self._like(1, self.sparse_count))
        reason: str | None = stages.mla_prolog(**self.of_mla_prolog())
        reason = reason or stages.indexer_prolog(**self.of_indexer_prolog(query_norm))
        reason = reason or stages.lightning_indexer(**scored)
        return reason or stages.sparse_flash_attention(**chosen)

    def run(self, stages: Stages) -> tuple[Tensor, Tensor]:
        """(the layer's output, the positions that it attends to)"""
        query, query_rope, query_norm = stages.mla_prolog(**self.of_mla_prolog())
        query_index, weights = stages.indexer_prolog(**self.of_indexer_prolog(query_norm))
        indices: Tensor = stages.lightning_indexer(**self.of_indexer(query_index, weights))[0]
        chosen = self.of_attention(query, query_rope, indices)
        out: Tensor = stages.sparse_flash_attention(**chosen)[0]
        return out, indices
