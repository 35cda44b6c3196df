# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Many requests to a vLLM with our ops that has too few pages for them:

    python -m tests.vllm.load [--model NAME] [--requests N] [--ranks N] [--seed N] [--turns FOLDER]

Requests arrive in bursts and join others that decode.  Half of them begin as their neighbours do,
behind kept prefixes; a tenth is aborted in mid-stream; who finds no page is preempted and begins
again.  A line says how often each of these happened; what never did is an error.

Every token, those of aborted streams too, is judged by our own decode loop, given the same text:
in float32 (DEVICE=cpu, tiny models) it is the loop's own, but for selections that a float's last
bit decides, two of 2,000 requests; in bfloat16 (four narrow layers, decode steps in graphs) it is
within 16 roundings, or no farther than twice what the loop itself is off when each of its layers
gives a rounding more or less.  A GPU needs what h200.py says, each rank a card; processes that
share cards and FOLDER serve in turns, since ranks that wait for one another keep a card busy.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from . import checkpoints, h200, serve
from .h200 import DEVICE, NARROW, TRITON, WHOLE, Part

SMALL = DEVICE == "cpu"
LONGEST, NEW = 200 if SMALL else 500, 64  # tokens of a prompt, and of an answer
BURST, QUIET = (6, 4) if SMALL else (128, 64)  # requests at once, and steps between on average
SHARED = 3  # texts that prompts begin with
ENVIRONMENT = {
    **h200.ENVIRONMENT,
    "CUSTOM_VLLM": "1",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # functions are sent to ranks
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


class Load(NamedTuple):
    part: Part
    checkpoint: str  # of checkpoints.py, for a CPU
    narrow: dict[str, Any]  # changes of custom.bench.models, for a GPU
    pages: int  # of all layers
    block: int  # tokens of a page; of Qwen3-Next more, until a state has room in it


GRAPH = None if SMALL else WHOLE
LOADS = {
    "deepseek": Load(
        Part("DeepSeek-V3.2", GRAPH),
        "deepseek_v32",
        dict(NARROW, num_attention_heads=32, num_key_value_heads=32, index_topk=256),
        *((32, 16) if SMALL else (90, 64)),
    ),
    "next": Load(
        Part("Qwen3-Next", GRAPH, options={} if SMALL else TRITON),
        "qwen3_next",
        dict(NARROW, num_key_value_heads=8, linear_num_key_heads=4, linear_num_value_heads=8),
        *((40, 32) if SMALL else (180, 16)),
    ),
}


class Request(NamedTuple):
    text: list[int]
    count: int  # tokens that it asks for
    kept: int  # tokens behind which it is aborted, or all


def requests(count: int, vocabulary: int, random: Random) -> list[Request]:
    def tokens(count: int) -> list[int]:
        return [random.randrange(1, vocabulary) for _ in range(count)]

    shared, found = [tokens(LONGEST) for _ in range(SHARED)], []
    for n in range(count):
        new = random.randint(1, NEW)
        first = shared[n // BURST % SHARED][: random.randint(1, LONGEST) if n % 2 else 0]
        text = first + tokens(random.randint(1, LONGEST // 4 if n % 2 else LONGEST))
        found.append(Request(text, new, random.randint(1, new) if n % 10 == 0 else new))
    return found


COUNTED: Counter[str] = Counter()
# what has to happen, more often than so many times for each page
MUST = {"joins": 0, "aborted": 0, "preempted": 0, "tokens of kept prefixes": 0, "pages taken": 4}


def watch() -> None:
    serve.watch()
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.scheduler import Scheduler

    preempt, take = Scheduler._preempt_request, BlockPool.get_new_blocks

    def preempted(self: Any, *args: Any, **kwargs: Any) -> Any:
        COUNTED["preempted"] += 1
        return preempt(self, *args, **kwargs)

    def taken(self: Any, num_blocks: int) -> Any:
        COUNTED["pages taken"] += num_blocks
        return take(self, num_blocks)

    Scheduler._preempt_request, BlockPool.get_new_blocks = preempted, taken


def answers(engine: Any, asked: list[Request], random: Random) -> list[list[int]]:
    """What each request was answered until its end."""
    steps = engine.llm_engine
    numbers: dict[str, int] = {}
    tokens: list[list[int]] = [[] for _ in asked]
    while len(numbers) < len(asked) or steps.has_unfinished_requests():
        if random.randrange(QUIET) == 0:
            for each in asked[len(numbers) :][: random.randint(1, BURST)]:
                h200.begin(engine, [each.text], each.count)
                numbers[h200.ASKED[-1]] = len(numbers)
        for output in steps.step():
            number = numbers[output.request_id]
            tokens[number] = list(output.outputs[0].token_ids)
            if output.finished:
                COUNTED["tokens of kept prefixes"] += output.num_cached_tokens
            elif len(tokens[number]) >= asked[number].kept:
                steps.abort_request([output.request_id])
                COUNTED["aborted"] += 1
    return tokens


def make(load: Load, root: Path) -> tuple[Any, Path]:
    """The model, and where its checkpoint is or will be."""
    if SMALL:
        return checkpoints.make(root, load.checkpoint), root / load.checkpoint
    import torch

    from custom.bench.models import MODELS

    (model,) = [each for each in MODELS if each.name == load.part.model]
    narrow = replace(model, changes=model.changes | load.narrow)
    return narrow.make(torch.device(DEVICE)), root / "model"


def start(load: Load, ranks: int, model: Any, folder: Path) -> Any:
    options: dict[str, Any] = dict(
        tensor_parallel_size=ranks,
        enable_prefix_caching=True,
        block_size=load.block,
        num_gpu_blocks_override=load.pages,
        max_model_len=2 * LONGEST,
    )
    if SMALL:  # more than a page of tokens a step
        options |= dict(max_num_batched_tokens=128, max_num_seqs=8)
    watch()
    with serve.keeping() if SMALL else nullcontext():
        return h200.start(load.part._replace(options=load.part.options | options), model, folder)


def alone(
    engine: Any,
    model: Any,
    asked: list[Request],
    tokens: list[list[int]],
    wrong: list[tuple[int, int, int]],
) -> Iterator[str]:
    """What the engine answers to eight of those too far off, with nothing beside them."""
    for number, _count, first in wrong[:8]:
        text, token = asked[number].text + tokens[number][:first], tokens[number][first]
        (again,) = h200.generate(engine, [text], 1)
        off, then = (float(x) for x in h200.below(model, [text] * 2, [[token], again]))
        yield f"behind {len(text)} tokens {off:.1f} roundings off, asked alone {then:.1f}"


def as_rounded(model: Any, texts: list[list[int]], tokens: list[list[int]], verdict: Any) -> bool:
    """Whether as many tokens are equal as the loop itself has, and none is twice as far off, when
    each of its layers gives a rounding more or less: a selected key may hang on the last bit."""
    import torch

    own = torch.cat(h200.below(model, texts, tokens, own=True))
    same, most = int((own == 0).sum()), float(own.max())
    print(f"the loop, its layers a rounding off: equal: {same}, farthest: {most:.2f}", flush=True)
    return verdict.same >= same and verdict.worst <= 2 * most


def run(given: argparse.Namespace, root: Path) -> None:
    load, random, times = LOADS[given.model], Random(given.seed), [time.perf_counter()]
    model, folder = make(load, root)
    engine = start(load, given.ranks, model, folder)
    times.append(time.perf_counter())
    asked = requests(given.requests, model.config.vocab_size, random)
    with h200.turn(given.turns) if given.turns else nullcontext():
        tokens = answers(engine, asked, random)
    times.append(time.perf_counter())
    COUNTED["joins"] = sum(1 in step and len(step) > 1 for step in serve.STEPS)
    print(
        f"{given.model}, {DEVICE}, ranks: {given.ranks}, requests: {given.requests}",
        f"steps: {len(serve.STEPS)}",
        *(f"{what}: {COUNTED[what]}" for what in MUST),
        f"pages: {load.pages}",
        sep=", ",
        flush=True,
    )
    seen = engine.apply_model(serve.seen)
    assert len(seen) == given.ranks and all(each["ops"] for each in seen), seen
    for request, got in zip(asked, tokens, strict=True):
        assert request.kept <= len(got) <= request.count, (request, got)
    texts = [each.text for each in asked]
    verdict = h200.judge(model, texts, tokens, load.part.roundings)
    times.append(time.perf_counter())
    print(
        f"equal: {verdict.same} of {sum(map(len, tokens))} tokens, farthest: {verdict.worst:.2f} "
        "roundings; seconds to start, serve and judge:",
        *(f"{after - before:.0f}" for before, after in pairwise(times)),
        flush=True,
    )
    if verdict.wrong and not as_rounded(model, texts, tokens, verdict):
        sys.exit("\n".join(alone(engine, model, asked, tokens, verdict.wrong)))
    for what, times_each in MUST.items():
        assert COUNTED[what] > times_each * load.pages, f"too few: {what}"
    assert not SMALL or verdict.same == sum(map(len, tokens))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.vllm.load", description=__doc__)
    parser.add_argument("--model", choices=LOADS, default="deepseek")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--turns", type=Path)
    given = parser.parse_args(argv)
    os.environ.update(ENVIRONMENT)
    with tempfile.TemporaryDirectory() as root:
        run(given, Path(root))
    return 0


if __name__ == "__main__":
    sys.exit(main())
