# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""A drawn layer whose weights are of 8 bits, and the arguments of its ops."""

from __future__ import annotations

import torch
from custom.dispatch.common import quantized as layouts
from torch import Tensor

from . import quantization
from .golden import Layer
from .kernels import INTERPRETED
from .prologs import FORMS
from .samples import IN_LAYER

MLA, INDEXER = "npu_mla_prolog_pto", "npu_indexer_prolog_pto"
KINDS = {1: "int8", 2: "int8", 4: "fp8"}
# W_x of the golden layer: its argument, the argument of its scale, the modes in which it has one
WEIGHTS = {
    MLA: {
        "w_dq": ("weight_dq", "dequant_scale_w_dq", (2, 4)),
        "w_uq_qr": ("weight_uq_qr", "dequant_scale_w_uq_qr", (1, 2, 4)),
        "w_dkv_kr": ("weight_dkv_kr", "dequant_scale_w_dkv_kr", (2, 4)),
    },
    INDEXER: {
        "w_idx_qb": ("weight_qb", "dequant_scale_w_qb", (1, 2, 4)),
        "w_idx_k": ("weight_k", "dequant_scale_w_k", (2, 4)),
        "w_idx_proj": ("weight_proj", None, ()),
    },
}
# what is never quantized
WHOLE = {
    MLA: ("weight_uk", "rmsnorm_gamma_cq", "rmsnorm_gamma_ckv"),
    INDEXER: ("ln_gamma_k", "ln_beta_k"),
}
SIZES = dict(H=288, Rq=160, N=2, Dn=16, R=512, Dr=64, Ni=16, Di=128)
B, S, P = 2, 3, 16


def half(device) -> torch.dtype:
    """The interpreter's bfloat16 product is wrong."""
    return torch.float16 if INTERPRETED and device.type == "cpu" else torch.bfloat16


class Call:
    """A drawn layer and tokens, weights quantized as `mode` says, and the two calls."""

    def __init__(
        self, device, mode: int, form: str = "4-D NZ", dtype=None, index_mode=None, **sizes
    ) -> None:
        self.device, self.mode, self.dtype = device, mode, dtype or half(device)
        of_op = {MLA: mode, INDEXER: mode if index_mode is None else index_mode}
        drawn = Layer.draw(**(SIZES | sizes)).to(self.dtype).to(torch.float64)
        self.given: dict[str, dict[str, Tensor]] = {MLA: {}, INDEXER: {}}
        stands = {}
        shape, self.weight_format = FORMS[form]
        for op, table in WEIGHTS.items():
            for name, (argument, of_scale, modes) in table.items():
                w, values = getattr(drawn, name), getattr(drawn, name).to(self.dtype)
                if of_op[op] in modes:
                    values, scale = quantization.weight(w, KINDS[of_op[op]])
                    stands[name] = quantization.dequantized(values, scale)
                    self.given[op][of_scale] = scale.to(device)
                self.given[op][argument] = shape(values).to(device)
        # the weights that are multiplied, in float64
        self.layer = Layer(**vars(drawn) | stands)
        draw = torch.Generator().manual_seed(3)
        h, rq, dr = (({**SIZES, **sizes})[name] for name in ("H", "Rq", "Dr"))
        new = lambda *shape: torch.randn(*shape, generator=draw).to(self.dtype)  # noqa: E731
        self.x, self.sin, self.cos = new(B, S, h), new(B, S, dr), new(B, S, dr)
        self.norm = new(B, S, rq)
        self.slots = torch.tensor([[5, 40, -1], [17, 3, 64]], dtype=torch.int32)

    def to(self, x: Tensor) -> Tensor:
        return x.to(self.device, self.dtype)

    def common(self, op: str) -> dict:
        return dict(
            token_x=self.to(self.x),
            rope_sin=self.to(self.sin),
            rope_cos=self.to(self.cos),
            cache_index=self.slots.to(self.device),
            weight_format=self.weight_format,
            weight_quant_mode=self.mode,
            **{name: self.to(getattr(self.layer, IN_LAYER[name])) for name in WHOLE[op]},
            **self.given[op],
        )

    def cache(self, size: int) -> Tensor:
        return torch.zeros(4, P, 1, size, dtype=self.dtype, device=self.device)

    def mla(self, **change) -> dict:
        sizes = dict(kv_cache=self.layer.w_uk.shape[2], kr_cache=self.sin.shape[-1])
        caches = {name: self.cache(size) for name, size in sizes.items()}
        return self.common(MLA) | caches | change

    def indexer(self, **change) -> dict:
        own = dict(
            query_norm=self.to(self.norm), index_k_cache=self.cache(len(self.layer.in_gamma_k))
        )
        return self.common(INDEXER) | own | change

    def rows(self, kind: str, uint8: bool = False) -> dict:
        """An empty cache of rows, and the words for it."""
        dtype = torch.uint8 if uint8 else layouts.VALUES[kind]
        number = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}[kind] if uint8 else None
        width = layouts.row_bytes(self.sin.shape[-1])
        return dict(
            kv_cache=torch.zeros(4, P, 1, width, dtype=dtype, device=self.device),
            kr_cache=torch.zeros(0, dtype=self.dtype, device=self.device),
            kv_cache_quant_mode=3,
            ckvkr_repo_mode=1,
            quant_scale_repo_mode=1,
            kv_cache_dtype=number,
        )

    def at(self, cache: Tensor) -> Tensor:
        """The rows of the tokens that have a slot [n, D]."""
        slots = self.slots.flatten()
        there = slots[(slots >= 0) & (slots < 4 * P)].long()
        return cache.cpu().flatten(0, 2)[there]

    def written(self) -> Tensor:
        slots = self.slots.flatten()
        return (slots >= 0) & (slots < 4 * P)
