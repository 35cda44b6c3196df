# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Both sparse stages: ragged arguments of any size, launchers without dispatch, what is right."""

from __future__ import annotations

import importlib

import torch
from custom.dispatch import register
from custom.dispatch.registry import BY_NAME
from torch import Tensor


def arguments(
    dtype,
    B=2,
    S=2,
    N=16,
    R=32,
    D=16,
    K=24,
    S2=96,
    P=16,
    query="BSND",
    keys="PA_BSND",
    mode=3,
    span=1,
    rows=None,
    lengths=None,
    joined=False,
    own_value=False,
    index=torch.int32,
):
    """(arguments of both stages): `rows` and `lengths` are prefix sums where the layout is TND."""

    def normal(*shape):
        return torch.randn(*shape).to(dtype)

    tokens = (B * S, N) if query == "TND" else (B, S, N)
    shape, table = {"TND": (B * S2, 1), "BSND": (B, S2, 1)}.get(keys), None
    if shape is None:
        pages = B * (S2 // P) + 3
        shape = (pages, P, 1)
        table = torch.randperm(pages)[: B * (S2 // P)].view(B, -1)
        table[-1, -1], table[0, -1] = -1, pages + 5
    blocks = S2 // span
    chosen = torch.stack([torch.randperm(max(blocks, K))[:K] for _ in range(B * S)])
    chosen[chosen >= blocks] = -1
    chosen[0, ::3] = -1
    chosen[-1, ::5] = 10**6
    if B * S > 2:
        chosen[2] = -1
    if query == "TND" and rows is None:
        rows = [S * (i + 1) for i in range(B)]
    if keys == "TND" and lengths is None:
        lengths = [S2 * (i + 1) for i in range(B)]
    if keys == "PA_BSND" and lengths is None:
        lengths = [S2] * B
    width = R + D if joined else R
    attention = dict(
        query=normal(*tokens, width),
        key=normal(*shape, width),
        value=normal(*shape, width) if own_value else None,
        sparse_indices=chosen.view(*tokens[:-1], 1, K).to(index),
        scale_value=0.2,
        query_rope=None if joined else normal(*tokens, D),
        key_rope=None if joined else normal(*shape, D),
        sparse_block_size=span,
        layout_kv=keys,
        actual_seq_lengths_kv=None if lengths is None else torch.tensor(lengths, dtype=index),
    )
    indexer = dict(
        query=normal(*tokens, R),
        key=normal(*shape, R),
        weights=normal(*tokens),
        sparse_count=K,
        return_value=True,
        layout_key=keys,
        actual_seq_lengths_key=attention["actual_seq_lengths_kv"],
    )
    both = dict(
        layout_query=query,
        sparse_mode=mode,
        actual_seq_lengths_query=None if rows is None else torch.tensor(rows, dtype=index),
        block_table=None if table is None else table.to(index),
    )
    return attention | both, indexer | both


def on(device, values, dtype=None):
    def moved(x):
        if not isinstance(x, Tensor):
            return x
        return x.to(device, dtype if dtype is not None and x.is_floating_point() else x.dtype)

    return {name: moved(x) for name, x in values.items()}


def launched(op, **values):
    """The CUDA launcher's own result, without dispatch."""
    return called("cuda_ops", op, **values)


def exact(op, **values):
    """The reference in float64."""
    return called("dispatch.reference", op, **on("cpu", values, torch.float64))


def called(package, op, *positional, **named):
    """A backend's launcher, with the schema's defaults."""
    spec = BY_NAME[f"npu_{op}"]
    function = getattr(importlib.import_module(f"custom.{package}.{spec.module}"), spec.function)
    return function(**register.bind(register.overload(spec)._schema, positional, named))


def assert_near(name: str, got: Tensor, wanted: Tensor, error: float) -> None:
    got, wanted = got.double().cpu(), wanted.double()
    infinite = wanted.isinf()
    assert torch.equal(got[infinite], wanted[infinite]), f"{name}: infinities differ"
    off = (got - wanted)[~infinite].norm()
    assert off <= error * wanted[~infinite].norm().clamp_min(1e-6), f"{name} is off by {off}"


def assert_top(every, indices, values) -> None:
    """The selection is that of the exact scores, but for what rounding cannot tell apart."""
    k = every["sparse_count"]
    every = every | dict(sparse_count=every["key"].shape[:-1].numel())
    where, scores = exact("lightning_indexer", **every)
    where, scores = where.flatten(0, -2), scores.flatten(0, -2)
    indices, values = indices.flatten(0, -2).cpu(), values.flatten(0, -2).cpu().double()
    rounding = torch.finfo(values.dtype if values.dtype == torch.float32 else torch.float32).eps
    for row in range(len(where)):
        seen = where[row] >= 0
        score, count = scores[row, seen], min(k, int(seen.sum()))
        found = indices[row, :count].long()
        assert (indices[row, count:] == -1).all() and (values[row, count:] == 0).all()
        assert (found.diff() > 0).all() and torch.isin(found, where[row, seen]).all()
        if count == 0:
            continue
        at = torch.searchsorted(where[row, seen].contiguous().long(), found)
        rest = torch.ones_like(score, dtype=torch.bool)
        rest[at] = False
        size = every["query"].shape[-1] * every["query"].shape[-2]
        band = rounding * size * score.abs().max()
        assert not rest.any() or score[rest].max() <= score[at].min() + band
        assert (values[row, :count] - score[at]).abs().max() <= 1e-2 * score.abs().max() + 1e-6


def scores_of(kind: str, n: int) -> Tensor:
    scores = torch.randn(3, n)
    if kind == "rounded":
        scores = scores.round()
    if kind == "equal":
        scores = torch.ones(3, n)
        scores[1, ::2], scores[1, 1::2] = -0.0, 0.0
        scores[2, 100:] = -torch.inf
    if kind == "plateau":
        scores = torch.where(torch.arange(n) < 4 * n // 5, 5.0, scores)
    if kind == "comb":  # what a sample of every n-th score cannot see
        scores[:, ::2] = -9
        scores[1, 200:] = -torch.inf
    if kind == "segment":  # all in one part of the row
        scores[:, n // 3 : n // 3 + n // 8] += 9
    if kind == "outliers":
        scores = scores.exp().exp()
    if kind == "zeros":
        scores = torch.zeros(3, n)
        scores[:, ::2] = -0.0
    if kind == "infinite":
        scores[:, ::30] = torch.inf
    if kind == "clusters":  # as far apart as keys of floats can be
        scores[:, ::2] *= 1e-30
        scores[:, 1::2] = scores[:, 1::2] * 1e-3 + 1e6
    if kind == "powers":
        scores = scores.sign() * 10.0 ** (12 * scores)
    return scores


def best_of(scores: Tensor, lengths: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """(positions, scores) of the k best of each row, by sorting it."""
    wanted = torch.full((len(scores), k), -1, dtype=torch.int32)
    for row, length in enumerate(lengths.tolist()):
        seen = scores[row, :length]
        count = min(k, int((seen > -torch.inf).sum()))
        best = torch.sort(seen, descending=True, stable=True).indices[:count]
        wanted[row, :count] = best.sort().values.int()
    return wanted, scores.gather(1, wanted.clamp(min=0).long()).masked_fill(wanted < 0, 0)


KINDS = (
    "random", "rounded", "equal", "plateau", "comb", "segment", "outliers", "zeros", "infinite",
    "clusters", "powers",
)  # fmt: skip
