# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""npu_kv_quant_sparse_flash_attention in int8: the rows that the copies make, through the attention
that the bf16 op's cases prove."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from custom.dispatch.common import quantized
from custom.dispatch.reference.caches import latent_cache_write
from torch import Tensor

from .. import memory
from ..case import Arguments, Case, Finding, Inputs, in_rounds
from ..conditions import far_apart
from ..controls import Control
from .sparse_flash_attention import pools_and_tails


def rows_of(
    lengths: list[int],
    s1: int = 1,
    heads: int = 16,
    count: int = 64,
    page: int = 16,
    row_layout: str = "nope_rope_scale",
    sinks: bool = False,
    between: int = 0,
    exact: bool = False,
    rotary: int = quantized.ROTARY,
    chosen_by: Callable[[Arguments], Tensor] | None = None,
    **options: Any,
) -> Callable[[Inputs], Arguments]:
    """Pages in random order, unused ones forbidden; absent and unseen indices among the others.
    `exact`: scales are powers of two, so that no latent is rounded."""

    def make(x: Inputs) -> Arguments:
        used = [-(-n // page) for n in lengths]
        total = sum(used) + 2
        order = x.permutation(total).tolist()
        table = torch.full((len(lengths), max(used) + 1), -1)
        width = quantized.row_bytes(rotary)
        cache = memory.guarded(torch.zeros(total, page + between, 1, width, dtype=torch.int8))
        cache = cache[:, :page]
        for i, pages in enumerate(used):
            table[i, :pages] = torch.tensor([order.pop() for _ in range(pages)])
        latent_cache_write.forward(
            ckv=x.normal(total * page, 512),
            k_rope=x.normal(total * page, rotary),
            rows=cache,
            slots=torch.arange(total * page),
            kind="int8",
            row_layout=row_layout,
            scale_format="ue8m0",
            k_nope_clip_alpha=None,
            rope_head_dim=rotary,
        )
        if exact:
            scale = quantized.row_parts(cache, row_layout, torch.int8, torch.bfloat16)[2]
            scale.copy_(torch.exp2(scale.log2().round()))
        # NaN in all that holds floats
        cache[order] = -1
        x.forbidden.append((cache, order))
        chosen = torch.full((len(lengths), s1, 1, count), -1)
        for i, n in enumerate(lengths):
            for j in range(s1):
                some = x.permutation(n + 3)[: count - 1]
                chosen[i, j, 0, : len(some)] = some
        chosen[..., 3] = -1
        given = (
            dict(
                query=x.normal(len(lengths), s1, heads, 512 + rotary),
                key=cache,
                value=cache,
                sparse_indices=x.ints(chosen),
                scale_value=0.06,
                key_quant_mode=2,
                value_quant_mode=2,
                block_table=x.ints(table),
                actual_seq_lengths_kv=x.ints(lengths),
                layout_kv="PA_BSND",
                attention_mode=2,
                sinks=memory.guarded(torch.randn(heads, generator=x.random)) if sinks else None,
                row_layout=row_layout,
                rope_head_dim=rotary,
            )
            | options
        )
        if chosen_by is not None:
            chosen_by(given)
        return given

    return make


def wide(arguments: Arguments) -> Arguments:
    """The rows stay as they are."""
    return arguments | {
        name: arguments[name].double()
        for name in ("query", "sinks")
        if arguments.get(name) is not None
    }


def rounded_once(case: Case, got: Arguments, exact: Arguments, _: Arguments) -> list[Finding]:
    """Of one key a query attends to its latent, number times scale, to the last bit."""
    wrong = {name: int((x != exact[name].to(x.dtype)).sum()) for name, x in got.items()}
    return [
        (float("inf") if n else 0.0, f"{name}: {n} numbers differ") for name, n in wrong.items()
    ]


def quant(name: str, make: Callable[[Inputs], Arguments], **options: Any) -> Case:
    op = f"{OP}_lse" if options.pop("statistics", False) else OP
    return Case(op, name, make, widen=wide, **options)


OP = "npu_kv_quant_sparse_flash_attention"
COPIES = "sparse_flash_attention"
CASES = (
    quant("16 heads", rows_of([100, 3, 40], 2, exact=True), statistics=True),
    quant("FlashMLA's order, sinks", rows_of([100, 40], row_layout="nope_scale_rope", sinks=True)),
    quant("pages apart, 5 heads", rows_of([70, 40], heads=5, between=1)),
    quant("one key, in the first row", rows_of([1]), seed=1),
    quant("one key, its latents rounded once", rows_of([1, 1]), judge=rounded_once),
    quant("several rounds", in_rounds(2 * 128 * 576 * 2, rows_of([3, 100, 40], 2, count=100))),
    quant(
        "an empty request, 32 heads",
        rows_of([70, 0], heads=32, count=100, exact=True),
        statistics=True,
    ),
    quant(
        "GLM-5.3-Flash, 64 heads, 512 pools, no rotary keys",
        rows_of(
            [2102, 65],
            heads=64,
            count=513,
            page=128,
            rotary=0,
            chosen_by=pools_and_tails,
            sparse_block_size=4,
            scale_value=256**-0.5,
        ),
        cores=(24,),
    ),
    *(
        quant(f"{n} heads, no rotary keys", rows_of([40, 3], 2, n, count=20, rotary=0))
        for n in (12, 20, 96)
    ),
    quant("pages far apart, 5 heads", far_apart(rows_of([70, 40], heads=5), "key", "value")),
)
CONTROLS = (
    Control(
        "rotary keys where there are none",
        OP[4:],
        'ROTARY=x["rope_head_dim"]',
        "ROTARY=quantized.ROTARY",
        "12 heads, no rotary keys",
    ),
    Control(
        "the scales forgotten",
        COPIES,
        "x * by[:, :, None]",
        "x + 0 * by[:, :, None]",
        "16 heads",
    ),
    Control(
        "latents times a scale of 16 bits",
        COPIES,
        "x * by[:, :, None]",
        "x * by.to(tl.bfloat16).to(tl.float32)[:, :, None]",
        "one key, its latents rounded once",
    ),
    Control(
        "another row's scales",
        COPIES,
        "by = pair(scales, scale_stride, near, far, TILES)",
        "by = pair(scales, scale_stride, far, near, TILES)",
        "16 heads",
    ),
    Control(
        "another round's indices",
        COPIES,
        "selected = indices + (first + row).to(tl.int64)",
        "selected = indices + row.to(tl.int64)",
        "several rounds",
    ),
)
