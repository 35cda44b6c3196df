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

from custom.cuda_ops.common.hopper import tma
from custom.cuda_ops.delta_rule import chunk_kda
from custom.cuda_ops.delta_rule.hopper import kda_walks

from ...support.gluon_on_cpu import stand_in

D, SIDE = 128, 64
ERROR = {torch.bfloat16: 8e-3, torch.float16: 1e-3}


@pytest.fixture
def here(monkeypatch):
    stand_in(monkeypatch, kda_walks, tma)


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


def chunks_of(count, HV, sequences, varlen, dtype):
    """What _chunks_kernel leaves, or might."""
    many = count * HV
    qs, ks, kg = (torch.randn(3, many, SIDE, D) / 16).to(dtype)
    p, t = (torch.randn(2, many, SIDE, SIDE).tril(-1) / 16).to(dtype)
    fades, rates = torch.rand(many, D), torch.rand(many, SIDE)
    constants = chunk_kda.Constants(
        H=HV, HV=HV, K=D, V=D, K_PAD=D, V_PAD=D, PIECES=16, VARLEN=varlen,
        NORM=False, GATE=0, A=False, BIAS=False, BETA=0,
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
