# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The --device option that every example takes, and which backend ran the ops."""

from __future__ import annotations

import argparse

import torch
from custom.dispatch import log

DEVICES = ["auto", "cpu", "cuda", "npu"]


def choose_device(name: str) -> str:
    """auto: npu, else cuda, else cpu."""
    chosen = name
    if name == "auto":
        npu = hasattr(torch, "npu") and torch.npu.is_available()
        chosen = "npu" if npu else "cuda" if torch.cuda.is_available() else "cpu"
    print(f"device: {chosen}" + (" (found by --device auto)" if name == "auto" else ""))
    return chosen


def device_and_dtype(description: str | None) -> tuple[torch.device, torch.dtype]:
    """The chosen device; float32 on a CPU, else bfloat16."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", choices=DEVICES, default="auto")
    name = choose_device(parser.parse_args().device)
    return torch.device(name), torch.float32 if name == "cpu" else torch.bfloat16


def print_backends() -> None:
    """Which backend ran which op in this process, and how often."""
    print(f"\n{'op':<46}{'backend':<11}calls")
    for (op, backend), calls in sorted(log.calls.items()):
        print(f"{op:<46}{backend:<11}{calls}")
