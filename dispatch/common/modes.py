# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Modes that see every operator of torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

# torch makes an operator's object when a mode first sees it, and remembers its address alone.  Two
# threads that are there at once make two, of which one goes: held here, that one stays too.
_held: set[Any] = set()


class Mode(TorchDispatchMode):
    """One that may be what a process does first: torch's own imports torch._dynamo for it, which
    takes seconds."""

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        _held.add(func)
        return self.called(func, args, kwargs or {})

    def called(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What an operator gives."""
        raise NotImplementedError
