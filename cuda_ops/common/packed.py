# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Which request a packed token is of, by a length each, and how many positions it sees."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from . import rows


class Requests(NamedTuple):
    lengths: Any
    key_lengths: Any
    table: Any
    tokens: Any
    requests: Any
    reach: Any
    table_stride: Any
    pages: Any


# of Requests: what no kernel is compiled anew for
NUMBERS = ["tokens", "requests", "reach", "table_stride", "pages"]


@triton.jit
def ends_of(of, REQUESTS: tl.constexpr):
    """[REQUESTS]: where the tokens of each request end; behind the last one T + 1."""
    r = tl.arange(0, REQUESTS)
    length = rows.within(tl.load(of.lengths + r, mask=r < of.requests, other=0), of.tokens)
    # of lengths that add up beyond 32 bits
    end = tl.minimum(tl.cumsum(length.to(tl.int64), 0), of.tokens).to(tl.int32)
    return tl.where(r < of.requests, end, of.tokens + 1)


@triton.jit
def request_of(row, ends, of):
    """(request, its first token, where its tokens end) of a token; past the last one the number of
    requests."""
    passed = ends <= row
    request = tl.sum(passed.to(tl.int32), 0)
    first = tl.max(tl.where(passed, ends, 0), 0)
    end = tl.minimum(tl.min(tl.where(passed, of.tokens, ends), 0), of.tokens)
    return request, first, end


@triton.jit
def keys_of(request, of):
    """How many positions a request has."""
    length = tl.load(of.key_lengths + request, mask=request < of.requests, other=0)
    return rows.within(length, of.reach)


@triton.jit
def locate(row, of, REQUESTS: tl.constexpr):
    """(request, how many positions it sees) of a token."""
    request, first, end = request_of(row, ends_of(of, REQUESTS), of)
    limit = rows.sees((row - first).to(tl.int32), end - first, keys_of(request, of), True)
    return request, tl.where(request < of.requests, limit, 0)


def arguments(
    query: Tensor, key: Tensor, lengths: Tensor, key_lengths: Tensor, block_table: Tensor
) -> dict[str, Any]:
    """What `Requests` is made of, by name."""
    return {
        "lengths": lengths,
        "key_lengths": key_lengths,
        "table": block_table,
        "tokens": query.shape[0],
        "requests": lengths.shape[0],
        "reach": block_table.shape[1] * key.shape[1],
        "table_stride": block_table.stride(0),
        "pages": key.shape[0],
    }


def room(lengths: Tensor) -> int:
    """The least power of two that holds all requests."""
    return triton.next_power_of_2(max(lengths.shape[0], 1))
