# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Generated pages: one an op (from its spec and docstring), the list of ops, the variables."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from custom.dispatch import backends  # noqa: E402
from custom.dispatch.env import VARIABLES  # noqa: E402
from custom.dispatch.specs import SPECS, Spec  # noqa: E402
from custom.dispatch.versions import NAMES, TABLE  # noqa: E402

import custom  # noqa: E402
from docs.tables import verified  # noqa: E402

# public functions whose op bears another name
WRAPPERS = {"compute_index_loss_sparse": "npu_indexer_loss"}


def _public(spec: Spec) -> str | None:
    if hasattr(custom, spec.name):
        return spec.name
    return next((ours for ours, op in WRAPPERS.items() if op == spec.name), None)


def _module(function: str) -> str:
    return getattr(custom, function).__module__


def _page(spec: Spec) -> str:
    function = _public(spec)
    schema = spec.schema.replace(", ", ",\n    ").replace("(", "(\n    ", 1)
    kernels = [b.name for b in backends.BACKENDS if backends.has_kernel(b, spec)]
    lines = [f"# {function or spec.name}", ""]
    if function:
        lines += [f"::: {_module(function)}.{function}", ""]
    lines += [
        "## Schema",
        "",
        f"`torch.ops.custom.{spec.name}`" + (", differentiable" if spec.differentiable else ""),
        "",
        f"```\n{schema}\n```",
        "",
        "## Backends",
        "",
        f"Code: {', '.join(f'`{name}`' for name in kernels)}. "
        "How far each was verified: see [the table](../index.md#what-runs-where).",
        "",
        f"GE operator: {f'`{spec.ge}`' if spec.ge else 'none'}. "
        f"ONNX node: {f'`ai.custom.npu::{spec.onnx}`' if spec.onnx else 'none'}.",
    ]
    return "\n".join(lines) + "\n"


def _list() -> str:
    rows = []
    for spec in SPECS:
        name = _public(spec) or spec.name
        doc = (getattr(custom, name, None) or spec).__doc__ or ""
        first = (
            doc.splitlines()[0] if hasattr(custom, name) else "Backward op, reached by autograd."
        )
        rows.append(f"| [{name}](ops/{spec.name}.md) | {first} |")
    return "# Ops\n\n| op | what the caller gets |\n|---|---|\n" + "\n".join(rows) + "\n"


def _start() -> str:
    """The README, with links that work from the site; files outside it are named, not linked."""
    text = (ROOT / "README.md").read_text().replace("](docs/", "](")
    outside = r"\[([^\]]+)\]\((?!https?:|#|[a-z_]+\.md\b)[^)]*\)|\[中文\]\([^)]*\)"
    return re.sub(outside, r"\1", text)


def variables() -> str:
    rows = [f"| `{v.name}` | `{v.default}` | {v.sentence} |" for v in VARIABLES]
    return "| variable | default | what it does |\n|---|---|---|\n" + "\n".join(rows) + "\n"


def versions() -> str:
    rows = ["| " + " | ".join(getattr(row, name) for name in NAMES) + " |" for row in TABLE]
    head = "| " + " | ".join(NAMES.values()) + " |\n|" + "---|" * len(NAMES)
    return head + "\n" + "\n".join(rows) + "\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for spec in SPECS:
        files.append(File.generated(config, f"ops/{spec.name}.md", content=_page(spec)))
    files.append(File.generated(config, "ops.md", content=_list()))
    files.append(File.generated(config, "index.md", content=_start()))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    made = {"verified": verified, "variables": variables, "versions": versions}
    for name, make in made.items():
        markdown = markdown.replace(f"{{{{ {name} }}}}", make())
    return markdown.replace("../README.md", "index.md")  # the site's first page, by _start
