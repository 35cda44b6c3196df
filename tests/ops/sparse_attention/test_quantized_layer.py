# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The whole layer with weights and caches of 8 bits: bit by bit what its stages give."""

from __future__ import annotations

import pytest
import torch

import custom

from ...support.calls import CPU
from ...support.quantized_caches import LENGTHS, TABLE, Caches, K, layer_arguments
from ...support.quantized_layer import INDEXER, MLA, Call, P, S
from ...support.ragged import run

LAYER = "npu_sparse_attention_pto"


def by_stages(call: Call, caches: Caches, mode: int, index_mode: int, smooth, hadamard):
    device = call.device
    rows = caches.kv != "none"
    modes = dict(kv_cache_quant_mode=3, ckvkr_repo_mode=1, quant_scale_repo_mode=1) if rows else {}
    if rows and caches.latents[0].dtype is torch.uint8:
        modes["kv_cache_dtype"] = torch.float8_e4m3fn
    query, query_rope, query_norm = getattr(custom, MLA)(
        **call.mla(
            kv_cache=caches.latents[0],
            kr_cache=caches.latents[1],
            smooth_scales_cq=smooth,
            weight_quant_mode=mode,
            row_layout="nope_scale_rope",
            **modes,
        )
    )
    keys, scales = caches.values()
    index = caches.index != "none"
    query_index, weights = getattr(custom, INDEXER)(
        **call.indexer(
            query_norm=query_norm,
            index_k_cache=keys,
            index_k_scale_cache=scales,
            weight_quant_mode=index_mode,
            kv_cache_quant_mode=3 if index else 0,
            index_hadamard=hadamard,
            smooth_scales_cq=smooth if index_mode in (1, 2) else None,
        )
    )
    paged = dict(block_table=torch.tensor(TABLE, dtype=torch.int32, device=device))
    lengths = torch.tensor(LENGTHS, dtype=torch.int32, device=device)
    of_keys = dict(actual_seq_lengths_key=lengths, layout_key="PA_BSND", sparse_count=K) | paged
    if index:
        indices = custom.npu_quant_lightning_indexer(
            query_index, keys, weights, None, scales, 0, 0, **of_keys
        )
    else:
        indices, _ = custom.npu_lightning_indexer(query_index, keys, weights, **of_keys)
    rotary = query_rope.shape[-1]
    scale = (call.layer.w_uk.shape[1] + rotary) ** -0.5
    of_rows = dict(actual_seq_lengths_kv=lengths, layout_kv="PA_BSND") | paged
    if not rows:
        latents, ropes = caches.latents
        out, *_ = custom.npu_sparse_flash_attention(
            query, latents, None, indices, scale, query_rope=query_rope, key_rope=ropes, **of_rows
        )
        return out, indices
    kind = modes.get("kv_cache_dtype")
    cache = caches.latents[0]
    out = custom.npu_kv_quant_sparse_flash_attention(
        torch.cat([query, query_rope], -1),
        cache,
        cache,
        indices,
        scale,
        2,
        2,
        attention_mode=2,
        row_layout="nope_scale_rope",
        rope_head_dim=rotary,
        key_dtype=kind,
        value_dtype=kind,
        **of_rows,
    )
    return out, indices


@pytest.mark.parametrize(
    ("mode", "index_mode", "kv", "index", "packed", "rotary"),
    [
        (2, 2, "int8", "int8", False, 0),
        (0, 0, "fp8", "none", False, 0),
        (4, 4, "fp8", "fp8", True, 64),
        (4, 4, "none", "none", False, 64),
        (2, 1, "int8", "int8", False, 64),
        (2, 2, "none", "none", False, 64),
        (1, 1, "int8", "none", False, 64),
        (0, 0, "fp8", "fp8", False, 64),
        (0, 4, "none", "int8", False, 64),
    ],
)
def test_one_call_is_its_stages(device, backend, mode, index_mode, kv, index, packed, rotary):
    form = "linear" if mode == 4 else "4-D NZ"
    call = Call(device, mode, form, index_mode=index_mode, Dr=rotary)
    call.slots = torch.tensor([[82, 83, 92], [32 + 1, 32 + 2, 32 + 3]], dtype=torch.int32)
    smooth = 0.5 + torch.rand(1, 160, device=device) if mode in (1, 2) else None
    hadamard = index != "none" and mode == 4
    wanted, indices = by_stages(
        call, staged := Caches(call, kv, index, packed), mode, index_mode, smooth, hadamard
    )
    caches = Caches(call, kv, index, packed)
    given = layer_arguments(call, caches, mode, index_mode)
    given |= dict(smooth_scales_cq=smooth, index_hadamard=hadamard)
    out = run(LAYER, backend, **given)
    assert out.dtype is call.dtype and out.shape == (2, S, 2, 512)
    assert torch.equal(out, wanted)
    for got, want in zip(caches.all(), staged.all(), strict=True):
        assert torch.equal(got, want)
    again = run("npu_sparse_attention_indices_pto", backend, **given)
    assert torch.equal(again[0], wanted) and torch.equal(again[1], indices)
    shared = {n: x for n, x in given.items() if "index" not in n and "idx" not in n}
    for name in ("in_gamma_k", "in_beta_k", "sparse_count", "hadamard_round"):
        shared.pop(name, None)
    shared |= dict(cache_index=given["cache_index"], sparse_indices=indices)
    assert torch.equal(run("npu_sparse_attention_shared_pto", backend, **shared), wanted)


def test_errors():
    call = Call(CPU, 4)
    caches = Caches(call, "fp8", "fp8", True)
    good = layer_arguments(call, caches, 4, 4)
    for change, message in (
        (dict(kv_kind="hif8"), "`kv_kind` is 'hif8', expected one of"),
        (dict(kv_kind="none"), "`kv_cache` has"),
        (dict(index_kind="none"), "`index_k_cache` has"),
        (dict(index_kind="int8"), "`index_k_cache` has shape"),
        (dict(index_weight_quant_mode=3), r"`index_weight_quant_mode` is 3 \(mxfp8"),
        (dict(dequant_scale_w_idx_k=None), "`dequant_scale_w_idx_k` is missing"),
        (dict(kr_cache=torch.zeros(8, P, 1, 64).to(call.dtype)), "`kr_cache` has shape"),
        (dict(kv_kind="int8", kv_cache=caches.latents[0].view(torch.float8_e4m3fn)), "kv_kind"),
        (dict(index_k_cache=good["index_k_cache"].to("meta")), "`index_k_cache` has device meta"),
    ):
        before = [each.clone() for each in caches.all()]
        with pytest.raises((ValueError, TypeError, RuntimeError), match=message):
            custom.npu_sparse_attention_pto(**good | change)
        for cache, kept in zip(caches.all(), before, strict=True):
            assert torch.equal(cache, kept)
