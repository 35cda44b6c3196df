# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What the prologs ask of weights of 8 bits, of their scales and of the activations they meet.

    weight_quant_mode   weights                    scale of a weight [K, N]   of activations [T, K]
    0                   of the working dtype
    1                   int8, of the query latent  [1, N]                     [T, 1]
    2                   int8                       [1, N]                     [T, 1]
    4                   e4m3                       [K/128, N/128]             [T, K/128]

A product of the layer's input is `first`, one of the query latent `second`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...check import Checker
from ...common import quantized
from . import prologs

_KINDS = {0: None, 1: torch.int8, 2: torch.int8, 4: torch.float8_e4m3fn}
_REFUSED = {3: "mxfp8, Ascend 950", 5: "hif8, Ascend 950"}


@dataclass(frozen=True)
class Scale:
    """Of one weight: its argument, and what came."""

    name: str
    tensor: Tensor | None


def named(names: Sequence[str], given: Mapping[str, Any]) -> dict[str, Scale]:
    """The scale of each of these weights, which has its name, with `w_` for `weight_`."""
    scales = {name: f"dequant_scale_{name.replace('weight_', 'w_')}" for name in names}
    return {name: Scale(scale, given[scale]) for name, scale in scales.items()}


def quantized_weights(
    c: Checker,
    mode: int,
    first: Sequence[str],
    second: Sequence[str],
    argument: str = "weight_quant_mode",
) -> dict[str, torch.dtype]:
    """The weights that have 8 bits in this mode."""
    if mode not in _KINDS:
        named = f" ({_REFUSED[mode]})" if mode in _REFUSED else ""
        c.fail(
            f"`{argument}` is {mode}{named}, expected 0 (none), 1 (int8 behind the query's "
            "norm), 2 (int8) or 4 (fp8, a scale for 128 x 128)."
        )
    dtype = _KINDS[mode]
    if dtype is None:
        return {}
    return dict.fromkeys(second if mode == 1 else (*first, *second), dtype)


def weights(
    c: Checker,
    mode: int,
    table: prologs.Table,
    dtypes: Mapping[str, torch.dtype],
    scales: Mapping[str, Scale],
    weight_format: str,
) -> None:
    """Weights of known sizes, those in `dtypes` with a scale, and the others without."""
    for name, (weight, _) in table.items():
        if name not in dtypes:
            continue
        if weight.dtype is not dtypes[name]:
            came, wanted = (str(x).removeprefix("torch.") for x in (weight.dtype, dtypes[name]))
            c.fail(f"`{name}` is {came}, expected {wanted} in weight_quant_mode {mode}.", TypeError)
        c.contiguous(**{name: weight})
    prologs.weights(c, table, weight_format)
    for name, scale in scales.items():
        if name not in dtypes:
            absent(c, scale, f"`{name}` is not quantized in weight_quant_mode {mode}")
            continue
        *groups, rows, columns = (c.sizes[letter] for letter in table[name][1].split())
        of_scale(c, scale, dtypes[name], rows, columns, groups)


def absent(c: Checker, scale: Scale, why: str) -> None:
    c.require(scale.tensor is None, f"`{scale.name}` is given, expected None: {why}.")


def of_scale(
    c: Checker,
    scale: Scale,
    dtype: torch.dtype,
    rows: Any,
    columns: Any,
    groups: Sequence[Any] = (),
) -> None:
    """Of a weight [*groups, rows, columns]."""
    if dtype is torch.int8:
        wanted = [1, columns]
    else:
        wanted = [-(-rows // quantized.TILE), -(-columns // quantized.TILE)]
    _given(c, scale, [*groups, *wanted])


def of_activations(
    c: Checker, x: tuple[str, Tensor], scale: Scale, dtype: torch.dtype | None, tokens: Any
) -> None:
    """Of tokens [.., K] that come in 8 bits, as the weights that they meet, or in the working
    dtype: then there is none, and the op quantizes them."""
    name, tensor = x
    if tensor.dtype not in quantized.VALUES.values():
        absent(c, scale, f"`{name}` is not quantized")
        return
    if tensor.dtype is not dtype:
        came = str(tensor.dtype).removeprefix("torch.")
        wanted = "the working dtype" if dtype is None else str(dtype).removeprefix("torch.")
        c.fail(f"`{name}` is {came}, expected {wanted}, as the weights that it meets.", TypeError)
    tiles = 1 if dtype is torch.int8 else -(-tensor.shape[-1] // quantized.TILE)
    _given(c, scale, [tokens, tiles])


def smooth(c: Checker, smooth_scales_cq: Tensor | None, dtype: torch.dtype | None) -> None:
    """What the query latent is multiplied by before it is quantized."""
    scale = Scale("smooth_scales_cq", smooth_scales_cq)
    if dtype is not torch.int8:
        absent(c, scale, "the query latent is not quantized to int8")
    elif smooth_scales_cq is not None:
        _given(c, scale, [1, c.sizes["Rq"]])


def _given(c: Checker, scale: Scale, wanted: list[Any]) -> None:
    name, tensor = scale.name, scale.tensor
    if tensor is None:
        c.fail(f"`{name}` is missing, expected float32 {wanted}.")
        raise AssertionError
    c.dtype(name, tensor, torch.float32)
    c.require(
        list(tensor.shape) == wanted, f"`{name}` has shape {list(tensor.shape)}, expected {wanted}."
    )
    c.contiguous(**{name: tensor})
