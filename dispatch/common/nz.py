# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""FRACTAL_NZ, the tiled weight format of Ascend's matrix unit (format 29).

    Z[n // C0, k // 16, k % 16, n % C0] = W[k, n]      C0 = 32 bytes: 16 columns of bfloat16

A 4-D tensor [N/C0, K/16, 16, C0] is NZ and says so by its shape.  The Ascend scripts pass the same
bytes under the shape [K, N]: `weight_format` tells how a 2-D tensor is to be read.

    nz        [K, N]   NZ bytes under that shape
    nd        [K, N]   row-major
    linear    [N, K]   row-major, nn.Linear.weight itself; no weight of the call is NZ then
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from .. import log

FORMATS = ("nz", "nd", "linear")
ROWS = 16  # of a tile
_FRACTAL_NZ = 29
# torch_npu's formats whose bytes do not lie as the shape says
_TILED = {
    3: "NC1HWC0",
    4: "FRACTAL_Z",
    12: "NC1HWC0_C04",
    29: "FRACTAL_NZ",
    32: "NDC1HWC0",
    33: "FRACTAL_Z_3D",
    50: "FRACTAL_NZ_C0_16",
    51: "FRACTAL_NZ_C0_32",
    52: "FRACTAL_NZ_C0_2",
    53: "FRACTAL_NZ_C0_4",
    54: "FRACTAL_NZ_C0_8",
}


def columns(dtype: torch.dtype) -> int:
    """C0, the columns of a tile."""
    return 32 // dtype.itemsize


def columns_of(weight: Tensor, weight_format: str) -> Any:
    """N of a weight argument, of each group where it has groups."""
    if weight.ndim >= 4:
        return weight.shape[-4] * weight.shape[-1]
    return weight.shape[-2 if weight_format == "linear" else -1]


def to_nz(w: Tensor, *, flat: bool = False) -> Tensor:
    """[..., K, N] to FRACTAL_NZ [..., N/C0, K/16, 16, C0], contiguous, zero-padded to whole tiles.

    Args:
        w: [..., K, N], any dtype and strides.
        flat: give the same bytes under the shape of `w`, which needs whole tiles.

    Returns:
        [..., N/C0, K/16, 16, C0] with C0 = 32 bytes of columns, or the shape of `w` with `flat`.

    Raises:
        ValueError: `w` has one dimension or none; `flat`, and its tiles are not whole.
        TypeError: `w` is no tensor.

    >>> import torch, custom
    >>> custom.to_nz(torch.zeros(32, 40, dtype=torch.bfloat16)).shape
    torch.Size([3, 2, 16, 16])
    """
    _tensor("to_nz: `w`", w)
    if w.ndim < 2:
        raise ValueError(f"to_nz: `w` has shape {list(w.shape)}, expected [..., K, N].")
    *batch, rows, cols = w.shape
    c0 = columns(w.dtype)
    k, n = -(-rows // ROWS), -(-cols // c0)
    whole = (k * ROWS, n * c0) == (rows, cols)
    if flat and not whole:
        raise ValueError(
            f"to_nz: `w` has shape {list(w.shape)}, and flat=True needs K a multiple of {ROWS} and "
            f"N a multiple of {c0}: padding changes the shape. Call it without flat."
        )
    if not whole:
        padded = w.new_zeros([*batch, k * ROWS, n * c0])
        padded[..., :rows, :cols] = w
        w = padded
    z = w.reshape(*batch, k, ROWS, n, c0).movedim(-2, -4).contiguous()
    return z.view(*batch, rows, cols) if flat else z


def from_nz(z: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    """The row-major [..., K, N] behind FRACTAL_NZ `z`, contiguous.

    Args:
        z: [..., N/C0, K/16, 16, C0], or 2-D as `to_nz(w, flat=True)` made it.
        shape: (K, N), which cuts the padding off; None: whole tiles.

    Returns:
        [..., K, N], dtype of `z`.

    Raises:
        ValueError: `z` is not in whole tiles, or `shape` lies in another number of them.
        TypeError: `z` is no tensor.

    >>> import torch, custom
    >>> w = torch.arange(12.0).view(3, 4)
    >>> torch.equal(custom.from_nz(custom.to_nz(w), w.shape), w)
    True
    """
    _tensor("from_nz: `z`", z)
    c0 = columns(z.dtype)
    if z.ndim == 2 and z.shape[0] % ROWS == 0 and z.shape[1] % c0 == 0:
        z = z.contiguous().view(z.shape[1] // c0, z.shape[0] // ROWS, ROWS, c0)
    if z.ndim < 4 or tuple(z.shape[-2:]) != (ROWS, c0):
        raise ValueError(
            f"from_nz: `z` has shape {list(z.shape)}, expected [..., N/{c0}, K/{ROWS}, {ROWS}, "
            f"{c0}] or whole tiles under the shape [K, N]."
        )
    *batch, n, k, _, _ = z.shape
    w = z.movedim(-4, -2).reshape(*batch, k * ROWS, n * c0)
    if shape is None:
        return w
    if not isinstance(shape, Sequence) or len(shape) < 2:
        raise ValueError(f"from_nz: `shape` is {shape!r}, expected (K, N).")
    rows, cols = shape[-2:]
    if not (0 <= k * ROWS - rows < ROWS and 0 <= n * c0 - cols < c0):
        raise ValueError(
            f"from_nz: `shape` is {list(shape)}, and `z` holds [{k * ROWS}, {n * c0}] with padding."
        )
    return w[..., :rows, :cols].contiguous()


def _tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(
            f"{name} is of type {type(value).__name__}, expected Tensor. Make it one with "
            "torch.as_tensor()."
        )


def npu_format(tensor: Tensor) -> int | None:
    """torch_npu's format of a tensor on an NPU."""
    if tensor.device.type != "npu":
        return None
    return int(import_module("torch_npu").get_npu_format(tensor))


def is_nz(weight: Tensor, weight_format: str) -> bool:
    """Whether the bytes of a weight argument are NZ: by its shape, by its NPU format, by
    `weight_format`."""
    if weight.ndim == 4 or npu_format(weight) == _FRACTAL_NZ:
        return True
    if weight_format == "nz":
        log.once(
            ("read as NZ",),
            f"a 2-D weight on {weight.device.type} is read as FRACTAL_NZ bytes, since "
            'weight_format is "nz". For a row-major [K, N] pass weight_format="nd" or '
            'custom.to_nz(weight), for nn.Linear.weight weight_format="linear".',
        )
    return weight_format == "nz"


def to_nd(weight: Tensor, weight_format: str) -> Tensor:
    """The [K, N] behind a weight argument; row-major ones are not copied, nor those whose format
    torch_npu knows: PyTorch reads them as their shape says."""
    if weight_format == "linear":
        return weight.mT
    if weight.ndim == 2 and npu_format(weight) == _FRACTAL_NZ:
        return weight
    return from_nz(weight) if is_nz(weight, weight_format) else weight


def _whole(weight: Tensor) -> bool:
    """Whether it fills its tiles."""
    rows, cols = weight.shape
    return rows % ROWS == 0 and cols % columns(weight.dtype) == 0


def unreadable(arguments: Mapping[str, Any]) -> str | None:
    """Why a kernel on an NPU, which sees bytes, cannot read one of a call's tensors, or None.

    2-D weights are read in format 29 (`is_nz`), where no padding lies between their tiles.
    """
    for name, tensor in arguments.items():
        number = npu_format(tensor) if isinstance(tensor, Tensor) else None
        if number is None or number not in _TILED:
            continue
        weight = arguments.get("weight_format", "linear") != "linear" and tensor.ndim == 2
        if weight and number == _FRACTAL_NZ and _whole(tensor):
            continue
        return (
            f"`{name}` is in torch_npu's format {number} ({_TILED[number]}), the kernel reads "
            f"row-major bytes: pass torch_npu.npu_format_cast({name}, 2)"
        )
    return None
