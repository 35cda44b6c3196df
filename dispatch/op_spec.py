# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Spec: the static definition of an op, read from its module `dispatch/ops/<op>.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from .check import Checker

UNLIMITED = 2**63 - 1  # torch_npu's "no limit" of pre_tokens and next_tokens


@dataclass(frozen=True)
class Variant:
    """An op that is another's launcher with other outputs: one of `VARIANTS` in that op's module.
    `function` is its launcher in the other's modules; a backend takes what it takes of the other.
    """

    schema: str
    check: Callable[[Checker, Any], None]
    fake: Callable[..., Any]
    function: str
    ge: str | None = None
    onnx: str | None = None


@dataclass(frozen=True)
class Spec:
    """One op: the names of its module in `ops/`, or of a `Variant` there, and nothing else.

    schema: PyTorch's, `SCHEMA` there.
    family, file: folder and module in ops/, reference/, npu_ops/ and cuda_ops/.
    checked: (checker of the op's name, its arguments by name) raises one clear sentence on bad
        ones; runs for real and for fake tensors; `check` there.
    fake: outputs with the right shapes and dtypes, and nothing in them; contiguous, as every output
        of every backend is, whatever the strides of the inputs.
    function: the launcher's name in reference/, npu_ops/ and cuda_ops/, `FUNCTION` there.
    ge, onnx: CANN's operator of the same meaning and the ONNX node, `GE` and `ONNX` there.
    setup_context: (ctx, the arguments by name, output) saves what `backward` needs.
    backward: (ctx, *grads) gives the gradients by the arguments' names; of an argument that it
        leaves out there is none.
    tables: the caches of each page table, where those of different ones may have their pages from
        one pool; `TABLES` there.
    """

    schema: str
    family: str
    file: str
    checked: Callable[[Checker, Any], None]
    fake: Callable[..., Any]
    function: str
    ge: str | None
    onnx: str | None
    setup_context: Callable[..., None] | None
    backward: Callable[..., dict[str, Any]] | None
    tables: tuple[tuple[str, ...], ...]

    @property
    def name(self) -> str:
        return self.schema.partition("(")[0]

    @property
    def module(self) -> str:
        """Where a backend's package has the op."""
        return f"{self.family}.{self.file}"

    @property
    def differentiable(self) -> bool:
        return self.backward is not None

    def check(self, **arguments: Any) -> None:
        """All of them, by name."""
        self.checked(Checker(self.name), arguments)

    @classmethod
    def of(cls, op: ModuleType) -> tuple[Spec, ...]:
        """The op of a module, and its variants."""
        family, file = op.__name__.split(".")[-2:]
        own = cls(
            op.SCHEMA,
            family,
            file,
            op.check,
            op.fake,
            getattr(op, "FUNCTION", "forward"),
            getattr(op, "GE", None),
            getattr(op, "ONNX", None),
            getattr(op, "setup_context", None),
            getattr(op, "backward", None),
            getattr(op, "TABLES", ()),
        )
        variants: tuple[Variant, ...] = getattr(op, "VARIANTS", ())
        return own, *(
            cls(x.schema, family, file, x.check, x.fake, x.function, x.ge, x.onnx, None, None, ())
            for x in variants
        )
