# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""npu_sparse_attention_score on every backend: blocks of any size over pages of any size, against
every key by itself in float64."""

from __future__ import annotations

import math

import pytest
import torch

import custom

from ...support import interpreted
from ...support.accuracy import assert_close_to_float64, every_dtype, skip_unless_taken
from ...support.blocks import WIDE, Problem
from ...support.calls import assert_refuses, refused
from ...support.kernels import gpu
from ...support.ragged import BEYOND, assert_two_keys, ints, run, two_keys
from ...support.samples import sample

OP = "npu_sparse_attention_score"
ROWS, LENGTHS = (3, 1, 0, 2, 1), (70, 1, 9, 50, 16)


def check(problem, backend, device, dtype):
    skip_unless_taken(dtype, device, backend)
    problem.rounded_to(dtype)
    arguments = problem.arguments(device, dtype)
    out, lse = run(OP, backend, **arguments, return_softmax_lse=True)
    plain, exact = problem.solved(dtype), problem.solved()
    assert_close_to_float64("out", out, plain[0], exact[0])
    assert_close_to_float64("lse", lse, plain[1], exact[1])
    none = (exact[1] == -torch.inf).to(device)
    assert (out[none] == 0).all() and none[-2:].all()
    alone, empty = run(OP, backend, **arguments)
    assert torch.equal(alone, out) and list(empty.shape) == [0]


@every_dtype
@pytest.mark.parametrize("block, page", [(4, 16), (16, 16), (12, 32), (48, 16), (1, 16)])
def test_blocks_below_and_above_the_page(device, backend, dtype, block, page):
    check(Problem(ROWS, LENGTHS, block=block, page=page), backend, device, dtype)


@pytest.mark.parametrize("own", [True, False], ids=["own blocks", "shared blocks"])
@pytest.mark.parametrize("heads, shared", [(12, 1), (24, 2), (32, 2), (5, 5), (40, 2)])
def test_heads(device, backend, heads, shared, own):
    problem = Problem((2, 1), (40, 21), heads=heads, shared=shared, own=own)
    check(problem, backend, device, torch.float16)


@pytest.mark.parametrize("own", [True, False])
def test_counts_cut_each_list_and_sinks_add_to_the_denominator(device, backend, own):
    problem = Problem(ROWS, LENGTHS, own=own, counts=True, sinks=True)
    problem.sinks[0], problem.sinks[1] = -torch.inf, 60.0
    check(problem, backend, device, torch.float16)
    problem = Problem((2,), (40,), own=own, counts=True)
    every = problem.arguments(device, torch.float16)
    of_one = every | dict(select_num_idx=every["select_num_idx"][:1])
    like = every | dict(select_num_idx=of_one["select_num_idx"].expand(len(problem.index), -1))
    for a, b in zip(run(OP, backend, **of_one), run(OP, backend, **like), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("size", [16, 24, 128, 256])
def test_head_sizes(device, backend, size):
    check(Problem((2, 1), (40, 21), size=size), backend, device, torch.float16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", WIDE)
def test_wide_heads(device, backend, name, dtype):
    check(Problem(**(dict(size=128) | WIDE[name])), backend, device, dtype)


@gpu
@pytest.mark.parametrize("name", WIDE)
def test_the_kernel_of_other_gpus(monkeypatch, name):
    monkeypatch.setattr("custom.cuda_ops.common.gpu.is_hopper", lambda device: False)
    test_wide_heads(torch.device("cuda"), "cuda", name, torch.bfloat16)


@gpu
def test_caches_beyond_32_bits():
    """The last pages are read, not some wrapped address."""
    problem = Problem((1,), (500,), size=128, page=64, block=16)
    given = problem.rounded_to(torch.float16).arguments(torch.device("cuda"), torch.float16)
    wanted, pages = run(OP, "cuda", **given)[0], 2**31 // (2 * 64 * 2 * 128) + 3
    cache = torch.empty(pages, 2, 64, 2, 128, dtype=torch.float16, device="cuda")
    first = pages - len(given["key"])
    cache[first:, 0], cache[first:, 1] = given["key"], given["value"]
    far = dict(key=cache[:, 0], value=cache[:, 1], block_table=given["block_table"] + first)
    assert torch.equal(run(OP, "cuda", **(given | far))[0], wanted)


def test_the_sizes_of_the_models(device, backend):
    """A token of MiniMax-M3, and one of Qwen4-Exp with its open block behind 20 others."""
    m3 = Problem((1,), (700,), heads=16, shared=1, size=128, block=128, page=128, chosen=16)
    check(m3, backend, device, torch.float16)
    qsa = Problem(
        (1,), (300,), heads=24, shared=2, size=256, block=4, page=128, chosen=21, own=False
    )
    check(qsa, backend, device, torch.float16)


def test_few_rows_are_split_and_many_are_not(device, backend, monkeypatch):
    if backend == "cuda" and device.type == "cpu":
        monkeypatch.setattr("custom.cuda_ops.common.gpu.num_sms", lambda device: 16)
    check(Problem((1,), (500,), block=32, page=64, chosen=14), backend, device, torch.float16)
    check(Problem((7, 12), (9, 50), chosen=3), backend, device, torch.float16)


def test_numbers_by_hand(device, backend):
    out, lse = run(
        OP,
        backend,
        **two_keys(16, device, torch.float16),
        select_idx=ints([1, -1, 0], device).view(1, 1, 3),
        block_table=ints([0], device).view(1, 1),
        actual_seq_lengths=ints([1], device),
        actual_seq_lengths_kv=ints([2], device),
        block_size=1,
        top_k=3,
    )
    assert_two_keys(out)
    torch.testing.assert_close(lse.item(), math.log(4), rtol=1e-3, atol=0)


def test_a_block_longer_than_any_request(device, backend):
    problem = Problem((2, 1), (40, 21), chosen=1)
    problem.index[:] = 0
    arguments = problem.arguments(device, torch.float16)
    want = run(OP, backend, **(arguments | dict(block_size=64)), return_softmax_lse=True)
    for block in (2**20, 2**31 - 1):
        got = run(OP, backend, **(arguments | dict(block_size=block)), return_softmax_lse=True)
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a, b)
    problem.index[:] = 1
    arguments = problem.arguments(device, torch.float16) | dict(block_size=2**31 - 1)
    assert (run(OP, backend, **arguments)[0] == 0).all()


def test_pages_that_are_not_there_are_absent(device, backend):
    problem = Problem((1,), (64,), chosen=4)
    problem.index[:] = torch.arange(4)
    problem.rounded_to(torch.float16)
    problem.table[0, 1] = -1
    arguments = problem.arguments(device, torch.float16)
    table = arguments["block_table"].clone()
    table[0, 2] = 1000
    problem.table[0, 2] = -1
    out, lse = run(OP, backend, **(arguments | dict(block_table=table)), return_softmax_lse=True)
    plain, exact = problem.solved(torch.float16), problem.solved()
    assert_close_to_float64("out", out, plain[0], exact[0])
    assert_close_to_float64("lse", lse, plain[1], exact[1])


def test_strides_and_64_bits(device, backend):
    problem = Problem(ROWS, LENGTHS, counts=True)
    dense = problem.arguments(device, torch.float16)
    other = dict(dense)
    other["query"] = torch.stack([dense["query"], dense["query"] * torch.nan], 1)[:, 0]
    wide = torch.full((*dense["key"].shape[:3], 48), torch.nan, dtype=torch.float16, device=device)
    other["key"] = wide[..., :32]
    other["key"].copy_(dense["key"])
    other["value"] = dense["value"].transpose(1, 2).contiguous().transpose(1, 2)
    for name in ("select_idx", "block_table", "select_num_idx", "actual_seq_lengths",
                 "actual_seq_lengths_kv"):  # fmt: skip
        other[name] = dense[name].long()
    other["select_idx"][0, :, 1] += 2**32
    dense["select_idx"][0, :, 1] = -1
    other["block_table"] = torch.stack([other["block_table"]] * 2, 1)[:, 1]
    for a, b in zip(run(OP, backend, **dense), run(OP, backend, **other), strict=True):
        assert torch.equal(a, b)


def test_lengths_end_with_the_tensors(device, backend):
    problem = Problem((3, 2), (48, 48))
    arguments = problem.arguments(device, torch.float16)
    tokens, reach = len(problem.seen), arguments["block_table"].shape[1] * 16

    def outputs(rows, keys, dtype=torch.int32):
        names = ("actual_seq_lengths", "actual_seq_lengths_kv")
        given = {n: ints(x, device, dtype) for n, x in zip(names, (rows, keys), strict=True)}
        return run(OP, backend, **(arguments | given), return_softmax_lse=True)

    within = outputs([3, tokens - 3], [48, reach]), outputs([0, 2], [48, 0])
    for far, dtype in BEYOND:
        for got, want in (
            (outputs([3, far], [48, far], dtype), within[0]),
            (outputs([-far, 2], [48, -far], dtype), within[1]),
        ):
            torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "changes, sentence",
    [
        *refused(top_k=(5, 3), num_key_value_heads=(1, 2)),
        *refused(inner_precise=(1, "one of 0, 4"), block_size=(0, "at least 1")),
        (dict(actual_seq_lengths=None), "`actual_seq_lengths` is missing"),
        (dict(actual_seq_lengths_kv=None), "`actual_seq_lengths_kv` is missing"),
        (dict(q_dequant_scale=torch.ones(1)), "`q_dequant_scale` is given, expected None"),
        (dict(k_dequant_scale=torch.ones(1)), "`k_dequant_scale` is given, expected None"),
        (dict(v_dequant_scale=torch.ones(1)), "`v_dequant_scale` is given, expected None"),
        (dict(select_idx=torch.zeros(3, 6, 3, dtype=torch.int32)), "`select_idx` has 3 heads"),
        (dict(select_num_idx=torch.zeros(3, 6, dtype=torch.int32)), "`select_num_idx` has 3 heads"),
        (dict(query=torch.zeros(6, 3, 32)), "`query` has 3 heads, expected a multiple of the 2"),
        (dict(actual_seq_lengths=torch.tensor([3, 6])), "adds up to 9, expected at most T=6"),
        (dict(select_num_idx=torch.full((1, 6), 4)), r"`select_num_idx` is \[4, 4.* from 0 to 3"),
        (dict(actual_seq_lengths_kv=torch.tensor([3, 60])), "from 0 to 48"),
    ],
    ids=str,
)
def test_refusals(looked_at, changes, sentence):
    given = sample(OP, torch.device("cpu"), torch.float32) | changes
    assert_refuses(OP, given, ValueError, sentence)


@pytest.mark.parametrize("size", [0, 272])
def test_wide_and_empty_heads_are_refused(size):
    query, cache = torch.zeros(6, 4, size), torch.zeros(8, 16, 2, size)
    given = sample(OP, torch.device("cpu"), torch.float32)
    with pytest.raises(ValueError, match=f"the head dim is {size}, expected 1 to 256"):
        custom.npu_sparse_attention_score(**(given | dict(query=query, key=cache, value=cache)))


def test_a_pair_where_it_is_asked_for():
    given = sample(OP, torch.device("cpu"), torch.float32)
    out, lse = custom.npu_sparse_attention_score(**given)
    assert list(lse.shape) == [6, 4]
    alone = custom.npu_sparse_attention_score(**(given | dict(return_softmax_lse=False)))
    assert torch.equal(alone, out)


def test_under_the_interpreter():
    interpreted.passes("(blocks_below and 16-float16) or (counts and True) or models", __file__)
