# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Documents: links lead somewhere, no page tells how it came to be, a design is short and found."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
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
