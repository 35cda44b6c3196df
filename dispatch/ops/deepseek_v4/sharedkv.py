# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What attention over window rows and compressed entries asks of its arguments.

    q             BSND [B, S, N, D]       TND [T, N, D] with cu_seqlens_q [B + 1]
    ori_kv        PA_ND [pages, P, 1, D]  BSND [B, S2, 1, D]  TND [T2, 1, D]    row of position t
    cmp_kv        likewise [pages, P', 1, D], [B, E, 1, D], [T3, 1, D]          entry w
    *_indices     [B, S, 1, K], [T, 1, K]   *_topk_length [T], of BSND T = B * S

Token j of the Lq tokens of a request with Lk source tokens stands at p = Lk - Lq + j.  It sees the
rows p - ori_win_left .. p and the entries w < (p + 1) // cmp_ratio: all, or those that its indices
name.  With indices_are_slots it sees the slots page * P + offset that both indices name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ...check import Checker
from ..common import layouts
from ..sparse_attention.sparse_flash_attention import statistics

# what the ops of both kinds of rows share, behind their own
ARGUMENTS = (
    "Tensor? ori_kv=None, Tensor? cmp_kv=None, Tensor? ori_sparse_indices=None,"
    " Tensor? cmp_sparse_indices=None, Tensor? ori_block_table=None,"
    " Tensor? cmp_block_table=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_ori_kv=None,"
    " Tensor? cu_seqlens_cmp_kv=None, Tensor? seqused_q=None, Tensor? seqused_kv=None,"
    " Tensor? sinks=None, Tensor? metadata=None, float? softmax_scale=0.0, SymInt cmp_ratio=0,"
    " SymInt ori_mask_mode=4, SymInt cmp_mask_mode=3, SymInt ori_win_left=127,"
    ' SymInt ori_win_right=0, str layout_q="BSND", str layout_kv="PA_ND",'
    " bool return_softmax_lse=False, bool indices_are_slots=False,"
    " Tensor? ori_topk_length=None, Tensor? cmp_topk_length=None"
)
# the only value of each, and what it means
_MASKS = {
    "ori_mask_mode": (4, "a window that ends at the token"),
    "cmp_mask_mode": (3, "the entries that are closed at the token"),
    "ori_win_right": (0, "no row behind the token"),
}
_ROWS = {"BSND": "B S", "TND": "T"}
_ORI = {"BSND": "B S2", "TND": "T2", "PA_ND": "pages P"}
_CMP = {"BSND": "B E", "TND": "T3", "PA_ND": "entry_pages P'"}
_INTEGERS = (
    "ori_sparse_indices", "cmp_sparse_indices", "ori_block_table", "cmp_block_table",
    "cu_seqlens_q", "cu_seqlens_ori_kv", "cu_seqlens_cmp_kv", "seqused_q", "seqused_kv",
    "ori_topk_length", "cmp_topk_length",
)  # fmt: skip


def inputs(c: Checker, q: Tensor, width: str, row: str, x: Mapping[str, Any]) -> None:
    """`width` and `row` are the letters of q's and of the rows' last dimension; `x` holds
    ARGUMENTS by name.  The dtypes of rows are the caller's to check."""
    layout_q, layout_kv, in_slots = x["layout_q"], x["layout_kv"], x["indices_are_slots"]
    c.one_of("layout_q", layout_q, *_ROWS)
    c.one_of("layout_kv", layout_kv, *_ORI)
    c.require(
        layout_kv in (layout_q, "PA_ND"),
        f"`layout_kv` is {layout_kv!r}, expected {layout_q!r} (as `layout_q`) or 'PA_ND'.",
    )
    ori_kv, cmp_kv, sinks = x["ori_kv"], x["cmp_kv"], x["sinks"]
    integers = {name: x[name] for name in _INTEGERS if x.get(name) is not None}
    c.same_device(q=q, ori_kv=ori_kv, cmp_kv=cmp_kv, sinks=sinks, **integers)
    c.floating("q", q)
    for name, tensor in integers.items():
        c.integer(name, tensor)
    if ori_kv is None:
        c.fail("`ori_kv` is missing, and every token sees window rows.")
    c.shape("q", q, f"{_ROWS[layout_q]} N {width}")
    c.shape("ori_kv", ori_kv, f"{_ORI[layout_kv]} 1 {row}")
    if cmp_kv is not None:
        c.shape("cmp_kv", cmp_kv, f"{_CMP[layout_kv]} 1 {row}")
    c.dense_rows(q=q)
    if layout_kv == "PA_ND":
        _page_sizes(c, cmp_kv is not None)
    for name, (only, meaning) in _MASKS.items():
        if name in x:
            c.require(x[name] == only, f"`{name}` is {x[name]}, expected {only} ({meaning}).")
    c.at_least("ori_win_left", x["ori_win_left"], 0)
    _belonging(c, x)
    _queries(c, x)
    if in_slots:
        _slots(c, x)
    else:
        _keys(c, x)
    _selection(c, x)
    if sinks is not None:
        c.dtype("sinks", sinks, statistics(q))
        c.shape("sinks", sinks, "N")
        c.contiguous(sinks=sinks)


def _page_sizes(c: Checker, entries: bool) -> None:
    page = c.sizes["P"]
    c.require(
        page % 16 == 0 and page > 0,
        f"the page size is {page}, expected a multiple of 16 (from `ori_kv`).",
    )
    if entries:
        page = c.sizes["P'"]
        c.require(
            page in (1, 2, 4, 8) or (page % 16 == 0 and page > 0),
            f"the page size is {page}, expected 1, 2, 4, 8 or a multiple of 16 (from `cmp_kv`).",
        )


def _belonging(c: Checker, x: Mapping[str, Any]) -> None:
    """What is given beside what it belongs to."""
    if x["cmp_kv"] is None:
        for name in ("cmp_sparse_indices", "cmp_block_table", "cmp_topk_length"):
            c.require(
                x.get(name) is None, f"`{name}` is given, expected None: `cmp_kv` is missing."
            )
    if not x["indices_are_slots"]:
        for name, remedy in (
            ("ori_sparse_indices", "the window names its rows"),
            ("ori_topk_length", "it cuts slots"),
            ("cmp_topk_length", "it cuts slots"),
        ):
            c.require(
                x.get(name) is None,
                f"`{name}` is given, expected None: {remedy}. Pass indices_are_slots=True, or "
                "leave it out.",
            )
        if x["cmp_kv"] is not None:
            c.count("cmp_ratio", x["cmp_ratio"])


def _queries(c: Checker, x: Mapping[str, Any]) -> None:
    cu, used = x["cu_seqlens_q"], x["seqused_q"]
    if x["layout_q"] == "TND":
        if cu is None:
            c.require(
                x["indices_are_slots"] and used is None,
                "`cu_seqlens_q` is missing, and layout_q 'TND' needs it.",
            )
            return
        _sums(c, "cu_seqlens_q", cu, c.sizes["T"])
        c.sizes["B"] = cu.shape[0] - 1
    else:
        c.require(
            cu is None, "`cu_seqlens_q` is given, expected None: layout_q 'BSND' has no sums."
        )
    if used is not None:
        _lengths(c, "seqused_q", used, c.sizes["S" if x["layout_q"] == "BSND" else "T"])


def _keys(c: Checker, x: Mapping[str, Any]) -> None:
    """How many keys each request has, and where they lie."""
    layout, used = x["layout_kv"], x["seqused_kv"]
    for kind, pages, rows in (("ori", "max_pages", "T2"), ("cmp", "max_entry_pages", "T3")):
        if x[f"{kind}_kv"] is None:
            continue
        name, sums = f"{kind}_block_table", f"cu_seqlens_{kind}_kv"
        table, prefix = x.get(name), x[sums]
        if layout == "PA_ND":
            if table is None:
                c.fail(f"`{name}` is missing, and layout_kv 'PA_ND' needs it.")
                return
            c.shape(name, table, f"B {pages}")
            c.dense_rows(**{name: table})
            continue
        c.require(
            table is None,
            f"`{name}` is given, and keys of layout_kv {layout!r} have none. Pass layout_kv "
            "'PA_ND', or leave it out.",
        )
        if layout == "TND":
            if prefix is None:
                c.fail(f"`{sums}` is missing, and layout_kv 'TND' needs it.")
                return
            _sums(c, sums, prefix, c.sizes[rows])
    if used is None:
        c.require(layout != "PA_ND", "`seqused_kv` is missing, and layout_kv 'PA_ND' needs it.")
        return
    if layout == "PA_ND":
        reach = c.sizes["max_pages"] * c.sizes["P"]
    else:
        reach = c.sizes["S2" if layout == "BSND" else "T2"]
    _lengths(c, "seqused_kv", used, reach)


def _slots(c: Checker, x: Mapping[str, Any]) -> None:
    for kv, name in (("ori_kv", "ori_sparse_indices"), ("cmp_kv", "cmp_sparse_indices")):
        c.require(
            x[kv] is None or x[name] is not None,
            f"`{name}` is missing, and indices_are_slots needs the slots of `{kv}`.",
        )
    rows = c.sizes["T"] if x["layout_q"] == "TND" else c.sizes["B"] * c.sizes["S"]
    for name in ("ori_topk_length", "cmp_topk_length"):
        if (length := x[name]) is not None:
            c.shape(name, length, "rows", rows=rows)
            c.contiguous(**{name: length})


def _selection(c: Checker, x: Mapping[str, Any]) -> None:
    rows = _ROWS[x["layout_q"]]
    for name, letter in (("ori_sparse_indices", "K_ori"), ("cmp_sparse_indices", "K")):
        if x[name] is not None:
            c.shape(name, x[name], f"{rows} 1 {letter}")
            c.dense_rows(**{name: x[name]})


def _sums(c: Checker, name: str, tensor: Tensor, reach: int) -> None:
    if tensor.ndim == 1:
        c.require(
            tensor.shape[0] > 0, f"`{name}` has shape [0], expected [B + 1] with the leading 0."
        )
    c.shape(name, tensor, "B+1", **({"B+1": c.sizes["B"] + 1} if "B" in c.sizes else {}))
    c.contiguous(**{name: tensor})
    layouts.values(c, name, tensor, "TND", reach)


def _lengths(c: Checker, name: str, tensor: Tensor, reach: int) -> None:
    c.shape(name, tensor, "B")
    c.contiguous(**{name: tensor})
    layouts.values(c, name, tensor, "BSND", reach)


def lse_shape(q: Tensor) -> list[int]:
    *batch, rows, heads, _ = q.shape
    return [*batch, 1, rows, heads]
