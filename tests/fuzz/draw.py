# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Cases: sizes and options of a legal call, drawn at random."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from ..support.kda import BOUNDED, GIVEN, PLAIN, SOFTPLUS

Case = dict[str, Any]
DISGUISES = ("int64", "garbage", "absent", "strided", "offset")


def _layer(r: Random, backward: bool) -> Case:
    nd = r.random() < 0.3
    return dict(
        b=r.choice([0, *[1, 2, 3] * 3]),
        s=r.choice([1, 1, 2, 3]),
        h=r.choice([40, 72] if nd else [16, 64, 80]),
        ranks=r.choice([24, 40] if nd else [16, 48]),
        n=r.randint(1, 5),
        plain=r.choice([16, 32]),
        rank=r.choice([16, 48, 64]),
        rotary=r.choice([0, 16, 32]),
        index_heads=r.randint(1, 20) if nd else 16 * r.randint(1, 2),
        index_size=r.choice([32, 48]),
        pages=r.randint(1, 3),
        short=r.random() < 0.3,
        kept=r.randint(1, 20),
        weights=r.choice(["nd", "linear"] if nd else ["nz", "flat", "linear"]),
        interleaved=r.random() < 0.5,
        query_latent=r.random() < 0.7,
    )


def _ragged(r: Random, backward: bool) -> Case:
    requests = r.choice([0, *[1, 2, 3] * 4])
    layouts = [("BSND", "BSND"), ("TND", "TND")]
    layouts += [] if backward else [("BSND", "PA_BSND"), ("TND", "PA_BSND")]
    return dict(
        layouts=r.choice(layouts),
        rows=[r.choice([0, 1, 1, 2, 3, 4, r.choice([17, 33])]) for _ in range(requests)],
        keys=[r.choice([0, 1, 2, 17, r.randint(3, 40), 65]) for _ in range(requests)],
        spare=r.randint(0, 2),
        n=r.choice([1, 2, 3, 4, 16]),
        d=r.choice([16, 32, 48, 64]),
        k=r.choice([1, 5, 12, 16]),
        mode=r.choice([0, 3]),
    )


def _indexer(r: Random, backward: bool) -> Case:
    """Keys of one token each, or entries of `m`."""
    case = _ragged(r, backward)
    entries = not backward and case["layouts"][1] != "TND"
    return case | dict(
        m=r.choice([1, 1, 2, 3, 4, 16]) if entries else 1,
        entry_page=r.choice([1, 2, 4, 8, 16, 48]),
        holes=r.random() < 0.3,
        eight=r.choice(["int8", "fp8"]),
        tail=r.random() < 0.5,
    )


def _attention(r: Random, backward: bool) -> Case:
    return _ragged(r, backward) | dict(
        dr=r.choice([0, 16]),
        absent=r.random() < 0.5,  # ropes of no channel
        block=r.choice([1, 1, 1, 4]),
        own_value=r.random() < 0.3,
        sinks=not backward and r.random() < 0.3,
        of_sum=backward and r.random() < 0.5,
    )


def _blocks(r: Random, backward: bool) -> Case:
    """Packed tokens over blocks of paged keys."""
    requests = r.choice([0, *[1, 2, 3] * 4])
    shared = r.choice([1, 2, 3])
    return dict(
        rows=[r.choice([0, 1, 1, 2, 3, 17]) for _ in range(requests)],
        keys=[r.choice([0, 1, 2, 17, r.randint(3, 40), 65]) for _ in range(requests)],
        spare=r.randint(0, 2),
        shared=shared,
        n=shared * r.choice([1, 2, 12, 16]),
        d=r.choice([16, 24, 32, 64]),
        k=r.choice([1, 3, 5]),
        block=r.choice([1, 3, 4, 16, 48, 64]),
        page=r.choice([16, 48, 64]),
        own=r.random() < 0.5,
        counts=r.random() < 0.5,
        sinks=r.random() < 0.4,
        forced=r.choice([(0, 0), (0, 1), (1, 1), (0, 3)]),
    )


def _shared_kv(r: Random, backward: bool) -> Case:
    return _ragged(r, backward) | dict(
        m=r.choice([0, 1, 2, 3, 4, 16]),
        picked=r.random() < 0.5,
        window=r.choice([1, 2, 8, 17, 100]),
        entry_page=r.choice([1, 2, 8, 16, 48]),
        sinks=r.random() < 0.6,
        of_lse=backward and r.random() < 0.5,
    )


def _shared_kv_rows(r: Random, backward: bool) -> Case:
    return _shared_kv(r, backward) | dict(d=512, layouts=(r.choice(["BSND", "TND"]), "PA_BSND"))


def _kl_loss(r: Random, backward: bool) -> Case:
    return _ragged(r, backward) | dict(
        dr=r.choice([0, 16]), ni=r.choice([1, 4, 16]), di=r.choice([16, 32]), block=1
    )


def _loss(r: Random, backward: bool) -> Case:
    return dict(
        b=r.choice([0, *[1, 2] * 4]),
        n=r.randint(1, 5),
        s=r.choice([0, *[1, 2, 3, 5] * 2, 17]),
        s2=r.choice([0, 1, 9, 30, 70]),
        d=r.choice([16, 24, 64]),
        dr=r.choice([0, 16]),
        k=r.choice([1, 6, 20]),
        offset=r.randint(0, 9),
        lse=r.random() < 0.3,
    )


def _fused(r: Random, backward: bool) -> Case:
    return dict(
        b=r.choice([0, *[1, 2] * 4]),
        groups=r.randint(1, 3),
        hk=r.randint(1, 3),
        rows=[r.choice([0, 1, 2, 7, 33, 70]) for _ in range(r.randint(1, 3))],
        keys=[r.choice([0, 1, 2, 9, 40, 130]) for _ in range(3)],
        spare=r.randint(0, 2),
        packed=r.random() < 0.5,
        d=r.choice([16, 24, 64]),
        dv=r.choice([16, 32]),
        causal=r.random() < 0.5,
        window=r.choice([0, 0, 1, 5]),
    )


def _latent(r: Random, backward: bool) -> Case:
    return _ragged(r, backward) | dict(
        layouts=(r.choice(["BSND", "TND"]), "PA_BSND"),
        n=r.choice([1, 3, 4, 16, 20]),
        dr=r.choice([0, 16]),
        mode=r.choice([0, 3, 4]),
        window=r.choice([0, 1, 5, 16, 100]),
        turned=r.random() < 0.4,
        flat=r.random() < 0.5,
        sinks=r.random() < 0.3,
    )


def _lengths(r: Random) -> list[int]:
    """References take them token by token: beyond a chunk now and then."""
    sequences = r.choice([0, *[1, 2, 3] * 4])
    return [r.choice([0, 1, 2, 5, 9, r.choice([3, 17, 64, 70])]) for _ in range(sequences)]


def _often(r: Random, **shares: float) -> dict[str, bool]:
    """Which hold: each in so large a share of the cases."""
    return {name: r.random() < share for name, share in shares.items()}


def _chunks(r: Random, backward: bool) -> Case:
    return dict(
        lengths=_lengths(r),
        behind=r.randint(0, 3),
        n=r.randint(1, 3),
        groups=r.randint(1, 3),
        dk=r.choice([16, 24, 32]),
        dv=r.choice([8, 16, 40]),
        **_often(r, state=0.7, gates=0.8),
        rates=r.choice([0, 0, 1, 2]),
    )


def _sequences(r: Random) -> Case:
    return dict(lengths=_lengths(r), **_often(r, packed=0.7))


def _kda(r: Random, backward: bool) -> Case:
    return dict(
        **_sequences(r),
        h=r.randint(1, 2),
        groups=r.randint(1, 3),
        k=r.choice([16, 24, 32]),
        v=r.choice([8, 16, 40]),
        before=r.choice([0, 0, 2]),
        behind=r.randint(0, 2),
        state=r.random() < 0.7,
        layout=r.choice(["kv", "vk"]),
        gate=r.choice([GIVEN, SOFTPLUS, BOUNDED, PLAIN]),
        **_often(r, bias=0.5, norm=0.5),
        rates=r.choice([0, 0, 1, 2]),
    )


def _convolution(r: Random, backward: bool) -> Case:
    return dict(
        **_sequences(r),
        d=r.choice([1, 8, 40, 64]),
        w=r.randint(2, 4),
        before=r.choice([0, 0, 2]),
        behind=r.randint(0, 2),
        **_often(r, history=0.7, bias=0.5),
        activation=r.choice([None, "silu"]),
    )


def _step(r: Random, backward: bool) -> Case:
    packed = r.random() < 0.4
    requests = r.randint(1, 3)
    return dict(
        b=1 if packed else requests,
        t=r.randint(1, 4),
        lengths=[r.randint(0, 3) for _ in range(requests)] if packed else [],
        h=r.randint(1, 3),
        groups=r.randint(1, 3),
        k=r.choice([16, 24, 32]),
        v=r.choice([8, 16, 40]),
        slots=[*r.sample(range(6), requests)],
        idle=r.random() < 0.3,
        layout=r.choice(["kv", "vk"]),
        kda=r.random() < 0.4,
        norm=r.random() < 0.5,
        twice=r.random() < 0.3,
    )


def _layer_step(r: Random, backward: bool) -> Case:
    b, s = r.choice([0, *[1, 2, 3] * 4]), r.choice([1, 1, 2, 4])
    kda, tree = r.random() < 0.6, r.random() < 0.2
    return dict(
        b=b,
        s=s,
        n=r.randint(1, 3),
        groups=1 if kda and r.random() < 0.7 else r.randint(1, 3),
        k=r.choice([16, 24, 32]),
        v=r.choice([8, 16, 40]),
        w=r.randint(2, 4),
        room=r.choice([0, 0, 2]),
        layout=r.choice(["kv", "vk"]),
        slots=r.sample(range(6), b),
        idle=r.random() < 0.3,
        activation=r.choice(["silu", "swish", "sigmoid"]),
        bias=r.random() < 0.5,
        kept=r.sample(range(5), b) if tree or r.random() < 0.3 else None,
        parents=[[r.randint(-1, t) for t in range(s)] for _ in range(b)] if tree else None,
        kda=kda,
        flat=r.random() < 0.4,
        bound=r.choice([0, -0.5, -5.0]) if kda else 0,
        twice=r.random() < 0.3,
    )


def _compressor(r: Random, backward: bool) -> Case:
    """With `caches` in pages or in a ring, as far in as `start` says; some of them are absent."""
    requests = r.choice([0, *[1, 2, 3] * 4])
    pages = "none" if backward else r.choice(["none", "none", "fp8", "int8", "v4"])
    size = {"none": r.choice([2, 8, 24, 64]), "v4": 512}.get(pages, 128)
    return dict(
        lengths=[r.choice([0, 1, 1, 2, 5, r.randint(3, 20)]) for _ in range(requests)],
        start=r.choice([-2, 0, 0, 1, 7, r.randint(2, 40)]),
        spare=r.randint(0, 2),
        packed=r.random() < 0.4,
        h=r.choice([8, 24, 40]),
        d=size,
        dr=r.choice([0, 2, size]) if size < 64 else r.choice([0, 64]),
        ratio=r.choice([1, 2, 3, 4, 4, 9]),
        coff=r.choice([1, 2]),
        pairs=r.random() < 0.7,
        full=r.random() < 0.3,
        ring=r.random() < 0.5,
        room=r.randint(0, 9),
        page=r.choice([1, 2, 4, 5]),
        entry_page=r.choice([1, 2, 4, 16]),
        pages=pages,
        returned=r.random() < 0.8,
        hadamard=size & (size - 1) == 0 and r.random() < 0.4,
        holes=r.random() < 0.3,
        # of a call with a state alone
        gate=r.random() < 0.7,
        norm=r.random() < 0.7,
        layer_norm=r.random() < 0.3,
        rope=r.random() < 0.8,
        first=r.random() < 0.3,
    )


def _layer_v4(r: Random, backward: bool) -> Case:
    """All entries are chosen: no rounding swaps one."""
    requests, kind = r.choice([0, *[1, 2, 3] * 3]), r.choice(["sliding", "HCA", "CSA", "CSA"])
    steps = r.choice([1, 1, 2, 5, r.randint(1, 20)])
    nd, m = r.random() < 0.5, r.choice([1, 2, 3, 4, 4, 9])
    d = r.choice([8, 24, 32] if nd else [16, 32, 48])
    di = r.choice([16, 32, 48, 128])
    groups = r.randint(1, 3)
    return dict(
        kind=kind,
        starts=[r.choice([-2, 0, 1, r.randint(0, 27)]) for _ in range(requests)],
        s=steps,
        used=[r.randint(0, steps) for _ in range(requests)] if r.random() < 0.6 else None,
        m=m,
        entry_page=16 if m == 1 else r.choice([1, 2, 4, 16]),
        h=r.choice([40, 72] if nd else [48, 80]),
        ranks=r.choice([24, 40] if nd else [16, 48]),
        d=d,
        dr=r.choice([0, 2, 8]),
        index_heads=r.randint(1, 20) if nd else 16,
        di=di,
        groups=groups,
        n=groups * r.randint(1, 3),
        output=r.random() < 0.7,
        ring=r.random() < 0.6,
        window=r.choice([1, 5, 8, 16, 40]),
        holes=r.random() < 0.3,
        sinks=r.random() < 0.8,
        hadamard=di == 128 and kind == "CSA" and r.random() < 0.5,
        weights=r.choice(["nd", "linear"] if nd else ["nz", "linear"]),
        quant=r.choice([0, 0, 0, 1, 2, 4]) if nd else 0,
    )


def _sample(r: Random, backward: bool) -> Case:
    few, many = range(1, 8), r.choice([9, 17, 33, 70])
    return dict(b=r.choice([0, *[1, 2] * 6]), s=r.choice([0, *few, *few, many, many]))


def _latents(r: Random, backward: bool) -> Case:
    """Rows of DeepSeek-V4, or of either kind and order."""
    return _sample(r, backward) | dict(
        eight=r.choice(["v4", "v4", "int8", "fp8"]),
        page=16 * r.randint(1, 4),
        turned=r.random() < 0.5,
        power=r.random() < 0.5,
        clip=r.random() < 0.3,
        bare=r.random() < 0.3,
    )


def _streams(r: Random, backward: bool) -> Case:
    return _sample(r, backward) | dict(h=r.choice([1, r.randint(2, 300)]))


def _shared_row(r: Random, backward: bool) -> Case:
    return _sample(r, backward) | dict(
        n=r.randint(1, 20),
        d=r.choice([16, 48, 64]),
        dr=r.choice([0, 2, 8, 16]),
        di=r.choice([16, 48]),
        quant=r.choice([0, 0, 0, 1, 2, 4]),
    )


def _grouped(r: Random, backward: bool) -> Case:
    return _sample(r, backward) | dict(
        n=r.randint(1, 8),
        d=r.choice([16, 48, 64]),
        dr=r.choice([0, 2, 16]),
        groups=r.choice([1, 2, 5]),
        quant=r.choice([0, 0, 2, 4]),
    )


KIND = {
    "npu_sparse_attention_pto": "layer",
    "npu_sparse_attention_indices_pto": "layer",
    "npu_sparse_attention_shared_pto": "layer",
    "npu_mla_prolog_pto": "layer",
    "npu_indexer_prolog_pto": "layer",
    "npu_lightning_indexer": "indexer",
    "npu_lightning_indexer_scores": "indexer",
    "npu_quant_lightning_indexer": "indexer",
    "npu_quant_lightning_indexer_scores": "indexer",
    "npu_lightning_indexer_grad": "indexer",
    "npu_sparse_flash_attention": "attention",
    "npu_sparse_flash_attention_grad": "attention",
    "npu_sparse_attention_score": "blocks",
    "npu_block_indexer": "blocks",
    "npu_sparse_attn_sharedkv": "shared kv",
    "npu_sparse_attn_sharedkv_grad": "shared kv",
    "npu_kv_quant_sparse_attn_sharedkv": "shared kv rows",
    "npu_latent_cache_write": "latents",
    "npu_sparse_lightning_indexer_grad_kl_loss": "kl loss",
    "npu_indexer_loss": "loss",
    "npu_indexer_loss_backward": "loss",
    "npu_fused_attention": "fused",
    "npu_fused_attention_backward": "fused",
    "npu_fused_infer_attention_score_v2": "latent",
    "npu_fused_sigmoid_gating_delta_rule_update": "step",
    "npu_gated_delta_layer_decode": "layer step",
    "npu_chunk_gated_delta_rule": "chunks",
    "npu_chunk_gated_delta_rule_grad": "chunks",
    "npu_chunk_kda": "kda",
    "npu_chunk_kda_grad": "kda",
    "npu_causal_conv1d": "convolution",
    "npu_causal_conv1d_grad": "convolution",
    "npu_sparse_attention_v4_pto": "layer v4",
    "npu_compressor": "compressor",
    "npu_compressor_dense": "compressor",
    "npu_compressor_dense_grad": "compressor",
    "npu_hc_pre": "streams",
    "npu_hc_pre_grad": "streams",
    "npu_hc_post": "streams",
    "npu_hc_post_grad": "streams",
    "npu_hc_post_pre": "streams",
    "npu_sharedkv_prolog_pto": "shared row",
    "npu_grouped_o_proj_pto": "grouped",
}
_SIZES: dict[str, Callable[[Random, bool], Case]] = {
    "layer": _layer,
    "indexer": _indexer,
    "attention": _attention,
    "blocks": _blocks,
    "shared kv": _shared_kv,
    "shared kv rows": _shared_kv_rows,
    "latents": _latents,
    "kl loss": _kl_loss,
    "loss": _loss,
    "fused": _fused,
    "latent": _latent,
    "step": _step,
    "layer step": _layer_step,
    "chunks": _chunks,
    "kda": _kda,
    "convolution": _convolution,
    "compressor": _compressor,
    "streams": _streams,
    "shared row": _shared_row,
    "grouped": _grouped,
    "layer v4": _layer_v4,
    "sample": _sample,
}


# what kernels of a GPU are written for, in place of what was drawn
_WIDE: dict[str, Callable[[Random], Case]] = {
    "layer": lambda r: dict(
        h=128,
        ranks=128,
        n=r.choice([8, 16]),
        plain=r.choice([128, 192]),
        rank=512,
        rotary=64,
        index_heads=r.choice([32, 64]),
        index_size=128,
        weights=r.choice(["nz", "flat"]),
    ),
    "indexer": lambda r: dict(n=r.choice([32, 64]), d=128, k=r.choice([16, 64])),
    "attention": lambda r: dict(
        n=r.choice([8, 16, 64, 128]), d=512, dr=64, block=1, own_value=False
    ),
    "blocks": lambda r: dict(
        shared=2, n=r.choice([24, 32]), d=r.choice([128, 256]), page=128, block=r.choice([4, 128])
    ),
    "shared kv": lambda r: dict(n=r.choice([8, 16, 64, 128]), d=512, window=128),
    "shared kv rows": lambda r: dict(n=r.choice([8, 16, 64, 128]), window=128),
    "kl loss": lambda r: dict(n=r.choice([64, 128]), d=512, dr=64, ni=r.choice([32, 64]), di=128),
    "loss": lambda r: dict(n=r.choice([16, 64, 128]), d=r.choice([128, 512]), dr=64),
    "fused": lambda r: dict(
        rows=[r.choice([1, 130, 200]) for _ in range(2)],
        keys=[r.choice([9, 150]) for _ in range(3)],
        **dict.fromkeys(("d", "dv"), r.choice([64, 128, 256])),
    ),
    "latent": lambda r: dict(n=r.choice([8, 12, 16, 64, 96, 128]), d=512, dr=64, window=100),
    "step": lambda r: dict(k=128, v=128),
    "chunks": lambda r: dict(
        lengths=[r.choice([1, 64, 65, 130]), r.choice([0, 3, 16])], dk=128, dv=128
    ),
    "kda": lambda r: dict(
        lengths=[r.choice([1, 64, 65, 130]), r.choice([0, 3, 16])], packed=True, k=128, v=128
    ),
    "convolution": lambda r: dict(lengths=[r.choice([1, 64, 300]), r.choice([0, 3])], d=256),
    "compressor": lambda r: dict(
        h=256, d=512, dr=64, pages=r.choice(["none", "v4"]), ratio=r.choice([4, 128])
    ),
    "streams": lambda r: dict(h=64 * r.randint(8, 64)),
    "shared row": lambda r: dict(n=r.randint(4, 32), d=512, dr=64, di=128),
    "grouped": lambda r: dict(n=r.randint(4, 16), d=512, dr=64, groups=r.randint(1, 4)),
    "layer v4": lambda r: dict(
        h=128,
        ranks=128,
        d=512,
        dr=64,
        n=r.choice([8, 16]),
        groups=r.choice([1, 2]),
        index_heads=r.choice([32, 64]),
        di=128,
        window=40,
        weights="nz",
        quant=0,
    ),
}


# what kernels are compiled for: cases on a GPU share those of a few models, and what was compiled
COMPILED = {
    *("dtype", "layouts", "mode", "block", "own_value", "sinks", "lse", "packed", "causal"),
    *("window", "h", "hk", "groups", "n", "ni", "k", "v", "d", "dv", "dr", "di", "dk", "plain"),
    *(
        "rank",
        "ranks",
        "query_latent",
        "rotary",
        "index_heads",
        "index_size",
        "weights",
        "interleaved",
        "layout",
    ),
    *("ratio", "coff", "pairs", "full", "ring", "pages", "hadamard", "returned"),
    *("m", "picked", "entry_page", "kind", "output", "quant", "eight"),
    *("turned", "power", "clip", "bare", "shared", "page", "own", "counts", "forced"),
    *("kda", "bound", "norm", "twice", "state", "gates", "gate", "rates", "bias", "w", "history"),
    "activation",
}
_COMPILE_MOST = ("layer", "layer v4", "loss", "kda")
_SPOILED = 8  # ways to spoil the cases of a model: what runs in spite of it is compiled as well


def models(op: str, most: int) -> int:
    """Of `most`: cases whose numbers differ by a multiple of it share what is compiled."""
    return max(2, most // 2) if KIND.get(op) in _COMPILE_MOST else most


def draw(op: str, number: int, seed: int, dtypes: list[str], most: int = 0) -> Case:
    """Case `number` of a run; for a GPU, of `most` models, every other one wide.  An op that is not
    listed is called with its sample."""

    def drawn(number: int) -> Case:
        r = Random(f"{op} {seed} {number}")
        backward = op.endswith(("_grad", "_backward", "_kl_loss"))
        kind = KIND.get(op, "sample")
        sizes = _SIZES[kind](r, backward)
        disguises = [each for each in DISGUISES if r.random() < 0.5]
        case = dict(
            op=op, seed=r.randrange(2**31), dtype=r.choice(dtypes), disguises=disguises, **sizes
        )
        return case | _WIDE[kind](r) if most and number % 2 and kind in _WIDE else case

    case = drawn(number)
    if not most:
        return case
    count = models(op, most)
    model = drawn(number % count)
    # a kernel is compiled for dtypes and for alignment
    seen = {each: model if each in ("int64", "strided", "offset") else case for each in DISGUISES}
    return (
        case
        | {name: value for name, value in model.items() if name in COMPILED}
        | dict(disguises=[each for each, of in seen.items() if each in of["disguises"]])
        | dict(places=model["seed"], spoiling=model["seed"] + number // count % _SPOILED)
    )
