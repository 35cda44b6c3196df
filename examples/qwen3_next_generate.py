# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Generate with Hugging Face Qwen3-Next, Qwen3.5 or Kimi-Linear, linear attention by our ops.

    python examples/qwen3_next_generate.py [--model qwen3.5] [--device cuda] [--dtype bfloat16]

Inside `use()` all of a linear layer between its projections is ours, and the model's own states are
updated in place:

    a prompt    npu_causal_conv1d, npu_chunk_gated_delta_rule, npu_gated_rms_norm
                Kimi-Linear: npu_chunk_kda, with the decay's gate inside
    a token     npu_gated_delta_layer_decode
                Kimi-Linear: npu_causal_conv1d_update, npu_fused_sigmoid_gating_delta_rule_update,
                npu_gated_rms_norm
    drafts      npu_causal_conv1d, npu_recurrent_gated_delta_rule, npu_gated_rms_norm

The model is small and its weights are random, so it babbles; the unmodified model babbles the same.

With `--drafts` a request is decoded once more, several tokens a step: drafts are verified in one
pass, and what is refused is taken back from the states.
"""

from _options import generating

if __name__ == "__main__":  # what is wrong is said before the imports, which take seconds
    generating(__doc__)

import time
from functools import partial
from typing import Any

import torch
from _agreement import check
from _device import choose_device, print_backends
from _text import make_prompts, make_tokenizer
from transformers import (
    KimiLinearConfig,
    KimiLinearForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    logging,
)

from custom.integrations.drafts import verification
from custom.integrations.transformers import use

# as in deepseek_v32_decode.py: 13 in the recurrence or attention, 12 in the MLP
ROUNDINGS = 25


def make_kimi_linear(vocabulary):
    config = KimiLinearConfig(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=4,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=32,
        linear_num_heads=4,
        linear_head_dim=32,
        num_local_experts=4,
        num_experts_per_tok=4,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    return KimiLinearForCausalLM(config).eval()


def make_qwen(vocabulary, dense=False):
    sizes: dict[str, Any] = dict(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,  # three of linear attention, one of full attention
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    # every expert is chosen: which ones a near-tie would pick is not the subject here
    experts: dict[str, Any] = dict(
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        num_experts=4,
        num_experts_per_tok=4,
    )
    torch.manual_seed(0)
    if dense:
        return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**sizes)).eval()
    return Qwen3NextForCausalLM(Qwen3NextConfig(**sizes, **experts)).eval()


MODELS = {
    "qwen3-next": make_qwen,
    "qwen3.5": partial(make_qwen, dense=True),
    "kimi-linear": make_kimi_linear,
}


def speculate(model, prompt, new, drafts, foretold):
    """(tokens of a greedy decode [new], how many drafts were made, how many of them were right).

    Random weights say nothing twice, so that no lookup would be right: the drafts are `foretold`,
    every fifth of them changed.
    """
    told = [(token + (at % 5 == 4)) % model.config.vocab_size for at, token in enumerate(foretold)]
    made = right = 0
    seen = model(prompt, use_cache=True)
    cache, said = seen.past_key_values, [int(seen.logits[0, -1].argmax())]
    while len(said) < new:
        tokens = said[-1:] + told[len(said) :][:drafts]
        with verification(cache) as step:
            fed = torch.tensor([tokens], device=prompt.device)
            best = model(fed, past_key_values=cache).logits[0].argmax(-1).tolist()
            kept = 1
            while kept < len(tokens) and tokens[kept] == best[kept - 1]:
                kept += 1
            step.keep(kept)
        made, right = made + len(tokens) - 1, right + kept - 1
        said += best[:kept]
    return said[:new], made, right


def run(model, tokenizer, options):
    new = options.new_tokens
    padded, _ = make_prompts(tokenizer, options.batch, options.context - new)
    padded = padded.to(model.device)
    length = padded["input_ids"].shape[1]
    print(
        f"\n{str(model.dtype).removeprefix('torch.')}: {options.batch} requests, {new} new tokens"
    )

    def generate():
        begin = time.perf_counter()
        out = model.generate(
            **padded,
            max_new_tokens=new,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        seconds = time.perf_counter() - begin
        rate = f"{options.batch * new / seconds:.0f} tokens/s, with prefill"
        return out.sequences, torch.stack(out.logits, 1), rate

    with use():
        if model.device.type != "cpu":  # kernels are compiled at their first call
            generate()
        sequences, logits, rate = generate()
    print(f"  our ops: {rate}")
    tokens = sequences[:, length:]
    if model.dtype == torch.float32:
        theirs, _, rate = generate()
        print(f"  unmodified model: {rate}")
        assert torch.equal(theirs, sequences), f"{int((theirs != sequences).sum())} tokens differ"
        print(f"  generated tokens: all {tokens.numel()} equal to the unmodified model's")
    # both are fed the same tokens
    mask = torch.cat([padded["attention_mask"], torch.ones_like(tokens)], 1)
    reference = model(sequences, attention_mask=mask, use_cache=False).logits[:, length - 1 : -1]
    layers = model.config.num_hidden_layers
    check("unmodified model", logits.to(model.dtype), tokens, reference, ROUNDINGS * layers)
    if options.drafts:
        with use():
            prompt = padded["input_ids"][:1, padded["attention_mask"][0].argmax() :]
            drafted, made, right = speculate(model, prompt, new, options.drafts, tokens[0].tolist())
        same = drafted == tokens[0].tolist()
        print(f"  request 0 with drafts: {right} of {made} right, tokens equal: {same}")
        assert same or model.dtype != torch.float32
    said = tokenizer.decode(padded["input_ids"][0, -12:]), tokenizer.decode(tokens[0])
    print(f"  request 0: ...{said[0]!r} -> {said[1]!r}")


def main():
    options = generating(__doc__)
    logging.set_verbosity_error()  # Transformers praises its own dependencies
    device = choose_device(options.device)
    tokenizer = make_tokenizer()
    dtypes = [options.dtype] if options.dtype != "auto" else ["bfloat16"]
    if options.dtype == "auto" and device == "cpu":
        dtypes = ["float32", "bfloat16"]
    with torch.inference_mode():
        for dtype in dtypes:
            model = MODELS[options.model](len(tokenizer))
            run(model.to(device, getattr(torch, dtype)), tokenizer, options)
    print_backends()


if __name__ == "__main__":
    main()
