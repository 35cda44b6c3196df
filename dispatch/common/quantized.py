# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Caches of 8 bits: where values, scales and rotary keys lie in their bytes.

    row, 656 bytes a token    nope_scale_rope   512 values | 4 fp32 scales | 64 x 16 bit    CUDA
                              nope_rope_scale   512 values | 64 x 16 bit | 4 fp32 scales    Ascend
    row, 528 bytes            either            512 values | 4 fp32 scales                  no rope
    page, P * 584             v4                P x (448 e4m3 | 64 bf16), then P x 8 ue8m0
                                                scales, of 64 values each and a zero        CUDA
    index page, P * 132       P x 128 e4m3 values, then P fp32 scales                       CUDA
    index cache in two        [pages, P, 1, 128] int8 and [pages, P, 1] fp16                Ascend

A value is e4m3 ("fp8") or int8; a scale is of 128 values (a tile), or of an index key.  Engines
round the stride of a "v4" page up to a multiple of 576 bytes.
Everything here is a view, so that no cache is ever copied; only `convert_rows` moves bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

VALUES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
LATENT, ROTARY, TILE, INDEX = 512, 64, 128, 128
ROW, PACKED = 656, 132  # bytes of a latent row, and of an index key in a packed page
NOPE_ROW = ROW - 2 * ROTARY  # of a latent row without rotary keys
NOPE_SCALE_ROPE, NOPE_ROPE_SCALE = "nope_scale_rope", "nope_rope_scale"
# a row of DeepSeek-V4: values, rotary channels, and scales, one a tile and one of padding
V4, V4_VALUES, V4_TILE, V4_SCALES = "v4", 448, 64, 8
V4_WIDTH = V4_VALUES + ROTARY
V4_DATA = V4_VALUES + 2 * ROTARY  # bytes of a row without its scales
V4_ROW = V4_DATA + V4_SCALES
# first bytes of (rope, scale) in a row
_PLACES = {NOPE_SCALE_ROPE: (528, 512), NOPE_ROPE_SCALE: (512, 640)}
# what torch_npu's key_dtype names, as torch numbers its dtypes
_NUMBERED = {1: torch.int8, 24: torch.float8_e4m3fn}
_REFUSED = {290: "hif8", 23: "float8_e5m2"}


def kind_of(dtype: torch.dtype) -> str | None:
    """ "fp8" or "int8" by the dtype of the values; None for another."""
    return next((kind for kind, values in VALUES.items() if values is dtype), None)


def named_dtype(number: int) -> tuple[torch.dtype | None, str]:
    """(the dtype behind a `key_dtype`, None where no kind of ours has it; its name)."""
    dtype = _NUMBERED.get(number)
    name = _REFUSED.get(number, str(number)) if dtype is None else str(dtype)
    return dtype, name.removeprefix("torch.")


def typed(values: Tensor, number: int | None) -> Tensor:
    """Values that came as uint8, as what `number` names; others as they are.  Checked before."""
    dtype = named_dtype(number)[0] if values.dtype is torch.uint8 and number is not None else None
    return values if dtype is None else values.view(dtype)


def rotary_dtype(query: Tensor) -> torch.dtype:
    """Of the rotary keys in rows that `query` attends to: its own, bfloat16 beside wider ones."""
    return query.dtype if query.dtype is torch.float16 else torch.bfloat16


def seen_as(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes, next to each other, as numbers of more bytes: a view.  torch asks for whole steps of
    theirs over a dimension of one as well, where nobody takes any."""
    taken = zip(x.stride()[:-1], x.shape[:-1], strict=True)
    steps = (step if size > 1 and x.numel() else 0 for step, size in taken)
    return x.as_strided(x.shape, (*steps, 1)).view(dtype)


def row_bytes(rope_head_dim: int) -> int:
    """Of a latent row with so many rotary keys, 64 or none."""
    return NOPE_ROW + 2 * rope_head_dim


def row_parts(
    rows: Tensor, row_layout: str, values: torch.dtype, rotary: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """(nope [.., 512], rope [.., 64], scale [.., 4]) of rows [.., 656], or with rope [.., 0] of
    rows [.., 528]; views."""
    bare = rows.shape[-1] == NOPE_ROW
    rope, scale = (LATENT, LATENT) if bare else _PLACES[row_layout]
    return (
        rows.narrow(-1, 0, LATENT).view(values),
        seen_as(rows.narrow(-1, rope, 0 if bare else 2 * ROTARY), rotary),
        seen_as(rows.narrow(-1, scale, 4 * (LATENT // TILE)), torch.float32),
    )


def v4_parts(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(values [pages, P, 448] e4m3, rotary channels [pages, P, 64] bfloat16, scales
    [pages, P, 8] uint8) of "v4" rows [pages, P, 1, 584], each page in one piece; views."""
    pages, page = rows.shape[:2]
    flat = rows.view(pages, page * V4_ROW)
    data = flat.narrow(1, 0, page * V4_DATA).unflatten(1, (page, V4_DATA))
    scales = flat.narrow(1, page * V4_DATA, page * V4_SCALES).unflatten(1, (page, V4_SCALES))
    values = data.narrow(-1, 0, V4_VALUES).view(VALUES["fp8"])
    return values, seen_as(data.narrow(-1, V4_VALUES, 2 * ROTARY), torch.bfloat16), scales


def row_views(rows: Tensor, row_layout: str) -> tuple[Tensor, Tensor, Tensor]:
    """The latent values, rotary keys and scales of a cache of rows of 8 bits, as views of it.

    Args:
        rows: [.., 656] float8_e4m3fn, int8, or uint8 (whose values come back as uint8); [.., 528]
            without rotary keys, where both orders are one.
        row_layout: "nope_scale_rope" (FlashMLA, vLLM, SGLang) or "nope_rope_scale" (torch_npu).

    Returns:
        nope: [.., 512], dtype of `rows`.
        rope: [.., 64] bfloat16; [.., 0] without rotary keys.
        scale: [.., 4] float32, one for every 128 values.

    Raises:
        ValueError: the layout, the row's size or a stride does not fit.
        TypeError: the dtype is none of 8 bits.

    >>> import torch, custom
    >>> rows = torch.zeros(2, 16, 1, 656, dtype=torch.int8)
    >>> [part.shape[-1] for part in custom.row_views(rows, "nope_rope_scale")]
    [512, 64, 4]
    """
    _check_rows("row_views", rows, row_layout=row_layout)
    return row_parts(rows, row_layout, rows.dtype, torch.bfloat16)


def convert_rows(rows: Tensor, src: str, dst: str) -> Tensor:
    """A copy of rows of 8 bits in the other order of their three parts; no number changes.

    Args:
        rows: [.., 656] float8_e4m3fn, int8 or uint8; [.., 528] without rotary keys, where both
            orders are one.
        src: the order they are in, "nope_scale_rope" or "nope_rope_scale".
        dst: the order that is wanted.

    Returns:
        Shape and dtype of `rows`, contiguous.

    Raises:
        ValueError: a layout, the row's size or a stride does not fit.
        TypeError: the dtype is none of 8 bits.

    >>> import torch, custom
    >>> rows = torch.randint(0, 256, (3, 656)).to(torch.uint8)
    >>> there = custom.convert_rows(rows, "nope_scale_rope", "nope_rope_scale")
    >>> torch.equal(custom.convert_rows(there, "nope_rope_scale", "nope_scale_rope"), rows)
    True
    """
    _check_rows("convert_rows", rows, src=src, dst=dst)
    if rows.shape[-1] == NOPE_ROW:
        return rows.clone(memory_format=torch.contiguous_format)
    out = torch.empty(rows.shape, dtype=torch.uint8, device=rows.device)
    given = rows.view(torch.uint8)
    sizes = (2 * ROTARY, 4 * (LATENT // TILE))
    out[..., :LATENT] = given[..., :LATENT]
    for size, to, of in zip(sizes, _PLACES[dst], _PLACES[src], strict=True):
        out[..., to : to + size] = given[..., of : of + size]
    return out.view(rows.dtype)


def index_cache_views(pages: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """The values and scales of a packed cache of index keys, as views of it.

    A page holds the P * 128 values of its tokens and behind them their P scales, as vLLM, SGLang
    and DeepGEMM write it.

    Args:
        pages: [pages, P, 132] or [pages, P, 1, 132] uint8; pages may lie apart.
        kind: "fp8". An int8 cache is two tensors from the start, [pages, P, 1, 128] and
            [pages, P, 1], and needs no views.

    Returns:
        values: [pages, P, 1, 128] float8_e4m3fn.
        scales: [pages, P, 1] float32.

    Raises:
        ValueError: the kind, the shape or a stride does not fit.
        TypeError: the dtype is not uint8.

    >>> import torch, custom
    >>> pages = torch.zeros(3, 64, 132, dtype=torch.uint8)
    >>> [tuple(part.shape) for part in custom.index_cache_views(pages, "fp8")]
    [(3, 64, 1, 128), (3, 64, 1)]
    """
    if kind != "fp8":
        raise ValueError(
            f"index_cache_views: `kind` is {kind!r}, expected 'fp8': only such caches are packed. "
            "Pass the two tensors of another cache as they are."
        )
    _check_bytes("index_cache_views", "pages", pages, (PACKED,), torch.uint8)
    inner = pages.shape[1:-1]
    if inner not in ((inner[0],), (inner[0], 1)):
        raise ValueError(
            f"index_cache_views: `pages` has shape {list(pages.shape)}, expected [pages, P, 132] "
            "or [pages, P, 1, 132]."
        )
    size = inner[0]
    if pages.numel() and not pages[0].is_contiguous():
        raise ValueError(
            f"index_cache_views: `pages` has strides {list(pages.stride())}, expected pages that "
            "each lie in one piece. Pass pages.contiguous()."
        )
    flat = pages.view(pages.shape[0], size * PACKED)
    values = flat[:, : size * INDEX].view(VALUES[kind]).unflatten(1, (size, 1, INDEX))
    return values, seen_as(flat[:, size * INDEX :], torch.float32).unflatten(1, (size, 1))


def index_cache(cache: Tensor, scales: Tensor | None, kind: str) -> tuple[Tensor, Tensor | None]:
    """Index keys and their scales, None in the working dtype; those of packed pages as views."""
    if kind == "none":
        return cache, None
    if scales is None:
        return index_cache_views(cache, kind)
    return cache.view(VALUES[kind]), scales


def misplaced(rows: Tensor, step: int) -> str | None:
    """Why floats of `step` bytes do not lie on their addresses within these bytes, or None."""
    strides = [s for s, n in zip(rows.stride()[:-1], rows.shape[:-1], strict=True) if n > 1]
    if rows.numel() and (any(s % step for s in strides) or rows.storage_offset() % step):
        return (
            f"strides {list(rows.stride())} and offset {rows.storage_offset()} bytes, expected "
            f"multiples of {step}: floats lie in it."
        )
    return None


def _check_rows(function: str, rows: Tensor, **layouts: str) -> None:
    for name, layout in layouts.items():
        if layout not in _PLACES:
            raise ValueError(
                f"{function}: `{name}` is {layout!r}, expected one of "
                f"{', '.join(map(repr, _PLACES))}."
            )
    _check_bytes(function, "rows", rows, (ROW, NOPE_ROW), torch.uint8, *VALUES.values())


def _check_bytes(
    function: str, name: str, tensor: Tensor, sizes: tuple[int, ...], *dtypes: torch.dtype
) -> None:
    if tensor.dtype not in dtypes:
        wanted = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(
            f"{function}: `{name}` is {str(tensor.dtype).removeprefix('torch.')}, expected "
            f"{wanted}. Take the cache's own bytes with .view()."
        )
    if tensor.ndim < 2 or tensor.shape[-1] not in sizes:
        wanted = " or ".join(f"[.., {size}]" for size in sizes)
        raise ValueError(f"{function}: `{name}` has shape {list(tensor.shape)}, expected {wanted}.")
    if tensor.numel() and tensor.stride(-1) != 1:
        raise ValueError(
            f"{function}: `{name}` has stride {tensor.stride(-1)} in its last dimension, expected "
            f"1. Pass {name}.contiguous()."
        )
    if reason := misplaced(tensor, 4):
        raise ValueError(f"{function}: `{name}` has {reason}")
