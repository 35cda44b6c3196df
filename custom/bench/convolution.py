# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Rows for the causal convolution and the gated norm at Qwen3-Next's sizes, with causal-conv1d and
fla-core side by side: 8192 channels (16 heads of queries and keys, 32 of values, 128 each), 4
taps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from .case import Arguments, Case, Draw, Outputs
from .peers import installed

BF16, FP32 = 2, 4
D, W = 8192, 4
Call = Callable[[], Any]


def prefill_case(t: int, sequences: int = 1, d: int = D) -> Case:
    def make(draw: Draw) -> Arguments:
        ends = [t * n // sequences for n in range(sequences + 1)]
        return dict(
            x=draw.normal(t, d),
            weight=draw.normal(W, d),
            initial_states=draw.normal(sequences, W - 1, d),
            query_start_loc=torch.tensor(ends, dtype=torch.int32, device=draw.device),
            activation="silu",
        )

    def part(arguments: Arguments) -> tuple[Arguments, Callable[[Outputs], Outputs]]:
        first = int(arguments["query_start_loc"][1])
        piece = arguments | dict(
            x=arguments["x"][:first],
            initial_states=arguments["initial_states"][:1],
            query_start_loc=arguments["query_start_loc"][:2],
        )
        return piece, lambda outputs: [outputs[0][:first], outputs[1][:1]]

    return Case(
        "npu_causal_conv1d",
        f"{t} tokens" + (f", {sequences} sequences" if sequences > 1 else ""),
        make,
        part,
        bytes=float(BF16 * (2 * t + 2 * sequences * (W - 1) + W) * d),
        flops=2.0 * t * d * W,
        shape=dict(t=t, n=sequences),
        peers={"causal-conv1d": _dao, "fla": _fla},
    )


def _dao(arguments: Arguments) -> Call | None:
    """One sequence; the package has no prefix sums with states."""
    if not installed("causal_conv1d", arguments["x"]) or arguments["initial_states"].shape[0] > 1:
        return None
    from causal_conv1d import causal_conv1d_fn  # type: ignore[import-not-found]

    x, weight = arguments["x"][None].mT, arguments["weight"].t().contiguous()
    before = arguments["initial_states"].mT
    return lambda: causal_conv1d_fn(
        x, weight, initial_states=before, return_final_states=True, activation="silu"
    )


def _fla(arguments: Arguments) -> Call | None:
    if not installed("fla", arguments["x"]):
        return None
    from fla.modules.convolution import causal_conv1d  # type: ignore[import-not-found]

    x, weight = arguments["x"][None], arguments["weight"].t().contiguous()
    # its states have W columns, of which the first counts for nothing
    before = torch.nn.functional.pad(arguments["initial_states"].mT, (1, 0))
    # one tensor for all calls: what is made of it, on the host, is kept by its identity
    starts = arguments["query_start_loc"].long()
    return lambda: causal_conv1d(
        x,
        weight,
        initial_state=before,
        output_final_state=True,
        activation="silu",
        cu_seqlens=starts,
    )


def grad_case(t: int, d: int = D) -> Case:
    forward = prefill_case(t, 1, d)

    def make(draw: Draw) -> Arguments:
        arguments = forward.drawn(draw)
        del arguments["initial_states"]
        return arguments | dict(d_out=draw.normal(t, d))

    def part(arguments: Arguments) -> tuple[Arguments, Callable[[Outputs], Outputs]]:
        # the weights' gradient is of all tokens: a part would not have it
        return arguments, lambda outputs: outputs

    return Case(
        "npu_causal_conv1d_grad",
        f"{t} tokens",
        make,
        part,
        bytes=float(BF16 * 3 * t * d),
        flops=2.0 * t * d * 3 * W,
        shape=dict(t=t),
        peers={"causal-conv1d": _dao_grad, "fla": _fla_grad},
        reference=False,  # tens of GB
    )


def _leaves(arguments: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        arguments["x"][None].detach().requires_grad_(),
        arguments["weight"].t().contiguous().requires_grad_(),
    )


def _dao_grad(arguments: Arguments) -> Call | None:
    """Its backward alone, through autograd's graph."""
    if not installed("causal_conv1d", arguments["x"]):
        return None
    from causal_conv1d import causal_conv1d_fn

    x, weight = _leaves(arguments)
    out = causal_conv1d_fn(x.mT, weight, activation="silu").mT
    grad = arguments["d_out"][None]
    return lambda: torch.autograd.grad(out, (x, weight), grad, retain_graph=True)


def _fla_grad(arguments: Arguments) -> Call | None:
    """Its backward by itself: through autograd it would run on the stream of the forward, which no
    graph that is captured on another one takes."""
    if not installed("fla", arguments["x"]):
        return None
    from fla.modules.convolution import causal_conv1d_bwd

    x, weight, grad = (arguments[name] for name in ("x", "weight", "d_out"))
    weight = weight.t().contiguous()
    return lambda: causal_conv1d_bwd(x[None], grad[None], None, weight, activation="silu")


def update_case(b: int, s: int = 1, d: int = D) -> Case:
    columns = W - 2 + s

    def make(draw: Draw) -> Arguments:
        arguments = dict(
            x=draw.normal(b, s, d),
            conv_states=draw.normal(b + 1, columns, d),
            weight=draw.normal(W, d),
            activation="silu",
            # slot 0 is what servers keep for padding
            conv_state_indices=torch.arange(1, b + 1, device=draw.device, dtype=torch.int32),
        )
        if s > 1:
            accepted = torch.arange(b, device=draw.device, dtype=torch.int32) % s + 1
            arguments["num_accepted_tokens"] = accepted
        return arguments

    def part(arguments: Arguments) -> tuple[Arguments, Callable[[Outputs], Outputs]]:
        names = ("x", "conv_state_indices", "num_accepted_tokens")
        piece = {n: v[:4] if n in names else v for n, v in arguments.items()}
        return piece, lambda outputs: [out[:4] for out in outputs]

    return Case(
        "npu_causal_conv1d_update",
        f"{b} x {s} tokens",
        make,
        part,
        bytes=float(BF16 * b * (2 * s + W - 1 + columns) * d),
        flops=2.0 * b * s * d * W,
        shape=dict(b=b, s=s),
        peers={"causal-conv1d": _dao_update},
    )


def _dao_update(arguments: Arguments) -> Call | None:
    if not installed("causal_conv1d", arguments["x"]) or "num_accepted_tokens" in arguments:
        return None
    from causal_conv1d import causal_conv1d_update

    x, weight = arguments["x"].mT, arguments["weight"].t().contiguous()
    states = arguments["conv_states"].mT
    return lambda: causal_conv1d_update(
        x, states, weight, None, "silu", conv_state_indices=arguments["conv_state_indices"]
    )


def fused_case(b: int, s: int, d: int = D) -> Case:
    """torch_npu's: prompts and steps alike, of b sequences of s tokens."""
    columns = 2 + min(s, 8)

    def make(draw: Draw) -> Arguments:
        order = torch.arange(1, b + 1, device=draw.device, dtype=torch.int32)
        return dict(
            x=draw.normal(b * s, d),
            weight=draw.normal(3, d),
            conv_states=draw.normal(b + 1, columns, d),
            query_start_loc=torch.arange(0, b * s + 1, s, device=draw.device, dtype=torch.int32),
            cache_indices=order,
            num_accepted_tokens=order % min(s, 8) + 1,
            num_computed_tokens=order,
        )

    def part(arguments: Arguments) -> tuple[Arguments, Callable[[Outputs], Outputs]]:
        first = min(b, 4)
        names = ("cache_indices", "num_accepted_tokens", "num_computed_tokens")
        piece = arguments | {name: arguments[name][:first] for name in names}
        piece["x"] = arguments["x"][: first * s]
        piece["query_start_loc"] = arguments["query_start_loc"][: first + 1]
        return piece, lambda outputs: [out[: first * s] for out in outputs]

    return Case(
        "npu_fused_causal_conv1d",
        f"{b} x {s} tokens",
        make,
        part,
        bytes=float(BF16 * b * (2 * s + 2 * columns) * d),
        flops=6.0 * b * s * d,
        shape=dict(b=b, s=s),
    )


def in_place_case(b: int, s: int, d: int = D) -> Case:
    """What comes back is written: x, and a slot for each sequence from the second on."""
    forward, first = fused_case(b, s, d), min(b, 4)

    def part(arguments: Arguments) -> tuple[Arguments, Callable[[Outputs], Outputs]]:
        piece, _ = forward.part(arguments)
        return piece, lambda outputs: [outputs[0][: first * s], outputs[1][: first + 1]]

    return replace(forward, op="npu_fused_causal_conv1d_v2", part=part)


def norm_case(t: int, heads: int = 32, size: int = 128) -> Case:
    def make(draw: Draw) -> Arguments:
        return dict(
            x=draw.normal(t, heads, size),
            gate=draw.normal(t, heads, size),
            weight=draw.normal(size),
        )

    def part(arguments: Arguments) -> tuple[Arguments, Callable[[Outputs], Outputs]]:
        piece = arguments | {name: arguments[name][:64] for name in ("x", "gate")}
        return piece, lambda outputs: [out[:64] for out in outputs]

    return Case(
        "npu_gated_rms_norm",
        f"{t} tokens",
        make,
        part,
        bytes=float(BF16 * 3 * t * heads * size),
        flops=8.0 * t * heads * size,
        shape=dict(t=t),
        peers={"fla": _fla_norm},
    )


def norm_grad_case(t: int, heads: int = 32, size: int = 128) -> Case:
    forward = norm_case(t, heads, size)

    def make(draw: Draw) -> Arguments:
        return forward.drawn(draw) | dict(d_out=draw.normal(t, heads, size))

    return Case(
        "npu_gated_rms_norm_grad",
        f"{t} tokens",
        make,
        # the weight's gradient is of all tokens: a part would not have it
        lambda arguments: (arguments, lambda outputs: outputs),
        bytes=float(BF16 * 5 * t * heads * size),
        flops=20.0 * t * heads * size,
        shape=dict(t=t),
    )


def _fla_norm(arguments: Arguments) -> Call | None:
    if not installed("fla", arguments["x"]):
        return None
    from fla.modules.fused_norm_gate import (  # type: ignore[import-not-found]
        rms_norm_gated,
    )

    x, gate, weight = (arguments[name] for name in ("x", "gate", "weight"))
    return lambda: rms_norm_gated(x, gate, weight, None, "swish", eps=1e-6)


def _norm(small: bool) -> list[Case]:
    return [norm_case(8, 2, 16)] if small else [norm_case(t) for t in (1, 128, 4096, 65536)]


def _norm_grad(small: bool) -> list[Case]:
    return [norm_grad_case(8, 2, 16)] if small else [norm_grad_case(t) for t in (4096, 65536)]


def _prefill(small: bool) -> list[Case]:
    if small:
        return [prefill_case(64, 2, 32)]
    return [*(prefill_case(t) for t in (4096, 16384, 65536)), prefill_case(16384, 64)]


def _grad(small: bool) -> list[Case]:
    return [grad_case(64, 32)] if small else [grad_case(t) for t in (4096, 16384, 65536)]


def _update(small: bool) -> list[Case]:
    if small:
        return [update_case(4, 1, 32)]
    return [*(update_case(b) for b in (1, 32, 128, 512)), update_case(32, 4)]


def _fused(small: bool, case: Callable[..., Case] = fused_case) -> list[Case]:
    return [case(3, 2, 32)] if small else [case(b, s) for b, s in ((1, 4096), (32, 1), (128, 4))]


def _in_place(small: bool) -> list[Case]:
    return _fused(small, in_place_case)


PRESETS = {
    "npu_fused_causal_conv1d": _fused,
    "npu_fused_causal_conv1d_v2": _in_place,
    "npu_causal_conv1d": _prefill,
    "npu_causal_conv1d_grad": _grad,
    "npu_causal_conv1d_update": _update,
    "npu_gated_rms_norm": _norm,
    "npu_gated_rms_norm_grad": _norm_grad,
}
