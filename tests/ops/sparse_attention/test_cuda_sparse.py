# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Both sparse stages and their gradients on CUDA: every layout and tile against the reference;
graphs, determinism, ties, offsets past 2**31.  Without a GPU the same kernels run under Triton's
interpreter, in a process of its own."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from custom.dispatch import backends, log
from custom.dispatch.registry import BY_NAME

import custom

from ...support import interpreted
from ...support.kernels import (
    DEVICE,
    DTYPES,
    INTERPRETED,
    ON_GPU,
    capturing,
    gpu,
    kernels,
)
from ...support.stages import (
    KINDS,
    arguments,
    assert_near,
    assert_top,
    best_of,
    exact,
    launched,
    on,
    scores_of,
)

ERROR = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 2e-5}


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
    "ropes without a channel": dict(D=0, span=4, K=7, keys="BSND"),
    "no keys": dict(lengths=[0, 2]),
    "int64": dict(index=torch.int64, lengths=[70, 33], N=17),
    "odd ranks": dict(R=48, D=8, S=1, keys="BSND"),
    "many rows": dict(S=11, B=3, rows=[11, 0, 7], lengths=[30, 96, 5]),
    "in parts": dict(S=1, K=90, keys="BSND"),
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
    "pools, one row": dict(R=512, D=0, N=64, B=1, S=1, span=4, P=64, S2=4096, K=513),
    "pools, many rows": dict(R=512, D=0, N=64, B=32, S=2, span=4, P=64, S2=4096, K=513),
    "pools, 12 heads": dict(R=512, D=0, N=12, B=8, S=1, span=4, S2=1024, K=100),
    "pools, 20 heads": dict(R=512, D=0, N=20, B=8, S=1, span=4, S2=1024, K=100),
    "pools, 96 heads": dict(R=512, D=0, N=96, B=8, S=1, span=4, S2=1024, K=100),
    "rows in turn": dict(R=512, D=64, N=100, B=2, S=80, query="TND", rows=[20, 160], K=90),
}


@kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "case", CASES | ({f"large {n}": c for n, c in LARGE.items()} if ON_GPU else {})
)
def test_attention(case, dtype, monkeypatch):
    parts = []
    if INTERPRETED:  # a GPU of so many processors splits the selections of the last case
        monkeypatch.setattr("custom.cuda_ops.common.gpu.num_sms", lambda device: 16)
        plain = importlib.import_module("custom.cuda_ops.sparse_attention.sparse_flash_attention")
        of = plain.Parts.of
        monkeypatch.setattr(
            plain, "Parts", SimpleNamespace(of=lambda n, *rest: parts.append(n) or of(n, *rest))
        )
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
    assert not INTERPRETED or set(parts) == {2 if case == "in parts" else 1}


@gpu
@pytest.mark.parametrize("scale", (1.5, 0.01, 0.0, -0.2))
@pytest.mark.parametrize("case", ("many rows", "two splits", "packed"))
def test_attention_of_any_scale(case, scale):
    """Maxima that grow by much from tile to tile, by little, or are those of the least products."""
    attention, _ = arguments(torch.bfloat16, **LARGE[case])
    attention["query"][..., ::2, :] *= 4  # neighbouring heads, which share a warp, differ
    sinks = torch.randn(attention["query"].shape[-2])
    every = on(DEVICE, attention) | dict(
        return_softmax_lse=True, scale_value=scale, sinks=sinks.to(DEVICE)
    )
    got = launched("sparse_flash_attention", **every)
    wanted = exact("sparse_flash_attention", **every)
    for name, x, y in zip(("out", "max", "sum"), got, wanted, strict=True):
        assert_near(name, x, y, ERROR[torch.bfloat16])


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
    hopper = importlib.import_module("custom.cuda_ops.indexer.hopper.lightning_indexer")
    calls = []

    def launch(*args):
        calls.append(args)
        kept(*args)

    kept = hopper.launch
    monkeypatch.setattr(hopper, "launch", launch)
    if path == "plain":
        monkeypatch.setattr(hopper, "supports", lambda *_: False)
    elif torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    got, again = launched("lightning_indexer", **every), launched("lightning_indexer", **every)
    assert len(calls) == 2 * (path == "hopper")
    assert all(torch.equal(x, y) for x, y in zip(got, again, strict=True))
    assert_top(every, *got)


SIZES = ((100, 30), (512, 16), (1000, 64), (300, 100), (7000, 50), (20000, 2048), (9000, 8192))
PATHS = ("plain", "plain, sampled", *(("hopper", "hopper, sampled") if ON_GPU else ()))
LONG = ((36864, 2048), (65536, 2048), (300000, 2048))


@kernels
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n, k", SIZES + LONG * ON_GPU)
def test_topk_is_exact(n, k, kind, path, monkeypatch):
    topk = importlib.import_module("custom.cuda_ops.indexer.topk")
    if path.startswith("plain"):
        monkeypatch.setattr("custom.cuda_ops.common.gpu.capability", lambda device: (8, 0))
    elif torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    scores, lengths = scores_of(kind, n), torch.tensor([n, n - 7, min(n, 20)], dtype=torch.int32)
    wanted, value = best_of(scores, lengths, k)
    indices = torch.full((3, k), -9, dtype=torch.int32, device=DEVICE)
    values = torch.full((3, k), torch.nan, device=DEVICE)
    scores = scores.to(DEVICE)
    sample = scores[:, :: topk.EVERY].contiguous() if path.endswith("sampled") else None
    topk.topk(scores, lengths.to(DEVICE), indices, values, k, sample)
    assert torch.equal(indices.cpu(), wanted)
    assert torch.equal(values.cpu(), value)


@gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "n, k", ((512, 16), (7000, 50), (20000, 512), (65536, 2048), (131072, 512))
)
@pytest.mark.parametrize("copies", (12, 40, 250))
def test_topk_of_many_rows(copies, n, k, kind):
    topk = importlib.import_module("custom.cuda_ops.indexer.topk")
    scores, lengths = scores_of(kind, n), torch.tensor([n, n - 7, n // 2], dtype=torch.int32)
    wanted, _ = best_of(scores, lengths, k)
    scores = scores.to(DEVICE).repeat(copies, 1)
    lengths = lengths.to(DEVICE).repeat(copies)
    indices = torch.full((3 * copies, k), -9, dtype=torch.int32, device=DEVICE)
    sample = scores[:, :: topk.EVERY].contiguous()
    topk.topk(scores, lengths, indices, torch.empty(0, device=DEVICE), k, sample)
    assert torch.equal(indices.cpu(), wanted.repeat(copies, 1))


GRADIENTS = {
    "packed": CASES["packed"],
    "idle rows": CASES["idle rows"],
    "blocks": dict(span=4, K=6, keys="BSND"),
    "own value": CASES["own value"],
    "joined": CASES["joined"],
}
MANY_HEADS = dict(R=512, D=64, N=128, S=6, keys="BSND", S2=512, K=200)
if ON_GPU:
    GRADIENTS |= {
        "128 heads": MANY_HEADS,
        "128 heads, plain": MANY_HEADS,
        "72 heads, packed": MANY_HEADS
        | dict(N=72, query="TND", keys="TND", rows=[3, 12], lengths=[50, 512]),
        "64 index heads": dict(N=64, R=128, S=6, keys="BSND", S2=300, K=200),
        "40 index heads, packed": dict(
            N=40, R=64, S=6, query="TND", keys="TND", rows=[3, 12], lengths=[50, 192], K=70
        ),
        "24 heads, no keys": MANY_HEADS | dict(N=24, lengths=[0, 130], K=70),
    }


def backward_of(attention, dtype):
    """Arguments of the attention's gradient."""
    wide = on("cpu", attention, torch.float64) | dict(return_softmax_lse=True)
    out, top, total = (x.to(DEVICE) for x in exact("sparse_flash_attention", **wide))
    names = "query key value sparse_indices scale_value query_rope key_rope sparse_block_size"
    return {name: attention[name] for name in (*names.split(), "sparse_mode")} | dict(
        d_out=torch.randn(out.shape).to(DEVICE, dtype),
        out=out.to(dtype),
        softmax_max=top.float(),
        softmax_sum=total.float(),
        layout=attention["layout_query"],
        actual_seq_qlen=attention["actual_seq_lengths_query"],
        actual_seq_kvlen=attention["actual_seq_lengths_kv"],
    )


@kernels
@pytest.mark.parametrize("deterministic", (False, True))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", GRADIENTS)
def test_gradients(case, dtype, deterministic, monkeypatch):
    if case.endswith("plain"):
        grad = "custom.cuda_ops.sparse_attention.hopper.sparse_flash_attention_grad"
        monkeypatch.setattr(f"{grad}.supports", lambda *_: False)
    attention, indexer = arguments(dtype, **GRADIENTS[case])
    attention, indexer = on(DEVICE, attention), on(DEVICE, indexer)
    backward = backward_of(attention, dtype)
    rows, lengths = backward["actual_seq_qlen"], backward["actual_seq_kvlen"]
    shared = {name: backward[name] for name in ("layout", "sparse_mode")}
    index_backward = {name: indexer[name] for name in ("query", "key", "weights")} | shared
    index_backward |= dict(
        dy=torch.randn(attention["sparse_indices"].shape).to(DEVICE, dtype),
        sparse_indices=attention["sparse_indices"].int(),
        actual_seq_lengths_query=rows,
        actual_seq_lengths_key=lengths,
    )
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


@kernels
@pytest.mark.parametrize("case", ("packed", "own value"))
def test_gradients_of_sections(case, monkeypatch):
    """Sections of three rows, which divide nothing: the same bits every time, and with keys beside
    them that nobody selected."""
    grad = importlib.import_module("custom.cuda_ops.sparse_attention.sparse_flash_attention_grad")
    op, dtype = "sparse_flash_attention_grad", DTYPES[1]
    attention, _ = arguments(
        dtype, **(CASES[case] | dict(S=2, S2=14, K=10, rows=[1, 4], lengths=[12, 25]))
    )
    every = backward_of(on(DEVICE, attention), dtype)
    wanted = exact(op, **every)
    padded = dict(every)
    for name in ("key", "value", "key_rope"):
        if every[name] is not None:
            padded[name] = torch.cat([every[name], every[name]])
    entries = every["sparse_indices"].shape[-1]
    size = grad.bytes_of_entry(every["query"], every["query_rope"], every["value"])
    monkeypatch.setattr(grad, "SECTION", 3 * entries * size)
    lists, invert = [], grad.inverted.invert
    monkeypatch.setattr(
        grad.inverted, "invert", lambda *given: lists.append(given) or invert(*given)
    )
    got, again, more = (launched(op, **each) for each in (every, every, padded))
    assert len(lists) == 3 * 2
    for place, (x, same, y, z) in enumerate(zip(got, again, more, wanted, strict=True)):
        assert_near(f"{op}[{place}]", x, z, ERROR[dtype])
        assert torch.equal(x, same), f"{op}[{place}] differs"
        assert torch.equal(x, y[: len(x)]), f"{op}[{place}] differs with more keys"
        assert not y[len(x) :].any()


@kernels
@pytest.mark.parametrize("keys, widths", ((260, (16, 0, 0)), (30, (40, 8, 0)), (30, (7, 5, 500))))
def test_inverted_list(keys, widths):
    """Keys that many, one and no place selected; places that selected none hold poison."""
    from custom.cuda_ops.common import inverted

    places = 150
    slots = torch.randint(0, 9, (places,), dtype=torch.int32) * 3
    slots[::9], slots[5], slots[6] = keys, keys - 1, keys
    rows = torch.randn(places, sum(widths)).to(DTYPES[1])
    rows[slots == keys] = torch.nan
    by = inverted.invert(slots.to(DEVICE), keys)
    starts = by.starts.tolist()
    for key in range(keys):
        chosen = (slots == key).nonzero().flatten()
        assert torch.equal(by.order[starts[key] : starts[key + 1]].cpu(), chosen)
    wanted = torch.zeros(keys, sum(widths), dtype=torch.float64)
    wanted.index_add_(0, slots[slots < keys].long(), rows[slots < keys].double())
    sums = torch.full((keys, sum(widths)), torch.nan, device=DEVICE)
    outs = [torch.full((keys if n else 0, n), torch.nan, device=DEVICE) for n in widths]
    inverted.add(rows.to(DEVICE), by, sums, outs, True, False)
    assert_near("sums", sums, wanted, 1e-6)
    inverted.add(rows.to(DEVICE), by, sums, outs, False, True)
    assert_near("added", torch.cat([x for x in outs if len(x)], 1), 2 * wanted, 1e-6)
    inverted.add(rows.to(DEVICE), by, sums, outs, True, True)
    assert_near("anew", torch.cat([x for x in outs if len(x)], 1), wanted, 1e-6)


needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


@needs_triton
def test_more_positions_than_32_bits_number_are_refused():
    attention, indexer = arguments(torch.float16)
    indexer |= dict(cmp_ratio=1)
    far = torch.empty(2**24, 128, 1, 16, device="meta")
    wide = torch.empty(2, 2**27, dtype=torch.int32, device="meta")
    for op, every in (("sparse_flash_attention", attention), ("lightning_indexer", indexer)):
        unsupported = backends.launcher(backends.CUDA, BY_NAME[f"npu_{op}"]).unsupported
        assert unsupported(**every) is None
        for change in (dict(key=far), dict(block_table=wide), dict(sparse_block_size=2**40)):
            if change.keys() <= every.keys():
                assert "supported up to 1073741824" in unsupported(**every | change)


@pytest.mark.skipif(INTERPRETED, reason="is the interpreter")
@needs_triton
@pytest.mark.parametrize("own", [True, False], ids=["cases", "lengths"])
def test_under_the_interpreter(own):
    """The kernels on CPU tensors: their index arithmetic, on a machine without a GPU."""
    tests = Path(__file__).parents[1]
    files = [__file__]
    chosen = "attention and (paged or packed or blocks or parts) or indexer and (packed or many)"
    chosen += " or exact and (7000 or 20000 and random) or gradients and (packed or idle)"
    if not own:
        ops = ("indexer/test_lightning_indexer", "sparse_attention/test_sparse_flash_attention")
        files = [tests / f"{op}{grad}.py" for op in ops for grad in ("", "_grad")]
        chosen = "BSND-3 and beyond or TND-3 and beyond or fall or apart"
    interpreted.passes(chosen, *files)


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
    with capturing(graph):
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


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
@needs_triton
@pytest.mark.parametrize("n", [9000, 20000, 65536, 300000])
@pytest.mark.parametrize("sampled", [False, True])
def test_topk_compiles_for_samples_of_any_size(n, sampled, monkeypatch):
    from ...support.compile_for_hopper import stand_in

    topk = importlib.import_module("custom.cuda_ops.indexer.topk")
    compiled = stand_in(monkeypatch, 80)
    monkeypatch.setattr("custom.cuda_ops.common.gpu.capability", lambda device: (8, 0))
    scores = torch.empty(2, n)
    lengths, indices = torch.empty(2, dtype=torch.int32), torch.empty(2, 50, dtype=torch.int32)
    sample = scores[:, :: topk.EVERY].contiguous() if sampled else None
    topk.topk(scores, lengths, indices, torch.empty(0), 50, sample)
    assert len(compiled) == 2
