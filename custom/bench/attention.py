# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Rows for fused attention, with torch's own back ends side by side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from .case import Arguments, Case, Draw, Outputs

BF16 = 2


def _visible(s: int, s2: int, causal: bool) -> float:
    return s * (s2 - s) + s * (s + 1) / 2 if causal else float(s * s2)


def _first_heads(arguments: Arguments) -> tuple[Arguments, Callable[[Outputs], Outputs]]:
    """The first head of the first request, through all its query rows."""
    names = ("q", "k", "v", "o", "lse", "grad_o")
    piece = arguments | {n: arguments[n][:1, :1] for n in names if n in arguments}
    return piece, lambda outputs: [out[:1, :1] for out in outputs]


def _sdpa(backend: SDPBackend) -> Callable[[Arguments], Callable[[], Any] | None]:
    def prepare(arguments: Arguments) -> Callable[[], Any] | None:
        q, k, v = (arguments[name] for name in "qkv")
        if q.device.type != "cuda" or q.shape[1] != k.shape[1]:
            return None

        def forward() -> Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(q, k, v, is_causal=arguments["causal"])

        return forward

    return prepare


def case(op: str, b: int, n: int, nk: int, s: int, s2: int, d: int, causal: bool = True) -> Case:
    backward = op.endswith("_backward")

    def make(device: torch.device, seed: int) -> Arguments:
        draw = Draw(device, seed)
        forward = dict(
            q=draw.normal(b, n, s, d),
            k=draw.normal(b, nk, s2, d),
            v=draw.normal(b, nk, s2, d),
            causal=causal,
        )
        if not backward:
            return forward
        o, lse = torch.ops.custom.npu_fused_attention(**forward)
        return forward | dict(grad_o=draw.normal(*o.shape), o=o, lse=lse)

    products, reads = (5, 4) if backward else (2, 2)
    label = f"B{b} H{n}{f'/{nk}' if nk != n else ''} D{d}, {s} x {s2}{', causal' if causal else ''}"
    peers = {
        "cudnn": _sdpa(SDPBackend.CUDNN_ATTENTION),
        "flash": _sdpa(SDPBackend.FLASH_ATTENTION),
    }
    return Case(
        op,
        label,
        make,
        _first_heads if n == nk else _first_group(n // nk),
        bytes=float(BF16 * reads * d * b * (n * s + nk * s2)),
        flops=2.0 * products * b * n * d * _visible(s, s2, causal),
        shape=dict(b=b, n=n, s=s, d=d),
        # torch's backward runs on its forward's stream, which a captured graph is not
        peers=peers if s > 1 and not backward else {},
    )


def _first_group(
    size: int,
) -> Callable[[Arguments], tuple[Arguments, Callable[[Outputs], Outputs]]]:
    def part(arguments: Arguments) -> tuple[Arguments, Callable[[Outputs], Outputs]]:
        piece = arguments | {
            n: arguments[n][:1, : 1 if n in "kv" else size]
            for n in ("q", "k", "v", "o", "lse", "grad_o")
            if n in arguments
        }
        return piece, lambda outputs: [out[:1, :size] for out in outputs]

    return part


def _forward(small: bool) -> list[Case]:
    op = "npu_fused_attention"
    if small:
        return [case(op, 1, 4, 4, 512, 512, 64)]
    dense = [case(op, 4, 16, 16, s, s, d) for s, d in ((4096, 128), (16384, 128), (4096, 64))]
    return [*dense, case(op, 4, 16, 4, 4096, 4096, 128), case(op, 32, 32, 8, 1, 32768, 128, False)]


def _backward(small: bool) -> list[Case]:
    op = "npu_fused_attention_backward"
    if small:
        return [case(op, 1, 4, 4, 512, 512, 64)]
    return [case(op, 4, 16, 16, s, s, d) for s, d in ((4096, 128), (16384, 128), (4096, 64))]


PRESETS = {"npu_fused_attention": _forward, "npu_fused_attention_backward": _backward}
