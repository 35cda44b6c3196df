# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The gated delta rule with its gates, token by token, on a pool of states.

decay = exp(-exp(A_log) softplus(x)), or exp(lower_bound sigmoid(exp(A_log) x)), x = a + dt_bias
beta = sigmoid(b), twice that with `allow_neg_eigval`
"""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import Unpack

from ...ops.delta_rule.fused_sigmoid_gating_delta_rule_update import Arguments
from ..common.delta_rules import rate, some_sequences, step
from ..common.precision import accumulator


def forward(**given: Unpack[Arguments]) -> Tensor:
    q, k, v = given["q"], given["k"], given["v"]
    retrieve_parent_token = given["retrieve_parent_token"]
    batch, length, heads, key_size = k.shape
    value_heads, value_size = v.shape[2:]
    kind = accumulator(q)

    # every token of the call in one row; [tokens, HV, ...] each
    rows = batch * length
    q, k = (x.reshape(rows, heads, key_size).to(kind) for x in (q, k))
    if given["use_qk_l2norm_in_kernel"]:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q = q * (key_size**-0.5 if given["scale"] is None else given["scale"])
    q, k = (x.repeat_interleave(value_heads // heads, 1) for x in (q, k))
    out = torch.zeros_like(v, memory_format=torch.contiguous_format)
    v = v.reshape(rows, value_heads, value_size).to(kind)
    channels = key_size if given["is_kda"] else 1
    x = given["a"].reshape(rows, value_heads, channels).to(kind)
    x = x + given["dt_bias"].reshape(value_heads, channels).to(kind)
    fading = decay(
        given["A_log"], x, given["softplus_beta"], given["softplus_threshold"], given["lower_bound"]
    )
    b = given["b"].reshape(rows, value_heads).to(kind)
    beta = rate(b, True, given["allow_neg_eigval"])

    if given["cu_seqlens"] is None:
        starts = torch.arange(batch, device=q.device) * length
        lengths = torch.full_like(starts, length)
    else:
        # a sequence begins where all before it have ended
        inside = given["cu_seqlens"].long().clamp(0, rows).cummax(0).values
        starts, lengths = inside[:-1], inside.diff()
    pool = (
        given["initial_state_source"]
        if given["state_layout"] == "kv"
        else given["initial_state_source"].mT
    )
    cache = given["intermediate_states"]
    if cache is not None and given["state_layout"] == "vk":
        cache = cache.mT
    slots = given["initial_state_indices"].long()
    live = (slots >= 0) & (slots < pool.shape[0])

    for some in some_sequences(len(starts), value_heads * key_size * value_size):
        some = some.to(q.device)
        initial = pool[slots[some].clamp(0, max(0, pool.shape[0] - 1))] if len(pool) else None
        state = torch.zeros([len(some), *pool.shape[1:]], dtype=kind, device=q.device)
        if initial is not None:
            state = torch.where(live[some, None, None, None], initial.to(kind), state)
        after: list[Tensor] = []
        first = state
        for t in range(int(lengths[some].max())):
            on = t < lengths[some]
            if retrieve_parent_token is not None:
                begun = _from_parent(first, after, retrieve_parent_token[some], t)
                # a sequence that has ended keeps the state of its last step
                state = torch.where(on[:, None, None, None], begun, state)
            token = (starts[some] + t)[on]
            state = state.clone()
            state[on], o = step(state[on], q[token], k[token], v[token], fading[token], beta[token])
            out.view(rows, value_heads, value_size)[token] = o.to(out.dtype)
            if retrieve_parent_token is not None:
                after.append(state)
            if cache is not None and given["intermediate_state_indices"] is not None:
                row = given["intermediate_state_indices"][some].long()
                kept = on & (row >= 0) & (row < cache.shape[0])
                if t < cache.shape[1]:
                    cache[row[kept], t] = state[kept].to(cache.dtype)
        if not given["disable_state_update"]:
            stored = live[some] & (lengths[some] > 0)
            pool[slots[some][stored]] = state[stored].to(pool.dtype)
    return out


def decay(
    A_log: Tensor, x: Tensor, beta: float, threshold: float, lower_bound: float | None
) -> Tensor:
    """Of x [tokens, HV, channels]."""
    speed = A_log.to(x.dtype).exp()[:, None]
    if lower_bound is None:
        return torch.exp(-speed * softplus(x, beta, threshold))
    return torch.exp(lower_bound * torch.sigmoid(speed * x))


def softplus(x: Tensor, beta: float, threshold: float) -> Tensor:
    return torch.where(beta * x <= threshold, torch.log1p(torch.exp(beta * x)) / beta, x)


def _from_parent(first: Tensor, after: list[Tensor], parents: Tensor, t: int) -> Tensor:
    """The states that step t starts from: those after its parents, or the initial ones."""
    parent = (
        parents[:, t].long() if t < parents.shape[1] else parents.new_full(parents.shape[:1], -1)
    )
    state = first
    for earlier, candidate in enumerate(after):
        state = torch.where((parent == earlier)[:, None, None, None], candidate, state)
    return state
