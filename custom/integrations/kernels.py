# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Linear attention under the names that Transformers gives to kernels, with fla's arguments.

Qwen3-Next, Qwen3.5, Qwen4 and OLMo-Hybrid call `causal_conv1d_fn` and `chunk_gated_delta_rule` for
a prompt, `causal_conv1d_update` and `fused_recurrent_gated_delta_rule` for a token; Kimi-Linear,
whose decay is by channel, `chunk_kda` and `fused_recurrent_kda`.  The mapping puts ours there, with
the package `kernels` (0.16), which Transformers uses for this:

    with kernels.use_kernel_mapping(kernel_mapping(), inherit_mapping=False):
        transformers.integrations.hub_kernels.kernelize(model)

Behind `beta` all goes by name: fla's sixth argument is `scale`, Transformers' is `chunk_size`.
Every argument of fla's acts, or is refused by its name, but for hints to fla's own kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from .. import _causal_conv1d
from ..delta_rule import npu_chunk_gated_delta_rule, npu_chunk_kda, npu_recurrent_gated_delta_rule
from ..dispatch.errors import NotSupported

# how fla's kernels get there faster: ours gives the same without
HINTS = {
    *("chunk_size", "chunk_indices", "chunk_offsets", "cu_seqlens_cpu", "disable_recompute"),
    *("safe_gate", "max_num_seqs", "min_graph_utilization"),
}
# what Transformers hands to every layer, and linear attention does not read
UNREAD = {
    *("use_cache", "num_items_in_batch", "output_hidden_states", "output_attentions"),
    *("output_router_logits", "cu_seq_lens_k", "max_length_q", "max_length_k"),
}
# and to the encoders of images and the like, whose layers are not these
MODALITIES = "image_", "video_", "audio_"
_CAPTURE = "custom.graph_mode.capture makes a graph of the call. Leave it out."
# of fla and Transformers, what ours does not compute, and what to do
REFUSED = {
    "head_first": "Pass tensors [B, S, N, D].",
    "transpose_state_layout": "Its name is state_v_first.",
    "gv": "A decay by channel of the values is not computed: pass g, or gk.",
    "cp_context": "Gather the sequence: context parallelism is not computed.",
    "return_intermediate_states": "The states between chunks are not kept. Leave it out.",
    "use_graph": _CAPTURE,
    **{
        f"graph_{name}": _CAPTURE
        for name in ("mode", "t_max", "n_max", "nt_max", "actual_tokens", "actual_sequences")
    },
    "graph_actual_nt": _CAPTURE,
    "is_causal": "The rule and its convolution are causal.",
    "position_ids": "Packed sequences are given as cu_seqlens. Leave it out.",
    "seq_idx": "The rule takes packed sequences as cu_seqlens: pass cu_seq_lens_q as well.",
}


def _rest(function: Callable[..., Any], others: Mapping[str, Any]) -> None:
    """Refuse, by name, what would change the result, and what is no argument at all."""
    name = function.__name__
    for other, value in others.items():
        if other in HINTS or other in UNREAD or other.startswith(MODALITIES):
            continue
        if other in REFUSED:
            if value is None or value is (other == "is_causal"):
                continue
            came = "given" if isinstance(value, Tensor) else repr(value)
            raise NotSupported(f"{name}: `{other}` is {came}. {REFUSED[other]}")
        known = [each for each in signature(function).parameters if each != "others"]
        nearest = get_close_matches(other, [*known, *REFUSED, *HINTS], 1, 0)[0]
        raise TypeError(f"{name}: `{other}` is no argument of it. The nearest is `{nearest}`.")


def normalised(x: Tensor) -> Tensor:
    """In rows of length 1."""
    wide = torch.promote_types(x.dtype, torch.float32)
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
    return (x * torch.rsqrt(length * length + 1e-6)).to(x.dtype)


def decay(
    a: Tensor, A_log: Tensor, dt_bias: Tensor | None, lower_bound: float | None = None
) -> Tensor:
    """The logarithm of the decay, in float32; A_log and dt_bias as `a`, or spread over it."""
    a, rate = a.float() if dt_bias is None else a.float() + dt_bias, A_log.float().exp()
    if lower_bound is not None:
        return lower_bound * (rate * a).sigmoid()
    return -rate * nn.functional.softplus(a)


def _check_rate(name: str, use_beta_sigmoid_in_kernel: bool, allow_neg_eigval: bool) -> None:
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        raise ValueError(
            f"{name}: `allow_neg_eigval` is True and `use_beta_sigmoid_in_kernel` False, expected "
            "both: it doubles the sigmoid of `beta`. Pass the rate itself, up to 2, without it."
        )


def _rate(
    name: str, beta: Tensor, use_beta_sigmoid_in_kernel: bool, allow_neg_eigval: bool
) -> Tensor:
    _check_rate(name, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    if not use_beta_sigmoid_in_kernel:
        return beta
    return beta.sigmoid() * (2 if allow_neg_eigval else 1)


def _gate(
    name: str,
    use_gate_in_kernel: bool,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float | None = None,
) -> None:
    """Refuse a gate of which only a part is given."""
    given = dict(A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound)
    for each, value in given.items():
        if value is not None and not use_gate_in_kernel:
            raise ValueError(
                f"{name}: `{each}` is given and `use_gate_in_kernel` is False, expected True: `g` "
                f"would be taken as it is. Leave `{each}` out, or let it act."
            )
    if use_gate_in_kernel and A_log is None and lower_bound is None:
        raise ValueError(
            f"{name}: `A_log` is None and `use_gate_in_kernel` is True, expected [Nv]. Pass the "
            "logarithm of each head's decay."
        )


def _sequences(
    function: Callable[..., Any],
    q: Tensor,
    cu_seqlens: Tensor | None,
    packed: Tensor | None,
    others: Mapping[str, Any],
) -> Tensor | None:
    """`cu_seqlens`, under either of its names; with it `seq_idx`, which says the same, may be one
    of the other arguments."""
    if cu_seqlens is None:
        cu_seqlens = packed
    if cu_seqlens is not None and q.shape[0] != 1:
        raise ValueError(
            f"{function.__name__}: `q` has {q.shape[0]} rows and `cu_seqlens` is given, expected "
            "one row, in which all sequences follow one another. Flatten them."
        )
    _rest(function, {n: x for n, x in others.items() if cu_seqlens is None or n != "seq_idx"})
    return cu_seqlens


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """Output [B, S, Nv, Dv] of q and k [B, S, N, Dk], and the final state [B, Nv, Dk, Dv].

    With `cu_seqlens` [sequences + 1], which Transformers calls `cu_seq_lens_q`, B is 1, and there
    is a state for each sequence; with `state_v_first` states are [B, Nv, Dv, Dk].
    """
    name = "chunk_gated_delta_rule"
    cu_seqlens = _sequences(chunk_gated_delta_rule, q, cu_seqlens, cu_seq_lens_q, others)
    _gate(name, use_gate_in_kernel, A_log, dt_bias)
    _check_rate(name, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    if use_gate_in_kernel and A_log is not None:
        g = decay(g, A_log, dt_bias)
    requests, tokens = q.shape[:2]
    if use_qk_l2norm_in_kernel:
        q, k = normalised(q), normalised(k)
    if initial_state is not None and not state_v_first:
        initial_state = initial_state.mT
    if cu_seqlens is None:
        lengths = torch.full((requests,), tokens, device=q.device)
    else:
        lengths = _lengths(cu_seqlens, tokens)
        if initial_state is not None:
            initial_state = nn.functional.pad(initial_state, (0, 0) * 3 + (1, 1))
    # ours takes all tokens in a row; a model's convolution leaves its channels strided
    out, state = npu_chunk_gated_delta_rule(
        q.flatten(0, 1).contiguous(),
        k.flatten(0, 1).contiguous(),
        v.flatten(0, 1).contiguous(),
        beta=beta.flatten(0, 1),
        initial_state=None if initial_state is None else initial_state.contiguous(),
        actual_seq_lengths=lengths,
        scale=scale,
        g=g.flatten(0, 1),
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
    )
    out = out.unflatten(0, (requests, tokens))
    if not output_final_state:
        return out, None
    if cu_seqlens is not None:
        state = state[1:-1]
    return out, state if state_v_first else state.mT.contiguous()


def _lengths(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """Of the sequences, and of what lies ahead of the first and behind the last."""
    first, last = cu_seqlens.new_zeros(1), cu_seqlens.new_full((1,), tokens)
    return cu_seqlens.diff(prepend=first, append=last)


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """The same with a decay by channel, g [B, S, Nv, Dk]."""
    cu_seqlens = _sequences(chunk_kda, q, cu_seqlens, cu_seq_lens_q, others)
    _gate("chunk_kda", use_gate_in_kernel, A_log, dt_bias, lower_bound)
    _check_rate("chunk_kda", use_beta_sigmoid_in_kernel, allow_neg_eigval)
    out, state = npu_chunk_kda(
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        g.contiguous(),
        beta,
        scale=scale,
        initial_state=None if initial_state is None else initial_state.contiguous(),
        cu_seqlens=cu_seqlens,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        A_log=A_log,
        dt_bias=dt_bias,
        lower_bound=lower_bound,
        state_layout="vk" if state_v_first else "kv",
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
    )
    return out, state if output_final_state else None


def _recurrent(
    function: Callable[..., Any],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    gk: Tensor | None,
    beta: Tensor,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    use_qk_l2norm_in_kernel: bool,
    state_v_first: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Token by token; `initial_state` is left as it is."""
    (requests, tokens), (heads, size) = q.shape[:2], v.shape[2:]
    sequences = requests if cu_seqlens is None else cu_seqlens.shape[0] - 1
    states = [sequences, heads, *((size, q.shape[-1]) if state_v_first else (q.shape[-1], size))]
    if initial_state is None:
        initial_state = v.new_zeros(states, dtype=torch.float32)
    elif list(initial_state.shape) != states:
        raise ValueError(
            f"{function.__name__}: `initial_state` has shape {list(initial_state.shape)}, expected "
            f"{states}. Pass the state of each sequence."
        )
    state = initial_state if state_v_first else initial_state.mT
    state = state.clone(memory_format=torch.contiguous_format)
    # a state of each sequence, in which its tokens follow one another
    if cu_seqlens is None:
        slots = torch.arange(sequences, device=q.device)
        lengths, slots = torch.full_like(slots, tokens), slots.repeat_interleave(tokens)
    else:  # tokens of no sequence have no slot
        lengths, token = _lengths(cu_seqlens, tokens), torch.arange(tokens, device=q.device)
        slots = torch.bucketize(token, cu_seqlens.long(), right=True) - 1
        slots = slots.where(slots < sequences, -1)
    dtype = v.dtype
    if use_qk_l2norm_in_kernel:  # in float32, as inside a kernel
        q, k, v = normalised(q.float()), normalised(k.float()), v.float()
    gates = {
        name: None if gate is None else gate.flatten(0, 1).contiguous()
        for name, gate in dict(beta=beta, g=g, gk=gk).items()
    }
    out = npu_recurrent_gated_delta_rule(
        q.flatten(0, 1).contiguous(),
        k.flatten(0, 1).contiguous(),
        v.flatten(0, 1).contiguous(),
        state,
        scale=scale,
        actual_seq_lengths=lengths,
        ssm_state_indices=slots,
        **gates,
    )
    out = out.unflatten(0, (requests, tokens)).to(dtype)
    if not output_final_state:
        return out, None
    return out, state if state_v_first else state.mT.contiguous()


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    gk: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """The same as `chunk_gated_delta_rule`, token by token; `beta` is any rate, up to 2 and beyond,
    and `initial_state` is left as it is.  `gk` [B, S, Nv, Dk] decays by channel, beside `g`."""
    name = "fused_recurrent_gated_delta_rule"
    cu_seqlens = _sequences(fused_recurrent_gated_delta_rule, q, cu_seqlens, cu_seq_lens_q, others)
    _gate(name, use_gate_in_kernel, A_log, dt_bias)
    if beta is None:
        beta = v.new_ones(v.shape[:-1])
    rate = _rate(name, beta, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    if g is not None and use_gate_in_kernel and A_log is not None:
        g = decay(g, A_log, dt_bias)
    return _recurrent(
        fused_recurrent_gated_delta_rule,
        q,
        k,
        v,
        g,
        gk,
        rate,
        scale,
        initial_state,
        output_final_state,
        use_qk_l2norm_in_kernel,
        state_v_first,
        cu_seqlens,
    )


def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """The same as `chunk_kda`, token by token; `initial_state` is left as it is."""
    name = "fused_recurrent_kda"
    cu_seqlens = _sequences(fused_recurrent_kda, q, cu_seqlens, cu_seq_lens_q, others)
    _gate(name, use_gate_in_kernel, A_log, dt_bias, lower_bound)
    rate = _rate(name, beta, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    if use_gate_in_kernel:
        bias = None if dt_bias is None else dt_bias.reshape(g.shape[2:])
        slope = None if A_log is None else A_log.reshape(-1, 1)
        if lower_bound is None and slope is not None:
            g = decay(g, slope, bias)
        elif lower_bound is not None:
            g = g.float() if bias is None else g.float() + bias
            g = lower_bound * (g if slope is None else slope.float().exp() * g).sigmoid()
    return _recurrent(
        fused_recurrent_kda,
        q,
        k,
        v,
        None,
        g,
        rate,
        scale,
        initial_state,
        output_final_state,
        use_qk_l2norm_in_kernel,
        state_v_first,
        cu_seqlens,
    )


def causal_conv1d_fn(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    seq_idx: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **others: Any,
) -> Tensor:
    """Output [B, channels, S] of hidden_states [B, channels, S] and weight [channels, W]; `seq_idx`
    [B, S] is the sequence of each token; of one row `cu_seq_lens_q` says it too."""
    _rest(causal_conv1d_fn, others)
    if cu_seq_lens_q is not None and seq_idx is None:
        rows, tokens = hidden_states.shape[0], hidden_states.shape[2]
        end = int(cu_seq_lens_q[-1])
        if rows != 1 or end != tokens:
            raise NotSupported(
                f"causal_conv1d_fn: `cu_seq_lens_q` ends at {end}, `seq_idx` is None and there are "
                f"{rows} x {tokens} tokens. Pass one row of that many, or `seq_idx` [B, S], the "
                "sequence of each token."
            )
        token = torch.arange(tokens, device=hidden_states.device)
        seq_idx = torch.bucketize(token, cu_seq_lens_q.long(), right=True)[None]
    out = _causal_conv1d.causal_conv1d_fn(
        hidden_states, weight, bias, seq_idx, activation=activation
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
        return _causal_conv1d.causal_conv1d_update(
            hidden_states, conv_state, weight, bias, activation
        )
    # the NPU's kernel takes channels side by side
    state = conv_state.mT.contiguous().mT
    out = _causal_conv1d.causal_conv1d_update(hidden_states, state, weight, bias, activation)
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
            query,
            key,
            value,
            g,
            beta,
            initial_state=initial_state,
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            **kwargs,
        )


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
            query,
            key,
            value,
            g,
            beta,
            initial_state=initial_state,
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            **kwargs,
        )


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
            query,
            key,
            value,
            g,
            beta,
            initial_state=initial_state,
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            **kwargs,
        )


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
            query,
            key,
            value,
            g,
            beta,
            initial_state=initial_state,
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            **kwargs,
        )


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
