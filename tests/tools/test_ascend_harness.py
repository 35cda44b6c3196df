# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The Ascend harness itself, as far as it needs no Ascend tools: its readings of IR, its lists."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
import sys
import tarfile
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from custom.dispatch.common import memory as launcher_memory
from custom.dispatch.registry import BY_NAME
from custom.npu_ops.common import tune

from ..ascend import (
    aten,
    calibrate,
    cost,
    examine,
    forms,
    known,
    large,
    lint,
    mutants,
    onboard,
    published,
    report,
    second,
    sources,
    store,
)
from ..ascend.case import Case
from ..ascend.compiler import Compiled
from ..ascend.cost import Rates
from ..ascend.toolchain import NEWEST
from ..support import places

GM = "#hivm.address_space<gm>"
UB = "#hivm.address_space<ub>"


def module(*functions: str) -> str:
    return "module {\n" + "\n".join(f"  func.func {text}\n  }}" for text in functions) + "\n}\n"


def test_scalar_loop_behind_an_offset():
    """The loop variable is in the offset, the brackets hold a constant."""
    assert (
        lint.scalar_loops(f"""
    scf.for %arg21 = %c0_i32 to %arg10 step %c1_i32  : i32 {{
      %44 = affine.apply #map1()[%28, %arg21]
      %at = memref.reinterpret_cast %arg4 to offset: [%44], sizes: [1] : memref<1xi32, {GM}>
      %45 = memref.load %at[%c0] {{mark = 0 : i32}} : memref<1xi32, strided<[1]>, {GM}>
    }}
""")
        == 1
    )


def test_scalar_store_in_a_branch_of_an_innermost_loop():
    assert (
        lint.scalar_loops(f"""
    scf.for %arg20 = %c0 to %c32 step %c1 {{
      scf.for %arg21 = %c0 to %c32 step %c1 {{
        scf.if %48 {{
          memref.store %50, %51[%arg21] : memref<32xf32, {UB}>
        }} {{unlikely}}
      }} {{ExtractedLoadOrStore}}
      %1 = memref.load %51[%c0] : memref<1xf32, {UB}>
    }}
""")
        == 1
    )


def test_bulk_loops_are_not_scalar():
    """Copies of whole tiles, and a scalar load of a loop that only contains the innermost one."""
    assert (
        lint.scalar_loops(f"""
    scf.for %arg20 = %c0 to %c32 step %c1 {{
      %45 = memref.load %at[%c0] : memref<1xi32, {GM}>
      scf.for %arg21 = %c0 to %c32 step %c1 {{
        %view = memref.subview %3[%arg21] [64] [1] : memref<128xf32, {GM}> to memref<64xf32, {GM}>
        func.call @load_gm_to_ubuf_1d_float(%view, %4) : (memref<?xf32, {GM}>) -> ()
      }}
    }}
    %46 = memref.load %at[%c0] : memref<1xi32, {GM}>
""")
        == 0
    )


def cube_half(view: str, use: str, kernel: str = "scores_mix_aic") -> str:
    workspace = f"%arg2: memref<?xi8, {GM}> {{hacc.arg_type = #hacc.arg_type<workspace>}}"
    return f"""@{kernel}(%arg0: i64, {workspace}) {{
    scf.for %arg29 = %18 to %20 step %c1_i32  : i32 {{
      %view = memref.view %arg2[%106][] : memref<?xi8, {GM}> to memref<{view}, {GM}>
      {use}
    }}"""


ONE = cube_half("64x128xf32", f"%cast = memref.cast %view : memref<64x128xf32, {GM}> to memref<?>")
# a tail of the only slot is no slot
TAIL = cube_half(
    "64x128xf32", f"%s = memref.subview %view[0, 0] [%76, 128] [1, 1] : memref<64x128xf32, {GM}>"
)
FOUR = cube_half(
    "4x64x128xf32",
    "%s = memref.subview %view[%arg32, 0, 0] [1, 64, 128] [1, 1, 1] : memref<4x64x128xf32>",
)

# beside it a buffer of two slots, and one of a single slot
MORE = f"""{FOUR}
      %view_1 = memref.view %arg2[%107][] : memref<?xi8, {GM}> to memref<2x64x16xf32, {GM}>
      %t = memref.subview %view_1[%arg32, 0, 0] [1, 64, 16] [1, 1, 1] : memref<2x64x16xf32, {GM}>
      %view_2 = memref.view %arg2[%108][] : memref<?xi8, {GM}> to memref<64x16xf32, {GM}>"""


@pytest.mark.parametrize(
    ("functions", "slots"),
    [
        ([ONE], 1),
        ([TAIL], 1),
        ([FOUR], 4),
        ([MORE], 2),
        # the vector half takes its share of the only slot
        ([ONE, FOUR.replace("mix_aic", "mix_aiv")], 1),
        # not mixed: nothing is handed over
        ([ONE.replace("_mix_aic", "")], 0),
        (["@scores_mix_aic(%arg0: i64) {\n    return"], 0),
    ],
)
def test_tiles_that_cube_and_vector_have_under_way(functions, slots):
    assert cost.slots(module(*functions)) == slots
    assert ("turns" in [found.kind for found in lint.of(module(*functions))]) == (slots == 1)


@pytest.mark.parametrize(
    "multiply",
    [
        "func.call @mma_tile_bfloat16_t_to_float(%cast_6, %cast_7, %true, %c64, %c256, %c128) : ()",
        "hivm.hir.mmadL1 {b_transpose} ins(%cast_6, %cast_7, %true, %c64, %c256, %c128 : x) outs()",
    ],
)
@pytest.mark.parametrize(
    ("tile", "wrong"),
    [
        ("8x16x16x16xbf16", 0),
        ("16x8x16x16xbf16", 0),
        ("256x1x16x16xbf16", 1),
        ("8x8x16x32xi8", 0),
        ("16x8x16x32xi8", 1),
    ],
)
def test_multiply_of_another_tile(multiply, tile, wrong):
    space = "#hivm.address_space<cbuf>"
    body = f"""@product(%arg0: i64) {{
    %c64 = arith.constant 64 : index
    %c128 = arith.constant 128 : index
    %c256 = arith.constant 256 : index
    %cast_7 = memref.cast %36 : memref<{tile}, {space}> to memref<?x?x?x?xbf16, {space}>
    {multiply}"""
    assert len(lint.wrong_multiplies(module(body))) == wrong


@pytest.mark.parametrize(
    ("condition", "branch", "repeats"),
    [
        ("arith.cmpi eq, %22, %c0 : index", "%23", True),
        # its share of the tile, and a branch on something else
        ("affine.apply #map()[%22]", "%35", False),
        ("arith.cmpi eq, %21, %c0 : index", "%35", False),
        ("arith.cmpi slt, %22, %c1 : index", "%23", False),
        # the name of something else by then
        ("arith.cmpi eq, %22, %c0 : index\n    %23 = arith.cmpi eq, %9, %8 : i32", "%23", False),
    ],
)
def test_repeat_without_its_mark(condition, branch, repeats):
    body = f"""@rows_mix_aiv(%arg0: i64) {{
    %21 = hivm.hir.get_sub_block_idx -> i64
    %22 = arith.index_cast %21 : i64 to index
    %23 = {condition}
    scf.for %arg1 = %c0 to %c8 step %c1 {{
      scf.if {branch} {{
        hivm.hir.store ins(%1 : memref<8xf32, {UB}>) outs(%2 : memref<8xf32, {GM}>)
      }}
    }}"""
    assert lint.repeats(module(body)) is repeats


def test_repeat_and_retry():
    kinds = [x.kind for x in lint.of("{limit_sub_block_id0}", "[NOTE] compiled again, single")]
    assert kinds == ["retry", "repeat"]
    assert lint.of(module("@rows(%arg0: i64) {\n    return"), "warning: unused") == []


INDIRECT = """
    %1 = tt.load %0, %m : tensor<32x!tt.ptr<i32>>
    {clamp}
    %3 = tt.splat %arg1 : !tt.ptr<f32> -> tensor<32x!tt.ptr<f32>>
    %4 = tt.addptr %3, %2 : tensor<32x!tt.ptr<f32>>, tensor<32xi32>
    %5 = tt.load %4, %m, %o : tensor<32x!tt.ptr<f32>>
"""


@pytest.mark.parametrize(
    ("clamp", "kinds"),
    [
        ("%2 = arith.addi %1, %c : tensor<32xi32>", ["index"]),
        ("%2 = arith.select %m, %1, %z : tensor<32xi1>, tensor<32xi32>", []),
    ],
)
def test_masked_load_through_an_index(clamp, kinds):
    found = lint.unbounded_indirect_loads(INDIRECT.replace("{clamp}", clamp))
    assert [x.kind for x in found] == kinds


def test_known_findings_name_what_ships():
    for entry in known.KNOWN:
        assert entry.kind in known.KINDS, entry
        assert entry.reason, entry
        assert any(
            entry.covers(entry.kernel, config, entry.kind, entry.builds[0])
            for config in tune.TABLE[entry.kernel]
        ), f"{entry} covers no configuration"


def test_a_known_finding_covers_its_tiles_and_builds_only():
    entry = known.Known("a.b", "repeat", "why", builds=("1.0.0",), tiles=(("HEAD_TILE", 64),))
    config = tune.Config({"HEAD_TILE": 64, "KEY_TILE": 64})
    assert entry.covers("a.b", config, "repeat", "1.0.0")
    assert not entry.covers("a.b", config, "repeat", "1.1.0")
    assert not entry.covers("a.b", config, "turns", "1.0.0")
    smaller = dataclasses.replace(config, tiles={"HEAD_TILE": 16, "KEY_TILE": 64})
    assert not entry.covers("a.b", smaller, "repeat", "1.0.0")


def test_a_tight_plan_is_named_and_a_name_is_needed(monkeypatch):
    """Above the bound unnamed fails, and so does a name of what fits."""

    def problems(kib):
        row = report.Row("a.b", tune.Config({"ROWS": 8}))
        row.compiled = {NEWEST: [Compiled(kib={"UB": kib})]}
        return row.problems

    monkeypatch.setattr(known, "KNOWN", ())
    assert problems(known.TIGHT) == []
    assert problems(known.TIGHT + 1) == ["a.b ROWS=8: 1.2.0: tight: 161 KiB of UB"]
    entry = known.Known("a.b", "tight", "why", tiles=(("ROWS", 8),))
    monkeypatch.setattr(known, "KNOWN", (entry,))
    monkeypatch.setattr(known, "_met", set())
    assert problems(known.TIGHT) == []
    assert known.unused() == ["known.py: a.b tight ROWS=8"]
    assert problems(known.TIGHT + 1) == []
    assert known.unused() == []


def test_onboard_without_a_compiler_says_what_to_source(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SystemExit, match=r"no bishengir-compile in PATH.*set_env.sh"):
        onboard.tools()


def test_onboard_packs_what_was_written_without_the_home_folder(monkeypatch, tmp_path, capsys):
    folder, archive = tmp_path / "ascend-results", tmp_path / "ascend-results.tar.gz"
    folder.mkdir()
    monkeypatch.setattr(onboard, "FOLDER", folder)
    monkeypatch.setattr(onboard, "ARCHIVE", archive)
    monkeypatch.setenv("HOME", "/home/owner")
    (folder / "bench.txt").write_text("/home/owner/clone: 3 us; /home/owners is another\n")
    assert onboard.pack()
    with tarfile.open(archive) as packed:
        assert packed.getnames() == ["ascend-results/bench.txt"]
        read = packed.extractfile("ascend-results/bench.txt")
        assert read is not None
        assert read.read() == b"~/clone: 3 us; /home/owners is another\n"
    assert "without compile.json" in capsys.readouterr().out


def log_of(folder, program: str, **options) -> tuple[bool, str]:
    good = onboard._logged("step", onboard.sys.executable, "-c", program, **options)
    return good, (folder / "step.txt").read_text()


@pytest.fixture
def results(monkeypatch, tmp_path):
    monkeypatch.setattr(onboard, "FOLDER", tmp_path)
    return tmp_path


def test_onboard_logs_a_step_that_fails_and_goes_on(results):
    good, log = log_of(results, "import sys; print('before'); sys.exit(3)")
    assert not good and log.startswith("before\nended with 3 after")


def test_onboard_gives_no_step_what_compile_needs(monkeypatch, results):
    monkeypatch.setenv("CUSTOM_BACKEND", "npu")
    monkeypatch.setenv("TRITON_ASCEND_ARCH", "Ascend910_9392")
    program = "import os; print(*[x for x in os.environ if x.startswith(('CUSTOM_B', 'TRITON_A'))])"
    assert log_of(results, program)[1].startswith("\nended with 0")
    assert onboard.said(onboard.sys.executable, "-c", program) == ""


SILENT = "print('before', flush=True); import time; time.sleep(60)"
TALKS = "import time\nwhile True: print('on', flush=True); time.sleep(0.05)"
# as a driver: neither Python nor a signal that can be refused gets through
DEAF = f"import signal; signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.SIGABRT}}); {SILENT}"
LEAVES = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SILENT!r}])"


@pytest.mark.parametrize(
    "program",
    [SILENT, TALKS, DEAF, f"{LEAVES}; {SILENT}"],
    ids=["silent", "talks on", "deaf", "with a child"],
)
def test_onboard_ends_what_hangs_and_all_that_it_started(program, monkeypatch, results):
    monkeypatch.setattr(onboard, "_LAST_WORDS", 1.0)
    groups = []
    kill = onboard.os.killpg
    monkeypatch.setattr(onboard.os, "killpg", lambda *a: (groups.append(a[0]), kill(*a)))
    began = time.monotonic()
    good, log = log_of(results, program, patience=1.0)
    assert not good and log.endswith("killed after 1 s\n") and time.monotonic() - began < 10
    assert log.startswith("on\n" if program is TALKS else "before\n")
    # where it stood
    assert ('File "<string>", line' in log) is (program is not DEAF)
    with pytest.raises(ProcessLookupError):
        while time.monotonic() - began < 20:  # orphans are taken away by init, in its time
            kill(groups[0], 0)


def test_onboard_does_not_wait_for_what_a_step_left_behind(results):
    began = time.monotonic()
    good, log = log_of(results, LEAVES)
    assert good and "ended with 0" in log and time.monotonic() - began < 20


def test_onboard_stops_at_versions_that_clash_before_it_compiles(monkeypatch, results, capsys):
    package = results / "path" / "torch_npu-2.14.0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Name: torch_npu\nVersion: 2.14.0\n")
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    compiled = []
    monkeypatch.setattr(onboard, "compile_step", lambda *_: compiled.append("once") or True)
    monkeypatch.setattr(onboard.sys, "argv", ["onboard", "compile"])
    with pytest.raises(SystemExit, match="mend what is named above, or go on as it is with --any"):
        onboard.main()
    assert compiled == [] and "torch_npu 2.14.0 is built against torch" in capsys.readouterr().out
    assert "torch_npu 2.14.0 is built against torch" in (results / "doctor.txt").read_text()
    monkeypatch.setattr(onboard, "_logged", lambda *_, **__: False)
    monkeypatch.setattr(onboard.sys, "argv", ["onboard", "compile", "--anyway"])
    assert onboard.main() == 0 and compiled == ["once"]


def test_onboard_without_a_card_goes_through_every_step(monkeypatch, results, capsys):
    """The step `compile` is a part of `make test-ascend`, which has its tools."""
    pytest.importorskip("transformers")
    folder = results / "dry-ascend-results"
    monkeypatch.setattr(onboard, "FOLDER", results / "ascend-results")
    monkeypatch.setattr(onboard, "ARCHIVE", results / "ascend-results.tar.gz")
    lowered = []

    def compile_step(arch, jobs, names):
        (folder / "compile.json").write_text("{}")
        return not lowered.extend(names)

    monkeypatch.setattr(onboard, "compile_step", compile_step)
    monkeypatch.setattr(onboard.sys, "argv", ["onboard", "--dry"])
    assert onboard.main() == 0, capsys.readouterr().out
    assert lowered == [onboard.DRY_OP] and onboard.DRY_FILE in onboard.files()
    said = capsys.readouterr().out
    assert all(f"{step}: good" in said for step in ("compile", "suite", "rates", "bench", "pack"))
    with tarfile.open(results / "dry-ascend-results.tar.gz") as packed:
        names = {Path(name).name for name in packed.getnames()}
    op = f"bench_npu_{onboard.DRY_OP}"
    steps = {"doctor.txt", f"{onboard.DRY_FILE}.txt", f"{op}.txt", "example.txt", "rates.txt"}
    files = {f"{onboard.DRY_FILE}.json", f"{op}.csv", "compile.json", "rates.json"}
    assert names == steps | files
    assert {path.name for path in results.iterdir()} == {folder.name, f"{folder.name}.tar.gz"}


RATES = Rates(cached=2.2, copy=1.3e-7, hand_off=2.5e-6, gap=1.9e-6, host=3.1e-5)


def test_a_card_of_other_rates_is_told_and_charged(monkeypatch, tmp_path, capsys):
    """The file that calibrate.py writes is the one that the model reads."""
    monkeypatch.setattr(cost, "rates", Rates())
    monkeypatch.setattr(calibrate, "Card", lambda: calibrate.StandIn(RATES))
    monkeypatch.setattr(sys, "argv", ["calibrate", "--to", str(tmp_path / "rates.json")])
    calibrate.main()
    said = capsys.readouterr().out
    assert re.search(r"hand-off +1\.75 us +2\.5 us +1\.43\n", said) and "a stand-in, 20" in said
    waiting = [cost.Cost(waits=1000)] * 2
    before = cost.seconds(waiting, 1, 1, {})[0]
    cost.take(tmp_path / "rates.json")
    for name, want in dataclasses.asdict(RATES).items():
        assert name == "source" or getattr(cost.rates, name) == pytest.approx(want), name
    assert cost.seconds(waiting, 1, 1, {})[0] / before == pytest.approx(2.5 / 1.75)


def test_the_model_of_programs_whose_form_is_known(monkeypatch):
    """What CANN's products and sums took on a card: neither kind nor harsh, off by 1.5, two thirds
    within 30%; of those with many rows and columns, all."""
    monkeypatch.setattr(cost, "rates", Rates())
    known = forms.cann()
    found, (low, high) = forms.ratios(known), published.BAND
    assert low <= published.mean(found) <= high
    assert forms.spread(found) <= 1.55 and forms.within(found) >= 2 / 3 * len(found)
    large = re.compile(r"\[4096, (\d+)\] x \[\d+, (1024|2048|[3-9]\d{3})\]")
    of_large = [
        x
        for x, form in zip(found, known, strict=True)
        if (sizes := large.fullmatch(form.what)) and int(sizes[1]) % 128 == 0
    ]
    assert len(of_large) >= 11 and forms.within(of_large) == len(of_large)


def test_the_model_of_a_delta_rule_whose_form_is_known(monkeypatch):
    """All stages are within 20%, those that take turns and the one with two slots, with one cost of
    a hand-off: what it is, and who pays for it."""
    monkeypatch.setattr(cost, "rates", Rates())
    stages = forms.stages()
    found = forms.ratios(stages)
    assert len(found) == 24 and forms.within(found, 1.2) == 24
    assert forms.spread(found) <= 1.15 and 0.9 <= published.mean(found) <= 1.05
    assert {form.slots for form in stages} == {1, 2}
    # without the hand-offs they are half as long, and the one with two slots a third
    monkeypatch.setattr(cost, "rates", Rates(hand_off=0.0))
    for slots, most in ((1, 0.6), (2, 0.4)):
        free = [form for form in stages if form.slots == slots]
        assert published.mean(forms.ratios(free)) <= most


def test_what_slots_hide_of_a_hand_off(monkeypatch):
    """All but a share where other tiles are under way; nothing of it where a half stops."""
    monkeypatch.setattr(cost, "rates", Rates(hand_off=2e-6))

    def us(slots: int, stops: int = 0, cycles: int = 0) -> float:
        half = cost.Cost(waits=200, rounds=100, stops=stops, cycles=cycles)
        return cost.seconds([half, half], slots, 1, {})[0] * 1e6

    busy = round(1e-3 * cost.card.clock)  # 1 ms of each half
    assert us(1) == pytest.approx(400) and us(1, cycles=busy) == pytest.approx(2400, rel=1e-3)
    # a hand-off of every turn, of which two are under way, four; the first and the last
    assert us(2) == pytest.approx(100) and us(4) == pytest.approx(50)
    assert us(2, cycles=busy) == pytest.approx(1100, rel=1e-3)
    assert us(4, cycles=busy) == pytest.approx(1004, rel=1e-3)
    assert us(4, stops=100, cycles=busy) == pytest.approx(1204, rel=1e-3)
    assert us(0, cycles=busy) == pytest.approx(1004, rel=1e-3)


def test_tiles_that_are_waited_for_and_stops_are_counted():
    """A tile once, however many waits and loops side by side it goes through; the barrier that ends
    a launch is its head's."""
    body = """scf.for %arg3 = %c0 to %c6 step %c1 {
      scf.for %arg4 = %c0 to %c2 step %c1 {
        hivm.hir.sync_block_wait[<CUBE>, <PIPE_S>, <PIPE_S>] flag = 1
        hivm.hir.sync_block_wait[<CUBE>, <PIPE_S>, <PIPE_S>] flag = 2
      }
      scf.for %arg4 = %c0 to %c2 step %c1 {
        hivm.hir.sync_block_wait[<CUBE>, <PIPE_S>, <PIPE_S>] flag = 3
      }
      hivm.hir.pipe_barrier[<PIPE_ALL>]
      hivm.hir.pipe_barrier[<PIPE_MTE2>]
    }
    hivm.hir.sync_block_wait[<CUBE>, <PIPE_S>, <PIPE_S>] flag = 1
    hivm.hir.pipe_barrier[<PIPE_ALL>]"""
    constants = "".join(f"    %c{n} = arith.constant {n} : index\n" for n in (0, 1, 2, 6))
    text = f"\n  func.func @x_mix_aic(%arg0: i64, %arg1: memref<?xi8>) {{\n{constants}    {body}\n"
    (found,) = cost.of(text, [], (1,))
    assert (found.waits, found.rounds, found.stops) == (37, 12, 6)


def test_the_model_beside_what_others_published():
    """Of other programs: no factor each, and ours of all of them neither kind nor harsh."""
    kept = published.read()
    for figure, row in zip(published.FIGURES, kept, strict=True):
        asked = (figure.what, figure.card, figure.us, figure.source)
        assert asked == (row["what"], row["card"], row["us"], row["source"])
    found, (low, high) = published.ratios(kept), published.BAND
    assert len(found) == sum(len(row["us"]) for row in kept)
    assert low <= published.mean(found) <= high
    # a second opinion of all but the longest, which is not ours to hold to a band
    unasked = {row["what"] for row in kept if "second" not in row}
    assert unasked <= {f"chunked delta rule, 16 x 8192 x {heads} heads" for heads in (32, 64)}


def test_rows_of_pools_and_blocks_have_both_estimates():
    """As the bench has them today, and never below a floor."""
    kept = published.read("pooled")
    for figure, row in zip(published.POOLED, kept, strict=True):
        assert (figure.what, figure.us) == (row["what"], row["us"])
        assert min(row["ours"], row["second"]) > row["us"]["floor"]


def test_a_launch_has_a_head_and_one_memory():
    cube, vectors = cost.Cost(of_cube=True), cost.Cost(share=2)
    heads = [cost.head(halves) for halves in ([vectors], [cube], [cube, vectors])]
    assert heads == list(cost.HEADS.values())
    assert cost.in_graph([5e-6] * 2) == pytest.approx(
        10e-6 + 2 * (Rates().gap - cost.HEADS["vectors"])
    )
    out = cost.Memory([], 1, "gm", home=(1, 2**30))
    tile = cost.Memory([2**20], 1, "ub")
    both = cost.Cost()
    for way in ("loads", "stores"):
        both.copy(way, out, tile)
    us = cost.seconds([both], 0, 48, {})
    assert us == (pytest.approx(2 * 48 * 2**20 / cost.MEMORY), "memory")


@pytest.mark.parametrize(("length", "bytes_"), [("%c1", 128), ("%vector", 256)])
def test_a_copy_whose_length_the_vectors_computed_is_of_a_whole_tile(length, bytes_):
    tile, there = f"memref<2x32xf32, {UB}>", f"memref<2x32xf32, strided<[32, 1]>, {GM}>"
    head = f"%arg0: i64, %arg1: memref<?xi8, {GM}>, %arg2: memref<?xf32, {GM}>"
    hivm = f"""
  func.func @k({head}) attributes {{hivm.func_core_type = #hivm.func_core_type<AIV>}} {{
    %c0_i64 = arith.constant 0 : i64
    %c0 = arith.constant 0 : index
    %c1 = arith.constant 1 : index
    %tile = hivm.hir.pointer_cast(%c0_i64) : {tile}
    %vector = memref.load %tile[%c0, %c0] : {tile}
    %at = memref.reinterpret_cast %arg2 to offset: [0], sizes: [2, 32], strides: [32, 1] : {there}
    %from = memref.subview %tile[0, 0] [{length}, 32] [1, 1] : {tile}
    %to = memref.subview %at[0, 0] [{length}, 32] [1, 1] : {there}
    func.call @store_ubuf_to_gm_2d_float(%from, %to, %c0) : ({tile}, {there}, index) -> ()
    return
  }}
"""
    (half,) = cost.of(hivm, [torch.zeros(64)], (1,))
    assert half.copied("stores") == bytes_


def test_operations_of_the_vectors_take_turns_of_256_bytes():
    """Two operands are read in two turns, a cast is as long as its wider side."""
    half, taken = cost.Cost(), []
    for name, sizes in (
        ("vadds_vs_1d_float", [1024, 1024]),
        ("vadd_1d_float", [1024, 1024, 1024]),
        ("vdiv_1d_float", [1025, 1025, 1025]),
        ("vcast_bfloat16_t_to_float_1d", [512, 1024]),
    ):
        before = half.cycles
        half.vector_operation(name, sizes)
        taken.append(half.cycles - before - 18)
    assert taken == [4, 8, 20, 4]


CORES = {"AIC": "cbuf", "AIV": "ub"}
L1 = "memref<4096xbf16, #hivm.address_space<cbuf>>"
SUM, TILE = f"memref<256xf32, {UB}>", f"memref<16x?xbf16, strided<[?, 1], offset: ?>, {GM}>"
L0C, WORK = SUM.replace("<ub>", "<cc>"), f"memref<256xf32, {GM}>"
HALVES = {
    "AIC": f"""
      %d = affine.apply affine_map<()[s0] -> (s0 mod 2)>()[%i]
      %e = arith.index_cast %d : index to i64
      hivm.hir.wait_flag[<PIPE_MTE1>, <PIPE_MTE2>, %e]
      hivm.hir.nd2nz {{dst_continuous}} ins(%tile : {TILE}) outs(%in : {L1})
      hivm.hir.mmadL1 ins(%in, %in, %true, %c16, %c64, %c16 : {L1}, {L1}, i1, index, index, index)\
 outs(%sum : {L0C})
      hivm.hir.fixpipe ins(%sum : {L0C}) outs(%work : {WORK})
      hivm.hir.sync_block_set[<CUBE>, <PIPE_FIX>, <PIPE_S>] flag = 4
""",
    "AIV": f"""
      hivm.hir.sync_block_wait[<VECTOR>, <PIPE_FIX>, <PIPE_S>] flag = 4
      hivm.hir.load ins(%work : {WORK}) outs(%in : {SUM})
      scf.if %false {{
        hivm.hir.vexp ins(%in : {SUM}) outs(%in : {SUM})
      }} else {{
        hivm.hir.vreduce <max> ins(%in : {SUM}) outs(%in : {SUM}) reduce_dims = [0]
        hivm.hir.vsort ins(%in : {SUM}) outs(%in : {SUM})
      }}
""",
}


def half(core: str) -> str:
    """A function of a mixed kernel as GraphSyncSolver leaves it: n turns of a hand-off."""
    types = ["i64", *[f"memref<?xi8, {GM}>"] * 2, f"memref<?xbf16, {GM}>", *["i32"] * 4]
    arguments = ", ".join(f"%arg{i}: {kind}" for i, kind in enumerate(types))
    kind = f"hivm.func_core_type = #hivm.func_core_type<{core}>"
    return f"""func.func @k_mix_{core.lower()}({arguments}) attributes {{{kind}}} {{
  %c0 = arith.constant 0 : index
  %c0_i64 = arith.constant 0 : i64
  %c1 = arith.constant 1 : index
  %c16 = arith.constant 16 : index
  %c64 = arith.constant 64 : index
  %c-1_i32 = arith.constant -1 : i32
  %true = arith.constant true
  %false = arith.constant false
  %n = arith.subi %arg4, %c-1_i32 : i32
  %work = memref_ext.alloc_workspace() from %arg2 offset = [%c0] : from {types[1]} to {WORK}
  %in = hivm.hir.pointer_cast(%c0_i64) : memref<4096xbf16, #hivm.address_space<{CORES[core]}>>
  %sum = hivm.hir.pointer_cast(%c0_i64) : {L0C}
  %tile = memref.reinterpret_cast %arg3 to offset: [0], sizes: [16, %c64], strides: [%c64, 1]\
 : memref<?xbf16, {GM}> to {TILE}
  scf.for %i = %c0 to %n step %c1 {{{HALVES[core]}  }}
  return
}}
"""


def test_the_second_model_is_given_what_a_launch_runs():
    """Sizes, events and branches in numbers; of a long loop an even number of turns before those
    that stand for it; hand-offs in pairs, each with its own number, pieces behind what they wait
    for; what it has no name for is said."""
    q = torch.zeros(16, 64, dtype=torch.bfloat16)
    cube, vectors = (second.unrolled(half(x), [q, 99], (1,), 0) for x in CORES)
    waits = [x.removeprefix("hivm.hir.") for x in cube.lines if "wait_flag" in x]
    assert waits == [f"wait_flag[<PIPE_MTE1>, <PIPE_MTE2>, <EVENT_ID{i % 2}>]" for i in range(8)]
    assert sum(cube.weights) == 3 * 100 and set(cube.weights) == {0.0, 12.5}
    assert cube.lines[1] == (
        f"hivm.hir.nd2nz ins(%arg3_0 : memref<1024xbf16, {GM}>) "
        "outs(%cbuf0 : memref<1024xbf16, #hivm.address_space<cbuf>>)"
    )
    assert "%true, %c16, %c64, %c16 : memref<1024xbf16" in cube.lines[2]
    assert not any("vexp" in x for x in vectors.lines) and vectors.uncounted == {
        "vsort into ub": 96
    }
    pieces, weights = second.in_turn([cube, vectors])
    assert [core for core, _ in pieces] == ["AIC", "AIV"] and sum(weights) == 500
    flags = [[int(x.split()[-1]) for x in piece if "block" in x] for _, piece in pieces]
    assert flags[0] == flags[1] == list(range(8))
    with pytest.raises(second.Stuck, match="wait"):
        second.in_turn([vectors])


def test_a_card_that_is_busy_gives_no_rates():
    with pytest.raises(SystemExit, match=r"no rate can be \{'hand_off': -9.9"):
        calibrate.measured(calibrate.StandIn(dataclasses.replace(RATES, hand_off=-1e-6)))


def test_what_a_call_lays_out_is_its_most_at_one_time():
    def call(rounds: int) -> torch.Tensor:
        out = launcher_memory.empty((large.MIB,), torch.float32, torch.device("cpu"))
        for _ in range(rounds):
            first = launcher_memory.empty((2, large.MIB), torch.float32, torch.device("cpu"))[0]
            second = launcher_memory.empty((3 * large.MIB,), torch.int8, torch.device("cpu"))
            del first, second
        launcher_memory.empty((0, 5), torch.float32, torch.device("cpu"))
        return out

    assert large.bill(lambda: call(1)) == large.bill(lambda: call(7)) == large.Bill(0, 11)


def test_ops_that_go_in_rounds_are_found():
    found = large.in_rounds()
    assert {"npu_chunk_kda_grad", "npu_lightning_indexer", "npu_grouped_o_proj_pto"} <= set(found)
    assert "npu_gated_rms_norm" not in found


def test_a_call_above_the_limits_is_named_and_so_is_a_name_without_need(monkeypatch):
    why = "all chunks are laid out at once"
    monkeypatch.setattr(large, "KNOWN", {"npu_a": (large.Bill(5, 900), why)})
    small, wide, long = large.Bill(100, 768), large.Bill(1, 769), large.Bill(101, 1)
    assert (large.WORKSPACE, large.LAUNCHES) == (768, 100)
    assert large.excess("npu_b", {"1": small}) == large.excess("npu_b", {}) == []
    for found in (wide, long):
        assert "npu_b: Bill(" in large.excess("npu_b", {"1": small, "2": found})[0]
    assert large.excess("npu_a", {"1": large.Bill(5, 900)}) == []
    assert "at most Bill(launches=5, workspace=900)" in large.excess("npu_a", {"1": small})[0]
    assert why in large.excess("npu_a", {"1": large.Bill(5, 768)})[0]


def test_onboard_runs_files_and_ops_that_exist():
    files, measured = onboard.files(), onboard.measured()
    assert set(files) <= set(onboard.paths())
    assert tuple(files[: len(onboard.RISKY)]) == onboard.RISKY
    assert {"test_chunk_kda", "test_quantized_prologs", "test_merging"} <= set(files)
    assert "test_layering" not in files
    assert set(measured) <= set(BY_NAME)
    assert tuple(measured[: len(onboard.WANTED)]) == onboard.WANTED
    assert {"npu_merge_states", "npu_chunk_kda_grad", "npu_index_cache_write"} <= set(measured)


TEXT = """
def kernel(x, out, first, rows, eps):
    there = first + step() < rows
    tile = tl.load(x + first, mask=there, other=0.0)
    out = tl.rsqrt(tile + eps)
    helper(x, out, rows)
    return range(first, rows)
"""


def test_mutants_of_a_text():
    told = {(x.kind, x.old, x.new) for x in mutants.mutants_of("file", TEXT)}
    assert told == {
        ("off by one", "first + step() < rows", "first + step() <= rows"),
        ("a part dropped", "first + step()", "step()"),
        ("a part dropped", "x + first", "x"),
        ("a mask dropped", "tl.load(x + first, mask=there, other=0.0)", "tl.load(x + first)"),
        ("an epsilon moved", "tl.rsqrt(tile + eps)", "tl.rsqrt(tile) + eps"),
        ("an epsilon dropped", "tl.rsqrt(tile + eps)", "tl.rsqrt(tile)"),
        ("swapped", "helper(x, out, rows)", "helper(out, x, rows)"),
        ("swapped", "helper(x, out, rows)", "helper(x, rows, out)"),
    }
    for x in mutants.mutants_of("file", TEXT):
        compile(x.text, "file", "exec")
        assert sum(a != b for a, b in zip(x.text.split("\n"), TEXT.split("\n"), strict=True)) == 1


@pytest.mark.parametrize(
    "other",
    [
        lambda x, y, out: out[1:].copy_((x < y)[:3]),
        lambda x, y, out: out[:3].copy_((x <= y)[:3]),
        lambda x, y, out: out[:3].copy_((y < x)[:3]),
        lambda x, y, out: out[:3].copy_((x < y)[1:]),
        lambda x, y, out: out[:3].copy_((x < 0)[:3]),
    ],
)
def test_a_launcher_that_asks_pytorch_for_something_else_is_another(other):
    def asked(launcher) -> list:
        given = {name: torch.zeros(4) for name in ("x", "y", "out")}
        names = {tensor.untyped_storage().data_ptr(): name for name, tensor in given.items()}
        with mutants._Asked(names) as mode:
            launcher(**given)
        return mode.calls

    def launcher(x, y, out):
        out[:3].copy_((x < y)[:3])

    assert asked(launcher) == asked(launcher) != asked(other)


def test_every_launcher_has_its_files():
    assert {"sparse_attention_pto", "product", "ragged"} <= mutants.files_of(
        "npu_sparse_attention_pto"
    )


ROPE = Case("npu_mla_prolog_v3", "any", lambda _: {}, cores=(24,))


def keys(monkeypatch, place: str = "", old: str = "", new: str = "") -> tuple[str, str]:
    """Of the case in results.json and in mutants.json, with a change in a file of dispatch/."""
    kept, real = sources._read, sources.text

    def text(origin: str) -> str:
        assert origin.endswith(place) and old in real(origin)
        return real(origin).replace(old, new, 1)

    def read(name: str) -> tuple[str, tuple[str, ...]]:
        changed = place and name.replace(".", "/") == f"custom/{place.removesuffix('.py')}"
        return kept.__wrapped__(name) if changed else kept(name)

    with monkeypatch.context() as patch:
        patch.setattr(sources, "_read", read)
        patch.setattr(sources, "text", text if place else real)
        for module in (examine, mutants):
            patch.setattr(module, "prepare", lambda: None)
        patch.setattr(examine, "versions", dict)
        patch.setattr(examine, "pipeline", str)
        patch.setattr(mutants, "_launched", lambda *_: ([], set()))
        usual, _ = mutants.baseline(ROPE.op, [ROPE])
        key = examine._key(ROPE, "tests.ascend.ops.quantized_prolog", [])
    return key, usual[ROPE.title].digest


@pytest.fixture(scope="module")
def unchanged():
    with pytest.MonkeyPatch.context() as patch:
        return keys(patch)


DEFAULTS = "dict(zip(defaults, args, strict=False))"
SWAPPED = "dict(zip(reversed(defaults), args, strict=False))"


@pytest.mark.parametrize(
    "change",
    [
        ("dispatch/register.py", DEFAULTS, SWAPPED),
        (
            "dispatch/autograd.py",
            "call = below(keys)(args, kwargs)",
            "call = below(keys)((), kwargs)",
        ),
        ("dispatch/backends.py", "return Launcher(function, *refusals)", "return Launcher(print)"),
        ("dispatch/call_cache.py", "pointer & 15", "0"),
        ("dispatch/op_spec.py", 'getattr(op, "FUNCTION", "forward")', '"forward"'),
        ("dispatch/check.py", "fits = False", "pass"),
        ("dispatch/overlap.py", "if start >= end", "if start > end"),
        ("dispatch/ops/prolog/mla_prolog_pto.py", "Tensor rope_sin", "Tensor rope_sine"),
        # the op takes its checks of it
        ("dispatch/ops/common/prologs.py", "def ", "def _"),
    ],
    ids=lambda change: change[0],
)
def test_a_record_is_of_what_its_call_goes_through(monkeypatch, unchanged, change):
    now = keys(monkeypatch, *change)
    assert now[0] != unchanged[0] and now[1] != unchanged[1]


@pytest.mark.parametrize(
    "change",
    [
        ("dispatch/ops/merging/merge_states.py", "SCHEMA = (", "SCHEMA = 1, ("),
        ("dispatch/register.py", '"""All arguments by name', '"""Arguments by name'),
        ("dispatch/errors.py", "class ", "class Another(Exception): pass\nclass "),
    ],
    ids=lambda change: change[0],
)
def test_a_record_outlasts_what_its_call_does_not_meet(monkeypatch, unchanged, change):
    assert keys(monkeypatch, *change) == unchanged


def test_every_op_runs_a_case_anew():
    """Any of the quick ones, in the end each of them; the quickest where none is quick."""
    quick = [dataclasses.replace(ROPE, name=f"{n} s") for n in (0, 1, store.QUICK)]
    slow = [dataclasses.replace(ROPE, op="npu_other", name=f"{n} s") for n in (9, 5, 70)]
    took = {case: float(case.name.split()[0]) for case in (*quick, *slow)}
    took[dataclasses.replace(ROPE, name="just not")] = store.QUICK + 1
    drawn = [store.drawn(took) for _ in range(100)]
    assert all([case.op for case in each] == [ROPE.op, "npu_other"] for each in drawn)
    assert {each[0] for each in drawn} == {*quick} and {each[1] for each in drawn} == {slow[1]}


def test_the_cases_that_run_anew_take_a_minute_of_two_cores():
    """By the seconds in results.json, were every op to draw the longest that it may."""
    by_op: dict[str, list[float]] = {}
    for title, (_, _, seconds) in json.loads(store.PATH.read_text())["cases"].items():
        by_op.setdefault(title.partition(":")[0], []).append(seconds)
    worst = [max([x for x in of if x <= store.QUICK] or [min(of)]) for of in by_op.values()]
    assert len(worst) > 40 and sum(worst) / 2 <= 60


def test_what_a_launcher_asks_of_torch_is_noted_by_kernel(monkeypatch):
    """A view asks for nothing, and a composite operator for its parts."""
    monkeypatch.setattr(aten, "seen", set())
    x = torch.arange(6.0)
    with aten._Mode():
        torch.nn.functional.pad(x.view(2, 3).mT.contiguous(), (1, 0)).diff(dim=0).to(torch.int32)
        with aten.apart():
            x.exp()
    assert aten.seen == {"clone", "constant_pad_nd", "sub", "_to_copy"}
    assert aten.uncaptured([("npu_toy", aten.seen)]) == []
    with aten._Mode():
        torch.logspace(0, 1, 3)  # aclop alone
        torch.tensor([1])
    said = aten.uncaptured([("npu_toy", aten.seen), (OTHER, {aten.HOST})])
    assert [x.split(", which")[0] for x in said] == [
        "npu_toy calls torch's lift_fresh",
        "npu_toy calls torch's logspace",
    ]


OTHER = next(iter(aten.KNOWN))[0]
LAUNCHERS = {x: ast.parse(path.read_text()) for x, path in places.files().items()}
ENTRIES = [
    (file, node.name)
    for file, tree in LAUNCHERS.items()
    for node in tree.body
    if isinstance(node, ast.FunctionDef)
    and any(ast.unparse(x).startswith(("entry.jit", "tuples.jit")) for x in node.decorator_list)
]


def test_a_profiler_tells_kernels_apart():
    """The machine keeps 49 characters of a name."""
    names = Counter(f"{file}_{function}"[:49] for file, function in ENTRIES)
    assert len(names) > 50 and max(names.values()) == 1


@pytest.mark.parametrize("file", sorted(LAUNCHERS))
def test_what_is_launched_has_the_name_of_its_file(file):
    calls = (x for x in ast.walk(LAUNCHERS[file]) if isinstance(x, ast.Call))
    launched = {ast.unparse(x.func.value) for x in calls if isinstance(x.func, ast.Subscript)}
    assert launched <= {function for _, function in ENTRIES}


def _fields(file: str, name: str) -> list[str]:
    """Of a named tuple of the file, or of one that it imports; of another class none."""
    for x in LAUNCHERS[file].body:
        if isinstance(x, ast.ClassDef) and x.name == name:
            return [ast.unparse(part.target) for part in x.body if isinstance(part, ast.AnnAssign)]
        if isinstance(x, ast.ImportFrom) and name in {alias.name for alias in x.names}:
            origin = (x.module or "").rpartition(".")[2]
            return _fields(origin, name) if origin in LAUNCHERS else []
    return []


@pytest.mark.parametrize("kernel", sorted(tune.TABLE))
def test_kernels_declare_what_their_tiles_name(kernel):
    """triton-ascend warns of an option that is no parameter of the kernel, at every compile."""
    file, _, function = kernel.partition(".")
    node = next(
        x for x in LAUNCHERS[file].body if isinstance(x, ast.FunctionDef) and x.name == function
    )
    declared = {argument.arg for argument in node.args.args}
    for argument in node.args.args:
        if isinstance(argument.annotation, ast.Name):
            declared |= {*_fields(file, argument.annotation.id)}
    for config in tune.TABLE[kernel]:
        assert {*config.tiles, *config.options} <= declared
