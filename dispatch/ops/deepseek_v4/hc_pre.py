# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Arguments, outputs and autograd of npu_hc_pre.

x [T, hc, h] or [B, S, hc, h]   hc_fn [(2 + hc) hc, hc h]   hc_scale [3]   hc_base [(2 + hc) hc]
norm_weight [h]   y [.., h]   post [.., hc]   comb [.., hc, hc]

The head of a model has hc_fn [hc, hc h], hc_scale [1], hc_base [hc]; its post and comb are [0].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

import torch
from torch import Tensor

from ...check import Checker, tensors

SCHEMA = (
    "npu_hc_pre(Tensor x, Tensor hc_fn, Tensor hc_scale, Tensor hc_base, *, SymInt hc_mult=4,"
    " SymInt hc_sinkhorn_iters=20, float norm_eps=1e-6, float hc_eps=1e-6,"
    " Tensor? norm_weight=None) -> (Tensor, Tensor, Tensor)"
)
GE = "HcPre"


class Gates(TypedDict):
    """What makes the gates, in hc_post_pre too."""

    hc_fn: Tensor
    hc_scale: Tensor
    hc_base: Tensor
    hc_mult: int
    hc_sinkhorn_iters: int
    norm_eps: float
    hc_eps: float
    norm_weight: Tensor | None


class Arguments(Gates):
    x: Tensor


STREAMS = 4


def check(c: Checker, a: Arguments) -> None:
    inputs(c, a, "x")


def inputs(c: Checker, a: Mapping[str, Any], name: str) -> None:
    """What hc_pre asks of its arguments, whatever the op calls the streams."""
    x: Tensor = a[name]
    hc_fn: Tensor = a["hc_fn"]
    wide = tensors(a, "hc_fn", "hc_scale", "hc_base", "norm_weight")
    c.same_device(**{name: x}, **wide)
    c.floating(name, x)
    for argument, tensor in wide.items():
        c.dtype(argument, tensor, parameter_dtype(x))
    c.require(
        a["hc_mult"] == STREAMS,
        f"`hc_mult` is {a['hc_mult']}, expected {STREAMS}: other numbers of streams are not "
        "supported.",
    )
    rows(c, name, x)
    own, whole = c.sizes["hc"], (2 + STREAMS) * STREAMS
    c.sizes["hc*h"] = own * c.sizes["h"]
    if hc_fn.ndim == 2 and hc_fn.shape[0] not in (whole, own):
        c.fail(
            f"`hc_fn` has {hc_fn.shape[0]} rows, expected {whole}, or {own} for the head of a "
            "model."
        )
    c.shape("hc_fn", hc_fn, "mix hc*h")
    c.shape("hc_scale", a["hc_scale"], "1" if is_head(hc_fn) else "3")
    c.shape("hc_base", a["hc_base"], "mix")
    if "norm_weight" in wide:
        c.shape("norm_weight", wide["norm_weight"], "h")
    for option, least in (("hc_sinkhorn_iters", 1), ("norm_eps", 0), ("hc_eps", 0)):
        c.at_least(option, a[option], least)
    c.contiguous(**{name: x}, **wide)


def rows(c: Checker, name: str, streams: Tensor) -> str:
    """The letters in front of a token's own sizes, after its streams were checked."""
    letters = "B S" if streams.ndim == 4 else "T"
    c.shape(name, streams, f"{letters} hc h", hc=STREAMS)
    c.require(c.sizes["h"] > 0, f"`{name}` has a hidden size of 0, expected at least 1.")
    return letters


def parameter_dtype(x: Tensor) -> torch.dtype:
    """Of hc_*, norms, post and comb."""
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def is_head(hc_fn: Tensor) -> bool:
    return hc_fn.shape[0] == STREAMS


def fake(x: Tensor, hc_fn: Tensor, **_: Any) -> tuple[Tensor, Tensor, Tensor]:
    y = x.new_empty([*x.shape[:-2], x.shape[-1]])
    new, streams = hc_fn.new_empty, x.shape[:-1]
    if is_head(hc_fn):
        return y, new([0]), new([0])
    return y, new(streams), new([*streams, STREAMS])


_SAVED = ("x", "hc_fn", "hc_scale", "hc_base", "norm_weight")
_OPTIONS = ("hc_mult", "hc_sinkhorn_iters", "norm_eps", "hc_eps")


def setup_context(ctx: Any, x: dict[str, Any], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*(x[name] for name in _SAVED))
    ctx.options = {name: x[name] for name in _OPTIONS}


def backward(ctx: Any, *grads: Tensor) -> dict[str, Any]:
    x = dict(zip(_SAVED, ctx.saved_tensors, strict=True))
    names = ("d_y", "d_post", "d_comb")
    given = {name: grad.contiguous() for name, grad in zip(names, grads, strict=True)}
    found = torch.ops.custom.npu_hc_pre_grad(**given, **x, **ctx.options)
    kept = [name for name in _SAVED if x[name] is not None]
    return {name: grad for name, grad in zip(_SAVED, found, strict=True) if name in kept}
