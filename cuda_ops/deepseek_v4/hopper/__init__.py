# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Kernels in Gluon for compute capability 9.0, each named as the file above whose path it is."""
