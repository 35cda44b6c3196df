# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What the decoding examples share: how they begin, two ways to decode with a server of theirs,
timed, and weights as checkpoints of 8 bits keep them.

A server has `forward(tokens, lengths)`: logits [B, S, V] of the last S tokens of requests that are
`lengths` [B] long with them.
"""

import copy
import time

import torch
from _device import choose_device
from _options import decoding
from tqdm import tqdm

from custom.integrations.dsa import load_as_it_is


def announce(model, options, lengths, of):
    """What is served, and that the indexer selects among `of`."""
    print(
        f"\n{str(model.dtype).removeprefix('torch.')}: {options.batch} requests of "
        f"{int(lengths.min())} to {int(lengths.max())} tokens, {options.new_tokens} new ones each, "
        f"top-{model.config.index_topk} of the {of}; weights {options.weights}, caches "
        f"{options.caches}"
    )


def timed(title, server, decode, prompts, lengths, extra, new, quiet=False):
    """What `decode` gives after a prefill of the prompts; prints the speed of both."""
    begin = time.perf_counter()
    first = server.forward(prompts, lengths)[:, -1]
    int(first.argmax())  # wait for the device
    middle = time.perf_counter()
    with tqdm(total=new - 1, desc=f"  {title}", unit="token", leave=False) as bar:
        out = decode(server, first, lengths, extra, bar)
    int(out[0].argmax())
    end = time.perf_counter()
    if not quiet:
        prefill = int(lengths.sum()) / (middle - begin)
        decoded = len(lengths) * (new - 1) / (end - middle)
        print(f"  {title}: prefill {prefill:.0f} tokens/s, decode {decoded:.0f} tokens/s")
    return out


def print_answers(tokenizer, prompts, tokens):
    """Of the first request and of the last."""
    for b in (0, len(prompts) - 1):
        said = tokenizer.decode(prompts[b, -12:]), tokenizer.decode(tokens[b])
        print(f"  request {b}: ...{said[0]!r} -> {said[1]!r}")


def generate(server, first, lengths, new, bar):
    """Greedy tokens [B, new] and their logits [B, new, V], one token a step, from the `first`."""
    logits = [first]
    for _ in range(new - 1):
        lengths = lengths + 1
        logits.append(server.forward(logits[-1].argmax(-1, keepdim=True), lengths)[:, -1])
        bar.update()
    logits = torch.stack(logits, 1)
    return logits.argmax(-1), logits


def verify_drafts(server, first, lengths, known, bar):
    """The same logits [B, new, V], two tokens a step: a known one, and a draft of the next.

    Every third draft is spoiled and thus rejected, at another step in every request: such a request
    advances by one token, and its next step overwrites the draft's keys.
    """
    requests, new = known.shape
    rows = torch.arange(requests, device=known.device)
    logits = first.new_empty(requests, new + 1, first.shape[-1])
    logits[:, 0] = first
    done, steps = torch.ones_like(lengths), 0
    while int(done.min()) < new:
        at = (done - 1).clamp(max=new - 2).long()
        token, draft = known[rows, at], known[rows, at + 1]
        accepted = (rows + steps) % 3 != 0
        fed = torch.stack([token, draft.where(accepted, draft ^ 1)], 1)
        out = server.forward(fed, (lengths + at + 2).to(lengths.dtype))
        logits[rows, at + 1] = out[:, 0]
        logits[rows[accepted], at[accepted] + 2] = out[accepted, 1]
        done, steps = (at + 2 + accepted).clamp(max=new), steps + 1
        bar.update(int(done.min()) - 1 - bar.n)
    return logits[:, :new], steps


def as_checkpoint(weight, kind):
    """A weight [N, K] as checkpoints keep it: by name, and what it stands for."""
    w = weight.float()
    if kind == "int8":  # a scale for each row: compressed-tensors, msmodelslim
        scale = w.abs().amax(1, keepdim=True) / 127
        values = (w / scale).round().to(torch.int8)
        return dict(weight=values, weight_scale=scale), values.float() * scale
    rows, columns = w.shape  # DeepSeek: a scale for 128 x 128
    tiles = torch.nn.functional.pad(w, (0, -columns % 128, 0, -rows % 128))
    tiles = tiles.unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
    scale = tiles.abs().amax((1, 3)) / 448
    values = (tiles / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    stands = (values.float() * scale[:, None, :, None]).flatten(2).flatten(0, 1)
    values = values.flatten(2).flatten(0, 1)[:rows, :columns].contiguous()
    return dict(weight=values, weight_scale_inv=scale), stands[:rows, :columns]


def quantize_weights(layer, names, kind):
    """These projections of its attention in 8 bits, as `layer.quantized`; the attention itself gets
    what they stand for."""
    tensors = {}
    for name in names:
        linear = layer.self_attn.get_submodule(name)
        named, stands = as_checkpoint(linear.weight, kind)
        tensors |= {f"{name}.{leaf}": tensor for leaf, tensor in named.items()}
        linear.weight.copy_(stands)
    quantized = copy.deepcopy(layer.self_attn)
    load_as_it_is(quantized, tensors)
    object.__setattr__(layer, "quantized", quantized)  # no part of the model


def begin(doc):
    """The options, the device, the dtypes to run one after the other, and whether anything is of 8
    bits."""
    options = decoding(doc)
    device = choose_device(options.device)
    if device == "cpu":
        torch.set_num_threads(1)  # in matrices this small threads mostly wait for each other
    quantized = options.weights != "bf16" or options.caches != "bf16"
    dtypes = [options.dtype] if options.dtype != "auto" else ["bfloat16"]
    if options.dtype == "auto" and device == "cpu" and not quantized:
        dtypes = ["float32", "bfloat16"]
    return options, device, [getattr(torch, dtype) for dtype in dtypes], quantized
