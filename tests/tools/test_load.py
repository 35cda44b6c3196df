# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""A minute of what `python -m tests.tools.load` does for an hour; and that it finds mistakes."""

from __future__ import annotations

import pytest
import torch

from . import load


def test_a_minute_of_decode(device, capsys):
    steps = "120" if device.type == "cpu" else "3000"
    assert load.main(["--device", device.type, "--steps", steps]) == 0
    said = capsys.readouterr().out
    assert "the same bits twice" in said and "memory of the device +0" in said


def _drifts(step):
    step.states.mul_(1 + 1e-3)


def _forgets(step):
    step.states[step.slots[:1].long()] *= 0.5


def _writes_elsewhere(step):
    step.kv_cache[-1, -1] += torch.rand(1, device=step.kv_cache.device)


@pytest.mark.parametrize(
    "fault, said",
    [
        (_drifts, "float64"),
        (_forgets, "float64"),
        (_writes_elsewhere, "other bits the second time"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_what_goes_wrong_is_found(fault, said, monkeypatch):
    right = load.Step.forward

    def wrong(step, active):
        out = right(step, active)
        fault(step)
        return out

    monkeypatch.setattr(load.Step, "forward", wrong)
    with pytest.raises(AssertionError, match=said):
        load.main(["--device", "cpu", "--steps", "60"])
