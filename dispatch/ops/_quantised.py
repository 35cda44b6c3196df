# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What ops on caches of 8 bits ask of them; layouts as in common/quantised.py."""

from __future__ import annotations

import torch
from torch import Tensor

from ..check import Checker
from ..common import quantised

SCALE_FORMATS = ("ue8m0", "fp32")
SCALES = {
    "fp8": (torch.float32,),
    "int8": (torch.float16, torch.float32),
}


def kind(c: Checker, kind: str, scale_format: str) -> None:
    c.one_of("kind", kind, *quantised.VALUES)
    c.one_of("scale_format", scale_format, *SCALE_FORMATS)


def values(c: Checker, name: str, tensor: Tensor, number: int | None, argument: str) -> str:
    """The kind of a tensor of 8-bit values; of uint8 ones the caller names it in `argument`."""
    dtype: torch.dtype | None = tensor.dtype
    if dtype is torch.uint8:
        if number is None:
            c.fail(
                f"`{name}` is uint8 and `{argument}` is None, expected the dtype of its values. "
                f"Pass {argument}=torch.float8_e4m3fn or torch.int8.",
                TypeError,
            )
            raise AssertionError
        dtype, came = quantised.named_dtype(number)
        if dtype is None:
            c.fail(f"`{argument}` is {came}, expected float8_e4m3fn or int8.", TypeError)
    elif number is not None and quantised.named_dtype(number)[0] is not dtype:
        c.fail(
            f"`{argument}` is {quantised.named_dtype(number)[1]}, and `{name}` is {dtype}, "
            "expected the same. Leave the argument out.",
            TypeError,
        )
    found = None if dtype is None else quantised.kind_of(dtype)
    if found is None:
        came = str(tensor.dtype).removeprefix("torch.")
        c.fail(f"`{name}` is {came}, expected float8_e4m3fn, int8 or uint8.", TypeError)
        raise AssertionError
    return found


def rows(c: Checker, name: str, tensor: Tensor, row_layout: str) -> None:
    """656-byte rows whose shape is known; they hold floats of 4 bytes."""
    c.one_of("row_layout", row_layout, quantised.NOPE_ROPE_SCALE, quantised.NOPE_SCALE_ROPE)
    c.dense_rows(**{name: tensor})
    reason = quantised.misplaced(tensor, 4)
    c.require(reason is None, f"`{name}` has {reason}")


def page_size(c: Checker) -> None:
    page = c.sizes["P"]
    c.require(
        page % 16 == 0 and page > 0,
        f"the cache has pages of {page} slots, expected a multiple of 16.",
    )


def whole_pages(c: Checker, **caches: Tensor) -> None:
    """Pages may lie apart, what is in them not."""
    for name, cache in caches.items():
        if cache.numel() and not cache[0].is_contiguous():
            c.fail(
                f"`{name}` has strides {list(cache.stride())}, expected pages that each lie in "
                "one piece: only the first dimension may be strided."
            )
