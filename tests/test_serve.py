# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""examples/serve.py: whatever else is in the batch, a request's tokens are those of it alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.17")
EXAMPLES = Path(__file__).parent.parent / "examples"


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
            pages = engine.caches.layers[0].kv.shape[0]
            assert sorted([*held, *engine.free]) == list(range(pages))  # no page twice, none lost
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
def test_tokens_equal_those_of_the_request_alone(serve, model, rows, pages, drafts):
    """Rows and pages that are short, and plenty; every request against the unmodified model."""
    texts, news = prompts(), [1, 12, 20, 24, 7, 13, 16, 9, 20, 2]
    engine = serve.Engine(model, rows=rows, pages=pages, reach=8, chunk=32, drafts=drafts)
    assert served(engine, texts, news) == by_the_model(model, texts, news)
    assert sorted(engine.free) == list(range(pages)) and (engine.table == -1).all()
    if drafts:
        total = engine.steps * drafts
        assert 0 < engine.confirmed < total, "some drafts are confirmed, others rejected"
    # the pages are dirty now: what is served next is not touched by it
    assert served(engine, texts[1:4], [8] * 3) == by_the_model(model, texts[1:4], [8] * 3)


def test_a_request_that_can_never_run_is_refused(serve, model):
    engine = serve.Engine(model, rows=2, pages=8, reach=4, drafts=2)
    for prompt, new in (([], 3), ([1], 0), ([1] * 50, 13)):
        with pytest.raises(ValueError, match="at most 62 together"):
            engine.submit(prompt, new)
    assert engine.submit([1] * 50, 12) and engine.busy


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
