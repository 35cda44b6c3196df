# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Modes that see every operator of torch."""

from torch.utils._python_dispatch import TorchDispatchMode


class Mode(TorchDispatchMode):
    """One that may be what a process does first: torch's own imports torch._dynamo for it, which
    takes seconds."""

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
