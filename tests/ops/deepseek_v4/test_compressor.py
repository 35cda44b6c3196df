# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""npu_compressor, and the indexer over its entries: against Hugging Face's DeepSeek-V4 and against
sums over the tokens of a whole request, however that request came in calls."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from custom.dispatch.registry import BY_NAME
from torch import Tensor

import custom

from ...support import deepseek_v4
from ...support.kernels import capturing, replayed
from ...support.ragged import moved

NAN = float("nan")
SPEC = BY_NAME["npu_compressor"]


@dataclass(frozen=True)
class Layer:
    """A compressor's weights; `pairs` and `full` are how its angles come."""

    wkv: Tensor
    wgate: Tensor | None
    ape: Tensor | None
    norm: Tensor | None
    rotary: int
    m: int
    coff: int
    hadamard: bool = False
    pairs: bool = True
    full: bool = False
    ln: tuple[Tensor, Tensor] | None = None
    slice: str = "last"

    @property
    def size(self) -> int:
        return self.wkv.shape[0] // self.coff

    @property
    def state(self) -> int:
        """Numbers of a token's."""
        return self.wkv.shape[0] * (1 if self.wgate is None else 2)

    @property
    def ring(self) -> int:
        """The fewest rows of a ring without drafts."""
        return self.coff * self.m - 1

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(sin, cos) as the op takes them."""
        turn = 0.7 ** torch.arange(self.rotary // 2, dtype=torch.float64, device=positions.device)
        angle = positions[..., None] * turn
        if self.full and self.pairs:  # the second of a pair is never read
            angle = torch.stack([angle, torch.full_like(angle, NAN)], -1).flatten(-2)
        elif self.full:
            angle = torch.cat([angle, torch.full_like(angle, NAN)], -1)
        return angle.sin(), angle.cos()

    def options(self) -> dict[str, Any]:
        return dict(
            coff=self.coff,
            rotary_mode=2 if self.pairs else 1,
            hadamard=self.hadamard,
            rope_slice=self.slice,
        )


def layer(
    m: int,
    coff: int,
    size: int = 16,
    hidden: int = 24,
    rotary: int = 6,
    seed: int = 0,
    gate: bool = True,
    normed: bool = True,
    ln: bool = False,
    **more: Any,
) -> Layer:
    g = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    # numbers that bf16 has, so that every backend gets the same ones
    wkv, wgate = (drawn(coff * size, hidden).mul(0.4).bfloat16().double() for _ in range(2))
    ape, norm = drawn(m, coff * size).float().double(), (drawn(size) + 1).float().double()
    if ln:
        more["ln"] = tuple((drawn(size) + 1).float().double() for _ in range(2))
    if not gate:
        wgate = ape = None
    return Layer(wkv, wgate, ape, norm if normed else None, rotary, m, coff, **more)


def tokens(count: int, hidden: int = 24, seed: int = 1) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(count, hidden, generator=g, dtype=torch.float64).bfloat16().double()


def entry(of: Layer, x: Tensor, w: int) -> Tensor:
    """Entry w of a whole request x, a channel at a time."""
    kv = x @ of.wkv.T
    if of.ln is not None:
        kv = kv - kv.mean(-1, keepdim=True)
        kv = kv / (kv.square().mean(-1, keepdim=True) + 1e-6).sqrt() * of.ln[0] + of.ln[1]
    z = torch.zeros_like(kv)
    if of.wgate is not None:
        z = x @ of.wgate.T + of.ape[torch.arange(len(x)) % of.m]
    pooled = []
    for d in range(of.size):
        values, logits = [], []
        for half in range(of.coff):
            first = (w - of.coff + 1 + half) * of.m
            for t in range(max(first, 0), first + of.m):
                values.append(kv[t, half * of.size + d])
                logits.append(z[t, half * of.size + d])
        pooled.append((torch.stack(logits).softmax(0) * torch.stack(values)).sum())
    c = torch.stack(pooled)
    y = c if of.norm is None else c / (c.square().mean() + 1e-6).sqrt() * of.norm
    sin, cos = replace(of, full=False).angles(torch.tensor(w * of.m))
    last, half = 0 if of.slice == "first" else of.size - of.rotary, of.rotary // 2
    turned = y.clone()
    for i in range(half):
        a, b = (last + 2 * i, last + 2 * i + 1) if of.pairs else (last + i, last + half + i)
        turned[a], turned[b] = y[a] * cos[i] - y[b] * sin[i], y[b] * cos[i] + y[a] * sin[i]
    if of.hadamard:
        signs = [[(-1.0) ** (i & j).bit_count() for j in range(of.size)] for i in range(of.size)]
        turned = turned @ torch.tensor(signs, dtype=torch.float64) * of.size**-0.5
    return turned


def entries(of: Layer, x: Tensor) -> Tensor:
    each = [entry(of, x, w) for w in range(len(x) // of.m)]
    return torch.stack(each) if each else x.new_zeros(0, of.size)


class Precision:
    """What a backend computes in here, and how far its entries may be from exact ones."""

    def __init__(self, device: torch.device, backend: str) -> None:
        self.device = device
        self.dtype, self.state = torch.float64, torch.float64
        if backend != "reference":
            self.dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
            self.state = torch.float32
        # Triton's interpreter takes its time
        self.lengths = LENGTHS if self.dtype is not torch.float32 else [13, 0, 6, 3]
        unit = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2**-8}
        self.unit = unit[self.dtype]

    def of(self, x: Tensor | None) -> Tensor | None:
        return None if x is None else x.to(self.dtype).to(self.device)

    def wide(self, x: Tensor | None) -> Tensor | None:
        return None if x is None else x.to(self.state).to(self.device)

    def close(self, got: Tensor, wanted: Tensor) -> None:
        """Within an ulp of the value and one of its row's rms."""
        got = got.cpu().double()
        rms = wanted.square().mean(-1, keepdim=True).sqrt()
        wrong = ~((got - wanted).abs() <= self.unit * (rms + wanted.abs()))  # NaN is wrong
        assert not wrong.any(), (got[wrong], wanted[wrong])

    def layer(self, of: Layer) -> dict[str, Any]:
        return dict(
            wkv=self.of(of.wkv),
            wgate=self.of(of.wgate),
            ape=self.wide(of.ape),
            norm_weight=self.wide(of.norm),
            rope_head_dim=of.rotary,
            cmp_ratio=of.m,
            ln_weight=None if of.ln is None else self.wide(of.ln[0]),
            ln_bias=None if of.ln is None else self.wide(of.ln[1]),
            **of.options(),
        )


@pytest.fixture
def exact(monkeypatch) -> Precision:
    """The reference's float64, whatever backend is under test."""
    monkeypatch.setattr(custom.config, "backend", "reference")
    return Precision(torch.device("cpu"), "reference")


@pytest.fixture
def precision(device, backend) -> Precision:
    if backend == "npu":
        pytest.skip("the Ascend harness has cases at sizes that the kernels take")
    return Precision(device, backend)


def shuffled(requests: int, columns: int, g: random.Random, spare: int = 2) -> tuple[Tensor, int]:
    """A table of distinct pages in any order, and how many pages there are."""
    pages = list(range(requests * columns + spare))
    g.shuffle(pages)
    return torch.tensor(pages[: requests * columns]).long().view(requests, columns), len(pages)


class Engine:
    """Requests in paged caches full of NaN, and what an engine keeps about them."""

    def __init__(
        self,
        p: Precision,
        of: Layer,
        requests: int,
        *,
        rows: int | None = None,
        page: int = 1,
        entry_page: int = 2,
        reach: int = 120,
        seed: int = 0,
    ) -> None:
        """`rows` of a ring; None: states by page."""
        self.p, self.layer, self.ring = p, of, rows is not None
        g = random.Random(seed)
        columns = -(-(reach if rows is None else rows) // page)
        table, pages = shuffled(requests, columns, g)
        self.table = table.int().to(p.device)
        self.state = torch.full((pages, page, of.state), NAN, dtype=p.state, device=p.device)
        table, pages = shuffled(requests, -(-(reach // of.m + 1) // entry_page), g)
        self.entry_table = table.to(p.device)
        shape = (pages, entry_page, 1, of.size)
        self.entries = torch.full(shape, NAN, dtype=p.dtype, device=p.device)
        self.length = [0] * requests

    def step(self, pieces: Sequence[Tensor], packed: bool = False, **changes: Any) -> Tensor:
        """One call with the next tokens of each request."""
        used = torch.tensor([len(x) for x in pieces], dtype=torch.int32)
        start = torch.tensor(self.length, dtype=torch.int64)
        hidden = self.layer.wkv.shape[1]
        if packed:
            x = torch.cat([*pieces, torch.full((1, hidden), NAN, dtype=torch.float64)])
            bounds = torch.cat([used.new_zeros(1), used.cumsum(0).int()])
            more = dict(cu_seqlens=bounds.to(self.p.device))
            first = start // self.layer.m
            closed = [
                range(int(w), (int(s) + len(x)) // self.layer.m)
                for w, s, x in zip(first, start, pieces, strict=True)
            ]
            rows = min(len(x), len(x) // self.layer.m + len(pieces))
            at = torch.tensor([w * self.layer.m for each in closed for w in each] + [0] * rows)
            at = at[:rows]
        else:
            size = max([1, *map(len, pieces)])
            x = torch.full((len(pieces), size, hidden), NAN, dtype=torch.float64)
            for row, piece in zip(x, pieces, strict=True):
                row[: len(piece)] = piece
            more = dict(seqused=used.to(self.p.device))
            at = custom.entry_positions(start + used, size, self.layer.m, used)
        sin = cos = None
        if self.layer.rotary or self.layer.norm is not None:  # None, or no numbers
            sin, cos = (self.p.wide(each) for each in self.layer.angles(at))
        arguments = dict(
            x=self.p.of(x),
            state_cache=self.state,
            rope_sin=sin,
            rope_cos=cos,
            state_block_table=self.table,
            start_pos=start.to(self.p.device),
            cache_mode=2 if self.ring else 1,
            cmp_cache=self.entries,
            cmp_block_table=self.entry_table,
            **more,
            **self.p.layer(self.layer),
        )
        out = custom.npu_compressor(**arguments | changes)
        self.length = (start + used).tolist()
        return out

    def of(self, request: int) -> Tensor:
        """All entries of a request, from their pages."""
        count, page = self.length[request] // self.layer.m, self.entries.shape[1]
        w = torch.arange(count, device=self.p.device)
        pages = self.entry_table[request, torch.div(w, page, rounding_mode="floor")]
        return self.entries[pages, w % page, 0].cpu()

    def check(self, xs: Sequence[Tensor]) -> None:
        for i, x in enumerate(xs):
            self.p.close(self.of(i), entries(self.layer, x[: self.length[i]]))


def drive(
    e: Engine,
    xs: Sequence[Tensor],
    plan: Callable[[int], int],
    *,
    drafts: int = 0,
    seed: int = 0,
    packed: bool = False,
) -> None:
    """`plan` says how many tokens of a request come next; up to `drafts` in all with wrong ones
    behind, and some of the right ones too are taken back."""
    g = random.Random(seed)
    while any(e.length[i] < len(x) for i, x in enumerate(xs)):
        before, pieces, good = [*e.length], [], []
        for i, x in enumerate(xs):
            piece = x[e.length[i] : e.length[i] + plan(i)]
            good.append(len(piece))
            if drafts and len(piece):
                wrong = g.randrange(0, drafts - len(piece) + 1)
                piece = torch.cat([piece, tokens(wrong, x.shape[1], g.randrange(99))])
                good[-1] = g.randrange(1, good[-1] + 1)
            pieces.append(piece)
        e.step(pieces, packed)
        e.length = [a + b for a, b in zip(before, good, strict=True)]


CSA, HCA = layer(4, 2), layer(8, 1)
KINDS = {
    "csa": CSA,
    "hca": HCA,
    "index": layer(4, 2, hadamard=True),
    "m1": layer(1, 1),
    "m1 overlapping": layer(1, 2),
    "m2": layer(2, 2, full=True),
    "m3": layer(3, 1, size=10, rotary=4, hidden=17, pairs=False),
    "m3 overlapping": layer(3, 2, size=12, rotary=12, pairs=False, full=True),
    "no rotation": layer(5, 2, rotary=0, size=7),
}
# of a pooled indexer: GLM-5.3-Flash's, Qwen4-Exp's, and what neither of them has
POOL = layer(4, 1, rotary=0, normed=False, ln=True)
MEAN = layer(4, 1, gate=False, pairs=False, slice="first")
POOLS = {
    "glm": POOL,
    "qsa": MEAN,
    "m1": layer(1, 1, size=12, rotary=0, normed=False, ln=True),
    "m3": layer(3, 1, size=10, rotary=0, normed=False, ln=True, gate=False),
    "m16": layer(16, 1, rotary=0, normed=False, ln=True, hadamard=True),
    "both norms": layer(4, 1, ln=True, slice="first", full=True),
    "overlapping means": layer(2, 2, gate=False, rotary=0, normed=False),
    "overlapping, no norm": layer(3, 2, size=7, rotary=4, normed=False, pairs=False),
}
# so long that a step has several programs a request
LONG = layer(128, 1, size=128)
LONG_MEAN = layer(160, 1, size=104, gate=False, full=True, hadamard=False)
LONG_PAIR = layer(64, 2, size=128)
every_kind = pytest.mark.parametrize("of", KINDS.values(), ids=KINDS.keys())
LENGTHS = [41, 0, 22, 60, 3]


def requests(of: Layer, lengths: Sequence[int] = LENGTHS) -> list[Tensor]:
    return [tokens(n, of.wkv.shape[1], i) for i, n in enumerate(lengths)]


# ------------------------------------------------------------------------------- Hugging Face


@pytest.mark.parametrize("name", ["CSACompressor", "HCACompressor", "Indexer"])
@pytest.mark.parametrize("way", ["one", "seven", "mixed", "whole", "drafts"])
def test_entries_are_hugging_faces(name, way, exact):
    """In float64, five ragged requests in one batch, the smallest rings, pages full of NaN."""
    hf, config = deepseek_v4.float64(), deepseek_v4.config()
    module = deepseek_v4.drawn(getattr(hf, f"DeepseekV4{name}")(config))
    size = config.index_head_dim if name == "Indexer" else config.head_dim
    rotary = int(config.head_dim * 0.25)
    given = Layer(
        module.kv_proj.weight,
        module.gate_proj.weight,
        module.position_bias,
        module.kv_norm.weight,
        rotary,
        m=module.position_bias.shape[0],
        coff=module.position_bias.shape[1] // module.kv_norm.weight.shape[0],
        hadamard=name == "Indexer",
    )
    assert given.size == size

    def angles(positions: Tensor) -> tuple[Tensor, Tensor]:
        blank = torch.zeros(1, dtype=torch.float64)
        cos, sin = module.rotary_emb(blank, positions.view(1, -1), layer_type="compress")
        return tuple(x.reshape(*positions.shape, -1).contiguous() for x in (sin, cos))

    object.__setattr__(given, "angles", angles)
    g = random.Random(3)
    plan = dict(
        one=lambda i: 1,
        seven=lambda i: 7,
        mixed=lambda i: g.choice([0, 1, 1, 2, 5, 13, 23]),
        whole=lambda i: 99,
        drafts=lambda i: g.randrange(1, 5),
    )[way]
    drafts = 6 if way == "drafts" else 0
    xs = [torch.randn(n, config.hidden_size, dtype=torch.float64) for n in LENGTHS]
    e = Engine(exact, given, len(xs), rows=given.ring + max(drafts - 1, 0))
    drive(e, xs, plan, drafts=drafts)
    for i, x in enumerate(xs):
        wanted = of_hugging_face(module, x)
        if given.hadamard:  # twice is nothing
            h = torch.tensor(
                [[(-1.0) ** (i & j).bit_count() for j in range(size)] for i in range(size)],
                dtype=torch.float64,
            )
            wanted = wanted @ h * size**-0.5
        assert len(wanted) == len(x) // given.m
        torch.testing.assert_close(e.of(i), wanted, rtol=0, atol=1e-10)


def of_hugging_face(module: Any, x: Tensor) -> Tensor:
    """All entries of one request."""
    found = []
    scorer = getattr(module, "scorer", None)
    position = torch.arange(len(x))[None]
    latent = torch.zeros(1, len(x), 24, dtype=torch.float64)
    if not len(x):
        return torch.zeros(0, module.head_dim, dtype=torch.float64)
    if scorer is None:
        return module(x[None], latent, position, None, 0)[0][0, 0]
    # an indexer gives indices; its scorer is given the entries
    hook = scorer.register_forward_pre_hook(lambda _, given: found.append(given[1]))
    module(x[None], latent, position, None, 0)
    hook.remove()
    return found[0][0]


@pytest.mark.parametrize("lengths", [[33, 0, 47, 3]])
def test_selection_is_hugging_faces(lengths, exact):
    """`cmp_ratio`: the entry that closes at a token is visible to it."""
    hf, config = deepseek_v4.float64(), deepseek_v4.config()
    module = deepseek_v4.drawn(hf.DeepseekV4Indexer(config))
    k, heads, size = config.index_topk, config.index_n_heads, config.index_head_dim
    xs = [torch.randn(n, config.hidden_size, dtype=torch.float64) for n in lengths]
    latents = [torch.randn(n, config.q_lora_rank, dtype=torch.float64) for n in lengths]
    g = random.Random(0)
    for page in (2, 16):
        table, pages = shuffled(len(xs), -(-12 // page), g)
        cache = torch.full((pages, page, 1, size), NAN, dtype=torch.float64)
        query = torch.full((len(xs), max(lengths), heads, size), NAN, dtype=torch.float64)
        weights = torch.full((len(xs), max(lengths), heads), NAN, dtype=torch.float64)
        wanted = []
        for i, (x, latent) in enumerate(zip(xs, latents, strict=True)):
            if not len(x):
                wanted.append(None)
                continue
            position = torch.arange(len(x))[None]
            wanted.append(module(x[None], latent[None], position, None, 0)[0])
            each = of_hugging_face(module, x)
            for w, row in enumerate(each):
                cache[table[i, w // page], w % page, 0] = row
            q = module.q_b_proj(latent).view(1, len(x), heads, size).transpose(1, 2)
            cos, sin = module.rotary_emb(x[None], position_ids=position, layer_type="compress")
            query[i, : len(x)] = hf.apply_rotary_pos_emb(q, cos, sin)[0].transpose(0, 1)
            weights[i, : len(x)] = module.scorer.weights_proj(x)
        used = torch.tensor(lengths)
        found, _ = custom.npu_lightning_indexer(
            query,
            cache,
            weights,
            actual_seq_lengths_query=used,
            actual_seq_lengths_key=used,
            block_table=table,
            layout_key="PA_BSND",
            sparse_count=k,
            cmp_ratio=4,
        )
        for i, each in enumerate(wanted):
            for j in range(lengths[i]):
                assert {*found[i, j, 0].tolist()} - {-1} == {*each[j].tolist()} - {-1}, (i, j)
            assert (found[i, lengths[i] :] == -1).all()


# --------------------------------------------------------------------------------- every backend


@pytest.mark.parametrize(
    "of", [*KINDS.values(), *POOLS.values()], ids=[*KINDS, *(f"pool: {name}" for name in POOLS)]
)
@pytest.mark.parametrize("packed", [False, True], ids=["bsnd", "tnd"])
def test_ragged_requests(of, packed, precision):
    """Prefill beside decodes, chunks longer than the ring and those that begin in a window."""
    g, xs = random.Random(7), requests(of, precision.lengths)
    e = Engine(precision, of, len(xs), rows=max(of.ring, 1))
    drive(e, xs, lambda i: g.choice([0, 1, 2, 5, 13, 23]), packed=packed)
    e.check(xs)


@pytest.mark.parametrize("of", [LONG, LONG_MEAN, LONG_PAIR], ids=["gate", "mean", "overlapping"])
@pytest.mark.parametrize("page, ring", [(8, True), (3, False)], ids=["ring", "pages of 3"])
def test_windows_that_many_programs_read(of, page, ring, precision):
    """Long ones, of which some close, with a token or more of the next; also in a first window."""
    xs = requests(of, [131, 127, 0, 259, 200][: 5 if len(precision.lengths) > 4 else 2])
    e = Engine(precision, of, len(xs), rows=of.ring + 3 if ring else None, page=page, reach=264)
    drive(e, xs, lambda i: 125 if e.length[i] in (0, 125) else 1 + i % 4)
    e.check(xs)


@pytest.mark.parametrize("page", [1, 3, 8])
def test_states_by_page(page, precision):
    g, xs = random.Random(2), requests(CSA, precision.lengths)
    e = Engine(precision, CSA, len(xs), page=page, entry_page=16)
    drive(e, xs, lambda i: g.choice([1, 3, 9]))
    e.check(xs)


@pytest.mark.parametrize("of", [CSA, HCA, POOL, MEAN], ids=["csa", "hca", "glm", "qsa"])
@pytest.mark.parametrize("page", [1, 4])
def test_rejected_drafts(of, page, precision):
    """Tokens taken back across a close, with the smallest ring for that."""
    xs, most = requests(of, [30, 17]), 6
    g = random.Random(1)
    for seed in range(3 if len(precision.lengths) > 4 else 1):
        e = Engine(precision, of, 2, rows=of.ring + most - 1, page=page, seed=seed)
        drive(e, xs, lambda i: g.randrange(1, 5), drafts=most, seed=seed)
        e.check(xs)


def test_a_ring_of_one_row_less_loses_a_draft(precision):
    """The bound is sharp; without drafts the op itself refuses one row less."""
    xs = requests(CSA, [30])
    g = random.Random(1)
    e = Engine(precision, CSA, 1, rows=CSA.ring + 4)
    drive(e, xs, lambda i: g.randrange(1, 5), drafts=6, seed=1)
    with pytest.raises(AssertionError):
        e.check(xs)


def test_a_close_inside_a_draft_is_closed_again_by_other_tokens(precision):
    xs = requests(CSA, [8])
    e = Engine(precision, CSA, 1, rows=CSA.ring + 3)
    e.step([xs[0][:6]])
    e.step([torch.cat([xs[0][6:7], tokens(3, seed=50)])])  # wrong from token 7 on
    wrong = e.of(0)[1].clone()
    e.length = [7]
    e.step([xs[0][7:8]])
    e.check(xs)
    assert not torch.equal(e.of(0)[1], wrong)


@pytest.mark.parametrize("at", [8, 10, 12, 15])
@pytest.mark.parametrize("of", [CSA, HCA, POOL, MEAN], ids=["csa", "hca", "glm", "qsa"])
def test_prefix_hit(of, at, precision):
    """Request 1 goes on from what request 0 left at token `at`: shared entries, copied states;
    entries of a window may lie in a page that both read."""
    a = tokens(30, seed=1)
    b = torch.cat([a[:at], tokens(15, seed=2)])
    e = Engine(precision, of, 2, rows=of.ring, entry_page=1)
    for first in range(0, at, 3):
        e.step([a[first : min(first + 3, at)], a[:0]])
    e.entry_table[1, : at // of.m] = e.entry_table[0, : at // of.m]
    for t in range(max(0, at - of.ring), at):
        to, by = (e.table[i, t % of.ring].long() for i in (1, 0))
        e.state[to] = e.state[by]
    e.length[1] = at
    drive(e, [a, b], lambda i: 2 + i)
    e.check([a, b])


@pytest.mark.parametrize("last", [0, 2, 3, 4, 7, 8, 11])
def test_first_windows(last, precision):
    """p < m - 1, m - 1, m, 2 m - 1: window -1 has no rows, and a window closes with its last."""
    x = tokens(last + 1)
    e = Engine(precision, CSA, 1, rows=CSA.ring)
    out = e.step([x])
    e.check([x])
    closed = (last + 1) // CSA.m
    precision.close(out[0, :closed], entries(CSA, x))
    assert not out[0, closed:].any()


def test_rows_of_the_output_are_counted_from_the_first_window(precision):
    """Several closes in one call that begins in a window; zeros where none closes."""
    x = tokens(23)
    e = Engine(precision, CSA, 2, rows=CSA.ring)
    e.step([x[:6], x[:0]])
    out = e.step([x[6:23], x[:2]])
    assert out.shape == (2, 5, CSA.size)
    wanted = entries(CSA, x)
    precision.close(out[0, :4], wanted[1:5])
    assert not out[0, 4].any() and not out[1].any()


def test_packed_rows_are_those_that_close(precision):
    x = tokens(23)
    e = Engine(precision, CSA, 3, rows=CSA.ring)
    e.step([x[:6], x[:0], x[:0]], packed=True)
    out = e.step([x[6:13], x[:0], x[:8]], packed=True)
    wanted = entries(CSA, x)
    assert out.shape == (min(16, 16 // 4 + 3), CSA.size)
    precision.close(out[:4], wanted[[1, 2, 0, 1]])
    assert not out[4:].any()


@pytest.mark.parametrize("gap", [0, 2])
def test_prefix_sums_that_do_not_begin_at_0(gap, precision):
    """And `seqused` beside them: tokens of nobody are not read."""
    x = tokens(14)
    e = Engine(precision, CSA, 2, rows=CSA.ring)
    junk = torch.full((3, 24), NAN, dtype=torch.float64)
    packed = torch.cat([junk[:gap], x[:9], junk, x[:4], junk])
    bounds = torch.tensor([gap, gap + 12, gap + 19], device=precision.device)
    at = torch.tensor([0, 4, 0] + [0] * 9)[: min(len(packed), len(packed) // 4 + 2)]
    sin, cos = (precision.wide(a) for a in CSA.angles(at))
    used = torch.tensor([9, 4], device=precision.device)
    out = e.step(
        [x[:9], x[:4]],
        x=precision.of(packed),
        cu_seqlens=bounds,
        seqused=used,
        rope_sin=sin,
        rope_cos=cos,
    )
    precision.close(out[:3], entries(CSA, x)[[0, 1, 0]])
    assert not out[3:].any()
    e.check([x[:9], x[:4]])


def test_tokens_before_position_0_are_absent(precision):
    """start_pos below 0: as if those tokens were not there."""
    x = tokens(12)
    e = Engine(precision, CSA, 1, rows=CSA.ring)
    e.length = [-3]
    junk = torch.full((3, 24), NAN, dtype=torch.float64)
    e.step([torch.cat([junk, x[:6]])])
    e.step([x[6:]])
    e.check([x])


@pytest.mark.parametrize("used", [[0, 0], [0, 5], [5, 5], [7, 9]])
def test_seqused(used, precision):
    """0, some, all of 5 tokens, and more than there are."""
    xs = requests(CSA, [5, 5])
    e = Engine(precision, CSA, 2, rows=CSA.ring)
    before = e.state.clone()
    given = torch.tensor(used, device=precision.device)
    e.step(xs, seqused=given)
    e.length = [min(n, 5) for n in used]
    e.check(xs)
    if not any(used):
        assert torch.equal(e.state.isnan(), before.isnan())


def test_no_requests_and_no_tokens(precision):
    e = Engine(precision, CSA, 0, rows=CSA.ring)
    sin = torch.zeros(0, 2, 3, dtype=precision.state, device=precision.device)
    x = torch.zeros(0, 5, 24, dtype=precision.dtype, device=precision.device)
    out = e.step([], x=x, rope_sin=sin, rope_cos=sin)
    assert out.shape == (0, 2, CSA.size)
    e = Engine(precision, CSA, 2, rows=CSA.ring)
    out = e.step(
        [tokens(0)] * 2,
        x=x.new_zeros(2, 0, 24),
        rope_sin=sin.new_zeros(2, 0, 3),
        rope_cos=sin.new_zeros(2, 0, 3),
    )
    assert out.shape == (2, 0, CSA.size) and e.state.isnan().all()


def test_absent_pages(precision):
    """-1 in the table of states: those tokens have no weight and are not kept; in the table of
    entries: not stored.  Other pages stay as they are."""
    x = tokens(12)
    e = Engine(precision, CSA, 1, page=2, entry_page=1)
    e.table[0, 1] = -1  # tokens 2 and 3
    e.entry_table[0, 1] = -1
    e.step([x[:4]])
    e.step([x[4:]], return_cmp_kv=False)
    kept = e.of(0)
    precision.close(kept[0], entry(CSA, x, 0))
    untouched = torch.ones(len(e.entries), dtype=torch.bool)
    untouched[e.entry_table[0, [0, 2]].cpu()] = False
    assert e.entries[untouched.to(precision.device)].isnan().all()
    precision.close(kept[2], entry(CSA, x, 2))
    # the entry of window 1 in a call of its own, which tells what absent rows are worth
    e = Engine(precision, CSA, 1, page=2, entry_page=1)
    e.table[0, 1] = -1
    e.step([x[:4]])
    e.step([x[4:8]])
    logits = x @ CSA.wgate.T + CSA.ape.repeat(3, 1)
    values = x @ CSA.wkv.T
    there, d = [0, 1, 4, 5, 6, 7], CSA.size
    pick = lambda rows: torch.cat([rows[there[:2], :d], rows[there[2:], d:]])  # noqa: E731
    c = (pick(logits).softmax(0) * pick(values)).sum(0)
    y = c / (c.square().mean() + 1e-6).sqrt() * CSA.norm
    precision.close(e.of(0)[1][: d - 6], y[: d - 6] + 0)
    got = e.of(0)[1].double()
    torch.testing.assert_close(got.norm(), y.norm(), rtol=20 * precision.unit, atol=0)


def test_pages_past_the_cache_are_absent(precision):
    x = tokens(12)
    e = Engine(precision, CSA, 1, page=2, entry_page=1)
    e.entry_table[0, 1] = len(e.entries)
    e.table[0, 5] = 2**31 - 1
    e.step([x])
    assert e.entries.isnan().all(-1).sum() == len(e.entries) - 2
    e.entry_table[0, 1] = -2
    e.step([x[:0]])


@pytest.mark.parametrize("gap", [1, 5])
def test_pages_that_lie_apart(gap, precision):
    xs = requests(CSA, [13, 9])
    e = Engine(precision, CSA, 2, rows=8, page=4, entry_page=4)
    for name in ("state", "entries"):
        whole = getattr(e, name)
        pool = whole.new_full((len(whole), whole[0].numel() + gap * 16), NAN)
        part = pool[:, 16 : 16 + whole[0].numel()].view(whole.shape)
        setattr(e, name, part)
        setattr(e, f"{name}_pool", (pool, whole[0].numel()))
    drive(e, xs, lambda i: 4 + i)
    e.check(xs)
    for pool, size in (e.state_pool, e.entries_pool):
        assert pool[:, :16].isnan().all() and pool[:, 16 + size :].isnan().all()


@pytest.mark.parametrize("name", ["state", "entries"])
def test_offsets_past_2_to_the_31(name, precision):
    """The second page of a cache lies so far behind the first; drafts are taken back there, too."""
    p, xs = precision, requests(CSA, [13])
    if p.dtype is torch.float64:  # half the memory
        p.dtype, p.state, p.unit = torch.float32, torch.float32, 2e-5
    e = Engine(p, CSA, 1, rows=CSA.ring + 2, page=9, entry_page=2, reach=16)
    e.table[:], e.entry_table[0, :2] = 1, torch.tensor([1, 0])
    near, apart = getattr(e, name)[:2], 2**31 + 64
    room = torch.empty(apart + near[0].numel(), dtype=near.dtype, device=near.device)
    far = room.as_strided(near.shape, (apart, *near.stride()[1:])).fill_(NAN)
    setattr(e, name, far)
    drive(e, xs, lambda i: 2, drafts=3)
    e.check(xs)
    assert not far[1].isnan().all()


def test_positions_far_beyond_32_bits(precision):
    """start_pos of 64 bits; a ring reaches there."""
    far = 2**33 + 2
    x = tokens(10)
    e = Engine(precision, CSA, 1, rows=8, page=2)
    e.length = [far]
    at = torch.zeros(1, 3, dtype=torch.int64)
    sin, cos = (precision.wide(a) for a in CSA.angles(at))
    e.step([x[:3]], rope_sin=sin[:, :1], rope_cos=cos[:, :1])
    out = e.step([x[3:]], rope_sin=sin[:, :2], rope_cos=cos[:, :2])
    # the first window that closes there is made of states that were never written
    still = replace(CSA, rotary=0)
    shifted = torch.cat([torch.zeros(2, 24, dtype=torch.float64), x])
    wanted = entry(still, shifted, 2)
    precision.close(out[0, 1], wanted)


def test_states_are_kv_and_z_in_float32(precision):
    """2^-22 sqrt(H) |x| |w| of a row; the last tokens of a chunk that is longer than the ring."""
    x = tokens(21)
    e = Engine(precision, CSA, 1, rows=7)
    e.step([x])
    kv, z = x @ CSA.wkv.T, x @ CSA.wgate.T + CSA.ape.repeat(6, 1)[:21]
    wanted = torch.cat([kv, z], -1)
    for t in range(14, 21):
        got = e.state[e.table[0, t % 7].long(), 0].cpu().double()
        weights = torch.cat([CSA.wkv, CSA.wgate])
        bound = 2**-22 * 24**0.5 * x[t].norm() * weights.norm(dim=-1) + 1e-6 * wanted[t].abs()
        assert ((got - wanted[t]).abs() <= bound).all()


@pytest.mark.parametrize("kind", ["fp8", "fp8 packed", "int8"])
@pytest.mark.parametrize(
    ("hadamard", "rounding"), [(False, "bf16"), (True, "bf16"), (True, "fp32")]
)
def test_index_entries_in_8_bits(kind, hadamard, rounding, precision):
    """The bytes that `npu_index_cache_write` makes of the entries before they are rounded."""
    of = layer(4, 2, size=128, rotary=64, hidden=32)
    xs = requests(of, [19, 9])
    p = precision
    if p.dtype is not torch.bfloat16:  # the output is what is stored, not rounded
        p = Precision(p.device, "reference")
        p.dtype = p.state = torch.float32
    e = Engine(p, of, 2, rows=of.ring, entry_page=16)
    pages = torch.zeros(4, 16, 132, dtype=torch.uint8, device=p.device)
    values = torch.zeros(4, 16, 1, 128, dtype=torch.int8, device=p.device)
    scales = torch.zeros(4, 16, 1, dtype=torch.float16, device=p.device)
    plain = kind.split()[0]
    given: dict[str, Any] = dict(kind=plain, cmp_cache=values, cmp_scale_cache=scales)
    if plain == "fp8":
        values, scales = custom.index_cache_views(pages, "fp8")
        given |= dict(cmp_cache=values, cmp_scale_cache=scales)
        if kind == "fp8 packed":
            given |= dict(cmp_cache=pages, cmp_scale_cache=None)
    e.entry_table = torch.tensor([[2], [1]], device=p.device)
    plain_out = e.step(xs)
    e.length = [0, 0]
    out = e.step(xs, hadamard=hadamard, hadamard_round=rounding, **given)
    assert out.shape == plain_out.shape
    slots = torch.tensor([32, 33, 34, 35, -1, 16, 17, -1, -1, -1], device=p.device)
    wanted = values.clone(), scales.clone()
    for each in wanted:
        each.view(torch.uint8).zero_()
    custom.npu_index_cache_write(
        plain_out.view(-1, 128),
        *wanted,
        slots,
        kind=plain,
        index_hadamard=hadamard,
        hadamard_round=rounding,
    )
    if p.dtype is not torch.bfloat16:
        for got, each in zip((values, scales), wanted, strict=True):
            assert torch.equal(got.view(torch.uint8), each.view(torch.uint8))
    got, exact = (v.float() * s.float()[..., None] for v, s in ((values, scales), wanted))
    assert (got - exact).norm() <= 0.04 * exact.norm() and exact.any()


@pytest.mark.parametrize("gap", [0, 576])
def test_entries_as_rows_of_584_bytes(gap, precision):
    """D 512: the bytes that `npu_latent_cache_write` makes of the entries; pages may lie apart."""
    of = layer(2, 1, size=512, rotary=64, hidden=16)
    xs = requests(of, [9, 4])
    p = precision
    if p.dtype is torch.float64:  # the output is what is stored, not rounded
        p.dtype = p.state = torch.float32
        p.unit = 2e-5
    e = Engine(p, of, 2, rows=of.ring, entry_page=4)
    pool = torch.zeros(4, 4 * 584 + gap, dtype=torch.uint8, device=p.device)
    rows = pool[:, : 4 * 584].view(4, 4, 1, 584)
    table = torch.tensor([[2, -1], [1, 0]], device=p.device)
    out = e.step(xs, kind="fp8", cmp_cache=rows, cmp_block_table=table)
    slots = torch.tensor([8, 9, 10, 11, -1, 4, 5, -1, -1, -1], device=p.device)
    wanted = torch.zeros(4, 4, 1, 584, dtype=torch.uint8, device=p.device)
    flat = out.view(-1, 512)
    custom.npu_latent_cache_write(
        flat[:, :448], flat[:, 448:].bfloat16(), wanted, slots, kind="fp8", row_layout="v4"
    )
    assert torch.equal(rows, wanted) and wanted.any()
    assert not pool[:, 4 * 584 :].any()


@pytest.mark.parametrize("of, count", [(CSA, 12), (LONG, 260)], ids=["csa", "long"])
def test_a_graph_replays_with_other_lengths(of, count, device, precision):
    """A window that closes in one replay and not in another; nothing is read on the host."""
    if device.type != "cuda":
        pytest.skip("needs a GPU: there are no CUDA graphs elsewhere")
    x = tokens(count)
    e = Engine(precision, of, 1, rows=of.ring, reach=264)
    start = torch.zeros(1, dtype=torch.int64, device=device)
    one = precision.of(x[None, :1]).clone()
    sin, cos = (precision.wide(a) for a in of.angles(torch.zeros(1, 1)))
    arguments = dict(
        x=one,
        state_cache=e.state,
        rope_sin=sin,
        rope_cos=cos,
        state_block_table=e.table,
        start_pos=start,
        cache_mode=2,
        cmp_cache=e.entries,
        cmp_block_table=e.entry_table,
        **precision.layer(of),
    )
    custom.npu_compressor(**arguments)
    graph = torch.cuda.CUDAGraph()
    with capturing(graph, device):
        custom.npu_compressor(**arguments)
    for t in range(count):
        one.copy_(precision.of(x[None, t : t + 1]))
        start.fill_(t)
        at = torch.tensor([[t // of.m * of.m]])
        for into, new in zip((sin, cos), of.angles(at), strict=True):
            into.copy_(precision.wide(new))
        graph.replay()
    e.length = [count]
    e.check([x])


# ------------------------------------------------------------------------------- without caches


@every_kind
def test_without_caches(of, precision):
    xs = requests(of, [17, 0, 9])
    x = torch.full((3, 17, of.wkv.shape[1]), NAN, dtype=torch.float64)
    for row, each in zip(x, xs, strict=True):
        row[: len(each)] = each
    used = torch.tensor([17, 0, 9])
    at = custom.entry_positions(used, 17, of.m, used)
    sin, cos = (precision.wide(each) for each in of.angles(at))
    out = custom.compressor(
        precision.of(x),
        state_cache=None,
        rope_sin=sin,
        rope_cos=cos,
        seqused=used.to(precision.device),
        **precision.layer(of),
    )
    for row, each in zip(out, xs, strict=True):
        closed = len(each) // of.m
        precision.close(row[:closed], entries(of, each))
        assert not row[closed:].any()


def _gradients(of: Layer, p: Precision, packed: bool, out_grad: Tensor) -> list[Tensor]:
    x = tokens(22, of.wkv.shape[1])
    given = p.layer(of)
    learned = dict(x=p.of(x if packed else x.view(2, 11, -1)))
    learned |= {name: given.pop(name) for name in ("wkv", "wgate", "ape", "norm_weight")}
    learned = {name: each.clone().requires_grad_() for name, each in learned.items()}
    if packed:
        ends = torch.tensor([1, 12, 12, 20], device=p.device)
        rows = min(22, 22 // of.m + 3)
        given |= dict(cu_seqlens=ends)
        at = torch.arange(rows) * of.m
    else:
        given |= dict(seqused=torch.tensor([11, 10], device=p.device))
        at = (torch.arange(-(-11 // of.m)) * of.m).expand(2, -1)
    sin, cos = (p.wide(each).contiguous() for each in of.angles(at))
    out = custom.npu_compressor(**learned, state_cache=None, rope_sin=sin, rope_cos=cos, **given)
    drawn = p.of(out_grad.flatten()[: out.numel()].view(out.shape))
    return list(torch.autograd.grad(out, [*learned.values()], drawn))


@pytest.mark.parametrize("packed", [False, True], ids=["bsnd", "tnd"])
@every_kind
def test_gradient_in_float64(of, packed, exact):
    """Against finite differences."""
    if of.full:
        of = replace(of, full=False)
    x = tokens(9, of.wkv.shape[1])
    at = torch.arange(9) * of.m
    more: dict[str, Any] = dict(cu_seqlens=torch.tensor([0, 2, 9]))
    rows = min(9, 9 // of.m + 2)
    at = at[:rows]
    if not packed:
        x, more = x[None], dict(seqused=torch.tensor([8]))
        at = (torch.arange(-(-9 // of.m)) * of.m)[None]
    sin, cos = of.angles(at)
    given = exact.layer(of) | dict(state_cache=None, rope_sin=sin, rope_cos=cos) | more
    names = ("wkv", "wgate", "ape", "norm_weight")

    def call(x: Tensor, *learned: Tensor) -> Tensor:
        return custom.npu_compressor(x=x, **given | dict(zip(names, learned, strict=True)))

    inputs = [each.clone().requires_grad_() for each in (x, *(given[n] for n in names))]
    assert torch.autograd.gradcheck(call, inputs, fast_mode=True)


@pytest.mark.parametrize("packed", [False, True], ids=["bsnd", "tnd"])
@every_kind
def test_gradient_on_every_backend(of, packed, precision, request):
    g = torch.randn(2000, dtype=torch.float64).bfloat16().double()
    got = _gradients(of, precision, packed, g)
    wanted = _gradients(of, request.getfixturevalue("exact"), packed, g)
    for a, b in zip(got, wanted, strict=True):
        assert (a.cpu().double() - b).norm() <= 4 * precision.unit * b.norm() + 1e-30


def test_gradient_beside_caches_is_refused(precision):
    x = tokens(5)
    e = Engine(precision, CSA, 1, rows=CSA.ring)
    with pytest.raises(RuntimeError, match=r"^npu_compressor: `x` requires grad"):
        e.step([x], x=precision.of(x[None]).requires_grad_())
    assert e.state.isnan().all()
    with torch.no_grad():
        e.step([x], x=precision.of(x[None]).requires_grad_())
    e.check([x])


# ---------------------------------------------------------------------------------- the indexer


@pytest.mark.parametrize("ratio", [1, 2, 3, 4, 128])
@pytest.mark.parametrize("sparse_mode", [0, 3])
@pytest.mark.parametrize("layout", ["BSND", "PA_BSND", "small pages"])
def test_visible_entries(ratio, sparse_mode, layout, device):
    """limit // cmp_ratio, the limit in tokens; k below, at and above the number of entries."""
    if ratio == 1 and layout == "small pages":
        pytest.skip("a page of tokens has a multiple of 16")
    dtype = torch.bfloat16 if device.type != "cpu" else torch.float32
    g = torch.Generator().manual_seed(ratio)
    entries, rows, heads, size = 33, 6, 3, 16
    lengths = [33 * ratio + ratio - 1, 7 * ratio, 3, 0]
    used = [6, 5, 3, 0]
    q = torch.randn(4, rows, heads, size, generator=g).to(dtype)
    keys = torch.randn(4, entries, 1, size, generator=g).to(dtype)
    w = torch.randn(4, rows, heads, generator=g).to(dtype)
    given: dict[str, Any] = dict(layout_key="BSND", key=keys.to(device))
    if layout != "BSND":
        page = 16 if layout == "PA_BSND" else 4
        columns = -(-entries // page)
        table, pages = shuffled(4, columns, random.Random(0))
        cache = torch.full((pages, page, 1, size), NAN, dtype=dtype)
        for i in range(4):
            for e in range(entries):
                cache[table[i, e // page], e % page] = keys[i, e]
        given = dict(layout_key="PA_BSND", key=cache.to(device), block_table=table.to(device))
    scores = torch.einsum("bsnd,btd->bsnt", q.double(), keys[:, :, 0].double()).relu()
    scores = (scores * w.double()[..., None]).sum(2)
    for k in (1, 7, 40):
        index, _ = custom.npu_lightning_indexer_scores(
            query=q.to(device),
            weights=w.to(device),
            sparse_count=k,
            sparse_mode=sparse_mode,
            actual_seq_lengths_query=torch.tensor(used, device=device),
            actual_seq_lengths_key=torch.tensor(lengths, device=device),
            cmp_ratio=ratio,
            **given,
        )
        for i in range(4):
            for j in range(rows):
                seen = lengths[i] if sparse_mode == 0 else lengths[i] - used[i] + 1 + j
                limit = 0 if j >= used[i] else max(0, seen) // ratio
                order = scores[i, j, :limit].sort(descending=True, stable=True).indices
                chosen = order[:k].sort().values
                got = index[i, j, 0].cpu()
                assert got[: len(chosen)].tolist() == chosen.tolist(), (i, j)
                assert (got[len(chosen) :] == -1).all()


def test_lengths_of_tokens_beyond_the_entries(device):
    """They end with the tensors; the tokens of a window that is open count nothing."""
    dtype = torch.bfloat16 if device.type != "cpu" else torch.float32
    q = torch.ones(1, 2, 1, 16, dtype=dtype, device=device)
    keys = torch.ones(1, 5, 1, 16, dtype=dtype, device=device)
    for length, seen in (
        (2**31 - 1, [5, 5]),
        (23, [5, 5]),
        (20, [4, 5]),
        (19, [4, 4]),
        (3, [0, 0]),
    ):
        index, _ = custom.npu_lightning_indexer(
            q,
            keys,
            q[..., 0].contiguous(),
            sparse_count=8,
            cmp_ratio=4,
            actual_seq_lengths_key=torch.tensor([length], device=device),
        )
        assert [(row >= 0).sum().item() for row in index[0]] == seen


def test_ties_at_0_go_to_the_first_entries(device):
    """Every ReLU off."""
    dtype = torch.bfloat16 if device.type != "cpu" else torch.float32
    q = -torch.ones(1, 1, 2, 16, dtype=dtype, device=device)
    keys = torch.ones(1, 9, 1, 16, dtype=dtype, device=device)
    index, _ = custom.npu_lightning_indexer(
        q,
        keys,
        q[..., 0].contiguous(),
        sparse_count=4,
        cmp_ratio=2,
        actual_seq_lengths_key=torch.tensor([15], device=device),
    )
    assert index.flatten().tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("page, k", [(1, 40), (2, 3), (16, 8)])
def test_pages_of_entries_absent_shared_and_apart(page, k, device):
    """-1 and pages past the cache have no entry; two requests share some; pages lie apart."""
    dtype = torch.bfloat16 if device.type != "cpu" else torch.float32
    lengths, m, size, columns = [75, 61], 4, 16, -(-19 // page) + 1
    q, w = torch.randn(2, 2, 3, size).to(dtype), torch.randn(2, 2, 3).to(dtype)
    table, pages = shuffled(2, columns, random.Random(page))
    table[1, :1] = table[0, :1]
    table[0, 1], table[1, columns // 2] = -1, pages
    pool = torch.full((pages, page * size + 8), NAN, dtype=dtype)
    keys = pool[:, : page * size].view(pages, page, 1, size)
    keys.copy_(torch.randn(keys.shape))
    for i, row in enumerate(table.tolist()):  # behind the last entry
        for at in range(lengths[i] // m, columns * page):
            if at // page > 0 and 0 <= row[at // page] < pages:
                keys[row[at // page], at % page] = NAN
    index, scores = custom.npu_lightning_indexer_scores(
        q.to(device),
        moved(keys, device),
        w.to(device),
        actual_seq_lengths_key=torch.tensor(lengths, device=device),
        block_table=table.to(device),
        layout_key="PA_BSND",
        sparse_count=k,
        cmp_ratio=m,
    )
    for i, length in enumerate(lengths):
        for j in range(2):
            there = [
                e for e in range((length - 1 + j) // m) if 0 <= int(table[i, e // page]) < pages
            ]
            found = [keys[int(table[i, e // page]), e % page, 0].double() for e in there]
            each = ((torch.stack(found) @ q[i, j].double().T).relu() * w[i, j].double()).sum(-1)
            best = each.sort(descending=True, stable=True).indices[:k].sort().values
            got = index[i, j, 0].tolist()
            assert got == [there[x] for x in best] + [-1] * (k - len(best)), (i, j)
            near = dict(rtol=2e-5, atol=2e-5)
            came = scores[i, j, 0, : len(best)].double().cpu()
            torch.testing.assert_close(came, each[best], **near)


def test_a_graph_of_the_indexer_replays_with_other_lengths(device):
    """Entries close between replays, which hold on to no length."""
    dtype = torch.bfloat16 if device.type != "cpu" else torch.float32
    q, w, keys = (
        torch.randn(*shape).to(device, dtype) for shape in ((2, 2, 4, 32), (2, 2, 4), (8, 2, 1, 32))
    )
    lengths = torch.tensor([2, 7], device=device)
    given = dict(
        actual_seq_lengths_key=lengths,
        block_table=torch.tensor([[3, 1, 6, 0], [2, 5, 7, 4]], device=device),
        layout_key="PA_BSND",
        sparse_count=3,
        cmp_ratio=4,
    )
    replay = replayed(device, lambda: custom.npu_lightning_indexer(q, keys, w, **given)[0])
    for step in range(5):
        lengths.copy_(torch.tensor([2 + 5 * step, 7 + step]))
        assert torch.equal(replay(), custom.npu_lightning_indexer(q, keys, w, **given)[0])


def test_8_bits_count_tokens_too(device):
    q, w, _ = custom.quantize_index_query(
        torch.randn(1, 4, 4, 128), torch.rand(1, 4, 4), kind="int8"
    )
    keys, _, scale = custom.quantize_index_query(
        torch.randn(1, 32, 1, 128), torch.ones(1, 32, 1), kind="int8", fold=False
    )
    given = [x.to(device) for x in (q, keys, w)]
    index = custom.npu_quant_lightning_indexer(
        *given,
        None,
        scale.float().to(device),
        0,
        0,
        sparse_count=40,
        cmp_ratio=4,
        actual_seq_lengths_key=torch.tensor([101], device=device),
    )
    assert [(row >= 0).sum().item() for row in index[0]] == [24, 24, 25, 25]


@pytest.mark.parametrize(
    ("ratio", "sparse_mode", "layout"),
    [(4, 3, "BSND"), (3, 0, "BSND"), (2, 3, "TND"), (4, 3, "PA_BSND"), (16, 3, "PA_BSND")],
)
def test_the_open_entry_ends_a_row(ratio, sparse_mode, layout, device):
    """The chosen ones are those without it, of value 0, and -1 is behind it; k below, at and above
    the number of entries, none of them, an absent page, no token."""
    dtype = torch.bfloat16 if device.type != "cpu" else torch.float32
    g = torch.Generator().manual_seed(ratio)
    rows, heads, size = 3, 3, 16
    tokens = torch.tensor([7 * ratio + 1, 2, 5 * ratio, 0])
    q, w, pages = (
        torch.randn(*shape, generator=g).to(device, dtype)
        for shape in ((4, rows, heads, size), (4, rows, heads), (18, 2, 1, size))
    )
    table = torch.randperm(18, generator=g)[:16].view(4, 4).int()
    table[2, 1] = -1
    given: dict[str, Any] = dict(actual_seq_lengths_key=tokens.to(device), cmp_ratio=ratio)
    if layout == "BSND":
        keys = pages[table.clamp(min=0).to(device).long()].flatten(1, 2)
    else:
        keys = pages
        given |= dict(block_table=table.to(device), layout_key="PA_BSND")
    used = torch.tensor([3, 2, 1, 0])
    given |= dict(actual_seq_lengths_query=used.to(device), sparse_mode=sparse_mode)
    if layout == "TND":
        q, w = (x[torch.arange(rows) < used[:, None]] for x in (q, w))
        given |= dict(layout_query="TND", actual_seq_lengths_query=used.cumsum(0).to(device))
    for k in (2, 20):
        plain, scores = custom.npu_lightning_indexer_scores(q, keys, w, sparse_count=k, **given)
        index, value = custom.npu_lightning_indexer_scores(
            q, keys, w, sparse_count=k, select_tail=True, **given
        )
        assert index.shape == value.shape == (*plain.shape[:-1], k + 1)
        of_rows = [(i, j) for i in range(4) for j in range(rows)]
        if layout == "TND":
            of_rows = [(i, j) for i, j in of_rows if j < used[i]]
        seen = [
            0
            if j >= used[i]
            else int((tokens[i] - (used[i] - 1 - j if sparse_mode else 0)).clamp(min=0))
            for i, j in of_rows
        ]
        wanted, of_value = [], []
        for row, score, n in zip(plain.view(-1, k), scores.view(-1, k), seen, strict=True):
            chosen = [int(x) for x in row if x >= 0]
            values = score[: len(chosen)].tolist()
            if n % ratio:
                chosen.append(n // ratio)
            wanted.append(chosen + [-1] * (k + 1 - len(chosen)))
            of_value.append(values + [0.0] * (k + 1 - len(values)))
        assert index.view(-1, k + 1).tolist() == wanted
        assert value.view(-1, k + 1).tolist() == of_value


def test_the_open_entry_behind_quantized_keys(device):
    q, w, _ = custom.quantize_index_query(
        torch.randn(1, 4, 4, 128), torch.rand(1, 4, 4), kind="int8"
    )
    keys, _, scale = custom.quantize_index_query(
        torch.randn(1, 32, 1, 128), torch.ones(1, 32, 1), kind="int8", fold=False
    )
    given = [x.to(device) for x in (q, keys, w)] + [None, scale.float().to(device), 0, 0]
    more = dict(sparse_count=9, cmp_ratio=4, actual_seq_lengths_key=torch.tensor([101]).to(device))
    plain = custom.npu_quant_lightning_indexer(*given, **more)
    tail = custom.npu_quant_lightning_indexer(*given, select_tail=True, **more)
    both = custom.npu_quant_lightning_indexer_scores(*given, select_tail=True, **more)
    assert torch.equal(tail[..., :9], plain) and torch.equal(both[0], tail)
    assert tail[0, :, 0, 9].tolist() == [24, 24, -1, 25] and not both[1][..., 9].any()


def test_no_keys_at_all_but_an_open_entry(device):
    """Tables without a column: 3 tokens of an entry of 4."""
    index, _ = custom.npu_lightning_indexer(
        torch.randn(1, 3, 2, 16, device=device).bfloat16(),
        torch.randn(1, 16, 1, 16, device=device).bfloat16(),
        torch.randn(1, 3, 2, device=device).bfloat16(),
        actual_seq_lengths_key=torch.tensor([3], device=device),
        block_table=torch.zeros(1, 0, device=device).int(),
        layout_key="PA_BSND",
        sparse_count=2,
        cmp_ratio=4,
        select_tail=True,
    )
    assert index[0, :, 0].tolist() == [[0, -1, -1]] * 3


@pytest.mark.parametrize("tail", [False, True])
def test_gradient_of_scores_over_entries(tail, precision):
    """Against autograd through the scores of all entries; none of the open one's, which is there:
    keys are stored ahead."""
    draw = [
        torch.randn(*shape).bfloat16().double()
        for shape in ((1, 6, 2, 16), (1, 4, 1, 16), (1, 6, 2))
    ]
    inputs = [precision.of(x).requires_grad_() for x in draw]
    index, value = custom.npu_lightning_indexer(
        *inputs,
        sparse_count=2,
        cmp_ratio=3,
        return_value=True,
        actual_seq_lengths_key=torch.tensor([11], device=precision.device),
        select_tail=tail,
    )
    closed = torch.arange(6, 12, device=index.device).view(1, 6, 1, 1) // 3
    assert (index >= closed).sum() == (4 if tail else 0)
    index = index.masked_fill(index >= closed, -1)
    got = torch.autograd.grad(value.sum(), inputs)
    q, keys, w = exact = [x.requires_grad_() for x in draw]
    each = (torch.einsum("bsnd,btd->bsnt", q, keys[:, :, 0]).relu() * w[..., None]).sum(2)
    at = index[:, :, 0].long().cpu()
    chosen = each.gather(2, at.clamp(min=0)).masked_fill(at < 0, 0)
    for a, b in zip(got, torch.autograd.grad(chosen.sum(), exact), strict=True):
        assert (a.cpu().double() - b).norm() <= 4 * precision.unit * b.norm()


# ------------------------------------------------------------------------------------- refusals


def arguments(**changes: Any) -> dict[str, Any]:
    p = Precision(torch.device("cpu"), "reference")
    e = Engine(p, CSA, 2, rows=8, page=2, entry_page=16)
    sin, cos = CSA.angles(torch.zeros(2, 2))
    return (
        dict(
            x=tokens(10).view(2, 5, 24),
            state_cache=e.state,
            rope_sin=sin,
            rope_cos=cos,
            state_block_table=e.table,
            cache_mode=2,
            cmp_cache=e.entries,
            cmp_block_table=e.entry_table,
            **p.layer(CSA),
        )
        | changes
    )


def _ln(size: int, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    return {name: torch.ones(size, dtype=dtype) for name in ("ln_weight", "ln_bias")}


# of CSA's arguments, windows that do not overlap
_POOL = dict(coff=1, norm_weight=None, cmp_cache=None, cmp_block_table=None)


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        (dict(cache_mode=3), ValueError, "`cache_mode` is 3 .* cannot go back"),
        (dict(cache_mode=0), ValueError, "`cache_mode` is 0, expected one of 1, 2"),
        (dict(rope_head_dim=5), ValueError, "`rope_head_dim` is 5, expected an even number"),
        (dict(rope_head_dim=18), ValueError, "`rope_head_dim` is 18, .* from 0 to D=16"),
        (dict(ape=torch.zeros(4, 32).float()), TypeError, "`ape` is float32, expected float64"),
        (dict(norm_weight=torch.ones(16).half()), TypeError, "`norm_weight` is float16"),
        (dict(state_cache=torch.zeros(9, 2, 64).float()), TypeError, "`state_cache` is float32"),
        (dict(state_cache=torch.zeros(9, 2, 32).double()), ValueError, "`state_cache` has shape"),
        (
            dict(state_block_table=torch.zeros(2, 3).int()),
            ValueError,
            "a ring of 6 rows .* at least coff \\* cmp_ratio - 1 = 7",
        ),
        (dict(state_block_table=None), ValueError, "`state_block_table` is missing"),
        (dict(state_block_table=torch.zeros(3, 4).int()), ValueError, "`state_block_table` has"),
        (dict(state_cache=None), TypeError, "`state_cache` is None, expected a tensor"),
        (dict(cmp_block_table=None), ValueError, "`cmp_block_table` is missing"),
        (dict(cmp_cache=None), ValueError, "`cmp_block_table` is given and `cmp_cache` is None"),
        (dict(cmp_cache=torch.zeros(3, 5, 1, 16).double()), ValueError, "pages of 5 entries"),
        (dict(kind="fp8"), ValueError, "D is 16, expected 128 or 512 with kind='fp8'"),
        (dict(kind="mxfp4"), ValueError, "`kind` is 'mxfp4'"),
        (dict(cmp_scale_cache=torch.zeros(3, 16, 1)), ValueError, "`cmp_scale_cache` is given"),
        (dict(rope_sin=torch.zeros(2, 3, 3).double()), ValueError, "`rope_sin` has shape"),
        (dict(wgate=torch.zeros(16, 24).double()), ValueError, "`wgate` has shape"),
        (dict(cu_seqlens=torch.tensor([0, 5])), ValueError, "`x` has shape"),
        (dict(wgate=None), ValueError, "`ape` is given and `wgate` is None, expected both or"),
        (dict(ape=None), ValueError, "`wgate` is given and `ape` is None, expected both or"),
        (dict(wgate=None, ape=None), ValueError, "`state_cache` has shape .* coff\\*D=32"),
        (dict(rope_sin=None), ValueError, "`rope_cos` is given and `rope_sin` is None"),
        (dict(rope_sin=None, rope_cos=None), ValueError, "`rope_head_dim` is 6 and `rope_sin` is"),
        (dict(ln_weight=torch.ones(16).double()), ValueError, "`ln_weight` is given and `ln_bias"),
        (_ln(16), ValueError, "`ln_weight` is given and `coff` is 2, expected 1"),
        (_ln(16) | _POOL, ValueError, "`ln_weight` has shape .16., expected .D. with D=32"),
        (_ln(32, torch.float32) | _POOL, TypeError, "`ln_weight` is float32, expected float64"),
        (dict(rope_slice="middle"), ValueError, "`rope_slice` is 'middle', expected one of"),
        (
            _POOL | dict(state_block_table=torch.zeros(2, 1).int()),
            ValueError,
            "a ring of 2 rows .* at least coff \\* cmp_ratio - 1 = 3",
        ),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, dict) else "",
)
def test_one_sentence_and_nothing_is_written(changes, error, said):
    given = arguments(**changes)
    before = {n: given[n].clone() for n in ("state_cache", "cmp_cache") if given[n] is not None}
    with pytest.raises(error, match=f"^npu_compressor: .*{said}"):
        custom.npu_compressor(**given)
    for name, kept in before.items():
        torch.testing.assert_close(given[name], kept, equal_nan=True)


@pytest.mark.parametrize("name", ["state_block_table", "start_pos"])
def test_what_belongs_to_a_state_is_refused_without_one(name):
    given = arguments(state_cache=None, cmp_cache=None, cmp_block_table=None)
    given |= dict(state_block_table=None, cache_mode=1) | {name: torch.zeros(2, 4).long()}
    with pytest.raises(ValueError, match=f"^npu_compressor: `{name}` is given and `state_cache`"):
        custom.npu_compressor(**given)


@pytest.mark.parametrize("name", ["wgate", "ape", "norm_weight", "rope_sin", "ln_weight"])
def test_other_forms_are_refused_without_a_state(name):
    given = arguments(state_cache=None, cmp_cache=None, cmp_block_table=None)
    given |= dict(state_block_table=None, cache_mode=1)
    given |= {name: torch.ones(16) if name == "ln_weight" else None}
    with pytest.raises(ValueError, match=rf"^npu_compressor: .*`{name}`.* expected a state"):
        custom.npu_compressor(**given)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (dict(cmp_ratio=4), "`actual_seq_lengths_key` is missing, and `cmp_ratio` 4 needs it"),
        (dict(select_tail=True), "`select_tail` is True and `cmp_ratio` 1, expected at least 2"),
        (
            dict(
                query=torch.zeros(3, 2, 16),
                key=torch.zeros(5, 1, 16),
                weights=torch.zeros(3, 2),
                layout_query="TND",
                layout_key="TND",
                actual_seq_lengths_query=torch.tensor([3]),
                actual_seq_lengths_key=torch.tensor([5]),
                cmp_ratio=4,
            ),
            "`cmp_ratio` is 4 and keys have layout 'TND'",
        ),
    ],
    ids=["no lengths", "tail", "tnd"],
)
def test_indexers_refuse_by_name(changes, said):
    given = dict(
        query=torch.zeros(1, 3, 2, 16), key=torch.zeros(1, 5, 1, 16), weights=torch.zeros(1, 3, 2)
    )
    with pytest.raises(ValueError, match=f"^npu_lightning_indexer: {said}"):
        custom.npu_lightning_indexer(**given | changes)


@pytest.mark.parametrize(
    ("act_seqs", "s1", "m", "used", "wanted"),
    [
        ([10, 3], 5, 4, [5, 3], [[4, 8], [0, 4]]),
        ([1], 1, 128, None, [[0]]),
        ([128], 1, 128, None, [[0]]),
        ([129], 1, 128, None, [[128]]),
        ([7], 3, 1, None, [[4, 5, 6]]),
        ([2], 5, 2, None, [[0, 0, 0]]),
        ([], 5, 2, None, []),
    ],
)
def test_positions_of_entries(act_seqs, s1, m, used, wanted):
    used = None if used is None else torch.tensor(used)
    act_seqs = torch.tensor(act_seqs, dtype=torch.int64)
    assert custom.entry_positions(act_seqs, s1, m, used).tolist() == wanted


def test_an_unknown_keyword_is_refused_in_one_sentence():
    with pytest.raises(
        TypeError, match=r"^npu_compressor: `cmp_rati` is no argument of it. Did you"
    ):
        custom.npu_compressor(torch.ones(1, 2, 3), cmp_rati=2)
