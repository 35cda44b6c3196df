# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Exact top-k of the scores of blocks, a block of query tokens at a time.

    score[n, t, w] = max over the positions p of block w, p <= own position, of query[t, n] . key[p]

Products that are NaN or -inf count as the lowest number that there is; ties go to the lower block.
A block none of whose keys is there is absent, also a forced one.
"""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import Unpack

from ...common import packed, paged
from ...ops.indexer.block_indexer import Arguments
from ..common.precision import accumulator
from .lightning_indexer import _BLOCK, ranked, top


def forward(**x: Unpack[Arguments]) -> tuple[Tensor, Tensor]:
    query, key, count = x["query"], x["key"], x["top_k"]
    lengths = x["actual_seq_lengths"], x["actual_seq_lengths_key"]
    rows, keys = packed.rows_of(query, key, *lengths, x["block_table"])
    tokens, heads, size = query.shape
    wide = accumulator(query)
    shape = (heads, tokens, count)
    index = torch.full(shape, -1, dtype=torch.int32, device=query.device)
    values = torch.zeros(shape, dtype=wide, device=query.device)
    for request in range(keys.length.shape[0]):
        seeing = torch.nonzero((rows.request == request) & (rows.limit > 0)).flatten()
        if not (len(seeing) and heads):
            continue
        reach = int(rows.limit[seeing].max())
        block = packed.block_within(x["block_size"], reach)
        positions = torch.arange(reach, device=query.device)
        slots = keys.slots(key, seeing.new_full((1,), request), positions[None])[0]
        k = paged.gather(key, slots, wide)
        for at in seeing.split(max(1, _BLOCK // (heads * reach))):
            limit = rows.limit[at]
            products = ranked((query[at].to(wide).view(-1, size) @ k.mT).view(len(at), heads, -1))
            seen = (positions < limit[:, None]) & (slots >= 0)
            score = _of_blocks(products.masked_fill(~seen[:, None], -torch.inf), block)
            there = (score > -torch.inf).flatten(0, 1)
            picked = top(_forced(score, limit, block, x).flatten(0, 1), there, count)
            picked = picked.view(len(at), heads, count)
            value = score.gather(2, picked.clamp(min=0)).masked_fill(picked < 0, 0)
            index[:, at], values[:, at] = picked.int().transpose(0, 1), value.transpose(0, 1)
    return index, values if x["return_value"] else values.new_empty([0])


def _of_blocks(products: Tensor, block: int) -> Tensor:
    """[t, N, blocks] of products [t, N, positions]."""
    behind = -products.shape[-1] % block
    padded = torch.nn.functional.pad(products, (0, behind), value=-torch.inf)
    out: Tensor = padded.unflatten(-1, (-1, block)).amax(-1)
    return out


def _forced(score: Tensor, limit: Tensor, block: int, x: Arguments) -> Tensor:
    """Blocks that are always chosen, if any of their keys is there, as infinite; others as less."""
    number = torch.arange(score.shape[-1], device=score.device)
    last = torch.div(limit + block - 1, block, rounding_mode="floor")[:, None]
    forced = (number < x["init_blocks"]) | ((number >= last - x["local_blocks"]) & (number < last))
    forced = forced[:, None] & (score > -torch.inf)
    return score.clamp(max=torch.finfo(score.dtype).max).masked_fill(forced, torch.inf)
