# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""vLLM on a GPU with our ops and without: eight layers of the real width, random weights, bf16.

    python -m tests.vllm.h200 [--profile FOLDER] [PART...]

Ragged requests, prefills and decodes in one batch.  Each part is an engine in a process of its own
with the weights of a Hugging Face model, which judges every token: under `use()`, our own decode
loop, and given the same text, its logit may lie below the best by no more than rounding.

Timed are the prompts of 1, 16 and 64 requests, and then the steps that decode all of them at once.
A profile of each part says where a step's time goes, on the GPU and on the host.

No compiled extension of vLLM is needed: a wheel without its .so files, with tests/vllm/extension.py
as `vllm/_C_stable_libtorch.py` and empty `vllm/vllm_flash_attn/_vllm_fa{2,3}_C.py`, will do.
Engines start side by side; once all have, they are timed in turns, and judged after that.  Parts
`-two` take two cards.  Parts `-drafts` have a layer that says nearly what the model will, so that
both of two drafts are taken, and fewer; parts `-sleep` need vLLM's `cumem_allocator.abi3.so` too.
"""

from __future__ import annotations

import fcntl
import gc
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

DEVICE = os.environ.get("DEVICE", "cuda")  # "cpu": the script itself, on tiny models
COUNTS, REQUESTS, NEW, CONTEXT = (1, 16, 64), 16, 128, 8192
if DEVICE == "cpu":
    COUNTS, REQUESTS, NEW, CONTEXT = (1, 4), 4, 16, 512
MEMORY = "/dev/shm"  # for checkpoints of 10 GB
LIMIT = int(os.environ.get("LIMIT", 190))  # seconds of a part
RUNS = int(os.environ.get("RUNS", 4))  # of each number of requests, the best counts
TOGETHER = 6  # engines at a time
BATCH, PAD = 16, 64  # texts that are judged together, and what their length is a multiple of
ASKED: list[str] = []  # the requests of this process
CACHE = 6 << 30  # bytes of each
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
    narrow: dict[str, Any] = {}  # noqa: RUF012  changes of the model
    drafts: str = ""  # of DRAFTS_OF in checkpoints.py
    sleeps: bool = False


# what needs no compiled extension of vLLM
NATIVE: dict[str, Any] = dict(
    ir_op_priority=dict(rms_norm=["native"], fused_add_rms_norm=["native"]),
    enable_jit_warmup=False,
)
TRITON: dict[str, Any] = dict(
    attention_backend="TRITON_ATTN", additional_config={"gdn_prefill_backend": "triton"}
)
WHOLE = "FULL_DECODE_ONLY"
DRAFTED = 2
DRAFTS: dict[str, Any] = dict(method="mtp", num_speculative_tokens=DRAFTED)
NARROW: dict[str, Any] = dict(num_hidden_layers=4, hidden_size=2048, intermediate_size=4096)
SLEEP: dict[str, Any] = dict(enable_sleep_mode=True)
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",  # compiled as well
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    # its runner V2 asks a compiled extension for a view of pinned memory
    "VLLM_USE_V2_MODEL_RUNNER": "0",
}
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
    "next-two": Part("Qwen3-Next", WHOLE, options=dict(TRITON, tensor_parallel_size=2)),
    "next-two-vllm": Part(
        "Qwen3-Next", WHOLE, ours=False, options=dict(TRITON, tensor_parallel_size=2)
    ),
    "deepseek-two": Part("DeepSeek-V3.2", WHOLE, options=dict(tensor_parallel_size=2)),
    "qwen3.5": Part("Qwen3.5", WHOLE, options=TRITON),
    "qwen3.5-vllm": Part("Qwen3.5", WHOLE, ours=False, options=TRITON),
    "glm-5": Part("GLM-5", WHOLE),
    "deepseek-drafts": Part(
        "DeepSeek-V3.2",
        WHOLE,
        options=dict(speculative_config=DRAFTS),
        narrow=dict(num_hidden_layers=1, first_k_dense_replace=2, num_nextn_predict_layers=1),
        drafts="deepseek_v32",
    ),
    "next-drafts": Part(
        "Qwen3-Next",
        WHOLE,
        options=dict(TRITON, speculative_config=DRAFTS | dict(attention_backend="TRITON_ATTN")),
        narrow=dict(num_hidden_layers=4, num_nextn_predict_layers=1),
        drafts="qwen",
    ),
    "deepseek-sleep": Part("DeepSeek-V3.2", WHOLE, options=SLEEP, narrow=NARROW, sleeps=True),
    "next-sleep": Part("Qwen3-Next", WHOLE, options=TRITON | SLEEP, narrow=NARROW, sleeps=True),
}


def prompts(vocabulary: int, seed: int = 0, count: int = REQUESTS) -> list[list[int]]:
    """Of 64 to 6144 tokens on a GPU; one alone is as long as the longest."""
    import torch

    random = torch.Generator().manual_seed(seed)
    lengths = torch.logspace(math.log2(0.75), -7, count, 2).mul(CONTEXT).long().tolist()
    return [torch.randint(1, vocabulary, (n,), generator=random).tolist() for n in lengths]


class Verdict(NamedTuple):
    same: int  # tokens that are the model's own choice
    worst: float  # distance of the others from it, in roundings
    wrong: list[tuple[int, int, int]]  # a text, its tokens too far off, the first


@contextmanager
def rounded(model: Any) -> Iterator[None]:
    """What each projection and norm gives is off by a rounding, drawn anew."""
    import torch

    def off(_layer: Any, _given: Any, out: Any) -> Any:
        eps = torch.finfo(model.dtype).eps
        return (out.float() * (1 + eps * (torch.rand_like(out, dtype=torch.float) - 0.5))).to(out)

    layers = model.base_model.named_modules()
    found = [x for name, x in layers if name.endswith(("_proj", "norm"))]
    hooks = [layer.register_forward_hook(off) for layer in found]
    yield
    for hook in hooks:
        hook.remove()


def below(
    model: Any, texts: list[list[int]], outputs: list[list[int]], own: bool = False
) -> list[Any]:
    """How far each token's logit lies below the best one, in roundings.  `model` is our own decode
    loop's.  Texts of about one length go together, behind each as much padding as it takes.

    `own`: of the tokens that the loop itself chooses there when its layers are a rounding off."""
    import torch

    from custom.integrations.transformers import use

    given = [text + output[:-1] for text, output in zip(texts, outputs, strict=True)]
    alike: dict[int, list[int]] = {}
    for number, each in enumerate(given):
        alike.setdefault(-(-len(each) // PAD), []).append(number)
    batches = [
        (length * PAD, numbers[first : first + BATCH])
        for length, numbers in alike.items()
        for first in range(0, len(numbers), BATCH)
    ]
    distances: list[Any] = [None] * len(texts)
    for length, batch in batches:
        padded = [given[number] + [0] * (length - len(given[number])) for number in batch]
        tokens = torch.tensor(padded, device=DEVICE)
        with torch.no_grad(), use():
            of_all = others = model(tokens, use_cache=True).logits
            if own:
                with rounded(model):
                    others = model(tokens, use_cache=True).logits
        for number, row, other in zip(batch, of_all, others, strict=True):
            first, output = len(texts[number]) - 1, torch.tensor(outputs[number], device=DEVICE)
            logits = row[first : first + len(output)].float()
            if own:
                output = other[first : first + len(output)].argmax(-1)
            chosen = logits.gather(1, output[:, None])[:, 0]
            rounding = torch.finfo(model.dtype).eps * logits.abs().max()
            distances[number] = ((logits.max(-1).values - chosen) / rounding).cpu()
    return distances


def judge(
    model: Any, texts: list[list[int]], outputs: list[list[int]], roundings: float
) -> Verdict:
    same, worst, wrong = 0, 0.0, []
    for number, of_text in enumerate(below(model, texts, outputs)):
        same += int((of_text == 0).sum())
        worst = max(worst, float(of_text.max()))
        off = (of_text > roundings).nonzero()
        if len(off):
            wrong.append((number, len(off), int(off[0])))
    return Verdict(same, worst, wrong)


def exactly(count: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)


def generate(engine: Any, texts: list[list[int]], count: int) -> list[list[int]]:
    asked = [{"prompt_token_ids": each} for each in texts]
    outputs = engine.generate(asked, exactly(count), use_tqdm=False)
    return [list(each.outputs[0].token_ids) for each in outputs]


class Times(NamedTuple):
    prefill: float  # tokens of prompts a second, until each request has its first token
    decode: float  # tokens a second, while all requests decode


def begin(engine: Any, texts: list[list[int]], count: int) -> Any:
    """What makes steps, asked for that many tokens of each."""
    for text in texts:
        ASKED.append(str(len(ASKED)))
        engine.llm_engine.add_request(ASKED[-1], {"prompt_token_ids": text}, exactly(count))
    return engine.llm_engine


def timed(engine: Any, texts: list[list[int]]) -> Times:
    began = time.perf_counter()
    steps, counts = begin(engine, texts, NEW), {}
    known = []  # while all decode: when, and how many tokens there are
    while steps.has_unfinished_requests():
        for each in steps.step():
            counts[each.request_id] = len(each.outputs[0].token_ids)
        if len(counts) == len(texts) and max(counts.values()) < NEW:
            known.append((time.perf_counter(), sum(counts.values())))
    (since, first), (until, last) = known[0], known[-1]
    return Times(sum(map(len, texts)) / (since - began), (last - first) / (until - since))


def profile(engine: Any, texts: list[list[int]], count: int = NEW // 8) -> str:
    """Kernels by their time on the GPU, then the host's functions by theirs."""
    import cProfile
    import io
    import pstats
    from collections import Counter

    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as recorded

    steps, out = begin(engine, texts, NEW), []

    def prefill() -> None:
        begun: set[str] = set()
        while len(begun) < len(texts):
            begun.update(each.request_id for each in steps.step())

    def decode() -> None:
        done = 0
        while done < count:  # vLLM may be a step ahead, and then answers one later
            done += bool(steps.step())

    def kernels(title: str, work: Any, parts: int) -> None:
        with recorded(activities=[getattr(ProfilerActivity, DEVICE.upper())]) as record:
            work()
        kind = getattr(DeviceType, DEVICE.upper())
        events = [each for each in record.events() if each.device_type == kind]
        spent: Counter[str] = Counter()
        for each in events:
            spent[each.name] += each.time_range.elapsed_us() / parts
        calls = Counter(each.name for each in events)
        out.append(f"{title}: {spent.total():.0f} us, {len(events) / parts:.0f} calls, of which")
        for name, us in spent.most_common(40):
            out.append(f"{us:8.1f} us {calls[name] / parts:6.1f} x  {name[:110]}")

    kernels("all prompts", prefill, 1)
    decode()
    kernels("a decode step", decode, count)
    began = time.perf_counter()
    decode()
    out.append(f"a decode step takes {1e6 * (time.perf_counter() - began) / count:.0f} us")
    host, told = cProfile.Profile(), io.StringIO()
    host.runcall(decode)
    pstats.Stats(host, stream=told).sort_stats("tottime").print_stats(30)
    while steps.has_unfinished_requests():
        steps.step()
    return "\n".join([*out, f"the host, {count} decode steps", told.getvalue()])


def meet(root: Path, name: str, stage: str) -> None:
    """Wait until the other parts are as far as part `name`, or have ended."""
    (root / f"{name}.{stage}").touch()
    for other in json.loads((root / "parts.json").read_text()):
        while not any((root / f"{other}.{each}").exists() for each in (stage, "ended")):
            time.sleep(0.1)


@contextmanager
def turn(root: Path) -> Iterator[None]:
    """One part at a time, while the engines of the others wait."""
    time.sleep(0.2)  # who waits has the lock by now
    with (root / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def save(model: Any, folder: Path, drafts: str) -> None:
    """Once for all parts that have it: the weights are the same."""
    from .checkpoints import add_drafts

    with Path(f"{folder}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            model.save_pretrained(folder, max_shard_size="100GB")
            if drafts:
                add_drafts(folder / "model.safetensors", drafts)


def start(part: Part, model: Any, folder: Path) -> Any:
    """The engine, with the model's weights."""
    # after the model: vLLM puts its own configurations into Transformers
    from vllm import LLM

    config = model.config
    if any(getattr(config, "indexer_types", None) or []):
        config.index_topk_pattern = "".join(each[0].upper() for each in config.indexer_types)
        config.indexer_rope_interleave = True
    save(model, folder, part.drafts)
    # the gated norm is a Triton kernel, the others' are compiled extensions
    compilation: dict[str, Any] = {"custom_ops": ["none", "+rms_norm_gated"]}
    if part.graph is not None:
        compilation["cudagraph_mode"] = part.graph
        tokens = DRAFTED + 1 if part.drafts else 1
        compilation["cudagraph_capture_sizes"] = [tokens * count for count in COUNTS]
    if part.graph == WHOLE:
        compilation["mode"] = 0  # no torch.compile, which wants vLLM's own version of torch
    options: dict[str, Any] = dict(
        skip_tokenizer_init=True,
        dtype=model.dtype,
        max_model_len=CONTEXT,
        max_num_batched_tokens=4096,
        max_num_seqs=max(COUNTS),
        gpu_memory_utilization=0.05,
        kv_cache_memory_bytes=CACHE,
        enforce_eager=part.graph is None,
        enable_prefix_caching=False,
        compilation_config=compilation,
        kernel_config=NATIVE,
        worker_extension_cls="tests.vllm.gpu_worker.Extension",
        disable_custom_all_reduce=True,  # a compiled extension
        seed=0,
    )
    return LLM(model=str(folder), **(options | part.options))


def run(name: str, root: Path, told: Path | None) -> Iterator[dict[str, Any]]:
    """What is known, and then what else is; a profile is written to `told`."""
    part = PARTS[name]
    import torch

    from custom.bench.models import MODELS

    from . import checkpoints, serve

    (made,) = [each for each in MODELS if each.name == part.model]
    model = replace(made, changes=made.changes | part.narrow).make(torch.device(DEVICE))
    if part.drafts:
        checkpoints.foretell(model, part.drafts)
        serve.watch()
    begun = time.perf_counter()
    engine = start(part, model, root / (name if part.narrow else part.model.split()[0]))
    sized = model.config.vocab_size
    for count in COUNTS:
        generate(engine, prompts(sized, count=count), 4)  # compiles
    known: dict[str, Any] = dict(start=time.perf_counter() - begun, times=[])
    yield known
    meet(root, name, "started")
    for count in COUNTS:
        runs = []
        for n in range(RUNS):
            with turn(root):
                runs.append(timed(engine, prompts(sized, 100 * n + count, count)))
        known["times"].append([max(each) for each in zip(*runs, strict=True)])
        yield known
    if told is not None:
        with turn(root):
            told.write_text(profile(engine, prompts(sized, 4)))
    meet(root, name, "timed")
    texts = prompts(sized, 5)
    rounds = 2 if part.options.get("enable_prefix_caching") else 1  # then behind its own prefixes
    outputs = [each for _ in range(rounds) for each in generate(engine, texts, NEW)]
    if part.sleeps:
        known["slept"] = [each == outputs for each in asleep(engine, texts)]
    if part.drafts:
        known["drafts"] = [serve.DRAFTS[taken] for taken in range(DRAFTED + 1)]
    del engine
    gc.collect()
    verdict = judge(model, texts * rounds, outputs, part.roundings)
    yield dict(known, **verdict._asdict(), of=sum(map(len, outputs)))


def asleep(engine: Any, texts: list[list[int]]) -> Iterator[list[list[int]]]:
    """What it answers after a sleep that keeps the weights, and after one that loses them."""
    import torch

    for level in (1, 2):
        free = torch.cuda.mem_get_info()[0]
        engine.sleep(level=level)
        assert torch.cuda.mem_get_info()[0] > free + CACHE, "the caches were not freed"
        engine.wake_up(tags=["weights"])
        if level == 2:
            engine.collective_rpc("reload_weights")
        engine.wake_up(tags=["kv_cache"])
        yield generate(engine, texts, NEW)


def answer(name: str, root: Path, told: Path | None) -> tuple[dict[str, Any], str]:
    """What a process of its own found out, and what it said."""
    ours = dict(CUSTOM_VLLM=str(int(PARTS[name].ours)))
    profiled = [] if told is None else [str(told / f"profile-{name}.txt")]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tests.vllm.h200", "--part", name, str(root), *profiled],
            env=os.environ | ENVIRONMENT | ours,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT,
        )
        said = done.stdout
    except subprocess.TimeoutExpired as error:
        said = f"{(error.stdout or b'').decode()}\nmore than {LIMIT} s"
    (root / f"{name}.ended").touch()
    file = root / f"{name}.json"
    return json.loads(file.read_text()) if file.exists() else {}, said


def report(name: str, root: Path, told: Path | None) -> tuple[dict[str, Any], bool]:
    """What was found out, and whether it is right."""
    x, said = answer(name, root, told)
    *fewer, both = x.get("drafts", [1, 1])
    judged = "wrong" in x and all(x.get("slept", [])) and sum(fewer) > 0 < both
    verdict = f"{x['same']} of {x['of']} | {x['worst']:.2f}" if judged else "- | failed"
    for count, (prefill, decode) in zip(COUNTS, x.get("times", []), strict=False):
        print(
            f"| {name} | {x['start']:.0f} | {count} | {prefill:,.0f} | {decode:,.0f} | {verdict} |"
        )
    far = [
        f"{name}: too far off: {count} tokens of text {number}, from the {first}. on"
        for number, count, first in x.get("wrong", [])
    ]
    lines = [line for line in said.strip().splitlines() if "frame #" not in line]  # of C++
    tail = [] if judged else [f"{name} failed:", *lines[-40:]]
    more = [f"{name}: {what}: {x[what]}" for what in ("drafts", "slept") if what in x]
    for line in [*more, *far, *tail]:
        print(line)
    sys.stdout.flush()
    return x, judged and not far


def compare(found: dict[str, dict[str, Any]]) -> None:
    """Of the parts that vLLM's own path stands beside."""
    print("\n| ours beside vLLM's own | requests | prefill | times | decode | times |")
    print("|---|---|---|---|---|---|")
    for name in found:
        both = [found[each].get("times", []) for each in (name, f"{name}-vllm") if each in found]
        for count, *rates in zip(COUNTS, *both, strict=False) if len(both) == 2 else ():
            cells = [
                f"{ours:,.0f} / {theirs:,.0f} | {ours / theirs:.2f}"
                for ours, theirs in zip(*rates, strict=True)
            ]
            print(f"| {name} | {count} | {' | '.join(cells)} |", flush=True)


def main(names: list[str]) -> int:
    told = None
    if names[:1] == ["--profile"]:
        told, names = Path(names[1]), names[2:]
    names = names or list(PARTS)
    print("| part | start, s | requests | prefill, tokens/s | decode | equal | roundings |")
    print("|---|---|---|---|---|---|---|", flush=True)
    memory = os.path.isdir(MEMORY) and shutil.disk_usage(MEMORY).free > 24 << 30
    with (
        tempfile.TemporaryDirectory(dir=MEMORY if memory else None) as folder,
        ThreadPoolExecutor(TOGETHER) as pool,
    ):
        root, reports = Path(folder), []
        for i in range(0, len(names), TOGETHER):
            together = names[i : i + TOGETHER]
            (root / "parts.json").write_text(json.dumps(together))
            reports += pool.map(lambda name: report(name, root, told), together)
    compare({name: x for name, (x, _) in zip(names, reports, strict=True)})
    return sum(not right for _, right in reports)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--part"]:
        given, where = sys.argv[2], Path(sys.argv[3])
        for found in run(given, where, Path(sys.argv[4]) if sys.argv[4:] else None):
            (where / f"{given}.json").write_text(json.dumps(found))
    else:
        sys.exit(main(sys.argv[1:]))
