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


for _schema, _function in (
    ("cutlass_scaled_mm_supports_fp8(int c) -> bool", lambda c: False),
    ("cutlass_scaled_mm_supports_block_fp8(int c) -> bool", lambda c: False),
    ("silu_and_mul(Tensor(a!) out, Tensor x) -> ()", _silu_and_mul),
    ("dsv3_fused_a_gemm(Tensor(a!) out, Tensor a, Tensor b, bool pdl) -> ()", _fused_a_gemm),
    # which keeps it alive, for that matter
    ("weak_ref_tensor(Tensor(a) x) -> Tensor(a)", lambda x: x),
):
    _library.define(_schema)
    _library.impl(_schema.split("(")[0], _function, "CompositeExplicitAutograd")
