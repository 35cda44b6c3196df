# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Serve many requests at once with a GLM-5 model: continuous batching over paged caches.

    python examples/serve.py [PROMPTS | -] [--device cuda] [--drafts 2] [--help]

PROMPTS holds one prompt a line ("-": standard input; left out: pieces of a text). Requests are
admitted as soon as a row and pages are free; a long prompt goes in by chunks, between the decode
steps of the others; drafts come from a head for multi-token prediction, and those that the model
does not confirm are taken back by writing over their keys. The decode step has fixed shapes, and is
a captured graph where the device has graphs. The model is small and random, so it babbles.
"""

import argparse
import sys
import time
from collections import deque
from dataclasses import dataclass, field

import torch
from _device import DEVICES, at_least, choose_device, print_backends
from _glm5 import DraftHead, make_model
from _text import make_tokenizer, read_prompts
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
    drafts: list[int] = field(default_factory=list)

    @property
    def prefilling(self):
        return self.cached < len(self.prompt)


class Engine:
    """Rows of a batch, each with a request or idle, over pages that all rows share."""

    def __init__(self, model, head, *, rows=8, pages=64, reach=16, size=16, chunk=32, drafts=2):
        """`size` of a page; `reach`: pages of a request at most; `chunk`: prompt tokens at once."""
        sizes = dict(rows=rows, pages=pages, reach=reach, size=size, chunk=chunk, drafts=drafts)
        for name, value in sizes.items():
            least = dict(drafts=0, size=16).get(name, 1)
            if not isinstance(value, int) or value < least or (name == "size" and value % 16):
                more = "a multiple of 16" if name == "size" else f"{least} or more"
                raise ValueError(f"Engine: `{name}` is {value!r}, expected {more}.")
        self.model, self.head, self.chunk, self.drafts = model, head, chunk, drafts
        self.layers = [*model.model.layers, head.layer]
        self.weights = [
            (shared_attention_weights if each.indexer is None else sparse_attention_weights)(each)
            for each in (layer.self_attn for layer in self.layers)
        ]
        self.caches = PagedCaches(
            len(self.layers), layer_widths(head.config), requests=1, capacity=pages * size,
            page_size=size, dtype=model.dtype, device=model.device,
        )  # fmt: skip
        self.rows, self.free = [None] * rows, deque(range(pages))
        self.waiting = deque()
        self.steps = self.confirmed = 0

        def ints(*shape, value=0):
            return torch.full(shape, value, dtype=torch.int32, device=model.device)

        step = ints(rows, 1 + drafts), ints(rows), ints(rows, reach, value=-1)
        self.tokens, self.lengths, self.table = step
        self.decode = self.forward
        if model.device.type != "cpu":  # all rows are idle: nothing is written
            self.decode = torch.no_grad()(custom.graph_mode.capture)(self.forward, *step)

    def _through(self, numbers, hidden, lengths, table, indices=None):
        """The last S tokens [B, S, H] of requests that are `lengths` long with them, through the
        layers `numbers`. Rows at negative positions are padding."""
        positions = token_positions(lengths, hidden.shape[1])
        slots = self.caches.slots(positions, table)
        cos, sin = self.model.model.rotary_emb(hidden, positions.clamp(min=0))
        for number in numbers:
            layer, w, pools = (x[number] for x in (self.layers, self.weights, self.caches.layers))
            arguments = (
                layer.input_layernorm(hidden), w.dq, w.uq_qr, w.uk, w.dkv_kr, w.gamma_cq,
                w.gamma_ckv, sin, cos, slots, pools.kv, pools.kr, table, lengths,
            )  # fmt: skip
            if isinstance(w, SparseAttentionWeights):
                latent, indices = custom.npu_sparse_attention_indices_pto(
                    *arguments, w.idx_qb, w.idx_k, w.idx_proj, w.idx_gamma_k, w.idx_beta_k,
                    pools.index_k, **w.options,
                )  # fmt: skip
            else:  # attends to what a layer before it has selected
                latent = custom.npu_sparse_attention_shared_pto(*arguments, indices, **w.options)
            hidden = hidden + layer.self_attn.o_proj(w.values(latent))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return hidden, indices

    def forward(self, tokens, lengths, table, following=None):
        """[B, 1 + S + D]: how many of the tokens behind the first are right, the token that the
        model lets follow each of the S, and the next drafts. `following` [1, S] is that of a
        prompt, where all are right; -1: what the model says."""
        inner, last = self.model.model, len(self.model.model.layers)
        hidden, chosen = self._through(range(last), inner.embed_tokens(tokens), lengths, table)
        hidden = inner.norm(hidden)
        answers = self.model.lm_head(hidden).argmax(-1)
        right = (tokens[:, 1:] == answers[:, :-1]).int().cumprod(1).sum(1, keepdim=True)
        if following is None:
            following = answers
        else:
            right = torch.full_like(right, tokens.shape[1] - 1)
            following = following.where(following >= 0, answers)
        out = [right, answers]
        for number in range(self.drafts):
            mixed = self.head(inner.embed_tokens(following), hidden)
            hidden, _ = self._through([last], mixed, lengths, table, chosen)
            if number == 0:  # the keys of all tokens are there; on from the last right one
                hidden = hidden.take_along_dim(right[..., None], 1)
                chosen = chosen.take_along_dim(right[..., None, None], 1)
                ends = (lengths - tokens.shape[1] + 1 + right[:, 0]).to(lengths.dtype)
                lengths = ends.where(lengths > 0, 0)
            following = self.model.lm_head(self.head.norm(hidden)).argmax(-1)
            out.append(following)
            lengths = lengths + (lengths > 0)  # idle rows stay so
        return torch.cat(out, 1)

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
                part = request.prompt[request.cached : request.cached + self.chunk + 1]
                fed = part[: self.chunk]
                request.cached += len(fed)
                tokens = torch.tensor([fed, [*part[1:], -1][: len(fed)]]).to(self.table.device)
                lengths = torch.full_like(self.lengths[:1], request.cached)
                table = self.table[row : row + 1]
                (out,) = self.forward(tokens[:1], lengths, table, tokens[1:]).tolist()
                return [] if request.prefilling else [self._take(request, out, len(fed))]
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
            tokens[row] = torch.tensor([request.out[-1], *request.drafts])
            lengths[row] = request.cached + 1 + self.drafts
        self.tokens.copy_(tokens)
        self.lengths.copy_(torch.tensor(lengths))
        out = self.decode(self.tokens, self.lengths, self.table).tolist()
        for row, request in each:
            request.cached += 1 + out[row][0]  # the keys behind are written over by the next step
            self.confirmed += out[row][0]
        self.steps += len(each)
        return [self._take(request, out[row], 1) for row, request in each]

    def _take(self, request, out, fed):
        """The tokens that are new after `out` of `forward`, behind the `fed` that were known."""
        right, *answers = out
        tokens = answers[fed - 1 : 1 + right][: request.new - len(request.out)]
        request.out += tokens
        request.drafts = out[len(out) - self.drafts :]
        return request, tokens


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("prompts", nargs="?", help="a file with a prompt a line, or - for stdin")
    parser.add_argument("--device", choices=DEVICES, default="auto")
    one = at_least(1)
    parser.add_argument("--rows", type=one, default=8, help="requests that run at the same time")
    parser.add_argument("--pages", type=one, default=64, help="pages of 16 positions, for all")
    parser.add_argument("--chunk", type=one, default=32, help="tokens of a prompt at once")
    parser.add_argument("--drafts", type=at_least(0), default=2, help="drafted tokens a step")
    parser.add_argument("--new-tokens", type=one, default=32)
    options = parser.parse_args()
    device = choose_device(options.device)
    tokenizer = make_tokenizer()
    try:
        prompts = read_prompts(options.prompts)
    except (OSError, UnicodeDecodeError) as error:
        parser.error(f"{options.prompts}: {getattr(error, 'strerror', None) or 'is no text'}")
    if not prompts:
        parser.error(f"{options.prompts}: there is no prompt in it")
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    model = make_model(len(tokenizer)).to(device, dtype)
    head = DraftHead(model).to(device, dtype)
    sizes = {name: getattr(options, name) for name in ("rows", "pages", "chunk", "drafts")}
    with torch.inference_mode():
        engine = Engine(model, head, **sizes)
        requests = []
        for number, prompt in enumerate(prompts):
            try:
                ids = tokenizer(prompt)["input_ids"]
                requests.append(engine.submit(ids, options.new_tokens))
            except ValueError as error:
                parser.error(f"prompt {number}: {error}")
        shown = [0] * len(requests)
        begin, total = time.perf_counter(), len(prompts) * options.new_tokens
        with tqdm(total=total, unit="token") as bar:
            while engine.busy:
                for request, tokens in engine.step():
                    bar.update(len(tokens))
                    number, text = requests.index(request), tokenizer.decode(request.out)
                    more, done = text[shown[number] :], len(request.out) == request.new
                    if (len(more) >= 40 and not text.endswith("\ufffd")) or (more and done):
                        bar.write(f"[{number:3}] {more!r}", sys.stdout)
                        shown[number] = len(text)
                running = sum(each is not None for each in engine.rows)
                waits = f"{running} running, {len(engine.waiting)} waiting"
                bar.set_postfix_str(f"{waits}, {len(engine.free)} pages free")
        seconds = time.perf_counter() - begin
    print(
        f"{len(prompts)} requests, {total} tokens in {seconds:.1f} s: {total / seconds:.0f} "
        f"tokens/s; {engine.confirmed} of {engine.steps * options.drafts} drafts confirmed"
    )
    print_backends()


if __name__ == "__main__":
    main()
