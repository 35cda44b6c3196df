# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""How the public functions reach their ops: what Python and PyTorch refuse is one sentence too."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from .dispatch.errors import NotSupported

_OF_TYPE = re.compile(
    r"custom::(\w+)\(\) Expected a value of type '(.+?)' for argument '(\w+)' "
    r"but instead found type '(.+?)'"
)
_NOWHERE = re.compile(r"Could not run 'custom::(\w+)' with arguments from the '(\w+)' backend")

_NONE = re.compile(r"There were no tensor arguments .* for schema custom::(\w+)\.")


Public = TypeVar("Public", bound=Callable[..., Any])


def op(signature: Public) -> Public:
    """The op of that name, called as it was called itself: the parameters and their defaults are
    the schema's (tests/test_contracts.py holds them to it), so the function needs no body."""
    packet = getattr(torch.ops.custom, signature.__name__)
    parameters = inspect.signature(signature)

    @functools.wraps(signature)
    def public(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(packet, *args, **kwargs)
        except (TypeError, RuntimeError):
            # a missing or unknown argument, in Python's own words
            try:
                parameters.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{signature.__name__}: {error}.") from None
            raise

    return public  # type: ignore[return-value]


def call(op: Any, *args: Any, **kwargs: Any) -> Any:
    """`op(*args, **kwargs)`.  Before any check of ours PyTorch compares the arguments' types with
    the schema and looks for a kernel; its words on that are many lines."""
    if torch.compiler.is_compiling():
        return op(*args, **kwargs)
    try:
        return op(*args, **kwargs)
    except RuntimeError as error:
        refused = _in_one_sentence(str(error))
        if refused is None:
            raise
        raise refused from None


def _in_one_sentence(message: str) -> Exception | None:
    if found := _OF_TYPE.match(message):
        name, wanted, argument, came = found.groups()
        optional = wanted.startswith("Optional[")
        wanted = wanted.removeprefix("Optional[").removesuffix("]") if optional else wanted
        remedy = "Make it one with torch.as_tensor()" if wanted == "Tensor" else "Convert it"
        return TypeError(
            f"{name}: `{argument}` is of type {came}, expected {wanted}"
            f"{' or None' if optional else ''}. {remedy}."
        )
    if found := _NOWHERE.match(message):
        name, where = found.groups()
        return NotSupported(
            f"{name}: a tensor is of PyTorch's kind {where}, expected dense ones on cpu, cuda or "
            "npu. Move them with .to(), or make them dense with .to_dense()."
        )
    if found := _NONE.match(message):
        schema = getattr(torch.ops.custom, found[1]).default._schema
        name = next(a.name for a in schema.arguments if isinstance(a.type, torch.TensorType))
        return TypeError(
            f"{found[1]}: `{name}` is None, expected a tensor. Make it one with torch.as_tensor()."
        )
    return None
