# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""npu_quant_lightning_indexer in int8: small whole numbers and scales that are powers of two give
exact scores with many ties, so that the top-k must equal the reference's.  Scales of heads in
float32 have twelve bits, one more than float16 has; their scores are exact too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import memory
from ..case import Arguments, Case, Inputs
from ..conditions import a_page_past_the_last, far_apart, with_
from ..controls import Control
from . import lightning_indexer

Make = Callable[[Inputs], Arguments]


def in_int8(make: Make, fold: bool = False, scale: torch.dtype = torch.float16) -> Make:
    """The arguments of npu_lightning_indexer with values and scales of their own."""

    def made(x: Inputs) -> Arguments:
        given = make(x)
        del given["return_value"]
        query, key = (memory.guarded(given[n].to(torch.int8)) for n in ("query", "key"))
        closed = [blocks for tensor, blocks in x.forbidden if tensor is given["key"]]
        x.forbidden = []
        by = torch.exp2(torch.randint(-2, 2, key.shape[:-1], generator=x.random)).to(scale)
        by = memory.guarded(by)
        for blocks in closed:
            x.forbidden.append((key, blocks))
        of_query = torch.exp2(torch.randint(-2, 2, query.shape[:-1], generator=x.random))
        if scale is torch.float32:
            odd = 2 * torch.randint(0, 1024, query.shape[:-1], generator=x.random) + 1
            of_query *= 1 + odd / 2048
        return given | dict(
            query=query,
            key=key,
            weights=memory.guarded(given["weights"].to(torch.float16)),
            query_dequant_scale=None if fold else memory.guarded(of_query.to(scale)),
            key_dequant_scale=by,
            query_quant_mode=0,
            key_quant_mode=0,
        )

    return made


def quant(name: str, make: Make, scores: bool = False, **options: Any) -> Case:
    """`scores`: the op that gives them too."""
    return Case(f"{OP}_scores" if scores else OP, name, make, **options)


OP = "npu_quant_lightning_indexer"
paged, rows = lightning_indexer.paged, lightning_indexer.rows
CASES = (
    quant("paged, 64 heads", in_int8(paged([300, 1, 129], 2)), scores=True),
    quant("paged, s1 4, k above the length", in_int8(paged([70, 3, 0], 4, k=128))),
    quant("paged, 16 heads, folded", in_int8(paged([300, 257], 1, 16), fold=True)),
    *(
        quant(f"paged, {heads} heads, page {page}", in_int8(paged([200, 33], 1, heads, 48, page)))
        for heads, page in ((32, 128), *lightning_indexer.HEADS_IN_PAGES)
    ),
    quant(
        "paged, 24 heads, float32 scales",
        in_int8(paged([140], 2, 24), scale=torch.float32),
        scores=True,
    ),
    quant(
        "paged, weights of wider rows",
        with_(in_int8(paged([140], 2, 16, 48)), weights=lightning_indexer.of_wider_2),
    ),
    quant("paged, a page missing", in_int8(paged([400, 100], 1, 64, hole=-1))),
    quant("the page past the last", a_page_past_the_last(in_int8(paged([400, 100], 1, 16)))),
    quant("BSND", in_int8(rows("BSND", 64, 32))),
    quant("TND", in_int8(rows("TND", 64, 32)), scores=True),
    quant(
        "TND, keys to the last row",
        in_int8(lightning_indexer.to_the_last_row(rows("TND", 16, 32))),
    ),
    quant("keys far apart, scales dense", far_apart(in_int8(paged([300, 1, 129], 2)), "key")),
    quant(
        "4 tokens a key, 64 heads",
        in_int8(
            lightning_indexer.ended(lightning_indexer.of_tokens(paged([300, 1, 129], 2), 4)),
        ),
    ),
    quant(
        "3 tokens a key, page 4",
        in_int8(lightning_indexer.of_tokens(paged([21, 3], 1, 64, 16, 4), 3)),
        scores=True,
    ),
)
_FILE = "lightning_indexer"
CONTROLS = (
    Control(
        "the pages of scales as far apart as those of keys",
        "lightning_indexer",
        "number.to(tl.int64) * cache.scale_page",
        "number.to(tl.int64) * cache.page_rows",
        "keys far apart, scales dense",
    ),
    Control(
        "a key counted for every token",
        "quant_lightning_indexer",
        "select(x, *scales",
        'select(x | {"cmp_ratio": 1}, *scales',
        "4 tokens a key, 64 heads",
    ),
    Control("the key's scale forgotten", _FILE, "if C.K_SCALE:", "if False:", "paged, 64 heads"),
    Control(
        "the query's scale forgotten",
        _FILE,
        "Q_SCALE=query_scale is not None",
        "Q_SCALE=False",
        "paged, 64 heads",
    ),
    Control(
        "a head's scale rounded",
        _FILE,
        "tl.load(of_scale, mask=h < HEADS, other=0.0).to(tl.float32)",
        "tl.load(of_scale, mask=h < HEADS, other=0.0).to(tl.float16).to(tl.float32)",
        "paged, 24 heads, float32 scales",
    ),
    Control(
        "another page's scales",
        _FILE,
        "number.to(tl.int64) * cache.scale_page + position - column * cache.page",
        "position.to(tl.int64)",
        "paged, 64 heads",
    ),
    Control(
        "a missing page is read",
        _FILE,
        "there = (number >= 0)",
        "there = (number >= -1)",
        "paged, a page missing",
    ),
)
