# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Our gated delta rule under Transformers' names of kernels: against its own functions, and in
whole models through the package `kernels`."""

from __future__ import annotations

import inspect

import pytest
import torch
from custom.dispatch import log

transformers = pytest.importorskip("transformers", minversion="5.17")

from transformers.models.kimi_linear import modeling_kimi_linear  # noqa: E402
from transformers.models.qwen3_next import modeling_qwen3_next  # noqa: E402

from custom.integrations import kernels as ours  # noqa: E402

from .support.models import NEW, greedy, kimi_linear, qwen3_5, qwen3_5_moe, qwen3_next, ragged  # noqa: E402

PAIRS = {
    "chunk_gated_delta_rule": modeling_qwen3_next.torch_chunk_gated_delta_rule,
    "fused_recurrent_gated_delta_rule": modeling_qwen3_next.torch_recurrent_gated_delta_rule,
    "chunk_kda": modeling_kimi_linear.chunk_kimi_delta_attention,
    "fused_recurrent_kda": modeling_kimi_linear.recurrent_kimi_delta_attention,
}
CONVOLUTIONS = {
    "causal_conv1d_fn": modeling_qwen3_next.causal_conv1d_fn,
    "causal_conv1d_update": modeling_qwen3_next.causal_conv1d_update,
}
every_kernel = pytest.mark.parametrize("name", PAIRS)


def arguments(name, tokens, state):
    B, N, K, V = 3, 4, 16, 24
    channels = (K,) if name.endswith("kda") else ()
    return dict(
        query=torch.randn(B, tokens, N, K),
        key=torch.randn(B, tokens, N, K),
        value=torch.randn(B, tokens, N, V),
        g=-torch.rand(B, tokens, N, *channels),
        beta=torch.rand(B, tokens, N),
        initial_state=torch.randn(B, N, K, V) if state else None,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )


@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("tokens", [1, 70])
@every_kernel
def test_equals_the_function_of_that_name(name, tokens, state):
    given = arguments(name, tokens, state)
    before = None if not state else given["initial_state"].clone()
    out, final = getattr(ours, name)(**given)
    wanted_out, wanted_final = PAIRS[name](**given)
    torch.testing.assert_close(out, wanted_out, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(final, wanted_final, rtol=1e-4, atol=1e-5)
    if state:
        assert torch.equal(given["initial_state"], before)
    assert getattr(ours, name)(**given | dict(output_final_state=False))[1] is None


@every_kernel
def test_gates_at_their_ends(name):
    """Nothing is forgotten, everything is; nothing is written, everything is."""
    given = arguments(name, 8, True)
    given["g"][:, ::2], given["g"][:, 1::4] = 0.0, -60.0
    given["beta"][:, ::3], given["beta"][:, 1::3] = 0.0, 1.0
    out, final = getattr(ours, name)(**given)
    wanted_out, wanted_final = PAIRS[name](**given)
    torch.testing.assert_close(out, wanted_out, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(final, wanted_final, rtol=1e-4, atol=1e-5)


@every_kernel
def test_one_request_whose_channels_are_strided(name):
    """As the convolution of the models leaves them, [B, channels, S]; flattening copies nothing."""
    given = {
        n: x[:1] if isinstance(x, torch.Tensor) else x for n, x in arguments(name, 7, True).items()
    }
    strided = given | {
        n: given[n].permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
        for n in ("query", "key", "value")
    }
    assert strided["query"].stride(-1) != 1
    for wanted, got in zip(
        getattr(ours, name)(**given), getattr(ours, name)(**strided), strict=True
    ):
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)


@every_kernel
def test_packed_sequences(name):
    """Three sequences in one row, as each alone."""
    given = arguments(name, 30, True)
    flat = {n: x[:1] if isinstance(x, torch.Tensor) else x for n, x in given.items()}
    flat["initial_state"] = given["initial_state"]
    ends = [0, 11, 12, 30]
    packed, states = getattr(ours, name)(**flat, cu_seqlens=torch.tensor(ends))
    for i in range(3):
        part = {
            n: x[:, ends[i] : ends[i + 1]] if isinstance(x, torch.Tensor) else x
            for n, x in flat.items()
        }
        part["initial_state"] = given["initial_state"][i : i + 1]
        out, state = getattr(ours, name)(**part)
        torch.testing.assert_close(packed[:, ends[i] : ends[i + 1]], out, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(states[i : i + 1], state, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("activation", ["silu", None])
def test_convolutions_equal_those_of_that_name(activation):
    """A prompt, then a token on its last columns."""
    x, weight, bias = torch.randn(2, 9, 12).mT, torch.randn(12, 4), torch.randn(12)
    whole, step = CONVOLUTIONS.values()
    wanted = whole(x, weight, bias, activation)
    torch.testing.assert_close(ours.causal_conv1d_fn(x, weight, bias, activation), wanted)
    state = x[..., -4:].contiguous()
    theirs, token = state.clone(), torch.randn(2, 12, 1)
    wanted = step(token, theirs, weight, bias, activation)
    got = ours.causal_conv1d_update(token, state, weight, bias, activation)
    torch.testing.assert_close(got, wanted)
    assert torch.equal(state, theirs)


@pytest.mark.parametrize("name", PAIRS | CONVOLUTIONS)
def test_signature_is_the_one_that_is_replaced(name):
    """`kernels` compares the kinds of the parameters."""
    functions = PAIRS | CONVOLUTIONS
    (repository,) = ours.kernel_mapping(["npu"])[name].values()
    mine = inspect.signature(repository.load().forward).parameters.values()
    theirs = getattr(
        functions[name], "forward", functions[name]
    )  # a module, where `kernels` is installed
    wanted = inspect.signature(theirs).parameters.values()
    assert [(p.name, p.kind, p.default) for p in mine][1:] == [
        (p.name, p.kind, p.default) for p in wanted
    ]
    assert list(ours.kernel_mapping()[name]) == ["cuda", "npu"]


@pytest.mark.parametrize("make", [qwen3_next, qwen3_5, qwen3_5_moe], ids=lambda m: m.__name__)
def test_models_generate_the_same_tokens(make):
    kernels = pytest.importorskip("kernels", minversion="0.16")
    from transformers.integrations.hub_kernels import kernelize

    model, inputs = make(), ragged()
    expected = greedy(model, inputs)
    ops = "npu_chunk_gated_delta_rule", "npu_fused_sigmoid_gating_delta_rule_update"
    before = [log.calls[op, "reference"] for op in ops]
    mapping = ours.kernel_mapping(["cpu"])
    try:
        with kernels.use_kernel_mapping(mapping, inherit_mapping=False):
            kernelize(model)
        assert torch.equal(greedy(model, inputs), expected)
        after = [log.calls[op, "reference"] for op in ops]
        assert after == [before[0] + 3, before[1] + 3 * (NEW - 1)]
    finally:  # the functions are one for all models of their module
        with kernels.use_kernel_mapping({}, inherit_mapping=False):
            kernelize(model)
    assert torch.equal(greedy(model, inputs), expected)
    assert [log.calls[op, "reference"] for op in ops] == after


def test_kimi_linear_generates_the_same_tokens(monkeypatch):
    """Its functions replaced by name, where the package `kernels` need not be."""
    model, inputs = kimi_linear(), ragged()
    expected = greedy(model, inputs)
    ops = "npu_chunk_kda", "npu_fused_sigmoid_gating_delta_rule_update"
    before = [log.calls[op, "reference"] for op in ops]
    kimi = modeling_kimi_linear
    monkeypatch.setattr(kimi, "chunk_kimi_delta_attention", ours.chunk_kda)
    monkeypatch.setattr(kimi, "recurrent_kimi_delta_attention", ours.fused_recurrent_kda)
    assert torch.equal(greedy(model, inputs), expected)
    after = [log.calls[op, "reference"] for op in ops]
    assert after == [before[0] + 3, before[1] + 3 * (NEW - 1)]
