# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Transformers' DeepSeek-V4 on our ops: the tokens of the unmodified model, request by request."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import torch
from custom.dispatch import log
from custom.dispatch.reference.common import weight_args
from torch.nn import functional as F

import custom
from custom.integrations import masks
from custom.integrations.dsa import dequantised, load_as_it_is
from custom.integrations.paged import token_positions

transformers = pytest.importorskip("transformers", minversion="5.17")

from transformers.integrations.finegrained_fp8 import FP8Linear  # noqa: E402

from custom.integrations.deepseek_v4 import V4Caches  # noqa: E402
from custom.integrations.drafts import verification  # noqa: E402
from custom.integrations.transformers import (  # noqa: E402
    register,
    sparse_attention_v4_weights,
    use,
)

from ..support import layer_v4, quantization  # noqa: E402
from ..support.deepseek_v4 import CSA, HCA, SLIDING, Attention, config, drawn, float64  # noqa: E402
from ..support.models import NEW, deepseek_v4, greedy, ragged  # noqa: E402

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
    [("nz", {}), ("linear", {}), ("nz", dict(cache_implementation="static"))],
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


@pytest.mark.parametrize("parts", [(140, 1, 1, 1), (1, 1, 7, 33, 140, 1, 2), (3, 90)], ids=str)
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@torch.inference_mode()
def test_logits_of_a_text_in_parts(model, kind, parts):
    """Rings grow for a long part, move, and shrink behind it."""
    ids = torch.randint(1, 128, (2, sum(parts)))
    expected = model(ids, use_cache=False).logits
    with use(page_size=16, drafts=2):
        make = transformers.StaticCache if kind == "static" else transformers.DynamicCache
        cache = make(
            config=model.config, **dict(max_cache_len=sum(parts)) if kind == "static" else {}
        )
        got, rings = [], []
        for part in ids.split(parts, 1):
            got.append(model(part, past_key_values=cache).logits)
            rings.append(len(cache.layers[0].caches.layers[0].ori_kv))
    torch.testing.assert_close(torch.cat(got, 1), expected, **CLOSE)
    assert rings[-1] < max(rings) or parts == (3, 90)
    if kind == "static":
        assert cache.layers[1].get_max_length() == sum(parts)
        with use(), pytest.raises(ValueError, match=r"StaticCache of .* positions cannot take 1 m"):
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
        with pytest.raises(custom.NotSupported, match="the last 4 tokens, and 5 are to go"):
            cache.crop(-2)
        assert cache.get_seq_length() == 27
        expected = model(ids, past_key_values=None, use_cache=False).logits
        again = model(ids[:, 27:], past_key_values=cache).logits
        torch.testing.assert_close(again, expected[:, 27:], **CLOSE)
        cache.crop(0)
        cache.crop(-30)  # all of it, and anew
        torch.testing.assert_close(model(ids, past_key_values=cache).logits, expected, **CLOSE)


def test_verification_wants_a_prompt(model):
    empty = transformers.DynamicCache(config=model.config)
    refused = pytest.raises(custom.NotSupported, match="the cache is empty, expected one behind")
    with use(), refused, verification(empty):
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
        "got DynamicCache with no layers. Leave the cache out, or pass DynamicCache",
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
    with use(), pytest.raises(custom.NotSupported, match=r"still empty; got Dyn.* of 9 t"):
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
        with pytest.raises(custom.NotSupported, match=r"does something else|`output_at"):
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


# ------------------------------------------------------------------------------- weights and caches


_QUANTIZED = ("w_dq", "w_kv", "w_o_a", "w_o_b", "w_uq", "w_idx_qb")


def checkpoint_of(weight):
    """(e4m3 [N, K], ue8m0 scales of 128 x 128, what they stand for, number by number)"""
    rows, columns = weight.shape
    values = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-rows // 128), -(-columns // 128))
    stands = torch.empty_like(weight, dtype=torch.float64)
    for i, line in enumerate(scales):
        for j in range(len(line)):
            tile = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
            line[j] = 2.0 ** (weight[tile].abs().max() / 448).log2().ceil()
            values[tile] = (weight[tile] / line[j]).to(torch.float8_e4m3fn)
            stands[tile] = values[tile].double() * line[j].double()
    return values, scales.to(torch.float8_e8m0fnu), stands


def test_a_quantized_checkpoint_stands_for_its_weights():
    weight = torch.randn(200, 300) * torch.logspace(-3, 3, 300)
    values, scales, stands = checkpoint_of(weight)
    assert len(scales.float().unique()) > 2
    for scale in (scales, scales.float()):
        got = dequantised(values, scale)
        assert got.dtype is torch.bfloat16
        assert torch.equal(got.double(), stands)  # exact
    assert torch.equal(dequantised(values, scales, torch.float64), stands)
    for arguments, error, message in (
        ((weight, scales), TypeError, "`weight` is torch.float32, expected torch.float8_e4m3fn"),
        ((values, scales.view(torch.uint8)), TypeError, "`scale` is torch.uint8, expected"),
        ((values, scales[:1]), ValueError, r"shape \[1, 3\], expected \[2, 3\] for a weight \[200"),
    ):
        with pytest.raises(error, match=message):
            dequantised(*arguments)


EVERY_EXPERT = dict(index_topk=64, num_experts_per_tok=4)  # nothing that a near-tie decides
QUANTIZED = ("q_a_proj", "q_b_proj", "kv_proj", "o_a_proj", "o_b_proj")


def checkpoint_in_int8(weight):
    """(int8 [N, K], a scale for each row, what they stand for)"""
    scale = weight.abs().amax(1, keepdim=True) / 127
    values = (weight / scale).round().to(torch.int8)
    return values, scale, values.double() * scale.double()


def quantized_model(model, kind="fp8"):
    """(the model with attention projections as a checkpoint of 8 bits has them, the one that they
    stand for)"""
    quantized, wide = copy.deepcopy(model), copy.deepcopy(model)
    of, leaf = (
        (checkpoint_of, "weight_scale_inv")
        if kind == "fp8"
        else (checkpoint_in_int8, "weight_scale")
    )
    for theirs, ours in zip(wide.model.layers, quantized.model.layers, strict=True):
        tensors, index = {}, "compressor.indexer.q_b_proj"
        has_index = hasattr(theirs.self_attn.compressor, "indexer")
        for name in (*QUANTIZED, index) if has_index else QUANTIZED:
            linear = theirs.self_attn.get_submodule(name)
            values, scales, stands = of(linear.weight.detach())
            linear.weight.data.copy_(stands)
            tensors |= {f"{name}.weight": values, f"{name}.{leaf}": scales}
            if kind == "fp8" and name != "o_a_proj":  # as Transformers loads it
                sizes = linear.in_features, linear.out_features
                ours.self_attn.set_submodule(name, FP8Linear(*sizes, (128, 128), scale_fmt="ue8m0"))
        load_as_it_is(ours.self_attn, tensors)
    return quantized, wide


@pytest.fixture(scope="module")
def of_whole_blocks():
    """A group of the output projection has whole scales."""
    return deepseek_v4(o_lora_rank=128, **EVERY_EXPERT)


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_quantized_checkpoint_is_dequantized(model, layer):
    """Into what its projections stand for, a scale of two groups among them."""
    quantized, wide = (each.model.layers[layer].self_attn for each in quantized_model(model))
    got, expected = (
        sparse_attention_v4_weights(each, "linear", torch.bfloat16, dequantise=True).arguments
        for each in (quantized, wide)
    )
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(got[name], value) and got[name].dtype is value.dtype, name
        else:
            assert got[name] == value
    assert sparse_attention_v4_weights(quantized, dequantise=True).w_dq.dtype is torch.bfloat16
    with pytest.raises(custom.NotSupported, match="`o_a_proj` has 32 rows, expected a multiple of"):
        sparse_attention_v4_weights(quantized)
    quantized.q_a_proj.weight_scale_inv = torch.nn.Parameter(torch.ones(2, 1))
    with pytest.raises(custom.NotSupported, match=r"q_a_proj.weight_scale_inv` has shape \[2, 1\]"):
        sparse_attention_v4_weights(quantized, dequantise=True)


@pytest.mark.parametrize("kind, mode", [("fp8", 4), ("int8", 2)])
def test_quantized_weights_stay_so(of_whole_blocks, kind, mode):
    """In the checkpoint's own memory; what they stand for takes twice as much."""
    quantized, wide = quantized_model(of_whole_blocks, kind)
    for ours, theirs in zip(quantized.model.layers, wide.model.layers, strict=True):
        own = {each.untyped_storage().data_ptr() for each in ours.self_attn.parameters()}
        given, stands = (
            sparse_attention_v4_weights(each.self_attn, dtype=torch.bfloat16).arguments
            for each in (ours, theirs)
        )
        assert (given["weight_quant_mode"], given["weight_format"]) == (mode, "linear")
        scales = [name for name in given if name.startswith("dequant_scale_")]
        assert len(scales) == (6 if given["w_idx_qb"] is not None else 5)
        for scale in scales:
            w = given[scale.removeprefix("dequant_scale_")]
            assert w.untyped_storage().data_ptr() in own
            assert 2 * w.nbytes == stands[scale.removeprefix("dequant_scale_")].nbytes
        whole = layer_v4.of_floats(given, torch.float64)
        for name in _QUANTIZED:
            if given.get(name) is not None:
                assert torch.equal(whole[name].bfloat16(), stands[name]), name


class Quantized:
    """What the op's products with weights of 8 bits made of their inputs, in their order."""

    def __init__(self, monkeypatch) -> None:
        self.seen: list[weight_args.Rows] = []
        made = weight_args.rows

        def rows(*given):
            out = made(*given)
            if out.scale is not None:
                self.seen.append(out)
            return out

        monkeypatch.setattr(weight_args, "rows", rows)

    def taken(self, requests, passes=1):
        """Of all tokens [B, S, ..]: those of each pass behind those of the one before."""
        each = [
            [x.view(requests, -1, x.shape[-1]) for x in rows if x is not None] for rows in self.seen
        ]
        each = [each[at :: len(each) // passes] for at in range(len(each) // passes)]
        self.seen.clear()
        return [tuple(torch.cat(x, 1) for x in zip(*parts, strict=True)) for parts in each]


def half_steps(values, scale):
    """Of the numbers of 8 bits, [.., K]: half of what lies between one and the next."""
    if values.dtype is torch.int8:
        return scale.double() / 2
    exponent = values.double().abs().clamp(min=2.0**-6).log2().floor()
    steps = quantization.stands_for(torch.ones_like(values), scale)
    return steps * (exponent - 4).exp2()


def assert_are_nearest(x, values, scale):
    """`values` times `scale` are the numbers of 8 bits next to x [T, K], up to its float32 sums."""
    kind = "int8" if values.dtype is torch.int8 else "fp8"
    off = CLOSE["atol"] + CLOSE["rtol"] * x.double().abs()
    by = [quantization.activations(x * (1 + e), kind)[1] for e in (-CLOSE["rtol"], CLOSE["rtol"])]
    least, most = by[0] - CLOSE["atol"] / 127, by[1] + CLOSE["atol"] / 127
    assert ((least <= scale) & (scale <= most)).all()
    far = (quantization.stands_for(values, scale) - x.double()).abs()
    assert (far <= half_steps(values, scale) + off).all()


def with_inputs(model, inputs):
    """Transformers' own model, whose quantized projections meet what the op made of their inputs:
    the nearest numbers of 8 bits, by a formula of its own."""
    left = iter(inputs)

    def hook(_, given):
        x = given[0]
        flat = x.view(*x.shape[:2], -1, x.shape[-1])  # [B, S, groups, K]
        out = []
        for part in flat.unbind(2):
            values, scale = (each.flatten(0, 1) for each in next(left))
            assert_are_nearest(part.flatten(0, 1), values, scale)
            out.append(quantization.stands_for(values, scale).view(part.shape).to(x.dtype))
        return (torch.stack(out, 2).view(x.shape),)

    for layer in model.model.layers:
        index = getattr(layer.self_attn.compressor, "indexer", None)
        for linear in [getattr(layer.self_attn, name) for name in QUANTIZED]:
            linear.register_forward_pre_hook(hook)
        if index is not None:
            index.q_b_proj.register_forward_pre_hook(hook)
    return left


@pytest.mark.parametrize("weight_format", ["linear", "nz"])
@pytest.mark.parametrize("kind", ["fp8", "int8"])
@torch.inference_mode()
def test_logits_with_quantized_weights(of_whole_blocks, kind, weight_format, monkeypatch):
    """Those of the unmodified model with the same inputs of 8 bits, which are the nearest to its
    own: a number between two of them goes either way by a rounding of float32, in both alike."""
    quantized, wide = quantized_model(of_whole_blocks, kind)
    ids = torch.randint(
        quantized.config.vocab_size, (2, 33), generator=torch.Generator().manual_seed(3)
    )
    dequantized = wide(ids, use_cache=False).logits
    with use(weight_format=weight_format, page_size=16, dequantise=True):
        got = quantized(ids, use_cache=False).logits
    torch.testing.assert_close(got, dequantized, **CLOSE)
    seen, results = Quantized(monkeypatch), []
    with use(weight_format=weight_format, page_size=16):
        before = ran(OP)
        results.append((quantized(ids, use_cache=False).logits, seen.taken(len(ids))))
        assert ran(OP) - before == quantized.config.num_hidden_layers
        cache = transformers.DynamicCache(config=quantized.config)
        parts = [quantized(each, past_key_values=cache).logits for each in ids.split((30, 1, 2), 1)]
        results.append((torch.cat(parts, 1), seen.taken(len(ids), 3)))
    for got, inputs in results:
        theirs = copy.deepcopy(wide)
        left = with_inputs(theirs, inputs)
        expected = theirs(ids, use_cache=False).logits
        assert next(left, None) is None  # each of them has been met
        torch.testing.assert_close(got, expected, **CLOSE)
        assert not torch.allclose(got, dequantized, **CLOSE)


def test_projections_of_two_kinds_are_refused(of_whole_blocks):
    quantized, wide = (each.model.layers[0].self_attn for each in quantized_model(of_whole_blocks))
    quantized.o_a_proj = wide.o_a_proj
    with pytest.raises(custom.NotSupported, match=r"o_a_proj torch.float32, .* or dequantise=True"):
        sparse_attention_v4_weights(quantized)
    assert sparse_attention_v4_weights(quantized, dequantise=True).w_o_a.dtype is torch.bfloat16


def test_no_weight_is_copied(model):
    layers = model.model.layers
    for layer in layers:
        own = {each.untyped_storage().data_ptr() for each in layer.self_attn.parameters()}
        arguments = sparse_attention_v4_weights(layer.self_attn).arguments
        assert arguments["weight_format"] == "linear"
        for name, value in arguments.items():
            if isinstance(value, torch.Tensor):
                assert value.untyped_storage().data_ptr() in own, name


def test_rings_move_what_may_still_be_read():
    """Of requests shorter and longer than a ring."""
    caches = V4Caches(config(), requests=3, capacity=144, tokens=130, drafts=2, page_size=16)
    layer, lengths = caches.layers[1], torch.tensor([130, 3, 0])
    assert layer.ori_kv.shape == (30, 16, 1, 32) and layer.cmp_kv.shape == (27, 4, 1, 32)
    assert layer.cmp_state.shape == (3, 9, 128) and layer.idx_state.shape == (3, 9, 64)
    assert caches.layers[2].cmp_state.shape == (3, 9, 64)
    assert caches.layers[0].arguments["cmp_block_table"] is None

    def row(layer, request, position):
        page = layer.ori_block_table[request, position // 16]
        return layer.ori_kv[page, position % 16]

    for request, length in enumerate(lengths.tolist()):
        for position in range(length):
            row(layer, request, position).fill_(1000 * request + position)
    caches.fit(40, lengths)
    assert caches.layers[1] is layer  # long enough, and not four times as long
    caches.reserve(200)
    assert caches.capacity == 208
    caches.fit(1, lengths)
    moved = caches.layers[1]
    assert moved.ori_kv.shape[0] == 6 and moved.ori_block_table.shape == (3, 13)
    for request, length in enumerate(lengths.tolist()):
        for position in range(max(0, length - 9), length):
            assert (row(moved, request, position) == 1000 * request + position).all()
    with pytest.raises(ValueError, match="multiple of 16"):
        V4Caches(config(), requests=1, capacity=1, page_size=8)


@pytest.mark.parametrize(
    "page, ratios, made", [(64, (4, 128), 128), (16, (4, 8), 16), (16, (3,), 48), (48, (8,), 384)]
)
def test_pages_hold_whole_entries(page, ratios, made):
    kinds = [CSA, HCA][: len(ratios)]
    small = config(
        num_hidden_layers=len(kinds),
        layer_types=kinds,
        compress_rates=dict(zip(kinds, ratios, strict=True)),
    )
    caches = V4Caches(small, requests=1, capacity=1, page_size=page)
    assert caches.page_size == made


# ------------------------------------------------------------------------------ training, compiling


def rotated(x, cos, sin):
    return float64().apply_rotary_pos_emb(x, cos, sin, unsqueeze_dim=2)


def attention_by_our_ops(module, x, angles):
    """`DeepseekV4Attention.forward` without a cache; of its stages those with a gradient are
    ours."""
    m, (requests, tokens) = module, x.shape[:2]
    cos, sin = angles(torch.arange(tokens)[None])[m.rope_layer_type]
    c = m.q_a_norm(m.q_a_proj(x))
    q = rotated(m.q_b_norm(m.q_b_proj(c).unflatten(-1, (-1, m.head_dim))), cos, sin)
    rows = rotated(m.kv_norm(m.kv_proj(x))[:, :, None], cos, sin)
    entries, chosen, ratio = None, None, 0
    if m.compressor is not None:
        ratio = m.compressor.compress_rate
        first = torch.arange(-(-tokens // ratio))[None].expand(requests, -1) * ratio

        def compressed(part):
            cos, sin = (angle.contiguous() for angle in angles(first)["compress"])
            return custom.npu_compressor(
                x,
                part.kv_proj.weight,
                part.gate_proj.weight,
                None,
                part.position_bias,
                part.kv_norm.weight,
                sin,
                cos,
                2 * sin.shape[-1],
                ratio,
                rotary_mode=2,
                coff=part.position_bias.shape[1] // part.head_dim,
                norm_eps=part.kv_norm.variance_epsilon,
            )[:, :, None]

        entries = compressed(m.compressor)
        indexer = getattr(m.compressor, "indexer", None)
        if indexer is not None:
            query = indexer.q_b_proj(c).unflatten(-1, (-1, indexer.head_dim))
            chosen, _ = custom.npu_lightning_indexer(
                rotated(query, cos, sin),
                compressed(indexer),
                indexer.scorer.weights_proj(x),
                sparse_count=indexer.index_topk,
                cmp_ratio=ratio,
                actual_seq_lengths_key=torch.full((requests,), tokens),
            )
    out, _ = custom.npu_sparse_attn_sharedkv(
        q,
        ori_kv=rows,
        cmp_kv=entries,
        cmp_sparse_indices=chosen,
        sinks=m.sinks,
        softmax_scale=m.scaling,
        cmp_ratio=ratio,
        ori_win_left=m.sliding_window - 1,
        layout_kv="BSND",
        seqused_kv=torch.full((requests,), tokens),
    )
    out = rotated(out, cos, -sin).flatten(2).unflatten(-1, (m.config.o_groups, -1))
    return m.o_b_proj(m.o_a_proj(out).flatten(2))


@pytest.mark.parametrize("kind", [SLIDING, CSA, HCA])
def test_training_has_the_gradients_of_transformers_code(kind):
    """A block of attention with its streams, in float64: of the input and of all parameters."""
    attention = Attention([SLIDING, CSA, HCA].index(kind))
    streams = drawn(float64().DeepseekV4HyperConnection(attention.config))
    parameters = dict(attention.module.named_parameters()) | dict(streams.named_parameters())
    x = torch.randn(2, 27, 4, 40, dtype=torch.float64)
    for each in (x, *parameters.values()):
        each.requires_grad_(True)
    positions = torch.arange(27)[None]
    mask = torch.ones(27, 27, dtype=torch.bool).tril() & ~torch.ones(27, 27).bool().tril(-8)
    mask = torch.zeros(2, 1, 27, 27, dtype=torch.float64).masked_fill(~mask, -torch.inf)

    post, comb, y = streams(x)
    out, _ = attention.module(y, attention.angles(positions), positions.expand(2, -1), mask)
    expected = post[..., None] * out[:, :, None] + comb.mT @ x

    y, post, comb = custom.npu_hc_pre(x, streams.fn, streams.scale, streams.base)
    out = attention_by_our_ops(attention.module, y, attention.angles)
    got = custom.npu_hc_post(out, x, post, comb)

    weight = torch.randn_like(got)
    grads, wanted = (
        torch.autograd.grad((each * weight).sum(), (x, *parameters.values()), allow_unused=True)
        for each in (got, expected)
    )
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)
    for name, grad, own in zip(["x", *parameters], grads, wanted, strict=True):
        unused = "indexer" in name  # the selection has no gradient
        assert (grad is None) == (own is None) == unused, name
        if own is not None:
            torch.testing.assert_close(grad, own, rtol=1e-9, atol=1e-9, msg=name)


@torch.no_grad()
def test_a_decode_step_compiles_into_one_graph(model):
    """Two tokens a step, over positions that close entries of neither kind, of one and of both;
    experts, which Transformers loops over, are the shared ones."""
    inner = model.model
    weights = [sparse_attention_v4_weights(layer.self_attn) for layer in inner.layers]
    ids = torch.randint(1, 128, (2, 33))

    def step(tokens, lengths, caches):
        positions = token_positions(lengths, tokens.shape[1])
        hidden = inner.embed_tokens(tokens)
        streams = hidden[:, :, None].expand(-1, -1, 4, -1).contiguous()
        for layer, w, pools in zip(inner.layers, weights, caches.layers, strict=True):
            angles = caches.angles(lengths, tokens.shape[1], w.options["cmp_ratio"])
            for hc, norm in (
                (layer.attn_hc, layer.input_layernorm),
                (layer.ffn_hc, layer.post_attention_layernorm),
            ):
                y, post, comb = custom.npu_hc_pre(streams, hc.fn, hc.scale, hc.base)
                y = norm(y)
                if hc is layer.attn_hc:
                    y = custom.npu_sparse_attention_v4_pto(
                        y, act_seqs=lengths, **w.arguments, **pools.arguments, **angles
                    )
                else:
                    y = layer.mlp.shared_experts(y)
                streams = custom.npu_hc_post(y, streams, post, comb)
        head = inner.hc_head
        y, _, _ = custom.npu_hc_pre(streams, head.hc_fn, head.hc_scale, head.hc_base)
        return model.lm_head(inner.norm(y)) + 0 * positions.sum()

    graphs = []

    def backend(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    found = []
    for run in (step, compiled):
        caches = V4Caches(model.config, requests=2, capacity=33, tokens=21, page_size=16)
        out = [step(ids[:, :21], torch.tensor([21, 20]), caches)]
        for at in range(21, 33, 2):
            out.append(run(ids[:, at : at + 2], torch.tensor([at + 2, at + 1]), caches))
        found.append(torch.cat(out, 1))
    assert torch.equal(*found)
    assert len(graphs) == 1
    targets = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert sum("npu_sparse_attention_v4_pto" in each for each in targets) == 3
    assert sum("npu_hc_post" in each for each in targets) == 6


@torch.inference_mode()
def test_the_released_ratios_and_window():
    """Entries of 4 and 128 tokens, of which one is a page; a window of 128."""
    model = deepseek_v4(compress_rates={CSA: 4, HCA: 128}, sliding_window=128)
    ids = torch.randint(1, 128, (1, 270))
    expected = model(ids, use_cache=False).logits
    with use():
        cache = transformers.DynamicCache(config=model.config)
        parts = ids.split((125, 2, 1, 1, 126, 1, 14), 1)
        got = torch.cat([model(part, past_key_values=cache).logits for part in parts], 1)
    assert [each.cmp_kv.shape[1] for each in cache.layers[0].caches.layers[1:]] == [32, 1]
    torch.testing.assert_close(got, expected, **CLOSE)


def by_its_own_code(model, x):
    """The unmodified attention of layer 1, of the first request."""
    positions, inner = torch.arange(3)[None], model.model
    angles = {
        kind: inner.rotary_emb(x[:1], positions, layer_type=kind) for kind in ("main", "compress")
    }
    mask = torch.full((1, 1, 3, 3), -torch.inf).triu(1)
    return inner.layers[1].self_attn(x[:1], angles, positions, mask)[0][0]


@torch.inference_mode()
def test_the_step_of_the_page(model):
    page = Path(__file__).parents[2] / "docs" / "deepseek_v4.md"
    block = re.findall(r"```python\n(.*?)```", page.read_text(), re.S)[1].replace('"cuda"', '"cpu"')
    x, lengths = torch.randn(2, 3, 64), torch.tensor([3, 2])
    names = dict(custom=custom, model=model, B=2, S=3, i=1, x=x, lengths=lengths)
    exec(block, names)
    expected = by_its_own_code(model, x)
    torch.testing.assert_close(names["y"][0], expected, **CLOSE)
