# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""How far tokens of a model with projections of 8 bits may be from those of what it stands for.

    python -m tests.vllm.rounding CHECKPOINT TOKENS VERDICTS

TOKENS and VERDICTS are files: those of all prompts, and for each of them how far its logit lies
below the best one, given the same text, and how far it may.

Weights are exact; what they meet is rounded to e4m3 in tiles of 128, each number by up to half of
a step.  The errors are small and independent: that of a difference of two logits has a variance of
the squares of its derivatives times a step, over 12, added up, and six of its sigmas are allowed.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..support import quantization
from .checkpoints import make, projections, prompts

SIGMAS = 6


def steps(x: Tensor) -> Tensor:
    """Of [.., K], what lies between numbers of 8 bits where it is."""
    values, scale = quantization.activations(x.detach().flatten(0, -2), "fp8")
    exponents = values.double().abs().clamp(min=2.0**-6).log2().floor() - 3
    return quantization.stands_for(exponents.exp2(), scale).view(x.shape)


def verdicts(model: Any, text: list[int], output: list[int]) -> list[tuple[float, float]]:
    """(how far below, how far at most) of each token."""
    met: list[Tensor] = []

    def watched(_: Any, given: tuple[Tensor, ...]) -> None:
        met.append(given[0])

    hooks = [each.register_forward_pre_hook(watched) for each in projections(model)]
    logits = model(torch.tensor([text + output[:-1]]), use_cache=False).logits[0]
    for hook in hooks:
        hook.remove()
    by = [steps(x) for x in met]
    found = []
    for row, token in zip(logits[-len(output) :], output, strict=True):
        below = row.max() - row[token]
        variance = 0.0
        if below > 0:
            # nothing depends on the scores of an indexer that selects all
            slopes = torch.autograd.grad(below, met, retain_graph=True, allow_unused=True)
            each = [
                slope * step for slope, step in zip(slopes, by, strict=True) if slope is not None
            ]
            variance = sum(float(error.square().sum()) for error in each)
        found.append((float(below.detach()), SIGMAS * (variance / 12) ** 0.5))
    return found


def main(checkpoint: Path, tokens: Path, answers: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = make(Path(folder), checkpoint.name)
    texts = zip(prompts(), json.loads(tokens.read_text()), strict=True)
    answers.write_text(json.dumps([verdicts(model, *each) for each in texts]))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
