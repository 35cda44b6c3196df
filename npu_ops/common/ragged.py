# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Which request a query token belongs to, how many positions it sees, where their keys lie.

Layouts as in dispatch/common/layout.py.  All of it is scalar work on the core, from lengths on the
device: a captured graph replays with others.  A slot numbers the key's rows: page * page_rows +
offset, where page_rows is the page's stride in rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .lengths import within

BSND, TND, PAGED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
LAYOUTS = {"BSND": 0, "TND": 1, "PA_BSND": 2}
LONGEST = 2**24  # the vector unit divides integers as floats, exactly up to here


class Strides(NamedTuple):
    """Of rows of heads."""

    row: int
    head: int


class Requests(NamedTuple):
    """Arguments of `visible`, as a kernel takes them: `of: Requests`, from `Plan.requests`."""

    query_lengths: Tensor
    key_lengths: Tensor
    requests: int
    tokens: int
    reach: int


class Pages(NamedTuple):
    """Of the table and the cache."""

    stride: int  # from request to request
    count: int  # type: ignore[assignment]
    size: int
    rows: int  # from page to page


class Layout(NamedTuple):
    """Flags of `visible`, which `Plan.flags` has by name."""

    Q_TND: tl.constexpr  # query tokens are packed
    Q_LENGTHS: tl.constexpr  # requests have query lengths
    KEYS: tl.constexpr  # BSND, TND or PAGED
    K_LENGTHS: tl.constexpr  # requests have key lengths
    CAUSAL: tl.constexpr  # a token sees the keys up to its own


@triton.jit
def request_of(token, query_lengths, requests, tokens, Q_TND: tl.constexpr):
    """The request of a token; `requests` behind the last one."""
    if Q_TND:
        request = 0
        for start in range(0, requests, 128):
            r = start + tl.arange(0, 128)
            ends = tl.load(query_lengths + r, mask=r < requests, other=2147483647)
            request += tl.sum(tl.where(ends <= token, 1.0, 0.0), 0).to(tl.int32)
    else:
        request = token // tokens
    return request


@triton.jit
def tokens_of(
    request, query_lengths, requests, tokens, Q_TND: tl.constexpr, Q_LENGTHS: tl.constexpr
):
    """(first token, number of tokens) of a request; `tokens` are those of each request, or of all
    of them (TND)."""
    if Q_TND:
        first = within(query_lengths + tl.maximum(request - 1, 0), tokens)
        first = tl.where(request > 0, first, 0)
        count = within(query_lengths + request, tokens) - first
    elif Q_LENGTHS:
        first = request * tokens
        count = tl.minimum(tl.load(query_lengths + request), tokens)
    else:
        first = request * tokens
        count = tokens
    return first, count


@triton.jit
def keys_of(request, key_lengths, reach, KEYS: tl.constexpr, K_LENGTHS: tl.constexpr):
    """(first row, number of keys) of a request; the key tensor can hold `reach` of them."""
    if KEYS == TND:
        before = tl.load(key_lengths + tl.maximum(request - 1, 0))
        # no sum is negative; if one is all the same, no row before the first is read or written
        first = tl.where(request > 0, tl.maximum(before, 0), 0)
        count = tl.minimum(tl.load(key_lengths + request), reach) - first
    elif K_LENGTHS:
        first = request * 0
        count = tl.minimum(tl.load(key_lengths + request), reach)
    else:
        first = request * 0
        count = reach
    return first, tl.maximum(count, 0)


@triton.jit
def seen(j, tokens, keys, CAUSAL: tl.constexpr):
    """How many of its request's keys the j-th token sees: the last token sees them all."""
    limit = keys
    if CAUSAL:
        limit = tl.minimum(tl.maximum(keys - (tokens - 1 - j), 0), keys)
    return tl.where(j < tokens, limit, 0)


@triton.jit
def visible(
    token,
    query_lengths,
    key_lengths,
    requests,
    tokens,
    reach,
    Q_TND: tl.constexpr,
    Q_LENGTHS: tl.constexpr,
    KEYS: tl.constexpr,
    K_LENGTHS: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """(request, its first key row, positions seen) of a token; nothing is seen by a token that
    belongs to no request, and its request is then some valid one."""
    request = request_of(token, query_lengths, requests, tokens, Q_TND)
    inside = request < requests
    request = tl.minimum(request, requests - 1)
    first, count = tokens_of(request, query_lengths, requests, tokens, Q_TND, Q_LENGTHS)
    start, keys = keys_of(request, key_lengths, reach, KEYS, K_LENGTHS)
    return request, start, tl.where(inside, seen(token - first, count, keys, CAUSAL), 0)


@triton.jit
def among(token, count, first, rows):
    """Which of the `count` tokens from `token` on are among `rows` from `first` on, from one to
    before another."""
    return tl.maximum(first - token, 0), tl.minimum(count, first + rows - token)


@triton.jit
def key_rows(request, start, position, page_rows, reach, KEYS: tl.constexpr):
    """(row of the keys, row of a dense output of theirs) of a position."""
    if KEYS == TND:
        row = (start + position).to(tl.int64)
        to = row
    else:
        row = request.to(tl.int64) * page_rows + position
        to = request.to(tl.int64) * reach + position
    return row, to


def int32(tensor: Tensor) -> Tensor:
    """For the vector unit, which has no 64-bit arithmetic.  What does not fit stays beyond all
    that there is: an index is absent, a length ends with the tensors."""
    if tensor.dtype is torch.int32:
        return tensor
    return tensor.clamp(-1, 2**31 - 1).to(torch.int32)


@dataclass(frozen=True)
class Plan:
    """What follows from shapes; `arguments` and `flags` are those of `visible`, by name."""

    rows: int  # query tokens
    reach: int
    table: Tensor
    arguments: dict[str, Any]
    flags: dict[str, Any]

    @property
    def requests(self) -> dict[str, Any]:
        return {f"of_{name}": value for name, value in self.arguments.items()}


def plan(
    query: Tensor,
    key: Tensor,
    query_lengths: Tensor | None,
    key_lengths: Tensor | None,
    table: Tensor | None,
    layout_query: str,
    layout_key: str,
    sparse_mode: int,
) -> Plan:
    if layout_query == "TND":
        assert query_lengths is not None
        tokens = rows = query.shape[0]
        if query_lengths.shape[0] == 0:  # as one without tokens: no kernel reads an empty tensor
            query_lengths = key_lengths = query_lengths.new_zeros(1)
        requests = query_lengths.shape[0]
    else:
        requests, tokens = query.shape[:2]
        rows = requests * tokens
    if layout_key == "PA_BSND":
        assert table is not None
        reach = table.shape[1] * key.shape[1]
        table = int32(table)
    else:
        reach = key.shape[0] if layout_key == "TND" else key.shape[1]
    none = torch.empty(0, dtype=torch.int32, device=query.device)
    arguments = {
        "query_lengths": none if query_lengths is None else int32(query_lengths),
        "key_lengths": none if key_lengths is None else int32(key_lengths),
        "requests": requests,
        "tokens": tokens,
        "reach": reach,
    }
    flags = {
        "Q_TND": layout_query == "TND",
        "Q_LENGTHS": query_lengths is not None,
        "KEYS": LAYOUTS[layout_key],
        "K_LENGTHS": key_lengths is not None,
        "CAUSAL": sparse_mode == 3,
    }
    return Plan(rows, reach, none if table is None else table, arguments, flags)


def page_rows(key: Tensor) -> int:
    """The distance of two pages (requests, for BSND keys) in rows of this tensor."""
    if key.ndim == 3 or key.shape[0] <= 1:
        return key.shape[1] if key.ndim == 4 else 0
    return key.stride(0) // key.stride(1)


def pages_of(key: Tensor, table: Tensor) -> dict[str, int]:
    """`pages: Pages` of a launch."""
    return dict(
        pages_stride=table.stride(0),
        pages_count=key.shape[0],
        pages_size=key.shape[-3],
        pages_rows=page_rows(key),
    )


def row_stride(key: Tensor) -> int:
    return key.stride(0) if key.ndim == 3 else key.stride(1)


def uneven(**keys: Tensor | None) -> str | None:
    """Why the rows of these tensors cannot be numbered alike, or None."""
    given = {name: key for name, key in keys.items() if key is not None}
    for name, key in given.items():
        if key.ndim == 4 and key.shape[0] > 1 and key.stride(0) % max(key.stride(1), 1):
            return f"`{name}` has pages {key.stride(0)} apart, not a multiple of its row stride"
    if len({page_rows(key) for key in given.values()}) > 1:
        return f"{', '.join(given)} have pages of different strides in rows"
    return None
