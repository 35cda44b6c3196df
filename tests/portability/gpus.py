# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The GPUs and Tritons of the matrix, and what each GPU has."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

HOME = Path(__file__).parents[2] / ".portability"
KIB = 1024


@dataclass(frozen=True)
class GPU:
    name: str
    processors: int
    shared_memory: int  # of one program


GPUS = {
    80: GPU("A100", 108, 163 * KIB),
    89: GPU("L40S, RTX 4090", 142, 99 * KIB),
    90: GPU("H100, H200", 132, 227 * KIB),
    100: GPU("B200", 148, 227 * KIB),
    120: GPU("RTX 5090, RTX PRO 6000", 170, 99 * KIB),
}
TENSOR_MEMORY = 512  # columns, where there is any
# the one that `make test` installs is among them
TRITONS = ("3.6.0", "3.7.1", "3.9.0")
WHOLE = [(capability, version) for version in TRITONS for capability in GPUS]
# where Gluon's names matter
WHOLE.append((90, "3.8.0"))
