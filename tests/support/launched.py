# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What the CUDA launchers launch, on GPUs that are not there: kernels, grids, tiles, and a digest
of every pointer, stride and number beside them.

python -m tests.support.launched          write tests/records/generated/launched.json anew
python -m tests.support.launched OP       print what OP launches now, in whole
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from custom.cuda_ops.runtime import launches
from custom.dispatch import backends, register
from custom.dispatch.common import memory
from custom.dispatch.registry import BY_NAME, SPECS, Spec
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITCallable, KernelInterface

from custom.bench.presets import presets

from ..portability import cases as portable
from ..portability.gpus import GPUS
from .compile_for_hopper import address, driver
from .pretended_gpu import pretended
from .refused import calls, words
from .samples import sample

RECORD = Path(__file__).parents[1] / "records/generated/launched.json"
CPU = torch.device("cpu")
OPS = [spec for spec in SPECS if backends.has_kernel(backends.CUDA, spec)]
BEYOND = (
    portable._attention,
    portable._sparse,
    portable._gradients,
    portable._indexer,
    portable._prologs,
    portable._delta_rule,
    portable._compressor,
)
COMPOSED = {
    "npu_sparse_attention_pto", "npu_sparse_attention_shared_pto",
    "npu_sparse_attention_indices_pto", "npu_sparse_attention_v4_pto",
}  # fmt: skip
_MOST, _FEW = 6, 2  # cases of an op that are measured; of one whose stages are ops
Make = Callable[[], dict[str, Any]]


class _Side:
    """A second stream, in the order of what is launched."""

    def __init__(self, told: list[str]) -> None:
        self.told = told

    def __enter__(self) -> _Side:
        self.told.append("fork")
        return self

    def __exit__(self, *_: object) -> None:
        self.told.append("join")

    def enter(self) -> None:
        self.told.append("there")

    def leave(self) -> None:
        self.told.append("here")

    @contextmanager
    def stream(self) -> Iterator[None]:
        self.enter()
        yield
        self.leave()


class _Writes(TorchDispatchMode):
    """Notes the operators of torch that write."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func._schema.is_mutable:
            self.recorder.wrote(func, args)
        return out


class Recorder:
    """Of one launcher's call."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.told: list[str] = []
        self.names: dict[int, str] = {}
        self.kept: list[Any] = []  # so that no storage is another's anew
        for name, value in arguments.items():
            if isinstance(value, Tensor):
                self.names.setdefault(self.storage(value), name)

    @staticmethod
    def storage(x: Tensor) -> int:
        return x.untyped_storage()._cdata

    def text(self, value: Any) -> str:
        if isinstance(value, Tensor):
            name = self.names.get(self.storage(value))
            if name is None:
                name = f"#{len(self.names)} {value.untyped_storage().nbytes()}"
                self.names[self.storage(value)] = name
                self.kept.append(value)
            return f"{name}+{value.storage_offset()} {value.dtype}"
        if hasattr(value, "block_shape"):
            swizzle = getattr(value.layout, "swizzle_byte_width", "")
            sizes = [*value.shape], [*value.strides], [*value.block_shape]
            return f"{self.text(value.base)} {sizes} {swizzle}"
        if isinstance(value, tuple):
            names = getattr(value, "_fields", ("",) * len(value))
            pairs = (f"{n}={self.text(x)}" for n, x in zip(names, value, strict=True))
            return f"({', '.join(pairs)})"
        if isinstance(value, JITCallable):
            return value.fn.__name__
        if isinstance(value, float):
            return f"{value:.6g}"
        if type(value).__module__.partition(".")[0] == "triton" and not hasattr(
            value, "primitive_bitwidth"
        ):
            return type(value).__name__
        return str(value)

    def launch(self, kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
        def launched(*args: Any, **named: Any) -> None:
            del named["enable_fp_fusion"]
            given = dict(zip(kernel.arg_names, args, strict=False)) | named
            chosen, rest = [], []
            fixed = {p.name for p in kernel.params if p.is_constexpr}
            known = {p.name for p in kernel.params}
            for name in sorted(given, key=lambda x: x not in known):
                pair = f"{name}={self.text(given[name])}"
                (chosen if name in fixed or name not in known else rest).append(pair)
            missing = [p.name for p in kernel.params if p.name not in given and not p.has_default]
            assert not missing, f"{kernel.__name__} lacks {missing}"
            self.told.append(
                f"{kernel.__name__}{[*map(int, grid)]} {' '.join(chosen)} | {', '.join(rest)}"
            )

        return launched

    def empty(self, shape: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
        out = torch.empty(size=shape, dtype=dtype, device=device)
        self.told.append(f"memory | {self.text(out)} {[*out.shape]}")
        return out

    def wrote(self, func: Any, args: Any) -> None:
        told = ", ".join(self.text(x) for x in args if isinstance(x, (Tensor, int, float)))
        self.told.append(f"{func.overloadpacket.__name__} | {told}")


def cases(spec: Spec) -> Iterator[tuple[str, Make]]:
    """(label, make) of small calls with every option, of the same with gaps between rows, of some
    that are measured, and of others that take other tiles."""
    for number, (arguments, _) in enumerate(calls(spec)):
        yield f"small {number}", partial(_faked, arguments)
        yield f"small {number}, gaps", partial(_with_gaps, spec, partial(_faked, arguments))
    for size in range(2):
        given = sample(spec.name, CPU, torch.bfloat16, B=size)
        yield f"small, {size} requests", partial(_faked, given)
    measured = [(case.label, case.make) for case in presets(spec.name, "cuda")]
    beyond = [(label, make) for more in BEYOND for op, label, make in more() if op == spec.name]
    most = _FEW if spec.name in COMPOSED else _MOST
    own = [(label, make) for op, label, make in _selections() if op == spec.name]
    rows = [*_spread(measured, most), *_spread(beyond, most), *own]
    for label, make in rows:
        yield label, partial(make, CPU, 0)
    for label, make in _spread(rows, _FEW):
        yield f"{label}, gaps", partial(_with_gaps, spec, partial(make, CPU, 0))


def _with_gaps(spec: Spec, make: Make) -> dict[str, Any]:
    """No two strides are alike, where the op takes that."""
    found = register.bind(register.overload(spec)._schema, (), make())
    for name, x in found.items():
        if isinstance(x, Tensor) and x.ndim > 1:
            gaps = torch.empty([n + 1 for n in x.shape[:-1]] + [x.shape[-1]], dtype=x.dtype)
            # what is contiguous may have any stride where there is one number
            steps = [48 if n == 1 else step for n, step in zip(x.shape, x.stride(), strict=True)]
            odd = torch.empty(x.shape, dtype=x.dtype).as_strided(x.shape, [*steps[:-1], 1])
            for other in (gaps[tuple(slice(n) for n in x.shape)], odd):
                with suppress(ValueError, TypeError, RuntimeError):
                    spec.check(**found | {name: other})
                    found = found | {name: other}
                    break
    return found


def _selections() -> Iterator[tuple[str, str, Callable[..., dict[str, Any]]]]:
    """So many rows and keys that top-k takes each of its ways."""
    for rows, keys in [(16, 4000), (17, 12288), (64, 8193), (65, 300000), (512, 9000), (513, 9000)]:

        def make(at: torch.device, seed: int, s: int = rows, n: int = keys) -> dict[str, Any]:
            return dict(
                query=_on_cpu(1, s, 16, 128),
                key=_on_cpu(1, n, 1, 128),
                weights=_on_cpu(1, s, 16),
                sparse_count=2048,
                return_value=s % 2 > 0,
            )

        yield "npu_lightning_indexer", f"{rows} x {keys}", make


def _spread(found: list[Any], most: int) -> list[Any]:
    """So many, from the first to the last."""
    if len(found) <= most:
        return found
    return [found[i * (len(found) - 1) // (most - 1)] for i in range(most)]


def _faked(arguments: dict[str, Any]) -> dict[str, Any]:
    def made(x: Any) -> Any:
        tensor = isinstance(x, Tensor)
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype) if tensor else x

    return {name: made(x) for name, x in arguments.items()}


def steps(spec: Spec, arguments: dict[str, Any], capability: int) -> list[str]:
    """A line for each step of the launcher, on that GPU."""
    recorder = Recorder(arguments)
    found = backends.launcher(backends.CUDA, spec)
    assert found is not None
    with ExitStack() as stack:
        for patch in (
            pretended(capability),
            mock.patch.object(triton.runtime.driver, "_active", driver(capability)),
            mock.patch.object(KernelInterface, "__getitem__", lambda *x: recorder.launch(*x)),
            mock.patch.object(launches, "SideStream", lambda device: _Side(recorder.told)),
            mock.patch.object(memory, "empty", recorder.empty),
            _Writes(recorder),
        ):
            stack.enter_context(patch)
        reason = found.unsupported(**arguments) if found.unsupported else None
        if reason is not None:
            return [f"no: {words(reason)}"]
        out = found.function(**arguments)
        outs = [out] if isinstance(out, Tensor) else [*(out or ())]
        told = (f"{recorder.text(x)} {[*x.shape]} {[*x.stride()]}" for x in outs)
        recorder.told.append(f"out | {', '.join(told)}")
    return recorder.told


def everywhere(spec: Spec) -> Iterator[tuple[str, dict[str, list[str]]]]:
    """(label, GPUs -> what is launched there in whole) of each case; GPUs that agree are one."""
    schema = register.overload(spec)._schema
    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    for label, make in cases(spec):
        of: dict[str, list[str]] = {}
        with (
            fakes,
            mock.patch.object(portable, "_bf16", _on_cpu),
            mock.patch.object(FakeTensor, "data_ptr", address),
            mock.patch.object(FakeTensor, "is_cuda", True),
        ):
            arguments = register.bind(schema, (), make())
            for capability in GPUS:
                told = "\n".join(steps(spec, arguments, capability))
                of.setdefault(told, []).append(f"sm_{capability}")
        yield label, {" ".join(there): told.split("\n") for told, there in of.items()}


def _on_cpu(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def short(told: list[str]) -> list[str]:
    """Kernels, grids and tiles as they are, and one digest of the whole."""
    whole = hashlib.sha256("\n".join(told).encode()).hexdigest()[:10]
    heads = (line.partition(" | ")[0] for line in told)
    return [*(re.sub(r" \w+=(?![\d.-])\S*", "", head) for head in heads if "[" in head), whole]


Launched = dict[str, dict[str, list[str]]]


def launched(spec: Spec) -> Launched:
    """Case -> GPUs -> what is launched there, in short."""
    return {
        label: {there: short(told) for there, told in found.items()}
        for label, found in everywhere(spec)
    }


def read() -> dict[str, Launched]:
    return json.loads(RECORD.read_text())


def main() -> None:
    if len(sys.argv) > 1:
        for label, found in everywhere(BY_NAME[sys.argv[1]]):
            for there, told in found.items():
                print(f"{label}, {there}:", *told, sep="\n    ")
        return
    lines = []
    for spec in OPS:
        rows = (
            f"  {json.dumps(label)}: {{\n"
            + ",\n".join(f"   {json.dumps(n)}: {json.dumps(x)}" for n, x in found.items())
            + "\n  }"
            for label, found in launched(spec).items()
        )
        lines.append(f" {json.dumps(spec.name)}: {{\n" + ",\n".join(rows) + "\n }")
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
