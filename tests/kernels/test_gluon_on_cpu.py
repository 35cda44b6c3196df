# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Gluon kernels of attention, of sparse attention for a few rows, of the indexer and of the
prologs, on CPU tensors: Triton's interpreter does not know Gluon.  test_cuda_fused_attention.py,
test_cuda_sparse.py and test_cuda_prolog.py run the same kernels on a GPU."""

from __future__ import annotations

import random
import time
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from custom.dispatch.common import memory

from ..support.kernels import INTERPRETED
from ..support.stages import (
    KINDS,
    arguments,
    assert_near,
    assert_top,
    best_of,
    exact,
    launched,
    scores_of,
)

pytest.importorskip("triton")
if INTERPRETED:
    pytest.skip("the kernels are not those of Gluon", allow_module_level=True)

from custom.cuda_ops.attention import fused_attention, fused_attention_backward
from custom.cuda_ops.common import (
    attention_tiles,
    combine,
    gluon_names,
    handover,
    lengths,
    loss,
    ordered,
    quantize,
    rows,
    scatter,
    selection,
)
from custom.cuda_ops.common.topk import EVERY
from custom.cuda_ops.indexer import indexer_loss, lightning_indexer_grad
from custom.cuda_ops.prolog import (
    nz_matmul,
    quantized_matmul,
    quantized_stages,
    stages,
)
from custom.cuda_ops.sparse_attention import sparse_flash_attention
from custom.cuda_ops.sparse_attention.hopper import sparse_flash_attention_decode as decode
from custom.dispatch.reference.attention import fused_attention as reference
from custom.dispatch.reference.attention import fused_attention_backward as reference_backward
from custom.dispatch.reference.indexer import indexer_loss as reference_loss
from custom.dispatch.reference.indexer import lightning_indexer_grad as reference_grad

import custom
from custom import to_nz

from ..support import quantization
from ..support.gluon_on_cpu import At, Program, stand_in
from ..support.quantized_indexer import Problem
from ..support.ragged import ends_within
from ..support.samples import apart

ROOT = Path(__file__).parents[2]
# the modules in Gluon, by their names
hopper = SimpleNamespace(
    **{
        path.stem: import_module(
            ".".join(("custom", *path.relative_to(ROOT).with_suffix("").parts))
        )
        for path in (ROOT / "cuda_ops").rglob("hopper/[a-z]*.py")
    }
)
ERROR = {torch.bfloat16: 5e-3, torch.float16: 1e-3}
SIZES = dict(R=512, D=64)
FAR_ROWS, FAR_KEYS = [2**32, 1, 2**31], [2**32 + 5, 2**62, -(2**33)]
CASES = {
    "one row": dict(N=64, B=1, S=1, P=64, S2=512, K=500, **SIZES),
    "three rows": dict(N=16, B=1, S=3, keys="BSND", S2=700, K=600, **SIZES),
    "two rows, blocks": dict(N=17, B=2, S=1, span=4, S2=256, K=50, **SIZES),
    "packed": dict(N=5, B=2, S=2, query="TND", keys="TND", rows=[1, 3], K=100, **SIZES),
    "packed, paged": dict(N=8, B=2, S=1, query="TND", rows=[0, 2], K=33, **SIZES),
    "no keys": dict(N=100, B=2, S=1, lengths=[0, 2], K=90, **SIZES),
    "idle row": dict(N=96, B=2, S=1, keys="BSND", rows=[1, 0], lengths=[96, 20], K=65, **SIZES),
    "four requests, one key": dict(
        N=16, B=4, S=1, K=1, lengths=[96, 0, 1, 40], index=torch.int64, **SIZES
    ),
    "beyond 32 bits": dict(
        N=16, B=3, S=1, rows=FAR_ROWS, lengths=FAR_KEYS, index=torch.int64, K=90, **SIZES
    ),
    "packed, beyond 32 bits": dict(
        N=5,
        B=2,
        S=2,
        query="TND",
        keys="TND",
        rows=[1, 2**32 + 2],
        lengths=[50, 2**32 + 70],
        index=torch.int64,
        K=100,
        **SIZES,
    ),
}


def poisoned(attention: dict) -> dict:
    """Where an address of no key would point, the cache's first row, is NaN and of no request."""
    caches = {name: attention[name] for name in ("key", "key_rope")}
    table, index = attention["block_table"], attention["sparse_indices"].clone()
    if table is not None:
        table = torch.where(table < 0, table, table + 1)
        caches = {name: torch.cat((x[:1], x)) for name, x in caches.items()}
    else:
        index[index == 0] = -1
    for cache in caches.values():
        cache.flatten(0, -3)[0] = torch.nan
    return attention | caches | dict(block_table=table, sparse_indices=index)


@pytest.fixture
def few(monkeypatch):
    """Launches of the kernels for few rows."""
    launches = []
    launch = decode.launch
    monkeypatch.setattr(decode, "launch", lambda *x: (launches.append(x), launch(*x)))
    monkeypatch.setattr("custom.cuda_ops.common.gpu.capability", lambda device: (9, 0))
    stand_in(
        monkeypatch,
        combine,
        rows,
        selection,
        sparse_flash_attention,
        decode,
        hopper.rows,
        hopper.sparse_flash_attention,
        hopper.mla_parts,
    )
    return launches


@pytest.mark.parametrize("case", CASES)
def test_few_rows(case, few):
    turn = list(CASES).index(case)
    dtype = list(ERROR)[turn % 2]
    attention, _ = arguments(dtype, **CASES[case])
    sinks = torch.randn(CASES[case]["N"]) if turn % 4 < 2 else None
    every = poisoned(attention) | dict(return_softmax_lse=True, sinks=sinks)
    got = launched("sparse_flash_attention", **every)
    assert len(few) == 1
    wanted = exact("sparse_flash_attention", **every)
    for name, x, y in zip(("out", "max", "sum"), got, wanted, strict=True):
        assert_near(name, x, y, ERROR[dtype])


def test_heads_of_few_rows_far_apart(few):
    """The last head begins 2**31 numbers behind the first, or farther."""
    attention, _ = arguments(torch.bfloat16, N=16, B=1, S=1, K=30, **SIZES)
    spread = attention | {name: apart(attention[name], 2) for name in ("query", "query_rope")}
    want, got = (launched("sparse_flash_attention", **x)[0] for x in (attention, spread))
    assert len(few) == 2 and torch.equal(got, want)


_PACKED = partial(dict, R=64, B=3, S=3, query="TND", keys="TND", K=30)
INDEXED = {
    "paged": dict(N=3, R=64, B=2, S=1, P=64, S2=704, K=40),
    "two rows, long": dict(N=40, R=64, B=1, S=2, P=128, S2=9216, K=70),
    "two rows, short": dict(N=64, R=128, B=3, S=2, P=64, S2=320, lengths=[320, 1, 150], K=33),
    "four rows": dict(N=9, R=64, B=2, S=5, keys="BSND", S2=300, rows=[5, 3], K=50),
    "packed": _PACKED(N=16, rows=[1, 1, 7], lengths=[20, 20, 500], S2=200),
    "packed, paged": dict(N=20, R=64, B=2, S=3, query="TND", rows=[2, 5], P=64, S2=256, K=20),
    "shared": dict(N=64, R=64, B=2, S=5, P=128, S2=4352, rows=[5, 2], lengths=[4300, 170], K=60),
    "shared, 128 heads": dict(N=128, R=64, B=1, S=3, keys="BSND", S2=200, K=60),
    "shared, packed": _PACKED(N=64, rows=[1, 1, 9], lengths=[70, 70, 400], S2=150),
    "beyond 32 bits": dict(
        N=3,
        R=64,
        B=3,
        S=1,
        P=64,
        S2=128,
        rows=FAR_ROWS,
        lengths=FAR_KEYS,
        index=torch.int64,
        K=40,
    ),
    "packed, beyond 32 bits": dict(
        N=16,
        R=64,
        B=2,
        S=3,
        query="TND",
        keys="TND",
        rows=[-(2**32) + 2, 2**32 + 5],
        lengths=[50, 2**32 + 70],
        index=torch.int64,
        S2=100,
        K=30,
    ),
    "shared, beyond 32 bits": dict(
        N=64,
        R=64,
        B=2,
        S=3,
        query="TND",
        keys="TND",
        rows=[1, 2**31 - 1],
        lengths=[-3, 2**31 - 1],
        S2=100,
        K=30,
    ),
}


@pytest.fixture
def indexed(monkeypatch):
    """Launches of the scores."""
    launches = []
    launch = hopper.lightning_indexer.launch
    monkeypatch.setattr(
        hopper.lightning_indexer, "launch", lambda *x: (launches.append(x), launch(*x))
    )
    monkeypatch.setattr("custom.cuda_ops.common.gpu.capability", lambda device: (9, 0))
    monkeypatch.setattr("custom.cuda_ops.common.gpu.num_sms", lambda device: 132)
    stand_in(
        monkeypatch,
        ordered,
        rows,
        hopper.rows,
        hopper.tma,
        hopper.lightning_indexer,
        hopper.selection,
        hopper.topk,
        hopper.topk_of_short_rows,
    )
    return launches


@pytest.mark.parametrize("case", INDEXED)
def test_indexer(case, indexed):
    _, every = arguments(torch.bfloat16, **INDEXED[case])
    got = launched("lightning_indexer", **every)
    assert len(indexed) == 1
    assert_top(every, *got)


@pytest.mark.parametrize("heads", [5, 16, 40, 64])
def test_indexer_of_keys_that_are_no_numbers(heads, indexed):
    """An infinite score comes first, NaN last; heads that are not there add nothing."""
    _, every = arguments(torch.bfloat16, N=heads, R=64, B=1, S=5, keys="BSND", S2=90, K=87)
    every |= dict(query=every["query"].abs(), weights=every["weights"].abs(), sparse_mode=0)
    every["key"][0, [3, 70]] = torch.nan
    every["key"][0, [20, 80]] = torch.inf
    every["key"][0, 40, 0, :2] = torch.tensor([torch.inf, -torch.inf])  # their sum is NaN
    wanted = [p for p in range(90) if p not in (3, 40, 70)]
    for count, there in ((87, wanted), (2, [20, 80])):
        indices, _ = launched("lightning_indexer", **every | dict(sparse_count=count))
        assert all(row == there for row in indices.view(-1, count).tolist())
    assert len(indexed) == 2


@pytest.mark.parametrize("heads", [5, 64], ids=["alone", "shared"])
@pytest.mark.parametrize("paged", [False, True])
def test_indexer_of_e4m3(paged, heads, indexed):
    problem = Problem("fp8", heads, [(3, 70), (1, 5), (2, 0), (4, 2), (0, 9), (2, 130)])
    given = problem.paged(64, 16) if paged else problem.packed()
    given |= dict(sparse_count=200)
    indices, values = launched("quant_lightning_indexer_scores", **given)
    assert len(indexed) == 1
    wanted, exact = custom.npu_quant_lightning_indexer_scores(**given)
    assert torch.equal(indices, wanted)
    assert ((values - exact).abs() <= 1e-6 * 128 * exact.abs().max()).all()


@pytest.mark.parametrize(("heads", "ratio"), [(5, 4), (64, 3), (64, 128)])
@pytest.mark.parametrize("mode", [0, 3])
def test_indexer_of_entries(mode, heads, ratio, indexed):
    """Lengths count tokens; windows that are open, more tokens than there are entries, none."""
    lengths = [96 * ratio + ratio - 1, 2**31 - 1, 70 * ratio + 1, ratio - 1]
    sizes = dict(N=heads, R=64, B=4, S=3, P=64, S2=128, K=90, mode=mode, lengths=lengths)
    _, every = arguments(torch.bfloat16, index=torch.int64, rows=[3, 3, 2, 1], **sizes)
    every |= dict(cmp_ratio=ratio)
    got = launched("lightning_indexer", **every)
    assert len(indexed) == 1
    assert_top(every, *got)


@pytest.mark.parametrize("heads", [9, 64], ids=["alone", "shared"])
@pytest.mark.parametrize("rows", [[4, 2, 9], [9, 3, 4], [-(2**31), 2**31 - 1, 5]], ids=str)
def test_prefix_sums_that_fall(rows, heads, indexed):
    """A row is of the request whose number is how many sums it has passed; the kernels end."""
    packed = dict(query="TND", keys="TND", rows=rows, lengths=[20, -(2**31), 60])
    _, every = arguments(torch.bfloat16, N=heads, R=64, B=3, S=3, S2=100, K=30, **packed)
    with ends_within(120):
        got = launched("lightning_indexer", **every)
    assert len(indexed) == 1
    assert_top(every, *got)


def of_loss(heads: int, size: int, S: int, S2: int, K: int, lse: bool) -> dict:
    """With slots that do not count, equal ones, a row of none, an infinite key that none names."""
    dtype = torch.float16 if heads % 2 else torch.bfloat16
    query, key = torch.randn(2, heads, S, size).to(dtype), torch.randn(2, S2, size).to(dtype)
    index = torch.randint(-2, S2 + 2, (2, S, K))
    index[0, 1], index[1, 0, 64:], index[index == 5] = -1, -1, 6
    key[:, 5] = torch.inf
    given = dict(query=query, key=key, index_score=torch.randn(2, S, K).to(dtype), indices=index)
    given |= dict(scaling=size**-0.5, chunk_offset=S2 - S, eps=1e-10, query_rope=None)
    statistics = None
    if lse:
        rows = torch.arange(S)[:, None] + S2 - S
        valid = (index >= 0) & (index <= rows) & (index < S2)
        every = (query.float() @ key.float()[:, None].mT) * size**-0.5
        at = index.clamp(0, S2 - 1)[:, None].expand(-1, heads, -1, -1)
        statistics = every.gather(-1, at).masked_fill(~valid[:, None], -torch.inf).logsumexp(-1)
    return given | dict(key_rope=None, softmax_lse=statistics)


@pytest.mark.parametrize(
    ("heads", "size", "lse"),
    [(5, 64, True), (64, 128, True), (64, 128, False), (35, 64, False), (100, 128, False)],
)
def test_loss_of_narrow_keys(heads, size, lse, monkeypatch):
    monkeypatch.setattr("custom.cuda_ops.common.gpu.capability", lambda device: (9, 0))
    stand_in(monkeypatch, loss, indexer_loss, hopper.rows, hopper.indexer_loss_hdim256)
    calls = counted(monkeypatch, hopper.indexer_loss_hdim256)
    given = of_loss(heads, size, 3, 150, 130, lse)
    got = indexer_loss.forward(**given)
    assert len(calls) == 1
    wide = {name: given[name].double() for name in ("query", "key", "index_score")}
    for one, want in zip(got, reference_loss.forward(**given | wide), strict=True):
        torch.testing.assert_close(one.double(), want, rtol=1e-4, atol=2e-6)


GRADIENTS = {
    "one request": dict(N=64, R=128, B=1, S=3, keys="BSND", S2=200, K=130),
    "padded rows": dict(N=40, R=64, B=2, S=3, keys="BSND", S2=90, rows=[3, 1], K=70),
    "packed": _PACKED(N=64, rows=[1, 1, 5], lengths=[20, 20, 150], S2=60),
}


@pytest.mark.parametrize("case", GRADIENTS)
def test_gradient_of_the_indexer(case, monkeypatch):
    monkeypatch.setattr("custom.cuda_ops.common.gpu.capability", lambda device: (9, 0))
    grad = hopper.lightning_indexer_grad
    stand_in(monkeypatch, rows, selection, scatter, hopper.rows, lightning_indexer_grad, grad)
    calls = counted(monkeypatch, grad)
    attention, every = arguments(torch.bfloat16, **GRADIENTS[case])
    index = attention["sparse_indices"]
    given = dict(
        query=every["query"],
        key=every["key"],
        weights=every["weights"],
        dy=torch.randn(index.shape).to(torch.bfloat16),
        sparse_indices=index,
        layout=every["layout_query"],
        sparse_mode=3,
        actual_seq_lengths_query=every["actual_seq_lengths_query"],
        actual_seq_lengths_key=every["actual_seq_lengths_key"],
    )
    got = lightning_indexer_grad.backward(**given)
    assert len(calls) == 1
    wide = {name: given[name].double() for name in ("query", "key", "weights", "dy")}
    for one, want in zip(got, reference_grad.backward(**given | wide), strict=True):
        near(one, want)


def counted(monkeypatch, module):
    """The calls of a module's launcher, which runs as before."""
    spy = mock.Mock(wraps=module.launch)
    monkeypatch.setattr(module, "launch", spy)
    return spy.call_args_list


def normal(*shape, std=1.0):
    return (torch.randn(*shape) * std).to(torch.bfloat16)


def near(got, wanted, error=5e-3):
    assert got.shape == wanted.shape and not got.isnan().any()
    assert (got.float() - wanted.float()).norm() <= error * wanted.float().norm()


def turned(x, sin, cos, interleaved):
    """x [T, N, D] rotated in float32, by its definition in prolog.py."""
    left, right = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    v = torch.cat((left, right), -1).float()
    w = torch.cat((-right, left), -1).float()
    return v * cos[:, None].float() + w * sin[:, None].float()


@pytest.fixture
def prologs(monkeypatch):
    modules = [
        handover,
        hopper.absorption,
        hopper.barriers,
        hopper.fused_gemm,
        hopper.query_heads,
        hopper.query_stage,
        hopper.nz_matmul,
        hopper.prompt_matmul,
        hopper.quantized_heads,
        hopper.quantized_matmul,
        hopper.quantized_prompt_matmul,
        hopper.rotation,
        hopper.tma,
        quantize,
    ]
    monkeypatch.setattr("custom.cuda_ops.common.gpu.capability", lambda device: (9, 0))
    monkeypatch.setattr("custom.cuda_ops.common.gpu.num_sms", lambda device: 132)
    stand_in(monkeypatch, *modules)


# a weight [K, N] as an op is given it, by weight_format
LAID = {"nz": to_nz, "nd": lambda w: w, "linear": lambda w: w.t().contiguous()}
every_form = pytest.mark.parametrize("form", LAID)


@every_form
@pytest.mark.parametrize("tokens, depth", [(3, 1024), (40, 320), (70, 448), (150, 192)])
def test_product(tokens, depth, form, prologs):
    x, sizes = normal(tokens, depth), (96, 16, 128)
    weights = [normal(depth, size) for size in sizes]
    parts = nz_matmul.product(
        x,
        [(LAID[form](w), size) for w, size in zip(weights, sizes, strict=True)],
        form,
        keep_float=True,
        first=True,
    )
    near(parts.sum(0), x.float() @ torch.cat(weights, 1).float(), 1e-5)


@pytest.fixture
def prompts(monkeypatch):
    """Launches of the kernel for them."""
    launches, launch = [], hopper.prompt_matmul.launch

    def noted(*given, **named):
        launches.append(given)
        launch(*given, **named)

    monkeypatch.setattr(hopper.prompt_matmul, "launch", noted)
    return launches


@every_form
@pytest.mark.parametrize(
    "tokens, sms, columns", [(3, 132, 96), (40, 132, 16), (130, 132, 64), (300, 5, 256)]
)
@pytest.mark.parametrize("size", [0, 128, 192], ids="heads of {}".format)
def test_product_of_groups(size, tokens, sms, columns, form, prologs, prompts, monkeypatch):
    """`size`: of the heads, whose last dims are another tensor's."""
    monkeypatch.setattr("custom.cuda_ops.common.gpu.num_sms", lambda device: sms)
    groups, depth = 2, 384
    x = normal(tokens, groups, depth)
    weights = [normal(depth, columns) for _ in range(groups)]
    whole, turned = x.clone(), None
    if size:
        turned = normal(tokens, groups * depth // size, 64)
        whole.view(tokens, -1, size)[..., -64:] = turned
        x.view(tokens, -1, size)[..., -64:] = torch.nan
        turned = turned.flatten(1)
    parts = nz_matmul.product(
        x.flatten(1),
        [(torch.stack([LAID[form](w) for w in weights]), columns)],
        form,
        groups=groups,
        turned=turned,
        size=size,
    )
    wanted = torch.einsum("tgk,gkn->tgn", whole.float(), torch.stack(weights).float())
    near(parts.float().sum(0), wanted.flatten(1))
    assert bool(prompts) == (sms == 5)


@every_form
@pytest.mark.parametrize(
    "tokens, depth, columns", [(300, 208, 272), (257, 64, 1024), (1100, 320, 16)]
)
def test_product_of_a_prompt(tokens, depth, columns, form, prologs, prompts, monkeypatch):
    """Tiles that nothing divides; more of them than programs, and as many."""
    monkeypatch.setattr("custom.cuda_ops.common.gpu.num_sms", lambda device: 5)
    x, weight = normal(tokens, depth), normal(depth, columns)
    [got] = nz_matmul.product(x, [(LAID[form](weight), columns)], form)
    near(got, x.float() @ weight.float())
    assert prompts


def quantized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(e4m3, a scale for each row and 128 columns)"""
    scale = torch.rand(len(x), -(-x.shape[1] // 128)) + 0.5
    return (x * 30).to(torch.float8_e4m3fn), scale


def wide(values: torch.Tensor, scale: torch.Tensor, rows: int) -> torch.Tensor:
    """What they stand for; a scale is one of `rows` rows."""
    by = scale.repeat_interleave(rows, 0).repeat_interleave(128, 1)
    return values.float() * by[: values.shape[0], : values.shape[1]]


@pytest.mark.parametrize("tokens, depth", [(3, 1024), (20, 1168), (40, 336), (70, 448), (150, 192)])
def test_fp8_product(tokens, depth, prologs):
    x, x_scale = quantized(normal(tokens, depth))
    sizes = (96, 16, 320)
    weights = [quantized(normal(size, depth)) for size in sizes]
    scales = [scale[::128].contiguous() for _, scale in weights]
    parts = quantized_matmul.product(
        quantized_matmul.Rows(x, x_scale),
        [
            quantized_matmul.Weight(w, size, scale.t().contiguous())
            for (w, _), size, scale in zip(weights, sizes, scales, strict=True)
        ],
        quantized_matmul.LINEAR.value,
        torch.bfloat16,
        keep_float=True,
    )
    x = wide(x, x_scale, 1)
    wanted = [x @ wide(w, scale, 128).t() for (w, _), scale in zip(weights, scales, strict=True)]
    near(parts.sum(0), torch.cat(wanted, 1), 1e-5)


@pytest.mark.parametrize(
    "tokens, depth, sms",
    [(n, k, 132) for n, k in ((3, 1024), (20, 1168), (70, 448), (150, 192))]
    + [(n, k, 1) for n, k in ((150, 2320), (70, 4112))],
)
def test_fp8_product_of_groups(tokens, depth, sms, prologs, monkeypatch):
    """sms 1: more blocks of k in a run than shared memory has the scales of."""
    monkeypatch.setattr("custom.cuda_ops.common.gpu.num_sms", lambda device: sms)
    groups, size = 3, 160
    x = [quantized(normal(tokens, depth)) for _ in range(groups)]
    weights = [quantized(normal(size, depth)) for _ in range(groups)]
    scales = [scale[::128].contiguous() for _, scale in weights]
    values, scale = map(torch.cat, zip(*x, strict=True))
    parts = quantized_matmul.product(
        quantized_matmul.Rows(values, scale),
        [
            quantized_matmul.Weight(
                torch.stack([w for w, _ in weights]),
                size,
                torch.stack([scale.t().contiguous() for scale in scales]),
            )
        ],
        quantized_matmul.LINEAR.value,
        torch.bfloat16,
        keep_float=True,
        groups=groups,
    )
    wanted = [wide(*x[g], 1) @ wide(weights[g][0], scales[g], 128).t() for g in range(groups)]
    near(parts.sum(0), torch.cat(wanted, 1), 1e-5)


def quantized_groups(
    groups: int, tokens: int, depth: int, columns: int
) -> tuple[quantized_matmul.Rows, quantized_matmul.Weight, torch.Tensor]:
    """x and weights of groups, and what their product is in float32."""
    x = [quantized(normal(tokens, depth)) for _ in range(groups)]
    w = [quantized(normal(columns, depth)) for _ in range(groups)]
    w = [(values, scale[::128].contiguous()) for values, scale in w]
    wanted = [wide(*x[g], 1) @ wide(*w[g], 128).t() for g in range(groups)]
    values, scale = map(torch.cat, zip(*x, strict=True))
    weight = quantized_matmul.Weight(
        torch.stack([values for values, _ in w]).squeeze(0),
        columns,
        torch.stack([scale.t().contiguous() for _, scale in w]),
    )
    return quantized_matmul.Rows(values, scale), weight, torch.cat(wanted, 1)


@pytest.mark.parametrize(
    "groups, tokens, depth, columns",
    [(1, 300, 208, 272), (1, 257, 64, 1024), (1, 1100, 336, 16), (3, 300, 272, 128)],
)
def test_fp8_product_of_a_prompt(groups, tokens, depth, columns, prologs, monkeypatch):
    """Tiles that nothing divides; more of them than programs, and as many."""
    monkeypatch.setattr("custom.cuda_ops.common.gpu.num_sms", lambda device: 5)
    x, weight, wanted = quantized_groups(groups, tokens, depth, columns)
    form = quantized_matmul.LINEAR.value
    assert quantized_matmul.is_prompt(x, weight, form, torch.bfloat16, groups)
    [got] = quantized_matmul.product(x, [weight], form, torch.bfloat16, groups=groups)
    near(got, wanted)


@pytest.mark.parametrize(
    "groups, tokens, depth, columns", [(1, 300, 208, 384), (2, 257, 64, 128), (3, 530, 272, 256)]
)
def test_fp8_product_that_is_quantized(groups, tokens, depth, columns, prologs, monkeypatch):
    """The bytes and scales of the product that is not."""
    monkeypatch.setattr("custom.cuda_ops.common.gpu.num_sms", lambda device: 5)
    x, weight, wanted = quantized_groups(groups, tokens, depth, columns)
    x.scale[5] *= 1e9
    x.scale[6] *= 1e-9
    x.scale[7] = 0
    form = quantized_matmul.LINEAR.value
    [whole] = quantized_matmul.product(x, [weight], form, torch.bfloat16, groups=groups)
    values, scale = quantization.activations(whole, "fp8")
    got = quantized_matmul.quantized_product(x, weight, torch.bfloat16, groups=groups)
    assert torch.equal(got.values.view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(got.scale, scale)
    stands_for = quantization.stands_for(values, scale).float()
    assert (stands_for[8:] - wanted[8:]).norm() < 0.04 * wanted[8:].norm()


@every_form
@pytest.mark.parametrize("tokens, size", [(3, 64), (70, 128), (140, 128), (260, 64)])
def test_index_heads(tokens, size, form, prologs):
    heads, depth, interleaved = 4352 // size, 192, size == 64
    c, w, sin, cos = normal(tokens, depth), normal(depth, 4352), *normal(2, tokens, 64)
    got = stages.index_heads(
        c, LAID[form](w), form, size, sin, cos, (tokens, 1), interleaved, late=tokens < 100
    )
    wanted = (c.float() @ w.float()).bfloat16().float().view(tokens, heads, size)
    wanted[..., :64] = turned(wanted[..., :64], sin, cos, interleaved)
    near(got.squeeze(1), wanted)


@every_form
@pytest.mark.parametrize("tokens", [5, 40, 100, 150, 300])
def test_query_heads(tokens, form, prologs, monkeypatch):
    """One launch up to 256 tokens, then product and absorption."""
    one = tokens <= 256
    heads, depth, rank, interleaved = 2, 640 if one else 320, 256, tokens % 3 == 0
    monkeypatch.setattr(hopper.query_heads, "supports", lambda *_: one)
    monkeypatch.setattr(stages, "_rotate", lambda *_, **named: None)  # no kernel in Gluon
    c, w, w_uk = normal(tokens, depth), normal(depth, heads * 192), normal(heads, 128, rank)
    sin, cos = normal(2, tokens, 64)
    query, query_rope = stages.query_heads(
        c, LAID[form](w), form, w_uk, sin, cos, (tokens, 1), interleaved
    )
    q = (c.float() @ w.float()).bfloat16().float().view(tokens, heads, 192)
    near(query.squeeze(1), torch.einsum("tnd,ndr->tnr", q[..., :128], w_uk.float()))
    if one:
        near(query_rope.squeeze(1), turned(q[..., 128:], sin, cos, interleaved))


@pytest.mark.parametrize(
    "tokens, parts",
    [(5, True), (20, True), (40, True), (100, True), (150, True), (40, False), (100, False)],
)
def test_fp8_query_heads(tokens, parts, prologs, monkeypatch):
    """Also on a Triton that reinterprets no part of a memory."""
    monkeypatch.setattr(gluon_names, "REINTERPRETS_PARTS", parts)
    heads, depth, rank, interleaved = 2, 1152, 256, tokens % 3 == 0
    monkeypatch.setattr(hopper.quantized_heads, "supports", lambda *_: True)
    c, c_scale = quantized(normal(tokens, depth))
    w, w_scale = quantized(normal(heads * 192, depth))
    w_scale, w_uk = w_scale[::128] / 1024, normal(heads, 128, rank)
    sin, cos = normal(2, tokens, 64)
    query, query_rope = quantized_stages.query_heads(
        quantized_matmul.Rows(c, c_scale),
        quantized_matmul.Weight(w, heads * 192, w_scale.t().contiguous()),
        "linear",
        w_uk,
        sin,
        cos,
        (tokens, 1),
        interleaved,
    )
    q = wide(c, c_scale, 1) @ wide(w, w_scale, 128).t()
    q = q.bfloat16().float().view(tokens, heads, 192)
    near(query.squeeze(1), torch.einsum("tnd,ndr->tnr", q[..., :128], w_uk.float()))
    near(query_rope.squeeze(1), turned(q[..., 128:], sin, cos, interleaved))


@pytest.fixture
def few_processors(monkeypatch):
    """Attention on three of them."""
    module = hopper.fused_attention
    monkeypatch.setattr("custom.cuda_ops.common.gpu.capability", lambda device: (9, 0))
    monkeypatch.setattr("custom.cuda_ops.common.gpu.num_sms", lambda device: 3)
    stand_in(monkeypatch, attention_tiles, lengths, hopper.tma, hopper.turns, module)
    # what they say in PTX
    instead = dict(
        _ping_pong=lambda *_: None,
        _meet=lambda: None,
        _pairs=lambda even, odd, dtype: torch.stack((even, odd), -1).flatten(-2).to(dtype),
        _operand=lambda pairs, *_: pairs,
    )
    for name, function in instead.items():
        monkeypatch.setattr(module, name, function)


ENDS = [0, 200, 201, 500, 740]


@pytest.mark.parametrize(
    "sizes, options",
    {
        "grouped": ((333, 333, 4, 2, 64, 64), {}),
        "three consumers": ((1050, 1050, 1, 1, 64, 64), {}),
        "more keys": ((200, 263, 2, 2, 128, 128), {}),
        "fewer keys": ((300, 233, 2, 2, 192, 128), {}),
        "all keys": ((215, 384, 2, 1, 192, 192), dict(causal=False)),
        "window": ((700, 700, 1, 1, 64, 64), dict(window=300)),
        "window, all keys": ((500, 500, 1, 1, 256, 256), dict(causal=False, window=200)),
        "packed": ((740, 740, 2, 1, 64, 64), dict(ends=ENDS)),
    }.values(),
    ids=str,
)
@pytest.mark.parametrize("grown", [False, True])
@pytest.mark.parametrize("dtype", ERROR, ids=str)
def test_attention(sizes, options, grown, dtype, few_processors):
    n_q, n_k, heads, key_heads, size, v_size = sizes
    options = dict(causal=True, window=None) | options
    ends = options.pop("ends", None)

    def drawn(count, n, size):
        shape = (1, count, n, size) if ends is None else (n, count, size)
        return torch.randn(shape).to(dtype)

    q, k = drawn(heads, n_q, size), drawn(key_heads, n_k, size)
    v = drawn(key_heads, n_k, v_size)
    if grown:  # scores of 300 after scores about 0
        q += 2
        (k[..., :70, :] if ends is None else k[210:300]).add_(100 * size**-0.5)
    sums = None if ends is None else torch.tensor(ends, dtype=torch.int32)
    named = dict(sm_scale=None, cu_seqlens_q=sums, cu_seqlens_k=sums, **options)
    got = fused_attention.forward(q=q, k=k, v=v, **named)
    wanted = reference.forward(
        q=q.double(), k=k.double(), v=v.double(), deterministic=False, **named
    )
    for name, one, other in zip(("o", "lse"), got, wanted, strict=True):
        assert_near(name, one, other, ERROR[dtype] if name == "o" else 1e-5)


def gradients(monkeypatch, at, lazy, size, options):
    """(the gradients, the sums that become that of q) of four tiles of keys, added up in turn; of
    programs that run at once the first adds last, if it is `lazy` and need not wait."""
    module, summed = hopper.fused_attention_backward, []
    plain, empty = fused_attention_backward, memory.empty
    monkeypatch.setattr("custom.cuda_ops.common.gpu.capability", lambda device: (9, 0))
    stand_in(monkeypatch, attention_tiles, lengths, hopper.tma, hopper.turns, module, plain, at=at)

    def add(sums, place, part):
        time.sleep(lazy * (at.once - Program.now.get().number % at.once))
        rows = sums.base.view(-1, 256)
        rows[int(place[0]) :][: len(part.at)].add_(part.load())

    end = time.monotonic() + 20

    def added(turn):
        storage, where, _ = turn.memory(None)
        assert time.monotonic() < end, "waits forever"
        time.sleep(1e-4)
        return storage[where]

    # what they say in PTX
    module.gl.inline_asm_elementwise = lambda *_: None
    for name, function in dict(_add_bulk=add, _added=added, warpgroup_mma_init=lambda x: x).items():
        monkeypatch.setattr(module, name, function)

    def kept(shape, dtype, device):
        made = empty(shape, dtype, device)
        summed.extend([made] if len(shape) == 4 and shape[-1] == size else [])
        return made

    monkeypatch.setattr(memory, "empty", kept)
    torch.manual_seed(0)
    n_q, n_k, ends = options.pop("sizes")
    shapes = [(n, heads, size) for n, heads in ((n_q, 2), (n_k, 1), (n_k, 1), (n_q, 2))]
    if ends is None:
        shapes = [(1, heads, n, size) for n, heads, size in shapes]
    q, k, v, grad_o = (torch.randn(shape).bfloat16() for shape in shapes)
    named = dict(sm_scale=None, cu_seqlens_q=None, cu_seqlens_k=None, deterministic=True, **options)
    if ends is not None:
        for side, sums in zip("qk", ends, strict=True):
            named[f"cu_seqlens_{side}"] = torch.tensor(sums, dtype=torch.int32)
    o, lse = reference.forward(q=q, k=k, v=v, **named)
    given = dict(grad_o=grad_o, q=q, k=k, v=v, o=o, lse=lse, grad_lse=None, **named)
    grads = plain.backward(**given)
    wide = {n: x.double() if "cu_" not in n and torch.is_tensor(x) else x for n, x in given.items()}
    for name, got, want in zip("qkv", grads, reference_backward.backward(**wide), strict=True):
        assert_near(f"grad of {name}", got, want, 1e-2)
    (sums,) = (x for x in summed if x.dtype is torch.float32)
    return [*grads, sums.nan_to_num(7)]  # there are rows of nothing


IN_TURN = {
    "all keys": dict(causal=False, window=None, sizes=(130, 500, None)),
    "causal": dict(causal=True, window=None, sizes=(300, 400, None)),
    "falling sums": dict(
        causal=False, window=None, sizes=(300, 500, ((7, 200, 40, 260), (0, 400, 420, 300)))
    ),
}


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("options", IN_TURN)
def test_gradients_are_added_in_turn(options, size, monkeypatch):
    """Whatever order programs begin in, and however many run at once: neither other bits nor a wait
    that nothing ends."""

    def run(at, lazy):
        with monkeypatch.context() as patch:
            return gradients(patch, at, lazy, size, dict(IN_TURN[options]))

    want = run(At(), 0)
    turned = At(order=lambda places: [*places][::-1])
    at_once = At(once=3, order=lambda places: random.Random(0).sample(x := [*places], len(x)))
    for at, lazy in ((turned, 0), (at_once, 5e-3)):
        assert all(torch.equal(x, y) for x, y in zip(run(at, lazy), want, strict=True))


# rows of a tile, tokens, heads, heads of a group, and groups of a section that L2 would hold
DEALT = [
    (128, 4096, 64, 1, 4), (128, 4096, 16, 1, 6), (192, 2048, 64, 1, 32), (128, 8192, 32, 4, 2)
]  # fmt: skip


@pytest.mark.parametrize("rows, n, heads, group, wanted", DEALT)
def test_programs_get_as_many_keys(rows, n, heads, group, wanted, few_processors):
    """The host's count of what each program gets is what the kernel takes, and near the mean."""
    module, programs, tiles = hopper.fused_attention, 132, -(-n // rows)
    section = module._section(rows, n, n, n, heads, group, wanted, programs)
    assert section % group == 0 or section == heads
    costs = [rows + min(n, (tile + 1) * rows) for tile in range(tiles)]
    work = [0] * programs
    for number in range(tiles * heads):
        place = torch.tensor(number), None, tiles, heads, 1, section, n, n, False
        *_, tile = module._tile_of(*place)
        step, program = divmod(number, programs)
        work[program if step % 2 == 0 else -1 - program] += costs[int(tile)]
    most = max(work) * programs / sum(work)
    assert most == module._most(costs, heads, section, programs)
    assert most < 1.035


@pytest.mark.parametrize("size, kernel", [(96, "hopper"), (94, "plain")])
def test_attention_whose_output_tma_cannot_store(size, kernel, few_processors, monkeypatch):
    """Values cut from wider rows lie aligned; rows of the output have no more than they need."""
    taken = []
    monkeypatch.setattr(fused_attention, "_plain", lambda *_: taken.append("plain"))
    monkeypatch.setattr(hopper.fused_attention, "launch", lambda *_: taken.append("hopper"))
    q, v = torch.randn(2, 1, 2, 300, 128).bfloat16()
    others = dict.fromkeys(("sm_scale", "cu_seqlens_q", "cu_seqlens_k", "window"))
    fused_attention.forward(q=q, k=q, v=v[..., :size], causal=True, **others)
    assert taken == [kernel]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n, k", [(16, 20), (300, 30), (7000, 50), (20000, 2048), (65536, 2048)])
def test_topk(n, k, kind, monkeypatch):
    stand_in(monkeypatch, ordered, hopper.selection, hopper.topk)
    scores, lengths = scores_of(kind, n), torch.tensor([n, n - 7, 13], dtype=torch.int32)
    indices = torch.full((3, k), -9, dtype=torch.int32)
    values = torch.full((3, k), torch.nan)
    sample = scores[:, ::EVERY].contiguous() if n == 65536 else None
    hopper.topk.launch(scores, lengths, indices, values, k, sample)
    wanted, value = best_of(scores, lengths, k)
    assert torch.equal(indices, wanted) and torch.equal(values, value)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("copies, n, k", [(1, 12288, 512), (7, 9000, 50), (22, 4096, 30)])
def test_topk_of_short_rows(copies, n, k, kind, monkeypatch):
    stand_in(monkeypatch, ordered, hopper.selection, hopper.topk_of_short_rows)
    scores = scores_of(kind, n).repeat(copies, 1)
    lengths = torch.tensor([n, n - 7, 13], dtype=torch.int32).repeat(copies)
    indices = torch.full((3 * copies, k), -9, dtype=torch.int32)
    values = torch.full((3 * copies, k), torch.nan)
    sample = scores[:, ::EVERY].contiguous()
    assert hopper.topk_of_short_rows.supports(scores, k, sample)
    hopper.topk_of_short_rows.launch(scores, lengths, indices, values, k, sample)
    wanted, value = best_of(scores, lengths, k)
    assert torch.equal(indices, wanted) and torch.equal(values, value)


@pytest.mark.parametrize("case", ["one row", "three rows"])
def test_few_rows_of_no_number(case, few):
    """A NaN stays one, in its head alone; it is not taken for a row without keys."""
    attention, _ = arguments(torch.bfloat16, **CASES[case])
    every = attention | dict(return_softmax_lse=True)
    right = launched("sparse_flash_attention", **every)
    query = every["query"].clone()
    query[..., 2, 7] = torch.nan
    out, _, total = launched("sparse_flash_attention", **every | dict(query=query))
    assert len(few) == 2
    wrong = torch.zeros(out.shape[:-1], dtype=torch.bool)
    wrong[..., 2] = right[2].view(wrong.shape)[..., 2] > 0
    assert wrong.any() and out[wrong].isnan().all()
    assert torch.equal(total.view(wrong.shape).isnan(), wrong)
    assert torch.equal(out[~wrong], right[0][~wrong])


@pytest.mark.parametrize(
    "heads, entries, rows, keys", [(128, 200, 2, 300), (24, 64, 3, 50), (72, 7, 1, 9)], ids=str
)
def test_gradient_of_sparse_attention(heads, entries, rows, keys, monkeypatch):
    """Both kernels, from the second row on, against the formulas in float32: tails of entries and
    heads, entries that have no key, poison where nothing may be read."""
    gradient = hopper.sparse_flash_attention_grad
    stand_in(monkeypatch, hopper.tma, hopper.mla_consumers, gradient)
    first, scale = 1, 0.05
    count = first + rows
    q, qr, do = (normal(count, heads, n) for n in (512, 64, 512))
    key, kr = (normal(1, keys, 1, n) for n in (512, 64))
    key[0, 0] = kr[0, 0] = torch.nan  # selected by none
    slots = torch.randint(1, keys, (rows, entries), dtype=torch.int32)
    slots[torch.rand(rows, entries) < 0.2] = keys
    slots[0, entries // 2 :] = keys
    there = slots < keys
    k = torch.cat((key, kr), -1)[0, slots.long().clamp(max=keys - 1), 0].float()
    k[~there] = 0
    queries, of_out = torch.cat((q, qr), -1)[first:].float(), do[first:].float()
    s = (scale * queries @ k.mT).masked_fill(~there[:, None], -torch.inf)
    top, delta = s.amax(-1), torch.randn(count, heads)
    total = (s - top[..., None]).exp().sum(-1)
    p = (s - top[..., None]).exp() / total[..., None]
    ds = scale * p * (of_out @ k[..., :512].mT - delta[first:, :, None])

    def poisoned(*shape, dtype=torch.bfloat16):
        return torch.full(shape, torch.nan, dtype=dtype)

    top, total = (torch.cat((poisoned(1, heads, dtype=x.dtype), x)) for x in (top, total))
    weights, added = poisoned(rows * entries, 2, heads), poisoned(rows * entries, 576)
    d_query, d_query_rope = poisoned(count, heads, 512), poisoned(count, heads, 64)
    gradient.launch(
        q,
        qr,
        key,
        kr,
        do,
        slots.flatten(),
        top,
        total,
        delta,
        weights,
        added,
        d_query,
        d_query_rope,
        scale,
        first,
        rows,
        entries,
        keys,
    )
    got = weights.unflatten(0, (rows, entries))[there]
    near(got, torch.stack((ds.mT[there], p.mT[there]), 1))
    wanted = ds @ k
    near(torch.cat((d_query, d_query_rope), -1)[first:], wanted)
    assert d_query[:first].isnan().all() and d_query_rope[:first].isnan().all()
    wanted = ds.mT @ queries
    wanted[..., :512] += p.mT @ of_out
    near(added.unflatten(0, (rows, entries))[there], wanted[there])
