# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""npu_lightning_indexer_prolog_pto by the words of npu_indexer_prolog_pto, which gives its queries,
keys and weights before they are transformed and quantized."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def as_pto(a: dict[str, Any], keys: Tensor, slots: Tensor) -> dict[str, Any]:
    """Tokens [T, ..] as one request; keys of the working dtype go to `slots` of `keys`."""
    return dict(
        token_x=a["token_x"][None],
        query_norm=a["q_norm"][None],
        weight_qb=a["wq_b"],
        weight_k=a["wk"],
        weight_proj=a["weights_proj"],
        ln_gamma_k=a["ln_gamma_k"],
        ln_beta_k=a["ln_beta_k"],
        rope_sin=a["sin_idx_rope"][None],
        rope_cos=a["cos_idx_rope"][None],
        index_k_cache=keys,
        cache_index=slots[None],
        ln_epsilon=a["layernorm_epsilon_k"],
        rope_interleaved=True,
        # 2-D weights are what their shape says: torch_npu's have their format beside it
        weight_format="nd",
        index_k_scale_cache=None,
        dequant_scale_q_norm=a["q_norm_scale"].view(-1, 1),
        dequant_scale_w_qb=a["wq_b_scale"].view(1, -1),
        dequant_scale_w_k=None,
        smooth_scales_cq=None,
        weight_quant_mode=1,
        kv_cache_quant_mode=0,
        index_hadamard=False,
        hadamard_round="bf16",
        scale_format="ue8m0",
    )


def transformed(x: Tensor, matrix: Tensor | None) -> Tensor:
    """x [.., 128] times its matrix, rounded to the dtype of x."""
    return x if matrix is None else (x.float() @ matrix.float()).to(x.dtype)


_FORM = dict(kind="int8", scale_format="ue8m0", index_hadamard=False, hadamard_round="bf16")


def of_cache_write(a: dict[str, Any], keys: Tensor) -> dict[str, Any]:
    """The arguments of npu_index_cache_write, of transformed keys [T, Di]."""
    return dict(
        k=keys,
        values=a["idx_k_cache"],
        scales=a["idx_k_scale_cache"].view(a["idx_k_cache"].shape[:3]),
        slots=a["idx_k_cache_index"],
        **_FORM,
    )


def of_query(query: Tensor, weights: Tensor) -> dict[str, Any]:
    """Those of npu_quantize_index_query, of transformed queries."""
    return dict(q=query, weights=weights, fold=False, **_FORM)


def scaled(weights: Tensor, size: int) -> Tensor:
    """Head weights [T, N] with the factors of the scores, in float16."""
    out: Tensor = weights.float() * weights.shape[-1] ** -0.5 * size**-0.5
    return out.to(torch.float16)
