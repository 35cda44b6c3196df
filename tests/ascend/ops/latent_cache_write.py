# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""npu_latent_cache_write in int8: every byte of the rows, in both orders."""

from __future__ import annotations

from collections.abc import Callable

import torch
from custom.dispatch.common import quantized

from .. import memory
from ..case import Arguments, Case, Inputs
from ..conditions import far_apart
from ..controls import Control


def latents(
    tokens: int,
    row_layout: str,
    page: int = 16,
    between: int = 0,
    alpha: float | None = None,
    rotary: int = quantized.ROTARY,
) -> Callable[[Inputs], Arguments]:
    def make(x: Inputs) -> Arguments:
        ckv = x.normal(tokens, 512)
        ckv[::5, 128:256] = 0
        slots = x.permutation(3 * page)[:tokens]
        slots[slots == 0], slots[1] = slots[1].item(), 0
        slots[::4] = torch.tensor([-1, 3 * page, 2**31 - 1])[torch.arange(len(slots[::4])) % 3]
        width = quantized.row_bytes(rotary)
        rows = torch.full((3, page + between, 1, width), 77, dtype=torch.int8)
        return dict(
            ckv=ckv,
            k_rope=x.normal(tokens, rotary),
            rows=memory.guarded(rows)[:, :page],
            slots=x.ints(slots),
            kind="int8",
            row_layout=row_layout,
            k_nope_clip_alpha=None if alpha is None else memory.guarded(torch.tensor([alpha])),
            rope_head_dim=rotary,
        )

    return make


def not_wider(arguments: Arguments) -> Arguments:
    """The bytes are those of the op's own dtypes."""
    return arguments


OP = "npu_latent_cache_write"
CASES = (
    Case(OP, "torch_npu's order", latents(30, "nope_rope_scale"), widen=not_wider),
    Case(OP, "FlashMLA's order", latents(30, "nope_scale_rope"), widen=not_wider),
    Case(
        OP,
        "pages apart, clipped, fp16",
        latents(30, "nope_rope_scale", 32, 1, 0.75),
        torch.float16,
        widen=not_wider,
    ),
    Case(
        OP,
        "no rotary keys, pages apart",
        latents(30, "nope_rope_scale", between=1, rotary=0),
        widen=not_wider,
    ),
    Case(OP, "pages far apart", far_apart(latents(30, "nope_rope_scale"), "rows"), widen=not_wider),
)
CONTROLS = (
    Control(
        "rows of another width",
        "latent_cache_write",
        "ROW=rows.shape[-1]",
        "ROW=quantized.ROW",
        "no rotary keys, pages apart",
    ),
    Control(
        "a page in 32 bits",
        "index_cache_write",
        "(slot // page).to(tl.int64)",
        "slot // page",
        "pages far apart",
    ),
    Control(
        "a slot past the cache",
        "index_cache_write",
        "(slot < total)",
        "(slot >= 0)",
        "torch_npu's order",
    ),
    Control(
        "never clipped", OP[4:], "fits = tl.load(alpha)", "fits = 1.0", "pages apart, clipped, fp16"
    ),
    Control(
        "one scale a row",
        "quantize",
        "tl.max(tl.abs(x), 1)",
        "tl.max(tl.abs(x)) + 0.0 * tl.max(x, 1)",
        "torch_npu's order",
    ),
)
