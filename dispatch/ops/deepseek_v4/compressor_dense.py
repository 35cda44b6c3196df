# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Arguments, output and autograd of npu_compressor_dense, the compressor without caches: every
request begins at position 0.  Windows as in common/compressed.py.

    x [B, S, H] or [T, H]   wkv, wgate [coff*D, H]   ape [m, coff*D]   norm_weight [D]
    out, and rows of rope_sin and rope_cos: [B, ceil(S / m), ..] or [min(T, T // m + B), ..]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

import torch
from torch import Tensor

from ...check import Checker
from ...common import compressed
from ...common.compressed import HALVES, PAIRS
from ..common import gradients, layouts

ARGUMENTS = (
    "Tensor x, Tensor wkv, Tensor wgate, Tensor ape, Tensor norm_weight, Tensor rope_sin,"
    " Tensor rope_cos, SymInt rope_head_dim, SymInt cmp_ratio, *, Tensor? cu_seqlens=None,"
    " Tensor? seqused=None, SymInt coff=1, float norm_eps=1e-6, SymInt rotary_mode=1,"
    " bool hadamard=False"
)
SCHEMA = f"npu_compressor_dense({ARGUMENTS}) -> Tensor"


class Common(TypedDict):
    """What the compressor with caches takes, too."""

    x: Tensor
    wkv: Tensor
    rope_head_dim: int
    cmp_ratio: int
    cu_seqlens: Tensor | None
    seqused: Tensor | None
    coff: int
    norm_eps: float
    rotary_mode: int
    hadamard: bool


class Arguments(Common):
    wgate: Tensor
    ape: Tensor
    norm_weight: Tensor
    rope_sin: Tensor
    rope_cos: Tensor


def check(c: Checker, a: Mapping[str, Any]) -> None:
    """What the op, its gradient and the one with caches ask of the arguments that they share; of
    the latter gate, norm and rotation may be None."""
    x, wkv, wgate, ape, norm_weight = a["x"], a["wkv"], a["wgate"], a["ape"], a["norm_weight"]
    rope_sin, rope_cos, cmp_ratio = a["rope_sin"], a["rope_cos"], a["cmp_ratio"]
    cu_seqlens, seqused = a["cu_seqlens"], a["seqused"]
    together(c, wgate=wgate, ape=ape)
    together(c, rope_sin=rope_sin, rope_cos=rope_cos)
    c.same_device(
        x=x,
        wkv=wkv,
        wgate=wgate,
        ape=ape,
        norm_weight=norm_weight,
        rope_sin=rope_sin,
        rope_cos=rope_cos,
        cu_seqlens=cu_seqlens,
        seqused=seqused,
    )
    c.floating("x", x)
    c.same_dtype(x=x, wkv=wkv, wgate=wgate)
    wide = of_state(x)
    for name, given in (("ape", ape), ("norm_weight", norm_weight)):
        if given is not None:
            c.dtype(name, given, wide)
    if rope_sin is not None:
        c.floating("rope_sin", rope_sin)
        c.same_dtype(rope_sin=rope_sin, rope_cos=rope_cos)
    c.count("cmp_ratio", cmp_ratio)
    c.one_of("coff", a["coff"], 1, 2)
    c.one_of("rotary_mode", a["rotary_mode"], HALVES, PAIRS)
    c.at_least("norm_eps", a["norm_eps"], 0)
    tokens = "B S" if cu_seqlens is None else "T"
    c.shape("x", x, f"{tokens} H")
    if cu_seqlens is not None:
        c.integers("cu_seqlens", cu_seqlens, "B+1")
        c.require(
            cu_seqlens.shape[0] > 0,
            "`cu_seqlens` has no numbers, expected [B + 1], the first of them 0.",
        )
        c.sizes["B"] = cu_seqlens.shape[0] - 1
        c.contiguous(cu_seqlens=cu_seqlens)
        layouts.values(c, "cu_seqlens", cu_seqlens, "TND", c.sizes["T"])
    if norm_weight is None:
        c.shape("wkv", wkv, "coff*D H")
        c.sizes["D"] = compressed.channels(wkv, a["coff"])
    else:
        c.shape("norm_weight", norm_weight, "D")
    c.sizes["coff*D"] = a["coff"] * c.sizes["D"]
    c.sizes["m"] = cmp_ratio
    c.shape("wkv", wkv, "coff*D H")
    if wgate is not None:
        c.shape("wgate", wgate, "coff*D H")
        c.shape("ape", ape, "m coff*D")
    if seqused is not None:
        c.integers("seqused", seqused, "B")
        c.contiguous(seqused=seqused)
        layouts.values(c, "seqused", seqused, "BSND", c.sizes["S" if cu_seqlens is None else "T"])
    _rotation(c, x, cu_seqlens, rope_sin, rope_cos, a["rope_head_dim"], cmp_ratio)
    size = c.sizes["D"]
    c.require(
        not a["hadamard"] or (size > 0 and size & (size - 1) == 0),
        f"`hadamard` is True and D is {size}, expected a power of two.",
    )
    c.dense_rows(x=x, wkv=wkv, wgate=wgate, rope_sin=rope_sin, rope_cos=rope_cos)
    c.contiguous(ape=ape, norm_weight=norm_weight)


def together(c: Checker, **pair: Tensor | None) -> None:
    missing = [name for name, given in pair.items() if given is None]
    if len(missing) == 1:
        (other,) = pair.keys() - {*missing}
        c.fail(f"`{other}` is given and `{missing[0]}` is None, expected both or neither.")


def of_state(x: Tensor) -> torch.dtype:
    """What states, `ape` and norms are kept in beside x."""
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def _rotation(
    c: Checker,
    x: Tensor,
    cu_seqlens: Tensor | None,
    rope_sin: Tensor | None,
    rope_cos: Tensor | None,
    rope_head_dim: int,
    cmp_ratio: int,
) -> None:
    size = c.sizes["D"]
    if rope_sin is None or rope_cos is None:
        c.require(
            rope_head_dim == 0,
            f"`rope_head_dim` is {rope_head_dim} and `rope_sin` is None, expected 0 for entries "
            "that are not rotated.",
        )
        return
    c.require(
        rope_head_dim % 2 == 0 and 0 <= rope_head_dim <= size,
        f"`rope_head_dim` is {rope_head_dim}, expected an even number from 0 to D={size}.",
    )
    for letter, rows in zip(("B", "C"), compressed.rows(x, cu_seqlens, cmp_ratio), strict=False):
        c.sizes[letter if cu_seqlens is None else "E"] = rows
    c.sizes["dr"] = rope_head_dim
    if rope_sin.ndim and rope_sin.shape[-1] == rope_head_dim // 2:
        c.sizes["dr"] = rope_head_dim // 2
    for name, angles in (("rope_sin", rope_sin), ("rope_cos", rope_cos)):
        c.shape(name, angles, "B C dr" if cu_seqlens is None else "E dr")


def fake(
    x: Tensor, norm_weight: Tensor, cmp_ratio: int, cu_seqlens: Tensor | None, **_: Any
) -> Tensor:
    return x.new_empty([*compressed.rows(x, cu_seqlens, cmp_ratio), norm_weight.shape[0]])


_LEARNED = ("x", "wkv", "wgate", "ape", "norm_weight")
_SAVED = (*_LEARNED, "rope_sin", "rope_cos", "cu_seqlens", "seqused")
_OPTIONS = ("rope_head_dim", "cmp_ratio", "coff", "norm_eps", "rotary_mode", "hadamard")


def setup_context(ctx: Any, x: dict[str, Any], output: Tensor) -> None:
    gradients.keep(ctx, x, _SAVED, _OPTIONS)


def backward(ctx: Any, d_out: Tensor) -> dict[str, Any]:
    return gradients.backward("npu_compressor_dense_grad", ctx, _LEARNED, d_out=d_out)
