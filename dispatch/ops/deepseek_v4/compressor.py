# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Arguments and output of npu_compressor; what it shares with the one without caches as in
compressor_dense.py.

    state_cache [pages, P, 2*coff*D]   cmp_cache [pages, P, 1, D]   ln_weight, ln_bias [D]

Without a gate state_cache is [pages, P, coff*D].
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...check import Checker
from ...common import compressed, quantized
from ...common.compressed import BY_PAGE, RING
from ..common import layouts, quantization
from . import compressor_dense
from .compressor_dense import of_state, together

SCHEMA = (
    "npu_compressor(Tensor x, Tensor wkv, Tensor? wgate, Tensor(a!) state_cache, Tensor? ape,"
    " Tensor? norm_weight, Tensor? rope_sin, Tensor? rope_cos, SymInt rope_head_dim,"
    " SymInt cmp_ratio, *, Tensor? state_block_table=None, Tensor? cu_seqlens=None,"
    " Tensor? seqused=None,"
    " Tensor? start_pos=None, SymInt coff=1, float norm_eps=1e-6, SymInt rotary_mode=1,"
    " SymInt cache_mode=1, Tensor(b!)? cmp_cache=None, Tensor(c!)? cmp_scale_cache=None,"
    ' Tensor? cmp_block_table=None, str kind="none", bool hadamard=False,'
    ' str hadamard_round="bf16", bool return_cmp_kv=True, Tensor? ln_weight=None,'
    ' Tensor? ln_bias=None, float ln_eps=1e-6, str rope_slice="last") -> Tensor'
)


class Arguments(compressor_dense.Common):
    wgate: Tensor | None
    ape: Tensor | None
    norm_weight: Tensor | None
    rope_sin: Tensor | None
    rope_cos: Tensor | None
    state_cache: Tensor
    state_block_table: Tensor | None
    start_pos: Tensor | None
    cache_mode: int
    cmp_cache: Tensor | None
    cmp_scale_cache: Tensor | None
    cmp_block_table: Tensor | None
    kind: str
    hadamard_round: str
    return_cmp_kv: bool
    ln_weight: Tensor | None
    ln_bias: Tensor | None
    ln_eps: float
    rope_slice: str


KINDS = ("none", "fp8", "int8")


def check(c: Checker, a: Arguments) -> None:
    x = a["x"]
    c.same_device(
        x=x,
        state_cache=a["state_cache"],
        state_block_table=a["state_block_table"],
        start_pos=a["start_pos"],
        cmp_cache=a["cmp_cache"],
        cmp_scale_cache=a["cmp_scale_cache"],
        cmp_block_table=a["cmp_block_table"],
        ln_weight=a["ln_weight"],
        ln_bias=a["ln_bias"],
    )
    compressor_dense.check(c, a)
    c.one_of("hadamard_round", a["hadamard_round"], "bf16", "fp32")
    c.one_of("rope_slice", a["rope_slice"], *compressed.SLICES)
    _layer_norm(c, a)
    _state(
        c,
        x,
        1 if a["wgate"] is None else 2,
        a["state_cache"],
        a["state_block_table"],
        a["start_pos"],
        a["cmp_ratio"],
        a["coff"],
        a["cache_mode"],
    )
    _entries(c, x, a["cmp_cache"], a["cmp_scale_cache"], a["cmp_block_table"], a["kind"])


def _layer_norm(c: Checker, a: Arguments) -> None:
    together(c, ln_weight=a["ln_weight"], ln_bias=a["ln_bias"])
    c.at_least("ln_eps", a["ln_eps"], 0)
    if a["ln_weight"] is None or a["ln_bias"] is None:
        return
    c.require(
        a["coff"] == 1,
        f"`ln_weight` is given and `coff` is {a['coff']}, expected 1: a token with a LayerNorm has "
        "D channels.",
    )
    for name, given in (("ln_weight", a["ln_weight"]), ("ln_bias", a["ln_bias"])):
        c.dtype(name, given, of_state(a["x"]))
        c.shape(name, given, "D")
        c.contiguous(**{name: given})


def _state(
    c: Checker,
    x: Tensor,
    parts: int,
    cache: Tensor,
    table: Tensor | None,
    start_pos: Tensor | None,
    ratio: int,
    coff: int,
    mode: int,
) -> None:
    state_mode(c, "cache_mode", mode)
    if table is None:
        c.fail("`state_block_table` is missing, expected the pages of the state, [B, max_pages].")
        return
    c.dtype("state_cache", cache, of_state(x))
    width = "coff*D" if parts == 1 else "2*coff*D"
    c.sizes[width] = parts * c.sizes["coff*D"]
    c.shape("state_cache", cache, f"pages P {width}")
    c.require(c.sizes["P"] > 0, "`state_cache` has pages of 0 slots, expected at least 1.")
    quantization.whole_pages(c, state_cache=cache)
    _table(c, "state_block_table", table)
    if start_pos is not None:
        c.integers("start_pos", start_pos, "B")
        c.contiguous(start_pos=start_pos)
    ring(c, table, c.sizes["P"], ratio, coff, mode)


def state_mode(c: Checker, name: str, mode: int) -> None:
    c.require(
        mode != 3,
        f"`{name}` is 3 (a running maximum, sum and value for each channel), expected 1 (by "
        "page) or 2 (ring): such a state cannot go back behind a rejected token.",
    )
    c.one_of(name, mode, BY_PAGE, RING)


def ring(c: Checker, table: Tensor, page: Any, ratio: int, coff: int, mode: int) -> None:
    """`table` names rows for the tokens of windows that are open."""
    reach, least = table.shape[1] * page, coff * ratio - 1
    c.require(
        mode == BY_PAGE or reach >= least,
        f"`state_block_table` names a ring of {reach} rows ({table.shape[1]} pages of "
        f"{page}), expected at least coff * cmp_ratio - 1 = {least}, and one more for each "
        "token that a call may take back.",
    )


def _table(c: Checker, name: str, table: Tensor) -> None:
    c.integer(name, table)
    c.require(
        table.ndim == 2 and table.shape[0] == c.sizes["B"],
        f"`{name}` has shape {list(table.shape)}, expected [B, max_pages] with B={c.sizes['B']}.",
    )
    c.dense_rows(**{name: table})


def _entries(
    c: Checker,
    x: Tensor,
    cache: Tensor | None,
    scales: Tensor | None,
    table: Tensor | None,
    kind: str,
) -> None:
    c.one_of("kind", kind, *KINDS)
    if cache is None:
        for name, given in (("cmp_scale_cache", scales), ("cmp_block_table", table)):
            c.require(given is None, f"`{name}` is given and `cmp_cache` is None, expected both.")
        c.require(kind == "none", f"`kind` is {kind!r}, and there is no `cmp_cache`: leave it out.")
        return
    if table is None:
        c.fail("`cmp_block_table` is missing, and `cmp_cache` needs it.")
        return
    _table(c, "cmp_block_table", table)
    size, own = c.sizes["D"], Checker(c.op)  # pages of its own
    own.sizes["D"] = size
    if kind == "none":
        c.same_dtype(x=x, cmp_cache=cache)
        c.require(scales is None, "`cmp_scale_cache` is given, expected None with kind='none'.")
        own.shape("cmp_cache", cache, "pages P 1 D")
        quantization.whole_pages(c, cmp_cache=cache)
    elif kind == "fp8" and size == quantized.V4_WIDTH:
        c.require(
            scales is None,
            "`cmp_scale_cache` is given, expected None: rows have scales of their own.",
        )
        quantization.v4_rows(own, "cmp_cache", cache)
    else:
        wanted = f"{quantized.INDEX} or {quantized.V4_WIDTH}" if kind == "fp8" else quantized.INDEX
        c.require(size == quantized.INDEX, f"D is {size}, expected {wanted} with kind={kind!r}.")
        cache, scales = quantization.unpacked(own, kind, cache, scales, "cmp_cache", "kind")
        if scales is None:
            c.fail("`cmp_scale_cache` is missing, expected [pages, P, 1], a scale for each entry.")
            return
        c.dtype("cmp_scale_cache", scales, *quantization.SCALES[kind])
        own.sizes["pages"], own.sizes["P"] = cache.shape[:2]
        own.shape("cmp_scale_cache", scales, "pages P 1")
        quantization.whole_pages(c, cmp_cache=cache, cmp_scale_cache=scales)
    entry_page(c, "cmp_cache", cache.shape[1])


def entry_page(c: Checker, name: str, page: int) -> None:
    """How many entries a page may have: the tokens of a page over cmp_ratio."""
    c.require(
        page in layouts.SMALL_PAGES or (page > 0 and page % 16 == 0),
        f"`{name}` has pages of {page} entries, expected 1, 2, 4, 8 or a multiple of 16.",
    )


def fake(
    x: Tensor,
    wkv: Tensor,
    coff: int,
    cmp_ratio: int,
    cu_seqlens: Tensor | None,
    return_cmp_kv: bool,
    **_: Any,
) -> Tensor:
    if not return_cmp_kv:
        return x.new_empty([0])
    size = compressed.channels(wkv, coff)
    return x.new_empty([*compressed.rows(x, cu_seqlens, cmp_ratio), size])
