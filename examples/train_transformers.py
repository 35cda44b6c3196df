# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Train a Hugging Face model with our ops and without: equal losses, both speeds.

    python examples/train_transformers.py [--model kimi-linear] [--device cuda --wide --tokens 4096]

Linear attention is by our ops, then by Transformers' own PyTorch.  The model has random weights and
learns one text by heart.  `--wide` gives its layers the width and
the heads of Qwen3.5-4B and of Kimi-Linear-48B-A3B, of which it has two.
"""

from _options import training

if __name__ == "__main__":  # what is wrong is said before the imports, which take seconds
    training(__doc__)

import time
from contextlib import nullcontext
from pathlib import Path

import torch
from _device import choose_device, print_backends
from transformers import (
    KimiLinearConfig,
    KimiLinearForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    logging,
)

from custom.integrations.transformers import use

TEXT = Path(__file__).with_name("public_domain.txt").read_bytes()
LAYERS = 2  # of linear attention


def sizes(hidden):
    return dict(
        vocab_size=256,
        hidden_size=hidden,
        intermediate_size=hidden,
        num_hidden_layers=LAYERS,
        layer_types=["linear_attention"] * LAYERS,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


def make_qwen(wide):
    return Qwen3_5ForCausalLM(
        Qwen3_5TextConfig(
            **sizes(2560 if wide else 64),
            linear_num_key_heads=16 if wide else 2,
            linear_num_value_heads=32 if wide else 4,
            linear_key_head_dim=128 if wide else 32,
            linear_value_head_dim=128 if wide else 32,
        )
    )


def make_kimi_linear(wide):
    return KimiLinearForCausalLM(
        KimiLinearConfig(
            **sizes(2304 if wide else 64),
            linear_num_heads=32 if wide else 4,
            linear_head_dim=128 if wide else 32,
            mlp_layer_types=["dense"] * LAYERS,
        )
    )


MODELS = {"qwen3.5": make_qwen, "kimi-linear": make_kimi_linear}


def train(options, device, dtype, context):
    """The losses, and the steps in a second without the first two, which compile."""
    torch.manual_seed(0)
    model = MODELS[options.model](options.wide).to(device, dtype).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4 if options.wide else 3e-3)
    text = (TEXT * (1 + options.tokens // len(TEXT)))[: options.tokens]
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().to(device)[None]
    losses = []
    with context:
        for step in range(options.steps + 2):
            if step == 2:
                losses[-1].item()  # waits for the device
                began = time.perf_counter()
            loss = model(tokens, labels=tokens, use_cache=False).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        losses = torch.stack(losses).tolist()
    return losses, options.steps / (time.perf_counter() - began)


def main() -> None:
    options = training(__doc__)
    logging.set_verbosity_error()
    device = choose_device(options.device)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    (ours, rate), (own, own_rate) = (
        train(options, device, dtype, context) for context in (use(), nullcontext())
    )
    for step, (a, b) in enumerate(zip(ours, own, strict=True)):
        print(f"step {step:2d}  loss {a:.4f}  Transformers' own {b:.4f}")
    print(f"{rate:.2f} steps a second, {own_rate:.2f} by Transformers' own PyTorch")
    assert ours[-1] < ours[0], "the model has not learned"
    far = max(abs(a - b) / b for a, b in zip(ours, own, strict=True))
    assert far < (1e-4 if device == "cpu" else 0.05), f"the losses differ by {far:.1%}"
    print_backends()


if __name__ == "__main__":
    main()
