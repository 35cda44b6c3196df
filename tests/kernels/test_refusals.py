# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""A compiler that refuses tiles, by stand-ins: what is tried next, what is said and remembered."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
from multiprocessing.synchronize import Barrier

import pytest
import torch
from custom.dispatch import backends, log, register, versions
from custom.dispatch.env import config
from custom.dispatch.errors import NotSupported
from custom.dispatch.registry import BY_NAME
from custom.npu_ops.common import refusals, tune

from ..support import places, stand_in
from ..support.samples import sample
from ..support.threads import at_once

KERNEL = "stand_in.walk"
CONFIGS = tuple(tune.Config({"TILE": size}) for size in (16, 32, 64))
OVERFLOW = (
    "error: ub overflow, requires 1675520 bits while 1572864 bits available! (possible reason ..)"
)


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """A table with one kernel, an empty memory, and a compiler that says its version."""
    compiler = tmp_path / "bin/bishengir-compile"
    compiler.parent.mkdir()
    compiler.write_text("#!/bin/sh\necho 'bishengir-compile 9.9 (abc 2031-01-02)'\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{compiler.parent}:/usr/bin:/bin")
    monkeypatch.setitem(tune.TABLE, KERNEL, CONFIGS)
    monkeypatch.setattr(config, "cache_dir", str(tmp_path / "cache"))
    monkeypatch.setattr(log, "_said", set())
    refusals.forget()
    yield
    refusals.forget()


def triton_error(text: str, code: int = 1, tool: str = "/cann/bin/bishengir-compile") -> Exception:
    """As triton-ascend raises it: an error of its own, in the handling of the process's."""
    try:
        try:
            raise subprocess.CalledProcessError(code, [tool, "kernel.mlir"], b"", text.encode())
        except subprocess.CalledProcessError as error:
            raise RuntimeError(f"[ConvertLinalgRToBinary] encounters error: {error.stderr}")  # noqa: B904
    except RuntimeError as error:
        return error


class Launcher:
    """Launches one kernel, whose tiles compile where `fits` says so."""

    def __init__(self, fits, error=None) -> None:
        self.fits, self.error = fits, error or triton_error(OVERFLOW)
        self.compiled: list[int] = []

    def __call__(self, x: torch.Tensor) -> int:
        chosen = tune.at_least(KERNEL, "TILE", x.shape[0], x.shape[1])
        return self.kernel(**chosen.keywords)

    def kernel(self, TILE: int) -> int:
        self.compiled.append(TILE)
        if not self.fits(TILE):
            raise self.error
        return TILE


def call(launcher: Launcher, rows: int = 20, columns: int = 8) -> int:
    return tune.retrying("npu_stand_in", launcher)(x=torch.zeros(rows, columns))


def test_the_next_tiles_are_taken_and_it_is_said_once(capsys):
    launcher = Launcher(lambda tile: tile < 32)
    assert call(launcher) == 16
    # those that cover 20 rows, then the largest of the others
    assert launcher.compiled == [32, 64, 16]
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert "bishengir-compile 9.9 (abc 2031-01-02) refuses stand_in.walk TILE=32" in lines[0]
    assert "UB overflow, 205 KiB of 192" in lines[0]
    launcher.compiled.clear()
    assert call(launcher) == 16 and launcher.compiled == [16]
    assert capsys.readouterr().err == ""


def test_another_shape_has_its_own_memory():
    launcher = Launcher(lambda tile: tile < 32)
    call(launcher)
    launcher.compiled.clear()
    launcher.fits = lambda tile: True
    assert call(launcher, columns=9) == 32
    assert call(launcher, columns=8) == 16


def test_another_process_remembers(tmp_path):
    call(Launcher(lambda tile: tile < 32))
    refusals.forget()  # as a new process
    launcher = Launcher(lambda tile: tile < 32)
    assert call(launcher) == 16 and launcher.compiled == [16]


def test_another_compiler_is_asked_again(tmp_path):
    call(Launcher(lambda tile: tile < 32))
    refusals.forget()
    versions._build.cache_clear()
    (tmp_path / "bin/bishengir-compile").write_text("#!/bin/sh\necho 'bishengir-compile 10.0'\n")
    launcher = Launcher(lambda tile: True)
    assert call(launcher) == 32 and launcher.compiled == [32]


@pytest.mark.parametrize("slow", [False, True])
def test_a_compiler_without_a_version_is_remembered_by_the_process_alone(
    slow, monkeypatch, tmp_path, capsys
):
    def asked():
        if slow:
            raise subprocess.TimeoutExpired("bishengir-compile", 60)

    monkeypatch.setattr(versions, "compiler", asked)
    launcher = Launcher(lambda tile: tile == 64)
    assert call(launcher) == 64 and call(launcher) == 64
    assert launcher.compiled == [32, 64, 64]
    assert "the Ascend compiler refuses stand_in.walk TILE=32" in capsys.readouterr().err
    assert not (tmp_path / "cache").exists()


def test_when_none_fits_one_sentence_says_what_and_why():
    with pytest.raises(NotSupported) as raised:
        call(Launcher(lambda tile: False))
    sentence = str(raised.value)
    assert sentence.startswith("npu_stand_in: bishengir-compile 9.9 (abc 2031-01-02) refuses every")
    for part in ("stand_in.walk", "TILE=32", "TILE=64", "TILE=16", "UB overflow, 205 KiB of 192"):
        assert part in sentence
    assert "x[20,8] fp32" in sentence and "custom.info" in sentence
    # what is remembered costs no answer: a better compiler is tried
    assert call(Launcher(lambda tile: tile == 64)) == 64


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (RuntimeError("ub overflow, requires 2 bits while 1 bits"), "no process behind it"),
        (triton_error("no such file", tool="/usr/bin/g++"), "another tool"),
        (triton_error(OVERFLOW, tool="/wheel/triton-adapter-opt"), "triton-ascend's own front end"),
        (triton_error("", code=-9), "killed for memory"),
        (triton_error("", code=-2), "interrupted"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_other_errors_pass_and_are_not_remembered(error, why, tmp_path):
    launcher = Launcher(lambda tile: False, error)
    with pytest.raises(type(error)) as raised:
        call(launcher)
    assert raised.value is error and launcher.compiled == [32]
    assert not refusals.known() and not (tmp_path / "cache").exists()


def test_tiles_that_nobody_chose_are_not_tried_again():
    launcher = Launcher(lambda tile: False)
    launch = tune.retrying("npu_stand_in", lambda x: launcher.kernel(**CONFIGS[0].keywords))
    with pytest.raises(RuntimeError) as raised:
        launch(x=torch.zeros(1))
    assert raised.value is launcher.error and launcher.compiled == [16]


def test_a_crash_of_the_compiler_is_forgotten_with_the_process(tmp_path):
    launcher = Launcher(lambda tile: tile == 64, triton_error("Assertion `x' failed.", code=-6))
    assert call(launcher) == 64 and launcher.compiled == [32, 64]
    assert call(launcher) == 64 and launcher.compiled == [32, 64, 64]
    assert not (tmp_path / "cache").exists()


class Pushed:
    """A launcher whose first kernel pushes a state on; of the second TILE=32 does not compile."""

    def __init__(self, error: Exception | None = None) -> None:
        self.state, self.walk = 0, Launcher(lambda tile: tile != 32, error)

    def push(self) -> None:
        self.state += 1

    def __call__(self, x: torch.Tensor) -> int:
        tune.stage(self.push)
        return tune.stage(self.walk, x)


def test_a_stage_that_has_run_does_not_run_again():
    launcher = Pushed()
    assert call(launcher) == 64 and launcher.walk.compiled == [32, 64]
    assert launcher.state == 1


def test_what_is_launched_outside_of_stages_does_not_begin_anew_behind_one():
    launcher = Pushed()
    with pytest.raises(RuntimeError) as raised:
        call(lambda x: (tune.stage(launcher.push), launcher.walk(x)))
    assert raised.value is launcher.walk.error and launcher.state == 1


def test_where_a_stage_has_no_tiles_left_it_is_said_that_something_was_written():
    launcher = Pushed()
    launcher.walk.fits = lambda tile: False
    with pytest.raises(NotSupported, match=r"stand_in\.walk .* What the call writes has changed"):
        call(launcher)
    assert launcher.state == 1


def adapter_error(code: int) -> Exception:
    return triton_error("", code, "/wheel/triton/backends/ascend/triton-adapter-opt")


def test_an_adapter_that_crashes_is_run_once_more(capsys):
    """triton-ascend's own front end ends by a signal at random; nothing is remembered of it."""
    launcher = Pushed(adapter_error(-11))
    fails = iter([True])
    launcher.walk.fits = lambda tile: not next(fails, False)
    assert call(launcher) == 32 and launcher.walk.compiled == [32, 32]
    assert launcher.state == 1 and not refusals.known()
    said = "adapter crashed over stand_in.walk TILE=32 for (8,); it is run once more"
    assert capsys.readouterr().err.count(said) == 1


def test_an_adapter_that_crashes_twice_is_an_error():
    launcher = Launcher(lambda tile: False, adapter_error(-11))
    with pytest.raises(RuntimeError) as raised:
        call(launcher)
    assert raised.value is launcher.error and launcher.compiled == [32, 32]


class Kernel:
    """Stands for a kernel that is launched: notes it, or is refused."""

    def __init__(self, name: str, launched: list[str], refused: list[str]) -> None:
        self.name, self.launched, self.refused = name, launched, refused

    def __getitem__(self, grid):
        return self.launch

    def launch(self, *_, **__) -> None:
        if self.refused == [self.name]:
            self.refused.clear()
            raise triton_error(OVERFLOW)
        self.launched.append(self.name)


PUSHING = {
    "npu_fused_causal_conv1d": ["fused_causal_conv1d.push", "causal_conv1d.convolve"],
    "npu_fused_causal_conv1d_v2": ["fused_causal_conv1d.push", "causal_conv1d.convolve"],
    "npu_gated_delta_layer_decode": [
        "causal_conv1d_update.update",
        "fused_sigmoid_gating_delta_rule_update.update",
        "gated_rms_norm.normalise",
    ],
}


@pytest.mark.parametrize(
    ("op", "at"), [(op, at) for op in PUSHING for at in range(len(PUSHING[op]))]
)
def test_no_kernel_of_what_pushes_a_state_on_runs_twice(op, at, monkeypatch):
    """tests/ascend/anew.py compares the bits of every op that the kernels themselves compute."""
    pytest.importorskip("triton")
    with stand_in.of_the_front_end(monkeypatch):
        found = backends.launcher(backends.NPU, BY_NAME[op])
        launched, refused = [], []
        for name in PUSHING[op]:
            file, _, function = name.partition(".")
            monkeypatch.setattr(places.module(file), function, Kernel(name, launched, refused))
            two = [{"again": number} for number in range(2)]
            tiles = dict.fromkeys(tune.TABLE[name][0].tiles, 8)
            monkeypatch.setitem(tune.TABLE, name, tuple(tune.Config(tiles, each) for each in two))
        monkeypatch.setattr(places.module("cores"), "vector", lambda: 2)
        arguments = sample(op, torch.device("cpu"), torch.float32)
        full = register.bind(register.overload(BY_NAME[op])._schema, (), arguments)
        refused.append(PUSHING[op][at])
        found.function(**full)
    assert not refused and launched == PUSHING[op]


def entries(tmp_path):
    return sorted((tmp_path / "cache").rglob("*.json"))


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"refused": ', '{"other": 1}', "\x00\xff"])
def test_a_corrupt_entry_is_ignored(text, tmp_path):
    call(Launcher(lambda tile: tile == 64))
    (entry,) = entries(tmp_path)
    assert json.loads(entry.read_text())["refused"] == "stand_in.walk TILE=32 for (8,)"
    entry.write_text(text)
    refusals.forget()
    launcher = Launcher(lambda tile: tile == 64)
    assert call(launcher) == 64 and launcher.compiled == [32, 64]
    assert json.loads(entry.read_text())["said"] == "UB overflow, 205 KiB of 192"


def test_what_another_user_left_is_ignored(monkeypatch, tmp_path):
    call(Launcher(lambda tile: tile == 64))
    refusals.forget()
    monkeypatch.setattr("os.getuid", lambda: 12345)
    assert refusals.known() == set()


def test_a_folder_that_cannot_be_written_is_said_once(monkeypatch, tmp_path, capsys):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setattr(config, "cache_dir", str(blocked))
    launcher = Launcher(lambda tile: tile < 32)
    assert call(launcher) == 16 and call(launcher) == 16
    assert launcher.compiled == [32, 64, 16, 16]
    assert capsys.readouterr().err.count("cannot be remembered") == 1


def test_the_folder_follows_xdg(monkeypatch, tmp_path):
    monkeypatch.setattr(config, "cache_dir", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    call(Launcher(lambda tile: tile == 64))
    assert len(list((tmp_path / "xdg/npu-custom-ops/refused").rglob("*.json"))) == 1


def test_a_folder_that_is_set_later_is_read(monkeypatch, tmp_path):
    call(Launcher(lambda tile: tile < 32))
    learned = set(refusals.known())
    refusals.forget()
    monkeypatch.setattr(config, "cache_dir", str(tmp_path / "another"))
    assert refusals.known() == set()
    monkeypatch.setattr(config, "cache_dir", str(tmp_path / "cache"))
    assert refusals.known() == learned and len(learned) == 2


def test_threads_at_once_lose_no_refusal():
    """The first look at the folder among them."""
    for turn in range(20):
        refusals.forget()
        at_once(8, lambda number, turn=turn: refusals.add(f"{turn} {number}", "overflow", False))
        assert len(refusals.known()) == 8


def _learn(number: int, cache_dir: str, ready: Barrier) -> None:
    config.cache_dir = cache_dir
    ready.wait()
    for each in range(40):
        refusals.add(f"kernel TILE={each} for ({number % 2},)", "UB overflow", True)


def test_processes_at_once_lose_nothing(tmp_path):
    context = multiprocessing.get_context("spawn")
    ready = context.Barrier(4, timeout=120)
    several = [
        context.Process(target=_learn, args=(number, config.cache_dir, ready), daemon=True)
        for number in range(4)
    ]
    for process in several:
        process.start()
    for process in several:
        process.join(240)
        assert process.exitcode == 0
    assert len(refusals.known()) == 80 == len(entries(tmp_path))
    assert not list((tmp_path / "cache").rglob("*.new"))


def test_widths_hold_a_row_at_once():
    wide = [tune.Config({"WIDTH": width}) for width in (512, 2048)]
    assert tune.ranked(wide, "WIDTH", 500) == wide
    assert tune.ranked(wide, "WIDTH", 600) == wide[1:]
    assert tune.ranked(wide, "WIDTH", 9000) == wide[1:]


def test_every_launcher_of_the_npu_tries_again(monkeypatch):
    spec = BY_NAME["npu_lightning_indexer"]

    class Module:
        @staticmethod
        def forward(**_):
            """The launcher."""

    real = backends.importlib.import_module
    path = f"{backends.NPU.package}.{spec.module}"
    monkeypatch.setattr(
        backends.importlib, "import_module", lambda name: Module if name == path else real(name)
    )
    found = backends.launcher.__wrapped__(backends.NPU, spec)
    assert found is not None and found[0].__wrapped__ is Module.forward
