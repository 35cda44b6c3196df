# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""MiniMax-M3 and Qwen4-Exp inside `use()`: tokens and logits of Transformers' own code.

Transformers counts blocks of MiniMax-M3 from the first column of a row, its padding included; a
text alone has none, and is what every row is held against.
"""

from __future__ import annotations

import pytest
import torch
from custom.dispatch import log

import custom
from custom.integrations.drafts import verification

transformers = pytest.importorskip("transformers", minversion="5.17")

from custom.integrations.transformers import use  # noqa: E402

from ..support.models import (  # noqa: E402
    NEW,
    assert_no_worse_in_half_precision,
    greedy,
    minimax_m3,
    padded_on_the_right,
    qwen4_exp,
    ragged,
)

CLOSE = dict(rtol=1e-5, atol=1e-5)
# n-grams need a token that ends a text
PLE = dict(
    ple_layer_ids=[2],
    ple_embed_dim=32,
    heads_per_ngram=2,
    ngram_vocab_size_base=50,
    eos_token_id=0,
)
SELECTING = ["npu_compressor", "npu_lightning_indexer"]


def with_n_grams(**changes):
    """Their convolution begins as zeros."""
    model = qwen4_exp(**PLE, **changes)
    for name, parameter in model.named_parameters():
        if "ple" in name and parameter.ndim > 1:
            torch.nn.init.normal_(parameter, 0.0, 0.5)
    model.generation_config.eos_token_id = None
    return model


MODELS = {
    "minimax_m3": (minimax_m3, 2, ["npu_block_indexer"]),
    "one choice for all heads": (lambda: minimax_m3(index_n_heads=1), 2, ["npu_block_indexer"]),
    "two local blocks": (lambda: minimax_m3(index_local_blocks=2), 2, ["npu_block_indexer"]),
    "blocks above the page": (
        lambda: minimax_m3(index_block_size=17, index_topk_blocks=2),
        2,
        ["npu_block_indexer"],
    ),
    "qwen4_exp": (qwen4_exp, 1, SELECTING),
    "pools of 3, a sigmoid gate": (
        lambda: qwen4_exp(
            indexer_compress_ratio=3,
            layer_types=["linear_attention", "full_attention"] * 2,
            output_gate_type="sigmoid",
        ),
        2,
        SELECTING,
    ),
    "with n-grams": (with_n_grams, 1, SELECTING),
}
models = pytest.mark.parametrize("name", MODELS)
both = pytest.mark.parametrize("make", [minimax_m3, qwen4_exp], ids=lambda make: make.__name__)


def alone(model, inputs):
    """Tokens [B, NEW] of each row by itself, without its padding."""
    ids, mask = inputs["input_ids"], inputs["attention_mask"].bool()
    rows = [row[there][None] for row, there in zip(ids, mask, strict=True)]
    return torch.cat([greedy(model, dict(input_ids=row))[:, row.shape[1] :] for row in rows])


@pytest.mark.parametrize("lengths", [(30, 21, 5), (30,), (9, 1, 3)], ids=str)
@models
def test_generates_the_same_tokens(name, lengths):
    make, layers, selecting = MODELS[name]
    model, inputs = make(), ragged(lengths)
    expected, ops = alone(model, inputs), [*selecting, "npu_sparse_attention_score"]
    before = [log.calls[op, "reference"] for op in ops]
    with use(page_size=16):
        got = greedy(model, inputs)[:, inputs["input_ids"].shape[1] :]
    ran = [log.calls[op, "reference"] - n for op, n in zip(ops, before, strict=True)]
    assert torch.equal(got, expected)
    assert ran == [layers * NEW] * len(ops)
    assert torch.equal(alone(model, inputs), expected)


@torch.inference_mode()
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@both
def test_what_is_chosen_counts(make, attention):
    """With fewer blocks the logits are others, by far more than what is allowed here."""
    fewer = dict(minimax_m3=dict(index_topk_blocks=2), qwen4_exp=dict(indexer_budget=8))
    model, less, ids = make(), make(**fewer[make.__name__]), torch.randint(1, 128, (2, 40))
    model.set_attn_implementation(attention)
    less.set_attn_implementation(attention)
    expected, other = (each(ids, use_cache=False).logits for each in (model, less))
    assert (expected - other).abs().max() > 0.3
    with use():
        torch.testing.assert_close(model(ids, use_cache=False).logits, expected, **CLOSE)
        torch.testing.assert_close(less(ids, use_cache=False).logits, other, **CLOSE)


@torch.inference_mode()
@pytest.mark.parametrize("parts", [(17, 13, 1, 1, 8), (1,) * 40, (40,), (4, 4, 32)], ids=str)
@models
def test_a_prompt_in_parts(name, parts):
    model, ids = MODELS[name][0](), torch.randint(1, 128, (2, 40))
    expected = model(ids, use_cache=False).logits
    with use(page_size=16):
        cache, got = transformers.DynamicCache(config=model.config), []
        for part in ids.split(parts, 1):
            got.append(model(part, past_key_values=cache).logits)
    torch.testing.assert_close(torch.cat(got, 1), expected, **CLOSE)


@torch.inference_mode()
@pytest.mark.parametrize("keep", [1, 2, 4, 5])
@models
def test_drafts_that_were_refused_leave_nothing(name, keep):
    """One of five is kept at least, and three tokens of an open pool are behind it."""
    model, ids = MODELS[name][0](), torch.randint(1, 128, (2, 32))
    expected = model(ids, use_cache=False).logits
    with use(drafts=4):
        cache = model(ids[:, :18], use_cache=True).past_key_values
        with verification(cache) as step:
            fed = torch.cat([ids[:, 18 : 18 + keep], ids[:, : 5 - keep]], 1)
            logits = model(fed, past_key_values=cache).logits[:, :keep]
            step.keep(keep)
        rest = model(ids[:, 18 + keep :], past_key_values=cache).logits
    torch.testing.assert_close(logits, expected[:, 18 : 18 + keep], **CLOSE)
    torch.testing.assert_close(rest, expected[:, 18 + keep :], **CLOSE)


@pytest.mark.parametrize("how", ["prompt lookup", "assistant"])
def test_assisted_generation(how):
    """MiniMax-M3 has no states: Transformers crops its cache itself."""
    model, ids = minimax_m3(), torch.randint(1, 128, (1, 9)).repeat(1, 3)
    expected = greedy(model, dict(input_ids=ids))
    helper = dict(prompt_lookup_num_tokens=4)
    if how == "assistant":
        helper = dict(assistant_model=minimax_m3(index_topk_blocks=2))
    cropped = []
    with use():
        own = custom.integrations.cached.PagedLayer.crop
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                custom.integrations.cached.PagedLayer,
                "crop",
                lambda self, n: (cropped.append(n), own(self, n)),
            )
            got = greedy(model, dict(input_ids=ids), **helper)
    assert torch.equal(got, expected) and any(cropped)


@torch.inference_mode()
def test_a_cache_takes_back_what_its_rings_hold():
    model, ids = qwen4_exp(), torch.randint(1, 128, (2, 20))
    with use(drafts=5):
        cache = model(ids, use_cache=True).past_key_values
        with pytest.raises(custom.NotSupported, match=r"a Qwen4-Exp model takes back the last 5"):
            cache.layers[3].crop(-6)


@torch.inference_mode()
def test_angles_of_images():
    """Three positions a token; a pool is turned by those of its first one."""
    model, ids = qwen4_exp(), torch.randint(1, 128, (2, 24))
    text = torch.arange(24)
    grid = torch.stack([text, text, (text * 3) % 7, (text * 5) % 11])[:, None].expand(4, 2, 24)
    expected = model(ids, position_ids=grid, use_cache=False).logits
    plain = model(ids, use_cache=False).logits
    assert (expected - plain).abs().max() > 0.1
    with use():
        cache = transformers.DynamicCache(config=model.config)
        got = [
            model(part, position_ids=at, past_key_values=cache).logits
            for part, at in zip(ids.split([11, 12, 1], 1), grid.split([11, 12, 1], -1), strict=True)
        ]
    torch.testing.assert_close(torch.cat(got, 1), expected, **CLOSE)


@torch.inference_mode()
def test_documents_in_a_row():
    """Without a cache; the pools of each begin with it."""
    model, ids = qwen4_exp(), torch.randint(1, 128, (1, 30))
    parts = [torch.arange(13), torch.arange(17)]
    attention, given = model.model.layers[3].self_attn, []
    handle = attention.register_forward_pre_hook(
        lambda _, args, options: given.append((args, options)), with_kwargs=True
    )
    model(ids, position_ids=torch.cat(parts)[None], use_cache=False)
    handle.remove()
    (args, options), *_ = given
    expected = attention(*args, **options)[0]
    with use():
        torch.testing.assert_close(attention(*args, **options)[0], expected, **CLOSE)


@torch.inference_mode()
def test_documents_by_a_mask():
    """Transformers counts MiniMax-M3's blocks over the whole row; here each text has its own."""
    model, ids = minimax_m3(), torch.randint(1, 128, (1, 30))
    number = torch.tensor([0] * 13 + [1] * 17)
    mask = (number[:, None] == number).tril()[None, None]
    expected = [model(part, use_cache=False).logits for part in ids.split([13, 17], 1)]
    with use():
        got = model(ids, attention_mask=mask, use_cache=False).logits
        torch.testing.assert_close(got, torch.cat(expected, 1), **CLOSE)
        with pytest.raises(custom.NotSupported, match=r"documents .* Pass use_cache=False"):
            model(ids, attention_mask=mask, use_cache=True)


@torch.inference_mode()
def test_padding_behind_cached_tokens():
    """Of MiniMax-M3 a request may get fewer new tokens; Qwen4-Exp's states would be of padding."""
    model, ids = minimax_m3(), torch.randint(1, 128, (2, 24))
    mask = torch.ones_like(ids)
    mask[0, 13:17] = 0
    there, positions = mask.bool(), (mask.cumsum(-1) - 1).clamp(min=0)
    expected = model(ids[:1, there[0]], use_cache=False).logits[0]

    def parts(model):
        cache, got = transformers.DynamicCache(config=model.config), []
        for at in (slice(0, 13), slice(13, 20), slice(20, 24)):
            given = dict(attention_mask=mask[:, : at.stop], position_ids=positions[:, at])
            got.append(model(ids[:, at], past_key_values=cache, **given).logits)
        return torch.cat(got, 1)

    with use():
        torch.testing.assert_close(parts(model)[0, there[0]], expected, **CLOSE)
        with pytest.raises(custom.NotSupported, match="has padding behind cached tokens"):
            parts(qwen4_exp())


@torch.inference_mode()
@both
def test_padding_on_the_right(make):
    model = make()
    ids, mask, expected = padded_on_the_right(model)
    with use():
        got = model(ids, attention_mask=mask).logits
    torch.testing.assert_close(got[:1, :13], expected, **CLOSE)


@torch.inference_mode()
@both
def test_what_is_refused(make):
    model, ids = make(), torch.randint(1, 128, (2, 20))
    static = transformers.StaticCache(model.config, max_cache_len=32)
    own = model(ids, use_cache=True).past_key_values
    with use():
        with pytest.raises(custom.NotSupported, match=r"DynamicCache that is still empty; .* of 0"):
            model(ids, past_key_values=static)
        with pytest.raises(custom.NotSupported, match=r"DynamicCache that is still .* of 20 tok"):
            model(ids[:, :1], past_key_values=own)
        with pytest.raises(custom.NotSupported, match="without beam search"):
            greedy(model, dict(input_ids=ids), num_beams=2)
        with pytest.raises(custom.NotSupported, match="keeps no attention weights"):
            model(ids, output_attentions=True)
        bias = torch.full((2, 1, 20, 20), -1.0)
        with pytest.raises(custom.NotSupported, match="adds a bias to scores"):
            model(ids, attention_mask=bias)


@both
def test_gradients_are_refused(make):
    model, ids = make(), torch.randint(1, 128, (2, 20))
    with use(), pytest.raises(RuntimeError, match="requires grad"):
        model(ids, use_cache=False)


@torch.inference_mode()
def test_what_of_minimax_m3_is_refused():
    model, ids = minimax_m3(), torch.randint(1, 128, (2, 20))
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    with use():
        with pytest.raises(custom.NotSupported, match=r"`position_ids` .* say something else"):
            model(ids, position_ids=torch.arange(20)[None] + 4)
        cache = model(ids, attention_mask=mask, use_cache=True).past_key_values
        with pytest.raises(custom.NotSupported, match="is None, and the cache has padding"):
            model(ids[:, :1], past_key_values=cache)
        with pytest.raises(custom.NotSupported, match="with no such layer"):
            model(ids, past_key_values=transformers.DynamicCache())
    with use(), pytest.raises(custom.NotSupported, match="index_n_heads=3 beside num_key_value_he"):
        minimax_m3(index_n_heads=3)(ids)


@torch.inference_mode()
@both
def test_half_precision(make):
    assert_no_worse_in_half_precision(make().bfloat16(), make(), use())
