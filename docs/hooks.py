# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Generated pages: one for each public name and for each op without a function, the list of them,
one for each public module, and the variables."""

from __future__ import annotations

import importlib
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from custom.dispatch import backends  # noqa: E402
from custom.dispatch.env import VARIABLES  # noqa: E402
from custom.dispatch.registry import SPECS, Spec  # noqa: E402
from custom.dispatch.versions import NAMES, TABLE  # noqa: E402

import custom  # noqa: E402
from docs import op_table  # noqa: E402

# modules with a page of their own, and what of them is public
MODULES = {
    "custom.parallel": "Several cards: every function of `custom.parallel`.",
    "custom.graph_mode": "Graphs by hand: every name of `custom.graph_mode`.",
    "custom.integrations.transformers": "Hugging Face models on these ops.",
    "custom.integrations.kernels": "fla's and causal-conv1d's names, for the package `kernels`.",
    "custom.integrations.paged": "A small set of paged caches, for examples and tests.",
    "custom.integrations.deepseek_v4": "DeepSeek-V4's caches and weights.",
    "custom.integrations.drafts": "Verifying drafts with models that keep states.",
}

# ops without a function of that name, and the one that calls them where no cache is given
DENSE = {"npu_compressor_dense": "npu_compressor"}
_WIDE = "---\nhide: [navigation]\n---\n"
# pages by the paths that they had, for links from elsewhere
_MOVED = {"quantised.md": "quantized", "design/quantised_prologs.md": "quantized_prologs"}


def names() -> list[str]:
    """Public functions and classes of `custom`."""
    return [name for name in custom.__all__ if callable(getattr(custom, name))]


def same_as(name: str) -> str | None:
    """The public name that `name` is another name of."""
    own = getattr(custom, name)
    if own.__name__ == name:
        return None
    return next(n for n in names() if n != name and getattr(custom, n) is own)


def spec_of(name: str) -> Spec | None:
    return next((spec for spec in SPECS if op_table.public(spec) == name), None)


def function_of(spec: Spec) -> str:
    return op_table.public(spec) or DENSE[spec.name]


def without_function() -> Iterator[tuple[Spec, Spec]]:
    """Ops without a public function, and the op whose backward calls each; itself where it is in
    DENSE."""
    of = {spec.name: spec for spec in SPECS}
    for spec in SPECS:
        if op_table.public(spec) is None:
            yield spec, of[re.sub("_(grad|backward)$", "", spec.name)]


def sentence(there: Any) -> str:
    """The first paragraph of a docstring, as one line."""
    return " ".join((there.__doc__ or "").strip().split("\n\n")[0].split())


def _schema(spec: Spec) -> list[str]:
    schema = spec.schema.replace(", ", ",\n    ").replace("(", "(\n    ", 1)
    kernels = [b.name for b in backends.BACKENDS if op_table.has_kernel(b, spec)]
    return [
        "## Schema",
        "",
        f"`torch.ops.custom.{spec.name}`" + (", differentiable" if spec.differentiable else ""),
        "",
        f"```\n{schema}\n```",
        "",
        "## Backends",
        "",
        f"Code: {', '.join(f'`{name}`' for name in kernels)}. "
        "How far each was verified: see [the table](../verified.md).",
        "",
        f"GE operator: {f'`{spec.ge}`' if spec.ge else 'none'}. "
        f"ONNX node: {f'`ai.custom.npu::{spec.onnx}`' if spec.onnx else 'none'}.",
    ]


def _page(name: str) -> str:
    spec = spec_of(name)
    if other := same_as(name):
        lines = [f"# {name}", "", f"Another name of [{other}]({other}.md).", ""]
    else:
        shown = f"::: {getattr(custom, name).__module__}.{name}"
        lines = ["---", f"title: {name}", "---", shown, "    options: {heading_level: 1}", ""]
    return "\n".join([*lines, *(_schema(spec) if spec else [])]) + "\n"


def _behind(spec: Spec, base: Spec) -> str:
    public = function_of(base)
    said = f"The gradient of [{public}]({public}.md). Autograd calls it; no function of ours does."
    if base is spec:
        said = f"[{public}]({public}.md) calls it where no cache is given."
    return "\n".join([f"# {spec.name}", "", said, "", *_schema(spec)]) + "\n"


def _module(name: str) -> str:
    """The public names of a module: `__all__`, or what has no underscore."""
    there = importlib.import_module(name)
    lines = [f"# {name}", "", sentence(there), ""]
    for member in members(there):
        home = getattr(there, member).__module__
        elsewhere = home != name and home in MODULES
        lines += [f"`{member}`: [{home}]({home}.md)." if elsewhere else f"::: {home}.{member}", ""]
    return "\n".join(lines) + "\n"


def members(there: ModuleType) -> list[str]:
    own = [n for n, x in vars(there).items() if getattr(x, "__module__", "") == there.__name__]
    return [n for n in getattr(there, "__all__", own) if not n.startswith("_")]


def _moved(to: str) -> str:
    refresh = f'<meta http-equiv="refresh" content="0; url=../{to}/">'
    return f"# Moved\n\n{refresh}\n\nTo [{to}]({to}.md).\n"


def _list() -> str:
    ops, others = [], []
    for name in names():
        said = f"Another name of `{other}`." if (other := same_as(name)) else None
        row = f"| [{name}](ops/{name}.md) | {said or sentence(getattr(custom, name))} |"
        (ops if spec_of(name) else others).append(row)
    others.append(
        "| [config](install.md#environment-variables) | The settings, and the variables. |"
    )
    behind = []
    for spec, base in without_function():
        name = function_of(base)
        said = f"`{name}` without caches." if base is spec else f"Gradient of `{name}`."
        behind.append(f"| [{spec.name}](ops/{spec.name}.md) | {said} |")
    modules = [f"| [{name}](api/{name}.md) | {said} |" for name, said in MODULES.items()]
    parts = {"Ops": ops, "Helpers": others, "Behind functions": behind, "Modules": modules}
    lines = ["# API", "", "[Which op for what](which_op.md) helps to choose.", ""]
    for title, rows in parts.items():
        lines += [f"## {title}", "", "| name | what the caller gets |", "|---|---|", *rows, ""]
    return "\n".join(lines) + "\n"


def _start(name: str) -> str:
    """A README, with links that work from the site; files outside it are named, not linked. It has
    the room of the list of pages, which it is alone in."""
    text = (ROOT / name).read_text().replace("](docs/", "](").replace("](README.md)", "](index.md)")
    inside = r"https?:|#|index\.md|README\.zh\.md|figures/|(?:porting/|design/)?[a-z_0-9]+\.md\b"
    return _WIDE + re.sub(rf"\[([^\]]+)\]\((?!{inside})[^)]*\)", r"\1", text)


def variables() -> str:
    rows = [f"| `{v.name}` | `{v.default}` | {v.sentence} |" for v in VARIABLES]
    return "| variable | default | what it does |\n|---|---|---|\n" + "\n".join(rows) + "\n"


def versions() -> str:
    rows = ["| " + " | ".join(getattr(row, name) for name in NAMES) + " |" for row in TABLE]
    head = "| " + " | ".join(NAMES.values()) + " |\n|" + "---|" * len(NAMES)
    return head + "\n" + "\n".join(rows) + "\n"


@event_priority(100)  # before mkdocstrings reads its paths
def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """The packages as they are installed, everything below `custom`: that is where names lie."""
    package = Path(tempfile.mkdtemp()) / "custom"
    package.mkdir()
    for path in (*(ROOT / "custom").iterdir(), ROOT / "dispatch", ROOT / "graph_mode"):
        (package / path.name).symlink_to(path)
    config.plugins["mkdocstrings"].config.handlers["python"]["paths"] = [str(package.parent)]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    made = {f"ops/{name}.md": _page(name) for name in names()}
    made |= {f"ops/{spec.name}.md": _behind(spec, base) for spec, base in without_function()}
    made |= {f"api/{name}.md": _module(name) for name in MODULES}
    made |= {"ops.md": _list(), "index.md": _start("README.md")}
    made |= {"README.zh.md": _start("README.zh.md")}
    made |= {path: _moved(to) for path, to in _MOVED.items()}
    for path, content in made.items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    made = {"variables": variables, "versions": versions}
    for name, make in made.items():
        markdown = markdown.replace(f"{{{{ {name} }}}}", make())
    # the site's first page, by _start; what lies outside of it is named
    markdown = markdown.replace("../README.md", "index.md")
    return re.sub(r"\[([^\]]+)\]\(\.\./tests/[^)]*\)", r"\1", markdown)


def on_page_content(html: str, **_: object) -> str:
    """A name in a table may break behind an underscore, where site.css lets it."""
    in_cells = re.compile(r"(?<=<code>)[^<]+(?=</code>)")
    rows = re.compile(r"<td.*?</td>", re.S)
    return rows.sub(lambda cell: in_cells.sub(lambda x: x[0].replace("_", "_<wbr>"), cell[0]), html)
