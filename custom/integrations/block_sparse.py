# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Transformers' MiniMax-M3 and Qwen4-Exp inside `use()`: grouped-query attention to the blocks of
positions that an indexer chooses.

    MiniMax-M3: a choice a head of keys, of blocks by the largest q . k in each
    Qwen4-Exp: one choice, of pools of m tokens by sum_h relu(q[h] . pool), and the open one;
               pool = RoPE(RMSNorm(mean of x_t W_k)) at its first token

Blocks begin with each text: padding in front of it moves none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Unpack

from ..block_sparse import npu_block_indexer, npu_sparse_attention_score
from ..compression import entry_positions, npu_compressor
from ..dispatch.common import paged
from ..dispatch.errors import NotSupported
from ..sparse_attention import npu_lightning_indexer
from .cached import PagedLayer, RingLayer, attends, extent, taken_over
from .masks import WHERE, OncePerForward, Texts, check_positions, texts, unmasked, without_gaps
from .paged import PagesAndStates, Room, check_page, slots_of, token_positions

from transformers.cache_utils import Cache, DynamicIndexedLayer  # isort: skip  # as the others
from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl  # isort: skip
from transformers.models.qwen4_exp import modeling_qwen4_exp  # isort: skip

# their functions are not typed
_m3: Any = modeling_minimax_m3_vl
_rotated: Any = modeling_qwen4_exp.apply_rotary_pos_emb  # both models': the first channels, halves


class BlockLayerCaches(NamedTuple):
    """Of a layer of MiniMax-M3."""

    key: Tensor  # [pages, P, 1, Nk D]
    value: Tensor  # [pages, P, 1, Nk D]
    index_key: Tensor  # [pages, P, 1, Di]


class MeanLayerCaches(NamedTuple):
    """Of a layer of Qwen4-Exp; angles are None but in the first one, for all."""

    key: Tensor  # [pages, P, 1, Nk D]
    value: Tensor  # [pages, P, 1, Nk D]
    index_key: Tensor  # [pages, P / m, 1, Di] of pools
    states: Tensor  # [requests, ring, Di]
    angles: Tensor | None  # [pages, P, 1, 2 Dr], cosines and sines of every token


class _Caches(PagesAndStates):
    """Of `layers` layers."""

    def __init__(self, config: Any, layers: int, rotary: int, **room: Unpack[Room]) -> None:
        m = _pool_of(config)
        super().__init__(m or 1, room)
        head = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
        page, width = self.page_size, config.num_key_value_heads * head

        def layer(number: int) -> BlockLayerCaches | MeanLayerCaches:
            key, value = self.pool(page, width), self.pool(page, width)
            if m is None:
                return BlockLayerCaches(key, value, self.pool(page, config.index_head_dim))
            size = config.indexer_head_dim
            angles = None if number else self.pool(page, 2 * rotary)
            index = self.pool(page // m, size)
            return MeanLayerCaches(key, value, index, self.states(m, size), angles)

        self.layers = [layer(number) for number in range(layers)]
        self.reserve(room["capacity"])


def _pool_of(config: Any) -> int | None:
    """Tokens of a pool, of Qwen4-Exp."""
    return getattr(config, "indexer_compress_ratio", None)


class _State(NamedTuple):
    module: Any
    caches: _Caches
    pools: Any
    angles: Tensor | None
    block_table: Tensor


def _heads(projected: Tensor, norm: Any) -> Tensor:
    """[B, S, N, D] of rows, each head normed."""
    out: Tensor = norm(projected.unflatten(-1, (-1, norm.weight.shape[0])))
    return out


def _attended(
    s: _State,
    query: Tensor,
    rows: dict[str, Tensor],
    chosen: Callable[[], Tensor],
    block: int,
    lengths: Tensor,
    there: Tensor,
) -> Tensor:
    """[B, S, N D] of query [B, S, N, D] and the blocks [Nk or 1, B S, K] that are chosen once the
    new `rows` are in their pages."""
    requests, tokens, _, size = query.shape
    positions = token_positions(lengths, tokens)
    slots = slots_of(positions, s.block_table, s.caches.page_size).where(there, -1).flatten()
    pools = s.pools._asdict() | dict(angles=s.angles)
    for name, each in rows.items():
        paged.overwrite(pools[name], slots, each.reshape(requests * tokens, -1))
    key, value = (each.unflatten(-1, (-1, size))[:, :, 0] for each in s.pools[:2])
    select_idx = chosen()
    out = npu_sparse_attention_score(
        query.flatten(0, 1),
        key,
        value,
        select_idx,
        s.block_table,
        actual_seq_lengths=torch.full_like(lengths, tokens),
        actual_seq_lengths_kv=lengths,
        num_key_value_heads=key.shape[2],
        scale_value=s.module.scaling,
        block_size=block,
        top_k=select_idx.shape[-1],
    )
    return out.view(requests, tokens, -1)


def _m3_attended(
    state: tuple[Any, ...], x: Tensor, cos: Tensor, sin: Tensor, lengths: Tensor, there: Tensor
) -> Tensor:
    s = _State(*state)
    m, index = s.module, s.module.indexer
    query, key = _rotated(
        _heads(m.q_proj(x), m.q_norm), _heads(m.k_proj(x), m.k_norm), cos, sin, unsqueeze_dim=2
    )
    index_query, index_key = _rotated(
        _heads(index.q_proj(x), index.q_norm),
        _heads(index.k_proj(x), index.k_norm),
        cos[..., : index.head_dim],
        sin[..., : index.head_dim],
        unsqueeze_dim=2,
    )

    def chosen() -> Tensor:
        blocks, _ = npu_block_indexer(
            index_query.flatten(0, 1),
            s.pools.index_key,
            s.block_table,
            actual_seq_lengths=torch.full_like(lengths, x.shape[1]),
            actual_seq_lengths_key=lengths,
            block_size=index.block_size,
            top_k=index.topk_blocks,
            local_blocks=index.local_blocks,
        )
        return blocks

    rows = dict(key=key, value=m.v_proj(x), index_key=index_key)
    out = _attended(s, query, rows, chosen, index.block_size, lengths, there)
    projected: Tensor = m.o_proj(out)
    return projected


def _qwen4_attended(
    state: tuple[Any, ...], x: Tensor, cos: Tensor, sin: Tensor, lengths: Tensor, there: Tensor
) -> Tensor:
    s = _State(*state)
    m, index = s.module, s.module.indexer
    query, gate = m.q_proj(x).unflatten(-1, (-1, 2 * m.head_dim)).chunk(2, -1)
    query, key = _rotated(m.q_norm(query), _heads(m.k_proj(x), m.k_norm), cos, sin, unsqueeze_dim=2)

    def chosen() -> Tensor:
        return _pools_chosen(s, x, cos, sin, lengths)[:, :, 0].flatten(0, 1)[None]

    rows = dict(key=key, value=m.v_proj(x))
    if s.pools.angles is not None:
        rows["angles"] = torch.cat([cos, sin], -1)
    out = _attended(s, query, rows, chosen, index.compress_ratio, lengths, there)
    projected: Tensor = m.o_proj(out * gate.flatten(2).sigmoid())
    return projected


def _pools_chosen(s: _State, x: Tensor, cos: Tensor, sin: Tensor, lengths: Tensor) -> Tensor:
    """Pools [B, S, 1, k + 1] of every token; those that these tokens close are stored first."""
    index, pools, tokens = s.module.indexer, s.pools, x.shape[1]
    ratio, size, rotary = index.compress_ratio, index.index_head_dim, cos.shape[-1]
    first = entry_positions(lengths, tokens, ratio)
    assert s.angles is not None
    slots = slots_of(first, s.block_table, s.caches.page_size).long()
    angles = paged.gather(s.angles, slots, cos.dtype)
    split = index.index_n_heads * size
    of_queries, of_keys = index.index_qk_proj.weight.to(x.dtype).split([split, size])
    wide = pools.states.dtype
    npu_compressor(
        x,
        of_keys,
        None,
        pools.states,
        None,
        1 + index.k_layernorm.weight.to(wide),
        angles[..., rotary:],
        angles[..., :rotary],
        rotary,
        ratio,
        state_block_table=s.caches.state_table,
        start_pos=lengths - tokens,
        norm_eps=index.k_layernorm.eps,
        rotary_mode=1,
        cache_mode=2,
        cmp_cache=pools.index_key,
        cmp_block_table=s.block_table,
        return_cmp_kv=False,
        rope_slice="first",
    )
    query = _heads(torch.nn.functional.linear(x, of_queries), index.q_layernorm)
    chosen, _ = npu_lightning_indexer(
        _rotated(query, cos=cos, sin=sin, unsqueeze_dim=2),
        pools.index_key,
        x.new_ones(*x.shape[:2], index.index_n_heads),
        actual_seq_lengths_key=lengths,
        block_table=s.block_table,
        layout_key="PA_BSND",
        sparse_count=index.block_topk,
        cmp_ratio=ratio,
        select_tail=True,
    )
    return chosen


class _BlockLayer(PagedLayer):  # type: ignore[no-untyped-call]
    def __init__(self, caches: _Caches, index: int) -> None:
        super().__init__(caches, index, _m3_attended)


class _MeanLayer(RingLayer):  # type: ignore[no-untyped-call]
    model = "Qwen4-Exp"
    # Transformers 5.24 keeps the positions of all tokens here; their angles are in pages
    indexer_position_ids = property(lambda self: None, lambda self, positions: None)

    def __init__(self, caches: _Caches, index: int) -> None:
        super().__init__(caches, index, _qwen4_attended)


def _check_m3(module: Any) -> None:
    heads, shared = module.indexer.num_heads, module.config.num_key_value_heads
    if heads not in (1, shared):
        raise NotSupported(
            f"{WHERE} takes a choice of blocks for each head of keys, or one for all; this model "
            f"has index_n_heads={heads} beside num_key_value_heads={shared}. Run it outside."
        )


class _Model(NamedTuple):
    attention: Any
    layer: type[_BlockLayer] | type[_MeanLayer]
    theirs: Any  # what a new cache has for such a layer
    check: Callable[[Any], None]


M3 = _Model(_m3.MiniMaxM3VLAttention, _BlockLayer, _m3.MiniMaxM3VLSparseCacheLayer, _check_m3)
QWEN4 = _Model(
    modeling_qwen4_exp.Qwen4ExpTextAttention, _MeanLayer, DynamicIndexedLayer, lambda module: None
)


def _read(
    mask: Any,
    requests: int,
    tokens: int,
    valid: Tensor | None,
    cached: int,
    position_ids: Tensor | None,
    like: Tensor,
    has_states: bool,
) -> Texts:
    before = None if valid is None else valid[:, :cached]
    if mask is None:
        found = unmasked(requests, tokens, before, like.device)
    else:
        found = texts(mask, requests, tokens, before)
    if has_states and cached:
        found = without_gaps(found)
    return check_positions(found, position_ids, cached)


def _layers_of(config: Any) -> list[int]:
    plain = ("full_attention", "linear_attention")
    return [i for i, kind in enumerate(config.layer_types) if kind not in plain]


def attention_forward(of: _Model, page_size: int, drafts: int) -> Callable[..., Any]:
    """The forward of `of.attention`; a layer that chooses nothing keeps the model's own."""
    check_page(page_size)
    own, read = of.attention.forward, OncePerForward(_read)

    def taken(cache: Cache | None, module: Any, x: Tensor, rotary: int) -> PagedLayer:
        numbers = [module.layer_idx] if cache is None else _layers_of(module.config)

        def made() -> list[Any]:
            caches = _Caches(
                module.config,
                len(numbers),
                rotary,
                requests=x.shape[0],
                capacity=x.shape[1],
                page_size=page_size,
                drafts=drafts,
                dtype=x.dtype,
                device=x.device,
            )
            return [of.layer(caches, index) for index in range(len(numbers))]

        layer: PagedLayer = taken_over(cache, module.layer_idx, numbers, of.theirs, made)
        return layer

    @attends
    def selected(
        self: Any,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        position_ids: Tensor | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        requests, tokens, _hidden = hidden_states.shape
        of.check(self)
        # Qwen4-Exp hands over the angles of the cached tokens too
        cos, sin = (
            each[:, -tokens:].expand(requests, -1, -1).contiguous() for each in position_embeddings
        )
        layer = None if cache is None else taken(cache, self, hidden_states, cos.shape[-1])
        given = position_ids, position_embeddings[0], of.layer is _MeanLayer
        found = read(self.layer_idx, attention_mask, *extent(hidden_states, layer), *given)
        x, cos, sin = (found.gathered(each) for each in (hidden_states, cos, sin))
        if layer is None:
            layer = taken(None, self, x, cos.shape[-1])
        else:
            found.refuse_documents()
        pools = layer.append(tokens)
        layer.valid = found.valid
        angles = getattr(layer.caches.layers[0], "angles", None)
        state = _State(self, layer.caches, pools, angles, layer.caches.block_table)
        out = layer.attend(tuple(state), x.contiguous(), cos, sin, found.lengths, found.there)
        return found.vouched(found.scattered(out, tokens)), None

    def forward(self: Any, *args: Any, **options: Any) -> Any:
        return (own if self.indexer is None else selected)(self, *args, **options)

    return forward
