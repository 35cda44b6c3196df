# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""npu_sparse_attention_indices_pto: the cases of the layer, where a selection is exact; and one
decided by scores, where near-ties may go either way."""

from __future__ import annotations

from functools import partial

import torch

from ..case import Arguments, Case, Finding, judge
from ..controls import Control
from .mla_prolog_pto import row_major
from .sparse_attention_pto import layer

OP = "npu_sparse_attention_indices_pto"
case = partial(Case, OP, widen=row_major)


def judge_selection(
    case: Case, got: Arguments, exact: Arguments, rounded: Arguments
) -> list[Finding]:
    """Of the positions one in 16 may be another one, and the output follows from them."""
    chosen = "output 1"
    mine, theirs = got[chosen].flatten(0, -2), exact[chosen].flatten(0, -2)
    other = sum(
        int((~torch.isin(a, b)).sum()) for a, b in zip(mine, theirs.to(mine.dtype), strict=True)
    )
    caches = {name: value for name, value in got.items() if not name.startswith("output")}
    found = judge(case, caches, exact, rounded)
    return [*found, (16 * other / mine.numel(), f"{other} of {mine.numel()} positions differ")]


CASES = (
    case("everything selected, 16 heads, s1 2", layer([300, 1, 129, 0], 2, 16, 384)),
    case("decided by ties, 64 heads", layer([300, 77], 1, 64, 64, tied=True, index_heads=32)),
    case("decided by scores", layer([300, 400], 2, 16, 64), judge=judge_selection),
    case(
        "decided by scores, 128 index heads",
        layer([300, 200], 1, 8, 64, index_heads=128),
        judge=judge_selection,
    ),
    case("fp16", layer([140, 260], 1, 32, 256), dtype=torch.float16),
)
CONTROLS = (
    Control(
        "the other query's rotation",
        "sparse_attention_pto",
        "absorption.Index(query_index, a.index_rope_interleaved)",
        "absorption.Index(query_index, a.rope_interleaved)",
        "decided by scores",
    ),
    Control(
        "the selection before the new keys",
        "sparse_attention_pto",
        "a.sin,\n            a.cos,\n            a.cache_index,",
        "a.sin,\n            a.cos,\n            a.cache_index * 0 - 1,",
        "everything selected, 16 heads, s1 2",
    ),
)
