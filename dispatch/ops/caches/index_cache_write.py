# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Arguments of npu_index_cache_write: index keys into a cache of 8 bits, which it returns nothing
beside.

    k [T, 128]   values [pages, P, 1, 128]   scales [pages, P, 1]   slots [T]
"""

from __future__ import annotations

from typing import Any, TypedDict

from torch import Tensor

from ...check import Checker
from ...common import quantized
from ..common import prologs, quantization

SCHEMA = (
    "npu_index_cache_write(Tensor k, Tensor(a!) values, Tensor(b!) scales, Tensor slots, *,"
    ' str kind, str scale_format="ue8m0", bool index_hadamard=False,'
    ' str hadamard_round="bf16") -> ()'
)


class Arguments(TypedDict):
    k: Tensor
    values: Tensor
    scales: Tensor
    slots: Tensor
    kind: str
    scale_format: str
    index_hadamard: bool
    hadamard_round: str


def check(c: Checker, x: Arguments) -> None:
    k, values, scales, slots, kind = x["k"], x["values"], x["scales"], x["slots"], x["kind"]
    c.same_device(k=k, values=values, scales=scales, slots=slots)
    quantization.kind(c, kind, x["scale_format"])
    c.one_of("hadamard_round", x["hadamard_round"], "bf16", "fp32")
    c.floating("k", k)
    c.integer("slots", slots)
    c.dtype("values", values, quantized.VALUES[kind])
    c.dtype("scales", scales, *quantization.SCALES[kind])
    c.shape("k", k, f"T {quantized.INDEX}")
    c.shape("values", values, f"pages P 1 {quantized.INDEX}")
    c.shape("scales", scales, "pages P 1")
    c.shape("slots", slots, "T")
    quantization.page_size(c)
    c.dense_rows(k=k)
    c.contiguous(slots=slots)
    quantization.whole_pages(c, values=values, scales=scales)
    prologs.distinct_slots(c, slots, "slots")


def fake(**_: Any) -> None:
    return None
