# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The smallest case that fails as the first one did."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from math import inf
from typing import Any

from .draw import Case

_MOST = 150  # tries
_SECONDS = 30  # of them all: a try on a GPU may compile


def kind(error: BaseException) -> str:
    """What makes two failures the same: the type, and the sentence without its numbers."""
    first = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {re.sub(r'[-+.0-9e]+', '#', first)[:60]}"


def outcome(check: Callable[[Case], str], case: Case) -> tuple[str, BaseException | None]:
    """(what `check` says, None), or ("failed", why)."""
    try:
        return check(case), None
    except Exception as error:
        return "failed", error


def _smaller(value: Any) -> Iterator[Any]:
    if value is True:
        yield False
    elif isinstance(value, int) and not isinstance(value, bool):
        yield from sorted({x for x in (0, 1, value // 2, value - 1) if 0 <= x < value})
    elif isinstance(value, list):
        for at, each in enumerate(value):
            yield [*value[:at], *value[at + 1 :]]
            for less in _smaller(each):
                yield [*value[:at], less, *value[at + 1 :]]


def _candidates(case: Case) -> Iterator[Case]:
    for name, value in case.items():
        if name in ("op", "seed", "layouts", "places", "spoiling"):
            continue
        if name in ("rows", "keys") and len(case["rows"]) == len(case["keys"]):
            for at in range(len(value) if name == "rows" else 0):
                cut = {n: [*case[n][:at], *case[n][at + 1 :]] for n in ("rows", "keys")}
                yield case | cut
        if name == "dtype" and value != "float64":
            yield case | dict(dtype="float64")
        for less in _smaller(value):
            yield case | {name: less}


def shrunk(
    check: Callable[[Case], str], case: Case, error: BaseException, end: float = inf
) -> tuple[Case, BaseException]:
    """`check` raised `error` for `case`; the smallest one found until `end`, and what it raises. A
    case that fails only sometimes, by where its tensors lie for instance, stays as it is."""
    if outcome(check, case)[1] is None:
        return case, error
    wanted, tries, end = kind(error), 0, min(end, time.monotonic() + _SECONDS)
    again = True
    while again:
        again = False
        for smaller in _candidates(case):
            tries += 1
            if tries > _MOST or time.monotonic() > end:
                return case, error
            _, came = outcome(check, smaller)
            if came is not None and kind(came) == wanted:
                case, error, again = smaller, came, True
                break
    return case, error
