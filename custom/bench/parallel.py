# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""torchrun --nproc-per-node 2 -m custom.bench.parallel [--device cuda] [--quick] [--csv F]

A decode step of DeepSeek-V3.2's layer (128 heads, b = 32), from hidden states to the sum behind the
output projection: on one card, tensor parallel, and context parallel with replicated and with
sharded index keys; then the indexer's rows of a prefill. Checked against one card first. Times are
medians of graph replays on the slowest rank, in three columns: the step, less its collectives, less
its merge (of states, of candidates, of positions), which are timed apart.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _collectives, merging, parallel, shard_slots
from .case import Arguments, Draw
from .sparse_attention import DEEPSEEK, Model, P, R, _layer, indexer_case

DV = 128
SMALL = Model("", 256, 128, 32, 16, 0.1, False)


@dataclass(frozen=True)
class Row:
    what: str
    context: int
    compute: float
    collectives: float
    merge: float
    error: float

    @property
    def total(self) -> float:
        return self.compute + self.collectives + self.merge


@contextmanager
def _alone(group: dist.ProcessGroup) -> Iterator[None]:
    """Without collectives: what would come from other ranks is this rank's own, in its place."""
    size = dist.get_world_size(group)
    kept = _collectives.all_gather, _collectives.all_to_all, _collectives.all_reduce

    def gather(x: Tensor, group: Any) -> Tensor:
        return x.expand(size, *x.shape).contiguous()

    _collectives.all_gather = gather
    _collectives.all_to_all = lambda x, group: x.contiguous()
    _collectives.all_reduce = lambda x, group: x.clone()
    try:
        yield
    finally:
        _collectives.all_gather, _collectives.all_to_all, _collectives.all_reduce = kept


def _median(call: Callable[[], Any], group: dist.ProcessGroup, device: torch.device) -> float:
    """Microseconds, of the slowest rank."""
    dist.barrier(group)
    slowest = torch.tensor([_timed(call, device)], device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    return float(slowest)


def _timed(call: Callable[[], Any], device: torch.device) -> float:
    """Every rank calls as often as the others."""
    if device.type == "cpu":
        return sorted(_wall(call) for _ in range(5))[2]
    api: Any = getattr(torch, device.type)
    side = api.Stream()
    side.wait_stream(api.current_stream())
    with api.stream(side):
        for _ in range(3):
            call()
    api.current_stream().wait_stream(side)
    graph = api.CUDAGraph() if device.type == "cuda" else api.NPUGraph()
    with api.graph(graph, capture_error_mode="thread_local"):
        for _ in range(4):
            call()
    times = []
    for _ in range(25):
        start, end = (api.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        api.synchronize()
        times.append(float(start.elapsed_time(end)) * 1e3 / 4)
    return sorted(times[5:])[10]


def _wall(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e6


class Step:
    """The layer's arguments on all ranks, and this rank's part of them."""

    def __init__(
        self, b: int, n: int, context: int, k: int, model: Model, group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:  # fmt: skip
        self.b, self.n, self.k, self.group = b, n, k, group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.options: dict[str, Any] = dict(sparse_count=k, softmax_scale=model.scale)
        self.layer = _layer(device, 0, b, 1, n, context, model)
        draw = Draw(device, 1)
        self.up = draw.normal(n, R, DV, std=R**-0.5)
        self.down = draw.normal(model.h, n * DV, std=(n * DV) ** -0.5)
        self.own = [parallel.shard(self.up, 0, group), parallel.shard(self.down, 1, group)]
        self.heads = parallel.shard_layer(self.layer, group=group)
        # pages are dealt out in turn: page j of a request is page j // size of rank j % size
        table = self.layer["block_table"]
        mine = table[:, self.rank :: self.size]
        pages = mine.flatten().long()
        self.table = torch.arange(pages.numel(), device=device, dtype=torch.int32).view(mine.shape)
        self.shards = {x: self.layer[x][pages] for x in ("kv_cache", "kr_cache", "index_k_cache")}
        position = torch.full((b, 1), context - 1, device=device)
        self.slots = shard_slots(position, self.table, P, self.rank, self.size, P)

    def _out(self, latent: Tensor, up: Tensor, down: Tensor) -> Tensor:
        values = torch.bmm(latent.flatten(0, 1).movedim(1, 0), up)
        return values.movedim(0, 1).reshape(self.b, -1) @ down.T

    def one_card(self) -> Tensor:
        latent = torch.ops.custom.npu_sparse_attention_pto(**self.layer, **self.options)
        return self._out(latent, self.up, self.down)

    def tensor_parallel(self) -> Tensor:
        latent = parallel.tensor_parallel_attention(self.heads, group=self.group, **self.options)
        return parallel.all_reduce(self._out(latent, *self.own), self.group)

    def context_parallel(self, replicate: bool) -> Tensor:
        layer = self.heads | dict(
            kv_cache=self.shards["kv_cache"],
            kr_cache=self.shards["kr_cache"],
            block_table=self.table,
            cache_index=self.slots,
        )
        index = (self.layer["block_table"], self.layer["cache_index"])
        if not replicate:
            layer["index_k_cache"] = self.shards["index_k_cache"]
            index = (self.table, self.slots)
        latent = parallel.context_parallel_attention(
            layer,
            group=self.group,
            index_block_table=index[0],
            index_cache_index=index[1],
            interleave=P,
            replicate_index=replicate,
            **self.options,
        )
        return parallel.all_reduce(self._out(latent, *self.own), self.group)

    def merge(self, replicate: bool) -> Callable[[], Any]:
        """What context parallel adds on each card, on tensors of the same shapes."""
        draw = Draw(self.up.device, 2)
        packed = draw.normal(self.size, self.b, 1, self.n // self.size, R + 4)
        outs, (tops, sums) = packed[..., :R], packed[..., R:].view(torch.float32).unbind(-1)
        reach = self.layer["block_table"].shape[1] * P
        chosen = draw.chosen(self.b, self.k, reach).view(self.b, 1, 1, self.k)
        values = draw.normal(self.size, self.b, 1, 1, self.k, dtype=torch.float32)
        positions = chosen.expand(self.size, *chosen.shape).contiguous()

        def call() -> None:
            merging.npu_merge_states(outs, tops, sums)
            merging.npu_localize_indices(chosen, self.rank, self.size, P)
            if not replicate:
                merging.npu_merge_topk(values, positions, self.k)

        return call

    def row(self, what: str, call: Callable[[], Tensor], merge: Callable[[], Any] | None) -> Row:
        exact, got = self.one_card().double(), call().double()
        error = float((got - exact).norm() / exact.norm())
        context = self.layer["block_table"].shape[1] * P
        times = _columns(call, merge, self.group, self.up.device)
        return Row(what, context, *times, error)


def _columns(
    call: Callable[[], Any],
    merge: Callable[[], Any] | None,
    group: dist.ProcessGroup,
    device: torch.device,
) -> tuple[float, float, float]:
    """(compute, collectives, merge)"""
    total = _median(call, group, device)
    with _alone(group):
        local = _median(call, group, device)
    merged = 0.0 if merge is None else _median(merge, group, device)
    return local - merged, total - local, merged


def decode_rows(
    b: int, n: int, context: int, k: int, model: Model, group: dist.ProcessGroup,
    device: torch.device,
) -> list[Row]:  # fmt: skip
    step = Step(b, n, context, k, model, group, device)
    alone = _median(step.one_card, group, device)
    rows = [Row("one card", context, alone, 0.0, 0.0, 0.0)]
    rows.append(step.row("TP", step.tensor_parallel, None))
    for replicate in (True, False):
        what = f"CP, index keys {'replicated' if replicate else 'sharded'}"
        call = partial(step.context_parallel, replicate)
        rows.append(step.row(what, call, step.merge(replicate)))
    return rows


def indexer_rows(
    rows: int, context: int, k: int, model: Model, group: dist.ProcessGroup, device: torch.device
) -> list[Row]:
    arguments: Arguments = indexer_case(1, rows, context, k, model).make(device, 0)
    del arguments["return_value"]
    one = partial(torch.ops.custom.npu_lightning_indexer, **arguments)
    many = partial(parallel.row_parallel_indexer, **arguments, group=group)
    if not torch.equal(one()[0], many()):
        raise ArithmeticError("row_parallel_indexer differs from one card")
    what = f"indexer, {rows} rows"
    return [
        Row(f"{what}, one card", context, _median(one, group, device), 0.0, 0.0, 0.0),
        Row(f"{what}, dealt out", context, *_columns(many, None, group, device), 0.0),
    ]


def _print(row: Row, first: Row) -> None:
    columns = (row.compute, row.collectives, row.merge, row.total)
    times = "".join(f"{column:>13.1f}" for column in columns)
    print(
        f"{row.what:<32}{row.context // 1024:>6}K{times}{first.total / row.total:>9.2f}x"
        f"{row.error:>10.1e}",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="custom.bench.parallel", description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda", "npu"], default="cuda")
    parser.add_argument("--quick", action="store_true", help="small sizes, for a CPU")
    parser.add_argument("--csv", type=Path, help="also write the rows there")
    options = parser.parse_args()
    device = torch.device(options.device)
    if options.device != "cpu":
        device = torch.device(options.device, int(os.environ["LOCAL_RANK"]))
        getattr(torch, options.device).set_device(device)
    backend = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}[options.device]
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=120))
    group = dist.group.WORLD
    assert group is not None
    leads = dist.get_rank() == 0
    if leads:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        print(f"{dist.get_world_size()} ranks of {name} over {backend}, torch {torch.__version__}")
        print(
            f"{'us':<32}{'context':>7}{'compute':>13}{'collectives':>13}{'merge':>13}{'all':>13}"
            f"{'to one':>10}{'error':>10}"
        )
    model = SMALL if options.quick else DEEPSEEK
    sizes = [(2, 8, 256, 64)] if options.quick else [(32, 128, c, 2048) for c in (2**16, 2**19)]
    calls: list[Callable[[], list[Row]]] = [
        partial(decode_rows, *each, model, group, device) for each in sizes
    ]
    wide = (64, 512, 64) if options.quick else (4096, 2**17, 2048)
    calls.append(partial(indexer_rows, *wide, model, group, device))
    written: list[Row] = []
    with torch.no_grad():
        for call in calls:
            rows = call()
            written += rows
            for row in rows if leads else ():
                _print(row, rows[0])
            if device.type == "cuda":
                torch.cuda.empty_cache()
            # bf16: other kernels, other orders of summation, and near-ties at a selection's edge
            wrong = [row.what for row in rows if not row.error <= 5e-2]
            if wrong:
                print(f"WRONG: {', '.join(wrong)}", file=sys.stderr)
                return 1
    if options.csv and leads:
        with options.csv.open("w", newline="") as file:
            out = csv.writer(file)
            out.writerow(["what", "context", "compute_us", "collectives_us", "merge_us", "error"])
            for row in written:
                times = (row.compute, row.collectives, row.merge)
                out.writerow([row.what, row.context, *(f"{t:.2f}" for t in times), row.error])
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
