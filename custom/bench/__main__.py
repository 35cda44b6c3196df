# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""python -m custom.bench OP [--device D] [--shape b=32] [--sweep] [--csv F] [--plot F.png]
                         [--against F.csv] [--host] [--cold] [--path plain] [--linear]

Correctness comes first: a row that differs from the reference is printed in red, and no table.
"""

from __future__ import annotations

import argparse
import importlib
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import __version__
from ..dispatch import log
from ..dispatch.backends import CUDA
from ..dispatch.env import by_reference
from ..dispatch.errors import need
from ..dispatch.registry import BY_NAME
from . import cold, host
from .case import Arguments, Case, Outputs, in_linear
from .presets import presets, sweep
from .report import Row, curves, packed, plot, read_medians, read_public, text, write_csv
from .timing import measure, peak_mib, rates, wall_clock

_ROTATED_BYTES = 400e6  # read and written: more than twice any L2 of today, each way
_REFERENCE_FLOPS = 1e11  # above this the reference is not timed


def progress(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)


def _outputs(case: Case, arguments: Arguments) -> Outputs:
    """What the op returns, or what it wrote where it returns nothing."""
    out = case.call(arguments)
    if isinstance(out, Tensor):
        return (out,)
    schema = getattr(torch.ops.custom, case.op).default._schema
    written = [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write]
    return out or [arguments[name] for name in written]


def _copy(arguments: Arguments) -> Arguments:
    copies = {id(v): v.clone() for v in arguments.values() if isinstance(v, Tensor)}
    return {k: copies.get(id(v), v) for k, v in arguments.items()}


def relative_error(ours: Outputs, wanted: Outputs) -> float:
    """The largest relative Frobenius error among the outputs; NaN never passes."""
    worst = 0.0
    for a, b in zip(ours, wanted, strict=True):
        if b.numel() == 0 or not b.dtype.is_floating_point:
            continue
        a, b = a.double(), b.double()
        same = torch.isinf(b) & (a == b)
        a, b = a.masked_fill(same, 0), b.masked_fill(same, 0)
        error = float((a - b).norm() / b.norm().clamp_min(1e-20))
        worst = max(worst, error) if error == error else float("nan")
        if worst != worst:
            break
    return worst


def check(case: Case, device: torch.device) -> float:
    """Error of a part of the op's outputs against the reference, on fresh inputs."""
    arguments = case.make(device, 1234)
    part, select = case.part(arguments)
    part = _copy(part)
    ours = select(_outputs(case, arguments))
    with by_reference():
        wanted = _outputs(case, part)
    if not case.ordered:
        ours, wanted = ([out.sort().values for out in outputs] for outputs in (ours, wanted))
    return relative_error(ours, wanted)


def run(
    case: Case, device: torch.device, bandwidth: float, flops: float, seconds: float = 0.5
) -> Row:
    """Check and measure a row; `seconds` for each implementation."""
    error = check(case, device)
    if not error <= case.tolerance:
        raise ArithmeticError(
            f"{case.label}: relative error {error:.1e} above {case.tolerance:.0e}"
        )
    copies = 1 if device.type == "cpu" else max(1, min(16, int(_ROTATED_BYTES / case.bytes)))
    inputs = [case.make(device, seed) for seed in range(copies)]
    ours = measure([partial(case.call, a) for a in inputs], device, seconds)
    peers: dict[str, float] = {}
    peaks = {"ours": peak_mib(partial(case.call, inputs[0]), device)}
    for name, prepare in case.peers.items():
        calls = [prepare(arguments) for arguments in inputs]
        present = [call for call in calls if call is not None]
        if present:
            peers[name] = measure(present, device, seconds).median
            peaks[name] = peak_mib(present[0], device)
    if device.type != "cpu" and case.reference and case.flops < _REFERENCE_FLOPS:
        with by_reference():
            peers["reference"] = wall_clock([partial(case.call, inputs[0])], device).median
            peaks["reference"] = peak_mib(partial(case.call, inputs[0]), device)
    stages: dict[str, float] = {}
    if case.stages is not None:
        each = [case.stages(arguments) for arguments in inputs]
        stages = {name: measure([calls[name] for calls in each], device).median for name in each[0]}
    floor = max(case.bytes / bandwidth, case.flops / (flops * case.rate)) * 1e6
    return Row(
        op=case.op,
        case=case.label,
        backend=next(b for (op, b) in log.calls if op == case.op and b != "reference")
        if device.type != "cpu"
        else "reference",
        error=error,
        median_us=ours.median,
        p20_us=ours.p20,
        p80_us=ours.p80,
        floor_us=floor,
        of_floor=floor / ours.median,
        tflops=case.flops / ours.median / 1e6,
        gb_per_s=case.bytes / ours.median / 1e3,
        peers_us=packed(peers),
        peak_mib=packed({name: peak for name, peak in peaks.items() if peak is not None}),
        stages_us=packed(stages),
    )


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m custom.bench", description=__doc__)
    known = [name for name in BY_NAME if presets(name, "cuda")]
    parser.add_argument("op", type=_whole_name, choices=known, metavar="OP", help=", ".join(known))
    parser.add_argument("--device", choices=["auto", "cpu", "cuda", "npu"], default="auto")
    parser.add_argument("--shape", default="", help="only rows with these sizes: b=32,n=128")
    parser.add_argument(
        "--sweep", action="store_true", help="rows over the length; the plot shows TFLOPS over it"
    )
    parser.add_argument(
        "--host", action="store_true", help="what a call costs on the host (of the first row)"
    )
    parser.add_argument(
        "--cold", action="store_true", help="what the first call of a process costs (likewise)"
    )
    parser.add_argument(
        "--path",
        choices=["auto", "plain"],
        default="auto",
        help="plain: on a Hopper GPU, too, the kernels that other GPUs run",
    )
    parser.add_argument(
        "--linear", action="store_true", help='weight_format="linear": weights as nn.Linear has'
    )
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--against", type=Path, help="an earlier CSV, for the column `x before`")
    parser.add_argument(
        "--estimate", action="store_true", help="npu: from the compiled kernels, without a device"
    )
    options = parser.parse_args(argv)
    # what would fail after minutes of measuring fails now
    if any(pair.count("=") != 1 for pair in options.shape.split(",") if pair):
        parser.error(f"--shape is {options.shape!r}, expected sizes such as b=32,n=128")
    if options.against and not options.against.exists():
        parser.error(f"--against: there is no file {options.against}")
    for name in ("csv", "plot"):
        path = getattr(options, name)
        if path and not path.parent.is_dir():
            parser.error(f"--{name}: there is no folder {path.parent}")
    if options.plot:
        need("matplotlib", "--plot", "matplotlib")
    return options


def choose_device(name: str) -> torch.device:
    npu = hasattr(torch, "npu") and torch.npu.is_available()
    here = {"npu": npu, "cuda": torch.cuda.is_available(), "cpu": True}
    if name == "auto":
        name = next(each for each, there in here.items() if there)
    elif not here[name]:
        sys.exit(f"--device {name}: none is here; python -m custom.info says why")
    return torch.device(name)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()


def _estimate(op: str, shape: str) -> int:
    """Estimated times on Atlas A3, by the compiler harness of the repository."""
    script = Path(__file__).resolve().parents[2] / "tests/ascend/run.sh"
    if not script.exists():
        print(
            "--estimate needs a clone of the repository: its tests/ascend/run.sh", file=sys.stderr
        )
        return 2
    return subprocess.run([str(script), "--estimate", op, "--shape", shape]).returncode


def _whole_name(name: str) -> str:
    """Of the op, by the name of its public function too, or without `npu_`."""
    called = {"compute_index_loss_sparse": "npu_indexer_loss"}.get(name, name)
    return called if called in BY_NAME else f"npu_{called}"


def main(argv: Sequence[str] | None = None) -> int:
    options = _arguments(argv)
    if options.estimate:
        return _estimate(options.op, options.shape)
    device = choose_device(options.device)
    if options.host and device.type == "cpu":
        print("--host: a CPU computes on the host, expected --device cuda or npu", file=sys.stderr)
        return 2
    if options.cold and device.type != "cuda":
        print(f"--cold: expected --device cuda, not {device.type}", file=sys.stderr)
        return 2
    if options.path == "plain":
        if device.type != "cuda":
            print(f"--path plain: expected --device cuda, not {device.type}", file=sys.stderr)
            return 2
        gpu: Any = importlib.import_module(f"{CUDA.package}.common.gpu")
        gpu.is_hopper = lambda device: False
    wanted = dict(pair.split("=") for pair in options.shape.split(",") if pair)
    listed = (sweep if options.sweep else presets)(options.op, device.type)
    cases = [
        case
        for case in listed
        if all(str(case.shape.get(name)) == value for name, value in wanted.items())
    ]
    if options.linear:
        if "weight_format" not in BY_NAME[options.op].schema:
            print(f"--linear: {options.op} has no `weight_format`", file=sys.stderr)
            return 2
        cases = [in_linear(case) for case in cases]
    if not cases:
        print(f"no row of {options.op} has {options.shape}; the sizes are", file=sys.stderr)
        for case in listed:
            print("  " + ",".join(f"{k}={v}" for k, v in case.shape.items()), file=sys.stderr)
        return 2
    if options.cold:
        print(cold.table(cases if options.shape else cases[:1], device))
        return 0
    if options.host:
        print(host.table(cases if options.shape else cases[:1], device))
        return 0
    bandwidth, flops, source = rates(device)
    hardware = device_name(device)
    print(f"{options.op} on {device.type} {hardware}, {time.strftime('%Y-%m-%d')}")
    print(f"npu-custom-ops {__version__}, torch {torch.__version__}, clocks as found")
    if device.type == "cuda":
        print(
            "time: median of CUDA-graph replays, begun after the row's check, over inputs in turn"
            f" (up to 16, while they read and write less than {_ROTATED_BYTES / 1e6:.0f} MB)"
        )
    print(f"floor: {bandwidth / 1e12:.3g} TB/s, {flops / 1e12:.3g} TFLOPS ({source})\n")
    rows: list[Row] = []
    for number, case in enumerate(cases, 1):
        progress(f"[{number}/{len(cases)}] {case.label}")
        try:
            rows.append(run(case, device, bandwidth, flops, 0.1 if options.sweep else 0.5))
        except ArithmeticError as wrong:
            print(f"\033[31mWRONG  {case.op}: {wrong}\033[0m")
            return 1
        if device.type == "cuda":
            torch.cuda.empty_cache()
    print(text(rows, read_medians(options.against) if options.against else {}))
    if options.csv:
        write_csv(options.csv, rows)
    if options.plot:
        title = f"{options.op}, {hardware or device.type}"
        if options.sweep:
            curves(options.plot, rows, title)
        else:
            plot(options.plot, rows, title, read_public() if device.type == "cuda" else {})
    return 0


if __name__ == "__main__":
    sys.exit(main())
