# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Causal depthwise convolution, forward, gradient and state updates."""
