# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""tests.tools.sanitize knows every kernel and has arguments for every op; no GPU is needed."""

from __future__ import annotations

import pytest
import torch
from custom.dispatch.registry import BY_NAME

pytest.importorskip("triton")

from . import sanitize


def test_every_kernel_is_known():
    """Those that are launched through another function too; parts of kernels are none."""
    names = [name for name, _ in sanitize._kernels()]
    assert len(names) == len(set(names)) > 70
    for name in (
        "indexer.hopper.lightning_indexer._scores_shared",
        "sparse_attention.hopper.sparse_flash_attention_decode._attend",
        "sparse_attention.sparse_flash_attention._attend",
        "merging.merge_states._merge",
    ):
        assert name in names
    assert (
        "common.scatter.add" not in names
        and "attention.hopper.fused_attention.keys_of" not in names
    )


@pytest.mark.parametrize("op", sanitize.WIDER)
def test_what_is_wider_can_be_made(op):
    assert op in BY_NAME
    for case in sanitize.WIDER[op]:
        assert case.op == op and case.make(torch.device("cpu"), 0)
