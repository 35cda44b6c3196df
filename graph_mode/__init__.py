# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Adapters for graph mode: CUDA graphs, torchair (Ascend) and ONNX.

torch.compile and torch.export need none: the specs carry schema and fake.
"""

from .capture import Captured, capture, warmup
from .replayed import Replayed

__all__ = ["Captured", "Replayed", "capture", "warmup"]
