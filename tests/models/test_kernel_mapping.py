# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Our gated delta rule under Transformers' names of kernels: against its own functions, and in
whole models through the package `kernels`."""

from __future__ import annotations

import inspect
from itertools import pairwise

import pytest
import torch
from custom.dispatch import log

import custom

transformers = pytest.importorskip("transformers", minversion="5.17")

from transformers.models.kimi_linear import modeling_kimi_linear  # noqa: E402
from transformers.models.qwen3_next import modeling_qwen3_next  # noqa: E402

from custom.integrations import kernels as ours  # noqa: E402

from ..support.models import (  # noqa: E402
    NEW,
    greedy,
    kimi_linear,
    olmo_hybrid,
    qwen3_5,
    qwen3_5_moe,
    qwen3_next,
    qwen4_exp,
    ragged,
)

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
        q=torch.randn(B, tokens, N, K),
        k=torch.randn(B, tokens, N, K),
        v=torch.randn(B, tokens, N, V),
        g=-torch.rand(B, tokens, N, *channels),
        beta=torch.rand(B, tokens, N),
        initial_state=torch.randn(B, N, K, V) if state else None,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )


def theirs(name, given):
    """Of Transformers' function of that name, which calls q, k and v by whole words."""
    q, k, v = (given[n] for n in "qkv")
    return PAIRS[name](q, k, v, **{n: x for n, x in given.items() if n not in "qkv"})


@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("tokens", [1, 70])
@every_kernel
def test_equals_the_function_of_that_name(name, tokens, state):
    given = arguments(name, tokens, state)
    before = None if not state else given["initial_state"].clone()
    out, final = getattr(ours, name)(**given)
    wanted_out, wanted_final = theirs(name, given)
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
    wanted_out, wanted_final = theirs(name, given)
    torch.testing.assert_close(out, wanted_out, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(final, wanted_final, rtol=1e-4, atol=1e-5)


@every_kernel
def test_one_request_whose_channels_are_strided(name):
    """As the convolution of the models leaves them, [B, channels, S]; flattening copies nothing."""
    given = {
        n: x[:1] if isinstance(x, torch.Tensor) else x for n, x in arguments(name, 7, True).items()
    }
    strided = given | {
        n: given[n].permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2) for n in ("q", "k", "v")
    }
    assert strided["q"].stride(-1) != 1
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


def exactly(q, k, v, g, beta, initial_state=None, scale=None, l2norm=False, **_):
    """The rule in float64, a token at a time; g and beta as they act."""
    q, k, v, g, beta = (x.double() for x in (q, k, v, g, beta))
    if l2norm:
        q, k = (x / (x.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    groups = v.shape[2] // q.shape[2]
    q, k = (x.repeat_interleave(groups, 2) for x in (q, k))
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    g = g if g.ndim == 4 else g[..., None]
    state = q.new_zeros(*q.shape[:1], *q.shape[2:], v.shape[-1])
    if initial_state is not None:
        state = initial_state.double()
    out = torch.empty_like(v)
    for t in range(q.shape[1]):
        state = state * g[:, t, :, :, None].exp()
        delta = beta[:, t, :, None] * (v[:, t] - torch.einsum("bnk,bnkv->bnv", k[:, t], state))
        state = state + k[:, t, :, :, None] * delta[:, :, None]
        out[:, t] = torch.einsum("bnk,bnkv->bnv", q[:, t], state)
    return out, state


def grouped(name, B, T):
    """Three value heads a query head, rates from 0 to 2, decays that keep all, nothing or grow."""
    channels = (16,) if name.endswith("kda") else ()
    g = -torch.rand(B, T, 6, *channels)
    g[:, ::3], g[:, 1::4] = 0.0, -60.0
    if name.startswith("fused_recurrent"):
        g[:, 2::5] = 1.5
    beta = torch.rand(B, T, 6) * 2
    beta[..., 0], beta[..., 1] = 2.0, 0.0
    q, k, v = torch.randn(B, T, 2, 16), torch.randn(B, T, 2, 16), torch.randn(B, T, 6, 24)
    return dict(q=q, k=torch.nn.functional.normalize(k, dim=-1), v=v, g=g, beta=beta)


def only_what_takes_float32(name, backend):
    if backend != "reference" and name.startswith("chunk"):
        pytest.skip("a kernel for prompts takes 16 bits")


def close(got, wanted):
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("l2norm", [False, True])
@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize("tokens", [1, 6])
@every_kernel
def test_every_rate_and_scale(name, tokens, scale, l2norm, device, backend):
    """OLMo-Hybrid's rate is twice a sigmoid."""
    only_what_takes_float32(name, backend)
    given = {n: x.to(device) for n, x in grouped(name, 2, tokens).items()} | dict(scale=scale)
    options = dict(use_qk_l2norm_in_kernel=l2norm, output_final_state=True)
    for state in (None, torch.randn(2, 6, 16, 24).to(device)):
        wanted = exactly(**given, initial_state=state, l2norm=l2norm)
        close(getattr(ours, name)(**given, initial_state=state, **options), wanted)
    got = getattr(ours, name)(**given, initial_state=state.mT, state_v_first=True, **options)
    close((got[0], got[1].mT), wanted)


@every_kernel
def test_a_rate_and_a_gate_that_are_made_inside(name):
    kda, given = name.endswith("kda"), grouped(name, 2, 5)
    A_log, dt_bias = torch.randn(6), torch.randn(96 if kda else 6)
    given |= dict(g=torch.randn_like(given["g"]), beta=torch.randn_like(given["beta"]))
    gate = dict(use_gate_in_kernel=True, A_log=A_log, dt_bias=dt_bias)
    gates = [gate, gate | dict(dt_bias=None)]
    if kda:
        bounded = gate | dict(lower_bound=-5.0, safe_gate=True)
        gates += [bounded, bounded | dict(A_log=None)]
    for each in gates:
        slope, bias = (x.double() if x is not None else x for x in (each["A_log"], each["dt_bias"]))
        g = given["g"].double()
        g = g if bias is None else g + bias.view(g.shape[2:])
        slope = 1.0 if slope is None else slope.exp().view(-1, 1) if kda else slope.exp()
        softplus = torch.nn.functional.softplus
        g = -5.0 * (slope * g).sigmoid() if "lower_bound" in each else -slope * softplus(g)
        for doubled in (False, True):
            wanted = exactly(**given | dict(g=g, beta=given["beta"].sigmoid() * (1 + doubled)))
            got = getattr(ours, name)(
                **given,
                **each,
                output_final_state=True,
                use_beta_sigmoid_in_kernel=True,
                allow_neg_eigval=doubled,
            )
            close(got, wanted)


@every_kernel
def test_packed_sequences_with_tokens_around_them(name, device, backend):
    """Prefix sums that begin behind 0, an empty sequence, and tokens of none at the end."""
    only_what_takes_float32(name, backend)
    given = {n: x.to(device) for n, x in grouped(name, 1, 14).items()}
    state, ends = torch.randn(3, 6, 16, 24).to(device), [2, 7, 7, 12]
    sums = torch.tensor(ends, device=device)
    got = getattr(ours, name)(
        **given, initial_state=state, output_final_state=True, cu_seqlens=sums
    )
    for i, (a, b) in enumerate(pairwise(ends)):
        part = {n: x[:, a:b] for n, x in given.items()}
        close((got[0][:, a:b], got[1][i : i + 1]), exactly(**part, initial_state=state[i : i + 1]))


def test_a_decay_by_channel_beside_that_of_a_head():
    given, gk = grouped("fused_recurrent", 2, 6), -torch.rand(2, 6, 6, 16)
    got = ours.fused_recurrent_gated_delta_rule(**given, gk=gk, output_final_state=True)
    close(got, exactly(**given | dict(g=given["g"][..., None] + gk)))
    nothing = {n: x for n, x in given.items() if n not in ("g", "beta")}
    got = ours.fused_recurrent_gated_delta_rule(**nothing, output_final_state=True)
    close(got, exactly(**nothing, g=torch.zeros(2, 6, 6), beta=torch.ones(2, 6, 6)))


@pytest.mark.parametrize(
    "options, error, message",
    [
        (dict(scal=0.5), TypeError, "`scal` is no argument of it. The nearest is `scale`"),
        (dict(query=None), TypeError, "`query` is no argument of it. The nearest is `"),
        (dict(head_first=True), custom.NotSupported, r"`head_first` is True. Pass .*\[B, S"),
        (dict(gv=torch.ones(1)), custom.NotSupported, "`gv` is given. A decay by channel of"),
        (dict(graph_mode="auto"), custom.NotSupported, "`graph_mode` is 'auto'. .*capture"),
        (dict(is_causal=False), custom.NotSupported, "`is_causal` is False. .* causal"),
        (dict(seq_idx=torch.zeros(1, 5)), custom.NotSupported, "`seq_idx` is given. .*cu_seqlens"),
        (dict(position_ids=torch.zeros(1, 5)), custom.NotSupported, "`position_ids` is given"),
        (dict(A_log=torch.ones(6)), ValueError, "`A_log` is given and `use_gate_in_kernel` is Fa"),
        (dict(use_gate_in_kernel=True), ValueError, "`A_log` is None and `use_gate_in_kernel` is "),
        (dict(allow_neg_eigval=True), ValueError, "`allow_neg_eigval` is True and `use_beta_sig"),
        (dict(cu_seqlens=torch.tensor([0, 5])), ValueError, "`q` has 2 rows and `cu_seqlens` is"),
    ],
)
@every_kernel
def test_what_does_not_act_is_refused_by_name(name, options, error, message):
    given = grouped(name, 2, 5)
    with pytest.raises(error, match=f"^{name}: {message}"):
        getattr(ours, name)(**given, **options)


@every_kernel
def test_hints_and_what_transformers_hands_along_change_nothing(name):
    given = grouped(name, 1, 5)
    wanted = getattr(ours, name)(**given)[0]
    hints = dict.fromkeys(ours.HINTS | ours.UNREAD | {"video_cu_seqlens"}, 64)
    nothing = {n: n == "is_causal" or None for n in ours.REFUSED}
    assert torch.equal(getattr(ours, name)(**given, **hints, **nothing)[0], wanted)
    packed = dict(cu_seq_lens_q=torch.tensor([0, 5]), seq_idx=torch.zeros(1, 5).int())
    assert torch.equal(getattr(ours, name)(**given, **packed)[0], wanted)


def test_convolutions_refuse_by_name():
    x, weight = torch.randn(1, 12, 9), torch.randn(12, 4)
    for options, error, message in (
        (dict(bais=weight), TypeError, "`bais` is no argument of it. The nearest is `bias`"),
        (dict(cu_seq_lens_q=torch.tensor([0, 6])), custom.NotSupported, ".* at 6, .* 1 x 9 tok"),
    ):
        with pytest.raises(error, match=f"^causal_conv1d_fn: {message}"):
            ours.causal_conv1d_fn(x, weight, **options)
    packed = dict(seq_idx=torch.tensor([[0] * 4 + [1] * 5]), cu_seq_lens_q=torch.tensor([0, 4, 9]))
    for given in (packed, dict(cu_seq_lens_q=packed["cu_seq_lens_q"])):
        got = ours.causal_conv1d_fn(x, weight, **given, max_length_q=5, image_position_ids=x)
        for part in (slice(0, 4), slice(4, 9)):
            alone = ours.causal_conv1d_fn(x[..., part], weight)
            torch.testing.assert_close(got[..., part], alone)


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


@pytest.mark.parametrize(
    "make", [qwen3_next, qwen3_5, qwen3_5_moe, qwen4_exp, olmo_hybrid], ids=lambda m: m.__name__
)
def test_models_generate_the_same_tokens(make):
    kernels = pytest.importorskip("kernels", minversion="0.16")
    from transformers.integrations.hub_kernels import kernelize

    model, inputs = make(), ragged()
    expected = greedy(model, inputs)
    ops = "npu_chunk_gated_delta_rule", "npu_recurrent_gated_delta_rule"
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
    ops = "npu_chunk_kda", "npu_recurrent_gated_delta_rule"
    before = [log.calls[op, "reference"] for op in ops]
    kimi = modeling_kimi_linear
    monkeypatch.setattr(kimi, "chunk_kimi_delta_attention", ours.chunk_kda)
    monkeypatch.setattr(kimi, "recurrent_kimi_delta_attention", ours.fused_recurrent_kda)
    assert torch.equal(greedy(model, inputs), expected)
    after = [log.calls[op, "reference"] for op in ops]
    assert after == [before[0] + 3, before[1] + 3 * (NEW - 1)]
