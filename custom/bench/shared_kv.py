# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Rows for attention over window rows and entries at DeepSeek-V4's sizes: 64 heads (Flash) and 128
(Pro), a window of 128; sliding, all entries of 128 tokens (HCA), 512 or 1024 entries of 4 (CSA)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..dispatch.common import quantized
from .case import Arguments, Case, Draw, Outputs
from .sparse_attention import BF16, first_requests

D, WINDOW = 512, 128
FLOAT, INT = 4, 4  # bytes
OP, GRAD, BYTES = (
    "npu_sparse_attn_sharedkv",
    "npu_sparse_attn_sharedkv_grad",
    "npu_kv_quant_sparse_attn_sharedkv",
)
_ops = torch.ops.custom
# source tokens of an entry, 0 for none
RATIOS = {"sliding": 0, "CSA": 4, "HCA": 128}


def _keys(kind: str, context: int, k: int) -> int:
    """That a token at the end of `context` sees."""
    m = RATIOS[kind]
    entries = context // m if m else 0
    return WINDOW + (min(k, entries) if kind == "CSA" else entries)


@dataclass(frozen=True)
class Pages:
    """Rows of a page of the window and of the entries by kind, as engines cut them."""

    rows: int
    entries: dict[str, int]


# 256 source tokens a page of entries; on an NPU every page has 128 rows
ON_GPU = Pages(64, {"CSA": 64, "HCA": 2})
ON_NPU_PAGES = Pages(128, {"CSA": 128, "HCA": 128})


def _cache(draw: Draw, pages: int, page: int, fp8: bool) -> Tensor:
    if not fp8:
        return draw.normal(pages, page, 1, D)
    step = -(-page * quantized.V4_ROW // 576) * 576
    raw = torch.empty(pages, step, dtype=torch.uint8, device=draw.device)
    rows = raw[:, : page * quantized.V4_ROW].view(pages, page, 1, quantized.V4_ROW)
    _ops.npu_latent_cache_write(
        draw.normal(pages * page, quantized.V4_VALUES),
        draw.normal(pages * page, quantized.ROTARY),
        rows,
        torch.arange(pages * page, device=draw.device),
        kind="fp8",
        row_layout="v4",
    )
    return rows


def _selected(draw: Draw, kind: str, b: int, s: int, context: int, k: int) -> Tensor:
    return draw.chosen(b * s, k, (context - s + 1) // RATIOS[kind]).view(b, s, 1, k)


def case(
    kind: str, b: int, s: int, n: int, context: int, k: int, op: str = OP, cut: Pages = ON_GPU
) -> Case:
    """Paged caches; requests share no page."""
    fp8, m, page = op == BYTES, RATIOS[kind], cut.rows

    def make(draw: Draw) -> Arguments:
        # the window's pages go round
        held = -(-(WINDOW + s) // page) + 1
        table = draw.table(b, held)
        columns = torch.arange(context // page, device=draw.device) % held
        given = dict(
            q=draw.normal(b, s, n, D),
            ori_kv=_cache(draw, b * held, page, fp8),
            ori_block_table=table[:, columns].contiguous(),
            seqused_kv=draw.full(b, value=context),
            sinks=draw.normal(n, dtype=torch.float32),
            cmp_ratio=m,
            ori_win_left=WINDOW - 1,
            return_softmax_lse=True,
        )
        if m:
            entry_page = cut.entries[kind]
            pages = -(-context // m // entry_page)
            given |= dict(
                cmp_kv=_cache(draw, b * pages, entry_page, fp8),
                cmp_block_table=draw.table(b, pages),
            )
        if kind == "CSA":
            given["cmp_sparse_indices"] = _selected(draw, kind, b, s, context, k)
        return given | (dict(kv_quant_mode=1) if fp8 else {})

    names = ["q", "ori_block_table", "seqused_kv"]
    names += ["cmp_block_table"] if m else []
    names += ["cmp_sparse_indices"] if kind == "CSA" else []

    def part(arguments: Arguments) -> tuple[Arguments, Callable[[Outputs], Outputs]]:
        piece, _ = first_requests(tuple(names), 2)(arguments)
        if s > 8:
            by_token = {"q", "cmp_sparse_indices"} & piece.keys()
            piece |= {name: piece[name][:, -8:] for name in by_token}
        return piece, lambda outputs: [outputs[0][:2, -8:], outputs[1][:2, :, -8:]]

    seen = _keys(kind, context, k)
    # a row and an entry are read once by all tokens of a request
    held = min(seen * s, WINDOW + s - 1 + (context // m if m else 0)) * b
    row = quantized.V4_ROW if fp8 else BF16 * D
    chosen = b * s * k * INT if kind == "CSA" else 0
    label = f"{kind}, {n} heads, {b} x {s} queries, {context // 1024}K tokens"
    if kind == "CSA":
        label += f", {k} chosen"
    return Case(
        op,
        f"fp8, {label}" if fp8 else label,
        make,
        part,
        bytes=float(held * row + b * s * n * (2 * BF16 * D + FLOAT) + chosen),
        flops=4.0 * b * s * n * seen * D,
        shape=dict(b=b, s=s, n=n, context=context, m=m),
        peers={"bf16": _on_bf16} if fp8 else {},
        reference=False,
    )


def _on_bf16(arguments: Arguments) -> Callable[[], Any]:
    """The op on what the rows stand for."""
    wide = {}
    for name in ("ori_kv", "cmp_kv"):
        if name in arguments:
            values, rotary, scales = quantized.v4_parts(arguments[name])
            by = (scales[..., :-1].int() << 23).view(torch.float32)
            rows = (values.float() * by.repeat_interleave(quantized.V4_TILE, -1)).bfloat16()
            wide[name] = torch.cat([rows, rotary], -1)[:, :, None]
    given = {name: x for name, x in arguments.items() if name != "kv_quant_mode"}
    return partial(_ops.npu_sparse_attn_sharedkv, **given | wide)


def gradient_case(kind: str, s: int, n: int, k: int) -> Case:
    """A prompt of `s` tokens with dense keys."""
    m = RATIOS[kind]

    def make(draw: Draw) -> Arguments:
        given = dict(
            q=draw.normal(1, s, n, D),
            ori_kv=draw.normal(1, s, 1, D),
            cmp_kv=draw.normal(1, s // m, 1, D) if m else None,
            sinks=draw.normal(n, dtype=torch.float32),
            cmp_ratio=m,
            ori_win_left=WINDOW - 1,
            layout_kv="BSND",
        )
        if kind == "CSA":
            given["cmp_sparse_indices"] = draw.chosen(s, k, s // m).view(1, s, 1, k)
        out, lse = _ops.npu_sparse_attn_sharedkv(**given, return_softmax_lse=True)
        return given | dict(d_out=draw.normal(1, s, n, D), out=out, softmax_lse=lse)

    def part(arguments: Arguments) -> tuple[Arguments, Callable[[Outputs], Outputs]]:
        """The last tokens; what is summed over all of them is of these alone."""
        last = 16
        arguments["d_out"][:, :-last] = 0
        names = {"q", "d_out", "out", "cmp_sparse_indices"} & arguments.keys()
        piece = arguments | {name: arguments[name][:, -last:].contiguous() for name in names}
        piece["softmax_lse"] = arguments["softmax_lse"][:, :, -last:].contiguous()
        return piece, lambda outputs: [outputs[0][:, -last:], *outputs[1:]]

    far = _keys(kind, s, k) - WINDOW
    seen = min(WINDOW, s) + (far if kind == "CSA" else far / 2)
    rows = s + (s // m if m else 0)
    return Case(
        GRAD,
        f"{kind}, {n} heads, {s} tokens",
        make,
        part,
        bytes=float(BF16 * D * (4 * s * n + 2 * rows) + s * (FLOAT * n + INT * k)),
        flops=10.0 * s * n * seen * D,
        shape=dict(s=s, n=n, m=m),
        reference=False,
    )


# heads and entries of more prompts
PREFILL = [(64, 1024), (128, 512), (128, 1024)]


def _cases(small: bool, op: str = OP, cut: Pages = ON_GPU) -> list[Case]:
    if small:
        return [case(kind, 2, 2, 4, 2048, 64, op) for kind in RATIOS]
    decode = [
        case(kind, b, 1, n, 65536, 8 * n, op, cut)
        for n in (64, 128)
        for b in (1, 32, 128)
        for kind in RATIOS
    ]
    prefill = [case(kind, 1, 4096, 64, 65536, 512, op, cut) for kind in RATIOS]
    if cut is ON_GPU:
        decode += [case("HCA", b, 1, n, 524288, 0, op) for n in (64, 128) for b in (1, 32, 128)]
        prefill += [case("CSA", 1, 4096, n, 65536, k, op) for n, k in PREFILL]
    return [*decode, *prefill]


def _gradients(small: bool) -> list[Case]:
    if small:
        return [gradient_case(kind, 256, 2, 16) for kind in RATIOS]
    return [gradient_case(kind, 4096, 64, 512) for kind in RATIOS]


PRESETS: dict[str, Callable[[bool], list[Case]]] = {
    OP: _cases,
    GRAD: _gradients,
    BYTES: partial(_cases, op=BYTES),
}
# in the place of those above
ON_NPU: dict[str, Callable[[bool], list[Case]]] = {
    OP: partial(_cases, cut=ON_NPU_PAGES),
    BYTES: lambda small: [],
}
