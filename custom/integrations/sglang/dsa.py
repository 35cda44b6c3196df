# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""DeepSeek-V3.2's and GLM-5's sparse attention in SGLang.

SGLang keeps the model, its projections, the caches, their writers and the batch's metadata.  Ours
are the two ends of a selection: what its indexer asks for the best keys, and what its backend
attends to them with, both on SGLang's own pages.  Between them a selection is positions in a
request, which SGLang calls an unfused top-k.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from sglang.srt import runtime_context
from sglang.srt.layers.attention.dsa.dsa_indexer import Indexer
from sglang.srt.layers.attention.dsa_backend import DeepseekSparseAttnBackend, DSAMetadata
from sglang.srt.model_executor.forward_context import get_token_to_kv_pool
from torch import Tensor
from typing_extensions import override  # of torch

from ...dispatch.common import quantized
from ...dispatch.errors import NotSupported
from ...quantized import npu_kv_quant_sparse_flash_attention, npu_quant_lightning_indexer
from ...sparse_attention import npu_sparse_flash_attention
from ..engines import refuse
from .modes import check_modes
from .versions import SWITCH

if TYPE_CHECKING:  # as what its configuration is published
    from sglang.srt.arg_groups.fields.exec_ import ExecKernel
    from sglang.srt.arg_groups.fields.memory import Memory
    from sglang.srt.arg_groups.fields.parallel import Parallel
    from sglang.srt.layers.attention.dsa.dsa_indexer_metadata import DSAIndexerMetadata
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

PAGE = 64
# of SGLang's own kernels those that take pages of bfloat16 or rows of 656 bytes
KERNELS = ("flashmla_sparse", "flashmla_kv", "flashmla_auto", "fa3")


def check(runner: Any) -> None:
    parallel: Parallel = runtime_context.get_parallel()
    kernel: ExecKernel = runtime_context.get_exec().kernel
    memory: Memory = runtime_context.get_memory()
    pool: DSATokenToKVPool = runner.token_to_kv_pool
    model = runner.model_config.hf_config
    kernels = {kernel.dsa_prefill_backend, kernel.dsa_decode_backend}
    more = {
        "caches split by layers": parallel.enable_dsa_cache_layer_split,
        "hierarchical sparse attention": memory.enable_hisparse,
        f"kernels other than {', '.join(KERNELS)}": not kernels <= {*KERNELS},
        f"pages of other than {PAGE} tokens": runner.page_size != PAGE,
        "caches other than bfloat16, or fp8 with scales": pool.dtype is not torch.bfloat16
        and not pool.dsa_kv_cache_store_fp8,
        "pools of index keys": getattr(model, "index_kpool", 1) > 1,
        "keys that are always selected": bool(
            getattr(model, "index_init_tokens", 0) or getattr(model, "index_local_tokens", 0)
        ),
    }
    check_modes("sparse attention", runner, more)


class SparseBackend(DeepseekSparseAttnBackend):
    def __init__(self, model_runner: Any, *args: Any, **kwargs: Any) -> None:
        check(model_runner)
        super().__init__(model_runner, *args, **kwargs)
        self.use_fused_topk = False

    @override
    def forward_extend(self, *given: Any, **named: Any) -> Tensor:
        """Short prompts SGLang attends to densely, with keys and values of every head."""
        forward = super().forward_extend if self.use_mha else self.forward_decode
        out: Tensor = forward(*given, **named)
        return out

    @override
    def forward_decode(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        q_rope: Tensor | None = None,
        k_rope: Any = None,
        topk_indices: Tensor | None = None,
        cos_sin_cache: Tensor | None = None,
        is_neox: bool | None = False,
        llama_4_scaling: Tensor | None = None,
        attn_sink: Tensor | None = None,
    ) -> Tensor:
        """Latents [T, N, R] of queries q [T, N, R] and q_rope; zeros past the batch's tokens."""
        if topk_indices is None:
            raise NotSupported(
                f"{SWITCH}=1 serves layers that come with a selection of keys, and this one comes "
                f"without; unset {SWITCH}."
            )
        asked = {
            "a rotation in the attention": cos_sin_cache is not None,
            "Llama 4's scaling": llama_4_scaling is not None,
            "attention sinks": attn_sink is not None,
        }
        refuse(SWITCH, "sparse attention", asked)
        pool: DSATokenToKVPool = self.token_to_kv_pool
        if k is not None and save_kv_cache:
            pool.set_mla_kv_buffer(layer, forward_batch.out_cache_loc, k, k_rope)
        heads, rank = layer.tp_q_head_num, layer.v_head_dim
        sizes = [rank, layer.head_dim - rank]
        if q_rope is None:
            q, q_rope = q.view(-1, heads, layer.head_dim).split(sizes, -1)
        q, q_rope = (each.view(-1, heads, n) for each, n in zip((q, q_rope), sizes, strict=True))
        metadata: DSAMetadata = self.forward_metadata
        t = sum(metadata.dsa_extend_seq_lens_list)
        rows = pool.get_key_buffer(layer.layer_id)
        pages = rows.view(-1, PAGE, 1, rows.shape[-1])
        out = q.new_zeros(q.shape)
        out[:t] = self.attended(
            q[:t],
            q_rope[:t],
            pages,
            topk_indices[:t, None],
            layer.scaling,
            actual_seq_lengths_kv=metadata.cache_seqlens_int32,
            layout_kv="PA_BSND",
            **by_keys(metadata),
        )
        return out

    def attended(
        self,
        q: Tensor,
        q_rope: Tensor,
        pages: Tensor,
        selected: Tensor,
        scale: float,
        **given: Any,
    ) -> Tensor:
        if not self.dsa_kv_cache_store_fp8:
            latents, rotary = pages.split([q.shape[-1], q_rope.shape[-1]], -1)
            rope = dict(query_rope=q_rope, key_rope=rotary)
            return npu_sparse_flash_attention(q, latents, None, selected, scale, **rope, **given)[0]
        pages = pages.view(torch.float8_e4m3fn)
        given.update(attention_mode=2, row_layout=quantized.NOPE_SCALE_ROPE)
        both = torch.cat([q, q_rope], -1)
        return npu_kv_quant_sparse_flash_attention(
            both, pages, pages, selected, scale, 2, 2, **given
        )


def by_keys(metadata: DSAMetadata) -> dict[str, Any]:
    """Which queries are whose, and where the pages of each request lie."""
    return dict(
        actual_seq_lengths_query=metadata.cu_seqlens_q[1:],
        block_table=metadata.real_page_table,
        layout_query="TND",
    )


class SelectingIndexer(Indexer):
    """Both ways in which SGLang's indexer asks for the best keys: decodes, and prefills."""

    @override
    def _get_topk_paged(
        self,
        forward_batch: ForwardBatch,
        layer_id: int,
        q_fp8: Tensor,
        weights: Tensor,
        metadata: DSAIndexerMetadata,
    ) -> Tensor:
        """int32 [T, K] positions; -1 for none, and past the batch's tokens."""
        batch = metadata.attn_metadata
        t = sum(batch.dsa_extend_seq_lens_list)
        pool = cast("DSATokenToKVPool", get_token_to_kv_pool())
        pages = pool.get_index_k_with_scale_buffer(layer_id)
        keys, scales = quantized.index_cache_views(pages.view(-1, PAGE, quantized.PACKED), "fp8")
        out = torch.full((len(q_fp8), self.index_topk), -1, dtype=torch.int32, device=q_fp8.device)
        selected = npu_quant_lightning_indexer(
            q_fp8[:t],
            keys,
            weights[:t].squeeze(-1),  # the queries' scales are in them
            None,
            scales,
            0,
            0,
            actual_seq_lengths_key=batch.cache_seqlens_int32,
            layout_key="PA_BSND",
            sparse_count=self.index_topk,
            **by_keys(batch),
        )
        out[:t] = selected[:, 0]
        return out

    @override
    def _get_topk_ragged(
        self,
        enable_dual_stream: bool,
        forward_batch: ForwardBatch,
        layer_id: int,
        q_fp8: Tensor,
        weights: Tensor,
        metadata: DSAIndexerMetadata,
        topk_result: Tensor | None = None,
    ) -> Tensor:
        """`topk_result` has more rows where a graph is padded."""
        selected = SelectingIndexer._get_topk_paged(
            self, forward_batch, layer_id, q_fp8, weights, metadata
        )
        if topk_result is None:
            return selected
        topk_result[: len(selected)] = selected
        return topk_result


def replace_selection() -> None:
    """In SGLang's own class: the model has been built of it."""
    for name in ("_get_topk_paged", "_get_topk_ragged"):
        setattr(Indexer, name, vars(SelectingIndexer)[name])
