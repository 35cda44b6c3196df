# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Dense attention over paged latents, a request at a time.

z = scale ([query, query_rope] . [key, key_rope])   m = max z   l = sum exp(z - m)
out = sum exp(z - m) key / (l + exp(sink - m))      lse = m + log l
"""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import Unpack

from ...common import layout, paged
from ...ops.attention.fused_infer_attention_score_v2 import (
    Arguments,
    is_packed,
    pages_of,
    shapes,
    with_heads,
)
from ..common import selection
from ..common.precision import accumulator


def forward(**x: Unpack[Arguments]) -> tuple[Tensor, Tensor]:
    heads, given, mode = x["num_query_heads"], x["input_layout"], x["sparse_mode"]
    query, key = with_heads(x["query"], given, heads), pages_of(x["key"])
    q, wide = query, accumulator(query)
    if x["query_rope"] is not None:
        q = torch.cat([query, with_heads(x["query_rope"], given, heads)], dim=-1)
    packed, lengths = is_packed(given), x["actual_seq_qlen"]
    if packed and lengths is not None and len(lengths):
        lengths = lengths.cummax(0).values  # a request begins where all before it have ended
    keys = layout.keys_of(key, "PA_BSND", x["actual_seq_kvlen"], x["block_table"])
    rows = layout.rows_of(query, "TND" if packed else "BSND", lengths, keys, mode and 3)
    first = torch.zeros_like(rows.limit)
    if mode == 4:
        first = (rows.limit - 1 - x["pre_tokens"]).clamp(min=0)

    q = q.flatten(0, -3)
    out = q.new_zeros([*q.shape[:-1], query.shape[-1]])
    lse = q.new_full(q.shape[:-1], -torch.inf, dtype=wide)
    for request in range(len(keys.length)):
        seeing = torch.nonzero((rows.request == request) & (rows.limit > 0)).flatten()
        if not len(seeing):
            continue
        begin, end = int(first[seeing].min()), int(rows.limit[seeing].max())
        position = torch.arange(begin, end, device=key.device)
        slot = keys.slots(key, seeing.new_full([1], request), position[None])[0]
        v = k = paged.gather(key, slot, wide)
        if x["key_rope"] is not None:
            k = torch.cat([k, paged.gather(pages_of(x["key_rope"]), slot, wide)], dim=-1)
        for tokens in seeing.split(max(1, selection.BLOCK // (heads * len(position)))):
            z = q[tokens].to(wide) @ k.mT * x["softmax_scale"]
            hidden = (position >= rows.limit[tokens, None]) | (position < first[tokens, None])
            z.masked_fill_((hidden | (slot < 0))[:, None], -torch.inf)
            seen, top, total = selection.attended(z, v, x["learnable_sink"])
            out[tokens], lse[tokens] = seen.to(out.dtype), top + total.log()
    shape, lse_shape = shapes(x["query"], given, heads)
    if given in ("TND_NTD", "BSND_NBSD"):
        out = out.transpose(0, 1).contiguous()
    if not x["return_softmax_lse"]:
        return out.view(shape), lse.new_empty([0])
    if not packed:
        lse = lse.view(query.shape[:-1]).transpose(1, 2).contiguous()
    return out.view(shape), lse.view(lse_shape)
