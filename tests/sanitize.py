# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Every CUDA kernel at small sizes, for NVIDIA's checker:

compute-sanitizer --tool memcheck python -m tests.sanitize [OP ...]     (or racecheck)

PyTorch's caching allocator hides reads past the end of a tensor: run with
PYTORCH_NO_CUDA_MEMORY_CACHING=1.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import torch
from custom.dispatch.register import overload
from custom.dispatch.specs import SPECS

from custom.bench.case import Case
from custom.bench.indexer_loss import loss_case
from custom.bench.presets import presets

from .samples import sample


def _rope_apart(case: Case) -> Case:
    def make(device: torch.device, seed: int) -> dict[str, Any]:
        x = case.make(device, seed)
        for name in ("query", "key"):
            x[f"{name}_rope"], x[name] = x[name][..., -64:], x[name][..., :-64]
        return x

    return replace(case, make=make)


# what the samples and the presets are too small for: kernels that are taken from some size on
LARGER: dict[str, list[Case]] = {
    "npu_indexer_loss": [
        loss_case(65, 320, 4, 150, 140),
        loss_case(128, 576, 3, 150, 140, lse=True),
        _rope_apart(loss_case(96, 576, 3, 150, 140)),
        loss_case(16, 320, 4, 90, 70),
        loss_case(130, 128, 4, 90, 70),
    ],
}


def main(names: list[str]) -> None:
    device = torch.device("cuda")
    for spec in SPECS:
        if names and spec.name not in names:
            continue
        with torch.no_grad():
            for sizes in ({}, {"B": 1, "S": 1}):
                for dtype in (torch.bfloat16, torch.float16):
                    overload(spec)(**sample(spec.name, device, dtype, **sizes))
            for case in [*presets(spec.name, "cpu"), *LARGER.get(spec.name, ())]:
                case.call(case.make(device, 0))
        torch.cuda.synchronize()
        print(f"ran {spec.name}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
