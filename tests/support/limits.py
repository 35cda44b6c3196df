# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Which sizes the CUDA launchers say no to, on an H100 that is not there: every dimension of every
tensor, longer and longer.

python -m tests.support.limits     write tests/records/generated/limits.json anew
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from custom.dispatch import backends
from custom.dispatch.registry import SPECS, Spec
from torch import Tensor

from .refused import calls, words

RECORD = Path(__file__).parents[1] / "records/generated/limits.json"
_POWERS = (16, 32, 48, 64, 96, 128, 192, 256, 512, 576, 1024, 2**14, 2**15, 2**16, 2**30)
_LAST = (2**31 - 2**14, 2**31 - 2**10, 2**31)
_SIZES = sorted({n + d for n in (*_POWERS, *_LAST) for d in (-1, 0, 1)})
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@contextmanager
def on_an_h100() -> Iterator[None]:
    from custom.cuda_ops.common import gpu

    told = dict(capability=(9, 0), num_sms=132, shared_memory=232448)
    with mock.patch.multiple(gpu, **{n: mock.Mock(return_value=x) for n, x in told.items()}):
        yield


def _sized(x: Tensor, dim: int, size: int) -> Tensor:
    shape = [*x.shape[:dim], size, *x.shape[dim + 1 :]]
    return torch.empty(1, dtype=x.dtype, device="meta").expand(shape)


def limits(spec: Spec) -> dict[str, dict[str, str]]:
    """argument and dimension, or dtype -> reason -> sizes, "from-to" of those that were asked."""
    unsupported = getattr(backends.launcher(backends.CUDA, spec), "unsupported", None)
    if unsupported is None:
        return {}
    found: dict[str, dict[str, str]] = {}

    def said(arguments: dict[str, Any]) -> str:
        try:
            reason = unsupported(**arguments)
        except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError):
            return ""  # sizes that do not belong together
        return words(reason) if reason else ""

    arguments, _ = next(calls(spec))
    good = {n: x.to("meta") if isinstance(x, Tensor) else x for n, x in arguments.items()}
    with on_an_h100():
        for name, value in good.items():
            if not isinstance(value, Tensor):
                continue
            for dim in range(value.ndim):
                told = [(n, said(good | {name: _sized(value, dim, n)})) for n in _SIZES]
                for reason in {reason for _, reason in told if reason}:
                    sizes = [n for n, x in told if x == reason]
                    found.setdefault(f"{name} {dim}", {})[reason] = f"{sizes[0]}-{sizes[-1]}"
            if value.is_floating_point():
                for dtype in _DTYPES:
                    reason = said(good | {name: value.to(dtype)})
                    if reason:
                        found.setdefault(name, {})[reason] = str(dtype)
    return found


def read() -> dict[str, dict[str, dict[str, str]]]:
    return json.loads(RECORD.read_text())


if __name__ == "__main__":
    of = {spec.name: limits(spec) for spec in SPECS}
    RECORD.write_text(json.dumps(of, indent=1, sort_keys=True) + "\n")
