# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Plots of docs/figures/*.csv as ratios: a peer's time over ours, and a line at 1.

python -m docs.plots (`make figures`)    writes the plots, the pictures of docs/pictures.py,
                                         and with matplotlib those of docs/cards.py

A row shows its fastest public peer, and every other one that is faster than ours.
tests/tools/test_documents.py holds each plot against its CSV.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from custom.bench.report import Row, read_public, read_rows

from . import cards
from .pictures import PICTURES
from .svg import Picture

FIGURES = Path(__file__).parent / "figures"
OURS = {"reference", "bf16"}  # peers of a CSV that are no public kernel of the same thing
# a CSV's short names of peers
NAMES = {
    "fla": "fla-core",
    "cudnn": "cuDNN",
    "flash": "FlashAttention-2",
    "flash_attn_3": "FA3",
    "flash_attn_4": "FlashAttention-4",
    "flash_mla": "FlashMLA fp8",
    "flash_mla_sparse": "FlashMLA bf16",
    "deep_gemm + topk": "DeepGEMM + topk",
}
# rows of the README's figure: DeepSeek-V3.2's own shapes, and dense attention beside FA3
_SPARSE, _KEYS = "npu_sparse_flash_attention", "64K keys, top 2048"
_DENSE = "B4 H16 D128, 4096 x 4096, causal"
HERO = {
    "attention, 1 token": (_SPARSE, f"128 heads, 1 x 1 queries, {_KEYS}"),
    "attention, 32 tokens": (_SPARSE, f"128 heads, 32 x 1 queries, {_KEYS}"),
    "attention, 128 tokens": (_SPARSE, f"128 heads, 128 x 1 queries, {_KEYS}"),
    "attention, prefill of 4096": (_SPARSE, f"128 heads, prefill of 4096 queries, {_KEYS}"),
    "fp8 attention, 128 tokens": (
        "npu_kv_quant_sparse_flash_attention",
        f"fp8, 128 heads, 128 x 1 queries, {_KEYS}",
    ),
    "fp8 indexer, 128 tokens": (
        "npu_quant_lightning_indexer_scores",
        f"fp8, 128 x 1 queries, {_KEYS}",
    ),
    "MLA prolog, 128 tokens": ("npu_mla_prolog_pto", "128 heads, 128 tokens"),
    "whole layer, 128 tokens": ("npu_sparse_attention_pto", "128 heads, 128 x 1 queries, 64K keys"),
    "dense attention, forward": ("npu_fused_attention", _DENSE),
    "dense attention, backward": ("npu_fused_attention_backward", _DENSE),
}


@dataclass(frozen=True)
class Bar:
    case: str
    ours: float
    peer: str
    theirs: float

    @property
    def ratio(self) -> float:
        return self.theirs / self.ours


def measured() -> dict[str, list[Row]]:
    """The rows of every op that has figures, by its name."""
    return {path.stem: read_rows(path) for path in sorted(FIGURES.glob("npu_*.csv"))}


def peers(row: Row, known: dict[tuple[str, str], tuple[str, float]]) -> dict[str, float]:
    """Public kernels of the row, the fastest first."""
    found = {NAMES.get(name, name): us for name, us in row.peers.items() if name not in OURS}
    if best := known.get((row.op, row.case)):
        name, us = best
        found[name] = min(us, found.get(name, us))
    return dict(sorted(found.items(), key=lambda item: item[1]))


def bars(rows: Iterable[Row]) -> Iterator[Bar]:
    known = read_public()
    for row in rows:
        for place, (name, us) in enumerate(peers(row, known).items()):
            if place == 0 or us < row.median_us:
                yield Bar(row.case, row.median_us, name, us)


def ratios(
    title: str, drawn: list[Bar], note: str = "", whose: str = "a public kernel's"
) -> Picture:
    """Horizontal bars of peer / ours; longer ones than the axis end in their number."""
    wide = 16 + 6.9 * max(len(bar.case) for bar in drawn)
    left, right, line = wide + 10, 600, 23
    top = 66
    bottom = top + line * len(drawn)
    height = bottom + (44 if note else 24)
    p = Picture(700, height, title)
    most = max(2.0, min(4.0, max(bar.ratio for bar in drawn)))
    scale = (right - left) / most
    p.text(16, 27, title, size=14, bold=True, anchor="start")
    p.text(
        16,
        48,
        f"{whose} time over ours: right of the line ours is faster",
        size=12,
        anchor="start",
        kind="soft",
    )
    for tick in range(1, int(most) + 1):
        x = left + tick * scale
        p.rule(x, top - 8, x, bottom, dashed=tick > 1)
        p.text(x, bottom + 15, f"{tick}x", size=11, kind="soft")
    case = None
    for i, bar in enumerate(drawn):
        y = top + line * i
        if bar.case != case:
            p.text(wide, y + 14, bar.case, size=12, anchor="end")
        case = bar.case
        length = min(bar.ratio, most) * scale
        p.box(left, y + 2, length, line - 6, "good" if bar.ratio >= 1 else "bad")
        if bar.ratio > most:  # broken: longer than it is drawn
            for x in (0, 7):
                p.box(left + 0.4 * scale + x, y + 2, 3, line - 6, "paper")
        number = f"{bar.ratio:.2f}x {bar.peer}"
        end, long = left + max(length, scale), 6.4 * len(number)
        if end + long > 690:
            p.text(end - 5, y + 15, number, size=11, anchor="end", kind="paper", bold=True)
        else:
            p.box(end + 3, y + 2, long, line - 6, "paper")
            p.text(end + 5, y + 15, number, size=11, anchor="start")
    p.rule(left + scale, top - 8, left + scale, bottom)
    if note:
        p.text(16, height - 10, note, size=11, anchor="start", kind="soft")
    return p


def hero() -> Picture:
    found = {(row.op, row.case): row for rows in measured().values() for row in rows}
    drawn = [
        Bar(label, bar.ours, bar.peer, bar.theirs)
        for label, (op, case) in HERO.items()
        for bar in bars([found[op, case]])
    ]
    return ratios(
        "DeepSeek-V3.2's shapes on one H200",
        drawn,
        "128 heads, 64K keys, top 2048, bf16 where not said; the fastest public kernel measured "
        "for each row",
    )


def of_csv(path: Path) -> Picture | None:
    """None: no row of it has a public peer."""
    rows = read_rows(path)
    drawn = [*bars(rows)]
    if not drawn:
        return None
    without = len({row.case for row in rows} - {bar.case for bar in drawn})
    note = f"{without} of {len(rows)} rows have no public peer: docs/speed.md" if without else ""
    name = rows[0].op + (" over the length" if path.stem.startswith("over_length") else "")
    return ratios(f"{name}, one H200", drawn, note)


def models() -> Picture:
    """A decode step of a whole model beside Transformers' own, which runs in a CUDA graph too."""
    with (FIGURES / "models.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["decode_captured"]]
    drawn = [
        Bar(
            f"{row['model'].partition(' (')[0]}, {row['b']} request" + "s" * (row["b"] != "1"),
            1 / float(row["decode"]),
            "in a graph",
            1 / float(row["decode_captured"]),
        )
        for row in rows
    ]
    title = f"A decode step of eight layers, 32K tokens, one {rows[0]['device']}"
    return ratios(title, drawn, whose="Transformers'")


def plots() -> dict[str, str]:
    """Name -> SVG, of everything that docs/figures/*.csv and docs/pictures.py say."""
    found = {"deepseek_v32": hero(), "models": models()}
    for path in sorted([*FIGURES.glob("npu_*.csv"), *FIGURES.glob("over_length_*.csv")]):
        if picture := of_csv(path):
            found[path.stem] = picture
    found |= {name: draw() for name, draw in PICTURES.items()}
    return {name: picture.svg() for name, picture in found.items()}


def summary() -> str:
    """Of every op: how many rows have a public peer, how many are behind it, and by how much."""
    head = ["op", "rows", "with a peer", "slower", "least", "most"]
    lines = [head, ["---"] * len(head)]
    for name, rows in measured().items():
        best = {}
        for bar in bars(rows):
            best.setdefault(bar.case, bar.ratio)
        ratios = sorted(best.values())
        behind = sum(ratio < 1 for ratio in ratios)
        ends = [f"{ratios[0]:.2f}x", f"{ratios[-1]:.2f}x"] if ratios else ["-", "-"]
        lines.append([f"`{name}`", str(len(rows)), str(len(ratios)), str(behind), *ends])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


BLOCKS = {"summary": summary}


if __name__ == "__main__":
    cards.draw()
    for name, text in plots().items():
        (FIGURES / f"{name}.svg").write_text(text)
