# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The whole attention of a DeepSeek-V4 layer."""

from __future__ import annotations

from torch import Tensor

from ._op import op


@op
def npu_sparse_attention_v4_pto(
    x: Tensor,
    w_dq: Tensor,
    w_uq: Tensor,
    w_kv: Tensor,
    gamma_cq: Tensor,
    gamma_kv: Tensor,
    sinks: Tensor | None,
    sin: Tensor,
    cos: Tensor,
    ori_kv: Tensor,
    ori_block_table: Tensor,
    act_seqs: Tensor,
    *,
    seqused: Tensor | None = None,
    cmp_ratio: int = 0,
    w_cmp_kv: Tensor | None = None,
    w_cmp_gate: Tensor | None = None,
    cmp_ape: Tensor | None = None,
    gamma_cmp: Tensor | None = None,
    cmp_sin: Tensor | None = None,
    cmp_cos: Tensor | None = None,
    cmp_state: Tensor | None = None,
    state_block_table: Tensor | None = None,
    cmp_kv: Tensor | None = None,
    cmp_block_table: Tensor | None = None,
    w_idx_qb: Tensor | None = None,
    w_idx_proj: Tensor | None = None,
    w_idx_kv: Tensor | None = None,
    w_idx_gate: Tensor | None = None,
    idx_ape: Tensor | None = None,
    gamma_idx: Tensor | None = None,
    idx_state: Tensor | None = None,
    idx_k: Tensor | None = None,
    idx_k_scale: Tensor | None = None,
    sparse_count: int = 512,
    w_o_a: Tensor | None = None,
    w_o_b: Tensor | None = None,
    softmax_scale: float | None = None,
    rms_norm_eps: float = 1e-6,
    ori_win_left: int = 127,
    state_mode: int = 2,
    weight_format: str = "nz",
    kv_kind: str = "none",
    index_kind: str = "none",
    index_hadamard: bool = False,
    hadamard_round: str = "bf16",
    weight_quant_mode: int = 0,
    dequant_scale_w_dq: Tensor | None = None,
    dequant_scale_w_uq: Tensor | None = None,
    dequant_scale_w_kv: Tensor | None = None,
    dequant_scale_w_idx_qb: Tensor | None = None,
    dequant_scale_w_o_a: Tensor | None = None,
    dequant_scale_w_o_b: Tensor | None = None,
) -> Tensor:
    """The attention of a DeepSeek-V4 layer in one call, from hidden states to hidden states.

    `npu_sharedkv_prolog_pto`, `npu_compressor` (for the entries, and for the index keys),
    `npu_lightning_indexer`, `npu_sparse_attn_sharedkv` and `npu_grouped_o_proj_pto`, bit for bit,
    or their twins of 8 bits. What is given says what kind of layer it is:

    * no entries: sliding, every token sees its window;
    * `cmp_ratio` and the ten arguments from `w_cmp_kv` to `cmp_block_table`: HCA, it sees every
      closed entry too;
    * also the eight from `w_idx_qb` to `idx_k`: CSA, it sees the `sparse_count` best of them.

    Token j of request i stands at position act_seqs[i] - seqused[i] + j. Where that is below 0, or
    j from seqused[i] on, the output is 0 and nothing is written, whatever `x` holds; sines and
    cosines are finite there too. To take tokens back, start the next call earlier.

    Caches with different tables may have their pages from one pool, where page i of the one is
    page i of the other: the caller's tables keep them apart.

    Formula: DeepSeek-V4's attention (DeepSeek-AI, 2026). Every intermediate is rounded to the dtype
    of `x`, but for the compressors' states, which stay in float32.

    Args:
        x: [B, S, H] hidden states behind the layer's norm.
        w_dq: [H, Rq] query down-projection, NZ in 4-D or as `weight_format` says; so are `w_uq`,
            `w_kv`, `w_idx_qb`, `w_idx_proj`, `w_o_a` and `w_o_b`.
        w_uq: [Rq, N*D] query up-projection.
        w_kv: [H, D] projection of the window rows, which are keys and values.
        gamma_cq: [Rq] RMSNorm weight of the query latent.
        gamma_kv: [D] RMSNorm weight of the rows.
        sinks: [N] float32 (float64 beside float64), a logit a head that only adds to the
            denominator; None: none.
        sin: [B, S, Dr] sines at the tokens' positions, Dr even and at most D; pair i of the last Dr
            dims reads entry 2i, and odd ones are not read.
        cos: [B, S, Dr] cosines likewise.
        ori_kv: window rows [pages, P, 1, D], P a multiple of 16, updated in place; pages may lie
            apart, as those of all caches.
        ori_block_table: [B, max_pages] int32 or int64, page of every P rows; -1 where there is
            none, as before the window; a ring repeats its pages, ori_win_left + S rows at least.
        act_seqs: [B] int32 or int64, tokens of each request, those of this call included.
        seqused: [B] int32 or int64, how many of the S tokens are there; None: all.
        cmp_ratio: m, tokens of an entry; 0 without entries.
        w_cmp_kv: [coff*D, H] as nn.Linear has it, never NZ; with coff = 2 the entries' windows
            overlap, with coff = 1 they do not.
        w_cmp_gate: [coff*D, H] likewise.
        cmp_ape: [m, coff*D] float32 (float64).
        gamma_cmp: [D] float32 (float64) RMSNorm weight of the entries.
        cmp_sin: [B, ceil(S / m), Dr] sines at `entry_positions`, read as `sin` is.
        cmp_cos: [B, ceil(S / m), Dr] cosines likewise.
        cmp_state: [pages, P, 2*coff*D] float32 (float64), updated in place; any P.
        state_block_table: [B, columns] int32 or int64, pages of both states.
        cmp_kv: entries [pages, P, 1, D], P 1, 2, 4, 8 or a multiple of 16, updated in place.
        cmp_block_table: [B, max_pages] int32 or int64, pages of the entries and of the index keys.
        w_idx_qb: [Rq, Ni*Di] index query projection.
        w_idx_proj: [H, Ni] index head weights.
        w_idx_kv: [coff*Di, H] as `w_cmp_kv`, for the index keys.
        w_idx_gate: [coff*Di, H] likewise.
        idx_ape: [m, coff*Di] float32 (float64).
        gamma_idx: [Di] float32 (float64) RMSNorm weight of the index keys.
        idx_state: [pages, P, 2*coff*Di] float32 (float64) beside `cmp_state`, updated in place.
        idx_k: index keys [pages, P, 1, Di] beside `cmp_kv`, updated in place.
        idx_k_scale: [pages, P, 1] scales of an `idx_k` of 8 bits that is not packed, updated in
            place: float32, or float16 with "int8".
        sparse_count: entries that a token chooses, at most.
        w_o_a: [G, N/G*D, Ro] output projection of a group of heads, NZ of each group in 5-D;
            together with `w_o_b`.
        w_o_b: [G*Ro, H] output projection behind it.
        softmax_scale: of the logits; 0 and None: D ** -0.5.
        rms_norm_eps: of all norms.
        ori_win_left: rows before a token that it sees.
        state_mode: the states' addresses, as `cache_mode` of `npu_compressor`: 2, a ring of at
            least coff * m - 1 rows, and one more for each token that a call may take back; 1, by
            page.
        weight_format: how weights of the lower dimension are read: "nz", "nd", or "linear": all
            are [N, K] row-major, `nn.Linear.weight` itself, `w_o_a` [G, Ro, N/G*D] a view of one.
        kv_kind: "none": `ori_kv` and `cmp_kv` have the dtype of `x`; "fp8": both are uint8
            [pages, P, 1, 584], pages of row_layout "v4", and D is 512.
        index_kind: "none", or "fp8" or "int8": `idx_k` is [pages, P, 1, 128] beside `idx_k_scale`,
            or packed pages [pages, P, 132] uint8 (fp8), and Di is 128.
        index_hadamard: index keys and queries are transformed; belongs to the cache.
        hadamard_round: what the transform gives, "bf16" or "fp32".
        weight_quant_mode: 0: weights have the dtype of `x`; 1: `w_uq` and `w_idx_qb` are int8;
            2: all with a scale are int8, a scale for each column; 4: e4m3, a scale for each block
            of 128 x 128.
            What a weight of 8 bits meets is quantized token by token, to int8, or by tiles of 128
            with powers of two to e4m3. 3 and 5 are refused by name.
        dequant_scale_w_dq: float32, of a `w_dq` of 8 bits: [1, Rq], or [H/128, Rq/128] rounded up,
            whatever form the weight has; likewise the others.
        dequant_scale_w_uq: [1, N*D] or [Rq/128, N*D/128].
        dequant_scale_w_kv: [1, D] or [H/128, D/128].
        dequant_scale_w_idx_qb: [1, Ni*Di] or [Rq/128, Ni*Di/128].
        dequant_scale_w_o_a: [G, 1, Ro] or [G, K/128, Ro/128] with K = N/G*D.
        dequant_scale_w_o_b: [1, H] or [G*Ro/128, H/128].

    Returns:
        [B, S, H]; without `w_o_a` and `w_o_b` [B, S, N, D], the heads turned back by their token's
        angle. Of a shard of heads with its own groups, the partial sum of the ranks.

    Raises:
        ValueError: a shape, stride, device or option does not fit, or a group is given in part; no
            cache has been written.
        TypeError: a type or dtype does not fit.
        RuntimeError: an argument requires grad, while grad mode is on.

    >>> import torch, custom
    >>> H, Rq, N, D, Dr, P, m = 64, 32, 2, 32, 8, 16, 4
    >>> new = lambda *shape: torch.randn(*shape) / 8
    >>> ints = lambda *values: torch.tensor([values], dtype=torch.int32)
    >>> sliding = dict(
    ...     x=new(1, 3, H), w_dq=new(H, Rq), w_uq=new(Rq, N * D), w_kv=new(H, D),
    ...     gamma_cq=torch.ones(Rq), gamma_kv=torch.ones(D), sinks=torch.zeros(N),
    ...     sin=new(1, 3, Dr), cos=new(1, 3, Dr), ori_kv=new(8, P, 1, D),
    ...     ori_block_table=ints(4, 0, 7), act_seqs=ints(38)[0], ori_win_left=15,
    ...     weight_format="nd",
    ... )
    >>> entries = dict(
    ...     cmp_ratio=m, w_cmp_kv=new(2 * D, H), w_cmp_gate=new(2 * D, H), cmp_ape=new(m, 2 * D),
    ...     gamma_cmp=torch.ones(D), cmp_sin=new(1, 1, Dr), cmp_cos=new(1, 1, Dr),
    ...     cmp_state=new(1, 2 * m, 4 * D), state_block_table=ints(0), cmp_kv=new(2, P, 1, D),
    ...     cmp_block_table=ints(1),
    ... )
    >>> custom.npu_sparse_attention_v4_pto(**sliding).shape
    torch.Size([1, 3, 2, 32])
    >>> output = dict(w_o_a=new(2, D, 16), w_o_b=new(32, H))
    >>> custom.npu_sparse_attention_v4_pto(**sliding, **entries, **output).shape
    torch.Size([1, 3, 64])
    """
