# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Rows for the gated delta rule at Qwen3-Next's and Kimi-Linear's sizes, with fla-core beside."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from typing import Any, TypedDict
from unittest import mock

import torch

from .case import Arguments, Case, Draw, Outputs
from .peers import Prepare, cudnn_kda, installed, taken

BF16, FP32 = 2, 4
N, NV, D = 16, 32, 128


class Costs(TypedDict):
    """What a Case counts of a call."""

    bytes: float
    flops: float
    shape: dict[str, int]
    reference: bool


def _of_chunks(t: int, heads: int, vectors: int, states: int, products: tuple[int, int]) -> Costs:
    """Of t tokens, of which each reads or writes `vectors`, and of so many states; `products` are
    made inside a chunk of 64, where a row has 64 keys, and with the state between chunks."""
    inside, between = products
    return Costs(
        bytes=float(BF16 * t * vectors * D + FP32 * states * heads * D * D),
        flops=2.0 * t * heads * (inside * 64 * D + between * D * D),
        shape=dict(t=t),
        reference=False,  # token by token
    )


def decode_case(b: int, t: int, layout: str, dtype: torch.dtype = torch.float32) -> Case:
    def make(draw: Draw) -> Arguments:
        return dict(
            A_log=draw.normal(NV, dtype=torch.float32),
            a=draw.normal(b, t, NV),
            dt_bias=draw.normal(NV, dtype=torch.float32),
            softplus_beta=1.0,
            softplus_threshold=20.0,
            q=draw.normal(b, t, N, D),
            k=draw.normal(b, t, N, D),
            v=draw.normal(b, t, NV, D),
            b=draw.normal(b, t, NV),
            initial_state_source=draw.normal(b + 1, NV, D, D, dtype=dtype),
            # slot 0 is what servers keep for padding
            initial_state_indices=torch.arange(1, b + 1, device=draw.device, dtype=torch.int32),
            use_qk_l2norm_in_kernel=True,
            state_layout=layout,
        )

    def part(arguments: Arguments) -> tuple[Arguments, Callable[[Outputs], Outputs]]:
        names = ("a", "q", "k", "v", "b", "initial_state_indices")
        piece = arguments | {name: arguments[name][:4] for name in names}
        return piece, lambda outputs: [out[:4] for out in outputs]

    size = torch.empty((), dtype=dtype).element_size()
    name = "fp32" if dtype == torch.float32 else "bf16"
    return Case(
        "npu_fused_sigmoid_gating_delta_rule_update",
        f"{b} x {t} tokens, {layout}, {name} state",
        make,
        part,
        bytes=float(2 * b * NV * D * D * size + BF16 * b * t * (2 * N + 2 * NV) * D),
        flops=6.0 * b * t * NV * D * D,
        shape=dict(b=b, t=t),
        peers={"fla": _fla_decode},
    )


def _fla_decode(arguments: Arguments) -> Callable[[], Any] | None:
    """fla-core's recurrence; it writes a new float32 state and takes the gates computed."""
    if not installed("fla", arguments["q"]):
        return None
    from fla.ops.gated_delta_rule import (  # type: ignore[import-not-found]
        fused_recurrent_gated_delta_rule,
    )

    gate = -arguments["A_log"].exp() * torch.nn.functional.softplus(
        arguments["a"].float() + arguments["dt_bias"]
    )
    beta = arguments["b"].sigmoid()
    state = arguments["initial_state_source"][1:]
    return lambda: fused_recurrent_gated_delta_rule(
        arguments["q"],
        arguments["k"],
        arguments["v"],
        g=gate,
        beta=beta,
        initial_state=state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        state_v_first=arguments["state_layout"] == "vk",
    )


def chunk_case(t: int) -> Case:
    def make(draw: Draw) -> Arguments:
        return dict(
            query=torch.nn.functional.normalize(draw.normal(t, N, D), dim=-1),
            key=torch.nn.functional.normalize(draw.normal(t, N, D), dim=-1),
            value=draw.normal(t, NV, D),
            beta=draw.normal(t, NV).sigmoid(),
            initial_state=draw.normal(1, NV, D, D, dtype=torch.float32),
            g=-draw.normal(t, NV, dtype=torch.float32).abs() / 8,
        )

    def part(arguments: Arguments) -> tuple[Arguments, Callable[[Outputs], Outputs]]:
        # cut into two sequences, of which the reference computes the first
        first, state = min(t // 2, 200), arguments["initial_state"]
        lengths = torch.tensor([first, t - first], dtype=torch.int32, device=state.device)
        arguments.update(initial_state=torch.cat([state, state]), actual_seq_lengths=lengths)
        names = ("query", "key", "value", "beta", "g")
        piece = arguments | {name: arguments[name][:first] for name in names}
        piece |= dict(initial_state=state, actual_seq_lengths=lengths[:1])
        return piece, lambda outputs: [outputs[0][:first], outputs[1][:1]]

    return Case(
        "npu_chunk_gated_delta_rule",
        f"{t} tokens",
        make,
        part,
        peers={"fla": _fla_chunk},
        **_of_chunks(t, NV, 2 * N + 2 * NV, 2, (4, 3)),
    )


def chunk_grad_case(t: int) -> Case:
    forward = chunk_case(t)

    def make(draw: Draw) -> Arguments:
        return forward.drawn(draw) | dict(
            d_out=draw.normal(t, NV, D),
            d_final_state=draw.normal(1, NV, D, D, dtype=torch.float32, std=0.1),
        )

    def part(arguments: Arguments) -> tuple[Arguments, Callable[[Outputs], Outputs]]:
        piece, _ = forward.part(arguments)
        first, state = piece["value"].shape[0], arguments["d_final_state"]
        arguments.update(d_final_state=torch.cat([state, state]))
        piece |= dict(d_out=arguments["d_out"][:first], d_final_state=state)
        # of a state there is one for each sequence, of all else a row for each token
        counts = (first, first, first, first, 1, first)
        return piece, lambda outputs: [x[:n] for x, n in zip(outputs, counts, strict=True)]

    return Case(
        "npu_chunk_gated_delta_rule_grad",
        f"{t} tokens",
        make,
        part,
        peers={"fla": _fla_chunk_grad},
        **_of_chunks(t, NV, 4 * N + 3 * NV, 3, (10, 8)),  # with the states made again
    )


@contextmanager
def _compiled_together() -> Iterator[None]:
    """What Triton's autotuner is about to try is compiled at once, by threads: by itself it would
    compile fla's 34 kernels one after the other."""
    from triton.runtime._async_compile import AsyncCompileMode
    from triton.runtime.autotuner import Autotuner

    choose = Autotuner.prune_configs

    def compile_and_choose(tuner: Any, named: dict[str, Any]) -> Any:
        configs: Any = choose(tuner, named)
        given = {name: x for name, x in named.items() if name != "warmup"}
        with ThreadPoolExecutor() as pool, AsyncCompileMode(pool, ignore_errors=True):
            for config in configs:
                tuner.fn.warmup(*tuner.nargs.values(), **given, **config.all_kwargs())
        return configs

    with mock.patch.object(Autotuner, "prune_configs", compile_and_choose):
        yield


def _of_fla(prepare: Callable[[Arguments], Callable[[], Any]]) -> Prepare:
    """fla-core's column; none where it is not installed, or refuses a version of Triton, whose
    result would be wrong."""

    @wraps(prepare)
    def peer(arguments: Arguments) -> Callable[[], Any] | None:
        if not installed("fla", next(iter(arguments.values()))):
            return None
        with _compiled_together():
            return taken("fla-core", prepare(arguments))

    return peer


@_of_fla
def _fla_chunk(arguments: Arguments) -> Callable[[], Any]:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    q, k, v, g, beta = (arguments[n][None] for n in ("query", "key", "value", "g", "beta"))
    state = arguments["initial_state"]

    def call() -> Any:
        return chunk_gated_delta_rule(
            q,
            k,
            v,
            g=g,
            beta=beta,
            initial_state=state,
            output_final_state=True,
            state_v_first=True,
        )

    return call


@_of_fla
def _fla_chunk_grad(arguments: Arguments) -> Callable[[], Any]:
    """fla-core's backward alone, on what its forward keeps for it."""
    from fla.ops.gated_delta_rule.chunk import (  # type: ignore[import-not-found]
        chunk_gated_delta_rule_bwd,
        chunk_gated_delta_rule_fwd,
    )

    names = ("query", "key", "value", "g", "beta", "d_out")
    q, k, v, g, beta, d_out = (arguments[name][None] for name in names)
    given: Arguments = dict(q=q, k=k, v=v, beta=beta, scale=D**-0.5, state_v_first=True)
    given["initial_state"] = arguments["initial_state"]
    total, _, triangles, *_ = chunk_gated_delta_rule_fwd(g=g, output_final_state=True, **given)

    def call() -> Any:
        return chunk_gated_delta_rule_bwd(
            g=total, A=triangles, do=d_out, dht=arguments["d_final_state"], **given
        )

    return call


def recurrent_case(b: int, s: int, small: bool = False) -> Case:
    """torch_npu's decode: a slot for the state after each of s tokens."""
    heads, values, size = (2, 4, 16) if small else (N, NV, D)
    tokens = b * s

    def make(draw: Draw) -> Arguments:
        order = torch.arange(1, tokens + 1, device=draw.device, dtype=torch.int32)
        return dict(
            query=draw.normal(tokens, heads, size, std=size**-0.5),
            key=draw.normal(tokens, heads, size, std=size**-0.5),
            value=draw.normal(tokens, values, size),
            # slot 0 is what servers keep for padding
            state=draw.normal(tokens + 1, values, size, size),
            beta=draw.normal(tokens, values).sigmoid(),
            actual_seq_lengths=draw.full(b, value=s),
            ssm_state_indices=order,
            num_accepted_tokens=order[:b] % s + 1,
            g=-draw.normal(tokens, values, dtype=torch.float32).abs(),
        )

    def part(arguments: Arguments) -> tuple[Arguments, Callable[[Outputs], Outputs]]:
        names = ("query", "key", "value", "beta", "ssm_state_indices", "g")
        piece = arguments | {name: arguments[name][: 2 * s] for name in names}
        piece |= {n: arguments[n][:2] for n in ("actual_seq_lengths", "num_accepted_tokens")}
        return piece, lambda outputs: [out[: 2 * s] for out in outputs]

    return Case(
        "npu_recurrent_gated_delta_rule",
        f"{b} x {s} tokens, bf16 state",
        make,
        part,
        bytes=float(BF16 * (b + tokens) * values * size * size + BF16 * tokens * 6 * heads * size),
        flops=6.0 * tokens * values * size * size,
        shape=dict(b=b, s=s),
    )


KDA = 32  # heads, of queries and of values


def kda_case(t: int, lower_bound: float | None = None) -> Case:
    """As Kimi-Linear calls it: gate and norms inside."""

    def make(draw: Draw) -> Arguments:
        return dict(
            q=draw.normal(1, t, KDA, D),
            k=draw.normal(1, t, KDA, D),
            v=draw.normal(1, t, KDA, D),
            g=draw.normal(1, t, KDA, D),
            beta=draw.normal(1, t, KDA).sigmoid(),
            initial_state=draw.normal(1, KDA, D, D, dtype=torch.float32),
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            A_log=draw.normal(KDA, dtype=torch.float32),
            dt_bias=draw.normal(KDA, D, dtype=torch.float32) - 2,
            lower_bound=lower_bound,
        )

    def part(arguments: Arguments) -> tuple[Arguments, Callable[[Outputs], Outputs]]:
        # cut into two sequences, of which the reference computes the first
        first, state = min(t // 2, 200), arguments["initial_state"]
        bounds = torch.tensor([0, first, t], dtype=torch.int32, device=state.device)
        arguments.update(initial_state=torch.cat([state, state]), cu_seqlens=bounds)
        names = ("q", "k", "v", "g", "beta")
        piece = arguments | {name: arguments[name][:, :first] for name in names}
        piece |= dict(initial_state=state, cu_seqlens=bounds[:2])
        return piece, lambda outputs: [outputs[0][:, :first], outputs[1][:1]]

    return Case(
        "npu_chunk_kda",
        f"{t} tokens" + ("" if lower_bound is None else ", bounded"),
        make,
        part,
        peers={"fla": _fla_kda, "cudnn": cudnn_kda},
        **_of_chunks(t, KDA, 5 * KDA, 2, (4, 3)),  # as without a decay
    )


def kda_grad_case(t: int, lower_bound: float | None = None) -> Case:
    forward = kda_case(t, lower_bound)

    def make(draw: Draw) -> Arguments:
        return forward.drawn(draw) | dict(
            d_out=draw.normal(1, t, KDA, D),
            d_final_state=draw.normal(1, KDA, D, D, dtype=torch.float32, std=0.1),
        )

    def part(arguments: Arguments) -> tuple[Arguments, Callable[[Outputs], Outputs]]:
        piece, _ = forward.part(arguments)
        first, state = piece["v"].shape[1], arguments["d_final_state"]
        # of the second sequence nothing is asked, so that A_log and dt_bias hear of the first alone
        d_out = arguments["d_out"].index_fill(1, torch.arange(first, t, device=state.device), 0)
        arguments.update(d_out=d_out, d_final_state=torch.cat([state, torch.zeros_like(state)]))
        piece |= dict(d_out=d_out[:, :first], d_final_state=state)

        def shown(outputs: Outputs) -> Outputs:
            tokens = [x[:, :first] for x in outputs[:5]]
            return [*tokens, outputs[5][:1], *outputs[6:]]

        return piece, shown

    return Case(
        "npu_chunk_kda_grad",
        forward.label,
        make,
        part,
        peers={"fla": _fla_kda_grad},
        **_of_chunks(t, KDA, 9 * KDA, 3, (10, 8)),  # with the states made again
    )


@_of_fla
def _fla_kda(arguments: Arguments) -> Callable[[], Any]:
    from fla.ops.kda import chunk_kda  # type: ignore[import-not-found]

    options = dict(arguments, safe_gate=arguments["lower_bound"] is not None)

    def call() -> Any:
        return chunk_kda(**options, output_final_state=True)

    return call


@_of_fla
def _fla_kda_grad(arguments: Arguments) -> Callable[[], Any]:
    """fla-core's backward alone, on what its forward keeps for it."""
    from fla.modules.norm.l2norm import l2norm_bwd, l2norm_fwd  # type: ignore[import-not-found]
    from fla.ops.kda.chunk_bwd import chunk_kda_bwd  # type: ignore[import-not-found]
    from fla.ops.kda.chunk_fwd import chunk_kda_fwd  # type: ignore[import-not-found]

    names = ("v", "beta", "initial_state", "A_log", "dt_bias", "lower_bound")
    given = {name: arguments[name] for name in (*names, "use_gate_in_kernel")}
    given |= dict(scale=D**-0.5, safe_gate=arguments["lower_bound"] is not None)
    (q, of_q), (k, of_k) = (l2norm_fwd(arguments[name]) for name in "qk")
    given |= dict(q=q, k=k)
    _, _, _, seen, solved, *_ = chunk_kda_fwd(g=arguments["g"], output_final_state=True, **given)

    def call() -> Any:
        d_q, d_k, *others = chunk_kda_bwd(
            Aqk=seen,
            Akk=solved,
            g_org=arguments["g"],
            do=arguments["d_out"],
            dht=arguments["d_final_state"],
            **given,
        )
        return l2norm_bwd(q, of_q, d_q), l2norm_bwd(k, of_k, d_k), *others

    return call


def layer_case(b: int, layout: str, small: bool = False, heads: tuple[int, int] = (N, NV)) -> Case:
    """A decode step of the whole layer, its pools in bfloat16 and float32."""
    queries, values, size = (2, 4, 16) if small else (*heads, D)
    channels = 2 * queries * size + values * size

    def make(draw: Draw) -> Arguments:
        return dict(
            mixed_qkv=draw.normal(b, 1, channels),
            z=draw.normal(b, 1, values, size),
            a=draw.normal(b, 1, values),
            b=draw.normal(b, 1, values),
            conv_states=draw.normal(b + 1, 3, channels),
            states=draw.normal(b + 1, values, size, size, dtype=torch.float32),
            conv_weight=draw.normal(4, channels),
            A_log=draw.normal(values, dtype=torch.float32),
            dt_bias=draw.normal(values, dtype=torch.float32),
            norm_weight=draw.normal(size),
            # slot 0 is what servers keep for padding
            state_indices=torch.arange(1, b + 1, device=draw.device, dtype=torch.int32),
            state_layout=layout,
        )

    def part(arguments: Arguments) -> tuple[Arguments, Callable[[Outputs], Outputs]]:
        names = ("mixed_qkv", "z", "a", "b", "state_indices")
        piece = arguments | {name: arguments[name][:4] for name in names}
        return piece, lambda outputs: [out[:4] for out in outputs]

    state, row = FP32 * values * size * size, BF16 * channels
    return Case(
        "npu_gated_delta_layer_decode",
        f"{b} x 1 tokens, {layout}",
        make,
        part,
        # the states of the rule and of the convolution, twice; mixed_qkv, z and out
        bytes=float(b * (2 * state + 7 * row + 2 * BF16 * values * size)),
        flops=6.0 * b * values * size * size,
        shape=dict(b=b),
        peers={"three ops": _three_ops},
    )


def kda_layer_case(model: str, heads: int, b: int, lower_bound: float | None = None) -> Case:
    """A decode step of a KDA layer: as many heads of queries as of values, a decay by channel."""
    plain = layer_case(b, "kv", heads=(heads, heads))

    def make(draw: Draw) -> Arguments:
        return plain.drawn(draw) | dict(
            a=draw.normal(b, 1, heads, D),
            dt_bias=draw.normal(heads, D, dtype=torch.float32) - 2,
            gate_activation="sigmoid",
            is_kda=True,
            lower_bound=lower_bound,
        )

    return replace(
        plain,
        label=f"{b} x 1 tokens, KDA of {model}",
        drawn=make,
        bytes=plain.bytes + BF16 * b * heads * D,
        shape=dict(b=b, heads=heads),
    )


def _three_ops(arguments: Arguments) -> Callable[[], Any]:
    """Ours, one after the other."""
    x = arguments
    values, size = x["z"].shape[2:]
    keys = (x["mixed_qkv"].shape[-1] - values * size) // 2

    def call() -> Any:
        mixed = torch.ops.custom.npu_causal_conv1d_update(
            x["mixed_qkv"],
            x["conv_states"],
            x["conv_weight"],
            None,
            "silu",
            conv_state_indices=x["state_indices"],
        )
        q_k_v = mixed.split([keys, keys, values * size], -1)
        out = torch.ops.custom.npu_fused_sigmoid_gating_delta_rule_update(
            x["A_log"],
            x["a"],
            x["dt_bias"],
            1.0,
            20.0,
            *(y.unflatten(-1, (-1, size)) for y in q_k_v),
            x["b"],
            x["states"],
            x["state_indices"],
            None,
            True,
            state_layout=x["state_layout"],
            is_kda=x.get("is_kda", False),
            lower_bound=x.get("lower_bound"),
        )
        activation = x.get("gate_activation", "silu")
        return torch.ops.custom.npu_gated_rms_norm(
            out, x["z"], x["norm_weight"], activation=activation
        )

    return call


def _layer(small: bool) -> list[Case]:
    if small:
        return [layer_case(2, "kv", True), kda_layer_case("Kimi-Linear", 2, 2)]
    rows = [layer_case(b, layout) for layout in ("kv", "vk") for b in (1, 32, 128)]
    models = (("GLM-5.3-Flash", 64, -5.0), ("Kimi-K3", 96, None), ("Ling-3.0-Flash", 32, -5.0))
    return rows + [
        kda_layer_case(model, heads, b, bound) for model, heads, bound in models for b in (1, 128)
    ]


def _decode(small: bool) -> list[Case]:
    if small:
        return [decode_case(b, 1, layout) for b in (1, 4) for layout in ("kv", "vk")]
    rows = [decode_case(b, 1, layout) for layout in ("kv", "vk") for b in (1, 32, 128, 512)]
    bf16 = [decode_case(b, 1, "kv", torch.bfloat16) for b in (32, 128)]
    return [*rows, decode_case(32, 4, "kv"), decode_case(32, 4, "vk"), *bf16]


def _recurrent(small: bool) -> list[Case]:
    if small:
        return [recurrent_case(2, 2, True)]
    return [recurrent_case(b, s) for b, s in ((1, 1), (32, 1), (128, 1), (32, 4))]


def _chunk(small: bool) -> list[Case]:
    return [chunk_case(t) for t in ((16,) if small else (4096, 16384, 65536))]


def _chunk_grad(small: bool) -> list[Case]:
    return [chunk_grad_case(t) for t in ((8,) if small else (4096, 16384, 65536))]


def _kda(small: bool) -> list[Case]:
    if small:
        return [kda_case(16), kda_case(16, -5.0)]
    return [*(kda_case(t) for t in (4096, 16384, 65536)), kda_case(16384, -5.0)]


def _kda_grad(small: bool) -> list[Case]:
    if small:
        return [kda_grad_case(8)]
    return [*(kda_grad_case(t) for t in (4096, 16384, 65536)), kda_grad_case(16384, -5.0)]


PRESETS = {
    "npu_recurrent_gated_delta_rule": _recurrent,
    "npu_gated_delta_layer_decode": _layer,
    "npu_fused_sigmoid_gating_delta_rule_update": _decode,
    "npu_chunk_gated_delta_rule": _chunk,
    "npu_chunk_gated_delta_rule_grad": _chunk_grad,
    "npu_chunk_kda": _kda,
    "npu_chunk_kda_grad": _kda_grad,
}
