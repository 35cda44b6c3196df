# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Adapters for graph mode: CUDA graphs, torchair (Ascend) and ONNX."""
