# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Arguments and outputs of npu_lightning_indexer_prolog_pto, the indexer's prolog of models that
are served in W8A8 with an int8 index cache: custom_pypto's schema, tokens [T, H].

A 4-D weight is NZ, a 2-D one row-major, or in an NPU's own format.
"""

from __future__ import annotations

from typing import Any, TypedDict

import torch
from torch import Tensor

from ...check import Checker
from ...common import nz, quantized
from ..common import prologs, quantization, weight_args
from .indexer_prolog_pto import index_sizes

SCHEMA = (
    "npu_lightning_indexer_prolog_pto(Tensor token_x, Tensor q_norm, Tensor q_norm_scale,"
    " Tensor wq_b, Tensor wq_b_scale, Tensor wk, Tensor weights_proj, Tensor ln_gamma_k,"
    " Tensor ln_beta_k, Tensor cos_idx_rope, Tensor sin_idx_rope, Tensor? hadamard_q,"
    " Tensor? hadamard_k, Tensor(a!) idx_k_cache, Tensor(b!) idx_k_scale_cache,"
    " Tensor idx_k_cache_index, float layernorm_epsilon_k, *,"
    ' str layout_query="TND", str layout_key="PA_BSND") -> (Tensor, Tensor, Tensor)'
)


class Arguments(TypedDict):
    token_x: Tensor
    q_norm: Tensor
    q_norm_scale: Tensor
    wq_b: Tensor
    wq_b_scale: Tensor
    wk: Tensor
    weights_proj: Tensor
    ln_gamma_k: Tensor
    ln_beta_k: Tensor
    cos_idx_rope: Tensor
    sin_idx_rope: Tensor
    hadamard_q: Tensor | None
    hadamard_k: Tensor | None
    idx_k_cache: Tensor
    idx_k_scale_cache: Tensor
    idx_k_cache_index: Tensor
    layernorm_epsilon_k: float
    layout_query: str
    layout_key: str


def check(c: Checker, a: Arguments) -> None:
    q_norm, q_norm_scale, wq_b_scale = a["q_norm"], a["q_norm_scale"], a["wq_b_scale"]
    idx_k_cache, idx_k_scale_cache = a["idx_k_cache"], a["idx_k_scale_cache"]
    c.one_of("layout_query", a["layout_query"], "TND")
    c.one_of("layout_key", a["layout_key"], "PA_BSND")
    dtypes = {"wq_b": torch.int8}
    weights = prologs.table(a, wq_b="Rq Ni*Di", wk="H Di", weights_proj="H Ni")
    floats = prologs.table(
        a,
        token_x="T H",
        q_norm="T Rq",
        ln_gamma_k="Di",
        ln_beta_k="Di",
        cos_idx_rope="T Dr",
        sin_idx_rope="T Dr",
        idx_k_cache=f"pages P 1 {quantized.INDEX}",
        hadamard_q="Di Di",
        hadamard_k="Di Di",
    )
    prologs.tensors(
        c,
        floats,
        weights,
        prologs.table(a, idx_k_cache_index="T"),
        dict(q_norm_scale=q_norm_scale, wq_b_scale=wq_b_scale, idx_k_scale_cache=idx_k_scale_cache),
        {"wq_b", "q_norm", "idx_k_cache"},
    )
    index_sizes(c, "weights_proj", a["weights_proj"], a["wq_b"], "nd")
    weight_args.weights(c, 1, weights, dtypes, {}, "nd")
    c.dtype("q_norm", q_norm, torch.int8)
    c.dtype("idx_k_cache", idx_k_cache, torch.int8)
    for name, tensor, shapes in (
        ("q_norm_scale", q_norm_scale, ("T 1", "T")),
        ("wq_b_scale", wq_b_scale, ("Ni*Di 1", "1 Ni*Di", "Ni*Di")),
    ):
        c.dtype(name, tensor, torch.float32)
        fits = [tuple(c.sizes.get(x, 1) for x in shape.split()) for shape in shapes]
        if tuple(tensor.shape) not in fits:
            c.shape(name, tensor, shapes[0])
    c.dtype("idx_k_scale_cache", idx_k_scale_cache, *quantization.SCALES["int8"])
    c.shape(
        "idx_k_scale_cache",
        idx_k_scale_cache,
        "pages P 1 1" if idx_k_scale_cache.ndim == 4 else "pages P 1",
    )
    c.require(
        c.sizes["Di"] == quantized.INDEX,
        f"the index dim Di is {c.sizes['Di']}, expected {quantized.INDEX}.",
    )
    c.contiguous(
        q_norm=q_norm,
        q_norm_scale=q_norm_scale,
        wq_b_scale=wq_b_scale,
        idx_k_cache=idx_k_cache,
        idx_k_scale_cache=idx_k_scale_cache,
    )
    c.at_least("layernorm_epsilon_k", a["layernorm_epsilon_k"], 0)
    prologs.distinct_slots(c, a["idx_k_cache_index"], "idx_k_cache_index")


def fake(
    token_x: Tensor, weights_proj: Tensor, ln_gamma_k: Tensor, **_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, heads = token_x.shape[0], nz.columns_of(weights_proj, "nd")
    half = torch.float16
    return (
        token_x.new_empty([tokens, heads, ln_gamma_k.shape[0]], dtype=torch.int8),
        token_x.new_empty([tokens, heads, 1], dtype=half),
        token_x.new_empty([tokens, heads], dtype=half),
    )
