# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Rows for the whole layer of DeepSeek-V4, all three kinds, and how its time is spent."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..dispatch.common import layer_v4
from ..sparse_attention_v4 import npu_sparse_attention_v4_pto
from .case import Arguments, Case, Draw, Outputs
from .shared_kv_prolog import (
    BF16,
    DI,
    DR,
    FLASH,
    NI,
    PRO,
    RO,
    TINY,
    D,
    Model,
    P,
    projections,
    weight,
)
from .sparse_attention import first_requests

WINDOW, FP32 = 128, 4
RATIOS = {"sliding": 0, "CSA": 4, "HCA": 128}
_BY_REQUEST = ("x", "sin", "cos", "ori_block_table", "act_seqs")
_OF_ENTRIES = ("cmp_sin", "cmp_cos", "state_block_table", "cmp_block_table")


def layer_case(
    b: int,
    s: int,
    model: Model,
    kind: str,
    context: int,
    k: int,
    page: int = P,
    entry_page: int | None = None,
) -> Case:
    """Requests of `context` tokens, which share no page and close an entry in this call.  The check
    runs with as many entries as are chosen: a near-tie at the edge of a selection changes the
    output without being wrong."""
    m = RATIOS[kind]
    coff = 2 if kind == "CSA" else 1
    held, state_page = -(-(WINDOW + s) // page) + 1, 4 if kind == "CSA" else 8
    ring = -(-(coff * m + s) // state_page)
    entries_each = entry_page or (P if kind == "CSA" else 2)
    deep = model.n // model.groups * D

    def make(draw: Draw) -> Arguments:
        # the window's pages go round
        columns = torch.arange(context // page, device=draw.device) % held
        given = dict(
            x=draw.normal(b, s, model.h),
            **projections(draw, model),
            sinks=draw.normal(model.n, dtype=torch.float32),
            sin=draw.normal(b, s, DR),
            cos=draw.normal(b, s, DR),
            ori_kv=draw.normal(b * held, page, 1, D),
            ori_block_table=draw.table(b, held)[:, columns].contiguous(),
            act_seqs=draw.full(b, value=context),
            w_o_a=weight(draw, model.groups, deep, RO),
            w_o_b=weight(draw, model.groups * RO, model.h),
            ori_win_left=WINDOW - 1,
        )
        if m:
            given |= _compressor(draw, "cmp", D, "cmp_kv") | dict(
                cmp_ratio=m,
                state_block_table=draw.table(b, ring),
                cmp_sin=draw.normal(b, -(-s // m), DR),
                cmp_cos=draw.normal(b, -(-s // m), DR),
                cmp_block_table=draw.table(b, context // m // entries_each),
            )
        if kind == "CSA":
            given |= _compressor(draw, "idx", DI, "idx_k") | dict(
                w_idx_qb=weight(draw, model.rq, NI * DI),
                w_idx_proj=weight(draw, model.h, NI),
                sparse_count=k,
            )
        return given

    def _compressor(draw: Draw, name: str, d: int, cached: str) -> Arguments:
        floats = partial(draw.normal, dtype=torch.float32)
        return {
            f"w_{name}_kv": draw.normal(coff * d, model.h, std=model.h**-0.5),
            f"w_{name}_gate": draw.normal(coff * d, model.h, std=model.h**-0.5),
            f"{name}_ape": floats(m, coff * d),
            f"gamma_{name}": floats(d),
            f"{name}_state": floats(b * ring, state_page, 2 * coff * d),
            cached: draw.normal(b * (context // m), 1, 1, d).view(-1, entries_each, 1, d),
        }

    def part(arguments: Arguments) -> tuple[Arguments, Callable[[Outputs], Outputs]]:
        if kind == "CSA":
            arguments["act_seqs"].clamp_(max=k * m)
        names = (*_BY_REQUEST, *(_OF_ENTRIES if m else ()))
        return first_requests(names, 2)(arguments)

    entries = context // m if m else 0
    seen = min(WINDOW, context) + (min(k, entries) if kind == "CSA" else entries)
    widths = {"sliding": 0, "HCA": 2 * coff * D, "CSA": 2 * coff * (D + DI)}[kind]
    index = (NI, NI * DI) if kind == "CSA" else (0, 0)
    weights = model.h * (model.rq + D + index[0] + widths) + model.rq * (model.n * D + index[1])
    weights += model.groups * RO * (deep + model.h)
    keys = entries * DI if kind == "CSA" else 0
    states = FP32 * (coff * m + s) * widths if m else 0
    products = 2.0 * model.n * seen * D + float(NI * keys)
    return Case(
        "npu_sparse_attention_v4_pto",
        f"{model.label}, {kind}, {b} x {s} tokens, {context // 1024}K",
        make,
        part,
        bytes=float(BF16 * (weights + b * (seen * D + keys)) + b * states),
        flops=2.0 * b * s * (weights + products),
        shape=dict(b=b, s=s, n=model.n, context=context, m=m),
        stages=_stages,
        reference=False,
    )


def _stages(layer: Arguments) -> dict[str, Callable[[], Any]]:
    """The ops whose composition the layer is, each on the outputs of those before it."""
    calls: dict[str, Callable[[], Any]] = {}
    ops = torch.ops.custom

    def of(name: str, op: Callable[..., Any]) -> Callable[..., Any]:
        def stage(**arguments: Any) -> Any:
            kind = name
            if name == "compressor" and name in calls:
                kind = "index compressor"
            calls[kind] = partial(op, **arguments)
            return calls[kind]()

        return stage

    stages = layer_v4.Stages(
        of("prolog", ops.npu_sharedkv_prolog_pto),
        of("compressor", ops.npu_compressor),
        of("quantization", ops.npu_quantize_index_query),
        of("indexer", ops.npu_lightning_indexer),
        of("indexer", ops.npu_quant_lightning_indexer),
        of("attention", ops.npu_sparse_attn_sharedkv),
        of("attention", ops.npu_kv_quant_sparse_attn_sharedkv),
        of("output", ops.npu_grouped_o_proj_pto),
        of("output", ops.npu_grouped_o_proj_pto),
    )
    layer_v4.Layer(**_named(layer)).run(stages)
    return calls


def _named(layer: Arguments) -> Arguments:
    """All arguments of the op by name."""
    parameters = inspect.signature(npu_sparse_attention_v4_pto).parameters
    return {n: p.default for n, p in parameters.items() if p.default is not p.empty} | layer


def _whole(small: bool) -> list[Case]:
    if small:
        return [layer_case(1, 1, TINY, kind, 512, 128) for kind in RATIOS]
    models = ((PRO, 1024), (FLASH, 512))
    return [
        layer_case(b, 1, model, kind, context, k)
        for model, k in models
        for kind in RATIOS
        for b in (1, 32, 128)
        for context in ((65536,) if kind == "sliding" else (65536, 524288))
        if b * context <= 32 * 524288
    ]


PRESETS: dict[str, Callable[[bool], list[Case]]] = {"npu_sparse_attention_v4_pto": _whole}
