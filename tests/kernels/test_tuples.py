# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""npu_ops/common/tuples.py: what a kernel with named tuples becomes."""

from __future__ import annotations

import inspect
from typing import NamedTuple

import pytest
import triton.language as tl
from custom.npu_ops.common.tuples import spread


class Strides(NamedTuple):
    row: int
    head: int


class Constants(NamedTuple):
    SIZE: tl.constexpr
    FLAG: tl.constexpr


def _part(*given):
    return given


def _kernel(x, of_x: Strides, rows, of_y: Strides, C: Constants, TILE: tl.constexpr = 4):
    """Its words."""
    both = _part(x, *of_x, *C, of_y.head)  # a comment with of_x.row
    return both, of_y.row * C.SIZE + of_x.row, rows if C.FLAG else TILE


def _twice(of_x: Strides):
    of_x_row = of_x.row
    return of_x_row


def _none(x, TILE: tl.constexpr):
    return x + TILE


def test_a_parameter_a_field():
    flat, numbers = spread(_kernel)
    given = inspect.signature(flat).parameters
    assert list(given) == [
        *("x", "of_x_row", "of_x_head", "rows", "of_y_row", "of_y_head", "SIZE", "FLAG", "TILE")
    ]
    constants = [name for name, x in given.items() if x.annotation == "tl.constexpr"]
    assert constants == ["SIZE", "FLAG", "TILE"]
    assert numbers == ["of_x_row", "of_x_head", "of_y_row", "of_y_head"]


@pytest.mark.parametrize("flag", [True, False])
def test_it_does_the_same(flag):
    x, y, constants = Strides(2, 3), Strides(5, 7), Constants(11, flag)
    flat, _ = spread(_kernel)
    assert flat("x", *x, 13, *y, *constants) == _kernel("x", x, 13, y, constants)


def test_its_source_lies_at_the_same_lines():
    flat, _ = spread(_kernel)
    source, line = inspect.getsourcelines(flat)
    before, of_def = inspect.getsourcelines(_kernel)
    assert (len(source), line) == (len(before), of_def)
    assert (
        "# a comment with of_x.row" in source[2]
        and "_part(x, of_x_row, of_x_head, SIZE" in source[2]
    )
    assert flat.__doc__ == "Its words." and flat.__module__ == __name__


def test_two_things_of_one_name_are_refused():
    with pytest.raises(TypeError, match="_twice has two things called of_x_row"):
        spread(_twice)


def test_without_tuples_nothing_changes():
    flat, numbers = spread(_none)
    assert inspect.getsource(flat) == inspect.getsource(_none) and numbers == []
