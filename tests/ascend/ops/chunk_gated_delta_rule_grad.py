# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""npu_chunk_gated_delta_rule_grad, against the gradient token by token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..alike import NO_SLOPE, first_chunks
from ..case import Arguments, Case, Inputs, in_rounds
from ..controls import Control
from . import chunk_gated_delta_rule as forward

KERNEL = "chunk_gated_delta_rule_grad"
OP = f"npu_{KERNEL}"


def call(
    lengths: list[int],
    *shape: Any,
    final: torch.dtype | None = torch.float32,
    behind: int = 0,
    **options: Any,
) -> Callable[[Inputs], Arguments]:
    """The forward op's arguments, and the gradients of its outputs."""

    def make(x: Inputs) -> Arguments:
        arguments = forward.call(lengths, *shape, behind=behind, **options)(x)
        value, key = arguments["value"], arguments["key"]
        arguments["d_out"] = x.normal(*value.shape)
        if final is not None:
            sizes = len(lengths), *value.shape[1:], key.shape[2]
            arguments["d_final_state"] = x.normal(*sizes, scale=0.25, dtype=final)
        return arguments

    return make


def strong_decay(x: Inputs) -> Arguments:
    """exp(g) is 0 for some tokens, and beta for others."""
    arguments = call([70])(x)
    arguments["g"][1::3] = -2000.0
    arguments["beta"][::5] = 0.0
    return arguments


def beyond(x: Inputs) -> Arguments:
    """A length below 0 and one that ends behind the tensors, d_out one half of wider rows."""
    arguments = call([66, 9, 3])(x)
    arguments["actual_seq_lengths"] = x.ints([66, -70, 2**40 - 2], torch.int64)
    arguments["d_out"] = x.normal(78, 2, 128)[..., 64:]
    return arguments


CASES = tuple(
    Case(OP, name, make, dtype, judge=forward.judge)
    for name, make, dtype in (
        ("two chunks and a part", call([150]), torch.bfloat16),
        ("packed, tokens behind", call([70, 0, 1, 64], behind=3), torch.bfloat16),
        # as many numbers of chunks as memory ends behind
        ("four chunks", call([256], (1, 1), (16, 16)), torch.bfloat16),
        ("one token", call([1], (2, 4)), torch.float16),
        ("no tokens", call([0, 0]), torch.bfloat16),
        (
            "128 x 128, no states",
            call([65], (1, 1), (128, 128), state=None, final=None),
            torch.bfloat16,
        ),
        ("no gates, keys alike", call([80], (1, 1), gates=False, alike=True), torch.bfloat16),
        ("no beta, 64 x 48", call([80], (1, 2), (64, 48), beta=None, final=None), torch.bfloat16),
        ("no g, 48 x 64", call([30], (1, 2), (48, 64), g=None, state=None), torch.bfloat16),
        (
            "fp16, 32 x 96, int64, bf16 states",
            call(
                [20, 66],
                (1, 3),
                (32, 96),
                state=torch.bfloat16,
                final=torch.bfloat16,
                kind=torch.int64,
                strided=True,
            ),
            torch.float16,
        ),
        ("48 x 16, 20 heads, scale given", call([66], (4, 20), (48, 16), scale=0.5), torch.float16),
        ("256 x 256", call([66], (1, 1), (256, 256)), torch.bfloat16),
        (
            "rates to 1, packed",
            call([66, 3], (1, 2), (16, 32), behind=2, **forward.TO_1),
            torch.bfloat16,
        ),
        ("rates to 2", call([66], (1, 1), (16, 16), **forward.TO_2), torch.float16),
        ("decay to nothing", strong_decay, torch.float16),
        ("lengths beyond the tensors, strided d_out", beyond, torch.bfloat16),
        # 0.8 MB a head of two, 0.4 MB of one
        (
            "two heads a round",
            in_rounds(1_600_000, call([70, 3], (3, 6), (16, 16))),
            torch.bfloat16,
        ),
        # places goes over 64 chunks at a time
        ("65 chunks", call([4100], (1, 1), (16, 16)), torch.bfloat16),
        ("a head a round", in_rounds(1, call([70], (2, 2), (16, 16))), torch.float16),
    )
)
CONTROLS = (
    NO_SLOPE,
    Control(
        "a token sees itself in the triangle's gradient",
        KERNEL,
        "later = (row + j)[:, None] > i[None]",
        "later = (row + j)[:, None] >= i[None]",
        "two chunks and a part",
    ),
    Control(
        "the decay between chunks forgotten",
        KERNEL,
        "grad = grad * tl.exp(last) + gain",
        "grad = grad + gain",
        "two chunks and a part",
    ),
    Control(
        "a state's product with its gradient forgotten",
        KERNEL,
        "end = rest + tl.exp(last) * tl.sum(tl.sum(whole, 1), 0)",
        "end = rest",
        "two chunks and a part",
    ),
    Control(
        "the last value head alone",
        KERNEL,
        "dq = tl.dot(tl.load(of_step), state, dq)",
        "dq = tl.dot(tl.load(of_step), state)",
        "two chunks and a part",
    ),
    Control(
        "tokens behind the last sequence left alone",
        KERNEL,
        "if varlen or sequences",
        "if sequences",
        "packed, tokens behind",
    ),
    Control(
        "each round on the first heads",
        KERNEL,
        "here = slice(first, first + at_once)",
        "here = slice(0, at_once)",
        "a head a round",
    ),
    first_chunks(KERNEL),
    Control(
        "a tile that does not fit",
        KERNEL,
        '**_tile("crosses", value_size, key_size)',
        "VALUE_TILE=value_size",
        "256 x 256",
        stage="compile",
    ),
)
