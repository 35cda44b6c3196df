# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What attention and its gradient share on Hopper (Gluon): whose turn it is, and who sees what."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def turn_of(number, tiles, outers, section):
    """(section, head, place in the order of its tiles) of a tile number: the heads of a section,
    whose keys or queries fit in L2 together, take turns."""
    group = number // (section * tiles)
    inside = number % (section * tiles)
    count = gl.minimum(section, outers - group * section)
    return group, group * section + inside % count, inside // count


@gluon.jit
def tile_listed(plan, place):
    """(first row, rows, first other row, other rows, tile, piece) of a packed sequence's tile."""
    row = plan + place.to(gl.int64) * 8
    first, rows = gl.load(row), gl.load(row + 1)
    other_first, other_rows = gl.load(row + 2), gl.load(row + 3)
    return first, rows, other_first, other_rows, gl.load(row + 4), gl.load(row + 5)


@gluon.jit
def seen(column, position, end, window, CAUSAL: gl.constexpr, WINDOW: gl.constexpr):
    """Which columns the rows at these positions see."""
    if CAUSAL:
        keep = column < gl.minimum(position + 1, end)[:, None]
    elif WINDOW:
        keep = column < gl.minimum(position + window, end)[:, None]
    else:
        keep = column < end
    if WINDOW:
        keep = keep & (column > (position - window)[:, None])
    return keep
