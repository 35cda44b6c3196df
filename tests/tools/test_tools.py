# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""info, bench, docstring examples, README and docs."""

from __future__ import annotations

import csv
import doctest
import importlib
import inspect
import re
import subprocess
import sys
import typing
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from custom.dispatch import backends
from custom.dispatch.errors import BackendUnavailable
from custom.dispatch.registry import BY_NAME, SPECS

import custom
from custom._op import variant_of
from custom.bench import __main__ as bench
from custom.bench import host
from custom.bench.presets import presets
from custom.bench.report import Row, packed, plot, read_rows, text, write_csv
from custom.info import report
from docs import tables

from ..support import many_gpus
from . import racecheck

ROOT = Path(__file__).parents[2]
BENCHED = [spec.name for spec in SPECS if presets(spec.name, "cpu")]


def modules_with_examples():
    """Below the folders that are installed as parts of `custom`; only `>>>` makes one of them."""
    for folder in ("custom", "dispatch", "npu_ops", "cuda_ops", "graph_mode"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if re.search(r"^ *>>> ", path.read_text(), re.M):
                parts = path.relative_to(ROOT).with_suffix("").parts
                below = () if folder == "custom" else ("custom",)
                yield ".".join([*below, *parts]).removesuffix(".__init__")


@pytest.mark.parametrize("module", [*modules_with_examples()])
def test_docstring_examples(module):
    flags = doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL
    # some integrations need what is not installed everywhere
    there = pytest.importorskip(module, exc_type=BackendUnavailable)
    torch.manual_seed(0)
    with torch.enable_grad():
        result = doctest.testmod(there, optionflags=flags)
    assert result.attempted and not result.failed


def lacking(name, there):
    """What a public function's docstring does not say."""
    doc = inspect.getdoc(there) or ""
    if not re.match(r"\S.*[.:]", doc.split("\n\n")[0].replace("\n", " ")):
        yield "a sentence"
    if isinstance(there, type) and issubclass(there, BaseException):
        return  # raised by us alone
    sections = dict(re.findall(r"^(Args|Returns|Raises):\n((?: {4}.*(?:\n|$))+)", doc, re.M))
    signature = inspect.signature(there)
    entries = re.findall(r"^ {4}(\w+): \S", sections.get("Args", ""), re.M)
    for each in signature.parameters:
        if each not in entries:
            yield f"Args: {each}"
    gives = not isinstance(there, type) and signature.return_annotation not in (None, "None")
    if gives and "Returns" not in sections:
        yield "Returns"
    if "Raises" not in sections:
        yield "Raises"
    if name in BY_NAME and not re.search("^Formula: ", doc, re.M):
        yield "Formula"
    shown = re.search(r"^Example: see `(\w+)`", doc, re.M) if name.endswith("_grad") else None
    if ">>> " not in (getattr(custom, shown[1]).__doc__ if shown else doc):
        yield "an example"


@pytest.mark.parametrize("name", [n for n in custom.__all__ if callable(getattr(custom, n))])
def test_a_public_docstring_says_everything(name):
    assert not [*lacking(name, getattr(custom, name))]


def test_docstrings_of_parallel_name_every_argument():
    """What a function gives is in its first sentence, examples are in docs/parallel.md."""
    parallel = importlib.import_module("custom.parallel")  # not for `import custom` alone
    lacks = {(n, each) for n in parallel.__all__ for each in lacking(n, getattr(parallel, n))}
    assert not {each for each in lacks if each[1].startswith(("a sentence", "Args"))}


def functions_of_the_pages():
    """What the documents call by its whole name."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    called = re.compile(r"\b(custom(?:\.[a-z]\w*){2,})\(")
    return sorted({name for page in pages for name in called.findall(page.read_text())})


@pytest.mark.parametrize("name", functions_of_the_pages())
def test_a_function_of_the_pages_says_what_it_takes_and_gives(name):
    module, _, function = name.rpartition(".")
    there = pytest.importorskip(module, exc_type=BackendUnavailable)
    lacks = [*lacking(name, getattr(there, function))]
    assert not [each for each in lacks if each not in ("Raises", "an example")]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="typing.get_overloads is of 3.11")
@pytest.mark.parametrize(
    "name", ["npu_fused_attention", "compute_index_loss_sparse", "causal_conv1d_fn"]
)
def test_overloads_take_what_the_function_takes(name):
    """In its order, but for what has to come by name to say what comes back."""
    public = inspect.signature(getattr(custom, name)).parameters
    found = typing.get_overloads(inspect.unwrap(getattr(custom, name)))
    returns = [inspect.signature(each).return_annotation for each in found]
    assert returns == ["Tensor", "tuple[Tensor, Tensor]", "Tensor | tuple[Tensor, Tensor]"]
    for each in found:
        parameters = inspect.signature(each).parameters
        assert [*parameters] == [*public]
        for parameter in parameters.values():
            own = public[parameter.name]
            assert parameter.annotation == own.annotation or parameter.name.startswith("return_")


def test_what_a_docstring_lacks_is_found():
    def npu_toy(x: int, y: int = 0) -> int:
        return x + y

    args, raises = "Args:\n    x: a number.", "Raises:\n    ValueError: never."
    npu_toy.__doc__ = f"One line.\n\n{args}\n\n{raises}"
    assert [*lacking("npu_toy", npu_toy)] == ["Args: y", "Returns", "an example"]
    npu_toy.__doc__ += "\n\nReturns:\n    The sum.\n\nExample: see `npu_merge_topk`."
    assert [*lacking("npu_toy", npu_toy)] == ["Args: y", "an example"], "only for a gradient"
    assert [*lacking("npu_toy_grad", npu_toy)] == ["Args: y"]


def test_a_variant_takes_what_its_base_takes():
    def base(x: int, *, flag: bool = False) -> int:
        """Base.

        Args:
            x: a number.
            flag: a flag.

        Returns:
            It.

        Raises:
            ValueError: never.
        """

    @variant_of(base)
    def variant(*_: Any, **__: Any) -> str:
        """Variant.

        Args:
            flag: another.

        Returns:
            A word.

        >>> variant(1)
        """

    assert str(inspect.signature(variant)) == "(x: 'int', *, flag: 'bool' = False) -> 'str'"
    assert typing.get_type_hints(variant) == {"x": int, "flag": bool, "return": str}
    assert inspect.signature(base).return_annotation == "int"
    wanted = inspect.cleandoc(base.__doc__).replace("Base", "Variant").replace("It", "A word")
    assert variant.__doc__ == wanted.replace("a flag", "another") + "\n\n>>> variant(1)"


def test_info_lists_every_op_and_variable():
    text = "\n".join(report())
    for spec in SPECS:
        assert spec.name in text
    assert "CUSTOM_BACKEND=" in text and "torch" in text
    assert "Error" not in text, "a reason is a sentence, not an exception"


def test_info_says_what_a_gpu_runs(monkeypatch):
    from custom.cuda_ops.common import gpu

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA X")
    monkeypatch.setattr(gpu, "capability", lambda device: (8, 0))
    monkeypatch.setattr(gpu, "num_sms", lambda device: 108)
    monkeypatch.setattr(gpu, "shared_memory", lambda device: 163 * 1024)
    text = "\n".join(report())
    assert "sm_80, 108 multiprocessors, 163 KiB of shared memory; plain kernels" in text
    assert "NVIDIA X" in text and "Error" not in text


def test_info_names_the_gpu_that_refuses(monkeypatch):
    from custom.cuda_ops.common import gpu

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA X")
    monkeypatch.setattr(gpu, "capability", lambda device: [(8, 0), (7, 5)][device.index or 0])
    monkeypatch.setattr(gpu, "num_sms", lambda device: 108)
    monkeypatch.setattr(gpu, "shared_memory", lambda device: 163 * 1024)
    lines = [*report()]
    cells = {line.split()[0]: line.split()[2] for line in lines if line.startswith("  npu_")}
    assert set(cells.values()) == {"some"}
    assert "  some: runs on some of the devices" in lines
    assert any(x.startswith("  cuda: not on cuda:1: cuda:1 is an sm_75, ") for x in lines)


def test_info_works_when_a_kernel_module_is_broken(monkeypatch):
    def broken(*_):
        raise RuntimeError("half of this environment is missing")

    monkeypatch.setattr(backends, "installed", broken)
    monkeypatch.setattr("custom.info.backends.both_tritons", lambda: "both are installed")
    text = "\n".join(report())
    assert "half of this environment is missing" in text and "WARNING: both" in text


def test_both_tritons_says_which_wins_and_how_to_mend_it(monkeypatch):
    monkeypatch.setattr(backends, "installed", lambda name: "1.0")
    sentence = backends.both_tritons()
    assert "was installed last and wins" in sentence and "pip uninstall" in sentence


@pytest.mark.parametrize(
    "file, kernel, text",
    [
        ("delta_rule/hopper/chunk_gated_delta_rule.py", "_walk", "gl.warp_specialize("),
        ("attention/hopper/fused_attention.py", "_forward_hopper", "if NC == 2:"),
        ("indexer/hopper/lightning_indexer.py", "_scores_shared", "gl.warp_specialize("),
    ],
)
def test_a_racecheck_log_is_judged_by_its_pairs(file, kernel, text, tmp_path):
    begin, calls = racecheck._lines(file, kernel)
    source = (racecheck.KERNELS / file).read_text().splitlines()
    assert source[begin - 1].startswith(f"def {kernel}(")
    assert {source[line - 1].strip() for line in calls} == {text}

    def judged(read, write, errors=1):
        many = "" if errors == 1 else "s"
        counted = f"{errors} hazard{many} displayed ({errors} error{many}"
        (tmp_path / "log").write_text(
            f"""========= COMPUTE-SANITIZER
========= Error: Race reported between Read access at {kernel}+0x1 in {file}:{read}
=========     and Write access at {kernel}+0x2 in {file}:{write} [66 hazards]
========= RACECHECK SUMMARY: {counted}, 0 warnings)
"""
        )
        return racecheck.main(str(tmp_path / "log"))

    assert judged(begin, begin) == judged(begin, min(calls)) == 0
    for own in begin + 9, min(calls) - 1, max(calls) + 1, 1:
        assert judged(own, begin) == judged(begin, own) == 1, "a kernel's own lines"
    assert judged(min(calls), begin) == 1, "nothing is read there"
    assert judged(begin, begin, errors=2) == 1, "not everything was printed"


def test_a_plot_of_stages_from_its_csv(tmp_path):
    stages = {"prologs": 3.0, "attention": 5.5}
    numbers = dict(error=0.0, median_us=8.0, p20_us=7.0, p80_us=9.0, floor_us=4.0, of_floor=0.5)
    row = Row(
        op="op",
        case="a case",
        backend="cuda",
        tflops=1.0,
        gb_per_s=2.0,
        peers_us=packed({"reference": 90.0}),
        stages_us=packed(stages),
        **numbers,
    )
    write_csv(tmp_path / "a.csv", [row])
    assert read_rows(tmp_path / "a.csv") == [row] and row.stages == stages
    assert "prologs" in text([row], {})
    plot(tmp_path / "a.png", [row], "title", {("op", "a case"): ("theirs", 20.0)})
    assert (tmp_path / "a.png").stat().st_size > 10_000


# other signatures of the prologs, measured by theirs
WITHOUT_ROWS = {"npu_mla_prolog_v3", "npu_lightning_indexer_prolog_pto"}


def test_every_op_has_rows():
    assert {spec.name for spec in SPECS} - set(BENCHED) == WITHOUT_ROWS


@pytest.mark.parametrize("op", BENCHED)
def test_bench_checks_and_times_every_op_on_the_cpu(op, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench, "rates", lambda device: (1e10, 1e11, "a test's"))
    first, second, plot = tmp_path / "a.csv", tmp_path / "b.csv", tmp_path / "a.png"
    case = presets(op, "cpu")[0]
    shape = ",".join(f"{k}={v}" for k, v in case.shape.items())
    assert bench.main([op, "--device", "cpu", "--shape", shape, "--csv", str(first)]) == 0
    argv = [op, "--device", "cpu", "--shape", shape, "--csv", str(second)]
    assert bench.main([*argv, "--against", str(first), "--plot", str(plot)]) == 0
    out = capsys.readouterr()
    assert case.label in out.out and "x before" in out.out and "[1/" in out.err
    rows = list(csv.DictReader(second.open()))
    assert float(rows[0]["median_us"]) > 0 and plot.stat().st_size > 1000


def test_bench_takes_the_names_of_functions_too():
    """And refuses others before it measures."""
    names = {
        "fused_attention": "npu_fused_attention",
        "hadamard": "npu_hadamard",
        "compute_index_loss_sparse": "npu_indexer_loss",
        "npu_merge_states": "npu_merge_states",
    }
    assert {name: bench._whole_name(name) for name in names} == names
    with pytest.raises(SystemExit):
        bench.main(["nonsense", "--device", "cpu"])


@pytest.mark.parametrize("op", ["npu_fused_attention", "npu_fused_attention_backward"])
def test_bench_sweeps_over_lengths(op, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench, "rates", lambda device: (1e10, 1e11, "a test's"))
    written, plot = tmp_path / "a.csv", tmp_path / "a.png"
    argv = [op, "--device", "cpu", "--sweep", "--csv", str(written), "--plot", str(plot)]
    assert bench.main(argv) == 0
    assert [row.case.split(", ")[1] for row in read_rows(written)] == ["128 x 128", "256 x 256"]
    assert plot.stat().st_size > 10_000


def test_bench_prints_the_cost_of_a_call_on_the_host(capsys, monkeypatch):
    assert bench.main(["npu_fused_attention", "--device", "cpu", "--host"]) == 2
    assert "expected --device cuda or npu" in capsys.readouterr().err
    assert bench.main(["npu_fused_attention", "--device", "cpu", "--path", "plain"]) == 2
    assert "expected --device cuda, not cpu" in capsys.readouterr().err
    monkeypatch.setattr(host, "_ROWS", 2)
    monkeypatch.setattr(host, "_CALLS", 2)
    case = replace(
        presets("npu_fused_sigmoid_gating_delta_rule_update", "cpu")[0],
        peers={"theirs": lambda arguments: lambda: None, "absent": lambda arguments: None},
    )
    head, row = host.table([case], torch.device("cpu")).splitlines()
    assert head.split() == ["us", "launches", "checks", "case", "peers"]
    assert float(row.split()[0]) > 0 and row.split()[2].endswith("%") and row.endswith("theirs 0")
    assert "absent" not in row


def test_bench_shows_peak_memory_where_it_was_measured():
    row = Row("op", "a", "cuda", 0.0, 2.0, 1.0, 3.0, 1.0, 0.5, 1.0, 1.0, "torch=4.00")
    assert "MiB" not in text([row], {})
    measured = replace(row, case="b", peak_mib=packed({"ours": 32.0, "torch": 2560.0}))
    head, first, second = text([row, measured], {}).splitlines()
    assert head.split()[-3:] == ["MiB", "MiB", "torch"]
    assert first.split()[-2:] == ["-", "-"] and second.split()[-2:] == ["32", "2560"]


def test_bench_compares_what_is_written_where_nothing_is_returned():
    case = presets("npu_fused_causal_conv1d_v2", "cpu")[0]
    arguments = case.make(torch.device("cpu"), 0)
    x, states = bench._outputs(case, arguments)
    assert x is arguments["x"] and states is arguments["conv_states"]


def test_bench_prints_no_table_for_a_wrong_op(capsys, monkeypatch):
    monkeypatch.setattr(bench, "rates", lambda device: (1e10, 1e11, "a test's"))
    monkeypatch.setattr(bench, "relative_error", lambda ours, wanted: float("nan"))
    assert bench.main(["npu_fused_attention", "--device", "cpu"]) == 1
    out = capsys.readouterr().out
    assert "WRONG" in out and "median" not in out


def test_relative_error_sees_nan_and_ignores_equal_infinities():
    one = torch.ones(3)
    inf = torch.tensor([float("-inf"), 1.0, 1.0])
    assert bench.relative_error([inf], [inf]) == 0
    assert bench.relative_error([one * float("nan")], [one]) != 0
    assert bench.relative_error([one * 1.5], [one]) == pytest.approx(0.5)


@pytest.mark.parametrize("name", tables.PAGES)
def test_pages_show_the_records_and_figures(name):
    text = (ROOT / name).read_text()
    for block in tables.PAGES[name]:
        assert f"<!-- {block}: begin -->" in text and f"<!-- {block}: end -->" in text
    assert text.count(": begin -->") == len(tables.PAGES[name])
    assert text == tables.fresh(name), f"{name} is out of step: run python -m docs.tables"


def test_every_public_name_exists():
    for name in custom.__all__:
        assert hasattr(custom, name)


def test_python_dash_m_works_from_anywhere(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "custom.info"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0 and "npu_sparse_attention_pto" in done.stdout, done.stderr


def test_info_ends_in_silence_where_nobody_reads_on(tmp_path):
    command = [sys.executable, "-m", "custom.info"]
    kept = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with subprocess.Popen(command, cwd=tmp_path, **kept) as running:
        running.stdout.close()
        said = running.stderr.read()
    assert (running.returncode, said) == (0, b"")


def test_workers_share_the_gpus():
    """Every worker sees all of them, and tests on its last one."""
    devices = ["0", "1", "2", "5"]
    turned = [many_gpus.rotated(devices, f"gw{n}") for n in range(8)]
    assert all(sorted(seen) == devices for seen in turned)
    assert Counter(seen[-1] for seen in turned) == dict.fromkeys(devices, 2)
