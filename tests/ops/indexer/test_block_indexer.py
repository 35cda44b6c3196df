# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""npu_block_indexer on every backend: which blocks each head of a token chooses, against every
product by itself."""

from __future__ import annotations

import pytest
import torch

from ...support import interpreted
from ...support.accuracy import every_dtype, skip_unless_taken
from ...support.calls import assert_refuses, refused
from ...support.chosen_blocks import WIDE, Problem
from ...support.ragged import BEYOND, ints, run
from ...support.samples import sample

OP = "npu_block_indexer"
ROWS, LENGTHS = (2, 1, 0, 1), (53, 1, 9, 16)


def check(problem, backend, device, dtype=torch.float16):
    skip_unless_taken(dtype, device, backend)
    arguments = problem.arguments(device, dtype)
    index, values = run(OP, backend, **arguments)
    wanted, scores = problem.solved()
    assert torch.equal(index.cpu(), wanted.int())
    assert values.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
    assert torch.equal(values.cpu().double(), scores)
    alone, empty = run(OP, backend, **(arguments | dict(return_value=False)))
    assert torch.equal(alone, index) and list(empty.shape) == [0]


@every_dtype
@pytest.mark.parametrize("block, page", [(4, 16), (16, 16), (12, 32), (48, 16), (1, 16)])
def test_blocks_below_and_above_the_page(device, backend, dtype, block, page):
    check(Problem(ROWS, LENGTHS, block=block, page=page), backend, device, dtype)


@pytest.mark.parametrize("init, local", [(0, 0), (1, 1), (0, 3), (2, 1), (3, 0)])
def test_forced_blocks_count_among_the_chosen(device, backend, init, local):
    problem = Problem(ROWS, LENGTHS, block=4, init_blocks=init, local_blocks=local)
    check(problem, backend, device)


@pytest.mark.parametrize("heads", [1, 3, 16, 40])
def test_heads(device, backend, heads):
    check(Problem((2, 1), (40, 21), heads=heads), backend, device)


@pytest.mark.parametrize("size", [8, 24, 128, 256])
def test_head_sizes(device, backend, size):
    check(Problem((2, 1), (40, 21), size=size), backend, device)


def test_the_size_of_the_model(device, backend):
    problem = Problem((2,), (2300,), size=128, block=128, page=128, top_k=16)
    check(problem, backend, device)


@pytest.mark.parametrize("name", WIDE)
def test_tiles_of_128_rows(device, backend, name):
    problem = Problem(**WIDE[name])
    problem.table[0, 0] = -1
    check(problem, backend, device)


def test_many_rows_of_a_request_and_more_blocks_than_there_are(device, backend):
    check(Problem((12, 3), (50, 45), block=4, top_k=20), backend, device)


def test_rows_in_turns(device, backend, monkeypatch):
    """Scores of a few rows at a time."""
    if backend == "cuda":
        monkeypatch.setattr("custom.cuda_ops.indexer.block_indexer.CHUNK_BYTES", 4 * 16 * 3 * 2)
    check(Problem((3, 2), (45, 33), block=8), backend, device)


def test_equal_scores_go_to_the_lower_block(device, backend):
    problem = Problem((1,), (64,), block=8, top_k=4)
    problem.query[:] = 0
    check(problem, backend, device)


def test_pages_that_are_not_there(device, backend):
    """A block is what is left of it; without any key it is absent, forced or not."""
    problem = Problem((1, 1), (64, 40), block=8, top_k=8, init_blocks=1, local_blocks=3)
    problem.table[0, 0] = -1
    problem.table[0, 3] = 1000
    problem.table[1, 1] = -1
    check(problem, backend, device)
    problem.block = 24
    check(problem, backend, device)


def test_products_that_are_no_numbers(device, backend):
    """NaN is the lowest number; infinite ones come before others and behind forced ones."""
    key = torch.zeros(5, 16, 1, 16)
    key[0, :, :, 0], key[1, :, :, 0], key[2, 3, :, 0] = torch.nan, torch.inf, 5
    key[3, :, :, 0] = -torch.inf
    given = dict(
        query=torch.ones(1, 1, 16).to(device, torch.float16),
        key=key.to(device, torch.float16),
        block_table=torch.arange(5, device=device)[None],
        actual_seq_lengths=ints([1], device),
        actual_seq_lengths_key=ints([80], device),
        block_size=16,
        return_value=True,
    )
    lowest = torch.finfo(torch.float32).min
    for top_k, index, values in (
        (2, [1, 4], [torch.inf, 0]),
        (3, [1, 2, 4], [torch.inf, 5, 0]),
        (4, [0, 1, 2, 4], [lowest, torch.inf, 5, 0]),
    ):
        got, value = run(OP, backend, **given, top_k=top_k)
        assert got.flatten().tolist() == index
        assert value.flatten().tolist() == pytest.approx(values)


def test_a_block_longer_than_any_request(device, backend):
    arguments = Problem((2, 1), (40, 21), block=64).arguments(device, torch.float16)
    want = run(OP, backend, **arguments)
    for block in (2**20, 2**31 - 1):
        for a, b in zip(
            run(OP, backend, **(arguments | dict(block_size=block))), want, strict=True
        ):
            assert torch.equal(a, b)


def test_strides_and_64_bits(device, backend):
    dense = Problem(ROWS, LENGTHS).arguments(device, torch.float16)
    other = dict(dense)
    other["query"] = torch.stack([dense["query"], dense["query"] * torch.nan], 1)[:, 0]
    far = torch.full((len(dense["key"]), 3, 16, 1, 32), torch.nan, dtype=torch.float16)
    far[:, 1] = dense["key"].cpu()
    other["key"] = far.to(device)[:, 1]
    for name in ("block_table", "actual_seq_lengths", "actual_seq_lengths_key"):
        other[name] = dense[name].long()
    other["block_table"] = torch.stack([other["block_table"]] * 2, 1)[:, 1]
    for a, b in zip(run(OP, backend, **dense), run(OP, backend, **other), strict=True):
        assert torch.equal(a, b)


def test_lengths_end_with_the_tensors(device, backend):
    problem = Problem((2, 1), (48, 48), heads=1)
    arguments = problem.arguments(device, torch.float16)
    tokens, reach = len(problem.seen), arguments["block_table"].shape[1] * 16

    def outputs(rows, keys, dtype=torch.int32):
        names = ("actual_seq_lengths", "actual_seq_lengths_key")
        given = {n: ints(x, device, dtype) for n, x in zip(names, (rows, keys), strict=True)}
        return run(OP, backend, **(arguments | given))

    within = outputs([2, tokens - 2], [48, reach]), outputs([0, 1], [48, 0])
    for far, dtype in BEYOND:
        for got, want in (
            (outputs([2, far], [48, far], dtype), within[0]),
            (outputs([-far, 1], [48, -far], dtype), within[1]),
        ):
            torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize(
    "changes, sentence",
    [
        *refused(block_size=(0, "at least 1"), top_k=(0, "at least 1")),
        *refused(init_blocks=(-1, "at least 0"), local_blocks=(-1, "at least 0")),
        (dict(init_blocks=3), "are 3 and 1, expected at most `top_k` = 3 together"),
        (dict(actual_seq_lengths=torch.tensor([3, 6])), "adds up to 9, expected at most T=6"),
        (dict(key=torch.zeros(8, 16, 2, 32)), r"`key` has shape \[8, 16, 2, 32\]"),
        (dict(key=torch.zeros(8, 12, 1, 32)), "the page size is 12, expected a multiple of 16"),
    ],
    ids=str,
)
def test_refusals(looked_at, changes, sentence):
    given = sample(OP, torch.device("cpu"), torch.float32) | changes
    assert_refuses(OP, given, ValueError, sentence)


def test_under_the_interpreter():
    interpreted.passes("(test_heads and 3) or turns", __file__)
