# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Any op called with its samples, and what comes of it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from custom.dispatch import log
from custom.dispatch.dispatch_keys import written
from custom.dispatch.register import overload
from custom.dispatch.registry import SPECS, Spec
from torch import Tensor

import custom

from .accuracy import skip_float64
from .samples import SAMPLES, Maker

every_spec = pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
CPU = torch.device("cpu")


@contextmanager
def runs_once(op: str, backend: str) -> Iterator[None]:
    """What is inside calls `op` once on `backend`."""
    before = log.calls[op, backend]
    yield
    assert log.calls[op, backend] == before + 1, f"{op} did not run once on {backend}"


def assert_refuses(
    op: str, arguments: dict[str, Any], error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error, match=f"^{op}: .*{sentence}"):
        getattr(custom, op)(**arguments)


def by_change(x: Any) -> str | None:
    """A case's name: the first argument that it changes."""
    return next(iter(x)) if isinstance(x, dict) else None


def refused(**changes: tuple[Any, Any]) -> list[tuple[dict[str, Any], str]]:
    """Of each argument a value, and what is wanted in its place: the change, and its sentence."""
    return [
        ({name: value}, f"`{name}` is {value!r}, expected {wanted}")
        for name, (value, wanted) in changes.items()
    ]


def by_formula(
    op: str, formula: Callable[..., Any], case: Any, dtype: torch.dtype, device: Any, backend: str
) -> tuple[Any, Any, Any]:
    """What the op gives of a drawn case, and its formula in the dtype and in float64."""
    skip_float64(dtype, backend)
    plain = case.moved(case.arguments(), dtype, "cpu")
    with runs_once(op, backend):
        got = getattr(custom, op)(**case.moved(plain, dtype, device))
    return got, formula(**plain), formula(**case.moved(plain, torch.float64, "cpu"))


def assert_gradient_compiles(loss: Callable[..., Tensor], leaves: list[Tensor]) -> None:
    torch._dynamo.reset()
    eager = torch.autograd.grad(loss(*leaves), leaves)
    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend="aot_eager")
    for a, b in zip(torch.autograd.grad(compiled(*leaves), leaves), eager, strict=True):
        torch.testing.assert_close(a, b)


@cache
def two_of(device: torch.device) -> list[torch.device]:
    """The first two devices of the host."""
    if device.type == "cpu" or getattr(torch, device.type).device_count() < 2:
        pytest.skip("needs two GPUs, or two NPUs, in this host")
    return [torch.device(device.type, number) for number in range(2)]


def mutated(spec: Spec) -> list[str]:
    return [name for _, name in written(overload(spec))]


def tensors(arguments: dict) -> dict[str, Tensor]:
    return {name: value for name, value in arguments.items() if isinstance(value, Tensor)}


def everything(spec: Spec, function, arguments: dict) -> list[Tensor]:
    """The outputs of a call and the tensors it wrote, from fresh copies of the arguments."""
    fresh = copy.deepcopy(arguments)
    out = function(**fresh)
    return [*outputs(out), *(fresh[name] for name in mutated(spec) if name in fresh)]


def outputs(out) -> tuple[Tensor, ...]:
    """What an op returned: one tensor, several, or nothing beside what it wrote."""
    return (out,) if isinstance(out, Tensor) else out or ()


def assert_same(first: list[Tensor], second: list[Tensor]) -> None:
    assert len(first) == len(second)
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


# lengths that may shrink between capture and replay
LENGTHS = ("act_seqs", "actual_seq_lengths_key", "actual_seq_lengths_kv", "cu_seqlens_k")


def other(spec: Spec, device: torch.device, dtype: torch.dtype) -> dict:
    """Other values of the same shapes: new numbers, shorter lengths, absent slots."""
    maker = Maker(device, dtype)
    maker.random.manual_seed(2)
    arguments = SAMPLES[spec.name](maker)
    for name in LENGTHS:
        if arguments.get(name) is not None:
            arguments[name] = (arguments[name] - 1).clamp_min(0)
    if "cache_index" in arguments:
        arguments["cache_index"] = arguments["cache_index"].clone()
        arguments["cache_index"][0] = -1
    return arguments
