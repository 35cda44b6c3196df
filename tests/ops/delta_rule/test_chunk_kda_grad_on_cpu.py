# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The Gluon kernels of KDA's gradient on CPU tensors (see test_gluon_on_cpu.py), each from what the
kernels ahead of it leave.  test_chunk_kda_grad.py runs all of them on a GPU."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from ...support.kernels import INTERPRETED

pytest.importorskip("triton")
if INTERPRETED:
    pytest.skip("the kernels are not those of Gluon", allow_module_level=True)

from custom.cuda_ops.common import approximate, lengths
from custom.cuda_ops.common import kda as pairs
from custom.cuda_ops.common.hopper import barriers, tma
from custom.cuda_ops.delta_rule import chunk_kda
from custom.cuda_ops.delta_rule.hopper import chunk_kda_grad, chunks, kda, kda_walks

from ...support.gluon_on_cpu import stand_in
from ...support.kda import EXTREMES

D, SIDE = 128, 64
ERROR = {torch.bfloat16: 8e-3, torch.float16: 1e-3}


@pytest.fixture
def here(monkeypatch):
    used = chunks, kda, pairs, lengths, approximate, barriers, tma
    stand_in(monkeypatch, kda_walks, chunk_kda_grad, *used)
    monkeypatch.setattr(approximate, "SIMULATED", True)


@pytest.mark.parametrize("states", [True, False])
@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize("bounds", [None, [3, 73], [0, 1, 1, 66]])
def test_walks(bounds, dtype, states, here):
    T, HV = 80, 2
    pieces = [(0, T)] if bounds is None else list(pairwise(bounds))
    before = 0 if bounds is None else -(-bounds[0] // SIDE)
    chunks = [-(-(end - start) // SIDE) for start, end in pieces]
    count = before + sum(chunks) + 1
    x = chunks_of(count, HV, len(pieces), bounds is not None, dtype)
    v, d_out = torch.randn(2, 1, T, HV, D).to(dtype)
    initial, d_final = torch.randn(2, len(pieces), HV, D, D) if states else (None, None)
    n, r = torch.zeros(2, count * HV, SIDE, D, dtype=dtype)
    s, e = torch.zeros(2, count * HV, D, D, dtype=dtype)
    d_initial = torch.empty(len(pieces), HV, D, D)
    cu = None if bounds is None else torch.tensor(bounds, dtype=torch.int32)
    kda_walks.launch(x, v, d_out, cu, initial, d_final, n, r, s, e, d_initial, D, 1)
    for sequence, (start, end) in enumerate(pieces):
        first = before + sum(chunks[:sequence])
        for hv in range(HV):
            mine = [
                (c * HV + hv, start + (c - first) * SIDE)
                for c in range(first, first + chunks[sequence])
            ]
            state = (
                torch.zeros(D, D, dtype=torch.float64)
                if initial is None
                else initial[sequence, hv].double()
            )
            for at, token in mine:
                want, state = forward(x, at, state, rows(v, token, end, hv))
                near(n[at], want["n"], dtype)
                near(s[at].mT, want["state"], dtype)
            grad = (
                torch.zeros(D, D, dtype=torch.float64)
                if d_final is None
                else d_final[sequence, hv].double()
            )
            for at, token in reversed(mine):
                want, grad = backward(x, at, grad, rows(d_out, token, end, hv))
                near(r[at], want["r"], dtype)
                near(e[at].mT, want["grad"], dtype)
            if initial is not None:
                near(d_initial[sequence, hv], grad, dtype)


REACH = {torch.bfloat16: 60.0, torch.float16: 4.0}
DECAYS = {
    "slow": lambda t: torch.full_like(t, -0.01, dtype=torch.float64),
    # beyond the reach of float16 alone
    "fast": lambda t: torch.full_like(t, -1.0, dtype=torch.float64),
    **{name: EXTREMES[name] for name in ("one in 16", "minus infinity")},
}


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize("bounds", [None, [3, 3, 73]])
def test_inputs(bounds, dtype, decay, here):
    T, HV = 80, 2
    pieces = [(0, T)] if bounds is None else list(pairwise(bounds))
    before = 0 if bounds is None else -(-bounds[0] // SIDE)
    chunks = [-(-(end - start) // SIDE) for start, end in pieces]
    count = before + sum(chunks) + (bounds is not None)
    norm = bounds is None
    x = chunks_of(count, HV, len(pieces), bounds is not None, dtype, norm)
    q, k, v, d_out = torch.randn(4, 1, T, HV, D).to(dtype)
    if not norm:
        q, k = (torch.nn.functional.normalize(y.float(), dim=-1).to(dtype) for y in (q, k))
    g = DECAYS[decay](torch.arange(T))[None, :, None, None].expand(1, T, HV, D).float()
    # some parts of the channels within the reach alone, and in others some channels
    g = g.clone()
    g[..., ::4] = g[..., :32] = -0.01
    beta = torch.rand(1, T, HV).to(dtype)
    n, r, states, grads = (
        torch.randn(count * HV, SIDE * (1 + i // 2), D).to(dtype) for i in range(4)
    )
    cu = None if bounds is None else torch.tensor(bounds, dtype=torch.int32)
    for sequence, (start, end) in enumerate(pieces):
        last = before + sum(chunks[: sequence + 1])
        if left := (end - start) % SIDE:
            for tile in (n, r):
                tile[(last - 1) * HV : last * HV, left:] = 0
    got = [torch.full_like(y, torch.nan) for y in (q, k, v, g, beta)]
    none = torch.empty(0, D)
    chunk_kda_grad.launch(
        x, d_out, (q, k, g, beta), None, None, cu, (n, r, states, grads), (*got, none, none),
        (D**-0.5, 0.0), REACH[dtype],
    )  # fmt: skip
    want = [torch.zeros_like(y, dtype=torch.float64) for y in got]
    for sequence, (start, end) in enumerate(pieces):
        for c in range(chunks[sequence]):
            a, b = start + c * SIDE, min(end, start + (c + 1) * SIDE)
            for hv in range(HV):
                at = (before + sum(chunks[:sequence]) + c) * HV + hv
                given = [y[0, a:b, hv].double() for y in (q, k, g, beta, d_out)]
                made = [y[at].double() for y in (n[:, : b - a], r[:, : b - a], states, grads)]
                for one, found in zip(want, gradients(*given, *made, norm), strict=True):
                    one[0, a:b, hv] = found
    for one, found in zip(got, want, strict=True):
        near(one, found, dtype)


def gradients(q, k, g, beta, d_out, n, r, state, grad, norm):
    """Of a chunk and a head, with the letters of chunk_kda_grad."""
    if norm:
        lengths = [(y.square().sum(1, keepdim=True) + 1e-6).sqrt() for y in (q, k)]
        q, k = q / lengths[0], k / lengths[1]
    total, scale = g.clamp(min=-1e3).cumsum(0), D**-0.5
    fading = (total[:, None] - total[None, :]).clamp(max=0).exp()
    z = (scale * d_out @ n.T * beta).tril()[..., None] * fading
    m = (-beta[:, None] * r @ n.T * beta).tril(-1)[..., None] * fading
    by_q = scale * total.exp() * (d_out @ state) + (z * k).sum(1)
    later = -total.exp() * beta[:, None] * (r @ state) + (m * k).sum(1)
    ahead = (total[-1] - total).exp() * (beta[:, None] * n @ grad)
    end = (ahead * k).sum(0) + total[-1].exp() * (state * grad).sum(0)
    earlier = ahead + (z * q[:, None] + m * k[:, None]).sum(0)
    by_g = (q * by_q + k * (later - earlier)).flip(0).cumsum(0).flip(0) + end
    by_k = later + earlier
    if norm:
        by_q, by_k = (
            (y - x * (x * y).sum(1, keepdim=True)) / length
            for x, y, length in zip((q, k), (by_q, by_k), lengths, strict=True)
        )
    return by_q, by_k, beta[:, None] * r, by_g, (r * n).sum(1)


def chunks_of(count, HV, sequences, varlen, dtype, norm=False):
    """What _chunks_kernel leaves, or might."""
    many = count * HV
    qs, ks, kg = (torch.randn(3, many, SIDE, D) / 16).to(dtype)
    p, t = (torch.randn(2, many, SIDE, SIDE).tril(-1) / 16).to(dtype)
    fades, rates = torch.rand(many, D), torch.rand(many, SIDE)
    constants = chunk_kda.Constants(
        H=HV, HV=HV, K=D, V=D, K_PAD=D, V_PAD=D, PIECES=16, VARLEN=varlen,
        NORM=norm, GATE=0, A=False, BIAS=False, BETA=0,
    )  # fmt: skip
    return chunk_kda.Chunks(
        qs=qs, ks=ks, p=p, fades=fades, u=t, w=kg, rates=rates,
        constants=constants, sequences=sequences, count=count,
    )  # fmt: skip


def rows(x, token, end, hv):
    """Of a chunk in float64; zeros behind its sequence."""
    found = torch.zeros(SIDE, D, dtype=torch.float64)
    here = x[0, token : min(token + SIDE, end), hv]
    found[: len(here)] = here
    return found


def forward(x, at, state, v):
    ks, kg, t, fade, rate = (y[at].double() for y in (x.ks, x.w, x.u, x.fades, x.rates))
    n = v - kg @ state
    n = n + t @ (rate[:, None] * n)
    return dict(n=n, state=state), fade[:, None] * state + ks.T @ (rate[:, None] * n)


def backward(x, at, grad, d_out):
    qs, ks, kg, p, t, fade, rate = (
        y[at].double() for y in (x.qs, x.ks, x.w, x.p, x.u, x.fades, x.rates)
    )
    r = p.T @ d_out + ks @ grad
    r = r + t.T @ (rate[:, None] * r)
    behind = fade[:, None] * grad + qs.T @ d_out - kg.T @ (rate[:, None] * r)
    return dict(r=r, grad=grad), behind


def near(got, want, dtype):
    assert (got.double() - want).norm() / want.norm().clamp_min(1e-9) < ERROR[dtype]
