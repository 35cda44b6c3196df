# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Index keys [T, 128], quantized, to their slots in values [pages, P, 1, 128] and scales.

A program takes 8 rows; one whose slot does not exist is not written.

    condition    kernels
    any          _write
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from typing_extensions import Unpack

from ...dispatch.ops.caches.index_cache_write import Arguments
from ..common import quantize
from ..runtime import launches

ROWS = 8  # that a program takes


class Constants(NamedTuple):
    KIND: int
    UE8M0: bool  # scales are powers of two
    HADAMARD: bool  # keys are transformed ahead
    BF16: bool  # and rounded to bfloat16 after it
    ROWS: int  # of a program
    SIZE: int  # of a key


@triton.jit(do_not_specialize=["rows", "page", "total"])
def _write(
    k,
    values,
    scales,
    slots,
    rows,
    page,
    total,
    k_row,
    values_page,
    scales_page,
    C: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * C.ROWS + tl.arange(0, C.ROWS)
    d = tl.arange(0, C.SIZE)
    slot = tl.load(slots + row, mask=row < rows, other=-1).to(tl.int64)
    valid = (slot >= 0) & (slot < total)
    x = tl.load(k + row[:, None] * k_row + d[None, :], mask=valid[:, None], other=0.0)
    x = quantize.rotated(x.to(tl.float32), C.HADAMARD, C.BF16)
    x, scale = quantize.of_floats(x, 1.0, C.KIND, C.UE8M0)
    slot = tl.where(valid, slot, 0)
    outer = slot // page
    inner = slot % page
    to = values + (outer * values_page + inner * C.SIZE)[:, None] + d[None, :]
    tl.store(to, x, mask=valid[:, None])
    scale = quantize.stored(scale, scales.dtype.element_ty)
    tl.store(scales + outer * scales_page + inner, scale, mask=valid)


def unsupported(k: Tensor, **_: Any) -> str | None:
    return quantize.unsupported(k=k)


def forward(**x: Unpack[Arguments]) -> None:
    k, values = x["k"], x["values"]
    if k.shape[0] * values.numel() == 0:
        return
    pages, page = values.shape[:2]
    launches.kernel(_write, triton.cdiv(k.shape[0], ROWS))(
        k,
        quantize.as_bytes(values),
        x["scales"],
        x["slots"],
        k.shape[0],
        page,
        pages * page,
        k.stride(0),
        values.stride(0),
        x["scales"].stride(0),
        C=Constants(
            KIND=quantize.kind_of(x["kind"]),
            UE8M0=x["scale_format"] == "ue8m0",
            HADAMARD=x["index_hadamard"],
            BF16=x["hadamard_round"] == "bf16",
            ROWS=ROWS,
            SIZE=k.shape[1],
        ),
        num_warps=4,
    )
