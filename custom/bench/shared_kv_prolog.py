# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Rows for what lies before and behind attention over one shared row: DeepSeek-V4's sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ..dispatch.common.nz import to_nz
from ..dispatch.common.quantized import V4_ROW
from .case import Arguments, Case, Draw
from .sparse_attention import first_requests

BF16 = 2  # bytes
D, DR, NI, DI, RO, P = 512, 64, 64, 128, 1024, 64


class Model(NamedTuple):
    label: str
    h: int
    n: int
    rq: int
    groups: int


PRO = Model("V4-Pro", 7168, 128, 1536, 16)
FLASH = Model("V4-Flash", 4096, 64, 1024, 8)
TINY = Model("small", 256, 4, 64, 2)


def projections(draw: Draw, model: Model) -> Arguments:
    """Of a layer's input, and of the query latent."""
    return dict(
        w_dq=weight(draw, model.h, model.rq),
        w_uq=weight(draw, model.rq, model.n * D),
        w_kv=weight(draw, model.h, D),
        gamma_cq=draw.normal(model.rq),
        gamma_kv=draw.normal(D),
    )


def weight(draw: Draw, *shape: int) -> torch.Tensor:
    return to_nz(draw.normal(*shape, std=shape[-2] ** -0.5))


def prolog_case(b: int, model: Model, kv_kind: str = "none") -> Case:
    """With the indexer's queries; every request has 200 tokens and this one."""
    of_heads = model.n * D + NI * DI
    size = model.h * (model.rq + D + NI) + model.rq * of_heads

    def make(draw: Draw) -> Arguments:
        packed = kv_kind == "fp8"
        cache = torch.zeros(
            4 * b,
            P,
            1,
            V4_ROW if packed else D,
            device=draw.device,
            dtype=torch.uint8 if packed else torch.bfloat16,
        )
        return dict(
            token_x=draw.normal(b, 1, model.h),
            **projections(draw, model),
            rope_sin=draw.normal(b, 1, DR),
            rope_cos=draw.normal(b, 1, DR),
            ori_kv=cache,
            ori_block_table=draw.table(b, 4),
            act_seqs=draw.full(b, value=201),
            w_idx_qb=weight(draw, model.rq, NI * DI),
            w_idx_proj=weight(draw, model.h, NI),
            kv_kind=kv_kind,
        )

    token = model.h + model.rq + D + NI + of_heads
    of_row = "" if kv_kind == "none" else f", {kv_kind} rows"
    return Case(
        "npu_sharedkv_prolog_pto",
        f"{model.label}, {model.n} heads, {b} tokens{of_row}",
        make,
        first_requests(("token_x", "rope_sin", "rope_cos", "ori_block_table", "act_seqs"), 4),
        bytes=float(BF16 * (size + b * token)),
        flops=2.0 * b * size,
        shape=dict(b=b, n=model.n),
    )


def output_case(b: int, model: Model) -> Case:
    deep = model.n // model.groups * D
    size = model.groups * RO * (deep + model.h)

    def make(draw: Draw) -> Arguments:
        return dict(
            attn_out=draw.normal(b, 1, model.n, D),
            w_o_a=to_nz(draw.normal(model.groups, deep, RO, std=deep**-0.5)),
            w_o_b=to_nz(draw.normal(model.groups * RO, model.h, std=(model.groups * RO) ** -0.5)),
            rope_sin=draw.normal(b, 1, DR),
            rope_cos=draw.normal(b, 1, DR),
        )

    return Case(
        "npu_grouped_o_proj_pto",
        f"{model.label}, {model.n} heads, {b} tokens",
        make,
        first_requests(("attn_out", "rope_sin", "rope_cos"), 4),
        bytes=float(BF16 * (size + b * (model.n * D + model.h))),
        flops=2.0 * b * size,
        shape=dict(b=b, n=model.n),
    )


def _cases(case: Callable[[int, Model], Case], small: bool) -> list[Case]:
    if small:
        return [case(1, TINY)]
    return [case(b, model) for model in (PRO, FLASH) for b in (1, 32, 128, 4096)]


def _prologs(small: bool) -> list[Case]:
    packed = [] if small else [prolog_case(b, PRO, "fp8") for b in (1, 128)]
    return [*_cases(prolog_case, small), *packed]


PRESETS: dict[str, Callable[[bool], list[Case]]] = {
    "npu_sharedkv_prolog_pto": _prologs,
    "npu_grouped_o_proj_pto": lambda small: _cases(output_case, small),
}
