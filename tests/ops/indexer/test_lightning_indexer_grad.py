# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""npu_lightning_indexer_grad against autograd of the formula, and against finite differences."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import custom

from ...support.accuracy import assert_close_to_float64, every_dtype, skip_unless_taken
from ...support.calls import assert_gradient_compiles, assert_refuses
from ...support.ragged import Packed, limits, run

OP = "npu_lightning_indexer_grad"
LAYOUTS = ["BSND", "TND"]
# (query tokens, keys) of each request
RAGGED = [(3, 40), (1, 5), (2, 0), (4, 2), (0, 9), (2, 33)]
N, D, K = 4, 32, 10


def formula(query, key, weights, indices, dy, limit) -> Tensor:
    """sum_k dy_k score_k of one query token, over the slots that exist; equal ones count apart."""
    slots = [k for k, p in enumerate(indices.tolist()) if 0 <= p < limit]
    positions = indices[slots].long()
    score = (weights[:, None] * torch.relu(query @ key[positions].T)).sum(0)
    return (dy[slots] * score).sum()


def gradients(query, key, weights, indices, dy, sparse_mode):
    """Of one request, by autograd in the dtype of its tensors."""
    leaves = [x.clone().requires_grad_() for x in (query, key, weights)]
    total = leaves[0].sum() * 0 + leaves[1].sum() * 0 + leaves[2].sum() * 0
    for j, limit in enumerate(limits(len(query), len(key), sparse_mode)):
        total = total + formula(
            leaves[0][j], leaves[1], leaves[2][j], indices[j, 0], dy[j, 0], limit
        )
    return torch.autograd.grad(total, leaves)


class Problem:
    def __init__(self, dtype: torch.dtype) -> None:
        def draw(*shape: int) -> Tensor:
            return torch.randn(shape).to(dtype).double()

        rows, keys = zip(*RAGGED, strict=True)
        self.rows, self.keys = rows, keys
        self.query = [draw(r, N, D) for r in rows]
        self.key = [draw(k, D) for k in keys]
        self.weights = [draw(r, N) for r in rows]
        self.dy = [draw(r, 1, K) for r in rows]
        self.indices = [
            torch.randint(-2, k + 3, (r, 1, K), dtype=torch.int32)
            for r, k in zip(rows, keys, strict=True)
        ]

    def solved(self, dtype: torch.dtype, sparse_mode: int) -> list[list[Tensor]]:
        """d_query, d_key, d_weights, each by request."""
        parts = (self.query, self.key, self.weights, self.indices, self.dy)
        by_request = [
            gradients(*(x if x.dtype is torch.int32 else x.to(dtype) for x in each), sparse_mode)
            for each in zip(*parts, strict=True)
        ]
        return [list(each) for each in zip(*by_request, strict=True)]


@pytest.mark.parametrize("sparse_mode", [3, 0, None])
@pytest.mark.parametrize("layout", [*LAYOUTS, None])
@every_dtype
def test_formula(device, backend, dtype, layout, sparse_mode):
    skip_unless_taken(dtype, device, backend)
    problem = Problem(dtype)
    packed = Packed((layout or "BSND",) * 2, problem.rows, problem.keys, device)
    # keys that no request owns must not be touched, nor may padding queries add anything: NaN
    outs = run(
        OP,
        backend,
        query=packed.rows([x.to(dtype) for x in problem.query]),
        key=packed.keys([x.to(dtype) for x in problem.key]),
        dy=packed.rows([x.to(dtype) for x in problem.dy]),
        sparse_indices=packed.rows(problem.indices),
        weights=packed.rows([x.to(dtype) for x in problem.weights]),
        actual_seq_lengths_query=packed.lengths_query,
        actual_seq_lengths_key=packed.lengths_key,
        layout=layout,
        sparse_mode=sparse_mode,
    )
    mode = 3 if sparse_mode is None else sparse_mode
    plain, exact = problem.solved(dtype, mode), problem.solved(torch.float64, mode)
    owners = (packed.unpack, packed.unpack_keys, packed.unpack)
    for i, name in enumerate(("d_query", "d_key", "d_weights")):
        got, padding = owners[i](outs[i])
        assert (padding == 0).all(), f"{name}: padding"
        assert_close_to_float64(name, torch.cat(got), torch.cat(plain[i]), torch.cat(exact[i]))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradcheck_through_the_op(layout):
    rows, keys = (2, 0, 3), (9, 4, 2)
    packed = Packed((layout, layout), rows, keys, torch.device("cpu"))
    query = packed.rows([torch.randn(r, 2, 8).double() for r in rows]).nan_to_num(0)
    key = packed.keys([torch.randn(k, 8).double() for k in keys]).nan_to_num(0)
    weights = packed.rows([torch.randn(r, 2).double() for r in rows]).nan_to_num(0)

    def values(query, key, weights):
        return custom.npu_lightning_indexer(
            query,
            key,
            weights,
            actual_seq_lengths_query=packed.lengths_query,
            actual_seq_lengths_key=packed.lengths_key,
            layout_query=layout,
            layout_key=layout,
            sparse_count=4,
            return_value=True,
        )[1]

    leaves = [x.requires_grad_() for x in (query, key, weights)]
    assert torch.autograd.gradcheck(values, leaves)


def test_backward_compiles_and_opcheck_agrees():
    shapes = ((2, 3, 4, 16), (2, 9, 1, 16), (2, 3, 4))
    leaves = [torch.randn(shape, requires_grad=True) for shape in shapes]

    def loss(query, key, weights):
        _, values = custom.npu_lightning_indexer(
            query, key, weights, sparse_count=5, return_value=True
        )
        return values.square().sum()

    assert_gradient_compiles(loss, leaves)
    torch.library.opcheck(
        torch.ops.custom.npu_lightning_indexer.default,
        tuple(leaves),
        dict(sparse_count=5, return_value=True),
        # its AOT test adds the outputs up, and the first holds integers; compiled above instead
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


def test_indices_alone_carry_no_gradient():
    query = torch.randn(1, 2, 4, 16, requires_grad=True)
    indices, values = custom.npu_lightning_indexer(
        query, torch.randn(1, 9, 1, 16), torch.randn(1, 2, 4), sparse_count=5
    )
    assert not indices.requires_grad and list(values.shape) == [0]
    values.sum().backward()
    assert query.grad is None or (query.grad == 0).all()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(layout="TND"), ValueError, "`query` has shape"),
        (dict(dy=torch.zeros(2, 3, 1, 6)), ValueError, "`dy` has shape .* K=5"),
        (dict(dy=torch.zeros(2, 3, 1, 5).half()), TypeError, "`dy` has dtype"),
        (dict(sparse_indices=torch.zeros(2, 3, 1, 5)), TypeError, "`sparse_indices` is float32"),
    ],
)
def test_errors(change, error, message):
    valid = dict(
        query=torch.zeros(2, 3, 4, 16),
        key=torch.zeros(2, 9, 1, 16),
        dy=torch.zeros(2, 3, 1, 5),
        sparse_indices=torch.zeros(2, 3, 1, 5, dtype=torch.int32),
        weights=torch.zeros(2, 3, 4),
    )
    assert_refuses(OP, valid | change, error, message)
