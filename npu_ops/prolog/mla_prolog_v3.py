# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""mla_prolog_pto.py under torch_npu's words, with the query norm as its product takes it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...dispatch.common import mla_v3
from . import mla_prolog_pto


def unsupported(**arguments: Any) -> str | None:
    return mla_prolog_pto.unsupported(**mla_v3.as_pto(arguments))


def forward(**arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    query, query_rope, _, c = mla_prolog_pto.with_rows(**mla_v3.as_pto(arguments))
    return mla_v3.outputs(arguments, query, query_rope, c.values, c.scale)
