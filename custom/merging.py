# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What makes one result of parts: partial attentions, candidates of a top-k, and which positions
lie in which part.  On one card; `custom.parallel` has the collectives between them."""

from __future__ import annotations

import torch
from torch import Tensor

from ._keywords import worded
from ._op import op
from .dispatch.check import Checker


@op
def npu_merge_states(
    outs: Tensor, lses: Tensor, sums: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The attention over all keys, from attentions of the same queries over parts of them.

    lse = log sum_i exp(lse_i);  out = sum_i exp(lse_i - lse) outs_i, in float32.
    A part whose lse is -inf, +inf or NaN is empty and counts nothing, whatever its `outs` hold.
    Differentiable in every argument: parts of npu_sparse_flash_attention, whose sums carry a
    gradient, differentiate as the whole does.

    Formula: online softmax (Milakov and Gimelshein, 2018), over parts.

    Args:
        outs: [P, .., D], any number of parts, any strides with dense rows.
        lses: [P, ..] float32, natural log-sum-exp of each part's logits; or, with `sums`, their
            maxima.
        sums: [P, ..] float32, sums of exp(logit - maximum), as `npu_sparse_flash_attention` gives
            them (its statistics need the shape of its rows: `softmax_max.view(out.shape[:-1])`).

    Returns:
        out [.., D], dtype of `outs`, and lse [..], dtype of `lses`. Where all parts are empty: 0
        and -inf.

    Raises:
        ValueError: a shape, stride or device does not fit.
        TypeError: a type or dtype does not fit.

    >>> import torch, custom
    >>> outs, lses = torch.randn(3, 5, 4, 16), torch.randn(3, 5, 4)
    >>> out, lse = custom.npu_merge_states(outs, lses)
    >>> torch.allclose(lse, lses.logsumexp(0))
    True
    """


@op
def npu_merge_topk(values: Tensor, positions: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The `k` best of the candidates of several parts, as one top-k over all keys would choose.

    Higher values first, equal ones by the lower position, whatever part it came from. Exact if each
    part hands over its own best `k`, or all it has.

    Formula: the selection of `npu_lightning_indexer`, from parts.

    Args:
        values: [P, .., C] scores; NaN counts as the lowest.
        positions: [P, .., C] int32 or int64, positions in the whole, none twice; negative: absent.
        k: how many to keep.

    Returns:
        positions [.., k] int32, ascending, -1 behind the last, and their values [.., k], 0 there.

    Raises:
        ValueError: a shape, stride, device or `k` does not fit.
        TypeError: a type or dtype does not fit.
        RuntimeError: an argument requires grad, while grad mode is on.

    >>> import torch, custom
    >>> values = torch.tensor([[5.0, 1.0], [5.0, 3.0]])
    >>> custom.npu_merge_topk(values, torch.tensor([[4, 8], [2, 7]]), 2)
    (tensor([2, 4], dtype=torch.int32), tensor([5., 5.]))
    """


@op
def npu_localize_indices(
    indices: Tensor, rank: int, size: int, interleave: int = 1
) -> tuple[Tensor, Tensor]:
    """The rows of one shard among selected positions, when the positions are dealt out in turn.

    Position p lies on rank (p // interleave) % size, as its row
    p // (interleave * size) * interleave + p % interleave. A row is no position: what comes after
    must not be causal (sparse_mode 0), since the selection was.

    Formula: positions dealt out in turn, as vLLM's decode context parallelism deals them.

    Args:
        indices: [.., K] int32 or int64 positions; negative: absent.
        rank: of the shard.
        size: number of shards.
        interleave: positions that lie together, 1 or a page, say.

    Returns:
        local [.., K] int32, the rows that lie on `rank` in the order of `indices`, -1 behind them,
        and count [..] int32, how many they are.

    Raises:
        ValueError: a shape, stride, `rank`, `size` or `interleave` does not fit.
        TypeError: a type or dtype does not fit.

    >>> import torch, custom
    >>> custom.npu_localize_indices(torch.tensor([0, 3, 5, 7, -1]), rank=1, size=2)
    (tensor([ 1,  2,  3, -1, -1], dtype=torch.int32), tensor(3, dtype=torch.int32))
    """


# the names without the prefix of the dispatcher's namespace
merge_states = npu_merge_states
merge_topk = npu_merge_topk
localize_indices = npu_localize_indices


def _shards(name: str, rank: int, size: int, interleave: int, page_size: int = 1) -> Checker:
    c = Checker(name)
    for argument, value in dict(
        rank=rank, size=size, interleave=interleave, page_size=page_size
    ).items():
        if not isinstance(value, (int, torch.SymInt)):
            c.fail(f"`{argument}` is {value!r}, expected a whole number.", TypeError)
    c.at_least("size", size, 1)
    c.at_least("interleave", interleave, 1)
    c.at_least("page_size", page_size, 1)
    c.require(0 <= rank < size, f"`rank` is {rank}, expected 0 to {size - 1}, below `size`.")
    return c


@worded
def shard_positions(lengths: Tensor, rank: int, size: int, interleave: int = 1) -> Tensor:
    """How many of the first `lengths` positions lie on `rank`: the lengths of its shard.

    Args:
        lengths: int32 or int64, any shape.
        rank: of the shard.
        size: number of shards.
        interleave: positions that lie together.

    Returns:
        Of each length the positions on `rank`; shape and dtype of `lengths`.

    Raises:
        ValueError: `rank`, `size` or `interleave` does not fit.
        TypeError: a type or dtype does not fit.

    >>> import torch, custom
    >>> custom.shard_positions(torch.tensor([0, 1, 5, 8]), rank=1, size=2, interleave=2)
    tensor([0, 0, 2, 4])
    """
    _shards("shard_positions", rank, size, interleave).integer("lengths", lengths)
    stripes = size * interleave
    ahead = lengths - rank * interleave
    whole = torch.div(ahead, stripes, rounding_mode="floor")
    # before the first stripe: -1 whole one, and all of one
    return torch.add((ahead % stripes).clamp(max=interleave), whole, alpha=interleave)


@worded
def shard_slots(
    positions: Tensor,
    block_table: Tensor,
    page_size: int,
    rank: int,
    size: int,
    interleave: int = 1,
) -> Tensor:
    """The `cache_index` with which a prolog writes tokens into the shard of `rank`, and no others.

    Args:
        positions: [B, S] of the tokens in their requests.
        block_table: [B, max_pages] pages of the shard.
        page_size: slots of a page.
        rank: of the shard.
        size: number of shards.
        interleave: positions that lie together.

    Returns:
        [B, S] slots, dtype of `block_table`; -1 where another rank keeps the token, the position is
        negative or has no page.

    Raises:
        ValueError: a shape, device, `page_size`, `rank`, `size` or `interleave` does not fit.
        TypeError: a type or dtype does not fit.

    >>> import torch, custom
    >>> table = torch.tensor([[3, 1]])
    >>> custom.shard_slots(torch.tensor([[31, 32, 33]]), table, 16, rank=0, size=2)
    tensor([[-1, 16, -1]])
    """
    c = _shards("shard_slots", rank, size, interleave, page_size)
    c.integer("positions", positions)
    c.integer("block_table", block_table)
    # Checker.shape caches, of which torch.compile warns
    c.require(
        positions.ndim == 2, f"`positions` has shape {list(positions.shape)}, expected [B, S]."
    )
    c.require(
        block_table.ndim == 2 and block_table.shape[0] == positions.shape[0],
        f"`block_table` has shape {list(block_table.shape)}, expected [B, max_pages] with "
        f"B={positions.shape[0]} (from `positions`).",
    )
    c.same_device(positions=positions, block_table=block_table)
    c.require(block_table.shape[1] > 0, "`block_table` has no page for a request, expected one.")
    stripe = torch.div(positions, interleave, rounding_mode="floor")
    row = torch.div(stripe, size, rounding_mode="floor") * interleave + positions % interleave
    page = torch.div(row, page_size, rounding_mode="floor")
    number = block_table.gather(1, page.clamp(0, block_table.shape[1] - 1).long())
    mine = (positions >= 0) & (stripe % size == rank) & (page < block_table.shape[1])
    slot = number * page_size + row % page_size
    return torch.where(mine & (number >= 0), slot, -1).to(block_table.dtype)


@worded
def npu_attention_update(
    lse: list[Tensor], local_out: list[Tensor], update_type: int
) -> tuple[Tensor, Tensor]:
    """`npu_merge_states` under torch_npu's schema.

    Args:
        lse: one [M] float32 of each part.
        local_out: one [M, D] of each part.
        update_type: 1: the merged lse is wanted too.

    Returns:
        out [M, D], and the merged lse [M]; shape [0] with update_type 0.

    Raises:
        ValueError: a shape, device, the number of parts or `update_type` does not fit.
        TypeError: a type or dtype does not fit.

    >>> import torch, custom
    >>> lse, out = [torch.zeros(4)] * 2, [torch.ones(4, 8)] * 2
    >>> custom.npu_attention_update(lse, out, 1)[1]
    tensor([0.6931, 0.6931, 0.6931, 0.6931])
    """
    if update_type not in (0, 1):
        raise ValueError(
            f"npu_attention_update: `update_type` is {update_type}, expected 1, or 0 for no "
            "merged lse."
        )
    if not lse or len(lse) != len(local_out):
        raise ValueError(
            f"npu_attention_update: `lse` has {len(lse)} parts and `local_out` {len(local_out)}, "
            "expected as many, and at least one."
        )
    c = Checker("npu_attention_update")
    for number, (part, of_it) in enumerate(zip(lse, local_out, strict=True)):
        c.shape(f"lse[{number}]", part, "M")
        c.shape(f"local_out[{number}]", of_it, "M D")
        c.same_dtype(**{"lse[0]": lse[0], f"lse[{number}]": part})
        c.same_dtype(**{"local_out[0]": local_out[0], f"local_out[{number}]": of_it})
        c.same_device(**{"lse[0]": lse[0], f"lse[{number}]": part, f"local_out[{number}]": of_it})
    out, merged = npu_merge_states(torch.stack(local_out), torch.stack(lse))
    return out, merged if update_type else merged.new_empty(0)


@worded
def npu_ring_attention_update(
    prev_attn_out: Tensor,
    prev_softmax_max: Tensor,
    prev_softmax_sum: Tensor,
    cur_attn_out: Tensor,
    cur_softmax_max: Tensor,
    cur_softmax_sum: Tensor,
    *,
    actual_seq_qlen: Tensor | None = None,
    input_layout: str = "SBH",
    input_softmax_layout: str = "",
) -> tuple[Tensor, Tensor, Tensor]:
    """One step of ring attention under torch_npu's schema: `npu_merge_states` of two parts.

    Args:
        prev_attn_out: [S, B, N * D] ("SBH"), or [T, N, D] ("TND").
        prev_softmax_max: [B, N, S, 8] float32, eight times the same; or [T, N, 8].
        prev_softmax_sum: likewise.
        cur_attn_out: as `prev_attn_out`.
        cur_softmax_max: as `prev_softmax_max`.
        cur_softmax_sum: as `prev_softmax_sum`.
        actual_seq_qlen: prefix sums of the requests (TND); tokens are merged one by one, so that
            they are not needed.
        input_layout: "SBH" or "TND".
        input_softmax_layout: "" or that of the statistics with "TND": only "TND".

    Returns:
        The merged output, maximum and sum, shaped as they came.

    Raises:
        ValueError: a shape, device or layout does not fit.
        TypeError: a type or dtype does not fit.

    >>> import torch, custom
    >>> out, top, total = torch.ones(4, 2, 16), torch.zeros(4, 2, 8), torch.ones(4, 2, 8)
    >>> state = custom.npu_ring_attention_update(
    ...     out, top, total, out, top, total, input_layout="TND"
    ... )
    >>> state[2][0, 0, 0]
    tensor(2.)
    """
    if input_layout not in ("SBH", "TND") or input_softmax_layout not in ("", "TND"):
        raise ValueError(
            f"npu_ring_attention_update: `input_layout` is {input_layout!r} and "
            f"`input_softmax_layout` {input_softmax_layout!r}, expected 'SBH' or 'TND', and '' or "
            "'TND'."
        )
    c = Checker("npu_ring_attention_update")
    c.shape("prev_attn_out", prev_attn_out, "S B H" if input_layout == "SBH" else "T N D")
    c.shape("cur_attn_out", cur_attn_out, "S B H" if input_layout == "SBH" else "T N D")
    statistics = dict(
        prev_softmax_max=prev_softmax_max,
        prev_softmax_sum=prev_softmax_sum,
        cur_softmax_max=cur_softmax_max,
        cur_softmax_sum=cur_softmax_sum,
    )
    for name, each in statistics.items():
        c.shape(name, each, "B N S 8" if input_layout == "SBH" else "T N 8")
    if input_layout == "SBH":
        c.require(
            c.sizes["N"] > 0 and c.sizes["H"] % c.sizes["N"] == 0,
            f"`prev_attn_out` has rows of {c.sizes['H']}, expected a multiple of N={c.sizes['N']} "
            "(from `prev_softmax_max`).",
        )
    c.same_dtype(prev_attn_out=prev_attn_out, cur_attn_out=cur_attn_out)
    c.same_dtype(**statistics)
    c.same_device(prev_attn_out=prev_attn_out, cur_attn_out=cur_attn_out, **statistics)
    tops = torch.stack([prev_softmax_max, cur_softmax_max])
    sums = torch.stack([prev_softmax_sum, cur_softmax_sum])
    outs = torch.stack([prev_attn_out, cur_attn_out])
    at, totals = tops[..., 0], sums[..., 0]
    if input_layout == "SBH":
        # [2, B, N, S] beside [2, S, B, N, D]
        outs = outs.unflatten(-1, (at.shape[2], -1))
        at, totals = (x.permute(0, 3, 1, 2) for x in (at, totals))
    out, _ = npu_merge_states(outs, at, totals)
    top = tops.amax(0)
    # of a part that saw nothing both are -inf
    scale = torch.exp(tops - top.masked_fill(top == -torch.inf, 0))
    return out.view(prev_attn_out.shape), top, (sums * scale).sum(0)
