# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""A kernel of nothing but warp specialisation, for NVIDIA's racecheck (docs/sanitizer.md):

compute-sanitizer --tool racecheck python -m tests.tools.handover
"""

from __future__ import annotations

import torch
from custom.cuda_ops.common.gluon_names import barrier
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _part(out, end, FIRST: gl.constexpr):
    i = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
    barrier()
    gl.store(out + FIRST + i, i + end)


@gluon.jit
def _kernel(ends, out):
    """Three groups of warps that write 128 numbers each; `end` is handed over to two of them."""
    end = gl.load(ends + gl.program_id(0))
    out += gl.program_id(0) * 384
    gl.warp_specialize(
        [(_part, (out, end, 0)), (_part, (out, end, 128)), (_part, (out, end, 256))],
        [4, 4],
        [168, 96],
    )


def main() -> None:
    ends = torch.arange(8, dtype=torch.int32, device="cuda")
    out = torch.empty(8, 3, 128, dtype=torch.int32, device="cuda")
    _kernel[(8,)](ends, out, num_warps=4)
    want = ends[:, None, None] + torch.arange(128, device="cuda")
    assert torch.equal(out, want.expand_as(out))
    print("every group got its number")


if __name__ == "__main__":
    main()
