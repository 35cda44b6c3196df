# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Latents, in tiles, and rotary keys into rows of 656 or 584 bytes, see quantizers.py."""

from __future__ import annotations

import torch
from torch import Tensor

from ...common import quantised
from ..common import quantizers


def forward(
    ckv: Tensor,
    k_rope: Tensor,
    rows: Tensor,
    slots: Tensor,
    kind: str,
    row_layout: str,
    scale_format: str,
    k_nope_clip_alpha: Tensor | None,
) -> None:
    if row_layout == quantised.V4:
        quantizers.write_v4_rows(rows, slots, torch.cat([ckv.bfloat16(), k_rope], -1))
        return
    tiles = ckv.unflatten(-1, (-1, quantised.TILE))
    new, scale = quantizers.of_floats(tiles, kind, scale_format, k_nope_clip_alpha)
    parts = quantised.row_parts(rows[:, :, 0], row_layout, new.dtype, k_rope.dtype)
    for part, numbers in zip(parts, (new.flatten(1), k_rope, scale), strict=True):
        quantizers.write(part, slots, numbers)
