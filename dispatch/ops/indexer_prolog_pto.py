# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Arguments and outputs of npu_indexer_prolog_pto; its shapes are in the tables below."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..check import Checker
from . import _prolog

SCHEMA = (
    "npu_indexer_prolog_pto(Tensor token_x, Tensor query_norm, Tensor weight_qb,"
    " Tensor weight_k, Tensor weight_proj, Tensor ln_gamma_k, Tensor ln_beta_k,"
    " Tensor rope_sin, Tensor rope_cos, Tensor(a!) index_k_cache, Tensor cache_index, *,"
    ' float ln_epsilon=1e-6, bool rope_interleaved=False, str weight_format="nz")'
    " -> (Tensor, Tensor)"
)
ONNX = "IndexerPrologPto"


def check(
    token_x: Tensor,
    query_norm: Tensor,
    weight_qb: Tensor,
    weight_k: Tensor,
    weight_proj: Tensor,
    ln_gamma_k: Tensor,
    ln_beta_k: Tensor,
    rope_sin: Tensor,
    rope_cos: Tensor,
    index_k_cache: Tensor,
    cache_index: Tensor,
    ln_epsilon: float,
    weight_format: str,
    **_: Any,
) -> None:
    c = Checker("npu_indexer_prolog_pto")
    weights = dict(
        weight_qb=(weight_qb, "Rq Ni*Di"),
        weight_k=(weight_k, "H Di"),
        weight_proj=(weight_proj, "H Ni"),
    )
    floats = dict(
        token_x=(token_x, "B S H"),
        query_norm=(query_norm, "B S Rq"),
        ln_gamma_k=(ln_gamma_k, "Di"),
        ln_beta_k=(ln_beta_k, "Di"),
        rope_sin=(rope_sin, "B S Dr"),
        rope_cos=(rope_cos, "B S Dr"),
        index_k_cache=(index_k_cache, "pages P 1 Di"),
    )
    _prolog.tensors(c, floats, weights, dict(cache_index=(cache_index, "B S")))
    index_sizes(c, "weight_proj", weight_proj)
    _prolog.weights(c, weights, weight_format)
    c.at_least("ln_epsilon", ln_epsilon, 0)
    _prolog.distinct_slots(c, cache_index)


def index_sizes(c: Checker, name: str, weight_proj: Tensor) -> None:
    """The index heads, which the columns of `weight_proj` count, and all their dims."""
    if weight_proj.ndim not in (2, 4):
        c.shape(name, weight_proj, "H Ni")
    c.sizes["Ni"] = _prolog.columns_of(weight_proj)
    c.sizes["Ni*Di"] = c.sizes["Ni"] * c.sizes["Di"]
    c.require(
        c.sizes["Dr"] <= c.sizes["Di"],
        f"the rotary size Dr is {c.sizes['Dr']}, expected at most the index dim "
        f"Di={c.sizes['Di']}.",
    )


def fake(
    token_x: Tensor, weight_proj: Tensor, ln_gamma_k: Tensor, **_: Any
) -> tuple[Tensor, Tensor]:
    batch, rows, _hidden = token_x.shape
    heads = _prolog.columns_of(weight_proj)
    return (
        token_x.new_empty([batch, rows, heads, ln_gamma_k.shape[0]]),
        token_x.new_empty([batch, rows, heads]),
    )
