# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""How kernels are launched: compiled side by side, repeated, on streams."""
