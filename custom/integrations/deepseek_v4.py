# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The weights and caches of `npu_sparse_attention_v4_pto` for a Hugging Face DeepSeek-V4 layer.

A layer is of one of three kinds: `compress_rates` has no entry for its type (a window alone), all
closed entries are seen, or those that an indexer selects.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..compression import entry_positions
from ..dispatch.common import quantized
from ..dispatch.errors import NotSupported, need
from .dsa import dequantized_linear, format_of, laid, option_of, projections, quantized_arguments
from .paged import check_page, more_pages, more_room, page_of, token_positions

need("transformers.models.deepseek_v4", __name__, '"transformers>=5.17,<6"')

from transformers.models.deepseek_v4.modeling_deepseek_v4 import (  # noqa: E402
    DeepseekV4Attention,
    DeepseekV4RotaryEmbedding,
)

_SELECTING = "compressed_sparse_attention"


@dataclass(frozen=True)
class SparseAttentionV4Weights:
    """What `npu_sparse_attention_v4_pto` takes of a layer, under the names of its arguments.

    `w_dq`, `w_uq`, `w_kv`, `w_idx_qb`, `w_idx_proj`, `w_o_b` and, a group each, `w_o_a` lie as
    `options["weight_format"]` says; `w_cmp_*`, `w_idx_kv` and `w_idx_gate` are rows, as nn.Linear
    has them; `sinks`, `cmp_ape`, `gamma_cmp`, `idx_ape` and `gamma_idx` are float32. Scales of
    weights of 8 bits are among `options`.
    """

    w_dq: Tensor
    w_uq: Tensor
    w_kv: Tensor
    gamma_cq: Tensor
    gamma_kv: Tensor
    sinks: Tensor
    w_o_a: Tensor
    w_o_b: Tensor
    options: dict[str, Any]
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

    @property
    def arguments(self) -> dict[str, Any]:
        """The weights and options under the op's own names."""
        tensors = {name: value for name, value in vars(self).items() if name != "options"}
        return dict(tensors, **self.options)


@torch.no_grad()
def sparse_attention_v4_weights(
    module: nn.Module,
    weight_format: str | None = None,
    dtype: torch.dtype | None = None,
    *,
    dequantise: bool | None = None,
) -> SparseAttentionV4Weights:
    """The op's weights from the attention of a DeepSeek-V4 layer, of any of its three kinds.

    Args:
        module: a `DeepseekV4Attention`, layer.self_attn of the model.
        weight_format: "linear": the module's own weights, of which none of that dtype is copied.
            "nz": copies in FRACTAL_NZ where whole tiles hold them. None: "nz" on an NPU, else
            "linear".
        dtype: of activations; None: that of `q_a_proj`, bfloat16 where it is of 8 bits.
        dequantise: projections of 8 bits. False: they stay as they are, and what they meet is
            quantized token by token. True: what they stand for, in `dtype`. None: True on an NPU,
            whose kernels of this layer have no products of 8 bits, else False.

    Returns:
        `SparseAttentionV4Weights`.

    Raises:
        TypeError: `module` is something else.
        NotSupported: a projection has scales that are no checkpoint's, or the op cannot take them.

    Projections of 8 bits are float8_e4m3fn with `weight_scale_inv`, a scale for 128 x 128 of
    float32 or float8_e8m0fnu (DeepSeek's checkpoints), or int8 with `weight_scale`, a scale for
    each row.
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
    if dequantise is None:
        dequantise = m.q_a_proj.weight.device.type == "npu"

    form = format_of(m.q_a_proj.weight, weight_format)

    def rows(linear: nn.Linear) -> Tensor:
        return dequantized_linear(m, linear, kind).contiguous()

    def rounded(parameter: Tensor) -> Tensor:
        return parameter.detach().to(kind)

    def exact(parameter: Tensor) -> Tensor:
        return parameter.detach().to(wide)

    config, compressor = m.config, m.compressor
    first = dict(w_dq=m.q_a_proj, w_kv=m.kv_proj, w_o_a=m.o_a_proj, w_o_b=m.o_b_proj)
    second = dict(w_uq=m.q_b_proj)
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
        second["w_idx_qb"] = indexer.q_b_proj
        given |= dict(
            w_idx_proj=laid(dequantized_linear(m, indexer.scorer.weights_proj, kind), form),
            w_idx_kv=rows(indexer.kv_proj),
            w_idx_gate=rows(indexer.gate_proj),
            idx_ape=exact(indexer.position_bias),
            gamma_idx=exact(indexer.kv_norm.weight),
        )
    if dequantise:
        every = {**first, **second}
        weights = {name: dequantized_linear(m, linear, kind) for name, linear in every.items()}
        scales: dict[str, Tensor] = {}
        mode = 0
    else:
        weights, scales, mode = projections(m, kind, first, second, _DEQUANTIZE)
    _by_group(weights, scales, config.o_groups)
    return SparseAttentionV4Weights(
        gamma_cq=rounded(m.q_a_norm.weight),
        gamma_kv=rounded(m.kv_norm.weight),
        sinks=exact(m.sinks),
        options=dict(
            cmp_ratio=_ratio_of(config, m.layer_idx),
            ori_win_left=m.sliding_window - 1,
            rms_norm_eps=config.rms_norm_eps,
            softmax_scale=m.scaling,
            sparse_count=config.index_topk,
            weight_format=option_of(form),
            **quantized_arguments("weight_quant_mode", mode, "dequant_scale_", scales),
        ),
        **{name: laid(weight, form) for name, weight in weights.items()},
        **given,
    )


_DEQUANTIZE = "Take a checkpoint that quantizes them so, or dequantise=True."


def _by_group(weights: dict[str, Tensor], scales: dict[str, Tensor], groups: int) -> None:
    """`w_o_a` [G Ro, K] as [G, Ro, K], its scale [K / 128, G Ro / 128] or [1, G Ro] likewise."""
    whole = weights["w_o_a"]
    weights["w_o_a"] = whole.unflatten(0, (groups, -1))
    if (scale := scales.get("w_o_a")) is None:
        return
    rows = len(whole) // groups
    if whole.dtype is torch.float8_e4m3fn and rows % quantized.TILE:
        raise NotSupported(
            f"custom.integrations: a group of `o_a_proj` has {rows} rows, expected a multiple of "
            f"{quantized.TILE}: a scale of e4m3 would be of two groups. Pass dequantise=True."
        )
    scales["w_o_a"] = scale.unflatten(1, (groups, -1)).transpose(0, 1).contiguous()


def _ratio_of(config: Any, layer: int) -> int:
    """Tokens of an entry of a layer; 0 where it has none."""
    ratio: int = config.compress_rates.get(config.layer_types[layer], 0)
    return ratio


class V4LayerCaches(NamedTuple):
    """What a layer has cached, which the op updates in place, and the tables that all layers
    share."""

    ori_kv: Tensor  # [pages, P, 1, D] window rows
    ori_block_table: Tensor  # [B, columns], a ring: its pages come again and again
    cmp_kv: Tensor | None = None  # [pages, P / m, 1, D] entries
    idx_k: Tensor | None = None  # [pages, P / m, 1, Di] index keys
    cmp_block_table: Tensor | None = None  # [B, columns], of both
    cmp_state: Tensor | None = None  # [B, ring, 2 coff D] of the tokens of open windows
    idx_state: Tensor | None = None  # [B, ring, 2 coff Di]
    state_block_table: Tensor | None = None  # [B, 1], of both
    idx_k_scale: Tensor | None = None  # [pages, P / m, 1], of int8 index keys
    kv_kind: str = "none"
    index_kind: str = "none"

    @property
    def arguments(self) -> dict[str, Any]:
        """Under the op's own names."""
        return self._asdict()


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
        kv_kind: "none", or "fp8": rows and entries of 584 bytes, whose D is 512.
        index_kind: "none"; "fp8", packed pages; "int8", keys beside their scales: Di is 128.

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
        kv_kind: str = "none",
        index_kind: str = "none",
    ) -> None:
        check_page(page_size)
        numbers = list(range(config.num_hidden_layers)) if layers is None else layers
        ratios = [_ratio_of(config, number) for number in numbers]
        self.page_size = page_of(page_size, {ratio for ratio in ratios if ratio})
        self.window: int = config.sliding_window
        self.drafts = drafts
        self._random = torch.Generator().manual_seed(seed)
        self._ring = torch.empty(requests, 0, dtype=torch.int32, device=device)
        self._table = torch.empty_like(self._ring)  # of entries
        states = torch.arange(requests, dtype=torch.int32, device=device)[:, None]
        self._rotary: Any = DeepseekV4RotaryEmbedding(config).to(device)
        self._like = torch.empty(0, dtype=dtype, device=device)
        wide = torch.float64 if dtype is torch.float64 else torch.float32

        def pool(rows: int, *sizes: int, of: torch.dtype = dtype) -> Tensor:
            return torch.zeros(0, rows, *sizes, dtype=of, device=device)

        def kv(rows: int) -> Tensor:
            if kv_kind == "none":
                return pool(rows, 1, config.head_dim)
            return pool(rows, 1, quantized.V4_ROW, of=torch.uint8)

        def index(rows: int) -> tuple[Tensor, Tensor | None]:
            if index_kind == "fp8":
                return pool(rows, quantized.PACKED, of=torch.uint8), None
            if index_kind == "int8":
                keys = pool(rows, 1, config.index_head_dim, of=torch.int8)
                return keys, pool(rows, 1, of=torch.float16)
            return pool(rows, 1, config.index_head_dim), None

        def ring(ratio: int, overlap: int, width: int) -> Tensor:
            rows = max(1, overlap * ratio - 1 + drafts)  # a call has its own tokens in hand
            return torch.zeros(requests, rows, 2 * overlap * width, dtype=wide, device=device)

        self.layers = []
        for number, ratio in zip(numbers, ratios, strict=True):
            layer = V4LayerCaches(kv(self.page_size), self._ring, kv_kind=kv_kind)
            if ratio:
                selects = config.layer_types[number] == _SELECTING
                layer = layer._replace(
                    cmp_kv=kv(self.page_size // ratio),
                    cmp_block_table=self._table,
                    cmp_state=ring(ratio, 1 + selects, config.head_dim),
                    state_block_table=states,
                )
                if selects:
                    keys, scale = index(self.page_size // ratio)
                    layer = layer._replace(
                        idx_k=keys,
                        idx_k_scale=scale,
                        idx_state=ring(ratio, 2, config.index_head_dim),
                        index_kind=index_kind,
                    )
            self.layers.append(layer)
        self.reserve(capacity)
        self.fit(tokens, None)

    @property
    def capacity(self) -> int:
        """Positions that a request can have."""
        return self._table.shape[1] * self.page_size

    def _rows(self) -> Tensor:
        """The table of rows: as many columns as that of entries, from the ring."""
        columns = torch.arange(self._table.shape[1], device=self._ring.device)
        return self._ring[:, columns % max(1, self._ring.shape[1])]

    def reserve(self, capacity: int) -> None:
        """Make room for `capacity` positions a request; what is cached stays where it is."""
        columns = -(-capacity // self.page_size)
        self._table, pages = more_pages(self._table, columns, self._random)
        if not pages:
            return
        rows = self._rows() if self._ring.shape[1] else self._ring
        self.layers = [
            each._replace(
                ori_block_table=rows,
                cmp_kv=more_room(each.cmp_kv, pages),
                idx_k=more_room(each.idx_k, pages),
                idx_k_scale=more_room(each.idx_k_scale, pages),
                cmp_block_table=None if each.cmp_kv is None else self._table,
            )
            for each in self.layers
        ]

    def _pages(self, tokens: int) -> int:
        """Of a ring, for calls of so many tokens."""
        rows = self.window - 1 + max(tokens, 1 + self.drafts)
        return 1 + -(-rows // self.page_size)  # rows begin and end inside of pages

    def fits(self, tokens: int) -> bool:
        """Whether the rings of rows may stay as they are for a call of so many tokens."""
        wanted = self._pages(tokens)
        return wanted <= self._ring.shape[1] <= 4 * wanted

    def fit(self, tokens: int, lengths: Tensor | None) -> None:
        """Make the rings of rows as long as a call of so many tokens needs, and a ring four times
        as long shorter; the last pages of requests that are `lengths` [B] long move along."""
        if self.fits(tokens):
            return
        wanted, now = self._pages(tokens), self._ring.shape[1]
        self._ring, pages = more_pages(self._ring[:, :0], wanted, self._random)
        new, layers = self._rows(), []
        moves: tuple[Tensor, ...] = ()
        if lengths is not None and now:
            back = torch.arange(min(now, wanted), device=new.device)
            columns = (lengths.long()[:, None] - 1).div(
                self.page_size, rounding_mode="floor"
            ) - back
            there, columns = columns >= 0, columns.clamp(min=0)
            old = self.layers[0].ori_block_table
            moves = tuple(table.gather(1, columns)[there] for table in (new, old))
        for each in self.layers:
            kept = each.ori_kv.new_zeros(pages, *each.ori_kv.shape[1:])
            if moves:
                kept[moves[0]] = each.ori_kv[moves[1]]
            layers.append(each._replace(ori_kv=kept, ori_block_table=new))
        self.layers = layers

    @torch.no_grad()
    def angles(self, lengths: Tensor, tokens: int, ratio: int) -> dict[str, Tensor]:
        """`sin`, `cos` [B, S, Dr] of the last S tokens of requests that are `lengths` [B] long, and
        `cmp_sin`, `cmp_cos` of their entries, for layers that have entries of `ratio` tokens."""
        positions = {"": token_positions(lengths, tokens).clamp(min=0)}
        if ratio:
            positions["cmp_"] = entry_positions(lengths, tokens, ratio)
        kind, found = "compress" if ratio else "main", {}
        for prefix, each in positions.items():
            cos, sin = self._rotary(self._like, position_ids=each, layer_type=kind)
            found[f"{prefix}sin"] = sin.repeat_interleave(2, -1)
            found[f"{prefix}cos"] = cos.repeat_interleave(2, -1)
        return found
