# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The ops in plain PyTorch as one would write them, products in the tensors' own type: peers on a
GPU, eager and compiled.  They take what the bench's rows use and nothing else: every selected
position exists, nothing is masked but by the loss."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import Unpack

from ..dispatch.common.nz import from_nz
from ..dispatch.common.rope import rotate
from ..dispatch.ops.indexer.indexer_loss import Arguments as IndexerLoss
from ..dispatch.ops.indexer.indexer_loss_backward import Arguments as IndexerLossBackward
from ..dispatch.ops.prolog.indexer_prolog_pto import Arguments as IndexerProlog
from ..dispatch.ops.prolog.mla_prolog_pto import Arguments as MlaProlog
from .case import Arguments

Peers = dict[str, Callable[[Arguments], Callable[[], Any] | None]]
_ROWS = 64  # query tokens at a time: what is gathered for them, or their scores, stay near 1 GB


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False)


def peers(function: Callable[..., Any], compiled: bool = True) -> Peers:
    """`function` and, where its loops are short, its compiled form; the CPU has the reference,
    which is PyTorch too."""

    def prepare(get: Callable[[], Callable[..., Any]], arguments: Arguments) -> partial[Any] | None:
        tensors = [value for value in arguments.values() if isinstance(value, Tensor)]
        if tensors[0].device.type == "cpu":
            return None
        return partial(get(), **dense(arguments))

    found: Peers = {"torch": partial(prepare, lambda: function)}
    if compiled:
        found["torch.compile"] = partial(prepare, lambda: _compiled(function))
    return found


def dense(arguments: Arguments) -> Arguments:
    """The same with row-major weights: torch's products know no tiles."""
    tiled = {
        n: x for n, x in arguments.items() if n.startswith("weight_") and getattr(x, "ndim", 0) == 4
    }
    return arguments | {name: from_nz(weight) for name, weight in tiled.items()}


def sparse_attention(
    query: Tensor,
    key: Tensor,
    sparse_indices: Tensor,
    scale_value: float,
    query_rope: Tensor,
    key_rope: Tensor,
    block_table: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """[B, S, N, R]; the latent is key and value."""
    batch, length, heads, rank = query.shape
    position = sparse_indices.view(batch, -1).long()
    if block_table is not None:
        page = key.shape[1]
        position = block_table.gather(1, position // page) * page + position % page
    slots = position.view(batch * length, -1)
    latent, rope = key.view(-1, rank), key_rope.view(-1, key_rope.shape[-1])
    out = []
    for some, q, q_rope in zip(
        slots.split(_ROWS),
        query.flatten(0, 1).split(_ROWS),
        query_rope.flatten(0, 1).split(_ROWS),
        strict=True,
    ):
        chosen = latent[some]
        logits = (q @ chosen.mT + q_rope @ rope[some].mT).float() * scale_value
        out.append(logits.softmax(-1).to(q.dtype) @ chosen)
    return torch.cat(out).view(batch, length, heads, rank)


def dense_latents(
    query: Tensor,
    key: Tensor,
    query_rope: Tensor,
    key_rope: Tensor,
    block_table: Tensor,
    softmax_scale: float,
    **_: Any,
) -> Tensor:
    """[B, S, N, R] of requests that fill their tables, a token each; a request at a time."""
    out = []
    for q, q_rope, pages in zip(query, query_rope, block_table.long(), strict=True):
        latent, rope = key[pages].flatten(0, 2), key_rope[pages].flatten(0, 2)
        logits = (q @ latent.mT + q_rope @ rope.mT).float() * softmax_scale
        out.append(logits.softmax(-1).to(q.dtype) @ latent)
    return torch.stack(out)


def lightning_indexer(
    query: Tensor, key: Tensor, weights: Tensor, block_table: Tensor, sparse_count: int, **_: Any
) -> tuple[Tensor, Tensor]:
    """(values, positions) [B, S, K], the highest first."""
    keys = key[block_table.long()].flatten(1, 3)  # [B, T, D]
    parts = [
        (_relu_weighted(q, keys, w)).topk(sparse_count)
        for q, w in zip(query.split(_ROWS, 1), weights.split(_ROWS, 1), strict=True)
    ]
    return torch.cat([p.values for p in parts], 1), torch.cat([p.indices for p in parts], 1)


def _relu_weighted(query: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    """Scores [B, S, T]."""
    scores = (query.flatten(1, 2) @ keys.mT).relu().unflatten(1, query.shape[1:3])
    weighted: Tensor = scores * weights[..., None]
    return weighted.sum(2, dtype=torch.float32)


def mla_prolog(**x: Unpack[MlaProlog]) -> tuple[Tensor, Tensor, Tensor]:
    """(query [B, S, N, R], query_rope, query_norm)."""
    token_x, weight_uk, rmsnorm_gamma_cq = x["token_x"], x["weight_uk"], x["rmsnorm_gamma_cq"]
    rmsnorm_gamma_ckv, rope_sin, rope_cos = x["rmsnorm_gamma_ckv"], x["rope_sin"], x["rope_cos"]
    heads, plain, rank = weight_uk.shape
    weight_dq, norm = x["weight_dq"], token_x.new_empty(0)
    if weight_dq is not None and rmsnorm_gamma_cq is not None:
        norm = F.rms_norm(token_x @ weight_dq, rmsnorm_gamma_cq.shape, rmsnorm_gamma_cq, 1e-6)
    c = token_x if weight_dq is None else norm
    q = (c @ x["weight_uq_qr"]).unflatten(-1, (heads, -1))
    query = torch.einsum("bsnd,ndr->bsnr", q[..., :plain], weight_uk)
    query_rope = rotate(q[..., plain:], rope_sin[:, :, None], rope_cos[:, :, None], True)
    latent = token_x @ x["weight_dkv_kr"]
    key = F.rms_norm(latent[..., :rank], rmsnorm_gamma_ckv.shape, rmsnorm_gamma_ckv, 1e-6)
    slots = x["cache_index"].flatten().long()
    x["kv_cache"].view(-1, rank)[slots] = key.flatten(0, 1)
    key_rope = rotate(latent[..., rank:], rope_sin, rope_cos, True)
    x["kr_cache"].view(-1, key_rope.shape[-1])[slots] = key_rope.flatten(0, 1)
    return query, query_rope, norm


def indexer_prolog(**a: Unpack[IndexerProlog]) -> tuple[Tensor, Tensor]:
    """(query [B, S, N, D], weights [B, S, N])."""
    token_x, ln_gamma_k, rope_sin = a["token_x"], a["ln_gamma_k"], a["rope_sin"]
    rope_cos, interleaved = a["rope_cos"], a.get("rope_interleaved", False)
    size, rotary = ln_gamma_k.shape[0], rope_sin.shape[-1]

    def turn(x: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
        return torch.cat([rotate(x[..., :rotary], sin, cos, interleaved), x[..., rotary:]], -1)

    query = (a["query_norm"] @ a["weight_qb"]).unflatten(-1, (-1, size))
    key = F.layer_norm(token_x @ a["weight_k"], [size], ln_gamma_k, a["ln_beta_k"], 1e-6)
    a["index_k_cache"].view(-1, size)[a["cache_index"].flatten().long()] = turn(
        key, rope_sin, rope_cos
    ).flatten(0, 1)
    query = turn(query, rope_sin[:, :, None], rope_cos[:, :, None])
    return query, token_x @ a["weight_proj"]


def loss(**x: Unpack[IndexerLoss]) -> tuple[Tensor, Tensor]:
    """The loss as one would write it: products in bfloat16, the rest in float32.  Every row has a
    valid slot."""
    key, indices, softmax_lse = x["key"], x["indices"], x.get("softmax_lse")
    eps = x.get("eps", 1e-10)
    ok = _valid(indices, key.shape[1], x["chunk_offset"])
    request = torch.arange(key.shape[0], device=key.device)[:, None, None]
    chosen = key[request, indices.clamp(0, key.shape[1] - 1)]  # [B, S, K, D]
    logits = (x["query"].transpose(1, 2) @ chosen.mT).float() * x["scaling"]  # [B, S, N, K]
    logits = logits.masked_fill(~ok[:, :, None], -torch.inf)
    if softmax_lse is None:
        p = logits.softmax(-1)
    else:
        p = torch.exp(logits - softmax_lse.transpose(1, 2)[..., None])
    target = p.sum(2)
    pi = target / target.sum(-1, keepdim=True)
    r = x["index_score"].masked_fill(~ok, -torch.inf).softmax(-1)
    terms = (pi + eps) * (torch.log(pi + eps) - torch.log(r + eps))
    return terms.masked_fill(~ok, 0).sum(-1), target


def loss_backward(**x: Unpack[IndexerLossBackward]) -> Tensor:
    ok = _valid(x["indices"], x["key_length"], x["chunk_offset"])
    pi = x["target"].masked_fill(~ok, 0)
    pi = pi / pi.sum(-1, keepdim=True)
    r = x["index_score"].masked_fill(~ok, -torch.inf).softmax(-1)
    return (x["grad_loss"][..., None] * (r - pi)).masked_fill(~ok, 0)


def _valid(indices: Tensor, key_length: int, chunk_offset: int) -> Tensor:
    row = torch.arange(indices.shape[1], device=indices.device)[:, None]
    return (indices >= 0) & (indices <= chunk_offset + row) & (indices < key_length)
