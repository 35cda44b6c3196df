# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What the plug-in refuses, each in one sentence: what it was not tried with."""

from __future__ import annotations

from typing import Any

from ...dispatch.errors import BackendUnavailable, NotSupported

# (major, minor): tried with the first, up to before the second
Versions = tuple[tuple[int, int], tuple[int, int]]
VLLM: Versions = (0, 32), (0, 34)
ASCEND: Versions = (0, 23), (0, 24)


def in_words(versions: Versions) -> str:
    (major, minor), (other, below) = versions
    return f">={major}.{minor},<{other}.{below}"


def check_version(name: str, here: str, tried: Versions) -> None:
    """Refuse what was not tried: its hooks may have moved."""
    major, minor = (int(each) for each in here.split(".")[:2])
    if not tried[0] <= (major, minor) < tried[1]:
        raise BackendUnavailable(
            f"CUSTOM_VLLM=1 was tried with {name} {in_words(tried)}, and {here} is installed; "
            "install one of these, or unset CUSTOM_VLLM."
        )


def check_modes(model: str, vllm_config: Any, **asked: bool) -> None:
    """Refuse, in one sentence, what `model` was not tried with; `asked` has more by name."""
    parallel = vllm_config.parallel_config
    asked = {
        "tensor parallelism": parallel.tensor_parallel_size > 1,
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "context parallelism": parallel.decode_context_parallel_size > 1
        or parallel.prefill_context_parallel_size > 1,
        "microbatches (DBO)": parallel.use_ubatching,
        "speculative decoding": vllm_config.speculative_config is not None,
        "LoRA": vllm_config.lora_config is not None,
        "a KV connector": vllm_config.kv_transfer_config is not None,
        **{name.replace("_", " "): on for name, on in asked.items()},
    }
    for mode, on in asked.items():
        if on:
            raise NotSupported(
                f"CUSTOM_VLLM=1 serves {model} without {mode}, and this engine asks for it; turn "
                "it off, or unset CUSTOM_VLLM."
            )
