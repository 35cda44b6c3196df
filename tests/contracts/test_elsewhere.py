# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Names that are not here, of other projects or misspelt: `custom` says where each went."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from custom.dispatch.registry import SPECS

import custom
from custom._elsewhere import NAMES

ROOT = Path(__file__).parents[2]


def said(name: str) -> str:
    with pytest.raises(AttributeError) as error:
        getattr(custom, name)
    return str(error.value)


def target(path: str) -> object:
    module, _, name = f"custom.{path}".rpartition(".")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("name", NAMES)
def test_a_name_of_theirs_says_where_it_went(name):
    there, sentence = NAMES[name], said(name)
    assert sentence.startswith(f"custom has no `{name}` ({there.of})") and sentence.endswith(".")
    assert "\n" not in sentence
    if there.ours is not None:
        assert callable(target(there.ours)) and f"Use custom.{there.ours}: " in sentence
    # what it names of ours exists, but for files and keyword arguments
    for path in re.findall(r"custom\.((?:\w+\.)*\w+)", there.differs):
        assert callable(target(path)), path
    for op in re.findall(r"\bnpu_\w+", there.differs):
        assert op in custom.__all__, op


def test_no_name_of_theirs_is_one_of_ours():
    """An entry that is there would never be read."""
    assert not set(NAMES) & set(custom.__all__)


@pytest.mark.parametrize("name", [x.name for x in SPECS if x.name not in custom.__all__])
def test_an_op_without_a_function_says_how_it_is_called(name):
    assert f"torch.ops.custom.{name}." in said(name)


@pytest.mark.parametrize(
    "name, wanted",
    [
        ("fused_attention", "Its name is custom.npu_fused_attention."),
        ("npu_hadamard", "Use custom.hadamard, or torch.ops"),
        ("npu_indexer_loss", "Use custom.compute_index_loss_sparse, or torch.ops"),
        ("indexer_loss", "Use custom.compute_index_loss_sparse, or torch.ops.custom.npu_indexer_"),
        ("npu_compressor_dense", "Use custom.npu_compressor, or torch.ops"),
        ("npu_chunk_kda_grad", "Autograd calls it"),
        ("chunk_kda_grad", "Autograd calls it; it is torch.ops.custom.npu_chunk_kda_grad."),
        ("npu_flash_attention", "Did you mean `npu_sparse_flash_attention` or `npu_fused_att"),
        ("flash_attn_varlen_fun", "Did you mean `flash_attn_varlen_func`"),
        ("zzz", "custom.__all__ lists what there is"),
    ],
)
def test_names_that_nearly_are(name, wanted):
    assert wanted in said(name)


@pytest.mark.parametrize("name", [x.name.removeprefix("npu_") for x in SPECS])
def test_no_file_hides_what_an_op_is_called(name):
    assert not isinstance(getattr(custom, name, None), ModuleType)


def test_python_asks_for_names_of_its_own():
    assert not hasattr(custom, "__wrapped__") and not hasattr(custom, "__file_of_nothing__")


def test_modules_that_import_custom_leaves_alone_are_there():
    code = """
import sys, custom
assert "custom.parallel" not in sys.modules
print(custom.parallel.__name__, custom.integrations.__name__)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["custom.parallel", "custom.integrations"], done.stderr


def test_a_clone_has_the_modules_that_an_installation_has():
    """Not setup.py, tests and the folder itself, which lie beside the package."""
    code = """
import pkgutil, sys, custom
import custom.cuda_ops, custom.npu_ops, custom.graph_mode
print(custom.dispatch.__file__)
print(*(each.name for each in pkgutil.iter_modules(custom.__path__)))
"""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=clean, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    file, listed = done.stdout.splitlines()
    assert file == str(ROOT / "dispatch" / "__init__.py")
    assert not {"setup", "tests", "custom", "docs", "examples"} & {*listed.split()}
    assert "bench" in listed.split()
