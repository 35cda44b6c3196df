# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Stands for vLLM's compiled extension: what its Python asks of it for the parts of h200.py."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_library = torch.library.Library("_C", "FRAGMENT")


def _silu_and_mul(out: Tensor, x: Tensor) -> None:
    gate, up = x.chunk(2, -1)
    torch.mul(F.silu(gate), up, out=out)


def _fused_a_gemm(out: Tensor, a: Tensor, b: Tensor, pdl: bool) -> None:
    torch.mm(a, b, out=out)


def _vocab_parallel_embedding(
    out: Tensor,
    ids: Tensor,
    weight: Tensor,
    first: int,
    last: int,
    padding: int,
    first_added: int,
    last_added: int,
) -> None:
    """Of a rank's own rows; zeros for the others'."""
    own, added = [
        (ids >= begin) & (ids < end) for begin, end in ((first, last), (first_added, last_added))
    ]
    row = torch.where(added, ids - first_added + last - first + padding, ids - first)
    mine = own | added
    out.copy_(weight[row.long() * mine] * mine[:, None])


for _schema, _function in (
    ("cutlass_scaled_mm_supports_fp8(int c) -> bool", lambda c: False),
    ("cutlass_scaled_mm_supports_block_fp8(int c) -> bool", lambda c: False),
    ("silu_and_mul(Tensor(a!) out, Tensor x) -> ()", _silu_and_mul),
    ("dsv3_fused_a_gemm(Tensor(a!) out, Tensor a, Tensor b, bool pdl) -> ()", _fused_a_gemm),
    (
        "vocab_parallel_embedding(Tensor(a!) out, Tensor ids, Tensor weight, int first, int last,"
        " int padding, int first_added, int last_added) -> ()",
        _vocab_parallel_embedding,
    ),
    # which keeps it alive, for that matter
    ("weak_ref_tensor(Tensor(a) x) -> Tensor(a)", lambda x: x),
):
    _library.define(_schema)
    _library.impl(_schema.split("(")[0], _function, "CompositeExplicitAutograd")

# what vLLM's compiler passes name when they are imported, and nothing here calls
for _name in (
    "dynamic_per_token_scaled_fp8_quant",
    "dynamic_scaled_fp8_quant",
    "fused_add_rms_norm",
    "fused_add_rms_norm_static_fp8_quant",
    "fused_qk_norm_rope",
    "rms_norm_dynamic_per_token_quant",
    "rms_norm_static_fp8_quant",
    "rotary_embedding",
    "silu_and_mul_per_block_quant",
    "silu_and_mul_quant",
    "static_scaled_fp8_quant",
):
    _library.define(f"{_name}(...) -> ...")
