# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What is compiled: the shapes that are measured (custom/bench), and some that take other tiles."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from custom.dispatch.registry import SPECS

from custom.bench import attention, compression, delta_rule, quantized_weights, sparse_attention
from custom.bench.presets import presets

Make = Callable[[torch.device, int], dict[str, Any]]
FLOAT = torch.float32


def cases() -> Iterator[tuple[str, str, Make]]:
    """(op, label, make) of every case; `make(device, seed)` gives the arguments."""
    for spec in SPECS:
        for case in presets(spec.name, "cuda"):
            yield spec.name, case.label, case.make
    beyond = (
        _attention,
        _sparse,
        _latents,
        _shared_kv,
        _gradients,
        _indexer,
        _prologs,
        _delta_rule,
        _compressor,
    )
    for more in beyond:
        yield from more()


def _bf16(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda:0")


def _int32(*shape: int) -> torch.Tensor:
    return _bf16(*shape, dtype=torch.int32)


def _int8(*shape: int) -> torch.Tensor:
    return _bf16(*shape, dtype=torch.int8)


def _without(given: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: x for name, x in given.items() if name not in names}


def _attention() -> Iterator[tuple[str, str, Make]]:
    for op in ("npu_fused_attention", "npu_fused_attention_backward"):
        for d in (32, 256):
            case = attention.case(op, 1, 16, 16, 4096, 4096, d, True)
            yield op, case.label, case.make
        window = attention.case(op, 1, 16, 16, 4096, 4096, 128)
        yield op, "D128, window 512", lambda at, seed, c=window: c.make(at, seed) | {"window": 512}
    case = attention.case("npu_fused_attention", 1, 32, 8, 1, 8192, 256, False)
    yield "npu_fused_attention", case.label, case.make
    case = attention.case("npu_fused_attention_backward", 1, 32, 8, 4096, 4096, 256, True)
    yield "npu_fused_attention_backward", case.label, case.make

    def off(at, seed):  # type: ignore[no-untyped-def]
        """Rows that no copy of 16 bytes can read."""
        sizes = dict(q=(1, 2, 48, 64), k=(1, 2, 64, 64), v=(1, 2, 64, 16))
        return {n: _bf16(1 + math.prod(size))[1:].view(size) for n, size in sizes.items()}

    yield "npu_fused_attention", "D64/16, rows off 16 bytes", off


def _rows(s: int, n: int, r: int, dr: int, **more: Any) -> dict[str, Any]:
    """Arguments of sparse attention: s rows of n heads over 2048 keys out of 8192."""
    given = dict(
        query=_bf16(1, s, n, r),
        key=_bf16(1, 8192, 1, r),
        sparse_indices=_int32(1, s, 1, 2048),
        scale_value=0.1,
    )
    if dr:
        given |= dict(query_rope=_bf16(1, s, n, dr), key_rope=_bf16(1, 8192, 1, dr))
    return given | more


def _sparse() -> Iterator[tuple[str, str, Make]]:
    op = "npu_sparse_flash_attention"
    rows = {(512, 64): [(1, 128), (64, 64), (4096, 64)], (512, 0): [(1, 128), (64, 64)]} | {
        (1024, 64): [(256, 64)],
        (256, 64): [(256, 64)],
        (128, 0): [(256, 16)],
        (576, 0): [(64, 64)],
    }
    for (r, dr), of_size in rows.items():
        for s, n in of_size:
            yield op, f"H{n} {r} + {dr}, {s} x 8192", lambda at, seed, a=(s, n, r, dr): _rows(*a)

    def value(at: torch.device, seed: int) -> dict[str, Any]:
        return _rows(64, 64, 512, 64, value=_bf16(1, 8192, 1, 512))

    yield op, "H64 512 + 64, 64 x 8192, value apart", value


def _latents() -> Iterator[tuple[str, str, Make]]:
    """What the benchmark's rows have not: packed tokens in pages of 16, a window, sinks, no rope,
    narrow latents."""
    op = "npu_fused_infer_attention_score_v2"
    for heads, rank, rope, page in [(96, 512, 64, 16), (12, 512, 0, 128), (64, 200, 40, 128)]:

        def make(
            at: torch.device,
            seed: int,
            n: int = heads,
            r: int = rank,
            dr: int = rope,
            p: int = page,
        ) -> dict[str, Any]:
            key = _bf16(1024, p, 1, r)
            given = dict(
                query=_bf16(640, n, r),
                key=key,
                value=key,
                actual_seq_qlen=_int32(3),
                actual_seq_kvlen=_int32(3),
                block_table=_int32(3, 300),
                learnable_sink=_bf16(n),
                num_query_heads=n,
                num_key_value_heads=1,
                input_layout="TND_NTD",
                sparse_mode=4,
                pre_tokens=1000,
                next_tokens=0,
                return_softmax_lse=True,
            )
            if dr:
                given |= dict(query_rope=_bf16(640, n, dr), key_rope=_bf16(1024, p, 1, dr))
            return given

        yield op, f"H{heads} {rank} + {rope}, packed, pages of {page}, window, sinks", make


def _shared_kv() -> Iterator[tuple[str, str, Make]]:
    """Packed keys, and slots, of 5 and of 640 rows."""
    op = "npu_sparse_attn_sharedkv"
    for rows in (5, 640):

        def packed(at: torch.device, seed: int, n: int = rows) -> dict[str, Any]:
            sums = ("cu_seqlens_q", "cu_seqlens_ori_kv", "cu_seqlens_cmp_kv")
            return dict(
                q=_bf16(n, 64, 512),
                ori_kv=_bf16(8192, 1, 512),
                cmp_kv=_bf16(2048, 1, 512),
                cmp_sparse_indices=_int32(n, 1, 512),
                cmp_ratio=4,
                layout_q="TND",
                layout_kv="TND",
            ) | {name: _int32(4) for name in sums}

        def slots(at: torch.device, seed: int, n: int = rows) -> dict[str, Any]:
            return dict(
                q=_bf16(1, n, 64, 512),
                ori_kv=_bf16(90, 64, 1, 512),
                cmp_kv=_bf16(90, 2, 1, 512),
                ori_sparse_indices=_int32(1, n, 1, 128),
                cmp_sparse_indices=_int32(1, n, 1, 512),
                ori_topk_length=_int32(n),
                indices_are_slots=True,
            )

        def wide(at: torch.device, seed: int, packed: Make = packed) -> dict[str, Any]:
            given = packed(at, seed)
            return given | dict(cmp_sparse_indices=given["cmp_sparse_indices"].long())

        yield op, f"{rows} rows, packed", packed
        yield op, f"{rows} rows, packed, 64-bit indices", wide
        yield op, f"{rows} rows, slots", slots


def _gradients() -> Iterator[tuple[str, str, Make]]:
    for n, r, dr in [(128, 512, 64), (64, 512, 64), (16, 512, 64), (64, 128, 0)]:

        def statistics(s: int, n: int = n) -> dict[str, Any]:
            return {f"softmax_{name}": _bf16(1, 1, s, n, dtype=FLOAT) for name in ("max", "sum")}

        def attend(at, seed, n=n, r=r, dr=dr, statistics=statistics):  # type: ignore[no-untyped-def]
            out = dict(d_out=_bf16(1, 4096, n, r), out=_bf16(1, 4096, n, r))
            return _rows(4096, n, r, dr, value=None, sparse_block_size=1, **out, **statistics(4096))

        def loss(at, seed, n=n, r=r, dr=dr, statistics=statistics):  # type: ignore[no-untyped-def]
            index = dict(
                query_index=_bf16(1, 4096, 64, 128),
                key_index=_bf16(1, 8192, 1, 128),
                weights=_bf16(1, 4096, 64),
            )
            return _rows(4096, n, r, dr, **index, **statistics(4096))

        def both(at, seed, attend=attend, statistics=statistics):  # type: ignore[no-untyped-def]
            return attend(at, seed) | dict(d_softmax_sum=statistics(4096)["softmax_sum"])

        yield "npu_sparse_flash_attention_grad", f"H{n} {r} + {dr}, 4096 x 8192", attend
        if n == 64:
            label = f"H{n} {r} + {dr}, 4096 x 8192, of both outputs"
            yield "npu_sparse_flash_attention_grad", label, both
        yield "npu_sparse_lightning_indexer_grad_kl_loss", f"H{n} {r} + {dr}, 4096 x 8192", loss


def _indexer() -> Iterator[tuple[str, str, Make]]:
    for n, d in [(64, 128), (16, 128), (8, 64)]:

        def grad(at, seed, n=n, d=d):  # type: ignore[no-untyped-def]
            return dict(
                query=_bf16(1, 4096, n, d),
                key=_bf16(1, 8192, 1, d),
                dy=_bf16(1, 4096, 1, 2048),
                sparse_indices=_int32(1, 4096, 1, 2048),
                weights=_bf16(1, 4096, n),
            )

        yield "npu_lightning_indexer_grad", f"H{n} D{d}, 4096 x 8192", grad
    for s, n, d in [(4, 64, 128), (1, 64, 128), (4096, 16, 64)]:

        def dense(at, seed, s=s, n=n, d=d):  # type: ignore[no-untyped-def]
            return dict(
                query=_bf16(2, s, n, d),
                key=_bf16(2, 8192, 1, d),
                weights=_bf16(2, s, n),
                sparse_count=2048,
                return_value=True,
            )

        yield "npu_lightning_indexer", f"H{n} D{d}, {s} x 8192, dense", dense
    for n, d, dr in [(128, 512, 64), (64, 512, 64), (32, 576, 0), (64, 128, 64)]:
        for lse in (False, True):

            def loss(at, seed, n=n, d=d, dr=dr, lse=lse):  # type: ignore[no-untyped-def]
                given = dict(
                    query=_bf16(1, n, 1024, d),
                    key=_bf16(1, 8192, d),
                    scaling=0.1,
                    index_score=_bf16(1, 1024, 2048, dtype=FLOAT),
                    indices=_int32(1, 1024, 2048),
                    chunk_offset=7168,
                )
                if dr:
                    given |= dict(query_rope=_bf16(1, n, 1024, dr), key_rope=_bf16(1, 8192, dr))
                return given | (dict(softmax_lse=_bf16(1, n, 1024, dtype=FLOAT)) if lse else {})

            yield "npu_indexer_loss", f"H{n} D{d} + {dr}{', lse' if lse else ''}", loss


def _prologs() -> Iterator[tuple[str, str, Make]]:
    for tokens in (8, 200):

        def weight(k, n, form):  # type: ignore[no-untyped-def]
            return _bf16(n, k) if form == "linear" else _bf16(k, n)

        def mla(at, seed, tokens=tokens, form="nd"):  # type: ignore[no-untyped-def]
            weights = dict(
                weight_dq=weight(7168, 1536, form),
                weight_uq_qr=weight(1536, 128 * 192, form),
                weight_dkv_kr=weight(7168, 576, form),
                weight_format=form,
            )
            return sparse_attention.mla_prolog_case(tokens, 128).make(at, seed) | weights

        def indexer(at, seed, tokens=tokens, form="nd"):  # type: ignore[no-untyped-def]
            weights = dict(
                weight_qb=weight(1536, 8192, form),
                weight_k=weight(7168, 128, form),
                weight_proj=weight(7168, 64, form),
                weight_format=form,
            )
            return sparse_attention.indexer_prolog_case(tokens).make(at, seed) | weights

        def mla_v3(at, seed, mla=mla):  # type: ignore[no-untyped-def]
            return _without(mla(at, seed), "weight_format")

        def quantized_v3(at, seed, tokens=tokens):  # type: ignore[no-untyped-def]
            given = quantized_weights.mla_prolog_case(tokens, 128, "int8", npu=True).make(at, seed)
            return _without(given, "weight_format", "row_layout")

        def quantized_indexer(at, seed, tokens=tokens):  # type: ignore[no-untyped-def]
            return dict(
                token_x=_bf16(tokens, 7168),
                q_norm=_int8(tokens, 1536),
                q_norm_scale=_bf16(tokens, 1, dtype=FLOAT),
                wq_b=_int8(1536, 8192),
                wq_b_scale=_bf16(8192, 1, dtype=FLOAT),
                wk=_bf16(7168, 128),
                weights_proj=_bf16(7168, 64),
                ln_gamma_k=_bf16(128),
                ln_beta_k=_bf16(128),
                cos_idx_rope=_bf16(tokens, 64),
                sin_idx_rope=_bf16(tokens, 64),
                hadamard_q=_bf16(128, 128),
                hadamard_k=_bf16(128, 128),
                idx_k_cache=_int8(256, 128, 1, 128),
                layernorm_epsilon_k=1e-6,
                idx_k_scale_cache=_bf16(256, 128, 1, dtype=torch.float16),
                idx_k_cache_index=_int32(tokens),
            )

        for form in ("nd", "linear"):
            of = partial(mla, form=form)
            yield "npu_mla_prolog_pto", f"{tokens} tokens, 128 heads, {form}", of
            yield "npu_indexer_prolog_pto", f"{tokens} tokens, {form}", partial(indexer, form=form)
        yield "npu_mla_prolog_v3", f"{tokens} tokens, 128 heads", mla_v3
        yield "npu_mla_prolog_v3", f"int8, {tokens} tokens, 128 heads", quantized_v3
        yield "npu_lightning_indexer_prolog_pto", f"{tokens} tokens", quantized_indexer
    layer = sparse_attention.layer_case(4, 1, 16, 8192)
    yield "npu_sparse_attention_pto", layer.label, layer.make


def _delta_rule() -> Iterator[tuple[str, str, Make]]:
    for d, state in [(64, torch.bfloat16), (256, FLOAT), (96, None)]:

        def forward(at, seed, d=d, state=state):  # type: ignore[no-untyped-def]
            given = dict(
                query=_bf16(4096, 16, d),
                key=_bf16(4096, 16, d),
                value=_bf16(4096, 32, d),
                beta=_bf16(4096, 32),
                g=_bf16(4096, 32, dtype=FLOAT),
            )
            if state:
                given["initial_state"] = _bf16(1, 32, d, d, dtype=state)
            return given

        def grad(at, seed, d=d, state=state, forward=forward):  # type: ignore[no-untyped-def]
            final = _bf16(1, 32, d, d, dtype=state) if state else None
            return forward(at, seed) | dict(d_out=_bf16(4096, 32, d), d_final_state=final)

        label = f"K{d} V{d}, {str(state).removeprefix('torch.')} state"
        yield "npu_chunk_gated_delta_rule", label, forward
        yield "npu_chunk_gated_delta_rule_grad", label, grad
    for d in (64, 128):

        def bare(at, seed, d=d):  # type: ignore[no-untyped-def]
            given = {x: _bf16(4096, n, d) for x, n in (("query", 16), ("key", 16), ("value", 32))}
            return given | dict(actual_seq_lengths=_bf16(4, dtype=torch.int64))

        def bare_grad(at, seed, d=d, forward=bare):  # type: ignore[no-untyped-def]
            return forward(at, seed) | dict(d_out=_bf16(4096, 32, d))

        label = f"K{d} V{d}, packed, no state, no gates"
        yield "npu_chunk_gated_delta_rule", label, bare
        yield "npu_chunk_gated_delta_rule_grad", label, bare_grad
    for d, bound in [(64, None), (96, -5.0)]:

        def kda_forward(at, seed, d=d, bound=bound):  # type: ignore[no-untyped-def]
            heads = dict(q=16, k=16, v=32, g=32)
            return {name: _bf16(1, 4096, n, d) for name, n in heads.items()} | dict(
                beta=_bf16(1, 4096, 32),
                use_qk_l2norm_in_kernel=True,
                use_gate_in_kernel=True,
                A_log=_bf16(32, dtype=FLOAT),
                lower_bound=bound,
            )

        def kda_grad(at, seed, d=d, forward=kda_forward):  # type: ignore[no-untyped-def]
            return forward(at, seed) | dict(d_out=_bf16(1, 4096, 32, d))

        yield "npu_chunk_kda", f"K{d} V{d}", kda_forward
        yield "npu_chunk_kda_grad", f"K{d} V{d}", kda_grad
    decode = delta_rule.decode_case(32, 1, "vk")

    def kda(at: torch.device, seed: int) -> dict[str, Any]:
        gates = dict(is_kda=True, a=_bf16(32, 1, 32, 128), dt_bias=_bf16(32, 128, dtype=FLOAT))
        return decode.make(at, seed) | gates

    yield decode.op, f"{decode.label}, kda", kda


def _compressor() -> Iterator[tuple[str, str, Make]]:
    op, b = "npu_compressor", 32
    wide, index = (compression.decode_case(b, d, 4) for d in (512, 128))
    made: dict[str, tuple[Any, dict[str, Any]]] = {
        "rows of 584 bytes": (wide, dict(kind="fp8", cmp_cache=(b, 64, 1, 584))),
        "packed fp8 pages, transformed": (
            index,
            dict(kind="fp8", cmp_cache=(b, 64, 132), hadamard=True),
        ),
    }
    for label, (case, more) in made.items():

        def make(
            at: torch.device, seed: int, case: Any = case, more: dict[str, Any] = more
        ) -> dict[str, Any]:
            cache = _bf16(*more["cmp_cache"], dtype=torch.uint8)
            return case.make(at, seed) | more | dict(cmp_cache=cache)

        yield op, label, make

    def packed(at: torch.device, seed: int) -> dict[str, Any]:
        given = wide.make(at, seed)
        flat = ("x", "rope_sin", "rope_cos")
        return given | {n: given[n][:, 0] for n in flat} | dict(cu_seqlens=_int32(b + 1))

    yield (
        op,
        "packed requests, transformed",
        lambda at, seed: packed(at, seed) | dict(hadamard=True, rotary_mode=1),
    )
    dense = compression.dense_case(4096, 512, 4)
    for op, case in (
        ("npu_compressor_dense", dense),
        ("npu_compressor_dense_grad", compression.grad_case(4096, 512, 4)),
    ):
        yield (
            op,
            "transformed, by halves",
            lambda at, seed, c=case: c.make(at, seed) | dict(hadamard=True, rotary_mode=1),
        )
