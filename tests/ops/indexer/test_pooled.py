# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""GLM-5.3-Flash's sparse attention by our ops, against Transformers' in float64: pooled index keys,
pools and the open one chosen, attention over latents without a rotary part."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import custom

from ...support import deepseek_v4

NAN = float("nan")
LENGTHS = [61, 0, 37, 90, 3]
PAGE, ENTRY_PAGE = 16, 2


@pytest.fixture(autouse=True)
def exact(monkeypatch) -> None:
    """The reference, whatever backend is under test: float64 is its alone."""
    monkeypatch.setattr(custom.config, "backend", "reference")


class Model:
    """A layer of Transformers, and its weights as our ops take them."""

    def __init__(self, m: int, count: int) -> None:
        self.m, self.count = m, count
        hf = deepseek_v4.float64("glm5_next")
        self.config = hf.Glm5NextTextConfig(
            vocab_size=32,
            hidden_size=40,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=4,
            q_lora_rank=24,
            kv_lora_rank=16,
            qk_nope_head_dim=12,
            v_head_dim=10,
            index_n_heads=24,  # with few heads every ReLU of a pool may be off, and pools tie
            index_head_dim=8,
            index_topk=m * count,
            index_kpool=m,
            index_kpool_always_select_tail=True,
            pad_token_id=0,
            layer_types=["deepseek_sparse_attention"],
            indexer_types=["full"],
            mlp_layer_types=["dense"],
        )
        self.config._attn_implementation = "eager"
        torch.manual_seed(0)
        self.layer = deepseek_v4.drawn(hf.Glm5NextTextAttention(self.config, 0))

    def whole(self, x: Tensor) -> Tensor:
        from transformers.cache_utils import DynamicCache

        if not len(x):
            return x
        mask = torch.ones(1, len(x), dtype=torch.bool)
        return self.layer(x[None], mask, DynamicCache(config=self.config))[0][0]


class Engine:
    """Requests in paged caches full of NaN; the states in the smallest ring."""

    def __init__(self, model: Model, requests: int, rows: int, page: int = PAGE) -> None:
        self.model, self.length, self.margin = model, [0] * requests, float("inf")
        g, reach = random.Random(7), max(LENGTHS) + 24

        def cache(columns: int, page: int, *width: int) -> tuple[Tensor, Tensor]:
            pages = [*range(requests * columns + 2)]
            g.shuffle(pages)
            table = torch.tensor(pages[: requests * columns]).view(requests, columns).int()
            return torch.full((len(pages), page, *width), NAN, dtype=torch.float64), table

        entry_page = page if page != PAGE or model.m == 1 else ENTRY_PAGE
        self.kv, self.table = cache(-(-reach // PAGE), PAGE, 1, 16)
        self.keys, self.key_table = cache(
            -(-(reach // model.m + 1) // entry_page), entry_page, 1, 8
        )
        self.state, self.state_table = cache(max(rows, 1), 1, 16)

    def step(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        a, i, m = self.model.layer, self.model.layer.indexer, self.model.m
        size = max([1, *map(len, pieces)])
        x = torch.full((len(pieces), size, pieces[0].shape[-1]), NAN, dtype=torch.float64)
        for row, piece in zip(x, pieces, strict=True):
            row[: len(piece)] = piece
        used = torch.tensor([len(piece) for piece in pieces])
        start = torch.tensor(self.length)
        end = start + used
        custom.key_pool(
            x,
            i.wk.weight,
            i.index_kpool_compress_gate,
            i.index_kpool_compress_ape,
            self.state,
            self.state_table,
            start,
            norm_weight=i.k_norm.weight,
            norm_bias=i.k_norm.bias,
            seqused=used,
            cmp_ratio=m,
            cache_mode=2,
            pool_cache=self.keys,
            pool_block_table=self.key_table,
            return_pooled=False,
        )
        latent = a.q_a_layernorm(a.q_a_proj(x))
        index_query = i.wq_b(latent).unflatten(-1, (-1, 8))
        given: dict[str, Any] = dict(
            actual_seq_lengths_query=used,
            actual_seq_lengths_key=end,
            block_table=self.key_table,
            layout_key="PA_BSND",
            cmp_ratio=m,
        )
        three = index_query, self.keys, i.weights_proj(x)
        chosen, _ = custom.npu_lightning_indexer(
            *three, sparse_count=self.model.count, select_tail=m > 1, **given
        )
        self._judge(three, given, end, used)
        up = a.kv_b_proj.weight.view(4, 12 + 10, 16)
        query = a.q_b_proj(latent).unflatten(-1, (4, 12))
        query = torch.einsum("bshd,hdr->bshr", query, up[:, :12])
        rows = a.kv_a_layernorm(a.kv_a_proj_with_mqa(x))
        for request, (first, n) in enumerate(zip(self.length, used.tolist(), strict=True)):
            at = torch.arange(first, first + n)
            self.kv[self.table[request, at // PAGE].long(), at % PAGE, 0] = rows[request, :n]
        out = custom.npu_sparse_flash_attention(
            query,
            self.kv,
            None,
            chosen,
            12**-0.5,
            block_table=self.table,
            actual_seq_lengths_query=used,
            actual_seq_lengths_kv=end,
            layout_kv="PA_BSND",
            sparse_block_size=m,
            sparse_mode=3,
        )[0]
        out = a.o_proj(torch.einsum("bshr,hvr->bshv", out, up[:, 12:]).flatten(2))
        self.length = end.tolist()
        return [row[:n] for row, n in zip(out, used.tolist(), strict=True)]

    def _judge(self, three: Any, given: dict[str, Any], end: Tensor, used: Tensor) -> None:
        """How far apart the last score that is chosen and the first that is not are."""
        k = self.model.count
        _, scores = custom.npu_lightning_indexer_scores(*three, sparse_count=64, **given)
        for row, n in zip(scores[:, :, 0], used.tolist(), strict=True):
            best = row[:n].sort(-1, descending=True).values
            apart = (best[:, k - 1] - best[:, k])[best[:, k] != 0]
            self.margin = min([self.margin, *apart.tolist()])


def drive(
    e: Engine, xs: Sequence[Tensor], plan: Callable[[int], int], most: int = 0, seed: int = 0
) -> list[Tensor]:
    """`plan` says how many tokens of those left come next; up to `most` in all with wrong ones
    behind, and some of the right ones too are taken back."""
    g = random.Random(seed)
    torch.manual_seed(seed)
    out: list[list[Tensor]] = [[] for _ in xs]
    while any(n < len(x) for n, x in zip(e.length, xs, strict=True)):
        pieces, good = [], []
        for n, x in zip(e.length, xs, strict=True):
            piece = x[n : n + plan(len(x) - n)]
            good.append(len(piece))
            if most and len(piece):
                wrong = torch.randn(g.randrange(most - len(piece) + 1), x.shape[1]).double()
                piece, good[-1] = torch.cat([piece, wrong]), g.randrange(1, good[-1] + 1)
            pieces.append(piece)
        before = [*e.length]
        for kept, y, n in zip(out, e.step(pieces), good, strict=True):
            kept.append(y[:n])
        e.length = [a + b for a, b in zip(before, good, strict=True)]
    return [torch.cat(each) for each in out]


def requests(model: Model) -> list[Tensor]:
    g = torch.Generator().manual_seed(1)
    return [torch.randn(n, 40, generator=g, dtype=torch.float64) for n in LENGTHS]


_PICKS = random.Random(5)
WAYS: dict[str, tuple[Callable[[int], int], int]] = {
    "one": (lambda left: 1, 0),
    "seven": (lambda left: 7, 0),
    "ragged": (lambda left: _PICKS.choice([0, 1, 1, 2, 5, 13, 23]), 0),
    "whole": (lambda left: left, 0),
    "drafts": (lambda left: _PICKS.randrange(1, 5), 6),
}


@pytest.mark.parametrize(
    ("m", "count", "way"),
    [*((4, 3, way) for way in WAYS), (3, 5, "seven"), (16, 2, "ragged"), (1, 9, "seven")],
)
def test_five_ragged_requests(m, count, way):
    model, (plan, most) = Model(m, count), WAYS[way]
    xs = [x[:30] if way == "one" else x for x in requests(model)]
    e = Engine(model, len(xs), m + max(most, 1) - 2)
    got = drive(e, xs, plan, most)
    for y, x in zip(got, xs, strict=True):
        torch.testing.assert_close(y, model.whole(x), rtol=0, atol=1e-10)
    assert e.margin > 1e-9


@pytest.mark.parametrize("way", ["one", "drafts"])
def test_a_ring_of_one_row_less(way):
    """Is refused by shape, or loses a draft."""
    model, (plan, most) = Model(4, 3), WAYS[way]
    xs = requests(model)
    e = Engine(model, len(xs), 4 + max(most, 1) - 3)
    if not most:
        with pytest.raises(ValueError, match=r"^npu_compressor: .*a ring of 2 rows"):
            drive(e, xs, plan, most)
        return
    got = drive(e, xs, plan, most)
    apart = [(y - model.whole(x)).abs().max() for y, x in zip(got, xs, strict=True) if len(x)]
    assert not max(apart) < 1e-10


@pytest.mark.parametrize("at", [20, 23])
def test_prefix_hit(at):
    """Request 1 goes on from request 0's pages: entries of whole pools, and the last at mod m
    states: none at a multiple of m."""
    model = Model(4, 3)
    a, b = (x[:40] for x in requests(model)[::3])
    b = torch.cat([a[:at], b[at:]])
    e = Engine(model, 2, 3, page=1)
    e.step([a[:at], a[:0]])
    e.key_table[1, : at // 4] = e.key_table[0, : at // 4]
    every = torch.arange(at)
    pages = e.table[:, every // PAGE].long()
    e.kv[pages[1], every % PAGE] = e.kv[pages[0], every % PAGE]
    for t in range(at - at % 4, at):
        to, by = (e.state_table[i, t % 3].long() for i in (1, 0))
        e.state[to] = e.state[by]
    e.length[1] = at
    for y, x in zip(drive(e, [a, b], lambda left: 3), (a, b), strict=True):
        torch.testing.assert_close(y, model.whole(x)[at:], rtol=0, atol=1e-10)


# ----------------------------------------------------------------------------------- the fronts


def scores_of(query: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    """[S, w], of one request."""
    return ((query @ keys.T).relu() * weights[..., None]).sum(1)


@pytest.mark.parametrize("m", [1, 3, 16])
@pytest.mark.parametrize("layout", ["BSND", "TND", "PA_BBND"])
@pytest.mark.parametrize("mask_mode", [0, 3])
def test_tokens_of_the_chosen_pools(m, layout, mask_mode):
    """Those of the best pools that are closed where a row stands, and of its own open pool."""
    g = torch.Generator().manual_seed(m)
    pools, tails, used, k = [7, 0, 2], [m - 1, 1 % m, 0], [5, 1, 2], 2
    rows, heads, size = 5, 4, 16
    query, weights, keys = (
        torch.randn(*shape, generator=g, dtype=torch.float64)
        for shape in ((3, rows, heads, size), (3, rows, heads), (3, 8, 1, size))
    )
    given: dict[str, Any] = dict(actual_seq_q=torch.tensor(used), mask_mode=mask_mode)
    given |= dict(actual_seq_k=torch.tensor(pools), topk=k * m, pool_size=m, return_value=True)
    q, w, pooled = query, weights, keys
    if layout == "TND":
        there = torch.arange(rows) < torch.tensor(used)[:, None]
        q, w = query[there], weights[there]
        given |= dict(layout_q="TND", actual_seq_q=torch.tensor(used).cumsum(0))
    if layout != "BSND":
        page = 16 if m == 1 else 2
        table = torch.randperm(3 * (16 // page), generator=g).view(3, -1)
        pooled = torch.full((table.numel(), page, 1, size), NAN, dtype=torch.float64)
        for i, w_ in ((i, w_) for i in range(3) for w_ in range(8)):
            pooled[table[i, w_ // page], w_ % page] = keys[i, w_]
        given |= dict(block_table=table, layout_k="PA_BBND")
    tokens, values = custom.pool_key_indexer(q, pooled, w, torch.tensor(tails), **given)
    assert tokens.shape[-1] == k * m + m - 1 and values.shape[-1] == k
    tokens, values = tokens.view(-1, tokens.shape[-1]), values.view(-1, k)
    at = 0
    for i in range(3):
        for j in range(rows):
            if layout == "TND" and j >= used[i]:
                continue
            seen = pools[i] * m + tails[i] - (used[i] - 1 - j if mask_mode else 0)
            seen = max(seen, 0) if j < used[i] else 0
            score = scores_of(query[i, j : j + 1], keys[i, : seen // m, 0], weights[i, j : j + 1])
            best = sorted(score[0].topk(min(k, seen // m)).indices.tolist())
            wanted = [w_ * m + t for w_ in best for t in range(m)]
            wanted += range(seen // m * m, seen)
            assert tokens[at].tolist() == wanted + [-1] * (len(tokens[at]) - len(wanted))
            torch.testing.assert_close(values[at, : len(best)], score[0, best])
            at += 1
    assert at == len(tokens)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (dict(q_descale=torch.ones(1)), "`q_descale` is given, expected None"),
        (dict(k_descale=torch.ones(1)), "`k_descale` is given, expected None"),
        (dict(quant_mode=0), "`quant_mode` is 0, expected -1"),
        (dict(topk=10), "`topk` is 10, expected a multiple of `pool_size`, 4"),
        (dict(layout_k="TND"), "`layout_k` is 'TND', expected one of"),
        (dict(mask_mode=4), "`mask_mode` is 4, expected one of 0, 3"),
        (dict(pool_size=0), "`pool_size` is 0"),
        (dict(layout_k="PA_BBND"), "`actual_seq_k` is missing"),
        (dict(pool_tail_k=torch.ones(1, 1).int()), "`pool_tail_k` has shape"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, dict) else "",
)
def test_an_indexer_refuses_in_one_sentence(changes, said):
    given = dict(
        query=torch.zeros(1, 2, 3, 16),
        pool_key=torch.zeros(1, 5, 1, 16),
        weights=torch.zeros(1, 2, 3),
        pool_tail_k=torch.tensor([1]),
        topk=8,
        pool_size=4,
    )
    with pytest.raises(ValueError, match=f"^pool_key_indexer: {said}"):
        custom.pool_key_indexer(**given | changes)


@pytest.mark.parametrize("name", ["cos", "sin"])
def test_keys_that_would_be_rotated_are_refused(name):
    x, weight = torch.zeros(1, 5, 8), torch.zeros(4, 8)
    state, table = torch.zeros(2, 4, 8), torch.zeros(1, 2).int()
    with pytest.raises(ValueError, match=f"^key_pool: `{name}` is given, expected None"):
        custom.npu_key_pool(
            x, weight, weight, torch.zeros(4, 4), state, table, None, **{name: torch.ones(1, 2, 2)}
        )
