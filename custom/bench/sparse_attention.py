# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Rows for the DeepSeek-V3.2 layer and its stages, and for other models' sizes of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..dispatch.common.nz import to_nz
from . import in_torch
from .case import Arguments, Case, Draw, Outputs
from .peers import flash_mla_sparse

R, DR, DI, P = 512, 64, 128, 128
BF16 = 2  # bytes
Part = Callable[[Arguments], tuple[Arguments, Callable[[Outputs], Outputs]]]


@dataclass(frozen=True)
class Model:
    """The sizes in which the models differ; heads are given case by case, for shards of them."""

    label: str
    h: int
    rq: int  # 0: queries are projections of x
    dn: int
    ni: int
    scale: float
    index_rope_interleaved: bool
    dr: int = DR
    block: int = 1  # tokens of a selected entry

    def keys_of(self, k: int) -> int:
        """That a query reads of `k` entries, and of the open one behind them."""
        return k * self.block + self.block - 1

    def prolog_size(self, n: int) -> tuple[int, int]:
        """Weights of the MLA prolog and of the indexer prolog, in elements."""
        queries = (self.rq or self.h) * n * (self.dn + self.dr)
        mla = self.h * (self.rq + R + self.dr) + queries + n * self.dn * R
        return mla, self.rq * self.ni * DI + self.h * (DI + self.ni)


DEEPSEEK = Model("", 7168, 1536, 128, 64, 0.13523, False)  # with YaRN's factor
GLM5 = Model("GLM-5, ", 6144, 2048, 192, 32, 256**-0.5, True)
# no rotary part; 512 pools of 4 tokens and the open one
GLM5_FLASH = Model("GLM-5.3-Flash, ", 4096, 1536, 256, 32, 256**-0.5, False, 0, 4)
POOLS = 512
# dense latents, no query latent, no indexer
KIMI_LINEAR = Model("Kimi-Linear, ", 2304, 0, 128, 0, 192**-0.5, False)
DEEPSEEK_V2_LITE = Model("DeepSeek-V2-Lite, ", 2048, 0, 128, 0, 192**-0.5, False)


def first_requests(names: tuple[str, ...], keep: int) -> Part:
    """The piece that holds the first `keep` requests: `names` are sliced along dimension 0."""

    def part(arguments: Arguments) -> tuple[Arguments, Callable[[Outputs], Outputs]]:
        piece = arguments | {name: arguments[name][:keep] for name in names}
        return piece, lambda outputs: [out[:keep] if out.numel() else out for out in outputs]

    return part


def part_of_indexer(arguments: Arguments) -> tuple[Arguments, Callable[[Outputs], Outputs]]:
    """Two requests, of many queries the last.  Values, not indices: backends whose scores differ by
    rounding may swap near-ties."""
    names = ("query", "weights", "block_table", "actual_seq_lengths_key")
    piece = arguments | {name: arguments[name][:2] for name in names}
    if piece["query"].shape[1] > 8:
        piece |= {name: piece[name][:, -8:] for name in ("query", "weights")}
    return piece, lambda outputs: [out[:2, -8:] for out in outputs]


def part_of_layer(k: int, arguments: Arguments) -> tuple[Arguments, Callable[[Outputs], Outputs]]:
    """Two requests, all of whose keys are selected."""
    arguments["act_seqs"].clamp_(max=k)
    names = ("x", "sin", "cos", "cache_index", "block_table", "act_seqs")
    return first_requests(names, 2)(arguments)


def selected(draw: Draw, b: int, s: int, context: int, k: int, model: Model) -> Arguments:
    """The selection of each query.  Of pools: one token less than the context, so that the last
    pool is open, and named behind the `k` others."""
    m = model.block
    found = draw.chosen(b * s, k, (context - s) // m)
    if m > 1:
        found = torch.nn.functional.pad(found, (0, 1), value=(context - s) // m)
    return dict(
        sparse_indices=found.view(b, s, 1, -1),
        sparse_block_size=m,
        actual_seq_lengths_kv=draw.full(b, value=context - (m > 1)),
    )


def attention_case(
    b: int, s: int, n: int, context: int, k: int = 2048, model: Model = DEEPSEEK
) -> Case:
    """Paged sparse attention: `s` query tokens for each of `b` requests of `context` tokens, which
    share no page: 128 requests of 64K tokens keep 9.7 GB, in pages of random order.  The selected
    positions ascend, one in each of `k` equal pieces of the context; `selected` has pools."""
    pages, dr, read = context // P, model.dr, model.keys_of(k)

    def make(draw: Draw) -> Arguments:
        return dict(
            query=draw.normal(b, s, n, R),
            key=draw.normal(b * pages, P, 1, R),
            value=None,
            **selected(draw, b, s, context, k, model),
            scale_value=model.scale,
            block_table=draw.table(b, pages),
            query_rope=draw.normal(b, s, n, dr) if dr else None,
            key_rope=draw.normal(b * pages, P, 1, dr) if dr else None,
            layout_kv="PA_BSND",
        )

    rows = b * s
    ropes = ("query_rope",) if dr else ()
    names = ("query", *ropes, "sparse_indices", "block_table", "actual_seq_lengths_kv")
    return Case(
        "npu_sparse_flash_attention",
        f"{model.label}{n} heads, {b} x {s} queries, {context // 1024}K keys, top {k}",
        make,
        first_requests(names, 2),
        bytes=rows * read * (R + dr) * BF16 + rows * n * (2 * R + dr) * BF16,
        flops=2.0 * rows * n * read * (2 * R + dr),
        shape=dict(b=b, s=s, n=n, context=context, k=k),
        peers=in_torch.peers(in_torch.sparse_attention) | {"flash_mla_sparse": flash_mla_sparse}
        if model.block == 1
        else {},
    )


def prefill_case(s: int, n: int, context: int, k: int = 2048, model: Model = DEEPSEEK) -> Case:
    """Sparse attention of one long chunk of queries over dense keys."""

    def make(draw: Draw) -> Arguments:
        return dict(
            query=draw.normal(1, s, n, R),
            key=draw.normal(1, context, 1, R),
            value=None,
            sparse_indices=draw.chosen(s, k, context - s).view(1, s, 1, k),
            scale_value=model.scale,
            query_rope=draw.normal(1, s, n, DR),
            key_rope=draw.normal(1, context, 1, DR),
        )

    def part(arguments: Arguments) -> tuple[Arguments, Callable[[Outputs], Outputs]]:
        # the last query tokens: bottom-right causality leaves their masks as they are
        names = ("query", "query_rope", "sparse_indices")
        piece = arguments | {name: arguments[name][:, -8:] for name in names}
        return piece, lambda outputs: [out[:, -8:] if out.numel() else out for out in outputs]

    return Case(
        "npu_sparse_flash_attention",
        f"{model.label}{n} heads, prefill of {s} queries, {context // 1024}K keys, top {k}",
        make,
        part,
        bytes=float(context * (R + DR) * BF16 + s * n * (2 * R + DR) * BF16),
        flops=2.0 * s * n * k * (2 * R + DR),
        shape=dict(b=1, s=s, n=n, context=context, k=k),
        peers=in_torch.peers(in_torch.sparse_attention, compiled=False)
        | {"flash_mla_sparse": flash_mla_sparse},
    )


def indexer_case(b: int, s: int, context: int, k: int = 2048, model: Model = DEEPSEEK) -> Case:
    """Scores and top-k over paged index keys.  Of pools: one token less than the context, as in
    `selected`, and the open pool behind the chosen ones."""
    m, ni = model.block, model.ni
    count = context // m
    pages = count // P
    pools: Arguments = dict(cmp_ratio=m, select_tail=True) if m > 1 else {}

    def make(draw: Draw) -> Arguments:
        return dict(
            query=draw.normal(b, s, ni, DI),
            key=draw.normal(b * pages, P, 1, DI),
            weights=draw.normal(b, s, ni),
            actual_seq_lengths_key=draw.full(b, value=context - (m > 1)),
            block_table=draw.table(b, pages),
            layout_key="PA_BSND",
            sparse_count=k,
            return_value=True,
            **pools,
        )

    return Case(
        "npu_lightning_indexer",
        f"{model.label}{b} x {s} queries, {context // 1024}K keys, top {k}",
        make,
        part_of_indexer,
        bytes=b * count * DI * BF16 + b * s * ni * (DI + 1) * BF16 + b * s * k * 4.0,
        flops=2.0 * b * s * count * ni * DI,
        shape=dict(b=b, s=s, context=context, k=k),
        peers={} if pools else in_torch.peers(in_torch.lightning_indexer, compiled=s == 1),
    )


def _layer(draw: Draw, b: int, s: int, n: int, context: int, model: Model) -> Arguments:
    h, rq, dn, ni = model.h, model.rq, model.dn, model.ni
    pages = context // P
    table = draw.table(b, pages)
    position = torch.arange(context - s, context, device=draw.device)
    slots = table[:, position // P] * P + position % P
    return dict(
        x=draw.normal(b, s, h),
        w_dq=to_nz(draw.normal(h, rq, std=h**-0.5)),
        w_uq_qr=to_nz(draw.normal(rq or h, n * (dn + model.dr), std=(rq or h) ** -0.5)),
        w_uk=draw.normal(n, dn, R, std=dn**-0.5),
        w_dkv_kr=to_nz(draw.normal(h, R + model.dr, std=h**-0.5)),
        gamma_cq=draw.normal(rq),
        gamma_ckv=draw.normal(R),
        sin=draw.normal(b, s, model.dr),
        cos=draw.normal(b, s, model.dr),
        cache_index=slots.to(torch.int32).contiguous(),
        kv_cache=draw.normal(b * pages, P, 1, R),
        kr_cache=draw.normal(b * pages, P, 1, model.dr),
        block_table=table,
        act_seqs=draw.full(b, value=context),
        w_idx_qb=to_nz(draw.normal(rq, ni * DI, std=(rq or h) ** -0.5)),
        w_idx_k=to_nz(draw.normal(h, DI, std=h**-0.5)),
        w_idx_proj=to_nz(draw.normal(h, ni, std=h**-0.5)),
        in_gamma_k=draw.normal(DI),
        in_beta_k=draw.normal(DI),
        index_k_cache=draw.normal(b * pages, P, 1, DI),
    )


# the layer's arguments by the names of the prologs'
_BOTH = {"token_x": "x", "rope_sin": "sin", "rope_cos": "cos", "cache_index": "cache_index"}
MLA_PROLOG = _BOTH | {
    "weight_dq": "w_dq",
    "weight_uq_qr": "w_uq_qr",
    "weight_uk": "w_uk",
    "weight_dkv_kr": "w_dkv_kr",
    "rmsnorm_gamma_cq": "gamma_cq",
    "rmsnorm_gamma_ckv": "gamma_ckv",
    "kv_cache": "kv_cache",
    "kr_cache": "kr_cache",
}
INDEXER_PROLOG = _BOTH | {
    "weight_qb": "w_idx_qb",
    "weight_k": "w_idx_k",
    "weight_proj": "w_idx_proj",
    "ln_gamma_k": "in_gamma_k",
    "ln_beta_k": "in_beta_k",
    "index_k_cache": "index_k_cache",
}


def _renamed(layer: Arguments, names: dict[str, str]) -> Arguments:
    return {theirs: layer[ours] for theirs, ours in names.items()}


def mla_prolog_case(b: int, n: int, model: Model = DEEPSEEK) -> Case:
    size, _ = model.prolog_size(n)

    def make(draw: Draw) -> Arguments:
        given = _renamed(_layer(draw, b, 1, n, P, model), MLA_PROLOG)
        return given if model.rq else given | dict(weight_dq=None, rmsnorm_gamma_cq=None)

    return Case(
        "npu_mla_prolog_pto",
        f"{model.label}{n} heads, {b} tokens",
        make,
        first_requests(("token_x", "rope_sin", "rope_cos", "cache_index"), 4),
        bytes=float(BF16 * (size + b * (model.h + model.rq + (n + 1) * (R + model.dr)))),
        flops=2.0 * b * size,
        shape=dict(b=b, n=n),
        peers=in_torch.peers(in_torch.mla_prolog) if model.dr else {},
    )


def indexer_prolog_case(b: int, model: Model = DEEPSEEK) -> Case:
    _, size = model.prolog_size(1)

    def make(draw: Draw) -> Arguments:
        query_norm = draw.normal(b, 1, model.rq)
        layer = _layer(draw, b, 1, 1, P, model)
        return _renamed(layer, INDEXER_PROLOG) | dict(
            query_norm=query_norm, rope_interleaved=model.index_rope_interleaved
        )

    return Case(
        "npu_indexer_prolog_pto",
        f"{model.label}{b} tokens",
        make,
        first_requests(("token_x", "query_norm", "rope_sin", "rope_cos", "cache_index"), 4),
        bytes=float(BF16 * (size + b * (model.h + model.rq + model.ni * (DI + 1) + DI))),
        flops=2.0 * b * size,
        shape=dict(b=b),
        peers=in_torch.peers(in_torch.indexer_prolog),
    )


def layer_case(
    b: int,
    s: int,
    n: int,
    context: int,
    k: int = 2048,
    model: Model = DEEPSEEK,
    op: str = "npu_sparse_attention_pto",
) -> Case:
    """The whole layer.  Its check runs with as many keys selected as there are, because a near-tie
    at the edge of the selection changes the output without being wrong.  `op` may be the one that
    returns the selection as well."""
    stages = [attention_case(b, s, n, context, k), indexer_case(b, s, context, k, model)]
    weights = sum(model.prolog_size(n))
    interleaved = model.index_rope_interleaved

    def make(draw: Draw) -> Arguments:
        return _layer(draw, b, s, n, context, model) | dict(
            sparse_count=k, index_rope_interleaved=interleaved
        )

    def parts(layer: Arguments) -> dict[str, Callable[[], Any]]:
        """The four ops whose composition the layer is, each on the outputs of those before it."""
        ops = torch.ops.custom
        paged = dict(block_table=layer["block_table"])
        mla = partial(ops.npu_mla_prolog_pto, **_renamed(layer, MLA_PROLOG))
        query, query_rope, query_norm = mla()
        prolog = partial(
            ops.npu_indexer_prolog_pto,
            **_renamed(layer, INDEXER_PROLOG),
            query_norm=query_norm,
            rope_interleaved=interleaved,
        )
        query_index, weights = prolog()
        indexer = partial(
            ops.npu_lightning_indexer,
            query_index,
            layer["index_k_cache"],
            weights,
            **paged,
            actual_seq_lengths_key=layer["act_seqs"],
            layout_key="PA_BSND",
            sparse_count=k,
        )
        attention = partial(
            ops.npu_sparse_flash_attention,
            query,
            layer["kv_cache"],
            None,
            indexer()[0],
            (model.dn + DR) ** -0.5,
            **paged,
            actual_seq_lengths_kv=layer["act_seqs"],
            query_rope=query_rope,
            key_rope=layer["kr_cache"],
            layout_kv="PA_BSND",
            attention_mode=2,
        )
        return {
            "MLA prolog": mla,
            "indexer prolog": prolog,
            "indexer": indexer,
            "attention": attention,
        }

    return Case(
        op,
        f"{model.label}{n} heads, {b} x {s} queries, {context // 1024}K keys",
        make,
        partial(part_of_layer, k),
        bytes=BF16 * weights + sum(stage.bytes for stage in stages),
        flops=2.0 * b * s * weights + sum(stage.flops for stage in stages),
        shape=dict(b=b, s=s, n=n, context=context, k=k),
        stages=parts,
    )


def shared_case(
    b: int, s: int, n: int, context: int, k: int = 2048, model: Model = DEEPSEEK
) -> Case:
    """A layer that takes over the selection of another: positions as in `attention_case`."""
    attention = attention_case(b, s, n, context, k, model)
    weights, _ = model.prolog_size(n)

    def make(draw: Draw) -> Arguments:
        layer = _layer(draw, b, s, n, context, model)
        chosen = draw.chosen(b * s, k, context - s).view(b, s, 1, k)
        kept = (*MLA_PROLOG.values(), "block_table", "act_seqs")
        return {name: layer[name] for name in kept} | dict(sparse_indices=chosen)

    names = ("x", "sin", "cos", "cache_index", "block_table", "act_seqs", "sparse_indices")
    return Case(
        "npu_sparse_attention_shared_pto",
        f"{model.label}{n} heads, {b} x {s} queries, {context // 1024}K keys, top {k}",
        make,
        first_requests(names, 2),
        bytes=BF16 * weights + attention.bytes,
        flops=2.0 * b * s * weights + attention.flops,
        shape=dict(b=b, s=s, n=n, context=context, k=k),
    )


BATCHES = (1, 32, 128)
GLM5_HEADS = (64, 8)  # all, and those of one of eight shards


def _attention(small: bool) -> list[Case]:
    if small:
        pools = attention_case(2, 1, 12, 1024, 16, GLM5_FLASH)
        return [*(attention_case(b, 1, 16, 2048, 256) for b in (1, 4)), pools]
    decode = [attention_case(b, 1, n, 65536) for n in (128, 16) for b in BATCHES]
    prefill = [prefill_case(4096, 128, context) for context in (8192, 65536)]
    glm5 = [attention_case(b, 1, n, 65536, model=GLM5) for n in GLM5_HEADS for b in BATCHES]
    glm5 += [prefill_case(4096, 64, 65536, model=GLM5)]
    glm5 += [attention_case(b, 1, 64, 65536, POOLS, GLM5_FLASH) for b in BATCHES]
    return [*decode, attention_case(128, 2, 128, 65536), *prefill, *glm5]


def _indexer(small: bool) -> list[Case]:
    if small:
        # the last one is too long to be selected from at once, and has tokens that share keys
        pools = indexer_case(2, 1, 1024, 64, GLM5_FLASH)
        short = [indexer_case(b, 1, 8192, 512) for b in (1, 4)]
        return [*short, pools, indexer_case(2, 4, 12288, 512)]
    sizes = [*((b, 1) for b in BATCHES), (1, 4096)]
    rows = [indexer_case(b, s, 65536, model=model) for model in (DEEPSEEK, GLM5) for b, s in sizes]
    return rows + [indexer_case(b, 1, 65536, POOLS, GLM5_FLASH) for b in BATCHES]


def _prolog(small: bool) -> list[Case]:
    if small:
        return [mla_prolog_case(1, 16), mla_prolog_case(1, 2, DEEPSEEK_V2_LITE)]
    sizes = [(1, 128), (32, 128), (128, 128), (1, 16), (4096, 128)]
    glm5 = [(b, n) for n in GLM5_HEADS for b in BATCHES] + [(4096, 64)]
    return [
        *(mla_prolog_case(b, n) for b, n in sizes),
        *(mla_prolog_case(b, n, GLM5) for b, n in glm5),
        *(mla_prolog_case(b, 64, GLM5_FLASH) for b in BATCHES),
        *(mla_prolog_case(b, 32, KIMI_LINEAR) for b in (*BATCHES, 4096)),
        *(mla_prolog_case(b, 16, DEEPSEEK_V2_LITE) for b in BATCHES),
    ]


def _indexer_prolog(small: bool) -> list[Case]:
    if small:
        return [indexer_prolog_case(1)]
    return [indexer_prolog_case(b, model) for model in (DEEPSEEK, GLM5) for b in (*BATCHES, 4096)]


def _whole(small: bool) -> list[Case]:
    if small:
        return [layer_case(1, 1, 16, 4096, 512)]
    deepseek = [layer_case(b, s, 128, 65536) for s in (1, 2) for b in BATCHES]
    glm5 = [layer_case(b, 1, n, 65536, model=GLM5) for n in GLM5_HEADS for b in BATCHES]
    return [*deepseek, *glm5]


def _selecting(small: bool) -> list[Case]:
    op = "npu_sparse_attention_indices_pto"
    if small:
        return [layer_case(1, 1, 16, 4096, 512, op=op)]
    sizes = [(DEEPSEEK, 128), *((GLM5, n) for n in GLM5_HEADS)]
    return [layer_case(b, 1, n, 65536, model=m, op=op) for m, n in sizes for b in BATCHES]


def _shared(small: bool) -> list[Case]:
    if small:
        return [shared_case(2, 2, 16, 2048, 256)]
    glm5 = [shared_case(b, 1, n, 65536, model=GLM5) for n in GLM5_HEADS for b in BATCHES]
    return [*(shared_case(b, 1, 128, 65536) for b in BATCHES), *glm5]


PRESETS = {
    "npu_sparse_attention_pto": _whole,
    "npu_sparse_attention_indices_pto": _selecting,
    "npu_sparse_attention_shared_pto": _shared,
    "npu_mla_prolog_pto": _prolog,
    "npu_indexer_prolog_pto": _indexer_prolog,
    "npu_lightning_indexer": _indexer,
    "npu_sparse_flash_attention": _attention,
}
