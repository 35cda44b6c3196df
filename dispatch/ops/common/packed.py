# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What ops on packed query tokens and paged keys with a length each ask of them (common/packed.py).

query [T, N, D]   key [pages, P, .., D]   block_table [B, max_pages]   both lengths [B]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...check import Checker
from ...values import known
from . import layouts


def lengths(c: Checker, x: Mapping[str, Any], of_query: str, of_key: str) -> None:
    """The lengths have these names among the arguments `x`; T, P and pages are known."""
    page, block_table = c.sizes["P"], x["block_table"]
    query, key = layouts.named(x, of_query, of_key)
    c.require(
        page % 16 == 0 and page > 0,
        f"the page size is {page}, expected a multiple of 16 (from `key`).",
    )
    c.integers("block_table", block_table, "B max_pages")
    c.dense_rows(block_table=block_table)
    for (name, tensor), reach in (
        (query, c.sizes["T"]),
        (key, c.sizes["max_pages"] * page),
    ):
        if tensor is None:
            c.fail(f"`{name}` is missing, and packed tokens need it. Pass [B], a length each.")
            return
        c.integers(name, tensor, "B")
        c.contiguous(**{name: tensor})
        layouts.values(c, name, tensor, "BSND", reach)
    name, tensor = query
    if tensor is not None and known(tensor):
        total = sum(tensor.tolist())
        c.require(
            total <= c.sizes["T"],
            f"`{name}` adds up to {total}, expected at most T={c.sizes['T']} (from `query`). Pass "
            "lengths, not prefix sums.",
        )
    if key[1] is not None:
        layouts.pages(c, block_table, key[0], key[1])
