# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The table op x graph mode x how far checked, from the records that the tests wrote.

pytest --record-graph tests/records/graph/NAME.json    writes a record: which tests passed
tests/torchair/run.sh --record tests/records/graph     writes those of torchair
python -m docs.tables                                  puts the tables into docs/graph_mode.md

A cell counts the recorded tests that bear the op's name.  A test that was skipped, renamed or never
run is in no record, and its cell says so.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from custom.dispatch import backends
from custom.dispatch.registry import SPECS, Spec

from . import op_table

ROOT = Path(__file__).parent.parent
RECORDS = ROOT / "tests" / "records" / "graph"


@dataclass(frozen=True)
class Mode:
    """A column.  `tests` and `refusals` are parametrised by op, `every` check all ops of their day
    at once, `steps` check a decode step."""

    title: str
    record: str
    tests: tuple[str, ...] = ()
    steps: tuple[str, ...] = ()
    refusals: tuple[str, ...] = ()
    applies: Callable[[Spec], bool] = lambda spec: True
    every: tuple[str, ...] = ()


_COMPILE, _CAPTURE = "tests/graphs/test_compile.py::", "tests/graphs/test_graph_mode.py::"
_ONNX, _GRAPH, _GE = (
    "tests/graphs/test_onnx.py::",
    "tests/torchair/graph_checks.py::",
    "tests/torchair/ge_checks.py::",
)
_ALONE = f"{_COMPILE}test_compiled_graph_is_the_op_alone_for_every_size"
_STEP = f"{_COMPILE}test_decode_step_compiles_once_for_every_length"
_BACKWARD = f"{_COMPILE}test_backward_under_compile"
_PACKAGE = f"{_COMPILE}test_package_of_aotinductor_equals_eager_for_every_op"
_DIRECT = f"{_GRAPH}test_op_is_called_directly_and_captured_once"
_WHOLE = f"{_GRAPH}test_whole_decode_step_is_captured_once"
_REFUSED = f"{_GE}test_an_op_without_a_form_names_npugraph_ex"


def _trained(spec: Spec) -> bool:
    return spec.differentiable


CPU_AND_CUDA = (
    Mode("compile, CPU", "cpu", (_ALONE,), (_STEP,)),
    Mode("compile, CUDA", "cuda", (_ALONE,), (_STEP,)),
    Mode("backward, CPU", "cpu", (_BACKWARD,), applies=_trained),
    Mode("backward, CUDA", "cuda", (_BACKWARD,), applies=_trained),
    Mode("export", "cpu", (f"{_COMPILE}test_export_is_saved_and_loaded",)),
    Mode("AOTInductor, CPU", "cpu", every=(_PACKAGE,)),
    Mode("AOTInductor, CUDA", "cuda", every=(_PACKAGE,)),
    Mode(
        "reduce-overhead, CUDA",
        "cuda",
        (f"{_COMPILE}test_reduce_overhead_replays_with_other_lengths",),
        (f"{_COMPILE}test_reduce_overhead_of_the_decode_step",),
    ),
    Mode(
        "capture, CUDA",
        "cuda",
        (f"{_CAPTURE}test_replay_with_other_values_and_lengths",),
        (f"{_CAPTURE}test_capture_of_a_decode_step_serves_every_length",),
    ),
)
ASCEND_AND_ONNX = (
    Mode("npugraph_ex, stand-ins", "npugraph_ex", (_DIRECT,), (_WHOLE,)),
    Mode("torchair reduce-overhead, stand-ins", "reduce-overhead", (_DIRECT,), (_WHOLE,)),
    Mode(
        "GE, conversion",
        "ge",
        (
            f"{_GE}test_becomes_cann_s_operator",
            f"{_GE}test_attention_becomes_cann_s",
            f"{_GE}test_attention_over_rows_and_entries_becomes_cann_s",
            f"{_GE}test_attention_to_latents_becomes_cann_s",
        ),
        refusals=(_REFUSED,),
    ),
    Mode(
        "dynamo_export, serialised",
        "ge",
        (f"{_GE}test_dynamo_export_writes_the_serialised_graph",),
        refusals=(_REFUSED,),
    ),
    Mode(
        "ONNX, CPU",
        "cpu",
        (
            f"{_ONNX}test_onnxruntime_equals_eager_with_another_batch_and_length",
            f"{_ONNX}test_is_one_node_with_the_schema_s_inputs_and_attributes",
        ),
        (f"{_ONNX}test_decode_step_runs_in_onnxruntime",),
        (f"{_ONNX}test_an_op_without_a_form_says_why",),
    ),
)
MODES = (*CPU_AND_CUDA, *ASCEND_AND_ONNX)
RECORDED = {
    name for mode in MODES for name in (*mode.tests, *mode.every, *mode.steps, *mode.refusals)
}


def records(folder: Path = RECORDS) -> dict[str, dict[str, Any]]:
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def passed(found: dict[str, dict[str, Any]], record: str, test: str, op: str | None) -> int:
    """How many parametrisations of `test` are in the record; those of `op`, if it is given."""
    ids = found.get(record, {}).get("passed", [])
    of_test = [each for each in ids if each.partition("[")[0] == test]
    if op is None:
        return len(of_test)
    return sum(op in re.split(r"[\[\]-]", each) for each in of_test)


def _cell(found: dict[str, dict[str, Any]], mode: Mode, spec: Spec) -> str:
    if not mode.applies(spec):
        return "-"
    count = sum(passed(found, mode.record, test, spec.name) for test in mode.tests)
    if spec.name in found.get(mode.record, {}).get("ops", []):
        count += sum(passed(found, mode.record, test, None) for test in mode.every)
    if count:
        return str(count)
    refused = sum(passed(found, mode.record, test, spec.name) for test in mode.refusals)
    return "refused" if refused else "not checked"


def _step_cell(found: dict[str, dict[str, Any]], mode: Mode) -> str:
    count = sum(passed(found, mode.record, test, None) for test in mode.steps)
    return str(count) if count else "not checked" if mode.steps else "-"


def table(modes: tuple[Mode, ...], backend: backends.Backend) -> str:
    """Every op; which have a kernel of `backend`, and what is recorded of each mode."""
    found = records()
    titles = ("op", f"{backend.name.upper()} kernel", *(mode.title for mode in modes))
    rows = [titles, ("---",) * len(titles)]
    for spec in SPECS:
        kernel = "yes" if op_table.has_kernel(backend, spec) else "none"
        rows.append((f"`{spec.name}`", kernel, *(_cell(found, mode, spec) for mode in modes)))
    rows.append(("a decode step", "-", *(_step_cell(found, mode) for mode in modes)))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def sources() -> str:
    """One line a record: where, when, with what."""
    lines = [
        f"- `{name}`: {record['hardware']}, {record['date']}, "
        + ", ".join(f"{package} {version}" for package, version in record["versions"].items())
        for name, record in records().items()
    ]
    return "\n".join(lines) + "\n"


BLOCKS = {
    "cpu and cuda": lambda: table(CPU_AND_CUDA, backends.CUDA),
    "ascend and onnx": lambda: table(ASCEND_AND_ONNX, backends.NPU),
    "records": sources,
}
