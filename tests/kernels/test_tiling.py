# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What fits into an Ascend core: pure functions, and the tile tables that ship (no Triton here)."""

from __future__ import annotations

import pytest
import torch
from custom.npu_ops.common import tiling, tune


def test_cores_of_the_machines():
    assert tiling.A3.cube_cores == 24
    assert tiling.A3.vector_cores == 48
    assert tiling.MACHINES["Ascend910B3"].vector_cores == 40
    assert {m.l0c for m in tiling.MACHINES.values()} == {128 * 1024}


@pytest.mark.parametrize(("size", "step", "wanted"), [(0, 16, 0), (1, 16, 16), (32, 32, 32)])
def test_up(size, step, wanted):
    assert tiling.up(size, step) == wanted


@pytest.mark.parametrize(
    ("tokens", "each", "wanted"), [(7, 2**28, 2), (7, 2**20, 7), (7, 2**40, 1)]
)
def test_rounds_fill_the_workspace(tokens, each, wanted):
    assert tiling.at_once(tokens, each) == wanted


def test_the_cube_unit_multiplies_16_bit_floats():
    x = torch.empty(1)
    assert tiling.not_multiplied(q=x.half()) is None is tiling.not_multiplied(q=x.bfloat16())
    assert "`q` is torch.float32" in (tiling.not_multiplied(q=x) or "")


def test_accumulators_are_whole_fractals():
    assert tiling.accumulator_bytes(1, 1) == 1024
    assert tiling.accumulator_bytes(64, 512) == 128 * 1024


@pytest.mark.parametrize("config", tune.TABLE["product.nz_products"], ids=str)
def test_shipped_products_fit(config):
    rows, panels, depth = (config.tiles[name] for name in ("ROWS", "PANELS", "DEPTH"))
    wide = config.tiles.get("WIDE", 16)  # 32 numbers of int8 lie where 16 of 16 bits do
    assert tiling.matmul_overflow(rows, wide * panels, depth * 16 // wide) is None


@pytest.mark.parametrize("config", tune.TABLE["sparse_flash_attention.weigh"], ids=str)
def test_shipped_scores_fit(config):
    heads, keys = config.tiles["HEAD_TILE"], config.tiles["KEY_TILE"]
    assert tiling.weigh_overflow(heads, keys, 512, 64) is None


@pytest.mark.parametrize("config", tune.TABLE["sparse_flash_attention.accumulate"], ids=str)
def test_shipped_sums_fit(config):
    heads, pieces = config.tiles["HEAD_TILE"], config.tiles["PIECES"]
    assert tiling.accumulate_overflow(heads, 512 // pieces) is None


@pytest.mark.parametrize(
    ("sentence", "memory"),
    [
        (tiling.weigh_overflow(256, 64, 512, 64), "L1"),
        (tiling.weigh_overflow(64, 64, 1024, 64), "L1"),
        (tiling.weigh_overflow(256, 256, 64, 0), "L0C"),
        (tiling.accumulate_overflow(128, 288), "L0C"),
    ],
)
def test_what_does_not_fit_says_where(sentence, memory):
    assert sentence is not None
    assert f"KiB of {memory}, Ascend910_9392 has" in sentence


def test_products_overflow():
    assert "L0C" in (tiling.matmul_overflow(256, 256, 16) or "")
    assert "L1" in (tiling.matmul_overflow(128, 128, 2048) or "")


def test_tables_name_every_configuration_once():
    for kernel, configs in tune.TABLE.items():
        names = [str(config) for config in configs]
        assert len(set(names)) == len(names), kernel


def test_choice_covers_or_takes_the_largest():
    assert tune.at_least("rows.rotate_heads", "HEAD_TILE", 9).tiles == {"HEAD_TILE": 16}
    assert tune.at_least("rows.rotate_heads", "HEAD_TILE", 128).tiles == {"HEAD_TILE": 32}
