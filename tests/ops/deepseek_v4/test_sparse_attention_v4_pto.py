# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The whole layer of DeepSeek-V4: against Transformers in float64, driven as engines drive it, and
against its stages composed by hand, bit by bit, on every backend."""

from __future__ import annotations

import copy
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import pytest
import torch
from custom.dispatch.common.rope import rotate_last
from torch import Tensor

import custom

from ...support.accuracy import assert_close_to_float64, skip_unless_taken
from ...support.calls import runs_once
from ...support.deepseek_v4 import CSA, HCA, Attention, pairs
from ...support.kernels import capturing
from ...support.layer_v4 import COFF, F64, PAGE, WIDE, drawn, table

OP = "npu_sparse_attention_v4_pto"
NAN = float("nan")
KINDS = ["sliding", "CSA", "HCA"]
LENGTHS = [61, 0, 37, 90, 3]
STATES = {"CSA": ("cmp_state", "idx_state"), "HCA": ("cmp_state",), "sliding": ()}
KEYS = {"CSA": ("cmp_kv", "idx_k"), "HCA": ("cmp_kv",), "sliding": ()}
kinds = pytest.mark.parametrize("kind", KINDS)
with_entries = pytest.mark.parametrize("kind", ["CSA", "HCA"])


# ------------------------------------------------------------ Transformers


@cache
def layer(kind: str, ratio: int | None = None, window: int = 8) -> Attention:
    """With random weights; its entries are of 4 or 8 tokens, or of `ratio`."""
    torch.manual_seed(KINDS.index(kind))
    changes = {} if ratio is None else dict(compress_rates={CSA: ratio, HCA: ratio})
    return Attention(KINDS.index(kind), sliding_window=window, **changes)


@cache
def prompts(
    kind: str, lengths: tuple[int, ...] = tuple(LENGTHS), ratio: int | None = None, window: int = 8
) -> tuple[list[Tensor], list[Tensor]]:
    """(hidden states of each request, what Transformers makes of them)"""
    torch.manual_seed(9)
    of = layer(kind, ratio, window)
    xs = [torch.randn(t, of.config.hidden_size, dtype=F64) for t in lengths]
    return xs, [of.whole(x) if len(x) else x for x in xs]


class Engine:
    """Requests in caches full of NaN, and what an engine keeps about them."""

    def __init__(
        self,
        kind: str,
        requests: int,
        *,
        rewound: int = 1,
        fewer: int = 0,
        reach: int = 128,
        ratio: int | None = None,
        window: int = 8,
        **options: Any,
    ) -> None:
        """`rewound`: the most tokens of a call that may be taken back; a ring has exactly the rows
        that this takes, less `fewer`."""
        self.kind, self.layer = kind, layer(kind, ratio, window)
        c, g = self.layer.config, random.Random(requests)
        self.m = c.compress_rates.get({"CSA": CSA, "HCA": HCA}.get(kind), 0)
        # with entries of one token a page is as large as one of rows
        self.entry_page = 2 if self.m > 1 else PAGE
        self.options = (
            dict(
                ori_win_left=c.sliding_window - 1,
                sparse_count=c.index_topk,
                cmp_ratio=self.m,
                rms_norm_eps=c.rms_norm_eps,
                weight_format="nd",
            )
            | options
        )
        self.weights = self.layer.weights()
        self.length = [0] * requests

        def full(*shape: int) -> Tensor:
            return torch.full(shape, NAN, dtype=F64)

        rows, pages = table(requests, -(-reach // PAGE), g)
        self.caches = dict(ori_kv=full(pages, PAGE, 1, c.head_dim), ori_block_table=rows)
        if self.m:
            coff = COFF[kind]
            states, pages = table(requests, coff * self.m + rewound - 2 - fewer, g)
            columns = -(-(reach // self.m + 1) // self.entry_page)
            entries, entry_pages = table(requests, columns, g)
            self.caches |= dict(state_block_table=states, cmp_block_table=entries)
            sizes = c.head_dim, c.index_head_dim
            for state, keys, size in zip(STATES[kind], KEYS[kind], sizes, strict=False):
                self.caches[state] = full(pages, 1, 2 * coff * size)
                self.caches[keys] = full(entry_pages, self.entry_page, 1, size)

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        of = self.layer.angles(positions)["compress" if self.m else "main"]
        cos, sin = (pairs(u).nan_to_num(1e300) for u in of)
        return sin, cos

    def arguments(self, pieces: Sequence[Tensor]) -> dict[str, Any]:
        used = torch.tensor([len(x) for x in pieces])
        act, size = torch.tensor(self.length) + used, max([1, *map(len, pieces)])
        x = torch.full((len(pieces), size, self.layer.config.hidden_size), NAN, dtype=F64)
        for row, piece in zip(x, pieces, strict=True):
            row[: len(piece)] = piece
        sin, cos = self.angles((act - used)[:, None] + torch.arange(size))
        given = dict(x=x, sin=sin, cos=cos, act_seqs=act, seqused=used)
        if self.m:
            at = custom.entry_positions(act, size, self.m, used)
            given["cmp_sin"], given["cmp_cos"] = self.angles(at)
        return given | self.weights | self.caches | self.options

    def step(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        """One call with the next tokens of each request."""
        given = self.arguments(pieces)
        y = getattr(custom, OP)(**given)
        self.length = given["act_seqs"].tolist()
        for row, piece in zip(y, pieces, strict=True):
            assert not row[len(piece) :].any(), "an absent token"
        return [row[: len(piece)] for row, piece in zip(y, pieces, strict=True)]

    def free(self) -> None:
        """Pages of the window that no later token sees: gone, and poisoned."""
        window, rows = self.options["ori_win_left"] + 1, self.caches["ori_block_table"]
        for i, length in enumerate(self.length):
            for column in range(max(0, length - window + 1) // PAGE):
                if rows[i, column] >= 0:
                    self.caches["ori_kv"][rows[i, column]] = NAN
                    rows[i, column] = -1


def drive(
    e: Engine, xs: Sequence[Tensor], plan: Callable[[int], int], drafts: int = 0
) -> list[Tensor]:
    """plan(left): how many tokens come next; with up to `drafts` tokens a call, some wrong ones
    stand behind them, and all from some place on are taken back."""
    g = random.Random(3)
    out: list[list[Tensor]] = [[] for _ in xs]
    while any(at < len(x) for at, x in zip(e.length, xs, strict=True)):
        pieces, accepted = [], []
        for x, at in zip(xs, e.length, strict=True):
            good = min(len(x) - at, plan(len(x) - at))
            piece = x[at : at + good]
            if drafts and good:
                wrong = torch.randn(g.randrange(drafts - good + 1), x.shape[1], dtype=F64)
                piece, good = torch.cat([piece, wrong]), g.randrange(1, good + 1)
            pieces.append(piece)
            accepted.append(good)
        for i, y in enumerate(e.step(pieces)):
            out[i].append(y[: accepted[i]])
            e.length[i] -= len(y) - accepted[i]
        e.free()
    return [torch.cat(each) if each else x for each, x in zip(out, xs, strict=True)]


def worst(got: Sequence[Tensor], want: Sequence[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(got, want, strict=True) if len(b))


def _mixed() -> Callable[[int], int]:
    g = random.Random(5)
    return lambda left: g.choice([0, 1, 1, 2, 5, 13, 23])


def _drafts() -> Callable[[int], int]:
    g = random.Random(7)
    return lambda left: g.randrange(1, 5)


WAYS: dict[str, Any] = {
    "one by one": dict(plan=lambda: lambda left: 1),
    "sevens": dict(plan=lambda: lambda left: 7),
    "prefill beside decodes": dict(plan=_mixed),
    "whole": dict(plan=lambda: lambda left: left),
    "drafts rejected": dict(plan=_drafts, drafts=6),
}


@pytest.fixture
def exact(monkeypatch):
    """The reference's float64, whatever backend is under test."""
    monkeypatch.setattr(custom.config, "backend", "reference")


@pytest.mark.parametrize("way", WAYS)
@kinds
def test_equals_transformers_however_it_is_driven(kind, way, exact):
    plan, drafts = WAYS[way]["plan"](), WAYS[way].get("drafts", 0)
    xs, want = prompts(kind)
    e = Engine(kind, len(xs), rewound=max(1, drafts))
    assert worst(drive(e, xs, plan, drafts), want) < 1e-10


def test_no_score_is_near_the_edge_of_a_selection():
    """So that roundings swap no entry above."""
    of, found = layer("CSA"), []
    scorer = of.module.compressor.indexer.scorer
    hook = scorer.register_forward_hook(lambda module, given, out: found.append(out))
    try:
        for x in prompts("CSA")[0]:
            if len(x):
                of.whole(x)
    finally:
        hook.remove()
    for scores in found:
        for p, row in enumerate(scores[0]):
            best = row[: (p + 1) // 4].sort(descending=True).values
            k = of.config.index_topk
            assert len(best) <= k or best[k - 1] - best[k] > 1e-9


@pytest.mark.parametrize("shared", [16, 21])
@kinds
def test_prefix_hit(kind, shared, exact):
    """Whole pages are shared, begun ones and the states copied."""
    (a, b), _ = prompts(kind, (50, 43))
    b = torch.cat([a[:shared], b[shared:]])
    e = Engine(kind, 2, rewound=8)
    for at in range(0, shared, 4):
        e.step([a[at : min(at + 4, shared)], a[:0]])

    def take(name: str, pages: str, count: int, page: int) -> None:
        rows, cached = e.caches[pages], e.caches[name]
        rows[1, : count // page] = rows[0, : count // page]
        if count % page:
            cached[rows[1, count // page]] = cached[rows[0, count // page]]

    take("ori_kv", "ori_block_table", shared, PAGE)
    for name in KEYS[kind]:
        take(name, "cmp_block_table", shared // e.m, e.entry_page)
    if kind == "CSA" or (kind == "HCA" and shared % e.m):  # of whole windows HCA needs no state
        for name in STATES[kind]:
            states = e.caches["state_block_table"]
            e.caches[name][states[1]] = e.caches[name][states[0]]
    e.length[1] = shared
    got: list[list[Tensor]] = [[], []]
    while e.length != [len(a), len(b)]:
        pieces = [a[e.length[0] :][:3], b[e.length[1] :][:5]]
        for out, y in zip(got, e.step(pieces), strict=True):
            out.append(y)
    want = [layer(kind).whole(x)[shared:] for x in (a, b)]
    assert worst([torch.cat(out) for out in got], want) < 1e-10


@with_entries
def test_a_ring_of_one_row_less(kind, exact):
    """Refused where no token is ever taken back; else a row that is needed is lost."""
    xs, want = prompts(kind, (37,))
    with pytest.raises(ValueError, match="names a ring of"):
        Engine(kind, 1, fewer=1).step(xs)
    plan, drafts = WAYS["drafts rejected"]["plan"](), WAYS["drafts rejected"]["drafts"]
    [got] = drive(Engine(kind, 1, rewound=drafts, fewer=1), xs, plan, drafts)
    assert not (got - want[0]).abs().max() < 1e-10  # NaN, mostly


def prefixes(kind: str, lengths: Sequence[int], ratio: int | None = None) -> None:
    """Requests that are so many tokens of one prompt, then one more token each."""
    [x], [want] = prompts(kind, (max(lengths) + 1,), ratio)
    e = Engine(kind, len(lengths), ratio=ratio)
    assert worst(e.step([x[:n] for n in lengths]), [want[:n] for n in lengths]) < 1e-10
    got = e.step([x[n : n + 1] for n in lengths])
    assert worst(got, [want[n : n + 1] for n in lengths]) < 1e-10


@with_entries
def test_first_entries(kind, exact):
    """p = m - 2 (none yet), m - 1, m, 2m - 2, 2m - 1, 2m: window -1 has no rows."""
    m = Engine(kind, 1).m
    prefixes(kind, [m - 2, m - 1, m, 2 * m - 2, 2 * m - 1, 2 * m])


@kinds
def test_first_windows(kind, exact):
    """p < W, p = W - 1 and p = W; W is no multiple of a page."""
    prefixes(kind, [1, 6, 7, 8, 9])


@pytest.mark.parametrize("ratio", [1, 2, 3])
@with_entries
def test_entries_of_few_tokens(kind, ratio, exact):
    prefixes(kind, [0, 1, 2, 3, 5, 23], ratio)


@pytest.mark.parametrize(("ratio", "window"), [(3, 1), (5, 3), (7, 17)])
@pytest.mark.parametrize("way", ["prefill beside decodes", "drafts rejected"])
@kinds
def test_odd_ratios_and_windows(kind, way, ratio, window, exact):
    """The smallest rings; neither divides the other, a page, or a chunk."""
    plan, drafts = WAYS[way]["plan"](), WAYS[way].get("drafts", 0)
    xs, want = prompts(kind, (38, 0, 19), ratio, window)
    e = Engine(kind, len(xs), rewound=max(1, drafts), ratio=ratio, window=window)
    assert worst(drive(e, xs, plan, drafts), want) < 1e-10


@with_entries
def test_chunks_begin_inside_a_window_and_are_longer_than_the_ring(kind, exact):
    """Several windows close in one call."""
    [x], [want] = prompts(kind, (61,))
    e = Engine(kind, 1)
    got = [e.step([x[a:b]])[0] for a, b in ((0, 5), (5, 35), (35, 61))]
    assert worst([torch.cat(got)], [want]) < 1e-10


@pytest.mark.parametrize("kept", [1, 2, 5], ids=lambda n: f"{n} kept")
@with_entries
def test_a_close_inside_a_rejected_draft(kind, kept, exact):
    """The window is closed again by other tokens; going back across a close needs the window before
    the last."""
    [x], [want] = prompts(kind, (40,))
    m = Engine(kind, 1).m
    e = Engine(kind, 1, rewound=m + 3)
    at = 3 * m - 2
    got = [e.step([x[:at]])[0]]
    draft = torch.cat([x[at : at + kept], torch.randn(m + 3 - kept, x.shape[1], dtype=F64)])
    got.append(e.step([draft])[0][:kept])
    e.length[0] = at + kept
    while e.length[0] < len(x):
        got.append(e.step([x[e.length[0] :][:3]])[0])
    assert worst([torch.cat(got)], [want]) < 1e-10


@kinds
def test_states_by_page(kind, exact):
    """state_mode 1: a row for every token."""
    [x], [want] = prompts(kind, (37,))
    e = Engine(kind, 1, rewound=64, state_mode=1)
    assert worst([torch.cat([*e.step([x[:18]]), *e.step([x[18:]])])], [want]) < 1e-10


def test_index_keys_transformed(exact):
    """The transform is orthogonal: scores are the same."""
    xs, want = prompts("CSA")
    e = Engine("CSA", len(xs), index_hadamard=True)
    assert worst(drive(e, xs, lambda left: 13), want) < 1e-10


# ------------------------------------------------------------ the stages by hand


def by_hand(g: dict[str, Any]) -> Tensor:
    """The layer out of public ops, in place on the caches of `g`."""
    a = defaultdict(lambda: None, g)
    kv_kind, index_kind = a["kv_kind"] or "none", a["index_kind"] or "none"
    hadamard = bool(a["index_hadamard"])
    lengths = dict(act_seqs=a["act_seqs"], seqused=a["seqused"])

    def of_weights(*names: str) -> dict[str, Any]:
        scales = (f"dequant_scale_{name}" for name in names)
        mode = a["weight_quant_mode"] or 0
        return dict(weight_quant_mode=mode, **{name: a[name] for name in scales})

    query, _, index, weights = custom.npu_sharedkv_prolog_pto(
        a["x"],
        a["w_dq"],
        a["w_uq"],
        a["w_kv"],
        a["gamma_cq"],
        a["gamma_kv"],
        a["sin"],
        a["cos"],
        a["ori_kv"],
        a["ori_block_table"],
        **lengths,
        w_idx_qb=a["w_idx_qb"],
        w_idx_proj=a["w_idx_proj"],
        weight_format="nd",
        kv_kind=kv_kind,
        index_hadamard=hadamard and index_kind == "none",
        **of_weights("w_dq", "w_uq", "w_kv", "w_idx_qb"),
    )
    start = a["act_seqs"] - (a["x"].shape[1] if a["seqused"] is None else a["seqused"])
    chosen = None

    def compress(name: str, norm: str, ape: str, state: str, cached: str, **options: Any) -> None:
        size = a[norm].shape[0]
        custom.npu_compressor(
            a["x"],
            a[f"w_{name}_kv"],
            a[f"w_{name}_gate"],
            a[state],
            a[ape],
            a[norm],
            a["cmp_sin"],
            a["cmp_cos"],
            a["sin"].shape[-1],
            a["cmp_ratio"],
            state_block_table=a["state_block_table"],
            seqused=a["seqused"],
            start_pos=start,
            coff=a[f"w_{name}_kv"].shape[0] // size,
            rotary_mode=2,
            cache_mode=a["state_mode"],
            cmp_cache=a[cached],
            cmp_block_table=a["cmp_block_table"],
            return_cmp_kv=False,
            **options,
        )

    if a["cmp_kv"] is not None:
        compress("cmp", "gamma_cmp", "cmp_ape", "cmp_state", "cmp_kv", kind=kv_kind)
    if a["idx_k"] is not None:
        compress(
            "idx",
            "gamma_idx",
            "idx_ape",
            "idx_state",
            "idx_k",
            kind=index_kind,
            hadamard=hadamard,
            cmp_scale_cache=a["idx_k_scale"],
        )
        options = dict(
            actual_seq_lengths_query=a["seqused"],
            actual_seq_lengths_key=a["act_seqs"],
            block_table=a["cmp_block_table"],
            layout_key="PA_BSND",
            sparse_count=a["sparse_count"],
            cmp_ratio=a["cmp_ratio"],
        )
        if index_kind == "none":
            chosen, _ = custom.npu_lightning_indexer(index, a["idx_k"], weights, **options)
        else:
            values, factors, _ = custom.quantize_index_query(
                index, weights, kind=index_kind, index_hadamard=hadamard
            )
            keys, scales = a["idx_k"], a["idx_k_scale"]
            if scales is None:
                keys, scales = custom.index_cache_views(keys, index_kind)
            chosen = custom.npu_quant_lightning_indexer(
                values, keys, factors, None, scales, 0, 0, **options
            )
    attend = custom.npu_sparse_attn_sharedkv
    if kv_kind == "fp8":
        attend = partial(custom.npu_kv_quant_sparse_attn_sharedkv, kv_quant_mode=1)
    out, _ = attend(
        q=query,
        ori_kv=a["ori_kv"],
        cmp_kv=a["cmp_kv"],
        cmp_sparse_indices=chosen,
        ori_block_table=a["ori_block_table"],
        cmp_block_table=a["cmp_block_table"],
        seqused_q=a["seqused"],
        seqused_kv=a["act_seqs"],
        sinks=a["sinks"],
        softmax_scale=a["softmax_scale"],
        cmp_ratio=a["cmp_ratio"] or 0,
        ori_win_left=a["ori_win_left"],
    )
    if a["w_o_a"] is None:
        return out
    return custom.npu_grouped_o_proj_pto(
        out,
        a["w_o_a"],
        a["w_o_b"],
        a["sin"],
        a["cos"],
        weight_format="nd",
        **of_weights("w_o_a", "w_o_b"),
    )


CACHES = ("ori_kv", "cmp_state", "cmp_kv", "idx_state", "idx_k", "idx_k_scale")


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype is b.dtype and torch.equal(
        a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)
    )


def check(given: dict[str, Any], device: Any, backend: str) -> Tensor:
    """The output and every cache are, bit by bit, those of the stages, of ONE call."""
    skip_unless_taken(given["x"].dtype, device, backend)
    mine, theirs = (copy.deepcopy(given) for _ in range(2))
    with runs_once(OP, backend):
        got, want = getattr(custom, OP)(**mine), by_hand(theirs)
    if given.get("w_o_a") is None:
        sin, cos = (given[name][:, :, None].double() for name in ("sin", "cos"))
        turned = rotate_last(want.double(), sin, cos, inverse=True)
        one = torch.finfo(want.dtype).eps
        assert got.shape == want.shape and got.dtype is want.dtype
        assert ((got.double() - turned).abs() <= one * turned.abs() + 1e-6).all()
    else:
        assert torch.equal(got, want)
    for name in CACHES:
        if given.get(name) is not None:
            assert same_bits(mine[name], theirs[name]), name
    return got


dtypes = pytest.mark.parametrize("dtype", [F64, torch.float16, torch.bfloat16], ids=str)


@pytest.fixture(autouse=True)
def not_on_an_npu(backend):
    if backend == "npu":
        pytest.skip("the Ascend harness has cases at sizes that the kernels take")


@dtypes
@pytest.mark.parametrize("output", [True, False], ids=["projected", "heads"])
@kinds
def test_is_its_stages(kind, output, dtype, device, backend):
    check(drawn(kind, device, dtype, output=output), device, backend)


@kinds
def test_is_near_the_exact_result(kind, device, backend, monkeypatch):
    """Every entry is chosen: roundings swap none."""
    wide = drawn(kind, "cpu", F64, output=kind != "CSA")
    given = {
        n: x.to(device, torch.float16 if n not in WIDE else torch.float32)
        if isinstance(x, Tensor) and x.is_floating_point()
        else x.to(device)
        if isinstance(x, Tensor)
        else x
        for n, x in wide.items()
    }
    many = dict(sparse_count=48)
    got = getattr(custom, OP)(**copy.deepcopy(given | many))
    monkeypatch.setattr(custom.config, "backend", "reference")
    given = {n: x.cpu() if isinstance(x, Tensor) else x for n, x in given.items()}
    exact = {
        n: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x
        for n, x in given.items()
    }
    rounded, exact = (getattr(custom, OP)(**x | many) for x in (given, exact))
    assert_close_to_float64("out", got, rounded, exact)


@pytest.mark.parametrize("used", [[0, 0], [6, 6], [0, 6], [2, 5], None], ids=str)
@kinds
def test_seqused_of_none_all_and_mixed(kind, used, device, backend):
    """What lies in the tokens that are not there is never read: here it is NaN."""
    given = drawn(kind, device, used=used)
    for i, count in enumerate(used or []):
        given["x"][i, count:] = NAN
    out = check(given, device, backend)
    for i, count in enumerate(used or []):
        assert not out[i, count:].any()


@kinds
def test_no_requests(kind, device, backend):
    assert check(drawn(kind, device, starts=[], used=[]), device, backend).shape == (0, 6, 48)


@kinds
def test_no_tokens(kind, device, backend):
    assert check(drawn(kind, device, steps=0, used=[0, 0]), device, backend).shape == (2, 0, 48)


@kinds
def test_tokens_before_the_first(kind, device, backend):
    """act_seqs 0, and one that some of the tokens stand in front of."""
    given = drawn(kind, device, starts=[-6, -2], used=None)
    out = check(given, device, backend)
    assert not out[0].any() and not out[1, :2].any() and out[1, 2:].any()


@pytest.mark.parametrize("name", ["ori_block_table", "state_block_table", "cmp_block_table"])
def test_pages_that_are_not_there(name, device, backend):
    """A table of which nothing, or the second half, is there."""
    for gone in (slice(None), slice(1, None)):
        given = drawn("CSA", device)
        given[name][:, gone] = -1
        before = copy.deepcopy(given)
        check(given, device, backend)
        assert all(same_bits(before[n], given[n]) for n in CACHES if n in given)


@pytest.mark.parametrize("count", [2, 4, 5, 7], ids=lambda n: f"k {n}")
def test_more_as_many_and_fewer_entries_than_are_chosen(count, device, backend):
    """5 are closed at the last token of the first request."""
    check(drawn("CSA", device) | dict(sparse_count=count), device, backend)


def test_equal_scores_choose_the_first_entries(device, backend):
    """Weights of 0: every score is."""
    given = drawn("CSA", device) | dict(sparse_count=2)
    given["w_idx_proj"].zero_()
    got = check(given, device, backend)
    theirs = copy.deepcopy(given)
    by_hand(theirs)
    query = custom.npu_sharedkv_prolog_pto(
        *(
            theirs[n]
            for n in (
                "x",
                "w_dq",
                "w_uq",
                "w_kv",
                "gamma_cq",
                "gamma_kv",
                "sin",
                "cos",
                "ori_kv",
                "ori_block_table",
                "act_seqs",
            )
        ),
        seqused=theirs["seqused"],
        weight_format="nd",
    )[0]
    indices = torch.arange(2, dtype=torch.int32, device=device).expand(2, 6, 1, 2)
    out, _ = custom.npu_sparse_attn_sharedkv(
        query,
        ori_kv=theirs["ori_kv"],
        cmp_kv=theirs["cmp_kv"],
        cmp_ratio=4,
        ori_win_left=7,
        cmp_sparse_indices=indices,
        ori_block_table=theirs["ori_block_table"],
        cmp_block_table=theirs["cmp_block_table"],
        seqused_q=theirs["seqused"],
        seqused_kv=theirs["act_seqs"],
        sinks=theirs["sinks"],
    )
    want = custom.npu_grouped_o_proj_pto(
        out, given["w_o_a"], given["w_o_b"], given["sin"], given["cos"], weight_format="nd"
    )
    assert torch.equal(got, want)


@pytest.mark.parametrize("sink", [float("-inf"), 1e4, float("inf"), None], ids=str)
def test_sinks(sink, device, backend):
    given = drawn("HCA", device)
    if sink is None:
        given["sinks"] = None
    else:
        given["sinks"].fill_(sink)
    out = check(given, device, backend)
    assert out.isfinite().all() and out.any() == (sink is None or sink < 0)


@pytest.mark.parametrize("ratio", [1, 2, 3])
@with_entries
def test_ratios(kind, ratio, device, backend):
    given = drawn(kind, device, m=ratio, entry_page=PAGE if ratio == 1 else 1)
    check(given, device, backend)


@pytest.mark.parametrize("window", [1, 3, 17])
def test_windows(window, device, backend):
    """p < W, p = W - 1, p = W among the tokens; W divides no page."""
    check(drawn("HCA", device, window=window), device, backend)


@pytest.mark.parametrize("heads", [8, 16, 20, 32, 64, 128])
def test_heads_of_a_shard(heads, device, backend):
    one = dict(starts=(15,), steps=1, used=(1,), groups=heads // 4, Ro=4)
    given = drawn("HCA", device, heads=heads, **one)
    check(given, device, backend)


def test_two_requests_share_pages_of_entries(device, backend):
    given = drawn("CSA", device, starts=(20, 33))
    given["cmp_block_table"][1, :2] = given["cmp_block_table"][0, :2]
    check(given, device, backend)


@with_entries
def test_states_addressed_by_page(kind, device, backend):
    check(drawn(kind, device, starts=(3, 0), mode=1), device, backend)


def test_caches_cut_from_one_pool(device, backend):
    """A page of each behind a page of another: strides larger than pages."""
    given = drawn("CSA", device)
    pools = {}
    for name in ("ori_kv", "cmp_state", "cmp_kv", "idx_state", "idx_k"):
        pools[name] = torch.stack([given[name], torch.full_like(given[name], 3)], 1)
        given[name] = pools[name][:, 0]
    whole = {n: x.contiguous() if n in pools else x for n, x in copy.deepcopy(given).items()}
    assert torch.equal(check(given, device, backend), check(whole, device, backend))
    getattr(custom, OP)(**given)
    assert all((pool[:, 1] == 3).all() for pool in pools.values())


def test_offsets_past_2_to_the_31(device, backend):
    """The second page of the window's rows lies so far behind the first."""
    given = drawn("HCA", device, starts=(14,), used=(6,))
    apart = 2**31 + 64
    room = torch.empty(apart + PAGE * 32, dtype=torch.float16, device=device)
    far = room.as_strided((2, PAGE, 1, 32), (apart, 32, 32, 1))
    far.copy_(given["ori_kv"][:2])
    given["ori_block_table"] = torch.tensor([[1, 0, -1]], dtype=torch.int32, device=device)
    near = given | dict(ori_kv=far.contiguous())
    want = getattr(custom, OP)(**copy.deepcopy(near))
    assert torch.equal(getattr(custom, OP)(**given | dict(ori_kv=far)), want)


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_index_quantized_keys(kind, device, backend):
    for hadamard in (False, True):
        given = drawn("CSA", device, Di=128) | dict(index_kind=kind, index_hadamard=hadamard)
        pages, page = given["idx_k"].shape[:2]
        values = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}[kind]
        given["idx_k"] = torch.zeros(pages, page, 1, 128, dtype=values, device=device)
        scale = torch.float32 if kind == "fp8" else torch.float16
        given["idx_k_scale"] = torch.ones(pages, page, 1, dtype=scale, device=device)
        apart = check(given, device, backend)
        if kind == "fp8":
            packed = torch.zeros(pages, page, 132, dtype=torch.uint8, device=device)
            custom.index_cache_views(packed, kind)[1].fill_(1)
            given |= dict(idx_k=packed, idx_k_scale=None)
            assert torch.equal(check(given, device, backend), apart)


@pytest.mark.parametrize("mode", [1, 2, 4])
@kinds
def test_quantized_weights(kind, mode, device, backend):
    check(drawn(kind, device, quant=mode, output=kind != "HCA"), device, backend)


@kinds
def test_quantized_rows(kind, device, backend):
    given = drawn(kind, device, D=512, heads=2, steps=5, used=(5, 4)) | dict(kv_kind="fp8")
    for name in ("ori_kv", "cmp_kv"):
        if name in given:
            pages, page = given[name].shape[:2]
            given[name] = torch.zeros(pages, page, 1, 584, dtype=torch.uint8, device=device)
    check(given, device, backend)


def test_a_captured_step_whose_lengths_change(device, backend):
    """Windows close in one replay and not in another; nothing is read on the host."""
    if device.type != "cuda":
        pytest.skip("needs a GPU: there are no CUDA graphs elsewhere")
    given = drawn("CSA", device, steps=2, used=(2, 1))
    eager = copy.deepcopy(given)
    getattr(custom, OP)(**copy.deepcopy(given))  # compiles
    graph = torch.cuda.CUDAGraph()
    with capturing(graph, device):
        out = getattr(custom, OP)(**given)
    for step in range(5):
        for each in (given, eager):
            each["act_seqs"].copy_(torch.tensor([16 + step, 1 + 2 * step]))
            each["seqused"].copy_(torch.tensor([1 + step % 2, 1]))
        graph.replay()
        assert torch.equal(out, getattr(custom, OP)(**eager))


# ------------------------------------------------------------ what is refused


REFUSED = pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("HCA", dict(cmp_state=None), "`cmp_state` is missing, expected beside `w_cmp_kv`"),
        ("HCA", dict(cmp_sin=None, cmp_cos=None), "`cmp_sin`, `cmp_cos` are missing, expected"),
        ("CSA", dict(idx_k=None), "`idx_k` is missing, expected beside `w_idx_qb`"),
        ("CSA", dict(w_idx_kv=None, gamma_idx=None), "`w_idx_kv`, `gamma_idx` are missing"),
        ("sliding", dict(w_o_a=None), "`w_o_a` is missing, expected beside `w_o_b`"),
        ("sliding", dict(cmp_ratio=4), "`cmp_ratio` is 4 and `w_cmp_kv`, .*`cmp_block_table` are"),
        ("HCA", dict(cmp_ratio=0), "`cmp_ratio` is 0, expected at least 1"),
        ("HCA", dict(index_kind="int8"), "`index_kind` is given and `w_idx_qb`, .* are missing"),
        ("HCA", dict(index_hadamard=True), "`index_hadamard` is given and `w_idx_qb`"),
        ("CSA", dict(index_kind="mxfp4"), "`index_kind` is 'mxfp4', expected one of"),
        ("CSA", dict(index_kind="fp8"), "the index dim Di is 16, expected 128"),
        ("HCA", dict(kv_kind="int8"), "`kv_kind` is 'int8', expected one of"),
        ("HCA", dict(state_mode=3), "`state_mode` is 3 .* cannot go back"),
        ("HCA", dict(weight_quant_mode=3), r"`weight_quant_mode` is 3 \(mxfp8, Ascend 950\)"),
        (
            "CSA",
            dict(dequant_scale_w_o_a=torch.ones(2, 1, 16)),
            "`dequant_scale_w_o_a` is given,",
        ),
        ("CSA", dict(dequant_scale_w_uq=torch.ones(1, 128)), "`dequant_scale_w_uq` is given, exp"),
        ("HCA", dict(ori_win_left=-1), "`ori_win_left` is -1, expected at least 0"),
        ("HCA", dict(rms_norm_eps=NAN), "`rms_norm_eps` is nan"),
        ("CSA", dict(sparse_count=0), "`sparse_count` is 0, expected at least 1"),
        ("HCA", dict(act_seqs=torch.tensor([49, 1])), "`act_seqs` is .49, 1., expected lengths"),
        ("HCA", dict(seqused=torch.tensor([7, 1])), "`seqused` is .7, 1., expected lengths"),
    ],
    ids=lambda x: "" if isinstance(x, dict) else None,
)


@REFUSED
def test_refused_before_anything_is_written(kind, change, message, monkeypatch):
    monkeypatch.setattr(custom.config, "debug", True)  # looks at lengths
    given = drawn(kind, "cpu")
    before = {n: given[n].clone() for n in CACHES if n in given}
    with pytest.raises(ValueError, match=f"^{OP}: {message}"):
        getattr(custom, OP)(**given | change)
    assert all(same_bits(given[n], x) for n, x in before.items())


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("cmp_ape", lambda x: x.half(), "is float16, expected float32"),
        ("gamma_idx", lambda x: x.half(), "is float16, expected float32"),
        ("cmp_state", lambda x: x.half(), "is float16, expected float32"),
        ("cmp_state", lambda x: x[..., 1:].contiguous(), "has shape"),
        ("idx_state", lambda x: x[1:], "has shape"),
        ("idx_k", lambda x: x[1:], "has shape"),
        ("sinks", lambda x: x.half(), "is float16, expected float32"),
        ("w_cmp_kv", lambda x: x[1:], "has 63 rows, expected D=32"),
        ("sin", lambda x: x[..., 1:].contiguous(), "has shape|the rotary size Dr is 7"),
        ("cmp_sin", lambda x: x[:, :1].contiguous(), "has shape"),
        ("state_block_table", lambda x: x[:, :2].contiguous(), "names a ring of 6 rows"),
        ("cmp_kv", lambda x: x.flatten(0, 1)[:30].view(-1, 3, 1, 32), "has pages of 3 entries"),
        ("w_o_b", lambda x: x[:, 1:].contiguous(), "has shape"),
        ("w_o_a", lambda x: x[:1].expand(3, -1, -1).contiguous(), "has 3 groups, expected"),
    ],
)
def test_tensors_that_do_not_fit(name, change, message):
    given = drawn("CSA", "cpu")
    before = {n: given[n].clone() for n in CACHES if n in given}
    with pytest.raises((ValueError, TypeError), match=f"^{OP}: .*({message})"):
        getattr(custom, OP)(**given | {name: change(given[name])})
    assert all(same_bits(given[n], x) for n, x in before.items())


def test_a_stage_that_cannot_run_is_asked_before_the_first_one_writes(device, backend):
    """The attention: the prolog before it could."""
    given = drawn("sliding", device, D=544, heads=2)
    before = given["ori_kv"].clone()
    if backend == "reference":
        check(given, device, backend)
        return
    with pytest.raises(custom.NotSupported, match="544"):
        getattr(custom, OP)(**given)
    assert same_bits(given["ori_kv"], before)


@pytest.mark.parametrize("name", ["x", "w_cmp_kv", "sinks"])
def test_no_gradient(name):
    given = drawn("HCA", "cpu", torch.float32)
    before = given["ori_kv"].clone()
    given[name].requires_grad_()
    with pytest.raises(RuntimeError, match=f"^{OP}: `{name}` requires grad"):
        getattr(custom, OP)(**given)
    assert same_bits(given["ori_kv"], before)
    with torch.no_grad():
        getattr(custom, OP)(**given)
