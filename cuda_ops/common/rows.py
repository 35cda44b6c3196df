# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Which request a query row belongs to, how many keys it sees, and where those keys lie.

Rows are the query tokens of all requests in order: row = request * S1 + token (BSND), or the
token itself (TND, whose lengths are prefix sums).  Lengths are read on the device, so a captured
graph replays with others; they end with the tensors.  Keys lie as BSND, as TND, or in pages that a
block table names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

BSND, TND, PAGED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
LAYOUTS = {"BSND": 0, "TND": 1, "PA_BSND": 2}
MOST = 2**30  # that 32 bits number of anything, with room for a tile past its end


class Requests(NamedTuple):
    """The requests of a call, as kernels hand them on: their lengths (or prefix sums), the pages of
    their keys, how many rows and requests there are, and the most keys of a request."""

    seqlens_q: Any
    seqlens_k: Any
    table: Any
    tokens: Any
    requests: Any
    max_kv_len: Any
    table_stride: Any
    pages: Any


# of Requests: what no kernel is compiled anew for
NUMBERS = ["tokens", "requests", "max_kv_len", "table_stride", "pages"]


class Layout(NamedTuple):
    """What is known of requests when a kernel is compiled.  REQUESTS is a power of two not below
    the number of them."""

    PAGE: int
    Q_TND: bool
    KEYS: int
    CAUSAL: bool
    HAS_Q: bool
    HAS_K: bool
    REQUESTS: int


@triton.jit
def within(length, most):
    """A length or a prefix sum, int32 or int64, from 0 to `most`, as int32."""
    if length.dtype == tl.int64:
        # by halves, as the indexer has no registers for comparisons in 64 bits
        high = (length >> 32).to(tl.int32)
        low = tl.minimum(length.to(tl.uint32), most).to(tl.int32)
        length = tl.where(high == 0, low, tl.where(high < 0, 0, most))
    else:
        length = tl.minimum(tl.maximum(length, 0), most)
    return length


@triton.jit
def between(row, there, ends, of):
    """`request_of` the prefix sums `ends`, of which those that are `there` count."""
    before = there & (ends <= row)
    request = tl.sum(before.to(tl.int32), 0)
    first = tl.max(tl.where(before, ends, 0), 0)
    return request, first, tl.min(tl.where(there & (ends > row), ends, of.tokens), 0)


@triton.jit
def of_batch(row, of):
    """`request_of` where all have `of.tokens`."""
    request = (row // of.tokens).to(tl.int32)
    first = request * of.tokens
    return request, first, first + of.tokens


@triton.jit
def request_of(row, of, LAYOUT: tl.constexpr):
    """(request, its first row, where its rows end) of a query row; past the last one the number of
    requests.  Of prefix sums in any order: how many it has passed, the last of them, the next."""
    if LAYOUT.Q_TND:
        r = tl.arange(0, LAYOUT.REQUESTS)
        ends = within(tl.load(of.seqlens_q + r, mask=r < of.requests, other=0), of.tokens)
        return between(row, r < of.requests, ends, of)
    else:
        return of_batch(row, of)


@triton.jit
def rows_of(request, first, of, LAYOUT: tl.constexpr):
    """How many query rows the request has; fewer than 0 where prefix sums fall."""
    if LAYOUT.Q_TND:
        end = within(
            tl.load(of.seqlens_q + request, mask=request < of.requests, other=0), of.tokens
        )
        count = tl.where(request < of.requests, end - first, 0)
    elif LAYOUT.HAS_Q:
        count = within(tl.load(of.seqlens_q + request), of.tokens)
    else:
        count = of.tokens
    return count


@triton.jit
def keys_of(request, of, LAYOUT: tl.constexpr):
    """(first key, number of keys) of a request."""
    inside = request < of.requests
    at = of.seqlens_k + request
    if LAYOUT.KEYS == TND:
        first = within(tl.load(at - 1, mask=inside & (request > 0), other=0), of.max_kv_len)
        end = within(tl.load(at, mask=inside, other=0), of.max_kv_len)
        count = tl.maximum(end - first, 0)
    else:
        first = request * 0
        if LAYOUT.HAS_K:
            count = within(tl.load(at, mask=inside, other=0), of.max_kv_len)
        else:
            count = tl.where(inside, of.max_kv_len, 0)
    return first, count


@triton.jit
def sees(j, rows, keys, CAUSAL: tl.constexpr):
    """How many of the request's keys its j-th row sees, of `rows`: the last row sees them all."""
    kv_len = keys
    if CAUSAL:
        kv_len = tl.minimum(tl.maximum(keys - (rows - 1 - j), 0), keys)
    return tl.where(j < rows, kv_len, 0)


@triton.jit
def locate(row, of, LAYOUT: tl.constexpr):
    """(request, first key, kv_len: how many keys it sees) of a query row."""
    request, first, _ = request_of(row, of, LAYOUT)
    rows = rows_of(request, first, of, LAYOUT)
    start, keys = keys_of(request, of, LAYOUT)
    return request, start, sees((row - first).to(tl.int32), rows, keys, LAYOUT.CAUSAL)


@triton.jit
def physical_slot(pos, valid, request, start, of, LAYOUT: tl.constexpr):
    """(outer, inner, valid): logical positions as the key tensor's first two indices, int64.
    A page that the table does not name (negative, or past the cache) is absent."""
    if LAYOUT.KEYS == PAGED:
        entry = of.table + request.to(tl.int64) * of.table_stride + pos // LAYOUT.PAGE
        outer = tl.load(entry, mask=valid, other=-1).to(tl.int64)
        valid = valid & (outer >= 0) & (outer < of.pages)
        inner = (pos % LAYOUT.PAGE).to(tl.int64)
    elif LAYOUT.KEYS == TND:
        outer = (pos * 0).to(tl.int64)
        inner = pos.to(tl.int64) + start
    else:
        outer = (pos * 0).to(tl.int64) + request
        inner = pos.to(tl.int64)
    return outer, inner, valid


@dataclass(frozen=True)
class Plan:
    """What follows from shapes; `arguments` are what `Requests` is made of, by name."""

    rows: int
    max_kv_len: int
    arguments: dict[str, Any]
    layout: Layout


def plan(
    query: Tensor,
    key: Tensor,
    seqlens_q: Tensor | None,
    seqlens_k: Tensor | None,
    table: Tensor | None,
    layout_q: str,
    layout_k: str,
    sparse_mode: int | None,
) -> Plan:
    """`max_kv_len` is the most keys that one request can have; `tokens` are those of each request,
    or of all of them (TND)."""
    q_tnd = layout_q == "TND"
    if q_tnd:
        assert seqlens_q is not None
        requests, tokens, rows = seqlens_q.shape[0], query.shape[0], query.shape[0]
    else:
        requests, tokens = query.shape[:2]
        rows = requests * tokens
    page = pages = 1
    if layout_k == "PA_BSND":
        assert table is not None
        pages, page = key.shape[:2]
        max_kv_len = table.shape[1] * page
    else:
        max_kv_len = key.shape[0] if layout_k == "TND" else key.shape[1]
    arguments = {
        "seqlens_q": query if seqlens_q is None else seqlens_q,
        "seqlens_k": key if seqlens_k is None else seqlens_k,
        "table": key if table is None else table,
        "tokens": tokens,
        "requests": requests,
        "max_kv_len": max_kv_len,
        "table_stride": 0 if table is None else table.stride(0),
        "pages": pages,
    }
    layout = Layout(
        PAGE=page,
        Q_TND=q_tnd,
        KEYS=LAYOUTS[layout_k],
        CAUSAL=sparse_mode == 3,
        HAS_Q=seqlens_q is not None,
        HAS_K=seqlens_k is not None,
        REQUESTS=triton.next_power_of_2(max(requests, 1)) if q_tnd else 1,
    )
    return Plan(rows, max_kv_len, arguments, layout)


def too_many(count: int, what: str) -> str | None:
    """Why 32 bits do not number `count` of them, or None."""
    return None if count <= MOST else f"{count} {what}, supported up to {MOST}"


def too_many_positions(key: Tensor, table: Tensor | None, entries: int = 0) -> str | None:
    """The same of the positions of a request, all rows of its key tensor, and the `entries` of a
    query's selection."""
    max_kv_len = key.shape[-3] * (1 if table is None else table.shape[1])
    return too_many(max(max_kv_len, key.shape[:-2].numel(), entries), "positions")


def strides(layout_k: str, *keys: Tensor) -> tuple[int, ...]:
    """(outer, inner) strides of each key tensor, to go with `physical_slot`."""
    steps = ((0, x.stride(0)) if layout_k == "TND" else x.stride()[:2] for x in keys)
    return tuple(step for pair in steps for step in pair)
