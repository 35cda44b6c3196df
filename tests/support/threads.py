# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Threads that begin at once and take turns as often as Python lets them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any


def at_once(count: int, work: Callable[[int], Any]) -> list[Any]:
    """What `work` gives for each number below `count`, each in a thread of its own."""
    begun, interval = Barrier(count, timeout=120), sys.getswitchinterval()

    def begin(number: int) -> Any:
        begun.wait()
        return work(number)

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(count) as pool:
            return list(pool.map(begin, range(count)))
    finally:
        sys.setswitchinterval(interval)
