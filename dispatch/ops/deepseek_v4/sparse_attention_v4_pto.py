# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Arguments and output of npu_sparse_attention_v4_pto; its shapes are in the tables below.

    no entries               sliding: the window alone
    the group of entries     HCA: the window and every closed entry
    that and an indexer      CSA: the window and the entries that are chosen

A group is given whole or not at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...check import Checker
from ...common import nz, quantized
from ..common import layouts, prologs, quantization, weight_args
from . import compressor, grouped_o_proj_pto, sharedkv_prolog_pto
from .compressor_dense import of_state
from .grouped_o_proj_pto import WEIGHTS as OUTPUT
from .sharedkv_prolog_pto import FIRST, SECOND

SCHEMA = (
    "npu_sparse_attention_v4_pto(Tensor x, Tensor w_dq, Tensor w_uq, Tensor w_kv,"
    " Tensor gamma_cq, Tensor gamma_kv, Tensor? sinks, Tensor sin, Tensor cos, Tensor(a!) ori_kv,"
    " Tensor ori_block_table, Tensor act_seqs, *, Tensor? seqused=None, SymInt cmp_ratio=0,"
    " Tensor? w_cmp_kv=None, Tensor? w_cmp_gate=None, Tensor? cmp_ape=None,"
    " Tensor? gamma_cmp=None, Tensor? cmp_sin=None, Tensor? cmp_cos=None,"
    " Tensor(b!)? cmp_state=None, Tensor? state_block_table=None, Tensor(c!)? cmp_kv=None,"
    " Tensor? cmp_block_table=None, Tensor? w_idx_qb=None, Tensor? w_idx_proj=None,"
    " Tensor? w_idx_kv=None, Tensor? w_idx_gate=None, Tensor? idx_ape=None,"
    " Tensor? gamma_idx=None, Tensor(d!)? idx_state=None, Tensor(e!)? idx_k=None,"
    " Tensor(f!)? idx_k_scale=None, SymInt sparse_count=512, Tensor? w_o_a=None,"
    " Tensor? w_o_b=None, float? softmax_scale=None, float rms_norm_eps=1e-6,"
    ' SymInt ori_win_left=127, SymInt state_mode=2, str weight_format="nz", str kv_kind="none",'
    ' str index_kind="none", bool index_hadamard=False, str hadamard_round="bf16",'
    " SymInt weight_quant_mode=0, Tensor? dequant_scale_w_dq=None,"
    " Tensor? dequant_scale_w_uq=None, Tensor? dequant_scale_w_kv=None,"
    " Tensor? dequant_scale_w_idx_qb=None, Tensor? dequant_scale_w_o_a=None,"
    " Tensor? dequant_scale_w_o_b=None) -> Tensor"
)

ENTRIES = (
    "w_cmp_kv", "w_cmp_gate", "cmp_ape", "gamma_cmp", "cmp_sin", "cmp_cos", "cmp_state",
    "state_block_table", "cmp_kv", "cmp_block_table",
)  # fmt: skip
INDEXER = (
    "w_idx_qb", "w_idx_proj", "w_idx_kv", "w_idx_gate", "idx_ape", "gamma_idx", "idx_state",
    "idx_k",
)  # fmt: skip

# those of an engine come from one pool
TABLES = (("ori_kv",), ("cmp_state", "idx_state"), ("cmp_kv", "idx_k", "idx_k_scale"))


def check(c: Checker, a: Mapping[str, Any]) -> None:
    mode = a["weight_quant_mode"]
    dtypes = weight_args.quantized_weights(c, mode, (*FIRST, *OUTPUT), SECOND)
    dtypes = {name: dtype for name, dtype in dtypes.items() if a[name] is not None}
    c.one_of("kv_kind", a["kv_kind"], "none", "fp8")
    c.one_of("index_kind", a["index_kind"], *compressor.KINDS)
    c.one_of("hadamard_round", a["hadamard_round"], "bf16", "fp32")
    compressor.state_mode(c, "state_mode", a["state_mode"])
    entries = _entries_given(c, a)
    indexer = _indexer_given(c, a, entries)
    output = _whole(c, a, OUTPUT, "an output projection")
    _common(c, a, entries, indexer, output, dtypes)
    weights = dict(w_dq=(a["w_dq"], "H Rq"), w_uq=(a["w_uq"], "Rq N*D"), w_kv=(a["w_kv"], "H D"))
    c.sizes["N"] = sharedkv_prolog_pto.heads_of(c, "w_uq", a["w_uq"], "D", a["weight_format"])
    c.sizes["N*D"] = c.sizes["N"] * c.sizes["D"]
    if a["sinks"] is not None:
        _wide(c, a, sinks="N")
    if entries:
        _entries(c, a)
    if indexer:
        weights |= dict(w_idx_qb=(a["w_idx_qb"], "Rq Ni*Di"), w_idx_proj=(a["w_idx_proj"], "H Ni"))
        sharedkv_prolog_pto.index_sizes(
            c, a["w_idx_qb"], a["w_idx_proj"], a["weight_format"], a["index_hadamard"]
        )
        _indexer(c, a)
    scales = weight_args.named((*FIRST, *SECOND), a)
    weight_args.weights(c, mode, weights, dtypes, scales, a["weight_format"])
    if output:
        grouped_o_proj_pto.output_weights(
            c, a["w_o_a"], a["w_o_b"], "w_uq", a["weight_format"], mode, dtypes, a
        )
    else:
        for scale in weight_args.named(OUTPUT, a).values():
            weight_args.absent(c, scale, "there is no output projection")
    c.at_least("rms_norm_eps", a["rms_norm_eps"], 0)
    c.at_least("ori_win_left", a["ori_win_left"], 0)
    c.count("sparse_count", a["sparse_count"])
    _values(c, a, entries)


def _whole(c: Checker, a: Mapping[str, Any], group: Sequence[str], what: str) -> bool:
    """Whether a group is given: all of it."""
    missing = [name for name in group if a[name] is None]
    if missing and len(missing) < len(group):
        there = next(name for name in group if a[name] is not None)
        c.fail(f"{_listed(missing)} missing, expected beside `{there}`: {what} needs them all.")
    return not missing


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) + (" is" if len(names) == 1 else " are")


def _entries_given(c: Checker, a: Mapping[str, Any]) -> bool:
    given, ratio = _whole(c, a, ENTRIES, "a layer with entries"), a["cmp_ratio"]
    if given:
        c.count("cmp_ratio", ratio)
    elif ratio != 0:
        c.fail(
            f"`cmp_ratio` is {ratio} and {_listed(ENTRIES)} missing, expected 0 for a layer of the "
            "window alone, or all of them."
        )
    return given


def _indexer_given(c: Checker, a: Mapping[str, Any], entries: bool) -> bool:
    given = _whole(c, a, INDEXER, "an indexer")
    if given:
        c.require(
            entries,
            f"`w_idx_qb` is given and {_listed(ENTRIES)} missing, expected them all: an indexer "
            "chooses entries.",
        )
        return True
    for name, left_out in (
        ("idx_k_scale", None),
        ("index_kind", "none"),
        ("index_hadamard", False),
    ):
        c.require(
            a[name] == left_out if left_out is not None else a[name] is None,
            f"`{name}` is given and {_listed(INDEXER)} missing. Leave it out, or pass them all.",
        )
    return False


def _common(
    c: Checker,
    a: Mapping[str, Any],
    entries: bool,
    indexer: bool,
    output: bool,
    dtypes: Mapping[str, torch.dtype],
) -> None:
    """Devices, dtypes, strides; all shapes but those of weights, of float32 and of index keys."""
    c.shape("x", a["x"], "B S H")
    rows = a["kv_kind"] == "fp8"
    width = str(quantized.V4_ROW) if rows else "D"
    floats = dict(
        x="B S H",
        gamma_cq="Rq",
        gamma_kv="D",
        sin="B S Dr",
        cos="B S Dr",
        ori_kv=f"pages P 1 {width}",
    )
    integers = dict(ori_block_table="B max_pages", act_seqs="B")
    weights, others, caches = ["w_dq", "w_uq", "w_kv"], ["sinks"], ["ori_kv"]
    if a["seqused"] is not None:
        integers["seqused"] = "B"
    if entries:
        c.sizes["C"] = -(-c.sizes["S"] // a["cmp_ratio"])
        floats |= dict(cmp_sin="B C Dr", cmp_cos="B C Dr", cmp_kv=f"entry_pages P' 1 {width}")
        integers |= dict(state_block_table="B state_columns", cmp_block_table="B max_entry_pages")
        weights += ["w_cmp_kv", "w_cmp_gate"]
        others += ["cmp_ape", "gamma_cmp", "cmp_state"]
        caches.append("cmp_kv")
    if indexer:
        weights += ["w_idx_qb", "w_idx_proj", "w_idx_kv", "w_idx_gate"]
        others += ["idx_ape", "gamma_idx", "idx_state", "idx_k", "idx_k_scale"]
    others += [name for name in a if name.startswith("dequant_scale_")]
    if output:
        weights += OUTPUT
    if rows:
        for name in caches:
            c.dtype(name, a[name], torch.uint8)
    prologs.tensors(
        c,
        {name: (a[name], shape) for name, shape in floats.items()},
        {name: (a[name], "") for name in weights},
        {name: (a[name], shape) for name, shape in integers.items()},
        {name: a[name] for name in others},
        own={*dtypes, *(caches if rows else [])},
        paged=caches,
    )
    prologs.rotary(c, "D")
    if rows:
        for name in caches:
            quantization.v4_pages(c, name, a[name])
        c.require(
            c.sizes["D"] == quantized.V4_WIDTH,
            f"the head dim D is {c.sizes['D']}, expected {quantized.V4_WIDTH} with kv_kind='fp8': "
            "its rows have no other.",
        )


def _wide(c: Checker, a: Mapping[str, Any], **shapes: str) -> None:
    """What is float32 beside half precision."""
    for name, shape in shapes.items():
        c.dtype(name, a[name], of_state(a["x"]))
        c.shape(name, a[name], shape)
        if name not in ("cmp_state", "idx_state"):
            c.contiguous(**{name: a[name]})
        else:
            quantization.whole_pages(c, **{name: a[name]})


def _entries(c: Checker, a: Mapping[str, Any]) -> None:
    ratio, weight, size = a["cmp_ratio"], a["w_cmp_kv"], c.sizes["D"]
    compressor.entry_page(c, "cmp_kv", c.sizes["P'"])
    if weight.ndim != 2:
        c.shape("w_cmp_kv", weight, "coff*D H")
    coff = 1 if weight.shape[0] == size else 2
    c.require(
        weight.shape[0] == coff * size,
        f"`w_cmp_kv` has {weight.shape[0]} rows, expected D={size} (windows that do not overlap) "
        f"or 2*D={2 * size} (windows that do).",
    )
    c.sizes |= {"m": ratio, "coff*D": coff * size, "2*coff*D": 2 * coff * size}
    for name in ("w_cmp_kv", "w_cmp_gate"):
        c.shape(name, a[name], "coff*D H")
    _wide(
        c,
        a,
        cmp_ape="m coff*D",
        gamma_cmp="D",
        cmp_state="state_pages state_page 2*coff*D",
    )
    page = c.sizes["state_page"]
    c.require(page > 0, "`cmp_state` has pages of 0 slots, expected at least 1.")
    compressor.ring(c, a["state_block_table"], page, ratio, coff, a["state_mode"])


def _indexer(c: Checker, a: Mapping[str, Any]) -> None:
    size, page, kind = c.sizes["Di"], c.sizes["P'"], a["index_kind"]
    coff = c.sizes["coff*D"] // c.sizes["D"]
    c.sizes |= {"coff*Di": coff * size, "2*coff*Di": 2 * coff * size}
    for name in ("w_idx_kv", "w_idx_gate"):
        c.shape(name, a[name], "coff*Di H")
    _wide(
        c,
        a,
        idx_ape="m coff*Di",
        gamma_idx="Di",
        idx_state="state_pages state_page 2*coff*Di",
    )
    c.require(
        a["cmp_ratio"] > 1 or page % 16 == 0,
        f"`cmp_kv` has pages of {page} entries, expected a multiple of 16 with cmp_ratio=1.",
    )
    keys, scales = a["idx_k"], a["idx_k_scale"]
    if kind == "none":
        c.require(scales is None, "`idx_k_scale` is given, expected None with index_kind='none'.")
        c.same_dtype(x=a["x"], idx_k=keys)
        c.shape("idx_k", keys, "entry_pages P' 1 Di")
        quantization.whole_pages(c, idx_k=keys)
        return
    c.require(
        size == quantized.INDEX,
        f"the index dim Di is {size}, expected {quantized.INDEX} with index_kind={kind!r}.",
    )
    own = Checker(c.op)
    own.sizes |= {"pages": c.sizes["entry_pages"], "P": page}
    keys, scales = quantization.unpacked(own, kind, keys, scales, "idx_k", "index_kind")
    if scales is None:
        c.fail("`idx_k_scale` is missing, expected [pages, P, 1], a scale for each index key.")
        return
    c.dtype("idx_k_scale", scales, *quantization.SCALES[kind])
    own.shape("idx_k_scale", scales, "pages P 1")
    quantization.whole_pages(c, idx_k=keys, idx_k_scale=scales)


def _values(c: Checker, a: Mapping[str, Any], entries: bool) -> None:
    """Lengths, where they are known: no longer than what the tables hold."""
    sizes, ratio = c.sizes, a["cmp_ratio"]
    layouts.values(c, "seqused", a["seqused"], "BSND", sizes["S"])
    reach = sizes["max_pages"] * sizes["P"]
    if entries:
        reach = min(reach, (sizes["max_entry_pages"] * sizes["P'"] + 1) * ratio - 1)
    layouts.values(c, "act_seqs", a["act_seqs"], "BSND", reach)


def fake(
    x: Tensor, w_uq: Tensor, gamma_kv: Tensor, w_o_b: Tensor | None, weight_format: str, **_: Any
) -> Tensor:
    front = x.shape[:2]
    if w_o_b is not None:
        return x.new_empty([*front, nz.columns_of(w_o_b, weight_format)])
    size = gamma_kv.shape[0]
    return x.new_empty([*front, nz.columns_of(w_uq, weight_format) // size, size])
