# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Calls of ops that PyTorch itself refuses, before any check of ours: one sentence each."""

from __future__ import annotations

import re
from typing import Any

import torch

from .errors import NotSupported

_OF_TYPE = re.compile(
    r"custom::(\w+)\(\) Expected a value of type '(.+?)' for argument '(\w+)' "
    r"but instead found type '(.+?)'"
)
# a subclass says the op's name alone, or that it gives none of its own an answer
_SUBCLASS = re.compile(
    r"(?:Multiple dispatch failed for 'torch\._ops\.)?custom\.(\w+)\.default(?:'; all .*)?$", re.M
)
_VMAP = re.compile(r"Batching rule not implemented for custom::(\w+)")
_NOWHERE = re.compile(r"Could not run 'custom::(\w+)' with arguments from the '(\w+)' backend")
_NONE = re.compile(r"There were no tensor arguments .* for schema custom::(\w+)\.")

# what came, what is wanted: what to do
_REMEDIES = {
    ("tuple", "Tensor"): "Pass one of its tensors: [0] is the first",
    ("bool", "str"): "Pass its name: 'silu' for an activation that is on, None for off",
}


def call(op: Any, *args: Any, **kwargs: Any) -> Any:
    """`op(*args, **kwargs)`.  Before any check of ours PyTorch compares the arguments' types with
    the schema and looks for a kernel; its words on that are many lines."""
    if torch.compiler.is_compiling():
        return op(*args, **kwargs)
    try:
        return op(*args, **kwargs)
    except (RuntimeError, TypeError) as error:
        if refused := in_one_sentence(error):
            raise refused from error
        raise


def in_one_sentence(error: Exception) -> Exception | None:
    """What PyTorch refuses, as an error of ours."""
    message = str(error)
    if found := _OF_TYPE.match(message):
        name, wanted, argument, came = found.groups()
        optional = wanted.startswith("Optional[")
        wanted = wanted.removeprefix("Optional[").removesuffix("]") if optional else wanted
        if came == wanted:
            kind = {"int": "an int of 64 bits", "str": "a string that UTF-8 can write"}
            return ValueError(
                f"{name}: `{argument}` is out of PyTorch's range, expected {kind.get(came, came)}. "
                "Pass another value."
            )
        usual = "Make it one with torch.as_tensor()" if wanted == "Tensor" else "Convert it"
        remedy = _REMEDIES.get((came, wanted), usual)
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
    if found := _SUBCLASS.match(message):
        return NotSupported(
            f"{found[1]}: a tensor is of a subclass that has no rule for this op (nested, "
            "distributed, a wrapper), expected plain tensors. Unwrap it first."
        )
    if found := _VMAP.match(message):
        return NotSupported(
            f"{found[1]}: it writes its arguments, and torch.vmap cannot loop over such an op. "
            "Call it once on the whole batch."
        )
    if found := _NONE.match(message):
        schema = getattr(torch.ops.custom, found[1]).default._schema
        name = next(a.name for a in schema.arguments if isinstance(a.type, torch.TensorType))
        return TypeError(
            f"{found[1]}: `{name}` is None, expected a tensor. Make it one with torch.as_tensor()."
        )
    return None
