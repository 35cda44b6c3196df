# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What the inference ops compute, as plain PyTorch that torch.export can trace for any size.

The references of the same ops loop over blocks of requests and tokens to keep memory small; here
nothing depends on a size or a value, so that one graph serves every batch and length.  A reference
that is like that already needs nothing here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.scan import scan
from typing_extensions import Unpack

from ..dispatch import backends
from ..dispatch.common import gated_delta, layer, layout
from ..dispatch.op_spec import Spec
from ..dispatch.ops.attention.fused_attention import Arguments as FusedAttention
from ..dispatch.ops.delta_rule.chunk_gated_delta_rule import Arguments as ChunkGatedDeltaRule
from ..dispatch.ops.delta_rule.chunk_kda import Arguments as ChunkKda
from ..dispatch.ops.delta_rule.fused_sigmoid_gating_delta_rule_update import (
    Arguments as DeltaRuleUpdate,
)
from ..dispatch.ops.delta_rule.recurrent_gated_delta_rule import (
    Arguments as RecurrentGatedDeltaRule,
)
from ..dispatch.ops.indexer.indexer_loss import Arguments as IndexerLoss
from ..dispatch.ops.indexer.lightning_indexer import Arguments as LightningIndexer
from ..dispatch.ops.indexer.lightning_indexer import Selection
from ..dispatch.ops.indexer.quant_lightning_indexer import Arguments as QuantLightningIndexer
from ..dispatch.ops.sparse_attention.sparse_flash_attention import Arguments as SparseFlashAttention
from ..dispatch.reference.attention.fused_attention import finite
from ..dispatch.reference.caches import quantize_index_query
from ..dispatch.reference.common import delta_rules, selection
from ..dispatch.reference.common.precision import accumulator
from ..dispatch.reference.convolution import causal_conv1d_update
from ..dispatch.reference.delta_rule import chunk_kda as kda
from ..dispatch.reference.delta_rule import fused_sigmoid_gating_delta_rule_update as gating
from ..dispatch.reference.delta_rule import gated_rms_norm
from ..dispatch.reference.indexer import indexer_loss
from ..dispatch.reference.merging import merge_topk
from ..dispatch.reference.prolog import indexer_prolog_pto, mla_prolog_pto

_LAST = 2**62  # a position behind every key


@dataclass(frozen=True)
class Decomposition:
    """`function` takes all arguments of the op by name; `unsupported` says why it cannot."""

    function: Callable[..., Any]
    unsupported: Callable[..., str | None] = lambda **_: None

    def __call__(self, **arguments: Any) -> Any:
        return self.function(**arguments)


def _rows(cache: Tensor, slot: Tensor, dtype: torch.dtype) -> Tensor:
    """[..., D] of `cache` [pages, P, 1, D] at `slot` [...], 0 where absent: paged.gather, with one
    index, since ONNX divides by no size."""
    rows = cache.flatten(0, 2)[slot.clamp(min=0)].to(dtype)
    return rows.masked_fill((slot < 0)[..., None], 0)


def fused_attention(**x: Unpack[FusedAttention]) -> tuple[Tensor, Tensor]:
    q, k = x["q"], x["k"]
    wide = accumulator(q)
    heads, key_heads = q.shape[1], k.shape[1]
    # [B, Hk, H / Hk, N, D]
    grouped = q.to(wide).unflatten(1, (key_heads, heads // key_heads))
    scale = q.shape[-1] ** -0.5 if x["sm_scale"] is None else x["sm_scale"]
    scores = grouped * scale @ k.to(wide)[:, :, None].mT
    position = torch.arange(q.shape[2], device=q.device)[:, None] + k.shape[2] - q.shape[2]
    key = torch.arange(k.shape[2], device=q.device)[None]
    seen = torch.ones_like(key >= position)
    if x["causal"]:
        seen = seen & (key <= position)
    if x["window"] is not None:
        seen = seen & ((position - key).abs() < x["window"])
    scores = scores.masked_fill(~seen, -torch.inf)
    top = finite(scores.amax(-1))
    p = torch.exp(scores - top[..., None])
    total = p.sum(-1)
    o = p @ x["v"].to(wide)[:, :, None] / total.masked_fill(total == 0, 1.0)[..., None]
    lse = top + torch.log(total)
    return o.flatten(1, 2).to(q.dtype), lse.flatten(1, 2)


def lightning_indexer(**x: Unpack[LightningIndexer]) -> tuple[Tensor, Tensor]:
    query = x["query"]
    indices, value = lightning_indexer_scores(**x)
    return indices, value.to(query.dtype) if x["return_value"] else query.new_empty([0])


def lightning_indexer_scores(**x: Unpack[LightningIndexer]) -> tuple[Tensor, Tensor]:
    return _selected(x, x["query"], x["weights"], None)


def _selected(
    x: Selection, query: Tensor, weights: Tensor, key_scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    key, block_table, sparse_count = x["key"], x["block_table"], x["sparse_count"]
    cmp_ratio = x["cmp_ratio"]
    wide = accumulator(query)
    keys = layout.keys_of(key, x["layout_key"], x["actual_seq_lengths_key"], block_table, cmp_ratio)
    rows = layout.rows_of(
        query, x["layout_query"], x["actual_seq_lengths_query"], keys, x["sparse_mode"], cmp_ratio
    )
    batch, length = query.shape[:2]
    reach = key.shape[1] if block_table is None else block_table.shape[1] * key.shape[1]
    position = torch.arange(reach, device=query.device)
    request = torch.arange(batch, device=query.device)
    slots = keys.slots(key, request, position[None].expand(batch, reach))
    every = _rows(key, slots, wide)
    each = torch.relu(query.to(wide) @ every[:, None].mT)
    score = (weights.to(wide)[:, :, None] @ each)[:, :, 0]
    if key_scale is not None:
        score = score * _rows(key_scale[..., None], slots, wide).mT
    limit = rows.limit.view(batch, length, 1)
    visible = (position < limit) & (slots >= 0)[:, None]

    lowest = torch.finfo(wide).min
    rank = score.masked_fill(score.isnan() | (score == -torch.inf), lowest)
    rank = rank.masked_fill(~visible, -torch.inf)
    # as many columns as are asked for, however few keys there are
    rank = torch.nn.functional.pad(rank, (0, sparse_count), value=-torch.inf)
    best, column = rank.topk(sparse_count)
    picked = column.masked_fill(best == -torch.inf, _LAST).sort(-1).values
    absent = picked == _LAST
    indices = picked.masked_fill(absent, -1).to(torch.int32)[:, :, None]
    # onnx's ReferenceEvaluator gathers along a dimension counted from the front only
    value = torch.nn.functional.pad(score, (0, 1)).gather(2, picked.masked_fill(absent, 0))
    value = value.masked_fill(absent, 0)[:, :, None]
    if not x["select_tail"]:
        return indices, value
    seen = layout.rows_of(
        query, x["layout_query"], x["actual_seq_lengths_query"], keys, x["sparse_mode"]
    )
    open_ = layout.open_entries(seen.limit, cmp_ratio).view(indices.shape[:-1])
    return layout.with_tail(indices, value, open_)


def quant_lightning_indexer_scores(**x: Unpack[QuantLightningIndexer]) -> tuple[Tensor, Tensor]:
    weights = x["weights"].float()
    if x["query_dequant_scale"] is not None:
        weights = weights * x["query_dequant_scale"].float()
    return _selected(x, x["query"].float(), weights, x["key_dequant_scale"])


def quant_lightning_indexer(**x: Unpack[QuantLightningIndexer]) -> Tensor:
    return quant_lightning_indexer_scores(**x)[0]


def sparse_flash_attention(**x: Unpack[SparseFlashAttention]) -> tuple[Tensor, Tensor, Tensor]:
    query, key = x["query"], x["key"]
    wide = accumulator(query)
    keys = layout.keys_of(key, x["layout_kv"], x["actual_seq_lengths_kv"], x["block_table"])
    rows = layout.rows_of(
        query, x["layout_query"], x["actual_seq_lengths_query"], keys, x["sparse_mode"]
    )
    inside = torch.arange(x["sparse_block_size"], device=query.device)
    position = x["sparse_indices"].flatten(0, 2).long()[..., None] * x["sparse_block_size"] + inside
    position = position.flatten(1)
    slot = keys.slots(key, rows.request, position)
    slot = slot.masked_fill(position >= rows.limit[:, None], -1)
    k = _rows(key, slot, wide)
    v = k if x["value"] is None else _rows(x["value"], slot, wide)
    q = query
    if x["query_rope"] is not None and x["key_rope"] is not None:
        q = torch.cat([query, x["query_rope"]], dim=-1)
        k = torch.cat([k, _rows(x["key_rope"], slot, wide)], dim=-1)
    z = selection.logits(q.flatten(0, 1), k, x["scale_value"], slot)
    top = z.amax(-1)
    shift = finite(top)
    p = torch.exp(z - shift[..., None])
    total = p.sum(-1)
    below = total if x["sinks"] is None else total + torch.exp(x["sinks"] - shift)
    out = p @ v / below.masked_fill(below == 0, 1.0)[..., None]
    out = out.view(query.shape).to(query.dtype)
    if not x["return_softmax_lse"]:
        return out, top.new_empty([0]), top.new_empty([0])
    batch, length, heads, _size = query.shape
    return out, top.view(batch, 1, length, heads), total.view(batch, 1, length, heads)


def _stages() -> layer.Stages:
    """Nodes of their own."""
    ops = torch.ops.custom
    return layer.Stages(
        ops.npu_mla_prolog_pto,
        ops.npu_indexer_prolog_pto,
        ops.npu_lightning_indexer,
        ops.npu_sparse_flash_attention,
        ops.npu_quant_lightning_indexer,
        ops.npu_kv_quant_sparse_flash_attention,
    )


def sparse_attention_indices_pto(**arguments: Any) -> tuple[Tensor, Tensor]:
    return layer.Whole(**arguments).run(_stages())


def sparse_attention_pto(**arguments: Any) -> Tensor:
    return sparse_attention_indices_pto(**arguments)[0]


def sparse_attention_shared_pto(**arguments: Any) -> Tensor:
    return layer.Shared(**arguments).run(_stages())


def loss_of_indexer(**x: Unpack[IndexerLoss]) -> tuple[Tensor, Tensor]:
    query, key, eps = x["query"], x["key"], x["eps"]
    kind = (
        torch.float64 if torch.float64 in (query.dtype, x["index_score"].dtype) else torch.float32
    )
    usable = indexer_loss.valid(x["indices"], key.shape[1], x["chunk_offset"])
    at = x["indices"].long().masked_fill(~usable, 0)
    request = torch.arange(key.shape[0], device=key.device)[:, None, None]

    def products(query: Tensor, key: Tensor) -> Tensor:
        """[B, S, H, K]"""
        return query.transpose(1, 2).to(kind) @ key[request, at].to(kind).mT

    logits = products(query, key)
    if x["query_rope"] is not None and x["key_rope"] is not None:
        logits = logits + products(x["query_rope"], x["key_rope"])
    logits = (logits * x["scaling"]).masked_fill(~usable[:, :, None], -torch.inf)
    if x["softmax_lse"] is None:
        lse = logits.logsumexp(-1, keepdim=True)
    else:
        lse = x["softmax_lse"].mT[..., None].to(kind)
    target = torch.exp(logits - finite(lse)).masked_fill(~usable[:, :, None], 0.0).sum(2)
    pi = indexer_loss.normalised(target)
    r = indexer_loss.softmax(x["index_score"].to(kind), usable)
    terms = (pi + eps) * (torch.log(pi + eps) - torch.log(r + eps))
    return terms.masked_fill(~usable, 0.0).sum(-1), target


def _recurrence(
    state: Tensor,
    starts: Tensor,
    lengths: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    every: bool = False,
) -> tuple[Tensor, Tensor]:
    """(the states after the last tokens, the outputs [T, HV, V]) of N sequences of packed tokens;
    with `every`, the states after every token.

    state [N, HV, K, V]   q, k [T, HV, K]   v [T, HV, V]   decay [T, HV, K or 1]   beta [T, HV]
    """
    tokens = torch.arange(q.shape[0], device=q.device)
    # one symbol for N, as the loop wants it
    sequences = torch.arange(state.shape[0], device=q.device)
    starts, lengths = starts[sequences], lengths[sequences]
    # step t takes the t-th token of every sequence that has one
    token = starts + tokens[:, None]
    on = tokens[:, None] < lengths
    at = token.clamp(max=q.shape[0] - 1)

    def step(state: Tensor, now: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        on, *inputs = now
        after, out = delta_rules.step(state, *inputs)
        # beside each other, as one output
        made = torch.cat([after, out[..., None, :]], -2) if every else out
        return torch.where(on[:, None, None, None], after, state), made

    last, out = scan(step, state, (on, q[at], k[at], v[at], decay[at], beta[at]))
    # token -> (its step, its sequence)
    sequence = (starts + lengths <= tokens[:, None]).sum(-1)
    inside = sequence < state.shape[0]
    sequence = sequence.clamp(max=state.shape[0] - 1)
    mine = out[tokens - starts[sequence], sequence]
    if every:
        last, mine = mine[..., :-1, :], mine[..., -1, :]
    return last, mine.masked_fill(~inside[:, None, None], 0)


def chunk_gated_delta_rule(**a: Unpack[ChunkGatedDeltaRule]) -> tuple[Tensor, Tensor]:
    key, value, initial_state = a["key"], a["value"], a["initial_state"]
    wide = accumulator(a["query"])
    tokens, heads, key_size = key.shape
    value_heads, value_size = value.shape[1:]
    if a["actual_seq_lengths"] is None:
        lengths = torch.full([1], tokens, device=key.device)
    else:
        lengths = a["actual_seq_lengths"].long()
    if initial_state is None:
        shape = [lengths.shape[0], value_heads, value_size, key_size]
        initial_state = torch.zeros(shape, dtype=wide, device=key.device)
    q, k = (x.to(wide).repeat_interleave(value_heads // heads, 1) for x in (a["query"], key))
    ones = torch.ones([tokens, value_heads], dtype=wide, device=key.device)
    last, out = _recurrence(
        initial_state.to(wide).mT,
        lengths.cumsum(0) - lengths,
        lengths,
        q * (key_size**-0.5 if a["scale"] is None else a["scale"]),
        k,
        value.to(wide),
        (ones if a["g"] is None else a["g"].to(wide).exp())[..., None],
        ones
        if a["beta"] is None
        else delta_rules.rate(
            a["beta"].to(wide), a["use_beta_sigmoid_in_kernel"], a["allow_neg_eigval"]
        ),
    )
    return out.to(value.dtype), last.mT.to(initial_state.dtype)


def recurrent_gated_delta_rule(**a: Unpack[RecurrentGatedDeltaRule]) -> Tensor:
    key, value, state = a["key"], a["value"], a["state"]
    wide = accumulator(a["query"])
    tokens, heads, key_size = key.shape
    value_heads = value.shape[1]
    if a["actual_seq_lengths"] is None:
        lengths = torch.full([1], tokens, device=key.device)
    else:
        lengths = a["actual_seq_lengths"].long()
    starts = lengths.cumsum(0) - lengths
    kept = (
        torch.ones_like(lengths)
        if a["num_accepted_tokens"] is None
        else a["num_accepted_tokens"].long()
    )
    assert a["ssm_state_indices"] is not None  # the check said so
    slots, pool = a["ssm_state_indices"].long(), state.shape[0]
    first = starts + torch.minimum(kept, lengths).clamp(min=1) - 1
    slot = slots[first.clamp(max=tokens - 1)]
    live = (slot >= 0) & (slot < pool)
    initial = state[slot.masked_fill(~live, 0)].to(wide)
    initial = initial.masked_fill(~live[:, None, None, None], 0)
    q, k = (x.to(wide).repeat_interleave(value_heads // heads, 1) for x in (a["query"], key))
    ones = torch.ones([tokens, value_heads], dtype=wide, device=key.device)
    decay = gated_delta.log_decay(a["g"], a["gk"])
    decay = ones[..., None] if decay is None else delta_rules.by_channel(decay).to(wide).exp()
    after, out = _recurrence(
        initial.mT,
        starts,
        lengths,
        q * (key_size**-0.5 if a["scale"] is None else a["scale"]),
        k,
        value.to(wide),
        decay,
        ones if a["beta"] is None else a["beta"].to(wide),
        every=True,
    )
    token = torch.arange(tokens, device=key.device)
    stored = (slots >= 0) & (slots < pool) & (token < lengths.sum())
    state[slots[stored]] = after[stored].mT.to(state.dtype)
    return out.to(value.dtype)


def chunk_kda(**a: Unpack[ChunkKda]) -> tuple[Tensor, Tensor]:
    q, v, initial_state, cu_seqlens = a["q"], a["v"], a["initial_state"], a["cu_seqlens"]
    wide = accumulator(q)
    batch, length, heads, key_size = a["k"].shape
    value_heads, value_size = v.shape[2:]
    queries, keys = (x.to(wide).flatten(0, 1) for x in (q, a["k"]))
    if a["use_qk_l2norm_in_kernel"]:
        queries, keys = (kda.normal(x)[0] for x in (queries, keys))
    decay = a["g"].to(wide)
    if a["use_gate_in_kernel"]:
        decay = kda.gate(decay, a["A_log"], a["dt_bias"], a["lower_bound"])[0]
    if cu_seqlens is None:
        starts = torch.arange(batch, device=q.device) * length
        lengths = torch.full_like(starts, length)
    else:
        starts, lengths = cu_seqlens[:-1].long(), cu_seqlens.diff().long()
    beta = delta_rules.rate(
        a["beta"].to(wide), a["use_beta_sigmoid_in_kernel"], a["allow_neg_eigval"]
    )
    turn = a["state_layout"] == "vk"
    if initial_state is None:
        shape = [starts.shape[0], value_heads, key_size, value_size]
        state = torch.zeros(shape, dtype=wide, device=q.device)
    else:
        state = initial_state.to(wide).mT if turn else initial_state.to(wide)
    queries, keys = (x.repeat_interleave(value_heads // heads, 1) for x in (queries, keys))
    last, out = _recurrence(
        state,
        starts,
        lengths,
        queries * (key_size**-0.5 if a["scale"] is None else a["scale"]),
        keys,
        v.to(wide).flatten(0, 1),
        decay.flatten(0, 1).exp(),
        beta.flatten(0, 1),
    )
    last = last.mT if turn else last
    kind = wide if initial_state is None else initial_state.dtype
    return out.view(v.shape).to(v.dtype), last.to(kind)


def delta_rule_update(**given: Unpack[DeltaRuleUpdate]) -> Tensor:
    q, v, initial_state_source = given["q"], given["v"], given["initial_state_source"]
    cu_seqlens = given["cu_seqlens"]
    wide = accumulator(q)
    batch, length, heads, key_size = given["k"].shape
    value_heads = v.shape[2]
    channels = key_size if given["is_kda"] else 1
    queries, keys = (x.to(wide).flatten(0, 1) for x in (q, given["k"]))
    if given["use_qk_l2norm_in_kernel"]:
        queries, keys = (
            x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (queries, keys)
        )
    queries = queries * (key_size**-0.5 if given["scale"] is None else given["scale"])
    queries, keys = (x.repeat_interleave(value_heads // heads, 1) for x in (queries, keys))
    x = given["a"].to(wide).reshape(batch * length, value_heads, channels)
    x = x + given["dt_bias"].to(wide).view(value_heads, channels)
    decay = gating.decay(
        given["A_log"], x, given["softplus_beta"], given["softplus_threshold"], given["lower_bound"]
    )
    b = given["b"].to(wide).reshape(batch * length, value_heads)
    beta = delta_rules.rate(b, True, given["allow_neg_eigval"])

    if cu_seqlens is None:
        starts = torch.arange(batch, device=q.device) * length
        lengths = torch.full_like(starts, length)
    else:
        starts, lengths = cu_seqlens[:-1].long(), cu_seqlens.diff().long()
    slots = given["initial_state_indices"].long()
    live = (slots >= 0) & (slots < initial_state_source.shape[0])
    initial = initial_state_source[slots.masked_fill(~live, 0)].to(wide)
    initial = initial.masked_fill(~live[:, None, None, None], 0)
    state = initial if given["state_layout"] == "kv" else initial.mT
    last, out = _recurrence(
        state, starts, lengths, queries, keys, v.to(wide).flatten(0, 1), decay, beta
    )
    if not given["disable_state_update"]:
        stored = live & (lengths > 0)
        after = last if given["state_layout"] == "kv" else last.mT
        initial_state_source[slots[stored]] = after[stored].to(initial_state_source.dtype)
    return out.view(v.shape).to(v.dtype)


def merge_of_topk(values: Tensor, positions: Tensor, k: int) -> tuple[Tensor, Tensor]:
    # ONNX's TopK takes the first of equal ones, which torch's need not
    return merge_topk.merged(values, positions, k, lambda score, k: score.topk(k).indices)


def gated_delta_layer_decode(**x: Any) -> Tensor:
    mixed = causal_conv1d_update.forward(**gated_delta.convolution(x))
    out = delta_rule_update(**gated_delta.delta_rule(x, mixed))
    return gated_rms_norm.forward(**gated_delta.norm(x, out))


def _refuse_float8_and_varlen(v: Tensor, cu_seqlens_q: Tensor | None, **_: Any) -> str | None:
    if v.dtype.itemsize == 1:
        return "`v` is float8, which has no ONNX form. Convert `v` to the dtype of `q`."
    if cu_seqlens_q is not None:
        return "`cu_seqlens_q` is given, which has no ONNX form. Pass dense [B, H, N, D] tensors."
    return None


def _refuse_tnd(layout_query: str, **_: Any) -> str | None:
    if layout_query == "TND":
        return '`layout_query` is "TND", expected "BSND": packed queries have no ONNX form.'
    return None


def _refuse_all_but_int8(query: Tensor, layout_query: str, **_: Any) -> str | None:
    if query.dtype is not torch.int8:
        return f"`query` is {query.dtype}, expected int8: fp8 has no ONNX form."
    return _refuse_tnd(layout_query)


def _refuse_fp8(kind: str, **_: Any) -> str | None:
    if kind != "int8":
        return f"`kind` is {kind!r}, expected 'int8': fp8 has no ONNX form."
    return None


_MODES = (
    "weight_quant_mode",
    "kv_cache_quant_mode",
    "index_weight_quant_mode",
    "kv_kind",
    "index_kind",
)


def _refuse_8_bits(**arguments: Any) -> str | None:
    for name in _MODES:
        came = arguments.get(name, 0)
        if came not in (0, "none"):
            plain = repr("none") if isinstance(came, str) else 0
            return f"`{name}` is {came!r}, expected {plain}: 8 bits have no ONNX form here."
    return None


def _refuse_verification(
    intermediate_states: Tensor | None, retrieve_parent_token: Tensor | None, **_: Any
) -> str | None:
    for name, value in (
        ("intermediate_states", intermediate_states),
        ("retrieve_parent_token", retrieve_parent_token),
    ):
        if value is not None:
            return f"`{name}` is given, which has no ONNX form. Leave it out."
    return None


# of an op that has a node and is not here: its reference, which is traced
DECOMPOSITIONS: dict[str, Decomposition] = {
    "npu_sparse_attention_pto": Decomposition(sparse_attention_pto, _refuse_8_bits),
    "npu_sparse_attention_indices_pto": Decomposition(sparse_attention_indices_pto, _refuse_8_bits),
    "npu_sparse_attention_shared_pto": Decomposition(sparse_attention_shared_pto, _refuse_8_bits),
    "npu_mla_prolog_pto": Decomposition(mla_prolog_pto.forward, _refuse_8_bits),
    "npu_indexer_prolog_pto": Decomposition(indexer_prolog_pto.forward, _refuse_8_bits),
    "npu_lightning_indexer": Decomposition(lightning_indexer, _refuse_tnd),
    "npu_lightning_indexer_scores": Decomposition(lightning_indexer_scores, _refuse_tnd),
    "npu_sparse_flash_attention": Decomposition(sparse_flash_attention, _refuse_tnd),
    "npu_quant_lightning_indexer": Decomposition(quant_lightning_indexer, _refuse_all_but_int8),
    "npu_quant_lightning_indexer_scores": Decomposition(
        quant_lightning_indexer_scores, _refuse_all_but_int8
    ),
    "npu_quantize_index_query": Decomposition(quantize_index_query.forward, _refuse_fp8),
    "npu_indexer_loss": Decomposition(loss_of_indexer),
    "npu_fused_attention": Decomposition(fused_attention, _refuse_float8_and_varlen),
    "npu_fused_sigmoid_gating_delta_rule_update": Decomposition(
        delta_rule_update, _refuse_verification
    ),
    "npu_chunk_gated_delta_rule": Decomposition(chunk_gated_delta_rule),
    "npu_merge_topk": Decomposition(merge_of_topk),
    "npu_chunk_kda": Decomposition(chunk_kda),
    "npu_gated_delta_layer_decode": Decomposition(gated_delta_layer_decode, _refuse_verification),
    "npu_recurrent_gated_delta_rule": Decomposition(recurrent_gated_delta_rule),
}


def decomposition(spec: Spec) -> Decomposition | None:
    """None: the op has no node."""
    found = DECOMPOSITIONS.get(spec.name)
    if found is None and spec.onnx is not None:
        reference = backends.launcher(backends.REFERENCE, spec)
        assert reference is not None  # every op has one
        found = Decomposition(reference.function)
    return found


# why an op that is not for training has none
_NOTHING = "it returns nothing, and a node has an output of its own"
_BYTES = "its rows are bytes, which ONNX does not read as floats"
_STATES = "windows close where positions say, and ONNX has no form of that here"
REASONS: dict[str, str] = {
    "npu_index_cache_write": _NOTHING,
    "npu_fused_causal_conv1d_v2": _NOTHING,
    "npu_mla_prolog_v3": "npu_mla_prolog_pto has one",
    "npu_lightning_indexer_prolog_pto": "int8 weights have none here",
    "npu_latent_cache_write": _BYTES,
    "npu_kv_quant_sparse_flash_attention": _BYTES,
    "npu_kv_quant_sparse_flash_attention_lse": _BYTES,
    "npu_compressor": _STATES,
    "npu_compressor_dense": _STATES,
}
