# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Arguments of the causal convolution, of whole sequences and of a step, and of the gated norm."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from .accuracy import skip_float64
from .drawn import drawn, ints

SLOTS = 6
POOL = 12
# blocks of three sequences
TABLE = ((4, 8, 2, 9), (1, 6, 11, 3), (0, 5, 7, 10))


def moved(x: dict[str, Any], dtype: torch.dtype, device: Any) -> dict[str, Any]:
    """Copies of the tensors on the device, those of floats in the dtype."""

    def one(y: Any) -> Any:
        if not isinstance(y, Tensor):
            return y
        return y.to(dtype if y.dtype.is_floating_point else y.dtype, copy=True).to(device)

    return {name: one(y) for name, y in x.items()}


def skip_unless_taken(case: Step | Pooled, dtype: torch.dtype, backend: str) -> None:
    """A kernel of the NPU reads a state's channels side by side."""
    skip_float64(dtype, backend)
    if backend == "npu" and case.turned:
        pytest.skip("channels lie side by side")


@dataclass(frozen=True)
class Whole:
    lengths: tuple[int, ...]
    D: int = 40
    W: int = 4
    before: int = 0  # tokens of no sequence
    behind: int = 0
    history: bool = True
    bias: bool = True
    activation: str | None = "silu"
    packed: bool = True
    strided: bool = False  # x cut out of wider rows, weight and history turned

    def arguments(self) -> dict[str, Any]:
        """In float64, on the CPU."""
        N, total = len(self.lengths), self.before + sum(self.lengths) + self.behind
        shape = (total, self.D) if self.packed else (N, self.lengths[0], self.D)
        sums = torch.tensor([*accumulate(self.lengths, initial=self.before)])
        return dict(
            x=drawn(*shape),
            weight=drawn(self.W, self.D),
            bias=drawn(self.D) if self.bias else None,
            initial_states=drawn(N, self.W - 1, self.D) if self.history else None,
            query_start_loc=sums if self.packed else None,
            activation=self.activation,
        )

    def moved(self, x: dict[str, Any], dtype: torch.dtype, device: Any) -> dict[str, Any]:
        made = moved(x, dtype, device)
        if self.strided:
            made["x"] = torch.stack([made["x"], made["x"]], -2)[..., 0, :]
            for name in ("weight", "initial_states"):
                if made[name] is not None:
                    made[name] = made[name].mT.contiguous().mT
        return made


@dataclass(frozen=True)
class Step:
    slots: tuple[int, ...] | None = (3, -1, 0)
    S: int = 1
    D: int = 40
    W: int = 4
    L: int = 3
    bias: bool = True
    activation: str | None = "silu"
    starts: tuple[int, ...] | None = None  # then S are all tokens
    accepted: tuple[int, ...] | None = None
    pad: int = -1
    rows: tuple[int, ...] | None = None
    steps: int = 4
    parents: tuple[tuple[int, ...], ...] | None = None
    turned: bool = False  # columns side by side, as sglang's pools have them

    def arguments(self) -> dict[str, Any]:
        def ints(values: Any) -> Tensor | None:
            return None if values is None else torch.tensor(values)

        N = 3 if self.slots is None else len(self.slots)
        window = None if self.rows is None else drawn(5, self.steps, self.W - 1, self.D)
        return dict(
            x=drawn(N, self.S, self.D) if self.starts is None else drawn(self.S, self.D),
            conv_states=drawn(SLOTS, self.L, self.D),
            weight=drawn(self.W, self.D),
            bias=drawn(self.D) if self.bias else None,
            activation=self.activation,
            conv_state_indices=ints(self.slots),
            query_start_loc=ints(self.starts),
            num_accepted_tokens=ints(self.accepted),
            pad_slot_id=self.pad,
            disable_state_update=self.parents is not None,
            intermediate_conv_window=window,
            intermediate_state_indices=ints(self.rows),
            retrieve_parent_token=ints(self.parents),
        )

    def moved(self, x: dict[str, Any], dtype: torch.dtype, device: Any) -> dict[str, Any]:
        made = moved(x, dtype, device)
        if self.turned:
            for name in ("conv_states", "weight", "intermediate_conv_window"):
                if made[name] is not None:
                    made[name] = made[name].mT.contiguous().mT
        return made


@dataclass(frozen=True)
class Pooled:
    """A call of torch_npu's fused convolution."""

    lengths: tuple[int, ...] = (5, 1, 3)
    slots: tuple[Any, ...] | None = (3, 7, 0)
    D: int = 40
    W: int = 3
    L: int = 4
    packed: bool = True
    sums: tuple[int, ...] | None = None
    accepted: tuple[int, ...] | None = None
    computed: tuple[int, ...] | None = None
    blocks: tuple[tuple[int, ...], ...] | None = None  # first, last, initial
    bias: bool = False
    turned: bool = False  # columns side by side
    options: tuple[tuple[str, Any], ...] = ()

    def arguments(self) -> dict[str, Any]:
        sums = self.sums or tuple(accumulate(self.lengths, initial=0))
        shape = (sum(self.lengths),) if self.packed else (len(self.lengths), self.lengths[0])
        first, last, initial = self.blocks or (None, None, None)
        return dict(
            x=drawn(*shape, self.D),
            weight=drawn(self.W, self.D),
            conv_states=drawn(POOL, self.L, self.D),
            query_start_loc=ints(sums) if self.packed else None,
            cache_indices=ints(self.slots),
            bias=drawn(self.D) if self.bias else None,
            num_accepted_tokens=ints(self.accepted),
            num_computed_tokens=ints(self.computed),
            block_idx_first_scheduled_token=ints(first),
            block_idx_last_scheduled_token=ints(last),
            initial_state_idx=ints(initial),
            **dict(self.options),
        )

    def moved(self, x: dict[str, Any], dtype: torch.dtype, device: Any) -> dict[str, Any]:
        made = moved(x, dtype, device)
        if self.turned:
            for name in ("conv_states", "weight"):
                made[name] = made[name].mT.contiguous().mT
        return made


@dataclass(frozen=True)
class Norm:
    shape: tuple[int, ...]
    group: int | None = None
    before: bool = True
    activation: str = "silu"
    epsilon: float = 1e-6
    scale: float = 1.0
    strided: bool = False  # x and gate as parts of a wider projection

    def arguments(self) -> dict[str, Any]:
        """In float64, on the CPU."""
        x = drawn(*self.shape) * self.scale
        return dict(
            x=x,
            gate=drawn(*self.shape),
            weight=drawn(self.shape[-1]),
            epsilon=self.epsilon,
            group_size=self.group,
            norm_before_gate=self.before,
            activation=self.activation,
        )

    def moved(self, x: dict[str, Any], dtype: torch.dtype, device: Any) -> dict[str, Any]:
        made = {n: y.to(dtype).to(device) if isinstance(y, Tensor) else y for n, y in x.items()}
        if self.strided:
            both = torch.cat([made["x"], made["gate"]], -2)
            made["x"], made["gate"] = both.chunk(2, -2)
        return made


@dataclass(frozen=True)
class Layer:
    """A decode step of a gated-delta layer."""

    B: int = 3
    S: int = 1
    N: int = 2
    Nv: int = 4
    Dk: int = 32
    Dv: int = 16
    W: int = 4
    L: int = 3
    layout: str = "kv"
    state: torch.dtype = torch.float32
    slots: tuple[int, ...] = (3, -1, 0)
    sigmoid: bool = False
    bias: bool = True
    rows: tuple[int, ...] | None = None
    parents: tuple[tuple[int, ...], ...] | None = None
    kda: bool = False
    bound: float | None = None
    twice: bool = False
    flat: bool = False  # the channels of a and dt_bias lie in one dimension

    def arguments(self, dtype: torch.dtype, device: Any) -> dict[str, Any]:
        """z, a and b as parts of one projection."""

        def drawn(*shape: int, kind: torch.dtype = dtype) -> Tensor:
            return torch.randn(*shape).to(kind).to(device)

        exact = dtype if dtype is torch.float64 else torch.float32
        C, tokens = 2 * self.N * self.Dk + self.Nv * self.Dv, (self.B, self.S)
        size = (self.Dk, self.Dv) if self.layout == "kv" else (self.Dv, self.Dk)
        channels = self.Nv * (self.Dk if self.kda else 1)
        parts = drawn(*tokens, C + self.Nv * self.Dv + channels + self.Nv)
        mixed, z, a, b = parts.split([C, self.Nv * self.Dv, channels, self.Nv], -1)
        bias = drawn(channels, kind=exact)
        if self.kda and not self.flat:
            a, bias = a.unflatten(-1, (self.Nv, self.Dk)), bias.view(self.Nv, self.Dk)
        verified = None if self.rows is None else ints(self.rows).to(device)
        kept = self.rows is not None
        return dict(
            mixed_qkv=mixed,
            z=z.unflatten(-1, (self.Nv, self.Dv)),
            a=a,
            b=b,
            conv_states=drawn(SLOTS, self.L, C),
            states=drawn(SLOTS, self.Nv, *size, kind=dtype if exact is dtype else self.state),
            conv_weight=drawn(C, self.W).t(),
            A_log=drawn(self.Nv, kind=exact),
            dt_bias=bias,
            norm_weight=drawn(self.Dv),
            state_indices=torch.tensor(self.slots, dtype=torch.int64, device=device),
            conv_bias=drawn(C) if self.bias else None,
            state_layout=self.layout,
            gate_activation="sigmoid" if self.sigmoid else "silu",
            disable_state_update=self.parents is not None,
            intermediate_states=drawn(5, self.S, self.Nv, *size, kind=exact) if kept else None,
            intermediate_conv_window=drawn(5, self.S, self.W - 1, C) if kept else None,
            intermediate_state_indices=verified,
            retrieve_parent_token=None
            if self.parents is None
            else ints(self.parents).view(self.B, self.S).to(device),
            is_kda=self.kda,
            lower_bound=self.bound,
            allow_neg_eigval=self.twice,
        )
