# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What every op, and the package as a whole, promises."""
