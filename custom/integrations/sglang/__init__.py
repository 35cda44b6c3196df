# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""SGLang's sparse attention on our ops: a plug-in that SGLang finds by its entry point.

    CUSTOM_SGLANG=1 python -m sglang.launch_server --model-path MODEL

DeepSeek-V3.2 and GLM-5 (dsa.py).  docs/sglang.md says what was tried.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from ...dispatch.env import config
from ...dispatch.errors import need
from ..engines import check_version, in_words
from .versions import SGLANG, SWITCH


def sparse_backend(runner: Any) -> Any:
    """SGLang's factory of the backend "dsa": called once the model and its caches are there."""
    from .dsa import SparseBackend, replace_selection

    replace_selection()
    return SparseBackend(runner)


def register() -> None:
    """Put our backend where SGLang looks for its own; nothing unless CUSTOM_SGLANG=1.

    SGLang calls it in each of its processes.

    >>> from custom.integrations.sglang import register
    >>> register()
    """
    if not config.sglang:
        return
    try:
        need("sglang", __name__, f'"sglang{in_words(SGLANG)}"')
        check_version(SWITCH, "SGLang", version("sglang"), SGLANG)
        from sglang.srt.layers.attention.attention_registry import register_attention_backend

        for name in ("dsa", "nsa"):  # its older name
            register_attention_backend(name)(sparse_backend)
    except Exception as error:
        # what a plug-in raises SGLang logs, and goes on without the plug-in
        raise SystemExit(f"{type(error).__name__}: {error}") from error
