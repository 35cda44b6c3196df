# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Rows for blocks and attention to them: 16 of 128 a head of keys (MiniMax-M3), 512 of 4 and the
open one, which both heads of keys share (Qwen4-Exp)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from . import peers
from .case import Arguments, Case, Draw, Outputs
from .sparse_attention import BF16

INT, FLOAT, PAGE = 4, 4, 128  # bytes, and rows
ATTENTION, INDEXER = "npu_sparse_attention_score", "npu_block_indexer"


@dataclass(frozen=True)
class Model:
    """`own`: each head of keys has blocks of its own."""

    name: str
    heads: int
    shared: int
    size: int
    block: int
    chosen: int
    own: bool

    @property
    def keys(self) -> int:
        """That a token sees; the last block but one is its open one."""
        return self.chosen * self.block


M3 = Model("MiniMax-M3", 64, 4, 128, 128, 16, True)
QSA = Model("Qwen4-Exp", 24, 2, 256, 4, 513, False)
SMALL = Model("small", 8, 2, 64, 16, 4, True)


def attention(model: Model, b: int, s: int, context: int) -> Case:
    """Requests share no page."""
    pages = -(-context // PAGE)

    def make(draw: Draw) -> Arguments:
        index_heads = model.shared if model.own else 1
        cache = draw.normal(b * pages, 2, PAGE, model.shared, model.size)
        # of the blocks that every token of the request sees whole
        index = draw.chosen(index_heads * b * s, model.chosen, (context - s + 1) // model.block)
        return dict(
            query=draw.normal(b * s, model.heads, model.size),
            key=cache[:, 0],
            value=cache[:, 1],
            select_idx=index.view(index_heads, b * s, model.chosen),
            block_table=draw.table(b, pages),
            actual_seq_lengths=draw.full(b, value=s),
            actual_seq_lengths_kv=draw.full(b, value=context),
            num_key_value_heads=model.shared,
            scale_value=model.size**-0.5,
            block_size=model.block,
            top_k=model.chosen,
        )

    def part(arguments: Arguments) -> tuple[Arguments, Callable[[Outputs], Outputs]]:
        piece, at = _part(arguments, b, s, ("query",), ("select_idx",))
        return piece, lambda outputs: [out[at] if out.numel() else out for out in outputs]

    # a key is read once by all tokens of a request
    held = b * min(s * model.keys, context)
    row = BF16 * model.size
    own = model.shared if model.own else 1
    return Case(
        ATTENTION,
        f"{model.name}, {b} x {s} queries, {_length(context)} tokens",
        make,
        part,
        bytes=float(
            2 * held * model.shared * row
            + 2 * b * s * model.heads * row
            + INT * own * b * s * model.chosen
        ),
        flops=4.0 * b * s * model.heads * model.keys * model.size,
        shape=dict(b=b, s=s, n=model.heads, context=context, m=model.block),
        peers={"vLLM": peers.vllm_blocks, "SGLang": peers.sglang_blocks}
        if model.own
        else {"vLLM": peers.vllm_pools},
        reference=False,
    )


def indexer(model: Model, b: int, s: int, context: int, values: bool = False) -> Case:
    """As many heads as there are of keys in the attention, on one of keys; with `values` or, as its
    peer, without."""
    pages = -(-context // PAGE)

    def make(draw: Draw) -> Arguments:
        return dict(
            query=draw.normal(b * s, model.shared, model.size),
            key=draw.normal(b * pages, PAGE, 1, model.size),
            block_table=draw.table(b, pages),
            actual_seq_lengths=draw.full(b, value=s),
            actual_seq_lengths_key=draw.full(b, value=context),
            block_size=model.block,
            top_k=model.chosen,
            return_value=values,
        )

    def part(arguments: Arguments) -> tuple[Arguments, Callable[[Outputs], Outputs]]:
        piece, at = _part(arguments, b, s, ("query",), ())
        return piece, lambda outputs: [out[:, at] if out.numel() else out for out in outputs]

    rows = b * s * model.shared
    return Case(
        INDEXER,
        f"{model.name}, {b} x {s} queries, {_length(context)} tokens"
        + ("" if values else ", no values"),
        make,
        part,
        bytes=float(
            b * context * BF16 * model.size
            + rows * (BF16 * model.size + (INT + FLOAT * values) * model.chosen)
        ),
        flops=2.0 * rows * context * model.size,
        shape=dict(b=b, s=s, n=model.shared, context=context, m=model.block),
        peers={} if values else {"vLLM": peers.vllm_block_indexer},
        reference=False,
        ordered=False,
    )


def _length(context: int) -> str:
    return f"{context // 1024}K" if context >= 1024 else str(context)


def _part(
    arguments: Arguments, b: int, s: int, by_token: tuple[str, ...], by_head: tuple[str, ...]
) -> tuple[Arguments, Tensor]:
    """The last tokens, to eight, of the first requests, to two; and which they are."""
    kept, last = min(b, 2), min(s, 8)
    at = (torch.arange(kept)[:, None] * s + torch.arange(s - last, s)).flatten()
    at = at.to(arguments["query"].device)
    of_lengths = [n for n in arguments if n.startswith("actual_seq_lengths")]
    piece = arguments | {n: arguments[n][:kept] for n in ("block_table", *of_lengths)}
    piece |= {n: arguments[n][at] for n in by_token}
    piece |= {n: arguments[n][:, at].contiguous() for n in by_head}
    return piece | dict(actual_seq_lengths=torch.full_like(piece["actual_seq_lengths"], last)), at


def _attention(small: bool) -> list[Case]:
    if small:
        return [attention(SMALL, 2, 2, 512)]
    decode = [attention(model, b, 1, 65536) for model in (M3, QSA) for b in (1, 32, 128)]
    return [*decode, *(attention(model, 1, 4096, 65536) for model in (M3, QSA))]


def _indexer(small: bool) -> list[Case]:
    if small:
        return [indexer(SMALL, 2, 2, 512, values=True)]
    sizes = ((1, 1), (32, 1), (128, 1), (1, 4096))
    return [
        *(indexer(M3, b, s, 65536) for b, s in sizes),
        indexer(M3, 128, 1, 65536, values=True),
    ]


PRESETS: dict[str, Callable[[bool], list[Case]]] = {ATTENTION: _attention, INDEXER: _indexer}
