# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""One row of a benchmark: how to make its arguments, what it must at least move and compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..dispatch.common.nz import from_nz

Arguments = dict[str, Any]
Outputs = Sequence[Tensor]


@dataclass(frozen=True)
class Case:
    """`drawn` gives the arguments of `torch.ops.custom.<op>`; `part(arguments)` gives
    (arguments, select): a piece small enough for the reference, and which part of the full outputs
    it must equal (it may change the arguments, which the check alone uses).  `peers` are other
    implementations: name -> function of the arguments that returns the call to time, or None where
    it is not installed.  `stages(arguments)` are the calls that a composed op is made of, in
    order, each on what the one before it gave.  `reference` is false where the reference takes
    seconds even on a GPU, and is not timed; `ordered` where rounding decides in which order the
    numbers of a row come; `rate` how many times as fast as bf16 its
    products can be."""

    op: str
    label: str
    drawn: Callable[[Draw], Arguments]
    part: Callable[[Arguments], tuple[Arguments, Callable[[Outputs], Outputs]]]
    bytes: float
    flops: float
    shape: dict[str, int]
    peers: dict[str, Callable[[Arguments], Callable[[], Any] | None]] = field(default_factory=dict)
    stages: Callable[[Arguments], dict[str, Callable[[], Any]]] | None = None
    reference: bool = True
    ordered: bool = True
    rate: float = 1.0
    tolerance: float = 2e-2  # relative Frobenius error; one bf16 rounding is 2**-9

    def make(self, device: torch.device, seed: int) -> Arguments:
        return self.drawn(Draw(device, seed))

    def call(self, arguments: Arguments) -> Any:
        return getattr(torch.ops.custom, self.op)(**arguments)


def in_linear(case: Case) -> Case:
    """The row with its NZ weights as nn.Linear has them, without the peers."""

    def make(draw: Draw) -> Arguments:
        arguments = case.drawn(draw)
        for name, x in arguments.items():
            if isinstance(x, Tensor) and x.ndim >= 4 and name.startswith(("w_", "weight_")):
                arguments[name] = from_nz(x).mT.contiguous()
        return arguments | dict(weight_format="linear")

    return replace(case, drawn=make, label=f"{case.label}, linear", peers={}, stages=None)


class Draw:
    """Random tensors on the device itself: a benchmark's caches are too large to move."""

    def __init__(
        self, device: torch.device, seed: int, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        self.device, self.dtype = device, dtype
        self.random = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype | None = None, std: float = 1.0) -> Tensor:
        out = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        return out.normal_(0, std, generator=self.random)

    def full(self, *shape: int, value: int) -> Tensor:
        return torch.full(shape, value, dtype=torch.int32, device=self.device)

    def table(self, requests: int, pages: int) -> Tensor:
        """A shuffled block table: requests x pages distinct pages."""
        order = torch.randperm(requests * pages, device=self.device, generator=self.random)
        return order.view(requests, pages).to(torch.int32)

    def chosen(self, rows: int, count: int, length: int) -> Tensor:
        """`count` ascending distinct positions below `length`, for every row."""
        step = length // count
        base = torch.arange(count, device=self.device) * step
        jitter = torch.randint(step, (rows, count), device=self.device, generator=self.random)
        return (base + jitter).to(torch.int32)
