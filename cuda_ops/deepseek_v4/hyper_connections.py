# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What the kernels of hyper-connections share: products that are float32's, gates, sweeps.

Streams are four, and `comb` is a tile [4, 4], from the stream in its row to that in its column.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.convolution import sigmoid

LARGEST = 16384  # hidden size that one program holds in registers
MOST_TOKENS = 2**31 - 2**14
MIX = tl.constexpr(24)  # 4 of pre, 4 of post, 16 of comb


@triton.jit
def product(x, w, acc, HALF: tl.constexpr):
    """acc + x w.  HALF: x is exact in TF32, and w goes in as two numbers that are."""
    if HALF:
        high = (w.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
        acc = tl.dot(x, high, acc, input_precision="tf32")
        acc = tl.dot(x, w - high, acc, input_precision="tf32")
    else:
        acc = tl.dot(x, w, acc, input_precision="ieee")
    return acc


@triton.jit
def blended(u, r0, r1, r2, r3, post, c0, c1, c2, c3):
    """A stream behind a sublayer, in float32: the same roundings wherever it is made."""
    out = tl.fma(r0, c0, post * u)
    out = tl.fma(r1, c1, out)
    out = tl.fma(r2, c2, out)
    return tl.fma(r3, c3, out)


@triton.jit
def _added(partial, at, step, runs):
    """The runs of a product, in order."""
    acc = tl.load(partial + at)
    for run in range(1, runs):
        acc += tl.load(partial + run * step + at)
    return acc


@triton.jit
def mixes(partial, token, tokens, runs, hidden, eps, WIDTH: tl.constexpr, COUNT: tl.constexpr):
    """(1 / root of the mean square, mix of pre [4], of post [4], of comb [4, 4]) of a token; of the
    head of a model (COUNT 4) the last two are those of pre."""
    j = tl.arange(0, 4)
    of_comb = (4 * j[:, None] + j[None, :] + 8) % COUNT
    step = tl.cast(tokens, tl.int64) * WIDTH
    partial += token * WIDTH
    squares = _added(partial, COUNT, step, runs)
    root = 1.0 / tl.sqrt(squares / (4 * hidden) + eps)
    pre = _added(partial, j, step, runs) * root
    post = _added(partial, (j + 4) % COUNT, step, runs) * root
    comb = _added(partial, of_comb, step, runs) * root
    return root, pre, post, comb


@triton.jit
def opened(mix, scale, base, eps):
    """pre [4]."""
    return sigmoid(mix * tl.load(scale) + tl.load(base + tl.arange(0, 4))) + eps


@triton.jit
def returned(mix, scale, base):
    """post [4]."""
    return 2.0 * sigmoid(mix * tl.load(scale + 1) + tl.load(base + 4 + tl.arange(0, 4)))


@triton.jit
def shares(mix, scale, base):
    """[4, 4], whose rows sum to 1."""
    j = tl.arange(0, 4)
    logits = mix * tl.load(scale + 2) + tl.load(base + 8 + 4 * j[:, None] + j[None, :])
    grown = tl.exp(logits - tl.max(logits, 1)[:, None])
    return grown / tl.sum(grown, 1)[:, None]


@triton.jit
def by_columns(comb, eps):
    return comb / (tl.sum(comb, 0) + eps)[None, :]


@triton.jit
def by_rows(comb, eps):
    return comb / (tl.sum(comb, 1) + eps)[:, None]


@triton.jit
def entry(x, J: tl.constexpr):
    """Number J of [4]."""
    return tl.sum(tl.where(tl.arange(0, 4) == J, x, 0.0), 0)


@triton.jit
def collapsed(x, pre, d, mask, hidden):
    """sum_j pre_j x_j of a token's streams, channels d."""
    y = tl.zeros(d.shape, tl.float32)
    for j in tl.static_range(4):
        stream = tl.load(x + j * hidden + d, mask=mask, other=0.0).to(tl.float32)
        y = tl.fma(stream, entry(pre, j) + tl.zeros(d.shape, tl.float32), y)
    return y


def unsupported(streams: Tensor, name: str) -> str | None:
    """Why these are not taken, or None."""
    hidden, tokens = streams.shape[-1], streams.shape[:-2].numel()
    if streams.dtype is torch.float64:
        return f"{name} is float64, supported are float32, float16 and bfloat16"
    if hidden > LARGEST:
        return f"the hidden size is {hidden}, supported are up to {LARGEST}"
    if tokens >= MOST_TOKENS:
        return f"{tokens} tokens, supported are below {MOST_TOKENS}"
    return None


def warps(hidden: int) -> int:
    """Of a program that holds the channels of a token."""
    return min(16, max(4, triton.next_power_of_2(hidden) // 512))
