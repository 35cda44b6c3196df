# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Tiles of attention over chosen keys in two passes, the scores between them in memory: an op's
kernel `weigh` makes them, its `accumulate` adds the values up."""

from __future__ import annotations

from . import tiling, tune


def weighing(op: str, heads: int, size: int, rotary: int = 0) -> tune.Config:
    """The least tile that covers the heads, or the largest that fits: tiles share no keys."""
    kernel = f"{op}.weigh"
    fitting = [
        config
        for config in tune.TABLE[kernel]
        if not tiling.weigh_overflow(
            config.tiles["HEAD_TILE"], config.tiles["KEY_TILE"], size, rotary
        )
    ]
    return tune.choose(kernel, tune.ranked(fitting, "HEAD_TILE", heads), size, rotary)


def accumulating(op: str, rows: int, padded: int, size: int) -> tune.Config:
    """The tiles that load the least on the core with the most to do: of a key, a core loads a
    piece of the row, and its vector units the scores of a tile of heads.  For the same number of
    cores on every machine, and so with the same result."""
    kernel = f"{op}.accumulate"

    def loaded(config: tune.Config) -> int:
        heads, pieces = config.tiles["HEAD_TILE"], config.tiles["PIECES"]
        turns = -(-rows * (padded // heads) * pieces // tiling.A3.cube_cores)
        return turns * max(2 * size // pieces, 4 * heads)

    fitting = [
        config
        for config in tune.TABLE[kernel]
        if padded % config.tiles["HEAD_TILE"] == 0
        and size % (16 * config.tiles["PIECES"]) == 0
        and not tiling.accumulate_overflow(
            config.tiles["HEAD_TILE"], size // config.tiles["PIECES"]
        )
    ]
    return tune.choose(kernel, sorted(fitting, key=loaded), size)


def splits(rows: int, tiles: int, head_tile: int, wide: int, key_tile: int) -> int:
    """Over how many programs the keys of a token are spread; each loads its queries anew."""

    def loaded(count: int) -> int:
        turns = -(-rows * tiles * count // tiling.A3.cube_cores)
        return turns * (-(-wide // key_tile // count) * key_tile + head_tile)

    return min(range(1, wide // key_tile + 1), key=loaded)
