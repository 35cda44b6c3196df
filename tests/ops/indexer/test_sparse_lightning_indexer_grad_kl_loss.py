# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Loss and gradients in one call, against autograd through torch's softmax and kl_div."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from custom.dispatch.reference.indexer import sparse_lightning_indexer_grad_kl_loss as reference
from torch import Tensor

import custom

from ...support.accuracy import assert_close_to_float64, every_dtype, skip_unless_taken
from ...support.calls import assert_refuses, by_change, runs_once
from ...support.drawn import drawn
from ...support.samples import sample

OP = "npu_sparse_lightning_indexer_grad_kl_loss"


@dataclass(frozen=True)
class Case:
    B: int
    S: int
    S2: int
    N: int
    D: int
    Ni: int
    Di: int
    K: int
    Dr: int = 0
    sparse_mode: int = 3
    lengths: bool = False
    sinks: bool = False

    def arguments(self) -> dict[str, Any]:
        """In float64 on the CPU; the statistics follow in `with_statistics`."""
        B, S, S2 = self.B, self.S, self.S2
        order = torch.rand(B, S, 1, S2 + 4).argsort(-1)[..., : self.K] - 2
        x = dict(
            query=drawn(B, S, self.N, self.D),
            key=drawn(B, S2, 1, self.D),
            query_index=drawn(B, S, self.Ni, self.Di),
            key_index=drawn(B, S2, 1, self.Di) / self.Di**0.5,
            weights=drawn(B, S, self.Ni) / self.Ni**0.5,
            sparse_indices=order.to(torch.int32),
            scale_value=(self.D + self.Dr) ** -0.5,
            query_rope=drawn(B, S, self.N, self.Dr) if self.Dr else None,
            key_rope=drawn(B, S2, 1, self.Dr) if self.Dr else None,
            sparse_mode=self.sparse_mode,
            sinks=drawn(self.N) if self.sinks else None,
        )
        if self.lengths:
            x.update(actual_seq_qlen=[S - b for b in range(B)])
            x.update(actual_seq_klen=[S2 - 2 * b for b in range(B)])
        return x

    def seen(self, x: dict[str, Any]) -> Tensor:
        """[B, S, K], from the definition."""
        ok = torch.zeros(self.B, self.S, self.K, dtype=torch.bool)
        for b in range(self.B):
            queries = x.get("actual_seq_qlen", [self.S] * self.B)[b]
            keys = x.get("actual_seq_klen", [self.S2] * self.B)[b]
            for i in range(queries):
                limit = keys - queries + 1 + i if self.sparse_mode == 3 else keys
                index = x["sparse_indices"][b, i, 0]
                ok[b, i] = (index >= 0) & (index < limit)
        return ok


CASES = [
    Case(1, 5, 9, 4, 32, 4, 32, 6),
    Case(2, 7, 20, 16, 64, 8, 32, 16, Dr=16),
    Case(2, 6, 12, 3, 48, 5, 16, 9, sparse_mode=0, lengths=True),
    Case(2, 6, 7, 4, 32, 2, 64, 11, Dr=16, lengths=True, sinks=True),
    # wide keys: one tile and a part of each consumer, two and a part
    Case(2, 5, 160, 96, 512, 4, 32, 150, Dr=64, lengths=True, sinks=True),
    Case(1, 4, 300, 64, 512, 8, 64, 280, Dr=64),
    Case(1, 3, 90, 16, 512, 4, 32, 70, Dr=64, sparse_mode=0, sinks=True),
]


def to(x: dict[str, Any], dtype: torch.dtype, device: Any = "cpu") -> dict[str, Any]:
    def one(name: str, y: Any) -> Any:
        if not isinstance(y, Tensor) or not y.dtype.is_floating_point:
            return y.to(device) if isinstance(y, Tensor) else y
        wide = name in ("softmax_max", "softmax_sum", "sinks")
        return y.to(torch.promote_types(dtype, torch.float32) if wide else dtype).to(device)

    return {name: one(name, y) for name, y in x.items()}


def attention_logits(x: dict[str, Any], ok: Tensor) -> Tensor:
    """[B, S, N, K] in float64."""
    at = x["sparse_indices"][:, :, 0].long().where(ok, 0)
    z = torch.zeros(*ok.shape[:2], x["query"].shape[2], ok.shape[2], dtype=torch.float64)
    for q, k in (("query", "key"), ("query_rope", "key_rope")):
        if x[q] is not None:
            z += x[q].double() @ gathered(x[k].double(), at).mT
    return (z * x["scale_value"]).masked_fill(~ok[:, :, None], -torch.inf)


def gathered(key: Tensor, at: Tensor) -> Tensor:
    return torch.stack([key[b, at[b], 0] for b in range(len(at))])


def with_statistics(x: dict[str, Any], ok: Tensor) -> dict[str, Any]:
    z = attention_logits(x, ok)
    peak = z.amax(-1)
    total = torch.exp(z - peak.masked_fill(peak == -torch.inf, 0)[..., None]).sum(-1)
    return x | dict(softmax_max=peak[:, None], softmax_sum=total[:, None])


def by_autograd(x: dict[str, Any], ok: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Gradients and loss; the attention in float64, the indexer in `dtype`."""
    z = attention_logits(x, ok)
    p = torch.exp(z - x["softmax_max"][:, 0, ..., None].double())
    total = x["softmax_sum"][:, 0].double()
    if x["sinks"] is not None:
        total = total + torch.exp(x["sinks"].double() - x["softmax_max"][:, 0].double())
    pi = (p / total[..., None]).nan_to_num(0.0).sum(2)
    pi = torch.nn.functional.normalize(pi, p=1, dim=-1).to(dtype)
    leaves = [x[n].to(dtype).requires_grad_() for n in ("query_index", "key_index", "weights")]
    at = x["sparse_indices"][:, :, 0].long().where(ok, 0)
    s = (leaves[0] @ gathered(leaves[1], at).mT).relu()
    score = (leaves[2][..., None] * s).sum(2)
    # a row that sees nothing has no distribution; any other one will do, its terms are left out
    score = score.masked_fill(~ok & ok.any(-1, keepdim=True), -torch.inf)
    r = score.softmax(-1)
    terms = torch.nn.functional.kl_div((r + 1e-10).log(), pi + 1e-10, reduction="none")
    loss = terms.where(ok, 0.0).sum()
    return *torch.autograd.grad(loss, leaves), loss.detach()[None]


@every_dtype
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_autograd(case, dtype, device, backend):
    skip_unless_taken(dtype, device, backend)
    half = to(case.arguments(), dtype)
    ok = case.seen(half)
    half = to(with_statistics(half, ok), dtype)
    with runs_once(OP, backend):
        got = custom.npu_sparse_lightning_indexer_grad_kl_loss(**to(half, dtype, device))
    exact = by_autograd(half, ok, torch.float64)
    names = ("d_query_index", "d_key_index", "d_weights")
    for name, x, want in zip(names, got, exact, strict=False):
        if dtype in (torch.float64, torch.float32):
            tolerance = dict(rtol=1e-4, atol=1e-5) if dtype is torch.float32 else {}
            torch.testing.assert_close(x.cpu().double(), want, **tolerance)
        else:
            assert_close_to_float64(name, x, want.to(dtype), want)
    tolerance = dict(rtol=1e-6, atol=1e-7) if dtype is torch.float64 else dict(rtol=2e-4, atol=1e-4)
    torch.testing.assert_close(got[3].cpu().double(), exact[3], **tolerance)


@every_dtype
def test_statistics_of_the_attention_itself(dtype, device, backend):
    """What npu_sparse_flash_attention returned, on the same device: no pass over the logits is
    needed, and loss and gradients are those of autograd, which takes no statistics."""
    skip_unless_taken(dtype, device, backend)
    case = CASES[1]
    half = to(case.arguments(), dtype)
    x = to(half, dtype, device)
    names = ("query", "key", "sparse_indices", "scale_value", "query_rope", "key_rope")
    _, peak, total = custom.npu_sparse_flash_attention(
        value=None, return_softmax_lse=True, **{name: x[name] for name in names}
    )
    got = custom.npu_sparse_lightning_indexer_grad_kl_loss(
        **x | dict(softmax_max=peak, softmax_sum=total)
    )
    ok = case.seen(half)
    exact = by_autograd(with_statistics(half, ok), ok, torch.float64)
    for name, ours, want in zip(("query", "key", "weights"), got, exact, strict=False):
        if dtype in (torch.float64, torch.float32):
            torch.testing.assert_close(ours.cpu().double(), want, rtol=1e-4, atol=1e-5)
        else:
            assert_close_to_float64(name, ours, want.to(dtype), want)
    torch.testing.assert_close(got[3].cpu().double(), exact[3], rtol=2e-4, atol=1e-4)


def test_one_call_is_the_chain_of_three(device, backend):
    """The indexer, the loss with the attention's log-sum-exp, and the indexer's gradient."""
    case = Case(2, 9, 9, 4, 64, 4, 32, 5, Dr=16)
    x = to(case.arguments(), torch.float16, device)
    leaves = [x[name].requires_grad_() for name in ("query_index", "key_index", "weights")]
    indices, score = custom.npu_lightning_indexer(*leaves, sparse_count=5, return_value=True)
    x.update(sparse_indices=indices)
    names = ("query", "key", "sparse_indices", "scale_value", "query_rope", "key_rope")
    _, peak, total = custom.npu_sparse_flash_attention(
        value=None, return_softmax_lse=True, **{name: x[name] for name in names}
    )
    loss = custom.compute_index_loss_sparse(
        x["query"].transpose(1, 2),
        x["key"][:, :, 0],
        score[:, :, 0],
        indices[:, :, 0],
        x["scale_value"],
        reduction="sum",
        query_rope=x["query_rope"].transpose(1, 2),
        key_rope=x["key_rope"][:, :, 0],
        softmax_lse=(peak + torch.log(total))[:, 0].transpose(1, 2),
    )
    chained = torch.autograd.grad(loss, leaves)
    with torch.no_grad():
        *at_once, loss_at_once = custom.npu_sparse_lightning_indexer_grad_kl_loss(
            **x | dict(softmax_max=peak, softmax_sum=total)
        )
    # the chain rounds the scores and their gradient to float16 on the way
    torch.testing.assert_close(loss_at_once[0], loss.detach(), rtol=2e-3, atol=2e-3)
    for ours, want in zip(at_once, chained, strict=True):
        scale = want.abs().max().item()
        torch.testing.assert_close(ours, want, rtol=0, atol=4 * 2**-10 * scale)


def test_layout_tnd_is_a_request_at_a_time(device, backend):
    queries, keys = [3, 0, 5], [6, 4, 5]
    cases = [Case(1, s, s2, 4, 32, 4, 32, 5) for s, s2 in zip(queries, keys, strict=True)]
    parts = []
    for case in cases:
        x = to(case.arguments(), torch.float16)
        parts.append(to(with_statistics(x, case.seen(x)), torch.float16, device))
    joined = dict(parts[0], layout="TND")
    for name in ("query", "key", "query_index", "key_index", "weights", "sparse_indices"):
        joined[name] = torch.cat([x[name][0] for x in parts])
    for name in ("softmax_max", "softmax_sum"):
        joined[name] = torch.cat([x[name][0] for x in parts], 1)
    for name, lengths in (("actual_seq_qlen", queries), ("actual_seq_klen", keys)):
        joined[name] = torch.tensor(lengths).cumsum(0).tolist()
    whole = custom.npu_sparse_lightning_indexer_grad_kl_loss(**joined)
    each = [custom.npu_sparse_lightning_indexer_grad_kl_loss(**x) for x in parts]
    for i in range(3):
        want = torch.cat([x[i][0] for x in each])
        torch.testing.assert_close(whole[i], want, rtol=2e-3, atol=1e-4)
    torch.testing.assert_close(whole[3], sum(x[3] for x in each), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "change,error,sentence",
    [
        (dict(key=torch.zeros(1, 9, 2, 32)), ValueError, "`key` has shape"),
        (dict(weights=torch.zeros(1, 5, 3)), ValueError, "`weights` has shape .* Ni=4"),
        (dict(softmax_max=torch.zeros(1, 1, 4, 5)), ValueError, "`softmax_max` has shape"),
        (dict(actual_seq_qlen=[5, 5]), ValueError, "`actual_seq_qlen` has 2 numbers, expected 1"),
    ],
    ids=by_change,
)
def test_errors(change, error, sentence):
    x = to(CASES[0].arguments(), torch.float32)
    good = to(with_statistics(x, CASES[0].seen(x)), torch.float32)
    assert_refuses(OP, good | change, error, sentence)


def test_a_key_of_infinity_in_heads_that_fill_no_tile(device, backend):
    """One that no head of the attention looks at, and one whose score is infinite where its
    target is 0: 0 * inf is NaN."""
    case = Case(1, 4, 6, 3, 32, 2, 32, 6, sparse_mode=0)
    x = {
        n: v.half() if isinstance(v, Tensor) and v.is_floating_point() else v
        for n, v in case.arguments().items()
    }
    x["query"], x["query_index"], x["weights"] = (
        x[n].abs() for n in ("query", "query_index", "weights")
    )
    x["sparse_indices"] = torch.arange(6, dtype=torch.int32).expand(1, 4, 1, 6).clone()
    x["key"], x["key_index"] = x["key"].clone(), x["key_index"].clone()
    x["key"][:, 1] = -torch.inf
    x["key_index"][:, 2] = -torch.inf  # its score is 0
    statistics = custom.npu_sparse_flash_attention(
        query=x["query"],
        key=x["key"].clamp(min=-6e4),
        value=None,
        scale_value=x["scale_value"],
        sparse_indices=x["sparse_indices"],
        sparse_mode=0,
        return_softmax_lse=True,
    )
    x["softmax_max"], x["softmax_sum"] = statistics[1:]
    absent = dict.fromkeys(("actual_seq_qlen", "actual_seq_klen", "layout"))
    wanted = reference.forward(**absent, pre_tokens=None, next_tokens=None, **x)
    there = {n: v.to(device) if isinstance(v, Tensor) else v for n, v in x.items()}
    with runs_once(OP, backend):
        got = getattr(torch.ops.custom, OP)(**there)
    assert wanted[3].isfinite() and wanted[2].isfinite().all()
    for name, a, b in zip(("d_query", "d_key", "d_weights", "loss"), got, wanted, strict=True):
        assert torch.equal(a.isfinite().cpu(), b.isfinite()), name
        a, b = (y.double().cpu().nan_to_num(0, 0, 0) for y in (a, b))
        torch.testing.assert_close(a, b, rtol=1e-2, atol=2e-3, msg=name)


@pytest.mark.parametrize("name", ["query", "query_index", "weights", "key_index"])
def test_a_loss_of_no_numbers_is_none(name, device, backend):
    """A score that is NaN is not taken for a slot that is absent."""
    x = sample(OP, device, torch.float16)
    x[name] = x[name].clone()
    x[name].view(-1)[-1 if name != "key_index" else 0] = torch.nan
    with runs_once(OP, backend):
        *_, loss = getattr(torch.ops.custom, OP)(**x)
    assert loss.isnan().all()
