# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""npu_indexer_loss: selections that are short, empty, out of sight, out of range or doubled."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from ..case import Arguments, Case, Finding, Inputs, in_rounds, judge_floats
from ..conditions import with_
from ..controls import Control

KERNEL = "indexer_loss"
OP = f"npu_{KERNEL}"


def selected(x: Inputs, batch: int, rows: int, keys: int, count: int) -> torch.Tensor:
    """Any key, so that late ones are out of sight; the last rows few and none."""
    drawn = torch.randint(0, keys, (batch, rows, count), generator=x.random)
    drawn[0, -1, 3:] = -1
    drawn[-1, 0] = -1
    drawn[0, 1, 5:8] = torch.tensor([keys + 7, 2**31 - 1, -(2**31)])
    return drawn


def call(
    heads: int = 16,
    size: int = 128,
    rope: int = 0,
    count: int = 200,
    rows: int = 3,
    keys: int = 300,
    batch: int = 2,
    scores: torch.dtype = torch.float32,
    kind: torch.dtype = torch.int32,
    lse: bool = False,
    **options: float,
) -> Callable[[Inputs], Arguments]:
    def make(x: Inputs) -> Arguments:
        arguments = dict(
            query=x.normal(batch, heads, rows, size),
            key=x.normal(batch, keys, size),
            index_score=x.normal(batch, rows, count, dtype=scores),
            indices=x.ints(selected(x, batch, rows, keys, count), kind),
            scaling=(size + rope) ** -0.5,
            chunk_offset=keys - rows - 40,
        )
        if rope:
            arguments["query_rope"] = x.normal(batch, heads, rows, rope)
            arguments["key_rope"] = x.normal(batch, keys, rope)
        if lse:
            arguments["softmax_lse"] = x.normal(batch, heads, rows, dtype=torch.float32).add_(6.0)
        return arguments | options

    return make


def judge(case: Case, got: Arguments, exact: Arguments, rounded: Arguments) -> list[Finding]:
    """A row's loss sums pi (log pi - log r) over its slots, and rounds both logs: of a few rows the
    reference may hit every one by chance."""
    loss, target = (f"output {i}" for i in range(2))
    pi = exact[target] / exact[target].sum(-1, keepdim=True)
    terms = torch.special.entr(pi).nan_to_num(0.0).norm(dim=-1)
    beyond = {loss: 2 * torch.finfo(torch.float32).eps * terms.max().item()}
    return [
        judge_floats(name, value, exact[name], rounded[name], beyond.get(name, 0.0))
        for name, value in got.items()
    ]


def beside_the_last(keys: int = 300) -> Callable[[Arguments], torch.Tensor]:
    """Where every key is past, the index after the last key's."""

    def made(arguments: Arguments) -> torch.Tensor:
        indices = arguments["indices"]
        indices[:, :, 1::7] = keys
        return indices

    return made


def one_in_the_last_tile(arguments: Arguments) -> torch.Tensor:
    indices = arguments["indices"]
    indices[..., 0], indices[..., -1] = 0, 1
    return indices


def of_nothing(arguments: Arguments) -> torch.Tensor:
    """One head of one row has the log-sum-exp of no key."""
    sums = arguments["softmax_lse"]
    sums[0, 1, 0] = -torch.inf
    return sums


case = partial(Case, OP, judge=judge)
CASES = (
    case("16 heads", call()),
    case("several rounds", in_rounds(2 * 256 * 128 * 2, call())),
    case(
        "the index after the last key's, every key is past",
        with_(call(chunk_offset=305), indices=beside_the_last()),
    ),
    case("one slot in the last tile", with_(call(count=129), indices=one_in_the_last_tile)),
    case(
        "scores far apart, eps 0.01",
        with_(call(eps=0.01), index_score=lambda x: x["index_score"].mul_(60.0)),
    ),
    case("targets far apart", call(scaling=6.0)),
    case("24 heads, bf16 scores, int64", call(24, scores=torch.bfloat16, kind=torch.int64)),
    case("128 heads of 512 and 64, 256 slots", call(128, 512, 64, 256, 2)),
    case("64 heads of 576, 1500 slots", call(64, 576, 0, 1500, 2, 1800, 1)),
    case("24 heads of 64 and 16", call(24, 64, 16, 40, 2, 60, 1)),
    case("144 heads of 64", call(144, 64, 0, 40, 2, 60, 1)),
    case("8 heads, 12 slots, fp16", call(8, 64, count=12), torch.float16),
    case("log-sum-exp given", call(lse=True)),
    case(
        "log-sum-exp given, so high that no target is left",
        with_(call(lse=True), softmax_lse=lambda x: x["softmax_lse"].add_(800.0)),
    ),
    case(
        "log-sum-exp given, of nothing",
        with_(call(lse=True), softmax_lse=of_nothing),
    ),
    case("every key is past", call(chunk_offset=2**31 - 2)),
)
CONTROLS = (
    Control(
        "the last tile of heads alone",
        KERNEL,
        "(work % tiles).to(tl.int64) * tokens + token",
        "token",
        "144 heads of 64",
    ),
    Control(
        "another round's token",
        KERNEL,
        "token = (first + row).to(tl.int64)",
        "token = row.to(tl.int64)",
        "several rounds",
    ),
    Control(
        "another round's log-sum-exp",
        KERNEL,
        "lse + (first + row).to(tl.int64) * lse_row",
        "lse + row.to(tl.int64) * lse_row",
        "several rounds",
    ),
    Control(
        "the key after the last is gathered",
        KERNEL,
        "last = tl.minimum(offset + i, keys - 1)\n        at = indices",
        "last = tl.minimum(offset + i, keys)\n        at = indices",
        "the index after the last key's, every key is past",
    ),
    Control(
        "the first row of the next copy as the second",
        KERNEL,
        "get_element(position, (n + 1,))",
        "get_element(position, ((n + 2) % ROWS,))",
        "16 heads",
    ),
    Control(
        "the index after the last key's counts",
        KERNEL,
        "tl.minimum(offset + token % length, keys - 1)",
        "tl.minimum(offset + token % length, keys)",
        "the index after the last key's, every key is past",
    ),
    Control(
        "the last tile forgotten where it has one slot",
        KERNEL,
        "tl.float32)\n        for start in range(0, count, KEY_TILE)",
        "tl.float32)\n        for start in range(0, count - 1, KEY_TILE)",
        "one slot in the last tile",
    ),
    Control(
        "eps beside the target forgotten",
        KERNEL,
        "terms = (p + eps) * (",
        "terms = p * (",
        "scores far apart, eps 0.01",
    ),
    Control(
        "a score that overflows",
        KERNEL,
        "p = tl.exp(z - new_max[:, None])",
        "p = tl.exp(z - tl.minimum(new_max, 40.0)[:, None])",
        "targets far apart",
    ),
    Control(
        "future keys count",
        KERNEL,
        "tl.where(x <= last.to(tl.float32), 1.0, 0.0)",
        "1.0",
        "16 heads",
    ),
    Control(
        "a row's position wraps",
        KERNEL,
        "min(chunk_offset, keys)",
        "chunk_offset",
        "every key is past",
    ),
    Control(
        "heads behind the last one",
        KERNEL,
        "tl.where(there, tl.exp(z * scale - sums[:, None]), 0.0)",
        "tl.exp(z * scale - sums[:, None])",
        "24 heads, bf16 scores, int64",
    ),
    Control(
        "no target divides itself",
        KERNEL,
        "target / tl.where(total > 0, total, 1.0)",
        "target / total",
        "log-sum-exp given, so high that no target is left",
    ),
    Control(
        "the target is not normalised",
        KERNEL,
        "target / tl.where(total > 0, total, 1.0)",
        "target",
        "16 heads",
    ),
)
