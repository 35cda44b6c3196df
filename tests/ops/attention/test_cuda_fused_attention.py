# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Fused attention on CUDA: both paths of both directions against the reference in float64; graphs,
determinism, neighbours, far offsets.  Without a GPU the plain kernels run under Triton's
interpreter, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from custom.dispatch.reference.attention import fused_attention as reference
from custom.dispatch.reference.attention import fused_attention_backward as reference_backward
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ...support.accuracy import assert_close_to_float64
from ...support.dense import Sizes
from ...support.kernels import DEVICE, INTERPRETED, ON_GPU, capturing, gpu, kernels

DTYPES = (torch.bfloat16, torch.float16) if ON_GPU else (torch.float16,)


@dataclass(frozen=True)
class Case(Sizes):
    """One call; with `ends_q` and `ends_k` packed, and then N counts all tokens."""

    V: int
    causal: bool = True
    window: int | None = None
    scale: float | None = None
    ends_q: tuple[int, ...] | None = None
    ends_k: tuple[int, ...] | None = None
    turned: bool = False  # [B, N, H, D] in memory
    deterministic: bool = False

    def tensors(self, dtype: torch.dtype) -> dict[str, Tensor]:
        def normal(heads: int, n: int, size: int) -> Tensor:
            if self.ends_q is not None:
                return torch.randn(n, heads, size).to(dtype)
            if self.turned:
                return torch.randn(self.B, n, heads, size).to(dtype).transpose(1, 2)
            return torch.randn(self.B, heads, n, size).to(dtype)

        made = dict(
            q=normal(self.H, self.Nq, self.D),
            k=normal(self.Hk, self.Nk, self.D),
            v=normal(self.Hk, self.Nk, self.V),
            grad_o=normal(self.H, self.Nq, self.V),
        )
        made["grad_lse"] = torch.randn(made["q"].shape[:-1])
        return {name: each.to(DEVICE) for name, each in made.items()}

    def options(self) -> dict[str, object]:
        def ends(values: tuple[int, ...] | None) -> Tensor | None:
            if values is None:
                return None
            return torch.tensor((0, *values), dtype=torch.int32, device=DEVICE)

        return dict(
            causal=self.causal,
            sm_scale=self.scale,
            window=self.window,
            deterministic=self.deterministic,
            cu_seqlens_q=ends(self.ends_q),
            cu_seqlens_k=ends(self.ends_k),
        )


def fused_forward(made: dict[str, Tensor], options: dict[str, object]) -> tuple[Tensor, Tensor]:
    from custom.cuda_ops.attention import fused_attention

    return fused_attention.forward(**{name: made[name] for name in "qkv"}, **options)


def launch(made: dict[str, Tensor], options: dict[str, object]) -> list[Tensor]:
    """o, lse and the three gradients, by the CUDA launchers themselves."""
    from custom.cuda_ops.attention import fused_attention_backward

    inputs = {name: made[name] for name in "qkv"}
    o, lse = fused_forward(made, options)
    upstream = dict(grad_o=made["grad_o"], grad_lse=made["grad_lse"])
    grads = fused_attention_backward.backward(o=o, lse=lse, **inputs, **upstream, **options)
    return [o, lse, *grads]


def by_reference(
    made: dict[str, Tensor], options: dict[str, object], dtype: torch.dtype
) -> list[Tensor]:
    made = {name: each.to(dtype) for name, each in made.items()}
    inputs = {name: made[name] for name in "qkv"}
    o, lse = reference.forward(**inputs, **options)
    lse_kind = torch.float64 if dtype is torch.float64 else torch.float32
    upstream = dict(grad_o=made["grad_o"], grad_lse=made["grad_lse"].to(lse_kind))
    grads = reference_backward.backward(o=o, lse=lse, **inputs, **upstream, **options)
    return [o, lse, *grads]


def assert_right(
    got: list[Tensor],
    made: dict[str, Tensor],
    options: dict[str, object],
    ends: tuple[int | None, int | None] = (None, None),
) -> None:
    """Against float64; of packed rows of queries and of keys those before `ends`."""
    exact = by_reference(made, options, torch.float64)
    rounded = by_reference(made, options, made["q"].dtype)
    names = ("o", "lse", "grad of q", "grad of k", "grad of v")
    for name, *each in zip(names, got, rounded, exact, strict=True):
        one, near, want = (x[: ends[name in names[3:]]] for x in each)
        if name != "lse":
            assert_close_to_float64(name, one, near, want)
            continue
        blind = torch.isinf(want)
        assert torch.equal(torch.isinf(one), blind)
        torch.testing.assert_close(one[~blind].double(), want[~blind], rtol=1e-5, atol=1e-5)


def check(case: Case, dtype: torch.dtype) -> None:
    made, options = case.tensors(dtype), case.options()
    assert_right(launch(made, options), made, options)


ENDS_Q, ENDS_K = (0, 70, 100, 101, 180), (10, 90, 120, 180, 185)
CASES = [
    Case(2, 4, 2, 70, 150, 64, 64),
    Case(1, 2, 1, 150, 70, 16, 16),
    Case(1, 2, 1, 90, 90, 96, 96, window=30),
    Case(1, 1, 1, 130, 150, 192, 128, causal=False, window=30, turned=True),
    Case(1, 1, 1, 40, 41, 256, 256, causal=False, scale=0.1),
    Case(1, 4, 1, 1, 700, 32, 32),
    Case(1, 4, 2, 3, 700, 32, 64, window=100, scale=-0.3),
    Case(1, 2, 1, 70, 90, 32, 32, scale=0.0),
    Case(1, 4, 1, 1, 700, 32, 32, causal=False, scale=0.0),
    Case(1, 2, 1, 5, 0, 16, 16),
    Case(0, 2, 1, 5, 7, 16, 16),
    Case(1, 4, 2, 190, 190, 32, 32, ends_q=ENDS_Q, ends_k=ENDS_K),
    Case(1, 4, 2, 5, 190, 32, 32, ends_q=(1, 2, 3, 3), ends_k=(100, 140, 140, 180)),
    Case(1, 2, 2, 5, 9, 16, 16, causal=False, window=7, ends_q=(), ends_k=()),
]

# what the warp-specialised kernels take on Hopper: more than 64 queries
LONG = (0, 170, 300, 301, 580), (10, 290, 320, 580, 585)
HOPPER = [
    Case(1, 2, 2, 256, 256, 128, 128),
    Case(2, 4, 2, 200, 330, 128, 128),
    Case(2, 4, 1, 200, 330, 128, 128, causal=False),
    Case(1, 2, 1, 333, 133, 128, 128, window=60),
    Case(1, 2, 2, 130, 257, 64, 64, causal=False, window=50, turned=True),
    Case(2, 2, 2, 500, 1157, 64, 64, turned=True),
    Case(1, 4, 2, 590, 590, 128, 128, ends_q=LONG[0], ends_k=LONG[1]),
    Case(1, 4, 4, 590, 590, 64, 64, ends_q=LONG[0], ends_k=LONG[1], window=90),
    Case(5, 16, 4, 700, 700, 128, 128, window=300),
    Case(2, 4, 2, 200, 330, 128, 128, deterministic=True),
    Case(3, 5, 5, 1500, 1500, 64, 64, causal=False),
    Case(2, 4, 2, 200, 330, 96, 96),
    Case(2, 4, 2, 200, 330, 32, 32, turned=True),
    Case(1, 4, 2, 300, 330, 16, 32, causal=False),
    Case(2, 4, 2, 200, 330, 192, 128),
    Case(1, 16, 4, 1590, 1590, 256, 256, ends_q=(*LONG[0], 1590), ends_k=(*LONG[1], 1585)),
    Case(1, 2, 1, 333, 1000, 64, 64, causal=False, window=150),
    Case(1, 2, 1, 500, 300, 64, 64, window=70),  # the first rows see nothing
    Case(1, 2, 1, 300, 700, 192, 192, window=90),
    Case(2, 2, 2, 333, 400, 64, 256),
    Case(1, 2, 2, 333, 400, 256, 64, causal=False),
    Case(1, 2, 2, 333, 400, 136, 200),
    Case(1, 4, 2, 590, 590, 192, 192, ends_q=LONG[0], ends_k=LONG[1], deterministic=True),
    Case(1, 4, 2, 590, 590, 192, 128, ends_q=LONG[0], ends_k=LONG[1]),
    Case(1, 4, 2, 590, 590, 192, 128, ends_q=LONG[0], ends_k=LONG[1], deterministic=True),
    Case(1, 4, 2, 590, 590, 64, 64, ends_q=LONG[0], ends_k=LONG[1], deterministic=True),
    Case(1, 2, 1, 500, 300, 64, 64, window=70, deterministic=True),
    Case(1, 2, 1, 500, 300, 128, 128, deterministic=True),
    Case(1, 2, 1, 200, 200, 64, 64, scale=1e-35),  # by which lse cannot be divided
    Case(1, 2, 1, 333, 1000, 128, 128, causal=False, window=150, deterministic=True),
    Case(1, 4, 1, 1000, 333, 256, 256, causal=False, window=50),
    Case(2, 2, 1, 1300, 1400, 64, 64),  # longer ones have tiles of more queries
    # few tiles, many keys: the plain path splits the keys
    Case(1, 4, 2, 200, 4000, 128, 128),
]


@pytest.fixture(params=["plain", pytest.param("hopper", marks=gpu)])
def path(request, monkeypatch):
    """Which kernels take what both could."""
    if request.param == "plain":
        plain_only(monkeypatch)
    return request.param


def plain_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("custom.cuda_ops.common.gpu.is_hopper", lambda device: False)


@kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_the_reference(case, dtype, monkeypatch):
    plain_only(monkeypatch)
    check(case, dtype)


@kernels
@pytest.mark.parametrize("case", [Case(1, 2, 1, 90, 100, 256, 256), Case(1, 1, 1, 70, 9, 160, 32)])
def test_tiles_for_99_kib_match_the_reference(case, monkeypatch):
    plain_only(monkeypatch)
    monkeypatch.setattr("custom.cuda_ops.common.gpu.shared_memory", lambda device: 99 * 1024)
    check(case, DTYPES[0])


@pytest.mark.skipif(INTERPRETED, reason="kernels are not compiled")
@pytest.mark.parametrize("capability, shared", [(89, 99), (100, 227)])
def test_widest_heads_fit(capability, shared, monkeypatch):
    pytest.importorskip("triton")
    from ...support.compile_for_hopper import stand_in

    compiled = stand_in(monkeypatch, capability)
    monkeypatch.setattr(
        "custom.cuda_ops.common.gpu.capability", lambda device: divmod(capability, 10)
    )
    monkeypatch.setattr("custom.cuda_ops.common.gpu.shared_memory", lambda device: shared * 1024)
    case = Case(1, 4, 2, 300, 300, 256, 256)
    made = {name: each.cpu() for name, each in case.tensors(torch.bfloat16).items()}
    launch(made, case.options())
    assert len(compiled) == 4
    assert max(kernel.metadata.shared for kernel in compiled) <= shared * 1024
    assert all((getattr(kernel.metadata, "tmem_size", 0) or 0) <= 512 for kernel in compiled)


@pytest.mark.skipif(INTERPRETED, reason="kernels are not compiled")
@pytest.mark.parametrize("size", [64, 128, 256])
def test_products_of_the_keys_kernel_overlap_on_hopper(size, monkeypatch, tmp_path):
    """ptxas would say so if it made each wgmma wait for the one before."""
    triton = pytest.importorskip("triton")
    from custom.cuda_ops.attention import fused_attention_backward

    from ...support.compile_for_hopper import stand_in

    compiled = stand_in(monkeypatch)
    plain_only(monkeypatch)
    x = torch.empty(1, 2, 256, size, dtype=torch.bfloat16)
    options = Case(1, 2, 2, 256, 256, size, size).options()
    lse = torch.empty(1, 2, 256)
    fused_attention_backward.backward(
        **dict.fromkeys(("grad_o", "q", "k", "v", "o"), x), lse=lse, grad_lse=None, **options
    )
    (keys,) = (kernel for kernel in compiled if kernel.name == "_keys_kernel")
    assert "wgmma.mma_async" in keys.asm["ptx"]
    (tmp_path / "keys.ptx").write_text(keys.asm["ptx"])
    command = [triton.knobs.nvidia.ptxas.path, "-v", "-arch", "sm_90a", tmp_path / "keys.ptx"]
    said = subprocess.run(
        [*command, "-o", tmp_path / "keys.cubin"], capture_output=True, text=True, check=True
    )
    assert "registers" in said.stderr and "serialized" not in said.stderr, said.stderr


@gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", HOPPER, ids=str)
def test_long_rows_match_the_reference(case, dtype):
    check(case, dtype)


@gpu
@pytest.mark.parametrize("ends", [None, (300, 1001, 1001, 1500)], ids=["dense", "packed"])
@pytest.mark.parametrize("size, v_size", [(64, 64), (128, 128), (192, 128), (256, 256)])
def test_scores_that_grow_far_beyond_those_before(size, v_size, ends):
    """And a row that is no number."""
    case = Case(2, 4, 2, 1500, 1500, size, v_size, ends_q=ends, ends_k=ends)
    made, options = case.tensors(torch.bfloat16), case.options()
    made["q"] += 2
    tokens = 0 if ends else 2
    for first in (0, 320):
        made["k"].narrow(tokens, first, 70).add_(100 * size**-0.5)
    made["q"].narrow(tokens, 900, 1).fill_(torch.nan)
    inputs = {name: made[name] for name in "qkv"}
    options["deterministic"] = False
    o, lse = fused_forward(made, options)
    exact = reference.forward(**{name: x.double() for name, x in inputs.items()}, **options)
    rounded = reference.forward(**inputs, **options)
    seen = ~torch.isnan(exact[1])
    assert torch.equal(torch.isnan(o).all(-1), ~seen)
    assert_close_to_float64("o", o[seen], rounded[0][seen], exact[0][seen])
    torch.testing.assert_close(lse[seen].double(), exact[1][seen], rtol=1e-5, atol=1e-5)


@gpu
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_length(data):
    n_q, n_k = data.draw(st.tuples(st.integers(65, 400), st.integers(1, 400)))
    keys = data.draw(st.integers(1, 2))
    # few kinds of kernels, each of which is compiled
    size, causal, windowed = data.draw(
        st.sampled_from(
            [(64, True, False), (128, True, False), (64, False, True), (192, True, False)]
        )
    )
    window = data.draw(st.integers(1, 200)) if windowed else None
    check(Case(1, 2 * keys, keys, n_q, n_k, size, size, causal, window), torch.bfloat16)


@gpu
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_any_packing(data):
    """Sequences of any lengths, empty ones and tokens behind the last one among them."""
    lengths = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300)), min_size=1, max_size=5)
    ends_q, ends_k = (tuple(accumulate(part)) for part in zip(*data.draw(lengths), strict=True))
    behind_q, behind_k = data.draw(st.tuples(st.integers(0, 99), st.integers(1, 99)))
    n_q, n_k = max(ends_q[-1] + behind_q, 65 * len(ends_q)), ends_k[-1] + behind_k
    size = data.draw(st.sampled_from([64, 128]))
    check(Case(1, 2, 1, n_q, n_k, size, size, ends_q=ends_q, ends_k=ends_k), torch.bfloat16)


# by tens: late ones, and such as fall on one side, on the other, on both, below 0 or past the end
SUMS = [
    ((3, 9, 19), (4, 9, 19)),
    ((0, 19, 0, 19), (0, 6, 12, 19)),
    ((0, 10, 2, 10, 17), (0, 5, 10, 15, 19)),
    ((0, 5, 10, 15, 19), (0, 10, 2, 10, 17)),
    ((-7, 12, 8, -1, 30), (8, 3, 16, -20, 19)),
    ((15, 10, 5), (0, 7, 19)),
]
# the plain kernels are deterministic as they are
KINDS = [(64, False), (64, True), (128, True), (192, True)] if ON_GPU else [(32, False)]


@kernels
@pytest.mark.skipif(ON_GPU and "ALONE" not in os.environ, reason="what hangs has its own process")
@pytest.mark.parametrize("size, deterministic", KINDS)
@pytest.mark.parametrize("sums", SUMS, ids=str)
def test_any_prefix_sums(sums, size, deterministic, monkeypatch):
    """A token is of one sequence or of none; every kernel has the same opinion of that."""
    unit = 100 if ON_GPU else 10
    tokens = 19 * unit + 3
    case = Case(1, 2, 1, tokens, tokens, size, min(size, 128), deterministic=deterministic)
    packed = replace(case, ends_q=(), ends_k=())
    made, options = packed.tensors(torch.float16), packed.options()
    for name, values in zip(("cu_seqlens_q", "cu_seqlens_k"), sums, strict=True):
        options[name] = torch.tensor(values, dtype=torch.int32, device=DEVICE) * unit
    got = launch(made, options)
    assert_right(got, made, options)
    if deterministic:
        again = launch(made, options)
        assert all(torch.equal(x, y) for x, y in zip(got, again, strict=True))


@gpu
def test_any_prefix_sums_end():
    """Kernels that wait for each other for ever take the GPU from the process."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    ran = subprocess.run(
        [*command, __file__, "-k", "test_any_prefix_sums and not end"],
        cwd=Path(__file__).parents[3],
        env=dict(os.environ, ALONE="1"),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]
    assert f"{len(KINDS) * len(SUMS)} passed" in ran.stdout, ran.stdout[-2000:]


@kernels
@pytest.mark.parametrize("size", [32, pytest.param(128, marks=gpu)])
def test_neighbours_do_not_leak(size, path):
    """What a sequence reads of the next one's rows, infinities even, must count for nothing."""
    case = Case(1, 2, 1, 190, 190, size, size, ends_q=(90, 190), ends_k=(70, 190))
    if ON_GPU:
        case = Case(1, 2, 1, 790, 790, size, size, ends_q=(390, 790), ends_k=(290, 790))
    made, options = case.tensors(torch.float16), case.options()
    hostile, ends = {name: x.clone() for name, x in made.items()}, (case.ends_q[0], case.ends_k[0])
    for name, end in (("q", ends[0]), ("k", ends[1]), ("v", ends[1])):
        hostile[name][end:] = float("inf")
    assert_right(launch(hostile, options), made, options, ends)


@gpu
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("size", [64, 96, 128, 192, 256])
def test_same_bits_when_deterministic(size, causal, path):
    """Of 16 and 32 tiles of keys; where all of them see all queries, they come at once."""
    case = Case(2, 4, 2, 2000, 2000, size, 128 if size == 192 else size, causal)
    made, options = case.tensors(torch.bfloat16), case.options()
    runs = [launch(made, options | dict(deterministic=True)) for _ in range(5)]
    torch.use_deterministic_algorithms(True)
    try:
        runs.append(launch(made, options))
    finally:
        torch.use_deterministic_algorithms(False)
    for run in runs[1:]:
        assert all(torch.equal(x, y) for x, y in zip(run, runs[0], strict=True))


@gpu
@pytest.mark.parametrize("ends", [None, (300, 1001, 1001, 1500)], ids=["dense", "packed"])
@pytest.mark.parametrize("size", [64, 128, 256])
def test_a_forward_gives_the_same_bits(size, ends):
    """Whichever program takes a tile."""
    case = Case(3, 4, 2, 1500, 1500, size, size, ends_q=ends, ends_k=ends)
    made, options = case.tensors(torch.bfloat16), case.options()
    runs = [fused_forward(made, options) for _ in range(3)]
    for run in runs[1:]:
        assert all(torch.equal(x, y) for x, y in zip(run, runs[0], strict=True))


@gpu
@pytest.mark.parametrize("size", [32, 128])
def test_a_graph_replays_with_other_lengths(size, path):
    case = Case(1, 4, 2, 900, 900, size, size, ends_q=(300, 600, 900), ends_k=(300, 600, 900))
    made, options = case.tensors(torch.bfloat16), case.options()
    launch(made, options)
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        replayed = launch(made, options)
    for ends_q, ends_k in (((0, 5, 890), (1, 400, 900)), ((899, 900, 900), (500, 500, 600))):
        options["cu_seqlens_q"][1:] = torch.tensor(ends_q, dtype=torch.int32)
        options["cu_seqlens_k"][1:] = torch.tensor(ends_k, dtype=torch.int32)
        for name, each in case.tensors(torch.bfloat16).items():
            made[name].copy_(each)
        graph.replay()
        assert_right(replayed, made, options)


@gpu
@pytest.mark.large
@pytest.mark.parametrize("size", [32, 128])
def test_offsets_past_two_to_the_31(size, path):
    far = 2**31 + 4096
    if torch.cuda.get_device_properties(DEVICE).total_memory < 40 * 2**30:
        pytest.skip("needs 40 GB")
    case = Case(1, 2, 2, 200, 330, size, size)
    made, options = case.tensors(torch.bfloat16), case.options()
    apart = dict(made)
    for name in ("q", "k", "v", "grad_o"):
        n = made[name].shape[2]
        store = torch.empty(far + n * size, dtype=torch.bfloat16, device=DEVICE)
        apart[name] = store.as_strided((1, 2, n, size), (1 << 12, far, size, 1))
        apart[name].copy_(made[name])
    assert_right(launch(apart, options), made, options)


@pytest.mark.skipif(INTERPRETED, reason="runs the interpreter itself")
def test_under_the_interpreter():
    pytest.importorskip("triton")
    environment = dict(os.environ, TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    ran = subprocess.run(
        [*command, __file__],
        cwd=Path(__file__).parents[3],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]
    assert " passed" in ran.stdout, ran.stdout[-2000:]
