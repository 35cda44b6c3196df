# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The READMEs' table of ops: what each is for, its dtypes, its backends and its page.

Ops of one purpose share a row.  An op that is in no row of PURPOSES gets one of its own, with the
first sentence of its docstring.  Gradients that autograd calls have no public function and no row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from custom.dispatch import backends
from custom.dispatch.registry import SPECS, Spec

import custom

# public functions whose op bears another name
PUBLIC = {
    "npu_hadamard": "hadamard",
    "npu_quantize_index_query": "quantize_index_query",
    "npu_indexer_loss": "compute_index_loss_sparse",
}
HALF, FLOAT, EIGHT = "bf16, fp16", "bf16, fp16, fp32", "fp8, int8"


@dataclass(frozen=True)
class Purpose:
    """A row: in English, in Chinese, dtypes on a device, the page, and the public names."""

    english: str
    chinese: str
    dtypes: str
    page: str
    names: tuple[str, ...]


PURPOSES = (
    Purpose(
        "DSA layer in one call",
        "整个 DSA 层，一次调用",
        f"{HALF}; {EIGHT}",
        "which_op.md",
        (
            "npu_sparse_attention_pto",
            "npu_sparse_attention_indices_pto",
            "npu_sparse_attention_shared_pto",
        ),
    ),
    Purpose(
        "DeepSeek-V4 layer in one call",
        "整个 DeepSeek-V4 层，一次调用",
        f"{HALF}; {EIGHT}",
        "design/sparse_attention_v4_pto.md",
        ("npu_sparse_attention_v4_pto",),
    ),
    Purpose(
        "its stages: projections, entries, attention, output",
        "其各阶段：投影、压缩条目、注意力、输出",
        f"{HALF}; {EIGHT}",
        "design/sparse_attn_sharedkv.md",
        (
            "npu_sharedkv_prolog_pto",
            "npu_compressor",
            "npu_sparse_attn_sharedkv",
            "npu_kv_quant_sparse_attn_sharedkv",
            "npu_grouped_o_proj_pto",
        ),
    ),
    Purpose(
        "its hyper-connections",
        "其超连接",
        HALF,
        "design/sparse_attention_v4_pto.md",
        ("npu_hc_pre", "npu_hc_post", "npu_hc_post_pre"),
    ),
    Purpose(
        "MLA projections, norms, RoPE, cache write",
        "MLA 投影、归一化、RoPE、写缓存",
        f"{HALF}; {EIGHT}",
        "layouts.md",
        ("npu_mla_prolog_pto", "npu_mla_prolog_v3"),
    ),
    Purpose(
        "the same for the indexer",
        "索引器的同类步骤",
        f"{HALF}; {EIGHT}",
        "layouts.md",
        ("npu_indexer_prolog_pto", "npu_lightning_indexer_prolog_pto"),
    ),
    Purpose(
        "top-k keys of every query",
        "每个查询的 top-k 键",
        HALF,
        "which_op.md",
        ("npu_lightning_indexer", "npu_lightning_indexer_scores", "npu_lightning_indexer_grad"),
    ),
    Purpose(
        "attention over selected latents",
        "对选中潜向量的注意力",
        HALF,
        "which_op.md",
        ("npu_sparse_flash_attention", "npu_sparse_flash_attention_grad"),
    ),
    Purpose(
        "choose blocks of keys, attention to them (grouped queries)",
        "选取键块，并对选中块做分组查询注意力",
        HALF,
        "design/sparse_attention_score.md",
        ("npu_block_indexer", "npu_sparse_attention_score"),
    ),
    Purpose(
        "both on caches of 8 bits",
        "8 位缓存上的以上两者",
        EIGHT,
        "quantized.md",
        (
            "npu_quant_lightning_indexer",
            "npu_quant_lightning_indexer_scores",
            "npu_kv_quant_sparse_flash_attention",
            "npu_kv_quant_sparse_flash_attention_lse",
        ),
    ),
    Purpose(
        "write caches of 8 bits",
        "写 8 位缓存",
        FLOAT,
        "quantized.md",
        (
            "npu_latent_cache_write",
            "npu_index_cache_write",
            "quantize_index_query",
            "hadamard",
        ),
    ),
    Purpose(
        "train the indexer",
        "训练索引器",
        HALF,
        "which_op.md",
        ("compute_index_loss_sparse", "npu_sparse_lightning_indexer_grad_kl_loss"),
    ),
    Purpose(
        "dense attention over paged latents (MLA)",
        "对分页潜向量的稠密注意力（MLA）",
        HALF,
        "design/fused_infer_attention_score_v2.md",
        ("npu_fused_infer_attention_score_v2",),
    ),
    Purpose(
        "dense attention",
        "稠密注意力",
        HALF,
        "porting/flash_attention.md",
        ("npu_fused_attention",),
    ),
    Purpose(
        "GDN and KDA, prefill and training",
        "GDN 与 KDA：预填充与训练",
        HALF,
        "porting/fla.md",
        ("npu_chunk_gated_delta_rule", "npu_chunk_kda"),
    ),
    Purpose(
        "GDN and KDA, decode",
        "GDN 与 KDA：解码",
        FLOAT,
        "porting/fla.md",
        (
            "npu_fused_sigmoid_gating_delta_rule_update",
            "npu_recurrent_gated_delta_rule",
            "npu_gated_delta_layer_decode",
        ),
    ),
    Purpose(
        "short convolution",
        "短卷积",
        FLOAT,
        "porting/causal_conv1d.md",
        (
            "npu_causal_conv1d",
            "npu_causal_conv1d_update",
            "npu_fused_causal_conv1d",
            "npu_fused_causal_conv1d_v2",
        ),
    ),
    Purpose("gated RMSNorm", "门控 RMSNorm", FLOAT, "porting/fla.md", ("npu_gated_rms_norm",)),
    Purpose(
        "merge results of several cards",
        "合并多卡结果",
        FLOAT,
        "parallel.md",
        ("npu_merge_states", "npu_merge_topk", "npu_localize_indices"),
    ),
)


def public(spec: Spec) -> str | None:
    """The function of `custom` that calls the op; None: autograd calls it."""
    name = PUBLIC.get(spec.name, spec.name)
    return name if name in custom.__all__ else None


def purposes() -> Iterator[Purpose]:
    """All rows, those of ops without a purpose last."""
    yield from PURPOSES
    known = {name for purpose in PURPOSES for name in purpose.names}
    for name in filter(None, map(public, SPECS)):
        if name not in known:
            sentence = (getattr(custom, name).__doc__ or "").split(".")[0].strip()
            yield Purpose(sentence, sentence, "-", "which_op.md", (name,))


# a module that says why it runs no call at all is no kernel
_REFUSED = {("npu", "npu_kv_quant_sparse_attn_sharedkv")}


def has_kernel(backend: backends.Backend, spec: Spec) -> bool:
    return backends.has_kernel(backend, spec) and (backend.name, spec.name) not in _REFUSED


def with_kernels(names: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """The backends of all of them, and those that one lacks."""
    specs = [spec for spec in SPECS if public(spec) in names]
    found, lacking = ["CPU"], []
    for title, backend in (("CUDA", backends.CUDA), ("NPU", backends.NPU)):
        without = [
            name for spec in specs if not has_kernel(backend, spec) and (name := public(spec))
        ]
        if len(without) < len(specs):
            found.append(title + ("\\*" if without else ""))
            lacking += without
    return found, lacking


def _drawn(head: tuple[str, ...], language: str, without: str) -> str:
    """The first column leads to the page, so that the table fits GitHub's column."""
    rows, all_lacking = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"], []
    for purpose in purposes():
        found, lacking = with_kernels(purpose.names)
        cells = (
            f"[{getattr(purpose, language)}](docs/{purpose.page})",
            ", ".join(f"`{name}`" for name in purpose.names),
            purpose.dtypes,
            ", ".join(found),
        )
        rows.append(f"| {' | '.join(cells)} |")
        all_lacking += lacking
    if all_lacking:
        rows += ["", without.format(", ".join(f"`{name}`" for name in all_lacking))]
    return "\n".join(rows) + "\n"


def english() -> str:
    return _drawn(("for", "`custom.` ..", "dtypes", "backends"), "english", "\\* but for {}.")


def chinese() -> str:
    return _drawn(("用途", "`custom.` ..", "数据类型", "后端"), "chinese", "\\* {} 除外。")


BLOCKS = {"ops": english, "ops zh": chinese}
