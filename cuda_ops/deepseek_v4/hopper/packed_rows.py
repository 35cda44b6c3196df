# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Rows of 584 bytes as words of 4: in a page, 144 words a row (448 e4m3, 64 bfloat16), then 2 a row
with the exponents of its scales.  What they stand for is rounded once, as plain kernels do."""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...common.gluon_names import cp_async
from ...sparse_attention.hopper.kv_quant_sparse_flash_attention import E4M3

ROW_WORDS = 144
# four e4m3 times a power of two, in pairs of bfloat16
SCALED = gl.constexpr("""{
    .reg .b16 low, high, x, y;
    .reg .b32 pair;
    .reg .f32 a, b;
    mov.b32 {low, high}, $4;
    cvt.rn.f16x2.e4m3x2 pair, low;
    mov.b32 {x, y}, pair;
    cvt.f32.f16 a, x;
    cvt.f32.f16 b, y;
    cvt.rn.bf16x2.f32 pair, b, a;
    mul.rn.bf16x2 pair, pair, $5;
    mov.b32 {$0, $1}, pair;
    cvt.rn.f16x2.e4m3x2 pair, high;
    mov.b32 {x, y}, pair;
    cvt.f32.f16 a, x;
    cvt.f32.f16 b, y;
    cvt.rn.bf16x2.f32 pair, b, a;
    mul.rn.bf16x2 pair, pair, $5;
    mov.b32 {$2, $3}, pair;
}""")


@gluon.jit
def floats_of(words):
    """Four tensors of what the bytes of words are as e4m3."""
    return gl.inline_asm_elementwise(
        E4M3,
        "=f,=f,=f,=f,r",
        [words],
        (gl.float32, gl.float32, gl.float32, gl.float32),
        True,
        1,
    )


@gluon.jit
def scaled(words, by):
    """Four tensors of the bits of bfloat16: the bytes of words as e4m3, times the pairs `by`."""
    return gl.inline_asm_elementwise(
        SCALED,
        "=h,=h,=h,=h,r,r",
        [words, by],
        (gl.int16, gl.int16, gl.int16, gl.int16),
        True,
        1,
    )


@gluon.jit
def ask_words(
    words, place, UNIT: gl.constexpr, WORD: gl.constexpr, COUNT: gl.constexpr, OF: gl.constexpr
):
    """COUNT words of the rows at `place`, zeros where absent."""
    d = WORD + gl.arange(0, COUNT, layout=gl.SliceLayout(0, OF))
    at = (words + gl.maximum(place, 0).to(gl.int64) * UNIT)[:, None] + d[None, :]
    return gl.load(at, mask=(place >= 0)[:, None], other=0)


@gluon.jit
def copy_words(words, place, UNIT: gl.constexpr, WORD: gl.constexpr, to, OF: gl.constexpr):
    """The same, to shared memory."""
    d = WORD + gl.arange(0, to.shape[1], layout=gl.SliceLayout(0, OF))
    at = (words + gl.maximum(place, 0).to(gl.int64) * UNIT)[:, None] + d[None, :]
    cp_async(to, at, mask=(place >= 0)[:, None])


@gluon.jit
def two_bytes(words):
    """Where words lie, as bfloat16."""
    return words.to(gl.pointer_type(gl.bfloat16))


@gluon.jit
def copy_rotary(words, place, UNIT: gl.constexpr, right, OF: gl.constexpr):
    """The last 64 columns, of bfloat16 as they are."""
    d = 224 + gl.arange(0, 64, layout=gl.SliceLayout(0, OF))
    rows = two_bytes(words) + gl.maximum(place, 0).to(gl.int64) * (2 * UNIT)
    cp_async(right.slice(192, 64, dim=1), rows[:, None] + d[None, :], mask=(place >= 0)[:, None])


@gluon.jit
def ask_scales(words, place, offset, HALF: gl.constexpr):
    """The exponents of half a row."""
    return gl.load(words + gl.maximum(offset, 0) + HALF, mask=place >= 0, other=0)


@gluon.jit
def put(words, scales, half, PART: gl.constexpr):
    """64 columns of values: the product rounded once, which of a power of two and bfloat16 is the
    product of bfloat16."""
    by = ((scales >> (8 * PART)) & 255)[:, None]
    if half.dtype == gl.bfloat16:
        by = gl.convert_layout((by * 0x800080).broadcast_to(words.shape), words.type.layout)
        a, b, c, d = scaled(words, by)
        wide = gl.join(gl.join(a, c), gl.join(b, d)).to(gl.bfloat16, bitcast=True)
    else:
        by = (by << 23).to(gl.float32, bitcast=True)
        a, b, c, d = floats_of(words)
        wide = gl.join(gl.join(a * by, c * by), gl.join(b * by, d * by)).to(half.dtype)
    half.slice(PART * 64, 64, dim=1).store(gl.reshape(wide, [words.shape[0], 64]))


@gluon.jit
def put_rotary(words, right):
    """The last 64 columns."""
    low = (words << 16).to(gl.float32, bitcast=True)
    high = (words & -65536).to(gl.float32, bitcast=True)
    to = right.slice(192, 64, dim=1)
    to.store(gl.reshape(gl.join(low, high).to(right.dtype), [words.shape[0], 64]))


@gluon.jit
def scales_of(entry, tiles, outer, inner, valid, caches, strides, P: gl.constexpr):
    """Both halves' exponents of keys of a row."""
    at = caches.ori + (outer * strides[10] + caches.extents[8] * 144 + inner * 2)
    there = valid
    if P.ENTRIES:
        there = valid & (entry < tiles * 64)
    low = gl.load(at, mask=there, other=0)
    high = gl.load(at + 1, mask=there, other=0)
    if P.ENTRIES:
        at = caches.cmp + (outer * strides[11] + caches.extents[9] * 144 + inner * 2)
        there = valid & (entry >= tiles * 64)
        low = gl.where(there, gl.load(at, mask=there, other=0), low)
        high = gl.where(there, gl.load(at + 1, mask=there, other=0), high)
    return low, high


def page_words(rows: Tensor | None) -> int:
    """From page to page, 0 where there is no second one."""
    return 0 if rows is None or rows.shape[0] == 1 else rows.stride(0) // 4


def unit(*caches: Tensor | None) -> int:
    """Words that places are counted in; 0 where rows are no whole 16 bytes, or 32 bits do not
    number them."""
    most = 16
    for rows in caches:
        while page_words(rows) % most:
            most //= 2
    far = max((rows.shape[0] - 1) * page_words(rows) for rows in caches if rows is not None)
    return most if most >= 4 and far // most < 2**31 - 2**20 else 0


def steps(ori: Tensor, cmp: Tensor | None) -> tuple[int, ...]:
    """In units, (page, row) of both caches; in words, their pages."""
    by = unit(ori, cmp)
    pages = page_words(ori), page_words(cmp)
    return (pages[0] // by, ROW_WORDS // by, pages[1] // by, ROW_WORDS // by, *pages)
