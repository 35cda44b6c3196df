# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Every op gives the same bits every time, or says under what flag (docs/numerics.md)."""

from __future__ import annotations

import torch
from custom.dispatch.register import overload
from custom.dispatch.registry import BY_NAME

from custom.bench.presets import presets
from docs.numerics import ANY_ORDER

from ..support.accuracy import skip_unless_taken
from ..support.calls import assert_same, every_spec, everything
from ..support.samples import sample

TIMES = 5


@every_spec
def test_same_bits(spec, device, backend):
    """Of its sample, of the bench's small rows, and on a GPU of the first of the large ones."""
    dtype = torch.bfloat16
    skip_unless_taken(dtype, device, backend)
    calls = [sample(spec.name, device, dtype)]
    calls += [case.make(device, 0) for case in presets(spec.name, "cpu")]
    if device.type == "cuda":
        calls += [case.make(device, 0) for case in presets(spec.name, "cuda")[:1]]
    torch.use_deterministic_algorithms(spec.name in ANY_ORDER, warn_only=True)
    try:
        with torch.no_grad():
            for arguments in calls:
                first = everything(spec, overload(spec), arguments)
                for _ in range(TIMES - 1):
                    assert_same(everything(spec, overload(spec), arguments), first)
    finally:
        torch.use_deterministic_algorithms(False)


def test_what_has_no_order_is_an_op():
    assert ANY_ORDER.keys() <= BY_NAME.keys()
