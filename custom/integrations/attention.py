# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Sparse attention as an attention function of Transformers, over its own caches.

A model that selects keys hands `indices` to its attention function.  Ours attends to these alone,
in the latent space: the cache holds latents [B, 1, T, R + Dr], no keys and values of each head, and
no mask over all keys is made beside the one that the model's own indexer asks for.  DeepSeek-V4
hands over a mask of its window and its entries instead, which says the same.  Dynamic, static
and offloaded caches, beam search, training and torch.compile are as Transformers has them.

    custom.integrations.transformers.register()
    model.set_attn_implementation("custom_sparse")
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from ..dispatch.errors import NotSupported, need
from ..sparse_attention import npu_sparse_flash_attention

need("transformers.models.axk2", __name__, '"transformers>=5.17,<6"')

from transformers.masking_utils import (  # noqa: E402
    AttentionMaskInterface,
    eager_mask,
    sdpa_mask,
)
from transformers.modeling_utils import AttentionInterface  # noqa: E402
from transformers.models.axk2.modeling_axk2 import AXK2Attention  # noqa: E402
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (  # noqa: E402
    DeepseekV4Attention,
)
from transformers.models.deepseek_v32.modeling_deepseek_v32 import (  # noqa: E402
    DeepseekV32Attention,
)
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaAttention  # noqa: E402
from transformers.models.hy_v4.modeling_hy_v4 import HYV4Attention  # noqa: E402

from .dsa import up_projections  # noqa: E402

NAME = "custom_sparse"
# what Transformers hands to every attention, and the mask or the cache says
UNREAD = {
    *("use_cache", "num_items_in_batch", "output_hidden_states", "output_router_logits"),
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"),
    *("position_ids", "is_causal"),
}
# their rotation, gates and sinks are their own code, or come as arguments
LATENT: tuple[Any, ...] = (AXK2Attention, DeepseekV32Attention, GlmMoeDsaAttention, HYV4Attention)


def sparse_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    indices: Tensor | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """query [B, N, S, Dn + Dr], key [B, 1, T, R + Dr], indices [B, S, K] -> [B, S, N, Dv].

    `attention_mask` [B, 1, S, T] says which of the selected keys a query sees; `s_aux` are the
    heads' sinks.
    """
    m: Any = module
    if type(module) is DeepseekV4Attention:
        return _of_rows(m, query, key, attention_mask, scaling, dropout, s_aux, others)
    if indices is None or type(module) not in LATENT:
        known = ", ".join(each.__name__ for each in (*LATENT, DeepseekV4Attention))
        raise NotSupported(
            f'attn_implementation="{NAME}" attends to the keys that {known} select; '
            f'{type(module).__name__} is none of them. Choose "sdpa" for this model.'
        )
    if dropout or attention_mask is None:
        raise NotSupported(
            f'attn_implementation="{NAME}" needs a mask and no dropout; {type(module).__name__} '
            f"passes dropout={dropout}, attention_mask={attention_mask}."
        )
    if attention_mask.dtype is not torch.bool or attention_mask.shape[1] != 1:
        raise NotSupported(
            f'attn_implementation="{NAME}" reads a mask [B, 1, S, T] of bool, and `attention_mask` '
            f"is {attention_mask.dtype} {list(attention_mask.shape)}. Pass True where a key is "
            "seen, the same for all heads."
        )
    _refuse(others)
    uk, uv = up_projections(m)
    plain, rope = query.transpose(1, 2).split([m.qk_nope_head_dim, m.qk_rope_head_dim], -1)
    latent, key_rope = key.transpose(1, 2).split([m.kv_lora_rank, m.qk_rope_head_dim], -1)
    seen = attention_mask[:, 0].expand(*indices.shape[:2], -1).gather(-1, indices.long())
    out, *_stats = npu_sparse_flash_attention(
        torch.einsum("bsnd,ndr->bsnr", plain, uk),
        latent,
        None,
        indices.masked_fill(~seen, -1)[:, :, None],
        scaling,
        query_rope=rope,
        key_rope=key_rope,
        sparse_mode=0,
        sinks=None if s_aux is None else s_aux.float(),
    )
    return torch.einsum("bsnr,nvr->bsnv", out, uv), None


def _refuse(others: dict[str, Any]) -> None:
    for name, came in others.items():
        if name not in UNREAD and came is not None and came is not False:
            raise NotSupported(
                f'attn_implementation="{NAME}" does not compute `{name}`, which is given. Leave it '
                "out, or choose another one."
            )


def _of_rows(
    m: Any,
    query: Tensor,
    rows: Tensor,
    mask: Tensor | None,
    scaling: float,
    dropout: float,
    sinks: Tensor | None,
    others: dict[str, Any],
) -> tuple[Tensor, None]:
    """DeepSeek-V4: rows [B, 1, T, D], keys and values at once, window and entries behind it; `mask`
    [B, 1, S, T] is 0 where a query sees one."""
    if dropout or mask is None or mask.dtype is torch.bool or mask.shape[1] != 1:
        came = "None" if mask is None else f"{mask.dtype} {list(mask.shape)}"
        raise NotSupported(
            f'attn_implementation="{NAME}" needs no dropout and a mask [B, 1, S, T] to add, the '
            f"same for all heads; {type(m).__name__} passes dropout={dropout}, "
            f"attention_mask={came}."
        )
    _refuse({name: came for name, came in others.items() if name != "sliding_window"})
    wanted, biased = [query.shape[2], rows.shape[2]], (mask != 0) & (mask > -1e4)
    if list(mask.shape[2:]) != wanted or bool(biased.any()):
        raise NotSupported(
            f'attn_implementation="{NAME}" reads a mask {wanted} that hides keys, and '
            f"`attention_mask` {list(mask.shape[2:])} does something else. Leave it out."
        )
    seen = (mask[:, 0] == 0).expand(query.shape[0], -1, -1)
    most = int(seen.sum(-1).max())
    found = seen.to(torch.int8).topk(max(1, min(most, rows.shape[2])), -1)
    out, *_stats = npu_sparse_flash_attention(
        query.transpose(1, 2),
        rows.transpose(1, 2),
        None,
        found.indices.masked_fill(found.values == 0, -1).to(torch.int32)[:, :, None],
        scaling,
        sparse_mode=0,
        sinks=None if sinks is None else sinks.float(),
    )
    return out, None


def _mask(*arguments: Any, **options: Any) -> Any:
    """Boolean, and never left out; DeepSeek-V4 puts that of its entries beside one to add."""
    config = options.get("config")
    adds = getattr(config, "model_type", None) == "deepseek_v4"
    return (eager_mask if adds else sdpa_mask)(*arguments, **options)


def _latent(expand_kv: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(expand_kv)
    def latent(self: Any, kv_nope: Tensor, k_rot: Tensor) -> Any:
        """What the cache is given: latents under our implementation, else as before."""
        if self.config._attn_implementation != NAME:
            return expand_kv(self, kv_nope, k_rot)
        return torch.cat([kv_nope, k_rot], -1), kv_nope[..., :0]

    return latent


def register() -> str:
    """Make `attn_implementation="custom_sparse"` known to Transformers, and return that name.

    For DeepSeek-V3.2, DeepSeek-V4, GLM-5, A.X-K2 and HY-V4; a second call changes nothing.

    Returns:
        "custom_sparse".

    >>> from custom.integrations.transformers import register
    >>> register()
    'custom_sparse'
    """
    if NAME not in AttentionInterface._global_mapping:
        AttentionInterface.register(NAME, sparse_attention)
        AttentionMaskInterface.register(NAME, _mask)
        for each in LATENT:
            each.expand_kv = _latent(each.expand_kv)
    return NAME
