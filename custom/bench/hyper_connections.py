# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Rows for hyper-connections and their gradients at DeepSeek-V4's sizes, beside plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..dispatch.reference.deepseek_v4 import hc_post, hc_post_grad, hc_post_pre, hc_pre, hc_pre_grad
from . import in_torch
from .case import Arguments, Case, Draw, Outputs

BF16, FLOAT = 2, 4  # bytes
PRO, FLASH = 7168, 4096
_OPTIONS = dict(hc_mult=4, hc_sinkhorn_iters=20, norm_eps=1e-6, hc_eps=1e-6)


def _whole(arguments: Arguments) -> tuple[Arguments, Callable[[Outputs], Outputs]]:
    return arguments, lambda outputs: outputs


def _streams(draw: Draw, tokens: int, h: int) -> Arguments:
    wide = torch.float32
    return dict(
        residual=draw.normal(tokens, 4, h),
        x=draw.normal(tokens, h),
        post=draw.normal(tokens, 4, dtype=wide),
        comb=draw.normal(tokens, 4, 4, dtype=wide),
    )


def _gates(draw: Draw, h: int) -> Arguments:
    wide = torch.float32
    return _OPTIONS | dict(
        hc_fn=draw.normal(24, 4 * h, dtype=wide, std=(4 * h) ** -0.5),
        hc_scale=draw.normal(3, dtype=wide),
        hc_base=draw.normal(24, dtype=wide),
        norm_weight=draw.normal(h, dtype=wide),
    )


def _case(
    op: str,
    make: Callable[[Draw], Arguments],
    moved: int,
    products: int,
    tokens: int,
    h: int,
    by_torch: Callable[..., Any],
) -> Case:
    """`moved`: rows of h that a token reads and writes; `products`: with hc_fn."""
    return Case(
        op,
        f"h {h}, {tokens} tokens",
        make,
        _whole,
        bytes=float(BF16 * tokens * moved * h + (FLOAT * 24 * 4 * h if products else 0)),
        flops=2.0 * tokens * h * (products * 24 * 4 + 16),
        shape=dict(b=tokens, h=h),
        peers=in_torch.peers(by_torch),
    )


def pre_case(tokens: int, h: int) -> Case:
    def make(draw: Draw) -> Arguments:
        return dict(x=draw.normal(tokens, 4, h)) | _gates(draw, h)

    return _case("npu_hc_pre", make, 5, 1, tokens, h, hc_pre.forward)


def pre_grad_case(tokens: int, h: int) -> Case:
    def make(draw: Draw) -> Arguments:
        return (
            dict(x=draw.normal(tokens, 4, h))
            | _gates(draw, h)
            | dict(
                d_y=draw.normal(tokens, h),
                d_post=draw.normal(tokens, 4, dtype=torch.float32),
                d_comb=draw.normal(tokens, 4, 4, dtype=torch.float32),
            )
        )

    return _case("npu_hc_pre_grad", make, 9, 3, tokens, h, hc_pre_grad.backward)


def post_case(tokens: int, h: int) -> Case:
    def make(draw: Draw) -> Arguments:
        return _streams(draw, tokens, h)

    return _case("npu_hc_post", make, 9, 0, tokens, h, hc_post.forward)


def post_grad_case(tokens: int, h: int) -> Case:
    def make(draw: Draw) -> Arguments:
        return _streams(draw, tokens, h) | dict(d_out=draw.normal(tokens, 4, h))

    return _case("npu_hc_post_grad", make, 14, 0, tokens, h, hc_post_grad.backward)


def post_pre_case(tokens: int, h: int) -> Case:
    def make(draw: Draw) -> Arguments:
        return _streams(draw, tokens, h) | _gates(draw, h)

    return _case("npu_hc_post_pre", make, 10, 1, tokens, h, hc_post_pre.forward)


def _decoding(case: Callable[[int, int], Case]) -> Callable[[bool], list[Case]]:
    def cases(small: bool) -> list[Case]:
        if small:
            return [case(4, 256)]
        return [case(tokens, h) for h in (PRO, FLASH) for tokens in (1, 32, 128, 4096)]

    return cases


def _training(case: Callable[[int, int], Case]) -> Callable[[bool], list[Case]]:
    return lambda small: [case(4, 256)] if small else [case(4096, h) for h in (PRO, FLASH)]


PRESETS: dict[str, Callable[[bool], list[Case]]] = {
    "npu_hc_pre": _decoding(pre_case),
    "npu_hc_pre_grad": _training(pre_grad_case),
    "npu_hc_post": _decoding(post_case),
    "npu_hc_post_grad": _training(post_grad_case),
    "npu_hc_post_pre": _decoding(post_pre_case),
}
