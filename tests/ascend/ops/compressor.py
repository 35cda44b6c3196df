# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""npu_compressor, against the reference: entries, their pages, and the states.

All states but those of the tokens that a call needs are NaN, pages that no table names are shut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import memory
from ..case import Arguments, Case, Finding, Inputs, in_float64
from ..case import judge as judge_all
from ..conditions import far_apart, with_
from ..controls import Control
from .quantized_prolog import judge_bytes

KERNEL = "compressor"
OP = f"npu_{KERNEL}"
WIDE = torch.float32
RING = 2


def _table(x: Inputs, requests: int, columns: int, spare: int = 2) -> tuple[torch.Tensor, int]:
    """Pages of every request in no order, and how many there are with some that are nobody's."""
    pages = requests * columns + spare
    return x.permutation(pages)[: requests * columns].view(requests, columns), pages


def call(
    ratio: int,
    coff: int,
    size: int,
    starts: Sequence[int],
    counts: Sequence[int],
    hidden: int = 96,
    packed: bool = False,
    page: int = 4,
    mode: int = 1,
    rotary: int = 64,
    full: bool = True,
    entry_page: int | None = 2,
    kind: str = "none",
    used: bool = True,
    ring: int | None = None,
    spare: int = 2,
    gate: bool = True,
    norm: bool = True,
    ln: bool = False,
    **options: Any,
) -> Callable[[Inputs], Arguments]:
    """Requests with so many tokens before, and in this call."""

    def make(x: Inputs) -> Arguments:
        requests, tokens, width = len(starts), max(counts), coff * size
        ends = [a + b for a, b in zip(starts, counts, strict=True)]
        reach = ring or (coff * ratio + tokens if mode == RING else max(ends))
        table, pages = _table(x, requests, -(-reach // page), spare)
        state = x.normal(pages, page, (2 if gate else 1) * width, dtype=WIDE)
        before = torch.zeros(pages, page, dtype=torch.bool)
        for i, start in enumerate(starts):
            first = (start // ratio - coff + 1) * ratio
            at = torch.arange(max(first, start - reach, 0), max(start, 0)) % (table.shape[1] * page)
            before[table[i, at // page], at % page] = True
        state[~before] = torch.nan
        x.forbid(state, sorted(set(range(pages)) - set(table.flatten().tolist())))
        given: Arguments = dict(
            wkv=x.normal(width, hidden, scale=hidden**-0.5),
            wgate=x.normal(width, hidden, scale=hidden**-0.5) if gate else None,
            state_cache=state,
            ape=x.normal(ratio, width, dtype=WIDE) if gate else None,
            norm_weight=x.normal(size, dtype=WIDE) if norm else None,
            rope_head_dim=rotary,
            cmp_ratio=ratio,
            state_block_table=x.ints(table),
            start_pos=x.ints(starts, torch.int64),
            coff=coff,
            rotary_mode=2,
            cache_mode=mode,
        )
        if packed:
            sums = torch.tensor([0, *counts]).cumsum(0)
            given |= dict(x=x.normal(int(sums[-1]) + 1, hidden), cu_seqlens=x.ints(sums))
            rows = (min(len(given["x"]), len(given["x"]) // ratio + requests),)
        else:
            given["x"] = x.normal(requests, tokens, hidden)
            rows = (requests, -(-tokens // ratio))
            if used:
                given["seqused"] = x.ints(counts)
        angles = rotary if full else rotary // 2
        names = "rope_sin", "rope_cos"
        given |= {name: x.normal(*rows, angles) if rotary or norm else None for name in names}
        if ln:
            given |= {name: x.normal(size, dtype=WIDE) for name in ("ln_weight", "ln_bias")}
        if entry_page:
            columns = -(-(max(ends) // ratio + 1) // entry_page)
            of_entries, pages = _table(x, requests, columns)
            of_entries[0, 0] = -1
            shape = (pages, entry_page, 1, size)
            given["cmp_block_table"] = x.ints(of_entries)
            if kind == "int8":
                given |= dict(
                    kind=kind,
                    cmp_cache=memory.guarded(torch.full(shape, 77, dtype=torch.int8)),
                    cmp_scale_cache=memory.guarded(torch.full(shape[:3], 7, dtype=torch.float16)),
                )
            else:
                given["cmp_cache"] = x.normal(*shape)
        return given | options

    return make


def rows_apart(make: Callable[[Inputs], Arguments]) -> Callable[[Inputs], Arguments]:
    """Rows of x and of both weights that lie farther apart than they are long, each its own way."""

    def apart(name: str, by: int) -> Callable[[Arguments], Tensor]:
        def wider(arguments: Arguments) -> Tensor:
            *front, size = arguments[name].shape
            wide = memory.empty((*front, size + by), arguments[name].dtype)
            return wide[..., by:].copy_(arguments[name])

        return wider

    gaps = dict(x=16, wkv=32, wgate=48)
    return with_(make, **{name: apart(name, by) for name, by in gaps.items()})


def beyond_the_tables(make: Callable[[Inputs], Arguments]) -> Callable[[Inputs], Arguments]:
    """What the first request needs lies behind its tables' columns, and the second one's name the
    page past the last; history of the third one is in the last page, which holds two tokens."""

    def cut(x: Inputs) -> Arguments:
        arguments = make(x)
        state, table = arguments["state_cache"], arguments["state_block_table"]
        entries, last = arguments["cmp_block_table"], len(state) - 1
        of_third = int(table[2, 2])
        table[table == last] = of_third
        table[2, 2] = last
        state[[of_third, last]] = state[[last, of_third]]
        table[1, 2:4] = len(state)
        entries[1, 1] = len(arguments["cmp_cache"])
        return arguments | dict(state_block_table=table[:, :4], cmp_block_table=entries[:, :2])

    return cut


def a_token_of_zeros(make: Callable[[Inputs], Arguments]) -> Callable[[Inputs], Arguments]:
    """The channels of the first token are all alike: only epsilon is left to divide by."""

    def zeroed(arguments: Arguments) -> Tensor:
        arguments["x"][0, 0] = 0.0
        return arguments["x"]

    return with_(make, x=zeroed)


def without_columns(make: Callable[[Inputs], Arguments]) -> Callable[[Inputs], Arguments]:
    """A table of entries that has no column: they are returned, and stored nowhere."""

    def none(arguments: Arguments) -> Tensor:
        return memory.empty((len(arguments["cmp_block_table"]), 0), torch.int32)

    return with_(make, cmp_block_table=none)


def judge(case: Case, got: Arguments, exact: Arguments, rounded: Arguments) -> list[Finding]:
    """Bytes of an index cache may be off by one where a float lies between two of them."""
    floats = {n: x for n, x in got.items() if x.dtype is not torch.int8}
    found = judge_all(case, floats, exact, rounded)
    return found + [judge_bytes(n, x, exact[n]) for n, x in got.items() if x.dtype is torch.int8]


def but_scales(arguments: Arguments) -> Arguments:
    """Scales are stored in the dtype of their cache."""
    return in_float64(arguments) | {"cmp_scale_cache": arguments["cmp_scale_cache"]}


DECODE = ((3, 4, 7, 0, 11, 20), (1, 1, 1, 1, 1, 1))
CHUNKS = ((0, 5, 8, 2), (9, 7, 0, 4))
STARTS = (2, 3, 0, 7, 10, 5, 1, 6)  # the last request's last token closes
case = partial(Case, OP, judge=judge)
CASES = (
    case("CSA, decode, ring", call(4, 2, 512, *DECODE, mode=RING)),
    case("CSA, chunks by page", call(4, 2, 512, *CHUNKS)),
    case("CSA, chunks longer than the ring", call(4, 2, 128, (29, 2), (14, 3), mode=RING, ring=8)),
    case("HCA, closing", call(128, 1, 512, (127, 126, 255, 300), (1, 2, 1, 1), page=16, mode=RING)),
    case("HCA, a chunk", call(128, 1, 512, (100, 0), (70, 20), page=128, entry_page=16)),
    case("packed", call(4, 2, 128, (3, 7, 9, 0), (6, 0, 3, 5), packed=True, full=False)),
    case(
        "index entries, int8",
        call(4, 2, 128, *DECODE, kind="int8", entry_page=16, mode=RING),
        widen=but_scales,
    ),
    case(
        "index entries, int8, halves",
        call(4, 2, 128, (6,), (3,), kind="int8", entry_page=16, rotary_mode=1),
        widen=but_scales,
    ),
    case("m = 1", call(1, 1, 64, (0, 5), (3, 2), rotary=16, entry_page=1)),
    case(
        "m = 2, coff 2, halves, fp16",
        call(2, 2, 48, (1, 6), (4, 3), rotary=32, rotary_mode=1, page=3),
        torch.float16,
    ),
    case(
        "m = 3, no rotation, no pages",
        call(3, 2, 64, (4, -2), (5, 6), rotary=0, entry_page=None, used=False),
    ),
    case(
        "all channels turn, pages alone",
        call(4, 1, 64, (2, 3), (6, 2), entry_page=4, return_cmp_kv=False, norm_eps=0.1),
    ),
    case("pages far apart", far_apart(call(4, 2, 64, (3, 9), (2, 4)), "state_cache", "cmp_cache")),
    case("whole tiles, rows apart", rows_apart(call(4, 1, 128, STARTS, (2,) * 8, hidden=512))),
    case(
        "beyond the tables",
        beyond_the_tables(call(4, 1, 64, (9, 6, 5), (3, 2, 3), page=2, entry_page=1, spare=0)),
    ),
    case("Pro, 70 tokens", call(4, 2, 512, (5, 100), (35, 35), hidden=7168, mode=RING)),
    case(
        "GLM's pools",
        a_token_of_zeros(
            call(
                4,
                1,
                128,
                *DECODE,
                mode=RING,
                ring=4,
                hidden=4096,
                rotary=0,
                norm=False,
                ln=True,
                ln_eps=0.1,
            )
        ),
    ),
    case(
        "Qwen4's pools",
        call(4, 1, 128, *CHUNKS, gate=False, rotary_mode=1, rope_slice="first"),
    ),
    case(
        "means of a LayerNorm, pairs of the first channels, int8",
        call(
            2,
            1,
            128,
            (3,),
            (3,),
            kind="int8",
            entry_page=16,
            gate=False,
            ln=True,
            rope_slice="first",
        ),
        widen=but_scales,
    ),
    case("entries in no table", without_columns(call(4, 2, 64, (3, 9), (2, 4)))),
)
CONTROLS = (
    Control(
        "history is not read",
        KERNEL,
        "pieces = tl.where(own > begin,",
        "pieces = tl.where(own > ratio,",
        "CSA, decode, ring",
    ),
    Control(
        "the other half's channels",
        KERNEL,
        "channel = half * own_size + first_d",
        "channel = (COFF - 1 - half) * own_size + first_d",
        "CSA, decode, ring",
    ),
    Control(
        "ape from its first row on",
        KERNEL,
        "ape + (i + r)[:, None] * width",
        "ape + r[:, None] * width",
        "HCA, closing",
    ),
    Control(
        "a ring that does not turn",
        KERNEL,
        "slot = (column + piece) % columns",
        "slot = column + piece",
        "CSA, chunks longer than the ring",
    ),
    Control(
        "a token too few is kept",
        KERNEL,
        "position >= start + count - columns",
        "position > start + count - columns",
        "CSA, chunks longer than the ring",
    ),
    Control(
        "a page of states in 32 bits",
        KERNEL,
        "of_page = of_state + tl.where(there, number, 0).to(tl.int64)",
        "of_page = of_state + tl.where(there, number, 0)",
        "pages far apart",
    ),
    Control(
        "a page of entries in 32 bits",
        KERNEL,
        "outer = tl.where(there, entry_of, 0).to(tl.int64)",
        "outer = tl.where(there, entry_of, 0)",
        "pages far apart",
    ),
    Control(
        "the closing token is not this call's",
        KERNEL,
        "end = _within(start + count - base",
        "end = _within(start + count - 1 - base",
        "HCA, closing",
    ),
    Control(
        "windows from position 0 on",
        KERNEL,
        "number = _floor(start, ratio) + row % each",
        "number = row % each",
        "HCA, closing",
    ),
    Control(
        "a negative start rounds to 0",
        KERNEL,
        "tl.where(a - q * m < 0, q - 1, q)",
        "tl.where(a - q * m < 0, q, q)",
        "m = 3, no rotation, no pages",
    ),
    Control(
        "rows of the requests before are not counted",
        KERNEL,
        "before += closed",
        "before += 0 * closed",
        "packed",
    ),
    Control(
        "the rotation turns the other way",
        KERNEL,
        "turned = left * c - right * s",
        "turned = left * c + right * s",
        "CSA, decode, ring",
    ),
    Control(
        "no epsilon",
        KERNEL,
        "squares / SIZE + epsilon",
        "squares / SIZE + 0.0 * epsilon",
        "all channels turn, pages alone",
    ),
    Control(
        "an absent page is the first one",
        KERNEL,
        "there & (entry_of >= 0)",
        "there",
        "CSA, chunks by page",
    ),
    Control(
        "kv keeps its mean",
        KERNEL,
        "kv = kv - tl.sum(kv, 0) / SIZE",
        "kv = kv - 0.0 * tl.sum(kv, 0) / SIZE",
        "GLM's pools",
    ),
    Control(
        "another epsilon of the LayerNorm",
        KERNEL,
        "tl.sum(kv * kv, 0) / SIZE + epsilon",
        "tl.sum(kv * kv, 0) / SIZE + 1.0",
        "GLM's pools",
    ),
    Control(
        "a state has a z without a gate",
        KERNEL,
        "of_state_row = width\n",
        "of_state_row = 2 * width\n",
        "Qwen4's pools",
    ),
    Control(
        "the norm's weights of other channels",
        KERNEL,
        "tl.load(gamma + BESIDE + d)",
        "tl.load(gamma + d)",
        "Qwen4's pools",
    ),
    Control(
        "one part of the products",
        KERNEL,
        "for i in range(1, parts):",
        "for i in range(2, parts):",
        "Pro, 70 tokens",
    ),
)
