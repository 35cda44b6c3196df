# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""npu_sparse_attention_shared_pto: given positions, also absent and unseen ones, in any order."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..case import Arguments, Case, Inputs
from ..controls import Control
from .mla_prolog_pto import row_major
from .sparse_attention_pto import layer


def shared(
    lengths: list[int], s1: int, heads: int, count: int, **sizes: Any
) -> Callable[[Inputs], Arguments]:
    def make(inputs: Inputs) -> Arguments:
        whole = layer(lengths, s1, heads, count, **sizes)(inputs)
        names = ("w_idx_qb", "w_idx_k", "w_idx_proj", "in_gamma_k", "in_beta_k", "index_k_cache")
        rest = {n: v for n, v in whole.items() if n not in (*names, "sparse_count")}
        chosen = torch.full((len(lengths), s1, 1, count), -1)
        for i, length in enumerate(lengths):
            for j in range(s1):
                some = inputs.permutation(length)[: count - 1]
                chosen[i, j, 0, : len(some)] = some
                chosen[i, j, 0, -1] = length  # one past the last token
        return rest | dict(sparse_indices=inputs.ints(chosen))

    return make


OP = "npu_sparse_attention_shared_pto"
case = partial(Case, OP, widen=row_major)
CASES = (
    case("16 heads, s1 2, fewer keys than entries", shared([300, 1, 129, 0], 2, 16, 384)),
    case("64 heads, 64 of 300", shared([300, 77], 1, 64, 64)),
    case("8 heads, s1 4", shared([300, 70, 4, 3], 4, 8, 128)),
    case("GLM-5's sizes, 8 heads", shared([2100], 1, 8, 2048, hidden=6144, rank=2048), cores=(24,)),
    case("fp16", shared([140, 260], 1, 32, 256), dtype=torch.float16),
)


def wired(stage: str, changes: str) -> tuple[str, str]:
    """The launcher's text, and one in which the stage takes other arguments."""
    wrong = f"lambda **a: STAGES.{stage}(**a | dict({changes}))"
    call = "Shared(**arguments).run("
    return f"{call}STAGES)", f"{call}STAGES._replace({stage}={wrong}))"


CONTROLS = (
    Control(
        "attention before the new keys",
        "sparse_attention_pto",
        *wired("mla_prolog", 'cache_index=a["cache_index"] * 0 - 1'),
        "16 heads, s1 2, fewer keys than entries",
    ),
    Control(
        "scale of the latent",
        "sparse_attention_pto",
        *wired(
            "sparse_flash_attention",
            'scale_value=(a["query"].shape[-1] + a["query_rope"].shape[-1]) ** -0.5',
        ),
        "16 heads, s1 2, fewer keys than entries",
    ),
)
