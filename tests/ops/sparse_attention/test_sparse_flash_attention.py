# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""npu_sparse_flash_attention against a loop over query tokens, and against hand-made numbers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import custom

from ...support import places, stand_in
from ...support.accuracy import assert_close_to_float64, every_dtype, skip_unless_taken
from ...support.calls import assert_refuses
from ...support.ragged import (
    LAYOUTS,
    Packed,
    assert_two_keys,
    ints,
    run,
    shuffled_table,
    strided,
    two_keys,
)
from ...support.selected import RAGGED, N, Problem

OP = "npu_sparse_flash_attention"


def tokens_first(statistics: Tensor) -> Tensor:
    """[B, 1, S, N] or [1, T, N] without the key head."""
    return statistics.squeeze(-3)


def check(problem: Problem, backend, device, dtype, layouts, sparse_mode=3):
    problem.rounded_to(dtype)
    packed = Packed(layouts, problem.rows, problem.keys, device)
    arguments = problem.arguments(packed, dtype)
    out, top, total = run(
        OP, backend, **arguments, sparse_mode=sparse_mode, return_softmax_lse=True
    )
    batch = [len(problem.rows), 1] if layouts[0] == "BSND" else [1]
    assert list(top.shape) == list(total.shape) == [*batch, out.shape[-3], N]
    assert top.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
    got, padding = packed.unpack(out)
    lse, lse_padding = packed.unpack(tokens_first(top + total.log()))
    assert (padding == 0).all() and (lse_padding == -torch.inf).all()
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    exact, plain, statistics = (
        [torch.cat(parts) for parts in zip(*problem.solved(sparse_mode, precision), strict=True)]
        for precision in (torch.float64, dtype, wide)
    )
    assert_close_to_float64("out", torch.cat(got), plain[0], exact[0])
    assert_close_to_float64(
        "lse", torch.cat(lse), *(each[1] + each[2].log() for each in (statistics, exact))
    )
    # the statistics change nothing else, and are absent unless asked for
    alone, *empty = run(OP, backend, **arguments, sparse_mode=sparse_mode)
    assert torch.equal(alone, out) and all(list(each.shape) == [0] for each in empty)


@pytest.mark.parametrize("sparse_mode", [3, 0])
@pytest.mark.parametrize("layouts", LAYOUTS, ids="-".join)
@every_dtype
def test_every_layout(device, backend, dtype, layouts, sparse_mode):
    skip_unless_taken(dtype, device, backend)
    problem = Problem(*zip(*RAGGED, strict=True))
    check(problem, backend, device, dtype, layouts, sparse_mode)


@pytest.mark.parametrize("layouts", [("TND", "TND"), ("BSND", "PA_BSND")], ids="-".join)
@pytest.mark.parametrize("block_size", [2, 3, 16])
def test_blocks_of_positions(device, backend, layouts, block_size):
    problem = Problem(*zip(*RAGGED, strict=True), count=5, block_size=block_size)
    check(problem, backend, device, torch.float16, layouts)


@pytest.mark.parametrize("layouts", [("BSND", "BSND"), ("TND", "PA_BSND")], ids="-".join)
@every_dtype
def test_sinks_enter_the_denominator_alone(device, backend, dtype, layouts):
    skip_unless_taken(dtype, device, backend)
    problem = Problem(*zip(*RAGGED, strict=True), sinks=True)
    problem.sinks[0], problem.sinks[1] = -torch.inf, 60.0
    check(problem, backend, device, dtype, layouts)


@pytest.mark.parametrize("layouts", [("BSND", "BSND"), ("BSND", "PA_BSND")], ids="-".join)
@pytest.mark.parametrize("options", [dict(rope=None), dict(rope=0), dict(own_value=True)], ids=str)
def test_optional_tensors(device, backend, layouts, options):
    problem = Problem(*zip(*RAGGED, strict=True), **options)
    check(problem, backend, device, torch.float16, layouts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_many_selected_keys(device, backend, dtype):
    """Enough to be split among programs: 700 of 3000 keys, few query tokens."""
    skip_unless_taken(dtype, device, backend)
    check(Problem((2,), (3000,), count=700), backend, device, dtype, ("BSND", "PA_BSND"))


@pytest.mark.parametrize(("heads", "pools"), [(64, 512), (12, 7), (20, 7), (96, 7)])
def test_pools_with_an_open_tail(device, backend, heads, pools):
    """GLM-5.3-Flash: latents of 512 without a rope, of 4 tokens a pool; the last list entry is the
    pool that is open, if one is, and -1 stands behind it."""
    dtype = torch.float32 if backend == "reference" else torch.float16
    if backend != "reference" and device.type == "cpu":  # interpreted
        pools = min(pools, 20)
    lengths, rows, size, page = (pools * 4 + 6, 5), 3, 4, 16
    table, pages = shuffled_table(lengths)
    key = torch.full((pages, page, 1, 512), torch.nan)
    query = torch.randn(2, rows, heads, 512).to(dtype)
    indices = torch.full((2, rows, 1, pools + 1), -1, dtype=torch.int32)
    wanted = torch.zeros(2, rows, heads, 512, dtype=torch.float64)
    lse = torch.zeros(2, rows, heads, dtype=torch.float64)
    for b, length in enumerate(lengths):
        latent = torch.randn(length, 512).to(dtype)
        p = torch.arange(length)
        key[table[b, p // page].long(), p % page, 0] = latent.float()
        for j in range(rows):
            seen = length - rows + j + 1
            closed = seen // size
            chosen = torch.randperm(closed)[:pools].sort().values
            tokens = [w * size + i for w in chosen.tolist() for i in range(size)]
            tokens += range(closed * size, seen)
            names = [*chosen.tolist(), *([closed] if seen % size else [])]
            indices[b, j, 0, : len(names)] = torch.tensor(names)
            k = latent[tokens].double()
            z = query[b, j].double() @ k.T / 16
            wanted[b, j] = z.softmax(-1) @ k
            lse[b, j] = z.logsumexp(-1)
    given = dict(
        query=query.to(device),
        key=key.to(device, dtype),
        value=None,
        sparse_indices=indices.to(device),
        scale_value=256**-0.5,
        sparse_block_size=size,
        layout_kv="PA_BSND",
        block_table=table.to(device),
        actual_seq_lengths_kv=ints(lengths, device),
        return_softmax_lse=True,
    )
    out, top, total = run(OP, backend, **given)
    error = 1e-5 if dtype is torch.float32 else 2e-3
    torch.testing.assert_close(out.double().cpu(), wanted, rtol=0, atol=error)
    got = tokens_first(top + total.log()).double().cpu()
    torch.testing.assert_close(got, lse, rtol=0, atol=error)
    # ropes of no channel are as good as absent
    ropes = dict(query_rope=given["query"][..., :0], key_rope=given["key"][..., :0])
    again = run(OP, backend, **given, **ropes)
    assert all(torch.equal(x, y) for x, y in zip(again, (out, top, total), strict=True))


def test_numbers_by_hand(device, backend):
    given = two_keys(2, device, torch.float16 if backend != "reference" else torch.float32)
    given["query"] = given["query"][None]
    out, top, total = run(
        OP,
        backend,
        **given,
        sparse_indices=ints([1, -1, 0], device).view(1, 1, 1, 3),
        scale_value=1.0,
    )
    assert_two_keys(out)
    torch.testing.assert_close(top.item(), math.log(3), rtol=1e-3, atol=0)
    torch.testing.assert_close(total.item(), 4 / 3, rtol=1e-3, atol=0)


def test_nothing_selected_is_zero_with_or_without_sinks(device, backend):
    dtype = torch.float16
    query = torch.randn(1, 2, 4, 32).to(device, dtype)
    key = torch.full((1, 9, 1, 32), torch.nan).to(device, dtype)
    for sinks in (None, torch.full((4,), -torch.inf, device=device), torch.ones(4, device=device)):
        # the last two name blocks of 4 whose first position is 0 in 32 bits
        for index, block in (
            *((i, 1) for i in (-1, 9, 2**31 - 1, -(2**31))),
            (2**30, 4),
            (-(2**30), 4),
        ):
            out, top, total = run(
                OP,
                backend,
                query=query,
                key=key,
                value=None,
                sparse_indices=torch.full((1, 2, 1, 6), index, dtype=torch.int32, device=device),
                scale_value=1.0,
                sinks=sinks,
                sparse_block_size=block,
                return_softmax_lse=True,
            )
            assert (out == 0).all() and (top == -torch.inf).all() and (total == 0).all()


def test_keys_that_are_not_selected_are_not_read(device, backend):
    dtype = torch.float16
    query, key = torch.randn(1, 1, 4, 32), torch.full((1, 40, 1, 32), torch.nan)
    key[:, ::5] = torch.randn(8, 1, 32)
    indices = ints([0, 5, -1, 35, 999, 10], device).view(1, 1, 1, 6)
    out, _, _ = run(
        OP,
        backend,
        query=query.to(device, dtype),
        key=key.to(device, dtype),
        value=None,
        sparse_indices=indices,
        scale_value=0.2,
    )
    assert out.isfinite().all()


def test_pages_out_of_range_are_absent(device, backend):
    problem = Problem((1,), (64,), count=1)
    problem.rounded_to(torch.float16)
    problem.indices = [torch.arange(64, dtype=torch.int32).view(1, 1, 64)]
    packed = Packed(("BSND", "PA_BSND"), (1,), (64,), device)
    arguments = problem.arguments(packed, torch.float16)
    table = arguments["block_table"].clone()
    table[0, 1], table[0, 2] = -1, 1000
    out, _, _ = run(OP, backend, **(arguments | dict(block_table=table)))
    problem.indices[0][0, 0, 16:48] = -1
    exact, plain = problem.solved(3, torch.float64)[0][0], problem.solved(3, torch.float16)[0][0]
    assert_close_to_float64("out", out[0, :1], plain, exact)


def test_strided_inputs_and_64_bit_indices(device, backend):
    dtype = torch.float16
    problem = Problem((2, 3), (40, 20))
    packed = Packed(("BSND", "PA_BSND"), problem.rows, problem.keys, device)
    dense = problem.arguments(packed, dtype)
    names = ("actual_seq_lengths_query", "actual_seq_lengths_kv", "sparse_indices", "block_table")
    other = strided(dense, ("query", "query_rope", "key", "key_rope"), names)
    a, b = run(OP, backend, **dense), run(OP, backend, **other)
    assert torch.equal(a[0], b[0])


def test_prefill_in_blocks_equals_one_block(monkeypatch):
    from custom.dispatch.reference.common import selection

    problem = Problem((50,), (50,))
    arguments = problem.arguments(
        Packed(("BSND", "BSND"), (50,), (50,), torch.device("cpu")), torch.float64
    )
    whole, _, _ = torch.ops.custom.npu_sparse_flash_attention(**arguments)
    monkeypatch.setattr(selection, "BLOCK", 3 * 12 * 64)
    parts, _, _ = torch.ops.custom.npu_sparse_flash_attention(**arguments)
    torch.testing.assert_close(parts, whole)


def valid() -> dict:
    return dict(
        query=torch.zeros(2, 3, 4, 32),
        key=torch.zeros(2, 9, 1, 32),
        value=None,
        sparse_indices=torch.zeros(2, 3, 1, 5, dtype=torch.int32),
        scale_value=1.0,
    )


ROPE = dict(query_rope=torch.zeros(2, 3, 4, 16), key_rope=torch.zeros(2, 9, 1, 16))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(layout_kv="PA_NZ"), ValueError, "`layout_kv` is 'PA_NZ', expected one of"),
        (dict(layout_kv="TND"), ValueError, "`layout_kv` is 'TND', expected 'BSND'"),
        (dict(layout_kv="PA_BSND"), ValueError, "`actual_seq_lengths_kv` is missing"),
        (dict(key=torch.zeros(2, 9, 1, 48)), ValueError, "`key` has shape .* D=32"),
        (dict(value=torch.zeros(2, 8, 1, 32)), ValueError, "`value` has shape .* S2=9"),
        (dict(value=torch.zeros(2, 9, 1, 32).half()), TypeError, "`value` has dtype"),
        (dict(sparse_indices=torch.zeros(2, 3, 1, 5)), TypeError, "`sparse_indices` is float32"),
        (
            dict(sparse_indices=torch.zeros(2, 3, 4, 5, dtype=torch.int32)),
            ValueError,
            "`sparse_indices` has shape",
        ),
        (dict(query_rope=ROPE["query_rope"]), ValueError, "only one of `query_rope` and `key_r"),
        (ROPE | dict(key_rope=torch.zeros(2, 9, 1, 8)), ValueError, "`key_rope` has .* Dr=16"),
        (dict(sinks=torch.zeros(4).half()), TypeError, "`sinks` is float16, expected float32"),
        (dict(sinks=torch.zeros(5)), ValueError, "`sinks` has shape .* N=4"),
        (dict(query=torch.zeros(2, 3, 32, 4).mT), ValueError, "`query` has stride 4"),
        (
            dict(query=torch.zeros(2, 3, 4, 0), key=torch.zeros(2, 9, 1, 0)),
            ValueError,
            "`query` has latents of 0 channels, expected at least 1",
        ),
    ],
)
def test_errors(change, error, message):
    assert_refuses(OP, valid() | change, error, message)


def test_gradients_need_keys_that_are_not_paged():
    arguments = valid() | dict(
        key=torch.zeros(5, 16, 1, 32),
        layout_kv="PA_BSND",
        actual_seq_lengths_kv=torch.zeros(2, dtype=torch.int32),
        block_table=torch.zeros(2, 2, dtype=torch.int32),
    )
    arguments["query"].requires_grad_()
    with pytest.raises(custom.NotSupported, match=f"^{OP}: .*paged keys"):
        custom.npu_sparse_flash_attention(**arguments)
    with torch.no_grad():
        custom.npu_sparse_flash_attention(**arguments)


def test_a_value_that_begins_as_the_key_does_is_another_one_with_other_strides(monkeypatch):
    """To the NPU's kernel, over a stand-in for what Triton lacks of triton-ascend's names."""
    pytest.importorskip("triton")
    with stand_in.of_the_front_end(monkeypatch):
        unsupported = places.module("sparse_flash_attention").unsupported
    pool = torch.zeros(8, 4, 1, 64, dtype=torch.float16)
    given = dict(query=pool.new_zeros(1, 1, 16, 64), query_rope=None, key_rope=None)
    given |= dict(sparse_block_size=1, block_table=ints([[0]], "cpu"))
    given |= dict(sparse_indices=ints([0], "cpu").view(1, 1, 1, 1))
    assert unsupported(key=pool[:2], value=pool[:2], **given) is None
    for value in (pool[::2][:2], pool[1:3]):
        assert "another tensor than `key`" in unsupported(key=pool[:2], value=value, **given)
