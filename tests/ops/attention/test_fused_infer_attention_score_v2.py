# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""npu_fused_infer_attention_score_v2 against a loop over query tokens, and against sparse attention
that selects every page."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import custom

from ...support.accuracy import assert_close_to_float64, every_dtype, skip_unless_taken
from ...support.calls import assert_refuses
from ...support.latents import WITHIN, Problem
from ...support.ragged import BEYOND, FALLING, PAGE, ends_within, ints, run, strided
from ...support.selected import DR, SCALE, D, attend

OP = "npu_fused_infer_attention_score_v2"
MODES = [(0, None), (3, None), (4, 0), (4, 5), (4, 30)]


def over(cache: Tensor) -> dict:
    """4 heads over one cache of latents."""
    return dict(key=cache, value=cache, num_query_heads=4, num_key_value_heads=1)


def check(problem, backend, device, dtype, layout="BSND", mode=3, window=None, **changed):
    problem.rounded_to(dtype)
    arguments = problem.arguments(layout, device, dtype, mode, window) | changed
    out, lse = run(OP, backend, **arguments, return_softmax_lse=True)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    assert lse.dtype is wide
    (got, padding), (got_lse, lse_padding) = problem.unpacked(out, lse, layout)
    assert (padding == 0).all() and (lse_padding == -torch.inf).all()
    exact, plain, summed = (
        problem.solved(mode, window, each) for each in (torch.float64, dtype, wide)
    )
    assert_close_to_float64("out", torch.cat(got), plain[0], exact[0])
    most = problem.terms() * torch.finfo(wide).eps  # of a logit that is summed in another order
    assert_close_to_float64("lse", torch.cat(got_lse), summed[1], exact[1], beyond=most)
    alone, empty = run(OP, backend, **arguments)
    assert torch.equal(alone, out) and list(empty.shape) == [0]


@pytest.mark.parametrize(("mode", "window"), MODES)
@pytest.mark.parametrize("layout", WITHIN)
@every_dtype
def test_every_layout_and_mask(device, backend, dtype, layout, mode, window):
    skip_unless_taken(dtype, device, backend)
    if backend != "reference" and layout in ("BSH", "TND_NTD") and mode != 3:
        pytest.skip("the layout changes what is handed over and how it comes back alone")
    check(Problem(), backend, device, dtype, layout, mode, window)


@pytest.mark.parametrize("layout", ["BSND", "TND_NTD"])
@every_dtype
def test_sinks_enter_the_denominator_alone(device, backend, dtype, layout):
    skip_unless_taken(dtype, device, backend)
    problem = Problem(sink=True)
    problem.sink[0], problem.sink[1] = -torch.inf, 60.0
    check(problem, backend, device, dtype, layout)


def test_a_sink_of_the_querys_dtype(device, backend):
    problem = Problem(sink=True)
    problem.sink = problem.sink.half().float()
    half = problem.sink.to(device, torch.float16)
    check(problem, backend, device, torch.float16, learnable_sink=half)


@pytest.mark.parametrize("layout", ["BSND", "TND"])
@pytest.mark.parametrize("heads", [1, 8, 12, 20, 96, 128])
def test_any_number_of_heads(device, backend, heads, layout):
    """Rows of several tokens share a tile of 16, 32 or 64."""
    check(Problem([(3, 20), (1, 37)], heads), backend, device, torch.float16, layout)


@pytest.mark.parametrize(
    ("size", "rope"), [(16, 0), (40, 0), (48, 24), (512, 64), (512, 0)], ids=str
)
def test_widths(device, backend, size, rope):
    check(Problem([(2, 20)], 3, size, rope), backend, device, torch.float16)


@pytest.mark.parametrize("layout", ["BSND", "TND"])
@pytest.mark.parametrize(("mode", "window"), [(0, None), (3, None), (4, 700)])
def test_many_keys_are_split(device, backend, layout, mode, window):
    """Parts of few keys and of none, put together by their sums."""
    problem = Problem([(2, 3000), (1, 5), (0, 40)], sink=True)
    check(problem, backend, device, torch.float16, layout, mode, window)


def test_numbers_by_hand(device, backend):
    """Two keys with logits 0 and ln 3 beside a sink of ln 4: weights 1/8 and 3/8."""
    dtype = torch.float16 if backend != "reference" else torch.float32
    query, cache = torch.zeros(1, 1, 16), torch.full((2, PAGE, 16), torch.nan)
    query[..., 0] = math.log(3)
    cache[1, :2] = 0
    cache[1, 0, 1], cache[1, 1, 0] = 8, 1
    cache = cache.to(device, dtype)
    out, lse = run(
        OP,
        backend,
        query=query.to(device, dtype),
        key=cache,
        value=cache,
        actual_seq_kvlen=ints([2], device),
        block_table=ints([[1]], device),
        learnable_sink=torch.tensor([math.log(4)], device=device),
        return_softmax_lse=True,
    )
    wanted = torch.tensor([3 / 8, 1.0])
    torch.testing.assert_close(out.flatten()[:2].cpu().float(), wanted, rtol=2e-3, atol=0)
    torch.testing.assert_close(lse.item(), math.log(4), rtol=1e-3, atol=0)


@pytest.mark.parametrize("layout", ["BSND", "TND"])
@pytest.mark.parametrize("mode", [0, 3])
def test_it_is_sparse_attention_over_every_page(monkeypatch, layout, mode):
    monkeypatch.setattr(custom.config, "backend", "reference")
    requests = [(3, 61), (1, 33), (2, 0), (4, 2), (7, 90)]
    problem = Problem(requests, heads=6, size=64, sink=True)
    problem.key = [x / 4 for x in problem.key]  # a step of float64 is 2.2e-16 of such results
    given = problem.arguments(layout, torch.device("cpu"), torch.float64, mode)
    out, lse = custom.npu_fused_infer_attention_score_v2(**given, return_softmax_lse=True)
    query, table = given["query"], given["block_table"]
    pages = torch.arange(table.shape[1], dtype=torch.int32)
    wanted, top, total = custom.npu_sparse_flash_attention(
        query,
        given["key"],
        None,
        pages.expand(*query.shape[:-2], 1, -1),
        SCALE,
        block_table=table,
        actual_seq_lengths_query=given["actual_seq_qlen"],
        actual_seq_lengths_kv=given["actual_seq_kvlen"],
        query_rope=given["query_rope"],
        key_rope=given["key_rope"],
        sparse_block_size=PAGE,
        layout_query=layout,
        layout_kv="PA_BSND",
        sparse_mode=mode,
        return_softmax_lse=True,
        sinks=given["learnable_sink"],
    )
    owned = ~wanted.isnan()
    assert (out - wanted)[owned].abs().max() <= 8.9e-16
    theirs = (top + total.log()).squeeze(-3)
    lse = lse.squeeze(-1) if layout == "TND" else lse.squeeze(-1).transpose(1, 2)
    seen = theirs > -torch.inf
    assert torch.equal(lse > -torch.inf, seen)
    assert (lse - theirs)[seen].abs().max() <= 8.9e-16


@pytest.mark.parametrize("form", ["[NB, P, R]", "[NB, 1, P, R]", "of one pool", "far apart"])
def test_forms_of_the_cache(device, backend, form):
    problem = Problem()
    given = problem.rounded_to(torch.float16).arguments("BSND", device, torch.float16)
    wanted = run(OP, backend, **given, return_softmax_lse=True)
    key, rope = given["key"], given["key_rope"]
    if form == "of one pool":  # rows of latent and rope, as engines keep them
        pool = torch.cat([key, rope], -1)
        key, rope = pool.split([D, DR], -1)
    elif form == "far apart":
        key, rope = (torch.stack([x, torch.full_like(x, torch.nan)], 1)[:, 0] for x in (key, rope))
    elif form == "[NB, P, R]":
        key, rope = key.squeeze(2), rope.squeeze(2)
    else:
        key, rope = key.transpose(1, 2), rope.transpose(1, 2)
    got = run(
        OP,
        backend,
        **(given | dict(key=key, value=key, key_rope=rope)),
        return_softmax_lse=True,
    )
    for x, y in zip(got, wanted, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("width", [D, 512])
@pytest.mark.parametrize("page", [16, 48, 64, 128])
def test_pages_of_any_size(device, backend, page, width):
    """A tile of keys lies in one page, or in several; what no request has is NaN."""
    cache = torch.randn(6, page, 1, width).half()
    table, used = [[4, 2, 5], [1, 0, 3]], (2 * page + 5, page - 1)
    for pages, length in zip(table, used, strict=True):
        for i, each in enumerate(pages):
            cache[each, max(length - i * page, 0) :] = torch.nan
    cache = cache.to(device)
    query = torch.randn(2, 2, 4, width).to(device, torch.float16)
    out, _ = run(
        OP,
        backend,
        query=query,
        **over(cache),
        actual_seq_kvlen=ints(used, device),
        block_table=ints(table, device),
        softmax_scale=SCALE,
        input_layout="BSND",
        sparse_mode=3,
    )
    for b in range(2):
        keys = torch.cat([cache[p, :, 0] for p in table[b]]).double().cpu()
        for j in range(2):
            q, seen = query[b, j].double().cpu(), [*range(used[b] - 1 + j)]
            exact = attend(q, None, keys, None, keys, seen, SCALE)[0]
            half = keys.half()
            plain = attend(q.half(), None, half, None, half, seen, SCALE)[0]
            assert_close_to_float64("out", out[b, j], plain, exact)


LATENTS = [(3, 300), (1, 5), (2, 0), (4, 129), (0, 9), (2, 192)]


@pytest.mark.parametrize("rope", [64, 0])
@pytest.mark.parametrize("heads", [8, 20, 128])
@pytest.mark.parametrize(
    ("layout", "mode", "window"),
    [("BSND", 0, None), ("TND_NTD", 3, None), ("TND", 4, 70), ("BSND_NBSD", 4, 3)],
)
def test_latents_of_512_channels(device, backend, layout, mode, window, heads, rope):
    """Tiles of 64 rows with heads of several tokens; whole tiles of keys and parts of them."""
    if backend == "reference" and heads == 128:
        pytest.skip("heads do not meet in the reference")
    problem = Problem(LATENTS, heads, 512, rope, sink=True)
    check(problem, backend, device, torch.float16, layout, mode, window)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_latents_of_512_channels_in_parts(device, backend, dtype):
    """Many keys of few requests; a part begins where a whole tile does, and ends anywhere."""
    skip_unless_taken(dtype, device, backend)
    problem = Problem([(2, 3001), (1, 5), (0, 40)], 16, 512, 64, sink=True)
    check(problem, backend, device, dtype, "TND", 4, 2500)


def test_pages_that_are_not_there_are_absent(device, backend):
    cache = torch.randn(3, PAGE, 1, D).to(device, torch.float16)
    given = dict(
        query=torch.randn(1, 1, 4, D).to(device, torch.float16),
        **over(cache),
        input_layout="BSND",
        return_softmax_lse=True,
    )

    def of(table, length):
        return run(
            OP,
            backend,
            **given,
            block_table=ints([table], device),
            actual_seq_kvlen=ints([length], device),
        )

    some, all_ = of([2, -1, 3, -(2**31), 2**31 - 1, 0], 6 * PAGE), of([2, 0], 2 * PAGE)
    for x, y in zip(some, all_, strict=True):
        torch.testing.assert_close(x, y, rtol=2e-3, atol=1e-3)
    out, lse = of([-1, 3], 2 * PAGE)
    assert (out == 0).all() and (lse == -torch.inf).all()


def test_a_window_reads_no_page_before_it(device, backend):
    """Engines free those, and others write into them."""
    problem = Problem([(2, 70)])
    given = problem.rounded_to(torch.float16).arguments("TND", device, torch.float16, 4, 9)
    wanted = run(OP, backend, **given)
    table = given["block_table"].clone()
    first = (70 - 2 - 9) // PAGE
    freed = table[0, :first].long()
    for name in ("key", "key_rope"):
        given[name][freed] = torch.nan
    given["value"] = given["key"]
    assert torch.equal(run(OP, backend, **given)[0], wanted[0])
    table[0, :first] = -1
    assert torch.equal(run(OP, backend, **(given | dict(block_table=table)))[0], wanted[0])


def test_strided_queries_and_64_bits(device, backend):
    given = Problem().rounded_to(torch.float16).arguments("BSND", device, torch.float16)
    names = ("actual_seq_qlen", "actual_seq_kvlen", "block_table")
    other = strided(given, ("query", "query_rope"), names)
    a, b = run(OP, backend, **given), run(OP, backend, **other)
    assert torch.equal(a[0], b[0])


@pytest.mark.parametrize("mode", [0, 3])
@pytest.mark.parametrize("layout", ["BSND", "TND"])
def test_lengths_beyond_the_tensors_end_with_them(device, backend, layout, mode):
    problem = Problem([(3, 40), (2, 48)])
    problem.rounded_to(torch.float16)
    problem.key = [torch.cat([x, torch.randn(64 - len(x), D).half().double()]) for x in problem.key]
    problem.key_rope = [torch.randn(64, DR).half().double() for _ in problem.key]
    problem.keys = (64, 64)
    given = problem.arguments(layout, device, torch.float16, mode)
    given["block_table"] = given["block_table"][:, :4].contiguous()
    given["query"] = given["query"].nan_to_num(0)
    given["query_rope"] = given["query_rope"].nan_to_num(0)
    most = given["query"].shape[-3]
    sums = layout == "TND"

    def of(rows, keys, dtype):
        lengths = ints(rows, device, dtype), ints(keys, device, dtype)
        return run(
            OP,
            backend,
            **(given | dict(actual_seq_qlen=lengths[0], actual_seq_kvlen=lengths[1])),
            return_softmax_lse=True,
        )

    for far, dtype in BEYOND:
        for within, beyond in (
            (([2, most], [64, 9]), ([2, far], [far, 9])),
            (([0, most if sums else 2], [0, 64]), ([-far, far if sums else 2], [-far, far])),
        ):
            wanted, got = of(*within, torch.int32), of(*beyond, dtype)
            for x, y in zip(got, wanted, strict=True):
                assert torch.equal(x, y)


def test_sums_may_fall(device, backend):
    """A request begins where all before it have ended."""
    cache = torch.randn(6, PAGE, 1, D).to(device, torch.float16)
    given = dict(
        query=torch.randn(6, 4, D).to(device, torch.float16),
        **over(cache),
        block_table=ints([[0, 1], [2, 3], [4, 5]], device),
        input_layout="TND",
        sparse_mode=3,
        return_softmax_lse=True,
    )
    for sums, keys in FALLING:
        lengths = dict(actual_seq_kvlen=ints(keys, device))
        risen = ints(sums, device).clamp(0, 6).cummax(0).values
        with ends_within(120):
            got = run(OP, backend, **given, **lengths, actual_seq_qlen=ints(sums, device))
        wanted = run(OP, backend, **given, **lengths, actual_seq_qlen=risen)
        for x, y in zip(got, wanted, strict=True):
            assert torch.equal(x, y)


def test_nothing_at_all(device, backend):
    cache = torch.full((2, PAGE, 1, D), torch.nan, device=device, dtype=torch.float16)
    common = over(cache) | dict(return_softmax_lse=True)
    query = torch.full((3, 4, D), torch.nan, device=device, dtype=torch.float16)
    none = ints([], device)
    for requests, of in ((0, none), (2, ints([0, 0], device)), (1, ints([3], device))):
        # the last has rows, and a table without pages
        out, lse = run(
            OP,
            backend,
            query=query,
            actual_seq_qlen=of,
            actual_seq_kvlen=ints([9] * requests, device) if requests == 1 else of,
            block_table=torch.zeros(requests, 0, dtype=torch.int32, device=device),
            input_layout="TND",
            **common,
        )
        assert (out == 0).all() and (lse == -torch.inf).all() and list(lse.shape) == [3, 4, 1]
    out, lse = run(
        OP,
        backend,
        query=query[:0].view(0, 0, 4 * D),
        actual_seq_kvlen=none,
        block_table=torch.zeros(0, 3, dtype=torch.int32, device=device),
        **common,
    )
    assert list(out.shape) == [0, 0, 4 * D] and list(lse.shape) == [0, 4, 0, 1]


def test_rows_in_blocks_equal_one_block(monkeypatch):
    from custom.dispatch.reference.common import selection

    monkeypatch.setattr(custom.config, "backend", "reference")
    given = Problem([(50, 50)]).arguments("BSND", torch.device("cpu"), torch.float64)
    given = {n: x.nan_to_num(0) if isinstance(x, Tensor) else x for n, x in given.items()}
    given["value"] = given["key"]
    whole, _ = torch.ops.custom.npu_fused_infer_attention_score_v2(**given)
    monkeypatch.setattr(selection, "BLOCK", 4 * 50 * 3)
    parts, _ = torch.ops.custom.npu_fused_infer_attention_score_v2(**given)
    torch.testing.assert_close(parts, whole)


def valid() -> dict:
    return dict(
        query=torch.zeros(2, 3, 4, 32),
        **over(torch.zeros(5, 16, 1, 32)),
        actual_seq_kvlen=[9, 20],
        block_table=torch.tensor([[0, 1], [4, 2]]),
        input_layout="BSND",
        sparse_mode=3,
    )


def test_lists_are_lengths_too():
    given = valid() | dict(query=torch.randn(2, 3, 4, 32))
    wanted = custom.npu_fused_infer_attention_score_v2(
        **(given | dict(actual_seq_kvlen=torch.tensor([9, 20])))
    )
    assert torch.equal(custom.npu_fused_infer_attention_score_v2(**given)[0], wanted[0])
    mask = torch.ones(2048, 2048, dtype=torch.bool).triu(1)  # not read
    masked = custom.npu_fused_infer_attention_score_v2(**given, atten_mask=mask)
    assert torch.equal(masked[0], wanted[0])
    packed = given | dict(query=given["query"].flatten(0, 1), input_layout="TND")
    got = custom.npu_fused_infer_attention_score_v2(**packed, actual_seq_qlen=(3, 6))
    assert torch.equal(got[0], wanted[0].flatten(0, 1))


SCALES = dict.fromkeys(
    (
        "dequant_scale_query",
        "dequant_scale_key",
        "dequant_offset_key",
        "dequant_scale_value",
        "dequant_offset_value",
        "dequant_scale_key_rope",
        "quant_scale_out",
        "quant_offset_out",
        "quant_scale_p",
    ),
    torch.ones(1),
)
ROPE = dict(query_rope=torch.zeros(2, 3, 4, 16), key_rope=torch.zeros(5, 16, 1, 16))
OTHER = torch.zeros(5, 16, 1, 32)
WIDE = torch.zeros(5, 16, 1, 528)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(value=OTHER), ValueError, "`value` is another tensor than `key`"),
        (dict(value=OTHER[:, :, :, :16]), ValueError, "`value` is another tensor than `key`"),
        (dict(key=OTHER.expand(5, 16, 2, 32)), ValueError, "`key` has shape .* 2, 32"),
        (dict(key=torch.zeros(5, 1, 2, 16, 16)), ValueError, "`key` has five dimensions"),
        (dict(key=OTHER.char(), value=OTHER.char()), TypeError, "`key` has dtype torch.int8"),
        (dict(key=WIDE, value=WIDE, query=torch.zeros(2, 3, 4, 528)), ValueError, "528 channels"),
        (dict(key=OTHER[..., :0]), ValueError, "`key` has 0 channels, expected 1 to 512"),
        (dict(query=torch.zeros(2, 3, 4, 48)), ValueError, "`query` has shape .* R=32"),
        (dict(query=torch.zeros(2, 3, 128)), ValueError, "`query` has shape .*B, S, N, R"),
        (dict(input_layout="BSH"), ValueError, r"`query` has shape .*\[B, S, N\*R\]"),
        (dict(input_layout="BNSD"), ValueError, "`input_layout` is 'BNSD', expected one of"),
        (dict(input_layout="TND"), ValueError, r"`query` has shape .*\[T, N, R\]"),
        (dict(num_query_heads=8), ValueError, "`num_query_heads` is 8, expected 4"),
        (dict(num_query_heads=0), ValueError, "`num_query_heads` is 0, expected at least 1"),
        (dict(num_key_value_heads=0), ValueError, "`num_key_value_heads` is 0 .*expected 1"),
        (dict(num_key_value_heads=4), ValueError, "`num_key_value_heads` is 4"),
        (dict(query_rope=ROPE["query_rope"]), ValueError, "only one of `query_rope` and `key_r"),
        (ROPE | dict(key_rope=torch.zeros(4, 16, 1, 16)), ValueError, "`key_rope` has .* pages=5"),
        (dict(block_table=None), ValueError, "`block_table` is missing"),
        (dict(actual_seq_kvlen=None), ValueError, "`actual_seq_kvlen` is missing"),
        (dict(actual_seq_kvlen=[9, 33]), ValueError, r"`actual_seq_kvlen` is \[9, 33\], expected"),
        (
            dict(actual_seq_kvlen=[9, 2.5]),
            TypeError,
            "`actual_seq_kvlen` is of type list, expected",
        ),
        (dict(actual_seq_qlen=[3, 4]), ValueError, r"`actual_seq_qlen` is \[3, 4\]"),
        (
            dict(query=torch.zeros(6, 4, 32), input_layout="TND", actual_seq_qlen=[0, 3, 6]),
            ValueError,
            "`actual_seq_qlen` has 3 numbers, expected 2",
        ),
        (dict(query=torch.zeros(6, 4, 32), input_layout="TND"), ValueError, "`actual_seq_qlen` is"),
        (dict(sparse_mode=9), ValueError, "`sparse_mode` is 9, expected 0"),
        (dict(sparse_mode=2), ValueError, "`sparse_mode` is 2, expected 0"),
        (dict(sparse_mode=4), ValueError, "`next_tokens` is 2147483647, expected 0"),
        (dict(sparse_mode=4, next_tokens=0, pre_tokens=-1), ValueError, "`pre_tokens` is -1"),
        (dict(pre_tokens=5), ValueError, "`pre_tokens` is 5, expected its default"),
        (dict(next_tokens=0), ValueError, "`next_tokens` is 0, expected its default"),
        (
            dict(sparse_mode=0, atten_mask=torch.zeros(3, 20)),
            ValueError,
            "`atten_mask` is given with sparse_mode 0",
        ),
        (dict(pse_shift=torch.zeros(1)), ValueError, "`pse_shift` is given, expected None"),
        *(({n: x}, ValueError, f"`{n}` is given, expected None") for n, x in SCALES.items()),
        (dict(key_quant_mode=1), ValueError, "`key_quant_mode` is 1, expected 0"),
        (dict(out_dtype=5), ValueError, "`out_dtype` is 5, expected None"),
        (dict(block_size=32), ValueError, "`block_size` is 32, expected 16"),
        (dict(inner_precise=4), ValueError, "`inner_precise` is 4"),
        (dict(learnable_sink=torch.zeros(4).half()), TypeError, "`learnable_sink` is float16"),
        (dict(learnable_sink=torch.zeros(5)), ValueError, "`learnable_sink` has shape .* N=4"),
        (dict(softmax_scale=math.inf), ValueError, "`softmax_scale` is inf"),
    ],
)
def test_errors(looked_at, change, error, message):
    given = valid() | change
    if "key" in change and "value" not in change:
        given["value"] = given["key"]
    assert_refuses(OP, given, error, message)
