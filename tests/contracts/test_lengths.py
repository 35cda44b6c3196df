# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Lengths and sums of requests that mean less than they say: the ops that select keys read them
alike."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from ..support.ragged import BEYOND, FALLING, ends_within, ints, run
from ..support.samples import sample
from ..support.stages import assert_near, exact

Lengths = tuple[list[int], list[int]]
# the arguments for the lengths of queries and of keys, and for their layouts
OPS = {
    "npu_lightning_indexer": (
        ("actual_seq_lengths_query", "actual_seq_lengths_key"),
        ("layout_query", "layout_key"),
    ),
    "npu_lightning_indexer_grad": (
        ("actual_seq_lengths_query", "actual_seq_lengths_key"),
        ("layout",),
    ),
    "npu_sparse_flash_attention": (
        ("actual_seq_lengths_query", "actual_seq_lengths_kv"),
        ("layout_query", "layout_kv"),
    ),
    "npu_sparse_flash_attention_grad": (("actual_seq_qlen", "actual_seq_kvlen"), ("layout",)),
}


def within_and_beyond(
    layout: str, S: int, S2: int
) -> Iterator[tuple[Lengths, Lengths, torch.dtype]]:
    """Query and key lengths of two requests as far as the tensors reach, and the same farther."""
    if layout == "TND":  # prefix sums: not below 0 either; and of no request at all
        yield ([0, 0], [0, 0]), ([], []), torch.int32
        for far, dtype in [(max(S, S2) + 1, torch.int32), *BEYOND]:
            yield ([2, S], [10, S2]), ([2, far], [10, far]), dtype
            yield ([0, S], [0, S2]), ([-far, far], [-far, far]), dtype
    else:
        yield ([S, 2], [S2, 9]), ([S + 1, 2], [S2, 9]), torch.int32
        yield ([S, 2], [S2, 9]), ([S, 2], [S2 + 1, 9]), torch.int32
        for far, dtype in BEYOND:
            yield ([S, 2], [S2, 9]), ([far, 2], [far, 9]), dtype
            yield ([0, 2], [S2, 0]), ([-far, 2], [far, -far]), dtype


def arguments(op: str, layout: str, device: torch.device) -> dict[str, Any]:
    if layout == "BSND":
        given = sample(op, device, torch.float16)
    else:
        given = sample(op, device, torch.float16, B=1, S=6)
        given = {n: x[0] if isinstance(x, Tensor) else x for n, x in given.items()}
    return given | dict.fromkeys(OPS[op][1], layout)


@pytest.mark.parametrize("sparse_mode", [3, 0])
@pytest.mark.parametrize("layout", ["BSND", "TND"])
@pytest.mark.parametrize("op", OPS)
def test_lengths_beyond_the_tensors_end_with_them(op, device, backend, layout, sparse_mode):
    """First cut, then aligned at the last key."""
    given = arguments(op, layout, device) | dict(sparse_mode=sparse_mode)

    def outputs(lengths: Lengths, dtype: torch.dtype) -> Any:
        ends = {n: ints(x, device, dtype) for n, x in zip(OPS[op][0], lengths, strict=True)}
        return run(op, backend, **given, **ends)

    sizes = given["query"].shape[-3], given["key"].shape[-3]
    wanted: dict[str, Any] = {}
    for within, beyond, dtype in within_and_beyond(layout, *sizes):
        if str(within) not in wanted:
            wanted[str(within)] = outputs(within, dtype)
        got, want = outputs(beyond, dtype), wanted[str(within)]
        torch.testing.assert_close(got, want, msg=lambda text, at=(beyond, dtype): f"{at}: {text}")


# the indexer has a test of its own, for what it selects
@pytest.mark.parametrize("op", [op for op in OPS if op != "npu_lightning_indexer"])
def test_sums_may_fall(op, device, backend):
    """A token is of the request whose number is how many sums it has passed, on every backend; it
    sees nothing where that request has ended."""
    given = arguments(op, "TND", device)
    for lengths, sparse_mode in product(FALLING, (0, 3)):
        ends = {n: ints(x, device) for n, x in zip(OPS[op][0], lengths, strict=True)}
        every = given | ends | dict(sparse_mode=sparse_mode)
        with ends_within(120):
            got = run(op, backend, **every)
        want = exact(op.removeprefix("npu_"), **every)
        for i, (x, y) in enumerate(zip(got, want, strict=True)):
            assert_near(f"result {i} of {lengths}", x, y, 4e-3)
