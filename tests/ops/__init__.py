# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What each op computes, in the families of dispatch/ops."""
