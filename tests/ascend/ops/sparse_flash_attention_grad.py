# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""npu_sparse_flash_attention_grad, on the results of the forward op's reference."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from .. import memory
from ..case import Arguments, Case, Inputs, in_rounds, reference
from ..conditions import pages_apart, with_
from ..controls import Control
from .lightning_indexer_grad import selected

KERNEL = "sparse_flash_attention_grad"
OP = f"npu_{KERNEL}"


def call(
    queries: tuple[int, ...],
    keys: tuple[int, ...],
    heads: int,
    count: int,
    latent: int = 512,
    rope: int = 64,
    lengths: tuple[list[int], list[int]] | None = None,
    kind: torch.dtype = torch.int32,
    sparse_mode: int = 3,
    block: int = 1,
    loud: int | None = None,
    of_sum: bool = False,
) -> Callable[[Inputs], Arguments]:
    """`queries` and `keys` are the leading sizes: [B, S] or [T].  Nobody selects the key `loud`,
    whose logits overflow.  `of_sum`: the sum has a gradient as well."""

    def make(x: Inputs) -> Arguments:
        indices = selected(x, queries, max(keys[-1] // block, 1), count)
        indices.view(-1, count)[0] = -1
        if block > 1:
            indices.view(-1, count)[1, 0] = 0
        layout = "TND" if len(queries) == 1 else "BSND"
        key = x.normal(*keys, 1, latent)
        if loud is not None:
            indices[indices == loud] = -1
            key[..., loud, 0, :] *= 1000.0
        shared = dict(
            query=x.normal(*queries, heads, latent),
            key=key,
            value=None,
            sparse_indices=x.ints(indices, kind),
            scale_value=(latent + rope) ** -0.5,
            sparse_block_size=block,
            query_rope=x.normal(*queries, heads, rope) if rope else None,
            key_rope=x.normal(*keys, 1, rope) if rope else None,
            sparse_mode=sparse_mode,
        )

        def named(*names: str) -> Arguments:
            given = () if lengths is None else zip(names, lengths, strict=True)
            return {name: x.ints(each, kind) for name, each in given}

        forward = named("actual_seq_lengths_query", "actual_seq_lengths_kv")
        attention = dict(layout_query=layout, layout_kv=layout, return_softmax_lse=True)
        out, peak, total = reference(
            "npu_sparse_flash_attention", shared | attention | forward
        ).values()
        return (
            shared
            | named("actual_seq_qlen", "actual_seq_kvlen")
            | dict(
                d_out=x.normal(*out.shape),
                out=memory.guarded(out),
                softmax_max=memory.guarded(peak),
                softmax_sum=memory.guarded(total),
                layout=layout,
            )
            | (dict(d_softmax_sum=x.normal(*total.shape, dtype=total.dtype)) if of_sum else {})
        )

    return make


def without(make: Callable[[Inputs], Arguments]) -> Callable[[Inputs], Arguments]:
    """Ropes of width 0."""

    def none(arguments: Arguments, name: str) -> torch.Tensor:
        return memory.guarded(arguments[name][..., :0].contiguous())

    return with_(make, query_rope=partial(none, name="query"), key_rope=partial(none, name="key"))


def of_wider(arguments: Arguments) -> torch.Tensor:
    """The first heads of twice as many."""
    given = arguments["d_out"]
    return memory.guarded(torch.cat([given, given * 0], -2))[..., : given.shape[-2], :]


CASES = (
    Case(OP, "16 heads", call((2, 3), (2, 100), 16, 70)),
    Case(OP, "128 heads", call((1, 2), (1, 80), 128, 40)),
    Case(OP, "24 heads, no rope, fp16", call((1, 3), (1, 70), 24, 40, 256, 0), torch.float16),
    Case(OP, "lengths", call((3, 3), (3, 90), 16, 30, 64, 32, ([3, 1, 2], [80, 1, 77]))),
    Case(
        OP,
        "lengths, every key",
        call((3, 3), (3, 90), 4, 400, 64, 32, ([3, 1, 2], [80, 1, 77])),
    ),
    Case(
        OP,
        "TND, all keys",
        call((6,), (200,), 8, 60, 128, 32, ([3, 3, 5], [90, 90, 199]), sparse_mode=0),
    ),
    Case(
        OP,
        "TND, all keys, beyond 32 bits",
        call(
            (6,),
            (200,),
            8,
            60,
            128,
            32,
            ([3, 3, 2**40], [90, 90, 2**32 + 95]),
            torch.int64,
            sparse_mode=0,
        ),
    ),
    Case(
        OP,
        "TND, sums of queries beyond the tokens",
        call((6,), (200,), 8, 60, 128, 32, ([-(2**31), 4, 2**31 - 1], [90, 90, 199])),
    ),
    Case(OP, "TND, no request", call((6,), (200,), 8, 60, 128, 32, ([], []))),
    Case(OP, "int64, more queries than keys", call((1, 9), (1, 6), 4, 8, 32, 16, kind=torch.int64)),
    Case(
        OP,
        "batches apart, half of the heads",
        with_(pages_apart(call((2, 3), (2, 70), 4, 30, 64, 16), "key", "key_rope"), d_out=of_wider),
    ),
    Case(OP, "blocks of 4", call((1, 3), (1, 90), 16, 12, 128, 64, block=4)),
    Case(
        OP, "no rotary part, 12 heads, pools", without(call((1, 3), (1, 90), 12, 12, 128, block=4))
    ),
    Case(OP, "a loud key that nobody selects", call((1, 3), (1, 40), 8, 30, 64, 16, loud=7)),
    Case(OP, "of the sum as well", call((1, 5), (1, 40), 24, 30, of_sum=True)),
    Case(OP, "two tokens a round", in_rounds(2 * 4 * 8192, call((1, 8), (1, 140), 16, 60, 64, 16))),
)
CONTROLS = (
    Control(
        "the sum of d_out out forgotten",
        KERNEL,
        "dz = (p * (dp - of_delta[None]) * scale).to(k0.dtype)",
        "dz = (p * dp * scale).to(k0.dtype)",
        "16 heads",
    ),
    Control(
        "the sum's gradient forgotten",
        KERNEL,
        "products -= tl.where(s > 0, of_total * s, 0.0)",
        "pass",
        "of the sum as well",
    ),
    Control(
        "the sum's gradient of a row that sees nothing",
        KERNEL,
        "tl.where(s > 0, of_total * s, 0.0)",
        "of_total / s",
        "of the sum as well",
    ),
    Control(
        "the values' part forgotten",
        KERNEL,
        "acc1 = tl.dot(tl.trans(p), g1, acc1)",
        "pass",
        "16 heads",
    ),
    Control("a key that comes twice counts once", KERNEL, ", 0.0) * times", ", 0.0)", "16 heads"),
    Control(
        "a key that nobody selects overflows",
        KERNEL,
        "tl.where(times > 0, tl.exp(",
        "tl.where(times >= 0, tl.exp(",
        "a loud key that nobody selects",
    ),
    Control(
        "an absent slot counts",
        KERNEL,
        "tl.where(slot >= 0, 0.0",
        "tl.where(slot >= -1, 0.0",
        "16 heads",
    ),
    Control(
        "half of the logits",
        KERNEL,
        "z = tl.dot(q1, tl.trans(k1), z)",
        "pass",
        "24 heads, no rope, fp16",
    ),
    Control(
        "one token too few",
        KERNEL,
        "position - keys + count",
        "position - keys + count + 1",
        "int64, more queries than keys",
    ),
    Control(
        "the last round alone", KERNEL, "total += part", "total.copy_(part)", "two tokens a round"
    ),
)
