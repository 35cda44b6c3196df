# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""How close is close enough, derived and not tuned; and which dtypes a backend takes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def skip_unless_taken(dtype: torch.dtype, device: torch.device, backend: str) -> None:
    """The kernels take half precision; their interpreter has no right bfloat16 product."""
    if backend != "reference" and dtype in (torch.float64, torch.float32):
        pytest.skip(f"the {backend} backend takes float16 and bfloat16")
    if backend != "reference" and device.type == "cpu" and dtype is torch.bfloat16:
        pytest.skip("the interpreter's bfloat16 product is wrong")


def skip_float64(dtype: torch.dtype, backend: str) -> None:
    if backend != "reference" and dtype is torch.float64:
        pytest.skip("a kernel takes float32 and half precision")


def assert_close_to_float64(
    name: str, got: Tensor, rounded: Tensor, exact: Tensor, times: float = 2, beyond: float = 0.0
) -> None:
    """`got` is as near to the float64 result `exact` as `rounded`, a plain evaluation whose
    inputs and outputs have the dtype under test: within twice its error plus one rounding step,
    and `beyond` it what roundings on the way add that a plain evaluation has not."""
    assert got.shape == exact.shape, f"{name}: shape {list(got.shape)}, not {list(exact.shape)}"
    if got.dtype is torch.float64:
        torch.testing.assert_close(got.detach().cpu(), exact.detach().cpu(), msg=f"{name} differs")
        return
    one = torch.finfo(got.dtype).eps
    got, rounded, exact = (x.detach().double().cpu() for x in (got, rounded, exact))
    infinite = torch.isinf(exact)
    assert torch.equal(got[infinite], exact[infinite]), f"{name}: infinities differ"
    if infinite.all():  # or nothing to compare at all
        return
    got, rounded, exact = (x[~infinite] for x in (got, rounded, exact))
    error = (got - exact).abs()
    allowed = times * (rounded - exact).abs().max() + one * exact.abs().max() + beyond
    worst = int(error.nan_to_num(torch.inf).argmax())
    assert error[worst] <= allowed, (
        f"{name}: {got[worst]:.8g} where float64 gives {exact[worst]:.8g}; off by "
        f"{error[worst]:.3g}, allowed {allowed:.3g} ({error[worst] / allowed:.1f}x)"
    )
