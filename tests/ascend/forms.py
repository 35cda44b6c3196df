# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Programs of others whose form is known, with the times that they took on a card, to hold the cost
model to: CANN's products in tiles, and sums; the stages of a chunked delta rule.

measured.json has every shape of two profiles of products that come with msopmodeling 1.0.9 (Mulan
PSL v2, `tilesim/tests/st/ops_accuracy/**`), and of those of two operators like ours: the median of
so many runs, a kernel's own time without the gap behind it, and what msopmodeling's own model of
the operator says.  `tests/ascend/second.sh named --record` writes it.

The delta rule is megagdn-pto's (`kernels/pto/*.cpp`, and `outputs/data/kernel_bench_L4096.json`,
`.._L8192.json` of a 910B2): 16 sequences, chunks of 128 tokens, heads of 128, each stage timed by
itself; a work is a chunk of a head.  They are what the cost of a hand-off is held to.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from . import cost
from .cost import Cost, Memory

_M, _N, _K = 128, 256, 256  # of a tile of CANN's products: rows, columns, depth of a copy
_COPY = 16384  # bytes
CARD = "910B4"
RECORD = Path(__file__).with_name("measured.json")


@dataclass(frozen=True)
class Form:
    """`cores` run `halves` each, the slowest of them, with so many `slots` between them."""

    what: str
    card: str
    us: float
    runs: int
    halves: list[Cost]
    cores: int
    slots: int = 0

    @property
    def estimated(self) -> float:
        """us"""
        again = cost.read_again([self.halves], self.cores)
        work, _ = cost.seconds(self.halves, self.slots, self.cores, again)
        return (work + cost.head(self.halves)) * 1e6


def product(card: str, m: int, k: int, n: int, us: float, runs: int, cores: int = 20) -> Form:
    """[M, K] by [K, N] in 16 bits.  A core takes whole tiles; where there are fewer than cores,
    all share N."""
    wide = min(_N, math.ceil(n / cores / 16) * 16) if m <= _M else _N
    tiles = math.ceil(math.ceil(m / _M) * math.ceil(n / wide) / cores)
    half = Cost(of_cube=True)
    rows = min(m, _M)
    for extent, home in ((rows, (1, 2 * m * k)), (wide, (2, 2 * n * k))):
        there = Memory([], 2, "gm", home=home)
        for first in range(0, k, _K):
            half.copy("loads", there, Memory([extent, min(_K, k - first)], 2, "cbuf"))
    half.multiplied = math.ceil(rows / 16) * 16 * wide * k
    half.copy("stores", Memory([], 2, "gm", home=(3, 2 * m * n)), Memory([rows, wide], 2, "cc"))
    whole = Cost(of_cube=True)
    whole.add(half, tiles)
    return Form(f"[{m}, {k}] x [{k}, {n}]", card, us, runs, [whole], cores)


def sums(card: str, numbers: int, us: float, runs: int, cores: int = 40) -> Form:
    """Two tensors of 16 bits."""
    half = Cost()
    each = numbers * 2 / cores
    tile = Memory([_COPY], 1, "ub")
    a, b, out = (Memory([], 1, "gm", home=(at, 2 * numbers)) for at in range(3))
    for _ in range(math.ceil(each / _COPY)):
        half.copy("loads", a, tile)
        half.copy("loads", b, tile)
        for name, wide in (("vcast", 2), ("vcast", 2), ("vadd_1d_float", 2), ("vcast", 2)):
            half.vector_operation(name, [wide * _COPY])
        half.copy("stores", out, tile)
    return Form(f"sum of {numbers / 2**20:.0f} M numbers", card, us, runs, [half], cores)


def cann() -> list[Form]:
    """CANN's: every product of the record, and two sums."""
    rows = [x for x in json.loads(RECORD.read_text()) if x["op"].startswith("MatMul")]
    products = []
    for x in rows:
        (m, k), (n, _) = x["shapes"]
        products.append(product(CARD, m, k, n, x["us"], x["runs"], x["cores"]))
    return [*products, sums(CARD, 4096 * 512, 11.9, 376), sums(CARD, 4096 * 4096, 93.6, 12)]


_SIDE = 128  # tokens of a chunk, channels of a head
_TILE = 2 * _SIDE * _SIDE  # bytes in 16 bits; a vector core has half of its rows
_HALF = _TILE // 2
_MOST = 2**40  # bytes: more than the cache holds
# what the cube and a vector core do for a work: tiles that they load and store, of memory and of
# the workspace between them; products; floats of a half tile, and of a row, by operation
_WAYS = (("loads", False), ("loads", True), ("stores", False), ("stores", True))
_ROW = ("vcast", "vmov", "vexp", "vmul_")
_GATES = ("vbrc", "vbrc", "vsub_", "vmins", "vexp")


@dataclass(frozen=True)
class Stage:
    products: int
    cube: tuple[int, int, int, int]  # loads of memory, of the workspace, stores to both
    vectors: tuple[int, int, int, int]
    operations: tuple[str, ...]
    waits: int  # of each half
    slots: int = 1
    stops: int = 0  # of each half: behind a wait nothing begins before all of its units are idle
    whole: bool = False  # a core takes whole sequences of a head

    def halves(self, times: int) -> list[Cost]:
        waits: dict[str, int] = dict(waits=self.waits, rounds=1, stops=self.stops)
        cube, vectors = Cost(of_cube=True, **waits), Cost(share=2, **waits)
        cube.multiplied = self.products * _SIDE**3
        for half, tiles, size in ((cube, self.cube, _TILE), (vectors, self.vectors, _HALF)):
            for n, (way, workspace) in zip(tiles, _WAYS, strict=True):
                for at in range(n):
                    home = None if workspace else (_MOST * at, _MOST)
                    there = Memory([], 1, "gm", workspace=workspace, home=home)
                    half.copy(way, there, Memory([size], 1, "ub"))
        for name in self.operations:
            vectors.vector_operation(name, [2 * _HALF])
        # the gates of the chunk
        vectors.copy("loads", Memory([], 1, "gm", home=(0, _MOST)), Memory([_SIDE], 4, "ub"))
        for name in _ROW:
            vectors.vector_operation(name, [4 * _SIDE])
        whole = [Cost(half.share, half.of_cube) for half in (cube, vectors)]
        for of_all, half in zip(whole, (cube, vectors), strict=True):
            of_all.add(half, times)
        return whole


STAGES = {
    "kkt": Stage(
        1,
        (1, 0, 0, 1),
        (0, 1, 1, 0),
        (*_GATES, "vcast", "vmul_", "vmul_", "vcast"),
        1,
        slots=2,
        stops=1,
        whole=True,
    ),
    "wy": Stage(
        2,
        (2, 2, 2, 0),
        (1, 0, 0, 2),
        ("vbrc", "vcast", "vmul_", "vcast", "vbrc", "vmul_", "vcast"),
        2,
    ),
    "h": Stage(
        2,
        (2, 2, 0, 2),
        (2, 2, 2, 2),
        (
            "vcast",
            "vcast",
            "vbrc",
            "vmul_",
            "vcast",
            "vsub_",
            "vcast",
            "vcast",
            "vmuls",
            "vcast",
            "vadd_",
            "vcast",
        ),
        2,
        whole=True,
    ),
    "o": Stage(
        3,
        (4, 1, 0, 3),
        (0, 3, 1, 1),
        (
            *_GATES,
            "vmul_",
            "vcast",
            "vmul_",
            "vcast",
            "vcast",
            "vbrc",
            "vmul_",
            "vcast",
            "vadd_",
            "vcast",
        ),
        2,
    ),
}
# us of 16 sequences, by heads and length.  The inversion between kkt and wy is not there: its time
# has a copy and the host's in it
_MEASURED = {
    (16, 4096): dict(kkt=1172, wy=1775, h=2579, o=2497),
    (32, 4096): dict(kkt=2315, wy=3305, h=5185, o=5496),
    (16, 8192): dict(kkt=2177, wy=3513, h=5070, o=5530),
    (32, 8192): dict(kkt=4669, wy=6587, h=10235, o=10889),
    (48, 8192): dict(kkt=6795, wy=10438, h=14156, o=15589),
    (64, 8192): dict(kkt=9048, wy=13086, h=20374, o=22532),
}


def stage(name: str, heads: int, length: int, us: float, cores: int = 24) -> Form:
    """Of the chunked delta rule, 16 sequences."""
    form, chunks = STAGES[name], length // _SIDE
    works = 16 * heads if form.whole else 16 * heads * chunks
    times = math.ceil(works / cores) * (chunks if form.whole else 1)
    what = f"{name}, 16 x {length} x {heads} heads"
    return Form(what, "910B2", us, 15, form.halves(times), cores, form.slots)


def stages() -> list[Form]:
    return [
        stage(name, heads, length, us)
        for (heads, length), by_stage in _MEASURED.items()
        for name, us in by_stage.items()
    ]


def chunked(heads: int, length: int) -> tuple[float, float]:
    """us of the stages that were timed, by the model and on the card."""
    found = [
        (form.estimated, form.us)
        for form in stages()
        if form.what.endswith(f" 16 x {length} x {heads} heads")
    ]
    by_model, measured = zip(*found, strict=True)
    return sum(by_model), sum(measured)


def ratios(of: list[Form]) -> list[float]:
    """Of the model to each measured time."""
    before, found = cost.card, []
    for form in of:
        cost.use(form.card)
        found.append(form.estimated / form.us)
    cost.card = before
    return found


def within(of: list[float], factor: float = 1.3) -> int:
    return sum(1 / factor <= x <= factor for x in of)


def spread(of: list[float]) -> float:
    """The factor that they are off by: of the root of the mean square of the logarithms."""
    return math.exp(math.sqrt(sum(math.log(x) ** 2 for x in of) / len(of)))
