# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""A rank's process, which starts from nothing: what models need on a CPU (serve.py) stays."""

from __future__ import annotations

from contextlib import ExitStack

from .serve import kimi_on_a_cpu, m3_on_a_cpu, olmo_on_a_cpu, v4_on_a_cpu

STAYS = ExitStack()
for each in (kimi_on_a_cpu(), v4_on_a_cpu(), m3_on_a_cpu(), olmo_on_a_cpu()):
    STAYS.enter_context(each)


class Extension:
    """vLLM's `worker_extension_cls`: it imports this module before it builds a model."""
