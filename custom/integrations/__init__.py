# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Our ops inside other libraries: each module replaces a model's own code, and undoes it."""
