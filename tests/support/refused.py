# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Every argument of an op, spoiled in each of a few ways: which check speaks.

python -m tests.support.refused     write tests/records/generated/refused.json anew
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from custom.dispatch.env import config
from custom.dispatch.register import overload
from custom.dispatch.registry import SPECS, Spec
from torch import Tensor

from ..fuzz.build import build
from ..fuzz.draw import KIND, draw
from .samples import sample

RECORD = Path(__file__).parents[1] / "records/generated/refused.json"
CPU = torch.device("cpu")
_DRAWS = 6
_WORDS = 4  # behind the op's name: the argument and what is wrong with it


def _paged(lengths: tuple[str, str], keys: str = "key_dequant_scale") -> dict[str, Any]:
    """Keys and what belongs to them in pages of 16."""
    return {
        "layout_key" if lengths[1].endswith("key") else "layout_kv": "PA_BSND",
        lengths[0]: torch.tensor([3, 2], dtype=torch.int32),
        lengths[1]: torch.tensor([16, 7], dtype=torch.int32),
        "block_table": torch.tensor([[0], [1]], dtype=torch.int32),
    } | {name: lambda x: x[:, :16].contiguous() for name in ("key", keys)}


_TREE = dict(
    intermediate_states=torch.zeros(3, 2, 4, 16, 8),
    intermediate_state_indices=torch.tensor([2, 0], dtype=torch.int32),
    retrieve_parent_token=torch.tensor([[-1, 0], [-1, 0]], dtype=torch.int32),
    disable_state_update=True,
)
_INDEXER = ("actual_seq_lengths_query", "actual_seq_lengths_key")
_ATTENTION = ("actual_seq_lengths_query", "actual_seq_lengths_kv")
_FILTERED = dict(bias=torch.ones(32, dtype=torch.float16))
_SHARED_TABLES = dict(
    ori_block_table=torch.tensor([[0, 1], [2, 3]], dtype=torch.int32),
    cmp_block_table=torch.tensor([[1], [0]], dtype=torch.int32),
    seqused_q=torch.tensor([3, 2], dtype=torch.int32),
    seqused_kv=torch.tensor([21, 17], dtype=torch.int32),
)
_SHARED_LENGTHS = dict(
    ori_sparse_indices=torch.zeros(2, 3, 1, 5, dtype=torch.int32),
    ori_topk_length=torch.tensor([5, 2, 0, 5, 5, 1], dtype=torch.int32),
    cmp_topk_length=torch.tensor([4, 2, 0, 4, 4, 1], dtype=torch.int32),
)
# what the samples leave out; a function makes it of what they have
_MORE: dict[str, dict[str, Any]] = {
    "npu_lightning_indexer": _paged(_INDEXER, "key"),
    "npu_lightning_indexer_scores": _paged(_INDEXER, "key"),
    "npu_quant_lightning_indexer": _paged(_INDEXER),
    "npu_quant_lightning_indexer_scores": _paged(_INDEXER),
    "npu_sparse_flash_attention": _paged(_ATTENTION, "key_rope"),
    "npu_kv_quant_sparse_flash_attention": _paged(_ATTENTION, "value"),
    "npu_kv_quant_sparse_flash_attention_lse": _paged(_ATTENTION, "value"),
    "npu_fused_sigmoid_gating_delta_rule_update": _TREE,
    "npu_gated_delta_layer_decode": _TREE
    | dict(
        intermediate_states=torch.zeros(3, 1, 4, 16, 8),
        intermediate_conv_window=torch.zeros(3, 1, 3, 96, dtype=torch.float16),
        retrieve_parent_token=torch.tensor([[-1], [-1]], dtype=torch.int32),
    ),
    "npu_causal_conv1d_update": dict(
        retrieve_parent_token=torch.tensor([[-1, 0], [-1, 0]], dtype=torch.int32),
        disable_state_update=True,
    ),
    "npu_sparse_attn_sharedkv": dict(layout_kv="PA_ND")
    | _SHARED_TABLES
    | dict(ori_kv=lambda x: x[:1, :16].repeat(4, 1, 1, 1), cmp_kv=lambda x: x[:, :4].contiguous()),
    "npu_sparse_attn_sharedkv_grad": dict(indices_are_slots=True) | _SHARED_LENGTHS,
    "npu_kv_quant_sparse_attn_sharedkv": dict(indices_are_slots=True) | _SHARED_LENGTHS,
    "npu_latent_cache_write": dict(k_nope_clip_alpha=torch.ones(1)),
    "npu_recurrent_gated_delta_rule": dict(gk=torch.zeros(4, 4, 16)),
    "npu_fused_causal_conv1d": _FILTERED,
    "npu_fused_causal_conv1d_v2": _FILTERED,
}


def _strided(x: Tensor) -> Tensor:
    """No two numbers beside each other."""
    return torch.stack([x, x], -1)[..., 0]


def _turned(x: Tensor) -> Tensor:
    """Its first dimension lies innermost."""
    return x.movedim(0, -1).contiguous().movedim(-1, 0)


def _gaps(x: Tensor) -> Tensor:
    """Rows that are dense, with another one between each two."""
    return torch.stack([x, x], 1)[:, 0]


def _longer(dim: int) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.cat([x, x.narrow(dim, 0, 1)], dim)


def _shorter(dim: int) -> Callable[[Tensor], Tensor]:
    return lambda x: x.narrow(dim, 0, x.shape[dim] - 1)


def _filled(value: float) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.full_like(x, value)


def _ways(x: Tensor) -> dict[str, Callable[[Tensor], Any]]:
    ways: dict[str, Callable[[Tensor], Any]] = {
        "absent": lambda x: None,
        "elsewhere": lambda x: x.to("meta"),
        "int16": lambda x: x.to(torch.int16),
        "one dimension more": lambda x: x[None],
        "one dimension less": lambda x: x[0],
    }
    if x.is_floating_point():
        ways["float32"] = lambda x: x.to(torch.float32)
        ways["float64"] = lambda x: x.to(torch.float64)
        ways["bfloat16"] = lambda x: x.to(torch.bfloat16)
    else:
        other = torch.int64 if x.dtype is torch.int32 else torch.int32
        ways["other integers"] = lambda x: x.to(other)
        ways |= {f"all {n}": _filled(n) for n in (-2, -1, 0, 1, 100)}
        ways["falling"] = lambda x: x.flip(0)
    if x.ndim > 1:
        ways["turned"] = _turned
        ways["with gaps"] = _gaps
    ways["strided"] = _strided
    for dim in range(x.ndim):
        ways[f"longer in {dim}"] = _longer(dim)
        if x.shape[dim]:
            ways[f"shorter in {dim}"] = _shorter(dim)
    return ways


def _near(value: int) -> set[int]:
    """And no number that fits into no argument."""
    return {-1, 0, 1, 2, 3, value - 1, min(value + 1, 2**63 - 1), 2**31}


def _spoiled(value: Any, kind: str) -> Iterator[tuple[str, Any]]:
    """`kind`: of the schema."""
    if value is None and kind == "Optional[Tensor]":
        yield "given", torch.ones(1)
    if isinstance(value, Tensor):
        if value.ndim and value.numel():
            for way, spoil in _ways(value).items():
                yield way, spoil(value)
    elif isinstance(value, bool):
        yield "turned round", not value
    elif isinstance(value, int):
        yield from ((str(n), n) for n in sorted(_near(value)))
    elif isinstance(value, float):
        yield from ((str(x), x) for x in (-1.0, 0.0, float("nan"), float("inf")))
    elif isinstance(value, str):
        yield "misspelled", "XYZ"


def calls(spec: Spec) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """(arguments, names of those to spoil): the sample with the options that it leaves out, then
    with more tensors, and draws of tests/fuzz that have tensors which none ahead of them had."""
    schema = overload(spec)._schema
    options = {x.name: x.default_value for x in schema.arguments if x.has_default_value()}
    first = options | sample(spec.name, CPU, torch.float16)
    yield first, list(first)
    seen = {name for name, value in first.items() if isinstance(value, Tensor)}
    more = _MORE.get(spec.name)
    if more:
        made = {name: x(first[name]) if callable(x) else x for name, x in more.items()}
        seen.update(made)
        yield first | made, list(made)
    for number in range(_DRAWS if spec.name in KIND else 0):
        drawn, _ = build(draw(spec.name, number, 0, ["float16"]), torch.float16)
        new = [x for x, y in drawn.items() if isinstance(y, Tensor) and y.numel() and x not in seen]
        if new:
            seen.update(new)
            yield options | drawn, new


def words(text: str) -> str:
    """How a sentence begins, without its numbers."""
    return " ".join(re.sub(r"(?<![a-z\d])\d+", "0", text).split()[:_WORDS])  # float16 stays


def said(spec: Spec, arguments: dict[str, Any]) -> str:
    """How a refusal begins, without its numbers; "" where the call runs."""
    try:
        overload(spec)(**arguments)
    except Exception as error:
        text = str(error).removeprefix(f"{spec.name}: ").split("\n")[0]
        return f"{type(error).__name__}: {words(text)}"
    return ""


Refusals = dict[str, dict[str, list[str]]]


def refusals(spec: Spec) -> Refusals:
    """argument -> what is said -> ways; those that are legal are left out.  With CUSTOM_DEBUG,
    which looks at values."""
    kinds = {x.name: str(x.type) for x in overload(spec)._schema.arguments}
    found: Refusals = {}
    before = config.debug
    config.debug = True
    try:
        for arguments, names in calls(spec):
            overload(spec)(**copy.deepcopy(arguments))  # legal
            for name in names:
                for way, spoiled in _spoiled(arguments[name], kinds[name]):
                    # what is written begins anew
                    text = said(spec, copy.deepcopy(arguments) | {name: spoiled})
                    if text:
                        found.setdefault(name, {}).setdefault(text, []).append(way)
    finally:
        config.debug = before
    return found


def read() -> dict[str, Refusals]:
    return json.loads(RECORD.read_text())


if __name__ == "__main__":
    lines = []
    for spec in SPECS:
        rows = [f"  {json.dumps(name)}: {json.dumps(x)}" for name, x in refusals(spec).items()]
        lines.append(f" {json.dumps(spec.name)}: {{\n" + ",\n".join(rows) + "\n }")
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")
