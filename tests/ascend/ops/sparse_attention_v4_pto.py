# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""npu_sparse_attention_v4_pto: the layer, all three kinds.  Rounding may swap entries at the
edge of a selection, so the selection is everything, or decided by ties, which are exact.

Rows, entries and states that no token of the call may see are NaN, and so are tokens that are not
there; pages that no table names are shut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from custom.dispatch.common import nz
from torch import Tensor

from .. import memory
from ..case import Arguments, Case, Finding, Inputs, in_float64
from ..case import judge as judge_all
from ..controls import Control
from .mla_prolog_pto import weight
from .quantized_prolog import judge_bytes
from .sharedkv_prolog_pto import weights

OP = "npu_sparse_attention_v4_pto"
WIDE = torch.float32
SLIDING, CSA, HCA = "sliding", "CSA", "HCA"


class _Pages:
    """Pages of some requests in no order, two of them nobody's; `keep` [requests, positions] names
    what a call may read."""

    def __init__(self, x: Inputs, requests: int, columns: int, page: int) -> None:
        self.count, self.page = requests * columns + 2, page
        order = x.permutation(self.count)
        self.table = order[: requests * columns].view(requests, columns)
        self.free = order[requests * columns :].tolist()

    def cache(self, x: Inputs, seen: Sequence[range], *size: int, ring: bool = False) -> Tensor:
        dtype = WIDE if len(size) == 1 else x.dtype
        cache = x.normal(self.count, self.page, *size, dtype=dtype)
        real = torch.zeros(self.count, self.page, dtype=torch.bool)
        for row, positions in zip(self.table, seen, strict=True):
            at = torch.tensor(positions, dtype=torch.long)
            if ring:
                at = at % (len(row) * self.page)
            real[row[at // self.page], at % self.page] = True
        cache[~real] = torch.nan
        x.forbid(cache, self.free)
        return cache


def layer(
    kind: str,
    starts: Sequence[int],
    used: Sequence[int] | None,
    steps: int,
    heads: int,
    *,
    ratio: int = 4,
    k: int = 64,
    hidden: int = 256,
    rank: int = 128,
    size: int = 64,
    rotary: int = 32,
    index: tuple[int, int] = (16, 64),
    groups: int | None = 2,
    ranks: int = 64,
    page: int = 128,
    entry_page: int = 16,
    state_page: int = 4,
    window: int = 128,
    mode: int = 2,
    ring: int | None = None,
    form: str = "nz",
    tied: bool = False,
    int8: bool = False,
    **options: Any,
) -> Callable[[Inputs], Arguments]:
    """Requests with so many tokens before; `groups` of the output projection, if there is one."""

    def make(x: Inputs) -> Arguments:
        requests = len(starts)
        counts = [steps] * requests if used is None else [min(max(n, 0), steps) for n in used]
        ends = [a + b for a, b in zip(starts, counts, strict=True)]
        reach = max(ends) + 1
        rows = _Pages(x, requests, -(-reach // page), page)
        seen = [range(max(a - window + 1, 0), max(a, 0)) for a in starts]
        given: Arguments = dict(
            x=x.normal(requests, steps, hidden),
            **weights(x, hidden, rank, heads, size, form),
            sinks=x.normal(heads, dtype=WIDE),
            sin=x.normal(requests, steps, rotary),
            cos=x.normal(requests, steps, rotary),
            ori_kv=rows.cache(x, seen, 1, size),
            ori_block_table=x.ints(rows.table),
            act_seqs=x.ints([max(n, 0) for n in ends]),
            seqused=None if used is None else x.ints(used),
            ori_win_left=window - 1,
            weight_format="nd" if form == "nd" else "nz",
        )
        if groups is not None:
            deep = heads // groups * size
            of_groups = x.normal(groups, deep, ranks, scale=deep**-0.5)
            if form != "nd":
                of_groups = memory.guarded(nz.to_nz(of_groups))
            given |= dict(w_o_a=of_groups, w_o_b=weight(x, groups * ranks, hidden, form))
        if kind != SLIDING:
            coff = 2 if kind == CSA else 1
            held = (ring or coff * ratio + steps) if mode == 2 else reach
            columns = -(-held // state_page)
            states = _Pages(x, requests, columns, state_page)
            entries = _Pages(x, requests, -(-(reach // ratio + 1) // entry_page), entry_page)
            open_ = [
                range(max((n // ratio - coff + 1) * ratio, n - columns * state_page, 0), max(n, 0))
                for n in starts
            ]
            closed = [range(max(n, 0) // ratio) for n in starts]
            windows = -(-steps // ratio)
            given |= dict(
                cmp_ratio=ratio,
                cmp_sin=x.normal(requests, windows, rotary),
                cmp_cos=x.normal(requests, windows, rotary),
                state_block_table=x.ints(states.table),
                cmp_block_table=x.ints(entries.table),
                state_mode=mode,
            )
            parts = [("cmp", size, "cmp_kv")] + [("idx", index[1], "idx_k")] * (kind == CSA)
            for name, channels, cached in parts:
                wide = coff * channels
                given |= {
                    f"w_{name}_kv": x.normal(wide, hidden, scale=hidden**-0.5),
                    f"w_{name}_gate": x.normal(wide, hidden, scale=hidden**-0.5),
                    f"{name}_ape": x.normal(ratio, wide, dtype=WIDE),
                    f"gamma_{name}": x.normal(channels, dtype=WIDE),
                    f"{name}_state": states.cache(x, open_, 2 * wide, ring=mode == 2),
                    cached: entries.cache(x, closed, 1, channels),
                }
            if int8:
                shape = given["idx_k"].shape
                bytes_of = torch.randint(-99, 99, shape, generator=x.random, dtype=torch.int8)
                scales = x.normal(*shape[:3], scale=0.01, dtype=torch.float16).abs_()
                given |= dict(index_kind="int8", idx_k_scale=scales)
                x.forbidden = [pair for pair in x.forbidden if pair[0] is not given["idx_k"]]
                given["idx_k"] = memory.guarded(bytes_of)
        if kind == CSA:
            proj = weight(x, hidden, index[0], form)
            if tied:  # every score is zero
                proj.zero_()
            given |= dict(
                w_idx_qb=weight(x, rank, index[0] * index[1], form),
                w_idx_proj=proj,
                sparse_count=k,
            )
        for name in ("sin", "cos", "cmp_sin", "cmp_cos"):
            if name in given:
                given[name][..., 1::2] = torch.nan  # entry 2i is pair i's
        for tokens, count, start in zip(given["x"], counts, starts, strict=True):
            tokens[count:] = torch.nan
            tokens[: max(-start, 0)] = torch.nan
        return given | options

    return make


def without_states(make: Callable[[Inputs], Arguments]) -> Callable[[Inputs], Arguments]:
    """Caches of states without a page: there is no history, and nothing is kept."""

    def cut(x: Inputs) -> Arguments:
        arguments = make(x)
        for name in ("cmp_state", "idx_state"):
            states = arguments[name]
            x.forbidden = [pair for pair in x.forbidden if pair[0] is not states]
            arguments[name] = memory.empty((0, *states.shape[1:]), states.dtype)
        return arguments

    return cut


_NZ = ("w_dq", "w_uq", "w_kv", "w_idx_qb", "w_idx_proj", "w_o_b")


def row_major(arguments: Arguments) -> Arguments:
    """In float64, whose NZ tiles would be narrower; scales are stored in the dtype of their
    cache."""
    form = arguments["weight_format"]
    plain = {n: nz.to_nd(arguments[n], form) for n in _NZ if arguments.get(n) is not None}
    if arguments.get("w_o_a") is not None:
        plain["w_o_a"] = torch.stack([nz.to_nd(each, form) for each in arguments["w_o_a"]])
    kept = {n: arguments[n] for n in ("idx_k_scale",) if n in arguments}
    return in_float64(arguments | plain) | dict(weight_format="nd") | kept


def judge(case: Case, got: Arguments, exact: Arguments, rounded: Arguments) -> list[Finding]:
    """Bytes of index keys may be off by one where a float lies between two of them."""
    floats = {n: x for n, x in got.items() if x.dtype is not torch.int8}
    found = judge_all(case, floats, exact, rounded)
    return found + [judge_bytes(n, x, exact[n]) for n, x in got.items() if x.dtype is torch.int8]


MODEL = dict(
    hidden=4096, rank=1024, size=512, rotary=64, index=(64, 128), ranks=1024, entry_page=64
)
case = partial(Case, OP, judge=judge, widen=row_major)
CASES = (
    case("sliding", layer(SLIDING, [130, 5, 300], [2, 0, 1], 2, 8)),
    case(
        "sliding, rows laid out, no projection, fp16",
        layer(SLIDING, [70, -2], None, 3, 3, groups=None, page=16, window=40, sinks=None),
        torch.float16,
    ),
    case("HCA", layer(HCA, [126, 300, 0], [2, 1, 2], 2, 8, ratio=128, entry_page=128)),
    case("CSA, everything selected", layer(CSA, [37, 6, 0], [2, 1, 2], 2, 8)),
    case("CSA, a chunk longer than the ring", layer(CSA, [29, 2], [14, 3], 14, 4, ring=8)),
    case(
        "CSA, index keys of int8, states by page",
        layer(CSA, [21, 7], [1, 2], 2, 4, mode=1, int8=True, index=(16, 128)),
    ),
    case("CSA, row-major weights", layer(CSA, [13, 6], None, 2, 4, form="nd")),
    # the forms of more tokens
    case("CSA, 20 requests", layer(CSA, [5] * 20, None, 1, 1, hidden=4096, groups=1)),
    case("HCA, 36 requests", layer(HCA, [127] * 36, None, 1, 1, ratio=128, groups=1)),
    case("CSA, 36 requests", layer(CSA, [5] * 36, None, 1, 1, hidden=4096, groups=1)),
    case("CSA, 66 requests", layer(CSA, [5] * 66, None, 1, 1, groups=None), cores=(24,)),
    case(
        "32 heads are a tile to turn back",
        layer(SLIDING, [9, 130, 3, 40, 5], None, 2, 32, groups=None, size=512, rotary=64),
        cores=(5,),
    ),
    # the forms of the models' shards
    case("sliding, model sizes", layer(SLIDING, [9], None, 1, 8, groups=1, **MODEL), cores=(24,)),
    case(
        "HCA, model sizes", layer(HCA, [127], None, 1, 8, ratio=128, groups=1, **MODEL), cores=(24,)
    ),
    *(
        case(
            f"CSA, model sizes, a shard of {heads} heads",
            layer(CSA, [300], None, 1, heads, k=512, groups=heads // 8, **MODEL),
            cores=(24,),
        )
        for heads in (8, 16)
    ),
    # as wide as a tile of the compressors, not as deep
    case("CSA, 272 deep", layer(CSA, [13, 6], None, 2, 4, hidden=272)),
    case("CSA, no page of states", without_states(layer(CSA, [13, 6], None, 6, 4, mode=1))),
)
CONTROLS = (
    Control(
        "history of index keys out of the entries' states",
        "compressor",
        "of_state = _own(state, next_state, of_next)\n                own_page",
        "own_page",
        "CSA, a chunk longer than the ring",
    ),
    Control(
        "index keys pooled with the entries' ape",
        "compressor",
        "of_ape = _own(ape, next_ape, of_next)\n            if state",
        "if state",
        "CSA, a chunk longer than the ring",
    ),
    Control(
        "the products of index keys begin at the next token's",
        "compressor",
        "of_token = 2 * of_token\n    own_size",
        "of_token = 2 * COFF * size\n    own_size",
        "CSA, a chunk longer than the ring",
    ),
    Control(
        "states of index keys over those of entries",
        "compressor",
        "own_page = tl.where(of_next, next_state_page, state_page)\n        at = tile",
        "own_page = state_page\n        at = tile",
        "CSA, index keys of int8, states by page",
    ),
    Control(
        "begun anew behind its states",
        OP[4:],
        "from ..common import tune",
        "from types import SimpleNamespace\n\n"
        "tune = SimpleNamespace(stage=lambda part, *given, **named: part(*given, **named))",
        "CSA, a chunk longer than the ring",
        "refuse",
    ),
    *(
        Control(title, "before_attention", old, new, "CSA, a chunk longer than the ring")
        for title, old, new in (
            (
                "the first compressor's states alone",
                'closing["state"] = compressing.keeping(of_entries)',
                'closing["state"] = compressing.keeping(of_entries) | dict(next_size=0)',
            ),
            (
                "index keys to no page",
                "strict=False))",
                "strict=False))\n        del closing['key']",
            ),
            (
                "products of entries a part apart",
                'entry_{name}": value for name, value in entry.items()}',
                'entry_{name}": value for name, value in (entry | dict(width=64)).items()}',
            ),
        )
    ),
    Control(
        "turned again where the projection is begun anew",
        OP[4:],
        """        out = stages.turned_back(out, self.sin, self.cos, in_place=True)
        if self.w_o_a is None:
            return out
        turned = dict(rope_sin=None, rope_cos=None)
        done: Tensor = stages.grouped_o_proj(**self.of_output(out) | turned)
        return done
""",
        """
        def last() -> Tensor:
            grouped_o_proj_pto.turned_back(out, self.sin, self.cos, in_place=True)
            turned = dict(rope_sin=None, rope_cos=None)
            return grouped_o_proj_pto.forward(**self.of_output(out) | turned)

        return tune.stage(last)
""",
        "CSA, a chunk longer than the ring",
        "refuse",
    ),
    Control(
        "index keys without ape",
        OP[4:],
        "_Layer(**arguments).run(STAGES)",
        "_Layer(**arguments | dict(idx_ape=arguments['idx_ape'] * 0)).run(STAGES)",
        "CSA, everything selected",
    ),
)
# of a call by the case's name
LAUNCHES = {"sliding": 9, "HCA": 9, "CSA, everything selected": 12}
