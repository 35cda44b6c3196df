# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What several ops use: entry points, cores, tiles, requests, refusals."""
