# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The CPU backend, which is also the oracle of every kernel: plain PyTorch."""
