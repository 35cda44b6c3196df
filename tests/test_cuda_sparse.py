# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Both sparse stages and their gradients on CUDA: every layout and tile against the reference;
graphs, determinism, ties, offsets past 2**31.  Without a GPU the same kernels run under Triton's
interpreter, in a process of its own."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from custom.dispatch import log, register
from custom.dispatch.specs import BY_NAME
from torch import Tensor

import custom

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ON_GPU = torch.cuda.is_available() and not INTERPRETED
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
DTYPES = (torch.bfloat16, torch.float16) if ON_GPU else (torch.float16, torch.float32)
ERROR = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 2e-5}

kernels = pytest.mark.skipif(not (ON_GPU or INTERPRETED), reason="needs a GPU or the interpreter")
gpu = pytest.mark.skipif(not ON_GPU, reason="needs a GPU")


def arguments(
    dtype, B=2, S=2, N=16, R=32, D=16, K=24, S2=96, P=16, query="BSND", keys="PA_BSND", mode=3,
    span=1, rows=None, lengths=None, joined=False, own_value=False, index=torch.int32,
):  # fmt: skip
    """(arguments of both stages): `rows` and `lengths` are prefix sums where the layout is TND."""

    def normal(*shape):
        return torch.randn(*shape).to(dtype)

    tokens = (B * S, N) if query == "TND" else (B, S, N)
    shape, table = {"TND": (B * S2, 1), "BSND": (B, S2, 1)}.get(keys), None
    if shape is None:
        pages = B * (S2 // P) + 3
        shape = (pages, P, 1)
        table = torch.randperm(pages)[: B * (S2 // P)].view(B, -1)
        table[-1, -1], table[0, -1] = -1, pages + 5
    blocks = S2 // span
    chosen = torch.stack([torch.randperm(max(blocks, K))[:K] for _ in range(B * S)])
    chosen[chosen >= blocks] = -1
    chosen[0, ::3] = -1
    chosen[-1, ::5] = 10**6
    if B * S > 2:
        chosen[2] = -1
    if query == "TND" and rows is None:
        rows = [S * (i + 1) for i in range(B)]
    if keys == "TND" and lengths is None:
        lengths = [S2 * (i + 1) for i in range(B)]
    if keys == "PA_BSND" and lengths is None:
        lengths = [S2] * B
    width = R + D if joined else R
    attention = dict(
        query=normal(*tokens, width),
        key=normal(*shape, width),
        value=normal(*shape, width) if own_value else None,
        sparse_indices=chosen.view(*tokens[:-1], 1, K).to(index),
        scale_value=0.2,
        query_rope=None if joined else normal(*tokens, D),
        key_rope=None if joined else normal(*shape, D),
        sparse_block_size=span,
        layout_kv=keys,
        actual_seq_lengths_kv=None if lengths is None else torch.tensor(lengths, dtype=index),
    )
    indexer = dict(
        query=normal(*tokens, R),
        key=normal(*shape, R),
        weights=normal(*tokens),
        sparse_count=K,
        return_value=True,
        layout_key=keys,
        actual_seq_lengths_key=attention["actual_seq_lengths_kv"],
    )
    both = dict(
        layout_query=query,
        sparse_mode=mode,
        actual_seq_lengths_query=None if rows is None else torch.tensor(rows, dtype=index),
        block_table=None if table is None else table.to(index),
    )
    return attention | both, indexer | both


def on(device, values, dtype=None):
    def moved(x):
        if not isinstance(x, Tensor):
            return x
        return x.to(device, dtype if dtype is not None and x.is_floating_point() else x.dtype)

    return {name: moved(x) for name, x in values.items()}


def launched(op, **values):
    """The CUDA launcher's own result; every argument of its signature, no dispatch."""
    module = importlib.import_module(f"custom.cuda_ops.{op}")
    return getattr(module, "backward" if op.endswith("_grad") else "forward")(**values)


def exact(op, **values):
    """The reference in float64."""
    name = "backward" if op.endswith("_grad") else "forward"
    module = importlib.import_module(f"custom.dispatch.reference.{op}")
    schema = register.overload(BY_NAME[f"npu_{op}"])._schema
    return getattr(module, name)(**register.bind(schema, (), on("cpu", values, torch.float64)))


def assert_near(name: str, got: Tensor, wanted: Tensor, error: float) -> None:
    got, wanted = got.double().cpu(), wanted.double()
    infinite = wanted.isinf()
    assert torch.equal(got[infinite], wanted[infinite]), f"{name}: infinities differ"
    off = (got - wanted)[~infinite].norm()
    assert off <= error * wanted[~infinite].norm().clamp_min(1e-6), f"{name} is off by {off}"


CASES = {
    "paged": {},
    "odd heads": dict(N=5, S=1),
    "packed": dict(query="TND", keys="TND", rows=[3, 4], lengths=[50, 170]),
    "all keys": dict(keys="BSND", mode=0),
    "idle rows": dict(keys="BSND", rows=[1, 0], lengths=[96, 20]),
    "packed, paged": dict(query="TND", rows=[1, 3], lengths=[96, 1]),
    "blocks": dict(span=4, K=6),
    "joined": dict(joined=True, keys="BSND"),
    "own value": dict(own_value=True, query="TND", keys="TND", rows=[2, 4]),
    "no keys": dict(lengths=[0, 2]),
    "int64": dict(index=torch.int64, lengths=[70, 33], N=17),
    "odd ranks": dict(R=48, D=8, S=1, keys="BSND"),
    "many rows": dict(S=11, B=3, rows=[11, 0, 7], lengths=[30, 96, 5]),
}
LARGE = {
    "decode": dict(R=512, D=64, N=128, B=3, S=1, P=64, S2=4096, K=2048),
    "decode, 16 heads": dict(R=512, D=64, N=16, B=3, S=3, P=64, S2=4096, K=2048),
    "two splits": dict(R=512, D=64, N=128, B=32, S=1, P=64, S2=1024, K=500),
    "many rows": dict(R=512, D=64, N=128, B=2, S=80, keys="BSND", S2=700, K=300),
    "packed": dict(R=512, D=64, N=64, B=10, S=15, query="TND", keys="TND", K=512, S2=700),
    "96 heads": dict(R=512, D=64, N=96, B=3, S=40, keys="BSND", S2=1024, K=300),
    "joined": dict(R=512, D=64, N=24, joined=True, keys="BSND", S2=256, K=100),
    "own value": dict(R=512, D=64, N=128, B=1, S=30, own_value=True, keys="BSND", S2=300, K=100),
    "one row": dict(R=512, D=64, N=128, B=1, S=1, P=64, S2=4096, K=2048),
    "one row, 5 heads": dict(R=512, D=64, N=5, B=1, S=1, query="TND", keys="TND", S2=300, K=100),
    "one row, packed": dict(R=512, D=64, N=64, B=1, S=1, query="TND", keys="TND", S2=300, K=100),
    "two rows, blocks": dict(R=512, D=64, N=17, B=2, S=1, span=4, S2=1024, K=200),
    "two rows, no keys": dict(R=512, D=64, N=128, B=2, S=1, lengths=[0, 2], K=90),
    "rows in turn": dict(R=512, D=64, N=100, B=2, S=80, query="TND", rows=[20, 160], K=90),
}


@kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "case", CASES | ({f"large {n}": c for n, c in LARGE.items()} if ON_GPU else {})
)
def test_attention(case, dtype, monkeypatch):
    if INTERPRETED:  # a GPU of so many processors splits the selections of these cases
        monkeypatch.setattr("custom.cuda_ops.common.gpu.processors", lambda device: 16)
    values = CASES[case] if case in CASES else LARGE[case.removeprefix("large ")]
    attention, _ = arguments(dtype, **values)
    heads = attention["query"].shape[-2]
    for sinks in (None, torch.randn(heads)):
        every = on(DEVICE, attention) | dict(return_softmax_lse=True)
        every["sinks"] = None if sinks is None else sinks.to(DEVICE)
        got = launched("sparse_flash_attention", **every)
        again = launched("sparse_flash_attention", **every)
        wanted = exact("sparse_flash_attention", **every)
        for name, x, same, y in zip(("out", "max", "sum"), got, again, wanted, strict=True):
            assert_near(name, x, y, ERROR[dtype])
            assert torch.equal(x, same), f"{name} differs from run to run"


def assert_top(every, indices, values) -> None:
    """The selection is that of the exact scores, but for what rounding cannot tell apart."""
    k = every["sparse_count"]
    every = every | dict(sparse_count=every["key"].shape[:-1].numel())
    where, scores = exact("lightning_indexer", **every)
    where, scores = where.flatten(0, -2), scores.flatten(0, -2)
    indices, values = indices.flatten(0, -2).cpu(), values.flatten(0, -2).cpu().double()
    rounding = torch.finfo(values.dtype if values.dtype == torch.float32 else torch.float32).eps
    for row in range(len(where)):
        seen = where[row] >= 0
        score, count = scores[row, seen], min(k, int(seen.sum()))
        found = indices[row, :count].long()
        assert (indices[row, count:] == -1).all() and (values[row, count:] == 0).all()
        assert (found.diff() > 0).all() and torch.isin(found, where[row, seen]).all()
        if count == 0:
            continue
        at = torch.searchsorted(where[row, seen].contiguous().long(), found)
        rest = torch.ones_like(score, dtype=torch.bool)
        rest[at] = False
        size = every["query"].shape[-1] * every["query"].shape[-2]
        band = rounding * size * score.abs().max()
        assert not rest.any() or score[rest].max() <= score[at].min() + band
        assert (values[row, :count] - score[at]).abs().max() <= 1e-2 * score.abs().max() + 1e-6


@kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_indexer(case, dtype):
    _, indexer = arguments(dtype, **CASES[case])
    every = on(DEVICE, indexer)
    got = launched("lightning_indexer", **every)
    again = launched("lightning_indexer", **every)
    assert all(torch.equal(x, y) for x, y in zip(got, again, strict=True))
    assert_top(every, *got)


@gpu
@pytest.mark.parametrize(
    "case",
    (
        dict(N=64, R=128, S=1, B=3, P=128, S2=4096, K=2048),
        dict(N=64, R=128, S=2, B=6, P=64, S2=16384, K=2048),
        dict(N=64, R=128, S=50, B=2, keys="BSND", S2=9100, K=2048),
        dict(N=64, R=128, S=40, B=3, query="TND", keys="TND", rows=[10, 10, 110],
             lengths=[20, 3000, 7000], S2=2400, K=512),
        dict(N=64, R=128, S=3, B=5, P=64, S2=9216, lengths=[9216, 5000, 70, 9000, 0], K=2048),
        dict(N=128, R=128, S=5, B=2, P=64, S2=2048, K=500),
        dict(N=5, R=64, S=4, B=3, P=64, S2=1024, rows=[4, 1, 3], K=300),
        dict(N=64, R=64, S=3, B=3, query="TND", rows=[1, 6, 9], P=64, lengths=[4096, 100, 2000],
             S2=4096, K=512, index=torch.int64),
        dict(N=16, R=64, S=2, B=1, P=128, S2=70016, K=2048),
    ),
    ids=("decode", "two tokens", "prefill", "packed", "three tokens", "128 heads", "few heads",
         "packed, paged", "long"),
)  # fmt: skip
@pytest.mark.parametrize("path", ("hopper", "plain"))
def test_indexer_large(case, path, monkeypatch):
    _, indexer = arguments(torch.bfloat16, **case)
    every = on(DEVICE, indexer)
    hopper = importlib.import_module("custom.cuda_ops.hopper.lightning_indexer")
    calls = []

    def launch(*args):
        calls.append(args)
        kept(*args)

    kept = hopper.launch
    monkeypatch.setattr(hopper, "launch", launch)
    if path == "plain":
        monkeypatch.setattr(hopper, "suits", lambda *_: False)
    elif torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    got, again = launched("lightning_indexer", **every), launched("lightning_indexer", **every)
    assert len(calls) == 2 * (path == "hopper")
    assert all(torch.equal(x, y) for x, y in zip(got, again, strict=True))
    assert_top(every, *got)


def scores_of(kind: str, n: int) -> Tensor:
    scores = torch.randn(3, n)
    if kind == "rounded":
        scores = scores.round()
    if kind == "equal":
        scores = torch.ones(3, n)
        scores[1, ::2], scores[1, 1::2] = -0.0, 0.0
        scores[2, 100:] = -torch.inf
    if kind == "plateau":
        scores = torch.where(torch.arange(n) < 4 * n // 5, 5.0, scores)
    if kind == "comb":  # what a sample of every n-th score cannot see
        scores[:, ::2] = -9
        scores[1, 200:] = -torch.inf
    if kind == "segment":  # all in one part of the row
        scores[:, n // 3 : n // 3 + n // 8] += 9
    if kind == "outliers":
        scores = scores.exp().exp()
    if kind == "zeros":
        scores = torch.zeros(3, n)
        scores[:, ::2] = -0.0
    if kind == "infinite":
        scores[:, ::30] = torch.inf
    if kind == "clusters":  # as far apart as keys of floats can be
        scores[:, ::2] *= 1e-30
        scores[:, 1::2] = scores[:, 1::2] * 1e-3 + 1e6
    if kind == "powers":
        scores = scores.sign() * 10.0 ** (12 * scores)
    return scores


def best_of(scores: Tensor, lengths: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """(positions, scores) of the k best of each row, by sorting it."""
    wanted = torch.full((len(scores), k), -1, dtype=torch.int32)
    for row, length in enumerate(lengths.tolist()):
        seen = scores[row, :length]
        count = min(k, int((seen > -torch.inf).sum()))
        best = torch.sort(seen, descending=True, stable=True).indices[:count]
        wanted[row, :count] = best.sort().values.int()
    return wanted, scores.gather(1, wanted.clamp(min=0).long()).masked_fill(wanted < 0, 0)


KINDS = (
    "random", "rounded", "equal", "plateau", "comb", "segment", "outliers", "zeros", "infinite",
    "clusters", "powers",
)  # fmt: skip
SIZES = ((100, 30), (7000, 50), (20000, 2048), (9000, 8192))
LONG = ((36864, 2048), (65536, 2048), (300000, 2048))


@kernels
@pytest.mark.parametrize("path", ("plain", "hopper", "hopper, sampled") if ON_GPU else ("plain",))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n, k", SIZES + LONG * ON_GPU)
def test_topk_is_exact(n, k, kind, path, monkeypatch):
    topk = importlib.import_module("custom.cuda_ops.topk")
    if path == "plain":
        monkeypatch.setattr("custom.cuda_ops.common.gpu.capability", lambda device: (8, 0))
    elif torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    scores, lengths = scores_of(kind, n), torch.tensor([n, n - 7, min(n, 20)], dtype=torch.int32)
    wanted, value = best_of(scores, lengths, k)
    indices = torch.full((3, k), -9, dtype=torch.int32, device=DEVICE)
    values = torch.full((3, k), torch.nan, device=DEVICE)
    scores = scores.to(DEVICE)
    sample = scores[:, :: topk.EVERY].contiguous() if path == "hopper, sampled" else None
    topk.topk(scores, lengths.to(DEVICE), indices, values, k, sample)
    assert torch.equal(indices.cpu(), wanted)
    assert torch.equal(values.cpu(), value)


GRADIENTS = {
    "packed": CASES["packed"],
    "idle rows": CASES["idle rows"],
    "blocks": dict(span=4, K=6, keys="BSND"),
    "own value": CASES["own value"],
    "joined": CASES["joined"],
    **({"128 heads": dict(R=512, D=64, N=128, S=6, keys="BSND", S2=512, K=200)} if ON_GPU else {}),
}


@kernels
@pytest.mark.parametrize("deterministic", (False, True))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", GRADIENTS)
def test_gradients(case, dtype, deterministic):
    attention, indexer = arguments(dtype, **GRADIENTS[case])
    attention, indexer = on(DEVICE, attention), on(DEVICE, indexer)
    wide = on("cpu", attention, torch.float64) | dict(return_softmax_lse=True)
    out, top, total = (x.to(DEVICE) for x in exact("sparse_flash_attention", **wide))
    shared = dict(layout=attention.pop("layout_query"), sparse_mode=attention["sparse_mode"])
    rows, lengths = attention["actual_seq_lengths_query"], attention["actual_seq_lengths_kv"]
    names = "query key value sparse_indices scale_value query_rope key_rope sparse_block_size"
    backward = {name: attention[name] for name in names.split()} | shared
    backward |= dict(
        d_out=torch.randn(out.shape).to(DEVICE, dtype), out=out.to(dtype),
        softmax_max=top.float(), softmax_sum=total.float(), actual_seq_qlen=rows,
        actual_seq_kvlen=lengths,
    )  # fmt: skip
    index_backward = {name: indexer[name] for name in ("query", "key", "weights")} | shared
    index_backward |= dict(
        dy=torch.randn(attention["sparse_indices"].shape).to(DEVICE, dtype),
        sparse_indices=attention["sparse_indices"].int(), actual_seq_lengths_query=rows,
        actual_seq_lengths_key=lengths,
    )  # fmt: skip
    if attention["sparse_block_size"] > 1:
        index_backward["sparse_indices"] = index_backward["sparse_indices"].clamp(max=50)
    torch.use_deterministic_algorithms(deterministic)
    try:
        for op, every in (
            ("sparse_flash_attention_grad", backward),
            ("lightning_indexer_grad", index_backward),
        ):
            got, again = launched(op, **every), launched(op, **every)
            for place, (x, same, y) in enumerate(zip(got, again, exact(op, **every), strict=True)):
                assert_near(f"{op}[{place}]", x, y, ERROR[dtype])
                assert not deterministic or torch.equal(x, same), f"{op}[{place}] differs"
    finally:
        torch.use_deterministic_algorithms(False)


needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


@needs_triton
def test_more_positions_than_32_bits_number_are_refused():
    attention, indexer = arguments(torch.float16)
    far = torch.empty(2**24, 128, 1, 16, device="meta")
    wide = torch.empty(2, 2**27, dtype=torch.int32, device="meta")
    for op, every in (("sparse_flash_attention", attention), ("lightning_indexer", indexer)):
        unsupported = importlib.import_module(f"custom.cuda_ops.{op}").unsupported
        assert unsupported(**every) is None
        for change in (dict(key=far), dict(block_table=wide), dict(sparse_block_size=2**40)):
            if change.keys() <= every.keys():
                assert "supported up to 1073741824" in unsupported(**every | change)


@pytest.mark.skipif(INTERPRETED, reason="is the interpreter")
@needs_triton
@pytest.mark.parametrize("own", [True, False], ids=["cases", "lengths"])
def test_under_the_interpreter(own):
    """The kernels on CPU tensors: their index arithmetic, on a machine without a GPU."""
    tests = Path(__file__).parent
    files = [__file__]
    chosen = "attention and (paged or packed or blocks) or indexer and (packed or many)"
    chosen += " or exact and (7000 or 20000 and random) or gradients and (packed or idle)"
    if not own:
        ops = ("lightning_indexer", "sparse_flash_attention")
        files = [tests / f"test_{op}{grad}.py" for op in ops for grad in ("", "_grad")]
        chosen = "BSND-3 and beyond or TND-3 and beyond or fall or apart"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--device", "cpu",
         *files, "-k", chosen],
        env=os.environ | {"TRITON_INTERPRET": "1", "CUSTOM_BACKEND": "cuda"},
        cwd=tests.parent,
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@gpu
@pytest.mark.parametrize("heads, rows", ((128, 1), (128, 32), (16, 4)))
def test_graph_replays_with_other_lengths_and_tables(heads, rows):
    """Captured once; lengths, tables, indices and tensors change under it."""
    size = dict(R=512, D=64, N=heads, B=rows, S=1, P=64, S2=16384, K=512)
    attention, _ = arguments(torch.bfloat16, **size)
    _, indexer = arguments(torch.bfloat16, **(size | dict(R=128, N=64)))
    every = (on(DEVICE, attention), on(DEVICE, indexer))

    def both():
        return (
            launched("sparse_flash_attention", **every[0])[0],
            *launched("lightning_indexer", **every[1]),
        )

    both()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, indices, values = both()
    for lengths in (16384, 5000, 9, 0):
        for values_ in every:
            name = "actual_seq_lengths_kv" if "value" in values_ else "actual_seq_lengths_key"
            values_[name].copy_(torch.randint(lengths // 2, lengths + 1, (rows,)))
            table = values_["block_table"]
            pages = values_["key"].shape[0]
            table.copy_(torch.randperm(pages, device=DEVICE)[: table.numel()].view(table.shape))
        graph.replay()
        torch.cuda.synchronize()
        fresh = both()
        for got, wanted in zip((out, indices, values), fresh, strict=True):
            assert torch.equal(got, wanted)
        assert_near("out", out, exact("sparse_flash_attention", **every[0])[0], 1e-2)
        assert_top(every[1], indices, values)


@gpu
def test_offsets_past_two_to_the_31():
    """Caches of more than 2**31 elements: the last pages are read, not some wrapped address."""
    pages, page = 66000, 64  # 2.16e9 latents, and 5.4e8 x 8 index keys of 128
    latents = torch.zeros(pages, page, 1, 512, dtype=torch.bfloat16, device=DEVICE)
    latents[-2:].normal_()
    ropes = torch.zeros(pages, page, 1, 64, dtype=torch.bfloat16, device=DEVICE)
    ropes[-2:].normal_()
    for heads, rows in ((128, 1), (128, 40), (16, 2)):
        attention, _ = arguments(
            torch.bfloat16, R=512, D=64, N=heads, B=rows, S=1, P=64, S2=128, K=100
        )
        attention["block_table"] = torch.tensor([[0, 1]] * rows, dtype=torch.int32)
        small = attention | dict(key=latents[-2:].cpu(), key_rope=ropes[-2:].cpu())
        wanted = exact("sparse_flash_attention", **small)[0]
        attention["block_table"] += pages - 2
        every = on(DEVICE, attention | dict(key=latents, key_rope=ropes))
        assert_near("out", launched("sparse_flash_attention", **every)[0], wanted, 1e-2)
    del latents, ropes
    pages = 2**31 // (64 * 128) + 3
    keys = torch.zeros(pages, 64, 1, 128, dtype=torch.bfloat16, device=DEVICE)
    keys[-2:].normal_()
    _, indexer = arguments(torch.bfloat16, R=128, N=64, B=2, S=1, P=64, S2=128, K=100)
    indexer["block_table"] = torch.tensor([[pages - 2, pages - 1]] * 2, dtype=torch.int32)
    every = on(DEVICE, indexer | dict(key=keys))
    got = launched("lightning_indexer", **every)
    small = every | dict(key=keys[-2:], block_table=every["block_table"] - (pages - 2))
    assert_top(small, *got)


@gpu
def test_dispatch_runs_these_kernels():
    before = log.calls.copy()
    attention, indexer = arguments(torch.bfloat16, keys="BSND")
    query = on(DEVICE, attention)
    leaf = query["query"].requires_grad_()
    custom.npu_sparse_flash_attention(**query)[0].float().sum().backward()
    assert leaf.grad is not None and bool(leaf.grad.isfinite().all())
    custom.npu_lightning_indexer(**on(DEVICE, indexer))
    for op in (
        "npu_sparse_flash_attention",
        "npu_sparse_flash_attention_grad",
        "npu_lightning_indexer",
    ):
        assert log.calls[op, "cuda"] > before[op, "cuda"]
