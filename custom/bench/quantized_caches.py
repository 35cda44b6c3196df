# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Rows for caches of 8 bits, beside the same ops on bf16 caches, DeepGEMM and FlashMLA."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..dispatch.common import quantized
from ..quantized import quantize_index_query
from .case import Arguments, Case, Draw, Outputs
from .peers import installed, positions
from .sparse_attention import (
    BATCHES,
    BF16,
    DEEPSEEK,
    DI,
    DR,
    GLM5_FLASH,
    POOLS,
    Model,
    R,
    first_requests,
    part_of_indexer,
    selected,
)

P = 64  # the page of DeepGEMM and FlashMLA
_ops = torch.ops.custom


# ---------------------------------------------------------------------------------------- indexer


def _index_cache(draw: Draw, pages: int, kind: str) -> tuple[Tensor, Tensor]:
    """(values, scales) of random keys: packed pages of fp8, two tensors of int8."""
    if kind == "fp8":
        raw = torch.empty(pages, P, quantized.PACKED, dtype=torch.uint8, device=draw.device)
        values, scales = quantized.index_cache_views(raw, kind)
    else:
        values = torch.empty(pages, P, 1, DI, dtype=torch.int8, device=draw.device)
        scales = torch.empty(pages, P, 1, dtype=torch.float16, device=draw.device)
    slots = torch.arange(pages * P, device=draw.device)
    _ops.npu_index_cache_write(draw.normal(pages * P, DI), values, scales, slots, kind=kind)
    return values, scales


SCORES, LSE = "npu_quant_lightning_indexer_scores", "npu_kv_quant_sparse_flash_attention_lse"
INDICES, ATTENTION = "npu_quant_lightning_indexer", "npu_kv_quant_sparse_flash_attention"


def indexer_case(b: int, s: int, context: int, kind: str, k: int = 2048, op: str = SCORES) -> Case:
    """Scores and top-k over paged index keys of 8 bits, pages of 64."""
    pages, ni = context // P, DEEPSEEK.ni

    def make(draw: Draw) -> Arguments:
        values, scales = _index_cache(draw, b * pages, kind)
        query, weights, _ = quantize_index_query(
            draw.normal(b, s, ni, DI), draw.normal(b, s, ni), kind=kind
        )
        return dict(
            query=query,
            key=values,
            weights=weights,
            query_dequant_scale=None,
            key_dequant_scale=scales,
            query_quant_mode=0,
            key_quant_mode=0,
            actual_seq_lengths_key=draw.full(b, value=context),
            block_table=draw.table(b, pages),
            layout_key="PA_BSND",
            sparse_count=k,
        )

    per_key = quantized.PACKED if kind == "fp8" else DI + 2
    peers: dict[str, Any] = {"bf16": _indexer_on_bf16}
    if kind == "fp8" and s == 1:
        peers["deep_gemm + topk"] = partial(_deep_gemm, context=context)
    return Case(
        op,
        f"{kind}, {b} x {s} queries, {context // 1024}K keys, top {k}",
        make,
        part_of_indexer,
        bytes=float(b * context * per_key + b * s * ni * (DI + 4) + b * s * k * 8),
        flops=2.0 * b * s * context * ni * DI,
        shape=dict(b=b, s=s, context=context, k=k),
        peers=peers,
        ordered=False,
        rate=2.0,
    )


def _indexer_on_bf16(arguments: Arguments) -> Callable[[], Any]:
    query, key, scale = (arguments[n] for n in ("query", "key", "key_dequant_scale"))
    kept = ("actual_seq_lengths_key", "block_table", "layout_key", "sparse_count")
    return partial(
        _ops.npu_lightning_indexer,
        query.to(torch.bfloat16),
        key.to(torch.bfloat16) * scale[..., None].to(torch.bfloat16),
        arguments["weights"].to(torch.bfloat16),
        **{name: arguments[name] for name in kept},
    )


def _deep_gemm(arguments: Arguments, context: int) -> Callable[[], Any] | None:
    if not installed("deep_gemm", arguments["query"]):
        return None
    import deep_gemm

    query, key, weights = (arguments[n] for n in ("query", "key", "weights"))
    size = P * quantized.PACKED
    shape, strides = (len(key), P, 1, quantized.PACKED), (size, *[quantized.PACKED] * 2, 1)
    pages = key.view(torch.uint8).as_strided(shape, strides)
    lengths = arguments["actual_seq_lengths_key"].view(-1, 1)
    plan = deep_gemm.get_paged_mqa_logits_metadata(lengths, P, deep_gemm.get_num_sms())
    weights = weights.flatten(0, 1)

    def call() -> Any:
        logits = deep_gemm.fp8_fp4_paged_mqa_logits(
            (query, None), pages, weights, lengths, arguments["block_table"], plan, context
        )
        return logits.topk(arguments["sparse_count"], sorted=False)

    return call


# -------------------------------------------------------------------------------------- attention


def _rows(draw: Draw, count: int, kind: str, row_layout: str, dr: int) -> Tensor:
    """[pages, P, 1, 656] of random latents; [.., 528] without rotary keys."""
    dtype = quantized.VALUES[kind]
    size = quantized.row_bytes(dr)
    rows = torch.empty(count // P, P, 1, size, dtype=torch.uint8, device=draw.device)
    step = 2**20
    for first in range(0, count, step):
        size = min(step, count - first)
        slots = torch.arange(first, first + size, device=draw.device)
        _ops.npu_latent_cache_write(
            draw.normal(size, R),
            draw.normal(size, dr),
            rows,
            slots,
            kind=kind,
            row_layout=row_layout,
            rope_head_dim=dr,
        )
    return rows.view(dtype)


def attention_case(
    b: int,
    s: int,
    n: int,
    context: int,
    kind: str,
    k: int = 2048,
    op: str = ATTENTION,
    model: Model = DEEPSEEK,
) -> Case:
    """Paged sparse attention over rows of 8 bits; requests share no page."""
    pages, dr, keys = context // P, model.dr, model.keys_of(k)
    row_layout = quantized.NOPE_SCALE_ROPE if kind == "fp8" else quantized.NOPE_ROPE_SCALE

    def make(draw: Draw) -> Arguments:
        rows = _rows(draw, b * context, kind, row_layout, dr)
        return dict(
            query=draw.normal(b, s, n, R + dr),
            key=rows,
            value=rows,
            **selected(draw, b, s, context, k, model),
            scale_value=model.scale,
            key_quant_mode=2,
            value_quant_mode=2,
            block_table=draw.table(b, pages),
            layout_kv="PA_BSND",
            attention_mode=2,
            row_layout=row_layout,
            rope_head_dim=dr,
        )

    def part(arguments: Arguments) -> tuple[Arguments, Callable[[Outputs], Outputs]]:
        names = ("query", "sparse_indices", "block_table", "actual_seq_lengths_kv")
        piece, _ = first_requests(names, 2)(arguments)
        if s > 8:
            piece |= {name: piece[name][:, -8:] for name in ("query", "sparse_indices")}
        return piece, lambda outputs: [out[:2, -8:] for out in outputs]

    count = b * s
    read = min(count * keys, b * context) * quantized.row_bytes(dr)
    peers: dict[str, Any] = {"bf16": partial(_attention_on_bf16, kind=kind)}
    if kind == "fp8" and s <= 2 and dr:
        peers["flash_mla"] = _flash_mla
    return Case(
        op,
        f"{model.label}{kind}, {n} heads, {b} x {s} queries, {context // 1024}K keys, top {k}",
        make,
        part,
        bytes=float(read + count * n * (2 * R + dr) * BF16),
        flops=2.0 * count * n * keys * (2 * R + dr),
        shape=dict(b=b, s=s, n=n, context=context, k=k),
        peers=peers,
    )


def _attention_on_bf16(arguments: Arguments, kind: str) -> Callable[[], Any]:
    rows, query = arguments["key"], arguments["query"]
    nope, rope, scale = quantized.row_views(rows, arguments["row_layout"])
    latent = torch.empty(nope.shape, dtype=torch.bfloat16, device=rows.device)
    for to, values, by in zip(latent.split(4096), nope.split(4096), scale.split(4096), strict=True):
        to.copy_(values.float() * by.repeat_interleave(quantized.TILE, -1))
    kept = (
        "sparse_indices", "scale_value", "block_table", "actual_seq_lengths_kv", "layout_kv",
        "attention_mode", "sparse_block_size",
    )  # fmt: skip
    return partial(
        _ops.npu_sparse_flash_attention,
        query[..., :R].contiguous(),
        latent,
        None,
        query_rope=query[..., R:].contiguous(),
        key_rope=rope.contiguous(),
        **{name: arguments[name] for name in kept},
    )


def _flash_mla(arguments: Arguments) -> Callable[[], Any] | None:
    if not installed("flash_mla", arguments["query"]):
        return None
    import flash_mla

    query, rows = arguments["query"], arguments["key"]
    batch, length, heads, _size = query.shape
    # its kernels are for 64 and 128 heads
    query = torch.nn.functional.pad(query, (0, 0, 0, max(0, 64 - heads)))
    slots = positions(arguments).view(batch, length, -1)
    plan, splits = flash_mla.get_mla_metadata()
    return partial(
        flash_mla.flash_mla_with_kvcache,
        query,
        rows,
        None,
        None,
        R,
        plan,
        splits,
        softmax_scale=arguments["scale_value"],
        is_fp8_kvcache=True,
        indices=slots,
    )


# ---------------------------------------------------------------------------------------- writers


def _whole(arguments: Arguments) -> tuple[Arguments, Callable[[Outputs], Outputs]]:
    return arguments, lambda outputs: outputs


def _slots(draw: Draw, tokens: int, pages: int) -> Tensor:
    return draw.table(1, pages * P)[0, :tokens].contiguous()


def index_write_case(tokens: int, kind: str, pages: int = 1024) -> Case:
    def make(draw: Draw) -> Arguments:
        values, scales = _index_cache(draw, pages, kind)
        slots = _slots(draw, tokens, pages)
        return dict(k=draw.normal(tokens, DI), values=values, scales=scales, slots=slots, kind=kind)

    return Case(
        "npu_index_cache_write",
        f"{kind}, {tokens} tokens",
        make,
        _whole,
        bytes=float(tokens * (DI * BF16 + quantized.PACKED)),
        flops=4.0 * tokens * DI,
        shape=dict(b=tokens),
    )


def latent_write_case(tokens: int, kind: str, pages: int = 1024) -> Case:
    row_layout = quantized.NOPE_SCALE_ROPE if kind == "fp8" else quantized.NOPE_ROPE_SCALE

    def make(draw: Draw) -> Arguments:
        rows = torch.zeros(pages, P, 1, quantized.ROW, dtype=torch.uint8, device=draw.device)
        return dict(
            ckv=draw.normal(tokens, R),
            k_rope=draw.normal(tokens, DR),
            rows=rows,
            slots=_slots(draw, tokens, pages),
            kind=kind,
            row_layout=row_layout,
        )

    return Case(
        "npu_latent_cache_write",
        f"{kind}, {tokens} tokens",
        make,
        _whole,
        bytes=float(tokens * ((R + DR) * BF16 + quantized.ROW)),
        flops=4.0 * tokens * R,
        shape=dict(b=tokens),
    )


def query_case(tokens: int, kind: str) -> Case:
    ni = DEEPSEEK.ni

    def make(draw: Draw) -> Arguments:
        return dict(
            q=draw.normal(tokens, ni, DI),
            weights=draw.normal(tokens, ni),
            kind=kind,
            index_hadamard=True,
        )

    return Case(
        "npu_quantize_index_query",
        f"{kind}, {tokens} tokens of {ni} heads, transformed",
        make,
        _whole,
        bytes=float(tokens * ni * (3 * DI + 6)),
        flops=12.0 * tokens * ni * DI,
        shape=dict(b=tokens),
    )


def hadamard_case(rows: int) -> Case:
    return Case(
        "npu_hadamard",
        f"{rows} rows",
        lambda draw: dict(x=draw.normal(rows, DI)),
        _whole,
        bytes=float(2 * rows * DI * BF16),
        flops=8.0 * rows * DI,
        shape=dict(b=rows),
    )


def _indexer(small: bool) -> list[Case]:
    if small:
        return [indexer_case(1, 1, 4096, kind, 512) for kind in ("fp8", "int8")]
    sizes = [*((b, 1) for b in (1, 32, 128)), (1, 4096)]
    return [indexer_case(b, s, 65536, kind) for kind in ("fp8", "int8") for b, s in sizes]


def _attention(small: bool) -> list[Case]:
    if small:
        return [attention_case(1, 1, 16, 2048, kind, 256) for kind in ("fp8", "int8")]
    sizes = [(1, 1, 128), (1, 1, 16), (32, 1, 128), (128, 1, 16), (128, 1, 64), (128, 1, 128)]
    sizes += [(1, 4096, 128)]
    cases = [attention_case(b, s, n, 65536, "fp8") for b, s, n in sizes]
    cases += [attention_case(128, 1, 16, 65536, "int8")]
    flash = partial(attention_case, n=64, context=65536, k=POOLS, model=GLM5_FLASH)
    return cases + [flash(b, 1, kind=kind) for kind in ("fp8", "int8") for b in BATCHES]


def _indices(small: bool) -> list[Case]:
    size = (1, 1, 4096) if small else (32, 1, 65536)
    return [indexer_case(*size, kind, op=INDICES) for kind in ("fp8", "int8")]


def _lse(small: bool) -> list[Case]:
    b, n, context, k = (1, 16, 2048, 256) if small else (32, 128, 65536, 2048)
    return [attention_case(b, 1, n, context, "fp8", k, LSE)]


def _writers(case: Callable[..., Case]) -> Callable[[bool], list[Case]]:
    def cases(small: bool) -> list[Case]:
        tokens = (4,) if small else (32, 4096)
        return [case(each, kind) for kind in ("fp8", "int8") for each in tokens]

    return cases


PRESETS: dict[str, Callable[[bool], list[Case]]] = {
    INDICES: _indices,
    SCORES: _indexer,
    ATTENTION: _attention,
    LSE: _lse,
    "npu_index_cache_write": _writers(index_write_case),
    "npu_latent_cache_write": _writers(latent_write_case),
    "npu_quantize_index_query": _writers(query_case),
    "npu_hadamard": lambda small: [hadamard_case(64 if small else 4096 * 64)],
}
