# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The decode step of a gated-delta layer, against the three ops that it is made of, and against
Qwen3-Next's own layer."""

from __future__ import annotations

import copy

import pytest
import torch
from custom.dispatch.common import gated_delta

import custom

from ...support.calls import assert_refuses, by_change, runs_once
from ...support.convolution import Layer

OP = "npu_gated_delta_layer_decode"
CASES = [
    Layer(),
    Layer(layout="vk", sigmoid=True, bias=False),
    Layer(B=1, slots=(5,), N=1, Nv=3, Dk=64, Dv=80, layout="vk"),
    Layer(S=3, L=5),
    Layer(S=2, layout="vk", W=2, L=1, rows=(4, -1, 0)),
    Layer(S=3, W=3, rows=(1, 0, 9), parents=((-1, 0, 0), (-1, -1, 1), (5, 0, 1))),
    Layer(state=torch.bfloat16, Dk=16, Dv=128, slots=(0, 1, 6)),
    Layer(twice=True),
    Layer(N=3, Nv=3, Dv=32, kda=True, sigmoid=True, bias=False, bound=-5.0),
    Layer(N=2, Nv=2, Dk=24, Dv=24, L=6, slots=(4, 9, -1), layout="vk", kda=True, flat=True),
    Layer(B=1, slots=(5,), N=2, Nv=2, Dk=128, Dv=128, W=2, L=1, kda=True, state=torch.bfloat16),
    Layer(N=1, Nv=2, layout="vk", kda=True, flat=True, twice=True, state=torch.bfloat16),
    Layer(S=3, N=4, L=5, rows=(4, -1, 0), kda=True, sigmoid=True, bound=-5.0, twice=True),
    Layer(2, 3, 1, 1, 16, slots=(2, -1), rows=(1, 9), parents=((-1, 0, 0), (-1, -1, 1)), kda=True),
]


def composed(x: dict) -> torch.Tensor:
    """The three ops, one after the other."""
    slots, heads, size = x["state_indices"], x["z"].shape[2], x["z"].shape[3]
    verification = {
        name: x[name]
        for name in ("intermediate_state_indices", "retrieve_parent_token", "disable_state_update")
    }
    mixed = custom.npu_causal_conv1d_update(
        x["mixed_qkv"],
        x["conv_states"],
        x["conv_weight"],
        x["conv_bias"],
        "silu",
        conv_state_indices=slots,
        intermediate_conv_window=x["intermediate_conv_window"],
        **verification,
    )
    keys = (mixed.shape[-1] - heads * size) // 2
    key_size = x["states"].shape[2 if x["state_layout"] == "kv" else 3]
    q, k, v = mixed.split([keys, keys, heads * size], -1)
    q, k = (y.unflatten(-1, (-1, key_size)) for y in (q, k))
    out = custom.npu_fused_sigmoid_gating_delta_rule_update(
        x["A_log"],
        x["a"],
        x["dt_bias"],
        1.0,
        20.0,
        q,
        k,
        v.unflatten(-1, (heads, size)),
        x["b"],
        x["states"],
        slots,
        use_qk_l2norm_in_kernel=True,
        state_layout=x["state_layout"],
        intermediate_states=x["intermediate_states"],
        is_kda=x["is_kda"],
        lower_bound=x["lower_bound"],
        allow_neg_eigval=x["allow_neg_eigval"],
        **verification,
    )
    activation = x["gate_activation"]
    return custom.npu_gated_rms_norm(out, x["z"], x["norm_weight"], activation=activation)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_three_ops(case, dtype, device, backend):
    x = case.arguments(dtype, device)
    y = copy.deepcopy(x)
    with runs_once(OP, backend):
        got = custom.npu_gated_delta_layer_decode(**x)
    want = composed(y)
    # the same sums, and of the last norm another order of them
    torch.testing.assert_close(got, want, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    alone = gated_delta.in_one_launch(**x)
    for name in ("conv_states", "states", "intermediate_states", "intermediate_conv_window"):
        if name == "states" and backend == "cuda" and alone:
            # a kernel of its own, with another order of the sums over K
            near = 2**-7 if x[name].dtype is torch.bfloat16 else 1e-5
            torch.testing.assert_close(x[name], y[name], rtol=near, atol=1e-5)
        elif x[name] is not None:
            assert torch.equal(x[name], y[name]), name


@pytest.mark.parametrize("steps, fits", [(2, False), (3, True), (4, True)])
def test_a_row_has_at_least_a_state_for_each_token(steps, fits):
    x = Layer(S=3, W=3, rows=(1, 0, 9)).arguments(torch.float32, torch.device("cpu"))
    for name in ("intermediate_states", "intermediate_conv_window"):
        shape = x[name].shape
        x[name] = x[name].new_zeros(shape[0], steps, *shape[2:])
    if fits:
        assert torch.isfinite(custom.npu_gated_delta_layer_decode(**x)).all()
        return
    with pytest.raises(ValueError, match="has 2 steps, expected at least 3"):
        custom.npu_gated_delta_layer_decode(**x)


def test_twice_in_a_row(device, backend):
    """The counts of the programs begin at zero every time."""
    x = Layer().arguments(torch.float16, device)
    y = copy.deepcopy(x)
    for _ in range(2):
        assert torch.isfinite(custom.npu_gated_delta_layer_decode(**x)).all()
        composed(y)
    assert torch.equal(x["states"], y["states"])


def test_equals_qwen3_next_s_layer(device, backend):
    """Projections and the last product are the model's; a prompt, then a token."""
    qwen = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    from transformers import DynamicCache
    from transformers.models.qwen3_next import Qwen3NextConfig

    config = Qwen3NextConfig(
        hidden_size=32,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        linear_conv_kernel_dim=4,
    )
    layer = qwen.Qwen3NextGatedDeltaNet(config, 0).eval()
    torch.nn.init.normal_(layer.norm.weight)
    cache = DynamicCache(config=config)
    with torch.no_grad():
        layer(torch.randn(2, 7, 32), cache_params=cache)
        kept = cache.layers[0]
        columns = kept.conv_states[0].clone().to(device).mT
        states = kept.recurrent_states[0].clone().to(device)
        x = torch.randn(2, 1, 32)
        q, k, v, z, b, a = layer.fix_query_key_value_ordering(
            layer.in_proj_qkvz(x), layer.in_proj_ba(x)
        )
        mixed = torch.cat([y.flatten(2) for y in (q, k, v)], -1)
        want = layer(x, cache_params=cache)
        if backend == "npu":
            columns = columns.contiguous()
        out = custom.npu_gated_delta_layer_decode(
            *(y.contiguous().to(device) for y in (mixed, z, a, b)),
            columns,
            states,
            layer.conv1d.weight.squeeze(1).t().to(device),
            layer.A_log.to(device),
            layer.dt_bias.to(device),
            layer.norm.weight.to(device),
            torch.arange(2, device=device),
            epsilon=layer.layer_norm_epsilon,
        )
        got = layer.out_proj(out.cpu().flatten(2))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(states.cpu(), cache.layers[0].recurrent_states[0])
    torch.testing.assert_close(columns.cpu(), cache.layers[0].conv_states[0].mT)


FLOATS = {
    *("mixed_qkv", "z", "a", "b", "conv_states", "states", "conv_weight", "A_log", "dt_bias"),
    *("norm_weight", "conv_bias"),
}
LOOPS = {
    "KDA": Layer(S=2, N=2, Nv=2, Dk=8, Dv=8, kda=True, sigmoid=True, bound=-5.0),
    "KDA, vk, flat, to 2": Layer(
        S=3, N=1, Nv=3, Dk=8, Dv=4, L=5, kda=True, layout="vk", flat=True, twice=True
    ),
    "a decay by head, to 2": Layer(S=2, W=2, Dk=4, Dv=8, twice=True, bias=False),
}


@pytest.mark.parametrize("case", LOOPS.values(), ids=LOOPS)
def test_equals_a_loop(case, device, backend):
    """A layer's own formulas, a request, a token and a head at a time."""
    dtype = torch.float64 if backend == "reference" else torch.float32
    near = dict(rtol=1e-10, atol=1e-12) if dtype is torch.float64 else dict(rtol=1e-4, atol=1e-5)
    x = case.arguments(dtype, device)
    y = {n: each.cpu() if isinstance(each, torch.Tensor) else each for n, each in x.items()}
    y = {
        n: each.clone().double() if n in FLOATS and each is not None else each
        for n, each in y.items()
    }
    got = custom.npu_gated_delta_layer_decode(**x).cpu().double()
    x = {n: x[n].cpu().double() for n in ("conv_states", "states")}
    heads, keys = case.N, case.N * case.Dk
    for i, slot in enumerate(case.slots):
        there = slot >= 0
        columns = (
            y["conv_states"][slot]
            if there
            else torch.zeros(case.L, y["conv_states"].shape[-1]).double()
        )
        states = y["states"][slot] if there else torch.zeros(y["states"].shape[1:]).double()
        states = states if case.layout == "kv" else states.mT
        for t in range(case.S):
            columns = torch.cat([columns, y["mixed_qkv"][i, t : t + 1]])
            taps = (columns[-case.W :] * y["conv_weight"]).sum(0)
            mixed = torch.nn.functional.silu(taps + y["conv_bias"] if case.bias else taps)
            after = []
            for n in range(case.Nv):
                own = n // (case.Nv // heads) * case.Dk
                q, k = mixed[own : own + case.Dk], mixed[keys + own : keys + own + case.Dk]
                v = mixed[2 * keys + n * case.Dv : 2 * keys + (n + 1) * case.Dv]
                q, k = (u / (u.square().sum() + 1e-6).sqrt() for u in (q, k))
                gate = y["a"][i, t].reshape(case.Nv, -1)[n]
                gate = gate + y["dt_bias"].reshape(case.Nv, -1)[n]
                speed = y["A_log"][n].exp()
                if case.bound is None:
                    g = -speed * torch.nn.functional.softplus(gate)
                else:
                    g = case.bound * (speed * gate).sigmoid()
                beta = y["b"][i, t, n].sigmoid() * (1 + case.twice)
                S = g.exp()[:, None] * states[n]
                S = S + torch.outer(k, beta * (v - k @ S))
                o = case.Dk**-0.5 * q @ S
                o = o * (o.square().mean() + 1e-6).rsqrt() * y["norm_weight"]
                z = y["z"][i, t, n]
                want = o * z.sigmoid() * (1 if case.sigmoid else z)
                torch.testing.assert_close(got[i, t, n], want, **near)
                after.append(S)
            states = torch.stack(after)
        if there:
            torch.testing.assert_close(x["conv_states"][slot], columns[-case.L :], rtol=0, atol=0)
            kept = states if case.layout == "kv" else states.mT
            torch.testing.assert_close(x["states"][slot], kept, **near)


@pytest.mark.parametrize(
    "family, prefix", [("glm5_next", "Glm5NextText"), ("kimi_linear", "KimiLinear")]
)
def test_equals_a_kda_layer_of_transformers(family, prefix, device, backend):
    """12 steps behind a prompt; GLM's decay has a lower bound, Kimi Linear's none."""
    module = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    from transformers import DynamicCache

    heads, size, hidden = 4, 16, 32
    config = getattr(module, f"{prefix}Config")(
        vocab_size=32,
        hidden_size=hidden,
        num_hidden_layers=1,
        linear_head_dim=size,
        linear_num_heads=heads,
        layer_types=["linear_attention"],
        mlp_layer_types=["dense"],
        num_attention_heads=2,
        num_key_value_heads=2,
        pad_token_id=0,
        **(dict(indexer_types=["full"]) if family == "glm5_next" else {}),
    )
    kind = {"glm5_next": "Glm5NextTextLinearAttention", "kimi_linear": "KimiLinearDeltaAttention"}
    layer = getattr(module, kind[family])(config, 0).eval()
    for p in layer.parameters():
        torch.nn.init.normal_(p, std=0.4)
    bound = -5.0 if family == "glm5_next" else None
    assert getattr(layer.forget_gate, "safe_gate_lower_bound", None) == bound
    cache, requests = DynamicCache(config=config), 3
    slots = torch.tensor([4, 0, 2], device=device)
    columns = torch.zeros(5, 3, 3 * heads * size, device=device)
    states = torch.zeros(5, heads, size, size, device=device)
    weights = dict(
        conv_weight=layer.conv1d.weight.squeeze(1).t(),
        A_log=layer.forget_gate.A_log.flatten(),
        dt_bias=layer.forget_gate.dt_bias,
        norm_weight=layer.o_norm.weight,
    )
    weights = {name: weight.detach().to(device) for name, weight in weights.items()}
    with torch.no_grad():
        layer(torch.randn(requests, 5, hidden), cache)
        kept = cache.layers[0]
        columns[slots] = kept.conv_states[0].mT[:, -3:].to(device)
        states[slots] = kept.recurrent_states[0].to(device)
        for _ in range(12):
            x = torch.randn(requests, 1, hidden)
            mixed = torch.cat([layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)], -1)
            z = layer.g_b_proj(layer.g_a_proj(x)).unflatten(-1, (heads, size))
            a = layer.forget_gate.f_b_proj(layer.forget_gate.f_a_proj(x))
            out = custom.npu_gated_delta_layer_decode(
                *(y.to(device) for y in (mixed, z, a, layer.b_proj(x))),
                columns,
                states,
                state_indices=slots,
                epsilon=config.rms_norm_eps,
                gate_activation="sigmoid",
                is_kda=True,
                lower_bound=bound,
                **weights,
            )
            want = layer(x, cache)
            torch.testing.assert_close(
                layer.o_proj(out.cpu().flatten(2)), want, rtol=1e-4, atol=1e-5
            )
        torch.testing.assert_close(
            states[slots].cpu(), kept.recurrent_states[0], rtol=1e-4, atol=1e-5
        )


def test_two_caches_of_one_pool(device, backend):
    """Slots that lie apart because another cache's lie between them, which are not touched."""
    case = Layer(N=4, kda=True, sigmoid=True, bound=-5.0, twice=True)
    x = case.arguments(torch.float16, device)
    y = copy.deepcopy(x)
    pools = {}
    for name in ("conv_states", "states"):
        both = torch.full((len(x[name]), 2, *x[name].shape[1:]), torch.nan, device=device)
        pools[name] = both = both.to(x[name].dtype)
        both[:, 1] = x[name]
        x[name] = both[:, 1]
    got, want = (custom.npu_gated_delta_layer_decode(**each) for each in (x, y))
    assert torch.equal(got, want)
    for name, both in pools.items():
        assert torch.equal(both[:, 1], y[name]) and both[:, 0].isnan().all()


@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        (dict(mixed_qkv=torch.zeros(3, 1, 190)), ValueError, "`mixed_qkv` has 190 channels"),
        (dict(norm_weight=torch.zeros(17)), ValueError, "`norm_weight` has shape"),
        (dict(states=torch.zeros(6, 4, 16, 32).mT), ValueError, "`states` has strides"),
        (dict(gate_activation="relu"), ValueError, "`gate_activation` is 'relu'"),
        (
            dict(lower_bound=-5.0),
            ValueError,
            "`lower_bound` is -5.0, expected None without `is_kda`",
        ),
        (dict(lower_bound=5.0, is_kda=True), ValueError, "`lower_bound` is 5.0, expected a neg"),
        (dict(is_kda=True), ValueError, r"`a` has shape \[3, 1, 4\], expected \[B, S, Nv\*Dk\]"),
        (dict(a=torch.zeros(3, 1, 4, 32)), ValueError, "`a` has shape .* expected .B, S, Nv. with"),
        (dict(a=torch.zeros(3, 1, 128), is_kda=True), ValueError, "`dt_bias` has shape .4., exp"),
        (dict(intermediate_state_indices=torch.zeros(3).int()), ValueError, "only some of"),
        (dict(retrieve_parent_token=torch.zeros(3, 1).int()), ValueError, "a tree has no last"),
    ],
    ids=by_change,
)
def test_errors(change, error, sentence):
    good = Layer().arguments(torch.float32, "cpu")
    if "mixed_qkv" in change:
        good |= dict(
            conv_weight=torch.zeros(4, 190), conv_bias=None, conv_states=torch.zeros(6, 3, 190)
        )
    kept = {name: good[name].clone() for name in ("conv_states", "states")}
    assert_refuses(OP, good | change, error, sentence)
    assert all(torch.equal(good[name], before) for name, before in kept.items())
