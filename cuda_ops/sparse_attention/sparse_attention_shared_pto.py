# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""MLA prolog and attention, of a layer whose selection another layer has made."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...dispatch.common import layer
from ..prolog import mla_prolog_pto
from .sparse_attention_pto import REASONS, STAGES


def unsupported(**arguments: Any) -> str | None:
    return layer.Shared(**arguments).unsupported(REASONS)


def forward(**arguments: Any) -> Tensor:
    a = layer.Shared(**arguments)
    query, query_rope, *_ = mla_prolog_pto.with_rows(**a.of_mla_prolog())
    return a.attended(STAGES, query, query_rope, a.sparse_indices)
