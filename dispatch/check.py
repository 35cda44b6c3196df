# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The vocabulary of the argument checks: each answers with the op, the argument, what came, what
is wanted.  Sizes may be symbolic; nothing here reads a tensor's values."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from . import log

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.int32, torch.int64)


def tensors(arguments: Mapping[str, object], *names: str) -> dict[str, Tensor]:
    """Those of these names, or all, that are tensors."""
    given = ((name, arguments[name]) for name in names or arguments)
    return {name: value for name, value in given if isinstance(value, Tensor)}


@cache
def _letters(wanted: str) -> tuple[tuple[str, int | None], ...]:
    """Every letter of a shape, with its size if it is a number."""
    return tuple((x, int(x) if x.isdigit() else None) for x in wanted.split())


def _views(came: list[int], wanted: int) -> Iterator[tuple[str, list[int]]]:
    """(how it is written, its shape) of views with `wanted` dimensions."""
    count = len(came)
    if count == wanted + 1:
        if count > 2:
            yield ".flatten(0, 1)", [came[0] * came[1], *came[2:]]
        for at in (at for at in range(count) if came[at] == 1):
            rest = came[:at] + came[at + 1 :]
            yield f".squeeze({at})", rest
            for view, shape in _views(rest, wanted):
                yield f".squeeze({at}){view}", shape
    if count == wanted - 1:
        for at in range(wanted):
            yield f".unsqueeze({at})", [*came[:at], 1, *came[at:]]
    if count == wanted and count > 1:
        yield ".t()" if count == 2 else ".mT", [*came[:-2], came[-1], came[-2]]
        for i, j in combinations(range(count), 2):
            if (i, j) != (count - 2, count - 1):
                shape = [*came]
                shape[i], shape[j] = shape[j], shape[i]
                yield f".transpose({i}, {j})", shape


class Checker:
    """Checks of one call of one op; remembers the size each letter was given, and by whom."""

    def __init__(self, op: str) -> None:
        self.op = op
        self.sizes: dict[str, Any] = {}
        self._from: dict[str, str] = {}

    def fail(self, sentence: str, error: type[Exception] = ValueError) -> None:
        raise error(f"{self.op}: {sentence}")

    def require(self, condition: Any, sentence: str) -> None:
        if not condition:
            self.fail(sentence)

    def note(self, what: str, sentence: str) -> None:
        """Legal, and most often a mistake: said once."""
        log.once((self.op, what), f"{self.op}: {sentence}")

    def shape(self, name: str, tensor: Tensor, wanted: str, **sizes: Any) -> None:
        """`wanted` is letters and numbers: "B S N D", "pages P 1 D".  A letter seen before (or
        given by keyword) must have its old size; a new one takes the size that came."""
        self.sizes.update(sizes)
        letters, came = _letters(wanted), tensor.shape
        fits, new = len(came) == len(letters), {}
        for (letter, number), got in zip(letters, came, strict=False):
            want = self.sizes.get(letter) if number is None else number
            if want is None:
                new[letter] = got
            elif got != want:
                fits = False
        if not fits:
            self.fail(
                f"`{name}` has shape {list(came)}, expected {self._expected(wanted.split())}"
                + self._turned(name, came, letters)
            )
        for letter, got in new.items():
            self.sizes[letter], self._from[letter] = got, name

    def _turned(
        self, name: str, came: Sequence[Any], letters: Sequence[tuple[str, int | None]]
    ) -> str:
        """The view that has the shape, if there is one."""
        if not all(type(size) is int for size in came):
            return ""
        known = [self.sizes.get(x) if number is None else number for x, number in letters]
        for view, shape in _views(list(came), len(letters)):
            agreed = [
                got == want for got, want in zip(shape, known, strict=True) if want is not None
            ]
            # a new dimension of 1 may stand anywhere: others have to say where
            if all(agreed) and (len(shape) <= len(came) or len(agreed) > 1):
                return f" Pass {name}{view}."
        return ""

    def _expected(self, letters: Sequence[str]) -> str:
        fixed = [x for x in dict.fromkeys(letters) if x in self.sizes]
        values = ", ".join(f"{x}={self.sizes[x]}" for x in fixed)
        owners = ", ".join(
            f"`{x}`" for x in dict.fromkeys(self._from.get(y, "") for y in fixed) if x
        )
        return (
            f"[{', '.join(letters)}]"
            + (f" with {values}" if values else "")
            + (f" (from {owners})." if owners else ".")
        )

    def dtype(self, name: str, tensor: Tensor, *wanted: torch.dtype) -> None:
        if tensor.dtype not in wanted:
            names = ", ".join(str(each).removeprefix("torch.") for each in wanted)
            came = str(tensor.dtype).removeprefix("torch.")
            self.fail(f"`{name}` is {came}, expected {names}. Convert it with .to().", TypeError)

    def floating(self, name: str, tensor: Tensor) -> None:
        """bfloat16 and float16 everywhere; the CPU reference also takes float32 and float64."""
        self.dtype(name, tensor, *FLOATS)

    def integer(self, name: str, tensor: Tensor) -> None:
        self.dtype(name, tensor, *INTEGERS)

    def floats(self, name: str, tensor: Tensor | None, wanted: str) -> None:
        """Numbers of floating point, of that shape; None: there are none."""
        if tensor is not None:
            self.floating(name, tensor)
            self.shape(name, tensor, wanted)

    def integers(self, name: str, tensor: Tensor | None, wanted: str) -> None:
        """Whole numbers likewise."""
        if tensor is not None:
            self.integer(name, tensor)
            self.shape(name, tensor, wanted)

    def same_dtype(self, **tensors: Tensor | None) -> None:
        self._same("dtype", "Convert one of them with .to().", TypeError, tensors)

    def same_device(self, **tensors: Tensor | None) -> None:
        self._same("device", "Move one of them with .to().", ValueError, tensors)

    def _same(
        self, what: str, remedy: str, error: type[Exception], tensors: dict[str, Tensor | None]
    ) -> None:
        given = [(name, tensor) for name, tensor in tensors.items() if tensor is not None]
        for name, tensor in given[1:]:
            first, other = getattr(given[0][1], what), getattr(tensor, what)
            if first != other:
                source = f"(from `{given[0][0]}`)"
                self.fail(
                    f"`{name}` has {what} {other}, expected {first} {source}. {remedy}", error
                )

    def contiguous(self, **tensors: Tensor | None) -> None:
        for name, tensor in tensors.items():
            if tensor is not None and not tensor.is_contiguous():
                self.fail(
                    f"`{name}` is not contiguous (shape {list(tensor.shape)}, strides "
                    f"{list(tensor.stride())}). Pass {name}.contiguous(); a cache must be "
                    "allocated contiguous."
                )

    def dense_rows(self, **tensors: Tensor | None) -> None:
        """Any strides will do, but the last dimension lies in one piece."""
        for name, tensor in tensors.items():
            if tensor is None or tensor.ndim == 0 or tensor.shape[-1] <= 1:
                continue
            # an empty tensor has no rows, and .contiguous() leaves its strides as they are
            if tensor.numel() == 0:
                continue
            if tensor.stride(-1) != 1:
                self.fail(
                    f"`{name}` has stride {tensor.stride(-1)} in its last dimension, expected 1. "
                    f"Pass {name}.contiguous()."
                )

    def apart(self, name: str, tensor: Tensor, what: str, inner: int = 0) -> None:
        """No two numbers of a tensor that is written share memory; its last `inner` dimensions
        lie in one piece, as is known."""
        outer = tensor.ndim - inner
        least = math.prod(tensor.shape[outer:])
        for stride, size in sorted(zip(tensor.stride()[:outer], tensor.shape[:outer], strict=True)):
            if size <= 1 or tensor.numel() == 0:
                continue
            if stride < least:
                self.fail(
                    f"`{name}` has strides {list(tensor.stride())} and shape {list(tensor.shape)}, "
                    f"in which {what} overlap. Pass {name}.contiguous() and use what it returns."
                )
            least = stride * size

    def one_of(self, name: str, value: Any, *wanted: Any) -> None:
        if value not in wanted:
            names = ", ".join(repr(each) for each in wanted)
            self.fail(f"`{name}` is {value!r}, expected one of {names}.")

    def at_least(self, name: str, value: Any, least: float) -> None:
        if not value >= least:  # so that NaN fails too
            self.fail(f"`{name}` is {value}, expected at least {least}.")

    def count(self, name: str, value: Any) -> None:
        """Of positions, which are int32."""
        self.at_least(name, value, 1)
        if value > 2**31 - 1:
            self.fail(f"`{name}` is {value}, expected at most {2**31 - 1}.")
