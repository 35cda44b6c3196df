# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What launchers ask of PyTorch itself.  A graph of an NPU captures nothing that torch_npu runs by
aclop ("Cannot run aclop operators during NPU graph capture"), and no copy from the host."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from custom.dispatch import backends
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

# kernels that torch_npu runs by aclnn: those with `op_api` in op-plugin's op_plugin_functions.yaml
# of 2.9 (masked_fill is a copy and masked_fill_, new_full and new_zeros are fills), and its copies
ACLNN = frozenset((
    "add", "add_", "arange", "bitwise_or", "cat", "clamp", "constant_pad_nd", "cumsum", "eq",
    "exp", "fill_", "gather", "gt", "log", "lt", "masked_fill", "mul", "ones", "sort", "sub",
    "sum", "where", "zero_", "zeros_like", "_to_copy", "clone", "copy_", "new_full", "new_zeros",
))  # fmt: skip
# nothing is launched
_FREE = frozenset(("empty", "new_empty", "detach", "detach_", "_unsafe_view", "scalar_tensor"))
HOST = "lift_fresh"  # torch.tensor: a copy from the host
KNOWN = {
    ("npu_sparse_lightning_indexer_grad_kl_loss", HOST): "lengths come as Python lists; a gradient"
}

seen: set[str] = set()


class _Mode(TorchDispatchMode):
    """Notes the kernels that a call comes down to."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function._can_decompose():
            with self:
                parts = function.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        name = function.overloadpacket.__name__
        if name == HOST or not (function.is_view or name in _FREE):
            seen.add(name)
        return function(*args, **kwargs)


_ready = backends.Runner.ready


@contextmanager
def _noted(self: backends.Runner, arguments: dict[str, Any]) -> Iterator[None]:
    with _Mode(), _ready(self, arguments):
        yield


def install() -> None:
    """From now on, of every call that is checked; what the harness itself does is `apart`."""
    backends.Runner.ready = _noted  # type: ignore[method-assign]


apart = _disable_current_modes


def uncaptured(calls: Iterable[tuple[str, set[str]]]) -> list[str]:
    """Failures, of what calls of these ops asked for."""
    asked = {(op, name) for op, names in calls for name in names - ACLNN}
    said = "which no graph of an NPU captures: see tests/ascend/aten.py"
    return [f"{op} calls torch's {name}, {said}" for op, name in sorted(asked - KNOWN.keys())]
