# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The command lines of the examples. Nothing here takes long to import, so that a script says what
is wrong with its options before it imports what does."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

DEVICES = ["auto", "cpu", "cuda", "npu"]
KINDS = ["bf16", "fp8", "int8"]  # of weights and caches
MODELS = ["qwen3-next", "qwen3.5", "kimi-linear"]

Number = TypeVar("Number", int, float)


def at_least(least: Number) -> Callable[[str], Number]:
    """The type of an option, that of `least`."""

    def number(text: str) -> Number:
        value = type(least)(text)
        if not value >= least:  # so that NaN is refused too
            raise argparse.ArgumentTypeError(f"{value}, expected {least} or more")
        return value

    return number


def fraction(text: str) -> float:
    """The type of an option."""
    if not 0 < (value := float(text)) <= 1:
        raise argparse.ArgumentTypeError(f"{value}, expected more than 0, and at most 1")
    return value


def in_a_folder(text: str) -> Path:
    """The type of an option: a file that can be written when all is done."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}")
    return path


def add_device(parser: argparse.ArgumentParser) -> None:
    """The option, for `choose_device`."""
    said = "auto: an NPU, else a GPU, else the CPU"
    parser.add_argument("--device", choices=DEVICES, default="auto", help=said)


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """Of a script whose docstring begins with what it does."""
    return argparse.ArgumentParser(description=(doc or "").partition("\n")[0])


def device_alone(doc: str | None) -> argparse.Namespace:
    """Of the small examples."""
    parser = argparse.ArgumentParser(description=doc)
    add_device(parser)
    return parser.parse_args()


def plotted(doc: str | None) -> argparse.Namespace:
    """Of train_indexer.py and quantized_caches.py."""
    parser = argparse.ArgumentParser(description=doc)
    add_device(parser)
    parser.add_argument("--plot", type=in_a_folder, metavar="FILE", help="draw what came there")
    return parser.parse_args()


def decoding(doc: str | None) -> argparse.Namespace:
    """Of deepseek_v32_decode.py and deepseek_v4_decode.py."""
    parser = parser_of(doc)
    add_device(parser)
    parser.add_argument(
        "--dtype",
        choices=["auto", "float32", "bfloat16", "float16"],
        default="auto",
        help="auto: bfloat16, and on a CPU float32 too",
    )
    parser.add_argument(
        "--weight-format",
        choices=["linear", "nz"],
        help="the model's own, or FRACTAL_NZ copies; by device",
    )
    said = dict(weights="the attention's projections", caches="latents and index keys")
    for name, what in said.items():
        parser.add_argument(f"--{name}", choices=KINDS, default="bf16", help=what)
    parser.add_argument("--batch", type=at_least(1), default=24, metavar="N", help="requests")
    parser.add_argument(
        "--context", type=int, default=128, metavar="N", help="tokens of the longest request"
    )
    parser.add_argument("--new-tokens", type=int, default=24, metavar="N", help="of each request")
    options = parser.parse_args()
    if options.new_tokens < 2 or options.context < options.new_tokens + 24:
        parser.error("--new-tokens starts at 2, --context at --new-tokens + 24")
    return options


def generating(doc: str | None) -> argparse.Namespace:
    """Of qwen3_next_generate.py."""
    parser = parser_of(doc)
    parser.add_argument(
        "--model", choices=MODELS, default="qwen3-next", help="small, random weights"
    )
    add_device(parser)
    parser.add_argument(
        "--dtype",
        choices=["auto", "float32", "bfloat16", "float16"],
        default="auto",
        help="auto: float32 and bfloat16 on a CPU, bfloat16 elsewhere",
    )
    parser.add_argument("--batch", type=at_least(1), default=8, help="requests")
    parser.add_argument("--context", type=int, default=128, help="tokens of the longest request")
    parser.add_argument("--new-tokens", type=at_least(1), default=24, help="of each text")
    parser.add_argument(
        "--drafts", type=at_least(0), default=3, help="tokens a step beyond one; 0: none"
    )
    options = parser.parse_args()
    if options.context < options.new_tokens + 3:
        parser.error("--context starts at --new-tokens + 3")
    return options


def training(doc: str | None) -> argparse.Namespace:
    """Of train_transformers.py."""
    parser = parser_of(doc)
    parser.add_argument("--model", choices=MODELS[1:], default=MODELS[1], help="random weights")
    add_device(parser)
    parser.add_argument("--wide", action="store_true", help="layers as wide as the real model's")
    parser.add_argument("--tokens", type=at_least(2), default=160, help="of the text; 160")
    parser.add_argument("--steps", type=at_least(1), default=8, help="that are timed; 8")
    return parser.parse_args()


def parallel(doc: str | None) -> argparse.Namespace:
    """Of parallel_decode.py."""
    parser = parser_of(doc)
    parser.add_argument(
        "--device", choices=["cpu", "cuda", "npu"], default="cpu", help="of each rank"
    )
    parser.add_argument("--new-tokens", type=at_least(1), default=12, help="of each request")
    return parser.parse_args()


def serving() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """Of serve.py, with the parser, which says what is wrong with what an option names."""
    parser = argparse.ArgumentParser(
        usage="serve.py [OPTIONS] [PROMPTS | -]",
        description="Continuous batching with a GLM-5 or DeepSeek model, paged caches, drafts.",
        epilog="An example. Engines: vLLM (docs/vllm.md), SGLang (docs/sglang.md).",
    )
    one = at_least(1)
    parser.add_argument("prompts", nargs="?", help="a file, one prompt a line; - for stdin")
    parser.add_argument("--model", metavar="PATH", help="GLM-5, DeepSeek-V3.2, V4; else random")
    add_device(parser)
    for name, kind, default, text in (
        ("--rows", one, 8, "requests at the same time"),
        ("--pages", one, 64, "pages of 16 positions, for all"),
        ("--chunk", one, 32, "tokens of a prompt at once"),
        ("--drafts", at_least(0), None, "drafted tokens a step (2, of --model 0)"),
        ("--new-tokens", one, 32, "tokens of a request at most"),
        ("--temperature", at_least(0.0), 0.0, "0: the likeliest token"),
        ("--top-p", fraction, 1.0, "of the likeliest that reach it"),
        ("--seed", int, 0, "of the sampling"),
    ):
        parser.add_argument(name, type=kind, default=default, metavar="N", help=text)
    parser.add_argument(
        "--stop", metavar="TEXT", action="append", default=[], help="one token, the end; repeat"
    )
    return parser, parser.parse_args()


def load_test(doc: str | None) -> argparse.Namespace:
    """Of serve_engine.py."""
    parser = parser_of(doc)
    said = "a checkpoint, else a small random Qwen3-Next"
    parser.add_argument("--model", metavar="PATH", help=said)
    parser.add_argument("--requests", type=at_least(1), default=32, help="how many; 32")
    said = "that arrive in a second, at random times; 4"
    parser.add_argument("--rate", type=at_least(0.001), default=4.0, help=said)
    said = "of a prompt, from a quarter to all of it; 256"
    parser.add_argument("--prompt-tokens", type=at_least(4), default=256, help=said)
    parser.add_argument("--new-tokens", type=at_least(2), default=64, help="of an answer; 64")
    said = "more arguments of vLLM's EngineArgs, as JSON"
    parser.add_argument("--engine", type=json.loads, default={}, metavar="JSON", help=said)
    parser.add_argument("--plot", type=in_a_folder, metavar="FILE", help="draw both there")
    return parser.parse_args()
