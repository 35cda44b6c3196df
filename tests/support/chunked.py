# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What holds for every delta rule over whole sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import custom

from .accuracy import assert_close_to_float64, skip_unless_taken
from .calls import assert_refuses, runs_once
from .delta_rule import Sequences
from .kda import Case

Outputs = tuple[Tensor, Tensor]
Test = Callable[..., None]


def each(cases: Sequence[Sequences | Case]) -> Callable[[Test], Test]:
    """In every dtype that a rule takes."""
    dtypes = (torch.float32, torch.float16, torch.bfloat16)

    def over(test: Test) -> Test:
        in_dtypes = pytest.mark.parametrize("dtype", dtypes, ids=str)
        return in_dtypes(pytest.mark.parametrize("case", cases, ids=str)(test))

    return over


@dataclass(frozen=True)
class Chunked:
    """An op, its reference, and its recurrence whose state has a dtype between two tokens."""

    op: str
    reference: Callable[..., Outputs]
    in_dtype: Callable[[dict[str, Any], torch.dtype], Outputs]

    def __call__(self, **x: Any) -> Outputs:
        return getattr(custom, self.op)(**x)

    def assert_equals_the_recurrence(
        self,
        case: Sequences | Case,
        drawn: dict[str, Any],
        dtype: torch.dtype,
        device: Any,
        backend: str,
    ) -> None:
        skip_unless_taken(dtype, device, backend)
        plain = case.moved(drawn, dtype, "cpu")
        with runs_once(self.op, backend):
            out, state = self(**case.moved(drawn, dtype, device))
        want, want_state = self.reference(**case.moved(plain, torch.float64, "cpu"))
        rounded, rounded_state = self.in_dtype(plain, dtype)
        assert_close_to_float64("out", out, rounded, want)
        # what a chunk adds to a state is rounded to the dtype of the products once
        step = torch.finfo(dtype).eps / 2 * float(want_state.abs().max()) if state.numel() else 0.0
        assert_close_to_float64("state", state, rounded_state, want_state, beyond=step)
        assert state.dtype is (case.state or torch.float32)

    def assert_refuses(
        self, case: Sequences | Case, change: dict[str, Any], error: type[Exception], sentence: str
    ) -> None:
        good = case.moved(case.arguments(), torch.float32, "cpu")
        assert_refuses(self.op, good | change, error, sentence)

    def assert_near(
        self, case: Sequences | Case, drawn: dict[str, Any], device: Any, most: float
    ) -> None:
        """The results in float16 are off by less than `most` of their length."""
        x = case.moved(drawn, torch.float16, "cpu")
        exact = self.reference(**case.moved(x, torch.float64, "cpu"))
        for got, want in zip(self(**case.moved(x, torch.float16, device)), exact, strict=True):
            assert (got.cpu().double() - want).norm() / want.norm() < most

    def assert_lengths_end_with_the_tokens(
        self, case: Sequences | Case, name: str, odd: Sequence[int], device: Any, backend: str
    ) -> None:
        """`odd` under `name` means what the case's own lengths do."""
        x = case.moved(case.arguments(), torch.float16, device)
        want = self(**x)
        with runs_once(self.op, backend):
            got = self(**x | {name: torch.tensor(odd, device=device)})
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
