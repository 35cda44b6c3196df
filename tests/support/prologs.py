# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Both prologs: drawn tokens, weights in every form, caches of which every number is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

import custom

from .accuracy import assert_close_to_float64, every_dtype
from .calls import CPU
from .golden import Golden, Layer
from .samples import sample

# of a weight [K, N]: how it is made, and its weight_format
FORMS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "4-D NZ": (custom.to_nz, "nz"),
    "2-D NZ": (lambda w: custom.to_nz(w, flat=True), "nz"),
    "row-major": (lambda w: w.contiguous(), "nd"),
    "linear": (lambda w: w.t().contiguous(), "linear"),
}


def every_formula(test: Callable[..., None]) -> Callable[..., None]:
    """Over dtypes, numbers of tokens, and which numbers of a pair stand together."""
    for cases in (
        every_dtype,
        pytest.mark.parametrize(("B", "S"), [(1, 1), (3, 2), (5, 7)]),
        pytest.mark.parametrize("interleaved", [True, False]),
    ):
        test = cases(test)
    return test


class Tokens:
    """B * S drawn tokens, and caches whose every number is known."""

    def __init__(self, B: int, S: int, dtype: torch.dtype, **sizes: int) -> None:
        self.dtype = dtype
        self.layer = Layer.draw(**sizes).to(dtype).to(torch.float64)
        H, Dr = self.layer.w_dq.shape[0], sizes.get("Dr", 16)
        # sines and cosines off the unit circle, with halves that differ, as in public tests
        self.x, self.sin, self.cos = (
            torch.randn(B, S, size).to(dtype).double() for size in (H, Dr, Dr)
        )
        self.pages, self.page = B * S // 8 + 2, 16
        self.slots = torch.randperm(self.pages * self.page)[: B * S].view(B, S)

    def cache(self, size: int, device) -> Tensor:
        numbers = torch.arange(self.pages * self.page * size) % 97
        return numbers.view(self.pages, self.page, 1, size).to(device, self.dtype)

    def without_slots(self, beyond: int = 0) -> Tokens:
        """Every fourth token has none, and every fourth one behind the cache."""
        self.slots.view(-1)[1::4] = -1
        self.slots.view(-1)[2::4] = self.pages * self.page + beyond
        return self

    def to(
        self, device, form: str
    ) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
        """What moves a tensor to the device, and a weight in this form."""
        return (
            lambda x: x.to(device, self.dtype),
            lambda x: FORMS[form][0](x.to(self.dtype)).to(device),
        )

    def outputs(self, prolog: Callable[[Golden, tuple[int, int]], Sequence[Tensor]]) -> list[list]:
        """What the formulas give in the dtype and in float64: each output's rows."""
        goldens = [Golden(self.layer, kind) for kind in (self.dtype, torch.float64)]
        return [
            list(zip(*(prolog(golden, at) for at in self.each()), strict=True))
            for golden in goldens
        ]

    def each(self):
        """(b, s) of every token."""
        return [(b, s) for b in range(self.x.shape[0]) for s in range(self.x.shape[1])]

    def expected_cache(self, before: Tensor, rows: list[Tensor]) -> Tensor:
        """float64 [slots, size]: the rows where they belong, all else as before."""
        after = before.cpu().double().flatten(0, 2)
        for (b, s), row in zip(self.each(), rows, strict=True):
            if 0 <= self.slots[b, s] < len(after):
                after[self.slots[b, s]] = row.double()
        return after


def check_outputs(
    names: Sequence[str], outs: Sequence[Tensor], dtype: torch.dtype, plain: list, exact: list
) -> None:
    for name, out, near, wanted in zip(names, outs, plain, exact, strict=False):
        assert out.dtype is dtype and out.is_contiguous()
        assert_close_to_float64(name, out.flatten(0, 1), torch.stack(near), torch.stack(wanted))


def check_caches(tokens: Tokens, name: str, got: Tensor, before: Tensor, plain, exact) -> None:
    """New rows within the bound; all others bit by bit as they were."""
    got, kept = got.cpu().flatten(0, 2), before.cpu().flatten(0, 2)
    written = torch.zeros(len(got), dtype=torch.bool)
    inside = tokens.slots[(tokens.slots >= 0) & (tokens.slots < len(got))].long()
    written[inside] = True
    assert torch.equal(got[~written], kept[~written]), f"{name}: a slot changed that none names"
    assert_close_to_float64(
        name,
        got[written],
        tokens.expected_cache(before, plain)[written],
        tokens.expected_cache(before, exact)[written],
    )


def refuse(op: str, change: dict, error, message: str) -> None:
    """`change` makes the op raise, and no cache is written."""
    arguments = sample(op, CPU, torch.float32) | change
    caches = [name for name in arguments if name.endswith("cache")]
    before = {name: arguments[name].clone() for name in caches}
    with pytest.raises(error, match=f"^{op}: .*{message}"):
        getattr(custom, op)(**arguments)
    for name in caches:
        assert torch.equal(arguments[name], before[name])
