# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""DeepSeek-V4: compressor, attention over window rows and entries, hyper-connections."""
