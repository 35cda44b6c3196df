# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Transformers' Kimi-Linear and Ling-3.0 inside `use()`: the layers whose attention sees every
token, absorbed, over pages of latents.

    q = x W_q (or c W_uq)   out = softmax(scale (q_nope W_uk . l + RoPE(q_rope) . k_rope)) l W_uv

Kimi-Linear rotates nothing; Ling gates each head.  Without gradients and with a new DynamicCache,
or none, on a CPU and, in 16 bits, on CUDA or an NPU; elsewhere, and with biases, the model's own
code runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..attention import npu_fused_infer_attention_score_v2
from ..dispatch.errors import NotSupported
from ..sparse_attention import npu_mla_prolog_pto
from .cached import Converted, PagedLayer, attends, extent, taken_over
from .dsa import SharedAttentionWeights, check_format, format_of, shared_of
from .masks import WHERE, OncePerForward, Texts, texts, unmasked
from .paged import PagedCaches, check_page, token_positions

from transformers.cache_utils import Cache, DynamicLayer  # isort: skip  # as the others

KERNELS = ("cuda", "npu")  # devices with kernels of 16 bits


def _attended(
    state: tuple[Any, ...], x: Tensor, cos: Tensor, sin: Tensor, lengths: Tensor, there: Tensor
) -> Tensor:
    """What the attention adds; Kimi-Linear's angles are of width 0."""
    w: SharedAttentionWeights
    module, w, caches, pools, block_table = state
    rotary, own = pools.kr.shape[-1], cos.shape[-1] > 0
    if not own:  # the channels that others rotate are there, and stay as they are
        cos, sin = x.new_ones(*x.shape[:2], rotary), x.new_zeros(*x.shape[:2], rotary)
    slots = caches.slots(token_positions(lengths, x.shape[1]), block_table).where(there, -1)
    query, query_rope, _ = npu_mla_prolog_pto(
        x,
        *w.prolog,
        sin,
        cos,
        pools.kv,
        pools.kr,
        slots,
        rmsnorm_epsilon_cq=w.options["rms_norm_eps"],
        rmsnorm_epsilon_ckv=w.options["rms_norm_eps"],
        rope_interleaved=own,
        weight_format=w.options["weight_format"],
    )
    latent, _ = npu_fused_infer_attention_score_v2(
        query,
        pools.kv,
        pools.kv,
        query_rope=query_rope,
        key_rope=pools.kr,
        actual_seq_kvlen=lengths,
        block_table=block_table,
        num_query_heads=query.shape[2],
        num_key_value_heads=1,
        softmax_scale=w.options["softmax_scale"],
        input_layout="BSND",
        sparse_mode=3,
    )
    out = w.values(latent)
    if hasattr(module, "g_proj"):
        gate = module.g_proj(x).float().sigmoid().to(x.dtype)
        out = (out.unflatten(-1, (gate.shape[-1], -1)) * gate[..., None]).flatten(2)
    projected: Tensor = module.o_proj(out)
    return projected


def _weights(module: Any, weight_format: str | None) -> SharedAttentionWeights:
    weight = module.kv_a_proj_with_mqa.weight
    w = shared_of(module, dict(rope_interleaved=True), format_of(weight, weight_format))
    if "weight_quant_mode" in w.options:
        raise NotSupported(
            f"{WHERE} serves projections of {type(module).__name__} in 16 or 32 bits; these are "
            "of 8. Dequantize them."
        )
    return w


def _read(
    mask: Any, requests: int, tokens: int, valid: Tensor | None, cached: int, like: Tensor
) -> Texts:
    before = None if valid is None else valid[:, :cached]
    if mask is None:
        return unmasked(requests, tokens, before, like.device)
    return texts(mask, requests, tokens, before)


def _layers_of(config: Any) -> list[int]:
    return [i for i, kind in enumerate(config.layer_types) if kind == "full_attention"]


def _is_ours(module: Any, x: Tensor, cache: Cache | None) -> bool:
    """Whether the pass is one that the ops serve, see above; once there are pages, they have to."""
    layer = None if cache is None else cache.layers[module.layer_idx]
    if isinstance(layer, PagedLayer):
        return True
    has_kernels = x.device.type == "cpu" or (x.device.type in KERNELS and x.element_size() == 2)
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or not has_kernels:
        return False
    new = layer is None or (type(layer) is DynamicLayer and layer.get_seq_length() == 0)
    return new and module.kv_a_proj_with_mqa.bias is None


def attention_forward(
    attention: Any, weight_format: str | None, page_size: int
) -> Callable[..., Any]:
    """The forward of a model's `attention`."""
    check_format(weight_format)
    check_page(page_size)
    own, read = attention.forward, OncePerForward(_read)
    converted = Converted(lambda layer, _: _weights(layer, weight_format))

    def taken(cache: Cache | None, module: Any, x: Tensor) -> PagedLayer:
        numbers = [module.layer_idx] if cache is None else _layers_of(module.config)

        def made() -> list[PagedLayer]:
            caches = PagedCaches(
                len(numbers),
                (module.kv_lora_rank, module.qk_rope_head_dim, 0),
                requests=x.shape[0],
                capacity=x.shape[1],
                page_size=page_size,
                dtype=x.dtype,
                device=x.device,
            )
            return [PagedLayer(caches, index, _attended) for index in range(len(numbers))]

        return taken_over(cache, module.layer_idx, numbers, DynamicLayer, made)

    @attends
    def absorbed(
        self: Any,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        requests, tokens, _hidden = hidden_states.shape
        w = converted(self, hidden_states)
        layer = None if cache is None else taken(cache, self, hidden_states)
        held = extent(hidden_states, layer)
        found = read(self.layer_idx, attention_mask, *held, hidden_states)
        none = hidden_states[..., :0]
        cos, sin = (
            each.expand(requests, -1, -1).contiguous()
            for each in position_embeddings or (none, none)
        )
        x, cos, sin = (found.gathered(each) for each in (hidden_states, cos, sin))
        if layer is None:
            layer = taken(None, self, x)
        else:
            found.refuse_documents()
        pools = layer.append(tokens)
        layer.valid = found.valid
        state = (self, w, layer.caches, pools, layer.caches.block_table)
        out = layer.attend(state, x.contiguous(), cos, sin, found.lengths, found.there)
        return found.vouched(found.scattered(out, tokens)), None

    def forward(self: Any, *args: Any, **options: Any) -> Any:
        x = args[0] if args else options["hidden_states"]
        cache = next((each for each in options.values() if isinstance(each, Cache)), None)
        return (absorbed if _is_ours(self, x, cache) else own)(self, *args, **options)

    return forward
