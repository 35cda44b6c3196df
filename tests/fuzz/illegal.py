# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""A legal call with one argument spoiled: it runs, or one sentence refuses it and nothing is
written."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, nan
from random import Random
from typing import Any

import torch
from custom.dispatch.errors import NotSupported
from custom.dispatch.register import overload
from custom.dispatch.registry import BY_NAME
from torch import Tensor

import custom

from ..support.calls import mutated
from .build import CPU, build, in_one
from .draw import Case
from .legal import each_tensor

Spoil = Callable[[Tensor, Random], Any]


def _longer(x: Tensor, r: Random) -> Tensor:
    dim = r.randrange(x.ndim)
    return torch.cat([x, x.narrow(dim, 0, min(1, x.shape[dim]))], dim)


def _shorter(x: Tensor, r: Random) -> Tensor:
    dim = r.randrange(x.ndim)
    return x.narrow(dim, 0, max(0, x.shape[dim] - r.randint(1, 2)))


def _emptied(x: Tensor, r: Random) -> Tensor:
    return x.narrow(r.randrange(x.ndim), 0, 0)


def _turned(x: Tensor, r: Random) -> Tensor:
    return x.transpose(*(r.randrange(x.ndim) for _ in range(2)))


def _retyped(x: Tensor, r: Random) -> Tensor:
    kinds = [torch.float32, torch.float64, torch.float16, torch.int32, torch.int64, torch.int16]
    return x.to(r.choice([*kinds, torch.bool, torch.complex64, torch.uint8]))


def _filled(x: Tensor, r: Random) -> Tensor:
    if x.is_floating_point():
        wide = x.element_size() > 1  # e4m3 ends at 448, without an infinity
        return torch.full_like(x, r.choice([nan, *([inf, -6e4] if wide else [-448.0]), 0.0]))
    far = torch.iinfo(x.dtype)
    return torch.full_like(x, r.choice([far.max, far.min, 1, min(2**20, far.max)]))


_TENSOR: dict[str, Spoil] = {
    "longer": _longer,
    "shorter": _shorter,
    "emptied": _emptied,
    "turned": _turned,
    "retyped": _retyped,
    "filled": _filled,
    "one dimension more": lambda x, r: x.unsqueeze(r.randint(0, x.ndim)),
    "one dimension less": lambda x, r: x[0] if x.shape[0] else x.flatten(),
    "all of one row": lambda x, r: x[:1].expand_as(x),
    "on no device": lambda x, r: x.to("meta"),
    "on the host": lambda x, r: x.cpu(),
    # torch has no sparse tensors of e4m3
    "sparse": lambda x, r: (x if x.element_size() > 1 else x.float()).to_sparse(),
    "learned": lambda x, r: x.clone().requires_grad_() if x.is_floating_point() else x,
    "absent": lambda x, r: None,
}
_NUMBERS = [-1, 0, 1, 7, 2**31, 2**62, -(2**62)]
_FLOATS = [-1.0, 0.0, 1e-30, 1e30, float("nan"), float("inf")]


def spoiled(case: Case, arguments: dict[str, Any]) -> tuple[str, str, Any]:
    """(argument, how, what it is now)."""
    r = Random(case.get("spoiling", case["seed"]))
    name = r.choice(sorted(arguments))
    value = arguments[name]
    if isinstance(value, Tensor) and value.ndim:
        # without a public function only the dispatcher answers to these
        public = hasattr(custom, case["op"])
        how = r.choice(sorted(_TENSOR if public else _TENSOR.keys() - {"sparse", "absent"}))
        return name, how, _TENSOR[how](value, r)
    if isinstance(value, bool):
        return name, "turned round", not value
    if isinstance(value, str):
        return name, "misspelled", r.choice(["", "XYZ", value.lower(), value.upper()])
    if isinstance(value, list):
        return name, "longer", [*value, r.choice(_NUMBERS)]
    number = r.choice(_NUMBERS if isinstance(value, int) else _FLOATS)
    return name, "another number", None if value is None else number


def check(case: Case, device: torch.device = CPU) -> str:
    """ "ran" or "refused"; fails otherwise."""
    spec = BY_NAME[case["op"]]
    function = getattr(custom, spec.name, overload(spec))
    arguments, _ = build(case, getattr(torch, case["dtype"]))
    given = in_one(case["op"], each_tensor(arguments, lambda _, x: x.to(device, copy=True)))
    name, how, value = spoiled(case, given)
    given[name] = value
    kept = {n: given[n].detach().clone() for n in mutated(spec) if isinstance(given.get(n), Tensor)}
    try:
        function(**given)
        if device.type != "cpu":
            getattr(torch, device.type).synchronize()
    except (TypeError, ValueError, NotImplementedError, RuntimeError) as error:
        message = str(error)
        here = f"`{name}` {how}: {type(error).__name__}: {message[:300]}"
        if type(error) is RuntimeError:  # the dispatcher's own, of what may not be differentiated
            assert "requires grad" in message, here
        if message.startswith(f"{spec.name} cannot run on"):  # legal, but not for these kernels
            assert isinstance(error, NotSupported), here
        else:
            assert message.startswith(f"{spec.name}: ") and "\n" not in message, here
        for cache, before in kept.items():
            after = given[cache]
            if not before.is_meta and not before.is_sparse:
                torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True, msg=here)
        return "refused"
    except Exception as error:
        raise AssertionError(f"`{name}` {how}: {type(error).__name__}: {error}") from error
    return "ran"
