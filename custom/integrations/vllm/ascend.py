# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The sparse attention of vllm-ascend on our ops.

vllm-ascend has its own model runner, caches and layers; the two calls that select keys and attend
to them are methods of its device operator, with the arguments of our ops.  These two are replaced.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override  # of torch
from vllm_ascend.device.device_op import BaseDeviceAdaptor, DeviceOperator

from ...dispatch.errors import NotSupported
from ...quantized import (
    npu_kv_quant_sparse_flash_attention,
    npu_kv_quant_sparse_flash_attention_lse,
    npu_quant_lightning_indexer,
)
from ...sparse_attention import npu_lightning_indexer, npu_sparse_flash_attention

# as vllm-ascend has it, for every model
SELECTED = 2048


class SparseOperator(BaseDeviceAdaptor):
    @staticmethod
    @override
    def indexer_select_post_process(
        sfa_impl: Any,
        q_li: Tensor,
        q_li_scale: Tensor | None,
        q_li_shape_ori: tuple[Any, ...] | None,
        weights: Tensor,
        kv_cache: tuple[Any, ...],
        attn_metadata: Any,
        actual_seq_lengths_query: Tensor,
        actual_seq_lengths_key: Tensor,
        enable_sparse_li_c8: bool,
        use_torch_npu_lightning_indexer: bool,
    ) -> Tensor:
        """int32 [T, 1, K], by keys of 16 bits, or of 8 bits (int8) with their scales.

        The keys stand behind latents and rotary keys, or behind rows of 8 bits of both.
        """
        keys, *scales = kv_cache[1 if _packed(kv_cache) else 2 :]
        given: dict[str, Any] = dict(
            actual_seq_lengths_query=actual_seq_lengths_query,
            actual_seq_lengths_key=actual_seq_lengths_key,
            block_table=attn_metadata.block_table,
            layout_query="TND",
            layout_key="PA_BSND",
            sparse_count=SELECTED,
        )
        if not enable_sparse_li_c8:
            return npu_lightning_indexer(q_li, keys, weights.to(q_li.dtype), **given)[0]
        assert q_li_scale is not None and q_li_shape_ori is not None
        return npu_quant_lightning_indexer(
            q_li.view(q_li_shape_ori),
            keys,
            weights.to(torch.float16),
            q_li_scale.view(q_li_shape_ori[:-1]),
            scales[0].squeeze(2),
            0,
            0,
            **given,
        )

    @classmethod
    @override
    def execute_sparse_flash_attention_process(
        cls,
        sfa_impl: Any,
        ql_nope: Tensor,
        q_pe: Tensor,
        kv_cache: tuple[Any, ...],
        topk_indices: Tensor,
        attn_metadata: Any,
        actual_seq_lengths_query: Tensor,
        actual_seq_lengths_key: Tensor,
        *,
        block_table: Tensor | None = None,
        sparse_mode: int = 3,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Latents [T, N, R], and with `return_lse` what vllm-ascend merges them by."""
        latents = kv_cache[0]
        given: dict[str, Any] = dict(
            block_table=attn_metadata.block_table if block_table is None else block_table,
            actual_seq_lengths_query=actual_seq_lengths_query,
            actual_seq_lengths_kv=actual_seq_lengths_key,
            layout_query="TND",
            layout_kv="PA_BSND",
            sparse_mode=sparse_mode,
            attention_mode=2,
        )
        if not _packed(kv_cache):
            given |= dict(query_rope=q_pe, key_rope=kv_cache[1], return_softmax_lse=return_lse)
            scale = sfa_impl.scale
            found = npu_sparse_flash_attention(
                ql_nope, latents, latents, topk_indices, scale, **given
            )
            return cls._format_sparse_flash_attention_output(*found, return_lse)
        query = torch.cat([ql_nope, q_pe], -1)
        packed: Any = (query, latents, latents, topk_indices, sfa_impl.scale, 2, 2)
        if not return_lse:
            return npu_kv_quant_sparse_flash_attention(*packed, **given)
        found = npu_kv_quant_sparse_flash_attention_lse(*packed, **given)
        return cls._format_sparse_flash_attention_output(*found, return_lse)


def _packed(kv_cache: tuple[Any, ...]) -> bool:
    """Whether rows hold latents of 8 bits, their rotary keys and their scales."""
    size: int = kv_cache[0].element_size()
    return size == 1


def register() -> None:
    if DeviceOperator is not BaseDeviceAdaptor:
        raise NotSupported(
            "CUSTOM_VLLM=1 serves vllm-ascend on Atlas A2 and A3, and this device has a "
            f"{DeviceOperator.__name__}; unset CUSTOM_VLLM."
        )
    for name in ("indexer_select_post_process", "execute_sparse_flash_attention_process"):
        setattr(BaseDeviceAdaptor, name, vars(SparseOperator)[name])
