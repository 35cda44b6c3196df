# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The tests of dispatch/ops/sparse_attention."""
