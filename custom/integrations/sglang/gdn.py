# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Qwen3-Next's and Qwen3.5's gated delta rule in SGLang.

SGLang keeps the model, its projections, the convolution, the gated norm, the pools of states and
the batch's metadata.  Ours is what its backend computes the rule with, on SGLang's own pools: a
decode step behind the convolution, prefills, and the states that SGLang's prefix cache keeps of the
middle of a prompt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt import runtime_context
from sglang.srt.layers.attention.linear import gdn_backend
from sglang.srt.layers.attention.linear.gdn_backend import GDNAttnBackend, GDNKernelDispatcher
from sglang.srt.layers.attention.linear.kernels.gdn_triton import TritonGDNKernel
from torch import Tensor
from typing_extensions import override  # of torch

from ...delta_rule import npu_chunk_gated_delta_rule, npu_fused_sigmoid_gating_delta_rule_update
from ..engines import refuse_unread
from ..kernels import normalised
from .modes import check_modes
from .versions import SWITCH

if TYPE_CHECKING:  # as what its configuration is published
    from sglang.srt.arg_groups.fields.exec_ import ExecMamba
    from sglang.srt.arg_groups.fields.memory import Memory

RULE = "the gated delta rule"
# of a prefill's arguments those that say what others say too
HINTS = ("layer_id", "seq_lens_cpu", "extend_seq_lens_cpu")


def check(runner: Any) -> None:
    mamba: ExecMamba = runtime_context.get_exec().mamba
    memory: Memory = runtime_context.get_memory()
    more = {
        "states that are replayed (--enable-linear-replayssm)": mamba.enable_linear_replayssm
        or mamba.enable_linear_replayssm_spec,
        "pages that have states and keys": memory.enable_page_major_kv_layout
        or memory.enable_unified_memory,
    }
    check_modes(RULE, runner, more)


class DeltaRule(TritonGDNKernel):
    """The rule on a pool of states [slots, Nv, Dv, Dk]; `chunk` tokens between kept states."""

    supports_track_state_snapshot = True

    def __init__(self, chunk: int) -> None:
        self.chunk = chunk

    @override
    def packed_decode(
        self,
        mixed_qkv: Tensor,
        a: Tensor,
        b: Tensor,
        *,
        A_log: Tensor,
        dt_bias: Tensor,
        scale: float,
        ssm_states: Tensor,
        cache_indices: Tensor,
        num_v_heads: int,
        head_v_dim: int,
        **kwargs: Any,
    ) -> Tensor:
        """[1, B, Nv, Dv] of one token of each request, [B, 2 Nk Dk + Nv Dv]."""
        refuse_unread(SWITCH, RULE, kwargs)
        values = num_v_heads * head_v_dim
        keys = (mixed_qkv.shape[-1] - values) // 2
        q, k, v = mixed_qkv[:, None].split([keys, keys, values], -1)
        q, k = (x.unflatten(-1, (-1, ssm_states.shape[-1])) for x in (q, k))
        return npu_fused_sigmoid_gating_delta_rule_update(
            A_log,
            a[:, None],
            dt_bias,
            1.0,
            20.0,
            q,
            k,
            v.unflatten(-1, (num_v_heads, head_v_dim)),
            b[:, None],
            ssm_states,
            cache_indices,
            scale,
            use_qk_l2norm_in_kernel=True,
            state_layout="vk",
        ).transpose(0, 1)

    @override
    def extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        *,
        ssm_states: Tensor,
        cache_indices: Tensor,
        query_start_loc: Tensor,
        inplace_update: bool = True,
        track_state: Tensor | None = None,
        track_chunk_idx: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor, None]:
        """[1, T, Nv, Dv] of T tokens of all requests, and their states.

        `track_state` [n, Nv, Dv, Dk] takes those before the chunk `track_chunk_idx` [n] of each
        request: past it no token writes or decays.  The third is SGLang's states of all chunks.
        """
        refuse_unread(SWITCH, RULE, kwargs, HINTS)
        q, k, v = (x.reshape(-1, *x.shape[-2:]).contiguous() for x in (q, k, v))
        q, k = normalised(q), normalised(k)
        slots, starts = cache_indices.long(), query_start_loc
        old, lengths = ssm_states[slots], starts.diff()
        g, beta = g[0], beta[0]
        if track_state is not None:
            assert track_chunk_idx is not None
            token = torch.arange(len(q), device=q.device)
            end = starts[:-1] + track_chunk_idx * self.chunk
            of = torch.bucketize(token, starts[1:], right=True).clamp(max=len(end) - 1)
            before = (token < end[of])[:, None]
            track_state[:] = npu_chunk_gated_delta_rule(
                q,
                k,
                v,
                beta=beta * before,
                g=g * before,
                initial_state=old.float(),
                actual_seq_lengths=lengths,
            )[1]
        out, final = npu_chunk_gated_delta_rule(
            q, k, v, beta=beta, g=g, initial_state=old, actual_seq_lengths=lengths
        )
        if inplace_update:
            ssm_states[slots] = final
        return out[None], final, None


class DeltaBackend(GDNAttnBackend):
    def __init__(self, model_runner: Any) -> None:
        check(model_runner)
        super().__init__(model_runner)
        kernels: GDNKernelDispatcher = self.kernel_dispatcher
        kernels.decode_kernel = kernels.extend_kernel = DeltaRule(self.mamba_chunk_size)
        kernels.supports_packed_decode = True  # else SGLang splits q, k and v for another kernel


def replace_backend() -> None:
    """Where SGLang looks for it when it builds one."""
    setattr(gdn_backend, GDNAttnBackend.__name__, DeltaBackend)
