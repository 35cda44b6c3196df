# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The sparse-attention ops exported with every size symbolic, then run at other sizes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from torch.export import Dim

from ..support.ragged import LAYOUTS, Packed
from ..support.samples import sample
from ..support.selected import Problem

CPU = torch.device("cpu")


class _Call(torch.nn.Module):
    def __init__(self, op: str, names: list[str], rest: dict) -> None:
        super().__init__()
        self.op, self.names, self.rest = getattr(torch.ops.custom, op), names, rest

    def forward(self, *tensors):
        return self.op(**dict(zip(self.names, tensors, strict=True)), **self.rest)


def check(op: str, first: dict, second: dict) -> None:
    """Export with the arguments `first`; `second` differ in sizes alone."""
    names = [name for name, value in first.items() if isinstance(value, Tensor)]
    rest = {name: value for name, value in first.items() if name not in names}
    tensors = tuple(first[name] for name in names)
    sizes = tuple(dict.fromkeys(range(tensor.ndim), Dim.AUTO) for tensor in tensors)
    with torch.no_grad():
        program = torch.export.export(
            _Call(op, names, rest), copy.deepcopy(tensors), dynamic_shapes={"tensors": sizes}
        )
        for arguments in (first, second):
            given = tuple(arguments[name] for name in names)
            eager, exported = copy.deepcopy(given), copy.deepcopy(given)
            wanted = _Call(op, names, rest)(*eager)
            got = program.module()(*exported)
            # outputs, and the caches that were written
            torch.testing.assert_close(
                (got, exported), (wanted, eager), rtol=0, atol=0, equal_nan=True
            )


@pytest.mark.parametrize(
    "op",
    [
        "npu_sparse_attention_pto",
        "npu_sparse_attention_indices_pto",
        "npu_sparse_attention_shared_pto",
        "npu_mla_prolog_pto",
        "npu_indexer_prolog_pto",
    ],
)
def test_layer_and_prologs(op):
    first, second = (sample(op, CPU, torch.float32, B=2, S=S) for S in (2, 3))
    check(op, first, second)


def attention(layouts, rows, keys, count) -> dict:
    problem = Problem(rows, keys, count=count)
    packed = Packed(layouts, rows, keys, CPU)
    arguments = problem.arguments(packed, torch.float32)
    return arguments | dict(return_softmax_lse=True)


@pytest.mark.parametrize("layouts", LAYOUTS, ids="-".join)
def test_attention(layouts):
    check(
        "npu_sparse_flash_attention",
        attention(layouts, (3, 2), (40, 20), 6),
        attention(layouts, (1, 4, 2), (9, 70, 3), 8),
    )


def indexer(layouts, rows, keys) -> dict:
    both = attention(layouts, rows, keys, 4)
    return dict(
        query=both["query"],
        key=both["key"],
        weights=both["query"][..., 0].contiguous(),
        actual_seq_lengths_query=both["actual_seq_lengths_query"],
        actual_seq_lengths_key=both["actual_seq_lengths_kv"],
        block_table=both["block_table"],
        layout_query=layouts[0],
        layout_key=layouts[1],
        sparse_count=7,
        return_value=True,
    )


@pytest.mark.parametrize("layouts", LAYOUTS, ids="-".join)
def test_indexer(layouts):
    check(
        "npu_lightning_indexer",
        indexer(layouts, (3, 2), (40, 20)),
        indexer(layouts, (1, 4, 2), (9, 70, 3)),
    )
