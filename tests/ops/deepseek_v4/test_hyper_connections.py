# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Hyper-connections and their gradients, against Transformers' DeepseekV4, a loop over numbers,
autograd, and stage by stage."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from custom.dispatch.reference.deepseek_v4 import hc_pre as reference
from torch import Tensor

import custom

from ...support.accuracy import assert_close_to_float64, every_dtype, skip_float64
from ...support.calls import assert_refuses, by_change, runs_once
from ...support.deepseek_v4 import config, drawn, float64

F64 = torch.float64
NAMES = ("x", "hc_fn", "hc_scale", "hc_base", "norm_weight")
# rows, hidden size, a head, a norm
CASES = {
    "a site": ((2, 3), 40, False, False),
    "a norm": ((17,), 72, False, True),
    "one token": ((1,), 200, False, False),
    "a head": ((5,), 64, True, False),
    "a head and a norm": ((2, 2), 33, True, True),
    "one channel": ((3,), 1, False, True),
    "nothing": ((0,), 16, False, True),
    "no requests": ((0, 3), 16, False, False),
}
cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def draw(rows: tuple[int, ...], h: int, head: bool, norm: bool) -> dict[str, Any]:
    """In float64."""
    mix, parts = (4, 1) if head else (24, 3)
    x: dict[str, Any] = dict(
        x=torch.randn(*rows, 4, h, dtype=F64),
        hc_fn=torch.randn(mix, 4 * h, dtype=F64) / math.sqrt(4 * h),
        hc_scale=torch.randn(parts, dtype=F64) + 1,
        hc_base=torch.randn(mix, dtype=F64),
    )
    return x | dict(norm_weight=torch.randn(h, dtype=F64)) if norm else x


def draw_post(rows: tuple[int, ...], h: int) -> dict[str, Any]:
    return dict(
        x=torch.randn(*rows, h, dtype=F64),
        residual=torch.randn(*rows, 4, h, dtype=F64),
        post=torch.rand(*rows, 4, dtype=F64) * 2,
        comb=torch.rand(*rows, 4, 4, dtype=F64),
    )


def typed(given: dict[str, Any], dtype: torch.dtype, device: Any = "cpu") -> dict[str, Any]:
    """Activations in `dtype`, parameters and gates in float32 or float64."""
    wide = F64 if dtype is F64 else torch.float32
    halves = ("x", "residual", "d_y", "d_out")
    return {
        name: v.to(device, dtype if name in halves else wide) if isinstance(v, Tensor) else v
        for name, v in given.items()
    }


def plainly(
    x: Tensor,
    hc_fn: Tensor,
    hc_scale: Tensor,
    hc_base: Tensor,
    norm_weight: Tensor | None = None,
    iters: int = 20,
    norm_eps: float = 1e-6,
    hc_eps: float = 1e-6,
) -> tuple[Tensor, ...]:
    """In the dtype of the parameters, and differentiable."""
    wide = hc_fn.dtype
    streams = x.to(wide)
    flat = streams.flatten(-2)
    mix = (flat @ hc_fn.T) / (flat.pow(2).mean(-1, keepdim=True) + norm_eps).sqrt()
    pre = 1 / (1 + (-(mix[..., :4] * hc_scale[0] + hc_base[:4])).exp()) + hc_eps
    y = sum(pre[..., j, None] * streams[..., j, :] for j in range(4))
    if norm_weight is not None:
        y = y / (y.pow(2).mean(-1, keepdim=True) + norm_eps).sqrt() * norm_weight
    y = y.to(x.dtype)
    if len(hc_fn) == 4:
        return (y,)
    post = 2 / (1 + (-(mix[..., 4:8] * hc_scale[1] + hc_base[4:8])).exp())
    logits = (mix[..., 8:] * hc_scale[2] + hc_base[8:]).unflatten(-1, (4, 4))
    comb = logits.exp() / logits.exp().sum(-1, keepdim=True) + hc_eps
    comb = comb / (comb.sum(-2, keepdim=True) + hc_eps)
    for _ in range(iters - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + hc_eps)
        comb = comb / (comb.sum(-2, keepdim=True) + hc_eps)
    return y, post, comb


def plainly_post(x: Tensor, residual: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    wide = post.dtype
    mixed = torch.einsum("...jk,...jh->...kh", comb, residual.to(wide))
    return (torch.einsum("...k,...h->...kh", post, x.to(wide)) + mixed).to(x.dtype)


def of_tf32(given: dict[str, Any], backend: str) -> float:
    """What products in TF32 may add to an exponent: 1e-3 |row of fn|, times its scale."""
    if backend == "reference":
        return 0.0
    return 1e-3 * float(given["hc_fn"].norm(dim=1).max() * given["hc_scale"].abs().max())


@every_dtype
@cases
def test_equals_the_formula(case, dtype, device, backend):
    skip_float64(dtype, backend)
    given = typed(draw(*case), dtype)
    with runs_once("npu_hc_pre", backend):
        got = custom.npu_hc_pre(**typed(given, dtype, device))
    exact, rounded = plainly(**typed(given, F64)), plainly(**given)
    # a gate's slope is at most 1/2; a sum of comb's 40 divisions moves an entry by less than twice
    # its logits
    beyond = of_tf32(given, backend)
    size = float(exact[0].abs().max()) if exact[0].numel() else 0.0
    for name, value, plain, true, times in zip(
        ("y", "post", "comb"), got, rounded, exact, (size, 0.5, 2), strict=False
    ):
        assert_close_to_float64(name, value, plain, true, beyond=times * beyond)
    for value in got[len(exact) :]:
        assert value.shape == (0,)


@every_dtype
@cases
def test_post_equals_the_formula(case, dtype, device, backend):
    skip_float64(dtype, backend)
    given = typed(draw_post(*case[:2]), dtype)
    with runs_once("npu_hc_post", backend):
        got = custom.npu_hc_post(**typed(given, dtype, device))
    exact = plainly_post(**typed(given, F64))
    assert_close_to_float64("out", got, plainly_post(**given), exact)


def test_reference_equals_a_loop_over_numbers():
    given = draw((2,), 3, False, True)
    options = dict(hc_sinkhorn_iters=3, norm_eps=0.1, hc_eps=0.01)
    y, post, comb = custom.npu_hc_pre(**given, **options)
    gains = given["norm_weight"].tolist()
    for token, streams in enumerate(given["x"].tolist()):
        flat = [u for stream in streams for u in stream]
        root = math.sqrt(sum(u * u for u in flat) / 12 + 0.1)
        logits = []
        for i, row in enumerate(given["hc_fn"].tolist()):
            scale = float(given["hc_scale"][0 if i < 4 else 1 if i < 8 else 2])
            product = sum(a * b for a, b in zip(row, flat, strict=True)) / root
            logits.append(product * scale + float(given["hc_base"][i]))
        pre = [1 / (1 + math.exp(-u)) + 0.01 for u in logits[:4]]
        c = [[math.exp(logits[8 + 4 * j + k]) for k in range(4)] for j in range(4)]
        c = [[u / sum(row) + 0.01 for u in row] for row in c]
        for sweep in range(3):
            if sweep:
                c = [[u / (sum(row) + 0.01) for u in row] for row in c]
            columns = [sum(row[k] for row in c) + 0.01 for k in range(4)]
            c = [[row[k] / columns[k] for k in range(4)] for row in c]
        out = [sum(pre[j] * streams[j][d] for j in range(4)) for d in range(3)]
        of_norm = math.sqrt(sum(u * u for u in out) / 3 + 0.1)
        for d in range(3):
            assert math.isclose(float(y[token, d]), out[d] / of_norm * gains[d], rel_tol=1e-12)
        for k in range(4):
            want = 2 / (1 + math.exp(-logits[4 + k]))
            assert math.isclose(float(post[token, k]), want, rel_tol=1e-12)
            for j in range(4):
                assert math.isclose(float(comb[token, j, k]), c[j][k], rel_tol=1e-12)


def test_post_mixes_from_rows_to_columns():
    given = draw_post((2,), 3)
    out = custom.npu_hc_post(**given)
    for token in range(2):
        for k in range(4):
            for d in range(3):
                want = float(given["post"][token, k] * given["x"][token, d])
                for j in range(4):
                    want += float(given["comb"][token, j, k] * given["residual"][token, j, d])
                assert math.isclose(float(out[token, k, d]), want, rel_tol=1e-12)


def test_equals_transformers_in_float64():
    """A site, the way back as its decoder layer has it, and the head of a model."""
    hf = float64()
    site, head = (
        drawn(kind(config())) for kind in (hf.DeepseekV4HyperConnection, hf.DeepseekV4HyperHead)
    )
    streams, of_layer = torch.randn(2, 3, 4, 40, dtype=F64), torch.randn(2, 3, 40, dtype=F64)
    with torch.no_grad():
        post, comb, y = site(streams)
        after = post.unsqueeze(-1) * of_layer.unsqueeze(-2) + comb.transpose(-1, -2) @ streams
        got = custom.npu_hc_pre(streams, site.fn, site.scale, site.base)
        for ours, theirs in zip(got, (y, post, comb), strict=True):
            assert (ours - theirs).abs().max() < 1e-13
        assert (custom.npu_hc_post(of_layer, streams, *got[1:]) - after).abs().max() < 1e-13
        of_head = custom.npu_hc_pre(streams, head.hc_fn, head.hc_scale, head.hc_base)[0]
        assert (of_head - head(streams)).abs().max() < 1e-13


def test_trains_as_transformers_does():
    """Every gradient of a site and of the way back, in float64."""
    site = drawn(float64().DeepseekV4HyperConnection(config())).requires_grad_()
    leaves = [torch.randn(*s, dtype=F64) for s in ((2, 3, 4, 40), (2, 3, 40))]
    weight = torch.randn(2, 3, 4, 40, dtype=F64)

    def grads(forward: Any) -> list[Tensor]:
        streams, out = (leaf.clone().requires_grad_() for leaf in leaves)
        y, post, comb = forward(streams)
        after = custom.npu_hc_post(out + y, streams, post, comb)
        loss = (after * weight).sum()
        return list(torch.autograd.grad(loss, [streams, out, *site.parameters()]))

    def theirs(streams: Tensor) -> tuple[Tensor, ...]:
        post, comb, y = site(streams)
        return y, post, comb

    ours = grads(lambda streams: custom.npu_hc_pre(streams, site.fn, site.scale, site.base))
    for got, want in zip(ours, grads(theirs), strict=True):
        assert (got - want).abs().max() < 1e-11 * max(1.0, float(want.abs().max()))


@pytest.mark.parametrize("iters", [1, 2, 20])
def test_columns_sum_to_one_and_rows_nearly(iters, device):
    given = typed(draw((9,), 24, False, False), torch.float32, device)
    comb = custom.npu_hc_pre(**given, hc_sinkhorn_iters=iters)[2].cpu()
    want = plainly(**typed(given, F64, "cpu"), iters=iters)[2]
    # a column of sum c becomes c / (c + hc_eps)
    assert (comb.sum(-2) - want.sum(-2)).abs().max() < 1e-6
    assert (want.sum(-2) - 1).abs().max() < 1e-4
    assert (comb - want).abs().max() < (1e-5 if device.type == "cpu" else 1e-2)


def test_far_exponents_stay_finite(device):
    """Gates that are shut, and a softmax of one number alone."""
    given = draw((3,), 16, False, False)
    given["hc_base"] = torch.tensor([200.0, -200, 0, 90] * 6, dtype=F64)
    y, post, comb = custom.npu_hc_pre(**typed(given, torch.float32, device))
    assert all(each.isfinite().all() for each in (y, post, comb))
    assert post.cpu()[:, 0].eq(2).all() and post.cpu()[:, 1].eq(0).all()


def test_zero_streams(device):
    given = draw((2,), 16, False, True)
    given["x"].zero_()
    y, post, _ = custom.npu_hc_pre(**typed(given, torch.float32, device))
    assert not y.any()
    want = 2 * torch.sigmoid(given["hc_base"][4:8]).float().expand(2, 4)
    torch.testing.assert_close(post.cpu(), want)


@cases
@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.float16], ids=str)
def test_both_at_once_equal_one_after_the_other(case, dtype, device, backend):
    skip_float64(dtype, backend)
    rows, h, *_ = case
    gates = typed(draw(*case), dtype, device)
    del gates["x"]
    back = typed(draw_post(rows, h), dtype, device)
    with runs_once("npu_hc_post_pre", backend):
        got = custom.npu_hc_post_pre(**back, **gates)
    streams = custom.npu_hc_post(**back)
    for ours, apart in zip(got, (streams, *custom.npu_hc_pre(streams, **gates)), strict=True):
        assert torch.equal(ours, apart)


def gradients(function: Any, given: dict[str, Any], upstream: list[Tensor]) -> dict[str, Tensor]:
    leaves = {name: v.detach().clone().requires_grad_() for name, v in given.items()}
    outs = function(**leaves)
    outs = [outs] if isinstance(outs, Tensor) else list(outs)[: len(upstream)]
    grads = [g.to(out.device, out.dtype) for g, out in zip(upstream, outs, strict=True)]
    found = torch.autograd.grad(outs, list(leaves.values()), grads)
    return dict(zip(leaves, found, strict=True))


def rounding(given: dict[str, Any], upstream: list[Tensor]) -> float:
    """Of sums over tokens in float32: each token's share is right to four roundings of its largest
    number, and numbers of both signs leave less of the sum than went into it."""
    tokens = {name: v.flatten(0, -3) if name == "x" else v for name, v in given.items()}
    places = [g.view(len(tokens["x"]), *g.shape[given["x"].ndim - 2 :]) for g in upstream]
    shares = 0.0
    for t in range(len(tokens["x"])):
        one = tokens | dict(x=tokens["x"][t : t + 1])
        grads = gradients(plainly, one, [g[t : t + 1] for g in places])
        shares += max(float(grad.abs().max()) for grad in grads.values())
    return 4 * 2.0**-23 * shares


@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.float16], ids=str)
@cases
def test_gradients_equal_autograd(case, dtype, device, backend):
    skip_float64(dtype, backend)
    given = typed(draw(*case), dtype)
    upstream = [torch.randn(v.shape, dtype=F64) for v in plainly(**typed(given, F64))]
    upstream[0] = upstream[0].to(dtype).double()
    with runs_once("npu_hc_pre_grad", backend):
        got = gradients(custom.npu_hc_pre, typed(given, dtype, device), upstream)
    exact = gradients(plainly, typed(given, F64), upstream)
    rounded = gradients(plainly, given, upstream)
    of_sums = rounding(typed(given, F64), upstream)
    for name, value in got.items():
        largest = float(exact[name].abs().max()) if exact[name].numel() else 0.0
        # a logit that is off by d moves a gradient by a few d of its largest
        beyond = 4 * of_tf32(given, backend) * largest + of_sums
        assert_close_to_float64(name, value, rounded[name], exact[name], beyond=beyond)


@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.float16], ids=str)
@cases
def test_gradients_of_post_equal_autograd(case, dtype, device, backend):
    skip_float64(dtype, backend)
    given = typed(draw_post(*case[:2]), dtype)
    upstream = [torch.randn(given["residual"].shape, dtype=F64).to(dtype).double()]
    with runs_once("npu_hc_post_grad", backend):
        got = gradients(custom.npu_hc_post, typed(given, dtype, device), upstream)
    exact = gradients(plainly_post, typed(given, F64), upstream)
    rounded = gradients(plainly_post, given, upstream)
    for name, value in got.items():
        assert_close_to_float64(name, value, rounded[name], exact[name])


@pytest.mark.parametrize("head", [False, True], ids=["a site", "a head"])
def test_gradcheck_in_float64(head):
    given = draw((1,), 2, head, True)
    leaves = [v.requires_grad_() for v in given.values()]

    def call(*values: Tensor) -> tuple[Tensor, ...]:
        return custom.npu_hc_pre(
            **dict(zip(given, values, strict=True)), hc_eps=0.01, hc_sinkhorn_iters=3
        )[: 1 if head else 3]

    assert torch.autograd.gradcheck(call, leaves)


def test_gradcheck_of_post_in_float64():
    leaves = [v.requires_grad_() for v in draw_post((2,), 3).values()]
    assert torch.autograd.gradcheck(custom.npu_hc_post, leaves)


def test_gradient_of_one_output_alone(device, backend):
    """Those of the others are zeros, and parameters that want none get none."""
    given = typed(draw((3,), 8, False, False), torch.float32, device)
    for place in range(3):
        x = given["x"].clone().requires_grad_()
        custom.npu_hc_pre(**given | dict(x=x))[place].square().sum().backward()
        wide = typed(given, F64, "cpu")
        want = wide["x"].clone().requires_grad_()
        plainly(**wide | dict(x=want))[place].square().sum().backward()
        bound = 1e-4 if backend == "reference" else 1e-2
        assert (x.grad.cpu() - want.grad).abs().max() < bound * (1 + want.grad.abs().max())


def test_sweeps_are_done_in_their_order():
    """The reference's own helper, of which the gradient is made: axes, sums, quotients."""
    first = torch.rand(2, 4, 4, dtype=F64) + 0.1
    steps = [*reference.sweeps(first, 3, 0.5)]
    assert [axis for axis, _, _ in steps] == [-2, -1, -2, -1, -2]
    assert torch.equal(steps[0][2], first / (first.sum(-2, keepdim=True) + 0.5))


@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        (dict(hc_eps=-1.0), ValueError, "`hc_eps` is -1.0"),
        (dict(norm_eps=-1.0), ValueError, "`norm_eps` is -1.0"),
        (dict(hc_fn=torch.zeros(23, 32)), ValueError, "`hc_fn` has 23 rows, expected 24, or 4"),
        (dict(hc_fn=torch.zeros(24, 31)), ValueError, r"`hc_fn` has shape \[24, 31\]"),
        (dict(hc_fn=torch.zeros(4, 32)), ValueError, r"`hc_scale` has shape \[3\]"),
        (dict(hc_fn=torch.zeros(24, 32).half()), TypeError, "`hc_fn` is float16, expected float32"),
        (dict(x=torch.zeros(3, 2, 8)), ValueError, r"`x` has shape \[3, 2, 8\]"),
        (dict(x=torch.zeros(3, 4, 8).double()), TypeError, "`hc_fn` is float32, expected float64"),
        (dict(x=torch.zeros(3, 4, 0)), ValueError, "`x` has a hidden size of 0"),
        (dict(norm_weight=torch.zeros(7)), ValueError, "`norm_weight` has shape"),
        (dict(norm_weight=torch.zeros(8).bfloat16()), TypeError, "`norm_weight` is bfloat16"),
    ],
    ids=by_change,
)
def test_errors(change, error, sentence):
    good = typed(draw((3,), 8, False, True), torch.float32)
    assert_refuses("npu_hc_pre", good | change, error, sentence)
