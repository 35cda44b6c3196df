# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Arguments as leaves of a graph, and their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def with_leaves(names: Sequence[str], x: dict[str, Any]) -> dict[str, Any]:
    """`x` with leaves of a graph of their own under `names`, where they are given."""
    return {
        n: y.detach().requires_grad_() if n in names and y is not None else y for n, y in x.items()
    }


def gradients(
    names: Sequence[str],
    outputs: tuple[Tensor, ...],
    grads: tuple[Tensor, ...],
    x: dict[str, Any],
) -> dict[str, Tensor]:
    """Of every leaf of `names` that is there; zeros where nothing depends on it."""
    given = [(out, grad) for out, grad in zip(outputs, grads, strict=True) if out.requires_grad]
    leaves = {name: x[name] for name in names if x[name] is not None}
    if not given:
        return {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    outs, ups = zip(*((o, g.to(o.dtype).to(o.device)) for o, g in given), strict=True)
    found = torch.autograd.grad(outs, list(leaves.values()), ups, allow_unused=True)
    return {
        name: torch.zeros_like(leaf) if grad is None else grad
        for (name, leaf), grad in zip(leaves.items(), found, strict=True)
    }
