# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""npu_sparse_attention_pto: the layer.  Rounding may swap positions at the edge of a selection, so
the selection is everything, or decided by ties, which are exact."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..case import Arguments, Case, Inputs
from ..controls import Control
from .mla_prolog_pto import LATENT, PAGE, PLAIN, ROTARY, row_major, weight


def layer(
    lengths: list[int],
    s1: int,
    heads: int,
    count: int,
    *,
    hidden: int = 512,
    rank: int = 256,
    latent: int = LATENT,
    index_heads: int = 64,
    index_size: int = 128,
    rotary: int = ROTARY,
    tied: bool = False,
    **options: Any,
) -> Callable[[Inputs], Arguments]:
    def make(inputs: Inputs) -> Arguments:
        batch = len(lengths)
        reach = max(-(-n // PAGE) for n in lengths) + 1
        total = sum(-(-n // PAGE) for n in lengths) + 2
        order = inputs.permutation(total).tolist()
        table = torch.full((batch, reach), -1)
        slot = torch.full((batch, s1), -1)
        for i, n in enumerate(lengths):
            used = -(-n // PAGE)
            table[i, :used] = torch.tensor([order.pop() for _ in range(used)])
            for j in range(s1):
                p = n - s1 + j
                if p >= 0:
                    slot[i, j] = table[i, p // PAGE] * PAGE + p % PAGE
        caches = [inputs.normal(total, PAGE, 1, size) for size in (latent, rotary, index_size)]
        for cache in caches:
            inputs.forbid(cache, order)
        proj = weight(inputs, hidden, index_heads)
        if tied:  # every score is zero
            proj.zero_()
        return (
            dict(
                x=inputs.normal(batch, s1, hidden),
                w_dq=weight(inputs, hidden, rank),
                w_uq_qr=weight(inputs, rank, heads * (PLAIN + rotary)),
                w_uk=inputs.normal(heads, PLAIN, latent, scale=PLAIN**-0.5),
                w_dkv_kr=weight(inputs, hidden, latent + rotary),
                gamma_cq=inputs.normal(rank),
                gamma_ckv=inputs.normal(latent),
                sin=inputs.normal(batch, s1, rotary, scale=0.5),
                cos=inputs.normal(batch, s1, rotary, scale=0.5),
                cache_index=inputs.ints(slot),
                kv_cache=caches[0],
                kr_cache=caches[1],
                block_table=inputs.ints(table),
                act_seqs=inputs.ints(lengths),
                w_idx_qb=weight(inputs, rank, index_heads * index_size),
                w_idx_k=weight(inputs, hidden, index_size),
                w_idx_proj=proj,
                in_gamma_k=inputs.normal(index_size),
                in_beta_k=inputs.normal(index_size),
                index_k_cache=caches[2],
                sparse_count=count,
            )
            | options
        )

    return make


OP = "npu_sparse_attention_pto"
case = partial(Case, OP, widen=row_major)
CASES = (
    case("everything selected, 16 heads, s1 2", layer([300, 1, 129, 0], 2, 16, 384)),
    case("decided by ties, 128 heads", layer([300, 77], 1, 128, 64, tied=True)),
    case(
        "decided by ties, 8 heads, s1 4, the public kernel's conventions",
        layer(
            [300, 70, 4, 3],
            4,
            8,
            128,
            tied=True,
            softmax_scale=576**-0.5,
            rms_norm_eps=1e-5,
            index_rope_interleaved=True,
        ),
    ),
    case(
        "model sizes, 8 heads",
        layer([2100], 1, 8, 2048, hidden=7168, rank=1536, tied=True),
        cores=(24,),
    ),
    case(
        "two epsilons",
        layer([140, 60], 1, 8, 256, tied=True, rms_norm_eps=0.5, layer_norm_eps=0.05),
    ),
    case(
        "a latent of 64, uneven depth",
        layer([140, 60], 1, 8, 64, hidden=208, latent=64, tied=True),
    ),
    case("no rotary part, 12 heads", layer([140, 60], 2, 12, 256, rotary=0)),
    case("fp16", layer([140, 260], 1, 32, 256), dtype=torch.float16),
)


CONTROLS = (
    Control(
        "attention before the new keys",
        OP[4:],
        "a.sin,\n            a.cos,\n            a.cache_index,",
        "a.sin,\n            a.cos,\n            a.cache_index * 0 - 1,",
        "everything selected, 16 heads, s1 2",
    ),
    Control(
        "the other norm's epsilon",
        OP[4:],
        "weights,\n                a.layer_norm_eps,",
        "weights,\n                a.rms_norm_eps,",
        "two epsilons",
    ),
    Control(
        "scale of the latent",
        OP[4:],
        "a.attended(STAGES, ",
        "a.attended(STAGES._replace(sparse_flash_attention=lambda **b: "
        "STAGES.sparse_flash_attention(**b | dict(scale_value=(a.w_uk.shape[2] + 64) ** -0.5))), ",
        "everything selected, 16 heads, s1 2",
    ),
)
