# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What every op with torch_npu's query and key layouts asks of them (see common/layout.py).

letters(...)     the shapes' letters for the layouts: c.shape("query", query, f"{rows} N D")
lengths(...)     lengths, prefix sums and the block table, after the shapes are known
options(...)     sparse_mode, pre_tokens, next_tokens
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, TypedDict

from torch import Tensor

from ...check import Checker
from ...env import config
from ...errors import NotSupported
from ...op_spec import UNLIMITED
from ...values import is_real, known

_ROWS = {"BSND": "B S", "TND": "T"}
_BEYOND = "Shorten what is longer, or pass the tensors (a table of more pages) that hold it."
_KEYS = {"BSND": "B S2", "TND": "T2", "PA_BSND": "pages P"}

SMALL_PAGES = (1, 2, 4, 8)  # of entries, as a page of tokens over cmp_ratio

Named = tuple[str, Tensor | None]


class OneLayout(TypedDict):
    """Options of torch_npu's gradients: `layout` is that of queries and keys."""

    layout: str | None
    sparse_mode: int | None
    pre_tokens: int | None
    next_tokens: int | None


def named(x: Mapping[str, Any], query: str, key: str) -> tuple[Named, Named]:
    """The arguments of these names."""
    return (query, x[query]), (key, x[key])


def letters(c: Checker, query: tuple[str, str], key: tuple[str, str]) -> tuple[str, str]:
    """The letters in front of "N D" and "1 D"; `query` and `key` are (argument, its value)."""
    c.one_of(*query, *_ROWS)
    c.require(
        key[1] != "PA_BNSD",
        f"`{key[0]}` is 'PA_BNSD', expected one of {', '.join(map(repr, _KEYS))}. Keys have one "
        "head: pass the pages [pages, P, 1, D] (.transpose(1, 2) of them) as 'PA_BSND'.",
    )
    c.one_of(*key, *_KEYS)
    c.require(
        key[1] in (query[1], "PA_BSND"),
        f"`{key[0]}` is {key[1]!r}, expected {query[1]!r} (as `{query[0]}`) or 'PA_BSND'.",
    )
    return _ROWS[query[1]], _KEYS[key[1]]


def layout(c: Checker, value: str | None) -> tuple[str, str, str]:
    """(layout, letters of queries, of keys) for an op with one `layout`; keys are not paged."""
    value = "BSND" if value is None else value
    c.one_of("layout", value, *_ROWS)
    return value, *letters(c, ("layout", value), ("layout", value))


def lengths(
    c: Checker,
    layout_query: str,
    layout_key: str,
    query: Named,
    key: Named,
    block_table: Tensor | None = None,
    cmp_ratio: int = 1,
) -> None:
    """`query` and `key` are (argument, tensor) of the lengths; the shapes are checked already.
    Lengths of keys count `cmp_ratio` tokens for each."""
    if cmp_ratio > 1:
        c.require(
            layout_key != "TND",
            f"`cmp_ratio` is {cmp_ratio} and keys have layout 'TND', expected 'PA_BSND' or 'BSND': "
            "prefix sums of tokens do not say where entries lie.",
        )
        c.require(
            key[1] is not None,
            f"`{key[0]}` is missing, and `cmp_ratio` {cmp_ratio} needs it: how many tokens the "
            "entries stand for.",
        )
    _leading_zero(c, layout_query, query, key)
    _leading_zero(c, layout_key, key, query)
    for (name, tensor), layout_ in ((query, layout_query), (key, layout_key)):
        if tensor is None:
            c.require(
                layout_ == "BSND",
                f"`{name}` is missing, and layout {layout_!r} needs it. Pass "
                + ("prefix sums without the leading 0." if layout_ == "TND" else "a length each."),
            )
            continue
        c.integers(name, tensor, "B")
        c.contiguous(**{name: tensor})
    if layout_key == "PA_BSND":
        if block_table is None:
            c.fail(
                "`block_table` is missing, and paged keys need it. Pass [B, max_pages], the page "
                "of each block of positions."
            )
            return
        c.integers("block_table", block_table, "B max_pages")
        c.dense_rows(block_table=block_table)
        page = c.sizes["P"]
        c.require(
            (page % 16 == 0 and page > 0) or (cmp_ratio > 1 and page in SMALL_PAGES),
            f"the page size is {page}, expected a multiple of 16 (from `key`). Allocate the cache "
            "in such pages, [pages, P, 1, D].",
        )
    else:
        c.require(
            block_table is None,
            f"`block_table` is given, and keys of layout {layout_key!r} have none. "
            "Pass the paged layout 'PA_BSND', or leave the table out.",
        )
    values(c, *query, layout_query, c.sizes["S" if layout_query == "BSND" else "T"])
    if layout_key == "PA_BSND" and key[1] is not None and block_table is not None:
        entries = c.sizes["max_pages"] * c.sizes["P"]
        values(c, *key, "BSND", entries * cmp_ratio + cmp_ratio - 1)
        pages(c, block_table, key[0], key[1] // cmp_ratio)
    else:
        entries = c.sizes["S2" if layout_key == "BSND" else "T2"]
        values(c, *key, layout_key, entries * cmp_ratio + cmp_ratio - 1)


def _leading_zero(c: Checker, layout_: str, one: Named, other: Named) -> None:
    """Prefix sums as FlashAttention has them, one number more than the other argument has."""
    name, tensor = one
    if layout_ != "TND" or tensor is None or other[1] is None or tensor.ndim != 1:
        return
    came, wanted = tensor.shape[0], other[1].shape[0] if other[1].ndim == 1 else None
    c.require(
        came - 1 != wanted,
        f"`{name}` has {came} numbers, expected {wanted}, as `{other[0]}` has: prefix sums of "
        f"layout 'TND' have no leading 0. Pass {name}[1:].",
    )


def values(c: Checker, name: str, tensor: Tensor | None, layout_: str, reach: int) -> None:
    """Where values are known: lengths from 0, prefix sums that never fall, none beyond `reach`."""
    if tensor is not None and known(tensor):
        in_reach(c, name, tensor.tolist(), layout_, reach)


def prefix_sums(c: Checker, name: str, tensor: Tensor, tokens: int) -> None:
    """Where values are known: sums that never fall and end with the tokens.  `name` holds one more
    than there are sequences."""
    if not known(tensor):
        return
    came = tensor.tolist()
    c.require(
        came[0] >= 0 and came[-1] <= tokens and all(a <= b for a, b in pairwise(came)),
        f"`{name}` is {came}, expected prefix sums that never fall, from 0 to at most {tokens}. "
        "The last one is the number of tokens.",
    )
    if came[0] > 0:
        c.note(
            "sums",
            f"`{name}` begins at {came[0]}, so that as many tokens are of no sequence. If they are "
            "its first sequence, put a 0 in front: torch.nn.functional.pad(x, (1, 0)).",
        )


def in_reach(c: Checker, name: str, came: Sequence[int], layout_: str, reach: int) -> None:
    rising = layout_ != "TND" or all(a <= b for a, b in pairwise(came))
    c.require(
        rising and all(0 <= value <= reach for value in came),
        f"`{name}` is {list(came)}, expected "
        + ("prefix sums that never fall" if layout_ == "TND" else "lengths")
        + f" from 0 to {reach}. "
        + ("They have no leading 0 and end with the tokens." if layout_ == "TND" else _BEYOND),
    )


def pages(c: Checker, block_table: Tensor, name: str, lengths: Tensor) -> None:
    """Under CUSTOM_DEBUG=1: every page that the lengths, checked already, reach is there."""
    if not config.debug or not is_real(block_table) or not is_real(lengths):
        return
    for request, (row, length) in enumerate(
        zip(block_table.tolist(), lengths.tolist(), strict=True)
    ):
        used = row[: -(-length // c.sizes["P"])]
        c.require(
            all(0 <= page < c.sizes["pages"] for page in used),
            f"`block_table` has the pages {used} for the {length} positions of request {request} "
            f"(from `{name}`), expected pages from 0 to {c.sizes['pages'] - 1}.",
        )


def options(
    c: Checker, sparse_mode: int | None, pre_tokens: int | None, next_tokens: int | None
) -> None:
    c.one_of("sparse_mode", 3 if sparse_mode is None else sparse_mode, 0, 3)
    for name, value in (("pre_tokens", pre_tokens), ("next_tokens", next_tokens)):
        c.require(
            value is None or value == UNLIMITED,
            f"`{name}` is {value}, expected its default {UNLIMITED}: only sparse_mode limits "
            "the keys.",
        )


def refuse_paged_gradient(op: str, layout_key: str) -> None:
    if layout_key == "PA_BSND":
        raise NotSupported(
            f"{op}: an input requires grad, and the backward does not take paged keys. Call it "
            "under torch.no_grad(), or pass the keys as BSND or TND."
        )
