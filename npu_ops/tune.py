# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Every tile configuration that ships, by kernel.  tests/ascend runs and compiles each of them.

`tiles` are constexpr arguments of the kernel, `options` are those of the Ascend compiler; each is
a constexpr parameter of its kernel as well, since triton-ascend 3.2.0 prints a warning at keywords
that are none, and takes it from there all the same.  A launcher takes the only configuration, the
one that covers its size, or searches the table itself.
Chosen by what compiles inside the memories with double buffering; none was timed on a device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Config:
    tiles: Mapping[str, int]
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        both = {**self.tiles, **self.options}
        return " ".join(f"{name}={value}" for name, value in both.items()) or "no tile"

    @property
    def keywords(self) -> dict[str, Any]:
        """What a launch takes."""
        return {**self.tiles, **self.options}


TABLE: dict[str, tuple[Config, ...]] = {
    # the last depth of each height takes what the others do not divide
    "product.nz_product": tuple(
        Config({"ROWS": rows, "PANELS": 4, "DEPTH": depth})
        for rows, depths in (
            (16, (512, 128)),
            (32, (512, 128)),
            (64, (512, 128)),
            (128, (256, 128)),
        )
        for depth in depths
    ),
    "product.nd_product": tuple(
        Config({"ROWS": rows, "COLUMNS": 128, "DEPTH": 128}) for rows in (16, 32, 64, 128)
    ),
    "rows.rms_norm": (Config({"WIDTH": 2048}), Config({"WIDTH": 6144})),
    "rows.latent_rows": (Config({"WIDTH": 512}), Config({"WIDTH": 6144})),
    "rows.index_rows": (Config({}),),
    "rows.rotate_heads": tuple(Config({"HEAD_TILE": heads}) for heads in (8, 16, 32)),
    # the key tile is a page of 128, or the largest of these that divides a page
    "lightning_indexer.scores": tuple(
        Config({"HEAD_TILE": heads, "KEY_TILE": keys})
        for keys in (128, 64, 32, 16)
        for heads in (16, 32, 64)
    ),
    "lightning_indexer.topk": (Config({"COUNT_TILE": 2048, "SORT_TILE": 1024}),),
    "lightning_indexer.values": (Config({"PIECE": 1024}),),
    "lightning_indexer_grad.spread": (Config({}),),
    "lightning_indexer_grad.grad_keys": tuple(
        Config({"HEAD_TILE": heads, "KEY_TILE": 128}) for heads in (16, 32, 64)
    ),
    "lightning_indexer_grad.grad_query": tuple(
        Config({"HEAD_TILE": heads, "KEY_TILE": 128}) for heads in (16, 32, 64)
    ),
    # one row of indices at a time, in pieces
    "sparse_flash_attention.resolve": (Config({"PIECE": 1024}),),
    # rows that are copied back to back
    "sparse_flash_attention.gather": (Config({"ROWS": 32}),),
    "sparse_flash_attention.attend": tuple(
        # two workspace buffers: with four, L1 overflows and double buffering is given up altogether
        Config({"HEAD_TILE": heads, "KEY_TILE": 64}, {"set_workspace_multibuffer": 2})
        for heads in (8, 16, 32)
    ),
    "sparse_flash_attention_grad.row_sums": (Config({"HEAD_TILE": 16}),),
    "sparse_flash_attention_grad.grad_query": tuple(
        Config({"HEAD_TILE": heads, "KEY_TILE": 64}, {"set_workspace_multibuffer": 2})
        for heads in (16, 32)
    ),
    "sparse_flash_attention_grad.grad_keys": tuple(
        Config({"HEAD_TILE": heads, "KEY_TILE": 32}, {"set_workspace_multibuffer": 2})
        for heads in (16, 32)
    ),
    # the widest that divides the value channels and fits UB next to the key channels
    "fused_sigmoid_gating_delta_rule_update.update": tuple(
        Config({"VALUE_TILE": channels}) for channels in (64, 32, 16)
    ),
    "chunk_gated_delta_rule.products": (Config({}),),
    # elimination in UB, which loads and stores little: nothing to gain from double buffering
    "chunk_gated_delta_rule.triangles": (Config({}, {"multibuffer": False}),),
    "chunk_gated_delta_rule.walk": tuple(
        Config({"VALUE_TILE": channels}) for channels in (64, 32, 16)
    ),
    "chunk_gated_delta_rule_grad.places": (Config({}),),
    "chunk_gated_delta_rule_grad.walk_states": tuple(
        Config({"VALUE_TILE": channels}) for channels in (64, 32, 16)
    ),
    "chunk_gated_delta_rule_grad.walk_grads": tuple(
        Config({"VALUE_TILE": channels}) for channels in (64, 32, 16)
    ),
    "chunk_gated_delta_rule_grad.crosses": tuple(
        Config({"VALUE_TILE": channels}) for channels in (64, 32, 16)
    ),
    "chunk_gated_delta_rule_grad.dots": (Config({"ROWS": 8}),),
    "chunk_gated_delta_rule_grad.pairs": (Config({"ROWS": 16}),),
    "chunk_gated_delta_rule_grad.inputs": tuple(
        Config({"KEY_TILE": channels}) for channels in (64, 32, 16)
    ),
    "chunk_gated_delta_rule_grad.gates": (Config({"HEAD_TILE": 16}),),
    # head sizes up to 64 (in sequences of one length), 128, 256; square tiles are not shared by
    # the vector units
    "fused_attention.attend": tuple(
        Config({"Q_TILE": rows, "KEY_TILE": keys}) for rows, keys in ((64, 96), (32, 128), (32, 64))
    ),
    "fused_attention_backward.row_sums": (Config({"ROWS": 32}),),
    # both accumulators, S and P's gradient share L0C
    "fused_attention_backward.grad_keys": (
        Config({"Q_TILE": 128, "KEY_TILE": 64}, {"set_workspace_multibuffer": 4}),
        Config({"Q_TILE": 64, "KEY_TILE": 64}, {"set_workspace_multibuffer": 4}),
        Config({"Q_TILE": 64, "KEY_TILE": 32}, {"set_workspace_multibuffer": 2}),
    ),
    # one square tile for every head size: others are not shared by the vector units
    "fused_attention_backward.grad_query": (Config({"Q_TILE": 64, "KEY_TILE": 64}),),
    "indexer_loss.gather": (Config({"ROWS": 32}),),
    "indexer_loss.log_sums": tuple(
        Config({"HEAD_TILE": heads, "KEY_TILE": 128}) for heads in (16, 64)
    ),
    "indexer_loss.head_sums": tuple(
        Config({"HEAD_TILE": heads, "KEY_TILE": 128}) for heads in (16, 64)
    ),
    "indexer_loss.row_loss": (Config({"WIDTH": 512}), Config({"WIDTH": 2048})),
    "indexer_loss_backward.row_grad": (Config({"WIDTH": 512}), Config({"WIDTH": 2048})),
    "sparse_lightning_indexer_grad_kl_loss.targets": tuple(
        Config({"HEAD_TILE": heads, "KEY_TILE": 128}) for heads in (16, 64)
    ),
    "sparse_lightning_indexer_grad_kl_loss.scores": tuple(
        Config({"HEAD_TILE": heads, "KEY_TILE": 128}) for heads in (16, 64)
    ),
    "sparse_lightning_indexer_grad_kl_loss.row_loss": (
        Config({"WIDTH": 512}),
        Config({"WIDTH": 2048}),
    ),
}


def only(kernel: str) -> Config:
    """The configuration of a kernel that has one."""
    (config,) = TABLE[kernel]
    return config


def at_least(kernel: str, name: str, size: int) -> Config:
    """The first configuration whose tile `name` covers `size`, or the last one."""
    found = TABLE[kernel]
    return next((config for config in found if config.tiles[name] >= size), found[-1])
