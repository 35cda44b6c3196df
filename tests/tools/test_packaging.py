# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The wheel installs `custom` alone, and `import custom` needs torch alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

import custom

from .bill import missing

ROOT = Path(__file__).parents[2]
SHORT_RUN = """
import torch, custom
q, k, w = torch.randn(1, 2, 4, 16), torch.randn(1, 9, 1, 16), torch.rand(1, 2, 4)
print(custom.npu_lightning_indexer(q, k, w, sparse_count=4)[0].shape)
"""


def run(python: str | Path, code: str, cwd: Path, **env: str) -> str:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    done = subprocess.run(
        [python, "-c", code], cwd=cwd, env=clean | env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, ROOT]
    where = {"GITHUB_REPOSITORY": "someone/ops", "GITHUB_REF_NAME": "v1.2.3"}
    where["GITHUB_SERVER_URL"] = "https://example.org"
    subprocess.run(command, check=True, capture_output=True, env=os.environ | where)
    return next(out.glob("*.whl"))


def test_wheel_holds_custom_alone_and_every_source_file(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"custom"}
    assert "custom/py.typed" in names
    for folder in ("custom", "dispatch", "npu_ops", "cuda_ops", "graph_mode"):
        for path in (ROOT / folder).rglob("*.py"):
            inside = path.relative_to(ROOT).as_posix()
            assert (inside if folder == "custom" else f"custom/{inside}") in names


def test_an_index_shows_where_the_repository_is(wheel):
    archive = zipfile.ZipFile(wheel)
    inside = next(x for x in archive.namelist() if x.endswith(".dist-info/METADATA"))
    fields, _, text = archive.read(inside).decode().partition("\n\n")
    assert "Description-Content-Type: text/markdown" in fields
    for name in ("Source", "Documentation", "Changelog", "Issues"):
        assert f"Project-URL: {name}, https://example.org/someone/ops" in fields
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    assert "https://example.org/someone/ops/blob/v1.2.3/docs/speed.md" in links
    assert "https://example.org/someone/ops/raw/v1.2.3/docs/figures/dsa_layer.svg" in links
    assert all(link.startswith(("https://", "#")) for link in links)


def test_installed_wheel_is_not_disturbed_by_a_users_dispatch_py(wheel, tmp_path):
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=False)
    site = next((environment / "lib").glob("python*/site-packages"))
    zipfile.ZipFile(wheel).extractall(site)
    # torch and what it needs come from this environment, our own package from the wheel
    import torch

    (site / "torch.pth").write_text(str(Path(torch.__file__).parent.parent))
    for name in ("dispatch", "cuda_ops", "tests", "graph_mode"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('a file of the user')")
    code = SHORT_RUN + "print(custom.__file__)"
    assert str(site) in run(environment / "bin" / "python", code, tmp_path)


def test_import_custom_needs_torch_alone(tmp_path):
    block = """
import sys
sys.modules |= dict.fromkeys(["triton", "torch_npu", "onnx", "onnxscript", "transformers"])
"""
    code = block + SHORT_RUN
    assert "torch.Size([1, 2, 1, 4])" in run(sys.executable, code, tmp_path)


def test_importing_lists_all_ops_at_most_once():
    """There are thousands, and listing them takes as long as importing many modules."""
    code = """
import torch
list_all, listed = torch._C._dispatch_get_all_op_names, []
torch._C._dispatch_get_all_op_names = lambda: listed.append(1) or list_all()
import custom
print(len(listed))
"""
    assert int(run(sys.executable, code, ROOT)) <= 1


def test_bare_clone_works_from_its_root(tmp_path):
    for folder in ("custom", "dispatch", "npu_ops", "cuda_ops", "graph_mode"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    import torch

    path = f"{tmp_path}:{Path(torch.__file__).parent.parent}"
    code = SHORT_RUN + "import custom.cuda_ops, custom.npu_ops, custom.graph_mode"
    assert run(
        sys.executable, "import sys; sys.path.insert(0, '')\n" + code, tmp_path, PYTHONPATH=path
    )


def test_first_call_inside_torch_compile(tmp_path):
    code = """
import torch, custom
q, k, w = torch.randn(1, 2, 4, 16), torch.randn(1, 9, 1, 16), torch.rand(1, 2, 4)
f = torch.compile(lambda q, k, w: custom.npu_lightning_indexer(q, k, w, sparse_count=4)[0] + 1,
                  fullgraph=True)
with torch.no_grad():
    assert torch.equal(f(q, k, w), custom.npu_lightning_indexer(q, k, w, sparse_count=4)[0] + 1)
"""
    run(sys.executable, code, tmp_path)


@pytest.mark.parametrize("name", ["CUSTOM_BACKEND", "CUSTOM_LOG", "CUSTOM_DEBUG"])
def test_an_unknown_value_of_a_variable_lists_the_names(name, tmp_path):
    code = f"""
try:
    import custom
except ValueError as error:
    assert {name!r} in str(error) and "expected one of" in str(error), error
else:
    raise SystemExit("accepted")
"""
    run(sys.executable, code, tmp_path, **{name: "nonsense"})


def test_a_bill_of_materials_names_what_was_built_and_needs():
    part = dict(name="npu-custom-ops", version=custom.__version__, **{"bom-ref": "ours"})
    needs = dict(ref="ours", dependsOn=["torch==2.15.0", "numpy==2.3.5"])
    bill = dict(components=[part], dependencies=[needs])
    assert missing(bill) == []
    lacking = [f"{name}, which npu-custom-ops requires" for name in ("numpy", "torch")]
    assert missing(bill | dict(dependencies=[])) == lacking
    older = dict(components=[part | dict(version="0")])
    assert missing(bill | older) == [f"npu-custom-ops {custom.__version__}"]


def test_ops_open_no_connection_and_unpickle_nothing(device):
    """By the interpreter's own audit: every op is called where either would be an error."""
    code = """
import sys

def forbid(event, _):
    if event.startswith(("socket.connect", "socket.getaddrinfo", "urllib", "http", "pickle")):
        raise AssertionError(event)

import torch
from custom import info
from custom.dispatch.register import overload
from custom.dispatch.registry import SPECS
from tests.support.samples import sample
sys.addaudithook(forbid)
where = torch.device(sys.argv[1])
for spec in SPECS:
    with torch.no_grad():
        overload(spec)(**sample(spec.name, where, torch.bfloat16))
assert list(info.report())
print(len(SPECS), "ops")
"""
    done = subprocess.run(
        [sys.executable, "-c", code, device.type],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0 and done.stdout.endswith(" ops\n"), done.stderr[-2000:]
