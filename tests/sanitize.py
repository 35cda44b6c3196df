# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Every CUDA kernel at small sizes, for NVIDIA's checker:

compute-sanitizer --tool memcheck python -m tests.sanitize [OP ...]     (or racecheck)

PyTorch's caching allocator hides reads past the end of a tensor: run with
PYTORCH_NO_CUDA_MEMORY_CACHING=1.
"""

from __future__ import annotations

import sys

import torch
from custom.dispatch.register import overload
from custom.dispatch.specs import SPECS

from custom.bench.presets import presets

from .samples import sample


def main(names: list[str]) -> None:
    device = torch.device("cuda")
    for spec in SPECS:
        if names and spec.name not in names:
            continue
        with torch.no_grad():
            for sizes in ({}, {"B": 1, "S": 1}):
                for dtype in (torch.bfloat16, torch.float16):
                    overload(spec)(**sample(spec.name, device, dtype, **sizes))
            for case in presets(spec.name, "cpu"):
                case.call(case.make(device, 0))
        torch.cuda.synchronize()
        print(f"ran {spec.name}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
