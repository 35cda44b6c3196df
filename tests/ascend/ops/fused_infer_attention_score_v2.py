# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""npu_fused_infer_attention_score_v2: shards of 8 to 128 heads, every layout and mask, pages of any
size; nothing may touch a page that no token sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import memory
from ..case import Arguments, Case, Inputs, in_rounds
from ..conditions import far_apart, many_requests, pages_apart, with_
from ..controls import Control
from .sparse_flash_attention import opposed

OP = "npu_fused_infer_attention_score_v2"
Make = Callable[[Inputs], Arguments]


def paged(
    rows: list[int],
    lengths: list[int],
    heads: int,
    page: int = 128,
    sizes: tuple[int, int] = (512, 64),
    layout: str = "BSND",
    mode: int = 3,
    window: int | None = None,
    spare: int = 0,
    sinks: int = 0,
    **options: Any,
) -> Make:
    """So many tokens of each request over keys in shuffled pages; NaN behind the last key and
    ahead of the first in sight.  `spare` tokens are of no request."""
    latent, rotary = sizes
    packed = layout.startswith("TND")

    def make(x: Inputs) -> Arguments:
        begins = [
            0 if window is None else max(n - s - window, 0)
            for s, n in zip(rows, lengths, strict=True)
        ]
        columns = [range(b // page, -(-n // page)) for b, n in zip(begins, lengths, strict=True)]
        pages = sum(map(len, columns)) + 2
        key, key_rope = x.normal(pages, page, 1, latent), x.normal(pages, page, 1, rotary)
        order = x.permutation(pages).tolist()
        table = torch.full((len(lengths), max(-(-n // page) for n in lengths) + 1), -1)
        for i, (begin, end) in enumerate(zip(begins, lengths, strict=True)):
            for column in columns[i]:
                table[i, column] = order.pop()
                at = column * page + torch.arange(page)
                for cache in (key, key_rope):
                    cache[table[i, column], (at < begin) | (at >= end)] = float("nan")
        for cache in (key, key_rope) if rotary else (key,):
            x.forbid(cache, order)
        most = max(rows) + spare
        tokens = (sum(rows) + spare,) if packed else (len(rows), most)
        shape = [*tokens, heads] if layout != "BSH" else tokens
        wide = 1 if layout != "BSH" else heads
        sums = torch.tensor(rows).cumsum(0) if packed else torch.tensor(rows)
        return (
            dict(
                query=x.normal(*shape, wide * latent),
                key=key,
                value=key,
                query_rope=x.normal(*shape, wide * rotary) if rotary else None,
                key_rope=key_rope if rotary else None,
                actual_seq_qlen=x.ints(sums),
                actual_seq_kvlen=x.ints(lengths),
                block_table=x.ints(table),
                num_query_heads=heads,
                num_key_value_heads=1,
                softmax_scale=0.135,
                input_layout=layout,
                sparse_mode=mode,
                return_softmax_lse=True,
                learnable_sink=x.normal(abs(sinks), dtype=torch.float32 if sinks > 0 else None)
                if sinks
                else None,
            )
            | (dict(pre_tokens=window, next_tokens=0) if window is not None else {})
            | {name: value(x) if callable(value) else value for name, value in options.items()}
        )

    return make


def _int64(make: Make) -> Make:
    """Lengths and a page that 32 bits would bring back."""

    def wide(x: Inputs) -> Arguments:
        arguments = {
            name: x.ints(value, torch.int64)
            if isinstance(value, torch.Tensor) and value.dtype is torch.int32
            else value
            for name, value in make(x).items()
        }
        arguments["actual_seq_kvlen"][0] += 2**40
        arguments["block_table"][0, 1] += 2**32
        return arguments

    return wide


def _rows_apart(arguments: Arguments) -> torch.Tensor:
    """A table of int64 that is a view of a wider one, which has other pages behind its columns."""
    table = arguments["block_table"]
    wide = memory.empty((table.shape[0], table.shape[1] + 3), torch.int64).zero_()
    return wide[:, : table.shape[1]].copy_(table)


def _pool(make: Make) -> Make:
    """Latents and rotary parts are columns of one pool, as engines keep them."""

    def joined(x: Inputs) -> Arguments:
        arguments = make(x)
        key, rope = arguments["key"], arguments["key_rope"]
        pool = memory.empty((*key.shape[:3], key.shape[3] + rope.shape[3]), key.dtype)
        parts = pool.split([key.shape[3], rope.shape[3]], -1)
        for part, cache in zip(parts, (key, rope), strict=True):
            part.copy_(cache)
        x.forbidden = [(pool, blocks) for cache, blocks in x.forbidden if cache is key]
        return arguments | dict(key=parts[0], value=parts[0], key_rope=parts[1])

    return joined


def _same_key(make: Make) -> Make:
    """`value` is the key that a condition has put in its place."""
    return with_(make, value=lambda arguments: arguments["key"])


def _absent_pages(arguments: Arguments) -> torch.Tensor:
    """One in the middle of the first request's, and of the last one's the page past the last."""
    table = arguments["block_table"]
    table[0, 1] = -1
    table[-1, 0] = arguments["key"].shape[0]
    return table


def decode(requests: int) -> Make:
    """TND tokens of so many requests."""
    _, sums = many_requests(requests)
    rows = [b - a for a, b in zip([0, *sums], sums, strict=False)]
    return paged(rows, [1 + i % 40 for i in range(requests)], 8, 16, SMALL, "TND")


SMALL = (64, 32)
CASES = (
    *(Case(OP, f"{n} heads", paged([1, 1], [300, 1], n)) for n in (8, 16, 32, 64, 128)),
    *(
        Case(OP, f"{n} heads, pages of 64", paged([1, 1], [300, 1], n, 64))
        for n in (8, 16, 32, 64, 128)
    ),
    *(
        Case(
            OP,
            f"{n} heads, 24 requests, pages of {page}",
            paged([1] * 24, [60] * 24, n, page),
        )
        for n in (8, 16, 32, 64, 128)
        for page in (64, 128)
    ),
    *(
        Case(OP, f"{n} heads, {tokens} tokens each", paged([tokens, 3], [300, 70], n))
        for n, tokens in ((8, 2), (8, 16), (16, 9), (32, 4), (64, 2))
    ),
    Case(
        OP,
        "a window of 70, 16 heads, 9 tokens each",
        paged([9, 2], [300, 70], 16, layout="TND", mode=4, window=69),
    ),
    Case(OP, "BSH, 20 heads", paged([2, 1], [300, 17], 20, layout="BSH")),
    Case(OP, "BSND_NBSD, 96 heads", paged([2, 0, 1], [150, 9, 3], 96, layout="BSND_NBSD")),
    Case(
        OP,
        "TND, 12 heads, lengths 0 and fewer than tokens, spare tokens",
        paged([3, 0, 2, 5], [140, 7, 0, 2], 12, layout="TND", spare=2),
    ),
    Case(OP, "TND_NTD, 16 heads", paged([1, 2], [2100, 300], 16, layout="TND_NTD")),
    Case(OP, "all keys", paged([2, 1], [300, 17], 16, 64, SMALL, mode=0)),
    Case(OP, "a window of 1", paged([2, 1], [300, 17], 8, 64, SMALL, mode=4, window=0)),
    Case(
        OP,
        "a window of 200, pages of 48",
        paged([4, 1], [700, 60], 16, 48, SMALL, "TND", mode=4, window=199),
    ),
    Case(
        OP,
        "a window of 100, pages of 512",
        paged([2], [1500], 16, 512, SMALL, "TND", mode=4, window=99),
    ),
    Case(OP, "pages of 16, sinks", paged([2, 1], [77, 3], 16, 16, SMALL, sinks=16)),
    Case(OP, "pages of 48, 4 heads", paged([2, 1], [77, 3], 4, 48, SMALL)),
    Case(OP, "pages of 208, 72 heads", paged([1, 1], [777, 209], 72, 208, SMALL)),
    Case(OP, "20 heads, sinks of 16 bits", paged([2, 1], [300, 17], 20, sizes=SMALL, sinks=-20)),
    Case(OP, "fp16, one tensor of 5 tokens", paged([5], [300], 8), torch.float16),
    Case(OP, "no rotary part, 64 heads", paged([1], [300], 64, sizes=(512, 0))),
    Case(OP, "latent 128 and 16", paged([2], [300], 16, sizes=(128, 16))),
    Case(OP, "144 heads", paged([1], [150], 144, sizes=SMALL)),
    Case(OP, "no key at all", paged([1, 1], [0, 0], 16, sizes=SMALL)),
    Case(OP, "without lengths of queries", with_(paged([2], [70], 8), actual_seq_qlen=None)),
    Case(OP, "without lse", paged([2], [70], 8, sizes=SMALL, return_softmax_lse=False)),
    Case(OP, "5000 keys, one token", paged([1], [5000], 16, sizes=SMALL), cores=(24,)),
    Case(OP, "several rounds", in_rounds(2 * 384 * 16 * 4, paged([1, 3, 1], [300, 9, 131], 16))),
    Case(OP, "int64", _int64(paged([1, 1], [384, 1], 16, sizes=SMALL))),
    Case(
        OP,
        "int64, rows of the table apart",
        with_(paged([1, 1], [300, 200], 16, sizes=SMALL), block_table=_rows_apart),
    ),
    Case(OP, "absent pages", with_(paged([2, 1], [300, 200], 16), block_table=_absent_pages)),
    Case(OP, "one pool", _pool(paged([2, 1], [300, 1], 16))),
    Case(
        OP,
        "pages apart",
        _same_key(pages_apart(paged([2, 1], [300, 1], 16, sizes=SMALL), "key", "key_rope")),
    ),
    Case(
        OP,
        "pages far apart",
        _same_key(far_apart(paged([2, 1], [300, 1], 16, sizes=SMALL), "key", "key_rope")),
    ),
    Case(OP, "TND, 133 requests", decode(133)),
    Case(OP, "scores far apart", paged([1, 1], [300, 70], 16, sizes=SMALL, softmax_scale=9.0)),
    Case(
        OP,
        "scores that underflow",
        with_(paged([1, 1], [300, 70], 16, sizes=SMALL, softmax_scale=2.0), query=opposed),
    ),
    Case(
        OP,
        "sums that fall",
        with_(
            paged([1, 1, 1, 2], [60, 60, 60, 60], 8, 64, SMALL, "TND"),
            actual_seq_qlen=lambda x: x["actual_seq_qlen"].copy_(torch.tensor([3, 1, -5, 5])),
        ),
    ),
    Case(
        OP,
        "BSND_NBSD, 8 heads, two tokens each",
        paged([2, 1], [60, 3], 8, 64, SMALL, layout="BSND_NBSD"),
    ),
    Case(OP, "20 heads, sinks, one token", paged([1], [70], 20, sizes=SMALL, sinks=20)),
    Case(
        OP,
        "tables without a column",
        with_(
            paged([2, 1], [70, 3], 8, sizes=SMALL), block_table=lambda x: x["block_table"][:, :0]
        ),
    ),
)
# a note, a round's two passes, and what adds up the parts of the keys
LAUNCHES = {"16 heads": 4, "several rounds": 8, "TND, 133 requests": 3}
CONTROLS = tuple(
    Control(title, OP[4:], old, new, case)
    for title, old, new, case in (
        (
            "the page past the last is read",
            "(number < pages)",
            "(number <= pages)",
            "absent pages",
        ),
        (
            "an absent page is the first one",
            "there = tl.where(exists, tl.maximum(end - first, 0), 0)",
            "there = tl.maximum(end - first, 0)",
            "absent pages",
        ),
        (
            "a run goes on behind its page",
            "tl.minimum(tl.minimum(limit - column * page, page), passed + SPAN)",
            "tl.minimum(limit - column * page, passed + SPAN)",
            "pages of 48, 4 heads",
        ),
        (
            "keys ahead of a window are read",
            "first = tl.maximum(begin - column * page, passed)",
            "first = passed",
            "a window of 100, pages of 512",
        ),
        (
            "pages in 32 bits",
            "return tl.where(exists, number, 0).to(tl.int64), first",
            "return tl.where(exists, number, 0), first",
            "pages far apart",
        ),
        (
            "a key too many of a group",
            "limit = base + used - 1",
            "limit = base + used",
            "16 heads, 9 tokens each",
        ),
        (
            "a key too few of a token",
            "base = base - left + 1",
            "base = base - left",
            "16 heads",
        ),
        (
            "a token sees the next one's key",
            "ahead <= 0",
            "ahead <= 1",
            "16 heads, 9 tokens each",
        ),
        (
            "a token of a group sees the last key of no window",
            "ahead >= -window",
            "ahead > -window",
            "a window of 70, 16 heads, 9 tokens each",
        ),
        (
            "a window is a key shorter",
            "tl.maximum(base - 1 - window, 0)",
            "tl.maximum(base - window, 0)",
            "a window of 1",
        ),
        (
            "64 requests at most",
            "for start in range(0, requests, PIECE)",
            "for start in range(0, 1, PIECE)",
            "TND, 133 requests",
        ),
        (
            "a request begins where the one before it ends",
            "begins = tl.max(tl.where(before, ends",
            "begins = tl.max(tl.where(number[None, :] == number[:, None] - 1.0, ends",
            "sums that fall",
        ),
        (
            "the 65th request begins at the first token",
            "begins = tl.maximum(begins, latest)",
            "begins = tl.maximum(begins, 0.0)",
            "TND, 133 requests",
        ),
        (
            "groups of the first 64 requests forgotten",
            "count[None, :], 0.0), 1) + passed",
            "count[None, :], 0.0), 1)",
            "TND, 133 requests",
        ),
        (
            "tokens of no request are left as they are",
            "count = tl.minimum(tl.where(inside, left, tokens - token), EACH)",
            "count = tl.minimum(tl.where(inside, left, 0), EACH)",
            "TND, 12 heads, lengths 0 and fewer than tokens, spare tokens",
        ),
        (
            "tokens that a request does not have see its keys",
            "seeing = row < tl.load(of_group + USED) * heads",
            "seeing = row < tl.load(of_group + TOKENS) * heads",
            "8 heads, 16 tokens each",
        ),
        (
            "the last runs of a part forgotten",
            "each = (runs + splits - 1) // splits",
            "each = runs // splits",
            "5000 keys, one token",
        ),
        (
            "the last tiles of a part forgotten",
            "each = (runs * TILES + splits - 1) // splits",
            "each = runs * TILES // splits",
            "5000 keys, one token",
        ),
        (
            "the first part alone",
            "for split in range(0, splits):",
            "for split in range(0, 1):",
            "5000 keys, one token",
        ),
        (
            "only the first parts' statistics",
            "for part in range(0, parts, PARTS)",
            "for part in range(0, PARTS, PARTS)",
            "5000 keys, one token",
        ),
        (
            "scores of another round's group",
            "noted + (first + group).to(tl.int64) * NOTED\n        token",
            "noted + group.to(tl.int64) * NOTED\n        token",
            "several rounds",
        ),
        (
            "values of another round's group",
            "noted + (first + group).to(tl.int64) * NOTED\n        of_request",
            "noted + group.to(tl.int64) * NOTED\n        of_request",
            "several rounds",
        ),
        (
            "a score that overflows",
            "p = tl.exp(z - peak[None])",
            "p = tl.exp(z - tl.minimum(peak, 40.0)[None])",
            "scores far apart",
        ),
        (
            "a maximum of at least 0",
            "peak = tl.maximum(tl.max(z, 0), -1e30)",
            "peak = tl.maximum(tl.max(z, 0), 0.0)",
            "scores that underflow",
        ),
        (
            "a maximum of parts of at least 0",
            "peak = tl.full((ROW_TILE,), -1e30, tl.float32)",
            "peak = tl.full((ROW_TILE,), 0.0, tl.float32)",
            "scores that underflow",
        ),
        (
            "a sink is no score",
            "tl.exp(sink.to(tl.float32) - peak)",
            "tl.exp(sink.to(tl.float32))",
            "20 heads, sinks of 16 bits",
        ),
        (
            "heads come behind the tokens",
            'turned = layout in ("TND_NTD", "BSND_NBSD")',
            'turned = layout in ("TND_NTD",)',
            "BSND_NBSD, 96 heads",
        ),
    )
)
