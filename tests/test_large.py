# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What lies more than 2**31 numbers away: the last page of a great cache gives what the first page
of a small one does, and a tensor whose rows lie far apart what a contiguous one does.

Nothing of the memory between is initialised or touched.
"""

from __future__ import annotations

import pytest
import torch
from custom.dispatch.specs import SPECS
from torch import Tensor

from .ragged import ints, run
from .samples import Maker, sample

pytestmark = pytest.mark.large
PAGE, DTYPE = 128, torch.float16


@pytest.fixture
def room(device):
    if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < 12 * 2**30:
        pytest.skip("needs 12 GiB of free device memory")


def great_and_small(size: int, device) -> tuple[Tensor, Tensor]:
    """Two caches [pages, P, 1, size] that hold the same last and only page."""
    pages = 2**31 // (PAGE * size) + 2
    great = torch.empty(pages, PAGE, 1, size, dtype=DTYPE, device=device)
    small = Maker(device, DTYPE).normal(1, PAGE, 1, size)
    great[-1:] = small
    assert (great.numel() - great[-1].numel()) > 2**31
    return great, small


def paged(cache: Tensor, device) -> dict:
    return dict(block_table=ints([len(cache) - 1], device).view(1, 1))


def test_indexer(device, backend, room):
    m = Maker(device, DTYPE)
    query, weights = m.normal(1, 2, 4, 128), m.normal(1, 2, 4)
    outs = [
        run(
            "npu_lightning_indexer",
            backend,
            query=query,
            key=cache,
            weights=weights,
            actual_seq_lengths_key=ints([100], device),
            layout_key="PA_BSND",
            sparse_count=16,
            return_value=True,
            **paged(cache, device),
        )
        for cache in great_and_small(128, device)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*outs, strict=True))


def test_attention(device, backend, room):
    m = Maker(device, DTYPE)
    query = m.normal(1, 2, 4, 512)
    indices = m.shuffled(1, 2, 1, 32, high=100)
    outs = [
        run(
            "npu_sparse_flash_attention",
            backend,
            query=query,
            key=cache,
            value=None,
            sparse_indices=indices,
            scale_value=0.1,
            actual_seq_lengths_kv=ints([100], device),
            layout_kv="PA_BSND",
            return_softmax_lse=True,
            **paged(cache, device),
        )
        for cache in great_and_small(512, device)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*outs, strict=True))


def test_prologs_write_the_last_page(device, backend, room):
    """The sample's own small caches make way for one of 2**31 numbers each."""
    for op, caches in (
        ("npu_mla_prolog_pto", dict(kv_cache=32, kr_cache=16)),
        ("npu_indexer_prolog_pto", dict(index_k_cache=32)),
    ):
        arguments = sample(op, device, DTYPE)
        slots = ints([[0, 5], [127, 64]], device)
        pages = 2**31 // (PAGE * 32) + 2
        written = []
        for count in (pages, 1):
            fresh = {
                name: torch.empty(count, PAGE, 1, size, dtype=DTYPE, device=device)
                for name, size in caches.items()
            }
            for cache in fresh.values():
                cache[-1] = 7
            index = slots + (count - 1) * PAGE
            run(op, backend, **(arguments | fresh | dict(cache_index=index)))
            written.append([cache[-1].clone() for cache in fresh.values()])
            del fresh
        for great, small in zip(*written, strict=True):
            assert torch.equal(great, small) and (great != 7).any()


def rows_apart(x: Tensor) -> Tensor:
    """The same numbers; the last row begins more than 2**31 numbers behind the first."""
    step = -(-(2**31 + 16) // (16 * (len(x) - 1))) * 16
    inner = x.contiguous().stride()[1:]
    base = torch.empty(step * (len(x) - 1) + x[0].numel(), dtype=x.dtype, device=x.device)
    return base.as_strided(x.shape, (step, *inner)).copy_(x)


@pytest.mark.parametrize(
    "op",
    [spec.name for spec in SPECS if not spec.name.endswith("_pto")],  # those are contiguous
)
def test_rows_far_apart(op, device, backend, room):
    """One argument after the other, so that there is memory for it."""
    arguments = sample(op, device, DTYPE, S=5)

    def outputs(**changed: Tensor) -> list[Tensor]:
        given = {n: x.clone() if isinstance(x, Tensor) else x for n, x in arguments.items()}
        out = run(op, backend, **(given | changed))
        return [out] if isinstance(out, Tensor) else list(out)

    want = outputs()
    spread = [n for n, x in arguments.items() if isinstance(x, Tensor) and x.dtype is DTYPE]
    assert spread
    for name in spread:
        for got, exact in zip(outputs(**{name: rows_apart(arguments[name])}), want, strict=True):
            assert torch.equal(got, exact), name
