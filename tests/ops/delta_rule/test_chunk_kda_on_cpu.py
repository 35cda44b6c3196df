# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The Gluon kernel of KDA's chunks on CPU tensors (see test_gluon_on_cpu.py).  test_chunk_kda.py
runs all kernels on a GPU."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from ...support.kernels import INTERPRETED

pytest.importorskip("triton")
if INTERPRETED:
    pytest.skip("the kernels are not those of Gluon", allow_module_level=True)

from custom.cuda_ops.common import approximate, lengths
from custom.cuda_ops.common import kda as gates
from custom.cuda_ops.common.hopper import barriers, tma
from custom.cuda_ops.delta_rule import chunk_kda as plain
from custom.cuda_ops.delta_rule.hopper import chunk_kda, chunks, kda

from ...support.gluon_on_cpu import stand_in
from ...support.kda import BOUNDED, EXTREMES, GIVEN, SOFTPLUS, Case

D, SIDE = 128, 64
ERROR = 5e-3


@pytest.fixture
def here(monkeypatch):
    stand_in(monkeypatch, chunk_kda, chunks, kda, gates, lengths, approximate, barriers, tma)
    monkeypatch.setattr(approximate, "SIMULATED", True)


CASES = [
    Case((130,), packed=False, HV=2, H=1, fading=0.05),
    Case((66, 70), packed=False, H=1, HV=1, gate=GIVEN, fading=0.02, norm=False),
    Case((64, 0, 3, 70), H=1, HV=1, before=2, behind=1, gate=BOUNDED, fading=0.1, rates=2),
    Case((70,), H=1, HV=1, gate=SOFTPLUS, bias=False, scale=0.5, strided=True, fading=0.3),
]


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_chunks(case, backward, here, monkeypatch):
    compare(wide(case), backward, monkeypatch)


@pytest.mark.parametrize("name", EXTREMES)
def test_extreme_decays(name, here, monkeypatch):
    case = wide(Case((130,), packed=False, H=1, HV=2, gate=GIVEN))
    drawn = case.arguments()
    drawn["g"] = EXTREMES[name](torch.arange(130))[None, :, None, None].repeat(1, 1, 2, D)
    # of the second head one channel in the first chunk
    drawn["g"][:, :, 1, 1:] = drawn["g"][:, 64:, 1] = -0.01
    compare(case, False, monkeypatch, drawn)


def wide(case):
    return Case(**vars(case) | dict(K=D, V=D))


def compare(case, backward, monkeypatch, drawn=None):
    """What the kernel leaves, and what float64 does."""
    monkeypatch.setattr(plain.hopper, "supports", lambda *_: True)
    x = case.moved(case.arguments() if drawn is None else drawn, torch.bfloat16, "cpu")
    q, k, v, g, beta = given = [x[name] for name in ("q", "k", "v", "g", "beta")]
    cu, norm, scale = x["cu_seqlens"], case.norm, x["scale"] or D**-0.5
    out = torch.full_like(v, torch.nan)
    made = plain.chunks(
        *given, scale, cu, norm, x["A_log"], x["dt_bias"], x["lower_bound"],
        x["use_gate_in_kernel"], rate_kind(x), None if backward else out,
    )  # fmt: skip
    names = dict(qs="qs", ks="ks", p="p", fades="fades", u="u", w="w")
    if backward:
        names |= dict(u="t", w="kg", rates="rates")
    found = {name: [] for name in names}
    pieces = [(0, q.shape[1])] * len(case.lengths) if cu is None else list(pairwise(cu.tolist()))
    first = 0 if cu is None else -(-case.before // SIDE)
    for n, (start, end) in enumerate(pieces):
        batch = n if cu is None else 0
        for token in range(start, end, SIDE):
            rows = slice(token, min(token + SIDE, end))
            for hv in range(case.HV):
                h = hv // (case.HV // case.H)
                logs = decays(x, g[batch, rows, hv].double(), hv)
                one = [y[batch, rows, i].double() for y, i in ((q, h), (k, h), (v, hv))]
                rate = rates(x, beta[batch, rows, hv].double())
                want = chunk(*one, logs, rate, scale, norm)
                for name, expected in names.items():
                    got = getattr(made, name)[first * case.HV + hv].double()
                    # nothing but zeros behind the last token
                    whole = torch.zeros_like(got)
                    whole[tuple(slice(n) for n in want[expected].shape)] = want[expected]
                    found[name].append((got, whole))
            first += 1
    for name, each in found.items():
        got, want = (torch.stack(both) for both in zip(*each, strict=True))
        assert (got - want).norm() / want.norm().clamp_min(1e-6) < ERROR, name
    if cu is not None and not backward:
        outside = torch.ones(q.shape[1], dtype=torch.bool)
        outside[cu[0] : cu[-1]] = False
        assert (out[0, outside] == 0).all()


def rate_kind(x):
    return plain.gated_delta.kind_of_rate(
        x["beta"], x["use_beta_sigmoid_in_kernel"], x["allow_neg_eigval"]
    )


def decays(x, g, hv):
    """The decay's logarithm."""
    if not x["use_gate_in_kernel"]:
        return g
    if x["dt_bias"] is not None:
        g = g + x["dt_bias"][hv].double()
    speed = 1.0 if x["A_log"] is None else float(x["A_log"][hv].double().exp())
    if x["lower_bound"] is None:
        return -speed * torch.nn.functional.softplus(g)
    return x["lower_bound"] * (speed * g).sigmoid()


def rates(x, beta):
    return (1 + x["allow_neg_eigval"]) * beta.sigmoid() if x["use_beta_sigmoid_in_kernel"] else beta


def chunk(q, k, v, logs, rate, scale, norm):
    """With the letters of chunk_kda."""
    if norm:
        q, k = (y / (y.square().sum(1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
    total = logs.clamp(min=-1e3).cumsum(0)
    fading = (total[:, None] - total[None, :]).clamp(max=0).exp()
    a = torch.einsum("ic,jc,ijc->ij", k, k, fading).tril(-1)
    t = torch.linalg.inv(torch.eye(len(k)) + rate[:, None] * a)
    kg = total.exp() * k
    return dict(
        qs=scale * total.exp() * q,
        ks=(total[-1] - total).exp() * k,
        p=scale * torch.einsum("ic,jc,ijc->ij", q, k, fading).tril(),
        fades=total[-1].exp(),
        u=t @ (rate[:, None] * v),
        w=t @ (rate[:, None] * kg),
        t=-a @ t,
        kg=kg,
        rates=rate,
    )
