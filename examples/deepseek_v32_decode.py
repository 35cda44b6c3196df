# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Serve a DeepSeek-V3.2 model with `custom.npu_sparse_attention_pto`.

    python examples/deepseek_v32_decode.py [--device cuda] [--dtype bfloat16] [--help]
    python examples/deepseek_v32_decode.py --weights fp8 --caches fp8

A small Hugging Face DeepseekV32ForCausalLM (random weights, so it babbles) is given real text. It
prefills and decodes many requests of different lengths in one batch, every layer's attention being
one call of the op on the model's own weights and paged caches; first one token a step, then two (as
with multi-token prediction). Everything is held against the unmodified model, and timed beside it.
With `--weights` the attention's projections are read as a checkpoint of 8 bits keeps them, with
`--caches` latents and index keys are of 8 bits: then the unmodified model has what the weights
stand for, and the logits a bound that follows from the formats.
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
from transformers import DeepseekV32Config, DeepseekV32ForCausalLM

import custom
from custom.integrations.paged import PagedCaches, token_positions
from custom.integrations.transformers import cache_widths, sparse_attention_weights

# roundings that a layer's activations go through one after the other: 13 in the attention (norm,
# the query's and the key's latent, their norms, up-projection, rotation, probabilities, output, two
# projections, residual), 12 in the MLP (norm, router, gated experts, their sum, residual)
ROUNDINGS = 25


class Server:
    """The model's forward pass on paged caches, for requests that all have their own length.

    On an NPU the attention of a step is one graph a layer, from the second step of its shape on.
    """

    def __init__(self, model, requests, capacity, weight_format=None, seed=0, caches="bf16"):
        self.model = model
        # layers whose weights are of 8 bits have them beside what they stand for
        self.weights = [
            sparse_attention_weights(getattr(layer, "quantized", layer.self_attn), weight_format)
            for layer in model.model.layers
        ]
        kind = {"bf16": "none"}.get(caches, caches)
        self.caches = PagedCaches(
            len(self.weights),
            cache_widths(model.config),
            requests=requests,
            capacity=capacity,
            page_size=16,
            dtype=model.dtype,
            device=model.device,
            seed=seed,
            kv_kind=kind,
            index_kind=kind,
        )
        self.selected: Any = None  # [layers, B, positions, K], where they are recorded
        self.attend = [
            Replayed(partial(self.attention, index)) for index in range(len(self.weights))
        ]

    def attention(self, index, state, x, cos, sin, slots, lengths):
        """(what the attention of layer `index` adds, the selected positions where they are kept)"""
        block_table, pools = state
        w = self.weights[index]
        arguments: dict[str, Any] = dict(
            x=x,
            sin=sin,
            cos=cos,
            cache_index=slots,
            block_table=block_table,
            act_seqs=lengths,
            **w.arguments,
            **pools.arguments,
            **self.caches.kinds,
        )
        if self.selected is None:
            latent, chosen = custom.npu_sparse_attention_pto(**arguments), None
        else:
            latent, chosen = custom.npu_sparse_attention_indices_pto(**arguments)
        return self.model.model.layers[index].self_attn.o_proj(w.values(latent)), chosen

    def forward(self, tokens, lengths):
        """Logits [B, S, V] of the last S tokens of requests that are `lengths` [B] long with them.

        Prefill, decode and verification of drafts differ in S alone. A request shorter than S is
        padded on the left: its rows at negative positions have slot -1 and see nothing.
        """
        positions = token_positions(lengths, tokens.shape[1])
        slots = self.caches.slots(positions)
        hidden = self.model.model.embed_tokens(tokens)
        cos, sin = self.model.model.rotary_emb(hidden, positions.clamp(min=0))
        for index, layer in enumerate(self.model.model.layers):
            x = layer.input_layernorm(hidden)
            state = (self.caches.block_table, self.caches.layers[index])
            attended, chosen = self.attend[index](state, x, cos, sin, slots, lengths)
            if chosen is not None:
                row, column = (positions >= 0).nonzero(as_tuple=True)
                self.selected[index, row, positions[row, column]] = chosen[row, column, 0]
            hidden = hidden + attended
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return self.model.lm_head(self.model.model.norm(hidden))

    def record_selection(self):
        """From now on keep, by layer and position, which positions each token attends to."""
        topk, layers = self.model.config.index_topk, len(self.weights)
        shape = (layers, len(self.caches.block_table), self.caches.capacity, topk)
        self.selected = torch.full(shape, -1, dtype=torch.int32, device=self.model.device)


def reference_logits(model, prompts, lengths, generated, selected, more):
    """Logits [B, new, V] of the unmodified model for the same tokens, request by request.

    Its indexers answer what ours selected: which of two keys with nearly the same score is taken is
    up to the last bit, and changes the output. Asserted is that all of ours are among the best by
    its own scores, `more` times top-k of them: a quarter more reaches some 0.2 standard deviations
    of the scores further down, ten times as far as bfloat16 moves a score; twice as many 0.67, and
    sixteen numbers of e4m3 one after the other (two layers and the indexer) move it by 0.1, rms.
    """
    topk, logits, swapped = model.config.index_topk, [], 0
    for b, length in enumerate(lengths.tolist()):
        ids = torch.cat([prompts[b, prompts.shape[1] - length :], generated[b, :-1]])[None]
        here = torch.arange(ids.shape[1], device=ids.device)[:, None]

        def answer(indexer, chosen, *args, here=here, **kwargs):
            nonlocal swapped
            best = type(indexer).forward(indexer, *args, **kwargs)[0].long()  # best first
            rank = best.new_full((len(here), len(here)), topk * 2)
            rank.scatter_(1, best, torch.arange(best.shape[1], device=best.device).expand_as(best))
            chosen = chosen.where(chosen >= 0, here)  # -1: fewer positions than top-k
            rank = rank.gather(1, chosen.long()).where(here >= topk, 0)
            assert int(rank.max()) < topk * 2, (
                "selected a key that the unmodified indexer ranks low"
            )
            swapped += int((rank >= topk).sum())
            return chosen[None]

        for index, layer in enumerate(model.model.layers):
            indexer = layer.self_attn.indexer
            indexer.index_topk = int(topk * more)
            indexer.forward = partial(answer, indexer, selected[index, b, : ids.shape[1]])
        logits.append(model(ids, use_cache=False).logits[0, length - 1 :])
    for layer in model.model.layers:
        del layer.self_attn.indexer.forward
        layer.self_attn.indexer.index_topk = topk
    total = int((selected >= 0).sum())
    print(f"  indexer: {swapped} of {total} selected keys are near-ties, taken otherwise")
    return torch.stack(logits)


def timed_generate(model, padded, new):
    """Greedy tokens [B, new] of the unmodified model with its own cache; prints its speed."""
    seconds = []
    for count in (2, 1, new):  # the first one warms up
        begin = time.perf_counter()
        out = model.generate(**padded, max_new_tokens=count, min_new_tokens=count, do_sample=False)
        int(out[0, -1])  # wait for the device
        seconds.append(time.perf_counter() - begin)
    prompt, requests = padded["attention_mask"], len(out)
    prefill, decoded = int(prompt.sum()) / seconds[1], requests * (new - 1)
    print(
        f"  unmodified model: prefill {prefill:.0f} tokens/s, "
        f"decode {decoded / (seconds[2] - seconds[1]):.0f} tokens/s"
    )
    return out[:, prompt.shape[1] :]


PROJECTIONS = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "indexer.wq_b", "indexer.wk")


def make_model(vocabulary, topk, quantized=False):
    """`quantized`: with the sizes that caches of 8 bits have, DeepSeek-V3.2's own."""
    latent, rope, index = (512, 64, 128) if quantized else (64, 16, 32)
    config = DeepseekV32Config(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=3,
        first_k_dense_replace=1,
        num_attention_heads=8,
        num_key_value_heads=8,
        q_lora_rank=64,
        kv_lora_rank=latent,
        qk_nope_head_dim=32,
        qk_rope_head_dim=rope,
        v_head_dim=32,
        index_n_heads=16,
        index_head_dim=index,
        index_topk=topk,
        max_position_embeddings=4 * 4096,
        # every expert is chosen: which ones a near-tie would pick is not the subject here
        n_routed_experts=4,
        num_experts_per_tok=4,
        n_group=1,
        topk_group=1,
        rope_parameters=dict(
            rope_type="yarn",
            rope_theta=10000.0,
            factor=4.0,
            original_max_position_embeddings=4096,
            mscale=1.0,
            mscale_all_dim=1.0,
            beta_fast=32,
            beta_slow=1,
        ),
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    return DeepseekV32ForCausalLM(config).eval()


def run(model, tokenizer, options):
    """Serve once in the model's dtype, and hold it against the unmodified model."""
    new, layers = options.new_tokens, model.config.num_hidden_layers
    roundings = ROUNDINGS * layers
    # of 8 bits: the layer's input and the query latent; the latents in the cache
    quantization = quantization_of(options, layers, 2)
    more = 2 if quantization else 5 / 4
    padded, lengths = make_prompts(tokenizer, options.batch, options.context - new)
    padded, lengths = padded.to(model.device), lengths.to(model.device)
    prompts = padded["input_ids"]
    announce(model, options, lengths, "context")

    def serve(title, decode, extra, record=False, quiet=False):
        server = Server(
            model, options.batch, options.context, options.weight_format, caches=options.caches
        )
        if record:
            server.record_selection()
        out = timed(title, server, decode, prompts, lengths, extra, new, quiet=record or quiet)
        return *out, server.selected

    one, two = "one token a step", "two tokens a step"
    if model.device.type != "cpu":  # kernels are compiled at their first call
        tokens, *_ = serve("warming up", generate, new, quiet=True)
        serve("warming up", verify_drafts, tokens, quiet=True)
    tokens, *_ = serve(one, generate, new)
    steps = serve(two, verify_drafts, tokens)[1]
    print(f"  {two}: {new - 1} tokens in {steps} steps, every third draft rejected")
    theirs = timed_generate(model, padded, new)
    same = theirs == tokens
    if quantization:
        print(f"  generated tokens: {int(same.sum())} of {same.numel()} the unmodified model's")
    elif model.dtype == torch.float32:
        assert same.all(), f"{int((~same).sum())} of {same.numel()} generated tokens differ"
        print(f"  generated tokens: all {same.numel()} equal to the unmodified model's")

    # the logits of both ways to decode, against the unmodified model on the same tokens
    tokens, logits, selected = serve("recording the selection", generate, new, record=True)
    reference = reference_logits(model, prompts, lengths, tokens, selected, more)
    check(one, logits, tokens, reference, roundings, quantization)
    logits, _, selected = serve("recording the selection", verify_drafts, tokens, record=True)
    reference = reference_logits(model, prompts, lengths, tokens, selected, more)
    check(two, logits, logits.argmax(-1), reference, roundings, quantization)
    print_answers(tokenizer, prompts, tokens)


def main():
    options, device, dtypes, quantized = begin(__doc__)
    tokenizer = make_tokenizer()
    with torch.inference_mode():
        for dtype in dtypes:
            model: Any = make_model(len(tokenizer), topk=options.context // 4, quantized=quantized)
            model = model.to(device, dtype)
            if options.weights != "bf16":
                for layer in model.model.layers:
                    quantize_weights(layer, PROJECTIONS, options.weights)
            run(model, tokenizer, options)
    print_backends()


if __name__ == "__main__":
    main()
