# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""npu_lightning_indexer: whole numbers give exact scores with many ties, so that the top-k must
equal the reference's; random scores are judged by score, since they differ in rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import memory
from ..alike import MANY_REQUESTS
from ..case import Arguments, Case, Finding, Inputs, in_rounds, judge
from ..conditions import a_page_past_the_last, far_apart, many_requests, pages_apart, with_
from ..controls import Control
from ..pages import shuffled

D = 128


def paged(
    lengths: list[int],
    s1: int = 1,
    heads: int = 64,
    k: int = 64,
    page: int = 128,
    whole: bool = True,
    hole: int = 0,
    size: int = 128,
    **options: Any,
) -> Callable[[Inputs], Arguments]:
    D = size

    def make(inputs: Inputs) -> Arguments:
        table, order, total = shuffled(inputs, lengths, page, 2)
        key = inputs.whole(total, page, 1, D, low=-1, high=2)
        if not whole:
            key.copy_(inputs.normal(total, page, 1, D))
        if hole:  # stands for a page that is not there, in the middle of a request
            order.append(int(table[0, 1]))
            table[0, 1] = hole
        inputs.forbid(key, order)
        b = len(lengths)
        if whole:
            query = inputs.whole(b, s1, heads, D, low=-1, high=2)
            weights = inputs.whole(b, s1, heads, low=-2, high=3)
        else:
            query, weights = inputs.normal(b, s1, heads, D), inputs.normal(b, s1, heads)
        return (
            dict(
                query=query,
                key=key,
                weights=weights,
                actual_seq_lengths_key=inputs.ints(lengths),
                block_table=inputs.ints(table),
                layout_key="PA_BSND",
                sparse_count=k,
                return_value=True,
            )
            | options
        )

    return make


def rows(layout: str, heads: int, k: int, **options: Any) -> Callable[[Inputs], Arguments]:
    """BSND with lengths below the tensors', or TND with padding behind the last prefix sum."""

    def make(inputs: Inputs) -> Arguments:
        if layout == "BSND":
            q, key, lengths = (3, 4), (3, 160), ([3, 1, 2], [150, 1, 77])
        else:
            q, key, lengths = (7,), (230,), ([3, 4, 6], [150, 151, 228])
        return (
            dict(
                query=inputs.whole(*q, heads, D, low=-1, high=2),
                key=inputs.whole(*key, 1, D, low=-1, high=2),
                weights=inputs.whole(*q, heads, low=-2, high=3),
                actual_seq_lengths_query=inputs.ints(lengths[0]),
                actual_seq_lengths_key=inputs.ints(lengths[1]),
                layout_query=layout,
                layout_key=layout,
                sparse_count=k,
                return_value=True,
            )
            | options
        )

    return make


def with_lengths(
    make: Callable[[Inputs], Arguments], **of: list[int]
) -> Callable[[Inputs], Arguments]:
    """`of` queries, of keys, or of both."""
    return lambda x: (
        make(x) | {f"actual_seq_lengths_{name}": x.ints(lengths) for name, lengths in of.items()}
    )


def beyond(make: Callable[[Inputs], Arguments]) -> Callable[[Inputs], Arguments]:
    """The prefix sums of 7 queries in 3 requests, below 0 and above 7."""
    return with_lengths(make, query=[-(2**31), 4, 2**31 - 1])


def to_the_last_row(make: Callable[[Inputs], Arguments]) -> Callable[[Inputs], Arguments]:
    """The last request of three ends with the tensor: no padding follows the scales of its keys."""
    drawn = lambda x: make(x) | dict(key=x.whole(232, 1, D, low=-1, high=2))  # noqa: E731
    return with_lengths(drawn, key=[150, 151, 232])


def two_long_requests(make: Callable[[Inputs], Arguments]) -> Callable[[Inputs], Arguments]:
    """The second one begins behind as many tokens as there are groups."""

    def drawn(x: Inputs) -> Arguments:
        given = make(x)
        query, weights = x.whole(24, 16, D, low=-1, high=2), x.whole(24, 16, low=-2, high=3)
        return given | dict(query=query, weights=weights)

    return with_lengths(drawn, query=[20, 24], key=[150, 228])


def no_request(make: Callable[[Inputs], Arguments]) -> Callable[[Inputs], Arguments]:
    return with_lengths(make, query=[], key=[])


def decode(requests: int, page: int = 16, size: int = 32) -> Callable[[Inputs], Arguments]:
    """TND tokens of so many requests, paged keys."""
    tokens, sums = many_requests(requests)
    lengths = [1 + i % 40 for i in range(requests)]

    def make(x: Inputs) -> Arguments:
        drawn = paged(lengths, 1, 16, 16, page, size=size)(x)
        return drawn | dict(
            query=x.whole(tokens, 16, size, low=-1, high=2),
            weights=x.whole(tokens, 16, low=-2, high=3),
            actual_seq_lengths_query=x.ints(sums),
            layout_query="TND",
        )

    return make


def of_tokens(
    make: Callable[[Inputs], Arguments], ratio: int, *, beyond: int = 0
) -> Callable[[Inputs], Arguments]:
    """Every key stands for so many tokens, and behind the last one of a request a window is open;
    `beyond`: the first length is this instead."""

    def made(x: Inputs) -> Arguments:
        arguments = make(x)
        keys = arguments["actual_seq_lengths_key"].long()
        tokens = keys * ratio + torch.arange(len(keys)) % ratio
        if beyond:
            tokens[0] = beyond
        return arguments | dict(actual_seq_lengths_key=x.ints(tokens, torch.int64), cmp_ratio=ratio)

    return made


def ended(make: Callable[[Inputs], Arguments]) -> Callable[[Inputs], Arguments]:
    """With the open entry."""
    return lambda x: make(x) | dict(select_tail=True)


def the_last_key_wins(arguments: Arguments) -> torch.Tensor:
    """Weights that are all positive, and the last key of request 0 is its last query."""
    key, table = arguments["key"], arguments["block_table"]
    at = int(arguments["actual_seq_lengths_key"][0]) - 1
    page, row = divmod(at, key.shape[1])
    key[table[0, page], row, 0] = arguments["query"][0, -1, 0]
    return arguments["weights"].fill_(1.0)


def of_no_weight(arguments: Arguments) -> torch.Tensor:
    return arguments["weights"].zero_()


def of_wider(arguments: Arguments) -> torch.Tensor:
    """A tensor in which the heads of two tokens do not lie back to back."""
    query = arguments["query"]
    wider = memory.empty((*query.shape[:-2], 2 * query.shape[-2], query.shape[-1]), query.dtype)
    return wider[..., : query.shape[-2], :].copy_(query)


def of_wider_2(arguments: Arguments) -> torch.Tensor:
    weights = arguments["weights"]
    wider = memory.empty((*weights.shape[:-1], 96), weights.dtype)
    return wider[..., : weights.shape[-1]].copy_(weights)


def with_a_nan(arguments: Arguments) -> torch.Tensor:
    """The first key of request 0 is NaN in one place."""
    key, table = arguments["key"], arguments["block_table"]
    key[table[0, 0], 0, 0, 5] = float("nan")
    return key


def with_two_nans(arguments: Arguments) -> torch.Tensor:
    """So few others that one of them is taken."""
    key, table = arguments["key"], arguments["block_table"]
    key[table[0, 0], [0, 9], 0, 5] = float("nan")
    return key


def spread(arguments: Arguments) -> torch.Tensor:
    """Weights that leave few ties."""
    weights = arguments["weights"]
    n = torch.arange(weights.numel()).view(weights.shape)
    return weights.copy_(n * 37 % 199 - 99)


def first_of(positions: Callable[[int], list[int]]) -> Callable[[Arguments], torch.Tensor]:
    """These positions of request 0 score more than all others of it, each another number."""

    def made(arguments: Arguments) -> torch.Tensor:
        key, table = arguments["key"], arguments["block_table"]
        n = int(arguments["actual_seq_lengths_key"][0])
        arguments["query"].fill_(1.0)
        arguments["weights"].fill_(1.0)
        key[table[0][table[0] >= 0]] = 0.0
        at = torch.tensor(positions(n))
        page, row = table[0][at // key.shape[1]].long(), at % key.shape[1]
        score = torch.arange(len(at), 0, -1)
        key[page, row, 0, 0], key[page, row, 0, 1] = (
            (score // 16).to(key),
            (score % 16 / 16).to(key),
        )
        return key

    return made


def sampled(n: int) -> list[int]:
    """50 that the sample has, and nothing else is as high."""
    return [block * (n // 512) for block in range(50)]


def the_last(n: int) -> list[int]:
    """Fewer than are wanted, behind more equal ones than there is room for."""
    return list(range(n - 60, n))


def side_by_side(n: int) -> list[int]:
    return list(range(1100, 1500))


def ascending(n: int) -> list[int]:
    """The last one highest, which earlier tokens do not see."""
    return list(range(n - 1, n - 401, -1))


def packed_long(x: Inputs) -> Arguments:
    """Requests of more tokens than a group takes."""
    queries = dict(query=x.whole(8, 16, 32, low=-1, high=2), weights=x.whole(8, 16, low=-2, high=3))
    arguments = paged([5000, 4300], 1, 16, size=32)(x) | queries
    arguments |= dict(actual_seq_lengths_query=x.ints([5, 8]), layout_query="TND")
    return arguments | dict(weights=spread(arguments))


def one_page(arguments: Arguments) -> torch.Tensor:
    """Of each request the first page alone is there."""
    arguments["block_table"][:, 1:] = -1
    return arguments["block_table"]


def with_infinity(make: Callable[[Inputs], Arguments]) -> Callable[[Inputs], Arguments]:
    """Two keys of request 0 score inf with every head."""

    def made(x: Inputs) -> Arguments:
        arguments = make(x)
        key, table = arguments["key"], arguments["block_table"]
        arguments["query"][..., 5] = 1.0
        arguments["weights"].fill_(1.0)
        key[table[0, :2], 7, 0, 5] = float("inf")
        return arguments

    return made


def by_score(case: Case, got: Arguments, exact: Arguments, rounded: Arguments) -> list[Finding]:
    """As many positions as the reference chose, ascending; and the chosen scores, sorted, within
    the bound: a swap at the boundary changes them by no more than rounding does."""
    index, wanted = got["output 0"].long(), exact["output 0"].long()
    count = (index >= 0).sum(-1)
    order = (index.diff(dim=-1) > 0) | (index[..., 1:] < 0)
    found = [
        (0.0 if torch.equal(count, (wanted >= 0).sum(-1)) else float("inf"), "how many"),
        (0.0 if order.all() else float("inf"), "ascending"),
    ]
    ranked = [x | {"output 1": x["output 1"].sort(-1)[0]} for x in (got, exact, rounded)]
    for x in ranked:
        del x["output 0"]
    return found + judge(case, *ranked)


OP = "npu_lightning_indexer"
HEADS_IN_PAGES = (
    *((heads, 64) for heads in (16, 32, 64)),
    *((16, 32), (32, 96), (64, 32)),
    *((16, 16), (32, 48), (64, 80)),
)
# rows so long that candidates are collected, of few heads
LONG = with_(paged([5000, 4300, 3], 4, 16, size=32), weights=spread)
CASES = (
    Case(OP, "paged, 64 heads", paged([300, 1, 129], 2)),
    Case(OP, "paged, s1 4, k above the length", paged([70, 3, 0], 4, k=128)),
    Case(OP, "paged, 32 heads, page 192", paged([500, 190], 1, 32, page=192)),
    Case(OP, "paged, 16 heads", paged([300, 257], 1, 16)),
    *(
        Case(OP, f"paged, {heads} heads, page {page}", paged([200, 33], 1, heads, 48, page))
        for heads, page in HEADS_IN_PAGES
    ),
    Case(OP, "paged, 128 heads", paged([140], 1, 128)),
    Case(OP, "paged, 80 heads", paged([140], 1, 80)),
    Case(OP, "paged, 24 heads", paged([140], 2, 24)),
    Case(OP, "paged, fp16", paged([300], 2), torch.float16),
    Case(OP, "paged, fp16, one token", paged([300], 1), torch.float16),
    Case(OP, "paged, fp16, 32 heads, one token", paged([300], 1, 32), torch.float16),
    Case(OP, "paged, a page missing", paged([400, 100], 1, 64, hole=-1)),
    Case(OP, "paged, a page far behind the last", paged([400, 100], 1, 64, hole=2**31 - 1)),
    Case(OP, "paged, all keys", paged([300, 5], 3, 16, sparse_mode=0)),
    Case(
        OP,
        "paged, all keys, a length beyond 32 bits",
        lambda x: (
            paged([300, 5], 3, 16, sparse_mode=0)(x)
            | dict(actual_seq_lengths_key=x.ints([2**40, 5], torch.int64))
        ),
    ),
    Case(OP, "paged, k 2048 of 2049, 2048 and 5000", paged([2049, 2048, 5000], 2, 16, 2048)),
    Case(OP, "paged, k 2048 of 131072", paged([131072], 1, 16, 2048), cores=(24,)),
    Case(OP, "paged, random scores", paged([900, 77], 2, whole=False), judge=by_score),
    Case(OP, "paged, head size 64", paged([300, 5], 2, 32, size=64)),
    Case(OP, "paged, head size 32, 16 heads, page 16", paged([45, 5], 2, 16, 16, 16, size=32)),
    Case(OP, "4 heads of 32", paged([45, 5], 2, 4, 16, 16, size=32)),
    Case(OP, "BSND", rows("BSND", 64, 32)),
    Case(OP, "TND", rows("TND", 64, 32)),
    Case(OP, "TND, sums of queries beyond the tokens", beyond(rows("TND", 64, 32))),
    Case(OP, "TND, keys to the last row", to_the_last_row(rows("TND", 16, 32))),
    Case(OP, "TND, two long requests", two_long_requests(rows("TND", 16, 32))),
    Case(OP, "TND, no request", no_request(rows("TND", 64, 32))),
    Case(
        OP,
        "TND queries, paged, no request",
        lambda x: (
            no_request(rows("TND", 16, 32))(x)
            | dict(
                key=x.whole(3, 64, 1, D, low=-1, high=2),
                block_table=x.ints(torch.zeros(0, 2)),
                layout_key="PA_BSND",
            )
        ),
    ),
    Case(
        OP,
        "BSND, no lengths",
        rows(
            "BSND",
            16,
            200,
            actual_seq_lengths_query=None,
            actual_seq_lengths_key=None,
            return_value=False,
        ),
    ),
    Case(
        OP,
        "BSND, no lengths, whole tiles of keys",
        lambda x: (
            rows("BSND", 16, 32, actual_seq_lengths_query=None, sparse_mode=0)(x)
            | dict(key=x.whole(3, 256, 1, D, low=-1, high=2), actual_seq_lengths_key=None)
        ),
    ),
    Case(
        OP,
        "TND queries, paged",
        lambda x: (
            paged([300, 1, 129], 1)(x)
            | dict(
                query=x.whole(7, 64, D, low=-1, high=2),
                weights=x.whole(7, 64, low=-2, high=3),
                actual_seq_lengths_query=x.ints([2, 3, 6]),
                layout_query="TND",
            )
        ),
    ),
    Case(OP, "several rounds", in_rounds(2 * 384 * 4, paged([300, 1, 129], 2, 16))),
    Case(OP, "rounds within a request", in_rounds(3 * 384 * 4, paged([300, 129], 5, 16))),
    Case(
        OP, "half of the heads", with_(paged([300, 5], 2, 64), query=of_wider, weights=of_wider_2)
    ),
    Case(OP, "fewer there than wanted", paged([300, 290], 2, 16, 200, hole=-1)),
    Case(OP, "scores of infinity", with_infinity(paged([700, 3], 1, 16, 69))),
    Case(OP, "scores of infinity, 24 heads", with_infinity(paged([700, 3], 1, 24, 69))),
    Case(
        OP, "scores of infinity, 4 heads of 32", with_infinity(paged([45, 5], 2, 4, 8, 16, size=32))
    ),
    Case(OP, "a key of NaN", with_(paged([70, 3], 1, 16, 69), key=with_a_nan)),
    Case(OP, "ties alone, two tiles", with_(paged([1100], 1, 16), weights=of_no_weight)),
    Case(
        OP,
        "two keys of NaN",
        with_(paged([70, 3], 1, 16, 69, return_value=False), key=with_two_nans),
    ),
    Case(
        OP,
        "TND, several rounds",
        in_rounds(2 * 256 * 4, rows("TND", 16, 32)),
    ),
    Case(OP, "pages apart", pages_apart(paged([300, 1, 129], 2, 16), "key")),
    Case(OP, "the page past the last", a_page_past_the_last(paged([400, 100], 1, 16))),
    Case(OP, "TND, 133 requests, paged", decode(133)),
    Case(
        OP,
        "one key in the last tile",
        with_(paged([3073], 1, 16, 64), weights=the_last_key_wins),
        cores=(24,),
    ),
    Case(OP, "candidates", LONG),
    Case(OP, "candidates, 64 heads", with_(paged([5000, 3], 2, size=32), weights=spread)),
    Case(OP, "candidates, two rounds", in_rounds(7 * (5120 + 1024) * 4, LONG)),
    Case(
        OP,
        "candidates, too many",
        with_(paged([5000], 2, 4, size=32), key=first_of(the_last)),
        cores=(24,),
    ),
    Case(
        OP,
        "candidates, too few",
        with_(paged([16500], 1, 4, size=32), key=first_of(sampled)),
        cores=(24,),
    ),
    Case(
        OP,
        "candidates, side by side",
        with_(paged([5000], 1, 4, 300, size=32), key=first_of(side_by_side)),
    ),
    Case(
        OP,
        "candidates, the next token's key is the highest",
        with_(paged([5000], 4, 16, 300, size=32), key=first_of(ascending)),
        cores=(24,),
    ),
    Case(OP, "candidates, TND queries", packed_long, cores=(24,)),
    Case(
        OP,
        "candidates, one page is there",
        with_(paged([5000], 1, 4, 200, size=32), block_table=one_page),
        cores=(24,),
    ),
    Case(OP, "candidates, scores of infinity", with_infinity(paged([5000], 1, 4, size=32))),
    Case(OP, "pages far apart", far_apart(paged([300, 1, 129], 2, 16), "key")),
    Case(OP, "4 tokens a key, 64 heads", of_tokens(paged([300, 1, 129], 2), 4)),
    Case(OP, "4 tokens a key, k 512 of 4100", of_tokens(paged([4100], 1, 64, 512), 4), cores=(24,)),
    Case(OP, "4 tokens a key, 9 of a request", of_tokens(paged([70, 0, 40], 9, 16, page=64), 4)),
    Case(OP, "128 tokens a key, page 2", of_tokens(paged([40, 7, 0], 3, 16, 16, page=2), 128)),
    Case(OP, "4 tokens a key, page 1", of_tokens(paged([20, 3], 2, 32, 16, page=1, size=32), 4)),
    Case(OP, "3 tokens a key, page 8", of_tokens(paged([21, 16], 1, 64, 16, page=8), 3)),
    Case(OP, "3 tokens a key, BSND", of_tokens(rows("BSND", 64, 32), 3)),
    Case(OP, "2 tokens a key, all keys", of_tokens(paged([300, 5], 3, 16, sparse_mode=0), 2)),
    Case(OP, "4 tokens a key, TND, 21 requests", of_tokens(decode(21), 4)),
    Case(
        OP,
        "4 tokens a key, more tokens than keys",
        of_tokens(rows("BSND", 16, 200), 4, beyond=2**40),
    ),
    Case(
        OP,
        "4 tokens a key, several rounds",
        in_rounds(2 * 384 * 4, of_tokens(paged([300, 1, 129], 2, 16), 4)),
    ),
    Case(
        OP,
        "open entries, values",
        ended(of_tokens(paged([20, 3, 0, 41], 4, 16, 16, 2, size=32, return_value=True), 3)),
    ),
    Case(OP, "open entries, TND", ended(of_tokens(decode(5), 4))),
    Case(OP, "open entries, k 512 of 1100", ended(of_tokens(paged([1100], 4, 32, 512), 4))),
)
CONTROLS = (
    Control(
        "an entry that is closed is open",
        OP[4:],
        "tl.where(seen > last * RATIO, 1, 0)",
        "tl.where(seen >= last * RATIO, 1, 0)",
        "open entries, values",
    ),
    Control(
        "the open entry in place of the last",
        OP[4:],
        "tl.store(out + to + written + one",
        "tl.store(out + to + tl.maximum(written - 1, 0) + one",
        "open entries, k 512 of 1100",
    ),
    Control(
        "rows as wide as without the open entry",
        OP[4:],
        "to = at + row\n",
        "to = at + 0 * row\n",
        "open entries, TND",
    ),
    Control(
        "relu forgotten",
        OP[4:],
        "tl.maximum(z, 0.0, propagate_nan=tl.PropagateNan.ALL)",
        "z",
        "paged, 64 heads",
    ),
    Control(
        "heads that are not there",
        OP[4:],
        "tl.where((head + h < C.HEADS)[:, None], z, 0.0)",
        "z",
        "scores of infinity, 4 heads of 32",
    ),
    Control(
        "ties to the higher position",
        OP[4:],
        "p == ties - 1",
        "p == here - ties",
        "paged, 64 heads",
    ),
    Control(
        "causal limit off by one",
        "ragged",
        "keys - (tokens - 1 - j), 0)",
        "keys - (tokens - j), 0)",
        "paged, 64 heads",
    ),
    Control(
        "a sum of queries beyond the tokens",
        "ragged",
        "within(query_lengths + request, tokens)",
        "tl.load(query_lengths + request)",
        "TND, sums of queries beyond the tokens",
    ),
    Control(
        "a sum of queries below 0",
        "ragged",
        "within(query_lengths + tl.maximum(request - 1, 0), tokens)",
        "tl.load(query_lengths + tl.maximum(request - 1, 0))",
        "TND, sums of queries beyond the tokens",
    ),
    Control(
        "a token where there is no request",
        "ragged",
        "query_lengths.new_zeros(1)",
        "query_lengths.new_ones(1)",
        "TND, no request",
    ),
    Control(
        "a length that wraps",
        "ragged",
        "tensor.clamp(-1, 2**31 - 1).to(torch.int32)",
        "tensor.to(torch.int32)",
        "paged, all keys, a length beyond 32 bits",
    ),
    Control(
        "a missing page is read",
        OP[4:],
        "there = (number >= 0)",
        "there = (number >= -1)",
        "paged, a page missing",
    ),
    Control(
        "another round's lengths",
        OP[4:],
        "request, _, n = visible(\n        first + row,",
        "request, _, n = visible(\n        row,",
        "several rounds",
    ),
    Control(
        "another round's scores",
        OP[4:],
        "j = tl.maximum(first - token, 0)",
        "j = tl.maximum(0 - token, 0)",
        "TND, several rounds",
    ),
    Control(
        "the keys of a group's first token",
        OP[4:],
        "seen(j + left - 1, count",
        "seen(j, count",
        "paged, 64 heads",
    ),
    Control(
        "the queries behind the last",
        OP[4:],
        "at = tl.minimum(token + j, last_tile(requests, tokens, layout.Q_TND, TOKENS))",
        "at = (token + j)",
        "TND",
    ),
    Control(
        "the rows of the last group as those of the others",
        OP[4:],
        "begun = tl.minimum(begun + of_group * TOKENS, last_tile(requests, tokens, Q_TND, TOKENS))",
        "begun += of_group * TOKENS",
        "TND",
    ),
    Control(
        "no room for the groups of other requests",
        OP[4:],
        "(before + (TOKENS - 1) * request) // TOKENS",
        "before // TOKENS",
        "TND",
    ),
    Control(
        "rounds begin with a request",
        OP[4:],
        "begun = tl.maximum(begun, first)",
        "begun = begun + 0 * first",
        "rounds within a request",
    ),
    Control(
        "a piece of the keys forgotten",
        OP[4:],
        "(tiles * (piece + 1) // pieces)",
        "(tiles * piece // pieces + 1)",
        "paged, k 2048 of 131072",
    ),
    Control(
        "heads of tokens that lie apart",
        OP[4:],
        "dense = all(",
        "dense = True or all(",
        "half of the heads",
    ),
    Control(
        "NaN is nothing",
        OP[4:],
        "propagate_nan=tl.PropagateNan.ALL) * w",
        "propagate_nan=tl.PropagateNan.NONE) * w",
        "a key of NaN",
    ),
    Control(
        "pages side by side",
        OP[4:],
        "* cache.page_rows + position - column",
        "* cache.page + position - column",
        "pages apart",
    ),
    Control(
        "the page past the last is read",
        OP[4:],
        "(number < cache.pages)",
        "(number <= cache.pages)",
        "the page past the last",
    ),
    MANY_REQUESTS,
    Control(
        "the candidates of the pieces before",
        OP[4:],
        "before = begin * TILE",
        "before = begin * TILE - TILE",
        "candidates",
    ),
    Control(
        "too few candidates",
        OP[4:],
        "beyond = (written < chosen) | (written > room)",
        "beyond = written > room",
        "candidates, too few",
    ),
    Control(
        "too many candidates",
        OP[4:],
        "beyond = (written < chosen) | (written > room)",
        "beyond = written < chosen",
        "candidates, too many",
    ),
    Control(
        "the candidates of another round",
        OP[4:],
        "for s in range(written, room, TILE)",
        "for s in range(room, room, TILE)",
        "candidates, two rounds",
    ),
    Control(
        "a tile of many candidates cut",
        OP[4:],
        "if taken <= FEW",
        "if taken <= TILE",
        "candidates, side by side",
    ),
    Control(
        "candidates where there is none",
        OP[4:],
        "elif piece == 0:\n            tl.store(missed + row, 1)",
        "elif piece == 0:\n            tl.store(missed + row, 0)",
        "candidates",
    ),
    Control(
        "guesses alone",
        OP[4:],
        ".to(tl.int32) * 16)",
        ".to(tl.int32) * 0)",
        "paged, 64 heads",
    ),
    Control(
        "what is absent is taken",
        OP[4:],
        "ties = tl.where(low > _ABSENT, ties, 0)",
        "ties = tl.where(low >= _ABSENT, ties, 0)",
        "fewer there than wanted",
    ),
    Control(
        "all ties are taken",
        OP[4:],
        "tl.where(most == wanted, chosen, chosen - least.to(tl.int32))",
        "chosen",
        "paged, 64 heads",
    ),
    Control(
        "the last tile forgotten where it has one key",
        OP[4:],
        "tiles = (n + SORT_TILE - 1) // SORT_TILE",
        "tiles = (n + SORT_TILE - 2) // SORT_TILE",
        "one key in the last tile",
    ),
    Control(
        "what the pieces before take, without the ties",
        OP[4:],
        "ties -= written",
        "ties -= 0",
        "ties alone, two tiles",
    ),
    Control(
        "a piece is packed where the row begins",
        OP[4:],
        "written += tl.sum(higher, 0).to(tl.int32)",
        "written += 0",
        "paged, k 2048 of 2049, 2048 and 5000",
    ),
    Control(
        "the window that is open scored alone",
        OP[4:],
        "n = n // C.RATIO\n        tiles",
        "n = n // (C.RATIO + 1)\n        tiles",
        "4 tokens a key, 64 heads",
    ),
    Control(
        "the window that is open is taken",
        OP[4:],
        "n = n // RATIO\n    at = score_row",
        "n = (n + RATIO - 1) // RATIO\n    at = score_row",
        "4 tokens a key, 64 heads",
    ),
    Control(
        "what lies behind a small page",
        OP[4:],
        "inside = tl.minimum(inside, C.KEY_STEP)",
        "inside = tl.minimum(inside, KEY_TILE)",
        "128 tokens a key, page 2",
    ),
    Control(
        "tokens end with the keys",
        OP[4:],
        "return (reach + 1) * cmp_ratio - 1",
        "return reach * cmp_ratio - cmp_ratio",
        "4 tokens a key, more tokens than keys",
    ),
    Control(
        "counted in tiles that do not fit",
        "tune",
        '"COUNT_TILE": 1024',
        '"COUNT_TILE": 32768',
        "paged, 64 heads",
        stage="compile",
    ),
)
