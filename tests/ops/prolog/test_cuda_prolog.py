# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Both prologs and the whole layer on CUDA: every token tile, weight format and rotation against
the reference; graphs, determinism, absent slots.  Without a GPU the same kernels run under Triton's
interpreter, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from custom.cuda_ops.common import tiling

from ...support.accuracy import assert_close_to_float64
from ...support.kernels import DTYPES, INTERPRETED, ON_GPU, capturing, gpu, kernels
from ...support.layer import CACHES, OPS, P, formatted, launch, layer

pytestmark = pytest.mark.usefixtures("processors_of_a_gpu")


def check(op, arguments, dtype, weight_format, **options):
    rounded = {
        name: value.to(dtype).double() if value.is_floating_point() else value
        for name, value in arguments.items()
    }
    cpu = torch.device("cpu")
    exact = launch("reference", op, formatted(rounded, torch.float64, "nd", cpu), "nd", **options)
    plain = launch("reference", op, formatted(rounded, dtype, "nd", cpu), "nd", **options)
    got = launch("cuda", op, formatted(rounded, dtype, weight_format), weight_format, **options)
    for i, parts in enumerate(zip(got, plain, exact, strict=True)):
        if not parts[0].is_floating_point():
            assert torch.equal(parts[0].cpu(), parts[2]), f"{op} output {i}"
        elif parts[0].numel():
            assert_close_to_float64(f"{op} output {i}", *parts)


SMALL = [(1, 1), (3, 2), (0, 2)]
# every token tile; sizes that no tile divides
LARGE = [(1, 1), (5, 2), (25, 1), (37, 1), (17, 4), (130, 1), (2, 150), (0, 1)]


@kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", LARGE if ON_GPU else SMALL, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_matches_the_reference(op, tokens, dtype):
    check(op, layer(*tokens), dtype, "nz")


@kernels
@pytest.mark.parametrize("weight_format", ["flat", "nd", "linear"])
@pytest.mark.parametrize("op", OPS)
def test_reads_every_weight_format(op, weight_format):
    check(op, layer(2, 2), DTYPES[0], weight_format)


@kernels
@pytest.mark.parametrize("weight_format", ["nd", "linear"])
@pytest.mark.parametrize("op", OPS)
def test_row_major_weights_of_any_size(op, weight_format):
    sizes = dict(h=70, ranks=40, plain=24, rank=40, rotary=10, index=(5, 24))
    check(op, layer(3, 1, **sizes), DTYPES[0], weight_format)


@kernels
@pytest.mark.parametrize("op", OPS)
def test_no_rotary_part(op):
    """One token tile of few tokens and, on a GPU, one of many; 96 heads."""
    check(op, layer(2, 2, rotary=0), DTYPES[0], "nz")
    if ON_GPU:
        sizes = dict(h=512, ranks=512, n=96, plain=128, rank=512, rotary=0, index=(32, 128))
        for tokens in ((3, 1), (70, 1), (300, 1)):
            check(op, layer(*tokens, **sizes), DTYPES[0], "nz")


@kernels
@pytest.mark.parametrize("op", ["mla_prolog", "mla_prolog_plain", "indexer_prolog"])
@pytest.mark.parametrize("interleaved", [True, False])
def test_both_rotations(op, interleaved):
    check(op, layer(2, 2), DTYPES[0], "nz", rope_interleaved=interleaved)


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tokens", [(3, 1), (70, 1)], ids=str)
@pytest.mark.parametrize("op", ["mla_prolog", "indexer_prolog"])
def test_rotation_where_a_program_does_a_whole_head(op, tokens, dtype):
    """Enough heads for every multiprocessor: rotated in the product's own launch."""
    sizes = dict(h=512, ranks=512, n=96, plain=128, rank=128, rotary=64, index=(64, 128))
    for interleaved in (True, False):
        check(op, layer(*tokens, **sizes), dtype, "nz", rope_interleaved=interleaved)


@kernels
def test_options_of_the_layer_arrive():
    options = dict(softmax_scale=0.1, rms_norm_eps=0.3, layer_norm_eps=0.2)
    options |= dict(rope_interleaved=False, index_rope_interleaved=True)
    check("sparse_attention", layer(2, 2), DTYPES[0], "nz", **options)


# h, ranks, plain, index heads
DEEPSEEK, GLM5 = (7168, 1536, 128, 64), (6144, 2048, 192, 32)
GLM5_FLASH = (4096, 1536, 256, 32)  # without a rotary part


@gpu
@pytest.mark.parametrize("heads, h", [(32, 2304), (16, 2048), (4, 2304)], ids=str)
@pytest.mark.parametrize("tokens", [(1, 1), (2, 2), (33, 1), (100, 1), (1, 300)], ids=str)
def test_sizes_without_a_query_latent(tokens, heads, h):
    """Kimi-Linear, DeepSeek-V2-Lite, and a shard."""
    sizes = dict(ranks=h, n=heads, plain=128, rank=512, rotary=64, index=(16, 128))
    for form in ("nz", "linear"):
        check("mla_prolog_plain", layer(*tokens, **sizes), torch.bfloat16, form)


@gpu
@pytest.mark.parametrize(
    "model, heads",
    [
        *((DEEPSEEK, n) for n in (8, 128)),
        *((GLM5, n) for n in (8, 16, 32, 64)),
        *((GLM5_FLASH, n) for n in (8, 64)),
    ],
    ids=[
        *("DeepSeek, 1/16", "DeepSeek", "GLM-5, 1/8", "GLM-5, 1/4", "GLM-5, 1/2", "GLM-5"),
        *("GLM-5.3-Flash, 1/8", "GLM-5.3-Flash"),
    ],
)
@pytest.mark.parametrize("tokens", [(2, 2), (20, 1), (33, 1), (100, 1), (75, 2), (1, 300)], ids=str)
def test_sizes_of_the_models_and_their_shards(tokens, model, heads):
    h, ranks, plain, index = model
    rotary = 0 if model is GLM5_FLASH else 64
    sizes = dict(h=h, ranks=ranks, n=heads, plain=plain, rank=512, rotary=rotary)
    given = layer(*tokens, **sizes, index=(index, 128))
    for op in OPS:
        check(op, given, torch.bfloat16, "nz")


@pytest.mark.parametrize("tokens", [1, 8, 9, 32, 33, 64, 65, 128, 129, 4096])
@pytest.mark.parametrize(
    "sizes",
    [
        *[(1536, 576, 128, 64), (24576,), (8192,), (3072,), (128, 64)],
        *[(2048, 576, 128, 32), (16384,), (4096,), (2048,), (128, 32)],  # GLM-5 and its shards
    ],
)
@pytest.mark.parametrize("depth", [48, 1536, 2048, 6144, 7168])
@pytest.mark.parametrize("num_sms", [78, 132], ids=["H20", "H200"])
def test_tilings_fit_a_multiprocessor(tokens, sizes, depth, num_sms):
    cut = tiling.hopper(tokens, sizes, depth, num_sms)
    assert cut.stages * (cut.tokens + cut.columns) * cut.k * 2 <= 200 * 1024
    assert 2 <= cut.stages <= 16 and cut.warps in (4, 8)
    assert 1 <= cut.runs <= max(1, depth // cut.k)
    assert cut.columns % (16 * cut.warps) == 0  # whole warpgroups, 64 columns each
    assert cut.tokens >= min(tokens, 256)
    cut = tiling.whole_depth(tokens, sizes, depth, num_sms) if len(sizes) == 1 else None
    if cut is not None:
        assert cut.runs == 1 and all(size % cut.columns == 0 for size in sizes)
        assert cut.stages >= 2 and cut.stages * (cut.tokens + cut.columns) * cut.k * 2 <= 200 * 1024
        assert cut.stages * cut.k % cut.columns == 0  # where the product lies before it is rotated
    cut = tiling.hopper_quantized(tokens, sizes, depth, num_sms)
    assert cut.stages * (cut.tokens + cut.columns) * 128 <= 220 * 1024 and cut.stages >= 2
    assert 128 % cut.columns == 0  # one scale
    assert (cut.columns if cut.swap else cut.tokens) == 16 * cut.warps


@pytest.mark.skipif(INTERPRETED, reason="kernels are not compiled")
@pytest.mark.parametrize("tokens", [2, 200, 300])
@pytest.mark.parametrize(
    "model, heads",
    [(DEEPSEEK, 128), (GLM5, 64), (GLM5, 8), (GLM5_FLASH, 64)],
    ids=["DeepSeek", "GLM-5", "its shard", "GLM-5.3-Flash"],
)
def test_kernels_for_hopper_compile(tokens, model, heads, monkeypatch):
    """The second half of both prologs, at sizes of the models."""
    pytest.importorskip("triton")
    from custom.cuda_ops.prolog import stages

    from ...support.compile_for_hopper import stand_in

    compiled = stand_in(monkeypatch)
    monkeypatch.setattr("custom.cuda_ops.common.gpu.capability", lambda device: (9, 0))
    monkeypatch.setattr("custom.cuda_ops.common.gpu.num_sms", lambda device: 132)

    def empty(*shape):
        return torch.empty(shape, dtype=torch.bfloat16)

    _h, ranks, plain, index = model
    rotary = 0 if model is GLM5_FLASH else 64
    c, sin, cos = empty(tokens, ranks), empty(tokens, rotary), empty(tokens, rotary)
    uq_qr = empty(heads * (plain + rotary) // 16, ranks // 16, 16, 16)
    qb = empty(index * 128 // 16, ranks // 16, 16, 16)
    stages.index_heads(c, qb, "nz", 128, sin, cos, (tokens, 1), False)
    stages.query_heads(c, uq_qr, "nz", empty(heads, plain, 512), sin, cos, (tokens, 1), True)
    wanted = (
        ["_product", "_query"]
        if tokens <= 256
        else ["_product", "_product", "_absorb", "_rotation"]
    )
    if model is not DEEPSEEK:  # a head is no whole number of columns, and there are few index heads
        wanted = ["_product", "_rotation", "_product", "_query_stage"]
    assert [kernel.name for kernel in compiled] == wanted
    assert all(kernel.metadata.shared <= 227 * 1024 for kernel in compiled)


@kernels
@pytest.mark.parametrize("op", OPS)
def test_absent_slots_are_skipped(op):
    """Slots that are negative or past the caches: nothing is written, everything else is."""
    given = layer(3, 2)
    given["cache_index"].view(-1)[1:4] = torch.tensor([-1, len(given["kv_cache"]) * P, 2**31 - 1])
    check(op, given, DTYPES[0], "nz")


@kernels
@pytest.mark.parametrize("integers", [torch.int32, torch.int64], ids=str)
def test_integer_types(integers):
    given = layer(2, 1)
    for name in ("cache_index", "block_table", "act_seqs"):
        given[name] = given[name].to(integers)
    for op in OPS:
        check(op, given, DTYPES[0], "nz")


@gpu
@pytest.mark.parametrize("tokens", [(1, 1), (9, 2), (128, 1)], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_same_bits_every_time(op, tokens):
    given = formatted(layer(*tokens, h=2048, ranks=512), torch.bfloat16, "nz")
    kept = {name: given[name].clone() for name in CACHES}
    results = []
    for _ in range(4):
        for name in CACHES:
            given[name].copy_(kept[name])
        results.append([out.clone() for out in launch("cuda", op, given)])
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            assert torch.equal(one, two)


@gpu
@pytest.mark.parametrize("op", OPS)
def test_a_graph_replays_with_other_inputs(op):
    """Captured with one set of lengths, tables, slots and tokens; replayed with two others."""
    sizes = dict(h=512, ranks=256, n=16, pages=5)
    given = formatted(layer(7, 2, **sizes), torch.bfloat16, "nz")
    launch("cuda", op, given)
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        replayed = launch("cuda", op, given)
    names = [name for name in given if not name.startswith(("w_", "gamma", "in_"))]
    for _ in range(2):
        fresh = formatted(layer(7, 2, **sizes), torch.bfloat16, "nz")
        fresh = {name: fresh[name] if name in names else given[name] for name in given}
        fresh["act_seqs"][0] = 2
        for name in names:
            given[name].copy_(fresh[name])
        graph.replay()
        for one, two in zip(replayed, launch("cuda", op, fresh), strict=True):
            assert torch.equal(one, two)


@gpu
def test_calls_follow_each_other_without_waiting():
    """Launches overlap their predecessors; many calls in a row must still not mix their scratch."""
    given = [formatted(layer(4, 1, h=2048, ranks=512), torch.bfloat16, "nz") for _ in range(3)]
    alone = []
    for each in given:
        alone.append([out.clone() for out in launch("cuda", "sparse_attention", each)])
        torch.cuda.synchronize()
    for _ in range(5):
        together = [launch("cuda", "sparse_attention", each) for each in given]
        for one, two in zip(alone, together, strict=True):
            for left, right in zip(one, two, strict=True):
                assert torch.equal(left, right)


@pytest.mark.skipif(INTERPRETED, reason="runs the interpreter itself")
def test_under_the_interpreter():
    pytest.importorskip("triton")
    environment = dict(os.environ, TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")
    root = Path(__file__).parents[3]
    ran = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            __file__,
        ],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0 and "passed" in ran.stdout, ran.stdout[-4000:] + ran.stderr[-2000:]
