# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What launchers choose where another choice has the same result and costs time: tiles, programs,
rounds.  Nothing is lowered and nothing runs; launchers are imported where they are asked, so that a
mistake can be planted before."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
from custom.dispatch.register import overload
from custom.dispatch.registry import BY_NAME
from torch import Tensor

from ..support import places
from . import driver


@dataclass(frozen=True)
class Choice:
    """`function` of `file`, called with `given`, launches `kernel` once, and as `wanted` says."""

    file: str
    function: str
    given: dict[str, Any]
    kernel: str
    wanted: dict[str, Any]


def _t(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def _whole(*shape: int) -> Tensor:
    return _t(*shape, dtype=torch.int32)


def _convolutions() -> Iterator[Choice]:
    # 8 sequences of 64 tokens: 4 parts each, none of fewer than 16 tokens
    given = dict(x=_t(8, 64, 256), weight=_t(4, 256), silu=False)
    yield Choice("causal_conv1d", "outputs", given, "convolve", dict(programs=32))
    file = "causal_conv1d_update"
    for sequences, channels, wanted in ((2, 2048, 128), (48, 1024, 1024), (47, 1024, 512)):
        given = dict(x=_t(sequences, 1, channels), conv_states=_t(sequences, 3, channels))
        given |= dict(weight=_t(4, channels), disable_state_update=False, pad_slot_id=-1)
        yield Choice(file, "forward", given, "update", dict(CHANNEL_TILE=wanted))


def _products() -> Iterator[Choice]:
    """Four heads of 512 columns: sixteen tiles, or eight of twice as many columns."""
    given = dict(x=_t(2, 4, 128), w=_t(4, 128, 512), out=_t(2, 4, 512))
    yield Choice("product", "heads", given, "nd_product", dict(programs=16))
    given |= dict(x=_t(2, 4, 192), out_rope=_t(2, 4, 64), sin=_t(2, 64), cos=_t(2, 64))
    given |= dict(interleaved=False)
    yield Choice("absorption", "queries", given, "absorb", dict(programs=8))


def _rows() -> Iterator[Choice]:
    """Heads of 128 are no reason for a tile of more heads."""
    file = "quantized_rows"

    def of(name: str) -> Any:
        return getattr(places.module(file), name)

    x = of("Sums")(_t(1, 2, 8 * 192, dtype=torch.float32))
    given = dict(x=x, rotation=of("Rotation")(_t(2, 64), _t(2, 64), False))
    query = given | dict(plain=_t(2, 8, 128), turned=_t(2, 8, 64))
    yield Choice(file, "of_query_heads", query, "query_heads", dict(HEAD_TILE=8))
    index = given | dict(weights=_t(2, 8), out=_t(2, 8, 128))
    yield Choice(file, "of_index_heads", index, "index_heads", dict(HEAD_TILE=8))


def _indexers() -> Iterator[Choice]:
    query, key = _t(1, 4, 16, 128), _t(1, 8192, 1, 128)
    weights, indices = _t(1, 4, 16), _whole(1, 4, 1, 8)
    x = dict(query=query, key=key, weights=weights, layout_query="BSND", layout_key="BSND")
    x |= dict(sparse_count=8, sparse_mode=3, cmp_ratio=1, select_tail=False)
    x |= dict(actual_seq_lengths_query=None, actual_seq_lengths_key=None, block_table=None)
    # the heads of four tokens are a tile; its keys go to all 24 cores
    wanted = dict(HEAD_TILE=16, TOKENS=4, pieces=24)
    yield Choice("lightning_indexer", "select", dict(x=x), "scores", wanted)

    given = dict(query=query, key=key[:, :64], weights=weights, sparse_indices=indices)
    given |= dict(dy=_t(1, 4, 1, 8))
    for kernel in ("grad_keys", "grad_query"):
        wanted = dict(HEAD_TILE=16)
        yield Choice("lightning_indexer_grad", "backward", given, kernel, wanted)


def _losses() -> Iterator[Choice]:
    file = "indexer_loss"
    # one token more than cores, which fit one round
    score = _t(1, 25, 8, dtype=torch.float32)
    given = dict(query=_t(1, 16, 25, 128), key=_t(1, 64, 128), index_score=score)
    given |= dict(indices=_whole(1, 25, 8), scaling=1.0, chunk_offset=0, eps=0.0)
    for kernel in ("log_sums", "head_sums"):
        yield Choice(file, "forward", given, kernel, dict(HEAD_TILE=16))

    file = "sparse_lightning_indexer_grad_kl_loss"
    query, key = _t(1, 2, 16, 128), _t(1, 64, 1, 128)
    plan = places.module("ragged").plan
    given = dict(
        query=query,
        key=key,
        query_index=query,
        key_index=key,
        weights=_t(1, 2, 16),
        sparse_indices=_whole(1, 2, 1, 8),
        softmax_max=_t(2, 16),
        softmax_sum=_t(2, 16),
        scale_value=1.0,
        d=_t(2, 8),
        plan=plan(query, key, None, None, None, "BSND", "BSND", 3),
    )
    for kernel in ("targets", "scores"):
        yield Choice(file, "_losses", given, kernel, dict(HEAD_TILE=16))


def _attentions() -> Iterator[Choice]:
    # 128 rows of 128 channels fill the largest tile
    q = _t(1, 1, 128, 128)
    given = dict(q=q, k=q, v=q, causal=False, deterministic=False)
    wanted = dict(Q_TILE=128)
    yield Choice("fused_attention", "forward", given, "attend", wanted)

    # 8 heads of 128, of keys in place and laid out
    key = _t(2, 128, 1, 128)
    given = dict(query=_t(1, 8, 128), key=key, value=key, select_idx=_whole(1, 1, 1))
    given |= dict(block_table=_whole(1, 2), scale_value=1.0)
    given |= dict(actual_seq_lengths=_whole(1), actual_seq_lengths_kv=_whole(1))
    for block in (128, 4):
        of_blocks = given | dict(block_size=block)
        yield Choice("sparse_attention_score", "forward", of_blocks, "weigh", dict(HEAD_TILE=8))

    # 24 pages of 128 keys go to all cores; several tokens of 16 heads share them, and have masks
    key = _t(8, 128, 1, 512)
    given = dict(key=key, value=key, block_table=_whole(1, 24), actual_seq_kvlen=_whole(1))
    given |= dict(num_query_heads=16, num_key_value_heads=1, softmax_scale=1.0, sparse_mode=3)
    given |= dict(input_layout="BSND", pre_tokens=0, return_softmax_lse=False)
    for tokens, kernel, wanted in (
        (1, "weigh", dict(ROW_TILE=16, KEY_TILE=64, MASK=0, programs=24)),
        (1, "accumulate", dict(ROW_TILE=16, KEY_TILE=128, MASK=0, programs=24)),
        (2, "weigh", dict(ROW_TILE=32, KEY_TILE=64, MASK=1, programs=24)),
        (9, "weigh", dict(ROW_TILE=128, KEY_TILE=32, programs=24)),
    ):
        filling = given | dict(query=_t(1, tokens, 16, 512))
        yield Choice("fused_infer_attention_score_v2", "forward", filling, kernel, wanted)
    # a page of 64 is half of a tile of 128 keys
    small = given | dict(query=_t(1, 1, 16, 512), key=_t(8, 64, 1, 512))
    wanted = dict(KEY_TILE=64)
    yield Choice("fused_infer_attention_score_v2", "forward", small, "accumulate", wanted)
    # the keys of 4 requests in one part each: nothing is merged
    requests = dict(query=_t(4, 1, 64, 512), block_table=_whole(4, 3), num_query_heads=64)
    filling = given | requests | dict(actual_seq_kvlen=_whole(4))
    wanted = dict(ROW_TILE=32, PIECES=2, programs=16)
    yield Choice("fused_infer_attention_score_v2", "forward", filling, "accumulate", wanted)

    query, key, rope = _t(1, 1, 16, 512), _t(1, 64, 1, 512), _t(1, 1, 16, 64)
    given = dict(query=query, key=key, query_rope=rope, key_rope=_t(1, 64, 1, 64))
    given |= dict(sparse_indices=_whole(1, 1, 1, 8), scale_value=1.0, sparse_block_size=1)
    forward = dict(layout_query="BSND", layout_kv="BSND", sparse_mode=3, return_softmax_lse=False)
    wanted = dict(HEAD_TILE=16)
    yield Choice("sparse_flash_attention", "forward", given | forward, "weigh", wanted)
    # parts of a tile a core, of 512 keys or more
    for keys, tokens, kernel in ((512, 6, "attend"), (512, 7, "weigh"), (384, 1, "weigh")):
        few = given | forward | dict(query=_t(1, tokens, 16, 512), query_rope=_t(1, tokens, 16, 64))
        few |= dict(sparse_indices=_whole(1, tokens, 1, keys))
        yield Choice("sparse_flash_attention", "forward", few, kernel, dict(HEAD_TILE=16))
    # more heads than a tile: a core has two of them
    query, rope = _t(1, 4, 130, 512), _t(1, 4, 130, 64)
    many = given | forward | dict(query=query, query_rope=rope, sparse_indices=_whole(1, 4, 1, 512))
    yield Choice("sparse_flash_attention", "forward", many, "weigh", dict(HEAD_TILE=128))
    # an index of a block of one is a position: nothing to divide
    plain = dict(BLOCKS=False)
    yield Choice("sparse_flash_attention", "forward", given | forward, "collect", plain)
    statistics = _t(1, 1, 1, 16, dtype=torch.float32)
    given |= dict(d_out=query, out=query, softmax_max=statistics, softmax_sum=statistics)
    yield Choice("sparse_flash_attention_grad", "backward", given, "grad_query", wanted)
    yield Choice("sparse_flash_attention_grad", "backward", given, "resolve", plain)


def _deepseek_v4() -> Iterator[Choice]:
    table, none = _whole(1, 2), _whole(1, 0)
    # 24 tokens of 20 heads, which a tile of 32 covers
    given = dict(q=_t(1, 24, 20, 64), ori_kv=_t(2, 128, 1, 64), ori_block_table=table)
    given |= dict(seqused_kv=_whole(1), ori_win_left=127, cmp_ratio=0, layout_kv="PA_ND")
    for kernel in ("weigh", "accumulate"):
        yield Choice("sparse_attn_sharedkv", "forward", given, kernel, dict(HEAD_TILE=32))
    # a tile a core fills the machine
    for tokens, kernel in ((24, "attend"), (23, "weigh")):
        filling = given | dict(q=_t(1, tokens, 32, 64))
        yield Choice("sparse_attn_sharedkv", "forward", filling, kernel, dict(HEAD_TILE=32))

    weight = _t(128, 256)
    given = dict(x=_t(1, 4, 256), wkv=weight, wgate=weight, ape=_t(4, 128), norm_weight=_t(128))
    given |= dict(state_cache=_t(0, 4, 256), state_block_table=none, start_pos=_whole(1))
    given |= dict(rope_sin=_t(1, 1, 64), rope_cos=_t(1, 1, 64), rope_head_dim=64, norm_eps=0.0)
    given |= dict(cmp_ratio=4, coff=1, rotary_mode=2, cache_mode=1, return_cmp_kv=True)
    yield Choice("compressor", "forward", given, "project", dict(ROWS=16, programs=2))

    # 3 groups of 5 tiles each, a core's one
    given = dict(x=_t(20, 3, 512), out=_t(20, 3, 640))
    wanted = dict(ROWS=32, PANELS=8, WHOLE_M=False, WHOLE_K=True, programs=15)
    yield Choice("grouped_o_proj_pto", "_by_groups", given, "group_products", wanted)


def _chunks() -> Iterator[Choice]:
    """Chunks and a token, more tokens than each has bytes, which fit one round."""
    x = _t(25 * 64 + 1, 1, 16)
    given = dict(query=x, key=x, value=x)
    yield Choice("chunk_gated_delta_rule", "forward", given, "products", dict(programs=24))


def _kda() -> Iterator[Choice]:
    """The widest part of a state that divides it and fits."""
    for size, wanted in ((128, 32), (64, 64), (96, 32), (80, 16)):
        given = dict(mixed_qkv=_t(1, 1, 6 * size), z=_t(1, 1, 2, size), b=_t(1, 1, 2))
        given |= dict(
            conv_states=_t(1, 8, 6 * size), conv_weight=_t(4, 6 * size), a=_t(1, 1, 2 * size)
        )
        given |= dict(states=_t(1, 2, size, size), state_layout="kv", norm_weight=_t(size))
        given |= dict(A_log=_t(2), dt_bias=_t(2 * size), state_indices=_whole(1), is_kda=True)
        tile = dict(VALUE_TILE=wanted)
        yield Choice("gated_delta_layer_decode", "forward", given, "advance", tile)


def _choices() -> Iterator[Choice]:
    yield from _convolutions()
    yield from _products()
    yield from _rows()
    yield from _indexers()
    yield from _losses()
    yield from _attentions()
    yield from _deepseek_v4()
    yield from _chunks()
    yield from _kda()


def _launched(choice: Choice) -> list[dict[str, Any]]:
    """The keywords and the number of programs of every launch of its kernel."""
    found: list[dict[str, Any]] = []

    def noted(self: Any, *_: Any, grid: tuple[int, ...], warmup: bool, **keywords: Any) -> None:
        if self.__name__ == choice.kernel:
            found.append(dict(programs=grid[0], **keywords))

    function = getattr(places.module(choice.file), choice.function)
    listed = inspect.signature(function).parameters.values()
    needed = [x.name for x in listed if x.kind is x.POSITIONAL_OR_KEYWORD and x.default is x.empty]
    if any(x.kind is x.VAR_KEYWORD for x in listed):  # the op's arguments
        needed += [x.name for x in overload(BY_NAME[f"npu_{choice.file}"])._schema.arguments]
    driver.install()
    run = triton.JITFunction.run
    triton.JITFunction.run = noted
    try:
        function(**dict.fromkeys(needed) | choice.given)
    finally:
        triton.JITFunction.run = run
    return found


def broken() -> list[str]:
    """What is chosen otherwise."""
    found = []
    for choice in _choices():
        chosen = [{name: x.get(name) for name in choice.wanted} for x in _launched(choice)]
        if chosen != [choice.wanted]:
            title = f"{choice.file}.{choice.function} launches {choice.kernel}"
            found.append(f"{title} with {chosen}, expected {choice.wanted}, once")
    return found
