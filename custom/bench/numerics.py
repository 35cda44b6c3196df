# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""How far every op is from float64, beside its reference, torch and the peers that are installed:

    python -m custom.bench.numerics [OP ...] [--device D] [--most 2] [--csv F]

The rows of the bench, on its inputs.  Exact is the reference in float64 on the same numbers, for
the piece of a row that the bench checks.  Ops on 8-bit values know no float64: there exact is the
reference, which computes in float32.  Errors are relative, by the Frobenius norm, of the worst
output.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..dispatch.common.nz import from_nz, to_nz
from ..dispatch.env import by_reference
from ..dispatch.registry import BY_NAME
from .__main__ import (
    _copy,
    _outputs,
    choose_device,
    device_name,
    progress,
    relative_error,
)
from .case import Arguments, Case, Outputs
from .presets import presets
from .report import packed, unpacked, write_table

# their order is each one's own, as where a case is not `ordered`
_SELECTIONS = ("npu_lightning_indexer", "npu_lightning_indexer_scores", "npu_merge_topk")
_QUANTIZED = (torch.int8, torch.uint8, torch.float8_e4m3fn)


@dataclass(frozen=True)
class Row:
    op: str
    case: str
    exact: str  # "float64" or "reference"
    dtype: str
    ours: float
    reference: float  # the plain evaluation in the op's own dtype
    peers: str  # "name=error; ..."
    device: str
    date: str


def read_rows(path: Path) -> list[Row]:
    def row(line: dict[str, str]) -> Row:
        numbers = {name: float(line[name]) for name in ("ours", "reference")}
        return Row(**{**line, **numbers})  # type: ignore[arg-type]

    with path.open(newline="") as file:
        return [row(line) for line in csv.DictReader(file)]


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    write_table(path, Row, rows, 3)


def is_quantized(arguments: Arguments) -> bool:
    return any(isinstance(x, Tensor) and x.dtype in _QUANTIZED for x in arguments.values())


def widened(arguments: Arguments) -> Arguments:
    """The same numbers in float64; a weight in tiles stays the matrix (or matrices) that it is, and
    a tensor that is given twice one tensor."""

    def wide(name: str, x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        tiled = name.startswith(("w_", "weight_")) and x.ndim in (4, 5)
        return to_nz(from_nz(x).double()) if tiled else x.double()

    once = {id(x): wide(name, x) for name, x in arguments.items()}
    return {name: once[id(x)] for name, x in arguments.items()}


def _has_error(x: Tensor) -> bool:
    return x.is_floating_point() and x.dtype.itemsize > 1


def _floats(case: Case, outputs: Outputs) -> list[Tensor]:
    kept = [x for x in outputs if _has_error(x)]
    ordered = case.ordered and case.op not in _SELECTIONS
    return kept if ordered else [x.sort(-1).values for x in kept]


def _of_peer(
    case: Case, call: Callable[[], Any], ours: Outputs, exact: Outputs, select: Any
) -> float | None:
    """Of those of the op's outputs that the peer gives; None if they have other shapes."""
    out = call()
    theirs = [x for x in ([out] if isinstance(out, Tensor) else out or ()) if _has_error(x)]
    places = [place for place, x in enumerate(ours) if _has_error(x)]
    whole = list(ours)
    for place, x in zip(places, theirs, strict=False):
        sizes, wanted = ([n for n in shape if n != 1] for shape in (x.shape, ours[place].shape))
        if sizes != wanted:
            return None
        whole[place] = x.reshape(ours[place].shape)
    count = min(len(theirs), len(places))
    return relative_error(_floats(case, select(whole))[:count], exact[:count])


def errors(case: Case, device: torch.device) -> Row | None:
    """None where no output has an error: whole numbers, bytes."""
    arguments = case.make(device, 1234)
    peers = {
        name: prepare(_copy(arguments))
        for name, prepare in case.peers.items()
        if name != "torch.compile"
    }
    part, select = case.part(arguments)
    part = _copy(part)
    whole = _outputs(case, arguments)
    ours = _floats(case, select(whole))
    eight = is_quantized(part)
    with by_reference():
        plain = _floats(case, _outputs(case, _copy(part)))
        exact = plain if eight else _floats(case, _outputs(case, widened(part)))
    if not exact or not any(x.numel() for x in exact):
        return None
    found = {
        name: _of_peer(case, call, whole, exact, select) for name, call in peers.items() if call
    }
    dtypes = [x.dtype for x in arguments.values() if isinstance(x, Tensor)]
    first = next(x for x in dtypes if x.is_floating_point or x in _QUANTIZED)
    return Row(
        op=case.op,
        case=case.label,
        exact="reference" if eight else "float64",
        dtype=str(first).removeprefix("torch."),
        ours=relative_error(ours, exact),
        reference=relative_error(plain, exact),
        peers=packed({name: x for name, x in found.items() if x is not None}, ".2g"),
        device=device_name(device),
        date=time.strftime("%Y-%m-%d"),
    )


HEAD = (
    "| op | shape | dtype | ours | reference | torch | best peer |\n|---|---|---|---|---|---|---|"
)


def markdown(row: Row) -> str:
    peers = unpacked(row.peers)
    plain = peers.pop("torch", None)
    best = min(peers, key=peers.__getitem__, default=None)
    cells = [
        f"`{row.op}`",
        row.case,
        row.dtype,
        f"**{row.ours:.1e}**",
        f"{row.reference:.1e}" if row.exact == "float64" else "exact here",
        "-" if plain is None else f"{plain:.1e}",
        "-" if best is None else f"{peers[best]:.1e} ({best})",
    ]
    return f"| {' | '.join(cells)} |"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m custom.bench.numerics", description=__doc__)
    parser.add_argument("ops", nargs="*", metavar="OP")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda", "npu"], default="auto")
    parser.add_argument("--most", type=int, default=1000, help="rows of an op")
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args(argv)
    device = choose_device(options.device)
    rows: list[Row] = []
    print(HEAD)
    for op in options.ops or BY_NAME:
        for case in presets(op, device.type)[: options.most]:
            progress(f"{op}: {case.label}")
            row = errors(case, device)
            if row is not None:
                rows.append(row)
                print(markdown(row), flush=True)
                if options.csv:
                    write_rows(options.csv, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
