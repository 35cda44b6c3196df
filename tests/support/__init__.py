# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What tests share: inputs, oracles, bounds, and stand-ins for GPUs.  No test calls a test."""
