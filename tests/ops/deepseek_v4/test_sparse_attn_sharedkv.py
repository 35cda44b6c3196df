# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Attention over window rows and entries against a loop over query tokens, a loop over numbers,
Hugging Face's DeepSeek-V4, and the ops that give the same in more calls."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from custom.dispatch.register import overload
from custom.dispatch.registry import BY_NAME
from torch import Tensor

import custom

from ...support import deepseek_v4, interpreted
from ...support.accuracy import assert_close_to_float64, every_dtype, skip_unless_taken
from ...support.calls import assert_refuses, runs_once
from ...support.kernels import INTERPRETED, replayed
from ...support.ragged import BEYOND, ints, run, unpack
from ...support.samples import sample
from ...support.shared_kv import LAYOUTS, Problem, in_pages, packed, unpacked

OP = "npu_sparse_attn_sharedkv"
KINDS = {"sliding": dict(m=0), "HCA": dict(m=8), "CSA": dict(m=4, count=5)}


def half(backend: str) -> torch.dtype:
    return torch.float64 if backend == "reference" else torch.float16


def check(problem: Problem, device, backend, dtype=None, layouts=("BSND", "PA_ND"), **more):
    dtype = half(backend) if dtype is None else dtype
    problem.rounded_to(dtype)
    given = problem.arguments(layouts, device, dtype) | more
    out, lse = run(OP, backend, **given)
    assert out.shape == given["q"].shape and out.dtype is dtype
    assert lse.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
    assert list(lse.shape) == [*out.shape[:-3], 1, *out.shape[-3:-1]]
    got, padding = problem.unpack(out, layouts[0])
    got_lse, no_lse = problem.unpack(lse.squeeze(-3), layouts[0])
    assert (padding == 0).all() and (no_lse == -torch.inf).all()
    exact = problem.solved()
    plain = problem.solved(dtype)
    wide = problem.solved(torch.float64 if dtype is torch.float64 else torch.float32)
    assert_close_to_float64("out", got, plain[0], exact[0])
    # matrix units cut the running sum off, once for 16 channels
    cut = 0.0
    finite = exact[1][exact[1].isfinite()]
    if backend == "cuda" and finite.numel():
        cut = given["q"].shape[-1] / 32 * torch.finfo(torch.float32).eps * finite.abs().max().item()
    assert_close_to_float64("lse", got_lse, wide[1], exact[1], beyond=cut)
    alone, none = run(OP, backend, **given | dict(return_softmax_lse=False))
    assert torch.equal(alone, out) and list(none.shape) == [0]
    return out, lse


@pytest.mark.parametrize("layouts", LAYOUTS, ids="-".join)
@pytest.mark.parametrize("kind", KINDS)
@every_dtype
def test_every_layout(dtype, kind, layouts, device, backend):
    skip_unless_taken(dtype, device, backend)
    check(Problem(**KINDS[kind]), device, backend, dtype, layouts)


def test_a_loop_over_numbers(device, backend):
    """Two heads, one token behind six rows and two entries of 3 tokens each, in Python's floats."""
    q, rows, entries = torch.randn(2, 16), torch.randn(6, 16), torch.randn(2, 16)
    q, rows, entries = (x.half().double() for x in (q, rows, entries))
    sinks = [0.5, -1.0]
    keys = [*rows[2:].tolist(), *entries.tolist()]  # a window of 4
    want, logs = [], []
    for head, sink in zip(q.tolist(), sinks, strict=True):
        z = [sum(a * b for a, b in zip(head, k, strict=True)) / 4 for k in keys]
        weights = [math.exp(x) for x in z]
        below = sum(weights) + math.exp(sink)
        want.append(
            [sum(w * k[d] for w, k in zip(weights, keys, strict=True)) / below for d in range(16)]
        )
        logs.append(math.log(sum(weights)))
    dtype = half(backend)
    cache, table = in_pages([rows.to(dtype)], 16)
    compressed, entry_table = in_pages([entries.to(dtype)], 1)
    out, lse = run(
        OP,
        backend,
        q=q.to(device, dtype)[None, None],
        ori_kv=cache.to(device),
        cmp_kv=compressed.to(device),
        ori_block_table=table.to(device),
        cmp_block_table=entry_table.to(device),
        seqused_kv=ints([6], device),
        cmp_ratio=3,
        ori_win_left=3,
        sinks=torch.tensor(sinks).to(device, lse_dtype(dtype)),
        return_softmax_lse=True,
    )
    near = dict(rtol=1e-12, atol=1e-12) if dtype is torch.float64 else dict(rtol=0, atol=2e-3)
    torch.testing.assert_close(
        out[0, 0].double().cpu(), torch.tensor(want, dtype=torch.float64), **near
    )
    torch.testing.assert_close(
        lse[0, 0, 0].double().cpu(), torch.tensor(logs, dtype=torch.float64), **near
    )


def assert_same(x: Tensor, y: Tensor) -> None:
    """But for the order of sums."""
    torch.testing.assert_close(x, y, rtol=0, atol=1e-13 if x.dtype is torch.float64 else 2e-3)


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


# ------------------------------------------------------------ Hugging Face's code


@pytest.fixture(scope="module")
def hugging_face():
    """What each kind of layer hands to its attention, and what comes back: (layer, q [S, N, D],
    keys [S + E, D], mask, indices, out [S, N, D]), in float64."""
    modeling = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    kinds = dict(
        sliding="sliding_attention",
        CSA="compressed_sparse_attention",
        HCA="heavily_compressed_attention",
    )
    config = deepseek_v4.config(layer_types=[*kinds.values()])
    rotary = modeling.DeepseekV4RotaryEmbedding(config).double()
    x = torch.randn(1, 61, 40, dtype=torch.float64)
    positions = torch.arange(61)[None]
    mask = modeling.create_sliding_window_causal_mask(
        config=config,
        inputs_embeds=x,
        attention_mask=None,
        past_key_values=None,
        position_ids=positions,
    )
    angles = {k: rotary(x, positions, layer_type=k) for k in ("main", "compress")}
    plain, found = modeling.eager_attention_forward, {}
    for number, kind in enumerate(kinds):
        layer = modeling.DeepseekV4Attention(config, number).double().eval()
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, std=0.35 if parameter.ndim > 1 else 0.5)
        kept: list = []

        def attention(module, q, k, v, mask, kept=kept, **options):
            out = plain(module, q, k, v, mask, **options)
            kept.extend((q[0].mT, k[0, 0], mask, out[0][0]))
            return out

        chosen: list = [None]
        if kind == "CSA":
            layer.compressor.indexer.register_forward_hook(
                lambda module, given, out, chosen=chosen: chosen.append(out[0])
            )
        modeling.eager_attention_forward = attention
        try:
            with torch.no_grad():
                layer(x, angles, positions, mask, None)
        finally:
            modeling.eager_attention_forward = plain
        q, k, seen, out = kept
        found[kind] = (layer, q.transpose(-1, -2).transpose(0, 1), k, seen, chosen[-1], out)
    return plain, found


@pytest.mark.parametrize("layouts", LAYOUTS, ids="-".join)
@pytest.mark.parametrize("kind", KINDS)
def test_hugging_face(kind, layouts, hugging_face, device, backend):
    """Its attention of a whole prompt, and ours of pieces of that prompt as requests."""
    if backend != "reference":
        pytest.skip("in float64")
    layer, q, k, _, chosen, want = hugging_face[1][kind]
    problem = Problem([(61, 61), (1, 29), (7, 40), (3, 5)], **KINDS[kind])
    problem.q = [q[n - s : n] for s, n in zip(problem.used, problem.length, strict=True)]
    problem.rows = [k[:n] for n in problem.length]
    problem.sinks = layer.sinks.detach()
    if problem.m:
        problem.entries = [k[61:][: n // problem.m] for n in problem.length]
    if problem.indices is not None:
        problem.indices = [
            chosen[n - s : n, None].int() for s, n in zip(problem.used, problem.length, strict=True)
        ]
    out, _ = run(OP, backend, **problem.arguments(layouts, device))
    got = problem.unpack(out, layouts[0])[0]
    exact = [want[n - s : n] for s, n in zip(problem.used, problem.length, strict=True)]
    assert (got - torch.cat(exact)).abs().max() < 1e-13


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_hugging_face(kind, hugging_face, device, backend):
    """By autograd through its attention."""
    if backend != "reference":
        pytest.skip("in float64")
    plain, found = hugging_face
    layer, q, k, mask, chosen, _ = found[kind]
    q, k = q.clone().requires_grad_(), k.clone().requires_grad_()
    layer.sinks.grad = None
    theirs = plain(layer, q.transpose(0, 1)[None], k[None, None], k[None, None], mask, 32**-0.5)[0]
    grad = torch.randn_like(theirs)
    theirs.backward(grad)
    want = q.grad, k.grad, layer.sinks.grad
    ours, keys, sinks = (x.detach().clone().requires_grad_() for x in (q, k, layer.sinks))
    options = {}
    if kind != "sliding":
        options = dict(cmp_kv=keys[None, 61:, None], cmp_ratio=KINDS[kind]["m"])
    if kind == "CSA":
        options["cmp_sparse_indices"] = chosen[None, :, None].int()
    out, _ = custom.npu_sparse_attn_sharedkv(
        ours[None],
        ori_kv=keys[None, :61, None],
        sinks=sinks,
        ori_win_left=7,
        layout_kv="BSND",
        **options,
    )
    out.backward(grad)
    for x, y in zip((ours.grad, keys.grad, sinks.grad), want, strict=True):
        assert (x - y).abs().max() < 1e-12


# ------------------------------------------------------------ today's ops, merged


@pytest.mark.parametrize("count", [6, 40])
def test_two_selections_and_a_merge(count, device, backend):
    """Every token its own request of npu_sparse_flash_attention, over rows and over entries."""
    dtype = half(backend)
    requests = [(3, 50), (3, 23), (3, 5)]
    problem = Problem(requests, m=4, count=count, heads=16, size=64, entry_page=16)
    given = problem.rounded_to(dtype).arguments(("TND", "PA_ND"), device, dtype, freed=False)
    out, lse = run(OP, backend, **given)
    p = torch.tensor([t for i in range(3) for t in problem.positions(i)])

    def part(cache: Tensor, picked: Tensor, limit: Tensor, table: Tensor):
        got, top, total = torch.ops.custom.npu_sparse_flash_attention(
            given["q"][:9, None],
            cache,
            None,
            picked,
            64**-0.5,
            layout_kv="PA_BSND",
            block_table=table.repeat_interleave(3, 0),
            sparse_mode=0,
            return_softmax_lse=True,
            actual_seq_lengths_kv=limit.to(device, torch.int32),
        )
        return got[:, 0], (top + total.log())[:, 0, 0]

    near = (p[:, None] - 7 + torch.arange(8)).clamp(min=-1).int()
    a = part(given["ori_kv"], near[:, None, None].to(device), p + 1, given["ori_block_table"])
    b = part(
        given["cmp_kv"],
        given["cmp_sparse_indices"][:9, None],
        (p + 1) // 4,
        given["cmp_block_table"],
    )
    merged, both = custom.npu_merge_states(torch.stack([a[0], b[0]]), torch.stack([a[1], b[1]]))
    merged = merged.to(both) * torch.sigmoid(both - given["sinks"])[..., None]
    # three outputs were rounded on the way
    most = (
        1e-14 if dtype is torch.float64 else 3 * torch.finfo(dtype).eps * float(merged.abs().max())
    )
    near_to = dict(rtol=0, atol=most)
    torch.testing.assert_close(out[:9].double(), merged.double(), **near_to)
    torch.testing.assert_close(lse[0, :9].double(), both.double(), **near_to)


# ------------------------------------------------------------ edges


def one(position: int, device, backend, used: int = 1, **options) -> None:
    check(Problem([(used, position + 1)], **options), device, backend)


@pytest.mark.parametrize("p", [0, 1, 6, 7, 8, 9, 15, 16, 17])
@pytest.mark.parametrize("kind", KINDS)
def test_window_and_position(kind, p, device, backend):
    """p below, at and behind W - 1 and W, where W is 8."""
    one(p, device, backend, **KINDS[kind])


@pytest.mark.parametrize("window", [1, 5, 16, 24, 100])
def test_pages_that_do_not_divide_the_window(window, device, backend):
    check(Problem([(2, 61), (3, 18)], window=window, count=3), device, backend)


@pytest.mark.parametrize("m", [1, 2, 3, 4, 128])
@pytest.mark.parametrize("count", [None, 4])
def test_ratios(m, count, device, backend):
    check(Problem([(3, 130), (1, m), (2, 2 * m - 1)], m=m, count=count), device, backend)


@pytest.mark.parametrize("p", [2, 3, 4, 6, 7])
def test_the_entry_that_closes_at_a_token_is_visible_to_it(p, device, backend):
    """(p + 1) // m, not p // m: the last entry would change the result."""
    problem = Problem([(1, p + 1)], m=4, sinks=False)
    assert len(problem.seen(0, 0)[1]) == (p + 1) // 4
    check(problem, device, backend)


@pytest.mark.parametrize("count", [1, 14, 15, 16, 40])
def test_more_indices_than_entries(count, device, backend):
    """All 15 entries in ascending order, then -1; and fewer than there are."""
    problem = Problem([(2, 60)], m=4, count=count)
    every = torch.full((2, 1, count), -1, dtype=torch.int32)
    every[..., :15] = torch.arange(min(count, 15))
    problem.indices = [every]
    out, _ = check(problem, device, backend)
    if count >= 15:
        problem.indices = None
        assert_same(out, check(problem, device, backend)[0])


def test_indices_that_name_nothing(device, backend):
    """-1, far below 0, the entry that closes next, one past the table, the ends of 32 bits."""
    problem = Problem([(2, 41)], m=4, count=8, sinks=False)
    wild = [-1, -5, 10, 11, 1000, 2**31 - 1, -(2**31), 2**30]
    problem.indices = [torch.tensor([[wild], [wild]], dtype=torch.int32)]
    out, lse = check(problem, device, backend)
    problem.indices, problem.m, problem.entries = None, 0, None
    alone = check(problem, device, backend)
    assert_same(out, alone[0])
    assert_same(lse, alone[1])


def test_64_bit_indices_and_lengths(device, backend):
    problem = Problem(count=6)
    given = problem.arguments(("TND", "PA_ND"), device, half(backend))
    want = run(OP, backend, **given)
    whole = {n: x.long() for n, x in given.items() if getattr(x, "dtype", None) is torch.int32}
    whole["cmp_sparse_indices"][whole["cmp_sparse_indices"] == 2**31 - 1] = 2**32  # 0 in 32 bits
    for x, y in zip(run(OP, backend, **given | whole), want, strict=True):
        assert torch.equal(x, y)


def test_equal_indices_count_apart(device, backend):
    problem = Problem([(1, 33)], m=4, count=6, sinks=False)
    problem.indices = [torch.tensor([[[3, 3, 3, 7, 0, 0]]], dtype=torch.int32)]
    check(problem, device, backend)


@pytest.mark.parametrize("value", [-math.inf, 1e4, math.inf, None])
def test_sinks(value, device, backend):
    problem = Problem(count=5, sinks=False)
    dtype = half(backend)
    given = problem.rounded_to(dtype).arguments(("TND", "PA_ND"), device, dtype)
    plain = run(OP, backend, **given)
    sinks = (
        None if value is None else torch.full((4,), value, device=device, dtype=lse_dtype(dtype))
    )
    out, lse = run(OP, backend, **given | dict(sinks=sinks))
    wanted = torch.zeros_like(out) if value and value > 0 else plain[0]
    if backend == "reference":
        assert torch.equal(lse, plain[1]) and torch.equal(out, wanted)
    else:  # kernels of two compilations
        torch.testing.assert_close(lse, plain[1], rtol=2e-6, atol=2e-6)
        torch.testing.assert_close(out, wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("sinks", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_to_see(kind, sinks, device, backend):
    """A table of no pages at all: out 0, lse -inf, no NaN, whatever the sink."""
    problem = Problem([(2, 21), (1, 3)], **KINDS[kind], sinks=sinks)
    given = problem.arguments(("BSND", "PA_ND"), device, half(backend))
    tables = {n: torch.full_like(x, -1) for n, x in given.items() if n.endswith("block_table")}
    for value in (-torch.inf, torch.inf, 3.0) if sinks else (None,):
        if value is not None:
            given["sinks"].fill_(value)
        out, lse = run(OP, backend, **given | tables)
        assert (out == 0).all() and (lse == -torch.inf).all()


def test_pages_that_are_not_there(device, backend):
    """-1 in each table, and numbers of pages that the cache does not have."""
    problem = Problem([(3, 61)], m=4, window=40, entry_page=4, sinks=False)
    dtype = half(backend)
    given = problem.rounded_to(dtype).arguments(("BSND", "PA_ND"), device, dtype)
    rows, entries = given["ori_block_table"], given["cmp_block_table"]
    rows[0, 2], entries[0, 1], entries[0, 3] = -1, -1, 2**30
    keep = [t for t in range(61) if t // 16 != 2], [w for w in range(15) if w // 4 not in (1, 3)]
    problem.seen = lambda i, j: tuple(  # type: ignore[method-assign]
        [x for x in seen if x in kept]
        for seen, kept in zip(Problem.seen(problem, i, j), keep, strict=True)
    )
    out, lse = run(OP, backend, **given)
    exact, plain = problem.solved(), problem.solved(dtype)
    assert_close_to_float64("out", out[0, :3], plain[0], exact[0])
    wide = problem.solved(lse_dtype(dtype))
    assert_close_to_float64("lse", lse[0, 0, :3], wide[1], exact[1])


def test_two_requests_share_the_pages_of_entries(device, backend):
    problem = Problem([(2, 40), (3, 33)], m=4, count=6)
    problem.rounded_to(half(backend))
    problem.entries[1] = problem.entries[0][:8]
    given = problem.arguments(("BSND", "PA_ND"), device, half(backend))
    want = run(OP, backend, **given)
    shared = given["cmp_block_table"].clone()
    shared[1] = shared[0]
    for x, y in zip(run(OP, backend, **given | dict(cmp_block_table=shared)), want, strict=True):
        assert torch.equal(x, y)


def test_a_ring_of_pages(device, backend):
    """A table that repeats three pages holds the rows of a long request."""
    problem = Problem([(2, 200)], m=0, window=17)
    dtype = half(backend)
    given = problem.rounded_to(dtype).arguments(("BSND", "PA_ND"), device, dtype)
    cache = torch.full((3, 16, 1, 32), torch.nan, dtype=dtype)
    for t in range(200 - 2 - 16, 200):
        cache[t // 16 % 3, t % 16, 0] = problem.rows[0][t].to(dtype)
    table = (torch.arange(13, dtype=torch.int32) % 3)[None].to(device)
    ring = run(OP, backend, **given | dict(ori_kv=cache.to(device), ori_block_table=table))
    for x, y in zip(ring, run(OP, backend, **given), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_replays_with_other_lengths(kind, device, backend):
    """Windows move and entries close between replays, which hold on to no length."""
    problem = Problem([(2, 61), (2, 40)], **KINDS[kind])
    given = problem.arguments(("BSND", "PA_ND"), device, half(backend), freed=False)
    replay = replayed(device, lambda: run(OP, backend, **given))
    for step in range(5):
        given["seqused_kv"].copy_(ints([9 + 13 * step, 40 - 9 * step], device))
        given["seqused_q"].copy_(ints([1 + step % 2, 2 - step % 2], device))
        for x, y in zip(replay(), run(OP, backend, **given), strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize("layouts", LAYOUTS, ids="-".join)
def test_no_requests_and_no_tokens(layouts, device, backend):
    given = Problem(count=3).arguments(layouts, device, half(backend))
    none = dict(given)
    for name in ("ori_block_table", "cmp_block_table", "seqused_kv", "seqused_q"):
        if name in none:
            none[name] = none[name][:0]
    if layouts[0] == "TND":
        none |= {n: x[:1] for n, x in given.items() if n.startswith("cu_")}
    else:
        none |= dict(q=given["q"][:0], cmp_sparse_indices=given["cmp_sparse_indices"][:0])
        if layouts[1] == "BSND":
            none |= dict(ori_kv=given["ori_kv"][:0], cmp_kv=given["cmp_kv"][:0])
    out, lse = run(OP, backend, **none)
    assert out.shape == none["q"].shape and (out == 0).all() and (lse == -torch.inf).all()
    if layouts[0] == "TND":
        none |= dict(q=given["q"][:0], cmp_sparse_indices=given["cmp_sparse_indices"][:0])
        out, lse = run(OP, backend, **none)
        assert list(out.shape) == [0, 4, 32] and list(lse.shape) == [1, 0, 4]


def test_no_entries_at_all(device, backend):
    """Caches and selections of size 0."""
    problem = Problem([(1, 40), (2, 21)], m=4, count=5)
    dtype = half(backend)
    given = problem.rounded_to(dtype).arguments(("BSND", "PA_ND"), device, dtype)
    sliding = {n: x for n, x in given.items() if not n.startswith("cmp")}
    want = run(OP, backend, **sliding)
    for changes in (
        dict(cmp_kv=given["cmp_kv"][:0]),
        dict(cmp_block_table=given["cmp_block_table"][:, :0]),
        dict(cmp_sparse_indices=given["cmp_sparse_indices"][..., :0]),
    ):
        for x, y in zip(run(OP, backend, **given | changes), want, strict=True):
            assert_same(x, y)


def test_sums_that_do_not_begin_at_0(device, backend):
    """Tokens, rows and entries ahead of the first request are nobody's."""
    problem = Problem(count=5)
    dtype = half(backend)
    given = problem.rounded_to(dtype).arguments(("TND", "TND"), device, dtype)
    want = run(OP, backend, **given)
    ahead = dict(given)
    for name, by in (("q", 3), ("ori_kv", 5), ("cmp_kv", 2), ("cmp_sparse_indices", 3)):
        x = given[name]
        fill = torch.nan if x.is_floating_point() else 0
        ahead[name] = torch.cat([x.new_full((by, *x.shape[1:]), fill), x])
    for name, by in (("cu_seqlens_q", 3), ("cu_seqlens_ori_kv", 5), ("cu_seqlens_cmp_kv", 2)):
        ahead[name] = given[name] + by
    out, lse = run(OP, backend, **ahead)
    assert torch.equal(out[3:], want[0]) and torch.equal(lse[:, 3:], want[1])
    assert (out[:3] == 0).all() and (lse[:, :3] == -torch.inf).all()


def test_tokens_that_are_used_of_packed_ones(device, backend):
    """seqused_q cuts each request of a TND query; the window ends at the last of them."""
    problem = Problem([(2, 40), (1, 7), (0, 9)], count=4)
    dtype = half(backend)
    given = problem.rounded_to(dtype).arguments(("TND", "PA_ND"), device, dtype)
    want = run(OP, backend, **given)
    pad = given["q"].new_full((1, 4, 32), torch.nan)
    none = given["cmp_sparse_indices"][:1]
    spread = dict(
        q=torch.cat([given["q"][:2], pad, given["q"][2:3], pad, pad]),
        cmp_sparse_indices=torch.cat(
            [given["cmp_sparse_indices"][:2], none, given["cmp_sparse_indices"][2:3], none, none]
        ),
        cu_seqlens_q=ints([0, 3, 5, 6], device),
        seqused_q=ints([2, 1, 0], device),
    )
    out, lse = run(OP, backend, **given | spread)
    there, gone = [0, 1, 3], [2, 4, 5]
    assert torch.equal(out[there], want[0][:3]) and torch.equal(lse[0, there], want[1][0, :3])
    assert (out[gone] == 0).all() and (lse[0, gone] == -torch.inf).all()


@pytest.mark.parametrize("far, dtype", BEYOND)
def test_lengths_beyond_the_tensors_end_with_them(far, dtype, device, backend):
    problem = Problem([(3, 48), (2, 21)], count=4)
    given = problem.arguments(("BSND", "BSND"), device, half(backend))
    given |= {n: given[n][:, :48] for n in ("ori_kv",)} | {
        n: given[n][:, :3] for n in ("q", "cmp_sparse_indices")
    }
    want = run(OP, backend, **given)
    beyond = dict(
        seqused_q=ints([far, 2], device, dtype), seqused_kv=ints([far, 21], device, dtype)
    )
    for x, y in zip(run(OP, backend, **given | beyond), want, strict=True):
        assert torch.equal(x, y)
    below = dict(seqused_q=ints([-far, 2], device, dtype))
    out, _ = run(OP, backend, **given | below)
    assert (out[0] == 0).all() and torch.equal(out[1], want[0][1])


def test_rows_behind_2_to_the_31(device, backend):
    """Pages that begin that many numbers into a pool, which is one page, repeated by a stride."""
    problem = Problem([(2, 40)], m=4, count=5)
    dtype = torch.float16
    given = problem.rounded_to(dtype).arguments(("BSND", "PA_ND"), device, dtype)
    want = run(OP, backend, **given)
    if device.type == "cpu":
        pool = torch.empty(2**31 + 2**20, dtype=dtype)  # of which few pages are ever touched
    else:
        pool = torch.empty(2**31 + 2**20, dtype=dtype, device=device)
    far = {}
    for name in ("ori_kv", "cmp_kv"):
        cache = given[name]
        step = 2**31 // (len(cache) - 1)
        spread = pool.as_strided(cache.shape, (step, 32, 32, 1), 64 if name == "ori_kv" else 8192)
        spread.copy_(cache)
        far[name] = spread
        for x, y in zip(run(OP, backend, **given | far), want, strict=True):
            assert torch.equal(x, y)
        far.clear()


@pytest.mark.parametrize("heads", [1, 3, 8, 16, 20, 32, 64, 128])
def test_heads_of_a_shard(heads, device, backend):
    check(Problem([(2, 50), (1, 9)], count=7, heads=heads), device, backend)


@pytest.mark.parametrize("size", [16, 48, 512])
def test_sizes(size, device, backend):
    check(Problem([(2, 50), (1, 9)], count=7, size=size, heads=2), device, backend)


@pytest.mark.parametrize("scale", [0.0, None, 0.3, -0.2])
def test_scale(scale, device, backend):
    problem = Problem([(2, 50)], count=7)
    problem.scale = scale or None
    check(problem, device, backend, softmax_scale=scale)


@pytest.mark.parametrize(
    "kind",
    [dict(m=2), dict(m=2, count=700), dict(m=2, count=700, heads=80), dict(m=0)],
    ids=str,
)
def test_parts_of_many_keys(kind, device, backend, monkeypatch):
    """Enough of them to be split among programs, some of which have none of a row's; tiles of 128
    where there are so many heads."""
    if INTERPRETED:
        monkeypatch.setattr("custom.cuda_ops.common.gpu.num_sms", lambda device: 132)
    window = 128 if kind["m"] else 700
    sizes = dict(window=window, heads=2) | kind
    check(Problem([(1, 1500), (1, 40), (1, 0)], **sizes), device, backend)


def test_strided_inputs(device, backend):
    given = Problem(count=5).arguments(("TND", "TND"), device, half(backend))
    strided = dict(given)
    for name in ("q", "ori_kv", "cmp_kv", "cmp_sparse_indices"):
        x = given[name]
        strided[name] = torch.stack([x, torch.full_like(x, 77)], -2)[..., 0, :]
    for x, y in zip(run(OP, backend, **strided), run(OP, backend, **given), strict=True):
        assert torch.equal(x, y)


def test_keys_that_are_not_seen_are_not_read(device, backend):
    """Everything else in both caches is NaN already; so is a page of a neighbour."""
    for kind in KINDS.values():
        given = Problem([(3, 61), (2, 24)], **kind).arguments(
            ("TND", "PA_ND"), device, half(backend)
        )
        assert not run(OP, backend, **given)[0].isnan().any()


def test_a_nan_among_the_keys_reaches_who_sees_it(device, backend):
    problem = Problem([(3, 40)], m=4, count=4, window=2)
    problem.rows[0][38, 5] = torch.nan
    problem.indices[0][:, 0] = torch.tensor([0, 1, 2, 3])
    out, _ = run(OP, backend, **problem.arguments(("BSND", "PA_ND"), device, half(backend)))
    assert out.isnan().flatten(2).any(-1)[0].tolist()[:3] == [False, True, True]


# ------------------------------------------------------------ slots


def test_slots(device, backend):
    problem = Problem(count=5)
    dtype = half(backend)
    given = problem.rounded_to(dtype).arguments(("TND", "PA_ND"), device, dtype)
    total = sum(problem.used)
    given["q"] = given["q"][:total]
    given["cmp_sparse_indices"] = given["cmp_sparse_indices"][:total]
    out, lse = run(OP, backend, **problem.in_slots(given))
    exact, plain = problem.solved(), problem.solved(dtype)
    assert_close_to_float64("out", out, plain[0], exact[0])
    assert_close_to_float64("lse", lse[0], problem.solved(lse_dtype(dtype))[1], exact[1])


def test_slots_of_requests_with_padding(device, backend):
    """seqused_q and cu_seqlens_q say which tokens are there."""
    q = torch.randn(2, 3, 4, 32).to(device, half(backend))
    rows = torch.randn(2, 16, 1, 32).to(q)
    slots = torch.randint(0, 32, (2, 3, 1, 5), dtype=torch.int32).to(device)
    given = dict(ori_kv=rows, indices_are_slots=True, return_softmax_lse=True)
    whole = run(OP, backend, q=q, ori_sparse_indices=slots, **given)
    used = ints([2, 0], device)
    out, lse = run(OP, backend, q=q, ori_sparse_indices=slots, seqused_q=used, **given)
    assert torch.equal(out[0, :2], whole[0][0, :2]) and torch.equal(
        lse[0, :, :2], whole[1][0, :, :2]
    )
    assert (out[1] == 0).all() and (out[0, 2] == 0).all() and (lse[1] == -torch.inf).all()
    out, _ = run(
        OP,
        backend,
        q=q.flatten(0, 1),
        ori_sparse_indices=slots.flatten(0, 1),
        layout_q="TND",
        cu_seqlens_q=ints([1, 4], device),
        **given,
    )
    assert torch.equal(out[1:4], whole[0].flatten(0, 1)[1:4])
    assert (out[0] == 0).all() and (out[4:] == 0).all()


@pytest.mark.parametrize("kind", ["bytes", "floats"])
@pytest.mark.parametrize("extra", [False, True])
def test_flash_mla(kind, extra, device, backend):
    """FlashMLA's call, against the op by positions."""
    problem = Problem([(2, 40), (2, 25)], m=4 if extra else 0, size=512, heads=3)
    dtype = torch.bfloat16 if backend == "reference" else torch.float16
    given = problem.rounded_to(dtype).arguments(("BSND", "PA_ND"), device, dtype, freed=False)
    given["q"] = given["q"][:, :2]
    caches = [
        packed(given[n]) if kind == "bytes" else given[n]
        for n in ("ori_kv", "cmp_kv")
        if n in given
    ]
    slots, lengths = [], []
    for place, page in ((0, 16), (1, 2))[: len(caches)]:
        table = given[("ori_block_table", "cmp_block_table")[place]].cpu()
        seen = [[problem.seen(i, j)[place] for j in range(2)] for i in range(2)]
        width = max(len(x) for each in seen for x in each) + 1
        slot = torch.full((2, 2, width), 0, dtype=torch.int32)
        for i, j in ((0, 0), (0, 1), (1, 0), (1, 1)):
            row = [int(table[i, x // page]) * page + x % page for x in seen[i][j]]
            slot[i, j, : len(row)], slot[i, j, len(row) :] = ints(row, "cpu"), -1
        slots.append(slot.to(device))
        lengths.append(ints([width - 1, width], device))
    more = {}
    if extra:
        more = dict(extra_rows=caches[1], extra_slots=slots[1], extra_topk_length=lengths[1])
    out, lse = custom.flash_mla_v4(
        given["q"],
        caches[0],
        slots[0],
        None,
        topk_length=lengths[0],
        attn_sink=given["sinks"],
        **more,
    )
    if kind == "bytes":
        given |= dict(zip(("ori_kv", "cmp_kv"), map(unpacked, caches, [dtype] * 2), strict=False))
    want, want_lse = run(OP, backend, **given)
    assert lse.shape == (2, 3, 2)
    torch.testing.assert_close(out, want, rtol=0, atol=0.02 if dtype is torch.bfloat16 else 2e-3)
    torch.testing.assert_close(lse, want_lse[:, 0].mT, rtol=1e-5, atol=1e-5)


def test_flash_mla_without_a_slot(device, backend):
    q = torch.randn(1, 2, 3, 512).to(device, half(backend))
    rows = torch.full((2, 64, 1, 584), 0x7F, dtype=torch.uint8, device=device)
    slots = torch.tensor([[[-1, 128], [2**31 - 1, -(2**31)]]], dtype=torch.int32, device=device)
    out, lse = custom.flash_mla_v4(q, rows, slots)
    assert (out == 0).all() and (lse == -torch.inf).all()


# ------------------------------------------------------------ rows of 8 bits


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [dict(heads=3), dict(heads=17, entry_page=1, page=32)], ids=str)
def test_the_bits_of_the_op_on_the_rows_that_bytes_stand_for(kind, sizes, device, backend):
    dtype = torch.bfloat16 if backend == "reference" else torch.float16
    if device.type == "cuda":
        dtype = torch.bfloat16
    problem = Problem([(2, 40), (1, 9), (3, 21)], **KINDS[kind], size=512, **sizes)
    given = problem.arguments(("TND", "PA_ND"), device, dtype)
    caches = {n: packed(given[n], 1152) for n in ("ori_kv", "cmp_kv") if n in given}
    with runs_once("npu_kv_quant_sparse_attn_sharedkv", backend):
        got = custom.npu_kv_quant_sparse_attn_sharedkv(kv_quant_mode=1, **given | caches)
    wide = {n: unpacked(x, dtype) for n, x in caches.items()}
    want = run(OP, backend, **given | wide)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    assert not got[0].isnan().any()


def test_entries_beside_a_cache_without_window_rows(device, backend):
    """Its table names none, as one whose pages are not there does."""
    dtype = torch.bfloat16 if backend == "reference" else torch.float16
    problem = Problem([(2, 40), (1, 9)], m=4, size=512, heads=3)
    given = problem.arguments(("TND", "PA_ND"), device, dtype)
    given |= {n: packed(given[n], 1152) for n in ("ori_kv", "cmp_kv")}
    attend = partial(custom.npu_kv_quant_sparse_attn_sharedkv, kv_quant_mode=1)
    want = attend(**given | dict(ori_block_table=torch.full_like(given["ori_block_table"], -1)))
    got = attend(**given | dict(ori_kv=given["ori_kv"][:0]))
    assert want[0].abs().sum() > 0
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_an_npu_refuses_quantized_rows_by_name(monkeypatch):
    from custom.dispatch import backends

    op, cannot = f"npu_kv_quant_{OP[4:]}", backends.cannot_run
    arguments = sample(op, torch.device("cpu"), torch.float16)
    monkeypatch.setattr(
        backends, "cannot_run", lambda b, at: None if b is backends.NPU else cannot(b, at)
    )
    monkeypatch.setattr(backends, "choose", lambda key: backends.NPU)
    said = "rows of 584 bytes are fp8: the cube and vector units of A2 and A3 have int8 and no fp8"
    with pytest.raises(custom.NotSupported, match=said):
        overload(BY_NAME[op])(**arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(kv_quant_mode=2), "`kv_quant_mode` is 2, expected 1"),
        (dict(tile_size=128), "`tile_size` is 128, expected 64"),
        (dict(rope_head_dim=0), "`rope_head_dim` is 0, expected 64"),
        (dict(layout_kv="BSND"), "`layout_kv` is 'BSND', expected 'PA_ND'"),
        (dict(q=torch.zeros(1, 1, 2, 576)), "`q` has shape"),
        (dict(ori_kv=torch.zeros(2, 16, 1, 640, dtype=torch.uint8)), "`ori_kv` has shape .* 584"),
        (dict(cmp_kv=torch.zeros(2, 2, 1, 584)), "`cmp_kv` is float32, expected uint8"),
        (
            dict(ori_kv=torch.zeros(2, 16, 1, 600, dtype=torch.uint8)[..., :584]),
            "`ori_kv` .*strides .* expected pages that each lie in one piece",
        ),
    ],
)
def test_quantized_errors(change, message):
    table = torch.zeros(1, 2, dtype=torch.int32)
    given = dict(
        q=torch.zeros(1, 1, 2, 512, dtype=torch.float16),
        kv_quant_mode=1,
        ori_kv=torch.zeros(2, 16, 1, 584, dtype=torch.uint8),
        cmp_kv=torch.zeros(2, 2, 1, 584, dtype=torch.uint8),
        ori_block_table=table,
        cmp_block_table=table,
        seqused_kv=torch.tensor([3]),
        cmp_ratio=4,
    )
    custom.npu_kv_quant_sparse_attn_sharedkv(**given)
    with pytest.raises(
        (ValueError, TypeError), match=f"^npu_kv_quant_sparse_attn_sharedkv: .*{message}"
    ):
        custom.npu_kv_quant_sparse_attn_sharedkv(**given | change)


def test_metadata():
    """Of CANN's arguments; it is not read."""
    sums_ = torch.tensor([0, 3], dtype=torch.int32)
    made = custom.npu_sparse_attn_sharedkv_metadata(
        num_heads_q=64,
        num_heads_kv=1,
        head_dim=512,
        cu_seqlens_q=sums_,
        cmp_ratio=4,
        ori_mask_mode=4,
        cmp_mask_mode=3,
        ori_win_left=127,
        ori_win_right=0,
        layout_q="TND",
        layout_kv="PA_ND",
        has_ori_kv=True,
        has_cmp_kv=True,
        batch_size=1,
        max_seqlen_q=3,
        max_seqlen_kv=3,
        cmp_topk=512,
        device="cpu",
    )
    assert made.dtype is torch.int32 and list(made.shape) == [1024] and not made.any()
    given = Problem(count=3).arguments(("TND", "PA_ND"), torch.device("cpu"), torch.float16)
    plain = custom.npu_sparse_attn_sharedkv(**given)
    told = custom.npu_sparse_attn_sharedkv(**given, metadata=made + 5)
    assert torch.equal(plain[0], told[0])
    on = custom.npu_sparse_attn_sharedkv_metadata(seqused_kv=torch.zeros(1, device="meta"))
    assert on.device.type == "meta"


# ------------------------------------------------------------ gradients


def leaves(problem: Problem, layouts, device, dtype) -> tuple[dict, list[str]]:
    given = problem.arguments(layouts, device, dtype)
    names = [n for n in ("q", "ori_kv", "cmp_kv", "sinks") if n in given]
    for name in names:
        given[name] = given[name].nan_to_num(0.5).requires_grad_()
    return given, names


@pytest.mark.parametrize(
    ("kind", "layout", "sinks"),
    [("sliding", "TND", True), ("HCA", "BSND", True), ("CSA", "TND", True), ("CSA", "BSND", False)],
)
def test_finite_differences(kind, layout, sinks, device, backend):
    if backend != "reference":
        pytest.skip("in float64")
    problem = Problem(
        [(2, 6), (2, 1), (0, 4)],
        **KINDS[kind] | dict(m=min(KINDS[kind]["m"], 2)),
        sinks=sinks,
        window=3,
        heads=2,
        size=3,
    )
    given, names = leaves(problem, (layout, layout), device, torch.float64)

    def function(*tensors):
        out, lse = custom.npu_sparse_attn_sharedkv(**given | dict(zip(names, tensors, strict=True)))
        return out, lse.masked_fill(lse == -torch.inf, 0)

    assert torch.autograd.gradcheck(function, [given[n] for n in names])


@pytest.mark.parametrize(
    ("kind", "layout", "of"),
    [
        ("sliding", "BSND", "both"),
        ("HCA", "TND", "both"),
        ("CSA", "BSND", "out"),
        ("CSA", "TND", "lse"),
        ("CSA", "TND", "both"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_gradients(dtype, kind, layout, of, device, backend):
    """Against autograd of the loop over tokens, in float64 on the same numbers; off by what the
    rounding of `out`, weights and sums to `dtype` does."""
    skip_unless_taken(dtype, device, backend)
    problem = Problem([(2, 30), (0, 5), (5, 3), (9, 9)], **KINDS[kind]).rounded_to(dtype)
    given, names = leaves(problem, (layout, layout), device, dtype)
    out, lse = run(OP, backend, **given)
    exact = {"q": problem.q, "ori_kv": problem.rows, "cmp_kv": problem.entries}
    exact = {n: [x.requires_grad_() for x in exact[n]] for n in names[:-1]}
    problem.sinks.requires_grad_()
    want = problem.solved()
    got = problem.unpack(out, layout)[0], problem.unpack(lse.squeeze(-3), layout)[0]
    d_out, d_lse = (torch.randn_like(x).to(dtype).double() for x in want)
    for x, y in (got, want):
        total = (x.double() * d_out).sum() if of != "lse" else 0
        if of != "out":
            total = total + (y.double().masked_fill(y == -torch.inf, 0) * d_lse).sum()
        total.backward()
    near = 1e-12 if dtype is torch.float64 else 4 * torch.finfo(dtype).eps
    lengths = dict(q=problem.used, ori_kv=problem.length)
    for name, parts in exact.items():
        grad = given[name].grad if name == "q" else given[name].grad.squeeze(-2)
        of_parts = lengths.get(name) or [len(x) for x in parts]
        ours, padding = unpack(grad, layout, of_parts)
        theirs = torch.cat([torch.zeros_like(x) if x.grad is None else x.grad for x in parts])
        assert (padding == 0).all(), name
        assert (torch.cat(ours).double() - theirs).norm() <= near * theirs.norm(), name
    if of == "lse":
        assert not given["sinks"].grad.any()
    else:
        error = (given["sinks"].grad.double().cpu() - problem.sinks.grad).norm()
        assert error <= near * problem.sinks.grad.norm()


def test_gradients_in_parts(monkeypatch, backend):
    """Blocks of tokens add up."""
    if backend != "reference":
        pytest.skip("the reference's")
    from custom.dispatch.reference.common import selection

    def gradients():
        given, names = leaves(Problem(count=5), ("TND", "TND"), torch.device("cpu"), torch.float64)
        out, _ = custom.npu_sparse_attn_sharedkv(**given)
        out.square().sum().backward()
        return [given[name].grad for name in names]

    whole = gradients()
    monkeypatch.setattr(selection, "BLOCK", 2000)
    for x, y in zip(gradients(), whole, strict=True):
        torch.testing.assert_close(x, y)


def test_the_same_bits_if_they_must_be(device, backend):
    def gradients():
        problem = Problem([(3, 30), (2, 9)], count=5)
        given, names = leaves(problem, ("TND", "TND"), device, torch.float16)
        out, _ = custom.npu_sparse_attn_sharedkv(**given)
        out.float().square().sum().backward()
        return [given[name].grad for name in names]

    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        for x, y in zip(gradients(), gradients(), strict=True):
            assert torch.equal(x, y)
    finally:
        torch.use_deterministic_algorithms(False)


def test_gradients_of_slots(device, backend):
    """Slots of dense keys; the same as by positions."""
    dtype = half(backend)
    problem = Problem([(3, 8), (2, 7)], m=4, window=4).rounded_to(dtype)
    given, names = leaves(problem, ("TND", "TND"), device, dtype)
    custom.npu_sparse_attn_sharedkv(**given)[0].double().square().sum().backward()
    want = [given[n].grad for n in names]
    firsts = (0, 8), (0, 2)
    slots = {}
    for place, kind in enumerate(("ori", "cmp")):
        rows = [
            [firsts[place][i] + x for x in problem.seen(i, j)[place]]
            for i in range(2)
            for j in range(problem.used[i])
        ]
        width = max(map(len, rows))
        padded = [row + [-1] * (width - len(row)) for row in [*rows, [], []]]
        slots[f"{kind}_sparse_indices"] = ints(padded, device)[:, None]
    again, _ = leaves(problem, ("TND", "TND"), device, dtype)
    kept = ("q", "ori_kv", "cmp_kv", "sinks", "layout_q", "layout_kv")
    out, _ = run(OP, backend, **{n: again[n] for n in kept}, **slots, indices_are_slots=True)
    out.double().square().sum().backward()
    for name, x in zip(names, want, strict=True):
        near = (
            dict(rtol=1e-12, atol=1e-12) if dtype is torch.float64 else dict(rtol=0.01, atol=0.01)
        )
        torch.testing.assert_close(again[name].grad, x, **near)


def test_gradients_need_keys_that_are_not_paged():
    given = Problem([(2, 9)], count=5).arguments(("TND", "PA_ND"), torch.device("cpu"), torch.half)
    given["q"].requires_grad_()
    with pytest.raises(custom.NotSupported, match=f"^{OP}: .*paged keys"):
        custom.npu_sparse_attn_sharedkv(**given)
    with torch.no_grad():
        custom.npu_sparse_attn_sharedkv(**given)


# ------------------------------------------------------------ errors


def valid() -> dict:
    table = torch.zeros(2, 2, dtype=torch.int32)
    return dict(
        q=torch.zeros(2, 3, 4, 32),
        ori_kv=torch.zeros(5, 16, 1, 32),
        cmp_kv=torch.zeros(6, 2, 1, 32),
        ori_block_table=table,
        cmp_block_table=table,
        seqused_kv=torch.tensor([5, 20], dtype=torch.int32),
        cmp_ratio=4,
    )


PICKED = torch.zeros(2, 3, 1, 5, dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(ori_kv=None), ValueError, "`ori_kv` is missing"),
        (dict(cmp_kv=None), ValueError, "`cmp_block_table` is given, expected None: `cmp_kv` is m"),
        (dict(ori_block_table=None), ValueError, "`ori_block_table` is missing, and layout_kv 'PA"),
        (dict(cmp_block_table=None), ValueError, "`cmp_block_table` is missing, and layout_kv 'PA"),
        (dict(seqused_kv=None), ValueError, "`seqused_kv` is missing, and layout_kv 'PA_ND'"),
        (dict(layout_kv="PA_BSND"), ValueError, "`layout_kv` is 'PA_BSND', expected one of"),
        (dict(layout_kv="TND"), ValueError, "`layout_kv` is 'TND', expected 'BSND'"),
        (dict(ori_kv=torch.zeros(5, 24, 1, 32)), ValueError, "the page size is 24, expected a mul"),
        (dict(cmp_kv=torch.zeros(6, 3, 1, 32)), ValueError, "the page size is 3, expected 1, 2, 4"),
        (dict(cmp_kv=torch.zeros(6, 2, 1, 16)), ValueError, "`cmp_kv` has shape .* D=32"),
        (dict(cmp_kv=torch.zeros(6, 2, 1, 32).half()), TypeError, "`cmp_kv` has dtype"),
        (dict(cmp_sparse_indices=PICKED[:, :2]), ValueError, "`cmp_sparse_indices` has shape"),
        (dict(cmp_sparse_indices=PICKED.float()), TypeError, "`cmp_sparse_indices` is float32"),
        (
            dict(ori_sparse_indices=PICKED),
            ValueError,
            "`ori_sparse_indices` is given, expected Non",
        ),
        (
            dict(cmp_topk_length=torch.zeros(6, dtype=torch.int32)),
            ValueError,
            "`cmp_topk_length` is given, expected None",
        ),
        (dict(indices_are_slots=True), ValueError, "`ori_sparse_indices` is missing, and indices_"),
        (
            dict(indices_are_slots=True, ori_sparse_indices=PICKED),
            ValueError,
            "`cmp_sparse_indices` is missing, and indices_",
        ),
        (
            dict(
                indices_are_slots=True,
                ori_sparse_indices=PICKED,
                cmp_sparse_indices=PICKED,
                ori_topk_length=torch.zeros(2, dtype=torch.int32),
            ),
            ValueError,
            r"`ori_topk_length` has shape \[2\], expected \[rows\] with rows=6",
        ),
        (dict(cu_seqlens_q=torch.zeros(3).int()), ValueError, "`cu_seqlens_q` is given, expected"),
        (
            dict(q=torch.zeros(6, 4, 32), layout_q="TND"),
            ValueError,
            "`cu_seqlens_q` is missing, and layout_q 'TND'",
        ),
        (
            dict(q=torch.zeros(6, 4, 32), layout_q="TND", cu_seqlens_q=torch.zeros(4).int()),
            ValueError,
            "`ori_block_table` has shape",
        ),
        (
            dict(q=torch.zeros(6, 4, 32), layout_q="TND", cu_seqlens_q=torch.zeros(0).int()),
            ValueError,
            r"`cu_seqlens_q` has shape \[0\], expected \[B \+ 1\]",
        ),
        (dict(sinks=torch.zeros(4).half()), TypeError, "`sinks` is float16, expected float32"),
        (dict(sinks=torch.zeros(5)), ValueError, "`sinks` has shape .* N=4"),
        (dict(q=torch.zeros(2, 3, 32, 4).mT), ValueError, "`q` has stride 4"),
        (dict(ori_kv=torch.zeros(5, 16, 1, 64)[..., ::2]), ValueError, "`ori_kv` has stride 2"),
        (
            dict(
                ori_kv=torch.zeros(2, 9, 1, 32), cmp_kv=torch.zeros(2, 2, 1, 32), layout_kv="BSND"
            ),
            ValueError,
            "`ori_block_table` is given, and keys of layout_kv 'BSND' have none",
        ),
    ],
)
def test_errors(change, error, message):
    assert_refuses(OP, valid() | change, error, message)


def test_missing_sums_of_packed_keys():
    given = Problem(count=3).arguments(("TND", "TND"), torch.device("cpu"))
    for name in ("cu_seqlens_ori_kv", "cu_seqlens_cmp_kv"):
        with pytest.raises(ValueError, match=f"^{OP}: `{name}` is missing, and layout_kv 'TND'"):
            custom.npu_sparse_attn_sharedkv(**given | {name: None})


def test_debug_looks_at_lengths(monkeypatch):
    monkeypatch.setattr(custom.config, "debug", True)
    custom.npu_sparse_attn_sharedkv(**valid())
    with pytest.raises(ValueError, match=r"`seqused_kv` is .* expected lengths from 0 to 32"):
        custom.npu_sparse_attn_sharedkv(**valid() | dict(seqused_kv=torch.tensor([5, 33])))
    packed_ = dict(q=torch.zeros(6, 4, 32), layout_q="TND", cu_seqlens_q=torch.tensor([0, 4, 3]))
    with pytest.raises(ValueError, match=r"`cu_seqlens_q` is .* prefix sums that never fall"):
        custom.npu_sparse_attn_sharedkv(**valid() | packed_)


@pytest.mark.skipif(INTERPRETED, reason="is the interpreter")
def test_under_the_interpreter():
    """The kernels on CPU tensors, on a machine without a GPU."""
    if custom.config.backend != "auto":
        pytest.skip("a backend is chosen")
    chosen = (
        "test_slots_of or bits and sliding and not 17 or parts and count or beside_a_cache"
        " or float16 and CSA-TND-PA_ND or float16 and CSA-TND-both"
    )
    interpreted.passes(chosen, __file__)
