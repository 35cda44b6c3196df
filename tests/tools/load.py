# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""An hour of decode, compressed: does anything drift, grow, or come out otherwise the second time?

    python -m tests.tools.load [--device cuda] [--steps 180000] [--seed 0]

180,000 steps are an hour at 50 tokens a second.  A step is a layer of sparse attention over paged
caches and a gated-delta layer over slots of states, one captured graph on a GPU.  Requests of any
length join and leave; pages and slots are recycled in any order, as they were left.  All of it runs
twice.  Fails unless

  - every bit of every output is the same in both runs, and of the caches and states at the end,
  - the device's memory does not grow after the first tenth, nor the process by more than 64 MiB,
  - at ten moments an output and a state, which a request's tokens have come through one by one, are
    as near to float64 as the reference is that does the same in one call.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

import custom

from ..fuzz.build import by_reference
from ..support.accuracy import assert_close_to_float64
from ..support.layer import CACHES, WEIGHTS, formatted, layer

GROWTH = 64 * 2**20  # bytes of the process: what Python and the driver keep for themselves
MOMENTS = 10
DELTA_WEIGHTS = ("conv_weight", "A_log", "dt_bias", "norm_weight")


@dataclass(frozen=True)
class Sizes:
    """Of the layers, of the caches, and how long requests are: small ones, by default."""

    attention: dict[str, Any]
    key_heads: int = 2
    value_heads: int = 4
    size: int = 16  # of a head of the gated-delta layer
    page: int = 16
    columns: int = 5  # pages of a request at most
    pages: int = 14
    rows: int = 4
    kept: int = 24  # positions that a query attends to
    inputs: int = 997  # different inputs

    @property
    def reach(self) -> int:
        return self.columns * self.page


SMALL = Sizes(dict(h=64, ranks=48, n=4, plain=16, rank=32, rotary=16, index=(16, 32)))
# a shard of DeepSeek-V3.2's layer, and of Qwen3-Next's
WIDE = Sizes(
    dict(h=7168, ranks=1536, n=16, plain=128, rank=512, rotary=64, index=(64, 128)),
    4,
    8,
    128,
    page=64,
    columns=64,
    pages=300,
    rows=8,
    kept=1024,
)


class Step(torch.nn.Module):
    """One token of every row; all that a run changes is a buffer."""

    changed = (
        *CACHES,
        "lengths",
        "table",
        "seeds",
        "slots",
        "windows",
        "states",
        "digest",
        "wrong",
    )

    def __init__(self, sizes: Sizes, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.sizes, self.dtype = sizes, dtype
        a = sizes.attention
        given = layer(1, 1, **a)
        self.weights = [n for n in given if n.startswith(("w_", "gamma", "in_"))]
        given = formatted(given, dtype, "nz", device)
        random = torch.Generator().manual_seed(1)

        def normal(*shape: int, kind: torch.dtype = dtype, std: float = 1.0) -> Tensor:
            return (torch.randn(*shape, generator=random) * std).to(device, kind)

        def whole(*shape: int, kind: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=kind, device=device)

        angle = torch.rand(sizes.reach, a["rotary"] // 2, generator=random) * 6.28
        channels = sizes.size * (2 * sizes.key_heads + sizes.value_heads)
        widths = (a["rank"], a["rotary"], a["index"][1])
        heads, rows = sizes.value_heads, sizes.rows
        buffers = {name: given[name] for name in self.weights} | dict(
            x=normal(sizes.inputs, a["h"]),
            sines=torch.cat([angle, angle], -1).sin().to(device, dtype),
            cosines=torch.cat([angle, angle], -1).cos().to(device, dtype),
            mixed=normal(sizes.inputs, channels),
            gates=normal(sizes.inputs, heads, sizes.size),
            a=normal(sizes.inputs, heads),
            b=normal(sizes.inputs, heads),
            conv_weight=normal(4, channels, std=0.5),
            A_log=normal(heads, kind=torch.float32),
            dt_bias=normal(heads, kind=torch.float32),
            norm_weight=normal(sizes.size),
            # cached rows of prompts, which take the place of a prefill
            **{f"prompt_{c}": normal(sizes.inputs, n) for c, n in zip(CACHES, widths, strict=True)},
            **{
                c: whole(sizes.pages, sizes.page, 1, n, kind=dtype)
                for c, n in zip(CACHES, widths, strict=True)
            },
            lengths=whole(rows, kind=torch.int32),
            table=whole(rows, sizes.columns, kind=torch.int32),
            seeds=whole(rows),
            slots=whole(rows, kind=torch.int32),
            windows=whole(rows + 2, 3, channels, kind=dtype),
            states=whole(rows + 2, heads, sizes.size, sizes.size, kind=torch.float32),
            digest=whole(1),
            wrong=whole(1, kind=torch.bool),
        )
        for name, value in buffers.items():
            self.register_buffer(name, value)

    def inputs(self, seed: Tensor, position: Tensor) -> Tensor:
        """Which input a request's token at `position` is."""
        return (seed + 31 * position) % self.sizes.inputs

    def attention(self, index: Tensor, position: Tensor) -> dict[str, Any]:
        there = position >= 0
        at = position.clamp(min=0)
        page = self.table.gather(1, at[:, None] // self.sizes.page)[:, 0]
        slot = (page * self.sizes.page + at % self.sizes.page).where(there, -1)
        return dict(
            x=self.x[index][:, None],
            sin=self.sines[at][:, None],
            cos=self.cosines[at][:, None],
            cache_index=slot[:, None].int(),
            block_table=self.table,
            act_seqs=self.lengths,
            sparse_count=self.sizes.kept,
            **{name: getattr(self, name) for name in (*self.weights, *CACHES)},
        )

    def delta(self, index: Tensor, slots: Tensor, **pools: Tensor) -> dict[str, Any]:
        """`index` [B, S]"""
        return dict(
            mixed_qkv=self.mixed[index],
            z=self.gates[index],
            a=self.a[index],
            b=self.b[index],
            state_indices=slots,
            **{name: getattr(self, name) for name in DELTA_WEIGHTS},
            **pools,
        )

    def forward(self, active: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(the attention's output, its selection, the gated-delta layer's output)"""
        self.lengths.add_(active)
        position = self.lengths.long() - 1  # -1: an idle row
        index = self.inputs(self.seeds, position.clamp(min=0))
        out, chosen = custom.npu_sparse_attention_indices_pto(**self.attention(index, position))
        slots = self.slots.where(active > 0, -1)
        pools = dict(conv_states=self.windows, states=self.states)
        mixed = custom.npu_gated_delta_layer_decode(**self.delta(index[:, None], slots, **pools))
        for each in (out, mixed):
            live = active.view(-1, *[1] * (each.ndim - 1)) > 0
            kept = each.where(live, 0)
            self.wrong.logical_or_(~kept.isfinite().all())
            self.digest.copy_(self.digest * 6364136223846793005 + _digest(kept))
        return out, chosen, mixed


def _digest(x: Tensor) -> Tensor:
    """A whole number of all bits; sums of whole numbers have no order."""
    bits = (
        x.contiguous().view(torch.int16 if x.dtype.itemsize == 2 else torch.int32).flatten().long()
    )
    odd = 2 * torch.arange(bits.numel(), device=x.device) + 1
    return (bits * (odd * -0x61C8864680B583EB)).sum()


@dataclass
class Server:
    """Admits requests to rows, and takes back the pages and slots of those that are done."""

    step: Step
    random: Random
    free: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    held: dict[int, tuple[list[int], int]] = field(default_factory=dict)
    left: dict[int, int] = field(default_factory=dict)  # tokens that a row has to come
    began: dict[int, int] = field(default_factory=dict)  # tokens of its prompt
    served: int = 0

    def __post_init__(self) -> None:
        sizes = self.step.sizes
        self.free = self.random.sample(range(sizes.pages), sizes.pages)
        self.slots = list(range(sizes.rows + 2))
        self.active = torch.zeros_like(self.step.lengths)

    def admit(self) -> None:
        step, sizes = self.step, self.step.sizes
        for row in range(sizes.rows):
            if row in self.held or self.random.random() < 0.1:
                continue
            prompt, new = (self.random.randint(1, sizes.reach // 2) for _ in range(2))
            pages = -(-(prompt + new) // sizes.page)
            if pages > len(self.free):
                continue
            taken = [self.free.pop(self.random.randrange(len(self.free))) for _ in range(pages)]
            slot = self.slots.pop(self.random.randrange(len(self.slots)))
            self.held[row], self.left[row], self.began[row] = (taken, slot), new, prompt
            seed = self.random.randrange(2**20)
            device = step.lengths.device
            table = taken + [-1] * (sizes.columns - pages)
            step.table[row] = torch.tensor(table, dtype=torch.int32).to(device, non_blocking=True)
            step.lengths[row], step.seeds[row], step.slots[row] = prompt, seed, slot
            step.windows[slot], step.states[slot] = 0, 0
            self.active[row] = 1
            position = torch.arange(prompt, device=device)
            where = step.table[row].long()[position // sizes.page], position % sizes.page
            index = step.inputs(step.seeds[row], position)
            for name in CACHES:
                getattr(step, name)[where] = getattr(step, f"prompt_{name}")[index][:, None]
            self.served += 1

    def retire(self) -> bool:
        done = [row for row, left in self.left.items() if left == 0]
        for row in done:
            pages, slot = self.held.pop(row)
            self.free += pages
            self.slots.append(slot)
            del self.left[row], self.began[row]
            self.active[row] = 0
            self.step.lengths[row] = 0
        return bool(done)

    def run(self, call: Callable[[Tensor], Any]) -> Any:
        """One token of all that are there."""
        if self.retire() or len(self.held) < self.step.sizes.rows:
            self.admit()
        out = call(self.active)
        for row in self.left:
            self.left[row] -= 1
        return out


@torch.no_grad()
def check(server: Server, outputs: tuple[Tensor, Tensor, Tensor]) -> None:
    """The last step's outputs and a state, against float64."""
    step, (out, chosen, mixed) = server.step, outputs
    assert not step.wrong, "an output is not finite"
    if not server.held:
        return
    row = min(server.held)
    only = torch.tensor([row], device=out.device)
    length = step.lengths[only]
    position = length.long() - 1
    index = step.inputs(step.seeds[only], position)
    given = step.attention(
        step.inputs(step.seeds, step.lengths.long() - 1), step.lengths.long() - 1
    )
    single = {
        n: given[n][only] for n in ("x", "sin", "cos", "cache_index", "block_table", "act_seqs")
    }
    kept = {n: given[n] for n in given if not n.startswith(("w_idx", "in_", "index_k", "sparse"))}
    arguments = kept | {n: x for n, x in single.items() if n in kept}
    arguments["sparse_indices"] = chosen[only]
    rounded, exact = (
        _by_reference(custom.npu_sparse_attention_shared_pto, arguments, kind)
        for kind in (step.dtype, torch.float64)
    )
    # products of other batch sizes add in another order
    assert_close_to_float64("attention", out[only], rounded, exact, times=4)
    # all tokens of the request since its prompt, in one call
    prompt, slot = server.began[row], server.held[row][1]
    positions = torch.arange(prompt, int(length), device=out.device)
    first = torch.zeros(1, dtype=torch.int32, device=out.device)
    index = step.inputs(step.seeds[only], positions)[None]
    found = []
    for kind in (step.dtype, torch.float64):
        pools = dict(
            conv_states=torch.zeros_like(step.windows[:1]), states=torch.zeros_like(step.states[:1])
        )
        given = _typed(step.delta(index, first, **pools), kind)
        with by_reference():
            every = custom.npu_gated_delta_layer_decode(**given)
        found.append((every[:, -1:], given["states"]))
    (own, state), (right, right_state) = found
    assert_close_to_float64("gated-delta layer", mixed[only], own, right)
    assert_close_to_float64("state", step.states[slot][None], state, right_state)


def _typed(arguments: dict[str, Any], kind: torch.dtype) -> dict[str, Any]:
    """In float64, or as they are; weights in tiles stay the matrices they are."""
    if kind is not torch.float64:
        return {n: x.clone() if isinstance(x, Tensor) else x for n, x in arguments.items()}
    return {
        n: _wide(n, x) if isinstance(x, Tensor) and x.is_floating_point() else x
        for n, x in arguments.items()
    }


def _wide(name: str, x: Tensor) -> Tensor:
    return custom.to_nz(custom.from_nz(x).double()) if name in WEIGHTS else x.double()


def _by_reference(
    op: Callable[..., Tensor], arguments: dict[str, Any], kind: torch.dtype
) -> Tensor:
    with by_reference():
        return op(**_typed(arguments, kind))


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def taken(device: torch.device) -> int:
    """Bytes of the device that the allocator cannot give back."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(device)


@torch.no_grad()
def hour(
    step: Step, call: Callable[[Tensor], Any], active: Tensor, steps: int, seed: int
) -> tuple[Server, list[Tensor], int, int]:
    """(server, what must come out the same, growth of the device's memory, and of the process')"""
    for name in step.changed:
        getattr(step, name).zero_()
    server = Server(step, Random(seed))
    server.active = active
    active.zero_()
    before = (0, 0)
    for number in range(1, steps + 1):
        outputs = server.run(call)
        if number == max(1, steps // MOMENTS):
            check(server, outputs)
            before = taken(step.lengths.device), resident()
        elif number % max(1, steps // MOMENTS) == 0:
            check(server, outputs)
    after = taken(step.lengths.device), resident()
    same = [getattr(step, name).clone() for name in step.changed]
    return server, same, after[0] - before[0], after[1] - before[1]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.tools.load", description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--steps", type=int, default=180_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    if options.steps < 1:
        parser.error(f"--steps is {options.steps}, expected 1 or more")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: none is here")
    small = options.device == "cpu"
    device = torch.device(options.device)
    torch.manual_seed(0)
    step = Step(SMALL if small else WIDE, device, torch.float32 if small else torch.bfloat16)
    active = torch.zeros_like(step.lengths)
    call = step if small else custom.graph_mode.capture(step, active)
    found, seconds = [], []
    for _ in range(2):
        begin = time.monotonic()
        found.append(hour(step, call, active, options.steps, options.seed))
        seconds.append(time.monotonic() - begin)
    (server, first, device_more, more), (_, second, again_more, _) = found
    for name, a, b in zip(step.changed, first, second, strict=True):
        assert torch.equal(a, b), f"{name}: other bits the second time"
    assert device_more == again_more == 0, f"the device's memory grew by {device_more} bytes"
    assert more <= GROWTH, f"the process grew by {more / 2**20:.0f} MiB"
    print(
        f"{options.steps} steps, {server.served} requests, "
        f"{seconds[0]:.0f} and {seconds[1]:.0f} s: "
        f"the same bits twice (digest {int(step.digest) & 2**64 - 1:016x}), {2 * MOMENTS} checks "
        f"against float64, memory of the device +0, of the process +{more / 2**20:.1f} MiB"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
