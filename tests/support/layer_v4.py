# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Arguments of npu_sparse_attention_v4_pto, in the middle of requests."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import quantization

F64 = torch.float64
SECOND = ("w_uq", "w_idx_qb")
PAGE = 16
COFF = {"CSA": 2, "HCA": 1}
# of float32 beside half precision
WIDE = ("sinks", "cmp_ape", "gamma_cmp", "cmp_state", "idx_ape", "gamma_idx", "idx_state")


def table(requests: int, columns: int, g: random.Random) -> tuple[Tensor, int]:
    """Distinct pages in any order, and how many there are."""
    pages = list(range(requests * columns + 3))
    g.shuffle(pages)
    return torch.tensor(pages[: requests * columns]).long().view(requests, columns), len(pages)


def drawn(
    kind: str,
    device: Any,
    dtype: torch.dtype = torch.float16,
    *,
    starts: Sequence[int] = (14, 0),
    steps: int = 6,
    used: Sequence[int] | None = (6, 4),
    m: int = 4,
    entry_page: int = 2,
    H: int = 48,
    Rq: int = 32,
    D: int = 32,
    Dr: int = 8,
    Ni: int = 16,
    Di: int = 16,
    heads: int = 4,
    groups: int = 2,
    Ro: int = 16,
    output: bool = True,
    mode: int = 2,
    window: int = 8,
    holes: bool = True,
    quant: int = 0,
) -> dict[str, Any]:
    """Caches are full of numbers and hold 48 tokens a request; `holes`: of -1 among pages; `quant`:
    `weight_quant_mode`."""
    B = len(starts)
    wide = F64 if dtype is F64 else torch.float32
    g = random.Random(B)
    coff = COFF.get(kind, 1)

    def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, dtype=F64).to(device, dtype)

    def matrix(*shape: int, deep: int) -> Tensor:
        return (torch.randn(shape, dtype=F64) * deep**-0.5).to(device, dtype)

    def ints(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    rows, pages = table(B, 3, g)
    rows[: int(holes), 1] = -1
    given: dict[str, Any] = dict(
        x=normal(B, steps, H),
        w_dq=matrix(H, Rq, deep=H),
        w_uq=matrix(Rq, heads * D, deep=Rq),
        w_kv=matrix(H, D, deep=H),
        gamma_cq=normal(Rq),
        gamma_kv=normal(D),
        sinks=normal(heads, dtype=wide),
        sin=normal(B, steps, Dr),
        cos=normal(B, steps, Dr),
        ori_kv=normal(pages, PAGE, 1, D),
        ori_block_table=rows.int().to(device),
        act_seqs=ints(
            [
                max(0, a + (steps if used is None else n))
                for a, n in zip(starts, used or [0] * B, strict=True)
            ]
        ),
        seqused=None if used is None else ints(used),
        ori_win_left=window - 1,
        weight_format="nd",
    )
    if output:
        given["w_o_a"] = matrix(groups, heads // groups * D, Ro, deep=heads // groups * D)
        given["w_o_b"] = matrix(groups * Ro, H, deep=groups * Ro)
    if kind == "sliding":
        return given | quantized(given, quant)
    states, state_pages = table(B, -(-(coff * m + 5) // 3), g)
    entries, entry_pages = table(B, -(-48 // m // entry_page) + 1, g)
    entries[: int(holes), 1] = -1
    windows = -(-steps // m)

    def compressor(of: str, width: int) -> dict[str, Any]:
        return {
            f"w_{of}_kv": matrix(coff * width, H, deep=H),
            f"w_{of}_gate": matrix(coff * width, H, deep=H),
            f"{of}_ape": normal(m, coff * width, dtype=wide),
            f"gamma_{of}": normal(width, dtype=wide),
            f"{of}_state": normal(state_pages, 3, 2 * coff * width, dtype=wide),
        }

    given |= dict(
        cmp_ratio=m,
        cmp_sin=normal(B, windows, Dr),
        cmp_cos=normal(B, windows, Dr),
        state_block_table=states.int().to(device),
        cmp_block_table=entries.int().to(device),
        **compressor("cmp", D),
        cmp_kv=normal(entry_pages, entry_page, 1, D),
        state_mode=mode,
    )
    if kind == "CSA":
        given |= dict(
            w_idx_qb=matrix(Rq, Ni * Di, deep=Rq),
            w_idx_proj=matrix(H, Ni, deep=H),
            **compressor("idx", Di),
            idx_k=normal(entry_pages, entry_page, 1, Di),
            sparse_count=3,
        )
    return given | quantized(given, quant)


def of_floats(given: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The same call with what weights of 8 bits, [K, N] or [N, K], stand for."""
    made, linear = dict(given), given["weight_format"] == "linear"
    for scale in [name for name in given if name.startswith("dequant_scale_")]:
        name, by = scale.removeprefix("dequant_scale_"), made.pop(scale)
        w = given[name].mT if linear else given[name]
        parts = zip(w, by, strict=True) if w.ndim == 3 else [(w, by)]
        wide = [quantization.dequantized(*each).to(dtype) for each in parts]
        whole = torch.stack(wide) if w.ndim == 3 else wide[0]
        made[name] = (whole.mT if linear else whole).contiguous()
    return made | dict(weight_quant_mode=0)


def quantized(given: dict[str, Any], mode: int) -> dict[str, Any]:
    """The weights that a mode quantizes, with their scales."""
    made: dict[str, Any] = dict(weight_quant_mode=mode)
    kind, first = ("fp8" if mode == 4 else "int8"), ("w_dq", "w_kv", "w_o_a", "w_o_b")
    for name in {0: (), 1: SECOND}.get(mode, (*first, *SECOND)):
        if name in given:
            w = given[name].double().cpu()
            each = [quantization.weight(part, kind) for part in (w if w.ndim == 3 else [w])]
            parts = (torch.stack(part) for part in zip(*each, strict=True))
            values, scale = (x if w.ndim == 3 else x[0] for x in parts)
            device = given[name].device
            made |= {name: values.to(device), f"dequant_scale_{name}": scale.to(device)}
    return made
