# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""examples/serve.py: whatever else is in the batch, a request's tokens are those of it alone."""

from __future__ import annotations

import copy
import importlib
import random
import re
import subprocess
import sys
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from custom.dispatch import log

from ..support.accuracy import skip_unless_taken
from ..support.models import deepseek_v4

transformers = pytest.importorskip("transformers", minversion="5.17")
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def serve():
    sys.path.insert(0, str(EXAMPLES))
    try:
        import serve
    finally:
        sys.path.remove(str(EXAMPLES))
    return serve


@pytest.fixture(scope="module")
def model(serve):
    made = serve.make_model(64)
    for parameter in made.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(4)  # so that the text repeats itself less, and keys matter more
    return made


@pytest.fixture(scope="module")
def head(serve, model):
    return serve.DraftHead(model).eval()


def prompts():
    """From one token to more than two chunks; some repeat themselves, so that drafts are right."""
    lengths = (1, 70, 16, 33, 5, 48, 17, 64, 2, 31)
    drawn = [torch.randint(1, 64, (n,)).tolist() for n in lengths]
    drawn[3] = (drawn[3][:6] * 6)[:33]
    return drawn


def served(engine, texts, news):
    requests = [engine.submit(text, new) for text, new in zip(texts, news, strict=True)]
    streamed = {id(request): [] for request in requests}
    steps = 0
    with torch.inference_mode():
        while engine.busy:
            held = [page for row in engine.table.tolist() for page in row if page >= 0]
            # no page twice, none lost
            assert sorted([*held, *engine.free]) == list(range(engine.pages))
            for request, tokens in engine.step():
                streamed[id(request)] += tokens
            steps += 1
            assert steps < 1000
    for request in requests:
        assert streamed[id(request)] == request.out
    return [request.out for request in requests]


@torch.inference_mode()
def by_the_model(model, texts, news):
    """The unmodified model, a request at a time."""
    return [
        model.generate(
            torch.tensor([text]), max_new_tokens=new, min_new_tokens=new, do_sample=False
        )[0, len(text) :].tolist()
        for text, new in zip(texts, news, strict=True)
    ]


@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("rows, pages", [(1, 8), (3, 20), (16, 100)])
def test_tokens_equal_those_of_the_request_alone(serve, model, head, rows, pages, drafts):
    """Rows and pages that are short, and plenty; every request against the unmodified model."""
    texts, news = prompts(), [1, 12, 20, 24, 7, 13, 16, 9, 20, 2]
    engine = serve.Engine(model, head, rows=rows, pages=pages, reach=8, chunk=32, drafts=drafts)
    assert served(engine, texts, news) == by_the_model(model, texts, news)
    assert sorted(engine.free) == list(range(pages)) and (engine.table == -1).all()
    if drafts:
        total = engine.steps * drafts
        assert 0 < engine.confirmed < total, "some drafts are confirmed, others rejected"
    # the pages are dirty now: what is served next is not touched by it
    assert served(engine, texts[1:4], [8] * 3) == by_the_model(model, texts[1:4], [8] * 3)


@pytest.mark.parametrize("rows, pages", [(3, 20), (16, 100)])
def test_tokens_of_a_deepseek_v4_equal_those_of_the_request_alone(serve, rows, pages):
    """Chunks begin inside of windows; states and rings of a row are those of its last request."""
    made = deepseek_v4(vocab_size=64)
    texts, news = prompts(), [1, 12, 20, 24, 7, 13, 16, 9, 20, 2]
    engine = serve.V4Engine(made, None, rows=rows, pages=pages, reach=8, chunk=27, drafts=0)
    assert served(engine, texts, news) == by_the_model(made, texts, news)
    assert sorted(engine.free) == list(range(pages)) and (engine.table == -1).all()
    with pytest.raises(ValueError, match="`drafts` is 2 of a DeepSeek-V4, expected 0"):
        serve.V4Engine(made, made, drafts=2)


@torch.inference_mode()
def drafted(model, head, text, count, chosen):
    """The drafts after `text`, from its beginning: nothing is cached, and nothing is shared but the
    selection [1, S, K] of the model's last indexer."""
    inner, drafts = model.model, []
    ids = torch.tensor([text])
    read = inner(ids).last_hidden_state
    following = torch.cat([ids[:, 1:], model.lm_head(read)[:, -1:].argmax(-1)], 1)
    hidden = head(inner.embed_tokens(following), read)
    for _ in range(count):
        length = hidden.shape[1]
        mask = torch.full((1, 1, length, length), -torch.inf).triu(1)
        out = head.layer(
            hidden,
            attention_mask=mask,
            position_embeddings=inner.rotary_emb(hidden, torch.arange(length)[None]),
            prev_topk_indices=chosen,
        )
        out = out[0] if isinstance(out, tuple) else out
        drafts.append(int(model.lm_head(head.norm(out[:, -1])).argmax(-1)))
        # a draft is the token that follows, and its layer's output is what was read
        more = head(inner.embed_tokens(torch.tensor([drafts[-1:]])), out[:, -1:])
        hidden, chosen = torch.cat([hidden, more], 1), torch.cat([chosen, chosen[:, -1:]], 1)
    return drafts


def selected(model, text):
    """By the last layer that has an indexer."""
    kept = []
    layer = model.model.layers[2]
    handle = layer.self_attn.indexer.register_forward_hook(lambda *call: kept.append(call[2]))
    with torch.inference_mode():
        model(torch.tensor([text]))
    handle.remove()
    return kept[0]


def test_drafts_are_those_of_the_head_from_the_beginning(serve, model, head):
    """After every step, whatever has been taken back: its keys are those of the text."""
    engine = serve.Engine(model, head, rows=2, pages=20, reach=8, chunk=32, drafts=3)
    requests = [engine.submit(text, 14) for text in (prompts()[1], prompts()[3])]
    compared = 0
    with torch.inference_mode():
        while engine.busy:
            engine.step()
            for request in requests:
                text = request.prompt + request.out
                if 0 < len(request.out) < request.new:
                    before = text[: request.cached]
                    chosen = selected(model, before)
                    assert request.drafts == drafted(model, head, before, 3, chosen)
                    compared += 1
    assert compared > 8 and 0 < engine.confirmed < 3 * engine.steps


@torch.inference_mode()
def sampled(model, text, new, sampling, number):
    """Token by token by the unmodified model: of the likeliest tokens that together reach top_p the
    one in whose share of them the number falls."""
    source = random.Random(f"{sampling.seed}/{number}")
    out: list[int] = []
    for _ in range(new):
        logits = model(torch.tensor([text + out])).logits[0, -1] / sampling.temperature
        p = sorted(((x, -token) for token, x in enumerate(logits.softmax(-1).tolist())))[::-1]
        kept, reached = [], 0.0
        for x, token in p:
            if reached < sampling.top_p:
                kept.append((x, -token))
                reached += x
        left = source.random() * reached
        ends = accumulate(x for x, _ in kept)
        token = next(token for (_, token), end in zip(kept, ends, strict=True) if left < end)
        out.append(token)
        if token in sampling.stop:
            break
    return out


@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("top_p, stop", [(1.0, ()), (0.6, (5, 9, 11, 33))])
def test_sampled_tokens_are_those_of_the_request_alone(serve, model, head, drafts, top_p, stop):
    """Whatever is beside it, and whatever is drafted."""
    sampling = serve.Sampling(1.5, top_p, seed=3, stop=stop)
    texts, news = prompts()[:5], [12, 9, 14, 8, 7]
    engine = serve.Engine(
        model, head, rows=3, pages=20, reach=8, chunk=32, drafts=drafts, sampling=sampling
    )
    wanted = [
        sampled(model, text, new, sampling, number)
        for number, (text, new) in enumerate(zip(texts, news, strict=True))
    ]
    assert served(engine, texts, news) == wanted
    assert sorted(engine.free) == list(range(20)), "those that stopped gave their pages back"
    if stop:
        ended = [len(out) < new for out, new in zip(wanted, news, strict=True)]
        assert any(ended), "some stop early"
    other = serve.Engine(
        model, head, rows=3, pages=20, reach=8, drafts=drafts, sampling=serve.Sampling(1.5, seed=4)
    )
    assert served(other, texts, news) != wanted


def test_each_token_gets_its_share_of_the_numbers(serve):
    logits = torch.tensor([[[0.3, 2.0, -1.0, 1.0, 0.5]]]).expand(1, 4000, 5)
    draws = (torch.arange(4000)[None] + 0.5) / 4000
    for temperature, top_p in ((1.0, 1.0), (0.5, 1.0), (1.0, 0.7), (2.0, 0.01)):
        p = (logits[0, 0] / temperature).softmax(-1)
        order = p.argsort(descending=True).tolist()
        count = next(n for n in range(1, 6) if p[order[:n]].sum() >= min(top_p, 0.999))
        wanted = torch.zeros(5)
        wanted[order[:count]] = p[order[:count]] / p[order[:count]].sum()
        chosen = serve.Sampling(temperature, top_p).choose(logits, draws)
        shares = torch.bincount(chosen[0], minlength=5) / 4000
        torch.testing.assert_close(shares, wanted, rtol=0, atol=1e-3)
    ends = serve.Sampling(1.0).choose(logits[:, :2], torch.tensor([[0.0, 1.0]]))
    assert ends.tolist() == [[1, 2]], "the likeliest first, and none behind the last"


def test_stops_at_a_token(serve, model, head):
    texts, news = prompts()[:4], [12] * 4
    plain = served(serve.Engine(model, head, rows=2, pages=20, reach=8), texts, news)
    stop = tuple({out[at] for out, at in zip(plain, (3, 5, 11, 0), strict=True)})
    cut = [out[: next(n for n, x in enumerate(out) if x in stop) + 1] for out in plain]
    engine = serve.Engine(
        model, head, rows=2, pages=20, reach=8, sampling=serve.Sampling(stop=stop)
    )
    assert served(engine, texts, news) == cut and cut != plain


def test_drafts_need_a_head(serve, model):
    with pytest.raises(ValueError, match=r"^Engine: `drafts` is 2 and `head` None, expected 0\.$"):
        serve.Engine(model, None)


def said(serve, monkeypatch, capsys, *options):
    monkeypatch.setattr(sys, "argv", ["serve", *options])
    serve.main()
    return capsys.readouterr().out


def test_serves_a_model_from_a_folder(serve, tmp_path, monkeypatch, capsys):
    """The same as the one that was saved, and it ends where its own settings say so."""
    tokenizer = serve.make_tokenizer()
    made = serve.make_model(len(tokenizer))
    folder, text = tmp_path / "model", tmp_path / "prompts"
    made.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    text.write_text("It was the best of times\n")
    options = [str(text), "--device", "cpu", "--new-tokens", "8"]
    random_one = said(serve, monkeypatch, capsys, *options, "--drafts", "0")
    loaded = said(serve, monkeypatch, capsys, *options, "--model", str(folder))
    lines = [[x for x in out.splitlines() if x.startswith("[")] for out in (random_one, loaded)]
    assert lines[0] == lines[1] != [] and "1 requests, 8 tokens" in loaded
    assert "random weights" in random_one and "random weights" not in loaded
    for out in (random_one, loaded):
        assert "an example, no engine: docs/vllm.md" in out
    ids = tokenizer("It was the best of times")["input_ids"]
    third = made.generate(torch.tensor([ids]), max_new_tokens=3, do_sample=False)[0, -1].item()
    made.generation_config.eos_token_id = third
    made.generation_config.save_pretrained(folder)
    ended = said(serve, monkeypatch, capsys, *options, "--model", str(folder))
    assert re.search("1 requests, [123] tokens", ended)


def test_a_request_that_can_never_run_is_refused(serve, model, head):
    engine = serve.Engine(model, head, rows=2, pages=8, reach=4, drafts=2)
    for prompt, new in (([], 3), ([1], 0), ([1] * 50, 13)):
        with pytest.raises(ValueError, match="at most 62 together"):
            engine.submit(prompt, new)
    assert engine.submit([1] * 50, 12) and engine.busy


@pytest.mark.parametrize(
    "sizes, wanted",
    [
        (dict(rows=0), "`rows` is 0, expected 1 or more"),
        (dict(pages=0), "`pages` is 0, expected 1 or more"),
        (dict(reach=-1), "`reach` is -1, expected 1 or more"),
        (dict(size=8), "`size` is 8, expected a multiple of 16"),
        (dict(size=0), "`size` is 0, expected a multiple of 16"),
        (dict(chunk=0), "`chunk` is 0, expected 1 or more"),
        (dict(chunk=1.5), "`chunk` is 1.5, expected 1 or more"),
        (dict(drafts=-1), "`drafts` is -1, expected 0 or more"),
    ],
)
def test_sizes_that_would_never_end_are_refused(serve, model, head, sizes, wanted):
    with pytest.raises(ValueError, match=f"^Engine: {wanted}.$"):
        serve.Engine(model, head, **sizes)


OPTIONS = [
    ("serve", ["--rows", "0"], "--rows: 0, expected 1 or more"),
    ("serve", ["--pages", "-3"], "--pages: -3, expected 1 or more"),
    ("serve", ["--chunk", "0"], "--chunk: 0, expected 1 or more"),
    ("serve", ["--drafts", "-1"], "--drafts: -1, expected 0 or more"),
    ("serve", ["--new-tokens", "0"], "--new-tokens: 0, expected 1 or more"),
    ("serve", ["--temperature", "-1"], "--temperature: -1.0, expected 0.0 or more"),
    ("serve", ["--temperature", "nan"], "--temperature: nan, expected 0.0 or more"),
    ("serve", ["--top-p", "0"], "--top-p: 0.0, expected more than 0, and at most 1"),
    ("serve", ["--stop", "It was"], "--stop: 'It was' is . tokens, expected one"),
    ("serve", ["--model", "no/such/folder"], "no/such/folder"),
    ("serve", ["no such file"], "no such file: No such file or directory"),
    ("serve", [str(EXAMPLES)], f"{EXAMPLES}: Is a directory"),
    ("serve", ["/dev/null"], "/dev/null: there is no prompt in it"),
    ("serve", ["--new-tokens", "5000"], "prompt 0: a prompt of .* at most .* together"),
    ("deepseek_v32_decode", ["--batch", "0"], "--batch: 0, expected 1 or more"),
    ("deepseek_v32_decode", ["--new-tokens", "1"], "--new-tokens starts at 2"),
    ("qwen3_next_generate", ["--drafts", "-1"], "--drafts: -1, expected 0 or more"),
    ("qwen3_next_generate", ["--batch", "none"], "--batch: invalid number value: 'none'"),
    ("qwen3_next_generate", ["--context", "26"], "--context starts at --new-tokens . 3"),
    ("train_indexer", ["--plot", "no/such/folder.png"], "there is no folder no/such"),
    ("quantized_caches", ["--plot", "no/such/folder.png"], "there is no folder no/such"),
    ("parallel_decode", ["--new-tokens", "0"], "--new-tokens: 0, expected 1 or more"),
]


@pytest.mark.parametrize("script, options, wanted", OPTIONS)
def test_options_that_are_refused(script, options, wanted, monkeypatch, capsys):
    """In one sentence, before anything is computed."""
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(sys, "argv", [script, *options])
    with pytest.raises(SystemExit) as end:
        importlib.import_module(script).main()
    said = capsys.readouterr().err
    assert end.value.code == 2 and re.search(f"error: .*{wanted}", said), said
    assert "Traceback" not in said


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_a_device_that_is_not_here_is_refused(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    with pytest.raises(SystemExit, match="--device cuda: none is here;"):
        importlib.import_module("_device").choose_device("cuda")


@pytest.mark.parametrize("source", ["file", "stdin"])
def test_reads_prompts(tmp_path, source):
    lines = "It was the best of times\n\nCall me\n"
    path = tmp_path / "prompts.txt"
    path.write_text(lines)
    done = subprocess.run(
        [
            *(sys.executable, EXAMPLES / "serve.py", str(path) if source == "file" else "-"),
            *("--device", "cpu", "--new-tokens", "4"),
        ],
        input=lines,
        cwd=EXAMPLES.parent,
        env={"PYTHONPATH": str(EXAMPLES.parent), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "2 requests, 8 tokens" in done.stdout
    assert "[  0] " in done.stdout and "[  1] " in done.stdout and "pages free" in done.stderr


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_tokens_in_half_precision(serve, model, head, dtype, device, backend):
    """Two tokens that nearly tie may change places: each is within the rounding of the unmodified
    model's own logits of the best one.  On a GPU the decode step is a captured graph."""
    skip_unless_taken(dtype, device, backend)
    half = copy.deepcopy(model).to(dtype)
    exact = copy.deepcopy(half).float()
    texts, news = prompts()[:6], [12, 20, 9, 24, 7, 13]
    ours = copy.deepcopy(half).to(device), copy.deepcopy(head).to(device, dtype)
    engine = serve.Engine(*ours, rows=3, pages=20, reach=8, chunk=32)
    for text, out in zip(texts, served(engine, texts, news), strict=True):
        ids = torch.tensor([text + out[:-1]])
        with torch.inference_mode():
            own, wanted = (each(ids).logits[0, len(text) - 1 :].float() for each in (half, exact))
        band = 2 * (2 * (own - wanted).abs().max() + torch.finfo(dtype).eps * wanted.abs().max())
        below = wanted.max(-1).values - wanted[range(len(out)), out]
        assert (below <= band).all(), f"a token {below.max():.3f} below the best, band {band:.3f}"
        spread = (wanted.max(-1).values - wanted.median(-1).values).min()
        assert band < spread, "else half of all tokens would do"
    assert {ran for (op, ran) in log.calls if "sparse_attention" in op} >= {backend}
