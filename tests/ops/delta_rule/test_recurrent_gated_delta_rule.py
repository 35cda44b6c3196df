# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""torch_npu's decode of the gated delta rule, against loops over scalars."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import custom

from ...support.accuracy import assert_close_to_float64, every_dtype, skip_unless_taken
from ...support.calls import assert_refuses, by_change, runs_once
from ...support.drawn import drawn, ints

OP = "npu_recurrent_gated_delta_rule"
pytestmark = pytest.mark.usefixtures("one_thread")
SLOTS = 9


@dataclass(frozen=True)
class Call:
    lengths: tuple[int, ...] | None = (1, 1)
    slots: tuple[int, ...] = (3, 0)
    N: int = 2
    Nv: int = 4
    Dk: int = 32
    Dv: int = 16
    T: int | None = None  # more tokens than the lengths add up to
    accepted: tuple[int, ...] | None = None
    gates: str = "g beta"
    state: torch.dtype | None = None
    gap: int = 0  # numbers between the slots
    scale: float | None = 0.25

    def arguments(self) -> dict[str, Any]:
        T = len(self.slots)

        size = self.Nv * self.Dv * self.Dk
        state = drawn(SLOTS, size + self.gap)[:, :size].view(SLOTS, self.Nv, self.Dv, self.Dk)
        g, gk = -drawn(T, self.Nv).abs(), -drawn(T, self.Nv, self.Dk).abs()
        g[:1] = -120.0  # nothing stays
        return dict(
            query=drawn(T, self.N, self.Dk),
            key=torch.nn.functional.normalize(drawn(T, self.N, self.Dk), dim=-1),
            value=drawn(T, self.Nv, self.Dv),
            state=state,
            beta=drawn(T, self.Nv).sigmoid() if "beta" in self.gates else None,
            scale=self.scale,
            actual_seq_lengths=ints(self.lengths),
            ssm_state_indices=ints(self.slots),
            num_accepted_tokens=ints(self.accepted),
            g=g if "g" in self.gates.split() else None,
            gk=gk if "gk" in self.gates.split() else None,
        )

    def moved(self, x: dict[str, Any], dtype: torch.dtype, device: Any) -> dict[str, Any]:
        def one(name: str, y: Any) -> Any:
            if not isinstance(y, Tensor):
                return y
            if not y.dtype.is_floating_point:
                return y.to(device)
            kind = dtype
            if name in ("g", "gk") and dtype is not torch.float64:
                kind = torch.float32
            if name == "state" and self.state is not None and dtype is not torch.float64:
                kind = self.state
            made = torch.empty_strided(y.shape, y.stride(), dtype=kind, device=device)
            return made.copy_(y)

        return {name: one(name, y) for name, y in x.items()}


CASES = [
    Call(),
    Call(lengths=(3, 1, 2), slots=(3, 0, 8, 5, 2, 7)),
    Call(lengths=(3, 1, 2), slots=(3, 0, 8, 5, 2, 7), accepted=(3, 1, 2), gates="gk beta"),
    Call(lengths=(3, 2), slots=(3, 0, 8, 2, 7), accepted=(-5, 2**31 - 1), gap=12),
    Call(lengths=(2, 2), slots=(-1, 4, 6, SLOTS), accepted=(1, 2), gates="g gk beta"),
    Call(lengths=(2, 0, 2), slots=(1, 1, 6, 6), gates="beta", scale=None),
    Call(lengths=(2, 1), slots=(1, 2, 6, -1, 5), gates="g"),
    Call(lengths=(2, 2**31 - 1), slots=(1, 2, 6, 3), gates="", accepted=(2, 1)),
    Call(lengths=None, slots=(1, 2, 6)),
    # more than are added up at a time
    Call(lengths=(1,) * 140, slots=(2, *(-1,) * 138, 4), Nv=2, N=1),
    Call(lengths=(2, 2), slots=(1, 2, 6, 3), state=torch.float32, N=1, Nv=3, Dk=24, Dv=20),
    Call(lengths=(3, 3), slots=(1, 2, 6, 3, 0, 4), N=1, Nv=66, Dk=64, Dv=64, state=torch.bfloat16),
    Call(lengths=(), slots=()),
]


def by_scalars(x: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """(out, state): one number after the other, over the heads' vectors."""
    out, state = torch.zeros_like(x["value"]), x["state"].clone()
    T, Nv, Dv = x["value"].shape
    Dk, group = x["key"].shape[-1], Nv // x["query"].shape[1]
    lengths = [T] if x["actual_seq_lengths"] is None else x["actual_seq_lengths"].tolist()
    slots = x["ssm_state_indices"].tolist()
    scale = Dk**-0.5 if x["scale"] is None else x["scale"]
    wide = torch.promote_types(x["query"].dtype, torch.float32)
    start = 0
    for n, asked in enumerate(lengths):
        length = min(asked, T - start)
        if length == 0:
            continue
        kept = 1 if x["num_accepted_tokens"] is None else int(x["num_accepted_tokens"][n])
        from_slot = slots[start + min(max(kept, 1), length) - 1]
        for head in range(Nv):
            S = torch.zeros(Dv, Dk, dtype=wide)
            if 0 <= from_slot < SLOTS:
                S = x["state"][from_slot, head].to(wide)
            for t in range(start, start + length):
                q, k = (x[name][t, head // group].to(wide) for name in ("query", "key"))
                faded = S
                if x["g"] is not None:
                    faded = faded * math.exp(float(x["g"][t, head]))
                if x["gk"] is not None:
                    faded = faded * x["gk"][t, head].to(wide).exp()
                rate = 1.0 if x["beta"] is None else float(x["beta"][t, head])
                change = rate * (x["value"][t, head].to(wide) - faded @ k)
                S = faded + change[:, None] * k
                out[t, head] = (S @ (scale * q)).to(out.dtype)
                if 0 <= slots[t] < SLOTS:
                    state[slots[t], head] = S.to(state.dtype)
        start += length
    return out, state


@every_dtype
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_scalar_loops(case, dtype, device, backend):
    if dtype is not torch.float32:
        skip_unless_taken(dtype, device, backend)
    drawn = case.arguments()
    plain = case.moved(drawn, dtype, "cpu")
    exact = case.moved(plain, torch.float64, "cpu")
    given = case.moved(plain, dtype, device)
    with runs_once(OP, backend):
        out = custom.npu_recurrent_gated_delta_rule(**given)
    want, wanted_state = by_scalars(exact)
    rounded, rounded_state = by_scalars(plain)
    assert_close_to_float64("out", out, rounded, want)
    assert_close_to_float64("state", given["state"], rounded_state, wanted_state)
    for slot in set(range(SLOTS)) - set(case.slots):
        assert torch.equal(given["state"][slot].cpu(), plain["state"][slot])


def test_drafts_that_were_refused_leave_nothing(device, backend):
    """Three tokens a call, of which 2, 1 and 3 are kept: the outputs of the kept ones are those of
    a sequence that never saw the others."""
    N, Nv, D, S = 2, 4, 16, 3
    states = torch.zeros(S, Nv, D, D, device=device)
    slots, lengths = torch.arange(S, device=device), torch.tensor([S], device=device)
    accepted, tokens, outs = 1, [], []
    for count in (2, 1, 3):
        draft = {
            "query": torch.randn(S, N, D).half(),
            "key": torch.nn.functional.normalize(torch.randn(S, N, D), dim=-1).half(),
            "value": torch.randn(S, Nv, D).half(),
            "g": -torch.rand(S, Nv),
        }
        draft = {name: x.to(device) for name, x in draft.items()}
        out = custom.npu_recurrent_gated_delta_rule(
            state=states,
            actual_seq_lengths=lengths,
            ssm_state_indices=slots,
            num_accepted_tokens=torch.tensor([accepted], device=device),
            **draft,
        )
        tokens.append({name: x[:count] for name, x in draft.items()})
        outs.append(out[:count])
        accepted = count
    whole = {name: torch.cat([part[name] for part in tokens]) for name in tokens[0]}
    want, _ = custom.npu_chunk_gated_delta_rule(**whole)
    torch.testing.assert_close(torch.cat(outs), want, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (dict(ssm_state_indices=None), "`ssm_state_indices` is None"),
        (dict(ssm_state_indices=torch.zeros(3).int()), "`ssm_state_indices` has shape"),
        (dict(state=torch.zeros(9, 4, 32, 16)), "`state` has shape"),
        (dict(state=torch.zeros(1, 4, 16, 32).expand(9, 4, 16, 32)), "states overlap"),
        (dict(scale=-1.0), "`scale` is -1.0"),
        (dict(num_accepted_tokens=torch.ones(1).int()), "`num_accepted_tokens` has shape"),
        (dict(gk=torch.zeros(2, 4)), "`gk` has shape"),
        (dict(value=torch.zeros(2, 3, 16, dtype=torch.float64)), "3 heads and `query` 2"),
    ],
    ids=by_change,
)
def test_errors(change, sentence):
    arguments = Call().arguments() | change
    kept = arguments["state"].clone()
    assert_refuses(OP, arguments, ValueError, sentence)
    assert torch.equal(arguments["state"], kept)


@pytest.mark.parametrize("accepted", [(3, 4), (0, 1), (1, -1)], ids=str)
def test_debug_finds_a_token_that_a_sequence_does_not_have(accepted, monkeypatch):
    monkeypatch.setattr(custom.config, "debug", True)
    arguments = Call(lengths=(1, 3), slots=(0, 4, 5, 6), accepted=(1, 3)).arguments()
    custom.npu_recurrent_gated_delta_rule(**arguments)
    kept = arguments["state"].clone()
    arguments["num_accepted_tokens"] = torch.tensor(accepted)
    with pytest.raises(ValueError, match=rf"{OP}: `num_accepted_tokens` is \[{accepted[0]}, "):
        custom.npu_recurrent_gated_delta_rule(**arguments)
    assert torch.equal(arguments["state"], kept)


def test_debug_finds_states_of_two_sequences(monkeypatch):
    monkeypatch.setattr(custom.config, "debug", True)
    arguments = Call(lengths=(2, 2), slots=(1, 1, 6, 1)).arguments()
    with pytest.raises(ValueError, match="has slot 1 in two sequences"):
        custom.npu_recurrent_gated_delta_rule(**arguments)
    arguments["actual_seq_lengths"] = torch.tensor([3, 2])
    with pytest.raises(ValueError, match="adds up to 5"):
        custom.npu_recurrent_gated_delta_rule(**arguments)
