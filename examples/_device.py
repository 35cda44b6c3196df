# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The --device option that every example takes, and which backend ran the ops."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from custom.dispatch import log

DEVICES = ["auto", "cpu", "cuda", "npu"]


Number = TypeVar("Number", int, float)


def at_least(least: Number) -> Callable[[str], Number]:
    """The type of an option, that of `least`."""

    def number(text: str) -> Number:
        value = type(least)(text)
        if not value >= least:  # so that NaN is refused too
            raise argparse.ArgumentTypeError(f"{value}, expected {least} or more")
        return value

    return number


def fraction(text: str) -> float:
    """The type of an option."""
    if not 0 < (value := float(text)) <= 1:
        raise argparse.ArgumentTypeError(f"{value}, expected more than 0, and at most 1")
    return value


def in_a_folder(text: str) -> Path:
    """The type of an option: a file that can be written when all is done."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}")
    return path


def add_device(parser: argparse.ArgumentParser) -> None:
    """The option, for `choose_device`."""
    said = "auto: an NPU, else a GPU, else the CPU"
    parser.add_argument("--device", choices=DEVICES, default="auto", help=said)


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
    parser = argparse.ArgumentParser(description=description)
    add_device(parser)
    name = choose_device(parser.parse_args().device)
    return torch.device(name), torch.float32 if name == "cpu" else torch.bfloat16


def print_backends() -> None:
    """Which backend ran which op in this process, and how often."""
    print(f"\n{'op':<46}{'backend':<11}calls")
    for (op, backend), calls in sorted(log.calls.items()):
        print(f"{op:<46}{backend:<11}{calls}")
