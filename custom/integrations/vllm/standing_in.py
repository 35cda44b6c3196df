# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Our layers in the places of vLLM's, while a model of vLLM's is built."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from vllm.model_executor.custom_op import op_registry_oot


@contextmanager
def standing_in(
    layers: Mapping[str, Any], *names: tuple[ModuleType, Mapping[str, Any]]
) -> Iterator[None]:
    """What vLLM builds inside has our `layers`, by the names of those it would register, and ours
    under the `names` of its modules; other models of the process are not concerned."""
    registered = dict(op_registry_oot)
    before = [{name: vars(module)[name] for name in ours} for module, ours in names]
    op_registry_oot.update(layers)
    for module, ours in names:
        vars(module).update(ours)
    try:
        yield
    finally:
        op_registry_oot.clear()
        op_registry_oot.update(registered)
        for (module, _), theirs in zip(names, before, strict=True):
            vars(module).update(theirs)
