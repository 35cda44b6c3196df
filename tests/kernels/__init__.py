# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""How kernels are chosen, cut, launched and refused."""
