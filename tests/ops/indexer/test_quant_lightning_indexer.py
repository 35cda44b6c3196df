# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The indexer on queries and keys of 8 bits: its scores against a loop in float64, its selection
exactly that of its scores; caches as engines lay them out."""

from __future__ import annotations

import pytest
import torch

import custom

from ...support import interpreted
from ...support.kernels import INTERPRETED
from ...support.quantized_indexer import D, Problem
from ...support.ragged import moved


@pytest.mark.parametrize("kind", ["fp8", "int8"])
@pytest.mark.parametrize("mode", [3, 0])
@pytest.mark.parametrize("heads", [1, 5, 64])
def test_packed_requests(kind, mode, heads, device, backend):
    problem = Problem(kind, heads)
    problem.check(problem.packed(sparse_mode=mode), device, backend)


@pytest.mark.parametrize(
    "kind, page, between",
    [("fp8", *pages) for pages in ((16, 0), (64, 0), (64, 132), (48, 4), (1024, 0))]
    + [("int8", page, 0) for page in (16, 128)],
)
def test_pages(kind, page, between, device, backend):
    """What lies behind a request's last key, and between pages, is NaN."""
    scale = torch.float16 if kind == "int8" else None
    problem = Problem(kind, 3, scale=scale)
    problem.check(problem.paged(page, between), device, backend)


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_dense_requests_and_a_folded_scale(kind, device, backend):
    """BSND; the query's scales in the weights give the same selection as beside them."""
    problem = Problem(kind, 4, requests=[(3, 40)] * 2)
    problem.weights = problem.weights.float() * problem.q_scale
    problem.q_scale = torch.ones_like(problem.q_scale)
    folded = problem.packed(query_dequant_scale=None)
    problem.check(folded, device, backend)
    shape = dict(query=(2, 3, 4, D), key=(2, 40, 1, D), weights=(2, 3, 4))
    dense = {n: folded[n].view(s) for n, s in shape.items()} | dict(
        query_dequant_scale=None,
        key_dequant_scale=folded["key_dequant_scale"].view(2, 40, 1),
        query_quant_mode=0,
        key_quant_mode=0,
        sparse_count=8,
    )
    given = {n: moved(x, device) for n, x in dense.items()}
    got = custom.npu_quant_lightning_indexer(**given)
    flat = {n: moved(x, device) for n, x in folded.items()}
    assert torch.equal(got.view(6, 1, 8), custom.npu_quant_lightning_indexer(**flat))


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_long_rows(kind, device, backend):
    """Beyond what is selected from directly."""
    problem = Problem(kind, 2, requests=[(2, 8192), (1, 4500)])
    problem.check(problem.paged(64, sparse_count=300), device, backend)


@pytest.mark.parametrize(
    "kind, weights, scale",
    [
        ("int8", torch.float16, torch.float16),
        ("int8", torch.float32, torch.float16),
        ("int8", torch.bfloat16, torch.float32),
        ("fp8", torch.float16, torch.float16),
        ("fp8", torch.float32, None),
        ("fp8", torch.bfloat16, None),
    ],
)
def test_dtypes_of_scales(kind, weights, scale, device, backend):
    problem = Problem(kind, 3, requests=[(2, 20)], scale=scale, weights=weights)
    problem.check(problem.packed(), device, backend)


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_bytes_with_their_dtype_beside_them(kind, device):
    problem = Problem(kind, 3, requests=[(2, 20)])
    given = {n: moved(x, device) for n, x in problem.packed().items()}
    dtype = given["query"].dtype
    raw = {n: given[n].view(torch.uint8) for n in ("query", "key")}
    got = custom.npu_quant_lightning_indexer(**given | raw, query_dtype=dtype, key_dtype=dtype)
    assert torch.equal(got, custom.npu_quant_lightning_indexer(**given))
    with pytest.raises(TypeError, match="`query` is uint8 and `query_dtype` is None, expected"):
        custom.npu_quant_lightning_indexer(**given | raw)
    with pytest.raises(TypeError, match="`query_dtype` is hif8, expected float8_e4m3fn or int8"):
        custom.npu_quant_lightning_indexer(**given | raw, query_dtype=290)


def test_the_rounding_of_torch_npu_s_golden(device):
    """Its CPU form rounds products / 1024 and weights times scales to fp16, and accepts an op with
    99.9 % of its indices; so near is ours, which rounds nothing."""
    rows, keys, heads, count = 4, 2048, 64, 512
    problem = Problem("int8", heads, [(rows, keys)], torch.float16, torch.float16)
    given = problem.packed(sparse_count=count, sparse_mode=0)
    got = custom.npu_quant_lightning_indexer(**{n: moved(x, device) for n, x in given.items()})
    dot = torch.einsum("thd,pd->thp", problem.q.double(), problem.k.double())
    halves = (dot.relu() / 1024).half().float()
    weights = (problem.weights * problem.q_scale).float()
    score = torch.einsum("th,thp->tp", weights, halves) * problem.k_scale.float()
    golden = score.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    same = [
        torch.isin(a.cpu(), b).float().mean() for a, b in zip(got[:, 0].long(), golden, strict=True)
    ]
    assert torch.stack(same).mean() >= 0.998


def test_ties_and_zeros_take_the_lower_positions(device):
    """Equal keys, and keys of zeros: scale 0 in int8."""
    q = torch.ones(1, 1, D, dtype=torch.int8)
    k = torch.ones(50, 1, D, dtype=torch.int8)
    scale = torch.ones(50, 1)
    k[10:20] = 0
    scale[10:20] = 0
    out = custom.npu_quant_lightning_indexer(
        q.to(device),
        k.to(device),
        torch.ones(1, 1, device=device),
        None,
        scale.to(device),
        0,
        0,
        actual_seq_lengths_query=torch.tensor([1], device=device),
        actual_seq_lengths_key=torch.tensor([50], device=device),
        layout_query="TND",
        layout_key="TND",
        sparse_count=42,
    )
    assert out[0, 0].tolist() == [*range(12), *range(20, 50)]


@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize("tokens", [4, 9])
def test_a_row_does_not_depend_on_its_batch(tokens, heads, device):
    """The same bits alone and among others, and over runs."""
    problem = Problem("fp8", heads, requests=[(1, 300), (tokens, 500), (2, 77)])
    given = {n: moved(x, device) for n, x in problem.paged(64, sparse_count=500).items()}
    together = custom.npu_quant_lightning_indexer_scores(**given)
    again = custom.npu_quant_lightning_indexer_scores(**given)
    last = slice(tokens, tokens + 1)  # of the second request, alone
    alone = (
        given
        | {n: given[n][last] for n in ("query", "weights", "query_dequant_scale")}
        | dict(
            actual_seq_lengths_query=given["actual_seq_lengths_query"].new_tensor([1]),
            actual_seq_lengths_key=given["actual_seq_lengths_key"][1:2].contiguous(),
            block_table=given["block_table"][1:2],
        )
    )
    one = custom.npu_quant_lightning_indexer_scores(**alone)
    for x, y, z in zip(together, again, one, strict=True):
        assert torch.equal(x, y) and torch.equal(x[last], z)


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(query_quant_mode=1), "`query_quant_mode` is 1, expected 0"),
        (dict(key_quant_mode=2), "`key_quant_mode` is 2, expected 0"),
        (dict(query=torch.zeros(5, 3, D)), "`query` is float32, expected float8_e4m3fn, int8"),
        (
            dict(query=torch.zeros(5, 3, D, dtype=torch.float8_e5m2)),
            "`query` is float8_e5m2, expected float8_e4m3fn, int8",
        ),
        (dict(key=torch.zeros(20, 1, D, dtype=torch.int8)), "`query` is fp8 and `key` int8"),
        (
            dict(key_dequant_scale=torch.zeros(20, 1).half()),
            "`key_dequant_scale` is float16, expected float32",
        ),
    ],
)
def test_refused(changes, message):
    problem = Problem("fp8", 3, requests=[(5, 20)])
    with pytest.raises((ValueError, TypeError), match=message.replace("3|0", "0, 3")):
        custom.npu_quant_lightning_indexer(**problem.packed() | changes)


@pytest.mark.skipif(INTERPRETED, reason="is the interpreter")
def test_under_the_interpreter():
    """The kernels on CPU tensors, on a machine without a GPU."""
    interpreted.passes("5-3 or 64-132 or int8-16 or 48-4 or folded or ties or bytes", __file__)
