# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The KL divergence of the indexer's distribution from the attention's, over the selected keys.

    p[h] = softmax_j(scaling query[h] . key[index_j])     target = sum_h p[h]
    pi = target / sum_j target     r = softmax_j(index_score)
    loss = sum_j (pi_j + eps) (log(pi_j + eps) - log(r_j + eps))

all over the valid slots j; a row that has none gets loss 0.
"""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import Unpack

from ...ops.indexer.indexer_loss import Arguments

# gathered key elements held at a time: 64 MiB in float32
_BLOCK = 1 << 24


def forward(**x: Unpack[Arguments]) -> tuple[Tensor, Tensor]:
    query, key, index_score, query_rope = x["query"], x["key"], x["index_score"], x["query_rope"]
    wide = torch.float64 in (query.dtype, index_score.dtype)
    kind = torch.float64 if wide else torch.float32
    batch, heads, length, _ = query.shape
    kept = index_score.shape[2]
    loss = query.new_zeros([batch, length], dtype=kind)
    target = query.new_zeros([batch, length, kept], dtype=kind)
    usable = valid(x["indices"], key.shape[1], x["chunk_offset"])
    sizes = query.shape[-1] + (0 if query_rope is None else query_rope.shape[-1])
    step = max(1, _BLOCK // max(1, kept * max(sizes, heads)))
    for b in range(batch if kept and key.shape[1] else 0):
        for start in range(0, length, step):
            rows = slice(start, start + step)
            at = x["indices"][b, rows].long().where(usable[b, rows], 0)
            logits = _logits(query[b, :, rows], key[b], at, kind)
            if query_rope is not None and x["key_rope"] is not None:
                logits += _logits(query_rope[b, :, rows], x["key_rope"][b], at, kind)
            ok = usable[b, rows, None]
            logits = (logits * x["scaling"]).masked_fill_(~ok, -torch.inf)
            if x["softmax_lse"] is None:
                lse = logits.logsumexp(-1, keepdim=True)
            else:
                lse = x["softmax_lse"][b, :, rows].mT[..., None].to(kind)
            p = torch.exp(logits - lse.masked_fill(lse == -torch.inf, 0.0))
            target[b, rows] = p.masked_fill_(~ok, 0.0).sum(1)
    return loss.copy_(divergence(target, index_score.to(kind), usable, x["eps"])), target


def divergence(target: Tensor, score: Tensor, usable: Tensor, eps: float) -> Tensor:
    """The loss of each row [B, S] of targets and scores [B, S, K]."""
    pi, r = normalised(target), softmax(score, usable)
    terms = (pi + eps) * (torch.log(pi + eps) - torch.log(r + eps))
    return terms.masked_fill_(~usable, 0.0).sum(-1)


def _logits(query: Tensor, key: Tensor, at: Tensor, kind: torch.dtype) -> Tensor:
    """[rows, N, K]: products of queries [N, rows, D] with the keys that each row selected."""
    return query.transpose(0, 1).to(kind) @ key[at].to(kind).mT


def valid(indices: Tensor, key_length: int, chunk_offset: int) -> Tensor:
    """Which slots [B, S, K] count."""
    position = torch.arange(indices.shape[1], device=indices.device)[:, None] + chunk_offset
    return (indices >= 0) & (indices <= position) & (indices < key_length)


def normalised(target: Tensor) -> Tensor:
    """target / sum target; 0 where there is nothing."""
    total = target.sum(-1, keepdim=True)
    return target / total.masked_fill(total == 0, 1.0)


def softmax(score: Tensor, usable: Tensor) -> Tensor:
    """Softmax over the usable slots; 0 elsewhere, and in rows whose scores are all -inf."""
    score = score.masked_fill(~usable, -torch.inf)
    lse = score.logsumexp(-1, keepdim=True)
    return torch.exp(score - lse.masked_fill(lse == -torch.inf, 0.0))
