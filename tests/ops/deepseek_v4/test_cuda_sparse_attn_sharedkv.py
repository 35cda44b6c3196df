# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Attention over window rows and entries by the kernels for Hopper, against a loop over query
tokens in float64: both kernels, every layout, parts of a row.  Without a GPU the same kernels run
on CPU tensors (support/gluon_on_cpu.py)."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
from torch import Tensor

from ...support.kernels import DEVICE, ON_GPU, skip_unless_gluon_of_hopper
from ...support.shared_kv import Problem, packed, unpacked
from ...support.stages import assert_near, called, launched

skip_unless_gluon_of_hopper()

FAMILY = "custom.cuda_ops.deepseek_v4.hopper."
many, few, bytes_, places, packed_rows = (
    import_module(FAMILY + name)
    for name in (
        "sparse_attn_sharedkv",
        "sparse_attn_sharedkv_decode",
        "kv_quant_sparse_attn_sharedkv",
        "places",
        "packed_rows",
    )
)
sharedkv = import_module("custom.cuda_ops.common.sharedkv")
ERROR = {torch.bfloat16: 3e-3, torch.float16: 5e-4}
SHORT = [(2, 61), (0, 37), (3, 2), (1, 24), (0, 0)]
LONG = [(1, 2600), (1, 130), (2, 0), (1, 777)]
CASES = {
    "sliding": (dict(m=0, heads=5), ("BSND", "PA_ND")),
    "sliding, packed": (dict(m=0, heads=64, sinks=False), ("TND", "TND")),
    "HCA": (dict(m=8, heads=17), ("BSND", "BSND")),
    "HCA, packed": (dict(m=8, heads=8), ("TND", "PA_ND")),
    "CSA": (dict(m=4, count=5, heads=16), ("BSND", "PA_ND")),
    "CSA, packed": (dict(m=4, count=5, heads=70), ("TND", "TND")),
    "CSA, dense": (dict(m=4, count=9, heads=3, scale=0.3), ("BSND", "BSND")),
    "long HCA": (dict(requests=LONG, m=4, window=200, heads=6), ("BSND", "PA_ND")),
    "long CSA": (dict(requests=LONG, m=3, count=400, window=70, heads=4), ("TND", "PA_ND")),
}
# 0: the kernel of many rows; else keys of a program of the one for few
TILES = (0, 32, 64, 128)


@pytest.fixture
def ran(monkeypatch):
    """The launches of both kernels, as 0 and the tile."""
    found = []
    launch, launch_few = many.launch, few.launch
    monkeypatch.setattr(many, "launch", lambda *x: (found.append(0), launch(*x)))
    monkeypatch.setattr(few, "launch", lambda *x: (found.append(few._tile()), launch_few(*x)))
    if not ON_GPU:
        from ...support.gluon_on_cpu import stand_in

        names = (
            "common.rows", "common.hopper.rows", "common.combine", "common.softmax",
            "common.sharedkv", "deepseek_v4.hopper.places",
            "sparse_attention.hopper.mla_consumers", "sparse_attention.hopper.mla_parts",
        )  # fmt: skip
        monkeypatch.setattr("custom.cuda_ops.common.gpu.capability", lambda device: (9, 0))
        monkeypatch.setattr("custom.cuda_ops.common.gpu.num_sms", lambda device: 9)
        monkeypatch.setattr(packed_rows, "floats_of", as_e4m3)
        monkeypatch.setattr(packed_rows, "scaled", as_scaled)
        monkeypatch.setattr(packed_rows, "two_bytes", lambda words: words.to_two_bytes())
        stand_in(
            monkeypatch,
            many,
            few,
            bytes_,
            packed_rows,
            *(import_module(f"custom.cuda_ops.{x}") for x in names),
        )
    return found


def as_e4m3(words: Tensor) -> list[Tensor]:
    """What it says in PTX."""
    parts = words.view(torch.uint8).view(*words.shape, 4).view(torch.float8_e4m3fn)
    return [*parts.float().unbind(-1)]


def as_scaled(words: Tensor, by: Tensor) -> list[Tensor]:
    """The same, of bfloat16 times pairs of it."""
    by = by.contiguous().view(torch.bfloat16)[..., ::2]
    return [(x.bfloat16() * by).view(torch.int16) for x in as_e4m3(words)]


def solve(problem: Problem, layouts: tuple[str, str], dtype: torch.dtype, slots: bool = False):
    """(out, lse), against the loop and its padding."""
    given = problem.rounded_to(dtype).arguments(layouts, DEVICE, dtype)
    total = sum(problem.used)
    if slots:
        for name in ("q", "cmp_sparse_indices"):
            given[name] = given[name][:total]
        given = problem.in_slots(given)
    out, lse = launched("sparse_attn_sharedkv", **given)
    if slots:
        got, got_lse = out.cpu(), lse[0].cpu()
    else:
        got, padding = problem.unpack(out, layouts[0])
        got_lse, no_lse = problem.unpack(lse.squeeze(-3), layouts[0])
        assert (padding == 0).all() and (no_lse == -torch.inf).all()
    want, want_lse = problem.solved()
    assert_near("out", got, want, ERROR[dtype])
    assert_near("lse", got_lse, want_lse, 1e-5)
    return given, out, lse


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("case", CASES)
def test_against_a_loop(case, tile, ran, monkeypatch):
    turn = list(CASES).index(case)
    if not ON_GPU and tile and tile != TILES[1 + turn % 3]:
        pytest.skip("a tile a case, without a GPU")
    monkeypatch.setattr(few, "_tile", lambda *x: tile)
    sizes, layouts = CASES[case]
    solve(
        Problem(**dict(requests=SHORT, size=512, seed=turn) | sizes), layouts, list(ERROR)[turn % 2]
    )
    assert ran == [tile]


@pytest.mark.parametrize("tile", [0, 32])
def test_slots(tile, ran, monkeypatch):
    monkeypatch.setattr(few, "_tile", lambda *x: tile)
    solve(Problem(SHORT, size=512, count=5), ("TND", "PA_ND"), torch.float16, slots=True)
    assert ran == [tile]


@pytest.mark.parametrize("splits", [1, 4, 8])
def test_parts_of_a_row(splits, ran, monkeypatch):
    """More parts than steps as well."""
    monkeypatch.setattr(few, "_tile", lambda *x: 0)
    monkeypatch.setattr(places, "splits_of", lambda *x: splits)
    solve(Problem(LONG[1:], size=512, m=8, window=130, heads=3), ("BSND", "PA_ND"), torch.bfloat16)


@pytest.mark.parametrize("tile", [0, 32])
def test_a_query_that_is_no_number(tile, ran, monkeypatch):
    """A NaN stays one, in its head alone."""
    monkeypatch.setattr(few, "_tile", lambda *x: tile)
    problem = Problem([(2, 50)], size=512, heads=4)
    given, right, _ = solve(problem, ("BSND", "PA_ND"), torch.bfloat16)
    q = given["q"].clone()
    q[:, :, 2, 7] = torch.nan
    out, lse = launched("sparse_attn_sharedkv", **given | dict(q=q))
    seen = right.abs().sum(-1) > 0
    wrong = torch.zeros_like(seen)
    wrong[:, :, 2] = seen[:, :, 2]
    assert wrong.any() and out[wrong].isnan().all() and lse.squeeze(-3)[wrong].isnan().all()
    assert torch.equal(out[~wrong], right[~wrong])


@pytest.mark.parametrize("sink", [-torch.inf, 1e4, torch.inf])
@pytest.mark.parametrize("tile", [0, 32])
def test_sinks_of_any_size(tile, sink, ran, monkeypatch):
    monkeypatch.setattr(few, "_tile", lambda *x: tile)
    given = Problem([(1, 50)], size=512, heads=4).rounded_to(torch.bfloat16)
    given = given.arguments(("BSND", "PA_ND"), DEVICE, torch.bfloat16)
    sinks = torch.full_like(given["sinks"], sink)
    out, lse = launched("sparse_attn_sharedkv", **given | dict(sinks=sinks))
    without, same = launched("sparse_attn_sharedkv", **given | dict(sinks=None))
    assert torch.equal(lse, same) and lse[..., 0, :].isfinite().all()
    assert torch.equal(out, without if sink < 0 else torch.zeros_like(out))


def apart(rows: Tensor, pages: int, inner: int) -> Tensor:
    """The same pages with room behind each of them and behind each row, NaN there."""
    count, page, _, size = rows.shape
    room = rows.new_full((count, (page + pages) * (size + inner)), torch.nan)
    strides = (room.stride(0), size + inner, size, 1)
    return room.as_strided(rows.shape, strides).copy_(rows)


@pytest.mark.parametrize(
    ("pages", "inner", "taken"), [(3, 0, True), (0, 16, True), (1, 48, True), (0, 8, False)]
)
def test_rows_apart(pages, inner, taken, ran, monkeypatch):
    """Steps of 16 elements from key to key are what the kernels take."""
    monkeypatch.setattr(few, "_tile", lambda *x: 0)
    problem = Problem([(2, 50)], size=512, heads=4).rounded_to(torch.bfloat16)
    given = problem.arguments(("BSND", "PA_ND"), DEVICE, torch.bfloat16)
    given["ori_kv"] = apart(given["ori_kv"], pages, inner)
    if not taken:
        q = given["q"].flatten(0, 1)
        call = sharedkv.Attention(q, given["ori_kv"], given["cmp_kv"], None, None, q, q, 1.0)
        assert not many.supports(call)
        return
    out, _ = launched("sparse_attn_sharedkv", **given)
    assert ran == [0]
    assert_near("out", problem.unpack(out, "BSND")[0], problem.solved()[0], ERROR[out.dtype])


def test_units_of_places():
    """Places are 32 bits of the widest unit; without one that numbers all rows another kernel is
    taken."""

    def rows(pages: int, page: int, outer: int, inner: int) -> Tensor:
        return torch.empty_strided((pages, page, 1, 512), (outer, inner, inner, 1), device="meta")

    assert places.unit(rows(4, 64, 64 * 512, 512), None) == 512
    assert places.unit(rows(4, 64, 64 * 512 + 16, 512), None) == 16
    assert places.unit(rows(4, 64, 64 * 512, 512), rows(4, 2, 1040, 520)) == 8
    assert places.unit(rows(2**20, 64, 2**20, 512), None) == 512
    assert places.unit(rows(2**20, 64, 2**20 + 16, 512), None) == 0


def test_few_rows_are_taken_by_their_kernel(ran):
    """One row of 64 heads, 640 keys; not 128 of them."""
    from custom.cuda_ops.common import sharedkv

    def keys(count: int, near: int, far: int) -> sharedkv.Keys:
        return sharedkv.Keys(count, near, far, {}, (), None, {}, None)

    assert few._tile(keys(1, 128, 512), 64, 132) > 0
    assert few._tile(keys(128, 128, 512), 64, 132) == 0


def test_the_loop_is_the_reference():
    """The problem's loop and the reference in float64 agree, so that either may judge."""
    problem = Problem(LONG[:2], size=512, m=4, window=200, heads=2)
    given = problem.arguments(("BSND", "PA_ND"), torch.device("cpu"))
    out, _ = called("dispatch.reference", "sparse_attn_sharedkv", **given)
    assert_near("out", problem.unpack(out, "BSND")[0], problem.solved()[0], 1e-12)


@pytest.mark.parametrize("tile", [0, 32, 128])
@pytest.mark.parametrize("case", ["sliding", "HCA, packed", "CSA", "long HCA"])
def test_quantized_rows_give_the_bits_of_the_rows_they_stand_for(case, tile, ran, monkeypatch):
    """Pages of whole 64 bytes and of 16."""
    turn = list(CASES).index(case)
    if not ON_GPU and tile and (case == "long HCA" or tile != TILES[1 + 2 * (turn % 2)]):
        pytest.skip("a tile a case, without a GPU")
    monkeypatch.setattr(few, "_tile", lambda *x: tile)
    monkeypatch.setattr(few, "supports", lambda *x: tile > 0)
    found, launch = [], bytes_.launch
    monkeypatch.setattr(bytes_, "launch", lambda *x: (found.append(0), launch(*x)))
    sizes, layouts = CASES[case]
    dtype = list(ERROR)[turn % 2]
    problem = Problem(**dict(requests=SHORT, size=512, seed=turn) | sizes).rounded_to(dtype)
    given = problem.arguments(layouts, DEVICE, dtype)
    names = [name for name in ("ori_kv", "cmp_kv") if name in given]
    rows = {name: packed(given[name], 16 * turn) for name in names}
    got = launched("kv_quant_sparse_attn_sharedkv", kv_quant_mode=1, **given | rows)
    assert (found, ran) == (([0], []) if tile == 0 else ([], [tile]))
    wide = {name: unpacked(rows[name], dtype) for name in names}
    want = launched("sparse_attn_sharedkv", **given | wide)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    assert not got[0].isnan().any() and got[0].any()
