# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Where CUDA kernels run in this process: on a GPU, under Triton's interpreter, or nowhere."""

from __future__ import annotations

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ON_GPU = torch.cuda.is_available() and not INTERPRETED
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
DTYPES = (torch.bfloat16, torch.float16) if ON_GPU else (torch.float16, torch.float32)
kernels = pytest.mark.skipif(not (ON_GPU or INTERPRETED), reason="needs a GPU or the interpreter")
gpu = pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
