# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Hugging Face models on our ops: the attention of DeepSeek, GLM-5, MiniMax-M3 and Qwen4-Exp that
selects keys, dense latent attention, and linear attention.

with custom.integrations.transformers.use():
    model.generate(**inputs)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from .._causal_conv1d import causal_conv1d_fn
from ..delta_rule import npu_chunk_kda, npu_gated_delta_layer_decode
from ..dispatch.errors import NotSupported, need
from ..gated_norm import npu_gated_rms_norm
from ..sparse_attention import (
    npu_sparse_attention_indices_pto,
    npu_sparse_attention_pto,
    npu_sparse_attention_shared_pto,
)
from . import kernels
from .drafts import Rule, recorded
from .masks import WHERE, OncePerForward, Texts, texts
from .paged import PagedCaches, check_page, token_positions

need("transformers.models.deepseek_v32", __name__, '"transformers>=5.17,<6"')

from transformers.cache_utils import (  # noqa: E402
    Cache,
    DynamicIndexedLayer,
)
from transformers.masking_utils import find_packed_sequence_indices  # noqa: E402
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (  # noqa: E402
    DeepseekV4Attention,
)
from transformers.models.glm5_next import modeling_glm5_next  # noqa: E402
from transformers.models.kimi_linear import modeling_kimi_linear  # noqa: E402
from transformers.models.olmo_hybrid import modeling_olmo_hybrid  # noqa: E402
from transformers.models.qwen3_5 import modeling_qwen3_5  # noqa: E402
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe  # noqa: E402
from transformers.models.qwen3_next import modeling_qwen3_next  # noqa: E402
from transformers.models.qwen4_exp import modeling_qwen4_exp  # noqa: E402

from . import block_sparse, deepseek_v4_model, glm5_next, latent  # noqa: E402
from .attention import register  # noqa: E402
from .cached import Converted, PagedLayer, attends, extent, takes_cache  # noqa: E402
from .deepseek_v4 import (  # noqa: E402
    SparseAttentionV4Weights,
    sparse_attention_v4_weights,
)
from .dsa import (  # noqa: E402
    CONVENTIONS,
    SharedAttentionWeights,
    SparseAttentionWeights,
    cache_widths,
    check_format,
    layer_widths,
    shared_attention_weights,
    sparse_attention_weights,
)

__all__ = [
    "SharedAttentionWeights",
    "SparseAttentionV4Weights",
    "SparseAttentionWeights",
    "cache_widths",
    "layer_widths",
    "register",
    "shared_attention_weights",
    "sparse_attention_v4_weights",
    "sparse_attention_weights",
    "use",
]

try:  # Ling-3.0, since Transformers 5.24
    from transformers.models.bailing_hybrid import modeling_bailing_hybrid
except ModuleNotFoundError:
    _LING: tuple[Any, ...] = ()
    _LATENT: tuple[Any, ...] = (modeling_kimi_linear.KimiLinearAttention,)
else:
    _LING = (modeling_bailing_hybrid.BailingHybridDeltaAttention,)
    _LATENT = (
        modeling_kimi_linear.KimiLinearAttention,
        modeling_bailing_hybrid.BailingHybridAttention,
    )

# their functions are not typed
_qwen3_next: Any = modeling_qwen3_next
_new_layer: Any = DynamicIndexedLayer

# ------------------------------------------------------------------------------- sparse attention


def _paged_layer(cache: Cache | None, module: Any, x: Tensor, page_size: int) -> PagedLayer:
    """The layer's cache, after taking over a new Transformers cache (all its layers at once)."""
    index = module.layer_idx if cache is not None else 0
    layers: list[Any] = [_new_layer()] if cache is None else cache.layers
    layer = layers[index]
    if isinstance(layer, PagedLayer):
        return layer
    if any(type(each) is not DynamicIndexedLayer or each.get_seq_length() for each in layers):
        raise NotSupported(
            "custom.integrations.transformers.use() takes over a DynamicCache that is still empty; "
            f"got {type(cache).__name__} with {layer} of {layer.get_seq_length()} tokens. Leave "
            "the cache out, or pass a new DynamicCache."
        )
    caches = PagedCaches(
        len(layers),
        layer_widths(module.config) if cache is not None else cache_widths(module.config),
        requests=x.shape[0],
        capacity=x.shape[1],
        page_size=page_size,
        dtype=x.dtype,
        device=x.device,
    )
    paged = [PagedLayer(caches, each, _attended) for each in range(len(layers))]
    layers[:] = paged
    return paged[index]


def _texts(mask: Any, requests: int, tokens: int, valid: Tensor | None, cached: int) -> Texts:
    return texts(mask, requests, tokens, None if valid is None else valid[:, :cached])


_read_mask = OncePerForward(_texts)


def _is_shared(config: Any, index: int) -> bool:
    """Whether layer `index` exists and takes over the selection of the one before it."""
    kinds = getattr(config, "indexer_types", None) or []
    return index < len(kinds) and kinds[index] == "shared"


def _attended(
    state: tuple[Any, ...],
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    lengths: Tensor,
    there: Tensor,
    indices: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """(what the attention adds, the positions that it attends to where a layer hands them on)"""
    module, w, caches, pools, block_table = state
    slots = caches.slots(token_positions(lengths, x.shape[1]), block_table).where(there, -1)
    arguments: dict[str, Any] = w.arguments | dict(
        x=x.contiguous(),
        sin=sin,
        cos=cos,
        cache_index=slots,
        kv_cache=pools.kv,
        kr_cache=pools.kr,
        block_table=block_table,
        act_seqs=lengths,
    )
    if isinstance(w, SparseAttentionWeights):
        arguments["index_k_cache"] = pools.index_k
        if _is_shared(module.config, module.layer_idx + 1):
            latent, indices = npu_sparse_attention_indices_pto(**arguments)
        else:
            latent = npu_sparse_attention_pto(**arguments)
    elif indices is None:
        raise ValueError(
            "custom.integrations.transformers: `prev_topk_indices` is None, expected the selection "
            f"that layer {module.layer_idx} shares. Pass the third result of the layer before it."
        )
    else:
        latent = npu_sparse_attention_shared_pto(**arguments, sparse_indices=indices)
    return module.o_proj(w.values(latent)), indices


def _attention_forward(weight_format: str | None, page_size: int) -> Callable[..., Any]:
    """The forward of a sparse attention; GLM-5's hands its selection on, as a third result."""
    check_format(weight_format)
    check_page(page_size)

    def weights(layer: Any, _: Tensor) -> SharedAttentionWeights:
        convert = shared_attention_weights if layer.indexer is None else sparse_attention_weights
        return convert(layer, weight_format)

    converted = Converted(weights)

    @attends
    def forward(
        self: Any,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        position_ids: Tensor | None = None,
        prev_topk_indices: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, None] | tuple[Tensor, None, Tensor | None]:
        requests, tokens, _hidden = hidden_states.shape
        w = converted(self, hidden_states)
        layer = None if cache is None else _paged_layer(cache, self, hidden_states, page_size)
        found = _read_mask(self.layer_idx, attention_mask, *extent(hidden_states, layer))
        cos, sin = (each.expand(requests, -1, -1).contiguous() for each in position_embeddings)
        x, cos, sin = (found.gathered(each) for each in (hidden_states, cos, sin))
        if layer is None:
            layer = _paged_layer(None, self, x, page_size)
        else:
            found.refuse_documents()
        pools = layer.append(tokens)
        layer.valid = found.valid
        chosen = None if prev_topk_indices is None else found.gathered(prev_topk_indices)
        state = (self, w, layer.caches, pools, layer.caches.block_table)
        out, indices = layer.attend(state, x, cos, sin, found.lengths, found.there, chosen)
        out = found.vouched(found.scattered(out, tokens))
        if not hasattr(self, "skip_topk"):
            return out, None
        return out, None, None if indices is None else found.scattered(indices, tokens)

    return forward


# ---------------------------------------------------------------------------- linear attention


class _Past:
    """What the cache has of a layer, if there is a cache."""

    def __init__(self, module: Any, cache: Cache | None) -> None:
        self.index, self.cache = module.layer_idx, cache
        self.layer: Any = None if cache is None else cache.layers[self.index]
        # state 0; Qwen4-Exp's n-grams have others
        self.is_there = cache is not None and cache.has_previous_state(self.index, 0)

    @property
    def columns(self) -> Tensor:
        """Of the convolution, [B, W, channels]."""
        columns: Tensor = self.layer.conv_states[0].mT
        return columns

    @property
    def states(self) -> Tensor:
        """[B, Nv, Dk, Dv]"""
        states: Tensor = self.layer.recurrent_states[0]
        return states

    def steps(self, x: Tensor) -> bool:
        """Whether `x` [B, S, ..] is a decode step, which updates the cache in place."""
        return self.is_there and x.shape[1] == 1 and not self.layer.record_past


def _without_padding(hidden_states: Tensor, mask: Tensor | None) -> Tensor:
    x: Tensor = _qwen3_next.apply_mask_to_padding_states(hidden_states, mask)
    return x


def _packed(position_ids: Tensor, rows: int, cached: bool) -> Tensor | None:
    """Prefix sums of the documents in all rows of position_ids [B, S], or [1, S] of all alike, if a
    row has several.  Beside a cache positions that jump ahead are of the same, as in the models'
    attention."""
    if cached and not bool((position_ids.diff() < 0).any()):
        return None
    number = find_packed_sequence_indices(position_ids)
    return None if number is None else _begins(number.expand(rows, -1))


def _begins(number: Tensor) -> Tensor:
    """Prefix sums of runs of the same number, none across the end of a row [B, S]."""
    begins = torch.ones_like(number, dtype=torch.bool)
    begins[:, 1:] = number[:, 1:] != number[:, :-1]
    return nn.functional.pad(begins.flatten().nonzero()[:, 0], (0, 1), value=number.numel())


_read_positions = OncePerForward(_packed)


def _documents(past: _Past, x: Tensor, options: dict[str, Any]) -> Tensor | None:
    """Prefix sums over all rows of x [B, S, ..] if documents are packed there: by `cu_seq_lens_q`,
    `seq_idx`, or else the `position_ids` that the layer of the model was given."""
    ends: Tensor | None = options.get("cu_seq_lens_q")
    number: Tensor | None = options.get("seq_idx")
    documents: Tensor | None = options.get("documents")
    given = dict(cu_seq_lens_q=ends, seq_idx=number, position_ids=documents)
    name = next((name for name, value in given.items() if value is not None), None)
    if name is None:
        return None
    if past.cache is not None:
        raise NotSupported(
            f"{WHERE} serves documents packed in a row without a cache, and `{name}` has several "
            "beside one. Pass use_cache=False."
        )
    if ends is not None:
        if x.shape[0] != 1:
            raise ValueError(
                f"{WHERE}: `cu_seq_lens_q` is given and there are {x.shape[0]} rows, expected one, "
                "in which all documents follow one another. Flatten them."
            )
        return ends
    if number is None:
        return documents
    if number.shape != x.shape[:2]:
        raise ValueError(
            f"{WHERE}: `seq_idx` has shape {list(number.shape)}, expected {list(x.shape[:2])}. "
            "Pass the document of each token."
        )
    return _begins(number)


def _with_documents(layer: Any) -> Callable[..., Tensor]:
    """The forward of a model's layer, which tells its linear attention of documents: positions that
    begin anew, as Transformers reads them for the other layers."""
    forward = layer.forward

    @wraps(forward)
    def told(self: Any, *args: Any, **options: Any) -> Tensor:
        position_ids, made = options.get("position_ids"), options.pop("positions_made", False)
        is_linear = hasattr(self, "linear_attn") or (
            getattr(self, "block_type", None) == "linear_attention"
        )
        if (
            not made
            and is_linear
            and options.get("attention_mask") is None
            and position_ids is not None
            and position_ids.shape[-1] > 1
        ):
            mixer = self.linear_attn if hasattr(self, "linear_attn") else self.self_attn
            options["documents"] = _read_positions(
                mixer.layer_idx,
                position_ids,
                (args[0] if args else options["hidden_states"]).shape[0],
                any(isinstance(each, Cache) for each in options.values()),
            )
        out: Tensor = forward(self, *args, **options)
        return out

    return told


def _with_positions(model: Any) -> Callable[..., Any]:
    """The forward of a model, which tells its layers that it makes the positions itself: nobody
    needs to read them, nor wait for them."""
    forward = model.forward

    @wraps(forward)
    def told(self: Any, *args: Any, **options: Any) -> Any:
        if len(args) < 3 and options.get("position_ids") is None:
            options["positions_made"] = True
        return forward(self, *args, **options)

    return told


def _convolved(self: Any, past: _Past, mixed: Tensor, documents: Tensor | None) -> Tensor:
    """[B, S, channels], behind what the cache has, which keeps the last columns itself."""
    (requests, tokens), whole = mixed.shape[:2], mixed.mT
    if past.cache is not None:
        whole = past.cache.update_conv_state(
            whole, past.index, conv_kernel_size=self.conv_kernel_size
        )
        if whole.device.type == "npu":  # its kernel of a decode step takes channels side by side
            past.layer.conv_states[0] = past.columns.contiguous().mT
    if documents is not None:
        whole = mixed.flatten(0, 1).mT
    kernel, bias = self.conv1d.weight.squeeze(1), self.conv1d.bias
    out = causal_conv1d_fn(
        whole, kernel, bias, query_start_loc=documents, activation=self.activation
    )
    assert isinstance(out, Tensor)
    return out.mT[:, -tokens:] if documents is None else out.mT.unflatten(0, (requests, tokens))


def _recurred(
    rule: Rule, past: _Past, documents: Tensor | None, *arguments: Tensor, **options: Any
) -> Tensor:
    """`rule` from the states of the cache on, which takes the last ones."""
    before, rows = past.states if past.is_there else None, arguments[0].shape[:2]
    if documents is not None:
        arguments = tuple(each.flatten(0, 1)[None] for each in arguments)
        options["cu_seqlens"] = documents
    out, state = rule(*arguments, initial_state=before, use_qk_l2norm_in_kernel=True, **options)
    if past.cache is not None and state is not None:
        past.cache.update_recurrent_state(state, past.index)
    return out if documents is None else out[0].unflatten(0, rows)


_chunk_gated_delta_rule = recorded(kernels.chunk_gated_delta_rule)
_chunk_kda = recorded(npu_chunk_kda)


def _refuse_all_but_silu(self: Any) -> None:
    if self.activation not in ("silu", "swish"):
        raise NotSupported(
            f'{WHERE} convolves with silu, and {type(self).__name__} has "{self.activation}" '
            "(config.hidden_act). Run this model outside of it."
        )


def _projected(self: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What is convolved, [B, S, channels], and z [B, S, Nv, Dv], b, a [B, S, Nv]."""
    if hasattr(self, "q_proj"):  # OLMo-Hybrid
        mixed = torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1)
        return (
            mixed,
            self.g_proj(x).unflatten(-1, (-1, self.head_v_dim)),
            self.b_proj(x),
            self.a_proj(x),
        )
    if hasattr(self, "in_proj_qkv"):  # Qwen3.5 has a projection for each
        z = self.in_proj_z(x).unflatten(-1, (-1, self.head_v_dim))
        return self.in_proj_qkv(x), z, self.in_proj_b(x), self.in_proj_a(x)
    q, k, v, z, b, a = self.fix_query_key_value_ordering(self.in_proj_qkvz(x), self.in_proj_ba(x))
    return torch.cat([each.flatten(2) for each in (q, k, v)], -1), z, b, a


@takes_cache
def _gated_delta_forward(
    self: Any,
    hidden_states: Tensor,
    cache: Cache | None = None,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """`Qwen3NextGatedDeltaNet.forward`, those of Qwen3.5, Qwen4-Exp and OLMo-Hybrid: their
    projections, all between them ours.

    A decode step is one call, and updates the cache's own tensors in place.
    """
    x, past = _without_padding(hidden_states, attention_mask), _Past(self, cache)
    documents = _documents(past, x, kwargs)
    _refuse_all_but_silu(self)
    mixed, z, b, a = _projected(self, x)
    norm = self.o_norm if hasattr(self, "o_norm") else self.norm
    twice = getattr(self, "allow_neg_eigval", False)  # OLMo-Hybrid
    activation = getattr(norm, "activation", "silu")
    if past.steps(x):
        out = npu_gated_delta_layer_decode(
            mixed,
            z,
            a,
            b,
            past.columns,
            past.states,
            self.conv1d.weight.squeeze(1).t(),
            self.A_log,
            self.dt_bias,
            norm.weight,
            torch.arange(x.shape[0], device=x.device),
            conv_bias=self.conv1d.bias,
            epsilon=norm.variance_epsilon,
            gate_activation=activation,
            allow_neg_eigval=twice,
        )
    else:
        mixed = _convolved(self, past, mixed, documents)
        q, k, v = mixed.split([self.key_dim, self.key_dim, self.value_dim], dim=-1)
        out = _recurred(
            _chunk_gated_delta_rule,
            past,
            documents,
            q.unflatten(-1, (-1, self.head_k_dim)),
            k.unflatten(-1, (-1, self.head_k_dim)),
            v.unflatten(-1, (-1, self.head_v_dim)),
            kernels.decay(a, self.A_log, self.dt_bias),
            2 * b.sigmoid() if twice else b.sigmoid(),
            output_final_state=cache is not None,
        )
        epsilon = norm.variance_epsilon
        out = npu_gated_rms_norm(out, z, norm.weight, epsilon, activation=activation)
    out = out.flatten(2)
    projected: Tensor = self.o_proj(out) if hasattr(self, "o_proj") else self.out_proj(out)
    return projected


def _lower_bound(forget: Any) -> float | None:
    """Of the logarithm of the decay, where the gate is a sigmoid; None: a softplus."""
    if hasattr(forget, "safe_gate"):  # Ling-3.0
        return forget.lower_bound if forget.safe_gate else None
    return getattr(forget, "safe_gate_lower_bound", None)


@takes_cache
def _kimi_delta_forward(
    self: Any,
    hidden_states: Tensor,
    cache: Cache | None = None,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """`KimiLinearDeltaAttention.forward`, GLM-5.3-Flash's and Ling-3.0's: their projections, all
    between them ours, the gate of the decay inside the rule.

    A decode step is one call, and updates the cache's own tensors in place.
    """
    x, past = _without_padding(hidden_states, attention_mask), _Past(self, cache)
    documents = _documents(past, x, kwargs)
    _refuse_all_but_silu(self)
    heads, forget = (-1, self.head_dim), self.forget_gate
    norm = self.o_norm
    mixed = torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1)
    # Ling's projections have full rank
    z = self.g_proj(x) if hasattr(self, "g_proj") else self.g_b_proj(self.g_a_proj(x))
    a = forget.f_proj(x) if hasattr(forget, "f_proj") else forget.f_b_proj(forget.f_a_proj(x))
    z, a = z.unflatten(-1, heads), a.unflatten(-1, heads)
    A_log, dt_bias = forget.A_log.flatten(), forget.dt_bias.unflatten(0, heads)
    bound = _lower_bound(forget)
    b = self.b_proj(x)
    if past.steps(x):
        out = npu_gated_delta_layer_decode(
            mixed,
            z,
            a,
            b,
            past.columns,
            past.states,
            self.conv1d.weight.squeeze(1).t(),
            A_log,
            dt_bias,
            norm.weight,
            torch.arange(x.shape[0], device=x.device),
            conv_bias=self.conv1d.bias,
            epsilon=norm.variance_epsilon,
            gate_activation="sigmoid",
            is_kda=True,
            lower_bound=bound,
        )
    else:
        mixed = _convolved(self, past, mixed, documents)
        q, k, v = (each.unflatten(-1, heads) for each in mixed.chunk(3, -1))
        gate = dict(use_gate_in_kernel=True, A_log=A_log, dt_bias=dt_bias, lower_bound=bound)
        out = _recurred(_chunk_kda, past, documents, q, k, v, a, b.sigmoid(), **gate)
        epsilon = norm.variance_epsilon
        out = npu_gated_rms_norm(out, z, norm.weight, epsilon, activation="sigmoid")
    projected: Tensor = self.o_proj(out.flatten(2))
    return projected


# --------------------------------------------------------------------------------- the replacement

_GATED_DELTA = (
    modeling_qwen3_next.Qwen3NextGatedDeltaNet,
    modeling_qwen3_5.Qwen3_5GatedDeltaNet,
    modeling_qwen3_5_moe.Qwen3_5MoeGatedDeltaNet,
    modeling_olmo_hybrid.OlmoHybridGatedDeltaNet,
    modeling_qwen4_exp.Qwen4ExpTextGatedDeltaNet,
)
_KIMI_DELTA = (
    modeling_kimi_linear.KimiLinearDeltaAttention,
    modeling_glm5_next.Glm5NextTextLinearAttention,
    *_LING,
)
_LINEAR: tuple[tuple[Any, Callable[..., Tensor]], ...] = (
    *((each, _gated_delta_forward) for each in _GATED_DELTA),
    *((each, _kimi_delta_forward) for each in _KIMI_DELTA),
    (
        modeling_olmo_hybrid.OlmoHybridAttentionDecoderLayer,  # it is told of positions too
        _with_documents(modeling_olmo_hybrid.OlmoHybridAttentionDecoderLayer),
    ),
    *(
        told
        for layer, model in (
            (modeling_qwen3_next.Qwen3NextDecoderLayer, modeling_qwen3_next.Qwen3NextModel),
            (modeling_qwen3_5.Qwen3_5DecoderLayer, modeling_qwen3_5.Qwen3_5TextModel),
            (modeling_qwen3_5_moe.Qwen3_5MoeDecoderLayer, modeling_qwen3_5_moe.Qwen3_5MoeTextModel),
            (modeling_kimi_linear.KimiLinearDecoderLayer, modeling_kimi_linear.KimiLinearModel),
            (
                modeling_olmo_hybrid.OlmoHybridLinearAttentionDecoderLayer,
                modeling_olmo_hybrid.OlmoHybridModel,
            ),
        )
        for told in ((layer, _with_documents(layer)), (model, _with_positions(model)))
    ),
)
_in_use = False
_entering = Lock()


@contextmanager
def use(
    *,
    weight_format: str | None = None,
    page_size: int = 64,
    drafts: int = 16,
    dequantise: bool | None = None,
) -> Iterator[None]:
    """Run, by our ops inside the context, the attention of DeepSeek-V3.2, DeepSeek-V4, GLM-5 and
    GLM-5.3-Flash, that of MiniMax-M3 and Qwen4-Exp to chosen blocks, DeepSeek-V4's
    hyper-connections, the linear attention of Qwen3-Next, Qwen3.5, Qwen4-Exp, OLMo-Hybrid,
    Kimi-Linear, GLM-5.3-Flash and Ling-3.0, and the latent attention of Kimi-Linear and Ling-3.0.

    Every such model of the process is concerned; on exit their own code is back. Padding may be on
    either side of a text or inside; linear attention with a cache wants it on the left, as the
    models' own does. Without a cache a row may hold several documents, whose `position_ids` begin
    anew: they are kept apart. Any other mask is refused by the sparse attention, and is not read by
    the linear one. The sparse attention is for inference: its cache becomes paged at the first
    forward pass (a new cache for every context), and its weights are read again where they were
    replaced or written, but not where they were written through `.data`, which does not count:
    leave the context for that. On an NPU the attention of a decode step is one graph a layer, from
    its second call on. Latent attention that sees every token is the same, and with gradients, a
    cache that is not a new DynamicCache, in torch.compile or on an NPU the model's own code. Linear
    attention keeps the model's cache, and has gradients wherever it is not a decode step.

    Args:
        weight_format: of the sparse attention. "linear": the model's own weights, no second copy.
            "nz": copies, for an NPU, and for Hopper, whose products of few tokens they make faster.
            None: "nz" on an NPU, else "linear".
        page_size: positions a page, a multiple of 16.
        drafts: tokens that a cache of DeepSeek-V4, GLM-5.3-Flash or Qwen4-Exp can take back.
        dequantise: DeepSeek-V4's projections of 8 bits. False: they stay as they are, and what
            they meet is quantized. True: what they stand for. None: True on an NPU, else False.

    Returns:
        A context manager.

    Raises:
        RuntimeError: it is in force already.

    >>> from custom.integrations.transformers import use
    >>> with use():
    ...     pass  # model.generate(**tokenizer(texts, padding=True, return_tensors="pt"))
    """
    global _in_use
    attention = _attention_forward(weight_format, page_size)
    if drafts < 0:
        raise ValueError(f"{WHERE}: `drafts` is {drafts}, expected 0 or more.")
    forwards = [
        *((each, attention) for each in CONVENTIONS),
        (
            DeepseekV4Attention,
            deepseek_v4_model.attention_forward(weight_format, page_size, drafts, dequantise),
        ),
        *deepseek_v4_model.FORWARDS,
        (
            modeling_glm5_next.Glm5NextTextAttention,
            glm5_next.attention_forward(weight_format, page_size, drafts),
        ),
        *(
            (each.attention, block_sparse.attention_forward(each, page_size, drafts))
            for each in (block_sparse.M3, block_sparse.QWEN4)
        ),
        *((each, latent.attention_forward(each, weight_format, page_size)) for each in _LATENT),
        *_LINEAR,
    ]
    with _entering:
        if _in_use:
            raise RuntimeError(
                "custom.integrations.transformers.use() is in force already; leave that context "
                "first."
            )
        _in_use = True
    originals = [(each, each.forward) for each, _ in forwards]
    try:
        for each, ours in forwards:
            each.forward = ours
        with deepseek_v4_model.rewindable():
            yield
    finally:
        for each, theirs in originals:
            each.forward = theirs
        _in_use = False
