# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""npu_sharedkv_prolog_pto: DeepSeek-V4-Flash's sizes and small uneven ones; tokens that are not
there, whose numbers are NaN, and pages that nobody may touch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from ..case import Arguments, Case, Inputs
from ..conditions import far_apart, pages_apart, with_
from ..controls import Control
from .mla_prolog_pto import row_major, weight

OP = "npu_sharedkv_prolog_pto"


def weights(
    x: Inputs, hidden: int, rank: int, heads: int, size: int, form: str
) -> dict[str, torch.Tensor]:
    return dict(
        w_dq=weight(x, hidden, rank, form),
        w_uq=weight(x, rank, heads * size, form),
        w_kv=weight(x, hidden, size, form),
        gamma_cq=x.normal(rank),
        gamma_kv=x.normal(size),
    )


def prolog(
    lengths: list[int],
    used: list[int] | None,
    steps: int,
    heads: int,
    *,
    hidden: int = 4096,
    rank: int = 1024,
    size: int = 512,
    rotary: int = 64,
    index: tuple[int, int] | None = (64, 128),
    form: str = "nz",
    page: int = 16,
    whole: torch.dtype = torch.int32,
    **options: float,
) -> Callable[[Inputs], Arguments]:
    """`index`: heads of the indexer, and their size."""

    def make(x: Inputs) -> Arguments:
        requests = len(lengths)
        columns = -(-max(lengths) // page) + 1
        pages = requests * columns + 2
        table = x.permutation(pages)[: requests * columns].view(requests, columns)
        there = torch.tensor(used if used is not None else [steps] * requests).clamp(0, steps)
        token = torch.arange(steps)
        position = (torch.tensor(lengths) - there)[:, None] + token
        present = (token < there[:, None]) & (position >= 0)
        written = table.gather(1, (position.clamp(min=0) // page).clamp(max=columns - 1))[present]
        arguments: Arguments = dict(
            token_x=x.normal(requests, steps, hidden),
            **weights(x, hidden, rank, heads, size, form),
            rope_sin=x.normal(requests, steps, rotary),
            rope_cos=x.normal(requests, steps, rotary),
            ori_kv=x.normal(pages, page, 1, size),
            ori_block_table=x.ints(table, whole),
            act_seqs=x.ints(lengths, whole),
            seqused=None if used is None else x.ints(used, whole),
            weight_format="nz" if form == "flat" else form,
        )
        if index is not None:
            arguments["w_idx_qb"] = weight(x, rank, index[0] * index[1], form)
            arguments["w_idx_proj"] = weight(x, hidden, index[0], form)
        for name in ("rope_sin", "rope_cos"):
            arguments[name][..., 1::2] = float("nan")  # entry 2i is pair i's
        for name in ("token_x", "rope_sin", "rope_cos"):
            arguments[name][~present] = float("nan")
        x.forbid(arguments["ori_kv"], sorted(set(range(pages)) - set(written.tolist())))
        return arguments | options

    return make


def without_a_page(arguments: Arguments) -> torch.Tensor:
    """That of the first request's last token; the second one's names what lies behind the last."""
    table, lengths = arguments["ori_block_table"].clone(), arguments["act_seqs"].tolist()
    page = arguments["ori_kv"].shape[1]
    for request, number in ((0, -1), (1, arguments["ori_kv"].shape[0])):
        table[request, (lengths[request] - 1) // page] = number
    return arguments["ori_block_table"].copy_(table)


def no_columns(arguments: Arguments) -> torch.Tensor:
    return arguments["ori_block_table"][:, :0].contiguous()


def tiny(arguments: Arguments) -> torch.Tensor:
    return arguments["token_x"].mul_(1e-3)


case = partial(Case, OP, widen=row_major)
SMALL = dict(hidden=208, rank=176, size=64, rotary=32, index=(16, 48))
CASES = (
    case("model, a shard of 8 heads", prolog([9, 300], [2, 1], 2, 8), cores=(24,)),
    case("model, a shard of 16 heads", prolog([9, 300], [2, 1], 2, 16, hidden=512), cores=(24,)),
    # too deep for L1 beside three weights
    case("a token, Pro's depths", prolog([300], None, 1, 1, hidden=7168, rank=1536), cores=(24,)),
    # the forms of more tokens
    case("32 requests", prolog([40] * 32, [1] * 32, 1, 2, hidden=1024), cores=(24,)),
    case("64 requests of 2", prolog([40] * 64, [2] * 64, 2, 1, hidden=512), cores=(24,)),
    case("64 requests of 2, Flash's depths", prolog([40] * 64, None, 2, 1), cores=(24, 3)),
    case(
        "64 requests of 2, Pro's depths",
        prolog([40] * 64, None, 2, 1, hidden=7168, rank=1536),
        cores=(24,),
    ),
    case("2 of 3 tokens there, uneven", prolog([20, 33, 1], [3, 0, 2], 3, 9, **SMALL)),
    case("before the first position", prolog([1, 5, 0], None, 4, 8, **SMALL)),
    case("no index, fp16", prolog([40], None, 1, 3, **SMALL | dict(index=None)), torch.float16),
    case(
        "all dims turn, int64",
        prolog(
            [40, 17],
            [1, 2],
            2,
            8,
            hidden=64,
            rank=48,
            size=32,
            rotary=32,
            index=(32, 32),
            whole=torch.int64,
        ),
    ),
    case("a chunk of 37", prolog([50, 37], [37, 30], 37, 5, **SMALL), cores=(24, 3)),
    case("page 48", prolog([96, 49], None, 3, 4, page=48, **SMALL)),
    case(
        "pages missing",
        with_(prolog([20, 33], None, 2, 2, **SMALL), ori_block_table=without_a_page),
    ),
    # no length may be taken for a page
    case("no columns", with_(prolog([2, 3], None, 2, 2, **SMALL), ori_block_table=no_columns)),
    case("pages apart", pages_apart(prolog([20, 33], None, 2, 2, **SMALL), "ori_kv")),
    case("pages far apart", far_apart(prolog([20, 33], None, 2, 2, **SMALL), "ori_kv")),
    case("nn.Linear's", prolog([20, 3], None, 1, 2, form="linear", **SMALL)),
    case("NZ bytes under the ND shape", prolog([20, 3], None, 1, 2, form="flat", **SMALL)),
    case(
        "row-major",
        prolog([20, 3], None, 1, 3, form="nd", **SMALL | dict(hidden=200, rank=120, index=(5, 48))),
    ),
    case(
        "tiny rows, a large epsilon",
        with_(prolog([9, 5], None, 2, 3, rms_norm_eps=0.1, **SMALL), token_x=tiny),
    ),
    case(
        "the widest",
        prolog([9], None, 1, 3, hidden=64, rank=2048, size=1024, rotary=128, index=(16, 1024)),
    ),
    case(
        "index heads that turn as a whole",
        prolog([9], None, 1, 2, hidden=64, rank=48, size=128, rotary=128, index=(16, 128)),
    ),
)
CONTROLS = (
    Control(
        "every program has the first part",
        "product",
        "k = part * C.DEPTH",
        "k = part * 0",
        "64 requests of 2, Flash's depths",
    ),
    Control(
        "a tile of panels begins where the one before it did",
        "product",
        "panel = tile * PANELS + i",
        "panel = tile + i",
        "64 requests of 2, Flash's depths",
    ),
    Control(
        "angles of the next row",
        OP[4:],
        "s, c = angles(sin + row.to(tl.int64) * ROTARY, cos + row.to(tl.int64) * ROTARY, ROTARY)\n"
        "        s = tl.where",
        "s, c = angles(sin + (row // 2).to(tl.int64) * ROTARY, "
        "cos + row.to(tl.int64) * ROTARY, ROTARY)\n        s = tl.where",
        "2 of 3 tokens there, uneven",
    ),
    Control(
        "a token behind the used ones",
        "last_rotation",
        "tl.where(j < used,",
        "tl.where(j <= used,",
        "2 of 3 tokens there, uneven",
    ),
    Control(
        "a token before the first position",
        "last_rotation",
        "tl.maximum(position, -1)",
        "tl.maximum(position, 0)",
        "before the first position",
    ),
    Control(
        "used ones beyond the steps",
        "last_rotation",
        "FARTHEST) - used + j",
        "FARTHEST) - steps + j",
        "2 of 3 tokens there, uneven",
    ),
    Control(
        "a page of -1 is written",
        OP[4:],
        "(number >= 0)",
        "(number >= -1)",
        "pages missing",
    ),
    Control(
        "the page past the last is written",
        OP[4:],
        "(number < pages)",
        "(number <= pages)",
        "pages missing",
    ),
    Control(
        "pages side by side",
        OP[4:],
        "number * page_step",
        "number * page * SIZE",
        "pages apart",
    ),
    Control(
        "the rest left out of a row's norm",
        OP[4:],
        "total += tl.sum(rest * rest, 0)",
        "total += 0.0",
        "2 of 3 tokens there, uneven",
    ),
    Control(
        "a gain's halves for its pairs",
        OP[4:],
        "turned(left * scale * g0, right * scale * g1,",
        "turned(left * scale * g1, right * scale * g0,",
        "2 of 3 tokens there, uneven",
    ),
    Control(
        "queries that are not normed",
        OP[4:],
        "INDEX,\n            ROTARY,\n            USED,\n            False,",
        "INDEX,\n            ROTARY,\n            USED,\n            True,",
        "2 of 3 tokens there, uneven",
    ),
    Control(
        "no epsilon under a head",
        OP[4:],
        "SIZE + epsilon)\n                scale",
        "SIZE + 1e-30)\n                scale",
        "tiny rows, a large epsilon",
    ),
    Control(
        "no epsilon under a row",
        OP[4:],
        "SIZE + epsilon)\n        s, c",
        "SIZE + 1e-30)\n        s, c",
        "tiny rows, a large epsilon",
    ),
    Control(
        "no epsilon under a query latent",
        OP[4:],
        "least = tl.where(position >= 0, epsilon,",
        "least = tl.where(position >= 0, 1e-30,",
        "tiny rows, a large epsilon",
    ),
    Control(
        "weights of tokens that are not there",
        OP[4:],
        "there = tl.where(position >= 0, HEADS, 0)",
        "there = tl.where(position >= -1, HEADS, 0)",
        "2 of 3 tokens there, uneven",
    ),
    Control(
        "angles of tokens that are not there",
        OP[4:],
        "c = tl.where(position >= 0, c, 0.0)",
        "c = c * 1.0",
        "2 of 3 tokens there, uneven",
    ),
)
