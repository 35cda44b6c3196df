# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Serve many requests at once with a GLM-5, DeepSeek-V3.2 or DeepSeek-V4 model: continuous
batching over paged caches.

    python examples/serve.py [PROMPTS | -] [--device cuda] [--temperature 0.7 --top-p 0.9] [--help]

PROMPTS holds one prompt a line ("-": standard input; left out: pieces of a text). Requests are
admitted as soon as a row and pages are free; a long prompt goes in by chunks, between the decode
steps of the others; drafts come from a head for multi-token prediction, and those that the model
does not confirm are taken back by writing over their keys. The decode step has fixed shapes, and is
a captured graph where the device has graphs. Without --model the model is small and random, so it
babbles.

An example, to be read: one process, no server. To serve, vLLM (docs/vllm.md) or SGLang
(docs/sglang.md) with this package's plug-in.
"""

from _options import serving

if __name__ == "__main__":  # what is wrong is said before the imports, which take seconds
    serving()

import random
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from _device import choose_device, print_backends
from _glm5 import DraftHead, make_model
from _text import make_tokenizer, read_prompts
from torch import Tensor
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import custom
from custom.integrations.deepseek_v4 import V4Caches, sparse_attention_v4_weights
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
    source: random.Random = field(default_factory=random.Random)
    cached: int = 0  # positions whose keys are in the pages
    drafts: list[int] = field(default_factory=list)
    draws: list[float] = field(default_factory=list)  # one a token, however often it is sampled
    stopped: bool = False

    @property
    def prefilling(self) -> bool:
        return self.cached < len(self.prompt)

    @property
    def done(self) -> bool:
        return self.stopped or len(self.out) >= self.new

    def next_draws(self, count: int) -> list[float]:
        """Of the `count` tokens behind those that are out."""
        while len(self.draws) < len(self.out) + count:
            self.draws.append(self.source.random())
        return self.draws[len(self.out) : len(self.out) + count]


@dataclass(frozen=True)
class Sampling:
    """temperature 0: the likeliest token. top_p: of the likeliest ones that together reach it."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[int, ...] = ()  # tokens that end a request

    def choose(self, logits: Tensor, draws: Tensor) -> Tensor:
        """The tokens [B, S] for logits [B, S, V], by the numbers [B, S] drawn from 0 to 1."""
        if self.temperature == 0:
            return logits.argmax(-1)
        p, order = (logits.float() / self.temperature).softmax(-1).sort(-1, descending=True)
        p = p.where(p.cumsum(-1) - p < self.top_p, 0)  # the first is kept
        mass = p.cumsum(-1)
        place = (mass <= draws[..., None] * mass[..., -1:]).sum(-1, keepdim=True)
        return order.gather(-1, place.clamp(max=order.shape[-1] - 1))[..., 0]


GREEDY = Sampling()
News = tuple[Request, list[int]]


class Engine:
    """Rows of a batch, each with a request or idle, over pages that all rows share."""

    def __init__(
        self,
        model: Any,
        head: Any,
        *,
        rows: int = 8,
        pages: int = 64,
        reach: int = 16,
        size: int = 16,
        chunk: int = 32,
        drafts: int = 2,
        sampling: Sampling = GREEDY,
    ) -> None:
        """`size` of a page; `reach`: pages of a request at most; `chunk`: prompt tokens at once.
        Without a `head` there are no drafts."""
        sizes = dict(rows=rows, pages=pages, reach=reach, size=size, chunk=chunk, drafts=drafts)
        for name, value in sizes.items():
            least = dict(drafts=0, size=16).get(name, 1)
            if not isinstance(value, int) or value < least or (name == "size" and value % 16):
                more = "a multiple of 16" if name == "size" else f"{least} or more"
                raise ValueError(f"Engine: `{name}` is {value!r}, expected {more}.")
        if head is None and drafts:
            raise ValueError(f"Engine: `drafts` is {drafts} and `head` None, expected 0.")
        self.model, self.head, self.chunk, self.drafts = model, head, chunk, drafts
        self.sampling = sampling
        self._make(rows, pages, reach, size)
        self.rows: list[Request | None] = [None] * rows
        self.pages, self.free, self.waiting = pages, deque(range(pages)), deque[Request]()
        self.steps = self.confirmed = self.submitted = 0

        def ints(*shape: int, value: int = 0) -> Tensor:
            return torch.full(shape, value, dtype=torch.int32, device=model.device)

        step = ints(rows, 1 + drafts), ints(rows), ints(rows, reach, value=-1)
        self.tokens, self.lengths, self.table = step
        self.places = torch.arange(rows, device=model.device)
        self.draws = torch.zeros(rows, 1 + drafts, device=model.device)
        self.decode: Callable[..., Any] = self.forward
        experts = any(hasattr(layer.mlp, "experts") for layer in self.layers)  # a loop that waits
        if model.device.type != "cpu" and not experts:  # all rows are idle: nothing is written
            capture = torch.no_grad()(custom.graph_mode.capture)
            self.decode = capture(self.forward, *step, self.places, self.draws)

    def _make(self, rows: int, pages: int, reach: int, size: int) -> None:
        """Weights and caches."""
        model, head = self.model, self.head
        self.layers = [*model.model.layers, *([] if head is None else [head.layer])]
        config = model.config if head is None else head.config
        self.weights: list[Any] = [
            (shared_attention_weights if each.indexer is None else sparse_attention_weights)(each)
            for each in (layer.self_attn for layer in self.layers)
        ]
        self.caches: Any = PagedCaches(
            len(self.layers),
            layer_widths(config),
            requests=1,
            capacity=pages * size,
            page_size=size,
            dtype=model.dtype,
            device=model.device,
        )

    def _hidden(
        self, tokens: Tensor, lengths: Tensor, table: Tensor, places: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """(what the model's head reads, what the last layer has selected)"""
        inner, last = self.model.model, len(self.model.model.layers)
        hidden, chosen = self._through(range(last), inner.embed_tokens(tokens), lengths, table)
        return inner.norm(hidden), chosen

    def _through(
        self,
        numbers: Iterable[int],
        hidden: Tensor,
        lengths: Tensor,
        table: Tensor,
        indices: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """The last S tokens [B, S, H] of requests that are `lengths` long with them, through the
        layers `numbers`. Rows at negative positions are padding."""
        positions = token_positions(lengths, hidden.shape[1])
        slots = self.caches.slots(positions, table)
        cos, sin = self.model.model.rotary_emb(hidden, positions.clamp(min=0))
        for number in numbers:
            layer, w, pools = self.layers[number], self.weights[number], self.caches.layers[number]
            arguments = w.arguments | dict(
                x=layer.input_layernorm(hidden),
                cache_index=slots,
                kv_cache=pools.kv,
                kr_cache=pools.kr,
                sin=sin,
                cos=cos,
                block_table=table,
                act_seqs=lengths,
            )
            if isinstance(w, SparseAttentionWeights):
                latent, indices = custom.npu_sparse_attention_indices_pto(
                    **arguments, index_k_cache=pools.index_k
                )
            else:  # attends to what a layer before it has selected
                assert indices is not None
                latent = custom.npu_sparse_attention_shared_pto(**arguments, sparse_indices=indices)
            hidden = hidden + layer.self_attn.o_proj(w.values(latent))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return hidden, indices

    def forward(
        self,
        tokens: Tensor,
        lengths: Tensor,
        table: Tensor,
        places: Tensor,
        draws: Tensor,
        following: Tensor | None = None,
    ) -> Tensor:
        """[B, 1 + S + D]: how many of the tokens behind the first are right, the token that the
        model lets follow each of the S, and the next drafts. `following` [1, S] is that of a
        prompt, where all are right; -1: what the model says."""
        inner, last = self.model.model, len(self.model.model.layers)
        hidden, chosen = self._hidden(tokens, lengths, table, places)
        # a draft is confirmed where it is the token that is sampled: the distribution stays
        answers = self.sampling.choose(self.model.lm_head(hidden), draws)
        right = (tokens[:, 1:] == answers[:, :-1]).int().cumprod(1).sum(1, keepdim=True)
        if following is None:
            following = answers
        else:
            right = torch.full_like(right, tokens.shape[1] - 1)
            following = following.where(following >= 0, answers)
        out = [right, answers]
        for number in range(self.drafts):
            assert self.head is not None
            mixed = self.head(inner.embed_tokens(following), hidden)
            hidden, _ = self._through([last], mixed, lengths, table, chosen)
            if number == 0:  # the keys of all tokens are there; on from the last right one
                assert chosen is not None  # the first layer has an indexer
                hidden = hidden.take_along_dim(right[..., None], 1)
                chosen = chosen.take_along_dim(right[..., None, None], 1)
                ends = (lengths - tokens.shape[1] + 1 + right[:, 0]).to(lengths.dtype)
                lengths = ends.where(lengths > 0, 0)
            draft = self.model.lm_head(self.head.norm(hidden)).argmax(-1)
            out.append(draft)
            following = draft
            lengths = lengths + (lengths > 0)  # idle rows stay so
        return torch.cat(out, 1)

    def _pages(self, request: Request) -> int:
        # the last drafts may lie behind the last token
        positions = len(request.prompt) + request.new + self.drafts
        return -(-positions // self.caches.page_size)

    def submit(self, prompt: Sequence[int], new: int) -> Request:
        seed = f"{self.sampling.seed}/{self.submitted}"  # whatever else is in the batch
        request = Request(list(prompt), new, source=random.Random(seed))
        most = min(self.table.shape[1], self.pages)
        if not prompt or new < 1 or self._pages(request) > most:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens and {new} new ones: expected at least one of "
                f"each, and at most {most * self.caches.page_size - self.drafts} together."
            )
        self.waiting.append(request)
        self.submitted += 1
        return request

    @property
    def busy(self) -> bool:
        return bool(self.waiting) or any(self.rows)

    def step(self) -> list[News]:
        """Admit, one chunk of a prompt, one decode step of all, retire; [(request, tokens)]."""
        for row, request in enumerate(self.rows):
            if request is None and self.waiting and self._pages(self.waiting[0]) <= len(self.free):
                self.rows[row] = request = self.waiting.popleft()
                pages = [self.free.popleft() for _ in range(self._pages(request))]
                self.table[row, : len(pages)] = torch.tensor(pages, device=self.table.device)
        news = [*self._prefill(), *self._decode()]
        for row, request in enumerate(self.rows):
            if request is not None and request.done:
                self.free.extend(page for page in self.table[row].tolist() if page >= 0)
                self.table[row] = -1
                self.rows[row] = None
        return news

    def _prefill(self) -> list[News]:
        for row, request in enumerate(self.rows):
            if request is not None and request.prefilling:
                part = request.prompt[request.cached : request.cached + self.chunk + 1]
                fed = part[: self.chunk]
                request.cached += len(fed)
                tokens = torch.tensor([fed, [*part[1:], -1][: len(fed)]]).to(self.table.device)
                lengths = torch.full_like(self.lengths[:1], request.cached)
                table = self.table[row : row + 1]
                draws = torch.zeros(1, len(fed))
                if not request.prefilling:
                    draws[0, -1] = request.next_draws(1)[0]
                draws = draws.to(self.table.device)
                place = self.places[row : row + 1]
                (out,) = self.forward(tokens[:1], lengths, table, place, draws, tokens[1:]).tolist()
                return [] if request.prefilling else [self._take(request, out, len(fed))]
        return []

    def _decode(self) -> list[News]:
        each = [
            (row, request)
            for row, request in enumerate(self.rows)
            if request is not None and not request.prefilling and not request.done
        ]
        if not each:
            return []
        tokens, lengths = torch.zeros_like(self.tokens, device="cpu"), [0] * len(self.rows)
        draws = torch.zeros_like(self.draws, device="cpu")
        for row, request in each:
            tokens[row] = torch.tensor([request.out[-1], *request.drafts])
            lengths[row] = request.cached + 1 + self.drafts
            draws[row] = torch.tensor(request.next_draws(1 + self.drafts))
        self.tokens.copy_(tokens)
        self.lengths.copy_(torch.tensor(lengths))
        self.draws.copy_(draws)
        step = self.tokens, self.lengths, self.table, self.places, self.draws
        out = self.decode(*step).tolist()
        for row, request in each:
            request.cached += 1 + out[row][0]  # the keys behind are written over by the next step
            self.confirmed += out[row][0]
        self.steps += len(each)
        return [self._take(request, out[row], 1) for row, request in each]

    def _take(self, request: Request, out: list[int], fed: int) -> News:
        """The tokens that are new after `out` of `forward`, behind the `fed` that were known."""
        right, *answers = out
        tokens = answers[fed - 1 : 1 + right][: request.new - len(request.out)]
        for place, token in enumerate(tokens):
            if token in self.sampling.stop:
                tokens, request.stopped = tokens[: place + 1], True
                break
        request.out += tokens
        request.drafts = out[len(out) - self.drafts :]
        return request, tokens


class V4Engine(Engine):
    """Of a DeepSeek-V4 model: the pages that all rows share hold entries; what its windows see and
    the states of its compressors lie in rings, one for each row of the batch."""

    def _make(self, rows: int, pages: int, reach: int, size: int) -> None:
        model = self.model
        if self.drafts:
            raise ValueError(f"Engine: `drafts` is {self.drafts} of a DeepSeek-V4, expected 0.")
        self.layers = [*model.model.layers]
        self.weights = [
            sparse_attention_v4_weights(each.self_attn, dtype=model.dtype) for each in self.layers
        ]
        caches = V4Caches(
            model.config,
            requests=rows,
            capacity=0,
            tokens=self.chunk,
            page_size=size,
            dtype=model.dtype,
            device=model.device,
        )
        caches.reserve(max(reach, -(-pages // rows)) * caches.page_size)
        self.caches = caches

    def _hidden(
        self, tokens: Tensor, lengths: Tensor, table: Tensor, places: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        inner, count = self.model.model, tokens.shape[1]
        ratios = {w.options["cmp_ratio"] for w in self.weights}
        angles = {ratio: self.caches.angles(lengths, count, ratio) for ratio in ratios}
        hidden = inner.embed_tokens(tokens)[:, :, None]
        streams = hidden.expand(-1, -1, self.model.config.hc_mult, -1).contiguous()
        for layer, w, pools in zip(self.layers, self.weights, self.caches.layers, strict=True):
            own = {"ori_block_table": pools.ori_block_table[places]}
            if pools.cmp_kv is not None:
                own |= dict(
                    cmp_block_table=table, state_block_table=pools.state_block_table[places]
                )
            post, comb, y = self._together(streams, layer.attn_hc)
            y = custom.npu_sparse_attention_v4_pto(
                layer.input_layernorm(y).to(hidden.dtype),
                act_seqs=lengths,
                **w.arguments,
                **pools._replace(**own).arguments,
                **angles[w.options["cmp_ratio"]],
            )
            streams = custom.npu_hc_post(y, streams, post, comb)
            post, comb, y = self._together(streams, layer.ffn_hc)
            y = layer.mlp(layer.post_attention_layernorm(y).to(hidden.dtype), input_ids=tokens)
            streams = custom.npu_hc_post(y, streams, post, comb)
        return inner.norm(inner.hc_head(streams)).to(hidden.dtype), None

    def _together(self, streams: Tensor, site: Any) -> tuple[Tensor, Tensor, Tensor]:
        config = self.model.config
        y, post, comb = custom.npu_hc_pre(
            streams,
            site.fn.float(),
            site.scale.float(),
            site.base.float(),
            hc_sinkhorn_iters=config.hc_sinkhorn_iters,
            norm_eps=config.rms_norm_eps,
            hc_eps=config.hc_eps,
        )
        return post, comb, y


ENGINES = dict(glm_moe_dsa=Engine, deepseek_v32=Engine, deepseek_v4=V4Engine)


def load(path: str, device: str, dtype: torch.dtype) -> tuple[Any, Any, Any]:
    """(model, its tokenizer, no head: Transformers leaves the one for drafts out)."""
    config = AutoConfig.from_pretrained(path)
    if config.model_type not in ENGINES:
        raise ValueError(f"a model of type {config.model_type}, expected {', '.join(ENGINES)}")
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    return model.to(device).eval(), AutoTokenizer.from_pretrained(path), None


def small(device: str, dtype: torch.dtype) -> tuple[Any, Any, Any]:
    """(model, tokenizer, head for drafts) with random weights."""
    tokenizer = make_tokenizer()
    model: Any = make_model(len(tokenizer))
    model = model.to(device, dtype)
    return model, tokenizer, DraftHead(model).to(device, dtype)


def stops(model: Any, tokenizer: Any, texts: list[str]) -> tuple[int, ...]:
    """The model's own tokens that end a text, and others."""
    own = model.generation_config.eos_token_id
    ids = [own] if isinstance(own, int) else [*(own or ())]
    for text in texts:
        each = tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(each) != 1:
            raise ValueError(f"--stop: {text!r} is {len(each)} tokens, expected one")
        ids += each
    return tuple(ids)


def main() -> None:
    """Say what came, token by token."""
    parser, options = serving()
    try:
        prompts = read_prompts(options.prompts)
    except (OSError, UnicodeDecodeError) as error:
        parser.error(f"{options.prompts}: {getattr(error, 'strerror', None) or 'is no text'}")
    if not prompts:
        parser.error(f"{options.prompts}: there is no prompt in it")
    device = choose_device(options.device)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    print("an example, no engine: docs/vllm.md serves by vLLM, docs/sglang.md by SGLang")
    try:
        if options.model is None:
            print("random weights: what they say means nothing (--model PATH loads a model)")
            model, tokenizer, head = small(device, dtype)
        else:
            model, tokenizer, head = load(options.model, device, dtype)
        stop = stops(model, tokenizer, options.stop)
        if options.drafts is None:
            options.drafts = 0 if head is None else 2
        sizes = {name: getattr(options, name) for name in ("rows", "pages", "chunk", "drafts")}
        sampling = Sampling(options.temperature, options.top_p, options.seed, stop)
        with torch.inference_mode():
            made = ENGINES[model.config.model_type]
            engine = made(model, head, **sizes, sampling=sampling)
    except (OSError, ValueError) as error:
        parser.error(str(error).splitlines()[0])
    requests = []
    for number, prompt in enumerate(prompts):
        try:
            requests.append(engine.submit(tokenizer(prompt)["input_ids"], options.new_tokens))
        except ValueError as error:
            parser.error(f"prompt {number}: {error}")
    show(engine, tokenizer, requests)
    print_backends()


def show(engine: Engine, tokenizer: Any, requests: list[Request]) -> None:
    """Run all, and print what is new of each."""
    shown = [0] * len(requests)
    begin = time.perf_counter()
    with tqdm(total=sum(each.new for each in requests), unit="token") as bar:
        while engine.busy:
            with torch.inference_mode():
                news = engine.step()
            for request, tokens in news:
                bar.update(len(tokens))
                number, text = requests.index(request), tokenizer.decode(request.out)
                more = text[shown[number] :]
                if (len(more) >= 40 and not text.endswith("\ufffd")) or (more and request.done):
                    bar.write(f"[{number:3}] {more!r}", sys.stdout)
                    shown[number] = len(text)
            running = sum(each is not None for each in engine.rows)
            waits = f"{running} running, {len(engine.waiting)} waiting"
            bar.set_postfix_str(f"{waits}, {len(engine.free)} pages free")
    seconds, total = time.perf_counter() - begin, sum(len(each.out) for each in requests)
    print(
        f"{len(requests)} requests, {total} tokens in {seconds:.1f} s: {total / seconds:.0f} "
        f"tokens/s; {engine.confirmed} of {engine.steps * engine.drafts} drafts confirmed"
    )


if __name__ == "__main__":
    main()
