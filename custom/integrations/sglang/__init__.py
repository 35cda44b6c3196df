# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""SGLang's models on our ops: a plug-in that SGLang finds by its entry point.

    CUSTOM_SGLANG=1 python -m sglang.launch_server --model-path MODEL

DeepSeek-V3.2 and GLM-5 (dsa.py), Qwen3-Next and Qwen3.5 (gdn.py).  docs/sglang.md says what was
tried.
"""

from __future__ import annotations

import traceback
from importlib.metadata import version
from typing import Any

from ...dispatch.env import config
from ...dispatch.errors import BackendUnavailable, need
from ..engines import check_version, in_words
from .versions import SGLANG, SWITCH


def sparse_backend(runner: Any) -> Any:
    """SGLang's factory of the backend "dsa": called once the model and its caches are there."""
    from .dsa import SparseBackend, replace_selection

    replace_selection()
    return SparseBackend(runner)


def delta_backend(runner: Any, full_attn_backend: Any) -> None:
    """Before SGLang wraps a model's backend of full attention, for one with a delta rule."""
    from sglang.srt.configs.hybrid_arch import hybrid_gdn_config

    if hybrid_gdn_config(runner.model_config) is not None:
        from .gdn import replace_backend

        replace_backend()


def register() -> None:
    """Put our backends where SGLang looks for its own; nothing unless CUSTOM_SGLANG=1.

    SGLang calls it in each of its processes.

    >>> from custom.integrations.sglang import register
    >>> register()
    """
    if not config.sglang:
        return
    try:
        need("sglang", __name__, f'"sglang{in_words(SGLANG)}"')
        check_version(SWITCH, "SGLang", version("sglang"), SGLANG)
        from sglang.srt.layers.attention import attention_registry
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        for name in ("dsa", "nsa"):  # its older name
            attention_registry.register_attention_backend(name)(sparse_backend)
        wrapper = attention_registry.attn_backend_wrapper
        HookRegistry.register(
            f"{attention_registry.__name__}.{wrapper.__name__}", delta_backend, HookType.BEFORE
        )
    except Exception as error:
        # what a plug-in raises SGLang logs, and goes on without the plug-in
        if not isinstance(error, BackendUnavailable):
            traceback.print_exc()  # the sentence alone would hide where
        raise SystemExit(f"{type(error).__name__}: {error}") from error
