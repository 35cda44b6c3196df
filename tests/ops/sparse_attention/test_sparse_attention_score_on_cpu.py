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
from custom.cuda_ops.common.hopper import rows as hopper_rows
from custom.cuda_ops.sparse_attention import sparse_attention_score as plain
from custom.cuda_ops.sparse_attention.hopper import sparse_attention_score as hopper

from ...support.accuracy import assert_close_to_float64
from ...support.blocks import WIDE, Problem
from ...support.gluon_on_cpu import stand_in

UNUSED = dict(q_dequant_scale=None, k_dequant_scale=None, v_dequant_scale=None, inner_precise=0)


@pytest.mark.parametrize("splits, dtype", [(1, torch.float16), (4, torch.bfloat16)])
@pytest.mark.parametrize("name", WIDE)
def test_numbers(monkeypatch, name, dtype, splits):
    stand_in(monkeypatch, combine, hopper, hopper_rows, packed, rows, softmax)
    monkeypatch.setattr(hopper, "supports", lambda *_: True)
    cut = plain.hopper_tiles
    monkeypatch.setattr(plain, "hopper_tiles", lambda *x: replace(cut(*x), splits=splits))
    problem = Problem(**(dict(size=128) | WIDE[name])).rounded_to(dtype)
    arguments = problem.arguments(torch.device("cpu"), dtype)
    arguments.setdefault("select_num_idx", None)
    out, lse = plain.forward(**arguments, **UNUSED, return_softmax_lse=True)
    want, exact = problem.solved(dtype), problem.solved()
    assert_close_to_float64("out", out, want[0], exact[0])
    assert_close_to_float64("lse", lse, want[1], exact[1])
    assert (out[exact[1] == -torch.inf] == 0).all()
