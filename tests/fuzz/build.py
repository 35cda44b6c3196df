# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The arguments of a case: the same numbers in every dtype, zero where nobody may read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from custom.dispatch.env import by_reference
from torch import Tensor

import custom
from custom.bench.sparse_attention import INDEXER_PROLOG, MLA_PROLOG

from ..support import convolution, kda, layer_v4, quantization, ragged
from ..support.blocks import Problem as Blocks
from ..support.delta_rule import Sequences, Step, moved
from ..support.layer import CACHES, P, formatted, layer
from ..support.samples import sample
from ..support.selected import random_indices
from ..support.shared_kv import Problem, packed
from .draw import KIND, Case

Arguments = dict[str, Any]
Garbage = dict[str, Tensor]  # where a tensor's numbers are nobody's
CPU = torch.device("cpu")
_INDEXER_PROLOG = INDEXER_PROLOG | {"query_norm": "query_norm"}


def accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def _layer(case: Case, dtype: torch.dtype) -> tuple[Arguments, Garbage]:
    b, s, reach = case["b"], case["s"], case["pages"] * P
    sizes = {name: case[name] for name in ("h", "ranks", "n", "plain", "rank", "rotary", "pages")}
    given = layer(b, min(s, reach), index=(case["index_heads"], case["index_size"]), **sizes)
    seen, table = given["act_seqs"], given["block_table"]
    if case["short"] and b:
        seen[0] = s // 2
    position = (seen[:, None] - s + torch.arange(s)).long()
    slot = table.gather(1, position.clamp(min=0) // P) * P + position.clamp(min=0) % P
    given["cache_index"] = slot.where(position >= 0, -1).to(torch.int32)
    used = torch.arange(case["pages"])[None] * P < seen[:, None]
    garbage = {}
    for name in CACHES:
        unread = torch.ones(given[name].shape[:2], dtype=torch.bool)
        for row, length in zip(table.tolist(), seen.tolist(), strict=True):
            for at in range(length):
                unread[row[at // P], at % P] = False
        garbage[name] = unread[..., None, None].expand(given[name].shape)
        given[name] = given[name].masked_fill(garbage[name], 0)
    given["block_table"] = table.where(used, -1)
    given["sparse_indices"] = random_indices(b * s, reach, case["kept"], 1).view(
        b, s, 1, case["kept"]
    )
    own = getattr(torch, case["dtype"])
    given = {n: x.to(own).double() if x.is_floating_point() else x for n, x in given.items()}
    given = formatted(given, dtype, case["weights"], CPU)
    form = dict(weight_format="nz" if case["weights"] == "flat" else case["weights"])
    pairs = {"npu_mla_prolog_pto": MLA_PROLOG, "npu_indexer_prolog_pto": _INDEXER_PROLOG}.get(
        case["op"]
    )
    if pairs is not None:
        out = {theirs: given[ours] for theirs, ours in pairs.items()} | form
        if case["op"] == "npu_mla_prolog_pto" and not case.get("query_latent", True):
            out |= dict(weight_dq=None, rmsnorm_gamma_cq=None)
            out |= dict(token_x=given["query_norm"], weight_dkv_kr=given["plain_dkv_kr"])
        out["rope_interleaved"] = case["interleaved"]
        return out, {name: x for name, x in garbage.items() if name in out}
    out = given | form | dict(rope_interleaved=case["interleaved"])
    del out["query_norm"], out["plain_dkv_kr"]
    if case["op"] == "npu_sparse_attention_shared_pto":
        out = {n: x for n, x in out.items() if not n.startswith(("w_idx", "in_", "index_k"))}
        del garbage["index_k_cache"]
        return out, garbage
    del out["sparse_indices"]
    # as many as there are: keys that nearly tie may not change places at the edge
    return out | dict(sparse_count=reach, index_rope_interleaved=not case["interleaved"]), garbage


class _Ragged:
    """Packs what is drawn by request; what no request owns is zero, and marked."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.layout_query, self.layout_key = case["layouts"]
        self.garbage: Garbage = {}
        self.arguments: Arguments = {}
        self.each = case.get("m", 1)  # tokens of a key
        self.page = case["entry_page"] if self.each > 1 else ragged.PAGE
        self.held = [length // self.each for length in case["keys"]]
        self.table, self.pages = ragged.shuffled_table(self.held, page=self.page)

    def _put(self, name: str, packed: Tensor, dtype: torch.dtype) -> None:
        if packed.is_floating_point():
            self.garbage[name] = packed.isnan()
            packed = packed.nan_to_num(0).to(dtype)
        self.arguments[name] = packed

    def _pack(self, parts: list[Tensor], layout: str, shape: tuple[int, ...]) -> Tensor:
        if not parts:
            lead = (self.case["spare"],) if layout == "TND" else (0, self.case["spare"])
            return torch.zeros(*lead, *shape)
        return ragged.pack(parts, layout, CPU, self.case["spare"])

    def rows(self, name: str, dtype: torch.dtype, *shape: int) -> None:
        parts = [torch.randn(n, *shape, dtype=torch.float64) for n in self.case["rows"]]
        self._put(name, self._pack(parts, self.layout_query, shape), dtype)

    def keys(self, name: str, dtype: torch.dtype, size: int) -> None:
        parts = [torch.randn(n, size, dtype=torch.float64) for n in self.held]
        if self.layout_key == "PA_BSND":
            if parts:
                packed = ragged.to_pages(parts, self.table, self.pages, CPU, self.page)
            else:
                packed = torch.zeros(self.pages, self.page, 1, size)
        else:
            packed = self._pack([x[:, None] for x in parts], self.layout_key, (1, size))
        self._put(name, packed, dtype)

    def indices(self, block: int = 1) -> None:
        pairs = zip(self.case["rows"], self.case["keys"], strict=True)
        parts = [random_indices(rows, keys, self.case["k"], block) for rows, keys in pairs]
        packed = self._pack(parts, self.layout_query, (1, self.case["k"]))
        self._put("sparse_indices", packed.to(torch.int32), torch.int32)

    def lengths(self, query: str, key: str) -> None:
        for name, layout, values in (
            (query, self.layout_query, self.case["rows"]),
            (key, self.layout_key, self.case["keys"]),
        ):
            given = torch.tensor(values, dtype=torch.int32)
            self.arguments[name] = given.cumsum(0).int() if layout == "TND" else given
        if self.layout_key == "PA_BSND":
            self.arguments["block_table"] = self.table


def _lightning_indexer(case: Case, dtype: torch.dtype) -> tuple[Arguments, Garbage]:
    p, n, d = _Ragged(case), case["n"], case["d"]
    p.rows("query", dtype, n, d)
    p.rows("weights", dtype, n)
    p.keys("key", dtype, d)
    p.lengths("actual_seq_lengths_query", "actual_seq_lengths_key")
    options = dict(sparse_mode=case["mode"])
    if case["op"].endswith("_grad"):
        p.rows("dy", dtype, 1, case["k"])
        p.indices()
        return p.arguments | options | dict(layout=p.layout_query), p.garbage
    options |= dict(layout_query=p.layout_query, layout_key=p.layout_key, cmp_ratio=p.each)
    options |= dict(sparse_count=case["k"], select_tail=case["tail"] and p.each > 1)
    if case["holes"] and "block_table" in p.arguments:
        p.arguments["block_table"][:, 1:2] = -1
    if case["op"] == "npu_lightning_indexer":
        options["return_value"] = True
    if "quant" in case["op"]:
        _in_8_bits(p, case["eight"], dtype)
    return p.arguments | options, p.garbage


def _in_8_bits(p: _Ragged, kind: str, dtype: torch.dtype) -> None:
    """Queries and keys with their scales, which alone are nobody's where these are."""
    given = p.arguments
    narrow = torch.float32 if dtype is torch.float64 else dtype
    half = kind == "int8" or narrow is torch.float16
    for name in ("query", "key"):
        values, scale = quantization.quantized(given[name], kind, "fp32")
        of = torch.int8 if kind == "int8" else torch.float8_e4m3fn
        values = torch.from_numpy(values).view(of)
        by = torch.from_numpy(scale).to(narrow if half else torch.float32)
        given |= {name: values, f"{name}_dequant_scale": by}
        p.garbage[f"{name}_dequant_scale"] = p.garbage.pop(name)[..., 0]
    given["weights"] = given["weights"].to(narrow if half else torch.float32)
    given |= dict(query_quant_mode=0, key_quant_mode=0)


def _sparse_flash_attention(case: Case, dtype: torch.dtype) -> tuple[Arguments, Garbage]:
    p, n, d = _Ragged(case), case["n"], case["d"]
    p.rows("query", dtype, n, d)
    p.keys("key", dtype, d)
    if case["own_value"]:
        p.keys("value", dtype, d)
    if case["dr"] or not case.get("absent", True):
        p.rows("query_rope", dtype, n, case["dr"])
        p.keys("key_rope", dtype, case["dr"])
    p.indices(case["block"])
    p.lengths("actual_seq_lengths_query", "actual_seq_lengths_kv")
    options: Arguments = dict(
        layout_query=p.layout_query,
        layout_kv=p.layout_key,
        scale_value=0.2,
        sparse_mode=case["mode"],
        sparse_block_size=case["block"],
        return_softmax_lse=True,
    )
    if case["sinks"]:
        options["sinks"] = torch.randn(n, dtype=torch.float64).to(accumulator(dtype))
    given = dict(value=None) | p.arguments | options
    if not case["op"].endswith("_grad"):
        return given, p.garbage
    p.rows("d_out", dtype, n, d)
    wide = {
        name: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x
        for name, x in given.items()
    }
    out, top, total = custom.npu_sparse_flash_attention(**wide)
    for name in ("layout_query", "layout_kv", "return_softmax_lse"):
        del given[name]
    given["actual_seq_qlen"] = given.pop("actual_seq_lengths_query")
    given["actual_seq_kvlen"] = given.pop("actual_seq_lengths_kv")
    kind = accumulator(dtype)
    given |= dict(out=out.to(dtype), softmax_max=top.to(kind), softmax_sum=total.to(kind))
    if case["of_sum"]:
        given["d_softmax_sum"] = torch.randn(total.shape, dtype=torch.float64).to(kind)
    return given | dict(d_out=p.arguments["d_out"], layout=p.layout_query), p.garbage


def _over_blocks(case: Case, dtype: torch.dtype) -> tuple[Arguments, Garbage]:
    if not case["rows"]:
        return sample(case["op"], CPU, dtype, case["seed"], B=0), {}
    problem = Blocks(
        case["rows"],
        case["keys"],
        heads=case["n"],
        shared=case["shared"],
        size=case["d"],
        block=case["block"],
        page=case["page"],
        chosen=case["k"],
        own=case["own"],
        counts=case["counts"],
        sinks=case["sinks"],
        spare=case["spare"],
    )
    if case["op"] == "npu_block_indexer":
        given = problem.scored(CPU, dtype)
        init, local = case["forced"]
        count = max(case["k"], init + local)
        given |= dict(init_blocks=init, local_blocks=local, top_k=count, return_value=True)
    else:
        given = problem.arguments(CPU, dtype) | dict(return_softmax_lse=True)
    garbage = {name: given[name].isnan() for name in ("key", "value") if name in given}
    return given | {n: given[n].masked_fill(where, 0) for n, where in garbage.items()}, garbage


def _shared_kv(case: Case, dtype: torch.dtype) -> tuple[Arguments, Garbage]:
    requests = [*zip(case["rows"], case["keys"], strict=False)]
    if not requests:
        return sample(case["op"], CPU, dtype, case["seed"], B=0), {}
    problem = Problem(
        requests,
        m=case["m"],
        count=case["k"] if case["picked"] else None,
        window=case["window"],
        heads=case["n"],
        size=case["d"],
        entry_page=case["entry_page"],
        sinks=case["sinks"],
        seed=case["seed"],
    )
    layout_q, layout_kv = case["layouts"]
    layout_kv = "PA_ND" if layout_kv == "PA_BSND" else layout_kv
    given = problem.arguments((layout_q, layout_kv), CPU, dtype)
    if case["op"] == "npu_kv_quant_sparse_attn_sharedkv":
        caches = {n: packed(given[n]) for n in ("ori_kv", "cmp_kv") if n in given}
        garbage = dict(q=given["q"].isnan())
        q = given["q"].masked_fill(garbage["q"], 0)
        return given | caches | dict(q=q, kv_quant_mode=1), garbage
    if case["op"].endswith("_grad"):
        wide = problem.arguments((layout_q, layout_kv), CPU, torch.float64)
        out, lse = custom.npu_sparse_attn_sharedkv(**wide)
        kind = accumulator(dtype)
        del given["return_softmax_lse"]
        given |= dict(
            cmp_kv=given.get("cmp_kv"),
            d_out=torch.randn(out.shape, dtype=torch.float64).to(dtype),
            out=out.to(dtype),
            softmax_lse=lse.to(kind),
        )
        if case["of_lse"]:
            given["d_softmax_lse"] = torch.randn(lse.shape, dtype=torch.float64).to(kind)
    garbage = {
        n: x.isnan() for n, x in given.items() if n in ("q", "ori_kv", "cmp_kv") and x is not None
    }
    return given | {n: given[n].masked_fill(where, 0) for n, where in garbage.items()}, garbage


def _latent_rows(case: Case, dtype: torch.dtype) -> tuple[Arguments, Garbage]:
    tokens, page, v4 = case["b"] * case["s"], case["page"], case["eight"] == "v4"
    keys = 0 if case.get("bare", False) and not v4 else 64
    size, width = (448, 584) if v4 else (512, 528 + 2 * keys)
    pages = -(-tokens // page) + 2
    step = -(-page * width // 576) * 576 if v4 else page * width
    rows = torch.zeros(pages, step, dtype=torch.uint8)[:, : page * width]
    rotary = torch.float16 if not v4 and case["dtype"] == "float16" else torch.bfloat16
    slots = torch.randperm(pages * page)[:tokens].int()
    options: Arguments = dict(kind="fp8", row_layout="v4")
    if not v4:
        order = "nope_scale_rope" if case["turned"] else "nope_rope_scale"
        options = dict(kind=case["eight"], row_layout=order, rope_head_dim=keys)
        options["scale_format"] = "ue8m0" if case["power"] else "fp32"
        if case["clip"]:
            options["k_nope_clip_alpha"] = torch.rand(1) + 0.2
    return options | dict(
        ckv=torch.randn(tokens, size, dtype=torch.float64).to(dtype),
        k_rope=torch.randn(tokens, keys, dtype=torch.float64).to(rotary),
        rows=rows.view(pages, page, 1, width),
        slots=slots.masked_fill(torch.rand(tokens) < 0.2, -1),
    ), {}


def _kl_loss(case: Case, dtype: torch.dtype) -> tuple[Arguments, Garbage]:
    attention, garbage = _sparse_flash_attention(
        case | dict(op="npu_sparse_flash_attention", own_value=False, sinks=False), dtype
    )
    wide = {
        name: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x
        for name, x in attention.items()
    }
    _, top, total = custom.npu_sparse_flash_attention(**wide)
    p = _Ragged(case)
    p.rows("query_index", dtype, case["ni"], case["di"])
    p.keys("key_index", dtype, case["di"])
    p.rows("weights", dtype, case["ni"])
    kept = (
        "query",
        "key",
        "query_rope",
        "key_rope",
        "sparse_indices",
        "sparse_mode",
        "scale_value",
    )
    given = {name: attention[name] for name in kept if name in attention} | p.arguments
    kind = accumulator(dtype)
    given |= dict(softmax_max=top.to(kind), softmax_sum=total.to(kind), layout=p.layout_query)
    given["actual_seq_qlen"] = attention["actual_seq_lengths_query"].tolist()
    given["actual_seq_klen"] = attention["actual_seq_lengths_kv"].tolist()
    return given, {name: x for name, x in (garbage | p.garbage).items() if name in given}


def _loss(case: Case, dtype: torch.dtype) -> tuple[Arguments, Garbage]:
    b, n, s, s2, k = (case[name] for name in ("b", "n", "s", "s2", "k"))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64).to(dtype)

    indices = random_indices(b * s, s2, k, 1).view(b, s, k)
    indices[..., -1] = -1  # no slot twice: which of them counts is not said
    common = dict(index_score=normal(b, s, k), indices=indices, chunk_offset=case["offset"])
    kind = accumulator(dtype)
    if case["op"].endswith("backward"):
        gradients = dict(grad_loss=normal(b, s).to(kind), target=normal(b, s, k).abs().to(kind))
        return common | gradients | dict(key_length=s2), {}
    given = dict(query=normal(b, n, s, case["d"]), key=normal(b, s2, case["d"]), scaling=0.2)
    if case["dr"]:
        given |= dict(query_rope=normal(b, n, s, case["dr"]), key_rope=normal(b, s2, case["dr"]))
    if case["lse"]:
        given["softmax_lse"] = (normal(b, n, s).double() / 4 + 3).to(kind)
    return given | common, {}


def _fused(case: Case, dtype: torch.dtype) -> tuple[Arguments, Garbage]:
    hk, heads, d, dv = case["hk"], case["hk"] * case["groups"], case["d"], case["dv"]
    rows, keys = case["rows"], case["keys"][: len(case["rows"])]
    garbage: Garbage = {}
    given: Arguments = dict(causal=case["causal"], window=case["window"] or None)
    sides = (("q", heads, rows, d), ("k", hk, keys, d), ("v", hk, keys, dv))
    for name, n, lengths, size in sides:
        if case["packed"]:
            x = torch.randn(sum(lengths) + case["spare"], n, size, dtype=torch.float64)
            garbage[name] = torch.zeros_like(x, dtype=torch.bool)
            garbage[name][sum(lengths) :] = True
            x = x.masked_fill(garbage[name], 0)
        else:
            x = torch.randn(case["b"], n, lengths[0], size, dtype=torch.float64)
        given[name] = x.to(dtype)
    if case["packed"]:
        for name, lengths in (("cu_seqlens_q", rows), ("cu_seqlens_k", keys)):
            given[name] = torch.tensor([0, *lengths]).cumsum(0).int()
    if not case["op"].endswith("backward"):
        return given, garbage
    wide = {n: x.double() if n in ("q", "k", "v") else x for n, x in given.items()}
    o, lse = torch.ops.custom.npu_fused_attention(**wide)
    grad = torch.randn(o.shape, dtype=torch.float64).to(dtype)
    return given | dict(o=o.to(dtype), lse=lse.to(accumulator(dtype)), grad_o=grad), garbage


def _chunks(case: Case, dtype: torch.dtype) -> tuple[Arguments, Garbage]:
    sequences = Sequences(
        tuple(case["lengths"]),
        N=case["n"],
        Nv=case["n"] * case["groups"],
        Dk=case["dk"],
        Dv=case["dv"],
        behind=case["behind"],
        state=torch.float32 if case["state"] else None,
        gates=case["gates"],
        rates=case["rates"] if case["gates"] else 0,
    )
    drawn = sequences.arguments()
    names = tuple(n for n in ("query", "key", "value", "beta", "g") if drawn[n] is not None)
    garbage = _unowned(drawn, case | dict(packed=True, before=0), names, 0)
    given = sequences.moved(drawn, dtype, CPU)
    if case["op"].endswith("_grad"):
        given["d_out"] = torch.randn(drawn["value"].shape, dtype=torch.float64).to(dtype)
    return given, garbage


def _unowned(drawn: Arguments, case: Case, names: tuple[str, ...], dim: int) -> Garbage:
    """Tokens before the first sequence and behind the last, which are zero from here on."""
    garbage: Garbage = {}
    for name in names if case["packed"] else ():
        nobodys = torch.ones_like(drawn[name], dtype=torch.bool)
        nobodys.narrow(dim, case["before"], sum(case["lengths"])).fill_(False)
        garbage[name] = nobodys
        drawn[name] = drawn[name].masked_fill(nobodys, 0)
    return garbage


def _equal(case: Case) -> tuple[int, ...]:
    """The lengths; those of a batch are the first's."""
    lengths = case["lengths"]
    return tuple(lengths if case["packed"] else lengths[:1] * len(lengths))


def _heads(case: Case) -> dict[str, int]:
    return dict(H=case["h"], HV=case["h"] * case["groups"], K=case["k"], V=case["v"])


def _kda(case: Case, dtype: torch.dtype) -> tuple[Arguments, Garbage]:
    sequences = kda.Case(
        _equal(case),
        packed=case["packed"],
        **_heads(case),
        before=case["before"],
        behind=case["behind"],
        state=torch.float32 if case["state"] else None,
        layout=case["layout"],
        gate=case["gate"],
        bias=case["bias"],
        norm=case["norm"],
        rates=case["rates"],
    )
    drawn = sequences.arguments()
    garbage = _unowned(drawn, case, ("q", "k", "v", "g", "beta"), 1)
    given = sequences.moved(drawn, dtype, CPU)
    if case["op"].endswith("_grad"):
        given["d_out"] = torch.randn(drawn["v"].shape, dtype=torch.float64).to(dtype)
        given["d_final_state"] = None
        if case["state"]:
            state = given["initial_state"]
            given["d_final_state"] = torch.randn(state.shape, dtype=torch.float64).to(state.dtype)
    return given, garbage


def _convolution(case: Case, dtype: torch.dtype) -> tuple[Arguments, Garbage]:
    names = ("packed", "before", "behind", "history", "bias", "activation")
    lengths = _equal(case) or (() if case["packed"] else (0,))
    whole = convolution.Whole(
        lengths, D=case["d"], W=case["w"], **{name: case[name] for name in names}
    )
    drawn = whole.arguments()
    garbage = _unowned(drawn, case, ("x",), 0)
    given = whole.moved(drawn, dtype, CPU)
    if case["op"].endswith("_grad"):
        given["d_out"] = torch.randn(drawn["x"].shape, dtype=torch.float64).to(dtype)
        final = len(lengths), case["w"] - 1, case["d"]
        given["d_final_states"] = torch.randn(*final, dtype=torch.float64).to(dtype)
    return given, garbage


def _step(case: Case, dtype: torch.dtype) -> tuple[Arguments, Garbage]:
    slots = list(case["slots"])
    if case["idle"]:
        slots[0] = -1
    lengths = tuple(case["lengths"])
    step = Step(
        B=case["b"],
        T=sum(lengths) if lengths else case["t"],
        **_heads(case),
        layout=case["layout"],
        kda=case["kda"],
        norm=case["norm"],
        slots=tuple(slots),
        lengths=lengths or None,
        options=dict(allow_neg_eigval=case["twice"]),
    )
    return moved(step.arguments(), dtype, step, CPU), {}


def _layer_step(case: Case, dtype: torch.dtype) -> tuple[Arguments, Garbage]:
    slots = list(case["slots"])
    if case["idle"] and slots:
        slots[0] = -1
    step = convolution.Layer(
        B=case["b"],
        S=case["s"],
        N=case["n"],
        Nv=case["n"] * case["groups"],
        Dk=case["k"],
        Dv=case["v"],
        W=case["w"],
        L=case["w"] - 1 + case["room"],
        layout=case["layout"],
        slots=tuple(slots),
        sigmoid=case["activation"] == "sigmoid",
        bias=case["bias"],
        rows=case["kept"],
        parents=case["parents"],
        kda=case["kda"],
        flat=case["flat"],
        bound=case["bound"] or None,
        twice=case["twice"],
    )
    return step.arguments(dtype, CPU), {}


def _compressor(case: Case, dtype: torch.dtype) -> tuple[Arguments, Garbage]:
    b, d, m, coff = len(case["lengths"]), case["d"], case["ratio"], case["coff"]
    own, wide = getattr(torch, case["dtype"]), accumulator(dtype)

    def drawn(*shape: int, rounded: bool = True, std: float = 1.0) -> Tensor:
        x = torch.randn(*shape, dtype=torch.float64) * std
        return x.to(own).to(dtype) if rounded else x.float().to(wide)

    lengths = torch.tensor(case["lengths"], dtype=torch.int32)
    size = max([1, *case["lengths"]]) + case["spare"]
    bounds = torch.cat([lengths.new_zeros(1), lengths.cumsum(0).int()])
    shape = [int(bounds[-1]) + case["spare"]] if case["packed"] else [b, size]
    rows = [-(-size // m)] if not case["packed"] else []
    rows = [b, *rows] if rows else [min(shape[0], shape[0] // m + b)]
    angles = case["dr"] if case["full"] else case["dr"] // 2
    given: Arguments = dict(
        x=drawn(*shape, case["h"]),
        wkv=drawn(coff * d, case["h"], std=case["h"] ** -0.5),
        wgate=drawn(coff * d, case["h"], std=case["h"] ** -0.5),
        ape=drawn(m, coff * d, rounded=False),
        norm_weight=drawn(d, rounded=False),
        rope_sin=drawn(*rows, angles),
        rope_cos=drawn(*rows, angles),
        rope_head_dim=case["dr"],
        cmp_ratio=m,
        coff=coff,
        rotary_mode=2 if case["pairs"] else 1,
        hadamard=case["hadamard"],
    )
    given |= dict(cu_seqlens=bounds) if case["packed"] else dict(seqused=lengths)
    if case["op"] != "npu_compressor":
        return given | (dict(d_out=drawn(*rows, d)) if case["op"].endswith("_grad") else {}), {}
    page, entry_page = case["page"], case["entry_page"]
    starts = [case["start"] + 3 * i for i in range(b)]
    reach = max([0, *map(sum, zip(starts, case["lengths"], strict=True))])
    columns = -(-(coff * m - 1 + case["room"] if case["ring"] else reach) // page) or 1
    kept = -(-(reach // m + 1) // entry_page)

    def table(columns: int) -> tuple[Tensor, int]:
        pages = torch.randperm(b * columns + 2)[: b * columns].view(b, columns).int()
        if case["holes"]:
            pages[:, columns // 2 :: 3] = -1
        return pages, b * columns + 2

    states, count = table(columns)
    given |= dict(
        state_cache=drawn(count, page, (2 if case["gate"] else 1) * coff * d, rounded=False),
        state_block_table=states,
        start_pos=torch.tensor(starts, dtype=torch.int32),
        cache_mode=2 if case["ring"] else 1,
        return_cmp_kv=case["returned"],
        rope_slice="first" if case["first"] else "last",
    )
    if not case["gate"]:
        given |= dict(wgate=None, ape=None)
    if not case["norm"]:
        given["norm_weight"] = None
    if not case["rope"]:
        given |= dict(rope_sin=None, rope_cos=None, rope_head_dim=0)
    if case["layer_norm"] and coff == 1:
        given |= {name: drawn(d, rounded=False) for name in ("ln_weight", "ln_bias")}
    entries, count = table(kept)
    kind = case["pages"]
    if kind == "none":
        cache: Arguments = dict(cmp_cache=drawn(count, entry_page, 1, d))
    elif kind == "v4":
        rows = torch.zeros(count, entry_page, 1, 584, dtype=torch.uint8)
        cache = dict(cmp_cache=rows, kind="fp8")
    elif kind == "fp8":
        cache = dict(cmp_cache=torch.zeros(count, entry_page, 132, dtype=torch.uint8), kind=kind)
    else:
        cache = dict(
            cmp_cache=torch.zeros(count, entry_page, 1, d, dtype=torch.int8),
            cmp_scale_cache=torch.zeros(count, entry_page, 1),
            kind=kind,
        )
    return given | cache | dict(cmp_block_table=entries), {}


def _layer_v4(case: Case, dtype: torch.dtype) -> tuple[Arguments, Garbage]:
    steps, d = case["s"], case["d"]
    laid = {"nz": custom.to_nz, "linear": lambda w: w.mT.contiguous()}.get(case["weights"])
    given = layer_v4.drawn(
        case["kind"],
        CPU,
        getattr(torch, case["dtype"]),
        starts=case["starts"],
        steps=steps,
        used=case["used"],
        m=case["m"],
        entry_page=case["entry_page"],
        H=case["h"],
        Rq=case["ranks"],
        D=d,
        Dr=case["dr"],
        Ni=case["index_heads"],
        Di=case["di"],
        heads=case["n"],
        groups=case["groups"],
        output=case["output"],
        mode=2 if case["ring"] else 1,
        window=case["window"],
        holes=case["holes"],
    )
    given |= layer_v4.quantized(given, case["quant"])
    for name, x in given.items():
        if isinstance(x, Tensor) and not name.startswith("dequant_scale_"):
            if x.is_floating_point() and x.element_size() > 1:
                x = x.to(accumulator(dtype) if name in layer_v4.WIDE else dtype)
            matrix = name in ("w_dq", "w_uq", "w_kv", "w_idx_qb", "w_idx_proj", "w_o_a", "w_o_b")
            given[name] = laid(x) if laid is not None and matrix else x
    given |= dict(weight_format=case["weights"], sinks=given["sinks"] if case["sinks"] else None)
    if case["kind"] == "CSA":
        given |= dict(sparse_count=64, index_hadamard=case["hadamard"])
    return given, {}


def _sampled(case: Case, dtype: torch.dtype) -> tuple[Arguments, Garbage]:
    return sample(case["op"], CPU, dtype, case["seed"], B=case["b"], S=case["s"]), {}


def _sized(*names: str) -> Callable[[Case, torch.dtype], tuple[Arguments, Garbage]]:
    """The op's sample, with these sizes as well."""

    def build(case: Case, dtype: torch.dtype) -> tuple[Arguments, Garbage]:
        sizes = {name: case[name] for name in names}
        b, s = case["b"], case["s"]
        given = sample(case["op"], CPU, dtype, case["seed"], B=b, S=s, **sizes)
        if case.get("quant"):  # their NZ has other columns
            given |= {n: custom.from_nz(x) for n, x in given.items() if n.startswith("w_")}
            given |= layer_v4.quantized(given, case["quant"]) | dict(weight_format="nd")
        return given, {}

    return build


def _latent(case: Case, dtype: torch.dtype) -> tuple[Arguments, Garbage]:
    """Dense attention over paged latents."""
    p, n, d = _Ragged(case), case["n"], case["d"]
    p.rows("query", dtype, n, d)
    p.keys("key", dtype, d)
    if case["dr"]:
        p.rows("query_rope", dtype, n, case["dr"])
        p.keys("key_rope", dtype, case["dr"])
    p.lengths("actual_seq_qlen", "actual_seq_kvlen")
    given, layout = p.arguments, p.layout_query
    if case["turned"]:
        layout += "_NTD" if layout == "TND" else "_NBSD"
    elif case["flat"] and layout == "BSND":
        layout = "BSH"
        for name in ("query", "query_rope"):
            if name in given:
                given[name] = given[name].flatten(-2)
                p.garbage[name] = p.garbage[name].flatten(-2)
    options: Arguments = dict(
        num_query_heads=n,
        num_key_value_heads=1,
        softmax_scale=0.2,
        input_layout=layout,
        sparse_mode=case["mode"],
        return_softmax_lse=True,
    )
    if case["mode"] == 4:
        options |= dict(pre_tokens=case["window"], next_tokens=0)
    if case["sinks"]:
        options["learnable_sink"] = torch.randn(n, dtype=torch.float64).to(accumulator(dtype))
    return in_one(case["op"], given) | options, p.garbage


def in_one(op: str, given: Arguments) -> Arguments:
    """What an op takes twice as one tensor."""
    same = dict(value=given["key"]) if op == "npu_fused_infer_attention_score_v2" else {}
    return given | same


_BUILD: dict[str, Callable[[Case, torch.dtype], tuple[Arguments, Garbage]]] = {
    "layer": _layer,
    "indexer": _lightning_indexer,
    "attention": _sparse_flash_attention,
    "blocks": _over_blocks,
    "shared kv": _shared_kv,
    "shared kv rows": _shared_kv,
    "latents": _latent_rows,
    "kl loss": _kl_loss,
    "loss": _loss,
    "fused": _fused,
    "latent": _latent,
    "step": _step,
    "chunks": _chunks,
    "kda": _kda,
    "layer step": _layer_step,
    "convolution": _convolution,
    "compressor": _compressor,
    "streams": _sized("h"),
    "shared row": _sized("n", "d", "dr", "di"),
    "grouped": _sized("n", "d", "dr", "groups"),
    "layer v4": _layer_v4,
    "sample": _sampled,
}


class Impossible(Exception):
    """No call has these sizes: a step of making a case smaller went too far."""


_built: dict[tuple[str, torch.dtype], tuple[Arguments, Garbage]] = {}


def build(case: Case, dtype: torch.dtype) -> tuple[Arguments, Garbage]:
    """By keyword, on the CPU.  Those of the last case are kept, which is checked more than once:
    nobody writes into them."""
    of = (str(case), dtype)
    if of not in _built:
        if any(case != of[0] for case, _ in _built):
            _built.clear()
        torch.default_generator.manual_seed(case["seed"])  # those of devices cost more than a call
        try:
            with by_reference():
                _built[of] = _BUILD[KIND.get(case["op"], "sample")](case, dtype)
        except Exception as error:
            raise Impossible(f"{type(error).__name__}: {error}") from error
    return _built[of]
