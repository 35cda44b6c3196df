# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Which block of a product with fused weights a program has, and where it stores."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def placed(tokens, BLOCK_T: tl.constexpr, BLOCKS: tl.constexpr, GROUP: tl.constexpr):
    """(block of tokens, block of columns, run of k): GROUP blocks of tokens share each block of
    weights in L2."""
    program = tl.program_id(0)
    first = program // (GROUP * BLOCKS) * GROUP
    height = tl.minimum(tl.cdiv(tokens, BLOCK_T) - first, GROUP)
    token_block = first + program % (GROUP * BLOCKS) % height
    return token_block, program % (GROUP * BLOCKS) // height, tl.program_id(1)


@triton.jit
def chosen(inside, new, old):
    """Each of `new` where the block is `inside` its weight, else of `old`."""
    out = ()
    for i in tl.static_range(len(old)):
        out += (tl.where(inside, new[i], old[i]),)
    return out


@triton.jit
def tile_at(out, row, n, row_mask, n_mask, SWAP: tl.constexpr):
    """(where rows and their columns lie, which are there); SWAP: [columns, rows]."""
    if SWAP:
        at = out + row[None, :] + n[:, None]
        mask = n_mask[:, None] & row_mask[None, :]
    else:
        at = out + row[:, None] + n[None, :]
        mask = row_mask[:, None] & n_mask[None, :]
    return at, mask
