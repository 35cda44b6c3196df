# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Our plug-in against what vLLM's wheels say of the classes and functions that it touches.

No vLLM is installed: tests/vllm/stubs.py made tests/vllm/stubs/ of the wheels' sources.  After a
release, `python -m tests.vllm.stubs WHEEL` adds its stubs, and these tests say what has moved.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path
from types import SimpleNamespace

import pytest
from custom.dispatch.errors import BackendUnavailable, NotSupported

from custom.integrations import vllm

ROOT = Path(__file__).parent.parent
STUBS = ROOT / "tests" / "vllm" / "stubs"
VERSIONS = sorted(each.name.removeprefix("vllm-") for each in STUBS.glob("vllm-*"))
PLUGIN = ROOT / "custom" / "integrations" / "vllm"


MOVED = {
    "v1/attention/backend.py": ("    slot_mapping: torch.Tensor", ""),  # a field
    "v1/kv_cache_interface.py": ("    max_tp_shards: int | None = ...", ""),  # an argument
    "model_executor/layers/attention_layer_base.py": ("bind_kv_cache", "bind_cache"),  # a method
    "model_executor/layers/mla.py": (
        "hidden_states: torch.Tensor, llama",
        "x: torch.Tensor, llama",
    ),
    "forward_context.py": ("get_forward_context", "get_context"),
}


def test_what_we_touch_is_there_and_what_moves_is_seen(tmp_path):
    """By mypy, strict, over the plug-in: every name, field, argument and override."""
    pytest.importorskip("mypy", reason="a tool of `make lint`")
    package = tmp_path / "typed" / "custom"
    package.mkdir(parents=True)
    for each in [*(ROOT / "custom").iterdir(), ROOT / "dispatch", ROOT / "graph_mode"]:
        (package / each.name).symlink_to(each)

    def typed(stubs: Path) -> str:
        command = ["-m", "mypy", "--cache-dir", tmp_path / "cache", "-p", vllm.__name__]
        environment = {**os.environ, "MYPYPATH": f"{package.parent}:{stubs}"}
        done = subprocess.run(
            [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True
        )
        return done.stdout + done.stderr

    for version in VERSIONS:
        assert typed(STUBS / f"vllm-{version}").startswith("Success"), version
    stubs = tmp_path / "stubs"
    shutil.copytree(STUBS / f"vllm-{VERSIONS[-1]}", stubs)
    for file, (before, after) in MOVED.items():
        path = stubs / "vllm" / file
        text = path.read_text()
        assert before in text
        path.write_text(text.replace(before, after, 1))
    said = typed(stubs)
    for name in ("slot_mapping", "max_tp_shards", "bind_kv_cache", "forward", "get_forward"):
        assert f'"{name}' in said, said


def arguments(path: Path, name: str) -> ast.arguments:
    """Of the constructor of the class `name`."""
    classes = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]
    (found,) = [node for node in classes if node.name == name]
    (init,) = [node for node in found.body if getattr(node, "name", None) == "__init__"]
    return init.args


@pytest.mark.parametrize("version", VERSIONS)
def test_our_layer_takes_their_arguments(version):
    """vLLM's models pass them by position up to the prefix."""
    stub = STUBS / f"vllm-{version}" / "vllm" / "model_executor" / "layers" / "mla.py"
    theirs = arguments(stub, "MultiHeadLatentAttentionWrapper")
    ours = arguments(PLUGIN / "mla.py", "SparseMLA")
    names = [each.arg for each in ours.args]
    assert names == [each.arg for each in theirs.args[: len(names)]]
    assert "prefix" in names and "skip_topk" in names and ours.kwarg
    required = [len(each.args) - len(each.defaults) for each in (ours, theirs)]
    assert required[0] == required[1]


def test_the_range_is_what_there_are_stubs_for():
    minors = [tuple(map(int, each.split(".")[:2])) for each in VERSIONS]
    first, below = vllm.VERSIONS
    assert minors[0] == first and (minors[-1][0], minors[-1][1] + 1) == below
    for version in VERSIONS:
        vllm.check_version("vLLM", version, vllm.VERSIONS)


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0rc1", "1.0"])
def test_another_version_is_refused(version):
    with pytest.raises(BackendUnavailable, match=f"0.32,<0.34, and {version} is installed; "):
        vllm.check_version("vLLM", version, vllm.VERSIONS)


def test_the_entry_point_is_ours():
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    name, _, where = setup["options.entry_points"]["vllm.general_plugins"].strip().partition(" = ")
    assert (name, where) == ("npu_custom_ops", f"{vllm.__name__}:{vllm.register.__name__}")


def configuration(**changed: object) -> SimpleNamespace:
    parallel = dict(
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        decode_context_parallel_size=1,
        prefill_context_parallel_size=1,
        use_ubatching=False,
    )
    given = dict(speculative_config=None, lora_config=None, kv_transfer_config=None)
    parallel |= {name: value for name, value in changed.items() if name in parallel}
    given |= {name: value for name, value in changed.items() if name in given}
    return SimpleNamespace(parallel_config=SimpleNamespace(**parallel), **given)


def test_a_plain_engine_is_served():
    vllm.check_modes("sparse attention", configuration(), quantised_weights=False)


@pytest.mark.parametrize(
    ("asked", "mode"),
    [
        (dict(tensor_parallel_size=2), "tensor parallelism"),
        (dict(pipeline_parallel_size=2), "pipeline parallelism"),
        (dict(decode_context_parallel_size=2), "context parallelism"),
        (dict(prefill_context_parallel_size=2), "context parallelism"),
        (dict(use_ubatching=True), "microbatches (DBO)"),
        (dict(speculative_config=object()), "speculative decoding"),
        (dict(lora_config=object()), "LoRA"),
        (dict(kv_transfer_config=object()), "a KV connector"),
    ],
)
def test_a_mode_that_was_not_tried_is_refused(asked, mode):
    with pytest.raises(NotSupported) as error:
        vllm.check_modes("sparse attention", configuration(**asked))
    assert str(error.value) == (
        f"CUSTOM_VLLM=1 serves sparse attention without {mode}, and this engine asks for it; turn "
        "it off, or unset CUSTOM_VLLM."
    )


def test_a_layer_names_more_modes():
    with pytest.raises(NotSupported, match="without quantised weights, and"):
        vllm.check_modes("sparse attention", configuration(), quantised_weights=True)
