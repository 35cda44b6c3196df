# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The prolog of attention over one shared row, against Transformers' DeepseekV4, formula by formula
one token at a time, and where tokens, pages and requests are missing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from custom.dispatch.common import quantized
from custom.dispatch.reference.common import quantizers
from torch import Tensor

import custom

from ...support import quantization
from ...support.accuracy import assert_close_to_float64, skip_unless_taken
from ...support.calls import CPU, runs_once
from ...support.deepseek_v4 import Attention, pairs
from ...support.prologs import FORMS
from ...support.samples import sample

OP = "npu_sharedkv_prolog_pto"
F64 = torch.float64
PAGE = 16
pytestmark = pytest.mark.usefixtures("processors_of_a_gpu")
KINDS = {1: "int8", 2: "int8", 4: "fp8"}
ALL = ("w_dq", "w_uq", "w_kv", "w_idx_qb")
QUANTIZED = {0: (), 1: ("w_uq", "w_idx_qb"), 2: ALL, 4: ALL}


@dataclass
class Drawn:
    """Tokens of requests, weights, tables; all numbers are those of `dtype`, in float64."""

    starts: list[int]
    """Where the first token of each request stands."""
    S: int
    dtype: torch.dtype = F64
    used: list[int] | None = None
    H: int = 48
    Rq: int = 32
    N: int = 3
    D: int = 32
    Dr: int = 8
    Ni: int = 16
    Di: int = 16
    columns: int = 5
    hadamard: bool = False
    mode: int = 0
    """`weight_quant_mode`: the weights are what those of 8 bits stand for."""
    given: dict[str, Any] = field(default_factory=dict)
    quantized: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        B = len(self.starts)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, dtype=F64).to(self.dtype).double()

        def matrix(k: int, n: int) -> Tensor:
            return (torch.randn(k, n, dtype=F64) * k**-0.5).to(self.dtype).double()

        used = self.used or [self.S] * B
        self.given = dict(
            token_x=normal(B, self.S, self.H),
            w_dq=matrix(self.H, self.Rq),
            w_uq=matrix(self.Rq, self.N * self.D),
            w_kv=matrix(self.H, self.D),
            gamma_cq=normal(self.Rq),
            gamma_kv=normal(self.D),
            # off the unit circle, and no entry that is not read
            rope_sin=pairs(normal(B, self.S, self.Dr // 2)),
            rope_cos=pairs(normal(B, self.S, self.Dr // 2)),
            ori_block_table=torch.randperm(B * self.columns).view(B, self.columns).int(),
            act_seqs=torch.tensor([a + b for a, b in zip(self.starts, used, strict=True)]).int(),
            seqused=None if self.used is None else torch.tensor(self.used).int(),
            w_idx_qb=matrix(self.Rq, self.Ni * self.Di),
            w_idx_proj=matrix(self.H, self.Ni),
            index_hadamard=self.hadamard,
        )
        for name in QUANTIZED[self.mode]:
            self.quantized[name] = quantization.weight(self.given[name], KINDS[self.mode])
            self.given[name] = quantization.dequantized(*self.quantized[name])

    @property
    def B(self) -> int:
        return len(self.starts)

    def cache(self, pages: int | None = None) -> Tensor:
        """Of which every number is known."""
        shape = (self.B * self.columns if pages is None else pages, PAGE, 1, self.D)
        return (torch.arange(torch.Size(shape).numel()) % 97).view(shape).to(self.dtype)

    def arguments(self, device: Any, form: Any = None) -> dict[str, Any]:
        """Typed, on a device, the weights in a form of FORMS."""
        moved = {
            name: v.to(device, self.dtype if v.is_floating_point() else v.dtype)
            if isinstance(v, Tensor)
            else v
            for name, v in self.given.items()
        }
        make, weight_format = FORMS[form or "row-major"]
        for name in ("w_dq", "w_uq", "w_kv", "w_idx_qb", "w_idx_proj"):
            if name in self.quantized:
                values, scale = self.quantized[name]
                moved[name] = make(values.to(device))
                moved[f"dequant_scale_{name}"] = scale.to(device)
            elif moved[name] is not None:
                moved[name] = make(moved[name])
        return moved | dict(weight_format=weight_format, weight_quant_mode=self.mode)

    def there(self, i: int, j: int) -> bool:
        used = self.S if self.used is None else self.used[i]
        return j < used and self.starts[i] + j >= 0

    def expected(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Token by token, rounded to `dtype` where the op rounds, and quantized unless that is
        float64; rows [B, S, D] beside."""
        x = self.given

        def times(u: Tensor, name: str) -> Tensor:
            if name in self.quantized and dtype is not F64:
                made = quantization.activations(u[None], KINDS[self.mode])
                u = quantization.stands_for(*made)[0]
            return u @ x[name]

        def rnd(u: Tensor) -> Tensor:
            return u.to(dtype).double()

        def norm(u: Tensor) -> Tensor:
            return u / torch.sqrt((u * u).mean() + 1e-6)

        def rope(u: Tensor, i: int, j: int) -> Tensor:
            out, first = u.clone(), len(u) - self.Dr
            for pair in range(self.Dr // 2):
                a, b = u[first + 2 * pair], u[first + 2 * pair + 1]
                c, s = (x[name][i, j, 2 * pair] for name in ("rope_cos", "rope_sin"))
                out[first + 2 * pair] = a * c - b * s
                out[first + 2 * pair + 1] = b * c + a * s
            return out

        shapes = dict(
            query=(self.N, self.D),
            query_norm=(self.Rq,),
            query_index=(self.Ni, self.Di),
            weights=(self.Ni,),
            rows=(self.D,),
        )
        out = {name: torch.zeros(self.B, self.S, *s).double() for name, s in shapes.items()}
        for i in range(self.B):
            for j in range(self.S):
                if not self.there(i, j):
                    continue
                token = x["token_x"][i, j]
                c = rnd(norm(rnd(times(token, "w_dq"))) * x["gamma_cq"])
                out["query_norm"][i, j] = c
                row = norm(rnd(times(token, "w_kv"))) * x["gamma_kv"]
                out["rows"][i, j] = rnd(rope(row, i, j))
                for n, head in enumerate(rnd(times(c, "w_uq")).view(self.N, self.D)):
                    out["query"][i, j, n] = rnd(rope(norm(head), i, j))
                if x["w_idx_qb"] is None:
                    continue
                out["weights"][i, j] = rnd(token @ x["w_idx_proj"])
                for n, head in enumerate(rnd(times(c, "w_idx_qb")).view(self.Ni, self.Di)):
                    turned = rnd(rope(head, i, j))
                    if self.hadamard:
                        signs = [
                            [1 - 2 * ((a & b).bit_count() % 2) for b in range(self.Di)]
                            for a in range(self.Di)
                        ]
                        turned = rnd(torch.tensor(signs).double() @ turned * self.Di**-0.5)
                    out["query_index"][i, j, n] = turned
        return out

    def slot(self, i: int, j: int, pages: int) -> int | None:
        """Where token j of request i is written."""
        p, table = self.starts[i] + j, self.given["ori_block_table"]
        if not self.there(i, j) or p // PAGE >= table.shape[1]:
            return None
        page = int(table[i, p // PAGE])
        return page * PAGE + p % PAGE if 0 <= page < pages else None


def check(drawn: Drawn, device: Any, backend: str, form: Any = None, cache: Any = None) -> None:
    """Outputs and new rows within the bound; every other slot bit by bit as it was."""
    skip_unless_taken(drawn.dtype, device, backend)
    cache = drawn.cache().to(device) if cache is None else cache
    before = cache.clone()
    given = drawn.arguments(device, form)
    with runs_once(OP, backend):
        outputs = getattr(custom, OP)(**given, ori_kv=cache)
    got = dict(zip(("query", "query_norm", "query_index", "weights"), outputs, strict=True))
    if drawn.given["w_idx_qb"] is None:
        assert got.pop("query_index").shape == got.pop("weights").shape == (0,)
    exact, rounded = drawn.expected(F64), drawn.expected(drawn.dtype)
    for name, value in got.items():
        assert_close_to_float64(name, value, rounded[name], exact[name])
        for i in range(drawn.B):
            for j in range(drawn.S):
                assert drawn.there(i, j) or not value[i, j].any(), f"{name}: an absent token"

    pages = cache.shape[0]
    after, kept = cache.cpu().flatten(0, 2), before.cpu().flatten(0, 2)
    slots = {
        slot: (i, j)
        for i in range(drawn.B)
        for j in range(drawn.S)
        if (slot := drawn.slot(i, j, pages)) is not None
    }
    untouched = torch.ones(len(after), dtype=torch.bool)
    untouched[[*slots]] = False
    assert torch.equal(after[untouched], kept[untouched])
    if slots:
        rows = [torch.stack([of["rows"][at] for at in slots.values()]) for of in (rounded, exact)]
        assert_close_to_float64("ori_kv", after[[*slots]], *rows)


dtypes = pytest.mark.parametrize("dtype", [F64, torch.float16, torch.bfloat16], ids=str)


@dtypes
@pytest.mark.parametrize("form", FORMS)
def test_equals_the_formula(form, dtype, device, backend):
    check(Drawn([0, 14, 40], 4, dtype), device, backend, form)


@pytest.mark.parametrize("kind", [0, 1], ids=["sliding", "csa"])
def test_equals_transformers_in_float64(kind):
    """Queries, rows and index queries as its own attention gets them, in chunks that go on."""
    layer = Attention(kind)
    a, size = layer.module, layer.config
    x = torch.randn(2, 21, size.hidden_size, dtype=F64)
    positions = torch.arange(21).expand(2, -1)
    theirs = layer.run(x, positions, lambda q: q)
    cos, sin = (pairs(u) for u in layer.angles(positions)["compress" if kind else "main"])
    indexer = a.compressor.indexer if kind else None
    names = {"w_dq", "w_uq", "w_kv", "gamma_cq", "gamma_kv", "w_idx_qb", "w_idx_proj"}
    weights = {name: w for name, w in layer.weights().items() if name in names}
    cache = torch.full((6, PAGE, 1, size.head_dim), torch.nan, dtype=F64)
    table = torch.tensor([[4, 1], [0, 5]])
    found = []
    for first, end in ((0, 1), (1, 15), (15, 21)):
        part = slice(first, end)
        found.append(
            getattr(custom, OP)(
                x[:, part].contiguous(),
                **weights,
                rope_sin=sin[:, part].contiguous(),
                rope_cos=cos[:, part].contiguous(),
                ori_kv=cache,
                ori_block_table=table,
                act_seqs=torch.tensor([end, end]),
                weight_format="nd",
            )
        )
    query, _, index, of_heads = (
        torch.cat(each, 1) if each[0].numel() else None for each in zip(*found, strict=True)
    )
    assert (query - theirs.query).abs().max() < 1e-12
    rows = cache[table].flatten(1, 3)[:, :21]
    assert (rows - theirs.rows).abs().max() < 1e-12
    if indexer:
        assert (index - theirs.index).abs().max() < 1e-12
        want = indexer.scorer.weights_proj(x).detach()
        assert (of_heads - want).abs().max() < 1e-12


@dtypes
def test_one_token(dtype, device, backend):
    check(Drawn([17], 1, dtype), device, backend)


# K below, of and beyond a block of 128; a block of columns that ends in the middle of a head
SIZES = [dict(), dict(H=128, Rq=160, N=5), dict(H=272, Rq=128, N=9, Ni=32, Di=8)]


@pytest.mark.parametrize("mode", [1, 2, 4])
@pytest.mark.parametrize("form", FORMS)
def test_quantized_weights(form, mode, device, backend):
    given = dict(used=[3, 2], mode=mode, **SIZES[1])
    check(Drawn([3, 14], 3, torch.float16, **given), device, backend, form)


@pytest.mark.parametrize("mode", [2, 4])
@pytest.mark.parametrize("sizes", [SIZES[0], SIZES[2]], ids=["small", "more"])
def test_quantized_weights_of_other_sizes(sizes, mode, device, backend):
    check(Drawn([14], 2, torch.float16, mode=mode, **sizes), device, backend, "linear")


@pytest.mark.parametrize("mode", [2, 4])
def test_quantized_weights_without_an_indexer_and_tokens_that_are_not_there(mode, device, backend):
    """NaN among the absent ones reaches no scale of another."""
    drawn = Drawn([5, 15], 3, torch.bfloat16, used=[0, 2], mode=mode)
    drawn.given["w_idx_qb"] = drawn.given["w_idx_proj"] = None
    drawn.quantized.pop("w_idx_qb")
    drawn.given["token_x"][0], drawn.given["token_x"][1, 2:] = torch.nan, torch.nan
    check(drawn, device, backend)


def test_quantized_weights_and_no_tokens(device, backend):
    check(Drawn([], 2, torch.float16, mode=4), device, backend)
    check(Drawn([4, 1], 0, torch.float16, used=[0, 0], mode=2), device, backend)


@pytest.mark.parametrize("heads", [8, 16, 20, 32, 64, 128])
def test_heads_of_a_shard(heads, device, backend):
    check(Drawn([3], 2, torch.float16, N=heads), device, backend, "4-D NZ")


@pytest.mark.parametrize("used", [[0, 0], [3, 3], [0, 3], [1, 2]], ids=str)
def test_seqused_of_none_all_and_mixed(used, device, backend):
    """What lies in the tokens that are not there is never read: here it is NaN."""
    drawn = Drawn([5, 15], 3, torch.float16, used=used)
    for i, count in enumerate(used):
        for name in ("token_x", "rope_sin", "rope_cos"):
            drawn.given[name][i, count:] = torch.nan
    check(drawn, device, backend)


@pytest.mark.parametrize(("used", "taken"), [([-5, 9], [0, 3])], ids=str)
def test_seqused_beyond_the_tokens_counts_as_its_bound(used, taken, device, backend):
    drawn = Drawn([5, 15], 3, torch.float16, used=taken)
    drawn.given["seqused"] = torch.tensor(used).int()
    check(drawn, device, backend)


def test_no_requests(device, backend):
    check(Drawn([], 2, torch.float16), device, backend)


def test_no_tokens_yet(device, backend):
    """act_seqs 0, and one that some of the tokens stand in front of."""
    check(Drawn([-2, -1], 2, torch.float16), device, backend)


def test_pages_that_are_not_there(device, backend):
    """-1, beyond the cache, and columns beyond the table."""
    drawn = Drawn([14, 30, 78, 0], 4, torch.float16)
    table = drawn.given["ori_block_table"]
    table[0, 1], table[1, 1], table[3, 0] = -1, 20, -7
    check(drawn, device, backend)


def test_a_ring_is_a_table_that_repeats_its_pages(device, backend):
    drawn = Drawn([76, 15], 3, torch.float16)
    table = drawn.given["ori_block_table"]
    table[:, 2:4], table[:, 4] = table[:, :2], table[:, 0]
    check(drawn, device, backend)


def test_int64_lengths_and_tables(device, backend):
    drawn = Drawn([14, 3], 3, torch.float16, used=[2, 3])
    for name in ("ori_block_table", "act_seqs", "seqused"):
        drawn.given[name] = drawn.given[name].long()
    check(drawn, device, backend)


def test_pages_that_lie_apart_in_one_pool(device, backend):
    """Two caches cut from one pool, a page of this one behind a page of the other."""
    drawn = Drawn([14, 30], 4, torch.float16)
    pool = torch.stack([drawn.cache(), drawn.cache()], 1).to(device)
    other = pool[:, 0].clone()
    check(drawn, device, backend, cache=pool[:, 1])
    assert torch.equal(pool[:, 0], other)


def test_offsets_past_2_to_the_31(device, backend):
    drawn = Drawn([15], 2, torch.float16)
    drawn.given["ori_block_table"] = torch.tensor([[1, 0]]).int()
    apart = 2**31 + 64
    room = torch.empty(apart + PAGE * drawn.D, dtype=torch.float16, device=device)
    far = room.as_strided((2, PAGE, 1, drawn.D), (apart, drawn.D, drawn.D, 1))
    far.copy_(drawn.cache(2))
    check(drawn, device, backend, cache=far)


@pytest.mark.parametrize("rotary", [0, 2, 16], ids=lambda n: f"{n} dims turned")
def test_rotary_sizes(rotary, device, backend):
    check(Drawn([3], 2, torch.float16, Dr=rotary), device, backend)


def test_without_an_indexer(device, backend):
    drawn = Drawn([3, 9], 2, torch.float16)
    drawn.given |= dict(w_idx_qb=None, w_idx_proj=None)
    check(drawn, device, backend)


@pytest.mark.parametrize("dtype", [F64, torch.float16], ids=str)
def test_index_queries_transformed(dtype, device, backend):
    drawn = Drawn([3, 9], 2, dtype, Di=128, hadamard=True)
    drawn.given["hadamard_round"] = "fp32"
    check(drawn, device, backend)


def test_index_queries_rounded_to_bf16(device, backend):
    """What "fp32" gives, in bfloat16 between."""
    drawn = Drawn([3], 2, torch.float16, Di=128, hadamard=True)
    given = drawn.arguments(device)
    index = {
        to: getattr(custom, OP)(**given, ori_kv=drawn.cache().to(device), hadamard_round=to)[2]
        for to in ("bf16", "fp32")
    }
    error = (index["bf16"] - index["fp32"]).abs()
    assert torch.equal(index["bf16"], index["bf16"].bfloat16().half())
    assert error.max() > 0 and (error <= 2.0**-8 * index["fp32"].abs() + 1e-6).all()


@pytest.mark.parametrize("dtype", [F64, torch.bfloat16], ids=str)
def test_quantized_rows_are_the_rounded_ones_quantized(dtype, device, backend):
    """Byte by byte those of `npu_latent_cache_write`; page 2's are not there."""
    skip_unless_taken(dtype, device, backend)
    drawn = Drawn([14, 30], 4, dtype, D=512, N=1, columns=3, used=[4, 3])
    drawn.given["ori_block_table"] = torch.tensor([[1, 0, -1], [3, -1, 2]]).int()
    given = drawn.arguments(device)
    wide = torch.zeros(4, PAGE, 1, 512, dtype=dtype, device=device)
    outs = getattr(custom, OP)(**given, ori_kv=wide)
    room = torch.full((4, 37440 // 4), 7, dtype=torch.uint8, device=device)  # of 64 in engines
    packed, want = (
        torch.as_strided(x, (4, PAGE, 1, 584), (x.stride(0), 584, 584, 1))
        for x in (room, room.clone())
    )
    again = getattr(custom, OP)(**given, ori_kv=packed, kv_kind="fp8")
    assert all(map(torch.equal, outs, again))
    slots = [drawn.slot(i, j, 4) for i in range(2) for j in range(4)]
    slots = torch.tensor([-1 if slot is None else slot for slot in slots], device=device)
    rows = wide.flatten(0, 2)[slots.clamp(min=0)].bfloat16()
    custom.npu_latent_cache_write(
        rows[:, :448], rows[:, 448:], want, slots, kind="fp8", row_layout="v4"
    )
    assert torch.equal(packed, want) and (packed != 7).any()
    assert room[:, PAGE * 584 :].eq(7).all()


def test_quantized_rows_are_near(device, backend):
    """Within half a step of e4m3, 2 ** -4, of the numbers that the formula gives."""
    drawn = Drawn([14, 30], 4, torch.float16, D=512, N=1, columns=3)
    room = torch.zeros(6, PAGE, 1, 584, dtype=torch.uint8, device=device)
    getattr(custom, OP)(**drawn.arguments(device), ori_kv=room, kv_kind="fp8")
    values, rotary, scales = quantized.v4_parts(room.cpu())
    rows = quantizers.unpack_v4_rows(values, rotary, scales).double().flatten(0, 1)
    expected = drawn.expected(F64)["rows"]
    for i in range(drawn.B):
        for j in range(drawn.S):
            want = expected[i, j]
            slot = drawn.slot(i, j, 6)
            tiles = want[:448].view(7, 64).abs().amax(1, keepdim=True).expand(7, 64).flatten()
            off = (rows[slot] - want).abs()
            # a scale is at most twice the largest magnitude of its tile over 448
            assert (off[:448] <= want[:448].abs() / 15 + tiles * 2.0**-8 / 448).all()
            assert (off[448:] <= want[448:].abs() * 2.0**-7 + 2e-3).all()


def test_equal_calls_give_equal_bits_and_a_replay_follows_its_lengths(device):
    drawn = Drawn([14, 3], 3, torch.float16)
    given = drawn.arguments(device)
    found = []
    for lengths in ([17, 6], [17, 6], [2, 40]):
        cache = drawn.cache().to(device)
        given["act_seqs"].copy_(torch.tensor(lengths))
        found.append([*getattr(custom, OP)(**given, ori_kv=cache), cache])
    assert all(map(torch.equal, *found[:2]))
    assert not torch.equal(found[0][-1], found[2][-1]) and not found[2][0][0, 0].any()


@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        (dict(w_idx_proj=None), ValueError, "`w_idx_proj` is missing, expected it beside"),
        (dict(w_idx_qb=None), ValueError, "`w_idx_qb` is missing, expected it beside"),
        (dict(weight_quant_mode=4), TypeError, "`w_dq` is float32, expected float8_e4m3fn in wei"),
        (dict(dequant_scale_w_dq=torch.ones(1, 24)), ValueError, "`dequant_scale_w_dq` is given"),
        (dict(kv_kind="int8"), ValueError, "`kv_kind` is 'int8', expected one of"),
        (dict(kv_kind="fp8"), TypeError, "`ori_kv` is float32, expected uint8"),
        (
            dict(kv_kind="fp8", ori_kv=torch.zeros(8, 16, 1, 656, dtype=torch.uint8)),
            ValueError,
            r"`ori_kv` has shape \[8, 16, 1, 656\]",
        ),
        (
            dict(kv_kind="fp8", ori_kv=torch.zeros(8, 16, 1, 584, dtype=torch.uint8)),
            ValueError,
            "the head dim D is 32, expected 512 with kv_kind='fp8'",
        ),
        (dict(rms_norm_eps=-1.0), ValueError, "`rms_norm_eps` is -1.0"),
        (
            dict(rope_sin=torch.zeros(2, 2, 15), rope_cos=torch.zeros(2, 2, 15)),
            ValueError,
            "the rotary size Dr is 15, expected an even one",
        ),
        (
            dict(rope_sin=torch.zeros(2, 2, 34), rope_cos=torch.zeros(2, 2, 34)),
            ValueError,
            "the rotary size Dr is 34, expected an even one, at most D=32",
        ),
        (dict(w_uq=torch.zeros(32, 63)), ValueError, "`w_uq` has 63 columns, expected a multiple"),
        (dict(w_uq=torch.zeros(32)), ValueError, r"`w_uq` has shape \[32\]"),
        (dict(w_idx_qb=torch.zeros(32, 100)), ValueError, "`w_idx_qb` has 100 columns"),
        (dict(ori_kv=torch.zeros(8, 8, 1, 32)), ValueError, "pages of 8 slots"),
        (dict(ori_kv=torch.zeros(8, 16, 1, 32).half()), TypeError, "`ori_kv` has dtype"),
        (
            dict(ori_kv=torch.zeros(8, 16, 1, 64)[..., :32]),
            ValueError,
            "`ori_kv` is not contiguous in its pages",
        ),
        (dict(ori_kv=torch.zeros(16, 1, 32).expand(8, 16, 1, 32)), ValueError, "pages overlap"),
        (dict(act_seqs=torch.zeros(3).int()), ValueError, r"`act_seqs` has shape \[3\]"),
        (dict(seqused=torch.zeros(2)), TypeError, "`seqused` is float32"),
        (dict(index_hadamard=True, w_idx_qb=None, w_idx_proj=None), ValueError, "index_hadamard"),
        (
            dict(index_hadamard=True, w_idx_qb=custom.to_nz(torch.zeros(32, 16 * 48))),
            ValueError,
            "the index dim Di is 48, expected a power of two",
        ),
    ],
    ids=str,
)
def test_errors(change, error, sentence):
    arguments = sample(OP, CPU, torch.float32)
    before = arguments["ori_kv"].clone()
    with pytest.raises(error, match=f"^{OP}: .*{sentence}"):
        getattr(custom, OP)(**arguments | change)
    assert torch.equal(arguments["ori_kv"], before)
