# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Functional collectives of a group, whose failures name themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

Group = dist.ProcessGroup | DeviceMesh

# torch 2.13 renamed it
_gather: Callable[..., Tensor] = (
    getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
)


def ranks(group: Group) -> tuple[dist.ProcessGroup, int, int]:
    """(group, rank, size)."""
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"custom.parallel: `group` is a DeviceMesh of {group.ndim} dimensions, expected 1. "
                'Pass one of them: mesh["tp"].'
            )
        group = group.get_group()
    return group, dist.get_rank(group), dist.get_world_size(group)


def refuse_gradients(function: str, /, **arguments: Any) -> None:
    """A collective here has no backward: what wants a gradient would lose it, or get a part. Said
    before anything travels or is written."""
    if not torch.is_grad_enabled():
        return
    for name, x in arguments.items():
        if isinstance(x, Tensor) and x.requires_grad:
            raise RuntimeError(
                f"{function}: `{name}` requires grad, and this has no backward. Call it under "
                "torch.no_grad() (or torch.inference_mode())."
            )


def _named(name: str, call: Callable[[], Tensor], group: dist.ProcessGroup) -> Tensor:
    if torch.compiler.is_compiling():
        return call()
    try:
        return call()
    except RuntimeError as error:
        # what is out of memory, or not implemented, says so itself
        if type(error) is not RuntimeError and not isinstance(error, dist.DistError):
            raise
        said = (str(error).splitlines() or ["nothing"])[0]
        raise type(error)(
            f"custom.parallel: {name} failed on rank {dist.get_rank(group)} of "
            f"{dist.get_world_size(group)}: another rank ended, hangs, or came with other shapes. "
            f"Its {dist.get_backend(group)} says: {said}"
        ) from error


def _collective(name: str, call: Callable[[], Tensor], group: dist.ProcessGroup) -> Tensor:
    return _named(name, lambda: functional.wait_tensor(call()), group)


def start_all_gather(x: Tensor, group: dist.ProcessGroup) -> Callable[[], Tensor]:
    """all_gather, under way beside what the caller does until it calls what this returns."""
    refuse_gradients("all_gather", x=x)
    x = x.contiguous()
    started = _named("all_gather", lambda: _gather(x[None], 0, group), group)

    def wait() -> Tensor:
        out = _named("all_gather", lambda: functional.wait_tensor(started), group)
        return out.view(dist.get_world_size(group), *x.shape)

    return wait


def all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[size, *x.shape]"""
    return start_all_gather(x, group)()


def all_to_all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """x [size, ..]: part i goes to rank i; part i of the result came from it."""
    refuse_gradients("all_to_all", x=x)
    x = x.contiguous()
    call = lambda: functional.all_to_all_single(x, None, None, group)  # noqa: E731
    return _collective("all_to_all", call, group)


def all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over the ranks, as a new tensor."""
    refuse_gradients("all_reduce", x=x)
    return _collective("all_reduce", lambda: functional.all_reduce(x, "sum", group), group)


def broadcast(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Rank 0's."""
    refuse_gradients("broadcast", x=x)
    return _collective("broadcast", lambda: functional.broadcast(x, 0, group), group)


def in_order(gathered: Tensor) -> Tensor:
    """[2 * size, ..] chunks in order, from [size, 2, ..]: the second ones come from the back."""
    return torch.cat([gathered[:, 0], gathered[:, 1].flip(0)])
