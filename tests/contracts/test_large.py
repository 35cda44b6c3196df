# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What lies more than 2**31 numbers away: the last page of a great cache gives what the first page
of a small one does, and a tensor whose rows lie far apart what a contiguous one does.

Nothing of the memory between is initialised or touched.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from custom.dispatch.dispatch_keys import written
from custom.dispatch.registry import SPECS
from torch import Tensor

from docs.numerics import ANY_ORDER

from ..support.ragged import ints, run
from ..support.samples import SAMPLES, Maker, apart, attention_backward, sample

pytestmark = pytest.mark.large
PAGE, DTYPE = 128, torch.float16


@pytest.fixture
def room(device):
    if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < 12 * 2**30:
        pytest.skip("needs 12 GiB of free device memory")


def great_and_small(size: int, device) -> tuple[Tensor, Tensor]:
    """Two caches [pages, P, 1, size] that hold the same last and only page."""
    pages = 2**31 // (PAGE * size) + 2
    great = torch.empty(pages, PAGE, 1, size, dtype=DTYPE, device=device)
    small = Maker(device, DTYPE).normal(1, PAGE, 1, size)
    great[-1:] = small
    assert (great.numel() - great[-1].numel()) > 2**31
    return great, small


def paged(cache: Tensor, device) -> dict:
    return dict(block_table=ints([len(cache) - 1], device).view(1, 1))


def assert_same(op: str, backend: str, caches: tuple[Tensor, Tensor], **arguments) -> None:
    """An op reads the same in both caches."""
    outs = [
        run(op, backend, key=cache, **arguments, **paged(cache, cache.device)) for cache in caches
    ]
    assert all(torch.equal(a, b) for a, b in zip(*outs, strict=True))


def test_indexer(device, backend, room):
    m = Maker(device, DTYPE)
    query, weights = m.normal(1, 2, 4, 128), m.normal(1, 2, 4)
    assert_same(
        "npu_lightning_indexer",
        backend,
        great_and_small(128, device),
        query=query,
        weights=weights,
        actual_seq_lengths_key=ints([100], device),
        layout_key="PA_BSND",
        sparse_count=16,
        return_value=True,
    )


def test_attention(device, backend, room):
    m = Maker(device, DTYPE)
    query = m.normal(1, 2, 4, 512)
    indices = m.shuffled(1, 2, 1, 32, high=100)
    assert_same(
        "npu_sparse_flash_attention",
        backend,
        great_and_small(512, device),
        query=query,
        value=None,
        sparse_indices=indices,
        scale_value=0.1,
        actual_seq_lengths_kv=ints([100], device),
        layout_kv="PA_BSND",
        return_softmax_lse=True,
    )


def test_prologs_write_the_last_page(device, backend, room):
    """The sample's own small caches make way for one of 2**31 numbers each."""
    for op, caches in (
        ("npu_mla_prolog_pto", dict(kv_cache=32, kr_cache=16)),
        ("npu_indexer_prolog_pto", dict(index_k_cache=32)),
    ):
        arguments = sample(op, device, DTYPE)
        slots = ints([[0, 5], [127, 64]], device)
        pages = 2**31 // (PAGE * 32) + 2
        rows = []
        for count in (pages, 1):
            fresh = {
                name: torch.empty(count, PAGE, 1, size, dtype=DTYPE, device=device)
                for name, size in caches.items()
            }
            for cache in fresh.values():
                cache[-1] = 7
            index = slots + (count - 1) * PAGE
            run(op, backend, **(arguments | fresh | dict(cache_index=index)))
            rows.append([cache[-1].clone() for cache in fresh.values()])
            del fresh
        for great, small in zip(*rows, strict=True):
            assert torch.equal(great, small) and (great != 7).any()


# what an op takes in one piece only
DENSE = {
    "npu_recurrent_gated_delta_rule": {"state"},
    "npu_causal_conv1d": {"bias"},
    "npu_causal_conv1d_grad": {"bias"},
    "npu_causal_conv1d_update": {"bias"},
    "npu_gated_rms_norm": {"weight"},
    "npu_gated_rms_norm_grad": {"weight"},
    "npu_gated_delta_layer_decode": {"norm_weight", "conv_bias"},
    "npu_index_cache_write": {"values", "scales"},
    "npu_latent_cache_write": {"rows"},
    "npu_kv_quant_sparse_attn_sharedkv": {"ori_kv", "cmp_kv"},
    "npu_sparse_attn_sharedkv_grad": {"softmax_lse", "d_softmax_lse"},
    "npu_compressor": {"state_cache", "cmp_cache"},
}
# of these all is contiguous
WHOLE = ("_pto", "_prolog_v3", "hc_pre", "hc_post", "hc_post_pre", "hc_pre_grad", "hc_post_grad")
STRIDED = [spec.name for spec in SPECS if not spec.name.endswith(WHOLE)]


def outputs(op: str, backend: str, arguments: dict, **changed: Tensor) -> list[Tensor]:
    copies = {id(x): x.clone() for x in arguments.values() if isinstance(x, Tensor)}
    # what comes twice is one tensor, and stays one
    copies |= {id(arguments[n]): x for n, x in changed.items()}
    given = {n: copies.get(id(x), x) for n, x in arguments.items()}
    torch.use_deterministic_algorithms(op in ANY_ORDER, warn_only=True)
    try:
        out = run(op, backend, **given)
    finally:
        torch.use_deterministic_algorithms(False)
    if out is None:  # a writer
        out = [given[name] for _, name in written(getattr(torch.ops.custom, op).default)]
    return [out] if isinstance(out, Tensor) else list(out)


@pytest.mark.parametrize("op", STRIDED)
def test_rows_far_apart(op, device, backend, room):
    """One argument after the other, so that there is memory for it."""
    arguments = sample(op, device, DTYPE, S=5)
    want = outputs(op, backend, arguments)
    given = {
        n: x.dtype is DTYPE
        for n, x in arguments.items()
        if isinstance(x, Tensor) and n not in DENSE.get(op, ())
    }
    spread = [n for n, floats in given.items() if floats] or [*given]
    assert spread
    for name in spread:
        x = arguments[name]
        got = outputs(op, backend, arguments, **{name: apart(x, int(x.shape[0] == 1))})
        for x, exact in zip(got, want, strict=True):
            assert torch.equal(x, exact), name


@pytest.mark.parametrize("name", ["state_cache", "cmp_cache"])
def test_pages_of_the_compressor_far_apart(name, device, backend, room):
    op = "npu_compressor"
    near, far = (sample(op, device, DTYPE) for _ in range(2))
    far[name] = apart(far[name])
    out, other = run(op, backend, **near), run(op, backend, **far)
    assert torch.equal(out, other)
    for cache in ("state_cache", "cmp_cache"):
        assert torch.equal(near[cache], far[cache])
    assert not torch.equal(near[name], sample(op, device, DTYPE)[name])


def attention(m: Maker, *ends: int) -> dict:
    """For the kernels of more than 64 queries; packed if there are `ends`."""
    q, k, v = (m.normal(2, heads, 70, 64) for heads in (6, 3, 3))
    if not ends:
        return dict(q=q, k=k, v=v, causal=True)
    sums = m.ints(0, *ends)
    q, k, v = (x.transpose(1, 2).flatten(0, 1).contiguous() for x in (q, k, v))
    return dict(q=q, k=k, v=v, causal=True, cu_seqlens_q=sums, cu_seqlens_k=sums)


def indexer_loss(m: Maker) -> dict:
    loss = SAMPLES["npu_indexer_loss"](m, B=1, S=3, heads=66, d=256, keys=20, count=12)
    return loss | dict(
        chunk_offset=17,
        query_rope=m.normal(1, 66, 3, 64),
        key_rope=m.normal(1, 20, 64),
        softmax_lse=m.normal(1, 66, 3, dtype=torch.float32),
    )


def sized(op: str, **sizes: int) -> tuple[str, Callable[[Maker], dict]]:
    return op, lambda m: SAMPLES[op](m, **sizes)


ROWS = dict(B=1, r=512, dr=64, keys=40, count=32)
# what has kernels of its own on Hopper, where it is large enough for them
WIDE = {
    "dense": ("npu_fused_attention", attention),
    "packed": ("npu_fused_attention", lambda m: attention(m, 70, 140)),
    "dense, backward": (
        "npu_fused_attention_backward",
        lambda m: attention_backward(m, attention(m)),
    ),
    "packed, backward": (
        "npu_fused_attention_backward",
        lambda m: attention_backward(m, attention(m, 70, 140)),
    ),
    "few rows": sized("npu_sparse_flash_attention", heads=4, **ROWS),
    "rows": sized("npu_sparse_flash_attention", heads=20, **ROWS),
    "scores": sized("npu_lightning_indexer", heads=5, d=64, keys=70, count=16),
    "loss": ("npu_indexer_loss", indexer_loss),
    "chunks": sized("npu_chunk_gated_delta_rule", S=90, heads=3, dk=64, dv=64),
}
CONTIGUOUS = {
    "softmax_max", "softmax_sum", "d_softmax_sum", "lse", "initial_state", "d_final_state",
    "initial_state_source", "states",
}  # fmt: skip


@pytest.mark.parametrize(
    ("case", "dim"),
    [(x, dim) for x in [*STRIDED, *WIDE] for dim in range(0 if x in WIDE else 1, 3)],
)
def test_heads_far_apart(case, dim, device, backend):
    """And tokens, where they come behind another dimension: all arguments at once."""
    if case in WIDE and backend == "cuda" and device.type == "cpu":
        pytest.skip("the kernels for Hopper are not interpreted")
    op, make = WIDE.get(case, (case, None))
    arguments = make(Maker(device, DTYPE)) if make else sample(op, device, DTYPE, S=3)
    want = outputs(op, backend, arguments)
    near = {
        n: x
        for n, x in arguments.items()
        if isinstance(x, Tensor) and n not in CONTIGUOUS | DENSE.get(op, set())
        if x.ndim > dim + (n != "softmax_lse") and x.shape[dim] > 1
    }
    if not near:
        pytest.skip("no argument has more than one of that dimension")
    size = sum(x.element_size() for x in near.values()) * 2**31
    if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < size + 2**30:
        pytest.skip(f"needs {size / 2**30:.0f} GiB of free device memory")
    far = {n: apart(x, dim) for n, x in near.items()}
    for x, exact in zip(outputs(op, backend, arguments, **far), want, strict=True):
        torch.testing.assert_close(x, exact, rtol=4e-3, atol=4e-3)


def test_streams_past_2_to_the_31(device, backend, room):
    """All are read, in one piece: what the last token gives is what it gives alone."""
    if device.type == "cpu":
        pytest.skip("a CPU would write gigabytes")
    h = 4096
    tokens = 2**31 // (4 * h) + 2
    one = sample("npu_hc_post_pre", device, DTYPE, B=1, S=1, h=h)
    last = {name: one[name].flatten(0, 1) for name in ("x", "residual", "post", "comb")}
    great = {}
    for name, x in last.items():
        great[name] = torch.zeros(tokens, *x.shape[1:], dtype=x.dtype, device=device)
        great[name][-1:] = x
    gates = {name: x for name, x in one.items() if name not in last}
    streams = run("npu_hc_post", backend, **great)
    assert torch.equal(streams[-1:], run("npu_hc_post", backend, **last))
    del great
    got = run("npu_hc_pre", backend, x=streams, **gates)
    want = run("npu_hc_pre", backend, x=streams[-1:].clone(), **gates)
    for x, exact in zip(got, want, strict=True):
        torch.testing.assert_close(x[-1:], exact, rtol=1e-3, atol=1e-3)
