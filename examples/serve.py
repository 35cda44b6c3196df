# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Serve many requests at once with a GLM-5 model: continuous batching over paged caches.

    python examples/serve.py [PROMPTS | -] [--device cuda] [--drafts 2] [--help]

PROMPTS holds one prompt a line ("-": standard input; left out: pieces of a text). Requests are
admitted as soon as a row and pages are free; a long prompt goes in by chunks, between the decode
steps of the others; drafts are guessed from the text so far, and those that the model does not
confirm are taken back by writing over their keys. The decode step has fixed shapes, and is a
captured graph where the device has graphs. The model is small and random, so it babbles.
"""

import argparse
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import torch
from _device import DEVICES, choose_device, print_backends
from _glm5 import make_model
from _text import TEXT, make_tokenizer
from tqdm import tqdm

import custom
from custom.integrations.dsa import (
    SparseAttentionWeights,
    layer_widths,
    shared_attention_weights,
    sparse_attention_weights,
)
from custom.integrations.paged import PagedCaches, token_positions


@dataclass(eq=False)
class Request:
    prompt: list[int]
    new: int  # tokens to generate
    out: list[int] = field(default_factory=list)
    cached: int = 0  # positions whose keys are in the pages

    @property
    def text(self):
        return self.prompt + self.out

    @property
    def prefilling(self):
        return self.cached < len(self.prompt)

    def guess(self, count):
        """`count` drafts: what followed the last two tokens when they were there before."""
        text = self.text
        ends = range(len(text) - 1, 1, -1)
        end = next((i for i in ends if text[i - 2 : i] == text[-2:]), len(text))
        found = text[end : end + count]
        return found + [0] * (count - len(found))


class Engine:
    """Rows of a batch, each with a request or idle, over pages that all rows share."""

    def __init__(self, model, *, rows=8, pages=64, reach=16, page_size=16, chunk=32, drafts=2):
        """`reach`: pages of a request at most; `chunk`: tokens of a prompt that go in at once."""
        self.model, self.chunk, self.drafts = model, chunk, drafts
        layers = [layer.self_attn for layer in model.model.layers]
        self.weights = [
            (shared_attention_weights if each.indexer is None else sparse_attention_weights)(each)
            for each in layers
        ]
        self.caches = PagedCaches(
            len(layers),
            layer_widths(model.config),
            requests=1,
            capacity=pages * page_size,
            page_size=page_size,
            dtype=model.dtype,
            device=model.device,
        )
        self.rows, self.free = [None] * rows, deque(range(pages))
        self.waiting = deque()
        self.steps = self.confirmed = 0

        def ints(*shape, value=0):
            return torch.full(shape, value, dtype=torch.int32, device=model.device)

        step = ints(rows, 1 + drafts), ints(rows), ints(rows, reach, value=-1)
        self.tokens, self.lengths, self.table = step
        self.decode = self.forward
        if model.device.type != "cpu":  # all rows are idle: nothing is written
            self.decode = custom.graph_mode.capture(self.forward, *step)

    def forward(self, tokens, lengths, table):
        """The token that follows each of the last S tokens [B, S] of requests that are `lengths`
        long with them. Rows at negative positions are padding."""
        inner = self.model.model
        positions = token_positions(lengths, tokens.shape[1])
        slots = self.caches.slots(positions, table)
        hidden = inner.embed_tokens(tokens)
        cos, sin = inner.rotary_emb(hidden, positions.clamp(min=0))
        indices = None
        for layer, w, pools in zip(inner.layers, self.weights, self.caches.layers, strict=True):
            arguments = (
                layer.input_layernorm(hidden), w.dq, w.uq_qr, w.uk, w.dkv_kr, w.gamma_cq,
                w.gamma_ckv, sin, cos, slots, pools.kv, pools.kr, table, lengths,
            )  # fmt: skip
            if isinstance(w, SparseAttentionWeights):
                latent, indices = custom.npu_sparse_attention_indices_pto(
                    *arguments, w.idx_qb, w.idx_k, w.idx_proj, w.idx_gamma_k, w.idx_beta_k,
                    pools.index_k, **w.options,
                )  # fmt: skip
            else:  # attends to what the layer before it has selected
                latent = custom.npu_sparse_attention_shared_pto(*arguments, indices, **w.options)
            hidden = hidden + layer.self_attn.o_proj(w.values(latent))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return self.model.lm_head(inner.norm(hidden)).argmax(-1)

    def _pages(self, request):
        # the last drafts may lie behind the last token
        positions = len(request.prompt) + request.new + self.drafts
        return -(-positions // self.caches.page_size)

    def submit(self, prompt, new):
        request = Request(list(prompt), new)
        most = min(self.table.shape[1], self.caches.layers[0].kv.shape[0])
        if not prompt or new < 1 or self._pages(request) > most:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens and {new} new ones: expected at least one of "
                f"each, and at most {most * self.caches.page_size - self.drafts} together."
            )
        self.waiting.append(request)
        return request

    @property
    def busy(self):
        return bool(self.waiting) or any(self.rows)

    def step(self):
        """Admit, one chunk of a prompt, one decode step of all, retire; [(request, tokens)]."""
        for row, request in enumerate(self.rows):
            if request is None and self.waiting and self._pages(self.waiting[0]) <= len(self.free):
                self.rows[row] = request = self.waiting.popleft()
                pages = [self.free.popleft() for _ in range(self._pages(request))]
                self.table[row, : len(pages)] = torch.tensor(pages, device=self.table.device)
        news = [*self._prefill(), *self._decode()]
        for row, request in enumerate(self.rows):
            if request is not None and len(request.out) >= request.new:
                self.free.extend(page for page in self.table[row].tolist() if page >= 0)
                self.table[row] = -1
                self.rows[row] = None
        return news

    def _prefill(self):
        for row, request in enumerate(self.rows):
            if request is not None and request.prefilling:
                part = request.prompt[request.cached : request.cached + self.chunk]
                request.cached += len(part)
                out = self.forward(
                    torch.tensor([part], device=self.table.device),
                    torch.full_like(self.lengths[:1], request.cached),
                    self.table[row : row + 1],
                )
                if not request.prefilling:
                    return [(request, self._take(request, [int(out[0, -1])]))]
                return []
        return []

    def _decode(self):
        each = [
            (row, request)
            for row, request in enumerate(self.rows)
            if request is not None and not request.prefilling and len(request.out) < request.new
        ]
        if not each:
            return []
        tokens, lengths = torch.zeros_like(self.tokens, device="cpu"), [0] * len(self.rows)
        for row, request in each:
            fed = [request.out[-1], *request.guess(self.drafts)]
            tokens[row] = torch.tensor(fed)
            lengths[row] = request.cached + len(fed)
        self.tokens.copy_(tokens)
        self.lengths.copy_(torch.tensor(lengths))
        answers = self.decode(self.tokens, self.lengths, self.table).tolist()
        tokens, news = tokens.tolist(), []
        self.steps += len(each)
        for row, request in each:
            right = 0  # drafts that the model would have said itself
            while right < self.drafts and tokens[row][1 + right] == answers[row][right]:
                right += 1
            request.cached += 1 + right  # the keys behind are written over by the next step
            news.append((request, self._take(request, answers[row][: 1 + right])))
            self.confirmed += right
        return news

    def _take(self, request, tokens):
        tokens = tokens[: request.new - len(request.out)]
        request.out += tokens
        return tokens


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("prompts", nargs="?", help="a file with a prompt a line, or - for stdin")
    parser.add_argument("--device", choices=DEVICES, default="auto")
    parser.add_argument("--rows", type=int, default=8, help="requests that run at the same time")
    parser.add_argument("--pages", type=int, default=64, help="pages of 16 positions, for all")
    parser.add_argument("--chunk", type=int, default=32, help="tokens of a prompt at once")
    parser.add_argument("--drafts", type=int, default=2, help="guessed tokens a step")
    parser.add_argument("--new-tokens", type=int, default=32)
    options = parser.parse_args()
    device = choose_device(options.device)
    tokenizer = make_tokenizer()
    if options.prompts:
        read = sys.stdin.read if options.prompts == "-" else Path(options.prompts).read_text
        prompts = [line for line in read().splitlines() if line.strip()]
    else:
        prompts = [TEXT[at : at + 40 + 9 * (at % 23)] for at in range(0, 2400, 120)]
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    model = make_model(len(tokenizer)).to(device, dtype)
    sizes = {name: getattr(options, name) for name in ("rows", "pages", "chunk", "drafts")}
    with torch.inference_mode():
        engine = Engine(model, **sizes)
        requests = [engine.submit(tokenizer(p)["input_ids"], options.new_tokens) for p in prompts]
        shown = [0] * len(requests)
        begin = time.perf_counter()
        with tqdm(total=len(prompts) * options.new_tokens, unit="token") as bar:
            while engine.busy:
                for request, tokens in engine.step():
                    bar.update(len(tokens))
                    number, text = requests.index(request), tokenizer.decode(request.out)
                    whole = len(text) >= shown[number] + 40 and not text.endswith("\ufffd")
                    if whole or len(request.out) == request.new:
                        bar.write(f"[{number:3}] {text[shown[number] :]!r}", sys.stdout)
                        shown[number] = len(text)
                running = sum(each is not None for each in engine.rows)
                waits = f"{running} running, {len(engine.waiting)} waiting"
                bar.set_postfix_str(f"{waits}, {len(engine.free)} pages free")
        seconds = time.perf_counter() - begin
    total = len(prompts) * options.new_tokens
    print(
        f"{len(prompts)} requests, {total} tokens in {seconds:.1f} s: {total / seconds:.0f} "
        f"tokens/s; {engine.confirmed} of {engine.steps * options.drafts} drafts confirmed"
    )
    print_backends()


if __name__ == "__main__":
    main()
