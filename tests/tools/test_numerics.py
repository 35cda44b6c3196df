# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""custom.bench.numerics: what it calls an error is one, ours and a peer's."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from custom.dispatch.registry import BY_NAME

from custom.bench import in_torch, numerics
from custom.bench.attention import case as attention_case
from custom.bench.presets import presets
from docs import numerics as page

CPU = torch.device("cpu")


def by_torch(arguments):
    return partial(in_torch.sparse_attention, **arguments)


def with_peers(case, **peers):
    return replace(case, peers=peers)


def test_a_rounding_is_an_error_and_a_mistake_a_larger_one(tmp_path, capsys, monkeypatch):
    case = presets("npu_sparse_flash_attention", "cpu")[1]
    half = lambda arguments: lambda: by_torch(arguments)() * 1.1  # noqa: E731
    other = lambda arguments: lambda: by_torch(arguments)()[..., :8]  # noqa: E731
    case = with_peers(case, torch=by_torch, wrong=half, elsewhere=other)
    row = numerics.errors(case, CPU)
    assert (row.exact, row.dtype) == ("float64", "bfloat16")
    assert 1e-4 < row.ours == row.reference < 4e-3  # roundings to bfloat16
    peers = numerics.unpacked(row.peers)
    assert peers.keys() == {"torch", "wrong"}
    assert peers["torch"] < 2e-2 < 0.09 < peers["wrong"] < 0.12
    written = tmp_path / "numerics_cpu.csv"
    numerics.write_rows(written, [row])
    monkeypatch.setattr(page, "FIGURES", tmp_path)
    (read,) = numerics.read_rows(written)
    assert read.ours == pytest.approx(row.ours, rel=1e-2)
    assert numerics.markdown(read) in page.errors() and row.date in page.errors()


def test_a_peer_that_gives_fewer_outputs():
    case = attention_case("npu_fused_attention", 1, 2, 2, 128, 128, 64)
    attend = torch.nn.functional.scaled_dot_product_attention
    sdpa = lambda x: partial(attend, x["q"], x["k"], x["v"], is_causal=True)  # noqa: E731
    row = numerics.errors(with_peers(case, sdpa=sdpa), CPU)
    assert numerics.unpacked(row.peers)["sdpa"] < 4e-3


def test_selections_are_compared_whatever_their_order():
    case = presets("npu_lightning_indexer", "cpu")[0]
    plain = lambda x: partial(in_torch.lightning_indexer, **x)  # noqa: E731
    row = numerics.errors(with_peers(case, torch=plain), CPU)
    assert numerics.unpacked(row.peers)["torch"] < 2e-2


def test_whole_numbers_have_no_error():
    assert numerics.errors(presets("npu_localize_indices", "cpu")[0], CPU) is None


def test_the_page_names_every_op_without_an_error():
    """Of the table of a CPU, where all ops run."""
    rows = numerics.read_rows(page.FIGURES / "numerics_cpu.csv")
    assert all(row.ours < 1e-2 for row in rows)
    said = (page.FIGURES.parent / "numerics.md").read_text().partition("<!-- errors: begin -->")[0]
    assert set(re.findall(r"`(npu_\w+)`", said)) == set(BY_NAME) - {row.op for row in rows}


@pytest.mark.parametrize("op", ["npu_mla_prolog_pto", "npu_kv_quant_sparse_flash_attention"])
def test_the_command(op, tmp_path, capsys):
    written = tmp_path / "rows.csv"
    arguments = [op, "--device", "cpu", "--most", "1", "--csv", str(written)]
    assert numerics.main(arguments) == 0
    (row,) = numerics.read_rows(written)
    assert row.op == op and row.exact == ("reference" if "quant" in op else "float64")
    assert f"| `{op}` |" in capsys.readouterr().out
