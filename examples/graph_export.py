# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""torch.export (and torch.compile): one graph for any batch and length, saved and loaded."""

import tempfile

import torch
from _device import device_and_dtype
from torch.export import Dim

import custom

device, dtype = device_and_dtype(__doc__)


class Select(torch.nn.Module):
    def forward(self, query, key, weights):
        return custom.npu_lightning_indexer(query, key, weights, sparse_count=16)[0]


def inputs(B, S, L, N=8, D=64):
    shapes = (B, S, N, D), (B, L, 1, D), (B, S, N)
    return tuple(torch.randn(shape, device=device, dtype=dtype) for shape in shapes)


model, first, second = Select(), inputs(2, 3, 40), inputs(5, 1, 300)
compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
assert all(torch.equal(compiled(*x), model(*x)) for x in (first, second))
print("compiled: one graph for both shapes")

free = {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}
program = torch.export.export(model, first, dynamic_shapes=(free, free, free))
with tempfile.NamedTemporaryFile(suffix=".pt2") as file:
    torch.export.save(program, file.name)
    loaded = torch.export.load(file.name).module()
assert all(torch.equal(loaded(*x), model(*x)) for x in (inputs(2, 2, 40), inputs(5, 4, 300)))
print("exported, saved, loaded: equal to eager at other sizes")
