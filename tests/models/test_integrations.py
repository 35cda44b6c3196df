# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Hugging Face models on our ops: the same tokens, and their own code back afterwards."""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from custom.dispatch import log
from torch.utils._python_dispatch import TorchDispatchMode

import custom
from custom.integrations import masks
from custom.integrations.paged import PagedCaches, token_positions

transformers = pytest.importorskip("transformers", minversion="5.17")

from custom.integrations.drafts import verification  # noqa: E402
from custom.integrations.transformers import sparse_attention_weights, use  # noqa: E402

from ..support.kernels import capturing  # noqa: E402
from ..support.models import (  # noqa: E402
    NEW,
    SHARING,
    YARN,
    bailing_hybrid,
    compiled_greedy,
    deepseek,
    deepseek_v4,
    glm,
    glm5_next,
    greedy,
    kimi_linear,
    linear_layers,
    olmo_hybrid,
    qwen3_5,
    qwen3_5_moe,
    qwen3_next,
    qwen4_exp,
    ragged,
)


def ran(*ops):
    return [log.calls[op, "reference"] for op in ops]


OPS = {
    "whole": "npu_sparse_attention_pto",
    "selecting": "npu_sparse_attention_indices_pto",
    "shared": "npu_sparse_attention_shared_pto",
}
SPARSE = {
    "deepseek": (deepseek, dict(whole=3)),
    "glm": (glm, dict(whole=3)),
    "glm that shares": (lambda **c: glm(**SHARING | c), dict(selecting=2, shared=3)),
}


@pytest.mark.parametrize("weight_format", ["nz", "linear"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", SPARSE)
def test_sparse_attention_generates_the_same_tokens(name, attention, weight_format):
    make, layers = SPARSE[name]
    model, inputs = make(attn_implementation=attention), ragged()
    own = type(model.model.layers[0].self_attn).forward
    expected = greedy(model, inputs)
    before = ran(*OPS.values())
    with use(weight_format=weight_format, page_size=16):
        assert torch.equal(greedy(model, inputs), expected)
    after = [n + layers.get(kind, 0) * NEW for kind, n in zip(OPS, before, strict=True)]
    assert ran(*OPS.values()) == after
    assert type(model.model.layers[0].self_attn).forward is own
    assert torch.equal(greedy(model, inputs), expected)
    assert ran(*OPS.values()) == after


def test_deepseek_with_yarn():
    model, inputs = deepseek(rope_parameters=YARN), ragged()
    attention = model.model.layers[0].self_attn
    scale = sparse_attention_weights(attention).options["softmax_scale"]
    assert scale == pytest.approx(32**-0.5 * 1.3688879**2, rel=1e-6)
    expected = greedy(model, inputs)
    with use():
        assert torch.equal(greedy(model, inputs), expected)


def test_deepseek_verifies_and_crops_drafts():
    """Prompt lookup feeds several tokens a step, and crops the rejected ones off the cache."""
    model = deepseek()
    inputs = dict(input_ids=torch.randint(1, 128, (1, 8)).repeat(1, 3))
    expected = greedy(model, inputs)
    with use(page_size=16):
        assert torch.equal(greedy(model, inputs, prompt_lookup_num_tokens=3), expected)


@pytest.mark.parametrize("name", SPARSE)
def test_sparse_attention_without_a_cache(name):
    model, inputs = SPARSE[name][0](), ragged()
    there = inputs["attention_mask"].bool()
    with torch.inference_mode():
        expected = model(**inputs, use_cache=False).logits[there]
        with use():
            got = model(**inputs, use_cache=False).logits[there]
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


PADDINGS = {  # of three requests of 15 columns
    "right": [[1] * 15, [1] * 9 + [0] * 6, [1] + [0] * 14],
    "inside": [[1] * 15, [1] * 4 + [0] * 5 + [1] * 6, [0] * 2 + [1] * 5 + [0] * 8],
    "one is empty": [[1] * 15, [0] * 15, [1] * 9 + [0] * 6],
}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("name", SPARSE)
@torch.inference_mode()
def test_padding_that_is_not_on_the_left(name, padding, attention):
    """Without a cache, and as prompts of which some end early: two more steps go on from them, of
    several tokens and of one, with padding in them too."""
    model = SPARSE[name][0](attn_implementation=attention)
    mask = torch.tensor(PADDINGS[padding])
    more = torch.tensor([[1, 1, 1], [0, 1, 0], [1, 0, 1]])
    whole = torch.cat([mask, more, torch.ones(3, 1, dtype=torch.long)], 1)
    ids, position = torch.randint(1, 128, whole.shape), (whole.cumsum(-1) - 1).clamp(min=0)

    def steps():
        yield model(
            ids[:, :15], attention_mask=mask, position_ids=position[:, :15], use_cache=False
        ).logits
        cache = None
        for a, b in ((0, 15), (15, 18), (18, 19)):
            out = model(
                ids[:, a:b],
                attention_mask=whole[:, :b],
                position_ids=position[:, a:b],
                past_key_values=cache,
                use_cache=True,
            )
            cache = out.past_key_values
            yield out.logits

    expected = list(steps())
    with use(page_size=16):
        got = list(steps())
    there = [whole[:, a:b].bool() for a, b in ((0, 15), (0, 15), (15, 18), (18, 19))]
    for ours, theirs, tokens in zip(got, expected, there, strict=True):
        torch.testing.assert_close(ours[tokens], theirs[tokens], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", SPARSE)
@torch.inference_mode()
def test_documents_packed_in_a_row(name, attention):
    """By position_ids alone, and by a mask under which they take turns."""
    model, ids = SPARSE[name][0](attn_implementation=attention), torch.randint(1, 128, (2, 20))
    ends = [[0, 1, 9, 20], [0, 7, 13, 20]]
    position = torch.stack([torch.cat([torch.arange(b - a) for a, b in pairwise(e)]) for e in ends])
    packed = dict(position_ids=position, use_cache=False)
    mine = torch.arange(20) % 3
    turns = (mine[:, None] == mine) & torch.ones(20, 20, dtype=torch.bool).tril()
    if attention == "eager":
        turns = torch.zeros(20, 20).masked_fill(~turns, -torch.inf)
    taking_turns = dict(attention_mask=turns.expand(2, 1, -1, -1), use_cache=False)
    expected = [model(ids, **each).logits for each in (packed, taking_turns)]
    with use(page_size=16):
        got = [model(ids, **each).logits for each in (packed, taking_turns)]
        part = model(ids[1:, 7:13], use_cache=False).logits
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got[0][1:, 7:13], part, rtol=1e-5, atol=1e-5)


def square(change):
    mask = torch.ones(9, 9, dtype=torch.bool).tril()[None, None].clone()
    change(mask[0, 0])
    return dict(attention_mask=mask, use_cache=False)


@pytest.mark.parametrize(
    "inputs, message",
    [
        (square(lambda m: m[5:, 2:4].fill_(False)), "hides other keys. Choose attn_impl"),
        (square(lambda m: m[:2, :4].fill_(True)), "hides other keys"),  # a prefix, both ways
        (square(lambda m: m.copy_(m & ~m.tril(-3))), "hides other keys"),  # a window
        (square(lambda m: m[4, 4].fill_(False)), "hides other keys"),  # not itself, but others do
        (dict(attention_mask=torch.full((1, 1, 9, 9), -0.5).tril()), "adds a bias to scores"),
        (
            square(lambda m: m[4:, :4].fill_(False)) | dict(use_cache=True),
            "without a cache, and `cache` is given. Pass use_cache=False",
        ),
        (dict(output_attentions=True), "`output_attentions` is True. Leave it out"),
    ],
)
@torch.inference_mode()
def test_other_masks_and_outputs_are_refused(inputs, message):
    model = deepseek()
    with use(), pytest.raises(custom.NotSupported, match=message) as info:
        model(torch.randint(1, 128, (1, 9)), **inputs)
    assert "\n" not in str(info.value)


@pytest.mark.parametrize(
    "mask, came", [(None, "a NoneType"), (torch.ones(1, 4), r"a tensor \[1, 4\]"), ({}, "a dict")]
)
@torch.inference_mode()
def test_a_mask_that_says_not_what_each_token_sees_is_refused(mask, came):
    model, x = deepseek(), torch.randn(1, 4, 64)
    turned = model.model.rotary_emb(x, torch.arange(4)[None])
    message = rf"reads a mask \[1, 1, 4, 4\], and `attention_mask` of this layer is {came}"
    with use(), pytest.raises(custom.NotSupported, match=message):
        model.model.layers[0].self_attn(x, position_embeddings=turned, attention_mask=mask)


@pytest.mark.parametrize("mask", ["left", "holes", "right", "bias"])
@torch.inference_mode()
def test_a_mask_that_a_graph_may_not_read_gives_nan_where_it_is_another(mask, monkeypatch):
    """As while a graph is captured."""
    monkeypatch.setattr(masks, "_may_wait", lambda x: False)
    monkeypatch.setattr(masks, "_AT_ONCE", 10)  # and row by row
    model, ids = deepseek(), torch.randint(1, 128, (2, 6))
    seen = torch.ones(2, 1, 6, 6, dtype=torch.bool).tril()
    seen[1, ..., :2] = False
    expected = model(ids, attention_mask=seen, use_cache=False).logits
    if mask == "holes":
        seen[0, :, 4:, 2] = False
    elif mask == "right":
        seen[0, ..., 5:] = False
    elif mask == "bias":
        seen = torch.zeros(2, 1, 6, 6).masked_fill(~seen, -torch.inf)
        seen[0, 0, 3, 1] = -0.5
    with use():
        got = model(ids, attention_mask=seen, use_cache=False).logits
    if mask == "left":
        torch.testing.assert_close(got[0], expected[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(got[1, 2:], expected[1, 2:], rtol=1e-5, atol=1e-5)
    else:
        assert got[0].isnan().all()


@torch.inference_mode()
def test_masks_in_parts_say_the_same(monkeypatch):
    model, ids = deepseek(), torch.randint(1, 128, (1, 15))
    packed = dict(position_ids=torch.tensor([[*range(9), *range(6)]]), use_cache=False)
    expected = model(ids, **packed).logits
    monkeypatch.setattr(masks, "_AT_ONCE", 40)
    with use():
        torch.testing.assert_close(model(ids, **packed).logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", SPARSE)
@torch.inference_mode()
def test_a_decode_step_in_a_graph(name, device):
    """Nobody waits for the device in it."""
    if device.type != "cuda":
        pytest.skip("needs a GPU")
    model = SPARSE[name][0](first_k_dense_replace=5).to(device, torch.bfloat16)
    ids = torch.randint(1, 128, (2, 9), device=device)
    with use(page_size=16):
        eager = model(ids, use_cache=True)
        whole = model(ids, use_cache=True).past_key_values
        token = eager.logits[:, -1:].argmax(-1)
        wanted = model(token, past_key_values=eager.past_key_values).logits
        kinds = {*model.config.layer_types}
        seen = torch.ones(2, 1, 1, 10, dtype=torch.bool, device=device)
        step = dict(
            attention_mask=dict.fromkeys(kinds, seen),
            past_key_values=whole,
            position_ids=torch.full((2, 1), 9, device=device),
        )
        before = [(layer.tokens, layer.valid) for layer in whole.layers]
        model(token, **step)  # compiles
        for layer, (tokens, valid) in zip(whole.layers, before, strict=True):
            layer.tokens, layer.valid = tokens, valid
        graph = torch.cuda.CUDAGraph()
        with capturing(graph, device):
            got = model(token, **step).logits
        graph.replay()
        torch.testing.assert_close(got, wanted, rtol=2e-2, atol=2e-2)
        seen[1, ..., 3] = False
        graph.replay()
        assert got.isnan().all()


def test_dropout_is_refused():
    model = deepseek(attention_dropout=0.1)
    with torch.no_grad(), use():
        model(torch.ones(1, 4, dtype=torch.long))
        with pytest.raises(custom.NotSupported, match=r"attention_dropout=0.1. Call model.eval"):
            model.train()(torch.ones(1, 4, dtype=torch.long))


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("make", [deepseek, glm])
@torch.inference_mode()
def test_a_few_index_heads(make, heads):
    """NZ would pad them to a tile of 8: they stay row-major."""
    inputs = ragged((15, 4))
    there = inputs["attention_mask"].bool()
    model = make(index_n_heads=heads, index_topk=15)
    expected = model(**inputs).logits[there]
    with use():
        got = model(**inputs).logits[there]
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    # few heads often have the same score, 0: which of those keys is selected is nobody's mistake
    model, each = make(index_n_heads=heads), []
    for weight_format in ("nz", "linear"):
        w = sparse_attention_weights(model.model.layers[0].self_attn, weight_format)
        assert w.idx_proj.ndim == 2 and w.idx_qb.ndim == (4 if weight_format == "nz" else 2)
        with use(weight_format=weight_format):
            each.append(model(**inputs).logits[there])
    torch.testing.assert_close(*each, rtol=1e-6, atol=1e-6)


QWEN = dict(
    prompt=["npu_causal_conv1d", "npu_chunk_gated_delta_rule", "npu_gated_rms_norm"],
    token=["npu_gated_delta_layer_decode"],
    drafts=["npu_causal_conv1d", "npu_recurrent_gated_delta_rule", "npu_gated_rms_norm"],
)
KIMI = dict(
    prompt=["npu_causal_conv1d", "npu_chunk_kda", "npu_gated_rms_norm"],
    token=["npu_gated_delta_layer_decode"],
    drafts=QWEN["drafts"],
)
# what a layer calls, in this order
QWENS = dict.fromkeys((qwen3_next, qwen3_5, qwen3_5_moe, olmo_hybrid), QWEN)
LINEAR = QWENS | {kimi_linear: KIMI, glm5_next: KIMI, qwen4_exp: QWEN}
if hasattr(transformers, "BailingHybridConfig"):  # since 5.24
    LINEAR[bailing_hybrid] = KIMI
# what a layer calls that is not linear, of one
BESIDE = {
    glm5_next: [
        *("npu_mla_prolog_pto", "npu_compressor"),
        *("npu_lightning_indexer", "npu_sparse_flash_attention"),
    ],
    qwen4_exp: ["npu_compressor", "npu_lightning_indexer", "npu_sparse_attention_score"],
    kimi_linear: ["npu_mla_prolog_pto", "npu_fused_infer_attention_score_v2"],
    bailing_hybrid: ["npu_mla_prolog_pto", "npu_fused_infer_attention_score_v2"],
}
every_linear_model = pytest.mark.parametrize("make", LINEAR, ids=lambda make: make.__name__)
# the others' own code does not keep documents of a row apart
linear_models = pytest.mark.parametrize(
    "make", [*QWENS, kimi_linear], ids=lambda make: make.__name__
)


@pytest.mark.parametrize("lengths", [(30, 21, 5), (30,)], ids=["ragged", "one request"])
@every_linear_model
def test_linear_attention_generates_the_same_tokens(make, lengths):
    model, inputs = make(), ragged(lengths)
    own = type(linear_layers(model)[0]).forward
    expected = greedy(model, inputs)
    before, calls = log.calls.copy(), Counter()
    for kind, times in (("prompt", 1), ("token", NEW - 1)):
        calls.update({(op, "reference"): 3 * times for op in LINEAR[make][kind]})
        calls.update({(op, "reference"): times for op in BESIDE.get(make, ())})
    with use():
        assert torch.equal(greedy(model, inputs), expected)
    assert log.calls - before == calls
    assert type(linear_layers(model)[0]).forward is own
    assert torch.equal(greedy(model, inputs), expected)
    assert log.calls - before == calls


class Computed(TorchDispatchMode):
    """What a layer calls: our ops in their order, and those of torch that compute something."""

    ARITHMETIC = (
        *("convolution", "silu", "mean", "pow", "rsqrt", "sqrt", "div"),
        *("sum", "linalg_vector_norm", "exp", "log", "log1p", "softplus"),
    )

    def __init__(self, layer):
        super().__init__()
        layer.register_forward_pre_hook(lambda *_: self.__enter__() and None)
        layer.register_forward_hook(lambda *_: self.__exit__(None, None, None))

    def __enter__(self):
        self.ours, self.others = [], set()
        return super().__enter__()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        name = op.overloadpacket.__name__
        if op.namespace == "custom":
            self.ours.append(name)
        elif name in self.ARITHMETIC:
            self.others.add(name)
        return op(*args, **kwargs or {})


@every_linear_model
def test_every_part_of_a_linear_layer_is_ours(make):
    """Beside projections and the rate's sigmoid, torch computes the gate of a decay and the norm of
    queries and keys, where the op takes both made."""
    model, ids = make(), torch.randint(1, 128, (2, 12))
    layer = Computed(linear_layers(model)[0])
    ops, made = LINEAR[make], {"exp", "softplus", "rsqrt", "linalg_vector_norm"}
    with torch.no_grad():  # which shows the parts of composite functions
        model(ids)
        assert not layer.ours and layer.others >= {"convolution", "silu", "mean", "exp"}
        with use():
            cache = model(ids[:, :9], use_cache=True).past_key_values
            assert layer.ours == ops["prompt"]
            assert layer.others == (set() if ops is KIMI else made)
            model(ids[:, 9:10], past_key_values=cache)
            assert layer.ours == ops["token"] and not layer.others
            with verification(cache) as step:
                model(ids[:, 10:], past_key_values=cache)
                step.keep(1)
            bounded = ops is KIMI and make is not kimi_linear
            assert layer.ours == ops["drafts"]
            assert layer.others == made - ({"softplus"} if bounded else set())


@linear_models
def test_linear_attention_continues_a_prompt(make):
    """Several tokens on a state that is not zero; and a cache that both kinds of code share, unless
    it has pages."""
    model, ids = make(), torch.randint(1, 128, (2, 40))
    with torch.inference_mode():
        expected = model(ids, use_cache=False).logits
        with use():
            alone = model(ids, use_cache=False).logits
            cache = model(ids[:, :17], use_cache=True).past_key_values
            second = model(ids[:, 17:30], past_key_values=cache).logits
            if make in BESIDE:
                third = model(ids[:, 30:], past_key_values=cache).logits
        if make not in BESIDE:
            third = model(ids[:, 30:], past_key_values=cache).logits
    torch.testing.assert_close(alone, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(second, expected[:, 17:30], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(third, expected[:, 30:], rtol=1e-5, atol=1e-5)


@linear_models
def test_linear_attention_has_the_gradients_of_the_model_s_own(make):
    model, inputs = make(), ragged()
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)

    def gradients():
        model.zero_grad()
        model(**inputs, labels=labels, use_cache=False).loss.backward()
        return {name: each.grad for name, each in model.named_parameters()}

    expected, before = gradients(), log.calls.copy()
    with use():
        got = gradients()
    prompt = LINEAR[make]["prompt"]
    calls = {(op + kind, "reference"): 3 for op in prompt for kind in ("", "_grad")}
    assert log.calls - before == Counter(calls)
    for name, grad in expected.items():
        error = (got[name] - grad).norm()
        print(name, float(error / grad.norm()))


@every_linear_model
def test_drafts_that_were_refused_leave_nothing(make):
    """Of steps of three tokens 1, 3, 2 and all of one are kept; a plain step goes on from there."""
    model, ids = make(), torch.randint(1, 128, (2, 30))
    op = "npu_recurrent_gated_delta_rule"
    (before,) = ran(op)
    with torch.inference_mode():
        expected = model(ids, use_cache=False).logits
        with use():
            cache, at = model(ids[:, :17], use_cache=True).past_key_values, 17
            for fed, count in ((3, 1), (3, 3), (3, 2), (1, 1)):
                wrong = torch.randint(1, 128, (2, fed - count))
                tokens = torch.cat([ids[:, at : at + count], wrong], 1)
                with verification(cache) as step:
                    logits = model(tokens, past_key_values=cache).logits[:, :count]
                    step.keep(count)
                torch.testing.assert_close(
                    logits, expected[:, at : at + count], rtol=1e-5, atol=1e-5
                )
                at += count
            assert ran(op) == [before + 4 * 3]
            last = model(ids[:, at : at + 1], past_key_values=cache).logits
            assert ran(op) == [before + 4 * 3]
    torch.testing.assert_close(last, expected[:, at : at + 1], rtol=1e-5, atol=1e-5)


def test_errors_of_verification():
    model, ids = qwen3_5(), torch.randint(1, 128, (1, 9))
    with torch.inference_mode(), use():
        cache = model(ids, use_cache=True).past_key_values
        with verification(cache) as step:
            with pytest.raises(ValueError, match="keep: count=1, expected 1 to 0"):
                step.keep(1)
            model(ids[:, :2], past_key_values=cache)
            with pytest.raises(ValueError, match="count=3, expected 1 to 2"):
                step.keep(3)
            with pytest.raises(RuntimeError, match="in force already"), verification(cache):
                pass
            step.keep(2)
        empty = transformers.DynamicCache(config=model.config)
        with pytest.raises(custom.NotSupported, match="the cache is empty"), verification(empty):
            pass
        with verification(cache) as step:
            model(ids[:, :1], past_key_values=cache)
            step.keep(1)


DENSE = {  # without the experts, which Transformers loops over
    "qwen3_5": qwen3_5,
    "qwen3_next": lambda: qwen3_next(mlp_only_layers=[0, 1, 2, 3]),
    "kimi_linear": lambda: kimi_linear(mlp_layer_types=["dense"] * 4),
}


@pytest.mark.parametrize("name", DENSE)
def test_the_decode_step_of_linear_attention_compiles_once(name):
    model, inputs = DENSE[name](), ragged()
    expected = greedy(model, inputs)
    with use():
        tokens, graphs = compiled_greedy(model, inputs)
    assert torch.equal(tokens, expected[:, inputs["input_ids"].shape[1] :])
    assert len(graphs) == 1
    calls = [str(n.target) for n in graphs[0].graph.nodes if n.op == "call_function"]
    ours = [call.split(".")[1] for call in calls if call.startswith("custom.")]
    assert ours == 3 * (KIMI if name == "kimi_linear" else QWEN)["token"]


def test_nested_use_is_refused_and_leaves_the_outer_one():
    model, inputs = deepseek(), ragged()
    own = type(model.model.layers[0].self_attn).forward
    with use():
        ours = type(model.model.layers[0].self_attn).forward
        with pytest.raises(RuntimeError, match="already"), use():
            pass
        assert type(model.model.layers[0].self_attn).forward is ours is not own
    expected = greedy(model, inputs)
    with use():  # possible again
        assert torch.equal(greedy(model, inputs), expected)


def test_use_is_undone_after_an_error():
    model = deepseek()
    own = type(model.model.layers[0].self_attn).forward
    with pytest.raises(KeyError), use():
        raise KeyError
    assert type(model.model.layers[0].self_attn).forward is own


def test_what_the_paged_cache_cannot_do_is_refused():
    model, inputs = deepseek(), ragged()
    with torch.inference_mode():
        cache = model(**inputs, use_cache=True).past_key_values
    with pytest.raises(custom.NotSupported, match="30 tokens"), use(), torch.inference_mode():
        model(torch.ones(3, 1, dtype=torch.long), past_key_values=cache)
    with pytest.raises(custom.NotSupported, match="beam search"), use():
        greedy(model, inputs, num_beams=2)


def test_an_attention_with_bias_is_refused():
    model = deepseek(attention_bias=True)
    with pytest.raises(custom.NotSupported, match="attention_bias=True"):
        sparse_attention_weights(model.model.layers[0].self_attn)


def test_a_module_that_is_no_attention_of_the_model_is_refused():
    layer = deepseek().model.layers[0]
    for module in (layer, layer.mlp, None):
        with pytest.raises(TypeError, match=f"is of type {type(module).__name__}, .*self_attn"):
            sparse_attention_weights(module)


def test_gradients_are_refused():
    model, inputs = deepseek(), ragged()
    with pytest.raises(RuntimeError, match="requires grad"), use():
        model(**inputs)


def alone(model, ids, ends, **options):
    """Of each document of a row by itself."""
    parts = [model(ids[:, a:b], use_cache=False).logits for a, b in pairwise(ends)]
    return torch.cat(parts, 1)


PACKED = {
    "position_ids": lambda ends: dict(
        position_ids=torch.cat([torch.arange(b - a) for a, b in pairwise(ends)])[None]
    ),
    "cu_seq_lens": lambda ends: dict(
        PACKED["position_ids"](ends),
        cu_seq_lens_q=torch.tensor(ends, dtype=torch.int32),
        cu_seq_lens_k=torch.tensor(ends, dtype=torch.int32),
        max_length_q=ends[-1],
        max_length_k=ends[-1],
    ),
    "seq_idx": lambda ends: dict(
        PACKED["position_ids"](ends),
        seq_idx=torch.cat([torch.full((b - a,), i) for i, (a, b) in enumerate(pairwise(ends))])[
            None
        ].int(),
    ),
}


@pytest.mark.parametrize("packing", PACKED)
@linear_models
@torch.no_grad()
def test_linear_attention_keeps_documents_apart(make, packing):
    """Neither the convolution nor the state goes on from a document to the next."""
    model, ids, ends = make(), torch.randint(1, 128, (1, 90)), [0, 2, 3, 70, 90]
    packed = PACKED[packing](ends)
    with use():
        wanted = alone(model, ids, ends)
        got = model(ids, use_cache=False, **packed).logits
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_a_mask_of_ones_does_not_join_documents():
    model, ids = qwen3_next(layer_types=["linear_attention"] * 4), torch.randint(1, 128, (1, 9))
    packed = PACKED["position_ids"]([0, 4, 9]) | dict(attention_mask=torch.ones(1, 9).long())
    with use():
        got = model(ids, use_cache=False, **packed).logits
        torch.testing.assert_close(got, alone(model, ids, [0, 4, 9]), rtol=1e-5, atol=1e-5)


@linear_models
@torch.no_grad()
def test_positions_of_one_row_are_those_of_every_row(make):
    """Transformers takes them unexpanded."""
    model, ids, ends = make(), torch.randint(1, 128, (2, 20)), [0, 7, 20]
    with use():
        wanted = alone(model, ids, ends)
        got = model(ids, use_cache=False, **PACKED["position_ids"](ends)).logits
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


@linear_models
@torch.no_grad()
def test_positions_that_jump_beside_a_cache_are_of_one_text(make):
    """The models' own code does not look for documents there."""
    model, ids = make(), torch.randint(1, 128, (2, 9))
    given = dict(position_ids=torch.tensor([[0, 1, 2, 3, 7, 8, 9, 20, 21]]), use_cache=True)
    wanted = model(ids, **given).logits
    with use():
        torch.testing.assert_close(model(ids, **given).logits, wanted, rtol=1e-5, atol=1e-5)


@linear_models
@torch.no_grad()
def test_a_forward_without_positions_is_one_graph(make):
    model, ids = make(), torch.randint(1, 128, (2, 9))
    wanted = model(ids, use_cache=False).logits
    torch._dynamo.reset()
    with use():
        compiled = torch.compile(model.forward, fullgraph=True, backend="eager")
        got = compiled(ids, use_cache=False).logits
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


@linear_models
def test_rows_of_documents_have_the_gradients_of_each_alone(make):
    """Two rows, one of which has a single document; gradients recomputed by checkpoints too."""
    model, ids = make(), torch.randint(1, 128, (2, 30))
    position = torch.stack([torch.arange(30), torch.cat([torch.arange(11), torch.arange(19)])])
    weights = torch.randn(2, 30, 128)

    def gradients(logits):
        model.zero_grad()
        (logits * weights).sum().backward()
        return {name: each.grad.clone() for name, each in model.named_parameters()}

    parts = (slice(0, 1), slice(0, 30)), (slice(1, 2), slice(0, 11)), (slice(1, 2), slice(11, 30))
    one, *two = [model(ids[part], use_cache=False).logits for part in parts]
    wanted = gradients(torch.cat([one, torch.cat(two, 1)]))
    with use():
        for recomputed in (False, True):
            if recomputed:
                model.train().gradient_checkpointing_enable()
            got = gradients(model(ids, position_ids=position, use_cache=False).logits)
            for name, grad in wanted.items():
                error = (got[name] - grad).norm()
                assert error <= 1e-4 * grad.norm() + 1e-6, name


@pytest.mark.parametrize("name", ["cu_seq_lens_q", "seq_idx", "position_ids"])
@linear_models
def test_documents_with_a_cache_or_in_several_rows_are_refused(make, name):
    model, ids = make(), torch.randint(1, 128, (1, 8))
    layer = linear_layers(model)[0]
    ends = dict(
        cu_seq_lens_q=torch.tensor([0, 3, 8]),
        seq_idx=torch.tensor([[0] * 3 + [1] * 5]),
        position_ids=torch.tensor([[*range(3), *range(5)]]),
    )
    with use():
        with pytest.raises(custom.NotSupported, match=f"`{name}` has several beside one. Pass"):
            model(ids, use_cache=True, **{name: ends[name]})
        if name == "cu_seq_lens_q":
            with pytest.raises(ValueError, match="there are 2 rows, expected one"):
                layer(torch.randn(2, 8, 64), **{name: ends[name]})
        if name == "seq_idx":
            with pytest.raises(ValueError, match=r"`seq_idx` has shape \[1, 8\], exp"):
                layer(torch.randn(1, 9, 64), **{name: ends[name]})


@torch.no_grad()
def test_another_activation_is_refused():
    """Also where the model's own code has made the cache."""
    model, ids = qwen3_next(hidden_act="gelu"), torch.randint(1, 128, (1, 4))
    cache = model(ids, use_cache=True).past_key_values
    with use(), pytest.raises(custom.NotSupported, match='has "gelu"'):
        model(ids[:, :1], past_key_values=cache)


def test_a_layer_that_shares_a_selection_asks_for_it():
    model = glm(**SHARING)
    at = next(i for i, each in enumerate(model.model.layers) if each.self_attn.indexer is None)
    x, positions = torch.randn(1, 4, model.config.hidden_size), torch.arange(4)[None]
    with (
        pytest.raises(ValueError, match=f"`prev_topk_indices` is None, .* layer {at} shares"),
        use(),
        torch.inference_mode(),
    ):
        model.model.layers[at].self_attn(
            x,
            position_embeddings=model.model.rotary_emb(x, positions),
            attention_mask=torch.ones(1, 1, 4, 4, dtype=torch.bool).tril(),
        )


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(page_size=24), "`page_size` is 24, expected a multiple of 16"),
        (dict(page_size=0), "`page_size` is 0, expected a multiple of 16"),
        (dict(requests=-1), "`requests` is -1, expected 0 or more"),
        (dict(capacity=-1), "`capacity` is -1, expected 0 or more"),
        (dict(kv_kind="fp4"), "`kv_kind` is 'fp4', expected one of none, fp8, int8"),
        (dict(index_kind="bf16"), "`index_kind` is 'bf16', expected one of none"),
    ],
)
def test_pages_that_are_refused(change, message):
    with pytest.raises(ValueError, match=f"^PagedCaches: {message}"):
        PagedCaches(1, (32, 16, 16), **dict(requests=1, capacity=16) | change)


def test_options_of_use_are_refused_at_once():
    for options, message in (
        (
            dict(weight_format="nd"),
            "`weight_format` is 'nd', expected \"linear\" (the module's own",
        ),
        (dict(page_size=8), "`page_size` is 8"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)), use(**options):
            pass
    with pytest.raises(ValueError, match="`weight_format` is 'fractal'"):
        sparse_attention_weights(deepseek().model.layers[0].self_attn, "fractal")
    with use():
        pass


def test_pages():
    caches = PagedCaches(2, (32, 16, 16), requests=3, capacity=40, page_size=16)
    assert caches.capacity == 48
    positions = token_positions(torch.tensor([48, 3, 0]), 48)
    slots = caches.slots(positions)
    assert (slots[1, :45] == -1).all() and (slots[2] == -1).all()
    assert caches.slots(torch.tensor([[48], [0], [0]]))[0] == -1
    every = caches.slots(torch.arange(48).expand(3, -1))
    assert sorted(every.flatten().tolist()) == list(range(3 * 48))
    assert not torch.equal(caches.block_table.flatten().sort().values, caches.block_table.flatten())
    given = torch.tensor([[5, -1]], dtype=torch.int32)  # another table, its second page not there
    assert caches.slots(torch.tensor([[0, 15, 16, 40]]), given).tolist() == [[80, 95, -1, -1]]
    caches.layers[1].kr.view(-1, 16)[every.flatten().long()] = 7.0
    caches.reserve(49)
    assert caches.capacity == 64 and caches.layers[0].kv.shape == (12, 16, 1, 32)
    assert torch.equal(caches.slots(torch.arange(48).expand(3, -1)), every)
    assert (caches.layers[1].kr.view(-1, 16)[every.flatten().long()] == 7.0).all()


@pytest.mark.parametrize("name", ["README.md", "README.zh.md"])
@torch.inference_mode()
def test_the_decode_step_of_the_readme(name):
    """As it stands there, from empty caches: the output of the model's own attention."""
    first, code = re.findall(
        r"```python\n(.*?)```", (Path(__file__).parents[2] / name).read_text(), re.S
    )
    with torch.inference_mode(False):
        exec(first, {})
    model, (B, S) = deepseek(), (2, 5)
    layer, x = model.model.layers[0], torch.randn(B, S, 64)
    lengths = torch.full((B,), S, dtype=torch.int32)
    positions = token_positions(lengths, S)
    cos, sin = model.model.rotary_emb(x, positions)
    caches = PagedCaches(1, (32, 16, 32), requests=B, capacity=32, page_size=16)
    pools = caches.layers[0]
    names = dict(
        layer=layer, x=x, sin=sin, cos=cos, lengths=lengths, block_table=caches.block_table
    )
    names |= dict(slots=caches.slots(positions), kv_cache=pools.kv, kr_cache=pools.kr)
    names |= dict(index_k_cache=pools.index_k)
    exec(code, names)
    mask = torch.full((S, S), -torch.inf).triu(1).expand(B, 1, S, S)
    own = layer.self_attn(x, position_embeddings=(cos, sin), attention_mask=mask)[0]
    torch.testing.assert_close(names["hidden"], own, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("weight_format", ["linear", "nz"])
@pytest.mark.parametrize("how", ["written", "replaced", "moved"])
@pytest.mark.parametrize("make", [deepseek, deepseek_v4, kimi_linear, glm5_next])
@torch.no_grad()
def test_weights_that_change_inside(make, how, weight_format):
    """Those of a next checkpoint: no layer has some of them and copies of the last ones."""
    model, ids = make(), torch.randint(1, 128, (1, 20))
    others = {n: x.flip(0) if x.ndim > 1 else x.clone() for n, x in model.state_dict().items()}
    with use(weight_format=weight_format):
        before = model(ids, use_cache=False).logits
        if how == "moved":
            for name, weight in model.named_parameters():
                weight.data = others[name]
        else:
            model.load_state_dict(others, assign=how == "replaced")
        got = model(ids, use_cache=False).logits
    wanted = model(ids, use_cache=False).logits
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(before, wanted, rtol=1e-2, atol=1e-2)
