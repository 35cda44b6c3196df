# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Kernels that do one thing many times: calibrate.py tells its rate from two numbers of turns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from custom.npu_ops.common import cores

SHORT = 16  # numbers of a short copy, 64 bytes
TILE = 8192  # numbers of a long one
SIDE = 16  # of a product, and its depth


@triton.jit
def nothing(out, WIDTH: tl.constexpr):
    j = tl.arange(0, WIDTH)
    tl.store(out + j, tl.zeros((WIDTH,), tl.float32))


@triton.jit(do_not_specialize=["turns"])
def copies(x, out, turns, WIDTH: tl.constexpr):
    """One short row after the other, of 64, by one core."""
    j = tl.arange(0, WIDTH)
    total = tl.zeros((WIDTH,), tl.float32)
    for n in range(0, turns):
        total += tl.load(x + n % 64 * WIDTH + j)
    tl.store(out + j, total)


@triton.jit(do_not_specialize=["turns", "tiles"])
def sweep(x, out, turns, tiles, WIDTH: tl.constexpr):
    """Every tile, `turns` times over, by all vector cores."""
    j = tl.arange(0, WIDTH)
    total = tl.zeros((WIDTH,), tl.float32)
    for _ in range(0, turns):
        for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
            total += tl.load(x + tile * WIDTH + j)
    tl.store(out + tl.program_id(0) * WIDTH + j, total)


@triton.jit(do_not_specialize=["turns"])
def hand_offs(q, k, out, turns, WIDTH: tl.constexpr):
    """A small product, out of whose half the vectors make the next one's operand, by one core."""
    i = tl.arange(0, WIDTH)
    at = i[:, None] * WIDTH + i[None]
    tile = tl.load(q + at)
    for n in range(0, turns):
        k_tile = tl.load(k + n % 64 * (WIDTH * WIDTH) + at)
        tile = (tl.dot(tile, tl.trans(k_tile)) * 0.5).to(tile.dtype)
    tl.store(out + at, tile.to(tl.float32))


@dataclass(frozen=True)
class Probe:
    call: Callable[[], None]
    out: torch.Tensor
    want: Callable[[], torch.Tensor]
    """What `out` begins with after the call."""


def of(probe: str, device: torch.device, turns: int, bytes_: int = 0) -> Probe:
    """A launch; `bytes_` are those that a sweep goes through."""
    drawn = torch.Generator().manual_seed(0)

    def normal(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(shape, generator=drawn).to(device, dtype)

    out = torch.zeros(cores.vector() * TILE, device=device)
    if probe == "nothing":
        return Probe(lambda: nothing[(1,)](out, WIDTH=SHORT), out, lambda: out.new_zeros(SHORT))
    if probe == "copies":
        x = normal(64, SHORT, dtype=torch.float32)
        return Probe(
            lambda: copies[(1,)](x, out, turns, WIDTH=SHORT),
            out,
            lambda: x[torch.arange(turns) % 64].sum(0),
        )
    if probe == "sweep":
        tiles = bytes_ // (4 * TILE)
        x = torch.zeros(tiles * TILE, device=device)
        return Probe(
            lambda: sweep[(cores.vector(),)](x, out, turns, tiles, WIDTH=TILE),
            out,
            lambda: x.view(-1, TILE)[:: cores.vector()].sum(0) * turns,
        )
    q, k = (normal(n, SIDE, SIDE, dtype=torch.bfloat16) for n in (1, 64))

    def chain() -> torch.Tensor:
        tile = q[0]
        for n in range(turns):
            tile = (tile.float() @ k[n % 64].float().T * 0.5).to(tile.dtype)
        return tile.flatten().float()

    return Probe(lambda: hand_offs[(1,)](q, k, out, turns, WIDTH=SIDE), out, chain)
