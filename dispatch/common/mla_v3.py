# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""npu_mla_prolog_v3 by the words of npu_mla_prolog_pto, which every backend has: what one takes of
the other, and its five outputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import memory

# of CANN's operator, and fixed: the check says to what
ONLY = (
    "quant_scale_ckv",
    "quant_scale_ckr",
    "actual_seq_len",
    "cache_mode",
    "query_norm_flag",
    "qc_qr_scale",
    "kc_scale",
    "token_x_dtype",
    "weight_dq_dtype",
    "weight_uq_qr_dtype",
    "weight_dkv_kr_dtype",
)
_BY_TOKEN = ("token_x", "rope_sin", "rope_cos", "cache_index")


def as_pto(arguments: dict[str, Any]) -> dict[str, Any]:
    """Tokens [T, ..] as one request of T."""
    given = {name: value for name, value in arguments.items() if name not in ONLY}
    if given["token_x"].ndim == 2:
        given |= {name: given[name][None] for name in _BY_TOKEN}
    # 2-D weights are what their shape says: torch_npu's have their format beside it
    return given | dict(
        rope_interleaved=True,
        weight_format="nd",
        row_layout="nope_rope_scale",
        scale_format="ue8m0",
    )


def outputs(
    arguments: dict[str, Any], given: tuple[Tensor, Tensor, Tensor, Any]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`given`: the outputs of npu_mla_prolog_pto, and behind them the query norm as its product
    takes it, values and their scale."""
    query, query_rope, _, norm = given
    values, scale = norm.values, norm.scale
    tokens = arguments["token_x"].shape[:-1]
    none = memory.empty((0,), torch.float32, query.device)
    if not arguments["query_norm_flag"]:
        values, scale = memory.empty((0,), values.dtype, query.device), None
    else:
        values = values.view(*tokens, values.shape[-1])
    return (
        query.view(*tokens, *query.shape[-2:]),
        query_rope.view(*tokens, *query_rope.shape[-2:]),
        none,
        values,
        memory.empty((0,), torch.float32, query.device) if scale is None else scale,
    )
