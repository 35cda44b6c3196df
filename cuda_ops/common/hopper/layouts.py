# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Layouts of a warpgroup that gathers rows and multiplies them."""

from __future__ import annotations

from triton.experimental.gluon import language as gl

S = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))  # 64 columns of scores
GATHER = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))  # 16 bytes a thread
LINE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))  # one entry a thread
