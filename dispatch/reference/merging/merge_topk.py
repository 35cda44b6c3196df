# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The K candidates that score highest, ties by the lower position; in order of position."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..common.precision import accumulator

_LAST = 2**31  # behind every position


def forward(values: Tensor, positions: Tensor, k: int) -> tuple[Tensor, Tensor]:
    return merged(values, positions, k, _highest)


def _highest(score: Tensor, k: int) -> Tensor:
    return score.sort(dim=-1, descending=True, stable=True).indices[..., :k]


def merged(
    values: Tensor, positions: Tensor, k: int, highest: Callable[[Tensor, int], Tensor]
) -> tuple[Tensor, Tensor]:
    """`highest(score, k)`: where the k highest are, of equal ones the first."""
    value, position = (x.movedim(0, -2).flatten(-2) for x in (values, positions.long()))
    position = position.masked_fill((position < 0) | (position >= _LAST), _LAST)
    # as many candidates as are asked for, however few there are
    value, position = pad(value, (0, k)), pad(position, (0, k), value=_LAST)
    last = value.ndim - 1  # onnx's evaluator gathers along no negative dimension
    position, order = position.sort(-1)
    value = value.gather(last, order)
    # a NaN comes last, and only what is absent is -inf
    score = value.to(accumulator(values))
    lowest = torch.finfo(score.dtype).min
    score = score.masked_fill(~(score > lowest), lowest)
    score = score.masked_fill(position == _LAST, -torch.inf)
    best = highest(score, k)
    chosen, order = position.gather(last, best).sort(-1)
    absent = chosen == _LAST
    value = value.gather(last, best.gather(last, order)).masked_fill(absent, 0)
    return chosen.masked_fill(absent, -1).to(torch.int32), value
