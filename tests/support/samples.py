# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Small valid arguments for every op, for the tests that are generated from the specs."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

import custom

Arguments = dict[str, Any]
# hidden, query rank, heads, plain head dim, latent rank, rope dim, index heads, index dim, page
H, RQ, N, DN, R, DR, NI, DI, P = 64, 32, 2, 16, 32, 16, 16, 32, 16


class Maker:
    """Draws tensors on the CPU from one seed, then moves them: every device sees the same bits."""

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int = 1) -> None:
        self.device, self.dtype = device, dtype
        self.random = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        drawn = torch.randn(*shape, generator=self.random, dtype=torch.float64, device="cpu") / 4
        return drawn.to(dtype or self.dtype).to(self.device)

    def nz(self, rows: int, columns: int) -> Tensor:
        return custom.to_nz(self.normal(rows, columns))

    def ints(self, *values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def shuffled(self, *shape: int, high: int) -> Tensor:
        """Distinct positions below `high` along the last dimension."""
        out = torch.empty(shape, dtype=torch.int32, device="cpu")
        for row in out.view(-1, shape[-1]) if out.numel() else ():
            row.copy_(torch.randperm(high, generator=self.random, device="cpu")[: shape[-1]])
        return out.to(self.device)


def _prolog_caches(m: Maker) -> tuple[Tensor, Tensor, Tensor]:
    return m.normal(8, P, 1, R), m.normal(8, P, 1, DR), m.normal(8, P, 1, DI)


def _sparse_attention_pto(m: Maker, B: int = 2, S: int = 2) -> Arguments:
    kv_cache, kr_cache, index_k_cache = _prolog_caches(m)
    return dict(
        x=m.normal(B, S, H),
        w_dq=m.nz(H, RQ),
        w_uq_qr=m.nz(RQ, N * (DN + DR)),
        w_uk=m.normal(N, DN, R),
        w_dkv_kr=m.nz(H, R + DR),
        gamma_cq=m.normal(RQ),
        gamma_ckv=m.normal(R),
        sin=m.normal(B, S, DR),
        cos=m.normal(B, S, DR),
        cache_index=m.ints(
            *[3 * 16 + 4 + i + max(40, S) * b for b in range(B) for i in range(S)]
        ).view(B, S),
        kv_cache=kv_cache,
        kr_cache=kr_cache,
        block_table=m.ints(*[[3, 1, -1], [7, 2, 5]][:B]).view(B, 3),
        act_seqs=m.ints(*[20, 45][:B]),
        w_idx_qb=m.nz(RQ, NI * DI),
        w_idx_k=m.nz(H, DI),
        w_idx_proj=m.nz(H, NI),
        in_gamma_k=m.normal(DI),
        in_beta_k=m.normal(DI),
        index_k_cache=index_k_cache,
        sparse_count=16,
    )


def _sparse_attention_shared_pto(m: Maker, B: int = 2, S: int = 2) -> Arguments:
    layer = _sparse_attention_pto(m, B, S)
    del layer["sparse_count"], layer["index_k_cache"]
    kept = {n: v for n, v in layer.items() if not n.startswith(("w_idx", "in_"))}
    return kept | dict(sparse_indices=m.shuffled(B, S, 1, 16, high=48))


# what a prolog calls the arguments of a layer, where the names differ
IN_LAYER = dict(
    token_x="x",
    weight_dq="w_dq",
    weight_uq_qr="w_uq_qr",
    weight_uk="w_uk",
    weight_dkv_kr="w_dkv_kr",
    rmsnorm_gamma_cq="gamma_cq",
    rmsnorm_gamma_ckv="gamma_ckv",
    rope_sin="sin",
    rope_cos="cos",
    weight_qb="w_idx_qb",
    weight_k="w_idx_k",
    weight_proj="w_idx_proj",
    ln_gamma_k="in_gamma_k",
    ln_beta_k="in_beta_k",
)


def _prolog(op: str, layer: Arguments) -> Arguments:
    """Its arguments without a default, out of a layer's."""
    given = getattr(torch.ops.custom, op).default._schema.arguments
    names = [x.name for x in given if not x.has_default_value()]
    return {name: layer[IN_LAYER.get(name, name)] for name in names}


def _mla_prolog_pto(m: Maker, B: int = 2, S: int = 2) -> Arguments:
    return _prolog("npu_mla_prolog_pto", _sparse_attention_pto(m, B, S))


def _mla_prolog_v3(m: Maker, B: int = 2, S: int = 2) -> Arguments:
    given = _mla_prolog_pto(m, B, S)
    names = "weight_dq", "weight_uq_qr", "weight_dkv_kr"
    given |= {name: custom.from_nz(given[name]) for name in names}
    return given | dict(query_norm_flag=True)


def _sharedkv_prolog_pto(
    m: Maker, B: int = 2, S: int = 2, n: int = N, d: int = R, dr: int = DR, di: int = DI
) -> Arguments:
    return dict(
        token_x=m.normal(B, S, H),
        w_dq=m.nz(H, RQ),
        w_uq=m.nz(RQ, n * d),
        w_kv=m.nz(H, d),
        gamma_cq=m.normal(RQ),
        gamma_kv=m.normal(d),
        rope_sin=m.normal(B, S, dr),
        rope_cos=m.normal(B, S, dr),
        ori_kv=m.normal(8, P, 1, d),
        ori_block_table=m.ints(*[[3, 1, -1], [7, 2, 5]][:B]).view(B, 3),
        act_seqs=m.ints(*[20, 45][:B]),
        seqused=m.ints(*[S, min(S, 1)][:B]),
        w_idx_qb=m.nz(RQ, NI * di),
        w_idx_proj=m.nz(H, NI),
    )


def _grouped_o_proj_pto(
    m: Maker, B: int = 2, S: int = 2, n: int = 2, d: int = R, dr: int = DR, groups: int = 2
) -> Arguments:
    return dict(
        attn_out=m.normal(B, S, n * groups, d),
        w_o_a=custom.to_nz(m.normal(groups, n * d, 16)),
        w_o_b=m.nz(groups * 16, H),
        rope_sin=m.normal(B, S, dr),
        rope_cos=m.normal(B, S, dr),
    )


def _sparse_attention_v4_pto(m: Maker, B: int = 2, S: int = 3) -> Arguments:
    """With entries of 2 tokens, of windows that overlap, and an indexer."""
    prolog = _sharedkv_prolog_pto(m, B, S)
    renamed = dict(token_x="x", rope_sin="sin", rope_cos="cos")
    output, wide = _grouped_o_proj_pto(m, B, S), _wide(m)
    layer = {renamed.get(n, n): x for n, x in prolog.items()}
    entries = -(-S // 2)
    return layer | dict(
        w_uq=m.nz(RQ, 4 * R),
        sinks=m.normal(4, dtype=wide),
        cmp_ratio=2,
        w_cmp_kv=m.normal(2 * R, H),
        w_cmp_gate=m.normal(2 * R, H),
        cmp_ape=m.normal(2, 2 * R, dtype=wide),
        gamma_cmp=m.normal(R, dtype=wide),
        cmp_sin=m.normal(B, entries, DR),
        cmp_cos=m.normal(B, entries, DR),
        cmp_state=m.normal(6, 3, 4 * R, dtype=wide),
        state_block_table=m.ints(*[[3, 1], [5, 2]][:B]).view(B, 2),
        cmp_kv=m.normal(5, P, 1, R),
        cmp_block_table=m.ints(*[[2, -1], [0, 3]][:B]).view(B, 2),
        w_idx_kv=m.normal(2 * DI, H),
        w_idx_gate=m.normal(2 * DI, H),
        idx_ape=m.normal(2, 2 * DI, dtype=wide),
        gamma_idx=m.normal(DI, dtype=wide),
        idx_state=m.normal(6, 3, 4 * DI, dtype=wide),
        idx_k=m.normal(5, P, 1, DI),
        sparse_count=8,
        w_o_a=output["w_o_a"],
        w_o_b=output["w_o_b"],
        ori_win_left=7,
    )


def _wide(m: Maker) -> torch.dtype:
    """Of parameters that are float32 beside half precision."""
    return torch.float64 if m.dtype is torch.float64 else torch.float32


def _hc_pre(m: Maker, B: int = 2, S: int = 2, h: int = H) -> Arguments:
    shapes = dict(hc_fn=(24, 4 * h), hc_scale=(3,), hc_base=(24,), norm_weight=(h,))
    wide = {name: m.normal(*shape, dtype=_wide(m)) for name, shape in shapes.items()}
    return dict(x=m.normal(B, S, 4, h), **wide)


def _hc_pre_grad(m: Maker, B: int = 2, S: int = 2, h: int = H) -> Arguments:
    return _hc_pre(m, B, S, h) | dict(
        d_y=m.normal(B, S, h),
        d_post=m.normal(B, S, 4, dtype=_wide(m)),
        d_comb=m.normal(B, S, 4, 4, dtype=_wide(m)),
    )


def _hc_post(m: Maker, B: int = 2, S: int = 2, h: int = H) -> Arguments:
    return dict(
        x=m.normal(B, S, h),
        residual=m.normal(B, S, 4, h),
        post=m.normal(B, S, 4, dtype=_wide(m)),
        comb=m.normal(B, S, 4, 4, dtype=_wide(m)),
    )


def _hc_post_grad(m: Maker, B: int = 2, S: int = 2, h: int = H) -> Arguments:
    return _hc_post(m, B, S, h) | dict(d_out=m.normal(B, S, 4, h))


def _hc_post_pre(m: Maker, B: int = 2, S: int = 2, h: int = H) -> Arguments:
    gates = _hc_pre(m, B, S, h)
    del gates["x"]
    return _hc_post(m, B, S, h) | gates


def _indexer_prolog_pto(m: Maker, B: int = 2, S: int = 2) -> Arguments:
    layer = _sparse_attention_pto(m, B, S)
    return _prolog("npu_indexer_prolog_pto", layer | dict(query_norm=m.normal(B, S, RQ)))


def _lightning_indexer_prolog_pto(m: Maker, B: int = 2, S: int = 2) -> Arguments:
    tokens, heads, size = B * S, 16, 128
    q_norm, scale = _eight(m, tokens, RQ)
    wq_b, by = _eight(m, heads * size, RQ)
    return dict(
        token_x=m.normal(tokens, H),
        q_norm=q_norm,
        q_norm_scale=scale,
        wq_b=custom.to_nz(wq_b.t()),
        wq_b_scale=by,
        wk=m.normal(H, size),
        weights_proj=m.normal(H, heads),
        ln_gamma_k=m.normal(size),
        ln_beta_k=m.normal(size),
        cos_idx_rope=m.normal(tokens, DR),
        sin_idx_rope=m.normal(tokens, DR),
        hadamard_q=m.normal(size, size),
        hadamard_k=m.normal(size, size),
        idx_k_cache=torch.zeros(4, P, 1, size, dtype=torch.int8, device=m.device),
        idx_k_scale_cache=m.normal(4, P, 1, dtype=torch.float16),
        idx_k_cache_index=m.ints(*[7 * i - 7 for i in range(tokens)]),
        layernorm_epsilon_k=1e-6,
    )


def _eight(m: Maker, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """int8 [rows, columns] and a scale [rows, 1]."""
    x = m.normal(rows, columns, dtype=torch.float32)
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale).round().to(torch.int8), scale


def _lightning_indexer(
    m: Maker, B: int = 2, S: int = 3, heads: int = 4, d: int = DI, keys: int = 21, count: int = 8
) -> Arguments:
    return dict(
        query=m.normal(B, S, heads, d),
        key=m.normal(B, keys, 1, d),
        weights=m.normal(B, S, heads),
        sparse_count=count,
        return_value=True,
    )


def _lightning_indexer_scores(m: Maker, B: int = 2, S: int = 3) -> Arguments:
    arguments = _lightning_indexer(m, B, S)
    del arguments["return_value"]
    return arguments


def _lightning_indexer_grad(m: Maker, B: int = 2, S: int = 3) -> Arguments:
    return dict(
        query=m.normal(B, S, 4, DI),
        key=m.normal(B, 21, 1, DI),
        dy=m.normal(B, S, 1, 8),
        sparse_indices=m.shuffled(B, S, 1, 8, high=21),
        weights=m.normal(B, S, 4),
    )


def _sparse_flash_attention(
    m: Maker,
    B: int = 2,
    S: int = 3,
    heads: int = 4,
    r: int = R,
    dr: int = DR,
    keys: int = 21,
    count: int = 8,
) -> Arguments:
    return dict(
        query=m.normal(B, S, heads, r),
        key=m.normal(B, keys, 1, r),
        value=None,
        sparse_indices=m.shuffled(B, S, 1, count, high=keys),
        scale_value=0.2,
        query_rope=m.normal(B, S, heads, dr),
        key_rope=m.normal(B, keys, 1, dr),
        return_softmax_lse=True,
    )


def _sparse_flash_attention_grad(m: Maker, B: int = 2, S: int = 3) -> Arguments:
    forward = _sparse_flash_attention(m, B, S)
    out, softmax_max, softmax_sum = custom.npu_sparse_flash_attention(**forward)
    del forward["return_softmax_lse"]
    return forward | dict(
        d_out=m.normal(*out.shape),
        out=out,
        softmax_max=softmax_max,
        softmax_sum=softmax_sum,
        sparse_block_size=1,
        d_softmax_sum=torch.ones_like(softmax_sum),
    )


def _narrow(dtype: torch.dtype) -> torch.dtype:
    """Of what lies in a cache in 16 bits, or stands beside one of 8 bits."""
    return dtype if dtype.itemsize == 2 else torch.bfloat16


def _kv_quant_sparse_flash_attention(m: Maker, B: int = 2, S: int = 3) -> Arguments:
    rows = torch.zeros(B, 32, 1, 656, dtype=torch.int8, device=m.device)
    custom.npu_latent_cache_write(
        m.normal(B * 32, 512),
        m.normal(B * 32, 64, dtype=_narrow(m.dtype)),
        rows,
        torch.arange(B * 32, device=m.device),
        kind="int8",
        row_layout="nope_rope_scale",
    )
    return dict(
        query=m.normal(B, S, 4, 576),
        key=rows,
        value=rows,
        sparse_indices=m.shuffled(B, S, 1, 8, high=32),
        scale_value=0.2,
        key_quant_mode=2,
        value_quant_mode=2,
        attention_mode=2,
    )


def _sparse_attn_sharedkv(m: Maker, B: int = 2, S: int = 3) -> Arguments:
    wide = torch.float64 if m.dtype is torch.float64 else torch.float32
    return dict(
        q=m.normal(B, S, 4, R),
        ori_kv=m.normal(B, 21, 1, R),
        cmp_kv=m.normal(B, 6, 1, R),
        cmp_sparse_indices=m.shuffled(B, S, 1, 4, high=6),
        seqused_kv=m.ints(*[21, 17, 19][:B]),
        sinks=m.normal(4, dtype=wide),
        cmp_ratio=4,
        ori_win_left=7,
        layout_kv="BSND",
        return_softmax_lse=True,
    )


def _sparse_attn_sharedkv_grad(m: Maker, B: int = 2, S: int = 3) -> Arguments:
    forward = _sparse_attn_sharedkv(m, B, S)
    out, lse = custom.npu_sparse_attn_sharedkv(**forward)
    del forward["return_softmax_lse"]
    return forward | dict(
        d_out=m.normal(*out.shape), out=out, softmax_lse=lse, d_softmax_lse=torch.ones_like(lse)
    )


def _kv_quant_sparse_attn_sharedkv(m: Maker, B: int = 2, S: int = 3) -> Arguments:
    rows, entries = (
        torch.zeros(max(B, 1), step, dtype=torch.uint8, device=m.device)[:, : page * 584].view(
            -1, page, 1, 584
        )
        for page, step in ((32, 19008), (8, 5184))
    )
    for cache in (rows, entries):
        count = cache.shape[:2].numel()
        custom.npu_latent_cache_write(
            m.normal(count, 448),
            m.normal(count, 64, dtype=torch.bfloat16),
            cache,
            torch.arange(count, device=m.device),
            kind="fp8",
            row_layout="v4",
        )
    table = m.ints(*range(B)).view(B, 1)
    return dict(
        q=m.normal(B, S, 4, 512),
        kv_quant_mode=1,
        ori_kv=rows,
        cmp_kv=entries,
        cmp_sparse_indices=m.shuffled(B, S, 1, 4, high=6),
        ori_block_table=table,
        cmp_block_table=table,
        seqused_kv=m.ints(*[21, 17, 19][:B]),
        sinks=m.normal(4, dtype=torch.float64 if m.dtype is torch.float64 else torch.float32),
        cmp_ratio=4,
        ori_win_left=7,
        return_softmax_lse=True,
    )


def _quant_lightning_indexer(m: Maker, B: int = 2, S: int = 3) -> Arguments:
    weights = torch.float32 if m.dtype is torch.float64 else m.dtype
    q, weights, scale = custom.quantize_index_query(
        m.normal(B, S, 4, 128), m.normal(B, S, 4, dtype=weights), kind="int8", fold=False
    )
    keys, _, by = custom.quantize_index_query(
        m.normal(B, 21, 1, 128), m.normal(B, 21, 1), kind="int8", fold=False
    )
    return dict(
        query=q,
        key=keys,
        weights=weights,
        query_dequant_scale=scale,
        key_dequant_scale=by,
        query_quant_mode=0,
        key_quant_mode=0,
        sparse_count=8,
    )


def _hadamard(m: Maker, B: int = 2, S: int = 3) -> Arguments:
    return dict(x=m.normal(B, S, 128))


def _index_cache_write(m: Maker, B: int = 2, S: int = 3) -> Arguments:
    scales = m.normal(4, P, 1, dtype=torch.float16)
    return dict(
        k=m.normal(B * S, 128),
        values=torch.zeros(4, P, 1, 128, dtype=torch.int8, device=m.device),
        scales=scales,
        slots=m.ints(*[7 * i - 7 for i in range(B * S)]),
        kind="int8",
    )


def _latent_cache_write(m: Maker, B: int = 2, S: int = 3) -> Arguments:
    return dict(
        ckv=m.normal(B * S, 512),
        k_rope=m.normal(B * S, 64, dtype=_narrow(m.dtype)),
        rows=torch.zeros(4, P, 1, 656, dtype=torch.int8, device=m.device),
        slots=m.ints(*[7 * i - 7 for i in range(B * S)]),
        kind="int8",
        row_layout="nope_rope_scale",
    )


def _quantize_index_query(m: Maker, B: int = 2, S: int = 3) -> Arguments:
    return dict(q=m.normal(B, S, 4, 128), weights=m.normal(B, S, 4), kind="int8")


def _indexer_loss(
    m: Maker, B: int = 2, S: int = 5, heads: int = 4, d: int = DI, keys: int = 9, count: int = 6
) -> Arguments:
    return dict(
        query=m.normal(B, heads, S, d),
        key=m.normal(B, keys, d),
        index_score=m.normal(B, S, count),
        indices=m.shuffled(B, S, count, high=keys),
        scaling=0.25,
        chunk_offset=4,
    )


def _indexer_loss_backward(m: Maker, B: int = 2, S: int = 5) -> Arguments:
    return dict(
        grad_loss=m.normal(B, S, dtype=torch.float32),
        index_score=m.normal(B, S, 6),
        indices=m.shuffled(B, S, 6, high=9),
        target=m.normal(B, S, 6, dtype=torch.float32).abs(),
        key_length=9,
        chunk_offset=4,
    )


def _grad_kl_loss(m: Maker, B: int = 2, S: int = 5) -> Arguments:
    attention = _sparse_flash_attention(m, B, S, keys=9, count=6)
    _, softmax_max, softmax_sum = custom.npu_sparse_flash_attention(**attention)
    del attention["value"], attention["return_softmax_lse"]
    return attention | dict(
        query_index=m.normal(B, S, 4, DI),
        key_index=m.normal(B, 9, 1, DI),
        weights=m.normal(B, S, 4),
        softmax_max=softmax_max,
        softmax_sum=softmax_sum,
    )


def _fused_attention(m: Maker, B: int = 2, S: int = 7) -> Arguments:
    return dict(
        q=m.normal(B, 4, S, 32), k=m.normal(B, 2, 9, 32), v=m.normal(B, 2, 9, 16), causal=True
    )


def _fused_infer_attention_score_v2(m: Maker, B: int = 2, S: int = 3) -> Arguments:
    key = m.normal(8, P, 1, R)
    return dict(
        query=m.normal(B, S, 4, R),
        key=key,
        value=key,
        query_rope=m.normal(B, S, 4, DR),
        key_rope=m.normal(8, P, 1, DR),
        actual_seq_qlen=m.ints(*[S, S][:B]),
        actual_seq_kvlen=m.ints(*[20, 45][:B]),
        block_table=m.ints(*[[3, 1, -1], [7, 2, 5]][:B]).view(B, 3),
        num_query_heads=4,
        num_key_value_heads=1,
        softmax_scale=0.2,
        input_layout="BSND",
        sparse_mode=3,
        return_softmax_lse=True,
    )


def _fused_attention_backward(m: Maker, B: int = 2, S: int = 7) -> Arguments:
    return attention_backward(m, _fused_attention(m, B, S))


def attention_backward(m: Maker, forward: Arguments) -> Arguments:
    o, lse = torch.ops.custom.npu_fused_attention(**forward)
    return forward | dict(grad_o=m.normal(*o.shape), o=o, lse=lse)


def _of_rule(m: Maker, *tokens: int) -> Arguments:
    return dict(q=m.normal(*tokens, 2, 16), k=m.normal(*tokens, 2, 16), v=m.normal(*tokens, 4, 8))


def _decay(m: Maker, *heads: int) -> Arguments:
    shapes = dict(A_log=heads[:1], dt_bias=heads)
    return {name: m.normal(*shape, dtype=torch.float32) for name, shape in shapes.items()}


def _delta_rule_update(m: Maker, B: int = 2, S: int = 2) -> Arguments:
    return dict(
        a=m.normal(B, S, 4),
        **_decay(m, 4),
        softplus_beta=1.0,
        softplus_threshold=20.0,
        **_of_rule(m, B, S),
        b=m.normal(B, S, 4),
        initial_state_source=m.normal(5, 4, 16, 8, dtype=torch.float32),
        initial_state_indices=m.ints(*[3, -1][:B]),
        use_qk_l2norm_in_kernel=True,
    )


def _chunk_gated_delta_rule(
    m: Maker, B: int = 2, S: int = 70, heads: int = 2, dk: int = 16, dv: int = 8
) -> Arguments:
    lengths = [S, S // 2, 1][:B]
    T, values = sum(lengths), 2 * heads
    return dict(
        query=m.normal(T, heads, dk),
        key=torch.nn.functional.normalize(m.normal(T, heads, dk), dim=-1),
        value=m.normal(T, values, dv),
        beta=m.normal(T, values).sigmoid(),
        initial_state=m.normal(B, values, dv, dk, dtype=torch.float32),
        actual_seq_lengths=m.ints(*lengths),
        g=-m.normal(T, values, dtype=torch.float32).abs(),
    )


def _with_upstream(m: Maker, forward: Arguments, value: str) -> Arguments:
    """Gradients of a rule's outputs; the first is shaped as `value`."""
    state = forward["initial_state"]
    return forward | dict(
        d_out=m.normal(*forward[value].shape),
        d_final_state=m.normal(*state.shape, dtype=state.dtype),
    )


def _chunk_gated_delta_rule_grad(m: Maker, B: int = 2, S: int = 70) -> Arguments:
    return _with_upstream(m, _chunk_gated_delta_rule(m, B, S), "value")


def _causal_conv1d(m: Maker, B: int = 2, S: int = 7) -> Arguments:
    lengths = [S, S // 2][:B]
    return dict(
        x=m.normal(sum(lengths), DI),
        weight=m.normal(4, DI),
        bias=m.normal(DI),
        initial_states=m.normal(B, 3, DI),
        query_start_loc=m.ints(*accumulate(lengths, initial=0)),
        activation="silu",
    )


def _causal_conv1d_grad(m: Maker, B: int = 2, S: int = 7) -> Arguments:
    forward = _causal_conv1d(m, B, S)
    d_out = m.normal(*forward["x"].shape)
    return forward | dict(d_out=d_out, d_final_states=m.normal(B, 3, DI))


def _causal_conv1d_update(m: Maker, B: int = 2, S: int = 2) -> Arguments:
    return dict(
        x=m.normal(B, S, DI),
        conv_states=m.normal(5, max(S, 1) + 2, DI),
        weight=m.normal(4, DI),
        bias=m.normal(DI),
        activation="silu",
        conv_state_indices=m.ints(*[3, -1][:B]),
        num_accepted_tokens=m.ints(*[S, 1][:B]),
        intermediate_conv_window=m.normal(4, S, 3, DI),
        intermediate_state_indices=m.ints(*[2, 0][:B]),
    )


def _gated_rms_norm(m: Maker, B: int = 2, S: int = 3) -> Arguments:
    x, gate = m.normal(B, S, 2, DI), m.normal(B, S, 2, DI)
    return dict(x=x, gate=gate, weight=m.normal(DI), group_size=16)


def _gated_rms_norm_grad(m: Maker, B: int = 2, S: int = 3) -> Arguments:
    return _gated_rms_norm(m, B, S) | dict(d_out=m.normal(B, S, 2, DI))


def _merge_states(m: Maker, B: int = 2, S: int = 3) -> Arguments:
    statistics = m.normal(2, 3, B, S, 4, dtype=torch.float32)
    return dict(outs=m.normal(3, B, S, 4, R), lses=statistics[0], sums=statistics[1].abs() + 1)


def _merge_topk(m: Maker, B: int = 2, S: int = 3) -> Arguments:
    return dict(
        values=m.normal(3, B, S, 1, 6),
        positions=m.shuffled(B, S, 18, high=40).view(B, S, 3, 1, 6).movedim(2, 0),
        k=8,
    )


def _localize_indices(m: Maker, B: int = 2, S: int = 3) -> Arguments:
    return dict(indices=m.shuffled(B, S, 1, 16, high=48), rank=1, size=3, interleave=2)


def _chunk_kda(m: Maker, B: int = 2, S: int = 70) -> Arguments:
    bounds = [0, S, S + S // 2, S + S // 2 + 1][: B + 1]
    T = bounds[-1]
    return dict(
        **_of_rule(m, 1, T),
        g=m.normal(1, T, 4, 16),
        beta=m.normal(1, T, 4).sigmoid(),
        initial_state=m.normal(B, 4, 16, 8, dtype=torch.float32),
        cu_seqlens=m.ints(*bounds),
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        **_decay(m, 4, 16),
    )


def _chunk_kda_grad(m: Maker, B: int = 2, S: int = 70) -> Arguments:
    return _with_upstream(m, _chunk_kda(m, B, S), "v")


def _gated_delta_layer_decode(m: Maker, B: int = 2, S: int = 1) -> Arguments:
    return dict(
        mixed_qkv=m.normal(B, S, 2 * 2 * 16 + 4 * 8),
        z=m.normal(B, S, 4, 8),
        a=m.normal(B, S, 4),
        b=m.normal(B, S, 4),
        conv_states=m.normal(5, 3, 96),
        states=m.normal(5, 4, 16, 8, dtype=torch.float32),
        conv_weight=m.normal(4, 96),
        **_decay(m, 4),
        norm_weight=m.normal(8),
        state_indices=m.ints(*[3, -1][:B]),
        conv_bias=m.normal(96),
    )


def _recurrent_gated_delta_rule(m: Maker, B: int = 2, S: int = 2) -> Arguments:
    return dict(
        query=m.normal(B * S, 2, 16),
        key=torch.nn.functional.normalize(m.normal(B * S, 2, 16), dim=-1),
        value=m.normal(B * S, 4, 8),
        state=m.normal(B * S + 1, 4, 8, 16),
        beta=m.normal(B * S, 4).sigmoid(),
        scale=0.25,
        actual_seq_lengths=m.ints(*[S] * B),
        ssm_state_indices=m.ints(*range(1, B * S + 1)),
        num_accepted_tokens=m.ints(*[1, S][:B]),
        g=-m.normal(B * S, 4, dtype=torch.float32).abs(),
    )


def _fused_causal_conv1d(m: Maker, B: int = 2, S: int = 7) -> Arguments:
    lengths = [S, S // 2][:B]
    return dict(
        x=m.normal(sum(lengths), DI),
        weight=m.normal(3, DI),
        conv_states=m.normal(5, 4, DI),
        query_start_loc=m.ints(*accumulate(lengths, initial=0)),
        cache_indices=m.ints(*[3, 1][:B]),
        num_accepted_tokens=m.ints(*[3, 1][:B]),
        num_computed_tokens=m.ints(*[0, 9][:B]),
        residual_connection=1,
    )


def _compressor(m: Maker, B: int = 2, S: int = 5) -> Arguments:
    """Windows of 2 that overlap: in the middle of a request, and from its first token on."""
    wide = torch.float64 if m.dtype is torch.float64 else torch.float32
    entries = -(-S // 2)
    return dict(
        x=m.normal(B, S, H),
        wkv=m.normal(2 * DI, H),
        wgate=m.normal(2 * DI, H),
        state_cache=m.normal(6, 3, 4 * DI, dtype=wide),
        ape=m.normal(2, 2 * DI, dtype=wide),
        norm_weight=m.normal(DI, dtype=wide),
        rope_sin=m.normal(B, entries, DR),
        rope_cos=m.normal(B, entries, DR),
        rope_head_dim=DR,
        cmp_ratio=2,
        state_block_table=m.ints(*[[3, 1], [5, 2]][:B]).view(B, 2),
        seqused=m.ints(*[S, S - 1][:B]),
        start_pos=m.ints(*[9, 0][:B]),
        coff=2,
        rotary_mode=2,
        cache_mode=2,
        cmp_cache=m.normal(8, P, 1, DI),
        cmp_block_table=m.ints(*[[2, -1], [0, 3]][:B]).view(B, 2),
    )


def _compressor_dense(m: Maker, B: int = 2, S: int = 5) -> Arguments:
    caches = ("state_cache", "state_block_table", "start_pos", "cmp_cache", "cmp_block_table")
    return {n: x for n, x in _compressor(m, B, S).items() if n not in (*caches, "cache_mode")}


def _compressor_dense_grad(m: Maker, B: int = 2, S: int = 5) -> Arguments:
    return _compressor_dense(m, B, S) | dict(d_out=m.normal(B, -(-S // 2), DI))


def _sparse_attention_score(m: Maker, B: int = 2, S: int = 3) -> Arguments:
    """Blocks of 12 in pages of 16."""
    tokens = B * S
    index = m.shuffled(2, tokens, 3, high=4)
    index[..., 0] = 0
    return dict(
        query=m.normal(tokens, 4, R),
        key=m.normal(8, P, 2, R),
        value=m.normal(8, P, 2, R),
        select_idx=index,
        block_table=m.ints(*[[3, 1, -1], [7, 2, 5]][:B]).view(B, 3),
        select_num_idx=m.ints(*[3 - i % 3 for i in range(2 * tokens)]).view(2, tokens),
        actual_seq_lengths=m.ints(*[S] * B),
        actual_seq_lengths_kv=m.ints(*[20, 45][:B]),
        num_key_value_heads=2,
        scale_value=0.2,
        block_size=12,
        top_k=3,
        sinks=m.normal(4, dtype=_wide(m)),
        return_softmax_lse=True,
    )


def _block_indexer(m: Maker, B: int = 2, S: int = 3) -> Arguments:
    return dict(
        query=m.normal(B * S, 4, DI),
        key=m.normal(8, P, 1, DI),
        block_table=m.ints(*[[3, 1, -1], [7, 2, 5]][:B]).view(B, 3),
        actual_seq_lengths=m.ints(*[S] * B),
        actual_seq_lengths_key=m.ints(*[20, 45][:B]),
        block_size=4,
        top_k=3,
        return_value=True,
    )


SAMPLES: dict[str, Callable[..., Arguments]] = {
    "npu_sparse_attention_pto": _sparse_attention_pto,
    "npu_sparse_attention_indices_pto": _sparse_attention_pto,
    "npu_sparse_attention_shared_pto": _sparse_attention_shared_pto,
    "npu_mla_prolog_pto": _mla_prolog_pto,
    "npu_mla_prolog_v3": _mla_prolog_v3,
    "npu_indexer_prolog_pto": _indexer_prolog_pto,
    "npu_lightning_indexer_prolog_pto": _lightning_indexer_prolog_pto,
    "npu_lightning_indexer": _lightning_indexer,
    "npu_lightning_indexer_scores": _lightning_indexer_scores,
    "npu_block_indexer": _block_indexer,
    "npu_lightning_indexer_grad": _lightning_indexer_grad,
    "npu_sparse_attn_sharedkv": _sparse_attn_sharedkv,
    "npu_sparse_attn_sharedkv_grad": _sparse_attn_sharedkv_grad,
    "npu_kv_quant_sparse_attn_sharedkv": _kv_quant_sparse_attn_sharedkv,
    "npu_sparse_attention_score": _sparse_attention_score,
    "npu_sparse_flash_attention": _sparse_flash_attention,
    "npu_sparse_flash_attention_grad": _sparse_flash_attention_grad,
    "npu_kv_quant_sparse_flash_attention": _kv_quant_sparse_flash_attention,
    "npu_kv_quant_sparse_flash_attention_lse": _kv_quant_sparse_flash_attention,
    "npu_quant_lightning_indexer": _quant_lightning_indexer,
    "npu_quant_lightning_indexer_scores": _quant_lightning_indexer,
    "npu_hadamard": _hadamard,
    "npu_index_cache_write": _index_cache_write,
    "npu_latent_cache_write": _latent_cache_write,
    "npu_quantize_index_query": _quantize_index_query,
    "npu_indexer_loss": _indexer_loss,
    "npu_indexer_loss_backward": _indexer_loss_backward,
    "npu_sparse_lightning_indexer_grad_kl_loss": _grad_kl_loss,
    "npu_fused_attention": _fused_attention,
    "npu_fused_attention_backward": _fused_attention_backward,
    "npu_fused_infer_attention_score_v2": _fused_infer_attention_score_v2,
    "npu_fused_sigmoid_gating_delta_rule_update": _delta_rule_update,
    "npu_chunk_gated_delta_rule": _chunk_gated_delta_rule,
    "npu_chunk_gated_delta_rule_grad": _chunk_gated_delta_rule_grad,
    "npu_merge_states": _merge_states,
    "npu_merge_topk": _merge_topk,
    "npu_localize_indices": _localize_indices,
    "npu_chunk_kda": _chunk_kda,
    "npu_chunk_kda_grad": _chunk_kda_grad,
    "npu_causal_conv1d": _causal_conv1d,
    "npu_causal_conv1d_grad": _causal_conv1d_grad,
    "npu_causal_conv1d_update": _causal_conv1d_update,
    "npu_sharedkv_prolog_pto": _sharedkv_prolog_pto,
    "npu_grouped_o_proj_pto": _grouped_o_proj_pto,
    "npu_sparse_attention_v4_pto": _sparse_attention_v4_pto,
    "npu_hc_pre": _hc_pre,
    "npu_hc_pre_grad": _hc_pre_grad,
    "npu_hc_post": _hc_post,
    "npu_hc_post_grad": _hc_post_grad,
    "npu_hc_post_pre": _hc_post_pre,
    "npu_gated_rms_norm": _gated_rms_norm,
    "npu_gated_rms_norm_grad": _gated_rms_norm_grad,
    "npu_gated_delta_layer_decode": _gated_delta_layer_decode,
    "npu_recurrent_gated_delta_rule": _recurrent_gated_delta_rule,
    "npu_fused_causal_conv1d": _fused_causal_conv1d,
    "npu_fused_causal_conv1d_v2": _fused_causal_conv1d,
    "npu_compressor": _compressor,
    "npu_compressor_dense": _compressor_dense,
    "npu_compressor_dense_grad": _compressor_dense_grad,
}


def apart(x: Tensor, dim: int = 0) -> Tensor:
    """The same numbers; the last of `dim` begins more than 2**31 numbers behind the first."""
    step = -(-(2**31 + 16) // (16 * (x.shape[dim] - 1))) * 16
    strides = list(x.select(dim, 0).contiguous().stride())
    strides.insert(dim, step)
    reach = 1 + sum(s * (n - 1) for s, n in zip(strides, x.shape, strict=True))
    base = torch.empty(reach, dtype=x.dtype, device=x.device)
    return base.as_strided(x.shape, strides).copy_(x)


def sample(
    name: str, device: torch.device, dtype: torch.dtype, seed: int = 1, **sizes: int
) -> Arguments:
    """Valid arguments of op `name`, by keyword; `sizes` are B and S, of some ops others too."""
    return SAMPLES[name](Maker(device, dtype, seed), **sizes)
