# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""CONTRIBUTING.md, "Add an op", followed in a copy of the package: what a step names as red is red
before it and green after it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = " ".join((ROOT / "CONTRIBUTING.md").read_text().split())
STEPS = dict(re.findall(r"(?<= )(\d+)\. (`.*?)(?= \d+\. `| ## )", TEXT))
COPIED = ("custom", "dispatch", "npu_ops", "cuda_ops", "graph_mode", "tests", "docs")
LICENCE = "# SPDX-License-Identifier: Apache-2.0\n# Copyright the npu-custom-ops authors\n"

# step -> path as the step writes it -> the whole file, or (a line there, lines to put behind it)
TOY: dict[int, dict[str, str | list[tuple[str, str]]]] = {
    1: {
        "dispatch/ops/<family>/<op>.py": '''
"""Arguments and output of npu_toy: scale x weight, weight [D] for every row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ...check import Checker

SCHEMA = "npu_toy(Tensor x, Tensor weight, *, float scale=1.0) -> Tensor"
ONNX = "Toy"


def check(c: Checker, a: Mapping[str, Any]) -> None:
    x, weight = a["x"], a["weight"]
    c.same_device(x=x, weight=weight)
    c.floating("x", x)
    c.same_dtype(x=x, weight=weight)
    c.shape("x", x, "B S D")
    c.shape("weight", weight, "D")
    c.contiguous(x=x, weight=weight)


def fake(x: Tensor, **_: Any) -> Tensor:
    return x.new_empty(x.shape)
''',
    },
    2: {
        "dispatch/reference/<family>/<op>.py": '''
"""One line."""

from __future__ import annotations

from torch import Tensor


def forward(x: Tensor, weight: Tensor, scale: float) -> Tensor:
    return (scale * x.double() * weight.double()).to(x.dtype)
''',
    },
    3: {
        "tests/support/samples.py": [
            (
                "SAMPLES: dict[str, Callable[..., Arguments]] = {\n",
                '    "npu_toy": lambda m, B=2, S=2:'
                " dict(x=m.normal(B, S, 8), weight=m.normal(8)),\n",
            )
        ],
    },
    4: {
        "custom/<file>.py": '''
"""A toy."""

from __future__ import annotations

from torch import Tensor

from ._op import op


@op
def npu_toy(x: Tensor, weight: Tensor, *, scale: float = 1.0) -> Tensor:
    """Every row of `x` times `weight` and `scale`.

    Formula: scale x weight.

    Args:
        x: [B, S, D], any floating dtype.
        weight: [D], dtype of `x`.
        scale: a number.

    Returns:
        [B, S, D], dtype of `x`.

    Raises:
        ValueError: a shape, stride or device does not fit.
        TypeError: a dtype does not fit.

    >>> import torch, custom
    >>> custom.npu_toy(torch.ones(1, 1, 2), torch.ones(2), scale=3.0).tolist()
    [[[3.0, 3.0]]]
    """
''',
        "custom/__init__.py": [
            ("from .graph_mode import warmup  # noqa: E402\n", "from .toy import npu_toy\n"),
            ("__all__ = [\n", '    "npu_toy",\n'),
        ],
    },
    5: {
        "tests/ops/<family>/test_<op>.py": '''
"""npu_toy against a loop."""

import pytest
import torch
from custom.dispatch import log

import custom


@pytest.mark.parametrize("rows", [0, 1, 70])
def test_loop(device, backend, rows):
    x, weight = torch.randn(1, rows, 100).half(), torch.randn(100).half()
    before = log.calls["npu_toy", backend]
    got = custom.npu_toy(x.to(device), weight.to(device), scale=0.5)
    assert log.calls["npu_toy", backend] == before + 1
    want = [[0.5 * a * b for a, b in zip(row, weight.tolist())] for row in x[0].tolist()]
    assert torch.equal(got.cpu()[0], torch.tensor(want, dtype=torch.double).view(rows, 100).half())
''',
    },
    6: {
        "cuda_ops/<family>/<op>.py": '''
"""A program takes BLOCK numbers.

    condition    kernels
    any          _scale
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...dispatch.common import memory
from ..runtime import launches

BLOCK = 256


@triton.jit
def _scale(x, weight, out, scale, count, D, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    product = tl.load(x + at, mask).to(tl.float32) * tl.load(weight + at % D, mask).to(tl.float32)
    tl.store(out + at, (scale * product).to(out.dtype.element_ty), mask)


def unsupported(x: Tensor, **_: Any) -> str | None:
    return "x is float64, supported up to float32" if x.dtype is torch.float64 else None


def forward(x: Tensor, weight: Tensor, scale: float) -> Tensor:
    out = memory.empty(x.shape, x.dtype, x.device)
    if out.numel():
        launches.kernel(_scale, triton.cdiv(out.numel(), BLOCK))(
            x, weight, out, scale, out.numel(), len(weight), BLOCK=BLOCK
        )
    return out
''',
    },
    7: {
        "npu_ops/<family>/<op>.py": '''
"""A program takes rows, one after the other, each as one vector."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from ...dispatch.common import memory
from ..common import cores, entry, tune


@entry.jit(do_not_specialize=["rows", "size"])
def scale_rows(x, weight, out, scale, rows, size, WIDTH: tl.constexpr):
    d = tl.arange(0, WIDTH)
    weights = tl.load(weight + d, mask=d < size, other=0.0).to(tl.float32)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        at = row.to(tl.int64) * size
        values = tl.load(x + at + d, mask=d < size, other=0.0).to(tl.float32)
        values = (scale * values * weights).to(out.dtype.element_ty)
        tl.store(out + at + d, values, mask=d < size)


def unsupported(x: Tensor, **_: Any) -> str | None:
    if x.dtype is torch.float64:
        return "x is float64, the vector unit computes in float32"
    return f"D={x.shape[-1]}, the kernel holds up to 2048" if x.shape[-1] > 2048 else None


def forward(x: Tensor, weight: Tensor, scale: float) -> Tensor:
    out = memory.empty(x.shape, x.dtype, x.device)
    rows, size = x.shape[0] * x.shape[1], x.shape[2]
    if out.numel():
        scale_rows[(min(rows, cores.vector()),)](
            x, weight, out, scale, rows, size,
            **tune.at_least("toy.scale_rows", "WIDTH", size).keywords,
        )
    return out
''',
        "npu_ops/common/tune.py": [
            (
                "TABLE: dict[str, tuple[Config, ...]] = {\n",
                '    "toy.scale_rows": (Config({"WIDTH": 512}), Config({"WIDTH": 2048})),\n',
            )
        ],
        "tests/ascend/ops/<op>.py": '''
"""npu_toy: one row and several, as wide as a tile and not."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..case import Arguments, Case, Inputs
from ..controls import Control

OP = "npu_toy"


def call(rows: int, size: int) -> Callable[[Inputs], Arguments]:
    return lambda x: dict(x=x.normal(1, rows, size), weight=x.normal(size), scale=0.5)


CASES = (
    Case(OP, "as wide as a tile", call(1, 512)),
    Case(OP, "wide", call(70, 700), torch.float16),
)
CONTROLS = (Control("masks forgotten", "toy", "mask=d < size)", "mask=d < WIDTH)", "wide"),)
''',
    },
    8: {},  # its reference can be traced
    9: {
        "custom/bench/<file>.py": [
            (
                "PRESETS = {\n",
                '    "npu_toy": lambda small: [_toy(8, 64) if small else _toy(8192, 8192)],\n',
            ),
            (
                "from .sparse_attention import indexer_case\n",
                """

def _toy(s: int, d: int) -> Case:
    def make(draw):
        return dict(x=draw.normal(1, s, d), weight=draw.normal(d))

    size = s * d
    return Case("npu_toy", f"{s} x {d}", make, _whole, 4.0 * size, 2.0 * size, dict(s=s, d=d))
""",
            ),
        ],
    },
    10: {"CHANGELOG.md": [("## Unreleased\n\n", "- New op `npu_toy`.\n")]},
}
# what a step names as red; of CONTRACTS, from step 3 on, PUBLIC alone
REFERENCE = "contracts/test_contracts.py::test_every_op_has_a_reference_and_a_sample"
CONTRACTS = "contracts/test_contracts.py"
PUBLIC = "contracts/test_contracts.py::test_public_function_equals_schema"
DOCSTRING = "tools/test_tools.py::test_a_public_docstring_says_everything"
OWN = "tests/ops/<family>/test_<op>.py"


def _toy(path: str) -> str:
    """The path of a step, of the op that is added."""
    path = path.replace("bench/<file>", "bench/<family>").replace("<op>", "toy")
    return path.replace("<file>", "toy").replace("<family>", "merging")


LAYERING = "contracts/test_layering.py"
ASCEND = "make test-ascend"
ONNX = "graphs/test_onnx.py"
ROWS = "tools/test_tools.py::test_every_op_has_rows"
PAGES = "tools/test_tools.py::test_pages_show_the_records_and_figures"
NAMED = {
    1: [REFERENCE],
    3: [CONTRACTS],
    4: [PUBLIC, DOCSTRING],
    5: [OWN],
    6: [OWN, LAYERING],
    7: [ASCEND],
    8: [ONNX],
    9: [ROWS],
    10: [PAGES],
}


@pytest.fixture
def copy(tmp_path) -> Path:
    for folder in COPIED:
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__py*"))
    for file in (*ROOT.glob("*.toml"), *ROOT.glob("*.md"), ROOT / "setup.cfg"):
        shutil.copy(file, tmp_path)
    return tmp_path


def follow(copy: Path, *steps: int) -> None:
    for step in steps:
        for path, content in TOY[step].items():
            assert f"`{path}`" in STEPS[str(step)], f"step {step} does not name {path}"
            file = copy / _toy(path)
            assert file.exists() == isinstance(content, list), file
            if isinstance(content, str):
                file.write_text(LICENCE + content)
                continue
            for line, more in content:
                assert file.read_text().count(line) == 1, (file, line)
                file.write_text(file.read_text().replace(line, line + more))


def run(copy: Path, *tests: str, **variables: str) -> dict[str, set[str]]:
    """Of each test the outcomes for this op."""
    nodes = {f"tests/{_toy(test.removeprefix('tests/'))}": test for test in tests}
    command = [
        sys.executable,
        *["-m", "pytest", "-q", "-rA", "--tb=short", "-p", "no:cacheprovider"],
    ]
    chosen = ["--device", "cpu", "-k", "toy or layering or has_rows or pages_show"]
    ran = subprocess.run(
        [*command, *chosen, *nodes],
        cwd=copy,
        env=os.environ | variables,
        capture_output=True,
        text=True,
    )
    found = re.findall(r"^(PASSED|FAILED|ERROR) (tests/\S*)", ran.stdout, re.M)
    assert found, ran.stdout[-3000:] + ran.stderr[-3000:]
    return {
        test: {outcome for outcome, each in found if re.match(rf"{re.escape(node)}(\[|::|$)", each)}
        for node, test in nodes.items()
    }


def test_names_in_the_text_exist():
    """Paths (of an op that there is), tests, targets of make and modules."""
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
    for name in re.findall(r"`([^`]+)`", TEXT):
        real = (
            name.replace("<op>", "lightning_indexer")
            .replace("<family>", "indexer")
            .replace("<file>", "sparse_attention")
        )
        if name.startswith("make "):
            assert name.removeprefix("make ") in targets, name
        elif name.startswith("python -m "):
            module = name.split()[2].replace(".", "/")
            assert (ROOT / module).is_dir() or (ROOT / f"{module}.py").is_file(), name
        elif "::" in name:
            file, _, test = name.partition("::")
            assert f"def {test}(" in (ROOT / "tests" / file).read_text(), name
        elif re.fullmatch(r"[\w/.]+(/|\.(py|md|toml))", real):
            assert (ROOT / real).exists() or (ROOT / "tests" / real).exists(), name


def test_a_step_names_its_tests():
    assert list(STEPS) == [str(step) for step in range(1, 11)]
    for step, tests in NAMED.items():
        for test in tests:
            assert f"`{test}`" in STEPS[str(step)], f"step {step} does not name {test}"


def put(file: Path, old: str, new: str) -> None:
    assert file.read_text().count(old) == 1, (file, old)
    file.write_text(file.read_text().replace(old, new))


def test_the_steps_add_an_op(copy):
    for package in ("onnxruntime", "onnxscript", "transformers"):
        pytest.importorskip(package)
    follow(copy, 1)
    assert run(copy, REFERENCE) == {REFERENCE: {"FAILED"}}
    follow(copy, 3)
    assert run(copy, REFERENCE) == {REFERENCE: {"FAILED"}}
    follow(copy, 2)
    later = (PUBLIC, ROWS, PAGES)
    before = run(copy, REFERENCE, *later)
    assert before.pop(REFERENCE) == {"PASSED"}
    assert all("FAILED" in outcomes for outcomes in before.values()), before
    follow(copy, 4, 5, 9, 10)
    subprocess.run([sys.executable, "-m", "docs.tables"], cwd=copy, check=True)
    every = (CONTRACTS, OWN, DOCSTRING, ONNX, *later)
    assert run(copy, *every) == {test: {"PASSED"} for test in every}


def test_under_the_interpreter(copy):
    pytest.importorskip("triton")
    variables = dict(TRITON_INTERPRET="1", CUSTOM_BACKEND="cuda", CUDA_VISIBLE_DEVICES="")
    follow(copy, 1, 2, 3, 4, 5)
    assert run(copy, OWN, **variables) == {OWN: {"FAILED"}}
    follow(copy, 6)
    found = run(copy, OWN, LAYERING, **variables)
    assert found == {OWN: {"PASSED"}, LAYERING: {"PASSED"}}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            "from ..runtime import launches\n",
            "from ..runtime import launches\nfrom ...custom import env\n",
        ),
        ("    any          _scale\n", "    any          _other\n"),
    ],
    ids=["an import that goes up", "a table that names another kernel"],
)
def test_what_layering_refuses(copy, old, new):
    follow(copy, 1, 6)
    put(copy / "cuda_ops/merging/toy.py", old, new)
    assert "FAILED" in run(copy, LAYERING)[LAYERING]


def test_on_the_ascend_harness(copy):
    """Which `make test-ascend` sets up; of it the part that is the op's own."""
    if not (ROOT / ".ascend/ready").exists():
        pytest.skip("needs .ascend/: make test-ascend")
    (copy / ".ascend").symlink_to(ROOT / ".ascend")
    follow(copy, 1, 2, 7)

    def harness() -> list[str]:
        ran = subprocess.run(
            ["bash", "tests/ascend/run.sh", "toy"], cwd=copy, capture_output=True, text=True
        )
        said = ran.stdout.splitlines()
        assert said, ran.stderr[-3000:]
        assert (said[-1] == "green") == (ran.returncode == 0), ran.stderr[-3000:]
        return [line.removeprefix("FAIL ") for line in said if line.startswith("FAIL ")]

    cases = copy / "tests/ascend/ops/toy.py"
    put(cases, "call(70, 700)", "call(70, 512)")
    assert harness() == [
        "toy.scale_rows WIDTH=2048: no case reaches it",
        "planted mistake not caught: toy: masks forgotten",
    ]
    put(cases, "call(70, 512)", "call(70, 700)")
    assert harness() == []
