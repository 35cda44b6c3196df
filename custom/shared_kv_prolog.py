# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What lies before and behind attention over one shared key-value row, as DeepSeek-V4 has it."""

from __future__ import annotations

from torch import Tensor

from ._op import op


@op
def npu_sharedkv_prolog_pto(
    token_x: Tensor,
    w_dq: Tensor,
    w_uq: Tensor,
    w_kv: Tensor,
    gamma_cq: Tensor,
    gamma_kv: Tensor,
    rope_sin: Tensor,
    rope_cos: Tensor,
    ori_kv: Tensor,
    ori_block_table: Tensor,
    act_seqs: Tensor,
    *,
    seqused: Tensor | None = None,
    w_idx_qb: Tensor | None = None,
    w_idx_proj: Tensor | None = None,
    rms_norm_eps: float = 1e-6,
    weight_format: str = "nz",
    kv_kind: str = "none",
    index_hadamard: bool = False,
    hadamard_round: str = "bf16",
    weight_quant_mode: int = 0,
    dequant_scale_w_dq: Tensor | None = None,
    dequant_scale_w_uq: Tensor | None = None,
    dequant_scale_w_kv: Tensor | None = None,
    dequant_scale_w_idx_qb: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries of a layer whose keys are its values, its new window rows, and the index queries.

    c = RMSNorm(x w_dq); query = RoPE(RMSNorm(c w_uq) of each head, without a gain); the window row
    RoPE(RMSNorm(x w_kv)) goes to `ori_kv`; query_index = RoPE(c w_idx_qb), weights = x w_idx_proj.
    RoPE turns the last Dr dims, neighbours as pairs, where they stand. Products, c and outputs are
    rounded to the dtype of `token_x`, nothing else is.

    Token j of request i stands at position act_seqs[i] - seqused[i] + j. Where that is below 0, or
    j from seqused[i] on, the outputs are 0 and nothing is written, whatever `token_x` holds. A
    page that the table does not name (-1, or past its columns) is not written either; a ring is a
    table that repeats its pages.

    Formula: DeepSeek-V4's attention, steps 1 to 3 and 7.

    Args:
        token_x: [B, S, H].
        w_dq: [H, Rq], NZ in 4-D or as `weight_format` says; so are all weights.
        w_uq: [Rq, N*D].
        w_kv: [H, D].
        gamma_cq: [Rq], dtype of `token_x`.
        gamma_kv: [D], dtype of `token_x`.
        rope_sin: [B, S, Dr], Dr even and at most D; pair i reads entry 2i, and odd ones are not
            read.
        rope_cos: [B, S, Dr] likewise.
        ori_kv: [pages, P, 1, D], P a multiple of 16, written in place; its pages may lie apart.
            With kv_kind="fp8" uint8 [pages, P, 1, 584], pages of row_layout "v4".
        ori_block_table: [B, columns] int32 or int64, the page of positions p // P.
        act_seqs: [B], the tokens of each request, those of this call among them.
        seqused: [B], how many of the S tokens are there; None: all.
        w_idx_qb: [Rq, Ni*Di], together with `w_idx_proj`; None: a layer without an indexer.
        w_idx_proj: [H, Ni].
        rms_norm_eps: of all three norms.
        weight_format: how a 2-D weight is read: "nz", "nd", or "linear": all are [N, K] row-major,
            `nn.Linear.weight` itself, and none is NZ.
        kv_kind: "none": `ori_kv` has the dtype of `token_x`; "fp8": rows of a D of 512 are rounded
            to bfloat16, their first 448 numbers quantized by tiles of 64 to e4m3, as
            `npu_latent_cache_write` does.
        index_hadamard: transform the index queries, whose Di is then a power of two, for a cache
            of transformed keys.
        hadamard_round: "bf16": to which they are rounded before the dtype of `token_x`; "fp32".
        weight_quant_mode: 0: weights have the dtype of `token_x`; 1: `w_uq` and `w_idx_qb` are
            int8; 2: all with a scale are int8, a scale for each column; 4: e4m3, a scale for each
            block of 128 x 128.
            What a weight of 8 bits meets is quantized token by token, to int8, or by tiles of 128
            with powers of two to e4m3. 3 and 5 are refused by name.
        dequant_scale_w_dq: float32, of a `w_dq` of 8 bits: [1, Rq], or [H/128, Rq/128] rounded up,
            whatever form the weight has; likewise the others.
        dequant_scale_w_uq: [1, N*D] or [Rq/128, N*D/128].
        dequant_scale_w_kv: [1, D] or [H/128, D/128].
        dequant_scale_w_idx_qb: [1, Ni*Di] or [Rq/128, Ni*Di/128].

    Returns:
        query: [B, S, N, D].
        query_norm: [B, S, Rq], c.
        query_index: [B, S, Ni, Di]; [0] without an indexer.
        weights: [B, S, Ni]; [0] without an indexer.

    Raises:
        ValueError: a shape, stride, device or option does not fit.
        TypeError: a type or dtype does not fit.

    >>> import torch, custom
    >>> x, angles, cache = torch.randn(1, 2, 32), torch.zeros(1, 2, 8), torch.zeros(3, 16, 1, 16)
    >>> query, *_ = custom.npu_sharedkv_prolog_pto(
    ...     x, torch.randn(32, 24), torch.randn(24, 48), torch.randn(32, 16), torch.ones(24),
    ...     torch.ones(16), angles, angles + 1, cache, torch.tensor([[2, 0]]), torch.tensor([17]),
    ...     weight_format="nd",
    ... )
    >>> query.shape, cache[:, :, 0, 0].nonzero().tolist()
    (torch.Size([1, 2, 3, 16]), [[0, 0], [2, 15]])
    """


@op
def npu_grouped_o_proj_pto(
    attn_out: Tensor,
    w_o_a: Tensor,
    w_o_b: Tensor,
    rope_sin: Tensor,
    rope_cos: Tensor,
    *,
    weight_format: str = "nz",
    weight_quant_mode: int = 0,
    dequant_scale_w_o_a: Tensor | None = None,
    dequant_scale_w_o_b: Tensor | None = None,
) -> Tensor:
    """Turn attention's output back by its token's angle, and project it, first by groups of heads.

    out = concat over groups g of (RoPE^-1(heads of g) w_o_a[g]) w_o_b; RoPE^-1 turns the last Dr
    dims of a head, and it, the product of a group and the output are rounded to the dtype of
    `attn_out`. Of a shard of heads, with its own groups, `out` is the partial sum of the ranks.

    Formula: DeepSeek-V4's attention, steps 11 and 12.

    Args:
        attn_out: [B, S, N, D].
        w_o_a: [G, N/G*D, Ro], G a divisor of N; NZ of each group in 5-D, [G, Ro/16, K/16, 16, 16],
            or as `weight_format` says.
        w_o_b: [G*Ro, H], NZ in 4-D or as `weight_format` says.
        rope_sin: [B, S, Dr], as the queries were turned by: pair i reads entry 2i.
        rope_cos: [B, S, Dr] likewise.
        weight_format: how `w_o_a` in 3-D and `w_o_b` in 2-D are read: "nz", "nd", or "linear", as
            nn.Linear has them: `w_o_a` [G, Ro, N/G*D], a view of one weight [G*Ro, N/G*D], and
            `w_o_b` [H, G*Ro].
        weight_quant_mode: 0 and 1: weights have the dtype of `attn_out`; 2: both are
            int8, a scale for each column; 4: e4m3, a scale for each block of 128 x 128.
            What a weight of 8 bits meets is quantized token by token, to int8, or by tiles of 128
            with powers of two to e4m3. 3 and 5 are refused by name.
        dequant_scale_w_o_a: float32, of a `w_o_a` of 8 bits: [G, 1, Ro], or [G, K/128, Ro/128]
            rounded up with K = N/G*D, whatever form the weight has.
        dequant_scale_w_o_b: [1, H] or [G*Ro/128, H/128].

    Returns:
        [B, S, H].

    Raises:
        ValueError: a shape, stride, device or option does not fit.
        TypeError: a type or dtype does not fit.

    >>> import torch, custom
    >>> heads, angles = torch.randn(1, 2, 4, 16), torch.zeros(1, 2, 8)
    >>> w_o_a, w_o_b = torch.randn(2, 32, 12), torch.randn(24, 40)
    >>> custom.npu_grouped_o_proj_pto(
    ...     heads, w_o_a, w_o_b, angles, angles + 1, weight_format="nd"
    ... ).shape
    torch.Size([1, 2, 40])
    """
