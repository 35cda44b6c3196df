# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""vLLM on a GPU with our ops and without: eight layers of the real width, random weights, bf16.

    python -m tests.vllm.h200 [PART...]

Ragged requests, prefills and decodes in one batch.  Each part is an engine in a process of its own
with the weights of a Hugging Face model, which judges every token: under `use()`, our own decode
loop, and given the same text, its logit may lie below the best by no more than rounding.

No compiled extension of vLLM is needed: a wheel without its .so files, with tests/vllm/extension.py
as `vllm/_C_stable_libtorch.py` and empty `vllm/vllm_flash_attn/_vllm_fa{2,3}_C.py`, will do.
Engines start side by side; what is timed runs alone.
"""

from __future__ import annotations

import fcntl
import gc
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

DEVICE = os.environ.get("DEVICE", "cuda")  # "cpu": the script itself, on tiny models
REQUESTS, NEW, CONTEXT = 16, 128, 8192
if DEVICE == "cpu":
    REQUESTS, NEW, CONTEXT = 4, 6, 512
MEMORY = "/dev/shm"  # for checkpoints of 10 GB
LIMIT = int(os.environ.get("LIMIT", 190))  # seconds of a part
TOGETHER = 6  # engines at a time
CACHE = 2 << 30  # bytes of each
# of a logit, in units of bf16's eps times the largest: eight layers of two dozen roundings each,
# whose variances add up
ROUNDINGS = 16.0
# and with caches of 8 bits: each layer reads numbers of e4m3, off by 2.5 % (rms), which add up as
# well: six sigma of eight are 15 units of logits that reach 3.6 sigma
ROUNDINGS8 = math.hypot(ROUNDINGS, 15.0)


class Part(NamedTuple):
    """`model` of custom.bench.models; `graph`: None, vLLM's "PIECEWISE", or a whole decode step."""

    model: str
    graph: str | None = None
    ours: bool = True
    options: dict[str, Any] = {}  # noqa: RUF012
    roundings: float = ROUNDINGS


# what needs no compiled extension of vLLM
NATIVE: dict[str, Any] = dict(
    ir_op_priority=dict(rms_norm=["native"], fused_add_rms_norm=["native"]),
    enable_jit_warmup=False,
)
TRITON: dict[str, Any] = dict(
    attention_backend="TRITON_ATTN", additional_config={"gdn_prefill_backend": "triton"}
)
WHOLE = "FULL_DECODE_ONLY"
PARTS = {
    "deepseek": Part("DeepSeek-V3.2", options=dict(enable_prefix_caching=True)),
    "deepseek-fp8": Part("DeepSeek-V3.2", options=dict(kv_cache_dtype="fp8"), roundings=ROUNDINGS8),
    "deepseek-pieces": Part("DeepSeek-V3.2", "PIECEWISE"),
    "next": Part("Qwen3-Next", WHOLE, options=TRITON),
    "next-eager": Part("Qwen3-Next", options=TRITON),
    "next-vllm": Part("Qwen3-Next", WHOLE, ours=False, options=TRITON),
    "deepseek-whole": Part("DeepSeek-V3.2", WHOLE),
    "next-eager-vllm": Part("Qwen3-Next", ours=False, options=TRITON),
    "glm-shared": Part("GLM-5.2 (shared selections)", "PIECEWISE"),
    "qwen3.5": Part("Qwen3.5", WHOLE, options=TRITON),
    "qwen3.5-vllm": Part("Qwen3.5", WHOLE, ours=False, options=TRITON),
}


def prompts(vocabulary: int, seed: int = 0) -> list[list[int]]:
    """Of 64 to 6000 tokens on a GPU."""
    import torch

    random = torch.Generator().manual_seed(seed)
    lengths = torch.logspace(-7, math.log2(0.75), REQUESTS, 2).mul(CONTEXT).long().tolist()
    return [torch.randint(1, vocabulary, (n,), generator=random).tolist() for n in lengths]


class Verdict(NamedTuple):
    same: int  # tokens that are the model's own choice
    worst: float  # distance of the others from it, in roundings
    wrong: list[tuple[int, int, int]]  # length of a text, its tokens too far off, the first


def judge(
    model: Any, texts: list[list[int]], outputs: list[list[int]], roundings: float
) -> Verdict:
    """`model` is our own decode loop's."""
    import torch

    from custom.integrations.transformers import use

    same, worst, wrong = 0, 0.0, []
    for text, output in zip(texts, outputs, strict=True):
        with torch.no_grad(), use():
            ids = torch.tensor([text + output[:-1]], device=DEVICE)
            logits = model(ids, use_cache=True, logits_to_keep=len(output)).logits[0].float()
        chosen = logits.gather(1, torch.tensor(output, device=DEVICE)[:, None])[:, 0]
        below = logits.max(-1).values - chosen
        below /= torch.finfo(model.dtype).eps * logits.abs().max()
        same += int((below == 0).sum())
        worst = max(worst, float(below.max()))
        off = (below > roundings).nonzero()
        if len(off):
            wrong.append((len(text), len(off), int(off[0])))
    return Verdict(same, worst, wrong)


def generate(engine: Any, texts: list[list[int]], count: int) -> tuple[list[list[int]], float]:
    """Tokens, and the seconds that they took."""
    from vllm import SamplingParams

    asked = [{"prompt_token_ids": each} for each in texts]
    given = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
    begin = time.perf_counter()
    outputs = engine.generate(asked, given, use_tqdm=False)
    return [list(each.outputs[0].token_ids) for each in outputs], time.perf_counter() - begin


def tell(root: Path, what: signal.Signals) -> None:
    """The other parts."""
    for each in root.glob("*.pid"):
        if int(each.stem) != os.getpid():
            with suppress(ProcessLookupError):
                os.kill(int(each.stem), what)


@contextmanager
def alone(root: Path) -> Iterator[None]:
    """The other parts stop meanwhile."""
    with (root / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        tell(root, signal.SIGSTOP)
        try:
            time.sleep(0.5)  # what they have launched ends
            yield
        finally:
            tell(root, signal.SIGCONT)


def save(model: Any, folder: Path) -> None:
    """Once for all parts that have it: the weights are the same."""
    with Path(f"{folder}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            model.save_pretrained(folder)


def start(part: Part, model: Any, folder: Path) -> Any:
    """The engine, with the model's weights."""
    # after the model: vLLM puts its own configurations into Transformers
    from vllm import LLM
    from vllm.model_executor.models.qwen3_next import Qwen3NextForCausalLM
    from vllm.v1.worker import gpu_worker

    # imports all models for kernels that these do not have
    gpu_worker.kernel_warmup = lambda worker: None
    # a check for experts, which these models do without
    Qwen3NextForCausalLM.set_moe_parameters = lambda self: None
    config = model.config
    if any(getattr(config, "indexer_types", None) or []):
        config.index_topk_pattern = "".join(each[0].upper() for each in config.indexer_types)
        config.indexer_rope_interleave = True
    save(model, folder)
    compilation: dict[str, Any] = {"custom_ops": ["none"]}
    if part.graph is not None:
        compilation["cudagraph_mode"] = part.graph
    if part.graph == WHOLE:
        compilation["mode"] = 0  # no torch.compile, which wants vLLM's own version of torch
    return LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype=model.dtype,
        max_model_len=CONTEXT,
        max_num_batched_tokens=4096,
        max_num_seqs=REQUESTS,
        gpu_memory_utilization=0.05,
        kv_cache_memory_bytes=CACHE,
        enforce_eager=part.graph is None,
        compilation_config=compilation,
        kernel_config=NATIVE,
        seed=0,
        **{"enable_prefix_caching": False, **part.options},
    )


def run(part: Part, root: Path) -> Iterator[dict[str, Any]]:
    """What is known, and then what else is."""
    import torch

    from custom.bench.models import MODELS

    (root / f"{os.getpid()}.pid").touch()
    (made,) = [each for each in MODELS if each.name == part.model]
    model = made.make(torch.device(DEVICE))
    begin = time.perf_counter()
    engine = start(part, model, root / part.model.split()[0])
    sized = model.config.vocab_size
    generate(engine, prompts(sized), 4)  # compiles
    started = time.perf_counter() - begin
    with alone(root):
        prefill = min(generate(engine, prompts(sized, seed), 1)[1] for seed in (1, 2))
        whole = min(generate(engine, prompts(sized, seed), NEW + 1)[1] for seed in (3, 4))
    texts = prompts(sized, 5)
    known: dict[str, Any] = dict(
        start=started,
        prefill=sum(map(len, texts)) / prefill,
        decode=REQUESTS * NEW / (whole - prefill),
    )
    yield known
    rounds = 2 if part.options.get("enable_prefix_caching") else 1  # then behind its own prefixes
    outputs = [each for _ in range(rounds) for each in generate(engine, texts, NEW)[0]]
    del engine
    gc.collect()
    verdict = judge(model, texts * rounds, outputs, part.roundings)
    (root / f"{os.getpid()}.pid").unlink()
    yield dict(known, **verdict._asdict(), of=sum(map(len, outputs)))


def answer(name: str, root: Path) -> tuple[dict[str, Any], str]:
    """What a process of its own found out, and what it said."""
    environment = {
        **os.environ,
        "CUSTOM_VLLM": str(int(PARTS[name].ours)),
        "HF_HUB_OFFLINE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        # its runner V2 asks a compiled extension for a view of pinned memory
        "VLLM_USE_V2_MODEL_RUNNER": "0",
    }
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tests.vllm.h200", "--part", name, str(root)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT,
        )
        said = done.stdout
    except subprocess.TimeoutExpired as error:
        said = f"{(error.stdout or b'').decode()}\nmore than {LIMIT} s"
        tell(root, signal.SIGCONT)  # which it may have stopped
    file = root / f"{name}.json"
    return json.loads(file.read_text()) if file.exists() else {}, said


def report(name: str, root: Path) -> bool:
    """Whether it is right."""
    x, said = answer(name, root)
    cells = [f"{x[each]:,.0f}" if x else "-" for each in ("start", "prefill", "decode")]
    judged = "wrong" in x
    cells += [f"{x['same']} of {x['of']}", f"{x['worst']:.2f}"] if judged else ["-", "failed"]
    far = [
        f"too far off: {count} tokens behind {length}, from the {first}. on"
        for length, count, first in x.get("wrong", [])
    ]
    tail = [] if judged else said.strip().splitlines()[-25:]
    print(f"| {' | '.join([name, *cells])} |", *far, *tail, sep="\n", flush=True)
    return judged and not far


def main(names: list[str]) -> int:
    print("| part | start, s | prefill, tokens/s | decode, tokens/s | equal | roundings |")
    print("|---|---|---|---|---|---|", flush=True)
    memory = os.path.isdir(MEMORY) and shutil.disk_usage(MEMORY).free > 24 << 30
    with (
        tempfile.TemporaryDirectory(dir=MEMORY if memory else None) as root,
        ThreadPoolExecutor(TOGETHER) as pool,
    ):
        right = pool.map(report, names, [Path(root)] * len(names))
        return sum(not each for each in right)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--part"]:
        given, where = sys.argv[2], Path(sys.argv[3])
        for found in run(PARTS[given], where):
            (where / f"{given}.json").write_text(json.dumps(found))
    else:
        sys.exit(main(sys.argv[1:] or list(PARTS)))
