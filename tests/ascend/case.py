# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""One case: the arguments of one call of one op, and the judgement of its result."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from custom.dispatch.dispatch_keys import written
from custom.dispatch.registry import BY_NAME
from custom.npu_ops.common import tiling
from torch import Tensor

from . import memory

Arguments = dict[str, Any]
Finding = tuple[float, str]  # share of the bound that was used (over 1 is wrong), sentence


class Inputs:
    """Draws the tensors of a case from one seed, into guarded memory."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> None:
        self.dtype = dtype
        self.random = torch.Generator().manual_seed(seed)
        self.forbidden: list[tuple[Tensor, list[int]]] = []

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        drawn = torch.randn(*shape, generator=self.random) * scale
        return memory.guarded(drawn.to(dtype or self.dtype))

    def whole(self, *shape: int, low: int, high: int) -> Tensor:
        """Small whole numbers as floats: their products and sums are exact, and they tie."""
        drawn = torch.randint(low, high, shape, generator=self.random)
        return memory.guarded(drawn.to(self.dtype))

    def ints(self, values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
        return memory.guarded(torch.as_tensor(values).to(dtype))

    def permutation(self, count: int) -> Tensor:
        return torch.randperm(count, generator=self.random)

    def forbid(self, tensor: Tensor, blocks: Iterable[int]) -> None:
        """`tensor[block]` must never be touched by the kernels: it is filled with NaN as well."""
        listed = list(blocks)
        tensor[listed] = float("nan")
        self.forbidden.append((tensor, listed))


def in_rounds(workspace: int, make: Callable[[Inputs], Arguments]) -> Callable[[Inputs], Arguments]:
    """With so many bytes of workspace; a case has its process to itself."""

    def small(x: Inputs) -> Arguments:
        tiling.WORKSPACE = workspace
        return make(x)

    return small


# the reference sums in the 8 or more lanes of a CPU's vector unit, the cube (and the lowered form)
# one product after the other: its rounding errors walk the square root of that farther
_SEQUENTIAL = 8**0.5


def judge_floats(
    name: str, got: Tensor, exact: Tensor, rounded: Tensor, beyond: float = 0.0
) -> Finding:
    """Error against float64 within twice the error of the reference in the op's own dtype, plus
    one rounding of the largest value, and `beyond` it what roundings on the way give.  Where an
    output is float32, the error is all summation."""
    if got.shape != exact.shape:
        return float("inf"), f"{name} has shape {list(got.shape)}, expected {list(exact.shape)}"
    if got.numel() == 0:
        return 0.0, f"{name} is empty"
    same = (got.isinf() & exact.isinf() & (got.sign() == exact.sign())) | (
        got.isnan() & exact.isnan()
    )
    finite = exact.isfinite()
    if not (same | (finite & got.isfinite())).all():
        return float("inf"), f"{name} is not finite where it should be"
    zero = torch.zeros((), dtype=torch.float64)
    error = torch.where(finite, got.double() - exact, zero).abs()
    usual = torch.where(finite, rounded.double() - exact, zero).abs().max().item()
    largest = torch.where(finite, exact, zero).abs().max().item()
    if got.dtype is torch.float32:
        usual *= _SEQUENTIAL
    if usual > largest * torch.finfo(got.dtype).eps ** 0.5:
        return float("inf"), f"{name}: the reference itself is off by {usual:.1e}: no bound"
    bound = 2 * usual + torch.finfo(got.dtype).eps * largest + beyond
    worst = error.max().item()
    share = worst / bound if bound else float(worst > 0) * float("inf") if worst else 0.0
    return share, f"{name}: error {worst:.1e} of {bound:.1e}"


def judge(case: Case, got: Arguments, exact: Arguments, rounded: Arguments) -> list[Finding]:
    """The usual judgement: floats by the derived bound, whole numbers exactly."""
    found = []
    for name, value in got.items():
        if value.dtype.is_floating_point:
            found.append(judge_floats(name, value, exact[name], rounded[name]))
        else:
            wrong = int((value.long() != exact[name].long()).sum())
            found.append((float("inf") if wrong else 0.0, f"{name}: {wrong} entries differ"))
    return found


@dataclass(frozen=True)
class Case:
    """`make` draws the arguments; `cores` are the cube core counts to run with; `judge` compares
    the outputs and the mutated arguments by name; `widen` makes the float64 arguments of the
    reference."""

    op: str
    name: str
    make: Callable[[Inputs], Arguments]
    dtype: torch.dtype = torch.bfloat16
    cores: tuple[int, ...] = (24, 5)
    judge: Callable[..., list[Finding]] = field(default=judge)
    widen: Callable[[Arguments], Arguments] = field(default=lambda x: in_float64(x))
    seed: int = 0

    @property
    def title(self) -> str:
        return f"{self.op.removeprefix('npu_')}: {self.name}"


def in_float64(arguments: Arguments) -> Arguments:
    return {
        name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in arguments.items()
    }


def copied(arguments: Arguments) -> Arguments:
    """A tensor that comes twice is one in the copies too."""
    copies = {id(x): x.clone() for x in arguments.values() if isinstance(x, Tensor)}
    return {name: copies.get(id(value), value) for name, value in arguments.items()}


def results(op: str, outputs: Any, arguments: Arguments) -> Arguments:
    """Outputs by position and mutated arguments by name."""
    listed = (outputs,) if isinstance(outputs, Tensor) else tuple(outputs or ())
    named: Arguments = {f"output {i}": value for i, value in enumerate(listed)}
    for _, name in written(getattr(torch.ops.custom, op).default):
        if arguments.get(name) is not None:
            named[name] = arguments[name]
    return named


def reference(op: str, arguments: Arguments) -> Arguments:
    """The CPU reference on its own copies, all arguments of the schema given."""
    spec = BY_NAME[op]
    module = importlib.import_module(f"custom.dispatch.reference.{spec.module}")
    schema = getattr(torch.ops.custom, op).default._schema
    full = {a.name: arguments.get(a.name, a.default_value) for a in schema.arguments}
    return results(op, getattr(module, spec.function)(**full), full)
