# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The gated delta rule: decode with an in-place state, chunked prefill, and its form by channel."""

from __future__ import annotations

from torch import Tensor

from ._op import op


@op
def npu_fused_sigmoid_gating_delta_rule_update(
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    softplus_beta: float,
    softplus_threshold: float,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    state_layout: str = "kv",
    is_kda: bool = False,
    disable_state_update: bool = False,
    intermediate_states: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    retrieve_parent_token: Tensor | None = None,
    lower_bound: float | None = None,
    allow_neg_eigval: bool = False,
) -> Tensor:
    """Decode step (or a few) of the gated delta rule, with its gates, on a pool of states.

    By token and head, with state h [Dk, Dv]:
    g = -exp(A_log) softplus(a + dt_bias), beta = sigmoid(b),
    h = exp(g) h;  h = h + k (beta (v - k^T h))^T;  o = (scale q)^T h.

    Formula: Gated DeltaNet (Yang et al., 2024), equation 10; KDA: Kimi Linear (2025).

    Args:
        A_log: [Nv] float32 or bfloat16.
        a: [B, S, Nv], or [S, Nv] if B is 1; KDA: [B, S, Nv, Dk] or [B, S, Nv * Dk].
        dt_bias: [Nv]; KDA: [Nv, Dk] or [Nv * Dk].
        softplus_beta: softplus(x) = log(1 + exp(softplus_beta x)) / softplus_beta,
        softplus_threshold: or x where softplus_beta x exceeds this.
        q: [B, S, N, Dk].
        k: [B, S, N, Dk].
        v: [B, S, Nv, Dv]; N divides Nv, value head n uses query head n // (Nv / N).
        b: like `a` without Dk.
        initial_state_source: [slots, Nv, Dk, Dv] ("kv") or [slots, Nv, Dv, Dk] ("vk"), float32,
            bfloat16 or float16; updated in place. The stride of a slot may exceed its size.
        initial_state_indices: [B] (or [len(cu_seqlens) - 1]) int32 or int64, the slot of each
            sequence; negative or out of range: starts from zero, stores nothing. No slot twice:
            what its sequences read and leave is open.
        scale: factor of q; None is Dk ** -0.5.
        use_qk_l2norm_in_kernel: divide q and k by sqrt(sum of squares + 1e-6) first.
        cu_seqlens: [sequences + 1] int32 or int64 prefix sums, with B = 1.
        state_layout: "kv" or "vk"; never inferred, both have the same size if Dk = Dv.
        is_kda: the decay has one value for each of Dk channels.
        disable_state_update: leave `initial_state_source` as it is.
        intermediate_states: [rows, steps, Nv, ...] in the same layout: the state after each step.
        intermediate_state_indices: [sequences] row of each sequence in it; negative: none.
        retrieve_parent_token: [sequences, steps]: step t starts from the state after step
            parent[t]; -1: from the initial state. For tree verification.
        lower_bound: a negative number: g = lower_bound sigmoid(exp(A_log) (a + dt_bias)) instead.
        allow_neg_eigval: beta = 2 sigmoid(b), from 0 to 2: a state may change its sign along a key.

    Returns:
        o [B, S, Nv, Dv], dtype of `v`.

    Raises:
        ValueError: a shape, stride, device or option does not fit; no state has been written.
        TypeError: a type or dtype does not fit.
        RuntimeError: an argument requires grad, while grad mode is on.

    >>> import torch, custom
    >>> state, slot = torch.zeros(3, 4, 16, 8), torch.tensor([2])
    >>> gate = torch.zeros(4)
    >>> q, k, v = torch.randn(1, 1, 2, 16), torch.randn(1, 1, 2, 16), torch.randn(1, 1, 4, 8)
    >>> a, b = torch.randn(1, 1, 4), torch.randn(1, 1, 4)
    >>> custom.npu_fused_sigmoid_gating_delta_rule_update(
    ...     gate, a, gate, 1.0, 20.0, q, k, v, b, state, slot, use_qk_l2norm_in_kernel=True
    ... ).shape
    torch.Size([1, 1, 4, 8])
    """


# the source document's name; sglang's positional order with state_layout="vk"
fused_sigmoid_gating_delta_rule_update = npu_fused_sigmoid_gating_delta_rule_update


@op
def npu_chunk_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    beta: Tensor | None = None,
    initial_state: Tensor | None = None,
    actual_seq_lengths: Tensor | None = None,
    scale: float | None = None,
    g: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
) -> tuple[Tensor, Tensor]:
    """The gated delta rule over whole sequences (prefill), chunk by chunk.

    By token and head, with state S [Dv, Dk] and decay alpha = exp(g):
    S = alpha S + beta (v - alpha S k) k^T;  o = S (scale q).

    Same signature as torch_npu's op, with any Dk, Dv to 256 (Dk to 128 on GPUs with less than
    107 KiB of shared memory a program) and a state in float32 as well.  No L2
    norm inside: the caller normalises q and k.  Differentiable in every tensor of floating
    point; equal runs give equal gradients.

    Formula: Gated DeltaNet (Yang et al., 2024), equation 10 and section 3.3.

    Args:
        query: [T, N, Dk].
        key: [T, N, Dk].
        value: [T, Nv, Dv]; N divides Nv.
        beta: [T, Nv]; None: ones.
        initial_state: [B, Nv, Dv, Dk]; None: zeros.
        actual_seq_lengths: [B] int32 or int64, lengths that add up to T; None: one sequence.
        scale: factor of the query; None is Dk ** -0.5.
        g: [T, Nv] float32 logarithm of the decay; None: no decay.
        use_beta_sigmoid_in_kernel: the rate is sigmoid(beta); gradients are those of `beta`.
        allow_neg_eigval: with the sigmoid: the rate is twice that.

    Returns:
        out [T, Nv, Dv], dtype of `value`, and the final state [B, Nv, Dv, Dk], dtype of
        `initial_state` (float32 if there is none).

    Raises:
        ValueError: a shape, device or option does not fit.
        TypeError: a type or dtype does not fit.

    >>> import torch, custom
    >>> q, k, v = torch.randn(7, 2, 16), torch.randn(7, 2, 16), torch.randn(7, 4, 8)
    >>> k = torch.nn.functional.normalize(k, dim=-1)
    >>> out, state = custom.npu_chunk_gated_delta_rule(q, k, v)
    >>> state.shape
    torch.Size([1, 4, 8, 16])
    """


@op
def npu_recurrent_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: Tensor,
    *,
    beta: Tensor | None = None,
    scale: float | None = None,
    actual_seq_lengths: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    g: Tensor | None = None,
    gk: Tensor | None = None,
) -> Tensor:
    """Decode step (or a few drafts) of the gated delta rule, on a pool of states with a slot for
    each token's.

    By token and head, with state S [Dv, Dk] and decay alpha = exp(g + gk), by channel of the keys:
    S = S alpha + beta (v - S alpha k) k^T;  o = S (scale q).

    Same signature as torch_npu's op.  A sequence goes on from the state in the slot of its token
    `num_accepted_tokens`, and leaves in each token's slot the state after it: what a verification
    refuses is overwritten by the next call.  No L2 norm inside: the caller normalises q and k.

    Formula: Gated DeltaNet (Yang et al., 2024), equation 10; by channel, Kimi Linear (2025).

    Args:
        query: [T, N, Dk].
        key: [T, N, Dk].
        value: [T, Nv, Dv]; N divides Nv.
        state: [slots, Nv, Dv, Dk], updated in place; the slots may lie apart.
        beta: [T, Nv]; None: ones.
        scale: factor of the query; None is Dk ** -0.5.
        actual_seq_lengths: [B] int32 or int64, lengths that add up to T; None: one sequence.
        ssm_state_indices: [T] int32 or int64, the slot of each token; negative or out of range: a
            sequence starts from zeros, a token's state is not stored. No slot in two sequences:
            what they read and leave is open.
        num_accepted_tokens: [B] from 1 to a sequence's length, what is beyond counts as the nearest
            of these; None: ones.
        g: [T, Nv] logarithm of the decay; None: none.
        gk: [T, Nv, Dk] logarithm of the decay by channel; None: none.

    Returns:
        out [T, Nv, Dv], dtype of `value`; zeros behind the last sequence.

    Raises:
        ValueError: a shape, stride, device or option does not fit; no state has been written.
        TypeError: a type or dtype does not fit.
        RuntimeError: an argument requires grad, while grad mode is on.

    >>> import torch, custom
    >>> q, k, v = torch.randn(5, 2, 16), torch.randn(5, 2, 16), torch.randn(5, 4, 8)
    >>> states, slots = torch.zeros(9, 4, 8, 16), torch.tensor([3, 4, 5, 7, 8])
    >>> custom.npu_recurrent_gated_delta_rule(
    ...     q, k, v, states, actual_seq_lengths=torch.tensor([3, 2]), ssm_state_indices=slots
    ... ).shape
    torch.Size([5, 4, 8])
    """


@op
def npu_chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    state_layout: str = "kv",
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
) -> tuple[Tensor, Tensor]:
    """Kimi delta attention over whole sequences (prefill), chunk by chunk: a decay by channel.

    By token and head, with state h [Dk, Dv] and decay alpha = exp(g) [Dk]:
    h = alpha h;  h = h + k (beta (v - k^T h))^T;  o = (scale q)^T h.

    fla's chunk_kda, its `safe_gate` for every gate: exact however strong the decay is, as no
    exponent is above 0 where g is not.  Differentiable in every tensor of floating point; equal
    runs give equal gradients.

    Formula: Kimi Linear (2025), section 3.

    Args:
        q: [B, S, N, Dk].
        k: [B, S, N, Dk].
        v: [B, S, Nv, Dv]; N divides Nv, value head n uses query head n // (Nv / N).
        g: [B, S, Nv, Dk] logarithm of the decay, at most 0; or what the gate makes it from.
        beta: [B, S, Nv], the rate itself, or what its sigmoid makes it from.
        scale: factor of q; None is Dk ** -0.5.
        initial_state: [B or sequences, Nv, Dk, Dv] ("kv") or [.., Dv, Dk] ("vk"); None: zeros.
        cu_seqlens: [sequences + 1] int32 or int64 prefix sums, with B = 1; tokens of no sequence
            give 0.
        use_qk_l2norm_in_kernel: divide q and k by sqrt(sum of squares + 1e-6) first.
        use_gate_in_kernel: the logarithm is -exp(A_log) softplus(g + dt_bias).
        A_log: [Nv] of the gate; may be None, for 0, with `lower_bound`.
        dt_bias: [Nv, Dk] or [Nv * Dk] of the gate; None: zeros.
        lower_bound: a negative number: the logarithm is
            lower_bound sigmoid(exp(A_log) (g + dt_bias)) instead.
        state_layout: "kv" or "vk"; never inferred, both have the same size if Dk = Dv.
        use_beta_sigmoid_in_kernel: the rate is sigmoid(beta); gradients are those of `beta`.
        allow_neg_eigval: with the sigmoid: the rate is twice that.

    Returns:
        out [B, S, Nv, Dv], dtype of `v`, and the final states, dtype of `initial_state` (float32
        if there is none).

    Raises:
        ValueError: a shape, device or option does not fit.
        TypeError: a type or dtype does not fit.

    >>> import torch, custom
    >>> q, k, v = torch.randn(1, 7, 2, 16), torch.randn(1, 7, 2, 16), torch.randn(1, 7, 4, 8)
    >>> g, beta = -torch.rand(1, 7, 4, 16), torch.rand(1, 7, 4)
    >>> out, state = custom.npu_chunk_kda(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)
    >>> state.shape
    torch.Size([1, 4, 16, 8])
    """


@op
def npu_gated_delta_layer_decode(
    mixed_qkv: Tensor,
    z: Tensor,
    a: Tensor,
    b: Tensor,
    conv_states: Tensor,
    states: Tensor,
    conv_weight: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    state_indices: Tensor,
    *,
    conv_bias: Tensor | None = None,
    scale: float | None = None,
    epsilon: float = 1e-6,
    state_layout: str = "kv",
    gate_activation: str = "silu",
    softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
    disable_state_update: bool = False,
    intermediate_states: Tensor | None = None,
    intermediate_conv_window: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    retrieve_parent_token: Tensor | None = None,
    is_kda: bool = False,
    lower_bound: float | None = None,
    allow_neg_eigval: bool = False,
) -> Tensor:
    """Decode step (or a few) of a gated-delta layer, from its projections to its norm.

    npu_causal_conv1d_update with silu, npu_fused_sigmoid_gating_delta_rule_update with the norm of
    queries and keys, npu_gated_rms_norm with the norm before the gate: the same as these three
    calls. Two launches on CUDA and three on an NPU; one for a token of KDA where the values have as
    many heads and channels as the queries.

    Formula: the gated-delta layer of Qwen3-Next; with `is_kda`, that of Kimi Linear, GLM-5.3-Flash
    and Ling-3.0, whose gate_activation is "sigmoid".

    Args:
        mixed_qkv: [B, S, C], C = 2 N Dk + Nv Dv: the channels of queries, keys and values.
        z: [B, S, Nv, Dv], the gate.
        a: [B, S, Nv], of the decay; KDA: [B, S, Nv, Dk] or [B, S, Nv * Dk].
        b: [B, S, Nv], of the rate, before its sigmoid.
        conv_states: [slots, L, C], any strides, L from W - 1 on; updated in place.
        states: [slots, Nv, Dk, Dv] ("kv") or [slots, Nv, Dv, Dk] ("vk"); updated in place.
        conv_weight: [W, C], W from 2 to 4; any strides.
        A_log: [Nv] float32 or bfloat16.
        dt_bias: [Nv]; KDA: [Nv, Dk] or [Nv * Dk].
        norm_weight: [Dv].
        state_indices: [B] int32 or int64, the slot of each sequence in both pools; negative or out
            of range: starts from zeros, stores nothing. No slot twice: what its sequences read and
            leave is open.
        conv_bias: [C]; None: zeros.
        scale: factor of the queries; None is Dk ** -0.5.
        epsilon: of the last norm.
        state_layout: "kv" or "vk"; never inferred.
        gate_activation: "silu" (also called "swish") or "sigmoid".
        softplus_beta: softplus(x) = log(1 + exp(softplus_beta x)) / softplus_beta,
        softplus_threshold: or x where softplus_beta x exceeds this.
        disable_state_update: leave both pools as they are.
        intermediate_states: [rows, steps, Nv, ...]: the state after each step.
        intermediate_conv_window: [rows, steps, W - 1, C]: what was convolved last, after each step.
        intermediate_state_indices: [B] row of each sequence in both; negative: none.
        retrieve_parent_token: [B, steps]: step t follows step parent[t]; -1: the pools. For tree
            verification; needs disable_state_update=True.
        is_kda: the decay has one value for each of Dk channels.
        lower_bound: a negative number: the decay's logarithm is
            lower_bound sigmoid(exp(A_log) (a + dt_bias)); with `is_kda` alone.
        allow_neg_eigval: the rate is 2 sigmoid(b): a state may change its sign along a key.

    Returns:
        out like `z`.

    Raises:
        ValueError: a shape, stride, device or option does not fit; no state has been written.
        TypeError: a type or dtype does not fit.
        RuntimeError: an argument requires grad, while grad mode is on.

    >>> import torch, custom
    >>> mixed, z = torch.randn(1, 1, 2 * 2 * 16 + 4 * 8), torch.randn(1, 1, 4, 8)
    >>> a, b, gate = torch.randn(1, 1, 4), torch.randn(1, 1, 4), torch.zeros(4)
    >>> columns, states = torch.zeros(3, 3, 96), torch.zeros(3, 4, 16, 8)
    >>> weight, slot = torch.randn(4, 96), torch.tensor([2])
    >>> custom.npu_gated_delta_layer_decode(
    ...     mixed, z, a, b, columns, states, weight, gate, gate, torch.ones(8), slot
    ... ).shape
    torch.Size([1, 1, 4, 8])
    """
