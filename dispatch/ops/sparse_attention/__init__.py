# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""DeepSeek Sparse Attention: the layer in one call, and attention over the selected keys."""
