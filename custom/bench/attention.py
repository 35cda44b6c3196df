# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Rows for fused attention, with torch's own back ends side by side.

torch's backwards are called by themselves on what their forwards saved: through autograd a graph
could not hold them apart from the forward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from .case import Arguments, Case, Draw, Outputs
from .peers import (
    flash_attention_3,
    flash_attention_3_backward,
    flash_attention_4,
    flash_attention_4_backward,
)

BF16 = 2
Call = Callable[[], Any]
Prepare = Callable[[Arguments], Call | None]


def _visible(s: int, s2: int, causal: bool) -> float:
    return s * (s2 - s) + s * (s + 1) / 2 if causal else float(s * s2)


def _first_group(size: int) -> Callable[[Arguments], tuple[Arguments, Any]]:
    """The first `size` heads and the key head they share, of the first sequence, all its rows."""

    def part(arguments: Arguments) -> tuple[Arguments, Callable[[Outputs], Outputs]]:
        if "cu_seqlens_q" in arguments:
            ends = [int(arguments[f"cu_seqlens_{n}"][1]) for n in "qk"]
            of_q, of_k = (slice(ends[0]), slice(size)), (slice(ends[1]), slice(1))
        else:
            of_q, of_k = (slice(1), slice(size)), (slice(1), slice(1))
        where = dict.fromkeys(("q", "o", "lse", "grad_o"), of_q) | dict.fromkeys(("k", "v"), of_k)
        piece = arguments | {n: arguments[n][at] for n, at in where.items() if n in arguments}
        for name in ("cu_seqlens_q", "cu_seqlens_k"):
            piece |= {name: arguments[name][:2]} if name in arguments else {}
        # o and lse; or the gradients of q, k and v
        selected = (of_q, of_k, of_k) if "grad_o" in arguments else (of_q, of_q)
        return piece, lambda outputs: [out[at] for out, at in zip(outputs, selected, strict=True)]

    return part


def _takes(backend: SDPBackend, arguments: Arguments) -> bool:
    """Whether a back end of torch takes these inputs on this machine."""
    q, k, v = (arguments[name] for name in "qkv")
    if q.device.type != "cuda":
        return False
    grouped = q.shape[1] != k.shape[1]
    call = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, arguments["causal"], grouped)
    if backend is SDPBackend.CUDNN_ATTENTION:
        return torch.backends.cuda.can_use_cudnn_attention(call)
    return torch.backends.cuda.can_use_flash_attention(call)


def _sdpa(backend: SDPBackend) -> Prepare:
    def prepare(arguments: Arguments) -> Call | None:
        q, k, v = (arguments[name] for name in "qkv")
        if not _takes(backend, arguments):
            return None

        def forward() -> Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(
                    q, k, v, is_causal=arguments["causal"], enable_gqa=q.shape[1] != k.shape[1]
                )

        return forward

    return prepare


def _flash_backward(arguments: Arguments) -> Call | None:
    q, k, v, grad_o = (arguments[name] for name in ("q", "k", "v", "grad_o"))
    if not _takes(SDPBackend.FLASH_ATTENTION, arguments):
        return None
    aten, causal = torch.ops.aten, arguments["causal"]
    o, lse, cu_q, cu_k, s, s2, state, unused, _ = aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, causal
    )
    return lambda: aten._scaled_dot_product_flash_attention_backward(
        grad_o, q, k, v, o, lse, cu_q, cu_k, s, s2, 0.0, causal, state, unused
    )


def _cudnn_backward(arguments: Arguments) -> Call | None:
    q, k, v, grad_o = (arguments[name] for name in ("q", "k", "v", "grad_o"))
    # its backward by itself is measured for as many key heads as heads
    if q.shape[1] != k.shape[1] or not _takes(SDPBackend.CUDNN_ATTENTION, arguments):
        return None
    aten, causal = torch.ops.aten, arguments["causal"]
    o, lse, cu_q, cu_k, s, s2, seed, offset, _ = aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, causal
    )
    return lambda: aten._scaled_dot_product_cudnn_attention_backward(
        grad_o, q, k, v, o, lse, seed, offset, None, cu_q, cu_k, s, s2, 0.0, causal
    )


def _flash_packed(s: int, s2: int) -> Prepare:
    """torch's flash back end for packed sequences, whose longest the caller has to know."""

    def prepare(arguments: Arguments) -> Call | None:
        q, k, v, cu_q, cu_k = (
            arguments[name] for name in ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")
        )
        if q.device.type != "cuda":
            return None
        aten, causal = torch.ops.aten, arguments["causal"]

        def forward() -> Any:
            return aten._flash_attention_forward(
                q, k, v, cu_q, cu_k, s, s2, 0.0, causal, return_debug_mask=False
            )

        if "grad_o" not in arguments:
            return forward
        o, lse, state, unused, _ = forward()
        return lambda: aten._flash_attention_backward(
            arguments["grad_o"], q, k, v, o, lse, cu_q, cu_k, s, s2, 0.0, causal, state, unused
        )

    return prepare


def case(
    op: str,
    b: int,
    n: int,
    nk: int,
    s: int,
    s2: int,
    d: int,
    causal: bool = True,
    *,
    v: int | None = None,
    packed: bool = False,
    deterministic: bool = False,
) -> Case:
    """`v`: the values' own head size.  `packed`: the b sequences lie in one row of tokens, behind
    prefix sums."""
    backward = op.endswith("_backward")
    e = d if v is None else v

    def make(draw: Draw) -> Arguments:
        of_q, of_k = ((b * s, n), (b * s2, nk)) if packed else ((b, n, s), (b, nk, s2))
        forward: Arguments = dict(q=draw.normal(*of_q, d), causal=causal)
        forward |= dict(k=draw.normal(*of_k, d), v=draw.normal(*of_k, e))
        if packed:
            for name, length in (("q", s), ("k", s2)):
                ends = list(accumulate([0] + [length] * b))
                forward[f"cu_seqlens_{name}"] = torch.tensor(
                    ends, dtype=torch.int32, device=draw.device
                )
        if not backward:
            return forward
        o, lse = torch.ops.custom.npu_fused_attention(**forward)
        forward |= dict(deterministic=True) if deterministic else {}
        return forward | dict(grad_o=draw.normal(*o.shape), o=o, lse=lse)

    # columns of a score's products; passes over each of the four tensors of the forward
    columns, passes = (3 * d + 2 * e, 2) if backward else (d + e, 1)
    sizes = f"D{d}" if e == d else f"D{d}/{e}"
    label = f"B{b} H{n}{f'/{nk}' if nk != n else ''} {sizes}, {s} x {s2}"
    for flag, word in ((causal, "causal"), (packed, "packed"), (deterministic, "deterministic")):
        label += f", {word}" if flag else ""
    peers: dict[str, Prepare] = {}
    if packed:
        peers = {"flash": _flash_packed(s, s2)}
    elif s == 1:
        peers = {"flash": _sdpa(SDPBackend.FLASH_ATTENTION)}
    elif not backward:
        peers = {
            "cudnn": _sdpa(SDPBackend.CUDNN_ATTENTION),
            "flash": _sdpa(SDPBackend.FLASH_ATTENTION),
            "flash_attn_3": flash_attention_3,
            "flash_attn_4": flash_attention_4,
        }
    elif deterministic:
        peers = {"flash_attn_3": flash_attention_3_backward}
    else:
        peers = {
            "cudnn": _cudnn_backward,
            "flash": _flash_backward,
            "flash_attn_3": flash_attention_3_backward,
            "flash_attn_4": flash_attention_4_backward,
        }
    return Case(
        op,
        label,
        make,
        _first_group(n // nk),
        bytes=float(BF16 * passes * (d + e) * b * (n * s + nk * s2)),
        flops=2.0 * columns * b * n * _visible(s, s2, causal),
        shape=dict(b=b, n=n, s=s, d=d),
        peers=peers,
    )


def _sizes(op: str) -> list[Case]:
    """Other head sizes."""
    sizes = ((96, None), (192, 128), (256, None))
    return [case(op, 4, 16, 16, 4096, 4096, d, v=v) for d, v in sizes]


def _forward(small: bool) -> list[Case]:
    op = "npu_fused_attention"
    if small:
        return [case(op, 1, 4, 4, 512, 512, 64)]
    return [
        *(case(op, 4, 16, 16, s, s, d) for s, d in ((4096, 128), (16384, 128), (4096, 64))),
        case(op, 4, 16, 4, 4096, 4096, 128),
        *(case(op, 4, 16, 16, 4096, 4096, d, packed=True) for d in (128, 64)),
        *(case(op, b, 32, 8, 1, 32768, 128, False) for b in (8, 32)),
        *_sizes(op),
    ]


def _backward(small: bool) -> list[Case]:
    op = "npu_fused_attention_backward"
    if small:
        return [case(op, 1, 4, 4, 512, 512, 64)]
    dense = ((4096, 128), (16384, 128), (4096, 64))
    return [
        *(case(op, 4, 16, 16, s, s, d) for s, d in dense),
        case(op, 4, 16, 4, 4096, 4096, 128),
        case(op, 4, 16, 16, 4096, 4096, 128, packed=True),
        *(case(op, 4, 16, 16, s, s, d, deterministic=True) for s, d in dense),
        *_sizes(op),
    ]


def sweep(op: str, small: bool) -> list[Case]:
    """Rows over the length of the sequences, 16384 tokens in all."""
    if small:
        return [case(op, 1, 4, 4, s, s, 64) for s in (128, 256)]
    lengths = (512, 1024, 2048, 4096, 8192, 16384)
    rows = [case(op, 16384 // s, 16, 16, s, s, d) for d in (128, 64) for s in lengths]
    return [replace(row, reference=False) for row in rows]


PRESETS = {"npu_fused_attention": _forward, "npu_fused_attention_backward": _backward}
