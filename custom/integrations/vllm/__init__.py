# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""vLLM's models on our ops: a plug-in that an unmodified vLLM finds by its entry point.

    CUSTOM_VLLM=1 vllm serve MODEL

DeepSeek-V3.2 and GLM-5 (mla.py), Qwen3-Next and Qwen3.5 (gdn.py); docs/vllm.md has the versions
and modes that were tried.
"""

from __future__ import annotations

from typing import Any

from ...dispatch.env import config
from ...dispatch.errors import BackendUnavailable, NotSupported, need

# tried with the first, up to before the second
VERSIONS = (0, 32), (0, 34)


def register() -> None:
    """Put our layers where vLLM builds its own; nothing unless CUSTOM_VLLM=1.

    vLLM calls it in each of its processes, before it builds a model.

    >>> from custom.integrations.vllm import register
    >>> register()
    """
    if not config.vllm:
        return
    need("vllm", __name__, f'"vllm{_range(VERSIONS)}"')
    import vllm

    check_version("vLLM", vllm.__version__, VERSIONS)
    for model in ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"):
        # by name: vLLM imports a model where it builds it
        vllm.ModelRegistry.register_model(model, f"{__name__}.mla:{model}")
    from . import gdn

    gdn.register()


def _range(versions: tuple[tuple[int, int], tuple[int, int]]) -> str:
    (major, minor), (other, below) = versions
    return f">={major}.{minor},<{other}.{below}"


def check_version(name: str, version: str, tried: tuple[tuple[int, int], tuple[int, int]]) -> None:
    """Refuse what was not tried: its hooks may have moved."""
    major, minor = (int(each) for each in version.split(".")[:2])
    if not tried[0] <= (major, minor) < tried[1]:
        raise BackendUnavailable(
            f"CUSTOM_VLLM=1 was tried with {name} {_range(tried)}, and {version} is installed; "
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
