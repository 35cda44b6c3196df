# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Versions that belong together, and the names that triton-ascend moved, by stand-ins."""

from __future__ import annotations

import configparser
import importlib
import re
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest
import torch
from custom.dispatch import backends, versions

from custom import doctor, info
from custom.integrations.engines import in_words
from custom.integrations.vllm.modes import VLLM

ROOT = Path(__file__).parents[2]
FIRST = versions.TABLE[0]
WHOLE = {
    "triton_ascend": FIRST.triton_ascend,
    "cann": FIRST.cann,
    "torch": FIRST.torch,
    "torch_npu": FIRST.torch_npu,
    "compiler": FIRST.compiler,
}
NAMED = {
    "torch": FIRST.torch,
    "torch_npu": FIRST.torch_npu,
    "triton-ascend": FIRST.triton_ascend,
}


def test_the_extra_pins_the_first_row():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    extra = setup["options.extras_require"]["npu"].splitlines()
    for name, version in NAMED.items():
        assert f'{name}=={version}; platform_machine == "aarch64"' in extra


def test_the_page_has_the_command_for_x86():
    named = [f"{name}=={version}" for name, version in NAMED.items() if name != "torch"]
    command = versions.installing(FIRST.torch, *named, machine="x86_64")
    assert f"{command}\n" in (ROOT / "docs/ascend.md").read_text()


def test_what_belongs_together_is_not_apart():
    assert versions.apart(WHOLE) is None


def test_what_differs_is_named_with_what_is_expected():
    sentence = versions.apart(WHOLE | {"torch_npu": "2.14.0", "compiler": None})
    assert sentence is not None and "CANN" not in sentence
    assert "torch_npu 2.14.0 (expected 2.9.0)" in sentence
    assert "bishengir-compile of - (expected 2026-01-16)" in sentence


def test_an_unknown_triton_ascend_is_said():
    assert "9.9 is in no table" in (versions.apart(WHOLE | {"triton_ascend": "9.9"}) or "")


@pytest.mark.parametrize(
    ("said", "day"),
    [
        ("bishengir-compile version 0.1.0 (e4e2ba9841d1 2026-01-16)", "2026-01-16"),
        ("bishengir-compile 1.1.0 (/usr1/BiSheng/bishengir 428ab8fdab46 2026-04-30)", "2026-04-30"),
        ("bishengir-compile of somebody", None),
    ],
)
def test_the_compiler_says_its_day(said, day, tmp_path, monkeypatch):
    compiler = tmp_path / "bishengir-compile"
    compiler.write_text(f"#!/bin/sh\necho '{said}'; echo 'llvm 19.1.7'\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    build = versions.compiler()
    assert build is not None and build.day == day and "/usr1" not in build.said
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.delenv("TRITON_NPU_COMPILER_PATH", raising=False)
    assert versions.compiler() is None
    # triton-ascend looks for it there, under another name
    compiler.rename(tmp_path / "npuc")
    monkeypatch.setenv("TRITON_NPU_COMPILER_PATH", str(tmp_path))
    build = versions.compiler()
    assert build is not None and build.path == tmp_path / "npuc"


def test_info_warns_of_versions_that_are_apart(monkeypatch):
    monkeypatch.setattr(backends, "installed", lambda name: "3.2.0")
    monkeypatch.setattr(versions, "here", lambda: WHOLE | {"cann": "9.1.0"})
    assert "  WARNING: beside triton-ascend 3.2.0: CANN 9.1.0 (expected 8.5.0)" in info.report()


# ------------------------------------------------------------------ names that triton-ascend moved


def module(name: str, **members: object) -> ModuleType:
    made = ModuleType(name)
    made.__spec__ = ModuleSpec(name, None, is_package=True)
    made.__path__ = []
    vars(made).update(members)
    return made


def names(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> ModuleType:
    """npu_ops/common/front_end.py over these modules instead of an installed triton."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "triton"]:
        monkeypatch.delitem(sys.modules, name)
    parents = ("triton", "triton.language.extra")
    for each in (*map(module, parents), *modules):
        monkeypatch.setitem(sys.modules, each.__name__, each)
    monkeypatch.delitem(sys.modules, "custom.npu_ops.common.front_end", raising=False)
    return importlib.import_module("custom.npu_ops.common.front_end")


MOVED = ("extract_slice", "get_element", "insert_slice", "sort")
OLD = {name: f"{name} of tl" for name in MOVED}
CANN = "triton.language.extra.cann"


def test_3_2_0_has_them_in_its_language(monkeypatch):
    found = names(monkeypatch, module("triton.language", **OLD))
    assert {name: getattr(found, name) for name in OLD} == OLD


def test_later_ones_have_them_in_an_extension(monkeypatch):
    # upstream's own sort stays in the language
    language = module("triton.language", sort="upstream's sort")
    moved = {name: f"moved {name}" for name in OLD}
    found = names(monkeypatch, language, module(CANN), module(f"{CANN}.extension", **moved))
    assert {name: getattr(found, name) for name in OLD} == moved


def test_a_name_that_only_the_language_has(monkeypatch):
    extension = module(f"{CANN}.extension", extract_slice="moved slice")
    found = names(monkeypatch, module("triton.language", **OLD), module(CANN), extension)
    assert (found.extract_slice, found.sort) == ("moved slice", "sort of tl")


def test_another_triton_is_named(monkeypatch):
    with pytest.raises(ImportError, match="no `extract_slice`: this is no triton-ascend"):
        names(monkeypatch, module("triton.language", sort=1))


def test_kernels_take_them_from_here_alone():
    """What else they take of the language, upstream's has, and so has every triton-ascend's."""
    upstream = {*dir(pytest.importorskip("triton.language"))} - {*OLD}
    taken = {
        (path.stem, name)
        for path in (ROOT / "npu_ops").rglob("*.py")
        for name in re.findall(r"\btl\.(\w+)", path.read_text())
    }
    assert len(taken) > 100 and [x for x in sorted(taken) if x[1] not in upstream] == []


# -------------------------------------------------------------------------------------- the doctor

SOUND = dict.fromkeys(("torch_npu", "triton-ascend", "CANN", "transformers", "numpy"))
SOUND |= {"torch": "2.13.0+cpu", "triton": "3.7.1", "machine": "x86_64", "compiler": None}
ASCEND = {
    "torch": FIRST.torch,
    "torch_npu": FIRST.torch_npu,
    "triton": None,
    "numpy": "1.26.4",
    "triton-ascend": FIRST.triton_ascend,
    "CANN": FIRST.cann,
    "transformers": "5.17.0",
    "machine": "aarch64",
    "compiler": "/cann/bishengir-compile",
}
ON_X86 = ASCEND | {"torch": f"{FIRST.torch}+cpu", "machine": "x86_64"}
INDEX = f" --extra-index-url {versions.CPU_BUILDS}"
BARE = {"torch_npu": None, "triton-ascend": None, "CANN": None}


@pytest.mark.parametrize("have", [SOUND, ASCEND, ON_X86], ids=["CUDA", "Ascend", "x86"])
def test_the_doctor_finds_nothing_where_nothing_clashes(have):
    assert list(doctor.clashes(have)) == []


@pytest.mark.parametrize(
    "have, changes, sentence, command",
    [
        (SOUND, {"triton-ascend": "3.2.0"}, "overwritten", "--no-deps triton==3.7.1"),
        (ASCEND, {"triton": "3.2.0"}, "overwritten", "--no-deps triton-ascend==3.2.0"),
        (SOUND, {"torch": "2.6.1"}, "older than 2.7", 'pip install -U "torch>=2.7"'),
        (ASCEND, {"torch": "2.9.1+cpu"}, "torch 2.9.1", "pip install torch==2.9.0"),
        (ASCEND, {"torch_npu": "2.9.0.post6"}, "goes with torch_npu 2.9.0,", "torch_npu==2.9.0"),
        (ON_X86, {"torch": "2.9.1"}, "torch 2.9.1", f"pip install torch==2.9.0+cpu{INDEX}"),
        (
            ON_X86,
            {"torch_npu": "2.9.0.post6"},
            "goes with torch_npu 2.9.0,",
            f"pip install torch==2.9.0+cpu torch_npu==2.9.0{INDEX}",
        ),
        (
            ASCEND,
            BARE,
            "(/cann/bishengir-compile), and no torch_npu and no triton-ascend.",
            "pip install torch==2.9.0 torch_npu==2.9.0 triton-ascend==3.2.0",
        ),
        # what `pip install ".[npu]"` alone leaves
        (
            ON_X86,
            BARE | {"torch": "2.13.0", "triton": "3.7.1"},
            "no triton-ascend: PyPI has no torch for it on x86-64, https://download.pytorch.org",
            "pip uninstall -y triton && pip install torch==2.9.0+cpu torch_npu==2.9.0 "
            f"triton-ascend==3.2.0{INDEX}",
        ),
        (ON_X86, {"triton-ascend": None}, "no triton-ascend.", "--no-deps triton-ascend==3.2.0"),
        (ASCEND, {"CANN": "9.0.0"}, "goes with CANN 8.5.0", "triton-ascend==3.2.1"),
        (ASCEND, {"CANN": "8.0.0"}, "CANN 8.0.0 is here", "set_env.sh of a CANN 8.5.0"),
        (ASCEND, {"triton-ascend": "9.9", "CANN": None}, "never tried", "triton-ascend==3.2.0"),
        (SOUND, {"triton": "3.4.0"}, "older than 3.5", 'pip install -U "torch>=2.9"'),
        (SOUND, {"triton": "3.10.1"}, "newer than 3.9", 'pip install "triton>=3.5,<3.10"'),
        (SOUND, {"numpy": "2.5.2"}, "from numpy 2.4 on", 'pip install "numpy<2.4"'),
        (
            SOUND,
            {"torch's triton": "3.8.0"},
            "torch 2.13.0+cpu goes with triton 3.8.0, and 3.7.1",
            "pip install triton==3.8.0",
        ),
        (
            SOUND,
            {"NVIDIA driver": "NVRM 580"},
            "is a build for the CPU, and an NVIDIA driver is",
            'pip uninstall -y torch && pip install ".[cuda]"',
        ),
        (
            SOUND,
            {"C compiler": None, "Python.h": "/usr/include"},
            "no C compiler here, and Triton",
            "apt-get install gcc",
        ),
        (
            ASCEND,
            {"C compiler": None, "Python.h": None},
            "no C compiler and no Python.h here",
            "python3-dev",
        ),
        (
            SOUND,
            {"vllm": "0.34.0"},
            "vllm 0.34.0: CUSTOM_VLLM=1 was tried with >=0.32,<0.34.",
            'pip install "vllm>=0.32,<0.34"',
        ),
        (
            SOUND,
            {"vllm-ascend": "0.22.1"},
            "CUSTOM_VLLM=1 was tried with >=0.23,<0.24.",
            'pip install "vllm-ascend>=0.23,<0.24"',
        ),
        (
            SOUND,
            {"sglang": "0.5.22"},
            "CUSTOM_SGLANG=1 was tried with >=0.5.23,<0.5.24.",
            'pip install "sglang>=0.5.23,<0.5.24"',
        ),
        (SOUND, {"transformers": "4.57.1"}, "5.17 and later", '"transformers>=5.17,<6"'),
    ],
)
def test_the_doctor_names_a_clash_and_what_mends_it(have, changes, sentence, command):
    (found,) = doctor.clashes(have | changes)
    assert sentence in found.sentence and command in found.command
    assert "\n" not in found.sentence and found.sentence.endswith(".")


@pytest.mark.parametrize(
    "changes",
    [
        {"vllm": "0.33.1", "sglang": "0.5.23", "vllm-ascend": "0.23.0.post1"},
        {
            "torch": "2.13.0",
            "torch's triton": "3.7.1",
            "torch's CUDA": "13.0",
            "NVIDIA driver": "x",
        },
        {"C compiler": "/usr/bin/cc", "Python.h": "/usr/include/python3.11/Python.h"},
        # nothing is built without Triton
        {"triton": None, "C compiler": None, "Python.h": None},
    ],
)
def test_the_doctor_leaves_alone_what_goes_together(changes):
    assert list(doctor.clashes(SOUND | changes)) == []


def test_the_extra_is_what_the_plug_in_was_tried_with():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    assert setup["options.extras_require"]["vllm"].strip() == f"vllm{in_words(VLLM)}"


def test_what_tests_alone_need_breaks_nothing(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "here", lambda: SOUND | {"numpy": "2.5.2"})
    assert info.main(["--doctor"]) == 0
    first, second, *rest = capsys.readouterr().out.splitlines()
    assert (first, second) == ("nothing clashes", "for tests alone:")
    assert rest[0].startswith("numpy 2.5.2") and rest[1] == '    pip install "numpy<2.4"'
    monkeypatch.setattr(doctor, "here", lambda: SOUND | {"numpy": "2.5.2", "vllm": "0.34.0"})
    assert info.main(["--doctor"]) == 1
    shown = capsys.readouterr().out
    assert "nothing clashes" not in shown and shown.index("vllm 0.34") < shown.index("numpy 2.5")


def test_the_doctor_asks_torch_for_its_triton(monkeypatch):
    required = ["filelock", 'triton==3.8.0; platform_system == "Linux"', "triton-other==1"]
    monkeypatch.setattr(doctor.importlib.metadata, "requires", lambda name: required)
    assert doctor.here()["torch's triton"] == "3.8.0"
    monkeypatch.setattr(doctor.importlib.metadata, "requires", lambda name: None)
    assert doctor.here()["torch's triton"] is None


def test_the_doctor_answers_for_this_machine(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "here", lambda: SOUND)
    assert info.main(["--doctor"]) == 0 and capsys.readouterr().out == "nothing clashes\n"
    monkeypatch.setattr(doctor, "here", lambda: SOUND | {"torch": "2.6.0"})
    assert info.main(["--doctor"]) == 1 and "    pip install" in capsys.readouterr().out
    monkeypatch.undo()

    def broken():
        raise ImportError("libhccl.so: cannot open shared object file")

    monkeypatch.setattr(versions, "cann", broken)
    here = doctor.here()
    # PyPI's package does not say which build it is
    assert here["torch"] in (torch.__version__, torch.__version__.partition("+")[0])
    assert here["CANN"] is None
    (found,) = doctor.clashes(ASCEND | {"CANN": None} | {n: x for n, x in here.items() if " " in n})
    said = "does not import: ImportError: libhccl.so: cannot open shared object file."
    assert found.sentence.endswith(said) and "set_env.sh" in found.command


@pytest.mark.parametrize("ours", [TypeError, KeyError])
def test_a_mistake_of_ours_is_not_an_answer(ours, monkeypatch):
    def wrong():
        raise ours("a test's")

    monkeypatch.setattr(versions, "cann", wrong)
    for report in (doctor.here, lambda: [*info.report()]):
        with pytest.raises(ours, match="a test's"):
            report()


@pytest.mark.parametrize(
    ("version", "numbers"),
    [
        ("2.9.0.post2+cpu", (2, 9, 0)),
        ("2.9.0rc1", (2, 9, 0)),
        ("2.13.0a0+git1a2b", (2, 13, 0)),
        ("3", (3,)),
        ("unknown", ()),
    ],
)
def test_releases_of_builds_before_the_release(version, numbers):
    assert versions.release(version, 3) == numbers


def test_what_is_installed_is_looked_up_once():
    assert versions.installed("torch") and versions.installed("torch")
    assert versions.installed.cache_info().hits
