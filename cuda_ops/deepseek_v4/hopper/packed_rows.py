# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Rows of 584 bytes as words of 4: in a page, 144 words a row (448 e4m3, 64 bfloat16), then 2 a row
with the exponents of its scales.  What they stand for is rounded once, as plain kernels do."""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...sparse_attention.hopper.kv_quant_sparse_flash_attention import E4M3

ROW_WORDS = 144


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
def ask_words(
    words, place, UNIT: gl.constexpr, WORD: gl.constexpr, COUNT: gl.constexpr, OF: gl.constexpr
):
    """COUNT words of the rows at `place`, zeros where absent."""
    d = WORD + gl.arange(0, COUNT, layout=gl.SliceLayout(0, OF))
    at = (words + gl.maximum(place, 0).to(gl.int64) * UNIT)[:, None] + d[None, :]
    return gl.load(at, mask=(place >= 0)[:, None], other=0)


@gluon.jit
def ask_scales(words, place, offset, HALF: gl.constexpr):
    """The exponents of half a row."""
    return gl.load(words + gl.maximum(offset, 0) + HALF, mask=place >= 0, other=0)


@gluon.jit
def put(words, scales, half, PART: gl.constexpr):
    """64 columns of values: the product in float32, rounded once."""
    a, b, c, d = floats_of(words)
    by = (((scales >> (8 * PART)) & 255) << 23).to(gl.float32, bitcast=True)[:, None]
    wide = gl.join(gl.join(a * by, c * by), gl.join(b * by, d * by))
    to = half.slice(PART * 64, 64, dim=1)
    to.store(gl.reshape(wide.to(half.dtype), [words.shape[0], 64]))


@gluon.jit
def put_rotary(words, right):
    """The last 64 columns."""
    low = (words << 16).to(gl.float32, bitcast=True)
    high = (words & -65536).to(gl.float32, bitcast=True)
    to = right.slice(192, 64, dim=1)
    to.store(gl.reshape(gl.join(low, high).to(right.dtype), [words.shape[0], 64]))


@gluon.jit
def offsets_of(entry, tiles, outer, inner, valid, caches, page, other_page, P: gl.constexpr):
    """Where scales of keys lie, in words from where their cache begins, negative where absent;
    pages are so many words apart."""
    offset = outer * page + caches.ori_size * 144 + inner * 2
    if P.ENTRIES:
        other = outer * other_page + caches.cmp_size * 144 + inner * 2
        offset = gl.where(entry < tiles * 64, offset, other)
    return gl.where(valid, offset, -1).to(gl.int64)


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
