# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Both prologs and the layer where weights or caches are of int8.

Integer sums are exact, so a number differs from the reference's by its roundings to the working
dtype alone: a few land on the other side, and with one a byte may.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from custom.dispatch.common import nz, quantized
from custom.dispatch.reference.caches import index_cache_write, latent_cache_write
from torch import Tensor

from .. import memory
from ..case import Arguments, Case, Finding, Inputs
from ..conditions import with_
from ..controls import Control
from . import indexer_prolog_pto, mla_prolog_pto, sparse_attention_pto
from .mla_prolog_pto import PAGE

MLA, INDEXER, LAYER = "npu_mla_prolog_pto", "npu_indexer_prolog_pto", "npu_sparse_attention_pto"
V3, LIGHTNING = "npu_mla_prolog_v3", "npu_lightning_indexer_prolog_pto"
_SWAPPED = 1 / 200  # of the bytes may be off by one
# weight: its scale, the modes in which it has one
_SCALES = {
    "weight_dq": ("dequant_scale_w_dq", (2,)),
    "weight_uq_qr": ("dequant_scale_w_uq_qr", (1, 2)),
    "weight_dkv_kr": ("dequant_scale_w_dkv_kr", (2,)),
    "weight_qb": ("dequant_scale_w_qb", (1, 2)),
    "weight_k": ("dequant_scale_w_k", (2,)),
}


def int8(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """int8 and the float32 scales along `dim`, which is kept."""
    scale = x.float().abs().amax(dim, keepdim=True) / 127
    values = (x.float() / scale.masked_fill(scale == 0, 1)).round()
    return memory.guarded(values.to(torch.int8)), memory.guarded(scale)


def weight(w: Tensor, form: str) -> tuple[Tensor, Tensor]:
    """[K, N] in int8 as "nz", "flat", "nd" or "linear", a checkpoint's own [N, K]."""
    values, scale = int8(w, 0)
    if form == "linear":
        return memory.guarded(values.t().contiguous()), scale
    return values if form == "nd" else memory.guarded(nz.to_nz(values, flat=form == "flat")), scale


def in_mode(arguments: Arguments, mode: int, form: str) -> Arguments:
    """Drawn row-major: the weights as the mode and the form want them."""
    for name, (of_scale, modes) in _SCALES.items():
        if name in arguments and mode in modes:
            arguments[name], arguments[of_scale] = weight(arguments[name], form)
        elif name in arguments and form in ("nz", "flat"):
            arguments[name] = memory.guarded(nz.to_nz(arguments[name], flat=form == "flat"))
    if "weight_proj" in arguments and form in ("nz", "flat"):
        w = arguments["weight_proj"]
        arguments["weight_proj"] = memory.guarded(nz.to_nz(w, flat=form == "flat"))
    of_format = "nz" if form == "flat" else form
    return arguments | dict(weight_quant_mode=mode, weight_format=of_format)


def mla(
    batch: int,
    length: int,
    heads: int,
    mode: int = 2,
    *,
    form: str = "nz",
    rows: str | None = None,
    between: int = 0,
    alpha: float | None = None,
    smooth: bool = False,
    given: bool = False,
    **sizes: Any,
) -> Callable[[Inputs], Arguments]:
    """`rows` is the order of a cache of rows, whose bytes are tiny floats before; `given` tokens
    come in int8."""
    draw = mla_prolog_pto.prolog(batch, length, heads, form="nd", **sizes)

    def make(inputs: Inputs) -> Arguments:
        arguments = in_mode(draw(inputs), mode, form)
        if smooth:
            rank = arguments["rmsnorm_gamma_cq"].shape[0]
            wide = torch.rand(1, rank, generator=inputs.random) + 0.5
            arguments["smooth_scales_cq"] = memory.guarded(wide)
        if given:
            x = arguments["token_x"]
            values, scale = int8(x, -1)
            arguments |= dict(token_x=values, dequant_scale_x=scale.view(-1, 1))
        if rows is not None:
            pages = arguments["kv_cache"].shape[0]
            width = quantized.row_bytes(arguments["rope_sin"].shape[-1])
            cache = torch.ones(pages, PAGE + between, 1, width, dtype=torch.int8)
            arguments |= dict(
                kv_cache=memory.guarded(cache)[:, :PAGE],
                kr_cache=torch.zeros(0, dtype=inputs.dtype),
                kv_cache_quant_mode=3,
                ckvkr_repo_mode=1,
                quant_scale_repo_mode=1,
                row_layout=rows,
            )
        if alpha is not None:
            arguments["k_nope_clip_alpha"] = memory.guarded(torch.tensor([alpha]))
        return arguments

    return make


def indexer(
    batch: int,
    length: int,
    heads: int = 64,
    mode: int = 2,
    *,
    form: str = "nz",
    cache: bool = True,
    stored: torch.dtype = torch.float16,
    smooth: bool = False,
    given: bool = False,
    empty: bool = False,
    **sizes: Any,
) -> Callable[[Inputs], Arguments]:
    """`cache`: of int8, its scales `stored`; `given` query norms come in int8; `empty`: a key and a
    query of zeros among the others."""
    draw = indexer_prolog_pto.prolog(batch, length, heads, form="nd", **sizes)

    def make(inputs: Inputs) -> Arguments:
        arguments = in_mode(draw(inputs), mode, form)
        size, rank = arguments["ln_gamma_k"].shape[0], arguments["query_norm"].shape[-1]
        if smooth:
            wide = torch.rand(1, rank, generator=inputs.random) + 0.5
            arguments["smooth_scales_cq"] = memory.guarded(wide)
        if empty:
            arguments["query_norm"][-1] = 0
            arguments["ln_beta_k"].zero_()
            arguments["token_x"][0] = 0
        if given:
            values, scale = int8(arguments["query_norm"], -1)
            arguments |= dict(query_norm=values, dequant_scale_q_norm=scale.view(-1, 1))
        if cache:
            pages = arguments["index_k_cache"].shape[0]
            values = torch.full((pages, PAGE, 1, size), 77, dtype=torch.int8)
            scales = torch.full((pages, PAGE, 1), 7.0, dtype=stored)
            arguments |= dict(
                index_k_cache=memory.guarded(values),
                index_k_scale_cache=memory.guarded(scales),
                kv_cache_quant_mode=3,
            )
        return arguments

    return make


def v3(
    batch: int, length: int, heads: int, mode: int, **sizes: Any
) -> Callable[[Inputs], Arguments]:
    """Of tokens [T, ..] where `length` is 1."""
    draw = mla(batch, length, heads, mode, form="nd", **sizes)

    def make(inputs: Inputs) -> Arguments:
        arguments = draw(inputs)
        for name in ("weight_format", "rope_interleaved", "row_layout"):
            arguments.pop(name, None)
        if length == 1:
            for name in ("token_x", "rope_sin", "rope_cos", "cache_index"):
                arguments[name] = arguments[name][:, 0]
        return arguments | dict(query_norm_flag=True)

    return make


def lightning(
    tokens: int, heads: int, matrices: bool, **sizes: Any
) -> Callable[[Inputs], Arguments]:
    draw = indexer(tokens, 1, heads, 1, form="nd", given=True, **sizes)

    def make(inputs: Inputs) -> Arguments:
        a = draw(inputs)
        size = a["ln_gamma_k"].shape[0]
        turned = [inputs.normal(size, size, scale=size**-0.5) for _ in range(2)]
        return dict(
            token_x=a["token_x"][:, 0],
            q_norm=a["query_norm"][:, 0],
            q_norm_scale=a["dequant_scale_q_norm"],
            wq_b=memory.guarded(nz.to_nz(a["weight_qb"])),
            wq_b_scale=a["dequant_scale_w_qb"].view(-1, 1),
            wk=a["weight_k"],
            weights_proj=a["weight_proj"],
            ln_gamma_k=a["ln_gamma_k"],
            ln_beta_k=a["ln_beta_k"],
            cos_idx_rope=a["rope_cos"][:, 0],
            sin_idx_rope=a["rope_sin"][:, 0],
            hadamard_q=turned[0] if matrices else None,
            hadamard_k=turned[1] if matrices else None,
            idx_k_cache=a["index_k_cache"],
            idx_k_scale_cache=a["index_k_scale_cache"],
            idx_k_cache_index=a["cache_index"][:, 0],
            layernorm_epsilon_k=1e-6,
        )

    return make


def layer(
    lengths: list[int],
    s1: int,
    heads: int,
    count: int,
    mode: int = 2,
    index_mode: int = 2,
    *,
    rows: bool = True,
    keys: bool = True,
    alpha: float | None = None,
    **options: Any,
) -> Callable[[Inputs], Arguments]:
    """`rows`, `keys`: the caches are of int8."""
    draw = sparse_attention_pto.layer(lengths, s1, heads, count, **options)

    def make(inputs: Inputs) -> Arguments:
        a = draw(inputs)
        of_mode = {"w_dq": (2,), "w_uq_qr": (1, 2), "w_dkv_kr": (2,)}
        of_index = {"w_idx_qb": (1, 2), "w_idx_k": (2,)}
        for table, chosen in ((of_mode, mode), (of_index, index_mode)):
            for name in (name for name, modes in table.items() if chosen in modes):
                a[name], a[f"dequant_scale_{name}"] = weight(nz.to_nd(a[name], "nz"), "nz")
        (_, absent), *_ = inputs.forbidden
        pages = a["kv_cache"].shape[0]
        slots = torch.arange(pages * PAGE)
        flat = {name: a[name].flatten(0, 2) for name in ("kv_cache", "kr_cache", "index_k_cache")}
        if rows:
            cache = memory.guarded(torch.zeros(pages, PAGE, 1, quantized.ROW, dtype=torch.int8))
            latent_cache_write.forward(
                ckv=flat["kv_cache"],
                k_rope=flat["kr_cache"],
                rows=cache,
                slots=slots,
                kind="int8",
                row_layout=ASCEND,
                scale_format="ue8m0",
                k_nope_clip_alpha=None,
            )
            a |= dict(kv_cache=cache, kr_cache=torch.zeros(0, dtype=inputs.dtype), kv_kind="int8")
            inputs.forbidden[:2] = [(cache, absent)]
        if alpha is not None:
            a["k_nope_clip_alpha"] = memory.guarded(torch.tensor([alpha]))
        if keys:
            cache = memory.guarded(torch.zeros(pages, PAGE, 1, 128, dtype=torch.int8))
            scales = memory.guarded(torch.zeros(pages, PAGE, 1, dtype=torch.float16))
            index_cache_write.forward(
                k=flat["index_k_cache"],
                values=cache,
                scales=scales,
                slots=slots,
                kind="int8",
                scale_format="ue8m0",
                index_hadamard=False,
                hadamard_round="bf16",
            )
            a |= dict(index_k_cache=cache, index_k_scale_cache=scales, index_kind="int8")
            inputs.forbidden[-1] = (cache, absent)
        return a | dict(weight_quant_mode=mode, index_weight_quant_mode=index_mode)

    return make


def turned_back(arguments: Arguments) -> Tensor:
    return memory.guarded(nz.from_nz(arguments["weight_dkv_kr"]))


def as_it_is(arguments: Arguments) -> Arguments:
    """What is quantized in float64 would be other bytes."""
    return arguments


def judge_bytes(name: str, got: Tensor, exact: Tensor) -> Finding:
    """Off by one at most, and seldom."""
    off = (got.int() - exact.int()).abs()
    most, share = int(off.max()), float((off > 0).double().mean())
    used = share / _SWAPPED if most <= 1 else float("inf")
    return used, f"{name}: bytes off by {most}, {share:.1e} of them"


def judge_rounded(
    name: str, got: Tensor, exact: Tensor, dtype: torch.dtype, roundings: int = 1
) -> Finding:
    """So many roundings to the working dtype of the largest value."""
    absent = got.isnan() & exact.isnan()  # pages that nobody uses
    got, exact = got.masked_fill(absent, 0), exact.masked_fill(absent, 0)
    if not got.isfinite().all():
        return float("inf"), f"{name} is not finite"
    bound = roundings * torch.finfo(dtype).eps * exact.double().abs().max().item()
    worst = (got.double() - exact.double()).abs().max().item()
    return worst / bound if bound else float(worst > 0), f"{name}: error {worst:.1e} of {bound:.1e}"


def judge(case: Case, got: Arguments, exact: Arguments, _: Arguments) -> list[Finding]:
    found = []
    for name, value in got.items():
        other = exact[name]
        if not value.numel():
            continue
        if value.shape[-1] in (quantized.ROW, quantized.NOPE_ROW):
            given = case.make(Inputs(case.dtype, case.seed))
            layout = given.get("row_layout", quantized.NOPE_ROPE_SCALE)
            parts = (quantized.row_parts(x, layout, torch.int8, case.dtype) for x in (value, other))
            for what, one, two in zip(("latents", "rotary", "scales"), *parts, strict=True):
                title = f"{name}, {what}"
                if one.dtype is torch.int8:
                    found.append(judge_bytes(title, one, two))
                elif one.numel():  # no rotary keys
                    found.append(judge_rounded(title, one, two, case.dtype))
        elif value.dtype is torch.int8:
            found.append(judge_bytes(name, value, other))
        else:
            # of the layer: queries, absorbed ones, probabilities, outputs
            roundings = 4 if case.op == LAYER and name == "output 0" else 1
            found.append(judge_rounded(name, value, other, case.dtype, roundings))
    return found


SMALL = dict(hidden=1024, rank=512)
UNEVEN = dict(hidden=208, rank=192)
WIDE_KEYS = dict(hidden=208, latent=64, index_heads=16, index_size=256)
ASCEND, FLASH = quantized.NOPE_ROPE_SCALE, quantized.NOPE_SCALE_ROPE
case = partial(Case, judge=judge, widen=as_it_is)
of_mla, of_indexer = partial(case, MLA), partial(case, INDEXER)
CASES = (
    of_mla("int8, model, 8 heads, 4 tokens", mla(4, 1, 8, rows=ASCEND, smooth=True), cores=(24,)),
    of_mla("int8, 16 heads, 30 tokens, halves", mla(15, 2, 16, interleaved=False, **SMALL)),
    of_mla("int8, 32 heads, 60 tokens, rows", mla(60, 1, 32, rows=ASCEND, **SMALL)),
    of_mla("int8, 8 heads, 128 tokens", mla(64, 2, 8, smooth=True, **SMALL)),
    of_mla("int8, rank of 2048", mla(3, 1, 3, hidden=512, rank=2048, form="nd")),
    of_mla(
        "int8 behind the norm, FlashMLA's order, pages apart, clipped",
        mla(5, 2, 16, 1, rows=FLASH, between=1, alpha=0.75, **SMALL),
    ),
    of_mla(
        "int8 behind the norm, flat, fp16", mla(5, 1, 8, 1, form="flat", **SMALL), torch.float16
    ),
    of_mla("rows of int8 alone", mla(5, 2, 8, 0, rows=ASCEND, **UNEVEN)),
    of_mla("rows of int8 alone, fp16", mla(3, 1, 3, 0, rows=FLASH, **SMALL), torch.float16),
    of_mla("int8, uneven, 1 token", mla(1, 1, 3, rows=ASCEND, **UNEVEN)),
    # memory ends behind the first panel of a tile
    of_mla("int8, a panel over", mla(3, 1, 3, hidden=512, rank=160)),
    of_mla("int8, uneven, 16 tokens", mla(16, 1, 3, hidden=208, rank=160)),
    of_mla("int8, uneven, 18 tokens", mla(9, 2, 5, smooth=True, **UNEVEN)),
    of_mla("int8, uneven, 40 tokens", mla(40, 1, 8, **UNEVEN)),
    of_mla("int8, uneven, 128 tokens", mla(64, 2, 3, **UNEVEN)),
    of_mla("int8, uneven, 130 tokens", mla(65, 2, 8, rows=ASCEND, **UNEVEN)),
    of_mla("tokens of int8", mla(5, 1, 8, given=True, rows=ASCEND, **UNEVEN)),
    of_mla(
        "int8, one weight in panels and one row-major",
        with_(mla(9, 2, 5, **UNEVEN), weight_dkv_kr=turned_back, weight_format="nd"),
    ),
    of_mla("int8, row-major, 70 tokens", mla(35, 2, 8, form="nd", hidden=200, rank=120)),
    of_mla("int8, row-major, 256 tokens", mla(256, 1, 1, form="nd", hidden=200, rank=120)),
    of_mla(
        "int8, a checkpoint's own, 20 tokens", mla(10, 2, 8, form="linear", rows=ASCEND, **SMALL)
    ),
    of_mla("int8, a checkpoint's own, uneven", mla(40, 1, 3, form="linear", hidden=200, rank=120)),
    of_mla("int8, the slot past the last", mla(3, 1, 3, rows=ASCEND, past=0, **UNEVEN)),
    of_mla("int8, no rotary part, 20 heads", mla(9, 2, 20, smooth=True, rotary=0, **UNEVEN)),
    of_mla("rows of int8 alone, no rotary part", mla(5, 1, 8, 0, rows=FLASH, rotary=0, **UNEVEN)),
    of_mla("int8, two epsilons", mla(3, 1, 3, epsilons=(0.5, 0.1), **UNEVEN)),
    of_indexer("int8, model, 4 tokens", indexer(4, 1, smooth=True), cores=(24,)),
    of_indexer("int8, 2 x 3 tokens, interleaved", indexer(2, 3, interleaved=True, **SMALL)),
    of_indexer("int8, zeros", indexer(5, 1, 16, empty=True, **UNEVEN)),
    of_indexer(
        "int8, 5 heads, fp32 scales",
        indexer(3, 2, 5, form="nd", stored=torch.float32, hidden=208, rank=112),
    ),
    of_indexer("int8 behind the norm, fp16", indexer(9, 2, 32, 1, **SMALL), torch.float16),
    of_indexer("norms of int8", indexer(3, 1, 16, 1, given=True, **UNEVEN)),
    of_indexer("keys of int8 alone", indexer(5, 1, 64, 0, **SMALL)),
    of_indexer("int8 weights alone", indexer(5, 1, 16, cache=False, form="flat", **UNEVEN)),
    of_indexer(
        "int8 weights alone, small",
        indexer(3, 1, 3, cache=False, form="nd", size=32, rotary=16, hidden=64, rank=48),
    ),
    of_indexer("int8, all dims turn, 32 heads", indexer(3, 1, 32, rotary=128, **UNEVEN)),
    of_indexer("int8, all dims turn, 5 heads", indexer(3, 1, 5, form="nd", rotary=128, **UNEVEN)),
    of_indexer("int8, no rotary part", indexer(3, 1, 16, rotary=0, **UNEVEN)),
    of_indexer("int8, a large epsilon", with_(indexer(3, 1, 16, **UNEVEN), ln_epsilon=0.5)),
    of_indexer("int8 keys, the slot past the last", indexer(3, 1, 16, past=0, **UNEVEN)),
    case(V3, "int8, rows, [T, H]", v3(5, 1, 8, 2, rows=ASCEND, smooth=True, **UNEVEN)),
    case(V3, "int8 behind the norm, [B, S, H]", v3(3, 2, 8, 1, **UNEVEN)),
    case(V3, "nothing of 8 bits", v3(5, 1, 8, 0, **UNEVEN)),
    case(LIGHTNING, "transformed", lightning(5, 16, True, **UNEVEN)),
    case(
        LIGHTNING,
        "not transformed, fp32 scales",
        lightning(3, 8, False, stored=torch.float32, **UNEVEN),
    ),
    case(LAYER, "all of int8, everything selected", layer([300, 1, 129, 0], 2, 16, 384)),
    case(
        LAYER,
        "int8 weights, decided by ties",
        layer([140, 60], 1, 8, 64, rows=False, keys=False, tied=True),
    ),
    case(
        LAYER,
        "int8 weights, a latent of 64",
        layer([140, 60], 1, 8, 64, rows=False, keys=False, tied=True, latent=64),
    ),
    case(
        LAYER,
        "int8 weights, uneven depth, index keys of 256",
        layer([140, 60], 1, 8, 256, rows=False, keys=False, **WIDE_KEYS),
    ),
    case(LAYER, "int8 behind the norm, everything selected", layer([140, 60], 1, 8, 256, 1, 2)),
    case(LAYER, "all of int8, clipped", layer([140, 60], 1, 8, 256, alpha=0.75)),
    case(LAYER, "int8 caches, everything selected", layer([140, 60], 1, 8, 256, 0, 0)),
)
CONTROLS = (
    Control(
        "the other panel's columns",
        "product",
        "panel + 2, panels, depth",
        "panel + 1, panels, depth",
        "int8, uneven, 18 tokens",
    ),
    Control(
        "depth not masked",
        "product",
        "mask=(tl.arange(0, DEPTH) < depth - k)[:, None], other=ZERO",
        "mask=(tl.arange(0, DEPTH) < DEPTH)[:, None], other=ZERO",
        "int8, uneven, 18 tokens",
    ),
    Control(
        "a weight that is not turned",
        "product",
        '{"LINEAR": linear}',
        '{"LINEAR": False}',
        "int8, a checkpoint's own, uneven",
    ),
    Control(
        "rotary columns by the latent's scales",
        "quantized_rows",
        "of_rope = by_column + LATENT",
        "of_rope = by_column + 0",
        "int8, uneven, 18 tokens",
    ),
    Control(
        "the scale of the first token",
        "quantized_rows",
        "        by_row = tl.load(by_rows + row)\n        of_plain",
        "        by_row = tl.load(by_rows)\n        of_plain",
        "int8, uneven, 18 tokens",
    ),
    Control(
        "smooth scales forgotten",
        "quantized_rows",
        "u *= tl.load(smooth + d)",
        "u *= 1.0",
        "int8, uneven, 18 tokens",
    ),
    Control(
        "the slot past the last is written",
        "quantized_rows",
        "(slot < slots)\n        of_rotary = tl.where(there, ROTARY // 2, 0)\n        slot",
        "(slot <= slots)\n        of_rotary = tl.where(there, ROTARY // 2, 0)\n        slot",
        "int8, the slot past the last",
    ),
    Control(
        "the index key past the last is written",
        "quantized_rows",
        "(slot < slots)\n        of_rotary = tl.where(there, ROTARY // 2, 0)\n        of_rest",
        "(slot <= slots)\n        of_rotary = tl.where(there, ROTARY // 2, 0)\n        of_rest",
        "int8 keys, the slot past the last",
    ),
    Control(
        "the rest left out of the scale",
        "quantized_rows",
        "amax = tl.maximum(amax, tl.max(tl.abs(rest), 1))",
        "amax = tl.maximum(amax, 0.0)",
        "int8, 2 x 3 tokens, interleaved",
    ),
    Control(
        "a scale of zero divides",
        "quantize",
        "tl.where(scale > 0, scale, 1.0)",
        "scale",
        "int8, zeros",
    ),
    Control(
        "not rounded to even",
        "quantize",
        "((y + 12582912.0) - 12582912.0)",
        "(y + 0.5)",
        "int8, uneven, 18 tokens",
    ),
    Control(
        "one layout for all rows",
        "quantized_rows",
        "quantized.row_parts(of.kv_cache, of.row_layout,",
        'quantized.row_parts(of.kv_cache, "nope_rope_scale",',
        "int8 behind the norm, FlashMLA's order, pages apart, clipped",
    ),
    Control(
        "never clipped",
        "quantized_rows",
        "fits = tl.load(alpha)",
        "fits = 1.0",
        "int8 behind the norm, FlashMLA's order, pages apart, clipped",
    ),
    Control(
        "keys by the other transform",
        "lightning_indexer_prolog_pto",
        'a["hadamard_k"]',
        'a["hadamard_q"]',
        "transformed",
    ),
)
