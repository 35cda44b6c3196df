# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The gated delta rule: drawn sequences, and single steps of a decode."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from .drawn import drawn


@dataclass(frozen=True)
class Sequences:
    lengths: tuple[int, ...]
    N: int = 2
    Nv: int = 4
    Dk: int = 32
    Dv: int = 32
    behind: int = 0  # tokens of no sequence
    state: torch.dtype | None = torch.float32
    gates: bool = True
    scale: float | None = None
    fading: float = 1.0  # times the decay's logarithm
    alike: bool = False  # keys nearly the same: what a triangle's powers would cancel in
    strided: bool = False  # query, key and value as views of one projection
    without: tuple[str, ...] = ()  # arguments not given
    rates: int = 0  # up to 1 or 2, of which beta is in front of the sigmoid

    def arguments(self) -> dict[str, Any]:
        """In float64, on the CPU; keys of length 1, as the rule needs them."""
        T = sum(self.lengths) + self.behind
        q, k = drawn(T, self.N, self.Dk), drawn(T, self.N, self.Dk)
        if self.alike:
            k = drawn(1, self.N, self.Dk) + k / 50
        q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
        state = drawn(len(self.lengths), self.Nv, self.Dv, self.Dk)
        every = dict(
            query=q,
            key=k,
            value=drawn(T, self.Nv, self.Dv),
            beta=made_by(self.rates, drawn(T, self.Nv)) if self.gates else None,
            initial_state=None if self.state is None else state,
            actual_seq_lengths=torch.tensor(self.lengths, dtype=torch.int32),
            scale=self.scale,
            g=-self.fading * drawn(T, self.Nv).exp() if self.gates else None,
            use_beta_sigmoid_in_kernel=self.rates > 0,
            allow_neg_eigval=self.rates == 2,
        )
        return every | dict.fromkeys(self.without)

    def moved(self, x: dict[str, Any], dtype: torch.dtype, device: Any) -> dict[str, Any]:
        """Activations in `dtype`; the decay and the state in their own."""
        exact = dtype is torch.float64
        kinds = {"g": dtype if exact else torch.float32}
        kinds["initial_state"] = dtype if exact else self.state

        moved = of_kinds(x, kinds, dtype, device)
        return joined(moved, ("query", "key", "value"), 1) if self.strided else moved


def made_by(rates: int, beta: Tensor) -> Tensor:
    return beta * 3 if rates else beta.sigmoid()


def made(x: dict[str, Any], beta: Tensor) -> Tensor:
    """The rates that a call makes of `beta`."""
    if not x["use_beta_sigmoid_in_kernel"]:
        return beta
    return (1 + x["allow_neg_eigval"]) / (1 + torch.exp(-beta))


def of_kinds(
    x: dict[str, Any], kinds: dict[str, torch.dtype], dtype: torch.dtype, device: Any
) -> dict[str, Any]:
    """Tensors on a device; those of floats in the dtype of their name, or in `dtype`."""

    def one(name: str, y: Any) -> Any:
        if not isinstance(y, Tensor) or not y.dtype.is_floating_point:
            return y.to(device) if isinstance(y, Tensor) else y
        return y.to(kinds.get(name, dtype)).to(device)

    return {name: one(name, y) for name, y in x.items()}


def joined(x: dict[str, Any], names: tuple[str, ...], dim: int) -> dict[str, Any]:
    """Some of them as parts of one tensor, from `dim` on."""
    wholes = [x[name].flatten(dim) for name in names]
    parts = torch.cat(wholes, dim).split([each.shape[dim] for each in wholes], dim)
    return x | {
        name: part.unflatten(dim, x[name].shape[dim:])
        for name, part in zip(names, parts, strict=True)
    }


# keys that are nearly one
KEYS_ALIKE = [
    Sequences((128,), N=1, Nv=1, Dk=size, Dv=size, state=None, gates=False, alike=True)
    for size in (64, 48)
]
# lengths that no caller means, and those that stand for them with 70 tokens
ODD_LENGTHS = [
    ((40, 2**32 + 9), (40, 30)),
    ((-200, 60, 10), (0, 60, 10)),
    ((40, -(2**32) + 5, 20), (40, 0, 20)),
    ((2**62, 2**62, 5), (70, 0, 0)),
    ((64, 2**31 - 1, 2**31 - 1), (64, 6, 0)),
]


def qwen3_next_chunks(x: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Hugging Face's chunked form, of twice as many value heads: output and final state."""
    qwen = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    out, last = qwen.torch_chunk_gated_delta_rule(
        x["query"].repeat_interleave(2, 1)[None],
        x["key"].repeat_interleave(2, 1)[None],
        x["value"][None],
        g=x["g"][None],
        beta=x["beta"][None],
        initial_state=x["initial_state"].mT,
        output_final_state=True,
    )
    return out[0], last.mT


@dataclass(frozen=True)
class Step:
    B: int = 2
    T: int = 1
    H: int = 2
    HV: int = 4
    K: int = 32
    V: int = 32
    layout: str = "kv"
    kda: bool = False
    norm: bool = True
    state: torch.dtype = torch.float32
    slots: tuple[int, ...] = (3, 1)
    lengths: tuple[int, ...] | None = None
    steps: int = 0  # of intermediate states
    rows: tuple[int, ...] = ()
    parents: tuple[tuple[int, ...], ...] | None = None
    gap: int = 0  # elements between two slots
    options: dict[str, Any] = field(default_factory=dict)

    def pool(self, *leading: int) -> Tensor:
        shape = (self.K, self.V) if self.layout == "kv" else (self.V, self.K)
        size = self.HV * self.K * self.V
        whole = torch.randn(*leading, size + self.gap, dtype=torch.float64)
        return whole[..., :size].unflatten(-1, (self.HV, *shape))

    def arguments(self) -> dict[str, Any]:
        """All of the op's arguments in float64 (but for the pools' dtype), on the CPU."""
        channels = (self.K,) if self.kda else ()
        return (
            dict(
                A_log=drawn(self.HV) / 2,
                a=drawn(self.B, self.T, self.HV, *channels),
                dt_bias=drawn(self.HV, *channels),
                softplus_beta=1.0,
                softplus_threshold=20.0,
                q=drawn(self.B, self.T, self.H, self.K),
                k=drawn(self.B, self.T, self.H, self.K),
                v=drawn(self.B, self.T, self.HV, self.V),
                b=drawn(self.B, self.T, self.HV),
                initial_state_source=self.pool(6),
                initial_state_indices=torch.tensor(self.slots, dtype=torch.int64),
                scale=None,
                use_qk_l2norm_in_kernel=self.norm,
                cu_seqlens=(
                    None if self.lengths is None else torch.tensor([0, *self.lengths]).cumsum(0)
                ),
                state_layout=self.layout,
                is_kda=self.kda,
                disable_state_update=False,
                intermediate_states=self.pool(5, self.steps) if self.steps else None,
                intermediate_state_indices=torch.tensor(self.rows) if self.steps else None,
                retrieve_parent_token=None if self.parents is None else torch.tensor(self.parents),
                lower_bound=None,
                allow_neg_eigval=False,
            )
            | self.options
        )


POOLS = ("initial_state_source", "intermediate_states")


def moved(arguments: dict[str, Any], dtype: torch.dtype, case: Step, device: Any) -> dict[str, Any]:
    """Activations in `dtype`, gates' parameters in float32, pools in their own dtype; the pools
    are fresh and keep the distance of their slots."""

    def one(name: str, x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.dtype.is_floating_point:
            return x.to(device) if isinstance(x, Tensor) else x
        if name in POOLS:
            kind = torch.float64 if dtype is torch.float64 else case.state
            fresh = torch.empty_strided(x.shape, x.stride(), dtype=kind, device=device)
            return fresh.copy_(x)
        kind = torch.promote_types(dtype, torch.float32) if name in ("A_log", "dt_bias") else dtype
        return x.to(kind).to(device)

    return {name: one(name, x) for name, x in arguments.items()}
