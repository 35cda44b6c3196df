# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""vLLM's greedy tokens of the prompts, one engine after the other.

    python -m tests.vllm.serve JOBS ANSWERS

JOBS and ANSWERS are files: a list of [checkpoint, tokens of each prompt, options of `vllm.LLM`],
and for each of them the tokens, the number of steps with a prefill beside a decode (of an engine in
this process), our ops that ran, the weights that our layers have copied, and the heads of a layer
on each rank.
"""

from __future__ import annotations

import gc
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from .checkpoints import prompts

STEPS: list[set[int]] = []  # for every step the numbers of tokens that its requests have


DRAFTS: Counter[int] = Counter()  # how often so many drafts of a request were taken


def watch() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    schedule, observe = Scheduler.schedule, Scheduler.make_spec_decoding_stats

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = schedule(self, *args, **kwargs)
        STEPS.append(set(output.num_scheduled_tokens.values()))
        return output

    def observed(self: Any, *args: Any, **kwargs: Any) -> Any:
        DRAFTS[kwargs["num_accepted_tokens"]] += 1
        return observe(self, *args, **kwargs)

    Scheduler.schedule, Scheduler.make_spec_decoding_stats = watched, observed


def seen(model: Any) -> dict[str, set[Any]]:
    """Of a rank: the ops that ran, the op's matrices that are none of the model's parameters, and
    the heads of our layers."""
    import torch

    from custom.dispatch import log

    theirs = {each.untyped_storage().data_ptr() for each in model.parameters()}
    ours = {
        kind: [each for each in model.modules() if type(each).__name__ == kind]
        for kind in ("SparseMLA", "GatedDelta")
    }
    return dict(
        ops={op for op, _ in log.calls},
        copies={
            name
            for layer in ours["SparseMLA"]
            for name, each in layer.weights.items()
            if isinstance(each, torch.Tensor) and each.ndim > 1
            if each.untyped_storage().data_ptr() not in theirs
        },
        heads={layer.uk.shape[0] for layer in ours["SparseMLA"]}
        | {layer.A_log.shape[0] for layer in ours["GatedDelta"]},
    )


def job(checkpoint: str, counts: list[int], options: dict[str, Any]) -> dict[str, Any]:
    from custom.dispatch import log
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    STEPS.clear()
    DRAFTS.clear()
    log.calls.clear()
    given = dict(
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=8,
        seed=0,
        tokenizer_mode="hf",
    )
    llm = LLM(model=checkpoint, **{**given, **options})
    sampling = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in counts]
    asked = [{"prompt_token_ids": each} for each in prompts()]
    outputs = llm.generate(asked, sampling, use_tqdm=False)
    ranks = llm.apply_model(seen)
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()
    return dict(
        tokens=[list(each.outputs[0].token_ids) for each in outputs],
        mixed=sum(1 in step and len(step) > 1 for step in STEPS),
        drafts=[DRAFTS[taken] for taken in range(max(DRAFTS, default=-1) + 1)],
        ops=sorted(set.intersection(*(each["ops"] for each in ranks))),
        copies=sorted(set.union(*(each["copies"] for each in ranks))),
        heads=[sorted(each["heads"]) for each in ranks],
    )


if __name__ == "__main__":
    watch()
    answers = [job(*each) for each in json.loads(Path(sys.argv[1]).read_text())]
    Path(sys.argv[2]).write_text(json.dumps(answers))
