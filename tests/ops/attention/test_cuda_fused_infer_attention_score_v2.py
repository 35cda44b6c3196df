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
FULL = [(130, 192), (140, 128)]
DEEP = [(140, 205), (129, 333)]
ABSENT, THERE = [2, -1, 3, -(2**31), 2**33 + 1, 0, 7, -1], [2, 0]


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
        names = ("rows", "softmax", "hopper.tma")
        used = [import_module(f"custom.cuda_ops.common.{name}") for name in names]
        used.append(import_module("custom.cuda_ops.sparse_attention.hopper.mla_consumers"))
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
        (FULL, 16, 64, "BSND", 0, None, "not"),
        (DEEP, 16, 64, "TND", 4, 200, "not"),
        (DEEP, 16, 0, "BSND_NBSD", 3, None, "not"),
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


def test_tiles_in_turn(ran, monkeypatch):
    """More tiles than programs, of few tokens a request."""
    monkeypatch.setattr("custom.cuda_ops.common.gpu.num_sms", lambda device: 2)
    problem = Problem([(20, 150), (3, 70)], 20, 512, 64).rounded_to(torch.float16)
    given = problem.arguments("BSND", DEVICE, torch.float16)
    out, lse = launched(OP, **given, return_softmax_lse=True)
    assert ran == ["not"]
    (got, _), (got_lse, _) = problem.unpacked(out, lse, "BSND")
    want, want_lse = problem.solved(3, None, torch.float64)
    assert_near("out", torch.cat(got), want, 5e-4)
    assert_near("lse", torch.cat(got_lse), want_lse, 1e-5)


def _of_pages(table, queries, heads, page):
    """Of a request whose pages are those of the table, in a cache of three."""
    torch.manual_seed(0)
    cache = torch.randn(3, page, 1, 512).half().to(DEVICE)
    return launched(
        OP,
        query=torch.randn(1, queries, heads, 512).half().to(DEVICE),
        key=cache,
        value=cache,
        num_query_heads=heads,
        num_key_value_heads=1,
        softmax_scale=0.05,
        input_layout="BSND",
        block_table=torch.tensor([table], device=DEVICE),
        actual_seq_kvlen=torch.tensor([len(table) * page], device=DEVICE),
        return_softmax_lse=True,
    )


def _assert_absent(queries, heads, page):
    some, all_ = (_of_pages(table, queries, heads, page) for table in (ABSENT, THERE))
    for x, y in zip(some, all_, strict=True):
        torch.testing.assert_close(x, y, rtol=2e-3, atol=1e-3)


def test_pages_that_are_not_there_are_absent(ran):
    """Inside of whole tiles."""
    _assert_absent(1, 4, 16)
    assert len(ran) == 2


@pytest.mark.parametrize("page", [16, 64, 128])
def test_pages_are_absent_for_many_rows(ran, page):
    """Inside of tiles of keys that all rows see, or a whole one and more."""
    _assert_absent(300, 16, page)
    assert ran == ["not"] * 2
