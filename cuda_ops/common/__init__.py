# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What several ops use: where rows and keys lie, sizes of tiles, the GPU at hand, launches."""
