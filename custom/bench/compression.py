# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Rows for the compressor at DeepSeek-V4-Pro's sizes: entries of attention (512 channels, windows
of 4 that overlap, or of 128) and of the indexer (128 channels), and for GLM-5.3-Flash's pooled
index keys; no installed peer has it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .case import Arguments, Case, Draw, Outputs

BF16, FP32 = 2, 4
HIDDEN, ROTARY = 7168, 64


def _whole(arguments: Arguments) -> tuple[Arguments, Callable[[Outputs], Outputs]]:
    return arguments, lambda outputs: outputs


def _layer(draw: Draw, h: int, d: int, m: int) -> Arguments:
    coff = _coff(m)
    return dict(
        wkv=draw.normal(coff * d, h, std=h**-0.5),
        wgate=draw.normal(coff * d, h, std=h**-0.5),
        ape=draw.normal(m, coff * d, dtype=torch.float32),
        norm_weight=1 + draw.normal(d, dtype=torch.float32, std=0.1),
        rope_head_dim=min(ROTARY, d),
        cmp_ratio=m,
        coff=coff,
        rotary_mode=2,
    )


def _coff(m: int) -> int:
    """DeepSeek-V4's windows of 4 overlap."""
    return 2 if m == 4 else 1


def _angles(draw: Draw, rows: tuple[int, ...], d: int) -> Arguments:
    angle = draw.normal(*rows, min(ROTARY, d) // 2, dtype=torch.float32)
    return dict(rope_sin=angle.sin(), rope_cos=angle.cos())


def decode_case(b: int, d: int, m: int, s: int = 1, h: int = HIDDEN) -> Case:
    """Every request closes a window."""
    coff = _coff(m)
    page = 4 if m == 4 else 8
    ring = -(-(coff * m + s) // page)
    entries = 64

    def make(draw: Draw) -> Arguments:
        states = draw.normal(b * ring, page, 2 * coff * d, dtype=torch.float32)
        return _layer(draw, h, d, m) | dict(
            x=draw.normal(b, s, h),
            state_cache=states,
            **_angles(draw, (b, -(-s // m)), d),
            state_block_table=draw.table(b, ring),
            start_pos=draw.full(b, value=4 * m - s),
            cache_mode=2,
            cmp_cache=draw.normal(b, entries, 1, d),
            cmp_block_table=draw.table(b, 1),
        )

    width = 2 * coff * d
    read = FP32 * b * (coff * m - s) * 2 * d  # of each row the half that counts
    return Case(
        "npu_compressor",
        f"{b} x {s} tokens, {d} channels, windows of {m}",
        make,
        _whole,
        bytes=float(BF16 * width * h + read + FP32 * b * s * width + BF16 * b * (s * h + 2 * d)),
        flops=2.0 * b * s * h * width,
        shape=dict(b=b, s=s, d=d, m=m),
    )


def pool_case(b: int, d: int = 128, m: int = 4, h: int = 4096) -> Case:
    """Pooled index keys of a step: every request closes a pool."""

    def make(draw: Draw) -> Arguments:
        return dict(
            norm_weight=None,
            rope_head_dim=0,
            cmp_ratio=m,
            wkv=draw.normal(d, h, std=h**-0.5),
            wgate=draw.normal(d, h, std=h**-0.5),
            ape=draw.normal(m, d, dtype=torch.float32),
            ln_weight=1 + draw.normal(d, dtype=torch.float32, std=0.1),
            ln_bias=draw.normal(d, dtype=torch.float32, std=0.1),
            x=draw.normal(b, 1, h),
            state_cache=draw.normal(b, m, 2 * d, dtype=torch.float32),
            rope_sin=None,
            rope_cos=None,
            state_block_table=draw.table(b, 1),
            start_pos=draw.full(b, value=4 * m - 1),
            cache_mode=2,
            cmp_cache=draw.normal(b, 64, 1, d),
            cmp_block_table=draw.table(b, 1),
            return_cmp_kv=False,
        )

    state = FP32 * b * m * 2 * d  # m - 1 read, one written
    return Case(
        "npu_compressor",
        f"{b} x 1 tokens, {d} channels, pools of {m}",
        make,
        _whole,
        bytes=float(BF16 * 2 * d * h + state + BF16 * b * (h + d)),
        flops=4.0 * b * h * d,
        shape=dict(b=b, s=1, d=d, m=m),
    )


def dense_case(t: int, d: int, m: int, h: int = HIDDEN) -> Case:
    coff = _coff(m)

    def make(draw: Draw) -> Arguments:
        return _layer(draw, h, d, m) | dict(
            x=draw.normal(1, t, h), **_angles(draw, (1, -(-t // m)), d)
        )

    return Case(
        "npu_compressor_dense",
        f"{t} tokens, {d} channels, windows of {m}",
        make,
        _whole,
        bytes=float(BF16 * (2 * coff * d * h + t * h + t // m * d)),
        flops=4.0 * t * h * coff * d,
        shape=dict(t=t, d=d, m=m),
    )


def grad_case(t: int, d: int, m: int, h: int = HIDDEN) -> Case:
    forward, coff = dense_case(t, d, m, h), _coff(m)

    def make(draw: Draw) -> Arguments:
        return forward.drawn(draw) | dict(d_out=draw.normal(1, -(-t // m), d))

    return Case(
        "npu_compressor_dense_grad",
        forward.label,
        make,
        _whole,
        bytes=float(BF16 * (6 * coff * d * h + 2 * t * h + t // m * d)),
        flops=12.0 * t * h * coff * d,
        shape=forward.shape,
    )


def _decode(small: bool) -> list[Case]:
    if small:
        return [decode_case(2, 32, 4, 1, 64), decode_case(2, 32, 8, 1, 64)]
    of = [(d, m, b) for d, m in ((512, 4), (128, 4), (512, 128)) for b in (1, 32, 128)]
    pools = [pool_case(b) for b in (1, 32, 128)]
    return [decode_case(b, d, m) for d, m, b in of] + pools


def _dense(small: bool) -> list[Case]:
    return [dense_case(40, 32, 4, 64)] if small else [dense_case(4096, 512, m) for m in (4, 128)]


def _grad(small: bool) -> list[Case]:
    return [grad_case(40, 32, 4, 64)] if small else [grad_case(4096, 512, m) for m in (4, 128)]


PRESETS = {
    "npu_compressor": _decode,
    "npu_compressor_dense": _dense,
    "npu_compressor_dense_grad": _grad,
}
