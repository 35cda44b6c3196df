# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Which backend ran which op: counted always, printed once each under CUSTOM_LOG=dispatch."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from threading import Lock
from typing import Any

import torch

from .env import config

_lock = Lock()
# (op, backend) -> calls; tests and examples read it to learn which backend ran
calls: Counter[tuple[str, str]] = Counter()
_said: set[tuple[str, ...]] = set()


def describe(arguments: Mapping[str, Any]) -> str:
    """`query[8,1,128,576] bf16` for every tensor among the arguments."""
    short = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
    return "  ".join(
        f"{name}[{','.join(map(str, value.shape))}] "
        f"{short.get(value.dtype, str(value.dtype).removeprefix('torch.'))}"
        for name, value in arguments.items()
        if isinstance(value, torch.Tensor)
    )


def count(called: tuple[str, str]) -> None:
    """(op, backend) once more."""
    with _lock:
        calls[called] += 1


def ran(op: str, backend: str, reason: str, arguments: Mapping[str, Any]) -> None:
    count((op, backend))
    if config.log == "dispatch":
        once((op, backend, reason), f"{op} -> {backend} ({reason})  {describe(arguments)}")


def repeated(op: str, backend: str, how: str) -> None:
    """A call like an earlier one, which went another way than the first."""
    once((op, backend, how), f"{op} -> {backend} (like an earlier call: {how})")


def once(key: tuple[str, ...], message: str) -> None:
    """Print `message` the first time `key` is seen."""
    with _lock:
        if key in _said:
            return
        _said.add(key)
    print(f"custom: {message}", file=sys.stderr)
