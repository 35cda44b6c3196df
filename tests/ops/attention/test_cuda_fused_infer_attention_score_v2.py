# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The Hopper kernel of npu_fused_infer_attention_score_v2 against a loop over query tokens: on a
GPU, else on CPU tensors (support/gluon_on_cpu.py)."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch

from ...support.kernels import DEVICE, ON_GPU, skip_unless_gluon_of_hopper
from ...support.latents import Problem
from ...support.stages import assert_near, launched

skip_unless_gluon_of_hopper()

OP = "fused_infer_attention_score_v2"
here, plain = (import_module(f"custom.cuda_ops.attention.{x}{OP}") for x in ("hopper.", ""))
SHORT = [(3, 300), (1, 5), (2, 0), (4, 129), (0, 9), (2, 192)]
LONG = [(2, 1501), (1, 5), (0, 40)]
WIDE = [(130, 20), (9, 130)]
ONE = [(2, 1501)]


@pytest.fixture
def ran(monkeypatch):
    """How every launch spread the keys over its programs."""
    found = []
    launch = here.launch

    def counted(*x, C, **named):
        found.append("evenly" if C.CUT else "in parts" if C.SPLITS > 1 else "not")
        launch(*x, C=C, **named)

    monkeypatch.setattr(here, "launch", counted)
    if not ON_GPU:
        from ...support.gluon_on_cpu import stand_in

        monkeypatch.setattr("custom.cuda_ops.common.gpu.capability", lambda device: (9, 0))
        monkeypatch.setattr("custom.cuda_ops.common.gpu.num_sms", lambda device: 9)
        monkeypatch.setattr("custom.cuda_ops.common.gpu.shared_memory", lambda device: 227 << 10)
        names = ("common.rows", "common.hopper.tma", "sparse_attention.hopper.mla_consumers")
        used = (import_module(f"custom.cuda_ops.{name}") for name in names)
        stand_in(monkeypatch, here, plain, *used)
    return found


@pytest.mark.parametrize(
    ("requests", "heads", "rope", "layout", "mode", "window", "spread"),
    [
        (SHORT, 20, 64, "BSND", 3, None, "evenly"),
        (SHORT, 8, 64, "TND", 4, 70, "evenly"),
        (SHORT, 40, 0, "BSND_NBSD", 0, None, "evenly"),
        (LONG, 16, 64, "TND_NTD", 4, 1200, "evenly"),
        (LONG, 16, 0, "BSND", 3, None, "evenly"),
        (WIDE, 40, 64, "BSND", 3, None, "not"),
        (ONE, 16, 0, "BSND", 3, None, "in parts"),
    ],
)
def test_against_a_loop(ran, requests, heads, rope, layout, mode, window, spread):
    """Tiles of 64 rows with heads of several tokens; whole tiles of keys, and ends of them."""
    problem = Problem(requests, heads, 512, rope, sink=True).rounded_to(torch.float16)
    given = problem.arguments(layout, DEVICE, torch.float16, mode, window)
    out, lse = launched(OP, **given, return_softmax_lse=True)
    assert ran == [spread]
    (got, padding), (got_lse, no_lse) = problem.unpacked(out, lse, layout)
    assert (padding == 0).all() and (no_lse == -torch.inf).all()
    want, want_lse = problem.solved(mode, window, torch.float64)
    assert_near("out", torch.cat(got), want, 5e-4)
    assert_near("lse", torch.cat(got_lse), want_lse, 1e-5)


def test_pages_that_are_not_there_are_absent(ran):
    """Inside of whole tiles."""
    cache = torch.randn(3, 16, 1, 512).half().to(DEVICE)
    query = torch.randn(1, 1, 4, 512).half().to(DEVICE)

    def of(table):
        return launched(
            OP,
            query=query,
            key=cache,
            value=cache,
            num_query_heads=4,
            num_key_value_heads=1,
            softmax_scale=0.05,
            input_layout="BSND",
            block_table=torch.tensor([table], device=DEVICE),
            actual_seq_kvlen=torch.tensor([len(table) * 16], device=DEVICE),
            return_softmax_lse=True,
        )

    some, all_ = of([2, -1, 3, -(2**31), 2**33 + 1, 0, 7, -1]), of([2, 0])
    for x, y in zip(some, all_, strict=True):
        torch.testing.assert_close(x, y, rtol=2e-3, atol=1e-3)
    assert len(ran) == 2
