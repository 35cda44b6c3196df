# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Rows of paged caches in 8 bits: Hadamard, quantizers, writers."""
