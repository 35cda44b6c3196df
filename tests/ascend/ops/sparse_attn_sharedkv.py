# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""npu_sparse_attn_sharedkv: sliding, with all entries and with chosen ones, shards of 8 to 128
heads, every layout; nothing may touch a row that no token sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import lowered, memory
from ..case import Arguments, Case, Inputs, in_rounds
from ..conditions import far_apart, many_requests, pages_apart, with_
from ..controls import Control

OP = "npu_sparse_attn_sharedkv"
Make = Callable[[Inputs], Arguments]


def _cache(x: Inputs, page: int, size: int, begins: list[int], ends: list[int]) -> list[Tensor]:
    """[pages, table] of the rows begin .. end of every request, in shuffled pages; NaN elsewhere,
    and pages without any of them may not be touched."""
    columns = [
        range(first // page, -(-end // page)) for first, end in zip(begins, ends, strict=True)
    ]
    kv = x.normal(sum(map(len, columns)) + 2, page, 1, size)
    order = x.permutation(kv.shape[0]).tolist()
    table = torch.full((len(ends), max(-(-end // page) for end in ends) + 1), -1)
    for i, (first, end) in enumerate(zip(begins, ends, strict=True)):
        for column in columns[i]:
            table[i, column] = order.pop()
            rows = column * page + torch.arange(page)
            kv[table[i, column], (rows < first) | (rows >= end)] = float("nan")
    x.forbid(kv, order)
    return [kv, x.ints(table)]


def _chosen(x: Inputs, tokens: list[int], k: int) -> Tensor:
    """[tokens, k] of so many closed entries each; absent ones between them, one of them open, and
    one that comes twice."""
    rows = []
    for closed in tokens:
        chosen = x.permutation(max(closed, 1))[:k]
        row = torch.full((k,), -1)
        row[: len(chosen)] = chosen
        row[x.permutation(k)[: k // 8]] = -1
        row[k // 2] = closed
        row[-1] = row[0]
        rows.append(row)
    return torch.stack(rows)


def paged(
    lengths: list[int],
    s1: int,
    heads: int,
    ratio: int = 0,
    k: int | None = None,
    size: int = 512,
    pages: tuple[int, int] = (128, 128),
    window: int = 128,
    **options: Any,
) -> Make:
    """Sliding; with a ratio all entries, with k as well chosen ones."""

    def make(x: Inputs) -> Arguments:
        passed = [max(n - s1 + 1 - window, 0) for n in lengths]
        ori_kv, table = _cache(x, pages[0], size, passed, lengths)
        arguments = dict(
            q=x.normal(len(lengths), s1, heads, size),
            ori_kv=ori_kv,
            ori_block_table=table,
            seqused_kv=x.ints(lengths),
            sinks=x.normal(heads, dtype=torch.float32),
            ori_win_left=window - 1,
            cmp_ratio=ratio,
            return_softmax_lse=True,
        )
        if ratio:
            entries = [n // ratio for n in lengths]
            cmp_kv, table = _cache(x, pages[1], size, [0] * len(lengths), entries)
            arguments |= dict(cmp_kv=cmp_kv, cmp_block_table=table)
        if k is not None:
            closed = [max(n - s1 + 1 + j, 0) // ratio for n in lengths for j in range(s1)]
            index = _chosen(x, closed, k).view(len(lengths), s1, 1, k)
            arguments["cmp_sparse_indices"] = x.ints(index)
        return arguments | {
            name: value(x) if callable(value) else value for name, value in options.items()
        }

    return make


def packed(layout: str, heads: int, k: int | None = None, size: int = 512) -> Make:
    """BSND with fewer tokens than the tensors hold, or TND between tokens of no request."""

    def make(x: Inputs) -> Arguments:
        if layout == "BSND":
            q, rows, entries, lengths = (3, 4), (3, 160), (3, 40), dict(seqused_q=x.ints([3, 0, 2]))
        else:
            q, rows, entries = (9,), (330,), (90,)
            lengths = dict(
                cu_seqlens_q=x.ints([1, 4, 5, 7]),
                cu_seqlens_ori_kv=x.ints([2, 152, 153, 300]),
                cu_seqlens_cmp_kv=x.ints([3, 40, 40, 80]),
            )
        index = _chosen(x, [30] * 12, k or 8)[: torch.Size(q).numel()]
        return lengths | dict(
            q=x.normal(*q, heads, size),
            ori_kv=x.normal(*rows, 1, size),
            cmp_kv=x.normal(*entries, 1, size),
            cmp_sparse_indices=x.ints(index.view(*q, 1, -1)) if k else None,
            seqused_kv=x.ints([150, 7, 131]),
            cmp_ratio=4,
            layout_q=layout,
            layout_kv=layout,
            return_softmax_lse=True,
        )

    return make


def in_slots(tokens: int, counts: tuple[int, int], size: int = 512, **options: Any) -> Make:
    """Rows and entries that slots name, of which lengths cut some."""

    def make(x: Inputs) -> Arguments:
        ori_kv, cmp_kv = x.normal(5, 32, 1, size), x.normal(7, 2, 1, size)
        arguments: Arguments = dict(
            q=x.normal(tokens, 16, size),
            ori_kv=ori_kv,
            cmp_kv=cmp_kv,
            sinks=x.normal(16, dtype=torch.float32),
            layout_q="TND",
            indices_are_slots=True,
            return_softmax_lse=True,
        )
        for name, kv, count in (("ori", ori_kv, counts[0]), ("cmp", cmp_kv, counts[1])):
            most = kv.shape[0] * kv.shape[1]
            index = torch.stack([x.permutation(most)[:count] for _ in range(tokens)])
            index = torch.nn.functional.pad(index, (0, count - index.shape[1]), value=-1)
            index[:, 1::5] = -1
            index[:, 3:4] = most
            arguments[f"{name}_sparse_indices"] = x.ints(index.view(tokens, 1, count))
            cut = torch.arange(tokens) * count // max(tokens - 1, 1)
            arguments[f"{name}_topk_length"] = x.ints(cut)
        return arguments | {
            name: value(x) if callable(value) else value for name, value in options.items()
        }

    return make


def _opposed(make: Make) -> Make:
    """Queries below 0 and keys above: every score is far below 0."""

    def drawn(x: Inputs) -> Arguments:
        arguments = make(x)
        for name in ("ori_kv", "cmp_kv"):
            arguments[name].abs_()
        arguments["q"].abs_().neg_()
        return arguments

    return drawn


def _entries_apart(make: Make) -> Make:
    """The rows of entries lie farther apart than they are long."""

    def apart(x: Inputs) -> Arguments:
        arguments = make(x)
        dense = arguments["cmp_kv"]
        wide = memory.empty((*dense.shape[:-1], 2 * dense.shape[-1]), dense.dtype)
        closed = [blocks for tensor, blocks in x.forbidden if tensor is dense]
        x.forbidden = [pair for pair in x.forbidden if pair[0] is not dense]
        arguments["cmp_kv"] = wide[..., : dense.shape[-1]].copy_(dense)
        for blocks in closed:
            x.forbid(wide, blocks)
        return arguments

    return apart


def _first_slot_alone(make: Make) -> Make:
    """Of the window rows of one token."""

    def drawn(x: Inputs) -> Arguments:
        arguments = make(x)
        arguments["ori_sparse_indices"][2] = -1
        arguments["ori_sparse_indices"][2, :, 1] = 0
        return arguments

    return drawn


def _backwards(make: Make) -> Make:
    """The last program of a launch first: a row too many that one stores lies in the next one's.
    A case has its process to itself."""

    def drawn(x: Inputs) -> Arguments:
        vars(lowered)["range"] = lambda count: reversed(range(count))
        return make(x)

    return drawn


def _sums(sums: list[int]) -> Tensor:
    return memory.guarded(torch.tensor(sums, dtype=torch.int32))


def _int64(make: Make) -> Make:
    """Lengths, an index and a page that 32 bits would bring back."""

    def wide(x: Inputs) -> Arguments:
        arguments = {
            name: x.ints(value, torch.int64)
            if isinstance(value, Tensor) and value.dtype is torch.int32
            else value
            for name, value in make(x).items()
        }
        arguments["cmp_sparse_indices"][0, ..., :2] += 2**32
        arguments["cmp_block_table"][0, 1] += 2**32
        return arguments

    return wide


def _absent_pages(arguments: Arguments) -> Arguments:
    """One of the first request in both tables, and in the last one's the page past the last."""
    for name in ("ori", "cmp"):
        table = arguments[f"{name}_block_table"]
        there = (table[0] >= 0).nonzero().flatten()
        table[0, there[-1]] = -1
        table[-1, (table[-1] >= 0).nonzero()[0]] = arguments[f"{name}_kv"].shape[0]
    return arguments


def decode(requests: int) -> Make:
    """TND tokens of so many requests, paged keys."""
    tokens, sums = many_requests(requests)

    def make(x: Inputs) -> Arguments:
        drawn = paged([1 + i % 40 for i in range(requests)], 1, 8, 4, size=32, pages=(16, 16))(x)
        return drawn | dict(
            q=x.normal(tokens, 8, 32), cu_seqlens_q=x.ints([0, *sums]), layout_q="TND"
        )

    return make


LENGTHS = [300, 1, 131, 2067]
SMALL = dict(size=64, pages=(128, 128))
CASES = (
    *(Case(OP, f"sliding, {n} heads", paged([300, 1, 131], 2, n)) for n in (8, 16, 64, 128)),
    *(Case(OP, f"all entries, {n} heads", paged([300, 1, 2067], 2, n, 4)) for n in (8, 16, 64)),
    Case(OP, "all entries, 128 heads, ratio 128", paged([300, 127, 2067], 1, 128, 128)),
    *(Case(OP, f"chosen, {n} heads", paged([300, 3, 2067], 2, n, 4, 96)) for n in (8, 16, 64)),
    Case(OP, "chosen, 128 heads", paged([300, 2067], 1, 128, 4, 512)),
    Case(OP, "chosen, programs backwards", _backwards(paged([300, 2067], 2, 8, 4, 96, **SMALL))),
    Case(OP, "chosen, 20 heads, 8 tokens", paged(LENGTHS, 2, 20, 4, 96)),
    Case(OP, "all entries, 20 heads", paged([300, 131], 2, 20, 3)),
    Case(OP, "small pages, 24 heads, 16 tokens", paged(LENGTHS, 4, 24, 128, pages=(48, 2))),
    Case(OP, "small pages, chosen, 10 tokens", paged([300, 131], 5, 8, 1, 40, pages=(16, 1))),
    Case(OP, "16 heads, 9 tokens", paged([300, 3, 131], 3, 16, 2, 16, **SMALL)),
    Case(OP, "8 heads, 13 tokens, fp16", paged([300], 13, 8, 2, **SMALL), torch.float16),
    Case(OP, "a window of 1, ratio 1", paged([300, 1], 1, 8, 1, window=1, **SMALL)),
    Case(
        OP,
        "a window of 1 in small pages, entries apart",
        _entries_apart(paged([300, 5], 2, 8, 2, window=1, size=64, pages=(16, 128))),
    ),
    Case(
        OP,
        "a window of 300, pages of 256",
        paged([700, 90], 2, 8, size=64, pages=(256, 0), window=300),
    ),
    Case(OP, "lengths 0, fewer than tokens", paged([0, 2, 0], 3, 8, 1, **SMALL)),
    Case(OP, "130 runs of entries", paged([16700], 1, 8, 1, size=32), cores=(24,)),
    Case(OP, "chosen, 1100 of them", paged([4600], 2, 8, 4, 1100, size=32)),
    Case(OP, "BSND", packed("BSND", 16)),
    Case(OP, "BSND, chosen", packed("BSND", 8, 24, size=64)),
    Case(OP, "TND", packed("TND", 16)),
    Case(OP, "TND, chosen", packed("TND", 8, 24, size=64)),
    Case(
        OP,
        "TND, sliding",
        with_(packed("TND", 8, size=64), cmp_kv=None, cu_seqlens_cmp_kv=None, cmp_ratio=0),
    ),
    Case(OP, "TND, 133 requests, paged", decode(133)),
    Case(
        OP,
        "TND, sums that fall, beyond the tokens",
        with_(packed("TND", 8, size=64), cu_seqlens_q=_sums([-(2**31), 6, 2, 2**31 - 1])),
    ),
    # few keys, and tiles of heads for all cores: one pass
    Case(OP, "all cores, 64 heads", paged([330, 1, 131], 4, 64)),
    Case(OP, "all cores, all entries", paged([300, 1, 500], 8, 32, 4)),
    Case(OP, "all cores, chosen, 16 heads", paged([300, 3, 2067], 8, 16, 4, 96)),
    Case(OP, "all cores, chosen, 128 heads", paged([300, 2067], 3, 128, 4, 96, size=64)),
    Case(
        OP,
        "all cores, a window of 300",
        paged([740, 90, 700], 8, 32, size=64, pages=(256, 0), window=300),
        torch.float16,
    ),
    Case(
        OP,
        "all cores, several rounds",
        in_rounds(2**17, paged([300, 1, 131], 4, 64, 4, 64, **SMALL)),
    ),
    Case(
        OP,
        "all cores, absent pages",
        lambda x: _absent_pages(paged([300, 140, 270], 8, 32, 4, **SMALL)(x)),
    ),
    Case(
        OP,
        "all cores, lengths 0",
        paged([0, 2, 0], 8, 32, 1, **SMALL, sinks=None, return_softmax_lse=False),
    ),
    Case(
        OP,
        "all cores, sinks of all sizes",
        paged(
            [300, 0],
            12,
            16,
            4,
            **SMALL,
            sinks=lambda x: x.ints([-torch.inf, torch.inf, 1e4, 0.5] * 4, torch.float32),
        ),
    ),
    Case(
        OP, "all cores, scores far apart", paged([300, 70], 12, 16, 4, **SMALL, softmax_scale=9.0)
    ),
    Case(
        OP,
        "all cores, scores that underflow",
        _opposed(paged([300, 70], 12, 16, 4, **SMALL, softmax_scale=4.0, sinks=None)),
    ),
    Case(OP, "all cores, slots", in_slots(24, (70, 14), size=64)),
    Case(OP, "slots", in_slots(5, (70, 14))),
    Case(
        OP,
        "slots, of requests",
        _first_slot_alone(
            in_slots(
                6,
                (40, 6),
                size=64,
                cu_seqlens_q=lambda x: x.ints([1, 3, 4]),
                seqused_q=lambda x: x.ints([2, 0]),
            )
        ),
    ),
    Case(OP, "slots of entries alone", in_slots(3, (0, 5), size=64)),
    Case(OP, "int64, beyond 32 bits", _int64(paged([300, 70], 2, 16, 1, 40, **SMALL))),
    Case(OP, "absent pages", lambda x: _absent_pages(paged([300, 140, 270], 2, 8, 1, **SMALL)(x))),
    Case(
        OP,
        "absent pages, chosen",
        lambda x: _absent_pages(paged([300, 140, 270], 2, 8, 1, 64, size=64, pages=(48, 16))(x)),
    ),
    Case(OP, "several rounds", in_rounds(2**17, paged([300, 1, 131], 2, 8, 4, 64, **SMALL))),
    Case(
        OP,
        "pages apart",
        pages_apart(paged([300, 1, 131], 2, 8, 1, **SMALL), "ori_kv", "cmp_kv"),
    ),
    Case(
        OP,
        "pages far apart",
        far_apart(paged([400, 1], 2, 8, 1, **SMALL), "ori_kv", "cmp_kv"),
    ),
    Case(
        OP,
        "pages far apart, chosen",
        far_apart(paged([400, 1], 2, 8, 1, 48, **SMALL), "ori_kv", "cmp_kv"),
    ),
    Case(
        OP,
        "sinks of all sizes",
        paged(
            [300, 0],
            1,
            4,
            4,
            **SMALL,
            sinks=lambda x: x.ints([-torch.inf, torch.inf, 1e4, 0.5], torch.float32),
        ),
    ),
    Case(
        OP, "no sinks, no lse", paged([300], 1, 4, 4, **SMALL, sinks=None, return_softmax_lse=False)
    ),
    Case(OP, "scores far apart", paged([300, 70], 1, 16, 4, **SMALL, softmax_scale=9.0)),
    Case(
        OP,
        "scores that underflow",
        _opposed(paged([300, 70], 1, 16, 4, **SMALL, softmax_scale=4.0, sinks=None)),
    ),
)
_SEEN = '        log = tl.where(total > 0, log, float("-inf"))\n        to = token * heads + h'
_KEYS = "k = tl.load(from_key, mask=j[:, None] < there, other=0.0)\n            z = tl.dot("
_OF_ALL = "k = tl.load(from_key, mask=j[:, None] < there, other=0.0)\n                "
_ROUND = "token = (first + row).to(tl.int64)\n        "
_PLAN = "of_row = plan + token * width\n        "
CONTROLS = (
    *(
        Control(title, OP[4:], old, new, case)
        for title, old, new, case in (
            (
                "the window is a row longer",
                "begin = tl.maximum(limit - window, 0)",
                "begin = tl.maximum(limit - window - 1, 0)",
                "sliding, 8 heads",
            ),
            (
                "the entry that closes at the token is not seen",
                "closed = tl.minimum(limit // ratio, closed)",
                "closed = tl.minimum((limit - 1) // ratio, closed)",
                "a window of 1, ratio 1",
            ),
            (
                "the entry that is still open is seen",
                "exists = (position >= 0) & (position < limit)",
                "exists = (position >= 0) & (position <= limit)",
                "chosen, 8 heads",
            ),
            (
                "a token before the first sum is the first request's",
                "inside = (passed > 0) & (passed <= requests)",
                "inside = passed <= requests",
                "TND",
            ),
            (
                "an absent page is page 0",
                "count = tl.where(slot >= 0, count, 0)",
                "count = tl.where(slot >= -1, count, 0)",
                "absent pages",
            ),
            (
                "the last run of a window alone",
                "first = tl.maximum(origin + i * SPAN, begin)",
                "first = origin + i * SPAN",
                "sliding, 8 heads",
            ),
            (
                "a key behind a run is read",
                _KEYS + "k,",
                _KEYS.replace("<", "<=") + "k,",
                "sliding, 8 heads",
            ),
            (
                "a value behind a run is read",
                "v = tl.load(from_key, mask=j[:, None] < there",
                "v = tl.load(from_key, mask=j[:, None] <= there",
                "sliding, 8 heads",
            ),
            (
                "a key behind a run counts",
                "tl.where(j < there.to(tl.float32), 0.0",
                "tl.where(j <= there.to(tl.float32), 0.0",
                "sliding, 16 heads",
            ),
            (
                "the first tile of a run twice",
                "passed = tile % TILES * KEY_TILE",
                "passed = tile * 0",
                "sliding, 8 heads",
            ),
            (
                "entries are as many bytes away",
                "(cmp.to(tl.int64) - ori.to(tl.int64)) // 2",
                "(cmp.to(tl.int64) - ori.to(tl.int64))",
                "all entries, 8 heads",
            ),
            (
                "the runs of rows and of entries are one row",
                "tl.where(run < near, 0, far_at - near)",
                "tl.where(run < near, 0, far_at - near + 1)",
                "all entries, 8 heads",
            ),
            (
                "a run begins in 32 bits",
                "tl.load(of_run).to(tl.int64) * stride",
                "tl.load(of_run) * stride",
                "pages far apart",
            ),
            (
                "rows in 32 bits",
                "other = tl.where(other >= 0, other.to(tl.int64), one)",
                "one = one.to(tl.int32)\n        other = tl.where(other >= 0, other, one)",
                "pages far apart, chosen",
            ),
            (
                "an absent first row is read",
                "one = tl.where(one >= 0, one, tl.where(other >= 0, other, top)).to(tl.int64)",
                "one = one.to(tl.int64)",
                "chosen, 8 heads",
            ),
            (
                "a piece begins where the one before did",
                "row.to(tl.int64) * wide + total + before",
                "row.to(tl.int64) * wide + total",
                "chosen, 8 heads",
            ),
            (
                "an absent row has room",
                "to += there",
                "to += 2",
                "chosen, 8 heads",
            ),
            (
                "slots of a token of no request",
                "length = tl.where(tl.load(of_row + LIMIT) > 0, length, 0)",
                "length = tl.where(tl.load(of_row + LIMIT) >= 0, length, 0)",
                "slots, of requests",
            ),
            (
                "another round's entries",
                _ROUND + _PLAN + "request",
                "token = row.to(tl.int64)\n        " + _PLAN + "request",
                "several rounds",
            ),
            (
                "another round's queries",
                _ROUND + "from_query",
                "token = row.to(tl.int64)\n        from_query",
                "several rounds",
            ),
            (
                "another round's output",
                "to = token * heads + h\n        if",
                "to = row.to(tl.int64) * heads + h\n        if",
                "several rounds",
            ),
            (
                "the last keys of a split forgotten",
                "each = (runs * TILES + splits - 1) // splits",
                "each = runs * TILES // splits",
                "chosen, 128 heads",
            ),
            (
                "only the first parts' statistics",
                "for part in range(0, parts, PARTS)",
                "for part in range(0, PARTS, PARTS)",
                "chosen, 128 heads",
            ),
            (
                "a maximum of at least 0",
                "peak = tl.maximum(tl.max(z, 0), -1e30)",
                "peak = tl.maximum(tl.max(z, 0), 0.0)",
                "scores that underflow",
            ),
            (
                "a maximum of parts of at least 0",
                "peak = tl.full((HEAD_TILE,), -1e30, tl.float32)",
                "peak = tl.full((HEAD_TILE,), 0.0, tl.float32)",
                "scores that underflow",
            ),
            (
                "the sink of the head after the last",
                "tl.load(sinks + h, mask=h < heads, other=0.0)",
                "tl.load(sinks + h, mask=h <= heads, other=0.0)",
                "sinks of all sizes",
            ),
            ("scale forgotten", "return z * scale +", "return z +", "sliding, 16 heads"),
            (
                "all cores: the first half of a window twice",
                "tile = i + tl.where(i > 0, first_half, 0)",
                "tile = i",
                "all cores, 64 heads",
            ),
            (
                "all cores: the last half of a window is skipped as long as it is",
                "last_half = tl.where((near > 1) & (length <= KEY_TILE), 1, 0)",
                "last_half = tl.where(near > 1, 1, 0)",
                "all cores, a window of 300",
            ),
            (
                "all cores: the last entries are skipped",
                "tl.where((runs > near) & (length <= KEY_TILE), 1, 0)",
                "tl.where(runs > near, 1, 0)",
                "all cores, all entries",
            ),
            (
                "all cores: a key behind a run is read",
                _OF_ALL + "z = tl.dot(q,",
                _OF_ALL.replace("<", "<=") + "z = tl.dot(q,",
                "all cores, 64 heads",
            ),
            (
                "all cores: a key behind a run counts",
                "seen = j.to(tl.float32) < there.to(tl.float32)",
                "seen = j.to(tl.float32) <= there.to(tl.float32)",
                "all cores, 64 heads",
            ),
            (
                "all cores: a maximum of at least 0",
                "peak = tl.full((HEAD_TILE, LANES), -1e30, tl.float32)",
                "peak = tl.full((HEAD_TILE, LANES), 0.0, tl.float32)",
                "all cores, scores that underflow",
            ),
            (
                "all cores: what was added up keeps its size",
                "acc = acc * tl.max(shrink, 1)[:, None]",
                "acc = acc",
                "all cores, scores far apart",
            ),
            (
                "all cores: scale forgotten",
                "tl.dot(q, tl.trans(k)) * scale",
                "tl.dot(q, tl.trans(k))",
                "all cores, 64 heads",
            ),
            (
                "all cores: the sinks of the first heads",
                "row = tl.load(sinks + c[:, None] * heads + h[None]",
                "row = tl.load(sinks + c[:, None] * heads + h[None] % 16",
                "all cores, 64 heads",
            ),
            (
                "all cores: another round's queries",
                _ROUND + "    q = tl.load(query",
                "token = row.to(tl.int64)\n            q = tl.load(query",
                "all cores, several rounds",
            ),
            (
                "all cores: another round's output",
                "to = token * heads + h\n            tl.store",
                "to = row.to(tl.int64) * heads + h\n            tl.store",
                "all cores, several rounds",
            ),
            (
                "all cores: the first tile of heads alone",
                "h = tile_of_heads * HEAD_TILE + tl.arange(0, HEAD_TILE)",
                "h = tl.arange(0, HEAD_TILE)",
                "all cores, 64 heads",
            ),
            (
                "all cores: a row less of each tile of heads",
                "tl.minimum(end, before + rows)",
                "tl.minimum(end, before + rows - 1)",
                "all cores, 64 heads",
            ),
            (
                "lse with the sink",
                "log = peak + tl.log(tl.where(total > 0, total, 1.0))\n" + _SEEN + "\n        if",
                "log = peak + tl.log(tl.where(total > 0, tl.max(denominator, 1), 1.0))\n"
                + _SEEN
                + "\n        if",
                "sliding, 16 heads",
            ),
        )
    ),
    Control(
        "256 heads a tile",
        OP[4:],
        "**weighing.keywords,",
        "**(weighing.keywords | dict(HEAD_TILE=256)),",
        "all entries, 128 heads, ratio 128",
        stage="compile",
    ),
)
