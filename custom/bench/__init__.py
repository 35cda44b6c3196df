# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Measures an op against its floor, its reference and its peers:  python -m custom.bench OP"""
