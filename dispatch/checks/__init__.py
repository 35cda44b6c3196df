# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Argument checks, fakes and autograd formulas: one module an op, named by its spec's file."""
