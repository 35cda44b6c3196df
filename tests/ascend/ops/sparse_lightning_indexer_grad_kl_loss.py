# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""npu_sparse_lightning_indexer_grad_kl_loss, on the statistics of the attention's reference."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch

from .. import memory
from ..case import Arguments, Case, Finding, Inputs, in_rounds, judge, reference
from ..conditions import with_
from ..controls import Control
from .lightning_indexer_grad import selected

KERNEL = "sparse_lightning_indexer_grad_kl_loss"
OP = f"npu_{KERNEL}"


def call(
    queries: tuple[int, ...],
    keys: tuple[int, ...],
    heads: int,
    count: int,
    size: int = 128,
    rope: int = 0,
    index: tuple[int, int] = (16, 128),
    lengths: tuple[list[int], list[int]] | None = None,
    kind: torch.dtype = torch.int32,
    weights: torch.dtype = torch.bfloat16,
    sinks: bool = False,
    sparse_mode: int = 3,
) -> Callable[[Inputs], Arguments]:
    """`queries` and `keys` are the leading sizes: [B, S] or [T]."""

    def make(x: Inputs) -> Arguments:
        indices = selected(x, queries, keys[-1], count)
        indices.view(-1, count)[0] = -1
        layout = "TND" if len(queries) == 1 else "BSND"
        shared = dict(
            query=x.normal(*queries, heads, size),
            key=x.normal(*keys, 1, size),
            sparse_indices=x.ints(indices, kind),
            scale_value=(size + rope) ** -0.5,
            query_rope=x.normal(*queries, heads, rope) if rope else None,
            key_rope=x.normal(*keys, 1, rope) if rope else None,
            sparse_mode=sparse_mode,
            sinks=x.normal(heads, dtype=torch.float32) if sinks else None,
        )
        names = ("actual_seq_lengths_query", "actual_seq_lengths_kv")
        given = () if lengths is None else zip(names, map(torch.tensor, lengths), strict=True)
        attention = dict(value=None, layout_query=layout, layout_kv=layout, return_softmax_lse=True)
        statistics = reference("npu_sparse_flash_attention", shared | attention | dict(given))
        ni, di = index
        return shared | dict(
            query_index=x.normal(*queries, ni, di),
            key_index=x.normal(*keys, 1, di, scale=di**-0.5),
            weights=x.normal(*queries, ni, scale=ni**-0.5, dtype=weights),
            softmax_max=memory.guarded(statistics["output 1"]),
            softmax_sum=memory.guarded(statistics["output 2"]),
            actual_seq_qlen=None if lengths is None else lengths[0],
            actual_seq_klen=None if lengths is None else lengths[1],
            layout=layout,
        )

    return make


def of_none(arguments: Arguments) -> torch.Tensor:
    return arguments["sparse_indices"][..., :0]


def below_all(make: Callable[[Inputs], Arguments]) -> Callable[[Inputs], Arguments]:
    """The last token alone sees the last key, which is -inf where all queries are above 0: its
    score is 0 over the heads that are there, and NaN over zeros."""

    def drawn(x: Inputs) -> Arguments:
        arguments = make(x)
        arguments["query_index"][..., 0].abs_()
        arguments["key_index"][0, -1, :, 0] = -torch.inf
        arguments["sparse_indices"][0, -1, :, 0] = arguments["key_index"].shape[1] - 1
        return arguments

    return drawn


def judge_all(case: Case, got: Arguments, exact: Arguments, rounded: Arguments) -> list[Finding]:
    """The loss is one number: the reference may hit it by chance, which leaves no bound.  But each
    row adds pi (log pi - log r) with sum pi = 1, and a log of 1 / keys rounds by eps log(keys)."""
    others = {name: value for name, value in got.items() if name != "output 3"}
    rows, keys = got["output 2"][..., 0].numel(), got["output 1"].shape[-3]
    bound = 2 * rows * torch.finfo(torch.float32).eps * math.log(keys)
    error = (got["output 3"].double() - exact["output 3"]).abs().item()
    found = judge(case, others, exact, rounded)
    return [*found, (error / bound, f"loss: error {error:.1e} of {bound:.1e}")]


case = partial(Case, OP, judge=judge_all)
CASES = (
    case("16 heads", call((2, 3), (2, 200), 16, 150)),
    case("128 heads of 512 and 64", call((1, 2), (1, 300), 128, 140, 512, 64, (64, 128))),
    case("24 heads of 576, 1500 slots", call((1, 2), (1, 1600), 24, 1500, 576, 0, (64, 128))),
    case("24 heads of 128 and 64", call((1, 2), (1, 100), 24, 60, rope=64)),
    case("128 slots", call((1, 2), (1, 200), 16, 128)),
    case("an infinite key of the index", below_all(call((1, 2), (1, 60), 16, 8, index=(24, 64)))),
    case("no slot", with_(call((1, 2), (1, 40), 16, 8), sparse_indices=of_none)),
    case(
        "lengths, sinks",
        call((3, 3), (3, 90), 16, 70, rope=64, lengths=([3, 1, 2], [80, 1, 77]), sinks=True),
    ),
    case(
        "TND, all keys",
        call((6,), (200,), 8, 60, index=(4, 32), sparse_mode=0, lengths=([3, 3, 5], [90, 90, 199])),
    ),
    case("TND, no request", call((6,), (200,), 8, 60, index=(4, 32), lengths=([], []))),
    case(
        "fp16, float32 weights",
        call((1, 3), (1, 100), 16, 40, 64, index=(24, 64), weights=torch.float32),
        torch.float16,
    ),
    case("int64, more queries than keys", call((1, 9), (1, 6), 4, 8, 32, kind=torch.int64)),
    case(
        "two tokens a round", in_rounds(2 * 128 * (128 + 128) * 2, call((1, 5), (1, 140), 16, 60))
    ),
)
CONTROLS = (
    Control(
        "relu forgotten",
        KERNEL,
        "tl.maximum(tl.dot(q, tl.trans(k)), 0.0, propagate_nan=tl.PropagateNan.ALL)",
        "tl.dot(q, tl.trans(k))",
        "16 heads",
    ),
    Control("the sign of the gradient", KERNEL, "r - p, 0.0)", "p - r, 0.0)", "16 heads"),
    Control(
        "heads behind the last one",
        KERNEL,
        "tl.where(there, tl.exp(z * scale - sums[:, None]), 0.0)",
        "tl.exp(z * scale - sums[:, None])",
        "24 heads of 576, 1500 slots",
    ),
    Control(
        "sinks forgotten", KERNEL, "total + torch.exp(", "total + 0 * torch.exp(", "lengths, sinks"
    ),
    Control(
        "the first tokens' scores in every round",
        KERNEL,
        "tl.store(score + token * wide",
        "tl.store(score + row.to(tl.int64) * wide",
        "two tokens a round",
    ),
)
