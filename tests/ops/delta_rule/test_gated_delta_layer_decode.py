# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The decode step of a gated-delta layer, against the three ops that it is made of, and against
Qwen3-Next's own layer."""

from __future__ import annotations

import copy

import pytest
import torch
from custom.dispatch import log

import custom

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
        **verification,
    )
    activation = x["gate_activation"]
    return custom.npu_gated_rms_norm(out, x["z"], x["norm_weight"], activation=activation)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_three_ops(case, dtype, device, backend):
    x = case.arguments(dtype, device)
    y = copy.deepcopy(x)
    before = log.calls[OP, backend]
    got = custom.npu_gated_delta_layer_decode(**x)
    assert log.calls[OP, backend] == before + 1
    want = composed(y)
    # the same sums, and of the last norm another order of them
    torch.testing.assert_close(got, want, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    for name in ("conv_states", "states", "intermediate_states", "intermediate_conv_window"):
        if x[name] is not None:
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


@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        (dict(mixed_qkv=torch.zeros(3, 1, 190)), ValueError, "`mixed_qkv` has 190 channels"),
        (dict(norm_weight=torch.zeros(17)), ValueError, "`norm_weight` has shape"),
        (dict(states=torch.zeros(6, 4, 16, 32).mT), ValueError, "`states` has strides"),
        (dict(gate_activation="relu"), ValueError, "`gate_activation` is 'relu'"),
        (dict(intermediate_state_indices=torch.zeros(3).int()), ValueError, "only some of"),
        (dict(retrieve_parent_token=torch.zeros(3, 1).int()), ValueError, "a tree has no last"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else None,
)
def test_errors(change, error, sentence):
    good = Layer().arguments(torch.float32, "cpu")
    if "mixed_qkv" in change:
        good |= dict(
            conv_weight=torch.zeros(4, 190), conv_bias=None, conv_states=torch.zeros(6, 3, 190)
        )
    kept = {name: good[name].clone() for name in ("conv_states", "states")}
    with pytest.raises(error, match=f"{OP}: .*{sentence}"):
        custom.npu_gated_delta_layer_decode(**(good | change))
    assert all(torch.equal(good[name], before) for name, before in kept.items())
