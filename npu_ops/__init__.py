# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""triton-ascend kernels for Atlas A3, and their launchers."""
