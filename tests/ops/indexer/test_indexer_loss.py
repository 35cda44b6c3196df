# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The indexer's KL loss, against torch.nn.functional.kl_div, gradcheck and scalar loops."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from custom.dispatch.reference.indexer import indexer_loss as reference
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import custom

from ...support.accuracy import assert_close_to_float64, every_dtype, skip_unless_taken
from ...support.calls import by_change, runs_once
from ...support.drawn import drawn
from ...support.samples import sample

OP = "npu_indexer_loss"


@dataclass(frozen=True)
class Case:
    B: int
    N: int
    S: int
    S2: int
    D: int
    K: int
    Dr: int = 0
    lse: bool = False
    every: bool = False  # every row selects all keys it can see, the usual case

    @property
    def offset(self) -> int:
        return max(0, self.S2 - self.S)

    def arguments(self) -> dict[str, Any]:
        """In float64; indices from -2 to S2 + 1, future ones and duplicates included."""
        indices = torch.randint(-2, self.S2 + 2, (self.B, self.S, self.K))
        if self.every:
            indices = torch.arange(self.K).expand(self.B, self.S, self.K).clone()
        x = dict(
            query=drawn(self.B, self.N, self.S, self.D),
            key=drawn(self.B, self.S2, self.D),
            index_score=2 * drawn(self.B, self.S, self.K),
            indices=indices,
            scaling=(self.D + self.Dr) ** -0.5,
            chunk_offset=self.offset,
            query_rope=drawn(self.B, self.N, self.S, self.Dr) if self.Dr else None,
            key_rope=drawn(self.B, self.S2, self.Dr) if self.Dr else None,
            softmax_lse=None,
        )
        return x


CASES = [
    Case(1, 4, 32, 64, 32, 16),
    Case(1, 8, 20, 40, 64, 64),
    Case(2, 3, 17, 17, 24, 20),
    Case(1, 16, 9, 70, 48, 33, Dr=16),
    Case(1, 2, 5, 40, 32, 40, lse=True),
    Case(1, 20, 3, 90, 64, 80, Dr=32, lse=True, every=True),
    Case(1, 1, 40, 33, 16, 33, every=True),
    Case(1, 130, 2, 20, 16, 16),
]


def to(x: dict[str, Any], dtype: torch.dtype, device: Any = "cpu") -> dict[str, Any]:
    def one(name: str, y: Any) -> Any:
        if not isinstance(y, Tensor) or not y.dtype.is_floating_point:
            return y.to(device) if isinstance(y, Tensor) else y
        kind = torch.promote_types(dtype, torch.float32) if name == "softmax_lse" else dtype
        return y.to(kind).to(device)

    return {name: one(name, y) for name, y in x.items()}


def logits(x: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The whole [B, N, S, K] logits in float64, -inf where invalid; and the valid slots."""
    q, k = x["query"].double(), x["key"].double()
    if x["query_rope"] is not None:
        q = torch.cat([q, x["query_rope"].double()], -1)
        k = torch.cat([k, x["key_rope"].double()], -1)
    rows = torch.arange(q.shape[2])[:, None] + x["chunk_offset"]
    index = x["indices"]
    ok = (index >= 0) & (index <= rows) & (index < k.shape[1])
    every = (q @ k[:, None].mT) * x["scaling"]
    at = index.long().clamp(0, k.shape[1] - 1)[:, None].expand(-1, q.shape[1], -1, -1)
    return every.gather(-1, at).masked_fill(~ok[:, None], -torch.inf), ok


def by_kl_div(x: dict[str, Any], eps: float = 1e-10) -> tuple[Tensor, Tensor]:
    """Per-row loss and target, by torch's softmax and kl_div alone."""
    z, ok = logits(x)
    target = z.softmax(-1).nan_to_num(0.0).sum(1)
    pi = torch.nn.functional.normalize(target, p=1, dim=-1)
    r = x["index_score"].double().masked_fill(~ok, -torch.inf).softmax(-1).nan_to_num(0.0)
    terms = torch.nn.functional.kl_div((r + eps).log(), pi + eps, reduction="none")
    return terms.masked_fill(~ok, 0.0).sum(-1), target


def with_lse(case: Case, x: dict[str, Any]) -> dict[str, Any]:
    return x | (dict(softmax_lse=logits(x)[0].logsumexp(-1)) if case.lse else {})


@every_dtype
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_kl_div(case, dtype, device, backend):
    skip_unless_taken(dtype, device, backend)
    half = to(case.arguments(), dtype)
    half = to(with_lse(case, half), dtype)
    want, want_target = by_kl_div(half)
    x = to(half, dtype, device)
    score = x["index_score"].requires_grad_()
    with runs_once(OP, backend), runs_once(f"{OP}_backward", backend):
        loss, target = custom.compute_index_loss_sparse(**x, reduction="none", return_target=True)
        upstream = torch.randn(loss.shape, dtype=torch.float64)
        (grad,) = torch.autograd.grad(loss, score, upstream.to(loss.dtype).to(device))
    tolerance = (
        dict(rtol=1e-12, atol=1e-12) if dtype is torch.float64 else dict(rtol=1e-4, atol=2e-6)
    )
    torch.testing.assert_close(loss.detach().cpu().double(), want, **tolerance)
    torch.testing.assert_close(target.cpu().double(), want_target, **tolerance)

    _, ok = logits(half)
    exact_score = half["index_score"].double()
    r = exact_score.masked_fill(~ok, -torch.inf).softmax(-1).nan_to_num(0.0)
    pi = torch.nn.functional.normalize(want_target, p=1, dim=-1)
    exact = ((r - pi) * upstream[..., None]).masked_fill(~ok, 0.0)
    if dtype in (torch.float64, torch.float32):
        torch.testing.assert_close(grad.cpu().double(), exact, **tolerance)
    else:
        assert_close_to_float64("grad", grad, exact.to(dtype), exact)


def test_reductions_and_return_target(device, backend):
    case = CASES[0]
    x = to(case.arguments(), torch.float16, device)
    rows = custom.compute_index_loss_sparse(**x, reduction="none")
    assert rows.shape == (case.B, case.S)
    for name, want in [
        ("sum", rows.sum()),
        ("mean", rows.mean()),
        ("batchmean", rows.sum() / case.B),
    ]:
        got = custom.compute_index_loss_sparse(**x, reduction=name)
        torch.testing.assert_close(got, want)
    torch.testing.assert_close(custom.compute_index_loss_sparse(**x), rows.sum() / case.B)
    with pytest.raises(ValueError, match="`reduction` is 'max'"):
        custom.compute_index_loss_sparse(**x, reduction="max")


# the second is wide enough for a Hopper GPU's own kernel
@pytest.mark.parametrize("case", [Case(2, 4, 9, 20, 32, 16), Case(1, 66, 7, 20, 320, 12)], ids=str)
def test_chunks_of_queries_add_up(case, device, backend):
    """Loss, target and gradient of a row do not depend on which rows come along."""
    x = to(case.arguments(), torch.float16, device)

    def run(**part: Any) -> list[Tensor]:
        score = part["index_score"].detach().requires_grad_()
        out = custom.compute_index_loss_sparse(
            **part | dict(index_score=score), reduction="none", return_target=True
        )
        return [*out, *torch.autograd.grad(out[0].sum(), score)]

    whole = run(**x)
    for size in (1, 5):
        parts = []
        for start in range(0, case.S, size):
            rows = slice(start, start + size)
            part = dict(x, chunk_offset=case.offset + start, query=x["query"][:, :, rows])
            part.update(index_score=x["index_score"][:, rows], indices=x["indices"][:, rows])
            parts.append(run(**part))
        for got, want in zip(zip(*parts, strict=True), whole, strict=True):
            torch.testing.assert_close(torch.cat(got, 1), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("heads", [3, 66])
def test_split_and_joined_are_one(heads, device, backend):
    """D = 576, as 512 and 64 in tensors of their own or side by side."""
    case = Case(1, heads, 3, 24, 512, 20, Dr=64)
    split = to(case.arguments(), torch.float16, device)
    joined = dict(split, query_rope=None, key_rope=None)
    joined.update({n: torch.cat([split[n], split[f"{n}_rope"]], -1) for n in ("query", "key")})
    kept = dict(reduction="none", return_target=True)
    both = [custom.compute_index_loss_sparse(**x, **kept) for x in (split, joined)]
    for got, want in zip(*both, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)
    want, target = by_kl_div(to(joined, torch.float64))
    torch.testing.assert_close(both[1][0].cpu().double(), want, rtol=1e-4, atol=2e-6)
    torch.testing.assert_close(both[1][1].cpu().double(), target, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("heads,size", [(4, 32), (66, 320)])
def test_slots_that_do_not_count_are_as_if_absent(heads, size, device, backend):
    """-1, future and out-of-range indices; an index that comes twice is two slots.  No key is read
    but those that a row selects: the others are NaN."""
    x = to(Case(1, heads, 2, 9, size, 6).arguments(), torch.float16, device)
    x.update(chunk_offset=4)
    x["indices"] = torch.tensor([[[2, -1, 2, 5, 99, 0], [-7, 5, 0, 6, 9, 5]]], device=device)
    x["key"][:, [1, 3, 4, 6, 7, 8]] = torch.nan
    kept = [[0, 2, 5], [1, 2, 5]]  # row 0 is at position 4, row 1 at 5
    score = x["index_score"].requires_grad_()
    loss, target = custom.compute_index_loss_sparse(**x, reduction="none", return_target=True)
    (grad,) = torch.autograd.grad(loss.sum(), score)
    for row, slots in enumerate(kept):
        alone = dict(x, chunk_offset=4 + row, query=x["query"][:, :, [row]])
        alone.update(index_score=score.detach()[:, [row]][..., slots].requires_grad_())
        alone.update(indices=x["indices"][:, [row]][..., slots])
        want, want_target = custom.compute_index_loss_sparse(
            **alone, reduction="none", return_target=True
        )
        (want_grad,) = torch.autograd.grad(want.sum(), alone["index_score"])
        close = dict(rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(loss[:, [row]], want, **close)
        torch.testing.assert_close(target[:, [row]][..., slots], want_target, **close)
        torch.testing.assert_close(grad[:, [row]][..., slots], want_grad, rtol=2e-3, atol=1e-6)
        rest = [j for j in range(6) if j not in slots]
        assert (target[0, row, rest] == 0).all() and (grad[0, row, rest] == 0).all()


@pytest.mark.parametrize("offset", [2**31 - 2, 2**31, 2**62], ids=str)
@pytest.mark.parametrize("heads,size", [(4, 32), (66, 320)])
def test_rows_behind_all_keys_see_them_all(heads, size, offset, device, backend):
    """However far: the row's number and its chunk's offset together may need more than 32 bits."""
    x = to(Case(1, heads, 5, 9, size, 6).arguments(), torch.float16, device)

    def run(offset: int) -> list[Tensor]:
        score = x["index_score"].detach().requires_grad_()
        out = custom.compute_index_loss_sparse(
            **x | dict(index_score=score, chunk_offset=offset), return_target=True
        )
        return [*out, *torch.autograd.grad(out[0], score)]

    for got, want in zip(run(offset), run(9), strict=True):
        assert torch.equal(got, want)


def test_cuda_refuses_more_keys_than_32_bits_number():
    pytest.importorskip("triton")
    from custom.cuda_ops.indexer import indexer_loss, indexer_loss_backward

    x = to(CASES[0].arguments(), torch.float16)
    rows = dict(index_score=x["index_score"], target=x["index_score"], grad_loss=x["index_score"])
    for count in (2**30, 2**30 + 1, 2**31):
        key = x["key"][:, :1].expand(-1, count, -1)
        refused = f"{count} keys, supported up to 1073741824" if count > 2**30 else None
        assert indexer_loss.unsupported(**x | dict(key=key)) == refused
        assert indexer_loss_backward.unsupported(**rows, key_length=count) == refused


@pytest.mark.parametrize("heads,size", [(4, 32), (66, 320)])
def test_given_sums_take_the_place_of_the_first_pass(heads, size, device, backend):
    """Twice as large sums give half the target, and the same loss: nothing is summed again."""
    case = Case(1, heads, 5, 20, size, 12, lse=True, every=True)
    x = to(case.arguments(), torch.float16)
    x = to(with_lse(case, x), torch.float16, device)
    doubled = dict(x, softmax_lse=x["softmax_lse"] + math.log(2))
    kept = dict(reduction="none", return_target=True)
    loss, target = custom.compute_index_loss_sparse(**x, **kept)
    same, half = custom.compute_index_loss_sparse(**doubled, **kept)
    torch.testing.assert_close(half, target / 2, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(same, loss, rtol=1e-5, atol=1e-6)


def test_targets_of_two_ranks_add_up(device, backend):
    """What tensor parallelism does: each rank its heads, the targets all-reduced."""
    case = Case(1, 8, 9, 20, 32, 16)
    x = to(case.arguments(), torch.float16, device)
    _, whole = custom.compute_index_loss_sparse(**x, return_target=True)
    halves = [
        custom.compute_index_loss_sparse(**dict(x, query=x["query"][:, heads]), return_target=True)[
            1
        ]
        for heads in (slice(0, 4), slice(4, 8))
    ]
    torch.testing.assert_close(halves[0] + halves[1], whole, rtol=1e-5, atol=1e-5)


def test_rows_without_a_valid_slot(device, backend):
    x = to(Case(1, 2, 4, 6, 16, 5).arguments(), torch.float16, device)
    x["indices"][0, 1] = -1
    x["indices"][0, 2] = 6
    x["index_score"][0, 0] = -torch.inf
    score = x["index_score"].requires_grad_()
    rows = custom.compute_index_loss_sparse(**x, reduction="none")
    (grad,) = torch.autograd.grad(rows.sum(), score)
    assert (rows[0, 1:3] == 0).all() and (grad[0, 1:3] == 0).all()
    assert torch.isfinite(rows).all() and torch.isfinite(grad).all()


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("integer", [torch.int32, torch.int64], ids=str)
def test_other_dtypes_of_scores_and_indices(kind, integer, device, backend):
    x = to(CASES[0].arguments(), torch.float16, device)
    x.update(index_score=x["index_score"].to(kind), indices=x["indices"].to(integer))
    want, _ = by_kl_div(to(x, torch.float64))
    score = x["index_score"].requires_grad_()
    rows = custom.compute_index_loss_sparse(**x, reduction="none")
    torch.testing.assert_close(rows.detach().cpu().double(), want, rtol=1e-4, atol=2e-6)
    (grad,) = torch.autograd.grad(rows.sum(), score)
    assert grad.dtype is kind


def test_strides_of_a_projection(device, backend):
    """query as a transposed view [B, S, N, D], key as the first columns of a joint cache."""
    x = to(Case(2, 4, 6, 9, 32, 8).arguments(), torch.float16, device)
    want = custom.compute_index_loss_sparse(**x, reduction="none")
    turned = x["query"].transpose(1, 2).contiguous().transpose(1, 2)
    joint = torch.cat([x["key"], torch.full_like(x["key"], torch.nan)], -1)
    x.update(query=turned, key=joint[..., :32])
    assert torch.equal(custom.compute_index_loss_sparse(**x, reduction="none"), want)


def test_gradcheck():
    x = Case(2, 2, 3, 5, 4, 4).arguments()

    def loss(score: Tensor) -> Tensor:
        out = custom.compute_index_loss_sparse(**dict(x, index_score=score), reduction="none")
        assert isinstance(out, Tensor)
        return out

    assert torch.autograd.gradcheck(loss, (x["index_score"].requires_grad_(),))


def test_blocks_of_rows_change_nothing(monkeypatch):
    x = Case(2, 4, 20, 30, 16, 12, Dr=4).arguments()
    whole = custom.compute_index_loss_sparse(**x, reduction="none", return_target=True)
    monkeypatch.setattr(reference, "_BLOCK", 500)
    parts = custom.compute_index_loss_sparse(**x, reduction="none", return_target=True)
    for got, want in zip(parts, whole, strict=True):
        torch.testing.assert_close(got, want)


class _Largest(TorchDispatchMode):
    """How many bytes the largest tensor has that any operation makes (not views of `given`)."""

    def __init__(self, given: dict[str, Any]) -> None:
        super().__init__()
        self.given = {x.untyped_storage().data_ptr() for x in given.values() if torch.is_tensor(x)}
        self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if torch.is_tensor(x) and x.untyped_storage().data_ptr() not in self.given:
                self.bytes = max(self.bytes, x.untyped_storage().nbytes())
        return out


def test_no_tensor_of_all_heads_probabilities(monkeypatch):
    """The reference holds [B, S, K], and a block of rows of what has heads or keys in it."""
    case = Case(2, 16, 64, 64, 8, 32, every=True)
    x = to(case.arguments(), torch.float32)
    monkeypatch.setattr(reference, "_BLOCK", 4 * case.K * case.N)
    rows = 8 * case.B * case.S * case.K  # int64 or float32
    with _Largest(x) as largest:
        reference.forward(**x, eps=1e-10)
    assert largest.bytes <= rows
    with _Largest(x) as largest:
        logits(x)
    assert largest.bytes >= case.N * rows, "the test does not see large tensors"


INDEXER = (3, 16)  # heads, size


def chain(x: dict[str, Any], count: int) -> tuple[Tensor, ...]:
    """The loss, its gradients down to the indexer's inputs, and the selection, by the three ops."""
    leaves = [x[name].detach().requires_grad_() for name in ("query_index", "key_index", "weights")]
    indices, score = custom.npu_lightning_indexer(*leaves, sparse_count=count, return_value=True)
    loss = custom.compute_index_loss_sparse(
        x["query"], x["key"], score[:, :, 0], indices[:, :, 0], x["scaling"], reduction="sum"
    )
    return *torch.autograd.grad(loss, leaves), loss.detach(), indices[:, :, 0]


def chain_by_autograd(x: dict[str, Any], indices: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The same by torch alone, in float64 but for the indexer's scores, which have `dtype`."""
    leaves = [x[n].double().requires_grad_() for n in ("query_index", "key_index", "weights")]
    ok = indices >= 0
    at = indices.long().where(ok, 0)
    chosen = torch.stack([leaves[1][b, at[b], 0] for b in range(len(at))])
    score = (leaves[2][..., None] * (leaves[0] @ chosen.mT).relu()).sum(2)
    score = score + (score.to(dtype).double() - score).detach()
    given = dict(index_score=score.detach(), indices=indices, chunk_offset=0, query_rope=None)
    rows, target = by_kl_div(to(x | given, torch.float64))
    pi = torch.nn.functional.normalize(target, p=1, dim=-1)
    log_r = score.masked_fill(~ok, -torch.inf).log_softmax(-1)
    # the ops' gradient is that of eps = 0; the loss hands it on in `dtype`
    terms = torch.nn.functional.kl_div(log_r, pi, reduction="none").where(ok, 0.0)
    (of_score,) = torch.autograd.grad(terms.sum(), score, retain_graph=True)
    grads = torch.autograd.grad(score, leaves, of_score.to(dtype).double())
    return *grads, rows.sum()


@every_dtype
@pytest.mark.parametrize("count", [4, 11])
def test_chain_to_the_indexers_inputs(count, dtype, device, backend):
    """From the attention's queries and keys to the gradients that train the indexer, with 4 of 11
    keys and with all of them."""
    skip_unless_taken(dtype, device, backend)
    B, N, S, D, (Ni, Di) = 2, 4, 11, 32, INDEXER
    half = dict(
        query=torch.randn(B, N, S, D),
        key=torch.randn(B, S, D),
        query_index=torch.randn(B, S, Ni, Di),
        key_index=torch.randn(B, S, 1, Di) / Di**0.5,
        weights=torch.randn(B, S, Ni),
        scaling=D**-0.5,
    )
    half = to(half, dtype)
    *grads, loss, indices = chain(to(half, dtype, device), count)
    exact = chain_by_autograd(half, indices.cpu(), dtype)
    close = dict(rtol=1e-9, atol=1e-9) if dtype is torch.float64 else dict(rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(loss.cpu().double(), exact[3], **close)
    for name, got, want in zip(("query_index", "key_index", "weights"), grads, exact, strict=False):
        if dtype in (torch.float64, torch.float32):
            torch.testing.assert_close(got.cpu().double(), want, **close)
        else:
            assert_close_to_float64(name, got, want.to(dtype), want)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_scalar_loops(data):
    small = st.integers(1, 4)
    B, N, S, S2, D, K = data.draw(st.tuples(st.integers(1, 2), small, small, small, small, small))
    offset, eps = data.draw(st.tuples(st.integers(0, 4), st.sampled_from([1e-10, 1e-3])))
    x = Case(B, N, S, S2, D, K).arguments() | dict(chunk_offset=offset)
    rows, target = custom.compute_index_loss_sparse(
        **x, eps=eps, reduction="none", return_target=True
    )
    for b in range(B):
        for i in range(S):
            slots = [j for j in range(K) if 0 <= x["indices"][b, i, j] <= offset + i]
            slots = [j for j in slots if x["indices"][b, i, j] < S2]
            mass = dict.fromkeys(slots, 0.0)
            for h in range(N):
                weight = {}
                for j in slots:
                    at = int(x["indices"][b, i, j])
                    dot = sum(float(x["query"][b, h, i, d] * x["key"][b, at, d]) for d in range(D))
                    weight[j] = math.exp(dot * x["scaling"])
                for j in slots:
                    mass[j] += weight[j] / sum(weight.values())
            r = {j: math.exp(float(x["index_score"][b, i, j])) for j in slots}
            want = 0.0
            for j in slots:
                pi, ri = mass[j] / sum(mass.values()), r[j] / sum(r.values())
                want += (pi + eps) * (math.log(pi + eps) - math.log(ri + eps))
                assert float(target[b, i, j]) == pytest.approx(mass[j], rel=1e-10)
            assert float(rows[b, i]) == pytest.approx(want, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    "change,error,sentence",
    [
        (dict(key=torch.zeros(1, 64, 31)), ValueError, "`key` has shape .* D=32"),
        (dict(key=torch.zeros(1, 64, 32).half()), TypeError, "`key` has dtype"),
        (dict(indices=torch.zeros(1, 32, 15, dtype=torch.int64)), ValueError, "`indices` .* K=16"),
        (dict(indices=torch.zeros(1, 32, 16)), TypeError, "`indices` is float32"),
        (dict(query_rope=torch.zeros(1, 4, 32, 8)), ValueError, "expected both or none"),
        (dict(softmax_lse=torch.zeros(1, 4, 31)), ValueError, "`softmax_lse` has shape"),
        (dict(eps=0.0), ValueError, "`eps` is 0.0"),
    ],
    ids=by_change,
)
def test_errors(change, error, sentence):
    good = to(CASES[0].arguments(), torch.float32)
    with pytest.raises(error, match=f"{OP}: .*{sentence}"):
        custom.compute_index_loss_sparse(**(good | change))


@pytest.mark.parametrize("lse", [False, True])
def test_a_key_of_minus_infinity_has_no_share(lse, device, backend):
    """Of heads that do not fill a kernel's tile: 0 * inf is NaN."""
    case = Case(2, 3, 5, 9, 32, 9, every=True)
    x = {
        n: v.half() if isinstance(v, Tensor) and v.is_floating_point() else v
        for n, v in case.arguments().items()
    }
    x["query"], x["key"] = x["query"].abs(), x["key"].clone()
    x["key"][:, 1] = -torch.inf
    if lse:
        logits = x["scaling"] * (x["query"].float() @ x["key"].float().mT[:, None])
        seen = torch.arange(9) <= torch.arange(5)[:, None] + case.offset
        x["softmax_lse"] = logits.masked_fill(~seen, -torch.inf).logsumexp(-1)
    wanted = reference.forward(eps=1e-10, **x)
    there = {n: v.to(device) if isinstance(v, Tensor) else v for n, v in x.items()}
    with runs_once(OP, backend):
        got = getattr(torch.ops.custom, OP)(**there)
    for name, a, b in zip(("loss", "target"), got, wanted, strict=True):
        assert b.isfinite().all()
        torch.testing.assert_close(a.cpu(), b, rtol=2e-3, atol=1e-4, msg=name)


def test_a_key_that_is_no_number_leaves_no_target(device, backend):
    """Its row's heads are not taken for those that see no key."""
    case = Case(1, 3, 4, 9, 16, 5, every=True)
    x = {
        n: v.half() if isinstance(v, Tensor) and v.is_floating_point() else v
        for n, v in case.arguments().items()
    }
    x["key"][0, 1, 3] = torch.nan
    x = {n: v.to(device) if isinstance(v, Tensor) else v for n, v in x.items()}
    with runs_once(OP, backend):
        loss, target = getattr(torch.ops.custom, OP)(**x)
    assert loss.isnan().all() and target.isnan().all()


def test_no_key_is_no_loss(device, backend):
    given = sample("npu_indexer_loss", device, torch.float16)
    given["key"] = given["key"][:, :0]
    for out in torch.ops.custom.npu_indexer_loss(**given):
        assert out.numel() and not out.any()
