# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What docs/parallel.md says of several cards: measured, and on paper for other numbers of cards.

torchrun --nproc-per-node 2 -m custom.bench.parallel --csv docs/figures/parallel.csv
python -m docs.tables; make figures

On paper: a step's time on one card and the share of it that m cards took off give the part that is
dealt out, the rest is done by every card. A collective costs its latency, which grows with the
logarithm of the cards, and its bytes over a rate; both are fitted to it alone with little and with
much to send. Queries travel while positions are selected, which takes what of a step grows with the
context, and less on more cards where keys are dealt out. Merges cost what they did, those of
candidates in proportion to the cards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log2
from pathlib import Path

from custom.bench.parallel import FULL, LINKS, Row, Setting, read_rows
from custom.bench.sparse_attention import BF16, DR, R

FIGURES = Path(__file__).parent / "figures"
NONE = "There is no record of GPUs yet.\n"
WAYS = ("TP", "CP, index keys replicated", "CP, index keys sharded")
CARDS = (4, 8, 16, 32, 64)
NODE = 8  # cards
LAYERS, MEMORY = 61, 100e9  # of DeepSeek-V3.2; bytes of cache on a card
CANDIDATE, STATISTICS = 8, 8  # bytes of (score, position), of (maximum, sum)


@dataclass(frozen=True)
class Link:
    """Microseconds of a collective between two cards that sends nothing; bytes a microsecond."""

    latency: dict[str, float]
    rate: dict[str, float]
    beyond: float  # bytes a microsecond and card between nodes
    hop: float  # microseconds more for each doubling of nodes

    def time(self, name: str, bytes_: float, cards: int) -> float:
        rate, latency = self.rate[name], self.latency[name] * log2(cards)
        if cards > NODE:
            rate, latency = min(rate, self.beyond), latency + self.hop * log2(cards / NODE)
        return latency + bytes_ / rate


def measured() -> list[Row]:
    path = FIGURES / "parallel.csv"
    return read_rows(path) if path.exists() else []


def nccl(rows: Sequence[Row]) -> Link:
    """Within a node as measured; between nodes 400 Gb/s a card and 5 us, which are assumed."""
    latency, rate = {}, {}
    for name in LINKS:
        few, many = sorted((x.moved, x.total) for x in rows if x.what == name)
        rate[name] = (many[0] - few[0]) / max(many[1] - few[1], 1e-3)
        latency[name] = max(few[1] - few[0] / rate[name], 0.0) / log2(rows[0].ranks)
    return Link(latency, rate, beyond=50e3, hop=5.0)


# nothing of it is measured: 196 GB/s a die, of which a supernode has hundreds, and 10 us
HCCL = Link(dict.fromkeys(LINKS, 10.0), dict.fromkeys(LINKS, 196e3), beyond=196e3, hop=0.0)


def moved(way: str, cards: int, sizes: Setting = FULL) -> list[tuple[str, float]]:
    """(collective, bytes that it brings a card) of a step."""
    others, b = (cards - 1) / cards, sizes.b
    found = [("all_reduce", 2 * others * b * sizes.model.h * BF16)]
    if way != WAYS[0]:
        found.append(("all_gather", others * b * sizes.heads * (R + DR) * BF16))
        found.append(("all_to_all", others * b * sizes.heads * (R * BF16 + STATISTICS)))
    if way == WAYS[2]:
        found.append(("all_gather", (cards - 1) * b * sizes.k * CANDIDATE))
    return found


def _find(rows: Sequence[Row], what: str, context: int) -> Row:
    return next(row for row in rows if (row.what, row.context) == (what, context))


def projected(
    rows: Sequence[Row], way: str, context: int, cards: int, link: Link
) -> tuple[float, float, float]:
    """(compute, collectives, merge) of a step on `cards`."""
    one, some = _find(rows, "one card", context), _find(rows, way, context)
    replicated = _find(rows, WAYS[1], context).merge
    dealt = min((one.total - some.compute) / (1 - 1 / some.ranks), one.total)
    merge = some.merge
    if way == WAYS[2]:
        merge = replicated + max(merge - replicated, 0.0) * cards / some.ranks
    return one.total - dealt + dealt / cards, _waited(rows, way, context, cards, link), merge


def _waited(rows: Sequence[Row], way: str, context: int, cards: int, link: Link) -> float:
    """Of a step's collectives, less what of the queries' is behind the indexer."""
    times = [link.time(name, bytes_, cards) for name, bytes_ in moved(way, cards)]
    if way == WAYS[0]:
        return sum(times)
    few, many = (_find(rows, "one card", x).total for x in FULL.contexts)
    indexer = (many - few) * context / (FULL.contexts[1] - FULL.contexts[0])
    return sum(times) - min(times[1], indexer / cards if way == WAYS[2] else indexer)


def tokens(row: Row) -> str:
    """Of all layers, in MEMORY bytes on each card."""
    return f"{MEMORY / LAYERS / row.held / 1e6:.2f}M" if row.held else "-"


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    drawn = [f"| {' | '.join(line)} |\n" for line in (head, *lines)]
    return drawn[0] + "|---" * len(head) + "|\n" + "".join(drawn[1:])


def figures() -> str:
    """What was measured, in three columns."""
    rows = measured()
    if not rows:
        return NONE
    steps = [row for row in rows if row.b]
    firsts = {row.context: row for row in reversed(steps) if row.what.endswith("one card")}
    lines = [
        (
            row.what,
            f"{row.context // 1024}K",
            f"{row.compute:.0f}",
            f"{row.collectives:.0f}",
            f"{row.merge:.0f}",
            f"**{row.total:.0f}**",
            f"{row.hidden:.0f}",
            f"{firsts[row.context].total / row.total:.2f}x",
            tokens(row),
        )
        for row in steps
    ]
    head = (
        "", "context", "compute", "collectives", "merge", "all", "hidden", "one card's time",
        "tokens",
    )  # fmt: skip
    links = [(row.what, f"{row.moved:,}", f"{row.total:.1f}") for row in rows if not row.b]
    picture = "\n![measured and on paper](figures/parallel.png)\n"
    return (
        f"{rows[0].ranks} x {rows[0].device}, {rows[0].date}, microseconds of a layer.\n\n"
        + _table(head, lines)
        + f"\n{_goals(steps)}\nCollectives alone:\n\n"
        + _table(("", "bytes to a card", "us"), links)
        + picture * (FIGURES / "parallel.png").exists()
    )


def _goals(steps: Sequence[Row]) -> str:
    one, many = (row for row in steps if row.what.startswith("indexer"))
    lines = [f"- rows of the indexer: {one.total / many.total:.2f}x (goal on 2 cards: 1.7x)\n"]
    for row in steps:
        if row.what.startswith("CP"):
            more = row.total - _find(steps, "one card", row.context).total
            lines.append(
                f"- {row.what}, {row.context // 1024}K: {more:+.0f} us to one card's time "
                "(goal: at most 60)\n"
            )
    return "".join(lines)


def projection() -> str:
    """Other numbers of cards, on paper."""
    rows = measured()
    if not rows:
        return NONE
    return "\n".join(_projection(rows, context) for context in FULL.contexts)


def _projection(rows: Sequence[Row], context: int) -> str:
    link, lines = nccl(rows), []
    totals = {way: [_find(rows, "one card", context).total] for way in WAYS}
    for cards in CARDS:
        line = [str(cards)]
        for way in WAYS:
            compute, collectives, merge = projected(rows, way, context, cards, link)
            on_hccl = _waited(rows, way, context, cards, HCCL)
            total = compute + collectives + merge
            totals[way] = [*totals[way], total]
            line.append(f"{total:.0f} ({collectives:.0f}, HCCL {on_hccl:.0f})")
        lines.append(line)
    title = f"{context // 1024}K, one card {totals[WAYS[0]][0]:.0f} us:\n\n"
    return title + _table(("cards", *WAYS), lines) + "\n" + _pays(totals)


def _pays(totals: dict[str, list[float]]) -> str:
    """Up to where more cards are faster by a tenth than fewer."""
    lines = []
    for way, times in totals.items():
        last = 0
        for i in range(1, len(times)):
            if times[i] > 0.9 * times[last]:
                break
            last = i
        said = f"pays in time up to {CARDS[last - 1]} cards" if last else "never pays in time"
        lines.append(f"- {way} {said}\n")
    return "".join(lines)


def draw() -> None:
    """Three columns of each way as bars, and the steps' times over the number of cards."""
    rows = measured()
    if not rows:
        return
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    contexts, colours = FULL.contexts, ("#0072B2", "#E69F00", "#009E73")
    figure, panels = plt.subplots(
        2, len(contexts), figsize=(5.5 * len(contexts), 6), layout="constrained", squeeze=False
    )
    for bars, lines, context in zip(*panels, contexts, strict=True):
        shown = [_find(rows, what, context) for what in ("one card", *WAYS)]
        names = [row.what.replace(", ", "\n") for row in shown]
        left = [0.0] * len(shown)
        for part, colour in zip(("compute", "collectives", "merge"), colours, strict=True):
            wide = [getattr(row, part) for row in shown]
            bars.barh(names, wide, left=left, label=part, color=colour)
            left = [x + y for x, y in zip(left, wide, strict=True)]
        bars.invert_yaxis()
        bars.set_title(f"{context // 1024}K, {rows[0].ranks} x {rows[0].device}")
        bars.set_xlabel("microseconds of a layer")
        for way, colour in zip(WAYS, colours, strict=True):
            times = [sum(projected(rows, way, context, n, nccl(rows))) for n in CARDS]
            some = _find(rows, way, context)
            points = {1: shown[0].total, some.ranks: some.total}
            points |= zip(CARDS, times, strict=True)
            lines.plot(list(points), list(points.values()), "o-", label=way, color=colour)
        lines.set_xscale("log", base=2)
        lines.set_xticks(list(points), [str(cards) for cards in points])
        lines.set_ylim(bottom=0)
        lines.set_xlabel(f"cards (more than {rows[0].ranks}: on paper)")
        lines.set_ylabel("microseconds of a layer")
        lines.grid(alpha=0.3)
    for panel, side in zip(panels[:, 0], ("upper", "lower"), strict=True):
        handles, labels = panel.get_legend_handles_labels()
        figure.legend(handles, labels, loc=f"outside {side} center", ncol=3, frameon=False)
    figure.savefig(FIGURES / "parallel.png", dpi=150)


BLOCKS = {"cards": figures, "more cards": projection}
