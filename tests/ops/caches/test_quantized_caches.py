# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What writes caches of 8 bits: every byte, against formulas of this file's own in numpy."""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np
import pytest
import torch
from custom.dispatch.reference.common import quantizers
from torch import Tensor

import custom

from ...support import interpreted
from ...support.calls import runs_once
from ...support.kernels import INTERPRETED
from ...support.quantization import quantized
from ...support.ragged import moved

FORMATS = [("fp8", "ue8m0"), ("fp8", "fp32"), ("int8", "ue8m0")]
# Triton's interpreter cuts floats off where it makes bf16 of them
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def hostile(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Magnitudes from 2**-40 to 2**12, a tile in five of zeros, signs on every zero."""
    rows = math.prod(shape[:-1])
    x = torch.randn(rows, shape[-1]) * torch.exp2(torch.randint(-40, 13, (rows, 1)).float())
    x[::5] *= 0
    x[1::7, :3] = 448.0
    return x.view(shape).to(dtype)


def pages_of(pages: int, page: int, size: int, between: int = 0) -> Tensor:
    """uint8 [pages, page, size] full of a pattern, with as many bytes between the pages."""
    step = page * size + between
    return (
        (torch.arange(pages * step) % 251)
        .to(torch.uint8)
        .as_strided((pages, page, size), (step, size, 1))
    )


def some_slots(count: int, total: int, dtype: torch.dtype = torch.int32) -> Tensor:
    slots = torch.randperm(total)[:count]
    slots[::4] = torch.tensor([-1, total, -(2**31), 2**31 - 1])[torch.arange(len(slots[::4])) % 4]
    return slots.to(dtype)


def there(slots: Tensor, total: int) -> list[tuple[int, int]]:
    return [(i, s) for i, s in enumerate(slots.tolist()) if 0 <= s < total]


@pytest.mark.parametrize("page, between", [(16, 0), (64, 132), (64, 4), (1024, 0)])
@pytest.mark.parametrize("kind, scale_format", FORMATS[:2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packed_index_pages(page, between, kind, scale_format, dtype, device, backend):
    """As vLLM, SGLang and DeepGEMM lay them out: value (t, d) of a page in byte t * 128 + d, scale
    t in bytes P * 128 + 4 t."""
    k, slots = hostile(30, 128, dtype=dtype), some_slots(30, 3 * page)
    pages = pages_of(3, page, 132, between)
    wanted = [bytearray(each.contiguous().numpy().tobytes()) for each in pages]
    values, scales = quantized(k, kind, scale_format)
    for i, slot in there(slots, 3 * page):
        raw, t = wanted[slot // page], slot % page
        raw[t * 128 : t * 128 + 128] = values[i].tobytes()
        struct.pack_into("<f", raw, page * 128 + 4 * t, scales[i])
    cache = moved(pages_of(3, page, 132, between), device)
    with runs_once("npu_index_cache_write", backend):
        views = custom.index_cache_views(cache, kind)
        custom.npu_index_cache_write(
            k.to(device), *views, slots.to(device), kind=kind, scale_format=scale_format
        )
    for got, want in zip(cache.cpu(), wanted, strict=True):
        assert got.contiguous().numpy().tobytes() == bytes(want)


@pytest.mark.parametrize("scale", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
def test_split_index_cache(scale, index, device):
    """int8 values and scales in tensors of their own, as torch_npu has them."""
    k, slots = hostile(40, 128), some_slots(40, 5 * 32, index)
    k[3] *= 0
    values = torch.full((5, 32, 1, 128), 77, dtype=torch.int8)
    scales = torch.full((5, 32, 1), 3.0, dtype=scale)
    want_values, want_scales = values.clone(), scales.clone()
    new, by = quantized(k, "int8", "fp32")
    for i, slot in there(slots, 160):
        want_values[slot // 32, slot % 32, 0] = torch.from_numpy(new[i].view(np.int8))
        want_scales[slot // 32, slot % 32, 0] = torch.tensor(by[i]).to(scale)
    got = values.to(device), scales.to(device)
    custom.npu_index_cache_write(k.to(device), *got, slots.to(device), kind="int8")
    assert torch.equal(got[0].cpu(), want_values) and torch.equal(got[1].cpu(), want_scales)
    assert got[1].isfinite().all()


def test_a_scale_beyond_float16_is_the_largest_one(device):
    values = torch.zeros(1, 16, 1, 128, dtype=torch.int8, device=device)
    scales = torch.zeros(1, 16, 1, dtype=torch.float16, device=device)
    k = torch.full((1, 128), 1e7, device=device)
    custom.npu_index_cache_write(k, values, scales, torch.tensor([2], device=device), kind="int8")
    assert scales[0, 2, 0] == 65504 and (values[0, 2] == 127).all()


@pytest.mark.parametrize("row_layout", ["nope_scale_rope", "nope_rope_scale"])
@pytest.mark.parametrize("kind, scale_format", FORMATS)
@pytest.mark.parametrize("page, between", [(16, 0), (64, 656), (128, 16)])
def test_latent_rows(row_layout, kind, scale_format, page, between, device, backend):
    """FlashMLA's and torch_npu's order, byte by byte; FlashMLA's tests put a row behind a page."""
    ckv, slots = hostile(20, 512), some_slots(20, 2 * page)
    rope = torch.randn(20, 64).to(torch.float16 if between else torch.bfloat16)
    rows = pages_of(2, page, 656, between)
    wanted = [bytearray(each.contiguous().numpy().tobytes()) for each in rows]
    alpha = 0.75 if page == 128 else None
    tiles = ckv.unflatten(1, (4, 128))
    values, scales = quantized(tiles, kind, scale_format, 1.0 if alpha is None else alpha)
    at_rope, at_scale = (528, 512) if row_layout == "nope_scale_rope" else (512, 640)
    for i, slot in there(slots, 2 * page):
        raw, first = wanted[slot // page], slot % page * 656
        raw[first : first + 512] = values[i].tobytes()
        struct.pack_into("<4f", raw, first + at_scale, *scales[i])
        begin = first + at_rope
        raw[begin : begin + 128] = rope[i].view(torch.int16).numpy().tobytes()
    cache = moved(pages_of(2, page, 656, between), device)
    with runs_once("npu_latent_cache_write", backend):
        custom.npu_latent_cache_write(
            ckv.to(device),
            rope.to(device),
            cache[:, :, None],
            slots.to(device),
            kind=kind,
            row_layout=row_layout,
            scale_format=scale_format,
            k_nope_clip_alpha=None if alpha is None else torch.tensor([alpha], device=device),
        )
    for got, want in zip(cache.cpu(), wanted, strict=True):
        assert got.contiguous().numpy().tobytes() == bytes(want)


@pytest.mark.parametrize("page, step", [(64, 37440), (2, 1728), (16, 9344), (1, 586)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_v4_rows(page, step, dtype, device, backend):
    """FlashMLA's pages of DeepSeek-V4, byte by byte: rows of 448 values and 64 bfloat16, and behind
    the last of them 8 exponents a row, the eighth a zero."""
    x, slots = hostile(20, 7, 64, dtype=dtype), some_slots(20, 24 * page, torch.int64)
    ckv = x.view(20, 448)
    rope = torch.randn(20, 64).bfloat16()
    raw = (torch.arange(24 * step) % 251).to(torch.uint8).view(24, step)
    wanted = [bytearray(each.numpy().tobytes()) for each in raw]
    values, scales = quantized(x.bfloat16(), "fp8", "ue8m0")
    for i, slot in there(slots, 24 * page):
        into, t = wanted[slot // page], slot % page
        into[t * 576 : t * 576 + 448] = values[i].tobytes()
        into[t * 576 + 448 : t * 576 + 576] = rope[i].view(torch.int16).numpy().tobytes()
        exponents = [int(math.log2(each)) + 127 for each in scales[i]]
        into[page * 576 + t * 8 : page * 576 + t * 8 + 8] = bytes([*exponents, 0])
    cache = raw.to(device)
    rows = cache[:, : page * 584].view(24, page, 1, 584)
    with runs_once("npu_latent_cache_write", backend):
        custom.npu_latent_cache_write(
            ckv.to(device), rope.to(device), rows, slots.to(device), kind="fp8", row_layout="v4"
        )
    for got, want in zip(cache.cpu(), wanted, strict=True):
        assert got.numpy().tobytes() == bytes(want)


@pytest.mark.parametrize("row_layout", ["nope_scale_rope", "nope_rope_scale"])
@pytest.mark.parametrize("kind, scale_format", FORMATS)
def test_latent_rows_without_rotary_keys(row_layout, kind, scale_format, device, backend):
    """512 values and 4 scales, the same bytes in both orders."""
    page, between = 32, 528
    ckv, slots = hostile(20, 512), some_slots(20, 2 * page)
    rows = pages_of(2, page, 528, between)
    wanted = [bytearray(each.contiguous().numpy().tobytes()) for each in rows]
    values, scales = quantized(ckv.unflatten(1, (4, 128)), kind, scale_format)
    for i, slot in there(slots, 2 * page):
        raw, first = wanted[slot // page], slot % page * 528
        raw[first : first + 512] = values[i].tobytes()
        struct.pack_into("<4f", raw, first + 512, *scales[i])
    cache = moved(pages_of(2, page, 528, between), device)
    with runs_once("npu_latent_cache_write", backend):
        custom.npu_latent_cache_write(
            ckv.to(device),
            torch.zeros(20, 0, dtype=torch.bfloat16, device=device),
            cache[:, :, None],
            slots.to(device),
            kind=kind,
            row_layout=row_layout,
            scale_format=scale_format,
            rope_head_dim=0,
        )
    for got, want in zip(cache.cpu(), wanted, strict=True):
        assert got.contiguous().numpy().tobytes() == bytes(want)
    parts = custom.row_views(cache, row_layout)
    assert [part.shape[-1] for part in parts] == [512, 0, 4]
    assert torch.equal(custom.convert_rows(cache, "nope_scale_rope", "nope_rope_scale"), cache)


def one_latent(size: int, width: int, row_layout: str) -> dict[str, Any]:
    """A latent of `size` numbers, to be written to rows of `width` bytes."""
    return dict(
        ckv=torch.zeros(1, size),
        k_rope=torch.zeros(1, 64).bfloat16(),
        rows=torch.zeros(2, 16, 1, width, dtype=torch.uint8),
        slots=torch.zeros(1, dtype=torch.int32),
        kind="fp8",
        row_layout=row_layout,
    )


@pytest.mark.parametrize(
    "options, sentence",
    [
        (dict(rope_head_dim=32), "`rope_head_dim` is 32, expected 64 or 0: the rotary keys of a"),
        (dict(rope_head_dim=0), r"`k_rope` has shape \[1, 64\], expected"),
        (dict(k_rope=torch.zeros(1, 0).bfloat16()), r"`k_rope` has shape \[1, 0\], expected"),
        (
            dict(rope_head_dim=0, k_rope=torch.zeros(1, 0).bfloat16()),
            r"`rows` has shape .*656\], expected .*528",
        ),
        (
            dict(rope_head_dim=0, row_layout="v4"),
            "`rope_head_dim` is 0, expected 64: rows of row_layout 'v4' have no other",
        ),
    ],
)
def test_rotary_keys_of_another_size_are_refused(options, sentence):
    given = one_latent(512, 656, "nope_rope_scale")
    with pytest.raises(ValueError, match=f"^npu_latent_cache_write: {sentence}"):
        custom.npu_latent_cache_write(**given | options)


def test_v4_rows_read_back():
    """What a tile's scale and e4m3 give is exact in bfloat16; NaN and zeros stay what they are."""
    x = torch.randn(6, 512) * torch.exp2(torch.randint(-20, 9, (6, 1)).float())
    x[2], x[3, 70] = 0, torch.nan
    parts = quantizers.pack_v4_rows(x)
    back = quantizers.unpack_v4_rows(*parts)
    exact = quantizers.unpack_v4_rows(*parts, torch.float32)
    assert torch.allclose(back.float(), exact, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(back[:, 448:], x[:, 448:].bfloat16())
    assert not back[2].any()
    assert back.isnan().nonzero()[:, 0].unique().tolist() == [3]
    assert back.isnan()[3].view(8, 64).any(-1).tolist() == [False, True] + [False] * 6
    kept = [0, 1, 4, 5]
    off = (back[kept, :448].float() - x[kept, :448]).norm(dim=-1) / x[kept, :448].norm(dim=-1)
    assert (off > 0.01).all() and (off < 0.05).all()


@pytest.mark.parametrize(
    "options, sentence",
    [
        (dict(kind="int8"), "`kind` is 'int8', expected 'fp8': rows of row_layout 'v4'"),
        (dict(scale_format="fp32"), "`scale_format` is 'fp32', expected 'ue8m0': rows of row_lay"),
        (dict(k_nope_clip_alpha=torch.ones(1)), "`k_nope_clip_alpha` is given, expected None"),
        (dict(rows=torch.zeros(2, 16, 1, 656, dtype=torch.uint8)), "`rows` has shape"),
        (dict(ckv=torch.zeros(1, 512)), "`ckv` has shape"),
        (
            dict(rows=torch.zeros(2, 585, dtype=torch.uint8)[:, :584].view(2, 1, 1, 584)),
            "`rows` has strides .* expected multiples of 2",
        ),
        (
            dict(rows=torch.zeros(2, 16, 1, 600, dtype=torch.uint8)[..., :584]),
            "`rows` is not contiguous in its pages .* expected pages that each lie in one piece",
        ),
    ],
)
def test_v4_rows_that_are_refused(options, sentence):
    given = one_latent(448, 584, "v4")
    with pytest.raises(ValueError, match=f"^npu_latent_cache_write: {sentence}"):
        custom.npu_latent_cache_write(**given | options)
    assert not given["rows"].any()


@pytest.mark.parametrize("kind, scale_format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_queries(kind, scale_format, dtype, packed, device):
    shape = (21, 5, 128) if packed else (3, 7, 5, 128)
    q, weights = hostile(*shape, dtype=dtype), torch.randn(shape[:-1]).to(dtype)
    want, by = quantized(q, kind, scale_format)
    # heads and tokens apart
    wide = torch.zeros(*shape[:-2], 2 * shape[-2], 128, dtype=dtype, device=device)
    given = wide[..., ::2, :].copy_(q)
    got, folded, none = custom.quantize_index_query(
        given, weights.to(device), kind=kind, scale_format=scale_format
    )
    assert none is None and folded.dtype is torch.float32
    assert np.array_equal(got.cpu().view(torch.uint8).numpy(), want)
    assert torch.equal(folded.cpu(), weights.float() * torch.from_numpy(by))
    got, same, scale = custom.quantize_index_query(
        given, weights.to(device), kind=kind, scale_format=scale_format, fold=False
    )
    assert np.array_equal(got.cpu().view(torch.uint8).numpy(), want)
    assert torch.equal(same.cpu(), weights) and np.array_equal(scale.cpu().numpy(), by)


def sylvester(size: int) -> np.ndarray:
    """By the definition: the sign is the parity of the bits that row and column share."""
    return np.array([[(-1.0) ** bin(i & j).count("1") for j in range(size)] for i in range(size)])


def test_hadamard(device):
    x = torch.randn(3, 11, 128, device=device)
    got = custom.hadamard(x)
    want = x.cpu().double().numpy() @ sylvester(128) * 128**-0.5
    assert np.abs(got.cpu().double().numpy() - want).max() < 2e-6
    assert torch.allclose(custom.hadamard(got), x, atol=2e-6)
    # whole numbers stay exact: sums of 128 of them
    whole = torch.randint(-8, 9, (5, 128))
    exact = whole.double().numpy() @ sylvester(128)
    got = custom.hadamard(whole.half().to(device), 1.0).cpu().double().numpy()
    assert np.array_equal(got, exact)


@pytest.mark.parametrize("hadamard_round", ["bf16", "fp32"])
@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_transformed_before_they_are_quantized(kind, hadamard_round, device):
    """The same bytes as of what `hadamard` gives, once it is rounded as asked."""
    x = torch.randn(16, 128).bfloat16()
    turned = custom.hadamard(x.float())
    turned = turned.bfloat16() if hadamard_round == "bf16" else turned
    options = dict(index_hadamard=True, hadamard_round=hadamard_round)
    q = x.view(1, 4, 4, 128).to(device)
    weights = torch.ones(1, 4, 4, device=device)
    got, folded, _ = custom.quantize_index_query(q, weights, kind=kind, **options)
    want, by = quantized(turned, kind, "ue8m0")
    assert np.array_equal(got.cpu().view(torch.uint8).numpy().reshape(16, 128), want)
    assert np.array_equal(folded.cpu().numpy().ravel(), by)
    dtype = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}[kind]
    values = torch.zeros(1, 16, 1, 128, dtype=torch.uint8, device=device).view(dtype)
    scales = torch.zeros(1, 16, 1, device=device)
    custom.npu_index_cache_write(
        x.to(device), values, scales, torch.arange(16, device=device), kind=kind, **options
    )
    assert np.array_equal(values.cpu().view(torch.uint8).numpy().reshape(16, 128), want)


@pytest.mark.parametrize("eps", ["on amax", "on the scale"])
def test_writers_of_others(eps, device):
    """Power-of-two scales where the floor of the magnitude is put elsewhere (FlashMLA: on the
    scale); the same bytes wherever no floor is met.  A writer that multiplies by the reciprocal
    (DeepGEMM's tests) agrees exactly: the reciprocal is one of a power of two."""
    x = torch.randn(64, 128).bfloat16()
    amax = x.float().abs().amax(-1).double()
    floor = (amax.clamp(min=1e-4) / 448) if eps == "on amax" else (amax / 448).clamp(min=1e-4)
    scale = torch.exp2(floor.log2().ceil()).float()
    want = (x.float() * (1 / scale)[:, None]).to(torch.float8_e4m3fn)
    values, by, _ = custom.quantize_index_query(
        x[None].to(device), torch.ones(1, 64, device=device), kind="fp8"
    )
    assert torch.equal(values[0].cpu().view(torch.uint8), want.view(torch.uint8))
    assert torch.equal(by[0].cpu(), scale)


def test_a_reciprocal_of_an_fp32_scale_is_within_an_ulp(device):
    """vLLM's and SGLang's scales are no powers of two: amax / 448, and x times 1 / s or x / s."""
    x = torch.randn(2000, 128).bfloat16()
    values, scale, _ = custom.quantize_index_query(
        x[None].to(device), torch.ones(1, 2000, device=device), kind="fp8", scale_format="fp32"
    )
    other = (x.float() * (1 / scale[0].cpu())[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    off = (values[0].cpu().view(torch.uint8).int() - other.view(torch.uint8).int()).abs()
    assert off.max() <= 1 and (off > 0).float().mean() < 1e-3


def test_views_are_of_the_cache():
    pages = pages_of(3, 32, 132, 132)
    values, scales = custom.index_cache_views(pages, "fp8")
    assert values.data_ptr() == pages.data_ptr() and values.stride(0) == 33 * 132
    assert scales.data_ptr() == pages.data_ptr() + 32 * 128 and scales.stride(0) == 33 * 33
    assert torch.equal(custom.index_cache_views(pages[:, :, None], "fp8")[1], scales)
    rows = pages_of(3, 16, 656, 656)[:, :, None]
    for layout, (rope, scale) in (
        ("nope_scale_rope", (528, 512)),
        ("nope_rope_scale", (512, 640)),
    ):
        parts = custom.row_views(rows, layout)
        starts = [part.data_ptr() - rows.data_ptr() for part in parts]
        assert starts == [0, rope, scale]
        assert [part.shape[-1] for part in parts] == [512, 64, 4]


def test_rows_in_the_other_order():
    rows = pages_of(3, 16, 656, 656)[:, :, None]
    there = custom.convert_rows(rows, "nope_scale_rope", "nope_rope_scale")
    assert there.is_contiguous() and not torch.equal(there, rows)
    for part, other in zip(
        custom.row_views(rows, "nope_scale_rope"),
        custom.row_views(there, "nope_rope_scale"),
        strict=True,
    ):
        assert torch.equal(
            part.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)
        )
    assert torch.equal(custom.convert_rows(there, "nope_rope_scale", "nope_scale_rope"), rows)
    assert torch.equal(custom.convert_rows(rows, "nope_scale_rope", "nope_scale_rope"), rows)


@pytest.mark.parametrize(
    "error, call",
    {
        "index_cache_views: `kind` is 'int8', expected 'fp8'": lambda: custom.index_cache_views(
            torch.zeros(1, 16, 132, dtype=torch.uint8), "int8"
        ),
        "index_cache_views: `pages` is int8, expected uint8": lambda: custom.index_cache_views(
            torch.zeros(1, 16, 132, dtype=torch.int8), "fp8"
        ),
        r"index_cache_views: `pages` has shape \[1, 16, 130\], expected": (
            lambda: custom.index_cache_views(torch.zeros(1, 16, 130, dtype=torch.uint8), "fp8")
        ),
        "index_cache_views: `pages` has strides .* pages that each lie": (
            lambda: custom.index_cache_views(
                torch.zeros(2, 32, 132, dtype=torch.uint8)[:, ::2], "fp8"
            )
        ),
        "row_views: `row_layout` is 'rope', expected one of": lambda: custom.row_views(
            torch.zeros(1, 656, dtype=torch.uint8), "rope"
        ),
        "convert_rows: `dst` is 'x', expected one of": lambda: custom.convert_rows(
            torch.zeros(1, 656, dtype=torch.uint8), "nope_scale_rope", "x"
        ),
        "row_views: `rows` has strides .* multiples of 4": lambda: custom.row_views(
            torch.zeros(2, 657, dtype=torch.uint8)[:, :656], "nope_scale_rope"
        ),
    }.items(),
    ids=lambda x: x[:40] if isinstance(x, str) else "",
)
def test_views_that_are_refused(error, call):
    with pytest.raises((ValueError, TypeError), match=error):
        call()


@pytest.mark.parametrize("kind", ["mxfp8", "hif8", "fp4"])
def test_kinds_that_are_refused(kind):
    args = (torch.zeros(1, 128), torch.zeros(1, 16, 1, 128, dtype=torch.int8))
    with pytest.raises(ValueError, match=f"`kind` is '{kind}', expected one of 'fp8', 'int8'"):
        custom.npu_index_cache_write(
            *args, torch.zeros(1, 16, 1), torch.zeros(1, dtype=torch.int32), kind=kind
        )


def test_the_kind_must_be_the_caches():
    args = (torch.zeros(1, 128), torch.zeros(1, 16, 1, 128, dtype=torch.int8))
    with pytest.raises(TypeError, match="`values` is int8, expected float8_e4m3fn"):
        custom.npu_index_cache_write(
            *args, torch.zeros(1, 16, 1), torch.zeros(1, dtype=torch.int32), kind="fp8"
        )


def test_pages_in_the_same_memory():
    slots = torch.zeros(1, dtype=torch.int32)
    scales = torch.zeros(3, 16, 1)
    values = torch.zeros(1, 16, 1, 128, dtype=torch.int8)
    with pytest.raises(ValueError, match=r"`values` has strides .* in which pages overlap"):
        custom.npu_index_cache_write(
            torch.zeros(1, 128), values.expand(3, -1, -1, -1), scales, slots, kind="int8"
        )
    with pytest.raises(ValueError, match=r"`scales` has strides .* in which pages overlap"):
        custom.npu_index_cache_write(
            torch.zeros(1, 128),
            values.repeat(3, 1, 1, 1),
            scales[:1].expand(3, -1, -1),
            slots,
            kind="int8",
        )
    rows = torch.zeros(1, 16, 1, 656, dtype=torch.uint8).expand(3, -1, -1, -1)
    with pytest.raises(ValueError, match=r"`rows` has strides .* in which pages overlap"):
        custom.npu_latent_cache_write(
            torch.zeros(1, 512),
            torch.zeros(1, 64, dtype=torch.bfloat16),
            rows,
            slots,
            kind="fp8",
            row_layout="nope_scale_rope",
        )


def test_no_tensor_to_transform():
    with pytest.raises(TypeError, match=r"^npu_hadamard: `x` is None, expected a tensor\. Make it"):
        custom.hadamard(None)


@pytest.mark.parametrize(
    "kind, scale_format", [("fp8", "ue8m0"), ("fp8", "fp32"), ("int8", "fp32")]
)
def test_a_row_with_a_nan_is_one(kind, scale_format, device):
    """Not finite numbers: a value times its scale is NaN, and no other row is touched."""
    q = torch.randn(3, 4, 128).to(torch.float16).to(device)
    q[1, 2, 77] = torch.nan
    values, scale = torch.ops.custom.npu_quantize_index_query(
        q, torch.ones(3, 4).to(q), kind=kind, fold=False, scale_format=scale_format
    )
    row = (values.float() * scale[..., None]).isnan().any(-1)
    wrong = torch.zeros_like(row)
    wrong[1, 2] = True
    assert torch.equal(row, wrong)
    cache = torch.zeros(1, 16, 1, 128, device=device).to(values.dtype)
    scales = torch.zeros(1, 16, 1, device=device, dtype=torch.float16 if kind == "int8" else None)
    custom.npu_index_cache_write(
        q[:, 2].contiguous(),
        cache,
        scales,
        torch.arange(3, device=device),
        kind=kind,
        **({} if kind == "int8" else dict(scale_format=scale_format)),
    )
    row = (cache.float() * scales[..., None]).isnan().any(-1).flatten()
    assert row.tolist() == [False, True] + [False] * 14


def test_debug_finds_a_slot_written_twice(monkeypatch):
    monkeypatch.setattr(custom.config, "debug", True)
    with pytest.raises(ValueError, match="`slots` names a slot twice"):
        custom.npu_index_cache_write(
            torch.zeros(2, 128),
            torch.zeros(1, 16, 1, 128, dtype=torch.int8),
            torch.zeros(1, 16, 1),
            torch.tensor([3, 3]),
            kind="int8",
        )


@pytest.mark.skipif(INTERPRETED, reason="is the interpreter")
def test_under_the_interpreter():
    """The kernels on CPU tensors: every byte, on a machine without a GPU."""
    interpreted.passes("not refused and not views and not read_back", __file__)
