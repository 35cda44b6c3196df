# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Kernels that are launched, under names that a profiler can tell apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton


def jit(do_not_specialize: list[str] | None = None) -> Callable[[Any], triton.JITFunction]:
    """`triton.jit` under the name `<file>_<function>`; the machine keeps 49 characters of it."""

    def jitted(function: Any) -> triton.JITFunction:
        name = f"{function.__module__.rpartition('.')[2]}_{function.__name__}"
        return triton.jit(function, do_not_specialize=do_not_specialize, repr=lambda _: name)

    return jitted
