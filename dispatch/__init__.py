# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What an op is (its spec), its argument checks, which backend runs it, and the CPU reference."""
