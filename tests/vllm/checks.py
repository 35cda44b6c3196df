# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""vLLM on a CPU with our plug-in: in float32 all tokens equal Hugging Face's; with caches of 8
bits, those of our own decode loop with such caches; with weights of 8 bits, as far as their inputs'
rounding leaves it open.

tests/vllm/run.sh sets up what they need.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

COUNT = 16
UNEVEN = [5, 16, 9, 16, 12]  # requests end, and others begin beside those that go on
# of prefills, and of decodes beside them
STAGES = {"npu_lightning_indexer", "npu_sparse_flash_attention"}
# a step of decodes alone
SPARSE = STAGES | {"npu_sparse_attention_pto"}
SHARED = STAGES | {"npu_sparse_attention_indices_pto", "npu_sparse_attention_shared_pto"}
SPARSE8 = {
    "npu_sparse_attention_pto",
    "npu_index_cache_write",
    "npu_kv_quant_sparse_flash_attention",
    "npu_latent_cache_write",
    "npu_quant_lightning_indexer",
}
DELTA = {"npu_causal_conv1d", "npu_chunk_gated_delta_rule", "npu_gated_delta_layer_decode"}
KIMI = {
    "npu_causal_conv1d",
    "npu_chunk_kda",
    "npu_fused_infer_attention_score_v2",
    "npu_gated_delta_layer_decode",
}
GLM_53 = {
    "npu_causal_conv1d",
    "npu_chunk_kda",
    "npu_compressor",
    "npu_gated_delta_layer_decode",
    "npu_lightning_indexer",
    "npu_sparse_flash_attention",
}
M3 = {"npu_block_indexer", "npu_sparse_attention_score"}
V4 = {"npu_sparse_attention_v4_pto"}
# checkpoint -> the ops that must have run
MODELS = {
    "deepseek_v32": SPARSE,
    "deepseek_v32_wide": SPARSE,
    "deepseek_v32_yarn": SPARSE,
    "glm_5": SPARSE,
    "glm_52": SHARED,
    "qwen3_next": DELTA,
    "qwen3_5": DELTA,
    "olmo_hybrid": DELTA,
    "kimi_linear": KIMI,
    "kimi_linear_experts": KIMI,
    "deepseek_v4": V4,
    "glm_53": GLM_53,
    "minimax_m3": M3,
}
# on a CPU vLLM keeps no prefixes for latent attention, but makes blocks of states as if it did
ALONE: dict[str, dict[str, Any]] = {
    name: dict(enable_prefix_caching=False)
    for name in ("kimi_linear", "kimi_linear_experts", "glm_53")
}
MIXED = (
    "deepseek_v32",
    "glm_52",
    "qwen3_next",
    "kimi_linear",
    "deepseek_v4",
    "glm_53",
    "minimax_m3",
)
# checkpoint -> heads of its layers; on two ranks, gloo between them, each has half
RANKS = {
    "deepseek_v32": [8],
    "glm_52": [8],
    "qwen3_next": [4],
    "olmo_hybrid": [4],
    "kimi_linear_experts": [4, 8],
    "deepseek_v4": [4],
    "glm_53": [4],
    "minimax_m3": [8],
}
# prompts in parts of up to so many tokens a step; what was kept of them is not computed again
KEPT: dict[str, dict[str, Any]] = {
    "deepseek_v32": dict(max_num_batched_tokens=64, max_num_seqs=4, block_size=16),
    "glm_52": dict(max_num_batched_tokens=64, max_num_seqs=4, block_size=16),
    "deepseek_v32_drafts": dict(max_num_batched_tokens=64, max_num_seqs=4, block_size=16),
    "qwen3_next": dict(max_num_batched_tokens=128, max_num_seqs=4),
    "olmo_hybrid": dict(max_num_batched_tokens=128, max_num_seqs=4),
    "kimi_linear": dict(max_num_batched_tokens=128, max_num_seqs=4),
    "deepseek_v4": dict(max_num_batched_tokens=64, max_num_seqs=4, block_size=32),
    "deepseek_v4_drafts": dict(max_num_batched_tokens=64, max_num_seqs=4, block_size=32),
    "glm_53": dict(max_num_batched_tokens=128, max_num_seqs=4),
    "minimax_m3": dict(max_num_batched_tokens=64, max_num_seqs=4, block_size=16),
}
# tokens; beside drafts vLLM leaves the last page out, and one of DeepSeek-V4's rows is of 64
LEAST = {"deepseek_v4_drafts": 64}
DRAFTS: dict[str, Any] = dict(
    speculative_config=dict(method="mtp", num_speculative_tokens=2),
)
# checkpoint with a layer for drafts -> ops that must have run; for the delta rule without prefixes
DRAFTED = {
    "deepseek_v32_drafts": SPARSE,
    "qwen3_next_drafts": {"npu_causal_conv1d_update", "npu_recurrent_gated_delta_rule"},
    "deepseek_v4_drafts": V4,
}
# beside prefills, two at a time: prompts of Qwen3-Next come in parts, the others' whole
BESIDE: dict[str, dict[str, Any]] = {
    "qwen3_next_drafts": dict(max_num_batched_tokens=64),
    "deepseek_v4_drafts": {},
}
RELOADED = ("deepseek_v32", "qwen3_5", "olmo_hybrid", "kimi_linear", "glm_53", "minimax_m3")
PREEMPTED = ("deepseek_v32", "olmo_hybrid", "kimi_linear", "glm_53", "minimax_m3")
# checkpoint -> what vLLM calls the caches of 8 bits that it is asked for
FP8 = {"deepseek_v32_one": "fp8", "glm_5_one": "fp8_ds_mla"}
# a checkpoint of weights of 8 bits, and how it is served; their scales alone are copied
QUANTIZED = "deepseek_v4_fp8"
SERVED: dict[str, tuple[list[int], dict[str, Any]]] = {
    "together": ([COUNT] * 5, {}),
    "mixed": (UNEVEN, dict(max_num_seqs=2)),
    "two ranks": ([COUNT] * 5, dict(tensor_parallel_size=2)),
}
SCALES = [f"dequant_scale_w_{name}" for name in ("dq", "idx_qb", "kv", "o_a", "o_b", "uq")]

ENVIRONMENT = {
    **os.environ,
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    # what our layers have seen is asked of other processes by functions
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}


def run(module: str, *arguments: object, **variables: str) -> str:
    """What the module printed, if it succeeded."""
    done = subprocess.run(
        [sys.executable, "-m", f"tests.vllm.{module}", *map(str, arguments)],
        env=ENVIRONMENT | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    return done.stdout


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints NAME, and Hugging Face's tokens in NAME.json."""
    folder = tmp_path_factory.mktemp("checkpoints")
    run("reference", folder, COUNT, *MODELS, *FP8, *DRAFTED, "deepseek_v3", QUANTIZED)
    return folder


@pytest.fixture(scope="session")
def expected(folder):
    return {each.stem: json.loads(each.read_text()) for each in folder.glob("*.json")}


@pytest.fixture(scope="session")
def serve(folder, tmp_path_factory):
    """The answers to jobs (name, counts, options of the engine), all in one process."""

    def served(
        *jobs: tuple[str, list[int], dict[str, Any]], ours: bool = True, apart: bool = False
    ):
        scratch = tmp_path_factory.mktemp("served")
        asked, answers = scratch / "jobs.json", scratch / "answers.json"
        asked.write_text(json.dumps([(str(folder / name), *rest) for name, *rest in jobs]))
        run(
            "serve",
            asked,
            answers,
            CUSTOM_VLLM="1" if ours else "0",
            VLLM_ENABLE_V1_MULTIPROCESSING="1" if apart else "0",
        )
        return json.loads(answers.read_text())

    return served


@pytest.fixture(scope="session")
def answers(serve):
    """Of every model, together and two at a time."""
    jobs = [(name, [COUNT] * 5, ALONE.get(name, {})) for name in MODELS]
    jobs += [(name, UNEVEN, dict(ALONE.get(name, {}), max_num_seqs=2)) for name in MIXED]
    jobs += [("deepseek_v3", [COUNT] * 5, dict(dtype="bfloat16"))]
    jobs += [("qwen3_next", [COUNT] * 5, dict(max_num_batched_tokens=64, max_num_seqs=4))]
    jobs += [(name, [COUNT] * 5, dict(kv_cache_dtype=kind)) for name, kind in FP8.items()]
    jobs += [(name, UNEVEN, dict(kv_cache_dtype="fp8", max_num_seqs=2)) for name in FP8]
    together = dict(DRAFTS, enable_prefix_caching=False)
    jobs += [(name, [COUNT] * 5, together) for name in DRAFTED]
    jobs += [
        (name, UNEVEN, dict(together, max_num_seqs=2, **more)) for name, more in BESIDE.items()
    ]
    for name, options in KEPT.items():
        more = DRAFTS if name.endswith("_drafts") else {}
        asked = dict(options, enable_prefix_caching=True, resumed=True, **more)
        jobs.append((name, [COUNT] * 5, asked))
    jobs += [(name, [COUNT] * 5, dict(ALONE.get(name, {}), reloaded=True)) for name in RELOADED]
    lost = dict(preempted=[4, 9])
    jobs += [
        (name, UNEVEN, dict(ALONE.get(name, {}), max_num_seqs=2, **lost)) for name in PREEMPTED
    ]
    names = [*MODELS, *(f"{name} mixed" for name in MIXED), "deepseek_v3", "parts"]
    names += [*FP8, *(f"{name} mixed" for name in FP8), *DRAFTED]
    names += [f"{name} mixed" for name in BESIDE]
    names += [*(f"{name} kept" for name in KEPT), *(f"{name} reloaded" for name in RELOADED)]
    names += [f"{name} preempted" for name in PREEMPTED]
    return dict(zip(names, serve(*jobs), strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_tokens_equal_those_of_hugging_face(name, answers, expected):
    assert answers[name]["tokens"] == expected[name]
    assert MODELS[name] <= set(answers[name]["ops"])


@pytest.fixture(scope="session")
def ranks(serve):
    """The same of two ranks, two requests at a time; and with drafts."""
    two: dict[str, Any] = dict(max_num_seqs=2, tensor_parallel_size=2)
    drafts = dict(DRAFTS, enable_prefix_caching=False, tensor_parallel_size=2)
    jobs = [(name, UNEVEN, dict(ALONE.get(name, {}), **two)) for name in RANKS]
    jobs += [(name, [COUNT] * 5, drafts) for name in DRAFTED]
    return dict(zip([*RANKS, *DRAFTED], serve(*jobs), strict=True))


@pytest.mark.parametrize("name", RANKS)
def test_two_ranks_share_the_heads(name, ranks, answers, expected):
    answer = ranks[name]
    assert answer["mixed"]
    assert answer["tokens"] == [all[:n] for all, n in zip(expected[name], UNEVEN, strict=True)]
    assert MODELS[name] <= set(answer["ops"])
    assert answer["heads"] == [[heads // 2 for heads in RANKS[name]]] * 2
    assert answers[name]["heads"] == [RANKS[name]]


@pytest.mark.parametrize("name", DRAFTED)
def test_two_ranks_check_the_same_drafts(name, ranks, answers, expected):
    """Of which none, one or both are right, as often as on one rank."""
    answer = ranks[name]
    assert answer["tokens"] == expected[name]
    assert DRAFTED[name] <= set(answer["ops"])
    assert answer["drafts"] == answers[name]["drafts"] and min(answer["drafts"]) > 0
    ((heads,),) = answers[name]["heads"]
    assert answer["heads"] == [[heads // 2]] * 2


@pytest.mark.parametrize("name", [*MODELS, *FP8])
def test_no_weight_is_kept_twice(name, answers):
    """The layer's op reads vLLM's, but for half of an up-projection."""
    assert answers[name]["copies"] == (
        [] if MODELS.get(name) in (DELTA, KIMI, V4, GLM_53, M3) else ["w_uk"]
    )


@pytest.fixture(scope="session")
def quantized(serve):
    jobs = [(QUANTIZED, *each) for each in SERVED.values()]
    return dict(zip(SERVED, serve(*jobs), strict=True))


@pytest.mark.parametrize("how", SERVED)
def test_quantized_weights(how, quantized, folder, tmp_path):
    """What the checkpoint stands for is the model, but for the rounding of what weights meet."""
    answer, (counts, _) = quantized[how], SERVED[how]
    assert [len(each) for each in answer["tokens"]] == counts
    assert set(answer["ops"]) >= V4 and answer["copies"] == SCALES
    tokens, verdicts = tmp_path / "tokens.json", tmp_path / "verdicts.json"
    tokens.write_text(json.dumps(answer["tokens"]))
    run("rounding", folder / QUANTIZED, tokens, verdicts)
    for below, at_most in chain.from_iterable(json.loads(verdicts.read_text())):
        assert below <= at_most


@pytest.mark.parametrize("name", FP8)
def test_quantized_caches(name, answers, expected):
    """Alone, and prefills beside decodes: the tokens of our own decode loop with such caches."""
    alone, mixed = answers[name], answers[f"{name} mixed"]
    assert alone["tokens"] == expected[name] and set(alone["ops"]) >= SPARSE8
    assert not set(alone["ops"]) & STAGES
    assert mixed["mixed"]
    assert mixed["tokens"] == [all[:n] for all, n in zip(expected[name], UNEVEN, strict=True)]


@pytest.mark.parametrize("name", MIXED)
def test_prefills_and_decodes_in_one_batch(name, answers, expected):
    answer = answers[f"{name} mixed"]
    assert answer["mixed"]
    assert answer["tokens"] == [all[:n] for all, n in zip(expected[name], UNEVEN, strict=True)]


@pytest.mark.parametrize("name", DRAFTED)
def test_drafts_are_taken_and_refused(name, answers, expected):
    """The draft layer says nearly what the model will: none, one or both of two are right."""
    answer = answers[name]
    assert answer["tokens"] == expected[name]
    assert DRAFTED[name] <= set(answer["ops"])
    none, one, both = answer["drafts"]
    assert none > 0 and one > 0 and both > one


@pytest.mark.parametrize("name", BESIDE)
def test_drafts_beside_prefills(name, answers, expected):
    """The delta rule's batch is in two parts then, DeepSeek-V4's in calls of as many tokens."""
    answer = answers[f"{name} mixed"]
    assert answer["tokens"] == [all[:n] for all, n in zip(expected[name], UNEVEN, strict=True)]
    assert min(answer["drafts"]) > 0


@pytest.mark.parametrize("name", KEPT)
def test_prefixes_are_kept_and_prompts_come_in_parts(name, answers, expected):
    """Requests that go on from prompts, answers and parts of them that others had."""
    answer = answers[f"{name} kept"]
    assert answer["tokens"] == expected[name]
    assert answer["kept"] >= LEAST.get(name, 100)


@pytest.mark.parametrize("name", RELOADED)
def test_weights_that_are_lost_are_read_again(name, answers, expected):
    """Where they were, those that a layer has copied as well."""
    assert answers[f"{name} reloaded"]["tokens"] == expected[name]


@pytest.mark.parametrize("name", PREEMPTED)
def test_requests_that_lose_their_pages_begin_again(name, answers, expected):
    """Twice, with what they have been answered, which is read again."""
    answer = answers[f"{name} preempted"]
    assert answer["tokens"] == [all[:n] for all, n in zip(expected[name], UNEVEN, strict=True)]


def test_prompts_in_parts(answers, expected):
    """64 tokens a step."""
    assert answers["parts"]["mixed"]
    assert answers["parts"]["tokens"] == expected["qwen3_next"]


def test_another_model_is_not_touched(answers, serve):
    """Dense latent attention has vLLM's own layer; bf16, which is all that its CPU kernel takes."""
    answer = answers["deepseek_v3"]
    assert not answer["ops"]
    (alone,) = serve(("deepseek_v3", [COUNT] * 5, dict(dtype="bfloat16")), ours=False)
    assert answer["tokens"] == alone["tokens"]


def test_an_engine_in_its_own_process(serve, expected):
    (answer,) = serve(("deepseek_v32", [COUNT] * 5, {}), apart=True)
    assert answer["tokens"] == expected["deepseek_v32"]


@pytest.mark.parametrize(
    ("name", "kind", "mode"),
    [
        ("deepseek_v32_wide", "fp8_e5m2", "caches other than bfloat16 and fp8"),
        ("deepseek_v32", "fp8", "fp8 caches of other sizes than those of DeepSeek"),
    ],
)
def test_other_caches_are_refused(name, kind, mode, serve):
    with pytest.raises(AssertionError, match=f"serves sparse attention without {mode}, and"):
        serve((name, [1] * 5, dict(kv_cache_dtype=kind)))


def test_ranks_have_requests_of_their_own(folder, tmp_path, expected):
    """Data parallelism: who has answered takes part in steps of nothing until the other has."""
    name = "deepseek_v32"
    jobs = [(folder / name, [COUNT] * 3, {}), (folder / name, UNEVEN[:2], dict(first=3))]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def served(rank: int) -> list[list[int]]:
        asked, answers = tmp_path / f"jobs{rank}.json", tmp_path / f"answers{rank}.json"
        asked.write_text(json.dumps([jobs[rank]], default=str))
        place = dict(VLLM_DP_RANK=f"{rank}", VLLM_DP_RANK_LOCAL=f"{rank}", VLLM_DP_SIZE="2")
        master = dict(VLLM_DP_MASTER_IP="127.0.0.1", VLLM_DP_MASTER_PORT=f"{port}")
        switches = dict(CUSTOM_VLLM="1", VLLM_ENABLE_V1_MULTIPROCESSING="1")
        run("serve", asked, answers, **switches, **place, **master)
        (answer,) = json.loads(answers.read_text())
        assert MODELS[name] <= set(answer["ops"])
        return answer["tokens"]

    with ThreadPoolExecutor() as both:
        tokens = [each for answer in both.map(served, range(2)) for each in answer]
    counts = [*[COUNT] * 3, *UNEVEN[:2]]
    assert tokens == [all[:n] for all, n in zip(expected[name], counts, strict=True)]


@pytest.mark.parametrize(("name", "count", "ranks"), [("deepseek", 40, 2), ("next", 60, 1)])
def test_requests_come_and_go(name, count, ranks):
    """They join, are aborted and preempted, and take pages that others had."""
    run("load", "--model", name, "--requests", count, "--ranks", ranks, DEVICE="cpu")


def test_a_load_test_shows_both(tmp_path):
    """Ours run where they are turned on, and nowhere else."""
    plot = tmp_path / "both.png"
    script = Path(__file__).parents[2] / "examples" / "serve_engine.py"
    sizes = ["--requests", "4", "--rate", "50", "--new-tokens", "8", "--prompt-tokens", "64"]
    done = subprocess.run(
        [sys.executable, script, *sizes, "--plot", plot],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-8000:]
    _, ours, theirs = re.split("^(?:ours|vLLM's own):$", done.stdout, flags=re.M)
    assert set(ours.split()) >= DELTA and "npu_" not in theirs
    assert re.findall(r"^\| (\w.*?) \|", theirs, re.M) == ["ours", "vLLM's own"]
    assert plot.stat().st_size > 10_000


def test_nothing_happens_unless_it_is_turned_on(serve):
    with pytest.raises(AssertionError, match="Sparse Attention is not supported on CPU"):
        serve(("deepseek_v32", [1] * 5, {}), ours=False)
