# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What the bench times beside our ops computes the same."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import Tensor

from custom.bench import in_torch
from custom.bench.__main__ import relative_error
from custom.bench.case import in_linear
from custom.bench.indexer_loss import backward_case, loss_case
from custom.bench.sparse_attention import (
    GLM5,
    PRESETS,
    attention_case,
    indexer_case,
    indexer_prolog_case,
    mla_prolog_case,
    prefill_case,
)

CASES = {
    "decode": (partial(attention_case, 2, 2, 16, 1024, 128), in_torch.sparse_attention),
    "prefill": (partial(prefill_case, 100, 8, 512, 64), in_torch.sparse_attention),
    "mla prolog": (partial(mla_prolog_case, 2, 4), in_torch.mla_prolog),
    "mla prolog, GLM-5": (partial(mla_prolog_case, 2, 4, GLM5), in_torch.mla_prolog),
    "indexer prolog, GLM-5": (partial(indexer_prolog_case, 3, GLM5), in_torch.indexer_prolog),
    "indexer prolog": (partial(indexer_prolog_case, 3), in_torch.indexer_prolog),
    "loss": (partial(loss_case, 4, 32, 8, 64, 16), in_torch.loss),
    "loss, lse given": (partial(loss_case, 4, 32, 8, 64, 16, lse=True), in_torch.loss),
    "loss backward": (partial(backward_case, 8, 64, 16), in_torch.loss_backward),
}


def test_the_labels_of_a_preset_differ():
    """They tell the rows of a table, of a figure and of an older table apart."""
    for preset in PRESETS.values():
        labels = [case.label for case in preset(False)]
        assert len(set(labels)) == len(labels)
        assert any(label.startswith("GLM-5, ") for label in labels)


def _caches(arguments):
    return [value for name, value in arguments.items() if name.endswith("cache")]


@pytest.mark.parametrize("name", CASES)
def test_plain_torch_computes_what_the_op_does(name):
    make, function = CASES[name]
    case = make()
    ours = case.make(torch.device("cpu"), 0)
    theirs = copy.deepcopy(ours)
    wanted = case.call(ours)
    got = function(**in_torch.dense(theirs))
    wanted, got = ([x] if isinstance(x, Tensor) else list(x) for x in (wanted, got))
    if case.op == "npu_sparse_flash_attention":
        wanted = wanted[:1]
    assert relative_error(got, wanted) < case.tolerance
    assert relative_error(_caches(theirs), _caches(ours)) < case.tolerance


def test_weights_as_linear_layers_have_them_are_the_same():
    case = CASES["mla prolog"][0]()
    linear = in_linear(case)
    made = linear.make(torch.device("cpu"), 0)
    assert made["weight_dq"].shape == (1536, 7168) and linear.label == f"{case.label}, linear"
    wanted = case.call(case.make(torch.device("cpu"), 0))
    for x, y in zip(linear.call(made), wanted, strict=True):
        assert torch.equal(x, y)


def test_plain_torch_selects_what_the_indexer_does():
    case = indexer_case(2, 1, 1024, 64)
    arguments = case.make(torch.device("cpu"), 0)
    indices, values = case.call(arguments)
    got, positions = in_torch.lightning_indexer(**arguments)
    # near-ties at the edge may go either way: scores of bfloat16 products are coarse
    same = torch.isin(positions.flatten(1)[0], indices.flatten(1)[0]).float().mean()
    assert same > 0.95
    assert relative_error([got.sort().values], [values.float().squeeze(2).sort().values]) < 2e-2


def test_the_cpu_has_no_torch_beside_the_reference():
    case = indexer_case(1, 1, 512, 64)
    arguments = case.make(torch.device("cpu"), 0)
    assert all(prepare(arguments) is None for prepare in case.peers.values())
