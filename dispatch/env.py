# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The environment variables, each once: name, default, allowed values, sentence."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Variable:
    name: str
    default: str
    allowed: tuple[str, ...] | None  # None: any
    sentence: str

    def read(self) -> str:
        value = os.environ.get(self.name, self.default)
        if self.allowed is not None and value not in self.allowed:
            names = ", ".join(repr(each) for each in self.allowed)
            raise ValueError(f"{self.name} is {value!r}, expected one of {names}.")
        return value


VARIABLES = (
    Variable(
        "CUSTOM_BACKEND",
        "auto",
        ("auto", "reference", "cuda", "npu"),
        "auto: the tensor's device decides. reference: plain PyTorch on any device. "
        "cuda, npu: that backend's kernels, wherever the tensors are (for interpreters).",
    ),
    Variable(
        "CUSTOM_LOG",
        "",
        ("", "dispatch"),
        "dispatch: one line per (op, backend, reason) on stderr, once; a repeated call's path too.",
    ),
    Variable(
        "CUSTOM_REPLAY",
        "1",
        ("0", "1"),
        "1: a CUDA call like earlier ones repeats their launches. 0: its launcher runs every time; "
        "checks of a call like an earlier one are skipped either way.",
    ),
    Variable(
        "CUSTOM_DEBUG",
        "",
        ("", "0", "1"),
        "Not set: the values of indices, lengths and tables are checked on CPU tensors. 1: on "
        "every device, which synchronises. 0: nowhere.",
    ),
    Variable(
        "CUSTOM_CACHE_DIR",
        "",
        None,
        "A folder that remembers which tiles the Ascend compiler refused; "
        "else npu-custom-ops in $XDG_CACHE_HOME or ~/.cache.",
    ),
    Variable(
        "CUSTOM_VLLM",
        "0",
        ("0", "1"),
        "1: vLLM serves the models of docs/vllm.md by our ops.",
    ),
    Variable(
        "CUSTOM_SGLANG",
        "0",
        ("0", "1"),
        "1: SGLang serves the models of docs/sglang.md by our ops.",
    ),
)

_BY_FIELD = {variable.name.removeprefix("CUSTOM_").lower(): variable for variable in VARIABLES}


def _is_switch(field: str) -> bool:
    """A setting that is on or off: True or False in Python."""
    return {"0", "1"} <= {*(_BY_FIELD[field].allowed or ())}


@dataclass
class Config:
    """The values in force; `custom.config` is the one instance."""

    backend: str
    log: str
    replay: bool
    debug: bool
    cache_dir: str
    vllm: bool
    sglang: bool

    def __setattr__(self, name: str, value: Any) -> None:
        """A misspelled setting is refused where it is made, as in the environment."""
        variable = _BY_FIELD.get(name)
        if variable is None:
            raise AttributeError(
                f"custom.config has no `{name}`, expected one of {', '.join(_BY_FIELD)}."
            )
        allowed: tuple[Any, ...] | None = (False, True) if _is_switch(name) else variable.allowed
        kind = type(allowed[0]) if allowed else str
        if type(value) is not kind or (allowed and value not in allowed):
            wanted = f"one of {', '.join(map(repr, allowed))}" if allowed else "a string"
            raise ValueError(f"custom.config.{name} is {value!r}, expected {wanted}.")
        object.__setattr__(self, name, value)


def _read() -> Config:
    read = {field: variable.read() for field, variable in _BY_FIELD.items()}
    values: dict[str, Any] = {
        name: value == "1" if _is_switch(name) else value for name, value in read.items()
    }
    return Config(**values)


config = _read()


@contextmanager
def by_reference() -> Iterator[None]:
    """Calls inside are the reference's, on any device."""
    chosen, config.backend = config.backend, "reference"
    try:
        yield
    finally:
        config.backend = chosen
