# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The memories and cores of Atlas A2 and A3, and what fits into them.  Pure functions, no device.

A core holds one cube unit with L1, L0A, L0B, L0C, and two vector units with a UB each.  The
compiler double-buffers by default, so a plan may use half of UB and L1 for what it streams.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

KIB = 1024


@dataclass(frozen=True)
class Machine:
    """Sizes in bytes, per core.  Alignment: UB and L1 in blocks of 32 bytes, L0C of 512."""

    name: str
    cube_cores: int
    ub: int = 192 * KIB
    l1: int = 512 * KIB
    l0a: int = 64 * KIB
    l0b: int = 64 * KIB
    l0c: int = 128 * KIB
    block: int = 32
    block_l0c: int = 512

    @property
    def vector_cores(self) -> int:
        return 2 * self.cube_cores


# from the compiler's own target descriptions
MACHINES = {
    machine.name: machine
    for machine in (
        Machine("Ascend910B1", 24),
        Machine("Ascend910B2", 24),
        Machine("Ascend910B3", 20),
        Machine("Ascend910B4", 20),
        Machine("Ascend910_9381", 24),
        Machine("Ascend910_9382", 24),
        Machine("Ascend910_9391", 24),
        Machine("Ascend910_9392", 24),
        Machine("Ascend910_9362", 20),
        Machine("Ascend910_9372", 20),
    )
}
A3 = MACHINES["Ascend910_9392"]
# bytes of what one kernel lays out for the next, densely by token; more tokens go in several rounds
WORKSPACE = 512 * 2**20


def up(size: int, step: int) -> int:
    """The least multiple of `step` that is not below `size`."""
    return -(-size // step) * step


def at_once(tokens: int, each: int) -> int:
    """How many of `tokens` go in one round, if each takes `each` bytes of workspace."""
    return min(tokens, max(1, WORKSPACE // each))


def not_multiplied(**operand: Tensor) -> str | None:
    """Why the cube unit cannot multiply this operand, or None."""
    ((name, x),) = operand.items()
    if x.dtype in (torch.bfloat16, torch.float16):
        return None
    return f"`{name}` is {x.dtype}, the cube unit multiplies bfloat16 and float16"


def accumulator_bytes(rows: int, columns: int) -> int:
    """An fp32 tile in L0C, which holds whole 16 x 16 fractals."""
    return up(up(rows, 16) * up(columns, 16) * 4, A3.block_l0c)


def matmul_overflow(rows: int, columns: int, depth: int, machine: Machine = A3) -> str | None:
    """Why a [rows, depth] x [depth, columns] step of 16-bit operands cannot be held, or None.

    L1 holds both operand tiles twice (one is loaded while the other is multiplied), L0C the sum.
    """
    wanted = {
        "L1": (2 * 2 * depth * (up(rows, 16) + up(columns, 16)), machine.l1),
        "L0C": (accumulator_bytes(rows, columns), machine.l0c),
    }
    return _first_overflow(f"{rows} x {columns} x {depth} product", wanted, machine)


def weigh_overflow(
    heads: int, keys: int, latent: int, rotary: int, machine: Machine = A3
) -> str | None:
    """Why the scores of `heads` x `keys` of latent attention cannot be held, or None.

    Of 16-bit queries and keys, twice each, and scores in fp32.
    """
    in_l1 = 2 * (up(heads, 16) + keys) * (latent + rotary)
    wanted = {
        "L1": (2 * in_l1, machine.l1),
        "L0C": (accumulator_bytes(heads, keys), machine.l0c),
    }
    return _first_overflow(f"tile of {heads} heads and {keys} keys", wanted, machine)


def accumulate_overflow(heads: int, columns: int, machine: Machine = A3) -> str | None:
    """Why so many columns of the output of so many heads cannot be held, or None."""
    wanted = {"L0C": (accumulator_bytes(heads, columns), machine.l0c)}
    return _first_overflow(f"sum of {heads} heads and {columns} columns", wanted, machine)


def _first_overflow(what: str, wanted: dict[str, tuple[int, int]], machine: Machine) -> str | None:
    for memory, (size, there) in wanted.items():
        if size > there:
            return (
                f"a {what} needs {up(size, KIB) // KIB} KiB of {memory}, "
                f"{machine.name} has {there // KIB} KiB for it"
            )
    return None
