# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What runs where on this machine, and why not:  python -m custom.info [--doctor]

Works when half of the environment is broken: each line is found out on its own.
"""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from . import __version__, doctor
from .dispatch import backends, values, versions
from .dispatch.env import VARIABLES
from .dispatch.op_spec import Spec
from .dispatch.registry import SPECS

PACKAGES = (
    "torch",
    "triton",
    "triton-ascend",
    "torch_npu",
    "transformers",
    "onnx",
    "onnxscript",
    "onnxruntime",
)
_NOT_ON = "not on "


def _or_error(find: Callable[..., str | None], *arguments: Any) -> str:
    """The answer, or what went wrong: a report must not stop at the first broken part."""
    try:
        return find(*arguments) or "-"
    except (*versions.BROKEN, ValueError) as error:  # ValueError: of a variable's value
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _cuda() -> str:
    if not torch.cuda.is_available():
        return "none"
    count = torch.cuda.device_count()
    return ", ".join(torch.cuda.get_device_name(index) for index in range(count))


def _chosen_by(index: int) -> str:
    """What a GPU can do, and which kernels run on it for that: or why none do."""
    device = torch.device("cuda", index)
    reason = backends.cannot_run(backends.CUDA, device)
    if reason is not None:
        return reason
    gpu = importlib.import_module(f"{backends.CUDA.package}.common.gpu")
    return str(gpu.described(device))


def _npu() -> str:
    if backends.installed("torch_npu") is None:
        return "none (torch_npu is not installed)"
    import torch_npu

    count: int = torch_npu.npu.device_count()
    return ", ".join(torch_npu.npu.get_device_name(index) for index in range(count)) or "none"


def _compiler() -> str | None:
    build = versions.compiler()
    return None if build is None else f"{build.said}, {build.path}"


def _apart() -> str | None:
    """Only where there is something of Ascend to compare."""
    if backends.installed("triton-ascend") is None:
        return None
    return versions.apart(versions.here())


def _runs(spec: Spec, backend: backends.Backend) -> str:
    """`yes`, or the reason against, for tensors that lie on the backend's own devices; where only
    some of them refuse, which do."""
    present = {backends.CUDA: _cuda, backends.NPU: _npu}.get(backend)
    if present is not None and (found := present()).startswith("none"):
        return f"no {backend.device} device{found.removeprefix('none')}"
    devices = [torch.device(backend.device)]
    if backend is backends.CUDA:
        devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    reasons = {
        str(device): backends.reason_against_all(backend, spec, device) for device in devices
    }
    refused = {device: reason for device, reason in reasons.items() if reason is not None}
    if not refused:
        return "yes"
    reason = next(iter(refused.values()))
    return reason if len(refused) == len(devices) else f"{_NOT_ON}{', '.join(refused)}: {reason}"


def _cell(answer: str, has_kernel: bool) -> str:
    if answer == "yes":
        return "yes"
    if answer.startswith(_NOT_ON):
        return "some"
    return "no" if has_kernel else "-"


def report() -> Iterator[str]:
    """The lines of the report."""
    yield f"npu-custom-ops {__version__}, Python {platform.python_version()}, {platform.platform()}"
    yield ""
    for name in PACKAGES:
        yield f"  {name:<15}{_or_error(backends.installed, name)}"
    yield f"  {'cuda devices':<15}{_or_error(_cuda)}"
    for index in range(torch.cuda.device_count()):
        yield f"  {f'  cuda:{index}':<15}{_or_error(_chosen_by, index)}"
    yield f"  {'npu devices':<15}{_or_error(_npu)}"
    yield f"  {'CANN':<15}{_or_error(versions.cann)}"
    yield f"  {'its compiler':<15}{_or_error(_compiler)}"
    apart = _or_error(_apart)
    if apart != "-":
        yield f"  WARNING: {apart}"
    both = backends.both_tritons()
    if both is not None:
        yield f"  WARNING: {both}"
    yield ""
    for variable in VARIABLES:
        yield f"  {variable.name}={_or_error(variable.read)}   {variable.sentence}"
    yield f"  values of lengths, indices and tables are checked {values.where()}"
    yield ""
    width = max(len(spec.name) for spec in SPECS)
    yield f"  {'op':<{width}}  {'cpu':<8}{'cuda':<8}{'npu':<8}"
    reasons: dict[tuple[backends.Backend, str], list[str]] = {}
    for spec in SPECS:
        cells = []
        for backend in backends.BACKENDS:
            answer = _or_error(_runs, spec, backend)
            short = _cell(answer, backends.has_kernel(backend, spec))
            cells.append(f"{short:<8}")
            if short in ("no", "some"):
                reasons.setdefault((backend, answer), []).append(spec.name)
        yield f"  {spec.name:<{width}}  {''.join(cells)}"
    yield ""
    yield "  yes: runs here; no: a kernel exists, but not for this machine; -: no kernel yet"
    if any(answer.startswith(_NOT_ON) for _, answer in reasons):
        yield "  some: runs on some of the devices"
    for (backend, reason), ops in reasons.items():
        kernels = [spec.name for spec in SPECS if backends.has_kernel(backend, spec)]
        yield f"  {', '.join([backend.name, *(ops if ops != kernels else [])])}: {reason}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m custom.info", description=__doc__)
    parser.add_argument(
        "--doctor", action="store_true", help="only what clashes, and the command that mends it"
    )
    if parser.parse_args(argv).doctor:
        return doctor.main()
    try:
        for line in report():
            print(line)
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has seen enough; what is left goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main())
