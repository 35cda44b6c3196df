# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Arguments, outputs and autograd of npu_chunk_kda (fla's chunk_kda).

    q, k [B, T, H, K]   v [B, T, HV, V]   g [B, T, HV, K]   beta [B, T, HV]   out [B, T, HV, V]
    states [N, HV, K, V] ("kv") or [N, HV, V, K] ("vk")   A_log [HV]   dt_bias [HV, K] or [HV * K]

N sequences: B, or those of `cu_seqlens`, where B is 1; tokens of none give 0.
"""

from __future__ import annotations

from typing import Any, TypedDict

import torch
from torch import Tensor

from ...check import Checker, tensors
from ..common import delta_rules, gradients
from .growth import note_growth

OPTIONS = (
    " float? scale=None, Tensor? initial_state=None, Tensor? cu_seqlens=None,"
    " bool use_qk_l2norm_in_kernel=False, bool use_gate_in_kernel=False, Tensor? A_log=None,"
    ' Tensor? dt_bias=None, float? lower_bound=None, str state_layout="kv",'
    " bool use_beta_sigmoid_in_kernel=False, bool allow_neg_eigval=False"
)
SCHEMA = (
    f"npu_chunk_kda(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, *,{OPTIONS})"
    " -> (Tensor, Tensor)"
)
ONNX = "ChunkKda"


class Arguments(TypedDict):
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    scale: float | None
    initial_state: Tensor | None
    cu_seqlens: Tensor | None
    use_qk_l2norm_in_kernel: bool
    use_gate_in_kernel: bool
    A_log: Tensor | None
    dt_bias: Tensor | None
    lower_bound: float | None
    state_layout: str
    use_beta_sigmoid_in_kernel: bool
    allow_neg_eigval: bool


def check(c: Checker, x: Arguments) -> None:
    """What the op and its gradient ask of the tensors that they share."""
    q, k, v, g, beta, initial_state = x["q"], x["k"], x["v"], x["g"], x["beta"], x["initial_state"]
    cu_seqlens, A_log, dt_bias = x["cu_seqlens"], x["A_log"], x["dt_bias"]
    c.same_device(**tensors(x, *_SAVED))
    c.one_of("state_layout", x["state_layout"], "kv", "vk")
    delta_rules.heads(c, "B T H K", "B T HV V", q=q, k=k, v=v)
    c.floats("g", g, "B T HV K")
    c.floats("beta", beta, "B T HV")
    delta_rules.rate(c, x["use_beta_sigmoid_in_kernel"], x["allow_neg_eigval"])
    _check_gate(c, x["use_gate_in_kernel"], A_log, dt_bias, x["lower_bound"])
    c.sizes["N"] = c.sizes["B"]
    if cu_seqlens is not None:
        delta_rules.cut(c, cu_seqlens)
    c.floats("initial_state", initial_state, STATES[x["state_layout"]])
    if not x["use_qk_l2norm_in_kernel"]:
        note_growth(c, k, beta, x, None if x["use_gate_in_kernel"] else g)
    c.dense_rows(q=q, k=k, v=v, g=g, beta=beta)
    c.contiguous(initial_state=initial_state, cu_seqlens=cu_seqlens, A_log=A_log, dt_bias=dt_bias)


STATES = {"kv": "N HV K V", "vk": "N HV V K"}


def _check_gate(
    c: Checker,
    used: bool,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float | None,
) -> None:
    c.sizes["HV*K"] = c.sizes["HV"] * c.sizes["K"]
    for name, given in (("A_log", A_log), ("dt_bias", dt_bias), ("lower_bound", lower_bound)):
        c.require(
            used or given is None,
            f"`{name}` is given, and `g` is the decay's logarithm itself. Pass "
            "use_gate_in_kernel=True if it is what the gate makes it from.",
        )
    c.require(
        not used or A_log is not None or lower_bound is not None,
        "`A_log` is None, expected [HV]: without `lower_bound` the gate needs it.",
    )
    delta_rules.lower_bound(c, lower_bound)
    c.floats("A_log", A_log, "HV")
    if dt_bias is not None:
        c.floats("dt_bias", dt_bias, "HV K" if dt_bias.ndim == 2 else "HV*K")


def fake(
    k: Tensor,
    v: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    state_layout: str,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    out = v.new_empty(v.shape)
    if initial_state is not None:
        return out, initial_state.new_empty(initial_state.shape)
    sequences = v.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    sizes = (k.shape[3], v.shape[3]) if state_layout == "kv" else (v.shape[3], k.shape[3])
    kind = torch.float64 if v.dtype is torch.float64 else torch.float32
    return out, v.new_empty([sequences, v.shape[2], *sizes], dtype=kind)


LEARNED = ("q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias")
_SAVED = (*LEARNED, "cu_seqlens")
_KEPT = (
    "scale",
    "use_qk_l2norm_in_kernel",
    "use_gate_in_kernel",
    "lower_bound",
    "state_layout",
    "use_beta_sigmoid_in_kernel",
    "allow_neg_eigval",
)


def setup_context(ctx: Any, x: dict[str, Any], output: tuple[Tensor, Tensor]) -> None:
    gradients.keep(ctx, x, _SAVED, _KEPT)


def backward(ctx: Any, grad_out: Tensor | None, grad_state: Tensor | None) -> dict[str, Any]:
    return gradients.backward(
        "npu_chunk_kda_grad", ctx, LEARNED, ["v"], d_out=grad_out, d_final_state=grad_state
    )
