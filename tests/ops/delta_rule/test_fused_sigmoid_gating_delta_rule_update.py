# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The gated delta rule's decode, against Qwen3-Next's own recurrence and scalar loops."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
from custom.dispatch.reference.delta_rule import fused_sigmoid_gating_delta_rule_update as reference
from hypothesis import given, settings
from hypothesis import strategies as st

import custom

from ...support.accuracy import assert_close_to_float64, skip_unless_taken
from ...support.calls import assert_refuses, by_change, runs_once
from ...support.delta_rule import POOLS, Step, moved
from ...support.samples import apart

OP = "npu_fused_sigmoid_gating_delta_rule_update"
pytestmark = pytest.mark.usefixtures("one_thread")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


CASES = [
    Step(),
    Step(layout="vk", T=3),
    Step(H=1, HV=3, K=24, V=20, T=2, gap=7),
    Step(layout="vk", H=2, HV=6, K=100, V=36, gap=12),
    Step(B=3, T=2, K=256, V=16, H=1, HV=1, slots=(-1, 5, 6)),
    Step(layout="vk", K=16, V=256, H=1, HV=2, state=torch.bfloat16),
    Step(state=torch.bfloat16, T=2),
    Step(kda=True, T=3),
    Step(kda=True, layout="vk", K=24, H=1, HV=3, norm=False, options=dict(scale=0.05)),
    Step(kda=True, T=2, options=dict(lower_bound=-5.0)),
    Step(layout="vk", options=dict(lower_bound=-0.5)),
    Step(T=2, options=dict(allow_neg_eigval=True)),
    Step(kda=True, layout="vk", options=dict(lower_bound=-5.0, allow_neg_eigval=True)),
    Step(B=1, T=9, lengths=(4, 0, 1, 2), slots=(2, 4, -1, 0)),
    Step(B=1, T=8, lengths=(3, 5), layout="vk", kda=True, steps=4, rows=(2, 4)),
    Step(T=3, steps=3, rows=(4, -1)),
    Step(T=3, steps=4, rows=(0, 3), layout="vk", options=dict(disable_state_update=True), gap=5),
    Step(T=5, steps=5, rows=(1, -1), parents=((-1, 0, 0, 1, 2), (-1, 0, 1, 2, 0))),
    Step(
        T=6, layout="vk", steps=6, rows=(1, 7), parents=((-1, -1, 1, 0, 3, 9), (0, 0, 1, 2, 3, -5))
    ),
    Step(options=dict(softplus_beta=0.5, softplus_threshold=0.25), T=2),
    # enough heads for the tiles of large batches
    Step(HV=66, K=64, V=64, T=2, layout="vk"),
    Step(HV=66, K=64, V=64, layout="vk", state=torch.bfloat16),
    Step(HV=66, K=64, V=64, state=torch.bfloat16),
    # tiles of 16 columns, and three of them
    Step(HV=66, K=128, V=48, layout="vk", state=torch.bfloat16),
    Step(HV=66, K=48, V=72, state=torch.bfloat16, kda=True, steps=1, rows=(4, -1), slots=(-1, 3)),
    Step(T=0),
    Step(B=0, slots=()),
]


def rounded(arguments: dict[str, Any], dtype: torch.dtype, case: Step) -> dict[str, Any]:
    """The same values as `moved` gives in `dtype`, in float64."""
    return moved(moved(arguments, dtype, case, "cpu"), torch.float64, case, "cpu")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_option(case, dtype, device, backend):
    if dtype is not torch.float32:
        skip_unless_taken(dtype, device, backend)
    drawn = case.arguments()
    exact, plain = rounded(drawn, dtype, case), moved(drawn, dtype, case, "cpu")
    got = moved(drawn, dtype, case, device)
    with runs_once(OP, backend):
        o = custom.npu_fused_sigmoid_gating_delta_rule_update(**got)
    assert_close_to_float64("o", o, reference.forward(**plain), reference.forward(**exact))
    for name in POOLS:
        if got[name] is not None:
            assert_close_to_float64(name, got[name], plain[name], exact[name])
    untouched = moved(drawn, dtype, case, device)
    for slot in set(range(6)) - set(case.slots):
        x, y = got["initial_state_source"][slot], untouched["initial_state_source"][slot]
        assert torch.equal(x, y)
    if got["disable_state_update"]:
        assert torch.equal(got["initial_state_source"], untouched["initial_state_source"])


def test_qwen3_next_recurrence(device, backend):
    """Hugging Face's own function and gates, for a step and for a prompt."""
    qwen = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    for T in (1, 7):
        case = Step(B=3, T=T, H=2, HV=4, K=32, V=16, slots=(4, 0, 2))
        x = moved(case.arguments(), torch.float32, case, device)
        state = x["initial_state_source"].clone()
        o = custom.fused_sigmoid_gating_delta_rule_update(**x)
        g = -x["A_log"].exp() * torch.nn.functional.softplus(x["a"] + x["dt_bias"])
        want, last = qwen.torch_recurrent_gated_delta_rule(
            x["q"].repeat_interleave(2, 2),
            x["k"].repeat_interleave(2, 2),
            x["v"],
            g=g,
            beta=x["b"].sigmoid(),
            initial_state=state[x["initial_state_indices"]],
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        torch.testing.assert_close(o, want, rtol=1e-5, atol=1e-5)
        got = x["initial_state_source"][x["initial_state_indices"]]
        torch.testing.assert_close(got, last, rtol=1e-5, atol=1e-5)


def test_positional_order_of_sglang(device, backend):
    """sglang's call, as it stands in its backend, with the layout of its present state."""
    case = Step(B=1, T=3, lengths=(1, 1, 1), slots=(2, -1, 0), layout="vk", HV=2)
    x = moved(case.arguments(), torch.float16, case, device)
    by_name = moved(case.arguments(), torch.float16, case, device)
    names = ["A_log", "a", "dt_bias", "softplus_beta", "softplus_threshold", "q", "k", "v", "b"]
    names += ["initial_state_source", "initial_state_indices", "scale"]
    for y in (x, by_name):
        y.update({name: by_name[name] for name in by_name if name not in POOLS})
        y["initial_state_source"] = torch.ones_like(y["initial_state_source"])
    o = custom.fused_sigmoid_gating_delta_rule_update(
        *(x[name] for name in names), True, x["cu_seqlens"], state_layout="vk"
    )
    want = custom.npu_fused_sigmoid_gating_delta_rule_update(**by_name)
    assert torch.equal(o, want)
    assert torch.equal(x["initial_state_source"], by_name["initial_state_source"])


# the first parameters of sglang's function, as published; behind them come those of KDA and of
# verification, in another order
SGLANG = (
    *("A_log", "a", "dt_bias", "softplus_beta", "softplus_threshold", "q", "k", "v", "b"),
    *("initial_state_source", "initial_state_indices", "scale", "use_qk_l2norm_in_kernel"),
    "cu_seqlens",
)


@pytest.mark.parametrize("verify", [False, True], ids=["decode", "verify a chain"])
def test_drop_in_for_sglang(verify, device, backend):
    """Its whole positional order, on its state [slots, HV, V, K], gates without a batch; and its
    verification, whose buffer of states is `intermediate_states` here."""
    ours = list(inspect.signature(custom.fused_sigmoid_gating_delta_rule_update).parameters)
    assert tuple(ours[: len(SGLANG)]) == SGLANG
    lengths = (3, 2) if verify else (1, 1, 1)
    case = Step(
        B=1,
        T=sum(lengths),
        lengths=lengths,
        slots=(4, 0) if verify else (2, -1, 0),
        layout="vk",
        steps=3 if verify else 0,
        rows=(1, 3) if verify else (),
        options=dict(disable_state_update=verify),
    )
    drawn = case.arguments()
    x = moved(drawn, torch.float16, case, device)
    plain, exact = moved(drawn, torch.float16, case, "cpu"), rounded(drawn, torch.float16, case)
    rounded_o, exact_o = reference.forward(**plain), reference.forward(**exact)
    more = {}
    if verify:
        names = ("disable_state_update", "intermediate_states", "intermediate_state_indices")
        more = {name: x[name] for name in names}
    x["a"], x["b"] = x["a"][0], x["b"][0]
    o = custom.fused_sigmoid_gating_delta_rule_update(
        *(x[name] for name in SGLANG), state_layout="vk", **more
    )
    assert_close_to_float64("o", o, rounded_o, exact_o)
    for name in POOLS:
        if x[name] is not None:
            assert_close_to_float64(name, x[name], plain[name], exact[name])


def test_gates_without_a_batch_dimension_and_flat_channels(device, backend):
    case = Step(B=1, T=4, kda=True, slots=(3,))
    x = moved(case.arguments(), torch.float16, case, device)
    y = dict(x, initial_state_source=x["initial_state_source"].clone())
    y.update(a=x["a"].flatten(2)[0], b=x["b"][0], dt_bias=x["dt_bias"].flatten())
    o = custom.npu_fused_sigmoid_gating_delta_rule_update(**x)
    assert torch.equal(custom.npu_fused_sigmoid_gating_delta_rule_update(**y), o)


def test_slices_of_one_projection(device, backend):
    """q, k, v, a and b as views of wider tensors: no copies, the strides are honoured."""
    case = Step(B=2, T=2, H=2, HV=2, K=32, V=32)
    x = moved(case.arguments(), torch.float16, case, device)
    y = dict(x, initial_state_source=x["initial_state_source"].clone())
    joined = torch.cat([x[name].flatten(2) for name in "qkv"] + [x["a"], x["b"]], -1)
    for i, name in enumerate("qkv"):
        y[name] = joined[..., 64 * i : 64 * (i + 1)].unflatten(-1, (2, 32))
    y["a"], y["b"] = joined[..., -4:-2], joined[..., -2:]
    o = custom.npu_fused_sigmoid_gating_delta_rule_update(**x)
    assert torch.equal(custom.npu_fused_sigmoid_gating_delta_rule_update(**y), o)
    assert torch.equal(x["initial_state_source"], y["initial_state_source"])


def same(case: Step, device: Any, backend: str, **changed: tuple[Any, Any]) -> None:
    """Integers that no caller means, and those they stand for: outputs and states are equal."""
    drawn, results = case.arguments(), []
    for which in (0, 1):
        x = moved(drawn, torch.float16, case, device)
        x |= {name: torch.tensor(both[which], device=device) for name, both in changed.items()}
        with runs_once(OP, backend):
            o = custom.npu_fused_sigmoid_gating_delta_rule_update(**x)
        results.append([o, *(x[name] for name in POOLS if x[name] is not None)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize(
    "odd,meant",
    [
        ((0, 2, 2**32 + 3), (0, 2, 6)),
        ((-5, 2, 4), (0, 2, 4)),
        ((0, -(2**40), 3), (0, 0, 3)),
        ((-(2**31), 2**33, 2**33 + 4), (0, 6, 6)),
        ((0, 2**31 - 1, 2**31 - 1), (0, 6, 6)),
        ((0, 5, 3), (0, 5, 5)),
        ((3, 1, 5), (3, 3, 5)),
    ],
)
@pytest.mark.parametrize("layout", ["kv", "vk"])
def test_sums_beyond_the_tokens_end_with_them(odd, meant, layout, device, backend):
    sizes = dict(H=1, HV=1, K=16, V=16)
    case = Step(B=1, T=6, lengths=(3, 3), slots=(2, 0), layout=layout, **sizes)
    same(case, device, backend, cu_seqlens=(odd, meant))


@pytest.mark.parametrize("layout", ["kv", "vk"])
def test_tokens_of_no_sequence_are_zero(layout, device, backend):
    sizes = dict(H=1, HV=1, K=16, V=16)
    case = Step(B=1, T=9, lengths=(3, 3), slots=(2, 0), layout=layout, **sizes)
    x = moved(case.arguments(), torch.float16, case, device)
    x["cu_seqlens"] = torch.tensor([2, 5, 8], device=device)
    o = custom.npu_fused_sigmoid_gating_delta_rule_update(**x)
    assert o[:, :2].eq(0).all() and o[:, 8:].eq(0).all() and o[:, 2:8].ne(0).any(-1).all()


def test_a_parent_or_a_slot_beyond_32_bits_is_none(device, backend):
    none = ((-1, -1, 1, -1), (-1, 0, -1, 1))
    case = Step(T=4, H=1, HV=1, K=16, V=16, steps=4, rows=(1, 2), parents=none)
    odd = ((2**32, 2**32, 1, 2**33 + 2), (-(2**32), 0, 2**62 + 1, 1))
    same(case, device, backend, retrieve_parent_token=(odd, none))
    same(case, device, backend, initial_state_indices=((2**32 + 1, 3), (-1, 3)))
    same(case, device, backend, intermediate_state_indices=((2, -(2**32)), (2, -1)))


def test_a_state_beyond_32_bits_is_refused_on_cuda():
    pytest.importorskip("triton")
    from custom.cuda_ops.delta_rule import fused_sigmoid_gating_delta_rule_update as kernels

    k, v = (torch.empty(1, 1, 1, size, device="meta") for size in (256, 2**23))
    assert "K=256 and V=8388608" in kernels.unsupported(k=k, v=v)
    assert kernels.unsupported(k=k, v=v[..., 1:]) is None


@pytest.mark.large
@pytest.mark.parametrize("name", ["q", "k", "v", "a", "b"])
def test_tokens_far_apart(name, device, backend):
    """The last one begins more than 2**31 numbers behind the first."""
    if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < 6 * 2**30:
        pytest.skip("needs 6 GiB of free device memory")
    sizes = dict(T=3, H=1, HV=1, K=16, V=16)
    case = Step(B=1, kda=True, parents=((-1, 0, 0),), slots=(1,), **sizes)
    x = moved(case.arguments(), torch.float16, case, device)
    y = dict(x, initial_state_source=x["initial_state_source"].clone())
    y[name] = apart(x[name], 1)
    o = custom.npu_fused_sigmoid_gating_delta_rule_update(**x)
    assert torch.equal(custom.npu_fused_sigmoid_gating_delta_rule_update(**y), o)
    assert torch.equal(x["initial_state_source"], y["initial_state_source"])


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_scalar_loops(data):
    """The definition, one number at a time."""
    small = st.integers(1, 3)
    B, T, H, groups, K, V = data.draw(
        st.tuples(small, small, st.integers(1, 2), small, small, small)
    )
    layout, kda, norm, twice = data.draw(
        st.tuples(st.sampled_from(["kv", "vk"]), st.booleans(), st.booleans(), st.booleans())
    )
    slots = tuple(data.draw(st.permutations(range(-1, 6)))[:B])
    parents = data.draw(
        st.none()
        | st.lists(
            st.lists(st.integers(-1, T - 1), min_size=T, max_size=T).map(tuple),
            min_size=B,
            max_size=B,
        ).map(tuple)
    )
    case = Step(
        B,
        T,
        H,
        H * groups,
        K,
        V,
        layout,
        kda,
        norm,
        slots=slots,
        parents=parents,
        steps=T,
        rows=tuple(range(B)),
        options=dict(allow_neg_eigval=twice),
    )
    x = moved(case.arguments(), torch.float64, case, "cpu")
    pool = x["initial_state_source"].clone()
    o = custom.npu_fused_sigmoid_gating_delta_rule_update(**x)

    def at(i: int, j: int) -> tuple[int, int]:
        return (i, j) if layout == "kv" else (j, i)

    for n in range(B):
        for hv in range(case.HV):
            h = hv // groups
            start = [
                [float(pool[slots[n], hv][at(i, j)]) if slots[n] >= 0 else 0.0 for j in range(V)]
                for i in range(K)
            ]
            after: list[list[list[float]]] = []
            state = start
            for t in range(T):
                if parents is not None:
                    state = after[parents[n][t]] if 0 <= parents[n][t] < t else start
                q, k = ([float(z) for z in x[name][n, t, h]] for name in "qk")
                if norm:
                    q, k = (
                        [z / math.sqrt(sum(y * y for y in w) + 1e-6) for z in w] for w in (q, k)
                    )
                rate = (2 if twice else 1) / (1 + math.exp(-float(x["b"][n, t, hv])))
                decay = []
                for i in range(K):
                    u = (
                        float(x["a"][n, t, hv, i] + x["dt_bias"][hv, i])
                        if kda
                        else float(x["a"][n, t, hv] + x["dt_bias"][hv])
                    )
                    decay.append(
                        math.exp(-math.exp(float(x["A_log"][hv])) * math.log1p(math.exp(u)))
                    )
                state = [[decay[i] * state[i][j] for j in range(V)] for i in range(K)]
                seen = [sum(k[i] * state[i][j] for i in range(K)) for j in range(V)]
                new = [(float(x["v"][n, t, hv, j]) - seen[j]) * rate for j in range(V)]
                state = [[state[i][j] + k[i] * new[j] for j in range(V)] for i in range(K)]
                for j in range(V):
                    want = sum(q[i] * state[i][j] for i in range(K)) * K**-0.5
                    assert float(o[n, t, hv, j]) == pytest.approx(want, rel=1e-9, abs=1e-12)
                after.append(state)
                kept = x["intermediate_states"][n, t, hv]
                for i in range(K):
                    for j in range(V):
                        assert float(kept[at(i, j)]) == pytest.approx(
                            state[i][j], rel=1e-9, abs=1e-12
                        )
            if slots[n] >= 0:
                stored = x["initial_state_source"][slots[n], hv]
                for i in range(K):
                    for j in range(V):
                        assert float(stored[at(i, j)]) == pytest.approx(
                            state[i][j], rel=1e-9, abs=1e-12
                        )


def test_gate_far_from_zero(device, backend):
    """softplus keeps its tail: at x = -30 it is 9e-14 and not 0, and at 60 it is 60."""
    case = Step(B=1, T=1, H=1, HV=2, K=16, V=16, slots=(0,))
    x = moved(case.arguments(), torch.float32, case, device)
    x["a"] = torch.tensor([[[-30.0, 60.0]]], device=device)
    x["A_log"] = torch.tensor([28.0, -4.0], device=device)
    x["dt_bias"], x["k"] = torch.zeros(2, device=device), torch.zeros_like(x["k"])
    before = x["initial_state_source"][0].clone()
    custom.npu_fused_sigmoid_gating_delta_rule_update(**x)
    decay = x["initial_state_source"][0] / before
    for head, gate in enumerate([math.exp(28) * math.log1p(math.exp(-30)), 60 * math.exp(-4)]):
        want = torch.full_like(decay[head], math.exp(-gate))
        torch.testing.assert_close(decay[head], want, rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    "change,error,sentence",
    [
        (dict(k=torch.zeros(2, 1, 2, 31)), ValueError, "`k` has shape .* K=32"),
        (dict(v=torch.zeros(2, 1, 3, 32)), ValueError, "3 heads and `q` 2"),
        (dict(scale=0.0), ValueError, "`scale` is 0.0"),
        (dict(initial_state_indices=torch.tensor([1])), ValueError, "`initial_state_indices`"),
        (
            dict(initial_state_indices=torch.tensor([1.0, 2.0])),
            TypeError,
            "`initial_state_indices`",
        ),
        (dict(initial_state_source=torch.zeros(6, 4, 32, 64)[..., ::2]), ValueError, "strides"),
        (dict(cu_seqlens=torch.tensor([0, 1, 2])), ValueError, "batch 2, expected 1"),
        (dict(intermediate_state_indices=torch.tensor([0, 1])), ValueError, "expected both"),
    ],
    ids=by_change,
)
def test_errors(change, error, sentence):
    case = Step()
    good = moved(case.arguments(), torch.float32, case, "cpu")
    state = good["initial_state_source"].clone()
    assert_refuses(OP, good | change, error, sentence)
    assert torch.equal(good["initial_state_source"], state)
