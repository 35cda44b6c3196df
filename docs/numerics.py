# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The tables of docs/numerics.md: errors that were measured, and which bits are always the same.

python -m custom.bench.numerics --device cuda --csv docs/figures/numerics_cuda.csv
python -m docs.tables
"""

from __future__ import annotations

from pathlib import Path

from custom.dispatch.registry import SPECS

from custom.bench import numerics

FIGURES = Path(__file__).parent / "figures"
TEST = "tests/contracts/test_determinism.py"
_SUMS = "sums over the queries that chose a key are atomic"
# gradients whose sums have no order on a GPU, unless one is asked for
ANY_ORDER = {
    "npu_sparse_attn_sharedkv_grad": _SUMS,
    "npu_lightning_indexer_grad": _SUMS,
    "npu_sparse_lightning_indexer_grad_kl_loss": _SUMS,
    "npu_fused_attention_backward": "on Hopper the query's gradient is summed as tiles end; "
    "`deterministic=True` asks for an order as well",
}


def errors() -> str:
    tables = []
    for path in sorted(FIGURES.glob("numerics_*.csv")):
        rows = numerics.read_rows(path)
        where = f"{rows[0].device}, {rows[0].date}:"
        tables.append("\n".join([where, "", numerics.HEAD, *map(numerics.markdown, rows)]) + "\n")
    return "\n".join(tables)


def determinism() -> str:
    lines = ["| op | the same bits | held by |", "|---|---|---|"]
    for spec in SPECS:
        said = "every time"
        if spec.name in ANY_ORDER:
            said = f"under `torch.use_deterministic_algorithms(True)`: {ANY_ORDER[spec.name]}"
        lines.append(f"| `{spec.name}` | {said} | `{TEST}::test_same_bits[{spec.name}]` |")
    return "\n".join(lines) + "\n"


BLOCKS = {"errors": errors, "determinism": determinism}
