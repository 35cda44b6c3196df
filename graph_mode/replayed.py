# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""A step that is called again and again, as one device graph for each shape of its inputs."""

from __future__ import annotations

from collections.abc import Callable
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only

from ..dispatch.capturing import is_capturing
from ..dispatch.env import config
from .capture import Captured, capture, kind_of

_STEP = 8  # tokens of a decode step, drafts among them


class Replayed:
    """`fn(state, *inputs)`, captured where its shapes come for the second time, then replayed.

    Dtypes, devices, the order of strides, numbers, which inputs are one tensor, autocast and the
    settings of torch and `custom.config` make a shape another one. The first call of a shape runs
    as it is, which compiles the kernels. A graph copies the inputs into its buffers and launches
    everything at once; the outputs are buffers of it, which the next call with these shapes
    overwrites. It keeps the memory of its workspaces as long as it lives: a prompt, more than 8
    tokens in dimension 1 of the first input, is not captured.

    `state` is what `fn` reads and writes where it lies, weights and caches: with other objects than
    before, or tensors of other memory, all graphs are dropped. What `fn` writes there must be the
    same when it is called again, as for a capture it is.

    Args:
        fn: a function of tensors that reads nothing back from the device.
        devices: the kinds on which it is captured; on the others, inside torch.compile, where
            gradients are recorded, while somebody else captures and with inputs on several devices,
            `fn` is called.

    >>> import torch
    >>> from custom.graph_mode import Replayed
    >>> Replayed(lambda state, x: x + state[0])((torch.ones(2),), torch.ones(2))
    tensor([2., 2.])
    """

    def __init__(self, fn: Callable[..., Any], devices: tuple[str, ...] = ("npu",)) -> None:
        self._fn, self._devices = fn, devices
        self._state: tuple[Any, ...] = ()
        self._tensors: list[Tensor] = []  # of the state, and where they lie
        self._lies: list[int] = []
        self._graphs: dict[Any, Captured | None] = {}

    def __call__(self, state: tuple[Any, ...], *inputs: Any) -> Any:
        kind = kind_of(inputs)
        if (
            kind not in self._devices
            or torch.compiler.is_compiling()
            or torch.is_grad_enabled()
            or any(length > _STEP for length in inputs[0].shape[1:2])
            or is_capturing(inputs[0].device)
        ):
            return self._fn(state, *inputs)
        leaves, structure = tree_flatten(inputs)
        if len({x.device for x in leaves if isinstance(x, Tensor)}) > 1:
            return self._fn(state, *inputs)
        # a tensor may have been given other memory (`.data = `, set_)
        same = len(state) == len(self._state) and all(map(is_, state, self._state))
        if not same or [x.data_ptr() for x in self._tensors] != self._lies:
            self._state, self._tensors = state, [x for x in state if isinstance(x, Tensor)]
            self._lies = [x.data_ptr() for x in self._tensors]
            self._graphs.clear()
        key = (*_settings(inputs[0].device.type), structure, _same(leaves), *map(_like, leaves))
        if key not in self._graphs:
            self._graphs[key] = None
            return self._fn(state, *inputs)
        graph = self._graphs[key]
        if graph is None:
            kept: dict[Any, Tensor] = {}  # one buffer for what is one tensor
            buffers = tree_map_only(Tensor, lambda x: _buffer(x, kept), inputs)
            graph = capture(lambda *now: self._fn(state, *now), *buffers)
            self._graphs[key] = graph
        return graph(*inputs)


def _settings(device: str) -> tuple[Any, ...]:
    """What decides, beside the arguments, which kernels a call runs."""
    return (
        torch.is_autocast_enabled(device),
        torch.get_autocast_dtype(device),
        torch.is_inference_mode_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        _float32_matmuls(),
        config.backend,
        config.debug,
        config.log,
    )


def _float32_matmuls() -> str:
    """Torch refuses to tell it by the older name where the newer one was set."""
    newer: str | None = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    return torch.get_float32_matmul_precision() if newer is None else newer


def _like(leaf: Any) -> Any:
    """What graphs for one input agree in; numbers that are equal may be of two types."""
    if not isinstance(leaf, Tensor):
        return type(leaf), leaf
    dense = None if leaf.is_contiguous() else torch.empty_like(leaf, device="meta").stride()
    return leaf.shape, leaf.dtype, leaf.device, dense


def _memory(x: Tensor) -> tuple[Any, ...]:
    return x.data_ptr(), x.shape, x.stride(), x.dtype


def _same(leaves: list[Any]) -> tuple[int, ...]:
    """Which of the tensors are one: to each the number of the first that it is."""
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    if len({x.data_ptr() for x in tensors}) == len(tensors):
        return ()
    memories = [*map(_memory, tensors)]
    return tuple(map(memories.index, memories)) if len({*memories}) < len(memories) else ()


def _buffer(x: Tensor, kept: dict[Any, Tensor]) -> Tensor:
    memory = _memory(x)
    if memory not in kept:
        kept[memory] = x.clone()
    return kept[memory]
