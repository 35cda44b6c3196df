# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""torchrun --nproc-per-node 2 -m custom.bench.parallel [--device cuda] [--quick] [--csv F]

A decode step of DeepSeek-V3.2's layer (128 heads, b = 32), from hidden states to the sum behind the
output projection: on one card, tensor parallel, and context parallel with replicated and with
sharded index keys; then the indexer's rows of a prefill. Checked against one card first. Times are
medians of graph replays on the slowest rank, in three columns: the step, less its collectives, less
its merge (of states, of candidates, of positions), which are timed apart. `hidden` is what more the
step takes if every collective is waited for as soon as it starts. Last, each collective alone with
little and with much to send, from which docs/cards.py projects other numbers of cards.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import merging, parallel, shard_slots
from ..parallel import collectives
from .__main__ import device_name
from .case import Arguments, Draw
from .report import write_table
from .sparse_attention import DEEPSEEK, Model, P, R, _layer, indexer_case

DV = 128
CACHES = ("kv_cache", "kr_cache", "index_k_cache")
LINKS = ("all_gather", "all_to_all", "all_reduce")


@dataclass(frozen=True)
class Setting:
    """Decode steps of `b` requests at each of `contexts`, `rows` of a prefill's indexer at
    `long`, and collectives of few and of many bytes."""

    model: Model
    b: int
    heads: int
    k: int
    contexts: tuple[int, ...]
    rows: int
    long: int
    payloads: tuple[int, int]


FULL = Setting(DEEPSEEK, 32, 128, 2048, (2**16, 2**19), 4096, 2**17, (2**16, 2**23))
QUICK = Setting(Model("", 256, 128, 32, 16, 0.1, False), 2, 8, 64, (256,), 64, 512, (2**10, 2**14))


@dataclass(frozen=True)
class Row:
    """Microseconds of a step, or of a collective alone, in which a card is sent `moved` bytes."""

    what: str
    b: int
    context: int
    compute: float
    collectives: float
    merge: float
    error: float
    held: float = 0.0  # bytes of cache on each card, a token of context
    moved: int = 0
    hidden: float = 0.0  # of collectives, behind compute: in none of the three
    ranks: int = 0
    device: str = ""
    date: str = ""

    @property
    def total(self) -> float:
        return self.compute + self.collectives + self.merge


def read_rows(path: Path) -> list[Row]:
    kinds: dict[str, Callable[[str], Any]] = {"float": float, "int": int, "str": str}
    kind = {field.name: kinds[str(field.type)] for field in fields(Row)}
    with path.open(newline="") as file:
        return [
            Row(**{name: kind[name](cell) for name, cell in line.items()})
            for line in csv.DictReader(file)
        ]


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    write_table(path, Row, rows, 5)


@contextmanager
def _replaced(**functions: Callable[..., Any]) -> Iterator[None]:
    kept = {name: getattr(collectives, name) for name in functions}
    for name, function in functions.items():
        setattr(collectives, name, function)
    try:
        yield
    finally:
        for name, function in kept.items():
            setattr(collectives, name, function)


@contextmanager
def _alone(group: dist.ProcessGroup) -> Iterator[list[int]]:
    """Without collectives: what would come from other ranks is this rank's own, in its place. Gives
    the bytes that each would have brought."""
    size = dist.get_world_size(group)
    brought: list[int] = []

    def gather(x: Tensor, group: Any) -> Callable[[], Tensor]:
        brought.append((size - 1) * x.nbytes)
        out = x.expand(size, *x.shape).contiguous()
        return lambda: out

    def exchange(x: Tensor, group: Any) -> Tensor:
        brought.append((size - 1) * x.nbytes // size)
        return x.contiguous()

    def reduce(x: Tensor, group: Any) -> Tensor:
        brought.append(2 * (size - 1) * x.nbytes // size)
        return x.clone()

    with _replaced(start_all_gather=gather, all_to_all=exchange, all_reduce=reduce):
        yield brought


def _one_after_the_other() -> AbstractContextManager[None]:
    """Collectives that are waited for as soon as they start."""
    start = collectives.start_all_gather

    def gather(x: Tensor, group: Any) -> Callable[[], Tensor]:
        out = start(x, group)()
        return lambda: out

    return _replaced(start_all_gather=gather)


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
    with api.graph(graph, stream=side, capture_error_mode="thread_local"):
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
        self, sizes: Setting, context: int, group: dist.ProcessGroup, device: torch.device
    ) -> None:
        b, n, k, model = sizes.b, sizes.heads, sizes.k, sizes.model
        self.b, self.n, self.k, self.group = b, n, k, group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.options: dict[str, Any] = dict(sparse_count=k, softmax_scale=model.scale)
        self.layer = _layer(Draw(device, 0), b, 1, n, context, model)
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
        self.shards = {x: self.layer[x][pages] for x in CACHES}
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

    def held(self, caches: Sequence[Tensor]) -> float:
        tokens = self.b * self.layer["block_table"].shape[1] * P
        return float(sum(x.nbytes for x in caches) / tokens)

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
        packed = draw.normal(self.size, self.b, 1, self.n // self.size, R + 4).abs()
        outs, (tops, sums) = packed[..., :R], packed[..., R:].view(torch.float32).unbind(-1)
        reach = self.layer["block_table"].shape[1] * P
        chosen = draw.chosen(self.b, self.k, reach).view(self.b, 1, 1, self.k)
        values = draw.normal(self.size, self.b, 1, 1, self.k, dtype=torch.float32)
        positions = torch.stack([chosen * self.size + rank for rank in range(self.size)])

        def call() -> None:
            merging.npu_merge_states(outs, tops, sums)
            merging.npu_localize_indices(chosen, self.rank, self.size, P)
            if not replicate:
                merging.npu_merge_topk(values, positions, self.k)

        return call

    def row(
        self,
        what: str,
        call: Callable[[], Tensor],
        caches: Sequence[Tensor],
        merge: Callable[[], Any] | None = None,
    ) -> Row:
        exact, got = self.one_card().double(), call().double()
        error = float((got - exact).norm() / exact.norm())
        context = self.layer["block_table"].shape[1] * P
        times, moved = _columns(call, merge, self.group, self.up.device)
        hidden = 0.0
        if merge is not None:
            with _one_after_the_other():
                hidden = _median(call, self.group, self.up.device) - sum(times)
        return Row(what, self.b, context, *times, error, self.held(caches), moved, hidden)


def _columns(
    call: Callable[[], Any],
    merge: Callable[[], Any] | None,
    group: dist.ProcessGroup,
    device: torch.device,
) -> tuple[tuple[float, float, float], int]:
    """(compute, collectives, merge), bytes that collectives bring a card"""
    total = _median(call, group, device)
    with _alone(group) as brought:
        call()
        moved = sum(brought)
        local = _median(call, group, device)
    merged = 0.0 if merge is None else _median(merge, group, device)
    return (local - merged, total - local, merged), moved


def decode_rows(
    sizes: Setting, context: int, group: dist.ProcessGroup, device: torch.device
) -> list[Row]:
    step = Step(sizes, context, group, device)
    alone = _median(step.one_card, group, device)
    whole = [step.layer[name] for name in CACHES]
    rows = [Row("one card", sizes.b, context, alone, 0.0, 0.0, 0.0, step.held(whole))]
    rows.append(step.row("TP", step.tensor_parallel, whole))
    for replicate in (True, False):
        what = f"CP, index keys {'replicated' if replicate else 'sharded'}"
        call = partial(step.context_parallel, replicate)
        *latents, index = step.shards.values()
        caches = [*latents, whole[-1] if replicate else index]
        rows.append(step.row(what, call, caches, step.merge(replicate)))
    return rows


def indexer_rows(sizes: Setting, group: dist.ProcessGroup, device: torch.device) -> list[Row]:
    context = sizes.long
    case = indexer_case(1, sizes.rows, context, sizes.k, sizes.model)
    arguments: Arguments = case.make(device, 0)
    del arguments["return_value"]
    one = partial(torch.ops.custom.npu_lightning_indexer, **arguments)
    many = partial(parallel.row_parallel_indexer, **arguments, group=group)
    if not torch.equal(one()[0], many()):
        raise ArithmeticError("row_parallel_indexer differs from one card")
    what = f"indexer, {sizes.rows} rows"
    alone = _median(one, group, device)
    times, moved = _columns(many, None, group, device)
    return [
        Row(f"{what}, one card", 1, context, alone, 0.0, 0.0, 0.0),
        Row(f"{what}, dealt out", 1, context, *times, 0.0, moved=moved),
    ]


def link_rows(sizes: Setting, group: dist.ProcessGroup, device: torch.device) -> list[Row]:
    """Each collective alone, of a tensor of so many bytes on every rank."""
    size, rows = dist.get_world_size(group), []
    for name in LINKS:
        for payload in sizes.payloads:
            x = torch.zeros(size, payload // (4 * size), device=device)

            def call(name: str = name, x: Tensor = x) -> Tensor:
                out: Tensor = getattr(collectives, name)(x, group)
                return out

            with _alone(group) as brought:
                call()
            rows.append(
                Row(name, 0, 0, 0.0, _median(call, group, device), 0.0, 0.0, moved=brought[0])
            )
    return rows


def _print(row: Row, first: Row) -> None:
    columns = (row.compute, row.collectives, row.merge, row.total, row.hidden)
    times = "".join(f"{column:>13.1f}" for column in columns)
    gain = f"{first.total / row.total:.2f}x" if row.b else ""
    print(
        f"{row.what:<32}{row.context // 1024:>6}K{times}{gain:>10}"
        f"{row.error:>10.1e}{row.held:>9.0f}{row.moved:>11}",
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
    own = device if options.device == "cuda" else None
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=120), device_id=own)
    group = dist.group.WORLD
    assert group is not None
    leads = dist.get_rank() == 0
    size, name = dist.get_world_size(), device_name(device)
    if leads:
        print(f"{size} ranks of {name} over {backend}, torch {torch.__version__}")
        print(
            f"{'us':<32}{'context':>7}{'compute':>13}{'collectives':>13}{'merge':>13}{'all':>13}"
            f"{'hidden':>13}{'to one':>10}{'error':>10}{'B/token':>9}{'B moved':>11}"
        )
    sizes = QUICK if options.quick else FULL
    calls: list[Callable[[], list[Row]]] = [
        *(partial(decode_rows, sizes, context, group, device) for context in sizes.contexts),
        partial(indexer_rows, sizes, group, device),
        partial(link_rows, sizes, group, device),
    ]
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
        day = time.strftime("%Y-%m-%d")
        write_rows(options.csv, [replace(x, ranks=size, device=name, date=day) for x in written])
    dist.destroy_process_group()
    # threads of gloo outlive a group that had functional collectives, and may abort a normal end
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
