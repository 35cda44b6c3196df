# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What an op does at PyTorch's keys between autograd and the backends: autocast, negated views."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .common.private_torch import without_autocast
from .op_spec import Spec

Places = Sequence[tuple[int, str]]  # of arguments: where they stand, and their names

AUTOCAST = ("AutocastCPU", "AutocastCUDA", "AutocastPrivateUse1")


def written(op: torch._ops.OpOverload) -> list[tuple[int, str]]:
    """The arguments that the op writes: (place, name)."""
    arguments = enumerate(op._schema.arguments)
    return [(i, a.name) for i, a in arguments if a.alias_info and a.alias_info.is_write]


def caches(
    places: Places, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Of what an op writes the tensors that a call is given."""
    for place, name in places:
        cache = args[place] if place < len(args) else kwargs.get(name)
        if cache is not None:
            yield name, cache


def as_given(op: torch._ops.OpOverload) -> Callable[..., Any]:
    """Under autocast: an op computes in the dtypes it is given, and so does what it calls."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with without_autocast():
            return op(*args, **kwargs)

    return kernel


@dataclass(frozen=True)
class Unread:
    """A kind of tensor whose memory does not hold its numbers: PyTorch's own fallback runs an op
    that writes arguments on copies, and then fails."""

    key: str
    sentence: str
    found: Callable[[torch.Tensor], bool]
    resolve: str

    def resolved(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and self.found(value):
            return getattr(value, self.resolve)()
        return value


UNREAD = (
    Unread("Negative", "a negated view (is_neg())", torch.Tensor.is_neg, "resolve_neg"),
    Unread("ZeroTensor", "PyTorch's ZeroTensor", torch.Tensor._is_zerotensor, "clone"),
)


def resolved(spec: Spec, op: torch._ops.OpOverload, kind: Unread) -> Callable[..., Any]:
    """Of an op that writes arguments."""
    places = written(op)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        for name, cache in caches(places, args, kwargs):
            if kind.found(cache):
                raise ValueError(
                    f"{spec.name}: `{name}` is {kind.sentence}, expected a tensor that holds its "
                    f"own numbers. Pass {name}.{kind.resolve}() and use what it returns."
                )
        return op(*map(kind.resolved, args), **{n: kind.resolved(v) for n, v in kwargs.items()})

    return kernel
