# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Every script in examples/ runs on every device, with small settings."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
SMALL = {
    "deepseek_v32_decode.py": ["--batch", "5", "--context", "64", "--new-tokens", "6"],
    "deepseek_v4_decode.py": ["--batch", "5", "--context", "64", "--new-tokens", "6"],
    "qwen3_next_generate.py": ["--batch", "3", "--context", "40", "--new-tokens", "6"],
    "serve.py": ["--new-tokens", "4"],
    "train_transformers.py": ["--steps", "1", "--tokens", "40"],
}
# these have tests of their own
APART = ("parallel_decode.py", "serve_engine.py", "train_indexer.py")
SCRIPTS = sorted(
    p.name
    for p in (ROOT / "examples").glob("*.py")
    if not p.name.startswith("_") and p.name not in APART
)


def run(script, *arguments):
    return subprocess.run(
        [sys.executable, ROOT / "examples" / script, *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},  # a bare clone finds the package too
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.mark.parametrize("script", SCRIPTS)
def test_example(script, device, cxx, monkeypatch):
    if script in SMALL and importlib.util.find_spec("transformers") is None:
        pytest.skip("needs transformers")
    monkeypatch.setenv("CXX", cxx)
    done = run(script, "--device", device.type, *SMALL.get(script, []))
    assert done.returncode == 0, done.stderr[-4000:]
    assert f"device: {device.type}" in done.stdout


@pytest.mark.parametrize("script", [*SCRIPTS, *APART])
def test_help_fits_a_terminal(script, monkeypatch, capsys):
    """Of 24 lines and 80 columns; it says what the script does, and what each option is."""
    if script in (*SMALL, "parallel_decode.py"):
        pytest.importorskip("transformers")
    if script == "graph_onnx.py":
        pytest.importorskip("onnxruntime")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    with pytest.raises(SystemExit, match=r"^0$"):
        runpy.run_path(str(ROOT / "examples" / script), run_name="__main__")
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 80
    usage, description, *_ = text.split("\n\n")
    assert usage.startswith(f"usage: {script}") and description.endswith(".")
    for option in re.findall(r"^  (-.*(?:\n {4,}.*)*)", text, re.M):
        assert re.search(r"\S\s{2,}\S", option), f"{option} says nothing"


@pytest.mark.parametrize(
    "script", [x for x in [*SCRIPTS, *APART] if "def main(" in (ROOT / "examples" / x).read_text()]
)
def test_a_wrong_option_is_refused_before_slow_imports(script, monkeypatch, capsys):
    for name in ("torch", "transformers", "tokenizers", "custom"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "_options", raising=False)
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.setattr(sys, "argv", [script, "--none-such"])
    with pytest.raises(SystemExit, match=r"^2$"):
        runpy.run_path(str(ROOT / "examples" / script), run_name="__main__")
    assert f"{script}: error: unrecognized arguments: --none-such" in capsys.readouterr().err


def test_the_index_has_every_script_and_its_first_sentence():
    text = (ROOT / "examples" / "README.md").read_text()
    rows = dict(re.findall(r"^\| \[(\w+\.py)\]\(\1\) \| (.*) \|$", text, re.M))
    assert sorted(rows) == sorted([*SCRIPTS, *APART])
    for script, row in rows.items():
        doc = ast.get_docstring(ast.parse((ROOT / "examples" / script).read_text())) or ""
        assert row == " ".join(doc.partition("\n\n")[0].split())


LINEAR = {"npu_causal_conv1d", "npu_gated_rms_norm", "npu_recurrent_gated_delta_rule"}
QWEN = LINEAR | {"npu_chunk_gated_delta_rule", "npu_gated_delta_layer_decode"}
KIMI = LINEAR | {"npu_chunk_kda", "npu_gated_delta_layer_decode"}
KIMI |= {"npu_mla_prolog_pto", "npu_fused_infer_attention_score_v2"}


@pytest.mark.parametrize("model, ops", [("qwen3.5", QWEN), ("kimi-linear", KIMI)])
def test_the_other_models_generate(model, ops, device, cxx, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setenv("CXX", cxx)
    script = "qwen3_next_generate.py"
    done = run(script, "--model", model, "--device", device.type, *SMALL[script])
    assert done.returncode == 0, done.stderr[-4000:]
    assert set(re.findall(r"^npu_\w+", done.stdout, re.M)) == ops
    assert "request 0 with drafts: " in done.stdout


def test_the_indexers_recall_rises(device, tmp_path):
    """It learns which keys the attention looks at: in the dense warm-up, and on after it."""
    pytest.importorskip("matplotlib")
    plot = tmp_path / "recall.png"
    done = run("train_indexer.py", "--device", device.type, "--plot", plot)
    assert done.returncode == 0, done.stderr[-4000:]
    found = re.findall(r"step +(\d+)  loss ([\d.]+)  recall +([\d.]+)%", done.stdout)
    steps, losses, recalls = (list(map(float, column)) for column in zip(*found, strict=True))
    assert losses == sorted(losses, reverse=True)
    warm = steps.index(100)
    assert recalls[: warm + 1] == sorted(recalls[: warm + 1])
    assert recalls[0] < 40 and recalls[warm] > recalls[0] + 25 and recalls[-1] > recalls[warm] + 1
    assert plot.stat().st_size > 10_000


def test_options_of_the_demo():
    pytest.importorskip("transformers")
    options = ["--device", "cpu", "--dtype", "float16", "--weight-format", "nz"]
    done = run("deepseek_v32_decode.py", *options, *SMALL["deepseek_v32_decode.py"])
    assert done.returncode == 0, done.stderr[-4000:]
    assert "float16: 5 requests" in done.stdout and "two tokens a step: " in done.stdout


KINDS = ("bf16", "fp8", "int8")


def decoded_in_8_bits(script: str, weights: str, caches: str, device: torch.device) -> str:
    """What a demo says."""
    pytest.importorskip("transformers")
    options = ["--dtype", "bfloat16", "--batch", "3", "--context", "48", "--new-tokens", "4"]
    kinds = ["--weights", weights, "--caches", caches]
    done = run(script, "--device", device.type, *options, *kinds)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize("caches", KINDS)
@pytest.mark.parametrize("weights", KINDS)
def test_the_demo_in_8_bits(weights, caches, device):
    said = decoded_in_8_bits("deepseek_v32_decode.py", weights, caches, device)
    assert f"weights {weights}, caches {caches}" in said
    assert "two tokens a step: logits within" in said


@pytest.mark.parametrize("weights, caches", [("fp8", "fp8"), ("int8", "int8")])
def test_deepseek_v4_in_8_bits(weights, caches, device):
    said = decoded_in_8_bits("deepseek_v4_decode.py", weights, caches, device)
    assert "two tokens a step: logits within" in said


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_decode_the_tokens_of_one_process(ranks, device):
    if device.type != "cpu" and getattr(torch, device.type).device_count() < ranks:
        pytest.skip(f"needs {ranks} devices")
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    script = ROOT / "examples/parallel_decode.py"
    done = subprocess.run(
        [sys.executable, *command, str(ranks), script, "--device", device.type],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert f"{ranks} ranks over" in done.stdout
    assert "TensorParallel: logits within" in done.stdout
    assert "ContextParallel: logits within" in done.stdout
