# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The lightning indexer, its top-k, its gradient and the loss that trains it."""
