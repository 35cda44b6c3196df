# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""A worker's process on a GPU (h200.py): what these models do without."""

from __future__ import annotations

from vllm.model_executor.models.qwen3_next import QwenNextMixtureOfExperts
from vllm.v1.worker import gpu_worker

# imports all models for kernels that these do not have
gpu_worker.kernel_warmup = lambda worker: None
# a check for experts
QwenNextMixtureOfExperts.set_moe_parameters = lambda self: None


class Extension:
    """vLLM's `worker_extension_cls`: it imports this module before it builds a model."""
