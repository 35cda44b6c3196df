# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Planted mistakes of kernels that are alike, or of what they share."""

from __future__ import annotations

from .controls import Control

MANY_REQUESTS = Control(
    "128 requests at most",
    "ragged",
    "for start in range(0, requests, 128)",
    "for start in range(0, 1, 128)",
    "TND, 133 requests, paged",
)
RATES_TO_2 = Control(
    "rates to 2 end at 1",
    "rates",
    "(BETA - 1.0) / (1.0 + tl.exp(-rate))",
    "1.0 / (1.0 + tl.exp(-rate))",
    "rates to 2",
)
NO_SLOPE = Control(
    "the sigmoid's slope forgotten",
    "rates",
    "grad * rate * (1.0 - rate / (BETA - 1.0))",
    "grad * 1.0",
    "rates to 1, packed",
)


def first_chunks(kernel: str) -> Control:
    return Control(
        "the first 64 chunks of a sequence alone",
        kernel,
        "range(0, chunks, CHUNK)",
        "range(0, tl.minimum(chunks, CHUNK), CHUNK)",
        "65 chunks",
    )


def tail_left_alone(kernel: str) -> Control:
    return Control(
        "the tail left alone",
        kernel,
        "tl.where(alone, start + size, of.tokens)",
        "tl.where(alone, of.tokens, of.tokens)",
        "packed",
    )


def padding_is_a_slot(kernel: str) -> Control:
    return Control(
        "the padding's slot is one",
        kernel,
        " & (slot != pad_slot)",
        "",
        "a slot that stands for none",
    )
