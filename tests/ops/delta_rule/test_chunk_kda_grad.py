# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Gradients of Kimi delta attention against autograd of its recurrence, token by token."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import custom

from ...support.accuracy import assert_close_to_float64, every_dtype
from ...support.calls import by_change
from ...support.delta_rule import made
from ...support.kda import BOUNDED, EXTREMES, GIVEN, ODD_BOUNDS, PLAIN, SOFTPLUS, Case, keys_alike
from ...support.trained import Rule

OP = "npu_chunk_kda_grad"
pytestmark = pytest.mark.usefixtures("one_thread")


def recurrence(x: dict[str, Any], stored: torch.dtype) -> tuple[Tensor, Tensor]:
    """One token after the other; the state has dtype `stored` between them."""
    v = x["v"]
    wide = torch.float64 if v.dtype is torch.float64 else torch.float32
    B, T, H, K = x["q"].shape
    HV, V = v.shape[2:]
    q, k, g = (x[name].to(wide) for name in "qkg")
    if x["use_qk_l2norm_in_kernel"]:
        q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
    q, k = (y.repeat_interleave(HV // H, 2) for y in (q, k))
    if x["use_gate_in_kernel"]:
        y = g if x["dt_bias"] is None else g + x["dt_bias"].to(wide)
        rate = 1.0 if x["A_log"] is None else x["A_log"].to(wide).exp()[..., None]
        if x["lower_bound"] is None:
            g = -rate * torch.nn.functional.softplus(y)
        else:
            g = x["lower_bound"] * (rate * y).sigmoid()
    scale = K**-0.5 if x["scale"] is None else x["scale"]
    ranges = [(b, 0, T) for b in range(B)]
    if x["cu_seqlens"] is not None:
        bounds = x["cu_seqlens"].tolist()
        ranges = [(0, *pair) for pair in pairwise(bounds)]
    turn = x["state_layout"] == "vk"
    outs, states = {}, []
    for n, (b, start, end) in enumerate(ranges):
        state = torch.zeros(HV, K, V, dtype=stored)
        if x["initial_state"] is not None:
            given = x["initial_state"][n].to(stored)
            state = given.mT if turn else given
        for t in range(start, end):
            S = state.to(wide) * g[b, t, :, :, None].exp()
            u = v[b, t].to(wide) - (S * k[b, t, :, :, None]).sum(-2)
            u = u * made(x, x["beta"][b, t, :, None].to(wide))
            S = S + k[b, t, :, :, None] * u[:, None]
            outs[b, t] = ((S * q[b, t, :, :, None]).sum(-2) * scale).to(v.dtype)
            state = S.to(stored)
        states.append(state.mT if turn else state)
    nothing = v.new_zeros(HV, V)
    rows = [torch.stack([outs.get((b, t), nothing) for t in range(T)]) for b in range(B) if T]
    out = torch.stack(rows) if rows else v
    sizes = (V, K) if turn else (K, V)
    return out, torch.stack(states) if states else v.new_zeros(0, HV, *sizes)


def upstream(x: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Gradients of the outputs, in float64."""
    K, V = x["q"].shape[3], x["v"].shape[3]
    sizes = (K, V) if x["state_layout"] == "kv" else (V, K)
    N = len(x["q"]) if x["cu_seqlens"] is None else len(x["cu_seqlens"]) - 1
    shape = (N, x["v"].shape[2], *sizes)
    return torch.randn(x["v"].shape).double(), torch.randn(shape).double() / 4


RULE = Rule(
    "npu_chunk_kda",
    ("q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias"),
    recurrence,
    upstream,
)


CASES = [
    Case((130,), packed=False),
    Case((70, 70), packed=False, gate=GIVEN, layout="vk", H=1, HV=2, K=16, V=16, fading=0.1),
    Case((64, 1, 0, 63, 100), H=1, HV=2, K=16, V=16, gate=BOUNDED, fading=0.1),
    Case((5, 70), H=1, HV=3, K=64, V=16, state=None, before=3, behind=4, bias=False),
    Case((65,), H=1, HV=1, K=128, V=128, state=torch.bfloat16, layout="vk"),
    Case((33, 64), gate=PLAIN, scale=0.5, norm=False),
    Case((100,), H=1, HV=2, K=24, V=40, fading=30.0),
    Case((70,), H=1, HV=1, K=32, V=256, state=None),
    Case((64, 0, 3, 130), H=1, HV=2, K=32, V=64, behind=70, fading=0.1, strided=True),
    Case((129,), H=1, HV=1, K=64, V=192, state=None, alike=True, gate=GIVEN, fading=0.02),
    Case((1,), gate=GIVEN, norm=False),
    Case((2, 67), H=1, HV=2, K=5, V=3),
    Case((0, 0), H=1, K=16, V=16),
    Case((), H=1, HV=1, K=64, V=64, before=1, behind=3),
    Case((), state=None),
    Case((70, 3), H=1, gate=BOUNDED, K=16, V=16, fading=0.1, behind=2, rates=1),
    Case((66,), packed=False, H=1, K=16, V=16, rates=2),
    Case((130, 130), packed=False, K=128, V=128),
    Case((64, 1, 0, 63, 100), K=128, V=128, before=2, behind=70, gate=BOUNDED),
    Case((70, 3), H=1, HV=1, K=128, V=128, state=None, gate=GIVEN, norm=False, fading=0.02),
    Case((129,), H=1, HV=1, K=128, V=128, fading=30.0, rates=2, layout="vk", strided=True),
]


@every_dtype
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_autograd_of_the_recurrence(case, dtype, device, backend):
    x = RULE.compared(case, dtype, device, backend)
    rounded, want, exact = x.rounded, x.want, x.exact
    apart = RULE.with_leaves(by_token(exact))
    shares = RULE.of_recurrence(apart, torch.float64, x.grads)
    for name, grad in x.got.items():
        if name in ("A_log", "dt_bias"):
            assert_sum_of_tokens(name, grad, rounded[name], want[name], shares[name], dtype)
        elif name == "beta" and dtype in (torch.float16, torch.bfloat16):
            # kernels keep both of its factors in the dtype: R, which is dv / beta, and n, which is
            # v less what is known of it
            R = (want["v"].double() / exact["beta"].double()[..., None]).nan_to_num(0, 0, 0)
            size = float((R.abs() * exact["v"].abs()).sum(-1).max().detach()) if R.numel() else 0.0
            more = size * torch.finfo(dtype).eps
            assert_close_to_float64("d_beta", grad, rounded[name], want[name], beyond=more)
        else:
            assert_close_to_float64(f"d_{name}", grad, rounded[name], want[name])


def by_token(x: dict[str, Any]) -> dict[str, Any]:
    """The same with the gate's parameters of every token apart."""
    tokens = x["g"].shape[:2]
    parameters = {n: x[n] for n in ("A_log", "dt_bias") if x[n] is not None}
    return x | {n: y.expand(*tokens, *y.shape).clone() for n, y in parameters.items()}


def assert_sum_of_tokens(
    name: str, got: Tensor, rounded: Tensor, exact: Tensor, shares: Tensor, dtype: torch.dtype
) -> None:
    """`shares` has what each token adds to `exact`.

    Kernels make a share of up to four numbers that they hold in `dtype`, each off by half a step:
    n or R, a state or Z, M, and both faded rows.  So it is off by two steps of its size, each on
    its own: together, a random walk.  That is measured in the shares, not in their sum, in which
    they may cancel.  In float32 the gate and what leads to these numbers is rounded as well: as
    much again."""
    if got.dtype is torch.float64:
        torch.testing.assert_close(
            got.detach().cpu(), exact.detach().cpu(), msg=f"d_{name} differs"
        )
        return
    got, rounded, exact = (x.detach().double().cpu() for x in (got, rounded, exact))
    steps = 4 if dtype is torch.float32 else 2
    allowed = 2 * (rounded - exact).norm() + steps * torch.finfo(dtype).eps * shares.norm()
    error = (got - exact).norm()
    assert error <= allowed, f"d_{name} is off by {error:.3g}, allowed {allowed:.3g}"


@pytest.mark.parametrize("K,V", [(32, 16), (128, 128)])
@pytest.mark.parametrize("name", EXTREMES)
def test_extreme_decays(name, K, V, device, backend):
    case = Case((130,), packed=False, gate=GIVEN, K=K, V=V)
    drawn = case.arguments()
    decay = EXTREMES[name](torch.arange(130))[None, :, None, None]
    drawn["g"] = decay.expand(drawn["g"].shape).contiguous()
    drawn["g"][..., ::4] = -0.01
    drawn["beta"][:, ::5] = 0.0
    RULE.assert_near(case, drawn, device, 2**-8)


@pytest.mark.parametrize("size", [64, 48, 128])
def test_keys_alike(size, device, backend):
    """No decay, full rate, keys that are nearly one: in powers of the chunk's triangle what
    cancels is 1e17 times as large as its inverse."""
    case, drawn = keys_alike(size)
    RULE.assert_near(case, drawn, device, 2**-5)


def test_equal_runs_give_equal_gradients(device, backend):
    RULE.assert_equal_runs(Case((130, 70), H=2, HV=4), device)
    RULE.assert_equal_runs(Case((130, 70), K=128, V=128), device)


@pytest.mark.parametrize("odd,meant", ODD_BOUNDS)
def test_bounds_beyond_the_tokens_end_with_them(odd, meant, device, backend):
    lengths = tuple(b - a for a, b in pairwise(meant))
    case = Case(lengths, H=1, HV=1, K=16, V=16, before=meant[0], behind=70 - meant[-1], fading=0.1)
    RULE.assert_lengths_end_with_the_tokens(case, "cu_seqlens", odd, device, backend)


@pytest.mark.parametrize("gate", [SOFTPLUS, BOUNDED])
def test_tokens_of_no_sequence_may_hold_anything(gate, device, backend):
    """And get gradients of zero; the gate's parameters none of theirs."""
    case = Case((5, 3), H=1, HV=2, K=16, V=16, before=2, behind=3, gate=gate)
    x = RULE.for_grad(case, device)
    want = RULE.grad(**x)
    for name in ("q", "k", "v", "g", "beta", "d_out"):
        x[name][:, :2] = x[name][:, -3:] = torch.nan
    got = RULE.grad(**x)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    for grad in got[:5]:
        assert not grad[:, :2].any() and not grad[:, -3:].any()


def test_a_bias_in_one_row(device, backend):
    """[HV * K], as a checkpoint has it: its gradient has that shape, and the same numbers."""
    case = Case((40, 3), H=1, HV=2, K=16, V=16)
    x = RULE.with_leaves(case.moved(case.arguments(), torch.float16, device))
    grads = upstream(x)
    want = RULE.gradients(custom.npu_chunk_kda(**x), grads, x)
    x["dt_bias"] = x["dt_bias"].detach().flatten().requires_grad_()
    got = RULE.gradients(custom.npu_chunk_kda(**x), grads, x)
    assert want["dt_bias"].any() and got["dt_bias"].shape == (2 * 16,)
    for name, grad in want.items():
        assert torch.equal(got[name].view_as(grad), grad), name


def test_one_output_is_enough(device, backend):
    case = Case((40, 3), H=1, HV=2, K=16, V=16)
    RULE.assert_one_output_is_enough(case, device)


@pytest.mark.parametrize(
    "case",
    [
        Case((3, 0, 1, 66), H=1, HV=2, K=3, V=2, before=1, behind=2),
        Case((4, 4), packed=False, H=2, HV=2, K=3, V=2, gate=PLAIN, state=None, scale=0.7),
        Case((4,), H=1, HV=2, K=3, V=2, gate=BOUNDED, layout="vk"),
        Case((4,), H=1, HV=2, K=3, V=2, gate=GIVEN, norm=False),
    ],
    ids=str,
)
def test_gradcheck(case):
    RULE.gradcheck(case)


def test_kimi_linear_training(device, backend):
    """Gradients of Hugging Face's chunked form."""
    kimi = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    case = Case((150,), packed=False, K=32, V=16, fading=0.3)
    x = RULE.with_leaves(case.moved(case.arguments(), torch.float16, device))
    wide = RULE.with_leaves({n: y.float() if isinstance(y, Tensor) else y for n, y in x.items()})
    rate = wide["A_log"].exp()[:, None]
    theirs = kimi.chunk_kimi_delta_attention(
        wide["q"],
        wide["k"],
        wide["v"],
        g=-rate * torch.nn.functional.softplus(wide["g"] + wide["dt_bias"]),
        beta=wide["beta"],
        initial_state=wide["initial_state"],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    RULE.assert_trains_as(theirs, wide, x, 3e-3)


@pytest.mark.parametrize(
    "change,error,sentence",
    [
        (dict(d_out=torch.zeros(1, 9, 2, 31)), ValueError, "`d_out` has shape .* V=32"),
        (dict(d_out=torch.zeros(1, 9, 2, 32).half()), TypeError, "`d_out` has dtype"),
        (dict(d_final_state=torch.zeros(2, 2, 32, 32)), ValueError, "`d_final_state` .* N=1"),
        (dict(k=torch.zeros(1, 9, 2, 31)), ValueError, "`k` has shape .* K=32"),
        (dict(v=torch.zeros(1, 9, 3, 32)), ValueError, "3 heads and `q` 2"),
    ],
    ids=by_change,
)
def test_errors(change, error, sentence):
    case = Case((9,))
    good = case.moved(case.arguments(), torch.float32, "cpu") | dict(d_out=torch.zeros(1, 9, 2, 32))
    with pytest.raises(error, match=f"{OP}: .*{sentence}"):
        torch.ops.custom.npu_chunk_kda_grad(**(good | change))
