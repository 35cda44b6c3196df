# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Who may import whom, read off the source."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from custom.dispatch.registry import Spec

from docs.functions import functions

from ..support.calls import every_spec

ROOT = Path(__file__).parents[2]
FOLDERS = ("custom", "dispatch", "npu_ops", "cuda_ops", "graph_mode")
KERNELS = ("npu_ops", "cuda_ops")
# folder -> the folders (or modules) it may import from, beside itself
ALLOWED = {
    "custom": ("custom", "dispatch", "graph_mode"),
    "dispatch": ("dispatch",),
    "graph_mode": ("dispatch", "graph_mode"),
    # beside what both packages of kernels take: what a refusal of the machine's compiler needs
    "npu_ops": (
        "dispatch.common",
        "dispatch.errors",
        "dispatch.env",
        "dispatch.log",
        "dispatch.ops",
        "dispatch.versions",
        "npu_ops",
    ),
    "cuda_ops": (
        "dispatch.common",
        "dispatch.errors",
        "dispatch.log",
        "dispatch.ops",
        "dispatch.versions",
        "cuda_ops",
    ),
}
# what may be imported at module level, so that `import custom` needs torch alone
LAZY = {
    "triton",
    "torch_npu",
    "torchair",
    "onnx",
    "onnxscript",
    "transformers",
    "vllm",
    "vllm_ascend",
    "matplotlib",
    "tqdm",
}


def sources() -> list[Path]:
    return [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]


def in_cuda_ops() -> list[Path]:
    return sorted((ROOT / "cuda_ops").rglob("*.py"))


def _named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def module_of(path: Path) -> tuple[str, ...]:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "custom" else ("custom", *parts)
    return parts[:-1] if parts[-1] == "__init__" else parts


def imported(path: Path) -> list[str]:
    """Absolute names of the modules (and of the names taken from them)."""
    package = module_of(path) if path.name == "__init__.py" else module_of(path)[:-1]
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            base += node.module.split(".") if node.module else []
            names += [".".join([*base, alias.name]) for alias in node.names]
    return names


@pytest.mark.parametrize("path", in_cuda_ops(), ids=_named)
def test_floors_of_cuda_ops_import_downwards(path):
    """The ops on top, then the folders hopper/, then common/ and runtime/."""
    inside = path.relative_to(ROOT / "cuda_ops").parts
    for name in imported(path):
        if name.startswith("custom.cuda_ops."):
            there = name.removeprefix("custom.cuda_ops.").split(".")
            at_bottom = there[0] in ("common", "runtime")
            if inside[0] in ("common", "runtime"):
                assert at_bottom, f"imports {name}"
            assert at_bottom or "hopper" in there or "hopper" not in inside, f"imports {name}"


def _modules() -> dict[str, list[str]]:
    """Of every module, those of ours that it imports, inside functions as well."""
    names = {".".join(module_of(path)): path for path in sources()}
    found = {}
    for name, path in names.items():
        # a name that is taken from a module, or the module itself
        into = {x if x in names else x.rpartition(".")[0] for x in imported(path)}
        found[name] = sorted(into & names.keys() - {name})
    return found


def test_no_module_imports_itself_by_way_of_others():
    graph = _modules()
    done: set[str] = set()

    def visit(name: str, way: tuple[str, ...]) -> None:
        assert name not in way, " -> ".join((*way, name))
        if name not in done:
            for each in graph[name]:
                visit(each, (*way, name))
            done.add(name)

    for name in graph:
        visit(name, ())


@pytest.mark.parametrize("path", in_cuda_ops(), ids=_named)
def test_what_begins_with_an_underscore_stays_in_its_file(path):
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            assert not [x.name for x in node.names if x.name.startswith("_")], f"from {node.module}"
    ours = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.level
        for alias in node.names
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ours:
            assert not node.attr.startswith("_"), ast.unparse(node)


# what several of hopper/ share, and no op's path
ROOMS = (
    "__init__",
    "absorption",
    "barriers",
    "chunks",
    "fused_gemm",
    "kda",
    "layouts",
    "mla_consumers",
    "mla_parts",
    "packed_rows",
    "places",
    "rotation",
    "rows",
    "selection",
    "tma",
    "turns",
)


@pytest.mark.parametrize(
    "path",
    [x for x in in_cuda_ops() if x.parent.name == "hopper" and x.stem not in ROOMS],
    ids=_named,
)
def test_a_hopper_module_has_a_question_and_a_launch(path):
    """Nobody outside needs to know of anything else there; classes are what travels together."""
    tree = ast.parse(path.read_text())
    public = [x.name for x in tree.body if isinstance(x, ast.FunctionDef)]
    assert [name for name in public if not name.startswith("_")] == ["supports", "launch"]


def _below(path: Path, node: ast.ImportFrom) -> Path:
    """What `from ... import` names, as a path without its ending."""
    return path.parents[node.level - 1].joinpath(*(node.module or "").split("."))


def _launcher(spec: Spec) -> tuple[ast.FunctionDef, str]:
    """The launcher of an op in cuda_ops, and where it is written."""
    path, name = ROOT / "cuda_ops" / spec.family / f"{spec.file}.py", spec.function
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom):
            taken = [x.name for x in node.names if (x.asname or x.name) == name]
            if taken:  # another op's, under this name
                path, name = _below(path, node).with_suffix(".py"), taken[0]
    found = [
        x
        for x in ast.parse(path.read_text()).body
        if isinstance(x, ast.FunctionDef) and x.name == name
    ]
    return found[0], spec.schema


@every_spec
def test_a_launcher_takes_what_it_uses_and_restates_no_default(spec):
    function, schema = _launcher(spec)
    arguments = function.args
    assert not arguments.defaults and not any(arguments.kw_defaults), "the schema has them"
    used = {x.id for each in function.body for x in ast.walk(each) if isinstance(x, ast.Name)}
    for argument in (*arguments.args, *arguments.kwonlyargs):
        assert argument.arg in used, f"{argument.arg} is not used"
        assert re.search(rf"\b{argument.arg}\b", schema), f"{argument.arg} is not in the schema"


def _last_name(node: ast.expr) -> str:
    """`jit` of triton.jit(...), gluon.jit and jit."""
    node = node.func if isinstance(node, ast.Call) else node
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


@pytest.mark.parametrize("path", sources(), ids=_named)
def test_imports_go_down_the_layers(path):
    folder = path.relative_to(ROOT).parts[0]
    for name in imported(path):
        if not name.startswith("custom."):
            assert name.partition(".")[0] not in FOLDERS, f"{name}: import it relatively"
            continue
        inside = name.removeprefix("custom.")
        if folder == "custom" and inside.partition(".")[0] not in FOLDERS:
            continue  # a module of custom/ itself
        assert inside.startswith(ALLOWED[folder]), f"{path.name} imports {name}"
        if folder in KERNELS:
            assert not inside.startswith("dispatch.reference")


@pytest.mark.parametrize("path", sources(), ids=_named)
def test_optional_packages_are_imported_lazily(path):
    folder = path.relative_to(ROOT).parts[0]
    alone = path == ROOT / "custom/bench/models.py"  # a program, which says what it needs
    if folder in KERNELS or folder == "graph_mode" or "integrations" in path.parts or alone:
        return  # imported on first use themselves
    top_level = ast.parse(path.read_text()).body
    for node in top_level:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module]
            assert not {(n or "").partition(".")[0] for n in names} & LAZY, f"{path}: {names}"


def _is_jitted(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef) and "jit" in map(_last_name, node.decorator_list)


def kernels(path: Path) -> set[str]:
    """Names of jitted functions that a module of cuda_ops has."""
    tree = ast.parse(path.read_text())
    own = {node.name for node in tree.body if _is_jitted(node)}
    for node in (node for node in tree.body if isinstance(node, ast.ImportFrom) and node.level):
        there = _below(path, node)
        if there.with_suffix(".py").is_file() and "cuda_ops" in there.parts:
            found = kernels(there.with_suffix(".py"))
            own |= {alias.name for alias in node.names if alias.name in found}
    return own


@pytest.mark.parametrize("path", in_cuda_ops(), ids=_named)
def test_kernels_are_launched_in_one_place(path):
    """A plan repeats what goes through launches.py, and knows nothing of anything else."""
    if path.name == "launches.py":
        return
    here = kernels(path)
    streams = ("stream", "Stream", "Event", "current_stream", "set_stream", "synchronize")
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Subscript):
            assert ast.unparse(node.value) not in here, f"line {node.lineno}: launches.kernel(...)"
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch.cuda":
            assert node.attr not in streams, f"line {node.lineno}: launches.SideStream"


def launched(tree: ast.Module) -> set[str]:
    """Jitted functions of a module that its other code names, and modules of hopper/ it imports."""
    names = {
        node.id
        for part in tree.body
        if not _is_jitted(part)
        for node in ast.walk(part)
        if isinstance(node, ast.Name)
    }
    found = {part.name for part in tree.body if _is_jitted(part)} & names
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            package, _, module = (node.module or "").partition(".")
            if package == "hopper":
                modules = [module] if module else [alias.name for alias in node.names]
                found |= {f"hopper/{each}.py" for each in modules}
    return found


def tables(docstring: str) -> list[list[tuple[str, list[str]]]]:
    """The tables condition -> kernels of a launcher: of every row the condition and the names.

    A row is four spaces, the condition, two spaces or more, and the kernels, in their column: names
    with commas, or `then` where one runs after another.  It goes on in lines with one of the two.
    """
    found: list[list[tuple[str, list[str]]]] = []
    column = 0  # of the kernels; 0 outside of a table
    for line in docstring.splitlines():
        if header := re.fullmatch(r"    condition {2,}kernels", line):
            column = header.end() - len("kernels")
            found.append([])
        elif not line.strip():
            column = 0
        elif column:
            condition, names = line[4:column], line[column:]
            assert line.startswith("    ") and len(line) <= 100, line
            assert not names or (names[0] != " " and condition.endswith("  ")), f"column: {line}"
            here = [name.strip() for name in re.split(r",|\bthen\b", names) if name.strip()]
            if names and condition[0] != " ":
                found[-1].append((condition.strip(), here))
            else:  # the row goes on
                assert found[-1], f"no row to go on: {line}"
                above, before = found[-1].pop()
                found[-1].append((f"{above} {condition.strip()}".strip(), before + here))
    return found


def faults(source: str, folder: Path) -> list[str]:
    """What is wrong with the tables of a launcher."""
    tree = ast.parse(source)
    read = tables(ast.get_docstring(tree, clean=False) or "")
    if not read:
        return ["no table"]
    own = {part.name for part in tree.body if _is_jitted(part)}
    wrong, named = [], set()
    for rows in read:
        if not rows or rows[-1][0] not in (("any", "always") if len(rows) == 1 else ("else",)):
            wrong.append("the last condition is none")
        for _, names in rows:
            named |= set(names)
    for name in sorted(named):
        is_file = re.fullmatch(r"(\w+/)*\w+\.py", name)
        there = (folder / name, ROOT / "cuda_ops" / name)
        if name not in own and not (is_file and any(map(Path.is_file, there))):
            wrong.append(f"{name} does not exist")
    return wrong + [f"{name} is left out" for name in sorted(launched(tree) - named)]


def _launchers() -> list[Path]:
    """Modules that launch kernels, or have such a table; others hand on to one of these."""

    def asked(path: Path) -> bool:
        tree = ast.parse(path.read_text())
        return bool(launched(tree) or tables(ast.get_docstring(tree, clean=False) or ""))

    above = [x for x in in_cuda_ops() if not {"common", "runtime", "hopper"} & {*x.parts}]
    return [path for path in above if asked(path)]


@pytest.mark.parametrize("path", _launchers(), ids=_named)
def test_a_launcher_says_which_kernel_when(path):
    """The table condition -> kernels, of calls that have something to do (CONTRIBUTING.md)."""
    assert faults(path.read_text(), path.parent) == []


LAUNCHER = '''"""An op.

    condition          kernels
    Hopper, rows in    hopper/topk.py
      whole 64
    few rows           _first then
                       _second
    else               _second, topk.py
"""
from .hopper import topk as hopper

@triton.jit
def _helper(x): ...

@triton.jit
def _first(x): _helper(x)

@triton.jit(do_not_specialize=["x"])
def _second(x): ...

def forward(x):
    launches.kernel(_first if x else _second, 1)(x)
'''


@pytest.mark.parametrize(
    "right, wrong, said",
    [
        ("An op", "The op", []),
        ("kernels\n", "\n", ["no table"]),
        ("    else ", "    rest ", ["the last condition is none"]),
        ("_first then\n", "_frist then\n", ["_first is left out", "_frist does not exist"]),
        ("_first then\n", "_second\n", ["_first is left out"]),
        ("_second, topk.py", "_second, topk", ["topk does not exist"]),
        ("_second, topk.py", "_second in parts", ["_second in parts does not exist"]),
        ("import topk as", "import topk, rows as", ["hopper/rows.py is left out"]),
        ("hopper/topk.py", "topk.py", ["hopper/topk.py is left out"]),
    ],
)
def test_a_wrong_table_is_found(right, wrong, said):
    assert LAUNCHER.count(right) == 1
    assert sorted(faults(LAUNCHER.replace(right, wrong), ROOT / "cuda_ops" / "indexer")) == said


def test_kernels_stand_in_their_column():
    with pytest.raises(AssertionError, match=r"column:     few rows +_first then"):
        faults(LAUNCHER.replace("few rows  ", "few rows "), ROOT / "cuda_ops" / "indexer")


def test_no_test_imports_a_test():
    """What tests share is in tests/support/."""
    for path in (ROOT / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
                assert not any(name.startswith("test_") for name in names), path


def test_source_files_carry_their_licence():
    for path in [*sources(), *(ROOT / "tests").rglob("*.py"), *(ROOT / "examples").glob("*.py")]:
        assert path.read_text().startswith("# SPDX-License-Identifier: Apache-2.0\n"), path


def test_barriers_are_forgotten():
    """Else their memory is others' while a multiprocessor still holds them."""
    gone = re.compile(r"    forget\((\w+)\)\n")
    for file in sorted((ROOT / "cuda_ops").rglob("hopper/*.py")):
        for kernel in re.split(r"^@gluon\.jit", file.read_text(), flags=re.M):
            made = re.findall(r"(\w+) = (?:gl\.allocate_shared_memory\(gl\.int64|ring\()", kernel)
            if made and "warp_specialize(" not in kernel and "return " not in kernel:
                assert sorted(gone.findall(kernel)) == sorted(made), (file.name, made)


def test_no_kernel_has_more_than_thirty_parameters():
    assert not [each.where for each in functions() if each.jitted and each.parameters > 30]
