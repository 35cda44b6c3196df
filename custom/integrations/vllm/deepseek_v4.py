# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""DeepSeek-V4's attention in vLLM.

A model class of ours, registered under the architecture's name, builds vLLM's own model of the
platform with `CompressedAttention` in the place of its attention.  vLLM keeps the weights, pages
the caches and sums over ranks.  All between is one op, which reads the weights where vLLM has them:
one call for requests that stand side by side and bring as many tokens, so that a step of decodes is
one, also of drafts to be checked.

A layer has a cache of its window's rows, one of the tokens of open windows (states), and one of
entries, with index keys behind those of a page; all but the states in the model's dtype.  What
refused drafts have written there, the next call writes anew, since it begins earlier: vLLM gives
pages back behind tokens that stay.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override  # of torch
from vllm.config import VllmConfig
from vllm.distributed.communication_op import tensor_model_parallel_all_reduce
from vllm.distributed.parallel_state import get_tensor_model_parallel_world_size
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.model_loader.weight_utils import sharded_weight_loader
from vllm.model_executor.models.utils import extract_layer_index
from vllm.models import deepseek_v4 as theirs
from vllm.models.deepseek_v4.common.rope import build_deepseek_v4_rope
from vllm.v1.attention.backend import AttentionBackend, CommonAttentionMetadata, MultipleOf
from vllm.v1.kv_cache_interface import KVCacheSpec, MLAAttentionSpec, SlidingWindowMLASpec

from ...compression import entry_positions
from ...dispatch.common import quantized
from ...sparse_attention_v4 import npu_sparse_attention_v4_pto
from ..engines import refuse
from .mla import SideBySide, SparseBuilder, SparseMetadata, kept
from .modes import SWITCH, check_modes
from .standing_in import standing_in

COMPRESSED = "attention to compressed keys"
SELECTING = 4  # tokens of an entry in layers with an indexer, whose windows overlap
ROWS, STATES = 64, 8  # tokens of a page
BLOCK = [quantized.TILE, quantized.TILE]  # numbers of 8 bits with a scale

# ------------------------------------------------------------------------ what vLLM asks of a cache


@dataclass
class Batch(SparseMetadata):
    calls: list[tuple[slice, slice]]  # requests and tokens of each


def side_by_side(counts: list[int]) -> list[tuple[slice, slice]]:
    """Requests and tokens of each call, of requests with so many tokens: neighbours with as many
    are one."""
    calls, request, token = [], 0, 0
    for count, group in groupby(counts):
        n = len(list(group))
        if count:
            calls.append((slice(request, request + n), slice(token, token + n * count)))
        request, token = request + n, token + n * count
    return calls


class Builder(SparseBuilder):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # decodes, with their drafts, stand side by side
        self.reorder_batch_threshold = self.longest_decode

    @override
    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Batch:
        batch = super().build(common_prefix_len, common_attn_metadata, fast_build)
        n = len(batch.lengths)
        # the padding of a graph has no tokens on the host, and as many as the others where it runs
        counts = [batch.uniform] * n
        if not batch.uniform:
            counts = common_attn_metadata.query_start_loc_cpu[: n + 1].diff().tolist()
        return Batch(
            batch.ends,
            batch.lengths,
            batch.block_table,
            batch.slots,
            batch.uniform,
            side_by_side(counts),
        )


class Backend(SideBySide):
    name = "CUSTOM_COMPRESSED"
    builder = Builder
    page = 256  # 64 entries of 4 tokens, 2 of 128

    @staticmethod
    @override
    def get_supported_kernel_block_sizes(kv_cache_spec: KVCacheSpec | None = None) -> list[Any]:
        return [MultipleOf(1)]


class Cache(AttentionLayerBase):
    """A row for each of the last `window` tokens, or one for `ratio` tokens each of all; in a page
    the rows of each width lie together."""

    def __init__(
        self,
        widths: list[int],
        dtype: torch.dtype,
        *,
        page: int = 0,
        window: int = 0,
        ratio: int = 0,
    ) -> None:
        self.widths, self.dtype = widths, dtype
        self.page, self.window, self.ratio = page, window, ratio

    @override
    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        rows = kv_cache.shape[2]  # of [pages, 1, rows, width]
        parts = kv_cache.flatten(1).split([rows * width for width in self.widths], 1)
        self.parts = [each.unflatten(1, (rows, -1)) for each in parts]

    @override
    def get_attn_backend(self) -> type[AttentionBackend]:
        return Backend

    @override
    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        given: dict[str, Any] = dict(
            num_kv_heads=1, max_tp_shards=1, head_size=sum(self.widths), dtype=self.dtype
        )
        if self.window:
            return SlidingWindowMLASpec(block_size=self.page, sliding_window=self.window, **given)
        return MLAAttentionSpec(
            block_size=vllm_config.cache_config.block_size, tokens_per_state=self.ratio, **given
        )


# -------------------------------------------------------------------------------------- the layer


def ratio_of(config: Any, layer: int) -> int:
    """Tokens of an entry, 0 without, as in layers that draft tokens; vLLM 0.32 reads configurations
    as DeepSeek writes them."""
    if layer >= config.num_hidden_layers:
        return 0
    if hasattr(config, "compress_ratios"):
        return int(config.compress_ratios[layer])
    return int(config.compress_rates.get(config.layer_types[layer], 0))


class Compressor(nn.Module):
    """Its weights, under vLLM's names."""

    def __init__(
        self, hidden: int, width: int, ratio: int, fold: int, eps: float, prefix: str
    ) -> None:
        super().__init__()
        self.ape = nn.Parameter(
            torch.empty(ratio, fold * width, dtype=torch.float32), requires_grad=False
        )
        self.fused_wkv_wgate: Any = MergedColumnParallelLinear(
            hidden,
            [fold * width] * 2,
            bias=False,
            disable_tp=True,
            prefix=f"{prefix}.fused_wkv_wgate",
        )
        self.norm: Any = RMSNorm(width, eps=eps)


class Indexer(nn.Module):
    """Its weights, under vLLM's names; every rank has all of them."""

    def __init__(self, config: Any, quant_config: Any, ratio: int, prefix: str) -> None:
        super().__init__()
        heads, width = config.index_n_heads, config.index_head_dim
        self.wq_b: Any = ReplicatedLinear(
            config.q_lora_rank,
            heads * width,
            bias=False,
            quant_config=quant_config,
            prefix=f"{prefix}.wq_b",
        )
        self.weights_proj: Any = ReplicatedLinear(
            config.hidden_size, heads, bias=False, prefix=f"{prefix}.weights_proj"
        )
        self.compressor = Compressor(
            config.hidden_size, width, ratio, 2, config.rms_norm_eps, f"{prefix}.compressor"
        )


class CompressedAttention(nn.Module, Cache):
    """Takes the arguments of vLLM's layer and computes the same, on our op.

    The layer itself is the cache of its window's rows.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        prefix: str,
        topk_indices_buffer: Tensor | None = None,
        aux_stream_list: list[Any] | None = None,
    ) -> None:
        nn.Module.__init__(self)
        quant_config = vllm_config.quant_config
        check_modes(
            COMPRESSED,
            vllm_config,
            data_parallelism=vllm_config.parallel_config.data_parallel_size > 1,
            weights_of_8_bits_but_in_blocks_of_128_x_128=quant_config is not None
            and getattr(quant_config, "weight_block_size", None) != BLOCK,
            caches_of_another_dtype_than_the_model=vllm_config.cache_config.cache_dtype != "auto",
        )
        c, dtype = vllm_config.model_config.hf_config, vllm_config.model_config.dtype
        ratio = ratio_of(c, extract_layer_index(prefix))
        self.options: dict[str, Any] = dict(
            cmp_ratio=ratio,
            ori_win_left=c.sliding_window - 1,
            rms_norm_eps=c.rms_norm_eps,
            sparse_count=c.index_topk,
            state_mode=1,
            weight_format="linear",
        )
        ranks = get_tensor_model_parallel_world_size()
        heads, groups = c.num_attention_heads, c.o_groups
        self.groups = groups // ranks
        self.fused_wqa_wkv: Any = MergedColumnParallelLinear(
            c.hidden_size,
            [c.q_lora_rank, c.head_dim],
            bias=False,
            quant_config=quant_config,
            disable_tp=True,
            prefix=f"{prefix}.fused_wqa_wkv",
        )
        self.q_norm: Any = RMSNorm(c.q_lora_rank, eps=c.rms_norm_eps)
        self.kv_norm: Any = RMSNorm(c.head_dim, eps=c.rms_norm_eps)
        self.wq_b: Any = ColumnParallelLinear(
            c.q_lora_rank,
            heads * c.head_dim,
            bias=False,
            quant_config=quant_config,
            prefix=f"{prefix}.wq_b",
        )
        self.wo_a: Any = ColumnParallelLinear(
            heads * c.head_dim // groups,
            groups * c.o_lora_rank,
            bias=False,
            quant_config=quant_config,
            prefix=f"{prefix}.wo_a",
        )
        self.wo_b: Any = RowParallelLinear(
            groups * c.o_lora_rank,
            c.hidden_size,
            bias=False,
            quant_config=quant_config,
            prefix=f"{prefix}.wo_b",
        )
        self.attn_sink = nn.Parameter(
            torch.empty(heads // ranks, dtype=torch.float32), requires_grad=False
        )
        vars(self.attn_sink)["weight_loader"] = sharded_weight_loader(0)
        self.rotary_emb: Any = build_deepseek_v4_rope(
            c,
            head_dim=c.head_dim,
            rope_head_dim=c.qk_rope_head_dim,
            max_position_embeddings=c.max_position_embeddings,
            compress_ratio=max(1, ratio),
        )
        self.compressor: Any = None
        self.indexer: Any = None
        self.copies: dict[str, Tensor] = {}
        self.layer_name = prefix
        layers = vllm_config.compilation_config.static_forward_context
        layers[prefix] = self
        Cache.__init__(self, [c.head_dim], dtype, page=ROWS, window=c.sliding_window)
        if ratio:
            fold, widths = 1 + (ratio == SELECTING), [c.head_dim]
            self.compressor = Compressor(
                c.hidden_size, c.head_dim, ratio, fold, c.rms_norm_eps, f"{prefix}.compressor"
            )
            if ratio == SELECTING:
                self.indexer = Indexer(c, quant_config, ratio, f"{prefix}.indexer")
                widths.append(c.index_head_dim)
            self.entries = Cache(widths, dtype, ratio=ratio)
            self.states = Cache(
                [2 * fold * width for width in widths],
                torch.float32,
                page=STATES,
                window=fold * ratio,
            )
            layers[f"{prefix}.entries"], layers[f"{prefix}.states"] = self.entries, self.states
        for module in self.modules():
            # the op reads weights as they are loaded: none is laid out for a kernel of vLLM's
            vars(module)["quant_method"] = None
        kinds = {each.weight.dtype for each in self.projections().values()}
        refuse(
            SWITCH,
            COMPRESSED,
            {
                "projections of which some have 8 bits": len(kinds) > 1,
                "scales of two weights or groups": kinds == {torch.float8_e4m3fn}
                and (c.q_lora_rank % BLOCK[0] + c.o_lora_rank % BLOCK[0]) > 0,
            },
        )

    def projections(self) -> dict[str, Any]:
        """The linear layers that have 8 bits in a checkpoint of such, by their weights' names."""
        found = dict(w_dq_kv=self.fused_wqa_wkv, w_uq=self.wq_b, w_o_a=self.wo_a, w_o_b=self.wo_b)
        return found if self.indexer is None else dict(found, w_idx_qb=self.indexer.wq_b)

    def process_weights_after_loading(self, dtype: torch.dtype) -> None:
        """The arguments of the op: views of vLLM's weights; the norms of entries are float32, and
        scales lie as the op reads them.

        vLLM calls it again when it has reloaded weights, to where they were.
        """
        rank = self.wq_b.weight.shape[1]
        w_dq, w_kv = self.fused_wqa_wkv.weight.detach().tensor_split([rank])
        self.weights: dict[str, Any] = dict(
            self.options,
            w_dq=w_dq,
            w_kv=w_kv,
            w_uq=self.wq_b.weight.detach(),
            gamma_cq=self.q_norm.weight.detach(),
            gamma_kv=self.kv_norm.weight.detach(),
            sinks=self.attn_sink.detach(),
            w_o_a=self.wo_a.weight.detach().unflatten(0, (self.groups, -1)),
            w_o_b=self.wo_b.weight.detach(),
        )
        if self.compressor is not None:
            names = ("w_cmp_kv", "w_cmp_gate", "cmp_ape", "gamma_cmp")
            self.weights |= self.compressing(names, self.compressor)
        if self.indexer is not None:
            names = ("w_idx_kv", "w_idx_gate", "idx_ape", "gamma_idx")
            self.weights |= self.compressing(names, self.indexer.compressor)
            self.weights["w_idx_qb"] = self.indexer.wq_b.weight.detach()
            self.weights["w_idx_proj"] = self.indexer.weights_proj.weight.detach()
        if w_dq.dtype is torch.float8_e4m3fn:
            self.weights |= self.scales(rank)

    def scales(self, rank: int) -> dict[str, Any]:
        """[K / 128, N / 128] of weights [N, K], one for 128 x 128 numbers."""
        found = {
            name: linear.weight_scale_inv.detach().float().t()
            for name, linear in self.projections().items()
        }
        found["w_dq"], found["w_kv"] = found.pop("w_dq_kv").tensor_split([rank // BLOCK[0]], 1)
        found["w_o_a"] = found["w_o_a"].unflatten(1, (self.groups, -1)).transpose(0, 1)
        named = {f"dequant_scale_{name}": scale.contiguous() for name, scale in found.items()}
        copies = {name: kept(self.copies, name, scale) for name, scale in named.items()}
        return dict(copies, weight_quant_mode=4)

    def compressing(self, names: tuple[str, ...], by: Compressor) -> dict[str, Tensor]:
        kv, gate = by.fused_wkv_wgate.weight.detach().chunk(2)
        norm = kept(self.copies, names[-1], by.norm.weight.detach().float())
        return dict(zip(names, (kv, gate, by.ape.detach(), norm), strict=True))

    @override
    def forward(
        self, positions: Tensor, hidden_states: Tensor, llama_4_scaling: Tensor | None = None
    ) -> Tensor:
        refuse(SWITCH, COMPRESSED, {"Llama 4's scaling": llama_4_scaling is not None})
        out = torch.zeros_like(hidden_states)
        torch.ops.custom_vllm.latent_attention(positions, hidden_states, out, self.layer_name)
        # vLLM's model may do so itself, of tokens that ranks share
        return tensor_model_parallel_all_reduce(out) if self.wo_b.reduce_results else out

    def attend(self, batch: Batch | None, positions: Tensor, x: Tensor, out: Tensor) -> None:
        """What this rank's heads add to [T, H] of the batch's tokens; what is past them stays."""
        if batch is None:  # vLLM measures memory
            return
        batches: Any = get_forward_context().attn_metadata
        caches: dict[str, Any] = dict(ori_kv=self.parts[0].unsqueeze(2))
        tables: dict[str, Any] = dict(ori_block_table=batch.block_table)
        if self.compressor is not None:
            names = ("cmp_kv", "idx_k"), ("cmp_state", "idx_state")
            entries = [part.unsqueeze(2) for part in self.entries.parts]
            for each, parts in zip(names, (entries, self.states.parts), strict=True):
                caches |= zip(each, parts, strict=False)
            tables["cmp_block_table"] = batches[f"{self.layer_name}.entries"].block_table
            tables["state_block_table"] = batches[f"{self.layer_name}.states"].block_table
        for requests, tokens in batch.calls:
            lengths = batch.lengths[requests]
            given = x[tokens].unflatten(0, (len(lengths), -1))
            found = npu_sparse_attention_v4_pto(
                given,
                act_seqs=lengths,
                **self.weights,
                **caches,
                **self.angles(positions[tokens].view(given.shape[:2]), lengths, x.dtype),
                **{name: table[requests] for name, table in tables.items()},
            )
            out[tokens] = found.flatten(0, 1)

    def angles(self, positions: Tensor, lengths: Tensor, dtype: torch.dtype) -> dict[str, Any]:
        """Sines and cosines at the tokens' positions [n, S], and at those of their entries."""
        places, ratio = {"": positions}, self.options["cmp_ratio"]
        if ratio:
            places["cmp_"] = entry_positions(lengths, positions.shape[1], ratio)
        found = {}
        for prefix, place in places.items():
            both = self.rotary_emb.cos_sin_cache[place].to(dtype).chunk(2, -1)
            for name, half in zip(("cos", "sin"), both, strict=True):
                found[prefix + name] = half.repeat_interleave(2, -1)
        return found


# -------------------------------------------------------------------------------------- the model


def _our_layers() -> AbstractContextManager[None]:
    module = sys.modules[theirs.DeepseekV4ForCausalLM.__module__]
    ours: dict[str, Any] = dict(DeepseekV4CPUAttention=CompressedAttention)
    if "_select_dsv4_attn_cls" in vars(module):  # on a GPU there are several
        ours = dict(_select_dsv4_attn_cls=lambda vllm_config: CompressedAttention)
    return standing_in({}, (module, ours))


class DeepseekV4ForCausalLM(theirs.DeepseekV4ForCausalLM):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        with _our_layers():
            super().__init__(vllm_config=vllm_config, prefix=prefix)


class DeepseekV4MTP(theirs.DeepSeekV4MTP):
    """The layers that draft tokens; vLLM has none for CPUs."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        with _our_layers():
            super().__init__(vllm_config=vllm_config, prefix=prefix)
