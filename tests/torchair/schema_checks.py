# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""tests/records/torch_npu_schemas.txt is what the installed torch_npu says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch_npu  # noqa: F401  registers npu::
from custom.dispatch.registry import SPECS

TEXT = (Path(__file__).parents[1] / "records" / "torch_npu_schemas.txt").read_text()
SAME_NAME = [spec.name for spec in SPECS if hasattr(torch.ops.npu, spec.name)]


def test_no_schema_is_left_out():
    assert len(SAME_NAME) == len(TEXT.splitlines())


@pytest.mark.parametrize("name", SAME_NAME)
def test_schema_is_the_installed_one(name):
    assert str(getattr(torch.ops.npu, name).default._schema) in TEXT.splitlines()
