# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Linear attention under the names that Transformers gives to kernels.

Qwen3-Next, Qwen3.5, Qwen4 and OLMo-Hybrid call `causal_conv1d_fn` and `chunk_gated_delta_rule` for
a prompt, `causal_conv1d_update` and `fused_recurrent_gated_delta_rule` for a token; Kimi-Linear,
whose decay is by channel, `chunk_kda` and `fused_recurrent_kda`.  The mapping puts ours there, with
the package `kernels` (0.16), which Transformers uses for this:

    with kernels.use_kernel_mapping(kernel_mapping(), inherit_mapping=False):
        transformers.integrations.hub_kernels.kernelize(model)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .. import causal_conv1d
from ..delta_rule import (
    npu_chunk_gated_delta_rule,
    npu_chunk_kda,
    npu_fused_sigmoid_gating_delta_rule_update,
)


def normalised(x: Tensor) -> Tensor:
    """In rows of length 1."""
    wide = x.float()
    return (wide * torch.rsqrt((wide * wide).sum(-1, keepdim=True) + 1e-6)).to(x.dtype)


def decay(a: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:
    """The logarithm of the decay, in float32; A_log and dt_bias as `a`, or spread over it."""
    return -A_log.float().exp() * nn.functional.softplus(a.float() + dt_bias)


def chunk_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Output [B, S, Nv, Dv] and final state [B, Nv, Dk, Dv] of query and key [B, S, Nk, Dk].

    `chunk_size` is the kernel's own; with `cu_seqlens` [N + 1] B is 1, and there are N states.
    """
    requests, tokens = query.shape[:2]
    lengths = torch.full((requests,), tokens, device=query.device)
    if kwargs.get("cu_seqlens") is not None:
        lengths = kwargs["cu_seqlens"].diff()
    if use_qk_l2norm_in_kernel:
        query, key = normalised(query), normalised(key)
    # ours takes all tokens in a row, and states [B, Nv, Dv, Dk]; a model's convolution leaves its
    # channels strided
    out, state = npu_chunk_gated_delta_rule(
        query.flatten(0, 1).contiguous(),
        key.flatten(0, 1).contiguous(),
        value.flatten(0, 1).contiguous(),
        beta=beta.flatten(0, 1),
        initial_state=None if initial_state is None else initial_state.mT.contiguous(),
        actual_seq_lengths=lengths,
        g=g.flatten(0, 1),
    )
    out = out.unflatten(0, (requests, tokens))
    return out, state.mT.contiguous() if output_final_state else None


def chunk_kda(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The same with a decay by channel, g [B, S, Nv, Dk]."""
    out, state = npu_chunk_kda(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        g.contiguous(),
        beta,
        initial_state=None if initial_state is None else initial_state.contiguous(),
        cu_seqlens=kwargs.get("cu_seqlens"),
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
    )
    return out, state if output_final_state else None


def fused_recurrent_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The same, token by token, g [B, S, Nv] or by channel [B, S, Nv, Dk]; `initial_state` is left
    as it is."""
    heads, size = value.shape[2:]
    cu_seqlens = kwargs.get("cu_seqlens")
    sequences = query.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if initial_state is None:
        state = value.new_zeros(sequences, heads, query.shape[-1], size, dtype=torch.float32)
    else:
        state = initial_state.clone()
    # the op makes its gates of a and b; of these it makes g and beta: above the threshold softplus
    # is the identity, and g is never positive
    nothing = value.new_zeros(heads, *g.shape[3:], dtype=torch.float32)
    out = npu_fused_sigmoid_gating_delta_rule_update(
        value.new_zeros(heads, dtype=torch.float32),
        -g,
        nothing,
        1.0,
        -1.0,
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        beta.float().logit(),
        state,
        torch.arange(sequences, device=value.device),
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
        is_kda=g.ndim == 4,
    )
    return out, state if output_final_state else None


# a decay by channel is seen by its shape
fused_recurrent_kda = fused_recurrent_gated_delta_rule


def causal_conv1d_fn(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **kwargs: Any,
) -> Tensor:
    """Output [B, channels, S] of hidden_states [B, channels, S] and weight [channels, W]."""
    out = causal_conv1d.causal_conv1d_fn(
        hidden_states, weight, bias, kwargs.get("seq_idx"), activation=activation
    )
    assert isinstance(out, Tensor)
    return out


def causal_conv1d_update(
    hidden_states: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """The same behind conv_state [B, channels, columns], which is updated in place."""
    if conv_state.device.type != "npu" or conv_state.stride(1) == 1:
        return causal_conv1d.causal_conv1d_update(
            hidden_states, conv_state, weight, bias, activation
        )
    # the NPU's kernel takes channels side by side
    state = conv_state.mT.contiguous().mT
    out = causal_conv1d.causal_conv1d_update(hidden_states, state, weight, bias, activation)
    conv_state.copy_(state)
    return out


class _Convolution(nn.Module):
    can_torch_compile = True

    def forward(
        self,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **kwargs: Any,
    ) -> Tensor:
        return causal_conv1d_fn(hidden_states, weight, bias, activation, **kwargs)


class _ConvolutionUpdate(nn.Module):
    can_torch_compile, has_backward = True, False

    def forward(
        self,
        hidden_states: Tensor,
        conv_state: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
    ) -> Tensor:
        return causal_conv1d_update(hidden_states, conv_state, weight, bias, activation)


class _Chunk(nn.Module):
    can_torch_compile = True

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        chunk_size: int = 64,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        return chunk_gated_delta_rule(
            query, key, value, g, beta, chunk_size, initial_state, output_final_state,
            use_qk_l2norm_in_kernel, **kwargs,
        )  # fmt: skip


class _Recurrent(nn.Module):
    can_torch_compile, has_backward = True, False

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        return fused_recurrent_gated_delta_rule(
            query, key, value, g, beta, initial_state, output_final_state,
            use_qk_l2norm_in_kernel, **kwargs,
        )  # fmt: skip


class _ChunkKda(nn.Module):
    can_torch_compile = True

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        chunk_size: int = 64,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        return chunk_kda(
            query, key, value, g, beta, chunk_size, initial_state, output_final_state,
            use_qk_l2norm_in_kernel, **kwargs,
        )  # fmt: skip


class _RecurrentKda(nn.Module):
    can_torch_compile, has_backward = True, False

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None,
        output_final_state: bool,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        return fused_recurrent_kda(
            query, key, value, g, beta, initial_state, output_final_state,
            use_qk_l2norm_in_kernel, **kwargs,
        )  # fmt: skip


@dataclass(frozen=True)
class _Repository:
    """What `kernels` loads a layer from; ours is here already."""

    layer: type[nn.Module]

    def load(self) -> type[nn.Module]:
        return self.layer


def kernel_mapping(devices: Sequence[str] = ("cuda", "npu")) -> dict[str, dict[str, Any]]:
    """For `kernels.use_kernel_mapping` and `kernels.register_kernel_mapping`.

    Args:
        devices: kinds of devices whose models take our functions.

    Returns:
        A mapping from a function's name to what `kernels` loads for each device.

    >>> from custom.integrations.kernels import kernel_mapping
    >>> sorted(kernel_mapping())[:2]
    ['causal_conv1d_fn', 'causal_conv1d_update']
    """
    layers = {
        "causal_conv1d_fn": _Convolution,
        "causal_conv1d_update": _ConvolutionUpdate,
        "chunk_gated_delta_rule": _Chunk,
        "fused_recurrent_gated_delta_rule": _Recurrent,
        "chunk_kda": _ChunkKda,
        "fused_recurrent_kda": _RecurrentKda,
    }
    return {
        name: {device: _Repository(layer) for device in devices} for name, layer in layers.items()
    }
