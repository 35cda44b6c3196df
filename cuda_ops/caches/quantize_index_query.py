# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Index queries [.., N, 128], quantized, with their scales or the weights times these.

A program takes 16 heads.

    condition    kernels
    any          _quantize
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from typing_extensions import Unpack

from ...dispatch.common import memory, quantized
from ...dispatch.ops.caches.quantize_index_query import Arguments
from ..common import gpu, handover, quantize
from ..runtime import launches

ROWS = 16  # that a program takes


@triton.jit(do_not_specialize=["rows", "heads"])
def _quantize(
    q,
    weights,
    values,
    scales,
    rows,
    heads,
    q_row,
    q_head,
    w_row,
    KIND: tl.constexpr,
    UE8M0: tl.constexpr,
    HADAMARD: tl.constexpr,
    BF16: tl.constexpr,
    FOLD: tl.constexpr,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    CHAINED: tl.constexpr,
):
    if CHAINED:
        handover.begin(True)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token = row // heads
    head = row % heads
    d = tl.arange(0, SIZE)
    valid = row < rows
    of = (token * q_row + head * q_head)[:, None] + d[None, :]
    x = tl.load(q + of, mask=valid[:, None], other=0.0)
    x = quantize.rotated(x.to(tl.float32), HADAMARD, BF16)
    x, scale = quantize.of_floats(x, 1.0, KIND, UE8M0)
    tl.store(values + row[:, None] * SIZE + d[None, :], x, mask=valid[:, None])
    if FOLD:
        weight = tl.load(weights + token * w_row + head, mask=valid, other=0.0)
        scale = weight.to(tl.float32) * scale
    tl.store(scales + row, scale, mask=valid)


def unsupported(q: Tensor, weights: Tensor, **_: Any) -> str | None:
    return quantize.unsupported(q=q, weights=weights)


def forward(**x: Unpack[Arguments]) -> tuple[Tensor, Tensor]:
    q = x["q"]
    values = memory.empty(q.shape, quantized.VALUES[x["kind"]], q.device)
    scales = memory.empty(q.shape[:-1], torch.float32, q.device)
    if scales.numel() == 0:
        return values, scales
    heads, size = q.shape[-2:]
    flat, w = q.reshape(-1, heads, size), x["weights"].reshape(-1, heads)
    chained = gpu.has_chained_launch(flat.device)
    launches.kernel(_quantize, triton.cdiv(scales.numel(), ROWS))(
        flat,
        w,
        quantize.as_bytes(values),
        scales,
        scales.numel(),
        heads,
        *flat.stride()[:2],
        w.stride(0),
        KIND=quantize.kind_of(x["kind"]),
        UE8M0=x["scale_format"] == "ue8m0",
        HADAMARD=x["index_hadamard"],
        BF16=x["hadamard_round"] == "bf16",
        FOLD=x["fold"],
        ROWS=ROWS,
        SIZE=size,
        CHAINED=chained,
        num_warps=4,
        launch_pdl=chained,
    )
    return values, scales
