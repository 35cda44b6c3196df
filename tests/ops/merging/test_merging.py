# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Merged states against one softmax over all keys, merged candidates against one top-k, positions
of shards against a loop; torch_npu's two schemas.  On a GPU the kernels, here their interpreter
(test_cuda_delta_rule.py)."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from custom.dispatch import log
from custom.dispatch.reference.merging import merge_states as reference
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import custom

from ...support.accuracy import assert_close_to_float64
from ...support.calls import runs_once
from ...support.samples import apart

MERGED = {torch.float32: (1e-6, 1e-6), torch.float16: (2e-3, 2e-3), torch.bfloat16: (2e-2, 2e-2)}
EMPTY = {"-inf": -math.inf, "inf": math.inf, "nan": math.nan}


def attention(logits: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(out, maximum, sum) of float64 logits [.., K] over values [K, D]; no key: 0, -inf, 0."""
    if logits.shape[-1] == 0:
        empty = logits.new_zeros(logits.shape[:-1])
        return logits @ v, empty - math.inf, empty
    top = logits.amax(-1)
    p = torch.exp(logits - top[..., None])
    return p @ v / p.sum(-1, keepdim=True), top, p.sum(-1)


def parts(cuts: list[int], rows: tuple[int, ...], D: int) -> tuple[Tensor, ...]:
    """(outs, maxima, sums) of an attention cut at `cuts`, and its (out, lse), in float64."""
    random = torch.Generator().manual_seed(sum(cuts) + D)
    edges = [0, *cuts, 40]
    logits = 4 * torch.randn(*rows, 40, generator=random, dtype=torch.float64)
    v = torch.randn(40, D, generator=random, dtype=torch.float64)
    pieces = [attention(logits[..., a:b], v[a:b]) for a, b in itertools.pairwise(edges)]
    out, top, total = attention(logits, v)
    return *(torch.stack(x) for x in zip(*pieces, strict=True)), out, top + total.log()


@pytest.mark.parametrize("dtype", MERGED, ids=str)
@pytest.mark.parametrize("by_sums", [False, True], ids=["lse", "max and sum"])
@pytest.mark.parametrize("rows, D", [((5, 3), 64), ((1,), 512), ((2, 3, 7), 80), ((9,), 1)])
@pytest.mark.parametrize("cuts", [[], [7], [0, 13, 13, 40], [*range(1, 40, 3)]], ids=len)
def test_merged_states_are_the_whole_attention(cuts, rows, D, by_sums, dtype, device, backend):
    outs, tops, sums, out, lse = parts(cuts, rows, D)
    lses = (tops, sums) if by_sums else (tops + sums.log(),)
    with runs_once("npu_merge_states", backend):
        got, got_lse = custom.npu_merge_states(
            outs.to(dtype).to(device), *(x.float().to(device) for x in lses)
        )
    rounded = [x.float() for x in lses]
    plain = reference.forward(
        outs.to(dtype).double(), rounded[0].double(), rounded[1].double() if by_sums else None
    )
    assert_close_to_float64("out", got, plain[0].to(dtype), out)
    assert_close_to_float64("lse", got_lse, plain[1].float(), lse)


@pytest.mark.parametrize("empty", EMPTY)
def test_an_empty_part_counts_nothing_whatever_it_holds(empty, device):
    outs = torch.randn(3, 4, 16).to(device)
    lses = torch.randn(3, 4).to(device)
    outs[1, :2], lses[1, :2] = math.nan, EMPTY[empty]
    out, lse = custom.npu_merge_states(outs, lses)
    wanted = custom.npu_merge_states(outs[[0, 2]], lses[[0, 2]])
    torch.testing.assert_close(out[:2], wanted[0][:2])
    torch.testing.assert_close(lse[:2], wanted[1][:2])


def test_where_every_part_is_empty_there_is_nothing(device):
    outs, lses = torch.full((3, 4, 16), math.nan), torch.full((3, 4), -math.inf)
    lses[1] = math.inf
    for count in (3, 1, 0):
        out, lse = custom.npu_merge_states(outs[:count].to(device), lses[:count].to(device))
        assert (out == 0).all() and (lse == -math.inf).all()
    out, lse = custom.npu_merge_states(outs[:, :0].to(device), lses[:, :0].to(device))
    assert out.shape == (0, 16) and lse.shape == (0,)


def test_states_are_read_where_a_collective_put_them(device):
    """Rows of D numbers and behind them the log-sum-exp, in one tensor."""
    packed = torch.randn(3, 5, 2, 16 + 2).to(torch.bfloat16).to(device)
    packed[..., 16:] = torch.randn(3, 5, 2, 1).to(device).view(torch.bfloat16)
    outs, lses = packed[..., :16], packed[..., 16:].view(torch.float32)[..., 0]
    assert not outs.is_contiguous()
    got = custom.npu_merge_states(outs, lses)
    wanted = custom.npu_merge_states(outs.contiguous(), lses.contiguous())
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.large
def test_parts_lie_far_apart(device):
    outs, lses = torch.randn(2, 3, 16).to(torch.bfloat16).to(device), torch.randn(2, 3).to(device)
    for a, b in zip(
        custom.npu_merge_states(apart(outs), lses),
        custom.npu_merge_states(outs, lses),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


reference_only = pytest.mark.skipif(
    custom.config.backend != "auto", reason="float64 is the reference's"
)


@reference_only
@pytest.mark.parametrize("by_sums", [False, True], ids=["lse", "max and sum"])
def test_gradients_of_merged_states(by_sums):
    outs = torch.randn(3, 4, 5, dtype=torch.float64, requires_grad=True)
    lses = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    sums = (torch.rand(3, 4, dtype=torch.float64) + 0.5).requires_grad_() if by_sums else None
    assert torch.autograd.gradcheck(custom.npu_merge_states, (outs, lses, sums))


def test_an_empty_part_has_no_gradient():
    outs, lses = torch.randn(2, 3, 4), torch.randn(2, 3)
    outs[1, 0], lses[1, 0] = math.nan, -math.inf
    lses[:, 2] = -math.inf
    for x in (outs, lses):
        x.requires_grad_()
    out, lse = custom.npu_merge_states(outs, lses)
    (out.sum() + lse[:2].sum()).backward()
    assert outs.grad.isfinite().all() and lses.grad.isfinite().all()
    assert (outs.grad[1, 0] == 0).all() and (lses.grad[:, 2] == 0).all()


@reference_only
@pytest.mark.parametrize("by_sums", [False, True], ids=["lse", "max and sum"])
def test_gradients_flow_into_parts_of_sparse_attention(by_sums):
    """Two halves of a selection, merged, are the whole selection, and so are the gradients."""
    torch.manual_seed(2)
    q = torch.randn(1, 5, 2, 8, dtype=torch.float64, requires_grad=True)
    k = torch.randn(1, 12, 1, 8, dtype=torch.float64, requires_grad=True)
    index = torch.arange(12).expand(1, 5, 1, 12)

    def attend(index: Tensor) -> tuple[Tensor, ...]:
        out, *statistics = custom.npu_sparse_flash_attention(
            q, k, None, index, 0.3, sparse_mode=0, return_softmax_lse=True
        )
        top, total = (x.view(out.shape[:-1]) for x in statistics)
        return (out, top, total) if by_sums else (out, top + total.log())

    whole, *statistics = attend(index)
    lse = statistics[0] + statistics[1].log() if by_sums else statistics[0]
    halves = [attend(index[..., :7]), attend(index[..., 7:])]
    merged = custom.npu_merge_states(*(torch.stack(x) for x in zip(*halves, strict=True)))
    probes = torch.randn_like(whole), torch.randn_like(lse)
    for ours, theirs in zip(merged, (whole, lse), strict=True):
        torch.testing.assert_close(ours, theirs)
    for ours, theirs in zip(
        torch.autograd.grad(merged, (q, k), probes),
        torch.autograd.grad((whole, lse), (q, k), probes),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


# ------------------------------------------------------------------------------------ top-k


def best(values: Tensor, positions: Tensor, k: int) -> tuple[list[int], list[float]]:
    """By Python's sort, for one row of candidates."""
    pairs = [
        (-math.inf if math.isnan(v) else v, p, v)
        for v, p in zip(values.flatten().tolist(), positions.flatten().tolist(), strict=True)
        if 0 <= p < 2**31
    ]
    chosen = sorted(sorted(pairs, key=lambda x: (-x[0], x[1]))[:k], key=lambda x: x[1])
    rest = k - len(chosen)
    return [p for _, p, _ in chosen] + [-1] * rest, [v for *_, v in chosen] + [0.0] * rest


def check_topk(values: Tensor, positions: Tensor, k: int, device: torch.device) -> None:
    got, got_values = custom.npu_merge_topk(values.to(device), positions.to(device), k)
    assert got.dtype is torch.int32 and got_values.dtype is values.dtype
    P, C = values.shape[0], values.shape[-1]
    rows = zip(
        values.reshape(P, -1, C).unbind(1), positions.reshape(P, -1, C).unbind(1), strict=True
    )
    for (v, p), a, b in zip(
        rows, got.flatten(0, -2).cpu(), got_values.flatten(0, -2).cpu(), strict=True
    ):
        wanted, wanted_values = best(v, p, k)
        assert a.tolist() == wanted
        torch.testing.assert_close(
            b.double(), torch.tensor(wanted_values, dtype=torch.float64), equal_nan=True
        )


@pytest.mark.parametrize("dtype", MERGED, ids=str)
@pytest.mark.parametrize(
    "P, rows, C, k",
    [(2, 3, 64, 64), (3, 2, 37, 16), (1, 1, 5, 5), (4, 2, 8, 40), (8, 1, 128, 100), (2, 1, 1, 1)],
)
def test_merged_topk_is_that_of_all_candidates(P, rows, C, k, dtype, device, backend):
    """Values of few kinds, so that ties cross the parts; some candidates are absent."""
    random = torch.Generator().manual_seed(P * C)
    values = torch.randint(-3, 4, (P, rows, C), generator=random).to(dtype)
    order = torch.stack([torch.randperm(3 * P * C, generator=random) for _ in range(rows)])
    positions = order[:, : P * C].view(rows, P, C).movedim(1, 0).to(torch.int32).clone()
    positions[torch.rand(P, rows, C, generator=random) < 0.1] = -1
    with runs_once("npu_merge_topk", backend):
        check_topk(values, positions, k, device)
    check_topk(values.flip(0), positions.flip(0).long(), k, device)
    # parts in order, as an indexer gives them: the absent behind
    positions = positions.masked_fill(positions < 0, 2**30).sort(-1).values
    check_topk(values, torch.where(positions == 2**30, -1, positions), k, device)


def test_ties_go_to_the_lower_position_and_not_to_the_lower_rank(device):
    """With interleaved shards rank 1 holds the lower of two equal keys."""
    values = torch.tensor([[[7.0, 1.0]], [[7.0, 7.0]]])
    positions = torch.tensor([[[6, 8]], [[1, 5]]])
    got, _ = custom.npu_merge_topk(values.to(device), positions.to(device), 2)
    assert got.tolist() == [[1, 5]]


def test_hostile_values_and_positions(device):
    nan, inf = math.nan, math.inf
    values = torch.tensor([[[nan, inf, -inf, 0.0]], [[-0.0, 3e38, -3.4e38, 1e-45]]])
    positions = torch.tensor([[[0, 2**31 - 1, 4, 9]], [[8, 2**31, -(2**40), 2**20]]])
    for k in (1, 2, 4, 6, 9):
        check_topk(values, positions, k, device)
    check_topk(values, torch.full_like(positions, -1), 3, device)
    empty = custom.npu_merge_topk(values[..., :0].to(device), positions[..., :0].to(device), 3)
    assert empty[0].tolist() == [[-1] * 3] and empty[1].tolist() == [[0.0] * 3]


def test_shards_of_an_indexer_choose_what_the_whole_chooses(device):
    """Keys dealt out over 3 parts in turn, 5 together. Scores are whole numbers, exact in float32,
    of which some tie; in half precision many more would."""
    dtype = torch.float16 if custom.config.backend == "cuda" else torch.bfloat16
    random = torch.Generator().manual_seed(5)

    def whole(high: int, *shape: int) -> Tensor:
        drawn = torch.randint(-high, high + 1, shape, generator=random)
        return drawn.to(dtype).to(device)

    q, keys = whole(12, 1, 1, 16, 64), whole(12, 1, 101, 1, 64)
    keys[0, 50:60] = keys[0, 40:50]
    w = torch.ones(1, 1, 16, dtype=dtype, device=device)
    k, size, interleave = 48, 3, 5
    options = dict(sparse_count=k, sparse_mode=0)
    _, every = custom.npu_lightning_indexer_scores(q, keys, w, **options)
    assert every.dtype is torch.float32
    assert len(every.to(dtype).unique()) < len(every.unique()) < k
    selected, _ = custom.npu_lightning_indexer(q, keys, w, **options)
    values, positions = [], []
    every = torch.arange(101, device=device)
    for rank in range(size):
        mine = every[every // interleave % size == rank]
        index, value = custom.npu_lightning_indexer_scores(q, keys[:, mine], w, **options)
        positions.append(torch.where(index >= 0, mine[index.clamp(min=0).long()], -1))
        values.append(value)
    got, _ = custom.npu_merge_topk(torch.stack(values), torch.stack(positions), k)
    assert torch.equal(got, selected)


# ------------------------------------------------------------------- positions of shards


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 5), st.integers(1, 7), st.lists(st.integers(-3, 200), min_size=1, max_size=30)
)
def test_positions_of_shards(size: int, interleave: int, positions: list[int]):
    index = torch.tensor(positions)
    seen = 0
    for rank in range(size):
        mine = [p for p in range(201) if p // interleave % size == rank]
        local, count = custom.localize_indices(index, rank, size, interleave)
        wanted = [mine.index(p) for p in positions if p in mine]
        assert local.tolist() == wanted + [-1] * (len(positions) - len(wanted))
        assert count.item() == len(wanted)
        seen += len(wanted)
        lengths = torch.tensor([0, 1, 2, 57, 200])
        assert custom.shard_positions(lengths, rank, size, interleave).tolist() == [
            sum(p < n for p in mine) for n in lengths.tolist()
        ]
    assert seen == sum(p >= 0 for p in positions)


@pytest.mark.parametrize("kind", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("K", [1, 16, 77, 2048])
def test_localized_indices_on_a_device(K, kind, device, backend):
    random = torch.Generator().manual_seed(K)
    index = torch.randint(-9, 2**24, (2, 3, 1, K), generator=random).to(kind)
    if kind is torch.int64:
        index[0, 0, 0, 0] = 2**40
    before = log.calls["npu_localize_indices", backend]
    for rank, size, interleave in ((0, 1, 1), (1, 2, 64), (2, 3, 1)):
        local, count = custom.npu_localize_indices(index.to(device), rank, size, interleave)
        for row, got, n in zip(
            index.flatten(0, -2).tolist(),
            local.flatten(0, -2).tolist(),
            count.flatten(),
            strict=True,
        ):
            mine = [p for p in row if 0 <= p < 2**31 and p // interleave % size == rank]
            wanted = [p // (interleave * size) * interleave + p % interleave for p in mine]
            assert n == len(mine) and got == wanted + [-1] * (K - len(mine))
    assert log.calls["npu_localize_indices", backend] == before + 3


@pytest.mark.parametrize(
    "changes, said",
    [
        (dict(rank=3), "`rank` is 3, expected 0 to 2"),
        (dict(rank=-1), "`rank` is -1"),
        (dict(size=0), "`size` is 0, expected at least 1"),
        (dict(interleave=0), "`interleave` is 0"),
    ],
)
def test_a_shard_that_is_none_is_refused(changes: dict[str, Any], said: str):
    arguments = dict(rank=0, size=3, interleave=1) | changes
    with pytest.raises(ValueError, match=said):
        custom.npu_localize_indices(torch.zeros(4, dtype=torch.int64), **arguments)


# ------------------------------------------------------------------- torch_npu's schemas


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: custom.shard_positions(torch.tensor([8]), 5, 2), "`rank` is 5, expected 0 to 1"),
        (lambda: custom.shard_positions(torch.tensor([8]), 0, 2, 0), "`interleave` is 0"),
        (lambda: custom.shard_positions(torch.tensor([8.0]), 0, 2), "`lengths` is float32"),
        (lambda: custom.shard_positions(torch.tensor([8]), 0, 2, 1.5), "`interleave` is 1.5"),
        (lambda: custom.shard_positions(torch.tensor([8]), 0, "2"), "`size` is '2', expected a"),
        (lambda: custom.shard_slots(*[torch.zeros(2, 3).int()] * 2, 16.0, 0, 2), "`page_size` is"),
        (
            lambda: custom.shard_slots(*(torch.zeros(2, n).int() for n in (3, 0)), 16, 0, 2),
            "`block_table` has no page",
        ),
        (
            lambda: custom.npu_attention_update(
                [torch.zeros(3)] * 2, [torch.zeros(3, 8), torch.zeros(3, 8).half()], 1
            ),
            r"`local_out\[1\]` has dtype torch.float16, expected torch.float32",
        ),
        (
            lambda: custom.npu_ring_attention_update(
                *[torch.zeros(4, 2, 9), *[torch.zeros(2, 2, 4, 8)] * 2] * 2
            ),
            "`prev_attn_out` has rows of 9, expected a multiple of N=2",
        ),
        (
            lambda: custom.npu_ring_attention_update(
                *[torch.zeros(4, 2, 8), *[torch.zeros(4, 2, 8)] * 2],
                torch.zeros(4, 2, 8).half(),
                *[torch.zeros(4, 2, 8)] * 2,
                input_layout="TND",
            ),
            "`cur_attn_out` has dtype torch.float16",
        ),
        (lambda: custom.shard_slots(*[torch.zeros(2, 3).int()] * 2, 16, 2, 2), "`rank` is 2"),
        (
            lambda: custom.shard_slots(torch.zeros(2, 3).int(), torch.zeros(1, 3).int(), 16, 0, 2),
            "`block_table` has shape",
        ),
        (
            lambda: custom.npu_attention_update([torch.zeros(3)], [torch.zeros(4, 8)], 1),
            r"`local_out\[0\]` has shape",
        ),
        (
            lambda: custom.npu_ring_attention_update(*[torch.zeros(4, 2, 8)] * 6),
            "`prev_softmax_max` has shape",
        ),
    ],
)
def test_shapes_of_parts_are_refused(call, said: str):
    with pytest.raises((ValueError, TypeError), match=rf"^(npu|shard)_\w+: {said}"):
        call()


def test_shards_compile_as_one_graph():
    positions, table = torch.arange(6).view(2, 3), torch.arange(4).view(2, 2)

    def both(positions: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        slots = custom.shard_slots(positions, table, 16, 1, 2)
        return slots, custom.shard_positions(positions, 1, 2)

    got = torch.compile(both, fullgraph=True, backend="eager")(positions, table)
    for a, b in zip(got, both(positions, table), strict=True):
        assert torch.equal(a, b)


def test_attention_update():
    outs, tops, sums, out, lse = parts([9, 30], (6,), 16)
    lses = (tops + sums.log()).float()
    got, merged = custom.npu_attention_update(list(lses), list(outs.float()), 1)
    torch.testing.assert_close(got, out.float())
    torch.testing.assert_close(merged, lse.float())
    assert custom.npu_attention_update(list(lses), list(outs.float()), 0)[1].shape == (0,)
    with pytest.raises(ValueError, match="`update_type` is 2"):
        custom.npu_attention_update(list(lses), list(outs.float()), 2)
    with pytest.raises(ValueError, match="3 parts and `local_out` 2"):
        custom.npu_attention_update(list(lses), list(outs.float()[:2]), 0)


@pytest.mark.parametrize("layout", ["SBH", "TND"])
def test_ring_attention_update(layout):
    """Three shards one after the other, the last of which nothing sees."""
    rows = (2, 3, 5) if layout == "SBH" else (7, 3)  # [B, N, S] or [T, N]
    outs, tops, sums, out, lse = parts([11, 40], rows, 16)

    def shaped(x: Tensor) -> Tensor:
        return x.permute(2, 0, 1, 3).flatten(2) if layout == "SBH" else x

    def eight(x: Tensor) -> Tensor:
        return x.float()[..., None].expand(*x.shape, 8).contiguous()

    state = [
        (shaped(o.float()), eight(t), eight(s)) for o, t, s in zip(outs, tops, sums, strict=True)
    ]
    merged = state[0]
    for other in state[1:]:
        merged = custom.npu_ring_attention_update(*merged, *other, input_layout=layout)
    torch.testing.assert_close(merged[0], shaped(out).float())
    got = merged[1] + merged[2].log()
    torch.testing.assert_close(got, eight(lse))
    with pytest.raises(ValueError, match="`input_layout` is 'BSH'"):
        custom.npu_ring_attention_update(*state[0], *state[1], input_layout="BSH")
