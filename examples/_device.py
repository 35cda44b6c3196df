# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The --device option that every example takes."""

from __future__ import annotations

import argparse

import torch


def device_and_dtype(description: str | None) -> tuple[torch.device, torch.dtype]:
    """The chosen device (auto: npu, else cuda, else cpu); float32 on a CPU, else bfloat16."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda", "npu"], default="auto")
    name = parser.parse_args().device
    if name == "auto":
        npu = hasattr(torch, "npu") and torch.npu.is_available()
        name = "npu" if npu else "cuda" if torch.cuda.is_available() else "cpu"
    print(f"device: {name}")
    return torch.device(name), torch.float32 if name == "cpu" else torch.bfloat16
