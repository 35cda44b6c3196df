# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What ranks of a sharded call put together: states, selections, indices."""
