# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What kernels load and store ahead of their waits for the kernel ahead, read off their source.

A launcher's launches are noted, and none runs; the source of each kernel and of what it calls is
then walked with the constants of its launch.  A branch that no constant decides counts as both.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from triton.runtime.jit import JITFunction

_LOADS = {"tl.load", "gl.load", "tma_load", "cp_async"}
_STORES = {"tl.store", "gl.store", "tma_store"}
_BOTH = {"tl.atomic_add", "gl.atomic_add"}
_UNKNOWN = object()


@dataclass
class Launch:
    """Of a kernel: the storages of its tensors, and whether it may overlap the one ahead."""

    kernel: JITFunction
    given: dict[str, Any]
    overlaps: bool


@dataclass
class Reading:
    """What happens in a kernel: parameters of which it loads or stores before it has waited, and
    those that it stores at all; whether it waits, and lets the next one begin before that."""

    early: set[str] = field(default_factory=set)
    stored: set[str] = field(default_factory=set)
    waits: bool = False
    lets: bool = False
    lets_early: bool = False


# what evaluates an expression that only a compiler can: Triton's own calls refuse the host
_COMPILED = (NameError, AttributeError, RuntimeError, TypeError, ValueError)


class _Walk:
    """Of one function: what its names stand for."""

    def __init__(
        self, kernel: JITFunction, known: dict[str, Any], of: dict[str, set[str]], to: Reading
    ) -> None:
        self.scope, self.known, self.of, self.to = kernel.fn.__globals__, known, of, to
        tree = ast.parse(textwrap.dedent(inspect.getsource(kernel.fn)))
        self.body = tree.body[0].body
        self.locals = {
            x.id for x in ast.walk(tree) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)
        } | set(kernel.arg_names)

    def value(self, node: ast.expr) -> Any:
        names = {x.id for x in ast.walk(node) if isinstance(x, ast.Name)}
        if names & (self.locals - self.known.keys()):
            return _UNKNOWN
        try:
            code = compile(ast.Expression(node), "constant", "eval")
            found = eval(code, dict(self.scope), dict(self.known))
        except _COMPILED:
            return _UNKNOWN
        return getattr(found, "value", found)

    def first_of(self, name: str, node: ast.expr) -> dict[str, Any]:
        """What a loop over a range begins with, where that is known."""
        if not isinstance(node, ast.Call) or not ast.unparse(node.func).endswith("range"):
            return {}
        first = self.value(node.args[0]) if len(node.args) > 1 else 0
        return {} if first is _UNKNOWN else {name: first}

    def roots(self, node: ast.AST) -> set[str]:
        """The kernel's parameters that an expression points into: what a call gives is a number,
        but for a choice between pointers."""
        if isinstance(node, ast.Call) and not ast.unparse(node.func).endswith(".where"):
            return set()
        own = self.of.get(node.id, set()) if isinstance(node, ast.Name) else set()
        return own.union(*map(self.roots, ast.iter_child_nodes(node)))

    def block(self, body: list[ast.stmt], waited: bool) -> bool:
        """Whether the kernel has waited behind these statements."""
        for each in body:
            waited = self.statement(each, waited)
        return waited

    def statement(self, node: ast.stmt, waited: bool) -> bool:
        if isinstance(node, ast.If):
            waited = self.calls(node.test, waited)
            chosen = self.value(node.test)
            if chosen is not _UNKNOWN:
                return self.block(node.body if chosen else node.orelse, waited)
            parts = [self.block(part, waited) for part in (node.body, node.orelse)]
            return all(parts)
        if isinstance(node, ast.For | ast.While):
            again = node.iter if isinstance(node, ast.For) else node.test
            waited = self.calls(again, waited)
            if isinstance(node, ast.For) and isinstance(node.target, ast.Name):
                self.known |= self.first_of(node.target.id, again)
                waited = self.block(node.body, waited)
                self.known.pop(node.target.id, None)
            return self.block(node.body, waited)
        value = getattr(node, "value", None)
        if isinstance(value, ast.expr):
            waited = self.calls(value, waited)
            targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
            for name in {
                x.id for t in targets if t for x in ast.walk(t) if isinstance(x, ast.Name)
            }:
                self.of[name] = self.of.get(name, set()) | self.roots(value)
                if isinstance(node, ast.AugAssign) or len(targets) > 1:
                    self.known.pop(name, None)
                elif isinstance(targets[0], ast.Name):
                    self.known.pop(name, None)
                    if (found := self.value(value)) is not _UNKNOWN:
                        self.known[name] = found
        return waited

    def calls(self, node: ast.expr, waited: bool) -> bool:
        for call in _innermost_first(node):
            name = ast.unparse(call.func)
            if name == "gdc_wait":
                self.to.waits = waited = True
            elif name == "gdc_launch_dependents":
                self.to.lets = True
                self.to.lets_early |= not waited
            elif name == "gl.warp_specialize":
                for part in call.args[0].elts:
                    self.into(part.elts[0], part.elts[1].elts, [], waited)
            elif name in _LOADS | _STORES | _BOTH:
                source = call.args[1] if name == "cp_async" else call.args[0]
                self.to.early |= set() if waited else self.roots(source)
                self.to.stored |= self.roots(source) if name not in _LOADS else set()
            else:
                waited = self.into(call.func, call.args, call.keywords, waited)
        return waited

    def into(
        self, func: ast.expr, args: list[ast.expr], named: list[ast.keyword], waited: bool
    ) -> bool:
        if {x.id for x in ast.walk(func) if isinstance(x, ast.Name)} & self.locals:
            return waited  # a method of a value
        try:
            called = eval(compile(ast.Expression(func), "called", "eval"), dict(self.scope))
        except _COMPILED:
            return waited
        if not isinstance(called, JITFunction) or called.fn.__module__.startswith("triton."):
            return waited
        given = dict(zip(called.arg_names, args, strict=False)) | {x.arg: x.value for x in named}
        values = {name: self.value(x) for name, x in given.items()}
        known = {name: x for name, x in values.items() if x is not _UNKNOWN}
        of = {name: self.roots(x) for name, x in given.items()}
        inside = _Walk(called, known, of, self.to)
        return inside.block(inside.body, waited)


def _innermost_first(node: ast.AST) -> Iterator[ast.Call]:
    for child in ast.iter_child_nodes(node):
        yield from _innermost_first(child)
    if isinstance(node, ast.Call):
        yield node


class _Tensor:
    """One that is given: what a kernel asks of it is known, but that it is not None."""


def read(launch: Launch) -> Reading:
    """What the kernel of a launch does, and in which order."""
    known, of = {}, {}
    for param in launch.kernel.params:
        value = launch.given.get(param.name, param.default)
        if isinstance(value, torch.Tensor) or hasattr(value, "block_shape"):
            of[param.name], known[param.name] = {param.name}, _Tensor()
        elif value is None or param.is_constexpr:
            known[param.name] = value
    found = Reading()
    walk = _Walk(launch.kernel, known, of, found)
    walk.block(walk.body, False)
    return found


def _storage(value: Any) -> int:
    tensor = getattr(value, "base", value)
    return tensor.untyped_storage()._cdata


def faults(launches: list[Launch]) -> list[str]:
    """What an op's kernels, in the order of their launches, read or write too early."""
    wrong: list[str] = []
    readings = [read(launch) for launch in launches]
    behind_all = False  # what the caller launched has ended when this kernel begins
    ended = 0  # so many of the op's kernels have
    for number, (launch, reading) in enumerate(zip(launches, readings, strict=True)):
        name = f"{launch.kernel.__name__} (launch {number})"
        if not launch.overlaps:
            behind_all, ended = True, number
        else:
            if not reading.waits:
                wrong.append(f"{name} never waits")
            ahead = readings[number - 1] if number else None
            if ahead is not None and not ahead.lets_early:
                behind_all = behind_all or ahead.waits
                ended = number - 1 if ahead.lets else number
            if not behind_all:
                wrong += [f"{name} reads {each} before it waits" for each in sorted(reading.early)]
        made = {
            _storage(other.given[each]): other.kernel.__name__
            for other, found in zip(launches[ended:number], readings[ended:number], strict=True)
            for each in found.stored
        }
        for each in sorted(reading.early):
            if maker := made.get(_storage(launch.given[each])):
                wrong.append(f"{name} reads {each} of {maker} before it waits")
    return wrong
