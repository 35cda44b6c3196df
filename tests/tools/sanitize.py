# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Every CUDA kernel at small sizes, for NVIDIA's checker:

    export PYTORCH_NO_CUDA_MEMORY_CACHING=1
    python -m tests.tools.sanitize [OP ...]   # compiles; the tools then find what it compiled
    compute-sanitizer --tool memcheck python -m tests.tools.sanitize [OP ...]
    compute-sanitizer --tool synccheck python -m tests.tools.sanitize [OP ...]
    compute-sanitizer --tool racecheck --print-limit 100000 --log-file race.log \\
        python -m tests.tools.sanitize [OP ...]
    python -m tests.tools.racecheck race.log

PyTorch's caching allocator hides reads past the end of a tensor, hence the variable.  A run over
all ops fails if it leaves out a kernel that the package can launch.  docs/sanitizer.md has the
results.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from custom.cuda_ops.common import gpu
from custom.cuda_ops.indexer.hopper import lightning_indexer as hopper_indexer
from custom.dispatch.register import overload
from custom.dispatch.registry import SPECS

import custom
from custom.bench import (
    attention,
    delta_rule,
    indexer_loss,
    latents,
    merging,
    quantized_weights,
    sparse_attention,
)
from custom.bench.case import Arguments, Case, Draw
from custom.bench.presets import presets

from ..support.layer import OPS as LAUNCHED
from ..support.layer import formatted, launch, layer
from ..support.samples import sample

DEVICE = torch.device("cuda")
FORWARD, BACKWARD = "npu_fused_attention", "npu_fused_attention_backward"
INDEXER = "npu_lightning_indexer"


def _rope_apart(case: Case) -> Case:
    """The last 64 dimensions in tensors of their own."""

    def make(draw: Draw) -> Arguments:
        x = case.drawn(draw)
        for name in ("query", "key"):
            x[f"{name}_rope"], x[name] = x[name][..., -64:], x[name][..., :-64]
        return x

    return replace(case, drawn=make)


# sizes that the samples are too small for: what a GPU has kernels of its own for, every tile of
# theirs, and sizes that no tile divides
WIDER: dict[str, list[Case]] = {
    "npu_sparse_flash_attention": [
        sparse_attention.attention_case(1, 1, 128, 1024, 256),
        sparse_attention.attention_case(12, 1, 128, 512, 128),
        sparse_attention.attention_case(10, 1, 16, 512, 200),
        sparse_attention.attention_case(2, 2, 64, 512, 100),
        sparse_attention.attention_case(5, 1, 128, 1024, 600),
        sparse_attention.prefill_case(70, 128, 640, 130),  # more items than processors
    ],
    INDEXER: [
        sparse_attention.indexer_case(1, 1, 4096, 300),
        sparse_attention.indexer_case(3, 2, 1024, 100),
        sparse_attention.indexer_case(1, 9, 2048, 100),
    ],
    FORWARD: [
        attention.case(FORWARD, 1, 2, 1, 200, 333, 128),
        attention.case(FORWARD, 1, 2, 2, 300, 300, 64, False),
        attention.case(FORWARD, 2, 2, 2, 70, 130, 64, packed=True),
        attention.case(FORWARD, 2, 2, 2, 130, 150, 256, packed=True),
        attention.case(FORWARD, 1, 1, 1, 1100, 150, 64, False),  # tiles of 192 queries
        attention.case(FORWARD, 1, 4, 2, 1, 900, 128),
    ],
    BACKWARD: [
        attention.case(BACKWARD, 1, 2, 1, 200, 333, 128),
        attention.case(BACKWARD, 1, 2, 2, 300, 300, 64, False),
        attention.case(BACKWARD, 2, 2, 2, 70, 130, 64, packed=True),
        attention.case(BACKWARD, 1, 2, 2, 200, 200, 64, deterministic=True),
        attention.case(BACKWARD, 1, 1, 1, 100, 130, 256),
        attention.case(BACKWARD, 2, 2, 2, 130, 150, 192, packed=True),
    ],
    "npu_indexer_loss": [
        indexer_loss.loss_case(64, 128, 40, 700, 300),
        indexer_loss.loss_case(16, 320, 4, 90, 70),
        indexer_loss.loss_case(130, 128, 4, 90, 70),
        indexer_loss.loss_case(65, 320, 4, 150, 140),
        indexer_loss.loss_case(128, 576, 3, 150, 140, lse=True),
        _rope_apart(indexer_loss.loss_case(96, 576, 3, 150, 140)),
    ],
    "npu_indexer_loss_backward": [indexer_loss.backward_case(40, 700, 300)],
    # keys neither cut nor in parts: tiles that every row sees, others, and ends
    "npu_fused_infer_attention_score_v2": [latents.prefill_case(140, 64, 320)],
    "npu_mla_prolog_pto": [
        quantized_weights.mla_prolog_case(tokens, 128, "fp8") for tokens in (3, 130)
    ],
    "npu_fused_sigmoid_gating_delta_rule_update": [
        delta_rule.decode_case(3, t, layout, dtype)
        for t, dtype in ((1, torch.float32), (3, torch.float32), (1, torch.bfloat16))
        for layout in ("kv", "vk")
    ],
    "npu_chunk_gated_delta_rule": [delta_rule.chunk_case(200)],
    "npu_chunk_gated_delta_rule_grad": [delta_rule.chunk_grad_case(200)],
    "npu_chunk_kda": [delta_rule.kda_case(200)],
    "npu_chunk_kda_grad": [delta_rule.kda_grad_case(200)],
    "npu_merge_states": [merging.states_case(3, 5, 3, 512)],
    "npu_merge_topk": [merging.topk_case(3, 2, 700)],
    "npu_localize_indices": [merging.localize_case(3, 700, 3)],
}


def _prologs(op: str) -> None:
    """A whole layer's heads; in the layer every tile of tokens, few heads, other sizes as well."""
    whole = dict(h=512, ranks=512, n=96, plain=128, rank=128, rotary=64, index=(64, 128))
    few = whole | dict(n=3, index=(2, 64))
    cases = [((1, 1), whole), ((130, 1), whole)]
    if op.startswith("sparse_attention"):
        cases += [(tokens, whole) for tokens in ((10, 2), (40, 1), (70, 1))]
        cases += [(tokens, sizes) for tokens in ((1, 1), (40, 1), (70, 1)) for sizes in (few, {})]
    else:
        cases.append(((260, 1), whole))
    for tokens, sizes in cases:
        launch("cuda", op, formatted(layer(*tokens, **sizes), torch.bfloat16, "nz", DEVICE))
    launch("cuda", op, formatted(layer(3, 1, n=5), torch.float16, "nd", DEVICE), "nd")


def _attention(name: str) -> None:
    """Programs that take one tile after the other; and the plain kernels, as on other GPUs."""
    for function, value in (
        ("num_sms", 2),
        ("is_hopper", False),
    ):
        with mock.patch.object(gpu, function, lambda device, value=value: value):
            for case in WIDER[name]:
                case.call(case.make(DEVICE, 0))


def _indexer() -> None:
    """The plain kernels, as on other GPUs."""
    with (
        mock.patch.object(hopper_indexer, "supports", lambda *_: False),
        mock.patch.object(gpu, "capability", lambda device: (8, 0)),
    ):
        for case in [*presets(INDEXER, "cpu"), *WIDER[INDEXER]]:
            case.call(case.make(DEVICE, 0))


def _run(name: str) -> None:
    spec = next(spec for spec in SPECS if spec.name == name)
    for sizes in ({}, {"B": 1, "S": 1}):
        for dtype in (torch.bfloat16, torch.float16):
            overload(spec)(**sample(name, DEVICE, dtype, **sizes))
    for case in [*presets(name, "cpu"), *WIDER.get(name, [])]:
        case.call(case.make(DEVICE, 0))
    op = name.removeprefix("npu_").removesuffix("_pto")
    if op in LAUNCHED:
        for form in (op, f"{op}_plain"):
            if form in LAUNCHED:
                _prologs(form)
    if name in (FORWARD, BACKWARD):
        _attention(name)
    if name == INDEXER:
        _indexer()
    torch.cuda.synchronize()
    print(f"ran {name}", flush=True)


def _kernels() -> Iterator[tuple[str, bool]]:
    """Every kernel that the package's own Python launches, and whether it was compiled here."""
    folder = Path(custom.__file__).parent.parent / "cuda_ops"
    for file in sorted(folder.rglob("*.py")):
        inside = ".".join(file.relative_to(folder).with_suffix("").parts)
        module = importlib.import_module(f"custom.cuda_ops.{inside}")
        for kernel in _launched(module, file.read_text()):
            caches = kernel.device_caches.values()
            yield f"{inside}.{kernel.__name__}", any(cache[0] for cache in caches)


def _launched(module: ModuleType, source: str) -> Iterator[Any]:
    """The kernels that a module's own functions name: they launch them, themselves or through a
    function that takes them. Parts of kernels are named by kernels alone."""
    named = {}
    for function in ast.parse(source).body:
        if isinstance(function, ast.FunctionDef) and not _is_jitted(getattr(module, function.name)):
            for name in ast.walk(function):
                if isinstance(name, ast.Name):
                    named[name.id] = getattr(module, name.id, None)
    yield from filter(_is_jitted, named.values())


def _is_jitted(value: Any) -> bool:
    return hasattr(value, "device_caches")


def main(names: list[str]) -> int:
    with torch.no_grad():
        for spec in SPECS:
            if not names or spec.name in names:
                _run(spec.name)
    left_out = [name for name, launched in _kernels() if not launched]
    if left_out and not names:
        print("not launched: " + ", ".join(left_out))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
