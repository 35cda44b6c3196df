# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The gated delta rule's CUDA kernels: graphs, grids and pools beyond 32 bits.  Without a GPU the
tests of FILES run on the kernels under Triton's interpreter, in a process of their own; kernels for
Hopper, which it does not know, are compiled."""

from __future__ import annotations

import pytest
import torch
from custom.dispatch.reference.delta_rule import fused_sigmoid_gating_delta_rule_update as reference

import custom

from ...support import interpreted
from ...support.accuracy import assert_close_to_float64
from ...support.delta_rule import Sequences, Step, moved
from ...support.kernels import INTERPRETED, capturing, gpu, hopper

pytest.importorskip("triton")

from custom.cuda_ops.delta_rule import chunk_gated_delta_rule as chunk
from custom.cuda_ops.delta_rule import chunk_gated_delta_rule_grad as chunk_grad
from custom.cuda_ops.delta_rule import chunk_kda as kda
from custom.cuda_ops.delta_rule import chunk_kda_grad as kda_grad
from custom.cuda_ops.delta_rule import fused_sigmoid_gating_delta_rule_update as decode

from ...support.compile_for_hopper import stand_in
from ...support.kda import BOUNDED, GIVEN
from ...support.kda import Case as Kimi

FILES = (
    "ops/delta_rule/test_fused_sigmoid_gating_delta_rule_update.py",
    "ops/delta_rule/test_chunk_gated_delta_rule.py",
    "ops/delta_rule/test_chunk_gated_delta_rule_grad.py",
    "ops/delta_rule/test_chunk_kda.py",
    "ops/delta_rule/test_chunk_kda_grad.py",
    "ops/convolution/test_causal_conv1d.py",
    "ops/convolution/test_causal_conv1d_update.py",
    "ops/delta_rule/test_gated_delta_layer_decode.py",
    "ops/delta_rule/test_gated_rms_norm.py",
    "ops/indexer/test_indexer_loss.py",
    "ops/indexer/test_sparse_lightning_indexer_grad_kl_loss.py",
    "ops/merging/test_merging.py",
    "contracts/test_large.py",
    "ops/convolution/test_fused_causal_conv1d.py",
    "ops/delta_rule/test_recurrent_gated_delta_rule.py",
    "ops/prolog/test_mla_prolog_pto.py",
    "ops/prolog/test_indexer_prolog_pto.py",
)


@pytest.mark.skipif(INTERPRETED, reason="runs the interpreter itself")
@pytest.mark.parametrize("file", FILES)
def test_under_the_interpreter(file):
    """float16 only: the kernels' float32 paths differ in nothing but the conversion."""
    chosen = "cpu and not bfloat16 and not float32 and not float64"
    interpreted.passes(chosen, f"tests/{file}", CUDA_VISIBLE_DEVICES="")


@pytest.mark.skipif(INTERPRETED, reason="kernels are not compiled")
@pytest.mark.parametrize(
    "case, dtype",
    [
        (
            Sequences((9,), Dk=64, Dv=64, state=None, gates=False, without=("actual_seq_lengths",)),
            torch.float16,
        ),
        (Sequences((9, 70), Dk=128, Dv=64, state=torch.bfloat16, rates=2), torch.bfloat16),
    ],
    ids=["least", "most"],
)
def test_kernels_for_hopper_compile(case, dtype, monkeypatch):
    """Every branch of them."""
    compiled = stand_in(monkeypatch)
    monkeypatch.setattr("custom.cuda_ops.common.gpu.capability", lambda device: (9, 0))
    chunk.forward(**case.moved(case.arguments(), dtype, "cpu"))
    assert [kernel.name for kernel in compiled] == ["_prepare", "_walk"]


@pytest.mark.skipif(INTERPRETED, reason="kernels are not compiled")
@pytest.mark.parametrize(
    "case",
    [
        Step(layout="vk"),
        Step(B=1, T=4, lengths=(2, 1), kda=True, steps=2, rows=(0, 1)),
        Step(B=1, T=4, lengths=(2, 1), layout="vk", parents=((-1, 0), (-1, 0))),
    ],
    ids=["one token", "packed", "packed tree"],
)
def test_kernels_of_a_decode_compile(case, monkeypatch):
    """The interpreter does not know that a variable of a kernel keeps its type."""
    compiled = stand_in(monkeypatch)
    decode.forward(**moved(case.arguments(), torch.bfloat16, case, "cpu"))
    assert len(compiled) == 1


@pytest.mark.skipif(INTERPRETED, reason="kernels are not compiled")
def test_kernels_of_chunks_compile(monkeypatch):
    """Those of any GPU, of the op and its gradient, with lengths in 64 bits."""
    compiled = stand_in(monkeypatch)
    monkeypatch.setattr("custom.cuda_ops.common.gpu.capability", lambda device: (8, 0))
    case = Sequences((9, 70), Dk=32, Dv=32)
    x = case.moved(case.arguments(), torch.bfloat16, "cpu")
    x["actual_seq_lengths"] = x["actual_seq_lengths"].long()
    chunk.forward(**x)
    chunk_grad.backward(**x, d_out=x["value"], d_final_state=x["initial_state"])
    assert len(compiled) == 7


@pytest.mark.skipif(INTERPRETED, reason="kernels are not compiled")
@pytest.mark.parametrize("size, kib", [(128, 99), (256, 163)])
def test_chunks_fit(size, kib, monkeypatch):
    compiled = stand_in(monkeypatch, 89)
    monkeypatch.setattr("custom.cuda_ops.common.gpu.capability", lambda device: (8, 9))
    monkeypatch.setattr("custom.cuda_ops.common.gpu.shared_memory", lambda device: kib * 1024)
    case = Sequences((9, 70), Dk=size, Dv=size)
    x = case.moved(case.arguments(), torch.bfloat16, "cpu")
    assert chunk.unsupported(**x) is None
    chunk.forward(**x)
    chunk_grad.backward(**x, d_out=x["value"], d_final_state=x["initial_state"])
    assert len(compiled) == 7
    assert max(kernel.metadata.shared for kernel in compiled) <= kib * 1024


@pytest.mark.skipif(INTERPRETED, reason="kernels are not compiled")
@pytest.mark.parametrize(
    "case, capability, kib",
    [
        (
            Kimi((70,), packed=False, H=1, HV=2, K=24, V=40, gate=GIVEN, state=None, norm=False),
            90,
            227,
        ),
        (Kimi((9, 70), H=1, HV=1, K=128, V=128, gate=BOUNDED, state=torch.bfloat16), 89, 99),
        (Kimi((9, 70), H=1, HV=1, K=128, V=128), 90, 227),
    ],
    ids=["least", "most, 99 KiB", "most, 227 KiB"],
)
def test_kernels_of_kda_compile_and_fit(case, capability, kib, monkeypatch):
    """Every branch of them; in 99 KiB, and with a third stage where there is memory."""
    compiled = stand_in(monkeypatch, capability)
    monkeypatch.setattr("custom.cuda_ops.common.gpu.shared_memory", lambda device: kib * 1024)
    x = case.moved(case.arguments(), torch.bfloat16, "cpu")
    kda.forward(**x)
    kda_grad.backward(**x, d_out=x["v"], d_final_state=x["initial_state"])
    names = [
        "_chunks_kernel",
        "_states_kernel",
        "_chunks_kernel",
        "_walks_kernel",
        "_inputs_kernel",
    ]
    if case.norm:
        names += ["_norms_kernel", "_sums_kernel"]
    assert [kernel.name for kernel in compiled] == names
    assert max(kernel.metadata.shared for kernel in compiled) <= kib * 1024


@pytest.mark.skipif(INTERPRETED, reason="kernels are not compiled")
@pytest.mark.parametrize(
    "case",
    [
        Kimi((9, 70), H=1, HV=1, K=128, V=128),
        Kimi((70,), packed=False, H=1, HV=2, K=128, V=128, gate=GIVEN, norm=False),
        Kimi((9, 70), H=1, HV=1, K=128, V=128, gate=BOUNDED, bias=False, rates=2),
    ],
    ids=["softplus", "given", "bounded"],
)
def test_chunks_of_kda_compile_for_hopper(case, monkeypatch):
    """Of the op and its gradient; three programs share a multiprocessor's 228 KiB."""
    compiled = stand_in(monkeypatch)
    monkeypatch.setattr("custom.cuda_ops.common.gpu.capability", lambda device: (9, 0))
    x = case.moved(case.arguments(), torch.bfloat16, "cpu")
    given = [x[name] for name in ("q", "k", "v", "g", "beta")]
    gates = [x[name] for name in ("A_log", "dt_bias", "lower_bound", "use_gate_in_kernel")]
    for out in (x["v"], None):
        kda.chunks(*given, 0.1, x["cu_seqlens"], case.norm, *gates, 1 + case.rates, out)
    assert [kernel.name for kernel in compiled] == ["_chunks", "_chunks"]
    assert max(kernel.metadata.shared for kernel in compiled) <= (228 // 3 - 1) * 1024


def test_wide_heads_are_refused_where_they_do_not_fit(monkeypatch):
    monkeypatch.setattr("custom.cuda_ops.common.gpu.shared_memory", lambda device: 99 * 1024)
    x = Sequences((9, 70), Dk=256, Dv=256).arguments()
    x = {name: t.bfloat16() if name in ("query", "value") else t for name, t in x.items()}
    reason = chunk.unsupported(**x)
    assert reason and reason == chunk_grad.unsupported(**x)
    assert (
        reason.startswith("no tile of Dk=256 fits into this GPU's 99 KiB") and "128 fits" in reason
    )


@gpu
@pytest.mark.parametrize("layout", ["kv", "vk"])
def test_more_sequences_than_a_grid_is_high(layout):
    """3000 sequences of 32 heads: 96000 programs at the least, past 65535."""
    case = Step(B=3000, H=16, HV=32, K=16, V=16, layout=layout, slots=tuple(range(3000)))
    drawn = case.arguments() | dict(initial_state_source=case.pool(3000))
    x = moved(drawn, torch.float16, case, "cuda")
    some = torch.tensor([0, 1, 2047, 2048, 2999])
    few = drawn | {n: drawn[n][some] for n in ("q", "k", "v", "a", "b", "initial_state_source")}
    few["initial_state_indices"] = torch.arange(len(some))
    plain = moved(few, torch.float16, case, "cpu")
    exact = moved(plain, torch.float64, case, "cpu")
    o = custom.npu_fused_sigmoid_gating_delta_rule_update(**x)
    wanted = reference.forward(**plain), reference.forward(**exact)
    assert_close_to_float64("o", o.cpu()[some], *wanted)
    states = (each["initial_state_source"] for each in (plain, exact))
    assert_close_to_float64("states", x["initial_state_source"].cpu()[some], *states)


@gpu
@pytest.mark.large
@pytest.mark.parametrize("layout", ["kv", "vk"])
def test_pool_of_more_than_two_to_the_31(layout):
    """A slot whose offset needs 64 bits, in a pool of 2**31 numbers and more."""
    slots = 2**31 // (32 * 128 * 128) + 3
    pool = torch.empty(slots, 32, 128, 128, dtype=torch.bfloat16, device="cuda")
    pool[[1, slots - 1]] = torch.randn(2, 32, 128, 128, device="cuda").bfloat16()
    case = Step(B=2, H=16, HV=32, K=128, V=128, layout=layout, slots=(slots - 1, 1))
    small = Step(B=2, H=16, HV=32, K=128, V=128, layout=layout, slots=(1, 0), state=torch.bfloat16)
    x = moved(case.arguments() | dict(initial_state_source=pool[:1]), torch.bfloat16, small, "cuda")
    x.update(initial_state_source=pool)
    y = dict(x, initial_state_source=pool[[1, slots - 1]].clone())
    y["initial_state_indices"] = torch.tensor([1, 0], device="cuda")
    want = custom.npu_fused_sigmoid_gating_delta_rule_update(**y)
    assert torch.equal(custom.npu_fused_sigmoid_gating_delta_rule_update(**x), want)
    assert torch.equal(pool[[1, slots - 1]], y["initial_state_source"])


@gpu
def test_graph_replays_with_other_slots_and_lengths():
    case = Step(B=1, T=6, lengths=(2, 1, 2), slots=(0, 3, 5))
    x = moved(case.arguments(), torch.float16, case, "cuda")
    start = x["initial_state_source"].clone()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        custom.npu_fused_sigmoid_gating_delta_rule_update(**x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        o = custom.npu_fused_sigmoid_gating_delta_rule_update(**x)
    for slots, lengths in [
        ((4, -1, 2), (1, 3, 0)),
        ((1, 2, 3), (0, 0, 6)),
        ((-1, 9, 0), (2, 2, 2)),
    ]:
        x["initial_state_source"].copy_(start)
        x["initial_state_indices"].copy_(torch.tensor(slots))
        x["cu_seqlens"].copy_(torch.tensor([0, *lengths]).cumsum(0))
        y = dict(x, initial_state_source=start.clone())
        graph.replay()
        want = custom.npu_fused_sigmoid_gating_delta_rule_update(**y)
        assert torch.equal(o, want)
        assert torch.equal(x["initial_state_source"], y["initial_state_source"])


def _prompt(lengths: list[int], behind: int = 0) -> dict[str, torch.Tensor]:
    case = Sequences(tuple(lengths), N=2, Nv=4, Dk=128, Dv=128, behind=behind, fading=0.02)
    return case.moved(case.arguments(), torch.bfloat16, "cuda")


@hopper
@pytest.mark.parametrize("lengths", [[4000], [1, 900, 0, 64, 2048, 77]], ids=str)
def test_chunks_of_both_kernels(lengths, monkeypatch):
    """The kernels for Hopper and those for any GPU, over many chunks."""
    x = _prompt(lengths)
    taken: list[bool] = []
    plain = chunk._plain
    monkeypatch.setattr(chunk, "_plain", lambda *args: taken.append(True) or plain(*args))
    out, state = custom.npu_chunk_gated_delta_rule(**x)
    assert not taken
    monkeypatch.setattr(chunk.hopper, "supports", lambda *args: False)
    want, want_state = custom.npu_chunk_gated_delta_rule(**x)
    assert taken
    for got, other in ((out, want), (state, want_state)):
        error = (got.double() - other.double()).norm() / other.double().norm()
        assert error < 2**-7  # each rounds its operands to bfloat16


@hopper
@pytest.mark.parametrize("lengths", [[4000], [1, 900, 0, 64, 2048, 77]], ids=str)
def test_gradients_of_both_kernels(lengths, monkeypatch):
    """The kernels for Hopper and those for any GPU, over many chunks."""
    x = _prompt(lengths, behind=70)
    x["d_out"] = torch.randn_like(x["value"])
    x["d_final_state"] = torch.randn_like(x["initial_state"])
    taken: list[bool] = []
    plain = chunk_grad._plain
    monkeypatch.setattr(chunk_grad, "_plain", lambda *args: taken.append(True) or plain(*args))
    found = chunk_grad.backward(**x)
    assert not taken
    assert all(torch.equal(a, b) for a, b in zip(found, chunk_grad.backward(**x), strict=True))
    monkeypatch.setattr(chunk_grad.hopper, "supports", lambda *args: False)
    wanted = chunk_grad.backward(**x)
    assert taken
    for got, want in zip(found, wanted, strict=True):
        error = (got.double() - want.double()).norm() / want.double().norm()
        assert error < 2**-7  # each rounds its operands to bfloat16


@gpu
@pytest.mark.parametrize("size", [128, 256])
def test_tiles_of_chunks_agree(size, monkeypatch):
    """Stages and columns of a walk follow a GPU's shared memory; no sum does."""
    case = Sequences((300, 70), Dk=size, Dv=size, fading=0.02)
    x = case.moved(case.arguments(), torch.bfloat16, "cuda")
    monkeypatch.setattr("custom.cuda_ops.common.gpu.is_hopper", lambda device: False)

    def run() -> tuple[torch.Tensor, ...]:
        grads = chunk_grad.backward(**x, d_out=x["value"], d_final_state=x["initial_state"])
        return *chunk.forward(**x), *grads

    here = run()
    for shared in (99, 163)[size > 128 :]:
        monkeypatch.setattr(
            "custom.cuda_ops.common.gpu.shared_memory", lambda at, k=shared: k * 1024
        )
        for got, want in zip(run(), here, strict=True):
            error = (got.double() - want.double()).norm() / want.double().norm()
            assert error < 2**-7  # as of kernels that round their operands to bfloat16


@gpu
def test_graph_of_chunks_replays_with_other_lengths():
    x = _prompt([60, 130, 5], behind=5)
    custom.npu_chunk_gated_delta_rule(**x)
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        out, state = custom.npu_chunk_gated_delta_rule(**x)
    for lengths in ([200, 0, 0], [0, 64, 128], [70, 70, 60]):
        x["actual_seq_lengths"].copy_(torch.tensor(lengths))
        graph.replay()
        want, want_state = custom.npu_chunk_gated_delta_rule(**x)
        assert torch.equal(out, want) and torch.equal(state, want_state)


@gpu
def test_graph_of_chunks_gradients_replays_with_other_lengths():
    x = _prompt([60, 130, 5], behind=5)
    x["d_out"] = torch.randn_like(x["value"])
    x["d_final_state"] = torch.randn_like(x["initial_state"])
    op = torch.ops.custom.npu_chunk_gated_delta_rule_grad
    op(**x)
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        grads = op(**x)
    for lengths in ([200, 0, 0], [0, 64, 128], [70, 70, 60], [0, 0, 0]):
        x["actual_seq_lengths"].copy_(torch.tensor(lengths))
        graph.replay()
        for got, want in zip(grads, op(**x), strict=True):
            assert torch.equal(got, want)


@gpu
def test_gradients_of_many_chunks():
    """Packed sequences equal each of them alone, and a long one its two halves."""
    x = _prompt([900, 0, 64, 2048, 77], behind=9)
    x["d_out"] = torch.randn_like(x["value"])
    x["d_final_state"] = torch.randn_like(x["initial_state"])
    op = torch.ops.custom.npu_chunk_gated_delta_rule_grad
    grads, start = op(**x), 0
    tokens = ("query", "key", "value", "beta", "g", "d_out")
    for n, length in enumerate((900, 0, 64, 2048, 77)):
        own = slice(start, start + length)
        alone = x | {name: x[name][own] for name in tokens}
        alone["actual_seq_lengths"] = x["actual_seq_lengths"][n : n + 1]
        alone |= {name: x[name][n : n + 1] for name in ("initial_state", "d_final_state")}
        d_query, d_key, d_value, d_beta, d_state, d_g = op(**alone)
        assert torch.equal(grads[4][n : n + 1], d_state)
        for i, want in zip((0, 1, 2, 3, 5), (d_query, d_key, d_value, d_beta, d_g), strict=True):
            assert torch.equal(grads[i][own], want)
        start += length
    assert not any(grads[i][start:].any() for i in (0, 1, 2, 3, 5))
    # a loss of the second half alone, whose first state's gradient goes on into the first half
    half = 1024
    whole = {name: x[name][964 : 964 + 2 * half] for name in tokens}
    whole |= dict(initial_state=x["initial_state"][:1], d_final_state=x["d_final_state"][:1])
    halves = [{name: whole[name][i * half : (i + 1) * half] for name in tokens} for i in (0, 1)]
    forward = {n: halves[0][n] for n in tokens[:5]} | dict(initial_state=whole["initial_state"])
    _, middle = custom.npu_chunk_gated_delta_rule(**forward)
    late = op(**halves[1], initial_state=middle, d_final_state=whole["d_final_state"])
    early = op(**halves[0], initial_state=whole["initial_state"], d_final_state=late[4])
    for i, got in enumerate(op(**whole)):
        want = early[4] if i == 4 else torch.cat([early[i], late[i]])
        error = (got.double() - want.double()).norm() / want.double().norm()
        assert error < 2**-7  # the states between are rounded to bfloat16 on both ways
