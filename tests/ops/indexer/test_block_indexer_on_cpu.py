# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The scores of the Gluon kernel of blocks on CPU tensors (see test_gluon_on_cpu.py).
test_block_indexer.py runs it on a GPU."""

from __future__ import annotations

import pytest
import torch

from ...support.kernels import INTERPRETED

pytest.importorskip("triton")
if INTERPRETED:
    pytest.skip("the kernels are not those of Gluon", allow_module_level=True)

from custom.cuda_ops.common import packed, rows
from custom.cuda_ops.common.hopper import rows as hopper_rows
from custom.cuda_ops.common.hopper import tma
from custom.cuda_ops.indexer import block_indexer as plain
from custom.cuda_ops.indexer.hopper import block_indexer as hopper

from ...support.chosen_blocks import WIDE, Problem
from ...support.gluon_on_cpu import stand_in


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", WIDE)
def test_chosen_blocks(monkeypatch, name, dtype):
    stand_in(monkeypatch, plain, hopper, hopper_rows, packed, rows, tma)
    monkeypatch.setattr(hopper.gpu, "is_hopper", lambda device: True)
    monkeypatch.setattr(plain.topk, "topk", sorted_out)
    monkeypatch.setattr(plain, "_scores", None)  # the plain kernel
    problem = Problem(**WIDE[name])
    given = dict(init_blocks=0, local_blocks=1) | problem.arguments(torch.device("cpu"), dtype)
    index, values = plain.forward(**given)
    wanted, scores = problem.solved()
    assert torch.equal(index, wanted.int())
    assert torch.equal(values.double(), scores)


def sorted_out(scores, lengths, index, values, count):
    """The best of each row, the first of equal ones, in their order."""
    for row, length, to in zip(scores, lengths.tolist(), index, strict=True):
        best = row[:length].sort(descending=True, stable=True)
        chosen = best.indices[:count][best.values[:count] > -torch.inf].sort().values
        to[:] = -1
        to[: len(chosen)] = chosen.int()
