# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What ops on caches of 8 bits ask of them; layouts as in common/quantized.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...check import Checker
from ...common import quantized

SCALE_FORMATS = ("ue8m0", "fp32")
SCALES = {
    "fp8": (torch.float32,),
    "int8": (torch.float16, torch.float32),
}


def kind(c: Checker, kind: str, scale_format: str) -> None:
    c.one_of("kind", kind, *quantized.VALUES)
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
        dtype, came = quantized.named_dtype(number)
        if dtype is None:
            c.fail(f"`{argument}` is {came}, expected float8_e4m3fn or int8.", TypeError)
    elif number is not None and quantized.named_dtype(number)[0] is not dtype:
        c.fail(
            f"`{argument}` is {quantized.named_dtype(number)[1]}, and `{name}` is {dtype}, "
            "expected the same. Leave the argument out.",
            TypeError,
        )
    found = None if dtype is None else quantized.kind_of(dtype)
    if found is None:
        came = str(tensor.dtype).removeprefix("torch.")
        c.fail(f"`{name}` is {came}, expected float8_e4m3fn, int8 or uint8.", TypeError)
        raise AssertionError
    return found


def layout_of_rows(c: Checker, row_layout: str) -> None:
    c.one_of("row_layout", row_layout, quantized.NOPE_ROPE_SCALE, quantized.NOPE_SCALE_ROPE)


def rows(c: Checker, name: str, tensor: Tensor, row_layout: str) -> None:
    """Rows whose shape is known; they hold floats of 4 bytes."""
    layout_of_rows(c, row_layout)
    c.dense_rows(**{name: tensor})
    reason = quantized.misplaced(tensor, 4)
    c.require(reason is None, f"`{name}` has {reason}")


def v4_pages(c: Checker, name: str, tensor: Tensor) -> None:
    """Rows of "v4" whose shape is known; pages may lie apart."""
    c.dtype(name, tensor, torch.uint8)
    whole_pages(c, **{name: tensor})
    reason = quantized.misplaced(tensor[:, :1], 2)
    c.require(reason is None, f"`{name}` has {reason}")


def v4_rows(c: Checker, name: str, tensor: Tensor) -> None:
    """Rows of "v4", of any number a page; pages may lie apart."""
    c.shape(name, tensor, f"pages P 1 {quantized.V4_ROW}")
    v4_pages(c, name, tensor)


def page_size(c: Checker) -> None:
    page = c.sizes["P"]
    c.require(
        page % 16 == 0 and page > 0,
        f"the cache has pages of {page} slots, expected a multiple of 16.",
    )


def whole_pages(c: Checker, **caches: Tensor) -> None:
    """Of a cache that is written: pages may lie apart, what is in them not."""
    for name, cache in caches.items():
        if cache.numel() and not cache[0].is_contiguous():
            c.fail(
                f"`{name}` is not contiguous in its pages (strides {list(cache.stride())}), "
                "expected pages that each lie in one piece: only the first dimension may be "
                "strided."
            )
        c.apart(name, cache, "pages", inner=cache.ndim - 1)


# the only other value of each, beside 0, and what the two mean
_LATENT_MODES = {
    "ckvkr_repo_mode": "0 for two caches, 1 for rows",
    "quant_scale_repo_mode": "0 without scales, 1 for scales in the rows",
}


def latent_mode(
    c: Checker,
    kv_cache_quant_mode: int,
    query_quant_mode: int,
    tile_size: int,
    **repo_modes: Any,
) -> bool:
    """Whether a prolog writes rows of 8 bits: by torch_npu's words."""
    c.require(
        kv_cache_quant_mode in (0, 3),
        f"`kv_cache_quant_mode` is {kv_cache_quant_mode}, expected 0 (none) or 3 (a scale for each "
        "token and tile).",
    )
    c.require(
        query_quant_mode == 0,
        f"`query_quant_mode` is {query_quant_mode}, expected 0: the queries keep their dtype.",
    )
    c.require(
        tile_size == quantized.TILE,
        f"`tile_size` is {tile_size}, expected {quantized.TILE} (the values that share a scale).",
    )
    kv_quantized = kv_cache_quant_mode == 3
    for name, meaning in _LATENT_MODES.items():
        c.require(
            repo_modes[name] == int(kv_quantized),
            f"`{name}` is {repo_modes[name]}, expected {int(kv_quantized)} in kv_cache_quant_mode "
            f"{kv_cache_quant_mode} ({meaning}).",
        )
    return kv_quantized


def rope_head_dim(c: Checker, size: int) -> None:
    """Of rows of 8 bits."""
    c.require(
        size in (quantized.ROTARY, 0),
        f"`rope_head_dim` is {size}, expected {quantized.ROTARY} or 0: the rotary keys of a row.",
    )


def latent_caches(
    kv_cache: Tensor, kr_cache: Tensor, sin: Tensor, kv_quantized: bool
) -> dict[str, tuple[Tensor, str]]:
    """Their shapes, for a prolog's table."""
    if kv_quantized:
        bare = sin.ndim > 0 and sin.shape[-1] == 0
        size = quantized.row_bytes(0 if bare else quantized.ROTARY)
        return dict(kv_cache=(kv_cache, f"pages P 1 {size}"))
    return dict(kv_cache=(kv_cache, "pages P 1 R"), kr_cache=(kr_cache, "pages P 1 Dr"))


def latents(
    c: Checker,
    kv_quantized: bool,
    kv_cache: Tensor,
    kr_cache: Tensor,
    kv_cache_dtype: int | None,
    row_layout: str,
    k_nope_clip_alpha: Tensor | None,
) -> None:
    """What is special about rows; their shape is known."""
    alpha = k_nope_clip_alpha
    layout_of_rows(c, row_layout)
    if not kv_quantized:
        for name, given in (
            ("k_nope_clip_alpha", alpha),
            ("kv_cache_dtype", kv_cache_dtype),
        ):
            c.require(
                given is None, f"`{name}` is given, expected None: latents are not quantized."
            )
        return
    values(c, "kv_cache", kv_cache, kv_cache_dtype, "kv_cache_dtype")
    rows(c, "kv_cache", kv_cache, row_layout)
    whole_pages(c, kv_cache=kv_cache)
    c.require(
        kr_cache.numel() == 0,
        f"`kr_cache` has shape {list(kr_cache.shape)}, expected one with a size of 0: the rotary "
        "keys are in the rows of `kv_cache`.",
    )
    for letter, sizes in (("R", (quantized.LATENT,)), ("Dr", (quantized.ROTARY, 0))):
        c.require(
            c.sizes[letter] in sizes,
            f"{letter} is {c.sizes[letter]}, expected {' or '.join(map(str, sizes))}: rows have no "
            "other.",
        )
    clip(c, alpha)


def clip(c: Checker, alpha: Tensor | None) -> None:
    if alpha is not None:
        c.dtype("k_nope_clip_alpha", alpha, torch.float32)
        c.shape("k_nope_clip_alpha", alpha, "1")


def index_mode(c: Checker, kv_cache_quant_mode: int) -> bool:
    """Whether an indexer's prolog writes a cache of 8 bits."""
    c.require(
        kv_cache_quant_mode in (0, 3),
        f"`kv_cache_quant_mode` is {kv_cache_quant_mode}, expected 0 (none) or 3 (a scale for each "
        "index key).",
    )
    return kv_cache_quant_mode == 3


def index_keys(
    c: Checker, index_quantized: bool, cache: Tensor, scales: Tensor | None, index_hadamard: bool
) -> None:
    """An index cache [pages, P, 1, Di] whose shape is known, its scales, and the transform."""
    if not index_quantized:
        c.require(
            scales is None,
            "`index_k_scale_cache` is given, expected None in kv_cache_quant_mode 0.",
        )
        c.require(
            not index_hadamard,
            "`index_hadamard` is True, expected False in kv_cache_quant_mode 0: the transform "
            "belongs to caches of 8 bits.",
        )
        return
    kind = quantized.kind_of(cache.dtype)
    if kind is None:
        came = str(cache.dtype).removeprefix("torch.")
        c.fail(
            f"`index_k_cache` is {came}, expected float8_e4m3fn or int8 in kv_cache_quant_mode 3. "
            "Of packed pages pass custom.index_cache_views(pages, 'fp8').",
            TypeError,
        )
        raise AssertionError
    if scales is None:
        c.fail("`index_k_scale_cache` is missing, expected [pages, P, 1], a scale for each key.")
        raise AssertionError
    c.require(
        c.sizes["Di"] == quantized.INDEX,
        f"the index dim Di is {c.sizes['Di']}, expected {quantized.INDEX}: caches of 8 bits have "
        "no other.",
    )
    c.dtype("index_k_scale_cache", scales, *SCALES[kind])
    c.shape("index_k_scale_cache", scales, "pages P 1")
    whole_pages(c, index_k_cache=cache, index_k_scale_cache=scales)


def of_kind(c: Checker, name: str, cache: Tensor, argument: str, kind: str) -> None:
    """A cache of bytes, or of the values that `kind` says."""
    wanted = quantized.VALUES[kind]
    if cache.dtype not in (torch.uint8, wanted):
        came, dtype = (str(each).removeprefix("torch.") for each in (cache.dtype, wanted))
        c.fail(
            f"`{name}` is {came}, expected {dtype} or uint8 with {argument}={kind!r}.", TypeError
        )


def unpacked(
    c: Checker,
    kind: str,
    cache: Tensor,
    scales: Tensor | None,
    name: str = "index_k_cache",
    argument: str = "index_kind",
) -> tuple[Tensor, Tensor | None]:
    """(values [pages, P, 1, 128], scales) of an index cache, the argument `name`, whose kind is in
    `argument`: packed pages without `scales`."""
    if scales is None and kind == "fp8":
        c.dtype(name, cache, torch.uint8)
        if cache.ndim == 3:
            c.shape(name, cache, f"pages P {quantized.PACKED}")
        else:
            c.shape(name, cache, f"pages P 1 {quantized.PACKED}")
        whole_pages(c, **{name: cache})
        reason = quantized.misplaced(cache, 4)
        c.require(reason is None, f"`{name}` has {reason}")
        return quantized.index_cache_views(cache, kind)
    of_kind(c, name, cache, argument, kind)
    c.shape(name, cache, f"pages P 1 {quantized.INDEX}")
    c.dense_rows(**{name: cache})
    return cache.view(quantized.VALUES[kind]), scales
