# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Transformers' GLM-5.3-Flash inside `use()`: attention over latents without a rotary part, of
pools of tokens that an indexer chooses.

    c = RMSNorm(x W_dq)    pool w of m tokens: sum softmax_t(x_t W_g + ape) LayerNorm(x_t W_k)
    index: sum_h a[h] relu(q[h] . pool)    attention: the tokens of the best pools and the open one
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor
from typing_extensions import Unpack

from ..compression import npu_compressor
from ..dispatch.errors import NotSupported
from ..sparse_attention import (
    npu_lightning_indexer,
    npu_mla_prolog_pto,
    npu_sparse_flash_attention,
)
from .cached import Converted, RingLayer, attends, extent, taken_over
from .dsa import SharedAttentionWeights, check_format, format_of, shared_of
from .masks import WHERE, OncePerForward, Texts, padded
from .paged import PagesAndStates, Room, check_page, slots_of, token_positions

from transformers.cache_utils import Cache, DynamicIndexedLayer  # isort: skip  # as the others


class PoolLayerCaches(NamedTuple):
    """Of a layer; pools and states are None where it takes over another layer's selection."""

    kv: Tensor  # [pages, P, 1, R] latents
    kr: Tensor  # [pages, P, 1, 0]
    pools: Tensor | None  # [pages, P / m, 1, Di]
    states: Tensor | None  # [requests, ring, 2 Di]


class PoolCaches(PagesAndStates):
    """Pages of latents and of pools, which share a block table, and a ring of states a request.

    Args:
        config: of the text model.
        layers: numbers of layers with sparse attention.
        room: for what, see `Room`.
    """

    def __init__(self, config: Any, layers: list[int], **room: Unpack[Room]) -> None:
        m, size = config.index_kpool, config.index_head_dim
        super().__init__(m, room)
        self.layers = []
        for layer in layers:
            latents = self.pool(self.page_size, config.kv_lora_rank), self.pool(self.page_size, 0)
            caches = PoolLayerCaches(*latents, None, None)
            if config.indexer_types[layer] != "shared":
                pools = self.pool(self.page_size // m, size)
                caches = caches._replace(pools=pools, states=self.states(m, 2 * size))
            self.layers.append(caches)
        self.reserve(room["capacity"])


class _PoolLayer(RingLayer):  # type: ignore[no-untyped-call]
    model = "GLM-5.3"

    def __init__(self, caches: PoolCaches, index: int) -> None:
        super().__init__(caches, index, _attended)


class _State(NamedTuple):
    module: Any
    w: SharedAttentionWeights
    caches: PoolCaches
    pools: PoolLayerCaches
    block_table: Tensor


def _chosen(s: _State, x: Tensor, query_norm: Tensor, lengths: Tensor) -> Tensor:
    """Pools [B, S, 1, k + 1] of every token; those that these tokens close are stored first."""
    index, pools = s.module.indexer, s.pools
    assert pools.pools is not None and pools.states is not None
    wide = pools.states.dtype
    npu_compressor(
        x,
        index.wk.weight.to(x.dtype),
        index.index_kpool_compress_gate.to(x.dtype),
        pools.states,
        index.index_kpool_compress_ape.to(wide),
        None,
        None,
        None,
        0,
        index.index_kpool,
        state_block_table=s.caches.state_table,
        start_pos=lengths - x.shape[1],
        cache_mode=2,
        cmp_cache=pools.pools,
        cmp_block_table=s.block_table,
        return_cmp_kv=False,
        ln_weight=index.k_norm.weight.to(wide),
        ln_bias=index.k_norm.bias.to(wide),
        ln_eps=index.k_norm.eps,
    )
    query = index.wq_b(query_norm).unflatten(-1, (index.n_heads, index.head_dim))
    weights = index.weights_proj(x.to(index.weights_proj.weight.dtype)).to(x.dtype)
    chosen, _ = npu_lightning_indexer(
        query,
        pools.pools,
        weights,
        actual_seq_lengths_key=lengths,
        block_table=s.block_table,
        layout_key="PA_BSND",
        sparse_count=index.index_topk // index.index_kpool,
        cmp_ratio=index.index_kpool,
        select_tail=True,
    )
    return chosen


def _attended(
    state: tuple[Any, ...], x: Tensor, lengths: Tensor, there: Tensor, chosen: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(what the attention adds, the pools that it attends to)"""
    s = _State(*state)
    w = s.w
    positions = token_positions(lengths, x.shape[1])
    slots = slots_of(positions, s.block_table, s.caches.page_size)
    none = x.new_empty(*x.shape[:2], 0)
    query, _, query_norm = npu_mla_prolog_pto(
        x,
        *w.prolog,
        none,
        none,
        s.pools.kv,
        s.pools.kr,
        slots.where(there, -1),
        rmsnorm_epsilon_cq=w.options["rms_norm_eps"],
        rmsnorm_epsilon_ckv=w.options["rms_norm_eps"],
        weight_format=w.options["weight_format"],
    )
    if s.module.indexer is not None:
        chosen = _chosen(s, x, query_norm, lengths)
    elif chosen is None:
        raise ValueError(
            f"{WHERE}: `prev_topk_indices` is None, expected the selection that layer "
            f"{s.module.layer_idx} shares. Pass the third result of the layer before it."
        )
    latent, _, _ = npu_sparse_flash_attention(
        query,
        s.pools.kv,
        None,
        chosen,
        w.options["softmax_scale"],
        block_table=s.block_table,
        actual_seq_lengths_kv=lengths,
        sparse_block_size=s.module.config.index_kpool,
        layout_kv="PA_BSND",
    )
    return s.module.o_proj(w.values(latent)), chosen


def _weights(module: Any, weight_format: str | None) -> SharedAttentionWeights:
    index = module.indexer
    if index is not None and not (index.index_kpool > 1 and index.index_kpool_always_select_tail):
        raise NotSupported(
            f"{WHERE} chooses pools of 2 tokens or more and the open one; this model has "
            f"index_kpool={index.index_kpool}, index_kpool_always_select_tail="
            f"{index.index_kpool_always_select_tail}. Run it outside."
        )
    kind = format_of(module.q_a_proj.weight, weight_format)
    w = shared_of(module, dict(rope_interleaved=False), kind)
    if "weight_quant_mode" in w.options:
        raise NotSupported(
            f"{WHERE} serves GLM-5.3's projections in 16 or 32 bits, and these are of 8. "
            "Dequantize them."
        )
    return w


def _layers_of(config: Any) -> list[int]:
    return [i for i, kind in enumerate(config.layer_types) if kind != "linear_attention"]


def _taken_over(cache: Cache | None, module: Any, x: Tensor, options: dict[str, int]) -> _PoolLayer:
    """The layer's cache, after taking over a new one's layers of sparse attention, all at once."""
    numbers = [module.layer_idx] if cache is None else _layers_of(module.config)

    def made() -> list[_PoolLayer]:
        caches = PoolCaches(
            module.config,
            numbers,
            requests=x.shape[0],
            capacity=x.shape[1],
            dtype=x.dtype,
            device=x.device,
            **options,
        )
        return [_PoolLayer(caches, index) for index in range(len(numbers))]

    return taken_over(cache, module.layer_idx, numbers, DynamicIndexedLayer, made)


def _read(mask: Any, requests: int, tokens: int, valid: Tensor | None, cached: int) -> Texts:
    return padded(mask, requests, tokens, None if valid is None else valid[:, :cached])


def attention_forward(
    weight_format: str | None, page_size: int, drafts: int
) -> Callable[..., tuple[Tensor, None, Tensor | None]]:
    """The forward of `Glm5NextTextAttention`, which hands its selection on as a third result."""
    check_format(weight_format)
    check_page(page_size)
    converted = Converted(lambda layer, _: _weights(layer, weight_format))
    read, options = OncePerForward(_read), dict(page_size=page_size, drafts=drafts)

    @attends
    def forward(
        self: Any,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        prev_topk_indices: Tensor | None = None,
        **others: Any,
    ) -> tuple[Tensor, None, Tensor | None]:
        w = converted(self, hidden_states)
        layer = None if cache is None else _taken_over(cache, self, hidden_states, options)
        found = read(self.layer_idx, attention_mask, *extent(hidden_states, layer))
        x = found.gathered(hidden_states).contiguous()
        if layer is None:
            layer = _taken_over(None, self, x, options)
        tokens = hidden_states.shape[1]
        pools = layer.append(tokens)
        layer.valid = found.valid
        chosen = None if prev_topk_indices is None else found.gathered(prev_topk_indices)
        state = _State(self, w, layer.caches, pools, layer.caches.block_table)
        out, indices = layer.attend(tuple(state), x, found.lengths, found.there, chosen)
        out = found.vouched(found.scattered(out, tokens))
        return out, None, found.scattered(indices, tokens) if self.next_skip_topk else None

    return forward
