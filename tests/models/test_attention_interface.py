# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""attn_implementation="custom_sparse" against the unmodified models in float32, over Transformers'
own caches."""

from __future__ import annotations

import copy

import pytest
import torch
from custom.dispatch import log

import custom

transformers = pytest.importorskip("transformers", minversion="5.17")

from custom.integrations.transformers import register  # noqa: E402

from ..support.models import (  # noqa: E402
    DSA,
    NEW,
    SHARING,
    compiled_greedy,
    deepseek,
    glm,
    greedy,
    made,
    qwen3_5,
    ragged,
)

OP = "npu_sparse_flash_attention"
NAME = register()


def axk2(**changes):
    settings = {name: value for name, value in DSA.items() if name != "first_k_dense_replace"}
    return made("AXK2ForCausalLM", "AXK2Config", **settings | changes)


def hy_v4(**changes):
    settings = {name: value for name, value in DSA.items() if "group" not in name}
    kinds = dict(indexer_types=SHARING["indexer_types"], num_hidden_layers=5)
    return made("HYV4ForCausalLM", "HYV4Config", **settings | kinds | changes)


MODELS = {
    "deepseek": deepseek,
    "glm": glm,
    "glm that shares": lambda **c: glm(**SHARING | c),
    "axk2": axk2,
    "hy_v4": hy_v4,
}
every_model = pytest.mark.parametrize("name", MODELS)


def switched(model):
    ours = copy.deepcopy(model)
    ours.set_attn_implementation(NAME)
    return ours


def caches(model, inputs, kind):
    if kind == "dynamic":
        return {}
    length = inputs["input_ids"].shape[1] + NEW
    return dict(cache_implementation="static", max_cache_len=length)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@every_model
def test_generates_the_same_tokens(name, kind):
    """A ragged batch, prefill and decode."""
    model, inputs = MODELS[name](), ragged()
    expected = greedy(model, inputs)
    ours = switched(model)
    before, layers = log.calls[OP, "reference"], model.config.num_hidden_layers
    assert torch.equal(greedy(ours, inputs, **caches(model, inputs, kind)), expected)
    assert log.calls[OP, "reference"] == before + layers * NEW
    assert torch.equal(greedy(model, inputs), expected)  # another implementation is as it was
    assert log.calls[OP, "reference"] == before + layers * NEW


@every_model
def test_logits_with_a_cache_and_without(name):
    model, ids = MODELS[name](), torch.randint(1, 128, (2, 40))
    ours = switched(model)
    with torch.inference_mode():
        expected = model(ids, use_cache=False).logits
        alone = ours(ids, use_cache=False).logits
        cache = ours(ids[:, :25], use_cache=True).past_key_values
        rest = ours(ids[:, 25:], past_key_values=cache).logits
    torch.testing.assert_close(alone, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rest, expected[:, 25:], rtol=1e-5, atol=1e-5)
    latent = model.config.kv_lora_rank + model.config.qk_rope_head_dim
    for layer in cache.layers:
        # from 5.24 on the models keep latents themselves, in two parts
        parts = [each for each in (layer.keys, layer.values) if each.numel()]
        assert torch.cat(parts, -1).shape == (2, 1, 40, latent)


@pytest.mark.parametrize("name", ["deepseek", "glm that shares"])
def test_beam_search_and_cropped_drafts(name):
    model, inputs = MODELS[name](), ragged()
    ours = switched(model)
    for options in (dict(num_beams=3), dict(prompt_lookup_num_tokens=3)):
        if "num_beams" not in options:
            inputs = dict(input_ids=torch.randint(1, 128, (1, 8)).repeat(1, 3))
        assert torch.equal(greedy(ours, inputs, **options), greedy(model, inputs, **options))


@pytest.mark.parametrize("name", ["deepseek", "glm that shares"])
def test_the_decode_step_compiles_once(name):
    """In one graph over a static cache; experts, which Transformers loops over, are left out."""
    model, inputs = MODELS[name](first_k_dense_replace=5), ragged()
    expected = greedy(model, inputs)
    tokens, graphs = compiled_greedy(switched(model), inputs)
    assert torch.equal(tokens, expected[:, inputs["input_ids"].shape[1] :])
    assert len(graphs) == 1
    own = torch.ops.custom.npu_sparse_flash_attention
    calls = [n.target for n in graphs[0].graph.nodes if n.op == "call_function"]
    assert sum(each in (own, own.default) for each in calls) == model.config.num_hidden_layers


def test_gradients_equal_the_model_s():
    model, ids = deepseek(), torch.randint(1, 128, (2, 20))
    ours = switched(model)
    for each in (model, ours):
        each(ids, labels=ids, use_cache=False).loss.backward()
    theirs = dict(model.named_parameters())
    for name, parameter in ours.named_parameters():
        wanted = theirs[name].grad
        assert (parameter.grad is None) == (wanted is None), name
        if wanted is not None:
            torch.testing.assert_close(parameter.grad, wanted, rtol=1e-4, atol=1e-6)


def test_a_model_that_selects_nothing_is_refused_by_name():
    model = switched(qwen3_5())
    with pytest.raises(custom.NotSupported, match=r'Qwen3_5Attention is none of them.*"sdpa"'):
        greedy(model, ragged())


@pytest.mark.parametrize(
    "given, message",
    [
        (dict(softcap=30.0), "does not compute `softcap`, which is given"),
        (dict(sliding_window=4), "does not compute `sliding_window`"),
        (dict(output_attentions=True), "does not compute `output_attentions`"),
        (dict(attention_mask=torch.zeros(1, 1, 9, 9)), r"`attention_mask` is torch.float32 \[1, 1"),
        (
            dict(attention_mask=torch.ones(1, 4, 9, 9, dtype=torch.bool)),
            r"is torch.bool \[1, 4, 9, 9\]. Pass True where a key is seen, the same for all heads",
        ),
    ],
)
@torch.inference_mode()
def test_what_it_does_not_compute_is_refused(given, message):
    model, ids = switched(deepseek()), torch.randint(1, 128, (1, 9))
    with pytest.raises(custom.NotSupported, match=message):
        model(ids, **given)


@torch.inference_mode()
def test_padding_on_the_right_and_documents():
    model, ids = deepseek(), torch.randint(1, 128, (2, 15))
    ours = switched(model)
    mask = torch.tensor([[1] * 15, [1] * 9 + [0] * 6])
    position = torch.tensor([[*range(9), *range(6)]] * 2)
    for packed in (dict(attention_mask=mask), dict(position_ids=position)):
        got, wanted = (each(ids, use_cache=False, **packed).logits for each in (ours, model))
        there = mask.bool() if "attention_mask" in packed else slice(None)
        torch.testing.assert_close(got[there], wanted[there], rtol=1e-5, atol=1e-5)
