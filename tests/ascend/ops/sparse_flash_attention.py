# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""npu_sparse_flash_attention: every layout, shards of 8 to 128 heads, absent slots and pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import memory
from ..alike import MANY_REQUESTS
from ..case import Arguments, Case, Inputs, in_rounds
from ..conditions import a_page_past_the_last, far_apart, many_requests, pages_apart, with_
from ..controls import Control
from ..pages import shuffled

D, DR = 512, 64


def paged(
    lengths: list[int],
    s1: int,
    heads: int,
    k: int,
    page: int = 128,
    block: int = 1,
    rope: bool = True,
    sizes: tuple[int, int] = (512, 64),
    **options: Any,
) -> Callable[[Inputs], Arguments]:
    """`sizes` are the latent's and the rotary key's.  Shuffled pages; those that no request owns
    may not be touched; -1 between the indices."""

    D, DR = sizes

    def make(inputs: Inputs) -> Arguments:
        table, order, total = shuffled(inputs, lengths, page, 3)
        key, key_rope = inputs.normal(total, page, 1, D), inputs.normal(total, page, 1, DR)
        inputs.forbid(key, order)
        inputs.forbid(key_rope, order)
        rows = []
        for n in lengths:
            for _ in range(s1):
                chosen = inputs.permutation(max(-(-n // block), 1))[:k]
                row = torch.full((k,), -1)
                row[: len(chosen)] = chosen
                row[inputs.permutation(k)[: k // 8]] = -1
                row[k // 2] = n // block + 7  # out of range: absent
                if block > 1:
                    row[k // 3] = 2**32 // block  # so far that its position wraps to 0
                rows.append(row)
        return dict(
            query=inputs.normal(len(lengths), s1, heads, D),
            key=key,
            value=None,
            sparse_indices=inputs.ints(torch.stack(rows).view(len(lengths), s1, 1, k)),
            scale_value=0.135,
            block_table=inputs.ints(table),
            actual_seq_lengths_kv=inputs.ints(lengths),
            query_rope=inputs.normal(len(lengths), s1, heads, DR) if rope else None,
            key_rope=key_rope if rope else None,
            sparse_block_size=block,
            layout_kv="PA_BSND",
            return_softmax_lse=True,
        ) | {name: value(inputs) if callable(value) else value for name, value in options.items()}

    return make


def rows(layout: str, heads: int, k: int, **options: Any) -> Callable[[Inputs], Arguments]:
    """BSND with lengths below the tensors', or TND with padding behind the last prefix sum."""
    query_lengths, key_lengths = [3, 1, 2], [150, 1, 77]

    def make(inputs: Inputs) -> Arguments:
        if layout == "BSND":
            q, key, lengths = (3, 4), (3, 160), (query_lengths, key_lengths)
        else:
            q, key, lengths = (7,), (230,), ([3, 4, 6], [150, 151, 228])
        index = torch.stack([inputs.permutation(160)[:k] for _ in range(12)]).flatten()
        return dict(
            query=inputs.normal(*q, heads, D),
            key=inputs.normal(*key, 1, D),
            value=None,
            sparse_indices=inputs.ints(index[: int(torch.Size(q).numel()) * k].view(*q, 1, k)),
            scale_value=0.05,
            actual_seq_lengths_query=inputs.ints(lengths[0]),
            actual_seq_lengths_kv=inputs.ints(lengths[1]),
            query_rope=inputs.normal(*q, heads, DR),
            key_rope=inputs.normal(*key, 1, DR),
            layout_query=layout,
            layout_kv=layout,
            **options,
        )

    return make


def _int64(make: Callable[[Inputs], Arguments]) -> Callable[[Inputs], Arguments]:
    def wide(inputs: Inputs) -> Arguments:
        return {
            name: inputs.ints(value, torch.int64)
            if isinstance(value, torch.Tensor) and value.dtype is torch.int32
            else value
            for name, value in make(inputs).items()
        }

    return wide


def _with_lengths(
    make: Callable[[Inputs], Arguments], of_queries: list[int], of_keys: list[int]
) -> Callable[[Inputs], Arguments]:
    return lambda x: (
        make(x)
        | dict(actual_seq_lengths_query=x.ints(of_queries), actual_seq_lengths_kv=x.ints(of_keys))
    )


def _beyond(make: Callable[[Inputs], Arguments]) -> Callable[[Inputs], Arguments]:
    """A length, an index and a page that 32 bits would bring back."""

    def far(inputs: Inputs) -> Arguments:
        arguments = make(inputs)
        arguments["actual_seq_lengths_kv"][0] += 2**40
        arguments["sparse_indices"][..., :2] += 2**32
        arguments["block_table"][0, 1] += 2**32
        return arguments

    return far


def decode(requests: int, count: int = 16) -> Callable[[Inputs], Arguments]:
    """TND tokens of so many requests, paged keys."""
    tokens, sums = many_requests(requests)
    lengths = [1 + i % 40 for i in range(requests)]

    def make(x: Inputs) -> Arguments:
        drawn = paged(lengths, 1, 8, count, 16, sizes=(128, 32))(x)
        index = torch.stack([x.permutation(40)[:count] for _ in range(tokens)])
        return drawn | dict(
            query=x.normal(tokens, 8, 128),
            query_rope=x.normal(tokens, 8, 32),
            sparse_indices=x.ints(index.view(tokens, 1, count)),
            actual_seq_lengths_query=x.ints(sums),
            layout_query="TND",
            return_softmax_lse=False,
        )

    return make


def all_of_them(arguments: Arguments) -> torch.Tensor:
    """As many positions as there are slots, from the last down, none absent."""
    indices = arguments["sparse_indices"]
    return indices.copy_(torch.arange(indices.shape[-1] - 1, -1, -1))


def without_the_last_column(arguments: Arguments) -> torch.Tensor:
    """As many pages as the longest request has."""
    return memory.guarded(arguments["block_table"][:, :-1].contiguous())


def opposed(arguments: Arguments) -> torch.Tensor:
    """Queries below 0 and keys above: every score is far below 0."""
    for name in ("key", "key_rope"):
        arguments[name].abs_()
    arguments["query_rope"].abs_().neg_()
    return arguments["query"].abs_().neg_()


def pools_and_tails(arguments: Arguments) -> torch.Tensor:
    """Blocks that are whole to a token in any order, the one that is open to it, then -1."""
    indices, block = arguments["sparse_indices"], arguments["sparse_block_size"]
    batch, s1, _, count = indices.shape
    for i in range(batch):
        for j in range(s1):
            seen = max(int(arguments["actual_seq_lengths_kv"][i]) - s1 + j + 1, 0)
            whole = torch.arange(seen // block).flip(0)[: count - 1]
            named = torch.cat([whole, torch.arange(seen // block, -(-seen // block))])
            indices[i, j] = torch.nn.functional.pad(named, (0, count - len(named)), value=-1)
    return indices


def pools(
    lengths: list[int], s1: int, heads: int, k: int, latent: int, **options: Any
) -> Callable[[Inputs], Arguments]:
    """Pools of 4 tokens, k and the open one to a list; no rotary part."""
    drawn = paged(lengths, s1, heads, k + 1, block=4, sizes=(latent, 0), **options)
    return with_(drawn, sparse_indices=pools_and_tails)


OP = "npu_sparse_flash_attention"
CASES = (
    Case(
        OP,
        "GLM-5.3-Flash, 64 heads, 512 pools, no rotary part",
        pools([2102, 65], 1, 64, 512, 512, scale_value=256**-0.5, rope=False),
        cores=(24,),
    ),
    *(
        Case(OP, f"{n} heads, pools, no rotary part", pools([130, 3, 0], 2, n, 24, 128))
        for n in (12, 20, 96)
    ),
    *(Case(OP, f"paged, {n} heads", paged([300, 1, 131], 2, n, 96)) for n in (8, 16, 32, 64, 128)),
    Case(OP, "paged, 8 heads, 9 tokens", paged([300, 1, 131], 3, 8, 96)),
    Case(OP, "one token, 40 heads, k 1000", paged([3000], 1, 40, 1000)),
    Case(
        OP,
        "one token, 32 heads, k 2200, scores far apart",
        paged([2500], 1, 32, 2200, sizes=(128, 32), scale_value=1.0),
    ),
    *(
        Case(OP, f"one token, {n} heads, k 512", paged([600], 1, n, 512), cores=(24,))
        for n in (16, 32, 64, 128)
    ),
    Case(
        OP,
        "few tokens, 12 heads, sinks, no rotary part",
        paged(
            [700, 130, 0],
            2,
            12,
            500,
            sizes=(128, 32),
            rope=False,
            sinks=lambda x: x.normal(12, dtype=torch.float32).mul_(8),
        ),
    ),
    Case(
        OP,
        "one token, scores that underflow",
        with_(paged([600], 1, 16, 500, sizes=(128, 32), scale_value=2.0), query=opposed),
    ),
    Case(
        OP,
        "one token, scores far apart",
        paged([600], 1, 16, 500, sizes=(128, 32), scale_value=9.0),
    ),
    Case(OP, "paged, k 2048, s1 4, 65 keys and 4097", paged([4097, 65], 4, 16, 2048), cores=(24,)),
    Case(OP, "paged, 144 heads", paged([70], 1, 144, 32, sizes=(128, 32))),
    Case(
        OP,
        "paged, a full table",
        with_(paged([70, 256], 1, 8, 48, sizes=(128, 32)), block_table=without_the_last_column),
    ),
    Case(OP, "paged, fp16", paged([300, 70], 1, 64, 128), torch.float16),
    Case(OP, "paged, 24 heads, page 48, no rope", paged([100, 0, 49], 2, 24, 64, 48, rope=False)),
    Case(OP, "one key, in the first row", paged([1], 1, 8, 16, 16, sizes=(32, 16)), seed=1),
    Case(OP, "paged, lengths 0", paged([0, 0], 1, 16, 64)),
    Case(OP, "paged, blocks of 4", paged([300, 129], 1, 16, 20, block=4)),
    Case(
        OP,
        "paged, blocks of 4, one key of the last",
        with_(paged([129, 34], 1, 16, 33, block=4, sizes=(128, 32)), sparse_indices=all_of_them),
    ),
    Case(
        OP,
        "paged, sinks, all keys",
        paged(
            [260, 3], 1, 64, 64, sparse_mode=0, sinks=lambda x: x.normal(64, dtype=torch.float32)
        ),
    ),
    Case(OP, "paged, int64", _int64(paged([300, 1], 1, 16, 64))),
    Case(
        OP,
        "paged, all keys, beyond 32 bits",
        _beyond(_int64(paged([300, 5], 3, 16, 64, sparse_mode=0))),
    ),
    Case(OP, "paged, 70 000 keys in pages of 16", paged([17000, 70000], 1, 8, 64, 16)),
    Case(OP, "paged, latent 128 and 32", paged([300, 1], 2, 16, 64, sizes=(128, 32))),
    Case(OP, "paged, latent 32 and 16, 2 heads", paged([40, 3], 2, 2, 16, 16, sizes=(32, 16))),
    Case(
        OP,
        "paged, latent 32 and 16, 4 heads, sinks",
        paged(
            [40, 3], 2, 4, 16, 16, sizes=(32, 16), sinks=lambda x: x.normal(4, dtype=torch.float32)
        ),
    ),
    Case(OP, "paged, latent 576 and 64", paged([140], 1, 64, 64, sizes=(576, 64))),
    Case(OP, "BSND", rows("BSND", 16, 64, return_softmax_lse=True)),
    Case(OP, "no index", rows("BSND", 16, 0, return_softmax_lse=True)),
    Case(OP, "TND", rows("TND", 32, 40)),
    Case(
        OP,
        "TND, sums of queries beyond the tokens",
        _with_lengths(rows("TND", 16, 40), [-(2**31), 4, 2**31 - 1], [150, 151, 228]),
    ),
    Case(
        OP,
        "TND, no request",
        _with_lengths(rows("TND", 16, 40, return_softmax_lse=True), [], []),
    ),
    Case(OP, "several rounds", in_rounds(2 * 128 * 576 * 2, paged([300, 1, 131], 2, 16, 96))),
    Case(OP, "pages apart", pages_apart(paged([300, 1, 131], 2, 16, 96), "key", "key_rope")),
    Case(OP, "the page past the last", a_page_past_the_last(paged([300, 70], 1, 16, 96))),
    Case(OP, "TND, 133 requests, paged", decode(133)),
    Case(
        OP,
        "one slot in the last tile",
        with_(paged([129, 300], 1, 16, 129, sizes=(128, 32)), sparse_indices=all_of_them),
    ),
    Case(OP, "scores far apart", paged([300, 70], 1, 16, 96, sizes=(128, 32), scale_value=9.0)),
    Case(
        OP,
        "scores that underflow",
        with_(paged([300, 70], 1, 16, 96, sizes=(128, 32), scale_value=2.0), query=opposed),
    ),
    Case(
        OP,
        "pages far apart",
        far_apart(paged([300, 1], 2, 16, 64, sizes=(128, 32)), "key", "key_rope", alike=True),
    ),
    Case(OP, "one token, 144 heads, k 512", paged([600], 1, 144, 512, sizes=(128, 32))),
)
CONTROLS = (
    Control(
        "the open pool is another",
        "sparse_flash_attention",
        "limit // block + 1)",
        "limit // block - 1)",
        "GLM-5.3-Flash, 64 heads, 512 pools, no rotary part",
    ),
    Control(
        "rows in 32 bits",
        "sparse_flash_attention",
        """tl.where(other >= 0, other, top)).to(tl.int64)
            other = tl.where(other >= 0, other.to(tl.int64), one)""",
        """tl.where(other >= 0, other, top))
            other = tl.where(other >= 0, other, one)""",
        "pages far apart",
    ),
    Control(
        "mask off by one",
        OP[4:],
        "(position < limit)\n    return",
        "(position <= limit)\n    return",
        "paged, k 2048, s1 4, 65 keys and 4097",
    ),
    Control(
        "absent slots not masked",
        OP[4:],
        'tl.where(slot >= 0, 0.0, float("-inf"))[:, None]',
        'tl.where(slot >= -1, 0.0, float("-inf"))[:, None]',
        "paged, 64 heads",
    ),
    Control(
        "the position of an absent block wraps",
        OP[4:],
        "tl.minimum(tl.maximum(entry, -1), limit // block + 1)",
        "entry",
        "paged, blocks of 4",
    ),
    Control(
        "another round's indices",
        OP[4:],
        "selected = indices + (first + row).to(tl.int64)",
        "selected = indices + row.to(tl.int64)",
        "several rounds",
    ),
    Control(
        "another round's request",
        OP[4:],
        "visible(first + row,",
        "visible(row,",
        "several rounds",
    ),
    Control(
        "another round's queries",
        OP[4:],
        "token = (first + row).to(tl.int64)",
        "token = row.to(tl.int64)",
        "several rounds",
    ),
    Control(
        "another round's output",
        OP[4:],
        "to = (first + row).to(tl.int64) * heads + h",
        "to = row.to(tl.int64) * heads + h",
        "several rounds",
    ),
    Control(
        "pages side by side",
        OP[4:],
        "slot = number * page_rows",
        "slot = number * page",
        "pages apart",
    ),
    Control(
        "the page past the last is read",
        OP[4:],
        "(number < pages)",
        "(number <= pages)",
        "the page past the last",
    ),
    MANY_REQUESTS,
    Control(
        "the last tile forgotten where it has one slot",
        OP[4:],
        "end = tl.maximum(end, reached(exists, j))",
        "end = tl.maximum(end, reached(exists, j - 1))",
        "one slot in the last tile",
    ),
    Control(
        "the latent of another row",
        OP[4:],
        "x = pair(latent, latent_stride, near, far, LATENT)",
        "x = pair(latent, latent_stride, far, near, LATENT)",
        "paged, 16 heads",
    ),
    Control(
        "an absent first row is read",
        OP[4:],
        "one = tl.where(one >= 0, one, tl.where(other >= 0, other, top)).to(tl.int64)",
        "one = one.to(tl.int64)",
        "paged, 16 heads",
    ),
    Control(
        "an absent second row is read",
        OP[4:],
        "other = tl.where(other >= 0, other.to(tl.int64), one)",
        "other = other.to(tl.int64)",
        "paged, 16 heads",
    ),
    Control(
        "the last keys of a split forgotten",
        OP[4:],
        "each = (count + splits - 1) // splits",
        "each = count // splits",
        "paged, k 2048, s1 4, 65 keys and 4097",
    ),
    Control(
        "only the first parts' statistics",
        OP[4:],
        "for part in range(0, parts, PARTS)",
        "for part in range(0, PARTS, PARTS)",
        "paged, k 2048, s1 4, 65 keys and 4097",
    ),
    Control(
        "a score that overflows",
        OP[4:],
        "p = tl.exp(z - peak[None]).to(v.dtype)",
        "p = tl.exp(z - tl.minimum(peak, 40.0)[None]).to(v.dtype)",
        "scores far apart",
    ),
    Control(
        "a score of a part that overflows",
        OP[4:],
        "p = tl.exp(z - peak[None])\n",
        "p = tl.exp(z - tl.minimum(peak, 40.0)[None])\n",
        "one token, scores far apart",
    ),
    Control(
        "columns of a part on top of each other",
        OP[4:],
        "tl.store(partial + to[:, None] * LATENT + first + c[None], tl.dot(p, v))",
        "tl.store(partial + to[:, None] * LATENT + c[None], tl.dot(p, v))",
        "one token, 32 heads, k 512",
    ),
    Control(
        "parts behind the last",
        OP[4:],
        "count = tl.load(last + row) // KEY_TILE\n        peak = -1e30",
        "count = parts\n        peak = -1e30",
        "few tokens, 12 heads, sinks, no rotary part",
    ),
    Control(
        "parts that are not rescaled",
        OP[4:],
        "again = tl.exp(peak - new)",
        "again = 1.0",
        "one token, 32 heads, k 2200, scores far apart",
    ),
    Control(
        "parts of equal weight",
        OP[4:],
        "share = tl.exp(m - new)",
        "share = tl.exp(m - m)",
        "one token, scores far apart",
    ),
    Control(
        "a part's sink of another head",
        OP[4:],
        "tl.exp(tl.load(sinks + h) - peak)",
        "tl.exp(tl.load(sinks) - peak)",
        "few tokens, 12 heads, sinks, no rotary part",
    ),
    Control(
        "a merged maximum of at least 0",
        OP[4:],
        "        peak = -1e30\n        total = 0.0",
        "        peak = 0.0\n        total = 0.0",
        "one token, scores that underflow",
    ),
    Control(
        "a maximum of at least 0",
        OP[4:],
        "return tl.maximum(tl.max(z, 0), -1e30)",
        "return tl.maximum(tl.max(z, 0), 0.0)",
        "scores that underflow",
    ),
    Control(
        "a maximum of parts of at least 0",
        OP[4:],
        "peak = tl.full((HEAD_TILE,), -1e30, tl.float32)",
        "peak = tl.full((HEAD_TILE,), 0.0, tl.float32)",
        "scores that underflow",
    ),
    Control(
        "the sink of the head after the last",
        OP[4:],
        "tl.load(sinks + h, mask=h < heads, other=0.0)",
        "tl.load(sinks + h, mask=h <= heads, other=0.0)",
        "paged, latent 32 and 16, 4 heads, sinks",
    ),
    Control("scale forgotten", OP[4:], "return z * scale", "return z", "paged, 64 heads"),
    Control(
        "256 heads a tile",
        OP[4:],
        "**weighing.keywords,",
        "**(weighing.keywords | dict(HEAD_TILE=256)),",
        "paged, 128 heads",
        stage="compile",
    ),
    Control(
        "a square tile",
        "tune",
        "(32, 64), (64, 128), (128, 64))",
        "(32, 64), (64, 64), (128, 64))",
        "paged, 64 heads",
        stage="compile",
    ),
)
