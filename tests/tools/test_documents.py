# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Documents: links lead somewhere, no page tells how it came to be, a design is short and found."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
from html import unescape
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from custom.dispatch.backends import CUDA, launcher
from custom.dispatch.registry import SPECS, Spec

import custom
from custom.bench.report import Row
from docs import op_table, pictures, plots
from docs.svg import Picture

from ..support.samples import SAMPLES, Maker

ROOT = Path(__file__).parents[2]
STATED = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
PAGES = sorted([*STATED, *(ROOT / "tests").rglob("*.md")])
DESIGN = sorted((ROOT / "docs" / "design").glob("*.md"))
_FENCED = re.compile(r"^```.*?^```", re.M | re.S)
_LINK = re.compile(r"\]\(([^()\s]+)\)")
_HEADING = re.compile(r"^#+ +(.+?) *$", re.M)
# words of how it came to be: a document says what is, CHANGELOG.md what was
JOURNEY = re.compile(
    r"\b(now|no longer|used to be|formerly|previously|since then|until now|as before|not run since"
    r"|mended|so far|midday|jobs?|another run)\b|\| *(before|after|now)(:[^|]*)? *\|",
    re.I,
)
# words that nobody else uses, or uses for another thing: (here, the field's)
OUR_WORDS = {
    "by turns": "alternating",
    "handed along": "passed",
    "handed on": "passed",
    "likeness": "cache key",
    "fades": "decays",
    "joined": "fused, merged",
    "eight bits": "quantized",
    "processors": "SMs",
    "takes items": "takes work tiles",
    "items in turn": "persistent",
}
_OURS = re.compile(rf"\b({'|'.join(OUR_WORDS)})\b", re.I)
MODULES = [
    path
    for folder in ("custom", "dispatch", "cuda_ops", "npu_ops", "graph_mode", "docs")
    for path in sorted((ROOT / folder).rglob("*.py"))
]


def of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def anchors(text: str) -> set[str]:
    """As GitHub and Python-Markdown make them of headings."""
    words = (re.sub(r"[^\w\- ]", "", each).strip().lower() for each in _HEADING.findall(text))
    return {each.replace(" ", "-") for each in words}


@pytest.mark.parametrize("page", PAGES, ids=of)
def test_links_lead_somewhere(page):
    text = _FENCED.sub("", page.read_text())
    for link in _LINK.findall(text):
        if "://" in link or link.startswith("mailto:"):
            continue
        name, _, anchor = link.partition("#")
        wanted = of((page.parent / name).resolve()) if name else of(page)
        target = ROOT / wanted
        assert target.exists(), f"{of(page)}: {link} leads nowhere"
        if anchor:
            there = anchors(_FENCED.sub("", target.read_text()))
            assert anchor in there, f"{of(page)}: {link} names none of {sorted(there)}"


@pytest.mark.parametrize("page", [each for each in STATED if each.name != "CHANGELOG.md"], ids=of)
def test_a_document_states_conclusions(page):
    for at, line in enumerate(page.read_text().splitlines(), 1):
        told = JOURNEY.search(line)
        assert not told, f"{of(page)}:{at}: {told[0]!r} tells of a journey, say what is"


def ours(text: str) -> list[str]:
    return [
        f"{each}: say {OUR_WORDS[each.lower()]}" for each in _OURS.findall(" ".join(text.split()))
    ]


@pytest.mark.parametrize("page", [each for each in STATED if each.name != "CHANGELOG.md"], ids=of)
def test_a_document_has_the_field_s_words(page):
    assert not ours(page.read_text())


def test_a_module_is_described_in_the_field_s_words():
    described = {of(path): ast.get_docstring(ast.parse(path.read_text())) for path in MODULES}
    found = {name: ours(text or "") for name, text in described.items()}
    assert not {name: words for name, words in found.items() if words}
    assert ours("Handed\nalong.") == ["Handed along: say passed"]


def test_an_anchor_is_its_heading():
    assert anchors("# A fault of ptxas 12.8\n\n## `npu_x`: what, where?\n") == {
        "a-fault-of-ptxas-128",
        "npu_x-what-where",
    }


@pytest.mark.parametrize("page", DESIGN, ids=of)
def test_a_design_is_a_page_that_can_be_found(page):
    """At most 60 lines, as CONTRIBUTING.md asks, and linked from docs/speed.md."""
    assert len(page.read_text().splitlines()) <= 60
    assert f"(design/{page.name})" in (ROOT / "docs" / "speed.md").read_text()


READMES = ("README.md", "README.zh.md")
DRAWN = plots.plots()


def prose(text: str) -> list[str]:
    """Words outside of code, pictures and the marks of tables and links."""
    text = re.sub(r"<!--.*?-->|!\[[^\]]*\]\([^)]*\)|\]\([^)]*\)", " ", _FENCED.sub("", text))
    return [word for word in re.split(r"[\s|\[\]#*]+", text) if re.search(r"\w", word)]


def test_the_readme_is_read_in_minutes():
    assert len(prose((ROOT / "README.md").read_text())) <= 900


@pytest.mark.parametrize("name", READMES)
def test_names_of_the_readme_s_table_can_be_called(name):
    table = re.search(r"<!-- ops.*?begin -->(.*?)<!-- ops", (ROOT / name).read_text(), re.S)[1]
    named = {
        each for line in table.splitlines()[2:] if line for each in re.findall(r"`(\w+)`", line)
    }
    assert named and all(callable(getattr(custom, each)) for each in named)
    assert named >= {public for spec in SPECS if (public := op_table.public(spec))}


def test_an_op_without_a_purpose_has_a_row_of_its_own(monkeypatch):
    monkeypatch.setattr(op_table, "PURPOSES", op_table.PURPOSES[1:])
    assert "| `npu_sparse_attention_pto` | - | CPU, CUDA, NPU |" in op_table.english()


def test_a_purpose_names_ops_and_no_other_does():
    public = {op_table.public(spec) for spec in SPECS}
    named = [name for purpose in op_table.PURPOSES for name in purpose.names]
    assert {*named} <= public and len(named) == len({*named})


def test_the_chinese_readme_is_in_step():
    english, chinese = ((ROOT / name).read_text() for name in READMES)

    def links(text):
        return sorted(
            {each for each in _LINK.findall(text) if "README" not in each and "#" not in each}
        )

    assert links(english) == links(chinese)
    assert english.count("\n## ") == chinese.count("\n## ")
    code = [re.sub(r"#.*", "", each) for each in _FENCED.findall(english)]
    assert code == [re.sub(r"#.*", "", each) for each in _FENCED.findall(chinese)]


def test_the_first_snippet_of_the_readme_runs_on_this_device(device):
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)[1]
    assert 'device="cpu"' in code and "dtype=torch.bfloat16" in code
    names: dict[str, object] = {}
    exec(code.replace('device="cpu"', f'device="{device.type}"'), names)
    assert names["q"].grad.isfinite().all()


@pytest.mark.parametrize("name", DRAWN)
def test_a_figure_is_of_its_csv(name):
    path = ROOT / "docs" / "figures" / f"{name}.svg"
    assert path.exists() and path.read_text() == DRAWN[name], "run make figures"


def test_no_figure_is_of_nothing():
    drawn = {path.stem for path in (ROOT / "docs" / "figures").glob("*.svg")}
    assert drawn == {*DRAWN}


def test_a_figure_fits_a_column():
    """700 pixels wide, and no text leaves it: letters of the widest common fonts."""
    for name, text in DRAWN.items():
        assert 'width="700"' in text, name
        for x, size, anchor, words in re.findall(
            r'<text x="([\d.]+)" y="[\d.]+" font-size="(\d+)" text-anchor="(\w+)"[^>]*>([^<]*)',
            text,
        ):
            assert int(size) >= 11, (name, words)
            long = 0.56 * int(size) * len(unescape(words))
            left = float(x) - {"start": 0, "middle": 0.5, "end": 1}[anchor] * long
            assert left >= 0 and left + long <= 704, (name, words, left, left + long)


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_words_fit_their_boxes(name, monkeypatch):
    """Letters of a wide font: 13 pixels and bold, 12 below, and in names all as wide."""
    seen = []

    def labelled(self, x, y, w, h, kind, *lines, code=-1):
        wide = [7.8 if i == 0 else 7.3 if i == code else 6.5 for i in range(len(lines))]
        seen.extend((each * len(line), w, line) for each, line in zip(wide, lines, strict=True))

    monkeypatch.setattr(Picture, "labelled", labelled)
    pictures.PICTURES[name]()
    assert not [each for each in seen if each[0] > each[1]]


def test_a_plot_shows_losses():
    peers = "slow=30; fast=5; faster=4; reference=1"
    row = Row(
        op="npu_x",
        case="a",
        backend="cuda",
        error=0,
        median_us=10,
        p20_us=9,
        p80_us=11,
        floor_us=1,
        of_floor=0.1,
        tflops=1,
        gb_per_s=1,
        peers_us=peers,
    )
    drawn = [*plots.bars([row])]
    assert [(bar.peer, bar.ratio) for bar in drawn] == [("faster", 0.4), ("fast", 0.5)]
    text = plots.ratios("title", drawn).svg()
    assert text.count('class="bad"') == 2 and "0.40x faster" in text


def test_every_csv_has_its_plot_on_the_speed_page():
    page = (ROOT / "docs" / "speed.md").read_text()
    of_ops = {name for name in DRAWN if name in plots.measured()}
    assert of_ops and all(f"figures/{name}.svg" in page for name in of_ops)


@pytest.mark.parametrize(
    ("page", "code"),
    [
        (page, code)
        for page in ("layouts.md", "which_op.md", "troubleshooting.md")
        for code in re.findall(r"`(npu_\w+|custom\.\w+)`", (ROOT / "docs" / page).read_text())
    ],
)
def test_a_page_for_newcomers_names_what_exists(page, code):
    assert hasattr(custom, code.removeprefix("custom.")), (page, code)


@pytest.fixture
def site(monkeypatch):
    """docs/hooks.py and docs/docstrings.py, whose packages only `make docs` installs."""
    classes = ("MkDocsConfig", "File", "Files", "Extension", "Object", "Function")
    stands_in = dict.fromkeys(classes, object)
    stands_in["event_priority"] = lambda _: lambda function: function
    for name in (
        "mkdocs",
        "mkdocs.config",
        "mkdocs.config.defaults",
        "mkdocs.plugins",
        "mkdocs.structure",
        "mkdocs.structure.files",
        "griffe",
    ):
        module = ModuleType(name)
        vars(module).update(stands_in)
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("docs.hooks", "docs.docstrings"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    hooks = importlib.import_module("docs.hooks")
    yield hooks, importlib.import_module("docs.docstrings")
    for name in ("docs.hooks", "docs.docstrings"):
        del sys.modules[name]


def test_every_public_name_has_a_page(site):
    hooks, _ = site
    listed = hooks._list()
    for name in hooks.names():
        assert f"(ops/{name}.md)" in listed
        page = hooks._page(name)
        assert ("\n::: custom" in page) != ("Another name of [" in page)
    assert hooks.same_as("merge_states") == "npu_merge_states"
    assert hooks.same_as("npu_merge_states") is None
    for spec in SPECS:
        assert f"(ops/{op_table.public(spec) or spec.name}.md)" in listed
    rows = [line for line in listed.splitlines() if line.startswith("| [")]
    assert all(re.search(r"[.:`] \|$", row) for row in rows), "a sentence that is cut"


def test_ops_without_a_function_are_called_by_what_their_page_names(site):
    hooks, _ = site
    found = [*hooks.without_function()]
    assert [spec for spec, _ in found] == [s for s in SPECS if op_table.public(s) is None]
    assert {spec.name for spec, base in found if spec is base} == {*hooks.DENSE}
    for spec, base in found:
        caller = hooks.function_of(base)
        calls = getattr(custom, caller) if spec is base else inspect.getmodule(base.backward)
        call = rf'(custom\.|_ops\.|gradients\.backward\(\s*"){spec.name}\b'
        assert re.search(call, inspect.getsource(calls))
        assert f"]({caller}.md)" in hooks._behind(spec, base)


def test_pages_of_modules_have_all_their_names(site):
    hooks, _ = site
    parallel = importlib.import_module("custom.parallel")
    page = hooks._module("custom.parallel")
    assert all(f".{name}\n" in page for name in parallel.__all__)
    assert hooks.members(importlib.import_module("custom.integrations.kernels"))[:1]
    pages = {name: hooks._module(name) for name in hooks.MODULES}
    assert all(f"(api/{name}.md)" in hooks._list() for name in pages)
    described = re.findall(r"^::: (.*)$", "".join(pages.values()), re.M)
    assert len(described) == len({*described}), "two pages of one name"


def test_the_first_page_of_the_site_is_the_readme_with_its_pictures(site):
    hooks, _ = site
    start = hooks._start("README.md")
    assert "](figures/dsa_layer.svg)" in start and "](porting/index.md)" in start
    assert "](examples/" not in start and "](docs/" not in start


def test_an_example_of_a_docstring_becomes_code(site):
    _, docstrings = site
    assert docstrings.fenced("A.\n\n>>> f(1)\n2") == "A.\n\n```python\n>>> f(1)\n2\n```"


def test_a_page_has_what_a_decorator_completes(site):
    _, docstrings = site

    class Function(SimpleNamespace):
        pass

    docstrings.griffe.Function = Function
    text = "Base.\n\nArgs:\n    x: a number.\n\nReturns:\n    It.\n\nRaises:\n    E: never."
    x = SimpleNamespace(name="x")
    base = Function(parameters=[x], docstring=SimpleNamespace(value=text), decorators=[])
    for decorator, own in (("variant_of", "args"), ("described_by", "x")):
        made = Function(
            parameters=[SimpleNamespace(name=own)],
            docstring=SimpleNamespace(value="Own.\n\nReturns:\n    Two.\n\n>>> f(1)\n2"),
            decorators=[SimpleNamespace(value="op"), SimpleNamespace(value=f"{decorator}(base)")],
            parent={"base": base},
        )
        docstrings.Fenced().on_object(obj=made)
        assert made.parameters == [x]
        assert made.docstring.value == (
            text.replace("Base.", "Own.").replace("It.", "Two.") + "\n\n```python\n>>> f(1)\n2\n```"
        )


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@pytest.mark.parametrize(
    ("purpose", "spec"),
    [(p, spec) for p in op_table.PURPOSES for spec in SPECS if op_table.public(spec) in p.names],
    ids=lambda each: each.name if isinstance(each, Spec) else "",
)
def test_dtypes_of_the_readme_s_table_are_taken_on_cuda(purpose, spec):
    """What the table says is not refused; on a GPU fp32 is refused by more ops than here."""
    pytest.importorskip("triton", reason="the launchers import it")
    named = {each for each in DTYPES if each in purpose.dtypes} or {"bf16", "fp16"}
    for each in named:
        given = SAMPLES[spec.name](Maker(torch.device("cpu"), DTYPES[each]))
        schema = getattr(torch.ops.custom, spec.name).default._schema
        full = {x.name: given.get(x.name, x.default_value) for x in schema.arguments}
        assert launcher(CUDA, spec).unsupported(**full) is None, each
