# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Kimi delta attention over whole sequences, against a loop over scalars and Kimi-Linear's own
chunked form."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from custom.dispatch.reference.delta_rule import chunk_kda as reference
from torch import Tensor

import custom

from ...support.calls import by_change
from ...support.chunked import Chunked, each
from ...support.kda import BOUNDED, EXTREMES, GIVEN, ODD_BOUNDS, PLAIN, SOFTPLUS, Case, keys_alike

OP = "npu_chunk_kda"
pytestmark = pytest.mark.usefixtures("one_thread")


CASES = [
    Case((130,), packed=False),
    Case((70, 70), packed=False, gate=GIVEN, layout="vk", HV=4, fading=0.1),
    Case((64, 1, 0, 63, 100), gate=BOUNDED, fading=0.1),
    Case((5, 70), H=1, HV=3, K=64, V=16, state=None, before=3, behind=4, bias=False),
    Case((65,), H=1, HV=1, K=128, V=128, state=torch.bfloat16, layout="vk"),
    Case((33, 64), gate=PLAIN, scale=0.5, norm=False),
    Case((100,), H=1, HV=2, K=24, V=40, fading=30.0),
    Case((64, 0, 3, 130), H=1, HV=2, K=128, V=64, behind=70, fading=0.1, strided=True),
    Case((129,), H=1, HV=1, K=64, V=192, state=None, alike=True, gate=GIVEN, fading=0.02),
    Case((10, 70), K=16, V=16, state=torch.bfloat16, gate=GIVEN, fading=30.0, norm=False),
    Case((70,), packed=False, H=1, K=16, V=16, gate=BOUNDED, layout="vk", fading=0.1),
    Case((), H=1, HV=1, K=128, V=64, before=1, behind=3),
    Case((), state=None, gate=GIVEN),
    Case((), packed=False, state=None),
    Case((0, 0), packed=False),
    Case((70, 3), H=1, gate=BOUNDED, fading=0.1, behind=2, rates=1),
    Case((66,), packed=False, H=1, K=16, V=16, rates=2),
]


@each(CASES)
def test_equals_the_recurrence(case, dtype, device, backend):
    RULE.assert_equals_the_recurrence(case, case.arguments(), dtype, device, backend)


def in_dtype(x: dict[str, Any], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The recurrence run in `dtype`: the state is rounded to it after every token."""
    if dtype is torch.float32 or x["v"].numel() == 0:
        return reference.forward(**x)
    B, T = x["v"].shape[:2]
    names = ("q", "k", "v", "g", "beta")
    sizes = x["k"].shape[3], x["v"].shape[3]
    shape = (1, x["v"].shape[2], *(sizes if x["state_layout"] == "kv" else sizes[::-1]))
    out, states = torch.zeros_like(x["v"]), []
    if x["cu_seqlens"] is None:
        ranges = [(b, 0, T) for b in range(B)]
    else:
        bounds = x["cu_seqlens"].tolist()
        ranges = [(0, *pair) for pair in pairwise(bounds)]
    for n, (b, start, end) in enumerate(ranges):
        state = torch.zeros(shape, dtype=dtype)
        if x["initial_state"] is not None:
            state = x["initial_state"][n : n + 1].to(dtype)
        for t in range(start, end):
            token = {name: x[name][b : b + 1, t : t + 1] for name in names}
            one, state = reference.forward(
                **(x | token | dict(initial_state=state, cu_seqlens=None))
            )
            out[b, t] = one[0, 0]
        states.append(state)
    return out, torch.cat(states) if states else torch.zeros(0, *shape[1:])


RULE = Chunked(OP, reference.forward, in_dtype)


def scalar_loop(x: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """fla's naive recurrence, and its gate, number by number, in Python's floats."""
    B, T, H, K = x["q"].shape
    HV, V = x["v"].shape[2:]
    given = {name: y.tolist() for name, y in x.items() if isinstance(y, Tensor)}
    spans = [(b, 0, T) for b in range(B)]
    if "cu_seqlens" in given:
        spans = [(0, first, last) for first, last in pairwise(given["cu_seqlens"])]
    scale = K**-0.5 if x["scale"] is None else x["scale"]
    turned = x["state_layout"] == "vk"
    outs = [[[[0.0] * V for _ in range(HV)] for _ in range(T)] for _ in range(B)]
    states = []
    for n, (b, first, last) in enumerate(spans):
        states.append([])
        for hv in range(HV):
            h = hv // (HV // H)
            S = [[0.0] * V for _ in range(K)]
            if "initial_state" in given:
                S = given["initial_state"][n][hv]
                S = [list(row) for row in (zip(*S, strict=True) if turned else S)]
            for t in range(first, last):
                q, k = (list(given[name][b][t][h]) for name in "qk")
                if x["use_qk_l2norm_in_kernel"]:
                    q, k = (
                        [e / math.sqrt(sum(f * f for f in y) + 1e-6) for e in y] for y in (q, k)
                    )
                for c in range(K):
                    g = given["g"][b][t][hv][c]
                    if x["use_gate_in_kernel"]:
                        y = g + given["dt_bias"][hv][c] if "dt_bias" in given else g
                        speed = math.exp(given["A_log"][hv]) if "A_log" in given else 1.0
                        if x["lower_bound"] is None:
                            g = -speed * math.log1p(math.exp(y))
                        else:
                            g = x["lower_bound"] / (1 + math.exp(-speed * y))
                    S[c] = [e * math.exp(g) for e in S[c]]
                rate = given["beta"][b][t][hv]
                if x["use_beta_sigmoid_in_kernel"]:
                    rate = (1 + x["allow_neg_eigval"]) / (1 + math.exp(-rate))
                for e in range(V):
                    seen = sum(k[c] * S[c][e] for c in range(K))
                    u = rate * (given["v"][b][t][hv][e] - seen)
                    for c in range(K):
                        S[c][e] += k[c] * u
                outs[b][t][hv] = [sum(q[c] * S[c][e] for c in range(K)) * scale for e in range(V)]
            states[n].append([list(row) for row in zip(*S, strict=True)] if turned else S)
    double = dict(dtype=torch.float64)
    return torch.tensor(outs, **double), torch.tensor(states, **double)


@pytest.mark.parametrize("norm", [True, False], ids=["norm", "no norm"])
@pytest.mark.parametrize("layout", ["kv", "vk"])
@pytest.mark.parametrize("gate", [GIVEN, SOFTPLUS, BOUNDED, PLAIN])
@pytest.mark.parametrize(
    "case",
    [
        Case((5, 5), packed=False, H=2, HV=4),
        Case((3, 0, 1, 6), H=1, HV=2, before=2, behind=1),
        Case((4, 2), H=1, HV=3, state=None, bias=False, scale=0.7, rates=1),
        Case((2, 3), H=1, rates=2),
    ],
    ids=str,
)
def test_the_reference_equals_a_loop_over_scalars(case, gate, layout, norm):
    case = replace(case, K=3, V=2, gate=gate, layout=layout, norm=norm)
    x = case.arguments()
    for got, want in zip(reference.forward(**x), scalar_loop(x), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", EXTREMES)
def test_extreme_decays(name, dtype, device, backend):
    """Where the naive form of a chunk multiplies with exp(1e4), and divides 0 by 0."""
    case = Case((130,), packed=False, gate=GIVEN, K=32, V=16)
    drawn = case.arguments()
    decay = EXTREMES[name](torch.arange(130))[None, :, None, None]
    drawn["g"] = decay.expand(drawn["g"].shape).contiguous()
    # channels on their own
    drawn["g"][..., ::4] = -0.01
    RULE.assert_equals_the_recurrence(case, drawn, dtype, device, backend)


@pytest.mark.parametrize("size", [64, 48])
def test_keys_alike(size, device, backend):
    """No decay, full rate, keys that are nearly one: the chunk's triangle is nearly all ones, and
    in powers of it what cancels is 1e17 times as large as its inverse."""
    case, drawn = keys_alike(size)
    # roundings to float16, 2**-11 each, of what is larger than the rest
    RULE.assert_near(case, drawn, device, 2**-6)


@pytest.mark.parametrize("odd,meant", ODD_BOUNDS)
def test_bounds_beyond_the_tokens_end_with_them(odd, meant, device, backend):
    lengths = tuple(b - a for a, b in pairwise(meant))
    case = Case(lengths, H=1, HV=1, before=meant[0], behind=70 - meant[-1], fading=0.1)
    RULE.assert_lengths_end_with_the_tokens(case, "cu_seqlens", odd, device, backend)


def test_one_decay_for_all_channels_is_the_gated_delta_rule(device, backend):
    case = Case((70, 40), gate=GIVEN, norm=False, layout="vk")
    x = case.moved(case.arguments(), torch.float16, device)
    decay = x["g"][..., :1]
    out, state = custom.npu_chunk_kda(**(x | dict(g=decay.expand(x["g"].shape).contiguous())))
    want, last = custom.npu_chunk_gated_delta_rule(
        *(x[name][0] for name in "qkv"),
        beta=x["beta"][0],
        initial_state=x["initial_state"],
        actual_seq_lengths=x["cu_seqlens"].diff(),
        g=decay[0, ..., 0].contiguous(),
    )
    torch.testing.assert_close(out[0], want, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(state, last, rtol=2e-3, atol=2e-3)


def test_kimi_linear_chunks(device, backend):
    """Hugging Face's chunked form, with its forget gate and norms."""
    kimi = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    case = Case((150, 150), packed=False, K=32, V=16, fading=0.3)
    x = case.moved(case.arguments(), torch.float16, device)
    out, state = custom.npu_chunk_kda(**x)
    wide = {n: y.float() if isinstance(y, Tensor) else y for n, y in x.items()}
    g = -wide["A_log"].exp()[:, None] * torch.nn.functional.softplus(wide["g"] + wide["dt_bias"])
    want, last = kimi.chunk_kimi_delta_attention(
        wide["q"],
        wide["k"],
        wide["v"],
        g=g,
        beta=wide["beta"],
        initial_state=wide["initial_state"],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    torch.testing.assert_close(out.float(), want, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(state, last, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("layout", ["kv", "vk"])
@pytest.mark.parametrize("gate", [SOFTPLUS, BOUNDED])
def test_prompt_then_decode(gate, layout, device, backend):
    """The final state of a prompt is the decode's initial one, in its own layout, and its gate."""
    T, half = 40, 20
    case = Case((T,), packed=False, gate=gate, layout=layout, state=None)
    x = case.moved(case.arguments(), torch.float16, device)
    b = torch.randn(1, T, case.HV).to(device)
    x["beta"] = b.sigmoid()
    out, state = custom.npu_chunk_kda(**x)
    tokens = ("q", "k", "v", "g", "beta")
    _, pool = custom.npu_chunk_kda(**(x | {name: x[name][:, :half] for name in tokens}))
    q, k, v, a = (x[name][:, half:] for name in tokens[:4])
    o = custom.npu_fused_sigmoid_gating_delta_rule_update(
        x["A_log"],
        a,
        x["dt_bias"],
        1.0,
        20.0,
        q,
        k,
        v,
        b[:, half:],
        pool,
        torch.tensor([0], device=device),
        use_qk_l2norm_in_kernel=True,
        state_layout=layout,
        is_kda=True,
        lower_bound=x["lower_bound"],
    )
    torch.testing.assert_close(o, out[:, half:], rtol=4e-3, atol=4e-3)
    torch.testing.assert_close(pool, state, rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize(
    "change,error,sentence",
    [
        (dict(k=torch.zeros(1, 9, 2, 31)), ValueError, "`k` has shape .* K=32"),
        (dict(v=torch.zeros(1, 9, 3, 32)), ValueError, "3 heads and `q` 2"),
        (dict(g=torch.zeros(1, 9, 2)), ValueError, "`g` has shape"),
        (dict(beta=torch.zeros(1, 9, 2, dtype=torch.int32)), TypeError, "`beta` is int32"),
        (dict(initial_state=torch.zeros(2, 2, 32, 32)), ValueError, "`initial_state` .* N=1"),
        (dict(cu_seqlens=torch.zeros(1)), TypeError, "`cu_seqlens` is float32"),
        (dict(use_gate_in_kernel=False), ValueError, "`A_log` is given, .*use_gate_in_kernel"),
        (dict(A_log=None), ValueError, "`A_log` is None, .*`lower_bound`"),
        (dict(lower_bound=0.5), ValueError, "`lower_bound` is 0.5, expected a negative"),
        (dict(allow_neg_eigval=True), ValueError, "`allow_neg_eigval` is True and `use_beta_sig"),
        (dict(dt_bias=torch.zeros(3)), ValueError, r"`dt_bias` .* HV\*K=64"),
    ],
    ids=by_change,
)
def test_errors(change, error, sentence):
    RULE.assert_refuses(Case((9,)), change, error, sentence)
