# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""common/rows.py and common/selection.py for Gluon, where a vector needs a layout."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..common import rows
from ..common.selection import placed, slot_of


@gluon.jit
def request_of(
    row, act_q, tokens, requests, Q_TND: gl.constexpr, REQUESTS: gl.constexpr, LAYOUT: gl.constexpr
):
    """`rows.request_of`."""
    if Q_TND:
        r = gl.arange(0, REQUESTS, layout=LAYOUT)
        ends = rows.within(gl.load(act_q + r, mask=r < requests, other=0), tokens)
        before = (r < requests) & (ends <= row)
        request = gl.sum(before.to(gl.int32), 0)
        first = gl.max(gl.where(before, ends, 0), 0)
    else:
        request = (row // tokens).to(gl.int32)
        first = request * tokens
    return request, first


@gluon.jit
def locate(
    row, act_q, act_k, tokens, requests, reach, Q_TND: gl.constexpr, KEYS: gl.constexpr,
    CAUSAL: gl.constexpr, HAS_Q: gl.constexpr, HAS_K: gl.constexpr, REQUESTS: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """`rows.locate`."""
    request, first = request_of(row, act_q, tokens, requests, Q_TND, REQUESTS, LAYOUT)
    count = rows.rows_of(request, first, act_q, tokens, requests, Q_TND, HAS_Q)
    start, keys = rows.keys_of(request, act_k, reach, requests, KEYS, HAS_K)
    return request, start, rows.sees((row - first).to(gl.int32), count, keys, CAUSAL)


@gluon.jit
def slots(
    index, entry, seen, request, start, reach, table, table_stride, pages, SPAN: gl.constexpr,
    PAGE: gl.constexpr, KEYS: gl.constexpr,
):  # fmt: skip
    """Entries as rows of a key tensor whose rows are evenly spaced, negative where absent."""
    outer, inner, ok = placed(
        index, entry, seen, request, start, table, table_stride, pages, SPAN, PAGE, KEYS
    )
    return slot_of(outer, inner, ok, reach, PAGE, KEYS)
