# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""npu_sparse_flash_attention_grad against autograd of the formula, and finite differences."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import custom

from ...support.accuracy import assert_close_to_float64, every_dtype, skip_unless_taken
from ...support.calls import assert_gradient_compiles, assert_refuses
from ...support.ragged import Packed, limits, run
from ...support.samples import sample
from ...support.selected import DR, RAGGED, SCALE, D, Problem, attend, chosen

OP = "npu_sparse_flash_attention_grad"
FORWARD = "npu_sparse_flash_attention"
LAYOUTS = ["BSND", "TND"]
NAMES = ("query", "key", "value", "query_rope", "key_rope")
OPTIONS = [{}, dict(rope=None), dict(rope=0), dict(own_value=True), dict(block_size=3, count=5)]


def by_autograd(problem: Problem, d_out, d_lse, dtype, sparse_mode) -> dict[str, list[Tensor]]:
    """Gradients by request of every tensor that the problem has, evaluated in `dtype`; `d_lse` of
    the logarithm of the denominator, or None."""
    out: dict[str, list[Tensor]] = {}
    for i, rows in enumerate(problem.rows):
        leaves = {
            name: getattr(problem, name)[i].to(dtype).requires_grad_()
            for name in NAMES
            if getattr(problem, name) is not None
        }
        total = sum(leaf.sum() * 0 for leaf in leaves.values())
        for j, limit in enumerate(limits(rows, problem.keys[i], sparse_mode)):
            result, top, lse_sum = attend(
                leaves["query"][j],
                leaves["query_rope"][j] if "query_rope" in leaves else None,
                leaves["key"],
                leaves.get("key_rope"),
                leaves.get("value", leaves["key"]),
                chosen(problem.indices[i][j, 0], problem.block_size, limit),
                SCALE,
                problem.sinks,
            )
            total = total + (result * d_out[i][j].to(dtype)).sum()
            if d_lse is not None and (lse_sum > 0).all():
                total = total + ((top + lse_sum.log()) * d_lse[i][j].to(dtype)).sum()
        grads = torch.autograd.grad(total, list(leaves.values()))
        for name, grad in zip(leaves, grads, strict=True):
            out.setdefault(name, []).append(grad)
    return out


def by_formula(problem: Problem, d_out, d_lse, dtype, sparse_mode, order) -> dict[str, Tensor]:
    """The same gradients from the op's own formulas, one query token at a time, with `out` and the
    statistics rounded to `dtype` in between: what an evaluation in `dtype` can be asked for.
    `order` draws the one in which features are added up."""
    draw = torch.Generator().manual_seed(order)
    features = {size: torch.randperm(size, generator=draw) for size in (D, DR, 0)}
    grads = {
        name: [torch.zeros_like(part, dtype=dtype) for part in getattr(problem, name)]
        for name in NAMES
        if getattr(problem, name) is not None
    }
    for i, (rows, keys) in enumerate(zip(problem.rows, problem.keys, strict=True)):
        x = {name: getattr(problem, name)[i].to(dtype) for name in grads}
        x = {name: part[..., features[part.shape[-1]]] for name, part in x.items()}
        value = x.get("value", x["key"])
        for j, limit in enumerate(limits(rows, keys, sparse_mode)):
            at = chosen(problem.indices[i][j, 0], problem.block_size, limit)
            if not at:
                continue
            rope = x["query_rope"][j] if "query_rope" in x else None
            out, top, total = attend(
                x["query"][j], rope, x["key"], x.get("key_rope"), value, at, SCALE
            )
            z = x["query"][j] @ x["key"][at].T
            if rope is not None:
                z = z + rope @ x["key_rope"][at].T
            p = torch.exp(z * SCALE - top[:, None]) / total[:, None]
            grad = d_out[i][j].to(dtype)[:, features[D]]
            delta = (grad * out).sum(-1, keepdim=True)
            if d_lse is not None:
                d_sum = d_lse[i][j].to(dtype)[:, None] / total[:, None]  # what the op is given
                delta = delta - d_sum * total[:, None]
            dz = p * (grad @ value[at].T - delta) * SCALE
            grads["query"][i][j] = dz @ x["key"][at]
            if rope is not None:
                grads["query_rope"][i][j] = dz @ x["key_rope"][at]
                grads["key_rope"][i].index_add_(0, torch.tensor(at), dz.T @ rope)
            grads["key"][i].index_add_(0, torch.tensor(at), dz.T @ x["query"][j])
            of_value = grads.get("value", grads["key"])
            of_value[i].index_add_(0, torch.tensor(at), p.T @ grad)
    joined = {name: torch.cat(parts) for name, parts in grads.items()}
    return {name: x[..., features[x.shape[-1]].argsort()] for name, x in joined.items()}


@pytest.mark.parametrize("of_lse", [False, True], ids=["out", "out and lse"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("sparse_mode", [3, 0])
@pytest.mark.parametrize("layout", LAYOUTS)
@every_dtype
def test_formula(device, backend, dtype, layout, sparse_mode, options, of_lse):
    skip_unless_taken(dtype, device, backend)
    problem = Problem(*zip(*RAGGED, strict=True), **options).rounded_to(dtype)
    packed = Packed((layout, layout), problem.rows, problem.keys, device)
    d_out = [torch.randn_like(x).to(dtype).double() for x in problem.query]
    d_lse = [torch.randn(x.shape[:-1]).double() for x in problem.query] if of_lse else None
    arguments = problem.arguments(packed, dtype) | dict(sparse_mode=sparse_mode)
    out, softmax_max, softmax_sum = run(FORWARD, backend, **arguments, return_softmax_lse=True)
    d_sum = None
    if d_lse is not None:
        # a row that sees nothing gets an infinite one, as log(0) gives it, which counts nothing
        d_sum = packed.rows(d_lse).to(softmax_sum).view_as(softmax_sum) / softmax_sum
    outs = run(
        OP,
        backend,
        **{name: arguments[name] for name in NAMES},
        sparse_indices=arguments["sparse_indices"],
        d_out=packed.rows([x.to(dtype) for x in d_out]),
        out=out,
        softmax_max=softmax_max,
        softmax_sum=softmax_sum,
        scale_value=SCALE,
        sparse_block_size=problem.block_size,
        actual_seq_qlen=packed.lengths_query,
        actual_seq_kvlen=packed.lengths_key,
        layout=layout,
        sparse_mode=sparse_mode,
        d_softmax_sum=d_sum,
    )
    # processors and libraries add up in orders of their own: the worst of eight says what one gives
    plain = [by_formula(problem, d_out, d_lse, dtype, sparse_mode, order) for order in range(8)]
    exact = by_autograd(problem, d_out, d_lse, torch.float64, sparse_mode)
    for name, got in zip(NAMES, outs, strict=True):
        if name not in exact:
            assert list(got.shape) == [0]
            continue
        parts, padding = (packed.unpack if "query" in name else packed.unpack_keys)(got)
        assert (padding == 0).all(), f"d_{name}: padding"
        wanted = torch.cat(exact[name])
        if not wanted.numel():
            assert got.shape == arguments[name].shape
            continue
        worst = max((each[name] for each in plain), key=lambda x: (x - wanted).abs().max())
        assert_close_to_float64(f"d_{name}", torch.cat(parts), worst, wanted)


@pytest.mark.parametrize("of", ["out", "lse", "both", None])
@pytest.mark.parametrize(
    "options", [dict(sinks=True), dict(sinks=True, own_value=True), {}], ids=str
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradcheck_through_the_op(layout, options, of):
    problem = Problem((2, 0, 3), (9, 4, 2), count=4, **options)
    packed = Packed((layout, layout), problem.rows, problem.keys, torch.device("cpu"))
    arguments = problem.arguments(packed, torch.float64)
    names = [name for name in (*NAMES, "sinks") if arguments[name] is not None]
    leaves = [arguments[name].nan_to_num(0)[..., :6].detach().clone() for name in names]
    arguments |= dict(scale_value=0.3, return_softmax_lse=of is not None)

    def attention(*tensors):
        out, softmax_max, softmax_sum = custom.npu_sparse_flash_attention(
            **(arguments | dict(zip(names, tensors, strict=True)))
        )
        assert not softmax_max.requires_grad
        assert softmax_sum.requires_grad == (of is not None)
        if of is None:
            return out
        seen = softmax_sum > 0
        top, total = softmax_max.where(seen, 0), softmax_sum.where(seen, 1)
        lse = top + total.log()
        return {"out": out, "lse": lse, "both": (out, lse)}[of]

    leaves = [leaf.requires_grad_() for leaf in leaves]
    assert torch.autograd.gradcheck(attention, leaves, fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_sinks_in_half_precision(device, backend, dtype):
    """The sinks' gradient comes from the statistics, outside the gradient op."""
    skip_unless_taken(dtype, device, backend)
    problem = Problem(*zip(*RAGGED, strict=True), sinks=True).rounded_to(dtype)
    problem.sinks[0], problem.sinks[1] = -torch.inf, 6.0
    packed = Packed(("TND", "TND"), problem.rows, problem.keys, device)
    arguments = problem.arguments(packed, dtype)
    leaf = arguments["sinks"].requires_grad_()
    out, _, _ = run(FORWARD, backend, **arguments)
    d_out = torch.randn(out.shape).to(dtype)
    out.backward(d_out.to(device))
    exact, plain = (
        _sinks_by_autograd(problem, packed, d_out, each) for each in (torch.float64, dtype)
    )
    assert_close_to_float64("d_sinks", leaf.grad, plain, exact)


def _sinks_by_autograd(problem, packed, d_out, dtype):
    by_request, _ = packed.unpack(d_out)
    sinks = problem.sinks.to(dtype).requires_grad_()
    total = sinks.sum() * 0
    for i, rows in enumerate(problem.rows):
        for j, limit in enumerate(limits(rows, problem.keys[i], 3)):
            result, _, _ = attend(
                problem.query[i][j].to(dtype),
                problem.query_rope[i][j].to(dtype),
                problem.key[i].to(dtype),
                problem.key_rope[i].to(dtype),
                problem.key[i].to(dtype),
                chosen(problem.indices[i][j, 0], 1, limit),
                SCALE,
                sinks,
            )
            total = total + (result * by_request[i][j].to(dtype)).sum()
    return torch.autograd.grad(total, sinks)[0]


@pytest.mark.parametrize("of_lse", [False, True], ids=["out", "out and lse"])
def test_backward_compiles_and_opcheck_agrees(of_lse):
    shapes = ((2, 3, 4, 16), (2, 9, 1, 16), (2, 3, 4, 8), (2, 9, 1, 8))
    leaves = [torch.randn(shape, requires_grad=True) for shape in shapes]
    indices = torch.randint(-1, 9, (2, 3, 1, 5), dtype=torch.int32)

    def loss(query, key, query_rope, key_rope):
        out, top, total = custom.npu_sparse_flash_attention(
            query,
            key,
            None,
            indices,
            0.2,
            query_rope=query_rope,
            key_rope=key_rope,
            return_softmax_lse=True,
        )
        seen = total > 0
        lse = top.where(seen, 0) + total.where(seen, 1).log()
        return out.square().sum() + (lse.sin().sum() if of_lse else 0)

    assert_gradient_compiles(loss, leaves)
    torch.library.opcheck(
        torch.ops.custom.npu_sparse_flash_attention.default,
        (leaves[0], leaves[1], None, indices, 0.2),
        dict(query_rope=leaves[2], key_rope=leaves[3]),
    )


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(d_out=torch.zeros(2, 3, 4, 8)), ValueError, "`d_out` has shape .* D=32"),
        (dict(out=torch.zeros(2, 3, 4, 32).half()), TypeError, "`out` has dtype"),
        (dict(softmax_max=torch.zeros(2, 3, 4)), ValueError, "`softmax_max` has shape"),
        (dict(softmax_sum=torch.zeros(2, 1, 3, 4).half()), TypeError, "`softmax_sum` is float16"),
        (dict(softmax_sum=torch.zeros(0)), ValueError, "`softmax_sum` has shape"),
    ],
)
def test_errors(change, error, message):
    valid = dict(
        query=torch.zeros(2, 3, 4, 32),
        key=torch.zeros(2, 9, 1, 32),
        value=None,
        sparse_indices=torch.zeros(2, 3, 1, 5, dtype=torch.int32),
        d_out=torch.zeros(2, 3, 4, 32),
        out=torch.zeros(2, 3, 4, 32),
        softmax_max=torch.zeros(2, 1, 3, 4),
        softmax_sum=torch.ones(2, 1, 3, 4),
        scale_value=1.0,
        sparse_block_size=1,
    )
    assert_refuses(OP, valid | change, error, message)


def test_a_sum_that_is_no_number_gives_no_gradient(device, backend):
    """Its row and head are not taken for one that sees no key."""
    given = sample(OP, device, torch.float16)
    total = given["softmax_sum"].clone()
    total[0, 0, 1, 2] = torch.nan
    d_query, *_ = run(OP, backend, **given | dict(softmax_sum=total))
    wrong = torch.zeros(d_query.shape[:-1], dtype=torch.bool, device=device)
    wrong[0, 1, 2] = True
    assert torch.equal(d_query.isnan().all(-1), wrong)
    assert torch.equal(d_query.isnan().any(-1), wrong)
