# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Arguments of npu_latent_cache_write: latents and rotary keys into rows of 8 bits, which it
returns nothing beside.

    ckv [T, 512]   k_rope [T, 64]   rows [pages, P, 1, 656]   slots [T]   k_nope_clip_alpha [1]
    ckv [T, 512]   k_rope [T, 0]    rows [pages, P, 1, 528]   slots [T]   with rope_head_dim 0
    ckv [T, 448]   k_rope [T, 64]   rows [pages, P, 1, 584]   slots [T]   with row_layout "v4"
"""

from __future__ import annotations

from typing import Any, TypedDict

import torch
from torch import Tensor

from ...check import Checker
from ...common import quantized
from ..common import prologs, quantization

SCHEMA = (
    "npu_latent_cache_write(Tensor ckv, Tensor k_rope, Tensor(a!) rows, Tensor slots, *,"
    ' str kind, str row_layout, str scale_format="ue8m0", Tensor? k_nope_clip_alpha=None,'
    " SymInt rope_head_dim=64) -> ()"
)


class Arguments(TypedDict):
    ckv: Tensor
    k_rope: Tensor
    rows: Tensor
    slots: Tensor
    kind: str
    row_layout: str
    scale_format: str
    k_nope_clip_alpha: Tensor | None
    rope_head_dim: int


def check(c: Checker, x: Arguments) -> None:
    ckv, k_rope, rows, slots, kind = x["ckv"], x["k_rope"], x["rows"], x["slots"], x["kind"]
    row_layout, rotary = x["row_layout"], x["rope_head_dim"]
    alpha = x["k_nope_clip_alpha"]
    c.same_device(ckv=ckv, k_rope=k_rope, rows=rows, slots=slots, k_nope_clip_alpha=alpha)
    quantization.kind(c, kind, x["scale_format"])
    c.one_of(
        "row_layout",
        row_layout,
        quantized.NOPE_ROPE_SCALE,
        quantized.NOPE_SCALE_ROPE,
        quantized.V4,
    )
    c.floating("ckv", ckv)
    c.integer("slots", slots)
    if row_layout == quantized.V4:
        _only_v4(c, kind, x["scale_format"], alpha, rotary)
        c.dtype("k_rope", k_rope, torch.bfloat16)
        c.shape("ckv", ckv, f"T {quantized.V4_VALUES}")
    else:
        c.dtype("k_rope", k_rope, torch.bfloat16, torch.float16)
        c.dtype("rows", rows, torch.uint8, quantized.VALUES[kind])
        c.shape("ckv", ckv, f"T {quantized.LATENT}")
        quantization.rope_head_dim(c, rotary)
    c.shape("k_rope", k_rope, f"T {rotary}")
    c.shape("slots", slots, "T")
    if row_layout == quantized.V4:
        quantization.v4_rows(c, "rows", rows)
    else:
        c.shape("rows", rows, f"pages P 1 {quantized.row_bytes(rotary)}")
        quantization.page_size(c)
        quantization.rows(c, "rows", rows, row_layout)
    quantization.whole_pages(c, rows=rows)
    c.dense_rows(ckv=ckv, k_rope=k_rope)
    c.contiguous(slots=slots)
    quantization.clip(c, alpha)
    prologs.distinct_slots(c, slots, "slots")


def _only_v4(c: Checker, kind: str, scale_format: str, alpha: Tensor | None, rotary: int) -> None:
    for name, value, only in (
        ("kind", kind, "fp8"),
        ("scale_format", scale_format, "ue8m0"),
        ("rope_head_dim", rotary, quantized.ROTARY),
    ):
        c.require(
            value == only,
            f"`{name}` is {value!r}, expected {only!r}: rows of row_layout 'v4' have no other.",
        )
    c.require(
        alpha is None,
        "`k_nope_clip_alpha` is given, expected None: rows of row_layout 'v4' clip nothing.",
    )


def fake(**_: Any) -> None:
    return None
