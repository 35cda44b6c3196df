# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Arguments and outputs of npu_sharedkv_prolog_pto; its shapes are in the tables below."""

from __future__ import annotations

from typing import Any, TypedDict

import torch
from torch import Tensor
from typing_extensions import Unpack

from ...check import Checker
from ...common import nz, quantized
from ..common import layouts, prologs, quantization, weight_args

SCHEMA = (
    "npu_sharedkv_prolog_pto(Tensor token_x, Tensor w_dq, Tensor w_uq, Tensor w_kv,"
    " Tensor gamma_cq, Tensor gamma_kv, Tensor rope_sin, Tensor rope_cos, Tensor(a!) ori_kv,"
    " Tensor ori_block_table, Tensor act_seqs, *, Tensor? seqused=None, Tensor? w_idx_qb=None,"
    " Tensor? w_idx_proj=None, float rms_norm_eps=1e-6,"
    ' str weight_format="nz", str kv_kind="none", bool index_hadamard=False,'
    ' str hadamard_round="bf16",'
    " SymInt weight_quant_mode=0, Tensor? dequant_scale_w_dq=None,"
    " Tensor? dequant_scale_w_uq=None, Tensor? dequant_scale_w_kv=None,"
    " Tensor? dequant_scale_w_idx_qb=None) -> (Tensor, Tensor, Tensor, Tensor)"
)


class Arguments(TypedDict):
    token_x: Tensor
    w_dq: Tensor
    w_uq: Tensor
    w_kv: Tensor
    gamma_cq: Tensor
    gamma_kv: Tensor
    rope_sin: Tensor
    rope_cos: Tensor
    ori_kv: Tensor
    ori_block_table: Tensor
    act_seqs: Tensor
    seqused: Tensor | None
    w_idx_qb: Tensor | None
    w_idx_proj: Tensor | None
    rms_norm_eps: float
    weight_format: str
    kv_kind: str
    index_hadamard: bool
    hadamard_round: str
    weight_quant_mode: int
    dequant_scale_w_dq: Tensor | None
    dequant_scale_w_uq: Tensor | None
    dequant_scale_w_kv: Tensor | None
    dequant_scale_w_idx_qb: Tensor | None


# weights that a weight_quant_mode quantizes: of the layer's input, of the query latent
FIRST, SECOND = ("w_dq", "w_kv"), ("w_uq", "w_idx_qb")


def check(c: Checker, x: Arguments) -> None:
    w_uq, ori_kv, seqused = x["w_uq"], x["ori_kv"], x["seqused"]
    weight_format, kv_kind, index_hadamard = x["weight_format"], x["kv_kind"], x["index_hadamard"]
    weight_quant_mode = x["weight_quant_mode"]
    scales = dict(
        dequant_scale_w_dq=x["dequant_scale_w_dq"],
        dequant_scale_w_uq=x["dequant_scale_w_uq"],
        dequant_scale_w_kv=x["dequant_scale_w_kv"],
        dequant_scale_w_idx_qb=x["dequant_scale_w_idx_qb"],
    )
    dtypes = weight_args.quantized_weights(c, weight_quant_mode, FIRST, SECOND)
    c.one_of("kv_kind", kv_kind, "none", "fp8")
    packed = kv_kind == "fp8"
    if packed:
        c.dtype("ori_kv", ori_kv, torch.uint8)
    c.one_of("hadamard_round", x["hadamard_round"], "bf16", "fp32")
    index = index_group(c, x["w_idx_qb"], x["w_idx_proj"], index_hadamard)
    weights = dict(w_dq=(x["w_dq"], "H Rq"), w_uq=(w_uq, "Rq N*D"), w_kv=(x["w_kv"], "H D"))
    if index:
        weights |= dict(w_idx_qb=(index[0], "Rq Ni*Di"), w_idx_proj=(index[1], "H Ni"))
    dtypes = {name: dtype for name, dtype in dtypes.items() if name in weights}
    lengths = {"act_seqs": (x["act_seqs"], "B")}
    if seqused is not None:
        lengths["seqused"] = (seqused, "B")
    prologs.tensors(
        c,
        dict(
            token_x=(x["token_x"], "B S H"),
            gamma_cq=(x["gamma_cq"], "Rq"),
            gamma_kv=(x["gamma_kv"], "D"),
            rope_sin=(x["rope_sin"], "B S Dr"),
            rope_cos=(x["rope_cos"], "B S Dr"),
            ori_kv=(ori_kv, f"pages P 1 {quantized.V4_ROW}" if packed else "pages P 1 D"),
        ),
        weights,
        lengths | dict(ori_block_table=(x["ori_block_table"], "B max_pages")),
        scales,
        own={*dtypes, *(["ori_kv"] if packed else [])},
        paged={"ori_kv"},
    )
    if packed:
        quantization.v4_rows(c, "ori_kv", ori_kv)
        c.require(
            c.sizes["D"] == quantized.V4_WIDTH,
            f"the head dim D is {c.sizes['D']}, expected {quantized.V4_WIDTH} with kv_kind='fp8': "
            "its rows have no other.",
        )
    prologs.rotary(c, "D")
    c.sizes["N*D"] = heads_of(c, "w_uq", w_uq, "D", weight_format) * c.sizes["D"]
    if index:
        index_sizes(c, *index, weight_format, index_hadamard)
    of_weights = weight_args.named((*FIRST, *SECOND), scales)
    weight_args.weights(c, weight_quant_mode, weights, dtypes, of_weights, weight_format)
    c.at_least("rms_norm_eps", x["rms_norm_eps"], 0)
    layouts.values(c, "seqused", seqused, "BSND", c.sizes["S"])


def index_group(
    c: Checker, w_idx_qb: Tensor | None, w_idx_proj: Tensor | None, index_hadamard: bool
) -> tuple[Tensor, Tensor] | None:
    """Both of the indexer's weights, or none."""
    if w_idx_qb is not None and w_idx_proj is not None:
        return w_idx_qb, w_idx_proj
    for name, tensor, other, there in (
        ("w_idx_proj", w_idx_proj, "w_idx_qb", w_idx_qb),
        ("w_idx_qb", w_idx_qb, "w_idx_proj", w_idx_proj),
    ):
        c.require(
            tensor is not None or there is None,
            f"`{name}` is missing, expected it beside `{other}`: an indexer has both.",
        )
    c.require(
        not index_hadamard,
        "`index_hadamard` is True, expected False without `w_idx_qb`: it turns index queries.",
    )
    return None


def heads_of(c: Checker, name: str, weight: Tensor, size: str, weight_format: str) -> Any:
    """How many heads, of a size that is known, the columns of a weight are."""
    linear = weight_format == "linear"
    along = "rows" if linear else "columns"
    if weight.ndim not in (2, 4):
        wanted = "[N, K]" if linear else "[K, N], or its NZ in 4-D"
        c.fail(f"`{name}` has shape {list(weight.shape)}, expected {wanted}.")
    columns, width = nz.columns_of(weight, weight_format), c.sizes[size]
    c.require(
        width > 0 and columns > 0 and columns % width == 0,
        f"`{name}` has {columns} {along}, expected a multiple of {size}={width}, at least one.",
    )
    return columns // width


def index_sizes(
    c: Checker, w_idx_qb: Tensor, w_idx_proj: Tensor, weight_format: str, index_hadamard: bool
) -> None:
    """The index heads are the columns of `w_idx_proj`; the others' columns are all their dims."""
    if w_idx_proj.ndim not in (2, 4):
        c.shape("w_idx_proj", w_idx_proj, "Ni H" if weight_format == "linear" else "H Ni")
    c.sizes["Ni"] = nz.columns_of(w_idx_proj, weight_format)
    c.sizes["Di"] = heads_of(c, "w_idx_qb", w_idx_qb, "Ni", weight_format)
    c.sizes["Ni*Di"] = c.sizes["Ni"] * c.sizes["Di"]
    prologs.rotary(c, "Di")
    size = c.sizes["Di"]
    c.require(
        not index_hadamard or size & (size - 1) == 0,
        f"the index dim Di is {size}, expected a power of two with index_hadamard=True.",
    )


def fake(**x: Unpack[Arguments]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    weight_format = x["weight_format"]
    rows, new = x["token_x"].shape[:-1], x["token_x"].new_empty
    size = x["gamma_kv"].shape[0]
    query = new([*rows, nz.columns_of(x["w_uq"], weight_format) // size, size])
    query_norm = new([*rows, x["gamma_cq"].shape[0]])
    if x["w_idx_qb"] is None or x["w_idx_proj"] is None:
        return query, query_norm, new([0]), new([0])
    heads = nz.columns_of(x["w_idx_proj"], weight_format)
    index = new([*rows, heads, nz.columns_of(x["w_idx_qb"], weight_format) // heads])
    return query, query_norm, index, new([*rows, heads])
