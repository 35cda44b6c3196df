# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""custom.bench.models: what it times is the model's decode step, and a wrong one has no table."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from docs import tables

transformers = pytest.importorskip("transformers", minversion="5.17")

from custom.bench import models  # noqa: E402
from custom.bench.timing import Times  # noqa: E402
from custom.integrations import dsa  # noqa: E402

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_call(monkeypatch):
    """Rates do not matter here: each is of one call."""

    def once(calls, *_):
        calls[0]()
        return Times(1e6, 1e6, 1e6)

    monkeypatch.setattr(models, "measure", once)
    monkeypatch.setattr(models, "wall_clock", once)
    monkeypatch.setattr(models, "_timed", lambda call, device: once([call]))


def test_every_model_has_its_rows(tmp_path, capsys, monkeypatch):
    written = tmp_path / "models.csv"
    assert models.main(["--device", "cpu", "--batch", "1,3", "--csv", str(written)]) == 0
    rows = models.read_rows(written)
    assert [(row.model, row.b) for row in rows] == [
        (m.name, b) for m in models.MODELS for b in (1, 3)
    ]
    for row in rows:
        assert (row.decode, row.decode_unmodified, row.decode_captured) == (row.b, row.b, None)
        assert row.prefill == row.prefill_unmodified == models.SMALL_CONTEXT
        assert row.error and row.error < 2e-6 and row.gain == 1
    table = capsys.readouterr().out.splitlines()
    assert table == [*models.HEAD.splitlines(), *map(models.markdown, rows)]
    assert len({line.count("|") for line in table}) == 1
    monkeypatch.setattr(tables, "FIGURES", tmp_path)
    assert tables.models().endswith("\n".join(table) + "\n")


@pytest.mark.parametrize("name", ["GLM-5.2 (shared selections)", "Qwen3-Next"])
@torch.inference_mode()
def test_the_timed_step_is_the_one_after_the_context(name):
    """The same cached keys and the same step, by ours and by the model: the same logits; and the
    step repeats itself, since a graph will replay it."""
    model = next(each for each in models.MODELS if each.name == name).make(CPU)
    context, b = 40, 2
    caches = {
        "dynamic": transformers.DynamicCache(config=model.config),
        "static": transformers.StaticCache(config=model.config, max_cache_len=context),
    }
    for kind, cache in caches.items():
        step = models._step(model, b, context, cache)
        first = step()
        if "linear_attention" not in model.config.layer_types:  # a recurrence moves on
            torch.testing.assert_close(step(), first, rtol=0, atol=0)
        lengths = {layer.get_seq_length() for layer in cache.layers if hasattr(layer, "keys")}
        assert {int(each) for each in lengths} == {context}, kind
    if name == "Qwen3-Next":
        return
    # ours, whose pages are given the latents of a real text, against the model on that text
    ids = torch.randint(1, 128, (b, context - 1))
    wanted = model(torch.cat([ids, torch.ones(b, 1, dtype=ids.dtype)], 1)).logits[:, -1:]
    with models.use(page_size=16):
        cache = transformers.DynamicCache(config=model.config)
        model(ids, past_key_values=cache)
        pages = cache.layers[0].caches
        kept = [[x.clone() for x in layer if x is not None] for layer in pages.layers]
        again = transformers.DynamicCache(config=model.config)
        step = models._step(model, b, context, again)
        filled = again.layers[0].caches
        filled.block_table = pages.block_table
        for layer, pools in zip(filled.layers, kept, strict=True):
            for pool, held in zip((x for x in layer if x is not None), pools, strict=True):
                pool.copy_(held)
        torch.testing.assert_close(step(), wanted, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(step(), wanted, rtol=1e-5, atol=1e-5)


def test_a_wrong_model_has_no_table(capsys, monkeypatch):
    right = dsa.shared_of

    def wrong(*arguments):
        made = right(*arguments)
        return replace(made, uv=made.uv * 1.01)

    monkeypatch.setattr(dsa, "shared_of", wrong)
    assert models.main(["--device", "cpu", "--model", "GLM-5"]) == 1
    out = capsys.readouterr().out
    assert "WRONG" in out and "|" not in out


def test_what_the_unmodified_model_cannot_is_a_dash(capsys):
    def too_large():
        raise torch.OutOfMemoryError("out of memory\nand a long table")

    assert models._unless_impossible("prefill", too_large) is None
    assert capsys.readouterr().err == "  prefill: out of memory\n"
    row = partial(models.Row, "m", 1, 8, 32768, 4, "d", "t", 0.0, 9000.0, None, 400.0)
    line = models.markdown(row(100.0, 200.0))
    assert line.endswith("| **9,000** | - | **400** | 100 | 200 | 2.0 |")
    assert models.markdown(row(None, None)).endswith("| **400** | - | - | - |")
    assert "| 4 | 0.0e+00 | **9,000** |" in line
