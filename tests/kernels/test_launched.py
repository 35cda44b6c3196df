# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What CUDA launchers launch and how they cut a call, on five GPUs that are not there: what
tests/records/generated/launched.json and choices.json have, nothing else."""

from __future__ import annotations

import pytest
import torch
from custom.dispatch import backends, register
from custom.dispatch.registry import BY_NAME

pytest.importorskip("triton")

from custom.cuda_ops.common import gpu
from custom.cuda_ops.common.loss import LARGEST_D

from ..support import choices, launched
from ..support.pretended_gpu import pretended
from ..support.samples import sample

if gpu.INTERPRETED or gpu.without_gluon():
    pytest.skip("needs a compiling Triton with a whole Gluon", allow_module_level=True)


@pytest.mark.parametrize("spec", launched.OPS, ids=lambda spec: spec.name)
def test_launchers_launch_what_they_did(spec):
    kept = launched.read().get(spec.name, {})
    meant = "; if that is meant: python -m tests.support.launched"
    labels = set()
    for label, found in launched.everywhere(spec):
        labels.add(label)
        now = {there: launched.short(told) for there, told in found.items()}
        told = "\n".join(line for lines in found.values() for line in lines)
        assert now == kept.get(label), f"{label}{meant}\n{told}"
    assert labels == set(kept), meant


@pytest.mark.parametrize("place", choices.PLACES)
def test_calls_are_cut_as_they_were(place):
    kept, now = choices.read()[place], choices.chosen(place)
    for name in kept.keys() | now.keys():
        meant = f"{name}; if that is meant: python -m tests.support.choices"
        assert now.get(name) == kept.get(name), meant


@pytest.mark.parametrize("rope", [0, 64])
@pytest.mark.parametrize(
    "op", ["npu_indexer_loss", "npu_sparse_lightning_indexer_grad_kl_loss"], ids=str
)
def test_latents_of_576_run_with_and_without_a_rope_beside_them(op, rope):
    """Its columns count only where it is given."""
    rank = LARGEST_D - rope
    first = sample(op, torch.device("cpu"), torch.bfloat16)
    changed: dict[str, torch.Tensor | None] = {}
    for name in ("query", "key"):
        sizes = first[name].shape[:-1]
        changed[name] = first[name].new_empty(*sizes, rank)
        changed[f"{name}_rope"] = first[name].new_empty(*sizes, rope) if rope else None
    spec = BY_NAME[op]
    found = backends.launcher(backends.CUDA, spec)
    wider = first["query"].new_empty(*first["query"].shape[:-1], rank + 1)
    with pretended(90):
        for query, said in ((changed["query"], None), (wider, f"D={LARGEST_D + 1}, supported")):
            given = register.bind(
                register.overload(spec)._schema, (), first | changed | dict(query=query)
            )
            reason = found.unsupported(**given)
            assert reason is None if said is None else reason.startswith(said)
