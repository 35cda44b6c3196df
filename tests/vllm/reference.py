# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Checkpoints, and Hugging Face's greedy tokens of the prompts beside them, in float32.

    python -m tests.vllm.reference FOLDER COUNT NAME...

In a process of its own: vLLM puts its own configurations into Transformers.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from .checkpoints import make, prompts


def main(folder: Path, count: int, names: list[str]) -> None:
    for name in names:
        model = make(folder, name)
        tokens = [
            model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=count,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )[0, len(prompt) :].tolist()
            for prompt in prompts()
        ]
        (folder / f"{name}.json").write_text(json.dumps(tokens))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
