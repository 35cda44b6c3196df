# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""GLM-5.3-Flash inside `use()`: tokens and logits of Transformers' own code."""

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
    glm5_next,
    greedy,
    in_parts,
    padded_on_the_right,
    ragged,
)

CLOSE = dict(rtol=1e-5, atol=1e-5)
ATTENTION = (
    "npu_mla_prolog_pto",
    "npu_compressor",
    "npu_lightning_indexer",
    "npu_sparse_flash_attention",
)
SHARING = dict(
    layer_types=["deepseek_sparse_attention"] * 3 + ["linear_attention"],
    indexer_types=["full", "shared", "full", "full"],
)


def calls():
    return [log.calls[op, "reference"] for op in ATTENTION]


@pytest.mark.parametrize("lengths", [(30, 21, 5), (30,), (9, 0, 3)], ids=str)
@pytest.mark.parametrize("shared", [False, True], ids=["alone", "shared"])
def test_generates_the_same_tokens(shared, lengths):
    """Prompts that end inside a pool, at its end, before the first one closes; one has no token."""
    model, inputs = glm5_next(**SHARING if shared else {}), ragged(lengths)
    if 0 in lengths:
        inputs["attention_mask"][lengths.index(0), -1] = 1
    expected, before = greedy(model, inputs), calls()
    with use():
        assert torch.equal(greedy(model, inputs), expected)
    ran = [now - then for now, then in zip(calls(), before, strict=True)]
    layers, own = (3, 2) if shared else (1, 1)
    assert ran == [layers * NEW, own * NEW, own * NEW, layers * NEW]
    assert torch.equal(greedy(model, inputs), expected)


@pytest.mark.parametrize("parts", [(17, 13, 1, 1, 8), (1,) * 40, (40,), (4, 4, 32)], ids=str)
def test_a_prompt_in_parts(parts):
    model, ids = glm5_next(), torch.randint(1, 128, (2, 40))
    with torch.inference_mode():
        expected = model(ids, use_cache=False).logits
        with use():
            got, alone = in_parts(model, ids, parts)
    torch.testing.assert_close(got, expected, **CLOSE)
    torch.testing.assert_close(alone, expected, **CLOSE)


@torch.inference_mode()
@pytest.mark.parametrize("keep", [1, 2, 4, 5])
def test_drafts_that_were_refused_leave_nothing(keep):
    """The states of a pool are those of the tokens that stay."""
    model, ids = glm5_next(), torch.randint(1, 128, (2, 32))
    expected = model(ids, use_cache=False).logits
    with use(drafts=5):
        cache = model(ids[:, :18], use_cache=True).past_key_values
        with verification(cache) as step:
            fed = torch.cat([ids[:, 18 : 18 + keep], ids[:, : 5 - keep]], 1)
            model(fed, past_key_values=cache)
            step.keep(keep)
        rest = model(ids[:, 18 + keep :], past_key_values=cache).logits
        with pytest.raises(custom.NotSupported, match=r"takes back the last 5 tokens, and 6 are"):
            cache.layers[3].crop(-6)
    torch.testing.assert_close(rest, expected[:, 18 + keep :], **CLOSE)


@torch.inference_mode()
def test_padding_on_the_right_and_what_is_refused():
    model = glm5_next()
    ids, mask, expected = padded_on_the_right(model)
    with use():
        got = model(ids, attention_mask=mask).logits
        torch.testing.assert_close(got[:1, :13], expected, **CLOSE)
        cache = model(ids, attention_mask=mask, use_cache=True).past_key_values
        more = torch.cat([mask, mask[:, :1]], 1)
        with pytest.raises(custom.NotSupported, match=r"padding elsewhere\. Pad on the left"):
            model(ids[:, :1], attention_mask=more, past_key_values=cache)
        mask[0, 4] = 0
        with pytest.raises(custom.NotSupported, match="padding elsewhere"):
            model(ids, attention_mask=mask)
        static = transformers.StaticCache(model.config.text_config, max_cache_len=32)
        with pytest.raises(custom.NotSupported, match="takes over a DynamicCache"):
            model(ids, past_key_values=static)
    with use(), pytest.raises(custom.NotSupported, match="index_kpool_always_select_tail=False"):
        glm5_next(index_kpool_always_select_tail=False)(ids)


@torch.inference_mode()
def test_half_precision():
    """Beside weights that a checkpoint keeps in float32."""
    model = glm5_next().bfloat16()
    for name, module in model.named_modules():
        if name.endswith("conv1d"):
            module.float()
    assert_no_worse_in_half_precision(model, glm5_next(), use())
