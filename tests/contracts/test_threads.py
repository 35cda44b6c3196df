# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What the threads of a process share: counters, what was said once, replaced methods."""

from __future__ import annotations

import gc
import time
import weakref
from collections import Counter

import pytest
import torch
from custom.dispatch import log
from custom.dispatch.common.modes import Mode

from ..support.threads import at_once

THREADS = 8


class Slow(Counter):
    """Between what it gives and what is put back there is time for other threads."""

    def __getitem__(self, key):
        found = super().__getitem__(key)
        time.sleep(1e-4)
        return found

    def __contains__(self, key):
        found = super().__contains__(key)
        time.sleep(1e-4)
        return found

    def add(self, key):
        self.update([key])


def test_every_call_is_counted(monkeypatch):
    monkeypatch.setattr(log, "calls", Slow())

    def work(_):
        for _ in range(20):
            log.ran("an op", "reference", "a test's", {})

    at_once(THREADS, work)
    assert log.calls["an op", "reference"] == 20 * THREADS


def test_once_is_once(monkeypatch, capsys):
    monkeypatch.setattr(log, "_said", Slow())

    def work(_):
        for number in range(20):
            log.once((str(number),), "said")

    at_once(THREADS, work)
    assert capsys.readouterr().err.count("said") == 20


def test_the_models_are_replaced_once():
    """Two at once would take ours for theirs, and leave it."""
    pytest.importorskip("transformers", minversion="5.17")
    from custom.integrations import transformers

    classes = [*transformers.CONVENTIONS, *(each for each, _ in transformers._LINEAR)]
    theirs = [each.forward for each in classes]

    def work(_):
        try:
            with transformers.use():
                time.sleep(1e-3)
                return True
        except RuntimeError as error:
            assert "is in force already" in str(error)
            return False

    for _ in range(20):
        assert sum(at_once(THREADS, work)) >= 1
        assert [each.forward for each in classes] == theirs


def test_an_operator_that_threads_meet_first_stays_where_it_is():
    """torch remembers its address; a thread that makes it once more lets this one go."""
    x, seen = torch.ones(2, 2), []

    class Seeing(Mode):
        def called(self, func, args, kwargs):
            seen.append(weakref.ref(func))
            return func(*args, **kwargs)

    with Seeing():
        torch.geqrf(x)
    packet = torch.ops.aten.geqrf
    vars(packet).pop("default", None)
    gc.collect()
    assert seen[0]() is not None
    with Seeing():
        torch.geqrf(x)
    assert seen[1]() is seen[0]()
