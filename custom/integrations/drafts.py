# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Speculative decoding: a step of several tokens, of which the last ones may be taken back.

Transformers' cache crops keys, values and the convolution's columns, and no state of linear
attention: here a step keeps the state after each of its tokens, each in a slot of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..delta_rule import npu_recurrent_gated_delta_rule
from ..dispatch.errors import NotSupported
from .kernels import decay, normalised

Rule = Callable[..., tuple[Tensor, Tensor | None]]
# of a chunked rule's options those that act on a step of drafts too
_READ = {
    *("use_qk_l2norm_in_kernel", "output_final_state"),
    *("use_gate_in_kernel", "A_log", "dt_bias", "lower_bound"),
}


class Verification:
    """A step, and its states: one entry for each layer of linear attention, as they come."""

    def __init__(self, cache: Any) -> None:
        self._cache, self._before = cache, cache.get_seq_length()
        self.layers = [layer for layer in cache.layers if hasattr(layer, "recurrent_states")]
        self._states: list[Tensor] = []  # [B, S, Nv, Dv, Dk] each

    def keep(self, count: int) -> None:
        """Leave in the cache what the first `count` tokens of the step put there."""
        tokens = self._cache.get_seq_length() - self._before
        if len(self._states) != len(self.layers) or not 1 <= count <= tokens:
            raise ValueError(
                f"keep: count={count}, expected 1 to {tokens}, the tokens of one forward pass "
                "inside verification(). Call the model there once, then keep() once."
            )
        for layer, states in zip(self.layers, self._states, strict=True):
            layer.recurrent_states[0].copy_(states[:, count - 1].mT)
            # Transformers crops as many columns as a model's fullest layer has, those of n-grams
            layer.number_of_states = sum(x is not None for x in layer.conv_states.values())
        self._cache.crop(count - tokens)
        self._states.clear()
        self._before += count

    def recur(
        self, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        """As a chunked rule, the last state included."""
        requests, tokens = query.shape[:2]
        slots = torch.arange(requests * tokens, device=query.device)
        # the call goes on from the slot of a sequence's first token
        states = state.new_empty(requests, tokens, *state.mT.shape[1:])
        states[:, 0] = state.mT
        decay, by_channel = g.flatten(0, 1).contiguous(), g.ndim == 4
        q, k, v = (x.flatten(0, 1).contiguous() for x in (query, key, value))
        out = npu_recurrent_gated_delta_rule(
            normalised(q),
            normalised(k),
            v,
            states.flatten(0, 1),
            beta=beta.flatten(0, 1),
            actual_seq_lengths=torch.full((requests,), tokens, device=query.device),
            ssm_state_indices=slots,
            g=None if by_channel else decay,
            gk=decay if by_channel else None,
        )
        self._states.append(states)
        return out.unflatten(0, (requests, tokens)), states[:, -1].mT


_current: Verification | None = None


@contextmanager
def verification(cache: Any) -> Iterator[Verification]:
    """A forward pass inside `use()` and this context may feed drafts; then keep the right ones.

        with verification(cache) as step:
            logits = model(tokens, past_key_values=cache).logits
            step.keep(count)

    Args:
        cache: the model's, behind a prompt.  All its requests keep as many tokens.

    Returns:
        A context manager that gives the `Verification`, whose `keep` is called once.

    Raises:
        RuntimeError: it is in force already.
        NotSupported: the cache is empty.

    >>> from custom.integrations.drafts import verification
    """
    global _current
    if _current is not None:
        raise RuntimeError("verification() is in force already; leave that context first.")
    step = Verification(cache)
    linear = all(layer.has_previous_state[0] for layer in step.layers)
    if not linear or cache.get_seq_length() == 0:
        raise NotSupported(
            "verification: the cache is empty, expected one behind a prompt. Call the model on a "
            "prompt first."
        )
    try:
        _current = step
        for layer in step.layers:
            layer.record_past = True
        yield step
    finally:
        for layer in step.layers:
            layer.record_past = False
        _current = None


def recorded(rule: Rule) -> Rule:
    """A chunked rule; inside verification() the recurrence that keeps every state."""

    def either(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        *,
        initial_state: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if _current is None or initial_state is None:
            return rule(query, key, value, g, beta, initial_state=initial_state, **options)
        unread = [name for name in options if name not in _READ]
        if unread or not options.get("use_qk_l2norm_in_kernel"):
            raise NotSupported(
                "verification: the recurrence normalises queries and keys, and does not take "
                f"{unread}. Step outside of verification()."
            )
        if options.get("use_gate_in_kernel"):  # of a decay by channel
            bound = options.get("lower_bound")
            g = decay(g, options["A_log"][:, None], options["dt_bias"], bound)
        return _current.recur(query, key, value, g, beta, initial_state)

    return either
