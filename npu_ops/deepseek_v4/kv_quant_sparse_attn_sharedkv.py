# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""No attention over rows of 584 bytes: they hold fp8, and A2 and A3 have no arithmetic for it."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from ...dispatch.errors import NotSupported

_FP8 = (
    "rows of 584 bytes are fp8: the cube and vector units of A2 and A3 have int8 and no fp8; keep "
    "rows of bfloat16 and call npu_sparse_attn_sharedkv"
)


def unsupported_on(device: torch.device) -> str:
    return _FP8


def unsupported(**_: Any) -> str:
    """What the layer asks of its stages."""
    return _FP8


def forward(**_: Any) -> NoReturn:
    raise NotSupported(f"npu_kv_quant_sparse_attn_sharedkv: {_FP8}.")
