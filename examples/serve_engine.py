# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Load-test vLLM with our ops and without: requests arrive at random, and a plot shows both.

pip install ".[vllm]" tqdm
"""

import os
import random
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from statistics import median

from _options import load_test

NAMES = {True: "ours", False: "vLLM's own"}


@dataclass
class Answer:
    asked: float = 0.0  # when it arrived
    came: list[float] = field(default_factory=list)  # when each step's tokens did
    counts: list[int] = field(default_factory=list)  # of tokens by then
    tokens: list[int] = field(default_factory=list)

    @property
    def first(self) -> float:
        """Seconds to the first token."""
        return self.came[0] - self.asked

    @property
    def between(self) -> float:
        """Seconds from one token to the next."""
        return (self.came[-1] - self.came[0]) / (self.counts[-1] - self.counts[0])


def make(folder):
    """A random Qwen3-Next: three layers of the gated delta rule, one of attention with experts."""
    import torch
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        mlp_only_layers=[0, 1, 2],
        max_position_embeddings=8192,
    )
    torch.manual_seed(0)
    Qwen3NextForCausalLM(config).bfloat16().save_pretrained(folder)


def serve(model, options):
    """An answer for each request, of an engine in this process."""
    import torch
    from _device import print_backends
    from tqdm import tqdm
    from vllm import EngineArgs, LLMEngine, SamplingParams

    graphs = dict(compilation_config=dict(mode=0, cudagraph_mode="FULL_DECODE_ONLY"))
    given = dict(
        model=model,
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_model_len=options.prompt_tokens + options.new_tokens,
        **(graphs if torch.cuda.is_available() else dict(enforce_eager=True)),
    )
    engine = LLMEngine.from_engine_args(EngineArgs(**given | options.engine))
    sampling = SamplingParams(
        temperature=0, max_tokens=options.new_tokens, ignore_eos=True, detokenize=False
    )
    chance = random.Random(0)
    vocabulary = engine.model_config.get_vocab_size()

    def prompt():
        length = chance.randint(options.prompt_tokens // 4, options.prompt_tokens)
        return dict(prompt_token_ids=[chance.randrange(vocabulary) for _ in range(length)])

    for number in range(2):  # kernels are compiled
        engine.add_request(f"warm-up {number}", prompt(), sampling)
    while engine.has_unfinished_requests():
        engine.step()

    answers, due = [Answer() for _ in range(options.requests)], 0.0
    for each in answers:
        each.asked = due = due + chance.expovariate(options.rate)
    asked, begin = 0, time.perf_counter()
    bar = tqdm(total=options.requests * options.new_tokens, unit="token", file=sys.stderr)
    while asked < len(answers) or engine.has_unfinished_requests():
        seconds = time.perf_counter() - begin
        while asked < len(answers) and answers[asked].asked <= seconds:
            engine.add_request(str(asked), prompt(), sampling)
            asked += 1
        if not engine.has_unfinished_requests():
            time.sleep(answers[asked].asked - seconds)
            continue
        for output in engine.step():
            each, tokens = answers[int(output.request_id)], output.outputs[0].token_ids
            bar.update(len(tokens) - len(each.tokens))
            each.came.append(time.perf_counter() - begin)
            each.counts.append(len(tokens))
            each.tokens = list(tokens)
        bar.set_postfix(requests=engine.get_num_unfinished_requests(), refresh=False)
    bar.close()
    print_backends()
    return answers


def report(found, options):
    print(
        "\n|  | tokens/s | first token, ms | the slowest | next token, ms |\n|---|---|---|---|---|"
    )
    for ours, answers in found.items():
        seconds = max(each.came[-1] for each in answers)
        firsts = [1e3 * each.first for each in answers]
        rate = len(answers) * options.new_tokens / seconds
        next_token = 1e3 * median(each.between for each in answers)
        cells = f"{rate:.0f} | {median(firsts):.1f} | {max(firsts):.1f} | {next_token:.2f}"
        print(f"| {NAMES[ours]} | {cells} |")
    # in bfloat16 two tokens may be equally likely
    equal = sum(a.tokens == b.tokens for a, b in zip(*found.values(), strict=True))
    print(f"\n{equal} of {options.requests} answers are the same text")


def plot(path, found, title):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for ours, answers in found.items():
        steps = [
            (at, now - before)
            for each in answers
            for at, now, before in zip(each.came, each.counts, [0, *each.counts], strict=False)
        ]
        total, points = 0, []
        for at, count in sorted(steps):
            total += count
            points.append((at, total))
        left.plot(*zip(*points, strict=True), label=NAMES[ours])
        right.plot(sorted(1e3 * each.first for each in answers), label=NAMES[ours])
    left.set(xlabel="seconds", ylabel="tokens")
    right.set(xlabel="requests, the fastest first", ylabel="first token, ms", ylim=(0, None))
    left.legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=150)


def main():
    options = load_test(__doc__)
    # the engine in the process that asks, and nothing beside what is shown
    os.environ |= dict(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="WARNING")
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        if options.model is None:
            make(folder)
        for ours, name in NAMES.items():
            os.environ["CUSTOM_VLLM"] = str(int(ours))
            print(f"\n{name}:", flush=True)
            with ProcessPoolExecutor(1, get_context("spawn")) as pool:
                found[ours] = pool.submit(serve, options.model or folder, options).result()
    report(found, options)
    if options.plot:
        title = f"{options.requests} requests, {options.rate:g} a second"
        plot(options.plot, found, f"vLLM: {title}")


if __name__ == "__main__":
    main()
