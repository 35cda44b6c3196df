# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What stands ahead of sparse attention: projections, norms, rotation, cache writes."""
