# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Arguments and outputs of npu_fused_infer_attention_score_v2: dense attention over paged latents.

    input_layout   query, query_rope             out
    BSH            [B, S, N*R]                   [B, S, N*R]
    BSND           [B, S, N, R]                  [B, S, N, R]
    BSND_NBSD      [B, S, N, R]                  [N, B, S, R]
    TND            [T, N, R]                     [T, N, R]
    TND_NTD        [T, N, R]                     [N, T, R]

    key, value     [pages, P, 1, R], [pages, 1, P, R] or [pages, P, R]: one tensor
    lse            [B, N, S, 1] or [T, N, 1]

Token j of the Lq tokens of a request with L keys stands at p = L - Lq + j.  It sees all keys
(sparse_mode 0), those up to p (3), or those from p - pre_tokens to p (4).  A row that sees nothing,
or is of no request, gets out 0 and lse -inf.  A request begins where all before it have ended.
"""

from __future__ import annotations

from typing import Any, TypedDict

from torch import Tensor

from ...check import Checker
from ...op_spec import UNLIMITED
from ...values import is_real
from ..common import layouts
from ..sparse_attention.sparse_flash_attention import statistics

GE = "FusedInferAttentionScore"
NO_LIMIT = 2**31 - 1  # torch_npu's of pre_tokens and next_tokens, here
WIDEST = 512  # of a latent

# what needs scales, none of which is taken
SCALES = (
    "dequant_scale_query", "dequant_scale_key", "dequant_offset_key", "dequant_scale_value",
    "dequant_offset_value", "dequant_scale_key_rope", "quant_scale_out", "quant_offset_out",
    "quant_scale_p",
)  # fmt: skip
MODES = ("query_quant_mode", "key_quant_mode", "value_quant_mode")
KINDS = (
    "query_dtype", "key_dtype", "value_dtype", "query_rope_dtype", "key_rope_dtype",
    "key_shared_prefix_dtype", "value_shared_prefix_dtype", "dequant_scale_query_dtype",
    "dequant_scale_key_dtype", "dequant_scale_value_dtype", "dequant_scale_key_rope_dtype",
    "out_dtype",
)  # fmt: skip
# the letters in front of "N R"
LAYOUTS = {"BSH": "B S", "BSND": "B S", "BSND_NBSD": "B S", "TND": "T", "TND_NTD": "T"}

SCHEMA = (
    "npu_fused_infer_attention_score_v2(Tensor query, Tensor key, Tensor value, *,"
    " Tensor? query_rope=None, Tensor? key_rope=None, Tensor? pse_shift=None,"
    " Tensor? atten_mask=None, Tensor? actual_seq_qlen=None, Tensor? actual_seq_kvlen=None,"
    f" Tensor? block_table=None, {', '.join(f'Tensor? {name}=None' for name in SCALES)},"
    " Tensor? learnable_sink=None, SymInt num_query_heads=1, SymInt num_key_value_heads=0,"
    f" float softmax_scale=1.0, SymInt pre_tokens={NO_LIMIT}, SymInt next_tokens={NO_LIMIT},"
    ' str input_layout="BSH", SymInt sparse_mode=0, SymInt block_size=0,'
    f" {', '.join(f'SymInt {name}=0' for name in MODES)}, SymInt inner_precise=0,"
    f" bool return_softmax_lse=False, {', '.join(f'SymInt? {name}=None' for name in KINDS)}"
    ") -> (Tensor, Tensor)"
)


class Arguments(TypedDict):
    query: Tensor
    key: Tensor
    value: Tensor
    query_rope: Tensor | None
    key_rope: Tensor | None
    pse_shift: Tensor | None
    atten_mask: Tensor | None
    actual_seq_qlen: Tensor | None
    actual_seq_kvlen: Tensor | None
    block_table: Tensor | None
    dequant_scale_query: Tensor | None
    dequant_scale_key: Tensor | None
    dequant_offset_key: Tensor | None
    dequant_scale_value: Tensor | None
    dequant_offset_value: Tensor | None
    dequant_scale_key_rope: Tensor | None
    quant_scale_out: Tensor | None
    quant_offset_out: Tensor | None
    quant_scale_p: Tensor | None
    learnable_sink: Tensor | None
    num_query_heads: int
    num_key_value_heads: int
    softmax_scale: float
    pre_tokens: int
    next_tokens: int
    input_layout: str
    sparse_mode: int
    block_size: int
    query_quant_mode: int
    key_quant_mode: int
    value_quant_mode: int
    inner_precise: int
    return_softmax_lse: bool
    query_dtype: int | None
    key_dtype: int | None
    value_dtype: int | None
    query_rope_dtype: int | None
    key_rope_dtype: int | None
    key_shared_prefix_dtype: int | None
    value_shared_prefix_dtype: int | None
    dequant_scale_query_dtype: int | None
    dequant_scale_key_dtype: int | None
    dequant_scale_value_dtype: int | None
    dequant_scale_key_rope_dtype: int | None
    out_dtype: int | None


def check(c: Checker, x: Arguments) -> None:
    c.require(
        x["input_layout"] in LAYOUTS,
        f"`input_layout` is {x['input_layout']!r}, expected one of "
        f"{', '.join(map(repr, LAYOUTS))}. Pass the query with tokens ahead of heads.",
    )
    _absent(c, x)
    _mask(c, x)
    _keys(c, x)
    _queries(c, x)
    layouts.lengths(
        c,
        "TND" if is_packed(x["input_layout"]) else "BSND",
        "PA_BSND",
        ("actual_seq_qlen", x["actual_seq_qlen"]),
        ("actual_seq_kvlen", x["actual_seq_kvlen"]),
        x["block_table"],
    )
    c.require(
        x["block_size"] in (0, c.sizes["P"]),
        f"`block_size` is {x['block_size']}, expected {c.sizes['P']} (from `key`), or 0: the pages "
        "say it.",
    )
    c.one_of("inner_precise", x["inner_precise"], 0, 1, 2, 3)
    sink = x["learnable_sink"]
    if sink is not None:
        c.dtype("learnable_sink", sink, *dict.fromkeys((statistics(x["query"]), x["query"].dtype)))
        c.shape("learnable_sink", sink, "N")
        c.contiguous(learnable_sink=sink)


def _absent(c: Checker, x: Arguments) -> None:
    """What torch_npu's op also does."""
    c.require(
        x["pse_shift"] is None,
        "`pse_shift` is given, expected None: scores have no bias. Leave it out.",
    )
    given: dict[str, Any] = {**x}
    for name in SCALES:
        c.require(
            given[name] is None,
            f"`{name}` is given, expected None: nothing is quantized here. Leave it out; "
            "npu_kv_quant_sparse_flash_attention reads latents of 8 bits.",
        )
    for name in MODES:
        c.require(
            given[name] == 0,
            f"`{name}` is {given[name]}, expected 0: nothing is quantized here. Leave it out.",
        )
    for name in KINDS:
        c.require(
            given[name] is None,
            f"`{name}` is {given[name]}, expected None: the tensors have their dtypes. Leave it "
            "out.",
        )


def _mask(c: Checker, x: Arguments) -> None:
    mode, window, behind = x["sparse_mode"], x["pre_tokens"], x["next_tokens"]
    c.require(
        mode in (0, 3, 4),
        f"`sparse_mode` is {mode}, expected 0 (all keys), 3 (causal, aligned at the last key) or 4 "
        "(causal, with a window of `pre_tokens`): masks as tensors and trees are not supported.",
    )
    if mode == 4:
        c.at_least("pre_tokens", window, 0)
        c.require(
            behind == 0,
            f"`next_tokens` is {behind}, expected 0 with sparse_mode 4: no row sees keys behind "
            "its own. Pass next_tokens=0.",
        )
    else:
        for name, value in (("pre_tokens", window), ("next_tokens", behind)):
            c.require(
                value in (NO_LIMIT, UNLIMITED),
                f"`{name}` is {value}, expected its default {NO_LIMIT} with sparse_mode {mode}. "
                "Pass sparse_mode=4 for a window.",
            )
    c.require(
        mode != 0 or x["atten_mask"] is None,
        "`atten_mask` is given with sparse_mode 0, expected None: no mask is read. Pass "
        "sparse_mode=3 for a causal one.",
    )


def _keys(c: Checker, x: Arguments) -> None:
    query, key, value, rope = x["query"], x["key"], x["value"], x["key_rope"]
    c.same_device(
        query=query,
        key=key,
        value=value,
        query_rope=x["query_rope"],
        key_rope=rope,
        actual_seq_qlen=x["actual_seq_qlen"],
        actual_seq_kvlen=x["actual_seq_kvlen"],
        block_table=x["block_table"],
        learnable_sink=x["learnable_sink"],
    )
    floats = dict(query=query, key=key, value=value, query_rope=x["query_rope"], key_rope=rope)
    c.floating("query", query)
    c.same_dtype(**floats)
    c.dense_rows(**floats)
    c.require(
        x["num_key_value_heads"] == 1 or (x["num_key_value_heads"], x["num_query_heads"]) == (0, 1),
        f"`num_key_value_heads` is {x['num_key_value_heads']} (0: as `num_query_heads`, "
        f"{x['num_query_heads']}), expected 1: keys are latents that all heads share. Expand them "
        "for npu_fused_attention otherwise.",
    )
    _pages(c, "key", key, "R")
    if rope is not None:
        _pages(c, "key_rope", rope, "Dr")
    c.require(
        (x["query_rope"] is None) == (rope is None),
        "only one of `query_rope` and `key_rope` is given, expected both or none. Pass the other "
        "as well, or join each with its latent.",
    )
    c.require(
        1 <= c.sizes["R"] <= WIDEST,
        f"`key` has {c.sizes['R']} channels, expected 1 to {WIDEST}. Pass rotary ones as "
        "`key_rope`.",
    )
    c.require(
        _is_same(key, value),
        "`value` is another tensor than `key`, expected the same one: the latents are both. Pass "
        "the key twice.",
    )


def _pages(c: Checker, name: str, key: Tensor, width: str) -> None:
    c.require(
        key.ndim != 5,
        f"`{name}` has five dimensions (pages in NZ), expected [pages, P, 1, {width}]. Pass the "
        "cache as it is without the format.",
    )
    four = key.ndim == 3 or (key.ndim == 4 and key.shape[1] == 1)
    c.shape(name, pages_of(key) if four else key, f"pages P 1 {width}")


def _is_same(key: Tensor, value: Tensor) -> bool:
    """Fake tensors have no memory that tells: a compiler makes two of one."""
    if key is value:
        return True
    laid = (key.shape, key.stride(), key.storage_offset())
    if laid != (value.shape, value.stride(), value.storage_offset()):
        return False
    both_real = is_real(key) and is_real(value) and not key.is_meta
    return not both_real or not key.numel() or key.data_ptr() == value.data_ptr()


def _queries(c: Checker, x: Arguments) -> None:
    layout, heads = x["input_layout"], x["num_query_heads"]
    c.at_least("num_query_heads", heads, 1)
    for name, width in (("query", "R"), ("query_rope", "Dr")):
        tensor = x["query"] if name == "query" else x["query_rope"]
        if tensor is None:
            continue
        if layout == "BSH":
            size = {f"N*{width}": heads * c.sizes[width]}
            c.shape(name, tensor, f"B S N*{width}", **size, N=heads)
        else:
            c.shape(name, tensor, f"{LAYOUTS[layout]} N {width}")
    c.require(
        heads == c.sizes["N"],
        f"`num_query_heads` is {heads}, expected {c.sizes['N']} (from `query`).",
    )


def is_packed(layout: str) -> bool:
    """Whether tokens of all requests follow each other."""
    return layout.startswith("TND")


def pages_of(key: Tensor) -> Tensor:
    """[pages, P, R], [pages, 1, P, R] and [pages, P, 1, R] as the latter, a view; P is above 1."""
    if key.ndim == 3:
        return key.unsqueeze(2)
    return key if key.shape[2] == 1 else key.transpose(1, 2)


def with_heads(query: Tensor, layout: str, heads: int) -> Tensor:
    """[B, S, N, R] or [T, N, R]."""
    return query.unflatten(-1, (heads, query.shape[-1] // heads)) if layout == "BSH" else query


def sizes(x: Arguments) -> tuple[int, int, int, int, int]:
    """(requests, tokens of one or packed, heads, rank, rope)."""
    query = with_heads(x["query"], x["input_layout"], x["num_query_heads"])
    *_, tokens, heads, rank = query.shape
    kv = x["actual_seq_kvlen"]
    assert kv is not None  # the check said so
    rope = 0 if x["key_rope"] is None else x["key_rope"].shape[-1]
    return kv.shape[0], tokens, heads, rank, rope


def shapes(query: Tensor, layout: str, heads: int) -> tuple[list[int], list[int]]:
    """Of out and lse."""
    *rows, _, rank = with_heads(query, layout, heads).shape
    if layout in ("TND_NTD", "BSND_NBSD"):
        out = [heads, *rows, rank]
    else:
        out = [*query.shape]
    return out, [*rows, heads, 1] if is_packed(layout) else [rows[0], heads, rows[1], 1]


def fake(
    query: Tensor, input_layout: str, num_query_heads: int, return_softmax_lse: bool, **_: Any
) -> tuple[Tensor, Tensor]:
    out, lse = shapes(query, input_layout, num_query_heads)
    return (
        query.new_empty(out),
        query.new_empty(lse if return_softmax_lse else [0], dtype=statistics(query)),
    )
