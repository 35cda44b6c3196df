# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Checkpoints, and greedy tokens of the prompts beside them, in float32: NAME.json.

    python -m tests.vllm.reference FOLDER COUNT NAME...

Hugging Face's, or of models NAME_one those of our own decode loop with caches of 8 bits, which
examples/deepseek_v32_decode.py holds against Hugging Face's.
In a process of its own: vLLM puts its own configurations into Transformers.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from .checkpoints import make, prompts

sys.path.append(str(Path(__file__).parents[2] / "examples"))


def our_loop(model: Any, prompt: list[int], count: int) -> list[int]:
    from deepseek_v32_decode import Server

    server = Server(model, 1, len(prompt) + count, caches="fp8")
    tokens, asked = [], prompt
    with torch.no_grad():
        for length in range(len(prompt), len(prompt) + count):
            logits = server.forward(torch.tensor([asked]), torch.tensor([length]))
            asked = logits[0, -1:].argmax(-1).tolist()
            tokens += asked
    return tokens


def their_loop(model: Any, prompt: list[int], count: int) -> list[int]:
    tokens: list[int] = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )[0, len(prompt) :].tolist()
    return tokens


def main(folder: Path, count: int, names: list[str]) -> None:
    for name in names:
        model = make(folder, name)
        loop = our_loop if name.endswith("_one") else their_loop
        tokens = [loop(model, prompt, count) for prompt in prompts()]
        (folder / f"{name}.json").write_text(json.dumps(tokens))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
