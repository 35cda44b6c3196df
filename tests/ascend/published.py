# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Times that others published for kernels of a known shape on Atlas A2 or A3, beside the estimate
of ours:  tests/ascend/run.sh --estimate published

Their kernels are not these: the distance says where to look, and bounds what the model may claim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from . import models
from .case import Arguments, Inputs
from .models import INDEX, LATENT, ROTARY, Make

HEADS = 64


@dataclass(frozen=True)
class Figure:
    """`us` of AscendC and of Triton; `kernels`: what of our launches it is held against."""

    what: str
    ascendc: float
    triton: float
    source: str
    op: str
    make: Make
    kernels: tuple[str, ...] = ()


def indexer(queries: int, keys: int) -> Make:
    """The last queries of a sequence; without the values of what is chosen."""

    def make(x: Inputs) -> Arguments:
        return dict(
            query=x.normal(1, queries, HEADS, INDEX),
            key=x.normal(1, keys, 1, INDEX),
            weights=x.normal(1, queries, HEADS),
            sparse_count=2048,
            layout_query="BSND",
            layout_key="BSND",
            return_value=False,
        )

    return make


def decode(keys: int, chosen: int) -> Make:
    def make(x: Inputs) -> Arguments:
        return dict(
            query=x.normal(1, 1, HEADS, LATENT),
            key=x.normal(1, keys, 1, LATENT),
            value=None,
            sparse_indices=x.ints(torch.arange(chosen).view(1, 1, 1, chosen)),
            scale_value=0.07,
            query_rope=x.normal(1, 1, HEADS, ROTARY),
            key_rope=x.normal(1, keys, 1, ROTARY),
            layout_query="BSND",
            layout_kv="BSND",
        )

    return make


def states(requests: int) -> Make:
    """One state a request: what two share is read out of the cache."""

    def make(x: Inputs) -> Arguments:
        given = models.DELTA.call([0] * requests, heads=(16, 32))(x)
        pool = given["initial_state_source"]
        return given | dict(
            initial_state_source=x.normal(requests, *pool.shape[1:], dtype=pool.dtype),
            initial_state_indices=x.ints(torch.arange(requests)),
        )

    return make


_INDEXER = "FlagGems-vllm #791"
FIGURES = (
    Figure("indexer, 1 x 8194", 27.4, 22.2, _INDEXER, "npu_lightning_indexer", indexer(1, 8194)),
    Figure(
        "indexer, 256 x 2048", 102.6, 112, _INDEXER, "npu_lightning_indexer", indexer(256, 2048)
    ),
    Figure(
        "indexer, 1024 x 8192", 990, 1087, _INDEXER, "npu_lightning_indexer", indexer(1024, 8192)
    ),
    Figure(
        "top-k of 64K",
        38,
        18,
        "FlagGems #6354",
        "npu_lightning_indexer",
        indexer(1, 65536),
        ("lightning_indexer.topk",),
    ),
    Figure(
        "sparse decode, 64 heads, 640 keys",
        40,
        34,
        "FlagGems-vllm #792",
        "npu_sparse_flash_attention",
        decode(8192, 640),
    ),
    Figure(
        "delta rule, b = 16",
        37.3,
        153.6,
        "vllm-ascend #12869",
        "npu_fused_sigmoid_gating_delta_rule_update",
        states(16),
    ),
)
