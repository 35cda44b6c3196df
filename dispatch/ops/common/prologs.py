# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What the prologs and the whole layer ask of their tensors: each op lists its own in a table.

An entry is argument: (tensor, shape); a letter gets its size where it first appears.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import Tensor

from ...check import Checker
from ...common import nz
from ...values import known
from . import quantization

Table = Mapping[str, tuple[Tensor, str]]


def table(x: Mapping[str, Any], **shapes: str) -> dict[str, tuple[Tensor, str]]:
    """The arguments of these names, where they are given."""
    return {name: (x[name], shape) for name, shape in shapes.items() if x[name] is not None}


def tensors(
    c: Checker,
    floats: Table,
    weights: Table,
    integers: Table,
    others: Mapping[str, Tensor | None] = MappingProxyType({}),
    own: Collection[str] = (),
    paged: Collection[str] = (),
) -> None:
    """All on one device and contiguous, floats and weights of one dtype; all shapes but those of
    the weights.  What is named in `own` has a dtype and strides of its own, and so have
    `others`, which are no more than on that device.  Caches in `paged` have pages that may lie
    apart."""
    given = {name: tensor for name, (tensor, _) in {**floats, **weights}.items()}
    whole = {name: tensor for name, (tensor, _) in integers.items()}
    floating = {name: tensor for name, tensor in given.items() if name not in own}
    c.same_device(**given, **whole, **others)
    c.floating(*next(iter(floating.items())))
    c.same_dtype(**floating)
    for name, tensor in whole.items():
        c.integer(name, tensor)
    for name, (tensor, shape) in {**floats, **integers}.items():
        c.shape(name, tensor, shape)
    c.contiguous(**{name: x for name, x in floating.items() if name not in paged}, **whole)
    quantization.whole_pages(c, **{name: given[name] for name in paged})
    page, rotary = c.sizes["P"], c.sizes["Dr"]
    c.require(
        page % 16 == 0 and page > 0,
        f"the cache has pages of {page} slots, expected a multiple of 16.",
    )
    c.require(rotary % 2 == 0, f"the rotary size Dr is {rotary}, expected an even one.")


def rotary(c: Checker, head: str) -> None:
    """The rotary dims are an even number of a head's, whose size has the letter `head`."""
    size, whole = c.sizes["Dr"], c.sizes[head]
    c.require(
        size % 2 == 0 and size <= whole,
        f"the rotary size Dr is {size}, expected an even one, at most {head}={whole}.",
    )


def weights(c: Checker, table: Table, weight_format: str) -> None:
    """Weights "K N" or "G K N", whose sizes are known: NZ if they have two dimensions more; others
    as `weight_format` says, [N, K] in "linear"."""
    c.one_of("weight_format", weight_format, *nz.FORMATS)
    for name, (weight, shape) in table.items():
        *groups, rows, columns = shape.split()
        tiled = weight.ndim == len(groups) + 4
        if weight_format == "linear":
            c.require(
                not tiled,
                f"`{name}` has shape {list(weight.shape)}, which is NZ, expected "
                f'[{", ".join([*groups, columns, rows])}] with weight_format="linear". Pass '
                'nn.Linear.weight itself, or all weights as NZ with weight_format="nz".',
            )
            _row_major(c, name, weight, [*groups, columns, rows], "nd")
            continue
        if tiled:
            c0 = nz.columns(weight.dtype)
            sizes = {
                f"{columns}/{c0}": -(-c.sizes[columns] // c0),
                f"{rows}/16": -(-c.sizes[rows] // 16),
            }
            c.shape(name, weight, " ".join([*groups, *sizes, "16", str(c0)]), **sizes)
        else:
            _row_major(c, name, weight, [*groups, rows, columns], "linear")
        if tiled or weight_format == "nz":
            for letter, tile in ((rows, 16), (columns, max(16, nz.columns(weight.dtype)))):
                c.require(
                    c.sizes[letter] % tile == 0,
                    f"`{name}` is NZ with {letter}={c.sizes[letter]}, expected a multiple of "
                    f'{tile}. Pad the weight, or pass it row-major with weight_format="nd".',
                )


def _row_major(c: Checker, name: str, weight: Tensor, letters: Sequence[str], other: str) -> None:
    """A weight of this shape; one that lies the other way is told the `weight_format` for that."""
    wanted = [c.sizes[letter] for letter in letters]
    came = list(weight.shape)
    if came != wanted and came == [*wanted[:-2], wanted[-1], wanted[-2]]:
        c.fail(
            f"`{name}` has shape {came}, expected [{', '.join(letters)}] = {wanted}. As it is it "
            f'fits weight_format="{other}", which wants all weights so.'
        )
    c.shape(name, weight, " ".join(letters))


def distinct_slots(c: Checker, cache_index: Tensor, name: str = "cache_index") -> None:
    """Where values are known: no two tokens write the same slot."""
    if known(cache_index):
        slots = c.sizes["pages"] * c.sizes["P"]
        written = cache_index[(cache_index >= 0) & (cache_index < slots)]
        c.require(
            written.unique().numel() == written.numel(),
            f"`{name}` names a slot twice, expected distinct slots (or -1: not written).",
        )
