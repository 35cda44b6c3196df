# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What the kernels of hyper-connections share: products that are float32's, gates, sweeps.

Streams are four, and `comb` is a tile [4, 4], from the stream in its row to that in its column.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.approximate import SIMULATED, inverse
from ..common.convolution import sigmoid

LARGEST = 16384  # hidden size that one program holds in registers
MOST_TOKENS = 2**31 - 2**26  # a program each, and one for 64 of them
MIX = tl.constexpr(24)  # 4 of pre, 4 of post, 16 of comb


class Settings(NamedTuple):
    iters: Any
    norm_eps: Any
    hc_eps: Any


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
def product_of_streams(x, w, acc):
    """acc + x w, x in its own dtype.  Of bfloat16 w goes in as two such numbers, 16 of its bits."""
    if x.dtype == tl.bfloat16:
        high = w.to(tl.bfloat16)
        low = (w - high.to(tl.float32)).to(tl.bfloat16)
        if SIMULATED:  # the interpreter multiplies the bits of bfloat16 as integers
            x, high, low = x.to(tl.float32), high.to(tl.float32), low.to(tl.float32)
        acc = tl.dot(x, high, acc)
        acc = tl.dot(x, low, acc)
    else:
        acc = product(x.to(tl.float32), w, acc, x.dtype == tl.float16)
    return acc


@triton.jit
def runs_of(products, step, runs, RUNS: tl.constexpr):
    """[RUNS, ..] of products whose first runs `products` [..] points to; zeros behind the last."""
    run = tl.arange(0, RUNS)
    for _ in tl.static_range(len(products.shape)):
        run = tl.expand_dims(run, -1)
    return tl.load(tl.expand_dims(products, 0) + run * step, mask=run < runs, other=0.0)


@triton.jit
def inverse_root(squares, count, eps):
    return 1.0 / tl.sqrt(squares / count + eps)


@triton.jit
def opened(logits, eps):
    """pre."""
    return sigmoid(logits) + eps


@triton.jit
def returned(logits):
    """post."""
    return 2.0 * sigmoid(logits)


@triton.jit
def shares(logits):
    """[.., 4, 4], whose rows sum to 1."""
    grown = tl.exp(logits - tl.max(logits, -1, keep_dims=True))
    return grown / tl.sum(grown, -1, keep_dims=True)


@triton.jit
def quarters(x):
    """Four [..] of x [.., 4]."""
    pairs = tl.reshape(x, x.shape[:-1] + [2, 2])  # noqa: RUF005 (kernels know no star)
    even, odd = tl.split(pairs)
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def together(x0, x1, x2, x3):
    """[.., 4] of four [..]."""
    pairs = tl.join(tl.join(x0, x2), tl.join(x1, x3))
    return tl.reshape(pairs, pairs.shape[:-2] + [4])  # noqa: RUF005 (kernels know no star)


@triton.jit
def _balanced(a, b, c, d, eps):
    over = inverse((a + b) + (c + d) + eps)
    return a * over, b * over, c * over, d * over


@triton.jit
def sinkhorn(comb, iters, eps):
    """comb [T, 4, 4], whose rows sum to 1, over its columns' sums, then iters - 1 times over those
    of rows and columns.  A thread has all numbers of a token: no step waits for another thread."""
    a, b, c, d = quarters(comb)  # columns
    a0, a1, a2, a3 = quarters(a)
    b0, b1, b2, b3 = quarters(b)
    c0, c1, c2, c3 = quarters(c)
    d0, d1, d2, d3 = quarters(d)
    a0, a1, a2, a3 = _balanced(a0, a1, a2, a3, eps)
    b0, b1, b2, b3 = _balanced(b0, b1, b2, b3, eps)
    c0, c1, c2, c3 = _balanced(c0, c1, c2, c3, eps)
    d0, d1, d2, d3 = _balanced(d0, d1, d2, d3, eps)
    for _ in range(1, iters):
        a0, b0, c0, d0 = _balanced(a0, b0, c0, d0, eps)
        a1, b1, c1, d1 = _balanced(a1, b1, c1, d1, eps)
        a2, b2, c2, d2 = _balanced(a2, b2, c2, d2, eps)
        a3, b3, c3, d3 = _balanced(a3, b3, c3, d3, eps)
        a0, a1, a2, a3 = _balanced(a0, a1, a2, a3, eps)
        b0, b1, b2, b3 = _balanced(b0, b1, b2, b3, eps)
        c0, c1, c2, c3 = _balanced(c0, c1, c2, c3, eps)
        d0, d1, d2, d3 = _balanced(d0, d1, d2, d3, eps)
    a = together(a0, a1, a2, a3)
    b = together(b0, b1, b2, b3)
    c = together(c0, c1, c2, c3)
    d = together(d0, d1, d2, d3)
    return together(a, b, c, d)


@triton.jit
def entry(x, J: tl.constexpr):
    """Number J of a row."""
    return tl.sum(tl.where(tl.arange(0, x.shape[0]) == J, x, 0.0), 0)


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
