# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The calls of real models.  LARGE has them at full size: lowered and compiled with every build,
not run.  CASES runs each of the kernels they lower to, with fewer tokens: the lowered text, which
has the widths, heads and flags but no number of tokens, is the same.  A kernel of LARGE that no
case runs fails the harness.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from custom.npu_ops.common import tiling
from torch import Tensor

from . import memory
from .case import Arguments, Case, Inputs, in_rounds
from .ops import (
    chunk_gated_delta_rule,
    chunk_gated_delta_rule_grad,
    fused_attention,
    fused_attention_backward,
    fused_sigmoid_gating_delta_rule_update,
    indexer_loss,
    indexer_loss_backward,
    lightning_indexer,
    lightning_indexer_grad,
    sparse_attn_sharedkv,
    sparse_flash_attention,
    sparse_flash_attention_grad,
    sparse_lightning_indexer_grad_kl_loss,
)
from .ops.mla_prolog_pto import row_major

Make = Callable[[Inputs], Arguments]
PAGE = 128
CONTEXT = 128 * 1024
DELTA = fused_sigmoid_gating_delta_rule_update


class Sizes(Inputs):
    """Tensors of the right size that nobody fills."""

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        return memory.vast(shape, dtype or self.dtype)

    def forbid(self, tensor: Tensor, blocks: Any) -> None:
        """Nothing runs."""


def in_nz(x: Inputs, rows: int, columns: int) -> Tensor:
    return x.normal(-(-columns // 16), -(-rows // 16), 16, 16, scale=rows**-0.5)


# name: hidden, query rank, plain size of a head, index heads; the shards' heads
SPARSE = {
    "DeepSeek-V3.2": ((7168, 1536, 128, 64), (128, 64, 32, 16, 8)),
    "GLM-5": ((6144, 2048, 192, 32), (64, 32, 16, 8)),
}
LATENT, ROTARY, INDEX = 512, 64, 128


def layer(model: str, heads: int, batch: int, s1: int, context: int = CONTEXT) -> Make:
    """A layer of sparse attention that decodes at the end of the context."""
    (hidden, rank, plain, index_heads), _ = SPARSE[model]

    def make(x: Inputs) -> Arguments:
        each = -(-context // PAGE)
        pages, tokens = batch * each, (batch, s1)
        table = torch.arange(pages).view(batch, each)
        last = context - s1 + torch.arange(s1)
        weights = dict(
            w_dq=(hidden, rank),
            w_uq_qr=(rank, heads * (plain + ROTARY)),
            w_dkv_kr=(hidden, LATENT + ROTARY),
            w_idx_qb=(rank, index_heads * INDEX),
            w_idx_k=(hidden, INDEX),
            w_idx_proj=(hidden, index_heads),
        )
        return dict(
            x=x.normal(*tokens, hidden),
            **{name: in_nz(x, *shape) for name, shape in weights.items()},
            w_uk=x.normal(heads, plain, LATENT, scale=plain**-0.5),
            gamma_cq=x.normal(rank),
            gamma_ckv=x.normal(LATENT),
            sin=x.normal(*tokens, ROTARY, scale=0.5),
            cos=x.normal(*tokens, ROTARY, scale=0.5),
            cache_index=x.ints(table[:, last // PAGE] * PAGE + last % PAGE),
            kv_cache=x.normal(pages, PAGE, 1, LATENT),
            kr_cache=x.normal(pages, PAGE, 1, ROTARY),
            block_table=x.ints(table),
            act_seqs=x.ints([context] * batch),
            in_gamma_k=x.normal(INDEX),
            in_beta_k=x.normal(INDEX),
            index_k_cache=x.normal(pages, PAGE, 1, INDEX),
            sparse_count=2048,
        )

    return make


# name: hidden, query rank, chosen entries; the heads of the whole model and of shards, 8 a group of
# the output
V4 = {
    "DeepSeek-V4-Pro": ((7168, 1536, 1024), (128, 16, 8)),
    "DeepSeek-V4-Flash": ((4096, 1024, 512), (64, 16, 8)),
}
V4_GROUP, V4_RANKS, V4_INDEX_HEADS, WINDOW = 8, 1024, 64, 128


def prolog_v4(model: str, heads: int, batch: int, s1: int) -> Make:
    """Of a layer with an indexer; its window is a ring of pages."""
    (hidden, rank, _), _ = V4[model]

    def make(x: Inputs) -> Arguments:
        tokens, ring = (batch, s1), WINDOW // PAGE + 1
        table = torch.arange(batch * ring).view(batch, ring).repeat(1, CONTEXT // PAGE // ring)
        return dict(
            token_x=x.normal(*tokens, hidden),
            w_dq=in_nz(x, hidden, rank),
            w_uq=in_nz(x, rank, heads * LATENT),
            w_kv=in_nz(x, hidden, LATENT),
            gamma_cq=x.normal(rank),
            gamma_kv=x.normal(LATENT),
            rope_sin=x.normal(*tokens, ROTARY),
            rope_cos=x.normal(*tokens, ROTARY),
            ori_kv=x.normal(batch * ring, PAGE, 1, LATENT),
            ori_block_table=x.ints(table),
            act_seqs=x.ints([CONTEXT] * batch),
            seqused=x.ints([s1] * batch),
            w_idx_qb=in_nz(x, rank, V4_INDEX_HEADS * INDEX),
            w_idx_proj=in_nz(x, hidden, V4_INDEX_HEADS),
        )

    return make


def output_v4(model: str, heads: int, batch: int, s1: int) -> Make:
    (hidden, *_), _ = V4[model]

    def make(x: Inputs) -> Arguments:
        groups, depth = heads // V4_GROUP, V4_GROUP * LATENT
        of_groups = x.normal(groups, V4_RANKS // 16, depth // 16, 16, 16, scale=depth**-0.5)
        return dict(
            attn_out=x.normal(batch, s1, heads, LATENT),
            w_o_a=of_groups,
            w_o_b=in_nz(x, groups * V4_RANKS, hidden),
            rope_sin=x.normal(batch, s1, ROTARY),
            rope_cos=x.normal(batch, s1, ROTARY),
        )

    return make


# source tokens of an entry, 0 for none
RATIOS = {"sliding": 0, "CSA": 4, "HCA": 128}


def shared_kv(
    kind: str, heads: int, k: int, batch: int, s1: int, context: int = CONTEXT, own: bool = False
) -> Make:
    """Attention over window rows and entries at the end of the context; `own`: requests share no
    page."""

    def make(x: Inputs) -> Arguments:
        ratio, each, times = RATIOS[kind], context // PAGE, batch if own else 1
        table = torch.arange(each).expand(batch, -1)
        if own:
            table = torch.arange(batch * each).view(batch, each)
        arguments = dict(
            q=x.normal(batch, s1, heads, LATENT),
            ori_kv=x.normal(times * each, PAGE, 1, LATENT),
            ori_block_table=x.ints(table),
            seqused_kv=x.ints([context] * batch),
            sinks=x.normal(heads, dtype=torch.float32),
            cmp_ratio=ratio,
        )
        if ratio:
            pages = -(-context // ratio // PAGE)
            arguments["cmp_kv"] = x.normal(times * pages, PAGE, 1, LATENT)
            first = torch.arange(times)[:, None] * pages
            arguments["cmp_block_table"] = x.ints((first + torch.arange(pages)).expand(batch, -1))
        if kind == "CSA":
            arguments["cmp_sparse_indices"] = x.ints(torch.zeros(batch, s1, 1, k))
        return arguments

    return make


def compressor(ratio: int, size: int, batch: int, s1: int, start: int, hidden: int) -> Make:
    """Of requests that have `start` tokens; states in rings."""

    def make(x: Inputs) -> Arguments:
        coff, wide = 2 if ratio == 4 else 1, torch.float32
        width, columns = coff * size, -(-(coff * ratio + s1) // 8)
        pages = -(-(start + s1) // ratio // PAGE)
        table = torch.arange(batch * columns).view(batch, columns)
        given: Arguments = dict(
            x=x.normal(batch, s1, hidden),
            wkv=x.normal(width, hidden),
            wgate=x.normal(width, hidden),
            state_cache=x.normal(batch * columns, 8, 2 * width, dtype=wide),
            ape=x.normal(ratio, width, dtype=wide),
            norm_weight=x.normal(size, dtype=wide),
            rope_sin=x.normal(batch, -(-s1 // ratio), ROTARY),
            rope_cos=x.normal(batch, -(-s1 // ratio), ROTARY),
            rope_head_dim=ROTARY,
            cmp_ratio=ratio,
            state_block_table=x.ints(table),
            start_pos=x.ints([start] * batch),
            coff=coff,
            rotary_mode=2,
            cache_mode=2,
            cmp_cache=x.normal(batch * pages, PAGE, 1, size),
            cmp_block_table=x.ints(torch.arange(batch * pages).view(batch, pages)),
            return_cmp_kv=False,
        )
        return given

    return make


def training(model: str, heads: int, tokens: int = 4096) -> dict[str, Make]:
    """Prefill, the indexer's loss and the gradients of one packed sequence."""
    (_, _, _, index_heads), _ = SPARSE[model]

    def attention(x: Inputs) -> Arguments:
        return dict(
            query=x.normal(tokens, heads, LATENT),
            key=x.normal(tokens, 1, LATENT),
            sparse_indices=x.ints(torch.zeros(tokens, 1, 2048)),
            scale_value=0.07,
            query_rope=x.normal(tokens, heads, ROTARY),
            key_rope=x.normal(tokens, 1, ROTARY),
        )

    def index(x: Inputs) -> Arguments:
        return dict(
            query=x.normal(tokens, index_heads, INDEX),
            key=x.normal(tokens, 1, INDEX),
            weights=x.normal(tokens, index_heads),
        )

    def lengths(x: Inputs, *names: str) -> Arguments:
        return {name: x.ints([tokens]) for name in names}

    def sums(x: Inputs) -> Arguments:
        kind = dict(dtype=torch.float32)
        return dict(
            softmax_max=x.normal(1, tokens, heads, **kind),
            softmax_sum=x.normal(1, tokens, heads, **kind),
        )

    return {
        "npu_lightning_indexer": lambda x: (
            index(x)
            | lengths(x, "actual_seq_lengths_query", "actual_seq_lengths_key")
            | dict(layout_query="TND", layout_key="TND", sparse_count=2048, return_value=True)
        ),
        "npu_sparse_flash_attention": lambda x: (
            attention(x)
            | lengths(x, "actual_seq_lengths_query", "actual_seq_lengths_kv")
            | dict(value=None, layout_query="TND", layout_kv="TND", return_softmax_lse=True)
        ),
        "npu_sparse_flash_attention_grad": lambda x: (
            attention(x)
            | lengths(x, "actual_seq_qlen", "actual_seq_kvlen")
            | sums(x)
            | dict(
                value=None,
                d_out=x.normal(tokens, heads, LATENT),
                out=x.normal(tokens, heads, LATENT),
                sparse_block_size=1,
                layout="TND",
            )
        ),
        "npu_lightning_indexer_grad": lambda x: (
            index(x)
            | lengths(x, "actual_seq_lengths_query", "actual_seq_lengths_key")
            | dict(
                dy=x.normal(tokens, 1, 2048),
                sparse_indices=x.ints(torch.zeros(tokens, 1, 2048)),
                layout="TND",
            )
        ),
        "npu_sparse_lightning_indexer_grad_kl_loss": lambda x: (
            attention(x)
            | sums(x)
            | dict(
                query_index=x.normal(tokens, index_heads, INDEX),
                key_index=x.normal(tokens, 1, INDEX),
                weights=x.normal(tokens, index_heads),
                actual_seq_qlen=[tokens],
                actual_seq_klen=[tokens],
                layout="TND",
            )
        ),
    }


def loss(heads: int, rope: bool, rows: int = 4096) -> Make:
    size = LATENT if rope else LATENT + ROTARY

    def make(x: Inputs) -> Arguments:
        arguments = dict(
            query=x.normal(1, heads, rows, size),
            key=x.normal(1, rows, size),
            index_score=x.normal(1, rows, 2048, dtype=torch.float32),
            indices=x.ints(torch.zeros(1, rows, 2048)),
            scaling=0.07,
        )
        if rope:
            arguments["query_rope"] = x.normal(1, heads, rows, ROTARY)
            arguments["key_rope"] = x.normal(1, rows, ROTARY)
        return arguments

    return make


def loss_backward(rows: int = 4096) -> Make:
    return lambda x: dict(
        grad_loss=x.normal(1, rows, dtype=torch.float32),
        index_score=x.normal(1, rows, 2048, dtype=torch.float32),
        indices=x.ints(torch.zeros(1, rows, 2048)),
        target=x.normal(1, rows, 2048, dtype=torch.float32),
        key_length=rows,
    )


# head sizes of query and value
ATTENTION = ((64, 64), (96, 96), (128, 128), (192, 192), (256, 256), (192, 128))


def attention(size: int, value: int, causal: bool, rows: int, heads: tuple[int, int]) -> Make:
    return lambda x: dict(
        q=x.normal(1, heads[0], rows, size),
        k=x.normal(1, heads[1], rows, size),
        v=x.normal(1, heads[1], rows, value),
        causal=causal,
    )


def attention_backward(
    size: int, value: int, causal: bool, rows: int, heads: tuple[int, int]
) -> Make:
    return lambda x: (
        attention(size, value, causal, rows, heads)(x)
        | dict(
            o=x.normal(1, heads[0], rows, value),
            lse=x.normal(1, heads[0], rows, dtype=torch.float32),
            grad_o=x.normal(1, heads[0], rows, value),
        )
    )


# Qwen3-Next's heads and its shards
SHARDS = ((16, 32), (8, 16), (4, 8), (2, 4))
DELTA_FORMS: dict[str, dict[str, Any]] = {
    "decode": {},
    "decode, vk": dict(layout="vk"),
    "decode, bf16 state": dict(state=torch.bfloat16),
    "decode, vk, bf16 state": dict(layout="vk", state=torch.bfloat16),
    "4 tokens": dict(tokens=4),
    "4 tokens, vk, kept": dict(tokens=4, layout="vk", keep=[0, 1]),
    "packed": dict(tokens=6, starts=[0, 2, 6]),
    "a tree of 4": dict(tokens=4, keep=[0, 1], parents=[[-1, 0, 0, 1], [-1, 0, 1, 1]]),
}


def delta(heads: tuple[int, int], **form: Any) -> Make:
    return DELTA.call([3, 1], heads=heads, **form)


def chunked(heads: tuple[int, int], lengths: list[int], grad: bool) -> Make:
    def make(x: Inputs) -> Arguments:
        (h, hv), tokens = heads, sum(lengths)
        arguments = dict(
            query=x.normal(tokens, h, 128),
            key=x.normal(tokens, h, 128),
            value=x.normal(tokens, hv, 128),
            beta=x.normal(tokens, hv),
            g=x.normal(tokens, hv, dtype=torch.float32),
            initial_state=x.normal(len(lengths), hv, 128, 128, dtype=torch.float32),
            actual_seq_lengths=x.ints(lengths),
        )
        if grad:
            arguments["d_out"] = x.normal(tokens, hv, 128)
            sizes = (len(lengths), hv, 128, 128)
            arguments["d_final_state"] = x.normal(*sizes, dtype=torch.float32)
        return arguments

    return make


def _large() -> list[Case]:
    found: list[Case] = []

    def add(op: str, name: str, make: Make, dtype: torch.dtype = torch.bfloat16) -> None:
        found.append(Case(op, name, make, dtype, cores=(24,)))

    decode = [(b, 1) for b in (1, 16, 32, 64, 128)] + [(1, 4), (8, 2), (32, 3), (128, 4)]
    for model, (_, shards) in SPARSE.items():
        for heads in shards:
            for batch, s1 in decode if heads == shards[0] else decode[::4]:
                title = f"{model}, {heads} heads, {batch} x {s1}"
                add("npu_sparse_attention_pto", title, layer(model, heads, batch, s1))
            add(
                "npu_sparse_attention_pto",
                f"{model}, {heads} heads, fp16",
                layer(model, heads, 8, 1),
                torch.float16,
            )
        for heads in shards[:2]:
            for op, make in training(model, heads).items():
                add(op, f"{model}, {heads} heads, 4096 tokens", make)
    for model, ((*_, k), shards) in V4.items():
        for heads in shards:
            for batch, s1 in ((1, 1), (32, 1), (64, 2)):
                title = f"{model}, {heads} heads, {batch} x {s1}"
                add("npu_sharedkv_prolog_pto", title, prolog_v4(model, heads, batch, s1))
                add("npu_grouped_o_proj_pto", title, output_v4(model, heads, batch, s1))
        for heads in shards:
            for kind in RATIOS if heads == shards[0] else ("CSA",):
                title = f"{model}, {kind}, {heads} heads, 64 x 2"
                add(sparse_attn_sharedkv.OP, title, shared_kv(kind, heads, k, 64, 2))
    for heads in (64, 128):
        for rope in (False, True):
            add("npu_indexer_loss", f"{heads} heads, rope {rope}", loss(heads, rope))
    add("npu_indexer_loss_backward", "4096 rows", loss_backward())
    for size, value in ATTENTION:
        for causal in (False, True):
            title = f"{size} and {value}, causal {causal}"
            sizes = (size, value, causal, 4096, (32, 8))
            add("npu_fused_attention", title, attention(*sizes))
            add("npu_fused_attention_backward", title, attention_backward(*sizes))
    for heads in SHARDS:
        for name, form in DELTA_FORMS.items():
            add(DELTA.OP, f"heads {heads}, {name}", delta(heads, **form))
        for grad in (False, True):
            op = chunk_gated_delta_rule.OP + "_grad" * grad
            add(op, f"heads {heads}", chunked(heads, [8192, 8192], grad))
    return found


# of 4 chunks: as many key heads a round as of 16384 tokens
_THREE_HEADS = 3 * 4 * 573440


def _small() -> list[Case]:
    """Lengths and counts are run-time arguments; a context below the count is taken whole."""
    found: list[Case] = []
    kl = sparse_lightning_indexer_grad_kl_loss
    fp16, one = torch.float16, (24,)
    for model, (_, shards) in SPARSE.items():
        # every way to cut the tokens into rows
        for batch, s1 in ((16, 1), (32, 1), (64, 1), (32, 3), (128, 1)):
            for heads in (8, 16):  # half a tile of heads, and whole ones
                make = layer(model, heads, batch, s1, 9)
                title = f"{model}, {heads} heads, {batch} x {s1}"
                op = "npu_sparse_attention_pto"
                found.append(Case(op, title, make, cores=one, widen=row_major))
        for heads in shards:
            for dtype in (torch.bfloat16, fp16):
                title = f"{model}, {heads} heads, {str(dtype)[6:]}"
                make = layer(model, heads, *((8, 1) if dtype is fp16 else (2, 2)), 40)
                op = "npu_sparse_attention_pto"
                found.append(Case(op, title, make, dtype, cores=one, widen=row_major))
        index_heads = SPARSE[model][0][3]
        found += [
            Case(
                lightning_indexer.OP,
                f"{model}, prefill",
                lightning_indexer.rows("TND", index_heads, 32),
            ),
            Case(
                lightning_indexer_grad.OP,
                f"{model}, packed",
                lightning_indexer_grad.tnd(index_heads, 48),
            ),
        ]
        for heads in shards[:2]:
            title, shape = f"{model}, {heads} heads, packed", ((5,), (90,), heads, 600)
            lengths = ([3, 5], [50, 90])
            grad = sparse_flash_attention_grad
            found += [
                Case(
                    sparse_flash_attention.OP,
                    title,
                    sparse_flash_attention.rows("TND", heads, 40, return_softmax_lse=True),
                ),
                Case(grad.OP, title, grad.call(*shape, LATENT, ROTARY, lengths)),
                Case(
                    kl.OP,
                    title,
                    kl.call(*shape, LATENT, ROTARY, (index_heads, INDEX), lengths),
                    judge=kl.judge_all,
                ),
            ]
    # so many rows that a core has half of a row's channels
    for heads in (8, 16):
        make = sparse_attn_sharedkv.paged([300] * 9, 1, heads, 4, 64)
        title = f"DeepSeek-V4, {heads} heads, 9 rows"
        found.append(Case(sparse_attn_sharedkv.OP, title, make, cores=one))
    for heads in (64, 128):
        for size, rope in ((LATENT, ROTARY), (LATENT + ROTARY, 0)):
            make = indexer_loss.call(heads, size, rope, 600, 2, 700, 1)
            found.append(indexer_loss.case(f"{heads} heads of {size} and {rope}", make))
    title = "2048 slots"
    found.append(Case(indexer_loss_backward.OP, title, indexer_loss_backward.call(2048)))
    for size, value in ATTENTION:
        for causal in (False, True):
            # tails, and whole tiles of every size
            for rows, keys in ((140, 190), (384, 384)):
                title = f"{size} and {value}, causal {causal}, {rows} x {keys}, 4 heads on 1"
                make = fused_attention.dense(
                    rows, keys, size, (4, 1), value_size=value, batch=1, causal=causal
                )
                found.append(Case(fused_attention.OP, title, make))
                after = fused_attention_backward.after(make)
                found.append(Case(fused_attention_backward.OP, title, after))
    for heads in SHARDS:
        for name, form in DELTA_FORMS.items():
            found.append(Case(DELTA.OP, f"heads {heads}, {name}", delta(heads, **form)))
        sizes = ([70, 20], heads, (128, 128))
        rule, grad = chunk_gated_delta_rule, chunk_gated_delta_rule_grad
        # the most heads go by rounds of tokens
        rounds = 1 if heads in SHARDS[:2] else tiling.WORKSPACE
        made = {
            rule.OP: in_rounds(rounds, rule.call(*sizes)),
            grad.OP: in_rounds(_THREE_HEADS, grad.call(*sizes)),
        }
        for op, make in made.items():
            found.append(Case(op, f"heads {heads}", make, judge=rule.judge))
    return found


LARGE = tuple(_large())
CASES = tuple(_small())
CONTROLS = ()
