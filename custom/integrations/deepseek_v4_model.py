# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Transformers' DeepSeek-V4 inside `use()`: its attention and hyper-connections, and caches whose
last tokens can be taken back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..dispatch.errors import NotSupported
from ..hyper_connections import npu_hc_post, npu_hc_pre
from ..sparse_attention_v4 import npu_sparse_attention_v4_pto
from .cached import Converted, RingLayer, attends, extent
from .deepseek_v4 import (
    SparseAttentionV4Weights,
    V4Caches,
    V4LayerCaches,
    sparse_attention_v4_weights,
)
from .masks import WHERE, OncePerForward, Texts, check_positions, texts

from transformers.cache_utils import (  # isort: skip  # after `need` of the modules above
    STATIC_LAYER_TYPE_MAPPING,
    Cache,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)
from transformers.models.deepseek_v4 import modeling_deepseek_v4  # isort: skip

_v4: Any = modeling_deepseek_v4  # its functions are not typed


class _StaticPlace(StaticLayer):  # type: ignore[no-untyped-call]
    """Of a StaticCache before its first pass; Transformers has none for these layers."""

    def __init__(self, max_cache_len: int, **_: Any) -> None:
        super().__init__(max_cache_len=max_cache_len)


_TAKEN = (
    DynamicSlidingWindowLayer,
    StaticSlidingWindowLayer,
    _StaticPlace,
    _v4.DeepseekV4CSACache,
    _v4.DeepseekV4HCACache,
)


class _V4Layer(RingLayer):  # type: ignore[no-untyped-call]
    model = "DeepSeek-V4"

    def __init__(self, caches: V4Caches, index: int, fixed: int | None) -> None:
        super().__init__(caches, index, _attended)
        self.fixed = fixed  # positions of a static cache

    def room(self, tokens: int, before: Tensor | None) -> V4LayerCaches:
        """As `append`; requests are `before` [B] tokens long, where they have any."""
        if self.fixed is not None and self.tokens + tokens > self.fixed:
            raise ValueError(
                f"{WHERE}: a StaticCache of {self.fixed} positions cannot take {tokens} more than "
                f"{self.tokens}. Make it with a larger max_cache_len."
            )
        self.caches.fit(tokens, before)
        pools: V4LayerCaches = self.append(tokens)
        return pools

    def get_max_length(self) -> int:
        return -1 if self.fixed is None else self.fixed


def _attended(
    state: tuple[SparseAttentionV4Weights, V4LayerCaches],
    x: Tensor,
    lengths: Tensor,
    angles: dict[str, Tensor],
) -> Tensor:
    w, pools = state
    arguments: dict[str, Any] = {**w.arguments, **pools.arguments, **angles}
    return npu_sparse_attention_v4_pto(x, act_seqs=lengths, **arguments)


def _read(
    mask: Any,
    requests: int,
    tokens: int,
    valid: Tensor | None,
    cached: int,
    window: int,
    position_ids: Tensor | None,
    fixed: int | None,
) -> Texts:
    if fixed is not None and cached == 0 and isinstance(mask, Tensor):
        mask = mask[..., :tokens]  # a StaticCache asks for all its columns before it is ours
    before = None if valid is None else valid[:, :cached]
    return check_positions(texts(mask, requests, tokens, before, window), position_ids, cached)


def _turned(lengths: Tensor, tokens: int, ratio: int, caches: V4Caches) -> dict[str, Tensor]:
    return caches.angles(lengths, tokens, ratio)


def _taken_over(cache: Cache, module: Any, x: Tensor, options: dict[str, Any]) -> _V4Layer:
    """The layer's cache, after taking over a new Transformers cache (all its layers at once)."""
    layers: list[Any] = cache.layers
    if layers and isinstance(layers[module.layer_idx], _V4Layer):
        layer: _V4Layer = layers[module.layer_idx]
        return layer
    if not layers or any(type(each) not in _TAKEN or each.get_seq_length() for each in layers):
        came = "no layers" if not layers else f"{layers[0]} of {layers[0].get_seq_length()} tokens"
        raise NotSupported(
            f"{WHERE} takes over a DynamicCache or StaticCache of the model's configuration that "
            f"is still empty; got {type(cache).__name__} with {came}. Leave the cache out, "
            "or pass DynamicCache(config=model.config)."
        )
    reach = [each.max_cache_len for each in layers if isinstance(each, _StaticPlace)]
    fixed = max(reach) if reach else None
    caches = V4Caches(module.config, capacity=fixed or x.shape[1], **_sizes(x), **options)
    layers[:] = [_V4Layer(caches, index, fixed) for index in range(len(layers))]
    taken: _V4Layer = layers[module.layer_idx]
    return taken


def _sizes(x: Tensor) -> dict[str, Any]:
    return dict(requests=x.shape[0], tokens=x.shape[1], dtype=x.dtype, device=x.device)


def attention_forward(
    weight_format: str | None, page_size: int, drafts: int, dequantise: bool | None
) -> Callable[..., Any]:
    """The forward of `DeepseekV4Attention`, which is ours from its input to its output."""

    def weights(layer: Any, x: Tensor) -> SparseAttentionV4Weights:
        return sparse_attention_v4_weights(layer, weight_format, x.dtype, dequantise=dequantise)

    converted = Converted(weights)
    read = OncePerForward(_read)
    turned: dict[int, OncePerForward] = {}  # by ratio
    options: dict[str, Any] = dict(page_size=page_size, drafts=drafts)

    @attends
    def forward(
        self: Any,
        hidden_states: Tensor,
        position_embeddings: Any,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        w = converted(self, hidden_states)
        layer = None if cache is None else _taken_over(cache, self, hidden_states, options)
        fixed = None if layer is None else layer.fixed
        _, tokens, valid, cached = held = extent(hidden_states, layer)
        given = self.sliding_window, position_ids, fixed
        found = read(self.layer_idx, attention_mask, *held, *given)
        x = found.gathered(hidden_states).contiguous()
        if layer is None:
            alone = dict(layers=[self.layer_idx], capacity=x.shape[1], **_sizes(x))
            layer = _V4Layer(V4Caches(self.config, **alone, **options), 0, None)
        before = None
        if cached and valid is not None and not layer.caches.fits(tokens):
            before = valid[:, :cached].sum(-1)
        pools, layer.valid = layer.room(tokens, before), found.valid
        ratio = w.options["cmp_ratio"]
        angles = turned.setdefault(ratio, OncePerForward(_turned))(
            self.layer_idx, found.lengths, x.shape[1], ratio, layer.caches
        )
        out = layer.attend((w, pools), x, found.lengths, angles)
        return found.vouched(found.scattered(out, tokens)), None

    return forward


def _gathered(
    x: Tensor, fn: Tensor, scale: Tensor, base: Tensor, eps: float, **options: Any
) -> Any:
    wide = torch.float64 if x.dtype is torch.float64 else torch.float32
    fn, scale, base = (each.to(wide) for each in (fn, scale, base))
    return npu_hc_pre(x.contiguous(), fn, scale, base, norm_eps=eps, **options)


def _connection_forward(self: Any, hidden_streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`DeepseekV4HyperConnection.forward`: (post, comb, what goes into the sublayer)"""
    y, post, comb = _gathered(
        hidden_streams,
        self.fn,
        self.scale,
        self.base,
        self.input_norm.eps,
        hc_mult=self.hc_mult,
        hc_sinkhorn_iters=self.hc_sinkhorn_iters,
        hc_eps=self.hc_eps,
    )
    return post, comb, y


def _head_forward(self: Any, x: Tensor) -> Tensor:
    """`DeepseekV4HyperHead.forward`"""
    y: Tensor
    y, _, _ = _gathered(
        x,
        self.hc_fn,
        self.hc_scale,
        self.hc_base,
        self.input_norm.eps,
        hc_mult=self.hc_mult,
        hc_eps=self.eps,
    )
    return y


def _layer_forward(
    self: Any, hidden_states: Tensor, input_ids: Tensor | None = None, **options: Any
) -> Tensor:
    """`DeepseekV4DecoderLayer.forward`"""
    post, comb, y = self.attn_hc(hidden_states)
    attended, _ = self.self_attn(self.input_layernorm(y), **options)
    streams = npu_hc_post(attended.contiguous(), hidden_states.contiguous(), post, comb)
    post, comb, y = self.ffn_hc(streams)
    out = self.mlp(self.post_attention_layernorm(y), input_ids=input_ids)
    return npu_hc_post(out.contiguous(), streams, post, comb)


def _norm_forward(self: Any, hidden_states: Tensor) -> Tensor:
    """`DeepseekV4RMSNorm.forward`, rounded once: its output stays of 16 bits where its weight is of
    32, as a checkpoint's is."""
    x = hidden_states.float()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)
    out: Tensor = (self.weight * x).to(hidden_states.dtype)
    return out


FORWARDS: tuple[tuple[Any, Callable[..., Any]], ...] = (
    (_v4.DeepseekV4HyperConnection, _connection_forward),
    (_v4.DeepseekV4HyperHead, _head_forward),
    (_v4.DeepseekV4DecoderLayer, _layer_forward),
    (_v4.DeepseekV4RMSNorm, _norm_forward),
)


@contextmanager
def rewindable() -> Iterator[None]:
    """Let Transformers make a StaticCache for the model, and verify drafts with it."""
    kinds = [each for each in _v4.COMPRESSOR_CLASSES if each not in STATIC_LAYER_TYPE_MAPPING]
    model = _v4.DeepseekV4PreTrainedModel
    stateful = model._is_stateful
    try:
        model._is_stateful = False
        STATIC_LAYER_TYPE_MAPPING.update(dict.fromkeys(kinds, _StaticPlace))
        yield
    finally:
        model._is_stateful = stateful
        for each in kinds:
            del STATIC_LAYER_TYPE_MAPPING[each]
