# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""npu_sparse_attention_indices_pto: the cases of the layer, where a selection is exact."""

from __future__ import annotations

from functools import partial

import torch

from ..case import Case
from ..controls import Control
from .mla_prolog_pto import row_major
from .sparse_attention_pto import layer, wired

OP = "npu_sparse_attention_indices_pto"
case = partial(Case, OP, widen=row_major)
CASES = (
    case("everything selected, 16 heads, s1 2", layer([300, 1, 129, 0], 2, 16, 384)),
    case("decided by ties, 64 heads", layer([300, 77], 1, 64, 64, tied=True, index_heads=32)),
    case("fp16", layer([140, 260], 1, 32, 256), dtype=torch.float16),
)
CONTROLS = (
    Control(
        "the selection before the new keys",
        "sparse_attention_pto",
        *wired("indexer_prolog", 'cache_index=a["cache_index"] * 0 - 1'),
        "everything selected, 16 heads, s1 2",
    ),
)
