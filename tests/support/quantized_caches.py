# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Caches of 8 bits behind a drawn layer (quantized_layer.py), and the arguments of its op."""

from __future__ import annotations

import torch
from custom.dispatch.common.quantized import row_bytes
from torch import Tensor

import custom

from .quantized_layer import Call, P
from .samples import IN_LAYER

LENGTHS = [45, 20]
TABLE = [[3, 1, 5], [7, 2, -1]]
K = 16
NAMES = IN_LAYER | dict(
    dequant_scale_w_qb="dequant_scale_w_idx_qb",
    dequant_scale_w_k="dequant_scale_w_idx_k",
)


class Caches:
    """Of `kv` and `index`, filled with keys of earlier tokens."""

    def __init__(self, call: Call, kv: str, index: str, packed: bool) -> None:
        self.call, self.kv, self.index, self.packed = call, kv, index, packed
        device, total = call.device, 8 * P
        draw = torch.Generator().manual_seed(5)
        slots = torch.arange(total, dtype=torch.int32, device=device)

        def new(*size: int) -> Tensor:
            return torch.randn(*size, generator=draw).to(call.dtype).to(device)

        rotary = call.sin.shape[-1]
        latent, rope, key = new(total, 512), new(total, rotary), new(total, 128)
        if kv == "none":
            self.latents = latent.view(8, P, 1, 512), rope.view(8, P, 1, rotary)
        else:
            dtype = torch.int8 if kv == "int8" else torch.uint8
            size = row_bytes(rotary)
            rows = torch.zeros(8, P, 1, size, dtype=dtype, device=device)
            form = dict(kind=kv, row_layout="nope_scale_rope", rope_head_dim=rotary)
            custom.npu_latent_cache_write(latent, rope, rows, slots, **form)
            self.latents = rows, torch.zeros(0, dtype=call.dtype, device=device)
        self.scales = None
        if index == "none":
            self.keys = key.view(8, P, 1, 128)
            return
        if packed:
            self.keys = torch.zeros(8, P, 132, dtype=torch.uint8, device=device)
            values, scales = custom.index_cache_views(self.keys, index)
        else:
            dtype, kind = (
                (torch.int8, torch.float16) if index == "int8" else (torch.uint8, torch.float32)
            )
            self.keys = torch.zeros(8, P, 1, 128, dtype=dtype, device=device)
            self.scales = torch.zeros(8, P, 1, dtype=kind, device=device)
            values, scales = self.values()
        custom.npu_index_cache_write(key, values, scales, slots, kind=index)

    def values(self) -> tuple[Tensor, Tensor | None]:
        if self.packed:
            return custom.index_cache_views(self.keys, self.index)
        dtype = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}.get(self.index, self.keys.dtype)
        return self.keys.view(dtype), self.scales

    def all(self) -> list[Tensor]:
        found = [*self.latents, self.keys, *([] if self.scales is None else [self.scales])]
        return [each.view(torch.uint8) for each in found]


def layer_arguments(call: Call, caches: Caches, mode: int, index_mode: int) -> dict:
    device = call.device
    both = call.mla() | call.indexer()
    skipped = ("query_norm", "kv_cache", "kr_cache", "index_k_cache", "weight_quant_mode")
    given = {NAMES.get(n, n): x for n, x in both.items() if n not in skipped}
    return given | dict(
        kv_cache=caches.latents[0],
        kr_cache=caches.latents[1],
        index_k_cache=caches.keys,
        index_k_scale_cache=caches.scales,
        block_table=torch.tensor(TABLE, dtype=torch.int32, device=device),
        act_seqs=torch.tensor(LENGTHS, dtype=torch.int32, device=device),
        sparse_count=K,
        weight_quant_mode=mode,
        index_weight_quant_mode=index_mode,
        kv_kind=caches.kv,
        index_kind=caches.index,
        row_layout="nope_scale_rope",
    )
