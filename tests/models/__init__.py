# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Whole models, and the frameworks that serve them."""
