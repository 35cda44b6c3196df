# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""MiniMax-M3's attention of one layer by npu_block_indexer and npu_sparse_attention_score, over
paged caches in pieces, against Hugging Face's over each whole text."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import custom

from ..support.ragged import shuffled_table

pytest.importorskip("transformers", minversion="5.17")
from transformers.cache_utils import DynamicCache
from transformers.models.minimax_m3_vl import configuration_minimax_m3_vl, modeling_minimax_m3_vl

LENGTHS, PAGE, BLOCK, TOP_K = (61, 37, 3), 16, 8, 3
HEADS, SHARED, D, DI, HIDDEN = 6, 2, 16, 12, 40


def _layer(local: int):
    """Weights in float64; some steps inside are float32 all the same."""
    config = configuration_minimax_m3_vl.MiniMaxM3VLTextConfig(
        vocab_size=32,
        hidden_size=HIDDEN,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        num_key_value_heads=SHARED,
        head_dim=D,
        rotary_dim=8,
        layer_types=["minimax_m3_sparse"],
        index_n_heads=SHARED,
        index_head_dim=DI,
        index_block_size=BLOCK,
        index_topk_blocks=TOP_K,
        index_local_blocks=local,
        bos_token_id=1,
        eos_token_id=2,
        rope_parameters=dict(rope_type="default", rope_theta=5e6, partial_rotary_factor=0.5),
    )
    config._attn_implementation = "eager"
    layer = modeling_minimax_m3_vl.MiniMaxM3VLAttention(config, 0).double().eval()
    for parameter in layer.parameters():
        parameter.data = torch.randn(parameter.shape).double() * 0.35
    return config, layer, modeling_minimax_m3_vl.MiniMaxM3VLRotaryEmbedding(config)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[T, N, D]: its first channels, in halves."""
    size = cos.shape[-1]
    one, other = x[..., :size].chunk(2, -1)
    swapped = torch.cat([-other, one], -1)
    front = x[..., :size] * cos[:, None] + swapped * sin[:, None]
    return torch.cat([front, x[..., size:]], -1)


class _Ours:
    """The layer over pages that are NaN until they are written."""

    def __init__(self, config, layer, rotary, local: int) -> None:
        self.config, self.layer, self.rotary, self.local = config, layer, rotary, local
        self.table, pages = shuffled_table(LENGTHS, page=PAGE)
        self.kv = torch.full((pages, 2, PAGE, SHARED, D), torch.nan).double()
        self.index = torch.full((pages, PAGE, 1, DI), torch.nan).double()
        self.lengths = [0] * len(LENGTHS)

    def _rows(self, x: Tensor, projection, norm, size: int, positions: Tensor) -> Tensor:
        rows = (x @ projection.weight.T).view(len(x), -1, size)
        scale = torch.rsqrt(rows.square().mean(-1, keepdim=True) + self.config.rms_norm_eps)
        cos, sin = self.rotary(rows, positions[None])
        return _turned(rows * scale * (1 + norm.weight), cos[0].double(), sin[0].double())

    def step(self, pieces: list[Tensor]) -> list[Tensor]:
        x, a, i = torch.cat(pieces), self.layer, self.layer.indexer
        counts = [len(piece) for piece in pieces]
        starts, self.lengths = (
            self.lengths,
            [n + count for n, count in zip(self.lengths, counts, strict=True)],
        )
        spans = [torch.arange(n, m) for n, m in zip(starts, self.lengths, strict=True)]
        at = torch.cat(spans)
        pages = torch.cat([self.table[r, span // PAGE].long() for r, span in enumerate(spans)])
        q = self._rows(x, a.q_proj, a.q_norm, D, at)
        self.kv[pages, 0, at % PAGE] = self._rows(x, a.k_proj, a.k_norm, D, at)
        self.kv[pages, 1, at % PAGE] = (x @ a.v_proj.weight.T).view(len(x), SHARED, D)
        self.index[pages, at % PAGE] = self._rows(x, i.k_proj, i.k_norm, DI, at)
        query_lengths, lengths = torch.tensor(counts), torch.tensor(self.lengths)
        chosen, _ = custom.npu_block_indexer(
            self._rows(x, i.q_proj, i.q_norm, DI, at),
            self.index,
            self.table,
            actual_seq_lengths=query_lengths,
            actual_seq_lengths_key=lengths,
            block_size=BLOCK,
            top_k=TOP_K,
            local_blocks=self.local,
        )
        out = custom.npu_sparse_attention_score(
            q,
            self.kv[:, 0],
            self.kv[:, 1],
            chosen,
            self.table,
            actual_seq_lengths=query_lengths,
            actual_seq_lengths_kv=lengths,
            num_key_value_heads=SHARED,
            scale_value=D**-0.5,
            block_size=BLOCK,
            top_k=TOP_K,
        )
        return [*(out.flatten(1) @ a.o_proj.weight.T).split(counts)]


@pytest.mark.parametrize("local, pieces", [(1, 1), (1, 23), (2, 7), (2, 61)])
@torch.no_grad()
def test_minimax_m3(local, pieces):
    torch.manual_seed(local)
    config, layer, rotary = _layer(local)
    texts = [torch.randn(n, HIDDEN).double() for n in LENGTHS]
    ours = _Ours(config, layer, rotary, local)
    got: list[list[Tensor]] = [[] for _ in texts]
    while any(n < len(x) for n, x in zip(ours.lengths, texts, strict=True)):
        given = [x[n : n + pieces] for n, x in zip(ours.lengths, texts, strict=True)]
        for parts, part in zip(got, ours.step(given), strict=True):
            parts.append(part)
    for text, parts in zip(texts, got, strict=True):
        positions = torch.arange(len(text))[None]
        angles = tuple(x.double() for x in rotary(text, positions))
        cache = DynamicCache(config=config)
        want = layer(text[None], angles, None, cache, position_ids=positions)[0][0]
        torch.testing.assert_close(torch.cat(parts), want, rtol=0, atol=1e-5)
