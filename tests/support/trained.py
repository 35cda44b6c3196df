# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Arguments as leaves of a graph, and their gradients; what the gradients of every rule hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import pytest
import torch
from torch import Tensor

import custom

from .accuracy import skip_unless_taken
from .calls import runs_once


def with_leaves(names: Sequence[str], x: dict[str, Any]) -> dict[str, Any]:
    """`x` with leaves of a graph of their own under `names`, where they are given."""
    return {
        n: y.detach().requires_grad_() if n in names and y is not None else y for n, y in x.items()
    }


def gradients(
    names: Sequence[str],
    outputs: tuple[Tensor, ...],
    grads: tuple[Tensor, ...],
    x: dict[str, Any],
) -> dict[str, Tensor]:
    """Of every leaf of `names` that is there; zeros where nothing depends on it."""
    given = [(out, grad) for out, grad in zip(outputs, grads, strict=True) if out.requires_grad]
    leaves = {name: x[name] for name in names if x[name] is not None}
    if not given:
        return {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    outs, ups = zip(*((o, g.to(o.dtype).to(o.device)) for o, g in given), strict=True)
    found = torch.autograd.grad(outs, list(leaves.values()), ups, allow_unused=True)
    return {
        name: torch.zeros_like(leaf) if grad is None else grad
        for (name, leaf), grad in zip(leaves.items(), found, strict=True)
    }


class Drawn(Protocol):
    def arguments(self) -> dict[str, Any]: ...

    def moved(self, x: dict[str, Any], dtype: torch.dtype, device: Any) -> dict[str, Any]: ...


class Compared(NamedTuple):
    """Gradients by name: the op's, the recurrence's in the dtype under test, and in float64."""

    got: dict[str, Tensor]
    rounded: dict[str, Tensor]
    want: dict[str, Tensor]
    exact: dict[str, Any]  # the arguments in float64
    grads: tuple[Tensor, ...]  # of the outputs


@dataclass(frozen=True)
class Rule:
    """An op whose gradients are the op `<op>_grad`, and its recurrence, token by token."""

    op: str
    leaves: tuple[str, ...]
    # of the arguments and the dtype of the state between two tokens
    recurrence: Callable[[dict[str, Any], torch.dtype], tuple[Tensor, ...]]
    upstream: Callable[[dict[str, Any]], tuple[Tensor, Tensor]]

    def __call__(self, **x: Any) -> tuple[Tensor, Tensor]:
        return getattr(custom, self.op)(**x)

    def grad(self, **x: Any) -> tuple[Tensor, ...]:
        return getattr(torch.ops.custom, f"{self.op}_grad")(**x)

    def with_leaves(self, x: dict[str, Any]) -> dict[str, Any]:
        return with_leaves(self.leaves, x)

    def gradients(
        self, outputs: tuple[Tensor, ...], grads: tuple[Tensor, ...], x: dict[str, Any]
    ) -> dict[str, Tensor]:
        return gradients(self.leaves, outputs, grads, x)

    def of_recurrence(
        self, x: dict[str, Any], stored: torch.dtype, grads: tuple[Tensor, ...]
    ) -> dict[str, Tensor]:
        return self.gradients(self.recurrence(x, stored), grads, x)

    def compared(self, case: Drawn, dtype: torch.dtype, device: Any, backend: str) -> Compared:
        skip_unless_taken(dtype, device, backend)
        drawn = case.arguments()
        grads = self.upstream(drawn)
        plain = self.with_leaves(case.moved(drawn, dtype, "cpu"))
        # the same rounded numbers, and the upstream ones as the outputs' dtypes hold them
        exact = self.with_leaves(case.moved(plain, torch.float64, "cpu"))
        x = self.with_leaves(case.moved(drawn, dtype, device))
        outputs = self(**x)
        grads = tuple(g.to(o.dtype).double().cpu() for g, o in zip(grads, outputs, strict=True))
        with runs_once(f"{self.op}_grad", backend):
            got = self.gradients(outputs, grads, x)
        assert all(grad.dtype is x[name].dtype for name, grad in got.items())
        want = self.of_recurrence(exact, torch.float64, grads)
        return Compared(got, self.of_recurrence(plain, dtype, grads), want, exact, grads)

    def assert_near(self, case: Drawn, drawn: dict[str, Any], device: Any, most: float) -> None:
        """The gradients in float16 are off by less than `most` of their length."""
        grads = self.upstream(drawn)
        half = case.moved(drawn, torch.float16, "cpu")
        exact = self.with_leaves(case.moved(half, torch.float64, "cpu"))
        want = self.of_recurrence(exact, torch.float64, grads)
        x = self.with_leaves(case.moved(drawn, torch.float16, device))
        for name, grad in self.gradients(self(**x), grads, x).items():
            error = (grad.cpu().double() - want[name]).norm() / want[name].norm()
            assert error < most, f"{name}: {error}"

    def assert_trains_as(
        self, theirs: tuple[Tensor, ...], wide: dict[str, Any], x: dict[str, Any], most: float
    ) -> None:
        """The op's gradients are near those of `theirs`, made of the float32 arguments `wide`."""
        grads = self.upstream(x)
        want = self.gradients(theirs, grads, wide)
        for name, grad in self.gradients(self(**x), grads, x).items():
            error = (grad.float() - want[name]).norm() / want[name].norm()
            assert error < most, name

    def assert_equal_runs(self, case: Drawn, device: Any) -> None:
        x = self.with_leaves(case.moved(case.arguments(), torch.float16, device))
        grads = self.upstream(x)
        first, second = (self.gradients(self(**x), grads, x) for _ in "ab")
        for name, grad in first.items():
            assert torch.equal(grad, second[name]), name

    def for_grad(self, case: Drawn, device: Any) -> dict[str, Any]:
        """Arguments of the op of the gradients, in float16."""
        drawn = case.arguments()
        d_out, d_final = (x.to(device) for x in self.upstream(drawn))
        x = case.moved(drawn, torch.float16, device)
        return x | dict(d_out=d_out.half(), d_final_state=d_final.float())

    def assert_lengths_end_with_the_tokens(
        self, case: Drawn, name: str, odd: Sequence[int], device: Any, backend: str
    ) -> None:
        """`odd` under `name` means what the case's own lengths do."""
        x = self.for_grad(case, device)
        want = self.grad(**x)
        with runs_once(f"{self.op}_grad", backend):
            got = self.grad(**x | {name: torch.tensor(odd, device=device)})
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))

    def assert_one_output_is_enough(self, case: Drawn, device: Any) -> None:
        """A loss of one output alone has the gradient of both, with zeros for the other."""
        x = self.with_leaves(case.moved(case.arguments(), torch.float16, device))
        outputs, leaves = self(**x), [x[name] for name in self.leaves]
        for chosen, out in enumerate(outputs):
            one = torch.autograd.grad(out.sum(), leaves, retain_graph=True)
            ups = [torch.full_like(o, float(i == chosen)) for i, o in enumerate(outputs)]
            both = torch.autograd.grad(outputs, leaves, ups, retain_graph=True)
            for a, b in zip(one, both, strict=True):
                torch.testing.assert_close(a, b)
            assert any(a.any() for a in one)

    def gradcheck(self, case: Drawn) -> None:
        """Of `custom`'s function, and of the op beneath it."""
        if custom.config.backend != "auto":
            pytest.skip("float64 is the reference's")
        x = self.with_leaves(case.moved(case.arguments(), torch.float64, "cpu"))
        names = [name for name in self.leaves if x[name] is not None]
        for op in (self, getattr(torch.ops.custom, self.op)):

            def values(*given: Tensor, op: Any = op) -> Any:
                return op(**(x | dict(zip(names, given, strict=True))))

            assert torch.autograd.gradcheck(values, [x[name] for name in names], fast_mode=True)
