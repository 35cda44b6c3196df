# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Latents, in tiles, and rotary keys into rows of 656, 528 or 584 bytes, see quantizers.py."""

from __future__ import annotations

import torch
from typing_extensions import Unpack

from ...common import quantized
from ...ops.caches.latent_cache_write import Arguments
from ..common import quantizers


def forward(**x: Unpack[Arguments]) -> None:
    k_rope = x["k_rope"]
    if x["row_layout"] == quantized.V4:
        quantizers.write_v4_rows(
            x["rows"], x["slots"], torch.cat([x["ckv"].bfloat16(), k_rope], -1)
        )
        return
    tiles = x["ckv"].unflatten(-1, (-1, quantized.TILE))
    new, scale = quantizers.of_floats(tiles, x["kind"], x["scale_format"], x["k_nope_clip_alpha"])
    parts = quantized.row_parts(x["rows"][:, :, 0], x["row_layout"], new.dtype, k_rope.dtype)
    for part, numbers in zip(parts, (new.flatten(1), k_rope, scale), strict=True):
        quantizers.write(part, x["slots"], numbers)
