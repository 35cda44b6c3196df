# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What is planted: one change of one expression or statement, outside of kernels and text."""

from __future__ import annotations

import ast
import builtins
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("dispatch", "graph_mode", "cuda_ops")

_SHIFTED = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
_SIGNS = {ast.Add: ast.Sub, ast.Sub: ast.Add}
_BOTH = {ast.And: ast.Or, ast.Or: ast.And}
_DTYPES = {
    "float16": "float32",
    "bfloat16": "float16",
    "float32": "float16",
    "float64": "float32",
    "int32": "int64",
    "int64": "int32",
    "int8": "uint8",
    "uint8": "int8",
}
# methods of dispatch/check.py's Checker, and functions that only refuse
_CHECKS = {
    "require", "shape", "dtype", "floating", "integer", "same_dtype", "same_device", "contiguous",
    "dense_rows", "apart", "one_of", "at_least", "count", "fail", "check", "refuse",
}  # fmt: skip
# keywords: of a launch, which change the time alone; a CPU is one device; and zip's strict= says
# what is so
_LEFT_ALONE = {"num_warps", "num_stages", "device", "strict"}
_IN_ANY_ORDER = {
    "equal", "maximum", "minimum", "gcd", "lcm", "add", "mul", "logaddexp", "is_far", "aligned",
    "transpose",
}  # fmt: skip
Instead = tuple[str, ast.expr]  # kind, what takes the place
Change = tuple[str, ast.AST, ast.AST]  # kind, what goes, what takes the place


def shifted(node: ast.AST) -> Iterator[Instead]:
    """Each comparison of a chain, with the border on its other side."""
    if isinstance(node, ast.Compare):
        for i, each in enumerate(node.ops):
            if type(each) in _SHIFTED:
                ops = [*node.ops[:i], _SHIFTED[type(each)](), *node.ops[i + 1 :]]
                yield "off by one", ast.Compare(node.left, ops, node.comparators)


def difference(old: str, new: str) -> tuple[str, str]:
    """Without most of what both begin and end with."""
    low = 0
    while low < min(len(old), len(new)) and old[low] == new[low]:
        low += 1
    high = 0
    while high < min(len(old), len(new)) - low and old[-1 - high] == new[-1 - high]:
        high += 1
    low, high = max(0, low - 25), max(0, high - 25)
    return old[low : len(old) - high], new[low : len(new) - high]


def _text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr | ast.Constant) and not isinstance(
        getattr(node, "value", ""), int | float | bool | None
    )


def _last(function: ast.AST) -> str:
    return ast.unparse(function).rpartition(".")[2]


def _number(node: ast.AST) -> Iterator[Instead]:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        yield "off by one", ast.Constant(node.value + 1)


def _pairs(nodes: list[Any]) -> Iterator[list[Any]]:
    """With two neighbours exchanged."""
    for i in range(len(nodes) - 1):
        pair = nodes[i : i + 2]
        alike = ast.unparse(pair[0]) == ast.unparse(pair[1])
        # a slice is written in brackets alone
        fixed = any(_text(x) or isinstance(x, ast.Starred | ast.Lambda | ast.Slice) for x in pair)
        if not alike and not fixed:
            yield [*nodes[:i], *pair[::-1], *nodes[i + 2 :]]


def _swapped(node: ast.AST) -> Iterator[Instead]:
    if isinstance(node, ast.Call):
        function = node.func
        if isinstance(function, ast.Name) and hasattr(builtins, function.id):
            return
        if _last(function) not in _IN_ANY_ORDER:
            for given in _pairs(node.args):
                yield "swapped", ast.Call(function, given, node.keywords)
        named = [x for x in node.keywords if x.arg and x.arg not in _LEFT_ALONE]
        rest = [x for x in node.keywords if x not in named]
        for values in _pairs([x.value for x in named]):
            given = [ast.keyword(x.arg, value) for x, value in zip(named, values, strict=True)]
            yield "swapped", ast.Call(function, node.args, [*given, *rest])
    elif isinstance(node, ast.Tuple):
        for pair in _pairs(node.elts):
            yield "swapped", ast.Tuple(pair, node.ctx)


def _dropped_keyword(node: ast.AST) -> Iterator[Instead]:
    if isinstance(node, ast.Call):
        for i, each in enumerate(node.keywords):
            if each.arg and each.arg not in _LEFT_ALONE:
                kept = [*node.keywords[:i], *node.keywords[i + 1 :]]
                yield "a keyword dropped", ast.Call(node.func, node.args, kept)


def _sign(node: ast.AST) -> Iterator[Instead]:
    if isinstance(node, ast.BinOp) and type(node.op) in _SIGNS:
        sides = (node.left, node.right)
        if not any(_text(x) or isinstance(x, ast.List | ast.Tuple | ast.Dict) for x in sides):
            yield "another sign", ast.BinOp(node.left, _SIGNS[type(node.op)](), node.right)


def _both(node: ast.AST) -> Iterator[Instead]:
    if isinstance(node, ast.BoolOp):
        yield "and for or", ast.BoolOp(_BOTH[type(node.op)](), node.values)


def _truth(node: ast.AST) -> Iterator[Instead]:
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield "true for false", ast.Constant(not node.value)


def _dtype(node: ast.AST) -> Iterator[Instead]:
    if isinstance(node, ast.Attribute) and node.attr in _DTYPES:
        base = node.value
        if isinstance(base, ast.Name) and base.id == "torch":
            yield "another dtype", ast.Attribute(base, _DTYPES[node.attr], node.ctx)


def _not(test: ast.expr) -> ast.expr:
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return test.operand
    return ast.UnaryOp(ast.Not(), test)


def _negated(node: ast.AST) -> Iterator[Change]:
    tests = [node.test] if isinstance(node, ast.If | ast.IfExp) else []
    tests += node.ifs[:1] if isinstance(node, ast.comprehension) else []
    for test in tests:
        yield "a condition negated", test, _not(test)


def _refuses(body: list[ast.stmt]) -> bool:
    """It raises, or gives the reason why not."""
    if len(body) != 1:
        return False
    only = body[0]
    return isinstance(only, ast.Raise) or (
        isinstance(only, ast.Return) and only.value is not None and _text(only.value)
    )


def _dropped_check(node: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.If) and _refuses(node.body):
        yield "a check dropped", node.test, ast.Constant(False)


def _dropped_statement(node: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        check = _last(node.value.func).strip("_").partition("_")[0] in _CHECKS
        check = check or _last(node.value.func) in _CHECKS
        yield "a check dropped" if check else "a statement dropped", node, ast.Pass()
    elif isinstance(node, ast.AugAssign | ast.Break | ast.Continue | ast.Delete) or (
        isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute | ast.Subscript)
    ):
        yield "a statement dropped", node, ast.Pass()


# another expression in the place of this one
_INSTEAD = (shifted, _number, _swapped, _dropped_keyword, _sign, _both, _truth, _dtype)
_OTHERS = (_negated, _dropped_check, _dropped_statement)


# what an alias of a type is made of
_TYPES = {"tuple", "dict", "list", "set", "type", "Callable", "Sequence", "Mapping", "Iterator"}


def _is_type(node: ast.AST) -> bool:
    """It is for who reads it, as an annotation."""
    if isinstance(node, ast.BinOp):
        return _is_type(node.left) or _is_type(node.right)
    return (
        isinstance(node, ast.Subscript)
        and isinstance(node.value, ast.Name)
        and node.value.id in _TYPES
    )


def _changes(node: ast.AST) -> Iterator[Change]:
    for change in _INSTEAD:
        yield from ((kind, node, new) for kind, new in change(node))
    for other in _OTHERS:
        yield from other(node)


@dataclass(frozen=True)
class Statement:
    function: str  # "": it runs when the module is imported
    words: str  # digest of the statement; of its head, where there are statements below it
    nth: int  # among those of the function with the same words

    @property
    def key(self) -> str:
        return f"{self.function} {self.words} {self.nth}"


@dataclass(frozen=True)
class Planted(ABC):
    """A change by its place, kind and words."""

    file: str
    function: str
    kind: str
    old: str
    new: str
    nth: int  # among those there with the same words

    @property
    @abstractmethod
    def place(self) -> str:
        """As the title names it."""

    @property
    def title(self) -> str:
        nth = f" ({self.nth + 1})" if self.nth else ""
        return f"{self.place}: {self.kind}: {self.old} -> {self.new}{nth}"


@dataclass(frozen=True)
class Mutant(Planted):
    statement: Statement
    index: int  # among all of the file

    @property
    def place(self) -> str:
        return f"{self.file}: {self.function or '<module>'}"


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _short(words: str) -> str:
    return words if len(words) < 130 else f"{words[:50]}~{digest(words)}~{words[-50:]}"


def is_kernel(node: ast.AST) -> bool:
    """Also what kernels alone call, while they are compiled."""
    return isinstance(node, ast.FunctionDef) and any(
        word in ast.unparse(each)
        for each in node.decorator_list
        for word in ("jit", "constexpr_function")
    )


_HEADS = {
    ast.If: ("test",),
    ast.While: ("test",),
    ast.For: ("target", "iter"),
    ast.With: ("items",),
    ast.Try: (),
    ast.FunctionDef: ("args",),
    ast.ClassDef: (),
}
_ANY_ORDER = (ast.In, ast.NotIn)


class _Places:
    """Where something can be planted, in the order of the text."""

    def __init__(self, tree: ast.Module) -> None:
        self.statements: list[tuple[Statement, ast.stmt]] = []
        self.found: list[tuple[Statement, ast.AST]] = []
        self._counted: dict[tuple[str, str], int] = {}
        for node in tree.body:
            self._statement(node, (), True)

    def _statement(self, node: ast.stmt, names: tuple[str, ...], imported: bool) -> None:
        """`imported`: it runs with the module, names are only those of classes."""
        if is_kernel(node) or isinstance(node, ast.Import | ast.ImportFrom | ast.Raise):
            return
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        fields = _HEADS.get(type(node))
        if fields is None:
            heads: list[ast.AST] = [node]
        else:
            heads = []
            for name in fields:
                value = getattr(node, name)
                heads += value if isinstance(value, list) else [value]
        words = digest(type(node).__name__ + " ".join(map(ast.unparse, heads)))
        function = "" if imported else ".".join(names)
        nth = self._counted.get((function, words), 0)
        self._counted[function, words] = nth + 1
        at = Statement(function, words, nth)
        self.statements.append((at, node))
        self.found.append((at, node))
        if isinstance(node, ast.Assign) and _is_type(node.value):
            return
        if isinstance(node, ast.FunctionDef):
            for default in [*node.args.defaults, *filter(None, node.args.kw_defaults)]:
                self._expression(default, at)
        elif isinstance(node, ast.AnnAssign):
            if node.value is not None:
                self._expression(node.value, at)
        else:
            for head in heads if fields is not None else ast.iter_child_nodes(node):
                self._expression(head, at)
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names = (*names, node.name)
            imported = imported and isinstance(node, ast.ClassDef)
        for name in ("body", "orelse", "finalbody"):
            for each in getattr(node, name, ()) if fields is not None else ():
                self._statement(each, names, imported)
        for handler in getattr(node, "handlers", ()):
            for each in handler.body:
                self._statement(each, names, imported)

    def _expression(self, node: ast.AST, at: Statement) -> None:
        if isinstance(node, ast.JoinedStr):
            return
        if isinstance(node, ast.keyword) and node.arg in _LEFT_ALONE:
            return
        if not at.function and isinstance(node, ast.Call) and _last(node.func).endswith("Layout"):
            return  # kernels alone read it
        plain = isinstance(node, ast.Compare) and isinstance(node.ops[0], _ANY_ORDER)
        self.found.append((at, node))
        for child in ast.iter_child_nodes(node):
            if plain and isinstance(child, ast.Tuple | ast.List | ast.Set):
                for each in child.elts:  # their order is nothing
                    self._expression(each, at)
            else:
                self._expression(child, at)


class _Telling(ast.NodeTransformer):
    def __init__(self, numbers: dict[int, int], call: str, first: int) -> None:
        self.numbers, self.name, self.first = numbers, call, first

    def generic_visit(self, node: ast.AST) -> Any:
        if is_kernel(node):
            return node
        number = self.numbers.get(id(node))
        super().generic_visit(node)
        if number is None:
            return node
        name = ast.Name(self.name, ast.Load())
        call = ast.Expr(ast.Call(name, [ast.Constant(self.first + number)], []))
        return [ast.copy_location(call, node), node]


class Source:
    """A file of ours, and what can be planted in it."""

    def __init__(self, file: str, text: str | None = None) -> None:
        self.file = file
        self.text = (ROOT / file).read_text() if text is None else text
        self._tree = ast.parse(self.text)
        self._lines = self.text.encode().splitlines()
        places = _Places(self._tree)
        self.statements = [at for at, _ in places.statements]
        self._nodes = {id(node): i for i, (_, node) in enumerate(places.statements)}
        self.mutants: list[Mutant] = []
        self._changes: list[tuple[ast.AST, ast.AST]] = []
        counted: dict[tuple[str, ...], int] = {}
        for at, node in places.found:
            for kind, old, new in _changes(node):
                told = self._around(old, *difference(ast.unparse(old), ast.unparse(new)))
                if isinstance(old, ast.stmt):
                    told = (ast.unparse(old), "")
                name = (at.function, kind, *map(_short, told))
                nth = counted.get(name, 0)
                counted[name] = nth + 1
                self.mutants.append(Mutant(file, *name, nth, at, len(self._changes)))
                self._changes.append((old, new))

    def _around(self, node: ast.AST, old: str, new: str) -> tuple[str, str]:
        """Few words, with some of those around them."""
        if len(old) > 24 or not isinstance(node, ast.expr):
            return old, new
        lines = self._lines[node.lineno - 1 : (node.end_lineno or 0)]
        before = lines[0][: node.col_offset].decode()[-24:].lstrip()
        after = lines[-1][node.end_col_offset :].decode()[:16].rstrip()
        return f"{before}{old}{after}", f"{before}{new}{after}"

    def telling(self, call: str, first: int) -> CodeType:
        """The module's code that calls `call` with a number, `first` and up, ahead of each
        statement."""
        tree = _Telling(self._nodes, call, first).visit(self._tree)
        path = str(ROOT / self.file)
        return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)

    def planted(self, mutant: Mutant) -> str:
        """The text with the mistake, on as many lines: kernels below stay where they are."""
        old, new = self._changes[mutant.index]
        data, starts = self.text.encode(), [0]
        for line in data.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        low = starts[old.lineno - 1] + old.col_offset
        high = starts[old.end_lineno - 1] + old.end_col_offset
        lines = "\n" * data.count(b"\n", low, high)
        text = f"pass{lines}" if isinstance(new, ast.Pass) else f"({ast.unparse(new)}{lines})"
        return (data[:low] + text.encode() + data[high:]).decode()


@cache
def files() -> tuple[str, ...]:
    found = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    return tuple(sorted(str(path.relative_to(ROOT)) for path in found))


@cache
def source(file: str) -> Source:
    return Source(file)


def mutants() -> list[Mutant]:
    return [each for file in files() for each in source(file).mutants]
