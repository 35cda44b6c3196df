# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Which check refuses which spoiled argument: those of tests/records/generated/refused.json."""

from __future__ import annotations

import pytest
import torch
from custom.dispatch import register
from custom.dispatch.check import Checker
from custom.dispatch.registry import BY_NAME

import custom

from ..support import limits, refused
from ..support.calls import every_spec
from ..support.samples import sample


@every_spec
def test_each_check_speaks_where_it_did(spec):
    """Without a check a wrong call runs, or another check speaks for it."""
    kept, now = refused.read().get(spec.name, {}), refused.refusals(spec)
    for name in kept.keys() | now.keys():
        meant = f"`{name}`; if that is meant: python -m tests.support.refused"
        assert now.get(name) == kept.get(name), meant


@every_spec
def test_launchers_say_no_where_they_did(spec):
    """To sizes and dtypes, before a kernel reads them; on a GPU that is not there."""
    pytest.importorskip("triton")
    meant = "if that is meant: python -m tests.support.limits"
    assert limits.limits(spec) == limits.read().get(spec.name, {}), meant


CPU = torch.device("cpu")


def checked(op: str, **changed: object) -> None:
    spec = BY_NAME[op]
    schema = register.overload(spec)._schema
    given = sample(op, CPU, torch.float16) | changed
    spec.check(**register.bind(schema, (), given))


def test_a_slot_beyond_the_pages_may_come_twice(monkeypatch):
    """It is written nowhere; the last one that there is may not."""
    monkeypatch.setattr(custom.config, "debug", True)
    op = "npu_latent_cache_write"
    given = sample(op, CPU, torch.float16)
    slots = given["rows"].shape[0] * given["rows"].shape[1]
    for last, fails in ((slots, False), (slots - 1, True)):
        twice = torch.full_like(given["slots"], -1)
        twice[:2] = last
        try:
            checked(op, slots=twice)
        except ValueError as error:
            assert fails and "names a slot twice" in str(error)
        else:
            assert not fails


def test_one_head_has_a_loss():
    query = sample("npu_indexer_loss", CPU, torch.float16)["query"]
    checked("npu_indexer_loss", query=query[:, :1])


@pytest.mark.parametrize(
    "sizes, noted",
    [
        ((8, 8, 4, 4), True),
        ((8, 8, 4, 3), True),
        ((8, 4, 4, 4), False),
        ((8, 8, 8, 8), False),
        ((8, 8, 4, 5), False),
        ((8, 8, 1, 1), False),
    ],
    ids=str,
)
def test_heads_in_the_place_of_tokens_are_noted(sizes, noted, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(custom.config, "debug", True)
    monkeypatch.setattr(Checker, "note", lambda self, *told: said.append(told[0]))
    heads, key_heads, rows, keys = sizes
    q, k = torch.zeros(1, heads, rows, 16), torch.zeros(1, key_heads, keys, 16)
    checked("npu_fused_attention", q=q, k=k, v=k)
    assert said == ["layout"] * noted
