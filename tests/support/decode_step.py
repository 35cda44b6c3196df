# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""A whole decode step, tiny: a layer of sparse attention, one of the gated delta rule, the head.

Caches, states and weights are buffers; lengths, tables and slots are tensors, so that one graph
serves every length.
"""

from __future__ import annotations

import torch
from torch import Tensor

import custom

from .samples import DR, H, Maker, N, P, R, sample

VOCABULARY, STATES = 50, 4
_WRITTEN = ("kv_cache", "kr_cache", "index_k_cache")
_OF_THE_CALL = ("x", "sin", "cos", "cache_index", "block_table", "act_seqs")


class DecodeStep(torch.nn.Module):
    """tokens [B], act_seqs [B], block_table [B, pages], slots [B] -> the next tokens and logits"""

    written = (*_WRITTEN, "states")

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        maker = Maker(device, dtype)
        layer = sample("npu_sparse_attention_pto", device, dtype)
        given = (n for n, value in layer.items() if isinstance(value, Tensor))
        self.names = [name for name in given if name not in _OF_THE_CALL]
        for name in self.names:
            self.register_buffer(name, layer[name])
        for name, value in dict(
            embedding=maker.normal(VOCABULARY, H),
            sines=maker.normal(64, DR),
            cosines=maker.normal(64, DR),
            w_o=maker.normal(N * R, H),
            w_in=maker.normal(H, 2 * 16 + 2 * 16 + 4 * 8 + 4 + 4),
            w_out=maker.normal(4 * 8, H),
            A_log=maker.normal(4, dtype=torch.float32),
            dt_bias=maker.normal(4, dtype=torch.float32),
            states=maker.normal(STATES, 4, 16, 8, dtype=torch.float32),
        ).items():
            self.register_buffer(name, value)

    def forward(
        self, tokens: Tensor, act_seqs: Tensor, block_table: Tensor, slots: Tensor
    ) -> tuple[Tensor, Tensor]:
        position = act_seqs.long()[:, None] - 1  # [B, 1]
        page = block_table.gather(1, position // P)
        x = self.embedding[tokens][:, None]
        o = custom.npu_sparse_attention_pto(
            x=x,
            sin=self.sines[position],
            cos=self.cosines[position],
            cache_index=(page * P + position % P).int(),
            block_table=block_table,
            act_seqs=act_seqs,
            sparse_count=64,  # all keys: rounding changes the result, not the choice
            **{name: getattr(self, name) for name in self.names},
        )
        x = x + o.flatten(2) @ self.w_o
        q, k, v, a, b = (x @ self.w_in).split([2 * 16, 2 * 16, 4 * 8, 4, 4], dim=-1)
        o = custom.npu_fused_sigmoid_gating_delta_rule_update(
            self.A_log,
            a,
            self.dt_bias,
            1.0,
            20.0,
            q.unflatten(-1, (2, 16)),
            k.unflatten(-1, (2, 16)),
            v.unflatten(-1, (4, 8)),
            b,
            self.states,
            slots,
            use_qk_l2norm_in_kernel=True,
        )
        x = x + o.flatten(2) @ self.w_out
        logits = (x @ self.embedding.mT)[:, 0]
        return logits.argmax(-1), logits


def steps(device: torch.device) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Calls whose shapes are equal; the lengths grow, shrink, and pass the end of a page."""
    table = torch.tensor([[3, 1, 6], [7, 2, 5]], dtype=torch.int32)
    slots = torch.tensor([2, 0], dtype=torch.int32)
    lengths = ([20, 45], [21, 46], [1, 33], [16, 17], [48, 2])
    calls = [
        (torch.tensor([3 + i, 40 - i]), torch.tensor(given, dtype=torch.int32), table, slots)
        for i, given in enumerate(lengths)
    ]
    return [tuple(t.to(device) for t in call) for call in calls]  # type: ignore[misc]
