# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What is said of a delta rule whose states will not stay finite."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ...check import Checker
from ...values import known


def note_growth(
    c: Checker, key: Tensor, beta: Tensor | None, x: Mapping[str, Any], g: Tensor | None
) -> None:
    """Where values are known: what makes states grow until they are not finite.  A token turns a
    state by I - beta k k^T, of which one eigenvalue is 1 - beta |k|^2."""
    if not known(key) or not key.numel():
        return
    squares = key.float().square().sum(-1)
    if beta is not None:
        if x["use_beta_sigmoid_in_kernel"]:
            beta = beta.float().sigmoid() * (2 if x["allow_neg_eigval"] else 1)
        squares = squares.repeat_interleave(beta.shape[-1] // squares.shape[-1], -1) * beta
    most = float(squares.max())
    if most > 2:
        c.note(
            "growth",
            f"`beta` |`key`|^2 is up to {most:.3g}, and above 2 the state grows by every token. "
            "If keys should be of length 1 (fla's use_qk_l2norm_in_kernel), pass "
            "torch.nn.functional.normalize(key.float(), dim=-1), and the query likewise.",
        )
    if g is not None and float(g.max()) > 0:
        c.note(
            "decay",
            f"`g` is up to {float(g.max()):.3g}, and above 0 the state grows by every token. It is "
            "the logarithm of the decay: -A_log.exp() * softplus(a + dt_bias), say.",
        )
