# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Capture and replay, warm-up, and what a compiled graph holds."""

from __future__ import annotations

import copy
import importlib.util
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from custom.dispatch.register import compile_kernels, overload
from custom.dispatch.registry import BY_NAME, SPECS
from custom.graph_mode import capture, torchair, warmup
from custom.graph_mode.capture import Captured, _Compilers, _KeepWritten, _no_synchronisation
from torch import Tensor
from torch._inductor.utils import run_and_get_code

import custom

from ..support.calls import CPU, every_spec, everything, mutated, other, tensors, two_of
from ..support.decode_step import DecodeStep, steps
from ..support.npu_graph import stand_in
from ..support.samples import sample


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_replay_with_other_values_and_lengths(spec, device, backend):
    if device.type == "cpu":
        pytest.skip("a CPU has no graphs")
    first, second = sample(spec.name, device, torch.bfloat16), other(spec, device, torch.bfloat16)
    names = list(tensors(first))
    constants = {name: value for name, value in first.items() if name not in names}

    def call(*values: Tensor):
        return overload(spec)(**dict(zip(names, values, strict=True)), **constants)

    before = copy.deepcopy(first)
    with torch.no_grad():
        captured = capture(call, *(first[name] for name in names))
        for name in names:  # warm-up and capture have left every argument as it was
            torch.testing.assert_close(first[name], before[name], rtol=0, atol=0)
        for arguments in (second, before, second):
            fresh = copy.deepcopy(arguments)
            out = captured(*(fresh[name] for name in names))
            got = [*((out,) if isinstance(out, Tensor) else out or ())]
            got += [first[name] for name in mutated(spec) if name in first]
            wanted = everything(spec, overload(spec), arguments)
            for a, b in zip(got, wanted, strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def _branches(x: Tensor) -> Tensor:
    return x if x.sum() > 0 else -x


WAITING = {
    "item": lambda x: x * x.sum().item(),
    "tolist": lambda x: x * x.tolist()[0],
    "cpu": lambda x: x + x.cpu().to(x.device),
    "branch": _branches,
    "mask": lambda x: x[x > 0],
    "print": lambda x: x * len(str(x)),
}


@pytest.mark.parametrize("warmup", [1, 2])
@pytest.mark.parametrize("what", list(WAITING))
def test_capture_refuses_a_function_that_waits(what, warmup, device):
    """In a warm-up call or in the capture itself; the next capture works."""
    if device.type == "cpu":
        pytest.skip("a CPU has no graphs")
    x = torch.ones(2, device=device)

    def waits(x: Tensor) -> Tensor:
        x += 1
        return WAITING[what](x)

    with pytest.raises(RuntimeError, match="capture: the function waits for the device"):
        capture(waits, x, warmup=warmup)
    assert x.tolist() == [1, 1]  # what it wrote is undone
    assert capture(torch.neg, x)(x).tolist() == [-1, -1]


@pytest.mark.parametrize(
    "what", ["item", "branch", "mask", "print", "set", "add", "where", "inverse"]
)
def test_a_warm_up_refuses_what_waits(what):
    """Before it does; on a CPU, whose tensors stand for a device's."""
    waits = WAITING | {
        "set": lambda x: x.__setitem__(x > 0, torch.ones(2)),
        "add": lambda x: x.index_put_((x > 0,), torch.tensor(2.0), accumulate=True),
        "where": torch.nonzero,
        "inverse": lambda x: torch.linalg.inv(x.diag()),
    }
    said = pytest.raises(RuntimeError, match="capture: the function waits for the device")
    with said, _no_synchronisation("cpu"):
        waits[what](torch.ones(2))


@pytest.mark.parametrize("what", ["to", "copy_", "tensor", "new_tensor", "default", "index"])
def test_a_warm_up_refuses_copies_from_the_host(what):
    """The meta device stands for one of which the host is apart."""
    device, x, there = torch.device("meta"), torch.ones(2), torch.ones(2, device="meta")

    def default():
        with device:
            torch.tensor([1.0])

    copies = {
        "to": lambda: x.to(device),
        "copy_": lambda: there.copy_(x),
        "tensor": lambda: torch.tensor([1.0], device=device),
        "new_tensor": lambda: there.new_tensor([1.0]),
        "default": default,
        "index": lambda: there[torch.tensor([1])],
    }
    said = pytest.raises(RuntimeError, match="capture: the function waits for the device")
    with said, _no_synchronisation("meta"):
        copies[what]()


def test_a_warm_up_takes_what_does_not_wait():
    x, there = torch.ones(2), torch.ones(2, device="meta")
    with _no_synchronisation("meta"):
        there.copy_(x, non_blocking=True)
        x.to("meta", non_blocking=True)
        x[x > x.sum().item()] = torch.tensor(1.0)
        str(x)
        torch.as_tensor(there)
        there[torch.ones(1, dtype=torch.long, device="meta")] *= 2
        torch.repeat_interleave(there, there.long(), output_size=2)
        there.index_put_((there > 0,), x[0])  # as x[mask] = 0 is on CUDA


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_warm_up_takes_what_counts_on_the_host(mode):
    """Under inference mode the mode sees operators whole that are others' sum elsewhere."""
    with mode(), _no_synchronisation("meta"):
        there = torch.ones(2, 2, device="meta")
        assert there.repeat_interleave(2, dim=1).shape == (2, 4)
        assert torch.nn.functional.one_hot(there.long(), 3).shape == (2, 2, 3)


def test_other_threads_may_wait_during_a_capture(monkeypatch):
    """The debug mode of torch would be that of the process; two captures at once left it on."""
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", None)
    nested = (_no_synchronisation("cpu"), _no_synchronisation("cpu"))
    with ThreadPoolExecutor(1) as another, nested[0], nested[1]:
        assert another.submit(torch.ones(2).tolist).result() == [1, 1]
        assert another.submit(lambda: torch.ones(2).sum().item()).result() == 2


def test_other_threads_wait_while_captures_run(device):
    if device.type != "cuda":
        pytest.skip("needs a GPU")
    stop, begun = threading.Event(), threading.Barrier(3)

    def serve():
        with torch.cuda.stream(torch.cuda.Stream(device)):
            x = torch.ones(4, device=device)
            begun.wait(60)
            while not stop.is_set():
                assert x.sum().item() == 4

    def record():
        begun.wait(60)
        for _ in range(3):
            x = torch.ones(4, device=device)
            assert capture(lambda x: (time.sleep(0.02), x * 2)[1], x)(x).tolist() == [2] * 4

    with ThreadPoolExecutor(3) as pool:
        server, *recorders = [pool.submit(each) for each in (serve, record, record)]
        try:
            for each in recorders:
                each.result(timeout=120)
        finally:
            stop.set()
        server.result(timeout=120)
    assert torch.cuda.get_sync_debug_mode() == 0


def pooled(kind: str) -> list[Tensor]:
    """Tensors in one allocation of zeros, as caches are cut."""
    pool = torch.zeros(4, 8)
    return {
        "rows": lambda: [pool[0], pool[1]],
        "turns": lambda: [pool[:, :4], pool[:, 4:]],
        "overlapping": lambda: [pool[:3], pool[1:]],
        "twice": lambda: [pool, pool],
        "expanded": lambda: [pool[0], pool[0, :1].expand(8)],
        "alias": lambda: [pool, torch.from_dlpack(pool[1:])],
    }[kind]()


@pytest.mark.parametrize("kind", ["rows", "turns", "overlapping", "twice", "expanded", "alias"])
def test_every_cache_of_a_pool_is_as_it_was_before_the_warm_up(kind):
    first, second = pooled(kind)
    keep = _KeepWritten([first, second])
    with keep:
        first.add_(1)
        if kind != "expanded":
            second.add_(1)
        first[:1].zero_()
    assert first.any()
    keep.restore()
    assert not first.any() and not second.any()


def test_only_what_is_written_is_kept():
    first, second = pooled("rows")
    keep = _KeepWritten([first, second])
    with keep:
        first.add_(1)
    assert [tensor is first for tensor, _ in keep._kept] == [True]


class _Norm(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(2)
        self.scale = torch.nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.scale *= 2
        return self.norm(x) * self.scale


@pytest.mark.parametrize("method", [False, True])
def test_what_a_module_holds_is_as_it_was_before_the_warm_up(method, monkeypatch):
    stand_in(monkeypatch)
    module = _Norm()
    before = copy.deepcopy(module.state_dict())
    x = torch.arange(4.0).view(2, 2)
    captured = capture(module.forward if method else module, x)
    torch.testing.assert_close(module.state_dict(), before, rtol=0, atol=0)
    captured(x)
    assert module.scale.item() == 2 and module.norm.num_batches_tracked == 1


@pytest.mark.parametrize("kind", ["lazy", "sparse"])
def test_a_module_may_hold_parameters_without_memory(kind, monkeypatch):
    stand_in(monkeypatch)
    module = torch.nn.LazyLinear(3) if kind == "lazy" else torch.nn.Linear(2, 3)
    module.rows = torch.nn.Parameter(torch.eye(2).to_sparse()) if kind == "sparse" else None
    x = torch.ones(2, 2)
    with torch.no_grad():
        assert torch.equal(capture(module, x)(x), module(x))


def buffers_of(f, *inputs):
    """A capture's stand-in on a CPU: what replays computes from the buffers."""
    out = torch.zeros_like(f(*inputs))
    return Captured(SimpleNamespace(replay=lambda: out.copy_(f(*inputs))), inputs, out)


def test_one_tensor_captured_twice_is_not_two():
    x, a, b = (torch.full((2,), value) for value in (0.0, 1.0, 2.0))
    captured = buffers_of(lambda p, q: 10 * p + q, x, x)
    for wrong in ((a, b), (x, b), (b, x), (a, a.clone())):
        with pytest.raises(ValueError, match="capture: arguments 0 and 1 overlapped in memory"):
            captured(*wrong)
    assert not x.any()
    assert captured(b, b).tolist() == [22, 22] and captured(x, x).tolist() == [22, 22]
    assert captured(a, a[:]).tolist() == [11, 11]


def test_overlapping_buffers_take_what_overlaps_alike():
    x, a = torch.zeros(4), torch.arange(4.0)
    captured = buffers_of(lambda p, q: 10 * p[0] + q, [x[:3]], x[1:])
    assert captured([a[:3]], a[1:]).tolist() == [1, 12, 23]
    for wrong in ((a[1:], a[:3]), (a[:3], a[1:].clone()), (x[:3], a[1:]), (a[:3], x[1:])):
        with pytest.raises(ValueError, match="capture: arguments 0 and 1 overlapped in memory"):
            captured([wrong[0]], wrong[1])
    assert x.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("alias", [lambda x: x, torch.from_dlpack], ids=["view", "alias"])
def test_values_that_lie_in_buffers_are_read_before_these_are_filled(alias):
    pool = torch.tensor([1.0, 2.0, 3.0])
    x, y = pool[:1], pool[1:2]
    captured = buffers_of(lambda p, q: 10 * p + q, x, y)
    assert captured(alias(y), alias(x)).tolist() == [21]
    assert pool.tolist() == [2, 1, 3]
    assert captured(pool[1:2], alias(pool[2:])).tolist() == [13]


def test_numbers_of_another_type_are_another_value():
    captured = buffers_of(lambda x, k: x * k, torch.ones(2, dtype=torch.int64), 1)
    for other_type in (True, 1.0):
        with pytest.raises(ValueError, match="Only tensors may change"):
            captured(torch.ones(2, dtype=torch.int64), other_type)


class _OnNpu(Tensor):
    device = SimpleNamespace(type="npu", index=0)


@pytest.mark.parametrize("fails", [1, 2])
def test_what_a_failing_warm_up_wrote_is_undone_behind_it(fails, monkeypatch):
    """On stand-ins for a device and its streams: the order of what is asked of them."""
    order = []

    class Stream:
        def __init__(self, name="side"):
            self.name = name

        def wait_stream(self, other):
            order.append(f"{self.name} waits for {other.name}")

    main = Stream("main")
    npu = SimpleNamespace(
        Stream=Stream, current_stream=lambda: main, stream=nullcontext, current_device=lambda: 0
    )
    monkeypatch.setattr(torch, "npu", npu, raising=False)

    def writes(x):
        x += 1
        order.append("writes")
        if order.count("writes") == fails:
            raise ArithmeticError("a test's")

    x = torch.zeros(2).as_subclass(_OnNpu)
    copy_ = Tensor.copy_
    monkeypatch.setattr(
        _OnNpu, "copy_", lambda self, other: order.append("undone") or copy_(self, other), False
    )
    with pytest.raises(ArithmeticError):
        capture(writes, x)
    assert order == ["side waits for main", *["writes"] * fails, "main waits for side", "undone"]
    assert x.tolist() == [0, 0]


SYNCHRONISES = """
import torch, custom
def step(x):
    torch.cuda.synchronize()
    return x + 1
try:
    custom.graph_mode.capture(step, torch.ones(2, device="cuda"))
except RuntimeError as error:
    print(error)
"""


def test_capture_refuses_synchronize(device):
    """In a process of its own: torch checks this too late to end the capture in good order."""
    if device.type != "cuda":
        pytest.skip("needs a GPU")
    done = subprocess.run(
        [sys.executable, "-c", SYNCHRONISES],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert "capture: the function waits for the device" in done.stdout, done.stderr[-2000:]


def test_two_caches_of_one_pool_on_a_device(device):
    if device.type == "cpu":
        pytest.skip("a CPU has no graphs")
    pool = torch.zeros(2, 64, device=device)
    x, y = torch.ones(2, 64, device=device)
    captured = capture(lambda a, b, x, y: (a.add_(x), b.add_(y)), *pool, x, y)
    assert not pool.any()
    captured(*pool, 2 * x, 3 * y)
    assert pool.mean(1).tolist() == [2, 3]


def test_capture_on_every_device(device):
    places = two_of(device)
    double = [capture(torch.add, *[torch.ones(3, device=place)] * 2) for place in places]
    for number, (place, replayed) in enumerate(zip(places, double, strict=True)):
        x = torch.full((3,), 1.0 + number, device=place)
        assert replayed(x, x).tolist() == [2.0 + 2 * number] * 3


class _OnNextNpu(Tensor):
    device = SimpleNamespace(type="npu", index=1)


@pytest.mark.parametrize("another", [_OnNextNpu, Tensor], ids=["npu:1", "cpu"])
def test_capture_refuses_arguments_on_several_devices(another):
    """No graph would see the values of the second."""
    first, second = torch.ones(2).as_subclass(_OnNpu), torch.ones(2).as_subclass(another)
    with pytest.raises(
        ValueError, match=r"capture: argument 1 is on .* a graph records one device"
    ):
        capture(lambda x, many: x * many[0], first, [second])


def test_a_warm_up_refuses_what_runs_on_another_device(monkeypatch):
    """No graph would hold it: replays would give what it gave once."""
    npu = SimpleNamespace(
        Stream=lambda: SimpleNamespace(wait_stream=lambda other: None),
        current_stream=lambda: SimpleNamespace(wait_stream=lambda other: None),
        stream=nullcontext,
        current_device=lambda: 0,
    )
    monkeypatch.setattr(torch, "npu", npu, raising=False)
    state = torch.ones(2).as_subclass(_OnNextNpu)
    with pytest.raises(ValueError, match=r"capture: the function calls aten.mul.* one device"):
        capture(lambda x: (x + 1, state * 2), torch.ones(2).as_subclass(_OnNpu))


def test_capture_refuses_another_gpu(device):
    x, y = (torch.ones(3, device=place) for place in two_of(device))
    for call, given in (
        (lambda x, y: (x + 1, y + 1), (x, y)),
        (lambda x: (x + 1, y + 1), (x,)),
        (lambda x: (x + 1, torch.ones(3, device=y.device)), (x,)),
        (lambda x: x.to(y.device, non_blocking=True), (x,)),
    ):
        with pytest.raises(ValueError, match="a graph records one device"):
            capture(call, *given)
    assert capture(torch.neg, y)(2 * y).tolist() == [-2] * 3


def test_capture_refuses_a_cpu():
    with pytest.raises(custom.NotSupported, match="expected cuda or npu"):
        capture(torch.neg, torch.ones(2))


def test_capture_of_a_decode_step_serves_every_length(device):
    if device.type == "cpu":
        pytest.skip("a CPU has no graphs")
    model = DecodeStep(device, torch.bfloat16)
    eager = copy.deepcopy(model)
    calls = steps(device)
    with torch.no_grad():
        captured = capture(model, *copy.deepcopy(calls[0]))
        for call in calls:
            got = [out.clone() for out in captured(*call)]
            torch.testing.assert_close(got, list(eager(*call)), rtol=0, atol=0)
            for name in DecodeStep.written:
                a, b = getattr(model, name), getattr(eager, name)
                torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_captured_refuses_other_shapes_and_constants(device):
    if device.type == "cpu":
        pytest.skip("a CPU has no graphs")
    captured = capture(lambda x, k: x * k, torch.ones(3, device=device), 2)
    assert torch.equal(
        captured(torch.full((3,), 4.0, device=device), 2).cpu(), torch.full((3,), 8.0)
    )
    with pytest.raises(ValueError, match="Capture again for another shape"):
        captured(torch.ones(4, device=device), 2)
    with pytest.raises(ValueError, match="Only tensors may change"):
        captured(torch.ones(3, device=device), 3)
    with pytest.raises(ValueError, match="expected the 2 captured"):
        captured(torch.ones(3, device=device))


def test_warmup_runs_every_call_and_leaves_the_callers_tensors(device, capsys):
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    arguments = sample("npu_fused_sigmoid_gating_delta_rule_update", device, dtype)
    before = copy.deepcopy(arguments)
    q = ((1, 2, 5, 16), dtype)
    warmup(
        {
            "npu_fused_sigmoid_gating_delta_rule_update": [arguments],
            "npu_fused_attention": [dict(q=q, k=q, v=q)],
        },
        device,
    )
    for name, value in tensors(before).items():
        torch.testing.assert_close(arguments[name], value, rtol=0, atol=0)
    assert "2/2 npu_fused_attention" in capsys.readouterr().err


Q = ((1, 2, 5, 16), torch.float32)


@pytest.mark.parametrize(
    ("calls", "where", "said"),
    [
        ({"npu_nothing": [{}]}, "cpu", "'npu_nothing' is no op"),
        ({"npu_fused_attention": dict(q=Q, k=Q, v=Q)}, "cpu", "has dict, expected a list"),
        ({"npu_fused_attention": [dict(q=Q)]}, "cpu", "lacks `k`, `v`"),
        ({"npu_fused_attention": [dict(q=Q, k=Q, v=Q, z=1)]}, "cpu", "has unknown `z`"),
        ({"npu_fused_attention": [dict(q=Q, k=Q, v=Q)]}, "meta", "`device` is 'meta'"),
        ({"npu_fused_attention": [dict(q=Q, k=Q, v=Q)]}, "xyz", "`device` is 'xyz'"),
    ],
)
def test_warmup_says_what_it_cannot_call(calls, where, said):
    with pytest.raises((ValueError, TypeError), match=rf"^warmup: .*{said}"):
        warmup(calls, where)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"causal": "yes"}, "`causal` is of type str, expected bool"),
        ({"q": 3}, "`q` is of type int, expected Tensor"),
        ({"k": ((1, 2, 5, 8), torch.float32)}, "`k` has shape"),
        ({"sm_scale": float("nan")}, "`sm_scale` is nan"),
    ],
)
def test_warmup_compiles_nothing_before_all_calls_are_checked(wrong, said, monkeypatch):
    monkeypatch.setattr(sys.modules[_Compilers.__module__], "compile_kernels", None)
    good = dict(q=Q, k=Q, v=Q)
    with pytest.raises((ValueError, TypeError), match=f"^npu_fused_attention: {said}") as caught:
        warmup({"npu_fused_attention": [good, good | wrong]}, "cpu")
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1",
    reason="nothing is compiled",
)
def test_warmup_compiles_side_by_side_and_launches_nothing(monkeypatch, capsys):
    from custom.cuda_ops.delta_rule import fused_sigmoid_gating_delta_rule_update as launcher

    from ..support.compile_for_hopper import stand_in

    stand_in(monkeypatch)
    monkeypatch.setattr(custom.config, "backend", "cuda")
    name = "npu_fused_sigmoid_gating_delta_rule_update"
    arguments = sample(name, torch.device("cpu"), torch.float32)
    before = arguments["initial_state_source"].clone()
    kernels = launcher._delta_rule_kernel.device_caches["pretended sm_90"][0]
    kernels.clear()
    with _Compilers() as compilers:
        calls = [
            (BY_NAME[name], arguments | dict(use_qk_l2norm_in_kernel=x)) for x in (True, False)
        ]
        compile_kernels(calls, torch.device("cpu"), compilers)
    assert len(kernels) == 2 and all("ptx" in kernel.asm for kernel in kernels.values())
    assert "kernels 2/2" in capsys.readouterr().err
    assert torch.equal(before, arguments["initial_state_source"])


@every_spec
def test_compiled_graph_calls_the_op_itself_and_clones_no_cache(spec):
    """The code that the compiler wrote calls the op and holds no kernel of its own: no copy."""
    if not mutated(spec):
        pytest.skip("this op writes nothing")
    torch._dynamo.reset()
    compiled = torch.compile(lambda **kw: overload(spec)(**kw), fullgraph=True)
    with torch.no_grad(), torch._inductor.config.patch(force_disable_caches=True):
        _, codes = run_and_get_code(compiled, **sample(spec.name, CPU, torch.float32))
    (code,) = codes
    assert f"torch.ops.custom.{spec.name}.default(" in code
    assert "cpp_fused" not in code and "clone" not in code and "copy_" not in code


# what CANN's operators do not take of ours, cannot do without, and compute with alone
CANN = {
    "npu_sparse_attention_pto": "softmax_scale rms_norm_eps layer_norm_eps sparse_count "
    "rope_interleaved index_rope_interleaved weight_format weight_quant_mode "
    "index_weight_quant_mode kv_kind index_kind",
    "npu_mla_prolog_pto": "dequant_scale_x dequant_scale_w_dq dequant_scale_w_uq_qr "
    "dequant_scale_w_dkv_kr smooth_scales_cq k_nope_clip_alpha kv_cache_dtype rope_interleaved "
    "weight_format weight_quant_mode kv_cache_quant_mode query_quant_mode ckvkr_repo_mode "
    "quant_scale_repo_mode tile_size row_layout scale_format weight_dq rmsnorm_gamma_cq",
    "npu_mla_prolog_v3": "kv_cache_dtype",
    "npu_lightning_indexer": "cmp_ratio select_tail",
    "npu_quant_lightning_indexer": "query_dtype key_dtype query_dequant_scale cmp_ratio "
    "select_tail",
    "npu_kv_quant_sparse_flash_attention": "key_dtype value_dtype row_layout rope_head_dim",
    "npu_sparse_lightning_indexer_grad_kl_loss": "actual_seq_qlen actual_seq_klen sinks",
    "npu_recurrent_gated_delta_rule": "beta scale actual_seq_lengths ssm_state_indices",
    "npu_hc_pre": "norm_weight hc_fn",
}


@pytest.mark.parametrize("op", torchair.TWINS)
def test_what_cann_does_not_take_is_refused_by_name(op):
    """Of a call that it takes, each argument spoiled by itself."""
    twin = torchair.TWINS[op]
    rows = {name: SimpleNamespace(symsize=(count,)) for name, count in twin.rows.items()}
    good = dict.fromkeys(twin.lacks) | dict.fromkeys(twin.needs, 1) | dict(twin.fixed) | rows
    torchair._refuse_what_cann_lacks(BY_NAME[op], twin, good)
    refused = set()
    for name in good:
        for spoiled in (None, "another", 7.5, SimpleNamespace(symsize=(7,))):
            with suppress(AttributeError, TypeError):
                try:
                    torchair._refuse_what_cann_lacks(BY_NAME[op], twin, good | {name: spoiled})
                except custom.NotSupported as error:
                    assert f"`{name}`" in str(error)
                    refused.add(name)
    assert refused == set(CANN.get(op, "").split())
