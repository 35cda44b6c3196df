# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Times that others published for kernels of a known shape on Atlas A2 or A3, beside the estimate
of ours:  tests/ascend/run.sh --estimate published|deepseek-v4 [--record]

Their kernels are not these: the distance says where to look, and what all of those that were
measured together say of the model (BAND).  Where forms.py has the measured kernel, the model is
held to what it says of that one.  published.json and deepseek_v4.json keep what was estimated, and
docs/ascend_speed.md shows it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from custom.bench import shared_kv_prolog, sparse_attention_v4
from custom.bench.case import Case
from custom.bench.presets import presets

from . import cost, forms, models
from .case import Arguments, Inputs
from .models import INDEX, LATENT, PAGE, ROTARY, Make
from .ops import chunk_gated_delta_rule, fused_attention, hc_post, hc_pre

HEADS = 64
BAND = 0.85, 1.15  # of the geometric mean of ours over theirs


@dataclass(frozen=True)
class Figure:
    """`us` by who made the kernel; `kernels`: what of our launches it is held against; of many
    tokens the op is given a part, and the sum multiplied by `times`.  `stages`: of AscendC's
    kernel itself, by the model and on the card."""

    what: str
    us: dict[str, float]
    source: str
    op: str
    make: Make
    kernels: tuple[str, ...] = ()
    card: str = "Atlas A3"
    times: int = 1
    stages: Callable[[], tuple[float, float]] | None = None


def indexer(queries: int, keys: int) -> Make:
    """The last queries of a sequence; without the values of what is chosen."""

    def make(x: Inputs) -> Arguments:
        return dict(
            query=x.normal(1, queries, HEADS, INDEX),
            key=x.normal(1, keys, 1, INDEX),
            weights=x.normal(1, queries, HEADS),
            sparse_count=2048,
            layout_query="BSND",
            layout_key="BSND",
            return_value=False,
        )

    return make


def rows(x: Inputs, requests: int, heads: int, *keys: int) -> Arguments:
    """A token of each request, and latents."""
    return dict(
        query=x.normal(requests, 1, heads, LATENT),
        key=x.normal(*keys, 1, LATENT),
        query_rope=x.normal(requests, 1, heads, ROTARY),
        key_rope=x.normal(*keys, 1, ROTARY),
    )


def decode(keys: int, chosen: int, requests: int = 1, heads: int = HEADS) -> Make:
    def make(x: Inputs) -> Arguments:
        indices = torch.arange(chosen).expand(requests, 1, 1, chosen)
        return rows(x, requests, heads, requests, keys) | dict(
            value=None,
            sparse_indices=x.ints(indices.contiguous()),
            scale_value=0.07,
            layout_query="BSND",
            layout_kv="BSND",
        )

    return make


def latents(keys: int, heads: int) -> Make:
    """One request's decode over all latents, in CANN's pages."""

    def make(x: Inputs) -> Arguments:
        pages = -(-keys // PAGE)
        given = rows(x, 1, heads, pages, PAGE)
        return given | dict(
            value=given["key"],
            actual_seq_kvlen=x.ints([keys]),
            block_table=x.ints(torch.arange(pages)[None]),
            num_query_heads=heads,
            num_key_value_heads=1,
            softmax_scale=0.07,
            input_layout="BSND",
            sparse_mode=3,
        )

    return make


def states(requests: int) -> Make:
    """One state a request: what two share is read out of the cache."""

    def make(x: Inputs) -> Arguments:
        given = models.DELTA.call([0] * requests, heads=(16, 32))(x)
        pool = given["initial_state_source"]
        return given | dict(
            initial_state_source=x.normal(requests, *pool.shape[1:], dtype=pool.dtype),
            initial_state_indices=x.ints(torch.arange(requests)),
        )

    return make


def chunked(heads: int, tokens: int, sequences: int) -> Make:
    return chunk_gated_delta_rule.call([tokens] * sequences, (heads, heads), (128, 128))


def causal(tokens: int) -> Make:
    """Of a prefill of MLA: 16 heads of 192 and 128."""
    return fused_attention.dense(
        tokens, tokens, heads=(16, 16), batch=1, size=192, value_size=128, causal=True
    )


_GEMS, _INDEXER = "FlagGems-vllm #791", "npu_lightning_indexer"
_SPARSE, _DELTA = "npu_sparse_flash_attention", "npu_fused_sigmoid_gating_delta_rule_update"
_WHEEL, _MEGA = "msopmodeling 1.0.9, profiles", "megagdn-pto 3a59190"
_CHUNKED = "npu_chunk_gated_delta_rule"
FIGURES = (
    Figure("indexer, 1 x 8194", dict(AscendC=27.4, Triton=22.2), _GEMS, _INDEXER, indexer(1, 8194)),
    Figure(
        "indexer, 256 x 2048", dict(AscendC=102.6, Triton=112), _GEMS, _INDEXER, indexer(256, 2048)
    ),
    Figure(
        "indexer, 1024 x 8192", dict(AscendC=990, Triton=1087), _GEMS, _INDEXER, indexer(1024, 8192)
    ),
    Figure(
        "top-k of a row of 64K",
        dict(AscendC=38, Triton=18),
        "FlagGems #6354",
        _INDEXER,
        indexer(1, 65536),
        ("lightning_indexer.collect", "lightning_indexer.topk"),
    ),
    Figure(
        "sparse decode, 64 heads, 640 keys",
        dict(AscendC=40, Triton=34),
        "FlagGems-vllm #792",
        _SPARSE,
        decode(8192, 640),
    ),
    Figure(
        "sparse decode, 16 heads, 2048 keys, b = 1",
        dict(AscendC=86.8),
        _WHEEL,
        _SPARSE,
        decode(4096, 2048, 1, 16),
        card="910B4",
    ),
    Figure(
        "sparse decode, 16 heads, 2048 keys, b = 8",
        dict(AscendC=89.4),
        _WHEEL,
        _SPARSE,
        decode(8192, 2048, 8, 16),
        card="910B4",
    ),
    Figure(
        "sparse prefill, 4096 x 16 heads, 2048 keys",
        dict(AscendC=12983),
        _WHEEL,
        _SPARSE,
        decode(4096, 2048, 256, 16),
        card="910B4",
        times=16,
    ),
    Figure(
        "dense decode over latents, 16 heads, 3586 keys",
        dict(AscendC=35.4),
        _WHEEL,
        "npu_fused_infer_attention_score_v2",
        latents(3586, 16),
        card="910B4",
    ),
    Figure(
        "dense prefill, 8193 x 16 heads of 192 and 128",
        dict(AscendC=3028),
        _WHEEL,
        fused_attention.OP,
        causal(8193),
        card="910B4",
    ),
    Figure(
        "dense prefill, 4097 x 16 heads of 192 and 128",
        dict(AscendC=786.3),
        _WHEEL,
        fused_attention.OP,
        causal(4097),
        card="910B4",
    ),
    Figure(
        "delta rule, b = 16",
        dict(AscendC=37.3, Triton=153.6),
        "vllm-ascend #12869",
        _DELTA,
        states(16),
    ),
    # of 16 sequences so many that 256 heads are walked; Triton: the five kernels of vllm-ascend
    *(
        Figure(
            f"chunked delta rule, 16 x {length} x {heads} heads",
            us,
            _MEGA,
            _CHUNKED,
            chunked(heads, length, 256 // heads),
            card="910B2",
            times=heads // 16,
            # of 64 heads and 4096 tokens the stages were not timed
            stages=partial(forms.chunked, heads, length) if (heads, length) != (64, 4096) else None,
        )
        for length, heads, us in (
            (4096, 16, dict(AscendC=14050)),
            (4096, 32, dict(AscendC=27390)),
            (4096, 64, dict(AscendC=53020)),
            (8192, 16, dict(AscendC=27700, Triton=50400)),
            (8192, 32, dict(AscendC=54300)),
            (8192, 64, dict(AscendC=106000)),
        )
    ),
)

# CANN's documents: DeepSeek-V4-Flash on one die, 64 requests of 2 tokens at 8K; PyPTO's card is
# unnamed.  No part of what the model is held to: ops, not kernels, and how they were timed is not
# said
_CANN, _FLASH = "CANN's documents", 4096
DEEPSEEK_V4 = (
    *(
        Figure(
            f"attention, {kind}",
            dict(PyPTO=us),
            _CANN,
            "npu_sparse_attn_sharedkv",
            models.shared_kv(kind, 64, 512, 64, 2, 8192, own=True),
        )
        for kind, us in (("sliding", 65), ("HCA", 90), ("CSA", 160))
    ),
    Figure(
        "attention, CSA, one row",
        dict(AscendC=43),
        "measured on an A3",
        "npu_sparse_attn_sharedkv",
        models.shared_kv("CSA", 64, 512, 1, 1, 8192),
    ),
    *(
        Figure(
            f"compressor, {what}",
            dict(PyPTO=us),
            _CANN,
            "npu_compressor",
            models.compressor(m, size, 64, 2, start, _FLASH),
        )
        for what, m, size, start, us in (
            ("CSA, closing", 4, 512, 8190, 95),
            ("index keys, closing", 4, 128, 8190, 75),
            ("HCA, open", 128, 512, 8100, 55),
            ("HCA, closing", 128, 512, 8190, 125),
        )
    ),
    Figure(
        "prolog, index queries with it",
        dict(PyPTO=130),
        _CANN,
        "npu_sharedkv_prolog_pto",
        models.prolog_v4("DeepSeek-V4-Flash", 64, 64, 2),
    ),
    *(
        Figure(f"hc_pre, {t} tokens", us, _CANN, hc_pre.OP, hc_pre.call(t, _FLASH))
        for t, us in (
            (16, dict(AscendC=33)),
            (32, dict(AscendC=37)),
            (64, dict(AscendC=44)),
            (128, dict(AscendC=60, PyPTO=70)),
        )
    ),
    *(
        Figure(f"hc_post, {t} tokens", dict(AscendC=us), _CANN, hc_post.OP, hc_post.call(t, _FLASH))
        for t, us in ((8, 5.1), (128, 13.9))
    ),
)


def layer(model: shared_kv_prolog.Model, k: int, kind: str, requests: int) -> Make:
    """The bench's, of requests of 64K tokens, in CANN's pages.  HCA's, of which one step in 128
    closes an entry, leaves them open."""
    case = sparse_attention_v4.layer_case(requests, 1, model, kind, 65536, k, PAGE, PAGE)

    def make(x: Inputs) -> Arguments:
        arguments = case.make(torch.device("cpu"), 0)
        if kind == "HCA":
            arguments["act_seqs"] -= 64
        return arguments

    return make


# the stages' floors on an A3, us: bytes at 1.6 TB/s, or multiply-adds at 350 TFLOPS
_REQUESTS = (32, 128)
_FLOORS = {
    ("Pro", "sliding"): (145 + 7.9 + 231, 145 + 32 + 231),
    ("Pro", "HCA"): (145 + 9.3 + 18 + 231, 145 + 9.8 + 73 + 231),
    ("Pro", "CSA"): (145 + 23 + 16 + 84 + 29 + 231, 145 + 25 + 16 + 336 + 115 + 231),
    ("Flash", "sliding"): (50 + 5.2 + 84, 51 + 21 + 84),
    ("Flash", "HCA"): (50 + 5.4 + 16 + 84, 51 + 5.9 + 63 + 84),
    ("Flash", "CSA"): (50 + 14 + 11 + 84 + 16 + 84, 51 + 15 + 11 + 336 + 63 + 84),
}
_OF_MODEL = {"Pro": (shared_kv_prolog.PRO, 1024), "Flash": (shared_kv_prolog.FLASH, 512)}
LAYERS = tuple(
    Figure(
        f"{model}, {kind}, {requests} requests",
        dict(floor=floor),
        "stages' floors",
        "npu_sparse_attention_v4_pto",
        layer(*_OF_MODEL[model], kind, requests),
    )
    for (model, kind), floors in _FLOORS.items()
    for requests, floor in zip(_REQUESTS, floors, strict=True)
)


def of_bench(case: Case) -> Figure:
    """A row of the bench beside its floor; an indexer's without values, as models call it."""
    floor = max(case.bytes / cost.MEMORY, case.flops / cost.CUBE)

    def make(x: Inputs) -> Arguments:
        arguments = case.make(torch.device("cpu"), 0)
        if "return_value" in arguments:
            arguments |= dict(return_value=False)
        if case.op == "npu_block_indexer":  # all tokens are the first request's: estimate.PACKED
            lengths = torch.zeros_like(arguments["actual_seq_lengths"])
            lengths[0] = len(arguments["query"])
            arguments |= dict(actual_seq_lengths=lengths)
        return arguments

    return Figure(
        f"{case.op.removeprefix('npu_')}: {case.label}",
        dict(floor=round(floor * 1e6, 1)),
        "the row's floor",
        case.op,
        make,
    )


# pools, blocks, dense latents, KDA: a token a request, of the rows with these words
_POOLED = (
    ("npu_compressor", ("pools of",)),
    ("npu_lightning_indexer", ("GLM-5.3-Flash",)),
    ("npu_sparse_flash_attention", ("GLM-5.3-Flash",)),
    ("npu_kv_quant_sparse_flash_attention", ("GLM-5.3-Flash, int8",)),
    ("npu_mla_prolog_pto", ("GLM-5.3-Flash", "Kimi-Linear")),
    ("npu_block_indexer", ("no values",)),
    ("npu_sparse_attention_score", ("MiniMax-M3", "Qwen4-Exp")),
    ("npu_fused_infer_attention_score_v2", ("16 heads", "128 heads")),
    ("npu_gated_delta_layer_decode", ("KDA",)),
)
POOLED = tuple(
    of_bench(case)
    for op, words in _POOLED
    for case in presets(op, "npu")
    if any(word in case.label for word in words)
    and case.shape["b"] <= 128
    and case.shape.get("s", 1) == 1
)

_HERE = Path(__file__).parent
# what is asked for by name: figures, and where their estimates are kept
SETS = {
    "published": (FIGURES, _HERE / "published.json"),
    "deepseek-v4": (DEEPSEEK_V4, _HERE / "deepseek_v4.json"),
    "deepseek-v4-layers": (LAYERS, _HERE / "deepseek_v4_layers.json"),
    "pooled": (POOLED, _HERE / "pooled.json"),
}


def mean(ratios: list[float]) -> float:
    """Geometric."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def ratios(rows: list[dict[str, Any]], model: str = "ours") -> list[float]:
    """Of a model to every time that was measured; of ours to the stages of the measured kernel,
    where it has them."""
    return [
        row["stages"]["ours"] / row["stages"]["us"]
        if model == "ours" and by == "AscendC" and "stages" in row
        else row[model] / us
        for row in rows
        for by, us in row["us"].items()
        if model in row
    ]


def read(name: str = "published") -> list[dict[str, Any]]:
    """What is kept of a set."""
    path = SETS[name][1]
    return json.loads(path.read_text()) if path.exists() else []


def write(name: str, rows: list[dict[str, Any]]) -> None:
    SETS[name][1].write_text(json.dumps(rows, indent=1) + "\n")
