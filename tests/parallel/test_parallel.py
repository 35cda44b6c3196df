# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""custom.parallel with 2, 3 and 4 ranks, each a process: over gloo, and over NCCL where there are
as many GPUs; and ranks that die or hang."""

from __future__ import annotations

import ast
import multiprocessing
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("needs torch.distributed with gloo", allow_module_level=True)

from custom.bench import parallel as bench
from custom.parallel import collectives
from docs import cards

from . import checks

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.xdist_group("parallel")
EVERYWHERE = (
    "rows_of_the_indexer",
    "ragged_rows_of_the_indexer",
    "tensor_parallel",
    "decode",
    "decode_selects_the_same",
    "prologs_write_into_shards",
    "prefill",
    "quantized_prefill",
    "delta_rule_over_the_context",
    "kda_over_the_context",
    "loss_of_all_heads",
    "tensor_parallel_of_deepseek_v4",
    "context_parallel_of_deepseek_v4",
    "weights_of_deepseek_v4_are_cut",
)
ONCE = (
    "another_selection_is_found",
    "heads_of_the_delta_rule",
    "heads_of_kda",
    "decode_finds_another_selection",
    "decode_with_sinks",
    "decode_in_half_precision",
    "quantized_decode",
    "decode_of_nothing",
    "steps_compile_as_one_graph",
    "a_mesh_is_a_group",
    "pure_ops_take_sharded_tensors",
    "mutating_ops_refuse_sharded_tensors",
    "every_mutating_op_refuses_sharded_tensors",
    "uneven_heads_are_refused",
    "rows_of_a_prefill_are_checked",
    "gradients_are_refused",
    "a_prolog_that_wants_a_gradient_is_refused",
    "collectives_refuse_gradients",
    "options_in_stages_are_passed_on_or_refused",
    "scales_follow_their_columns",
    "entries_of_another_rank_are_refused",
)
CASES = [(name, size) for size in (2, 3, 4) for name in EVERYWHERE]
CASES += [(name, 2) for name in ONCE] + [("a_subgroup_has_its_own_ranks", 3)]


def need(device, size):
    if device.type == "cuda" and torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs")


def start(target, size: int, store, *more):
    """(pipes, processes): `target(rank, size, store, pipe, *more)` on every rank, forked from a
    process that has imported torch and nothing else."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.parallel.checks"])
    pipes, processes = [], []
    for rank in range(size):
        here, there = context.Pipe()
        arguments = (rank, size, str(store), there, *more)
        process = context.Process(target=target, args=arguments, daemon=True)
        process.start()
        pipes.append(here)
        processes.append(process)
    return pipes, processes


def test_what_ranks_are_forked_from_asks_nothing_of_cuda():
    """CUDA cannot be used in a process whose parent asked it anything."""
    script = "import torch; torch.cuda.is_available = torch.cuda._lazy_init = None"
    subprocess.run([sys.executable, "-c", f"{script}; import tests.parallel.checks"], check=True)


class Ranks:
    """Processes of one group, which run checks together."""

    def __init__(self, size: int, folder, device: str) -> None:
        store = folder / f"{device}{size}"
        self.pipes, self.processes = start(checks.serve, size, store, device)

    def run(self, name: str) -> None:
        for pipe in self.pipes:
            pipe.send(name)
        answers = []
        for pipe in self.pipes:
            assert pipe.poll(300), f"{name}: a rank gives no answer"
            answers.append(pipe.recv())
        assert not any(answers), "\n".join(answers)

    def stop(self) -> None:
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join(20)
            process.kill()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    made: dict[tuple[int, str], Ranks] = {}
    folder = tmp_path_factory.mktemp("ranks")

    def of(size: int, device: str) -> Ranks:
        if (size, device) not in made:
            made[size, device] = Ranks(size, folder, device)
        return made[size, device]

    yield of
    for group in made.values():
        group.stop()


@pytest.mark.parametrize("name, size", CASES, ids=[f"{name}-{size}" for name, size in CASES])
def test_ranks_agree_with_one_process(name, size, device, ranks):
    need(device, size)
    ranks(size, device.type).run(name)


def test_steps_are_captured_with_their_collectives(device, ranks):
    if device.type != "cuda":
        pytest.skip("no graph of a CPU")
    need(device, 2)
    ranks(2, "cuda").run("steps_in_a_cuda_graph")


@pytest.mark.parametrize("fault", ["dies", "hangs"])
def test_a_rank_that_is_gone_is_an_error_with_names(fault, device, tmp_path):
    """Within the group's timeout of 5 seconds, on every other rank."""
    size, engine = (2, "nccl") if device.type == "cuda" else (3, "gloo")
    need(device, size)
    pipes, processes = start(checks.meet, size, tmp_path / "store", fault, device.type)
    for rank in range(size - 1):
        assert pipes[rank].poll(120)
        seconds, said = pipes[rank].recv()
        wanted = rf"custom.parallel: all_gather failed on rank {rank} of {size}: .*{engine} says: "
        assert re.match(wanted, said), said
        assert "\n" not in said and seconds < 15
    for process in processes:
        process.kill()


@pytest.mark.parametrize("fault", ["dies", "hangs"])
def test_the_watchdog_of_nccl_names_rank_and_collective(fault, device, tmp_path):
    """Where the host does not wait for NCCL, as under a CUDA graph."""
    if device.type != "cuda":
        pytest.skip("gloo has none")
    need(device, 2)
    store = tmp_path / "store"
    _, processes = start(checks.meet, 2, store, fault, "cuda", False)
    log = Path(f"{store}.0")
    # torch gathers through a coalesced call, and names the op in the stack beneath
    named = r"(?s)Rank 0\] Watchdog caught collective operation timeout: WorkNCCL\(.*all_gather"
    said, end = "", time.monotonic() + 120
    while not re.search(named, said) and time.monotonic() < end:
        time.sleep(0.2)
        said = log.read_text() if log.exists() else ""
    assert re.search(named, said), said[-4000:]
    for process in processes:
        process.kill()


def test_the_bench_checks_and_times_every_row(tmp_path, monkeypatch):
    """torchrun -m custom.bench.parallel, at sizes for a CPU; and the page made of its rows."""
    table = tmp_path / "parallel.csv"
    command = "-m torch.distributed.run --standalone --nproc-per-node 2 -m custom.bench.parallel"
    options = ["--device", "cpu", "--quick", "--csv", str(table)]
    done = subprocess.run(
        [sys.executable, *command.split(), *options],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    rows = bench.read_rows(table)
    assert len(rows) == 12 and all(row.what in done.stdout and row.ranks == 2 for row in rows)
    one, *ways = rows[:4]
    assert [way.held / one.held for way in ways] == [1, (1 + 128 / 704) / 2, 0.5]
    for way in ways:
        assert way.moved == sum(bytes_ for _, bytes_ in cards.moved(way.what, 2, bench.QUICK))


def test_the_module_stays_thin():
    tree = ast.parse((ROOT / "custom/parallel/attention.py").read_text())
    assert sum(isinstance(node, ast.stmt) for node in ast.walk(tree)) < 160


def test_other_numbers_of_cards(tmp_path, monkeypatch):
    """Times that follow the page's model are found again, and more cards cost what they should."""
    link = cards.Link(dict.fromkeys(bench.LINKS, 4.0), dict.fromkeys(bench.LINKS, 1e5), 1e5, 0.0)
    rows = []
    for context in bench.FULL.contexts:
        alone = 296.0 + 4 * context / bench.FULL.contexts[0]
        rows.append(bench.Row("one card", 32, context, alone, 0.0, 0.0, 0.0, 1408.0))
        for number, way in enumerate(cards.WAYS):
            sent = sum(link.time(name, x, 2) for name, x in cards.moved(way, 2))
            times = (200.0 + 50 * number, sent, 10.0 * number)
            rows.append(bench.Row(way, 32, context, *times, 0.0, 1408.0))
    rows += [
        bench.Row(f"indexer, {x}", 1, 2**17, 9e3 / n, 0, 0, 0)
        for n, x in ((1, "one card"), (2, ""))
    ]
    for name in bench.LINKS:
        rows += [
            bench.Row(name, 0, 0, 0, link.time(name, x, 2), 0, 0, moved=x) for x in (100, 10**7)
        ]
    bench.write_rows(tmp_path / "parallel.csv", [replace(x, ranks=2, device="card") for x in rows])
    monkeypatch.setattr(cards, "FIGURES", tmp_path)
    found = cards.nccl(cards.measured())
    assert found.latency == pytest.approx(link.latency, rel=1e-3)
    assert found.rate == pytest.approx(link.rate, rel=1e-3)
    # 300 on one card and 200 on two: a third is done by every card
    for cards_, expected in ((2, 200), (4, 150), (64, 100 + 200 / 64)):
        compute, *_ = cards.projected(cards.measured(), "TP", 2**16, cards_, found)
        assert compute == pytest.approx(expected, rel=1e-3)
    merges = [cards.projected(cards.measured(), way, 2**16, 8, found)[2] for way in cards.WAYS]
    assert merges == [0, 10, 10 + 10 * 8 / 2]
    # of which all_gather hides what the indexer takes: 4 on a card that has all keys
    for way, less in zip(cards.WAYS, (0, 4, 4 / 8), strict=True):
        _, waited, _ = cards.projected(cards.measured(), way, 2**16, 8, found)
        sent = sum(found.time(name, x, 8) for name, x in cards.moved(way, 8))
        assert waited == pytest.approx(sent - less)
    text = cards.figures() + cards.projection()
    assert "rows of the indexer: 2.00x" in text and "| 1.16M |" in text
    assert "TP pays in time up to" in text
    cards.draw()
    assert (tmp_path / "parallel.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            RuntimeError("closed by peer\nat 1"),
            "another rank ended.*Its gloo says: closed by peer$",
        ),
        (RuntimeError(""), "another rank ended.*Its gloo says: nothing$"),
        (dist.DistBackendError("NCCL error"), "another rank ended.*Its gloo says: NCCL error$"),
        (torch.OutOfMemoryError("Tried to allocate 20 GiB"), "^Tried to allocate 20 GiB$"),
        (NotImplementedError("no such kernel"), "^no such kernel$"),
    ],
)
def test_an_error_of_a_collective_keeps_its_type(error, said, monkeypatch):
    """Another rank is to blame for what the group says, not for what is out of memory here."""
    for name, value in dict(get_rank=0, get_world_size=2, get_backend="gloo").items():
        monkeypatch.setattr(dist, name, lambda group, value=value: value)

    def call():
        raise error

    with pytest.raises(type(error), match=said) as caught:
        collectives._named("all_gather", call, None)
    assert type(caught.value) is type(error)
