# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""How the public functions reach their ops: what Python and PyTorch refuse is one sentence too."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from typing_extensions import ParamSpec

from ._keywords import raise_in_one_sentence
from .dispatch.capturing import is_capturing

Public = TypeVar("Public", bound=Callable[..., Any])
Taken = ParamSpec("Taken")
Given = TypeVar("Given")
_SECTION = re.compile(r"(?<=^Args:\n)(?: {4}.*\n)+", re.M)
_RAISES = re.compile(r"^Raises:(?:\n {4}.*)+", re.M)
_ENTRY = re.compile(r"^ {4}(\w+):.*\n(?: {8}.*\n)*", re.M)


def op(signature: Public) -> Public:
    """The op of that name, called as it was called itself: the parameters and their defaults are
    the schema's (test_contracts.py holds them to it), so the function needs no body."""
    packet = getattr(torch.ops.custom, signature.__name__)
    parameters = inspect.signature(signature)
    each = enumerate(parameters.parameters.values())
    flags = [(place, p.name) for place, p in each if p.annotation == "bool"]

    @functools.wraps(signature)
    def public(*args: Any, **kwargs: Any) -> Any:
        for place, name in flags:
            # PyTorch takes it for False, whatever the default is
            if (args[place] if place < len(args) else kwargs.get(name, False)) is None:
                raise TypeError(
                    f"{signature.__name__}: `{name}` is None, expected a bool. Leave it out for "
                    "its default."
                )
        try:
            return packet(*args, **kwargs)
        except (TypeError, RuntimeError) as error:
            raise_in_one_sentence(error, signature.__name__, parameters, args, kwargs)

    return public  # type: ignore[return-value]


def takes_lists(*names: str) -> Callable[[Public], Public]:
    """These keywords of the function may be lists of whole numbers: they become tensors on the
    device of the first argument, and nothing waits for the copy."""

    def taking(function: Public) -> Public:
        name = function.__name__

        @functools.wraps(function)
        def public(*args: Any, **kwargs: Any) -> Any:
            first = args[0] if args else kwargs.get("query")
            for each in names:
                value = kwargs.get(each)
                if value is not None and _is_list(value) and isinstance(first, torch.Tensor):
                    kwargs[each] = _on_device(name, each, value, first.device)
            return function(*args, **kwargs)

        return public  # type: ignore[return-value]

    return taking


def _is_list(value: Any) -> bool:
    """Of whole numbers; PyTorch refuses others by their type."""
    listed = isinstance(value, (list, tuple))
    return listed and all(type(each) is int and abs(each) < 2**63 for each in value)


def _on_device(op: str, name: str, values: Sequence[Any], device: torch.device) -> torch.Tensor:
    if torch.compiler.is_compiling() or device.type != "cuda":
        return torch.tensor(values, dtype=torch.int64, device=device)
    if is_capturing(device):
        raise ValueError(
            f"{op}: `{name}` is a list, and a graph is being captured, expected a tensor: a replay "
            "would not see other numbers. Pass a tensor on the device."
        )
    pinned = torch.tensor(values, dtype=torch.int64, pin_memory=True)
    return pinned.to(device, non_blocking=True)


def described_by(other: Callable[..., Any]) -> Callable[[Public], Public]:
    """Arguments that a docstring leaves out are `other`'s, and described as they are there; what it
    raises likewise."""

    def completed(function: Public) -> Public:
        if function.__doc__ is not None:  # python -OO has none
            own, theirs = (inspect.cleandoc(f.__doc__ or "") for f in (function, other))
            function.__doc__ = description(own, theirs, inspect.signature(function).parameters)
        return function

    return completed


def variant_of(
    base: Callable[Taken, Any],
) -> Callable[[Callable[..., Given]], Callable[Taken, Given]]:
    """The function takes what `base` takes, as `base` describes it, and gives what it says."""

    def made(function: Callable[..., Given]) -> Callable[Taken, Given]:
        gives = function.__annotations__["return"]
        function.__annotations__ = base.__annotations__ | {"return": gives}
        function.__signature__ = inspect.signature(base).replace(  # type: ignore[attr-defined]
            return_annotation=gives
        )
        return described_by(base)(function)

    return made


def description(own: str, theirs: str, arguments: Iterable[str]) -> str:
    """A docstring whose arguments, and whose errors if it names none, are completed by another."""
    entries = _entries(theirs) | _entries(own)
    listed = "".join(entries[name] for name in arguments)
    if not _SECTION.search(own):
        own = own.replace("\n\nReturns:\n", f"\n\nArgs:\n{listed}\nReturns:\n", 1)
    own = _SECTION.sub(lambda _: listed, own)
    raises = _RAISES.search(theirs)
    if raises and not _RAISES.search(own):
        said, example, shown = own.partition("\n\n>>> ")
        own = f"{said}\n\n{raises[0]}{example}{shown}"
    return own


def _entries(doc: str) -> dict[str, str]:
    """The lines of each argument."""
    section = _SECTION.search(doc)
    return {entry[1]: entry[0] for entry in _ENTRY.finditer(section[0] if section else "")}
