# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Packed query tokens [T, ..] whose requests have a length each, and paged keys [pages, P, ..].

Token j of the n tokens of a request with L keys stands at position L - n + j, and sees the
positions up to it.  Tokens behind the sum of the lengths are of no request.  Lengths end with the
tensors: a negative one is 0, and the tokens of a request end with T.
"""

from __future__ import annotations

from torch import Tensor

from . import layout


def ends(lengths: Tensor, tokens: int) -> Tensor:
    """[B] int64: where the tokens of each request end."""
    return lengths.long().clamp(0, tokens).cumsum(0).clamp(max=tokens)


def rows_of(
    query: Tensor, key: Tensor, lengths: Tensor, key_lengths: Tensor, block_table: Tensor
) -> tuple[layout.Rows, layout.Keys]:
    keys = layout.keys_of(key, "PA_BSND", key_lengths, block_table)
    return layout.rows_of(query, "TND", ends(lengths, query.shape[0]), keys, 3), keys


def block_within(block_size: int, reach: int) -> int:
    """A block that no request fills has no other beside it, however long it is."""
    return min(block_size, max(reach, 1))
