# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The device that an example runs on, and which backend ran the ops."""

from __future__ import annotations

import sys

import torch
from _options import device_alone
from custom.dispatch import log


def choose_device(name: str) -> str:
    """auto: npu, else cuda, else cpu."""
    torch_npu = getattr(torch, "npu", None)
    npu = torch_npu is not None and torch_npu.is_available()
    here = {"npu": npu, "cuda": torch.cuda.is_available(), "cpu": True}
    chosen = next(each for each in here if here[each]) if name == "auto" else name
    if not here[chosen]:
        sys.exit(f"--device {chosen}: none is here; python -m custom.info says why")
    print(f"device: {chosen}" + (" (found by --device auto)" if name == "auto" else ""))
    return chosen


def device_and_dtype(description: str | None) -> tuple[torch.device, torch.dtype]:
    """The chosen device; float32 on a CPU, else bfloat16."""
    name = choose_device(device_alone(description).device)
    return torch.device(name), torch.float32 if name == "cpu" else torch.bfloat16


def print_backends() -> None:
    """Which backend ran which op in this process, and how often."""
    print(f"\n{'op':<46}{'backend':<11}calls")
    for (op, backend), calls in sorted(log.calls.items()):
        print(f"{op:<46}{backend:<11}{calls}")
