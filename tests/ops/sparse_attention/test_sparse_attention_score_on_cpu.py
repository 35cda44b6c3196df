# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The Gluon kernel of attention to blocks on CPU tensors (see test_gluon_on_cpu.py).
test_sparse_attention_score.py runs it on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ...support.kernels import INTERPRETED

pytest.importorskip("triton")
if INTERPRETED:
    pytest.skip("the kernels are not those of Gluon", allow_module_level=True)

from custom.cuda_ops.common import combine, packed, rows, softmax
from custom.cuda_ops.sparse_attention import sparse_attention_score as plain
from custom.cuda_ops.sparse_attention.hopper import sparse_attention_score as hopper

from ...support.accuracy import assert_close_to_float64
from ...support.blocks import Problem
from ...support.gluon_on_cpu import stand_in

UNUSED = dict(q_dequant_scale=None, k_dequant_scale=None, v_dequant_scale=None, inner_precise=0)
CASES = {
    "page of a tile": dict(rows=(3, 1), lengths=(150, 70), heads=16, block=64, page=64),
    "blocks of 4, 12 heads": dict(
        rows=(2, 0, 1), lengths=(90, 3, 70), heads=24, block=4, page=16, chosen=40, own=False
    ),
    "blocks above the page": dict(rows=(2,), lengths=(200,), block=48, page=16, sinks=True),
    "counts": dict(rows=(2, 3), lengths=(90, 300), block=16, page=32, chosen=9, counts=True),
    "256": dict(rows=(1, 1), lengths=(90, 20), size=256, block=16, page=32, sinks=True),
    "64": dict(rows=(2, 1), lengths=(40, 70), heads=66, size=64, block=12, page=32),
    "80 heads on one": dict(rows=(1, 1), lengths=(40, 70), heads=80, shared=1, size=64),
}


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_numbers(monkeypatch, name, dtype, splits):
    stand_in(monkeypatch, hopper, packed, rows, softmax)
    stand_in(monkeypatch, combine)
    monkeypatch.setattr(hopper, "supports", lambda *_: True)
    cut = hopper.tiles
    monkeypatch.setattr(hopper, "tiles", lambda *x: replace(cut(*x), splits=splits))
    problem = Problem(**(dict(heads=8, size=128) | CASES[name])).rounded_to(dtype)
    arguments = problem.arguments(torch.device("cpu"), dtype)
    arguments.setdefault("select_num_idx", None)
    out, lse = plain.forward(**arguments, **UNUSED, return_softmax_lse=True)
    want, exact = problem.solved(dtype), problem.solved()
    assert_close_to_float64("out", out, want[0], exact[0])
    assert_close_to_float64("lse", lse, want[1], exact[1])
    assert (out[exact[1] == -torch.inf] == 0).all()
