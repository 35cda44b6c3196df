# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""vLLM's models on our ops: a plug-in that an unmodified vLLM finds by its entry point.

    CUSTOM_VLLM=1 vllm serve MODEL

DeepSeek-V3.2 and GLM-5 (mla.py), DeepSeek-V4 (deepseek_v4.py), Qwen3-Next, Qwen3.5 and OLMo-Hybrid
(gdn.py), Kimi Linear (kimi.py), GLM-5.3-Flash (glm5_next.py), MiniMax-M3 (minimax_m3.py); under
vllm-ascend, the sparse attention (ascend.py).  docs/vllm.md has the versions and modes that were
tried.
"""

from __future__ import annotations

from importlib.metadata import version

from ...dispatch.env import config
from ...dispatch.errors import need
from ..engines import check_version, in_words
from .modes import ASCEND, SWITCH, VLLM


def register() -> None:
    """Put our layers where vLLM builds its own; nothing unless CUSTOM_VLLM=1.

    vLLM calls it in each of its processes, before it builds a model.

    >>> from custom.integrations.vllm import register
    >>> register()
    """
    if not config.vllm:
        return
    need("vllm", __name__, f'"vllm{in_words(VLLM)}"')
    import vllm
    from vllm.platforms import current_platform

    if current_platform.device_type == "npu":
        check_version(SWITCH, "vllm-ascend", version("vllm-ascend"), ASCEND)
        from . import ascend

        ascend.register()
        return
    check_version(SWITCH, "vLLM", vllm.__version__, VLLM)
    ours = {
        "DeepseekV32ForCausalLM": "mla:DeepseekV32ForCausalLM",
        "GlmMoeDsaForCausalLM": "mla:GlmMoeDsaForCausalLM",
        "DeepseekV32MTPModel": "mla:DeepseekV32MTP",  # the drafts of both
        "DeepseekV4ForCausalLM": "deepseek_v4:DeepseekV4ForCausalLM",
        "DeepSeekV4MTPModel": "deepseek_v4:DeepseekV4MTP",
        "KimiLinearForCausalLM": "kimi:KimiLinearForCausalLM",
        "Glm5NextForCausalLM": "glm5_next:Glm5NextForCausalLM",
        "MiniMaxM3SparseForCausalLM": "minimax_m3:MiniMaxM3SparseForCausalLM",
    }
    for model, name in ours.items():
        # by name: vLLM imports a model where it builds it
        vllm.ModelRegistry.register_model(model, f"{__name__}.{name}")
    from . import gdn

    gdn.register()
