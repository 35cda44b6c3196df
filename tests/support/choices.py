# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""How the CUDA launchers cut a call: each choice over the size that it depends on, on GPUs that are
not there.  The record has where it changes.

python -m tests.support.choices     write tests/records/generated/choices.json anew
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple, is_dataclass
from pathlib import Path
from typing import Any

import torch
from custom.cuda_ops.attention import fused_attention, fused_attention_backward
from custom.cuda_ops.attention.hopper import fused_attention as hopper_attention
from custom.cuda_ops.common import gpu, loss, tiling
from custom.cuda_ops.common.attention_tiles import Sizes, padded_size, width_of
from custom.cuda_ops.convolution import causal_conv1d, causal_conv1d_grad, causal_conv1d_update
from custom.cuda_ops.deepseek_v4 import sparse_attn_sharedkv_grad
from custom.cuda_ops.delta_rule import (
    chunk_gated_delta_rule,
    chunk_gated_delta_rule_grad,
    chunk_kda,
    fused_sigmoid_gating_delta_rule_update,
    gated_rms_norm,
)
from custom.cuda_ops.indexer import (
    block_indexer,
    indexer_loss,
    lightning_indexer,
    sparse_lightning_indexer_grad_kl_loss,
)
from custom.cuda_ops.indexer.hopper import lightning_indexer as hopper_indexer
from custom.cuda_ops.prolog import stages
from custom.cuda_ops.sparse_attention import (
    sparse_attention_score,
    sparse_flash_attention,
    sparse_flash_attention_grad,
)
from custom.cuda_ops.sparse_attention.hopper import mla_consumers, sparse_flash_attention_decode

from ..portability.gpus import GPUS, KIB
from .pretended_gpu import pretended

RECORD = Path(__file__).parents[1] / "records/generated/choices.json"
CPU = torch.device("cpu")
Choice = tuple[str, Callable[[int], Any], Iterable[int]]  # name, of a size, sizes

TOKENS = range(1, 420)
ROWS = [*range(1, 132), *range(132, 2100, 7)]
KEYS = sorted({2**n + d for n in range(4, 18) for d in (-1, 0, 1)})
SIZES = range(1, 300)
# DeepSeek-V3.2: columns of the products of x, of the queries, of one narrow product; their depth
PRODUCTS = {"x": ([1536, 576, 128, 64], 7168), "q": ([24576, 8192], 1536), "k": ([576], 512)}


def everywhere() -> Iterator[Choice]:
    """Choices that read the GPU at hand."""
    for name, (sizes, depth) in PRODUCTS.items():
        for each in (
            tiling.plain,
            tiling.hopper,
            tiling.whole_depth,
            tiling.quantized,
            tiling.hopper_quantized,
        ):
            of = lambda n, f=each, s=sizes, d=depth: f(n, s, d, _processors())  # noqa: E731
            yield f"tiling.{each.__name__}, {name}", of, TOKENS
    for size in (64, 128, 256):
        for batch, heads, group, keys in [(1, 16, 1, 8192), (2, 32, 8, 4096), (32, 8, 8, 300)]:

            def attention(n: int, b=batch, h=heads, g=group, k=keys, d=size) -> Any:  # type: ignore[no-untyped-def]
                found = Sizes(False, b, h, h // g, n, k)
                narrow = found.is_narrow(_processors())
                return fused_attention.tiling(found, d, _processors(), _shared()), narrow

            yield (
                f"attention {batch} x {heads} / {group}, D {size}",
                attention,
                [*range(1, 132), *range(132, 2100, 7)],
            )

    def over_keys(n: int) -> Any:
        found = (Sizes(False, 1, 8, 8, rows, n) for rows in (1, 100))
        return [fused_attention.tiling(x, 128, _processors(), _shared()) for x in found]

    yield "attention, keys", over_keys, KEYS
    yield (
        "attention's gradient",
        lambda n: fused_attention_backward.tiling(n, _shared(), gpu.has_tensor_memory(CPU)),
        (16, 32, 64, 128, 256),
    )
    for heads in (8, 16, 64, 128):
        for rank, rope, apart, bytes in [
            (512, 64, False, 2),
            (512, 64, True, 2),
            (576, 0, False, 2),
            (512, 64, False, 1),
            (1024, 64, False, 2),
            (128, 0, False, 4),
        ]:
            yield (
                f"sparse attention, {heads} heads, {rank} + {rope}, {bytes} bytes, {apart}",
                lambda n, a=(heads, 2048, rank, rope, apart, bytes): sparse_flash_attention.tiles(
                    n, *a, CPU
                ),
                [*range(1, 40), 63, 64, 65, 128, 256, 1000],
            )
    for group, size in ((1, 64), (12, 256), (16, 128), (64, 256)):
        yield (
            f"attention to blocks, {group} heads of {size}",
            lambda n, a=(group, 2048, size): sparse_attention_score.tiles(n, *a, CPU),
            [*range(1, 40), 63, 64, 65, 128, 256, 1000],
        )
        yield (
            f"attention to blocks on Hopper, {group} heads of {size}",
            lambda n, a=(group, 2052, size): sparse_attention_score.hopper_tiles(n, *a, CPU),
            [*range(1, 40), 63, 64, 65, 128, 256, 1000],
        )
    yield (
        "block indexer",
        lambda n: [
            block_indexer.tile_of(n, heads, 128, block, CPU)
            for heads in (1, 4, 24, 64)
            for block in (16, 128)
        ],
        ROWS,
    )
    yield (
        "sparse attention, entries",
        lambda n: [
            sparse_flash_attention.tiles(count, 64, n, 512, 64, False, 2, CPU, largest)
            for count in (1, 20)
            for largest in (32, 64)
        ],
        KEYS,
    )
    yield (
        "sparse attention's gradient",
        lambda n: [
            sparse_flash_attention_grad.choose(heads, n, bytes, apart, CPU)
            for heads in (16, 17, 64, 128)
            for apart in (False, True)
            for bytes in (2, 4)
        ],
        [16, 64, 128, 256, 512, 576, 1024],
    )
    yield (
        "sparse attention in splits",
        lambda n: [
            mla_consumers.splits_of(n, heads, entries, _processors())
            for heads in (16, 64, 65, 128)
            for entries in (255, 256, 2048, 8192)
        ],
        range(1, 160),
    )
    for heads in (8, 16, 64, 128):
        yield (
            f"scores of {heads} heads",
            lambda n, h=heads: [lightning_indexer.shape(n, h, dim, CPU) for dim in (64, 128, 256)],
            range(1, 6),
        )
        for lse in (False, True):
            yield (
                f"loss of {heads} heads, {lse}",
                lambda n, h=heads, e=lse: indexer_loss.tiles(h, loss.pieces(n, 64), e, CPU),
                [32, 128, 192, 256, 512, 576],
            )
        yield (
            f"loss and gradient of {heads} heads",
            lambda n, h=heads: [
                sparse_lightning_indexer_grad_kl_loss.tiles(h, loss.pieces(n, 64), ni, di, CPU)
                for ni, di in [(8, 64), (64, 128), (128, 256)]
            ],
            [32, 128, 192, 256, 512, 576],
        )
    for columns in (16, 64, 65, 128, 129, 256):
        yield (
            f"scores on Hopper, {columns} columns",
            lambda n, c=columns: [
                hopper_indexer._config(n, keys, c, _processors()) for keys in (128, 4096, 16384)
            ],
            range(1, 300),
        )
    for channels in (7, 512, 513, 8192):
        yield (
            f"convolution of {channels}",
            lambda n, c=channels: (
                causal_conv1d.tile(n, c, CPU),
                causal_conv1d_update.tile(n, c, CPU),
            ),
            [*range(1, 70), 512, 1000],
        )
        yield (
            f"convolution's gradient of {channels}",
            lambda n, c=channels: causal_conv1d_grad.tile(n, c, CPU),
            [2**n for n in range(18)],
        )
    yield (
        "walk of the delta rule",
        lambda n: (chunk_gated_delta_rule.walk_tiling(n, CPU), chunk_kda.walk_tiling(n, _shared())),
        (16, 32, 64, 128, 256),
    )


def alike() -> Iterator[Choice]:
    """Choices that are the same on every GPU."""
    yield "absorption", stages.absorb_tiling, TOKENS
    yield (
        "processors",
        lambda n: [
            tiling.hopper(tokens, [1536, 576], 7168, n) for tokens in (17, 40, 100, 129, 4096)
        ],
        range(20, 200, 5),
    )
    yield (
        "a product's columns",
        lambda n: [
            tiling.hopper(tokens, [64 * n], 7168, 132) for tokens in (8, 17, 33, 65, 128, 129, 4096)
        ],
        range(1, 300),
    )
    yield (
        "whole depth, columns",
        lambda n: [
            tiling.whole_depth(tokens, [64 * n], depth, 132)
            for tokens in (8, 64, 65, 128, 129, 256, 257)
            for depth in (64, 512)
        ],
        range(1, 100),
    )
    yield (
        "head sizes",
        lambda n: (
            width_of(n),
            padded_size(n),
            loss.parts(n),
            loss.padded(n),
            loss.pieces(n, n // 2),
        ),
        range(1, 70),
    )
    for rows in (1, 64, 1024, 1025):
        yield (
            f"attention on Hopper, {rows} rows",
            lambda n, r=rows: [hopper_attention._config(n, v, r) for v in (64, 128, 192, 256)],
            (64, 128, 192, 256),
        )
    yield (
        "sections of heads",
        lambda n: [
            hopper_attention._section(128, n, n, kv_len, outers, group, wanted, 132)
            for kv_len in (None, 100, n)
            for outers, group in ((16, 1), (64, 8))
            for wanted in (1, 5)
        ],
        range(128, 6000, 397),
    )
    yield (
        "work of the busiest",
        lambda n: round(hopper_attention._most([*range(1, n)], 6, 4, 7), 4),
        range(2, 12),
    )
    for heads in (8, 16, 17, 63, 64, 128):
        yield (
            f"decode on Hopper, {heads} heads",
            lambda n, h=heads: [
                sparse_flash_attention_decode._tile(n, h, entries) for entries in (64, 2048, 2049)
            ],
            range(1, 20),
        )
    yield (
        "walk of the delta rule's gradient",
        chunk_gated_delta_rule_grad.walk_tile,
        (16, 32, 64, 128, 256),
    )
    yield "norm", lambda n: gated_rms_norm.tile(n, 4096), range(1, 300)
    for layout in ("kv", "vk"):
        yield (
            f"states as {layout}",
            lambda n, x=layout: [
                fused_sigmoid_gating_delta_rule_update.tiles(x, half, v, k, n, tokens)
                for half in (False, True)
                for v in (12, 32, 128)
                for k in (16, 128, 256)
                for tokens in (1, 2)
            ],
            range(1, 300),
        )
    yield (
        "the state's columns",
        lambda n: [
            fused_sigmoid_gating_delta_rule_update.tiles(x, True, n, 128, 500, 1)
            for x in ("kv", "vk")
        ],
        SIZES,
    )
    yield "the smallest power of two", tiling.power_of_two, range(70)
    yield (
        "shared memory of sparse attention",
        lambda n: [
            sparse_flash_attention.shared_bytes(
                sparse_flash_attention.Tiles(n, 32, 4, 2, 512, right), rope, wgmma
            )
            for right in (0, 16)
            for rope in (0, 64)
            for wgmma in (False, True)
        ],
        (16, 32, 64),
    )
    yield (
        "shared memory of the gradient of V4's attention",
        lambda n: [sparse_attn_sharedkv_grad.shared_bytes(n, rank) for rank in (17, 512)],
        (16, 32),
    )
    yield (
        "shared memory of the loss",
        lambda n: [
            loss.shared_bytes(loss.Tiles(64, 32, n, 4), [512, 64], wgmma) for wgmma in (False, True)
        ],
        range(1, 4),
    )
    for size, tensor_memory in [(256, False), (256, True), (128, False)]:
        yield (
            f"attention's gradient, KiB, {size}, {tensor_memory}",
            lambda n, s=size, t=(tensor_memory): fused_attention_backward.tiling(s, n * KIB, t),
            range(90, 240),
        )
    few = Sizes(False, 64, 64, 64, 4096, 4096)
    yield "attention, KiB", lambda n: fused_attention.tiling(few, 256, 132, n * KIB), range(90, 240)
    yield "walk of KDA, KiB", lambda n: chunk_kda.walk_tiling(64, n * KIB), range(90, 240)


def _processors() -> int:
    return gpu.num_sms(CPU)


def _shared() -> int:
    return gpu.shared_memory(CPU)


def text(value: Any) -> str:
    if is_dataclass(value) and not isinstance(value, type):
        value = astuple(value)
    if isinstance(value, (list, tuple)):
        return f"({' '.join(map(text, value))})"
    if isinstance(value, dict):
        return text([*value.values()])
    return {"True": "T", "False": "F", "None": "-"}.get(str(value), str(value))


def changes(of: Callable[[int], Any], sizes: Iterable[int]) -> dict[str, str]:
    """Size -> what is chosen from there on."""
    found: dict[str, str] = {}
    last = None
    for size in sizes:
        here = text(of(size))
        if here != last:
            found[str(size)] = last = here
    return found


Choices = dict[str, dict[str, str]]


def chosen(place: str) -> Choices:
    """On a GPU, "sm_90"; on all of them, "any"."""
    if place == "any":
        return {name: changes(of, sizes) for name, of, sizes in alike()}
    with pretended(int(place.removeprefix("sm_"))):
        return {name: changes(of, sizes) for name, of, sizes in everywhere()}


PLACES = ["any", *(f"sm_{each}" for each in GPUS)]


def read() -> dict[str, Choices]:
    return json.loads(RECORD.read_text())


if __name__ == "__main__":
    parts = []
    for place in PLACES:
        rows = (f"  {json.dumps(name)}: {json.dumps(x)}" for name, x in chosen(place).items())
        parts.append(f" {json.dumps(place)}: {{\n" + ",\n".join(rows) + "\n }")
    RECORD.write_text("{\n" + ",\n".join(parts) + "\n}\n")
