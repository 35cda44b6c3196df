# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""npu_lightning_indexer against scalar loops.

Small whole numbers make every product, sum and score exact in every dtype, so that the selection
must be equal on every device, ties included.  Drawn numbers are compared by score, with a band.
"""

from __future__ import annotations

import pytest
import torch
from custom.dispatch.common import layout
from torch import Tensor

import custom

from ...support.accuracy import every_dtype, skip_unless_taken
from ...support.calls import assert_refuses
from ...support.ragged import LAYOUTS, Packed, ends_within, ints, limits, run
from ...support.samples import apart, sample
from ...support.stages import assert_top

OP = "npu_lightning_indexer"
# (query tokens, keys) of each request
RAGGED = [(3, 40), (1, 5), (2, 0), (4, 2), (0, 9), (2, 33)]


def whole(low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high + 1, shape).double()


def score(query: Tensor, key: Tensor, weights: Tensor) -> float:
    """One query token [N, D] and one key [D], term by term."""
    total = 0.0
    for head, weight in zip(query.tolist(), weights.tolist(), strict=True):
        dot = sum(a * b for a, b in zip(head, key.tolist(), strict=True))
        total += weight * max(0.0, dot)
    return total


def choose(scores: list[float], count: int) -> tuple[list[int], list[float]]:
    """The best positions, the lower one on ties, in ascending order, then -1 (value 0)."""
    best = sorted(range(len(scores)), key=lambda p: (-scores[p], p))[:count]
    best = sorted(best)
    padding = count - len(best)
    return best + [-1] * padding, [scores[p] for p in best] + [0.0] * padding


def expected(queries, keys, weights, count, sparse_mode):
    """By request: indices and values [Lq, count]."""
    for q, k, w in zip(queries, keys, weights, strict=True):
        chosen = []
        for j, limit in enumerate(limits(len(q), len(k), sparse_mode)):
            chosen.append(choose([score(q[j], k[p], w[j]) for p in range(limit)], count))
        indices = torch.tensor([c[0] for c in chosen], dtype=torch.int32).view(-1, count)
        values = torch.tensor([c[1] for c in chosen], dtype=torch.float64).view(-1, count)
        yield indices, values


def draw(draws, rows, keys, N=4, D=16):
    return (
        [draws(r, N, D) for r in rows],
        [draws(k, D) for k in keys],
        [draws(r, N) for r in rows],
    )


def call(backend, packed, queries, keys, weights, dtype, **options):
    return run(
        OP,
        backend,
        query=packed.rows([q.to(dtype) for q in queries]),
        key=packed.keys([k.to(dtype) for k in keys]),
        weights=packed.rows([w.to(dtype) for w in weights]),
        actual_seq_lengths_query=packed.lengths_query,
        actual_seq_lengths_key=packed.lengths_key,
        block_table=packed.block_table,
        layout_query=packed.layout_query,
        layout_key=packed.layout_key,
        **options,
    )


@pytest.mark.parametrize("sparse_mode", [3, 0])
@pytest.mark.parametrize("layouts", LAYOUTS, ids="-".join)
@every_dtype
def test_selection_and_ties_are_exact(device, backend, dtype, layouts, sparse_mode):
    skip_unless_taken(dtype, device, backend)
    rows, lengths = zip(*RAGGED, strict=True)
    queries, keys, weights = draw(lambda *s: whole(-1, 1, *s), rows, lengths)
    packed = Packed(layouts, rows, lengths, device)
    for count in (1, 6, 64):
        indices, values = call(
            backend,
            packed,
            queries,
            keys,
            weights,
            dtype,
            sparse_count=count,
            sparse_mode=sparse_mode,
            return_value=True,
        )
        assert indices.dtype is torch.int32 and values.dtype is dtype
        got, padding = packed.unpack(indices[..., 0, :])
        got_values, padding_values = packed.unpack(values[..., 0, :])
        assert (padding == -1).all() and (padding_values == 0).all()
        wanted = list(expected(queries, keys, weights, count, sparse_mode))
        for i, (index, value) in enumerate(wanted):
            assert torch.equal(got[i], index), f"request {i}: {got[i]} instead of {index}"
            assert torch.equal(got_values[i], value.to(dtype))


@pytest.mark.parametrize("layouts", [("BSND", "BSND"), ("BSND", "PA_BSND")], ids="-".join)
@every_dtype
def test_drawn_scores_within_a_band(device, backend, dtype, layouts):
    """Every selected score reaches the true k-th best, and every better one is selected, but for a
    band as wide as float32 sums of this length can be off."""
    skip_unless_taken(dtype, device, backend)
    rows, lengths, count = (2, 1, 3), (700, 65, 301), 64
    queries, keys, weights = draw(torch.randn, rows, lengths, N=8, D=64)
    queries, keys, weights = (
        [x.to(dtype).double() for x in part] for part in (queries, keys, weights)
    )
    packed = Packed(layouts, rows, lengths, device)
    indices, values = call(
        backend, packed, queries, keys, weights, dtype, sparse_count=count, return_value=True
    )
    got, _ = packed.unpack(indices[..., 0, :])
    got_values, _ = packed.unpack(values[..., 0, :])
    wide = torch.finfo(torch.float64 if dtype is torch.float64 else torch.float32).eps
    for i, (q, k, w) in enumerate(zip(queries, keys, weights, strict=True)):
        for j, limit in enumerate(limits(len(q), len(k), 3)):
            true = (w[j][:, None] * torch.relu(q[j] @ k[:limit].T)).sum(0)
            size = (w[j].abs()[:, None] * (q[j].abs() @ k[:limit].abs().T)).sum(0).max()
            band = 2 * (64 + 8) * wide * size
            kept = min(count, limit)
            index = got[i][j]
            assert (index[kept:] == -1).all() and (index[:kept].diff() > 0).all()
            least = true.topk(kept).values[-1]
            assert (true[index[:kept].long()] >= least - band).all()
            better = torch.nonzero(true > least + band).flatten()
            assert set(better.tolist()) <= set(index.tolist())
            exact = true[index[:kept].long()]
            error = (got_values[i][j][:kept].double() - exact).abs()
            assert (error <= band + torch.finfo(dtype).eps * exact.abs()).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_long_context_ties_at_the_boundary(device, backend, dtype):
    """5000 keys of only three scores: 700 above, then the lowest positions of a great tie."""
    skip_unless_taken(dtype, device, backend)
    L, D, count = 5000, 32, 2048
    level = torch.zeros(L, dtype=torch.float64)
    level[torch.randperm(L)[:4500]] = 1
    level[torch.nonzero(level)[torch.randperm(4500)[:700], 0]] = 2
    keys = level[:, None] * torch.eye(1, D, dtype=torch.float64)
    query = torch.eye(1, D, dtype=torch.float64).expand(1, 2, D)
    packed = Packed(("BSND", "PA_BSND"), [1], [L], device)
    indices, _ = call(
        backend,
        packed,
        [query],
        [keys],
        [torch.ones(1, 2, dtype=torch.float64)],
        dtype,
        sparse_count=count,
    )
    got = packed.unpack(indices[..., 0, :])[0][0][0]
    ties = torch.nonzero(level == 1).flatten()[: count - 700]
    wanted = torch.cat([torch.nonzero(level == 2).flatten(), ties]).sort().values
    assert torch.equal(got.long(), wanted)


@every_dtype
def test_minus_zero_ties_with_zero(device, backend, dtype):
    """A negative weight times relu(..) = 0 is -0: the lower position must still win."""
    skip_unless_taken(dtype, device, backend)
    query = torch.full((1, 1, 1, 16), 1.0, dtype=dtype, device=device)
    key = torch.zeros(1, 24, 1, 16, dtype=dtype, device=device)
    key[:, :12] = -1
    for weight in (1.0, -1.0):
        weights = torch.full((1, 1, 1), weight, dtype=dtype, device=device)
        indices, _ = run(OP, backend, query=query, key=key, weights=weights, sparse_count=9)
        assert indices.flatten().tolist() == list(range(9))


@every_dtype
def test_pages_out_of_range_are_absent(device, backend, dtype):
    skip_unless_taken(dtype, device, backend)
    query, weights = torch.ones(1, 1, 2, 16), torch.ones(1, 1, 2)
    key = torch.rand(3, 16, 1, 16) + 0.5
    table = ints([2, -1, 7, 0], device).view(1, 4)
    indices, _ = run(
        OP,
        backend,
        query=query.to(device, dtype),
        key=key.to(device, dtype),
        weights=weights.to(device, dtype),
        actual_seq_lengths_key=ints([60], device),
        block_table=table,
        layout_key="PA_BSND",
        sparse_count=64,
    )
    wanted = [*range(16), *range(48, 60)]
    assert indices.flatten().tolist() == wanted + [-1] * (64 - len(wanted))


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_lengths_and_tables_of_either_integer_type_and_strided_inputs(device, backend, index_dtype):
    dtype = torch.float16
    query = torch.randn(2, 3, 8, 32).to(device, dtype)[:, :, ::2]
    weights = torch.randn(2, 6, 4).to(device, dtype)[:, ::2]
    cache = torch.randn(12, 16, 2, 32).to(device, dtype)[:, :, :1]
    table = torch.randperm(12).view(2, 6).to(device, index_dtype)[:, :5]
    arguments = dict(
        actual_seq_lengths_key=ints([70, 33], device, index_dtype),
        block_table=table,
        layout_key="PA_BSND",
        sparse_count=16,
    )
    strided, _ = run(OP, backend, query=query, key=cache, weights=weights, **arguments)
    dense, _ = run(
        OP,
        backend,
        query=query.contiguous(),
        key=cache.contiguous(),
        weights=weights.contiguous(),
        **arguments,
    )
    assert torch.equal(strided, dense)


@pytest.mark.parametrize("heads", (1, 8, 16, 20))
def test_an_infinite_score_comes_first_and_one_that_is_no_number_last(heads, device, backend):
    """However many heads fill a kernel's tile: 0 * inf is NaN."""
    key = torch.ones(1, 150, 1, 16, dtype=torch.float16)
    key[0, [2, 5]] = torch.nan
    key[0, [7, 140]] = torch.inf
    key[0, 9, 0, :2] = torch.tensor([torch.inf, -torch.inf])  # their sum is NaN
    query, weights = (torch.ones(1, 1, heads, *last, dtype=torch.float16) for last in ((16,), ()))
    arguments = dict(query=query, key=key, weights=weights, return_value=True)
    arguments = {n: x.to(device) if isinstance(x, Tensor) else x for n, x in arguments.items()}
    for count, wanted in (
        (1, [7]),
        (3, [0, 7, 140]),
        (147, [p for p in range(150) if p not in (2, 5, 9)]),
        (148, [p for p in range(150) if p not in (5, 9)]),
    ):
        indices, values = run(OP, backend, **arguments, sparse_count=count)
        assert indices.flatten().tolist() == wanted
        assert values[indices == 7].tolist() == [torch.inf]
        assert (values[indices == 2] == -torch.inf).all()  # the lowest number of float32


def test_128k_keys_of_a_paged_cache():
    """The reference holds no [rows, heads, keys] tensor: 64 heads would be 64 MiB a token."""
    L, pages = 128 * 1024, 1024
    cache = torch.zeros(pages, 128, 1, 16, dtype=torch.bfloat16)
    best = torch.randperm(L)[:2048].sort().values
    table = torch.randperm(pages, dtype=torch.int32)[None]
    slot = table[0, best // 128].long() * 128 + best % 128
    cache.view(-1, 16)[slot] = 1
    indices, _ = torch.ops.custom.npu_lightning_indexer(
        torch.ones(1, 2, 64, 16, dtype=torch.bfloat16),
        cache,
        torch.ones(1, 2, 64, dtype=torch.bfloat16),
        actual_seq_lengths_key=torch.tensor([L], dtype=torch.int32),
        block_table=table,
        layout_key="PA_BSND",
        sparse_mode=0,
    )
    assert torch.equal(indices[0, 1, 0].long(), best)


def valid() -> dict:
    return dict(
        query=torch.zeros(2, 3, 4, 16), key=torch.zeros(2, 9, 1, 16), weights=torch.zeros(2, 3, 4)
    )


PAGED = dict(
    key=torch.zeros(5, 16, 1, 16),
    layout_key="PA_BSND",
    actual_seq_lengths_key=torch.zeros(2, dtype=torch.int32),
    block_table=torch.zeros(2, 2, dtype=torch.int32),
)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(key=torch.zeros(2, 9, 1, 8)), ValueError, "`key` has shape .* D=16"),
        (dict(key=torch.zeros(2, 9, 2, 16)), ValueError, "`key` has shape"),
        (dict(weights=torch.zeros(2, 3, 5)), ValueError, "`weights` has shape .* N=4"),
        (dict(key=torch.zeros(2, 9, 1, 16).half()), TypeError, "`key` has dtype torch.float16"),
        (dict(layout_key="TND"), ValueError, "`layout_key` is 'TND', expected 'BSND'"),
        (dict(query=torch.zeros(2, 3, 16, 4).mT), ValueError, "`query` has stride 4"),
        (
            dict(query=torch.zeros(2, 3, 0, 16), weights=torch.zeros(2, 3, 0)),
            ValueError,
            "`query` has 0 heads of 16 channels, expected at least 1 of 1",
        ),
        (PAGED | dict(block_table=None), ValueError, "`block_table` is missing"),
        (PAGED | dict(actual_seq_lengths_key=None), ValueError, "`actual_seq_lengths_key` is miss"),
        (PAGED | dict(key=torch.zeros(5, 24, 1, 16)), ValueError, "page size is 24"),
        (PAGED | dict(block_table=torch.zeros(2, 2)), TypeError, "`block_table` is float32"),
        (PAGED | dict(layout_key="BSND"), ValueError, "`key` has shape|`block_table` is given"),
        (
            dict(actual_seq_lengths_key=torch.zeros(3, dtype=torch.int32)),
            ValueError,
            "`actual_seq_lengths_key` has shape .* B=2",
        ),
    ],
)
def test_errors(change, error, message):
    assert_refuses(OP, valid() | change, error, message)


def test_tnd_needs_its_prefix_sums():
    arguments = dict(
        query=torch.zeros(6, 4, 16),
        key=torch.zeros(9, 1, 16),
        weights=torch.zeros(6, 4),
        layout_query="TND",
        layout_key="TND",
    )
    with pytest.raises(ValueError, match="`actual_seq_lengths_query` is missing"):
        custom.npu_lightning_indexer(**arguments)


def test_debug_looks_at_the_values(monkeypatch):
    monkeypatch.setattr(custom.config, "debug", True)
    custom.npu_lightning_indexer(**(valid() | PAGED))
    for lengths in ([33, 0], [-1, 0]):
        change = PAGED | dict(actual_seq_lengths_key=torch.tensor(lengths))
        with pytest.raises(ValueError, match=r"lengths from 0 to 32\."):
            custom.npu_lightning_indexer(**(valid() | change))
    with pytest.raises(ValueError, match="prefix sums that never fall from 0 to 6"):
        custom.npu_lightning_indexer(
            torch.zeros(6, 4, 16),
            torch.zeros(9, 1, 16),
            torch.zeros(6, 4),
            layout_query="TND",
            layout_key="TND",
            actual_seq_lengths_query=torch.tensor([4, 2]),
            actual_seq_lengths_key=torch.tensor([4, 9]),
        )


def test_gradients_need_keys_that_are_not_paged():
    arguments = valid() | PAGED | dict(return_value=True)
    arguments["query"].requires_grad_()
    with pytest.raises(custom.NotSupported, match=f"^{OP}: .*paged keys"):
        custom.npu_lightning_indexer(**arguments)
    with torch.no_grad():
        custom.npu_lightning_indexer(**arguments)
    # indices alone carry no gradient, so there is none to miss
    custom.npu_lightning_indexer(**(arguments | dict(return_value=False)))


@pytest.mark.parametrize(
    ("queries", "keys"),
    [
        ([5, 3, 9], [10, 14, 21]),
        ([9, 3, 4], [10, 14, 21]),
        ([3, 5, 9], [20, -4, 21]),
        ([3, 5, 9], [20, -(2**31), 21]),
        ([-(2**31), 2**31 - 1, -(2**31)], [2**31 - 1, -(2**31), 2**31 - 1]),
    ],
    ids=str,
)
def test_prefix_sums_that_fall_read_nothing_outside(device, backend, queries, keys):
    """They mean nothing, and CUSTOM_DEBUG refuses them; but the call ends, and a token is of the
    request whose number is how many sums it has passed."""
    arguments = sample(OP, device, torch.float16, B=1, S=9)
    arguments = {n: x[0] if isinstance(x, Tensor) else x for n, x in arguments.items()}
    # what lies in front of the keys and behind them is NaN
    T2 = len(arguments["key"])
    arguments["key"] = torch.nn.functional.pad(
        arguments["key"], (0, 0, 0, 0, T2, T2), value=torch.nan
    )[T2 : 2 * T2]
    for sparse_mode in (3, 0):
        every = arguments | dict(
            actual_seq_lengths_query=ints(queries, device),
            actual_seq_lengths_key=ints(keys, device),
            layout_query="TND",
            layout_key="TND",
            sparse_mode=sparse_mode,
        )
        with ends_within(120):
            indices, values = run(OP, backend, **every)
        assert_top(every, indices, values)


@pytest.mark.parametrize("sums", [(4, 2, 6), (9, 3, 1), (-5, 7, 2), (2, 4, 6)], ids=str)
def test_rows_of_sums_in_any_order(sums):
    """What a token sees, by counting."""
    query, key = torch.zeros(6, 1, 1), torch.zeros(9, 1, 1)
    keys = layout.keys_of(key, "TND", torch.tensor([3, 8, 9]), None)
    rows = layout.rows_of(query, "TND", torch.tensor(sums), keys, 3)
    ends, lengths = [min(max(end, 0), 6) for end in sums], [3, 5, 1]
    for token in range(6):
        request, want = sum(end <= token for end in ends), 0
        if request < 3 and token < ends[request]:
            assert rows.request[token] == request
            want = max(0, lengths[request] - (ends[request] - 1 - token))
        assert rows.limit[token] == want


@pytest.mark.large
def test_keys_of_a_page_far_apart(device, backend):
    """The page's last key begins 2**31 numbers behind its first."""
    if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < 6 * 2**30:
        pytest.skip("needs 6 GiB of free device memory")
    arguments = sample(OP, device, torch.float16)
    pages, P, size = 2, 64, arguments["key"].shape[-1]
    near = torch.randn(pages, P, 1, size).to(device, torch.float16)
    want, got = (
        run(
            OP,
            backend,
            **arguments | dict(key=key),
            layout_key="PA_BSND",
            actual_seq_lengths_key=ints([2 * P, P - 3], device),
            block_table=ints([[1, 0], [0, 1]], device),
        )
        for key in (near, apart(near, 1))
    )
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
