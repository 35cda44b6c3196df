# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The survey counts what it says, and its figures stay where they are or fall."""

from __future__ import annotations

import importlib.util

import pytest

from . import survey

# of a first call and of a repeated one; the function of the last has a body of its own
GOAL = 7, 4
FRAMES = {
    "npu_merge_states": GOAL,
    "npu_lightning_indexer": GOAL,
    "npu_sparse_flash_attention": GOAL,
    "npu_chunk_kda": GOAL,
    "npu_causal_conv1d": GOAL,
    "npu_mla_prolog_pto": (8, 4),  # built of stages
    "npu_sparse_attention_pto": (9, 4),
    "npu_fused_attention": (7, 5),
}


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_a_call_has_few_frames():
    found = survey.frames(FRAMES)
    deeper = {
        op: now
        for op, now in found.items()
        if any(n > most for n, most in zip(now, FRAMES[op], strict=True))
    }
    assert not deeper
    assert all(min(now) > 2 for now in found.values())  # launches were seen


def test_a_new_op_needs_no_more_files():
    assert 8 <= survey.files_by_hand() <= 17


RUN = "\n".join(f"total_{i} = first_{i} + second[{i}] * third(fourth)" for i in range(6)) + "\n"
FEW = RUN.rpartition("total_5")[0]


@pytest.mark.parametrize(
    ("a", "b", "pairs"),
    [
        (RUN, RUN, 1),
        (RUN, RUN.replace("total", "sum"), 1),
        (RUN, RUN.replace("*", "-"), 0),
        (RUN, FEW, 0),
        (RUN, "# a comment\n\n".join(RUN.splitlines(keepends=True)), 1),
        ("x = 1\n" * 6, "y = 1\n" * 6, 0),
        ("from x import y\n" * 6, "from x import y\n" * 6, 0),
    ],
    ids=["same", "shape", "other", "five lines", "comments", "few words", "imports"],
)
def test_pairs_share_six_lines(a, b, pairs):
    assert len(survey.pairs({"a.py": a, "b.py": b})) == pairs


def test_a_file_may_repeat_itself():
    assert list(survey.pairs({"a.py": RUN + "between = 1\n" + RUN})) == [("a.py", "a.py")]
    assert not survey.pairs({"a.py": RUN})


def test_what_stands_everywhere_is_no_pair():
    assert len(survey.pairs({f"{i}.py": RUN for i in range(8)})) == 28
    assert not survey.pairs({f"{i}.py": RUN for i in range(9)})


def test_pairs_of_signatures_are_told():
    arguments = "".join(f"    name_{i}: Tensor,\n" for i in range(6))
    text = f"def f(\n{arguments}) -> None:\n    pass\n"
    [shared] = survey.pairs({"a.py": text, "b.py": text}).values()
    assert shared.runs == shared.signatures > 0


def test_statements_are_counted_without_signatures_and_docstrings():
    text = 'def f(x: int = 1 + 1) -> int:\n    """Said."""\n    return x\n'
    assert survey.statements({"a.py": text}) == 2
    assert survey.nodes({"a.py": text}) == 5  # module, function, return, name and its context


def test_the_tree_of_today_has_its_ops():
    from custom.dispatch.registry import SPECS

    assert survey.ops(survey.tree()) == {spec.name for spec in SPECS}


def test_few_frames_are_between_a_user_and_triton():
    from custom.dispatch.registry import SPECS

    found = survey.frames(spec.name for spec in SPECS)
    over = {op: calls for op, calls in found.items() if calls[0] > 7 or calls[1] > 4}
    assert not over
