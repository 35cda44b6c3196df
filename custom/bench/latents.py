# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Rows for dense attention over paged latents, beside FlashMLA's and FlashAttention-3's."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from . import in_torch
from .case import Arguments, Case, Draw
from .peers import installed
from .sparse_attention import BF16, DR, R, first_requests

P = 64  # FlashMLA's page
HEADS = (128, 96, 64, 16)
BATCHES = (1, 32, 128)
SCALE = 192**-0.5
_BY_REQUEST = ("query", "query_rope", "block_table", "actual_seq_kvlen")


def decode_case(b: int, s: int, n: int, context: int) -> Case:
    """`s` query tokens for each of `b` requests of `context` tokens, which share no page."""
    pages = context // P

    def make(draw: Draw) -> Arguments:
        rows = draw.normal(b * pages, P, 1, R + DR)  # as engines and FlashMLA keep them
        latent, rope = rows.split([R, DR], -1)
        return _options(n) | dict(
            query=draw.normal(b, s, n, R),
            key=latent,
            value=latent,
            query_rope=draw.normal(b, s, n, DR),
            key_rope=rope,
            actual_seq_kvlen=draw.full(b, value=context),
            block_table=draw.table(b, pages),
        )

    rows = b * s
    return Case(
        "npu_fused_infer_attention_score_v2",
        f"{n} heads, {b} x {s} queries, {context // 1024}K keys",
        make,
        first_requests(_BY_REQUEST, 2),
        bytes=float(b * context * (R + DR) * BF16 + rows * n * (2 * R + DR) * BF16),
        flops=2.0 * rows * n * context * (2 * R + DR),
        shape=dict(b=b, s=s, n=n, context=context),
        peers=in_torch.peers(in_torch.dense_latents, compiled=False)
        | {"flash_mla dense": _flash_mla, "FA3 of vLLM": _flash_attention_3},
    )


def prefill_case(s: int, n: int, context: int) -> Case:
    """One long chunk of queries, causal: the last of `context` tokens."""
    whole = decode_case(1, s, n, context)

    def part(arguments: Arguments) -> tuple[Arguments, Any]:
        # the last query tokens, whose masks stay as they are
        piece = arguments | {name: arguments[name][:, -8:] for name in ("query", "query_rope")}
        return piece, lambda outputs: [out[:, -8:] if out.numel() else out for out in outputs]

    return Case(
        whole.op,
        f"{n} heads, prefill of {s} queries, {context // 1024}K keys",
        whole.drawn,
        part,
        bytes=whole.bytes,
        flops=2.0 * n * (2 * R + DR) * (s * (context - s) + s * (s + 1) / 2),
        shape=whole.shape,
        peers={"FA3 of vLLM": _flash_attention_3},
        reference=False,
    )


def _options(n: int) -> Arguments:
    return dict(
        num_query_heads=n,
        num_key_value_heads=1,
        softmax_scale=SCALE,
        input_layout="BSND",
        sparse_mode=3,
        block_size=P,
    )


def _rows(arguments: Arguments) -> torch.Tensor:
    """Latents with their rotary parts, as they lie in memory."""
    key = arguments["key"]
    whole = [*key.shape[:-1], R + DR]
    out: torch.Tensor = key.as_strided(whole, key.stride(), key.storage_offset())
    return out


def _flash_mla(arguments: Arguments) -> Callable[[], Any] | None:
    if not installed("flash_mla", arguments["query"]):
        return None
    import flash_mla

    query = torch.cat([arguments["query"], arguments["query_rope"]], -1)
    heads = query.shape[2]
    # its kernel is for 64 heads and multiples
    query = torch.nn.functional.pad(query, (0, 0, 0, -heads % 64))
    plan, splits = flash_mla.get_mla_metadata()
    return partial(
        flash_mla.flash_mla_with_kvcache,
        query,
        _rows(arguments),
        arguments["block_table"],
        arguments["actual_seq_kvlen"],
        R,
        plan,
        splits,
        softmax_scale=SCALE,
        causal=True,
    )


def _flash_attention_3(arguments: Arguments) -> Callable[[], Any] | None:
    if not installed("vllm", arguments["query"]):
        return None
    flash_attn_varlen_func = importlib.import_module("vllm.vllm_flash_attn").flash_attn_varlen_func

    query, rope = (arguments[name].flatten(0, 1) for name in ("query", "query_rope"))
    batch, length = arguments["query"].shape[:2]
    ends = torch.arange(batch + 1, dtype=torch.int32, device=query.device) * length
    return partial(
        flash_attn_varlen_func,
        q=rope,
        k=arguments["key_rope"],
        v=arguments["key"],
        q_v=query,
        max_seqlen_q=length,
        cu_seqlens_q=ends,
        max_seqlen_k=arguments["block_table"].shape[1] * P,
        seqused_k=arguments["actual_seq_kvlen"],
        block_table=arguments["block_table"],
        softmax_scale=SCALE,
        causal=True,
        fa_version=3,
    )


def _dense(small: bool) -> list[Case]:
    if small:
        return [decode_case(b, 1, 16, 1024) for b in (1, 4)]
    decode = [decode_case(b, 1, n, 65536) for n in HEADS for b in BATCHES]
    prefill = [prefill_case(4096, n, 8192) for n in (128, 16)]
    return [*decode, decode_case(128, 2, 16, 65536), *prefill]


PRESETS = {"npu_fused_infer_attention_score_v2": _dense}
