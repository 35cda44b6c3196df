# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Serve a DeepSeek-V4 model with `custom.npu_sparse_attention_v4_pto`.

    python examples/deepseek_v4_decode.py [--device cuda] [--dtype bfloat16] [--help]
    python examples/deepseek_v4_decode.py --weights fp8 --caches fp8

A small Hugging Face DeepseekV4ForCausalLM (random weights, so it babbles) with all three kinds of
layer is given real text. It prefills and decodes many requests of different lengths in one batch,
every layer's attention being one call of the op, its residual streams mixed by
`npu_hc_pre` and `npu_hc_post_pre`; first one token a step, then two (as with multi-token
prediction), of which some are taken back. Everything is held against the unmodified model, which
runs a request at a time: in a batch it compresses padding. In float32 an indexer selects a part of
the entries; in half precision, where two whose scores nearly tie may change places, all of them.
With `--weights` the layer takes weights of 8 bits, and the unmodified model what they stand for.
With `--caches fp8` rows and entries are of 584 bytes and index keys of 132, with `int8` index keys
alone are of 8 bits.
`Server` is the part to take home.
"""

from _options import decoding

if __name__ == "__main__":  # what is wrong is said before the imports, which take seconds
    decoding(__doc__)

import time
from functools import partial
from typing import Any

import torch
from _agreement import check, quantization_of
from _decoding import (
    announce,
    begin,
    generate,
    print_answers,
    quantize_weights,
    timed,
    verify_drafts,
)
from _device import print_backends
from _text import make_prompts, make_tokenizer
from custom.graph_mode import Replayed
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

import custom
from custom.integrations.deepseek_v4 import V4Caches
from custom.integrations.transformers import sparse_attention_v4_weights

# roundings that a layer's activations go through one after the other: 14 in the attention (streams,
# norm, the query's latent, its norm, up-projection, norm and rotation, the row's projection, norm
# and rotation, probabilities, output, two projections), 14 in the MLP (streams, norm, router, gated
# experts, their sum, streams)
ROUNDINGS = 28


class Server:
    """The model's forward pass on our caches, for requests that all have their own length.

    On an NPU the attention of a step is one graph a layer, from the second step of its shape on.
    """

    def __init__(self, model, requests, capacity, weight_format=None, seed=0, caches="bf16"):
        self.model, inner = model, model.model
        # layers whose weights are of 8 bits have them beside what they stand for
        self.weights = [
            sparse_attention_v4_weights(
                getattr(layer, "quantized", layer.self_attn), weight_format, model.dtype
            )
            for layer in inner.layers
        ]
        self.caches = V4Caches(
            model.config,
            requests=requests,
            capacity=capacity,
            drafts=1,
            page_size=16,
            dtype=model.dtype,
            device=model.device,
            seed=seed,
            kv_kind="fp8" if caches == "fp8" else "none",
            index_kind="none" if caches == "bf16" else caches,
        )
        sites = []
        for layer in inner.layers:
            sites.append((layer.attn_hc, layer.input_layernorm))
            sites.append((layer.ffn_hc, layer.post_attention_layernorm))
        self.sites = [self.site(hc.fn, hc.scale, hc.base, norm) for hc, norm in sites]
        head = inner.hc_head
        self.sites.append(self.site(head.hc_fn, head.hc_scale, head.hc_base, inner.norm))
        self.attend = [
            Replayed(partial(self.attention, index)) for index in range(len(self.weights))
        ]

    def site(self, fn, scale, base, norm):
        """A place where the streams come together, with the norm of the sublayer behind it."""
        config, tensors = self.model.config, dict(hc_fn=fn, hc_scale=scale, hc_base=base)
        return dict(
            {name: tensor.float() for name, tensor in tensors.items()},
            norm_weight=norm.weight.float(),
            norm_eps=config.rms_norm_eps,
            hc_eps=config.hc_eps,
            hc_sinkhorn_iters=config.hc_sinkhorn_iters,
        )

    def attention(self, index, state, x, lengths, angles):
        (pools,) = state
        return custom.npu_sparse_attention_v4_pto(
            x, act_seqs=lengths, **self.weights[index].arguments, **pools.arguments, **angles
        )

    def forward(self, tokens, lengths):
        """Logits [B, S, V] of the last S tokens of requests that are `lengths` [B] long with them.

        Prefill, decode and verification of drafts differ in S alone: to take a token back, come
        again with a smaller length. A request shorter than S is padded on the left.
        """
        self.caches.fit(tokens.shape[1], lengths - tokens.shape[1])
        angles = {
            ratio: self.caches.angles(lengths, tokens.shape[1], ratio)
            for ratio in {w.options["cmp_ratio"] for w in self.weights}
        }
        streams = self.model.model.embed_tokens(tokens)[:, :, None]
        streams = streams.expand(-1, -1, self.model.config.hc_mult, -1).contiguous()
        first, *sites = self.sites
        y, post, comb = custom.npu_hc_pre(streams, **first)
        for index, layer in enumerate(self.model.model.layers):
            turned = angles[self.weights[index].options["cmp_ratio"]]
            y = self.attend[index]((self.caches.layers[index],), y, lengths, turned)
            streams, y, post, comb = custom.npu_hc_post_pre(
                y, streams, post, comb, **sites[2 * index]
            )
            y = layer.mlp(y, input_ids=tokens)
            streams, y, post, comb = custom.npu_hc_post_pre(
                y, streams, post, comb, **sites[2 * index + 1]
            )
        return self.model.lm_head(y)


def reference_logits(model, prompts, lengths, generated):
    """Logits [B, new, V] of the unmodified model for the same tokens, request by request."""
    logits = []
    for prompt, length, new in zip(prompts, lengths.tolist(), generated, strict=True):
        ids = torch.cat([prompt[len(prompt) - length :], new[:-1]])[None]
        logits.append(model(ids, use_cache=False).logits[0, length - 1 :])
    return torch.stack(logits)


def timed_generate(model, prompts, lengths, new):
    """Greedy tokens [B, new] of the unmodified model with its own cache; prints its speed."""
    tokens, begin = [], time.perf_counter()
    for prompt, length in zip(prompts, lengths.tolist(), strict=True):
        ids = prompt[None, len(prompt) - length :]
        out = model.generate(ids, max_new_tokens=new, min_new_tokens=new, do_sample=False)
        tokens.append(out[0, -new:])
    out = torch.stack(tokens)
    int(out[0, -1])  # wait for the device
    speed = out.numel() / (time.perf_counter() - begin)
    print(f"  unmodified model: {speed:.0f} tokens/s, prompts included, a request at a time")
    return out


PROJECTIONS = ("q_a_proj", "q_b_proj", "kv_proj", "o_a_proj", "o_b_proj")
INDEX_PROJECTION = "compressor.indexer.q_b_proj"


def make_model(vocabulary, topk, quantized=False):
    """`quantized`: with the sizes that weights and caches of 8 bits have, DeepSeek-V4's own."""
    size, index = (512, 128) if quantized else (64, 32)
    config = DeepseekV4Config(
        vocab_size=vocabulary,
        hidden_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=8,
        head_dim=size,
        partial_rotary_factor=(64 if quantized else 16) / size,
        q_lora_rank=64,
        layer_types=[
            "sliding_attention",
            "heavily_compressed_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
        ],
        mlp_layer_types=["hash_moe", "moe", "moe", "moe"],
        compress_rates=dict(compressed_sparse_attention=4, heavily_compressed_attention=16),
        sliding_window=16,
        o_groups=2,
        o_lora_rank=128 if quantized else 64,
        index_n_heads=16,
        index_head_dim=index,
        index_topk=topk,
        # every expert is chosen: which ones a near-tie would pick is not the subject here
        n_routed_experts=4,
        num_experts_per_tok=4,
        max_position_embeddings=4 * 4096,
        rope_parameters=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=4096),
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    model: Any = DeepseekV4ForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith(("sinks", "position_bias", "base")):  # all 0 before training
            torch.nn.init.normal_(parameter, 0.0, 0.5)
    for name, buffer in model.named_buffers():
        if name.endswith("tid2eid"):  # four different experts for each token
            buffer.copy_(torch.rand(buffer.shape).argsort(-1))
    return model


def run(model, tokenizer, options):
    """Serve once in the model's dtype, and hold it against the unmodified model."""
    new, layers = options.new_tokens, model.config.num_hidden_layers
    roundings = ROUNDINGS * layers
    # of 8 bits: the layer's input, the query latent, the output and its ranks; what is in the cache
    quantization = quantization_of(options, layers, 4)
    padded, lengths = make_prompts(tokenizer, options.batch, options.context - new)
    prompts, lengths = padded["input_ids"].to(model.device), lengths.to(model.device)
    announce(model, options, lengths, "entries")

    def serve(title, decode, extra, quiet=False):
        server = Server(
            model, options.batch, options.context, options.weight_format, caches=options.caches
        )
        return timed(title, server, decode, prompts, lengths, extra, new, quiet)

    one, two = "one token a step", "two tokens a step"
    if model.device.type != "cpu":  # kernels are compiled at their first call
        tokens, _ = serve("warming up", generate, new, quiet=True)
        serve("warming up", verify_drafts, tokens, quiet=True)
    tokens, logits = serve(one, generate, new)
    drafted, steps = serve(two, verify_drafts, tokens)
    print(f"  {two}: {new - 1} tokens in {steps} steps, every third draft rejected")
    if model.dtype == torch.float32 and not quantization:
        same = timed_generate(model, prompts, lengths, new) == tokens
        assert same.all(), f"{int((~same).sum())} of {same.numel()} generated tokens differ"
        print(f"  generated tokens: all {same.numel()} equal to the unmodified model's")

    # the logits of both ways to decode, against the unmodified model on the same tokens
    reference = reference_logits(model, prompts, lengths, tokens)
    check(one, logits, tokens, reference, roundings, quantization)
    check(two, drafted, drafted.argmax(-1), reference, roundings, quantization)
    print_answers(tokenizer, prompts, tokens)


def main():
    options, device, dtypes, quantized = begin(__doc__)
    tokenizer = make_tokenizer()
    entries = options.context // 4
    with torch.inference_mode():
        for dtype in dtypes:
            topk = entries // 4 if dtype == torch.float32 and not quantized else entries
            model = make_model(len(tokenizer), topk, quantized=quantized).to(device, dtype)
            if options.weights != "bf16":
                for layer in model.model.layers:
                    has_indexer = hasattr(layer.self_attn.compressor, "indexer")
                    names = (*PROJECTIONS, *[INDEX_PROJECTION] * has_indexer)
                    quantize_weights(layer, names, options.weights)
            run(model, tokenizer, options)
    print_backends()


if __name__ == "__main__":
    main()
