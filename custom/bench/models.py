# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Tokens a second of Hugging Face models with our ops and without:

    python -m custom.bench.models [--device D] [--model NAME] [--batch 1,4] [--csv F]

Eight layers of the real width with random weights, in bfloat16 at a context of 32K tokens; experts
are a dense MLP as wide as the experts of one token, and the vocabulary is short.  On a CPU the
models are tiny.  A decode step attends to random keys, and is the same one each time.  Without
ours: as `generate` runs it (eager calls, a dynamic cache), and over a static cache in a CUDA graph.
With ours, which is `custom.integrations.transformers.use()`: in a CUDA graph.

Correctness comes first: logits that differ from the unmodified model's, and there is no table.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..dispatch.errors import need
from .__main__ import choose_device, device_name, progress, relative_error
from .report import write_table
from .timing import Times, measure, waiting, wall_clock

need("transformers.models.deepseek_v32", __name__, '"transformers>=5.17,<6"')

import transformers  # noqa: E402
from transformers.cache_utils import StaticLayer  # noqa: E402

from ..integrations.transformers import use  # noqa: E402

_hf: Any = transformers  # its functions are not typed

LAYERS, CONTEXT, CHECKED = 8, 32768, 256
SMALL_CONTEXT, SMALL_CHECKED = 96, 24
PAGE = 64
# of the logits, relative: 16 roundings that all go one way
TOLERANCE = 16.0

_DSA: dict[str, Any] = dict(first_k_dense_replace=LAYERS)
_SMALL: dict[str, Any] = dict(
    vocab_size=128, hidden_size=64, intermediate_size=96, num_attention_heads=4
)
SMALL_DSA = _SMALL | dict(
    num_key_value_heads=4,
    q_lora_rank=48,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=16,
    v_head_dim=24,
    index_n_heads=16,
    index_head_dim=32,
    index_topk=32,
)
SMALL_LINEAR = _SMALL | dict(
    num_key_value_heads=2,
    head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=6,
    linear_key_head_dim=16,
    linear_value_head_dim=24,
)


@dataclass(frozen=True)
class Model:
    """`config` has the real width by itself."""

    name: str
    config: Callable[..., Any]
    changes: dict[str, Any]
    small: dict[str, Any]

    def make(self, device: torch.device) -> Any:
        small = device.type == "cpu"
        sizes = self.changes | (self.small if small else {})
        config = self.config(**{"num_hidden_layers": LAYERS, "vocab_size": 4096, **sizes})
        torch.manual_seed(0)
        with device:
            return _hf.AutoModelForCausalLM.from_config(
                config,
                dtype=torch.float32 if small else torch.bfloat16,
                attn_implementation="sdpa",
            ).eval()


MODELS = [
    Model("DeepSeek-V3.2", transformers.DeepseekV32Config, _DSA, SMALL_DSA),
    Model(
        "GLM-5",
        transformers.GlmMoeDsaConfig,
        _DSA | dict(intermediate_size=18432),
        SMALL_DSA,
    ),
    Model(
        "GLM-5.2 (shared selections)",
        transformers.GlmMoeDsaConfig,
        _DSA | dict(intermediate_size=18432, indexer_types=["full", *["shared"] * 3] * 2),
        SMALL_DSA,
    ),
    Model(
        "Qwen3-Next",
        transformers.Qwen3NextConfig,
        dict(mlp_only_layers=list(range(LAYERS))),
        SMALL_LINEAR,
    ),
    Model("Qwen3.5", transformers.Qwen3_5TextConfig, {}, SMALL_LINEAR),
]


@dataclass(frozen=True)
class Row:
    """Tokens a second; None where the device cannot."""

    model: str
    width: int
    layers: int
    context: int
    b: int
    device: str
    date: str
    error: float | None  # of the logits, relative; None where it was not kept
    prefill: float
    prefill_unmodified: float | None
    decode: float
    decode_unmodified: float | None
    decode_captured: float | None  # unmodified, in a CUDA graph

    @property
    def gain(self) -> float | None:
        """Over the faster of the unmodified decode steps."""
        others = [x for x in (self.decode_unmodified, self.decode_captured) if x is not None]
        return self.decode / max(others) if others else None


def read_rows(path: Path) -> list[Row]:
    kinds: dict[str, Any] = {"model": str, "device": str, "date": str}
    kinds |= dict.fromkeys(("width", "layers", "context", "b"), int)

    def value(name: str, text: str) -> Any:
        return kinds.get(name, float)(text) if text else None

    with path.open(newline="") as file:
        return [
            Row(**{name: value(name, text) for name, text in line.items()})
            for line in csv.DictReader(file)
        ]


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    write_table(path, Row, rows, 4)


HEAD = (
    "| model | width | requests | error | prefill | unmodified | decode | unmodified | in a graph "
    "| x |\n|---|---|---|---|---|---|---|---|---|---|"
)


def markdown(row: Row) -> str:
    def rate(x: float | None) -> str:
        return "-" if x is None else f"{x:,.0f}"

    error = "-" if row.error is None else f"{row.error:.1e}"
    return (
        f"| {row.model} | {row.width} | {row.b} | {error} | **{rate(row.prefill)}** | "
        f"{rate(row.prefill_unmodified)} | **{rate(row.decode)}** | {rate(row.decode_unmodified)} |"
        f" {rate(row.decode_captured)} | {'-' if row.gain is None else f'{row.gain:.1f}'} |"
    )


def _error(model: Any, ours: AbstractContextManager[None], tokens: int) -> float:
    """Of the logits of a prompt and of the token after it, by ours against the unmodified model."""
    ids = torch.randint(1, model.config.vocab_size, (2, tokens + 1), device=model.device)

    def logits() -> list[Tensor]:
        first = model(ids[:, :-1], use_cache=True)
        return [first.logits, model(ids[:, -1:], past_key_values=first.past_key_values).logits]

    wanted = logits()
    with ours:
        return relative_error(logits(), wanted)


def _prefill(model: Any, context: int) -> Callable[[], Any]:
    ids = torch.randint(1, model.config.vocab_size, (1, context), device=model.device)
    return lambda: model(ids, use_cache=True, logits_to_keep=1)


def _filled(cache: Any, context: int) -> Callable[[], None]:
    """Put random keys before the last of `context` positions; what has to be called before each
    step, so that it is that position's."""
    undo: list[Callable[[], Any]] = []
    pages = getattr(cache.layers[0], "caches", None)
    if pages is not None:
        pages.reserve(context)
        for pool in (x for layer in pages.layers for x in layer if x is not None):
            pool.normal_()
        requests = pages.block_table.shape[0]
        there = torch.ones(requests, context - 1, dtype=torch.bool, device=pages.block_table.device)
        for layer in cache.layers:
            undo.append(partial(setattr, layer, "tokens", context - 1))
            undo.append(partial(setattr, layer, "valid", there))
    names = ("keys", "values", "indexer_keys")
    lengths = ("cumulative_length", "indexer_cumulative_length")
    for layer in cache.layers if pages is None else []:
        for name in names:
            held = getattr(layer, name, None)
            if held is None:
                continue
            if isinstance(layer, StaticLayer):
                held.normal_()
            else:  # grows at each step
                whole = held.new_empty(*held.shape[:-2], context - 1, held.shape[-1]).normal_()
                undo.append(partial(setattr, layer, name, whole))
        for name in lengths:
            if isinstance(length := getattr(layer, name, None), Tensor):
                undo.append(partial(length.fill_, context - 1))

    def rewind() -> None:
        for each in undo:
            each()

    return rewind


def _step(model: Any, b: int, context: int, cache: Any) -> Callable[[], Tensor]:
    """The decode step of the token at position `context` - 1 of `b` requests."""

    def new(*shape: int, value: int) -> Tensor:
        return torch.full(shape, value, device=model.device)

    ids, positions = new(b, 1, value=1), new(b, 1, value=context - 1)
    seen = new(b, 1, 1, context, value=1).bool()
    mask = {kind: seen if "linear" not in kind else None for kind in model.config.layer_types}
    model(ids, past_key_values=cache)  # makes the cache's tensors
    rewind = _filled(cache, context)

    def step() -> Tensor:
        rewind()
        out: Tensor = model(
            ids, attention_mask=mask, position_ids=positions, past_key_values=cache
        ).logits
        return out

    return step


def _timed(call: Callable[[], Any], device: torch.device) -> Times:
    """Once to warm up, then the median of three, as the call takes seconds."""
    wait = waiting(device)
    samples = []
    for _ in range(4):
        wait()
        begin = time.perf_counter()
        call()
        wait()
        samples.append((time.perf_counter() - begin) * 1e6)
    _warm, low, median, high = samples[0], *sorted(samples[1:])
    return Times(median, low, high)


def _unless_impossible(what: str, measured: Callable[[], float]) -> float | None:
    """Of the unmodified model: None if its memory does not suffice or no graph can hold it."""
    try:
        return measured()
    except RuntimeError as error:
        progress(f"  {what}: {str(error).splitlines()[0]}")
        return None


@torch.inference_mode()
def run(model: Model, device: torch.device, batches: Sequence[int]) -> list[Row]:
    """Check and measure; a row for each number of requests."""
    small = device.type == "cpu"
    context, checked = (SMALL_CONTEXT, SMALL_CHECKED) if small else (CONTEXT, CHECKED)
    made = model.make(device)
    ours = partial(use, weight_format="nz", page_size=PAGE)
    error = _error(made, ours(), checked)
    if not error <= TOLERANCE * torch.finfo(made.dtype).eps:
        raise ArithmeticError(f"{model.name}: relative error {error:.1e} of the logits")

    def dynamic() -> Any:
        return _hf.DynamicCache(config=made.config)

    def static() -> Any:
        return _hf.StaticCache(config=made.config, max_cache_len=context)

    def decode(b: int, cache: Callable[[], Any], clock: Callable[..., Times]) -> float:
        step = _step(made, b, context, cache())
        return b * 1e6 / clock([step], device).median

    def prefill() -> float:
        return context * 1e6 / _timed(_prefill(made, context), device).median

    progress(f"{model.name}: prefill")
    with ours():
        prefilled = prefill()
    without = _unless_impossible("prefill, unmodified", prefill)
    # a recurrence keeps the model's own cache, which has to be static for a graph
    own = static if "linear_attention" in made.config.layer_types else dynamic
    rows = []
    for b in batches:
        progress(f"{model.name}: decode, {b} requests")
        with ours():
            decoded = decode(b, own, measure)
        eager = _unless_impossible("decode, unmodified", partial(decode, b, dynamic, wall_clock))
        captured = None
        if not small:
            captured = _unless_impossible(
                "decode, unmodified, in a graph", partial(decode, b, static, measure)
            )
        rows.append(
            Row(
                model=model.name,
                width=made.config.hidden_size,
                layers=LAYERS,
                context=context,
                b=b,
                device=device_name(device),
                date=time.strftime("%Y-%m-%d"),
                error=error,
                prefill=prefilled,
                prefill_unmodified=without,
                decode=decoded,
                decode_unmodified=eager,
                decode_captured=captured,
            )
        )
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m custom.bench.models", description=__doc__)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda", "npu"], default="auto")
    parser.add_argument("--model", choices=[model.name for model in MODELS], help="only this one")
    parser.add_argument("--batch", default="1,4", help="requests of a decode step: 1,4")
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args(argv)
    device = choose_device(options.device)
    batches = [int(each) for each in options.batch.split(",")]
    rows = []
    for model in MODELS:
        if options.model in (None, model.name):
            try:
                rows += run(model, device, batches)
            except ArithmeticError as wrong:
                print(f"\033[31mWRONG  {wrong}\033[0m")
                return 1
            if options.csv:
                write_rows(options.csv, rows)
    print("\n".join([HEAD, *map(markdown, rows)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
