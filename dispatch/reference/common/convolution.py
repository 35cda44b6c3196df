# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Which numbers a causal convolution multiplies, as rows of one table, with no loop over tokens.

The table is a row of zeros, then what came before each sequence, then all tokens.  A position in a
sequence is that of a token from 0 on; -1 is the last column of its history.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tokens:
    """For every token, [B, S] ones counted as B * S, and every sequence."""

    sequence: Tensor  # [T], of a token of none some number up to N
    position: Tensor  # [T], in its sequence
    there: Tensor  # [T], whether it is of a sequence
    start: Tensor  # [N]
    length: Tensor  # [N]

    @classmethod
    def of(cls, x: Tensor, query_start_loc: Tensor | None) -> Tokens:
        if query_start_loc is None:
            batch, size = x.shape[:2]
            number = torch.arange(batch, device=x.device)
            sequence = number[:, None].expand(batch, size).reshape(-1)
            position = torch.arange(size, device=x.device).expand(batch, size).reshape(-1)
            start = number * size
            return cls(sequence, position, position >= 0, start, torch.full_like(start, size))
        # a sequence begins where all before it have ended; ONNX knows no running maximum
        sums = query_start_loc.long().clamp(0, x.shape[0])
        number = torch.arange(sums.shape[0], device=x.device)
        sums = torch.where(number <= number[:, None], sums, 0).amax(1)
        token = torch.arange(x.shape[0], device=x.device)
        start, length = sums[:-1], sums.diff()
        # the last one that begins at or before the token
        sequence = (sums[1:, None] <= token).sum(0)
        first = torch.cat([start, sums[-1:]])[sequence]
        there = (sequence < start.shape[0]) & (token >= first)
        return cls(sequence, token - first, there, start, length)


@dataclass(frozen=True)
class Table:
    """Rows [1 + N C + T, D] of which the first is zeros; C columns of history a sequence."""

    rows: Tensor
    columns: int
    sequences: int

    @classmethod
    def of(cls, x: Tensor, history: Tensor, kind: torch.dtype) -> Table:
        """x [B, S, D] or [T, D], history [N, C, D]."""
        size = x.shape[-1]
        parts = (x.new_zeros(1, size), history.reshape(-1, size), x.reshape(-1, size))
        rows = torch.cat([part.to(kind) for part in parts])
        return cls(rows, history.shape[1], history.shape[0])

    def at(self, sequence: Tensor, position: Tensor, start: Tensor) -> Tensor:
        """The row of `position` in a sequence whose first token is `start`; 0 where there is
        none before it."""
        past = 1 + sequence * self.columns + self.columns + position
        now = 1 + self.sequences * self.columns + start + position
        row = torch.where(position >= 0, now, past)
        return torch.where(position >= -self.columns, row, 0)

    @property
    def first_token(self) -> int:
        return 1 + self.sequences * self.columns


def taps(tokens: Tokens, table: Table, width: int, parents: Tensor | None = None) -> list[Tensor]:
    """The rows [T] of a token, of the one before it, and so on; with parents [N, P], of the one
    that it follows in its tree."""
    first = torch.cat([tokens.start, tokens.start.new_zeros(1)])[tokens.sequence]
    position = tokens.position
    found = []
    for _ in range(width):
        found.append(torch.where(tokens.there, table.at(tokens.sequence, position, first), 0))
        position = before(tokens.sequence, position, parents)
    return found


def before(sequence: Tensor, position: Tensor, parents: Tensor | None) -> Tensor:
    if parents is None:
        return position - 1
    # a column and a sequence more, for whoever has none
    padded = torch.nn.functional.pad(parents.long(), (0, 1, 0, 1), value=-1)
    column = position.clamp(0, parents.shape[1])
    parent = padded[sequence, column]
    parent = torch.where((parent >= 0) & (parent < position), parent, -1)
    return torch.where(position >= 0, parent, position - 1)


def convolved(table: Table, rows: list[Tensor], weight: Tensor, bias: Tensor | None) -> Tensor:
    """[T, D]: weight [W, D], whose last row is that of the token itself."""
    kind = table.rows.dtype
    total = torch.zeros([rows[0].shape[0], weight.shape[1]], dtype=kind, device=weight.device)
    if bias is not None:
        total = total + bias.to(kind)
    for back, row in enumerate(rows):
        total = total + table.rows[row] * weight[-1 - back].to(kind)
    return total


def activated(total: Tensor, activation: str | None) -> Tensor:
    return total if activation is None else total * torch.sigmoid(total)


def last(tokens: Tokens, table: Table, width: int) -> Tensor:
    """The rows [N, W - 1] that the last tokens of every sequence leave."""
    sequence = torch.arange(table.sequences, device=table.rows.device)[:, None]
    column = torch.arange(1 - width, 0, device=table.rows.device)
    return table.at(sequence, tokens.length[:, None] + column, tokens.start[:, None])
