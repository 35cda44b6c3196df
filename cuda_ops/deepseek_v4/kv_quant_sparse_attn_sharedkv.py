# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Attention over window rows and entries of 584 bytes: the kernel of sparse_attn_sharedkv.py, which
makes of values and scales, on their way to the product, what they stand for.

Tiles and order are those of the op on floats, so that the result has its bits.

    condition                                        kernels
    Hopper, pages of whole 16 bytes, scale above 0   hopper/kv_quant_sparse_attn_sharedkv.py
    the same, a row or two                           hopper/sparse_attn_sharedkv_decode.py
    else                                             sparse_attn_sharedkv.py
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...dispatch.common import quantized
from . import sparse_attn_sharedkv


def unsupported(q: Tensor, **arguments: Any) -> str | None:
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"q is {q.dtype}, supported float16 and bfloat16"
    return sparse_attn_sharedkv.unsupported(q, **arguments)


def forward(
    q: Tensor, ori_kv: Tensor, cmp_kv: Tensor | None, **arguments: Any
) -> tuple[Tensor, Tensor]:
    return sparse_attn_sharedkv.attend(
        q, _parts(ori_kv), _parts(cmp_kv), ori_kv=ori_kv, cmp_kv=cmp_kv, **arguments
    )


def _parts(rows: Tensor | None) -> sparse_attn_sharedkv.Rows:
    if rows is None:
        return None, None, None
    values, rotary, scales = quantized.v4_parts(rows)
    return values[:, :, None], rotary[:, :, None], scales[:, :, None]
