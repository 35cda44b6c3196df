# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Both prologs and the whole layer: arguments of any size, launchers without dispatch."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

import custom

from .kernels import DEVICE
from .stages import called

P = 16
MLA = "x w_dq w_uq_qr w_uk w_dkv_kr gamma_cq gamma_ckv sin cos kv_cache kr_cache cache_index"
INDEX = "x query_norm w_idx_qb w_idx_k w_idx_proj in_gamma_k in_beta_k sin cos index_k_cache"
# without a query latent: what stands for one is the layer's input
PLAIN = {"x": "query_norm", "w_dq": None, "gamma_cq": None, "w_dkv_kr": "plain_dkv_kr"}
SHARED = f"{MLA} block_table act_seqs"
CACHES = ("kv_cache", "kr_cache", "index_k_cache")
WEIGHTS = ("w_dq", "w_uq_qr", "plain_dkv_kr", "w_dkv_kr", "w_idx_qb", "w_idx_k", "w_idx_proj")


def layer(b, s, *, h=64, ranks=48, n=3, plain=32, rank=64, rotary=16, index=(16, 32), pages=None):
    """Arguments of the whole layer in float64, on the CPU; request i has its own pages."""
    index_heads, size = index
    pages = pages or -(-(s + 40) // P)

    def normal(*shape, std=1.0):
        return torch.randn(*shape, dtype=torch.float64) * std

    angle = torch.rand(b, s, rotary // 2, dtype=torch.float64) * 6.28
    table = torch.randperm(b * pages).view(b, pages).to(torch.int32)
    seen = torch.randint(s, pages * P + 1, (b,), dtype=torch.int32)
    position = (seen[:, None] - s + torch.arange(s)).long()
    slot = table.gather(1, position // P) * P + position % P if b else position
    return dict(
        x=normal(b, s, h),
        w_dq=normal(h, ranks, std=h**-0.5),
        w_uq_qr=normal(ranks, n * (plain + rotary), std=ranks**-0.5),
        w_uk=normal(n, plain, rank, std=plain**-0.5),
        w_dkv_kr=normal(h, rank + rotary, std=h**-0.5),
        plain_dkv_kr=normal(ranks, rank + rotary, std=ranks**-0.5),
        gamma_cq=normal(ranks),
        gamma_ckv=normal(rank),
        sin=angle.sin().repeat(1, 1, 2),
        cos=angle.cos().repeat(1, 1, 2),
        cache_index=slot.to(torch.int32),
        kv_cache=normal(b * pages, P, 1, rank),
        kr_cache=normal(b * pages, P, 1, rotary),
        block_table=table,
        act_seqs=seen,
        w_idx_qb=normal(ranks, index_heads * size, std=ranks**-0.5),
        w_idx_k=normal(h, size, std=h**-0.5),
        w_idx_proj=normal(h, index_heads, std=h**-0.5),
        in_gamma_k=normal(size),
        in_beta_k=normal(size),
        index_k_cache=normal(b * pages, P, 1, size),
        query_norm=normal(b, s, ranks),
    )


def formatted(arguments, dtype, weight_format, device=DEVICE):
    """On `device` in `dtype`, the weights 4-D NZ, NZ bytes under [K, N] ("flat"), row-major ("nd")
    or [N, K] ("linear")."""
    out = {}
    for name, value in arguments.items():
        value = value.to(dtype) if value.is_floating_point() else value.clone()
        if name in WEIGHTS and weight_format == "linear":
            value = value.t().contiguous()
        elif name in WEIGHTS and weight_format != "nd":
            value = custom.to_nz(value, flat=weight_format == "flat")
        out[name] = value.to(device)
    return out


def launch(backend: str, op: str, given: dict, weight_format="nz", **options) -> tuple[Tensor, ...]:
    """Outputs of one op, and the caches behind them; "mla_prolog_plain" has no query latent."""
    module = f"{op.removesuffix('_plain')}_pto"
    package = {"cuda": "cuda_ops", "reference": "dispatch.reference"}[backend]
    forward = partial(called, package, module)
    options["weight_format"] = weight_format if weight_format in ("nd", "linear") else "nz"
    if op.startswith("mla_prolog"):
        defaults = dict(rmsnorm_epsilon_cq=1e-6, rmsnorm_epsilon_ckv=1e-5, rope_interleaved=True)
        names = [PLAIN.get(x, x) if op == "mla_prolog_plain" else x for x in MLA.split()]
        taken = [None if name is None else given[name] for name in names]
        out = forward(*taken, **defaults | options)
        return *out, given["kv_cache"], given["kr_cache"]
    if op == "indexer_prolog":
        names = [*INDEX.split(), "cache_index"]
        defaults = dict(ln_epsilon=1e-6, rope_interleaved=False)
        out = forward(*[given[name] for name in names], **defaults | options)
        return *out, given["index_k_cache"]
    defaults = dict(
        softmax_scale=None,
        rms_norm_eps=1e-6,
        layer_norm_eps=1e-5,
        # as many as there are keys: a near-tie at the edge of a selection is nobody's mistake
        sparse_count=given["block_table"].shape[-1] * P,
        rope_interleaved=True,
        index_rope_interleaved=False,
    )
    every = {
        name: value for name, value in given.items() if name not in ("query_norm", "plain_dkv_kr")
    }
    if op == "sparse_attention_shared":
        for name in ("layer_norm_eps", "sparse_count", "index_rope_interleaved"):
            del defaults[name]
        # all that there are, and some beyond the end of the request
        reach = given["block_table"].shape[-1] * P
        each = torch.arange(reach, dtype=torch.int32, device=given["x"].device)
        b, s = given["x"].shape[:2]
        every = {name: every[name] for name in SHARED.split()}
        every["sparse_indices"] = each.expand(b, s, 1, reach).contiguous()
        out = forward(**every, **defaults | options)
        return out, given["kv_cache"], given["kr_cache"]
    out = forward(**every, **defaults | options)
    outputs = (out,) if op == "sparse_attention" else out
    return *outputs, *[given[name] for name in CACHES]


OPS = (
    "mla_prolog",
    "mla_prolog_plain",
    "indexer_prolog",
    "sparse_attention",
    "sparse_attention_indices",
    "sparse_attention_shared",
)
