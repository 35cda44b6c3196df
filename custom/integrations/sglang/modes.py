# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What both backends refuse, each in one sentence: what has no test."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt import runtime_context

from ..engines import refuse
from .versions import SWITCH

if TYPE_CHECKING:  # as what its configuration is published
    from sglang.srt.arg_groups.fields.disagg import Disagg
    from sglang.srt.arg_groups.fields.exec_ import ExecOverlap
    from sglang.srt.arg_groups.fields.parallel import Parallel
    from sglang.srt.arg_groups.fields.spec import Spec


def check_modes(model: str, runner: Any, more: Mapping[str, bool]) -> None:
    """Refuse, in one sentence, what `model` has no test for; `more` is its own."""
    parallel: Parallel = runtime_context.get_parallel()
    spec: Spec = runtime_context.get_spec()
    overlap: ExecOverlap = runtime_context.get_exec().overlap
    disagg: Disagg = runtime_context.get_disagg()
    modes = {
        "devices other than NVIDIA's": runner.device != "cuda" or bool(torch.version.hip),
        "tensor parallelism": parallel.tp_size > 1,
        "pipeline parallelism": parallel.pp_size > 1,
        "context parallelism": parallel.dcp_size > 1 or parallel.attn_cp_size > 1,
        "speculative decoding": spec.speculative_algorithm is not None,
        "microbatches": overlap.enable_two_batch_overlap,
        "prefill and decode apart": disagg.disaggregation_mode != "null",
        **more,
    }
    refuse(SWITCH, model, modes)
