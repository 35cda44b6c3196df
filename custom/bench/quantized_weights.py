# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Rows for weights of 8 bits, and for the layer of which weights and caches all are, beside the
same ops in bf16.  Weights lie as in a checkpoint, [N, K]; an NPU has int8 alone, weights in NZ and
int8 caches."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..dispatch.common import quantized
from ..dispatch.common.nz import to_nz
from . import sparse_attention
from .case import Arguments, Case, Draw
from .quantized_caches import P
from .sparse_attention import (
    BF16,
    DEEPSEEK,
    DI,
    DR,
    R,
    first_requests,
    part_of_layer,
)

MODES = {"fp8": 4, "int8": 2}
_ops = torch.ops.custom


def _weight(draw: Draw, kind: str, rows: int, columns: int, npu: bool) -> tuple[Tensor, Tensor]:
    """(weight, its scales): numbers of a standard deviation of rows ** -0.5."""
    values = draw.normal(columns, rows, std=24.0).clamp_(-127, 127).to(quantized.VALUES[kind])
    tiles = -(-rows // quantized.TILE), -(-columns // quantized.TILE)
    shape = (1, columns) if kind == "int8" else tiles
    scale = torch.full(shape, rows**-0.5 / 24, device=draw.device)
    return to_nz(values.t()) if npu else values, scale


def _mla(draw: Draw, kind: str, n: int, npu: bool = False) -> Arguments:
    m = DEEPSEEK
    out: Arguments = dict(weight_uk=draw.normal(n, m.dn, R, std=m.dn**-0.5))
    sizes = dict(dq=(m.h, m.rq), uq_qr=(m.rq, n * (m.dn + DR)), dkv_kr=(m.h, R + DR))
    for name, size in sizes.items():
        out[f"weight_{name}"], out[f"dequant_scale_w_{name}"] = _weight(draw, kind, *size, npu)
    return out | dict(
        rmsnorm_gamma_cq=draw.normal(m.rq),
        rmsnorm_gamma_ckv=draw.normal(R),
        weight_quant_mode=MODES[kind],
        weight_format="nz" if npu else "linear",
    )


def _index(draw: Draw, kind: str, npu: bool = False) -> Arguments:
    m = DEEPSEEK
    proj = draw.normal(m.ni, m.h, std=m.h**-0.5)
    out: Arguments = dict(weight_proj=to_nz(proj.t()) if npu else proj)
    for name, size in dict(qb=(m.rq, m.ni * DI), k=(m.h, DI)).items():
        out[f"weight_{name}"], out[f"dequant_scale_w_{name}"] = _weight(draw, kind, *size, npu)
    return out | dict(
        ln_gamma_k=draw.normal(DI),
        ln_beta_k=draw.normal(DI),
        weight_quant_mode=MODES[kind],
        weight_format="nz" if npu else "linear",
    )


def _tokens(draw: Draw, b: int, slots: Tensor) -> Arguments:
    return dict(
        token_x=draw.normal(b, 1, DEEPSEEK.h),
        rope_sin=draw.normal(b, 1, DR),
        rope_cos=draw.normal(b, 1, DR),
        cache_index=slots,
    )


def _slots(draw: Draw, table: Tensor, context: int) -> Tensor:
    """Of each request's last token."""
    last = context - 1
    return (table[:, last // P] * P + last % P).to(torch.int32)[:, None].contiguous()


def _pages(draw: Draw, pages: int, npu: bool) -> tuple[Arguments, Arguments]:
    """Empty caches of fp8, or of int8 on an NPU, as both prologs name them."""
    kind = torch.int8 if npu else torch.float8_e4m3fn
    rows = torch.zeros(pages, P, 1, quantized.ROW, dtype=kind, device=draw.device)
    if npu:
        values = torch.zeros(pages, P, 1, DI, dtype=kind, device=draw.device)
        scales = torch.zeros(pages, P, 1, dtype=torch.float16, device=draw.device)
    else:
        index = torch.zeros(pages, P, quantized.PACKED, dtype=torch.uint8, device=draw.device)
        values, scales = quantized.index_cache_views(index, "fp8")
    return dict(
        kv_cache=rows,
        kr_cache=draw.normal(0),
        kv_cache_quant_mode=3,
        ckvkr_repo_mode=1,
        quant_scale_repo_mode=1,
        row_layout=quantized.NOPE_ROPE_SCALE if npu else quantized.NOPE_SCALE_ROPE,
    ), dict(index_k_cache=values, index_k_scale_cache=scales, kv_cache_quant_mode=3)


_NAMES = ("token_x", "rope_sin", "rope_cos", "cache_index")


def mla_prolog_case(b: int, n: int, kind: str, npu: bool = False) -> Case:
    """Caches of 8 bits as well."""

    def make(draw: Draw) -> Arguments:
        table = draw.table(b, 2)
        rows, _ = _pages(draw, 2 * b, npu)
        return _mla(draw, kind, n, npu) | _tokens(draw, b, _slots(draw, table, P)) | rows

    m = DEEPSEEK
    of_8_bits = m.h * (m.rq + R + DR) + m.rq * n * (m.dn + DR)
    size = of_8_bits + n * m.dn * R
    outputs = BF16 * b * (m.h + m.rq + n * (R + DR)) + b * quantized.ROW
    return Case(
        "npu_mla_prolog_pto",
        f"{kind} weights, {n} heads, {b} tokens",
        make,
        first_requests(_NAMES, 4),
        bytes=float(of_8_bits + BF16 * n * m.dn * R + outputs),
        flops=2.0 * b * size,
        shape=dict(b=b, n=n),
        peers={"bf16": partial(_in_bf16, sparse_attention.mla_prolog_case(b, n))},
    )


def indexer_prolog_case(b: int, kind: str, npu: bool = False) -> Case:
    def make(draw: Draw) -> Arguments:
        table = draw.table(b, 2)
        norm = dict(query_norm=draw.normal(b, 1, DEEPSEEK.rq))
        both = _index(draw, kind, npu) | _tokens(draw, b, _slots(draw, table, P)) | norm
        return both | _pages(draw, 2 * b, npu)[1]

    m = DEEPSEEK
    of_8_bits = m.rq * m.ni * DI + m.h * DI
    outputs = b * (BF16 * (m.h + m.rq) + m.ni * (DI + 4) + quantized.PACKED)
    return Case(
        "npu_indexer_prolog_pto",
        f"{kind} weights, {b} tokens",
        make,
        first_requests((*_NAMES, "query_norm"), 4),
        bytes=float(of_8_bits + BF16 * m.h * m.ni + outputs),
        flops=2.0 * b * (of_8_bits + m.h * m.ni),
        shape=dict(b=b),
        peers={"bf16": partial(_in_bf16, sparse_attention.indexer_prolog_case(b))},
        tolerance=5e-2,  # a step of e4m3 is 2**-3
    )


def _in_bf16(case: Case, arguments: Arguments) -> Callable[[], Any]:
    return partial(case.call, case.make(arguments["rope_sin"].device, 0))


def layer_case(b: int, n: int, context: int, k: int = 2048, npu: bool = False) -> Case:
    """Weights, activations and caches of fp8, on an NPU of int8.  Checked as the bf16 layer is."""
    pages = context // P
    kind = "int8" if npu else "fp8"
    weights = mla_prolog_case(b, n, kind).bytes + indexer_prolog_case(b, kind).bytes
    m = DEEPSEEK

    def make(draw: Draw) -> Arguments:
        table = draw.table(b, pages)
        caches = _layer_pages(draw, b * pages, npu)
        mla, indexer = _mla(draw, kind, n, npu), _index(draw, kind, npu)
        tokens = _tokens(draw, b, _slots(draw, table, context))
        ours = {_OURS.get(name, name): x for name, x in (indexer | mla | tokens).items()}
        return (
            ours
            | caches
            | dict(
                kr_cache=draw.normal(0),
                block_table=table,
                act_seqs=draw.full(b, value=context),
                sparse_count=k,
                index_weight_quant_mode=MODES[kind],
                kv_kind=kind,
                index_kind=kind,
            )
        )

    def parts(layer: Arguments) -> dict[str, Callable[[], Any]]:
        """The four ops whose composition the layer is, each on the outputs of those before it."""
        rows, paged = layer["kv_cache"], dict(block_table=layer["block_table"])
        keys, scales = layer["index_k_cache"], layer.get("index_k_scale_cache")
        if scales is None:
            keys, scales = quantized.index_cache_views(keys, kind)
        mla = partial(
            _ops.npu_mla_prolog_pto,
            **_named(layer, _ops.npu_mla_prolog_pto),
            kv_cache_quant_mode=3,
            ckvkr_repo_mode=1,
            quant_scale_repo_mode=1,
        )
        query, query_rope, query_norm = mla()
        of_index = _named(layer, _ops.npu_indexer_prolog_pto) | dict(
            query_norm=query_norm, index_k_cache=keys, index_k_scale_cache=scales
        )
        prolog = partial(_ops.npu_indexer_prolog_pto, **of_index, kv_cache_quant_mode=3)
        query_index, weights = prolog()
        indexer = partial(
            _ops.npu_quant_lightning_indexer,
            query_index,
            keys,
            weights,
            None,
            scales,
            0,
            0,
            **paged,
            actual_seq_lengths_key=layer["act_seqs"],
            layout_key="PA_BSND",
            sparse_count=k,
        )
        attention = partial(
            _ops.npu_kv_quant_sparse_flash_attention,
            torch.cat([query, query_rope], -1),
            rows,
            rows,
            indexer(),
            (m.dn + DR) ** -0.5,
            2,
            2,
            **paged,
            actual_seq_lengths_kv=layer["act_seqs"],
            layout_kv="PA_BSND",
            attention_mode=2,
            row_layout=layer["row_layout"],
        )
        return {
            "MLA prolog": mla,
            "indexer prolog": prolog,
            "indexer": indexer,
            "attention": attention,
        }

    read = b * (context * quantized.PACKED + k * quantized.ROW)
    return Case(
        "npu_sparse_attention_pto",
        f"all {kind}, {n} heads, {b} x 1 queries, {context // 1024}K keys",
        make,
        partial(part_of_layer, k),
        bytes=weights + read,
        flops=2.0 * b * (sum(m.prolog_size(n)) + context * m.ni * DI + n * k * (2 * R + DR)),
        shape=dict(b=b, s=1, n=n, context=context, k=k),
        stages=parts,
        tolerance=5e-2,
    )


def _named(layer: Arguments, op: Any) -> Arguments:
    """What a prolog takes of the layer's arguments."""
    names = [argument.name for argument in op.default._schema.arguments]
    return {name: layer[_OURS.get(name, name)] for name in names if _OURS.get(name, name) in layer}


_OURS = {
    "token_x": "x",
    "rope_sin": "sin",
    "rope_cos": "cos",
    "rmsnorm_gamma_cq": "gamma_cq",
    "rmsnorm_gamma_ckv": "gamma_ckv",
    "weight_dq": "w_dq",
    "weight_uq_qr": "w_uq_qr",
    "weight_uk": "w_uk",
    "weight_dkv_kr": "w_dkv_kr",
    "weight_qb": "w_idx_qb",
    "weight_k": "w_idx_k",
    "weight_proj": "w_idx_proj",
    "ln_gamma_k": "in_gamma_k",
    "ln_beta_k": "in_beta_k",
    "dequant_scale_w_qb": "dequant_scale_w_idx_qb",
    "dequant_scale_w_k": "dequant_scale_w_idx_k",
}


def _layer_pages(draw: Draw, pages: int, npu: bool) -> Arguments:
    """Rows and index keys of random tokens, as the layer names them."""
    kind, layout = "fp8", quantized.NOPE_SCALE_ROPE
    if npu:
        kind, layout = "int8", quantized.NOPE_ROPE_SCALE
    device, slots = draw.device, torch.arange(pages * P, device=draw.device)
    rows = torch.empty(pages, P, 1, quantized.ROW, dtype=quantized.VALUES[kind], device=device)
    _ops.npu_latent_cache_write(
        draw.normal(pages * P, R),
        draw.normal(pages * P, DR),
        rows,
        slots,
        kind=kind,
        row_layout=layout,
    )
    caches: Arguments = dict(kv_cache=rows, row_layout=layout)
    if npu:
        values = torch.empty(pages, P, 1, DI, dtype=torch.int8, device=device)
        scales = torch.empty(pages, P, 1, dtype=torch.float16, device=device)
        caches |= dict(index_k_cache=values, index_k_scale_cache=scales)
    else:
        packed = torch.empty(pages, P, quantized.PACKED, dtype=torch.uint8, device=device)
        values, scales = quantized.index_cache_views(packed, kind)
        caches |= dict(index_k_cache=packed)
    _ops.npu_index_cache_write(draw.normal(pages * P, DI), values, scales, slots, kind=kind)
    return caches


BATCHES = (1, 32, 128)


def _prolog(small: bool) -> list[Case]:
    if small:
        return [mla_prolog_case(1, 16, "fp8")]
    return [mla_prolog_case(b, 128, kind) for kind in MODES for b in BATCHES]


def _indexer_prolog(small: bool) -> list[Case]:
    if small:
        return [indexer_prolog_case(1, "fp8")]
    return [indexer_prolog_case(b, kind) for kind in MODES for b in BATCHES]


def _whole(small: bool) -> list[Case]:
    return [layer_case(1, 16, 4096, 512)] if small else [layer_case(b, 128, 65536) for b in BATCHES]


ON_NPU: dict[str, Callable[[bool], list[Case]]] = {
    "npu_mla_prolog_pto": lambda _: [mla_prolog_case(b, 128, "int8", npu=True) for b in BATCHES],
    "npu_indexer_prolog_pto": lambda _: [indexer_prolog_case(b, "int8", npu=True) for b in BATCHES],
    "npu_sparse_attention_pto": lambda _: [layer_case(b, 128, 65536, npu=True) for b in BATCHES],
}
PRESETS: dict[str, Callable[[bool], list[Case]]] = {
    "npu_mla_prolog_pto": _prolog,
    "npu_indexer_prolog_pto": _indexer_prolog,
    "npu_sparse_attention_pto": _whole,
}
