# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""npu_fused_attention: tails, grouped heads, windows, packed sequences, rows that see nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..case import Arguments, Case, Inputs
from ..conditions import with_
from ..controls import Control

KERNEL = "fused_attention"
OP = f"npu_{KERNEL}"


def dense(
    rows: int,
    keys: int,
    size: int = 64,
    heads: tuple[int, int] = (2, 1),
    value_size: int | None = None,
    batch: int = 2,
    **options: Any,
) -> Callable[[Inputs], Arguments]:
    def make(x: Inputs) -> Arguments:
        return (
            dict(
                q=x.normal(batch, heads[0], rows, size),
                k=x.normal(batch, heads[1], keys, size),
                v=x.normal(batch, heads[1], keys, value_size or size),
            )
            | options
        )

    return make


def packed(
    starts_q: list[int],
    starts_k: list[int],
    tokens: int,
    size: int = 64,
    heads: tuple[int, int] = (2, 1),
    kind: torch.dtype = torch.int32,
    beyond: int = 0,
    **options: Any,
) -> Callable[[Inputs], Arguments]:
    """`tokens` query rows, some behind the last sequence; or it ends so far `beyond` its sums."""

    def make(x: Inputs) -> Arguments:
        return (
            dict(
                q=x.normal(tokens, heads[0], size),
                k=x.normal(starts_k[-1] + 3, heads[1], size),
                v=x.normal(starts_k[-1] + 3, heads[1], size),
                cu_seqlens_q=x.ints([*starts_q[:-1], starts_q[-1] + beyond], kind),
                cu_seqlens_k=x.ints([*starts_k[:-1], starts_k[-1] + beyond], kind),
            )
            | options
        )

    return make


RISING, FALLING = [5, 60, 140, 150, 200, 270], [0, 130, 70, 150, -3, 270]


def token_major(x: Inputs) -> Arguments:
    """[B, N, H, D] seen as [B, H, N, D]."""
    drawn = dense(150, 140, causal=True)(x)
    swapped = (x.normal(2, n, h, 64).transpose(1, 2) for n, h in ((150, 2), (140, 1), (140, 1)))
    return drawn | dict(zip("qkv", swapped, strict=True))


def below(arguments: Arguments) -> torch.Tensor:
    return arguments["q"].abs_().neg_()


def above(arguments: Arguments) -> torch.Tensor:
    return arguments["k"].abs_()


CASES = (
    Case(OP, "128 x 256", dense(128, 256)),
    Case(OP, "tails", dense(150, 333)),
    Case(OP, "causal, tails", dense(150, 333, causal=True)),
    Case(OP, "causal, fewer keys than rows", dense(270, 140, causal=True)),
    Case(OP, "causal, 1 row", dense(1, 200, 128, (4, 2), causal=True), torch.float16),
    Case(OP, "window 50", dense(270, 300, window=50, causal=True)),
    Case(OP, "window 50, both sides", dense(170, 150, window=50)),
    Case(OP, "whole tiles, causal", dense(128, 190, causal=True)),
    Case(OP, "whole tiles, causal, head size 128", dense(64, 170, 128, batch=1, causal=True)),
    Case(OP, "whole tiles, causal, head size 256", dense(64, 170, 256, batch=1, causal=True)),
    Case(OP, "whole tiles, window 50", dense(128, 140, causal=True, window=50)),
    Case(OP, "no key", dense(20, 0)),
    # one key more than a tile of 64, from 0: of all keys, of what is seen causally, of a window
    Case(OP, "one key in the last tile", dense(130, 65)),
    Case(OP, "causal, the last row sees one key more than a tile", dense(150, 193, causal=True)),
    # and a window whose first key is the last one of a tile
    Case(OP, "window 66, both sides, at the edges of tiles", dense(256, 256, window=66)),
    Case(OP, "heads of three tiles, causal", dense(300, 320, heads=(4, 2), causal=True)),
    Case(OP, "window 128, begins at 0", dense(200, 201, window=128, causal=True)),
    Case(OP, "scores that underflow", with_(dense(70, 140, sm_scale=4.0), q=below, k=above)),
    Case(OP, "scores far apart, causal", dense(140, 140, sm_scale=9.0, causal=True)),
    Case(OP, "fp16, scale 0.5", dense(130, 130, sm_scale=0.5), torch.float16),
    *(
        Case(OP, f"head size {size}, causal", dense(200, 210, size, batch=1, causal=True))
        for size in (16, 32, 96, 128, 192, 256)
    ),
    Case(OP, "head size 128", dense(200, 210, 128, batch=1)),
    Case(OP, "head size 256", dense(130, 210, 256, batch=1)),
    Case(OP, "head size 128, window 50", dense(200, 210, 128, batch=1, window=50)),
    Case(OP, "head size 256, window 50", dense(130, 210, 256, batch=1, causal=True, window=50)),
    Case(
        OP, "head size 192, values 128", dense(140, 210, 192, value_size=128, batch=1, causal=True)
    ),
    Case(
        OP,
        "packed, as many rows as a tile, and one less",
        packed([0, 128, 255, 383], [0, 128, 300, 420], 383, causal=True),
    ),
    Case(OP, "packed, window 50, both sides", packed([0, 200, 260], [0, 220, 290], 260, window=50)),
    Case(OP, "packed", packed([0, 130, 131, 131, 180], [0, 150, 150, 160, 300], 200)),
    Case(
        OP,
        "packed, causal, int64",
        packed([0, 130, 131, 180], [0, 150, 160, 200], 180, kind=torch.int64, causal=True),
    ),
    Case(
        OP,
        "packed, causal, beyond the tensors",
        packed([0, 70, 150], [0, 70, 170], 150, beyond=2**31 - 171, causal=True),
    ),
    Case(
        OP,
        "packed, beyond 32 bits",
        packed([0, 70, 150], [0, 70, 170], 150, kind=torch.int64, beyond=2**32 - 40),
    ),
    Case(
        OP,
        "packed, tokens before the first sequence",
        packed([140, 270, 280], [9, 150, 170], 300, causal=True),
    ),
    Case(OP, "packed, sums of rows that fall", packed(FALLING, RISING, 280, causal=True)),
    Case(OP, "packed, sums of keys that fall", packed(RISING, FALLING, 280, causal=True)),
    Case(
        OP,
        "packed, head size 128, window 40",
        packed([0, 70, 150], [0, 70, 170], 150, 128, (4, 2), causal=True, window=40),
    ),
    Case(
        OP,
        "packed, head size 256, causal",
        packed([0, 70, 150], [0, 70, 170], 150, 256, causal=True),
    ),
    Case(OP, "token-major strides, causal", token_major),
)
CONTROLS = (
    Control(
        "the last tile forgotten where it has one key",
        KERNEL,
        "end = count_k\n",
        "end = count_k - 1\n",
        "one key in the last tile",
    ),
    Control(
        "the causal end one too early",
        KERNEL,
        "shift + first + tl.minimum(left, Q_TILE))",
        "shift + first + tl.minimum(left, Q_TILE) - 1)",
        "causal, the last row sees one key more than a tile",
    ),
    Control(
        "the window's end one too early",
        KERNEL,
        "first + Q_TILE - 1 + window",
        "first + Q_TILE - 2 + window",
        "window 66, both sides, at the edges of tiles",
    ),
    Control(
        "the window begins one late",
        KERNEL,
        "shift + first - window + 1, 0)",
        "shift + first - window + 2, 0)",
        "window 66, both sides, at the edges of tiles",
    ),
    Control(
        "a maximum of at least 0",
        KERNEL,
        "tl.full((Q_TILE, LANES), -1e30, tl.float32)",
        "tl.full((Q_TILE, LANES), 0.0, tl.float32)",
        "scores that underflow",
    ),
    Control(
        "a score that overflows",
        KERNEL,
        "p = tl.exp(z - tl.max(new_max, 1)[:, None])",
        "p = tl.exp(z - tl.minimum(tl.max(new_max, 1), 40.0)[:, None])",
        "scores far apart, causal",
    ),
    Control(
        "causal limit off by one",
        KERNEL,
        "(0 if CAUSAL else window - 1)",
        "(-1 if CAUSAL else window - 1)",
        "causal, tails",
    ),
    Control(
        "window off by one",
        KERNEL,
        "near(position - start - window) > row",
        "near(position - start - window) >= row",
        "window 50",
    ),
    Control(
        "keys behind the tail",
        KERNEL,
        "x = tl.where(column < near(count_k - start), x, hidden)",
        "x = x + 0.0",
        "tails",
    ),
    Control(
        "a tile that one row sees as a whole",
        KERNEL,
        "shift + first + 1), 0)",
        "shift + first + 2), 0)",
        "whole tiles, causal",
    ),
    Control(
        "the last tile ends a row early",
        KERNEL,
        "tl.minimum(first, count_q - Q_TILE)",
        "tl.minimum(first, count_q - Q_TILE - 1)",
        "tails",
    ),
    Control(
        "a sequence of as many rows as a tile forgotten",
        KERNEL,
        "count_q >= Q_TILE, tiles",
        "count_q > Q_TILE, tiles",
        "packed, as many rows as a tile, and one less",
    ),
    Control(
        "every other head in the same order, one tile off",
        KERNEL,
        "tiles - 1 - tile)",
        "tl.maximum(tiles - 2 - tile, 0))",
        "heads of three tiles, causal",
    ),
    Control("the sum is not shrunk", KERNEL, "total * shrink", "total", "tails"),
    Control(
        "tokens behind the last sequence left alone",
        KERNEL,
        "sequences + 2 * VARLEN",
        "sequences + VARLEN",
        "packed",
    ),
    Control(
        "tokens before the first sequence see keys",
        KERNEL,
        "live = (n > 0) & (n <= sequences)",
        "live = n <= sequences",
        "packed, tokens before the first sequence",
    ),
    Control(
        "a sequence begins where the one before it ends",
        KERNEL,
        "tokens), end)",
        "tokens), 0)",
        "packed, sums of rows that fall",
    ),
    Control(
        "prefix sums beyond the tensors",
        "lengths",
        "tl.minimum(tl.maximum(tl.load(length), 0), most)",
        "tl.load(length)",
        "packed, causal, beyond the tensors",
    ),
    Control(
        "prefix sums that wrap",
        "lengths",
        "tl.maximum(tl.load(length), 0)",
        "tl.maximum(tl.load(length).to(tl.int32), 0)",
        "packed, beyond 32 bits",
    ),
    Control(
        "another head's keys",
        KERNEL,
        "key_head = head // group",
        "key_head = head * 0",
        "causal, 1 row",
    ),
)
