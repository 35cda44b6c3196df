# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""An owner's afternoon with an Ascend NPU:  python -m tests.ascend.onboard [STEP ...]

    compile    every kernel that ships, with this machine's own compiler; no device is used
    suite      the tests on the NPU, the file with the most risk first, each in a process of its own
    rates      the five rates that the cost model assumes (calibrate.py)
    bench      every op's rows, by graph replay
    pack       all that was written into one archive, to send back

Without a step, all five.  Versions that `custom.info --doctor` finds to clash come first: nothing
runs until they are mended, or with --anyway.  What the steps print goes to ascend-results/ as well;
a step that fails is told and the next one runs, and so is what hangs.

--dry: the same where there is no NPU, in a minute or two.  The CPU stands in for it, and every step
has one op.
"""

from __future__ import annotations

import argparse
import codecs
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from .toolchain import ARCH, ROOT

FOLDER = ROOT / "ascend-results"
ARCHIVE = ROOT / "ascend-results.tar.gz"
_PATIENCE = 3600.0  # seconds for one file of tests, or one op's rows
_LAST_WORDS = 5.0  # seconds for what hangs to say where, and then to be gone

# first what most depends on the machine: memories of the compiler's build, then formats of weights
RISKY = (
    "test_lightning_indexer",
    "test_sparse_flash_attention",
    "test_fused_attention",
    "test_nz",
    "test_mla_prolog_pto",
    "test_indexer_prolog_pto",
    "test_sparse_attention_pto",
    "test_graph_mode",
    "test_fused_sigmoid_gating_delta_rule_update",
    "test_chunk_gated_delta_rule",
    "test_lightning_indexer_grad",
    "test_sparse_flash_attention_grad",
)
# the rows that are wanted most
WANTED = (
    "npu_sparse_attention_pto",
    "npu_lightning_indexer",
    "npu_sparse_flash_attention",
    "npu_mla_prolog_pto",
    "npu_indexer_prolog_pto",
    "npu_fused_sigmoid_gating_delta_rule_update",
    "npu_chunk_gated_delta_rule",
    "npu_fused_attention",
    "npu_fused_attention_backward",
)
# of a dry run
DRY_OP = "merge_states"
DRY_FILE = "test_merging"
DRY_EXAMPLE = ("--dtype", "float32", "--batch", "2", "--context", "26", "--new-tokens", "2")


def tools() -> tuple[Path, str | None]:
    """The machine's compiler and code generator, as triton-ascend finds them."""
    found = shutil.which("bishengir-compile")
    if found is None:
        sys.exit(
            "onboard: there is no bishengir-compile in PATH; run `source "
            "/usr/local/Ascend/ascend-toolkit/set_env.sh` (or your CANN's), then this again"
        )
    return Path(found), shutil.which("hivmc")


def environment() -> dict[str, str]:
    """A child's: without what the step `compile` sets, which is for kernels that no device runs."""
    own = ("CUSTOM_BACKEND", "TRITON_ASCEND_ARCH")
    clean = {name: value for name, value in os.environ.items() if name not in own}
    return clean | {"PYTHONFAULTHANDLER": "1"}


def said(*command: str) -> str:
    """What a command prints, or why it does not run."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=120, env=environment()
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command[0]}: {error}"
    return (done.stdout + done.stderr).strip()


def machine() -> dict[str, str]:
    """What a reader of the archive must know."""
    compiler, hivmc = tools()
    return {
        "compiler": f"{compiler}: {said(str(compiler), '--version')}",
        "code generator": hivmc or "none in PATH: compiled up to the final HIVM",
        "C++": (said("c++", "--version").splitlines() or ["none"])[0],
        "NPUs": said("npu-smi", "info"),
        "info": said(sys.executable, "-m", "custom.info"),
        "packages": said(sys.executable, "-m", "pip", "freeze"),
        "commit": said("git", "-C", str(ROOT), "rev-parse", "HEAD"),
    }


def _bar(done: int, total: int, refused: int, began: float) -> None:
    spent = time.time() - began
    left = spent / done * (total - done) / 60
    filled = "#" * (30 * done // total)
    line = f"[{filled:<30}] {done}/{total}, {refused} failed, {spent / 60:.1f} min, {left:.1f} left"
    print(f"\r{line}", end="\n" if done == total else "", file=sys.stderr, flush=True)


def compile_step(arch: str, jobs: int, names: list[str]) -> bool:
    """Lower everything that the cases and the models launch, and compile it."""
    os.environ |= {"TRITON_ASCEND_ARCH": arch, "CUSTOM_BACKEND": "npu"}
    from . import __main__ as harness
    from . import isolated, models
    from .compiler import Compiled, compile_with
    from .driver import Launch
    from .examine import lower, lower_large

    about = machine()
    print(about["compiler"])
    distinct: dict[str, Launch] = {}
    failed: dict[str, str] = {}

    began = time.time()
    calls: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
    for module in harness.modules(names):
        calls += [(lower, (case,)) for case in module.CASES]
    if not names or "models" in names:
        calls += [(lower_large, (op,)) for op in sorted({x.op for x in models.LARGE})]
    print(f"lowering {len(calls)} calls", file=sys.stderr)
    for done, ((_, (what,)), answer) in enumerate(isolated.each(_apply, calls, jobs), 1):
        if isinstance(answer, isolated.Crash):
            failed[getattr(what, "title", what)] = f"does not lower: {answer}"
        else:
            groups = answer.values() if isinstance(answer, dict) else [answer]
            distinct.update({x.lowered_key: x for launches in groups for x in launches})
        _bar(done, len(calls), len(failed), began)

    compiler, hivmc = tools()
    work = [(compiler, hivmc, arch, x.linalg, x.options) for x in distinct.values()]
    of_text = {(x.linalg, repr(x.options)): x for x in distinct.values()}
    refused: list[dict[str, Any]] = []
    largest: dict[str, int] = {}
    print(f"compiling {len(work)} kernels, {jobs} at a time", file=sys.stderr)
    began = time.time()
    answers = isolated.each(compile_with, work, jobs)
    for done, ((*_, linalg, options), answer) in enumerate(answers, 1):
        launch = of_text[linalg, repr(options)]
        compiled = Compiled(str(answer)) if isinstance(answer, isolated.Crash) else answer
        if not compiled.ok:
            refused.append(
                {"kernel": launch.kernel, "constants": launch.constants, "options": options}
                | {"said": compiled.error, "lowered": launch.linalg}
            )
        for memory, kib in compiled.kib.items():
            largest[memory] = max(kib, largest.get(memory, 0))
        _bar(done, len(work), len(refused), began)

    minutes = (time.time() - began) / 60
    told = f"{len(work) - len(refused)} of {len(work)} kernels compile ({minutes:.1f} minutes)"
    print(f"{told}; the most KiB of a core: {largest}")
    for x in refused:
        shown = {name: value for name, value in x["constants"].items() if value is not None}
        print(f"refused: {x['kernel']} {shown} {x['options']}: {x['said']}")
    for title, text in failed.items():
        print(f"failed: {title}: {text}")
    record = {"machine": about, "arch": arch, "kernels": len(work), "minutes": round(minutes, 1)}
    record |= {"largest": largest, "refused": refused, "failed": failed}
    (FOLDER / "compile.json").write_text(json.dumps(record, indent=1, default=str) + "\n")
    return not refused and not failed


def _apply(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    return function(*arguments)


def _heard(running: subprocess.Popen[bytes], until: float) -> Iterator[str]:
    """What it prints, as it comes, until it ends or the time is up."""
    assert running.stdout is not None
    pipe = running.stdout.fileno()
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    while time.monotonic() < until:
        if select.select([pipe], [], [], 0.1)[0]:
            piece = os.read(pipe, 1 << 16)
            if not piece:
                break
            yield decoder.decode(piece)
        elif running.poll() is not None:  # what it started and left holds the pipe
            break


def _logged(name: str, *command: str, patience: float = _PATIENCE) -> bool:
    """Run a command; its output goes to the screen and to a file.  True if it ends well; when its
    time is up, whether it talks or not, it is killed with all that it started."""
    print(f"== {' '.join(command)}", flush=True)
    began = time.monotonic()
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    running = subprocess.Popen(
        command, cwd=ROOT, env=environment(), start_new_session=True, **pipes
    )
    with (FOLDER / f"{name}.txt").open("w", encoding="utf-8") as log:

        def pass_on(until: float) -> int | None:
            for text in _heard(running, until):
                print(text, end="", flush=True)
                log.write(text)
                log.flush()
            with suppress(subprocess.TimeoutExpired):
                return running.wait(max(0.0, until - time.monotonic()))
            return None

        try:
            code = pass_on(began + patience)
            last = f"ended with {code} after {time.monotonic() - began:.0f} s"
            if code is None:
                running.send_signal(signal.SIGABRT)  # Python says where it stands
                pass_on(time.monotonic() + _LAST_WORDS)
                last = f"killed after {patience:.0f} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            running.wait(_LAST_WORDS)
        if running.returncode is None:
            last += f", and process {running.pid} does not end: it waits in the driver"
        log.write(f"{last}\n")
    print(f"== {name}: {last}", flush=True)
    return code == 0


def versions(anyway: bool) -> None:
    """Hours on versions that do not belong together tell nothing."""
    command = [sys.executable, "-m", "custom.info", "--doctor"]
    if not _logged("doctor", *command, patience=300) and not anyway:
        sys.exit("onboard: mend what is named above, or go on as it is with --anyway")


def paths() -> dict[str, Path]:
    """Files of tests, by name."""
    return {path.stem: path for path in sorted((ROOT / "tests").rglob("test_*.py"))}


def files() -> list[str]:
    """RISKY, then every other file with tests that take a backend."""
    takes = re.compile(r"^def test_\w+\([^)]*\bbackend\b", re.MULTILINE)
    others = (name for name, path in paths().items() if takes.search(path.read_text()))
    return list(dict.fromkeys((*RISKY, *others)))


def measured() -> list[str]:
    """WANTED, then every other op that has a kernel on an NPU, and rows."""
    from custom.dispatch import backends
    from custom.dispatch.registry import SPECS

    from custom.bench.presets import presets

    others = (
        spec.name
        for spec in SPECS
        if backends.has_kernel(backends.NPU, spec) and presets(spec.name, "npu")
    )
    return list(dict.fromkeys((*WANTED, *others)))


def suite(device: str, names: list[str], *options: str) -> bool:
    """Every file runs, whatever the one before said."""
    good, found = [], paths()
    for name in names:
        record = ["--record", str(FOLDER / f"{name}.json"), *options]
        command = [sys.executable, "-m", "pytest", "--device", device, "-q", "-rfE", *record]
        good.append(_logged(name, *command, str(found[name])))
    return all(good)


def bench(device: str, ops: list[str], *options: str) -> bool:
    """Every op's rows, then the example with `options`."""
    good = []
    for op in ops:
        table = ["--csv", str(FOLDER / f"bench_{op}.csv")]
        command = [sys.executable, "-m", "custom.bench", op, "--device", device, *table]
        good.append(_logged(f"bench_{op}", *command))
    example = [sys.executable, "examples/deepseek_v32_decode.py", "--device", device, *options]
    return all([*good, _logged("example", *example)])


def rates(device: str) -> bool:
    """tests/ascend/cost.py's assumptions beside what this card does."""
    command = [sys.executable, "-m", "tests.ascend.calibrate", "--device", device]
    return _logged("rates", *command, "--to", str(FOLDER / "rates.json"))


def pack() -> bool:
    """Nothing but what the steps wrote; paths of the home folder are cut."""
    files = sorted(path for path in FOLDER.iterdir() if path.is_file())
    home = str(Path.home())
    for path in files:
        text = path.read_text(encoding="utf-8")
        path.write_text(re.sub(re.escape(home) + r"\b", "~", text), encoding="utf-8")
    with tarfile.open(ARCHIVE, "w:gz") as archive:
        for path in files:
            archive.add(path, f"{FOLDER.name}/{path.name}")
    print(f"{ARCHIVE}: {len(files)} files, {ARCHIVE.stat().st_size / 1024:.0f} KiB")
    if not (FOLDER / "compile.json").exists():
        print("without compile.json: the step `compile` has not ended")
    return bool(files)


def main() -> int:
    global FOLDER, ARCHIVE
    steps = ("compile", "suite", "rates", "bench", "pack")
    parser = argparse.ArgumentParser(prog="tests.ascend.onboard", description=__doc__)
    parser.add_argument("steps", nargs="*", metavar="STEP", help=", ".join(steps))
    parser.add_argument("--arch", default=ARCH, help="of the NPU, as npu-smi and CANN name it")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--anyway", action="store_true", help="whatever the doctor finds")
    parser.add_argument("--dry", action="store_true", help="one op a step, on the CPU")
    parser.add_argument("--ops", default="", help="compile: files of ops/ alone, by comma")
    chosen = parser.parse_args()
    for step in chosen.steps:
        if step not in steps:
            parser.error(f"there is no step {step}; there are {', '.join(steps)}")
    names = [name for name in chosen.ops.split(",") if name]
    run: dict[str, Callable[[], bool]] = {
        "compile": lambda: compile_step(chosen.arch, chosen.jobs, names),
        "suite": lambda: suite("npu", files()),
        "rates": lambda: rates("npu"),
        "bench": lambda: bench("npu", measured()),
        "pack": pack,
    }
    if chosen.dry:
        # beside what was measured
        FOLDER, ARCHIVE = (path.with_name(f"dry-{path.name}") for path in (FOLDER, ARCHIVE))
        run |= {
            "compile": lambda: compile_step(chosen.arch, chosen.jobs, [DRY_OP]),
            "suite": lambda: suite("cpu", [DRY_FILE], "--quick"),
            "rates": lambda: rates("stand-in"),
            "bench": lambda: bench("cpu", [f"npu_{DRY_OP}"], *DRY_EXAMPLE),
        }
    FOLDER.mkdir(exist_ok=True)
    if chosen.steps != ["pack"]:
        versions(chosen.anyway or chosen.dry)
    results = {step: run[step]() for step in steps if step in (chosen.steps or steps)}
    for step, good in results.items():
        print(f"{step}: {'good' if good else 'something failed, see above'}")
    return 0 if all(results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
