# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What each launcher takes at the most, and what it says of one more.  On shapes alone; launchers
are imported where they are asked, so that a mistake can be planted before."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from custom.npu_ops.common import tiling, tune
from torch import Tensor

from ..support import places
from . import choices

MOST = 2**24  # positions


@dataclass(frozen=True)
class Limit:
    """The launcher of `file` takes `given`; with `changed`, its reason contains `word`."""

    file: str
    given: dict[str, Any]
    changed: dict[str, Any]
    word: str


def _t(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _apart(pages: int, stride: int) -> Tensor:
    """Pages of 16 rows of 64, so many elements apart."""
    return _t(pages * stride).as_strided((pages, 16, 1, 64), (stride, 64, 64, 1))


def _chunks() -> Iterator[Limit]:
    given = dict(query=_t(64, 2, 256), value=_t(64, 128, 256))
    for file in ("chunk_gated_delta_rule", "chunk_gated_delta_rule_grad"):
        yield Limit(file, given, dict(value=_t(64, 129, 256)), "129 value heads")
        yield Limit(file, given, dict(query=_t(64, 2, 272)), "head sizes 272 and 256")
        yield Limit(file, given, dict(value=_t(64, 128, 272)), "head sizes 256 and 272")
        least = dict(query=_t(64, 2, 16), value=_t(64, 2, 16))
        yield Limit(file, least, dict(query=_t(64, 2, 0)), "head sizes 0 and 16")


def _attention() -> Iterator[Limit]:
    file = "fused_attention"
    given = dict(q=_t(1, 1, 8, 256), v=_t(1, 1, 8, 16))
    yield Limit(file, given, dict(q=_t(1, 1, 8, 272)), "head sizes 272 and 16")
    yield Limit(file, given, dict(v=_t(1, 1, 8, 0)), "head sizes 256 and 0")


def _kda() -> Iterator[Limit]:
    most, least = (128, 256), (16, 16)
    for sizes, changed in (
        (most, (144, 256)),
        (most, (128, 272)),
        (least, (0, 16)),
        (least, (16, 0)),
        (least, (24, 16)),
        (least, (16, 24)),
    ):
        given, other = (dict(q=_t(64, 2, k), v=_t(64, 2, v)) for k, v in (sizes, changed))
        yield Limit("chunk_kda", given, other, f"head sizes {changed[0]} and {changed[1]}")


def _convolutions() -> Iterator[Limit]:
    for file in ("causal_conv1d", "causal_conv1d_update"):
        given = dict(x=_t(1, 2**31 - 1, 16))
        given |= dict(conv_states=_t(2, 3, 16), intermediate_conv_window=None)
        yield Limit(file, given, dict(x=_t(1, 2**31, 16)), "counts below 2**31")
    one, two = (_t(60).as_strided((2, 3, size), (30, 10, 5)) for size in (1, 2))
    given |= dict(conv_states=one, intermediate_conv_window=one)
    plain = dict(x=_t(1, 8, 1), conv_states=one)
    yield Limit("fused_causal_conv1d", plain, dict(conv_states=two), "channels 5 apart")
    for name in ("conv_states", "intermediate_conv_window"):
        yield Limit("causal_conv1d_update", given, {name: two}, f"`{name}` has channels 5 apart")


def _update() -> Iterator[Limit]:
    file = "fused_sigmoid_gating_delta_rule_update"
    given = dict(q=_t(1, 1, 1, 512), v=_t(1, 1, 1, 16), retrieve_parent_token=_t(1, 63))
    yield Limit(file, given, dict(q=_t(1, 1, 1, 1024)), "key size 1024")
    yield Limit(file, given, dict(retrieve_parent_token=_t(1, 64)), "64 steps")


def _losses() -> Iterator[Limit]:
    score = dict(index_score=_t(1, 1, 2048))
    wider = dict(index_score=_t(1, 1, 2049))
    given = dict(query=_t(1, 1, 1, 64), key=_t(1, MOST, 64), query_rope=None, **score)
    yield Limit("indexer_loss", given, wider, "2049 slots")
    yield Limit("indexer_loss", given, dict(key=_t(1, MOST + 1, 64)), "the kernel reaches")
    given = dict(grad_loss=_t(1), target=_t(1), key_length=MOST, **score)
    yield Limit("indexer_loss_backward", given, wider, "2049 slots")
    yield Limit("indexer_loss_backward", given, dict(key_length=MOST + 1), "the kernel reaches")


def _indexers() -> Iterator[Limit]:
    query, longer = _t(1, 1, 1, 64), _t(1, MOST + 1, 1, 64)
    page, table = _t(2, 128, 1, 64), _t(1, MOST // 128)
    paged = dict(query=query, key=page, block_table=table, cmp_ratio=1)
    further = dict(block_table=_t(1, MOST // 128 + 1))
    yield Limit("lightning_indexer", paged, further, "the kernel reaches")
    given = dict(query=query, key=_t(1, MOST, 1, 64), block_table=None, cmp_ratio=1)
    yield Limit("lightning_indexer", given, dict(key=longer), "the kernel reaches")
    # as many tokens as 32 bits count, and one window more
    given |= dict(key=_t(1, MOST - 1, 1, 64), cmp_ratio=128)
    told = "cmp_ratio=128 tokens each"
    yield Limit("lightning_indexer", given, dict(key=_t(1, MOST, 1, 64)), told)
    # 2**31 tokens are one too many
    few = given | dict(key=_t(1, 1, 1, 64), cmp_ratio=(2**31 + 1) // 3)
    told = f"cmp_ratio={(2**31 + 1) // 3} tokens each"
    yield Limit("lightning_indexer", few, dict(key=_t(1, 2, 1, 64)), told)
    one = dict(query=query, key=_apart(1, 1032), block_table=_t(1, 1), cmp_ratio=1)
    yield Limit("lightning_indexer", one, dict(key=_apart(2, 1032)), "pages 1032 apart")

    here, beyond = (_t(1, n, 1, 64, dtype=torch.int8) for n in (MOST, MOST + 1))
    given = dict(query=here[:, :1], key=here, block_table=None, query_dtype=None, cmp_ratio=1)
    yield Limit("quant_lightning_indexer", given, dict(key=beyond), "the kernel reaches")

    grad = dict(query=_t(1, 1, 1, 128), key=_t(1, MOST, 1, 128), dy=_t(1, 1, 1, 8))
    yield Limit("lightning_indexer_grad", grad, dict(key=longer), "the kernel reaches")
    yield Limit("lightning_indexer_grad", grad, dict(query=_t(1, 1, 1, 144)), "head size 144")

    file = "sparse_lightning_indexer_grad_kl_loss"
    given = dict(
        query=query,
        key=_t(1, 8, 1, 64),
        query_index=query,
        key_index=_t(1, 8, 1, 64),
        sparse_indices=_t(1, 1, 1, 2048),
        softmax_max=_t(1),
        query_rope=None,
        key_rope=None,
    )
    yield Limit(file, given, dict(sparse_indices=_t(1, 1, 1, 2049)), "2049 slots")
    yield Limit(file, given, dict(key_index=longer), "the kernel reaches")


def _attentions() -> Iterator[Limit]:
    file = "sparse_flash_attention"
    one = _t(1, 1, 1, 8)
    paged = dict(
        query=_t(1, 1, 1, 64),
        key=_t(2, 128, 1, 64),
        value=None,
        query_rope=None,
        key_rope=None,
        block_table=_t(1, MOST // 128),
        sparse_indices=one,
        sparse_block_size=1,
    )
    far = "the kernel reaches"
    yield Limit(file, paged, dict(block_table=_t(1, MOST // 128 + 1)), far)
    many = paged | dict(key=_t(MOST, 1, 1, 64), block_table=_t(1, 1))
    yield Limit(file, many, dict(key=_t(MOST + 1, 1, 1, 64)), "knows 16777216 apart")
    plain = paged | dict(key=_t(1, MOST, 1, 64), block_table=None)
    yield Limit(file, plain, dict(key=_t(1, MOST + 1, 1, 64)), far)
    blocks = plain | dict(sparse_indices=_t(1, 1, 1, MOST // 4), sparse_block_size=4)
    yield Limit(file, blocks, dict(sparse_indices=_t(1, 1, 1, MOST // 4 + 1)), far)
    wide = paged | dict(query=_t(1, 1, 1, 1568), query_rope=_t(1, 1, 1, 64))
    yield Limit(file, wide, dict(query=_t(1, 1, 1, 1600)), "KiB of")
    both = paged | dict(key=_apart(2, 1024), key_rope=_apart(2, 1024), query_rope=_t(1, 1, 1, 64))
    yield Limit(file, both, dict(key_rope=_apart(2, 2048)), "different strides in rows")

    file = "fused_infer_attention_score_v2"
    given = dict(
        query=_t(1, 1, 16, 512),
        key=_t(2, 128, 1, 512),
        key_rope=None,
        block_table=_t(1, MOST // 128),
        actual_seq_kvlen=_t(1),
        input_layout="BSND",
        num_query_heads=16,
    )
    yield Limit(file, given, dict(block_table=_t(1, MOST // 128 + 1)), far)
    yield Limit(file, given, dict(query=_t(1, 1, 16, 48)), "head sizes 48 and 0")
    yield Limit(file, given, dict(query=_t(1, 1, 16, 0)), "head sizes 0 and 0")
    yield Limit(file, given, dict(key_rope=_t(2, 128, 1, 24)), "head sizes 512 and 24")
    roped = given | dict(key_rope=_t(2, 128, 1, 1120))
    yield Limit(file, roped, dict(key_rope=_t(2, 128, 1, 1136)), "KiB of")

    file = "sparse_attention_score"
    given = dict(
        query=_t(1, 4, 64),
        key=_t(2, 128, 2, 64),
        value=_t(2, 128, 2, 64),
        block_table=_t(1, MOST // 128),
        block_size=4,
        top_k=MOST // 4,
    )
    yield Limit(file, given, dict(block_table=_t(1, MOST // 128 + 1)), far)
    yield Limit(file, given, dict(top_k=MOST // 4 + 1), far)
    yield Limit(file, given, dict(query=_t(1, 4, 48)), "a head size of 48")
    most, more = (_t(pages, 1, 2, 64) for pages in (MOST, MOST + 1))
    many = given | dict(key=most, value=most, block_table=_t(1, 1))
    yield Limit(file, many, dict(key=more, value=more), "knows 16777216 apart")
    planes = _t(4, 128, 2, 64).as_strided((2, 128, 2, 64), (2 * 128 * 128, 128, 64, 1))
    yield Limit(file, given, dict(value=planes), "different strides in rows")

    given = dict(
        query=_t(1, 4, 256),
        key=_t(2, 128, 1, 256),
        block_table=_t(1, MOST // 128),
        top_k=16,
    )
    yield Limit("block_indexer", given, dict(block_table=_t(1, MOST // 128 + 1)), far)
    yield Limit("block_indexer", given, dict(top_k=MOST + 1), far)
    yield Limit("block_indexer", given, dict(query=_t(1, 4, 272)), "a head size of 272")
    yield Limit("block_indexer", given, dict(query=_t(1, 4, 24)), "a head size of 24")

    rows = _t(2, 128, 1, 656, dtype=torch.int8)
    quantized = dict(
        query=_t(1, 1, 1, 576),
        key=rows,
        value=rows,
        block_table=_t(1, MOST // 128),
        sparse_indices=one,
        sparse_block_size=1,
        key_dtype=None,
    )
    further = dict(block_table=_t(1, MOST // 128 + 1))
    yield Limit("kv_quant_sparse_flash_attention", quantized, further, far)
    one, two = (
        _t(2**18, dtype=torch.int8).as_strided((pages, 128, 1, 656), (84000, 656, 656, 1))
        for pages in (1, 2)
    )
    given = quantized | dict(key=one, value=one, block_table=_t(1, 1))
    apart = dict(key=two, value=two)
    yield Limit("kv_quant_sparse_flash_attention", given, apart, "pages 84000 bytes apart")

    file = "sparse_flash_attention_grad"
    grad = dict(
        query=_t(1, 1, 1, 512),
        key=_t(1, MOST, 1, 512),
        value=None,
        query_rope=_t(1, 1, 1, 64),
        key_rope=_t(1, MOST, 1, 64),
    )
    yield Limit(file, grad, dict(query=_t(1, 1, 1, 544)), "head sizes 544 and 64")
    yield Limit(file, grad, dict(query_rope=_t(1, 1, 1, 80)), "head sizes 512 and 80")
    yield Limit(file, grad, dict(key=_t(1, MOST + 1, 1, 512)), far)


def _shared_kv() -> Iterator[Limit]:
    file, far = "sparse_attn_sharedkv", "the kernel reaches"
    page, none = _t(2, 128, 1, 64), dict.fromkeys(("cmp_kv", "cmp_block_table"))
    given = dict(
        q=_t(1, 1, 1, 64),
        ori_kv=page,
        ori_block_table=_t(1, MOST // 128),
        **none,
        ori_sparse_indices=None,
        cmp_sparse_indices=None,
        indices_are_slots=False,
    )
    further = _t(1, MOST // 128 + 1)
    yield Limit(file, given, dict(ori_block_table=further), f"`ori_kv` reaches {MOST + 128} rows")
    both = given | dict(cmp_kv=page, cmp_block_table=_t(1, MOST // 128))
    yield Limit(file, both, dict(cmp_block_table=further), f"`cmp_kv` reaches {MOST + 128} rows")
    both |= dict(cmp_sparse_indices=_t(1, 1, 1, MOST))
    yield Limit(file, both, dict(cmp_sparse_indices=_t(1, 1, 1, MOST + 1)), far)
    many = both | dict(cmp_kv=_t(MOST, 1, 1, 64), cmp_block_table=_t(1, 1))
    yield Limit(file, many, dict(cmp_kv=_t(MOST + 1, 1, 1, 64)), "knows 16777216 apart")
    slots = many | dict(indices_are_slots=True)
    yield Limit(file, slots, dict(cmp_kv=_t(MOST // 16 + 1, 16, 1, 64)), far)
    packed = given | dict(ori_kv=_t(MOST, 1, 64), ori_block_table=None)
    yield Limit(file, packed, dict(ori_kv=_t(MOST + 1, 1, 64)), far)
    # pages of one row have no other stride
    for fine in (_apart(1, 1032), _apart(2, 1032)[:, :1]):
        apart = dict(cmp_kv=_apart(2, 1032))
        yield Limit(file, both | dict(cmp_kv=fine), apart, "pages 1032 apart")
    yield Limit(file, given | dict(q=_t(1, 1, 1, 1632)), dict(q=_t(1, 1, 1, 1664)), "KiB of L1")
    for size in (0, 80):
        yield Limit(file, given, dict(q=_t(1, 1, 1, size)), f"head_dim={size}")
    floats = _t(1, 1, 1, 64, dtype=torch.float32)
    yield Limit(file, given, dict(q=floats), "`q` is torch.float32")


def _prologs() -> Iterator[Limit]:
    wide = tune.TABLE["rows.finish"][-1].tiles["WIDTH"]
    given = dict(
        token_x=_t(1, 8),
        weight_uk=_t(1, 8, 8),
        rmsnorm_gamma_cq=_t(wide),
        kv_cache=_t(1, 16, 1, wide),
        rope_sin=_t(1, 64),
    )
    said = f"more than {wide} numbers"
    yield Limit("mla_prolog_pto", given, dict(rmsnorm_gamma_cq=_t(wide + 1)), said)
    floats = _t(1, 8, dtype=torch.float32)
    yield Limit("mla_prolog_pto", given, dict(token_x=floats), "`token_x` is torch.float32")
    yield Limit("mla_prolog_pto", given, dict(kv_cache=_t(1, 16, 1, wide + 1)), said)
    plain = given | dict(rmsnorm_gamma_cq=None)
    yield Limit("mla_prolog_pto", plain, dict(kv_cache=_t(1, 16, 1, wide + 1)), said)

    int8, fp8 = torch.int8, torch.float8_e4m3fn
    wide = tune.TABLE["quantized_rows.latents"][-1].tiles["MOST"]
    given = given | dict(weight_quant_mode=2, rmsnorm_gamma_cq=_t(wide))
    given |= dict(kv_cache_quant_mode=3, kv_cache=_t(1, 16, 1, 656, dtype=int8))
    fits = dict(rmsnorm_gamma_cq=_t(wide + 1))
    yield Limit("mla_prolog_pto", given, fits, f"more than {wide} numbers")
    rows = dict(kv_cache=_t(1, 16, 1, 656, dtype=fp8))
    yield Limit("mla_prolog_pto", given, rows, "a cache of fp8")
    yield Limit("mla_prolog_pto", given, dict(weight_quant_mode=4), "weight_quant_mode=4")

    given = dict(token_x=_t(1, 8), ln_gamma_k=_t(128), rope_sin=_t(1, 64), weight_quant_mode=1)
    given |= dict(kv_cache_quant_mode=3, index_k_cache=_t(1, 16, 1, 128, dtype=int8))
    lightning = dict(token_x=_t(1, 8), ln_gamma_k=_t(128), sin_idx_rope=_t(1, 64))
    lightning |= dict(idx_k_cache=_t(1, 16, 1, 128, dtype=int8))
    angles = dict(sin_idx_rope=_t(1, 72))
    yield Limit("lightning_indexer_prolog_pto", lightning, angles, "72 rotary dims of 128")
    keys = dict(index_k_cache=_t(1, 16, 1, 128, dtype=fp8))
    yield Limit("indexer_prolog_pto", given, keys, "a cache of fp8")
    yield Limit("indexer_prolog_pto", given, dict(weight_quant_mode=4), "weight_quant_mode=4")
    yield Limit("indexer_prolog_pto", given, dict(index_hadamard=True), "index_hadamard=True")


def _shared_kv_layer() -> Iterator[Limit]:
    file, rank = (
        "sharedkv_prolog_pto",
        tune.TABLE["sharedkv_prolog_pto.of_tokens"][-1].tiles["WIDTH"],
    )
    given = dict(
        token_x=_t(1, 1, 64),
        gamma_cq=_t(rank),
        gamma_kv=_t(1024),
        rope_sin=_t(1, 1, 128),
        w_idx_qb=_t(rank, 1024),
        w_idx_proj=_t(64, 1),
        kv_kind="none",
        index_hadamard=False,
        weight_format="nd",
        weight_quant_mode=0,
    )
    floats = _t(1, 1, 64, dtype=torch.float32)
    yield Limit(file, given, dict(token_x=floats), "`token_x` is torch.float32")
    yield Limit(file, given, dict(gamma_cq=_t(rank + 1)), f"a query latent of {rank + 1}")
    yield Limit(file, given, dict(gamma_kv=_t(1040)), "128 rotary dims of 1040 in `ori_kv`")
    yield Limit(file, given, dict(w_idx_qb=_t(rank, 1040)), "of 1040 in `w_idx_qb`")
    yield Limit(file, given, dict(rope_sin=_t(1, 1, 144)), "144 rotary dims of 1024 in `ori_kv`")
    yield Limit(file, given, dict(rope_sin=_t(1, 1, 24)), "come in 16s")
    yield Limit(file, given, dict(kv_kind="fp8"), "kv_kind='fp8'")
    yield Limit(file, given, dict(index_hadamard=True), "index_hadamard=True")
    yield Limit(file, given, dict(weight_quant_mode=2), "weight_quant_mode 2")
    given = dict(attn_out=_t(1, 1, 2, 1024), rope_sin=_t(1, 1, 128), weight_quant_mode=0)
    file = "grouped_o_proj_pto"
    yield Limit(file, given, dict(weight_quant_mode=2), "weight_quant_mode 2")
    yield Limit(file, given, dict(attn_out=_t(1, 1, 2, 1040)), "128 rotary dims of 1040")
    yield Limit(file, given, dict(rope_sin=_t(1, 1, 144)), "144 rotary dims of 1024")
    yield Limit(file, given, dict(rope_sin=_t(1, 1, 0)), "0 rotary dims of 1024")
    floats = _t(1, 1, 2, 1024, dtype=torch.float32)
    yield Limit(file, given, dict(attn_out=floats), "`attn_out` is torch.float32")


def _merges() -> Iterator[Limit]:
    size = dict(indices=_t(1, 8), size=MOST // 4, interleave=4)
    yield Limit("localize_indices", size, dict(interleave=5), "the kernel divides to")

    wide = max(config.tiles["WIDTH"] for config in tune.TABLE["merge_states.merge"])
    states = dict(outs=_t(64, 1, wide), lses=_t(64, 1, dtype=torch.float32))
    yield Limit("merge_states", states, dict(outs=_t(65, 1, wide)), "65 parts")
    yield Limit("merge_states", states, dict(outs=_t(64, 1, wide + 1)), f"D={wide + 1}")

    topk = dict(values=_t(4, 1, MOST // 4), k=MOST)
    yield Limit("merge_topk", topk, dict(values=_t(4, 1, MOST // 4 + 1)), "the kernel counts up to")
    yield Limit("merge_topk", topk, dict(k=MOST + 1), "the kernel counts up to")


def _deepseek_v4() -> Iterator[Limit]:
    given = dict(x=_t(1, 1, 8), wkv=_t(4096, 8), coff=2, kind="int8", hadamard=False)
    yield Limit("compressor", given, dict(wkv=_t(4128, 8)), "2064 channels")
    yield Limit("compressor", given, dict(wkv=_t(48, 8)), "24 channels")
    yield Limit("compressor", given, dict(kind="fp8"), "kind='fp8'")
    yield Limit("compressor", given, dict(hadamard=True), "hadamard=True")
    floats = _t(1, 1, 8, dtype=torch.float32)
    yield Limit("compressor", given, dict(x=floats), "`x` is torch.float32")
    wide = _t(1, 4, 8, dtype=torch.float64)
    yield Limit("hc_pre", dict(x=_t(1, 4, 8)), dict(x=wide), "`x` is float64")
    for file in ("hc_post", "hc_post_pre"):
        streams = dict(residual=_t(1, 4, 8))
        yield Limit(file, streams, dict(residual=wide), "`residual` is float64")


def limits() -> list[Limit]:
    each = (
        _chunks,
        _convolutions,
        _kda,
        _attention,
        _update,
        _losses,
        _indexers,
        _attentions,
        _shared_kv,
        _prologs,
        _shared_kv_layer,
        _merges,
        _deepseek_v4,
    )
    return [limit for made in each for limit in made()]


def _at_the_edge() -> Iterator[tuple[str, Any, Any]]:
    """(what, what a launcher chooses, what it should), where one number more has smaller tiles."""

    def of(file: str) -> Any:
        return places.module(file)

    for file, name, sizes, wanted in (
        ("chunk_gated_delta_rule", "walk", (128, 128), 128),
        ("chunk_gated_delta_rule_grad", "walk_states", (64, 1024), 64),
        ("chunk_kda_grad", "walk_states", (64, 1024), 64),
    ):
        yield f"{file}._tile{(name, *sizes)}", of(file)._tile(name, *sizes)["VALUE_TILE"], wanted
    for size, wanted in ((64, "abc"), (128, "bc"), (256, "c")):
        title = f"fused_attention._fitting of {size}"
        yield title, "".join(of("fused_attention")._fitting(("a", "b", "c"), size, 16)), wanted
    title = "chunk_kda.at_once of seven chunks, of which three fit"
    yield title, of("chunk_kda").at_once(7, tiling.WORKSPACE // 3), 3
    # of a single page nothing lies behind it
    yield "ragged.page_rows of one page", of("ragged").page_rows(_apart(1, 2048)), 16


def broken() -> list[str]:
    """What is refused that should not be, or taken, or refused for another reason; what is chosen
    that only costs time."""
    found = choices.broken()
    found += [
        f"{what} is {chosen}, expected {wanted}"
        for what, chosen, wanted in _at_the_edge()
        if chosen != wanted
    ]
    for limit in limits():
        module = places.module(limit.file)
        title = f"limit of {limit.file}, {limit.word!r}"
        reason = module.unsupported(**limit.given)
        if reason is not None:
            found.append(f"{title}: {reason}")
        reason = module.unsupported(**limit.given | limit.changed)
        if reason is None or limit.word not in reason:
            found.append(f"{title}: is {reason}")
    return found
