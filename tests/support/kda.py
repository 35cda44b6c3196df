# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Kimi delta attention: drawn sequences under every gate."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from .delta_rule import joined, made_by, of_kinds
from .drawn import drawn

# what `g` may be: the decay's logarithm, or what a gate makes it from
GIVEN, SOFTPLUS, BOUNDED, PLAIN = "given", "softplus", "bounded", "bounded, no A_log"


@dataclass(frozen=True)
class Case:
    lengths: tuple[int, ...]
    packed: bool = True  # by cu_seqlens; else a batch of equal lengths
    H: int = 2
    HV: int = 2
    K: int = 32
    V: int = 32
    before: int = 0  # tokens of no sequence, and behind
    behind: int = 0
    state: torch.dtype | None = torch.float32
    layout: str = "kv"
    gate: str = SOFTPLUS
    bias: bool = True
    norm: bool = True
    scale: float | None = None
    fading: float = 1.0  # times the decay's logarithm
    alike: bool = False  # keys nearly the same
    strided: bool = False  # q, k and v as views of one projection
    rates: int = 0  # up to 1 or 2, of which beta is in front of the sigmoid

    def arguments(self) -> dict[str, Any]:
        """In float64, on the CPU; keys of length 1 where no norm makes them so."""
        if self.packed:
            B, T = 1, self.before + sum(self.lengths) + self.behind
            bounds = torch.tensor([self.before, *self.lengths]).cumsum(0).int()
        else:
            B, T, bounds = len(self.lengths), max(self.lengths, default=0), None
        q, k = drawn(B, T, self.H, self.K), drawn(B, T, self.H, self.K)
        if self.alike:
            k = drawn(1, 1, self.H, self.K) + k / 50
        if not self.norm:
            q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
        g, inside = drawn(B, T, self.HV, self.K), self.gate != GIVEN
        sizes = (self.K, self.V) if self.layout == "kv" else (self.V, self.K)
        A_log = drawn(self.HV) / 2 + math.log(self.fading)
        return dict(
            q=q,
            k=k,
            v=drawn(B, T, self.HV, self.V),
            g=g if inside else -self.fading * g.exp(),
            beta=made_by(self.rates, drawn(B, T, self.HV)),
            scale=self.scale,
            initial_state=(
                None if self.state is None else drawn(len(self.lengths), self.HV, *sizes)
            ),
            cu_seqlens=bounds,
            use_qk_l2norm_in_kernel=self.norm,
            use_gate_in_kernel=inside,
            A_log=A_log if self.gate in (SOFTPLUS, BOUNDED) else None,
            dt_bias=drawn(self.HV, self.K) if inside and self.bias else None,
            lower_bound=-5.0 if self.gate in (BOUNDED, PLAIN) else None,
            state_layout=self.layout,
            use_beta_sigmoid_in_kernel=self.rates > 0,
            allow_neg_eigval=self.rates == 2,
        )

    def moved(self, x: dict[str, Any], dtype: torch.dtype, device: Any) -> dict[str, Any]:
        """Activations in `dtype`; the decay, the gate's parameters and the state in their own."""
        exact = dtype is torch.float64
        kinds = dict.fromkeys(("A_log", "dt_bias"), dtype if exact else torch.float32)
        kinds["initial_state"] = dtype if exact else self.state
        if self.gate == GIVEN:
            kinds["g"] = dtype if exact else torch.float32

        moved = of_kinds(x, kinds, dtype, device)
        return joined(moved, ("q", "k", "v"), 2) if self.strided else moved


# the decay's logarithm by token, at its extremes
EXTREMES = {
    "nothing": lambda t: torch.zeros_like(t, dtype=torch.float64),
    "everything": lambda t: torch.full_like(t, -1e4, dtype=torch.float64),
    "by turns": lambda t: torch.where(t % 2 == 0, 0.0, -1e4),
    "by turns, from the second": lambda t: torch.where(t % 2 == 1, 0.0, -1e4),
    "one in 16": lambda t: torch.where(t % 16 == 7, -1e4, -1e-3),
    "one in 5 at the edge": lambda t: torch.where(t % 5 == 3, -87.0, -0.05),
    "slow, then at once": lambda t: torch.where(t < 40, -1e-3, -300.0),
    "minus infinity": lambda t: torch.where(t % 9 == 4, -torch.inf, -0.1),
}
# prefix sums that no caller means, and those that stand for them with 70 tokens
ODD_BOUNDS = [
    ((-4, 40, 2**32 + 9), (0, 40, 70)),
    ((10, 60, 50, 65), (10, 60, 60, 65)),
    ((70, 0, 70, 3, 70), (70, 70, 70, 70, 70)),
    ((0, 64, -(2**40), 2**62), (0, 64, 64, 70)),
    ((0, 70, 0, 70, 0, 70), (0, 70, 70, 70, 70, 70)),
]


def keys_alike(size: int) -> tuple[Case, dict[str, Any]]:
    """No decay, full rate, keys that are nearly one."""
    case = Case((128,), H=1, HV=1, K=size, V=size, state=None, gate=GIVEN, alike=True)
    drawn = case.arguments()
    return case, drawn | dict(g=torch.zeros_like(drawn["g"]), beta=torch.ones_like(drawn["beta"]))
