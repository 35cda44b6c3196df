# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The mistakes of `make mutate`: what is planted, under which name, and that it is there."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import SimpleNamespace

import pytest

from ..mutate import changes, lines, reasons
from ..mutate.__main__ import chosen, read, recorded
from ..mutate.inside import sitecustomize

TEXT = '''
import torch

SIZE = 4
SHARED = gl.SwizzledSharedLayout(1, 2, 3, [1, 0])
Places = Callable[[int, str], dict[int, list[str]] | None]


@triton.jit
def kernel(x, y):
    helper(x, y)


@constexpr_function
def half(x):
    return x // 2


class Pages:
    def at(self, i, j):
        """Of a page."""
        c.require(i < j, f"{i + 1} is too far")
        if i and self.known:
            raise ValueError("known: 1 + 1")
        self.known = True
        return look(i, j, dtype=torch.int32, num_warps=4)
'''
PLACE = "dispatch/pages.py: Pages.at"
PLANTED = {
    "dispatch/pages.py: <module>: off by one: SIZE = 4 -> SIZE = 5",
    f'{PLACE}: off by one: c.require(i < j, f"{{i + 1}} is t -> c.require(i <= j, f"{{i + 1}} is t',
    f"{PLACE}: a check dropped: c.require(i < j, f'{{i + 1}} is too far') -> ",
    f"{PLACE}: a check dropped: if i and self.known: -> if False:",
    f"{PLACE}: a condition negated: if i and self.known: -> if not (i and self.known):",
    f"{PLACE}: and for or: if i and self.known: -> if i or self.known:",
    f"{PLACE}: a statement dropped: self.known = True -> ",
    f"{PLACE}: true for false: self.known = True -> self.known = False",
    f"{PLACE}: swapped: look(i, j, dtype=torch.int32, num_ -> look(j, i, dtype=torch.int32, num_",
    f"{PLACE}: another dtype: return look(i, j, dtype=torch.int32, num_warps=4) -> "
    "return look(i, j, dtype=torch.int64, num_warps=4)",
    f"{PLACE}: a keyword dropped: look(i, j, dtype=torch.int32, num_warps=4) -> "
    "look(i, j, num_warps=4)",
}


def titles(text):
    return {x.title for x in changes.Source("dispatch/pages.py", text).mutants}


def test_what_is_planted():
    """Neither in kernels nor in text; and numbers of warps change only the time."""
    assert titles(TEXT) == PLANTED


def test_names_outlive_changes_of_other_lines():
    moved = TEXT.replace("class Pages", "other = len\n\n\nclass Pages")
    assert titles(moved) == PLANTED
    keys = [
        [x.key for x in changes.Source("f.py", text).statements if x.function]
        for text in (TEXT, moved)
    ]
    assert keys[0] == keys[1]


def test_a_mistake_is_in_what_is_imported(tmp_path, monkeypatch):
    path = tmp_path / "planted_module.py"
    path.write_text("def beyond(i, n):\n    return i < n\n")
    of_file = changes.Source(str(path))
    (mutant,) = of_file.mutants
    plant = tmp_path / "plant"
    plant.write_text(json.dumps([os.path.realpath(path), of_file.planted(mutant)]))
    monkeypatch.setattr(SourceFileLoader, "get_code", SourceFileLoader.get_code)
    monkeypatch.setattr(Path, "read_text", Path.read_text)
    monkeypatch.syspath_prepend(tmp_path)
    sitecustomize.plant(str(plant))
    module = importlib.import_module("planted_module")
    monkeypatch.delitem(sys.modules, "planted_module")
    assert module.beyond(3, 3) and not module.beyond(4, 3)
    assert "i <= n" in path.read_text()


def test_every_mistake_compiles_on_as_many_lines():
    """A few of each kind."""
    some: dict[str, list] = {}
    for mutant in chosen(changes.mutants(), 5):
        some.setdefault(mutant.kind, []).append(mutant)
    for mutant in (x for of_kind in some.values() for x in of_kind[:4]):
        of_file = changes.source(mutant.file)
        text = of_file.planted(mutant)
        compile(text, mutant.file, "exec", dont_inherit=True)
        assert text != of_file.text and text.count("\n") == of_file.text.count("\n"), mutant.title


def test_a_draw_keeps_its_order_when_others_join():
    every = changes.source("dispatch/check.py").mutants
    few = every[::2]
    assert [x for x in chosen(every, 3) if x in few and x.kind == "swapped"] == [
        x for x in chosen(few, 3) if x.kind == "swapped"
    ]


def test_statements_of_a_trace_are_found(monkeypatch):
    """A test that starts others does not count beside them."""
    monkeypatch.setattr(lines, "files", lambda: ("f.py",))
    of_file = changes.Source("f.py", TEXT)
    monkeypatch.setattr(lines, "source", lambda file: of_file)
    ran, other = 4, 5
    run = ["tests/test_f.py::test_a", 0.5, "passed", [ran], [0]]
    failed = ["tests/test_f.py::test_b", 0.1, "failed", [ran], []]
    around = ["tests/test_f.py::test_under_the_interpreter", 9, "passed", [other], []]
    told = [
        dict(world={}, parent="", tests=[around, failed], rest=[0]),
        dict(world={"CUSTOM_BACKEND": "cuda"}, parent=around[0], tests=[run], rest=[0, ran]),
    ]
    found = lines._compact(told)
    assert found["tests"] == [[{"CUSTOM_BACKEND": "cuda"}, "tests/test_f.py::test_a", 0.5]]
    by_statement = [found["of"]["f.py"][x.key] for x in of_file.statements]
    assert by_statement[0] == [-1] and by_statement[ran] == [0, -1] and by_statement[other] == []
    assert found["of"]["f.py"]["read"] == [0]


def test_a_module_says_which_statements_ran():
    of_file = changes.Source("f.py", TEXT)
    told: list[int] = []
    checker = SimpleNamespace(require=lambda *_: None)
    triton = SimpleNamespace(jit=lambda function: function)
    space = dict(
        Callable=Callable,
        constexpr_function=lambda function: function,
        c=checker,
        gl=SimpleNamespace(SwizzledSharedLayout=lambda *_: None),
        triton=triton,
        look=lambda *_, **__: 7,
        say=told.append,
    )
    exec(of_file.telling("say", 100), space)
    pages = space["Pages"]()
    pages.known = False
    before = len(told)
    assert pages.at(1, 2) == 7
    ran = [of_file.statements[n - 100] for n in told[before:]]
    assert [x.function for x in ran] == ["Pages.at"] * 4


def test_reasons_and_verdicts_are_of_what_is_planted():
    every = {x.title: x for x in changes.mutants()}
    verdicts = read()
    used = {(x.place, word) for x in every.values() for word in reasons.words(x)}
    listed = {(place, word) for place, words in reasons.REASONS.items() for word, _ in words}
    assert not listed - used, "explained, but not planted"
    caught = [t for t, x in verdicts.items() if t in every and x.test and reasons.reason(every[t])]
    assert not caught, "explained, but noticed"


def test_tests_of_the_verdicts_are_collected(request):
    """Those of the files that this run collects in whole."""
    options = request.config.option
    part = options.keyword or options.markexpr or options.quick or options.device
    again = getattr(options, "lf", False)  # of pytest's cache, which may be switched off
    if part or again or any("::" in each for each in request.config.args):
        pytest.skip("files are collected in part")
    collected = {item.nodeid for item in request.session.items}
    files = {each.partition("::")[0] for each in collected}
    asked = {recorded(verdict.test).id for verdict in read().values() if verdict.test}
    gone = {each for each in asked if each.partition("::")[0] in files} - collected
    assert not gone, "`make mutate` asks tests that are not there any more"
