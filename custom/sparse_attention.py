# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The sparse attention of DeepSeek-V3.2 and GLM-5: the layer in one call, also for selections that
layers share, its four stages, two gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._op import described_by, op, variant_of
from .dispatch.op_spec import UNLIMITED

_ops = torch.ops.custom


@op
def npu_sparse_attention_pto(
    x: Tensor,
    w_dq: Tensor,
    w_uq_qr: Tensor,
    w_uk: Tensor,
    w_dkv_kr: Tensor,
    gamma_cq: Tensor,
    gamma_ckv: Tensor,
    sin: Tensor,
    cos: Tensor,
    cache_index: Tensor,
    kv_cache: Tensor,
    kr_cache: Tensor,
    block_table: Tensor,
    act_seqs: Tensor,
    w_idx_qb: Tensor,
    w_idx_k: Tensor,
    w_idx_proj: Tensor,
    in_gamma_k: Tensor,
    in_beta_k: Tensor,
    index_k_cache: Tensor,
    *,
    softmax_scale: float | None = None,
    rms_norm_eps: float = 1e-6,
    layer_norm_eps: float = 1e-6,
    sparse_count: int = 2048,
    rope_interleaved: bool = True,
    index_rope_interleaved: bool = False,
    weight_format: str = "nz",
    dequant_scale_w_dq: Tensor | None = None,
    dequant_scale_w_uq_qr: Tensor | None = None,
    dequant_scale_w_dkv_kr: Tensor | None = None,
    smooth_scales_cq: Tensor | None = None,
    k_nope_clip_alpha: Tensor | None = None,
    weight_quant_mode: int = 0,
    kv_kind: str = "none",
    row_layout: str = "nope_rope_scale",
    scale_format: str = "ue8m0",
    index_k_scale_cache: Tensor | None = None,
    dequant_scale_w_idx_qb: Tensor | None = None,
    dequant_scale_w_idx_k: Tensor | None = None,
    index_weight_quant_mode: int = 0,
    index_kind: str = "none",
    index_hadamard: bool = False,
    hadamard_round: str = "bf16",
) -> Tensor:
    """The sparse attention of a DeepSeek-V3.2 or GLM-5 layer, from hidden states to latent output.

    Writes the new tokens' keys into the three paged caches, scores every cached position with the
    lightning indexer, and attends to the `sparse_count` best ones: `npu_mla_prolog_pto`,
    `npu_indexer_prolog_pto`, `npu_lightning_indexer` and `npu_sparse_flash_attention` in one call.
    The value up-projection and the output projection remain with the caller.

    Formula: DeepSeek-V3.2-Exp (DeepSeek-AI, 2025), the absorbed form of its decoding stage.
    Products accumulate in float32; every intermediate is rounded to the dtype of `x`.

    Args:
        x: [B, S, H] hidden states; S is 1 + the draft tokens of multi-token prediction.
        w_dq: [H, Rq] query down-projection, NZ (see `weight_format`).
        w_uq_qr: [Rq, N * (Dn + Dr)] query up-projection, NZ; per head Dn plain, Dr rotary columns.
        w_uk: [N, Dn, R] key up-projection, absorbed into the query; row-major.
        w_dkv_kr: [H, R + Dr] latent and rotary key projection, NZ.
        gamma_cq: [Rq] RMSNorm weight of the query latent.
        gamma_ckv: [R] RMSNorm weight of the key latent.
        sin: [B, S, Dr] sines at the tokens' positions (two equal halves in real models). Dr is
            even; with Dr = 0 nothing rotates, and `kr_cache` holds nothing.
        cos: [B, S, Dr] cosines likewise.
        cache_index: [B, S] int32 or int64, flat slot (page * P + offset) that each token's keys are
            written to; negative or out of range: not written; none twice, or which one remains is
            open.
        kv_cache: [pages, P, 1, R] latent cache, updated in place.
        kr_cache: [pages, P, 1, Dr] rotary key cache, updated in place.
        block_table: [B, max_pages] int32 or int64, page of every P positions; -1 where unused.
        act_seqs: [B] int32 or int64, length of each request with its S new tokens.
        w_idx_qb: [Rq, Ni * Di] index query projection, NZ.
        w_idx_k: [H, Di] index key projection, NZ.
        w_idx_proj: [H, Ni] index head weights, NZ.
        in_gamma_k: [Di] LayerNorm weight of the index key.
        in_beta_k: [Di] LayerNorm bias of the index key.
        index_k_cache: [pages, P, 1, Di] index key cache, updated in place.
        softmax_scale: None is (Dn + Dr) ** -0.5. A checkpoint with YaRN needs its own: the released
            DeepSeek-V3.2-Exp has 192 ** -0.5 * mscale ** 2 = 0.13523.
        rms_norm_eps: of both RMSNorms.
        layer_norm_eps: of the index key's LayerNorm.
        sparse_count: positions attended to by a query, at most.
        rope_interleaved: pairing of the MLA rotation: (0, 1), (2, 3)... or halves.
        index_rope_interleaved: pairing of the indexer's rotation (the first Dr of Di dims rotate):
            False for DeepSeek-V3.2, True for GLM-5.
        weight_format: how a 2-D weight is read: "nz" (FRACTAL_NZ bytes under the [K, N] shape),
            "nd" (row-major), or "linear": all are [N, K] row-major, `nn.Linear.weight` itself
            (`w_dq` [Rq, H]). A 4-D weight `[N/16, K/16, 16, 16]` is NZ (`to_nz`), beside "nz" and
            "nd".
        dequant_scale_w_dq: float32, of `w_dq`, as all that concerns weights of 8 bits in
            `npu_mla_prolog_pto`.
        dequant_scale_w_uq_qr: of `w_uq_qr`.
        dequant_scale_w_dkv_kr: of `w_dkv_kr`.
        smooth_scales_cq: float32 [1, Rq], multiplied into the query latent before it becomes int8,
            for both of its products.
        k_nope_clip_alpha: float32 [1], times the largest magnitude of a tile of a row.
        weight_quant_mode: of `w_dq`, `w_uq_qr` and `w_dkv_kr`: 0, 1, 2 (int8) or 4 (fp8).
        kv_kind: "none", or "fp8" or "int8": then `kv_cache` has rows [pages, P, 1, 656] of it, or
            of uint8, and `kr_cache` no elements.
        row_layout: order of a row's parts, "nope_rope_scale" or "nope_scale_rope".
        scale_format: of fp8 activations and caches, "ue8m0" (powers of two) or "fp32".
        index_k_scale_cache: [pages, P, 1], updated in place: the scales of an index cache of 8
            bits. None for packed pages.
        dequant_scale_w_idx_qb: float32, of `w_idx_qb`, as in `npu_indexer_prolog_pto`.
        dequant_scale_w_idx_k: of `w_idx_k`.
        index_weight_quant_mode: of `w_idx_qb` and `w_idx_k`, as in `npu_indexer_prolog_pto`.
        index_kind: "none", or "fp8" or "int8": then `index_k_cache` is [pages, P, 1, 128] beside
            `index_k_scale_cache`, or packed pages [pages, P, 132] uint8 (fp8).
        index_hadamard: index keys and queries are transformed; belongs to the cache.
        hadamard_round: what the transform gives, "bf16" or "fp32".

    Returns:
        [B, S, N, R], dtype of `x`. A request with act_seqs 0 gets zeros.

    Raises:
        ValueError: a shape, stride, device or option does not fit; no cache has been written.
        TypeError: a type or dtype does not fit.
        RuntimeError: an argument requires grad, while grad mode is on.

    >>> import torch, custom
    >>> H, Rq, N, Dn, R, Dr, Ni, Di, P = 64, 32, 2, 16, 32, 16, 16, 32, 16
    >>> new = lambda *shape: torch.randn(*shape) / 8
    >>> nz = lambda *shape: custom.to_nz(new(*shape))
    >>> ints = lambda *values: torch.tensor(values, dtype=torch.int32)
    >>> out = custom.npu_sparse_attention_pto(
    ...     new(1, 1, H), nz(H, Rq), nz(Rq, N * (Dn + Dr)), new(N, Dn, R), nz(H, R + Dr),
    ...     torch.ones(Rq), torch.ones(R), new(1, 1, Dr), new(1, 1, Dr), ints([37]),
    ...     new(8, P, 1, R), new(8, P, 1, Dr), ints([0, 1, 2]), ints(38),
    ...     nz(Rq, Ni * Di), nz(H, Di), nz(H, Ni), torch.ones(Di), torch.zeros(Di),
    ...     new(8, P, 1, Di), sparse_count=16,
    ... )
    >>> out.shape
    torch.Size([1, 1, 2, 32])
    """


@op
@variant_of(npu_sparse_attention_pto)
def npu_sparse_attention_indices_pto(*_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    """`npu_sparse_attention_pto`, and the positions that it attended to.

    For models whose other layers attend to the same positions (`npu_sparse_attention_shared_pto`):
    all but one of every few layers of GLM-5.2, or the draft tokens of multi-token prediction.

    Formula: as `npu_sparse_attention_pto`.

    Args:
        sparse_count: positions attended to by a query, at most: the last size of `sparse_indices`.

    The arguments are those of `npu_sparse_attention_pto`.

    Returns:
        out: [B, S, N, R], dtype of `x`. A request with act_seqs 0 gets zeros.
        sparse_indices: [B, S, 1, sparse_count] int32, ascending positions; -1 where fewer exist.

    >>> import torch, custom
    >>> H, Rq, N, Dn, R, Dr, Ni, Di, P = 64, 32, 2, 16, 32, 16, 16, 32, 16
    >>> new = lambda *shape: torch.randn(*shape) / 8
    >>> nz = lambda *shape: custom.to_nz(new(*shape))
    >>> ints = lambda *values: torch.tensor(values, dtype=torch.int32)
    >>> out, indices = custom.npu_sparse_attention_indices_pto(
    ...     new(1, 1, H), nz(H, Rq), nz(Rq, N * (Dn + Dr)), new(N, Dn, R), nz(H, R + Dr),
    ...     torch.ones(Rq), torch.ones(R), new(1, 1, Dr), new(1, 1, Dr), ints([37]),
    ...     new(8, P, 1, R), new(8, P, 1, Dr), ints([0, 1, 2]), ints(38),
    ...     nz(Rq, Ni * Di), nz(H, Di), nz(H, Ni), torch.ones(Di), torch.zeros(Di),
    ...     new(8, P, 1, Di), sparse_count=16,
    ... )
    >>> out.shape, indices.shape
    (torch.Size([1, 1, 2, 32]), torch.Size([1, 1, 1, 16]))
    """


@op
@described_by(npu_sparse_attention_pto)
def npu_sparse_attention_shared_pto(
    x: Tensor,
    w_dq: Tensor,
    w_uq_qr: Tensor,
    w_uk: Tensor,
    w_dkv_kr: Tensor,
    gamma_cq: Tensor,
    gamma_ckv: Tensor,
    sin: Tensor,
    cos: Tensor,
    cache_index: Tensor,
    kv_cache: Tensor,
    kr_cache: Tensor,
    block_table: Tensor,
    act_seqs: Tensor,
    sparse_indices: Tensor,
    *,
    softmax_scale: float | None = None,
    rms_norm_eps: float = 1e-6,
    rope_interleaved: bool = True,
    weight_format: str = "nz",
    dequant_scale_w_dq: Tensor | None = None,
    dequant_scale_w_uq_qr: Tensor | None = None,
    dequant_scale_w_dkv_kr: Tensor | None = None,
    smooth_scales_cq: Tensor | None = None,
    k_nope_clip_alpha: Tensor | None = None,
    weight_quant_mode: int = 0,
    kv_kind: str = "none",
    row_layout: str = "nope_rope_scale",
    scale_format: str = "ue8m0",
) -> Tensor:
    """The sparse attention of a layer that takes over another layer's selection.

    Writes the new tokens' keys into the two paged caches and attends to the positions in
    `sparse_indices`: `npu_mla_prolog_pto` and `npu_sparse_flash_attention` in one call. There is no
    indexer and no index cache; `npu_sparse_attention_indices_pto` gives the selection.

    Formula: as `npu_sparse_attention_pto`; sharing as in arXiv 2603.12201.

    Args:
        sparse_indices: [B, S, 1, K] int32 or int64, positions; one that is negative, or that its
            token does not see, is absent.

    All but `sparse_indices` are arguments of `npu_sparse_attention_pto` too.

    Returns:
        [B, S, N, R], dtype of `x`. A request with act_seqs 0 gets zeros.

    Raises:
        ValueError: a shape, stride, device or option does not fit; no cache has been written.
        TypeError: a type or dtype does not fit.
        RuntimeError: an argument requires grad, while grad mode is on.

    >>> import torch, custom
    >>> H, Rq, N, Dn, R, Dr, P = 64, 32, 2, 16, 32, 16, 16
    >>> new = lambda *shape: torch.randn(*shape) / 8
    >>> nz = lambda *shape: custom.to_nz(new(*shape))
    >>> ints = lambda *values: torch.tensor(values, dtype=torch.int32)
    >>> out = custom.npu_sparse_attention_shared_pto(
    ...     new(1, 1, H), nz(H, Rq), nz(Rq, N * (Dn + Dr)), new(N, Dn, R), nz(H, R + Dr),
    ...     torch.ones(Rq), torch.ones(R), new(1, 1, Dr), new(1, 1, Dr), ints([37]),
    ...     new(8, P, 1, R), new(8, P, 1, Dr), ints([0, 1, 2]), ints(38),
    ...     ints([[[0, 5, 37, -1]]]),
    ... )
    >>> out.shape
    torch.Size([1, 1, 2, 32])
    """


@op
def npu_mla_prolog_pto(
    token_x: Tensor,
    weight_dq: Tensor | None,
    weight_uq_qr: Tensor,
    weight_uk: Tensor,
    weight_dkv_kr: Tensor,
    rmsnorm_gamma_cq: Tensor | None,
    rmsnorm_gamma_ckv: Tensor,
    rope_sin: Tensor,
    rope_cos: Tensor,
    kv_cache: Tensor,
    kr_cache: Tensor,
    cache_index: Tensor,
    *,
    rmsnorm_epsilon_cq: float = 1e-6,
    rmsnorm_epsilon_ckv: float = 1e-6,
    rope_interleaved: bool = True,
    weight_format: str = "nz",
    dequant_scale_x: Tensor | None = None,
    dequant_scale_w_dq: Tensor | None = None,
    dequant_scale_w_uq_qr: Tensor | None = None,
    dequant_scale_w_dkv_kr: Tensor | None = None,
    smooth_scales_cq: Tensor | None = None,
    k_nope_clip_alpha: Tensor | None = None,
    weight_quant_mode: int = 0,
    kv_cache_quant_mode: int = 0,
    query_quant_mode: int = 0,
    ckvkr_repo_mode: int = 0,
    quant_scale_repo_mode: int = 0,
    tile_size: int = 128,
    kv_cache_dtype: int | None = None,
    row_layout: str = "nope_rope_scale",
    scale_format: str = "ue8m0",
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries of absorbed multi-head latent attention, and the new tokens' rows of its cache.

    query_norm = RMSNorm(x W_dq); [q_nope, q_rope] = query_norm W_uq_qr, by head;
    query = q_nope W_uk; query_rope = RoPE(q_rope);
    kv_cache[slot] = RMSNorm((x W_dkv_kr)[:R]); kr_cache[slot] = RoPE((x W_dkv_kr)[R:]).

    A model without a query latent (Kimi-Linear, DeepSeek-V2-Lite, most of Ling-3.0) passes None for
    `weight_dq` and `rmsnorm_gamma_cq`: then [q_nope, q_rope] = x W_uq_qr, `weight_uq_qr` is its
    query projection [H, N * (Dn + Dr)], there is no query_norm, and weights and caches keep the
    working dtype.

    With weights of 8 bits (`weight_quant_mode`) x and query_norm are quantized before their
    products; with `kv_cache_quant_mode` 3 both caches are one, of rows of 656 bytes. The words are
    those of torch_npu's npu_mla_prolog_v3; docs/quantized.md has the formats.

    Formula: DeepSeek-V2 (DeepSeek-AI, 2024), section 2.1, with W_uk absorbed.

    Args:
        token_x: [B, S, H] hidden states; in modes 2 and 4 also int8 or float8_e4m3fn, with
            `dequant_scale_x`.
        weight_dq: [H, Rq], NZ; int8 in mode 2, float8_e4m3fn in mode 4. None: no query latent.
        weight_uq_qr: [Rq, N * (Dn + Dr)], NZ; int8 in modes 1 and 2, float8_e4m3fn in mode 4. [H,
            N * (Dn + Dr)] without a query latent.
        weight_uk: [N, Dn, R], row-major.
        weight_dkv_kr: [H, R + Dr], NZ; as `weight_dq`.
        rmsnorm_gamma_cq: [Rq]; None with `weight_dq`.
        rmsnorm_gamma_ckv: [R].
        rope_sin: [B, S, Dr], Dr even; 0: nothing rotates.
        rope_cos: [B, S, Dr].
        kv_cache: [pages, P, 1, R], updated in place; with kv_cache_quant_mode 3 rows [pages, P, 1,
            656] int8 or float8_e4m3fn, or uint8 with `kv_cache_dtype`; pages may lie apart.
        kr_cache: [pages, P, 1, Dr], updated in place; a tensor of no elements beside rows.
        cache_index: [B, S] int32 or int64 flat slots; negative or out of range: not written.
        rmsnorm_epsilon_cq: of the query latent's norm.
        rmsnorm_epsilon_ckv: of the key latent's norm.
        rope_interleaved: pairing of the rotation; the result lies in halves either way.
        weight_format: as in `npu_sparse_attention_pto`. A weight of 8 bits has 32 columns a tile;
            "linear" are a checkpoint's own bytes, of every mode.
        dequant_scale_x: float32 [B * S, 1] (int8), [B * S, H / 128] (fp8), of a quantized
            `token_x`; None: the op quantizes it.
        dequant_scale_w_dq: float32 [1, Rq] (int8), [H / 128, Rq / 128] (fp8, rounded up).
        dequant_scale_w_uq_qr: float32 [1, N * (Dn + Dr)] or [Rq / 128, N * (Dn + Dr) / 128].
        dequant_scale_w_dkv_kr: float32 [1, R + Dr] or [H / 128, (R + Dr) / 128].
        smooth_scales_cq: float32 [1, Rq], multiplied into query_norm before it becomes int8.
        k_nope_clip_alpha: float32 [1], times the largest magnitude of a tile of a row.
        weight_quant_mode: 0 none; 1 int8 behind the query's norm; 2 int8, a scale for each column,
            and for each token of the activations; 4 fp8, a scale for 128 x 128, and for 128 numbers
            of the activations. W_uk keeps its dtype.
        kv_cache_quant_mode: 0 none, 3 a scale for each token and tile.
        query_quant_mode: 0, the queries keep their dtype.
        ckvkr_repo_mode: 1 with kv_cache_quant_mode 3, else 0.
        quant_scale_repo_mode: likewise.
        tile_size: 128.
        kv_cache_dtype: torch.int8 or torch.float8_e4m3fn, of rows that come as uint8.
        row_layout: order of a row's parts, "nope_rope_scale" or "nope_scale_rope".
        scale_format: of fp8 activations and rows, "ue8m0" (powers of two) or "fp32".

    Returns:
        query [B, S, N, R], query_rope [B, S, N, Dr] and query_norm [B, S, Rq], dtype of the
        gammas; query_norm [0] without a query latent.

    Raises:
        ValueError: a shape, stride, device or option does not fit; no cache has been written.
        TypeError: a type or dtype does not fit.
        RuntimeError: an argument requires grad, while grad mode is on.

    >>> import torch, custom
    >>> H, Rq, N, Dn, R, Dr, P = 64, 32, 2, 16, 32, 16, 16
    >>> new = lambda *shape: torch.randn(*shape) / 8
    >>> nz = lambda *shape: custom.to_nz(new(*shape))
    >>> kv_cache, kr_cache = torch.zeros(4, P, 1, R), torch.zeros(4, P, 1, Dr)
    >>> query, query_rope, query_norm = custom.npu_mla_prolog_pto(
    ...     new(1, 1, H), nz(H, Rq), nz(Rq, N * (Dn + Dr)), new(N, Dn, R), nz(H, R + Dr),
    ...     torch.ones(Rq), torch.ones(R), new(1, 1, Dr), new(1, 1, Dr), kv_cache, kr_cache,
    ...     torch.tensor([[37]]),
    ... )
    >>> query.shape, query_rope.shape, query_norm.shape
    (torch.Size([1, 1, 2, 32]), torch.Size([1, 1, 2, 16]), torch.Size([1, 1, 32]))
    >>> kv_cache.flatten(0, 2).any(-1).nonzero()  # the slot that was written
    tensor([[37]])
    """


@op
@described_by(npu_mla_prolog_pto)
def npu_mla_prolog_v3(
    token_x: Tensor,
    weight_dq: Tensor,
    weight_uq_qr: Tensor,
    weight_uk: Tensor,
    weight_dkv_kr: Tensor,
    rmsnorm_gamma_cq: Tensor,
    rmsnorm_gamma_ckv: Tensor,
    rope_sin: Tensor,
    rope_cos: Tensor,
    kv_cache: Tensor,
    kr_cache: Tensor,
    *,
    cache_index: Tensor | None = None,
    dequant_scale_x: Tensor | None = None,
    dequant_scale_w_dq: Tensor | None = None,
    dequant_scale_w_uq_qr: Tensor | None = None,
    dequant_scale_w_dkv_kr: Tensor | None = None,
    quant_scale_ckv: Tensor | None = None,
    quant_scale_ckr: Tensor | None = None,
    smooth_scales_cq: Tensor | None = None,
    actual_seq_len: Tensor | None = None,
    k_nope_clip_alpha: Tensor | None = None,
    rmsnorm_epsilon_cq: float = 1e-5,
    rmsnorm_epsilon_ckv: float = 1e-5,
    cache_mode: str = "PA_BSND",
    query_norm_flag: bool = False,
    weight_quant_mode: int = 0,
    kv_cache_quant_mode: int = 0,
    query_quant_mode: int = 0,
    ckvkr_repo_mode: int = 0,
    quant_scale_repo_mode: int = 0,
    tile_size: int = 128,
    qc_qr_scale: float = 1.0,
    kc_scale: float = 1.0,
    token_x_dtype: int | None = None,
    weight_dq_dtype: int | None = None,
    weight_uq_qr_dtype: int | None = None,
    weight_dkv_kr_dtype: int | None = None,
    kv_cache_dtype: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`npu_mla_prolog_pto` under torch_npu's signature, for scripts that change their prefix.

    Pairs (0, 1), (2, 3)... are rotated, rows are "nope_rope_scale", fp8 scales powers of two. A 4-D
    weight is NZ; a 2-D one is what its shape says, or what its format on an NPU says. [N, K] as
    nn.Linear has it is `npu_mla_prolog_pto`'s weight_format="linear".

    Formula: as `npu_mla_prolog_pto`.

    Args:
        token_x: [B, S, H] or [T, H]; in modes 2 and 4 also quantized, with `dequant_scale_x`.
        weight_dq: [H, Rq]; int8 in mode 2, float8_e4m3fn in mode 4. Never None, in torch_npu's
            signature: a model without a query latent calls `npu_mla_prolog_pto`.
        weight_uq_qr: [Rq, N * (Dn + Dr)]; int8 in modes 1 and 2, float8_e4m3fn in mode 4.
        rmsnorm_gamma_cq: [Rq].
        rope_sin: [B, S, Dr] or [T, Dr], Dr even; 0: nothing rotates.
        rope_cos: [B, S, Dr] or [T, Dr].
        cache_index: [B, S] or [T] int32 or int64 flat slots; negative or out of range: not written.
        quant_scale_ckv: None: a scale for the whole cache is refused.
        quant_scale_ckr: None.
        actual_seq_len: None.
        cache_mode: "PA_BSND".
        query_norm_flag: give the query norm as well.
        qc_qr_scale: 1.
        kc_scale: 1.
        token_x_dtype: None.
        weight_dq_dtype: None.
        weight_uq_qr_dtype: None.
        weight_dkv_kr_dtype: None.

    Returns:
        query [.., N, R] and query_rope [.., N, Dr], dtype of the gammas.
        dequant_scale_q_nope: float32 [0].
        query_norm: [.., Rq] as its product takes it, dtype of `weight_uq_qr`; [0] without the flag.
        dequant_scale_q_norm: float32 [T, 1] (int8), [T, Rq / 128] (fp8), else [0].

    Raises:
        ValueError: a shape, stride, device or option does not fit; no cache has been written.
        TypeError: a type or dtype does not fit.
        RuntimeError: an argument requires grad, while grad mode is on.

    >>> import torch, custom
    >>> H, Rq, N, Dn, R, Dr, P = 64, 32, 2, 16, 32, 16, 16
    >>> new = lambda *shape: torch.randn(*shape) / 8
    >>> query, _, _, query_norm, _ = custom.npu_mla_prolog_v3(
    ...     new(3, H), new(H, Rq), new(Rq, N * (Dn + Dr)), new(N, Dn, R), new(H, R + Dr),
    ...     torch.ones(Rq), torch.ones(R), new(3, Dr), new(3, Dr), new(4, P, 1, R),
    ...     new(4, P, 1, Dr), cache_index=torch.tensor([5, 6, 7]), query_norm_flag=True,
    ... )
    >>> query.shape, query_norm.shape
    (torch.Size([3, 2, 32]), torch.Size([3, 32]))
    """


@op
def npu_indexer_prolog_pto(
    token_x: Tensor,
    query_norm: Tensor,
    weight_qb: Tensor,
    weight_k: Tensor,
    weight_proj: Tensor,
    ln_gamma_k: Tensor,
    ln_beta_k: Tensor,
    rope_sin: Tensor,
    rope_cos: Tensor,
    index_k_cache: Tensor,
    cache_index: Tensor,
    *,
    ln_epsilon: float = 1e-6,
    rope_interleaved: bool = False,
    weight_format: str = "nz",
    index_k_scale_cache: Tensor | None = None,
    dequant_scale_q_norm: Tensor | None = None,
    dequant_scale_w_qb: Tensor | None = None,
    dequant_scale_w_k: Tensor | None = None,
    smooth_scales_cq: Tensor | None = None,
    weight_quant_mode: int = 0,
    kv_cache_quant_mode: int = 0,
    index_hadamard: bool = False,
    hadamard_round: str = "bf16",
    scale_format: str = "ue8m0",
) -> tuple[Tensor, Tensor]:
    """Queries and head weights of the lightning indexer, and the new tokens' index keys.

    query_index = RoPE(query_norm W_qb), by head; weights = x W_proj;
    index_k_cache[slot] = RoPE(LayerNorm(x W_k)).  The first Dr dims of each head rotate.

    With weights of 8 bits (`weight_quant_mode`) query_norm and x are quantized before their
    products; with `kv_cache_quant_mode` 3 keys and queries are of 8 bits, and the queries' scales
    are in the weights, as `quantize_index_query` folds them.

    Formula: DeepSeek-V3.2-Exp (DeepSeek-AI, 2025), the indexer.
    The weights are not multiplied by Ni ** -0.5 * Di ** -0.5: a positive factor changes no top-k.

    Args:
        token_x: [B, S, H] hidden states.
        query_norm: [B, S, Rq], third output of `npu_mla_prolog_pto`; or int8 or float8_e4m3fn, as
            `weight_qb`, with `dequant_scale_q_norm`.
        weight_qb: [Rq, Ni * Di], NZ; int8 in modes 1 and 2, float8_e4m3fn in mode 4.
        weight_k: [H, Di], NZ; int8 in mode 2, float8_e4m3fn in mode 4.
        weight_proj: [H, Ni], NZ, in every mode of the dtype of `token_x`.
        ln_gamma_k: [Di].
        ln_beta_k: [Di].
        rope_sin: [B, S, Dr], Dr even; 0: nothing rotates.
        rope_cos: [B, S, Dr].
        index_k_cache: [pages, P, 1, Di], updated in place; with kv_cache_quant_mode 3 int8 or
            float8_e4m3fn with Di = 128, pages may lie apart (`index_cache_views`).
        cache_index: [B, S] int32 or int64 flat slots; negative or out of range: not written.
        ln_epsilon: of the LayerNorm.
        rope_interleaved: pairing of the rotation; the model's indexer rotates halves.
        weight_format: as in `npu_mla_prolog_pto`.
        index_k_scale_cache: [pages, P, 1], updated in place: a scale for each key of 8 bits,
            float32, or float16 for int8; None without them.
        dequant_scale_q_norm: float32 [B * S, 1] (int8), [B * S, Rq / 128] (fp8), of a quantized
            `query_norm`; None: the op quantizes it.
        dequant_scale_w_qb: float32 [1, Ni * Di] (int8), [Rq / 128, Ni * Di / 128] (fp8, rounded
            up).
        dequant_scale_w_k: float32 [1, Di] or [H / 128, Di / 128].
        smooth_scales_cq: float32 [1, Rq], multiplied into query_norm before it becomes int8.
        weight_quant_mode: 0 none; 1 int8 `weight_qb`; 2 int8 `weight_qb` and `weight_k`; 4 both
            fp8. Scales as in `npu_mla_prolog_pto`.
        kv_cache_quant_mode: 0 none, 3 a scale for each index key.
        index_hadamard: transform queries and keys before they are quantized; belongs to the cache.
        hadamard_round: what the transform gives, "bf16" or "fp32".
        scale_format: of fp8 activations, queries and keys, "ue8m0" (powers of two) or "fp32".

    Returns:
        query_index [B, S, Ni, Di] and weights [B, S, Ni], dtype of `token_x`; with
        kv_cache_quant_mode 3 the cache's dtype, and float32.

    Raises:
        ValueError: a shape, stride, device or option does not fit; no cache has been written.
        TypeError: a type or dtype does not fit.
        RuntimeError: an argument requires grad, while grad mode is on.

    >>> import torch, custom
    >>> H, Rq, Dr, Ni, Di, P = 64, 32, 16, 16, 32, 16
    >>> new = lambda *shape: torch.randn(*shape) / 8
    >>> nz = lambda *shape: custom.to_nz(new(*shape))
    >>> index_k_cache = torch.zeros(4, P, 1, Di)
    >>> query_index, weights = custom.npu_indexer_prolog_pto(
    ...     new(1, 1, H), new(1, 1, Rq), nz(Rq, Ni * Di), nz(H, Di), nz(H, Ni), torch.ones(Di),
    ...     torch.zeros(Di), new(1, 1, Dr), new(1, 1, Dr), index_k_cache, torch.tensor([[37]]),
    ... )
    >>> query_index.shape, weights.shape
    (torch.Size([1, 1, 16, 32]), torch.Size([1, 1, 16]))
    >>> index_k_cache.flatten(0, 2).any(-1).nonzero()  # the slot that was written
    tensor([[37]])
    """


@op
def npu_lightning_indexer_prolog_pto(
    token_x: Tensor,
    q_norm: Tensor,
    q_norm_scale: Tensor,
    wq_b: Tensor,
    wq_b_scale: Tensor,
    wk: Tensor,
    weights_proj: Tensor,
    ln_gamma_k: Tensor,
    ln_beta_k: Tensor,
    cos_idx_rope: Tensor,
    sin_idx_rope: Tensor,
    hadamard_q: Tensor | None,
    hadamard_k: Tensor | None,
    idx_k_cache: Tensor,
    idx_k_scale_cache: Tensor,
    idx_k_cache_index: Tensor,
    layernorm_epsilon_k: float,
    *,
    layout_query: str = "TND",
    layout_key: str = "PA_BSND",
) -> tuple[Tensor, Tensor, Tensor]:
    """The indexer's prolog of models in W8A8 with an int8 index cache, as custom_pypto has it.

    query = int8(RoPE(q_norm W_qb) H_q), by head; key = int8(RoPE(LayerNorm(x W_k)) H_k), into its
    slot; weights = x W_proj N ** -0.5 D ** -0.5.  Of the first Dr dims pairs (0, 1), (2, 3)...
    rotate.

    Formula: as `npu_indexer_prolog_pto`, and the W8A8C8 sample of cann-recipes-infer (2025).

    Args:
        token_x: [T, H] hidden states.
        q_norm: [T, Rq] int8, the quantized query norm (`npu_mla_prolog_v3`).
        q_norm_scale: [T, 1] float32, its scales.
        wq_b: [Rq, N * 128] int8, NZ as 4-D (`to_nz`), or row-major.
        wq_b_scale: [N * 128, 1] float32.
        wk: [H, 128], dtype of `token_x`.
        weights_proj: [H, N], dtype of `token_x`.
        ln_gamma_k: [128].
        ln_beta_k: [128].
        cos_idx_rope: [T, Dr], Dr even; 0: nothing rotates.
        sin_idx_rope: [T, Dr].
        hadamard_q: [128, 128], multiplied from the right; None: no transform.
        hadamard_k: [128, 128] likewise.
        idx_k_cache: [pages, P, 1, 128] int8, updated in place.
        idx_k_scale_cache: [pages, P, 1] or [pages, P, 1, 1] float16 or float32, updated in place.
        idx_k_cache_index: [T] int32 or int64 flat slots; negative or out of range: not written.
        layernorm_epsilon_k: of the LayerNorm.
        layout_query: "TND".
        layout_key: "PA_BSND".

    Returns:
        query [T, N, 128] int8, query_scale [T, N, 1] float16 and weights [T, N] float16.

    Raises:
        ValueError: a shape, stride, device or option does not fit; no cache has been written.
        TypeError: a type or dtype does not fit.
        RuntimeError: an argument requires grad, while grad mode is on.

    >>> import torch, custom
    >>> H, Rq, Dr, N, D, P = 64, 32, 16, 16, 128, 16
    >>> new = lambda *shape: torch.randn(*shape) / 8
    >>> eight = lambda *shape: torch.randint(-127, 128, shape, dtype=torch.int8)
    >>> query, query_scale, weights = custom.npu_lightning_indexer_prolog_pto(
    ...     new(3, H), eight(3, Rq), torch.rand(3, 1), custom.to_nz(eight(Rq, N * D)),
    ...     torch.rand(N * D, 1), new(H, D), new(H, N), torch.ones(D), torch.zeros(D),
    ...     new(3, Dr), new(3, Dr), None, None, eight(4, P, 1, D), torch.rand(4, P, 1),
    ...     torch.tensor([5, 6, 7]), 1e-6,
    ... )
    >>> query.dtype, query.shape, query_scale.shape, weights.shape
    (torch.int8, torch.Size([3, 16, 128]), torch.Size([3, 16, 1]), torch.Size([3, 16]))
    """


@op
def npu_lightning_indexer(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    *,
    actual_seq_lengths_query: Tensor | None = None,
    actual_seq_lengths_key: Tensor | None = None,
    block_table: Tensor | None = None,
    layout_query: str = "BSND",
    layout_key: str = "BSND",
    sparse_count: int = 2048,
    sparse_mode: int = 3,
    pre_tokens: int = UNLIMITED,
    next_tokens: int = UNLIMITED,
    return_value: bool = False,
    cmp_ratio: int = 1,
    select_tail: bool = False,
) -> tuple[Tensor, Tensor]:
    """The `sparse_count` positions of `key` that score highest for every query.

    score[b, s, t] = sum_n weights[b, s, n] * relu(query[b, s, n] . key[b, t]), in float32.

    Same signature as torch_npu's op.  The selection is the exact top-k of these scores; on ties the
    lower position wins, so the result is deterministic.  A score that is NaN or -inf counts as the
    lowest number of float32, and is given as that.  Differentiable in query, key and weights
    through `sparse_values` where keys are not paged (see `npu_lightning_indexer_grad`).

    Formula: DeepSeek-V3.2-Exp (DeepSeek-AI, 2025), equation (1).

    Args:
        query: [B, S, N, D], or [T, N, D] with layout_query="TND".
        key: [B, S2, 1, D]; [T2, 1, D] with "TND"; [pages, P, 1, D] with "PA_BSND".
        weights: [B, S, N] or [T, N].
        actual_seq_lengths_query: [B] int32 or int64: lengths with BSND, prefix sums with TND.
        actual_seq_lengths_key: [B] likewise; with PA_BSND lengths, and required.
        block_table: [B, max_pages] int32 or int64, with PA_BSND.
        layout_query: "BSND" or "TND".
        layout_key: "BSND", "TND" or "PA_BSND".
        sparse_count: K, positions selected for a query.
        sparse_mode: 3, causal, aligned at the last key; 0, all keys.
        pre_tokens: only the default is supported.
        next_tokens: only the default is supported.
        return_value: also return the scores.
        cmp_ratio: m, tokens that a key stands for (`npu_compressor`): lengths of keys count tokens,
            and a query that would see n of them sees the first n // m keys. Above 1 keys are
            PA_BSND or BSND, with lengths, and pages may hold 1, 2, 4 or 8 keys.
        select_tail: with `cmp_ratio` above 1: behind the chosen keys of a query comes the one whose
            tokens it sees only in part, if it does: number n // m, where m does not divide n. K is
            one more then. It need not be stored: an attention with `sparse_block_size` m reads
            its tokens. Its value is 0, its gradient none.

    Returns:
        sparse_indices int32 [B, S, 1, K] or [T, 1, K], ascending positions, -1 behind them;
        sparse_values of the same shape, in the query's dtype; shape [0] unless `return_value`.

    Raises:
        ValueError: a shape, layout, device or option does not fit.
        TypeError: a type or dtype does not fit.

    >>> import torch, custom
    >>> q, k, w = torch.randn(1, 2, 4, 16), torch.randn(1, 9, 1, 16), torch.rand(1, 2, 4)
    >>> index, _ = custom.npu_lightning_indexer(q, k, w, sparse_count=4)
    >>> index.shape
    torch.Size([1, 2, 1, 4])
    """


@op
def npu_lightning_indexer_scores(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    *,
    actual_seq_lengths_query: Tensor | None = None,
    actual_seq_lengths_key: Tensor | None = None,
    block_table: Tensor | None = None,
    layout_query: str = "BSND",
    layout_key: str = "BSND",
    sparse_count: int = 2048,
    sparse_mode: int = 3,
    pre_tokens: int = UNLIMITED,
    next_tokens: int = UNLIMITED,
    cmp_ratio: int = 1,
    select_tail: bool = False,
) -> tuple[Tensor, Tensor]:
    """`npu_lightning_indexer`, and the scores in float32: what an exact merge over ranks needs.

    Formula: as `npu_lightning_indexer`.

    Args:
        query: [B, S, N, D], or [T, N, D] with layout_query="TND".
        key: [B, S2, 1, D]; [T2, 1, D] with "TND"; [pages, P, 1, D] with "PA_BSND".
        weights: [B, S, N] or [T, N].
        actual_seq_lengths_query: [B] int32 or int64: lengths with BSND, prefix sums with TND.
        actual_seq_lengths_key: [B] likewise; with PA_BSND lengths, and required.
        block_table: [B, max_pages] int32 or int64, with PA_BSND.
        layout_query: "BSND" or "TND".
        layout_key: "BSND", "TND" or "PA_BSND".
        sparse_count: K, positions selected for a query.
        sparse_mode: 3, causal, aligned at the last key; 0, all keys.
        pre_tokens: only the default is supported.
        next_tokens: only the default is supported.
        cmp_ratio: m, tokens that a key stands for (`npu_compressor`): lengths of keys count tokens,
            and a query that would see n of them sees the first n // m keys. Above 1 keys are
            PA_BSND or BSND, with lengths, and pages may hold 1, 2, 4 or 8 keys.
        select_tail: with `cmp_ratio` above 1: behind the chosen keys of a query comes the one whose
            tokens it sees only in part, if it does: number n // m, where m does not divide n. K is
            one more then. It need not be stored: an attention with `sparse_block_size` m reads
            its tokens. Its value is 0, its gradient none.

    Returns:
        sparse_indices int32 [B, S, 1, K] or [T, 1, K], ascending positions, -1 behind them;
        their scores of the same shape, float32 (float64 of float64), 0 there.

    Raises:
        ValueError: a shape, layout, device or option does not fit.
        TypeError: a type or dtype does not fit.
        RuntimeError: an argument requires grad, while grad mode is on.

    >>> import torch, custom
    >>> q, k, w = torch.randn(1, 2, 4, 16), torch.randn(1, 9, 1, 16), torch.rand(1, 2, 4)
    >>> index, scores = custom.npu_lightning_indexer_scores(q, k, w, sparse_count=4)
    >>> index.shape, scores.dtype
    (torch.Size([1, 2, 1, 4]), torch.float32)
    """


@op
def npu_lightning_indexer_grad(
    query: Tensor,
    key: Tensor,
    dy: Tensor,
    sparse_indices: Tensor,
    weights: Tensor,
    actual_seq_lengths_query: Tensor | None = None,
    actual_seq_lengths_key: Tensor | None = None,
    layout: str | None = "BSND",
    sparse_mode: int | None = 3,
    pre_tokens: int | None = UNLIMITED,
    next_tokens: int | None = UNLIMITED,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the selected scores of `npu_lightning_indexer`.

    Same signature as torch_npu's op.  With s = query . key over the selected positions:
    d_weights = sum dy relu(s), d_query = sum dy weights [s > 0] key, d_key the transposed sum.

    Formula: the derivative of `npu_lightning_indexer`'s.

    Args:
        query: [B, S, N, D] or [T, N, D].
        key: [B, S2, 1, D] or [T2, 1, D].
        dy: gradient of the selected scores, shape of `sparse_indices`.
        sparse_indices: int32 [B, S, 1, K] or [T, 1, K]; negative or out of range: absent.
        weights: [B, S, N] or [T, N].
        actual_seq_lengths_query: as in `npu_lightning_indexer`.
        actual_seq_lengths_key: as in `npu_lightning_indexer`.
        layout: "BSND" or "TND", of queries and keys.
        sparse_mode: 3 or 0; positions that the mask excludes are absent.
        pre_tokens: only the default is supported.
        next_tokens: only the default is supported.

    Returns:
        d_query, d_key, d_weights, like `query`, `key`, `weights`.

    Raises:
        ValueError: a shape, layout, device or option does not fit.
        TypeError: a type or dtype does not fit.
        RuntimeError: an argument requires grad, while grad mode is on.

    Example: see `npu_lightning_indexer`, whose backward it is.
    """


@op
def npu_sparse_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    sparse_indices: Tensor,
    scale_value: float,
    *,
    block_table: Tensor | None = None,
    actual_seq_lengths_query: Tensor | None = None,
    actual_seq_lengths_kv: Tensor | None = None,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    sparse_block_size: int = 1,
    layout_query: str = "BSND",
    layout_kv: str = "BSND",
    sparse_mode: int = 3,
    pre_tokens: int = UNLIMITED,
    next_tokens: int = UNLIMITED,
    attention_mode: int = 2,
    return_softmax_lse: bool = False,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Latent attention of every query over its own selected positions.

    z = scale_value * ([query, query_rope] . [key, key_rope]); out = softmax(z) value, over the
    positions of `sparse_indices` that exist and that the mask allows.

    Same signature as torch_npu's op, but `attention_mode` defaults to 2, the only valid one, and
    the softmax statistics come with paged keys as well.  Differentiable in every tensor of floating
    point, sinks included, where keys are not paged (see `npu_sparse_flash_attention_grad`).

    Formula: DeepSeek-V3.2-Exp (DeepSeek-AI, 2025), attention over the selected latents.

    Args:
        query: [B, S, N, R], or [T, N, R] with layout_query="TND".
        key: [B, S2, 1, R]; [T2, 1, R] with "TND"; [pages, P, 1, R] with "PA_BSND".
        value: like `key`; None means the keys.
        sparse_indices: int32 or int64 [B, S, 1, K] or [T, 1, K] positions (or blocks of
            `sparse_block_size` positions) in a request; negative, out of range: absent, anywhere.
        scale_value: factor of the logits.
        block_table: [B, max_pages] int32 or int64, with PA_BSND.
        actual_seq_lengths_query: [B] int32 or int64: lengths with BSND, prefix sums with TND.
        actual_seq_lengths_kv: [B] likewise; with PA_BSND lengths, and required.
        query_rope: [B, S, N, Dr] or [T, N, Dr]; None: no rotary part, or already joined.
        key_rope: like `key` with Dr.
        sparse_block_size: positions that one index stands for.
        layout_query: "BSND" or "TND".
        layout_kv: "BSND", "TND" or "PA_BSND".
        sparse_mode: 3, causal, aligned at the last key; 0, all selected keys.
        pre_tokens: only the default is supported.
        next_tokens: only the default is supported.
        attention_mode: 2, absorbed latent attention.
        return_softmax_lse: also return the softmax statistics.
        sinks: [N] float32 logits that enter the denominator alone.

    Returns:
        out like `query`; softmax_max and softmax_sum float32 [B, 1, S, N] ([1, T, N] with TND),
        without the sinks (natural: lse = max + ln(sum)); shape [0] unless `return_softmax_lse`.
        The sum carries a gradient and the maximum, its shift, none: a function of lse
        differentiates right, one of either alone does not.
        A query that sees nothing gets out 0, max -inf, sum 0.

    Raises:
        ValueError: a shape, layout, device or option does not fit.
        TypeError: a type or dtype does not fit.

    >>> import torch, custom
    >>> q, k = torch.randn(1, 2, 4, 32), torch.randn(1, 9, 1, 32)
    >>> index = torch.tensor([0, 5, 3, -1], dtype=torch.int32).expand(1, 2, 1, 4)
    >>> out, _, _ = custom.npu_sparse_flash_attention(q, k, None, index, 32**-0.5)
    >>> out.shape
    torch.Size([1, 2, 4, 32])
    """


@op
def npu_sparse_flash_attention_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    sparse_indices: Tensor,
    d_out: Tensor,
    out: Tensor,
    softmax_max: Tensor,
    softmax_sum: Tensor,
    scale_value: float,
    sparse_block_size: int,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    actual_seq_qlen: Tensor | None = None,
    actual_seq_kvlen: Tensor | None = None,
    layout: str | None = "BSND",
    sparse_mode: int | None = 3,
    pre_tokens: int | None = UNLIMITED,
    next_tokens: int | None = UNLIMITED,
    attention_mode: int | None = 2,
    d_softmax_sum: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `npu_sparse_flash_attention` in everything but the indices.

    Signature of torch_npu's op, and `d_softmax_sum`.  P = exp(z - max) / sum, dP = d_out value^T,
    dz = P (dP - rowsum(d_out out) + d_sum sum); the key's gradients are summed over all queries
    that chose it.  CUDA adds up in the queries' order, the same bits every time, in work space of
    at most 2 GiB.

    Formula: the backward of FlashAttention-2 (Dao, 2023), over the selected positions.

    Args:
        query: as in the forward.
        key: as in the forward, not paged.
        value: as in the forward.
        sparse_indices: as in the forward.
        d_out: gradient of `out`.
        out: the forward's output.
        softmax_max: the forward's statistics.
        softmax_sum: the forward's statistics.
        scale_value: factor of the logits.
        sparse_block_size: positions that one index stands for.
        query_rope: as in the forward.
        key_rope: as in the forward.
        actual_seq_qlen: [B] int32 or int64: lengths with BSND, prefix sums with TND.
        actual_seq_kvlen: [B] likewise.
        layout: "BSND" or "TND", of queries and keys.
        sparse_mode: 3 or 0.
        pre_tokens: only the default is supported.
        next_tokens: only the default is supported.
        attention_mode: 2, absorbed latent attention.
        d_softmax_sum: gradient of `softmax_sum`, of its shape and dtype; None: zero.

    Returns:
        d_query, d_key, d_value, d_query_rope, d_key_rope, like their inputs. Where `value` is None
        its gradient is in d_key and d_value has shape [0]; likewise the rotary ones if absent.

    Raises:
        ValueError: a shape, layout, device or option does not fit.
        TypeError: a type or dtype does not fit.
        RuntimeError: an argument requires grad, while grad mode is on.

    Example: see `npu_sparse_flash_attention`, whose backward it is.
    """
