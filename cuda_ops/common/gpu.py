# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What the GPU at hand can do: each question once, asked here alone.

Triton's interpreter and CPU tensors under a stand-in for the driver have no GPU: capability (0, 0),
one processor, and the shared memory of an H100.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch
import triton

from ...dispatch import log
from ..runtime import private_triton

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_OLDEST = (8, 0)  # what Triton supports, and what the tiles are cut for


def cannot_run(device: torch.device) -> str | None:
    """Why no kernel of this package runs on tensors of `device`, or None."""
    if INTERPRETED:
        return None
    if device.type != "cuda":
        if private_triton.pretends():
            return None
        return (
            f"inputs are on {device}, where these kernels run under Triton's interpreter alone; "
            "move them to cuda, or set TRITON_INTERPRET=1 before Python starts"
        )
    if torch.version.hip is not None:
        return (
            f"this torch is for AMD GPUs (ROCm {torch.version.hip}), this backend needs an NVIDIA "
            "GPU; set CUSTOM_BACKEND=reference"
        )
    major, minor = capability(device)
    if (major, minor) < _OLDEST:
        return (
            f"{device} is an sm_{major}{minor}, this backend needs sm_80 (Ampere) or later; use "
            "such a GPU, or set CUSTOM_BACKEND=reference"
        )
    return None


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability: (8, 0) A100, (8, 9) L40S, (9, 0) H100 and H200, (10, 0) B200."""
    if INTERPRETED or device.type != "cuda":
        return 0, 0
    return torch.cuda.get_device_capability(device)


def is_hopper(device: torch.device) -> bool:
    """wgmma, TMA and warp specialisation: what the kernels in Gluon are written for, and a Gluon
    that has them."""
    if capability(device) != (9, 0):
        return False
    lacking = without_gluon()
    if lacking is not None:
        log.once(("gluon",), lacking)
    return lacking is None


@cache
def without_gluon() -> str | None:
    """Why plain kernels run on Hopper with this Triton, or None."""
    from .gluon_names import LACKING

    if not LACKING:
        return None
    return (
        f"triton {triton.__version__} has no {', '.join(LACKING)} in Gluon, so plain kernels run, "
        "which are slower on Hopper; pip install 'triton>=3.6,<3.10'"
    )


def reads_shared(device: torch.device) -> bool:
    """Large products read both sides from shared memory (wgmma, tcgen05), not from registers, so
    that a pipeline of loads needs one tile more."""
    return (9, 0) <= capability(device) < (12, 0)


def has_chained_launch(device: torch.device) -> bool:
    """Programmatic dependent launch and L2 prefetch: Hopper and later."""
    return capability(device) >= (9, 0)


def has_tensor_memory(device: torch.device) -> bool:
    """Accumulators lie in 512 columns of their own: B200."""
    return capability(device)[0] == 10


def converts_fp8(device: torch.device) -> bool:
    """Between e4m3 and wider floats, in hardware: Ada, Hopper and later."""
    return capability(device) >= (8, 9)


@cache
def num_sms(device: torch.device) -> int:
    """Multiprocessors."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may take: 99 KiB on sm_86, 89 and 120, 163 on an
    A100, 227 on an H100 and a B200."""
    if device.type != "cuda":
        return 227 * 1024
    properties: Any = torch.cuda.get_device_properties(device)
    return properties.shared_memory_per_block_optin


def too_small(device: torch.device, **sizes: int) -> str:
    """Why an op refuses `sizes`, by their letters, of which no tile fits."""
    came = ", ".join(f"{letter}={size}" for letter, size in sizes.items())
    return (
        f"no tile of {came} fits into this GPU's {shared_memory(device) // 1024} KiB of shared "
        "memory a program: take smaller ones, or a GPU with more"
    )


def described(device: torch.device) -> str:
    """For custom.info: what the kernels are chosen by, and which those are."""
    major, minor = capability(device)
    if (major, minor) != (9, 0):
        path = "plain kernels: those in Gluon are for sm_90"
    else:
        path = without_gluon() or "kernels in Gluon for Hopper"
    return (
        f"sm_{major}{minor}, {num_sms(device)} multiprocessors, "
        f"{shared_memory(device) // 1024} KiB of shared memory; {path}"
    )
