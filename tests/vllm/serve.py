# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""vLLM's greedy tokens of the prompts, one engine after the other.

    python -m tests.vllm.serve JOBS ANSWERS

JOBS and ANSWERS are files: a list of [checkpoint, tokens of each prompt, options of `vllm.LLM`],
and for each of them the tokens, how many of all prompts vLLM had kept, the number of steps with a
prefill beside a decode and how often so many drafts were taken (of an engine in this process), our
ops that ran, the weights that our layers have copied, and the heads of a layer on each rank.

Options of ours: `resumed`, the last half of the tokens is asked for in a request of its own, of the
prompt and the first half; `reloaded`, after the weights were lost and read again; `preempted`,
numbers of steps before which all requests lose their pages; `first`, the number of the first
prompt, behind which there is one for each of the counts.
"""

from __future__ import annotations

import gc
import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from .checkpoints import prompts

STEPS: list[set[int]] = []  # for every step the numbers of tokens that its requests have
PREEMPTED: set[int] = set()  # steps before which requests lose their pages


DRAFTS: Counter[int] = Counter()  # how often so many drafts of a request were taken


def watch() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    schedule, observe = Scheduler.schedule, Scheduler.make_spec_decoding_stats

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(STEPS) in PREEMPTED:
            assert self.running
            PREEMPTED.remove(len(STEPS))
            self.reset_prefix_cache(reset_running_requests=True)
        output = schedule(self, *args, **kwargs)
        STEPS.append(set(output.num_scheduled_tokens.values()))
        return output

    def observed(self: Any, *args: Any, **kwargs: Any) -> Any:
        DRAFTS[kwargs["num_accepted_tokens"]] += 1
        return observe(self, *args, **kwargs)

    Scheduler.schedule, Scheduler.make_spec_decoding_stats = watched, observed


def keeping() -> AbstractContextManager[Any]:
    """Prefixes kept and prefills in parts as asked for: for latent attention vLLM turns both off on
    a CPU, where its own layers cannot do them."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def checked(config: Any) -> None:
        asked = [
            (config.scheduler_config, "max_num_batched_tokens"),
            (config.scheduler_config, "enable_chunked_prefill"),
            (config.cache_config, "enable_prefix_caching"),
        ]
        if config.cache_config.user_specified_block_size:
            asked.append((config.cache_config, "block_size"))
        values = [getattr(part, name) for part, name in asked]
        check(config)
        for (part, name), value in zip(asked, values, strict=True):
            setattr(part, name, value)

    return patch.object(CpuPlatform, "check_and_update_config", staticmethod(checked))


def without_numba() -> AbstractContextManager[Any]:
    """At whose library vLLM's search for kernels of a CPU stumbles, where a model imports it."""
    return patch("vllm.utils.import_utils.is_numba_available", lambda: False)


@contextmanager
def kimi_on_a_cpu() -> Iterator[None]:
    """vLLM's Kimi Linear asks for CUDA: for a stream, which attention without a gate does not use,
    and for a product beside a sum over ranks."""
    with (
        patch.dict("os.environ", VLLM_KIMI_K3_GEMM_AR="0"),
        patch("torch.cuda.Stream", object),
        without_numba(),
    ):
        yield


@contextmanager
def v4_on_a_cpu() -> Iterator[None]:
    """vLLM's hyper-connections for CPUs take no float32, and leave GLM-5.3's norm out: ours in
    their place.  Nor do its kernels for weights of 8 bits take float32, of which none is called.
    It has no layer for drafts there: that for XPUs, on its layer for CPUs."""
    import torch
    from vllm.model_executor.layers import mhc
    from vllm.model_executor.layers.quantization import fp8
    from vllm.models import deepseek_v4
    from vllm.models.deepseek_v4.cpu import model
    from vllm.models.deepseek_v4.xpu import mtp

    from custom import npu_hc_post, npu_hc_pre

    def norm(x: Any, weight: Any, eps: float) -> Any:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)

    def pre(_: Any, residual: Any, fn: Any, hc_scale: Any, hc_base: Any, **more: Any) -> Any:
        given = dict(
            hc_sinkhorn_iters=more["sinkhorn_repeat"],
            norm_eps=more["rms_eps"],
            hc_eps=more["hc_pre_eps"],
        )
        y, post, comb = npu_hc_pre(residual, fn, hc_scale, hc_base, **given)
        if more.get("norm_weight") is not None:
            y = norm(y, more["norm_weight"], more["norm_eps"])
        return post[..., None], comb, y

    def post(_: Any, x: Any, residual: Any, gates: Any, comb: Any) -> Any:
        return npu_hc_post(x, residual, gates[..., 0], comb)

    def both(
        op: Any, x: Any, residual: Any, post_layer_mix: Any, comb_res_mix: Any, **given: Any
    ) -> Any:
        mixed = post(op, x, residual, post_layer_mix, comb_res_mix)
        return mixed, *pre(op, mixed, **given)

    def head(_: Any, x: Any, *weights: Any) -> Any:
        *weights, norm_eps, hc_eps = weights
        return npu_hc_pre(x, *weights, norm_eps=norm_eps, hc_eps=hc_eps)[0]

    class Layer(model.DeepseekV4DecoderLayer):
        """As the one for XPUs is used: with the last sum outside."""

        def __init__(self, *given: Any, aux_stream_list: None, **more: Any) -> None:
            super().__init__(*given, **more)
            self.ffn.use_mega_moe, self.ffn.finalize_mega_moe_weights = False, lambda: None

        def hc_post(self, x: Any, residual: Any, *gates: Any) -> Any:
            return x if residual is None else super().hc_post(x, residual, *gates)

    def norms(x: Any, at: Any, before: Any, of_x: Any, of_before: Any, eps: float, _: int) -> Any:
        return norm(x * (at > 0)[:, None], of_x, eps), norm(before, of_before, eps)

    with (
        patch.object(mhc.MHCPreOp, "forward_cpu", pre),
        patch.object(mhc.MHCPostOp, "forward_cpu", post),
        patch.object(mhc.MHCFusedPostPreOp, "forward_cpu", both),
        patch.object(mhc.HCHeadOp, "forward_cpu", head),
        patch.object(deepseek_v4, "DeepSeekV4MTP", mtp.DeepSeekV4MTP),
        patch.object(mtp, "DeepseekV4DecoderLayer", Layer),
        patch.object(mtp, "_FUSED_MTP_INPUT_RMSNORM_KERNEL", norms),
        patch.object(mtp, "_MTP_SHARED_HEAD_RMSNORM_KERNEL", norm),
        patch.object(fp8, "init_fp8_linear_kernel", lambda **_: None),
        patch.object(fp8.Fp8Config, "get_supported_act_dtypes", lambda _: [torch.float32]),
    ):
        yield


@contextmanager
def glm_53_on_a_cpu() -> Iterator[None]:
    with v4_on_a_cpu(), without_numba():
        yield


def olmo_on_a_cpu() -> AbstractContextManager[Any]:
    """vLLM's OLMo-Hybrid tells Triton where to allocate."""
    from vllm.model_executor.layers.mamba.gdn import olmo_gdn_linear_attn

    return patch.object(olmo_gdn_linear_attn, "set_triton_allocator", lambda device: None)


@contextmanager
def m3_on_a_cpu() -> Iterator[None]:
    """vLLM's norms of MiniMax-M3 are FlashInfer's: those that it has for other models."""
    from vllm.model_executor.layers.layernorm import GemmaRMSNorm
    from vllm.models.minimax_m3.nvidia import model

    with patch.object(model, "MiniMAXGemmaRMSNorm", GemmaRMSNorm), without_numba():
        yield


ON_A_CPU = {
    "kimi_linear": kimi_on_a_cpu,
    "deepseek_v4": v4_on_a_cpu,
    "glm_53": glm_53_on_a_cpu,
    "minimax_m3": m3_on_a_cpu,
    "olmo_hybrid": olmo_on_a_cpu,
}


def seen(model: Any) -> dict[str, set[Any]]:
    """Of a rank: the ops that ran, the op's matrices that are none of the model's parameters, and
    the heads of our layers."""
    import torch
    from custom.dispatch import log

    theirs = {each.untyped_storage().data_ptr() for each in model.parameters()}
    ours = {
        kind: [each for each in model.modules() if type(each).__name__ == kind]
        for kind in (
            *("SparseMLA", "GatedDelta", "DenseLatent", "KimiDelta", "CompressedAttention"),
            *("PooledLatent", "BoundedDelta", "BlockAttention", "OlmoDelta"),
        )
    }
    latent = ours["SparseMLA"] + ours["DenseLatent"] + ours["PooledLatent"]
    delta = ours["GatedDelta"] + ours["OlmoDelta"] + ours["KimiDelta"] + ours["BoundedDelta"]
    return dict(
        ops={op for op, _ in log.calls},
        copies={
            name
            for layer in ours["SparseMLA"] + ours["CompressedAttention"]
            for name, each in layer.weights.items()
            if isinstance(each, torch.Tensor) and each.ndim > 1
            if each.untyped_storage().data_ptr() not in theirs
        },
        heads={layer.uk.shape[0] for layer in latent}
        | {layer.heads for layer in ours["BlockAttention"]}
        | {layer.A_log.numel() for layer in delta}
        | {layer.attn_sink.shape[0] for layer in ours["CompressedAttention"]},
    )


def weights_at(model: Any) -> list[int]:
    """The addresses of a model's parameters and of what our layers have copied of them."""
    copies = [each for x in model.modules() for each in getattr(x, "copies", {}).values()]
    return [each.data_ptr() for each in [*model.parameters(), *copies]]


def lose_weights(model: Any) -> list[int]:
    for each in model.parameters():
        each.data.fill_(float("nan"))
    for layer in model.modules():
        for each in getattr(layer, "copies", {}).values():
            each.fill_(float("nan"))
    return weights_at(model)


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
    resumed, reloaded = options.pop("resumed", False), options.pop("reloaded", False)
    first = options.pop("first", 0)
    PREEMPTED.clear()
    PREEMPTED.update(options.pop("preempted", []))
    asked = prompts()[first : first + len(counts)]
    with ExitStack() as changes:
        if options.get("enable_prefix_caching"):
            changes.enter_context(keeping())
        for name, change in ON_A_CPU.items():
            if Path(checkpoint).name.startswith(name):
                changes.enter_context(change())
                given["worker_extension_cls"] = "tests.vllm.worker.Extension"
        llm = LLM(model=checkpoint, **{**given, **options})
        if reloaded:
            addresses = llm.apply_model(lose_weights)
            llm.collective_rpc("reload_weights")
            assert llm.apply_model(weights_at) == addresses
        tokens: list[list[int]] = [[] for _ in counts]
        kept = 0
        for counted in [[n // 2 for n in counts], counts] if resumed else [counts]:
            missing = [n - len(got) for n, got in zip(counted, tokens, strict=True)]
            sampling = [
                SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in missing
            ]
            texts = [prompt + got for prompt, got in zip(asked, tokens, strict=True)]
            outputs = llm.generate(
                [{"prompt_token_ids": x} for x in texts], sampling, use_tqdm=False
            )
            for got, each in zip(tokens, outputs, strict=True):
                got += each.outputs[0].token_ids
                kept += each.num_cached_tokens
        assert not PREEMPTED
        ranks = llm.apply_model(seen)
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()
    return dict(
        tokens=tokens,
        kept=kept,
        mixed=sum(1 in step and len(step) > 1 for step in STEPS),
        drafts=[DRAFTS[taken] for taken in range(max(DRAFTS, default=-1) + 1)],
        ops=sorted(set.intersection(*(each["ops"] for each in ranks))),
        copies=sorted(set.union(*(each["copies"] for each in ranks))),
        heads=[sorted(each["heads"]) for each in ranks],
    )


def main(asked: Path, answers: Path) -> None:
    watch()
    answers.write_text(json.dumps([job(*each) for each in json.loads(asked.read_text())]))


if __name__ == "__main__":
    # processes that are asked to run a function find it by the name of its module
    from tests.vllm import serve

    serve.main(Path(sys.argv[1]), Path(sys.argv[2]))
