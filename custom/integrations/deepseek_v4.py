# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""DeepSeek-V4's attention on our ops: a layer's weights as they take them, and its caches.

A layer is of one of three kinds: `compress_rates` has no entry for its type (a window alone), all
closed entries are seen, or those that an indexer selects.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..compression import entry_positions, npu_compressor
from ..dispatch.errors import need
from ..shared_kv import npu_sparse_attn_sharedkv
from ..shared_kv_prolog import npu_grouped_o_proj_pto, npu_sharedkv_prolog_pto
from ..sparse_attention import npu_lightning_indexer
from .dsa import dequantised_linear, laid
from .masks import OncePerForward
from .paged import check_page, more_pages, more_room, token_positions

need("transformers.models.deepseek_v4", __name__, '"transformers>=5.17,<6"')

from transformers.models.deepseek_v4.modeling_deepseek_v4 import (  # noqa: E402
    DeepseekV4Attention,
    DeepseekV4RotaryEmbedding,
)

_SELECTING = "compressed_sparse_attention"
_RATIOS_OF_PAGES = (1, 2, 4, 8)  # entries of a page; else a multiple of 16


@dataclass(frozen=True)
class SparseAttentionV4Weights:
    """What the ops of a DeepSeek-V4 layer take of it, under the names of their arguments.

    `w_dq`, `w_uq`, `w_kv`, `w_idx_qb`, `w_idx_proj`, `w_o_a` and `w_o_b` are [K, N], NZ or
    row-major, `w_o_a` one for each group; `w_cmp_*`, `w_idx_kv` and `w_idx_gate` are rows, as
    nn.Linear has them.  `sinks`, `cmp_ape`, `gamma_cmp`, `idx_ape` and `gamma_idx` are float32.
    """

    w_dq: Tensor
    w_uq: Tensor
    w_kv: Tensor
    gamma_cq: Tensor
    gamma_kv: Tensor
    sinks: Tensor
    w_o_a: Tensor
    w_o_b: Tensor
    cmp_ratio: int  # 0: a window alone
    window: int
    rms_norm_eps: float
    softmax_scale: float
    sparse_count: int
    w_cmp_kv: Tensor | None = None
    w_cmp_gate: Tensor | None = None
    cmp_ape: Tensor | None = None
    gamma_cmp: Tensor | None = None
    w_idx_qb: Tensor | None = None
    w_idx_proj: Tensor | None = None
    w_idx_kv: Tensor | None = None
    w_idx_gate: Tensor | None = None
    idx_ape: Tensor | None = None
    gamma_idx: Tensor | None = None


@torch.no_grad()
def sparse_attention_v4_weights(
    module: nn.Module, weight_format: str = "nz", dtype: torch.dtype | None = None
) -> SparseAttentionV4Weights:
    """The ops' weights from the attention of a DeepSeek-V4 layer, of any of its three kinds.

    Args:
        module: a `DeepseekV4Attention`, layer.self_attn of the model.
        weight_format: "nz" makes FRACTAL_NZ weights where whole tiles hold them, "nd" row-major
            [K, N] ones.
        dtype: of activations; None: that of `q_a_proj`, bfloat16 where it is of 8 bits.

    Returns:
        `SparseAttentionV4Weights`.

    Raises:
        TypeError: `module` is something else.
        NotSupported: a projection has scales that are no checkpoint's.

    Projections of float8_e4m3fn with `weight_scale_inv`, a scale for 128 x 128 of float32 or
    float8_e8m0fnu as DeepSeek's checkpoints have it, are dequantised.
    """
    if type(module) is not DeepseekV4Attention:  # a subclass may compute anything
        raise TypeError(
            f"sparse_attention_v4_weights: `module` is of type {type(module).__name__}, expected "
            "DeepseekV4Attention. Pass layer.self_attn of a DeepSeek-V4 model."
        )
    m: Any = module
    own: torch.dtype = m.q_a_proj.weight.dtype
    kind = dtype or (own if own.itemsize > 1 else torch.bfloat16)
    wide = torch.float64 if kind is torch.float64 else torch.float32

    def rows(linear: nn.Linear) -> Tensor:
        return dequantised_linear(m, linear, kind).contiguous()

    def columns(linear: nn.Linear) -> Tensor:
        return laid(dequantised_linear(m, linear, kind).t(), weight_format).contiguous()

    def narrow(parameter: Tensor) -> Tensor:
        return parameter.detach().to(kind)

    def exact(parameter: Tensor) -> Tensor:
        return parameter.detach().to(wide)

    config, compressor = m.config, m.compressor
    by_group = dequantised_linear(m, m.o_a_proj, kind).unflatten(0, (config.o_groups, -1)).mT
    given: dict[str, Any] = {}
    if compressor is not None:
        given |= dict(
            w_cmp_kv=rows(compressor.kv_proj),
            w_cmp_gate=rows(compressor.gate_proj),
            cmp_ape=exact(compressor.position_bias),
            gamma_cmp=exact(compressor.kv_norm.weight),
        )
    if m.layer_type == _SELECTING:
        indexer = compressor.indexer
        given |= dict(
            w_idx_qb=columns(indexer.q_b_proj),
            w_idx_proj=columns(indexer.scorer.weights_proj),
            w_idx_kv=rows(indexer.kv_proj),
            w_idx_gate=rows(indexer.gate_proj),
            idx_ape=exact(indexer.position_bias),
            gamma_idx=exact(indexer.kv_norm.weight),
        )
    return SparseAttentionV4Weights(
        w_dq=columns(m.q_a_proj),
        w_uq=columns(m.q_b_proj),
        w_kv=columns(m.kv_proj),
        gamma_cq=narrow(m.q_a_norm.weight),
        gamma_kv=narrow(m.kv_norm.weight),
        sinks=exact(m.sinks),
        w_o_a=laid(by_group, weight_format).contiguous(),
        w_o_b=columns(m.o_b_proj),
        cmp_ratio=ratio_of(config, m.layer_idx),
        window=m.sliding_window,
        rms_norm_eps=config.rms_norm_eps,
        softmax_scale=m.scaling,
        sparse_count=config.index_topk,
        **given,
    )


def ratio_of(config: Any, layer: int) -> int:
    """Tokens of an entry of a layer; 0 where it has none."""
    ratio: int = config.compress_rates.get(config.layer_types[layer], 0)
    return ratio


class V4Pools(NamedTuple):
    """What one layer has cached; the ops update it in place."""

    ori_kv: Tensor  # [pages, P, 1, D] window rows
    cmp_kv: Tensor | None = None  # [pages, P / m, 1, D] entries
    idx_k: Tensor | None = None  # [pages, P / m, 1, Di] index entries
    cmp_state: Tensor | None = None  # [B, ring, 2 coff D] of open windows
    idx_state: Tensor | None = None


class V4Tables(NamedTuple):
    """Where the rows, entries and states of requests lie, of every layer alike."""

    rows: Tensor  # [B, columns], a ring: its pages come again and again
    entries: Tensor  # [B, columns], pages of P tokens each
    states: Tensor  # [B, 1]


class V4Caches:
    """Window rows in rings, entries in pages, and states in rings, for `requests` requests.

    A ring holds what the next tokens can see, and of `drafts` tokens that may be taken back; a
    request grows by its entries alone.

    Args:
        config: Transformers', of a DeepSeek-V4 model.
        requests: B.
        capacity: positions that a request can have.
        layers: numbers of layers; None: all of the model.
        tokens: of a call at most.
        drafts: tokens that may be taken back: the next call begins so much earlier.
        page_size: tokens that a page of entries stands for, and rows of a page: a multiple of 16;
            the next one that every compression ratio can divide is taken.
        dtype: of activations.
        device: of the caches.
        seed: shuffles the pages.

    >>> from transformers import DeepseekV4Config
    >>> from custom.integrations.deepseek_v4 import V4Caches
    >>> config = DeepseekV4Config(num_hidden_layers=3, compress_ratios=[0, 4, 128])
    >>> caches = V4Caches(config, requests=2, capacity=300)
    >>> caches.page_size, [x.cmp_kv.shape[1] for x in caches.layers[1:]]
    (128, [32, 1])
    """

    def __init__(
        self,
        config: Any,
        *,
        requests: int,
        capacity: int,
        layers: list[int] | None = None,
        tokens: int = 1,
        drafts: int = 0,
        page_size: int = 64,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        seed: int = 0,
    ) -> None:
        check_page(page_size)
        numbers = list(range(config.num_hidden_layers)) if layers is None else layers
        ratios = [ratio_of(config, number) for number in numbers]
        self.page_size = _page_of(page_size, {ratio for ratio in ratios if ratio})
        self.window, self.drafts = config.sliding_window, drafts
        self.config, self.device = config, device
        self._random = torch.Generator().manual_seed(seed)
        none = torch.empty(requests, 0, dtype=torch.int32, device=device)
        states = torch.arange(requests, dtype=torch.int32, device=device)[:, None]
        self._ring, self.tables = none, V4Tables(none, none, states)
        self._rotary: Any = DeepseekV4RotaryEmbedding(config).to(device)  # type: ignore[no-untyped-call]
        self._like = torch.empty(0, dtype=dtype, device=device)
        self._angles: dict[int, OncePerForward] = {}
        wide = torch.float64 if dtype is torch.float64 else torch.float32

        def pool(*sizes: int) -> Tensor:
            return torch.zeros(0, *sizes, dtype=dtype, device=device)

        def ring(ratio: int, overlap: int, width: int) -> Tensor:
            rows = max(1, overlap * ratio - 1 + drafts)  # a call has its own tokens in hand
            return torch.zeros(requests, rows, 2 * overlap * width, dtype=wide, device=device)

        self.layers = []
        for number, ratio in zip(numbers, ratios, strict=True):
            rows = pool(self.page_size, 1, config.head_dim)
            if not ratio:
                self.layers.append(V4Pools(rows))
                continue
            selects = config.layer_types[number] == _SELECTING
            entries = pool(self.page_size // ratio, 1, config.head_dim)
            state = ring(ratio, 1 + selects, config.head_dim)
            index: tuple[Tensor | None, Tensor | None] = None, None
            if selects:
                width = config.index_head_dim
                index = pool(self.page_size // ratio, 1, width), ring(ratio, 2, width)
            self.layers.append(V4Pools(rows, entries, index[0], state, index[1]))
        self.reserve(capacity)
        self.fit(tokens, None)

    @property
    def capacity(self) -> int:
        """Positions that a request can have."""
        return self.tables.entries.shape[1] * self.page_size

    def _rows(self) -> Tensor:
        """The table of rows: as many columns as that of entries, from the ring."""
        columns = torch.arange(self.tables.entries.shape[1], device=self.device)
        return self._ring[:, columns % max(1, self._ring.shape[1])]

    def reserve(self, capacity: int) -> None:
        """Make room for `capacity` positions a request; what is cached stays where it is."""
        columns = -(-capacity // self.page_size)
        entries, pages = more_pages(self.tables.entries, columns, self._random)
        self.tables = self.tables._replace(entries=entries)
        if self._ring.shape[1]:
            self.tables = self.tables._replace(rows=self._rows())
        self.layers = [
            each._replace(cmp_kv=more_room(each.cmp_kv, pages), idx_k=more_room(each.idx_k, pages))
            for each in self.layers
        ]

    def fit(self, tokens: int, lengths: Tensor | None) -> None:
        """Make the rings of rows as long as a call of so many tokens needs, or much shorter ones
        that are four times as long; the last rows of requests that are `lengths` [B] long move."""
        kept = self.window - 1 + self.drafts
        wanted = -(-max(kept + 1, self.window - 1 + tokens) // self.page_size)
        now = self._ring.shape[1]
        if wanted <= now <= 4 * wanted:
            return
        old, none = self.tables.rows, torch.empty_like(self._ring[:, :0])
        self._ring, pages = more_pages(none, wanted, self._random)
        new, layers = self._rows(), []
        self.tables = self.tables._replace(rows=new)
        for each in self.layers:
            rows = each.ori_kv.new_zeros(pages, *each.ori_kv.shape[1:])
            if lengths is not None and now:
                positions = token_positions(lengths, kept)
                there = positions >= 0
                source, target = (
                    _slots(positions.clamp(min=0), table, self.page_size)[there]
                    for table in (old, new)
                )
                rows.flatten(0, 1)[target] = each.ori_kv.flatten(0, 1)[source]
            layers.append(each._replace(ori_kv=rows))
        self.layers = layers

    def angles(self, layer: int, lengths: Tensor, tokens: int, ratio: int) -> tuple[Tensor, ...]:
        """(sin, cos) [B, S, Dr] of a layer's tokens and, where it has them, of its entries: once
        for all layers of a ratio that are given the same `lengths`."""
        known = self._angles.setdefault(ratio, OncePerForward(self._turned))
        found: tuple[Tensor, ...] = known(layer, lengths, tokens, ratio)
        return found

    @torch.no_grad()
    def _turned(self, lengths: Tensor, tokens: int, ratio: int) -> tuple[Tensor, ...]:
        positions = [token_positions(lengths, tokens).clamp(min=0)]
        if ratio:
            positions.append(entry_positions(lengths, tokens, ratio))
        kind, found = "compress" if ratio else "main", list[Tensor]()
        for each in positions:
            cos, sin = self._rotary(self._like, position_ids=each, layer_type=kind)
            found += [angle.repeat_interleave(2, -1) for angle in (sin, cos)]
        return tuple(found)


def _slots(positions: Tensor, table: Tensor, page: int) -> Tensor:
    return table.gather(1, positions.long() // page).long() * page + positions.long() % page


def _page_of(page_size: int, ratios: set[int]) -> int:
    def holds(page: int, ratio: int) -> bool:
        return page % ratio == 0 and (page // ratio in _RATIOS_OF_PAGES or page // ratio % 16 == 0)

    page = page_size
    while not all(holds(page, ratio) for ratio in ratios):
        page += page_size
    return page


def attention(
    x: Tensor,
    w: SparseAttentionV4Weights,
    pools: V4Pools,
    tables: V4Tables,
    lengths: Tensor,
    angles: tuple[Tensor, ...],
    weight_format: str = "nd",
) -> Tensor:
    """What the attention of a layer adds, [B, S, H], for the last S tokens x [B, S, H] of requests
    that are `lengths` [B] long with them; a row before a request's first token is padding.

    Args:
        x: [B, S, H].
        w: of the layer.
        pools: of the layer, written in place.
        tables: of all layers.
        lengths: [B] int32 or int64.
        angles: `V4Caches.angles` of the layer.
        weight_format: how 2-D weights are read; NZ ones say so by their shape.

    Returns:
        [B, S, H].
    """
    sin, cos, *of_entries = angles
    query, _, index_query, index_weights = npu_sharedkv_prolog_pto(
        x, w.w_dq, w.w_uq, w.w_kv, w.gamma_cq, w.gamma_kv, sin, cos, pools.ori_kv, tables.rows,
        lengths, w_idx_qb=w.w_idx_qb, w_idx_proj=w.w_idx_proj, rms_norm_eps=w.rms_norm_eps,
        weight_format=weight_format,
    )  # fmt: skip
    selected = None
    if w.cmp_ratio:
        main = (w.w_cmp_kv, w.w_cmp_gate, pools.cmp_state, w.cmp_ape, w.gamma_cmp, pools.cmp_kv)
        index = (w.w_idx_kv, w.w_idx_gate, pools.idx_state, w.idx_ape, w.gamma_idx, pools.idx_k)
        for part in (main, index) if w.w_idx_kv is not None else (main,):
            _compress(x, w, tables, lengths, part, of_entries)
    if w.w_idx_kv is not None:
        assert pools.idx_k is not None
        selected, _ = npu_lightning_indexer(
            index_query, pools.idx_k, index_weights, actual_seq_lengths_key=lengths,
            block_table=tables.entries, layout_key="PA_BSND", sparse_count=w.sparse_count,
            cmp_ratio=w.cmp_ratio,
        )  # fmt: skip
    out, _ = npu_sparse_attn_sharedkv(
        query, ori_kv=pools.ori_kv, cmp_kv=pools.cmp_kv, cmp_sparse_indices=selected,
        ori_block_table=tables.rows,
        cmp_block_table=tables.entries if w.cmp_ratio else None, seqused_kv=lengths,
        sinks=w.sinks, softmax_scale=w.softmax_scale, cmp_ratio=w.cmp_ratio,
        ori_win_left=w.window - 1,
    )  # fmt: skip
    return npu_grouped_o_proj_pto(out, w.w_o_a, w.w_o_b, sin, cos, weight_format=weight_format)


def _compress(
    x: Tensor,
    w: SparseAttentionV4Weights,
    tables: V4Tables,
    lengths: Tensor,
    part: tuple[Any, ...],
    of_entries: list[Tensor],
) -> None:
    kv, gate, state, ape, gamma, cache = part
    npu_compressor(
        x, kv, gate, state, ape, gamma, *of_entries, of_entries[0].shape[-1], w.cmp_ratio,
        state_block_table=tables.states, start_pos=lengths - x.shape[1],
        coff=kv.shape[0] // gamma.shape[0], norm_eps=w.rms_norm_eps, rotary_mode=2, cache_mode=2,
        cmp_cache=cache, cmp_block_table=tables.entries, return_cmp_kv=False,
    )  # fmt: skip
