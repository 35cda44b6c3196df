# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What the plug-in refuses, each in one sentence: what it was not tried with."""

from __future__ import annotations

from typing import Any

from ..engines import Versions, refuse

SWITCH = "CUSTOM_VLLM"
VLLM: Versions = (0, 32), (0, 34)
ASCEND: Versions = (0, 23), (0, 24)


def check_modes(model: str, vllm_config: Any, **asked: bool) -> None:
    """Refuse, in one sentence, what `model` was not tried with; `asked` has more by name."""
    parallel, drafts = vllm_config.parallel_config, vllm_config.speculative_config
    modes = {
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "context parallelism": parallel.decode_context_parallel_size > 1
        or parallel.prefill_context_parallel_size > 1,
        "microbatches (DBO)": parallel.use_ubatching,
        # of a model's own layers for it: their tokens are checked by the layers that are ours
        "drafts of another kind than MTP": drafts is not None and drafts.method != "mtp",
        "LoRA": vllm_config.lora_config is not None,
        "a KV connector": vllm_config.kv_transfer_config is not None,
        **{name.replace("_", " "): on for name, on in asked.items()},
    }
    refuse(SWITCH, model, modes)


def usual_modes(vllm_config: Any, cache_dtype: str, quant_config: Any) -> dict[str, bool]:
    """What layers are asked for that were tried alone, with weights and caches of one dtype."""
    dtype = f"{vllm_config.model_config.dtype}".removeprefix("torch.")
    return dict(
        data_parallelism=vllm_config.parallel_config.data_parallel_size > 1,
        drafts=vllm_config.speculative_config is not None,
        quantized_weights=quant_config is not None,
        caches_of_another_dtype_than_the_model=cache_dtype not in ("auto", dtype),
    )
