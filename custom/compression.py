# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Compressed entries of DeepSeek-V4's attention, and pooled index keys: one for a few tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from ._keywords import worded
from .dispatch.check import Checker

_ops = torch.ops.custom


@worded
def npu_compressor(
    x: Tensor,
    wkv: Tensor,
    wgate: Tensor | None,
    state_cache: Tensor | None,
    ape: Tensor | None,
    norm_weight: Tensor | None,
    rope_sin: Tensor | None,
    rope_cos: Tensor | None,
    rope_head_dim: int,
    cmp_ratio: int,
    *,
    state_block_table: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    seqused: Tensor | None = None,
    start_pos: Tensor | None = None,
    coff: int = 1,
    norm_eps: float = 1e-6,
    rotary_mode: int = 1,
    cache_mode: int = 1,
    cmp_cache: Tensor | None = None,
    cmp_scale_cache: Tensor | None = None,
    cmp_block_table: Tensor | None = None,
    kind: str = "none",
    hadamard: bool = False,
    hadamard_round: str = "bf16",
    return_cmp_kv: bool = True,
    ln_weight: Tensor | None = None,
    ln_bias: Tensor | None = None,
    ln_eps: float = 1e-6,
    rope_slice: str = "last",
) -> Tensor:
    """One entry for every `cmp_ratio` tokens, and the state of those whose window is open.

    With m = cmp_ratio, token t has kv_t = x_t wkv^T and z_t = x_t wgate^T + ape[t mod m], both in
    float32: its state. Window w, tokens w m to (w + 1) m - 1, closes in the call that brings its
    last token, and becomes C_w = sum_t softmax_t(z) kv_t, channel by channel; with coff = 2 the
    sum is over the tokens of window w - 1 by the first D channels of their state and over those of
    window w by the others. The entry is RoPE(RMSNorm(C_w)) at position w m, in float32 until it is
    stored. RoPE turns the last `rope_head_dim` channels where they stand, or the first ones.

    Other models' pools are forms of it. Without `wgate` and `ape` the tokens of a window weigh the
    same, and the state is kv alone. With `ln_weight` and `ln_bias` kv_t = LayerNorm(x_t wkv^T).
    Without `norm_weight` or `rope_sin` an entry is not normed or not rotated. Those of
    GLM-5.3-Flash have a gate and a LayerNorm; those of Qwen4-Exp no gate, a norm, and their first
    channels are rotated by halves.

    A call reads the states of earlier tokens, then writes those of its own: a chunk may be longer
    than a ring. A token is taken back by starting the next call earlier. A position whose page is
    -1 is absent: neither read nor written, and without weight.

    Differentiable in x, wkv, wgate, ape and norm_weight where no cache is given.

    Formula: DeepSeek-V4 (DeepSeek-AI, 2026), compressed sparse and heavily compressed attention;
    CANN's operator of this name; pooled index keys as Transformers' glm5_next and qwen4_exp.

    Args:
        x: [B, S, H], or [T, H] with `cu_seqlens`.
        wkv: [coff*D, H], as nn.Linear has it.
        wgate: [coff*D, H], or None with `ape`: equal weights.
        state_cache: [pages, P, 2*coff*D] float32 (float64 beside a float64 x), kv and then z,
            [pages, P, coff*D] without a gate, updated in place; pages may lie apart. None, and no
            `cmp_cache`: every request begins at position 0, and the op has a gradient; gate, norm
            and rotation are given then.
        ape: [m, coff*D] float32 (float64).
        norm_weight: [D] float32 (float64), or None: no norm.
        rope_sin: [B, ceil(S / m), dr] or [E, dr], a row for each of the output, at position w m;
            dr is rope_head_dim, or half of it: one angle for each pair. None: no rotation.
        rope_cos: as `rope_sin`.
        rope_head_dim: channels that are rotated, even; 0: none.
        cmp_ratio: m, tokens of a window.
        state_block_table: [B, max_pages] int32 or int64, pages of the state.
        cu_seqlens: [B + 1] int32 or int64, where requests begin and end in x.
        seqused: [B] int32 or int64, tokens of each request that count, the first ones; all if None.
        start_pos: [B] int32 or int64, position of a request's first token; 0 if None.
        coff: 2 where windows overlap (D channels for each half), else 1.
        norm_eps: of the RMSNorm.
        rotary_mode: 2, neighbours are a pair (DeepSeek-V4), or 1, halves: pair i of a row of
            `rope_head_dim` angles reads number 2 i, or number i.
        cache_mode: 1, position p is in column p // P of the table; 2, in that column modulo their
            number, a ring of at least coff * m - 1 rows, and one more for each token that a call
            may take back.
        cmp_cache: entries too go to their pages, in place: [pages, P, 1, D] of x's dtype. With
            "fp8" rows [pages, P, 1, 584] uint8 of row_layout "v4" where D is 512, packed pages
            [pages, P, 1, 132] uint8 where it is 128; [pages, P, 1, 128] beside `cmp_scale_cache`.
        cmp_scale_cache: [pages, P, 1], beside 8 bits that are not packed: float32, or float16 with
            "int8".
        cmp_block_table: [B, max_pages] int32 or int64, pages of `cmp_cache`.
        kind: "none", "fp8" or "int8", as `npu_index_cache_write`.
        hadamard: transform the entries.
        hadamard_round: what they are rounded to between that and 8 bits, "bf16" or "fp32".
        return_cmp_kv: also return the entries.
        ln_weight: [D] float32 (float64), with `ln_bias`: a LayerNorm of every token's kv; coff 1.
        ln_bias: [D] float32 (float64).
        ln_eps: of the LayerNorm.
        rope_slice: "last" or "first" channels are rotated.

    Returns:
        Entries [B, ceil(S / m), D], row c of a request being window start_pos // m + c, or
        [min(T, T // m + B), D], the closed windows of one request after the other; zeros where no
        window closes. [0] without `return_cmp_kv`.

    Raises:
        ValueError: a shape, stride, device or option does not fit; nothing has been written.
        TypeError: a type or dtype does not fit.
        RuntimeError: an argument requires grad beside a cache, while grad mode is on.

    >>> import torch, custom
    >>> x, ape, norm = torch.randn(1, 9, 32), torch.randn(4, 32), torch.ones(16)
    >>> wkv, wgate = torch.randn(32, 32), torch.randn(32, 32)
    >>> state, table = torch.zeros(1, 8, 64), torch.tensor([[0]])
    >>> positions = custom.entry_positions(torch.tensor([9]), 9, 4)
    >>> angle = positions[..., None] * 10.0 ** -torch.arange(4)
    >>> entries = custom.npu_compressor(
    ...     x, wkv, wgate, state, ape, norm, angle.sin(), angle.cos(), 8, 4, coff=2,
    ...     rotary_mode=2, cache_mode=2, state_block_table=table,
    ... )
    >>> entries.shape, entries[0, 2].any().item()
    (torch.Size([1, 3, 16]), False)
    """
    if return_cmp_kv is None:  # PyTorch takes it for False
        raise TypeError(
            "npu_compressor: `return_cmp_kv` is None, expected a bool. Leave it out for its "
            "default."
        )
    others = ape, norm_weight, rope_sin, rope_cos, rope_head_dim, cmp_ratio
    options = dict(
        cu_seqlens=cu_seqlens,
        seqused=seqused,
        coff=coff,
        norm_eps=norm_eps,
        rotary_mode=rotary_mode,
        hadamard=hadamard,
    )
    out: Tensor
    if state_cache is None and cmp_cache is None:
        c = Checker("npu_compressor")
        for name, given in (("state_block_table", state_block_table), ("start_pos", start_pos)):
            c.require(
                given is None,
                f"`{name}` is given and `state_cache` is None, expected both or neither: without a "
                "state every request begins at position 0.",
            )
        needed = dict(wgate=wgate, ape=ape, norm_weight=norm_weight)
        for name, tensor in (needed | dict(rope_sin=rope_sin, rope_cos=rope_cos)).items():
            c.require(
                tensor is not None,
                f"`{name}` and `state_cache` are None, expected a state for entries without it.",
            )
        c.require(
            ln_weight is None and ln_bias is None and rope_slice == "last",
            "`ln_weight`, `ln_bias` or `rope_slice` is given and `state_cache` is None, expected a "
            "state for such entries.",
        )
        out = _ops.npu_compressor_dense(x, wkv, wgate, *others, **options)
        return out if return_cmp_kv else out.new_empty([0])
    out = _ops.npu_compressor(
        x,
        wkv,
        wgate,
        state_cache,
        *others,
        **options,
        state_block_table=state_block_table,
        start_pos=start_pos,
        cache_mode=cache_mode,
        cmp_cache=cmp_cache,
        cmp_scale_cache=cmp_scale_cache,
        cmp_block_table=cmp_block_table,
        kind=kind,
        hadamard_round=hadamard_round,
        return_cmp_kv=return_cmp_kv,
        ln_weight=ln_weight,
        ln_bias=ln_bias,
        ln_eps=ln_eps,
        rope_slice=rope_slice,
    )
    return out


compressor = npu_compressor


def entry_positions(act_seqs: Tensor, s1: int, m: int, seqused: Tensor | None = None) -> Tensor:
    """The positions of the rotation of a compressor's entries, for `rope_sin` and `rope_cos`.

    Row c of a request is window start // m + c, whose first token is at that many times m.

    Args:
        act_seqs: [B] int32 or int64, tokens of each request, those of the call included.
        s1: S, tokens of the call.
        m: cmp_ratio, tokens of a window.
        seqused: [B] int32 or int64, how many of the S tokens count; all if None.

    Returns:
        int64 [B, ceil(S / m)]; 0 before the first token.

    Raises:
        ValueError: a shape, a device or a number does not fit.
        TypeError: a dtype does not fit.

    >>> import torch, custom
    >>> custom.entry_positions(torch.tensor([10, 3]), 5, 4, torch.tensor([5, 3]))
    tensor([[4, 8],
            [0, 4]])
    """
    c = Checker("entry_positions")
    c.integer("act_seqs", act_seqs)
    c.shape("act_seqs", act_seqs, "B")
    c.at_least("s1", s1, 0)
    c.count("m", m)
    used: Tensor | int = s1
    if seqused is not None:
        c.integer("seqused", seqused)
        c.same_device(act_seqs=act_seqs, seqused=seqused)
        c.shape("seqused", seqused, "B")
        used = seqused.long()
    first = torch.div(act_seqs.long() - used, m, rounding_mode="floor")
    row = torch.arange(-(-s1 // m), device=act_seqs.device)
    return ((first[:, None] + row) * m).clamp(min=0)
