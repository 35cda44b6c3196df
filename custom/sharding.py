# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""How DTensor may shard the pure ops: `register()`, once a process.

Each rule lists placements for one dimension of a mesh: all replicated, or inputs and outputs cut in
agreeing dimensions. Ops that write their arguments have no rule and are refused: a redistributed
cache would be a copy, whose writes are lost. Call them on the shards, by
`torch.distributed.tensor.experimental.local_map(op, .., redistribute_inputs=False)`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from .dispatch.errors import NotSupported
from .dispatch.register import bind, overload
from .dispatch.registry import BY_NAME

# a way to cut: dimension of each tensor argument by name (others are replicated), of each output
Cut = tuple[dict[str, int], tuple[int | None, ...]]


def _batched(dims: int, inputs: Sequence[str], outputs: int, parts: int = 0) -> list[Cut]:
    """Any of the leading `dims` dimensions, which the inputs have behind `parts` others."""
    return [(dict.fromkeys(inputs, d + parts), (d,) * outputs) for d in range(dims)]


def _merge_states(x: dict[str, Any]) -> list[Cut]:
    return _batched(x["outs"].ndim - 2, ("outs", "lses", "sums"), 2, parts=1)


def _merge_topk(x: dict[str, Any]) -> list[Cut]:
    return _batched(x["values"].ndim - 2, ("values", "positions"), 2, parts=1)


def _localize_indices(x: dict[str, Any]) -> list[Cut]:
    return _batched(x["indices"].ndim - 1, ("indices",), 2)


def _requests(x: dict[str, Any], layout: str, key_layout: str, keys: Sequence[str]) -> set[str]:
    """The arguments that have a dimension of requests in front; none if tokens are packed."""
    if x[layout] != "BSND":
        return set()
    shared = {*keys} if x[key_layout] == "PA_BSND" else set()
    return {
        n for n, v in x.items() if v is not None and not isinstance(v, (int, float, str))
    } - shared


def _lightning_indexer(x: dict[str, Any]) -> list[Cut]:
    inputs = _requests(x, "layout_query", "layout_key", ("key",))
    return [(dict.fromkeys(inputs, 0), (0, 0 if x["return_value"] else None))] if inputs else []


def _sparse_flash_attention(x: dict[str, Any]) -> list[Cut]:
    head = x["query"].ndim - 2
    with_stats = x["return_softmax_lse"]
    heads = {"query": head, "query_rope": head, "sinks": 0}
    cuts: list[Cut] = [
        (heads, (head, *((head + 1 - (head == 1),) * 2 if with_stats else (None,) * 2)))
    ]
    inputs = _requests(x, "layout_query", "layout_kv", ("key", "value", "key_rope")) - {"sinks"}
    if inputs:
        cuts.append((dict.fromkeys(inputs, 0), (0, *((0,) * 2 if with_stats else (None,) * 2))))
    return cuts


def _fused_attention(x: dict[str, Any]) -> list[Cut]:
    if x["cu_seqlens_q"] is not None:
        return [(dict.fromkeys("qkv", 1), (1, 1))]
    return [(dict.fromkeys("qkv", d), (d, d)) for d in (0, 1)]


def _indexer_loss(x: dict[str, Any]) -> list[Cut]:
    tensors = ("query", "key", "index_score", "indices", "query_rope", "key_rope", "softmax_lse")
    return [(dict.fromkeys(tensors, 0), (0, 0))]


RULES: dict[str, Callable[[dict[str, Any]], list[Cut]]] = {
    "npu_merge_states": _merge_states,
    "npu_merge_topk": _merge_topk,
    "npu_localize_indices": _localize_indices,
    "npu_lightning_indexer": _lightning_indexer,
    "npu_sparse_flash_attention": _sparse_flash_attention,
    "npu_fused_attention": _fused_attention,
    "npu_indexer_loss": _indexer_loss,
}


def register() -> None:
    """Teach DTensor how the pure ops may be sharded.

    It keeps what a rule gave by a call's tensors and whole numbers; here strings and flags decide
    about placements too, so that they are made part of what calls are told apart by.

    Raises:
        NotSupported: this PyTorch keeps its rules elsewhere.
    """
    try:
        from torch.distributed.tensor import DTensor
        from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
        from torch.distributed.tensor.experimental import register_sharding

        told_apart = DTensor._op_dispatcher.sharding_propagator.op_to_schema_info
    except (ImportError, AttributeError) as error:
        raise NotSupported(
            f"custom.sharding: torch {torch.__version__} keeps sharding rules elsewhere, expected "
            "2.9 to 2.13. Call the ops on the shards, by local_map."
        ) from error
    for name, rule in RULES.items():
        op = overload(BY_NAME[name])
        register_sharding(op)(_placements(name, rule))
        plain = [a for a in op._schema.arguments if "Tensor" not in str(a.type)]
        first = next((i for i, a in enumerate(op._schema.arguments) if a in plain), 100)
        keywords = [a.name for a in plain if a.kwarg_only]
        told_apart[op] = RuntimeSchemaInfo(first, keywords or None, needs_pytree=True)


def _placements(name: str, rule: Callable[[dict[str, Any]], list[Cut]]) -> Callable[..., Any]:
    op = overload(BY_NAME[name])
    returns = len(op._schema.returns)

    def of_call(*args: Any, **kwargs: Any) -> list[tuple[list[Placement], list[Placement | None]]]:
        x = bind(op._schema, args, kwargs)
        cuts: list[Cut] = [({}, (None,) * returns), *rule(x)]
        return [
            (
                [_placement(d) for d in outputs],
                [
                    _placement(inputs.get(n)) if hasattr(v, "shape") else None
                    for n, v in [*zip(x, args, strict=False), *kwargs.items()]
                ],
            )
            for inputs, outputs in cuts
        ]

    return of_call


def _placement(dimension: int | None) -> Placement:
    return Replicate() if dimension is None else Shard(dimension)
