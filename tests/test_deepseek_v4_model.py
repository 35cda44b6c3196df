# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Transformers' DeepSeek-V4 on our ops: the tokens of the unmodified model, request by request."""

from __future__ import annotations

import copy

import pytest
import torch
from custom.dispatch import log
from torch.nn import functional as F

import custom
from custom.integrations import masks
from custom.integrations.dsa import dequantised, load_as_it_is
from custom.integrations.paged import token_positions

transformers = pytest.importorskip("transformers", minversion="5.17")

from custom.integrations.deepseek_v4 import V4Caches  # noqa: E402
from custom.integrations.drafts import verification  # noqa: E402
from custom.integrations.transformers import (  # noqa: E402
    register,
    sparse_attention_v4_weights,
    use,
)

from .support.deepseek_v4 import CSA, HCA, SLIDING, Attention, config, drawn, float64  # noqa: E402
from .support.models import NEW, deepseek_v4, greedy, ragged  # noqa: E402

OP = "npu_sparse_attention_v4_pto"
LENGTHS = (37, 21, 3)
CLOSE = dict(rtol=2e-5, atol=2e-5)


@pytest.fixture(scope="module")
def model():
    return deepseek_v4()


def alone(model, inputs, **options):
    """Greedy tokens [B, NEW], each request by itself: Transformers compresses padding too."""
    tokens = []
    for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"].bool(), strict=True):
        tokens.append(greedy(model, dict(input_ids=ids[mask][None]), **options)[0, -NEW:])
    return torch.stack(tokens)


def ran(op):
    return log.calls[op, "reference"]


@pytest.mark.parametrize(
    "weight_format, options",
    [("nz", {}), ("nd", {}), ("nz", dict(cache_implementation="static"))],
)
def test_ragged_requests_generate_the_tokens_of_each_alone(model, weight_format, options):
    inputs, layers = ragged(LENGTHS), model.config.num_hidden_layers
    own = type(model.model.layers[0].self_attn).forward
    expected = alone(model, inputs)
    ops = {OP: layers, "npu_hc_pre": 2 * layers + 1, "npu_hc_post": 2 * layers}
    before = {op: ran(op) for op in ops}
    with use(weight_format=weight_format, page_size=16):
        assert torch.equal(greedy(model, inputs, **options)[:, -NEW:], expected)
    assert {op: ran(op) - before[op] for op in ops} == {op: n * NEW for op, n in ops.items()}
    assert type(model.model.layers[0].self_attn).forward is own
    assert model._is_stateful
    with pytest.raises(KeyError):  # Transformers has none
        transformers.StaticCache(config=model.config, max_cache_len=8)


@pytest.mark.parametrize("parts", [(90, 1, 1, 1), (1, 1, 7, 33, 72, 1, 2), (3, 90)], ids=str)
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@torch.inference_mode()
def test_logits_of_a_text_in_parts(model, kind, parts):
    """Rings grow for a long part, move, and shrink behind it."""
    ids = torch.randint(1, 128, (2, sum(parts)))
    expected = model(ids, use_cache=False).logits
    with use(page_size=16, drafts=2):
        make = transformers.StaticCache if kind == "static" else transformers.DynamicCache
        cache = make(config=model.config, **dict(max_cache_len=sum(parts)) if kind == "static" else {})
        got, rings = [], []
        for part in ids.split(parts, 1):
            got.append(model(part, past_key_values=cache).logits)
            rings.append(len(cache.layers[0].caches.layers[0].ori_kv))
    torch.testing.assert_close(torch.cat(got, 1), expected, **CLOSE)
    assert rings[-1] < max(rings) or parts == (3, 90)
    if kind == "static":
        assert cache.layers[1].get_max_length() == sum(parts)
        with use(), pytest.raises(ValueError, match="StaticCache of .* positions cannot take 1 mo"):
            model(ids[:, :1], past_key_values=cache)


@torch.inference_mode()
def test_a_pass_without_a_cache_and_padding(model):
    lengths, columns = (30, 11, 1), torch.arange(30)
    ids = torch.randint(1, 128, (3, 30))
    for side in ("left", "right"):
        lacking = 30 - torch.tensor(lengths)[:, None]
        there = columns >= lacking if side == "left" else columns < 30 - lacking
        with use(page_size=16):
            # positions of columns, as Transformers makes them from nothing, are understood
            got = model(ids, attention_mask=there.long(), use_cache=False).logits
        for row, mask, logits in zip(ids, there, got, strict=True):
            expected = model(row[mask][None], use_cache=False).logits[0]
            torch.testing.assert_close(logits[mask], expected, **CLOSE)


@torch.inference_mode()
def test_a_checkpoint_in_bfloat16_runs(model, tmp_path):
    """Its norms, gates and sinks are of float32; the unmodified model fails on them."""
    half = copy.deepcopy(model).to(torch.bfloat16)
    half.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    assert loaded.model.norm.weight.dtype is torch.float32
    ids = torch.randint(1, 128, (2, 20))
    with use(page_size=16):
        got, expected = (each(ids).logits for each in (loaded, half))
    assert got.dtype is torch.bfloat16
    assert torch.equal(got, expected)


# ----------------------------------------------------------------------------------------- drafts


def test_drafts_of_prompt_lookup(model):
    inputs = dict(input_ids=torch.randint(1, 128, (1, 8)).repeat(1, 3))
    expected = greedy(model, inputs)
    with use(page_size=16):
        assert torch.equal(greedy(model, inputs, prompt_lookup_num_tokens=3), expected)


@torch.inference_mode()
def test_drafts_that_were_refused_leave_nothing(model):
    """Steps of six tokens, which close entries of both kinds; some keep one, some all."""
    ids = torch.randint(1, 128, (2, 60))
    expected = model(ids, use_cache=False).logits
    with use(page_size=16, drafts=5):
        cache = transformers.DynamicCache(config=model.config)
        model(ids[:, :21], past_key_values=cache)
        at = 21
        for count in (1, 6, 2, 1, 1, 5, 3, 4):
            fed = torch.cat([ids[:, at : at + count], torch.randint(1, 128, (2, 6 - count))], 1)
            with verification(cache) as step:
                logits = model(fed, past_key_values=cache).logits
                step.keep(count)
            at += count
            assert cache.get_seq_length() == at
            torch.testing.assert_close(logits[:, :count], expected[:, at - count : at], **CLOSE)


@torch.inference_mode()
def test_more_than_the_rings_hold_is_not_taken_back(model):
    ids = torch.randint(1, 128, (1, 30))
    with use(page_size=16, drafts=4):
        cache = transformers.DynamicCache(config=model.config)
        model(ids, past_key_values=cache)
        cache.crop(-3)
        with pytest.raises(custom.NotSupported, match="the last 4 tokens, and 5 are to go. Enter"):
            cache.crop(-2)
        assert cache.get_seq_length() == 27
        expected = model(ids, past_key_values=None, use_cache=False).logits
        again = model(ids[:, 27:], past_key_values=cache).logits
        torch.testing.assert_close(again, expected[:, 27:], **CLOSE)
        cache.crop(0)
        cache.crop(-30)  # all of it, and anew
        torch.testing.assert_close(model(ids, past_key_values=cache).logits, expected, **CLOSE)


def test_verification_wants_a_prompt(model):
    with use(), pytest.raises(custom.NotSupported, match="the cache is empty, expected one behind"):
        with verification(transformers.DynamicCache(config=model.config)):
            pass


# --------------------------------------------------------------------------------------- refusals


def window_of(change, size=9, window=8):
    mask = torch.ones(size, size, dtype=torch.bool).tril() & ~torch.ones(size, size).bool().tril(
        -window
    )
    change(mask)
    return dict(attention_mask=mask[None, None])


REFUSED = {
    "a hole": (window_of(lambda m: m[5:, 3].fill_(False)), "hides other keys. Give every request"),
    "no window": (window_of(lambda m: m[8, 0].fill_(True)), "hides other keys"),
    "a bias": (dict(attention_mask=torch.full((1, 1, 9, 9), -0.5).tril()), "adds a bias to scores"),
    "padding inside": (
        dict(attention_mask=torch.tensor([[1, 1, 0, 1, 1, 1, 1, 1, 1]])),
        "padded on the left, or without a next pass on the right",
    ),
    "documents": (
        dict(position_ids=torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]]), use_cache=False),
        "hides other keys. Give every request and every document a row of its own",
    ),
    "positions": (
        dict(position_ids=torch.arange(9)[None] * 2, attention_mask=torch.ones(1, 9).long()),
        r"`position_ids` \[1, 9\] say something else. Give every request or document",
    ),
    "no mask": (dict(attention_mask=dict(x=None)), "of this layer is a NoneType. Load the model"),
    "weights": (dict(output_attentions=True), "`output_attentions` is True. Leave it out"),
    "another cache": (
        dict(past_key_values=transformers.DynamicCache()),
        "got DynamicCache with no layers. Leave past_key_values out, or pass DynamicCache",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
@torch.inference_mode()
def test_what_is_not_served_is_refused_in_one_sentence(model, name):
    given, message = REFUSED[name]
    with use(), pytest.raises(custom.NotSupported, match=message) as info:
        model(torch.randint(1, 128, (1, 9)), **given)
    assert "\n" not in str(info.value)


@torch.inference_mode()
def test_other_refusals(model):
    ids = torch.randint(1, 128, (2, 9))
    mask = torch.tensor([[1] * 9, [1] * 5 + [0] * 4])
    with use():
        cache = transformers.DynamicCache(config=model.config)
        model(ids, attention_mask=mask, past_key_values=cache)
        with pytest.raises(custom.NotSupported, match="without a next pass on the right"):
            more = F.pad(mask, (0, 1), value=1)
            model(ids[:, :1], attention_mask=more, past_key_values=cache)
        with pytest.raises(custom.NotSupported, match="cannot reorder, repeat, select or offload"):
            greedy(model, ragged(), num_beams=2)
    filled = model(ids).past_key_values
    with use(), pytest.raises(custom.NotSupported, match="still empty; got DynamicCache with .* 9"):
        model(ids, past_key_values=filled)
    with pytest.raises(ValueError, match="`drafts` is -1, expected 0 or more"), use(drafts=-1):
        pass
    with pytest.raises(TypeError, match="`module` is of type Linear, expected DeepseekV4Attention"):
        sparse_attention_v4_weights(model.lm_head)


def test_gradients_are_refused(model):
    with use(), pytest.raises(RuntimeError, match="requires grad"):
        model(torch.randint(1, 128, (1, 9)), use_cache=False)


@pytest.mark.parametrize("wrong", ["mask", "positions", None])
@torch.inference_mode()
def test_in_a_graph_what_nobody_reads_gives_nan(model, wrong, monkeypatch):
    monkeypatch.setattr(masks, "_may_wait", lambda x: False)
    ids, given = torch.randint(1, 128, (1, 9)), {}
    if wrong == "mask":
        given = window_of(lambda m: m[5:, 3].fill_(False))
    elif wrong == "positions":
        given = dict(position_ids=torch.arange(9)[None] * 2, attention_mask=torch.ones(1, 9))
    with use():
        got = model(ids, use_cache=False, **given).logits
    assert bool(got.isnan().any()) == (wrong is not None)


# ------------------------------------------------------------------------------------ other ways in


@torch.inference_mode()
def test_custom_sparse(model):
    """Over Transformers' own cache, whatever the padding."""
    ours, inputs = copy.deepcopy(model), ragged((19, 8))
    ours.set_attn_implementation(register())
    before = ran("npu_sparse_flash_attention")
    assert torch.equal(greedy(ours, inputs), greedy(model, inputs))
    assert ran("npu_sparse_flash_attention") - before == 3 * NEW
    ids = inputs["input_ids"]
    for given in REFUSED["a bias"][0], dict(output_attentions=True):
        with pytest.raises(custom.NotSupported, match="does something else|`output_attentions`"):
            ours(ids[:1, :9], **given)


def test_custom_sparse_has_the_model_s_gradients(model):
    ours, ids = copy.deepcopy(model), torch.randint(1, 128, (2, 20))
    ours.set_attn_implementation(register())
    losses = [each(ids, labels=ids, use_cache=False).loss for each in (model, ours)]
    theirs = torch.autograd.grad(losses[0], list(model.parameters()), allow_unused=True)
    grads = torch.autograd.grad(losses[1], list(ours.parameters()), allow_unused=True)
    for (name, _), got, wanted in zip(model.named_parameters(), grads, theirs, strict=True):
        assert (got is None) == (wanted is None), name
        if wanted is not None:
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)
