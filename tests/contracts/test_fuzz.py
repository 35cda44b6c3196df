# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""A few random calls of every op (python -m tests.fuzz makes more), and those that once failed."""

from __future__ import annotations

import math
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from custom.dispatch import backends
from custom.dispatch.reference.common import selection

from ..fuzz import illegal, legal
from ..fuzz import run as fuzz_run
from ..fuzz.build import build
from ..fuzz.draw import COMPILED, KIND, draw, models
from ..fuzz.run import LOST, run
from ..fuzz.shares import Shares
from ..fuzz.shrink import outcome, shrunk
from ..support.calls import every_spec

CASES = 50
CPU = torch.device("cpu")
CHECKS = {"legal": partial(legal.check, device=CPU), "illegal": illegal.check}
RAGGED = dict(disguises=[], layouts=("BSND", "BSND"), spare=0, mode=0)

# what python -m tests.fuzz has found
FOUND = [
    # values narrower than keys, in rows off 16 bytes: a fault of ptxas (docs/sanitizer.md)
    (
        "legal",
        dict(
            op="npu_fused_attention",
            seed=1664269745,
            dtype="float16",
            disguises=["offset"],
            b=0,
            groups=1,
            hk=1,
            rows=[33],
            keys=[28],
            spare=0,
            packed=True,
            d=24,
            dv=16,
            causal=True,
            window=1,
            places=1664269745,
            spoiling=1664269745,
        ),
    ),
    # a weight without columns: programs were divided by their number
    (
        "illegal",
        dict(
            op="npu_grouped_o_proj_pto",
            seed=648409413,
            dtype="float16",
            disguises=[],
            b=1,
            s=1,
            n=1,
            d=16,
            dr=0,
            groups=1,
            quant=0,
            places=588072829,
            spoiling=588072832,
        ),
    ),
    # no rotary channels: a part without elements has the address 0, which a plan took for an offset
    (
        "legal",
        dict(
            op="npu_latent_cache_write",
            seed=797682267,
            dtype="float16",
            disguises=["garbage", "offset"],
            b=1,
            s=4,
            eight="fp8",
            page=16,
            turned=True,
            power=True,
            clip=False,
            bare=True,
            places=340347892,
            spoiling=340347899,
        ),
    ),
    # no heads: divided by their number
    (
        "illegal",
        dict(
            op="npu_block_indexer",
            seed=100493312,
            dtype="float64",
            disguises=[],
            rows=[1],
            keys=[1],
            spare=0,
            shared=1,
            n=0,
            d=0,
            k=1,
            block=1,
            page=48,
            own=False,
            counts=False,
            sinks=False,
            forced=(1, 1),
        ),
    ),
    # sparse_block_size=2**31: gathered as many positions
    (
        "illegal",
        dict(
            op="npu_sparse_flash_attention",
            seed=947788274,
            dtype="float64",
            rows=[],
            keys=[],
            n=1,
            d=1,
            k=0,
            dr=1,
            block=0,
            own_value=False,
            sinks=False,
            **RAGGED,
        ),
    ),
    # a query without heads
    (
        "illegal",
        dict(
            op="npu_kv_quant_sparse_flash_attention_lse",
            seed=1089838665,
            dtype="float64",
            disguises=[],
            b=0,
            s=0,
        ),
    ),
    # scales [T] in place of [T, 1]
    (
        "illegal",
        dict(
            op="npu_lightning_indexer_prolog_pto",
            seed=870145361,
            dtype="float64",
            disguises=[],
            b=0,
            s=0,
        ),
    ),
    # NaN in a token of no sequence came out of the norm's gradient, and of the gate's
    (
        "legal",
        dict(
            op="npu_chunk_kda_grad",
            seed=581836912,
            dtype="float64",
            disguises=["garbage"],
            lengths=[1],
            packed=True,
            h=1,
            groups=1,
            k=1,
            v=1,
            before=0,
            behind=1,
            state=False,
            layout="vk",
            gate="bounded",
            bias=True,
            norm=True,
            rates=0,
        ),
    ),
    # a loss near zero, which the plain call gives with fewer roundings than it may have
    (
        "legal",
        dict(
            op="npu_indexer_loss",
            seed=1225636244,
            dtype="float32",
            disguises=["absent", "offset"],
            b=1,
            n=3,
            s=2,
            s2=30,
            d=64,
            dr=16,
            k=20,
            offset=3,
            lse=False,
        ),
    ),
    # a score's terms in another order: more off than the plain call's, by a rounding of their size
    (
        "legal",
        dict(
            op="npu_indexer_loss",
            seed=1703223978,
            dtype="float32",
            disguises=["offset"],
            b=2,
            n=4,
            s=4,
            s2=15,
            d=63,
            dr=0,
            k=6,
            offset=2,
            lse=True,
        ),
    ),
    # entries of two channels, whose norm cancels most of the gradient
    (
        "legal",
        dict(
            op="npu_compressor_dense_grad",
            seed=690273333,
            dtype="float32",
            disguises=["offset"],
            lengths=[5],
            start=0,
            spare=2,
            packed=False,
            h=40,
            d=2,
            dr=2,
            ratio=1,
            coff=2,
            pairs=False,
            full=False,
            ring=False,
            room=0,
            page=0,
            entry_page=0,
            pages="none",
            returned=False,
            hadamard=False,
            holes=False,
        ),
    ),
    # one key has the whole probability, so that its score's gradient is roundings of float32: those
    # of another alignment, and on a GPU those of another order
    (
        "legal",
        dict(
            op="npu_fused_attention_backward",
            seed=1598976053,
            dtype="float32",
            disguises=["offset"],
            b=1,
            groups=2,
            hk=2,
            rows=[32],
            keys=[1],
            spare=0,
            packed=False,
            d=16,
            dv=15,
            causal=True,
            window=0,
        ),
    ),
    (
        "legal",
        dict(
            op="npu_sparse_flash_attention_grad",
            seed=102280217,
            dtype="bfloat16",
            rows=[1],
            keys=[8],
            n=16,
            d=512,
            k=1,
            dr=64,
            block=1,
            own_value=False,
            sinks=False,
            of_sum=False,
            **RAGGED | dict(layouts=("TND", "TND"), mode=3),
        ),
    ),
]


@pytest.mark.parametrize("which, case", FOUND, ids=lambda x: x["op"] if isinstance(x, dict) else x)
def test_what_was_found(which, case):
    CHECKS[which](case)


@every_spec
def test_random_calls(spec):
    counts, found = run(spec.name, range(CASES), 7, "cpu")
    assert not found, "\n".join(found.values())
    assert counts["legal calls right"] == CASES
    assert counts["illegal calls ran"] + counts["illegal calls refused"] == CASES


def test_every_kind_of_case_is_drawn_and_named():
    for op in KIND:
        cases = [draw(op, number, 0, ["float32"]) for number in range(20)]
        assert cases == [draw(op, number, 0, ["float32"]) for number in range(20)]
        assert len({str(case) for case in cases}) == 20
        wide = [draw(op, number, 0, ["float16"], most=16) for number in range(200)]
        assert len({case["seed"] for case in wide}) == 200
        kernels = {str({n: x for n, x in case.items() if n in COMPILED}) for case in wide}
        assert models(op, 16) // 2 < len(kernels) <= models(op, 16)


@every_spec
def test_none_one_odd_and_many_tokens_are_drawn(spec):
    def tokens(case):
        if "starts" in case:  # of each request, as many steps as are used
            used = case["used"]
            return len(case["starts"]) * case["s"] if used is None else sum(used)
        if case.get("lengths") or ("lengths" in case and "t" not in case):
            return sum(case["lengths"])
        each = case["rows"] if "rows" in case else [case.get("t", case.get("s"))]
        return sum(each) if case.get("packed", "rows" in case) else case["b"] * each[0]

    every = [tokens(draw(spec.name, number, 0, ["float32"])) for number in range(400)]
    for some in (0, 1):
        assert 4 <= every.count(some) <= 120
    assert sum(count % 2 for count in every) > 60
    whole = KIND.get(spec.name) in ("layer", "step", "layer step")  # their steps have few
    assert max(every) >= (9 if whole else 33)


@pytest.mark.parametrize("op", KIND)
def test_wide_cases_are_legal(op):
    """Those of GPUs, by the reference."""
    for number in (1, 3):
        case = draw(op, number, 3, ["float32"], most=16)
        assert case != draw(op, number, 3, ["float32"])
        assert legal.check(case, CPU) == "right"
    for number in range(40):  # whatever of a model and of a case comes together
        build(draw(op, number, 3, ["float16"], most=16), torch.float16)


def test_a_lost_context_ends_a_run(monkeypatch):
    """No more is called on a device that does not answer."""

    def broken(*_):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    op = "npu_lightning_indexer"
    monkeypatch.setattr(backends.Runner, "ready", broken)
    monkeypatch.setattr(fuzz_run, "alive", lambda _: False)
    counts, found = run(op, range(50), 0, "cpu")
    assert list(found) == [LOST] and "illegal memory access" in found[LOST]
    assert counts == {"legal calls failed": 1}


@pytest.mark.parametrize("seconds", [math.inf, 1.0])
def test_every_case_is_in_one_share(seconds, capsys):
    """Failures are told once an op, and a lost process each time."""
    ops, taken = ["npu_sparse_attention_pto", "npu_hadamard"], []

    def runs(op, share, seed, device, *, seconds, known, most):
        taken.append((op, [*share]))
        found = {"legal A": f"{op} fails"} | ({LOST: f"{op} lost"} if 3 in share else {})
        return Counter(calls=len(share)), {n: x for n, x in found.items() if n not in known}

    shares = Shares(ops, range(100), 0, "cpu", seconds, print)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(shares.work, [runs] * 2))
    for op in ops:
        cases = sorted(case for of, share in taken for case in share if of == op)
        assert cases == [*range(100)] and shares.counts[op] == {"calls": 100}
        wide = [draw(op, case, 0, ["float16"], most=16) for case in taken[0][1]]
        assert len({case["places"] for case in wide}) == 1 or op != taken[0][0]
    said = capsys.readouterr().out.splitlines()
    assert sorted(said) == sorted(
        line for op in ops for line in (f"{op} fails", f"{op} lost", f"{op}: 100 calls")
    )
    if seconds < math.inf:  # by turns
        assert {op for op, _ in taken[:2]} == {*ops}


def test_what_the_seconds_leave_is_not_called(capsys):
    shares = Shares(["npu_hadamard"], range(100), 0, "cpu", 0.0, print)
    assert shares.run(1)
    assert capsys.readouterr().out == "npu_hadamard: not called\n"


def test_a_mistake_is_found_and_made_small(monkeypatch):
    """Keys behind a request's last one are read."""
    right = selection.slots

    def wrong(key, indices, block_size, rows, keys, numbers):
        for tokens, slot in right(key, indices, block_size, rows, keys, numbers):
            yield tokens, slot.clamp(min=0)

    monkeypatch.setattr(selection, "slots", wrong)
    op, check = "npu_sparse_flash_attention", CHECKS["legal"]
    drawn = (draw(op, number, 0, ["float32"]) for number in range(100))
    case = next(case for case in drawn if outcome(check, case)[0] == "failed")
    small, error = shrunk(check, case, outcome(check, case)[1])
    assert outcome(check, small)[0] == "failed" and str(error)
    assert sum(small["rows"]) <= sum(case["rows"]) and small["n"] == 1
    assert len(small["disguises"]) <= 1


def test_a_mistake_that_does_not_come_back_is_reported_as_it_came():
    came = ValueError("by chance")
    case = draw("npu_hadamard", 0, 0, ["float32"])
    assert shrunk(lambda _: "right", case, came) == (case, came)


def test_a_refusal_that_says_nothing_is_found(monkeypatch):
    def broken(*_):
        raise ValueError("no")

    monkeypatch.setattr(backends.Runner, "ready", broken)
    op = "npu_lightning_indexer"
    cases = [draw(op, number, 0, ["float32"]) for number in range(10)]
    errors = [outcome(illegal.check, case)[1] for case in cases]
    assert any("ValueError: no" in str(error) for error in errors)
