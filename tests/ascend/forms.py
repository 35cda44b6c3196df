# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Programs of CANN whose form is known, with the times that they took on a card, to hold the cost
model to: products in tiles, and sums.

measured.json has every shape of two profiles of products that come with msopmodeling 1.0.9 (Mulan
PSL v2, `tilesim/tests/st/ops_accuracy/**`), and of those of two operators like ours: the median of
so many runs, a kernel's own time without the gap behind it, and what msopmodeling's own model of
the operator says.  `tests/ascend/second.sh named --record` writes it.
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
    """`cores` run `halves` each, the slowest of them."""

    what: str
    card: str
    us: float
    runs: int
    halves: list[Cost]
    cores: int

    @property
    def estimated(self) -> float:
        """us"""
        again = cost.read_again([self.halves], self.cores)
        work, _ = cost.seconds(self.halves, False, self.cores, again)
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


def all_forms() -> list[Form]:
    """Every product of the record, and two sums."""
    rows = [x for x in json.loads(RECORD.read_text()) if x["op"].startswith("MatMul")]
    products = []
    for x in rows:
        (m, k), (n, _) = x["shapes"]
        products.append(product(CARD, m, k, n, x["us"], x["runs"], x["cores"]))
    return [*products, sums(CARD, 4096 * 512, 11.9, 376), sums(CARD, 4096 * 4096, 93.6, 12)]


def ratios() -> list[float]:
    """Of the model to each measured time."""
    before = cost.card
    cost.use(CARD)
    found = [form.estimated / form.us for form in all_forms()]
    cost.card = before
    return found


def within(of: list[float], factor: float = 1.3) -> int:
    return sum(1 / factor <= x <= factor for x in of)


def spread(of: list[float]) -> float:
    """The factor that they are off by: of the root of the mean square of the logarithms."""
    return math.exp(math.sqrt(sum(math.log(x) ** 2 for x in of) / len(of)))
